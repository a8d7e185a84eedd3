//! The pipeline of a GPU: takes pushed tensors from the GPU to the NIC loop and results back, on a
//! thread of its own.
//!
//! ```text
//! gradient complete ▶ reduce in the host ▶ copy down ▶ NIC loop ══▶ servers
//! result            ◀ gather in the host ◀ copy up   ◀ NIC loop ◀══ servers
//! ```
//!
//! Each stage is a queue, and each queue is drained as far as it goes in every turn, so all stages
//! overlap. The host never waits for the GPU: streams wait for each other by events, and this
//! thread reads from memory how far they are ([`Track`]). A stage with nothing to do is not there:
//! alone on its host a rank has no reduce and no gather, and where all ranks are on one host there
//! is one all-reduce and nothing else, unless that host has several PCIe switches: then NCCL joins
//! the ranks of each, and the NIC loops sum across them.
//!
//! Within a host all ranks must call NCCL in the same order. The first rank of the host gives it:
//! each rank tells it which gradients are complete and which results have come, and it tells all
//! which rows to reduce and to gather next, the most urgent first among those that all have. What
//! was ordered is submitted to NCCL one batch after the other; while NCCL enqueues one, all else
//! goes on.
//!
//! Tensors with memory of their own take another way between the first stage and the last
//! ([`staged`]), on which their callers are let go sooner.
//!
//! Invariant: what the GPU copies from or to stays valid until the copy is done: slots are given
//! back when their track has passed them, and tensors belong to the engine until their handle says
//! otherwise.

mod copies;
mod ending;
mod host;
mod keeping;
mod order;
mod plan;
mod rounds;
mod staged;
mod timeline;
mod turns;

use self::ending::{Drained, End};
use self::keeping::Keeping;
pub(super) use self::staged::Staged;
use self::timeline::Trace;
use self::turns::{Of, Turns};
use super::coding::Coding;
use super::direct::Direct;
use super::order_lanes::{Heard, OrderLanes};
use super::rows::Row;
use crate::base::error::Error;
use crate::base::task::Task;
use crate::cuda::{Coder, Comm, Event, EventPool, GpuError, KeptMemory};
use crate::cuda::{Passed, Pinned, PooledEvent, Track};
use crate::host::gather::Gathers;
use crate::host::switches::Switches;
use crate::rounds::handover::{FromGpu, GpuInbox, GpuPush, ToGpu};
use crate::rounds::{Lacks, Plan, Slot};
use bps_engine::base::{Key, KeyMap, Rank};
use bps_engine::harness::{Idler, Step};
use bps_engine::ring::Mpsc;
use bps_engine::transport::Waker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How often this thread looks for stalls.
const TICK: Duration = Duration::from_millis(500);
/// How often the driver and NCCL are asked whether something went wrong behind the calls.
const WATCH: Duration = Duration::from_millis(100);
/// How long it sleeps between two looks while the GPU is at work for long.
const NAP: Duration = Duration::from_micros(30);
/// The same once the NIC loop has ended.
const LOOK: Duration = Duration::from_millis(1);
/// Copies, and bytes of them, that are enqueued and get one mark together at most. Each call of the
/// driver takes locks that the framework's kernel launches need, so small tensors share what they
/// can.
pub(super) const COPIES_OF_MARK: usize = 32;
pub(super) const BYTES_OF_MARK: usize = 512 << 10;

/// A round of a tensor under way.
struct Run {
    push: Box<GpuPush>,
    /// When it began.
    since: Duration,
    /// Rows whose result is not enqueued, and parts with which the lanes are not done.
    left: u32,
    /// The host may reduce it, as far as this rank is concerned.
    is_ready: bool,
    /// Its caller was told, before the result has come.
    is_told: bool,
    /// What its results lack that have landed.
    lacks: Lacks,
}

#[derive(Clone, Copy)]
struct RowState {
    ordered: Ordered,
    /// Parts of this rank whose result has not landed.
    missing: u32,
}

