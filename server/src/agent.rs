//! A server's side of the control plane, as a state machine: messages of the scheduler and reports
//! of the shards go in, effects come out. The control threads carry them out over sockets, the
//! simulation in memory.

#![forbid(unsafe_code)]

mod leaving;
mod outlasting;

use self::outlasting::Memory;
use crate::entry::Groups;
use crate::shard::{Command, Report};
use bps_engine::base::{Epoch, Key, Rank, word};
use bps_engine::control::{is_one_sided, lane_fault};
use bps_engine::limits::{SCRATCH_BYTES, SEALED_BYTES, STAGING_BYTES};
use bps_engine::mem::Budget;
use bps_engine::proto::late::{LateCollector, LateKeys};
use bps_engine::proto::messages::{
    KeySpec, NodeMessage, OverReason, RetiredKey, Roster, STALLS_SHOWN_MAX, SchedulerMessage,
    StalledKey, Timeline,
};
use bps_engine::proto::moving::{Adopted, MovingOrder, MovingReport};
use bps_engine::proto::paths::End;
use bps_engine::proto::pulse::Pulse;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// What has to be done now.
pub enum Effect {
    /// To a shard.
    Shard(u32, Command),
    /// To the scheduler.
    Send(NodeMessage),
    /// Record a timeline as this server of the job, or end it (`None`).
    Timeline(u32, Option<Timeline>),
    /// A heartbeat, to the scheduler.
    Beat,
    /// One attempt to reach another scheduler; or (`false`) there is no need of one, because the
    /// one that was silent answers.
    Redial(bool),
    /// Knock at the scheduler on fresh connections, which is so far away, until told to stop.
    Knock(Option<Duration>),
    /// A line for people.
    Info(String),
    /// A line for people that they should act on.
    Warn(String),
    /// Who takes part has changed: such a line, also for the timeline.
    Changed(String),
    /// The job is over: stop. The exit code says whether it went well.
    Over(bool),
}

/// See the [module](self).
pub struct Agent {
    cores: u32,
    /// Its TCP lanes are encrypted.
    encrypts: bool,
    roster: Option<Roster>,
    /// The membership that the scheduler has asked for, and shards that have not begun it.
    reset: Option<(Epoch, u32)>,
    /// Shards that have not answered, by install request.
    installs: HashMap<u64, u32>,
    /// What each shard last reported as stalled.
    stalled: Vec<(Vec<StalledKey>, Vec<LateKeys>)>,
    pulse: Pulse,
    memory: Memory,
    knocking: bool,
    /// Until when it waits to be let go, as it has asked.
    leaves_by: Option<Duration>,
    over: bool,
}

impl Agent {
    /// The agent of a server with this many cores.
    #[must_use]
    pub fn new(cores: u32, pulse: Pulse) -> Agent {
        Agent {
            cores,
            encrypts: false,
            roster: None,
            reset: None,
            installs: HashMap::new(),
            stalled: vec![Default::default(); cores as usize],
            pulse,
            memory: Memory::new(Duration::ZERO),
            knocking: false,
            leaves_by: None,
            over: false,
        }
    }

    /// The same where TCP lanes are encrypted, which takes memory.
    #[must_use]
    pub fn with_encryption(self, encrypts: bool) -> Agent {
        Agent { encrypts, ..self }
    }

    /// This server's number in the job, once it is formed.
    #[must_use]
    pub fn index(&self) -> Option<u32> {
        self.roster.as_ref().map(|roster| roster.index)
    }

    /// Time passes: to be told several times in each interval of heartbeats.
    pub fn handle_tick(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        if self.over {
            return;
        }
        let beat = self.pulse.look(now);
        if beat.send {
            effects.push(Effect::Beat);
        }
        if self.look_for_another(now, effects) {
            return;
        }
        if std::mem::replace(&mut self.knocking, beat.knock) != beat.knock {
            effects.push(Effect::Knock(beat.knock.then_some(self.pulse.round_trip())));
        }
        if let Some(silent) = beat.silent {
            let line = self.pulse.complaint(silent).to_string();
            if !self.outlasts() {
                effects.push(Effect::Send(NodeMessage::failed(line.clone())));
            }
            self.go_without(line, silent, now, effects);
        }
    }

