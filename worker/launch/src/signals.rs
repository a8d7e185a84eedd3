//! Turns signals into bytes on a socket, so that the launcher can wait for them and for output at
//! once.

#![forbid(unsafe_code)]

use super::error::LaunchError;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use signal_hook::SigId;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::{pipe, unregister};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// The handlers, for as long as this lives.
pub(super) struct Signals {
    sources: Vec<(i32, UnixStream)>,
    handlers: Vec<SigId>,
}

impl Signals {
    pub(super) fn catch() -> Result<Signals, LaunchError> {
        let failed = |source| LaunchError::System { what: "cannot catch signals", source };
        Signals::register().map_err(failed)
    }

    fn register() -> io::Result<Signals> {
        let mut signals = Signals { sources: Vec::new(), handlers: Vec::new() };
        for signal in [SIGCHLD, SIGINT, SIGTERM, SIGHUP] {
            // `nohup bpslaunch` means what it says.
            if signal == SIGHUP && is_ignored(SIGHUP) {
                continue;
            }
            let (read, write) = UnixStream::pair()?;
            read.set_nonblocking(true)?;
            signals.handlers.push(pipe::register(signal, write)?);
            signals.sources.push((signal, read));
        }
        Ok(signals)
    }

    /// What to poll for readiness to read.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.sources.iter().map(|(_, source)| source.as_fd())
    }

    /// The ending signals that came since the last call. Children are noticed by being asked for.
    pub(super) fn take(&mut self) -> Vec<i32> {
        let mut came = Vec::new();
        let mut buffer = [0; 64];
        for (signal, source) in &mut self.sources {
            while let Ok(count @ 1..) = source.read(&mut buffer) {
                if *signal != SIGCHLD {
                    came.extend(std::iter::repeat_n(*signal, count));
                }
            }
        }
        came
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for handler in self.handlers.drain(..) {
            unregister(handler);
        }
    }
}

fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Makes reads of a pipe return at once when it is empty.
pub(super) fn set_nonblocking(descriptor: impl AsFd) -> io::Result<()> {
    let flags = fcntl_getfl(&descriptor)?;
    Ok(fcntl_setfl(&descriptor, flags | OFlags::NONBLOCK)?)
}

/// `SIGSEGV`, or the number of a signal without a name here.
pub(super) fn name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal)
        .map_or_else(|| format!("signal {signal}"), str::to_owned)
}
