//! One network namespace, held by an open file, and the way of a program into it.

use clap::{Arg, ArgMatches, Command as Arguments};
use rustix::process::{Pid, Signal, getppid};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// Where programs of a stage look for others. They get no variable from outside: any of them might
/// change a job.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// See the [module](self).
pub struct Namespace(File);

impl Namespace {
    /// A new one, without a device but loopback.
    pub fn new() -> Result<Namespace, String> {
        // A thread of its own, so that this one stays where it is.
        let made = std::thread::spawn(|| {
            // SAFETY: only `FILES` can make descriptors disappear, and it is not among the flags.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?;
            File::open("/proc/thread-self/ns/net")
        });
        let file = made.join().expect("no panic in two system calls");
        file.map(Namespace).map_err(|error| format!("no network namespace: {error}; run as root"))
    }

    /// A path to it that other processes can open while this one lives.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// A command that runs a program in it.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program_path());
        command.env_clear().env("PATH", PATH);
        command.args(["within", &self.path(), &std::process::id().to_string(), "--"]);
        command.arg(program);
        command
    }

    /// Runs lines of `ip` in it.
    pub fn ip(&self, lines: &str) -> Result<(), String> {
        let mut command = self.command("ip");
        command.args(["-batch", "-"]);
        finish(command, lines).map_err(|error| format!("ip: {error} in {lines:?}"))
    }

    /// Gives what leaves through a device this rate.
    pub fn tc(&self, device: &str, rate: u64, burst: u64, queue_ms: u32) -> Result<(), String> {
        let mut command = self.command("tc");
        let (rate, burst, latency) =
            (format!("{rate}bit"), format!("{burst}b"), format!("{queue_ms}ms"));
        command.args(["qdisc", "replace", "dev", device, "root", "tbf", "rate", &rate]);
        command.args(["burst", &burst, "latency", &latency]);
        finish(command, "").map_err(|error| format!("tc: {error} for a token bucket of {rate}"))
    }

    /// Writes a kernel setting of this namespace.
    pub fn set(&self, name: &str, value: &str) -> Result<(), String> {
        let mut command = self.command("tee");
        command.arg(format!("/proc/sys/{name}"));
        finish(command, value).map_err(|error| format!("{name} = {value}: {error}"))
    }
}

/// This program, which a stage runs again in its namespaces.
pub fn program_path() -> std::path::PathBuf {
    // Where the file was replaced meanwhile, the link still leads to the one that runs.
    std::env::current_exe().ok().filter(|path| path.exists()).unwrap_or("/proc/self/exe".into())
}

/// Runs a short command to its end.
fn finish(mut command: Command, input: &str) -> Result<(), String> {
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    if let Some(mut pipe) = child.stdin.take() {
        // A command that ended early says why itself.
        let _ = pipe.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{} ({})", String::from_utf8_lossy(&output.stderr).trim(), output.status))
}

/// The arguments of [`enter`].
pub fn within_command() -> Arguments {
    Arguments::new("within")
        .about("Runs a program in a network namespace (used by `cluster`)")
        .hide(true)
        .arg(Arg::new("namespace").required(true))
        .arg(Arg::new("parent").required(true).value_parser(clap::value_parser!(i32).range(1..)))
        .arg(
            Arg::new("program")
                .required(true)
                .num_args(1..)
                .last(true)
                .value_parser(clap::value_parser!(OsString)),
        )
}

/// Becomes the program, inside the namespace. It is killed when whoever asked for it ends.
pub fn enter(matches: &ArgMatches) -> crate::Outcome {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let parent = matches.get_one::<i32>("parent").expect("required");
    if getppid().map(Pid::as_raw_pid) != Some(*parent) {
        // It died before the line above: nobody would send that signal.
        return Err("whoever staged this has ended".into());
    }
    let path = matches.get_one::<String>("namespace").expect("required");
    let namespace = File::open(path).map_err(|error| format!("{path}: {error}"))?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
    let mut words = matches.get_many::<OsString>("program").expect("required");
    let program = words.next().expect("at least one word");
    let error = Command::new(program).args(words).exec();
    Err(format!("{}: {error}", program.to_string_lossy()).into())
}
