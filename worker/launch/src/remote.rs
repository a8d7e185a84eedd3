//! The agents of a job's machines, and the processes of all of them as one crew.
//!
//! Each agent is a child of the launcher, or an ssh client that leads to it. An agent that is lost
//! takes its processes with it: it ends them when it can't be told anything any more, and here they
//! count as ended.

#![forbid(unsafe_code)]

mod recruit;

pub(super) use recruit::Recruiting;

use super::child::{Guardian, reap, spawn_connection};
use super::crew::{Crew, Ended, Slot};
use super::error::LaunchError;
use super::frames::{Decoder, Encode, Hello, Order, Report};
use super::hosts::Host;
use super::layout::Site;
use super::output::say;
use super::plan::Environment;
use super::screen::Screen;
use super::signals::{Signals, set_nonblocking};
use super::ssh;
use super::streams::{READ_BYTES, Source, Target};
use bps_engine::base::word;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process_group};
use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

/// The code of a process whose machine was lost: ssh's own for that.
const LOST: i32 = 255;
/// Longest silence of an agent, which says something every 15 s.
const SILENCE: Duration = Duration::from_secs(60);
/// For the agents to end what is left, to hand on the last output and to leave.
const FINISH: Duration = Duration::from_secs(8);
/// Bytes of what a machine says before its agent does, of which the last are kept.
const SAID_BYTES: usize = 4 << 10;
/// How long the end of a connection's process may take once its output has closed.
const REAP: Duration = Duration::from_secs(2);

/// A connection to an agent.
pub(super) struct Connection {
    site: Site,
    program: String,
    child: Child,
    is_reaped: bool,
    input: Option<File>,
    /// What has not been written to it yet.
    outbox: Vec<u8>,
    output: Option<File>,
    errors: Option<File>,
    decoder: Decoder,
    /// The end of what came on standard error before the agent did.
    said: Vec<u8>,
    /// What the agent is.
    pub(super) hello: Option<Hello>,
    /// Whether it reached the address that it was asked to.
    pub(super) probed: Option<bool>,
    /// Whether its processes have started.
    pub(super) has_started: bool,
    /// Why it can't be used, with the code to leave with.
    failure: Option<(i32, String)>,
    heard_at: Instant,
    /// Whoever wanted to start a rank there knows why that failed.
    is_told: bool,
    /// The places in the plan of its processes, and whether they have ended.
    processes: Vec<(usize, bool)>,
    /// What the machine says besides is shown by this number.
    shown: usize,
}

/// All agents, and what they have told.
pub(super) struct RemoteCrew {
    connections: Vec<Connection>,
    /// For each process of the plan: its connection, and its number there.
    places: Vec<(usize, u32)>,
    /// By which numbers these are shown.
    shown: Vec<usize>,
    ends: Vec<Ended>,
    screen: Option<Screen>,
    guardian: Guardian,
    buffer: Vec<u8>,
    recruiting: Option<Recruiting>,
}

impl RemoteCrew {
    /// Starts a connection to each site, by these words.
    pub(super) fn connect(
        sites: &[Site],
        commands: &[Vec<OsString>],
        environment: &Environment,
    ) -> Result<RemoteCrew, LaunchError> {
        let failed = |source| LaunchError::System { what: "cannot start the guardian", source };
        let guardian = Guardian::start().map_err(failed)?;
        let mut connections = Vec::new();
        for (site, words) in sites.iter().zip(commands) {
            connections.push(Connection::open(site, words, environment, &guardian)?);
        }
        Ok(RemoteCrew {
            connections,
            places: Vec::new(),
            shown: Vec::new(),
            ends: Vec::new(),
            screen: None,
            guardian,
            buffer: vec![0; READ_BYTES],
            recruiting: None,
        })
    }

    pub(super) fn connections(&self) -> &[Connection] {
        &self.connections
    }

    /// Says which processes there are: for each, in the order of the plan, its connection and its
    /// label. The processes of a connection are in the order of its instruction.
    pub(super) fn expect(&mut self, processes: &[(usize, String)], prefix: bool) {
        for (place, (index, _)) in processes.iter().enumerate() {
            let connection = &mut self.connections[*index];
            self.places.push((*index, word(connection.processes.len())));
            connection.processes.push((place, false));
        }
        let labels = processes.iter().map(|(_, label)| label.as_str());
        let mut screen = Screen::new(labels, prefix);
        self.shown = (0..processes.len()).collect();
        for connection in &mut self.connections {
            connection.shown = screen.add(&connection.site.host.name);
        }
        self.screen = Some(screen);
        for index in 0..self.connections.len() {
            let said = std::mem::take(&mut self.connections[index].said);
            self.show_errors(index, &said);
        }
    }

