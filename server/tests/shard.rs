//! A core of a server between two memberships.

use bps_engine::base::{DType, Epoch, Key, Operation, Rank, Round};
use bps_engine::lane::Endpoint;
use bps_engine::mem::{Arena, Options, Readable};
use bps_engine::optimize::{Act, Number};
use bps_engine::proto::members::Members;
use bps_engine::proto::messages::{KeySpec, RetiredKey};
use bps_engine::proto::store::{Deltas, Store};
use bps_engine::ring::Mpsc;
use bps_engine::trace::counters::Counters;
use bps_engine::transport::sim::{Sim, SimNetwork};
use bps_engine::transport::{Event, Frame, Landing, LaneId, Link, Transport, Waker};
use bps_engine::wire::header::Form;
use bps_engine::wire::{Header, Kind};
use bps_server::entry::Groups;
use bps_server::shard::{Command, Refusal, Report, Shard};
use std::sync::Arc;
use std::time::Duration;

/// A core on the simulated network, and its two queues.
struct Core {
    shard: Shard,
    network: SimNetwork,
    commands: Mpsc<Command>,
    reports: Mpsc<(u32, Report)>,
    counters: Arc<Counters>,
}

impl Core {
    fn new() -> Core {
        let (network, waker) = (SimNetwork::new(1), Waker::new().expect("an eventfd"));
        let (commands, reports) = (Mpsc::new(64), Mpsc::new(64));
        let counters: Arc<Counters> = Arc::default();
        let options = Options { name: "test".into(), numa_node: None, shared: false };
        let shard = Shard::new(
            0,
            Endpoint::new(vec![Transport::Sim(Sim::new(network.clone()))], waker.clone()),
            Arena::reserve(1 << 20, &options).expect("address space"),
            commands.clone(),
            reports.clone(),
            waker,
            Arc::clone(&counters),
            Duration::from_secs(3),
        );
        Core { shard, network, commands, reports, counters }
    }

    fn order(&mut self, command: Command) {
        assert!(self.commands.push(command).is_ok(), "a short queue");
        self.shard.step(Duration::ZERO);
    }

    /// The other end of a lane that a worker has dialled.
    fn dial(&mut self, rank: u32, epoch: u32) -> Link {
        let (here, there) = self.network.link();
        let (rank, epoch) = (Rank(rank), Epoch(epoch));
        self.order(Command::Attach { link: Link::Sim(here), rank, epoch });
        Link::Sim(there)
    }

    fn turned_away(&mut self) -> usize {
        let reports = std::iter::from_fn(|| self.reports.pop());
        reports.filter(|(_, report)| matches!(report, Report::TurnedAway { .. })).count()
    }
}

fn begin(epoch: u32, ranks: usize) -> Command {
    let groups: Vec<u32> = (0..ranks).map(|rank| u32::try_from(rank).unwrap()).collect();
    Command::Begin { epoch: Epoch(epoch), groups: Arc::new(Groups::new(&groups)) }
}

#[test]
fn workers_may_dial_before_the_server_knows_the_ranks_of_a_resumed_job() {
    let mut core = Core::new();
    // All of an epoch before have suspended: the next one has a number, and no ranks yet.
    core.order(begin(2, 0));
    let mut lanes = vec![core.dial(1, 2)];
    assert_eq!(core.turned_away(), 0);
    core.order(begin(2, 2));
    lanes.push(core.dial(0, 2));
    assert_eq!(core.turned_away(), 0);
    // Only then is a second lane of a rank one too many, and so is one of the membership before.
    lanes.push(core.dial(1, 2));
    lanes.push(core.dial(0, 1));
    lanes.push(core.dial(2, 2));
    assert_eq!(core.turned_away(), 3);
}

/// A key of all ranks, to be summed.
fn spec(key: u64, bytes: u32, dtype: DType) -> KeySpec {
    let (key, operation, members) = (Key(key), Operation::Sum, Members::ALL);
    let (rounds, encoding, store) = (0, None, None);
    KeySpec { key, core: 0, dtype, bytes, operation, rounds, members, encoding, store }
}

impl Core {
    /// Installs a key of this many bytes, which has had so many rounds.
    fn install(&mut self, key: u64, bytes: u32, rounds: u64) {
        let spec = KeySpec { rounds, ..spec(key, bytes, DType::F32) };
        self.order(Command::Install { request: 1, keys: vec![spec] });
        let answers = std::iter::from_fn(|| self.reports.pop()).map(|(_, report)| report);
        let mut answers = answers.filter(|report| !matches!(report, Report::Begun { .. }));
        let report = answers.next().expect("an answer");
        assert!(matches!(report, Report::Installed { request: 1 }), "{report:?}");
    }

