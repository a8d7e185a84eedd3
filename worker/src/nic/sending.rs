//! What leaves the lanes: contributions to servers by priority and credit, and the frames between
//! the ranks of a group in the order in which they were said.

use super::circle::is_scaled;
use super::{LaneId, LanePeer, Nic, Operation, PartId, PartWord, Phase, Stage};
use crate::rounds::Slot;
use crate::rounds::handover::ToGpu;
use bps_engine::base::{DType, Key, Round};
use bps_engine::mem::{Readable, Writable};
use bps_engine::trace::timeline::Mark;
use bps_engine::transport::{Frame, Full};
use bps_engine::wire::header::{COMES_BACK, FLAG_PAYLOAD_CHECKSUM, FLAG_SCALED};
use bps_engine::wire::{Header, Kind, crc32c};

/// Token of a frame that has none of a part's memory.
pub(super) const QUIET: u64 = u64::MAX;

impl Nic {
    /// A part goes to its server once credit and priority let it.
    pub(super) fn send_to_server(&mut self, part: PartId) {
        self.offer(part);
        if self.is_held_back(part) {
            return;
        }
        self.choose(part);
        let state = self.part(part);
        assert!(state.plan.core.is_some(), "a part that is summed elsewhere has a core");
        assert!(state.stage == Stage::Pushed && !state.abandoned, "it is sent once in a round");
        let priority = state.priority;
        self.queue.push(priority, self.line_bytes(part), part);
    }

    pub(crate) fn pump_all(&mut self) {
        if self.phase != Phase::Running {
            return;
        }
        self.grant_next();
        self.post_restores();
        self.pump();
        for position in 0..self.group.lanes.len() {
            self.flush(self.group.lanes[position]);
        }
    }

    /// Posts what waits for servers, as far as credit and transport allow.
    fn pump(&mut self) {
        while let Some(&part) = self.queue.peek() {
            let state = self.part(part);
            let lane = state.plan.core.expect("what is queued has a core");
            assert!(state.stage == Stage::Pushed && state.is_open(), "a rank contributes once");
            let mut header = self.header(Kind::Contribution, state.plan.dtype);
            header.key = state.plan.key;
            header.round = Round(state.round);
            header.contributors = self.group_size(&state.plan);
            header.act = state.act.word();
            header.flags = self.form(part).flag();
            let (is_silent, is_scaled) = (self.is_silent(state), is_scaled(&state.plan));
            let payload = if is_silent {
                Readable::EMPTY
            } else if let Some(encoded) = self.encoded(part, &header) {
                encoded
            } else {
                if header.contributors > 1 && is_scaled {
                    header.flags |= FLAG_SCALED;
                }
                self.contribution(part)
            };
            let length = payload.len();
            assert!(length <= self.line_bytes(part), "more would be posted than credit was taken");
            header.length = length_of(length);
            if self.lane(lane).checks && length > 0 {
                header.flags |= FLAG_PAYLOAD_CHECKSUM;
                // SAFETY: in the host's memory, since `Direct` leaves that of the GPU alone where
                // lanes of devices carry checksums. The loop writes to a part only when
                // contributions are added or a result lands, and neither is under way for one that
                // is about to be sent.
                header.payload_checksum = crc32c(unsafe { payload.bytes() });
            }
            let slot = self.slot_to_grant(lane, part);
            let (raw, answer) = (header.encode(), self.answer_into(part, slot));
            let frame = Frame { answer, ..Frame::new(raw, payload, part.0.into()) };
            let at = self.trace.now();
            if !self.lane(lane).open || self.endpoint.post(lane, &frame).is_err() {
                return;
            }
            self.trace.frame_at(at, Mark::Posted, &header);
            self.statistics.posted(length);
            self.spared(part, length);
            self.sending_begins(lane);
            self.queue.take();
            self.lane_mut(lane).posted.push_back(part);
            let now = self.now;
            let state = self.part_mut(part);
            (state.stage, state.asked) = (Stage::Asked, now);
            state.open += 1;
            state.posted += 1;
            state.check();
            if let Some(slot) = slot {
                self.grant_slot(part, slot);
            }
        }
    }

