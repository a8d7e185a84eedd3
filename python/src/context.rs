//! The engine of this process: at most one, started by `init`, ended by `shutdown`.
//!
//! The lock around it is held for the length of a clone or a swap, never while anything waits, and
//! is never taken in a forked child.

#![forbid(unsafe_code)]

use crate::waiting::{interruptible, seconds};
use crate::{error, fork, handle};
use bps_engine::base::Rank;
use bps_engine::config::{self, Config};
use bps_engine::host;
use bps_worker::{Worker, terminated};
use pyo3::prelude::*;
use std::borrow::Cow;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

static ENGINE: Mutex<Option<Worker>> = Mutex::new(None);

/// Rank, size, local rank and local size: readable without the lock, also in a forked child.
static PLACE: [AtomicU32; 4] =
    [AtomicU32::new(0), AtomicU32::new(1), AtomicU32::new(0), AtomicU32::new(1)];

/// `shutdown` was called to suspend: the place is the one that this process had.
static SUSPENDED: AtomicBool = AtomicBool::new(false);

/// What this process shows when it comes back to an elastic job: from `shutdown` to `init`.
static TICKET: Mutex<Option<u64>> = Mutex::new(None);

fn ticket() -> MutexGuard<'static, Option<u64>> {
    TICKET.lock().unwrap_or_else(PoisonError::into_inner)
}

fn lock() -> MutexGuard<'static, Option<Worker>> {
    ENGINE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The engine, or the error that says why there is none.
pub fn engine() -> PyResult<Worker> {
    fork::check()?;
    lock().clone().ok_or_else(not_initialized)
}

fn not_initialized() -> PyErr {
    error::raise(
        "NotInitializedError",
        "byteps is not initialised in this process: call init() first",
    )
}

/// Starts the engine as `settings` say, or the environment where they are silent, and returns when
/// all nodes of the job are there. A second call does nothing. `speaks` names the frameworks of
/// this process, for messages.
#[pyfunction]
#[pyo3(signature = (settings, speaks = None))]
pub fn init(
    py: Python<'_>,
    settings: HashMap<String, String>,
    speaks: Option<String>,
) -> PyResult<()> {
    fork::check()?;
    if lock().is_some() {
        return Ok(());
    }
    let config = configuration(&settings)?;
    fork::engine_starts();
    let former = ticket().take();
    let started = interruptible(
        py,
        move || Worker::start_again(&config, former, speaks.as_deref()),
        |late| {
            if let Ok(worker) = late {
                let _ = worker.shutdown(false);
            }
        },
    );
    let started = started.and_then(|started| started.map_err(|cause| error::from_engine(&cause)));
    let worker = started.inspect_err(|_| fork::engine_ended())?;
    let place = [worker.rank(), worker.size(), worker.local_rank(), worker.local_size()];
    for (cell, value) in PLACE.iter().zip(place) {
        cell.store(value, Relaxed);
    }
    *lock() = Some(worker);
    Ok(())
}

fn configuration(settings: &HashMap<String, String>) -> PyResult<Config> {
    let loaded = config::from_environment_with(settings)
        .map_err(|cause| error::raise("ConfigError", cause.to_string()))?;
    if loaded.config.rank() == 0 {
        for warning in &loaded.warnings {
            eprintln!("byteps: warning: {warning}");
        }
    }
    Ok(loaded.config)
}

/// Ends the engine. With `suspend` the servers stay and wait for the workers of the next `init`. In
/// a forked child, and where nothing was started, it does nothing.
#[pyfunction]
#[pyo3(signature = (suspend = false))]
pub fn shutdown(py: Python<'_>, suspend: bool) -> PyResult<()> {
    if fork::is_child() {
        return Ok(());
    }
    let Some(worker) = lock().take() else { return Ok(()) };
    *ticket() = if suspend { worker.return_ticket(true) } else { None };
    let ended = interruptible(py, move || worker.shutdown(suspend), |_| ());
    handle::forget_all();
    fork::engine_ended();
    SUSPENDED.store(suspend, Relaxed);
    ended?.map_err(|cause| error::from_engine(&cause))
}

/// Whether a member's death has ended the epoch of this process, and not its elastic job: then
/// `shutdown(suspend=True)` and `init` lead into the next epoch. With `suspend` also whether they
/// would if the epoch goes on, which ends for all ranks once all have done so.
#[pyfunction]
#[pyo3(signature = (suspend = false))]
pub fn may_return(suspend: bool) -> bool {
    let may = |worker: &Worker| worker.return_ticket(suspend).is_some();
    !fork::is_child() && lock().as_ref().is_some_and(may)
}

