//! A rank of an elastic job whose scheduler is lost: what it has to tell the next one, and what it
//! asks again.
//!
//! Invariant: what the scheduler was asked for is asked again until it is answered, and an answer
//! is taken once.

use super::{Agent, Effect, peer_died};
use crate::base::error::Death;
use bps_engine::base::{CoreId, Key, Rank};
use bps_engine::proto::absence::Wanted;
use bps_engine::proto::messages::{Assignment, Declaration, NodeMessage, Part, Register};
use bps_engine::proto::moving::{HeldKey, MovedKey};
use bps_engine::proto::outlasting::Outlasting;
use bps_engine::proto::resume::{KnownTensor, Resume};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

/// What a rank remembers for the next scheduler.
pub(super) struct Memory {
    /// What every node does.
    shared: Outlasting,
    known: BTreeMap<u32, KnownTensor>,
    /// How far it was with keys that were nowhere, as it has said last.
    held: Vec<HeldKey>,
    /// Keys that have moved, with a last result that this rank has and others lacked then.
    holds: BTreeSet<Key>,
    /// Barriers that are not answered.
    barriers: BTreeSet<u64>,
    passed: u64,
    /// Why the next scheduler can't go on with this epoch.
    obstacle: Option<String>,
}

impl Memory {
    /// Of a rank that follows the scheduler of this term, and waits so long for another.
    pub(super) fn new(term: u32, wait: Duration) -> Memory {
        Memory {
            shared: Outlasting::new(wait, term),
            known: BTreeMap::new(),
            held: Vec::new(),
            holds: BTreeSet::new(),
            barriers: BTreeSet::new(),
            passed: 0,
            obstacle: None,
        }
    }

    /// The answer to a declaration. In a job that ends with its scheduler nothing is kept.
    pub(super) fn learn(&mut self, all: &[Declaration], assignments: &[Assignment]) {
        if self.shared.is_waited_out() {
            let known = all.iter().zip(assignments).map(|(said, assignment)| {
                let (said, assignment) = (said.clone(), assignment.clone());
                (assignment.tensor, KnownTensor { said, assignment, holds: Vec::new() })
            });
            self.known.extend(known);
        }
    }

    pub(super) fn ask_barrier(&mut self, request: u64) {
        self.barriers.insert(request);
    }

    /// Whether this barrier was waited for.
    pub(super) fn pass(&mut self, request: u64) -> bool {
        let is_new = self.barriers.remove(&request);
        self.passed += u64::from(is_new);
        is_new
    }

    /// Another scheduler could not go on from here.
    pub(super) fn hinder(&mut self, why: &str) {
        self.obstacle.get_or_insert_with(|| why.to_owned());
    }

    pub(super) fn lose(&mut self, gone: &[Rank]) {
        self.shared.lose(gone);
    }

    /// All servers that the epoch goes on without.
    pub(super) fn lose_servers(&mut self, lost: &[u32]) {
        self.shared.lose_servers(lost);
    }

    /// How far this rank is with keys that are nowhere.
    pub(super) fn hold(&mut self, keys: &[HeldKey]) {
        if self.shared.is_waited_out() {
            keys.clone_into(&mut self.held);
        }
    }

    /// Keys are elsewhere from now on.
    pub(super) fn move_keys(&mut self, keys: &[MovedKey]) {
        if !self.shared.is_waited_out() {
            return;
        }
        let held = std::mem::take(&mut self.held);
        let held: HashMap<Key, HeldKey> = held.into_iter().map(|one| (one.key, one)).collect();
        for MovedKey { key, rounds, restores, .. } in keys {
            let has = |one: &HeldKey| *restores && one.holds && one.rounds == rounds + 1;
            if held.get(key).is_some_and(has) {
                self.holds.insert(*key);
            } else {
                self.holds.remove(key);
            }
        }
        let places: HashMap<Key, CoreId> = keys.iter().map(|one| (one.key, one.core)).collect();
        let parts = self.known.values_mut().flat_map(|known| &mut known.assignment.parts);
        for part in parts.filter(|part| part.core.is_some()) {
            part.core = places.get(&part.key).copied().or(part.core);
        }
    }

    /// What the next scheduler is to be told of tensors.
    fn tensors(&self) -> impl Iterator<Item = KnownTensor> + '_ {
        self.known.values().map(|known| {
            let keys = known.assignment.parts.iter().map(|part: &Part| part.key);
            let holds = keys.filter(|key| self.holds.contains(key)).collect();
            KnownTensor { holds, ..known.clone() }
        })
    }

    /// A lane was lost, as `said` tells the scheduler.
    pub(super) fn lose_lane(&mut self, said: &NodeMessage) {
        self.shared.lose_lane(said);
    }
}

impl Agent {
    /// The same of a rank that goes on for so long without a scheduler, if its job is elastic.
    #[must_use]
    pub fn outlasting(mut self, wait: Duration) -> Agent {
        let wait = if self.roster.elastic { wait } else { Duration::ZERO };
        self.memory = Memory::new(self.roster.term, wait);
        self
    }

