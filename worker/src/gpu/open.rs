//! Opening a rank's GPU: what the ranks of a job must know of each other's GPUs, the communicator
//! of a host, the slots, and the thread of the pipeline.
//!
//! The ranks tell each other by a push_pull of bytes: each writes into a row of its own, and the
//! sum of all rows is what everybody has said.

use super::error::nccl_version;
use super::pipeline::{Host, Parts, Pipeline};
use super::track::{Track, WORD_BYTES};
use super::{Device, Event, EventPool, GpuError, Nccl, Pinned, Stream};
use crate::context::Worker;
use crate::error::Error;
use crate::job::Job;
use crate::nic::Command;
use crate::nic::staged::{Slot, ToPipeline};
use crate::places::{Poller, spot};
use crate::types::PushPull;
use bps_engine::base::{DType, Operation, Rank};
use bps_engine::config::Config;
use bps_engine::harness::{self, Idler};
use bps_engine::mem::Budget;
use bps_engine::proto::messages::Declaration;
use bps_engine::ring::Mpsc;
use bps_engine::trace::log;
use bps_engine::transport::Waker;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The tensor by which the ranks tell each other.
const NAME: &str = "byteps: the GPUs of the job";
/// Bytes of a rank's row.
const ROW: usize = 512;
/// Slots in each direction: so many bytes, but not fewer than so many slots.
const SLOTS_BYTES: usize = 16 << 20;
const SLOTS_MIN: usize = 8;
/// Messages that may wait for the pipeline before the NIC loop keeps them.
const INBOX: usize = 4096;
/// Tracks: where gradients are waited for, down, up.
const TRACKS: usize = 3;
/// How long all ranks may take to hear why a GPU can't be used, before this one ends.
const HEARD: Duration = Duration::from_secs(5);
/// How often it looks meanwhile.
const LOOK: Duration = Duration::from_millis(1);
/// The first byte of a row.
const OK: u8 = 1;
const FAILED: u8 = 2;

/// What a rank tells of its GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Row {
    /// Or why it has none.
    gpu: Result<Gpu, String>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Gpu {
    uuid: [u8; 16],
    /// 0 where NCCL is not needed.
    nccl: u32,
    /// The first rank that reduces with this one: ranks that have the same are a host.
    first: Rank,
    /// The communicator's identity, of the first rank of a host.
    id: [u8; 128],
}

impl Row {
    fn encode(&self, row: &mut [u8]) {
        match &self.gpu {
            Ok(gpu) => {
                row[0] = OK;
                row[1..17].copy_from_slice(&gpu.uuid);
                row[17..21].copy_from_slice(&gpu.nccl.to_le_bytes());
                row[21..25].copy_from_slice(&gpu.first.0.to_le_bytes());
                row[25..153].copy_from_slice(&gpu.id);
            }
            Err(text) => {
                row[0] = FAILED;
                let mut end = text.len().min(ROW - 3);
                while !text.is_char_boundary(end) {
                    end -= 1;
                }
                let length = u16::try_from(end).unwrap_or(0);
                row[1..3].copy_from_slice(&length.to_le_bytes());
                row[3..3 + end].copy_from_slice(&text.as_bytes()[..end]);
            }
        }
    }

    fn decode(row: &[u8]) -> Row {
        let gpu = match row[0] {
            OK => {
                let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| row[at + i]));
                let (nccl, first) = (word(17), Rank(word(21)));
                let mut gpu = Gpu { uuid: [0; 16], nccl, first, id: [0; 128] };
                gpu.uuid.copy_from_slice(&row[1..17]);
                gpu.id.copy_from_slice(&row[25..153]);
                Ok(gpu)
            }
            _ => {
                let end = 3 + usize::from(u16::from_le_bytes([row[1], row[2]]));
                let text = row.get(3..end).unwrap_or_default();
                Err(String::from_utf8_lossy(text).into_owned())
            }
        };
        Row { gpu }
    }
}

