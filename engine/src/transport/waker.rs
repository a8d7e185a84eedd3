//! How a thread that sleeps in a transport is woken by another thread: an eventfd, rung only if
//! needed.

use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

struct Inner {
    event: OwnedFd,
    asleep: AtomicBool,
}

/// Wakes the one thread that sleeps on it. Clones wake the same thread.
///
/// The sleeper calls [`prepare`](Waker::prepare), looks once more at every queue that others fill,
/// then blocks on [`fd`](Waker::fd) and calls [`awake`](Waker::awake). A producer fills a queue,
/// then calls [`wake`](Waker::wake). Both sides are sequentially consistent, so either the sleeper
/// sees the item or the producer sees the sleeper.
#[derive(Clone)]
pub struct Waker(Arc<Inner>);

impl Waker {
    /// A new waker with an eventfd of its own.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn new() -> std::io::Result<Waker> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Waker(Arc::new(Inner { event, asleep: AtomicBool::new(false) })))
    }

    /// Wakes the sleeper if it sleeps or is about to.
    pub fn wake(&self) {
        // The fence orders the caller's queue write before the look at the flag; `prepare` has its
        // counterpart.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.0.asleep.load(Ordering::Relaxed) && self.0.asleep.swap(false, Ordering::Relaxed) {
            self.ring();
        }
    }

    /// Makes the eventfd readable whether or not anybody sleeps.
    pub fn ring(&self) {
        // The counter can only be full if it was rung 2^64 - 2 times: then it is readable as well.
        let _ = rustix::io::write(&self.0.event, &1u64.to_ne_bytes());
    }

    /// The sleeper is about to sleep.
    pub fn prepare(&self) {
        self.0.asleep.store(true, Ordering::Relaxed);
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    /// The sleeper is awake; the eventfd is emptied.
    pub fn awake(&self) {
        self.0.asleep.store(false, Ordering::Relaxed);
        let _ = rustix::io::read(&self.0.event, &mut [0u8; 8]);
    }

    /// The eventfd to block on: readable when woken.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }
}
