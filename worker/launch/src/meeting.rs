//! Where the nodes of a job on several machines meet: the scheduler's machine, and the addresses by
//! which machines reach each other.
//!
//! Names are for people and for ssh, whose configuration may lead them anywhere. What counts is the
//! address at which ssh has reached a machine, which the machine knows from its login.

#![forbid(unsafe_code)]

use super::error::LaunchError;
use super::frames::Hello;
use super::layout::Site;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};

/// Addresses of the machines of a job, from what their agents have said.
pub(super) struct Meeting<'a> {
    sites: &'a [Site],
    hellos: Vec<&'a Hello>,
    /// `--interface`, by the beginning of its name.
    interface: Option<&'a str>,
}

impl<'a> Meeting<'a> {
    pub(super) fn new(
        sites: &'a [Site],
        hellos: Vec<&'a Hello>,
        interface: Option<&'a str>,
    ) -> Meeting<'a> {
        Meeting { sites, hellos, interface }
    }

    /// Whether nobody has to be reached through a network.
    pub(super) fn is_here(&self) -> bool {
        self.sites.iter().all(|site| site.is_local)
    }

    /// The address by which the others reach a machine: that of the interface that the user names,
    /// else the one that ssh uses, else what its name means here.
    pub(super) fn address_of(&self, index: usize) -> Result<String, LaunchError> {
        let (site, hello) = (&self.sites[index], self.hellos[index]);
        if let Some(wanted) = self.interface {
            return self.address_of_interface(index, wanted);
        }
        if self.is_here() {
            return Ok("127.0.0.1".to_owned());
        }
        let address = if site.is_local {
            self.local_address()
        } else {
            connection(hello).map(|(_, server)| server).or_else(|| resolve(&site.host.name))
        };
        let name = || match site.is_local {
            true => bps_engine::host::name(),
            false => site.host.name.clone(),
        };
        Ok(address.map_or_else(name, |address| address.to_string()))
    }

    fn address_of_interface(&self, index: usize, wanted: &str) -> Result<String, LaunchError> {
        let all = &self.hellos[index].interfaces;
        let mut found: Vec<_> = all.iter().filter(|(name, _)| name.starts_with(wanted)).collect();
        // As nodes choose: the exact name first, and IPv4 before IPv6.
        found.sort_by_key(|(name, address)| (name != wanted, address.contains(':')));
        found.first().map(|(_, address)| address.clone()).ok_or_else(|| {
            let all = all.iter().map(|(name, address)| format!("{name} ({address})"));
            LaunchError::Conflict {
                problem: format!(
                    "{} has no network interface {wanted} with an address; there are {}",
                    self.sites[index].host.name,
                    all.collect::<Vec<_>>().join(", ")
                ),
                remedy: "give --interface the beginning of a name that all machines have"
                    .to_owned(),
            }
        })
    }

    /// The launcher's own address as the first of the others sees it, if that is really its own
    /// (between them may be a gateway that changes addresses); else the one by which it would reach
    /// that machine.
    fn local_address(&self) -> Option<IpAddr> {
        let other = self.sites.iter().position(|site| !site.is_local)?;
        let own: Vec<IpAddr> =
            bps_engine::host::interfaces().into_iter().map(|(_, address)| address).collect();
        let seen = connection(self.hellos[other]);
        if let Some((client, _)) = seen {
            return own.contains(&client).then_some(client);
        }
        route_to(resolve(&self.sites[other].host.name)?)
    }

    /// Whether the launcher's machine has an address that is worth trying from the others.
    pub(super) fn local_candidate(&self) -> Option<IpAddr> {
        match self.interface {
            Some(wanted) => {
                let local = self.sites.iter().position(|site| site.is_local)?;
                self.address_of_interface(local, wanted).ok()?.parse().ok()
            }
            None => self.local_address(),
        }
    }
}

