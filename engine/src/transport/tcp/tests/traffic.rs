//! Frames on many lanes, both ways at once, landing in either manner, at any pace.

use super::*;

/// One end of many lanes: sends what it has, and collects what comes.
struct Node {
    tcp: Tcp,
    lanes: Vec<Side>,
    random: Random,
    events: Vec<Event>,
}

#[derive(Default)]
struct Side {
    outbox: VecDeque<Vec<u8>>,
    posted: VecDeque<(u64, Vec<u8>)>,
    tokens: u64,
    landing: Vec<u8>,
    /// Bytes still to come in pieces.
    pieces: usize,
    /// A header that is answered only in a later poll.
    late: Option<usize>,
    received: Vec<Vec<u8>>,
}

impl Node {
    fn new(driver: TcpDriver, links: Vec<OwnedFd>, seed: u64) -> Node {
        let mut tcp = transport(driver, links.len() as u32);
        let mut lanes = Vec::new();
        for (index, link) in links.into_iter().enumerate() {
            tcp.attach(LaneId(index as u32), Link::Tcp(link)).expect("a fresh socket");
            lanes.push(Side::default());
        }
        Node { tcp, lanes, random: Random(seed | 1), events: Vec::new() }
    }

    /// One turn of the loop that owns the transport. Returns whether anything happened.
    fn turn(&mut self) -> bool {
        for index in 0..self.lanes.len() {
            self.fill(index);
            if self.random.below(3) == 0
                && let Some(length) = self.lanes[index].late.take()
            {
                self.land(index, length);
            }
        }
        self.events.clear();
        self.tcp.poll(&mut self.events);
        assert!(self.events.len() <= EVENTS_MAX);
        for index in 0..self.events.len() {
            self.handle(self.events[index]);
        }
        !self.events.is_empty()
    }

    fn fill(&mut self, index: usize) {
        let side = &mut self.lanes[index];
        while let Some(payload) = side.outbox.pop_front() {
            match post(&mut self.tcp, index as u32, &payload, side.tokens) {
                Ok(()) => {
                    side.posted.push_back((side.tokens, payload));
                    side.tokens += 1;
                }
                Err(Full) => {
                    assert_eq!(side.posted.len(), LANE_FRAMES_MAX);
                    return side.outbox.push_front(payload);
                }
            }
        }
    }

    fn land(&mut self, index: usize, length: usize) {
        let side = &mut self.lanes[index];
        let id = LaneId(index as u32);
        if length == 0 {
            side.received.push(Vec::new());
            self.tcp.land(id, Landing::NOTHING);
        } else if self.random.below(2) == 0 {
            side.pieces = length;
            side.landing = Vec::with_capacity(length);
            self.tcp.land(id, Landing::Pieces(length));
        } else {
            side.landing = vec![0; length];
            self.tcp.land(id, into(&mut side.landing));
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Header { lane, header, .. } => {
                let side = &mut self.lanes[lane.0 as usize];
                assert!(side.late.is_none() && side.landing.is_empty(), "the lane stands still");
                match self.random.below(4) {
                    0 => side.late = Some(length_in(&header)),
                    _ => self.land(lane.0 as usize, length_in(&header)),
                }
            }
            Event::Landed { lane } => {
                let side = &mut self.lanes[lane.0 as usize];
                side.received.push(std::mem::take(&mut side.landing));
            }
            Event::Piece { lane, piece } => {
                let side = &mut self.lanes[lane.0 as usize];
                // SAFETY: it is consumed below, once its bytes have been copied.
                side.landing.extend_from_slice(unsafe { piece.lend().bytes() });
                side.pieces -= piece.len();
                if side.pieces == 0 {
                    side.received.push(std::mem::take(&mut side.landing));
                }
                self.tcp.consume(lane);
            }
            Event::Sent { lane, token } => {
                let side = &mut self.lanes[lane.0 as usize];
                let (expected, _) = side.posted.pop_front().expect("one Sent for each frame");
                assert_eq!(token, expected);
            }
            Event::Answered { lane, .. } => panic!("{lane:?} granted nothing"),
            Event::Closed { lane, cause } => panic!("{lane:?} closed: {cause}"),
        }
    }

    fn sent_all(&self) -> bool {
        self.lanes.iter().all(|side| side.posted.is_empty() && side.outbox.is_empty())
    }

    fn received(&self) -> usize {
        self.lanes.iter().map(|side| side.received.len()).sum()
    }
}

