//! What comes to a NIC loop: publications, checked against what was pushed, and what the other
//! ranks of the group say. A peer is not trusted: what does not fit closes its lane and is
//! reported.

use super::staged::{Slot, Staged};
use super::{LaneId, Nic, Operation, Peer, Receiving, Report, RunPart, Stage, Tensor};
use bps_engine::base::Rank;
use bps_engine::limits::PARTS_MAX;
use bps_engine::trace::timeline::Mark;
use bps_engine::transport::{Carried, Landing};
use bps_engine::wire::header::FLAG_PAYLOAD_CHECKSUM;
use bps_engine::wire::{Header, Kind, RawHeader, crc32c, crc32c_append};

impl Nic {
    pub(super) fn on_header(&mut self, lane: LaneId, raw: &RawHeader, carried: Carried) {
        if let Carried::Declined(token) = carried {
            self.on_declined(token);
        }
        if matches!(self.lanes[lane.0 as usize].receiving, Receiving::Closing) {
            return;
        }
        self.statistics.counters.frames_in.add(1);
        let taken = Header::decode(raw).map_err(|invalid| invalid.to_string()).and_then(|header| {
            match (self.lanes[lane.0 as usize].peer, header.kind) {
                (Peer::Server(_), Kind::Refused) if header.flags & FLAG_PAYLOAD_CHECKSUM != 0 => {
                    self.altered(lane, &header, true);
                    Ok(())
                }
                (Peer::Server(_), Kind::Refused) => {
                    Err("it refused a frame of this rank; its log says why".into())
                }
                (_, Kind::Publication) => self.on_publication(lane, header),
                (Peer::Rank(rank), _) => self.on_word(lane, rank, header),
                (Peer::Server(_), kind) => Err(format!("a server does not send {kind:?}")),
            }
        });
        if let Err(message) = taken {
            self.refuse(lane, message);
        }
    }

    /// Closes a lane for what came on it.
    pub(super) fn refuse(&mut self, lane: LaneId, message: String) {
        let state = &mut self.lanes[lane.0 as usize];
        state.receiving = Receiving::Closing;
        let peer = state.peer;
        self.endpoint.close(lane);
        self.report(Report::Corrupt { peer, message });
    }

    /// Closes a lane because a payload is not what its sender's checksum says.
    fn altered(&mut self, lane: LaneId, header: &Header, sent: bool) {
        let state = &mut self.lanes[lane.0 as usize];
        state.receiving = Receiving::Closing;
        let (peer, key) = (state.peer, header.key);
        let name = self.known(header).map_or("a tensor", |(tensor, _)| &tensor.plan.name);
        let what = format!("the payload of `{name}` ({key}, round {})", header.round.0);
        self.endpoint.close(lane);
        self.report(Report::Altered { peer, sent, what });
    }

    fn on_publication(&mut self, lane: LaneId, header: Header) -> Result<(), String> {
        let length = header.length as usize;
        let Some((part, target)) = self.check(lane, &header)? else {
            self.unwanted(lane, length);
            return Ok(());
        };
        // A second one of this round will not fit.
        self.set_stage(part, Stage::Pushed);
        let (begins, ends) = self.marks(lane, part);
        self.trace.frame(begins, &header);
        if length == 0 {
            self.trace.frame(ends, &header);
            self.endpoint.land(lane, Landing::Pieces, 0);
            self.on_result(part, None);
        } else if target.is_null() {
            self.land_staged(lane, part, header);
        } else {
            let state = &mut self.lanes[lane.0 as usize];
            state.receiving = Receiving::Landing { part, header, target, slot: None };
            self.endpoint.land(lane, Landing::Into(target), length);
        }
        Ok(())
    }

    /// A payload passes by.
    pub(super) fn unwanted(&mut self, lane: LaneId, length: usize) {
        self.lanes[lane.0 as usize].receiving = match length {
            0 => Receiving::Header,
            left => Receiving::Unwanted { left },
        };
        self.endpoint.land(lane, Landing::Pieces, length);
    }