/// What the first rank of the host has ordered of a row.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Ordered {
    Nothing,
    Reduce,
    Gather,
}

/// Rows that go to NCCL in one group of calls.
struct Batch {
    order: Ordered,
    rows: Vec<Of>,
}

/// A copy under way.
#[derive(Clone, Copy)]
struct Copying {
    /// It is done once its track has passed this.
    mark: u32,
    of: Of,
    round: u64,
    slot: Slot,
}

struct DeviceTensor {
    plan: Arc<Plan>,
    rows: Vec<Row>,
    /// By part: its row.
    row_of: Box<[u32]>,
    /// By row, of the run.
    states: Box<[RowState]>,
    /// By part and switch, at the first rank of the host: whether its holder has its result of the
    /// run.
    landed: Box<[bool]>,
    /// One all-reduce is all there is to do: no server takes part, and no other switch.
    is_local: bool,
    /// By part, if it has memory of its own in the host.
    staging: Option<Box<[staged::Part]>>,
    /// What encodes and decodes its parts on their way to slots and back, if the GPU does.
    coder: Option<Coder>,
    /// What that keeps between rounds.
    kept: Option<KeptMemory>,
    /// A round of it has come through, so all ranks mean the same by its name.
    is_proved: bool,
    /// Parts that this rank holds once its switch has reduced them.
    own: u32,
    /// Pushes that have come, of which `round` have begun.
    pushed: u64,
    round: u64,
    /// Factors for what it keeps, each with how many rounds begin before it.
    rescales: VecDeque<(u64, f32)>,
    run: Option<Run>,
    waiting: VecDeque<Box<GpuPush>>,
    /// Where its last result ends, until a round has begun behind it.
    written: Written,
    poisoned: Option<Error>,
}

/// What has come for a tensor ahead of its plan.
enum Early {
    Push(Box<GpuPush>),
    /// For what it keeps.
    Factor(f32),
}

/// The end of a tensor's last result, behind which its next round begins.
#[derive(Default)]
enum Written {
    /// Nothing is being written.
    #[default]
    Before,
    /// All of it is enqueued, and its mark comes with those of others in this turn.
    Unmarked,
    /// Once its track has passed this, as the event tells other streams.
    Behind(u32, Arc<PooledEvent>),
}

/// What the pipeline is given when it begins.
pub(super) struct Parts {
    /// Streams: where gradients are waited for, down, up.
    pub(super) tracks: [Track; 3],
    /// The collectives of the host, if it has several ranks.
    pub(super) host: Option<Host>,
    /// Two marks, one behind the reductions and one behind the copies up.
    pub(super) marks: [Event; 2],
    /// For the marks behind results.
    pub(super) events: EventPool,
    /// To send from.
    pub(super) slots: Vec<Slot>,
    /// What the words of the tracks are in, and the slots in the host's memory.
    pub(super) memory: Pinned,
    /// The slots in the GPU's memory.
    pub(super) direct: Direct,
    /// For tensors with memory of their own, if there are to be some.
    pub(super) staged: Option<Staged>,
    /// Largest part that a slot takes.
    pub(super) slot_bytes: usize,
    pub(super) rank: Rank,
    pub(super) inbox: GpuInbox,
    pub(super) waker: Waker,
    pub(super) outbox: Mpsc<FromGpu>,
    pub(super) nic_waker: Waker,
    pub(super) nic_ended: Arc<AtomicBool>,
    /// Why, if not in good order.
    pub(super) job_over: Arc<OnceLock<Error>>,
    /// As [`Assembly::bouncing`](super::Assembly::bouncing).
    pub(super) bouncing: Arc<AtomicUsize>,
    /// A round that waits longer for a rank of the host is reported.
    pub(super) stall_report: Duration,
}

/// The ranks of this host and their communicator.
pub(super) struct Host {
    pub(super) comm: Comm,
    /// To the first rank, or from it to all others.
    pub(super) lanes: OrderLanes,
    pub(super) track: Track,
    /// The first of their ranks gives the order, and NCCL joins those of this rank's switch.
    pub(super) switches: Switches,
    /// Some of them own all tensors on GPUs.
    pub(super) roots: bool,
    /// Rows in one group of calls, at most.
    pub(super) group_size: usize,
    /// How long NCCL may take to enqueue a batch, which other ranks can delay.
    pub(super) patience: Duration,
}

