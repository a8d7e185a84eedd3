//! The real programs as child processes: started, listened to, measured, and always ended.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Lines of a program's output that are kept, the newest.
const LINES_MAX: usize = 2000;

/// Lines that are shown when a test fails.
const LINES_SHOWN: usize = 40;

/// What a program has said so far.
#[derive(Default)]
struct Said {
    lines: Vec<String>,
    /// Lines in all, those that are not kept included.
    count: u64,
    ended: bool,
}

/// A running program. It is killed when this is dropped.
pub struct Program {
    name: String,
    child: Child,
    said: Arc<(Mutex<Said>, Condvar)>,
    listener: Option<JoinHandle<()>>,
}

/// Where cargo put a program of this workspace.
///
/// # Panics
/// If it is not there: building the tests does not build the programs.
#[must_use]
pub fn path(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its own path");
    let path = test.ancestors().nth(2).expect("tests are in <profile>/deps").join(name);
    assert!(path.exists(), "{} is not built: cargo build --workspace --bins", path.display());
    path
}

impl Program {
    /// Starts a program of this workspace with these variables and none of ours from outside.
    ///
    /// # Panics
    /// If it cannot be started.
    #[must_use]
    pub fn start(name: &str, arguments: &[&str], variables: &[(&str, String)]) -> Program {
        Program::start_in("exec \"$@\"", name, arguments, variables)
    }

    /// As [`start`](Self::start), from a shell script that sets the stage and ends with
    /// `exec "$@"`.
    ///
    /// # Panics
    /// As there.
    #[must_use]
    pub fn start_in(
        script: &str,
        name: &str,
        arguments: &[&str],
        variables: &[(&str, String)],
    ) -> Program {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script, "sh"]).arg(path(name));
        for (variable, _) in std::env::vars_os() {
            let variable = variable.to_string_lossy().into_owned();
            if ["BPS_", "BYTEPS_", "DMLC_", "PS_"].iter().any(|ours| variable.starts_with(ours)) {
                command.env_remove(variable);
            }
        }
        command.args(arguments).envs(variables.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{name}: {error}"));
        let output = BufReader::new(child.stderr.take().expect("it was asked for"));
        let said = Arc::new((Mutex::new(Said::default()), Condvar::new()));
        let heard = Arc::clone(&said);
        let listener = std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let mut said = heard.0.lock().unwrap_or_else(PoisonError::into_inner);
                said.count += 1;
                if said.lines.len() == LINES_MAX {
                    said.lines.drain(..LINES_MAX / 2);
                }
                said.lines.push(line);
                heard.1.notify_all();
            }
            heard.0.lock().unwrap_or_else(PoisonError::into_inner).ended = true;
            heard.1.notify_all();
        });
        Program { name: name.to_owned(), child, said, listener: Some(listener) }
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line that holds `words`, and returns it.
    ///
    /// # Panics
    /// If it does not come in time.
    #[must_use]
    pub fn wait_for_line(&self, words: &str, timeout: Duration) -> String {
        let until = Instant::now() + timeout;
        let mut said = self.said.0.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(line) = said.lines.iter().find(|line| line.contains(words)) {
                return line.clone();
            }
            let left = until.saturating_duration_since(Instant::now());
            let goes_on = !left.is_zero() && !said.ended;
            assert!(goes_on, "{} did not say `{words}` within {timeout:?}", self.name);
            let waited = self.said.1.wait_timeout(said, left);
            said = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The lines that it said, the newest of them.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.said.0.lock().unwrap_or_else(PoisonError::into_inner).lines.clone()
    }

    /// How many lines it said in all.
    #[must_use]
    pub fn lines_said(&self) -> u64 {
        self.said.0.lock().unwrap_or_else(PoisonError::into_inner).count
    }

    /// Whether it still runs.
    ///
    /// # Panics
    /// If the kernel does not say.
    #[must_use]
    pub fn runs(&mut self) -> bool {
        self.child.try_wait().expect("it is our child").is_none()
    }

    /// Bytes of memory that it has in RAM now.
    ///
    /// # Panics
    /// If it has ended.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        let path = format!("/proc/{}/status", self.pid());
        let status = std::fs::read_to_string(&path).expect("it runs");
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let kilobytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
        kilobytes.unwrap_or_else(|| panic!("{} has ended: {path} has no VmRSS", self.name)) * 1024
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// If it has ended.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = i32::try_from(self.pid()).ok().and_then(rustix::process::Pid::from_raw);
        rustix::process::kill_process(pid.expect("a child has a pid"), signal).expect("it runs");
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// If it does not end in time.
    pub fn wait(&mut self, timeout: Duration) -> ExitStatus {
        let until = Instant::now() + timeout;
        let mut said = self.said.0.lock().unwrap_or_else(PoisonError::into_inner);
        while !said.ended {
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{} did not end within {timeout:?}", self.name);
            let waited = self.said.1.wait_timeout(said, left);
            said = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(said);
        // It has closed its output: all that is left to do is to end.
        self.child.wait().expect("it is our child")
    }
}

/// A node of which a line says twice where it runs, as `rank 1 (host a, pid 7)`: once a message is
/// enough. Two nodes may be one process.
fn told_twice(line: &str) -> Option<&str> {
    let mut told: Vec<&str> = Vec::new();
    for (at, _) in line.match_indices(" (host ") {
        let length = line[at..].find(')')? + 1;
        let place = &line[at..at + length];
        if !place.contains(", pid ") {
            continue;
        }
        let words = line[..at].rmatch_indices(' ').nth(1).map_or(0, |(space, _)| space + 1);
        let node = &line[words..at + length];
        if told.contains(&node) || line[..at].ends_with(place) {
            return Some(node);
        }
        told.push(node);
    }
    None
}

impl Drop for Program {
    fn drop(&mut self) {
        let ended = self.child.try_wait().ok().flatten();
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
        if std::thread::panicking() {
            let lines = self.lines();
            let last = &lines[lines.len().saturating_sub(LINES_SHOWN)..];
            let state = ended.map_or("it ran until now".to_owned(), |status| status.to_string());
            eprintln!("--- {} ({state}) said last:\n{}", self.name, last.join("\n"));
            return;
        }
        for line in &self.lines() {
            let node = told_twice(line);
            assert_eq!(node, None, "{} said twice in one line where it runs: {line}", self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::told_twice;

    #[test]
    fn a_place_that_is_named_twice_is_found() {
        let twice = "rank 1 (host a, pid 7) died; rank 1 (host a, pid 7) was late";
        assert_eq!(told_twice(twice), Some("rank 1 (host a, pid 7)"));
        assert!(told_twice("rank 1 (host a, pid 7) (host a, pid 7) died").is_some());
        let once = "rank 1 (host a, pid 7), rank 2 (host a, pid 7), 3 (host a), 3 (host a)";
        assert_eq!(told_twice(once), None);
    }
}
