//! Slots in the memory of the GPU, where RDMA devices reach that by themselves (GPUDirect RDMA):
//! what is sent and what comes does not pass the memory of the host.
//!
//! The slots are the engine's own, and parts are copied between them and tensors within the GPU. To
//! register tensors would save those copies, which take a hundredth of the time that a network of
//! 100 Gbit/s takes; but a registration outlives what a framework's allocator does with the memory.
//!
//! Invariant: nothing relies on a device before a trial has shown that bytes come where they
//! belong, and no slower than by the memory of the host.

use super::{Device, Event, GpuError, Stream};
use crate::job::Job;
use bps_engine::config::{Config, GpuDirect};
use bps_engine::trace::log;
use bps_engine::transport::rdma::{self, Rails, Speeds};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS` and what it may have:
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST`.
const FLUSH_OPTIONS: u32 = 117;
const FLUSH_BY_HOST: c_int = 1;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`, and from where on work that is enqueued
/// after a write was seen to be over sees it: `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`.
const WRITES_ORDERING: u32 = 118;
const ORDERED: c_int = 100;
/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
const DMA_BUF_SUPPORTED: u32 = 124;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DMA_BUF: u32 = 1;
/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
const SYNC_MEMOPS: u32 = 6;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX` and
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER`.
const FLUSH_TARGET: u32 = 0;
const FLUSH_TO_OWNER: u32 = 100;
/// What the driver maps at once; what is exported begins and ends there.
const GRANULE: usize = 2 << 20;
/// Bytes that a trial moves at once, at most.
const TRIAL_BYTES: usize = 512 << 10;
/// How long a copy of a trial may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// What of the speed of the host's memory a device must have at the GPU's. That the GPU copies
/// nothing to the host and back does not show in a trial, and other ranks that try at the same time
/// do; a way across sockets has far less.
const SHARE_MIN: f64 = 0.75;

/// Memory of a GPU that the engine has taken.
struct DeviceMemory {
    device: Device,
    address: u64,
}

impl DeviceMemory {
    fn new(device: &Device, bytes: usize) -> Result<DeviceMemory, GpuError> {
        let address = device.alloc(bytes.next_multiple_of(GRANULE))?;
        Ok(DeviceMemory { device: device.clone(), address })
    }

    /// What other devices are told it by.
    fn export(&self, bytes: usize) -> Result<OwnedFd, GpuError> {
        let mut fd: c_int = -1;
        self.device.with_context(|cuda| {
            let (yes, bytes) = (1u32, bytes.next_multiple_of(GRANULE));
            // SAFETY: it reads a number of the size that this attribute has; the memory is ours.
            let code = unsafe {
                (cuda.call.cuPointerSetAttribute)(
                    (&raw const yes).cast(),
                    SYNC_MEMOPS,
                    self.address,
                )
            };
            cuda.check("cuPointerSetAttribute", code)?;
            let export = cuda.call.cuMemGetHandleForAddressRange;
            // SAFETY: it writes one descriptor; the range is what was allocated.
            let code =
                unsafe { export((&raw mut fd).cast::<c_void>(), self.address, bytes, DMA_BUF, 0) };
            cuda.check("cuMemGetHandleForAddressRange", code)
        })?;
        // SAFETY: the driver has made the descriptor for the caller to close.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Its address, as devices and frames name it.
    fn pointer(&self) -> *mut u8 {
        let address = usize::try_from(self.address).expect("addresses have as many bits");
        std::ptr::without_provenance_mut(address)
    }

    fn put(&self, bytes: &[u8]) -> Result<(), GpuError> {
        self.copy(|stream| {
            // SAFETY: the trial's memory is larger, and `copy` waits for the copy.
            unsafe { stream.copy_to_device(self.address, bytes.as_ptr(), bytes.len()) }
        })
    }

    fn get(&self, length: usize) -> Result<Vec<u8>, GpuError> {
        let mut bytes = vec![0; length];
        self.copy(|stream| {
            // SAFETY: as above.
            unsafe { stream.copy_to_host(bytes.as_mut_ptr(), self.address, length) }
        })?;
        Ok(bytes)
    }

    fn copy(&self, copy: impl FnOnce(&Stream) -> Result<(), GpuError>) -> Result<(), GpuError> {
        let (stream, done) = (Stream::new(&self.device)?, Event::new(&self.device)?);
        self.device.with_context(|_| copy(&stream).and_then(|()| done.record(&stream)))?;
        done.wait(PATIENCE)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`. No device has it registered any more, and the GPU is done
        // with it, or this is leaked (`Pipeline::end`).
        let _ = unsafe { self.device.free(self.address) };
    }
}

