//! What is to be started: every process with its command, environment, CPUs and label.

#![forbid(unsafe_code)]

use super::binding::Binding;
use super::error::LaunchError;
use super::port::reserve_port;
use bps_engine::config::{Config, Loaded};
use bps_engine::topo::visible::CUDA_VISIBLE;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Tells a process that its environment has been checked, so that warnings come once.
pub(super) const CHECKED: &str = "BPS_ENVIRONMENT_CHECKED";

/// The commands that start the roles which are not the user's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Programs {
    /// Starts the scheduler.
    pub scheduler: Vec<String>,
    /// Starts a server.
    pub server: Vec<String>,
    /// Starts the launcher, on this machine or another.
    pub launcher: Vec<String>,
}

impl Programs {
    /// The running program, and `bps-scheduler` and `bps-server` in its folder; where that cannot
    /// be known, those on the path.
    #[must_use]
    pub fn beside_this_one() -> Programs {
        let folder = std::env::current_exe()
            .ok()
            .and_then(|path| path.parent().map(Path::to_path_buf))
            .unwrap_or_default();
        let beside = |name: &str| vec![folder.join(name).to_string_lossy().into_owned()];
        Programs {
            scheduler: beside("bps-scheduler"),
            server: beside("bps-server"),
            launcher: beside("bpslaunch"),
        }
    }
}

/// All processes, and how to treat them.
pub(super) struct LaunchPlan {
    /// In the order in which they start.
    pub(super) processes: Vec<Process>,
    /// Lines for the user before anything starts.
    pub(super) notes: Vec<String>,
    /// Whether output passes through the launcher, with the label in front of each line.
    pub(super) prefix: bool,
    /// From the request to end to the kill.
    pub(super) grace: Duration,
    /// Fewest workers of this machine with which the job goes on, where it may spare any.
    pub(super) workers_min: usize,
    /// How much longer workers or servers that are told to end may take to leave in good order,
    /// where others of the job go on without those of this machine.
    pub(super) notice: Option<Duration>,
    /// What must stay open as long as the job: the job key's memory, the scheduler's port.
    #[allow(dead_code, reason = "owning it is its use")]
    pub(super) held: Vec<OwnedFd>,
}

/// One process to start.
#[derive(Clone)]
pub(super) struct Process {
    /// Which failures end the job, and who ends first.
    pub(super) kind: Kind,
    /// `rank 0`, `server 1`, `scheduler`.
    pub(super) label: String,
    /// Program and arguments, never empty.
    pub(super) command: Vec<OsString>,
    /// Changes to the launcher's own environment.
    pub(super) environment: Environment,
    /// Its GPU, CPUs and memory.
    pub(super) binding: Binding,
    /// Whether it may read the launcher's standard input.
    pub(super) reads_input: bool,
    /// Whether it waits for ranks that have left, until SIGUSR1 tells it that all have ended.
    pub(super) stays: bool,
    /// Whether the job may go on without it.
    pub(super) is_spared: bool,
    /// Whether it is started again when a signal has ended it: the scheduler of an elastic job.
    pub(super) is_revived: bool,
    /// The folder that it starts in, if not the launcher's.
    pub(super) folder: Option<PathBuf>,
}

/// What a process is to the launcher.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Worker,
    Helper,
}

/// Variables to set (`Some`) and to remove (`None`); a later entry beats an earlier one.
#[derive(Clone, Default, Debug)]
pub(super) struct Environment(pub(super) Vec<(String, Option<OsString>)>);

impl Environment {
    /// What every process gets: the launcher's flags as variables.
    pub(super) fn of_flags(loaded: &Loaded) -> Environment {
        let mut environment = Environment::default();
        for (name, value) in loaded.flags_as_variables() {
            environment.set(name, value);
        }
        environment.set(CHECKED, "1");
        environment
    }

    pub(super) fn set(&mut self, name: &str, value: impl AsRef<OsStr>) {
        self.0.push((name.to_owned(), Some(value.as_ref().to_owned())));
    }

    pub(super) fn remove(&mut self, name: &str) {
        self.0.push((name.to_owned(), None));
    }

    /// Gives a worker process the variables that torch's programs read, and takes away those of a
    /// torchrun around this launcher.
    pub(super) fn set_torch(&mut self, place: &Config) {
        for name in ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"] {
            self.remove(name);
        }
        self.set("RANK", place.rank().to_string());
        self.set("WORLD_SIZE", place.size().to_string());
        self.set("LOCAL_RANK", place.local_rank.to_string());
        self.set("LOCAL_WORLD_SIZE", place.local_size.to_string());
    }

    /// Where the ranks of this machine, which are all of the job, open torch's store; returns what
    /// keeps the port free. What the user has set stays.
    pub(super) fn set_torch_store(&mut self) -> Result<Option<OwnedFd>, LaunchError> {
        let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        if is_set("MASTER_ADDR") && is_set("MASTER_PORT") {
            return Ok(None);
        }
        let (port, socket) = reserve_port()?;
        self.set("MASTER_ADDR", "127.0.0.1");
        self.set("MASTER_PORT", port.to_string());
        Ok(Some(socket))
    }
}

impl fmt::Display for LaunchPlan {
    /// What `--dry-run` prints: the notes, then each process's command.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for note in &self.notes {
            writeln!(f, "{note}")?;
        }
        for process in &self.processes {
            write!(f, "{}:", process.label)?;
            for word in &process.command {
                write!(f, " {}", word.display())?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl Process {
    /// A worker process, with what its binding asks of its environment. The line about it goes to
    /// `notes`.
    pub(super) fn worker(
        rank: u32,
        local_rank: u32,
        command: &[OsString],
        mut environment: Environment,
        binding: Binding,
        notes: &mut Vec<String>,
    ) -> Process {
        environment.set("DMLC_ROLE", "worker");
        environment.set("BYTEPS_LOCAL_RANK", local_rank.to_string());
        environment.set("PYTHONUNBUFFERED", "1");
        if let Some(value) = &binding.cuda {
            environment.set(CUDA_VISIBLE, value);
        }
        let label = format!("rank {rank}");
        notes.extend(binding.line.as_ref().map(|line| format!("{label}: {line}")));
        Process {
            kind: Kind::Worker,
            label,
            command: command.to_vec(),
            environment,
            binding,
            reads_input: local_rank == 0,
            stays: false,
            is_spared: false,
            is_revived: false,
            folder: None,
        }
    }
}

/// The user's command as program and arguments, under gdb if that is wanted. A single argument with
/// blanks is a line for the shell, as in BytePS; anything else reaches the program as it is.
pub(super) fn worker_command(loaded: &Loaded) -> Result<Vec<OsString>, LaunchError> {
    let command = match loaded.command.as_slice() {
        [] => return Err(LaunchError::NoCommand),
        [line] if line.to_string_lossy().contains(char::is_whitespace) => {
            vec!["/bin/sh".into(), "-c".into(), line.clone()]
        }
        words => words.to_vec(),
    };
    if !loaded.config.launch.gdb {
        return Ok(command);
    }
    let gdb = ["gdb", "-return-child-result", "-batch", "-ex", "run", "-ex", "bt", "--args"];
    Ok(gdb.into_iter().map(OsString::from).chain(command).collect())
}

pub(super) fn helper_command(command: &[String]) -> Vec<OsString> {
    command.iter().map(OsString::from).collect()
}
