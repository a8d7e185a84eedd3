//! The order of NCCL's calls in a host: who is asked, who answers, and what is said.

#![forbid(unsafe_code)]

use super::{Batch, DeviceTensor, Of, Ordered, Pipeline};
use crate::cuda::{Breach, GpuError};
use crate::gpu::order_lanes::{Heard, OrderKind, OrderWord};
use crate::host::gather::Unfit;
use crate::rounds::handover::FromGpu;
use crate::rounds::{Lacks, Plan};
use bps_engine::base::{Key, Operation, Rank, milliseconds, word};
use bps_engine::limits::PARTS_MAX;
use bps_engine::proto::messages::StalledKey;
use std::time::Duration;

fn breach_of(unfit: Unfit) -> Breach {
    match unfit {
        Unfit::Untimely { key, round, open } => Breach::Untimely { key, round, open },
        Unfit::Outside { key } => Breach::Outside { key },
    }
}

impl DeviceTensor {
    /// What this rank knows of what the open round's result lacks, as it is said to others.
    fn missing(&self) -> u64 {
        let lacks = self.run.as_ref().map_or(Lacks::NOTHING, |run| run.lacks);
        if lacks.is_lost { 1 } else { lacks.ranks }
    }
}

/// What others have said of it.
fn lacks_of(plan: &Plan, missing: u64) -> Lacks {
    match plan.operation {
        Operation::Broadcast(_) => Lacks { is_lost: missing != 0, ..Lacks::NOTHING },
        _ => Lacks { ranks: missing, ..Lacks::NOTHING },
    }
}

impl Pipeline {
    pub(super) fn leader(&self) -> Option<Rank> {
        self.host.as_ref()?.switches.ranks().first().copied()
    }

    fn leads(&self) -> bool {
        self.leader() == Some(self.rank)
    }

    /// This rank's part of a tensor's reduction can begin.
    pub(super) fn say_ready(&mut self, tensor: u32) {
        let (leads, now) = (self.leads(), self.now);
        // The round ended early, by an error, and its push has been told.
        let Some(state) = self.tensor(tensor) else { return };
        let Some(run) = &mut state.run else { return };
        run.is_ready = true;
        let (key, round) = (state.rows[0].key, state.round);
        if !leads {
            let word = OrderWord { kind: OrderKind::Ready, key, round, left: 1, missing: 0 };
            self.say(word);
        } else if self.gathers.own(key, now) {
            self.release(tensor);
        }
    }

    /// All ranks of the host have pushed the tensor.
    fn release(&mut self, tensor: u32) {
        // The round ended early, by an error, and its push has been told.
        let Some(DeviceTensor { run: Some(run), rows, .. }) = self.tensor(tensor) else { return };
        let (priority, key, rows) = (run.push.priority, rows[0].key, rows.len());
        if self.ended.contains(&key) {
            return;
        }
        for index in 0..word(rows) {
            self.to_reduce.push(priority, Of { tensor, index });
        }
    }

    /// This rank's parts of a row's result are on their way up.
    pub(super) fn say_landed(&mut self, of: Of) {
        if self.leads() {
            self.has_landed(of, self.rank);
            return;
        }
        // The tensor ended while the copy was under way: nobody waits for its rows.
        let Some(state) = self.tensor(of.tensor) else { return };
        let (key, round) = (state.rows[of.index as usize].key, state.round);
        let missing = state.missing();
        self.say(OrderWord { kind: OrderKind::Landed, key, round, left: 1, missing });
    }

    /// The parts of a row that a rank holds have landed there. Returns whether that can be.
    fn has_landed(&mut self, of: Of, holder: Rank) -> bool {
        let Some(host) = &self.host else { return false };
        let (switches, switch) = (host.switches.count(), host.switches.switch(holder));
        let state = self.tensors.get_mut(of.tensor as usize).and_then(Option::as_mut);
        let Some(DeviceTensor { run: Some(run), plan, rows, states, landed, .. }) = state else {
            return false;
        };
        let parts = rows[of.index as usize].parts();
        let landed = &mut landed[parts.start * switches..parts.end * switches];
        let is_reduced = states[of.index as usize].ordered == Ordered::Reduce;
        let mut fits = false;
        for (part, landed) in plan.parts[parts].iter().zip(landed.chunks_mut(switches)) {
            let is_held = host.switches.are_of_one_column(part.owner_rank, holder);
            if is_held && !landed[switch] {
                (landed[switch], fits) = (true, is_reduced);
            }
        }
        let (priority, key) = (run.push.priority, rows[0].key);
        if fits && landed.iter().all(|landed| *landed) && !self.ended.contains(&key) {
            self.to_gather.push(priority, of);
        }
        fits
    }

    /// Says something to the first rank or, as the first, to all others.
    fn say(&mut self, word: OrderWord) {
        let Some(host) = &mut self.host else { unreachable!("a rank alone has nobody to tell") };
        host.lanes.say(word);
    }