/// The addresses of both ends of ssh's connection, the launcher's first. Other ways to a machine,
/// such as srun, hand on the variable of a login to another one: its address is not that of the
/// agent's machine.
fn connection(hello: &Hello) -> Option<(IpAddr, IpAddr)> {
    let mut words = hello.connection.split_whitespace();
    let client = words.next()?.parse().ok()?;
    let server: IpAddr = words.nth(1)?.parse().ok()?;
    let is_own = |(_, own): &(String, String)| own.parse() == Ok(server);
    hello.interfaces.iter().any(is_own).then_some((client, server))
}

/// What a name means here, IPv4 first as everywhere. A name of this machine's own loopback
/// interface would mislead the others.
fn resolve(name: &str) -> Option<IpAddr> {
    let mut all: Vec<SocketAddr> = (name, 0).to_socket_addrs().ok()?.collect();
    all.sort_by_key(SocketAddr::is_ipv6);
    all.into_iter().map(|address| address.ip()).find(|address| !address.is_loopback())
}

/// This machine's address on the way to another.
fn route_to(address: IpAddr) -> Option<IpAddr> {
    let any = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    // Connecting a datagram socket sends nothing; it only asks the kernel for the route.
    let probe = UdpSocket::bind(any).ok()?;
    probe.connect((address, 9)).ok()?;
    probe.local_addr().ok().map(|local| local.ip())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hosts::Host;

    fn site(name: &str, is_local: bool) -> Site {
        let host = Host { user: None, name: name.to_owned(), count: None };
        Site { host, is_local, worker_id: None, servers: Vec::new() }
    }

    fn hello(connection: &str) -> Hello {
        let interfaces = [
            ("eth0", "fd00::2"),
            ("eth0", "10.0.0.2"),
            ("eth01", "10.1.0.2"),
            ("ib7", "192.0.2.7"),
        ];
        let interfaces = interfaces.map(|(name, address)| (name.to_owned(), address.to_owned()));
        Hello {
            connection: connection.to_owned(),
            interfaces: interfaces.to_vec(),
            ..Hello::default()
        }
    }

    #[test]
    fn machines_are_where_ssh_has_reached_them() {
        let sites = [site("localhost", true), site("gpu-a", false)];
        let hellos = [hello(""), hello("127.0.0.1 4 192.0.2.7 22")];
        let meeting = Meeting::new(&sites, hellos.iter().collect(), None);
        assert_eq!(meeting.address_of(1).unwrap(), "192.0.2.7");
        assert_eq!(meeting.address_of(0).unwrap(), "127.0.0.1");
        // Behind a gateway the others see an address that is not ours.
        let hellos = [hello(""), hello("192.0.2.99 4 192.0.2.7 22")];
        let meeting = Meeting::new(&sites, hellos.iter().collect(), None);
        assert_eq!(meeting.local_candidate(), None);
        for broken in [
            "",
            "x",
            "1.2.3.4",
            "1.2.3.4 5",
            "a b c d",
            "192.0.2.1 5 192.0.2.2 22",
            "fe80::1%eth0 1 fe80::2 2",
        ] {
            assert_eq!(connection(&hello(broken)), None, "{broken}");
        }
    }

    #[test]
    fn an_interface_beats_all_and_must_be_there() {
        let sites = [site("a", false), site("b", false)];
        let hellos = [hello("127.0.0.1 4 192.0.2.7 22"), hello("")];
        let meeting = |interface| Meeting::new(&sites, hellos.iter().collect(), Some(interface));
        assert_eq!(meeting("eth0").address_of(0).unwrap(), "10.0.0.2");
        assert_eq!(meeting("eth01").address_of(0).unwrap(), "10.1.0.2");
        let error = meeting("ib0").address_of(1).unwrap_err().to_string();
        assert!(error.contains("b has no network interface ib0") && error.contains("eth01 (10.1"));
    }

    #[test]
    fn on_one_machine_all_meet_on_loopback() {
        let sites = [site("localhost", true)];
        let hellos = [hello("")];
        let meeting = Meeting::new(&sites, hellos.iter().collect(), None);
        assert!(meeting.is_here());
        assert_eq!(meeting.address_of(0).unwrap(), "127.0.0.1");
    }
}
