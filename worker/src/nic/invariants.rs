//! What holds of the lanes whenever no function of the loop is at work: parts, lanes, queues and
//! slots say the same of each other. Functions end with the check of what they have changed, and a
//! turn with that of all.
//!
//! All of it but [`Nic::check_plan`] is looked at where debug assertions are on: that is, in all
//! tests and in the simulation. A release build has the assertions that stand in the functions.

#![forbid(unsafe_code)]

use super::{
    Lane, LaneId, LanePeer, Nic, Part, PartId, PartPlan, PartWord, Phase, Receiving, Stage,
};
use crate::rounds::Slot;
use bps_engine::wire::Kind;

/// Parts of a loop that looks at all of them after every turn with events; one with more does that
/// at each tick.
const SMALL: usize = 256;

impl Part {
    /// After each function that has changed the part.
    ///
    /// # Panics
    /// The fields do not agree.
    pub(super) fn check(&self) {
        if !cfg!(debug_assertions) {
            return;
        }
        let (plan, stage) = (&self.plan, self.stage);
        let at = (&plan.name, plan.key, self.round, stage);
        assert!(self.posted <= self.open, "what is posted is open: {at:?}");
        assert!(self.is_open() || stage == Stage::Idle, "it waits for nothing: {at:?}");
        assert!(self.round > 0 || !self.is_open(), "rounds count from 1: {at:?}");
        if plan.device {
            assert!(self.memory.is_none(), "a part on the GPU has slots: {at:?}");
        } else {
            let slots = [self.slot, self.result, self.staging.map(|staging| staging.slot())];
            assert!(slots == [None; 3], "a part of the host is in its tensor: {at:?}");
            assert!(self.memory.is_none() || self.is_open(), "it is its caller's again: {at:?}");
        }
        if stage == Stage::Granted {
            // What makes a device's write into a slot a result, with nothing else to be done.
            let is_plain = self.coded.is_none() && self.kept.is_none() && self.staging.is_none();
            assert!(plan.device && is_plain, "it can't be answered into a slot: {at:?}");
        }
        if let Some(kept) = &self.kept {
            kept.check(self.round);
        }
        if let Some(coded) = &self.coded {
            coded.check(self.round);
        }
    }
}

impl PartWord {
    /// Whether bytes of the part are sent with it, of a part with this plan.
    pub(super) fn has_bytes(&self, plan: &PartPlan) -> bool {
        match self.kind {
            Kind::Contribution => true,
            Kind::Publication => plan.receiver.is_none() && !self.lacks.is_lost,
            _ => false,
        }
    }
}

impl Nic {
    /// What the lanes rely on in a new part.
    ///
    /// # Panics
    /// It names lanes that lead elsewhere, or bytes that are no elements.
    pub(super) fn check_plan(&self, plan: &PartPlan) {
        let is_server = |lane| matches!(self.lane(lane).peer, LanePeer::Server(_));
        assert!(plan.core.is_none_or(is_server), "`{}` is summed by a core", plan.name);
        // Parts on GPUs that another switch's ranks sum are never pushed here.
        let is_rank = |lane| self.group.place(lane).is_ok();
        assert!(plan.owner.is_none_or(is_rank), "`{}` has an owner of the group", plan.name);
        // One without bytes would have frames whose end nobody is told of.
        let is_whole = plan.bytes > 0 && plan.bytes.is_multiple_of(plan.dtype.size());
        assert!(is_whole, "`{}` has parts of whole elements", plan.name);
        assert!(!(plan.device && plan.receiver.is_some()), "GPUs of a host gather together");
    }

    /// A part, after a function that has changed it.
    pub(super) fn check_part(&self, part: PartId) {
        self.part(part).check();
    }

    /// [All](Self::check), if that is little.
    pub(super) fn check_if_small(&self) {
        if self.parts.len() <= SMALL {
            self.check();
        }
    }

    /// Parts, lanes, queues and slots, between two turns.
    ///
    /// # Panics
    /// They do not agree.
    pub(super) fn check(&self) {
        if !cfg!(debug_assertions) {
            return;
        }
        for part in &self.parts {
            part.check();
        }
        for (id, lane) in (0..).map(LaneId).zip(&self.lanes) {
            self.check_lane(id, lane);
        }
        self.check_counts();
        self.check_queues();
        self.check_slots();
    }

