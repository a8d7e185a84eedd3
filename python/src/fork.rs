//! What a forked child may do: nothing, and it is told so at once.
//!
//! The engine is threads, rings and sockets; of these a child inherits only memory. So a handler
//! that the C library runs in each child marks it, before any other code of the child runs, and
//! every entry point looks at the mark first: no lock is taken and nothing is dropped there that a
//! thread of the parent may have held.

#![allow(unsafe_code)]

use crate::error;
use pyo3::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// An engine has been started in this process.
static STARTED: AtomicBool = AtomicBool::new(false);
/// This process is a child of one in which an engine had been started.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Registers the handler, once for the life of the process.
pub fn install() -> PyResult<()> {
    // SAFETY: `mark` is an `extern "C"` function without arguments that lives as long as the
    // process, since the interpreter never unloads an extension module; it touches nothing but
    // atomics and may raise a signal, so it is async-signal-safe, which POSIX asks of a child's
    // handler in a process with several threads.
    let code = unsafe { libc::pthread_atfork(None, None, Some(mark)) };
    if code != 0 {
        return Err(error::raise(
            "StartError",
            format!("the C library took no fork handler (error {code}): free some memory"),
        ));
    }
    Ok(())
}

extern "C" fn mark() {
    if STARTED.load(Relaxed) {
        FORKED.store(true, Relaxed);
    }
    bps_worker::terminated::in_child();
}

/// Says that from now on a child is no place for calls.
pub fn engine_starts() {
    STARTED.store(true, Relaxed);
}

/// Says that no engine is left: a child may start one of its own.
pub fn engine_ended() {
    STARTED.store(false, Relaxed);
}

/// Whether this process inherited an engine that cannot run here.
pub fn is_child() -> bool {
    FORKED.load(Relaxed)
}

/// Refuses in a forked child.
pub fn check() -> PyResult<()> {
    if is_child() {
        return Err(error::raise(
            "ForkedError",
            "the engine does not survive fork(): use it in the parent process, or start this \
             process by spawn",
        ));
    }
    Ok(())
}
