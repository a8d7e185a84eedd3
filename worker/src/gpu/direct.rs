//! Slots in the memory of the GPU, where RDMA devices reach that by themselves (GPUDirect RDMA):
//! what is sent and what comes does not pass the memory of the host.
//!
//! The slots are the engine's own, and parts are copied between them and tensors within the GPU. To
//! register tensors would save those copies, which take a hundredth of the time that a network of
//! 100 Gbit/s takes; but a registration outlives what a framework's allocator does with the memory.
//!
//! Invariant: nothing relies on a device before a trial has shown that bytes come where they
//! belong and, unless it is demanded, not much slower than by the memory of the host.

use crate::cuda::{Device, Event, GpuError, Stream};
use crate::host::switches::Switches;
use bps_engine::config::{Config, GpuDirect, PayloadChecksum};
use bps_engine::trace::log;
use bps_engine::transport::rdma::{self, Ports, Speeds};
use cudarc::driver::sys::{
    CUGPUDirectRDMAWritesOrdering as Ordering, CUdevice_attribute as Attribute,
    CUflushGPUDirectRDMAWritesOptions as FlushOption,
    CUflushGPUDirectRDMAWritesScope as FlushScope, CUflushGPUDirectRDMAWritesTarget as FlushTarget,
    CUmemRangeHandleType as RangeHandle,
};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// Whether what devices write can be flushed, and in which ways.
const FLUSH_OPTIONS: u32 =
    Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS as u32;
const FLUSH_BY_HOST: c_int =
    FlushOption::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as u32 as c_int;
