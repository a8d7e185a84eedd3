//! A NIC loop whose neighbour on the host has gone bad. The job must end with an error that names
//! it.

mod column;

use super::pair::{BAD, BYTES, EPOCH, GOOD, LANE, Pair, crc};
use bps_engine::base::{DType, Epoch, Key, Rank, Round};
use bps_engine::ring::Mpsc;
use bps_engine::transport::Waker;
use bps_engine::transport::sim::Random;
use bps_engine::wire::header::FLAG_PAYLOAD_CHECKSUM;
use bps_engine::wire::{Header, Kind};
use bps_worker::job::nic_loop::Command;
use bps_worker::nic::LanePeer;
use bps_worker::rounds::handover::{FromGpu, GpuInbox, GpuThread, ToGpu};
use bps_worker::rounds::{Among, SlotMemory};
use bps_worker::{Error, Handle};
use std::sync::Arc;

/// The parts: the good rank sums the first, the bad one the second, and nobody knows the third.
const OWN: Key = Key(1);
const OTHERS: Key = Key(2);
const UNKNOWN: Key = Key(3);
/// Parts of tensors on GPUs: the good rank's and the bad one's.
const ON_GPUS: [Key; 2] = [Key(4), Key(5)];
/// A part that is for the good rank alone.
const OF_ONE: Key = Key(6);
/// Runs of random frames.
const SEEDS: u64 = 2000;

fn pair(seed: u64) -> Pair {
    with_column(seed, Vec::new())
}

/// With one round of each part open; as below several PCIe switches, where these others hold what
/// the good one holds.
fn with_column(seed: u64, column: Vec<Rank>) -> Pair {
    let mut pair = Pair::new(seed, LanePeer::Rank(BAD), column, false);
    pair.push(0, OWN, None);
    pair.push(1, OTHERS, Some(LANE));
    pair.plan(2, ON_GPUS[0], None, true);
    pair.plan(3, ON_GPUS[1], Some(LANE), true);
    let alone = Among { count: 1, lanes: [].into() };
    pair.plan_among(4, OF_ONE, None, false, Some(Arc::new(alone)));
    pair.settle();
    pair
}

/// The frame that a good neighbour would send of this kind.
fn honest(kind: Kind) -> Header {
    let speaker = if matches!(kind, Kind::Grant | Kind::Publication) { GOOD } else { BAD };
    let of_own = matches!(kind, Kind::Ready | Kind::Contribution);
    let has_payload = matches!(kind, Kind::Contribution | Kind::Publication);
    let length = if has_payload { BYTES } else { 0 };
    let payload_checksum = if has_payload { crc(BYTES) } else { 0 };
    Header {
        key: if of_own { OWN } else { OTHERS },
        round: Round(1),
        length: u32::try_from(length).expect("short"),
        contributors: if kind == Kind::Publication { 2 } else { 1 },
        flags: if has_payload { FLAG_PAYLOAD_CHECKSUM } else { 0 },
        payload_checksum,
        ..Header::new(kind, DType::F32, speaker, EPOCH)
    }
}

/// The frames of a whole round, in an order in which a good neighbour may send them.
const ROUND: [Kind; 4] = [Kind::Ready, Kind::Contribution, Kind::Grant, Kind::Publication];

#[test]
fn a_good_neighbour_is_served() {
    let mut pair = pair(1);
    for kind in ROUND {
        pair.send(honest(kind));
        pair.settle();
    }
    assert!(pair.handles.iter().all(Handle::poll), "{:?}", pair.over);
    assert!(pair.over.is_none() && pair.bad.is_some());
    let kinds: Vec<Kind> = pair.heard.iter().map(|header| header.kind).collect();
    let answers = [Kind::Ready, Kind::Grant, Kind::Publication, Kind::Contribution];
    assert_eq!(kinds, answers);
    for header in pair.heard.iter().filter(|header| header.length > 0) {
        assert_eq!(header.flags, FLAG_PAYLOAD_CHECKSUM, "{header:?}");
        assert_ne!(header.payload_checksum, 0);
    }
}

/// A way to spoil a frame.
type Spoil = fn(&mut Header);

const SPOILT: &[(&str, Spoil)] = &[
    ("epoch", |header| header.epoch = Epoch(EPOCH.0 + 1)),
    ("rank", |header| header.rank = Rank(1 - header.rank.0)),
    ("no rank of the job", |header| header.rank = Rank(77)),
    ("a round too far", |header| header.round = Round(2)),
    ("a round that is over", |header| header.round = Round(0)),
    ("a key of the other owner", |header| header.key = Key(3 - header.key.0)),
    ("a server's word", |header| header.kind = Kind::Refused),
    ("an order where no GPU is used", |header| header.kind = Kind::GpuReduce),
    ("a tensor that is not for it", |header| header.key = OF_ONE),
    ("a tensor on GPUs", |header| header.key = ON_GPUS[usize::from(header.key == OTHERS)]),
];
const SPOILT_WORD: &[(&str, Spoil)] = &[("a payload", |header| header.length = 8)];
const SPOILT_PAYLOAD: &[(&str, Spoil)] = &[
    ("unknown key", |header| header.key = UNKNOWN),
    ("dtype", |header| header.dtype = DType::F64),
    ("short", |header| header.length -= 8),
    ("long", |header| header.length += 8),
    ("empty", |header| header.length = 0),
    ("offset", |header| header.offset = 64),
    ("checksum", |header| header.payload_checksum ^= 1),
];

