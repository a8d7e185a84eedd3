//! Lanes that end at random moments, on either side, in the midst of traffic: no event of a dead
//! lane reaches its successor, and memory given back is never touched again.

#![forbid(unsafe_code)]

use super::*;

const LANES: usize = 4;
const TURNS: usize = 3_000;
const SENTINEL: u8 = 0xa7;

/// Memory that the transport has given back; it must keep its sentinel.
#[derive(Default)]
struct Graveyard(Vec<Vec<u8>>);

impl Graveyard {
    fn bury(&mut self, mut memory: Vec<u8>) {
        memory.fill(SENTINEL);
        self.0.push(memory);
        // The oldest may be reused: what is in flight is never as old.
        if self.0.len() > 64 {
            self.check(0);
            self.0.remove(0);
        }
    }

    fn check(&self, index: usize) {
        assert!(self.0[index].iter().all(|&byte| byte == SENTINEL), "written after Closed");
    }
}

#[derive(Default)]
struct Half {
    open: bool,
    /// Which attachment of this lane it is: it travels in the headers of the test.
    era: u64,
    posted: VecDeque<Vec<u8>>,
    landing: Vec<u8>,
    held: bool,
}

struct Side {
    tcp: Tcp,
    halves: Vec<Half>,
    dead: Graveyard,
    landed: usize,
}

impl Side {
    fn new(driver: TcpDriver) -> Side {
        let halves = (0..LANES).map(|_| Half::default()).collect();
        Side { tcp: transport(driver, LANES as u32), halves, dead: Graveyard::default(), landed: 0 }
    }

    fn attach(&mut self, index: usize, socket: OwnedFd) {
        self.tcp.attach(LaneId(index as u32), Link::Tcp(socket)).expect("the id is free");
        self.halves[index].open = true;
        self.halves[index].era += 1;
    }

    fn turn(&mut self, random: &mut Random) {
        let index = random.below(LANES as u64) as usize;
        let half = &mut self.halves[index];
        if half.open && half.posted.len() < 8 {
            let scale = 4 + random.below(17);
            let payload = vec![half.era as u8; random.below(1 << scale) as usize];
            if post(&mut self.tcp, index as u32, &payload, half.era).is_ok() {
                half.posted.push_back(payload);
            }
        }
        let mut events = Vec::new();
        self.tcp.poll(&mut events);
        for event in events {
            self.handle(event, random);
        }
    }

    fn handle(&mut self, event: Event, random: &mut Random) {
        let (Event::Header { lane, .. }
        | Event::Landed { lane }
        | Event::Piece { lane, .. }
        | Event::Sent { lane, .. }
        | Event::Answered { lane, .. }
        | Event::Closed { lane, .. }) = event;
        let half = &mut self.halves[lane.0 as usize];
        assert!(half.open, "{event:?} of a lane that is closed");
        match event {
            Event::Header { header, .. } => {
                assert_eq!(header[8], half.era as u8, "a frame of another lane's life");
                half.landing = vec![0; length_in(&header)];
                let pieces = Landing::Pieces(half.landing.len());
                let in_pieces = random.below(2) == 0;
                let landing = if in_pieces { pieces } else { into(&mut half.landing) };
                self.tcp.land(lane, landing);
            }
            Event::Landed { .. } => {
                assert!(half.landing.iter().all(|&byte| byte == half.era as u8), "bytes differ");
                self.landed += 1;
            }
            Event::Piece { .. } if random.below(8) == 0 => half.held = true,
            Event::Piece { .. } => self.tcp.consume(lane),
            Event::Sent { token, .. } => {
                assert_eq!(token, half.era, "a frame of another lane's life");
                self.dead.bury(half.posted.pop_front().expect("one Sent for each frame"));
            }
            Event::Answered { .. } => panic!("nothing was granted"),
            Event::Closed { .. } => {
                (half.open, half.held) = (false, false);
                let landing = std::mem::take(&mut half.landing);
                self.dead.bury(landing);
                while let Some(payload) = half.posted.pop_front() {
                    self.dead.bury(payload);
                }
            }
        }
    }

    fn answer_late(&mut self) {
        for (index, half) in self.halves.iter_mut().enumerate() {
            if half.open && std::mem::take(&mut half.held) {
                self.tcp.consume(LaneId(index as u32));
            }
        }
    }
}

#[test]
fn lanes_that_end_at_random_moments() {
    use TcpDriver::{Poll, Uring};
    for (seed, drivers) in [[Uring, Uring], [Poll, Poll], [Poll, Uring]].into_iter().enumerate() {
        let mut random = Random(1 + seed as u64);
        let mut sides = drivers.map(Side::new);
        let mut lives = 0;
        for turn in 0..TURNS {
            for index in 0..LANES {
                if sides.iter().all(|side| !side.halves[index].open) {
                    let (one, two) = sockets(random.below(2) == 0);
                    sides[0].attach(index, one);
                    sides[1].attach(index, two);
                    lives += 1;
                }
            }
            let chosen = random.below(2) as usize;
            sides[chosen].turn(&mut random);
            if random.below(5) == 0 {
                sides[chosen].answer_late();
            }
            if random.below(25) == 0 {
                sides[chosen].tcp.close(LaneId(random.below(LANES as u64) as u32));
            }
            if turn % 64 == 0 {
                sides[chosen].tcp.block(Duration::from_micros(100));
            }
        }
        let landed = sides[0].landed + sides[1].landed;
        assert!(lives > 50 && landed > 200, "seed {seed}: {lives} lives, {landed} frames");
        for side in &sides {
            (0..side.dead.0.len()).for_each(|index| side.dead.check(index));
        }
    }
}
