//! How the ranks of a host reduce among themselves, sans-io: how their GPUs hang below switches,
//! who has pushed what, and which contributions are there.

#![forbid(unsafe_code)]

pub mod collect;
pub mod gather;
pub mod switches;
