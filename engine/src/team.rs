//! Helper threads that take a share of what a polling thread copies and adds.
//!
//! One thread moves bytes at the speed of one processor core, which on machines of many cores is a
//! fraction of what their memory gives. [`Team::share`] cuts one piece of work into grains, which
//! the calling thread and its helpers take until none is left, and returns when all are done:
//! callers see one call. A helper joins within a microsecond while it looks for work, as it does
//! for some time after it had some; then it sleeps, and only long work wakes it.
//!
//! Invariant: helpers touch nobody's memory but between the beginning and the return of a `share`.
//! One that does not come in time is not waited for, only one that has a grain in hand.

use crate::sync::{AtomicBool, AtomicU64, Futex, Ordering, UnsafeCell, spin_loop, yield_now};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of a grain: a few microseconds at most, so that nobody waits long for the last one. A
/// multiple of every element and every cache line.
const GRAIN_BYTES: usize = 32 << 10;
/// Work of fewer bytes is done before a helper would be there.
const SHARED_BYTES_MIN: usize = 64 << 10;
/// Work of fewer bytes is not worth the system call that wakes a helper. What is cut evenly into
/// parts of at most 256 KiB, and into more than one, has larger ones.
const WAKING_BYTES_MIN: usize = if cfg!(loom) { SHARED_BYTES_MIN } else { (128 << 10) + 1 };
/// How long a helper without work looks for some before it sleeps: longer than a program needs from
/// one sum to the next.
const SPIN: Duration = Duration::from_micros(200);
/// Looks between two looks at the clock.
const CLOCK_EVERY: u32 = 64;
/// Looks at a helper that is at its last grain, before the processor is offered to others: it may
/// be one of them.
const LOOKS_EAGER: u32 = 1 << 14;

/// The helper sleeps, or is about to.
const ASLEEP: u32 = 0;
/// The helper looks for work.
const AWAKE: u32 = 1;
/// There is work that the helper has not seen.
const POSTED: u32 = 2;
/// The helper is at work.
const BUSY: u32 = 3;
/// The team is gone.
const ENDED: u32 = 4;

/// The low half of `Board::asked`.
const HALF: u64 = 0xffff_ffff;

/// From where grains are taken, and what asking for one adds to `Board::asked`.
#[derive(Clone, Copy)]
#[repr(u64)]
enum End {
    Front = 1,
    Back = 1 << 32,
}

/// What is shared: how to call it, what with, and how long it is.
#[derive(Clone, Copy)]
struct Work {
    call: unsafe fn(*const (), Range<usize>),
    closure: *const (),
    bytes: usize,
}

/// # Safety
/// `closure` points to an `F` that is alive and may be called from this thread.
unsafe fn call<F: Fn(Range<usize>) + Sync>(closure: *const (), range: Range<usize>) {
    // SAFETY: the caller's promise.
    let work = unsafe { &*closure.cast::<F>() };
    work(range);
}

/// What one helper does, apart from what others write.
#[repr(align(128))]
struct State(Futex);

/// Where the threads meet.
struct Board {
    /// By helper.
    states: Box<[State]>,
    /// Grains that were asked for: by the caller from the front, in the low half, and by helpers
    /// from the back. So each finds in its cache what it had of the same memory before.
    asked: AtomicU64,
    /// Written by whoever has `in_use`, while no helper is `POSTED` or `BUSY`, and so none reads
    /// it.
    work: UnsafeCell<Option<Work>>,
    /// Some thread shares its work.
    in_use: AtomicBool,
}

// SAFETY: all but `work` is atomic. `work` is written before the Release that makes `POSTED` of a
// helper's state, and read by the helper after the Acquire that makes `BUSY` of that, and by nobody
// else; it is written again only when all states are neither. Its closure is one that threads may
// share.
unsafe impl Send for Board {}
// SAFETY: the same argument: nothing in it depends on how a thread has come by the board.
unsafe impl Sync for Board {}

