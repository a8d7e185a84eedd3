//! Decoders by themselves: what is accepted means what it says, and the rest is an error.

use crate::spoil;
use bps_engine::base::{CoreId, DType, Epoch, Key, Operation, Placement, Rank, Round};
use bps_engine::control::channel::Greeting;
use bps_engine::control::{Connection, Inbox, encode};
use bps_engine::proto::handshake::{Accepting, Dialing, Hello, JobKey, Step};
use bps_engine::proto::late::LateKeys;
use bps_engine::proto::members::Members;
use bps_engine::proto::messages::{
    Assignment, Declaration, Neighbour, Node, NodeMessage, Part, Peer, Planning, Register,
    Replacement, Roster, SchedulerMessage, ServerPeer,
};
use bps_engine::proto::resume::{AdoptedKey, KnownTensor, Resume};
use bps_engine::proto::store::{Deltas, Store};
use bps_engine::proto::uneven::{Pushes, UnevenReport};
use bps_engine::transport::sim::Random;
use bps_engine::transport::tcp::sealed::{Opener, PREFIX_BYTES, Sealer, TAG_BYTES};
use bps_engine::wire::header::{FLAG_PAYLOAD_CHECKSUM, FLAG_RESULT, FLAG_SCALED};
use bps_engine::wire::{Header, Invalid, Kind, RawHeader};

/// Byte strings that each decoder is given.
const ROUNDS: u32 = 100_000;

fn header(random: &mut Random) -> Header {
    let kinds = [Kind::Contribution, Kind::Publication, Kind::Goodbye, Kind::Refused];
    let small = |random: &mut Random| u32::try_from(random.index(1 << 20)).expect("20 bits");
    let kind = kinds[random.index(kinds.len())];
    let checked = random.index(2) == 1;
    let scaled = kind == Kind::Contribution && random.index(2) == 1;
    let is_given = kind == Kind::Contribution && random.index(4) == 1;
    let has_act =
        matches!(kind, Kind::Contribution | Kind::Refused) && !is_given && random.index(2) == 1;
    Header {
        kind,
        act: if has_act { random.bits() } else { 0 },
        flags: (u8::from(checked) * FLAG_PAYLOAD_CHECKSUM)
            | (u8::from(scaled) * FLAG_SCALED)
            | (u8::from(is_given) * FLAG_RESULT),
        dtype: DType::ALL[random.index(DType::ALL.len())],
        rank: Rank(small(random)),
        epoch: Epoch(small(random)),
        key: Key(random.bits()),
        round: Round(random.bits()),
        offset: random.bits(),
        length: small(random),
        contributors: small(random),
        payload_checksum: if checked { small(random) } else { 0 },
        missing: if kind == Kind::Publication || is_given { random.bits() } else { 0 },
    }
}

/// The header with one byte changed, and a checksum that fits.
fn with_byte(header: &Header, at: usize, byte: u8) -> RawHeader {
    let mut raw = header.encode();
    raw[at] = byte;
    let checksum = crc32c(&raw[..60]);
    raw[60..].copy_from_slice(&checksum.to_le_bytes());
    raw
}

