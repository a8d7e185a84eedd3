//! Lanes over connected stream sockets, behind two drivers: io_uring, and plain non-blocking calls
//! for where a container's seccomp profile denies it. Which one runs is chosen once, at start, and
//! said in one line.
//!
//! | file | owns |
//! |---|---|
//! | `lingering.rs` | sockets of lanes that have ended here, and not yet at the peer |
//! | `memory.rs` | staging and scratch |
//! | `receiver.rs`, `sender.rs` | the two halves of a lane, without a system call |
//! | `sealed.rs` | records that are encrypted, without a lane |
//! | `sealing.rs` | such records between the halves of a lane and the driver |
//! | `stream.rs` | a lane of the two, how it ends, the queue of ready lanes |
//! | `watch.rs` | whether what was sent still reaches the peer |
//! | `uring.rs`, `poll.rs` | the drivers: which calls move the bytes |
//!
//! A transport is used from the thread that first attaches, polls or blocks; it may be made on
//! another one.

use super::{Driver, Event, Frame, Full, Landing, LaneId, Link, Waker};
use crate::config::TcpDriver;
use crate::limits::UNSENT_BYTES_MAX;
use poll::Poll;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;
use uring::Uring;

mod lingering;
mod memory;
mod poll;
mod receiver;
pub mod sealed;
mod sealing;
mod sender;
mod stream;
mod uring;
mod watch;

/// Why there is no TCP transport.
#[derive(Debug, thiserror::Error)]
pub enum TcpError {
    /// io_uring was asked for by name and is not available.
    #[error(
        "BPS_TCP_DRIVER=uring, but {0}: allow io_uring in this container's seccomp profile and in \
         kernel.io_uring_disabled (Linux 6.1 or later), or set BPS_TCP_DRIVER=auto or poll"
    )]
    Uring(#[source] Denied),
    /// Not even epoll is to be had.
    #[error("epoll_create1 failed: {0}: raise the limit of open files (ulimit -n)")]
    Epoll(#[source] io::Error),
}

/// A call that io_uring needs, and what the kernel answered.
#[derive(Debug)]
pub struct Denied {
    call: &'static str,
    source: io::Error,
}

impl std::fmt::Display for Denied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let denied = matches!(self.source.raw_os_error(), Some(libc::EPERM | libc::EACCES));
        let verb = if denied { "was denied" } else { "failed" };
        write!(f, "{} {verb}: {}", self.call, self.source)
    }
}

impl std::error::Error for Denied {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// The longest sleep, so that every timeout has a form that the kernel accepts.
const BLOCK_MAX: Duration = Duration::from_secs(3600);

enum Either {
    Uring(Box<Uring>),
    Poll(Box<Poll>),
}

/// Lanes over stream sockets; see the [module](self).
pub struct Tcp {
    driver: Either,
    description: String,
    congestion: Option<String>,
    send_buffer: usize,
    /// Silence of a peer's machine after which a lane is closed.
    silence: Option<Duration>,
}

impl Tcp {
    /// A transport for lanes 0 to `lanes_max - 1`, which sleeps on `waker`.
    ///
    /// # Errors
    /// io_uring is denied and `choice` insists on it, or no descriptor is left.
    pub fn new(waker: Waker, choice: TcpDriver, lanes_max: u32) -> Result<Tcp, TcpError> {
        let reason = match choice {
            TcpDriver::Poll => "BPS_TCP_DRIVER=poll".to_owned(),
            TcpDriver::Auto | TcpDriver::Uring => match Uring::new(waker.clone(), lanes_max) {
                Ok(driver) => {
                    let description = format!("tcp: io_uring ({})", uring::ZERO_COPY);
                    let driver = Either::Uring(Box::new(driver));
                    return Ok(Tcp::over(driver, description));
                }
                Err(denied) if choice == TcpDriver::Uring => return Err(TcpError::Uring(denied)),
                Err(denied) => denied.to_string(),
            },
        };
        let driver = Poll::new(waker, lanes_max).map_err(TcpError::Epoll)?;
        let description = format!("tcp: plain sockets, because {reason}");
        let driver = Either::Poll(Box::new(driver));
        Ok(Tcp::over(driver, description))
    }

    fn over(driver: Either, description: String) -> Tcp {
        Tcp { driver, description, congestion: None, send_buffer: 0, silence: None }
    }

    /// Closes a lane once the peer's machine has acknowledged nothing of what was sent, or of the
    /// probes of a lane at rest, for so long; see [`Driver::look`].
    #[must_use]
    pub fn with_silence(self, silence: Duration) -> Tcp {
        Tcp { silence: Some(silence), ..self }
    }

    /// The congestion control of lanes to come; `None` keeps the system's, but takes cubic instead
    /// of bbr.
    #[must_use]
    pub fn with_congestion(self, name: Option<String>) -> Tcp {
        Tcp { congestion: name, ..self }
    }

