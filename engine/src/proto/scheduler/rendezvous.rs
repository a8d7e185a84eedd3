//! Who has come, who is still missing, and whether all were told the same about the job.
//!
//! Invariant: a rank, and a server's address, belongs to one node; when the rendezvous is complete,
//! every rank from 0 and every server of the job is there once.

use super::groups::Groups;
use super::regroup::Regroup;
use super::{NodeId, SchedulerConfig};
use crate::base::{Epoch, Rank, word};
use crate::keys::placement::Shape;
use crate::limits::{CORES_MAX, PART_BYTES_MAX, PART_BYTES_MIN, SERVERS_MAX};
use crate::proto::messages::{
    Neighbour, Node, Origin, Party, Peer, Place, Planning, Register, Roster, ServerPeer,
};
use crate::proto::paths::{End, Member};
use crate::proto::stall::MEMBERS_MAX;
use crate::proto::text::list;
use crate::proto::unformed::Unformed;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A rendezvous under way.
#[derive(Debug)]
pub(super) struct Rendezvous {
    pub(super) since: Duration,
    release: String,
    encrypt: bool,
    ranks_max: u32,
    num_workers: u32,
    num_servers: u32,
    /// Who said these numbers; `None` while they are to be taken from the first node that comes.
    said_by: Option<Origin>,
    /// It follows a suspended job: the numbers are those of whoever resumes.
    pub(super) is_again: bool,
    first: Option<FirstWorker>,
    pub(super) workers: BTreeMap<u32, (NodeId, Register)>,
    pub(super) servers: Vec<(NodeId, Register)>,
    /// It follows an epoch that members of an elastic job have survived.
    pub(super) regroup: Option<Box<Regroup>>,
}

/// What the first worker said, and all others must say.
#[derive(Debug)]
struct FirstWorker {
    who: Origin,
    local_size: u32,
    planning: Planning,
}

/// The members of a formed job.
#[derive(Debug)]
pub(super) struct Job {
    /// By rank.
    pub(super) workers: Vec<(NodeId, Register)>,
    /// By index in the roster.
    pub(super) servers: Vec<(NodeId, Register)>,
    pub(super) planning: Planning,
    pub(super) shapes: Vec<Shape>,
    pub(super) groups: Groups,
}

/// A node that fits.
#[derive(Debug)]
pub(super) struct Admitted {
    /// Of a worker.
    pub(super) rank: Option<Rank>,
    /// Servers that this job has too many of.
    pub(super) surplus: Vec<NodeId>,
}

impl Rendezvous {
    /// The first one, for the numbers that the scheduler was given.
    pub(super) fn new(config: &SchedulerConfig, now: Duration) -> Self {
        Rendezvous {
            since: now,
            release: config.release.clone(),
            encrypt: config.encrypt,
            ranks_max: config.ranks_max,
            num_workers: config.num_workers,
            num_servers: config.num_servers,
            said_by: Some(Origin::scheduler()),
            is_again: false,
            first: None,
            workers: BTreeMap::new(),
            servers: Vec::new(),
            regroup: None,
        }
    }

    /// A later one, after all workers of `job` suspended: its servers are kept, and the numbers
    /// come from whoever comes first.
    pub(super) fn again(job: Job, config: &SchedulerConfig, now: Duration) -> Self {
        let local_size = job.workers.first().map_or(1, |(_, register)| local_size(register));
        let ranks = word(job.workers.len());
        let num_servers = word(job.servers.len());
        Rendezvous {
            said_by: None,
            is_again: true,
            num_workers: ranks / local_size.max(1),
            num_servers,
            servers: job.servers,
            ..Rendezvous::new(config, now)
        }
    }

    /// The next one of an elastic job, whose servers are kept.
    pub(super) fn regroup(
        servers: Vec<(NodeId, Register)>,
        regroup: Regroup,
        config: &SchedulerConfig,
        now: Duration,
    ) -> Self {
        let (num_workers, num_servers) = (1, 0);
        let regroup = Some(Box::new(regroup));
        Rendezvous { num_workers, num_servers, servers, regroup, ..Rendezvous::new(config, now) }
    }

