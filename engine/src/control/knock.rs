//! Fresh connections to a scheduler that does not answer on the first one: each is dialed with
//! packets of its own, which do not wait for the retransmissions of an older connection.

use super::link::{ControlLink, Door};
use crate::proto::messages::{NodeMessage, SchedulerMessage};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

/// How long one attempt to connect takes at least: the next one's packets are fresh.
const ATTEMPT_MIN: Duration = Duration::from_millis(200);
/// And at most, on the longest paths.
const ATTEMPT_MAX: Duration = Duration::from_secs(2);
/// Answers that may wait to be taken.
const ANSWERS: usize = 16;
/// How often a knock that has got through is repeated.
const REPEAT: Duration = Duration::from_millis(500);

/// A thread that knocks until this is dropped.
#[derive(Debug)]
pub struct Knocker {
    stop: Arc<AtomicBool>,
    answers: Receiver<SchedulerMessage>,
}

impl Knocker {
    /// Starts to knock.
    ///
    /// # Errors
    /// No thread is left.
    pub fn start(door: Door) -> std::io::Result<Knocker> {
        let stop = Arc::new(AtomicBool::new(false));
        let (send, answers) = sync_channel(ANSWERS);
        let stopped = Arc::clone(&stop);
        let body = move || {
            let is_over = || stopped.load(Ordering::Acquire);
            // Connecting takes one round trip, the proofs another, and the greeting one more.
            let patience = (4 * door.round_trip).clamp(ATTEMPT_MIN, ATTEMPT_MAX);
            while !is_over() {
                let start = Instant::now();
                if let Ok(link) = ControlLink::dial(door.address, &door.key, patience) {
                    // What is not taken in time is not missed: the next answer comes soon.
                    knock(link, door.session, is_over, |message| drop(send.try_send(message)));
                }
                // Refused at once: the scheduler's machine is there, its process is not.
                std::thread::sleep(patience.saturating_sub(start.elapsed()));
            }
        };
        std::thread::Builder::new().name("bps-knock".into()).spawn(body)?;
        Ok(Knocker { stop, answers })
    }

    /// The next thing that the scheduler said on a fresh connection.
    #[must_use]
    pub fn answer(&self) -> Option<SchedulerMessage> {
        self.answers.try_recv().ok()
    }
}

impl Drop for Knocker {
    /// The thread ends by itself, within an attempt.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
    }
}

/// Says that the node lives, again and again, until the connection is of no more use.
fn knock(
    mut link: ControlLink,
    session: u64,
    is_over: impl Fn() -> bool,
    mut heard: impl FnMut(SchedulerMessage),
) {
    while !is_over() {
        if link.send(&NodeMessage::Alive { session }).is_err() {
            return;
        }
        let until = Instant::now() + REPEAT;
        let mut is_answered = false;
        loop {
            match link.receive(until.saturating_duration_since(Instant::now())) {
                Ok(Some(message)) => {
                    is_answered = true;
                    heard(message);
                }
                Ok(None) => break,
                Err(_) => return,
            }
        }
        // This one has fallen silent as well: a fresh one is better.
        if !is_answered {
            return;
        }
    }
}