    /// Bytes that the kernel may hold of each lane to come, sent and not acknowledged included; 0
    /// leaves it to the kernel.
    #[must_use]
    pub fn with_send_buffer(self, send_buffer: usize) -> Tcp {
        Tcp { send_buffer, ..self }
    }

    /// Whether large sends go to threads of the kernel's, so that this thread's receives run beside
    /// them. Only io_uring can; it costs a hand-over for each.
    #[must_use]
    pub fn with_offload(mut self, offload: bool) -> Tcp {
        if let Either::Uring(uring) = &mut self.driver {
            uring.offload = offload;
        }
        self
    }

    /// Which driver runs and why, in one line to be printed at start.
    #[must_use]
    pub fn description(&self) -> String {
        self.description.clone()
    }
}

macro_rules! dispatch {
    ($self:ident, $driver:ident => $call:expr) => {
        match &mut $self.driver {
            Either::Uring($driver) => $call,
            Either::Poll($driver) => $call,
        }
    };
}

impl Driver for Tcp {
    fn takes(&self, link: &Link) -> bool {
        matches!(link, Link::Tcp(_) | Link::SealedTcp(..))
    }

    fn wakes_for_all(&self) -> bool {
        true
    }

    fn attach(&mut self, lane: LaneId, link: Link) -> io::Result<()> {
        let (socket, keys) = match link {
            Link::Tcp(socket) => (socket, None),
            Link::SealedTcp(socket, keys) => (socket, Some(keys)),
            _ => return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a stream socket")),
        };
        prepare(&socket, self.congestion.as_deref())?;
        if self.send_buffer > 0 {
            // The kernel doubles what it is told, for its own book-keeping.
            rustix::net::sockopt::set_socket_send_buffer_size(&socket, self.send_buffer / 2)?;
        }
        if let Some(silence) = self.silence {
            watch::keep_alive(&socket, silence)?;
        }
        dispatch!(self, driver => driver.attach(lane, socket, keys.as_deref()))
    }
    fn post(&mut self, lane: LaneId, frame: &Frame) -> Result<(), Full> {
        dispatch!(self, driver => driver.post(lane, frame))
    }
    fn land(&mut self, lane: LaneId, landing: Landing) {
        dispatch!(self, driver => driver.land(lane, landing));
    }
    fn consume(&mut self, lane: LaneId) {
        dispatch!(self, driver => driver.consume(lane));
    }
    fn close(&mut self, lane: LaneId) {
        dispatch!(self, driver => driver.close(lane));
    }
    fn poll(&mut self, events: &mut Vec<Event>) {
        dispatch!(self, driver => driver.poll(events));
    }
    fn look(&mut self, now: Duration) {
        dispatch!(self, driver => driver.look(now, self.silence));
    }
    fn block(&mut self, timeout: Duration) {
        dispatch!(self, driver => driver.block(timeout.min(BLOCK_MAX)));
    }
}

/// Sets a socket up: non-blocking, no waiting for a fuller packet, and a bound on what the kernel
/// holds unsent. Buffer sizes are left to the kernel, unless told otherwise: it tunes them by the
/// path, and a fixed size stops it from doing so.
fn prepare(socket: &OwnedFd, congestion: Option<&str>) -> io::Result<()> {
    rustix::io::ioctl_fionbio(socket, true)?;
    match rustix::net::sockopt::set_tcp_nodelay(socket, true) {
        Ok(()) => {
            bound_unsent(socket)?;
            control_congestion(socket, congestion)
        }
        // A socket pair of this host has no packets to delay, and no queue in front of a line.
        Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Sets the congestion control. bbr (its first version, the one in the kernel) lets a line run
/// empty every ten seconds and probes it in between: `docs/decisions.md` has the figures. Where the
/// kernel forbids another one, the system's stays.
fn control_congestion(socket: &OwnedFd, wanted: Option<&str>) -> io::Result<()> {
    let socket = socket2::SockRef::from(socket);
    match wanted {
        Some(name) => socket.set_tcp_congestion(name.as_bytes()).map_err(|error| {
            let text = format!(
                "BPS_TCP_CONGESTION={name}: {error}; the kernel lists what it allows in \
                 /proc/sys/net/ipv4/tcp_allowed_congestion_control"
            );
            io::Error::new(error.kind(), text)
        }),
        None => {
            if socket.tcp_congestion().is_ok_and(|name| name.starts_with(b"bbr")) {
                let _ = socket.set_tcp_congestion(b"cubic");
            }
            Ok(())
        }
    }
}

/// What the kernel has taken and not sent can't be overtaken any more, so the credit bounds the
/// wait of an urgent part only if this is small. What is sent and not acknowledged is not counted:
/// a long path keeps its window.
fn bound_unsent(socket: &OwnedFd) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let bytes: libc::c_int = UNSENT_BYTES_MAX;
    let length = libc::socklen_t::try_from(size_of::<libc::c_int>()).expect("four");
    // SAFETY: the kernel reads the four bytes of a local that outlives the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_NOTSENT_LOWAT,
            (&raw const bytes).cast(),
            length,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "patterns, and counts that are small")]
mod tests;
