//! The lanes of a worker process: they send parts by priority, land their results, and sum parts
//! with the other ranks of the group first. They know no tensors: a part is pushed, round by round,
//! and once it is over that is said ([`Nic::take_over`]). The data path allocates nothing beyond
//! what its queues have grown to.

mod acts;
mod arriving;
mod choosing;
mod circle;
mod coding;
mod course;
mod ending;
mod granted;
mod invariants;
mod keeping;
mod messages;
mod pace;
mod sending;
mod slots;
mod staged;
mod watch;

#[cfg(test)]
mod tests;

pub use keeping::Move;
pub use messages::{LanePeer, NicConfig, NicStatistics, Report};

use self::choosing::Costs;
use self::circle::Circle;
use self::coding::{Coded, Values};
use self::granted::GrantedSlots;
use self::keeping::Kept;
use self::pace::Pace;
use self::slots::{Gpu, Landings};
use self::staged::Staged;
use crate::host::collect::Peers;
use crate::rounds::{Lacks, Memory, PartId, PartOf, PartPlan, PartPush, Parts, Slot, Staging};
use bps_engine::base::{Key, KeyMap, Operation, Round};
use bps_engine::lane::Endpoint;
use bps_engine::limits::EVENTS_MAX;
use bps_engine::mem::Writable;
use bps_engine::optimize::Act;
use bps_engine::proto::store::Store;
use bps_engine::reduce::{Kernels, kernels};
use bps_engine::ring::Mpsc;
use bps_engine::sched::CreditQueue;
use bps_engine::trace::timeline::{Mark, Recorder};
use bps_engine::transport::{Event, LaneId, Link, Waker};
use bps_engine::wire::{Header, Kind};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// How far the round of a part is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// No round of it is open, or its result is there.
    Idle,
    /// It waits for the group, or in a queue, or its contributions are being added.
    Pushed,
    /// Its contribution was sent: a publication may come.
    Asked,
    /// As `Asked`, and the publication will be written to the slot that was granted for it.
    Granted,
    /// A publication is coming, or waits for a slot.
    Landing,
}

/// A part, and its round that is open or was the last one.
struct Part {
    plan: PartPlan,
    /// Who of the circle sums it with this rank; all where there is no list.
    peers: Peers,
    round: u64,
    stage: Stage,
    priority: i64,
    /// What that round is for, of a tensor with an optimizer.
    act: Act,
    /// Of a tensor of the host: its bytes.
    memory: Option<Memory>,
    /// Of a tensor on the GPU: where the bytes are that are to be sent.
    slot: Option<Slot>,
    /// Likewise: its own memory, if it has some.
    staging: Option<Staging>,
    /// Likewise: where the result is while it goes to the column.
    result: Option<Slot>,
    /// If it is encoded on its way to a server and back.
    coded: Option<Box<Coded>>,
    /// What it keeps in case that its server is lost, if others would go on for that.
    kept: Option<Box<Kept>>,
    /// When it was pushed.
    since: Duration,
    /// When its contribution was sent to a server.
    asked: Duration,
    /// One for a result that is not there, and one for each frame with its memory that was said and
    /// is not sent.
    open: u32,
    /// Of these frames, those that were posted.
    posted: u32,
    /// What its result does not hold.
    lacks: Lacks,
    /// Nobody wants rounds of it any more.
    abandoned: bool,
}

impl Part {
    fn is_open(&self) -> bool {
        self.open > 0
    }

    /// Where its result lands, and the slot that this is; none where it takes any slot.
    fn landing(&self) -> Option<(Writable, Option<Slot>)> {
        let own = self.staging.map(|staging| staging.result());
        let staged = own.map(|slot| (slot.memory(self.plan.bytes), Some(slot)));
        staged.or_else(|| self.memory.map(|memory| (memory.target(), None)))
    }

    /// Whether a result of this round is what it waits for. A stored part is answered with a
    /// version that holds all that this rank has contributed.
    fn awaits(&self, round: Round) -> bool {
        match self.plan.store.and_then(Store::deltas) {
            Some(_) => round.0 >= self.round,
            None => round.0 == self.round,
        }
    }

