//! Frames of which some fit and some do not, on all lanes and at any time: a peer ends its own
//! lane, and never this process. What holds between turns is looked at after each of them
//! ([`invariants`](super::super::invariants)).

use super::*;
use bps_engine::transport::sim::Random;
use bps_engine::wire::header::{FLAG_PAYLOAD_CHECKSUM, FLAG_RESULT, FLAG_SCALED};
use std::collections::BTreeSet;

const SERVER_BEHIND: LaneId = LaneId(2);
const KINDS: [Kind; 7] = [
    Kind::Contribution,
    Kind::Publication,
    Kind::Goodbye,
    Kind::Refused,
    Kind::Ready,
    Kind::Grant,
    Kind::GpuReduce,
];

/// A rank with two others of its host and a server, and a part of each kind.
fn bench(seed: u64, random: &mut Random) -> (Bench, Vec<PartId>) {
    let peers = [LanePeer::Rank(Rank(1)), LanePeer::Rank(Rank(2)), LanePeer::Server(0)];
    let sizes = (BYTES * (1 + random.index(8)), 6);
    let mut bench = Bench::seeded(seed, PayloadChecksum::Auto, sizes, &peers);
    let broadcast = Operation::Broadcast(Rank(u32::from(random.once_in(2))));
    let among = |lanes: &[LaneId], count| Some(Arc::new(Among { count, lanes: lanes.into() }));
    let parts = vec![
        bench.plan_owned(2 * BYTES),
        bench.plan_of(LaneId(0)),
        bench.plan(BYTES, |plan| plan.core = Some(SERVER_BEHIND)),
        bench.plan(BYTES, |plan| {
            (plan.core, plan.among) = (Some(SERVER_BEHIND), among(&[], 2));
        }),
        bench.plan(BYTES, |plan| plan.among = among(&[LaneId(1)], 2)),
        bench.plan(BYTES, |plan| plan.operation = broadcast),
        bench.plan(BYTES, |plan| {
            (plan.owner, plan.operation) = (Some(LaneId(1)), broadcast);
        }),
        bench.plan(BYTES, |plan| plan.receiver = Some(OWN)),
    ];
    (bench, parts)
}

/// What was said, by lane: each part's kinds of frames, with their rounds.
type Said = BTreeSet<(u32, PartId, u8, u64)>;

/// What an honest peer could say next on a lane, with as many bytes.
fn honest(bench: &Bench, lane: LaneId, parts: &[PartId], said: &Said) -> Vec<(Header, usize)> {
    let nic = &bench.nic;
    let mut all = Vec::new();
    let mut may = |part: PartId, kind: Kind, round: u64| {
        let has_bytes = matches!(kind, Kind::Contribution | Kind::Publication);
        let is_silent = nic.part(part).is_root(&nic.config);
        let bytes = if has_bytes && !is_silent { nic.part(part).plan.bytes } else { 0 };
        if !said.contains(&(lane.0, part, kind as u8, round)) {
            all.push((Header { round: Round(round), ..bench.said(lane, kind, part) }, bytes));
        }
    };
    for part in parts {
        let Part { plan, stage, round, peers, .. } = nic.part(*part);
        match (plan.owner.or(plan.core) == Some(lane), stage) {
            (true, Stage::Pushed) if plan.owner.is_some() => may(*part, Kind::Grant, *round),
            (true, Stage::Asked) => may(*part, Kind::Publication, *round),
            _ => {}
        }
        let Ok(place) = nic.group.place(lane) else { continue };
        if plan.owner.is_none() && peers.as_ref().is_none_or(|peers| peers.contains(&place)) {
            let mut waiting = nic.group.gathers.unpushed().filter(|one| one.key == plan.key);
            match waiting.next() {
                Some(one) if one.peers_missing.contains(&place) => {
                    may(*part, Kind::Ready, one.round);
                }
                None if !nic.part(*part).is_open() => may(*part, Kind::Ready, round + 1),
                _ => {}
            }
        }
    }
    // Contributions come in the order in which they are asked for.
    let grants = bench.heard.iter().filter(|one| one.0 == lane && one.1.kind == Kind::Grant);
    let grants = grants.filter_map(|one| Some((*nic.keys.get(&one.1.key)?, one.1.round.0)));
    let is_due =
        |one: &(PartId, u64)| !said.contains(&(lane.0, one.0, Kind::Contribution as u8, one.1));
    if let Some((part, round)) = { grants }.find(is_due) {
        may(part, Kind::Contribution, round);
    }
    all
}