/// Opens the GPU of this number for a rank of a job of several, and starts its pipeline.
pub(crate) fn open(
    worker: &Worker,
    job: &Job,
    gpu: &Result<(Device, EventPool), GpuError>,
    config: &Config,
) -> Result<(), Error> {
    let mut ranks = job.group().to_vec();
    let has_peers = ranks.len() > 1;
    ranks.sort_unstable();
    let rank = worker.rank();
    let first = ranks.first().copied().unwrap_or(Rank(rank));
    let begun = gpu.clone().and_then(|(device, events)| {
        let nccl = match has_peers {
            true => Some(Nccl::load(config.nccl_library.as_deref())?),
            false => None,
        };
        let id = match &nccl {
            Some(nccl) if first == Rank(rank) => nccl.unique_id()?,
            _ => [0; 128],
        };
        Ok((device, events, nccl, id))
    });
    let told = begun.as_ref().map_err(ToString::to_string).map(|(device, _, nccl, id)| Gpu {
        uuid: device.uuid(),
        nccl: nccl.as_ref().map_or(0, Nccl::version),
        first,
        id: *id,
    });
    let own = Row { gpu: told };
    let agreed = agree(&tell_all(worker, &own)?, rank);
    if agreed.is_err() {
        // Who ended now would end others before they have heard why.
        let _ = worker.barrier(Some(HEARD));
    }
    let id = agreed?;
    let (device, events, nccl, _) = begun.map_err(start)?;
    let rank = Rank(rank);
    let opened = meet(job, &device, nccl.as_ref(), &id, (rank, ranks), config)
        .and_then(|host| begin(job, &device, &events, host, rank, config));
    if let Err(error) = opened {
        // If the job is over, that is why NCCL was given up.
        if let Some(over) = job.over.get() {
            return Err(over.clone());
        }
        // All others wait for this rank, in NCCL or below.
        job.command(Command::GpuFailed { message: error.to_string() });
        job.wake();
        let told = Instant::now();
        while !job.nic_ended.load(Ordering::Acquire) && told.elapsed() < HEARD {
            std::thread::sleep(LOOK);
        }
        return Err(start(error));
    }
    // A NIC loop learns of its pipeline before it sends this row, since both come to it through one
    // queue: so no rank hears of another's tensors before its own pipeline is there.
    tell_all(worker, &own).map(drop)
}

/// The communicator of a host of several ranks, of which one is this.
fn meet(
    job: &Job,
    device: &Device,
    nccl: Option<&Nccl>,
    id: &[u8; 128],
    (own, ranks): (Rank, Vec<Rank>),
    config: &Config,
) -> Result<Option<Host>, GpuError> {
    let Some(nccl) = nccl else { return Ok(None) };
    let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    let place = ranks.iter().position(|rank| *rank == own).unwrap_or(0);
    let (size, patience) = (number(ranks.len()), config.start_timeout);
    let is_wanted = || !job.nic_ended.load(Ordering::Acquire);
    let comm = nccl.comm(device, id, size, number(place), None, patience, is_wanted)?;
    let stream = Stream::new(device)?;
    log::info!("{}: {} GPUs on this host", nccl.describe(), ranks.len());
    let group_size = config.nccl_group_size as usize;
    Ok(Some(Host { comm, stream, ranks, group_size, patience }))
}

fn start(error: GpuError) -> Error {
    Error::Start(error.to_string())
}

/// What every rank says of its GPU, in the order of ranks.
fn tell_all(worker: &Worker, own: &Row) -> Result<Vec<Row>, Error> {
    let size = worker.size() as usize;
    let mut rows = vec![0u8; ROW * size];
    own.encode(&mut rows[worker.rank() as usize * ROW..][..ROW]);
    let declaration = Declaration {
        name: NAME.into(),
        dtype: DType::U8,
        count: rows.len() as u64,
        operation: Operation::Sum,
        device: false,
    };
    let ids = worker.declare(std::slice::from_ref(&declaration))?;
    let at = rows.as_mut_ptr();
    let item = PushPull { tensor: ids[0], source: at.cast_const(), target: at, priority: i64::MAX };
    // SAFETY: `rows` is of the declared size and lives until the handle is done; a rank that does
    // not come ends the job by a deadline of its own, which ends the handle.
    let handles = unsafe { worker.push_pull(&[item]) }?;
    handles[0].wait(None)?;
    Ok(rows.chunks(ROW).map(Row::decode).collect())
}

/// Whether all can go on together, which all find alike; the identity of this rank's communicator.
fn agree(all: &[Row], rank: u32) -> Result<[u8; 128], Error> {
    let mut gpus: Vec<&Gpu> = Vec::new();
    for (rank, row) in all.iter().enumerate() {
        let gpu = row.gpu.as_ref();
        let gpu =
            gpu.map_err(|text| Error::Start(format!("rank {rank} can't use its GPU: {text}")))?;
        for (other, known) in gpus.iter().enumerate().filter(|(_, known)| known.first == gpu.first)
        {
            if known.uuid == gpu.uuid {
                return Err(Error::Start(format!(
                    "rank {other} and rank {rank} are on one host and use the same GPU: give each \
                     rank its own, as by torch.cuda.set_device(bps.local_rank())"
                )));
            }
            if known.nccl != gpu.nccl {
                return Err(Error::Start(format!(
                    "rank {other} and rank {rank} are on one host and have NCCL {} and {}: give \
                     all ranks of a host the same",
                    nccl_version(known.nccl),
                    nccl_version(gpu.nccl)
                )));
            }
        }
        gpus.push(gpu);
    }
    Ok(gpus[gpus[rank as usize].first.0 as usize].id)
}

