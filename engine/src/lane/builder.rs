//! Puts the transports of an endpoint together: the only place that does.
//!
//! Server cores, NIC loops and GPU threads say what they need, by lanes or by name; which settings
//! a transport takes and how its sleep is joined to the thread's waker is decided here.

#![forbid(unsafe_code)]

use super::Endpoint;
use crate::config::Config;
use crate::mem::Arena;
use crate::team::Team;
use crate::transport::rdma::{Rails, Rdma};
use crate::transport::shm::Shm;
use crate::transport::tcp::{Tcp, TcpError};
use crate::transport::{Link, Transport, Waker};
use std::io;
use std::sync::Arc;

/// Why a transport could not be made.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// TCP, for the reason that it gives.
    #[error("TCP: {0}")]
    Tcp(#[from] TcpError),
    /// Shared memory: the kernel gives no descriptor.
    #[error("shared memory: {0}")]
    Shm(io::Error),
    /// RDMA: the kernel gives no descriptor, or the waker can't watch one more.
    #[error("RDMA: {0}")]
    Rdma(io::Error),
}

/// How many of some links go by which transport.
#[derive(Clone, Default)]
pub struct Needs {
    /// Lanes over TCP.
    pub tcp: u32,
    /// Lanes over shared memory.
    pub shm: u32,
    /// Lanes over RDMA.
    pub rdma: u32,
    /// The devices of the RDMA lanes; all lanes of a thread have the same ones.
    pub rails: Option<Arc<Rails>>,
}

impl Needs {
    /// Counts links. Simulated ones need nothing that is made here.
    pub fn of<'links>(links: impl IntoIterator<Item = &'links Link>) -> Needs {
        let mut needs = Needs::default();
        for link in links {
            match link {
                Link::Tcp(_) | Link::SealedTcp(..) => needs.tcp += 1,
                Link::Shm(_) => needs.shm += 1,
                Link::Rdma(link) => {
                    needs.rdma += 1;
                    needs.rails.get_or_insert_with(|| Arc::clone(link.rails()));
                }
                Link::Sim(_) => {}
            }
        }
        needs
    }
}

/// An endpoint in the making. Transports are polled in the order in which they are added.
pub struct EndpointBuilder<'config> {
    config: &'config Config,
    waker: Waker,
    team: Team,
    transports: Vec<Transport>,
    descriptions: Vec<String>,
}

impl<'config> EndpointBuilder<'config> {
    /// An endpoint without transports, to be polled by the thread that this waker wakes.
    #[must_use]
    pub fn new(config: &'config Config, waker: Waker) -> EndpointBuilder<'config> {
        let (team, transports, descriptions) = Default::default();
        EndpointBuilder { config, waker, team, transports, descriptions }
    }

    /// Payloads that pass through memory are copied by this team, where transports are added after
    /// this.
    #[must_use]
    pub fn with_team(self, team: Team) -> EndpointBuilder<'config> {
        EndpointBuilder { team, ..self }
    }

    /// Adds what these links need.
    ///
    /// # Errors
    /// The first transport that could not be made.
    pub fn with_needs(self, needs: &Needs) -> Result<EndpointBuilder<'config>, BuildError> {
        let mut builder = self;
        if needs.tcp > 0 {
            // Lane ids are shared by all transports of an endpoint, and TCP has a table of them.
            builder = builder.tcp(needs.tcp + needs.shm + needs.rdma)?;
        }
        if needs.shm > 0 {
            builder = builder.shm(None)?;
        }
        match &needs.rails {
            Some(rails) => builder.rdma(Arc::clone(rails)),
            None => Ok(builder),
        }
    }

    /// Adds TCP, for an endpoint of at most so many lanes of all kinds. To be called on the thread
    /// that polls: an io_uring belongs to the thread that made it.
    ///
    /// # Errors
    /// The driver that the settings demand is not available.
    pub fn tcp(mut self, lanes_max: u32) -> Result<EndpointBuilder<'config>, BuildError> {
        let tcp = Tcp::new(self.waker.clone(), self.config.tcp_driver, lanes_max)?
            .with_congestion(self.config.tcp_congestion.clone())
            .with_offload(self.config.tcp_offload)
            .with_send_buffer(self.config.tcp_send_buffer as usize)
            .with_silence(self.config.lane_silence());
        self.descriptions.push(tcp.description());
        self.transports.push(Transport::Tcp(tcp));
        Ok(self)
    }

    /// Adds shared memory. `shared` is the arena whose memfd peers map: payloads in it are sent by
    /// reference.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn shm(mut self, shared: Option<&Arena>) -> Result<EndpointBuilder<'config>, BuildError> {
        let shm = Shm::new(self.waker.clone()).map_err(BuildError::Shm)?;
        let mut shm = shm.with_team(self.team.clone());
        if let Some(arena) = shared {
            shm.share(arena);
        }
        self.transports.push(Transport::Shm(shm));
        Ok(self)
    }

    /// Adds RDMA over these devices.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn rdma(mut self, rails: Arc<Rails>) -> Result<EndpointBuilder<'config>, BuildError> {
        let description = rails.description();
        let rdma = Rdma::new(self.waker.clone(), rails).map_err(BuildError::Rdma)?;
        // TCP sleeps on the waker alone, where there is TCP.
        self.waker.watch(rdma.fd()).map_err(BuildError::Rdma)?;
        self.descriptions.push(description);
        self.transports.push(Transport::Rdma(Box::new(rdma)));
        Ok(self)
    }

    /// The endpoint, and what its transports say of themselves, for the line at start: drivers and
    /// devices.
    #[must_use]
    pub fn build(self) -> (Endpoint, Vec<String>) {
        let checksums = self.config.payload_checksum;
        let endpoint = Endpoint::new(self.transports, self.waker).with_checksums(checksums);
        (endpoint, self.descriptions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn links_are_counted_and_their_transports_made() {
        let (left, _right) = UnixStream::pair().unwrap();
        let links = [Link::Tcp(OwnedFd::from(left))];
        let needs = Needs::of(&links);
        assert_eq!((needs.tcp, needs.shm, needs.rdma, needs.rails.is_none()), (1, 0, 0, true));
        let config = Config::default();
        let builder = EndpointBuilder::new(&config, Waker::new().unwrap());
        let (mut endpoint, descriptions) = builder.with_needs(&needs).unwrap().build();
        assert_eq!(descriptions.len(), 1, "TCP names its driver: {descriptions:?}");
        for link in links {
            endpoint.attach(link).expect("there is a transport for it");
        }
    }

    #[test]
    fn a_link_without_its_transport_is_refused() {
        let (left, _right) = UnixStream::pair().unwrap();
        let config = Config::default();
        let builder = EndpointBuilder::new(&config, Waker::new().unwrap()).shm(None).unwrap();
        let (mut endpoint, descriptions) = builder.build();
        assert!(descriptions.is_empty() && !endpoint.reaches_memory());
        let refused = endpoint.attach(Link::Tcp(OwnedFd::from(left))).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::Unsupported);
    }
}
