//! Parts of tensors on a GPU: each is pushed in a slot, and each result goes to the next slot that
//! is free. What happens on the GPU is the pipeline's business; the two threads meet in two queues.
//!
//! Slots are in the host's memory, or in the GPU's where RDMA devices reach that: then every server
//! is reached so, and no processor needs to see what is in them.
//!
//! Slots to send from and slots to land in are apart, and neither waits for the other: a slot to
//! send from is free once the transport is done with it, one to land in once the GPU has copied it.
//! So ranks may push in any order, however few slots there are.
//!
//! Where a host has several PCIe switches, the ranks of a column add their switches' sums in the
//! slot of the part's owner, and the result goes from the slot in which it landed there, or was
//! added, to slots of the others. So a slot may have several users, of which the last gives it
//! back. What a rank sends then waits for others, so all ranks of a host copy down in one order,
//! and the earliest part that is not summed has a slot at each of them. What the others publish
//! lands in slots of its own, which wait for the GPU alone: results of servers wait for those
//! slots, and never the other way round.

#![forbid(unsafe_code)]

use super::{LaneId, LanePeer, Nic, PartId, PartWord, Phase, Receiving, Stage};
use crate::rounds::handover::{FromGpu, GpuThread, ToGpu};
use crate::rounds::{Pool, Slot};
use bps_engine::proto::messages::StalledKey;
use bps_engine::trace::timeline::Recorder;
use bps_engine::wire::{Header, Kind};
use std::collections::VecDeque;

/// The loop's side of the pipeline of this rank's GPU, once there is one.
#[derive(Default)]
pub(super) struct Gpu {
    to: Option<GpuThread>,
    /// Slots to land in.
    to_land: usize,
    /// What did not fit into its queue.
    behind: VecDeque<ToGpu>,
    /// By the number of a slot: who uses it, if several do.
    users: Vec<u32>,
    /// Somebody may have to be woken.
    told: bool,
    /// What it said last of rounds that wait for ranks of the host.
    pub(super) stalled: Vec<StalledKey>,
    /// Of the timeline that is on, for a pipeline that is not there yet.
    recorder: Recorder,
}

/// Slots to land in.
#[derive(Default)]
pub(super) struct Landings {
    pub(super) free: Vec<Slot>,
    /// Lanes whose next result waits for a slot, in the order in which they came. Some of them may
    /// wait no more.
    pub(super) held: VecDeque<LaneId>,
}

impl Gpu {
    pub(super) fn tell(&mut self, message: ToGpu) {
        // Without a pipeline no part here has memory of a GPU: there is nobody to tell.
        let Some(to) = &self.to else { return };
        self.told = true;
        if self.behind.is_empty() {
            if let Err(back) = to.inbox.tell(message) {
                self.behind.push_back(back);
            }
        } else {
            self.behind.push_back(message);
        }
    }

    /// Whether the pipeline has said something that was not taken.
    pub(super) fn is_heard(&self) -> bool {
        self.to.as_ref().is_some_and(|to| !to.outbox.is_empty())
    }

    /// Hands over what waits and wakes the pipeline, once in a turn of the loop.
    pub(super) fn flush(&mut self) {
        // Without a pipeline nothing was put behind.
        let Some(to) = &self.to else { return };
        // It may sleep since it has emptied its queue, and knows nothing of what did not fit.
        self.told |= !self.behind.is_empty();
        while let Some(message) = self.behind.pop_front() {
            if let Err(back) = to.inbox.tell(message) {
                self.behind.push_front(back);
                break;
            }
        }
        if std::mem::take(&mut self.told) {
            to.inbox.wake();
        }
    }
}

impl Nic {
    /// The pipeline of this process's GPU is there.
    ///
    /// # Panics
    /// There is one already.
    pub(crate) fn open_gpu(&mut self, mut to: GpuThread) {
        assert!(self.gpu.to.is_none(), "a process has one GPU");
        assert!(self.gpu.behind.is_empty(), "nobody was there to tell anything");
        self.register_slots(std::mem::take(&mut to.slots));
        self.staged.watch(to.staged);
        self.gpu.to_land = to.to_land.len();
        for slot in std::mem::take(&mut to.to_land) {
            self.land_in(slot);
        }
        assert!(self.slots_in_use() == 0, "all slots to land in are free at first");
        self.gpu.to = Some(to);
        let recorder = std::mem::take(&mut self.gpu.recorder);
        if recorder.is_on() {
            self.gpu.tell(ToGpu::Trace(recorder));
        }
    }

    /// Whether there is a pipeline.
    #[must_use]
    pub(crate) fn has_gpu(&self) -> bool {
        self.gpu.to.is_some()
    }

    /// Slots to land in that are not free.
    ///
    /// # Panics
    /// More are free than there are.
    #[must_use]
    pub(crate) fn slots_in_use(&self) -> usize {
        let free: usize = self.landings.iter().map(|landings| landings.free.len()).sum();
        self.gpu.to_land.checked_sub(free).expect("a slot is given back once")
    }

