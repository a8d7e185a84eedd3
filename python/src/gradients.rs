//! Gradients on their way: hooks that count backward passes down without running Python, and
//! batches that are handed to the engine, and awaited, as a whole.

#![forbid(unsafe_code)]

use crate::waiting::{SIGNAL_CHECK_INTERVAL, seconds};
use crate::{error, fork, plain};
use bps_worker::Handle;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyList;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Bounds of a batch. The lower one takes 5 µs on a line of 100 Gbit/s, less than its hand-over.
const BATCH_BYTES_MIN: usize = 64 << 10;
const BATCH_BYTES_MAX: usize = 4 << 20;

/// One gradient, and what was decided about it at its declaration.
struct Slot {
    tensor: u32,
    priority: i64,
    bytes: usize,
    is_on_gpu: bool,
    /// Backward passes that still add to it before it is sent.
    passes_left: u32,
    /// Queued, or handed over.
    is_sent: bool,
    /// A backward pass has come here since [`GradientHooks::take_used`].
    is_used: bool,
}

#[derive(Default)]
struct State {
    slots: Vec<Slot>,
    passes: u32,
    queued: Vec<u32>,
    queued_bytes: usize,
    /// The GPU's stream in which all of `queued` are complete; `None` for host memory.
    stream: Option<usize>,
    /// The last handle and the bytes of each batch that may still be under way, oldest first.
    under_way: VecDeque<(Handle, usize)>,
    under_way_bytes: usize,
    batch_bytes_min: usize,
    /// A batch is no smaller than what is still to come.
    sends_halves: bool,
    /// The bytes of all gradients that are not sent.
    left_bytes: usize,
    has_joined: bool,
    is_paused: bool,
    is_guarded: bool,
    has_new: bool,
}

impl State {
    /// A batch goes as soon as it is as large as what is under way: while the line is busy, batches
    /// grow, and when it is about to run dry, the next one is small and goes at once.
    ///
    /// Only the last batches keep anybody waiting, so earlier ones may be larger: each costs the
    /// thread that launches kernels.
    fn is_due(&mut self) -> bool {
        let half = if self.sends_halves { self.left_bytes } else { 0 };
        if self.queued_bytes < half.min(BATCH_BYTES_MAX).max(self.batch_bytes_min) {
            return false;
        }
        while let Some((last, bytes)) = self.under_way.front()
            && last.is_told()
        {
            self.under_way_bytes -= bytes;
            self.under_way.pop_front();
        }
        self.queued_bytes >= self.under_way_bytes.min(BATCH_BYTES_MAX.max(self.batch_bytes_min))
    }

    fn slot(&mut self, index: u32) -> PyResult<&mut Slot> {
        let count = self.slots.len();
        self.slots.get_mut(index as usize).ok_or_else(|| {
            PyIndexError::new_err(format!("gradient {index} of {count}: no such gradient"))
        })
    }

    /// Notes whether a gradient is sent, and so how many bytes are still to come.
    fn mark(&mut self, index: u32, is_sent: bool) -> PyResult<()> {
        let slot = self.slot(index)?;
        let (was_sent, bytes) = (std::mem::replace(&mut slot.is_sent, is_sent), slot.bytes);
        match (was_sent, is_sent) {
            (false, true) => self.left_bytes -= bytes,
            (true, false) => self.left_bytes += bytes,
            _ => {}
        }
        Ok(())
    }

    fn queue(&mut self, index: u32, stream: Option<usize>) -> PyResult<()> {
        self.mark(index, true)?;
        let bytes = self.slot(index)?.bytes;
        self.queued.push(index);
        self.queued_bytes += bytes;
        self.stream = stream;
        Ok(())
    }
}

