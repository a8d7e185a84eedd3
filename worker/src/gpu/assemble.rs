//! A pipeline with all that belongs to it: streams, slots, and the queues between it and the NIC
//! loop. A thread is none of it: who assembles one steps it.

use super::direct::Direct;
use super::order_lanes::OrderLanes;
use super::pipeline::{Host, Parts, Pipeline, Staged};
use super::slots::Slots;
use super::staging::StagingMemory;
use crate::base::error::Error;
use crate::cuda::{Comm, Device, Event, EventPool, GpuError, Track, WORD_BYTES};
use crate::host::switches::Switches;
use crate::rounds::handover::{GpuInbox, GpuThread};
use bps_engine::base::{Rank, word};
use bps_engine::ring::Mpsc;
use bps_engine::transport::Waker;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Tracks: where gradients are waited for, down, up, and the host's collectives; down and up of
/// tensors with memory of their own.
const TRACKS: usize = 6;

/// What a pipeline is made of.
pub struct Assembly {
    /// The rank's GPU.
    pub device: Device,
    /// Events of that GPU.
    pub events: EventPool,
    /// Joins the ranks of this rank's PCIe switch, if the host has several ranks, with the lanes
    /// over which they agree on the order.
    pub host: Option<(Comm, OrderLanes)>,
    /// Wakes the pipeline; that of those lanes, if there are some.
    pub waker: Waker,
    /// Whose pipeline it is.
    pub rank: Rank,
    /// The ranks that reduce with this one, and itself.
    pub switches: Switches,
    /// Whether sums go through servers.
    pub has_servers: bool,
    /// Slots in each pool.
    pub slots: usize,
    /// Bytes of each: parts of tensors are as large, at most.
    pub slot_bytes: usize,
    /// Some ranks of the host own all tensors on GPUs.
    pub roots: bool,
    /// Rows in one group of NCCL's calls, at most.
    pub group_size: usize,
    /// How long NCCL may take to enqueue a batch, which other ranks can delay.
    pub patience: Duration,
    /// A round that waits longer for a rank of the host is reported.
    pub stall_report: Duration,
    /// Messages that may wait for the pipeline before the NIC loop keeps them, and the other way
    /// round.
    pub inbox: usize,
    /// Bytes of memory that tensors have of their own, at most, where the rank is alone on its host
    /// and nothing in [`Direct`] speaks against it.
    pub staging: usize,
    /// Whether these keep what was sent, and what came last, for servers that take others' place.
    pub keeps: bool,
    /// Where the slots are to be.
    pub numa_node: Option<u32>,
    /// Wakes the NIC loop.
    pub nic_waker: Waker,
    /// It has ended.
    pub nic_ended: Arc<AtomicBool>,
    /// Why, if not in good order.
    pub job_over: Arc<OnceLock<Error>>,
    /// Rounds of tensors of the host that are on this GPU and were not copied down.
    pub bouncing: Arc<AtomicUsize>,
}

/// A pipeline, and what its NIC loop is to be given.
pub struct Assembled {
    /// It has its first step before it.
    pub pipeline: Pipeline,
    /// For callers.
    pub inbox: GpuInbox,
    /// The first that the NIC loop is told of it.
    pub to: GpuThread,
    /// Slots in pinned memory of the host, in all pools.
    pub pinned: usize,
}

impl Assembly {
    /// Takes the memory and makes the streams.
    ///
    /// # Errors
    /// What the driver or the kernel refuses.
    pub fn assemble(self) -> Result<Assembled, GpuError> {
        self.assemble_with(Direct::default())
    }

    /// As [`assemble`](Self::assemble), with slots in the GPU's memory.
    pub(crate) fn assemble_with(self, direct: Direct) -> Result<Assembled, GpuError> {
        let device = &self.device;
        let words = (TRACKS * WORD_BYTES).next_multiple_of(4096);
        let pools = (self.has_servers, self.switches.count() > 1);
        let size = (self.slots, self.slot_bytes);
        let Slots { to_send, to_land, reach, memory, pinned, direct } =
            Slots::lay(device, size, pools, direct, self.numa_node, words)?;
        // SAFETY: the pipeline holds the memory and drops it behind the tracks; each track has a
        // word of its own.
        let track = |index| unsafe { Track::new(device, &memory, index) };
        let tracks = [track(0)?, track(1)?, track(2)?];
        let host = match self.host {
            Some((comm, lanes)) => Some(Host {
                comm,
                lanes,
                track: track(3)?,
                switches: self.switches,
                roots: self.roots,
                group_size: self.group_size,
                patience: self.patience,
            }),
            None => None,
        };
        let staged = match self.staging {
            bytes if bytes > 0 && host.is_none() && self.has_servers => {
                // Numbers behind those of the slots, of which there are four pools.
                let number = word(4 * self.slots);
                let memory =
                    StagingMemory::new(device, self.numa_node, (bytes, self.keeps), number);
                Some(Staged::new(memory, [track(4)?, track(5)?]))
            }
            _ => None,
        };
        let marks = [Event::new(device)?, Event::new(device)?];
        let inbox = GpuInbox::new(self.inbox, self.waker.clone());
        let outbox = Mpsc::new(self.inbox);
        let to = GpuThread {
            inbox: inbox.clone(),
            outbox: outbox.clone(),
            to_land,
            slots: reach,
            staged: staged.as_ref().map(Staged::progress),
        };
        let pipeline = Pipeline::new(Parts {
            tracks,
            host,
            marks,
            events: self.events,
            slots: to_send,
            memory,
            direct,
            staged,
            slot_bytes: self.slot_bytes,
            rank: self.rank,
            inbox: inbox.clone(),
            waker: self.waker,
            outbox,
            nic_waker: self.nic_waker,
            nic_ended: self.nic_ended,
            job_over: self.job_over,
            bouncing: self.bouncing,
            stall_report: self.stall_report,
        });
        Ok(Assembled { pipeline, inbox, to, pinned })
    }
}
