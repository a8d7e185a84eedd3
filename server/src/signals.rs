//! SIGTERM and Ctrl-C as a server sees them: flags that its loops look at.

#![forbid(unsafe_code)]

use crate::error::{ServerError, resource};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// How SIGTERM is called.
pub(crate) const SIGTERM_NAME: &str = "SIGTERM";

/// The signals that end a server in good order.
pub(crate) struct Signals {
    terminated: Arc<AtomicBool>,
    interrupted: Arc<AtomicBool>,
    /// Nobody knows of this server yet, so a signal ends it at once.
    alone: Arc<AtomicBool>,
}

impl Signals {
    pub(crate) fn install() -> Result<Signals, ServerError> {
        let signals = Signals {
            terminated: Arc::default(),
            interrupted: Arc::default(),
            alone: Arc::default(),
        };
        let fail = |error: std::io::Error| resource("a signal handler", error);
        for (signal, code) in [(SIGTERM, 143), (SIGINT, 130)] {
            let alone = Arc::clone(&signals.alone);
            signal_hook::flag::register_conditional_shutdown(signal, code, alone).map_err(fail)?;
        }
        let register = signal_hook::flag::register;
        register(SIGTERM, Arc::clone(&signals.terminated)).map_err(fail)?;
        register(SIGINT, Arc::clone(&signals.interrupted)).map_err(fail)?;
        Ok(signals)
    }

    /// Does what may take long before anybody knows of this server.
    pub(crate) fn while_alone<T>(&self, work: impl FnOnce() -> T) -> Result<T, ServerError> {
        self.alone.store(true, Ordering::Relaxed);
        // One that came before found nobody who ends the process.
        if let Some(signal) = self.came() {
            return Err(ServerError::Signal(signal));
        }
        let done = work();
        self.alone.store(false, Ordering::Relaxed);
        Ok(done)
    }

    /// Takes SIGTERM for a notice that this server is to leave: from now on the next signal counts.
    pub(crate) fn take_notice(&self) {
        self.terminated.store(false, Ordering::Relaxed);
    }

    pub(crate) fn came(&self) -> Option<&'static str> {
        let came = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        came(&self.terminated)
            .then_some(SIGTERM_NAME)
            .or_else(|| came(&self.interrupted).then_some("Ctrl-C"))
    }
}
