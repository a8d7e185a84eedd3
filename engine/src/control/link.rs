//! A node's connection to the scheduler, as messages.
//!
//! Sending is for any thread, receiving for one. Invariant: a message that was not sent whole is
//! the last: the connection is shut down, so that the scheduler never reads half a message as the
//! start of another.

use super::dial::{Attempt, dial_once, readable, retry};
use super::frame::{FrameError, Inbox, encode};
use super::job_key::nonce;
use super::knock::Door;
use super::{DialError, Hello, JobKey};
use crate::proto::messages::{NodeMessage, SchedulerMessage};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long the scheduler may take to make room for a message.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes read at once.
const READ_BYTES: usize = 64 << 10;

/// Why a message did not pass.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The scheduler closed the connection, or it was shut down at this end.
    #[error("the connection to the scheduler was closed: its own log says why")]
    Closed,
    /// The kernel reported an error.
    #[error("the connection to the scheduler was lost: {0}")]
    Lost(io::Error),
    /// The scheduler took nothing for too long.
    #[error(
        "the scheduler took no message for {} s: its machine is overloaded or unreachable",
        WRITE_TIMEOUT.as_secs()
    )]
    TooSlow,
    /// A message is too long or cannot be read.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// Both halves of a connection to the scheduler.
#[derive(Debug)]
pub struct Link {
    sender: LinkSender,
    receiver: LinkReceiver,
    session: u64,
}

/// The sending half. Clones send over the same connection, each message whole.
#[derive(Clone, Debug)]
pub struct LinkSender {
    stream: Arc<Mutex<TcpStream>>,
    /// The same socket outside of the lock, so that a send that waits can be cut short.
    closer: Arc<TcpStream>,
}

/// The receiving half.
#[derive(Debug)]
pub struct LinkReceiver {
    stream: TcpStream,
    /// Messages that were received before, and not for whoever took them.
    unread: VecDeque<SchedulerMessage>,
    inbox: Inbox,
}

impl Link {
    /// Connects to the scheduler at this host name or address, trying again until the deadline.
    ///
    /// # Errors
    /// The name is not known, nobody listened there by the deadline, or who did is not of this job.
    pub fn connect(
        root_uri: &str,
        root_port: u16,
        key: &JobKey,
        deadline: Duration,
    ) -> Result<Link, DialError> {
        let address = format!("the scheduler at {root_uri}:{root_port}");
        let stream = retry(&address, deadline, |left| {
            // Asked anew each time: the name of a scheduler that is just starting may not be known
            // yet.
            let bare = root_uri.trim_start_matches('[').trim_end_matches(']');
            let found = (bare, root_port).to_socket_addrs().map_err(Attempt::Later)?;
            let mut addresses: Vec<SocketAddr> = found.collect();
            // IPv4 first: where both exist, clusters rarely route both.
            addresses.sort_by_key(SocketAddr::is_ipv6);
            let start = Instant::now();
            let mut failure = Attempt::Later(ErrorKind::AddrNotAvailable.into());
            for (index, address) in addresses.iter().enumerate() {
                // A way that is blocked must leave time for the next.
                let tries = u32::try_from(addresses.len() - index).unwrap_or(u32::MAX);
                let share = left.saturating_sub(start.elapsed()) / tries;
                match dial_once(*address, key, Hello::control(), share) {
                    Ok(stream) => return Ok(stream),
                    Err(error) => failure = error,
                }
            }
            Err(failure)
        })?;
        Link::new(stream).map_err(|error| DialError::Unreachable {
            address,
            waited: Duration::ZERO,
            error,
        })
    }

