//! What parts keep where their server may be lost and others go on for it: the last result, in
//! memory of its own, from where it is copied to the tensor once it is whole. So the contribution
//! is in the tensor until the result is there, and can be made once more; and a result that a
//! server has given only some ranks can be given to the others by these. Where ranks of a host sum
//! among themselves, the owner of a part keeps this for all, and the contribution is their sum.
//!
//! A part of a tensor on a GPU that has [memory of its own](Staging) has both there, and nothing is
//! copied. Of others the contribution is copied out of its slot as well, which is free then. If
//! slots were held until results are there, ranks that push in different orders could come to wait
//! for each other's slots.
//!
//! Invariant: memory for a result is overwritten only by a result of the next round, which is
//! published only when all ranks have had the last one.

use super::sending::QUIET;
use super::{LaneId, LanePeer, Nic, PartId, Phase, Report, Stage};
use crate::base::error::{Misfit, Source, Unasked};
use crate::rounds::{PartPlan, Slot, Staging};
use bps_engine::base::{Key, Round};
use bps_engine::mem::{Readable, Writable};
use bps_engine::proto::moving::HeldKey;
use bps_engine::transport::{Frame, Full, Landing};
use bps_engine::wire::header::{FLAG_PAYLOAD_CHECKSUM, FLAG_RESULT};
use bps_engine::wire::{Header, Kind, crc32c};

/// What is added to the number of a part for the token of a frame that gives its result back.
const GIVEN_BACK: u64 = 1 << 32;

/// The last result of a part.
pub(super) struct Kept {
    /// Of what results may have.
    room: usize,
    /// The result's; empty until one comes.
    bytes: Box<[u8]>,
    /// Of a tensor on the GPU: the contribution; empty until there is one, as ranks that only
    /// receive a broadcast never make one.
    contribution: Box<[u8]>,
    /// Where both are, in place of the two above.
    staging: Option<Staging>,
    /// Rounds whose results this rank has had.
    rounds: u64,
    /// Header of the last of them, while its bytes are here.
    result: Option<Header>,
    /// The last round whose contribution was there to be sent: this rank's bytes, or the sum of its
    /// group.
    offered: u64,
    /// While this rank gives it to a server, or asks one for it.
    restoring: Option<Restoring>,
}

#[derive(Clone, Copy)]
struct Restoring {
    round: u64,
    /// The server has what it needs of this rank.
    is_answered: bool,
    /// A transport has the bytes.
    is_posted: bool,
}

/// Keys that move, as a worker's lanes need it.
#[derive(Clone, Copy, Debug)]
pub struct Move {
    /// The part.
    pub key: Key,
    /// The lane to its core from now on.
    pub lane: LaneId,
    /// Rounds whose results all ranks have had.
    pub rounds: u64,
    /// Some ranks have had the result of the next, and the others are to get it.
    pub restores: bool,
}

/// The scheduler and this rank do not agree how far a part is.
#[derive(Debug, thiserror::Error)]
#[error(
    "{key} of `{tensor}` has moved to another server, at round {round} there, and this rank has \
     had the results of {rounds} rounds: that is a bug, please report it with the logs of all \
     processes"
)]
struct Astray {
    key: Key,
    tensor: String,
    round: u64,
    rounds: u64,
}

impl Kept {
    /// For results of so many bytes.
    pub(super) fn new(room: usize) -> Kept {
        Kept {
            room,
            bytes: Box::default(),
            contribution: Box::default(),
            staging: None,
            rounds: 0,
            result: None,
            offered: 0,
            restoring: None,
        }
    }

    /// What holds of it between two functions, in this round of its part; looked at where debug
    /// assertions are on.
    ///
    /// # Panics
    /// It does not.
    pub(super) fn check(&self, round: u64) {
        if !cfg!(debug_assertions) {
            return;
        }
        assert!(self.rounds <= round && self.offered <= round, "no round is ahead of its part's");
        assert!(self.bytes.is_empty() || self.bytes.len() == self.room, "results have one room");
        if let Some(result) = &self.result {
            let is_last = result.round.0 == self.rounds && result.length as usize <= self.room;
            assert!(is_last, "the result that is here is the last one, and whole");
        }
        if let Some(restoring) = self.restoring {
            let next = self.rounds + 1;
            assert!((self.rounds..=next).contains(&restoring.round), "it is the last or the next");
            let gives = restoring.is_posted || restoring.is_answered;
            assert!(!gives || restoring.round == self.rounds, "who gives a result has it");
        }
    }