/// The hooks of the gradients of one optimizer or module. Its owner, in Python, is asked at the
/// first complete gradient of a pass (`join`), for each batch (`flush`), and where a gradient is
/// added to that must not be (`added_again`).
#[pyclass(frozen)]
pub struct GradientHooks {
    state: Mutex<State>,
    /// A weak reference.
    owner: Py<PyAny>,
    /// Tells the stream that is current on the GPU.
    current_stream: Py<PyAny>,
}

impl GradientHooks {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, py: Python<'_>, method: &str) -> PyResult<()> {
        let owner = self.owner.call0(py)?;
        if !owner.is_none(py) {
            owner.call_method0(py, method)?;
        }
        Ok(())
    }

    /// A backward pass has added to a gradient. The lock is never held while Python runs: another
    /// thread of autograd may hold the interpreter and want the lock.
    fn completed(&self, py: Python<'_>, index: u32) -> PyResult<()> {
        let mut state = self.lock();
        let (is_paused, is_guarded) = (state.is_paused, state.is_guarded);
        state.has_new |= !is_paused;
        let slot = state.slot(index)?;
        slot.is_used = true;
        if is_paused {
            return Ok(());
        }
        if slot.is_sent || is_guarded {
            drop(state);
            let owner = self.owner.call0(py)?;
            if owner.is_none(py) {
                return Ok(());
            }
            owner.call_method1(py, "added_again", (index,))?;
            state = self.lock();
        }
        let slot = state.slot(index)?;
        slot.passes_left = slot.passes_left.saturating_sub(1);
        if slot.passes_left > 0 {
            return Ok(());
        }
        let mut stream = None;
        if slot.is_on_gpu {
            drop(state);
            stream = Some(self.current_stream.call0(py)?.extract(py)?);
            state = self.lock();
        }
        if !state.queued.is_empty() && state.stream != stream {
            drop(state);
            self.ask(py, "flush")?;
            state = self.lock();
        }
        state.queue(index, stream)?;
        let is_first = !std::mem::replace(&mut state.has_joined, true);
        let is_due = state.is_due();
        drop(state);
        if is_first {
            self.ask(py, "join")?;
        }
        if is_due {
            self.ask(py, "flush")?;
        }
        Ok(())
    }

    /// The tensors of these gradients, their priorities and sizes.
    pub fn tensors(&self, indices: &[u32]) -> PyResult<Vec<(u32, i64, usize)>> {
        let mut state = self.lock();
        let tensor =
            |&index: &u32| state.slot(index).map(|slot| (slot.tensor, slot.priority, slot.bytes));
        indices.iter().map(tensor).collect()
    }

    /// A batch is with the engine.
    pub fn handed_over(&self, last: &Handle, bytes: usize) {
        let mut state = self.lock();
        state.under_way.push_back((last.clone(), bytes));
        state.under_way_bytes += bytes;
    }
}

#[pymethods]
impl GradientHooks {
    #[new]
    fn new(owner: Py<PyAny>, current_stream: Py<PyAny>, passes: u32) -> GradientHooks {
        let state = State { passes, batch_bytes_min: BATCH_BYTES_MIN, ..State::default() };
        GradientHooks { state: Mutex::new(state), owner, current_stream }
    }

    /// One more gradient; returns the hook that its parameter gets.
    fn add(hooks: Py<Self>, tensor: u32, priority: i64, bytes: usize, is_on_gpu: bool) -> Hook {
        let mut state = hooks.get().lock();
        let index = u32::try_from(state.slots.len()).expect("gradients are counted in u32");
        let (passes_left, is_sent, is_used) = (state.passes, false, false);
        state.left_bytes += bytes;
        state.slots.push(Slot {
            tensor,
            priority,
            bytes,
            is_on_gpu,
            passes_left,
            is_sent,
            is_used,
        });
        drop(state);
        Hook { hooks, index }
    }