    /// The scheduler as people know it.
    #[must_use]
    pub fn scheduler(&self) -> &str {
        self.pulse.scheduler()
    }

    /// A message of the scheduler on a fresh connection.
    pub fn handle_aside(
        &mut self,
        message: SchedulerMessage,
        now: Duration,
        effects: &mut Vec<Effect>,
    ) {
        match message {
            SchedulerMessage::Heartbeat => self.pulse.answered_aside(now),
            SchedulerMessage::Over { reason } if !self.over => self.end(&reason, effects),
            _ => {}
        }
    }

    /// A message of the scheduler.
    pub fn handle(&mut self, message: SchedulerMessage, now: Duration, effects: &mut Vec<Effect>) {
        match message {
            SchedulerMessage::Heartbeat => {
                self.pulse.answered(now);
                self.is_back(now, effects);
            }
            SchedulerMessage::Waiting { text } => effects.push(Effect::Info(text)),
            SchedulerMessage::Roster(roster) => {
                let (epoch, ranks) = (roster.epoch, roster.size);
                let groups: Vec<u32> = roster.workers.iter().map(|peer| peer.group).collect();
                self.begin(epoch, Groups::new(&groups).that_shrink(roster.shrinks), effects);
                effects.push(Effect::Info(format!(
                    "server {} of {}, {ranks} ranks, epoch {}",
                    roster.index,
                    roster.servers.len(),
                    epoch.0
                )));
                effects.extend(roster.change.clone().map(Effect::Info));
                // Accumulators come on top, as tensors are declared: one for each element of this
                // server's share.
                let mut budget = Budget::new();
                let lanes = u64::from(ranks) * u64::from(self.cores);
                let records = if self.encrypts { 2 * SEALED_BYTES } else { 0 };
                let bytes = STAGING_BYTES + SCRATCH_BYTES + records;
                budget.add("buffers of lanes", lanes, bytes as u64);
                effects.extend(budget.lines().map(Effect::Info));
                self.memory.begin(roster.term);
                self.roster = Some(roster);
            }
            SchedulerMessage::Install { request, keys } => self.install(request, keys, effects),
            SchedulerMessage::Moving(order) => self.moving(order, effects),
            SchedulerMessage::Retire { keys } => self.retire(keys, effects),
            SchedulerMessage::Reset { epoch } => {
                self.reset = Some((epoch, self.cores));
                self.memory.reset(epoch);
                self.begin(epoch, Groups::default(), effects);
            }
            SchedulerMessage::Shrunk(shrunk) => {
                self.memory.lose(&shrunk.gone);
                let gone: Arc<[Rank]> = shrunk.gone.into();
                for core in 0..self.cores {
                    let gone = Arc::clone(&gone);
                    effects.push(Effect::Shard(core, Command::Shrink { gone }));
                }
                effects.push(Effect::Changed(shrunk.text));
            }
            SchedulerMessage::Inquire { keys } => {
                let keys: Arc<[Key]> = keys.into();
                for core in 0..self.cores {
                    let keys = Arc::clone(&keys);
                    effects.push(Effect::Shard(core, Command::Inquire { keys }));
                }
            }
            SchedulerMessage::Timeline { timeline } => {
                let index = self.roster.as_ref().map_or(0, |roster| roster.index);
                effects.push(Effect::Timeline(index, timeline));
            }
            SchedulerMessage::Over { reason } => self.end(&reason, effects),
            // The clock is for the control thread and the scheduler's stall reports for the
            // workers' users; the rest is not for servers.
            SchedulerMessage::Resumed { .. }
            | SchedulerMessage::Stall { .. }
            | SchedulerMessage::PathStall { .. }
            | SchedulerMessage::Clock(_)
            | SchedulerMessage::Mismatch(_)
            | SchedulerMessage::Uneven(_)
            | SchedulerMessage::Tune(_)
            | SchedulerMessage::Superseded { .. }
            | SchedulerMessage::Newcomers { .. }
            | SchedulerMessage::Declared { .. }
            | SchedulerMessage::Refused { .. }
            | SchedulerMessage::BarrierDone { .. } => {}
        }
    }

