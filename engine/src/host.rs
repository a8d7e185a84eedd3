//! Who this host is, by which address others reach it, and how many descriptors a process may open.
//! Used once, at start.

use crate::config::Config;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

/// Pause between two attempts to find the address to listen on.
const RETRY: Duration = Duration::from_millis(250);

/// Why no address to listen on was found.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// `DMLC_INTERFACE` fits nothing.
    #[error(
        "DMLC_INTERFACE={wanted}: no network interface of that name (or prefix) has an address; \
         there are {found}"
    )]
    Interface {
        /// The variable's value.
        wanted: String,
        /// Names and addresses that exist.
        found: String,
    },
    /// A host name does not resolve.
    #[error("{variable}={host} can't be resolved: {error}; give an address of this cluster")]
    Resolve {
        /// Where the name came from.
        variable: &'static str,
        /// The name.
        host: String,
        /// What the resolver said.
        error: std::io::Error,
    },
    /// `DMLC_NODE_HOST` is another machine's.
    #[error("DMLC_NODE_HOST={address} is not an address of this machine; there are {found}")]
    NotOurs {
        /// The address.
        address: IpAddr,
        /// Names and addresses that exist.
        found: String,
    },
    /// No route to the scheduler.
    #[error(
        "no route to the scheduler at {scheduler}: {error}; check DMLC_PS_ROOT_URI or set \
         DMLC_INTERFACE"
    )]
    Route {
        /// Its address.
        scheduler: SocketAddr,
        /// What the kernel said.
        error: std::io::Error,
    },
}

/// A random number for a node that starts, by which the scheduler knows it on whichever connection
/// it comes. 0, which is nobody's, if the system has no random numbers.
#[must_use]
pub fn instance() -> u64 {
    getrandom::u64().unwrap_or(0)
}

/// Host name, for messages.
#[must_use]
pub fn name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Equal for two processes that can share memory and abstract sockets: the same boot of the same
/// kernel, and the same network namespace.
#[must_use]
pub fn id() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {}", boot.trim(), namespace.display())
}

/// The addresses of `DMLC_PS_ROOT_URI` and port.
///
/// # Errors
/// The name does not resolve.
pub fn scheduler_address(config: &Config) -> Result<SocketAddr, HostError> {
    resolve("DMLC_PS_ROOT_URI", &config.root_uri, config.root_port)
}

fn resolve(variable: &'static str, host: &str, port: u16) -> Result<SocketAddr, HostError> {
    let fail = |error| HostError::Resolve { variable, host: host.to_owned(), error };
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let mut all: Vec<SocketAddr> = (bare, port).to_socket_addrs().map_err(fail)?.collect();
    // IPv4 first: where both exist, clusters rarely route both.
    all.sort_by_key(SocketAddr::is_ipv6);
    all.first().copied().ok_or_else(|| fail(std::io::ErrorKind::NotFound.into()))
}

/// The address that this node listens on and announces: `DMLC_NODE_HOST`, else that of
/// `DMLC_INTERFACE`, else the one by which it reaches the scheduler.
///
/// # Errors
/// What is wrong with the setting that decides.
pub fn listen_address(config: &Config) -> Result<IpAddr, HostError> {
    if let Some(host) = &config.node_host {
        let address = resolve("DMLC_NODE_HOST", host, 0)?.ip();
        let all = interfaces();
        if !all.iter().any(|(_, one)| *one == address) {
            return Err(HostError::NotOurs { address, found: list(&all) });
        }
        return Ok(address);
    }
    if let Some(wanted) = &config.interface {
        let mut all = interfaces();
        all.sort_by_key(|(name, address)| (name != wanted, address.is_ipv6()));
        return match all.iter().find(|(name, _)| name.starts_with(wanted.as_str())) {
            Some((_, address)) => Ok(*address),
            None => Err(HostError::Interface { wanted: wanted.clone(), found: list(&all) }),
        };
    }
    let scheduler = scheduler_address(config)?;
    let fail = |error| HostError::Route { scheduler, error };
    let any: IpAddr = if scheduler.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    // Connecting a datagram socket sends nothing; it only asks the kernel for the route.
    let probe = UdpSocket::bind((any, 0)).map_err(fail)?;
    probe.connect(scheduler).map_err(fail)?;
    probe.local_addr().map(|local| local.ip()).map_err(fail)
}