#[test]
fn what_a_header_does_not_use_is_zero_or_it_is_refused() {
    let plain = Header::new(Kind::Publication, DType::F32, Rank(1), Epoch(1));
    assert_eq!(Header::decode(&plain.encode()), Ok(plain));
    let plain = Header::new(Kind::Goodbye, DType::F32, Rank(1), Epoch(1));
    for at in 48..60 {
        // A rank that means to come back says so in the lowest bit of `act`.
        for byte in [2, 0x80, 0xff] {
            let result = Header::decode(&with_byte(&plain, at, byte));
            assert_eq!(result, Err(Invalid::Reserved), "byte {at}");
        }
    }
    let plain = Header::new(Kind::Contribution, DType::F32, Rank(1), Epoch(1));
    // A payload has one form, and what has none no flag of it.
    for flags in (5..8).map(|bit| 1 << bit).chain([4 | 8]) {
        let result = Header::decode(&with_byte(&plain, 6, flags));
        assert_eq!(result, Err(Invalid::Flags(flags)));
    }
    for kind in [Kind::Goodbye, Kind::Refused, Kind::Ready, Kind::Grant] {
        let other = Header::new(kind, DType::F32, Rank(1), Epoch(1));
        for flag in [4, 8] {
            let result = Header::decode(&with_byte(&other, 6, flag));
            assert_eq!(result, Err(Invalid::Flags(flag)), "{kind:?}");
        }
    }
    // Only contributions are scaled, or results that are given back.
    for kind in [Kind::Publication, Kind::Goodbye, Kind::Refused, Kind::Ready, Kind::Grant] {
        let other = Header::new(kind, DType::F16, Rank(1), Epoch(1));
        for flag in [FLAG_SCALED, FLAG_RESULT] {
            let result = Header::decode(&with_byte(&other, 6, flag));
            assert_eq!(result, Err(Invalid::Flags(flag)), "{kind:?}");
        }
    }
}

#[test]
fn a_header_is_refused_or_is_exactly_what_it_says() {
    let mut random = Random::new(0x5eed_0001);
    let mut accepted = 0;
    for round in 0..ROUNDS {
        let mut bytes = header(&mut random).encode().to_vec();
        match round % 4 {
            0 => bytes.iter_mut().for_each(|byte| *byte = spoil::byte(&mut random)),
            1 => {} // As it was sent.
            2 => {
                // An attacker can compute checksums too: every field is on its own then.
                spoil::mutate(&mut random, &mut bytes);
                bytes.resize(64, 0);
                let checksum = crc32c(&bytes[..60]);
                bytes[60..].copy_from_slice(&checksum.to_le_bytes());
            }
            _ => spoil::mutate(&mut random, &mut bytes),
        }
        bytes.resize(64, 0);
        let raw: RawHeader = bytes.try_into().expect("resized to 64 bytes");
        match Header::decode(&raw) {
            Ok(header) => {
                accepted += 1;
                assert_eq!(header.encode(), raw, "round {round}: {header:?} hides something");
            }
            Err(invalid) => assert!(!invalid.to_string().is_empty()),
        }
    }
    assert!(accepted >= ROUNDS / 4, "only {accepted} whole headers were accepted");
}

/// CRC-32C bit by bit: another implementation than the one under test.
pub fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0_u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    !crc
}

/// What a rank was told of its job.
fn roster() -> Roster {
    Roster {
        job: "job".into(),
        term: 3,
        epoch: Epoch(1),
        size: 2,
        through_servers: true,
        index: 1,
        workers: vec![Peer { host: "a".into(), pid: 1, group: 0 }],
        neighbours: vec![Neighbour {
            rank: Rank(0),
            host: "a".into(),
            pid: 1,
            local: "@name".into(),
        }],
        servers: vec![ServerPeer {
            host: "b".into(),
            pid: 2,
            host_id: "boot".into(),
            cores: vec![std::net::SocketAddr::from(([127, 0, 0, 1], 4000))],
            shm: None,
            rdma: false,
        }],
        elastic: true,
        shrinks: false,
        change: None,
    }
}

