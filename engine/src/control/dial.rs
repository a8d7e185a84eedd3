//! The dialing end of a connection: connect, prove, and hand out a socket that carries nothing yet.
//!
//! Nodes of a job start in any order, so an address where nobody listens yet is tried again until
//! the deadline. A peer that answers, but wrongly, is not: that does not mend itself.

use super::job_key::nonce;
use crate::limits::HANDSHAKE_SECONDS;
use crate::proto::handshake::{ANSWER_BYTES, Dialing, HandshakeError, Hello, JobKey, Secrets};
use crate::trace::log;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Pause between two attempts: the first, doubled each time up to the last.
const RETRY_FIRST: Duration = Duration::from_millis(10);
const RETRY_LAST: Duration = Duration::from_millis(500);
/// When it is first said that attempts fail; again after twice that, and so on.
const REPORT_FIRST: Duration = Duration::from_secs(2);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// Nobody listens there, or the way there is closed.
    #[error(
        "cannot connect to {address} within {:.1} s: {error}: check that the process there runs, \
         that address and port are right, and that no firewall is between",
        waited.as_secs_f64()
    )]
    Unreachable {
        /// Where to.
        address: String,
        /// How long it was tried.
        waited: Duration,
        /// What the kernel said last.
        error: io::Error,
    },
    /// Somebody listens there but is not of this job.
    #[error("connected to {address}, but {error}")]
    Handshake {
        /// Where to.
        address: String,
        /// What is wrong.
        error: HandshakeError,
    },
}

/// Why one attempt failed.
pub(super) enum Attempt {
    /// It may work later.
    Later(io::Error),
    /// It will not work later; or it may, but this is what to say if it does not.
    Handshake(HandshakeError),
}

/// Connects to `address` and proves to each other who both are. The socket returned is blocking and
/// sends small writes at once. It has carried nothing but the handshake.
///
/// # Errors
/// Nobody listened there by the deadline, or who did is not of this job.
pub fn dial(
    address: SocketAddr,
    key: &JobKey,
    hello: Hello,
    deadline: Duration,
) -> Result<TcpStream, DialError> {
    Ok(dial_sealed(address, key, hello, deadline)?.0)
}

/// As [`dial`], and with what the connection may be encrypted with.
///
/// # Errors
/// As for [`dial`].
pub fn dial_sealed(
    address: SocketAddr,
    key: &JobKey,
    hello: Hello,
    deadline: Duration,
) -> Result<(TcpStream, Secrets), DialError> {
    retry(&address.to_string(), deadline, |left| dial_once(address, key, hello, left))
}

/// Connects to the abstract Unix socket `name` of this host, as [`dial`] does to an address.
///
/// # Errors
/// As for [`dial`].
pub fn dial_unix(
    name: &str,
    key: &JobKey,
    hello: Hello,
    deadline: Duration,
) -> Result<UnixStream, DialError> {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes());
    retry(&format!("unix socket @{name}"), deadline, |left| {
        let later = |error: rustix::io::Errno| Attempt::Later(error.into());
        let address = address.as_ref().map_err(|error| later(*error))?;
        // Non-blocking while connecting: a full backlog is then an error to retry, not a wait
        // without end.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(later)?;
        rustix::net::connect(&socket, address).map_err(later)?;
        let mut stream = UnixStream::from(socket);
        stream.set_nonblocking(false).map_err(Attempt::Later)?;
        shake(&mut stream, key, hello, left)?;
        Ok(stream)
    })
}

/// A name for an abstract Unix socket that nobody has or can guess. Process ids repeat where
/// containers share the host's network, and what can be guessed can be taken first.
///
/// # Errors
/// The kernel gives no random bytes.
pub fn abstract_name(prefix: &str) -> io::Result<String> {
    let hex: String = nonce()?.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{prefix}-{hex}"))
}

/// One attempt at what [`dial_sealed`] does.
pub(super) fn dial_once(
    address: SocketAddr,
    key: &JobKey,
    hello: Hello,
    left: Duration,
) -> Result<(TcpStream, Secrets), Attempt> {
    let start = Instant::now();
    let mut stream = TcpStream::connect_timeout(&address, left.max(Duration::from_millis(1)))
        .map_err(Attempt::Later)?;
    // The kernel may choose the very port that is being dialed, and then connects the socket to
    // itself.
    if stream.local_addr().is_ok_and(|local| local == address) {
        return Err(Attempt::Later(ErrorKind::ConnectionRefused.into()));
    }
    stream.set_nodelay(true).map_err(Attempt::Later)?;
    let secrets = shake(&mut stream, key, hello, left.saturating_sub(start.elapsed()))?;
    Ok((stream, secrets))
}

