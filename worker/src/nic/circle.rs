//! What the ranks of a group do for each other: the parts that this rank owns are granted, added up
//! and published, and those that others own are contributed to.
//!
//! Tensors of the host go round all ranks of the group, and tensors on GPUs down a column of its
//! switches, since NCCL has summed along the lines. Each circle takes the contributions that it
//! asks for in the order of its grants, so the argument at the head of [`crate::host::collect`]
//! holds for both together: the earliest of all grants whose contribution is not in is the first of
//! its circle.

use super::{
    Lane, LaneId, LanePeer, Nic, Operation, Part, PartId, PartPlan, PartWord, Phase, Receiving,
    Report, Stage,
};
use crate::base::error::{Misfit, Unasked};
use crate::host::collect::{Admission, Collector, Dropped, Granted};
use crate::host::gather::{Gathers, Unpushed};
use bps_engine::base::{DType, Rank, Reduction, milliseconds};
use bps_engine::mem::{Readable, Writable};
use bps_engine::proto::messages::{STALLS_MAX, StalledKey};
use bps_engine::reduce::Kernels;
use bps_engine::trace::timeline::Mark;
use bps_engine::transport::Landing;
use bps_engine::wire::header::{FLAG_SCALED, scale};
use bps_engine::wire::{Header, Kind};
use std::ops::Range;
use std::sync::Arc;

/// Ranks that sum parts among themselves.
pub(super) struct Circle {
    /// To the others.
    pub(super) lanes: Vec<LaneId>,
    pub(super) gathers: Gathers,
    pub(super) collector: Collector<PartId>,
}

impl Lane {
    /// All of a contribution of so many bytes has come on this lane, and was added.
    ///
    /// # Panics
    /// Another one was coming, or more or less of it has come.
    fn check_contributed(&self, bytes: usize) {
        let Receiving::Contribution { header, done, .. } = &self.receiving else {
            panic!("what was added came on its lane")
        };
        assert!(header.length as usize == bytes && *done == bytes, "all of it has come, once");
    }
}

impl Circle {
    pub(super) fn new(lanes: Vec<LaneId>) -> Circle {
        let others = lanes.len();
        Circle { lanes, gathers: Gathers::new(others), collector: Collector::new(others) }
    }

    /// One more, before anything has passed.
    pub(super) fn with(&self, lane: LaneId) -> Circle {
        assert!(self.place(lane).is_err(), "a peer has one lane");
        assert!(self.gathers.is_empty() && self.collector.asked_bytes() == 0, "nothing has passed");
        Circle::new(self.lanes.iter().copied().chain([lane]).collect())
    }

    /// The places of these lanes, those that are here.
    pub(super) fn places(&self, lanes: &[LaneId]) -> Arc<[usize]> {
        lanes.iter().filter_map(|lane| self.place(*lane).ok()).collect()
    }

    /// The place of a lane.
    pub(super) fn place(&self, lane: LaneId) -> Result<usize, Misfit> {
        let place = self.lanes.iter().position(|other| *other == lane);
        place.ok_or(Misfit::NoShare)
    }
}

/// Whether a group's sums of this tensor are scaled on their way to servers. Those of GPUs are
/// NCCL's, which adds in f16.
pub(super) fn is_scaled(plan: &PartPlan) -> bool {
    plan.dtype == DType::F16 && plan.operation == Operation::Average && !plan.device
}

/// What is added up, by one thread or two.
struct Sum<'sources> {
    kernels: &'static Kernels,
    reduction: Reduction,
    dtype: DType,
    out: Writable,
    own: Readable,
    /// Of as many bytes.
    others: &'sources [*const u8],
    divisor: u32,
}

// SAFETY: addresses of bytes that are lent to whichever thread reads them (`Piece`); all else may
// be shared by itself.
unsafe impl Sync for Sum<'_> {}

impl Sum<'_> {
    /// Adds these bytes, which are whole elements.
    ///
    /// # Safety
    /// All operands are lent until this returns. `out` is `own`, or none overlaps another; the
    /// range of `out` is nobody else's.
    unsafe fn add_up(&self, bytes: Range<usize>) {
        let Sum { kernels, reduction, dtype, out, own, others, divisor } = *self;
        let size = dtype.size();
        debug_assert!(bytes.start.is_multiple_of(size) && bytes.end.is_multiple_of(size));
        debug_assert!(bytes.end <= out.len() && bytes.end <= own.len(), "each has its part of it");
        let elements = bytes.start / dtype.size()..bytes.end / dtype.size();
        let (out, own) = (out.as_ptr(), own.as_ptr());
        // SAFETY: the caller's promise.
        unsafe { kernels.reduce_range(reduction, dtype, out, own, others, elements, divisor) };
    }
}