    fn retire(&mut self, key: u64, rounds: u64) {
        let keys = vec![RetiredKey { key: Key(key), core: 0, rounds }];
        self.order(Command::Retire { keys });
    }

    /// Keys that it has, and bytes of memory that it has claimed for them.
    fn held(&self) -> (u64, u64) {
        self.shard.sample();
        (self.counters.keys.read(), self.counters.arena_claimed.read())
    }
}

#[test]
fn a_retired_key_gives_its_memory_back_once_it_had_its_last_round() {
    let mut core = Core::new();
    core.order(begin(1, 2));
    core.install(0, 256 << 10, 0);
    core.install(1, 128 << 10, 0);
    assert_eq!(core.held(), (2, 384 << 10));
    // Nobody has pushed it, and nobody will.
    core.retire(0, 0);
    assert_eq!(core.held(), (1, 128 << 10));
    // Its last round is still to come; or it is used again before that.
    core.retire(1, 5);
    core.retire(77, 5);
    assert_eq!(core.held(), (1, 128 << 10));
    core.install(1, 128 << 10, 5);
    // One that was forgotten comes back where it stood. The arena has 1 MiB for all of them.
    for turn in 0..100 {
        core.install(0, 512 << 10, turn);
        assert_eq!(core.held(), (2, 640 << 10));
        core.retire(0, turn);
    }
    assert_eq!(core.held(), (1, 128 << 10));
}

#[test]
fn keys_that_no_part_can_have_are_refused_one_by_one() {
    let mut core = Core::new();
    core.order(begin(1, 2));
    core.install(0, 4 << 10, 0);
    let of = |ranks: &[u32], operation| {
        let members = Members::new(ranks.iter().copied().map(Rank).collect()).unwrap();
        KeySpec { members, operation, ..spec(2, 4 << 10, DType::F32) }
    };
    core.retire(0, 5);
    for (spec, why) in [
        (spec(1, 0, DType::F32), "has 0 bytes of f32"),
        (spec(1, 6, DType::F32), "has 6 bytes of f32"),
        (spec(1, u32::MAX - 3, DType::F32), "has 4294967292 bytes of f32"),
        (spec(0, 4 << 10, DType::F16), "installed again as something else"),
        (spec(0, 4 << 10, DType::F32), "installed twice"),
        (of(&[1, 2], Operation::Sum), "is for ranks 1, 2"),
        (of(&[1], Operation::Broadcast(Rank(0))), "its root among them"),
        (KeySpec { members: Members::ALL, ..of(&[0], Operation::Broadcast(Rank(9))) }, "all ranks"),
    ] {
        core.order(Command::Install { request: 2, keys: vec![spec] });
        let Some((0, Report::Failed { message })) = core.reports.pop() else { panic!("{why}") };
        assert!(message.contains(why), "{message}");
    }
    assert_eq!(core.held(), (1, 4 << 10), "none of them has taken memory");
    core.retire(0, 5);
    let other = KeySpec { key: Key(0), ..of(&[0], Operation::Sum) };
    core.order(Command::Install { request: 2, keys: vec![other] });
    let Some((0, Report::Failed { message })) = core.reports.pop() else { panic!("another set") };
    assert!(message.contains("installed again as something else"), "{message}");
}

