//! What a thread sleeps for, as those see it who would wake it.
//!
//! The sleeper says it, looks once more at everything that may be new, and sleeps. Whoever has made
//! something new looks whether it is slept for, and rings if it is. Both put a fence between what
//! they write and where they look: one of them sees what the other has written, and nobody sleeps
//! on what is there.

#![forbid(unsafe_code)]

use crate::sync::{AtomicU32, Ordering, fence};

/// Bits that say for what; none while the thread is awake, as in fresh memory.
#[repr(transparent)]
pub(super) struct Interest(AtomicU32);

impl Interest {
    /// Of a thread that is awake.
    pub(super) fn none() -> Interest {
        Interest(AtomicU32::new(0))
    }

    /// The thread is about to sleep for these, and [looks](Self::before_looking) once more; with
    /// none, it is awake.
    pub(super) fn say(&self, bits: u32) {
        // A swap costs more, and only a model needs one: see `crate::sync`.
        #[cfg(all(test, loom))]
        self.0.swap(bits, Ordering::Relaxed);
        #[cfg(not(all(test, loom)))]
        self.0.store(bits, Ordering::Relaxed);
    }

    /// What was said of any interests comes before the looks behind this.
    pub(super) fn before_looking() {
        fence(Ordering::SeqCst);
    }

    /// Whether the thread sleeps for any of this, which has just become new, and is to be rung. Of
    /// those who ask for the same sleep one is told so.
    #[must_use]
    pub(super) fn take(&self, news: u32) -> bool {
        // The pair of the fence in `before_looking`.
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) & news != 0 && self.0.swap(0, Ordering::Relaxed) != 0
    }

    #[cfg(test)]
    pub(super) fn said(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, loom))]
mod orders {
    use super::*;
    use loom::sync::{Arc, Condvar, Mutex};

    /// A thread that sleeps, and what others may have for it.
    struct Place {
        interest: Interest,
        news: [AtomicU32; 2],
        /// The eventfd: whether it was rung.
        rung: Mutex<bool>,
        changed: Condvar,
    }

    impl Place {
        fn tell(&self, which: usize) {
            // Relaxed: the fence is all that is needed.
            self.news[which].store(1, Ordering::Relaxed);
            if self.interest.take(1 << which) {
                *self.rung.lock().unwrap() = true;
                self.changed.notify_one();
            }
        }

        fn has_all(&self) -> bool {
            self.news.iter().all(|one| one.load(Ordering::Relaxed) == 1)
        }

        /// Sleeps until the next ring, if something has yet to come.
        fn sleep(&self) {
            let left = |which: usize| self.news[which].load(Ordering::Relaxed) == 0;
            let bits = u32::from(left(0)) | u32::from(left(1)) << 1;
            self.interest.say(bits);
            Interest::before_looking();
            let is_new = |which: usize| bits & 1 << which != 0 && !left(which);
            if bits != 0 && !is_new(0) && !is_new(1) {
                let mut rung = self.rung.lock().unwrap();
                while !*rung {
                    rung = self.changed.wait(rung).unwrap();
                }
                *rung = false;
            }
            self.interest.say(0);
        }
    }

    #[test]
    fn nobody_sleeps_on_what_is_there() {
        // Three threads have too many orders to go through them all.
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let place = Arc::new(Place {
                interest: Interest::none(),
                news: [AtomicU32::new(0), AtomicU32::new(0)],
                rung: Mutex::new(false),
                changed: Condvar::new(),
            });
            let tellers = [0, 1].map(|which| {
                let place = Arc::clone(&place);
                loom::thread::spawn(move || place.tell(which))
            });
            // One that never woke would hang here, which the model reports.
            while !place.has_all() {
                place.sleep();
            }
            tellers.into_iter().for_each(|teller| teller.join().unwrap());
        });
    }
}