    fn check_lane(&self, id: LaneId, lane: &Lane) {
        assert!(
            lane.outbox.is_empty() || matches!(lane.peer, LanePeer::Rank(_)),
            "servers get parts"
        );
        let has_left = !lane.open && lane.goodbye && self.phase != Phase::Over;
        assert!(!has_left || lane.posted.is_empty(), "who has left has none of our memory");
        assert!(lane.open || matches!(lane.receiving, Receiving::Closing), "nothing comes here");
        match &lane.receiving {
            Receiving::Landing { part, header, into, target, slot } => {
                let state = self.part(*part);
                assert!(into.len() == header.length as usize, "it lands where it has room");
                assert!(into.len() <= target.len() || state.coded.is_some(), "and fits there");
                assert!(slot.is_some() == state.plan.device, "in a slot, or in a tensor");
                assert!(state.stage == Stage::Landing && header.round.0 == state.round);
            }
            Receiving::Held { part, .. } => {
                let state = self.part(*part);
                assert!(state.plan.device && state.stage == Stage::Landing, "it waits for a slot");
                let landings = &self.landings[Nic::landings_index(Nic::pool_of(lane.peer))];
                assert!(landings.free.is_empty(), "a slot is free, and a result waits for it");
                assert!(landings.held.contains(&id), "no slot will come to it");
            }
            Receiving::Contribution { peer, device, header, done, .. } => {
                assert!(self.circle(*device).lanes[*peer] == id, "a peer has one lane");
                assert!(*done <= header.length as usize, "more has come than was announced");
            }
            Receiving::Unwanted { left } => assert!(*left > 0, "the payload has passed"),
            Receiving::Header | Receiving::Closing => {}
        }
    }

    /// Open ends of parts, and the frames that they are.
    fn check_counts(&self) {
        let is_open = |part: &&Part| part.is_open();
        assert_eq!(self.open, self.parts.iter().filter(is_open).count(), "open rounds");
        let posted: usize = self.lanes.iter().map(|lane| lane.posted.len()).sum();
        let told: u32 = self.parts.iter().map(|part| part.posted).sum();
        assert_eq!(told as usize, posted, "frames that were posted and not sent");
        // Lanes that close then take what is under way with them.
        if self.phase != Phase::Running {
            return;
        }
        let words = self.lanes.iter().flat_map(|lane| &lane.outbox);
        let unsaid = words.filter(|word| word.has_bytes(&self.part(word.part).plan)).count();
        let awaited = self.parts.iter().filter(|part| part.stage != Stage::Idle).count();
        let open: u32 = self.parts.iter().map(|part| part.open).sum();
        assert_eq!(open as usize, posted + unsaid + awaited, "each open end is something");
    }

    /// What waits for its turn, and the credit of what has had it.
    fn check_queues(&self) {
        let is_running = self.phase == Phase::Running;
        for part in self.queue.waiting().chain(self.gathered.waiting()).filter(|_| is_running) {
            let state = self.part(*part);
            let is_due = state.stage == Stage::Pushed && !state.abandoned;
            assert!(is_due && state.plan.owner.is_none(), "{} waits in vain", state.plan.key);
        }
        let of_servers = self.lanes.iter().filter(|lane| matches!(lane.peer, LanePeer::Server(_)));
        let posted = of_servers.flat_map(|lane| &lane.posted);
        let bytes: usize = posted.map(|part| self.line_bytes(*part)).sum();
        assert_eq!(self.queue.in_flight_bytes(), bytes, "credit is what is posted to servers");
        let asked = self.group.collector.asked_bytes() + self.column.collector.asked_bytes();
        assert_eq!(self.gathered.in_flight_bytes(), asked, "credit is what peers were asked for");
        for part in &self.over {
            let state = self.part(*part);
            assert!(!state.plan.device && !state.is_open(), "{} is not over", state.plan.key);
        }
    }

    /// Slots are in one place each, and those that are granted are of the parts that think so.
    fn check_slots(&self) {
        self.granted.check();
        for landings in &self.landings {
            // There may be thousands of slots, and a turn looks at all of them.
            let numbers = || landings.free.iter().map(Slot::number);
            let mut is_seen = vec![false; numbers().max().map_or(0, |last| last as usize + 1)];
            for number in numbers() {
                let before = std::mem::replace(&mut is_seen[number as usize], true);
                assert!(!before, "a slot is free once");
                self.check_free(number);
            }
        }
        let is_granted = |part: &&Part| part.stage == Stage::Granted;
        let parts = self.granted.parts().filter(|part| self.part(*part).stage == Stage::Granted);
        assert_eq!(self.granted.parts().count(), parts.count(), "a slot waits for no result");
        let waiting = self.parts.iter().filter(is_granted).count();
        assert_eq!(self.granted.parts().count(), waiting, "a part waits for a slot of nobody");
    }
}
