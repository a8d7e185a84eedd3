//! How rounds and lanes end before their time: a part that is of no use any more, a lane that
//! closes, a job that is over, a rank that leaves.

#![forbid(unsafe_code)]

use super::circle::Circle;
use super::{LaneId, LanePeer, Nic, PartId, PartWord, Phase, Receiving, Report, Stage};
use crate::base::error::RoundSeen;
use bps_engine::proto::messages::RoundOf;
use bps_engine::transport::Cause;
use std::collections::VecDeque;

impl Nic {
    /// Nobody wants rounds of this part any more: one that is open is over once no transport has
    /// its memory.
    pub(super) fn abandon_part(&mut self, part: PartId) {
        let state = self.part_mut(part);
        assert!(!state.abandoned, "a part is abandoned once");
        state.abandoned = true;
        if !state.is_open() {
            return;
        }
        let round = state.round;
        self.queue.remove(|one| *one == part);
        let mut unsaid = Vec::new();
        // That a round before is over, the others are still to hear.
        let is_of_round = |word: &PartWord| word.part == part && word.round == round;
        for lane in &mut self.lanes {
            unsaid.extend(lane.outbox.iter().filter(|word| is_of_round(word)));
            lane.outbox.retain(|word| !is_of_round(word));
        }
        self.forget_in_circle(part);
        self.give_slots_back(part, &unsaid);
        self.drop_held(part);
        self.forget_grant(part);
        let is_landing = self.lanes.iter().any(
            |lane| matches!(&lane.receiving, Receiving::Landing { part: one, .. } if *one == part),
        );
        let state = self.part_mut(part);
        // No other result will come for it: only memory that a transport still has is open.
        state.open = state.posted + u32::from(is_landing);
        if !is_landing {
            state.stage = Stage::Idle;
        }
        if state.open == 0 {
            self.end_round(part);
        }
        self.check_part(part);
    }

    /// The job is over: the kernel must let go of all memory before any task is finished.
    pub(crate) fn close(&mut self) {
        self.phase = Phase::Over;
        for lane in (0..).map(LaneId).take(self.lanes.len()) {
            self.close_lane(lane);
        }
        let is_open = |circle: &Circle| circle.collector.is_fed();
        assert!(![&self.group, &self.column].into_iter().any(is_open), "pieces are nobody's");
    }

    /// Closes a lane from this end. Pieces that have come on it are the transport's again; what was
    /// landing has its memory until the lane is gone.
    pub(super) fn close_lane(&mut self, lane: LaneId) {
        let state = self.lane_mut(lane);
        if matches!(state.receiving, Receiving::Contribution { .. }) {
            state.receiving = Receiving::Closing;
        }
        self.forget_pieces(lane);
        let is_lent = matches!(self.lane(lane).receiving, Receiving::Contribution { .. });
        assert!(!is_lent, "pieces of a closed lane are not added");
        self.endpoint.close(lane);
    }

    /// The bytes of contributions that have come on a lane are not to be added.
    fn forget_pieces(&mut self, lane: LaneId) {
        for circle in [&mut self.group, &mut self.column] {
            if let Ok(peer) = circle.place(lane) {
                circle.collector.gone(peer);
            }
        }
    }

    /// This rank leaves in good order, perhaps to come back: says so on each lane that has room.
    pub(crate) fn leave(&mut self, suspends: bool) {
        self.suspends = suspends;
        assert!(self.phase == Phase::Running && !self.is_open(), "nothing is under way");
        self.phase = Phase::Leaving;
        debug_assert!(self.queue.is_empty() && self.gathered.is_empty(), "all rounds are over");
        self.say_goodbyes();
    }

    /// Whether all is said that was to be said to the ranks of the group that are there.
    #[must_use]
    pub(crate) fn is_all_said(&self) -> bool {
        // Who has left before hears nothing more.
        self.lanes.iter().all(|lane| lane.outbox.is_empty() || !lane.open)
    }

    /// Says goodbye on each lane that has room for it. A lane that ends without has died, as its
    /// other end sees it, and takes the job with it.
    pub(crate) fn say_goodbyes(&mut self) {
        if self.phase != Phase::Leaving {
            return;
        }
        for id in (0..).map(LaneId).take(self.lanes.len()) {
            let lane = self.lane(id);
            if lane.open && !lane.said_goodbye && self.say_goodbye(id).is_ok() {
                self.lane_mut(id).said_goodbye = true;
            }
        }
    }

    pub(super) fn on_closed(&mut self, lane: LaneId, cause: Cause) {
        let round = self.where_it_stands();
        let is_lost = self.is_lost(lane);
        let state = self.lane_mut(lane);
        assert!(state.open, "a lane closes once");
        state.open = false;
        let receiving = std::mem::replace(&mut state.receiving, Receiving::Closing);
        let (peer, goodbye) = (state.peer, state.goodbye);
        // Who has left in good order has all that it needs, and no transport has our memory now.
        let has_left = goodbye && self.phase != Phase::Over;
        let unsent = if has_left { self.lane(lane).posted.clone() } else { VecDeque::new() };
        self.forget_pieces(lane);
        unsent.into_iter().for_each(|part| self.frame_sent(lane, part));
        if self.phase == Phase::Running && !goodbye && !is_lost {
            self.report(Report::Lost { peer, cause, round });
        }
        if self.phase == Phase::Running && self.config.keeps && matches!(peer, LanePeer::Server(_))
        {
            let landing = match receiving {
                Receiving::Landing { part, slot, .. } => Some((part, slot)),
                _ => None,
            };
            self.take_back(lane, landing);
        }
        self.check_if_small();
    }

    /// The round that is open, or the last one.
    pub(crate) fn where_it_stands(&self) -> Option<RoundSeen> {
        let open = self.parts.iter().find(|part| part.is_open());
        let (part, is_open) = match (open, self.latest) {
            (Some(part), _) => (part, true),
            (None, Some(latest)) => (self.part(latest), false),
            _ => return None,
        };
        let of = RoundOf { tensor: part.plan.name.to_string(), round: part.round };
        Some(RoundSeen { of, is_open })
    }
}
