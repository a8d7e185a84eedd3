//! A folder with the launcher and scripts, a running launcher, and what it has said so far.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Far more than any of these tests needs, so that only a hang meets it.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Ends well at once, as a server does whose workers have left.
pub const ENDS: &str = "echo up; exit 0";

/// A scheduler that stays until the launcher says that all ranks have ended. It is started with
/// that signal ignored, which a shell does not change.
pub const LEADS: &str = "exec env --default-signal=USR1 sh -c '
    trap \"touch $0; exit 0\" USR1; trap \"exit 0\" TERM
    while :; do sleep 0.02; done' \"${0%/*}/over\"";

/// A server that stays as long as [`LEADS`].
pub const SERVES: &str = "trap 'exit 0' TERM; while [ ! -e \"${0%/*}/over\" ]; do sleep 0.02; done";

/// A folder that goes away with its test.
pub struct Stage(PathBuf);

impl Stage {
    /// `scheduler` and `server` are lines of sh.
    pub fn new(scheduler: &str, server: &str) -> Stage {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("bps-launch-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        let launcher = Path::new(env!("CARGO_BIN_EXE_bpslaunch"));
        // A shell writes the files: a descriptor of ours that is open for writing could be
        // inherited by what another test starts in this moment, and then the file could not be
        // executed.
        let script = "set -e; ln \"$1\" bpslaunch 2>/dev/null || cp \"$1\" bpslaunch
            printf '#!/bin/sh\\n%s\\n' \"$2\" >bps-scheduler
            printf '#!/bin/sh\\n%s\\n' \"$3\" >bps-server
            chmod +x bps-scheduler bps-server";
        let status = Command::new("sh")
            .args(["-c", script, "sh"])
            .arg(launcher)
            .args([scheduler, server])
            .current_dir(&folder)
            .status();
        assert!(status.unwrap().success());
        Stage(folder)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Starts the launcher in the folder, with no variables but these.
    pub fn start(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Launcher {
        let mut command = Command::new(self.0.join("bpslaunch"));
        command.args(arguments).current_dir(&self.0).env_clear();
        command.env("PATH", std::env::var_os("PATH").unwrap());
        // What the launcher does is not to depend on the GPUs of the machine that tests it.
        command.env("CUDA_VISIBLE_DEVICES", "");
        command.envs(variables.iter().copied());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take();
        let said = Arc::new(Mutex::new(Vec::new()));
        let errors = Arc::new(Mutex::new(Vec::new()));
        let readers = vec![
            listen(child.stdout.take().unwrap(), vec![Arc::clone(&said)]),
            listen(child.stderr.take().unwrap(), vec![Arc::clone(&said), Arc::clone(&errors)]),
        ];
        Launcher { child, input, said, errors, readers }
    }

    /// Writes a script into the folder, by a shell as above; returns its path.
    pub fn script(&self, name: &str, text: &str) -> String {
        let line = "printf '#!/bin/sh\\n%s\\n' \"$2\" >\"$1\" && chmod +x \"$1\"";
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let status = Command::new("sh").args(["-c", line, "sh"]).arg(&path).arg(text).status();
        assert!(status.unwrap().success());
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn listen(
    stream: impl Read + Send + 'static,
    said: Vec<Arc<Mutex<Vec<String>>>>,
) -> JoinHandle<()> {
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines() {
            let line = line.unwrap();
            said.iter().for_each(|lines| lines.lock().unwrap().push(line.clone()));
        }
    })
}

/// A running launcher.
pub struct Launcher {
    pub child: Child,
    input: Option<ChildStdin>,
    said: Arc<Mutex<Vec<String>>>,
    errors: Arc<Mutex<Vec<String>>>,
    readers: Vec<JoinHandle<()>>,
}

impl Launcher {
    pub fn lines(&self) -> Vec<String> {
        self.said.lock().unwrap().clone()
    }

    /// What came on standard error, which goes on growing.
    pub fn errors(&self) -> Arc<Mutex<Vec<String>>> {
        Arc::clone(&self.errors)
    }

    pub fn write(&mut self, text: &str) {
        self.input.as_mut().unwrap().write_all(text.as_bytes()).unwrap();
    }

    pub fn signal(&self, signal: &str) {
        let process = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &process]).status().unwrap().success());
    }

    /// Waits until this many lines contain `text`, and returns them.
    pub fn wait_for(&self, text: &str, count: usize) -> Vec<String> {
        let mut found = Vec::new();
        until(&format!("{count} lines with {text:?}"), || {
            let lines = self.lines();
            found = lines.iter().filter(|line| line.contains(text)).cloned().collect();
            if found.len() >= count { Ok(()) } else { Err(format!("{lines:#?}")) }
        });
        found
    }

    /// Waits until the launcher has ended and nobody holds its output any more. Returns its code
    /// (or
    /// `None` if a signal ended it) and all lines.
    pub fn finish(mut self) -> (Option<i32>, Vec<String>) {
        drop(self.input.take());
        let mut status = None;
        until("the launcher ends", || {
            status = self.child.try_wait().unwrap();
            if status.is_some() { Ok(()) } else { Err(format!("{:#?}", self.lines())) }
        });
        until("its output closes", || {
            let open = self.readers.iter().any(|reader| !reader.is_finished());
            if open { Err("somebody holds it".to_owned()) } else { Ok(()) }
        });
        (status.unwrap().code(), self.lines())
    }
}

/// The number after `word` in each of the lines.
pub fn numbers(lines: &[String], word: &str) -> Vec<u32> {
    let rest = lines.iter().filter_map(|line| line.split_once(word));
    rest.map(|(_, rest)| rest.split_whitespace().next().unwrap().parse().unwrap()).collect()
}

/// Waits until none of the processes runs. One that nobody has reaped yet does not run.
pub fn all_gone(processes: &[u32]) {
    until("the processes are gone", || {
        let left: Vec<_> = processes.iter().filter(|process| runs(**process)).collect();
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?} run")) }
    });
}

pub fn runs(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Polls until `condition` holds; after [`PATIENCE`] it fails with what the condition complained
/// of.
pub fn until(what: &str, mut condition: impl FnMut() -> Result<(), String>) {
    let begun = Instant::now();
    while let Err(complaint) = condition() {
        assert!(begun.elapsed() < PATIENCE, "waited in vain until {what}: {complaint}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Asserts that some line equals `wanted`.
pub fn has(lines: &[String], wanted: &str) {
    assert!(lines.iter().any(|line| line == wanted), "no line {wanted:?} in {lines:#?}");
}

/// Asserts that some line contains `wanted`.
pub fn mentions(lines: &[String], wanted: &str) {
    assert!(lines.iter().any(|line| line.contains(wanted)), "no {wanted:?} in {lines:#?}");
}
