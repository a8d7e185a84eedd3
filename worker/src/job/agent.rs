//! A worker's side of the control plane, as a state machine: messages of the scheduler and wishes
//! of the process go in, effects come out. The control thread carries them out over sockets, the
//! simulation in memory.

mod moving;
mod outlasting;

use self::outlasting::Memory;
use super::nic_loop::Command;
use crate::base::error::{Closed, Corruption, Death, Error, PeerDied, Refusal, Source, StartError};
use crate::host::switches::Switches;
use crate::nic::{LanePeer, Report};
use crate::rounds::{Among, Plan, PlanPart};
use bps_engine::base::{CoreId, Rank, word};
use bps_engine::control::lane_fault;
use bps_engine::limits::PART_BYTES_MAX;
use bps_engine::proto::late::LateCollector;
use bps_engine::proto::messages::{
    Assignment, Declaration, Mismatch, NodeMessage, Origin, OverReason, Party, Place, Replacement,
    Roster, RoundOf, STALLS_MAX, STALLS_SHOWN_MAX, SchedulerMessage, Superseded,
};
use bps_engine::proto::moving::MovingReport;
use bps_engine::proto::paths::End;
use bps_engine::proto::pulse::Pulse;
use bps_engine::proto::store::Store;
use bps_engine::proto::tuning::{Recut, TuneOrder};
use bps_engine::proto::uneven::{UnevenOrder, UnevenReport};
use bps_engine::transport::LaneId;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

/// What has to be done now.
pub enum Effect {
    /// To the NIC loop.
    Nic(Command),
    /// To the scheduler.
    Send(NodeMessage),
    /// A tensor may be pushed so often: other ranks have replaced it then. `None`: they have not.
    Limit {
        /// Its id.
        tensor: u32,
        /// How often, in all.
        until: Option<u64>,
    },
    /// A declare is answered: tensor ids in the order of the declarations.
    Declared {
        /// Its number.
        request: u64,
        /// Ids, or why not.
        result: Result<Vec<u32>, Error>,
    },
    /// A barrier is passed.
    BarrierDone {
        /// Its number.
        request: u64,
    },
    /// A heartbeat, to the scheduler.
    Beat,
    /// Knock at the scheduler on fresh connections, which is so far away, until told to stop.
    Knock(Option<Duration>),
    /// One attempt to reach another scheduler; or (`false`) there is no need of one, because the
    /// one that was silent answers.
    Redial(bool),
    /// So many nodes wait to be let in.
    Newcomers(u32),
    /// These ranks have died, in this order, and the job goes on without them.
    Gone(Vec<Rank>),
    /// On ranks that have run out of data.
    Uneven(UnevenOrder),
    /// A line for people.
    Warn(String),
    /// Who takes part has changed: a line for people, and for the timeline.
    Changed(String),
    /// The job is over for this worker.
    Over(Error),
}

/// The lanes of a worker, by who is at their other end.
#[derive(Clone, Default)]
pub struct Lanes {
    /// Server cores.
    pub cores: HashMap<CoreId, LaneId>,
    /// The other ranks of its group.
    pub ranks: HashMap<Rank, LaneId>,
}

/// See the [module](self).
pub struct Agent {
    roster: Roster,
    lanes: Lanes,
    switches: Switches,
    next_request: u64,
    declares: HashMap<u64, Vec<Declaration>>,
    planned: HashSet<u32>,
    /// Names on which ranks disagree, and the rounds of their tensors on which they had agreed.
    poisoned: HashMap<String, (Error, Vec<(u32, u64)>)>,
    /// What servers have told of lost lanes, until the scheduler says what happened.
    lost: Option<Death>,
    /// Servers that are lost, and that the job goes on without.
    lost_servers: Vec<u32>,
    pulse: Pulse,
    memory: Memory,
    knocking: bool,
    over: bool,
    /// The job goes on without this epoch, and this rank may come back to it.
    may_return: bool,
}

impl Agent {
    /// The agent of a worker that has this roster and these lanes, on a host of these switches.
    #[must_use]
    pub fn new(roster: Roster, lanes: Lanes, switches: Switches, pulse: Pulse) -> Agent {
        let memory = Memory::new(roster.term, Duration::ZERO);
        Agent {
            roster,
            lanes,
            switches,
            next_request: 1,
            declares: HashMap::new(),
            planned: HashSet::new(),
            poisoned: HashMap::new(),
            lost: None,
            lost_servers: Vec::new(),
            pulse,
            memory,
            knocking: false,
            over: false,
            may_return: false,
        }
    }

