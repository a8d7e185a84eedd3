//! Keys whose value stays between rounds.

use super::*;

/// A core, and the ends of its lanes to so many ranks, with a stored key of two elements.
struct StoredKey {
    core: Core,
    workers: Endpoint,
    lanes: Vec<LaneId>,
    refused: Vec<(Rank, Refusal)>,
    /// What has come and is not looked at: the rank, the version and the first element.
    answers: Vec<(u32, u64, f32)>,
    /// Posted payloads, which live as long as the endpoint.
    sent: Vec<Box<[u8]>>,
}

impl StoredKey {
    const BYTES: u32 = 8;

    fn new(ranks: u32, store: Deltas) -> StoredKey {
        let mut core = Core::new();
        core.order(begin(1, ranks as usize));
        let links: Vec<Link> = (0..ranks).map(|rank| core.dial(rank, 1)).collect();
        let sim = Transport::Sim(Sim::new(core.network.clone()));
        let mut workers = Endpoint::new(vec![sim], Waker::new().expect("an eventfd"));
        let attach = |link| workers.attach(link).expect("a lane");
        let lanes = links.into_iter().map(attach).collect();
        let keys = vec![KeySpec {
            store: Some(Store::Deltas(store)),
            ..spec(7, StoredKey::BYTES, DType::F32)
        }];
        core.order(Command::Install { request: 1, keys });
        let (refused, answers, sent) = (Vec::new(), Vec::new(), Vec::new());
        StoredKey { core, workers, lanes, refused, answers, sent }
    }

    /// A rank contributes this value, or nothing, to this round of its own.
    fn push(&mut self, rank: u32, round: u64, value: Option<f32>) {
        let mut header = Header::new(Kind::Contribution, DType::F32, Rank(rank), Epoch(1));
        (header.key, header.round, header.contributors) = (Key(7), Round(round), 1);
        let payload = match value {
            None => Readable::EMPTY,
            Some(value) => {
                header.length = StoredKey::BYTES;
                let bytes = [value.to_le_bytes(), value.to_le_bytes()].concat();
                self.sent.push(bytes.into());
                // SAFETY: kept as long as the endpoint, and nobody writes them.
                unsafe { Readable::of(self.sent.last().expect("just pushed")) }
            }
        };
        self.post(rank, &Frame::new(header.encode(), payload, 0));
    }

    fn leave(&mut self, rank: u32) {
        let header = Header::new(Kind::Goodbye, DType::U8, Rank(rank), Epoch(1));
        self.post(rank, &Frame::bare(header.encode(), 0));
    }

    fn post(&mut self, rank: u32, frame: &Frame) {
        self.workers.post(self.lanes[rank as usize], frame).expect("an empty lane");
        self.settle();
    }

    /// What has been answered since the last call.
    fn answers(&mut self) -> Vec<(u32, u64, f32)> {
        std::mem::take(&mut self.answers)
    }

