//! Reserves a port of the loopback interface for a process that is started later.

#![forbid(unsafe_code)]

use super::error::LaunchError;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;

/// A free port of the loopback interface, and the socket that keeps it free for the scheduler.
///
/// Two sockets may share a port if both ask for it (`SO_REUSEADDR`, which listeners set) and at
/// most one listens. The kernel gives a port that is bound in this way to nobody who asks for any
/// port.
pub(super) fn reserve_port() -> Result<(u16, OwnedFd), LaunchError> {
    let failed = |source: rustix::io::Errno| LaunchError::System {
        what: "no port of the loopback interface is free",
        source: source.into(),
    };
    let socket = rustix::net::socket_with(
        AddressFamily::INET,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        Some(ipproto::TCP),
    )
    .map_err(failed)?;
    sockopt::set_socket_reuseaddr(&socket, true).map_err(failed)?;
    rustix::net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
    let address = rustix::net::getsockname(&socket).map_err(failed)?;
    let address = SocketAddr::try_from(address).map_err(failed)?;
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
        for _ in 0..200 {
            let other = TcpListener::bind("127.0.0.1:0").unwrap();
            assert_ne!(other.local_addr().unwrap().port(), port);
        }
    }
}