/// See the [module](self).
pub struct Pipeline {
    ready: Track,
    down: Track,
    up: Track,
    staged: Option<Staged>,
    host: Option<Host>,
    reduced: Event,
    risen: Event,
    events: EventPool,
    /// Marks behind results.
    marks: u64,
    /// Rounds whose last work is enqueued, and is not marked.
    finished: Vec<(u32, Arc<Task>)>,
    /// Copies up, and bytes of them, that are not marked.
    unmarked: (usize, usize),
    /// For what was waited last where gradients are waited for, and the mark behind it.
    last_ready: Option<(Arc<PooledEvent>, u32)>,
    free: Vec<Slot>,
    slots: usize,
    slot_bytes: usize,
    rank: Rank,
    tensors: Vec<Option<DeviceTensor>>,
    /// What has come for tensors whose plans are on their way, in order.
    early: Vec<(u32, Early)>,
    /// Pushes that begin when no result is waited for in a stream.
    kept: VecDeque<(u32, Box<GpuPush>)>,
    /// By the first key of a row.
    keys: KeyMap<Of>,
    /// Tensors whose gradient is not complete, in the order of their marks.
    incomplete: VecDeque<(u32, u32)>,
    /// Parts of this rank that wait for a slot.
    to_copy: Turns,
    /// In the order of their marks.
    falling: VecDeque<Copying>,
    rising: VecDeque<Copying>,
    /// What the first rank of the host orders.
    gathers: Gathers,
    to_reduce: Turns,
    to_gather: Turns,
    /// Rows of a batch whose last word has not come.
    coming: Vec<Of>,
    /// Of batches that are over, for those to come.
    spare: Vec<Vec<Of>>,
    /// What was ordered and waits for its turn.
    orders: VecDeque<Batch>,
    /// What NCCL has not enqueued yet, and since when.
    submitted: Option<(Batch, Duration)>,
    /// What has come from ranks of the host and is being taken.
    heard: Vec<Heard>,
    /// Ranks of the host that have left the job.
    gone: Vec<Rank>,
    /// First keys of tensors of which nothing more is ordered.
    ended: HashSet<Key>,
    /// Tensors on which ranks disagree and of which nothing more is ordered, while something of
    /// them may be under way.
    disputed: Vec<u32>,
    /// Their rounds, until the GPU is done with them.
    drained: Vec<Drained>,
    stalls_told: bool,
    inbox: GpuInbox,
    waker: Waker,
    outbox: Mpsc<FromGpu>,
    /// What did not fit into that queue.
    behind: VecDeque<FromGpu>,
    nic_waker: Waker,
    nic_ended: Arc<AtomicBool>,
    job_over: Arc<OnceLock<Error>>,
    bouncing: Arc<AtomicUsize>,
    stall_report: Duration,
    told: bool,
    failed: Option<GpuError>,
    /// When that is told.
    fails_at: Option<Duration>,
    now: Duration,
    next_tick: Duration,
    next_watch: Duration,
    trace: Trace,
    /// The NIC loop has ended, and this is how far the pipeline's own end is.
    end: Option<End>,
    memory: Option<Pinned>,
    direct: Direct,
    coding: Coding,
    keeping: Keeping,
}

