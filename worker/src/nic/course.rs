//! The course of a part: it is planned, its rounds are opened, sent on their way and closed, and
//! what is over is told. How rounds end before their time is in [`ending`](super::ending).
//!
//! Invariant: a part has one round open, whose open ends are counted in it
//! ([`check`](super::Part::check)); the round is over when the last of them is closed.

#![forbid(unsafe_code)]

use super::coding::Coded;
use super::{Nic, Operation, Part, PartId, PartOf, PartPlan, PartWord, Phase, Report, Stage};
use crate::host::collect::Peers;
use crate::rounds::Lacks;
use bps_engine::optimize::Act;
use bps_engine::wire::Kind;
use std::time::Duration;

impl Nic {
    /// Adds parts, and returns the number of the first; the others follow.
    pub(crate) fn plan(&mut self, plans: impl Iterator<Item = PartPlan>) -> PartId {
        let first = PartId(u32::try_from(self.parts.len()).expect("parts are counted in u32"));
        let mut peers: Peers = None;
        for (number, plan) in (first.0..).zip(plans) {
            let before = self.keys.insert(plan.key, PartId(number));
            assert!(before.is_none(), "{} of `{}` is another part's", plan.key, plan.name);
            self.check_plan(&plan);
            let circle = self.circle_mut(plan.device);
            // All parts of a tensor are for the same ranks.
            if let (Some(among), None) = (&plan.among, &peers) {
                peers = Some(circle.places(&among.lanes));
            }
            let others = peers.as_ref().map_or(circle.lanes.len(), |peers| peers.len());
            // One that is for this rank alone is known too, so that nobody else pushes it.
            if plan.owner.is_none() && (others > 0 || peers.is_some()) {
                circle.gathers.plan(plan.key, peers.as_deref());
            }
            let coded = plan.encoding.map(|encoding| {
                let elements = plan.bytes / plan.dtype.size();
                let choice = self.first_choice(encoding, plan.dtype, elements, plan.core);
                Box::new(Coded::new(encoding, elements, choice))
            });
            let kept = self.kept_for(&plan);
            self.parts.push(Part {
                plan,
                kept,
                coded,
                peers: peers.clone(),
                round: 0,
                stage: Stage::Idle,
                priority: 0,
                act: Act::NONE,
                memory: None,
                slot: None,
                staging: None,
                result: None,
                since: Duration::ZERO,
                asked: Duration::ZERO,
                open: 0,
                posted: 0,
                lacks: Lacks::NOTHING,
                abandoned: false,
            });
        }
        self.forget_out_of_reach(first);
        debug_assert!(self.parts.len() >= self.keys.len(), "each key is a part's");
        first
    }

    /// A part whose round is over, if there is one, and what its result lacks.
    pub(crate) fn take_over(&mut self) -> Option<(PartOf, Lacks)> {
        let part = self.over.pop_front()?;
        let part = self.part(part);
        assert!(!part.is_open(), "the next round of a part begins once this one was told");
        Some((part.plan.of, part.lacks))
    }

    /// Opens this round of a part.
    pub(super) fn open_round(&mut self, part: PartId, round: u64, priority: i64) -> &mut Part {
        assert!(self.phase != Phase::Leaving, "who leaves pushes nothing");
        self.latest = Some(part);
        self.open += 1;
        let now = self.now;
        let state = self.part_mut(part);
        assert!(!state.is_open() && !state.abandoned, "rounds of a part follow one another");
        assert!(round == state.round + 1, "a part has each of its rounds");
        assert!(state.stage == Stage::Idle && state.memory.is_none(), "the last one is over");
        (state.round, state.stage, state.priority) = (round, Stage::Pushed, priority);
        (state.since, state.open, state.posted) = (now, 1, 0);
        state.lacks = Lacks::NOTHING;
        state
    }

    /// A part is pushed: its circle sums it first, if there are others in it.
    pub(super) fn pushed(&mut self, part: PartId) {
        let (now, others) = (self.now, self.others(part));
        let state = self.part_mut(part);
        assert!(state.stage == Stage::Pushed && state.open == 1, "its round was just opened");
        state.check();
        let (device, round, key) = (state.plan.device, state.round, state.plan.key);
        let (owner, act) = (state.plan.owner, state.act);
        match owner {
            Some(owner) => {
                debug_assert!(self.circle(device).place(owner).is_ok(), "its switch sums it");
                let state = self.part_mut(part);
                // A broadcast asks for no contribution: the publication is the answer.
                if matches!(state.plan.operation, Operation::Broadcast(_)) {
                    state.stage = Stage::Asked;
                }
                self.say_to(owner, PartWord::bare(Kind::Ready, part, round));
            }
            None if others == 0 && state.plan.core.is_some() => self.send_to_server(part),
            None if others == 0 => self.take_own(part),
            None => {
                // The job is about to end of it.
                if act != Act::NONE && self.disagrees((key, Some(part)), round, None, act) {
                    return;
                }
                if self.circle_mut(device).gathers.own(key, now) {
                    self.gathered(part);
                }
            }
        }
    }

    /// One of a part's open ends is closed. Says whether it was the last one: then the round is
    /// over, which is told of a tensor of the host, and left to the caller to tell of one on the
    /// GPU.
    pub(super) fn close_one(&mut self, part: PartId) -> bool {
        let state = self.part_mut(part);
        state.open = state.open.checked_sub(1).expect("what is open is closed once");
        assert!(state.posted <= state.open, "a frame that is posted keeps its round open");
        state.open == 0 && self.end_round(part)
    }

    pub(super) fn end_round(&mut self, part: PartId) -> bool {
        let now = self.now;
        let state = self.part_mut(part);
        assert!(state.open == 0 && state.posted == 0, "what is posted is open");
        assert!(state.stage == Stage::Idle, "its result is there, or nobody wants it");
        assert!(state.slot.is_none(), "the slot of what was sent was given back");
        (state.memory, state.result) = (None, None);
        state.check();
        let (device, of, bytes) = (state.plan.device, state.plan.of, state.plan.bytes);
        if let Some(pace) = &mut self.pace
            && let Some(told) = pace.ended(of, bytes, now)
        {
            self.report(Report::Tune(told));
        }
        self.spoil_abandoned(part);
        if !device {
            debug_assert!(!self.over.contains(&part), "a round is over once");
            self.over.push_back(part);
        }
        self.open = self.open.checked_sub(1).expect("a round that ends was counted");
        true
    }
}
