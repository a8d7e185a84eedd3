//! A whole job in one thread: the real scheduler machine, the real shards and the real NIC loops
//! over the seeded network, in virtual time, and beside them the real pipelines over simulated GPUs
//! where ranks have some. The same seed gives the same run.

mod cluster;
mod gpu;
mod optimized;
mod reformed;
mod shape;
mod shrunk;
mod stored;
mod tensors;
mod workload;

pub use cluster::Cluster;
pub use gpu::stages;
pub use optimized::run_optimized;
pub use reformed::{Reformed, Trouble, run_reformed};
pub use shape::{Groups, Shape};
pub use shrunk::{Dying, Shrunk, run_short, run_shrunk};
pub use stored::{run_stored, run_stored_shrunk};
pub use workload::{Fault, Outcome, run, run_hosts};
