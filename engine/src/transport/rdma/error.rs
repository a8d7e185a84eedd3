//! Why there is no RDMA, and why a lane over it ended.

#![forbid(unsafe_code)]

use super::ffi;
use super::ports::Port;
use crate::transport::Cause;
use rustix::process::{Resource, getrlimit};
use std::io;

/// What a peer that breaks the rules of a lane is closed with.
pub(super) const BROKEN: Cause = Cause::Os(libc::EPROTO);

/// Why there is no RDMA.
#[derive(Debug, thiserror::Error)]
pub enum RdmaError {
    /// libibverbs can't be used.
    #[error(
        "{0}: install libibverbs1 and the driver of the device (package ibverbs-providers or \
         rdma-core)"
    )]
    Library(String),
    /// No active port with an address.
    #[error(
        "no active RDMA port{}: see `rdma link` and `ibv_devinfo`; a container needs \
         /dev/infiniband and /sys/class/infiniband",
        interface.as_ref().map_or(String::new(), |name| format!(
            " of an interface that begins with {name} (DMLC_INTERFACE)"
        ))
    )]
    NoPort {
        /// What was asked for.
        interface: Option<String>,
    },
    /// The kernel has the device and the library does not.
    #[error(
        "{port} is in /sys/class/infiniband but libibverbs does not list it: install its driver \
         (package ibverbs-providers), and give a container /dev/infiniband"
    )]
    Driver {
        /// Which.
        port: String,
    },
    /// A call failed.
    #[error("{call} failed on {port}: {source}: see `rdma link`, and dmesg for the device's word")]
    Call {
        /// Which call.
        call: &'static str,
        /// On which port.
        port: String,
        /// What the library or the kernel said.
        source: io::Error,
    },
    /// Memory can't be locked for the device.
    #[error(
        "registering {need} bytes with {port} failed: {source}: RLIMIT_MEMLOCK is {limit}, for all \
         that this process registers; raise it (ulimit -l unlimited, LimitMEMLOCK=infinity of a \
         systemd unit, docker run --ulimit memlock=-1, MaxLockedMemory or propagated limits of the \
         cluster's scheduler)"
    )]
    Locked {
        /// Bytes that this registration needs.
        need: usize,
        /// The limit in words.
        limit: String,
        /// With which port.
        port: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// Memory of a GPU can't be registered.
    #[error(
        "{port} can't reach memory of a GPU: {source}: its driver must take dma-buf (kernel 5.12, \
         libibverbs 34)"
    )]
    DmaBuf {
        /// The port.
        port: String,
        /// What the library or the kernel said.
        source: io::Error,
    },
    /// Memory of a GPU is registered, and a trial fails.
    #[error("{port} does not reach memory of a GPU as it should: {what}")]
    Direct {
        /// The port.
        port: String,
        /// What was seen.
        what: String,
    },
    /// Tensors can't be sent from in place.
    #[error("{0}: tensors are copied before they are sent")]
    OnDemand(String),
    /// Two ports have each other's addresses, and nothing that one sends reaches the other.
    #[error(
        "{port} and the peer's port can't reach each other: {what}; see whether \
         `ibv_rc_pingpong` works between them: a firewall that drops UDP port 4791, a VLAN, a \
         route, or a smaller MTU on the way"
    )]
    Path {
        /// Our port.
        port: String,
        /// Which way is dead.
        what: &'static str,
    },
    /// The peer does not do its part.
    #[error("the peer's part of RDMA is wrong: {0}")]
    Peer(String),
    /// The peer says that it can't.
    #[error("the peer has no RDMA for this lane: {0}")]
    Refused(String),
    /// The stream that the lane is set up over failed.
    #[error("the connection over which RDMA is set up failed: {0}")]
    Stream(#[source] io::Error),
}

impl RdmaError {
    /// A call that set errno.
    pub(super) fn last(call: &'static str, port: &Port) -> RdmaError {
        RdmaError::Call { call, port: port.to_string(), source: io::Error::last_os_error() }
    }

    pub(super) fn locked(need: usize, port: String, source: io::Error) -> RdmaError {
        let limit = getrlimit(Resource::Memlock).current;
        let limit = limit.map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
        RdmaError::Locked { need, limit, port, source }
    }
}

/// What a status of a completion means, and what to do.
pub(in crate::transport) fn status_text(status: i32) -> &'static str {
    match status {
        super::LOST => "its completion queue was lost: see dmesg for the device's word",
        1 | 2 | 4 | 6 | 8 => {
            "the device could not carry out an operation of this end: its port or interface went \
             down (see `rdma link` and dmesg), or a defect"
        }
        5 => "the connection was stopped: the device was reset or removed; see dmesg",
        9 | 11 => "the peer's device refused an operation: a defect, or the device",
        10 => "the peer does not allow access to its memory: a defect, or not our peer",
        12 => {
            "no answer after all retries: the peer is gone, or a link, port or switch between is \
             down; see `rdma link` on both, and for RoCE whether the fabric is lossless"
        }
        13 => "the peer had no place to receive",
        20 | 21 => "the device reported a fatal error: see dmesg",
        _ => "the device reported an error that ibv_wc_status lists",
    }
}

/// What an event of a device means, and what to do.
pub(in crate::transport) fn event_text(event: i32) -> &'static str {
    match event {
        ffi::EVENT_CQ_ERR => "its completion queue overran or broke: a defect, or the device",
        ffi::EVENT_QP_FATAL => "the connection met a fatal error: see dmesg",
        ffi::EVENT_QP_REQ_ERR => "the peer sent what breaks the protocol of the connection",
        ffi::EVENT_QP_ACCESS_ERR => "the peer tried to reach memory that it may not",
        ffi::EVENT_DEVICE_FATAL => "the device failed, or was reset or removed: see dmesg",
        ffi::EVENT_PORT_ERR => {
            "the port went down: see `rdma link` and `ip link`, the cable and the switch"
        }
        _ => "the device reported an event that ibv_event_type lists",
    }
}
