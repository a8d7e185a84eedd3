//! What every polling thread needs around its loop: a start with a name and a CPU, an end that is
//! never silent, and a rule for when there is nothing to do.
//!
//! [`Idler`] belongs to one thread. The loop tells it after each pass whether there was progress;
//! only when it answers [`Step::Sleep`] may the loop arm its transport and block.

#![forbid(unsafe_code)]

use crate::base::nanoseconds;
use crate::config::Idle;
use crate::topo::pin;
use crate::trace::counters::{Counter, Counters};
use crate::trace::log;
pub use crate::waits::{PATIENCE, StillRunning, join, offer};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Spinning time where every polling thread has a CPU: longer than a round trip between hosts.
pub const SPIN_ROOMY: Duration = Duration::from_micros(50);
/// Spinning time where threads share CPUs: whoever spins keeps the awaited one from running.
pub const SPIN_CROWDED: Duration = Duration::from_micros(5);
/// Spinning time where every polling thread has a CPU and something is in flight: what is awaited
/// then comes within a millisecond, and a sleep costs both ends a system call.
const SPIN_EXPECTING: Duration = Duration::from_millis(1);
/// Idle passes between two looks at the clock, which cost as much as a pass over empty queues.
const CLOCK_EVERY: u32 = 16;
/// Two looks that are further apart had another thread's turn on this CPU between them.
const CLOCK_GAP: Duration = Duration::from_micros(50);
/// Passes with progress between two looks at the clock.
const CLOCK_EVERY_BUSY: u32 = 64;
/// How often processor time and gauges are taken.
const SAMPLE: Duration = Duration::from_millis(250);
/// Idle passes without a pause between them: what is awaited mostly comes within microseconds.
const EAGER_STEPS: u32 = 128;
/// Idle passes between two yields of a thread that has a CPU of its own.
const YIELD_ROOMY: u32 = 4096;
/// Idle passes between two yields of a thread that shares its CPU.
const YIELD_CROWDED: u32 = 8;

/// What a loop does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Poll again.
    Again,
    /// Nothing has happened for a while: arm the wake-ups, look once more, and block.
    Sleep,
}

/// How long an idle thread spins by default, with so many polling threads on the machine and so
/// many CPUs for them.
#[must_use]
pub fn spin_default(polling_threads: usize, cpus: usize) -> Duration {
    // One CPU is left for everything else, such as the framework that feeds us.
    if polling_threads < cpus { SPIN_ROOMY } else { SPIN_CROWDED }
}

/// What others may know of a polling thread while it runs. Its processor time is the kernel's to
/// tell, by the thread's id; without what it spun away, that is the time in which it worked.
#[derive(Debug, Default)]
pub struct Loop {
    /// The thread's name, such as `bps-core-0`.
    pub name: String,
    /// The kernel's id of the thread.
    pub thread: i32,
    /// Nanoseconds in which it polled and found nothing. Idleness of less than a few microseconds
    /// is not seen, because the clock is looked at only now and then.
    pub spun_ns: Counter,
}

/// The polling threads of this process, for whoever measures; they never look at it.
static LOOPS: Mutex<Vec<Weak<Loop>>> = Mutex::new(Vec::new());

/// Every polling thread of this process that has an [`Idler`] now.
#[must_use]
pub fn loops() -> Vec<Arc<Loop>> {
    let known = LOOPS.lock().unwrap_or_else(PoisonError::into_inner);
    known.iter().filter_map(Weak::upgrade).collect()
}

/// Adds the calling thread, and takes those out that have ended.
fn enlist() -> Arc<Loop> {
    let name = std::thread::current().name().unwrap_or_default().to_owned();
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    let this = Arc::new(Loop { name, thread, spun_ns: Counter::default() });
    let mut known = LOOPS.lock().unwrap_or_else(PoisonError::into_inner);
    known.retain(|one| one.strong_count() > 0);
    known.push(Arc::downgrade(&this));
    this
}