#[test]
fn a_set_is_summed_without_the_others_who_are_refused() {
    let mut core = Core::new();
    core.order(begin(1, 3));
    let links = [0, 1, 2].map(|rank| core.dial(rank, 1));
    let sim = Transport::Sim(Sim::new(core.network.clone()));
    let mut workers = Endpoint::new(vec![sim], Waker::new().expect("an eventfd"));
    let lanes = links.map(|link| workers.attach(link).expect("a lane"));
    let members = Members::new(vec![Rank(2), Rank(0)]).unwrap();
    let keys = vec![KeySpec { members, ..spec(7, 8, DType::F32) }];
    core.order(Command::Install { request: 1, keys });
    let values = [1f32, 2., 4.].map(|value| [value.to_le_bytes(), value.to_le_bytes()].concat());
    let mut refused = Vec::new();
    let mut results = Vec::new();
    // Whoever is not in the set comes first, and in the middle.
    for rank in [1usize, 0, 2] {
        let speaker = Rank(u32::try_from(rank).unwrap());
        let header = Header {
            key: Key(7),
            round: Round(1),
            length: 8,
            contributors: 1,
            ..Header::new(Kind::Contribution, DType::F32, speaker, Epoch(1))
        };
        // SAFETY: the values live as long as the endpoint, and nobody writes them.
        let payload = unsafe { Readable::of(&values[rank]) };
        let frame = Frame::new(header.encode(), payload, 0);
        workers.post(lanes[rank], &frame).expect("an empty lane");
        let mut events = Vec::new();
        for _ in 0..1000 {
            core.shard.step(Duration::ZERO);
            workers.poll(&mut events);
            for event in events.drain(..) {
                match event {
                    Event::Header { lane, header, .. } => {
                        let header = Header::decode(&header).expect("a server's");
                        if header.kind == Kind::Publication {
                            results.push((lane, header.rank, header.contributors));
                        }
                        workers.land(lane, Landing::Pieces(header.length as usize));
                    }
                    Event::Piece { lane, piece } => {
                        // SAFETY: it has just come, and is consumed below.
                        let bytes = unsafe { piece.lend().bytes().to_vec() };
                        assert_eq!(bytes, [5f32.to_le_bytes(), 5f32.to_le_bytes()].concat());
                        workers.consume(lane);
                    }
                    _ => {}
                }
            }
            while let Some((_, report)) = core.reports.pop() {
                if let Report::Refused { rank, why } = report {
                    refused.push((rank, why));
                }
            }
            core.network.advance();
        }
    }
    assert_eq!(refused, [(Rank(1), Refusal::Outside { key: Key(7), rank: Rank(1) })]);
    results.sort_by_key(|(_, rank, _)| *rank);
    assert_eq!(results, [(lanes[0], Rank(0), 2), (lanes[2], Rank(2), 2)]);
}

