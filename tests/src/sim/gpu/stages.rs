//! Pipelines alone: a test plays their NIC loops, turn by turn, and their framework.
//!
//! What the machine sees of mistakes is looked at after every turn, and a test overwrites a slot as
//! soon as it may, so what a pipeline says too early is found whatever the delays are.

use super::machine::Actor;
use super::{Machine, check, install, libraries, machine};
use bps_engine::base::{DType, Epoch, Key, Operation, Rank};
use bps_engine::lane::Endpoint;
use bps_engine::ring::Mpsc;
use bps_engine::transport::sim::{Sim, SimNetwork};
use bps_engine::transport::{LaneId, Link, Transport, Waker};
use bps_worker::cuda::{Device, EventPool, PooledEvent, Stream};
use bps_worker::gpu::order_lanes::OrderLanes;
use bps_worker::gpu::{Assembled, Assembly, Pipeline};
use bps_worker::host::switches::Switches;
use bps_worker::rounds::handover::{FromGpu, GpuInbox, GpuPush, GpuThread, Progress, ToGpu};
use bps_worker::rounds::{PartOf, Plan, PlanPart, Slot, Staging};
use bps_worker::task::Task;
use bps_worker::{Error, Handle};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Largest part.
const SLOT_BYTES: usize = 4096;
/// How long NCCL may take to enqueue.
const PATIENCE: Duration = Duration::from_secs(30);
/// Longest time that passes between two turns.
const TURN: Duration = Duration::from_millis(10);

/// The pipelines of a host.
pub struct Stages {
    seed: u64,
    network: SimNetwork,
    stages: Vec<Stage>,
    has_servers: bool,
    /// Parts that were planned, each with a key of its own.
    parts: u64,
}

/// What the pipeline of a rank has in the host.
#[derive(Clone, Copy)]
struct Room {
    slots: usize,
    /// Bytes for tensors that have memory of their own.
    staging: usize,
    /// Their results land apart from what is sent.
    keeps: bool,
}

/// A tensor that was pushed.
#[derive(Clone)]
pub struct Pushed {
    handle: Handle,
    source: u64,
    target: u64,
    bytes: usize,
}

/// One of them.
struct Stage {
    number: usize,
    device: Device,
    events: EventPool,
    /// For a push once the GPU has failed.
    spare: Option<Arc<PooledEvent>>,
    /// The framework's.
    stream: Stream,
    /// None once it has ended.
    pipeline: Option<Pipeline>,
    inbox: GpuInbox,
    outbox: Mpsc<FromGpu>,
    to_land: Vec<Slot>,
    /// How far copies are into memory that tensors have of their own.
    staged: Option<Progress>,
    nic_ended: Arc<AtomicBool>,
    job_over: Arc<OnceLock<Error>>,
}

impl Stages {
    /// The pipelines of so many ranks of one host, with so many slots each. Sums go through
    /// servers, or no further than this host.
    #[must_use]
    pub fn new(seed: u64, ranks: u32, slots: usize, has_servers: bool) -> Stages {
        Stages::with(seed, ranks, Room { slots, staging: 0, keeps: false }, has_servers)
    }

    /// The pipeline of a rank alone on its host, whose tensors have memory of their own there as
    /// far as so many bytes go, and so many slots for others. Results land apart from what is sent
    /// if it `keeps` both.
    #[must_use]
    pub fn staged(seed: u64, slots: usize, staging: usize, keeps: bool) -> Stages {
        Stages::with(seed, 1, Room { slots, staging, keeps }, true)
    }

    fn with(seed: u64, ranks: u32, room: Room, has_servers: bool) -> Stages {
        let network = SimNetwork::new(seed);
        install(Some(Machine::new(seed, ranks as usize)));
        let all: Vec<Rank> = (0..ranks).map(Rank).collect();
        let mut links: Vec<Vec<(Rank, Link)>> = all.iter().map(|_| Vec::new()).collect();
        for other in &all[1..] {
            let (first, second) = network.link();
            links[0].push((*other, Link::Sim(first)));
            links[other.0 as usize].push((Rank(0), Link::Sim(second)));
        }
        let open = |(rank, links)| Stage::open(rank, &all, (room, has_servers), &network, links);
        let stages = all.iter().copied().zip(links).map(open).collect();
        Stages { seed, network, stages, has_servers, parts: 0 }
    }