    /// Memory for results, which has nothing of the GPU.
    fn own(&mut self) -> &mut [u8] {
        assert!(self.staging.is_none(), "what is staged has memory");
        if self.bytes.is_empty() {
            self.bytes = vec![0; self.room].into();
        }
        &mut self.bytes
    }

    /// Where a result of so many bytes lands.
    pub(super) fn landing(&mut self, length: usize) -> Writable {
        assert!(!self.restoring.is_some_and(|one| one.is_posted), "a frame has the last result");
        self.result = None;
        if let Some(staging) = self.staging {
            return staging.result().memory(length);
        }
        let bytes = &mut self.own()[..length];
        // SAFETY: the part's own bytes, which stay where they are until the endpoint is gone, which
        // is dropped before the parts. One result lands at a time, and none while a frame has the
        // last one: a part contributes to no round before that was sent.
        unsafe { Writable::new(bytes.as_mut_ptr(), bytes.len()) }
    }

    /// What has landed, of so many bytes.
    pub(super) fn landed(&self, length: usize) -> &[u8] {
        match self.staging {
            // SAFETY: the part's own bytes, in the host's memory, which are valid until the loop
            // has ended. Nothing lands there before the next round, and the GPU only reads them.
            Some(staging) => unsafe { staging.result().memory(length).readable().bytes() },
            None => &self.bytes[..length],
        }
    }

    /// What a part on the GPU has to send, once that was [offered](Nic::offer).
    pub(super) fn contribution(&self) -> Readable {
        if let Some(staging) = self.staging {
            return staging.slot().whole().readable();
        }
        // SAFETY: the part's own bytes, which stay where they are until the endpoint is gone, which
        // is dropped before the parts. They are written when a round is offered first, and no frame
        // has them then: the round before is over.
        unsafe { Readable::of(&self.contribution) }
    }

    /// Takes what is to be sent of a part on the GPU out of its slot, unless it stays there.
    fn take(&mut self, given: Readable) {
        if self.staging.is_some() {
            return;
        }
        if self.contribution.is_empty() {
            self.contribution = vec![0; given.len()].into();
        }
        assert!(self.contribution.len() == given.len(), "a part has one size");
        // SAFETY: a slot in the host's memory (`Nic::kept_for`), which the GPU has filled, or which
        // has the sum of a column; nobody writes there before it is given back.
        self.contribution.copy_from_slice(unsafe { given.bytes() });
    }

    /// Whether the part can't contribute to a round yet.
    pub(super) fn is_restoring(&self) -> bool {
        self.restoring.is_some()
    }
}

impl Nic {
    /// What a part with this plan keeps, if anything: it goes from this rank to a server, and
    /// servers keep nothing of it between its rounds.
    pub(super) fn kept_for(&self, plan: &PartPlan) -> Option<Box<Kept>> {
        let is_sum = plan.core.is_some() && plan.owner.is_none() && plan.store.is_none();
        let is_stateless = plan.encoding.is_none_or(|how| !how.auto && !how.feedback);
        if !self.config.keeps || !is_sum || !is_stateless {
            return None;
        }
        assert!(
            !plan.device || !self.has_slots_on_gpu(),
            "where servers may be lost, slots are in the host's memory"
        );
        let elements = plan.bytes / plan.dtype.size();
        let room = plan.encoding.map_or(plan.bytes, |encoding| encoding.room(elements));
        Some(Box::new(Kept::new(room)))
    }

    /// A part of a tensor on the GPU has memory of its own. What is encoded here, and not by the
    /// GPU, is not there as it travels, and may be longer.
    pub(super) fn stage(&mut self, part: PartId, staging: Staging) {
        let state = self.part_mut(part);
        state.staging = Some(staging);
        let is_coded_here = state.coded.as_ref().is_some_and(|coded| !coded.is_on_gpu());
        if let Some(kept) = &mut state.kept {
            assert!(staging.keeps(), "where servers may be lost, results land apart");
            let there = (!is_coded_here).then_some(staging);
            assert!(kept.rounds == 0 || kept.staging == there, "a part keeps its things there");
            kept.staging = there;
        }
        assert!(state.plan.device && staging.slot().whole().len() >= state.plan.bytes);
        state.check();
    }

