//! Keys that a core adopts of a server that is lost.

use super::*;
use bps_engine::proto::encoding::{SERVER, draw};
use bps_engine::proto::moving::Adopted;
use bps_engine::wire::header::FLAG_RESULT;

/// A result as a rank was sent it: round, contributors, who is missing, bytes.
type Sent = (u64, u32, u64, Vec<u8>);

/// A core that has adopted a key, and the lanes of three ranks to it.
struct Adopting {
    core: Core,
    worker: Endpoint,
    lanes: Vec<LaneId>,
    /// By rank.
    results: Vec<Vec<Sent>>,
    refused: Vec<Refusal>,
    restored: Vec<Key>,
}

impl Adopting {
    fn new(spec: &KeySpec, restores: bool) -> Adopting {
        let mut core = Core::new();
        let groups = Groups::new(&[0, 1, 2]).that_shrink(true);
        core.order(Command::Begin { epoch: Epoch(1), groups: Arc::new(groups) });
        let sim = Transport::Sim(Sim::new(core.network.clone()));
        let mut worker = Endpoint::new(vec![sim], Waker::new().expect("an eventfd"));
        let lanes = (0..3).map(|rank| worker.attach(core.dial(rank, 1)).expect("a lane")).collect();
        let adopted = Adopted { spec: spec.clone(), restores };
        core.order(Command::Adopt { request: 1, keys: vec![adopted] });
        let (results, refused, restored) = (vec![Vec::new(); 3], Vec::new(), Vec::new());
        Adopting { core, worker, lanes, results, refused, restored }
    }

    /// A rank says this of a round; for ever, since tests are short.
    fn say(
        &mut self,
        rank: u32,
        round: u64,
        (flags, contributors, missing): (u8, u32, u64),
        payload: &[u8],
    ) {
        let payload: &'static [u8] = Box::leak(payload.to_vec().into());
        let header = Header {
            key: Key(7),
            flags,
            round: Round(round),
            length: u32::try_from(payload.len()).unwrap(),
            contributors,
            missing,
            ..Header::new(Kind::Contribution, DType::F32, Rank(rank), Epoch(1))
        };
        // SAFETY: the payload lives for ever, and nobody writes it.
        let frame = Frame::new(header.encode(), unsafe { Readable::of(payload) }, 0);
        self.worker.post(self.lanes[rank as usize], &frame).expect("an empty lane");
    }

