//! Two parties that send each other random payloads and check all that the contract promises about
//! them.

use super::makers::{Node, World};
use bps_engine::base::{DType, Epoch, Key, Rank, Round};
use bps_engine::limits::ALIGNMENT;
use bps_engine::mem::{Readable, Writable};
use bps_engine::transport::sim::Random;
use bps_engine::transport::{Cause, Driver, Event, Frame, Full, Landing, LaneId, Piece};
use bps_engine::wire::{Header, Kind as FrameKind, RawHeader};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The sizes at which transports change their ways, and those beside them.
pub const SIZES: [usize; 15] = [
    0,
    1,
    63,
    64,
    255,
    4096,
    16_384,
    16_385,
    65_536 + 64,
    (256 << 10) - 1,
    256 << 10,
    (256 << 10) + 1,
    1 << 20,
    (1 << 20) + 64,
    4 << 20,
];
/// No exchange of the suite takes this long unless something hangs.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// As [`PATIENCE`], over devices that an emulated kernel emulates.
const PATIENCE_RDMA: Duration = Duration::from_secs(120);

const GUARD: u8 = 0xab;
const GUARD_BYTES: usize = 64;
const OVERWRITTEN: u8 = 0xee;
const POOL_BYTES: usize = (4 << 20) + 4096;

/// How a party answers headers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// Into memory of its own.
    Into,
    /// In pieces.
    Pieces,
    /// Either, and sometimes late.
    Any,
    /// Not at all, until told otherwise.
    Never,
}

struct Buffer {
    at: *mut u8,
    length: usize,
    _heap: Vec<u8>,
}

enum Reading {
    Idle,
    /// A header waits for its answer.
    Asked {
        length: usize,
    },
    Landing {
        memory: Vec<u8>,
        shift: usize,
        length: usize,
    },
    Pieces {
        length: usize,
        done: usize,
    },
    /// A piece waits to be consumed.
    Held {
        length: usize,
        done: usize,
        piece: Piece,
    },
}

/// One lane as one party sees it.
pub struct Port {
    lane: LaneId,
    plan: VecDeque<usize>,
    posted: u64,
    in_flight: VecDeque<(u64, Buffer)>,
    /// Frames whose memory came back.
    pub sent: u64,
    /// Frames that arrived whole.
    pub received: u64,
    reading: Reading,
    patience: u64,
    /// How it ended.
    pub closed: Option<Cause>,
}

/// One end of all lanes.
pub struct Party {
    /// Its driver.
    pub node: Node,
    /// Its lanes, by number.
    pub ports: Vec<Port>,
    /// How it answers.
    pub answer: Answer,
    random: Random,
    pool: Vec<u8>,
    arena: Option<(*mut u8, usize)>,
    arena_used: usize,
}

/// The header of the frame with this number.
pub fn header(sequence: u64, length: usize) -> RawHeader {
    let mut header = Header::new(FrameKind::Contribution, DType::U8, Rank(0), Epoch(0));
    header.key = Key(sequence);
    header.round = Round(sequence + 1);
    header.length = u32::try_from(length).unwrap();
    header.encode()
}

impl Port {
    fn new(lane: LaneId) -> Port {
        Port {
            lane,
            plan: VecDeque::new(),
            posted: 0,
            in_flight: VecDeque::new(),
            sent: 0,
            received: 0,
            reading: Reading::Idle,
            patience: 0,
            closed: None,
        }
    }

    /// Whether a payload is on its way into memory of ours.
    pub fn is_landing(&self) -> bool {
        matches!(self.reading, Reading::Landing { .. })
    }

    /// Whether a piece is in our hands.
    pub fn is_holding(&self) -> bool {
        matches!(self.reading, Reading::Held { .. })
    }

    /// Whether a header waits for us.
    pub fn is_asked(&self) -> bool {
        matches!(self.reading, Reading::Asked { .. })
    }

    /// Frames posted so far.
    pub fn posted(&self) -> u64 {
        self.posted
    }
}

impl Party {
    /// A party of this node, with so many lanes.
    pub fn new(node: Node, lanes: u32, seed: u64) -> Party {
        let mut bytes = Random::new(42);
        let pool = (0..POOL_BYTES / 8).flat_map(|_| bytes.bits().to_le_bytes()).collect();
        Party {
            node,
            ports: (0..lanes).map(|lane| Port::new(LaneId(lane))).collect(),
            answer: Answer::Any,
            random: Random::new(seed),
            pool,
            arena: None,
            arena_used: 0,
        }
    }

    /// Forgets a lane that has closed; its number is used again.
    pub fn renew(&mut self, lane: LaneId) {
        assert!(self.ports[lane.0 as usize].closed.is_some());
        self.ports[lane.0 as usize] = Port::new(lane);
    }

    /// Plans frames of these payload sizes on a lane.
    pub fn plan(&mut self, lane: u32, sizes: impl IntoIterator<Item = usize>) {
        self.ports[lane as usize].plan.extend(sizes);
    }

