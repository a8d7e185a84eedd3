//! A server of an elastic job whose scheduler is lost: what it has to tell the next one.

use super::{Agent, Effect};
use bps_engine::base::{Epoch, Key, Rank};
use bps_engine::proto::absence::Wanted;
use bps_engine::proto::messages::{NodeMessage, Register};
use bps_engine::proto::moving::Adopted;
use bps_engine::proto::outlasting::Outlasting;
use bps_engine::proto::resume::{AdoptedKey, Resume};
use std::collections::BTreeMap;
use std::time::Duration;

/// What a server remembers for the next scheduler.
pub(super) struct Memory {
    /// What every node does.
    shared: Outlasting,
    reset: Option<Epoch>,
    keys_end: u64,
    /// Lanes on which each rank has said good-bye.
    left: BTreeMap<Rank, u32>,
    /// Keys of lost servers for which there is room.
    adopted: BTreeMap<Key, AdoptedKey>,
    /// Those for which cores make room, by request. No rank contributes to these before the
    /// scheduler has the answer, so the next one may give them to any server.
    adopting: BTreeMap<u64, Vec<AdoptedKey>>,
}

impl Memory {
    /// Of a server that waits so long for another scheduler.
    pub(super) const fn new(wait: Duration) -> Memory {
        Memory {
            shared: Outlasting::new(wait, 1),
            reset: None,
            keys_end: 0,
            left: BTreeMap::new(),
            adopted: BTreeMap::new(),
            adopting: BTreeMap::new(),
        }
    }

    /// An epoch has begun, under the scheduler of this term.
    pub(super) fn begin(&mut self, term: u32) {
        self.shared.begin(term);
        self.reset = None;
        self.forget();
    }

    /// An epoch is over.
    pub(super) fn reset(&mut self, epoch: Epoch) {
        self.shared.forget();
        self.reset = Some(epoch);
        self.forget();
    }

    fn forget(&mut self) {
        self.keys_end = 0;
        self.left.clear();
        self.adopted.clear();
        self.adopting.clear();
    }

    pub(super) fn install(&mut self, key: Key) {
        self.keys_end = self.keys_end.max(key.0.saturating_add(1));
    }

    /// The cores are told to make room for keys of lost servers.
    pub(super) fn adopt(&mut self, request: u64, keys: &[Adopted]) {
        let all = keys.iter().map(|Adopted { spec, restores }| {
            self.install(spec.key);
            // It had them already, perhaps, for another round.
            self.adopted.remove(&spec.key);
            let (key, core, rounds) = (spec.key, spec.core, spec.rounds);
            AdoptedKey { key, core, rounds, restores: *restores }
        });
        let all = all.collect();
        self.adopting.insert(request, all);
    }

    /// They have done what this request told them.
    pub(super) fn adopted(&mut self, request: u64) {
        let keys = self.adopting.remove(&request).unwrap_or_default();
        self.adopted.extend(keys.into_iter().map(|one| (one.key, one)));
    }

    /// All ranks have the results of these keys that only some had.
    pub(super) fn restored(&mut self, keys: &[Key]) {
        for key in keys {
            if let Some(one) = self.adopted.get_mut(key).filter(|one| one.restores) {
                (one.rounds, one.restores) = (one.rounds + 1, false);
            }
        }
    }

    pub(super) fn lose_servers(&mut self, lost: &[u32]) {
        self.shared.lose_servers(lost);
    }

    pub(super) fn lose(&mut self, gone: &[Rank]) {
        self.shared.lose(gone);
    }

    /// A rank has said good-bye on one of its lanes.
    pub(super) fn leave(&mut self, rank: Rank) {
        if self.reset.is_none() {
            *self.left.entry(rank).or_default() += 1;
        }
    }

    pub(super) fn lose_lane(&mut self, said: &NodeMessage) {
        self.shared.lose_lane(said);
    }
}

impl Agent {
    /// The same of a server that goes on for so long without a scheduler, where its job is elastic.
    #[must_use]
    pub fn outlasting(mut self, wait: Duration) -> Agent {
        self.memory = Memory::new(wait);
        self
    }

    /// Whether this server goes on without a scheduler for a while.
    #[must_use]
    pub fn outlasts(&self) -> bool {
        let is_elastic = self.roster.as_ref().is_some_and(|roster| roster.elastic);
        is_elastic && self.memory.shared.is_waited_out()
    }

