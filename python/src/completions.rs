//! Which of many batches end next: for threads that complete the futures of a framework.
//!
//! Futures must complete in the order in which the engine is done with them. Ranks may start
//! operations in different orders, so a thread that waited for the oldest one could wait in a
//! circle.

#![forbid(unsafe_code)]

use crate::gradients::Batch;
use crate::waiting::seconds;
use bps_worker::Handle;
use bps_worker::task::Bell;
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long `next` sleeps before it looks again: how late a deadline that is added meanwhile may be
/// noticed.
const SLICE: Duration = Duration::from_millis(500);

struct Awaited {
    handles: Vec<Handle>,
    token: Py<PyAny>,
    deadline: Option<Instant>,
}

impl Awaited {
    fn is_over(&self) -> bool {
        self.handles.iter().all(Handle::is_told)
    }

    fn is_late(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= now)
    }
}

#[derive(Default)]
struct State {
    awaited: Vec<Awaited>,
    is_closed: bool,
}

/// Batches whose ends are awaited, each with a token of Python's.
#[pyclass(frozen)]
#[derive(Default)]
pub struct Completions {
    bell: Arc<Bell>,
    state: Mutex<State>,
}

impl Completions {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until something is over or late, and takes it out; `None` once closed. Needs no
    /// interpreter.
    fn take(&self) -> Option<(Py<PyAny>, bool)> {
        loop {
            // Read before the handles are: what ends from now on rings once more.
            let rings = self.bell.rings();
            let now = Instant::now();
            let mut state = self.lock();
            if state.is_closed {
                return None;
            }
            let over = state.awaited.iter().position(Awaited::is_over);
            let ended = over.or_else(|| state.awaited.iter().position(|one| one.is_late(now)));
            if let Some(index) = ended {
                return Some((state.awaited.remove(index).token, over.is_some()));
            }
            let next = state.awaited.iter().filter_map(|one| one.deadline).min();
            drop(state);
            let left = next.map_or(SLICE, |next| next.saturating_duration_since(now));
            self.bell.wait(rings, left.min(SLICE));
        }
    }
}

#[pymethods]
impl Completions {
    #[new]
    fn new() -> Completions {
        Completions::default()
    }

    /// `next` will return this token when all of the batch is over, or `timeout` seconds from now.
    #[pyo3(signature = (batch, token, timeout = None))]
    fn add(
        &self,
        batch: &Bound<'_, Batch>,
        token: Py<PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let deadline = seconds(timeout)?.and_then(|timeout| Instant::now().checked_add(timeout));
        let handles = batch.get().handles.clone();
        // Before they are watched: once the bell rings, they have to be here.
        self.lock().awaited.push(Awaited { handles: handles.clone(), token, deadline });
        let over = handles.iter().filter(|handle| handle.watch(&self.bell)).count();
        if over == handles.len() {
            self.bell.ring();
        }
        Ok(())
    }

    /// Waits for the next end: its token, and whether it is over rather than late. `None` once
    /// closed. Other Python threads run meanwhile.
    fn next(&self, py: Python<'_>) -> Option<(Py<PyAny>, bool)> {
        py.detach(|| self.take())
    }

    /// Ends `next`, now and for ever. What is awaited is forgotten.
    fn close(&self) {
        let forgotten = {
            let mut state = self.lock();
            state.is_closed = true;
            std::mem::take(&mut state.awaited)
        };
        drop(forgotten);
        self.bell.ring();
    }
}
