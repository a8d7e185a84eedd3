//! Processes that do something together when they are told to, and say how it went.
//!
//! The protocol is lines. A member says `ready` once. For each line that it is told it does its
//! work and answers with one line of numbers. It ends when its input does.
//!
//! Invariant: every wait has a deadline, and a member that ends early is an error with its name.

#![forbid(unsafe_code)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// What a member starts its answers with, so that other output is told apart.
const MARK: &str = "bps-perf:";

/// How soon it is seen that a member died while another, which waits for it, is listened to.
const LOOK: Duration = Duration::from_millis(100);

/// A process of a stage. It is killed when this is dropped.
pub struct Member {
    name: String,
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Member {
    /// Starts a member. The calling thread must outlive it.
    pub fn start(name: String, mut command: Command) -> Result<Member, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("{name}: {error}"))?;
        let output = child.stdout.take().expect("piped");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let Some(rest) = line.strip_prefix(MARK) else { continue };
                if sender.send(rest.trim().to_string()).is_err() {
                    return;
                }
            }
        });
        let input = child.stdin.take();
        Ok(Member { name, child, input, lines })
    }

    fn tell(&mut self, line: &str) -> Result<(), String> {
        let input = self.input.as_mut().expect("open until the end");
        let told = writeln!(input, "{line}").and_then(|()| input.flush());
        told.map_err(|error| format!("{} ended: {error}; see what it said above", self.name))
    }

    /// The next line, or `None` if there was none in this time.
    fn hear(&mut self, time: Duration) -> Result<Option<String>, String> {
        match self.lines.recv_timeout(time) {
            Ok(line) => Ok(Some(line)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.child.wait().map_or("?".into(), |status| status.to_string());
                Err(self.ended(&status))
            }
        }
    }

    /// An error if it failed. What it said before it ended may still be on its way.
    fn look(&mut self) -> Result<(), String> {
        match self.child.try_wait() {
            Ok(Some(status)) if !status.success() => Err(self.ended(&status.to_string())),
            _ => Ok(()),
        }
    }

    fn ended(&self, status: &str) -> String {
        format!("{} ended ({status}); see what it said above", self.name)
    }

    /// Closes its input and waits until it ends by itself.
    fn dismiss(&mut self, deadline: Instant) -> Result<(), String> {
        self.input = None;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(status)) => return Err(format!("{} ended badly ({status})", self.name)),
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Ok(None) => return Err(format!("{} does not end", self.name)),
                Err(error) => return Err(format!("{}: {error}", self.name)),
            }
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Members that work together.
pub struct Crew {
    members: Vec<Member>,
    patience: Duration,
}

impl Crew {
    /// Waits until all are ready, and gives each line of work, and their end, so long.
    pub fn new(members: Vec<Member>, patience: Duration) -> Result<Crew, String> {
        let mut crew = Crew { members, patience };
        for (index, line) in crew.gather()?.iter().enumerate() {
            if line != "ready" {
                return Err(format!("{} said {line:?}, not ready", crew.members[index].name));
            }
        }
        Ok(crew)
    }

    /// Tells all members the same and returns each one's numbers.
    pub fn work(&mut self, line: &str) -> Result<Vec<Vec<f64>>, String> {
        for member in &mut self.members {
            member.tell(line)?;
        }
        let lines = self.gather()?;
        let parse = |(member, line): (&Member, &String)| {
            let numbers: Result<Vec<f64>, _> = line.split_whitespace().map(str::parse).collect();
            numbers.map_err(|_| format!("{} answered {line:?}", member.name))
        };
        self.members.iter().zip(&lines).map(parse).collect()
    }

    /// A line of each member. That one has failed ends this at once: others may wait for it, and
    /// would not answer.
    fn gather(&mut self) -> Result<Vec<String>, String> {
        let deadline = Instant::now() + self.patience;
        let mut lines = Vec::new();
        while lines.len() < self.members.len() {
            let member = &mut self.members[lines.len()];
            let left = deadline.saturating_duration_since(Instant::now());
            if let Some(line) = member.hear(left.min(LOOK))? {
                lines.push(line);
            } else if left.is_zero() {
                return Err(format!("{} did not answer in time", member.name));
            } else {
                self.members.iter_mut().try_for_each(Member::look)?;
            }
        }
        Ok(lines)
    }

    /// Like [`work`](Crew::work), where each answers one number; the largest counts.
    pub fn slowest(&mut self, line: &str) -> Result<f64, String> {
        Ok(self.work(line)?.into_iter().flatten().fold(0.0, f64::max))
    }

    /// Lets all end in good order.
    pub fn end(mut self) -> Result<(), String> {
        for member in &mut self.members {
            member.input = None;
        }
        let deadline = Instant::now() + self.patience;
        self.members.iter_mut().try_for_each(|member| member.dismiss(deadline))
    }
}

/// A member's own side: says that it is ready, then does `work` for each line that it is told.
pub fn serve(mut work: impl FnMut(&str) -> Result<Vec<f64>, String>) -> Result<(), String> {
    let say = |text: &str| {
        let mut out = std::io::stdout();
        writeln!(out, "{MARK} {text}").and_then(|()| out.flush()).map_err(|error| error.to_string())
    };
    say("ready")?;
    for line in std::io::stdin().lines() {
        let line = line.map_err(|error| error.to_string())?;
        let numbers: Vec<String> = work(&line)?.iter().map(f64::to_string).collect();
        say(&numbers.join(" "))?;
    }
    Ok(())
}
