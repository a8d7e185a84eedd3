//! One push_pull as its caller and the NIC thread see it: a word that both watch, and what went
//! wrong if it did. A [`Bell`] tells one thread of the ends of many push_pulls.

use crate::base::error::{Error, Refusal};
use crate::cuda::PooledEvent;
use rustix::thread::futex;
use rustix::time::Timespec;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

const PENDING: u32 = 0;
/// A bit of a pending task: somebody sleeps on it.
const AWAITED: u32 = 1;
/// A bit: a [`Bell`] is rung at its end.
const WATCHED: u32 = 2;
/// A bit: it is over.
const DONE: u32 = 4;

/// What a result on the GPU is behind.
#[derive(Debug)]
pub struct Mark {
    /// Recorded behind the last work of the result.
    pub event: Arc<PooledEvent>,
    /// In which stream.
    pub series: Series,
}

/// A stream of marks: who is behind one of them is behind all with lower numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Series {
    /// A stream of this mark alone.
    None,
    /// That in which results in slots end, or those of the host's collectives.
    Slots(u64),
    /// That in which results in memory of their own end.
    Staged(u64),
}

impl Series {
    /// The number in the stream of slots, and in the other.
    fn numbers(self) -> [Option<u64>; 2] {
        match self {
            Series::None => [None; 2],
            Series::Slots(number) => [Some(number), None],
            Series::Staged(number) => [None, Some(number)],
        }
    }
}

/// The state that a caller's [`Handle`] and the NIC thread share.
#[derive(Debug, Default)]
pub struct Task {
    state: AtomicU32,
    /// How long a waiter looks before it sleeps.
    spin: Duration,
    error: OnceLock<Error>,
    /// Rung when it is over.
    bell: OnceLock<Arc<Bell>>,
    /// Of a tensor on the GPU: its result is there once this mark is passed.
    mark: OnceLock<Mark>,
    /// When it was asked for, by the monotonic clock; 0 where nobody records a timeline.
    asked_ns: u64,
    /// Of a tensor on the GPU: see [`is_wanted`](Task::is_wanted).
    is_wanted: AtomicBool,
    /// Ranks that are not in its result, as results say it.
    lacks: AtomicU64,
    /// They say it in the order of ranks, not in that of deaths.
    lacks_by_rank: AtomicBool,
    /// It is over, and they have yet to say it.
    lacks_unknown: AtomicBool,
}

impl Task {
    /// A task whose waiters spin so long before they sleep, and [`LOOKS`] looks at least. It was
    /// asked for at `asked_ns`; 0 where nobody records a timeline.
    #[must_use]
    pub(crate) fn new(spin: Duration, asked_ns: u64) -> Task {
        Task { spin, asked_ns, ..Task::default() }
    }

    pub(crate) fn asked_ns(&self) -> u64 {
        self.asked_ns
    }

    /// Whether its caller puts a stream behind the result, and need not know that it has come: what
    /// brings it may be enqueued before that.
    pub(crate) fn is_wanted(&self) -> bool {
        self.is_wanted.load(Ordering::Acquire)
    }

    /// As [`finish_now`](Self::finish_now) with success, but the result is only on its way: it will
    /// be in the GPU's memory once this mark is passed.
    pub(crate) fn finish_behind(&self, mark: Mark) {
        let _ = self.mark.set(mark);
        self.finish_now(Ok(()));
    }

    /// Its result, which is there, lacks these ranks: a bit for each, in their order or in that of
    /// deaths.
    pub(crate) fn lacks(&self, ranks: u64, by_rank: bool) {
        // Relaxed: `finish` comes behind it, and whoever sees that sees this.
        self.lacks.store(ranks, Ordering::Relaxed);
        self.lacks_by_rank.store(by_rank, Ordering::Relaxed);
        // Release: whoever sees this sees both. `Handle::lacking` acquires.
        self.lacks_unknown.store(false, Ordering::Release);
    }

    /// It is to be [finished](Self::finish_behind) before it is known what its result lacks.
    pub(crate) fn lacks_unknown(&self) {
        // Relaxed: `finish` comes behind it, and whoever sees that sees this.
        self.lacks_unknown.store(true, Ordering::Relaxed);
    }

    /// The task is over: its memory is the caller's again. Returns whether somebody sleeps on it or
    /// on its bell, and must be [woken](Task::wake).
    #[must_use]
    pub(crate) fn finish(&self, result: Result<(), Error>) -> bool {
        if let Err(error) = result {
            let _ = self.error.set(error);
        }
        // Release: whoever sees DONE sees the error and the tensor's new bytes. `Handle` acquires.
        // Acquire: whoever sees WATCHED sees the bell.
        self.state.swap(DONE, Ordering::AcqRel) != PENDING
    }

    /// Wakes whoever sleeps on it, or on its bell.
    pub(crate) fn wake(&self) {
        let _ = futex::wake(&self.state, futex::Flags::PRIVATE, u32::MAX);
        if let Some(bell) = self.bell.get() {
            bell.ring();
        }
    }

