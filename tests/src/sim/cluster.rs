//! The nodes of a simulated job and the messages between them.

mod again;
mod between;
mod ends;
mod faults;
mod forming;
mod schedulers;
mod time;
mod worker;

use self::again::Coming;
use self::ends::Ends;
use self::schedulers::{LOOK, Member, Process, State, Way};
use super::gpu::{self, Machine, SimGpu, Spot};
use super::shape::{Shape, auto_of};
use bps_engine::base::{CoreId, Rank, word};
use bps_engine::lane::Endpoint;
use bps_engine::limits::RANKS_MAX;
use bps_engine::mem::{Arena, Options};
use bps_engine::proto::messages::{
    Declaration, Node, NodeMessage, OverReason, Register, Roster, SchedulerMessage,
};
use bps_engine::proto::pulse::Pulse;
use bps_engine::proto::scheduler::{Elastic, NodeId, Scheduler, SchedulerConfig};
use bps_engine::ring::Mpsc;
use bps_engine::trace::counters::Counters;
use bps_engine::transport::sim::{Random, Sim, SimNetwork};
use bps_engine::transport::{Link, Transport, Waker};
use bps_server::agent as server_agent;
use bps_server::shard::{Command as ShardCommand, Report as ShardReport, Shard};
use bps_worker::Error;
use bps_worker::error::StartError;
use bps_worker::host::switches::Switches;
use bps_worker::job::agent::{self as worker_agent, Lanes};
use bps_worker::job::nic_loop::{Command as NicCommand, NicLoop};
use bps_worker::nic::{LanePeer, NicConfig, NicStatistics, Report as NicReport};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// A message on its way between a node and the scheduler.
enum Letter {
    Up(NodeId, NodeMessage),
    Down(NodeId, SchedulerMessage),
    Gone(NodeId),
    /// A connection has ended, as its node sees.
    Closed(NodeId),
    /// A node has dialed.
    Dialed(Member, u64),
    /// A node that is of no epoch now has dialed.
    Came(Member, u64),
}

/// One rank.
pub struct SimWorker {
    way: Way,
    /// Where it is of no epoch, or of none yet, and did not begin with the job.
    coming: Option<Coming>,
    /// Nodes that wait to be let in.
    pub newcomers: u32,
    /// Its place in the job, once it has formed.
    pub roster: Option<Roster>,
    agent: Option<worker_agent::Agent>,
    nic: Option<NicLoop>,
    /// Its GPU, if ranks have one.
    pub(super) gpu: Option<SimGpu>,
    commands: Mpsc<NicCommand>,
    /// What callers have to say when that queue is full.
    backlog: VecDeque<NicCommand>,
    reports: Mpsc<NicReport>,
    /// Answered declares.
    pub declared: HashMap<u64, Result<Vec<u32>, Error>>,
    /// Passed barriers.
    pub barriers: Vec<u64>,
    /// Ranks that it was told have died, and that its job goes on without.
    pub gone: Vec<Rank>,
    /// Why its job is over.
    pub over: Option<Error>,
    lost_at: Option<Duration>,
    alive: bool,
    /// When it began to leave, until it has said so.
    leaving: Option<Duration>,
    left: bool,
    /// Those to servers, then those to ranks of its host.
    connections: Vec<usize>,
    server_connections: usize,
    /// Those between its GPU's thread and others of its host.
    order_connections: Vec<usize>,
}

struct SimServer {
    way: Way,
    coming: Option<Coming>,
    agent: server_agent::Agent,
    shards: Vec<(Shard, Mpsc<ShardCommand>)>,
    reports: Mpsc<(u32, ShardReport)>,
    over: bool,
    /// The job goes on without it, as it was told to leave.
    left: bool,
}

