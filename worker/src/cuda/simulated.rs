//! Stand-ins for CUDA and NCCL inside the process, for simulations.
//!
//! All that the engine does with a GPU goes through two tables of C functions. A test fills them
//! with functions of its own, which keep what the libraries promise in virtual time: so the
//! pipeline runs as it is, on a machine that the test steps.

use super::library::Cuda;
use super::nccl_library::Found;
use super::table::Symbols;
use super::{Device, GpuError, Nccl};
use std::ffi::c_void;
use std::ptr::NonNull;

/// CUDA and NCCL of a simulated machine.
pub struct Libraries {
    cuda: &'static Cuda,
    nccl: Nccl,
}

struct Given<'a>(&'a dyn Fn(&'static str) -> Option<NonNull<c_void>>);

impl Symbols for Given<'_> {
    fn find(&self, name: &'static str) -> Option<NonNull<c_void>> {
        (self.0)(name)
    }
}

impl Libraries {
    /// The libraries whose functions are found by this, by their C names. To be opened once in a
    /// process, since their tables stay for its life.
    ///
    /// # Errors
    /// [`GpuError::NoFunction`] if one is missing; what the functions say when they are called.
    ///
    /// # Safety
    /// What is found under a name is a function of the type that the header of CUDA, or NCCL, gives
    /// to it, and keeps what is promised there. `ncclCommAbort` and `ncclCommDestroy` return at
    /// once.
    pub unsafe fn open(
        find: &dyn Fn(&'static str) -> Option<NonNull<c_void>>,
    ) -> Result<Libraries, GpuError> {
        let given = Given(find);
        let cuda = Box::leak(Box::new(Cuda::of(&given)?));
        let found = Found { frees_at_once: true, ..Found::of(&given, "simulated")? };
        Ok(Libraries { cuda, nccl: Nccl::of(found) })
    }

    /// The GPU of this number.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn device(&self, ordinal: u32) -> Result<Device, GpuError> {
        Device::open_in(self.cuda, ordinal)
    }

    /// The collectives among its GPUs.
    #[must_use]
    pub fn nccl(&self) -> &Nccl {
        &self.nccl
    }
}
