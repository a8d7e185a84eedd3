//! The control plane's sockets: authenticated connections and the messages between nodes and
//! scheduler.
//!
//! Used by the scheduler, by servers (which accept lanes and keep a link to the scheduler) and by
//! workers (which dial both). Blocking calls and a lock are fine here: a few messages pass per
//! second, and no data.
//!
//! Invariant: no call blocks beyond the time it was given, and no byte of a peer is parsed before
//! the [handshake](crate::proto::handshake) is over; in a job with a key, none that the
//! [channel] did not open.

#![forbid(unsafe_code)]

mod acceptor;
pub mod channel;
mod dial;
mod fault;
mod frame;
mod job_key;
mod knock;
mod link;
mod redial;
mod setups;
#[cfg(test)]
mod tests;
mod time;

pub use crate::proto::handshake::{HandshakeError, Hello, JobKey, Purpose, Secrets};
pub use acceptor::{Acceptor, Listener, Socket};
pub use dial::{DialError, abstract_name, dial, dial_sealed, dial_unix};
pub use fault::{is_one_sided, lane_fault};
pub use frame::{Connection, FrameError, Inbox, encode};
pub use job_key::JobKeyError;
pub use knock::Knocker;
pub use link::{ControlLink, Door, LinkError, LinkReceiver, LinkSender};
pub use redial::{Found, Progress, Redial};
pub use setups::Setups;
pub use time::{ask_time, take_time};