    fn run(&mut self) {
        let mut events = Vec::new();
        for _ in 0..400 {
            self.core.shard.step(Duration::ZERO);
            self.worker.poll(&mut events);
            for event in events.drain(..) {
                match event {
                    Event::Header { lane, header, .. } => {
                        let header = Header::decode(&header).expect("a server's");
                        let rank = self.lanes.iter().position(|one| *one == lane).unwrap();
                        self.worker.land(lane, Landing::Pieces(header.length as usize));
                        if header.kind == Kind::Publication {
                            let Header { round, contributors, missing, .. } = header;
                            self.results[rank].push((round.0, contributors, missing, vec![]));
                        }
                    }
                    Event::Piece { piece, lane, .. } => {
                        let rank = self.lanes.iter().position(|one| *one == lane).unwrap();
                        // SAFETY: it has just come, and is consumed below.
                        let bytes = unsafe { piece.lend().bytes() }.to_vec();
                        self.results[rank].last_mut().expect("its header").3.extend(bytes);
                        self.worker.consume(lane);
                    }
                    _ => {}
                }
            }
            while let Some((_, report)) = self.core.reports.pop() {
                match report {
                    Report::Refused { why, .. } => self.refused.push(why),
                    Report::Restored { keys } => self.restored.extend(keys),
                    _ => {}
                }
            }
            self.core.network.advance();
        }
    }
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

const CONTRIBUTION: (u8, u32, u64) = (0, 1, 0);

#[test]
fn who_has_had_a_result_gives_it_to_those_who_have_not() {
    let spec = KeySpec { rounds: 6, ..spec(7, 16, DType::F32) };
    let mut bench = Adopting::new(&spec, true);
    let result = floats(&[0.1, 0.2, 0.3, 0.4]);
    // One that lacks it asks; two have it. The round is not over before all have said something.
    bench.say(1, 7, CONTRIBUTION, &[]);
    bench.say(0, 7, (FLAG_RESULT, 3, 2), &result);
    bench.run();
    assert!(bench.results.iter().all(Vec::is_empty) && bench.restored.is_empty());
    bench.say(2, 7, (FLAG_RESULT, 3, 2), &result);
    bench.run();
    assert_eq!(bench.refused, []);
    assert_eq!(bench.restored, [Key(7)]);
    assert_eq!(bench.results[1], [(7, 3, 2, result)]);
    for giver in [0, 2] {
        assert_eq!(bench.results[giver], [(7, 3, 2, vec![])], "it has the bytes");
    }
    // The next round is as any other, though the last one's memory had no sum.
    for rank in 0..3 {
        bench.say(rank, 8, CONTRIBUTION, &floats(&[1.0, 2.0, 3.0, 4.0]));
    }
    bench.run();
    for results in &bench.results {
        assert_eq!(results[1], (8, 3, 0, floats(&[3.0, 6.0, 9.0, 12.0])));
    }
}

#[test]
fn a_giver_that_dies_is_not_waited_for_if_another_has_given() {
    let spec = KeySpec { rounds: 0, ..spec(7, 16, DType::F32) };
    let mut bench = Adopting::new(&spec, true);
    let result = floats(&[1.5; 4]);
    bench.say(1, 1, CONTRIBUTION, &[]);
    bench.core.order(Command::Shrink { gone: [Rank(0)].into() });
    bench.run();
    assert!(bench.results[1].is_empty(), "there is no result yet");
    bench.say(2, 1, (FLAG_RESULT, 3, 0), &result);
    bench.run();
    assert_eq!(bench.results[1], [(1, 3, 0, result)], "the dead one's contribution is in it");
    assert_eq!(bench.refused, []);
}

#[test]
fn an_encoded_result_is_given_back_as_it_was() {
    let encoding = Some("topk(k=2)".parse().expect("an encoding"));
    let spec = KeySpec { encoding, ..spec(7, 16, DType::F32) };
    let codec = spec.encoding.and_then(|how| how.codec_of(Form::Declared)).expect("a codec");
    let mut wire = vec![0; codec.wire_bytes_max(4)];
    let length = codec.encode(&[0.0, 5.0, 0.0, -7.0], draw(Key(7), 1, SERVER), &mut wire);
    let mut bench = Adopting::new(&spec, true);
    bench.say(0, 1, CONTRIBUTION, &[]);
    bench.say(1, 1, CONTRIBUTION, &[]);
    bench.say(2, 1, (FLAG_RESULT, 3, 0), &wire[..length]);
    bench.run();
    for asker in [0, 1] {
        assert_eq!(bench.results[asker], [(1, 3, 0, wire[..length].to_vec())]);
    }
    let mut bench = Adopting::new(&spec, true);
    bench.say(2, 1, (FLAG_RESULT, 3, 0), &vec![0xff; length]);
    bench.run();
    assert!(matches!(bench.refused[..], [Refusal::Encoding { .. }]), "{:?}", bench.refused);
}

#[test]
fn a_broadcast_may_be_lost_and_that_is_given_back_too() {
    let operation = Operation::Broadcast(Rank(0));
    let mut bench = Adopting::new(&KeySpec { operation, ..spec(7, 16, DType::F32) }, true);
    bench.core.order(Command::Shrink { gone: [Rank(0)].into() });
    bench.say(1, 1, (FLAG_RESULT, 0, 0), &[]);
    bench.say(2, 1, CONTRIBUTION, &[]);
    bench.run();
    assert_eq!(bench.refused, []);
    assert_eq!(bench.results[2], [(1, 0, 0, vec![])], "nobody contributed: it is lost");
}

#[test]
fn what_does_not_fit_the_round_is_refused() {
    let result = floats(&[1.0; 4]);
    for (restores, said, payload) in [
        (true, CONTRIBUTION, &result[..]),
        (true, (FLAG_RESULT, 3, 0), &result[..12]),
        (true, (FLAG_RESULT, 0, 0), &[]),
        (false, (FLAG_RESULT, 3, 0), &result[..]),
        (false, CONTRIBUTION, &[]),
    ] {
        let mut bench = Adopting::new(&spec(7, 16, DType::F32), restores);
        bench.say(1, 1, said, payload);
        bench.run();
        let refused = &bench.refused[..];
        assert!(matches!(refused, [Refusal::Shape { .. }]), "{said:?}: {refused:?}");
    }
}

#[test]
fn a_key_may_be_adopted_again_before_anything_came_of_it() {
    let spec = KeySpec { rounds: 6, ..spec(7, 16, DType::F32) };
    let mut bench = Adopting::new(&spec, true);
    let again = |rounds| {
        let adopted = Adopted { spec: KeySpec { rounds, ..spec.clone() }, restores: false };
        Command::Adopt { request: 2, keys: vec![adopted] }
    };
    let claimed = bench.core.held();
    bench.core.order(again(5));
    assert_eq!(bench.core.held(), claimed, "its memory is not taken twice");
    bench.say(0, 6, CONTRIBUTION, &floats(&[1.0; 4]));
    bench.run();
    assert_eq!(bench.refused, []);
    bench.core.order(again(5));
    let reports = std::iter::from_fn(|| bench.core.reports.pop()).map(|(_, report)| report);
    let failed = |report: &Report| matches!(report, Report::Failed { .. });
    assert_eq!(reports.filter(failed).count(), 1);
}