    /// Whether there is no scheduler now, and the job goes on.
    #[must_use]
    pub fn is_away(&self) -> bool {
        !self.over && self.memory.shared.is_away()
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
            Some(Wanted::End(away)) => {
                self.over = true;
                effects.extend([Effect::Warn(away.to_string()), Effect::Over(false)]);
            }
        }
        self.memory.shared.is_away()
    }

    /// The scheduler that was silent answers after all.
    pub(super) fn is_back(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        if let Some(line) = self.memory.shared.is_back(self.pulse.scheduler(), now) {
            effects.extend([Effect::Redial(false), Effect::Info(line)]);
        }
    }

    /// An attempt to reach another scheduler has failed.
    pub fn not_found(&mut self, now: Duration) {
        self.memory.shared.failed(now);
    }

    /// What another scheduler is to be told.
    #[must_use]
    pub fn resume(&self, register: Register) -> Vec<NodeMessage> {
        let (Some(roster), memory) = (self.roster.clone(), &self.memory) else {
            return Vec::new();
        };
        let left = memory.left.iter().filter(|(_, lanes)| **lanes >= self.cores);
        let resume = Resume {
            reset: memory.reset,
            left: left.map(|(rank, _)| *rank).collect(),
            keys_end: memory.keys_end,
            adopted: memory.adopted.len() as u64,
            ..memory.shared.resume(register, roster)
        };
        let adopted: Vec<AdoptedKey> = memory.adopted.values().copied().collect();
        NodeMessage::resuming(resume, std::iter::empty(), &adopted)
    }

    /// Another scheduler leads the job: what it is to be told again. `None` if it is one of a term
    /// that is over, which is not followed.
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
            Ok(line) => effects.push(Effect::Info(line)),
            Err(line) => {
                effects.push(Effect::Warn(line));
                return None;
            }
        }
        if let Some(roster) = &mut self.roster {
            roster.term = term;
        }
        self.pulse.restart(now);
        // Nobody waits for answers to the other's requests.
        self.installs.clear();
        self.memory.adopting.clear();
        let mut told = self.memory.shared.lost_lanes().to_vec();
        if self.leaves_by.is_some() {
            told.push(NodeMessage::Leave { suspend: false });
        }
        Some(told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::Report;
    use bps_engine::base::{DType, Operation};
    use bps_engine::proto::members::Members;
    use bps_engine::proto::messages::{KeySpec, Node, Roster, SchedulerMessage};
    use bps_engine::proto::moving::MovingOrder;
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

    #[test]
    fn a_scheduler_that_answers_again_was_silent_for_as_long_as_was_complained_of_and_more() {
        let pulse = Pulse::new("a:1", ms(200), ms(1_000), ms(0));
        let mut agent = Agent::new(1, pulse).outlasting(ms(10_000));
        agent.roster = Some(elastic());
        let (mut effects, mut lines) = (Vec::new(), Vec::new());
        for now in (0..=4_225).step_by(25) {
            agent.handle_tick(ms(now), &mut effects);
            // It is stopped before the heartbeat at 3 s, and goes on behind that at 4.2 s.
            if effects.iter().any(|effect| matches!(effect, Effect::Beat)) && now < 3_000
                || now == 4_225
            {
                agent.handle(SchedulerMessage::Heartbeat, ms(now), &mut effects);
            }
            lines.extend(effects.drain(..).filter_map(|effect| match effect {
                Effect::Warn(line) | Effect::Info(line) => Some((now, line)),
                _ => None,
            }));
        }
        let [(4_125, lost), (4_225, back)] = &lines[..] else { panic!("{lines:?}") };
        let complaint = "the scheduler at a:1 has not answered for 1.1 s";
        assert!(lost.starts_with(complaint) && lost.contains("training goes on"), "{lost}");
        assert_eq!(back, "the scheduler at a:1 answers again after 1.2 s");
        assert!(!agent.is_away());
    }

    fn adopt(request: u64, rounds: u64) -> SchedulerMessage {
        let spec = KeySpec {
            key: Key(4),
            core: 0,
            dtype: DType::F32,
            bytes: 16,
            operation: Operation::Sum,
            rounds,
            members: Members::ALL,
            receiver: None,
            encoding: None,
            store: None,
        };
        let keys = vec![Adopted { spec, restores: true }];
        SchedulerMessage::Moving(MovingOrder::Adopt { request, keys })
    }

    #[test]
    fn keys_are_told_that_a_server_has_said_to_have_adopted() {
        let pulse = Pulse::new("a:1", ms(200), ms(1_000), ms(0));
        let mut agent = Agent::new(1, pulse).outlasting(ms(10_000));
        agent.roster = Some(elastic());
        let mut effects = Vec::new();
        let told = |agent: &Agent| -> Vec<(u64, bool)> {
            let adopted = agent.memory.adopted.values();
            adopted.map(|one| (one.rounds, one.restores)).collect()
        };
        let lost = MovingOrder::Lost { servers: vec![1], text: String::new() };
        agent.handle(SchedulerMessage::Moving(lost), ms(0), &mut effects);
        agent.handle(adopt(1, 6), ms(0), &mut effects);
        assert!(told(&agent).is_empty(), "its cores have not answered");
        agent.handle_report(0, Report::Installed { request: 1 }, &mut effects);
        assert_eq!(told(&agent), [(6, true)]);
        // Once more, since a rank has died.
        agent.handle(adopt(2, 5), ms(0), &mut effects);
        assert!(told(&agent).is_empty());
        agent.handle_report(0, Report::Installed { request: 2 }, &mut effects);
        agent.handle_report(0, Report::Restored { keys: vec![Key(4)] }, &mut effects);
        assert_eq!(told(&agent), [(6, false)]);
        // What was not answered before the scheduler was lost is of no meaning to the next one.
        agent.handle(adopt(3, 6), ms(0), &mut effects);
        agent.scheduler_lost("closed".to_owned(), ms(0), &mut effects);
        assert!(agent.follow(2, ms(10), &mut effects).is_some());
        agent.handle_report(0, Report::Installed { request: 3 }, &mut effects);
        assert!(told(&agent).is_empty());
        let resumed = agent.memory.shared.resume(register(), elastic());
        assert_eq!(resumed.lost, [1]);
        agent.handle(SchedulerMessage::Reset { epoch: Epoch(2) }, ms(20), &mut effects);
        assert!(agent.memory.shared.resume(register(), elastic()).lost.is_empty());
    }

    fn register() -> Register {
        let node = Node::Server {
            cores: Vec::new(),
            shm: None,
            rdma: false,
            colocated: false,
            preferred: None,
        };
        let (host, host_id, release) = ("a".to_owned(), "a".to_owned(), "1".to_owned());
        let (pid, instance, session, former, encrypt) = (1, 1, 1, None, false);
        let (num_workers, num_servers) = (2, 2);
        Register {
            node,
            host,
            host_id,
            pid,
            instance,
            session,
            former,
            release,
            encrypt,
            num_workers,
            num_servers,
        }
    }
}
