//! What both ends of the aggregation engine share, in layer order: a module may use those above it
//! in this list as `tests/tests/tidy.rs` allows, and nothing below it.
//!
//! The data plane is loops and slots: nothing in `wire`, `proto`, `transport` or `lane` allocates,
//! locks, logs or reads the clock once a job is running.

pub mod base;
pub mod limits;
mod sync;

pub mod config;
pub mod reduce;
pub mod ring;
pub mod team;
pub mod topo;
pub mod trace;
pub mod waits;
pub mod wire;

pub mod encode;
pub mod keys;
pub mod mem;
pub mod optimize;
pub mod proto;
pub mod sched;

pub mod transport;

pub mod control;
pub mod harness;
pub mod host;
pub mod lane;
pub mod metrics;
