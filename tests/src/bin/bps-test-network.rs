//! A network that fails on demand, for tests that are not in Rust. `bps-test-network HOSTS` makes
//! hosts, says for each where its network namespace and its address are, and does what the lines of
//! its standard input say: `FROM TO pass`, `FROM TO block`, or `FROM TO BYTES`, the largest packet
//! that arrives. Each is answered by `ok`. The network ends with the input.

use bps_tests::network::{Network, Rule};
use std::io::{BufRead, Write};

fn main() {
    let hosts = std::env::args().nth(1).and_then(|text| text.parse().ok());
    let hosts: usize = hosts.expect("usage: bps-test-network HOSTS");
    // Where there can be none, that was said.
    let Some(network) = Network::new(hosts) else { return };
    for host in 0..hosts {
        say(&format!("{} {}", network.namespace(host), network.address(host)));
    }
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let (from, to, rule) = order(&line).unwrap_or_else(|| panic!("what is `{line}`?"));
        assert!(from < hosts && to < hosts, "there are {hosts} hosts: `{line}`");
        network.set(from, to, rule);
        say("ok");
    }
}

/// From which host, to which, and what is to become of the packets.
fn order(line: &str) -> Option<(usize, usize, Rule)> {
    let mut words = line.split_whitespace();
    let from = words.next()?.parse().ok()?;
    let to = words.next()?.parse().ok()?;
    let rule = match words.next()? {
        "pass" => Rule::default(),
        "block" => Rule::BLOCK,
        bytes => Rule::mtu(bytes.parse().ok()?),
    };
    Some((from, to, rule))
}

fn say(line: &str) {
    let mut output = std::io::stdout().lock();
    // Whoever does not read any more has closed the input, too.
    let _ = writeln!(output, "{line}").and_then(|()| output.flush());
}
