//! What comes to the lanes: publications, checked against what was pushed, and what the other ranks
//! of the group say. A peer is not trusted: what does not fit closes its lane and is reported.

use super::{LaneId, LanePeer, Nic, Operation, Part, PartId, Receiving, Report, Stage};
use crate::base::error::{Misfit, PartMisfit, Unasked};
use crate::host::gather::Unfit;
use crate::rounds::{Lacks, Slot};
use bps_engine::base::{Rank, Round};
use bps_engine::limits::PARTS_MAX;
use bps_engine::mem::Writable;
use bps_engine::optimize::Act;
use bps_engine::proto::store::Store;
use bps_engine::trace::timeline::Mark;
use bps_engine::transport::{Carried, Landing, Piece};
use bps_engine::wire::header::{FLAG_PAYLOAD_CHECKSUM, FLAG_RESULT};
use bps_engine::wire::{Header, Kind, RawHeader, crc32c, crc32c_append};

/// What peers said of who has pushed what.
fn misfit_of(unfit: Unfit) -> Misfit {
    match unfit {
        Unfit::Untimely { key, round, open } => Misfit::Untimely { key, round, open },
        Unfit::Outside { key } => Misfit::Outside { key },
    }
}

impl Nic {
    pub(super) fn on_header(&mut self, lane: LaneId, raw: &RawHeader, carried: Carried) {
        if let Carried::Declined(token) = carried {
            self.on_declined(token);
        }
        if matches!(self.lane(lane).receiving, Receiving::Closing) {
            return;
        }
        let state = self.lane(lane);
        let is_free = matches!(state.receiving, Receiving::Header);
        assert!(is_free && state.open, "frames of a lane follow one another");
        self.statistics.counters.frames_in.add(1);
        let taken = Header::decode(raw).map_err(Misfit::from).and_then(|header| {
            match (self.lane(lane).peer, header.kind) {
                (LanePeer::Server(_), Kind::Refused)
                    if header.flags & FLAG_PAYLOAD_CHECKSUM != 0 =>
                {
                    self.altered(lane, &header, true);
                    Ok(())
                }
                (LanePeer::Server(_), Kind::Refused) if header.act != 0 => {
                    self.contradicted(lane, &header)
                }
                (LanePeer::Server(_), Kind::Refused) => Err(Misfit::Refused),
                (_, Kind::Publication) => self.on_publication(lane, header),
                (LanePeer::Server(_), Kind::Grant) => self.on_asked_again(lane, &header),
                (LanePeer::Rank(rank), _) => self.on_word(lane, rank, &header),
                (LanePeer::Server(_), kind) => Err(Misfit::NotOfServer(kind)),
            }
        });
        if let Err(misfit) = taken {
            self.refuse(lane, misfit);
        }
    }

    /// What to say of a frame about a part that is not what the part waits for.
    pub(super) fn misfit(&self, what: Unasked, part: PartId, header: &Header) -> Misfit {
        let Part { plan, round: open, .. } = self.part(part);
        Misfit::Part(PartMisfit {
            what,
            tensor: plan.name.to_string(),
            key: header.key,
            round: header.round.0,
            bytes: header.length,
            part_bytes: plan.bytes,
            open: *open,
        })
    }

    /// Closes a lane for what came on it.
    fn refuse(&mut self, lane: LaneId, misfit: Misfit) {
        let state = self.lane_mut(lane);
        state.receiving = Receiving::Closing;
        let peer = state.peer;
        self.close_lane(lane);
        debug_assert!(matches!(self.lane(lane).receiving, Receiving::Closing));
        self.report(Report::Corrupt { peer, misfit });
    }

    /// Closes a lane because a payload is not what its sender's checksum says.
    fn altered(&mut self, lane: LaneId, header: &Header, sent: bool) {
        let state = self.lane_mut(lane);
        state.receiving = Receiving::Closing;
        let (peer, key) = (state.peer, header.key);
        let tensor = self.known(header).ok().map(|part| self.part(part).plan.name.to_string());
        self.close_lane(lane);
        self.report(Report::Altered { peer, sent, tensor, key, round: header.round.0 });
    }