    /// A publication against what was pushed: its part and where it lands (null: in a slot), or
    /// nothing if nobody wants it any more.
    fn check(&self, lane: LaneId, header: &Header) -> Result<Option<(RunPart, *mut u8)>, String> {
        let key = header.key;
        let (tensor, position) = self.known(header)?;
        if tensor.poisoned.is_some() {
            return Ok(None);
        }
        let part = tensor.plan.parts[position as usize];
        let root =
            matches!(tensor.plan.operation, Operation::Broadcast(root) if root == self.config.rank);
        let fits = header.rank == self.config.rank
            && header.epoch == self.config.epoch
            && header.dtype == tensor.plan.dtype
            && header.offset == 0
            && header.length as usize == if root { 0 } else { part.bytes }
            && header.round.0 == tensor.round
            && part.owner.or(part.core) == Some(lane)
            && tensor.stages[position as usize] == Stage::Asked;
        let run = tensor.run.filter(|_| fits).ok_or_else(|| {
            format!("a publication of `{}` ({key}) does not fit what was pushed", tensor.plan.name)
        })?;
        let target = match self.runs[run as usize].memory.target {
            // The tensor is on the GPU.
            target if target.is_null() => target,
            target => target.wrapping_add(part.offset),
        };
        Ok(Some((RunPart { run, part: position }, target)))
    }

    /// The tensor and the place of the part that a frame is about.
    fn known(&self, header: &Header) -> Result<(&Tensor, u32), String> {
        let Header { key, kind, .. } = *header;
        let &(tensor, position) =
            self.keys.get(&key).ok_or_else(|| format!("{kind:?} of unknown {key}"))?;
        let tensor = self.tensors.get(tensor as usize).and_then(Option::as_ref);
        Ok((tensor.ok_or_else(|| format!("{key} has no tensor"))?, position))
    }

    /// What a rank of the group says.
    fn on_word(&mut self, lane: LaneId, rank: Rank, header: Header) -> Result<(), String> {
        let (key, round) = (header.key, header.round.0);
        let says_its_own = !matches!(header.kind, Kind::Grant | Kind::Publication);
        let named = if says_its_own { rank } else { self.config.rank };
        if header.epoch != self.config.epoch || header.rank != named {
            return Err(format!(
                "a frame on the lane of {rank}, epoch {}, says {}, epoch {}",
                self.config.epoch.0, header.rank, header.epoch.0
            ));
        }
        if header.kind == Kind::Contribution {
            return self.on_contribution(lane, &header);
        }
        if header.length != 0 {
            return Err(format!("{:?} has a payload", header.kind));
        }
        match header.kind {
            Kind::GpuReady | Kind::GpuReduce | Kind::GpuLanded | Kind::GpuGather | Kind::GpuEnd => {
                self.on_gpu_word(lane, rank, &header)?;
            }
            Kind::Ready | Kind::Grant
                if self.column.place(lane).is_err()
                    && self.known(&header).is_ok_and(|(tensor, _)| tensor.plan.device) =>
            {
                return Err(format!("{:?} of {key}, whose tensor is on GPUs", header.kind));
            }
            Kind::Ready => {
                if !self.keys.contains_key(&key) && self.group.gathers.len() >= PARTS_MAX {
                    return Err(format!("it has pushed over {PARTS_MAX} keys"));
                }
                // A tensor on GPUs is not ready before all of the host know it.
                let mut device = false;
                if let Ok((tensor, at)) = self.known(&header) {
                    device = tensor.plan.device;
                    if tensor.plan.parts[at as usize].owner.is_some() {
                        return Err(format!("{key} is not this rank's to sum"));
                    }
                }
                let now = self.now;
                let circle = self.circle_mut(device);
                let peer = circle.place(lane)?;
                let all = circle.gathers.peer(key, peer, round, now);
                self.endpoint.land(lane, Landing::Pieces, 0);
                if all.map_err(|untimely| untimely.to_string())? {
                    self.gathered_key(key);
                }
            }
            Kind::Grant => {
                let (tensor, position) = self.known(&header)?;
                let part = tensor.plan.parts[position as usize];
                let wanted = tensor.poisoned.is_none();
                // Of a tensor on GPUs, it is pushed once it is in a slot.
                let is_pushed = tensor.slots.get(position as usize).is_none_or(Option::is_some);
                let fits = part.owner == Some(lane)
                    && is_pushed
                    && round == tensor.round
                    && tensor.stages[position as usize] == Stage::Pushed;
                let run = tensor.run.filter(|_| fits);
                if wanted {
                    let run = run.ok_or_else(|| {
                        format!("a grant of {key}, round {round}, does not fit what was pushed")
                    })?;
                    self.send_contribution(lane, RunPart { run, part: position }, round);
                }
                self.endpoint.land(lane, Landing::Pieces, 0);
            }
            Kind::Goodbye => {
                let state = &mut self.lanes[lane.0 as usize];
                state.goodbye = true;
                state.receiving = Receiving::Closing;
                // Whoever waits for this rank learns of it in this turn.
                self.next_tick = self.now;
                self.pipeline.tell(Staged::Gone(rank));
                if self.lanes[lane.0 as usize].posted == 0 {
                    self.endpoint.close(lane);
                }
            }
            kind => return Err(format!("a rank does not send {kind:?} to another")),
        }
        Ok(())
    }

