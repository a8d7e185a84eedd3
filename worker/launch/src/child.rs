//! Starts processes that cannot outlive the launcher, and the guardian that sees to it.
//!
//! A process leads its own group and is killed by the kernel when the thread that started it ends.
//! Its children would not be; so each process tells the guardian its group before it becomes the
//! user's program. The guardian is a fork of the launcher that holds the other end of a socket:
//! when the launcher is gone, for whatever reason, it kills all these groups.

use super::plan::{Environment, Process};
use bps_engine::topo::pin::prefer_memory_node;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};
use rustix::process::{Pid, Signal, WaitOptions, getpid, getppid, kill_process, waitpid};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Groups that a guardian can remember: all that a configuration can ask for.
pub(super) const GROUPS_MAX: usize = 8192;
/// How long the guardian may take to end all groups, and how often is looked.
const FINISH: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(1);
/// How long processes that were killed may take to end.
const REAP: Duration = Duration::from_secs(10);
const _: () = assert!(
    bps_engine::limits::RANKS_MAX + bps_engine::limits::SERVERS_MAX < GROUPS_MAX,
    "each process of a job has a group"
);

/// The launcher's end of the guardian. Dropping it without [`Guardian::finish`] also ends all
/// groups.
pub(super) struct Guardian {
    process: Pid,
    line: Arc<OwnedFd>,
}

impl Guardian {
    /// Forks the guardian. It holds nothing of this process but its end of the line.
    pub(super) fn start() -> io::Result<Guardian> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        // SAFETY: the child calls only async-signal-safe functions and never returns (`guard` keeps
        // to that), so no lock or allocator that another thread held at the fork is touched.
        let process = unsafe { libc::fork() };
        match process {
            -1 => Err(io::Error::last_os_error()),
            0 => guard(theirs.as_raw_fd()),
            process => {
                let process = Pid::from_raw(process).expect("fork returns a positive number");
                Ok(Guardian { process, line: Arc::new(ours) })
            }
        }
    }

    /// Lets the guardian end all groups, and waits until it has. One that somebody has stopped is
    /// killed.
    pub(super) fn finish(self) {
        drop(self.line);
        let start = Instant::now();
        while let Ok(None) | Err(Errno::INTR) = waitpid(Some(self.process), WaitOptions::NOHANG) {
            if start.elapsed() >= 2 * FINISH {
                return;
            }
            if start.elapsed() >= FINISH {
                let _ = kill_process(self.process, Signal::KILL);
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// Reaps processes that were sent SIGKILL. The kernel ends them at once, unless a device or a file
/// system holds one in a call: [`REAP`] later these are left to the kernel, and a line for people
/// is returned.
pub(super) fn reap<'a>(children: impl IntoIterator<Item = &'a mut Child>) -> Option<String> {
    let held = reap_within(children, REAP);
    let text: Vec<String> = held.iter().map(u32::to_string).collect();
    (!held.is_empty()).then(|| {
        format!(
            "killed, and still there after {} s: process {}: a device or the kernel holds it; read \
             the kernel's log",
            REAP.as_secs(),
            text.join(", ")
        )
    })
}

/// The numbers of those that are still there after this limit for all.
fn reap_within<'a>(children: impl IntoIterator<Item = &'a mut Child>, limit: Duration) -> Vec<u32> {
    let start = Instant::now();
    let mut held = Vec::new();
    for child in children {
        while let Ok(None) = child.try_wait() {
            if start.elapsed() >= limit {
                held.push(child.id());
                break;
            }
            std::thread::sleep(LOOK);
        }
    }
    held
}

/// The whole life of the guardian. Only async-signal-safe calls from here on.
fn guard(line: libc::c_int) -> ! {
    const LINE: libc::c_int = 0;
    let mut groups = [0 as libc::pid_t; GROUPS_MAX];
    let mut count = 0;
    // SAFETY: all pointers lead to locals or literals that outlive the calls; descriptors are plain
    // numbers whose errors are ignored or end the loop; nothing allocates or takes a lock.
    unsafe {
        // Out of the launcher's group and terminal, so that what ends the launcher does not end
        // this.
        libc::setsid();
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGPIPE] {
            libc::signal(signal, libc::SIG_IGN);
        }
        libc::prctl(libc::PR_SET_NAME, c"bps-guardian".as_ptr());
        libc::dup2(line, LINE);
        // Closes the launcher's end too, without which this would never see it close.
        if libc::syscall(libc::SYS_close_range, 1, libc::c_uint::MAX, 0) != 0 {
            let limit = libc::sysconf(libc::_SC_OPEN_MAX).clamp(1024, 1 << 20);
            for descriptor in 1..libc::c_int::try_from(limit).unwrap_or(1 << 20) {
                libc::close(descriptor);
            }
        }
        loop {
            let mut group: libc::pid_t = 0;
            let size = size_of::<libc::pid_t>();
            let got = libc::recv(LINE, (&raw mut group).cast(), size, 0);
            if got == size.cast_signed() {
                if group > 1 && count < GROUPS_MAX {
                    groups[count] = group;
                    count += 1;
                }
            } else if got != -1 || *libc::__errno_location() != libc::EINTR {
                break;
            }
        }
        for group in &groups[..count] {
            libc::kill(-group, libc::SIGKILL);
        }
        libc::_exit(0)
    }
}

