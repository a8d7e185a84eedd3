//! A node's connection to the scheduler, as messages.
//!
//! Sending is for any thread, receiving for one. Invariant: a message that was not sent whole is
//! the last: the connection is shut down, so that the scheduler never reads half a message as the
//! start of another.

use super::channel::{Altered, Channel, GREETING_BYTES, Greeting, Opener, Sealer};
use super::dial::{Attempt, broken, dial_once, readable, retry};
use super::frame::{FrameError, Inbox, encode};
use super::job_key::nonce;
use super::{DialError, HandshakeError, Hello, JobKey};
use crate::base::word;
use crate::proto::messages::{NodeMessage, SchedulerMessage};
use crate::trace::log;
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

/// How long the scheduler may take to make room for a message.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the scheduler has to answer a greeting, at least: it proved itself a moment ago.
const GREETING: Duration = Duration::from_secs(1);
/// Bytes read at once.
const READ_BYTES: usize = 64 << 10;

/// Where to knock if the scheduler does not answer on the connection that there is, and as whom.
#[derive(Clone, Debug)]
pub struct Door {
    /// The scheduler's address.
    pub address: SocketAddr,
    /// The job's key.
    pub key: JobKey,
    /// The node's session, as it registered.
    pub session: u64,
    /// A round trip to it, as far as that is known.
    pub round_trip: Duration,
}

/// Why a message did not pass.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The scheduler closed the connection, or it was shut down at this end.
    #[error("the connection to the scheduler was closed: its own log says why")]
    Closed,
    /// It ended within a message.
    #[error(
        "the connection from the scheduler at {from} to {to} ended in the middle of a message: the \
         scheduler died, or something between the two cut it"
    )]
    Truncated {
        /// The scheduler's end.
        from: String,
        /// This one.
        to: String,
    },
    /// What came is not what the scheduler sent.
    #[error(
        "a control message from the scheduler at {from} to {to} does not authenticate: {error}: \
         something between the two meddles with the connection"
    )]
    Altered {
        /// The scheduler's end.
        from: String,
        /// This one.
        to: String,
        /// What can have happened to it.
        error: Altered,
    },
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
pub struct ControlLink {
    sender: LinkSender,
    receiver: LinkReceiver,
    session: u64,
}

/// The sending half. Clones send over the same connection, each message whole.
#[derive(Clone, Debug)]
pub struct LinkSender {
    writer: Arc<Mutex<Writer>>,
    /// The same socket outside of the lock, so that a send that waits can be cut short.
    closer: Arc<Mutex<Arc<TcpStream>>>,
}

/// What one message at a time goes through.
#[derive(Debug)]
struct Writer {
    stream: TcpStream,
    sealer: Sealer,
}

/// The receiving half.
#[derive(Debug)]
pub struct LinkReceiver {
    stream: TcpStream,
    /// Messages that were received before, and not for whoever took them.
    unread: VecDeque<SchedulerMessage>,
    inbox: Inbox,
}

