//! A node of an elastic job whose scheduler is lost or silent, as a state machine: when to dial
//! again, and when to give up.
//!
//! Invariant: attempts follow each other ever more slowly, up to a bound, and the wait has an end.

use std::time::Duration;

/// Pause between two attempts: the first, doubled each time up to the last.
const PAUSE_FIRST: Duration = Duration::from_millis(20);
const PAUSE_LAST: Duration = Duration::from_millis(500);

/// No scheduler has taken over in time.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{scheduler} is lost ({how}), and none has taken over within {:.0} s (BPS_SCHEDULER_WAIT): \
     start bps-scheduler again on the same address, with the same variables, sooner than that",
    waited.as_secs_f64()
)]
pub struct SchedulerAway {
    /// The scheduler as people know it, with its address.
    pub scheduler: String,
    /// What was seen.
    pub how: String,
    /// For how long.
    pub waited: Duration,
}

/// What is to be done now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Wanted {
    /// One attempt to reach a scheduler; [`Absence::failed`] says how it went, if badly.
    Dial,
    /// The wait is over.
    End(SchedulerAway),
}

/// See the [module](self).
#[derive(Clone, Debug)]
pub struct Absence {
    wait: Duration,
    away: Option<Away>,
}

#[derive(Clone, Debug)]
struct Away {
    since: Duration,
    /// For how long nothing had been heard by then.
    silent: Duration,
    how: String,
    /// When to dial; none while an attempt is under way.
    next: Option<Duration>,
    pause: Duration,
    looked: Duration,
}

impl Absence {
    /// Of a node that waits so long for another scheduler; 0: not at all.
    #[must_use]
    pub const fn new(wait: Duration) -> Absence {
        Absence { wait, away: None }
    }

    /// Whether the loss of the scheduler is to be waited out.
    #[must_use]
    pub fn is_waited_out(&self) -> bool {
        !self.wait.is_zero()
    }

    /// Whether there is no scheduler now.
    #[must_use]
    pub fn is_away(&self) -> bool {
        self.away.is_some()
    }

    /// The scheduler is lost, as `how` says, and owes an answer for so long: zero where its
    /// connection has ended. Returns a line about it where that is news.
    pub fn begin(&mut self, how: &str, silent: Duration, now: Duration) -> Option<String> {
        if self.is_away() {
            return None;
        }
        let how = how.to_owned();
        let line = format!(
            "{how}: training goes on without, and what needs it waits for one on the same address, \
             for up to {:.0} s (BPS_SCHEDULER_WAIT)",
            self.wait.as_secs_f64()
        );
        let (pause, next, looked) = (PAUSE_FIRST, Some(now), now);
        self.away = Some(Away { since: now, silent, how, next, pause, looked });
        Some(line)
    }

    /// An attempt has failed.
    pub fn failed(&mut self, now: Duration) {
        if let Some(away) = &mut self.away {
            away.next = Some(now + away.pause);
            away.pause = (2 * away.pause).min(PAUSE_LAST);
        }
    }

    /// There is one again. Returns for how long nothing was heard of one.
    pub fn end(&mut self, now: Duration) -> Option<Duration> {
        self.away.take().map(|away| away.silent + now.saturating_sub(away.since))
    }

    /// What is to be done now; to be asked several times a second.
    pub fn look(&mut self, scheduler: &str, now: Duration) -> Option<Wanted> {
        let wait = self.wait;
        let away = self.away.as_mut()?;
        let gap = now.saturating_sub(away.looked);
        away.looked = now;
        // The time in which this process itself did not run counts for nothing.
        if gap > wait / 2 {
            away.since += gap;
        }
        let waited = now.saturating_sub(away.since);
        if waited >= wait {
            let (scheduler, how) = (scheduler.to_owned(), away.how.clone());
            return Some(Wanted::End(SchedulerAway { scheduler, how, waited }));
        }
        away.next.take_if(|next| now >= *next).map(|_| Wanted::Dial)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn attempts_slow_down_and_the_wait_has_an_end_that_names_the_scheduler() {
        let mut absence = Absence::new(ms(60_000));
        assert_eq!(absence.look("it", ms(5)), None);
        let line = absence.begin("the scheduler died", ms(1_200), ms(10)).unwrap();
        assert!(line.starts_with("the scheduler died: training goes on"), "{line}");
        assert_eq!(absence.begin("again", ms(0), ms(11)), None);
        let (mut dials, mut end) = (Vec::new(), None);
        for now in (10..70_000).step_by(10) {
            match absence.look("the scheduler at a:1", ms(now)) {
                Some(Wanted::Dial) => {
                    dials.push(now);
                    absence.failed(ms(now));
                }
                Some(Wanted::End(away)) => {
                    end = Some((now, away.to_string()));
                    break;
                }
                None => {}
            }
        }
        assert_eq!(dials[..4], [10, 30, 70, 150]);
        assert!((120..140).contains(&dials.len()), "{}", dials.len());
        let (at, text) = end.unwrap();
        assert_eq!(at, 60_010);
        assert!(text.starts_with("the scheduler at a:1 is lost (the scheduler died)"), "{text}");
    }

    #[test]
    fn what_was_silent_before_is_part_of_the_silence_and_not_of_the_wait() {
        let mut absence = Absence::new(ms(2_000));
        absence.begin("how", ms(1_200), ms(5_000));
        assert_eq!(absence.look("it", ms(5_900)), Some(Wanted::Dial));
        assert_eq!(absence.look("it", ms(6_800)), None);
        assert_eq!(absence.end(ms(6_900)), Some(ms(3_100)));
        absence.begin("how", ms(0), ms(8_000));
        assert_eq!(absence.end(ms(8_100)), Some(ms(100)));
    }

    #[test]
    fn an_attempt_under_way_is_the_only_one_and_a_stopped_process_loses_no_time() {
        let mut absence = Absence::new(ms(1_000));
        absence.begin("how", ms(0), ms(0));
        assert_eq!(absence.look("it", ms(0)), Some(Wanted::Dial));
        assert_eq!(absence.look("it", ms(400)), None);
        assert_eq!(absence.look("it", ms(50_000)), None);
        assert_eq!(absence.end(ms(50_100)), Some(ms(500)));
        assert!(!absence.is_away() && absence.end(ms(50_100)).is_none());
        assert!(!Absence::new(ms(0)).is_waited_out());
    }
}
