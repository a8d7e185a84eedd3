//! One file per command. Each gives its arguments by `command` and measures by `run`.

pub mod ab;
pub mod cluster;
pub mod codecs;
pub mod gloo;
pub mod gpu;
pub mod hooks;
pub mod idle;
pub mod jax;
pub mod lane;
pub mod latency;
pub mod priority;
pub mod probe;
pub mod pushpull;
pub mod rings;
pub mod run;
pub mod scaling;
pub mod seal;
pub mod step;
pub mod sum;
pub mod tensorflow;
pub mod tune;