impl Board {
    /// Takes grains from one end until none is left. Of `n` grains each is taken once: one that is
    /// asked for behind `front` from the front and `back` from the back is neither among the first
    /// `front` nor among the last `back`, as long as these are fewer than `n` together.
    #[allow(clippy::cast_possible_truncation, reason = "halves of 32 bits")]
    fn take_grains(&self, end: End, bytes: usize, mut work: impl FnMut(Range<usize>)) {
        let grains = bytes.div_ceil(GRAIN_BYTES);
        loop {
            // Relaxed: who takes which grain is all that it says. What the grains are of came with
            // the state.
            let asked = self.asked.fetch_add(end as u64, Ordering::Relaxed);
            // Both fit: no work has 2^32 grains, and nobody asks again who got none.
            let (front, back) = ((asked & HALF) as usize, (asked >> 32) as usize);
            if front + back >= grains {
                return;
            }
            let grain = match end {
                End::Front => front,
                End::Back => grains - 1 - back,
            };
            let begin = grain * GRAIN_BYTES;
            work(begin..bytes.min(begin + GRAIN_BYTES));
        }
    }
}

/// The team is over when this is dropped.
struct Seat(Arc<Board>);

impl Drop for Seat {
    fn drop(&mut self) {
        // Nobody shares any more, so each helper looks or sleeps.
        for State(state) in &self.0.states {
            // A swap for the sake of the model: see `crate::sync`.
            state.word.swap(ENDED, Ordering::Release);
            state.wake();
        }
    }
}

/// A polling thread and its helpers, if it has any. Clones are the same team.
#[derive(Clone, Default)]
pub struct Team(Option<Arc<Seat>>);

/// One of the helpers of a [`Team`], for a thread of its own.
pub struct Helper {
    board: Arc<Board>,
    index: usize,
}

impl Team {
    /// A team and its helpers, each to be [run](Helper::run) by another thread.
    #[must_use]
    pub fn with_helpers(count: usize) -> (Team, Vec<Helper>) {
        if count == 0 {
            return Default::default();
        }
        let board = Arc::new(Board {
            states: (0..count).map(|_| State(Futex::new(AWAKE))).collect(),
            asked: AtomicU64::new(0),
            work: UnsafeCell::new(None),
            in_use: AtomicBool::new(false),
        });
        let helper = |index| Helper { board: Arc::clone(&board), index };
        let helpers = (0..count).map(helper).collect();
        (Team(Some(Arc::new(Seat(board)))), helpers)
    }

    /// Calls `work` with ranges that together are `0..bytes`, each once, on this thread and perhaps
    /// on helpers at the same time. All but the last begin and end at multiples of 32 KiB.
    #[inline]
    pub fn share<F: Fn(Range<usize>) + Sync>(&self, bytes: usize, work: F) {
        match &self.0 {
            Some(seat) if bytes >= SHARED_BYTES_MIN => share(&seat.0, bytes, &work),
            _ => work(0..bytes),
        }
    }
}

fn share<F: Fn(Range<usize>) + Sync>(board: &Board, bytes: usize, work: &F) {
    // Acquire: the pair of the Release in `Rejoin`.
    if board.in_use.swap(true, Ordering::Acquire) {
        return work(0..bytes);
    }
    let rejoin = Rejoin(board);
    let posted_work = Work { call: call::<F>, closure: std::ptr::from_ref(work).cast(), bytes };
    // SAFETY: this thread has `in_use`, and who had it before has rejoined all helpers.
    board.work.with_mut(|posted| unsafe { *posted = Some(posted_work) });
    board.asked.store(0, Ordering::Relaxed);
    let mut is_shared = false;
    for State(state) in &board.states {
        let seen = state.word.load(Ordering::Relaxed);
        if seen != AWAKE && (seen != ASLEEP || bytes < WAKING_BYTES_MIN) {
            continue;
        }
        // Release: the pair of the Acquire in `Helper::run`. It fails if the helper falls asleep
        // just now, which then finds nothing.
        let posted =
            state.word.compare_exchange(seen, POSTED, Ordering::Release, Ordering::Relaxed);
        is_shared |= posted.is_ok();
        if posted.is_ok() && seen == ASLEEP {
            state.wake();
        }
    }
    if is_shared {
        board.take_grains(End::Front, bytes, work);
    } else {
        work(0..bytes);
    }
    drop(rejoin);
}