    /// Declares a tensor of f32 with parts of so many bytes, which the ranks hold in turn.
    pub fn plan(&mut self, tensor: u32, operation: Operation, parts: &[usize]) {
        let first = self.parts;
        self.parts += parts.len() as u64;
        let ranks = u32::try_from(self.stages.len()).expect("few");
        let core = self.has_servers.then_some(LaneId(0));
        let (mut offset, mut all) = (0, Vec::new());
        for ((key, holder), bytes) in (first..).zip((0..ranks).cycle()).zip(parts) {
            let (key, holder) = (Key(key), Rank(holder));
            let (owner, owner_rank) = (None, holder);
            all.push(PlanPart { key, offset, bytes: *bytes, core, owner, owner_rank, holder });
            offset += bytes;
        }
        let plan = Arc::new(Plan {
            name: format!("t{tensor}").into(),
            dtype: DType::F32,
            operation,
            device: true,
            among: None,
            receiver: None,
            encoding: None,
            store: None,
            parts: all.into(),
        });
        for stage in &self.stages {
            let (plan, kept) = (Arc::clone(&plan), Box::default());
            stage.tell(ToGpu::Plan { tensor, plan, kept });
        }
    }

    /// The framework of a rank pushes these bytes of a tensor, which its kernel has yet to write.
    pub fn push(&mut self, rank: usize, tensor: u32, priority: i64, bytes: Vec<u8>) -> Pushed {
        self.stages[rank].push(tensor, priority, bytes)
    }

    /// Tells a rank's pipeline something, as its NIC loop does.
    pub fn tell(&mut self, rank: usize, message: ToGpu) {
        self.stages[rank].tell(message);
    }

    /// What a rank's pipeline has said. A slot in which something may land again is overwritten.
    pub fn heard(&mut self, rank: usize) -> Vec<FromGpu> {
        let stage = &mut self.stages[rank];
        let mut heard = Vec::new();
        while let Some(message) = stage.outbox.pop() {
            if let FromGpu::Land(slot) = message {
                write(slot, &[0xee; SLOT_BYTES]);
                stage.to_land.push(slot);
            }
            heard.push(message);
        }
        heard
    }

    /// The result of a part comes to a rank, in a slot if there are bytes of it.
    ///
    /// # Panics
    /// No slot is free.
    pub fn land(&mut self, rank: usize, of: PartOf, bytes: &[u8], over: bool) {
        let stage = &mut self.stages[rank];
        let slot = (!bytes.is_empty()).then(|| {
            let slot = stage.to_land.remove(0);
            write(slot, bytes);
            slot
        });
        let lacks = bps_worker::rounds::Lacks::NOTHING;
        stage.tell(ToGpu::Landed { of, slot, over, lacks });
    }

    /// The result of this round of a part comes to where the part has memory of its own, as the
    /// last thing of the round.
    pub fn land_staged(&mut self, of: PartOf, round: u64, staging: Staging, bytes: &[u8]) {
        write(staging.result(), bytes);
        staging.open(round);
        let (slot, lacks) = (Some(staging.result()), bps_worker::rounds::Lacks::NOTHING);
        self.stages[0].tell(ToGpu::Landed { of, slot, over: true, lacks });
    }

    /// Whether the copy that has this mark is in the memory that its part has of its own, as a NIC
    /// loop sees it.
    ///
    /// # Panics
    /// No tensor has such memory.
    #[must_use]
    pub fn has_fallen(&self, mark: u32) -> bool {
        self.stages[0].staged.expect("some tensors have memory").passed().has(mark)
    }

    /// The caller of a push puts a stream behind its result.
    ///
    /// # Panics
    /// The pipeline is not told for lack of room.
    pub fn want(&mut self, pushed: &Pushed) {
        pushed.handle.want();
        self.stages[0].inbox.want().expect("its queue has room");
    }

    /// Slots of a rank in which something may land.
    #[must_use]
    pub fn free(&self, rank: usize) -> usize {
        self.stages[rank].to_land.len()
    }

    /// One turn of every pipeline, and some time; says whether anything has happened or will.
    pub fn turn(&mut self, limit: Duration) -> bool {
        let now = self.network.now();
        let mut progress = machine(|machine| machine.advance(now));
        for stage in &mut self.stages {
            progress |= stage.turn(now);
        }
        check(self.seed);
        let next = machine(|machine| machine.next());
        let wait = next.map_or(limit, |next| next.saturating_sub(now).min(limit));
        if next.is_none() && !progress {
            return self.network.advance();
        }
        self.network.advance_within(if progress { Duration::ZERO } else { wait });
        true
    }