    /// Takes what the ranks of the host have said; says whether there was anything.
    pub(super) fn hear(&mut self) -> bool {
        let Some(host) = &mut self.host else { return false };
        let mut heard = std::mem::take(&mut self.heard);
        let progress = host.lanes.poll(&mut heard);
        for one in heard.drain(..) {
            match one {
                Heard::Word { from, word } => {
                    let result = self.on_word(from, word);
                    self.check(result);
                }
                Heard::Left(rank) => self.on_gone(rank),
                Heard::Lost { rank, cause } => self.tell(FromGpu::Lost { rank, cause }),
                Heard::Corrupt { from, misfit } => {
                    self.tell(FromGpu::Corrupt { rank: from, misfit });
                }
            }
        }
        self.heard = heard;
        progress
    }

    /// A rank of the host says something.
    fn on_word(&mut self, from: Rank, word: OrderWord) -> Result<(), GpuError> {
        let untrue = |breach| GpuError::Order { from, breach };
        let (key, round) = (word.key, word.round);
        if word.kind == OrderKind::End {
            return self.on_end(from, word.key);
        }
        let is_order = matches!(word.kind, OrderKind::Reduce | OrderKind::Gather);
        if is_order && Some(from) != self.leader() || !is_order && !self.leads() {
            return Err(untrue(match is_order {
                true => Breach::NotLeader,
                false => Breach::NotToLeader,
            }));
        }
        if word.kind == OrderKind::Ready {
            return self.on_ready(from, word);
        }
        let of = self.keys.get(&word.key).copied();
        let of = of.ok_or_else(|| untrue(Breach::UnknownRow { key }))?;
        match self.tensor(of.tensor) {
            // It may not have heard yet that the ranks disagree.
            Some(state) if !is_order && state.poisoned.is_some() => return Ok(()),
            Some(DeviceTensor { run: Some(run), plan, round, .. }) if *round == word.round => {
                run.lacks = run.lacks.or(lacks_of(plan, word.missing));
            }
            _ => return Err(untrue(Breach::NotOpen { key, round })),
        }
        if word.kind == OrderKind::Landed {
            let fits = self.has_landed(of, from);
            return if fits { Ok(()) } else { Err(untrue(Breach::ResultNotDue { key, round })) };
        }
        let order = if word.kind == OrderKind::Reduce { Ordered::Reduce } else { Ordered::Gather };
        if !self.take_order(of, order) {
            return Err(untrue(Breach::OrderNotDue { key, round }));
        }
        self.coming.push(of);
        if word.left <= 1 {
            let next = self.spare.pop().unwrap_or_default();
            let rows = std::mem::replace(&mut self.coming, next);
            self.orders.push_back(Batch { order, rows });
        }
        Ok(())
    }

    /// Notes an order. Returns whether this rank can follow it.
    fn take_order(&mut self, of: Of, order: Ordered) -> bool {
        let Some(state) = self.tensor(of.tensor) else { return false };
        let is_local = state.is_local;
        let Some(run) = &state.run else { return false };
        let row = &mut state.states[of.index as usize];
        let is_due = match order {
            Ordered::Gather => row.ordered == Ordered::Reduce && row.missing == 0 && !is_local,
            _ => row.ordered == Ordered::Nothing && run.is_ready,
        };
        if is_due {
            row.ordered = order;
        }
        is_due
    }

    /// The first rank is asked to order nothing more of the tensor that begins with this key, or
    /// says that it does not. Whom it concerns may not know yet that ranks disagree about it.
    fn on_end(&mut self, from: Rank, key: Key) -> Result<(), GpuError> {
        let untrue = |breach| GpuError::Order { from, breach };
        if self.ended.len() >= PARTS_MAX {
            return Err(untrue(Breach::TooManyEnded));
        }
        if self.leads() {
            self.end_orders(key);
            return Ok(());
        }
        if Some(from) != self.leader() {
            return Err(untrue(Breach::NotLeader));
        }
        self.ended.insert(key);
        let Some(tensor) = self.keys.get(&key).map(|of| of.tensor) else { return Ok(()) };
        let is_known = self.tensor(tensor).is_some_and(|state| state.poisoned.is_some());
        if is_known {
            self.end_disputed(tensor);
        }
        Ok(())
    }

    /// As the first rank, orders nothing more of the tensor that begins with this key.
    fn end_orders(&mut self, key: Key) {
        if let Some(tensor) = self.keys.get(&key).map(|of| of.tensor) {
            self.to_reduce.forget(tensor);
            self.to_gather.forget(tensor);
        }
        if self.ended.insert(key) {
            self.say(OrderWord { kind: OrderKind::End, key, round: 0, left: 1, missing: 0 });
        }
    }

    /// Ranks disagree about a tensor. Says whether the first rank may have ordered something of it
    /// that this rank has not heard; then its answer will come.
    pub(super) fn end_orders_of(&mut self, tensor: u32) -> bool {
        let is_open = self.tensor(tensor).is_some_and(|state| state.run.is_some());
        let key = self.tensor(tensor).and_then(|state| Some(state.rows.first()?.key));
        let (Some(key), Some(leader)) = (key, self.leader()) else { return false };
        if self.leads() {
            self.end_orders(key);
            return false;
        }
        let is_heard = self.ended.contains(&key) || self.gone.contains(&leader);
        if is_heard || !is_open {
            return false;
        }
        self.say(OrderWord { kind: OrderKind::End, key, round: 0, left: 1, missing: 0 });
        true
    }

