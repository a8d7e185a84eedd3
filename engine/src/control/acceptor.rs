//! The accepting end of connections: one thread that listens, lets peers prove who they are, and
//! hands on the sockets of those that did.
//!
//! A bad peer costs its own connection and at most one log line a second. Whatever peers do, the
//! thread holds at most [`HANDSHAKES_MAX`] unproven connections, none for longer than
//! [`HANDSHAKE_SECONDS`], and reads no more of each than a handshake has bytes.
//!
//! A crowd of strangers does not keep honest peers out: connections are accepted as they come, and
//! where there are too many, one of whoever has most of them makes room. An honest peer needs one
//! round trip, and tries again if it was unlucky.

use super::dial::timespec;
use super::job_key::nonce;
use crate::limits::{HANDSHAKE_SECONDS, HANDSHAKES_MAX};
use crate::proto::handshake::{
    ANSWER_BYTES, Accepting, HandshakeError, Hello, JobKey, Secrets, Step,
};
use crate::trace::log;
use crate::waits;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv6Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long listeners rest when no connection can be accepted for want of descriptors or memory.
const REST: Duration = Duration::from_millis(100);
/// Connections that one listener accepts before the others get their turn.
const ACCEPT_BATCH: usize = 32;
/// Connections that the kernel keeps for a listener until they are accepted: as many as its default
/// limit (`net.core.somaxconn`) allows. Beyond it, it drops what honest peers send, too.
const BACKLOG: i32 = 4096;

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
    /// with the index of its listener and what it may be encrypted with; `log` gets a line about
    /// peers that were sent away, at most one a second. Both run on that thread and should return
    /// soon.
    ///
    /// # Errors
    /// No descriptor or thread is left.
    pub fn start(
        listeners: Vec<Listener>,
        key: JobKey,
        admit: impl FnMut(usize, Hello, Socket, Secrets) + Send + 'static,
        log: impl FnMut(&str) + Send + 'static,
    ) -> io::Result<Acceptor> {
        for listener in &listeners {
            match listener {
                Listener::Tcp(listener) => listener.set_nonblocking(true)?,
                Listener::Unix(listener) => listener.set_nonblocking(true)?,
            }
            // Called again, listen(2) only changes the backlog.
            rustix::net::listen(listener_fd(listener), BACKLOG)?;
        }
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut door = Door {
            listeners,
            key,
            stop: stop.clone(),
            pending: Vec::new(),
            origins: HashMap::new(),
            rest_until: None,
            admit,
            complaints: Complaints { log, quiet_until: None, unsaid: 0 },
        };
        let thread =
            std::thread::Builder::new().name("bps-accept".into()).spawn(move || door.run())?;
        Ok(Acceptor { stop, thread: Some(thread) })
    }

    /// Ends the thread: the listeners and all unproven connections are closed when this returns,
    /// unless the kernel holds the thread for longer than [`PATIENCE`](waits::PATIENCE).
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        // It fails only where the counter is full: it is readable then as well.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        // It never blocks but in `admit`, which sets lanes up on other threads and hands them over
        // within a deadline. A panic of it was one of `admit` or `log`, and was printed.
        if let Some(Err(late)) = self.thread.take().map(waits::join) {
            log::warning!("{late}");
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
    origin: Origin,
    socket: Socket,
    peer: String,
    accepting: Accepting,
    since: Instant,
    /// It has sent a whole hello.
    spoke: bool,
}

/// Who shares the room for unproven connections fairly: the listeners, and the peers' addresses.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Origin {
    listener: usize,
    /// Of IPv6 the network alone: one machine has all addresses of a /64.
    address: Option<IpAddr>,
}

/// What became of a pending connection.
enum Progress {
    Waits,
    Proven(Hello, Secrets),
    Gone(HandshakeError),
}

struct Door<A, L> {
    listeners: Vec<Listener>,
    key: JobKey,
    stop: Arc<OwnedFd>,
    pending: Vec<Pending>,
    /// How many of them each origin has.
    origins: HashMap<Origin, usize>,
    rest_until: Option<Instant>,
    admit: A,
    complaints: Complaints<L>,
}

impl<A: FnMut(usize, Hello, Socket, Secrets), L: FnMut(&str)> Door<A, L> {
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
            None => (0..self.listeners.len()).collect(),
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

    /// When the next connection has had its time.
    fn next_deadline(&self) -> Option<Instant> {
        let limit = Duration::from_secs(HANDSHAKE_SECONDS);
        let deadlines = self.pending.iter().map(|pending| pending.since + limit);
        deadlines.chain(self.rest_until).min()
    }

