//! Connecting the lanes of a worker that has its roster: several at once, on threads of their own,
//! so that a round trip is not paid once for each lane, and whoever joins can look after the
//! scheduler meanwhile.

use crate::base::error::{Error, SettingError, Source, StartError};
use crate::job::neighbours::{Door, GroupLinks, NoSharedMemory, Wakers};
use bps_engine::base::{CoreId, Rank};
use bps_engine::config::{Config, TransportChoice};
use bps_engine::control::{JobKey, dial, dial_sealed, dial_unix};
use bps_engine::host;
use bps_engine::proto::handshake::Hello;
use bps_engine::proto::messages::{Roster, ServerPeer};
use bps_engine::trace::log;
use bps_engine::transport::Link;
use bps_engine::transport::rdma::{self, Rails, RdmaOptions};
use bps_engine::transport::shm::{self, ShmOptions};
use bps_engine::transport::tcp::sealed::Keys;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

/// Cores that are dialed at once.
const DIALS: usize = 16;
/// How long a server core that is in the roster may take to answer.
const DIAL: Duration = Duration::from_secs(10);
/// After how long people are told what is not connected yet, and how often from then on.
const TOLD_FIRST: Duration = Duration::from_secs(2);
const TOLD_AGAIN: Duration = Duration::from_secs(4);

/// What is at the other end of a lane.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Core(CoreId),
    Rank(Rank),
}

/// Lanes on their way. Dropping it ends the dialing; a thread that waits for an answer then ends by
/// its own deadline.
pub(crate) struct Dialing {
    plan: Arc<DialPlan>,
    dialed: Receiver<Dialed>,
    /// By place in the plan.
    cores: Vec<Option<Link>>,
    /// Cores that are not connected yet.
    missing: usize,
    /// `None` until the ranks of the group are connected.
    group: Option<GroupLinks>,
    begun: Instant,
    /// How long after that people are told of it next.
    told_next: Duration,
}

/// The lanes of a worker.
pub(crate) struct Links {
    /// Of the NIC loop, in the order of lane ids.
    pub(crate) nic: Vec<(End, Link)>,
    /// Of the thread of its GPU.
    pub(crate) order: Vec<(Rank, Link)>,
}

/// What every dialing thread reads.
struct DialPlan {
    config: Config,
    key: JobKey,
    roster: Roster,
    wakers: Wakers,
    rails: Option<Arc<Rails>>,
    cores: Vec<CoreId>,
    /// The next core to be dialed.
    next: AtomicUsize,
    cancelled: AtomicBool,
}

enum Dialed {
    Core(usize, Result<Link, Error>),
    Group(Result<GroupLinks, Error>),
}

impl Dialing {
    /// Begins to connect to every core of the roster, if sums pass through servers, and to the
    /// other ranks of the group, if this rank has opened its door to them.
    pub(crate) fn start(
        config: &Config,
        key: &JobKey,
        roster: &Roster,
        wakers: &Wakers,
        rails: Option<Arc<Rails>>,
        door: Option<Door>,
    ) -> Result<Dialing, Error> {
        let servers = (0u32..).zip(&roster.servers).filter(|_| roster.through_servers);
        let cores: Vec<CoreId> = servers
            .flat_map(|(server, peer)| {
                (0u32..).zip(&peer.cores).map(move |(core, _)| CoreId { server, core })
            })
            .collect();
        let missing = cores.len();
        let plan = Arc::new(DialPlan {
            config: config.clone(),
            key: key.clone(),
            roster: roster.clone(),
            wakers: wakers.clone(),
            rails,
            cores,
            next: AtomicUsize::new(0),
            cancelled: AtomicBool::new(false),
        });
        let (sender, dialed) = channel();
        for _ in 0..missing.min(DIALS) {
            let (plan, sender) = (Arc::clone(&plan), sender.clone());
            spawn("bps-dial", move || plan.dial(&sender))?;
        }
        let group = if let Some(door) = door {
            let plan = Arc::clone(&plan);
            spawn("bps-door", move || {
                let group = door.connect(&plan.key, &plan.roster, &plan.wakers);
                // Nobody waits for it if the job has ended meanwhile.
                let _ = sender.send(Dialed::Group(group));
            })?;
            None
        } else {
            Some(GroupLinks::default())
        };
        let cores = (0..missing).map(|_| None).collect();
        let (begun, told_next) = (Instant::now(), TOLD_FIRST);
        Ok(Dialing { plan, dialed, cores, missing, group, begun, told_next })
    }

