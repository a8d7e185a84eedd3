//! A rank with a GPU: its pipeline, which is stepped, and its framework, which pushes tensors that
//! its kernels have yet to write.

use super::machine::Actor;
use super::{libraries, machine};
use bps_engine::base::{Epoch, Rank};
use bps_engine::lane::Endpoint;
use bps_engine::transport::sim::Random;
use bps_engine::transport::{Link, Waker};
use bps_worker::cuda::{Device, EventPool, PooledEvent, Stream};
use bps_worker::error::Closed;
use bps_worker::gpu::order_lanes::OrderLanes;
use bps_worker::gpu::{Assembled, Assembly, Pipeline};
use bps_worker::host::switches::Switches;
use bps_worker::job::nic_loop::NicLoop;
use bps_worker::rounds::handover::{GpuInbox, GpuPush, GpuThread};
use bps_worker::task::Task;
use bps_worker::{Error, Handle};
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Events that wait for their use; more are made when they are needed.
const EVENTS: usize = 4;
/// How long NCCL may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a pipeline's thread may have something else to do, at most.
const LATE_NS: u64 = 500_000;

/// Where a rank's pipeline is.
pub(in crate::sim) struct Spot {
    pub(in crate::sim) rank: Rank,
    pub(in crate::sim) switches: Switches,
    pub(in crate::sim) has_servers: bool,
    pub(in crate::sim) lanes: usize,
    pub(in crate::sim) slot_bytes: usize,
    /// The job goes on without servers that die.
    pub(in crate::sim) keeps: bool,
    pub(in crate::sim) roots: bool,
    pub(in crate::sim) nic_waker: Waker,
    /// Of the pipeline and its lanes.
    pub(in crate::sim) waker: Waker,
    pub(in crate::sim) epoch: Epoch,
    pub(in crate::sim) endpoint: Endpoint,
    pub(in crate::sim) order: Vec<(Rank, Link)>,
    pub(in crate::sim) stall_report: Duration,
}

/// See the [module](self).
pub(in crate::sim) struct SimGpu {
    number: usize,
    device: Device,
    events: EventPool,
    /// The framework's.
    stream: Stream,
    pipeline: Option<Pipeline>,
    nic_ended: Arc<AtomicBool>,
    over: Arc<OnceLock<Error>>,
    late_until: Duration,
    was_busy: bool,
    inbox: GpuInbox,
    /// What callers push when that queue is full.
    backlog: VecDeque<(u32, Box<GpuPush>)>,
    /// The pipeline is to hear of handles that are wanted.
    wants: bool,
    /// The framework waits for its stream in the driver, and nobody else of the process gets in.
    is_freeing: Cell<bool>,
    /// There is no other rank on the host.
    is_alone: bool,
}

impl SimGpu {
    /// Opens the GPU of this number; the second is for the NIC loop.
    pub(in crate::sim) fn open(
        spot: Spot,
        number: usize,
        random: &mut Random,
    ) -> (SimGpu, GpuThread) {
        let ordinal = u32::try_from(number).expect("few devices");
        let device = libraries().device(ordinal).expect("the device exists");
        device.make_current().expect("it has a context");
        machine(|machine| machine.act(number, Actor::Engine));
        let events = EventPool::new(&device, EVENTS).expect("events can be made");
        let stream = Stream::new(&device).expect("streams can be made");
        let Spot { rank, switches, .. } = spot;
        let line = switches.line(rank).to_vec();
        // The ranks of a communicator know its name by themselves.
        let mut id = [0; 128];
        id[..4].copy_from_slice(&line[0].0.to_le_bytes());
        let place = line.iter().position(|one| *one == rank).expect("it is of its own line");
        let number_of = |value: usize| u32::try_from(value).expect("few ranks");
        let (size, place) = (number_of(line.len()), number_of(place));
        let (waker, links) = (spot.waker, spot.order);
        let is_alone = switches.ranks().len() == 1;
        let host = (!is_alone).then(|| {
            let nccl = libraries().nccl();
            let comm = nccl.comm(&device, &id, size, place, None, PATIENCE, || true);
            let lanes = OrderLanes::new(spot.endpoint, rank, spot.epoch, links);
            (comm.expect("NCCL starts"), lanes.expect("simulated lanes"))
        });
        let (nic_ended, over) = (Arc::new(AtomicBool::new(false)), Arc::new(OnceLock::new()));
        let assembly = Assembly {
            device: device.clone(),
            events: events.clone(),
            host,
            waker,
            rank,
            switches,
            has_servers: spot.has_servers,
            // As few as the engine ever has, or some more.
            slots: spot.lanes + 2 + random.index(4),
            slot_bytes: spot.slot_bytes,
            roots: spot.roots,
            group_size: 1 + random.index(6),
            patience: PATIENCE,
            stall_report: spot.stall_report,
            inbox: 1 << random.below(7),
            // None, for some tensors, for all.
            staging: [0, 4096, 1 << 20][random.index(3)],
            keeps: spot.keeps,
            numa_node: None,
            nic_waker: spot.nic_waker,
            nic_ended: Arc::clone(&nic_ended),
            job_over: Arc::clone(&over),
            bouncing: Arc::default(),
        };
        let Assembled { pipeline, inbox, to, .. } = assembly.assemble().expect("it has all");
        let (pipeline, late_until) = (Some(pipeline), Duration::ZERO);
        let was_busy = false;
        let gpu = SimGpu {
            number,
            device,
            events,
            stream,
            pipeline,
            nic_ended,
            over,
            late_until,
            was_busy,
            inbox,
            backlog: VecDeque::new(),
            wants: false,
            is_freeing: Cell::new(false),
            is_alone,
        };
        (gpu, to)
    }

