//! Lists of machines, as people write them: `host1:4,user@host2`, a file with a line for each, and
//! `cpu1:8` for servers.

#![forbid(unsafe_code)]

use super::error::LaunchError;
use std::collections::HashSet;
use std::fmt;
use std::path::Path;

/// Machines in one list.
const HOSTS_MAX: usize = 4096;
/// Bytes of a name; DNS allows fewer.
const NAME_BYTES_MAX: usize = 255;

/// A machine, and how much of it the list gives away.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Host {
    /// Whom to log in as, where the list says so.
    pub(super) user: Option<String>,
    /// Name or address, without brackets.
    pub(super) name: String,
    /// Ranks or cores, where the list says how many.
    pub(super) count: Option<u32>,
}

/// What the number behind a host counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Counted {
    Ranks,
    Cores,
}

impl Counted {
    fn max(self) -> u32 {
        let max = match self {
            Counted::Ranks => bps_engine::limits::RANKS_MAX,
            Counted::Cores => bps_engine::limits::CORES_MAX,
        };
        bps_engine::base::word(max)
    }
}

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Counted::Ranks => "ranks",
            Counted::Cores => "cores",
        })
    }
}

/// The machines of a list with commas; `origin` is the flag, for errors.
pub(super) fn parse_list(
    text: &str,
    origin: &str,
    counted: Counted,
) -> Result<Vec<Host>, LaunchError> {
    let hosts = text.split(',').map(|item| parse_host(item.trim(), counted));
    let hosts = hosts.collect::<Result<Vec<_>, _>>().map_err(|why| wrong(origin, &why))?;
    check(hosts, origin)
}

/// The machines of a file.
pub(super) fn read_file(path: &Path) -> Result<Vec<Host>, LaunchError> {
    let origin = format!("--hostfile {}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| LaunchError::Conflict {
        problem: format!("{origin} cannot be read: {error}"),
        remedy: "give a file with a line such as 'host1 slots=4' for each machine".to_owned(),
    })?;
    parse_file(&text, &origin)
}

/// The machines that a command has printed.
pub(super) fn parse_answer(text: &str) -> Result<Vec<Host>, String> {
    parse_file(text, "its output").map_err(|error| match error {
        LaunchError::Conflict { problem, .. } => problem,
        other => other.to_string(),
    })
}

fn parse_file(text: &str, origin: &str) -> Result<Vec<Host>, LaunchError> {
    let mut hosts = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let host =
            parse_line(line).map_err(|why| wrong(&format!("{origin}, line {number}"), &why))?;
        hosts.push(host);
    }
    check(hosts, origin)
}

/// `host`, `host:4` or `host slots=4`.
fn parse_line(line: &str) -> Result<Host, String> {
    let mut words = line.split_whitespace();
    let mut host = parse_host(words.next().unwrap_or_default(), Counted::Ranks)?;
    for word in words {
        let Some(("slots", count)) = word.split_once('=') else {
            return Err(format!(
                "'{word}' is not known there; a line is 'host1', 'host1:4' or 'host1 slots=4'"
            ));
        };
        if host.count.is_some() {
            return Err(format!("'{line}' says twice how many ranks"));
        }
        host.count = Some(parse_count(count, Counted::Ranks)?);
    }
    Ok(host)
}

/// `host`, `user@host`, `host:4`, `[address of IPv6]:4`.
fn parse_host(item: &str, counted: Counted) -> Result<Host, String> {
    let (user, place) = match item.split_once('@') {
        Some((user, place)) => (Some(user), place),
        None => (None, item),
    };
    let (name, count) = if let Some(rest) = place.strip_prefix('[') {
        let Some((name, rest)) = rest.split_once(']') else {
            return Err(format!("'{item}' has '[' without ']'"));
        };
        if name.parse::<std::net::Ipv6Addr>().is_err() {
            return Err(format!("'{name}' in brackets is no IPv6 address"));
        }
        match rest.strip_prefix(':') {
            _ if rest.is_empty() => (name, None),
            Some(count) => (name, Some(count)),
            None => return Err(format!("'{rest}' behind the brackets of '{item}'")),
        }
    } else if place.matches(':').count() > 1 {
        return Err(format!("'{item}': an IPv6 address stands in brackets, as in [fd00::1]:4"));
    } else {
        match place.split_once(':') {
            Some((name, count)) => (name, Some(count)),
            None => (place, None),
        }
    };
    if let Some(user) = user {
        check_name(user, item, "the user's name", "_-.+")?;
    }
    check_name(name, item, "the host's name", "_-.:")?;
    let count = count.map(|count| parse_count(count, counted)).transpose()?;
    Ok(Host { user: user.map(str::to_owned), name: name.to_owned(), count })
}

/// Names become words of ssh's command line: none may look like an option, or mean something to a
/// shell.
fn check_name(name: &str, item: &str, what: &str, also: &str) -> Result<(), String> {
    if name.is_empty() {
        return Err(format!("'{item}': {what} is empty"));
    }
    if name.len() > NAME_BYTES_MAX {
        return Err(format!("{what} has {} characters", name.len()));
    }
    let is_allowed = |c: char| c.is_alphanumeric() || also.contains(c);
    match name.chars().find(|c| !is_allowed(*c)) {
        Some(c) => Err(format!("'{item}': {what} has {c:?} in it")),
        None if name.starts_with('-') => Err(format!("'{item}': {what} begins with a dash")),
        None => Ok(()),
    }
}

