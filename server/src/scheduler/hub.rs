//! All connections of a scheduler, in one poll loop around its machine.

#[cfg(test)]
mod tests;

use super::Stop;
use bps_engine::control::{Connection as Channel, JobKey};
use bps_engine::limits::{CONTROL_BYTES_MAX, RANKS_MAX, SERVERS_MAX};
use bps_engine::proto::messages::{ClockAnswer, NodeMessage, SchedulerMessage};
use bps_engine::proto::scheduler::{Exit, JobView, NodeId, Output, Scheduler};
use bps_engine::proto::tuning::Point;
use bps_engine::trace::{clock, log};
use bps_engine::transport::Waker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{BTreeMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

/// How often the machine is told the time.
const TICK: Duration = Duration::from_millis(100);
/// How long a closing connection may take to read what it was sent.
const LINGER: Duration = Duration::from_secs(2);
/// How long nodes that come later are told why their job was not formed: the nodes of a job are
/// started together, but some take longer to load their program, though no longer than a job may
/// take to form. Once as many have been told as the job has nodes, the shorter time is enough.
const LATECOMERS: Duration = Duration::from_secs(10);
const STRAGGLERS: Duration = Duration::from_secs(3);
/// Bytes read of one connection before the others get their turn.
const READ_TURN_BYTES: usize = 1 << 20;
/// Such turns of a connection that can't be written to any more.
const LAST_TURNS: usize = 64;
/// Bytes that may wait for one node to read them.
const BACKLOG_BYTES_MAX: usize = 2 * CONTROL_BYTES_MAX;
/// Connections at once: two of every node of the largest job, since those that were not heard for a
/// while come by a second one, and some that are on their way out.
const CONNECTIONS_MAX: usize = 2 * (RANKS_MAX + SERVERS_MAX) + 256;

/// Somebody who wants to see the job.
pub(super) type Viewer = SyncSender<JobView>;

/// The loop's state.
pub(super) struct Hub {
    machine: Scheduler,
    key: JobKey,
    start: Instant,
    ticked: Instant,
    waker: Waker,
    arrivals: Receiver<TcpStream>,
    viewers: Receiver<Viewer>,
    connections: BTreeMap<NodeId, Connection>,
    next: u64,
    exit: Option<Exit>,
    /// What nodes are told with the time.
    to_unix_ns: u64,
    domain: String,
    /// Where the settings go that the job finds.
    tune_file: Option<PathBuf>,
}

struct Connection {
    stream: TcpStream,
    channel: Channel,
    backlog: VecDeque<Vec<u8>>,
    /// Bytes of the first message in the backlog that have been sent.
    sent: usize,
    backlog_bytes: usize,
    /// When the machine wanted it closed. From then on only what was queued goes out.
    closing: Option<Instant>,
    /// The sending direction has been shut down.
    finished: bool,
}

/// What is left to do with a connection.
enum Fate {
    Stays,
    /// It is over; the words complete "rank 3 died: …".
    Gone(String),
}

impl Hub {
    pub(super) fn new(
        machine: impl FnOnce(Duration) -> Scheduler,
        key: JobKey,
        waker: Waker,
        arrivals: Receiver<TcpStream>,
        viewers: Receiver<Viewer>,
    ) -> Hub {
        let start = Instant::now();
        Hub {
            machine: machine(Duration::ZERO),
            key,
            start,
            ticked: start,
            waker,
            arrivals,
            viewers,
            connections: BTreeMap::new(),
            next: 0,
            exit: None,
            to_unix_ns: clock::to_unix_ns(),
            domain: clock::domain(),
            tune_file: None,
        }
    }

    /// Settings that the job finds are written to this file.
    pub(super) fn with_tune_file(self, tune_file: Option<PathBuf>) -> Hub {
        Hub { tune_file, ..self }
    }

    /// Runs until the job is over and its nodes have been told; they have `start_timeout` to come.
    pub(super) fn run(mut self, stop: &Stop, start_timeout: Duration) -> Exit {
        let mut told = None;
        let latecomers = LATECOMERS.min(start_timeout);
        loop {
            let ready = self.wait();
            self.welcome();
            self.show();
            self.serve(&ready);
            // After the reading, so that a heartbeat that waited in a socket is never counted as
            // missing.
            if self.ticked.elapsed() >= TICK {
                self.ticked = Instant::now();
                self.machine.handle_tick(self.now());
            }
            if stop.is_last() {
                self.machine.handle_last_generation();
            }
            if let Some(cause) = stop.cause()
                && self.exit.is_none()
            {
                self.machine.handle_stop(&format!("it was stopped by {cause}"));
            }
            self.carry_out();
            self.flush();
            if let Some(exit) = self.exit {
                let since = *told.get_or_insert_with(Instant::now);
                let is_heard = match exit {
                    Exit::NotFormed if stop.cause().is_none() => {
                        let all = self.machine.has_told_everybody();
                        since.elapsed() >= if all { STRAGGLERS } else { latecomers }
                    }
                    // Ranks of an elastic job may be between two connections.
                    Exit::Failed if self.machine.refuses() && stop.cause().is_none() => {
                        let all = self.machine.has_told_everybody();
                        since.elapsed() >= if all { LINGER } else { LATECOMERS }
                    }
                    _ => self.connections.is_empty() || since.elapsed() >= LINGER,
                };
                if is_heard {
                    return exit;
                }
            }
        }
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Sleeps until something can be done. Returns the connections that can be read.
    fn wait(&self) -> Vec<NodeId> {
        let mut fds = Vec::with_capacity(1 + self.connections.len());
        fds.push(PollFd::from_borrowed_fd(self.waker.fd(), PollFlags::IN));
        for connection in self.connections.values() {
            let mut flags = PollFlags::IN;
            if !connection.backlog.is_empty() {
                flags |= PollFlags::OUT;
            }
            fds.push(PollFd::new(&connection.stream, flags));
        }
        let left = TICK.saturating_sub(self.ticked.elapsed());
        let timeout = Timespec { tv_sec: 0, tv_nsec: left.subsec_nanos().into() };
        // Interrupted by a signal, or out of memory for the call: the next turn comes at once or at
        // the tick.
        if let Err(error) = poll(&mut fds, Some(&timeout))
            && error != rustix::io::Errno::INTR
        {
            std::thread::sleep(left);
        }
        let readable = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
        self.connections
            .keys()
            .zip(&fds[1..])
            .filter(|(_, fd)| fd.revents().intersects(readable))
            .map(|(node, _)| *node)
            .collect()
    }

    /// Takes connections from the accepting thread.
    fn welcome(&mut self) {
        self.waker.awake();
        while let Ok(stream) = self.arrivals.try_recv() {
            if self.connections.len() >= CONNECTIONS_MAX {
                log::warning!("over {CONNECTIONS_MAX} connections: the newest is closed");
                continue;
            }
            if let Err(error) = stream.set_nonblocking(true) {
                log::warning!("a connection cannot be used: {error}");
                continue;
            }
            let node = NodeId(self.next);
            self.next += 1;
            self.connections.insert(node, Connection::new(stream, &self.key));
            self.machine.handle_connected(node, self.start.elapsed());
        }
    }

    fn show(&self) {
        while let Ok(viewer) = self.viewers.try_recv() {
            // A viewer that no longer waits has no use for it.
            let _ = viewer.try_send(self.machine.view(self.now()));
        }
    }

    /// Reads what has come in, and lets the machine answer.
    fn serve(&mut self, ready: &[NodeId]) {
        for node in ready {
            self.hear(*node);
        }
        self.machine.handle_heard(self.now());
    }

    /// Reads what one node has sent, up to a turn. False if that was the last of it.
    fn hear(&mut self, node: NodeId) -> bool {
        let Some(connection) = self.connections.get_mut(&node) else { return false };
        let closing = connection.closing.is_some();
        let mut messages = Vec::new();
        let fate = connection.read(&mut messages);
        if !closing {
            for message in messages {
                if let NodeMessage::Clock { sent_ns } = message {
                    self.tell_time(node, sent_ns);
                    continue;
                }
                self.machine.handle_message(node, message, self.start.elapsed());
            }
        }
        let is_gone = if let Fate::Gone(how) = fate {
            self.give_up(node, &how);
            true
        } else {
            false
        };
        self.carry_out();
        !is_gone
    }

    /// The machine has no clock of its own, so its program answers; a late answer only widens the
    /// bound that the node computes.
    fn tell_time(&mut self, node: NodeId, sent_ns: u64) {
        let (to_unix_ns, domain) = (self.to_unix_ns, self.domain.clone());
        let answer = ClockAnswer { sent_ns, now_ns: clock::now_ns(), to_unix_ns, domain };
        self.send(node, &SchedulerMessage::Clock(answer));
    }

    /// Does what the machine says.
    fn carry_out(&mut self) {
        while let Some(output) = self.machine.poll_output() {
            match output {
                Output::Log(line) => log::info!("{line}"),
                Output::Tuned(point) => self.write_down(point),
                Output::Done(exit) => self.exit = Some(exit),
                Output::Close(node) => {
                    if let Some(connection) = self.connections.get_mut(&node) {
                        connection.closing = Some(Instant::now());
                    }
                }
                Output::Send(node, message) => self.send(node, &message),
            }
        }
    }

    /// Leaves what the job has found to the next one.
    fn write_down(&self, point: Point) {
        let Some(path) = &self.tune_file else { return };
        let lines = point.to_string().replace(' ', "\n") + "\n";
        if let Err(error) = std::fs::write(path, lines) {
            // The job has the settings all the same.
            log::warning!(
                "BPS_TUNE_FILE={}: {point} can't be written: {error}: name a file that this user \
                 may write",
                path.display()
            );
        }
    }

    fn send(&mut self, node: NodeId, message: &SchedulerMessage) {
        let Some(connection) = self.connections.get_mut(&node) else { return };
        let bytes = match connection.channel.encode(message) {
            Ok(bytes) => bytes,
            Err(error) => {
                return self.give_up(node, &format!("it could not be answered: {error}"));
            }
        };
        connection.queue(bytes);
        if connection.backlog_bytes > BACKLOG_BYTES_MAX {
            self.give_up(node, "it does not read what it is sent");
        }
    }

    fn give_up(&mut self, node: NodeId, how: &str) {
        self.connections.remove(&node);
        self.machine.handle_closed(node, how, self.start.elapsed());
    }

    /// Writes what can be written, and drops connections that are done.
    fn flush(&mut self) {
        let mut gone = Vec::new();
        for (node, connection) in &mut self.connections {
            if let Fate::Gone(how) = connection.write() {
                gone.push((*node, how));
            }
        }
        for (node, how) in gone {
            // It may have said good-bye before it closed the connection that can't be written to.
            for _ in 0..LAST_TURNS {
                if !self.hear(node) {
                    break;
                }
            }
            self.give_up(node, &how);
        }
        self.carry_out();
    }
}

impl Connection {
    fn new(stream: TcpStream, key: &JobKey) -> Connection {
        Connection {
            stream,
            channel: Channel::accept(key),
            backlog: VecDeque::new(),
            sent: 0,
            backlog_bytes: 0,
            closing: None,
            finished: false,
        }
    }

    /// Reads what is there, up to a turn. Whole messages are handed out even where the connection
    /// ends.
    fn read(&mut self, messages: &mut Vec<NodeMessage>) -> Fate {
        let mut bytes = [0; 64 << 10];
        let mut turn = 0;
        let fate = loop {
            match self.stream.read(&mut bytes) {
                Ok(0) if self.channel.is_partial() => {
                    break Fate::Gone(format!("{} ended within a message", self.name()));
                }
                Ok(0) => break Fate::Gone("its connection was closed".to_owned()),
                Ok(count) => {
                    match self.channel.push(&bytes[..count]) {
                        Ok(answer) => self.queue(answer),
                        Err(error) => break Fate::Gone(format!("on {}, {error}", self.name())),
                    }
                    turn += count;
                    if turn >= READ_TURN_BYTES {
                        break Fate::Stays;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break Fate::Stays,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break Fate::Gone(format!("its connection was lost: {error}")),
            }
        };
        loop {
            match self.channel.next_message() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => return fate,
                Err(error) => return Fate::Gone(format!("on {}, {error}", self.name())),
            }
        }
    }

    fn queue(&mut self, bytes: Vec<u8>) {
        if !bytes.is_empty() {
            self.backlog_bytes += bytes.len();
            self.backlog.push_back(bytes);
        }
    }

    /// Its two ends, for messages.
    fn name(&self) -> String {
        let name = |address: std::io::Result<std::net::SocketAddr>| {
            address.map_or("an address unknown".to_owned(), |address| address.to_string())
        };
        let (from, to) = (name(self.stream.peer_addr()), name(self.stream.local_addr()));
        format!("the connection from {from} to {to}")
    }

    fn write(&mut self) -> Fate {
        while let Some(first) = self.backlog.front() {
            match self.stream.write(&first[self.sent..]) {
                Ok(count) => {
                    self.sent += count;
                    self.backlog_bytes -= count;
                    if self.sent == first.len() {
                        self.backlog.pop_front();
                        self.sent = 0;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Fate::Gone(format!("its connection was lost: {error}")),
            }
        }
        let Some(since) = self.closing else { return Fate::Stays };
        if self.backlog.is_empty() && self.channel.is_settled() && !self.finished {
            // Not closed at once: unread bytes of the peer would turn that into a reset, which may
            // overtake the last message.
            self.finished = true;
            let _ = self.stream.shutdown(Shutdown::Write);
        }
        if since.elapsed() >= LINGER {
            return Fate::Gone("it did not close its connection".to_owned());
        }
        Fate::Stays
    }
}
