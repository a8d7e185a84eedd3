//! The engine inside each training process, and the launcher of a job.
//!
//! [`Worker`] is the whole interface: join a job, declare tensors, push_pull them, leave. Behind it
//! are two threads: the NIC loop ([`nic`]), which owns every lane and all that is in flight, and
//! the control thread, which talks to the scheduler by way of a state machine ([`agent`]). They and
//! the callers meet only in queues. How the ranks of a host reduce among themselves is said by
//! [`local`].

pub mod agent;
mod context;
mod control;
mod declared;
mod dialing;
mod error;
pub mod gpu;
mod job;
pub mod launch;
pub mod local;
mod neighbours;
pub mod nic;
mod places;
mod start;
pub mod switches;
pub mod task;
pub mod terminated;
mod timeline;
mod types;

pub use bps_engine::proto::messages::Declaration;
pub use bps_engine::proto::shape::{ShapeError, TensorShape};
pub use context::Worker;
pub use error::Error;
pub use start::credit_bytes;
pub use task::Handle;
pub use types::{GpuPushPull, PushPull, Speed, TensorId};
