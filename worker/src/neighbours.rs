//! How the ranks of a group find each other: each listens on an abstract socket while it joins, the
//! later of two ranks dials, and they set up shared memory for one lane.

use crate::error::Error;
use bps_engine::base::Rank;
use bps_engine::control::{Acceptor, JobKey, Listener, Setups, Socket, abstract_name, dial_unix};
use bps_engine::proto::handshake::{Hello, Purpose};
use bps_engine::proto::messages::{Neighbour, Roster};
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

/// Where the others of this host knock.
pub(crate) struct Door {
    name: String,
    arrivals: Receiver<(Hello, Link)>,
    /// Ends when the door is closed: all have come then.
    _acceptor: Acceptor,
}

impl Door {
    /// Listens under a random name, which leaves nothing behind in any file system.
    pub(crate) fn open(key: &JobKey, waker: &Waker) -> Result<Door, Error> {
        let fail = |error: std::io::Error| {
            Error::Start(format!(
                "can't listen for the other ranks of this host on a unix socket: {error}; \
                 BPS_LOCAL_REDUCE=0 on every worker does without"
            ))
        };
        let name = abstract_name("bps-rank").map_err(fail)?;
        let listener = SocketAddr::from_abstract_name(&name)
            .and_then(|address| UnixListener::bind_addr(&address))
            .map_err(fail)?;
        let (sender, arrivals) = channel();
        let waker = waker.clone();
        let setups = Setups::default();
        let admit = move |_, hello: Hello, socket: Socket| {
            let (Purpose::ShmLane, Socket::Unix(stream)) = (hello.purpose, socket) else {
                return log::warning!("{} knocked for something else than a lane", hello.rank);
            };
            let (sender, waker) = (sender.clone(), waker.clone());
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

    /// One link to each other rank of this rank's group, by rank.
    pub(crate) fn connect(
        self,
        key: &JobKey,
        roster: &Roster,
        waker: &Waker,
    ) -> Result<BTreeMap<Rank, Link>, Error> {
        let me = Rank(roster.index);
        let others: BTreeMap<Rank, &Neighbour> =
            roster.neighbours.iter().map(|peer| (peer.rank, peer)).collect();
        let mut links = BTreeMap::new();
        for (&rank, peer) in others.range(..me) {
            let hello = Hello::shm_lane(me, roster.epoch);
            let link = dial_unix(&peer.local, key, hello, CONNECT)
                .map_err(|error| error.to_string())
                .and_then(|stream| {
                    shm::offer(&stream, waker, ShmOptions::default())
                        .map_err(|error| format!("shared memory could not be set up: {error}"))
                })
                .map_err(|error| unreachable(rank, peer, &error))?;
            links.insert(rank, Link::Shm(link));
        }
        let until = Instant::now() + CONNECT;
        while let Some((&rank, peer)) = others.iter().find(|(rank, _)| !links.contains_key(rank)) {
            let left = until.saturating_duration_since(Instant::now());
            let Ok((hello, link)) = self.arrivals.recv_timeout(left) else {
                let waited = format!("it did not connect within {} s", CONNECT.as_secs());
                return Err(unreachable(rank, peer, &waited));
            };
            let is_expected = hello.epoch == roster.epoch
                && hello.rank > me
                && others.contains_key(&hello.rank)
                && !links.contains_key(&hello.rank);
            if is_expected {
                links.insert(hello.rank, link);
            } else {
                log::warning!("a lane of {} was turned away: none is expected", hello.rank);
            }
        }
        Ok(links)
    }
}

fn unreachable(rank: Rank, peer: &Neighbour, error: &str) -> Error {
    Error::Start(format!(
        "{rank} (host {}, pid {}) is on this host but can't be reached for local reduction: \
         {error}; BPS_LOCAL_REDUCE=0 on every worker does without",
        peer.host, peer.pid
    ))
}