    /// A random size of [`SIZES`], the large ones seldom.
    pub fn any_size(&mut self) -> usize {
        let known = if self.random.once_in(8) { SIZES.len() } else { 9 };
        let size = SIZES[self.random.index(known)];
        if self.random.once_in(3) { self.random.index(size + 1) } else { size }
    }

    /// Whether all that was planned is sent, and no lane has ended.
    pub fn is_done(&self) -> bool {
        self.ports
            .iter()
            .all(|port| port.plan.is_empty() && port.in_flight.is_empty() && port.closed.is_none())
    }

    /// Checks that nobody wrote to the landings of closed lanes after they had closed.
    pub fn check_freed(&self) {
        for port in self.ports.iter().filter(|port| port.closed.is_some()) {
            if let Reading::Landing { memory, .. } = &port.reading {
                assert!(memory.iter().all(|byte| *byte == OVERWRITTEN), "written after Closed");
            }
        }
    }

    /// Frames received on all lanes.
    pub fn received(&self) -> u64 {
        self.ports.iter().map(|port| port.received).sum()
    }

    /// The payload of a frame.
    fn payload(&self, sequence: u64, length: usize) -> &[u8] {
        let start = usize::try_from(sequence * 61 % 4096).unwrap();
        &self.pool[start..start + length]
    }

    /// Memory to post from: in the arena while there is some left, at odd addresses elsewhere.
    fn buffer(&mut self, sequence: u64, length: usize) -> Buffer {
        let mut heap = Vec::new();
        let at = match self.arena {
            Some((base, bytes)) if length <= bytes - self.arena_used => {
                let at = base.wrapping_add(self.arena_used);
                self.arena_used += length;
                at
            }
            _ => {
                heap = vec![0u8; length + ALIGNMENT];
                heap.as_mut_ptr().wrapping_add(self.random.index(ALIGNMENT))
            }
        };
        let source = self.payload(sequence, length).as_ptr();
        // SAFETY: the arena has `length` bytes left, or the heap was made that long and a shift
        // longer.
        unsafe { std::ptr::copy_nonoverlapping(source, at, length) };
        Buffer { at, length, _heap: heap }
    }

    /// Posts what is planned on a lane until it is full. Returns whether it is.
    pub fn post(&mut self, index: usize) -> bool {
        while let Some(length) = self.ports[index].plan.front().copied() {
            let port = &self.ports[index];
            let (sequence, lane) = (port.posted, port.lane);
            if port.closed.is_some() {
                return false;
            }
            let buffer = self.buffer(sequence, length);
            let token = sequence * 3 + 7;
            // SAFETY: the buffer is kept, and unchanged, until it is sent or its lane is gone.
            let payload = unsafe { Readable::new(buffer.at, length) };
            let frame = Frame::new(header(sequence, length), payload, token);
            match self.node.driver.post(lane, &frame) {
                Ok(()) => {
                    let port = &mut self.ports[index];
                    port.plan.pop_front();
                    port.posted += 1;
                    port.in_flight.push_back((token, buffer));
                }
                Err(Full) => return true,
            }
        }
        false
    }

    /// Answers what waits for an answer, polls once and checks what comes. Returns whether anything
    /// came.
    pub fn turn(&mut self) -> bool {
        for index in 0..self.ports.len() {
            self.post(index);
            self.respond(index);
        }
        let events = self.node.poll();
        let progress = !events.is_empty();
        for event in events {
            self.handle(event);
        }
        progress || self.ports.iter().any(|port| port.patience > 0)
    }

    fn handle(&mut self, event: Event) {
        let late = if self.answer == Answer::Any && self.random.once_in(3) { 4 } else { 0 };
        let (Event::Header { lane, .. }
        | Event::Landed { lane }
        | Event::Piece { lane, .. }
        | Event::Sent { lane, .. }
        | Event::Answered { lane, .. }
        | Event::Closed { lane, .. }) = event;
        let index = lane.0 as usize;
        let port = &mut self.ports[index];
        assert_eq!(port.closed, None, "{event:?} after Closed");
        match event {
            Event::Header { header, .. } => {
                let header = Header::decode(&header).unwrap();
                assert_eq!(header.key.0, port.received, "headers come in order");
                assert!(matches!(port.reading, Reading::Idle), "a header within a payload");
                port.reading = Reading::Asked { length: header.length as usize };
                port.patience = late;
                self.respond(index);
            }
            Event::Landed { .. } => {
                let reading = std::mem::replace(&mut port.reading, Reading::Idle);
                let Reading::Landing { memory, shift, length } = reading else {
                    panic!("Landed without a landing")
                };
                let sequence = port.received;
                port.received += 1;
                let (before, rest) = memory.split_at(shift);
                let (payload, after) = rest.split_at(length);
                assert!(payload == self.payload(sequence, length), "frame {sequence} is wrong");
                let guards = before.iter().chain(after).all(|byte| *byte == GUARD);
                assert!(guards, "frame {sequence} of {length} bytes wrote outside its landing");
            }
            Event::Piece { piece, .. } => {
                let (data, count) = (piece.as_ptr(), piece.len());
                let Reading::Pieces { length, done } = port.reading else {
                    panic!("a piece that nobody asked for")
                };
                assert!(count > 0 && done + count <= length, "{count} bytes after {done}");
                assert!(data.addr().is_multiple_of(ALIGNMENT), "a piece is not aligned");
                let last = done + count == length;
                assert!(last || count.is_multiple_of(ALIGNMENT), "an odd piece of {count} bytes");
                port.reading = Reading::Held { length, done, piece };
                port.patience = late;
                self.respond(index);
            }
            Event::Sent { token, .. } => {
                let (expected, buffer) = port.in_flight.pop_front().expect("Sent twice");
                assert_eq!(token, expected, "Sent comes in order");
                port.sent += 1;
                // SAFETY: the buffer is this party's own again and still allocated.
                unsafe { std::ptr::write_bytes(buffer.at, OVERWRITTEN, buffer.length) };
            }
            Event::Answered { .. } => panic!("nothing was granted"),
            Event::Closed { cause, .. } => {
                port.closed = Some(cause);
                port.patience = 0;
                // Whatever was the transport's is ours again: it must stay as we leave it now.
                if let Reading::Landing { memory, .. } = &mut port.reading {
                    memory.fill(OVERWRITTEN);
                }
            }
        }
    }

