//! Slots that RDMA devices reach: contributions are sent from where they lie, and a server's device
//! writes results straight into the slots that were granted to it.
//!
//! Invariant: a granted slot is nobody else's until its result has come, here or another way, or
//! its lane has ended, whatever becomes of the round meanwhile. At most half of the slots are
//! granted, so that a result that comes another way always finds one: what a granted slot waits for
//! may be another rank. Slots in the GPU's memory serve nothing else, and all of them may be.

use super::staged::{Pool, Slot, SlotMemory};
use super::{LaneId, Nic, Operation, RunPart, Stage};
use bps_engine::trace::log;
use bps_engine::transport::Answer;

/// Slots by their numbers, and the parts whose results are to come there.
#[derive(Default)]
pub(super) struct Granted {
    /// A slot without a part is one whose round is of no use any more.
    slots: Vec<Option<(Slot, Option<RunPart>)>>,
    count: usize,
    /// They are in the GPU's memory.
    on_gpu: bool,
}

impl Granted {
    fn insert(&mut self, slot: Slot, of: RunPart) {
        let index = slot.number as usize;
        if self.slots.len() <= index {
            self.slots.resize(index + 1, None);
        }
        self.slots[index] = Some((slot, Some(of)));
        self.count += 1;
    }

    fn take(&mut self, token: u64) -> Option<(Slot, Option<RunPart>)> {
        let index = usize::try_from(token).ok()?;
        let taken = self.slots.get_mut(index)?.take()?;
        self.count -= 1;
        Some(taken)
    }
}

impl Nic {
    /// The slots are there: devices may read those to send from, and write to those to land in.
    pub(super) fn register_slots(&mut self, memory: SlotMemory) {
        let Some(rdma) = self.endpoint.rdma() else { return };
        let SlotMemory { to_send, to_land, gpu_to_send, gpu_to_land } = memory;
        self.pipeline.granted.on_gpu = gpu_to_land.is_some();
        // SAFETY: the pipeline keeps the slots until the loop has ended, and the loop forgets them
        // before (`forget_memory`). A slot that a posted frame granted is left alone (`Granted`).
        // Where slots are in the GPU's memory all lanes to servers are RDMA, and no others have
        // payloads of tensors on the GPU (`Direct`).
        let registered = unsafe {
            gpu_to_send.into_iter().chain(gpu_to_land).for_each(|memory| rdma.take_gpu(memory));
            to_send.map_or(Ok(()), |(base, bytes)| rdma.register(base, bytes)).and_then(|()| {
                to_land.map_or(Ok(()), |(base, bytes)| rdma.register_landing(base, bytes))
            })
        };
        if let Err(error) = registered {
            log::warning!("what passes between pinned slots and RDMA lanes is copied: {error}");
        }
    }

    /// No lane is left: devices are to know no memory of others any more.
    pub(super) fn forget_memory(&mut self) {
        if let Some(rdma) = self.endpoint.rdma() {
            rdma.unregister();
            log::info!("{}", rdma.counters());
        }
    }

    /// The slot that the result of a part may be written to by the server's device, if it may: the
    /// next one that is free.
    pub(super) fn slot_to_grant(&mut self, lane: LaneId, of: RunPart) -> Option<Slot> {
        let on_gpu = self.pipeline.granted.on_gpu;
        let free = self.pipeline.free(if on_gpu { Pool::Answers } else { Pool::Results });
        let (slot, free) = (*free.last()?, free.len());
        let (tensor, part) = self.planned(of)?;
        let is_root =
            matches!(tensor.plan.operation, Operation::Broadcast(root) if root == self.config.rank);
        // A checksum comes in a header, which such a result has not.
        let may = tensor.plan.device
            && !is_root
            && !self.lanes[lane.0 as usize].checks
            && (on_gpu || free > self.pipeline.granted.count)
            && self.endpoint.grants(lane, slot.at, part.bytes);
        may.then_some(slot)
    }

    /// How a frame asks for its answer into this slot.
    pub(super) fn answer_into(&self, of: RunPart, slot: Option<Slot>) -> Answer {
        match (slot, self.planned(of)) {
            (Some(slot), Some((_, part))) => {
                Answer::Wanted { at: slot.at, length: part.bytes, token: slot.number.into() }
            }
            _ => Answer::No,
        }
    }

    /// The slot, which `slot_to_grant` named, is granted.
    pub(super) fn grant_slot(&mut self, of: RunPart, slot: Slot) {
        let taken = self.pipeline.free(slot.pool).pop();
        debug_assert_eq!(taken, Some(slot), "a slot was taken meanwhile");
        self.pipeline.granted.insert(slot, of);
        self.set_stage(of, Stage::Granted);
    }

    /// A result has come into the slot that was granted for it.
    pub(super) fn on_answered(&mut self, lane: LaneId, token: u64) {
        let Some((slot, of)) = self.pipeline.granted.take(token) else { return };
        let Some(of) = of else { return self.land_in(slot) };
        let Some((tensor, part)) = self.planned(of) else { return self.land_in(slot) };
        let (round, rank) = (tensor.round, self.config.rank);
        self.statistics.counters.frames_in.add(1);
        self.statistics.counters.bytes_in.add(part.bytes as u64);
        let (begins, ends) = self.marks(lane, of);
        for mark in [begins, ends] {
            self.trace.record(mark, part.key, round, rank, part.bytes);
        }
        self.staged_result(of, Some(slot));
    }

    /// The result for which a slot was granted comes another way, with a header.
    pub(super) fn on_declined(&mut self, token: u64) {
        let Some((slot, of)) = self.pipeline.granted.take(token) else { return };
        if let Some(of) = of {
            self.set_stage(of, Stage::Asked);
        }
        self.land_in(slot);
    }

    /// Results of this run are not wanted any more. Their slots stay granted until they come.
    pub(super) fn forget_grants(&mut self, run: u32) {
        for (_, of) in self.pipeline.granted.slots.iter_mut().flatten() {
            *of = of.filter(|of| of.run != run);
        }
    }
}
