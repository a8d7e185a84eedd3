//! Where the cores of a server listen: a TCP port and an abstract Unix socket each. It knows
//! nothing of who connects.

use crate::run::ServerError;
use bps_engine::config::{Config, TransportChoice};
use bps_engine::control::Listener;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixListener};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The listeners of all cores in order, and their addresses.
pub(crate) fn listen_tcp(
    config: &Config,
    address: IpAddr,
) -> Result<(Vec<Listener>, Vec<SocketAddr>), ServerError> {
    let mut listeners = Vec::new();
    let mut addresses = Vec::new();
    for core in 0..config.server_cores {
        let port = match config.port {
            0 => 0,
            first => u16::try_from(u32::from(first) + core).map_err(|_| {
                ServerError::Config(format!(
                    "DMLC_PORT={first}: with {} cores the last port is over 65535",
                    config.server_cores
                ))
            })?,
        };
        let fail = |error: std::io::Error| ServerError::Listen {
            address: format!("{address}:{port}"),
            remedy: match error.kind() {
                std::io::ErrorKind::AddrInUse => {
                    "another process has this port: leave DMLC_PORT unset, or choose another"
                }
                std::io::ErrorKind::AddrNotAvailable => {
                    "this machine does not have that address: check DMLC_NODE_HOST and \
                     DMLC_INTERFACE"
                }
                _ => "check DMLC_PORT, DMLC_NODE_HOST and DMLC_INTERFACE",
            },
            error,
        };
        let listener = TcpListener::bind((address, port)).map_err(fail)?;
        addresses.push(listener.local_addr().map_err(fail)?);
        listeners.push(Listener::Tcp(listener));
    }
    Ok((listeners, addresses))
}

/// One abstract socket for each core, `NAME.CORE`: it leaves nothing behind in any file system.
pub(crate) fn listen_unix(config: &Config) -> Result<(Vec<Listener>, Option<String>), ServerError> {
    if matches!(config.transport, TransportChoice::Tcp | TransportChoice::Rdma) {
        return Ok((Vec::new(), None));
    }
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("bps-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let mut listeners = Vec::new();
    for core in 0..config.server_cores {
        let name = format!("{name}.{core}");
        let bound = UnixAddress::from_abstract_name(&name)
            .and_then(|address| UnixListener::bind_addr(&address));
        let listener = bound.map_err(|error| ServerError::Listen {
            address: format!("unix socket @{name}"),
            error,
            remedy: "another process has this name: start the server again, or set \
                     BPS_TRANSPORT=tcp",
        })?;
        listeners.push(Listener::Unix(listener));
    }
    Ok((listeners, Some(name)))
}