impl ControlLink {
    /// Connects to the scheduler at this host name or address, trying again until the deadline.
    ///
    /// # Errors
    /// The name is not known, nobody listened there by the deadline, or who did is not of this job.
    pub fn connect(
        root_uri: &str,
        root_port: u16,
        key: &JobKey,
        deadline: Duration,
    ) -> Result<ControlLink, DialError> {
        let address = format!("the scheduler at {root_uri}:{root_port}");
        let (stream, channel) = retry(&address, deadline, |left| {
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
                let tries = word(addresses.len() - index);
                let share = left.saturating_sub(start.elapsed()) / tries;
                match dial_and_greet(*address, key, share, GREETING) {
                    Ok(greeted) => return Ok(greeted),
                    Err(error) => failure = error,
                }
            }
            Err(failure)
        })?;
        warn_without_key(key, &stream, &address);
        ControlLink::new(stream, channel).map_err(|error| DialError::Unreachable {
            address,
            waited: Duration::ZERO,
            error,
        })
    }

    fn new(stream: TcpStream, (sealer, opener): Channel) -> io::Result<ControlLink> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        let closer = Arc::new(Mutex::new(Arc::new(stream.try_clone()?)));
        let writer = Writer { stream: stream.try_clone()?, sealer };
        let sender = LinkSender { writer: Arc::new(Mutex::new(writer)), closer };
        let inbox = Inbox::behind(opener);
        let receiver = LinkReceiver { stream, unread: VecDeque::new(), inbox };
        let random = nonce()?;
        let session = random.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        Ok(ControlLink { sender, receiver, session })
    }

    /// One attempt to connect to the scheduler at this address.
    ///
    /// # Errors
    /// Nobody answered in time, or who did is not of this job.
    pub fn dial(
        address: SocketAddr,
        key: &JobKey,
        patience: Duration,
    ) -> Result<ControlLink, DialError> {
        let failed = |failure| match failure {
            Attempt::Later(error) => {
                DialError::Unreachable { address: address.to_string(), waited: patience, error }
            }
            Attempt::Handshake(error) => {
                DialError::Handshake { address: address.to_string(), error }
            }
        };
        let (stream, channel) =
            dial_and_greet(address, key, patience, Duration::ZERO).map_err(failed)?;
        ControlLink::new(stream, channel).map_err(|error| failed(Attempt::Later(error)))
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
        // The kernel takes 49 days at most.
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
            LinkError::Truncated { .. }
            | LinkError::Altered { .. }
            | LinkError::TooSlow
            | LinkError::Frame(_) => self.to_string(),
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
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = writer.sealer.seal(bytes);
        writer.stream.write_all(&bytes).map_err(|error| {
            self.shutdown();
            match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => LinkError::TooSlow,
                _ => lost(error),
            }
        })
    }

    /// Sends over the connection of `other` from now on, as all clones of this one do.
    pub fn replace(&self, other: LinkSender) {
        self.shutdown();
        let socket = other.socket();
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        // Only the one that was handed over is left of `other`.
        if let Ok(new) = Arc::try_unwrap(other.writer) {
            *writer = new.into_inner().unwrap_or_else(PoisonError::into_inner);
            *self.closer.lock().unwrap_or_else(PoisonError::into_inner) = socket;
        }
    }

    fn socket(&self) -> Arc<TcpStream> {
        Arc::clone(&self.closer.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Ends the connection in both directions: both halves, and the scheduler, see it closed. What
    /// was sent before may be lost if the scheduler has said something that nobody has read: see
    /// [`close`](Self::close).
    pub fn shutdown(&self) {
        // It fails only where the connection is gone already.
        let _ = self.socket().shutdown(Shutdown::Both);
    }

    /// Says to the scheduler that nothing more comes. It closes the connection when it has read
    /// that, which the receiver sees.
    pub fn end(&self) {
        let _ = self.socket().shutdown(Shutdown::Write);
    }

    /// Ends the connection when the scheduler has closed it, having read what was sent, or after
    /// `patience`; says whether it has. To be called when nobody receives any more: what comes is
    /// thrown away.
    ///
    /// A socket that is closed over bytes that came and were not read resets its connection, and
    /// what its kernel was still sending is lost with it: the last word of a node, say, that a path
    /// which has just healed has delayed.
    pub fn close(&self, patience: Duration) -> bool {
        self.end();
        let until = Instant::now() + patience;
        let mut bytes = [0; 4096];
        let mut is_closed = false;
        let socket = self.socket();
        while !is_closed && matches!(readable(&socket, until), Ok(true)) {
            let read = (&*socket).read(&mut bytes);
            let goes_on = |error: &io::Error| error.kind() == ErrorKind::Interrupted;
            is_closed = read.map_or_else(|error| !goes_on(&error), |count| count == 0);
        }
        self.shutdown();
        is_closed
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
            match self.inbox.next_message() {
                Ok(None) => {}
                Ok(message) => return Ok(message),
                Err(FrameError::Altered(error)) => {
                    let (from, to) = self.ends();
                    return Err(LinkError::Altered { from, to, error });
                }
                Err(error) => return Err(error.into()),
            }
            if !readable(&self.stream, until).map_err(LinkError::Lost)? {
                return Ok(None);
            }
            let mut bytes = [0; READ_BYTES];
            match self.stream.read(&mut bytes) {
                Ok(0) if self.inbox.is_partial() => {
                    let (from, to) = self.ends();
                    return Err(LinkError::Truncated { from, to });
                }
                Ok(0) => return Err(LinkError::Closed),
                Ok(count) => self.inbox.push(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(lost(error)),
            }
        }
    }
}

impl LinkReceiver {
    /// The scheduler's address and this end's, for messages.
    fn ends(&self) -> (String, String) {
        let name = |address: io::Result<SocketAddr>| {
            address.map_or("an address unknown".to_owned(), |address| address.to_string())
        };
        (name(self.stream.peer_addr()), name(self.stream.local_addr()))
    }
}

/// Says once that nothing protects a connection that leaves this host.
fn warn_without_key(key: &JobKey, stream: &TcpStream, address: &str) {
    static SAID: Once = Once::new();
    let is_local = stream.peer_addr().is_ok_and(|peer| peer.ip().to_canonical().is_loopback());
    if key.is_open() && !is_local {
        SAID.call_once(|| {
            log::warning!(
                "this job has no key: whoever is on the way to {address} can read and change what \
                 passes, and run code in the workers: set BPS_JOB_KEY_FILE on every node"
            );
        });
    }
}

/// One attempt to connect. The scheduler has at least `greeting` to answer the greeting.
fn dial_and_greet(
    address: SocketAddr,
    key: &JobKey,
    patience: Duration,
    greeting: Duration,
) -> Result<(TcpStream, Channel), Attempt> {
    let start = Instant::now();
    let (stream, _) = dial_once(address, key, Hello::control(), patience)?;
    greet(stream, key, patience.saturating_sub(start.elapsed()).max(greeting))
}

/// Opens the channel of a job with a key, over a connection behind its handshake.
fn greet(
    mut stream: TcpStream,
    key: &JobKey,
    left: Duration,
) -> Result<(TcpStream, Channel), Attempt> {
    let Some((greeting, bytes)) = Greeting::new(key) else {
        return Ok((stream, (Sealer::default(), Opener::default())));
    };
    let until = Instant::now() + left;
    stream.write_all(&bytes).map_err(|error| broken(&error))?;
    let mut answer = [0; GREETING_BYTES];
    let mut filled = 0;
    while filled < GREETING_BYTES {
        if !readable(&stream, until).map_err(|error| broken(&error))? {
            return Err(Attempt::Handshake(HandshakeError::TooSlow));
        }
        match stream.read(&mut answer[filled..]) {
            Ok(0) => return Err(Attempt::Handshake(HandshakeError::Closed)),
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(broken(&error)),
        }
    }
    let channel = greeting.finish(&answer);
    let channel = channel.map_err(|Altered| Attempt::Handshake(HandshakeError::Altered))?;
    Ok((stream, channel))
}

fn lost(error: io::Error) -> LinkError {
    match error.kind() {
        ErrorKind::BrokenPipe | ErrorKind::NotConnected => LinkError::Closed,
        _ => LinkError::Lost(error),
    }
}