    /// As [`finish`](Task::finish), and wakes at once.
    pub(crate) fn finish_now(&self, result: Result<(), Error>) {
        if self.finish(result) {
            self.wake();
        }
    }
}

/// Rung when any of the push_pulls that it [watches](Handle::watch) is over, so that one thread can
/// wait for the next of many to end.
#[derive(Debug, Default)]
pub struct Bell {
    rings: AtomicU32,
    sleepers: AtomicU32,
}

impl Bell {
    /// How often it was rung, for [`wait`](Self::wait). To be read before looking at handles.
    #[must_use]
    pub fn rings(&self) -> u32 {
        self.rings.load(Ordering::SeqCst)
    }

    /// Waits until it was rung more than `rings` times; at most so long.
    pub fn wait(&self, rings: u32, timeout: Duration) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let timeout = Timespec::try_from(timeout.min(Duration::from_secs(3600))).ok();
        // Woken, timed out, interrupted or rung meanwhile: the caller looks in each case.
        let _ = futex::wait(&self.rings, futex::Flags::PRIVATE, rings, timeout.as_ref());
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes whoever waits.
    pub fn ring(&self) {
        self.rings.fetch_add(1, Ordering::SeqCst);
        // Sequentially consistent, as in `wait`: either the sleeper is seen here, or it comes later
        // and sees that the count has changed.
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _ = futex::wake(&self.rings, futex::Flags::PRIVATE, u32::MAX);
        }
    }
}

/// A push_pull under way. Clones watch the same one.
#[derive(Clone, Debug)]
pub struct Handle(pub(crate) Arc<Task>);

/// How often a waiter looks before it reads the clock or sleeps: a microsecond or two, less than a
/// sleep and a wake-up cost. Where CPUs are scarce it stops there, since it may hold the one that
/// the NIC loop needs.
const LOOKS: u32 = 64;

impl Handle {
    /// A handle of a task that was given to a NIC loop.
    #[must_use]
    pub fn of(task: &Arc<Task>) -> Handle {
        Handle(Arc::clone(task))
    }

    /// A handle of something that is already over.
    pub(crate) fn finished(result: Result<(), Error>) -> Handle {
        let task = Task::default();
        task.finish_now(result);
        Handle(Arc::new(task))
    }

    /// A handle of something whose result is there once this mark is passed.
    pub(crate) fn finished_behind(event: &Arc<PooledEvent>) -> Handle {
        let task = Task::default();
        task.finish_behind(Mark { event: Arc::clone(event), series: Series::None });
        Handle(Arc::new(task))
    }

    /// Whether it is over, well or not: its memory is the caller's again.
    #[must_use]
    pub fn poll(&self) -> bool {
        // A driver that cannot tell whether the event is done has failed: its GPU writes nothing.
        self.is_told() && self.0.mark.get().is_none_or(|mark| mark.event.is_done().unwrap_or(true))
    }

    /// Whether a wait would return at once. On a GPU the result may still be on its way then: see
    /// [`make_wait`](Self::make_wait).
    #[must_use]
    pub fn is_told(&self) -> bool {
        self.0.state.load(Ordering::Acquire) & DONE != 0
    }

    /// A stream is to be put behind its result, which the host does not read: see
    /// [`Worker::enqueue_results`](crate::Worker::enqueue_results). The pipeline of the GPU learns
    /// of it by [`GpuInbox::want`](crate::rounds::handover::GpuInbox::want).
    pub fn want(&self) {
        self.0.is_wanted.store(true, Ordering::Release);
    }

    /// Lets this bell be rung when it is over. Returns whether it is already: then nobody rings. A
    /// push_pull has one bell; the first one stays.
    #[must_use]
    pub fn watch(&self, bell: &Arc<Bell>) -> bool {
        let _ = self.0.bell.set(Arc::clone(bell));
        // Release: whoever ends it sees the bell. One of both sees what the other has done.
        self.0.state.fetch_or(WATCHED, Ordering::AcqRel) & DONE != 0
    }

    /// Lets what is enqueued in a framework's stream from now on come behind the results of all of
    /// these. Called after each was waited for; without a GPU it does nothing.
    ///
    /// # Errors
    /// [`Error::Refused`] with what CUDA says.
    ///
    /// # Safety
    /// `stream` is 0, or a stream of the GPU that this process has opened.
    pub unsafe fn make_wait(handles: &[Handle], stream: usize) -> Result<(), Error> {
        let marks = || handles.iter().filter_map(|handle| handle.0.mark.get());
        // Behind the last of a stream is behind all.
        let last = |stream: usize| {
            let numbered = marks().filter(move |mark| mark.series.numbers()[stream].is_some());
            numbered.max_by_key(move |mark| mark.series.numbers()[stream])
        };
        let others = marks().filter(|mark| mark.series == Series::None);
        for mark in last(0).into_iter().chain(last(1)).chain(others) {
            // SAFETY: the caller vouches for the stream.
            unsafe { mark.event.make_wait(stream) }.map_err(Refusal::Gpu)?;
        }
        Ok(())
    }

