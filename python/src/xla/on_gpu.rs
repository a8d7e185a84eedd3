//! The two calls on a GPU, for `byteps.jax`.
//!
//! A push returns its argument, in the argument's place, and a pull takes that array and copies it.
//! So the memory is the exchange's from the one to the other: XLA keeps it for the pull, nobody
//! else has it, and the engine reads and writes it where it lies. A push hands it over behind what
//! is enqueued in XLA's stream; a pull waits until the engine has enqueued what brings the results,
//! and puts its copies behind that. XLA runs the calls of a program in one order, on one thread at
//! a time, and the host never waits for the GPU.
//!
//! A pull could give the result in its array's place, too. But XLA may run one push for several
//! pulls, as of what does not change in a loop, and would give each a copy of its own, made before
//! the result was there.
//!
//! A ticket would be in the memory of the GPU, which a pull cannot read: it finds its pushes by the
//! addresses of their arrays.
//!
//! Whoever returns an error ends the program, and XLA gives its memory to others. So what that run
//! has pushed is waited for before.

#![allow(unsafe_code)]

use super::abi::{Call, CallFrame, Code, RawError};
use super::{NOT_OURS, described, size_of_buffer};
use crate::context::engine;
use crate::declared::{self, Declared};
use crate::error;
use bps_worker::{GpuPushPull, Handle};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::ptr;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// CUDA's number of the GPU that programs were compiled for; -1 if none was. A job opens it before
/// the numbers of its tensors are told.
static GPU: AtomicI64 = AtomicI64::new(-1);

/// Tells which GPU that is.
#[pyfunction]
pub fn xla_gpu(ordinal: u32) {
    GPU.store(i64::from(ordinal), Relaxed);
}

struct Pushed {
    /// The run of a program that has pushed it.
    run: Option<i64>,
    handle: Handle,
}

/// What was pushed last at each address.
static PUSHED: LazyLock<Mutex<HashMap<u64, Pushed>>> = LazyLock::new(Mutex::default);

fn lock() -> MutexGuard<'static, HashMap<u64, Pushed>> {
    PUSHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The engine has ended: what was not pulled never will be.
pub fn forget_all() {
    let forgotten = std::mem::take(&mut *lock());
    drop(forgotten);
}

/// Waits until the engine has done with all that a run has pushed.
fn abandon(run: Option<i64>) {
    let left = lock().extract_if(|_, pushed| pushed.run == run).collect::<Vec<_>>();
    for (_, one) in left {
        // What becomes of it is of no interest any more; the job's own deadlines bound the wait.
        let _ = one.handle.wait(None);
    }
}

/// One argument: the array. Two results: the same, in its place, and a ticket that nobody reads.
///
/// # Safety
/// Only XLA calls it, with a frame of its own.
pub unsafe extern "C" fn push(frame: *mut CallFrame) -> RawError {
    // SAFETY: XLA passes the frame of this call.
    let call = match unsafe { Call::new(frame) } {
        Ok(call) => call,
        Err(answer) => return answer,
    };
    let run = call.run();
    let parsed = || {
        let (tensor, array, bytes) = described(&call)?;
        let is_kept = call.result(0)?.data == array;
        let item = (array.expose_provenance() as u64, call.number("priority")?);
        is_kept.then_some((tensor, bytes, item))
    };
    let Some((tensor, bytes, (address, priority))) = parsed() else {
        return call.error(Code::InvalidArgument, NOT_OURS);
    };
    // A program has failed between its push and its pull, if that is still under way.
    let former = lock().remove(&address);
    let _ = former.map(|former| former.handle.wait(None));
    // Where the release does not say, it is the first one.
    let (device, open) = (call.device().unwrap_or(0), GPU.load(Relaxed));
    // For a program that was compiled on another machine, the engine says whether a GPU is open.
    let pushed = if device == open || open < 0 {
        // SAFETY: XLA passes an array of the GPU that is open, of the size that its dimensions say,
        // which is this program's until the pull that takes what this call returns; and a stream of
        // that GPU.
        unsafe { start(&tensor, address, priority, call.stream()) }
    } else {
        Err(format!(
            "byteps.errors.ConfigError: '{}' is on GPU {device}, and byteps sends from GPU {open} \
             in this process: start a process for each GPU, each with its own in \
             CUDA_VISIBLE_DEVICES",
            tensor.name
        ))
    };
    match pushed {
        Ok(handle) => {
            // Arrays without elements have no memory, and nothing to pull.
            if bytes > 0 {
                lock().insert(address, Pushed { run, handle });
            }
            ptr::null_mut()
        }
        Err(text) => {
            abandon(run);
            call.error(Code::Aborted, &text)
        }
    }
}

