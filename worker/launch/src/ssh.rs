//! How an agent is started on another machine, and why that failed.

#![forbid(unsafe_code)]

use super::error::LaunchError;
use super::layout::Site;
use bps_engine::config::LaunchConfig;
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

/// ssh's own code where it has failed itself.
const SSH_FAILED: i32 = 255;
/// Seconds between two questions of ssh whether the other end lives; after three without an answer
/// it gives up.
const ALIVE_SECONDS: u32 = 15;

/// The words that start the agent of a site.
pub(super) fn command(
    site: &Site,
    launch: &LaunchConfig,
    program: &[String],
) -> Result<Vec<OsString>, LaunchError> {
    if site.is_local {
        return Ok(program.iter().map(OsString::from).chain(["--agent".into()]).collect());
    }
    let program = match &launch.remote_program {
        Some(text) => split(text, "--remote-program")?,
        None => program.to_vec(),
    };
    let mut words = split(&launch.ssh_command, "--ssh-command")?;
    let is_ssh = Path::new(&words[0]).file_name().is_some_and(|name| name == "ssh");
    let user = site.host.user.as_ref().or(launch.ssh_user.as_ref());
    if !is_ssh {
        // Another way to a machine, such as srun: it is given the command as it is.
        if launch.ssh_port != 0 {
            return Err(LaunchError::Conflict {
                problem: format!("--ssh-port, but --ssh-command is {}, not ssh", words[0]),
                remedy: "put its own options into --ssh-command".to_owned(),
            });
        }
        let user = user.map(|user| format!("{user}@")).unwrap_or_default();
        words.push(format!("{user}{}", site.host.name));
        words.extend(program);
        words.push("--agent".to_owned());
        return Ok(words.into_iter().map(OsString::from).collect());
    }
    let seconds = launch.ssh_timeout.as_secs().max(1);
    // The user's own options stand before these, and the first of a kind is the one that counts.
    for option in [
        "BatchMode=yes".to_owned(),
        format!("ConnectTimeout={seconds}"),
        format!("ServerAliveInterval={ALIVE_SECONDS}"),
    ] {
        words.extend(["-o".to_owned(), option]);
    }
    words.push("-T".to_owned());
    if launch.ssh_port != 0 {
        words.extend(["-p".to_owned(), launch.ssh_port.to_string()]);
    }
    if let Some(user) = user {
        words.extend(["-l".to_owned(), user.clone()]);
    }
    words.push(site.host.name.clone());
    // The login shell of the other machine reads this as a line.
    let mut line = "exec".to_owned();
    for word in &program {
        line.push(' ');
        line.push_str(&quote(word));
    }
    line.push_str(" --agent");
    words.push(line);
    Ok(words.into_iter().map(OsString::from).collect())
}

fn split(text: &str, flag: &str) -> Result<Vec<String>, LaunchError> {
    match shlex::split(text) {
        Some(words) if !words.is_empty() => Ok(words),
        _ => Err(LaunchError::Conflict {
            problem: format!("{flag} '{text}' is no command"),
            remedy: "give words as for a shell, with quotes that are closed".to_owned(),
        }),
    }
}