impl Nic {
    /// Who sums tensors on GPUs with this rank, or those of the host.
    pub(super) fn circle(&self, device: bool) -> &Circle {
        if device { &self.column } else { &self.group }
    }

    pub(super) fn circle_mut(&mut self, device: bool) -> &mut Circle {
        if device { &mut self.column } else { &mut self.group }
    }

    /// All of a circle have pushed this part, which this rank owns.
    pub(super) fn gathered(&mut self, part: PartId) {
        let state = self.part(part);
        assert!(state.stage == Stage::Pushed, "this rank has pushed it too");
        assert!(!state.abandoned && state.plan.owner.is_none(), "it is this rank's to sum");
        if matches!(state.plan.operation, Operation::Broadcast(_)) {
            // There is nothing to add: the root's bytes are the result.
            self.publish_own(part);
            self.reduced(part);
        } else {
            let (priority, bytes) = (state.priority, state.plan.bytes);
            self.gathered.push(priority, bytes, part);
        }
    }

    /// Asks for the next parts, by priority, as far as the credit allows.
    pub(super) fn grant_next(&mut self) {
        while self.group.collector.has_room()
            && self.column.collector.has_room()
            && let Some(part) = self.gathered.take()
        {
            let state = self.part(part);
            assert!(state.stage == Stage::Pushed && !state.abandoned, "peers are asked once");
            let (key, bytes, round) = (state.plan.key, state.plan.bytes, state.round);
            let (device, peers) = (state.plan.device, state.peers.clone());
            if !device {
                self.trace.record(Mark::Granted, key, round, self.config.rank, bytes);
            }
            self.circle_mut(device).collector.grant(Granted { key, bytes, item: part }, peers);
            self.say_to_circle(PartWord::bare(Kind::Grant, part, round));
        }
    }

    /// The lane to one of the others that sum a part.
    fn lane_of(&self, part: PartId, at: usize) -> LaneId {
        let Part { plan, peers, .. } = self.part(part);
        self.circle(plan.device).lanes[peers.as_ref().map_or(at, |peers| peers[at])]
    }

    /// Says something about a part to all others of its circle that sum it.
    fn say_to_circle(&mut self, word: PartWord) {
        for at in 0..self.others(word.part) {
            self.say_to(self.lane_of(word.part, at), word);
        }
    }

    /// A part that is for this rank alone: its bytes are the result.
    pub(super) fn take_own(&mut self, part: PartId) {
        let (source, target) = self.ends_of(part);
        if !std::ptr::eq(source.as_ptr(), target.as_ptr()) {
            // SAFETY: both have the part's bytes, they are apart where they are not the same
            // (`Memory::new`), and no transport has either.
            unsafe {
                std::ptr::copy_nonoverlapping(source.as_ptr(), target.as_ptr(), source.len());
            }
        }
        self.on_result(part, None);
    }

    /// The owner asks for this rank's contribution.
    pub(super) fn send_contribution(&mut self, owner: LaneId, part: PartId) {
        let state = self.part_mut(part);
        assert!(state.stage == Stage::Pushed && state.plan.owner == Some(owner), "sent once");
        state.stage = Stage::Asked;
        let (key, bytes, round) = (state.plan.key, state.plan.bytes, state.round);
        if !state.plan.device {
            self.trace.record(Mark::Granted, key, round, self.config.rank, bytes);
        }
        let kind = Kind::Contribution;
        let checksum = self.checksum(owner, part, kind);
        self.say_to(owner, PartWord { checksum, ..PartWord::bare(kind, part, round) });
        self.check_part(part);
    }

    /// The header of a contribution has come.
    pub(super) fn on_contribution(&mut self, lane: LaneId, header: &Header) -> Result<(), Misfit> {
        let (part, key, bytes) = (self.known(header)?, header.key, header.length as usize);
        let state = self.part(part);
        if state.abandoned {
            self.unwanted(lane, bytes);
            return Ok(());
        }
        let device = state.plan.device;
        let fits = header.dtype == state.plan.dtype
            && header.round.0 == state.round
            && header.offset == 0
            && header.flags & FLAG_SCALED == 0
            && header.contributors == 1;
        let circle = self.circle_mut(device);
        let peer = circle.place(lane)?;
        let answer =
            if fits { circle.collector.header(peer, key, bytes) } else { Admission::Unknown };
        match answer {
            Admission::Take => self.endpoint.land(lane, Landing::Pieces(bytes)),
            Admission::Hold => {}
            Admission::Unknown => return Err(self.misfit(Unasked::Contribution, part, header)),
        }
        self.lane_mut(lane).receiving =
            Receiving::Contribution { peer, device, header: *header, done: 0, checksum: 0 };
        Ok(())
    }