    /// What is still missing, where it is time that people are told so.
    pub(crate) fn complaint(&mut self) -> Option<String> {
        let waited = self.begun.elapsed();
        if waited < self.told_next {
            return None;
        }
        self.told_next = waited + TOLD_AGAIN;
        let mut missing =
            self.plan.cores.iter().zip(&self.cores).filter(|(_, link)| link.is_none());
        let first = missing.next().map(|(core, _)| {
            let server = &self.plan.roster.servers[core.server as usize];
            let (host, pid, address) = (&server.host, server.pid, server.cores[core.core as usize]);
            format!("{core} (host {host}, pid {pid}) at {address}")
        });
        let others = match missing.count() {
            0 => None,
            1 => Some("another core".to_owned()),
            others => Some(format!("{others} other cores")),
        };
        let group = self.group.is_none().then(|| "ranks of this host".to_owned());
        let who: Vec<String> = [first, others, group].into_iter().flatten().collect();
        Some(format!(
            "rank {}: still connecting to {} ({} s of {})",
            self.plan.roster.index,
            who.join(" and "),
            waited.as_secs(),
            DIAL.as_secs()
        ))
    }

    /// All links, once they are there; `None` until then.
    ///
    /// # Errors
    /// A core or rank can't be reached.
    pub(crate) fn poll(&mut self) -> Result<Option<Links>, Error> {
        loop {
            if self.missing == 0
                && let Some(group) = self.group.take()
            {
                let ends = self.plan.cores.iter().map(|core| End::Core(*core));
                let cores = ends.zip(self.cores.drain(..).flatten());
                let GroupLinks { nic, order } = group;
                let ranks = nic.into_iter().map(|(rank, link)| (End::Rank(rank), link));
                let (nic, order) = (cores.chain(ranks).collect(), order.into_iter().collect());
                return Ok(Some(Links { nic, order }));
            }
            match self.dialed.try_recv() {
                Ok(Dialed::Core(at, link)) => {
                    self.cores[at] = Some(link?);
                    self.missing -= 1;
                }
                Ok(Dialed::Group(group)) => self.group = Some(group?),
                Err(TryRecvError::Empty) => return Ok(None),
                Err(TryRecvError::Disconnected) => {
                    return Err(StartError::ThreadEnded { task: "dials" }.into());
                }
            }
        }
    }
}

impl Drop for Dialing {
    fn drop(&mut self) {
        self.plan.cancelled.store(true, Ordering::Relaxed);
    }
}

/// What says whether two processes share memory.
pub(crate) fn host_id(config: &Config) -> String {
    config.host_id.clone().unwrap_or_else(host::id)
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let thread = std::thread::Builder::new().name(name.into()).spawn(body);
    thread.map(drop).map_err(|error| StartError::resource("no thread", error).into())
}

impl DialPlan {
    /// Dials one core after the other until none is left.
    fn dial(&self, dialed: &Sender<Dialed>) {
        while !self.cancelled.load(Ordering::Relaxed) {
            let at = self.next.fetch_add(1, Ordering::Relaxed);
            // Every core has been dialed by one of the threads.
            let Some(core) = self.cores.get(at) else { return };
            if dialed.send(Dialed::Core(at, self.connect(at, *core))).is_err() {
                return;
            }
        }
    }