impl Pipeline {
    pub(super) fn new(parts: Parts) -> Pipeline {
        let [ready, down, up] = parts.tracks;
        let [reduced, risen] = parts.marks;
        let peers = parts.host.as_ref().map_or(0, |host| host.switches.ranks().len() - 1);
        Pipeline {
            ready,
            down,
            up,
            staged: parts.staged,
            host: parts.host,
            reduced,
            risen,
            events: parts.events,
            marks: 0,
            finished: Vec::new(),
            unmarked: (0, 0),
            last_ready: None,
            slots: parts.slots.len(),
            free: parts.slots,
            slot_bytes: parts.slot_bytes,
            rank: parts.rank,
            tensors: Vec::new(),
            early: Vec::new(),
            kept: VecDeque::new(),
            keys: KeyMap::default(),
            incomplete: VecDeque::new(),
            to_copy: Turns::default(),
            falling: VecDeque::new(),
            rising: VecDeque::new(),
            gathers: Gathers::new(peers),
            to_reduce: Turns::default(),
            to_gather: Turns::default(),
            coming: Vec::new(),
            spare: Vec::new(),
            orders: VecDeque::new(),
            submitted: None,
            heard: Vec::new(),
            gone: Vec::new(),
            ended: HashSet::new(),
            disputed: Vec::new(),
            drained: Vec::new(),
            stalls_told: false,
            inbox: parts.inbox,
            waker: parts.waker,
            outbox: parts.outbox,
            behind: VecDeque::new(),
            nic_waker: parts.nic_waker,
            nic_ended: parts.nic_ended,
            job_over: parts.job_over,
            bouncing: parts.bouncing,
            stall_report: parts.stall_report,
            told: false,
            failed: None,
            fails_at: None,
            now: Duration::ZERO,
            next_tick: TICK,
            next_watch: WATCH,
            trace: Trace::new(parts.rank),
            end: None,
            memory: Some(parts.memory),
            direct: parts.direct,
            coding: Coding::default(),
            keeping: Keeping::default(),
        }
    }

    /// Runs until the NIC loop has ended, and ends. The thread has the GPU's context.
    pub(crate) fn run(mut self, mut idler: Idler) {
        while !self.nic_ended.load(Ordering::Acquire) {
            let progress = self.step(idler.now());
            idler.expect(self.inbox.is_busy());
            if idler.step(progress) == Step::Sleep {
                self.sleep();
            }
        }
        while !self.end(idler.now()) {
            std::thread::sleep(LOOK);
            idler.step(false);
        }
    }

    /// One turn: every queue as far as it goes; says whether there was anything to do. `now` is the
    /// time since any fixed moment.
    pub fn step(&mut self, now: Duration) -> bool {
        self.now = now;
        let mut progress = false;
        while let Some(message) = self.inbox.pop() {
            progress = true;
            let result = self.take(message);
            self.check(result);
        }
        progress |= self.hear();
        self.mark_ends();
        if self.failed.is_none() {
            let result = self.advance();
            progress |= matches!(result, Ok(true));
            self.check(result.map(drop));
            self.mark_ends();
        }
        if self.failed.is_none() {
            let enqueued = self.enqueue_wanted();
            self.check(enqueued);
        }
        if now >= self.next_watch {
            self.next_watch = now + WATCH;
            // The end of a rank that has left in good order is no error.
            if let Some(host) = self.host.as_ref().filter(|_| self.gone.is_empty()) {
                let watched = host.comm.async_error();
                self.check(watched);
            }
            // A GPU that has failed moves no word, and says so only to who asks.
            let asked = self.up.stream().is_idle();
            self.check(asked.map(drop));
            self.tell_failure();
        }
        if now >= self.next_tick {
            self.next_tick = now + TICK;
            self.look_for_stalls();
        }
        if let Some(host) = &mut self.host {
            host.lanes.flush();
        }
        progress |= self.hand_over();
        self.wake_nic();
        progress
    }

    /// If it was told something.
    fn wake_nic(&mut self) {
        if std::mem::take(&mut self.told) {
            self.nic_waker.wake();
        }
    }