    /// A turn of the pipeline's thread, or none: it may be late.
    pub(in crate::sim) fn step(
        &mut self,
        nic: &mut NicLoop,
        now: Duration,
        random: &mut Random,
    ) -> bool {
        if nic.ended() && !self.nic_ended.load(Ordering::Acquire) {
            nic.end(&self.nic_ended, &self.over);
        }
        self.hand_over();
        if self.pipeline.is_none() || self.is_blocked() || self.is_late(now, random) {
            return false;
        }
        let Some(pipeline) = &mut self.pipeline else { return false };
        machine(|machine| machine.act(self.number, Actor::Engine));
        self.device.make_current().expect("a thread can take a context");
        if !self.nic_ended.load(Ordering::Acquire) {
            self.was_busy = pipeline.step(now);
            return self.was_busy;
        }
        let is_over = pipeline.end(now);
        if is_over {
            self.pipeline = None;
        }
        is_over
    }

    /// The framework puts its stream behind the result of a push, and does not wait for it.
    fn want(&mut self, handle: &Handle) {
        handle.want();
        self.wants = true;
    }

    /// The framework puts its stream behind some of these that it has not decided about.
    pub(in crate::sim) fn want_some<'a>(
        &mut self,
        flights: impl Iterator<Item = (&'a Handle, &'a mut GpuFlight)>,
        random: &mut Random,
    ) {
        for (handle, flight) in flights {
            if !std::mem::replace(&mut flight.is_decided, true) && random.once_in(2) {
                self.want(handle);
            }
        }
    }

    /// As callers do: hands over what they push, or fails it once the pipeline has ended.
    fn hand_over(&mut self) {
        while let Some((tensor, push)) = self.backlog.pop_front() {
            if let Err(back) = self.inbox.push(tensor, push) {
                self.backlog.push_front((tensor, back));
                break;
            }
        }
        if self.wants && self.backlog.is_empty() && self.inbox.want().is_ok() {
            self.wants = false;
            self.inbox.wake();
        }
        if self.inbox.has_ended() {
            let closed = Error::Closed(Closed::Left);
            self.inbox.refuse(self.over.get().unwrap_or(&closed));
        }
    }

    /// Whether the pipeline's thread has something else to do, or begins to have.
    fn is_late(&mut self, now: Duration, random: &mut Random) -> bool {
        if self.was_busy && now >= self.late_until && random.once_in(4) {
            let limit = if random.once_in(10) { LATE_NS } else { LATE_NS / 50 };
            self.late_until = now + Duration::from_nanos(1 + random.below(limit));
            machine(|machine| machine.nudge(self.late_until));
        }
        now < self.late_until
    }

    /// Whether the process is in the driver, where it frees memory and waits for the GPU.
    pub(in crate::sim) fn is_blocked(&self) -> bool {
        let is_idle = || machine(|machine| machine.query_stream(self.stream_number()));
        let is_over = || machine(|machine| machine.stands(self.number)) || is_idle();
        if self.is_freeing.get() && is_over() {
            self.is_freeing.set(false);
        }
        self.is_freeing.get()
    }

    /// Whether the pipeline has ended.
    pub(in crate::sim) fn has_ended(&self) -> bool {
        self.pipeline.is_none()
    }

    /// The framework pushes tensors of these bytes, which it has computed when its stream comes to
    /// that.
    pub(in crate::sim) fn push(&mut self, tensors: Vec<GpuTensor>) -> Vec<(Handle, GpuFlight)> {
        machine(|machine| machine.act(self.number, Actor::Framework));
        let stream = self.stream.raw();
        let mut pushed = Vec::new();
        for tensor in tensors {
            let bytes = tensor.bytes.len();
            let (source, target) = machine(|machine| {
                let target = machine.allocate(bytes);
                let source = if tensor.in_place { target } else { machine.allocate(bytes) };
                machine.fill(self.stream_number(), source, tensor.bytes);
                (source, target)
            });
            if tensor.is_root && source != target && bytes > 0 {
                // SAFETY: the machine has given this memory, and looks after it.
                let copied = unsafe { self.device.copy_in(stream, target, source, bytes) };
                self.must(copied);
            }
            let flight = GpuFlight { source, target, bytes, reads: None, is_decided: false };
            pushed.push((tensor.id, tensor.priority, flight));
        }
        let ready = self.ready();
        let push = |(tensor, priority, flight): (u32, i64, GpuFlight)| {
            let task = Arc::new(Task::default());
            let (source, target) = (flight.source, flight.target);
            let (handle, ready) = (Handle::of(&task), Arc::clone(&ready));
            let push = Box::new(GpuPush { source, target, priority, task, ready });
            (handle, flight, tensor, push)
        };
        let pushed: Vec<_> = pushed.into_iter().map(push).collect();
        let mut handles = Vec::new();
        for (handle, flight, tensor, push) in pushed {
            self.backlog.push_back((tensor, push));
            handles.push((handle, flight));
        }
        self.hand_over();
        handles
    }

    fn ready(&self) -> Arc<PooledEvent> {
        let ready = self.events.take().expect("events can be made");
        // SAFETY: the stream is this device's, and lives as long.
        let recorded = unsafe { ready.record_raw(self.stream.raw()) };
        self.must(recorded);
        Arc::new(ready)
    }

    /// A call fails only where the device has.
    fn must<E: std::fmt::Display>(&self, result: Result<(), E>) {
        if let Err(error) = result {
            assert!(
                machine(|machine| machine.stands(self.number)),
                "device {}: {error}",
                self.number
            );
        }
    }

    fn stream_number(&self) -> usize {
        (self.stream.raw() - super::cuda::STREAM) / 16
    }

    /// The handle of a push is told: what came of it, once that can be seen.
    pub(in crate::sim) fn land(
        &self,
        handle: &Handle,
        flight: &mut GpuFlight,
        random: &mut Random,
    ) -> Landed {
        machine(|machine| machine.act(self.number, Actor::Framework));
        let stands = machine(|machine| machine.stands(self.number));
        if let Err(error) = handle.wait(Some(Duration::ZERO)) {
            // The engine is done with the memory from now on; the framework's stream may not be.
            flight.take_back();
            let is_idle = machine(|machine| machine.query_stream(self.stream_number()));
            if is_idle {
                flight.give_back();
            }
            return if is_idle || stands { Landed::Failed(error) } else { Landed::NotYet };
        }
        if stands {
            return Landed::Lost;
        }
        match flight.reads {
            // Its stream reads what comes behind the result, or it waits itself.
            None if random.once_in(2) || handle.poll() => {
                // SAFETY: the stream is this device's, and lives as long.
                let waits =
                    unsafe { Handle::make_wait(std::slice::from_ref(handle), self.stream.raw()) };
                self.must(waits);
                let (stream, GpuFlight { target, bytes, .. }) = (self.stream_number(), *flight);
                flight.reads = Some(machine(|machine| machine.read(stream, target, bytes)));
                // Where ranks share a host, NCCL keeps no such promise either.
                self.is_freeing.set(self.is_alone && random.once_in(4));
                Landed::NotYet
            }
            None => Landed::NotYet,
            Some(number) => match machine(|machine| machine.take(number)) {
                Some((bytes, is_spoilt)) => {
                    flight.give_back();
                    if is_spoilt { Landed::Lost } else { Landed::Bytes(bytes) }
                }
                None => Landed::NotYet,
            },
        }
    }

    /// The process dies.
    pub(in crate::sim) fn kill(self) {
        machine(|machine| machine.kill(self.number));
    }

    /// The device fails.
    pub(in crate::sim) fn fail(&self) {
        machine(|machine| machine.fail_soon(self.number));
    }
}

