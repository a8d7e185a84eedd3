//! How far this process's clock is from the scheduler's: questions and answers over the control
//! link, as NTP does it, with a bound on the error.
//!
//! An answer that left the scheduler at its time `T`, to a question asked at `t0` and answered by
//! `t1` of our clock, says that the difference lies between `T - t1` and `T - t0`, however long
//! each way took. Several exchanges in a row intersect these ranges, so the shortest round trip
//! counts most. Processes of one kernel share one clock and need no estimate.

use rustix::time::{ClockId, clock_gettime};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Exchanges that make one estimate.
const BURST: u32 = 8;
/// How often the estimate is renewed while a timeline is recorded.
const RENEW_NS: u64 = 1_000_000_000;
/// How far two clocks may drift apart: 100 microseconds in each second.
const DRIFT_PPM: u64 = 100;

/// The monotonic clock of this process, nanoseconds. A read of memory that the kernel shares, no
/// system call.
#[inline]
#[must_use]
pub fn now_ns() -> u64 {
    unsigned(clock_gettime(ClockId::Monotonic))
}

/// Nanoseconds since 1970, less the monotonic clock: what turns one into the other.
#[must_use]
pub fn to_unix_ns() -> u64 {
    unsigned(clock_gettime(ClockId::Realtime)).saturating_sub(now_ns())
}

fn unsigned(time: rustix::time::Timespec) -> u64 {
    // Both clocks count up from zero: neither field is ever negative.
    (time.tv_sec.unsigned_abs()) * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Equal for two processes that read the same monotonic clock: the same boot of one kernel, and the
/// same time namespace.
#[must_use]
pub fn domain() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/time").unwrap_or_default();
    format!("{} {}", boot.trim(), namespace.display())
}

/// What is known of the difference.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Estimate {
    /// To be added to this process's monotonic clock for the scheduler's nanoseconds since 1970.
    pub offset_ns: i64,
    /// The truth is at most this far from it, nanoseconds; none if the scheduler has not answered.
    pub error_ns: Option<u64>,
    /// Shortest round trip, nanoseconds.
    pub round_trip_ns: u64,
    /// Both read the same clock: there is no difference to estimate.
    pub is_shared: bool,
}

/// The estimate, and the burst of exchanges under way. Any thread may look; the control thread asks
/// and answers.
#[derive(Debug)]
pub struct Clock {
    domain: String,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    wanted: bool,
    estimate: Option<Estimate>,
    asked_ns: u64,
    /// The burst: exchanges so far, and what they leave of the range.
    exchanges: u32,
    low: i64,
    high: i64,
    round_trip_ns: u64,
}

impl Default for Clock {
    fn default() -> Clock {
        Clock { domain: domain(), state: Mutex::default() }
    }
}

impl Clock {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins or ends keeping the estimate fresh.
    pub fn want(&self, wanted: bool) {
        let mut state = self.lock();
        state.wanted = wanted;
        state.asked_ns = 0;
    }

    /// Whether to ask the scheduler now, `now_ns` being our clock: the first question of a burst.
    #[must_use]
    pub fn is_due(&self, now_ns: u64) -> bool {
        let mut state = self.lock();
        let due = state.wanted && now_ns.saturating_sub(state.asked_ns) >= RENEW_NS;
        if due {
            *state = State {
                wanted: true,
                estimate: state.estimate,
                asked_ns: now_ns,
                exchanges: 0,
                low: i64::MIN,
                high: i64::MAX,
                round_trip_ns: u64::MAX,
            };
        }
        due
    }

