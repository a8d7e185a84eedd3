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
use super::plan::{Plan, Programs};
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
    plan: Option<Plan>,
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
    let mut agent = Agent { programs, children, decoder, held, plan: None, told_at };
    let mut first = GREETING.to_vec();
    Report::Hello(hello).encode(&mut first);
    let mut code = 0;
    if write(&first).is_ok() {
        code = agent.serve(&mut signals);
    }
    if !agent.children.have_ended() {
        agent.children.kill_all();
    }
    agent.children.finish(&mut |source, bytes| {
        let _ = write_report(&output(source, bytes));
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
            if let Some(signal) = signals.take().first() {
                say(&format!("{}: ending the processes here", super::signals::name(*signal)));
                return 128 + signal;
            }
            let stepped = self.listen(&mut buffer).and_then(|()| self.tell());
            match stepped {
                Ok(()) => {}
                Err(Gone) => return 0,
            }
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
            Order::Start(_) if self.plan.is_some() => {
                say("a second instruction came from the launcher");
                Err(Gone)
            }
            Order::Start(instruction) => {
                let answer = match self.start(&instruction) {
                    Ok(()) => Report::Started,
                    Err(error) => Report::Refused {
                        code: error.code().unsigned_abs(),
                        why: error.to_string(),
                    },
                };
                write_report(&answer)
            }
            Order::Signal { process, signal } => {
                let number = i32::try_from(signal).unwrap_or_default();
                if let Some(signal) = Signal::from_named_raw(number) {
                    self.children.signal(process as usize, signal);
                }
                Ok(())
            }
            Order::TellTheEnd { process } => {
                self.children.tell_the_end(process as usize);
                Ok(())
            }
        }
    }

    fn start(&mut self, instruction: &Instruction) -> Result<(), LaunchError> {
        let mut plan = share::plan(instruction, self.programs)?;
        for note in &plan.notes {
            let _ = write_report(&Report::Note(note.clone()));
        }
        self.held.append(&mut plan.held);
        let started = self.children.start(&plan.processes, Output::Piped);
        self.plan = Some(plan);
        if started.is_err() {
            self.children.kill_all();
        }
        started
    }

    /// Tells what the processes have written and which have ended.
    fn tell(&mut self) -> Result<(), Gone> {
        let mut result = Ok(());
        let mut told = false;
        // Ends first: what a process wrote before its end is then there to be read, but for what it
        // has left behind.
        let ends = self.children.ends();
        self.children.pass_on(&mut |source, bytes| {
            told = true;
            if result.is_ok() {
                result = write_report(&output(source, bytes));
            }
        });
        result?;
        for Ended { process, code, how } in ends {
            told = true;
            let (process, code) = (word(process), code.unsigned_abs());
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

fn output(source: Source, bytes: Option<&[u8]>) -> Report {
    Report::Output {
        process: word(source.process),
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
