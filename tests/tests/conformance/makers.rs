//! How the suite makes drivers and links of each transport. Nothing else here knows that they
//! differ.

use bps_engine::config::TcpDriver;
use bps_engine::mem::{Arena, Claim, Options};
use bps_engine::transport::rdma::{self, Rails, Rdma, RdmaOptions};
use bps_engine::transport::shm::{self, Shm, ShmOptions};
use bps_engine::transport::sim::{Sim, SimNetwork};
use bps_engine::transport::tcp::sealed::{Keys, SECRET_BYTES};
use bps_engine::transport::tcp::{Tcp, TcpError};
use bps_engine::transport::{Driver, Event, LaneId, Link, Transport, Waker};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// What the suite runs over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Stream sockets through io_uring.
    TcpUring,
    /// Stream sockets through plain calls.
    TcpPoll,
    /// Encrypted stream sockets through io_uring.
    SealedUring,
    /// Encrypted stream sockets through plain calls.
    SealedPoll,
    /// Shared memory, every payload copied into slots.
    Shm,
    /// Shared memory with few and small slots, so that they run out.
    ShmTight,
    /// Shared memory where the right end posts from its arena.
    ShmArena,
    /// RDMA verbs, every payload copied into the mirror of the peer's area.
    Rdma,
    /// RDMA verbs with few and small slots, so that they run out.
    RdmaTight,
    /// RDMA verbs where the right end posts from registered memory.
    RdmaShared,
    /// The simulated network.
    Sim(u64),
}

/// Bytes of the arena of [`Kind::ShmArena`] and [`Kind::RdmaShared`].
const ARENA_BYTES: usize = 64 << 20;

/// Lanes that a driver of the suite has at most.
const LANES_MAX: u32 = 64;

impl Kind {
    /// Whether its lanes run over stream sockets.
    fn is_tcp(self) -> bool {
        matches!(self, Kind::TcpUring | Kind::TcpPoll) || self.is_sealed()
    }

    /// Whether its lanes are encrypted.
    fn is_sealed(self) -> bool {
        matches!(self, Kind::SealedUring | Kind::SealedPoll)
    }

    /// Whether its lanes run over RDMA verbs.
    pub fn is_rdma(self) -> bool {
        matches!(self, Kind::Rdma | Kind::RdmaTight | Kind::RdmaShared)
    }
}

/// What an end has before its links are made.
pub struct Seat {
    /// Wakes it.
    pub waker: Waker,
    /// Its RDMA ports, if that is the kind.
    rails: Option<Arc<Rails>>,
}

/// One end: a driver and what wakes it.
pub struct Node {
    /// The driver under test.
    pub driver: Transport,
    /// What its links are made with.
    pub seat: Seat,
}

impl Node {
    /// A node of this kind.
    pub fn new(world: &World, seat: Seat) -> Node {
        let waker = seat.waker.clone();
        let driver = match (world.kind, &seat.rails) {
            (Kind::Sim(_), _) => Transport::Sim(Sim::new(world.network.clone())),
            (kind, _) if kind.is_tcp() => Transport::Tcp(tcp(kind, &waker).unwrap()),
            (_, Some(rails)) => {
                Transport::Rdma(Box::new(Rdma::new(waker, Arc::clone(rails)).unwrap()))
            }
            _ => Transport::Shm(Shm::new(waker).unwrap()),
        };
        Node { driver, seat }
    }

    /// What happened since the last call.
    pub fn poll(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        self.driver.poll(&mut events);
        assert!(events.len() <= bps_engine::limits::EVENTS_MAX, "{} events", events.len());
        events
    }

    /// Sleeps as an endpoint does.
    pub fn sleep(&mut self, timeout: Duration) {
        self.seat.waker.prepare();
        if !self.driver.arm() {
            self.driver.block(timeout);
        }
        self.seat.waker.awake();
    }
}

/// What links are made in.
pub struct World {
    /// The transport.
    pub kind: Kind,
    /// The simulated network, if that is the kind.
    pub network: SimNetwork,
    arena: Option<(Arena, Claim)>,
}

/// The driver of stream sockets of this kind.
fn tcp(kind: Kind, waker: &Waker) -> Result<Tcp, TcpError> {
    let is_uring = matches!(kind, Kind::TcpUring | Kind::SealedUring);
    let choice = if is_uring { TcpDriver::Uring } else { TcpDriver::Poll };
    Tcp::new(waker.clone(), choice, LANES_MAX)
}

/// Why this kind cannot run here, if so.
pub fn obstacle(kind: Kind) -> Option<String> {
    match kind {
        Kind::TcpUring | Kind::SealedUring => {
            tcp(kind, &Waker::new().unwrap()).err().map(|error| error.to_string())
        }
        kind if kind.is_rdma() => rdma::find(None).err().map(|error| error.to_string()),
        _ => None,
    }
}