/// See the [module](super).
pub struct Cluster {
    network: SimNetwork,
    random: Random,
    shape: Shape,
    config: SchedulerConfig,
    /// How long nodes go on without a scheduler.
    wait: Duration,
    /// Whether it goes on when an epoch is over.
    forms_again: bool,
    /// In the order in which they have started.
    schedulers: Vec<Process>,
    /// The ranks.
    pub workers: Vec<SimWorker>,
    servers: Vec<SimServer>,
    /// Of each core.
    counters: Vec<Arc<Counters>>,
    /// By time of arrival, then by order of sending.
    letters: BTreeMap<(Duration, u64), Letter>,
    sequence: u64,
    /// Ends of links between the NIC loops of two ranks.
    waiting_ends: Ends,
    /// Likewise of links between the pipelines of their GPUs.
    waiting_orders: Ends,
    /// When the last letter on each connection and direction arrives: letters keep their order.
    last_arrival: HashMap<(u64, bool), Duration>,
    next_tick: Duration,
    /// When whoever plays the seed does something, if nothing happens before.
    wakes_at: Option<Duration>,
    /// When nodes last looked around.
    looked: Duration,
    /// What the scheduler has said to people.
    pub log: Vec<String>,
    /// Why it has told somebody that an epoch or the job is over.
    pub verdicts: Vec<OverReason>,
    /// It has told somebody that an epoch has no server.
    pub has_led_without_servers: bool,
    /// The scheduler's verdict.
    pub done: bool,
}

/// How often nodes look around and send heartbeats.
const TICK: Duration = Duration::from_millis(500);
/// A round that waits longer is reported.
const STALL_REPORT: Duration = Duration::from_secs(3);
/// Commands that a NIC loop's queue takes.
const COMMANDS: usize = 64;

impl Cluster {
    /// A job whose nodes have just connected.
    #[must_use]
    pub fn new(seed: u64, shape: Shape) -> Cluster {
        Cluster::elastic(seed, shape, None)
    }

    /// The same, that goes on so when ranks die.
    #[must_use]
    pub fn elastic(seed: u64, shape: Shape, elastic: Option<Elastic>) -> Cluster {
        Cluster::outlasting(seed, shape, elastic, Duration::ZERO)
    }

    /// The same, that goes on for so long without a scheduler.
    #[must_use]
    pub fn outlasting(
        seed: u64,
        shape: Shape,
        elastic: Option<Elastic>,
        wait: Duration,
    ) -> Cluster {
        let network = SimNetwork::new(seed);
        let config = SchedulerConfig {
            job: "job".into(),
            num_workers: shape.num_workers(),
            num_servers: shape.servers,
            ranks_max: word(RANKS_MAX),
            release: "sim".into(),
            encrypt: false,
            start_timeout: Duration::from_secs(30),
            // As `bps-scheduler` has it: a heartbeat is missed from when it was due.
            heartbeat_timeout: Duration::from_secs(4) + TICK,
            stall_report: STALL_REPORT,
            stall_timeout: Duration::from_secs(60),
            stays: false,
            elastic,
            placement: shape.planning.placement,
            built_in_coefficient: shape.planning.built_in_coefficient,
        };
        gpu::install(shape.devices.then(|| Machine::new(seed, shape.workers as usize)));
        let mut cluster = Cluster {
            network,
            random: Random::new(seed ^ 0x5bd1_e995),
            schedulers: vec![Process::new(Scheduler::new(config.clone(), Duration::ZERO))],
            config,
            wait,
            forms_again: false,
            workers: Vec::new(),
            servers: Vec::new(),
            counters: Vec::new(),
            letters: BTreeMap::new(),
            sequence: 0,
            waiting_ends: Ends::default(),
            waiting_orders: Ends::default(),
            last_arrival: HashMap::new(),
            next_tick: Duration::ZERO,
            wakes_at: None,
            looked: Duration::ZERO,
            log: Vec::new(),
            verdicts: Vec::new(),
            has_led_without_servers: false,
            done: false,
            shape,
        };
        for index in 0..cluster.shape.servers {
            cluster.add_server(index);
            cluster.begin(Member::Server(index as usize));
        }
        for index in 0..cluster.shape.workers {
            cluster.add_worker(index);
            cluster.begin(Member::Worker(index as usize));
        }
        cluster
    }

