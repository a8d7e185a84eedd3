//! Where the cores of a server listen, a TCP port and an abstract Unix socket each, and how a
//! connection becomes a lane of its core.

#![forbid(unsafe_code)]

use crate::cores::ShardHandle;
use crate::error::{ServerError, resource};
use crate::shard::Command;
use bps_engine::config::{Config, TransportChoice};
use bps_engine::control::{Acceptor, JobKey, Listener, Secrets, Setups, Socket, abstract_name};
use bps_engine::proto::handshake::{Hello, Purpose};
use bps_engine::trace::log;
use bps_engine::transport;
use bps_engine::transport::tcp::sealed::Keys;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixListener};

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
            first => u16::try_from(u32::from(first) + core)
                .map_err(|_| ServerError::Ports { first, cores: config.server_cores })?,
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
/// Workers learn the name from the roster.
pub(crate) fn listen_unix(config: &Config) -> Result<(Vec<Listener>, Option<String>), ServerError> {
    if matches!(config.transport, TransportChoice::Tcp | TransportChoice::Rdma) {
        return Ok((Vec::new(), None));
    }
    let name = abstract_name("bps").map_err(|error| resource("a random name", error))?;
    let mut listeners = Vec::new();
    for core in 0..config.server_cores {
        let name = format!("{name}.{core}");
        let bound = UnixAddress::from_abstract_name(&name)
            .and_then(|address| UnixListener::bind_addr(&address));
        let listener = bound.map_err(|error| ServerError::Listen {
            address: format!("unix socket @{name}"),
            error,
            remedy: "set BPS_TRANSPORT=tcp to do without shared memory",
        })?;
        listeners.push(Listener::Unix(listener));
    }
    Ok((listeners, Some(name)))
}

/// Accepts for all cores: listener `i` is core `i mod cores`, first over TCP, then over Unix
/// sockets; with `encrypt`, over TCP only lanes that are encrypted, else only those that are not.
/// Lanes that have more to agree on than the handshake are set up on threads of their own.
pub(crate) fn start_acceptor(
    listeners: Vec<Listener>,
    key: JobKey,
    encrypt: bool,
    shards: Vec<ShardHandle>,
) -> Result<Acceptor, ServerError> {
    let setups = Setups::default();
    let admit = move |index: usize, hello: Hello, socket: Socket, secrets: Secrets| {
        let shard = &shards[index % shards.len()];
        match (hello.purpose, socket) {
            (Purpose::Lane, socket @ Socket::Tcp(_)) if !encrypt => {
                attach(shard, hello, transport::Link::Tcp(socket.into()));
            }
            (Purpose::SealedLane, socket @ Socket::Tcp(_)) if encrypt => {
                let keys = Keys { seal: secrets.to_dialer, open: secrets.to_acceptor };
                attach(shard, hello, transport::Link::SealedTcp(socket.into(), Box::new(keys)));
            }
            (Purpose::ShmLane, Socket::Unix(stream)) => {
                let make = move |shard: &ShardHandle| {
                    let link = shard.accept(&stream);
                    link.map_err(|error| format!("shared memory could not be set up: {error}"))
                };
                set_up(&setups, shard, hello, make);
            }
            (Purpose::RdmaLane, Socket::Tcp(stream)) if !encrypt => {
                let make = move |shard: &ShardHandle| {
                    let link = shard.accept_rdma(stream);
                    link.map_err(|error| format!("RDMA could not be set up: {error}"))
                };
                set_up(&setups, shard, hello, make);
            }
            (Purpose::Lane | Purpose::SealedLane | Purpose::RdmaLane, Socket::Tcp(_)) => {
                log::warning!(
                    "the lane of {} was turned away: it {} to be encrypted, and here \
                     BPS_ENCRYPT={}: set the same on every node",
                    hello.rank,
                    if hello.purpose == Purpose::SealedLane { "is" } else { "is not" },
                    u8::from(encrypt)
                );
            }
            (purpose, _) => {
                log::warning!("a {purpose:?} connection of {} does not belong here", hello.rank);
            }
        }
    };
    Acceptor::start(listeners, key, admit, |line| log::warning!("{line}"))
        .map_err(|error| resource("the accepting thread", error))
}

/// Makes a lane on a thread of its own, and attaches it.
fn set_up(
    setups: &Setups,
    shard: &ShardHandle,
    hello: Hello,
    make: impl FnOnce(&ShardHandle) -> Result<transport::Link, String> + Send + 'static,
) {
    let shard = shard.clone();
    let task = move || match make(&shard) {
        Ok(link) => attach(&shard, hello, link),
        Err(error) => log::warning!("the lane of {}: {error}", hello.rank),
    };
    if !setups.run(task) {
        log::warning!("the lane of {} was turned away: too many are set up at once", hello.rank);
    }
}

fn attach(shard: &ShardHandle, hello: Hello, link: transport::Link) {
    let command = Command::Attach { link, rank: hello.rank, epoch: hello.epoch };
    if let Err(error) = shard.send(command) {
        log::warning!("the lane of {} was turned away: {error}", hello.rank);
    }
}
