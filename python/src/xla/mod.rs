//! push_pull inside programs that XLA has compiled: two custom calls, for `byteps.jax`.
//!
//! `push` starts to exchange one array and returns a ticket at once; `pull` takes the tickets of
//! some pushes and gives their results. So all arrays of a step are under way together, each from
//! when it was computed. Neither has a side effect as XLA sees it, which lets them stand in loops,
//! branches and other transformations: a pull depends on its pushes by their tickets, and a push
//! without a pull is dropped, on all ranks alike.
//!
//! On a GPU ([`on_gpu`]) both only enqueue: the engine works where the array lies, which a push
//! returns, so that it stays there for the pull.
//!
//! Programs of TensorFlow have calls of their own ([`in_tensorflow`]), over the same table.
//!
//! XLA finds the calls by address ([`xla_handlers`]).

#![allow(unsafe_code)]

mod abi;
mod exchanges;
pub mod in_tensorflow;
pub mod on_gpu;
mod pull;

use crate::completer;
use crate::declared::Declared;
use abi::{Buffer, Call, CallFrame, Code, RawError};
use pull::{Part, Pull};
use pyo3::prelude::*;
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// The addresses of the custom calls for a release of jaxlib: `push` and `pull` on CPUs, and the
/// same on GPUs.
#[pyfunction]
pub fn xla_handlers(jaxlib: (u32, u32, u32)) -> [usize; 4] {
    abi::set_release(jaxlib);
    let handlers: [Handler; 4] = [push, pull, on_gpu::push, on_gpu::pull];
    handlers.map(|handler| (handler as *const ()).expose_provenance())
}

type Handler = unsafe extern "C" fn(*mut CallFrame) -> RawError;

/// XLA's numbers of this process's devices, in order. In a job of JAX's own (`jax.distributed`)
/// they go on from process to process.
static DEVICES: Mutex<Vec<i64>> = Mutex::new(Vec::new());

/// Tells XLA's numbers of this process's devices, in order.
#[pyfunction]
pub fn xla_devices(numbers: Vec<i64>) {
    *DEVICES.lock().unwrap_or_else(PoisonError::into_inner) = numbers;
}

/// Where a device stands among those of this process, from 0. `None` if it is not one of them: any
/// place would give its array the name of another device's.
fn place_of(device: i64) -> Option<usize> {
    let devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    // The numbers are told when a program is compiled: not where all were compiled elsewhere.
    let is_first = devices.is_empty() && device == 0;
    devices.iter().position(|&number| number == device).or(is_first.then_some(0))
}

/// The version of the interface that XLA has shown, once it has, and whether it is known here.
#[pyfunction]
pub fn xla_version() -> Option<(i32, i32, bool)> {
    abi::seen_version().map(|(major, minor)| (major, minor, abi::is_known((major, minor))))
}

/// The engine has ended: what was not pulled never will be.
#[pyfunction]
pub fn xla_forget() {
    exchanges::forget_all();
    on_gpu::forget_all();
}

/// What the engine calls a type of XLA's, and the bytes of an element.
fn dtype_of(number: i32) -> Option<(&'static str, usize)> {
    Some(match number {
        2 => ("i8", 1),
        4 => ("i32", 4),
        5 => ("i64", 8),
        6 => ("u8", 1),
        10 => ("f16", 2),
        11 => ("f32", 4),
        12 => ("f64", 8),
        16 => ("bf16", 2),
        _ => return None,
    })
}

/// The shape of a buffer, and its bytes.
fn size_of_buffer(buffer: Buffer<'_>) -> Option<(&'static str, Vec<u64>, usize)> {
    let (dtype, element) = dtype_of(buffer.dtype)?;
    let shape: Vec<u64> =
        buffer.dimensions.iter().map(|&one| u64::try_from(one).ok()).collect::<Option<_>>()?;
    let bytes = shape
        .iter()
        .try_fold(element, |bytes, &one| bytes.checked_mul(usize::try_from(one).ok()?))?;
    Some((dtype, shape, bytes))
}

const TICKET_BYTES: usize = 8;

/// A ticket's memory: two numbers of 32 bits, since JAX has none of 64 by default.
fn ticket_of(buffer: Option<Buffer<'_>>) -> Option<*mut u8> {
    buffer.filter(|one| one.dtype == 8 && one.dimensions == [2]).map(|one| one.data)
}

const NOT_OURS: &str = "byteps.errors.UsageError: a custom call of byteps has other arguments than \
    byteps.jax gives it: call byteps.jax.push_pull";