/// A word that every shell reads as it is.
fn quote(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Why there was no agent on a machine: `said` is what came on standard error, `code` how the
/// connection's process ended.
pub(super) fn why_not(site: &Site, program: &str, code: Option<i32>, said: &str) -> String {
    let host = &site.host.name;
    let has = |text: &str| said.contains(text);
    let last = said.lines().rev().map(str::trim).find(|line| !line.is_empty());
    let told = last.map(|line| format!(": {line}")).unwrap_or_default();
    if !site.is_local && code == Some(SSH_FAILED) {
        let remedy = if has("Permission denied") {
            format!(
                "bpslaunch asks for no password: log in by a key (ssh-copy-id {host}, or ssh-add)"
            )
        } else if has("Host key verification failed") {
            format!("log in once by hand (ssh {host}), or add its key to known_hosts")
        } else {
            format!("see whether 'ssh -o BatchMode=yes {host} true' works")
        };
        return format!("cannot log in{told}; {remedy}");
    }
    match code {
        Some(126 | 127) => format!(
            "there is no {program}{told}; install byteps at the same path as here, or name it with \
             --remote-program"
        ),
        Some(code) if has("No module named") => format!(
            "byteps is not installed for {program} (code {code}{told}); install it there, or name \
             another bpslaunch with --remote-program"
        ),
        Some(code) => format!("{program} --agent left with code {code}{told}"),
        None => format!("the connection was killed{told}"),
    }
}

/// Why an agent that had answered is there no more.
pub(super) fn why_lost(site: &Site, code: Option<i32>, said: &str) -> String {
    let last = said.lines().rev().map(str::trim).find(|line| !line.is_empty());
    let told = last.map(|line| format!(": {line}")).unwrap_or_default();
    match code {
        Some(SSH_FAILED) if !site.is_local => format!("ssh has lost the connection{told}"),
        Some(code) => format!("bpslaunch left there with code {code}{told}"),
        None => format!("the connection was killed{told}"),
    }
}

/// A machine that has not answered in time.
pub(super) fn too_late(timeout: Duration, said: &str) -> String {
    let last = said.lines().rev().map(str::trim).find(|line| !line.is_empty());
    let told = last.map(|line| format!(" (it said: {line})")).unwrap_or_default();
    format!(
        "no answer within {} s{told}; see whether it is up, or give it longer with --ssh-timeout",
        timeout.as_secs_f64()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hosts::{Counted, parse_list};
    use bps_engine::config::Config;

    fn site(text: &str, is_local: bool) -> Site {
        let host = parse_list(text, "--hosts", Counted::Ranks).unwrap().remove(0);
        Site { host, is_local, worker_id: None, servers: Vec::new() }
    }

    fn words(site: &Site, change: impl FnOnce(&mut LaunchConfig)) -> Vec<String> {
        let mut launch = Config::default().launch;
        change(&mut launch);
        let program = ["/opt/my venv/python".to_owned(), "-m".to_owned(), "it's".to_owned()];
        let words = command(site, &launch, &program).unwrap();
        words.into_iter().map(|word| word.into_string().unwrap()).collect()
    }

    #[test]
    fn the_remote_shell_reads_one_quoted_line() {
        let options = "-o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15 -T";
        let all = words(&site("host1:4", false), |_| {});
        let line = all.last().unwrap();
        assert_eq!(line, r"exec '/opt/my venv/python' -m 'it'\''s' --agent");
        assert_eq!(all[..all.len() - 1].join(" "), format!("ssh {options} host1"));
        let all = words(&site("me@[fd00::1]", false), |launch| {
            launch.ssh_command = "/usr/bin/ssh -i 'a key'".into();
            launch.ssh_port = 2222;
            launch.ssh_user = Some("you".into());
            launch.remote_program = Some("/opt/bpslaunch".into());
        });
        assert_eq!(all[..3], ["/usr/bin/ssh", "-i", "a key"]);
        let rest = format!("{options} -p 2222 -l me fd00::1 exec /opt/bpslaunch --agent");
        assert_eq!(all[3..].join(" "), rest);
    }

    #[test]
    fn other_commands_are_given_words_and_no_options() {
        let all = words(&site("host1", false), |launch| {
            launch.ssh_command = "srun --nodelist".into();
        });
        assert_eq!(
            all,
            ["srun", "--nodelist", "host1", "/opt/my venv/python", "-m", "it's", "--agent"]
        );
        let launch =
            LaunchConfig { ssh_command: "srun".into(), ssh_port: 22, ..Config::default().launch };
        assert!(command(&site("a", false), &launch, &["x".into()]).is_err());
        for wrong in ["", "ssh -i 'open"] {
            let launch = LaunchConfig { ssh_command: wrong.into(), ..Config::default().launch };
            assert!(command(&site("a", false), &launch, &["x".into()]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn nobody_logs_in_to_this_machine() {
        let all = words(&site("localhost:2", true), |_| {});
        assert_eq!(all, ["/opt/my venv/python", "-m", "it's", "--agent"]);
    }

    #[test]
    fn failures_name_their_remedies() {
        let host = site("host1", false);
        let why = |code, said| why_not(&host, "/p", code, said);
        for (code, said, words) in [
            (Some(255), "me@host1: Permission denied (publickey).\r\n", "ssh-copy-id host1"),
            (Some(255), "Host key verification failed.\n", "known_hosts"),
            (Some(255), "ssh: connect to host host1 port 22: No route to host\n", "No route"),
            (Some(127), "sh: 1: exec: /p: not found\n", "--remote-program"),
            (Some(1), "/p: No module named byteps\n", "byteps is not installed"),
            (Some(3), "", "left with code 3"),
            (None, "", "was killed"),
        ] {
            assert!(why(code, said).contains(words), "{}", why(code, said));
        }
        assert!(too_late(Duration::from_secs(5), "").starts_with("no answer within 5 s;"));
    }
}