    fn register(&self, id: NodeId, node: Node, host: String) -> Register {
        Register {
            node,
            host: host.clone(),
            host_id: host,
            pid: 1,
            instance: id.0 + 1,
            session: id.0 + 1,
            former: None,
            release: "sim".into(),
            encrypt: false,
            num_workers: self.shape.num_workers(),
            num_servers: self.shape.servers,
        }
    }

    fn pulse(&self) -> Pulse {
        Pulse::new("sim", TICK, Duration::from_secs(4), self.now())
    }

    fn add_server(&mut self, index: u32) {
        let node = NodeId(u64::from(index));
        let reports: Mpsc<(u32, ShardReport)> = Mpsc::new(4096);
        let cores: Vec<_> = (0..self.shape.cores).map(|_| Arc::new(Counters::default())).collect();
        let shards = (0..).zip(&cores).map(|(core, counters)| self.shard(core, &reports, counters));
        let shards = shards.collect();
        self.counters.extend(cores);
        let agent = server_agent::Agent::new(self.shape.cores, self.pulse()).outlasting(self.wait);
        let port = u16::try_from(index * 100 + 1).expect("few servers");
        let cores = (0..self.shape.cores)
            .map(|core| ([127, 0, 0, 1], port + u16::try_from(core).expect("few cores")).into());
        let cores = cores.collect();
        let role = Node::Server {
            cores,
            shm: None,
            rdma: false,
            colocated: false,
            preferred: Some(index),
        };
        let register = self.register(node, role, format!("server-host-{index}"));
        let way = Way::new(node, register);
        let coming = None;
        let (over, left) = (false, false);
        self.servers.push(SimServer { way, coming, agent, shards, reports, over, left });
    }

    fn shard(
        &self,
        core: u32,
        reports: &Mpsc<(u32, ShardReport)>,
        counters: &Arc<Counters>,
    ) -> (Shard, Mpsc<ShardCommand>) {
        let waker = Waker::new().expect("an eventfd");
        let commands = Mpsc::new(4096);
        let sim = Transport::Sim(Sim::new(self.network.clone()));
        let options = Options { name: "sim".into(), numa_node: None, shared: false };
        let shard = Shard::new(
            core,
            Endpoint::new(vec![sim], waker.clone()),
            Arena::reserve(64 << 20, &options).expect("address space"),
            commands.clone(),
            reports.clone(),
            waker,
            Arc::clone(counters),
            Duration::from_secs(3),
        );
        (shard, commands)
    }

    fn add_worker(&mut self, index: u32) {
        let node = NodeId(1000 + u64::from(index));
        let is_new = index >= self.shape.workers;
        let place = if is_new { (index, 0, 1) } else { self.shape.place_of(index) };
        let (worker_id, local_rank, local_size) = place;
        let role = Node::Worker {
            worker_id,
            local_rank,
            local_size,
            global_rank: None,
            local: None,
            planning: self.shape.planning.clone(),
            speaks: None,
        };
        let host = if is_new { index as usize } else { self.shape.host_of(index) };
        let mut register = self.register(node, role, format!("worker-host-{host}"));
        if is_new {
            register.num_workers = 0;
        }
        self.workers.push(SimWorker {
            way: Way::new(node, register),
            coming: None,
            newcomers: 0,
            roster: None,
            agent: None,
            nic: None,
            gpu: None,
            commands: Mpsc::new(COMMANDS),
            backlog: VecDeque::new(),
            reports: Mpsc::new(256),
            declared: HashMap::new(),
            barriers: Vec::new(),
            gone: Vec::new(),
            over: None,
            lost_at: None,
            alive: true,
            leaving: None,
            left: false,
            connections: Vec::new(),
            server_connections: 0,
            order_connections: Vec::new(),
        });
    }