    /// The lane at this place, over the transport that is configured or suits best.
    fn connect(&self, at: usize, id: CoreId) -> Result<Link, Error> {
        let (config, roster) = (&self.config, &self.roster);
        let server = &roster.servers[id.server as usize];
        let address = server.cores[id.core as usize];
        let rank = Rank(roster.index);
        let here = host_id(config);
        let shared = server.shm.as_ref().filter(|_| server.host_id == here);
        let rails = self.rails.as_ref().filter(|_| server.rdma);
        let rdma = |rails| {
            let stream = dial(address, &self.key, Hello::rdma_lane(rank, roster.epoch), DIAL);
            let stream = stream.map_err(Source::new)?;
            // The ranks of a host begin with different ports.
            let port = at + config.local_rank as usize;
            rdma::connect(stream, rails, port, RdmaOptions::default())
                .map(|link| Link::Rdma(Box::new(link)))
                .map_err(Source::new)
        };
        let tcp = || {
            if config.encrypt {
                let hello = Hello::sealed_lane(rank, roster.epoch);
                let (stream, secrets) =
                    dial_sealed(address, &self.key, hello, DIAL).map_err(Source::new)?;
                let keys = Keys { seal: secrets.to_acceptor, open: secrets.to_dialer };
                return Ok(Link::SealedTcp(stream.into(), Box::new(keys)));
            }
            dial(address, &self.key, Hello::lane(rank, roster.epoch), DIAL)
                .map(|stream| Link::Tcp(stream.into()))
                .map_err(Source::new)
        };
        let link = match (config.transport, shared, rails) {
            (TransportChoice::Auto | TransportChoice::Shm, Some(name), _) => {
                self.connect_shm(&format!("{name}.{}", id.core))
            }
            (TransportChoice::Shm, None, _) => return Err(not_here(id, server)),
            (TransportChoice::Rdma, _, None) => return Err(no_rdma(id, server)),
            (TransportChoice::Rdma, _, Some(rails)) => rdma(rails),
            (TransportChoice::Auto, None, Some(rails)) => rdma(rails).or_else(|error| {
                log::warning!("the lane to {id} goes over TCP: {error}");
                tcp()
            }),
            (TransportChoice::Auto | TransportChoice::Tcp, _, _) => tcp(),
        };
        link.map_err(|source| {
            let (host, pid) = (server.host.clone(), server.pid);
            StartError::Core { core: id, host, pid, source }.into()
        })
    }

    fn connect_shm(&self, name: &str) -> Result<Link, Source> {
        let hello = Hello::shm_lane(Rank(self.roster.index), self.roster.epoch);
        let stream = dial_unix(name, &self.key, hello, DIAL).map_err(Source::new)?;
        shm::offer(&stream, &self.wakers.nic, ShmOptions::default())
            .map(Link::Shm)
            .map_err(|error| Source::new(NoSharedMemory(error)))
    }
}

fn no_rdma(core: CoreId, server: &ServerPeer) -> Error {
    SettingError::NoRdma { core, host: server.host.clone() }.into()
}

fn not_here(core: CoreId, server: &ServerPeer) -> Error {
    SettingError::NoSharedMemory { core, host: server.host.clone() }.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use bps_engine::base::Epoch;
    use std::net::TcpListener;

    #[test]
    fn a_core_that_does_not_answer_is_named_while_it_is_waited_for() {
        // It takes connections, as the kernel does for it, and says nothing.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap();
        let server = ServerPeer {
            host: "there".into(),
            pid: 7,
            host_id: "there".into(),
            cores: vec![address; 2],
            shm: None,
            rdma: false,
        };
        let roster = Roster {
            job: "job".into(),
            term: 1,
            epoch: Epoch(1),
            size: 2,
            through_servers: true,
            index: 1,
            workers: Vec::new(),
            neighbours: Vec::new(),
            servers: vec![server],
            elastic: false,
            shrinks: false,
            change: None,
        };
        let waker = bps_engine::transport::waker::Waker::new().unwrap();
        let wakers = Wakers { nic: waker.clone(), gpu: waker };
        let (config, key) = (Config::default(), JobKey::open());
        let mut dialing = Dialing::start(&config, &key, &roster, &wakers, None, None).unwrap();
        assert_eq!(dialing.complaint(), None);
        dialing.begun -= TOLD_FIRST;
        let told = dialing.complaint().unwrap();
        let expected = format!(
            "rank 1: still connecting to server 0 core 0 (host there, pid 7) at {address} and \
             another core (2 s of 10)"
        );
        assert_eq!(told, expected);
        assert_eq!(dialing.complaint(), None);
        dialing.begun -= TOLD_AGAIN;
        assert!(dialing.complaint().unwrap().ends_with("(6 s of 10)"));
        assert!(matches!(dialing.poll(), Ok(None)));
    }
}