    /// If it is encoded in this round: an optimizer's slots are set and read as they are.
    fn coded(&self) -> Option<&Coded> {
        self.coded.as_deref().filter(|_| self.act == Act::NONE || self.act.is_step())
    }

    /// Whether this rank's bytes are what a broadcast gives to all.
    fn is_root(&self, config: &NicConfig) -> bool {
        self.plan.operation == Operation::Broadcast(config.rank)
    }
}

enum Receiving {
    Header,
    /// A publication.
    Landing {
        part: PartId,
        header: Header,
        /// Where its bytes come.
        into: Writable,
        /// Where the result is to be; the same, unless the bytes are encoded.
        target: Writable,
        /// That is this slot, and not a tensor.
        slot: Option<Slot>,
    },
    /// A publication that waits for a slot.
    Held {
        part: PartId,
        header: Header,
    },
    /// A contribution of this peer, by its place in its circle; held, or in pieces.
    Contribution {
        peer: usize,
        /// Whether it is of a tensor on GPUs.
        device: bool,
        header: Header,
        /// Bytes of it that have come, and their CRC-32C if the header has one.
        done: usize,
        checksum: u32,
    },
    /// So many bytes that nobody wants any more.
    Unwanted {
        left: usize,
    },
    Closing,
}

struct Lane {
    peer: LanePeer,
    open: bool,
    /// The peer has left in good order: the lane closes once it needs no more of our memory.
    goodbye: bool,
    /// What is sent here carries a checksum.
    checks: bool,
    /// What it carries stays on this host.
    is_local: bool,
    /// This rank has left in good order, and said so here.
    said_goodbye: bool,
    /// Parts of whose memory a frame was posted that is not sent, in the order of the frames.
    posted: VecDeque<PartId>,
    receiving: Receiving,
    /// To a rank: what is to be sent, in order.
    outbox: VecDeque<PartWord>,
}

/// A frame about a part to a rank of the group.
#[derive(Clone, Copy)]
struct PartWord {
    kind: Kind,
    part: PartId,
    round: u64,
    /// Of the payload, if it carries one.
    checksum: Option<u32>,
    /// Of a publication: what it does not hold.
    lacks: Lacks,
}

impl PartWord {
    /// One without a payload.
    fn bare(kind: Kind, part: PartId, round: u64) -> PartWord {
        PartWord { kind, part, round, checksum: None, lacks: Lacks::NOTHING }
    }
}

/// Whether the lanes carry parts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Running,
    /// This rank leaves, and says so.
    Leaving,
    /// The job is over: all lanes close.
    Over,
}

/// See the [module](self).
pub struct Nic {
    endpoint: Endpoint,
    config: NicConfig,
    lanes: Vec<Lane>,
    /// By number.
    parts: Vec<Part>,
    keys: KeyMap<PartId>,
    /// Parts whose round is not over.
    open: usize,
    /// The part that was pushed last.
    latest: Option<PartId>,
    /// Parts whose round is over, to be [taken](Nic::take_over).
    over: VecDeque<PartId>,
    /// Parts that are ready for a server. One queue and one credit: the lanes share the host's
    /// line, so what is posted on any of them is in the way of all. A lane that has more to carry,
    /// or is slower, comes to hold most of the credit and so gets most of the line, and the lanes
    /// end together.
    queue: CreditQueue<PartId>,
    /// The other ranks of the group, which sum tensors of the host.
    group: Circle,
    /// Those of them that hold the same shares of tensors on GPUs, and sum these.
    column: Circle,
    /// Parts that all of their circle have pushed, of those that this rank owns.
    gathered: CreditQueue<PartId>,
    kernels: &'static Kernels,
    gpu: Gpu,
    staged: Staged,
    /// To land in: what servers send, what ranks publish, and what servers' devices write to the
    /// GPU.
    landings: [Landings; 3],
    /// Slots that a server's device may write to.
    granted: GrantedSlots,
    /// Of the part that is encoded or decoded.
    values: Values,
    /// What it costs to send and to encode, where some part leaves that choice.
    costs: Option<Box<Costs>>,
    /// Servers that are lost, and whose keys move to others.
    lost_servers: Vec<u32>,
    /// Some of these keys are nowhere.
    is_moving: bool,
    /// Parts of which something is to be said so that a result can be restored.
    restores: VecDeque<PartId>,
    reports: Mpsc<Report>,
    report_waker: Waker,
    statistics: Arc<NicStatistics>,
    events: Vec<Event>,
    phase: Phase,
    /// It leaves to come back.
    suspends: bool,
    /// The time of this turn.
    now: Duration,
    next_tick: Duration,
    stalls_told: bool,
    awaits_told: bool,
    trace: Recorder,
    /// How fast steps are, where that is told.
    pace: Option<Box<Pace>>,
}