    /// Sends a letter: it arrives after a random while, but not before earlier ones of its
    /// connection and direction.
    fn mail(&mut self, letter: Letter) {
        let key = match &letter {
            Letter::Up(node, _) | Letter::Gone(node) => (node.0, true),
            Letter::Down(node, _) | Letter::Closed(node) => (node.0, false),
            Letter::Dialed(_, attempt) | Letter::Came(_, attempt) => (u64::MAX - attempt, true),
        };
        // What else a seed does is not to depend on how often nodes say that they live.
        let is_beat = matches!(
            letter,
            Letter::Up(_, NodeMessage::Heartbeat { .. })
                | Letter::Down(_, SchedulerMessage::Heartbeat)
        );
        let more = if is_beat { 0 } else { self.random.below(2000) };
        let delay = Duration::from_micros(10 + more);
        let last = self.last_arrival.entry(key).or_default();
        *last = (*last).max(self.network.now() + delay);
        self.sequence += 1;
        self.letters.insert((*last, self.sequence), letter);
    }

    /// Lets everything happen that happens at this moment, then moves the time on.
    pub fn turn(&mut self) {
        let now = self.now();
        let mut progress = gpu::with(|machine| machine.advance(now)).unwrap_or(false);
        while let Some(entry) = self.letters.first_entry().filter(|entry| entry.key().0 <= now) {
            let letter = entry.remove();
            self.deliver(letter);
            progress = true;
        }
        self.schedulers_have_heard();
        if now >= self.next_tick || self.pause() < TICK && now >= self.looked + LOOK {
            self.looked = now;
            self.tick();
            self.next_tick = now + TICK;
        }
        self.scheduler_output();
        let nodes = self.workers.len() + self.servers.len();
        let first = self.random.index(nodes);
        for offset in 0..nodes {
            let node = (first + offset) % nodes;
            progress |= match node.checked_sub(self.workers.len()) {
                None => self.step_worker(node),
                Some(server) => self.step_server(server),
            };
        }
        if !progress {
            self.pass_time();
        }
    }

    fn deliver(&mut self, letter: Letter) {
        let now = self.now();
        match letter {
            Letter::Up(node, _) | Letter::Gone(node) => {
                let Some((index, letter)) = self.reach(node, letter) else { return };
                let machine = &mut self.schedulers[index].machine;
                match letter {
                    Letter::Up(_, message) => machine.handle_message(node, message, now),
                    _ => machine.handle_closed(node, "connection closed", now),
                }
            }
            Letter::Down(node, message) => self.hear(node, Some(message)),
            Letter::Closed(node) => self.hear(node, None),
            Letter::Dialed(member, attempt) => self.dialed(member, attempt),
            Letter::Came(member, attempt) => self.came(member, attempt),
        }
    }

    fn tick(&mut self) {
        let now = self.now();
        for one in self.schedulers.iter_mut().filter(|one| one.state == State::Lives) {
            one.machine.handle_tick(now);
        }
        self.look_for_answers();
        self.look_for_silence();
        for index in 0..self.workers.len() {
            let mut effects = Vec::new();
            let worker = &mut self.workers[index];
            match &mut worker.agent {
                _ if !worker.alive || worker.left => {}
                Some(agent) => agent.handle_tick(now, &mut effects),
                None if worker.coming.as_ref().is_some_and(|one| !one.is_there()) => {}
                None => effects.push(worker_agent::Effect::Beat),
            }
            self.worker_effects(index, effects);
            self.look_for_lost(index, now);
        }
        self.part(now);
        for index in 0..self.servers.len() {
            let server = &mut self.servers[index];
            if server.coming.as_ref().is_some_and(|one| !one.is_there()) {
                continue;
            }
            let mut effects = Vec::new();
            server.agent.handle_tick(now, &mut effects);
            self.server_effects(index, effects);
        }
    }

    fn worker_message(&mut self, index: usize, message: SchedulerMessage) {
        if !self.workers[index].alive {
            return;
        }
        if let SchedulerMessage::Roster(roster) = message {
            return self.form(index, roster);
        }
        let (now, mut effects) = (self.now(), Vec::new());
        match &mut self.workers[index].agent {
            Some(agent) => agent.handle(message, now, &mut effects),
            None => {
                if let SchedulerMessage::Over { reason } = message {
                    let reason = Arc::new(reason);
                    self.workers[index].over = Some(StartError::NotFormed(reason).into());
                }
            }
        }
        self.worker_effects(index, effects);
    }