    fn on_publication(&mut self, lane: LaneId, header: Header) -> Result<(), Misfit> {
        let (part, length) = (self.known(&header)?, header.length as usize);
        if self.on_restored(lane, part, &header) {
            return Ok(());
        }
        if self.part(part).abandoned {
            self.unwanted(lane, length);
            return Ok(());
        }
        // The root of a broadcast has died before it gave its bytes: there is no result.
        let is_broadcast = matches!(self.part(part).plan.operation, Operation::Broadcast(_));
        let is_lost = is_broadcast && header.contributors == 0 && length == 0;
        if !self.is_due(part, lane, &header, is_lost) {
            return Err(self.misfit(Unasked::Publication, part, &header));
        }
        // A second one of this round will not fit.
        let state = self.part_mut(part);
        state.stage = Stage::Landing;
        let by_rank = state.plan.store.and_then(Store::backup).is_some();
        state.lacks = Lacks { ranks: header.missing, by_rank, is_lost };
        // Of a stored part it says the version of the value, which matters to nobody here.
        let header = Header { round: Round(self.part(part).round), ..header };
        let (begins, ends) = self.marks(lane, part);
        self.trace.frame(begins, &header);
        if length == 0 {
            self.trace.frame(ends, &header);
            self.keep(part, &header, None);
            self.endpoint.land(lane, Landing::NOTHING);
            self.on_result(part, None);
        } else if let Some((target, slot)) = self.part(part).landing() {
            self.land(lane, part, header, (target, slot));
        } else {
            self.land_in_slot(lane, part, header);
        }
        Ok(())
    }

    /// A publication lands whose result is to be in the target, which may be a slot.
    pub(super) fn land(
        &mut self,
        lane: LaneId,
        part: PartId,
        header: Header,
        (target, slot): (Writable, Option<Slot>),
    ) {
        let into = self.lands_in(lane, part, &header, target);
        assert!(into.len() == header.length as usize, "a payload has the room that it needs");
        let state = self.part(part);
        assert!(state.stage == Stage::Landing && state.round == header.round.0, "it is awaited");
        self.landing_begins(lane);
        self.lane_mut(lane).receiving = Receiving::Landing { part, header, into, target, slot };
        self.endpoint.land(lane, Landing::Into(into));
    }

    /// A payload passes by.
    pub(super) fn unwanted(&mut self, lane: LaneId, length: usize) {
        let receiving = &self.lane(lane).receiving;
        let is_unanswered = matches!(receiving, Receiving::Header | Receiving::Held { .. });
        assert!(is_unanswered, "its payload goes somewhere already");
        self.lane_mut(lane).receiving = match length {
            0 => Receiving::Header,
            left => Receiving::Unwanted { left },
        };
        self.endpoint.land(lane, Landing::Pieces(length));
    }

    /// Whether a publication is the one that the part waits for.
    fn is_due(&self, id: PartId, lane: LaneId, header: &Header, is_lost: bool) -> bool {
        let (part, length) = (self.part(id), header.length as usize);
        // Who has the result, or does not get it, is only told that it is there.
        let receives = part.plan.receiver.is_none_or(|receiver| receiver == self.config.rank);
        let fits = match receives && !part.is_root(&self.config) {
            true => is_lost || self.may_publish(lane, id, header),
            false => length == 0,
        };
        fits && header.rank == self.config.rank
            && header.epoch == self.config.epoch
            && header.dtype == part.plan.dtype
            && header.offset == 0
            && header.missing.count_ones() <= self.contributors(&part.plan)
            && part.awaits(header.round)
            && part.plan.owner.or(part.plan.core) == Some(lane)
            && part.stage == Stage::Asked
    }

    /// The part that a frame is about.
    pub(super) fn known(&self, header: &Header) -> Result<PartId, Misfit> {
        let Header { key, kind, .. } = *header;
        self.keys.get(&key).copied().ok_or(Misfit::UnknownKey { kind, key })
    }