fn parse_count(text: &str, counted: Counted) -> Result<u32, String> {
    let max = counted.max();
    match text.parse() {
        Ok(count @ 1..) if count <= max => Ok(count),
        _ => Err(format!("'{text}' is no number of {counted} from 1 to {max}")),
    }
}

/// Refuses a list without machines, or with one twice.
fn check(hosts: Vec<Host>, origin: &str) -> Result<Vec<Host>, LaunchError> {
    if hosts.is_empty() {
        return Err(wrong(origin, "there is no host in it"));
    }
    if hosts.len() > HOSTS_MAX {
        return Err(wrong(origin, &format!("{} hosts are more than {HOSTS_MAX}", hosts.len())));
    }
    let mut seen = HashSet::new();
    match hosts.iter().find(|host| !seen.insert(host.name.as_str())) {
        Some(host) => {
            let why = format!("{0} stands there twice; write {0}:4 for four", host.name);
            Err(wrong(origin, &why))
        }
        None => Ok(hosts),
    }
}

fn wrong(origin: &str, why: &str) -> LaunchError {
    LaunchError::Conflict {
        problem: format!("{origin}: {why}"),
        remedy: "hosts are listed as host1:4,host2:4".to_owned(),
    }
}

/// Whether the launcher's own machine goes by this name: then nobody has to log in.
pub(super) fn is_local(name: &str) -> bool {
    let own = bps_engine::host::name();
    let short = own.split('.').next().unwrap_or_default();
    if name == "localhost" || !own.is_empty() && (name == own || name == short) {
        return true;
    }
    let Ok(address) = name.parse::<std::net::IpAddr>() else { return false };
    address.is_loopback() || bps_engine::host::interfaces().iter().any(|(_, one)| *one == address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> Result<Vec<Host>, String> {
        parse_list(text, "--hosts", Counted::Ranks).map_err(|error| error.to_string())
    }

    fn host(user: Option<&str>, name: &str, count: Option<u32>) -> Host {
        Host { user: user.map(str::to_owned), name: name.to_owned(), count }
    }

    #[test]
    fn lists_name_users_hosts_and_numbers() {
        let hosts = list("host1:4, me@host2,10.0.0.3:16,[fd00::1]:2,root@[::1]").unwrap();
        let wanted = [
            host(None, "host1", Some(4)),
            host(Some("me"), "host2", None),
            host(None, "10.0.0.3", Some(16)),
            host(None, "fd00::1", Some(2)),
            host(Some("root"), "::1", None),
        ];
        assert_eq!(hosts, wanted);
    }

    #[test]
    fn what_is_wrong_is_quoted() {
        let long = "x".repeat(NAME_BYTES_MAX + 1);
        for (text, words) in [
            ("", "name is empty"),
            ("a,,b", "name is empty"),
            (":4", "name is empty"),
            ("@a", "user's name is empty"),
            ("a:0", "'0' is no number of ranks from 1 to 4096"),
            ("a:", "'' is no number"),
            ("a:4097", "'4097'"),
            ("a:-1", "'-1'"),
            ("a:four", "'four'"),
            ("a:4,b:4,a:2", "a stands there twice"),
            ("fd00::1", "in brackets, as in [fd00::1]:4"),
            ("[fd00::1", "without ']'"),
            ("[host]:4", "no IPv6 address"),
            ("[::1]4", "'4' behind the brackets"),
            ("-oProxyCommand=x", "has '=' in it"),
            ("-l", "begins with a dash"),
            ("-l@host", "begins with a dash"),
            ("a b", "has ' ' in it"),
            ("a;reboot", "has ';' in it"),
            ("$(x)", "has '$' in it"),
            (&long, "256 characters"),
        ] {
            let error = list(text).expect_err(text);
            assert!(error.starts_with("--hosts: ") && error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn files_have_comments_and_say_which_line_is_wrong() {
        let text = "# all\nhost1 slots=4\n\n  host2:4 # the new one\nme@host3\t slots=2\n[::1]\n";
        let wanted = [
            host(None, "host1", Some(4)),
            host(None, "host2", Some(4)),
            host(Some("me"), "host3", Some(2)),
            host(None, "::1", None),
        ];
        assert_eq!(parse_file(text, "f").unwrap(), wanted);
        for (text, words) in [
            ("", "no host in it"),
            ("# nothing\n", "no host in it"),
            ("a\nb slots=0", "line 2: '0' is no number"),
            ("a\n\nb slot=1", "line 3: 'slot=1' is not known there"),
            ("a:2 slots=2", "says twice how many"),
            ("a slots=1 slots=2", "says twice how many"),
            ("a\nb\na slots=3", "a stands there twice"),
            ("10.0.0.1:22222", "'22222' is no number of ranks"),
        ] {
            let error = parse_file(text, "--hostfile f").unwrap_err().to_string();
            assert!(error.contains(words), "{text:?}: {error}");
        }
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let error = read_file(Path::new("/nonexistent/hosts")).unwrap_err();
        assert!(error.to_string().contains("--hostfile /nonexistent/hosts cannot be read"));
        assert_eq!(error.code(), 2);
    }

    #[test]
    fn this_machine_is_known_by_its_names() {
        for name in ["localhost", "127.0.0.1", "::1", &bps_engine::host::name()] {
            assert!(is_local(name), "{name}");
        }
        for name in ["192.0.2.1", "no-such-host.example", "2001:db8::1"] {
            assert!(!is_local(name), "{name}");
        }
    }
}
