//! The CPU server that sums gradients, the scheduler of a job, and a viewer of both.
//!
//! A server is a few polling threads, each a [`shard::Shard`] with its own keys, memory and lanes,
//! an acceptor thread that authenticates connections, and a control thread that talks to the
//! scheduler. They meet only in rings.

pub mod agent;
mod cores;
pub mod entry;
mod error;
mod listen;
pub mod run;
pub mod scheduler;
pub mod shard;
mod shown;
mod signals;
mod timeline;
pub mod top;

pub use error::ServerError;