    pub(super) fn on_landed(&mut self, lane: LaneId) {
        let state = &mut self.lanes[lane.0 as usize];
        let receiving = std::mem::replace(&mut state.receiving, Receiving::Header);
        let Receiving::Landing { part, header, target, slot } = receiving else { return };
        self.statistics.counters.bytes_in.add(u64::from(header.length));
        if header.flags & FLAG_PAYLOAD_CHECKSUM != 0 {
            // SAFETY: these bytes have just landed in the caller's memory, which is valid until the
            // task is finished.
            let landed =
                unsafe { std::slice::from_raw_parts(target.cast_const(), header.length as usize) };
            if crc32c(landed) != header.payload_checksum {
                return self.altered(lane, &header, false);
            }
        }
        self.trace.frame(self.marks(lane, part).1, &header);
        self.on_result(part, slot);
    }

    /// What begins and ends with a publication of a part on this lane.
    pub(super) fn marks(&self, lane: LaneId, of: RunPart) -> (Mark, Mark) {
        let device = self.planned(of).is_some_and(|(tensor, _)| tensor.plan.device);
        match self.lanes[lane.0 as usize].peer {
            Peer::Rank(_) if !device => (Mark::Copying, Mark::Copied),
            Peer::Rank(_) | Peer::Server(_) => (Mark::Landing, Mark::Landed),
        }
    }

    pub(super) fn on_piece(&mut self, lane: LaneId, data: *const u8, length: usize) {
        match &mut self.lanes[lane.0 as usize].receiving {
            Receiving::Contribution { peer, device, header, done, checksum } => {
                let (peer, device) = (*peer, *device);
                self.statistics.counters.bytes_in.add(length as u64);
                if header.flags & FLAG_PAYLOAD_CHECKSUM != 0 {
                    // SAFETY: the transport keeps a piece valid for its length until `consume`.
                    let piece = unsafe { std::slice::from_raw_parts(data, length) };
                    *checksum = crc32c_append(*checksum, piece);
                    *done += length;
                    // The last piece is not added, so the sum never goes to anybody.
                    if *done == header.length as usize && *checksum != header.payload_checksum {
                        let header = *header;
                        return self.altered(lane, &header, false);
                    }
                }
                self.circle_mut(device).collector.piece(peer, data, length);
                self.add_up(device);
            }
            Receiving::Unwanted { left } => {
                *left = left.saturating_sub(length);
                if *left == 0 {
                    self.lanes[lane.0 as usize].receiving = Receiving::Header;
                }
                self.endpoint.consume(lane);
            }
            _ => self.endpoint.consume(lane),
        }
    }

    /// The result of a part is in the target, or in the slot.
    pub(super) fn on_result(&mut self, of: RunPart, slot: Option<Slot>) {
        let is_staged = self.planned(of).is_some_and(|(tensor, _)| tensor.plan.device);
        if is_staged {
            return self.staged_result(of, slot);
        }
        self.statistics.counters.rounds.add(1);
        self.set_stage(of, Stage::Idle);
        // A task that failed meanwhile was only waiting for its memory.
        if self.runs[of.run as usize].failed.is_none() {
            self.publish(of);
        }
        self.close_one(of.run);
    }
}
