//! Opening a rank's GPU: what the ranks of a job must know of each other's GPUs, the communicator
//! of a host, the slots, and the thread of the pipeline.
//!
//! The ranks tell each other by a push_pull of bytes: each writes into a row of its own, and the
//! sum of all rows is what everybody has said.

use super::Worker;
use crate::base::error::{Error, Source, StartError};
use crate::base::lock;
use crate::base::types::PushPull;
use crate::cuda::{Comm, Device, EventPool, GpuError, Nccl};
use crate::gpu::census::{Gpu, ROW, Row, Rows, agree, misplaced};
use crate::gpu::direct::Direct;
use crate::gpu::order_lanes::OrderLanes;
use crate::gpu::{Assembled, Assembly, slots};
use crate::host::switches::Switches;
use crate::job::Job;
use crate::job::neighbours::ORDER;
use crate::job::nic_loop::Command;
use crate::job::places::{Poller, spot};
use crate::job::start;
use bps_engine::base::{DType, Operation, Rank, word};
use bps_engine::config::Config;
use bps_engine::harness::{self, Idler};
use bps_engine::lane::EndpointBuilder;
use bps_engine::mem::Budget;
use bps_engine::proto::members::Members;
use bps_engine::proto::messages::Declaration;
use bps_engine::topo::Topology;
use bps_engine::trace::log;
use bps_engine::transport::Link;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The tensor by which the ranks tell each other.
const NAME: &str = "byteps: the GPUs of the job";
/// Collectives that are launched together, at most, where the job has servers.
const GROUP_SIZE: usize = 16;
/// The same of a host that is the whole job.
const GROUP_SIZE_ALONE: usize = 128;
/// Messages that may wait for the pipeline before the NIC loop keeps them.
const INBOX: usize = 4096;
/// How long all ranks may take to hear why a GPU can't be used, before this one ends.
const HEARD: Duration = Duration::from_secs(5);
/// Why devices are not to reach the memory of the GPU.
const SHRINKS: &str = "what is sent passes the host's memory where the job goes on without servers \
                       that die (BPS_ELASTIC=shrink)";
/// How often it looks meanwhile.
const LOOK: Duration = Duration::from_millis(1);

/// Opens the GPU of this number for a rank of a job of several, and starts its pipeline.
pub(crate) fn open(
    worker: &Worker,
    job: &Job,
    gpu: &Result<(Device, EventPool), GpuError>,
    config: &Config,
) -> Result<(), Error> {
    let switches = job.switches();
    let has_peers = switches.ranks().len() > 1;
    let rank = Rank(worker.rank());
    // This rank is one of both, at least.
    let (host, first) = (switches.ranks()[0], switches.line(rank)[0]);
    let begun = gpu.clone().and_then(|(device, events)| {
        let nccl = match has_peers {
            true => Some(Nccl::load(config.nccl_library.as_deref())?),
            false => None,
        };
        let id = match &nccl {
            Some(nccl) if first == rank => nccl.unique_id()?,
            _ => [0; 128],
        };
        Ok((device, events, nccl, id))
    });
    let told = begun.as_ref().map_err(ToString::to_string).map(|(device, _, nccl, id)| Gpu {
        uuid: device.uuid(),
        nccl: nccl.as_ref().map_or(0, Nccl::version),
        host,
        first,
        bridge: bridge(device.pci_bus_id()),
        rings: rings(config).unwrap_or(0),
        id: *id,
    });
    let own = Row { gpu: undivided(switches, config).map_or(told, Err) };
    let all = tell_all(worker, &own)?;
    let agreed = agree(&all, rank);
    if agreed.is_err() {
        // Who ended now would end others before they have heard why.
        let _ = worker.barrier(Some(HEARD));
    }
    let id = agreed?;
    let (device, events, nccl, _) = begun.map_err(not_started)?;
    if switches.count() > 1
        && let Some(line) = misplaced(&all, rank, config.switch_size)
    {
        log::warning!("{line}");
    }
    let opened = meet(job, &device, nccl.as_ref(), &id, rank, config)
        .and_then(|comm| begin(job, (&device, &events), comm, rank, config));
    if let Err(error) = opened {
        // If the job is over, that is why NCCL was given up.
        if let Some(over) = job.nic.over.get() {
            return Err(over.clone());
        }
        // All others wait for this rank, in NCCL or below.
        // A loop that has ended has told the others why.
        let _ = job.command(Command::GpuFailed { source: Source::new(error.clone()) });
        job.wake();
        let told = Instant::now();
        while !job.nic.has_ended() && told.elapsed() < HEARD {
            std::thread::sleep(LOOK);
        }
        return Err(not_started(error));
    }
    // A NIC loop learns of its pipeline before it sends this row, since both come to it through one
    // queue: so no rank hears of another's tensors before its own pipeline is there.
    tell_all(worker, &own).map(drop)
}