    /// Frees the place of a node that is gone. What the first worker said holds as long as there
    /// are workers, who all say the same; the first of the next ones may say something else.
    pub(super) fn remove(&mut self, node: NodeId) {
        self.servers.retain(|(server, _)| *server != node);
        if let Some(regroup) = &mut self.regroup {
            regroup.resetting.remove(&node);
        }
        self.workers.retain(|_, (worker, _)| *worker != node);
        if self.workers.is_empty() {
            self.first = None;
            if self.is_again {
                self.said_by = None;
            }
        }
    }

    /// The connection by which this node has come before, while a job forms that is no later
    /// epoch: there, whoever comes back says whom it was.
    pub(super) fn earlier_of(&self, register: &Register) -> Option<NodeId> {
        let is_same =
            |other: &Register| register.instance != 0 && other.instance == register.instance;
        let all = self.workers.values().chain(&self.servers);
        let found = all.into_iter().find(|(_, other)| is_same(other)).map(|(node, _)| *node);
        found.filter(|_| self.regroup.is_none())
    }

    /// Takes a node in.
    ///
    /// The error is the line for all nodes: this job cannot be formed.
    pub(super) fn admit(
        &mut self,
        node: NodeId,
        register: &Register,
        now: Duration,
    ) -> Result<Admitted, Box<Unformed>> {
        let who = origin(register);
        self.agree_with_scheduler(register, &who)?;
        let surplus = self.agree_on_numbers(register, &who, now)?;
        let rank = match &register.node {
            Node::Worker { worker_id, local_rank, local_size, global_rank, planning, .. } => {
                self.agree_on_planning(&who, *local_size, planning)?;
                let rank = match global_rank {
                    Some(rank) => *rank,
                    None => self.computed_rank(&who, *worker_id, *local_rank, *local_size)?,
                };
                self.admit_worker(node, register, rank)?;
                Some(Rank(rank))
            }
            Node::Server { .. } => {
                self.admit_server(node, register, who)?;
                None
            }
        };
        Ok(Admitted { rank, surplus })
    }

    fn agree_with_scheduler(&self, register: &Register, who: &Origin) -> Result<(), Box<Unformed>> {
        let who = who.clone();
        if register.release != self.release {
            let (has, expected) = (register.release.clone(), self.release.clone());
            return Err(Unformed::Release { who, has, expected }.into());
        }
        if register.encrypt != self.encrypt {
            return Err(Unformed::Encryption { who, has: register.encrypt }.into());
        }
        Ok(())
    }

    /// Takes a node into the next epoch of an elastic job, a worker at this place among the others.
    /// The numbers that a job was started with do not count any more.
    ///
    /// The error is the line for this node: the others go on.
    pub(super) fn admit_again(
        &mut self,
        node: NodeId,
        register: &Register,
        place: u32,
    ) -> Result<(), Box<Unformed>> {
        let who = origin(register);
        self.agree_with_scheduler(register, &who)?;
        match &register.node {
            Node::Worker { local_size, planning, .. } => {
                if self.workers.len() >= self.ranks_max as usize {
                    return Err(Unformed::Full { who, ranks: Some(self.ranks_max) }.into());
                }
                self.agree_on_planning(&who, *local_size, planning)?;
                self.workers.insert(place, (node, register.clone()));
            }
            Node::Server { .. } => {
                if self.servers.len() >= SERVERS_MAX {
                    return Err(Unformed::Full { who, ranks: None }.into());
                }
                self.num_servers = word(self.servers.len() + 1);
                self.admit_server(node, register, who)?;
            }
        }
        Ok(())
    }

    fn agree_on_numbers(
        &mut self,
        register: &Register,
        who: &Origin,
        now: Duration,
    ) -> Result<Vec<NodeId>, Box<Unformed>> {
        let Some(said_by) = &self.said_by else {
            // The waiting starts anew with the first node of the new set.
            self.since = now;
            self.num_workers = register.num_workers;
            self.num_servers = register.num_servers;
            self.said_by = Some(who.clone());
            let keep = self.servers.len().min(self.num_servers as usize);
            return Ok(self.servers.split_off(keep).into_iter().map(|(node, _)| node).collect());
        };
        let numbers = [
            ("DMLC_NUM_WORKER", register.num_workers, self.num_workers),
            ("DMLC_NUM_SERVER", register.num_servers, self.num_servers),
        ];
        for (variable, has, expected) in numbers {
            if has != expected {
                let (who, first, variable) = (who.clone(), said_by.clone(), variable.to_owned());
                return Err(Unformed::Number { who, variable, has, first, expected }.into());
            }
        }
        Ok(Vec::new())
    }