/// The membership generation, from 1.
#[pyfunction]
pub fn epoch() -> PyResult<u32> {
    Ok(engine()?.epoch())
}

/// Whether rounds of this job go on without ranks that die.
#[pyfunction]
pub fn shrinks() -> PyResult<bool> {
    Ok(engine()?.shrinks())
}

/// Nodes that wait to be let into an elastic job; `None` in any other.
#[pyfunction]
pub fn newcomers() -> PyResult<Option<u32>> {
    Ok(engine()?.newcomers())
}

/// Whether SIGTERM has told this rank of an elastic job to leave.
#[pyfunction]
pub fn is_to_leave() -> bool {
    !fork::is_child() && lock().as_ref().is_some_and(Worker::is_to_leave)
}

/// Whether the program looks at [`is_to_leave`] and leaves by itself; SIGTERM ends it otherwise.
#[pyfunction]
pub fn take_notice(leaves: bool) {
    terminated::take_notice(leaves);
}

/// The program has left as SIGTERM asked it to.
#[pyfunction]
pub fn has_left() {
    terminated::left();
}

/// Equal for two processes of one host.
#[pyfunction]
pub fn host_id() -> String {
    host::id()
}

/// Whether `init` has succeeded in this process and `shutdown` has not been called since.
#[pyfunction]
pub fn is_initialized() -> bool {
    !fork::is_child() && lock().is_some()
}

/// Whether this process inherited an engine that cannot run here.
#[pyfunction]
pub fn is_forked() -> bool {
    fork::is_child()
}

fn place(index: usize) -> PyResult<u32> {
    let is_known = fork::is_child() || SUSPENDED.load(Relaxed) || lock().is_some();
    if !is_known {
        return Err(not_initialized());
    }
    Ok(PLACE[index].load(Relaxed))
}

/// This process among all of the job. Answers in a forked child too.
#[pyfunction]
pub fn rank() -> PyResult<u32> {
    place(0)
}

/// Processes of the job. Answers in a forked child too.
#[pyfunction]
pub fn size() -> PyResult<u32> {
    place(1)
}

/// This process among those of its host. Answers in a forked child too.
#[pyfunction]
pub fn local_rank() -> PyResult<u32> {
    place(2)
}

/// Processes of this host. Answers in a forked child too.
#[pyfunction]
pub fn local_size() -> PyResult<u32> {
    place(3)
}

/// Whether optimizers are to train asynchronously where nobody says otherwise.
#[pyfunction]
pub fn enables_async() -> PyResult<bool> {
    Ok(engine()?.enables_async())
}

/// For how many slow ranks rounds of an optimizer's gradients are not to wait where nobody says
/// otherwise.
#[pyfunction]
pub fn backup_workers() -> PyResult<u32> {
    Ok(engine()?.backup_workers())
}

/// A key that authenticates the next object that `root` sends to all ranks under this name; none in
/// a job without a key. Every rank asks once for each object.
#[pyfunction]
pub fn object_key(name: &str, root: u32) -> PyResult<Option<Cow<'static, [u8]>>> {
    let key = engine()?.object_key(name, Rank(root));
    Ok(key.map(|key| Cow::Owned(key.to_vec())))
}

/// Waits until all ranks have called it, at most `timeout` seconds.
#[pyfunction]
#[pyo3(signature = (timeout = None))]
pub fn barrier(py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
    let timeout = seconds(timeout)?;
    let worker = engine()?;
    interruptible(py, move || worker.barrier(timeout), |_| ())?
        .map_err(|cause| error::from_engine(&cause))
}

/// Begins a timeline of this rank in `folder`, and of the servers.
#[pyfunction]
pub fn start_timeline(py: Python<'_>, folder: PathBuf) -> PyResult<()> {
    let worker = engine()?;
    py.detach(|| worker.start_timeline(&folder, 1..=u64::MAX))
        .map_err(|cause| error::from_engine(&cause))
}

/// Ends it and returns when its file is written.
#[pyfunction]
pub fn stop_timeline(py: Python<'_>) -> PyResult<()> {
    let worker = engine()?;
    py.detach(|| worker.stop_timeline());
    Ok(())
}

/// The oldest sample of push_pull throughput that has not been asked for yet: (ms since 1970,
/// MB/s).
#[pyfunction]
pub fn speed() -> PyResult<Option<(u64, f64)>> {
    Ok(engine()?.speed().map(|sample| (sample.unix_ms, sample.megabytes_per_second)))
}
