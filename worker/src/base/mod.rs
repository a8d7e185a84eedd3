//! The words that callers and the rooms below share: errors, tasks and their handles, and what is
//! pushed.

pub mod error;
pub mod task;
pub(crate) mod types;

use std::sync::{Mutex, MutexGuard};

/// Locks, whatever became of other holders.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in one of our threads aborts the process, so a poisoned lock only comes from a
    // caller's thread.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