/// Takes back the work that was shared, also where it panics: when this is dropped nobody has it.
struct Rejoin<'board>(&'board Board);

impl Drop for Rejoin<'_> {
    fn drop(&mut self) {
        let mut looks = 0u32;
        for State(state) in &self.0.states {
            // What a helper has not begun it will not see.
            let _ =
                state.word.compare_exchange(POSTED, AWAKE, Ordering::Relaxed, Ordering::Relaxed);
            // Acquire: the pair of the Release in `Helper::run`: its grains are written.
            while state.word.load(Ordering::Acquire) == BUSY {
                looks = looks.wrapping_add(1);
                if looks < LOOKS_EAGER {
                    spin_loop();
                } else {
                    yield_now();
                }
            }
        }
        self.0.in_use.store(false, Ordering::Release);
    }
}

/// For how long a helper has looked for work.
struct Idle {
    looks: u32,
    since: Instant,
}

impl Idle {
    fn begin() -> Idle {
        Idle { looks: 0, since: Instant::now() }
    }

    /// It has looked once more: whether it should sleep. In a model, which has no time, at once.
    fn is_long(&mut self) -> bool {
        self.looks = self.looks.wrapping_add(1);
        cfg!(loom) || (self.looks.is_multiple_of(CLOCK_EVERY) && self.since.elapsed() >= SPIN)
    }
}

impl Helper {
    /// Helps until the last clone of the team is gone. A panic of what is shared must end the
    /// process: the team would wait for the grain for ever.
    pub fn run(self) {
        let Helper { board, index } = self;
        let State(state) = &board.states[index];
        let word = &state.word;
        let mut idle = Idle::begin();
        loop {
            match word.load(Ordering::Relaxed) {
                POSTED => {
                    // Acquire: the pair of the Release in `share`.
                    let begun =
                        word.compare_exchange(POSTED, BUSY, Ordering::Acquire, Ordering::Relaxed);
                    if begun.is_err() {
                        continue;
                    }
                    // SAFETY: the state was `POSTED`, so there is work that was written before, and
                    // nobody writes it while the state is `BUSY`.
                    let posted = board.work.with(|posted| unsafe { *posted });
                    let Work { call, closure, bytes } = posted.expect("posted work is there");
                    // SAFETY: `share` made the pair of a closure that threads may share, and does
                    // not return, and so keeps it, before the state is no longer `BUSY`.
                    board.take_grains(End::Back, bytes, |range| unsafe { call(closure, range) });
                    // Release: the pair of the Acquire in `Rejoin`.
                    word.store(AWAKE, Ordering::Release);
                    idle = Idle::begin();
                }
                AWAKE => {
                    spin_loop();
                    if idle.is_long() {
                        // If it fails there is work.
                        let _ = word.compare_exchange(
                            AWAKE,
                            ASLEEP,
                            Ordering::Relaxed,
                            Ordering::Relaxed,
                        );
                    }
                }
                ASLEEP => {
                    // Woken, interrupted or posted meanwhile: the loop looks in each case.
                    state.wait(ASLEEP);
                    idle = Idle::begin();
                }
                _ => return,
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU8;
    use std::thread::{self, JoinHandle};

    fn counts(bytes: usize) -> Vec<AtomicU8> {
        (0..bytes).map(|_| AtomicU8::new(0)).collect()
    }

    fn run(helpers: Vec<Helper>) -> Vec<JoinHandle<()>> {
        helpers.into_iter().map(|helper| thread::spawn(|| helper.run())).collect()
    }

    /// Shares once, and says whether every byte was done once.
    fn once(team: &Team, bytes: usize) -> bool {
        let seen = counts(bytes);
        team.share(bytes, |range| {
            assert!(range.start.is_multiple_of(GRAIN_BYTES) && range.end <= bytes);
            for one in &seen[range] {
                one.fetch_add(1, Ordering::Relaxed);
            }
        });
        seen.iter().all(|one| one.load(Ordering::Relaxed) == 1)
    }

    #[test]
    fn each_byte_is_done_once_with_and_without_a_helper() {
        let sizes =
            [0, 1, GRAIN_BYTES, SHARED_BYTES_MIN - 1, SHARED_BYTES_MIN, WAKING_BYTES_MIN + 77];
        for bytes in sizes {
            assert!(once(&Team::default(), bytes), "{bytes}");
        }
        let (team, helpers) = Team::with_helpers(2);
        for bytes in sizes {
            assert!(once(&team, bytes), "{bytes}: nobody has come yet");
        }
        let threads = run(helpers);
        for bytes in sizes.repeat(100) {
            assert!(once(&team, bytes), "{bytes}");
        }
        drop(team);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn a_helper_that_sleeps_is_woken_and_works() {
        let (team, helpers) = Team::with_helpers(2);
        let threads = run(helpers);
        let states = &team.0.as_ref().unwrap().0.states;
        let are_asleep = || states.iter().all(|one| one.0.word.load(Ordering::Relaxed) == ASLEEP);
        for _ in 0..3 {
            while !are_asleep() {
                thread::yield_now();
            }
            let here = thread::current().id();
            let helped = AtomicBool::new(false);
            // The first grain of this thread waits for one of the other.
            let waited = AtomicBool::new(false);
            team.share(WAKING_BYTES_MIN, |_| {
                if thread::current().id() != here {
                    helped.store(true, Ordering::Relaxed);
                } else if !waited.swap(true, Ordering::Relaxed) {
                    while !helped.load(Ordering::Relaxed) {
                        thread::yield_now();
                    }
                }
            });
            assert!(helped.into_inner());
        }
        drop(team);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn threads_that_share_at_once_do_not_meet() {
        let (team, helpers) = Team::with_helpers(2);
        let threads = run(helpers);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let rounds = if cfg!(miri) { 2 } else { 200 };
                    assert!((0..rounds).all(|_| once(&team, SHARED_BYTES_MIN + 3)));
                });
            }
        });
        drop(team);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn work_that_panics_is_taken_back() {
        let (team, helpers) = Team::with_helpers(2);
        let threads = run(helpers);
        let here = thread::current().id();
        for _ in 0..20 {
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let local = counts(SHARED_BYTES_MIN);
                team.share(SHARED_BYTES_MIN, |range| {
                    local[range].iter().for_each(|one| one.store(1, Ordering::Relaxed));
                    assert!(thread::current().id() != here, "the caller's own grain");
                });
            }));
            // The helper may have been faster with all of them.
            drop(caught);
            assert!(once(&team, SHARED_BYTES_MIN));
        }
        drop(team);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