    /// What a server gets: this rank's bytes, or the sum of its group, which is in the target.
    pub(super) fn contribution(&self, part: PartId) -> Readable {
        let is_shared = self.others(part) > 0;
        let part = self.part(part);
        if part.plan.device {
            if let Some(kept) = &part.kept {
                return kept.contribution();
            }
            let slot = part.slot.expect("a part with bytes is pushed in a slot");
            return slot.memory(part.plan.bytes).readable();
        }
        let memory = part.memory.expect("a part of the host is pushed with its memory");
        let is_sum = !matches!(part.plan.operation, Operation::Broadcast(_));
        if is_sum && is_shared { memory.target().readable() } else { memory.source() }
    }

    /// Where a part is that the ranks of a circle add up, and where their sum goes: in the tensor,
    /// or in the slot that it was copied to.
    pub(super) fn ends_of(&self, part: PartId) -> (Readable, Writable) {
        let state = self.part(part);
        match (state.slot, state.memory) {
            (Some(slot), None) => {
                let memory = slot.memory(state.plan.bytes);
                (memory.readable(), memory)
            }
            (None, Some(memory)) => (memory.source(), memory.target()),
            ends => unreachable!("a part is in a slot or in a tensor: {ends:?}"),
        }
    }

    /// What a rank of the group is sent of a part with a frame of this kind, if anything.
    fn payload(&self, part: PartId, kind: Kind) -> Option<Readable> {
        let state = self.part(part);
        match kind {
            Kind::Contribution => Some(self.ends_of(part).0),
            // A receiver owns its group's parts: no others in a group get any.
            Kind::Publication if state.plan.receiver.is_some() => None,
            Kind::Publication if state.plan.device => {
                state.result.map(|slot| slot.memory(state.plan.bytes).readable())
            }
            Kind::Publication => Some(self.ends_of(part).1.readable()),
            _ => None,
        }
    }

    /// What is sent with a word, if anything.
    fn payload_of(&self, word: &PartWord) -> Option<Readable> {
        // The part of a broadcast without a result has no memory any more.
        if word.lacks.is_lost { None } else { self.payload(word.part, word.kind) }
    }

    /// CRC-32C of what a rank of the group is sent of a part, if payloads on its lane carry one.
    pub(super) fn checksum(&self, lane: LaneId, part: PartId, kind: Kind) -> Option<u32> {
        if !self.lane(lane).checks {
            return None;
        }
        let payload = self.payload(part, kind)?;
        // SAFETY: in the host's memory, where ranks of a host exchange what they add; the loop
        // writes to a part only when contributions are added or a result lands, and neither is
        // under way for one that is about to be sent.
        Some(crc32c(unsafe { payload.bytes() }))
    }

    /// Says something to a rank of the group, after what was said before.
    pub(super) fn say_to(&mut self, lane: LaneId, word: PartWord) {
        assert!(matches!(self.lane(lane).peer, LanePeer::Rank(_)), "a server is sent parts");
        let state = self.part_mut(word.part);
        assert!(word.round == state.round && state.is_open(), "it is of the round that is open");
        let has_bytes = word.has_bytes(&state.plan);
        state.open += u32::from(has_bytes);
        debug_assert!(has_bytes == self.payload_of(&word).is_some(), "an end that never closes");
        self.lane_mut(lane).outbox.push_back(word);
    }

    /// Posts what is to be said on the lane to a rank, as far as the transport takes it.
    fn flush(&mut self, lane: LaneId) {
        if !self.lane(lane).open {
            return;
        }
        while let Some(&word) = self.lane(lane).outbox.front() {
            if self.post_word(lane, word).is_err() {
                return;
            }
            self.lane_mut(lane).outbox.pop_front();
        }
    }

