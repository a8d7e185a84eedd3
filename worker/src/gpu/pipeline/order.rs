//! The order of NCCL's calls in a host: who is asked, who answers, and what is said.

use super::{Of, Pipeline, Tensor};
use crate::gpu::GpuError;
use crate::nic::Command;
use crate::nic::staged::Word;
use bps_engine::base::Rank;
use bps_engine::limits::PARTS_MAX;
use bps_engine::proto::messages::{STALLS_MAX, StalledKey};
use bps_engine::wire::Kind;

impl Pipeline {
    fn leader(&self) -> Option<Rank> {
        self.host.as_ref()?.ranks.first().copied()
    }

    fn leads(&self) -> bool {
        self.leader() == Some(self.rank)
    }

    /// This rank's part of a tensor's reduction can begin.
    pub(super) fn say_ready(&mut self, tensor: u32) -> Result<(), GpuError> {
        let (leads, leader, now) = (self.leads(), self.leader(), self.now);
        let Some(state) = self.tensor(tensor) else { return Ok(()) };
        let (key, round) = (state.rows[0].key, state.round);
        if !leads {
            let word = Word { kind: Kind::GpuReady, key, round, left: 1 };
            self.tell(Command::Say { to: leader, word });
        } else if self.gathers.own(key, now) {
            self.release(tensor);
        }
        Ok(())
    }

    /// All ranks of the host have pushed the tensor.
    fn release(&mut self, tensor: u32) {
        let Some(Tensor { run: Some(run), rows, .. }) = self.tensor(tensor) else { return };
        let (priority, rows) = (run.push.priority, rows.len());
        for index in 0..u32::try_from(rows).unwrap_or(u32::MAX) {
            self.to_reduce.push(priority, Of { tensor, index });
        }
    }

    /// This rank's parts of a row's result are on their way up.
    pub(super) fn say_landed(&mut self, of: Of) -> Result<(), GpuError> {
        if self.leads() {
            self.has_landed(of);
            return Ok(());
        }
        let leader = self.leader();
        let Some(state) = self.tensor(of.tensor) else { return Ok(()) };
        let (key, round) = (state.rows[of.index as usize].key, state.round);
        let word = Word { kind: Kind::GpuLanded, key, round, left: 1 };
        self.tell(Command::Say { to: leader, word });
        Ok(())
    }

    fn has_landed(&mut self, of: Of) {
        let Some(Tensor { run: Some(run), rows, .. }) = self.tensor(of.tensor) else { return };
        let state = &mut run.rows[of.index as usize];
        state.landed += 1;
        if state.landed == rows[of.index as usize].owners {
            let priority = run.push.priority;
            self.to_gather.push(priority, of);
        }
    }

    /// A rank of the host says something.
    pub(super) fn on_word(&mut self, from: Rank, word: Word) -> Result<(), GpuError> {
        let untrue = |what: &str| GpuError::Order { from, what: what.to_owned() };
        let is_order = matches!(word.kind, Kind::GpuReduce | Kind::GpuGather);
        if is_order && Some(from) != self.leader() || !is_order && !self.leads() {
            return Err(untrue("says what is not its to say"));
        }
        if word.kind == Kind::GpuReady {
            return self.on_ready(from, word);
        }
        let of = self.keys.get(&word.key).copied();
        let of = of.ok_or_else(|| untrue("names a row that this rank does not know"))?;
        let state = self.tensor(of.tensor);
        match state {
            Some(state) if state.poisoned.is_some() => return Ok(()),
            Some(state) if state.run.is_some() && state.round == word.round => {}
            _ => return Err(untrue("names a round that is not open")),
        }
        if word.kind == Kind::GpuLanded {
            self.has_landed(of);
            return Ok(());
        }
        self.batch.push(of);
        if word.left > 1 {
            return Ok(());
        }
        let batch = std::mem::take(&mut self.batch);
        if word.kind == Kind::GpuReduce { self.reduce(&batch) } else { self.gather(&batch) }
    }

    fn on_ready(&mut self, from: Rank, word: Word) -> Result<(), GpuError> {
        let untrue = |what: String| GpuError::Order { from, what };
        let host = self.host.as_ref();
        let place = host.and_then(|host| host.ranks.iter().position(|rank| *rank == from));
        // This rank is the first, and is not among its peers.
        let Some(peer) = place.and_then(|place| place.checked_sub(1)) else {
            return Err(untrue("is not of this host".into()));
        };
        if !self.keys.contains_key(&word.key) && self.gathers.len() >= PARTS_MAX {
            return Err(untrue(format!("has pushed over {PARTS_MAX} keys")));
        }
        let all = self.gathers.peer(word.key, peer, word.round, self.now);
        if all.map_err(|untimely| untrue(untimely.to_string()))?
            && let Some(of) = self.keys.get(&word.key).copied()
        {
            self.release(of.tensor);
        }
        Ok(())
    }

    /// The first rank says what comes next: results first, since they end something.
    pub(super) fn give_orders(&mut self) -> Result<bool, GpuError> {
        let Some(host) = self.host.as_ref().filter(|_| self.leads()) else { return Ok(false) };
        let (most, mut progress) = (host.group_size, false);
        while !self.to_gather.is_empty() {
            let batch: Vec<Of> = (0..most).map_while(|_| self.to_gather.pop()).collect();
            self.say_order(Kind::GpuGather, &batch);
            self.gather(&batch)?;
            progress = true;
        }
        // What is reduced long before a slot is free for it could not be overtaken any more.
        while !self.to_reduce.is_empty() && self.reducing < self.slots {
            let batch: Vec<Of> = (0..most).map_while(|_| self.to_reduce.pop()).collect();
            self.say_order(Kind::GpuReduce, &batch);
            let before = self.to_copy.len();
            self.reduce(&batch)?;
            self.reducing += self.to_copy.len().saturating_sub(before);
            progress = true;
        }
        Ok(progress)
    }

    fn say_order(&mut self, kind: Kind, batch: &[Of]) {
        for (at, of) in batch.iter().enumerate() {
            let Some(state) = self.tensor(of.tensor) else { continue };
            let (key, round) = (state.rows[of.index as usize].key, state.round);
            let left = u32::try_from(batch.len() - at).unwrap_or(u32::MAX);
            self.tell(Command::Say { to: None, word: Word { kind, key, round, left } });
        }
    }

    /// Tells of rounds that have waited too long for ranks of the host.
    pub(super) fn look_for_stalls(&mut self) {
        let Some(host) = self.host.as_ref().filter(|_| self.over.is_none()) else { return };
        let mut keys = Vec::new();
        for one in self.gathers.waiting() {
            let waited = self.now.saturating_sub(one.since);
            if waited < self.stall_report {
                continue;
            }
            let own = one.own_missing.then_some(self.rank);
            let peers = one.peers_missing.iter().filter_map(|peer| host.ranks.get(peer + 1));
            let missing = own.into_iter().chain(peers.copied()).collect();
            let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
            let (key, round) = (one.key, one.round);
            keys.push(StalledKey { key, round, waited_ms, missing, left: Vec::new() });
        }
        if keys.is_empty() && !self.stalls_told {
            return;
        }
        self.stalls_told = !keys.is_empty();
        keys.sort_by_key(|key| std::cmp::Reverse(key.waited_ms));
        keys.truncate(STALLS_MAX);
        self.tell(Command::Stalled { keys });
    }
}