#[cfg(all(test, loom))]
mod orders {
    use super::*;
    use loom::cell::UnsafeCell;

    /// Memory of two grains, of which the model sees who reads and writes it.
    struct Grains([UnsafeCell<u32>; 2]);

    // SAFETY: loom reports whoever touches a cell that another thread may be at.
    unsafe impl Sync for Grains {}

    /// Adds 1 to each grain, and looks at them as its caller does who goes on.
    fn once(team: &Team, grains: &Grains, before: u32) {
        team.share(2 * GRAIN_BYTES, |range| {
            for grain in range.start / GRAIN_BYTES..range.end / GRAIN_BYTES {
                // SAFETY: the range is this thread's alone; loom panics if it is not.
                grains.0[grain].with_mut(|value| unsafe { *value += 1 });
            }
        });
        for grain in &grains.0 {
            // SAFETY: what was shared is over; loom panics if it is not.
            assert_eq!(grain.with(|value| unsafe { *value }), before + 1);
        }
    }

    #[test]
    fn each_grain_is_done_once_and_before_its_caller_goes_on() {
        // A helper that looks, works and sleeps has too many orders to go through them all.
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let (team, helpers) = Team::with_helpers(1);
            let helpers: Vec<_> = helpers
                .into_iter()
                .map(|helper| loom::thread::spawn(move || helper.run()))
                .collect();
            let grains = Grains([UnsafeCell::new(0), UnsafeCell::new(0)]);
            once(&team, &grains, 0);
            once(&team, &grains, 1);
            drop(team);
            // A helper that sleeps through the end would hang here, which the model reports.
            helpers.into_iter().for_each(|helper| helper.join().unwrap());
        });
    }
}
