//! The two calls on a GPU, for `byteps.jax`.
//!
//! A push returns its argument, in the argument's place, and a pull takes that array and gives the
//! result in its place again. So the memory is the exchange's from one to the other, and the engine
//! reads and writes it where it lies. A push hands it over behind what is enqueued in XLA's stream;
//! a pull waits until the engine has enqueued what brings the results, and puts the stream behind
//! that. XLA runs the calls of a program in one order, on one thread at a time, and the host never
//! waits for the GPU.
//!
//! A pull cannot read a ticket, which would be in the memory of the GPU: it finds its pushes by the
//! run of the program and by numbers, which Python gave both when the program was compiled.
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
use std::collections::{HashMap, VecDeque};
use std::ptr;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// From how many pushes on those are looked for that will not be pulled, since their program has
/// failed for reasons of its own.
const PUSHES_MAX: usize = 1 << 16;

/// CUDA's number of the GPU that programs were compiled for; -1 if none was. A job opens it before
/// the numbers of its tensors are told.
static GPU: AtomicI64 = AtomicI64::new(-1);

/// Tells which GPU that is.
#[pyfunction]
pub fn xla_gpu(ordinal: u32) {
    GPU.store(i64::from(ordinal), Relaxed);
}

/// A run of a program, and one of the exchanges in it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    run: Option<i64>,
    exchange: i64,
}

struct Pushed {
    address: u64,
    handle: Handle,
}

/// What was pushed and not pulled, in order: in a loop, an exchange is pushed again and again.
static PUSHED: LazyLock<Mutex<HashMap<Key, VecDeque<Pushed>>>> = LazyLock::new(Mutex::default);

fn lock() -> MutexGuard<'static, HashMap<Key, VecDeque<Pushed>>> {
    PUSHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The engine has ended: what was not pulled never will be.
pub fn forget_all() {
    let forgotten = std::mem::take(&mut *lock());
    drop(forgotten);
}

/// Waits until the engine has done with all that a run has pushed.
fn abandon(run: Option<i64>) {
    let mut left = Vec::new();
    lock().retain(|key, pushed| {
        let stays = key.run != run;
        if !stays {
            left.extend(pushed.drain(..));
        }
        stays
    });
    for one in left {
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
    let parsed = || {
        let (tensor, array, _) = described(&call)?;
        let is_kept = call.result(0)?.data == array;
        let key = Key { run: call.run(), exchange: call.number("exchange")? };
        let item = (array.expose_provenance() as u64, call.number("priority")?);
        is_kept.then_some((Declared { device: true, ..tensor }, key, item, call.stream()?))
    };
    let Some((tensor, key, (address, priority), stream)) = parsed() else {
        return call.error(Code::InvalidArgument, NOT_OURS);
    };
    let (device, open) = (call.device(), GPU.load(Relaxed));
    // For a program that was compiled on another machine, the engine says whether a GPU is open.
    let pushed = if device == open || open < 0 {
        // SAFETY: XLA passes an array of the GPU that is open, of the size that its dimensions say,
        // which is this program's until the pull that takes what this call returns; and a stream of
        // that GPU.
        unsafe { start(&tensor, address, priority, stream) }
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
            let mut all = lock();
            if all.len() >= PUSHES_MAX {
                all.retain(|_, pushed| pushed.iter().any(|one| !one.handle.poll()));
            }
            all.entry(key).or_default().push_back(Pushed { address, handle });
            ptr::null_mut()
        }
        Err(text) => {
            abandon(key.run);
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

/// As many arrays as their pushes have returned, and then their tickets; as many results, in the
/// arrays' places.
///
/// # Safety
/// Only XLA calls it, with a frame of its own.
pub unsafe extern "C" fn pull(frame: *mut CallFrame) -> RawError {
    // SAFETY: XLA passes the frame of this call.
    let call = match unsafe { Call::new(frame) } {
        Ok(call) => call,
        Err(answer) => return answer,
    };
    let run = call.run();
    let parsed = || {
        let numbers = call.text("exchanges")?.split(',');
        let numbers: Vec<i64> = numbers.map(|one| one.parse().ok()).collect::<Option<_>>()?;
        let place = |(index, exchange)| {
            let (array, result) = (call.argument(index)?, call.result(index)?);
            size_of_buffer(result)?;
            let is_kept = array.data == result.data;
            is_kept.then_some((exchange, array.data.expose_provenance() as u64))
        };
        let places: Vec<_> = numbers.into_iter().enumerate().map(place).collect::<Option<_>>()?;
        (places.len() == call.results()).then_some((places, call.stream()?))
    };
    let done = match parsed() {
        // SAFETY: the stream is XLA's for this call, of the GPU on which its pushes ran.
        Some((places, stream)) => unsafe { finish(run, &places, stream) },
        None => Err(NOT_OURS.to_owned()),
    };
    match done {
        Ok(()) => ptr::null_mut(),
        Err(text) => {
            abandon(run);
            call.error(Code::Aborted, &text)
        }
    }
}

/// Puts the stream behind the results of these pushes, each given by its number and the address at
/// which its result is wanted.
///
/// # Safety
/// The stream is one of the GPU that is open.
unsafe fn finish(run: Option<i64>, places: &[(i64, u64)], stream: usize) -> Result<(), String> {
    let (mut handles, mut moved) = (Vec::with_capacity(places.len()), false);
    {
        let mut all = lock();
        for &(exchange, address) in places {
            let key = Key { run, exchange };
            let pushed = all.get_mut(&key).and_then(VecDeque::pop_front);
            if all.get(&key).is_some_and(VecDeque::is_empty) {
                all.remove(&key);
            }
            moved |= pushed.as_ref().is_some_and(|one| one.address != address);
            handles.extend(pushed.map(|one| one.handle));
        }
    }
    if let Ok(worker) = engine() {
        worker.enqueue_results(&handles);
    }
    let mut failed = None;
    for handle in &handles {
        // The engine ends each handle, with an error if need be.
        failed = failed.or(handle.wait(None).err());
    }
    if let Some(cause) = failed {
        return Err(error::of_engine(&cause));
    }
    if handles.len() < places.len() {
        return Err("byteps.errors.NotInitializedError: the engine was shut down between a push \
                    and its pull: run the whole step again"
            .to_owned());
    }
    if moved {
        return Err(
            "byteps.errors.UsageError: XLA has moved an array between a push and its pull, \
                    which this release of byteps does not expect: please report the program, and \
                    exchange outside of it meanwhile"
                .to_owned(),
        );
    }
    // SAFETY: the caller vouches for the stream.
    unsafe { Handle::make_wait(&handles, stream) }.map_err(|cause| error::of_engine(&cause))
}