/// Decides for one thread between polling, yielding and sleeping, and counts where its time goes.
#[derive(Debug)]
pub struct Idler {
    policy: Idle,
    spin: Duration,
    yield_every: u32,
    busy_steps: u32,
    idle_steps: u32,
    start: Instant,
    /// Since the start, at the last look at the clock.
    now: Duration,
    /// Whether that look was in this idleness.
    has_looked: bool,
    /// How long this idleness has lasted at the last look.
    spun: Duration,
    is_spent: bool,
    /// Something is in flight.
    expects: bool,
    watched: Arc<Loop>,
    counters: Arc<Counters>,
    sample_at: Duration,
    is_sample_due: bool,
}

impl Idler {
    /// An idler of the calling thread that spins for `spin` before it sleeps (see
    /// [`spin_default`]). A spin below [`SPIN_ROOMY`] says that CPUs are scarce: then one that
    /// never sleeps yields often.
    #[must_use]
    pub fn new(policy: Idle, spin: Duration) -> Idler {
        Idler::counting(policy, spin, Arc::default())
    }

    /// As [`new`](Idler::new), and keeps the counters of the thread's time.
    #[must_use]
    pub fn counting(policy: Idle, spin: Duration, counters: Arc<Counters>) -> Idler {
        let yield_every = if spin < SPIN_ROOMY { YIELD_CROWDED } else { YIELD_ROOMY };
        Idler {
            policy,
            spin,
            yield_every,
            busy_steps: 0,
            idle_steps: 0,
            start: Instant::now(),
            now: Duration::ZERO,
            has_looked: false,
            spun: Duration::ZERO,
            is_spent: false,
            expects: false,
            watched: enlist(),
            counters,
            sample_at: Duration::ZERO,
            is_sample_due: false,
        }
    }

    /// Time since the start, a few passes old at most: for what need not be exact.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.now
    }

    /// Whether it is time for the loop to bring its gauges up to date; once each time.
    pub fn is_sample_due(&mut self) -> bool {
        std::mem::take(&mut self.is_sample_due)
    }

    /// Whether something is in flight, so that it is worth spinning longer where there are CPUs.
    pub fn expect(&mut self, expects: bool) {
        self.expects = expects;
    }

    /// Called after every pass of the loop. Once it has said [`Step::Sleep`] it says so again until
    /// there is progress.
    #[inline]
    pub fn step(&mut self, progress: bool) -> Step {
        if !progress {
            return self.idle();
        }
        self.idle_steps = 0;
        self.has_looked = false;
        self.spun = Duration::ZERO;
        self.is_spent = false;
        self.busy_steps = self.busy_steps.wrapping_add(1);
        if self.busy_steps.is_multiple_of(CLOCK_EVERY_BUSY) {
            self.look();
        }
        Step::Again
    }

    fn idle(&mut self) -> Step {
        if self.is_spent {
            self.look();
            self.counters.sleeps.add(1);
            return Step::Sleep;
        }
        self.idle_steps = self.idle_steps.wrapping_add(1);
        // Only a loop that never sleeps has to yield. To the kernel's scheduler a yield is a thread
        // that gives up its turn, and it may come back milliseconds later; one that sleeps is woken
        // at once.
        if self.policy == Idle::Busy && self.idle_steps.is_multiple_of(self.yield_every) {
            std::thread::yield_now();
        } else if self.idle_steps > EAGER_STEPS {
            // A pause leaves the core to a sibling thread, but lasts as long as a pass.
            std::hint::spin_loop();
        }
        if !self.idle_steps.is_multiple_of(CLOCK_EVERY) {
            return Step::Again;
        }
        let more = self.look();
        if std::mem::replace(&mut self.has_looked, true) {
            self.spun += more;
            self.watched.spun_ns.add(nanoseconds(more.min(CLOCK_GAP)));
        }
        let is_roomy = self.spin >= SPIN_ROOMY;
        let spin = if self.expects && is_roomy { SPIN_EXPECTING } else { self.spin };
        if self.policy == Idle::Busy || self.spun < spin {
            return Step::Again;
        }
        self.is_spent = true;
        self.counters.sleeps.add(1);
        Step::Sleep
    }

    /// Looks at the clock: returns the time since the last look.
    fn look(&mut self) -> Duration {
        let before = std::mem::replace(&mut self.now, self.start.elapsed());
        if self.now >= self.sample_at {
            self.sample_at = self.now + SAMPLE;
            self.is_sample_due = true;
            let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            let cpu = nanoseconds(Duration::try_from(cpu).unwrap_or_default());
            let busy = cpu.saturating_sub(self.watched.spun_ns.read());
            self.counters.cpu_ns.set(cpu);
            self.counters.busy_ns.set(busy.max(self.counters.busy_ns.read()));
        }
        self.now.saturating_sub(before)
    }
}