fn node_messages() -> Vec<String> {
    let planning = Planning {
        partition_bytes: 1 << 20,
        placement: Placement::Balanced,
        mixed_bound: 101,
        built_in_coefficient: 1,
        local_reduce: false,
        force_distributed: false,
        reduce_roots: Vec::new(),
        switch_size: 0,
        tuning: bps_engine::proto::tuning::Tuning::OFF,
    };
    let register = Register {
        node: Node::Worker {
            worker_id: 0,
            local_rank: 1,
            local_size: 2,
            global_rank: None,
            local: None,
            planning,
            speaks: None,
        },
        host: "host".into(),
        host_id: "boot".into(),
        pid: 4711,
        instance: 7,
        session: 0,
        former: None,
        release: "0.1.0".into(),
        encrypt: false,
        num_workers: 1,
        num_servers: 1,
    };
    let declaration = Declaration {
        name: "layer4.weight".into(),
        dtype: DType::BF16,
        shape: (1 << 20).into(),
        operation: Operation::Broadcast(Rank(3)),
        device: false,
        members: Members::new([0, 2, 3, 17].map(Rank).to_vec()).expect("a set"),
        receiver: None,
        encoding: Some("bf16+feedback+momentum(0.9)".parse().expect("an encoding")),
        store: Some(Store::Deltas(Deltas { root: Rank(1), staleness: Some(4) })),
    };
    let core = Some(CoreId { server: 0, core: 1 });
    let part = Part { key: Key(3), offset: 0, bytes: 1 << 20, core, owner: Rank(2) };
    let assignment = Assignment { tensor: 5, parts: vec![part; 2], until: None };
    let known = KnownTensor { said: declaration.clone(), assignment, holds: vec![Key(3), Key(9)] };
    let adopted = AdoptedKey { key: Key(3), core: 1, rounds: 812, restores: true };
    let resume = Resume {
        register: register.clone(),
        term: 3,
        roster: roster(),
        reset: Some(Epoch(2)),
        gone: vec![Rank(1)],
        lost: vec![1, 0],
        left: vec![Rank(0)],
        barriers: 12,
        tensors: 1,
        keys_end: 4,
        adopted: 2,
        obstacle: Some("ranks have joined".into()),
    };
    [
        NodeMessage::Register(register),
        NodeMessage::Resume(Box::new(resume)),
        NodeMessage::Known { tensors: vec![known], adopted: Vec::new() },
        NodeMessage::Known { tensors: Vec::new(), adopted: vec![adopted; 2] },
        NodeMessage::Deposed { term: 4 },
        NodeMessage::Asks { another: true },
        NodeMessage::Heartbeat { rounds: 812 },
        NodeMessage::Declare { request: 7, tensors: vec![declaration.clone()] },
        NodeMessage::Redeclare {
            request: 7,
            tensors: vec![Replacement { said: declaration, rounds: 812 }],
        },
        NodeMessage::Overrun { tensor: 9 },
        NodeMessage::Uneven(UnevenReport::Joined {
            pushes: vec![Pushes { first: 3, tensors: 160, pushes: 812 }],
        }),
        NodeMessage::Barrier { request: 8 },
        NodeMessage::Stalled {
            keys: Vec::new(),
            late: vec![LateKeys { rank: Rank(1), keys: vec![Key(3)], more: false }],
        },
        NodeMessage::failed("a message"),
        NodeMessage::Leave { suspend: true },
    ]
    .iter()
    .map(|message| serde_json::to_string(message).expect("messages are plain data"))
    .collect()
}

#[test]
fn a_control_message_is_refused_or_can_be_said_again() {
    let mut random = Random::new(0x5eed_0002);
    let messages = node_messages();
    let mut accepted = 0;
    for _ in 0..ROUNDS {
        let mut bytes = messages[random.index(messages.len())].clone().into_bytes();
        spoil::mutate(&mut random, &mut bytes);
        if let Ok(message) = serde_json::from_slice::<NodeMessage>(&bytes) {
            accepted += 1;
            let said = serde_json::to_vec(&message).expect("messages are plain data");
            let again: NodeMessage = serde_json::from_slice(&said).expect("it was just said");
            assert_eq!(message, again);
        }
        drop(serde_json::from_slice::<SchedulerMessage>(&bytes));
    }
    assert!(accepted > 0, "no mutation survived: the mutations are too coarse to test anything");
}

#[test]
fn deep_nesting_ends_in_an_error_and_not_in_a_full_stack() {
    let deep = "[".repeat(1 << 20);
    assert!(serde_json::from_str::<NodeMessage>(&deep).is_err());
    let core = Some(CoreId { server: 0, core: 0 });
    let part = Part { key: Key(1), offset: 0, bytes: 4, core, owner: Rank(0) };
    let said =
        serde_json::to_string(&part).expect("plain data").replace("\"bytes\":4", "\"bytes\":-4");
    assert!(serde_json::from_str::<Part>(&said).is_err(), "a negative size was accepted");
}

