//! What the ranks of a group do for each other: the parts that this rank owns are granted, added up
//! and published, and those that others own are contributed to.

use super::{LaneId, Nic, Operation, Peer, Receiving, Report, RunPart, Stage, Word};
use crate::local::{Answer, Dropped, Granted, Waiting};
use bps_engine::base::{Key, Rank};
use bps_engine::proto::messages::{STALLS_MAX, StalledKey};
use bps_engine::trace::timeline::Mark;
use bps_engine::transport::Landing;
use bps_engine::wire::{Header, Kind};

impl Nic {
    /// All of the group have pushed this key, which this rank owns.
    pub(super) fn gathered_key(&mut self, key: Key) {
        let Some(&(tensor, part)) = self.keys.get(&key) else { return };
        let Some(Some(tensor)) = self.tensors.get(tensor as usize) else { return };
        if let Some(run) = tensor.run.filter(|_| tensor.poisoned.is_none()) {
            self.gathered(RunPart { run, part });
        }
    }

    pub(super) fn gathered(&mut self, of: RunPart) {
        let priority = self.runs[of.run as usize].priority;
        let Some((tensor, part)) = self.planned(of) else { return };
        if matches!(tensor.plan.operation, Operation::Broadcast(_)) {
            // There is nothing to add: the root's bytes are the result.
            self.reduced(of);
        } else {
            self.gathered.push(priority, part.bytes, of);
        }
    }

    /// Asks the group for the next parts, by priority, as far as the credit allows.
    pub(super) fn grant_next(&mut self) {
        while self.collector.has_room()
            && let Some(of) = self.gathered.take()
        {
            let Some((tensor, part)) = self.planned(of) else { return };
            let round = tensor.round;
            self.trace.record(Mark::Granted, part.key, round, self.config.rank, part.bytes);
            self.collector.grant(Granted { key: part.key, bytes: part.bytes, item: of });
            for at in 0..self.group.len() {
                self.say_to(self.group[at], Word::short(Kind::Grant, of, round));
            }
        }
    }

    /// The owner asks for this rank's contribution.
    pub(super) fn send_contribution(&mut self, owner: LaneId, of: RunPart, round: u64) {
        let Some((_, part)) = self.planned(of) else { return };
        self.trace.record(Mark::Granted, part.key, round, self.config.rank, part.bytes);
        self.set_stage(of, Stage::Asked);
        let kind = Kind::Contribution;
        let checksum = self.checksum(of, kind);
        self.say_to(owner, Word { kind, of, round, checksum });
    }

    /// The header of a contribution has come.
    pub(super) fn on_contribution(&mut self, lane: LaneId, header: &Header) -> Result<(), String> {
        let (key, bytes) = (header.key, header.length as usize);
        let peer = self.place_in_group(lane)?;
        let tensor = self.keys.get(&key).and_then(|&(tensor, _)| self.tensors.get(tensor as usize));
        let Some(Some(tensor)) = tensor else {
            return Err(format!("a contribution to unknown {key}"));
        };
        if tensor.poisoned.is_some() {
            self.unwanted(lane, bytes);
            return Ok(());
        }
        let fits = header.dtype == tensor.plan.dtype
            && header.round.0 == tensor.round
            && header.offset == 0
            && header.contributors == 1;
        let answer = if fits { self.collector.header(peer, key, bytes) } else { Answer::Unknown };
        match answer {
            Answer::Take => self.endpoint.land(lane, Landing::Pieces, bytes),
            Answer::Hold => {}
            Answer::Unknown => {
                return Err(format!("a contribution to {key} does not fit what it was asked for"));
            }
        }
        self.lanes[lane.0 as usize].receiving =
            Receiving::Contribution { peer, header: *header, done: 0, checksum: 0 };
        Ok(())
    }

    /// Adds what is there of every contribution to the part whose turn it is.
    pub(super) fn add_up(&mut self) {
        while let Some(ready) = self.collector.ready() {
            let of = ready.part.item;
            let Some((tensor, part)) = self.planned(of) else { return };
            let is_average = tensor.plan.operation == Operation::Average && part.core.is_none();
            let divisor = if is_average { self.config.size } else { 1 };
            let (dtype, round) = (tensor.plan.dtype, tensor.round);
            let memory = self.runs[of.run as usize].memory;
            let at = part.offset + ready.offset;
            // SAFETY: the part lies inside source and target, which the caller keeps valid until
            // the task is finished and which are the same or apart; each peer's piece has at least
            // `length` bytes, which its transport keeps until it is consumed.
            unsafe {
                let (out, own) = (memory.target.add(at), memory.source.add(at));
                let count = ready.length / dtype.size();
                let sources = self.collector.sources();
                self.kernels.sum_all(dtype, out, own, sources, count, divisor);
            }
            let (endpoint, group) = (&mut self.endpoint, &self.group);
            let whole = self.collector.added(ready.length, |peer| endpoint.consume(group[peer]));
            if whole.is_some() {
                self.gathered.returned(part.bytes);
                self.trace.record(Mark::Reduced, part.key, round, self.config.rank, part.bytes);
                for lane in &self.group {
                    self.lanes[lane.0 as usize].receiving = Receiving::Header;
                }
                self.reduced(of);
                self.let_held_go_on();
            }
        }
    }

    /// The contributions that stood and whose turn it is.
    fn let_held_go_on(&mut self) {
        while let Some((peer, bytes)) = self.collector.take_next() {
            self.endpoint.land(self.group[peer], Landing::Pieces, bytes);
        }
    }

