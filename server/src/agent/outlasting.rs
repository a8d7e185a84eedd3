//! A server of an elastic job whose scheduler is lost: what it has to tell the next one.

use super::{Agent, Effect};
use bps_engine::base::{Epoch, Key, Rank};
use bps_engine::proto::absence::{Absence, Wanted};
use bps_engine::proto::messages::{NodeMessage, Register};
use bps_engine::proto::resume::Resume;
use std::collections::BTreeMap;
use std::time::Duration;

/// What a server remembers for the next scheduler.
pub(super) struct Memory {
    absence: Absence,
    wait: Duration,
    term: u32,
    reset: Option<Epoch>,
    keys_end: u64,
    gone: Vec<Rank>,
    /// Lanes on which each rank has said good-bye.
    left: BTreeMap<Rank, u32>,
    /// What was said of lost lanes.
    lanes: Vec<NodeMessage>,
}

impl Default for Memory {
    fn default() -> Memory {
        Memory {
            absence: Absence::new(Duration::ZERO),
            wait: Duration::ZERO,
            term: 1,
            reset: None,
            keys_end: 0,
            gone: Vec::new(),
            left: BTreeMap::new(),
            lanes: Vec::new(),
        }
    }
}

impl Memory {
    /// An epoch has begun, under the scheduler of this term.
    pub(super) fn begin(&mut self, term: u32) {
        let (wait, absence) = (self.wait, self.absence.clone());
        *self = Memory { absence, wait, term, ..Memory::default() };
    }

    /// An epoch is over.
    pub(super) fn reset(&mut self, epoch: Epoch) {
        self.begin(self.term);
        self.reset = Some(epoch);
    }

    pub(super) fn install(&mut self, key: Key) {
        self.keys_end = self.keys_end.max(key.0.saturating_add(1));
    }

    pub(super) fn lose(&mut self, gone: &[Rank]) {
        gone.clone_into(&mut self.gone);
    }

    /// A rank has said good-bye on one of its lanes.
    pub(super) fn leave(&mut self, rank: Rank) {
        if self.reset.is_none() {
            *self.left.entry(rank).or_default() += 1;
        }
    }

    pub(super) fn lose_lane(&mut self, said: &NodeMessage) {
        if !self.wait.is_zero() {
            self.lanes.push(said.clone());
        }
    }
}

impl Agent {
    /// The same of a server that goes on for so long without a scheduler, where its job is elastic.
    #[must_use]
    pub fn outlasting(mut self, wait: Duration) -> Agent {
        self.memory.wait = wait;
        self
    }

    /// Whether this server goes on without a scheduler for a while.
    #[must_use]
    pub fn outlasts(&self) -> bool {
        let is_elastic = self.roster.as_ref().is_some_and(|roster| roster.elastic);
        is_elastic && !self.memory.wait.is_zero()
    }

    /// Whether there is no scheduler now, and the job goes on.
    #[must_use]
    pub fn is_away(&self) -> bool {
        !self.over && self.memory.absence.is_away()
    }

    /// The scheduler is lost or silent. Says whether that is waited out.
    pub(super) fn wait_out(&mut self, how: &str, now: Duration, effects: &mut Vec<Effect>) -> bool {
        if self.over || !self.outlasts() {
            return false;
        }
        if !self.memory.absence.is_away() {
            self.memory.absence = Absence::new(self.memory.wait);
        }
        if let Some(line) = self.memory.absence.begin(how, now) {
            effects.push(Effect::Warn(line));
            if std::mem::take(&mut self.knocking) {
                effects.push(Effect::Knock(None));
            }
        }
        true
    }

    /// Time passes while there is no scheduler. Says whether there is none.
    pub(super) fn look_for_another(&mut self, now: Duration, effects: &mut Vec<Effect>) -> bool {
        match self.memory.absence.look(self.pulse.scheduler(), now) {
            None => {}
            Some(Wanted::Dial) => effects.push(Effect::Redial(true)),
            Some(Wanted::End(away)) => {
                self.over = true;
                effects.extend([Effect::Warn(away.to_string()), Effect::Over(false)]);
            }
        }
        self.memory.absence.is_away()
    }

    /// The scheduler that was silent answers after all.
    pub(super) fn is_back(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        if let Some(lasted) = self.memory.absence.end(now) {
            let scheduler = self.pulse.scheduler();
            let line = format!("{scheduler} answers again after {:.1} s", lasted.as_secs_f64());
            effects.extend([Effect::Redial(false), Effect::Info(line)]);
        }
    }

    /// An attempt to reach another scheduler has failed.
    pub fn not_found(&mut self, now: Duration) {
        self.memory.absence.failed(now);
    }

    /// What another scheduler is to be told.
    #[must_use]
    pub fn resume(&self, register: Register) -> Vec<NodeMessage> {
        let (Some(roster), memory) = (self.roster.clone(), &self.memory) else {
            return Vec::new();
        };
        let left = memory.left.iter().filter(|(_, lanes)| **lanes >= self.cores);
        let resume = Resume {
            register,
            term: memory.term,
            roster,
            reset: memory.reset,
            gone: memory.gone.clone(),
            left: left.map(|(rank, _)| *rank).collect(),
            barriers: 0,
            tensors: 0,
            keys_end: memory.keys_end,
            obstacle: None,
        };
        NodeMessage::resuming(resume, std::iter::empty())
    }

    /// Another scheduler leads the job: what it is to be told again. `None` if it is one of a term
    /// that is over, which is not followed.
    pub fn follow(
        &mut self,
        term: u32,
        now: Duration,
        effects: &mut Vec<Effect>,
    ) -> Option<Vec<NodeMessage>> {
        let scheduler = self.pulse.scheduler();
        if term < self.memory.term || self.over {
            effects.push(Effect::Warn(format!(
                "{scheduler} is of term {term}, which is over: term {} is followed",
                self.memory.term
            )));
            self.memory.absence.failed(now);
            return None;
        }
        let lasted = self.memory.absence.end(now).unwrap_or_default();
        effects.push(Effect::Info(format!(
            "{scheduler} leads the job again, in term {term}, after {:.1} s",
            lasted.as_secs_f64()
        )));
        self.memory.term = term;
        if let Some(roster) = &mut self.roster {
            roster.term = term;
        }
        self.pulse.restart(now);
        // Nobody waits for answers to the other's requests.
        self.installs.clear();
        Some(self.memory.lanes.clone())
    }
}