/// Sends these payloads (by lane) both ways at once, and compares.
fn exchange(drivers: [TcpDriver; 2], loopback: bool, payloads: &[Vec<Vec<u8>>], seed: u64) {
    let (ones, twos) = payloads.iter().map(|_| sockets(loopback)).unzip();
    let mut one = Node::new(drivers[0], ones, seed);
    let mut two = Node::new(drivers[1], twos, seed + 1);
    for (index, frames) in payloads.iter().enumerate() {
        one.lanes[index].outbox.extend(frames.iter().cloned());
        two.lanes[index].outbox.extend(frames.iter().rev().cloned());
    }
    let frames: usize = payloads.iter().map(Vec::len).sum();
    let start = Instant::now();
    while !(one.sent_all()
        && two.sent_all()
        && one.received() == frames
        && two.received() == frames)
    {
        if !one.turn() && !two.turn() {
            two.tcp.block(Duration::from_micros(200));
        }
        assert!(
            start.elapsed() < PATIENCE,
            "{drivers:?} seed {seed}: {} and {} of {frames} frames in {PATIENCE:?}",
            one.received(),
            two.received()
        );
    }
    for (index, frames) in payloads.iter().enumerate() {
        assert!(two.lanes[index].received == *frames, "{drivers:?} seed {seed}: bytes differ");
        assert!(one.lanes[index].received.iter().eq(frames.iter().rev()), "bytes differ");
    }
}

fn random_payloads(lanes: usize, frames: usize, seed: u64) -> Vec<Vec<Vec<u8>>> {
    let mut random = Random(seed | 1);
    let mut one = || {
        let length = match random.below(8) {
            0 => 0,
            1..=3 => random.below(9_000),
            4 | 5 => random.below(70_000),
            6 => random.below(700_000),
            _ => random.below(3 << 20),
        };
        payload(length as usize, random.next())
    };
    (0..lanes).map(|_| (0..frames).map(|_| one()).collect()).collect()
}

#[test]
fn random_frames_both_ways_on_many_lanes() {
    use TcpDriver::{Poll, Uring};
    for (seed, drivers) in [[Uring, Uring], [Poll, Poll], [Uring, Poll]].into_iter().enumerate() {
        for loopback in [true, false] {
            let seed = 10 * seed as u64 + u64::from(loopback);
            exchange(drivers, loopback, &random_payloads(6, 25, seed), seed);
        }
    }
}

#[test]
fn one_lane_of_small_frames_fills_and_recovers() {
    for driver in DRIVERS {
        let frames = (0..2_000).map(|index| payload(index % 5_000, index as u64)).collect();
        exchange([driver, driver], true, &[frames], 5);
    }
}

#[test]
fn a_hundred_lanes_of_headers() {
    for driver in DRIVERS {
        let lanes = vec![vec![Vec::new(); 40]; 100];
        exchange([driver, driver], false, &lanes, 9);
    }
}

#[test]
fn a_part_of_the_largest_size() {
    for driver in DRIVERS {
        let part = payload(crate::limits::PART_BYTES_MAX, 1);
        exchange([driver, driver], true, &[vec![part]], 2);
    }
}

#[test]
fn a_lane_that_stands_still_does_not_hold_up_others() {
    for driver in DRIVERS {
        let (links, peers): (Vec<_>, Vec<_>) = (0..2).map(|_| sockets(false)).unzip();
        let mut tcp = transport(driver, 2);
        for (lane, link) in links.into_iter().enumerate() {
            tcp.attach(LaneId(lane as u32), Link::Tcp(link)).expect("a fresh socket");
        }
        let mut standing = UnixStream::from(peers[0].try_clone().expect("a descriptor"));
        let mut moving = UnixStream::from(peers[1].try_clone().expect("a descriptor"));
        std::io::Write::write_all(&mut standing, &header(8, 0)).expect("room for a header");
        std::io::Write::write_all(&mut standing, b"deferred").expect("room for it");
        until_header(&mut tcp);
        for number in 0..20 {
            std::io::Write::write_all(&mut moving, &header(0, number)).expect("room");
            until(&mut tcp, "header of the other lane", |tcp, event| match event {
                Event::Header { lane: LaneId(1), .. } => {
                    tcp.land(LaneId(1), Landing::NOTHING);
                    true
                }
                other => panic!("{other:?}"),
            });
        }
        let mut late = [0u8; 8];
        tcp.land(LaneId(0), into(&mut late));
        until(&mut tcp, "Landed", |_, event| matches!(event, Event::Landed { lane: LaneId(0) }));
        assert_eq!(&late, b"deferred");
    }
}