    /// Whether a transport has the last result of a part, for a server.
    pub(super) fn gives_back(&self, part: PartId) -> bool {
        let kept = self.part(part).kept.as_ref();
        kept.is_some_and(|kept| kept.restoring.is_some_and(|one| one.is_posted))
    }

    /// A result is whole, and where it is to be unless it is kept: then it is copied there.
    pub(super) fn keep(&mut self, part: PartId, header: &Header, target: Option<Writable>) {
        let is_root = self.part(part).is_root(&self.config);
        let state = &mut self.parts[part.0 as usize];
        let Some(kept) = &mut state.kept else { return };
        let mut header = *header;
        let is_coded_here = state.coded.as_ref().is_some_and(|coded| !coded.is_on_gpu());
        let is_to_copy = !is_coded_here && kept.staging.is_none();
        match (target, state.memory) {
            (Some(target), _) if is_to_copy => {
                let landed = &kept.bytes[..header.length as usize];
                assert!(
                    target.len() == landed.len()
                        || state.coded.is_some() && target.len() > landed.len(),
                    "a result is as long as its part"
                );
                let target = target.part(0, landed.len());
                // SAFETY: the part's own bytes, and those of the tensor's part, or of a slot in the
                // host's memory, which nobody else has while the round is open; and what was sent
                // of it has arrived, since its result is here.
                unsafe { Readable::of(landed).copy_to(target, &self.config.team) };
            }
            (None, memory) if is_root => {
                let own = std::mem::take(&mut kept.contribution);
                // SAFETY: the root's own bytes, which it has broadcast and nobody writes.
                let given = unsafe { memory.map(|memory| memory.source().bytes()) };
                let given = given.unwrap_or(&own);
                kept.own().copy_from_slice(given);
                header.length = u32::try_from(given.len()).expect("parts are below 4 GiB");
                kept.contribution = own;
            }
            _ => {}
        }
        assert!(header.round.0 > kept.rounds, "a round has one result");
        (kept.rounds, kept.result) = (header.round.0, Some(header));
        kept.check(state.round);
    }

    /// The contribution of a part is there to be sent, to whichever server has the part then.
    pub(super) fn offer(&mut self, part: PartId) {
        let state = self.part_mut(part);
        let Some(kept) = &mut state.kept else { return };
        assert!(state.stage == Stage::Pushed && kept.offered <= state.round, "it is to be sent");
        kept.offered = state.round;
        if let Some(slot) = state.slot {
            assert!(state.posted == 0, "no frame has the last contribution");
            kept.take(slot.memory(state.plan.bytes).readable());
            self.slot_sent(part);
        }
    }

    /// A rank has died while its contribution was being added, so nothing is left of the sum: this
    /// rank's goes to the server once more.
    pub(super) fn on_asked_again(&mut self, lane: LaneId, header: &Header) -> Result<(), Misfit> {
        let part = self.known(header)?;
        self.endpoint.land(lane, Landing::NOTHING);
        let state = self.part(part);
        if state.abandoned {
            return Ok(());
        }
        let is_kept = state.kept.as_ref().is_some_and(|kept| kept.offered == state.round);
        let fits = header.length == 0
            && header.rank == self.config.rank
            && header.epoch == self.config.epoch
            && header.round.0 == state.round
            && state.plan.core == Some(lane)
            && state.stage == Stage::Asked
            && is_kept;
        if !fits {
            return Err(self.misfit(Unasked::Again, part, header));
        }
        self.part_mut(part).stage = Stage::Pushed;
        self.send_to_server(part);
        self.check_part(part);
        Ok(())
    }

    /// Whether what a part has to send waits for news of its server.
    pub(super) fn is_held_back(&self, part: PartId) -> bool {
        let state = self.part(part);
        let has_lane = state.plan.core.is_none_or(|core| self.lane(core).open);
        state.kept.as_ref().is_some_and(|kept| kept.is_restoring() || !has_lane)
    }