    /// Sends an order.
    pub(super) fn order(&mut self, connection: usize, order: &Order) {
        let connection = &mut self.connections[connection];
        order.encode(&mut connection.outbox);
        connection.flush();
    }

    /// Waits until all connections are so far; `None` if a signal came first, which is returned
    /// as it is. Machines that have failed, or are late, are an error that names them.
    pub(super) fn wait_for(
        &mut self,
        signals: &mut Signals,
        timeout: Duration,
        is_so_far: impl Fn(&Connection) -> bool,
    ) -> Result<Option<i32>, LaunchError> {
        let begun = Instant::now();
        loop {
            self.refuse_failed()?;
            if self.connections.iter().all(&is_so_far) {
                return Ok(None);
            }
            let left = timeout.saturating_sub(begun.elapsed());
            if left.is_zero() {
                let late = self.connections.iter().filter(|connection| !is_so_far(connection));
                let late = late.map(|connection| {
                    let why = ssh::too_late(timeout, &connection.text_said());
                    format!("{}: {why}", connection.site.host.name)
                });
                return Err(LaunchError::Hosts { whys: late.collect(), code: 1 });
            }
            self.turn(Some(signals), left);
            if let Some(signal) = signals.take().first() {
                return Ok(Some(*signal));
            }
        }
    }

    fn refuse_failed(&self) -> Result<(), LaunchError> {
        let failed = self.connections.iter().filter_map(|connection| {
            let (code, why) = connection.failure.as_ref()?;
            Some((*code, format!("{}: {why}", connection.site.host.name)))
        });
        let (codes, whys): (Vec<i32>, Vec<String>) = failed.unzip();
        match codes.first() {
            Some(&code) => Err(LaunchError::Hosts { whys, code }),
            None => Ok(()),
        }
    }

    /// Sleeps until something comes, reads it, and writes what can be written.
    fn turn(&mut self, signals: Option<&Signals>, timeout: Duration) {
        let mut polled: Vec<PollFd<'_>> = Vec::new();
        let read = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        polled.extend(signals.into_iter().flat_map(Signals::descriptors).map(read));
        for connection in &self.connections {
            let pipes = connection.output.iter().chain(&connection.errors);
            polled.extend(pipes.map(|pipe| read(pipe.as_fd())));
            let input = connection.input.as_ref().filter(|_| !connection.outbox.is_empty());
            polled.extend(input.map(|pipe| PollFd::new(pipe, PollFlags::OUT)));
        }
        // Interrupted or not: everything is looked at again.
        let _ = poll(&mut polled, Timespec::try_from(timeout).ok().as_ref());
        drop(polled);
        for index in 0..self.connections.len() {
            self.connections[index].flush();
            self.read_errors(index);
            self.read_output(index);
            self.look_after(index);
        }
    }

    fn read_errors(&mut self, index: usize) {
        let connection = &mut self.connections[index];
        match read(&mut connection.errors, &mut self.buffer) {
            0 => {}
            count => {
                let bytes = self.buffer[..count].to_vec();
                if self.screen.is_none() {
                    connection.remember(&bytes);
                }
                self.show_errors(index, &bytes);
            }
        }
    }

    /// What a machine says that is not from a process of the job.
    fn show_errors(&mut self, index: usize, bytes: &[u8]) {
        if let Some(screen) = self.screen.as_mut().filter(|_| !bytes.is_empty()) {
            let process = self.connections[index].shown;
            screen.show(Source { process, target: Target::Error }, Some(bytes));
        }
    }

    fn read_output(&mut self, index: usize) {
        let connection = &mut self.connections[index];
        let count = read(&mut connection.output, &mut self.buffer);
        if count == 0 {
            return;
        }
        connection.heard_at = Instant::now();
        connection.decoder.push(&self.buffer[..count]);
        loop {
            match self.connections[index].decoder.next() {
                Ok(Some(report)) => self.take(index, report),
                Ok(None) => return,
                Err(error) => {
                    self.connections[index]
                        .fail(LOST, format!("it sent what is no report: {error}"));
                    return;
                }
            }
        }
    }