    /// Lets everything happen that is under way.
    ///
    /// # Panics
    /// That does not end.
    pub fn settle(&mut self) {
        for _ in 0..100_000 {
            if !self.turn(TURN) {
                return;
            }
        }
        panic!("seed {}: it does not come to rest", self.seed);
    }

    /// Lets so much time pass.
    pub fn pass(&mut self, time: Duration) {
        let until = self.network.now() + time;
        while self.network.now() < until {
            let left = until - self.network.now();
            if !self.turn(TURN.min(left)) {
                self.network.advance_within(TURN.min(left));
            }
        }
    }

    /// The time since the host began.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.network.now()
    }

    /// What has come of a push, as its caller sees it when it asks now.
    pub fn outcome(&self, rank: usize, pushed: &Pushed) -> Option<Result<Vec<u8>, Error>> {
        machine(|machine| machine.act(self.stages[rank].number, Actor::Framework));
        if !pushed.handle.poll() {
            return None;
        }
        match pushed.handle.wait(Some(Duration::ZERO)) {
            Ok(is_over) => {
                assert!(is_over, "it was over");
                Some(Ok(self.target(pushed)))
            }
            Err(error) => {
                let ranges = [pushed.source, pushed.target];
                machine(|machine| ranges.into_iter().for_each(|at| machine.close(at)));
                check(self.seed);
                Some(Err(error))
            }
        }
    }

    /// What the caller of a push has.
    #[must_use]
    pub fn handle_of(&self, pushed: &Pushed) -> Handle {
        pushed.handle.clone()
    }

    /// Whether the abort of a collective, or the failure of a GPU, has left something in the place
    /// of a result that was enqueued.
    #[must_use]
    pub fn is_lost(&self, rank: usize, pushed: &Pushed) -> bool {
        let number = self.stages[rank].number;
        machine(|machine| machine.stands(number) || machine.memory.is_spoilt(pushed.target))
    }

    /// What is in the place of a result.
    #[must_use]
    pub fn target(&self, pushed: &Pushed) -> Vec<u8> {
        let range = |machine: &mut Machine| {
            machine.memory.bytes(pushed.target, pushed.bytes).map(|bytes| bytes.to_vec())
        };
        machine(range).expect("nobody has given it back")
    }

    /// The GPU of a rank fails some time from now.
    pub fn fail(&mut self, rank: usize) {
        let number = self.stages[rank].number;
        machine(|machine| machine.fail_soon(number));
    }

    /// A rank whose GPU has failed pushes a tensor once more, with an event that was made before.
    ///
    /// # Panics
    /// It has done so already.
    pub fn push_broken(&mut self, rank: usize, tensor: u32) -> Pushed {
        let stage = &mut self.stages[rank];
        let ready = stage.spare.take().expect("it does this once");
        let (source, target) = machine(|machine| (machine.allocate(4), machine.allocate(4)));
        let task = Arc::new(Task::default());
        let handle = Handle::of(&task);
        let push = Box::new(GpuPush { source, target, priority: 0, task, ready });
        stage.inbox.push(tensor, push).expect("its queue has room");
        Pushed { handle, source, target, bytes: 4 }
    }

    /// Whether the GPU of a rank copies something to the host or from there.
    #[must_use]
    pub fn is_copying(&self, rank: usize) -> bool {
        machine(|machine| machine.is_copying(self.stages[rank].number))
    }

    /// What is at work on the GPU of a rank hangs from now on.
    pub fn hang(&mut self, rank: usize) {
        let number = self.stages[rank].number;
        machine(|machine| machine.stop(number));
    }

    /// The NIC loop of a rank ends, for this reason if not in good order.
    pub fn end(&mut self, rank: usize, why: Option<Error>) {
        let stage = &self.stages[rank];
        if let Some(why) = why {
            stage.job_over.set(why).expect("a job ends once");
        }
        stage.nic_ended.store(true, Ordering::Release);
    }

    /// Whether the pipeline of a rank has ended.
    #[must_use]
    pub fn has_ended(&self, rank: usize) -> bool {
        self.stages[rank].pipeline.is_none()
    }
}