    /// Once it is over: a bit for each rank that is not in all of its result, because it has died
    /// or was [late](Self::lacks_by_rank). [`Worker::lacking`](crate::Worker::lacking) names them.
    /// `None` while the result is still to come, on a GPU whose streams wait for it.
    #[must_use]
    pub fn lacking(&self) -> Option<u64> {
        let is_known = !self.0.lacks_unknown.load(Ordering::Acquire);
        is_known.then(|| self.0.lacks.load(Ordering::Relaxed))
    }

    /// Whether bit n of that is rank n in a job of any size; else it is what
    /// [`missing_by_rank`](bps_engine::wire::missing_by_rank) says.
    #[must_use]
    pub fn lacks_by_rank(&self) -> bool {
        self.0.lacks_by_rank.load(Ordering::Relaxed)
    }

    fn result(&self) -> Result<bool, Error> {
        self.0.error.get().map_or(Ok(true), |error| Err(error.clone()))
    }

    /// Waits until it is over; `None` waits as long as the job's own deadlines do: a rank, path or
    /// scheduler that is silent ends the job, and its end ends every handle. Returns false if the
    /// time was over first.
    ///
    /// # Errors
    /// What became of the push_pull, if it failed.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<bool, Error> {
        let start = Instant::now();
        let spin = timeout.map_or(self.0.spin, |timeout| timeout.min(self.0.spin));
        loop {
            for _ in 0..LOOKS {
                if self.is_told() {
                    return self.result();
                }
                std::hint::spin_loop();
            }
            if spin.is_zero() || start.elapsed() >= spin {
                break;
            }
        }
        loop {
            let state = &self.0.state;
            let seen = state.fetch_or(AWAITED, Ordering::AcqRel);
            if seen & DONE != 0 {
                return self.result();
            }
            let left = match timeout {
                None => Duration::from_secs(1),
                Some(timeout) => match timeout.checked_sub(start.elapsed()) {
                    Some(left) if !left.is_zero() => left,
                    _ => return Ok(false),
                },
            };
            let left = Timespec::try_from(left.min(Duration::from_secs(3600))).ok();
            // Woken, timed out, interrupted or changed meanwhile: the loop looks again in each
            // case.
            let _ = futex::wait(state, futex::Flags::PRIVATE, seen | AWAITED, left.as_ref());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::error::Closed;

    #[test]
    fn a_waiter_is_woken_and_sees_the_error() {
        let handle = Handle(Arc::new(Task::default()));
        assert!(!handle.poll());
        assert_eq!(handle.wait(Some(Duration::from_millis(1))), Ok(false));
        let other = handle.clone();
        let waiter = std::thread::spawn(move || other.wait(Some(Duration::from_secs(10))));
        handle.0.finish_now(Err(Error::Closed(Closed::Left)));
        assert_eq!(waiter.join().unwrap(), Err(Error::Closed(Closed::Left)));
        assert!(handle.poll());
    }

    #[test]
    fn a_bell_tells_of_each_end() {
        let bell = Arc::new(Bell::default());
        let handles: Vec<Handle> = (0..64).map(|_| Handle(Arc::default())).collect();
        assert!(Handle::finished(Ok(())).watch(&bell), "it was over before");
        let ended = handles.clone();
        let ends = std::thread::spawn(move || {
            for handle in ended.iter().rev() {
                handle.0.finish_now(Ok(()));
                std::thread::yield_now();
            }
        });
        let mut left: Vec<&Handle> = handles.iter().filter(|handle| !handle.watch(&bell)).collect();
        while !left.is_empty() {
            let rings = bell.rings();
            let before = left.len();
            left.retain(|handle| !handle.is_told());
            if left.len() == before {
                let start = Instant::now();
                bell.wait(rings, Duration::from_secs(10));
                assert!(start.elapsed() < Duration::from_secs(10), "nobody has rung");
            }
        }
        ends.join().unwrap();
    }

    #[test]
    fn a_handle_is_waited_for_and_watched_at_once() {
        let (bell, handle) = (Arc::new(Bell::default()), Handle(Arc::default()));
        let other = handle.clone();
        let waiter = std::thread::spawn(move || other.wait(Some(Duration::from_secs(10))));
        assert!(!handle.watch(&bell));
        let rings = bell.rings();
        handle.0.finish_now(Ok(()));
        bell.wait(rings, Duration::from_secs(10));
        assert_eq!(bell.rings(), rings + 1);
        assert_eq!(waiter.join().unwrap(), Ok(true));
        assert!(handle.watch(&bell) && handle.is_told(), "a late watcher is told at once");
        assert_eq!(handle.wait(None), Ok(true));
    }
}
