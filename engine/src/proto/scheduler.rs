//! The scheduler as a state machine: connections, messages and the time go in, messages come out.
//!
//! The scheduler program feeds it from sockets; tests and the simulation feed it directly.
//! Invariant: every `Declare` and `Barrier` of a node that stays is answered once; every node that
//! is connected when the job ends is told why, once; nothing is waited for without a deadline.

mod changes;
mod elastic;
mod eras;
mod groups;
mod late;
mod leaving;
mod lives;
mod moving;
mod outputs;
mod paths;
mod registry;
mod regroup;
mod rendezvous;
mod replies;
mod shrink;
mod stay;
mod takeover;
mod tuner;
mod uneven;
mod view;
mod waits;

#[cfg(test)]
mod tests;

use super::messages::{
    Neighbour, NodeMessage, Origin, OverReason, Register, Roster, SchedulerMessage, Statistics,
};
use super::tuning::Point;
use super::unformed::Unformed;
use super::unserved::Unserved;
use crate::base::{Epoch, Placement, Rank, word};
pub use changes::{Change, Changes};
pub use elastic::Elastic;
use elastic::History;
use late::LateRanks;
use moving::Moving;
pub use outputs::{Exit, Output};
use outputs::{Queued, Refusal};
use paths::Paths;
use registry::Registry;
use rendezvous::{Job, Rendezvous, name, origin};
use replies::kind;
use shrink::Falling;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use takeover::Takeover;
use tuner::Tuner;
pub use tuner::TuningView;
use uneven::Uneven;
pub use view::{JobView, NodeRole, NodeView};
use waits::{Barriers, Reminder, Reporter, Stalls};

/// A connection, numbered by whoever feeds the machine; never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u64);

/// What the scheduler was told about the job.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// What tells this job from all others.
    pub job: String,
    /// Worker hosts.
    pub num_workers: u32,
    /// Server processes.
    pub num_servers: u32,
    /// Ranks that a job may have.
    pub ranks_max: u32,
    /// The release that all nodes must run.
    pub release: String,
    /// Whether TCP lanes are encrypted, at all nodes or none.
    pub encrypt: bool,
    /// Placement function: anything but the default overrules what the workers say.
    pub placement: Placement,
    /// Factor of the `built_in` placement, with it.
    pub built_in_coefficient: u64,
    /// How long the nodes may take to come.
    pub start_timeout: Duration,
    /// Silence after which a node counts as dead.
    pub heartbeat_timeout: Duration,
    /// A barrier open for longer than this is reported.
    pub stall_report: Duration,
    /// A round or barrier open for longer than this ends the job.
    pub stall_timeout: Duration,
    /// Whether ranks that have all shut down may come back.
    pub stays: bool,
    /// How the job goes on when members die; none if it ends with them.
    pub elastic: Option<Elastic>,
}

/// What a connection is to the job.
enum Standing {
    /// It has not said who it is.
    New,
    /// It came back before the others have suspended.
    Early(Box<Register>),
    /// A rank, before and after the roster.
    Worker(Rank),
    /// A server; its index is its place in the job.
    Server,
    /// A worker that left in good order.
    Left(Rank),
    /// A rank of an epoch that is over: it was told, and may come back by another connection.
    Former(Rank),
    /// A further connection of this member: it lives as long as something comes on either.
    Aside(NodeId),
}

struct NodeState {
    standing: Standing,
    /// Host, pid, name and sessions, now and in an earlier epoch; known from `Register`.
    host: String,
    pid: u32,
    who: String,
    session: Option<u64>,
    former: Option<u64>,
    connected: Duration,
    heard: Duration,
    rounds: u64,
    /// A rank that has all its lanes: it speaks of more than that it lives.
    has_lanes: bool,
    /// Since when it waits for the answer of another scheduler.
    asks: Option<Duration>,
    /// A server that asks to be let go.
    leaves: bool,
    statistics: Option<Box<Statistics>>,
}

/// Where the job stands.
enum Phase {
    Forming(Box<Rendezvous>),
    /// Members of a job whose scheduler is lost are coming.
    Taking(Box<Takeover>),
    Running(Box<Running>),
    Over,
}

