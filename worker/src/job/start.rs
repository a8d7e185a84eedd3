//! Joining a job: the scheduler's roster, then a lane to every server core and to every rank of the
//! group.

use super::nic_loop::{Command, NicLoop};
use crate::base::error::{Error, SettingError, Source, StartError};
use crate::host::switches::Switches;
use crate::job::agent::Lanes;
use crate::job::attending::{Attendant, Missed, TICK, lost};
use crate::job::control::Heart;
use crate::job::dialing::{Dialing, End, Links, host_id};
use crate::job::neighbours::{Door, Wakers};
use crate::job::places;
use crate::nic::{LanePeer, NicConfig, NicStatistics, Report};
use bps_engine::base::{CoreId, Rank};
use bps_engine::config::{Config, TransportChoice};
use bps_engine::control::{ControlLink, JobKey, LinkReceiver, LinkSender, Redial};
use bps_engine::lane::{EndpointBuilder, Needs};
use bps_engine::mem::Budget;
use bps_engine::proto::absence::Absence;
use bps_engine::proto::messages::{Node, NodeMessage, Origin, Party, Planning, Register, Roster};
use bps_engine::proto::objects::ObjectKeys;
use bps_engine::proto::pulse::Pulse;
use bps_engine::proto::tuning::{Tuning, credit_parts};
use bps_engine::ring::Mpsc;
use bps_engine::topo::Topology;
use bps_engine::trace::log;
use bps_engine::transport::rdma::{self, Ports};
use bps_engine::transport::shm::ShmOptions;
use bps_engine::transport::{self, LaneId, Waker};
use bps_engine::{harness, host};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// CPUs of a rank from which on its NIC loop has helpers: one that lost its CPU to the framework
/// in the middle of a grain would keep the loop waiting.
const HELPED_CPUS: usize = 8;
/// And how many: with two, large sums take half of their time, as docs/performance.md says.
const HELPERS: usize = 2;
/// How long a rank that goes on to another epoch waits for the scheduler to hear of it.
const GOODBYE: Duration = Duration::from_secs(5);

/// Descriptors that a worker process may open beside its lanes' own, and those of a lane.
const DESCRIPTORS: u64 = 1024;
const DESCRIPTORS_OF_LANE: u64 = 8;

/// All that joining gives.
pub(crate) struct Joined {
    pub(crate) roster: Roster,
    pub(crate) sender: LinkSender,
    pub(crate) receiver: LinkReceiver,
    /// Heartbeats, which go on as they began.
    pub(crate) heart: Heart,
    pub(crate) pulse: Pulse,
    /// Of a job with a key.
    pub(crate) object_keys: Option<ObjectKeys>,
    /// Of the NIC loop, in the order of lane ids.
    pub(crate) links: Vec<(End, transport::Link)>,
    /// Between the threads of the host's GPUs.
    pub(crate) order: Vec<(Rank, transport::Link)>,
    pub(crate) wakers: Wakers,
}

impl Joined {
    /// The lane of each core and rank.
    pub(crate) fn lanes(&self) -> Lanes {
        let mut lanes = Lanes::default();
        for (lane, (end, _)) in (0..).map(LaneId).zip(&self.links) {
            match *end {
                End::Core(core) => lanes.cores.insert(core, lane),
                End::Rank(rank) => lanes.ranks.insert(rank, lane),
            };
        }
        lanes
    }

    /// The RDMA ports over which this rank reaches every server, or what server it reaches
    /// otherwise; none if it reaches none so.
    pub(crate) fn ports(&self) -> Option<Result<Ports, String>> {
        let ports = Ports::of(self.links.iter().filter_map(|(_, link)| match link {
            transport::Link::Rdma(link) => Some(&**link),
            _ => None,
        }))?;
        let other = self.links.iter().find_map(|(end, link)| match (end, link) {
            (End::Core(core), transport::Link::Tcp(_) | transport::Link::SealedTcp(..)) => {
                Some((core, "TCP"))
            }
            (End::Core(core), transport::Link::Shm(_)) => Some((core, "shared memory")),
            _ => None,
        });
        let no = |(core, by): (&CoreId, &str)| format!("{core} is reached over {by}");
        Some(other.map_or(Ok(ports), |other| Err(no(other))))
    }