/// How often the loop looks for stalls.
const TICK: Duration = Duration::from_millis(500);

impl Parts for Nic {
    fn push(&mut self, part: PartId, round: u64, push: &PartPush) {
        let PartPush { memory, priority, act, asked_ns } = *push;
        let state = self.open_round(part, round, priority);
        assert!(!state.plan.device, "a part on the GPU is pushed in a slot");
        assert!(memory.target().len() == state.plan.bytes, "a part is pushed as it was planned");
        (state.memory, state.act) = (Some(memory), act);
        let (key, bytes) = (state.plan.key, state.plan.bytes);
        self.trace.record_at(asked_ns, Mark::Queued, key, round, self.config.rank, bytes);
        self.pushed(part);
    }

    fn abandon(&mut self, part: PartId) {
        self.abandon_part(part);
    }
}

impl Nic {
    /// Lanes are [attached](Self::attach) to it.
    #[must_use]
    pub fn new(
        endpoint: Endpoint,
        config: NicConfig,
        reports: Mpsc<Report>,
        report_waker: Waker,
        statistics: Arc<NicStatistics>,
    ) -> Nic {
        Nic {
            endpoint,
            queue: CreditQueue::new(config.credit_bytes),
            lanes: Vec::new(),
            parts: Vec::new(),
            keys: KeyMap::default(),
            open: 0,
            latest: None,
            over: VecDeque::new(),
            group: Circle::new(Vec::new()),
            column: Circle::new(Vec::new()),
            gathered: CreditQueue::new(config.credit_bytes),
            pace: config.paces.then(Box::default),
            kernels: kernels(),
            gpu: Gpu::default(),
            staged: Staged::default(),
            landings: Default::default(),
            granted: GrantedSlots::default(),
            values: Values::default(),
            costs: None,
            lost_servers: Vec::new(),
            is_moving: false,
            restores: VecDeque::new(),
            config,
            reports,
            report_waker,
            statistics,
            events: Vec::with_capacity(4 * EVENTS_MAX),
            phase: Phase::Running,
            suspends: false,
            now: Duration::ZERO,
            next_tick: Duration::ZERO,
            stalls_told: false,
            awaits_told: false,
            trace: Recorder::default(),
        }
    }

    /// Adds the lane to a server's core, or to a rank of the group. The first lane has id 0, and so
    /// on. All are attached before the first step.
    ///
    /// # Errors
    /// The transport refuses the link.
    pub fn attach(&mut self, peer: LanePeer, link: Link) -> std::io::Result<LaneId> {
        let is_local = link.stays_on_host();
        // A circle that gets one more begins from nothing.
        assert!(self.parts.is_empty(), "lanes are attached before parts are planned");
        let lane = self.endpoint.attach(link)?;
        assert_eq!(lane.0 as usize, self.lanes.len(), "lanes are attached once, at start");
        self.lanes.push(Lane {
            peer,
            open: true,
            goodbye: false,
            checks: self.endpoint.checks(lane),
            is_local,
            said_goodbye: false,
            posted: VecDeque::new(),
            receiving: Receiving::Header,
            outbox: VecDeque::new(),
        });
        if let LanePeer::Rank(rank) = peer {
            assert!(rank != self.config.rank, "no rank has a lane to itself");
            self.group = self.group.with(lane);
            if self.config.column.contains(&rank) {
                self.column = self.column.with(lane);
            }
        }
        Ok(lane)
    }