    fn begin(&mut self, epoch: Epoch, groups: Groups, effects: &mut Vec<Effect>) {
        let groups = Arc::new(groups);
        self.installs.clear();
        self.stalled = vec![Default::default(); self.cores as usize];
        for core in 0..self.cores {
            let groups = Arc::clone(&groups);
            effects.push(Effect::Shard(core, Command::Begin { epoch, groups }));
        }
    }

    fn install(&mut self, request: u64, keys: Vec<KeySpec>, effects: &mut Vec<Effect>) {
        for spec in &keys {
            self.memory.install(spec.key);
        }
        let by_core = by_core(keys, |spec: &KeySpec| spec.core);
        self.order(request, by_core, effects, |keys| Command::Install { request, keys });
    }

    /// Servers are lost, and this one adopts keys.
    fn moving(&mut self, order: MovingOrder, effects: &mut Vec<Effect>) {
        match order {
            MovingOrder::Lost { servers, text } => {
                self.memory.lose_servers(&servers);
                effects.push(Effect::Changed(text));
            }
            MovingOrder::Adopt { request, keys } => {
                self.memory.adopt(request, &keys);
                let by_core = by_core(keys, |adopted: &Adopted| adopted.spec.core);
                self.order(request, by_core, effects, |keys| Command::Adopt { request, keys });
            }
            // For workers.
            MovingOrder::Moved { .. } => {}
        }
    }

    /// Has shards take keys, and answers once all have.
    fn order<Key>(
        &mut self,
        request: u64,
        by_core: HashMap<u32, Vec<Key>>,
        effects: &mut Vec<Effect>,
        command: impl Fn(Vec<Key>) -> Command,
    ) {
        if let Some(core) = by_core.keys().find(|&&core| core >= self.cores) {
            let message =
                format!("the scheduler placed keys on core {core}, there are {}", self.cores);
            return effects.push(Effect::Send(NodeMessage::failed(message)));
        }
        if by_core.is_empty() {
            return effects.push(Effect::Send(NodeMessage::Installed { request }));
        }
        self.installs.insert(request, word(by_core.len()));
        for (core, keys) in by_core {
            effects.push(Effect::Shard(core, command(keys)));
        }
    }

    fn retire(&mut self, keys: Vec<RetiredKey>, effects: &mut Vec<Effect>) {
        let by_core = by_core(keys, |key: &RetiredKey| key.core);
        // Only cores that have installed a key can be told to forget it.
        let known = by_core.into_iter().filter(|(core, _)| *core < self.cores);
        effects.extend(known.map(|(core, keys)| Effect::Shard(core, Command::Retire { keys })));
    }

