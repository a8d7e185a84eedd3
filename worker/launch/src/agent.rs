//! `bpslaunch --agent`: the end of `--hosts` on each machine. It starts the processes of its
//! machine, hands on what they write and how they end, and signals them when it is told to.
//!
//! All that it has to know comes on standard input, so that nothing of it stands on a command line
//! or in the environment of a login. It decides nothing: the supervisor in the launcher does. When
//! its input closes, because the launcher has finished, is gone or cannot be reached any more, it
//! ends all that it has started.

#![forbid(unsafe_code)]

use super::binding::Machine;
use super::child::Output;
use super::children::{Children, wait};
use super::crew::Ended;
use super::error::LaunchError;
use super::frames::{Decoder, Encode, GREETING, Hello, Instruction, Order, PROTOCOL, Report};
use super::output::say;
use super::plan::{LaunchPlan, Programs};
use super::port::reserve_port_for_others;
use super::share;
use super::signals::Signals;
use super::streams::{READ_BYTES, Source};
use bps_engine::base::word;
use bps_engine::config::LaunchConfig;
use rustix::io::Errno;
use rustix::process::Signal;
use std::io::{self, IsTerminal, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// Time between two signs of life: a connection that nobody answers is found out by writing to it.
const ALIVE: Duration = Duration::from_secs(15);
/// Longest sleep: a notice that was lost is made up for after this.
const SLEEP_MAX: Duration = Duration::from_millis(500);
/// For one attempt to reach an address.
const PROBE: Duration = Duration::from_secs(2);

/// The launcher cannot be heard or told any more.
struct Gone;

struct Agent<'a> {
    programs: &'a Programs,
    children: Children,
    decoder: Decoder,
    /// What must stay open as long as the job.
    held: Vec<OwnedFd>,
    /// The child that each process of the launcher's numbers is; none of what could not be started.
    numbers: Vec<Option<usize>>,
    /// The children that can leave the job: all but its scheduler.
    leavers: Vec<usize>,
    /// How long these have to leave in good order, where the job goes on without them.
    notice: Option<Duration>,
    /// When those that were told to leave are killed.
    deadline: Option<Instant>,
    told_at: Instant,
}

/// Runs until the launcher closes the connection; returns the code to leave with.
pub(super) fn run(launch: &LaunchConfig, programs: &Programs) -> Result<i32, LaunchError> {
    if io::stdin().is_terminal() {
        return Err(LaunchError::Conflict {
            problem: "--agent is told what to do on standard input, by a launcher with --hosts"
                .to_owned(),
            remedy: "for a job on several machines: bpslaunch --hosts host1:4,host2:4 COMMAND"
                .to_owned(),
        });
    }
    let children = Children::new()?;
    let mut signals = Signals::catch()?;
    let (hello, held) = hello(launch)?;
    let (decoder, told_at) = (Decoder::of_launcher(), Instant::now());
    let (numbers, leavers) = (Vec::new(), Vec::new());
    let (notice, deadline) = (None, None);
    let mut agent =
        Agent { programs, children, decoder, held, numbers, leavers, notice, deadline, told_at };
    let mut first = GREETING.to_vec();
    Report::Hello(hello).encode(&mut first);
    let mut code = 0;
    if write(&first).is_ok() {
        code = agent.serve(&mut signals);
    }
    if !agent.children.have_ended() {
        agent.children.kill_all();
    }
    let numbers = agent.numbers;
    agent.children.finish(&mut |source, bytes| {
        let _ = write_report(&output(&numbers, source, bytes));
    });
    drop(agent.held);
    Ok(code)
}

/// What this machine is, and the ports that it keeps for the job.
fn hello(launch: &LaunchConfig) -> Result<(Hello, Vec<OwnedFd>), LaunchError> {
    let (mut ports, mut held) = ([0; 3], Vec::new());
    for port in &mut ports {
        let (number, socket) = reserve_port_for_others()?;
        *port = number.into();
        held.push(socket);
    }
    let hello = Hello {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        // A machine whose GPUs cannot be counted is told what to do by the list of hosts.
        devices: Machine::read(launch).map_or(1, |machine| machine.processes(launch)),
        ports,
        connection: std::env::var("SSH_CONNECTION").unwrap_or_default(),
        interfaces: bps_engine::host::interfaces()
            .into_iter()
            .map(|(name, address)| (name, address.to_string()))
            .collect(),
    };
    Ok((hello, held))
}