    fn accept(&mut self, listener: usize) {
        for _ in 0..ACCEPT_BATCH {
            match accept_one(&self.listeners[listener]) {
                Ok((socket, peer)) => self.admit_pending(listener, socket, peer),
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => return,
                    ErrorKind::Interrupted | ErrorKind::ConnectionAborted => {}
                    _ => {
                        self.complaints.say(&format!(
                            "cannot accept connections: {error}: raise the limit of open files \
                             (ulimit -n)"
                        ));
                        // Most likely out of descriptors: strangers must not hold the last ones.
                        // Without any, the connection stays in the backlog, so to try at once
                        // would spin.
                        if !self.evict() {
                            self.rest_until = Some(Instant::now() + REST);
                            return;
                        }
                    }
                },
            }
        }
    }

    fn admit_pending(&mut self, listener: usize, socket: Socket, peer: Caller) {
        if self.pending.len() >= HANDSHAKES_MAX {
            self.evict();
        }
        let accepting = match nonce() {
            Ok(nonce) => Accepting::new(&self.key, nonce),
            Err(error) => {
                return self.complaints.say(&format!("no random bytes for a handshake: {error}"));
            }
        };
        let origin = Origin { listener, address: peer.address };
        *self.origins.entry(origin).or_default() += 1;
        let (peer, since) = (peer.name, Instant::now());
        self.pending.push(Pending { origin, socket, peer, accepting, since, spoke: false });
        // An honest peer's hello is there already.
        self.step(self.pending.len() - 1);
    }

    /// Closes an unproven connection to make room: one of whoever has most of them, and of those
    /// one that has said nothing, if there is such a one. Says whether there was any.
    fn evict(&mut self) -> bool {
        let most = self.origins.iter().max_by_key(|(_, count)| **count);
        let Some(origin) = most.map(|(origin, _)| *origin) else { return false };
        // By chance, so that no peer can arrange to be spared. Without random bytes nobody is
        // admitted anyway.
        let first = getrandom::u32().unwrap_or(0) as usize % self.pending.len();
        let order = (first..self.pending.len()).chain(0..first);
        let mut theirs = order.filter(|at| self.pending[*at].origin == origin);
        let any = theirs.next();
        let silent = any.into_iter().chain(theirs).find(|at| !self.pending[*at].spoke);
        let Some(at) = silent.or(any) else { return false };
        let gone = self.remove(at);
        self.complaints.say(&format!(
            "closed a connection from {} that had proven nothing, to make room for others",
            gone.peer
        ));
        true
    }

    fn remove(&mut self, at: usize) -> Pending {
        let gone = self.pending.swap_remove(at);
        if let Some(count) = self.origins.get_mut(&gone.origin) {
            *count -= 1;
            if *count == 0 {
                self.origins.remove(&gone.origin);
            }
        }
        gone
    }

    /// Takes what pending connections have sent; `ready` tells which have.
    fn advance(&mut self, ready: &[bool]) {
        // From the end, so that removal does not move what is still to come.
        for at in (0..self.pending.len().min(ready.len())).rev().filter(|at| ready[*at]) {
            self.step(at);
        }
    }

    /// Takes what one pending connection has sent.
    fn step(&mut self, at: usize) {
        match self.pending[at].progress() {
            Progress::Waits => {}
            Progress::Gone(error) => {
                let gone = self.remove(at);
                self.complaints.send_away(&gone.peer, &error);
            }
            Progress::Proven(hello, secrets) => {
                let proven = self.remove(at);
                match set_nonblocking(&proven.socket, false) {
                    Ok(()) => (self.admit)(proven.origin.listener, hello, proven.socket, secrets),
                    Err(error) => self.complaints.say(&format!("{}: {error}", proven.peer)),
                }
            }
        }
    }

    fn expire(&mut self) {
        let (now, limit) = (Instant::now(), Duration::from_secs(HANDSHAKE_SECONDS));
        for at in (0..self.pending.len()).rev() {
            if now >= self.pending[at].since + limit {
                let gone = self.remove(at);
                self.complaints.send_away(&gone.peer, &HandshakeError::TooSlow);
            }
        }
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
                    self.spoke = true;
                }
                Ok(Step::Reject(answer, error)) => {
                    let _ = write(&mut self.socket, &answer);
                    return Progress::Gone(error);
                }
                Ok(Step::Accepted(hello)) => {
                    return Progress::Proven(hello, self.accepting.secrets());
                }
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

/// Where a connection comes from, for messages and for fairness.
struct Caller {
    name: String,
    address: Option<IpAddr>,
}

fn accept_one(listener: &Listener) -> io::Result<(Socket, Caller)> {
    match listener {
        Listener::Tcp(listener) => {
            let (stream, peer) = listener.accept()?;
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            let address = Some(network_of(peer.ip()));
            Ok((Socket::Tcp(stream), Caller { name: peer.to_string(), address }))
        }
        Listener::Unix(listener) => {
            let (stream, _) = listener.accept()?;
            stream.set_nonblocking(true)?;
            Ok((Socket::Unix(stream), Caller { name: "this host".to_owned(), address: None }))
        }
    }
}

/// An IPv4 address as it is, the first 64 bits of another.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64)),
        v4 @ IpAddr::V4(_) => v4,
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