    /// A gradient was declared again, as another tensor.
    fn declare(&self, index: u32, tensor: u32, bytes: usize, is_on_gpu: bool) -> PyResult<()> {
        let mut state = self.lock();
        let slot = state.slot(index)?;
        let (is_sent, before) = (slot.is_sent, slot.bytes);
        (slot.tensor, slot.bytes, slot.is_on_gpu) = (tensor, bytes, is_on_gpu);
        if !is_sent {
            state.left_bytes = state.left_bytes - before + bytes;
        }
        Ok(())
    }

    /// Queues a gradient that no hook has completed. False if what is queued must be taken first.
    fn queue(&self, index: u32, stream: Option<usize>) -> PyResult<bool> {
        let mut state = self.lock();
        if !state.queued.is_empty() && state.stream != stream {
            return Ok(false);
        }
        state.queue(index, stream).map(|()| true)
    }

    /// What is queued, and the stream in which it is complete. The caller hands it over.
    fn take(&self) -> (Vec<u32>, Option<usize>) {
        let mut state = self.lock();
        state.queued_bytes = 0;
        (std::mem::take(&mut state.queued), state.stream)
    }

    /// What is queued.
    fn queued(&self) -> Vec<u32> {
        self.lock().queued.clone()
    }

    /// The gradients that are not on their way.
    fn rest(&self) -> Vec<u32> {
        let unsent = |(index, slot): (u32, &Slot)| (!slot.is_sent).then_some(index);
        (0..).zip(&self.lock().slots).filter_map(unsent).collect()
    }

    /// Whether a backward pass has come to each since this was last asked.
    fn take_used(&self) -> Vec<bool> {
        let mut state = self.lock();
        state.slots.iter_mut().map(|slot| std::mem::take(&mut slot.is_used)).collect()
    }

    /// These were not handed over after all.
    fn expect(&self, indices: Vec<u32>) -> PyResult<()> {
        let mut state = self.lock();
        for index in indices {
            state.mark(index, false)?;
        }
        Ok(())
    }

    /// A round is over: all gradients are expected again.
    fn expect_all(&self) {
        let mut state = self.lock();
        let passes = state.passes;
        let mut left_bytes = 0;
        for slot in &mut state.slots {
            (slot.passes_left, slot.is_sent) = (passes, false);
            left_bytes += slot.bytes;
        }
        state.left_bytes = left_bytes;
    }

    /// How often a pass adds to each gradient before it is sent.
    #[setter]
    fn set_passes(&self, passes: u32) {
        self.lock().passes = passes;
    }

    /// Batches have at least so many bytes.
    #[setter]
    fn set_batch_bytes_min(&self, bytes: usize) {
        self.lock().batch_bytes_min = bytes.max(BATCH_BYTES_MIN);
    }

    /// A batch is half of what a pass has left, up to 4 MiB.
    #[setter]
    fn set_sends_halves(&self, sends_halves: bool) {
        self.lock().sends_halves = sends_halves;
    }

    /// The end of the running pass is known to the owner.
    #[getter]
    fn has_joined(&self) -> bool {
        self.lock().has_joined
    }

    #[setter]
    fn set_has_joined(&self, joined: bool) {
        self.lock().has_joined = joined;
    }

    /// Passes add to gradients, and nothing is sent.
    #[setter]
    fn set_is_paused(&self, paused: bool) {
        self.lock().is_paused = paused;
    }

    /// The owner is asked about each addition.
    #[setter]
    fn set_is_guarded(&self, guarded: bool) {
        self.lock().is_guarded = guarded;
    }

    /// A pass has added to a gradient since this was last set to False.
    #[getter]
    fn has_new(&self) -> bool {
        self.lock().has_new
    }

    #[setter]
    fn set_has_new(&self, new: bool) {
        self.lock().has_new = new;
    }
}

/// What torch calls when a pass has added to the gradient of one parameter.
#[pyclass(frozen)]
pub struct Hook {
    hooks: Py<GradientHooks>,
    index: u32,
}

