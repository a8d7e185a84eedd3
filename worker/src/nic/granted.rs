//! Slots that RDMA devices reach: contributions are sent from where they lie, and a server's device
//! writes results straight into the slots that were granted to it.
//!
//! Invariant: a granted slot is nobody else's until its result has come, here or another way, or
//! its lane has ended, whatever becomes of the round meanwhile. At most half of the slots are
//! granted, so that a result that comes another way always finds one: what a granted slot waits for
//! may be another rank. Slots in the GPU's memory serve nothing else, and all of them may be.

use super::{LaneId, Nic, PartId, Stage};
use crate::rounds::{Pool, Slot, SlotMemory};
use bps_engine::trace::log;
use bps_engine::transport::{Answer, DirectMemory};

/// Slots by their numbers, and the parts whose results are to come there.
#[derive(Default)]
pub(super) struct GrantedSlots {
    /// A slot without a part is one whose round is of no use any more.
    slots: Vec<Option<(Slot, Option<PartId>)>>,
    count: usize,
    /// They are in the GPU's memory.
    on_gpu: bool,
}

impl GrantedSlots {
    /// Whether a device may write to the slot with this number.
    pub(super) fn has(&self, number: u32) -> bool {
        self.slots.get(number as usize).is_some_and(Option::is_some)
    }

    /// The parts whose results are to come into slots.
    pub(super) fn parts(&self) -> impl Iterator<Item = PartId> + '_ {
        self.slots.iter().flatten().filter_map(|(_, part)| *part)
    }

    /// Slots, their numbers and their count agree.
    ///
    /// # Panics
    /// They do not.
    pub(super) fn check(&self) {
        let all = (0..).zip(&self.slots).filter_map(|(number, one)| Some((number, one.as_ref()?)));
        assert_eq!(self.count, all.clone().count(), "granted slots are counted");
        for (number, (slot, _)) in all {
            let fits = slot.pool() == if self.on_gpu { Pool::Answers } else { Pool::Results };
            assert!(slot.number() == number && fits, "{slot:?} was granted as {number}");
        }
    }

    fn insert(&mut self, slot: Slot, part: PartId) {
        let index = slot.number() as usize;
        if self.slots.len() <= index {
            self.slots.resize(index + 1, None);
        }
        assert!(self.slots[index].is_none(), "a slot is granted once");
        self.slots[index] = Some((slot, Some(part)));
        self.count += 1;
    }

    fn take(&mut self, token: u64) -> Option<(Slot, Option<PartId>)> {
        let index = usize::try_from(token).ok()?;
        let taken = self.slots.get_mut(index)?.take()?;
        assert!(taken.0.number() as usize == index && self.count > 0, "slots are by their numbers");
        self.count -= 1;
        Some(taken)
    }
}

impl Nic {
    /// The slots are there: devices may read those to send from, and write to those to land in.
    pub(super) fn register_slots(&mut self, memory: SlotMemory) {
        assert!(self.granted.count == 0, "nothing is granted before there are slots");
        let (to_send, to_land) = (memory.to_send(), memory.to_land());
        let SlotMemory { gpu_to_send, gpu_to_land, .. } = memory;
        self.granted.on_gpu = gpu_to_land.is_some() && self.endpoint.reaches_memory();
        self.forget_out_of_reach(PartId(0));
        // In this order: without the first, the second is of no use.
        let hosts = [
            to_send.map(|(base, bytes)| DirectMemory::ToSend { base, bytes }),
            to_land.map(|(base, bytes)| DirectMemory::ToLand { base, bytes }),
        ];
        let gpus = gpu_to_send.into_iter().chain(gpu_to_land).map(DirectMemory::Gpu);
        let mut memories = gpus.chain(hosts.into_iter().flatten());
        // SAFETY: mapped until the loop has ended (`SlotMemory`), and the loop forgets them before
        // (`forget_memory`). A slot that a posted frame granted is left alone
        // (`GrantedSlots`). Where slots are in the GPU's memory all lanes to servers are RDMA, and
        // no others have payloads of tensors on the GPU (`Direct`).
        let registered =
            memories.try_for_each(|memory| unsafe { self.endpoint.register_memory(memory) });
        if let Err(error) = registered {
            log::warning!("what passes between pinned slots and RDMA lanes is copied: {error}");
        }
    }