/// For whom what devices write is in order with what is enqueued after it was seen to be over; the
/// larger, the more: nobody, the GPU itself, all GPUs.
const WRITES_ORDERING: u32 = Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING as u32;
const ORDERED: c_int = Ordering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as u32 as c_int;
/// Whether memory is exported as dma-buf.
const DMA_BUF_SUPPORTED: u32 = Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED as u32;
const DMA_BUF: u32 = RangeHandle::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD as u32;
/// What is flushed, and for whom.
const FLUSH_TARGET: u32 = FlushTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX as u32;
const FLUSH_TO_OWNER: u32 = FlushScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER as u32;
/// What is exported must begin at a page and be whole pages. Drivers map memory in such pieces, and
/// an allocation of whole ones begins with one.
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
            let bytes = bytes.next_multiple_of(GRANULE);
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
            // SAFETY: the GPU's memory is larger. The host's is not pinned, so the call returns
            // when it needs that no more.
            unsafe { stream.copy_to_device(self.address, bytes.as_ptr(), bytes.len()) }
        })
    }

    fn get(&self, length: usize) -> Result<Vec<u8>, GpuError> {
        let mut bytes = vec![0; length];
        self.copy(|stream| {
            // SAFETY: the GPU's memory is larger than `length`, and so is the vector, which is not
            // pinned: the call returns when the bytes are there.
            unsafe { stream.copy_to_host(bytes.as_mut_ptr(), self.address, length) }
        })?;
        Ok(bytes)
    }

    fn copy(&self, copy: impl FnOnce(&Stream) -> Result<(), GpuError>) -> Result<(), GpuError> {
        let (stream, done) = (Stream::new(&self.device)?, Event::new(&self.device)?);
        self.device.with_context(|_| {
            copy(&stream)?;
            done.record(&stream)?;
            done.wait(PATIENCE)
        })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`. No device has it registered any more, since registrations
        // hold it, and the GPU is done with it, or this is leaked (`Pipeline::end`).
        let _ = unsafe { self.device.free(self.address) };
    }
}

/// A pool of slots in the memory of the GPU.
pub(crate) struct GpuSlots {
    /// For the NIC loop; it holds the memory as well.
    pub(crate) registered: Option<rdma::GpuMemory>,
    memory: Arc<DeviceMemory>,
}

impl GpuSlots {
    fn new(
        device: &Device,
        ports: &Ports,
        bytes: usize,
        is_for_landing: bool,
    ) -> Result<GpuSlots, String> {
        let memory = DeviceMemory::new(device, bytes).map_err(|error| error.to_string())?;
        let memory = Arc::new(memory);
        let buffer = memory.export(bytes).map_err(|error| error.to_string())?;
        let (at, kept) = ((memory.pointer(), bytes), Arc::clone(&memory));
        // SAFETY: the buffer was exported from this memory, in its full length, and the
        // registration keeps the memory.
        let registered =
            unsafe { rdma::GpuMemory::register(ports, buffer.as_fd(), at, is_for_landing, kept) };
        Ok(GpuSlots { registered: Some(registered.map_err(|error| error.to_string())?), memory })
    }

    /// The first byte, which no processor can follow.
    pub(crate) fn base(&self) -> *mut u8 {
        self.memory.pointer()
    }
}

/// What of a rank's slots is in the memory of its GPU.
#[derive(Default)]
pub(crate) struct Direct {
    /// To send from.
    pub(crate) sends: Option<GpuSlots>,
    /// For what servers send.
    pub(crate) answers: Option<GpuSlots>,
    /// What devices have written must be flushed before the GPU reads it.
    must_flush: bool,
}

/// What is sought over these ports, or over none for this reason.
#[derive(Debug, PartialEq, Eq)]
struct Sought<P> {
    is_demanded: bool,
    ports: Result<P, String>,
}

impl<P> Sought<P> {
    /// `None` where nothing is.
    ///
    /// # Errors
    /// It is demanded where no lane could use it.
    fn of(how: GpuDirect, ports: Option<Result<P, String>>) -> Result<Option<Sought<P>>, String> {
        match (how, ports) {
            (GpuDirect::None, _) | (GpuDirect::Auto, None) => Ok(None),
            (GpuDirect::Auto, Some(ports)) => Ok(Some(Sought { is_demanded: false, ports })),
            (GpuDirect::Demand, Some(ports)) => Ok(Some(Sought { is_demanded: true, ports })),
            (GpuDirect::Demand, None) => Err("this rank has no RDMA lane to a server".into()),
        }
    }
}

impl Direct {
    /// Slots in the GPU's memory, `bytes` each way, as far as devices reach it well. `ports` are
    /// those over which this rank reaches its servers, or why there are none; `switches` those of
    /// its host.
    ///
    /// # Errors
    /// [`GpuError::Direct`] if it is demanded and can't be.
    pub(crate) fn find(
        ports: Option<Result<Ports, String>>,
        switches: &Switches,
        device: &Device,
        config: &Config,
        bytes: usize,
    ) -> Result<Direct, GpuError> {
        let ordinal = device.ordinal();
        let sought = Sought::of(config.gpudirect, ports);
        let Some(sought) = sought.map_err(|why| GpuError::Direct { ordinal, why })? else {
            return Ok(Direct::default());
        };
        let Sought { is_demanded, ports } = sought;
        let found = possible(switches, config).and(ports).and_then(|ports| {
            let (mut direct, speeds) = Direct::try_all(device, &ports, bytes)?;
            if !is_demanded {
                direct.keep_fast(&speeds)?;
            }
            Ok((direct, speeds))
        });
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
        ports: &Ports,
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
        let slots = |is_for_landing| GpuSlots::new(device, ports, bytes, is_for_landing);
        let (sends, answers) = (slots(false)?, slots(true)?);
        let pattern = pattern(TRIAL_BYTES.min(bytes));
        sends.memory.put(&pattern).map_err(text)?;
        let mut speeds = Vec::new();
        for port in ports.used() {
            answers.memory.put(&vec![0; pattern.len()]).map_err(text)?;
            let (Some(from), Some(to)) = (&sends.registered, &answers.registered) else {
                unreachable!("they have just been registered");
            };
            let tried = rdma::try_gpu(ports, *port, (from, to), &pattern);
            let tried = tried.map_err(|error| error.to_string())?;
            if must_flush {
                device.with_context(|_| flush(device)).map_err(text)?;
            }
            if answers.memory.get(tried.bytes).map_err(text)? != pattern[..tried.bytes] {
                return Err(format!(
                    "other bytes come from the host to the GPU than {} was told to write",
                    tried.port
                ));
            }
            speeds.push(tried);
        }
        Ok((Direct { sends: Some(sends), answers: Some(answers), must_flush }, speeds))
    }

    /// Gives back what is slower than by the host's memory.
    fn keep_fast(&mut self, speeds: &[Speeds]) -> Result<(), String> {
        let fast = Fast::of(speeds);
        self.sends = self.sends.take().filter(|_| fast.to_send);
        self.answers = self.answers.take().filter(|_| fast.to_land);
        match fast.to_send || fast.to_land {
            true => Ok(()),
            false => Err(format!("it is slower ({})", words(speeds))),
        }
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
    pub(crate) fn flush(&self, device: &Device) -> Result<(), GpuError> {
        if self.must_flush { flush(device) } else { Ok(()) }
    }
}

/// Why the memory of the host is needed, if it is.
fn possible(switches: &Switches, config: &Config) -> Result<(), String> {
    if config.payload_checksum == PayloadChecksum::Always {
        return Err("checksums (BPS_PAYLOAD_CHECKSUM) are of what a processor has read".into());
    }
    if switches.count() > 1 {
        return Err(
            "sums of PCIe switches (BYTEPS_PCIE_SWITCH_SIZE) are added by processors".into()
        );
    }
    Ok(())
}

/// What every port does about as fast as with the host's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Fast {
    /// To read the GPU's.
    to_send: bool,
    /// To write it.
    to_land: bool,
}

impl Fast {
    fn of(speeds: &[Speeds]) -> Fast {
        let all = |speed: fn(&Speeds) -> f64| {
            speeds.iter().all(|tried| speed(tried) >= SHARE_MIN * tried.host)
        };
        Fast { to_send: all(|tried| tried.reads), to_land: all(|tried| tried.writes) }
    }
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
        let fast = |to_send, to_land| Fast { to_send, to_land };
        assert_eq!(Fast::of(std::slice::from_ref(&good)), fast(true, true));
        assert_eq!(Fast::of(&[good.clone(), one_way.clone()]), fast(false, true));
        assert_eq!(Fast::of(&[good.clone(), slow.clone()]), fast(true, false));
        assert_eq!(Fast::of(&[one_way.clone(), slow]), fast(false, false));
        assert_eq!(
            words(&[good, one_way]),
            "mlx5_0 port 1: reads it at 9.10 GB/s, writes it at 10.20, and the host's memory at \
             10.00; mlx5_0 port 1: reads it at 1.00 GB/s, writes it at 9.90, and the host's memory \
             at 10.00"
        );
    }

    #[test]
    fn what_is_demanded_fails_where_it_can_not_be_and_else_is_left_out() {
        // Where the job goes on without servers, there are lanes and a reason against them.
        let against = || Err::<(), String>("slots are in the host's memory".into());
        for (how, is_demanded) in [(GpuDirect::Demand, true), (GpuDirect::Auto, false)] {
            let sought = Sought { is_demanded, ports: against() };
            assert_eq!(Sought::of(how, Some(against())), Ok(Some(sought)));
        }
        assert_eq!(Sought::of(GpuDirect::None, Some(against())), Ok(None));
        assert_eq!(Sought::<()>::of(GpuDirect::Auto, None), Ok(None));
        assert!(Sought::<()>::of(GpuDirect::Demand, None).unwrap_err().contains("no RDMA lane"));
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