#[pymethods]
impl Hook {
    fn __call__(&self, py: Python<'_>, _param: &Bound<'_, PyAny>) -> PyResult<()> {
        self.hooks.get().completed(py, self.index)
    }
}

/// Push_pulls that were handed over together.
#[pyclass(frozen)]
pub struct Batch {
    pub handles: Vec<Handle>,
    /// Of the gradients that this is about, from when [`Batch::watch`] was called.
    versions: OnceLock<Vec<u64>>,
}

impl Batch {
    pub fn new(handles: Vec<Handle>) -> Batch {
        Batch { handles, versions: OnceLock::new() }
    }

    pub fn some(&self, position: Option<usize>) -> PyResult<&[Handle]> {
        let Some(position) = position else { return Ok(&self.handles) };
        self.handles.get(position..=position).ok_or_else(|| {
            let count = self.handles.len();
            PyIndexError::new_err(format!("push_pull {position} of {count}: no such push_pull"))
        })
    }
}

#[pymethods]
impl Batch {
    /// Waits until all of them, or the one at `position`, are done; False when `timeout` seconds
    /// have passed before. Raises what went wrong. Other Python threads run meanwhile, and Ctrl-C
    /// interrupts.
    #[pyo3(signature = (position = None, timeout = None))]
    fn wait(
        &self,
        py: Python<'_>,
        position: Option<usize>,
        timeout: Option<f64>,
    ) -> PyResult<bool> {
        fork::check()?;
        let deadline = seconds(timeout)?.and_then(|timeout| Instant::now().checked_add(timeout));
        let handles = self.some(position)?;
        let mut next = 0;
        while next < handles.len() {
            let result = if handles[next].is_told() {
                handles[next].wait(None)
            } else {
                py.detach(|| wait_for(handles, &mut next, deadline))
            };
            if result.map_err(|cause| error::from_engine(&cause))? {
                next += 1;
                continue;
            }
            py.check_signals()?;
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether all of them are over, well or not: their memory is the caller's again.
    fn is_over(&self) -> PyResult<bool> {
        fork::check()?;
        Ok(self.handles.iter().all(Handle::poll))
    }

    /// Notes what these gradients, of which it is, are now.
    fn watch(&self, gradients: &Bound<'_, PyList>) -> PyResult<()> {
        let versions = plain::versions(gradients)?;
        self.versions.get_or_init(|| versions);
        Ok(())
    }

    /// The indices of those gradients that were changed since, or are no longer those of their
    /// parameters, which are at `indices` among `params`.
    fn changed(
        &self,
        gradients: &Bound<'_, PyList>,
        indices: Vec<usize>,
        params: &Bound<'_, PyList>,
    ) -> PyResult<Vec<usize>> {
        match self.versions.get() {
            Some(versions) => plain::changed(gradients, versions, &indices, params),
            None => Ok(Vec::new()),
        }
    }

    /// Whether the one at `position` is done; raises what went wrong with it.
    fn poll(&self, position: usize) -> PyResult<bool> {
        fork::check()?;
        let done = |handle: &Handle| match handle.is_told() {
            true => handle.wait(None).map_err(|cause| error::from_engine(&cause)),
            false => Ok(false),
        };
        self.some(Some(position))?.iter().try_fold(true, |all, one| Ok(all && done(one)?))
    }
}

/// Waits for these from `next` on; true where the one at `next` is done, false where it is time to
/// look for signals, or too late.
fn wait_for(
    handles: &[Handle],
    next: &mut usize,
    deadline: Option<Instant>,
) -> Result<bool, bps_worker::Error> {
    let look = Instant::now() + SIGNAL_CHECK_INTERVAL;
    let deadline = deadline.map_or(look, |deadline| deadline.min(look));
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if !handles[*next].wait(Some(left.max(Duration::from_micros(1))))? {
            return Ok(false);
        }
        if *next + 1 == handles.len() {
            return Ok(true);
        }
        *next += 1;
    }
}