    fn agree_on_planning(
        &mut self,
        who: &Origin,
        local_size: u32,
        planning: &Planning,
    ) -> Result<(), Box<Unformed>> {
        let (who, num_workers, ranks_max) = (who.clone(), self.num_workers, self.ranks_max);
        let size = u64::from(num_workers) * u64::from(local_size);
        if size == 0 || size > u64::from(ranks_max) {
            return Err(Unformed::Ranks { who, num_workers, local_size, ranks_max }.into());
        }
        let bytes = planning.partition_bytes;
        if !(PART_BYTES_MIN..=PART_BYTES_MAX).contains(&(bytes as usize)) {
            return Err(Unformed::PartitionBytes { who, bytes }.into());
        }
        let roots = &planning.reduce_roots;
        if roots.len() > local_size as usize || roots.iter().any(|root| *root >= local_size) {
            return Err(Unformed::ReduceRoots { who, roots: roots.clone(), local_size }.into());
        }
        let switch_size = planning.switch_size;
        if switch_size != 0 && !local_size.is_multiple_of(switch_size) {
            return Err(Unformed::SwitchSize { who, switch_size, local_size }.into());
        }
        let Some(first) = &self.first else {
            let planning = planning.clone();
            self.first = Some(FirstWorker { who, local_size, planning });
            return Ok(());
        };
        // In later epochs hosts have as many as are left there, or as have come.
        let counts = self.regroup.is_none() || !roots.is_empty() || switch_size != 0;
        if first.local_size != local_size && counts {
            let (first, expected) = (first.who.clone(), first.local_size);
            return Err(Unformed::LocalSize { who, has: local_size, first, expected }.into());
        }
        if first.planning != *planning {
            let (first, expected) = (first.who.clone(), first.planning.clone());
            return Err(Unformed::Planning { who, has: planning.clone(), first, expected }.into());
        }
        Ok(())
    }

    fn computed_rank(
        &self,
        who: &Origin,
        worker_id: u32,
        local_rank: u32,
        local_size: u32,
    ) -> Result<u32, Box<Unformed>> {
        let limits = [
            ("DMLC_WORKER_ID", worker_id, "DMLC_NUM_WORKER", self.num_workers),
            ("BYTEPS_LOCAL_RANK", local_rank, "BYTEPS_LOCAL_SIZE", local_size),
        ];
        for (variable, value, limited_by, limit) in limits {
            if value >= limit {
                let (who, variable) = (who.clone(), variable.to_owned());
                let limited_by = limited_by.to_owned();
                return Err(Unformed::Place { who, variable, value, limited_by, limit }.into());
            }
        }
        // Both are below limits whose product is at most `ranks_max`.
        Ok(worker_id * local_size + local_rank)
    }

    fn admit_worker(
        &mut self,
        node: NodeId,
        register: &Register,
        rank: u32,
    ) -> Result<(), Box<Unformed>> {
        let who = origin(register);
        let size = self.size().expect("the first worker has said how many a host has");
        if rank >= size {
            return Err(Unformed::GlobalRank { who, rank: Rank(rank), size }.into());
        }
        if let Some((_, other)) = self.workers.get(&rank) {
            return Err(Unformed::SameRank { who, other: origin(other), rank: Rank(rank) }.into());
        }
        self.workers.insert(rank, (node, register.clone()));
        Ok(())
    }

    fn admit_server(
        &mut self,
        node: NodeId,
        register: &Register,
        who: Origin,
    ) -> Result<(), Box<Unformed>> {
        let Node::Server { cores, .. } = &register.node else { return Ok(()) };
        if cores.is_empty() || cores.len() > CORES_MAX {
            return Err(Unformed::Cores { who, cores: cores.len() as u64 }.into());
        }
        if let Some(core) = cores.iter().find(|core| core.port() == 0 || core.ip().is_unspecified())
        {
            return Err(Unformed::Unreachable { who, address: *core }.into());
        }
        if self.servers.len() >= self.num_servers as usize {
            let others = self.servers.iter().map(|(_, other)| origin(other)).collect();
            return Err(Unformed::ServerTooMany { who, others }.into());
        }
        let mine: BTreeSet<_> = cores.iter().collect();
        for (_, other) in &self.servers {
            if let Node::Server { cores: theirs, .. } = &other.node
                && let Some(core) = theirs.iter().find(|core| mine.contains(core))
            {
                let (other, address) = (origin(other), *core);
                return Err(Unformed::SameAddress { who, other, address }.into());
            }
        }
        self.servers.push((node, register.clone()));
        Ok(())
    }