/// What a push exchanges, in the host's memory; its address; its bytes.
fn described(call: &Call<'_>) -> Option<(Declared, *mut u8, usize)> {
    let argument = call.argument(0)?;
    let (dtype, shape, bytes) = size_of_buffer(argument)?;
    let name = call.text("name")?.to_owned();
    let operation = call.text("operation")?.to_owned();
    let root = u32::try_from(call.number("root")?).ok()?;
    let encoding = call.text("encoding")?.to_owned();
    // Numbers with commas between them, nothing for all ranks.
    let ranks = call.text("ranks")?.split(',').filter(|one| !one.is_empty());
    let ranks: Vec<u32> = ranks.map(|one| one.parse().ok()).collect::<Option<_>>()?;
    let device = call.number("device") == Some(1);
    let backups = i32::try_from(call.number("backups")?).ok()?;
    let tensor = Declared { name, operation, root, dtype, shape, encoding, ranks, device, backups };
    Some((tensor, argument.data, bytes))
}

/// One argument: the array. One result: the ticket.
///
/// # Safety
/// Only XLA calls it, with a frame of its own.
unsafe extern "C" fn push(frame: *mut CallFrame) -> RawError {
    // SAFETY: XLA passes the frame of this call.
    let call = match unsafe { Call::new(frame) } {
        Ok(call) => call,
        Err(answer) => return answer,
    };
    let parsed = || {
        let (tensor, array, bytes) = described(&call)?;
        Some((tensor, array, bytes, call.number("priority")?, ticket_of(call.result(0))?))
    };
    let Some((mut tensor, data, bytes, priority, target)) = parsed() else {
        return call.error(Code::InvalidArgument, NOT_OURS);
    };
    // Where the release does not say, there can be one device only.
    if let Some(device) = call.device() {
        match place_of(device) {
            Some(0) => {}
            Some(place) => tensor.name = format!("{}@device {place}", tensor.name),
            None => {
                let name = tensor.name;
                let text = format!(
                    "byteps.errors.UsageError: '{name}' is on CPU device {device}, which is not \
                     known here: compile a program with byteps.jax.push_pull in this process \
                     before it runs one that was compiled in another"
                );
                return call.error(Code::InvalidArgument, &text);
            }
        }
    }
    // SAFETY: XLA keeps the argument, of the size that its dimensions say, until the call returns.
    let pushed = unsafe { exchanges::push(&tensor, (data, bytes), priority, call.run()) };
    match pushed {
        Ok(ticket) => {
            let from = ticket.to_ne_bytes();
            // SAFETY: the result was just checked to have two elements of 32 bits, which are
            // this call's to write.
            unsafe { from.as_ptr().copy_to_nonoverlapping(target, TICKET_BYTES) };
            ptr::null_mut()
        }
        Err(text) => call.error(Code::Aborted, &text),
    }
}

/// As many arrays, which only lend their memory, and then as many tickets; as many results.
///
/// # Safety
/// Only XLA calls it, with a frame of its own.
unsafe extern "C" fn pull(frame: *mut CallFrame) -> RawError {
    // SAFETY: XLA passes the frame of this call.
    let mut call = match unsafe { Call::new(frame) } {
        Ok(call) => call,
        Err(answer) => return answer,
    };
    let count = call.results();
    let mut parts = Vec::with_capacity(count);
    for index in 0..count {
        let result = call.result(index);
        let size = result.and_then(size_of_buffer);
        let ticket = ticket_of(call.argument(count + index));
        let (Some(result), Some((_, _, bytes)), Some(ticket)) = (result, size, ticket) else {
            return call.error(Code::InvalidArgument, NOT_OURS);
        };
        let mut number = [0; TICKET_BYTES];
        // SAFETY: the argument was just checked to have two elements of 32 bits.
        unsafe { ticket.copy_to_nonoverlapping(number.as_mut_ptr(), TICKET_BYTES) };
        match exchanges::find(u64::from_ne_bytes(number)) {
            Ok(exchange) => parts.push(Part { exchange, target: result.data, bytes }),
            Err(text) => return call.error(Code::Aborted, &text),
        }
    }
    let mut failed = None;
    parts.retain(|part| {
        // SAFETY: this call has not returned.
        match unsafe { part.deliver() } {
            None => true,
            Some(result) => {
                failed = failed.take().or(result.err());
                false
            }
        }
    });
    if let Some(text) = failed {
        return call.error(Code::Aborted, &text);
    }
    if parts.is_empty() {
        return ptr::null_mut();
    }
    if completer::runs()
        && let Some(future) = call.future()
    {
        let handles: Vec<_> = parts.iter().map(|part| part.exchange.handle().clone()).collect();
        completer::complete(Box::new(Pull::new(parts, future)), &handles);
        return ptr::null_mut();
    }
    for part in &parts {
        // The engine ends each handle, with an error if need be.
        let _ = part.exchange.handle().wait(None);
        // SAFETY: this call has not returned.
        if let Some(Err(text)) = unsafe { part.deliver() } {
            return call.error(Code::Aborted, &text);
        }
    }
    ptr::null_mut()
}