/// A pool of slots in the memory of the GPU.
pub(super) struct GpuSlots {
    /// For the NIC loop, which has it unregistered before the pipeline lets the memory go.
    pub(super) registered: Option<rdma::GpuMemory>,
    memory: DeviceMemory,
}

impl GpuSlots {
    fn new(
        device: &Device,
        rails: &Rails,
        bytes: usize,
        is_for_landing: bool,
    ) -> Result<GpuSlots, String> {
        let memory = DeviceMemory::new(device, bytes).map_err(|error| error.to_string())?;
        let buffer = memory.export(bytes).map_err(|error| error.to_string())?;
        let at = (memory.pointer(), bytes);
        let registered = rdma::GpuMemory::register(rails, buffer.as_fd(), 0, at, is_for_landing);
        Ok(GpuSlots { memory, registered: Some(registered.map_err(|error| error.to_string())?) })
    }

    /// The first byte, which no processor can follow.
    pub(super) fn base(&self) -> *mut u8 {
        self.memory.pointer()
    }
}

/// What of a rank's slots is in the memory of its GPU.
#[derive(Default)]
pub(super) struct Direct {
    /// To send from.
    pub(super) sends: Option<GpuSlots>,
    /// For what servers send.
    pub(super) answers: Option<GpuSlots>,
    /// What devices have written must be flushed before the GPU reads it.
    must_flush: bool,
}

impl Direct {
    /// Slots in the GPU's memory, `bytes` each way, as far as devices reach it well.
    ///
    /// # Errors
    /// [`GpuError::Direct`] if it is demanded and can't be.
    pub(super) fn find(
        job: &Job,
        device: &Device,
        config: &Config,
        bytes: usize,
    ) -> Result<Direct, GpuError> {
        let (is_demanded, rails) = match (config.gpudirect, job.rails()) {
            (GpuDirect::None, _) | (GpuDirect::Auto, None) => return Ok(Direct::default()),
            (GpuDirect::Auto, Some(rails)) => (false, rails),
            (GpuDirect::Demand, Some(rails)) => (true, rails),
            (GpuDirect::Demand, None) => {
                let why = "this rank has no RDMA lane to a server".into();
                return Err(GpuError::Direct { ordinal: device.ordinal(), why });
            }
        };
        let found = possible(job, config).and_then(|()| rails.clone()).and_then(|rails| {
            let (mut direct, speeds) = Direct::try_all(device, &rails, bytes)?;
            if !is_demanded {
                direct.keep_fast(&speeds)?;
            }
            Ok((direct, speeds))
        });
        let ordinal = device.ordinal();
        match found {
            Ok((direct, speeds)) => {
                log::info!("{}", direct.line(ordinal, &speeds, bytes));
                Ok(direct)
            }
            Err(why) if is_demanded => Err(GpuError::Direct { ordinal, why }),
            Err(why) => {
                log::info!(
                    "GPUDirect RDMA: not used, GPU {ordinal} sends and receives by slots of the \
                     host's memory: {why}"
                );
                Ok(Direct::default())
            }
        }
    }

    /// Slots for both ways, and what every port made of them.
    fn try_all(
        device: &Device,
        rails: &Rails,
        bytes: usize,
    ) -> Result<(Direct, Vec<Speeds>), String> {
        let text = |error: GpuError| error.to_string();
        let attribute = |which| device.attribute(which).map_err(text);
        if attribute(DMA_BUF_SUPPORTED)? == 0 {
            return Err("the GPU's driver exports no memory as dma-buf (the open kernel modules \
                        do)"
            .into());
        }
        let must_flush = attribute(WRITES_ORDERING)? < ORDERED;
        if must_flush && attribute(FLUSH_OPTIONS)? & FLUSH_BY_HOST == 0 {
            return Err(
                "the GPU neither orders what devices write to it nor lets it be flushed".into()
            );
        }
        let slots = |is_for_landing| GpuSlots::new(device, rails, bytes, is_for_landing);
        let (sends, answers) = (slots(false)?, slots(true)?);
        let pattern = pattern(TRIAL_BYTES.min(bytes));
        sends.memory.put(&pattern).map_err(text)?;
        let mut speeds = Vec::new();
        for port in 0..rails.len() {
            answers.memory.put(&vec![0; pattern.len()]).map_err(text)?;
            let (Some(from), Some(to)) = (&sends.registered, &answers.registered) else {
                unreachable!("they have just been registered");
            };
            let tried = rdma::try_gpu(rails, port, (from, to), &pattern);
            let tried = tried.map_err(|error| error.to_string())?;
            if must_flush {
                device.with_context(|_| flush(device)).map_err(text)?;
            }
            if answers.memory.get(tried.bytes).map_err(text)? != pattern[..tried.bytes] {
                return Err(format!("what {} writes to the GPU does not come there", tried.port));
            }
            speeds.push(tried);
        }
        Ok((Direct { sends: Some(sends), answers: Some(answers), must_flush }, speeds))
    }