    /// Whether the epoch is over for this rank, or the job.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Whether the epoch is over and the job is not.
    #[must_use]
    pub fn may_return(&self) -> bool {
        self.may_return
    }

    /// Starts a declare: its number and the message to send.
    pub fn declare(&mut self, tensors: Vec<Declaration>) -> (u64, NodeMessage) {
        let request = self.next_request;
        self.next_request += 1;
        self.declares.insert(request, tensors.clone());
        (request, NodeMessage::Declare { request, tensors })
    }

    /// As [`declare`](Self::declare), for names that were declared otherwise before.
    pub fn redeclare(&mut self, tensors: Vec<Replacement>) -> (u64, NodeMessage) {
        let said = tensors.iter().map(|replacement| replacement.said.clone()).collect();
        let (request, _) = self.declare(said);
        self.memory.hinder("tensors were declared anew");
        (request, NodeMessage::Redeclare { request, tensors })
    }

    /// Starts a barrier: its number and the message to send.
    pub fn barrier(&mut self) -> (u64, NodeMessage) {
        let request = self.next_request;
        self.next_request += 1;
        self.memory.ask_barrier(request);
        (request, NodeMessage::Barrier { request })
    }

    /// Asks whether the root of a broadcast has joined: the number and the message to send.
    pub fn ask_root(&mut self, tensor: u32) -> (u64, NodeMessage) {
        let request = self.next_request;
        self.next_request += 1;
        self.memory.hinder("ranks have joined");
        (request, NodeMessage::Uneven(UnevenReport::IsRootThere { request, tensor }))
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
            let silence = self.pulse.complaint(silent);
            if self.wait_out(&silence.to_string(), silent, now, effects) {
                return;
            }
            effects.push(Effect::Send(NodeMessage::failed(silence.to_string())));
            self.end(peer_died(Death::SchedulerSilent(silence)), effects);
        }
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
            SchedulerMessage::Over { .. } => self.handle(message, now, effects),
            _ => {}
        }
    }

    /// The scheduler as people know it.
    #[must_use]
    pub fn scheduler(&self) -> &str {
        self.pulse.scheduler()
    }

    /// A message of the scheduler. `open_round` describes what this worker waits for, if anything.
    pub fn handle(&mut self, message: SchedulerMessage, now: Duration, effects: &mut Vec<Effect>) {
        if self.over {
            return;
        }
        match message {
            SchedulerMessage::Heartbeat => {
                self.pulse.answered(now);
                self.is_back(now, effects);
            }
            SchedulerMessage::Declared { request, tensors } => {
                self.declared(request, &tensors, effects);
            }
            SchedulerMessage::Refused { request, cause } => {
                if let Some(declarations) = self.declares.remove(&request) {
                    let known = declarations.iter().find_map(|one| self.poisoned.get(&one.name));
                    let refused = || Refusal::Scheduler(Arc::new(cause)).into();
                    let error = known.map_or_else(refused, |(error, _)| error.clone());
                    effects.push(Effect::Declared { request, result: Err(error) });
                }
            }
            SchedulerMessage::Mismatch(mismatch) => self.mismatch(mismatch, effects),
            SchedulerMessage::Superseded { tensors } => {
                let limit =
                    |Superseded { tensor, rounds }| Effect::Limit { tensor, until: Some(rounds) };
                effects.extend(tensors.into_iter().map(limit));
            }
            SchedulerMessage::BarrierDone { request } => {
                if self.memory.pass(request) {
                    effects.push(Effect::BarrierDone { request });
                }
            }
            SchedulerMessage::Stall { late, over } => {
                effects.extend(late.iter().map(|late| Effect::Warn(late.to_string())));
                effects.extend(over.map(|over| Effect::Warn(over.to_string())));
            }
            SchedulerMessage::PathStall { stalls } => {
                if stalls.is_empty() {
                    effects.push(Effect::Warn("what was late has arrived".into()));
                }
                effects.extend(stalls.iter().map(|stall| Effect::Warn(stall.to_string())));
            }
            SchedulerMessage::Waiting { text } => effects.push(Effect::Warn(text)),
            SchedulerMessage::Moving(order) => self.moving(order, effects),
            SchedulerMessage::Tune(order) => self.tune(order, effects),
            SchedulerMessage::Uneven(order) => {
                self.memory.hinder("ranks have joined");
                effects.push(Effect::Uneven(order));
            }
            SchedulerMessage::Shrunk(shrunk) => {
                self.memory.lose(&shrunk.gone);
                effects.extend([Effect::Gone(shrunk.gone), Effect::Changed(shrunk.text)]);
            }
            SchedulerMessage::Newcomers { count } => effects.push(Effect::Newcomers(count)),
            SchedulerMessage::Over { reason } => {
                self.may_return = matches!(reason, OverReason::Reforming { .. });
                self.end(over_error(reason), effects);
            }
            // For servers, for the control thread, or before the roster: of no meaning here.
            SchedulerMessage::Roster(_)
            | SchedulerMessage::Resumed { .. }
            | SchedulerMessage::Install { .. }
            | SchedulerMessage::Inquire { .. }
            | SchedulerMessage::Retire { .. }
            | SchedulerMessage::Clock(_)
            | SchedulerMessage::Timeline { .. }
            | SchedulerMessage::Reset { .. } => {}
        }
    }

    fn declared(&mut self, request: u64, tensors: &[Assignment], effects: &mut Vec<Effect>) {
        // Nobody waits for an answer that was given already.
        let Some(declarations) = self.declares.remove(&request) else { return };
        let (asked, answered) = (declarations.len(), tensors.len());
        if asked != answered {
            let error = Refusal::Answers { asked, answered }.into();
            return effects.push(Effect::Declared { request, result: Err(error) });
        }
        self.memory.learn(&declarations, tensors);
        let plans: Result<Vec<Plan>, Error> = declarations
            .into_iter()
            .zip(tensors)
            .map(|(declaration, assignment)| self.plan(declaration, assignment))
            .collect();
        let result = plans.map(|plans| {
            for (plan, assignment) in plans.into_iter().zip(tensors) {
                let &Assignment { tensor, until, .. } = assignment;
                effects.push(Effect::Limit { tensor, until });
                let name = plan.name.clone();
                if self.planned.insert(tensor) {
                    let plan = Arc::new(plan);
                    effects.push(Effect::Nic(Command::Plan { tensor, plan }));
                }
                // Only rounds on which the ranks had agreed before are still to come.
                if let Some((error, agreed)) = self.poisoned.get(&*name) {
                    let (error, agreed) = (error.clone(), agreed.clone());
                    effects.push(Effect::Nic(Command::Poison {
                        name: name.to_string(),
                        agreed,
                        error,
                    }));
                }
            }
            tensors.iter().map(|assignment| assignment.tensor).collect()
        });
        effects.push(Effect::Declared { request, result });
    }

    /// An assignment, checked: the parts must cover the tensor without gaps, or memory would be
    /// touched that isn't its.
    fn plan(&self, declaration: Declaration, assignment: &Assignment) -> Result<Plan, Error> {
        let bytes = declaration.shape.count().saturating_mul(declaration.dtype.size() as u64);
        let broken = |what: &'static str| {
            Error::from(Refusal::Plan { tensor: declaration.name.clone(), what })
        };
        let among = self.among(&declaration);
        // Whether a sum of this rank's group is the result.
        let sums_all = match &among {
            _ if declaration.store.is_some() => false,
            Some(among) => among.lanes.len() + 1 == among.count as usize,
            None => !self.lanes.ranks.is_empty(),
        };
        let mut parts = Vec::with_capacity(assignment.parts.len());
        let mut end = 0;
        for part in &assignment.parts {
            if part.offset != end {
                return Err(broken("has a gap"));
            }
            let is_whole = part.bytes.is_multiple_of(word(declaration.dtype.size()));
            if !is_whole || !(1..=PART_BYTES_MAX).contains(&(part.bytes as usize)) {
                return Err(broken("has a part of a size that no part has"));
            }
            let elements = part.bytes as usize / declaration.dtype.size();
            let room = declaration.encoding.map(|how| how.room(elements));
            if room.is_some_and(|room| room > PART_BYTES_MAX) {
                return Err(broken("has a part that is too large once it is encoded"));
            }
            end += u64::from(part.bytes);
            let core = part.core.map(|core| self.lanes.cores.get(&core).copied());
            if core == Some(None) {
                return Err(broken("names a core without a lane"));
            }
            let is_apart = declaration.store.is_some_and(Store::is_apart);
            let is_own = part.owner.0 == self.roster.index;
            let owner = self.lanes.ranks.get(&part.owner).copied();
            let is_of_set = declaration.members.contains(part.owner);
            let is_others = !is_own && (owner.is_none() || is_apart);
            if is_others || !is_of_set {
                return Err(broken("names an owner that is not of this rank's group"));
            }
            let receiver = declaration.receiver.filter(|receiver| {
                receiver.0 == self.roster.index || self.lanes.ranks.contains_key(receiver)
            });
            if receiver.is_some_and(|receiver| receiver != part.owner) {
                return Err(broken("names another owner than the rank that receives it"));
            }
            if core.is_none() && !sums_all {
                return Err(broken("names nobody who sums it"));
            }
            parts.push(PlanPart {
                key: part.key,
                offset: usize::try_from(part.offset).map_err(|_| broken("is too large"))?,
                bytes: part.bytes as usize,
                core: core.flatten(),
                owner: owner.filter(|_| !is_own),
                owner_rank: part.owner,
                holder: self.switches.holder(part.owner, Rank(self.roster.index)),
            });
        }
        if end != bytes {
            return Err(broken("does not have the tensor's size"));
        }
        Ok(Plan {
            name: declaration.name.into(),
            dtype: declaration.dtype,
            operation: declaration.operation,
            device: declaration.device,
            among: among.map(Arc::new),
            receiver: declaration.receiver,
            encoding: declaration.encoding,
            store: declaration.store,
            parts: parts.into_boxed_slice(),
        })
    }

    /// Who pushes a tensor with this rank, if not all do. What is apart is summed in no group.
    fn among(&self, declaration: &Declaration) -> Option<Among> {
        let (members, lanes) = (&declaration.members, Box::default());
        if declaration.store.is_some_and(Store::is_apart) {
            return Some(Among { count: members.count(self.roster.size), lanes });
        }
        if members.is_all() {
            return None;
        }
        let lane = |rank: &Rank| self.lanes.ranks.get(rank).copied();
        let lanes = members.listed().iter().filter_map(lane).collect();
        Some(Among { count: members.count(self.roster.size), lanes })
    }

    /// The job tries other settings.
    fn tune(&self, order: TuneOrder, effects: &mut Vec<Effect>) {
        match order {
            TuneOrder::Apply { trial, credit_bytes, rounds } => {
                let credit_bytes = usize::try_from(credit_bytes).unwrap_or(usize::MAX);
                effects.push(Effect::Nic(Command::Tune { trial, credit_bytes, rounds }));
            }
            TuneOrder::Recut { trial, tensors } => {
                let known = |recut: &Recut| self.planned.contains(&recut.assignment.tensor);
                let plan = |recut: Recut| {
                    let plan = self.plan(recut.said, &recut.assignment);
                    plan.map(|plan| (recut.assignment.tensor, Arc::new(plan)))
                };
                let plans: Result<_, Error> = tensors.into_iter().filter(known).map(plan).collect();
                let plans = plans.unwrap_or_else(|error| {
                    // What this rank does not hold keeps its parts everywhere.
                    effects.push(Effect::Warn(format!("tensors keep their parts: {error}")));
                    Vec::new()
                });
                effects.push(Effect::Nic(Command::Recut { trial, plans }));
            }
        }
    }

    fn mismatch(&mut self, mismatch: Mismatch, effects: &mut Vec<Effect>) {
        self.memory.hinder("ranks disagree about a tensor");
        let name = mismatch.first_said.name.clone();
        let agreed: Vec<(u32, u64)> =
            mismatch.agreed.iter().map(|one| (one.tensor, one.rounds)).collect();
        let error = Error::Mismatch(Arc::new(mismatch));
        self.poisoned.insert(name.clone(), (error.clone(), agreed.clone()));
        effects.push(Effect::Nic(Command::Poison { name: name.to_string(), agreed, error }));
    }

    /// A report of the NIC loop. The scheduler knows best what became of a server, so a lost lane
    /// is only noted here: see [`give_up`](Self::give_up).
    pub fn handle_report(&mut self, report: Report, effects: &mut Vec<Effect>) {
        match report {
            Report::Lost { .. } if self.over => {}
            Report::Lost { peer: LanePeer::Server(server), .. }
                if self.lost_servers.contains(&server) => {}
            Report::Held { lost, keys } => {
                self.memory.hold(&keys);
                let report = MovingReport::Held { lost, keys };
                effects.push(Effect::Send(NodeMessage::Moving(report)));
            }
            Report::Lost { peer, cause, round } => {
                let death = Death::LaneLost { peer: self.origin(peer), cause, at: round };
                self.lost.get_or_insert(death);
                let to = match peer {
                    LanePeer::Server(index) => End::Server(index),
                    LanePeer::Rank(rank) => End::Rank(rank),
                };
                let fault = lane_fault(cause);
                let said = NodeMessage::LaneLost { to, fault };
                self.memory.lose_lane(&said);
                effects.push(Effect::Send(said));
            }
            Report::Corrupt { peer, misfit } => {
                let death = Death::Nonsense { peer: self.origin(peer), misfit };
                effects.push(Effect::Send(NodeMessage::failed(death.to_string())));
                self.end(peer_died(death), effects);
            }
            Report::Altered { peer, sent, tensor, key, round } => {
                let own = Origin { party: Party::Rank(Rank(self.roster.index)), place: None };
                let (own, other) = (own, self.origin(peer));
                let (from, to) = if sent { (own, other) } else { (other, own) };
                let in_round = tensor.clone().map(|tensor| RoundOf { tensor, round });
                let corruption = Corruption::Payload { from, to, tensor, key, round };
                let message = corruption.to_string();
                effects.push(Effect::Send(NodeMessage::Failed { message, round: in_round }));
                self.end(corruption.into(), effects);
            }
            Report::Disagree(disagreement) => {
                let (message, round) = (disagreement.to_string(), Some(disagreement.at.clone()));
                effects.push(Effect::Send(NodeMessage::Failed { message, round }));
                self.end(Error::Disagree(disagreement), effects);
            }
            Report::Failed { source } => {
                effects.push(Effect::Send(NodeMessage::failed(source.to_string())));
                self.end(Refusal::Own(source).into(), effects);
            }
            Report::Tune(report) => effects.push(Effect::Send(NodeMessage::Tune(report))),
            Report::Awaiting { keys } => {
                effects.push(Effect::Send(NodeMessage::Awaiting { keys }));
            }
            Report::Stalled { mut keys } => {
                let mut late = LateCollector::default();
                for key in &keys {
                    key.missing.iter().for_each(|rank| late.add(*rank, key.key));
                }
                let late = late.finish(keys.len() >= STALLS_MAX);
                keys.truncate(STALLS_SHOWN_MAX);
                effects.push(Effect::Send(NodeMessage::Stalled { keys, late }));
            }
        }
    }

    /// Whether a lane was lost and nobody has said why yet.
    #[must_use]
    pub fn has_lost(&self) -> bool {
        self.lost.is_some() && !self.over
    }

    /// The scheduler has not said in time why a lane was lost: the job is over all the same.
    pub fn give_up(&mut self, effects: &mut Vec<Effect>) {
        if let Some(death) = self.lost.take() {
            effects.push(Effect::Send(NodeMessage::failed(death.to_string())));
            self.end(peer_died(death), effects);
        }
    }

    /// What came over the connection to the scheduler is not what it sent.
    pub fn control_altered(&mut self, how: Source, effects: &mut Vec<Effect>) {
        self.end(Corruption::Control(how).into(), effects);
    }

    /// The connection to the scheduler is lost: what was seen.
    pub fn scheduler_lost(&mut self, source: Source, now: Duration, effects: &mut Vec<Effect>) {
        let scheduler = self.scheduler().to_owned();
        let death = Death::SchedulerLost { scheduler, source };
        if self.wait_out(&death.to_string(), Duration::ZERO, now, effects) {
            return;
        }
        self.end(peer_died(death), effects);
    }

    fn end(&mut self, error: Error, effects: &mut Vec<Effect>) {
        if self.over {
            return;
        }
        self.over = true;
        for request in self.declares.drain().map(|(request, _)| request) {
            effects.push(Effect::Declared { request, result: Err(error.clone()) });
        }
        effects.push(Effect::Over(error));
    }

    fn origin(&self, peer: LanePeer) -> Origin {
        match peer {
            LanePeer::Server(index) => {
                let peer = self.roster.servers.get(index as usize);
                let place = peer.map(|peer| Place { host: peer.host.clone(), pid: peer.pid });
                Origin { party: Party::Server(index), place }
            }
            LanePeer::Rank(rank) => {
                let peer = self.roster.neighbours.iter().find(|peer| peer.rank == rank);
                let place = peer.map(|peer| Place { host: peer.host.clone(), pid: peer.pid });
                Origin { party: Party::Rank(rank), place }
            }
        }
    }
}

fn peer_died(death: Death) -> Error {
    PeerDied::from(death).into()
}

/// What a worker's caller is told when the job is over.
pub(crate) fn over_error(reason: OverReason) -> Error {
    match reason.cause() {
        OverReason::Finished => Closed::Finished.into(),
        OverReason::Died { .. }
        | OverReason::Failed { .. }
        | OverReason::Left { .. }
        | OverReason::PathLost(_)
        | OverReason::UnknownEpoch { .. }
        | OverReason::Removed { .. } => peer_died(Death::Verdict(Arc::new(reason))),
        OverReason::Stalled { .. }
        | OverReason::Abandoned { .. }
        | OverReason::PathStalled { .. } => Error::Stalled(Arc::new(reason)),
        OverReason::NotFormed { .. } => StartError::NotFormed(Arc::new(reason)).into(),
        OverReason::Reforming { .. } | OverReason::TooFew { .. } => {
            unreachable!("they have a cause, which is neither")
        }
    }
}
