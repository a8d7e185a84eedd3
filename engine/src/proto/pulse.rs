//! A node's heartbeats and the scheduler's answers to them, as a state machine: when to send one,
//! when to try another way to the scheduler, and when the scheduler counts as gone.
//!
//! A lost packet of a connection is sent again after pauses that double each time, so an outage of
//! 3.5 s is a silence of up to 7 s. A node that misses an answer therefore knocks: it opens fresh
//! connections to the scheduler until one gets through, and says there that it lives. Invariant:
//! the time in which this process itself did not run counts for nothing.

use std::time::Duration;

/// A node notices a silent scheduler this fraction of the timeout later than the other way round:
/// if the scheduler has given the node up, its word to say so is still heard.
const LATER: u32 = 8;
/// A missing answer is looked for another way after this fraction of the timeout.
const KNOCK: u32 = 8;

/// What is to be done now.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Beat {
    /// Send a heartbeat on the connection.
    pub send: bool,
    /// Fresh connections are to be tried, or held, until this is false.
    pub knock: bool,
    /// The scheduler has answered nothing for so long, and counts as gone.
    pub silent: Option<Duration>,
}

/// The scheduler has answered no heartbeat for too long.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{scheduler} has not answered for {:.1} s: it is stopped or overloaded, or the network between \
     it and this machine is broken; BPS_HEARTBEAT_TIMEOUT gives it longer",
    silent.as_secs_f64()
)]
pub struct SchedulerSilent {
    /// The scheduler as people know it, with its address.
    pub scheduler: String,
    /// For how long.
    pub silent: Duration,
}

/// See the [module](self).
#[derive(Clone, Debug)]
pub struct Pulse {
    scheduler: String,
    interval: Duration,
    timeout: Duration,
    next: Duration,
    /// When the first heartbeat was sent that has no answer.
    unanswered: Option<Duration>,
    /// When a fresh connection last had an answer.
    aside: Duration,
    looked: Duration,
    round_trip: Option<Duration>,
}

impl Pulse {
    /// The pulse of a node that has just connected to the scheduler at this address.
    #[must_use]
    pub fn new(address: &str, interval: Duration, timeout: Duration, now: Duration) -> Pulse {
        let scheduler = format!("the scheduler at {address}");
        let (unanswered, round_trip) = (None, None);
        let (next, aside, looked) = (now, now, now);
        Pulse { scheduler, interval, timeout, next, unanswered, aside, looked, round_trip }
    }

    /// Another scheduler leads the job from now on.
    pub fn restart(&mut self, now: Duration) {
        (self.next, self.aside, self.unanswered) = (now, now, None);
    }

    /// The scheduler has answered a heartbeat.
    pub fn answered(&mut self, now: Duration) {
        if let Some(since) = self.unanswered.take() {
            let trip = now.saturating_sub(since);
            self.round_trip = Some(self.round_trip.map_or(trip, |shortest| shortest.min(trip)));
        }
    }

    /// The shortest time from a heartbeat to its answer.
    #[must_use]
    pub fn round_trip(&self) -> Duration {
        self.round_trip.unwrap_or_default()
    }

    /// The scheduler has answered on a fresh connection.
    pub fn answered_aside(&mut self, now: Duration) {
        self.aside = now;
    }

    /// The scheduler as people know it.
    #[must_use]
    pub fn scheduler(&self) -> &str {
        &self.scheduler
    }

    /// What to say of a scheduler that was silent for so long.
    #[must_use]
    pub fn complaint(&self, silent: Duration) -> SchedulerSilent {
        SchedulerSilent { scheduler: self.scheduler.clone(), silent }
    }

    /// What is to be done now; to be asked several times in each interval and timeout.
    pub fn look(&mut self, now: Duration) -> Beat {
        let gap = now.saturating_sub(self.looked);
        self.looked = now;
        if gap > self.timeout / 2 {
            self.aside += gap;
            self.unanswered = self.unanswered.map(|since| since + gap);
        }
        let send = now >= self.next;
        if send {
            self.next = now + self.interval;
            self.unanswered.get_or_insert(now);
        }
        let Some(since) = self.unanswered else {
            return Beat { send, ..Beat::default() };
        };
        let silent = now.saturating_sub(since.max(self.aside));
        let is_over = silent >= self.timeout + self.timeout / LATER;
        Beat {
            send,
            knock: now.saturating_sub(since) >= self.timeout / KNOCK,
            silent: is_over.then_some(silent),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    fn pulse() -> Pulse {
        Pulse::new("10.0.0.1:9000", ms(1_000), ms(4_000), ms(0))
    }

    /// Looks every 50 ms from one time to the other, and returns what was seen last.
    fn run(
        pulse: &mut Pulse,
        from: u64,
        to: u64,
        mut answer: impl FnMut(&mut Pulse, Beat),
    ) -> Beat {
        let mut last = Beat::default();
        for now in (from..=to).step_by(50) {
            last = pulse.look(ms(now));
            answer(pulse, last);
        }
        last
    }

    #[test]
    fn answered_heartbeats_go_on_and_a_missing_answer_is_noticed_in_time() {
        let mut pulse = pulse();
        let mut sent = 0;
        run(&mut pulse, 0, 60_000, |pulse, beat| {
            assert!(!beat.knock && beat.silent.is_none());
            sent += u32::from(beat.send);
            pulse.answered(pulse.looked);
        });
        assert_eq!(sent, 61);
        // The heartbeat at 61 s has no answer.
        assert!(!run(&mut pulse, 60_050, 61_450, |_, _| {}).knock);
        assert!(run(&mut pulse, 61_500, 61_500, |_, _| {}).knock);
        assert_eq!(run(&mut pulse, 61_550, 65_450, |_, _| {}).silent, None);
        let silent = run(&mut pulse, 65_500, 65_500, |_, _| {}).silent;
        assert_eq!(silent, Some(ms(4_500)));
        let line = pulse.complaint(ms(4_500)).to_string();
        assert!(line.starts_with("the scheduler at 10.0.0.1:9000 has not answered for 4.5 s"));
    }

    #[test]
    fn an_answer_on_another_way_keeps_the_scheduler_alive_until_the_first_is_back() {
        let mut pulse = pulse();
        let last = run(&mut pulse, 0, 30_000, |pulse, beat| {
            if beat.send {
                pulse.answered_aside(pulse.looked);
            }
        });
        assert_eq!((last.knock, last.silent), (true, None));
        pulse.answered(ms(30_000));
        assert!(!run(&mut pulse, 30_050, 30_050, |_, _| {}).knock);
        assert!(run(&mut pulse, 30_100, 36_000, |_, _| {}).silent.is_some());
    }

    #[test]
    fn a_process_that_did_not_run_blames_nobody() {
        let mut pulse = pulse();
        assert_eq!(pulse.look(ms(0)), Beat { send: true, ..Beat::default() });
        // Stopped for a minute; the answer is in the socket still.
        assert_eq!(pulse.look(ms(60_000)).silent, None);
        assert_eq!(run(&mut pulse, 60_050, 64_000, |_, _| {}).silent, None);
        assert!(run(&mut pulse, 64_050, 65_000, |_, _| {}).silent.is_some());
    }
}