    /// The group's sum of a part is in the target: other groups come next, or it is the result.
    fn reduced(&mut self, of: RunPart) {
        match self.planned(of) {
            Some((_, part)) if part.core.is_some() => self.send_to_server(of),
            _ => self.on_result(of, None),
        }
    }

    /// The result of a part goes to the group, if this rank owns it.
    pub(super) fn publish(&mut self, of: RunPart) {
        let Some((tensor, part)) = self.planned(of) else { return };
        if part.owner.is_some() {
            return;
        }
        let round = tensor.round;
        if !self.group.is_empty() {
            self.trace.record(Mark::Copying, part.key, round, self.config.rank, part.bytes);
        }
        let kind = Kind::Publication;
        // One for all of the group: they are sent the same bytes.
        let checksum = if self.group.is_empty() { None } else { self.checksum(of, kind) };
        for at in 0..self.group.len() {
            self.say_to(self.group[at], Word { kind, of, round, checksum });
        }
    }

    /// A task is over before its time: nobody sums its parts any more.
    pub(super) fn forget_in_group(&mut self, run: u32) {
        self.gathered.remove(|of| of.run == run);
        let (queue, lanes) = (&mut self.gathered, &mut self.lanes);
        let (endpoint, group) = (&mut self.endpoint, &self.group);
        self.collector.remove(
            |of| of.run == run,
            |part| queue.returned(part.bytes),
            |peer, dropped| {
                let lane = group[peer];
                let left = match dropped {
                    Dropped::Header { bytes } => {
                        endpoint.land(lane, Landing::Pieces, bytes);
                        bytes
                    }
                    Dropped::Payload { left, held } => {
                        if held > 0 {
                            endpoint.consume(lane);
                        }
                        left - held
                    }
                };
                lanes[lane.0 as usize].receiving = match left {
                    0 => Receiving::Header,
                    left => Receiving::Unwanted { left },
                };
            },
        );
        self.let_held_go_on();
        self.add_up();
    }

    pub(super) fn place_in_group(&self, lane: LaneId) -> Result<usize, String> {
        let place = self.group.iter().position(|other| *other == lane);
        place.ok_or_else(|| "it is not of this rank's group".into())
    }

    /// Tells of rounds that have waited too long for ranks of the group.
    pub(super) fn look_for_stalls(&mut self) {
        if self.group.is_empty() || self.over.is_some() || self.leaving {
            return;
        }
        let anybody_left = self.group.iter().any(|lane| self.lanes[lane.0 as usize].goodbye);
        let overdue = |key: &StalledKey| {
            key.waited_ms >= self.stall_report_ms() || anybody_left && !key.left.is_empty()
        };
        let waiting = self.gathers.waiting().map(|one| self.describe(&one)).filter(overdue);
        let mut keys: Vec<StalledKey> = waiting.collect();
        if anybody_left {
            keys.extend(self.left_alone());
        }
        keys.extend(self.pipeline.stalled.iter().cloned());
        keys.sort_by_key(|key| std::cmp::Reverse(key.waited_ms));
        keys.truncate(STALLS_MAX);
        if keys.is_empty() && !self.stalls_told {
            return;
        }
        self.stalls_told = !keys.is_empty();
        self.report(Report::Stalled { keys });
    }

    fn describe(&self, waiting: &Waiting) -> StalledKey {
        let own = waiting.own_missing.then_some(self.config.rank);
        let lanes = || waiting.peers_missing.iter().map(|peer| self.group[*peer]);
        let mut missing: Vec<Rank> =
            own.into_iter().chain(lanes().filter_map(|lane| self.rank_of(lane))).collect();
        missing.sort_unstable();
        let gone = lanes().filter(|lane| self.lanes[lane.0 as usize].goodbye);
        let left = gone.filter_map(|lane| self.rank_of(lane)).collect();
        let waited_ms = self.waited_ms(waiting.since);
        StalledKey { key: waiting.key, round: waiting.round, waited_ms, missing, left }
    }

    fn stall_report_ms(&self) -> u64 {
        u64::try_from(self.config.stall_report.as_millis()).unwrap_or(u64::MAX)
    }

    /// Parts whose owner has left: it can't say that it is missing.
    fn left_alone(&self) -> Vec<StalledKey> {
        let mut keys = Vec::new();
        for tensor in self.tensors.iter().flatten() {
            let Some(run) = tensor.run.map(|run| &self.runs[run as usize]) else { continue };
            for (part, stage) in tensor.plan.parts.iter().zip(&tensor.stages) {
                let Some(owner) = part.owner.filter(|_| *stage != Stage::Idle) else { continue };
                if !self.lanes[owner.0 as usize].goodbye {
                    continue;
                }
                let (key, round) = (part.key, tensor.round);
                let missing: Vec<Rank> = self.rank_of(owner).into_iter().collect();
                let (waited_ms, left) = (self.waited_ms(run.since), missing.clone());
                keys.push(StalledKey { key, round, waited_ms, missing, left });
            }
        }
        keys
    }

    pub(super) fn rank_of(&self, lane: LaneId) -> Option<Rank> {
        match self.lanes[lane.0 as usize].peer {
            Peer::Rank(rank) => Some(rank),
            Peer::Server(_) => None,
        }
    }

    fn waited_ms(&self, since: std::time::Duration) -> u64 {
        u64::try_from(self.now.saturating_sub(since).as_millis()).unwrap_or(u64::MAX)
    }
}