    /// What a rank of the group says.
    fn on_word(&mut self, lane: LaneId, rank: Rank, header: &Header) -> Result<(), Misfit> {
        let Header { kind, key, length: bytes, epoch: said, .. } = *header;
        let says_its_own = !matches!(kind, Kind::Grant | Kind::Publication);
        let (named, epoch) =
            (if says_its_own { rank } else { self.config.rank }, self.config.epoch);
        if said != epoch || header.rank != named {
            return Err(Misfit::Speaker { lane: rank, epoch, rank: header.rank, said });
        }
        if kind == Kind::Contribution {
            if header.flags & FLAG_RESULT != 0 {
                return Err(Misfit::Result { key });
            }
            return self.on_contribution(lane, header);
        }
        if bytes != 0 {
            return Err(Misfit::Payload { kind, bytes });
        }
        match kind {
            Kind::Ready => self.on_ready(lane, header)?,
            Kind::Grant => self.on_grant(lane, header)?,
            Kind::Goodbye => self.on_goodbye(lane),
            kind => return Err(Misfit::NotOfRank(kind)),
        }
        Ok(())
    }

    /// Whether a rank has a share of a part, if that is known.
    fn check_share(&self, lane: LaneId, header: &Header) -> Result<(), Misfit> {
        let Header { kind, key, .. } = *header;
        let is_device = self.known(header).is_ok_and(|part| self.part(part).plan.device);
        if is_device && self.column.place(lane).is_err() {
            return Err(Misfit::OnGpus { kind, key });
        }
        Ok(())
    }

    /// A rank of the group has pushed a part that this one owns.
    fn on_ready(&mut self, lane: LaneId, header: &Header) -> Result<(), Misfit> {
        self.check_share(lane, header)?;
        let (key, round, now) = (header.key, header.round.0, self.now);
        let part = self.known(header).ok();
        if part.is_none() && self.group.gathers.len() >= PARTS_MAX {
            return Err(Misfit::TooManyKeys);
        }
        if part.is_some_and(|part| self.part(part).plan.owner.is_some()) {
            return Err(Misfit::NotOwned { key });
        }
        // A tensor on GPUs is not ready before all of the host know it.
        let device = part.is_some_and(|part| self.part(part).plan.device);
        let circle = self.circle_mut(device);
        let peer = circle.place(lane)?;
        let act = Act::from_word(header.act);
        if act != Act::NONE && self.disagrees((key, part), round, Some(peer), act) {
            self.endpoint.land(lane, Landing::NOTHING);
            return Ok(());
        }
        let all = self.circle_mut(device).gathers.peer(key, peer, round, now);
        self.endpoint.land(lane, Landing::NOTHING);
        if all.map_err(misfit_of)? {
            let part = part.expect("this rank has pushed it too");
            if !self.part(part).abandoned {
                self.gathered(part);
            }
        }
        Ok(())
    }

    /// The owner of a part asks for this rank's contribution.
    fn on_grant(&mut self, lane: LaneId, header: &Header) -> Result<(), Misfit> {
        self.check_share(lane, header)?;
        let (part, round) = (self.known(header)?, header.round.0);
        let state = self.part(part);
        // Of a tensor on GPUs, it is pushed once it is in a slot.
        let is_pushed = !state.plan.device || state.slot.is_some();
        let fits = state.plan.owner == Some(lane)
            && is_pushed
            && round == state.round
            && state.stage == Stage::Pushed;
        if !state.abandoned {
            if !fits {
                return Err(self.misfit(Unasked::Grant, part, header));
            }
            self.send_contribution(lane, part);
        }
        self.endpoint.land(lane, Landing::NOTHING);
        Ok(())
    }

    fn on_goodbye(&mut self, lane: LaneId) {
        let state = self.lane_mut(lane);
        assert!(state.open && !state.goodbye, "what comes after a goodbye is not read");
        state.goodbye = true;
        state.receiving = Receiving::Closing;
        let has_our_memory = !state.posted.is_empty();
        // Whoever waits for this rank learns of it in this turn.
        self.next_tick = self.now;
        if !has_our_memory {
            self.close_lane(lane);
        }
    }