    /// Answers a header or gives a piece back, unless it is too early.
    fn respond(&mut self, index: usize) {
        let pieces =
            self.answer == Answer::Pieces || (self.answer == Answer::Any && self.random.once_in(2));
        let port = &mut self.ports[index];
        if self.answer == Answer::Never || port.closed.is_some() {
            return;
        }
        port.patience = port.patience.saturating_sub(1);
        if port.patience > 0 {
            return;
        }
        match port.reading {
            Reading::Asked { length } => {
                let mut memory = vec![GUARD; length + 2 * GUARD_BYTES];
                let shift = 1 + self.random.index(GUARD_BYTES);
                // SAFETY: looked at once the payload has landed, or the lane is gone.
                let into = unsafe { Writable::of(&mut memory[shift..][..length]) };
                let landing = if pieces { Landing::Pieces(length) } else { Landing::Into(into) };
                let lane = port.lane;
                port.reading = match length {
                    0 => Reading::Idle,
                    _ if pieces => Reading::Pieces { length, done: 0 },
                    _ => Reading::Landing { memory, shift, length },
                };
                port.received += u64::from(length == 0);
                self.node.driver.land(lane, landing);
            }
            Reading::Held { length, done, piece } => {
                let (sequence, lane) = (port.received, port.lane);
                // SAFETY: it is consumed below, once its bytes have been compared.
                let (piece, count) = (unsafe { piece.lend().bytes() }, piece.len());
                let right = piece == &self.payload(sequence, length)[done..done + count];
                assert!(right, "frame {sequence} is wrong between {done} and {}", done + count);
                let port = &mut self.ports[index];
                port.reading = if done + count == length {
                    port.received += 1;
                    Reading::Idle
                } else {
                    Reading::Pieces { length, done: done + count }
                };
                self.node.driver.consume(lane);
            }
            _ => {}
        }
    }
}

/// Two parties over a world, with so many lanes.
pub fn parties(world: &World, lanes: u32, seed: u64) -> (Party, Party) {
    let (left, right) = world.pair(lanes);
    let (left, mut right) = (Party::new(left, lanes, seed), Party::new(right, lanes, seed + 1));
    right.arena = world.arena();
    (left, right)
}

/// Lets both parties take turns until `done` says so.
///
/// # Panics
/// When nothing moves any more, or it takes too long.
pub fn run(
    world: &World,
    left: &mut Party,
    right: &mut Party,
    mut done: impl FnMut(&Party, &Party) -> bool,
) {
    let start = Instant::now();
    let mut still = 0;
    while !done(left, right) {
        let moved = left.turn() | right.turn();
        still = if world.step() || moved { 0 } else { still + 1 };
        let patience = if world.kind.is_rdma() { PATIENCE_RDMA } else { PATIENCE };
        let hangs = still > 1000 || start.elapsed() > patience;
        assert!(!hangs, "hangs: {} and {}", state(left), state(right));
    }
}

/// As [`run`], until everything planned on both sides has arrived.
pub fn run_all(world: &World, left: &mut Party, right: &mut Party) {
    run(world, left, right, |left, right| {
        let sent = |party: &Party| party.ports.iter().map(|port| port.posted).sum::<u64>();
        left.is_done()
            && right.is_done()
            && left.received() == sent(right)
            && right.received() == sent(left)
    });
}

fn state(party: &Party) -> String {
    let ports = party.ports.iter().map(|port| {
        let (posted, sent, received) = (port.posted, port.sent, port.received);
        let reading = match port.reading {
            Reading::Idle => "idle",
            Reading::Asked { .. } => "asked",
            Reading::Landing { .. } => "landing",
            Reading::Pieces { .. } => "pieces",
            Reading::Held { .. } => "held",
        };
        format!("[posted {posted} sent {sent} received {received} {reading} {:?}]", port.closed)
    });
    ports.collect()
}