    /// Ranks of the job, once the first worker has said how many a host has.
    fn size(&self) -> Option<u32> {
        self.first.as_ref().map(|first| self.num_workers * first.local_size)
    }

    /// Ranks and servers of the job, once the first worker has said how many a host has.
    pub(super) fn nodes(&self) -> Option<usize> {
        self.size().map(|size| size as usize + self.num_servers as usize)
    }

    /// Whether nobody of a later generation has come yet.
    pub(super) fn is_unclaimed(&self) -> bool {
        self.said_by.is_none()
    }

    /// Whether everybody is there.
    pub(super) fn is_complete(&self) -> bool {
        if let Some(regroup) = &self.regroup {
            return regroup.is_settled() && self.lacks().is_none();
        }
        self.said_by.is_some()
            && self.servers.len() == self.num_servers as usize
            && self.size().is_some_and(|size| self.workers.len() == size as usize)
    }

    /// What the next epoch of an elastic job has too little of, even if all who are awaited come.
    pub(super) fn lacks(&self) -> Option<String> {
        let regroup = self.regroup.as_ref()?;
        let hosts = self.workers.values().map(|(_, worker)| worker.host_id.as_str());
        regroup.lacks(hosts, !self.servers.is_empty())
    }

    /// For whom it waits: `server 1 of 2, worker rank 3 of 4`.
    pub(super) fn missing(&self) -> String {
        if let Some(regroup) = &self.regroup {
            return regroup.missing(self.lacks());
        }
        let mut missing = Vec::new();
        let servers = word(self.servers.len());
        if servers < self.num_servers {
            let plural = if self.num_servers - servers == 1 { "" } else { "s" };
            let which = list(servers..self.num_servers);
            missing.push(format!("server{plural} {which} of {}", self.num_servers));
        }
        match self.size() {
            None if self.num_workers == 1 => missing.push("all workers of 1 host".to_owned()),
            None => missing.push(format!("all workers of {} hosts", self.num_workers)),
            Some(size) => {
                let ranks: Vec<u32> =
                    (0..size).filter(|rank| !self.workers.contains_key(rank)).collect();
                if !ranks.is_empty() {
                    let plural = if ranks.len() == 1 { "" } else { "s" };
                    missing.push(format!("worker rank{plural} {} of {size}", list(ranks)));
                }
            }
        }
        missing.join(", ")
    }

    /// The job, in order.
    ///
    /// # Panics
    /// If the rendezvous is not complete.
    pub(super) fn form(self) -> Job {
        let first = self.first.expect("a complete rendezvous has a worker");
        let planning = first.planning;
        let workers: Vec<(NodeId, Register)> = self.workers.into_values().collect();
        let hosts: BTreeSet<&str> =
            workers.iter().map(|(_, worker)| worker.host_id.as_str()).collect();
        let mut servers = self.servers;
        // The address of the first core is unique among servers, which makes the order strict and
        // total.
        servers.sort_by_cached_key(|(_, server)| {
            let (preferred, shape) = (preferred(server), shape(server, &hosts));
            let first = match &server.node {
                Node::Server { cores, .. } => cores.first().copied(),
                Node::Worker { .. } => None,
            };
            // Servers that prefer no place come last.
            (preferred.unwrap_or(u32::MAX), shape.colocated, server.host.clone(), first)
        });
        let shapes = servers.iter().map(|(_, server)| shape(server, &hosts)).collect();
        let hosts = workers.iter().map(|(_, worker)| worker.host_id.as_str());
        let groups = Groups::planned(&planning, hosts);
        Job { workers, servers, planning, shapes, groups }
    }
}

impl Job {
    /// Ranks in the job.
    pub(super) fn size(&self) -> u32 {
        word(self.workers.len())
    }