/// What an acceptor makes of a dialer that knows `key` and whose bytes are spoiled by `spoil`.
fn accept(
    acceptor: &JobKey,
    key: &JobKey,
    random: &mut Random,
    mut spoil: impl FnMut(&mut Vec<u8>, &mut Random),
) -> Option<Hello> {
    let hello = Hello::lane(Rank(3), Epoch(2));
    let dialing = Dialing::new(key, hello, &[spoil::byte(random); 16]);
    let mut accepting = Accepting::new(acceptor, [spoil::byte(random); 16]);
    let mut bytes = dialing.hello().to_vec();
    spoil(&mut bytes, random);
    let mut dialing = Some(dialing);
    loop {
        if bytes.is_empty() {
            return None; // The peer has fallen silent.
        }
        let wanted = accepting.wanted().min(bytes.len()).min(1 + random.index(40));
        let now: Vec<u8> = bytes.drain(..wanted).collect();
        match accepting.handle_bytes(&now) {
            Ok(Step::Read) => {}
            Ok(Step::Send(answer)) => {
                let (proof, _) = dialing.take()?.handle_answer(&answer);
                bytes = proof.to_vec();
                spoil(&mut bytes, random);
            }
            Ok(Step::Accepted(hello)) => return Some(hello),
            Ok(Step::Reject(..)) | Err(_) => return None,
        }
    }
}

#[test]
fn only_who_knows_the_key_gets_through_the_handshake() {
    let mut random = Random::new(0x5eed_0003);
    let (ours, other) = (JobKey::from_bytes([7; 32]), JobKey::from_bytes([8; 32]));
    let hello = Hello::lane(Rank(3), Epoch(2));
    for round in 0..ROUNDS / 4 {
        let whole = accept(&ours, &ours, &mut random, |_, _| {});
        assert_eq!(whole, Some(hello), "round {round}: an honest dialer was refused");
        let stranger = accept(&ours, &other, &mut random, |_, _| {});
        assert_eq!(stranger, None, "round {round}: another key was accepted");
        let mut changed = false;
        let spoiled = accept(&ours, &ours, &mut random, |bytes, random| {
            let before = bytes.clone();
            spoil::mutate(random, bytes);
            // What follows the handshake's bytes is not the handshake's.
            changed |= !bytes.starts_with(&before);
        });
        assert_eq!(spoiled.is_none(), changed, "round {round}: spoiled bytes were accepted");
        let noise = accept(&ours, &other, &mut random, |bytes, random| {
            bytes.iter_mut().for_each(|byte| *byte = spoil::byte(random));
        });
        assert_eq!(noise, None, "round {round}: noise was accepted");
    }
}

#[test]
fn a_stream_of_broken_messages_ends_in_an_error_and_holds_little() {
    let mut random = Random::new(0x5eed_0004);
    let messages = [
        NodeMessage::Heartbeat { rounds: 812 },
        NodeMessage::Barrier { request: 8 },
        NodeMessage::Leave { suspend: true },
    ];
    let whole: Vec<u8> =
        messages.iter().flat_map(|message| encode(message).expect("it is short")).collect();
    let (mut broken, mut received) = (0, 0);
    for _ in 0..ROUNDS / 4 {
        let mut bytes = whole.clone();
        spoil::mutate(&mut random, &mut bytes);
        let mut inbox = Inbox::new();
        'stream: for piece in bytes.chunks(1 + random.index(64)) {
            inbox.push(piece);
            loop {
                match inbox.next_message::<NodeMessage>() {
                    Ok(Some(_)) => received += 1,
                    Ok(None) => break,
                    Err(error) => {
                        assert!(!error.to_string().is_empty());
                        broken += 1;
                        break 'stream;
                    }
                }
            }
        }
    }
    assert!(broken > 1000 && received > 1000, "{broken} broken, {received} received: one-sided");
}