    /// Lets everything arrive that is under way.
    fn settle(&mut self) {
        let mut events = Vec::new();
        for _ in 0..500 {
            self.core.shard.step(Duration::ZERO);
            self.workers.poll(&mut events);
            for event in events.drain(..) {
                match event {
                    Event::Header { lane, header, .. } => {
                        let header = Header::decode(&header).expect("a server's");
                        if header.kind == Kind::Publication {
                            self.answers.push((header.rank.0, header.round.0, f32::NAN));
                        }
                        self.workers.land(lane, Landing::Pieces(header.length as usize));
                    }
                    Event::Piece { lane, piece } => {
                        // SAFETY: it has just come, and is consumed below.
                        let bytes = unsafe { piece.lend().bytes() };
                        let value = f32::from_le_bytes(bytes[..4].try_into().expect("four"));
                        let rank = self.lanes.iter().position(|other| *other == lane);
                        let rank = u32::try_from(rank.expect("a lane")).expect("few ranks");
                        let answer = self.answers.iter_mut().rfind(|(to, ..)| *to == rank);
                        answer.expect("a header came first").2 = value;
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
}

#[test]
fn a_stored_value_begins_with_the_roots_and_answers_each_delta_at_once() {
    let mut key = StoredKey::new(3, Deltas { root: Rank(1), staleness: None });
    key.push(0, 1, None);
    assert_eq!(key.answers(), [], "there is no value yet");
    key.push(1, 1, Some(10.0));
    let mut both = key.answers();
    both.sort_by_key(|(rank, ..)| *rank);
    assert_eq!(both, [(0, 1, 10.0), (1, 1, 10.0)]);
    // Ranks go on without rank 2, and count for themselves.
    key.push(0, 2, Some(1.0));
    key.push(0, 3, Some(1.0));
    key.push(1, 2, Some(0.5));
    assert_eq!(key.answers(), [(0, 2, 11.0), (0, 3, 12.0), (1, 4, 12.5)]);
    key.push(2, 1, None);
    assert_eq!(key.answers(), [(2, 4, 12.5)]);
    assert!(key.refused.is_empty(), "{:?}", key.refused);
}

#[test]
fn what_does_not_fit_a_ranks_own_rounds_is_refused() {
    let store = Deltas { root: Rank(0), staleness: None };
    let shape = Refusal::Shape { key: Key(7) };
    let round = |round, open| Refusal::Round { key: Key(7), round: Round(round), open };
    for (rank, number, value, why) in [
        (1, 1, Some(1.0), shape),
        (0, 1, None, shape),
        (0, 2, Some(1.0), round(2, 1)),
        (1, 0, None, round(0, 1)),
    ] {
        let mut key = StoredKey::new(2, store);
        key.push(rank, number, value);
        assert_eq!(key.refused, [(Rank(rank), why)]);
    }
    // A second contribution before the first is answered.
    let mut key = StoredKey::new(2, store);
    key.push(1, 1, None);
    key.push(1, 2, Some(1.0));
    assert_eq!(key.refused, [(Rank(1), round(2, 2))]);
    // The same again.
    let mut key = StoredKey::new(2, store);
    key.push(0, 1, Some(1.0));
    key.push(0, 1, Some(1.0));
    assert_eq!(key.refused, [(Rank(0), round(1, 2))]);
}

#[test]
fn a_bound_holds_answers_back_until_the_slowest_is_near_or_has_left() {
    let mut key = StoredKey::new(3, Deltas { root: Rank(0), staleness: Some(0) });
    key.push(0, 1, Some(0.0));
    key.push(1, 1, None);
    key.push(2, 1, None);
    assert_eq!(key.answers().len(), 3);
    key.push(0, 2, Some(1.0));
    key.push(1, 2, Some(1.0));
    assert_eq!(key.answers(), [], "rank 2 has pushed no delta");
    key.push(2, 2, Some(1.0));
    let mut all = key.answers();
    all.sort_by_key(|(rank, ..)| *rank);
    assert_eq!(all, [(0, 4, 3.0), (1, 4, 3.0), (2, 4, 3.0)]);
    key.push(0, 3, Some(1.0));
    key.leave(1);
    assert_eq!(key.answers(), []);
    key.leave(2);
    assert_eq!(key.answers(), [(0, 5, 4.0)]);
}

#[test]
fn a_key_that_cannot_be_stored_is_refused() {
    let mut core = Core::new();
    core.order(begin(1, 2));
    let store = |root| Some(Store::Deltas(Deltas { root: Rank(root), staleness: None }));
    let encoding = Some("bf16".parse().expect("an encoding"));
    let good = KeySpec { store: store(0), ..spec(1, 16, DType::F32) };
    for (spec, why) in [
        (KeySpec { dtype: DType::F16, ..good.clone() }, "would be rounded after each delta"),
        (KeySpec { operation: Operation::Max, ..good.clone() }, "deltas are summed"),
        (KeySpec { encoding, ..good.clone() }, "deltas are not encoded"),
        (KeySpec { store: store(2), ..good }, "its root among them"),
    ] {
        core.order(Command::Install { request: 2, keys: vec![spec] });
        let reports = std::iter::from_fn(|| core.reports.pop()).map(|(_, report)| report);
        let failed = reports.filter_map(|report| match report {
            Report::Failed { message } => Some(message),
            _ => None,
        });
        let messages: Vec<String> = failed.collect();
        assert!(messages.len() == 1 && messages[0].contains(why), "{messages:?}");
    }
    assert_eq!(core.held(), (0, 0), "none of them has taken memory");
}