    fn post_word(&mut self, lane: LaneId, word: PartWord) -> Result<(), Full> {
        let PartWord { kind, part, round, checksum, lacks } = word;
        let state = self.part(part);
        let payload = self.payload_of(&word);
        // A part's bytes are those of its last round.
        assert!(payload.is_none() || round == state.round && state.is_open(), "it is another's");
        let mut header = self.header(kind, state.plan.dtype);
        if matches!(kind, Kind::Grant | Kind::Publication)
            && let LanePeer::Rank(rank) = self.lane(lane).peer
        {
            header.rank = rank;
        }
        header.key = state.plan.key;
        header.round = Round(round);
        if kind == Kind::Ready {
            header.act = state.act.word();
        }
        let payload = payload.unwrap_or(Readable::EMPTY);
        let length = payload.len();
        header.length = length_of(length);
        header.contributors = match (kind, state.plan.operation) {
            (Kind::Publication, Operation::Broadcast(_)) => u32::from(!lacks.is_lost),
            (Kind::Publication, _) => {
                let left = self.contributors(&state.plan).checked_sub(lacks.ranks.count_ones());
                left.expect("a result that lacks more ranks than push it is not taken (`is_due`)")
            }
            _ => 1,
        };
        header.missing = lacks.ranks;
        if let Some(checksum) = checksum {
            header.flags |= FLAG_PAYLOAD_CHECKSUM;
            header.payload_checksum = checksum;
        }
        let token = if length > 0 { part.0.into() } else { QUIET };
        let frame = Frame::new(header.encode(), payload, token);
        self.endpoint.post(lane, &frame)?;
        self.statistics.posted(length);
        if length > 0 {
            self.lane_mut(lane).posted.push_back(part);
            self.part_mut(part).posted += 1;
        }
        Ok(())
    }

    pub(super) fn header(&self, kind: Kind, dtype: DType) -> Header {
        Header::new(kind, dtype, self.config.rank, self.config.epoch)
    }

    /// The last frame of a lane.
    pub(super) fn say_goodbye(&mut self, lane: LaneId) -> Result<(), Full> {
        assert!(self.phase == Phase::Leaving && !self.is_open(), "a goodbye is the last frame");
        let mut header = self.header(Kind::Goodbye, DType::U8);
        header.key = Key(0);
        header.act = if self.suspends { COMES_BACK } else { 0 };
        let frame = Frame::bare(header.encode(), QUIET);
        self.endpoint.post(lane, &frame)
    }

    pub(super) fn on_sent(&mut self, lane: LaneId, token: u64) {
        if token != QUIET && !self.given_back(token) {
            let part = PartId(u32::try_from(token).expect("tokens are numbers of parts"));
            self.frame_sent(lane, part);
        }
    }

    /// A frame with memory of this part is off this lane.
    pub(super) fn frame_sent(&mut self, lane: LaneId, part: PartId) {
        let state = self.part_mut(part);
        state.posted = state.posted.checked_sub(1).expect("what is sent was posted");
        let (of, round, device) = (state.plan.of, state.round, state.plan.device);
        let (key, bytes, owner) = (state.plan.key, state.plan.bytes, state.plan.owner);
        let mark = match self.lane(lane).peer {
            LanePeer::Server(_) => {
                self.queue.returned(self.line_bytes(part));
                self.sending_ends(lane, part);
                self.slot_sent(part);
                Some(Mark::Sent)
            }
            LanePeer::Rank(_) if owner.is_some() => {
                self.slot_sent(part);
                Some(if device { Mark::Crossed } else { Mark::Contributed })
            }
            LanePeer::Rank(_) => {
                self.result_sent(part);
                (!device).then_some(Mark::Copied)
            }
        };
        if let Some(mark) = mark {
            self.trace.record(mark, key, round, self.config.rank, bytes);
        }
        let state = self.lane_mut(lane);
        // The first one, but for transports that may tell of frames in another order.
        let at = state.posted.iter().position(|posted| *posted == part);
        state.posted.remove(at.expect("what is sent was posted"));
        debug_assert!(self.part(part).open > self.part(part).posted, "its end is closed below");
        let state = self.lane_mut(lane);
        if state.open && state.goodbye && state.posted.is_empty() {
            self.close_lane(lane);
        }
        if self.close_one(part) && device && !self.part(part).abandoned {
            self.gpu.tell(ToGpu::Over(of));
        }
    }

    /// A part has left the slot that it was to be sent from, if it had one.
    pub(super) fn slot_sent(&mut self, part: PartId) {
        if let Some(slot) = self.part_mut(part).slot.take() {
            self.release(slot);
        }
    }

    /// The slot that a part was to be sent from, which is another's from now on.
    pub(super) fn take_slot(&mut self, part: PartId) -> Option<Slot> {
        self.part_mut(part).slot.take()
    }
}

/// A length for the wire.
fn length_of(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("parts are far smaller than 4 GiB")
}