impl Agent<'_> {
    /// The loop; returns the code to leave with.
    fn serve(&mut self, signals: &mut Signals) -> i32 {
        let mut buffer = vec![0; READ_BYTES];
        loop {
            let input = io::stdin();
            let descriptors = signals.descriptors().chain(self.children.descriptors());
            wait(descriptors.chain([input.as_fd()]), SLEEP_MAX);
            if let Some(signal) = signals.take().first()
                && !self.lets_leave(*signal)
            {
                say(&format!("{}: ending the processes here", super::signals::name(*signal)));
                return 128 + signal;
            }
            if self.deadline.is_some() && self.end_leaving() {
                return 0;
            }
            let stepped = self.listen(&mut buffer).and_then(|()| self.tell());
            match stepped {
                Ok(()) => {}
                Err(Gone) => return 0,
            }
        }
    }

    /// This machine is told to end, as a spot machine is before it is taken away: passes that on to
    /// the ranks and servers of an elastic job, which leave in good order. The second time all ends
    /// here.
    fn lets_leave(&mut self, signal: i32) -> bool {
        let Some(notice) = self.notice else { return false };
        if signal != signal_hook::consts::SIGTERM || self.deadline.is_some() {
            return false;
        }
        say("SIGTERM: the ranks and servers here are told to leave");
        self.deadline = Some(Instant::now() + notice);
        self.signal_leavers(Signal::TERM);
        true
    }

    /// Kills those that have not left in time; says whether nothing runs here any more.
    fn end_leaving(&mut self) -> bool {
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            self.signal_leavers(Signal::KILL);
        }
        // The launcher has heard of the ends before.
        self.children.have_ended()
    }

    fn signal_leavers(&mut self, signal: Signal) {
        for &child in &self.leavers {
            self.children.signal(child, signal);
        }
    }

    /// Follows the orders that have come.
    fn listen(&mut self, buffer: &mut [u8]) -> Result<(), Gone> {
        // The input may share its flags with the output, whose writes must not return early: so it
        // is not made non-blocking, and read only when there is something.
        if !can_be_read() {
            return Ok(());
        }
        // Past the standard library's buffer, in which bytes would lie that poll does not see.
        match rustix::io::read(io::stdin(), &mut *buffer) {
            Ok(count @ 1..) => self.decoder.push(&buffer[..count]),
            Err(Errno::INTR) => return Ok(()),
            Ok(_) | Err(_) => return Err(Gone),
        }
        loop {
            match self.decoder.next() {
                Ok(Some(order)) => self.follow(order)?,
                Ok(None) => return Ok(()),
                Err(error) => {
                    say(&format!("what came from the launcher is no order: {error}"));
                    return Err(Gone);
                }
            }
        }
    }

    fn follow(&mut self, order: Order) -> Result<(), Gone> {
        match order {
            Order::Probe(address) => write_report(&Report::Probed(reaches(&address))),
            Order::Start(instruction) if self.numbers.is_empty() => {
                let answer = match self.start(&instruction) {
                    Ok(()) => Report::Started,
                    Err(error) => {
                        self.children.kill_all();
                        let code = error.code().unsigned_abs();
                        Report::Refused { code, why: error.to_string() }
                    }
                };
                write_report(&answer)
            }
            Order::Start(instruction) => self.add(&instruction),
            Order::Signal { process, signal } => {
                let number = i32::try_from(signal).unwrap_or_default();
                if let (Some(child), Some(signal)) =
                    (self.child(process), Signal::from_named_raw(number))
                {
                    self.children.signal(child, signal);
                }
                Ok(())
            }
            Order::TellTheEnd { process } => {
                if let Some(child) = self.child(process) {
                    self.children.tell_the_end(child);
                }
                Ok(())
            }
        }
    }

    fn child(&self, process: u32) -> Option<usize> {
        *self.numbers.get(process as usize)?
    }

    /// Starts the processes of the first instruction.
    fn start(&mut self, instruction: &Instruction) -> Result<(), LaunchError> {
        let (mut plan, notice) = share::plan(instruction, self.programs)?;
        for note in &plan.notes {
            let _ = write_report(&Report::Note(note.clone()));
        }
        self.notice = notice;
        self.held.append(&mut plan.held);
        let before = self.children.count();
        let started = self.children.start(&plan.processes, Output::Piped);
        self.count_in(&plan, before);
        started
    }

    /// Starts what takes part from now on. What cannot be started counts as ended.
    fn add(&mut self, instruction: &Instruction) -> Result<(), Gone> {
        let before = self.children.count();
        let added = share::plan(instruction, self.programs).and_then(|(mut plan, _)| {
            self.held.append(&mut plan.held);
            self.children.start(&plan.processes, Output::Piped)?;
            Ok(plan)
        });
        let error = match added {
            Ok(plan) => {
                self.count_in(&plan, before);
                return Ok(());
            }
            Err(error) => error,
        };
        let how = format!("did not start: {error}");
        for _ in &instruction.slots {
            let (process, code) = (word(self.numbers.len()), error.code().unsigned_abs());
            self.numbers.push(None);
            write_report(&Report::Ended { process, code, how: how.clone() })?;
        }
        Ok(())
    }

    fn count_in(&mut self, plan: &LaunchPlan, before: usize) {
        for (child, process) in (before..).zip(&plan.processes) {
            self.numbers.push(Some(child));
            if !process.stays {
                self.leavers.push(child);
            }
        }
    }

    /// Tells what the processes have written and which have ended.
    fn tell(&mut self) -> Result<(), Gone> {
        let mut result = Ok(());
        let mut told = false;
        // Ends first: what a process wrote before its end is then there to be read, but for what it
        // has left behind.
        let ends = self.children.ends();
        let numbers = &self.numbers;
        self.children.pass_on(&mut |source, bytes| {
            told = true;
            if result.is_ok() {
                result = write_report(&output(numbers, source, bytes));
            }
        });
        result?;
        for Ended { process, code, how } in ends {
            told = true;
            let (process, code) = (number(numbers, process), code.unsigned_abs());
            write_report(&Report::Ended { process, code, how })?;
        }
        if told {
            self.told_at = Instant::now();
        } else if self.told_at.elapsed() >= ALIVE {
            write_report(&Report::Alive)?;
            self.told_at = Instant::now();
        }
        Ok(())
    }
}

/// The launcher's number of a child.
fn number(numbers: &[Option<usize>], child: usize) -> u32 {
    word(numbers.iter().position(|known| *known == Some(child)).unwrap_or(child))
}

fn output(numbers: &[Option<usize>], source: Source, bytes: Option<&[u8]>) -> Report {
    Report::Output {
        process: number(numbers, source.process),
        target: source.target as u32,
        bytes: bytes.unwrap_or_default().to_vec(),
    }
}

fn can_be_read() -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let input = io::stdin();
    let mut polled = [PollFd::new(&input, PollFlags::IN)];
    matches!(poll(&mut polled, Some(&Timespec::default())), Ok(1..))
}

/// Whether somebody accepts connections there.
fn reaches(address: &str) -> bool {
    let Ok(address) = address.parse::<SocketAddr>() else { return false };
    TcpStream::connect_timeout(&address, PROBE).is_ok()
}

fn write_report(report: &Report) -> Result<(), Gone> {
    let mut bytes = Vec::new();
    report.encode(&mut bytes);
    write(&bytes)
}

fn write(bytes: &[u8]) -> Result<(), Gone> {
    let mut output = io::stdout().lock();
    output.write_all(bytes).and_then(|()| output.flush()).map_err(|_| Gone)
}
