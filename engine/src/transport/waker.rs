//! How a thread that sleeps in a transport is woken by another thread: an eventfd, rung only if
//! needed.

#![forbid(unsafe_code)]

use super::interest::Interest;
use rustix::event::{EventfdFlags, epoll, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// All that a thread can sleep for here.
const ANYTHING: u32 = 1;

struct Inner {
    event: OwnedFd,
    /// Watches the eventfd and whatever else wakes the sleeper.
    watch: Option<OwnedFd>,
    interest: Interest,
}

/// Wakes the one thread that sleeps on it. Clones wake the same thread.
///
/// The sleeper calls [`prepare`](Waker::prepare), looks once more at every queue that others fill,
/// then blocks on [`fd`](Waker::fd) and calls [`awake`](Waker::awake). A producer fills a queue,
/// then calls [`wake`](Waker::wake). Either the sleeper sees the item or the producer sees the
/// sleeper ([`Interest`]).
#[derive(Clone)]
pub struct Waker(Arc<Inner>);

impl Waker {
    /// A new waker with an eventfd of its own.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn new() -> std::io::Result<Waker> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Waker(Arc::new(Inner { event, watch: None, interest: Interest::none() })))
    }

    /// A waker that descriptors can wake as well, by [`watch`](Waker::watch).
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn watching() -> std::io::Result<Waker> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let watch = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&watch, &event, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(Waker(Arc::new(Inner { event, watch: Some(watch), interest: Interest::none() })))
    }

    /// Lets the sleeper be woken while this is readable: it must be read before the next sleep.
    ///
    /// # Errors
    /// The waker was not made for it, or no memory is left.
    pub fn watch(&self, fd: BorrowedFd<'_>) -> std::io::Result<()> {
        let watch = self.0.watch.as_ref().ok_or(std::io::ErrorKind::Unsupported)?;
        Ok(epoll::add(watch, fd, epoll::EventData::new_u64(1), epoll::EventFlags::IN)?)
    }

    /// Wakes the sleeper if it sleeps or is about to.
    pub fn wake(&self) {
        if self.0.interest.take(ANYTHING) {
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
        self.0.interest.say(ANYTHING);
        Interest::before_looking();
    }

    /// The sleeper is awake; the eventfd is emptied.
    pub fn awake(&self) {
        self.0.interest.say(0);
        let _ = rustix::io::read(&self.0.event, &mut [0u8; 8]);
    }

    /// The eventfd to block on: readable when woken.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.watch.as_ref().unwrap_or(&self.0.event).as_fd()
    }

    /// The eventfd alone, for peers that ring it.
    #[must_use]
    pub fn event(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn is_readable(waker: &Waker) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&waker.fd(), PollFlags::IN)], Some(&now)).unwrap() > 0
    }

    #[test]
    fn a_watched_descriptor_wakes_and_so_does_the_eventfd() {
        let waker = Waker::watching().unwrap();
        let (end, other) = rustix::pipe::pipe().unwrap();
        waker.watch(end.as_fd()).unwrap();
        assert!(!is_readable(&waker));
        rustix::io::write(&other, &[1]).unwrap();
        assert!(is_readable(&waker));
        rustix::io::read(&end, &mut [0]).unwrap();
        assert!(!is_readable(&waker));
        waker.ring();
        assert!(is_readable(&waker));
        waker.awake();
        assert!(!is_readable(&waker));
        assert!(Waker::new().unwrap().watch(end.as_fd()).is_err());
    }
}
