//! `--host-discovery`: a command that prints which machines there are, run again and again.
//!
//! A thread runs it, so that the launcher waits for nothing. What fails, hangs or makes no sense is
//! told in a line, once, and the last good answer stays.

#![forbid(unsafe_code)]

use super::child::{reap, spawn_command};
use super::error::LaunchError;
use super::hosts::{Host, parse_answer};
use super::output::say;
use super::signals::set_nonblocking;
use bps_engine::config::LaunchConfig;
use bps_engine::harness::join;
use rustix::process::{Pid, Signal, kill_process_group};
use std::io::{ErrorKind, Read};
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the thread looks whether the command has ended, and whether it is wanted any more.
const LOOK: Duration = Duration::from_millis(20);
/// The same while it runs: most commands take a few milliseconds.
const LISTEN: Duration = Duration::from_millis(5);
/// Bytes of an answer, at most.
const ANSWER_BYTES_MAX: usize = 1 << 20;

type Findings = Result<Vec<Host>, String>;

/// The command, and what it has said.
pub(super) struct Discovery {
    command: String,
    answers: Receiver<Findings>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    /// What is wrong with its last run.
    problem: Option<String>,
    has_answered: bool,
}

impl Discovery {
    /// Begins to run it.
    pub(super) fn start(command: &str, launch: &LaunchConfig) -> Result<Discovery, LaunchError> {
        let (sender, answers) = channel();
        let is_over = Arc::new(AtomicBool::new(false));
        let (line, over) = (command.to_owned(), Arc::clone(&is_over));
        let (interval, timeout) = (launch.discovery_interval, launch.discovery_timeout);
        let body = move || {
            while !over.load(Ordering::Acquire) {
                let begun = Instant::now();
                let answer = ask(&line, timeout, &over);
                if over.load(Ordering::Acquire) || sender.send(answer).is_err() {
                    return;
                }
                while begun.elapsed() < interval && !over.load(Ordering::Acquire) {
                    std::thread::sleep(LOOK.min(interval));
                }
            }
        };
        let thread = std::thread::Builder::new().name("bps-discovery".to_owned()).spawn(body);
        let failed =
            |source| LaunchError::System { what: "no thread for --host-discovery", source };
        Ok(Discovery {
            command: command.to_owned(),
            answers,
            is_over,
            thread: Some(thread.map_err(failed)?),
            problem: None,
            has_answered: false,
        })
    }

    /// The last good answer since the last call. Says what was wrong with others.
    pub(super) fn take(&mut self) -> Option<Vec<Host>> {
        let mut last = None;
        while let Ok(answer) = self.answers.try_recv() {
            match answer {
                Ok(hosts) => {
                    if self.problem.take().is_some() {
                        say(&format!("--host-discovery '{}' answers again", self.command));
                    }
                    self.has_answered = true;
                    last = Some(hosts);
                }
                Err(problem) => {
                    let problem = format!("--host-discovery '{}' {problem}", self.command);
                    if self.problem.as_ref() != Some(&problem) {
                        let stays = if self.has_answered { "; its last answer stays" } else { "" };
                        say(&format!("{problem}{stays}"));
                    }
                    self.problem = Some(problem);
                }
            }
        }
        last
    }

    /// What is wrong with its last run.
    pub(super) fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }
}

impl Drop for Discovery {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // It has nothing to say that anybody waits for, and ends its command within a look.
            if let Err(error) = join(thread) {
                say(&error.to_string());
            }
        }
    }
}

/// Runs the command once.
fn ask(line: &str, timeout: Duration, is_over: &AtomicBool) -> Findings {
    let mut child = spawn_command(line).map_err(|error| format!("does not start: {error}"))?;
    let answer = listen(&mut child, timeout, is_over);
    // Not reaped yet, or ended by now: the number is still its own where this has an effect.
    if answer.is_err() && child.try_wait().is_ok_and(|status| status.is_none()) {
        let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
        if let Some(held) = reap([&mut child]) {
            say(&held);
        }
    }
    answer
}

fn listen(child: &mut Child, timeout: Duration, is_over: &AtomicBool) -> Findings {
    let begun = Instant::now();
    let (Some(mut output), Some(mut errors)) = (child.stdout.take(), child.stderr.take()) else {
        return Err("has no output".to_owned());
    };
    for ready in [set_nonblocking(&output), set_nonblocking(&errors)] {
        ready.map_err(|error| format!("cannot be heard: {error}"))?;
    }
    let (mut said, mut complained) = (Vec::new(), Vec::new());
    let status = loop {
        std::thread::sleep(LISTEN);
        let status = child.try_wait().map_err(|error| format!("is lost: {error}"))?;
        drain(&mut output, &mut said);
        drain(&mut errors, &mut complained);
        if let Some(status) = status {
            break status;
        }
        if said.len() > ANSWER_BYTES_MAX || complained.len() > ANSWER_BYTES_MAX {
            return Err(format!("has printed more than {ANSWER_BYTES_MAX} bytes"));
        }
        if begun.elapsed() >= timeout || is_over.load(Ordering::Acquire) {
            let seconds = timeout.as_secs_f64();
            return Err(format!("has not ended within {seconds} s and was killed"));
        }
    };
    if !status.success() {
        let complained = String::from_utf8_lossy(&complained);
        let last = complained.lines().rev().map(str::trim).find(|line| !line.is_empty());
        let last = last.map(|line| format!(": {line}")).unwrap_or_default();
        return Err(format!("has failed ({status}){last}"));
    }
    let text = String::from_utf8(said).map_err(|_| "has printed what is no text".to_owned())?;
    parse_answer(&text).map_err(|why| format!("has printed no list of machines: {why}"))
}

/// What is there to be read, and not more than makes sense.
fn drain(pipe: &mut impl Read, into: &mut Vec<u8>) {
    let mut buffer = [0; 4096];
    while into.len() <= ANSWER_BYTES_MAX {
        match pipe.read(&mut buffer) {
            Ok(count @ 1..) => into.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Ok(_) | Err(_) => return,
        }
    }
}
