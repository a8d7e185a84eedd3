//! The accepting end of connections: one thread that listens, lets peers prove who they are, and
//! hands on the sockets of those that did.
//!
//! A bad peer costs its own connection and at most one log line a second. Whatever peers do, the
//! thread holds at most [`HANDSHAKES_MAX`] unproven connections on each listener, none for longer
//! than [`HANDSHAKE_SECONDS`], and reads no more of each than a handshake has bytes.

use super::dial::timespec;
use super::job_key::nonce;
use crate::limits::{HANDSHAKE_SECONDS, HANDSHAKES_MAX};
use crate::proto::handshake::{ANSWER_BYTES, Accepting, HandshakeError, Hello, JobKey, Step};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long listeners rest when no connection can be accepted for want of descriptors or memory.
const REST: Duration = Duration::from_millis(100);
/// Connections that one listener accepts before the others get their turn.
const ACCEPT_BATCH: usize = 32;
/// When a listener is full, an unproven connection older than this makes room.
const EVICT_AFTER: Duration = Duration::from_secs(1);

/// Where connections come from.
#[derive(Debug)]
pub enum Listener {
    /// A bound, listening TCP socket.
    Tcp(TcpListener),
    /// A bound, listening Unix socket.
    Unix(UnixListener),
}

/// A connection whose peer has proven to be of this job; blocking, and it has carried nothing but
/// the handshake.
#[derive(Debug)]
pub enum Socket {
    /// Over TCP, with small writes sent at once.
    Tcp(TcpStream),
    /// Over a Unix socket.
    Unix(UnixStream),
}

impl From<Socket> for OwnedFd {
    fn from(socket: Socket) -> OwnedFd {
        match socket {
            Socket::Tcp(stream) => stream.into(),
            Socket::Unix(stream) => stream.into(),
        }
    }
}

/// The accepting thread. It ends when this is dropped or [stopped](Acceptor::stop).
#[derive(Debug)]
pub struct Acceptor {
    /// Readable once the thread shall end.
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    /// Starts a thread that accepts on all of these listeners. `admit` gets each proven connection
    /// with the index of its listener; `log` gets a line about peers that were sent away, at most
    /// one a second. Both run on that thread and should return soon.
    ///
    /// # Errors
    /// No descriptor or thread is left.
    pub fn start(
        listeners: Vec<Listener>,
        key: JobKey,
        admit: impl FnMut(usize, Hello, Socket) + Send + 'static,
        log: impl FnMut(&str) + Send + 'static,
    ) -> io::Result<Acceptor> {
        for listener in &listeners {
            match listener {
                Listener::Tcp(listener) => listener.set_nonblocking(true)?,
                Listener::Unix(listener) => listener.set_nonblocking(true)?,
            }
        }
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut door = Door {
            listeners,
            key,
            stop: stop.clone(),
            pending: Vec::new(),
            rest_until: None,
            admit,
            complaints: Complaints { log, quiet_until: None, unsaid: 0 },
        };
        let thread =
            std::thread::Builder::new().name("bps-accept".into()).spawn(move || door.run())?;
        Ok(Acceptor { stop, thread: Some(thread) })
    }

    /// Ends the thread: the listeners and all unproven connections are closed when this returns.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        // It fails only where the counter is full: it is readable then as well.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // A panic of that thread was one of `admit` or `log`, and has been printed.
            let _ = thread.join();
        }
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.end();
    }
}

/// A connection that has not proven itself yet.
struct Pending {
    listener: usize,
    socket: Socket,
    peer: String,
    accepting: Accepting,
    since: Instant,
}

/// What became of a pending connection.
enum Progress {
    Waits,
    Proven(Hello),
    Gone(HandshakeError),
}

struct Door<A, L> {
    listeners: Vec<Listener>,
    key: JobKey,
    stop: Arc<OwnedFd>,
    pending: Vec<Pending>,
    rest_until: Option<Instant>,
    admit: A,
    complaints: Complaints<L>,
}

impl<A: FnMut(usize, Hello, Socket), L: FnMut(&str)> Door<A, L> {
    fn run(&mut self) {
        loop {
            let (stopped, accept, read) = self.wait();
            if stopped {
                return;
            }
            self.advance(&read);
            self.expire();
            for listener in accept {
                self.accept(listener);
            }
        }
    }

