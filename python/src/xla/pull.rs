//! A call of XLA's that pulls: copies the results of exchanges as they come, then tells XLA.

#![allow(unsafe_code)]

use super::abi::Future;
use super::exchanges::Exchange;
use crate::completer::PendingCall;
use std::sync::Arc;

/// Where the result of an exchange goes.
pub struct Part {
    /// The exchange.
    pub exchange: Arc<Exchange>,
    /// Where its result goes.
    pub target: *mut u8,
    /// How large that is.
    pub bytes: usize,
}

// SAFETY: the target is memory of a call of XLA's, which it keeps until the call's future is
// completed, and which nobody but the thread that has this part touches.
unsafe impl Send for Part {}

impl Part {
    /// Copies the result if it is there; `None` if it is not.
    ///
    /// # Safety
    /// The call whose result this is has neither returned nor, if it has a future, been completed.
    pub unsafe fn deliver(&self) -> Option<Result<(), String>> {
        // SAFETY: XLA gives the memory of a result to its call alone, until its end.
        let deliver = || unsafe { self.exchange.deliver(self.target, self.bytes) };
        self.exchange.handle().is_told().then(deliver)
    }
}

/// A call of XLA's that waits for exchanges.
pub struct Pull {
    parts: Vec<Part>,
    future: Future,
    failed: Option<String>,
}

impl Pull {
    /// The call of this future, which waits for these.
    pub fn new(parts: Vec<Part>, future: Future) -> Pull {
        Pull { parts, future, failed: None }
    }
}

impl PendingCall for Pull {
    fn is_over(&mut self) -> bool {
        let failed = &mut self.failed;
        self.parts.retain(|part| {
            // SAFETY: the future of this call is here, and not completed.
            match unsafe { part.deliver() } {
                None => true,
                Some(result) => {
                    *failed = failed.take().or(result.err());
                    false
                }
            }
        });
        self.failed.is_some() || self.parts.is_empty()
    }

    fn finish(self: Box<Self>) {
        self.future.complete(self.failed.map_or(Ok(()), Err));
    }
}
