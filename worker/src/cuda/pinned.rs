//! Memory of the host that a GPU copies from and to by itself: slots of the pipeline are cut from
//! it.

use super::{Device, GpuError};
use bps_engine::mem::{Arena, Claim, Options};
use std::ffi::c_void;

/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every context of the process, so that any GPU of it,
/// and a framework's own copies, may use the memory at full speed.
const PORTABLE: u32 = 1;

/// Zeroed memory, on one NUMA node where that was asked for, registered with CUDA: copies between
/// it and the GPU run without the processor. Reading it is as fast as any memory (it is not
/// write-combined).
pub struct Pinned {
    device: Device,
    memory: Claim,
}

impl Pinned {
    /// Takes `bytes` bytes, with all pages present, from the NUMA node if one is named and has
    /// room, and registers them with the GPU's driver.
    ///
    /// # Errors
    /// [`GpuError::Memory`] if the kernel has none, [`GpuError::Cuda`] if the driver refuses.
    pub fn new(device: &Device, bytes: usize, numa_node: Option<u32>) -> Result<Pinned, GpuError> {
        let name = format!("gpu-{}", device.ordinal());
        let memory = |error: bps_engine::mem::MemoryError| GpuError::Memory {
            ordinal: device.ordinal(),
            why: error.to_string(),
        };
        let options = Options { name, numa_node, shared: false };
        let mut arena = Arena::reserve(bytes, &options).map_err(memory)?;
        Pinned::register(device, arena.claim(bytes).map_err(memory)?)
    }

    /// Registers memory that was claimed elsewhere.
    ///
    /// # Errors
    /// [`GpuError::Cuda`] if the driver refuses; the memory is given back then.
    pub fn register(device: &Device, memory: Claim) -> Result<Pinned, GpuError> {
        let at = memory.as_ptr().cast::<c_void>();
        device.with_context(|cuda| {
            // SAFETY: the claim's range is mapped, and stays so until `drop` has unregistered it.
            let code = unsafe { (cuda.call.cuMemHostRegister_v2)(at, memory.len(), PORTABLE) };
            cuda.check("cuMemHostRegister", code)
        })?;
        Ok(Pinned { device: device.clone(), memory })
    }

    /// The first byte; aligned to a page.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    /// Bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "memory that was asked for is never empty")]
    pub fn len(&self) -> usize {
        self.memory.len()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let at = self.memory.as_ptr().cast::<c_void>();
        // At the end of a process the driver may be gone before us; then nothing is registered.
        let _ = self.device.with_context(|cuda| {
            // SAFETY: `register` registered this address, once. The owner of this value has
            // ended all copies.
            let code = unsafe { (cuda.call.cuMemHostUnregister)(at) };
            cuda.check("cuMemHostUnregister", code)
        });
    }
}