/// Whether the process writes to the launcher or to where the launcher writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Output {
    Piped,
    Inherited,
}

/// Starts one process. The calling thread must outlive it.
pub(super) fn spawn(process: &Process, output: Output, guardian: &Guardian) -> io::Result<Child> {
    let mut command = Command::new(&process.command[0]);
    command.args(&process.command[1..]).process_group(0);
    set_environment(&mut command, &process.environment);
    if let Some(folder) = &process.folder {
        command.current_dir(folder);
    }
    let stdio = || match output {
        Output::Piped => Stdio::piped(),
        Output::Inherited => Stdio::inherit(),
    };
    // A process of another group than the terminal's is stopped when it reads from it.
    let input = process.reads_input && !io::stdin().is_terminal();
    command.stdin(if input { Stdio::inherit() } else { Stdio::null() });
    command.stdout(stdio()).stderr(stdio());
    let tie = tie(guardian);
    let cpus = process.binding.cpus.as_deref().map(cpu_set);
    let memory_node = process.binding.memory_node;
    let stays = process.stays;
    let prepare = move || -> io::Result<()> {
        tie()?;
        if stays {
            // SAFETY: to ignore a signal runs no code of this process.
            unsafe { libc::signal(libc::SIGUSR1, libc::SIG_IGN) };
        }
        if let Some(cpus) = &cpus {
            sched_setaffinity(None, cpus)?;
        }
        if let Some(node) = memory_node {
            // The launcher has seen that it can be done; a process that can't still runs.
            let _ = prefer_memory_node(node);
        }
        Ok(())
    };
    // SAFETY: `prepare` makes system calls on values that were made before the fork, and neither
    // allocates nor locks; its errors are plain numbers.
    unsafe { command.pre_exec(prepare) };
    command.spawn()
}

/// Starts a connection to an agent, whose input and outputs are pipes. The calling thread must
/// outlive it.
pub(super) fn spawn_connection(
    words: &[OsString],
    environment: &Environment,
    guardian: &Guardian,
) -> io::Result<Child> {
    let mut command = Command::new(&words[0]);
    // A group of its own: Ctrl-C is for the launcher, which tells the agents.
    command.args(&words[1..]).process_group(0);
    set_environment(&mut command, environment);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let tie = tie(guardian);
    // SAFETY: `tie` makes system calls on values that were made before the fork, and neither
    // allocates nor locks; its errors are plain numbers.
    unsafe { command.pre_exec(tie) };
    command.spawn()
}

/// Starts a command line of the user's that prints something and ends, in a group of its own. The
/// calling thread must outlive it, and ends it; the guardian does not know it, since it may end,
/// and its number be another's, while the job goes on.
pub(super) fn spawn_command(line: &str) -> io::Result<Child> {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", line]).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let launcher = getpid();
    let prepare = move || -> io::Result<()> {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        if getppid() != Some(launcher) {
            return Err(Errno::SRCH.into());
        }
        Ok(())
    };
    // SAFETY: `prepare` makes system calls on plain numbers, and neither allocates nor locks; its
    // errors are plain numbers, too.
    unsafe { command.pre_exec(prepare) };
    command.spawn()
}

/// What a new process does before it becomes another program, so that it cannot outlive this one:
/// system calls and nothing else.
fn tie(guardian: &Guardian) -> impl Fn() -> io::Result<()> + Send + Sync + 'static {
    let launcher = getpid();
    let line = Arc::clone(&guardian.line);
    move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The launcher may have died before the line above: then nobody will send that signal.
        if getppid() != Some(launcher) {
            return Err(Errno::SRCH.into());
        }
        let group = getpid().as_raw_nonzero().get();
        send(&*line, &group.to_ne_bytes(), SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

fn set_environment(command: &mut Command, environment: &Environment) {
    for (name, value) in &environment.0 {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
}

fn cpu_set(cpus: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    for &cpu in cpus.iter().filter(|&&cpu| cpu < CpuSet::MAX_CPU) {
        set.set(cpu);
    }
    set
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_end_is_left_and_what_was_killed_is_reaped() {
        let sleeping = || Command::new("sleep").arg("600").spawn().expect("a process");
        let (mut first, mut second) = (sleeping(), sleeping());
        first.kill().expect("it runs");
        // The order does not matter: the second one holds up nobody but for the limit.
        let held = reap_within([&mut second, &mut first], Duration::from_millis(50));
        assert_eq!(held, [second.id()]);
        let status = second.try_wait().expect("it is our child");
        assert_eq!(status, None, "nobody has ended it");
        assert!(first.try_wait().expect("it is our child").is_some());
        second.kill().expect("it runs");
        assert_eq!(reap([&mut second]), None);
        assert!(second.try_wait().expect("it is our child").is_some());
    }
}
