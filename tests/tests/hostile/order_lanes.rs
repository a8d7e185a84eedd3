//! The lanes between the threads of two GPUs: what is said comes in order, and what is not of the
//! protocol closes the lane and says who it was.

use bps_engine::base::{DType, Epoch, Key, Rank, Round};
use bps_engine::lane::Endpoint;
use bps_engine::transport::sim::{Random, Sim, SimNetwork};
use bps_engine::transport::{Event, Frame, Landing, LaneId, Link, Transport, Waker};
use bps_engine::wire::{Header, Kind};
use bps_worker::error::Misfit;
use bps_worker::gpu::order_lanes::{Heard, OrderKind, OrderLanes, OrderWord};
use std::time::Duration;

const GOOD: Rank = Rank(0);
const BAD: Rank = Rank(3);
const EPOCH: Epoch = Epoch(7);
const LANE: LaneId = LaneId(0);
const KINDS: [Kind; 5] =
    [Kind::GpuReady, Kind::GpuReduce, Kind::GpuLanded, Kind::GpuGather, Kind::GpuEnd];

struct Pair {
    network: SimNetwork,
    lanes: OrderLanes,
    bad: Endpoint,
    heard: Vec<Heard>,
    /// What the bad one has heard.
    said: Vec<Header>,
    is_closed: bool,
}

impl Pair {
    fn new(seed: u64) -> Pair {
        let network = SimNetwork::new(seed);
        let (mine, theirs) = network.link();
        let endpoint = || {
            let waker = Waker::new().expect("an eventfd");
            Endpoint::new(vec![Transport::Sim(Sim::new(network.clone()))], waker)
        };
        let links = vec![(BAD, Link::Sim(mine))];
        let lanes = OrderLanes::new(endpoint(), GOOD, EPOCH, links).expect("a lane");
        let mut bad = endpoint();
        assert_eq!(bad.attach(Link::Sim(theirs)).expect("a lane"), LANE);
        Pair { network, lanes, bad, heard: Vec::new(), said: Vec::new(), is_closed: false }
    }

    fn send(&mut self, header: &Header, payload: &'static [u8]) {
        let frame = Frame::new(header.encode(), payload.into(), 0);
        assert!(self.bad.post(LANE, &frame).is_ok(), "there is room");
        self.settle();
    }

    fn settle(&mut self) {
        for _ in 0..200 {
            self.lanes.flush();
            self.lanes.poll(&mut self.heard);
            let mut events = Vec::new();
            self.bad.poll(&mut events);
            for event in events {
                match event {
                    Event::Header { lane, header, .. } => {
                        self.said.push(Header::decode(&header).expect("a good header"));
                        self.bad.land(lane, Landing::NOTHING);
                    }
                    Event::Closed { .. } => self.is_closed = true,
                    _ => {}
                }
            }
            self.network.advance_by(Duration::from_micros(50));
        }
    }
}

fn word(kind: Kind, round: u64) -> Header {
    let header = Header::new(kind, DType::U8, BAD, EPOCH);
    Header { key: Key(5), round: Round(round), contributors: 2, ..header }
}

#[test]
fn what_is_said_comes_in_order_and_a_goodbye_is_the_last_of_it() {
    let mut pair = Pair::new(1);
    for round in 0..500 {
        let kind = KINDS[usize::try_from(round % 5).expect("small")];
        pair.send(&word(kind, round), &[]);
        pair.lanes.say(OrderWord {
            kind: OrderKind::Reduce,
            key: Key(9),
            round,
            left: 1,
            missing: 0,
        });
    }
    pair.settle();
    let heard: Vec<(Rank, u64, u32)> = pair
        .heard
        .iter()
        .map(|one| match one {
            Heard::Word { from, word } => (*from, word.round, word.left),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(heard, Vec::from_iter((0..500).map(|round| (BAD, round, 2))));
    let said: Vec<(Kind, u64)> = pair.said.iter().map(|one| (one.kind, one.round.0)).collect();
    assert_eq!(said, Vec::from_iter((0..500).map(|round| (Kind::GpuReduce, round))));
    pair.heard.clear();
    let goodbye = Header { key: Key(0), ..Header::new(Kind::Goodbye, DType::U8, BAD, EPOCH) };
    pair.send(&goodbye, &[]);
    assert_eq!(pair.heard, [Heard::Left(BAD)]);
    assert!(pair.lanes.is_closed() && pair.is_closed);
}

#[test]
fn a_rank_that_dies_or_says_what_is_no_word_is_named() {
    static PAYLOAD: [u8; 8] = [1; 8];
    let says = |rank, said| Misfit::Speaker { lane: BAD, epoch: EPOCH, rank, said };
    let good = word(Kind::GpuReady, 1);
    let bad = [
        (Misfit::Payload { kind: good.kind, bytes: 8 }, Header { length: 8, ..good }),
        (says(BAD, Epoch(8)), Header { epoch: Epoch(8), ..good }),
        (says(GOOD, EPOCH), Header { rank: GOOD, ..good }),
        (Misfit::NoOrder(Kind::Ready), Header { contributors: 1, ..word(Kind::Ready, 1) }),
    ];
    for (what, header) in bad {
        let mut pair = Pair::new(2);
        pair.send(&header, &PAYLOAD[..header.length as usize]);
        pair.settle();
        let [Heard::Corrupt { from: BAD, misfit }] = &pair.heard[..] else {
            panic!("{what:?}: {:?}", pair.heard)
        };
        assert_eq!(*misfit, what);
        assert!(pair.lanes.is_closed() && pair.is_closed, "{what}");
    }
    let mut pair = Pair::new(3);
    pair.bad.close(LANE);
    pair.settle();
    assert!(matches!(pair.heard[..], [Heard::Lost { rank: BAD, .. }]), "{:?}", pair.heard);
    // Bytes that nobody would say.
    for seed in 0..2000 {
        let (mut pair, mut random) = (Pair::new(seed), Random::new(seed));
        for _ in 0..3 {
            let mut header = word(KINDS[random.index(5)], random.below(9)).encode();
            header[random.index(header.len())] ^= 1 << random.index(8);
            let _ = pair.bad.post(LANE, &Frame::bare(header, 0));
        }
        for _ in 0..20 {
            pair.lanes.poll(&mut pair.heard);
            pair.network.advance_by(Duration::from_micros(100));
        }
    }
}
