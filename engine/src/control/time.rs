//! Questions for the scheduler's clock, and what is made of the answers. Called by the control
//! thread of a node in each of its turns.

use super::LinkSender;
use crate::proto::messages::{ClockAnswer, NodeMessage};
use crate::trace::clock::{Clock, now_ns};

/// Asks, if the estimate is wanted and old.
pub fn ask_time(clock: &Clock, sender: &LinkSender) {
    let sent_ns = now_ns();
    if clock.is_due(sent_ns) {
        // A scheduler that can't be written to is noticed by whoever reads it.
        let _ = sender.send(&NodeMessage::Clock { sent_ns });
    }
}

/// Takes an answer in, and asks again while the estimate needs more of them.
pub fn take_time(clock: &Clock, answer: &ClockAnswer, sender: &LinkSender) {
    let ClockAnswer { sent_ns, now_ns: there_ns, to_unix_ns, domain } = answer;
    if clock.answered(*sent_ns, now_ns(), *there_ns, *to_unix_ns, domain) {
        let _ = sender.send(&NodeMessage::Clock { sent_ns: now_ns() });
    }
}
