//! Hosts made of network namespaces, with shaped links between them, on one machine.
//!
//! A stage is a bridge in a namespace of its own and one namespace for each host, with a veth pair
//! between; a token bucket at both ends of the pair gives each direction the rate of the link. The
//! machine's own network is not touched.
//!
//! Invariant: no namespace has a name. Each lives as long as this process holds it open or a
//! process of the stage runs in it, and the kernel kills those processes when this one ends. So
//! nothing stays behind, however it ends: in good order, by a signal, or by a panic.

mod crew;
pub mod job;
mod namespace;
pub mod overtake;
pub mod rank;
pub mod stream;

pub use crew::{Crew, Member};
pub use namespace::{enter, program_path, within_command};

use namespace::Namespace;
use std::net::Ipv4Addr;
use std::process::Command;

/// Hosts that a stage may have: each is named by the last number of its address.
const HOSTS_MAX: u32 = 250;
/// Smallest token bucket. A bucket must hold the largest packet that a host may hand over whole, or
/// the kernel cuts each into single packets in software.
const BURST_BYTES_MIN: u64 = 128 << 10;
/// The bucket holds what the link carries in this time: the kernel may be late by a millisecond.
const BURST_SECONDS: f64 = 0.002;
/// What a host hands over whole takes this time on the link at most, if that is not below the
/// smallest bundle. A switch queues packets; here a queue takes or drops a bundle whole, and one
/// for 20 ms of a slow link holds only four of the largest.
const BUNDLE_SECONDS: f64 = 0.001;
/// Smallest and largest bundle; the largest is what the kernel takes if nothing is said.
const BUNDLE_BYTES: [u64; 2] = [16 << 10, 64 << 10];

/// One direction of every link.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Bits a second, headers of the network included.
    pub rate_bits: u64,
    /// Longest time that a packet waits in front of a link; what would wait longer is dropped.
    pub queue_ms: u32,
    /// The congestion control of every connection, instead of the machine's.
    pub congestion: Option<String>,
    /// Largest send buffer that the kernel gives a connection by itself, bytes.
    pub sndbuf_bytes: Option<u32>,
    /// The kernel's own setting for connections that were idle, instead of the one that
    /// docs/running.md advises.
    pub as_is: bool,
}

/// A stage. See the [module](self).
pub struct Stage {
    hosts: Vec<Namespace>,
    hub: Namespace,
}

/// Why hosts can't be staged on this machine, or `None` if they can.
pub fn unavailable() -> Option<String> {
    for tool in ["ip", "tc"] {
        if let Err(error) = Command::new(tool).arg("-V").output() {
            return Some(format!("`{tool}` can't be run ({error}): install the package iproute2"));
        }
    }
    let probe = Namespace::new().and_then(|one| {
        // A bridge and a token bucket are what a kernel may lack.
        one.ip("link add name probe type bridge\nlink set probe up\n")?;
        one.tc("probe", 1_000_000_000, BURST_BYTES_MIN, 20)
    });
    probe.err().map(|error| format!("network namespaces can't be staged here: {error}"))
}

impl Stage {
    /// Sets up so many hosts.
    ///
    /// # Errors
    /// What the kernel or `ip` said; nothing is left behind then.
    pub fn new(hosts: u32, shape: &Shape) -> Result<Stage, String> {
        if hosts == 0 || hosts > HOSTS_MAX {
            return Err(format!("{hosts} hosts: from 1 to {HOSTS_MAX} can be staged"));
        }
        let hub = Namespace::new()?;
        hub.ip("link add name bridge type bridge\nlink set bridge up\n")?;
        let mut all = Vec::new();
        for index in 0..hosts {
            let host = Namespace::new()?;
            // As docs/running.md advises for hosts that train: for ours and for the peer.
            let restarts = if shape.as_is { "1" } else { "0" };
            host.set("net/ipv4/tcp_slow_start_after_idle", restarts)?;
            if let Some(bytes) = shape.sndbuf_bytes {
                let middle = bytes.min(16 << 10);
                host.set("net/ipv4/tcp_wmem", &format!("4096 {middle} {bytes}"))?;
            }
            let (port, other) = (port(index as usize), host.path());
            hub.ip(&format!(
                "link add name {port} type veth peer name eth0 netns {other}\n\
                 link set {port} master bridge\nlink set {port} up\n"
            ))?;
            let address = Stage::address(index);
            host.ip(&format!(
                "link set lo up\naddress add {address}/24 dev eth0\nlink set eth0 up\n"
            ))?;
            if let Some(name) = &shape.congestion {
                // By the route: the namespace's own setting takes only what the whole machine
                // allows to everybody.
                host.ip(&format!(
                    "route replace 10.0.0.0/24 dev eth0 src {address} congctl {name}\n"
                ))?;
            }
            all.push(host);
        }
        let stage = Stage { hosts: all, hub };
        stage.shape(shape.rate_bits, shape.queue_ms)?;
        Ok(stage)
    }

