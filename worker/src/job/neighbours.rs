//! How the ranks of a group find each other: each listens on an abstract socket while it joins, the
//! later of two ranks dials, and they set up shared memory for a lane between their NIC loops. The
//! first rank of a group has one more with each other: between the threads of their GPUs, should
//! they use some.

use crate::base::error::{Error, Source, StartError};
use bps_engine::base::Rank;
use bps_engine::control::{Acceptor, JobKey, Listener, Setups, Socket, abstract_name, dial_unix};
use bps_engine::proto::handshake::{Hello, Purpose};
use bps_engine::proto::messages::{Neighbour, Origin, Party, Place, Roster};
use bps_engine::trace::log;
use bps_engine::transport::shm::{self, ShmOptions};
use bps_engine::transport::{Link, Waker};
use std::collections::BTreeMap;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// How long the ranks of a host may take to connect to each other once the job has formed.
const CONNECT: Duration = Duration::from_secs(10);

/// What the lanes between threads of GPUs need: they carry words without payload.
pub(crate) const ORDER: ShmOptions = ShmOptions { slot_bytes: 4096, slots: 2 };

/// What wakes the two threads of a rank that have lanes to ranks of its group.
#[derive(Clone)]
pub(crate) struct Wakers {
    pub(crate) nic: Waker,
    pub(crate) gpu: Waker,
}

impl Wakers {
    fn of(&self, purpose: Purpose) -> &Waker {
        if purpose == Purpose::OrderLane { &self.gpu } else { &self.nic }
    }
}

/// Links to the other ranks of this rank's group, by rank.
#[derive(Default)]
pub(crate) struct GroupLinks {
    /// Of the NIC loops.
    pub(crate) nic: BTreeMap<Rank, Link>,
    /// Of the threads of their GPUs: to the first rank, or from it to all.
    pub(crate) order: BTreeMap<Rank, Link>,
}

/// Where the others of this host knock.
pub(crate) struct Door {
    name: String,
    arrivals: Receiver<(Hello, Link)>,
    /// Ends when the door is closed: all have come then.
    _acceptor: Acceptor,
}

impl Door {
    /// Listens under a random name, which leaves nothing behind in any file system.
    pub(crate) fn open(key: &JobKey, wakers: &Wakers) -> Result<Door, Error> {
        let fail = |error: std::io::Error| StartError::Listen { source: Source::new(error) };
        let name = abstract_name("bps-rank").map_err(fail)?;
        let listener = SocketAddr::from_abstract_name(&name)
            .and_then(|address| UnixListener::bind_addr(&address))
            .map_err(fail)?;
        let (sender, arrivals) = channel();
        let wakers = wakers.clone();
        let setups = Setups::default();
        let admit = move |_, hello: Hello, socket: Socket, _| {
            let (Purpose::ShmLane | Purpose::OrderLane, Socket::Unix(stream)) =
                (hello.purpose, socket)
            else {
                return log::warning!("{} knocked for something else than a lane", hello.rank);
            };
            let (sender, waker) = (sender.clone(), wakers.of(hello.purpose).clone());
            let task = move || match shm::accept(&stream, &waker, None) {
                // Whoever joins has gone if nobody takes it.
                Ok(link) => drop(sender.send((hello, Link::Shm(link)))),
                Err(error) => {
                    log::warning!("shared memory of {} could not be set up: {error}", hello.rank);
                }
            };
            // A rank that is slow to do its part must not hold up the others.
            if !setups.run(task) {
                log::warning!("too many lanes are set up at once: {} was refused", hello.rank);
            }
        };
        let listeners = vec![Listener::Unix(listener)];
        let acceptor =
            Acceptor::start(listeners, key.clone(), admit, |line| log::warning!("{line}"))
                .map_err(fail)?;
        Ok(Door { name, arrivals, _acceptor: acceptor })
    }

    /// What the others have to know.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The links to all other ranks of this rank's group.
    pub(crate) fn connect(
        self,
        key: &JobKey,
        roster: &Roster,
        wakers: &Wakers,
    ) -> Result<GroupLinks, Error> {
        let me = Rank(roster.index);
        let others: BTreeMap<Rank, &Neighbour> =
            roster.neighbours.iter().map(|peer| (peer.rank, peer)).collect();
        let first = others.keys().next().copied().filter(|rank| *rank < me);
        let mut links = GroupLinks::default();
        for (&rank, peer) in others.range(..me) {
            let offer = |hello: Hello, options| {
                dial_unix(&peer.local, key, hello, CONNECT)
                    .map_err(Source::new)
                    .and_then(|stream| {
                        shm::offer(&stream, wakers.of(hello.purpose), options)
                            .map_err(|error| Source::new(NoSharedMemory(error)))
                    })
                    .map(Link::Shm)
                    .map_err(|source| unreachable(rank, peer, source))
            };
            let epoch = roster.epoch;
            links.nic.insert(rank, offer(Hello::shm_lane(me, epoch), ShmOptions::default())?);
            if Some(rank) == first {
                links.order.insert(rank, offer(Hello::order_lane(me, epoch), ORDER)?);
            }
        }
        let until = Instant::now() + CONNECT;
        let is_first = first.is_none();
        while let Some((&rank, peer)) = others.iter().find(|(rank, _)| {
            !links.nic.contains_key(rank) || is_first && !links.order.contains_key(rank)
        }) {
            let left = until.saturating_duration_since(Instant::now());
            let Ok((hello, link)) = self.arrivals.recv_timeout(left) else {
                return Err(unreachable(rank, peer, Source::new(NotConnected)));
            };
            let is_order = hello.purpose == Purpose::OrderLane;
            let among = if is_order { &mut links.order } else { &mut links.nic };
            let is_expected = hello.epoch == roster.epoch
                && hello.rank > me
                && others.contains_key(&hello.rank)
                && (is_first || !is_order)
                && !among.contains_key(&hello.rank);
            if is_expected {
                among.insert(hello.rank, link);
            } else {
                log::warning!("a lane of {} was turned away: none is expected", hello.rank);
            }
        }
        Ok(links)
    }
}

/// Shared memory with a node of this host could not be set up.
#[derive(Debug, thiserror::Error)]
#[error("shared memory could not be set up: {0}")]
pub(crate) struct NoSharedMemory(#[source] pub(crate) std::io::Error);

/// A rank that should have dialed this one did not.
#[derive(Debug, thiserror::Error)]
#[error("it did not connect within {} s", CONNECT.as_secs())]
struct NotConnected;

fn unreachable(rank: Rank, peer: &Neighbour, source: Source) -> Error {
    let place = Some(Place { host: peer.host.clone(), pid: peer.pid });
    let peer = Origin { party: Party::Rank(rank), place };
    StartError::Neighbour { peer, source }.into()
}
