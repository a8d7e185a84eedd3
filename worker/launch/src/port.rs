//! Reserves a port for a process that is started later.

#![forbid(unsafe_code)]

use super::error::LaunchError;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::OwnedFd;

/// A free port of the loopback interface, and the socket that keeps it free for the scheduler.
///
/// Two sockets may share a port if both ask for it (`SO_REUSEADDR`, which listeners set) and at
/// most one listens. The kernel gives a port that is bound in this way to nobody who asks for any
/// port.
pub(super) fn reserve_port() -> Result<(u16, OwnedFd), LaunchError> {
    reserve(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0).into())
        .map_err(|source| LaunchError::System { what: "no port of loopback is free", source })
}

/// As [`reserve_port`], on every address of this machine: of IPv6, too, where there is that.
pub(super) fn reserve_port_for_others() -> Result<(u16, OwnedFd), LaunchError> {
    reserve(SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, 0, 0, 0).into())
        .or_else(|_| reserve(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0).into()))
        .map_err(|source| LaunchError::System { what: "no port is free", source })
}

fn reserve(address: SocketAddr) -> std::io::Result<(u16, OwnedFd)> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket_with(
        family,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        Some(ipproto::TCP),
    )?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    let address = SocketAddr::try_from(rustix::net::getsockname(&socket)?)?;
    Ok((address.port(), socket))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_reserved_port_takes_one_listener_and_is_given_to_nobody() {
        let (port, _socket) = reserve_port().unwrap();
        let listener = TcpListener::bind(("127.0.0.1", port)).expect("the scheduler can listen");
        assert!(TcpListener::bind(("127.0.0.1", port)).is_err());
        drop(listener);
        let (port, _socket) = reserve_port_for_others().unwrap();
        let listener = TcpListener::bind(("127.0.0.1", port)).expect("the scheduler can listen");
        drop(listener);
        for _ in 0..200 {
            let other = TcpListener::bind("127.0.0.1:0").unwrap();
            assert_ne!(other.local_addr().unwrap().port(), port);
        }
    }
}
