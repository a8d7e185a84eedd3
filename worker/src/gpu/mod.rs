//! GPUs: NVIDIA's driver and NCCL, both opened at run time.
//!
//! [`driver`] is CUDA as far as the engine needs it: devices, streams, events and pinned memory.
//! [`nccl`] is the collectives among the GPUs of a host. Neither library is linked, so one program
//! serves machines with and without GPUs: what is missing or too old is a [`GpuError`] when a GPU
//! is asked for. No function here panics because of a library, and none waits without a limit.
//!
//! The tables of functions (`cuda`, `nccl_library`) hold C functions by their C types; all else is
//! built on them.

mod assemble;
mod census;
mod cuda;
mod direct;
pub mod driver;
mod error;
pub mod nccl;
mod nccl_library;
pub(crate) mod open;
mod pinned;
mod pipeline;
mod rows;
mod simulated;
mod slots;
mod table;
mod track;

pub use assemble::{Assembled, Assembly};
pub use driver::{Device, Event, EventPool, PooledEvent, Stream};
pub use error::GpuError;
pub use nccl::{Comm, Nccl, ReduceOp};
pub use pinned::Pinned;
pub use pipeline::{Pipeline, Push};
pub use simulated::Libraries;
