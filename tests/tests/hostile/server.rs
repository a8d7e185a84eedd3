//! A NIC loop whose server has gone bad, in a job that goes on when servers die. The job must end
//! with an error that names it, and not with a wrong sum.

use super::pair::{BYTES, EPOCH, GOOD, LANE, Pair, TURNS_MAX, crc};
use bps_engine::base::{DType, Epoch, Key, Rank, Round};
use bps_engine::transport::sim::Random;
use bps_engine::wire::header::FLAG_PAYLOAD_CHECKSUM;
use bps_engine::wire::{Header, Kind};
use bps_worker::error::{Death, Misfit, Unasked};
use bps_worker::job::nic_loop::Command;
use bps_worker::nic::{LanePeer, Move};
use bps_worker::{Error, Handle};

const SERVER: u32 = 0;
/// Parts: of a round that is open, of a tensor that was declared only, and of none.
const OPEN: Key = Key(1);
const IDLE: Key = Key(2);
const UNKNOWN: Key = Key(3);
/// Runs of random frames.
const SEEDS: u64 = 2000;

/// With one round of a part open.
fn pair(seed: u64, keeps: bool) -> Pair {
    let mut pair = Pair::new(seed, LanePeer::Server(SERVER), Vec::new(), keeps);
    pair.push(0, OPEN, None);
    pair.plan(1, IDLE, None, false);
    pair.settle();
    pair
}

/// The server asks for a contribution once more.
fn asks() -> Header {
    Header { key: OPEN, round: Round(1), ..Header::new(Kind::Grant, DType::F32, GOOD, EPOCH) }
}

fn result() -> Header {
    Header {
        length: u32::try_from(BYTES).expect("short"),
        contributors: 2,
        flags: FLAG_PAYLOAD_CHECKSUM,
        payload_checksum: crc(BYTES),
        ..Header { kind: Kind::Publication, ..asks() }
    }
}

#[test]
fn a_server_may_ask_for_a_contribution_again() {
    let mut pair = pair(1, true);
    let contributions = |pair: &Pair| {
        let is_whole = |header: &&Header| header.length as usize == BYTES;
        assert_eq!(pair.heard.iter().filter(is_whole).count(), pair.heard.len());
        pair.heard.len()
    };
    assert_eq!(contributions(&pair), 1);
    for asked in 2..=4 {
        pair.send(asks());
        pair.settle();
        assert_eq!(contributions(&pair), asked);
        assert_eq!(pair.heard[asked - 1], pair.heard[0], "the same contribution");
    }
    pair.send(result());
    pair.settle();
    assert!(pair.handles.iter().all(Handle::poll) && pair.over.is_none(), "{:?}", pair.over);
    assert_eq!(pair.memory[0], vec![1u8; BYTES], "the result is in the tensor");
}

/// Sends these good frames and then a bad one; the job must end and name the server.
fn assert_refused(what: &str, keeps: bool, good: &[Header], bad: Header) {
    for seed in 1..=8 {
        let mut pair = pair(seed, keeps);
        for header in good {
            pair.send(*header);
            pair.settle();
        }
        assert_eq!(pair.over, None, "{what}: the good frames");
        pair.send(bad);
        pair.settle();
        assert!(pair.bad.is_none(), "{what}: the lane is open");
        let error = pair.end();
        let text = error.to_string();
        assert!(matches!(error, Error::PeerDied(_)), "{what}: {error:?}");
        let start = "server 0 (host there, pid 4712) sent what can't be right: ";
        assert!(text.starts_with(start), "{what}: {text}");
    }
}

/// A way to spoil a frame.
type Spoil = fn(&mut Header);

const SPOILT: &[(&str, Spoil)] = &[
    ("epoch", |header| header.epoch = Epoch(EPOCH.0 + 1)),
    ("another rank", |header| header.rank = Rank(1)),
    ("a round too far", |header| header.round = Round(2)),
    ("a round that is over", |header| header.round = Round(0)),
    ("a part of which no round is open", |header| header.key = IDLE),
    ("a part of nobody", |header| header.key = UNKNOWN),
    ("a rank's word", |header| header.kind = Kind::Ready),
    ("short", |header| header.length = header.length.abs_diff(8)),
    ("long", |header| header.length += 64),
];

