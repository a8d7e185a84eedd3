//! GPUs: NVIDIA's driver and NCCL, both opened at run time.
//!
//! [`driver`] is CUDA as far as the engine needs it: devices, streams, events and pinned memory.
//! [`nccl`] is the collectives among the GPUs of a host. Neither library is linked, so one program
//! serves machines with and without GPUs: what is missing or too old is a [`GpuError`] when a GPU
//! is asked for. No function here panics because of a library, and none waits without a limit.
//!
//! The tables of functions (`library`, `nccl_library`) hold C functions by their C types; all else
//! is built on them.

mod codecs;
pub mod driver;
mod error;
mod kept;
mod library;
pub mod nccl;
mod nccl_library;
mod pinned;
mod simulated;
mod table;
mod together;
mod track;

pub use codecs::{Coder, Family, Keeps, KeptAt, Kernels};
pub use driver::{Device, Event, EventPool, PooledEvent, Stream};
pub(crate) use error::nccl_version;
pub use error::{Awaited, Breach, GpuError};
pub(crate) use kept::KeptMemory;
pub(crate) use nccl::Closing;
pub use nccl::{Comm, Nccl, ReduceOp};
pub use pinned::Pinned;
pub use simulated::Libraries;
pub use track::{Passed, Progress, Track, WORD_BYTES};
