//! Waits that Ctrl-C interrupts, and the time that callers give them.

#![forbid(unsafe_code)]

use crate::error;
use pyo3::prelude::*;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

/// How long a wait goes on before it looks whether a signal (Ctrl-C) has come.
pub const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Runs what may take long on a thread of its own, so that Ctrl-C interrupts the wait for it. When
/// it does, the result is handed to `abandon` whenever it comes.
pub fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
    abandon: impl FnOnce(T) + Send + 'static,
) -> PyResult<T> {
    let (sender, mut receiver) = mpsc::sync_channel(0);
    std::thread::Builder::new()
        .name("bps-call".into())
        .spawn(move || {
            if let Err(unwanted) = sender.send(work()) {
                abandon(unwanted.0);
            }
        })
        .map_err(|cause| error::raise("StartError", format!("no thread for a call: {cause}")))?;
    let receiver = &mut receiver; // A shared reference would not be allowed to cross `detach`.
    loop {
        match py.detach(|| receive(receiver)) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(error::raise(
                    "BytePSError",
                    "the engine failed within a call; its message is on standard error",
                ));
            }
        }
    }
}

fn receive<T>(receiver: &mut Receiver<T>) -> Result<T, RecvTimeoutError> {
    receiver.recv_timeout(SIGNAL_CHECK_INTERVAL)
}

/// A number of seconds from Python.
pub fn seconds(timeout: Option<f64>) -> PyResult<Option<Duration>> {
    timeout
        .map(|seconds| {
            Duration::try_from_secs_f64(seconds).map_err(|_| {
                error::raise(
                    "ConfigError",
                    format!(
                        "a timeout is a number of seconds from 0 upwards, or None; not {seconds}"
                    ),
                )
            })
        })
        .transpose()
}