impl World {
    /// A world of this kind.
    pub fn new(kind: Kind) -> World {
        let seed = if let Kind::Sim(seed) = kind { seed } else { 0 };
        let has_arena = matches!(kind, Kind::ShmArena | Kind::RdmaShared);
        let arena = has_arena.then(|| {
            let options = Options { name: "test".to_owned(), numa_node: None, shared: true };
            let mut arena = Arena::reserve(ARENA_BYTES, &options).unwrap();
            let claim = arena.claim(ARENA_BYTES).unwrap();
            (arena, claim)
        });
        World { kind, network: SimNetwork::new(seed), arena }
    }

    /// Memory that the right end may post from by reference, and its length.
    pub fn arena(&self) -> Option<(*mut u8, usize)> {
        self.arena.as_ref().map(|(arena, _)| (arena.base(), ARENA_BYTES))
    }

    /// What a new end starts with.
    pub fn seat(&self) -> Seat {
        let rails =
            self.kind.is_rdma().then(|| Rails::open(rdma::find(None).unwrap(), None).unwrap());
        Seat { waker: Waker::new().unwrap(), rails }
    }

    fn rdma_links(&self, left: &Arc<Rails>, right: &Arc<Rails>) -> (Link, Link) {
        let (one, other) = sockets();
        let options = match self.kind {
            Kind::RdmaTight => RdmaOptions { slot_bytes: 4096, slots: 4 },
            _ => RdmaOptions { slot_bytes: 128 << 10, slots: 8 },
        };
        std::thread::scope(|scope| {
            let dialed = scope.spawn(|| rdma::connect(one, left, 0, options).unwrap());
            let accepted = rdma::accept(other, right, options).unwrap();
            (Link::Rdma(Box::new(dialed.join().unwrap())), Link::Rdma(Box::new(accepted)))
        })
    }

    /// A connection between two ends.
    pub fn links(&self, left: &Seat, right: &Seat) -> (Link, Link) {
        if let (Some(left), Some(right)) = (&left.rails, &right.rails) {
            return self.rdma_links(left, right);
        }
        if let Kind::Sim(_) = self.kind {
            let (left, right) = self.network.link();
            return (Link::Sim(left), Link::Sim(right));
        }
        if self.kind.is_tcp() {
            let (one, other) = sockets();
            let keys = |seal: u8, open: u8| {
                Box::new(Keys { seal: [seal; SECRET_BYTES], open: [open; SECRET_BYTES] })
            };
            if self.kind.is_sealed() {
                let one = Link::SealedTcp(one.into(), keys(1, 2));
                return (one, Link::SealedTcp(other.into(), keys(2, 1)));
            }
            return (Link::Tcp(one.into()), Link::Tcp(other.into()));
        }
        let (one, other) = UnixStream::pair().unwrap();
        let options = match self.kind {
            Kind::ShmTight => ShmOptions { slot_bytes: 4096, slots: 2 },
            _ => ShmOptions::default(),
        };
        std::thread::scope(|scope| {
            let offered = scope.spawn(|| shm::offer(&one, &left.waker, options).unwrap());
            let arena = self.arena.as_ref().map(|(arena, _)| {
                (arena.memfd().expect("it was made to be shared"), arena.reserved_bytes())
            });
            let accepted = shm::accept(&other, &right.waker, arena).unwrap();
            (Link::Shm(offered.join().unwrap()), Link::Shm(accepted))
        })
    }

    /// Two nodes with so many lanes between them.
    pub fn pair(&self, lanes: u32) -> (Node, Node) {
        let mut left = Node::new(self, self.seat());
        let mut right = Node::new(self, self.seat());
        for lane in 0..lanes {
            self.connect(&mut left, &mut right, LaneId(lane));
        }
        // A driver without lanes registers nothing.
        match (&self.arena, &mut right.driver) {
            (Some((arena, _)), Transport::Shm(driver)) => {
                driver.share(arena);
            }
            (Some((arena, _)), Transport::Rdma(driver)) => {
                let base = NonNull::new(arena.base()).unwrap();
                // SAFETY: the arena is the world's, which lives longer than its nodes.
                unsafe { driver.register(base, ARENA_BYTES) }.unwrap();
            }
            _ => {}
        }
        (left, right)
    }

    /// Makes one more lane between two nodes.
    pub fn connect(&self, left: &mut Node, right: &mut Node, lane: LaneId) {
        let (one, other) = self.links(&left.seat, &right.seat);
        left.driver.attach(lane, one).unwrap();
        right.driver.attach(lane, other).unwrap();
    }

    /// Lets the world move on. Returns false if nothing ever happens unless a node does something.
    pub fn step(&self) -> bool {
        match self.kind {
            Kind::Sim(_) => self.network.advance(),
            _ => {
                std::thread::yield_now();
                true
            }
        }
    }
}

/// Two connected sockets of this host.
fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (one, listener.accept().unwrap().0)
}
