//! The lanes of one rank, whose other ends the tests hold: what they post and what they refuse.

mod any_frame;
mod arriving;
mod circle;
mod sending;

use super::*;
use crate::base::error::Misfit;
use crate::rounds::Among;
use bps_engine::base::{DType, Epoch, Rank};
use bps_engine::config::{AutoCompression, PayloadChecksum};
use bps_engine::mem::Readable;
use bps_engine::team::Team;
use bps_engine::transport::sim::{Sim, SimNetwork};
use bps_engine::transport::{Carried, Cause, Frame, Landing, Transport};
use bps_engine::wire::RawHeader;

/// This rank, and its membership.
const OWN: Rank = Rank(0);
const EPOCH: Epoch = Epoch(3);
const SERVER: LaneId = LaneId(0);
/// Bytes of a part where a test does not say: a line of the cache.
const BYTES: usize = 64;
/// Turns after which a test counts as hung.
const TURNS_MAX: usize = 100_000;

/// See the [module](self). The loop is dropped before the memory that its lanes have.
struct Bench {
    nic: Nic,
    far: Endpoint,
    network: SimNetwork,
    reports: Mpsc<Report>,
    /// What has come to the other ends, with the payload.
    heard: Vec<(LaneId, Header, Vec<u8>)>,
    /// By part: its tensor, from where it is pushed and to where its result goes.
    tensors: Vec<Vec<u8>>,
    /// Payloads that the other ends have posted.
    payloads: Vec<Vec<u8>>,
    /// Lanes of which the other end is told that they are closed.
    closed: Vec<LaneId>,
    /// How far this rank's clock is ahead of the network's.
    ahead: Duration,
}

/// To a core of server 0, for rank 0 of two that are on hosts of their own.
fn to_server(credit_bytes: usize) -> Bench {
    Bench::new(credit_bytes, 2, &[LanePeer::Server(0)])
}

/// To the two other ranks of a host that has all three of the job.
fn to_ranks(credit_bytes: usize) -> Bench {
    Bench::new(credit_bytes, 3, &[LanePeer::Rank(Rank(1)), LanePeer::Rank(Rank(2))])
}

impl Bench {
    fn new(credit_bytes: usize, size: u32, peers: &[LanePeer]) -> Bench {
        Bench::seeded(7, PayloadChecksum::Auto, (credit_bytes, size), peers)
    }

    /// The same over a network of this seed, with this rule for checksums.
    fn seeded(
        seed: u64,
        checksums: PayloadChecksum,
        (credit_bytes, size): (usize, u32),
        peers: &[LanePeer],
    ) -> Bench {
        let network = SimNetwork::new(seed);
        let waker = Waker::new().expect("an eventfd");
        let endpoint = || {
            let sim = Transport::Sim(Sim::new(network.clone()));
            Endpoint::new(vec![sim], waker.clone()).with_checksums(checksums)
        };
        let config = NicConfig {
            rank: OWN,
            size,
            epoch: EPOCH,
            credit_bytes,
            column: Vec::new(),
            stall_report: Duration::from_secs(5),
            paces: false,
            keeps: false,
            auto: AutoCompression::Measured,
            team: Team::default(),
        };
        let (reports, statistics) = (Mpsc::new(64), Arc::default());
        let mut nic = Nic::new(endpoint(), config, reports.clone(), waker.clone(), statistics);
        let mut far = endpoint();
        for peer in peers {
            let (near_end, far_end) = network.link();
            let lane = nic.attach(*peer, Link::Sim(near_end)).expect("a lane");
            assert_eq!(far.attach(Link::Sim(far_end)).expect("a lane"), lane);
        }
        Bench {
            nic,
            far,
            network,
            reports,
            heard: Vec::new(),
            tensors: Vec::new(),
            payloads: Vec::new(),
            closed: Vec::new(),
            ahead: Duration::ZERO,
        }
    }