    /// Whether all lanes are closed.
    #[must_use]
    pub(crate) fn is_closed(&self) -> bool {
        self.lanes.iter().all(|lane| !lane.open)
    }

    /// Whether a round of a part is open.
    #[must_use]
    pub(crate) fn is_open(&self) -> bool {
        self.open > 0
    }

    /// Sleeps until there is something to do, `is_ready` says so, or the time is over.
    pub(crate) fn sleep(&mut self, timeout: Duration, is_ready: impl FnOnce() -> bool) {
        let gpu = &self.gpu;
        self.endpoint.sleep(self.staged.nap(timeout), || is_ready() || gpu.is_heard());
    }

    /// Begins a turn at this time since any fixed moment.
    pub(crate) fn begin_turn(&mut self, now: Duration) {
        assert!(now >= self.now, "time goes on: what waited is measured by it");
        self.now = now;
    }

    /// Posts what can be posted, and takes what has come; says whether anything has.
    pub(crate) fn turn(&mut self) -> bool {
        self.pump_all();
        let mut events = std::mem::take(&mut self.events);
        self.endpoint.poll(&mut events);
        let progress = !events.is_empty();
        for event in events.drain(..) {
            match event {
                Event::Header { lane, header, carried } => self.on_header(lane, &header, carried),
                Event::Landed { lane } => self.on_landed(lane),
                Event::Piece { lane, piece } => self.on_piece(lane, piece),
                Event::Answered { lane, token } => self.on_answered(lane, token),
                Event::Sent { lane, token } => self.on_sent(lane, token),
                Event::Closed { lane, cause } => self.on_closed(lane, cause),
            }
        }
        self.events = events;
        self.check_if_small();
        progress
    }

    /// Ends a turn: looks for stalls when it is time.
    pub(crate) fn end_turn(&mut self) {
        self.gpu.flush();
        if self.now >= self.next_tick {
            self.next_tick = self.now + TICK;
            self.endpoint.look(self.now);
            self.look_for_stalls();
            self.look_for_results();
            self.check();
        }
    }

    /// Other settings hold from now on, which have this number where they are measured.
    pub(crate) fn tune(&mut self, trial: u32, credit_bytes: usize) {
        self.queue.set_credit(credit_bytes);
        self.gathered.set_credit(credit_bytes);
        if let Some(pace) = &mut self.pace {
            pace.begin(trial);
        }
    }

    /// Records a timeline with this from now on.
    pub(crate) fn record_with(&mut self, recorder: Recorder) {
        self.trace = recorder;
    }

    /// A tensor's round is over, which had this key first.
    pub(crate) fn record_done(&mut self, key: Key, round: u64) {
        self.trace.record(Mark::Done, key, round, self.config.rank, 0);
    }

    /// Other ranks of its circle that sum a part.
    fn others(&self, part: PartId) -> usize {
        let Part { plan, peers, .. } = self.part(part);
        peers.as_ref().map_or_else(|| self.circle(plan.device).lanes.len(), |peers| peers.len())
    }

    fn part(&self, part: PartId) -> &Part {
        &self.parts[part.0 as usize]
    }

    fn part_mut(&mut self, part: PartId) -> &mut Part {
        &mut self.parts[part.0 as usize]
    }

    fn lane(&self, lane: LaneId) -> &Lane {
        &self.lanes[lane.0 as usize]
    }

    fn lane_mut(&mut self, lane: LaneId) -> &mut Lane {
        &mut self.lanes[lane.0 as usize]
    }

    pub(crate) fn report(&self, report: Report) {
        // The ring holds more reports than there are lanes; each lane reports once, and a stall
        // that finds no room is told again.
        let _ = self.reports.push(report);
        self.report_waker.wake();
    }
}