    /// The first few of these nodes, each once, with where they run.
    pub(super) fn members(&self, ends: impl IntoIterator<Item = End>) -> Vec<Member> {
        let mut members: Vec<Member> = Vec::new();
        for end in ends {
            let node = match end {
                End::Rank(rank) => self.workers.get(rank.0 as usize),
                End::Server(index) => self.servers.get(index as usize),
            };
            let Some((_, register)) = node else { continue };
            if members.iter().any(|member| member.end == end) {
                continue;
            }
            members.push(Member { end, host: register.host.clone(), pid: register.pid });
            if members.len() == MEMBERS_MAX {
                break;
            }
        }
        members
    }

    /// Whether sums pass through servers: not where one group has all ranks, and there are several.
    pub(super) fn through_servers(&self) -> bool {
        self.groups.need_servers(&self.planning)
    }

    /// The other ranks of this rank's group.
    pub(super) fn neighbours(&self, rank: Rank) -> Vec<Neighbour> {
        let others = self.groups.members_with(rank).iter().filter(|&&other| other != rank);
        let neighbour = |&rank: &Rank| {
            let (_, register) = &self.workers[rank.0 as usize];
            let Node::Worker { local, .. } = &register.node else { return None };
            let (host, pid) = (register.host.clone(), register.pid);
            Some(Neighbour { rank, host, pid, local: local.clone().unwrap_or_default() })
        };
        others.filter_map(neighbour).collect()
    }

    /// The roster, with no index and neighbours filled in, and with the names of the ranks if its
    /// reader needs them.
    pub(super) fn roster(&self, job: &str, epoch: Epoch, names_ranks: bool) -> Roster {
        let workers = (0..).map(Rank).zip(&self.workers).filter(|_| names_ranks);
        let workers = workers.map(|(rank, (_, register))| Peer {
            host: register.host.clone(),
            pid: register.pid,
            group: self.groups.of_rank(rank),
        });
        let servers = self.servers.iter().map(|(_, register)| {
            let (cores, shm, rdma) = match &register.node {
                Node::Server { cores, shm, rdma, .. } => (cores.clone(), shm.clone(), *rdma),
                Node::Worker { .. } => (Vec::new(), None, false),
            };
            ServerPeer {
                host: register.host.clone(),
                pid: register.pid,
                host_id: register.host_id.clone(),
                cores,
                shm,
                rdma,
            }
        });
        Roster {
            job: job.to_owned(),
            term: 0,
            epoch,
            size: self.size(),
            through_servers: self.through_servers(),
            index: 0,
            neighbours: Vec::new(),
            workers: workers.collect(),
            servers: servers.collect(),
            elastic: false,
            shrinks: false,
            change: None,
        }
    }
}

/// A node as people know it before it has a number.
pub(super) fn name(register: &Register) -> String {
    match &register.node {
        Node::Worker { worker_id, local_rank, global_rank: None, .. } => {
            format!("worker {worker_id} process {local_rank}")
        }
        Node::Worker { global_rank: Some(rank), .. } => format!("the worker of rank {rank}"),
        Node::Server { cores, .. } => match cores.first() {
            Some(core) => format!("the server at {core}"),
            None => "a server".to_owned(),
        },
    }
}

/// The node as verdicts name it: `the server at 10.0.0.1:5000 (host a, pid 5)`.
pub(super) fn origin(register: &Register) -> Origin {
    let place = Place { host: register.host.clone(), pid: register.pid };
    Origin { party: Party::Unplaced(name(register)), place: Some(place) }
}

fn local_size(register: &Register) -> u32 {
    match &register.node {
        Node::Worker { local_size, .. } => *local_size,
        Node::Server { .. } => 1,
    }
}

fn preferred(register: &Register) -> Option<u32> {
    match &register.node {
        Node::Server { preferred, .. } => *preferred,
        Node::Worker { .. } => None,
    }
}

/// A server's shape. It is colocated if it says so, or if a worker runs on its host.
pub(super) fn shape(register: &Register, worker_hosts: &BTreeSet<&str>) -> Shape {
    match &register.node {
        Node::Server { cores, colocated, .. } => Shape {
            cores: word(cores.len()),
            colocated: *colocated || worker_hosts.contains(register.host_id.as_str()),
        },
        Node::Worker { .. } => Shape { cores: 0, colocated: true },
    }
}