    /// Gives every link another rate, while its connections live on.
    pub fn shape(&self, rate_bits: u64, queue_ms: u32) -> Result<(), String> {
        let (burst, bundle) = (burst_bytes(rate_bits), bundle_bytes(rate_bits));
        for (index, host) in self.hosts.iter().enumerate() {
            // Connections that live keep the bundles of when they were made.
            host.ip(&format!("link set eth0 gso_max_size {bundle}\n"))?;
            self.hub.tc(&port(index), rate_bits, burst, queue_ms)?;
            host.tc("eth0", rate_bits, burst, queue_ms)?;
        }
        Ok(())
    }

    /// Hosts.
    pub fn hosts(&self) -> u32 {
        u32::try_from(self.hosts.len()).expect("at most HOSTS_MAX")
    }

    /// A host's address on the stage. Hosts count from 0.
    pub fn address(host: u32) -> Ipv4Addr {
        Ipv4Addr::new(10, 0, 0, u8::try_from(host + 1).expect("at most HOSTS_MAX"))
    }

    /// A command that runs a program on a host, without this process's variables.
    pub fn command(&self, host: u32, program: impl AsRef<std::ffi::OsStr>) -> Command {
        self.hosts[host as usize].command(program)
    }
}

/// The bridge's end of a host's link.
fn port(host: usize) -> String {
    format!("host{host}")
}

/// Bytes of the token bucket of a link.
fn burst_bytes(rate_bits: u64) -> u64 {
    bytes_in(rate_bits, BURST_SECONDS).max(BURST_BYTES_MIN)
}

/// Bytes that a host may hand over whole.
fn bundle_bytes(rate_bits: u64) -> u64 {
    let [least, most] = BUNDLE_BYTES;
    bytes_in(rate_bits, BUNDLE_SECONDS).clamp(least, most)
}

/// What a link carries in so many seconds.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rates are far below 2^53 and not negative"
)]
fn bytes_in(rate_bits: u64, seconds: f64) -> u64 {
    (rate_bits as f64 / 8.0 * seconds) as u64
}

/// A rate as people write it, in bits a second: powers of 1000.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let scale: u64 = match &text[digits.len()..] {
        "" | "bit" => 1,
        "K" | "kbit" => 1_000,
        "M" | "mbit" => 1_000_000,
        "G" | "gbit" => 1_000_000_000,
        unit => return Err(format!("unknown unit {unit:?}: use mbit or gbit")),
    };
    let number: u64 = digits.parse().map_err(|error| format!("{digits:?}: {error}"))?;
    let rate = number.checked_mul(scale).filter(|rate| (1_000_000..=400 * GIGA).contains(rate));
    rate.ok_or_else(|| "from 1mbit to 400gbit".to_string())
}

const GIGA: u64 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_units() {
        assert_eq!(parse_rate("500mbit"), Ok(500_000_000));
        assert_eq!(parse_rate("10G"), Ok(10 * GIGA));
        assert_eq!(parse_rate("2000000"), Ok(2_000_000));
        for wrong in ["", "0", "500", "1T", "401gbit", "-1mbit"] {
            assert!(parse_rate(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_bucket_holds_two_milliseconds_and_the_largest_packet() {
        assert_eq!(burst_bytes(10 * GIGA), 2_500_000);
        assert_eq!(burst_bytes(1_000_000), BURST_BYTES_MIN);
    }

    #[test]
    fn a_bundle_takes_a_millisecond_between_its_bounds() {
        assert_eq!(bundle_bytes(100_000_000), BUNDLE_BYTES[0]);
        assert_eq!(bundle_bytes(400_000_000), 50_000);
        assert_eq!(bundle_bytes(10 * GIGA), BUNDLE_BYTES[1]);
    }
}