    /// Adds what is there of every contribution to the part whose turn it is.
    pub(super) fn add_up(&mut self, device: bool) {
        while let Some(ready) = self.circle_mut(device).collector.ready() {
            let part = ready.part.item;
            let state = self.part(part);
            let divisor = self.divisor(part);
            let (dtype, key, bytes) = (state.plan.dtype, state.plan.key, state.plan.bytes);
            let (reduction, round) = (state.plan.operation.reduction(), state.round);
            let (source, target) = self.ends_of(part);
            // Whole elements, of each rank that the divisor counts, into the round that is open.
            let is_whole = |count: usize| count.is_multiple_of(dtype.size());
            assert!(is_whole(ready.offset) && is_whole(ready.length), "an element would be lost");
            let summed = self.circle(device).collector.sources().len();
            assert!(summed == self.others(part), "each contribution counts once");
            assert!(self.part(part).stage == Stage::Pushed && source.len() == bytes, "it is open");
            let sum = Sum {
                kernels: self.kernels,
                reduction,
                dtype,
                out: target.part(ready.offset, ready.length),
                own: source.part(ready.offset, ready.length),
                others: self.circle(device).collector.sources(),
                divisor,
            };
            // SAFETY: source and target are the same or apart (`Memory::new`), or one slot, and
            // nothing of this part is sent or lands while its contributions come. Each of the
            // peers' pieces has at least `length` bytes and is lent until `added` names it; it is
            // in a transport's memory, apart from all others. No byte is of two ranges.
            self.config.team.share(ready.length, |range| unsafe { sum.add_up(range) });
            let circle = if device { &mut self.column } else { &mut self.group };
            let (endpoint, lanes) = (&mut self.endpoint, &circle.lanes);
            let whole = circle.collector.added(ready.length, |peer| endpoint.consume(lanes[peer]));
            if whole.is_some() {
                self.gathered.returned(bytes);
                let mark = if device { Mark::Crossed } else { Mark::Reduced };
                self.trace.record(mark, key, round, self.config.rank, bytes);
                for at in 0..self.others(part) {
                    let lane = self.lane_of(part, at);
                    self.lane(lane).check_contributed(bytes);
                    self.lane_mut(lane).receiving = Receiving::Header;
                }
                self.reduced(part);
                self.let_held_go_on(device);
            }
        }
    }

    /// By what the owner of a part divides the sum of its group. The sum of f16 that goes on to a
    /// server is made small enough for f16, which the frame says; servers sum in f32.
    fn divisor(&self, part: PartId) -> u32 {
        let plan = &self.part(part).plan;
        match (plan.operation, plan.core) {
            (Operation::Average, None) => self.contributors(plan),
            (Operation::Average, Some(_)) if is_scaled(plan) => scale(self.group_size(plan)),
            _ => 1,
        }
    }

    /// Ranks that push a part.
    pub(super) fn contributors(&self, plan: &PartPlan) -> u32 {
        plan.among.as_ref().map_or(self.config.size, |among| among.count)
    }

    /// Ranks of this rank's group that push a part.
    pub(super) fn group_size(&self, plan: &PartPlan) -> u32 {
        let others = plan.among.as_ref().map_or(self.group.lanes.len(), |among| among.lanes.len());
        debug_assert!(others < self.contributors(plan) as usize, "the job has more than its group");
        u32::try_from(others + 1).expect("ranks are counted in u32")
    }

    /// The contributions that stood and whose turn it is.
    fn let_held_go_on(&mut self, device: bool) {
        let circle = if device { &mut self.column } else { &mut self.group };
        while let Some((peer, bytes)) = circle.collector.take_next() {
            self.endpoint.land(circle.lanes[peer], Landing::Pieces(bytes));
        }
    }

    /// The group's sum of a part is in the target: other groups come next, or it is the result.
    fn reduced(&mut self, part: PartId) {
        assert!(self.part(part).stage == Stage::Pushed, "a round is summed once");
        let plan = &self.part(part).plan;
        match (plan.core, plan.device) {
            (Some(_), _) => self.send_to_server(part),
            (None, true) => {
                let slot = self.take_slot(part);
                self.on_result(part, slot);
            }
            (None, false) => self.on_result(part, None),
        }
    }

    /// The result of a part goes to its circle, if this rank owns it.
    pub(super) fn publish(&mut self, part: PartId) {
        let state = self.part(part);
        let (key, bytes, round) = (state.plan.key, state.plan.bytes, state.round);
        let device = state.plan.device;
        if state.plan.owner.is_some() {
            return;
        }
        // Alone in its circle: there is nobody to publish to.
        if self.others(part) == 0 {
            return;
        }
        assert!(!state.abandoned && state.is_open(), "its bytes are there until its round is over");
        let lane = self.lane_of(part, 0);
        let has_bytes = state.plan.receiver.is_none();
        if !device && has_bytes {
            self.trace.record(Mark::Copying, key, round, self.config.rank, bytes);
        }
        let kind = Kind::Publication;
        // One for all of them: they are sent the same bytes over the same transport.
        let lacks = self.part(part).lacks;
        let checksum = self.checksum(lane, part, kind).filter(|_| !lacks.is_lost);
        self.say_to_circle(PartWord { kind, part, round, checksum, lacks });
    }