/// What the ranks that live get for these payloads of one form, in a job that goes on without its
/// last rank and declares the key after that.
#[test]
fn a_key_that_each_rank_encodes_as_it_likes_waits_for_those_who_live() {
    let mut core = Core::new();
    let groups = Groups::new(&[0, 1, 2]).that_shrink(true);
    core.order(Command::Begin { epoch: Epoch(1), groups: Arc::new(groups) });
    core.order(Command::Shrink { gone: [Rank(2)].into() });
    let encoding = Some("auto".parse().expect("an encoding"));
    let operation = Operation::Average;
    let key = KeySpec { encoding, operation, ..spec(7, 16, DType::F32) };
    let links = [core.dial(0, 1), core.dial(1, 1)];
    let sim = Transport::Sim(Sim::new(core.network.clone()));
    let mut worker = Endpoint::new(vec![sim], Waker::new().expect("an eventfd"));
    let lanes = links.map(|link| worker.attach(link).expect("a lane"));
    core.order(Command::Install { request: 1, keys: vec![key] });
    let payload: Vec<u8> = [2.0f32, 4.0, 6.0, 8.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let half: Vec<u8> = payload.chunks(4).flat_map(|one| one[2..].to_vec()).collect();
    let mut results = Vec::new();
    let forms = [(Form::Plain, &payload), (Form::Half, &half)];
    for ((rank, lane), (form, payload)) in (0..).zip(lanes).zip(forms) {
        let header = Header {
            key: Key(7),
            flags: form.flag(),
            round: Round(1),
            length: u32::try_from(payload.len()).unwrap(),
            contributors: 1,
            ..Header::new(Kind::Contribution, DType::F32, Rank(rank), Epoch(1))
        };
        // SAFETY: the payloads live as long as the endpoint, and nobody writes them.
        let frame = Frame::new(header.encode(), unsafe { Readable::of(payload) }, 0);
        worker.post(lane, &frame).expect("an empty lane");
    }
    let mut events = Vec::new();
    for _ in 0..400 {
        core.shard.step(Duration::ZERO);
        worker.poll(&mut events);
        for event in events.drain(..) {
            match event {
                Event::Header { lane, header, .. } => {
                    let header = Header::decode(&header).expect("a server's");
                    worker.land(lane, Landing::Pieces(header.length as usize));
                    results.push((header.contributors, header.missing, header.form(), vec![]));
                }
                Event::Piece { piece, lane, .. } => {
                    // SAFETY: it has just come, and is consumed below.
                    let bytes = unsafe { piece.lend().bytes() }.to_vec();
                    results.last_mut().expect("its header").3.extend(bytes);
                    worker.consume(lane);
                }
                _ => {}
            }
        }
        core.network.advance();
    }
    // The mean of two equal contributions, as bf16, and who is not in it.
    assert_eq!(results, vec![(2, 1, Form::Half, half.clone()); 2]);
}

/// What a core with this key, of one rank, says of these payloads, each with what it is for: the
/// last result, or why it refuses one.
fn contribute_all(key: KeySpec, payloads: &[(Act, &[u8])]) -> Result<Vec<u8>, Refusal> {
    contribute_all_as(Form::Declared, key, payloads)
}

/// The same, of payloads that come as this form.
fn contribute_all_as(
    form: Form,
    key: KeySpec,
    payloads: &[(Act, &[u8])],
) -> Result<Vec<u8>, Refusal> {
    let mut core = Core::new();
    core.order(begin(1, 1));
    let link = core.dial(0, 1);
    let sim = Transport::Sim(Sim::new(core.network.clone()));
    let mut worker = Endpoint::new(vec![sim], Waker::new().expect("an eventfd"));
    let lane = worker.attach(link).expect("a lane");
    core.order(Command::Install { request: 1, keys: vec![key] });
    let (mut events, mut result) = (Vec::new(), Vec::new());
    for (round, (act, payload)) in (1..).zip(payloads) {
        result.clear();
        let header = Header {
            key: Key(7),
            flags: form.flag(),
            round: Round(round),
            length: u32::try_from(payload.len()).unwrap(),
            contributors: 1,
            act: act.word(),
            ..Header::new(Kind::Contribution, DType::F32, Rank(0), Epoch(1))
        };
        // SAFETY: the payload lives as long as the endpoint, and nobody writes it.
        let frame = Frame::new(header.encode(), unsafe { Readable::of(payload) }, 0);
        worker.post(lane, &frame).expect("an empty lane");
        for _ in 0..200 {
            core.shard.step(Duration::ZERO);
            worker.poll(&mut events);
            for event in events.drain(..) {
                match event {
                    Event::Header { header, .. } => {
                        let header = Header::decode(&header).expect("a server's");
                        worker.land(lane, Landing::Pieces(header.length as usize));
                    }
                    Event::Piece { piece, .. } => {
                        // SAFETY: it has just come, and is consumed below.
                        result.extend_from_slice(unsafe { piece.lend().bytes() });
                        worker.consume(lane);
                    }
                    _ => {}
                }
            }
            while let Some((_, report)) = core.reports.pop() {
                if let Report::Refused { why, .. } = report {
                    return Err(why);
                }
            }
            core.network.advance();
        }
    }
    Ok(result)
}

/// What is said of this payload to a key of four elements that is encoded so.
fn contribute(text: &str, payload: &[u8]) -> Result<Vec<u8>, Refusal> {
    contribute_as(Form::Declared, text, payload)
}

/// The same, as which form it says that it comes.
fn contribute_as(form: Form, text: &str, payload: &[u8]) -> Result<Vec<u8>, Refusal> {
    let encoding = Some(text.parse().expect("an encoding"));
    let key = KeySpec { encoding, ..spec(7, 16, DType::F32) };
    contribute_all_as(form, key, &[(Act::NONE, payload)])
}

#[test]
fn what_an_optimizer_does_not_do_is_refused() {
    let store = Some(Store::Optimizer("sgd(momentum=0.5)".parse().expect("an optimizer")));
    let encoding = Some("bf16".parse().expect("an encoding"));
    let key = KeySpec { store, encoding, ..spec(7, 16, DType::F32) };
    let rate = |rate| Act::step(Number::new(rate).expect("a rate"));
    let (set, step, get) = (Act::set(0, 0), rate(0.5), Act::get(0));
    let floats = |values: [f32; 4]| values.map(f32::to_le_bytes).concat();
    let (start, halves) = (floats([1.0, 2.0, 3.0, 4.0]), [0x80, 0x3f].repeat(4));
    let begun = (set, &start[..]);
    let stepped = contribute_all(key.clone(), &[begun, (step, &halves), (get, &start)]);
    assert_eq!(stepped, Ok(floats([0.5, 1.5, 2.5, 3.5])));
    let act = |act| Err(Refusal::Act { key: Key(7), act });
    // Nothing to step from, or to get.
    assert_eq!(contribute_all(key.clone(), &[(step, &halves)]), act(step));
    assert_eq!(contribute_all(key.clone(), &[(get, &start)]), act(get));
    for wrong in [Act::get(2), Act::set(2, 1), Act::NONE, Act::from_word(u64::MAX)] {
        assert_eq!(contribute_all(key.clone(), &[begun, (wrong, &start)]), act(wrong));
    }
    // Steps are encoded, and nothing else is.
    let shape = Err(Refusal::Shape { key: Key(7) });
    assert_eq!(contribute_all(key.clone(), &[begun, (step, &start)]), shape);
    assert_eq!(contribute_all(key.clone(), &[begun, (get, &halves)]), shape);
    let plain = KeySpec { store: None, encoding: None, ..key };
    assert_eq!(contribute_all(plain, &[(step, &start)]), act(step));
}

#[test]
fn what_is_no_encoding_of_a_key_is_refused() {
    // Two indices that rise, and two values.
    let payload = |first: u16, second: u16| {
        let mut bytes = [first.to_le_bytes(), second.to_le_bytes()].concat();
        bytes.extend([1.5f32.to_le_bytes(), (-2f32).to_le_bytes()].concat());
        bytes
    };
    assert_eq!(contribute("topk(k=2)", &payload(1, 3)), Ok(payload(1, 3)));
    for (first, second) in [(1, 4), (3, 1), (2, 2), (0, u16::MAX)] {
        let refused = contribute("topk(k=2)", &payload(first, second));
        let is_malformed = matches!(refused, Err(Refusal::Encoding { key: Key(7), .. }));
        assert!(is_malformed, "{first}, {second}: {refused:?}");
    }
    for length in 1..12 {
        let refused = contribute("topk(k=2)", &payload(1, 3)[..length]);
        let is_malformed = matches!(refused, Err(Refusal::Encoding { key: Key(7), .. }));
        assert!(is_malformed, "{length} bytes: {refused:?}");
    }
    // More than any encoding of the key has is not received at all.
    let refused = contribute("topk(k=2)", &[0; 13]);
    assert_eq!(refused, Err(Refusal::Shape { key: Key(7) }));
}

#[test]
fn a_form_is_taken_where_it_may_be_chosen_and_has_its_length() {
    let plain: Vec<u8> =
        [1.0f32, -2.0, 0.5, 4.0].iter().flat_map(|one| one.to_le_bytes()).collect();
    let half: Vec<u8> = plain.chunks(4).flat_map(|one| one[2..].to_vec()).collect();
    assert_eq!(contribute_as(Form::Plain, "auto", &plain), Ok(plain.clone()));
    assert_eq!(contribute_as(Form::Half, "auto", &half), Ok(half.clone()));
    for (form, text, payload) in [
        (Form::Plain, "int8", &plain),
        (Form::Half, "int8", &half),
        (Form::Plain, "auto", &half),
        (Form::Half, "auto", &plain),
        (Form::Declared, "auto", &plain),
    ] {
        let refused = contribute_as(form, text, payload);
        assert_eq!(refused, Err(Refusal::Shape { key: Key(7) }), "{form:?} of {text}");
    }
}

#[test]
fn a_key_that_cannot_be_encoded_is_refused() {
    let mut core = Core::new();
    core.order(begin(1, 2));
    let encoding = Some("int8".parse().expect("an encoding"));
    let auto = Some("auto".parse().expect("an encoding"));
    let of = |dtype, operation| KeySpec { encoding, operation, ..spec(1, 1 << 10, dtype) };
    for (spec, why) in [
        (of(DType::I32, Operation::Sum), "floats alone are encoded"),
        (of(DType::F32, Operation::Min), "sums and averages alone are encoded"),
        (KeySpec { encoding: auto, ..of(DType::F64, Operation::Sum) }, "auto does not encode"),
    ] {
        core.order(Command::Install { request: 2, keys: vec![spec] });
        let reports = std::iter::from_fn(|| core.reports.pop()).map(|(_, report)| report);
        let failed = reports.filter_map(|report| match report {
            Report::Failed { message } => Some(message),
            _ => None,
        });
        let messages: Vec<String> = failed.collect();
        assert!(messages.iter().any(|message| message.contains(why)), "{messages:?}");
    }
    assert_eq!(core.held(), (0, 0));
}

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