    /// Whether a tensor on the GPU is under way.
    #[must_use]
    pub(crate) fn is_gpu_busy(&self) -> bool {
        self.gpu.to.as_ref().is_some_and(|to| to.inbox.is_busy())
    }

    /// To the pipeline, if there is one.
    pub(crate) fn tell_gpu(&mut self, message: ToGpu) {
        self.gpu.tell(message);
    }

    /// What the pipeline has said next, if anything.
    #[must_use]
    pub(crate) fn hear_gpu(&mut self) -> Option<FromGpu> {
        self.gpu.to.as_ref()?.outbox.pop()
    }

    /// Who begins a timeline of the pipeline, or ends it, does so with this.
    pub(crate) fn record_gpu_with(&mut self, recorder: Recorder) {
        if self.has_gpu() {
            self.gpu.tell(ToGpu::Trace(recorder));
        } else {
            self.gpu.recorder = recorder;
        }
    }

    /// What the pipeline knows of rounds that wait for ranks of the host: told in this turn.
    pub(crate) fn note_stalls(&mut self, keys: Vec<StalledKey>) {
        self.gpu.stalled = keys;
        self.next_tick = self.now;
    }

    /// The loop has ended, and the pipeline can see that it has: it ends as well.
    pub(crate) fn end(&mut self) {
        self.open_all_gates();
        if let Some(to) = &self.gpu.to {
            to.inbox.wake();
        }
    }

    /// The next round of a part of a tensor on the GPU begins, with its bytes in this slot, or
    /// without any.
    pub(super) fn push_slot(
        &mut self,
        part: PartId,
        round: u64,
        priority: i64,
        slot: Option<Slot>,
    ) {
        if self.phase == Phase::Over {
            if let Some(slot) = slot {
                self.release(slot);
            }
            return;
        }
        let state = self.open_round(part, round, priority);
        assert!(state.plan.device && state.slot.is_none(), "its last slot was given back");
        state.slot = slot;
        self.pushed(part);
    }

    /// Where the slots of a pool are that are free.
    pub(super) fn landings_index(pool: Pool) -> usize {
        match pool {
            Pool::Results => 0,
            Pool::Publications => 1,
            Pool::Answers => 2,
            Pool::Sends | Pool::Own => unreachable!("nothing looks for a slot to land in there"),
        }
    }

    /// For what this peer publishes.
    pub(super) fn pool_of(peer: LanePeer) -> Pool {
        match peer {
            LanePeer::Server(_) => Pool::Results,
            LanePeer::Rank(_) => Pool::Publications,
        }
    }

    fn landings(&mut self, pool: Pool) -> &mut Landings {
        &mut self.landings[Nic::landings_index(pool)]
    }

    /// The slot with this number is nobody's: what lands there next changes no other result.
    ///
    /// # Panics
    /// It is somebody's.
    pub(super) fn check_free(&self, number: u32) {
        assert!(!self.granted.has(number), "a device may write to slot {number}");
        let users = self.gpu.users.get(number as usize).copied();
        assert!(users.unwrap_or(0) == 0, "{users:?} use slot {number}");
    }

    /// Free slots of this pool.
    pub(super) fn free(&mut self, pool: Pool) -> &mut Vec<Slot> {
        &mut self.landings(pool).free
    }

    /// One of a slot's users needs it no more: the last one gives it back.
    pub(crate) fn release(&mut self, slot: Slot) {
        if let Some(users) = self.gpu.users.get_mut(slot.number() as usize)
            && *users > 0
        {
            *users -= 1;
            if *users > 0 {
                return;
            }
        }
        match slot.pool() {
            Pool::Sends => self.gpu.tell(ToGpu::Sent(slot)),
            Pool::Results | Pool::Publications | Pool::Answers => self.land_in(slot),
            Pool::Own => {}
        }
    }

    /// A part's result is in this slot, and goes from there to the rest of the column; one more
    /// uses the slot beside.
    fn share(&mut self, part: PartId, slot: Slot) {
        let users = u32::try_from(self.column.lanes.len() + 1).expect("ranks are counted in u32");
        let number = slot.number() as usize;
        if self.gpu.users.len() <= number {
            self.gpu.users.resize(number + 1, 0);
        }
        assert!(self.gpu.users[number] == 0, "who shares a slot has it alone");
        self.gpu.users[number] = users;
        let state = self.part_mut(part);
        // Who is sent no bytes of a result would never give its slot back.
        assert!(state.plan.owner.is_none() && state.plan.receiver.is_none(), "all get the result");
        state.result = Some(slot);
        self.publish(part);
    }

    /// A rank of the column has taken a part's result, or is not to have it.
    pub(super) fn result_sent(&mut self, part: PartId) {
        if let Some(slot) = self.part(part).result {
            self.release(slot);
        }
    }

