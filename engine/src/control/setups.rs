//! A few threads on which lanes are set up. A peer that is slow, or falls silent after its
//! handshake, holds up one of them, and not the thread that accepts for everybody.

use crate::limits::RANKS_MAX;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Set-ups at once; each ends by its own deadline.
const THREADS_MAX: usize = 32;
/// Set-ups that may wait for a thread: one for each rank of the largest job.
const WAITING_MAX: usize = RANKS_MAX;
/// How long a thread stays that has nothing to do.
const LINGER: Duration = Duration::from_secs(1);

type Task = Box<dyn FnOnce() + Send>;

/// See the [module](self). Threads are started as they are needed, and end by themselves.
#[derive(Clone, Default)]
pub struct Setups(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Task>,
    threads: usize,
    idle: usize,
}

impl Setups {
    /// Runs `task` on one of the threads, soon. Says whether it will: not where too many wait, or
    /// no thread can be started.
    #[must_use]
    pub fn run(&self, task: impl FnOnce() + Send + 'static) -> bool {
        let mut state = self.0.lock();
        if state.waiting.len() >= WAITING_MAX {
            return false;
        }
        if state.idle <= state.waiting.len() && state.threads < THREADS_MAX {
            let shared = Arc::clone(&self.0);
            let body = move || shared.work();
            match std::thread::Builder::new().name("bps-setup".into()).spawn(body) {
                Ok(_) => state.threads += 1,
                Err(_) if state.threads == 0 => return false,
                Err(_) => {}
            }
        }
        state.waiting.push_back(Box::new(task));
        self.0.more.notify_one();
        true
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Tasks run without the lock, so a panic of one leaves the state whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            while let Some(task) = state.waiting.pop_front() {
                drop(state);
                // A panic has been printed, and costs its own lane.
                let _ = catch_unwind(AssertUnwindSafe(task));
                state = self.lock();
            }
            state.idle += 1;
            let (guard, timeout) = self
                .more
                .wait_timeout_while(state, LINGER, |state| state.waiting.is_empty())
                .unwrap_or_else(PoisonError::into_inner);
            state = guard;
            state.idle -= 1;
            if timeout.timed_out() {
                state.threads -= 1;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn a_task_that_waits_holds_up_no_other_and_all_are_done() {
        let setups = Setups::default();
        let (release, held) = channel::<()>();
        assert!(setups.run(move || assert!(held.recv().is_err())));
        let (done, ends) = channel();
        for at in 0..200 {
            let done = done.clone();
            assert!(setups.run(move || done.send(at).expect("the test waits")));
        }
        let mut ended: Vec<u32> =
            (0..200).map(|_| ends.recv_timeout(SOON).expect("soon")).collect();
        ended.sort_unstable();
        assert!(ended.into_iter().eq(0..200));
        drop(release);
    }

    #[test]
    fn a_task_that_panics_holds_up_no_other() {
        let setups = Setups::default();
        for _ in 0..2 * THREADS_MAX {
            assert!(setups.run(|| panic!("on purpose")));
        }
        let (done, ends) = channel();
        assert!(setups.run(move || done.send(()).expect("the test waits")));
        ends.recv_timeout(SOON).expect("a thread is left");
    }
}