    /// The link over a connection that is authenticated already.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(stream: TcpStream) -> io::Result<Link> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        let closer = Arc::new(stream.try_clone()?);
        let sender = LinkSender { stream: Arc::new(Mutex::new(stream.try_clone()?)), closer };
        let receiver = LinkReceiver { stream, unread: VecDeque::new(), inbox: Inbox::new() };
        let random = nonce()?;
        let session = random.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        Ok(Link { sender, receiver, session })
    }

    /// One attempt to connect to the scheduler at this address.
    ///
    /// # Errors
    /// Nobody answered in time, or who did is not of this job.
    pub fn dial(address: SocketAddr, key: &JobKey, patience: Duration) -> Result<Link, DialError> {
        let failed = |failure| match failure {
            Attempt::Later(error) => {
                DialError::Unreachable { address: address.to_string(), waited: patience, error }
            }
            Attempt::Handshake(error) => {
                DialError::Handshake { address: address.to_string(), error }
            }
        };
        let stream = dial_once(address, key, Hello::control(), patience).map_err(failed)?;
        Link::new(stream).map_err(|error| failed(Attempt::Later(error)))
    }

    /// What this node is to register as its session.
    #[must_use]
    pub fn session(&self) -> u64 {
        self.session
    }

    /// Where to knock if the scheduler does not answer on this connection.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn door(&self, key: &JobKey) -> io::Result<Door> {
        let address = self.receiver.stream.peer_addr()?;
        let (key, round_trip) = (key.clone(), Duration::ZERO);
        Ok(Door { address, key, session: self.session, round_trip })
    }

    /// Lets the connection count as lost when an outage was far longer than this: the scheduler's
    /// machine has acknowledged nothing for three times as long, in which what was sent was sent
    /// again at least once. Whether the scheduler lives is for its answers to say.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn notice_loss_after(&self, silence: Duration) -> io::Result<()> {
        let milliseconds = u32::try_from(3 * silence.as_millis()).unwrap_or(u32::MAX);
        Ok(rustix::net::sockopt::set_tcp_user_timeout(&self.receiver.stream, milliseconds)?)
    }

    /// The address of this end: how this host is seen from the scheduler's network.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.receiver.stream.local_addr()
    }

    /// See [`LinkSender::send`].
    ///
    /// # Errors
    /// As there.
    pub fn send(&self, message: &NodeMessage) -> Result<(), LinkError> {
        self.sender.send(message)
    }

    /// See [`LinkReceiver::receive`].
    ///
    /// # Errors
    /// As there.
    pub fn receive(&mut self, timeout: Duration) -> Result<Option<SchedulerMessage>, LinkError> {
        self.receiver.receive(timeout)
    }

    /// The halves, for different threads.
    #[must_use]
    pub fn split(self) -> (LinkSender, LinkReceiver) {
        (self.sender, self.receiver)
    }
}

impl LinkError {
    /// What to say of this scheduler: that it died, if its machine says that its process has
    /// ended; else only what is known.
    #[must_use]
    pub fn line(&self, scheduler: &str) -> String {
        match self {
            LinkError::Lost(error) if error.kind() != ErrorKind::ConnectionReset => {
                format!("the connection to {scheduler} was lost: {error}: look at the network")
            }
            LinkError::Closed | LinkError::Lost(_) => format!("the scheduler died: {self}"),
            LinkError::TooSlow | LinkError::Frame(_) => self.to_string(),
        }
    }
}

impl LinkSender {
    /// Sends one message.
    ///
    /// # Errors
    /// The connection is lost, or was just shut down because the scheduler takes nothing.
    pub fn send(&self, message: &NodeMessage) -> Result<(), LinkError> {
        let bytes = encode(message)?;
        // A thread that panicked while it held the lock had sent a whole message or shut the link
        // down.
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        stream.write_all(&bytes).map_err(|error| {
            self.shutdown();
            match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => LinkError::TooSlow,
                _ => lost(error),
            }
        })
    }

    /// Ends the connection in both directions: both halves, and the scheduler, see it closed. What
    /// was sent before still arrives.
    pub fn shutdown(&self) {
        // It fails only where the connection is gone already.
        let _ = self.closer.shutdown(Shutdown::Both);
    }
}

impl LinkReceiver {
    /// Lets [`receive`](Self::receive) return these messages, in order, before any other.
    pub fn put_back(&mut self, messages: Vec<SchedulerMessage>) {
        for message in messages.into_iter().rev() {
            self.unread.push_front(message);
        }
    }

    /// The next message, or `None` if none came in time.
    ///
    /// # Errors
    /// The connection is lost. Messages that came before were returned before.
    pub fn receive(&mut self, timeout: Duration) -> Result<Option<SchedulerMessage>, LinkError> {
        if let Some(message) = self.unread.pop_front() {
            return Ok(Some(message));
        }
        // A timeout beyond a day is no different from a day.
        let until = Instant::now() + timeout.min(Duration::from_secs(86_400));
        loop {
            if let Some(message) = self.inbox.next_message()? {
                return Ok(Some(message));
            }
            if !readable(&self.stream, until).map_err(LinkError::Lost)? {
                return Ok(None);
            }
            let mut bytes = [0; READ_BYTES];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(count) => self.inbox.push(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(lost(error)),
            }
        }
    }
}

fn lost(error: io::Error) -> LinkError {
    match error.kind() {
        ErrorKind::BrokenPipe | ErrorKind::NotConnected => LinkError::Closed,
        _ => LinkError::Lost(error),
    }
}