    fn take(&mut self, index: usize, report: Report) {
        let connection = &mut self.connections[index];
        let place = |process: u32| connection.processes.get(process as usize).map(|it| it.0);
        match report {
            Report::Hello(hello) => connection.hello = Some(hello),
            Report::Probed(reached) => connection.probed = Some(reached),
            Report::Note(text) => say(&format!("{}: {text}", connection.site.host.name)),
            Report::Refused { code, why } => {
                connection.fail(i32::try_from(code).unwrap_or(1), why);
            }
            Report::Started => connection.has_started = true,
            Report::Output { process, target, bytes } => {
                let target = if target == 0 { Target::Output } else { Target::Error };
                if let (Some(process), Some(screen)) = (place(process), self.screen.as_mut()) {
                    let bytes = (!bytes.is_empty()).then_some(bytes.as_slice());
                    screen.show(Source { process: self.shown[process], target }, bytes);
                }
            }
            Report::Ended { process, code, how } => {
                let known = connection.processes.get_mut(process as usize);
                if let Some((place, ended @ false)) = known {
                    *ended = true;
                    let code = i32::try_from(code).unwrap_or(1);
                    self.ends.push(Ended { process: *place, code, how });
                }
            }
            Report::Alive => {}
        }
    }

    /// Finds out whether an agent is gone, and with it its processes.
    fn look_after(&mut self, index: usize) {
        let connection = &mut self.connections[index];
        if connection.failure.is_none() {
            if connection.output.is_none() {
                let code = connection.reap().and_then(|status| status.code());
                let said = connection.text_said();
                let why = match &connection.hello {
                    None => ssh::why_not(&connection.site, &connection.program, code, &said),
                    Some(_) => ssh::why_lost(&connection.site, code, &said),
                };
                connection.fail(if connection.hello.is_none() { 1 } else { LOST }, why);
            } else if connection.hello.is_some() && connection.heard_at.elapsed() > SILENCE {
                let seconds = SILENCE.as_secs();
                connection.fail(LOST, format!("nothing was heard from it for {seconds} s"));
            }
        }
        let Some((_, why)) = &connection.failure else { return };
        let host = &connection.site.host.name;
        for (place, ended) in connection.processes.iter_mut().filter(|(_, ended)| !ended) {
            *ended = true;
            let how = format!("was lost with {host}: {why}");
            self.ends.push(Ended { process: *place, code: LOST, how });
        }
    }

    /// Lets every agent end what is left and leave, passes on the last output, and says which
    /// machines could not be told.
    pub(super) fn finish(mut self) {
        // An agent that has not been heard of, or not for long, will not answer now: without its
        // connection it ends by itself.
        for connection in &self.connections {
            if connection.hello.is_none() || connection.failure.is_some() {
                connection.kill();
            }
        }
        let deadline = Instant::now() + FINISH;
        while self.connections.iter().any(|it| it.output.is_some()) && Instant::now() < deadline {
            for connection in &mut self.connections {
                // The end of its input is the order to end.
                if connection.outbox.is_empty() || connection.failure.is_some() {
                    connection.input = None;
                }
            }
            self.turn(None, deadline.saturating_duration_since(Instant::now()));
        }
        for connection in self.connections.iter().filter(|it| it.output.is_some()) {
            let host = &connection.site.host.name;
            say(&format!("{host} did not end in time; see whether processes are left there"));
        }
        for index in 0..self.connections.len() {
            self.show_last(index);
        }
        self.connections.iter().for_each(Connection::kill);
        self.guardian.finish();
        let connections = self.connections.iter_mut();
        if let Some(held) = reap(connections.map(|connection| &mut connection.child)) {
            say(&held);
        }
    }

    /// What is left of lines that have not ended.
    fn show_last(&mut self, index: usize) {
        let Some(screen) = &mut self.screen else { return };
        let connection = &self.connections[index];
        let processes = connection.processes.iter().map(|(place, _)| self.shown[*place]);
        for process in processes.chain([connection.shown]) {
            for target in [Target::Output, Target::Error] {
                screen.show(Source { process, target }, None);
            }
        }
    }
}

impl Crew for RemoteCrew {
    fn sleep(&mut self, signals: &Signals, timeout: Duration) {
        // What was told while all waited for something else is not slept on.
        let timeout = if self.ends.is_empty() { timeout } else { Duration::ZERO };
        self.turn(Some(signals), timeout);
    }

    fn attend(&mut self) -> Vec<Ended> {
        std::mem::take(&mut self.ends)
    }