    /// A lane to a server has closed while others may go on for that: nothing is under way on it.
    pub(super) fn take_back(&mut self, lane: LaneId, landing: Option<(PartId, Option<Slot>)>) {
        assert!(!self.lane(lane).open, "what is posted on it would be sent");
        for part in self.lane(lane).posted.clone() {
            self.frame_sent(lane, part);
        }
        assert!(self.lane(lane).posted.is_empty(), "no transport has anything of it");
        if let Some((part, slot)) = landing {
            self.landing_lost(lane);
            if self.part(part).abandoned {
                self.part_mut(part).stage = Stage::Idle;
                self.close_one(part);
            }
            // Nothing lands any more, and what has landed is of no use.
            slot.into_iter().for_each(|slot| self.release(slot));
        }
        let parts = &self.parts;
        self.queue.remove(|part| parts[part.0 as usize].plan.core == Some(lane));
        for part in &mut self.parts {
            let Some(kept) = part.kept.as_mut().filter(|_| part.plan.core == Some(lane)) else {
                continue;
            };
            kept.restoring = None;
            if part.stage != Stage::Idle {
                assert!(part.stage != Stage::Granted, "what is kept is granted no slot");
                part.stage = Stage::Pushed;
            }
            part.check();
        }
        self.tell_held();
    }

    /// These servers are lost: lets go of their lanes, and says how far it is with their keys.
    pub(crate) fn lose_servers(&mut self, servers: &[u32]) {
        self.lost_servers = servers.to_vec();
        self.is_moving = true;
        for lane in (0..).map(LaneId).take(self.lanes.len()) {
            if self.is_lost(lane) && self.lane(lane).open {
                self.close_lane(lane);
            }
        }
        debug_assert!(self.queue.waiting().all(|part| self.part(*part).plan.core.is_some()));
        self.tell_held();
    }

    /// Whether a lane leads to a server that is lost.
    pub(super) fn is_lost(&self, lane: LaneId) -> bool {
        let peer = self.lane(lane).peer;
        matches!(peer, LanePeer::Server(server) if self.lost_servers.contains(&server))
    }

    /// Says how far it is with the keys of lost servers, once all lanes to these are closed.
    fn tell_held(&mut self) {
        let lanes = (0..).map(LaneId).take(self.lanes.len());
        let is_open = lanes.clone().any(|lane| self.is_lost(lane) && self.lane(lane).open);
        if !self.is_moving || is_open || self.phase != Phase::Running {
            return;
        }
        let is_lost: Vec<bool> = lanes.map(|lane| self.is_lost(lane)).collect();
        let is_lost = |lane: LaneId| is_lost[lane.0 as usize];
        let mut keys = Vec::new();
        for part in &mut self.parts {
            let Some(kept) = &mut part.kept else { continue };
            if part.plan.core.is_some_and(is_lost) {
                kept.restoring = None;
                let (key, rounds, holds) = (part.plan.key, kept.rounds, kept.result.is_some());
                keys.push(HeldKey { key, rounds, holds });
            }
        }
        let parts = &self.parts;
        self.restores.retain(|part| !parts[part.0 as usize].plan.core.is_some_and(is_lost));
        let lost = u32::try_from(self.lost_servers.len()).expect("servers are counted in u32");
        self.report(Report::Held { lost, keys });
    }

    /// Keys of lost servers are elsewhere now.
    pub(crate) fn moved(&mut self, moves: &[Move]) {
        self.is_moving = false;
        if self.phase == Phase::Over {
            return;
        }
        for one in moves {
            assert!(matches!(self.lane(one.lane).peer, LanePeer::Server(_)), "servers have keys");
            let Some(&part) = self.keys.get(&one.key) else { continue };
            let state = &mut self.parts[part.0 as usize];
            let open = (state.open > 0 && !state.abandoned).then_some(state.round);
            let Some(kept) = &mut state.kept else { continue };
            let is_offered = open == Some(kept.offered);
            let (round, rounds) = (one.rounds + 1, kept.rounds);
            let fits = rounds == one.rounds || one.restores && rounds == round;
            if !fits {
                let tensor = state.plan.name.to_string();
                let error = Astray { key: one.key, tensor, round, rounds };
                return self.report(Report::Failed { source: Source::new(error) });
            }
            state.plan.core = Some(one.lane);
            if one.restores {
                kept.restoring = Some(Restoring { round, is_answered: false, is_posted: false });
                self.restores.push_back(part);
            } else if is_offered && state.stage == Stage::Pushed {
                self.send_to_server(part);
            }
            self.check_part(part);
        }
    }

    /// Whether servers still need something of this rank, or it may have to give it.
    pub(crate) fn is_moving(&self) -> bool {
        self.is_moving
            || self.parts.iter().flat_map(|part| &part.kept).any(|kept| kept.is_restoring())
    }