/// The communicator of a host of several ranks, or of this rank's PCIe switch.
fn meet(
    job: &Job,
    device: &Device,
    nccl: Option<&Nccl>,
    id: &[u8; 128],
    own: Rank,
    config: &Config,
) -> Result<Option<Comm>, GpuError> {
    let Some(nccl) = nccl else { return Ok(None) };
    let switches = job.switches();
    let line = switches.line(own);
    let place = line.iter().position(|rank| *rank == own);
    let place = place.expect("a rank is below its own switch");
    let (size, patience) = (word(line.len()), config.start_timeout);
    let is_wanted = || !job.nic.has_ended();
    let comm = nccl.comm(device, id, size, word(place), rings(config), patience, is_wanted)?;
    let below = match switches.count() {
        1 => String::new(),
        count => format!(", below {count} PCIe switches, {size} each"),
    };
    let laid = rings(config).map_or_else(String::new, |rings| format!(", {rings} rings"));
    let ranks = switches.ranks().len();
    log::info!("{}: {ranks} GPUs on this host{below}{laid}", nccl.describe());
    Ok(Some(comm))
}

/// Why the switches of this host can't be, although the variables fit each other: its ranks do not
/// all share its memory.
fn undivided(switches: &Switches, config: &Config) -> Option<String> {
    let (size, ranks) = (config.ranks_of_switch()?, switches.ranks().len());
    (switches.count() == 1 && ranks > size as usize).then(|| {
        format!(
            "BYTEPS_PCIE_SWITCH_SIZE={size} does not divide the {ranks} ranks that share memory \
             with it, of the {} of its host (BYTEPS_LOCAL_SIZE): let all share one network \
             namespace",
            config.local_size
        )
    })
}

/// The PCIe bridge by which the GPU at this address hangs, as far as the kernel shows it.
fn bridge(address: &str) -> String {
    let topology = Topology::read(Path::new("/")).ok();
    let gpus = topology.as_ref().map_or(&[][..], |topology| &topology.gpus);
    let gpu = gpus.iter().find(|gpu| gpu.address == address);
    gpu.and_then(|gpu| gpu.path.bridge()).unwrap_or_default().to_owned()
}

/// Channels of a communicator, unless NCCL is to choose them. With more than one of what BytePS
/// calls rings it hangs, so a script of its users that says 1 asks for nothing.
fn rings(config: &Config) -> Option<u32> {
    Some(config.nccl_rings).filter(|rings| *rings > 1)
}

fn not_started(error: GpuError) -> Error {
    StartError::Gpu(error).into()
}

/// What every rank says of its GPU.
fn tell_all(worker: &Worker, own: &Row) -> Result<Rows, Error> {
    let size = worker.size() as usize;
    let mut rows = vec![0u8; ROW * size];
    own.encode(&mut rows[worker.rank() as usize * ROW..][..ROW]);
    let declaration = Declaration {
        name: NAME.into(),
        dtype: DType::U8,
        shape: (rows.len() as u64).into(),
        operation: Operation::Sum,
        device: false,
        members: Members::ALL,
        receiver: None,
        encoding: None,
        store: None,
    };
    let ids = worker.declare(std::slice::from_ref(&declaration))?;
    let at = rows.as_mut_ptr();
    let item = PushPull { tensor: ids[0], source: at.cast_const(), target: at, priority: i64::MAX };
    // SAFETY: `rows` is of the declared size and lives until the handle is done; a rank that does
    // not come ends the job by a deadline of its own, which ends the handle.
    let handles = unsafe { worker.push_pull(&[item]) }?;
    // Bounded by the job's deadline for rounds: a rank that opens no GPU is a stall.
    handles[0].wait(None)?;
    let gone = worker.lacking(&handles[0])?;
    let told = (0..).map(Rank).zip(rows.chunks(ROW)).filter(|(rank, _)| !gone.contains(rank));
    Ok(told.map(|(rank, row)| (rank, Row::decode(row))).collect())
}