/// Sends the first frames of a round and then this one; the job must end and name the bad rank.
fn assert_refused(what: &str, good: &[Kind], bad: Header) {
    for seed in 1..=8 {
        let mut pair = pair(seed);
        for kind in good {
            pair.send(honest(*kind));
            pair.settle();
        }
        assert_eq!(pair.over, None, "{what}: the good frames");
        pair.send(bad);
        pair.settle();
        let error = pair.over.clone();
        let named = match &error {
            Some(Error::Corrupt(error)) if what == "checksum" => error
                .to_string()
                .contains("changed on its way from rank 1 (host here, pid 4711) to rank 0: "),
            Some(Error::PeerDied(error)) => error
                .to_string()
                .starts_with("rank 1 (host here, pid 4711) sent what can't be right: "),
            _ => panic!("{what}, {bad:?} after {good:?}: {error:?}"),
        };
        assert!(named, "{what}: {error:?}");
        assert!(pair.bad.is_none(), "{what}: the lane is open");
        pair.end();
    }
}

#[test]
fn a_frame_that_does_not_fit_ends_the_job_and_names_its_sender() {
    for (at, kind) in ROUND.into_iter().enumerate() {
        let has_payload = matches!(kind, Kind::Contribution | Kind::Publication);
        let special = if has_payload { SPOILT_PAYLOAD } else { SPOILT_WORD };
        for (what, spoil) in SPOILT.iter().chain(special) {
            let mut bad = honest(kind);
            spoil(&mut bad);
            assert_refused(what, &ROUND[..at], bad);
        }
        assert_refused("twice", &ROUND[..=at], honest(kind));
    }
    for kind in [Kind::Contribution, Kind::Publication] {
        assert_refused("unasked", &[], honest(kind));
    }
    let unknown = Header { key: UNKNOWN, ..honest(Kind::Grant) };
    assert_refused("a grant of what nobody knows", &[], unknown);
}

/// What ranks say of tensors on GPUs.
const GPU_WORDS: [Kind; 5] =
    [Kind::GpuReady, Kind::GpuReduce, Kind::GpuLanded, Kind::GpuGather, Kind::GpuEnd];

fn gpu_word(kind: Kind, key: Key, round: u64) -> Header {
    let header = Header::new(kind, DType::U8, BAD, EPOCH);
    Header { key, round: Round(round), contributors: 1, ..header }
}

/// A pipeline without slots.
fn pipeline(room: usize) -> GpuThread {
    GpuThread {
        inbox: GpuInbox::new(room, Waker::new().expect("an eventfd")),
        outbox: Mpsc::new(room),
        to_land: Vec::new(),
        slots: SlotMemory::default(),
        staged: None,
    }
}

#[test]
fn words_about_the_order_of_collectives_have_lanes_of_their_own() {
    for kind in GPU_WORDS {
        assert_refused("there is no GPU", &[], gpu_word(kind, ON_GPUS[0], 1));
        assert_refused("a payload", &[], Header { length: 8, ..gpu_word(kind, ON_GPUS[0], 1) });
    }
    let mut pair = pair(1);
    assert!(pair.commands.push(Command::OpenGpu(pipeline(4))).is_ok(), "a short queue");
    pair.send(gpu_word(Kind::GpuReduce, ON_GPUS[0], 1));
    pair.settle();
    let text = pair.end().to_string();
    assert!(text.contains("a rank does not send GpuReduce to another"), "{text}");
}

#[test]
fn a_spoilt_payload_is_told_by_its_checksum() {
    for at in [1, 3] {
        let mut pair = pair(7);
        for kind in &ROUND[..at] {
            pair.send(honest(*kind));
            pair.settle();
        }
        let mut bad = honest(ROUND[at]);
        bad.payload_checksum ^= 0x100;
        pair.send(bad);
        pair.settle();
        let text = pair.end().to_string();
        let key = bad.key;
        assert!(text.contains("rank 1") && text.contains("CRC-32C differs"), "{text}");
        assert!(text.contains(&key.to_string()), "{text}");
        let done = pair.handles.iter().filter(|handle| handle.wait(None).is_ok()).count();
        assert_eq!(done, usize::from(at == 3), "only the part that was summed before");
    }
}

#[test]
fn random_frames_end_in_an_error_and_leave_no_task_alone() {
    let mut refused = 0;
    for seed in 0..SEEDS {
        let mut random = Random::new(seed);
        let mut pair = pair(seed);
        for turn in 0..12 {
            let kind = match random.below(3) {
                0 => ROUND[random.index(4)],
                _ => ROUND[turn % 4],
            };
            let mut header = honest(kind);
            for (_, spoil) in SPOILT.iter().chain(SPOILT_WORD).chain(&SPOILT_PAYLOAD[..2]) {
                if random.once_in(60) {
                    spoil(&mut header);
                }
            }
            if !pair.send_at_random(header, &mut random) {
                break;
            }
        }
        let text = pair.end().to_string();
        assert!(text.contains("rank 1 (host here, pid 4711)"), "seed {seed}: {text}");
        refused += u64::from(text.contains("sent what can't be right"));
    }
    println!("{refused} of {SEEDS} were refused, the others died unnoticed");
    assert!(refused > SEEDS / 2);
}