    pub(super) fn on_landed(&mut self, lane: LaneId) {
        let state = self.lane_mut(lane);
        let Receiving::Landing { part, header, into, target, slot } = state.receiving else {
            let is_closing = matches!(state.receiving, Receiving::Closing);
            assert!(is_closing, "what has landed was to land, unless the lane closes");
            return;
        };
        state.receiving = Receiving::Header;
        let round = self.part(part).round;
        assert!(round == header.round.0, "what lands keeps its round open");
        self.statistics.counters.bytes_in.add(u64::from(header.length));
        self.landing_ends(lane, header.length as usize);
        if header.flags & FLAG_PAYLOAD_CHECKSUM != 0 {
            // SAFETY: these bytes have just landed here, which they do only in the host's memory,
            // and the loop does nothing else with a part whose result comes.
            let landed = crc32c(unsafe { into.readable().bytes() });
            if landed != header.payload_checksum {
                return self.altered(lane, &header, false);
            }
        }
        if let Err(misfit) = self.decode(lane, part, &header, target) {
            return self.refuse(lane, misfit);
        }
        self.keep(part, &header, Some(target));
        if matches!(self.lane(lane).peer, LanePeer::Server(_)) {
            self.spared(part, header.length as usize);
        }
        self.trace.frame(self.marks(lane, part).1, &header);
        self.on_result(part, slot);
    }

    /// What begins and ends with a publication of a part on this lane.
    pub(super) fn marks(&self, lane: LaneId, part: PartId) -> (Mark, Mark) {
        match self.lane(lane).peer {
            LanePeer::Rank(_) if !self.part(part).plan.device => (Mark::Copying, Mark::Copied),
            LanePeer::Rank(_) | LanePeer::Server(_) => (Mark::Landing, Mark::Landed),
        }
    }

    pub(super) fn on_piece(&mut self, lane: LaneId, piece: Piece) {
        let length = piece.len();
        match &mut self.lanes[lane.0 as usize].receiving {
            Receiving::Contribution { peer, device, header, done, checksum } => {
                let (peer, device) = (*peer, *device);
                *done += length;
                assert!(*done <= header.length as usize, "more has come than was announced");
                self.statistics.counters.bytes_in.add(length as u64);
                // SAFETY: it came with the last poll, and nobody has closed its lane since, which
                // would receive nothing then. Only the circle keeps it: it is consumed when the
                // collector says that it is done with it (`add_up`, `forget_in_circle`), which is
                // made to forget it when this end closes the lane (`close_lane`).
                let piece = unsafe { piece.lend() };
                if header.flags & FLAG_PAYLOAD_CHECKSUM != 0 {
                    // SAFETY: a piece that was not consumed is written by nobody in this process.
                    *checksum = crc32c_append(*checksum, unsafe { piece.bytes() });
                    // The last piece is not added, so the sum never goes to anybody.
                    if *done == header.length as usize && *checksum != header.payload_checksum {
                        let header = *header;
                        return self.altered(lane, &header, false);
                    }
                }
                self.circle_mut(device).collector.piece(peer, piece);
                self.add_up(device);
            }
            Receiving::Unwanted { left } => {
                *left = left.checked_sub(length).expect("a payload has the length of its header");
                if *left == 0 {
                    self.lane_mut(lane).receiving = Receiving::Header;
                }
                self.endpoint.consume(lane);
            }
            // The lane closes, and what still comes on it is nobody's.
            _ => self.endpoint.consume(lane),
        }
    }

    /// The result of a part is in the target, or in the slot.
    pub(super) fn on_result(&mut self, part: PartId, slot: Option<Slot>) {
        self.statistics.counters.rounds.add(1);
        if self.part(part).plan.device {
            return self.on_gpu_result(part, slot);
        }
        let state = self.part_mut(part);
        assert!(state.stage != Stage::Idle && slot.is_none(), "a round has one result");
        state.stage = Stage::Idle;
        // Of a part that was abandoned meanwhile, only the memory was waited for.
        if !self.part(part).abandoned {
            self.publish(part);
        }
        self.close_one(part);
    }

    /// Whether somebody else's bytes are what a broadcast gives to all, or what a stored part
    /// begins with.
    pub(super) fn is_silent(&self, part: &Part) -> bool {
        let store = part.plan.store.and_then(Store::deltas).filter(|_| part.round == 1);
        let root = match (part.plan.operation, store) {
            (Operation::Broadcast(root), _) => Some(root),
            (_, store) => store.map(|store| store.root),
        };
        root.is_some_and(|root| root != self.config.rank)
    }
}