    fn step_worker(&mut self, index: usize) -> bool {
        let worker = &mut self.workers[index];
        if !worker.alive {
            return false;
        }
        let now = self.network.now();
        let Some(nic) = &mut worker.nic else { return false };
        while let Some(command) = worker.backlog.pop_front() {
            if let Err(back) = worker.commands.push(command) {
                worker.backlog.push_front(back);
                break;
            }
        }
        let mut progress = nic.step(now);
        if let Some(gpu) = &mut worker.gpu {
            progress |= gpu.step(nic, now, &mut self.random);
        }
        let mut effects = Vec::new();
        while let Some(report) = worker.reports.pop() {
            progress = true;
            if let Some(agent) = &mut worker.agent {
                agent.handle_report(report, &mut effects);
            }
        }
        self.worker_effects(index, effects);
        progress
    }

    fn worker_effects(&mut self, index: usize, effects: Vec<worker_agent::Effect>) {
        for effect in effects {
            let worker = &mut self.workers[index];
            match effect {
                worker_agent::Effect::Nic(command) => worker.push(command),
                worker_agent::Effect::Send(message) => {
                    let node = worker.way.node;
                    self.mail(Letter::Up(node, message));
                }
                worker_agent::Effect::Declared { request, result } => {
                    worker.declared.insert(request, result);
                }
                worker_agent::Effect::BarrierDone { request } => worker.barriers.push(request),
                worker_agent::Effect::Gone(gone) => worker.gone = gone,
                worker_agent::Effect::Beat => {
                    let node = worker.way.node;
                    self.mail(Letter::Up(node, NodeMessage::Heartbeat { rounds: 0 }));
                }
                // No name is declared anew, and no letter lost: a second connection gains nothing.
                worker_agent::Effect::Limit { .. }
                | worker_agent::Effect::Knock(_)
                | worker_agent::Effect::Uneven(_)
                | worker_agent::Effect::Changed(_)
                | worker_agent::Effect::Warn(_) => {}
                worker_agent::Effect::Newcomers(count) => worker.newcomers = count,
                worker_agent::Effect::Redial(wants) => self.redial(Member::Worker(index), wants),
                worker_agent::Effect::Over(error) => {
                    worker.push(NicCommand::Fail { error: error.clone() });
                    worker.over = Some(error);
                }
            }
        }
    }

    fn step_server(&mut self, index: usize) -> bool {
        let now = self.now();
        let server = &mut self.servers[index];
        let mut progress = false;
        for (shard, _) in &mut server.shards {
            progress |= shard.step(now);
        }
        let mut effects = Vec::new();
        while let Some((core, report)) = server.reports.pop() {
            progress = true;
            server.agent.handle_report(core, report, &mut effects);
        }
        self.server_effects(index, effects);
        progress
    }

    fn server_effects(&mut self, index: usize, effects: Vec<server_agent::Effect>) {
        if self.servers[index].shards.is_empty() {
            // It is dead.
            return;
        }
        for effect in effects {
            let server = &mut self.servers[index];
            let node = server.way.node;
            match effect {
                server_agent::Effect::Shard(core, command) => {
                    let pushed = server.shards[core as usize].1.push(command);
                    assert!(pushed.is_ok(), "a shard's queue is full");
                }
                server_agent::Effect::Send(message) => self.mail(Letter::Up(node, message)),
                server_agent::Effect::Beat => {
                    self.mail(Letter::Up(node, NodeMessage::Heartbeat { rounds: 0 }));
                }
                server_agent::Effect::Knock(_)
                | server_agent::Effect::Info(_)
                | server_agent::Effect::Warn(_)
                | server_agent::Effect::Changed(_)
                | server_agent::Effect::Timeline(..) => {}
                server_agent::Effect::Redial(wants) => self.redial(Member::Server(index), wants),
                // What it does behind a good end is of no interest.
                server_agent::Effect::Over(false) if self.forms_again => {
                    server.over = true;
                    self.kill_server(index);
                    return;
                }
                server_agent::Effect::Over(true) if server.left => {
                    server.over = true;
                    self.kill_server(index);
                    return;
                }
                server_agent::Effect::Over(_) => server.over = true,
            }
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.workers.clear();
        gpu::install(None);
    }
}
