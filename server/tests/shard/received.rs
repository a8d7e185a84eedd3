//! Keys whose results go to one rank.

use super::*;

/// Four ranks, of which the last two are of one host, and a key whose results rank `to` gets.
struct Receiving {
    core: Core,
    workers: Endpoint,
    lanes: Vec<LaneId>,
    /// Publications in the order in which they came: to whom, its round, its contributors, and its
    /// bytes.
    results: Vec<(Rank, u64, u32, Vec<u8>)>,
    refused: Vec<(Rank, Refusal)>,
}

fn received(key: u64, to: u32) -> KeySpec {
    KeySpec { receiver: Some(Rank(to)), ..spec(key, 8, DType::F32) }
}

impl Receiving {
    fn new(spec: KeySpec) -> Receiving {
        let mut core = Core::new();
        let groups = Arc::new(Groups::new(&[0, 1, 2, 2]));
        core.order(Command::Begin { epoch: Epoch(1), groups });
        let sim = Transport::Sim(Sim::new(core.network.clone()));
        let mut workers = Endpoint::new(vec![sim], Waker::new().expect("an eventfd"));
        let lanes = (0..4).map(|rank| workers.attach(core.dial(rank, 1)).expect("a lane"));
        let lanes = lanes.collect();
        core.order(Command::Install { request: 1, keys: vec![spec] });
        Receiving { core, workers, lanes, results: Vec::new(), refused: Vec::new() }
    }

    /// A rank contributes this number, twice, for a group of so many.
    fn say(&mut self, rank: u32, round: u64, contributors: u32, value: f32) {
        let payload: &'static [u8] = Box::leak([value; 2].map(f32::to_le_bytes).concat().into());
        let header = Header {
            key: Key(7),
            round: Round(round),
            length: 8,
            contributors,
            ..Header::new(Kind::Contribution, DType::F32, Rank(rank), Epoch(1))
        };
        // SAFETY: the payload lives for ever, and nobody writes it.
        let frame = Frame::new(header.encode(), unsafe { Readable::of(payload) }, 0);
        self.workers.post(self.lanes[rank as usize], &frame).expect("an empty lane");
        self.run();
    }

    fn run(&mut self) {
        let mut events = Vec::new();
        for _ in 0..400 {
            self.core.shard.step(Duration::ZERO);
            self.workers.poll(&mut events);
            for event in events.drain(..) {
                match event {
                    Event::Header { lane, header, .. } => {
                        let header = Header::decode(&header).expect("a server's");
                        self.workers.land(lane, Landing::Pieces(header.length as usize));
                        if header.kind == Kind::Publication {
                            let Header { rank, round, contributors, .. } = header;
                            self.results.push((rank, round.0, contributors, Vec::new()));
                        }
                    }
                    Event::Piece { lane, piece } => {
                        let last = self.results.last_mut().expect("a publication's");
                        // SAFETY: it has just come, and is consumed below.
                        last.3.extend(unsafe { piece.lend().bytes() });
                        self.workers.consume(lane);
                    }
                    _ => {}
                }
            }
            while let Some((_, report)) = self.core.reports.pop() {
                if let Report::Refused { rank, why } = report {
                    self.refused.push((rank, why));
                }
            }
            self.core.network.advance();
        }
    }

    fn take(&mut self) -> Vec<(Rank, u64, u32, Vec<u8>)> {
        let mut results = std::mem::take(&mut self.results);
        results.sort_by_key(|(rank, ..)| *rank);
        results
    }
}

fn of(value: f32) -> Vec<u8> {
    [value; 2].map(f32::to_le_bytes).concat()
}

#[test]
fn the_receiver_gets_the_bytes_and_the_others_the_word_that_the_round_is_over() {
    let mut job = Receiving::new(received(7, 1));
    for round in 1..4 {
        job.say(2, round, 2, 4.);
        job.say(1, round, 1, 2.);
        assert!(job.take().is_empty(), "rank 0 is awaited");
        job.say(0, round, 1, 1.);
        let none = Vec::new;
        let expected = [(0, none()), (1, of(7.)), (2, none())]
            .map(|(rank, bytes)| (Rank(rank), round, 4, bytes));
        assert_eq!(job.take(), expected);
    }
    assert!(job.refused.is_empty());
    // Frames of 24 payloads came, and the bytes of three results went.
    assert_eq!((job.core.counters.bytes_in.read(), job.core.counters.bytes_out.read()), (72, 24));
}