    /// The ranks that reduce with this one, and itself, below the PCIe switches of their host.
    pub(crate) fn switches(&self, config: &Config) -> Switches {
        let others = self.links.iter().filter_map(|(end, _)| match end {
            End::Rank(rank) => Some(*rank),
            End::Core(_) => None,
        });
        let ranks = others.chain([Rank(self.roster.index)]).collect();
        Switches::new(ranks, config.ranks_of_switch().unwrap_or(0))
    }
}

/// Bytes that a worker may have in flight on all its lanes together. Without a setting that is a
/// partition for each lane, so that every server has something to do.
#[must_use]
pub fn credit_bytes(config: &Config, lanes: usize) -> usize {
    credit_parts(config.scheduling_credit, lanes) as usize * config.partition_bytes as usize
}

/// Joins the job: returns when all nodes are there and every lane is connected. A rank that comes
/// back to an elastic job says what it was `former`ly known by. What framework it `speaks` is for
/// messages.
///
/// An epoch may be over before this rank has all its lanes: then it goes on to the next one.
pub(crate) fn join(
    config: &Config,
    mut former: Option<u64>,
    speaks: Option<&str>,
) -> Result<Joined, Error> {
    let instance = host::instance();
    let mut lost_at = None;
    loop {
        match join_epoch(config, instance, former, speaks) {
            Ok(joined) => return Ok(joined),
            Err(Missed::Epoch(session)) => former = Some(session),
            // Of a job that goes on without its scheduler, this rank waits for the next one.
            Err(Missed::Scheduler(session, error)) => {
                former = former.or(session);
                let since: Instant = *lost_at.get_or_insert_with(Instant::now);
                if former.is_none() || since.elapsed() >= config.scheduler_wait {
                    return Err(error.into());
                }
                log::warning!("{error}; coming back by another connection");
                std::thread::sleep(TICK);
            }
            Err(Missed::Job(error)) => return Err(error),
        }
    }
}