/// Makes the slots and starts the thread.
fn begin(
    job: &Job,
    device: &Device,
    events: &EventPool,
    host: Option<Host>,
    rank: Rank,
    config: &Config,
) -> Result<(), GpuError> {
    let system = |what: &str, error: std::io::Error| GpuError::Memory {
        ordinal: device.ordinal(),
        why: format!("no {what}: {error}"),
    };
    let slot_bytes = config.partition_bytes as usize;
    let slots = (SLOTS_BYTES / slot_bytes).max(SLOTS_MIN).max(job.lanes() + 2);
    let words = (TRACKS * WORD_BYTES).next_multiple_of(4096);
    let bytes = words + 2 * slots * slot_bytes;
    let spot = spot(config, Poller::Gpu(device.pci_bus_id()));
    let memory = Pinned::new(device, bytes, spot.memory_node)?;
    let mut budget = Budget::new();
    let name = format!("pinned slots of GPU {}", device.ordinal());
    budget.add(&name, 2 * slots as u64, slot_bytes as u64);
    budget.print();
    let slot = |index: usize| Slot {
        number: u32::try_from(index).unwrap_or(u32::MAX),
        at: memory.as_ptr().wrapping_add(words + index * slot_bytes),
    };
    // SAFETY: the pipeline holds the memory and drops it last; each track has a word of its own.
    let track = |index| unsafe { Track::new(device, &memory, index) };
    let tracks: [Track; TRACKS] = [track(0)?, track(1)?, track(2)?];
    let marks = [Event::new(device)?, Event::new(device)?];
    let inbox = Mpsc::new(INBOX);
    let waker = Waker::new().map_err(|error| system("eventfd", error))?;
    let under_way = Arc::new(AtomicUsize::new(0));
    let to_land: Vec<Slot> = (slots..2 * slots).map(slot).collect();
    let parts = Parts {
        tracks,
        host,
        marks,
        events: events.clone(),
        slots: (0..slots).map(slot).collect(),
        memory,
        slot_bytes,
        rank,
        inbox: inbox.clone(),
        waker: waker.clone(),
        commands: job.commands.clone(),
        nic_waker: job.nic_waker.clone(),
        nic_ended: Arc::clone(&job.nic_ended),
        job_over: Arc::clone(&job.over),
        under_way: Arc::clone(&under_way),
        stall_report: config.stall_report,
    };
    let (device, idle) = (device.clone(), config.idle);
    let (cpu, claims) = (spot.cpu, spot.claims);
    let body = move || {
        let _claims = claims;
        if let Err(error) = device.make_current() {
            log::error!("{error}");
        }
        Pipeline::new(parts).run(Idler::new(idle, crate::start::spin()));
    };
    let thread = harness::spawn("bps-gpu", cpu, body);
    job.keep(thread.map_err(|error| system("thread", error))?);
    job.command(Command::OpenPipeline(ToPipeline { staged: inbox, waker, under_way }));
    for slot in to_land {
        job.command(Command::Land(slot));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(uuid: u8, nccl: u32, first: u32) -> Row {
        let (uuid, id) = ([uuid; 16], [uuid; 128]);
        Row { gpu: Ok(Gpu { uuid, nccl, first: Rank(first), id }) }
    }

    #[test]
    fn what_ranks_say_survives_the_row() {
        let long = "é".repeat(400);
        for row in [gpu(7, 22_809, 5), Row { gpu: Err("no driver".into()) }] {
            let mut bytes = [0u8; ROW];
            row.encode(&mut bytes);
            assert_eq!(Row::decode(&bytes), row);
        }
        let mut bytes = [0u8; ROW];
        Row { gpu: Err(long.clone()) }.encode(&mut bytes);
        assert_eq!(Row::decode(&bytes).gpu, Err("é".repeat((ROW - 3) / 2)));
    }

    #[test]
    fn ranks_agree_or_all_hear_why_not() {
        let all = [gpu(1, 0, 0), gpu(1, 0, 1), gpu(3, 5, 2), gpu(4, 5, 2)];
        assert_eq!(agree(&all, 3), Ok([3; 128]));
        assert_eq!(agree(&all, 1), Ok([1; 128]));
        let text = |all: &[Row]| agree(all, 0).unwrap_err().to_string();
        let same = [gpu(1, 0, 0), gpu(1, 0, 1), gpu(3, 5, 2), gpu(3, 5, 2)];
        assert!(text(&same).contains("rank 2 and rank 3 are on one host and use the same GPU"));
        let other = [gpu(1, 0, 0), gpu(1, 0, 1), gpu(3, 22_707, 2), gpu(4, 22_808, 2)];
        assert!(text(&other).contains("NCCL 2.27.7 and 2.28.8"), "{}", text(&other));
        let broken = [gpu(1, 0, 0), Row { gpu: Err("no driver".into()) }, gpu(3, 5, 2)];
        assert!(text(&broken).contains("rank 1 can't use its GPU: no driver"));
    }
}