    /// Sleeps until there is something to do. Returns whether to stop, the listeners with
    /// connections, and for each pending connection whether it has bytes.
    fn wait(&mut self) -> (bool, Vec<usize>, Vec<bool>) {
        let now = Instant::now();
        if self.rest_until.is_some_and(|until| until <= now) {
            self.rest_until = None;
        }
        let open: Vec<usize> = match self.rest_until {
            Some(_) => Vec::new(),
            None => (0..self.listeners.len()).filter(|index| !self.is_full(*index, now)).collect(),
        };
        let mut fds = Vec::with_capacity(1 + open.len() + self.pending.len());
        fds.push(PollFd::new(&self.stop, PollFlags::IN));
        for index in &open {
            fds.push(PollFd::from_borrowed_fd(listener_fd(&self.listeners[*index]), PollFlags::IN));
        }
        for pending in &self.pending {
            fds.push(PollFd::from_borrowed_fd(socket_fd(&pending.socket), PollFlags::IN));
        }
        let timeout = self.next_deadline().map(|at| timespec(at.saturating_duration_since(now)));
        if let Err(error) = poll(&mut fds, timeout.as_ref())
            && error != Errno::INTR
        {
            // Out of memory for the call itself: nothing is known to be ready.
            drop(fds);
            std::thread::sleep(REST);
            self.complaints.say(&format!("cannot wait for connections: {error}"));
            return (false, Vec::new(), vec![false; self.pending.len()]);
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let (listening, pending) = ready[1..].split_at(open.len());
        let accept = open.into_iter().zip(listening).filter(|(_, ready)| **ready);
        (ready[0], accept.map(|(index, _)| index).collect(), pending.to_vec())
    }

    /// Whether a listener has all the unproven connections that it may have, none of them old
    /// enough to go.
    fn is_full(&self, listener: usize, now: Instant) -> bool {
        let mine = || self.pending.iter().filter(|pending| pending.listener == listener);
        mine().count() >= HANDSHAKES_MAX
            && !mine().any(|pending| now >= pending.since + EVICT_AFTER)
    }

    /// When the next connection has had its time, or is old enough to make room where it is needed.
    fn next_deadline(&self) -> Option<Instant> {
        let now = Instant::now();
        let crowded = self.pending.len() >= HANDSHAKES_MAX;
        let deadlines = self.pending.iter().map(|pending| {
            let evictable = pending.since + EVICT_AFTER;
            if crowded && evictable > now {
                evictable
            } else {
                pending.since + Duration::from_secs(HANDSHAKE_SECONDS)
            }
        });
        deadlines.chain(self.rest_until).min()
    }

    fn accept(&mut self, index: usize) {
        for _ in 0..ACCEPT_BATCH {
            let now = Instant::now();
            if self.is_full(index, now) {
                return;
            }
            match accept_one(&self.listeners[index]) {
                Ok((socket, peer)) => self.admit_pending(index, socket, peer, now),
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => return,
                    ErrorKind::Interrupted | ErrorKind::ConnectionAborted => {}
                    _ => {
                        // Most likely out of descriptors: the connection stays in the backlog, so
                        // to try at once would spin.
                        self.rest_until = Some(now + REST);
                        self.complaints.say(&format!(
                            "cannot accept connections: {error}: raise the limit of open files \
                             (ulimit -n)"
                        ));
                        return;
                    }
                },
            }
        }
    }

    fn admit_pending(&mut self, listener: usize, socket: Socket, peer: String, now: Instant) {
        let mine = self.pending.iter().filter(|pending| pending.listener == listener).count();
        if mine >= HANDSHAKES_MAX
            && let Some(oldest) = self
                .pending
                .iter()
                .enumerate()
                .filter(|(_, pending)| pending.listener == listener)
                .min_by_key(|(_, pending)| pending.since)
                .map(|(at, _)| at)
        {
            let gone = self.pending.swap_remove(oldest);
            self.complaints.send_away(&gone.peer, &HandshakeError::TooSlow);
        }
        match nonce() {
            Ok(nonce) => {
                let accepting = Accepting::new(&self.key, nonce);
                self.pending.push(Pending { listener, socket, peer, accepting, since: now });
            }
            Err(error) => self.complaints.say(&format!("no random bytes for a handshake: {error}")),
        }
    }

    /// Takes what pending connections have sent; `ready` tells which have.
    fn advance(&mut self, ready: &[bool]) {
        // From the end, so that removal does not move what is still to come.
        for at in (0..self.pending.len().min(ready.len())).rev().filter(|at| ready[*at]) {
            match self.pending[at].progress() {
                Progress::Waits => {}
                Progress::Gone(error) => {
                    let gone = self.pending.swap_remove(at);
                    self.complaints.send_away(&gone.peer, &error);
                }
                Progress::Proven(hello) => {
                    let proven = self.pending.swap_remove(at);
                    match set_nonblocking(&proven.socket, false) {
                        Ok(()) => (self.admit)(proven.listener, hello, proven.socket),
                        Err(error) => self.complaints.say(&format!("{}: {error}", proven.peer)),
                    }
                }
            }
        }
    }

