//! Whether, and how fast, the devices of a thread reach memory of a GPU by themselves (GPUDirect
//! RDMA): tried before anything relies on it.
//!
//! Whether a device may reach a GPU is decided by drivers and kernel, and how fast by where both
//! hang on PCIe: across sockets it can be a tenth of what host memory allows. Neither can be asked
//! for. So each port writes to itself, from the host's memory and from the GPU's and back, and what
//! came is compared.

use super::device::{Ports, QueuePair, Remote};
use super::error::status_text;
use super::ffi;
use super::memory::{GpuMemory, Region};
use super::rail::{Queue, Rail};
use super::{LOST, RdmaError};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Writes that are timed together.
const WRITES: usize = 4;
/// How often each way is timed, in turn with the others; the fastest counts, since all that
/// disturbs a write makes it slower.
const ROUNDS: usize = 3;
/// How long the writes of one way may take; a path that answers nothing is given up by the device
/// before.
const WITHIN: Duration = Duration::from_secs(2);
/// What the host's memory holds before the device writes to it.
const BLANK: u8 = 0;

/// What a port moved by itself; all rates in bytes a second.
#[derive(Clone, PartialEq, Debug)]
pub struct Speeds {
    /// Which.
    pub port: String,
    /// Of the pattern, at once.
    pub bytes: usize,
    /// From the host's memory to the host's memory.
    pub host: f64,
    /// From the GPU's to the host's.
    pub reads: f64,
    /// From the host's to the GPU's.
    pub writes: f64,
}

/// Has this one of the ports write `pattern` from the host's memory to it, from the front of
/// `from`, where it stands already, to the host, and from the host to the front of `to`. What came
/// to the host is compared here; the caller looks at the GPU.
///
/// # Errors
/// A write fails or is not over in time, or other bytes came than the GPU has.
///
/// # Panics
/// The memory is not registered with this port, or `to` is not for landing.
pub fn try_gpu(
    ports: &Ports,
    port: usize,
    (from, to): (&GpuMemory, &GpuMemory),
    pattern: &[u8],
) -> Result<Speeds, RdmaError> {
    let rail = &ports.rails().all()[port];
    let (Some(gpu_from), Some(gpu_to)) = (&from.regions[port], &to.regions[port]) else {
        panic!("registered with this port");
    };
    assert!(to.is_for_landing, "nobody may write there");
    let bytes = pattern.len().min(rail.message_bytes);
    let (source, target) = (Region::new(rail, bytes, false)?, Region::new(rail, bytes, true)?);
    let around = Loop::new(rail)?;
    let (at_source, at_target) = (source.at(0, bytes), target.at(0, bytes));
    // SAFETY: both regions have so many bytes and are not in use yet.
    unsafe { at_source.copy_from_nonoverlapping(pattern.as_ptr(), bytes) };
    let fail = |what| RdmaError::Direct { port: rail.port().to_string(), what };
    let mut best = [0f64; 3];
    for _ in 0..ROUNDS {
        let ways = [
            ("the host to the host", &source, &target),
            ("the GPU to the host", gpu_from, &target),
            ("the host to the GPU", &source, gpu_to),
        ];
        for (best, (way, from, to)) in best.iter_mut().zip(ways) {
            // SAFETY: the device is done with what it wrote before.
            unsafe { at_target.write_bytes(BLANK, bytes) };
            let taken = around.write(from, to, bytes);
            let seconds = taken
                .map_err(|why| fail(format!("its write to itself, from {way}, failed: {why}")))?
                .as_secs_f64();
            *best = best.max((WRITES * bytes) as f64 / seconds.max(1e-9));
            // SAFETY: the write has completed, so the device writes no more; the region has `bytes`
            // bytes, all initialized by the blanks, and lives until the end of the function.
            let came = unsafe { std::slice::from_raw_parts(at_target.cast_const(), bytes) };
            if std::ptr::eq(to, &raw const target) && came != &pattern[..bytes] {
                return Err(fail(format!("other bytes come from {way} than are there")));
            }
        }
    }
    let [host, reads, writes] = best;
    Ok(Speeds { port: rail.port().to_string(), bytes, host, reads, writes })
}

/// A connection of a port to itself.
struct Loop {
    // They go before their queue.
    near: QueuePair,
    _far: QueuePair,
    done: Completions,
}

/// A queue that no other thread polls.
struct Completions {
    rail: Arc<Rail>,
    queue: Queue,
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: made by `Loop::new`, whose pairs are gone; destroyed once.
        unsafe { (self.rail.verbs.destroy_cq)(self.queue.as_ptr()) };
    }
}

impl Loop {
    fn new(rail: &Arc<Rail>) -> Result<Loop, RdmaError> {
        let address = rail.port().addresses[0];
        // SAFETY: the context is the rail's, and no channel is told.
        let queue = unsafe { Queue::new(rail.verbs, rail.context, std::ptr::null_mut()) };
        let queue = queue.ok_or_else(|| RdmaError::last("ibv_create_cq", rail.port()))?;
        let done = Completions { rail: Arc::clone(rail), queue };
        let pair = || QueuePair::with_queues(rail, [&done.queue; 2], WRITES, 1);
        let (near, far) = (pair()?, pair()?);
        for (one, other) in [(&near, &far), (&far, &near)] {
            let remote = Remote {
                number: other.number(),
                sequence: other.number() & 0xff_ffff,
                mtu: rail.mtu,
                lid: rail.lid,
                gid: address.gid,
            };
            one.connect(&address, one.number() & 0xff_ffff, &remote)?;
        }
        Ok(Loop { near, _far: far, done })
    }

    /// Writes the front of a region to that of another, several times. How long that took, or what
    /// went wrong.
    fn write(&self, from: &Region, to: &Region, bytes: usize) -> Result<Duration, String> {
        let length = u32::try_from(bytes).expect("a trial is short");
        let mut piece = ffi::Sge { addr: from.address(), length, lkey: from.lkey() };
        // SAFETY: a request is numbers and raw pointers, for which zeros are valid.
        let mut request: ffi::SendWr = unsafe { std::mem::zeroed() };
        (request.sg_list, request.num_sge) = (&raw mut piece, 1);
        request.opcode = ffi::WRITE;
        (request.remote_addr, request.rkey) = (to.address(), to.rkey());
        let begun = Instant::now();
        for write in 1..=WRITES {
            if write == WRITES {
                request.send_flags = ffi::SEND_SIGNALED;
            }
            // SAFETY: the request is one, and both regions live until it is over: by its completion
            // or, after an error, by the end of the pair, which comes before theirs.
            match unsafe { self.near.post_send(&raw mut request) } {
                0 => {}
                errno => return Err(io::Error::from_raw_os_error(errno).to_string()),
            }
        }
        // SAFETY: completions are numbers, for which zeros are valid.
        let mut completions: [ffi::Wc; 1] = unsafe { std::mem::zeroed() };
        loop {
            let status = match self.done.queue.take(&self.done.rail, &mut completions) {
                Ok(0) if begun.elapsed() > WITHIN => {
                    return Err(format!("it is not over within {} s", WITHIN.as_secs()));
                }
                Ok(0) => continue,
                Ok(_) => completions[0].status,
                Err(_) => LOST,
            };
            if status != ffi::WC_SUCCESS {
                return Err(format!("RDMA status {status}: {}", status_text(status)));
            }
            return Ok(begun.elapsed());
        }
    }
}