    /// A report of a shard.
    pub fn handle_report(&mut self, core: u32, report: Report, effects: &mut Vec<Effect>) {
        match report {
            Report::Installed { request } => {
                // One of an earlier membership: nobody waits for it.
                let Some(left) = self.installs.get_mut(&request) else { return };
                *left -= 1;
                if *left == 0 {
                    self.installs.remove(&request);
                    self.memory.adopted(request);
                    effects.push(Effect::Send(NodeMessage::Installed { request }));
                }
            }
            Report::Begun { epoch } => {
                self.stalled[core as usize] = Default::default();
                let Some((awaited, left)) = &mut self.reset else { return };
                if *awaited != epoch {
                    return;
                }
                *left -= 1;
                if *left == 0 {
                    self.reset = None;
                    effects.push(Effect::Send(NodeMessage::ResetDone { epoch }));
                }
            }
            Report::Failed { message } => {
                effects.push(Effect::Send(NodeMessage::failed(message.clone())));
                effects.push(Effect::Warn(message));
            }
            Report::TurnedAway { message } => effects.push(Effect::Warn(message)),
            Report::Closed { rank, cause, expected, left } => {
                // The scheduler finds out by itself what became of a worker; if nothing did, the
                // path to it is broken. What a rank closes itself ends nobody else's job.
                if left {
                    self.memory.leave(rank);
                }
                if !expected && !self.over {
                    effects
                        .push(Effect::Warn(format!("core {core}: {}: {cause}", self.lane(rank))));
                    if is_one_sided(cause) {
                        let (to, fault) = (End::Rank(rank), lane_fault(cause));
                        let said = NodeMessage::LaneLost { to, fault };
                        self.memory.lose_lane(&said);
                        effects.push(Effect::Send(said));
                    }
                }
            }
            Report::Refused { rank, why } => {
                // Only its own lane is closed. If it is truly that rank, it is told so and ends the
                // job itself.
                let lane = self.lane(rank);
                effects.push(Effect::Warn(format!("core {core} refused a frame on {lane}: {why}")));
            }
            Report::Restored { keys } => {
                self.memory.restored(&keys);
                let report = MovingReport::Restored { keys };
                effects.push(Effect::Send(NodeMessage::Moving(report)));
            }
            Report::KeyStates { keys } => {
                effects.push(Effect::Send(NodeMessage::KeyStates { keys }));
            }
            Report::Stalled { keys, late } => {
                self.stalled[core as usize] = (keys, late);
                let (mut keys, mut late) = (Vec::new(), LateCollector::default());
                for (described, all) in &self.stalled {
                    keys.extend(described.iter().cloned());
                    late.add_all(all);
                }
                keys.sort_by_key(|key| std::cmp::Reverse(key.waited_ms));
                keys.truncate(STALLS_SHOWN_MAX);
                let late = late.finish(false);
                effects.push(Effect::Send(NodeMessage::Stalled { keys, late }));
            }
        }
    }

    /// The connection to the scheduler is lost: a line about it.
    pub fn scheduler_lost(&mut self, line: String, now: Duration, effects: &mut Vec<Effect>) {
        self.go_without(line, Duration::ZERO, now, effects);
    }

    fn go_without(
        &mut self,
        line: String,
        silent: Duration,
        now: Duration,
        effects: &mut Vec<Effect>,
    ) {
        if !self.over && !self.wait_out(&line, silent, now, effects) {
            self.over = true;
            effects.push(Effect::Warn(line));
            effects.push(Effect::Over(false));
        }
    }

    fn end(&mut self, reason: &OverReason, effects: &mut Vec<Effect>) {
        self.over = true;
        let line = match reason {
            OverReason::Left { .. } => {
                "this server has left; the job goes on without it".to_owned()
            }
            reason => format!("the job is over: {reason}"),
        };
        let well = matches!(reason, OverReason::Finished | OverReason::Left { .. });
        effects.push(if well { Effect::Info(line) } else { Effect::Warn(line) });
        effects.push(Effect::Over(well));
    }

    fn lane(&self, rank: Rank) -> String {
        match self.roster.as_ref().and_then(|roster| roster.workers.get(rank.0 as usize)) {
            Some(peer) => format!("the lane of {rank} (host {}, pid {})", peer.host, peer.pid),
            None => format!("the lane of {rank}"),
        }
    }
}

/// Keys by the core that has them.
fn by_core<Key>(keys: Vec<Key>, core: impl Fn(&Key) -> u32) -> HashMap<u32, Vec<Key>> {
    let mut by_core: HashMap<u32, Vec<Key>> = HashMap::new();
    for key in keys {
        by_core.entry(core(&key)).or_default().push(key);
    }
    by_core
}