    /// An answer: asked at `sent_ns`, here at `received_ns` of our clock; the scheduler's clock was
    /// `now_ns`, which is `to_unix_ns` less than its nanoseconds since 1970. Returns whether the
    /// burst needs another question.
    #[must_use]
    pub fn answered(
        &self,
        sent_ns: u64,
        received_ns: u64,
        now_ns: u64,
        to_unix_ns: u64,
        domain: &str,
    ) -> bool {
        let mut state = self.lock();
        if sent_ns > received_ns || sent_ns < state.asked_ns || state.exchanges >= BURST {
            return false;
        }
        let (low, high) = (signed(now_ns) - signed(received_ns), signed(now_ns) - signed(sent_ns));
        if low > state.high || high < state.low {
            // A clock was set or has drifted within the burst: only the newest exchange counts.
            (state.low, state.high) = (low, high);
        } else {
            (state.low, state.high) = (state.low.max(low), state.high.min(high));
        }
        state.round_trip_ns = state.round_trip_ns.min(received_ns - sent_ns);
        state.exchanges += 1;
        if state.exchanges < BURST {
            return true;
        }
        let is_shared = domain == self.domain && state.low <= 0 && state.high >= 0;
        let middle = if is_shared { 0 } else { state.low.midpoint(state.high) };
        let half = state.low.abs_diff(state.high).div_ceil(2);
        let drift = RENEW_NS / 1_000_000 * DRIFT_PPM;
        state.estimate = Some(Estimate {
            offset_ns: middle + signed(to_unix_ns),
            error_ns: Some(if is_shared { 0 } else { half + drift }),
            round_trip_ns: state.round_trip_ns,
            is_shared,
        });
        false
    }

    /// The estimate, once there is one.
    #[must_use]
    pub fn estimate(&self) -> Option<Estimate> {
        self.lock().estimate
    }

    /// What is used where the scheduler does not answer: this host's own clock.
    #[must_use]
    pub fn own() -> Estimate {
        let offset_ns = signed(to_unix_ns());
        Estimate { offset_ns, error_ns: None, round_trip_ns: 0, is_shared: false }
    }
}

/// Nanoseconds since a start of the machine: they fit in 63 bits for 292 years.
fn signed(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A burst against a scheduler that is `ahead` of us, with these ways there and back.
    fn burst(clock: &Clock, ahead: i64, ways: &[(u64, u64)], domain: &str) {
        let mut now = now_ns() + 10 * RENEW_NS;
        assert!(clock.is_due(now));
        for (index, &(there, back)) in ways.iter().enumerate() {
            let at = u64::try_from(signed(now + there) + ahead).unwrap();
            let more = clock.answered(now, now + there + back, at, 5_000, domain);
            assert_eq!(more, index + 1 < ways.len());
            now += there + back;
        }
    }

    #[test]
    fn the_truth_lies_within_the_bound_however_lopsided_the_ways() {
        let ahead = 7_000_000_000;
        let ways =
            [(900, 100), (40, 60), (10, 5000), (5000, 10), (80, 90), (70, 10), (99, 3), (5, 800)];
        let clock = Clock::default();
        clock.want(true);
        burst(&clock, ahead, &ways, "another machine");
        let found = clock.estimate().unwrap();
        assert!(!found.is_shared && found.round_trip_ns == 80);
        let error = found.error_ns.unwrap();
        assert!((found.offset_ns - 5_000).abs_diff(ahead) <= error, "{found:?}");
        // Half the shortest round trip or less, and what the clocks may drift until the next one.
        assert!(error <= 40 + 100_000, "{found:?}");
        assert!(!clock.is_due(now_ns()));
    }

    #[test]
    fn one_kernel_has_one_clock() {
        let clock = Clock::default();
        clock.want(true);
        burst(&clock, 0, &[(3000, 9000); BURST as usize], &domain());
        let found = clock.estimate().unwrap();
        assert_eq!((found.offset_ns, found.error_ns, found.is_shared), (5_000, Some(0), true));
    }

    #[test]
    fn answers_to_nothing_change_nothing() {
        let clock = Clock::default();
        assert!(!clock.is_due(now_ns()), "nobody wants it");
        assert!(!clock.answered(10, 5, 7, 0, ""), "before it was asked");
        assert_eq!(clock.estimate(), None);
    }
}