    fn signal(&mut self, process: usize, signal: Signal) {
        let (connection, process) = self.places[process];
        let signal = signal.as_raw().unsigned_abs();
        self.order(connection, &Order::Signal { process, signal });
    }

    fn tell_the_end(&mut self, process: usize) {
        let (connection, process) = self.places[process];
        self.order(connection, &Order::TellTheEnd { process });
    }

    fn enlist(&mut self, slot: &Slot) -> Result<Option<usize>, String> {
        self.recruit(slot)
    }

    fn release(&mut self, host: &Host) {
        self.let_go(host);
    }

    fn nobody_listens(&self) -> bool {
        self.screen.as_ref().is_some_and(Screen::nobody_listens)
    }
}

impl Connection {
    fn open(
        site: &Site,
        words: &[OsString],
        environment: &Environment,
        guardian: &Guardian,
    ) -> Result<Connection, LaunchError> {
        let failed = |source| LaunchError::Start {
            label: format!("the connection to {}", site.host.name),
            program: words[0].clone(),
            source,
        };
        let mut child = spawn_connection(words, environment, guardian).map_err(failed)?;
        let input = child.stdin.take().map(|pipe| File::from(OwnedFd::from(pipe)));
        let output = child.stdout.take().map(|pipe| File::from(OwnedFd::from(pipe)));
        let errors = child.stderr.take().map(|pipe| File::from(OwnedFd::from(pipe)));
        for pipe in input.iter().chain(&output).chain(&errors) {
            set_nonblocking(pipe).map_err(failed)?;
        }
        // The agent's own command: behind ssh it is the last word, or stands at the end.
        let program = words.last().map(|word| word.to_string_lossy().into_owned());
        let program = match program.as_deref().and_then(|line| line.strip_suffix(" --agent")) {
            Some(line) => line.trim_start_matches("exec ").to_owned(),
            None => words[words.len().saturating_sub(2)].to_string_lossy().into_owned(),
        };
        Ok(Connection {
            site: site.clone(),
            program,
            child,
            is_reaped: false,
            input,
            outbox: Vec::new(),
            output,
            errors,
            decoder: Decoder::of_agent(),
            said: Vec::new(),
            hello: None,
            probed: None,
            has_started: false,
            failure: None,
            heard_at: Instant::now(),
            is_told: false,
            processes: Vec::new(),
            shown: 0,
        })
    }

    /// Whether it leads to the launcher's own machine.
    pub(super) fn is_local(&self) -> bool {
        self.site.is_local
    }

    /// Whether it has nothing to start.
    pub(super) fn is_idle(&self) -> bool {
        self.processes.is_empty()
    }

    fn fail(&mut self, code: i32, why: String) {
        if self.failure.is_none() {
            self.failure = Some((code, why));
        }
    }

    fn remember(&mut self, bytes: &[u8]) {
        self.said.extend_from_slice(bytes);
        let surplus = self.said.len().saturating_sub(SAID_BYTES);
        self.said.drain(..surplus);
    }

    /// What it said that is not of the agent.
    fn text_said(&self) -> String {
        let noise = self.decoder.noise();
        let noise = &noise[noise.len().saturating_sub(SAID_BYTES)..];
        let said = if self.said.is_empty() { noise } else { &self.said };
        String::from_utf8_lossy(said).into_owned()
    }

    fn flush(&mut self) {
        while let (Some(input), false) = (&mut self.input, self.outbox.is_empty()) {
            match input.write(&self.outbox) {
                Ok(count @ 1..) => drop(self.outbox.drain(..count)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // Its output tells why.
                Ok(_) | Err(_) => self.input = None,
            }
        }
        if self.input.is_none() {
            self.outbox.clear();
        }
    }

    /// Ends the connection, unless it has been reaped: then its number may be another's.
    fn kill(&self) {
        if !self.is_reaped {
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        }
    }

    /// How its process has ended, whose output has closed.
    fn reap(&mut self) -> Option<ExitStatus> {
        self.input = None;
        let begun = Instant::now();
        while begun.elapsed() < REAP {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(2)),
                Ok(status) => {
                    self.is_reaped = true;
                    return status;
                }
                Err(_) => return None,
            }
        }
        None
    }
}

/// Bytes that were there; closes what has ended.
fn read(pipe: &mut Option<File>, buffer: &mut [u8]) -> usize {
    let Some(file) = pipe else { return 0 };
    match file.read(buffer) {
        Ok(count @ 1..) => count,
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => 0,
        Ok(_) | Err(_) => {
            *pipe = None;
            0
        }
    }
}