    /// Whether slots are in the GPU's memory.
    pub(super) fn has_slots_on_gpu(&self) -> bool {
        self.granted.on_gpu
    }

    /// No lane is left: devices are to know no memory of others any more.
    pub(crate) fn forget_memory(&mut self) {
        assert!(self.is_closed(), "a device may write to what a lane has granted");
        for figures in self.endpoint.forget_memory() {
            log::info!("{figures}");
        }
    }

    /// The slot that the result of a part may be written to by the server's device, if it may: the
    /// next one that is free.
    pub(super) fn slot_to_grant(&mut self, lane: LaneId, part: PartId) -> Option<Slot> {
        let on_gpu = self.granted.on_gpu;
        let free = self.free(if on_gpu { Pool::Answers } else { Pool::Results });
        let (slot, free) = (*free.last()?, free.len());
        let state = self.part(part);
        // A checksum comes in a header, which such a result has not.
        let may = state.plan.device
            && state.staging.is_none()
            && state.coded.is_none()
            && state.kept.is_none()
            && !state.is_root(&self.config)
            && !self.lane(lane).checks
            && (on_gpu || free > self.granted.count)
            && self.endpoint.grants(lane, slot.memory(state.plan.bytes));
        may.then_some(slot)
    }

    /// How a frame asks for its answer into this slot.
    pub(super) fn answer_into(&self, part: PartId, slot: Option<Slot>) -> Answer {
        slot.map_or(Answer::No, |slot| Answer::Wanted {
            into: slot.memory(self.part(part).plan.bytes),
            token: slot.number().into(),
        })
    }

    /// The slot, which `slot_to_grant` named, is granted.
    pub(super) fn grant_slot(&mut self, part: PartId, slot: Slot) {
        let taken = self.free(slot.pool()).pop();
        assert_eq!(taken, Some(slot), "nobody has taken the slot meanwhile");
        self.granted.insert(slot, part);
        let left = self.free(slot.pool()).len();
        assert!(self.granted.on_gpu || left + 1 >= self.granted.count, "half is for other results");
        let state = self.part_mut(part);
        assert!(state.stage == Stage::Asked, "its frame, which names the slot, was posted");
        state.stage = Stage::Granted;
        self.check_part(part);
    }

    /// A result has come into the slot that was granted for it.
    pub(super) fn on_answered(&mut self, lane: LaneId, token: u64) {
        let (slot, part) = self.granted.take(token).expect("a slot that is written was granted");
        let Some(part) = part else { return self.land_in(slot) };
        let state = self.part(part);
        assert!(state.stage == Stage::Granted, "its slot was granted for this round");
        let (key, round, bytes) = (state.plan.key, state.round, state.plan.bytes);
        self.statistics.counters.frames_in.add(1);
        self.statistics.counters.bytes_in.add(bytes as u64);
        let (begins, ends) = self.marks(lane, part);
        for mark in [begins, ends] {
            self.trace.record(mark, key, round, self.config.rank, bytes);
        }
        self.on_result(part, Some(slot));
    }

    /// The result for which a slot was granted comes another way, with a header.
    pub(super) fn on_declined(&mut self, token: u64) {
        // Which the device of the other end says: it may say it of any slot.
        let Some((slot, part)) = self.granted.take(token) else { return };
        if let Some(part) = part {
            let state = self.part_mut(part);
            assert!(state.stage == Stage::Granted, "its slot was granted for this round");
            state.stage = Stage::Asked;
            state.check();
        }
        self.land_in(slot);
    }

    /// The result of this part is not wanted any more. Its slot stays granted until it comes.
    pub(super) fn forget_grant(&mut self, part: PartId) {
        if self.part(part).stage != Stage::Granted {
            return;
        }
        let before = self.granted.count;
        for (_, one) in self.granted.slots.iter_mut().flatten() {
            *one = one.filter(|one| *one != part);
        }
        // The device of the other end may still write there.
        assert!(self.granted.count == before, "the slot is nobody else's yet");
        debug_assert!(self.granted.parts().all(|one| one != part), "it has one slot");
    }
}
