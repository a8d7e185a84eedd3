//! The handles that Python holds as numbers, and the one place where it waits for them.

#![forbid(unsafe_code)]

use crate::waiting::{SIGNAL_CHECK_INTERVAL, seconds};
use crate::{error, fork};
use bps_worker::Handle;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

static HANDLES: LazyLock<Mutex<HashMap<u64, Handle>>> = LazyLock::new(Mutex::default);
static NEXT: AtomicU64 = AtomicU64::new(1);

fn lock() -> MutexGuard<'static, HashMap<u64, Handle>> {
    HANDLES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number for a push_pull under way.
pub fn keep(handle: Handle) -> u64 {
    let number = NEXT.fetch_add(1, Relaxed);
    lock().insert(number, handle);
    number
}

/// Forgets every handle: their engine is gone.
pub fn forget_all() {
    lock().clear();
}

pub fn find(number: u64) -> PyResult<Handle> {
    fork::check()?;
    lock().get(&number).cloned().ok_or_else(|| {
        error::raise(
            "NotInitializedError",
            format!(
                "handle {number} belongs to no push_pull under way: it was released, or the engine \
                 was shut down"
            ),
        )
    })
}

/// Whether it is done, well or not.
#[pyfunction]
pub fn poll(handle: u64) -> PyResult<bool> {
    Ok(find(handle)?.poll())
}

/// Waits until it is done; False when `timeout` seconds have passed before. Raises what went wrong
/// with it. Other Python threads run meanwhile, and Ctrl-C interrupts.
#[pyfunction]
#[pyo3(signature = (handle, timeout = None))]
pub fn wait(py: Python<'_>, handle: u64, timeout: Option<f64>) -> PyResult<bool> {
    let deadline = seconds(timeout)?.and_then(|timeout| Instant::now().checked_add(timeout));
    let handle = find(handle)?;
    if handle.is_told() {
        return handle.wait(None).map_err(|cause| error::from_engine(&cause));
    }
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let slice = left.map_or(SIGNAL_CHECK_INTERVAL, |left| left.min(SIGNAL_CHECK_INTERVAL));
        let done = py.detach(|| handle.wait(Some(slice)));
        if done.map_err(|cause| error::from_engine(&cause))? {
            return Ok(true);
        }
        py.check_signals()?;
        if left.is_some_and(|left| left <= slice) {
            return Ok(false);
        }
    }
}

/// Forgets a handle. The memory of its tensors must outlive the push_pull all the same.
#[pyfunction]
pub fn release(handle: u64) {
    if !fork::is_child() {
        lock().remove(&handle);
    }
}