    fn expire(&mut self) {
        let now = Instant::now();
        let complaints = &mut self.complaints;
        self.pending.retain(|pending| {
            let keep = now < pending.since + Duration::from_secs(HANDSHAKE_SECONDS);
            if !keep {
                complaints.send_away(&pending.peer, &HandshakeError::TooSlow);
            }
            keep
        });
    }
}

impl Pending {
    fn progress(&mut self) -> Progress {
        let mut bytes = [0; ANSWER_BYTES];
        loop {
            let wanted = self.accepting.wanted();
            let count = match read(&mut self.socket, &mut bytes[..wanted]) {
                Ok(0) => return Progress::Gone(HandshakeError::Closed),
                Ok(count) => count,
                Err(error) => match (error.kind(), error.raw_os_error()) {
                    (ErrorKind::WouldBlock, _) => return Progress::Waits,
                    (ErrorKind::Interrupted, _) => continue,
                    (ErrorKind::ConnectionReset, _) | (_, None) => {
                        return Progress::Gone(HandshakeError::Closed);
                    }
                    (_, Some(errno)) => return Progress::Gone(HandshakeError::Os(errno)),
                },
            };
            match self.accepting.handle_bytes(&bytes[..count]) {
                Ok(Step::Read) => {}
                Ok(Step::Send(answer)) => {
                    // It fits the empty buffer of a new socket; a peer for which it does not is not
                    // waited for.
                    if !matches!(write(&mut self.socket, &answer), Ok(ANSWER_BYTES)) {
                        return Progress::Gone(HandshakeError::Closed);
                    }
                }
                Ok(Step::Reject(answer, error)) => {
                    let _ = write(&mut self.socket, &answer);
                    return Progress::Gone(error);
                }
                Ok(Step::Accepted(hello)) => return Progress::Proven(hello),
                Err(error) => return Progress::Gone(error),
            }
        }
    }
}

/// Log lines about peers, at most one a second.
struct Complaints<L> {
    log: L,
    quiet_until: Option<Instant>,
    unsaid: u64,
}

impl<L: FnMut(&str)> Complaints<L> {
    fn send_away(&mut self, peer: &str, error: &HandshakeError) {
        self.say(&format!("sent a connection from {peer} away: {error}"));
    }

    fn say(&mut self, text: &str) {
        let now = Instant::now();
        if self.quiet_until.is_some_and(|until| now < until) {
            self.unsaid += 1;
            return;
        }
        match std::mem::take(&mut self.unsaid) {
            0 => (self.log)(text),
            unsaid => (self.log)(&format!("{text} (and {unsaid} more like it before)")),
        }
        self.quiet_until = Some(now + Duration::from_secs(1));
    }
}

fn accept_one(listener: &Listener) -> io::Result<(Socket, String)> {
    match listener {
        Listener::Tcp(listener) => {
            let (stream, peer) = listener.accept()?;
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            Ok((Socket::Tcp(stream), peer.to_string()))
        }
        Listener::Unix(listener) => {
            let (stream, _) = listener.accept()?;
            stream.set_nonblocking(true)?;
            Ok((Socket::Unix(stream), "this host".to_owned()))
        }
    }
}

fn set_nonblocking(socket: &Socket, nonblocking: bool) -> io::Result<()> {
    match socket {
        Socket::Tcp(stream) => stream.set_nonblocking(nonblocking),
        Socket::Unix(stream) => stream.set_nonblocking(nonblocking),
    }
}

fn read(socket: &mut Socket, bytes: &mut [u8]) -> io::Result<usize> {
    match socket {
        Socket::Tcp(stream) => stream.read(bytes),
        Socket::Unix(stream) => stream.read(bytes),
    }
}

fn write(socket: &mut Socket, bytes: &[u8]) -> io::Result<usize> {
    match socket {
        Socket::Tcp(stream) => stream.write(bytes),
        Socket::Unix(stream) => stream.write(bytes),
    }
}

fn listener_fd(listener: &Listener) -> BorrowedFd<'_> {
    match listener {
        Listener::Tcp(listener) => listener.as_fd(),
        Listener::Unix(listener) => listener.as_fd(),
    }
}

fn socket_fd(socket: &Socket) -> BorrowedFd<'_> {
    match socket {
        Socket::Tcp(stream) => stream.as_fd(),
        Socket::Unix(stream) => stream.as_fd(),
    }
}