    /// A part of so many bytes, a tensor of its own, with the key of its number and 1.
    fn plan(&mut self, bytes: usize, change: impl FnOnce(&mut PartPlan)) -> PartId {
        let tensor = u32::try_from(self.tensors.len()).expect("few parts");
        let mut plan = PartPlan {
            of: PartOf { tensor, index: 0 },
            name: format!("t{tensor}").into(),
            key: Key(u64::from(tensor) + 1),
            dtype: DType::F32,
            operation: Operation::Sum,
            bytes,
            device: false,
            among: None,
            receiver: None,
            encoding: None,
            store: None,
            core: None,
            owner: None,
        };
        change(&mut plan);
        self.tensors.push(vec![0; bytes]);
        let part = self.nic.plan(std::iter::once(plan));
        assert_eq!(part, PartId(tensor));
        part
    }

    /// A part that this rank sums for its group.
    fn plan_owned(&mut self, bytes: usize) -> PartId {
        self.plan(bytes, |_| {})
    }

    /// A part that a rank of the group sums.
    fn plan_of(&mut self, owner: LaneId) -> PartId {
        self.plan(BYTES, |plan| plan.owner = Some(owner))
    }

    /// A part that a core sums.
    fn plan_served(&mut self) -> PartId {
        self.plan(BYTES, |plan| plan.core = Some(SERVER))
    }

    /// Pushes this round of a part: what its tensor holds.
    fn push(&mut self, part: PartId, round: u64, priority: i64) {
        let source = self.tensors[part.0 as usize].as_ptr();
        self.push_from(source, part, round, priority);
    }

    /// The same with other bytes, which are the tensor's or those of a payload.
    fn push_from(&mut self, source: *const u8, part: PartId, round: u64, priority: i64) {
        let tensor = &mut self.tensors[part.0 as usize];
        // SAFETY: the bench keeps both, and a test looks at the tensor only between two turns, when
        // its round is over or nothing of it is on its way.
        let memory = unsafe { Memory::new(source, tensor.as_mut_ptr(), tensor.len()) };
        let push = PartPush { memory, priority, act: Act::NONE, asked_ns: 0 };
        self.nic.push(part, round, &push);
    }

    fn fill(&mut self, part: PartId, value: f32) {
        self.tensors[part.0 as usize] = floats(value, self.tensors[part.0 as usize].len());
    }

    fn now(&self) -> Duration {
        self.network.now() + self.ahead
    }

    /// Turns of this rank alone: nothing of what it posts leaves.
    fn turn_alone(&mut self) {
        // A lane may refuse what it could take.
        for _ in 0..100 {
            self.nic.begin_turn(self.now());
            self.nic.turn();
            self.nic.end_turn();
        }
    }

    /// Until nothing happens any more.
    fn settle(&mut self) {
        for _ in 0..TURNS_MAX {
            self.nic.begin_turn(self.now());
            let mut progress = self.nic.turn();
            self.nic.end_turn();
            progress |= self.poll_far();
            if !(progress | self.network.advance()) {
                return self.turn_alone();
            }
        }
        panic!("it does not come to rest");
    }

    fn poll_far(&mut self) -> bool {
        let mut events = Vec::new();
        self.far.poll(&mut events);
        let progress = !events.is_empty();
        for event in events {
            match event {
                Event::Header { lane, header, .. } => {
                    let header = Header::decode(&header).expect("this rank is good");
                    self.far.land(lane, Landing::Pieces(header.length as usize));
                    self.heard.push((lane, header, Vec::new()));
                }
                Event::Piece { lane, piece } => {
                    let of_lane = |heard: &&mut (LaneId, Header, Vec<u8>)| heard.0 == lane;
                    let (_, _, payload) = self.heard.iter_mut().rfind(of_lane).expect("its header");
                    // SAFETY: it is consumed below, once its bytes were copied.
                    payload.extend_from_slice(unsafe { piece.lend().bytes() });
                    self.far.consume(lane);
                }
                Event::Closed { lane, .. } => self.closed.push(lane),
                Event::Landed { .. } | Event::Sent { .. } | Event::Answered { .. } => {}
            }
        }
        progress
    }