    /// What has moved on the GPU moves on here.
    fn advance(&mut self) -> Result<bool, GpuError> {
        let mut progress = false;
        let (host, [up, down, ready]) = self.passed();
        while let Some(&copy) = self.falling.front()
            && down.has(copy.mark)
        {
            self.falling.pop_front();
            self.has_fallen(&copy);
            progress = true;
        }
        while let Some(&copy) = self.rising.front()
            && up.has(copy.mark)
        {
            self.rising.pop_front();
            self.has_risen(&copy);
            progress = true;
        }
        // The end of a round before the next one's beginning.
        let staged = self.staged.as_ref().map(|staged| staged.up.passed());
        let passed = [Some(up), host, Some(ready), staged];
        self.trace_staged();
        progress |= self.trace.look(passed, &self.tensors, self.now);
        while let Some(&(mark, tensor)) = self.incomplete.front()
            && ready.has(mark)
        {
            self.incomplete.pop_front();
            self.gradient_complete(tensor);
            progress = true;
        }
        progress |= self.end_moves();
        progress |= self.begin_kept()?;
        progress |= self.carry_out()?;
        progress |= self.copy_down()?;
        progress |= self.end_drained()?;
        Ok(progress)
    }

    /// How far the streams are: that of the host, and those up, down and where gradients are waited
    /// for. Who waits for others is read before them, so that what is seen to be over is never
    /// without what came before.
    fn passed(&self) -> (Option<Passed>, [Passed; 3]) {
        let host = self.host.as_ref().map(|host| host.track.passed());
        (host, [&self.up, &self.down, &self.ready].map(Track::passed))
    }

    /// Sleeps until something comes, or for as long as the GPU may take for something.
    fn sleep(&mut self) {
        let is_watching = !(self.incomplete.is_empty()
            && self.falling.is_empty()
            && self.rising.is_empty()
            && self.submitted.is_none()
            && self.drained.is_empty()
            && !self.keeping.is_busy()
            && !self.trace.is_awaiting()
            && !self.watches_staged()
            && !self.holds_results());
        let limit = if is_watching { NAP } else { TICK };
        let (inbox, nic_ended) = (&self.inbox, &self.nic_ended);
        let is_ready = || !inbox.is_empty() || nic_ended.load(Ordering::Acquire);
        if let Some(host) = &mut self.host {
            return host.lanes.sleep(limit, is_ready);
        }
        self.waker.prepare();
        if !is_ready() {
            let limit = Timespec::try_from(limit).ok();
            let _ = poll(&mut [PollFd::new(&self.waker.fd(), PollFlags::IN)], limit.as_ref());
        }
        self.waker.awake();
    }

    /// To the NIC loop, unless it has ended.
    fn tell(&mut self, message: FromGpu) {
        if self.nic_ended.load(Ordering::Acquire) {
            return;
        }
        self.told = true;
        self.behind.push_back(message);
        self.hand_over();
    }

    /// Hands over what the NIC loop has room for; says whether something is left.
    fn hand_over(&mut self) -> bool {
        while let Some(message) = self.behind.pop_front() {
            if let Err(back) = self.outbox.push(message) {
                self.behind.push_front(back);
                self.told = true;
                return true;
            }
        }
        false
    }

    fn take(&mut self, message: ToGpu) -> Result<(), GpuError> {
        match message {
            ToGpu::Plan { tensor, plan, kept } => return self.on_plan(tensor, plan, &kept),
            ToGpu::Push { tensor, push } => return self.on_push(tensor, push),
            ToGpu::Wanted => self.on_wanted(),
            ToGpu::Sent(slot) => self.free.push(slot),
            ToGpu::Landed { of, slot, over, lacks } => {
                self.on_landed(of, slot, lacks)?;
                return if over { self.one_less(of.tensor) } else { Ok(()) };
            }
            ToGpu::Over(of) => return self.one_less(of.tensor),
            ToGpu::Poisoned { tensor, error } => self.on_poison(tensor, &error),
            ToGpu::ScaleResidues { tensors, factor } => return self.on_scale(&tensors, factor),
            ToGpu::TellKept { tensor, to } => return self.on_tell_kept(tensor, to),
            ToGpu::Keep { tensor, kept, done } => {
                self.on_keep(tensor, &kept)?;
                self.tell(FromGpu::Keep { tensor, kept, done });
            }
            ToGpu::Trace(recorder) => self.trace.switch(recorder, self.now),
        }
        Ok(())
    }
}
