//! What leaves a NIC loop: contributions to servers by priority and credit, and the frames between
//! the ranks of a group in the order in which they were said.

use super::group::is_scaled;
use super::staged::Slot;
use super::{LaneId, Memory, Nic, Operation, Outgoing, Peer, Run, RunPart, Stage, Tensor, Word};
use bps_engine::base::{DType, Key, Round};
use bps_engine::trace::timeline::Mark;
use bps_engine::transport::{Frame, Full};
use bps_engine::wire::header::{FLAG_PAYLOAD_CHECKSUM, FLAG_SCALED};
use bps_engine::wire::{Header, Kind, crc32c};

/// Token of a frame that has none of a task's memory.
pub(super) const QUIET: u64 = u64::MAX;

fn token(of: RunPart) -> u64 {
    u64::from(of.run) << 32 | u64::from(of.part)
}

fn part_of(token: u64) -> RunPart {
    let low = |number: u64| u32::try_from(number & u64::from(u32::MAX)).unwrap_or(u32::MAX);
    RunPart { run: low(token >> 32), part: low(token) }
}

impl Nic {
    /// A part goes to its server once credit and priority let it.
    pub(super) fn send_to_server(&mut self, of: RunPart) {
        let priority = self.runs[of.run as usize].priority;
        let Some((_, part)) = self.planned(of) else { return };
        self.queue.push(priority, part.bytes, of);
    }

    pub(super) fn pump_all(&mut self) {
        if self.leaving || self.over.is_some() {
            return;
        }
        self.grant_next();
        self.pump();
        for position in 0..self.group.lanes.len() {
            self.flush(self.group.lanes[position]);
        }
    }

    /// Posts what waits for servers, as far as credit and transport allow.
    fn pump(&mut self) {
        while let Some(&of) = self.queue.peek() {
            let Some((tensor, part)) = self.planned(of) else { return };
            let Some(lane) = part.core else { return };
            let run = &self.runs[of.run as usize];
            let rank = self.config.rank;
            let silent =
                matches!(tensor.plan.operation, Operation::Broadcast(root) if root != rank);
            let length = if silent { 0 } else { part.bytes };
            let mut header = self.header(Kind::Contribution, tensor.plan.dtype);
            header.key = part.key;
            header.round = Round(tensor.round);
            header.length = u32::try_from(length).unwrap_or(u32::MAX);
            header.contributors = self.group_size();
            if header.contributors > 1 && is_scaled(&tensor.plan) {
                header.flags |= FLAG_SCALED;
            }
            let payload = match tensor.slots.get(of.part as usize) {
                Some(slot) => slot.map_or(std::ptr::null(), |slot| slot.at.cast_const()),
                None => self.contribution(run, part.offset, tensor.plan.operation),
            };
            if self.lanes[lane.0 as usize].checks && length > 0 {
                // SAFETY: the part lies inside the tensor (the plan's offsets were checked against
                // the declared size), which the caller keeps valid until the task is finished.
                let bytes = unsafe { std::slice::from_raw_parts(payload, length) };
                header.flags |= FLAG_PAYLOAD_CHECKSUM;
                header.payload_checksum = crc32c(bytes);
            }
            let slot = self.slot_to_grant(lane, of);
            let (header_bytes, answer) = (header.encode(), self.answer_into(of, slot));
            let frame = Frame { answer, ..Frame::new(header_bytes, payload, length, token(of)) };
            let at = self.trace.now();
            if !self.lanes[lane.0 as usize].open || self.endpoint.post(lane, &frame).is_err() {
                return;
            }
            self.trace.frame_at(at, Mark::Posted, &header);
            self.statistics.posted(length);
            self.queue.take();
            self.lanes[lane.0 as usize].posted += 1;
            self.set_stage(of, Stage::Asked);
            self.note_asked(of);
            if let Some(slot) = slot {
                self.grant_slot(of, slot);
            }
            let run = &mut self.runs[of.run as usize];
            run.open += 1;
            run.posted += 1;
        }
    }

    /// The slot that a part was to be sent from, if it is of a tensor on the GPU and has bytes.
    pub(super) fn take_slot(&mut self, of: RunPart) -> Option<Slot> {
        let tensor = self.runs[of.run as usize].tensor as usize;
        self.tensors.get_mut(tensor)?.as_mut()?.slots.get_mut(of.part as usize)?.take()
    }

    /// What a server gets: this rank's bytes, or the sum of its group, which is in the target.
    fn contribution(&self, run: &Run, offset: usize, operation: Operation) -> *const u8 {
        let is_sum = !matches!(operation, Operation::Broadcast(_));
        if is_sum && !self.group.lanes.is_empty() {
            run.memory.target.cast_const().wrapping_add(offset)
        } else {
            run.memory.source.wrapping_add(offset)
        }
    }

    /// Where a part is that the ranks of a circle add up, and where their sum goes: in the tensor,
    /// or in the slot that it was copied to.
    pub(super) fn memory_of(&self, of: RunPart) -> Memory {
        let Some((tensor, part)) = self.planned(of) else {
            return Memory { source: std::ptr::null(), target: std::ptr::null_mut() };
        };
        if let Some(slot) = tensor.slots.get(of.part as usize) {
            let at = slot.map_or(std::ptr::null_mut(), |slot| slot.at);
            return Memory { source: at.cast_const(), target: at };
        }
        let Memory { source, target } = self.runs[of.run as usize].memory;
        let (source, target) = (source.wrapping_add(part.offset), target.wrapping_add(part.offset));
        Memory { source, target }
    }

