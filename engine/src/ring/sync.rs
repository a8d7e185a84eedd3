//! The atomics that rings are made of: the processor's own, or loom's in a model test.
//!
//! Loom's types exist in tests under `--cfg loom` only; see `ring/cursor.rs` for the command.

#![forbid(unsafe_code)]

#[cfg(all(test, loom))]
pub use loom::sync::atomic::{AtomicU32, Ordering};

#[cfg(not(all(test, loom)))]
pub use std::sync::atomic::{AtomicU32, Ordering};