/// A tensor that is pushed.
pub(in crate::sim) struct GpuTensor {
    pub(in crate::sim) id: u32,
    pub(in crate::sim) priority: i64,
    pub(in crate::sim) bytes: Vec<u8>,
    pub(in crate::sim) in_place: bool,
    pub(in crate::sim) is_root: bool,
}

/// A push under way.
#[derive(Clone, Copy)]
pub(in crate::sim) struct GpuFlight {
    source: u64,
    target: u64,
    bytes: usize,
    /// The framework's kernel that reads the result.
    reads: Option<usize>,
    /// Whether the framework's stream waits for its result was decided.
    is_decided: bool,
}

/// What came of a push.
pub(in crate::sim) enum Landed {
    NotYet,
    /// The result.
    Bytes(Vec<u8>),
    /// It was there, and the end of the job has taken it away.
    Lost,
    Failed(Error),
}

impl GpuFlight {
    /// The engine may not use the memory any more.
    fn take_back(&self) {
        machine(|machine| {
            machine.close(self.target);
            machine.close(self.source);
        });
    }

    /// The memory is somebody else's from now on.
    fn give_back(&self) {
        machine(|machine| {
            machine.free(self.target);
            if self.source != self.target {
                machine.free(self.source);
            }
        });
    }
}