    /// Gives back what is slower than by the host's memory.
    fn keep_fast(&mut self, speeds: &[Speeds]) -> Result<(), String> {
        let (reads, writes) = fast(speeds);
        self.sends = self.sends.take().filter(|_| reads);
        self.answers = self.answers.take().filter(|_| writes);
        if reads || writes { Ok(()) } else { Err(format!("it is slower ({})", words(speeds))) }
    }

    /// What is printed of it.
    fn line(&self, ordinal: u32, speeds: &[Speeds], bytes: usize) -> String {
        let (what, pools) = match (&self.sends, &self.answers) {
            (Some(_), Some(_)) => ("contributions and results", 2),
            (Some(_), None) => ("contributions, but no results, which is slower,", 1),
            _ => ("results, but no contributions, which is slower,", 1),
        };
        let mebibytes = (pools * bytes) as f64 / f64::from(1 << 20);
        format!(
            "GPUDirect RDMA: {what} go between GPU {ordinal} and the network without the host's \
             memory ({}); slots take {mebibytes:.1} MiB of the GPU's",
            words(speeds)
        )
    }

    /// Lets the GPU see what devices have written. The thread has the context.
    pub(super) fn flush(&self, device: &Device) -> Result<(), GpuError> {
        if self.must_flush { flush(device) } else { Ok(()) }
    }
}

/// Why the memory of the host is needed, if it is.
fn possible(job: &Job, config: &Config) -> Result<(), String> {
    if config.payload_checksum {
        return Err("checksums (BPS_PAYLOAD_CHECKSUM) are of what a processor has read".into());
    }
    if job.switches().count() > 1 {
        return Err(
            "sums of PCIe switches (BYTEPS_PCIE_SWITCH_SIZE) are added by processors".into()
        );
    }
    Ok(())
}

/// Whether every port reads the GPU's memory about as fast as the host's, and writes it so.
fn fast(speeds: &[Speeds]) -> (bool, bool) {
    let all = |speed: fn(&Speeds) -> f64| {
        speeds.iter().all(|tried| speed(tried) >= SHARE_MIN * tried.host)
    };
    (all(|tried| tried.reads), all(|tried| tried.writes))
}

fn flush(device: &Device) -> Result<(), GpuError> {
    let cuda = device.cuda();
    // SAFETY: it takes two numbers.
    let code = unsafe { (cuda.call.cuFlushGPUDirectRDMAWrites)(FLUSH_TARGET, FLUSH_TO_OWNER) };
    cuda.check("cuFlushGPUDirectRDMAWrites", code)
}

/// Bytes of which no two neighbouring ranges are alike.
fn pattern(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_be_bytes()[0]
    };
    (0..bytes).map(next).collect()
}

fn words(speeds: &[Speeds]) -> String {
    let gigabytes = |rate: f64| rate / 1e9;
    let one = |tried: &Speeds| {
        format!(
            "{}: reads it at {:.2} GB/s, writes it at {:.2}, and the host's memory at {:.2}",
            tried.port,
            gigabytes(tried.reads),
            gigabytes(tried.writes),
            gigabytes(tried.host)
        )
    };
    speeds.iter().map(one).collect::<Vec<String>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speeds(host: f64, reads: f64, writes: f64) -> Speeds {
        Speeds { port: "mlx5_0 port 1".into(), bytes: 1 << 20, host, reads, writes }
    }

    #[test]
    fn a_way_is_used_if_it_is_fast_at_every_port_and_the_line_has_all_speeds() {
        let (good, one_way) = (speeds(10e9, 9.1e9, 10.2e9), speeds(10e9, 1e9, 9.9e9));
        let slow = speeds(10e9, 11e9, 7.4e9);
        assert_eq!(fast(std::slice::from_ref(&good)), (true, true));
        assert_eq!(fast(&[good.clone(), one_way.clone()]), (false, true));
        assert_eq!(fast(&[one_way.clone(), slow]), (false, false));
        assert_eq!(
            words(&[good, one_way]),
            "mlx5_0 port 1: reads it at 9.10 GB/s, writes it at 10.20, and the host's memory at \
             10.00; mlx5_0 port 1: reads it at 1.00 GB/s, writes it at 9.90, and the host's memory \
             at 10.00"
        );
    }

    #[test]
    fn ranges_of_the_pattern_differ() {
        let bytes = pattern(1 << 16);
        let mut pages: Vec<&[u8]> = bytes.chunks(256).collect();
        pages.sort_unstable();
        pages.dedup();
        assert_eq!(pages.len(), 256);
    }
}