    /// If this rank broadcasts the part, the column need not wait for what servers say of it.
    pub(super) fn publish_own(&mut self, part: PartId) {
        let state = self.part(part);
        if let Some(slot) = state.slot
            && state.is_root(&self.config)
            && state.plan.core.is_some()
        {
            // The other user is the frame to the server.
            self.share(part, slot);
        }
    }

    /// A part is abandoned: what was not said of it, and is not with a transport, needs no slot.
    pub(super) fn give_slots_back(&mut self, part: PartId, unsaid: &[PartWord]) {
        for word in unsaid {
            match word.kind {
                Kind::Contribution => self.slot_sent(part),
                Kind::Publication if !word.lacks.is_lost => self.result_sent(part),
                _ => {}
            }
        }
        if self.part(part).stage == Stage::Pushed {
            self.slot_sent(part);
        }
        let state = self.part(part);
        assert!(state.slot.is_none() || state.posted > 0, "only a transport has its slot yet");
    }

    /// A slot to land in is free: the lane that has waited longest takes it.
    pub(super) fn land_in(&mut self, slot: Slot) {
        self.check_free(slot.number());
        debug_assert!(!self.free(slot.pool()).contains(&slot), "a slot is given back once");
        self.free(slot.pool()).push(slot);
        while let Some(lane) = self.landings(slot.pool()).held.pop_front() {
            // One whose part was abandoned, or which has closed, waits no more.
            if let Receiving::Held { part, header } = self.lane(lane).receiving {
                return self.land_in_slot(lane, part, header);
            }
        }
    }

    /// A result that is to land in a slot: in the next one that is free, at once or later.
    pub(super) fn land_in_slot(&mut self, lane: LaneId, part: PartId, header: Header) {
        let pool = Nic::pool_of(self.lane(lane).peer);
        let state = self.part(part);
        assert!(state.plan.device && state.stage == Stage::Landing, "its result is to land");
        let landings = self.landings(pool);
        let Some(slot) = landings.free.pop() else {
            landings.held.push_back(lane);
            self.lane_mut(lane).receiving = Receiving::Held { part, header };
            return;
        };
        self.check_free(slot.number());
        let target = slot.memory(self.part(part).plan.bytes);
        self.land(lane, part, header, (target, Some(slot)));
    }

    /// The result of a part is there, in this slot if it has bytes.
    pub(super) fn on_gpu_result(&mut self, part: PartId, slot: Option<Slot>) {
        let state = self.part_mut(part);
        assert!(state.plan.device && state.stage != Stage::Idle, "a round has one result");
        state.stage = Stage::Idle;
        let (of, is_own, lacks) = (state.plan.of, state.plan.owner.is_none(), state.lacks);
        if state.abandoned {
            if let Some(slot) = slot {
                self.release(slot);
            }
            self.close_one(part);
            return;
        }
        self.open_gate(part);
        if let Some(slot) = slot.filter(|_| is_own && !self.column.lanes.is_empty()) {
            // The other user is the GPU.
            self.share(part, slot);
        } else if is_own && lacks.is_lost {
            // There are no bytes, and the column is to know that.
            self.publish(part);
        }
        let over = self.close_one(part);
        self.gpu.tell(ToGpu::Landed { of, slot, over, lacks });
    }

    /// A lane that holds a result of this part lets it pass by.
    pub(super) fn drop_held(&mut self, part: PartId) {
        for lane in (0..).map(LaneId).take(self.lanes.len()) {
            if let Receiving::Held { part: held, header } = self.lane(lane).receiving
                && held == part
            {
                assert!(header.length > 0, "what waits for a slot has bytes");
                self.unwanted(lane, header.length as usize);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rounds::SlotMemory;
    use crate::rounds::handover::GpuInbox;
    use bps_engine::ring::Mpsc;
    use bps_engine::transport::Waker;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    #[test]
    fn a_pipeline_is_woken_for_what_found_no_room_before() {
        let waker = Waker::new().expect("an eventfd");
        let (inbox, outbox) = (GpuInbox::new(2, waker.clone()), Mpsc::new(2));
        let (to_land, slots, staged) = (Vec::new(), SlotMemory::default(), None);
        let to = GpuThread { inbox: inbox.clone(), outbox, to_land, slots, staged };
        let mut gpu = Gpu { to: Some(to), ..Gpu::default() };
        while gpu.behind.is_empty() {
            gpu.tell(ToGpu::Wanted);
        }
        gpu.flush();
        // It empties its queue, sees that nothing else is there, and sleeps.
        while inbox.pop().is_some() {}
        waker.prepare();
        gpu.flush();
        assert!(gpu.behind.is_empty() && !inbox.is_empty(), "there was room for the rest");
        let fd = waker.fd();
        let woken = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&Timespec::default()));
        assert_eq!(woken, Ok(1), "it sleeps, and its queue is not empty");
    }
}
