//! Threads that complete what programs of a framework wait for: exchanges end, the results are
//! taken, and the framework is told.
//!
//! A framework may go on with its program on the thread that tells it, for as long as that takes.
//! So one thread at a time, the *leader*, waits for exchanges, and hands that over before it tells
//! anybody anything.

#![forbid(unsafe_code)]

use bps_worker::Handle;
use bps_worker::task::Bell;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Threads that may be inside programs at once, and one that waits.
const THREADS: usize = 4;
/// How long the leader sleeps at most before it looks again.
const SLICE: Duration = Duration::from_millis(500);

/// A call of a framework that waits for exchanges.
pub trait PendingCall: Send {
    /// Takes what has come; whether that was the last, or nothing more matters.
    fn is_over(&mut self) -> bool;

    /// Tells the framework what has become of the call.
    fn finish(self: Box<Self>);
}

#[derive(Default)]
struct State {
    calls: Vec<Box<dyn PendingCall>>,
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
            std::thread::Builder::new().name(format!("bps-done-{number}")).spawn(work).is_ok()
        };
        (0..THREADS).filter(|&number| start(number)).count() > 0
    })
}

/// Finishes the call once these, which are all that it waits for, have ended, or it says so before.
pub fn complete(call: Box<dyn PendingCall>, handles: &[Handle]) {
    // Before they are watched: once the bell rings, the call has to be here.
    lock().calls.push(call);
    for handle in handles {
        let _ = handle.watch(&BELL);
    }
    BELL.ring();
}

/// The thread that waits for exchanges, until this is dropped.
struct Leader;

impl Drop for Leader {
    fn drop(&mut self) {
        lock().has_leader = false;
        IS_FREE.notify_one();
    }
}

fn work() {
    loop {
        let mut state = lock();
        while state.has_leader {
            // Without a limit: a thread rests here, and no call depends on it. Whoever leads looks
            // at the calls at least each slice, and its `Leader` wakes one of us however it ends.
            state = IS_FREE.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.has_leader = true;
        drop(state);
        let leader = Leader;
        let ended = lead();
        drop(leader);
        for call in ended {
            call.finish();
        }
    }
}

/// Waits until calls have ended.
fn lead() -> Vec<Box<dyn PendingCall>> {
    loop {
        // Read before the handles are: what ends from now on rings once more.
        let rings = BELL.rings();
        let mut open = std::mem::take(&mut lock().calls);
        let ended: Vec<_> = open.extract_if(.., |call| call.is_over()).collect();
        lock().calls.append(&mut open);
        if !ended.is_empty() {
            return ended;
        }
        BELL.wait(rings, SLICE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{SyncSender, sync_channel};

    /// Far longer than a thread takes to be woken.
    const LONG: Duration = Duration::from_secs(60);

    /// One that says that it is looked at, and takes its thread with it.
    struct Faulty(SyncSender<()>);

    impl PendingCall for Faulty {
        fn is_over(&mut self) -> bool {
            let _ = self.0.send(());
            panic!("what a call does may fail");
        }

        fn finish(self: Box<Self>) {
            unreachable!("it never ended");
        }
    }

    /// One that has ended.
    struct Ended(SyncSender<()>);

    impl PendingCall for Ended {
        fn is_over(&mut self) -> bool {
            true
        }

        fn finish(self: Box<Self>) {
            let _ = self.0.send(());
        }
    }

    #[test]
    fn a_leader_that_panics_leaves_the_lead_to_another_thread() {
        assert!(runs());
        for _ in 1..THREADS {
            let (sender, seen) = sync_channel(1);
            complete(Box::new(Faulty(sender)), &[]);
            assert_eq!(seen.recv_timeout(LONG), Ok(()), "nobody looks at calls any more");
            // The call that failed was taken by its thread, and this one was not.
            let (sender, finished) = sync_channel(1);
            complete(Box::new(Ended(sender)), &[]);
            assert_eq!(finished.recv_timeout(LONG), Ok(()), "nobody leads");
        }
    }
}