struct Running {
    job: Job,
    registry: Registry,
    barriers: Barriers,
    stalls: Stalls,
    late: LateRanks,
    paths: Paths,
    uneven: Uneven,
    /// If the job tunes itself.
    tuner: Option<Tuner>,
    left: BTreeSet<Rank>,
    /// Those of them that died, and that the epoch goes on without, in order.
    gone: Vec<Rank>,
    /// Hosts of which some ranks are dead, and perhaps all.
    falling: Vec<Falling>,
    /// Servers that died, likewise.
    moving: Moving,
    /// Ranks that record a timeline: the servers do while any of them does.
    tracing: BTreeSet<Rank>,
    suspended: bool,
    /// Ranks of an elastic job that have suspended, and when: they come back.
    away: BTreeMap<Rank, Duration>,
}

/// The machine. See the [module](self).
pub struct Scheduler {
    config: SchedulerConfig,
    /// Which scheduler of its job this one is.
    term: u32,
    epoch: Epoch,
    phase: Phase,
    peers: BTreeMap<NodeId, NodeState>,
    outputs: VecDeque<Queued>,
    /// When nodes are told for whom they wait.
    reminder: Reminder,
    ticked: Duration,
    /// The time of the last event.
    clock: Duration,
    history: History,
    /// Install requests are numbered through all epochs.
    next_install: u64,
    /// Why the job was not formed, for nodes that come after its end.
    refusal: Option<Refusal>,
}

impl Scheduler {
    /// A scheduler to which nobody has come yet.
    #[must_use]
    pub fn new(config: SchedulerConfig, now: Duration) -> Scheduler {
        let rendezvous = Rendezvous::new(&config, now);
        Scheduler {
            config,
            term: 1,
            epoch: Epoch(1),
            phase: Phase::Forming(Box::new(rendezvous)),
            peers: BTreeMap::new(),
            outputs: VecDeque::new(),
            reminder: Reminder::new(now),
            ticked: now,
            clock: now,
            history: History::default(),
            next_install: 0,
            refusal: None,
        }
    }

    /// The next thing to do.
    pub fn poll_output(&mut self) -> Option<Output> {
        Some(match self.outputs.pop_front()? {
            Queued::Ready(output) => output,
            Queued::Roster(node, index, neighbours, roster) => {
                let roster = Roster { index, neighbours, ..(*roster).clone() };
                Output::Send(node, SchedulerMessage::Roster(roster))
            }
        })
    }