impl Stage {
    fn open(
        rank: Rank,
        all: &[Rank],
        (room, has_servers): (Room, bool),
        network: &SimNetwork,
        links: Vec<(Rank, Link)>,
    ) -> Stage {
        let number = rank.0 as usize;
        let device = libraries().device(rank.0).expect("the device exists");
        device.make_current().expect("it has a context");
        machine(|machine| machine.act(number, Actor::Engine));
        let events = EventPool::new(&device, 1).expect("events can be made");
        let spare = Some(Arc::new(events.take().expect("events can be made")));
        let stream = Stream::new(&device).expect("streams can be made");
        let waker = Waker::new().expect("an eventfd");
        let size = u32::try_from(all.len()).expect("few");
        let host = (size > 1).then(|| {
            let id = [0; 128];
            let nccl = libraries().nccl();
            let comm = nccl.comm(&device, &id, size, rank.0, None, PATIENCE, || true);
            let sim = Transport::Sim(Sim::new(network.clone()));
            let endpoint = Endpoint::new(vec![sim], waker.clone());
            let lanes = OrderLanes::new(endpoint, rank, Epoch(0), links);
            (comm.expect("NCCL starts"), lanes.expect("simulated lanes"))
        });
        let (nic_ended, job_over) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let assembly = Assembly {
            device: device.clone(),
            events: events.clone(),
            host,
            waker,
            rank,
            switches: Switches::new(all.to_vec(), size),
            has_servers,
            slots: room.slots,
            slot_bytes: SLOT_BYTES,
            roots: false,
            group_size: 2,
            patience: PATIENCE,
            stall_report: Duration::from_secs(5),
            inbox: 256,
            staging: room.staging,
            keeps: room.keeps,
            numa_node: None,
            nic_waker: Waker::new().expect("an eventfd"),
            nic_ended: Arc::clone(&nic_ended),
            job_over: Arc::clone(&job_over),
            bouncing: Arc::default(),
        };
        let Assembled { pipeline, inbox, to, .. } = assembly.assemble().expect("it has all");
        let GpuThread { outbox, to_land, staged, .. } = to;
        let pipeline = Some(pipeline);
        Stage {
            number,
            device,
            events,
            spare,
            stream,
            pipeline,
            inbox,
            outbox,
            to_land,
            staged,
            nic_ended,
            job_over,
        }
    }

    fn tell(&self, message: ToGpu) {
        assert!(self.inbox.tell(message).is_ok(), "its queue has room");
    }

    fn push(&mut self, tensor: u32, priority: i64, bytes: Vec<u8>) -> Pushed {
        machine(|machine| machine.act(self.number, Actor::Framework));
        let (stream, length) = (self.stream.raw(), bytes.len());
        let (source, target) = machine(|machine| {
            let (source, target) = (machine.allocate(length), machine.allocate(length));
            machine.fill((stream - super::cuda::STREAM) / 16, source, bytes);
            (source, target)
        });
        let ready = self.events.take().expect("events can be made");
        // SAFETY: the stream is this device's, and lives as long.
        unsafe { ready.record_raw(stream) }.expect("the device is there");
        let (task, ready) = (Arc::new(Task::default()), Arc::new(ready));
        let handle = Handle::of(&task);
        let push = Box::new(GpuPush { source, target, priority, task, ready });
        self.inbox.push(tensor, push).expect("its queue has room");
        Pushed { handle, source, target, bytes: length }
    }

    fn turn(&mut self, now: Duration) -> bool {
        let Some(pipeline) = &mut self.pipeline else { return false };
        machine(|machine| machine.act(self.number, Actor::Engine));
        self.device.make_current().expect("a thread can take a context");
        if !self.nic_ended.load(Ordering::Acquire) {
            return pipeline.step(now);
        }
        let is_over = pipeline.end(now);
        if is_over {
            self.pipeline = None;
        }
        is_over
    }
}

/// What is in a slot, in so many bytes of it.
#[must_use]
pub fn read(slot: Slot, bytes: usize) -> Vec<u8> {
    assert!(bytes <= SLOT_BYTES, "a slot has no more");
    // SAFETY: the slot is in memory of a pipeline that a test holds, and nobody writes there: the
    // pipeline has said that its copy is done.
    unsafe { std::slice::from_raw_parts(slot.at(), bytes) }.to_vec()
}

fn write(slot: Slot, bytes: &[u8]) {
    assert!(bytes.len() <= SLOT_BYTES, "a slot has no more");
    // SAFETY: as in `read`; what it was read for is done, as the pipeline has said.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), slot.at(), bytes.len()) };
}
