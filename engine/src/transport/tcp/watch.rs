//! Whether what was sent still reaches the peer's machine.
//!
//! The kernel's own deadline, `TCP_USER_TIMEOUT`, cannot be used here: it also ends a connection
//! whose peer is well and does not read for that long, and not to read is how a lane waits for its
//! turn. So the kernel is asked twice a second what is on its way, and only bytes for which the
//! peer has room count. A lane at rest has the kernel's keepalive, which no reader can delay.

use super::Duration;
use rustix::net::sockopt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Where `struct tcp_info` of the kernel's ABI has these fields; it only ever grows.
const UNACKED: usize = 24;
const BYTES_ACKED: usize = 120;
const SEND_WINDOW: usize = 228;
/// Bytes of it that are asked for.
const INFO_BYTES: usize = 240;
/// The longest silence that the keepalive options take, seconds.
const KEEPALIVE_SECONDS_MAX: u64 = 32_767;
/// Probes at most before a silent connection at rest is given up: the kernel's limit is 127.
const PROBES_MAX: u64 = 100;

/// How far the peer has acknowledged.
#[derive(Default)]
pub(super) struct Progress {
    acked: u64,
    /// When it was first seen that bytes are on their way and no more are acknowledged.
    stuck: Option<Duration>,
}

/// What is on its way.
struct Outgoing {
    acked: u64,
    /// Bytes for which the peer has room were sent and are not acknowledged.
    is_due: bool,
}

impl Progress {
    /// For how long nothing of what is on its way has been acknowledged; none if nothing is, or if
    /// the socket is not one of TCP.
    pub(super) fn look(&mut self, socket: &OwnedFd, now: Duration) -> Option<Duration> {
        self.note(&ask(socket)?, now)
    }

    fn note(&mut self, outgoing: &Outgoing, now: Duration) -> Option<Duration> {
        if !outgoing.is_due || outgoing.acked != self.acked {
            self.acked = outgoing.acked;
            self.stuck = outgoing.is_due.then_some(now);
            return None;
        }
        let since = *self.stuck.get_or_insert(now);
        Some(now.saturating_sub(since))
    }
}

fn ask(socket: &OwnedFd) -> Option<Outgoing> {
    let mut info = [0u8; INFO_BYTES];
    let mut length = libc::socklen_t::try_from(INFO_BYTES).ok()?;
    // SAFETY: the kernel writes at most `length` bytes to the buffer, which is that long, and both
    // outlive the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    let known = info.get(..length as usize).filter(|_| result == 0)?;
    let number = |at: usize| known.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes);
    let acked = known.get(BYTES_ACKED..BYTES_ACKED + 8)?.try_into().ok().map(u64::from_ne_bytes)?;
    // Before Linux 5.5 the window is not told; bytes beyond a closed one are not sent at all.
    let has_room = number(SEND_WINDOW).is_none_or(|window| window > 0);
    Some(Outgoing { acked, is_due: number(UNACKED)? > 0 && has_room })
}

/// Lets the kernel probe a lane at rest, and close it after so much silence.
pub(super) fn keep_alive(socket: &OwnedFd, silence: Duration) -> io::Result<()> {
    let seconds = silence.as_secs().clamp(3, KEEPALIVE_SECONDS_MAX);
    let idle = seconds / 3;
    let interval = (seconds - idle).div_ceil(PROBES_MAX);
    let probes = u32::try_from((seconds - idle) / interval).unwrap_or(1);
    match sockopt::set_tcp_keepidle(socket, Duration::from_secs(idle)) {
        Ok(()) => {}
        // A socket pair of this host has no path that could be lost.
        Err(rustix::io::Errno::OPNOTSUPP) => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(interval))?;
    sockopt::set_tcp_keepcnt(socket, probes)?;
    Ok(sockopt::set_socket_keepalive(socket, true)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bytes_that_are_due_and_stand_still_count() {
        let mut progress = Progress::default();
        let mut note = |acked, is_due, seconds| {
            progress.note(&Outgoing { acked, is_due }, Duration::from_secs(seconds))
        };
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(note(0, true, 100), seconds(0));
        assert_eq!(note(0, true, 104), seconds(4));
        assert_eq!(note(10, true, 105), None, "some were acknowledged");
        assert_eq!(note(10, true, 108), seconds(3));
        assert_eq!(note(10, false, 109), None, "the peer closed its window, or all arrived");
        assert_eq!(note(10, true, 200), seconds(0));
        assert_eq!(note(10, true, 201), seconds(1));
    }
}
