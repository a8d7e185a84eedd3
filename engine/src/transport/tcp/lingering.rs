//! Sockets of lanes that this end has closed, until the peer has closed them as well.
//!
//! The kernel resets a connection whose socket is closed over bytes that nobody has read, and drops
//! what is still to be sent. So the last words of a lane, which say why it ends, would be lost
//! behind results that the peer is slow to read, if it goes on sending meanwhile.

use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// How long a peer may take to read its last words and to close.
const LINGER: Duration = Duration::from_secs(2);
/// The oldest socket makes room for one more than this.
const SOCKETS_MAX: usize = 64;
/// Calls that throw bytes away, for one socket at a time.
const CALLS_MAX: usize = 64;

/// See the [module](self).
#[derive(Default)]
pub(super) struct Lingering {
    /// The oldest first, and since when they were looked at.
    sockets: Vec<(OwnedFd, Option<Duration>)>,
}

impl Lingering {
    /// Nothing more goes out of this socket, and what comes is thrown away.
    pub fn add(&mut self, socket: OwnedFd) {
        let _ = shutdown(&socket, Shutdown::Write);
        if has_closed(&socket) {
            return;
        }
        if self.sockets.len() == SOCKETS_MAX {
            self.sockets.remove(0);
        }
        self.sockets.push((socket, None));
    }

    /// Lets go of those whose peers have closed, or had time to.
    pub fn look(&mut self, now: Duration) {
        self.sockets.retain_mut(|(socket, since)| {
            let waited = now.saturating_sub(*since.get_or_insert(now));
            waited < LINGER && !has_closed(socket)
        });
    }
}

/// Throws away what the peer has sent, up to a bound. Whether it has closed the connection, or that
/// is lost.
fn has_closed(socket: &OwnedFd) -> bool {
    // On a TCP socket the kernel throws them away itself and touches no buffer.
    let flags = RecvFlags::TRUNC | RecvFlags::DONTWAIT;
    let mut sink = [0; 4096];
    for _ in 0..CALLS_MAX {
        match recv(socket, &mut sink, flags) {
            Ok((_, 0)) => return true,
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return false,
            Err(_) => return true,
        }
    }
    false
}