/// The lanes between the thread of this rank's GPU and those of the other ranks of the host.
fn order_lanes(
    job: &Job,
    rank: Rank,
    links: Vec<(Rank, Link)>,
    config: &Config,
) -> std::io::Result<OrderLanes> {
    let waker = job.gpu.waker.clone();
    let builder = EndpointBuilder::new(config, waker);
    let builder = builder.shm(None).map_err(std::io::Error::other)?;
    OrderLanes::new(builder.build().0, rank, job.gpu.epoch, links)
}

/// Makes the slots and starts the thread.
fn begin(
    job: &Job,
    (device, events): (&Device, &EventPool),
    comm: Option<Comm>,
    rank: Rank,
    config: &Config,
) -> Result<(), GpuError> {
    let ordinal = device.ordinal();
    let links = std::mem::take(&mut *lock(&job.gpu.order));
    let order_lane_count = links.len();
    let host = match comm {
        Some(comm) => {
            let lanes =
                order_lanes(job, rank, links, config).map_err(|error| GpuError::Memory {
                    ordinal,
                    why: format!("no lanes between the GPUs of this host: {error}"),
                })?;
            Some((comm, lanes))
        }
        None => None,
    };
    let spot = spot(config, Poller::Gpu(device.pci_bus_id()));
    let slot_bytes = config.partition_bytes as usize;
    let slots = slots::count(slot_bytes, job.lanes());
    let has_servers = job.lanes() >= job.switches().ranks().len();
    let mut staging = 0;
    let direct = match has_servers {
        true => {
            let ports = job.take_ports();
            // Devices write results into slots of their choice.
            if ports.is_none() {
                staging = (config.gpu_staging_mb as usize) << 20;
            }
            // What was sent is kept in the host's memory, for another server.
            let ports = match job.shrinks {
                true => ports.map(|_| Err(SHRINKS.into())),
                false => ports,
            };
            Direct::find(ports, job.switches(), device, config, slots * slot_bytes)?
        }
        false => Direct::default(),
    };
    let assembly = Assembly {
        device: device.clone(),
        events: events.clone(),
        host,
        waker: job.gpu.waker.clone(),
        rank,
        switches: job.switches().clone(),
        has_servers,
        slots,
        slot_bytes,
        roots: !config.reduce_roots.is_empty(),
        group_size: match config.nccl_group_size as usize {
            // Between hosts results are not to wait for long; a host alone has nothing that could
            // overtake, and each launch takes time.
            0 if has_servers => GROUP_SIZE,
            0 => GROUP_SIZE_ALONE,
            size => size,
        },
        patience: config.start_timeout,
        stall_report: config.stall_report,
        inbox: INBOX,
        staging,
        keeps: job.shrinks,
        numa_node: spot.memory_node,
        nic_waker: job.nic.waker.clone(),
        nic_ended: Arc::clone(&job.nic.ended),
        job_over: Arc::clone(&job.nic.over),
        bouncing: Arc::clone(&job.gpu.bouncing),
    };
    let Assembled { pipeline, inbox, to, pinned } = assembly.assemble_with(direct)?;
    let mut budget = Budget::new();
    let name = format!("pinned slots of GPU {}", device.ordinal());
    budget.add(&name, pinned as u64, slot_bytes as u64);
    if order_lane_count > 0 {
        let name = "shared memory of lanes to GPUs of this host";
        budget.add(name, order_lane_count as u64, ORDER.lane_bytes());
    }
    budget.print();
    let (device, idle) = (device.clone(), config.idle);
    let (cpu, claims) = (spot.cpu, spot.claims);
    let body = move || {
        let _claims = claims;
        if let Err(error) = device.make_current() {
            log::error!("{error}");
        }
        pipeline.run(Idler::new(idle, start::spin()));
    };
    let thread = harness::spawn("bps-gpu", cpu, body);
    job.keep(
        thread.map_err(|error| GpuError::Memory { ordinal, why: format!("no thread: {error}") })?,
    );
    let is_first = job.gpu.inbox.set(inbox).is_ok();
    assert!(is_first, "a process opens one GPU");
    // Of a loop that has ended, or hangs, whoever pushes is told.
    let _ = job.command(Command::OpenGpu(to));
    Ok(())
}