    /// What a rank of the group is sent of a part with a frame of this kind; null if nothing.
    fn payload(&self, of: RunPart, kind: Kind) -> *const u8 {
        match kind {
            Kind::Contribution => self.memory_of(of).source,
            Kind::Publication => match self.planned(of) {
                Some((Tensor { results, plan, .. }, _)) if plan.device => {
                    let slot = results.get(of.part as usize).copied().flatten();
                    slot.map_or(std::ptr::null(), |slot| slot.at.cast_const())
                }
                _ => self.memory_of(of).target.cast_const(),
            },
            _ => std::ptr::null(),
        }
    }

    /// CRC-32C of what a rank of the group is sent of a part, if payloads on its lane carry one.
    pub(super) fn checksum(&self, lane: LaneId, of: RunPart, kind: Kind) -> Option<u32> {
        let (_, part) = self.planned(of).filter(|_| self.lanes[lane.0 as usize].checks)?;
        let payload = self.payload(of, kind);
        if payload.is_null() {
            return None;
        }
        // SAFETY: the part lies inside the tensor, which the caller keeps valid until the task is
        // finished, or in a slot of its own; the loop writes to it only when contributions are
        // added or a result lands, and neither is under way for a part that is about to be sent.
        let bytes = unsafe { std::slice::from_raw_parts(payload, part.bytes) };
        Some(crc32c(bytes))
    }

    /// Says something to a rank of the group, after what was said before.
    pub(super) fn say_to(&mut self, lane: LaneId, word: Word) {
        self.lanes[lane.0 as usize].outbox.push_back(Outgoing::Part(word));
        if matches!(word.kind, Kind::Contribution | Kind::Publication) {
            self.runs[word.of.run as usize].open += 1;
        }
    }

    /// Posts what is to be said on the lane to a rank, as far as the transport takes it.
    fn flush(&mut self, lane: LaneId) {
        let position = lane.0 as usize;
        if !self.lanes[position].open {
            return;
        }
        while let Some(&outgoing) = self.lanes[position].outbox.front() {
            let word = match outgoing {
                Outgoing::Part(word) => word,
                Outgoing::Gpu(word) => {
                    if self.post_word(lane, word).is_err() {
                        return;
                    }
                    self.lanes[position].outbox.pop_front();
                    continue;
                }
            };
            let Some((tensor, part)) = self.planned(word.of) else { return };
            let payload = self.payload(word.of, word.kind);
            let mut header = self.header(word.kind, tensor.plan.dtype);
            if matches!(word.kind, Kind::Grant | Kind::Publication)
                && let Peer::Rank(rank) = self.lanes[position].peer
            {
                header.rank = rank;
            }
            header.key = part.key;
            header.round = Round(word.round);
            let length = if payload.is_null() { 0 } else { part.bytes };
            header.length = u32::try_from(length).unwrap_or(u32::MAX);
            header.contributors = match (word.kind, tensor.plan.operation) {
                (Kind::Publication, Operation::Sum | Operation::Average) => self.config.size,
                _ => 1,
            };
            if let Some(checksum) = word.checksum {
                header.flags |= FLAG_PAYLOAD_CHECKSUM;
                header.payload_checksum = checksum;
            }
            let token = if length > 0 { token(word.of) } else { QUIET };
            let frame = Frame::new(header.encode(), payload, length, token);
            if self.endpoint.post(lane, &frame).is_err() {
                return;
            }
            self.statistics.posted(length);
            self.lanes[position].outbox.pop_front();
            if length > 0 {
                self.lanes[position].posted += 1;
                self.runs[word.of.run as usize].posted += 1;
            }
        }
    }

    pub(super) fn header(&self, kind: Kind, dtype: DType) -> Header {
        Header::new(kind, dtype, self.config.rank, self.config.epoch)
    }

    /// The last frame of a lane.
    pub(super) fn say_goodbye(&mut self, lane: LaneId) -> Result<(), Full> {
        let mut header = self.header(Kind::Goodbye, DType::U8);
        header.key = Key(0);
        let frame = Frame::new(header.encode(), std::ptr::null(), 0, QUIET);
        self.endpoint.post(lane, &frame)
    }

    pub(super) fn on_sent(&mut self, lane: LaneId, token: u64) {
        if token == QUIET {
            return;
        }
        let of = part_of(token);
        let Some((tensor, part)) = self.planned(of) else { return };
        let (round, rank) = (tensor.round, self.config.rank);
        let device = tensor.plan.device;
        let mark = match self.lanes[lane.0 as usize].peer {
            Peer::Server(_) => {
                self.queue.returned(part.bytes);
                self.slot_sent(of);
                Some(Mark::Sent)
            }
            Peer::Rank(_) if part.owner.is_some() => {
                self.slot_sent(of);
                Some(if device { Mark::Crossed } else { Mark::Contributed })
            }
            Peer::Rank(_) => {
                self.result_sent(of);
                (!device).then_some(Mark::Copied)
            }
        };
        if let Some(mark) = mark {
            self.trace.record(mark, part.key, round, rank, part.bytes);
        }
        let state = &mut self.lanes[lane.0 as usize];
        state.posted -= 1;
        if state.goodbye && state.posted == 0 {
            self.endpoint.close(lane);
        }
        self.runs[of.run as usize].posted -= 1;
        self.close_one(of.run);
    }
}