#[test]
fn in_the_receivers_group_nobody_else_speaks() {
    let mut job = Receiving::new(received(7, 2));
    job.say(3, 1, 2, 4.);
    assert_eq!(job.refused, [(Rank(3), Refusal::Shape { key: Key(7) })]);
    let mut job = Receiving::new(received(7, 2));
    for (rank, contributors) in [(2, 2), (0, 1), (1, 1)] {
        job.say(rank, 1, contributors, 1.);
    }
    let lengths: Vec<_> = job.take().iter().map(|(rank, .., bytes)| (*rank, bytes.len())).collect();
    assert_eq!(lengths, [(Rank(0), 0), (Rank(1), 0), (Rank(2), 8)]);
}

#[test]
fn a_receiver_that_dies_takes_its_result_along_and_no_more() {
    let mut job = Receiving::new(received(7, 1));
    for (rank, contributors) in [(2, 2), (1, 1)] {
        job.say(rank, 1, contributors, 1.);
    }
    job.workers.close(job.lanes[1]);
    job.run();
    // Its contribution was whole: the round is over for the others, whom the scheduler tells.
    job.say(0, 1, 1, 1.);
    let ranks: Vec<_> = job.take().iter().map(|(rank, .., bytes)| (*rank, bytes.len())).collect();
    assert_eq!(ranks, [(Rank(0), 0), (Rank(2), 0)]);
    // Nobody reads the result, so the key takes the next round.
    job.say(0, 2, 1, 1.);
    assert!(job.refused.is_empty() && job.take().is_empty());
}

#[test]
fn receivers_that_no_key_can_have_are_refused_one_by_one() {
    let mut core = Core::new();
    core.order(begin(1, 2));
    while core.reports.pop().is_some() {}
    let few = Members::new(vec![Rank(0)]).unwrap();
    let good = received(7, 1);
    let store = Some(Store::Deltas(Deltas { root: Rank(0), staleness: None }));
    for (spec, why) in [
        (received(7, 2), "it is not for that rank"),
        (KeySpec { members: few, ..good.clone() }, "it is not for that rank"),
        (KeySpec { operation: Operation::Broadcast(Rank(0)), ..good.clone() }, "no receiver"),
        (KeySpec { encoding: Some("bf16".parse().unwrap()), ..good.clone() }, "encoded as bf16"),
        (KeySpec { store, ..good.clone() }, "servers keep its value"),
    ] {
        core.order(Command::Install { request: 2, keys: vec![spec] });
        let Some((0, Report::Failed { message })) = core.reports.pop() else { panic!("{why}") };
        assert!(message.contains("the results of key 7 can't go to one rank"), "{message}");
        assert!(message.contains(why), "{message}");
    }
    assert_eq!(core.held(), (0, 0), "none of them has taken memory");
    // A retired key keeps its receiver while it is busy.
    core.order(Command::Install { request: 1, keys: vec![good] });
    core.retire(7, 5);
    core.order(Command::Install { request: 2, keys: vec![received(7, 0)] });
    let reports = std::iter::from_fn(|| core.reports.pop()).map(|(_, report)| report);
    let failed = reports.filter_map(|report| match report {
        Report::Failed { message } => Some(message),
        _ => None,
    });
    let failed: Vec<String> = failed.collect();
    assert!(matches!(&failed[..], [one] if one.contains("as something else")), "{failed:?}");
    // Where rounds go on without ranks that die, a result must not be one rank's alone.
    let mut core = Core::new();
    let groups = Arc::new(Groups::new(&[0, 1]).that_shrink(true));
    core.order(Command::Begin { epoch: Epoch(1), groups });
    while core.reports.pop().is_some() {}
    core.order(Command::Install { request: 1, keys: vec![received(7, 1)] });
    let Some((0, Report::Failed { message })) = core.reports.pop() else { panic!("it shrinks") };
    assert!(message.contains("BPS_ELASTIC=shrink"), "{message}");
}