/// Starts a thread with this name (the kernel shows 15 bytes of it) on this CPU. Failure to pin is
/// one warning line.
///
/// A panic in it ends the process, after a line that names the thread: a polling thread that dies
/// in silence would leave every peer waiting.
///
/// # Errors
/// The kernel has no thread left to give.
pub fn spawn<F, T>(name: &str, cpu: Option<usize>, body: F) -> std::io::Result<JoinHandle<T>>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    let thread = name.to_owned();
    Builder::new().name(thread.clone()).spawn(move || {
        if let Some(Err(error)) = cpu.map(pin::pin_current_thread) {
            log::warning!("thread {thread} runs unpinned: {error}");
        }
        match catch_unwind(AssertUnwindSafe(body)) {
            Ok(value) => value,
            Err(payload) => {
                let cause = panic_text(payload.as_ref());
                log::error!("thread {thread} failed, which ends the process: {cause}");
                std::process::abort();
            }
        }
    })
}

fn panic_text(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("panic with a value that is no text")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes until the idler wants to sleep, at most `limit`.
    fn passes_until_sleep(idler: &mut Idler, limit: u32) -> Option<u32> {
        (0..limit).find(|_| idler.step(false) == Step::Sleep)
    }

    #[test]
    fn busy_never_sleeps() {
        for spin in [SPIN_CROWDED, SPIN_ROOMY, Duration::ZERO] {
            assert_eq!(passes_until_sleep(&mut Idler::new(Idle::Busy, spin), 100_000), None);
        }
    }

    #[test]
    fn adaptive_spins_for_its_time_then_sleeps_until_progress() {
        let spin = Duration::from_millis(2);
        let mut idler = Idler::new(Idle::Adaptive, spin);
        let start = Instant::now();
        assert!(passes_until_sleep(&mut idler, u32::MAX).is_some());
        assert!(start.elapsed() >= spin, "slept after {:?}", start.elapsed());
        assert_eq!(
            idler.step(false),
            Step::Sleep,
            "a wake-up without work is no reason to spin again"
        );
        assert_eq!(idler.step(true), Step::Again);
        assert_eq!(idler.step(false), Step::Again);
        assert!(passes_until_sleep(&mut idler, u32::MAX).is_some());
    }

    #[test]
    fn others_see_what_was_spun_away() {
        let spin = Duration::from_millis(5);
        let mut idler = Idler::new(Idle::Adaptive, spin);
        let own = rustix::thread::gettid().as_raw_nonzero().get();
        let watched = loops().into_iter().find(|one| one.thread == own).unwrap();
        assert_eq!(Some(watched.name.as_str()), std::thread::current().name());
        assert!(passes_until_sleep(&mut idler, u32::MAX).is_some());
        let spun = Duration::from_nanos(watched.spun_ns.read());
        // Another thread's turn on this CPU is not counted, so it may be less than the time.
        assert!(spun > Duration::ZERO, "it spun for {spin:?}");
        assert_eq!(idler.step(false), Step::Sleep);
        assert_eq!(idler.step(true), Step::Again);
        assert_eq!(Duration::from_nanos(watched.spun_ns.read()), spun, "sleep is not spinning");
        drop(idler);
        let weak = Arc::downgrade(&watched);
        drop(watched);
        assert!(weak.upgrade().is_none(), "one that has ended is forgotten");
    }

    #[test]
    fn progress_keeps_it_awake() {
        let mut idler = Idler::new(Idle::Adaptive, Duration::ZERO);
        for pass in 0..10_000 {
            assert_eq!(idler.step(pass % CLOCK_EVERY == 0), Step::Again);
        }
    }

    #[test]
    fn spins_shortly_where_cpus_are_scarce() {
        assert_eq!(spin_default(2, 64), SPIN_ROOMY);
        assert_eq!(spin_default(4, 2), SPIN_CROWDED);
        assert_eq!(spin_default(2, 2), SPIN_CROWDED);
    }

    #[test]
    fn two_idlers_on_one_cpu_let_each_other_run() {
        // Both threads on one CPU, busy: each pass of the turn-taking needs the other to be
        // scheduled. Without yields each turn would cost a scheduler's time slice (milliseconds);
        // with them, microseconds.
        use std::sync::Arc;
        use std::sync::atomic::{AtomicU32, Ordering};
        const TURNS: u32 = 2_000;
        let cpu = *pin::affinity().unwrap().last().unwrap();
        let turn = Arc::new(AtomicU32::new(0));
        let start = Instant::now();
        let threads = [0, 1].map(|side| {
            let turn = Arc::clone(&turn);
            spawn("turns", Some(cpu), move || {
                let mut idler = Idler::new(Idle::Busy, SPIN_CROWDED);
                loop {
                    let now = turn.load(Ordering::Acquire);
                    let is_mine = now % 2 == side;
                    if now >= TURNS {
                        return;
                    }
                    if is_mine {
                        turn.store(now + 1, Ordering::Release);
                    }
                    idler.step(is_mine);
                }
            })
            .unwrap()
        });
        for thread in threads {
            thread.join().unwrap();
        }
        assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
    }

    #[test]
    fn time_that_was_spun_away_is_not_busy() {
        let counters = Arc::new(Counters::default());
        let mut idler =
            Idler::counting(Idle::Adaptive, Duration::from_millis(300), Arc::clone(&counters));
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(300) {
            idler.step(true);
        }
        assert!(idler.is_sample_due() && !idler.is_sample_due(), "once each time");
        let busy = counters.busy_ns.read();
        assert!(busy > 0 && busy <= counters.cpu_ns.read());
        assert!(passes_until_sleep(&mut idler, u32::MAX).is_some());
        assert!(idler.now() >= Duration::from_millis(500), "{:?}", idler.now());
        let (more, cpu) = (counters.busy_ns.read() - busy, counters.cpu_ns.read());
        // A busy machine takes the CPU away in the midst of a look; it does not for most of them.
        assert!(more < cpu / 2, "{more} ns of {cpu} were called busy while it spun");
        assert_eq!(counters.sleeps.read(), 1);
    }

    #[test]
    fn names_its_thread_and_runs_unpinned_where_it_must() {
        let name =
            spawn("bps-core-0", Some(4096), || std::thread::current().name().map(str::to_owned))
                .unwrap()
                .join()
                .unwrap();
        assert_eq!(name.as_deref(), Some("bps-core-0"));
    }

    #[test]
    fn a_panic_ends_the_process_with_a_line() {
        const CHILD: &str = "BPS_TEST_PANIC_CHILD";
        if std::env::var_os(CHILD).is_some() {
            let _ = spawn("bps-core-7", None, || panic!("slot {} is gone", 3)).unwrap().join();
            unreachable!("the process has ended");
        }
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "harness::tests::a_panic_ends_the_process_with_a_line",
                "--nocapture",
            ])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(
            text.contains("error: thread bps-core-7 failed") && text.contains("slot 3 is gone"),
            "{text}"
        );
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(output.status.signal(), Some(6), "abort");
    }
}