    /// A part's round is over before its time: nobody sums it any more.
    pub(super) fn forget_in_circle(&mut self, part: PartId) {
        self.gathered.remove(|one| *one == part);
        let device = self.part(part).plan.device;
        let (queue, lanes) = (&mut self.gathered, &mut self.lanes);
        let circle = if device { &mut self.column } else { &mut self.group };
        let (endpoint, group) = (&mut self.endpoint, &circle.lanes);
        circle.collector.remove(
            |one| *one == part,
            |part| queue.returned(part.bytes),
            |peer, dropped| {
                let lane = group[peer];
                let left = match dropped {
                    Dropped::Header { bytes } => {
                        endpoint.land(lane, Landing::Pieces(bytes));
                        bytes
                    }
                    Dropped::Payload { left, held } => {
                        if held > 0 {
                            endpoint.consume(lane);
                        }
                        left - held
                    }
                };
                let receiving = &mut lanes[lane.0 as usize].receiving;
                assert!(matches!(receiving, Receiving::Contribution { .. }), "it was taken");
                *receiving = match left {
                    0 => Receiving::Header,
                    left => Receiving::Unwanted { left },
                };
            },
        );
        self.let_held_go_on(device);
        self.add_up(device);
    }

    /// Tells of rounds that have waited too long for ranks of the group.
    pub(super) fn look_for_stalls(&mut self) {
        if self.group.lanes.is_empty() || self.phase != Phase::Running {
            return;
        }
        let anybody_left = self.group.lanes.iter().any(|lane| self.lanes[lane.0 as usize].goodbye);
        let overdue = |key: &StalledKey| {
            key.waited_ms >= self.stall_report_ms() || anybody_left && !key.left.is_empty()
        };
        let of_circle = |circle: &'_ Circle| -> Vec<StalledKey> {
            let waiting = circle.gathers.unpushed();
            waiting.map(|one| self.describe(circle, &one)).filter(overdue).collect()
        };
        let mut keys = of_circle(&self.group);
        keys.extend(of_circle(&self.column));
        if anybody_left {
            keys.extend(self.left_alone());
        }
        keys.extend(self.gpu.stalled.iter().cloned());
        keys.sort_by_key(|key| std::cmp::Reverse(key.waited_ms));
        keys.truncate(STALLS_MAX);
        if keys.is_empty() && !self.stalls_told {
            return;
        }
        self.stalls_told = !keys.is_empty();
        self.report(Report::Stalled { keys });
    }

    fn describe(&self, circle: &Circle, waiting: &Unpushed) -> StalledKey {
        let own = waiting.own_missing.then_some(self.config.rank);
        // For whom a tensor is, is not known before its plan has come: this rank is late then.
        let is_known = self.keys.contains_key(&waiting.key);
        let peers = if is_known { &waiting.peers_missing[..] } else { &[] };
        let lanes = || peers.iter().map(|peer| circle.lanes[*peer]);
        let mut missing: Vec<Rank> =
            own.into_iter().chain(lanes().filter_map(|lane| self.rank_of(lane))).collect();
        missing.sort_unstable();
        let gone = lanes().filter(|lane| self.lanes[lane.0 as usize].goodbye);
        let left = gone.filter_map(|lane| self.rank_of(lane)).collect();
        let waited_ms = self.waited_ms(waiting.since);
        StalledKey { key: waiting.key, round: waiting.round, waited_ms, missing, left }
    }

    fn stall_report_ms(&self) -> u64 {
        milliseconds(self.config.stall_report)
    }

    /// Parts whose owner has left: it can't say that it is missing.
    fn left_alone(&self) -> Vec<StalledKey> {
        let mut keys = Vec::new();
        for part in self.parts.iter().filter(|part| part.is_open() && part.stage != Stage::Idle) {
            let Some(owner) = part.plan.owner.filter(|owner| self.lane(*owner).goodbye) else {
                continue;
            };
            let (key, round) = (part.plan.key, part.round);
            let missing: Vec<Rank> = self.rank_of(owner).into_iter().collect();
            let (waited_ms, left) = (self.waited_ms(part.since), missing.clone());
            keys.push(StalledKey { key, round, waited_ms, missing, left });
        }
        keys
    }

    pub(super) fn rank_of(&self, lane: LaneId) -> Option<Rank> {
        match self.lanes[lane.0 as usize].peer {
            LanePeer::Rank(rank) => Some(rank),
            LanePeer::Server(_) => None,
        }
    }

    fn waited_ms(&self, since: std::time::Duration) -> u64 {
        milliseconds(self.now.saturating_sub(since))
    }
}