    /// The other end of a lane posts these 64 bytes and this payload.
    fn send_raw(&mut self, lane: LaneId, header: RawHeader, payload: Vec<u8>) {
        // SAFETY: the bench keeps the payload, and nobody writes it.
        let frame = Frame::new(header, unsafe { Readable::of(&payload) }, 0);
        self.payloads.push(payload);
        let is_posted = (0..TURNS_MAX).any(|_| self.far.post(lane, &frame).is_ok());
        assert!(is_posted, "its end has room");
    }

    /// The same, of a frame whose length is that of its payload, and what comes of it.
    fn send(&mut self, lane: LaneId, header: Header, payload: Vec<u8>) {
        let length = u32::try_from(payload.len()).expect("short");
        self.send_raw(lane, Header { length, ..header }.encode(), payload);
        self.settle();
    }

    /// The other end of a lane posts what a payload lacks yet, in lines of the cache.
    fn send_rest(&mut self, lane: LaneId, bytes: &[u8]) {
        for line in bytes.chunks(BYTES) {
            self.send_raw(lane, line.try_into().expect("whole lines"), Vec::new());
        }
        self.settle();
    }

    /// A frame of this kind about the first round of a part, as the rank at the other end of a lane
    /// says it.
    fn said(&self, lane: LaneId, kind: Kind, part: PartId) -> Header {
        let header = frame(kind, part);
        match self.nic.lane(lane).peer {
            LanePeer::Rank(rank) if kind != Kind::Grant && kind != Kind::Publication => {
                Header { rank, ..header }
            }
            _ => header,
        }
    }

    /// What has come to the other ends of this kind: the lane, the key, the round.
    fn kinds(&self, kind: Kind) -> Vec<(LaneId, Key, u64)> {
        let of_kind = self.heard.iter().filter(|(_, header, _)| header.kind == kind);
        of_kind.map(|(lane, header, _)| (*lane, header.key, header.round.0)).collect()
    }

    /// What was refused of what this lane brought: that is reported first, and that the lane is
    /// lost once it is.
    fn refused(&mut self, lane: LaneId) -> Misfit {
        let Some(Report::Corrupt { peer, misfit }) = self.reports.pop() else {
            panic!("it was not refused")
        };
        assert_eq!(peer, self.nic.lane(lane).peer);
        self.lost(lane, Cause::Local);
        misfit
    }

    /// A lane is closed on both ends, for this cause, and nothing else is reported.
    fn lost(&mut self, lane: LaneId, of: Cause) {
        let Some(Report::Lost { peer, cause, .. }) = self.reports.pop() else {
            panic!("it was not lost")
        };
        assert_eq!((peer, cause), (self.nic.lane(lane).peer, of));
        assert!(self.reports.pop().is_none(), "a lane that closes is reported once");
        assert!(!self.nic.lane(lane).open && self.closed.contains(&lane), "its lane is closed");
    }

    /// The one part whose round is over, and what its result lacks.
    fn over(&mut self) -> Option<(PartOf, Lacks)> {
        let over = self.nic.take_over();
        assert!(self.nic.take_over().is_none(), "one round is over");
        over
    }
}

/// So many bytes of this number.
fn floats(value: f32, bytes: usize) -> Vec<u8> {
    value.to_ne_bytes().repeat(bytes / 4)
}

/// A frame of this kind about the first round of a part, in the name of this rank.
fn frame(kind: Kind, part: PartId) -> Header {
    let key = Key(u64::from(part.0) + 1);
    let contributors = u32::from(kind == Kind::Contribution);
    let header = Header::new(kind, DType::F32, OWN, EPOCH);
    Header { key, round: Round(1), contributors, ..header }
}
