//! Keys that are encoded, or have an optimizer.

use super::*;
use bps_engine::proto::encoding::{Encoding, draw};

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
    assert_eq!(results, vec![(2, 0b100, Form::Half, half.clone()); 2]);
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

/// One of every kind of codec.
const CODECS: [&str; 16] = [
    "fp16",
    "bf16",
    "fp8_e4m3",
    "fp8_e4m3(stochastic)",
    "fp8_e5m2",
    "int8",
    "int8(stochastic)",
    "onebit",
    "onebit(scaling)",
    "topk(k=9)",
    "topk(k=0.01)",
    "randomk(k=0.1, seed=3)",
    "dithering(levels=5)",
    "dithering(levels=127, l2)",
    "dithering(levels=7, natural)",
    "dithering(levels=32, natural, l2)",
];

/// Whatever bytes come, a core adds what is an encoding and refuses what is none, and what it
/// answers is an encoding. Elements end in the middle of a block, a byte and a vector.
#[test]
fn every_codec_is_taken_as_it_is_and_refused_as_anything_else() {
    const ELEMENTS: usize = 301;
    let bytes_of_all = u32::try_from(4 * ELEMENTS).expect("a small part");
    let mut state = 0x9e37_79b9_u64;
    let mut byte = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        state.to_le_bytes()[6]
    };
    for text in CODECS {
        let encoding: Encoding = format!("{text}+feedback").parse().expect("an encoding");
        let codec = encoding.codec;
        let encoding = Some(encoding);
        let key = KeySpec { encoding, ..spec(7, bytes_of_all, DType::F32) };
        let contribute = |payload: &[u8]| contribute_all(key.clone(), &[(Act::NONE, payload)]);
        let values: Vec<f32> = (0..ELEMENTS).map(|at| (at as f32 - 140.5) / 8.0).collect();
        let mut honest = vec![0; codec.wire_bytes_max(ELEMENTS)];
        let length = codec.encode(&values, draw(Key(7), 1, 0), &mut honest);
        honest.truncate(length);
        let result = contribute(&honest).expect("it is one");
        assert_eq!(codec.check(ELEMENTS, &result), Ok(()), "{text}");
        // A core answers what all have sent: here what one has, by the same codec once more.
        assert_eq!(result.len(), length, "{text}");
        for cut in [1, length / 2, length - 1] {
            let refused = contribute(&honest[..cut]);
            let is_malformed = matches!(refused, Err(Refusal::Encoding { key: Key(7), .. }));
            assert!(is_malformed, "{text}, {cut} bytes: {refused:?}");
        }
        let long = [&honest[..], &[0]].concat();
        assert_eq!(contribute(&long), Err(Refusal::Shape { key: Key(7) }), "{text}");
        for _ in 0..24 {
            let any: Vec<u8> = (0..length).map(|_| byte()).collect();
            let is_one = codec.check(ELEMENTS, &any).is_ok();
            match contribute(&any) {
                Ok(result) => {
                    assert!(is_one, "{text}: {any:?} was taken");
                    assert_eq!(codec.check(ELEMENTS, &result), Ok(()), "{text}");
                }
                Err(Refusal::Encoding { key: Key(7), .. }) => assert!(!is_one, "{text}: {any:?}"),
                Err(other) => panic!("{text}: {other}"),
            }
        }
    }
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