fn join_epoch(
    config: &Config,
    instance: u64,
    former: Option<u64>,
    speaks: Option<&str>,
) -> Result<Joined, Missed> {
    let start = Instant::now();
    let key = JobKey::load(config).map_err(|error| SettingError::Invalid(Source::new(error)))?;
    // The scheduler of a job that runs is there.
    let patience = match former {
        Some(_) => {
            let alone = config.heartbeat_timeout.min(config.start_timeout);
            alone.max(config.scheduler_wait)
        }
        None => config.start_timeout,
    };
    let link = ControlLink::connect(&config.root_uri, config.root_port, &key, patience)
        .map_err(|error| StartError::NoScheduler(Source::new(error)))?;
    link.notice_loss_after(config.heartbeat_timeout).map_err(lost)?;
    let rails = match rdma::rails_for(config, places::node()) {
        Ok(rails) => rails,
        Err(error) if config.transport == TransportChoice::Rdma => {
            return Err(StartError::resource("RDMA is demanded", error).into());
        }
        Err(error) => {
            log::warning!("no RDMA lanes: {error}");
            None
        }
    };
    let waker = if rails.is_some() { Waker::watching() } else { Waker::new() };
    let no_event = |error: std::io::Error| StartError::resource("no eventfd", error);
    let wakers = Wakers { nic: waker.map_err(no_event)?, gpu: Waker::new().map_err(no_event)? };
    // The others of this host may have the roster, and dial, before this rank has it.
    let door = if config.local_reduce { Some(Door::open(&key, &wakers)?) } else { None };
    let knock_at = link.door(&key).map_err(lost)?;
    let (sender, receiver) = link.split();
    let local = door.as_ref().map(|door| door.name().to_owned());
    let speaks = speaks.map(str::to_owned);
    let register = register(config, local, knock_at.session, speaks);
    let register = Register { instance, former, ..register };
    sender.send(&NodeMessage::Register(register.clone())).map_err(lost)?;
    let address = knock_at.address.to_string();
    let (interval, timeout) = (config.heartbeat_interval, config.heartbeat_timeout);
    let pulse = Pulse::new(&address, interval, timeout, start.elapsed());
    let root = (config.root_uri.as_str(), config.root_port);
    // One that is new knows of no job that outlives its scheduler.
    let wait = if former.is_some() { config.scheduler_wait } else { Duration::ZERO };
    let mut attendant = Attendant {
        start,
        pulse,
        sender,
        receiver,
        door: knock_at,
        register,
        redial: Redial::to_register(root, &key, (interval, timeout)),
        absence: Absence::new(wait),
    };
    let roster = attendant.wait_for_roster(config)?;
    let session = attendant.register.session;
    if let Some(change) = &roster.change {
        log::info!("rank {} of {}: {change}", roster.index, roster.size);
    }
    let cores: usize = roster.servers.iter().map(|server| server.cores.len()).sum();
    let lanes = cores + roster.neighbours.len();
    host::raise_descriptor_limit(DESCRIPTORS + DESCRIPTORS_OF_LANE * lanes as u64);
    let dialing = Dialing::start(config, &key, &roster, &wakers, rails, door)?;
    let outlasts = roster.elastic && !config.scheduler_wait.is_zero();
    let Links { nic: links, order } = match attendant.wait_for_lanes(dialing, outlasts) {
        Err(Missed::Epoch(session)) => {
            // The scheduler waits for this rank.
            let _ = attendant.sender.send(&NodeMessage::Leave { suspend: true });
            // If it does not hear of it, the next connection says so.
            let _ = attendant.sender.close(GOODBYE);
            return Err(Missed::Epoch(session));
        }
        Err(Missed::Scheduler(_, error)) if roster.elastic => {
            return Err(Missed::Scheduler(Some(session), error));
        }
        links => links?,
    };
    let Attendant { start: began, pulse, sender, receiver, door, register, .. } = attendant;
    let redial = Redial::new(root, &key, session, (interval, timeout));
    let heart = Heart { began, door, knocker: None, redial, register, is_cut: false };
    let object_keys = ObjectKeys::new(&key, &roster.job, roster.epoch);
    Ok(Joined { roster, sender, receiver, heart, pulse, object_keys, links, order, wakers })
}

fn register(
    config: &Config,
    local: Option<String>,
    session: u64,
    speaks: Option<String>,
) -> Register {
    Register {
        node: Node::Worker {
            worker_id: config.worker_id,
            local_rank: config.local_rank,
            local_size: config.local_size,
            global_rank: config.global_rank,
            local,
            planning: Planning {
                partition_bytes: config.partition_bytes,
                placement: config.placement,
                mixed_bound: config.mixed_bound,
                built_in_coefficient: config.built_in_coefficient,
                local_reduce: config.local_reduce,
                force_distributed: config.force_distributed,
                reduce_roots: config.reduce_roots.clone(),
                switch_size: config.ranks_of_switch().unwrap_or(0),
                tuning: tuning(config),
            },
            speaks,
        },
        host: host::name(),
        host_id: host_id(config),
        pid: std::process::id(),
        instance: 0,
        session,
        former: None,
        release: env!("CARGO_PKG_VERSION").into(),
        num_workers: if config.joins { 0 } else { config.num_workers },
        num_servers: config.num_servers,
        encrypt: config.encrypt,
    }
}

/// What the job is to find by itself. Jobs that tune nothing do not compare their credits.
pub(crate) fn tuning(config: &Config) -> Tuning {
    let (credit, partition) = (config.tune_credit, config.tune_partition);
    let tuning = Tuning { credit, partition, credit_parts: config.scheduling_credit };
    if tuning.is_off() { Tuning::OFF } else { tuning }
}

