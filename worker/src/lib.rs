//! The engine inside each training process.
//!
//! [`Worker`] is the whole interface: join a job, declare tensors, push_pull them, leave. Behind it
//! are two threads, three where there is a GPU. The NIC loop ([`job::nic_loop`]) keeps the rounds
//! of tensors ([`rounds`]) and drives the lanes ([`nic`]). The control thread talks to the
//! scheduler by way of a state machine ([`job::agent`]). A GPU's thread runs its pipeline
//! ([`gpu`]). They and the callers meet only in queues. How the ranks of a host reduce among
//! themselves is said by [`host`].

pub mod api;
mod base;
pub mod cuda;
pub mod gpu;
pub mod host;
pub mod job;
pub mod nic;
pub mod rounds;
pub mod terminated;

pub use api::Worker;
pub use base::error::{self, Error};
pub use base::task::{self, Handle};
pub use base::types::{Follow, GpuPushPull, Kept, PushPull, Speed, TensorId};
pub use bps_engine::optimize::{Act, Number, Optimizer};
pub use bps_engine::proto::backup::Backup;
pub use bps_engine::proto::encoding::{Encoding, EncodingError};
pub use bps_engine::proto::members::{Members, MembersError};
pub use bps_engine::proto::messages::Declaration;
pub use bps_engine::proto::shape::{ShapeError, TensorShape};
pub use bps_engine::proto::store::{Deltas, Store};
pub use job::start::credit_bytes;