    /// Whether `Done` was said.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over)
    }

    /// Whether nodes that come after the end are told of it.
    #[must_use]
    pub fn refuses(&self) -> bool {
        self.refusal.is_some()
    }

    /// Whether as many nodes as the job has know why it was not formed.
    #[must_use]
    pub fn has_told_everybody(&self) -> bool {
        let told_all = |refusal: &Refusal| refusal.nodes.is_some_and(|all| refusal.told >= all);
        self.refusal.as_ref().is_some_and(told_all)
    }

    /// An authenticated connection is there.
    pub fn handle_connected(&mut self, node: NodeId, now: Duration) {
        if self.is_over() && self.refusal.is_none() {
            return;
        }
        self.peers.insert(node, NodeState::connected(now));
    }

    /// A message came in.
    pub fn handle_message(&mut self, node: NodeId, message: NodeMessage, now: Duration) {
        self.clock = now;
        self.forgive(now);
        let Some(peer) = self.peers.get_mut(&node) else { return };
        if lives::is_sign_of_life(&message) {
            peer.heard = now;
        }
        match (&peer.standing, message) {
            // What comes behind a good-bye is late, and no longer of interest.
            (Standing::Left(_), _) => {}
            (Standing::Former(rank), message) => {
                let rank = *rank;
                self.former_says(node, rank, &message);
            }
            (Standing::New, NodeMessage::Register(register)) => self.register(node, register, now),
            (Standing::New, NodeMessage::Resume(resume)) => self.resume(node, *resume, now),
            (Standing::Worker(_) | Standing::Server, NodeMessage::Deposed { term })
                if term > self.term =>
            {
                self.step_down(term);
            }
            (_, NodeMessage::Deposed { .. }) => {}
            (Standing::Worker(_) | Standing::Server, message)
                if matches!(self.phase, Phase::Taking(_)) =>
            {
                self.hear_member(node, message);
            }
            (Standing::New | Standing::Early(_), NodeMessage::Leave { .. }) => {
                self.peers.remove(&node);
                self.put(Output::Close(node));
            }
            (Standing::New | Standing::Aside(_), NodeMessage::Alive { session }) => {
                self.alive(node, session, now);
            }
            (_, NodeMessage::Failed { message, round }) => self.failed(node, message, round),
            (Standing::New, _) => self.drop_stranger(node, "it did not say who it is first"),
            (Standing::Aside(_), _) => self.drop_stranger(node, "it only says that it lives"),
            (_, NodeMessage::Heartbeat { rounds }) => {
                peer.rounds = rounds;
                self.send(node, SchedulerMessage::Heartbeat);
            }
            (_, NodeMessage::Statistics(statistics)) => {
                peer.statistics = Some(Box::new(view::bounded(statistics)));
                peer.has_lanes = true;
            }
            (_, NodeMessage::Asks { another }) => self.asks(node, another, now),
            (Standing::Early(_), _) => self.drop_stranger(node, "it spoke before it had a roster"),
            (_, NodeMessage::Moving(said)) => self.moving_says(node, said),
            (Standing::Worker(rank), message) => {
                let rank = *rank;
                peer.has_lanes = true;
                self.handle_worker(node, rank, message, now);
            }
            (Standing::Server, message) => self.handle_server(node, message, now),
        }
    }

    /// A connection is gone; `how` completes the line "rank 3 died: …".
    pub fn handle_closed(&mut self, node: NodeId, how: &str, now: Duration) {
        self.clock = now;
        self.forgive(now);
        match self.peers.get(&node).map(|peer| &peer.standing) {
            None => {}
            Some(Standing::Worker(_) | Standing::Server) => self.gone(node, how),
            Some(&Standing::Former(rank)) => {
                self.peers.remove(&node);
                self.former_closed(rank);
            }
            Some(Standing::Early(_)) => {
                self.peers.remove(&node);
                self.tell_newcomers();
            }
            Some(Standing::New | Standing::Left(_) | Standing::Aside(_)) => {
                self.peers.remove(&node);
            }
        }
    }

    /// The scheduler itself is told to stop.
    pub fn handle_stop(&mut self, message: &str) {
        if self.is_between_generations() {
            return self.end(OverReason::Finished, None);
        }
        let (who, message) = (Origin::scheduler(), message.to_owned());
        self.end_job(OverReason::Failed { who, message, round: None }, None);
    }

    /// Time passes. To be called a few times a second, after what had come in by `now` was handled.
    pub fn handle_tick(&mut self, now: Duration) {
        if self.is_over() {
            return;
        }
        self.clock = now;
        self.forgive(now);
        self.check_silence(now);
        self.check_falling(now);
        self.check_forming(now);
        self.check_takeover(now);
        self.check_regroup(now);
        self.check_early(now);
        self.check_installs(now);
        self.check_moves(now);
        self.check_leaving(now);
        self.check_paths(now);
        self.check_uneven(now);
        self.check_tuner(now);
        self.check_stalls(now);
    }

    fn put(&mut self, output: Output) {
        self.outputs.push_back(Queued::Ready(output));
    }

    fn send(&mut self, node: NodeId, message: SchedulerMessage) {
        self.put(Output::Send(node, message));
    }

    fn register(&mut self, node: NodeId, register: Register, now: Duration) {
        let Some(peer) = self.peers.get_mut(&node) else { return };
        (peer.host, peer.pid, peer.who) = (register.host.clone(), register.pid, name(&register));
        (peer.session, peer.former) = (Some(register.session), register.former);
        self.replace_earlier(node, &register);
        let is_done = self.comes_twice(node, &register) || self.comes_aside(node, &register);
        let Some(peer) = self.peers.get_mut(&node).filter(|_| !is_done) else { return };
        match &mut self.phase {
            Phase::Over => {
                if let Some(refusal) = &mut self.refusal {
                    refusal.told += 1;
                    let reason = refusal.reason.clone();
                    self.dismiss(node, reason);
                }
            }
            // Those of the job that are here do not know one that comes back by its old session.
            Phase::Taking(_) => {
                peer.standing = Standing::Early(Box::new(Register { former: None, ..register }));
            }
            Phase::Running(_) if self.config.elastic.is_some() => self.knocked(node, register, now),
            Phase::Running(running)
                if running.suspended || self.config.stays && !running.left.is_empty() =>
            {
                peer.standing = Standing::Early(Box::new(register));
                if self.early().len() == 1 {
                    self.reminder = Reminder::new(now);
                }
            }
            Phase::Running(running) => {
                let (ranks, servers) = (running.job.size(), word(running.job.servers.len()));
                let cause = Unformed::Late { who: origin(&register), ranks, servers };
                self.put(Output::Log(cause.to_string()));
                self.send_away(node, cause);
            }
            Phase::Forming(rendezvous) if rendezvous.regroup.is_some() => {
                self.rejoin(node, register, now);
            }
            Phase::Forming(rendezvous) => match rendezvous.admit(node, &register, now) {
                Ok(admitted) => {
                    peer.standing = match admitted.rank {
                        Some(rank) => Standing::Worker(rank),
                        None => Standing::Server,
                    };
                    for server in admitted.surplus {
                        self.peers.remove(&server);
                        self.send(server, SchedulerMessage::Over { reason: OverReason::Finished });
                        self.put(Output::Close(server));
                    }
                    self.form_if_complete(now);
                }
                Err(cause) => self.end(OverReason::NotFormed { cause: *cause }, None),
            },
        }
    }

    fn form_if_complete(&mut self, now: Duration) {
        let Phase::Forming(rendezvous) = &mut self.phase else { return };
        if !rendezvous.is_complete() {
            return;
        }
        let Phase::Forming(mut rendezvous) = std::mem::replace(&mut self.phase, Phase::Over) else {
            return;
        };
        let waited = now.saturating_sub(rendezvous.since);
        let regroup = rendezvous.regroup.take();
        let mut job = rendezvous.form();
        if self.config.placement != Placement::Balanced {
            job.planning.placement = self.config.placement;
            job.planning.built_in_coefficient = self.config.built_in_coefficient;
        }
        let cores: u32 = job.shapes.iter().map(|shape| shape.cores).sum();
        self.put(Output::Log(format!(
            "all there after {:.1} s: {}, {} with {}, epoch {}",
            waited.as_secs_f64(),
            counted(job.size() as usize, "rank"),
            counted(job.servers.len(), "server"),
            counted(cores as usize, "core"),
            self.epoch.0
        )));
        let change = self.renumber(&job, regroup, waited);
        for (nodes, names_ranks) in [(&job.workers, false), (&job.servers, true)] {
            let roster = job.roster(&self.config.job, self.epoch, names_ranks);
            let (elastic, change) = (self.config.elastic.is_some(), change.clone());
            let shrinks = self.config.elastic.as_ref().is_some_and(|elastic| elastic.shrinks);
            let roster = Arc::new(Roster { term: self.term, elastic, shrinks, change, ..roster });
            for (index, (node, _)) in (0..).zip(nodes) {
                let neighbours = if names_ranks { Vec::new() } else { job.neighbours(Rank(index)) };
                let roster = Arc::clone(&roster);
                self.outputs.push_back(Queued::Roster(*node, index, neighbours, roster));
            }
        }
        if !job.through_servers() {
            self.put(Output::Log("all ranks are on one host: sums do not pass servers".into()));
        }
        self.phase = Phase::Running(Box::new(self.run(job)));
        self.tell_who_waits(now);
    }

    /// The epoch of this job, in which nothing has happened yet.
    fn run(&self, mut job: Job) -> Running {
        let through_servers = job.through_servers();
        let groups = std::mem::take(&mut job.groups);
        let (planning, next) = (&job.planning, self.next_install);
        let tuner = Tuner::new(planning, job.shapes.iter().map(|shape| shape.cores).sum());
        let shrinks = self.config.elastic.as_ref().is_some_and(|elastic| elastic.shrinks);
        let how = (through_servers, shrinks);
        let registry = Registry::new(groups, how, planning, &job.shapes, next);
        Running {
            barriers: Barriers::new(job.size()),
            registry,
            job,
            stalls: Stalls::default(),
            late: LateRanks::default(),
            paths: Paths::default(),
            uneven: Uneven::default(),
            tuner,
            left: BTreeSet::new(),
            gone: Vec::new(),
            falling: Vec::new(),
            moving: Moving::default(),
            tracing: BTreeSet::new(),
            suspended: false,
            away: BTreeMap::new(),
        }
    }

    fn handle_worker(&mut self, node: NodeId, rank: Rank, message: NodeMessage, now: Duration) {
        match (&mut self.phase, message) {
            (Phase::Forming(_), NodeMessage::Leave { .. }) => {
                self.vacate(node, "it left", true);
            }
            (Phase::Running(_), NodeMessage::Leave { suspend }) => {
                self.worker_left(node, rank, suspend, now);
            }
            (Phase::Running(running), NodeMessage::Declare { request, tensors }) => {
                let said = tensors.into_iter().map(|said| (said, None)).collect();
                let replies = running.registry.declare(rank, request, said, now);
                self.reply(replies);
            }
            (Phase::Running(running), NodeMessage::Redeclare { request, tensors }) => {
                let said = tensors.into_iter().map(|one| (one.said, Some(one.rounds))).collect();
                let replies = running.registry.declare(rank, request, said, now);
                self.reply(replies);
            }
            (Phase::Running(running), NodeMessage::Overrun { tensor }) => {
                let reply = running.registry.overrun(rank, tensor);
                self.reply(reply.into_iter().collect());
            }
            (
                Phase::Forming(_),
                NodeMessage::Declare { request, .. } | NodeMessage::Redeclare { request, .. },
            ) => {
                let cause = Unserved::Early;
                self.send(node, SchedulerMessage::Refused { request, cause });
            }
            (Phase::Running(running), NodeMessage::Stalled { keys, late }) => {
                running.stalls.report(Reporter::Owner(rank), keys, late, now);
                self.check_stalls(now);
            }
            (_, NodeMessage::LaneLost { to, fault }) => self.lane_lost(node, to, fault, now),
            (_, NodeMessage::Awaiting { keys }) => self.awaits(rank, keys, now),
            (Phase::Running(running), NodeMessage::Barrier { request }) => {
                match running.barriers.arrive(rank, request, now) {
                    Some(done) => self.pass(done),
                    None => self.broke_protocol(node, "too many barriers at once"),
                }
            }
            (_, NodeMessage::Uneven(report)) => self.uneven(node, rank, report, now),
            (_, NodeMessage::Tune(report)) => self.tune(node, rank, report, now),
            (Phase::Running(_), NodeMessage::Timeline { timeline }) => {
                self.timeline(rank, timeline);
            }
            (_, other) => self.broke_protocol(node, kind(&other)),
        }
    }

    /// Barriers of these ranks are passed.
    pub(super) fn pass(&mut self, done: Vec<(Rank, u64)>) {
        for (rank, request) in done {
            let Phase::Running(running) = &self.phase else { return };
            let node = running.job.workers[rank.0 as usize].0;
            self.send(node, SchedulerMessage::BarrierDone { request });
        }
    }

    fn handle_server(&mut self, node: NodeId, message: NodeMessage, now: Duration) {
        match (&mut self.phase, message) {
            (_, NodeMessage::Leave { .. }) if self.config.elastic.is_some() => {
                self.server_leaves(node);
            }
            (Phase::Forming(_), NodeMessage::Leave { .. }) => self.vacate(node, "it left", true),
            (_, NodeMessage::Leave { .. }) => {
                let message = "it left while the job went on".to_owned();
                self.failed(node, message, None);
            }
            (Phase::Running(running), NodeMessage::Installed { request }) => {
                let Some(server) = running.server(node) else { return };
                let replies = running.registry.installed(server, request);
                self.reply(replies);
                self.adopted(server, request);
                self.hold(now);
            }
            (Phase::Running(running), NodeMessage::Stalled { keys, late }) => {
                if let Some(server) = running.server(node) {
                    running.stalls.report(Reporter::Server(server), keys, late, now);
                    self.check_stalls(now);
                }
            }
            (_, NodeMessage::LaneLost { to, fault }) => self.lane_lost(node, to, fault, now),
            (_, NodeMessage::KeyStates { keys }) => self.key_states(keys, now),
            (_, NodeMessage::ResetDone { epoch }) => self.reset_done(node, epoch, now),
            // Answers and reports of the epoch before, that were on their way.
            (Phase::Forming(_), NodeMessage::Installed { .. } | NodeMessage::Stalled { .. }) => {}
            (_, other) => self.broke_protocol(node, kind(&other)),
        }
    }
}

impl Running {
    /// The index of a server.
    fn server(&self, node: NodeId) -> Option<u32> {
        let at = self.job.servers.iter().position(|(server, _)| *server == node)?;
        u32::try_from(at).ok()
    }
}

/// `1 rank`, `2 ranks`.
fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