/// Makes the NIC loop on the thread that will run it, and the line that is printed about it.
#[allow(clippy::too_many_arguments, reason = "each is owned by the loop from here on")]
pub(crate) fn nic(
    config: &Config,
    nic_config: NicConfig,
    links: Vec<(End, transport::Link)>,
    waker: &Waker,
    commands: &Mpsc<Command>,
    reports: &Mpsc<Report>,
    report_waker: Waker,
    statistics: &Arc<NicStatistics>,
) -> Result<(NicLoop, String), Error> {
    let needs = Needs::of(links.iter().map(|(_, link)| link));
    let group = links.iter().filter(|(end, _)| matches!(end, End::Rank(_))).count();
    let mut line = format!(
        "{} of {}: {} TCP lanes, {} shared-memory lanes",
        nic_config.rank, nic_config.size, needs.tcp, needs.shm
    );
    if needs.rdma > 0 {
        line = format!("{line}, {} RDMA lanes", needs.rdma);
    }
    if group > 0 {
        let servers = if group == links.len() { ", without servers" } else { "" };
        line = format!("{line}; reduces with other ranks of this host: {group}{servers}");
    }
    let builder = EndpointBuilder::new(config, waker.clone()).with_team(nic_config.team.clone());
    let builder = builder.with_needs(&needs);
    let builder =
        builder.map_err(|error| StartError::resource("the lanes could not be set up", error))?;
    let (endpoint, descriptions) = builder.build();
    for description in descriptions {
        line = format!("{line}; {description}");
    }
    let shm_lanes = needs.shm as usize;
    if shm_lanes > 0 {
        let to_servers = shm_lanes.checked_sub(group);
        memory(to_servers.expect("ranks of a host share memory"), group).print();
    }
    let mut nic = NicLoop::new(
        endpoint,
        nic_config,
        commands.clone(),
        (reports.clone(), report_waker),
        Arc::clone(statistics),
        say,
    );
    for (end, link) in links {
        let (peer, party) = match end {
            End::Core(core) => (LanePeer::Server(core.server), Party::Server(core.server)),
            End::Rank(rank) => (LanePeer::Rank(rank), Party::Rank(rank)),
        };
        nic.attach(peer, link).map_err(|error| {
            let peer = Origin { party, place: None };
            StartError::Lane { peer, source: Source::new(error) }
        })?;
    }
    Ok((nic, line))
}

/// What the lanes of shared memory take, those to servers and those to ranks of the group. It was
/// allocated when they were set up; the other end of each counts it as well.
fn memory(servers: usize, group: usize) -> Budget {
    let lane_bytes = ShmOptions::default().lane_bytes();
    let mut budget = Budget::new();
    for (count, name) in [
        (servers, "shared memory of lanes to servers of this host"),
        (group, "shared memory of lanes to ranks of this host"),
    ] {
        if count > 0 {
            budget.add(name, count as u64, lane_bytes);
        }
    }
    budget
}

/// The one line that every survivor prints.
fn say(error: &Error) {
    if !matches!(error, Error::Closed(_)) {
        log::error!("{error}");
    }
}

/// How long the NIC loop spins before it sleeps.
pub(crate) fn spin() -> Duration {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    // The framework's own threads want the other CPUs.
    harness::spin_default(2, cpus)
}

/// How many helpers the NIC loop has for what passes between processes of a host: as the settings
/// say, or as there are CPUs for them.
pub(crate) fn helpers(config: &Config) -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let machine = Topology::read(Path::new("/")).map_or(cpus, |topology| topology.cpus.len());
    // A launcher that binds ranks gives each its own CPUs; else the ranks of a host share all.
    let ranks = if cpus < machine { 1 } else { config.local_size.max(1) as usize };
    config.nic_helpers.unwrap_or(if cpus / ranks >= HELPED_CPUS { HELPERS } else { 0 })
}

/// How long a caller spins before it sleeps: not at all where CPUs are scarce.
pub(crate) fn caller_spin() -> Duration {
    if spin() < harness::SPIN_ROOMY { Duration::ZERO } else { harness::SPIN_ROOMY }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_sum_has_the_lanes_that_share_memory() {
        let lines = |servers, group| memory(servers, group).lines().collect::<Vec<String>>();
        assert_eq!(
            lines(2, 7),
            [
                "memory: shared memory of lanes to servers of this host: 2 x 4.0 MiB = 8.1 MiB",
                "memory: shared memory of lanes to ranks of this host: 7 x 4.0 MiB = 28.4 MiB",
                "memory: 36.5 MiB in all",
            ]
        );
    }
}