/// Changes a field, mostly none.
fn spoil(header: &mut Header, bytes: &mut usize, random: &mut Random) {
    match random.index(250) {
        0 => header.kind = KINDS[random.index(KINDS.len())],
        1 => header.rank = Rank(u32::from(random.once_in(2)) * 2),
        2 => header.epoch = Epoch(4),
        3 => header.key = Key(random.below(12)),
        4 => header.round = Round(random.below(4)),
        5 => header.offset = random.below(2) * 4,
        6 => *bytes = [0, 4, BYTES, 3 * BYTES][random.index(4)],
        7 => header.contributors = u32::from(random.once_in(2)) * 9,
        8 => header.flags = [FLAG_SCALED, FLAG_RESULT, FLAG_PAYLOAD_CHECKSUM, 4][random.index(4)],
        9 => header.act = 1 + random.below(3),
        10 => header.missing = random.bits(),
        11 => header.dtype = DType::F16,
        _ => {}
    }
}

#[test]
fn whatever_comes_ends_a_lane_at_most() {
    let (mut rounds, mut refused) = (0, 0);
    for seed in 0..400 {
        let mut random = Random::new(seed);
        let (mut bench, parts) = bench(seed, &mut random);
        let (mut said, mut last): (Said, Option<(LaneId, Header, usize)>) = Default::default();
        for _ in 0..200 {
            let part = parts[random.index(parts.len())];
            let state = bench.nic.part(part);
            if !state.is_open() && !state.abandoned {
                let round = state.round + 1;
                while bench.nic.take_over().is_some() {}
                bench.push(part, round, 0);
            } else if !state.abandoned && random.once_in(60) {
                bench.nic.abandon(part);
            }
            let lane = LaneId(u32::try_from(random.index(3)).expect("few"));
            let may = honest(&bench, lane, &parts, &said);
            if may.is_empty() {
                continue;
            }
            let (mut header, mut bytes) = may[random.index(may.len())];
            let of = bench.nic.keys[&header.key];
            said.insert((lane.0, of, header.kind as u8, header.round.0));
            // Now and then the same comes twice.
            match last.filter(|one| one.0 == lane && random.once_in(60)) {
                Some((_, again, of_it)) => (header, bytes) = (again, of_it),
                None => spoil(&mut header, &mut bytes, &mut random),
            }
            last = Some((lane, header, bytes));
            let mut raw =
                Header { length: u32::try_from(bytes).expect("short"), ..header }.encode();
            if random.once_in(2000) {
                raw[random.index(64)] ^= 1;
            }
            if random.once_in(500) {
                bytes /= 2;
            }
            let payload = floats(1.0, bytes);
            // SAFETY: the bench keeps the payload, and nobody writes it.
            let frame = Frame::new(raw, unsafe { Readable::of(&payload) }, 0);
            bench.payloads.push(payload);
            // A lane that is closed takes nothing.
            let _ = bench.far.post(lane, &frame);
            if random.once_in(1000) {
                bench.far.close(LaneId(u32::try_from(random.index(3)).expect("few")));
            }
            bench.ahead += Duration::from_millis(random.below(50));
            for _ in 0..random.index(30) {
                bench.nic.begin_turn(bench.now());
                bench.nic.turn();
                bench.nic.end_turn();
                bench.poll_far();
                bench.network.advance();
            }
            while let Some(report) = bench.reports.pop() {
                assert!(!matches!(report, Report::Failed { .. }), "seed {seed}: {report:?}");
                refused += u32::from(matches!(report, Report::Corrupt { .. }));
            }
        }
        // The job ends of it, or of something else.
        bench.nic.close();
        for part in parts {
            if !bench.nic.part(part).abandoned {
                bench.nic.abandon(part);
            }
        }
        bench.settle();
        assert!(bench.nic.is_closed(), "seed {seed}");
        rounds += bench.nic.statistics.counters.rounds.read();
    }
    // Frames that all fit, or of which none does, would show little.
    assert!(rounds > 5000 && refused > 100, "{rounds} rounds, {refused} refusals");
}
