//! A whole job in one thread: the real scheduler machine, the real shards and the real NIC loops
//! over the seeded network, in virtual time. The same seed gives the same run.

mod cluster;
mod workload;

pub use cluster::{Cluster, Shape};
pub use workload::{Fault, Groups, Outcome, run, run_hosts};