    /// Whether this rank goes on without a scheduler for a while.
    #[must_use]
    pub fn outlasts(&self) -> bool {
        self.memory.shared.is_waited_out()
    }

    /// Whether there is no scheduler now, and the job goes on.
    #[must_use]
    pub fn is_away(&self) -> bool {
        !self.over && self.memory.shared.is_away()
    }

    /// Whether no verdict can be expected now: there is no scheduler, or it owes an answer.
    #[must_use]
    pub fn is_unheard(&self) -> bool {
        self.is_away() || self.knocking
    }

    /// Whether the job is over for this rank because no other scheduler came in time.
    #[must_use]
    pub fn is_forsaken(&self) -> bool {
        self.over && self.memory.shared.is_away()
    }

    /// This rank has joined, or follows one that has: only the scheduler of then knows how far.
    pub fn hinder(&mut self, why: &str) {
        self.memory.hinder(why);
    }

    /// The scheduler is lost, or has been silent for so long. Says whether that is waited out.
    pub(super) fn wait_out(
        &mut self,
        how: &str,
        silent: Duration,
        now: Duration,
        effects: &mut Vec<Effect>,
    ) -> bool {
        if self.over || !self.outlasts() {
            return false;
        }
        if let Some(line) = self.memory.shared.wait_out(how, silent, now) {
            effects.push(Effect::Warn(line));
            if std::mem::take(&mut self.knocking) {
                effects.push(Effect::Knock(None));
            }
        }
        true
    }

    /// Time passes while there is no scheduler. Says whether there is none.
    pub(super) fn look_for_another(&mut self, now: Duration, effects: &mut Vec<Effect>) -> bool {
        match self.memory.shared.look(self.pulse.scheduler(), now) {
            None => {}
            Some(Wanted::Dial) => effects.push(Effect::Redial(true)),
            Some(Wanted::End(away)) => self.end(peer_died(Death::SchedulerAway(away)), effects),
        }
        self.memory.shared.is_away()
    }

    /// The scheduler that was silent answers after all.
    pub(super) fn is_back(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        if let Some(line) = self.memory.shared.is_back(self.pulse.scheduler(), now) {
            effects.extend([Effect::Redial(false), Effect::Warn(line)]);
        }
    }

    /// An attempt to reach another scheduler has failed.
    pub fn not_found(&mut self, now: Duration) {
        self.memory.shared.failed(now);
    }

    /// What another scheduler is to be told.
    #[must_use]
    pub fn resume(&self, register: Register) -> Vec<NodeMessage> {
        let memory = &self.memory;
        let resume = Resume {
            barriers: memory.passed,
            tensors: memory.known.len() as u64,
            obstacle: memory.obstacle.clone(),
            ..memory.shared.resume(register, self.roster.clone())
        };
        NodeMessage::resuming(resume, memory.tensors(), &[])
    }