/// Calls `attempt` with the time left until it succeeds, fails for good, or time is up.
pub(super) fn retry<T>(
    address: &str,
    deadline: Duration,
    mut attempt: impl FnMut(Duration) -> Result<T, Attempt>,
) -> Result<T, DialError> {
    let start = Instant::now();
    let mut pause = RETRY_FIRST;
    let mut report = REPORT_FIRST;
    loop {
        let failure = match attempt(deadline.saturating_sub(start.elapsed())) {
            Ok(done) => return Ok(done),
            Err(failure) => failure,
        };
        let waited = start.elapsed();
        let hopeless = match &failure {
            Attempt::Later(error) => !may_mend(error),
            // It closed or was silent before it proved anything: it may be about to start or to
            // end.
            Attempt::Handshake(error) => !matches!(
                error,
                HandshakeError::Closed | HandshakeError::TooSlow | HandshakeError::Os(_)
            ),
        };
        if hopeless || waited + pause >= deadline {
            let address = address.to_owned();
            return Err(match failure {
                Attempt::Later(error) => DialError::Unreachable { address, waited, error },
                Attempt::Handshake(error) => DialError::Handshake { address, error },
            });
        }
        if waited >= report {
            let (waited, deadline) = (waited.as_secs(), deadline.as_secs());
            let error: &dyn std::error::Error = match &failure {
                Attempt::Later(error) => error,
                Attempt::Handshake(error) => error,
            };
            log::info!("waiting for {address} ({waited} s of {deadline}): {error}");
            report *= 2;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(RETRY_LAST);
    }
}

/// Whether an error of connecting can go away while the other nodes start.
fn may_mend(error: &io::Error) -> bool {
    !matches!(
        error.kind(),
        ErrorKind::InvalidInput | ErrorKind::PermissionDenied | ErrorKind::Unsupported
    )
}

/// The dialer's handshake over a blocking stream.
fn shake<S: Read + Write + AsFd>(
    stream: &mut S,
    key: &JobKey,
    hello: Hello,
    left: Duration,
) -> Result<Secrets, Attempt> {
    let until = Instant::now() + left.min(Duration::from_secs(HANDSHAKE_SECONDS));
    let nonce = nonce().map_err(Attempt::Later)?;
    let dialing = Dialing::new(key, hello, &nonce);
    // The handshake's few bytes always fit the empty buffer of a new socket: these writes do not
    // block.
    stream.write_all(dialing.hello()).map_err(|error| broken(&error))?;
    let mut answer = [0; ANSWER_BYTES];
    let mut filled = 0;
    while filled < ANSWER_BYTES {
        if !readable(stream, until).map_err(|error| broken(&error))? {
            return Err(Attempt::Handshake(HandshakeError::TooSlow));
        }
        match stream.read(&mut answer[filled..]) {
            Ok(0) => return Err(Attempt::Handshake(closed(&answer[..filled]))),
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(broken(&error)),
        }
        if filled >= 4 && answer[..4] != crate::proto::handshake::MAGIC {
            return Err(Attempt::Handshake(closed(&answer[..filled])));
        }
    }
    let (proof, result) = dialing.handle_answer(&answer);
    let written = stream.write_all(&proof);
    result.map_err(Attempt::Handshake)?;
    written.map_err(|error| broken(&error))?;
    Ok(dialing.secrets(&answer))
}

/// What to say of a peer whose answer stopped short.
fn closed(answer: &[u8]) -> HandshakeError {
    match answer.first_chunk::<4>() {
        Some(start) if *start != crate::proto::handshake::MAGIC => HandshakeError::NotOurs(*start),
        _ => HandshakeError::Closed,
    }
}

pub(super) fn broken(error: &io::Error) -> Attempt {
    Attempt::Handshake(match (error.kind(), error.raw_os_error()) {
        (ErrorKind::ConnectionReset | ErrorKind::BrokenPipe, _) | (_, None) => {
            HandshakeError::Closed
        }
        (_, Some(errno)) => HandshakeError::Os(errno),
    })
}

/// Waits until there is something to read (or the end of it), at most until then.
pub(super) fn readable(stream: &impl AsFd, until: Instant) -> io::Result<bool> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(stream, PollFlags::IN)];
        match poll(&mut fds, Some(&timespec(left))) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

/// A duration as poll(2) wants it, a day at most.
pub(super) fn timespec(duration: Duration) -> Timespec {
    let duration = duration.min(Duration::from_secs(86_400));
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(86_400),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn nobody_there_is_said_with_address_errno_and_remedy() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let start = Instant::now();
        let error = dial(address, &JobKey::open(), Hello::control(), Duration::from_millis(100))
            .unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(2));
        let text = error.to_string();
        for part in [&address.to_string(), "refused", "os error 111", "firewall"] {
            assert!(text.contains(part), "{text}");
        }
        let error = dial_unix("bps-test-nobody", &JobKey::open(), Hello::control(), Duration::ZERO);
        assert!(error.unwrap_err().to_string().contains("@bps-test-nobody"));
    }

    #[test]
    fn another_protocol_is_not_tried_twice() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            peer.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
            let _ = peer.read(&mut [0; 64]);
        });
        let error = dial(address, &JobKey::open(), Hello::control(), Duration::from_secs(10));
        server.join().unwrap();
        assert!(
            matches!(
                error,
                Err(DialError::Handshake { error: HandshakeError::NotOurs(start), .. })
                if start == *b"HTTP"
            ),
            "{error:?}"
        );
    }

    #[test]
    fn a_silent_listener_is_given_up_at_the_deadline() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let error = dial(address, &JobKey::open(), Hello::control(), Duration::from_millis(150));
        assert!(matches!(error, Err(DialError::Handshake { error: HandshakeError::TooSlow, .. })));
    }
}