    /// Posts what is to be said of results that are restored, as far as transports take it.
    pub(super) fn post_restores(&mut self) {
        for _ in 0..self.restores.len() {
            let Some(part) = self.restores.pop_front() else { return };
            if self.post_restore(part).is_err() {
                self.restores.push_back(part);
            }
        }
    }

    fn post_restore(&mut self, part: PartId) -> Result<(), Full> {
        let state = self.part(part);
        let (Some(lane), Some(kept)) = (state.plan.core, &state.kept) else { return Ok(()) };
        let Some(restoring) = kept.restoring else { return Ok(()) };
        if !self.lane(lane).open {
            return Err(Full);
        }
        let mut header = self.header(Kind::Contribution, state.plan.dtype);
        (header.key, header.round) = (state.plan.key, Round(restoring.round));
        let has_result = kept.rounds == restoring.round;
        let mut payload = Readable::EMPTY;
        if let Some(result) = kept.result.filter(|_| has_result) {
            header.flags = FLAG_RESULT | result.form().flag();
            (header.contributors, header.missing) = (result.contributors, result.missing);
            let bytes = kept.landed(result.length as usize);
            // SAFETY: the part's own bytes, which nobody writes before the frame was sent: see
            // `Kept::landing`.
            payload = unsafe { Readable::of(bytes) };
            header.length = result.length;
            if self.lane(lane).checks && !bytes.is_empty() {
                header.flags |= FLAG_PAYLOAD_CHECKSUM;
                header.payload_checksum = crc32c(bytes);
            }
        } else {
            header.flags = self.form(part).flag();
            header.contributors = self.group_size(&state.plan);
        }
        let is_posted = header.length > 0;
        let token = if is_posted { GIVEN_BACK + u64::from(part.0) } else { QUIET };
        self.endpoint.post(lane, &Frame::new(header.encode(), payload, token))?;
        self.statistics.posted(header.length as usize);
        let now = self.now;
        let state = self.part_mut(part);
        let Some(kept) = &mut state.kept else { return Ok(()) };
        if has_result {
            kept.restoring = Some(Restoring { is_posted, ..restoring });
        } else {
            // The answer is a result as any other.
            kept.restoring = None;
            if state.stage == Stage::Pushed {
                (state.stage, state.asked) = (Stage::Asked, now);
            }
        }
        state.check();
        Ok(())
    }

    /// A transport is done with a frame with this token, if it gave a result back.
    pub(super) fn given_back(&mut self, token: u64) -> bool {
        let part = token.checked_sub(GIVEN_BACK).and_then(|part| u32::try_from(part).ok());
        let Some(part) = part.map(PartId) else { return false };
        if let Some(kept) = &mut self.part_mut(part).kept
            && let Some(restoring) = &mut kept.restoring
        {
            assert!(restoring.is_posted, "what is sent was posted");
            restoring.is_posted = false;
            self.end_restoring(part);
            self.spoil_abandoned(part);
        }
        true
    }

    /// Takes the answer to a result that was given back, if this is one.
    pub(super) fn on_restored(&mut self, lane: LaneId, part: PartId, header: &Header) -> bool {
        let state = self.part_mut(part);
        let Some(kept) = &mut state.kept else { return false };
        let Some(restoring) = kept.restoring.as_mut().filter(|one| one.round == header.round.0)
        else {
            return false;
        };
        // An answer to nothing that was given, or a second one, fits no round either.
        let is_due = restoring.round == kept.rounds && !restoring.is_answered;
        if state.plan.core != Some(lane) || header.length != 0 || !is_due {
            return false;
        }
        restoring.is_answered = true;
        self.endpoint.land(lane, Landing::NOTHING);
        self.end_restoring(part);
        true
    }

    /// Goes on with a part whose result was given back, once nobody needs it any more.
    fn end_restoring(&mut self, part: PartId) {
        let state = self.part_mut(part);
        let Some(kept) = &mut state.kept else { return };
        if !kept.restoring.is_some_and(|one| one.is_answered && !one.is_posted) {
            return;
        }
        kept.restoring = None;
        debug_assert!(kept.result.is_some(), "what was given back is here");
        let is_offered = kept.offered == state.round;
        if is_offered && state.stage == Stage::Pushed && state.open > 0 && !state.abandoned {
            self.send_to_server(part);
        }
    }
}