    /// Another scheduler leads the job: what it is to be asked for, again. `None` if it is one of a
    /// term that is over, which is not followed.
    pub fn follow(
        &mut self,
        term: u32,
        now: Duration,
        effects: &mut Vec<Effect>,
    ) -> Option<Vec<NodeMessage>> {
        if self.over {
            return None;
        }
        match self.memory.shared.follow(self.pulse.scheduler(), term, now) {
            Ok(line) => effects.push(Effect::Warn(line)),
            Err(line) => {
                effects.push(Effect::Warn(line));
                return None;
            }
        }
        self.roster.term = term;
        self.pulse.restart(now);
        let declare = |(&request, tensors): (&u64, &Vec<Declaration>)| NodeMessage::Declare {
            request,
            tensors: tensors.clone(),
        };
        let mut asked = self.memory.shared.lost_lanes().to_vec();
        let declares: BTreeMap<u64, Vec<Declaration>> =
            self.declares.iter().map(|(request, all)| (*request, all.clone())).collect();
        asked.extend(declares.iter().map(declare));
        asked.extend(self.memory.barriers.iter().map(|&request| NodeMessage::Barrier { request }));
        Some(asked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::error::Source;
    use crate::host::switches::Switches;
    use crate::job::agent::Lanes;
    use bps_engine::base::{DType, Epoch, Operation};
    use bps_engine::control::LinkError;
    use bps_engine::proto::members::Members;
    use bps_engine::proto::messages::{Origin, OverReason, Roster, SchedulerMessage};
    use bps_engine::proto::pulse::Pulse;

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    fn elastic() -> Roster {
        Roster {
            job: "job".into(),
            term: 1,
            epoch: Epoch(1),
            size: 2,
            through_servers: true,
            index: 0,
            workers: Vec::new(),
            neighbours: Vec::new(),
            servers: Vec::new(),
            elastic: true,
            shrinks: false,
            change: None,
        }
    }

    fn agent() -> Agent {
        let pulse = Pulse::new("a:1", ms(200), ms(1_000), ms(0));
        let switches = Switches::new(vec![Rank(0), Rank(1)], 0);
        Agent::new(elastic(), Lanes::default(), switches, pulse).outlasting(ms(10_000))
    }

    #[test]
    fn a_rank_whose_epoch_another_scheduler_ends_is_not_forsaken_and_one_that_finds_none_is() {
        for is_found in [true, false] {
            let (mut agent, mut effects) = (agent(), Vec::new());
            let source = Source::new(LinkError::Closed);
            agent.scheduler_lost(source, ms(0), &mut effects);
            assert!(agent.is_away() && !agent.is_forsaken() && !agent.is_over());
            if is_found {
                assert!(agent.follow(2, ms(50), &mut effects).is_some());
                let (who, round) = (Origin::scheduler(), None);
                let reason = OverReason::Failed { who, message: "a reason".to_owned(), round };
                let reason = OverReason::Reforming { reason: Box::new(reason), epoch: Epoch(2) };
                agent.handle(SchedulerMessage::Over { reason }, ms(60), &mut effects);
                assert!(agent.may_return());
            } else {
                for now in (0..=10_000).step_by(500) {
                    agent.handle_tick(ms(now), &mut effects);
                }
            }
            let is_over = effects.iter().any(|effect| matches!(effect, Effect::Over(_)));
            assert!(is_over && agent.is_over() && !agent.is_away());
            assert_eq!(agent.is_forsaken(), !is_found);
        }
    }

    #[test]
    fn the_next_scheduler_is_told_where_keys_are_and_which_results_others_lacked() {
        let said = Declaration {
            name: "weights".into(),
            dtype: DType::F32,
            shape: 8.into(),
            operation: Operation::Sum,
            device: false,
            members: Members::ALL,
            receiver: None,
            encoding: None,
            store: None,
        };
        let core = |server| Some(CoreId { server, core: 0 });
        let part = |key: u32, server| Part {
            key: Key(key.into()),
            offset: u64::from(key) * 16,
            bytes: 16,
            core: core(server),
            owner: Rank(0),
        };
        let assignment = Assignment { tensor: 0, parts: vec![part(0, 0), part(1, 1)], until: None };
        let mut memory = Memory::new(1, ms(10_000));
        memory.learn(&[said], &[assignment]);
        let told = |memory: &Memory| {
            let known = memory.tensors().next().expect("one is known");
            (known.assignment.parts[1].core, known.holds)
        };
        memory.lose_servers(&[1]);
        assert_eq!(told(&memory), (core(1), vec![]), "it is nowhere else yet");
        for (rounds, holds, expected) in
            [(7, true, vec![Key(1)]), (7, false, vec![]), (6, true, vec![])]
        {
            memory.hold(&[HeldKey { key: Key(1), rounds, holds }]);
            let there = CoreId { server: 0, core: 0 };
            let moved = |key| MovedKey { key: Key(key), core: there, rounds: 6, restores: true };
            memory.move_keys(&[moved(1), moved(9)]);
            assert_eq!(told(&memory), (core(0), expected));
        }
    }

    #[test]
    fn no_verdict_is_expected_of_a_scheduler_that_owes_an_answer() {
        let (mut agent, mut effects) = (agent(), Vec::new());
        agent.handle_tick(ms(0), &mut effects);
        agent.handle(SchedulerMessage::Heartbeat, ms(10), &mut effects);
        agent.handle_tick(ms(200), &mut effects);
        assert!(!agent.is_unheard());
        // The second one has no answer yet.
        agent.handle_tick(ms(400), &mut effects);
        assert!(agent.is_unheard() && !agent.is_away());
        agent.handle(SchedulerMessage::Heartbeat, ms(410), &mut effects);
        agent.handle_tick(ms(420), &mut effects);
        assert!(!agent.is_unheard());
    }

    #[test]
    fn a_scheduler_that_answers_again_was_silent_for_as_long_as_was_complained_of_and_more() {
        let (mut agent, mut effects, mut lines) = (agent(), Vec::new(), Vec::new());
        for now in (0..=4_225).step_by(25) {
            agent.handle_tick(ms(now), &mut effects);
            // It is stopped before the heartbeat at 3 s, and goes on behind that at 4.2 s.
            if effects.iter().any(|effect| matches!(effect, Effect::Beat)) && now < 3_000
                || now == 4_225
            {
                agent.handle(SchedulerMessage::Heartbeat, ms(now), &mut effects);
            }
            lines.extend(effects.drain(..).filter_map(|effect| match effect {
                Effect::Warn(line) => Some((now, line)),
                _ => None,
            }));
        }
        let [(4_125, lost), (4_225, back)] = &lines[..] else { panic!("{lines:?}") };
        let complaint = "the scheduler at a:1 has not answered for 1.1 s";
        assert!(lost.starts_with(complaint) && lost.contains("training goes on"), "{lost}");
        assert_eq!(back, "the scheduler at a:1 answers again after 1.2 s");
        assert!(!agent.is_away());
    }
}
