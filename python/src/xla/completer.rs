//! Threads that complete pulls: they wait for exchanges to end, copy the results and tell XLA.
//!
//! XLA may go on with its program on the thread that tells it, for as long as that takes. So one
//! thread at a time, the *leader*, waits for exchanges, and hands that over before it tells XLA
//! anything.

#![allow(unsafe_code)]

use super::abi::Future;
use super::exchanges::Exchange;
use bps_worker::task::Bell;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Threads that may be inside XLA's programs at once, and one that waits.
const THREADS: usize = 4;
/// How long the leader sleeps at most before it looks again.
const SLICE: Duration = Duration::from_millis(500);

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
}

#[derive(Default)]
struct State {
    pulls: Vec<Pull>,
    has_leader: bool,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);
static IS_FREE: Condvar = Condvar::new();
static BELL: LazyLock<Arc<Bell>> = LazyLock::new(Arc::default);

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the threads run; the first call starts them.
pub fn runs() -> bool {
    static RUNS: OnceLock<bool> = OnceLock::new();
    *RUNS.get_or_init(|| {
        let start = |number| {
            std::thread::Builder::new().name(format!("bps-xla-{number}")).spawn(work).is_ok()
        };
        (0..THREADS).filter(|&number| start(number)).count() > 0
    })
}

/// Completes the future once all parts have come, or one has failed.
pub fn complete(parts: Vec<Part>, future: Future) {
    let handles: Vec<_> = parts.iter().map(|part| part.exchange.handle().clone()).collect();
    // Before they are watched: once the bell rings, they have to be here.
    lock().pulls.push(Pull { parts, future });
    for handle in handles {
        let _ = handle.watch(&BELL);
    }
    BELL.ring();
}

fn work() {
    loop {
        let mut state = lock();
        while state.has_leader {
            state = IS_FREE.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.has_leader = true;
        drop(state);
        let ended = lead();
        lock().has_leader = false;
        IS_FREE.notify_one();
        for (future, result) in ended {
            future.complete(result);
        }
    }
}

/// Waits until pulls have ended.
fn lead() -> Vec<(Future, Result<(), String>)> {
    let mut ended = Vec::new();
    loop {
        // Read before the handles are: what ends from now on rings once more.
        let rings = BELL.rings();
        let mut open = std::mem::take(&mut lock().pulls);
        let mut waiting = Vec::with_capacity(open.len());
        for mut pull in open.drain(..) {
            match pull.progress() {
                Some(result) => ended.push((pull.future, result)),
                None => waiting.push(pull),
            }
        }
        lock().pulls.append(&mut waiting);
        if !ended.is_empty() {
            return ended;
        }
        BELL.wait(rings, SLICE);
    }
}

impl Pull {
    /// Copies what has come; the result of all if that is known.
    fn progress(&mut self) -> Option<Result<(), String>> {
        let mut failed = None;
        self.parts.retain(|part| {
            // SAFETY: the future of this call is here, and not completed.
            match unsafe { part.deliver() } {
                None => true,
                Some(result) => {
                    failed = failed.take().or(result.err());
                    false
                }
            }
        });
        match failed {
            Some(text) => Some(Err(text)),
            None => self.parts.is_empty().then_some(Ok(())),
        }
    }
}