/// Starts to exchange an array in its place, behind what is enqueued in the stream.
///
/// # Safety
/// As [`bps_worker::Worker::push_pull_gpu`] wants the address, which has the bytes of `tensor`, and
/// the stream.
unsafe fn start(
    tensor: &Declared,
    address: u64,
    priority: i64,
    stream: usize,
) -> Result<Handle, String> {
    let worker = engine().map_err(|cause| error::exception_alone(&cause))?;
    let (numbers, refused) = declared::numbers(std::slice::from_ref(tensor))?;
    let id = numbers[0].ok_or_else(|| refused.unwrap_or_default())?;
    let item = GpuPushPull { tensor: id, source: address, target: address, priority };
    // SAFETY: the caller vouches for address and stream.
    let handles = unsafe { worker.push_pull_gpu(&[item], stream) };
    let handles = handles.map_err(|cause| error::of_engine(&cause))?;
    Ok(handles.into_iter().next().expect("one item has one handle"))
}

/// A result that is to be copied.
struct Copy {
    from: u64,
    to: u64,
    bytes: usize,
}

/// As many arrays as their pushes have returned, and then their tickets; as many results.
///
/// # Safety
/// Only XLA calls it, with a frame of its own.
pub unsafe extern "C" fn pull(frame: *mut CallFrame) -> RawError {
    // SAFETY: XLA passes the frame of this call.
    let call = match unsafe { Call::new(frame) } {
        Ok(call) => call,
        Err(answer) => return answer,
    };
    let copy = |index| {
        let (array, result) = (call.argument(index)?, call.result(index)?);
        let (_, _, bytes) = size_of_buffer(result)?;
        let has_size = size_of_buffer(array)?.2 == bytes;
        let [from, to] = [array, result].map(|one| one.data.expose_provenance() as u64);
        has_size.then_some(Copy { from, to, bytes })
    };
    let copies = (0..call.results()).map(copy).collect::<Option<Vec<_>>>();
    let Some(mut copies) = copies else {
        return call.error(Code::InvalidArgument, NOT_OURS);
    };
    copies.retain(|copy| copy.bytes > 0);
    // SAFETY: the stream is XLA's for this call, of the GPU on which the pushes ran; arguments and
    // results are this call's in that stream's order.
    match unsafe { finish(&copies, call.stream()) } {
        Ok(()) => ptr::null_mut(),
        Err(text) => {
            abandon(call.run());
            call.error(Code::Aborted, &text)
        }
    }
}

/// Enqueues these copies in the stream, behind the results of what was pushed where they begin.
///
/// # Safety
/// The stream is one of the GPU that is open, and in its order the copies' memory is the caller's.
unsafe fn finish(copies: &[Copy], stream: usize) -> Result<(), String> {
    let worker = engine().map_err(|cause| error::exception_alone(&cause))?;
    let handle_of = |pushed: &HashMap<u64, Pushed>, copy: &Copy| {
        pushed.get(&copy.from).map(|one| one.handle.clone())
    };
    let handles: Option<Vec<Handle>> = {
        let pushed = lock();
        copies.iter().map(|copy| handle_of(&pushed, copy)).collect()
    };
    let handles = handles.ok_or(
        "byteps.errors.UsageError: nothing was pushed of an array that is pulled: either the \
         engine was shut down in between, and the whole step is to be run again; or XLA has moved \
         the array, which this release of byteps does not expect: exchange it outside of programs, \
         and please report the program",
    )?;
    worker.enqueue_results(&handles);
    for handle in &handles {
        // The engine ends each handle, with an error if need be.
        handle.wait(None).map_err(|cause| error::of_engine(&cause))?;
    }
    // SAFETY: the caller vouches for the stream.
    unsafe { Handle::make_wait(&handles, stream) }.map_err(|cause| error::of_engine(&cause))?;
    for copy in copies {
        // SAFETY: the caller vouches for the memory; XLA lets a result lie in an argument's place
        // only where it was told to, so the two do not overlap.
        unsafe { worker.copy_on_gpu(copy.to, copy.from, copy.bytes, stream) }
            .map_err(|cause| error::of_engine(&cause))?;
    }
    Ok(())
}