    fn on_ready(&mut self, from: Rank, word: OrderWord) -> Result<(), GpuError> {
        let untrue = |breach| GpuError::Order { from, breach };
        let host = self.host.as_ref();
        let place =
            host.and_then(|host| host.switches.ranks().iter().position(|rank| *rank == from));
        // This rank is the first, and is not among its peers.
        let Some(peer) = place.and_then(|place| place.checked_sub(1)) else {
            return Err(untrue(Breach::OfAnotherHost));
        };
        let known = self.keys.get(&word.key).copied();
        if known.is_none() && self.gathers.len() >= PARTS_MAX {
            return Err(untrue(Breach::TooManyPushed));
        }
        if known.is_some_and(|of| of.index > 0) {
            return Err(untrue(Breach::UnknownTensor { key: word.key }));
        }
        let all = self.gathers.peer(word.key, peer, word.round, self.now);
        if all.map_err(|untimely| untrue(breach_of(untimely)))?
            && let Some(of) = known
        {
            self.release(of.tensor);
        }
        Ok(())
    }

    /// The first rank says what comes next, once it can do it itself: results first, since they end
    /// something.
    pub(super) fn give_order(&mut self) -> Option<Batch> {
        let host = self.host.as_ref().filter(|_| self.leads())?;
        let most = host.group_size;
        // What is reduced long before a slot is free for it could not be overtaken any more.
        let may_reduce = self.to_copy.len() + self.falling.len() < self.slots;
        let (order, turns) = match (self.to_gather.is_empty(), may_reduce) {
            (false, _) => (Ordered::Gather, &mut self.to_gather),
            (true, true) => (Ordered::Reduce, &mut self.to_reduce),
            (true, false) => return None,
        };
        if turns.is_empty() {
            return None;
        }
        let mut rows = self.spare.pop().unwrap_or_default();
        rows.extend((0..most).map_while(|_| turns.pop()));
        let kind = if order == Ordered::Reduce { OrderKind::Reduce } else { OrderKind::Gather };
        for (at, of) in rows.iter().enumerate() {
            // All words of a batch are counted by `left`, so none can be left out. None has to be:
            // both queues have rows of open rounds, and `end_orders` removes those of a tensor
            // before its round is let go.
            assert!(self.take_order(*of, order), "the first rank orders what is due");
            let Some(state) = self.tensor(of.tensor) else { unreachable!("its row is due") };
            let (key, round) = (state.rows[of.index as usize].key, state.round);
            let left = word(rows.len() - at);
            let missing = if order == Ordered::Gather { state.missing() } else { 0 };
            self.say(OrderWord { kind, key, round, left, missing });
        }
        Some(Batch { order, rows })
    }

    /// Tells of rounds that have waited too long for ranks of the host, or wait for one that has
    /// left.
    pub(super) fn look_for_stalls(&mut self) {
        // Alone on its host: there is no rank here to wait for.
        let Some(host) = &self.host else { return };
        let mut keys = Vec::new();
        for one in self.gathers.unpushed() {
            let own = one.own_missing.then_some(self.rank);
            let peers =
                one.peers_missing.iter().filter_map(|peer| host.switches.ranks().get(peer + 1));
            let missing = own.into_iter().chain(peers.copied()).collect();
            keys.extend(self.stalled(one.key, one.round, one.since, missing));
        }
        // Who gives no orders any more can't say that it is missing.
        if let Some(leader) = self.leader().filter(|leader| self.gone.contains(leader)) {
            for state in self.tensors.iter().flatten() {
                let Some(run) = &state.run else { continue };
                let last = if state.is_local { Ordered::Reduce } else { Ordered::Gather };
                if state.states.iter().any(|row| row.ordered < last) {
                    let (key, round) = (state.rows[0].key, state.round);
                    keys.extend(self.stalled(key, round, run.since, vec![leader]));
                }
            }
        }
        if keys.is_empty() && !self.stalls_told {
            return;
        }
        self.stalls_told = !keys.is_empty();
        self.tell(FromGpu::Stalled { keys });
    }

    /// A round that waits for these ranks, if that is worth telling.
    fn stalled(
        &self,
        key: Key,
        round: u64,
        since: Duration,
        missing: Vec<Rank>,
    ) -> Option<StalledKey> {
        let waited = self.now.saturating_sub(since);
        let gone = missing.iter().filter(|rank| self.gone.contains(rank));
        let left: Vec<Rank> = gone.copied().collect();
        let waited_ms = milliseconds(waited);
        let is_told = waited >= self.stall_report || !left.is_empty();
        is_told.then_some(StalledKey { key, round, waited_ms, missing, left })
    }
}