/// As [`listen_address`], but goes on trying for up to `timeout` while a name does not resolve or
/// there is no route: the name of a scheduler that is just starting may not exist yet. `waiting` is
/// called before each further attempt with what failed; `false` ends the wait.
///
/// # Errors
/// As [`listen_address`], at once where time does not mend it.
pub fn wait_for_listen_address(
    config: &Config,
    timeout: Duration,
    mut waiting: impl FnMut(&HostError) -> bool,
) -> Result<IpAddr, HostError> {
    let start = Instant::now();
    loop {
        let error = match listen_address(config) {
            Ok(address) => return Ok(address),
            Err(error) => error,
        };
        let may_mend = matches!(error, HostError::Resolve { .. } | HostError::Route { .. });
        if !may_mend || start.elapsed() + RETRY > timeout || !waiting(&error) {
            return Err(error);
        }
        std::thread::sleep(RETRY);
    }
}

/// Raises the soft limit of open descriptors to `wanted`, as far as the hard limit allows; never
/// lowers it. Returns the limit that holds now.
///
/// A job needs a few descriptors for each lane, and the usual soft limit is made for one client.
pub fn raise_descriptor_limit(wanted: u64) -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let Some(current) = limit.current else { return u64::MAX };
    // No maximum is no limit.
    let raised = wanted.min(limit.maximum.unwrap_or(u64::MAX));
    if raised <= current {
        return current;
    }
    // It cannot fail below the hard limit; if it does, whoever runs out of descriptors says so.
    match setrlimit(Resource::Nofile, Rlimit { current: Some(raised), ..limit }) {
        Ok(()) => raised,
        Err(_) => current,
    }
}

fn list(all: &[(String, IpAddr)]) -> String {
    let items: Vec<String> =
        all.iter().map(|(name, address)| format!("{name} ({address})")).collect();
    items.join(", ")
}

/// Every interface that is up and has an address.
#[must_use]
pub fn interfaces() -> Vec<(String, IpAddr)> {
    let mut found = Vec::new();
    let mut head: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `head` is a valid place for the list, which is freed below and nowhere else.
    if unsafe { libc::getifaddrs(&raw mut head) } != 0 {
        return found;
    }
    let mut next = head;
    while !next.is_null() {
        // SAFETY: getifaddrs made a list that ends with null; it is freed after the loop.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        if entry.ifa_addr.is_null() || entry.ifa_flags & libc::IFF_UP.cast_unsigned() == 0 {
            continue;
        }
        // SAFETY: `ifa_addr` is not null and points to an address of the family that it says; the
        // casts follow it.
        let address: IpAddr = match i32::from(unsafe { (*entry.ifa_addr).sa_family }) {
            libc::AF_INET => {
                // SAFETY: the family says so.
                let v4 = unsafe { &*entry.ifa_addr.cast::<libc::sockaddr_in>() };
                Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into()
            }
            libc::AF_INET6 => {
                // SAFETY: the family says so.
                let v6 = unsafe { &*entry.ifa_addr.cast::<libc::sockaddr_in6>() };
                Ipv6Addr::from(v6.sin6_addr.s6_addr).into()
            }
            _ => continue,
        };
        // SAFETY: the name is a string that ends with zero, in the same list.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) };
        found.push((name.to_string_lossy().into_owned(), address));
    }
    // SAFETY: `head` came from getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(head) };
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config { root_uri: "127.0.0.1".into(), root_port: 9, ..Config::default() }
    }

    #[test]
    fn loopback_is_found_by_route_name_and_address() {
        let loopback: IpAddr = Ipv4Addr::LOCALHOST.into();
        assert_eq!(listen_address(&config()).unwrap(), loopback);
        let named = Config { interface: Some("lo".into()), ..config() };
        assert_eq!(listen_address(&named).unwrap(), loopback);
        let given = Config { node_host: Some("127.0.0.1".into()), ..config() };
        assert_eq!(listen_address(&given).unwrap(), loopback);
    }

    #[test]
    fn a_wrong_setting_is_named_with_what_there_is() {
        let named = Config { interface: Some("nonesuch7".into()), ..config() };
        let text = listen_address(&named).unwrap_err().to_string();
        assert!(
            text.contains("DMLC_INTERFACE=nonesuch7") && text.contains("lo (127.0.0.1)"),
            "{text}"
        );
        let given = Config { node_host: Some("192.0.2.1".into()), ..config() };
        assert!(
            listen_address(&given)
                .unwrap_err()
                .to_string()
                .contains("not an address of this machine")
        );
    }
}