#[test]
fn nothing_comes_out_of_an_encrypted_connection_but_what_was_sealed() {
    let mut random = Random::new(0x5eed_0006);
    let key = JobKey::from_bytes([7; 32]);
    let words: Vec<Vec<u8>> = (0..3)
        .map(|request| encode(&NodeMessage::Barrier { request }).expect("it is short"))
        .collect();
    let (mut whole, mut refused) = (0, 0);
    for round in 0..ROUNDS / 50 {
        let (greeting, bytes) = Greeting::new(&key).expect("a job with a key");
        let mut connection = Connection::accept(&key);
        let mut answer = connection.push(&bytes).expect("an honest greeting");
        if round % 4 == 0 {
            let before = answer.clone();
            spoil::mutate(&mut random, &mut answer);
            // What is spoilt may be what it was.
            let is_whole = answer == before;
            let reply = answer.try_into().ok();
            let opened = reply.is_some_and(|reply| greeting.finish(&reply).is_ok());
            assert_eq!(opened, is_whole, "round {round}");
            continue;
        }
        let answer = answer.try_into().expect("nothing was said before");
        let (mut sealer, _) = greeting.finish(&answer).expect("an honest answer");
        let mut bytes: Vec<u8> = words.iter().flat_map(|it| sealer.seal(it.clone())).collect();
        spoil::mutate(&mut random, &mut bytes);
        let mut requests = Vec::new();
        let mut ended = false;
        for piece in bytes.chunks(1 + random.index(64)) {
            ended |= connection.push(piece).is_err();
            loop {
                match connection.next_message::<NodeMessage>() {
                    Ok(Some(NodeMessage::Barrier { request })) => requests.push(request),
                    Ok(Some(other)) => panic!("round {round}: {other:?} was never said"),
                    Ok(None) => break,
                    Err(error) => {
                        assert!(!error.to_string().is_empty());
                        ended = true;
                        break;
                    }
                }
            }
        }
        whole += u32::from(requests.len() == words.len());
        refused += u32::from(ended);
        assert!([0, 1, 2].starts_with(&requests), "round {round}: {requests:?}");
    }
    assert!(refused > 100 && whole > 0, "{refused} refused, {whole} whole");
}

/// Opens what these bytes hold, up to the first record that is not what was due.
fn open(mut bytes: &mut [u8]) -> Vec<u8> {
    let (mut opener, mut plain) = (Opener::new(&[7; 32]), Vec::new());
    while let Ok(Some(length)) = opener.measure(bytes) {
        let Some((record, rest)) = bytes.split_at_mut_checked(length) else { break };
        let Ok(opened) = opener.open(record) else { break };
        plain.extend_from_slice(opened);
        bytes = rest;
    }
    plain
}

#[test]
fn of_an_encrypted_lane_nothing_comes_out_that_was_not_sent() {
    let (mut random, mut spoilt) = (Random::new(43), 0);
    for _ in 0..ROUNDS {
        let (mut sealer, mut bytes, mut sent) = (Sealer::new(&[7; 32]), Vec::new(), Vec::new());
        for _ in 0..3 {
            let mut record = vec![spoil::byte(&mut random); PREFIX_BYTES + 1 + random.index(200)];
            let plain = record.len() - PREFIX_BYTES;
            sent.extend_from_slice(&record[PREFIX_BYTES..]);
            record.resize(record.len() + TAG_BYTES, 0);
            sealer.seal(&mut record, plain).expect("numbers are left");
            bytes.append(&mut record);
        }
        spoil::mutate(&mut random, &mut bytes);
        let opened = open(&mut bytes);
        assert!(sent.starts_with(&opened), "{opened:?} came out, {sent:?} was sent");
        spoilt += u32::from(opened.len() < sent.len());
    }
    assert!(spoilt > ROUNDS / 2, "only {spoilt} streams were spoilt");
}