#[test]
fn a_frame_that_does_not_fit_ends_the_job_and_names_its_server() {
    for honest in [asks(), result()] {
        for (what, spoil) in SPOILT {
            let mut bad = honest;
            spoil(&mut bad);
            let what = format!("{:?}: {what}", honest.kind);
            assert_refused(&what, true, &[], bad);
            assert_refused(&what, true, &[asks()], bad);
        }
        assert_refused("after the result", true, &[result()], honest);
    }
}

#[test]
fn where_nothing_is_kept_nothing_is_asked_for_again() {
    assert_refused("nothing is kept", false, &[], asks());
}

#[test]
fn random_frames_end_in_an_error_and_leave_no_task_alone() {
    let mut refused = 0;
    for seed in 0..SEEDS {
        let mut random = Random::new(seed);
        let mut pair = pair(seed, seed % 2 == 0);
        for _ in 0..8 {
            let mut header = if random.once_in(4) { result() } else { asks() };
            for (_, spoil) in SPOILT {
                if random.once_in(40) {
                    spoil(&mut header);
                }
            }
            if !pair.send_at_random(header, &mut random) {
                break;
            }
        }
        let text = pair.end().to_string();
        assert!(text.contains("server 0 (host there, pid 4712)"), "seed {seed}: {text}");
        refused += u64::from(text.contains("sent what can't be right"));
    }
    println!("{refused} of {SEEDS} were refused, the others died unnoticed");
    assert!(refused > SEEDS / 2);
}

/// Parts whose contributions fill the lane to a server that reads nothing: more than may be posted
/// on it and are under way on the longest line of the simulation.
const FILLERS: u32 = 520;
/// The key of the first one.
const FIRST_FILLER: u64 = 1 << 20;

/// The part is said to have moved to the server: no round of it is over everywhere, and those who
/// have the result of the first are to give it to the server, which the others ask for it.
fn restore(pair: &Pair) {
    let one = Move { key: OPEN, lane: LANE, rounds: 0, restores: true };
    assert!(pair.commands.push(Command::Moved(vec![one])).is_ok(), "a short queue");
}

/// The server says that it has what it needs of this rank.
fn thanks() -> Header {
    Header { contributors: 2, ..Header { kind: Kind::Publication, ..asks() } }
}

/// The good rank goes on as far as it can while the server reads nothing.
fn settle_unread(pair: &mut Pair) {
    for _ in 0..TURNS_MAX {
        let progress = pair.nic.step(pair.network.now());
        if !(progress | pair.network.advance()) {
            return;
        }
    }
    panic!("it does not come to rest");
}

/// The server sends a frame and reads nothing.
fn send_unread(pair: &mut Pair, header: Header) {
    // At times its end has no room at once.
    let is_sent = (0..100).any(|_| pair.send_raw(header.encode(), header.length as usize));
    assert!(is_sent, "a short queue");
    settle_unread(pair);
}

/// The job ends with an error that names the server, for this publication.
fn assert_unasked(pair: &mut Pair, seed: u64) {
    pair.settle();
    assert!(pair.bad.is_none(), "seed {seed}: the lane is open");
    let error = pair.end();
    let Error::PeerDied(died) = &error else { panic!("seed {seed}: {error}") };
    let Death::Nonsense { misfit: Misfit::Part(part), .. } = &died.death else {
        panic!("seed {seed}: {error}")
    };
    assert_eq!((part.what, part.key), (Unasked::Publication, OPEN), "seed {seed}");
}

#[test]
fn a_result_that_is_given_back_is_answered_once() {
    for seed in 1..=32 {
        let mut pair = pair(seed, true);
        pair.send(result());
        pair.settle();
        restore(&pair);
        // Where the line takes less than the result, it is still being given after both answers.
        settle_unread(&mut pair);
        send_unread(&mut pair, thanks());
        assert!(pair.reports.pop().is_none(), "seed {seed}: the first answer is right");
        send_unread(&mut pair, thanks());
        assert_unasked(&mut pair, seed);
    }
}

#[test]
fn an_answer_to_a_result_that_was_not_given_is_refused() {
    for seed in 1..=8 {
        let mut pair = pair(seed, true);
        // What this rank asks finds no room on the lane, which has all the frames that it may have.
        for filler in 0..FILLERS {
            pair.push(2 + filler, Key(FIRST_FILLER + u64::from(filler)), None);
            settle_unread(&mut pair);
        }
        restore(&pair);
        settle_unread(&mut pair);
        send_unread(&mut pair, thanks());
        assert_unasked(&mut pair, seed);
    }
}
