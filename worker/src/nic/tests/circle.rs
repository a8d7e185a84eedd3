//! What the ranks of a group do for each other: who is asked for what and when, what is added, and
//! who gets the sum.

use super::*;
use crate::base::error::{PartMisfit, Unasked};
use crate::host::collect::GRANTS_MAX;
use bps_engine::proto::messages::StalledKey;
use bps_engine::transport::sim::Random;
use bps_engine::wire::crc32c;
use bps_engine::wire::header::{FLAG_PAYLOAD_CHECKSUM, FLAG_SCALED};

const LANES: [LaneId; 2] = [LaneId(0), LaneId(1)];

impl Bench {
    /// A rank of the group has pushed a round of a part that this one owns.
    fn ready(&mut self, lane: LaneId, part: PartId, round: u64) {
        let header = Header { round: Round(round), ..self.said(lane, Kind::Ready, part) };
        self.send(lane, header, Vec::new());
    }

    /// All of the group have pushed the first round of a part, and are asked for it.
    fn gather(&mut self, part: PartId) {
        self.push(part, 1, 0);
        LANES.into_iter().for_each(|lane| self.ready(lane, part, 1));
    }

    /// What a rank sends of the first round of a part.
    fn contribute(&mut self, lane: LaneId, part: PartId, value: f32) {
        let bytes = self.nic.part(part).plan.bytes;
        let header = self.said(lane, Kind::Contribution, part);
        self.send(lane, header, floats(value, bytes));
    }

    /// What has come to the other end of this lane of this kind, with its payload.
    fn of_kind(&self, lane: LaneId, kind: Kind) -> Vec<(Header, &[u8])> {
        let of_kind = self.heard.iter().filter(|one| one.0 == lane && one.1.kind == kind);
        of_kind.map(|(_, header, payload)| (*header, &payload[..])).collect()
    }
}

#[test]
fn all_push_then_all_are_asked_and_all_get_the_sum() {
    for (operation, result) in [(Operation::Sum, 12.0), (Operation::Average, 4.0)] {
        let mut bench = to_ranks(1 << 20);
        let part = bench.plan(BYTES, |plan| plan.operation = operation);
        bench.fill(part, 2.0);
        bench.push(part, 1, 0);
        bench.ready(LANES[0], part, 1);
        assert!(bench.heard.is_empty(), "one has not pushed it");
        bench.ready(LANES[1], part, 1);
        for lane in LANES {
            let rank = bench.nic.rank_of(lane).expect("a rank");
            let grant = Header { rank, contributors: 1, ..frame(Kind::Grant, part) };
            assert_eq!(bench.of_kind(lane, Kind::Grant), [(grant, &[][..])]);
        }
        bench.contribute(LANES[1], part, 7.0);
        assert_eq!((bench.heard.len(), bench.over()), (2, None), "one is still to come");
        bench.contribute(LANES[0], part, 3.0);
        for lane in LANES {
            let rank = bench.nic.rank_of(lane).expect("a rank");
            let [(header, payload)] = bench.of_kind(lane, Kind::Publication)[..] else {
                panic!("{:?}", bench.heard)
            };
            let expected = Header { rank, contributors: 3, ..frame(Kind::Publication, part) };
            assert_eq!(header, Header { length: header.length, ..expected });
            assert_eq!(payload, floats(result, BYTES));
        }
        assert_eq!(bench.over(), Some((bench.nic.part(part).plan.of, Lacks::NOTHING)));
        assert_eq!(bench.tensors[0], floats(result, BYTES));
        assert_eq!(bench.nic.gathered.in_flight_bytes(), 0);
        assert!(!bench.nic.is_open() && bench.reports.pop().is_none());
    }
}

#[test]
fn what_was_pushed_stays_as_it_was_and_the_sum_is_beside_it() {
    let server = LaneId(2);
    let peers = [LanePeer::Rank(Rank(1)), LanePeer::Rank(Rank(2)), LanePeer::Server(0)];
    for core in [None, Some(server)] {
        let mut bench = Bench::new(1 << 20, if core.is_some() { 6 } else { 3 }, &peers);
        let parts = [bench.plan(BYTES, |plan| plan.core = core), bench.plan_of(LANES[0])];
        for part in parts {
            bench.fill(part, 9.0);
            let source = floats(2.0, BYTES);
            bench.push_from(source.as_ptr(), part, 1, 0);
            bench.payloads.push(source);
        }
        LANES.into_iter().for_each(|lane| bench.ready(lane, parts[0], 1));
        LANES.into_iter().for_each(|lane| bench.contribute(lane, parts[0], 3.0));
        assert_eq!(bench.tensors[0], floats(8.0, BYTES));
        let sum = bench.of_kind(server, Kind::Contribution);
        assert!(sum.len() == usize::from(core.is_some()));
        assert!(sum.iter().all(|(_, payload)| *payload == floats(8.0, BYTES)));
        bench.send(LANES[0], frame(Kind::Grant, parts[1]), Vec::new());
        let [(_, payload)] = bench.of_kind(LANES[0], Kind::Contribution)[..] else {
            panic!("{:?}", bench.heard)
        };
        assert_eq!(payload, floats(2.0, BYTES));
        assert!(bench.payloads[..2].iter().all(|source| *source == floats(2.0, BYTES)));
        assert_eq!(bench.tensors[1], floats(9.0, BYTES), "its result has not come");
    }
}

#[test]
fn the_most_urgent_parts_are_asked_for_first_and_no_more_than_the_credit() {
    let mut bench = to_ranks(2 * BYTES);
    let parts = [0, 5, 9, 5].map(|priority| (bench.plan_owned(BYTES), priority));
    for (part, _) in parts {
        LANES.into_iter().for_each(|lane| bench.ready(lane, part, 1));
    }
    for (part, priority) in parts {
        bench.fill(part, 1.0);
        bench.push(part, 1, priority);
    }
    let asked = |bench: &Bench| -> Vec<u64> {
        let grants = bench.of_kind(LANES[0], Kind::Grant).into_iter();
        grants.map(|(header, _)| header.key.0).collect()
    };
    bench.settle();
    assert_eq!((asked(&bench), bench.nic.gathered.in_flight_bytes()), (vec![3, 2], 2 * BYTES));
    // Its credit comes back when the sum is there, and not with one contribution.
    bench.contribute(LANES[0], parts[2].0, 1.0);
    assert_eq!(asked(&bench).len(), 2);
    bench.contribute(LANES[1], parts[2].0, 1.0);
    assert_eq!(asked(&bench), [3, 2, 4]);
    for at in [1, 3, 0] {
        LANES.into_iter().for_each(|lane| bench.contribute(lane, parts[at].0, 1.0));
    }
    assert_eq!((asked(&bench), bench.nic.gathered.in_flight_bytes()), (vec![3, 2, 4, 1], 0));
    assert!(bench.tensors.iter().all(|tensor| *tensor == floats(3.0, BYTES)));
}

#[test]
fn no_more_parts_are_asked_for_at_once_than_there_may_be() {
    let mut bench = to_ranks(1 << 30);
    let parts: Vec<PartId> = (0..GRANTS_MAX + 2).map(|_| bench.plan_owned(BYTES)).collect();
    for part in &parts {
        bench.gather(*part);
    }
    assert_eq!(bench.of_kind(LANES[1], Kind::Grant).len(), GRANTS_MAX);
    LANES.into_iter().for_each(|lane| bench.contribute(lane, parts[0], 0.0));
    assert_eq!(bench.of_kind(LANES[1], Kind::Grant).len(), GRANTS_MAX + 1);
}

#[test]
fn a_contribution_stands_until_the_parts_before_it_are_summed() {
    let mut bench = to_ranks(1 << 20);
    let among = Arc::new(Among { count: 2, lanes: [LANES[1]].into() });
    let parts = [bench.plan(BYTES, |plan| plan.among = Some(among)), bench.plan_owned(3 * BYTES)];
    bench.push(parts[0], 1, 0);
    bench.ready(LANES[1], parts[0], 1);
    bench.gather(parts[1]);
    let grants = [0, 1].map(|at| bench.of_kind(LANES[at], Kind::Grant).len());
    assert_eq!(grants, [1, 2], "who is not of the set is not asked");
    bench.contribute(LANES[0], parts[1], 10.0);
    assert!(matches!(bench.nic.lane(LANES[0]).receiving, Receiving::Contribution { done: 0, .. }));
    for (part, value, result) in
        [(parts[0], 1.0, floats(1.0, BYTES)), (parts[1], 20.0, floats(30.0, 3 * BYTES))]
    {
        bench.contribute(LANES[1], part, value);
        assert_eq!(bench.over(), Some((bench.nic.part(part).plan.of, Lacks::NOTHING)));
        assert_eq!(bench.tensors[part.0 as usize], result);
    }
    let published = [0, 1].map(|at| bench.of_kind(LANES[at], Kind::Publication).len());
    assert_eq!(published, [1, 2]);
}

#[test]
fn a_contribution_that_stands_passes_by_once_its_part_is_abandoned() {
    let mut bench = to_ranks(1 << 20);
    let among = Arc::new(Among { count: 2, lanes: [LANES[1]].into() });
    let first = bench.plan(BYTES, |plan| plan.among = Some(among));
    let parts = [bench.plan_owned(3 * BYTES), bench.plan_owned(BYTES)];
    bench.push(first, 1, 0);
    bench.ready(LANES[1], first, 1);
    parts.into_iter().for_each(|part| bench.gather(part));
    bench.contribute(LANES[0], parts[0], 10.0);
    bench.nic.abandon(parts[0]);
    assert_eq!(bench.over(), Some((bench.nic.part(parts[0]).plan.of, Lacks::NOTHING)));
    bench.contribute(LANES[0], parts[1], 1.0);
    bench.contribute(LANES[1], first, 2.0);
    assert_eq!(bench.over(), Some((bench.nic.part(first).plan.of, Lacks::NOTHING)));
    bench.contribute(LANES[1], parts[1], 3.0);
    assert_eq!(bench.over(), Some((bench.nic.part(parts[1]).plan.of, Lacks::NOTHING)));
    let tensors = [floats(2.0, BYTES), floats(0.0, 3 * BYTES), floats(4.0, BYTES)];
    assert_eq!(bench.tensors, tensors);
    assert_eq!(bench.nic.gathered.in_flight_bytes(), 0);
    assert!(bench.reports.pop().is_none());
}

#[test]
fn a_contribution_that_was_not_asked_for_is_refused() {
    type Change = fn(&mut Header);
    let changes: [(Change, usize); 9] = [
        (|header| header.dtype = DType::I32, BYTES),
        (|header| header.round = Round(0), BYTES),
        (|header| header.round = Round(2), BYTES),
        (|header| header.offset = 4, BYTES),
        (|header| header.flags = FLAG_SCALED, BYTES),
        (|header| header.contributors = 2, BYTES),
        (|header| header.contributors = 0, BYTES),
        (|_| {}, BYTES - 4),
        (|_| {}, BYTES + 4),
    ];
    for (at, (change, bytes)) in changes.into_iter().enumerate() {
        let mut bench = to_ranks(1 << 20);
        let part = bench.plan_owned(BYTES);
        bench.gather(part);
        let mut header = bench.said(LANES[1], Kind::Contribution, part);
        change(&mut header);
        bench.send(LANES[1], header, floats(1.0, bytes));
        let expected = unasked(&header, bytes);
        assert_eq!(bench.refused(LANES[1]), expected, "change {at}");
        assert!(bench.nic.lane(LANES[0]).open && bench.over().is_none());
    }
}

/// As what a contribution is refused whose part has [`BYTES`] and is in its first round.
fn unasked(header: &Header, bytes: usize) -> Misfit {
    Misfit::Part(PartMisfit {
        what: Unasked::Contribution,
        tensor: format!("t{}", header.key.0 - 1),
        key: header.key,
        round: header.round.0,
        bytes: u32::try_from(bytes).expect("short"),
        part_bytes: BYTES,
        open: 1,
    })
}

#[test]
fn who_is_not_of_a_set_contributes_nothing_to_it() {
    let mut bench = to_ranks(1 << 20);
    let among = Arc::new(Among { count: 2, lanes: [LANES[1]].into() });
    let part = bench.plan(BYTES, |plan| plan.among = Some(among));
    bench.push(part, 1, 0);
    bench.ready(LANES[1], part, 1);
    let header = bench.said(LANES[0], Kind::Contribution, part);
    bench.contribute(LANES[0], part, 1.0);
    assert_eq!(bench.refused(LANES[0]), unasked(&header, BYTES));
    bench.contribute(LANES[1], part, 2.0);
    assert!(bench.over().is_some() && bench.tensors[0] == floats(2.0, BYTES));
}

#[test]
fn a_contribution_counts_once_and_only_after_the_grant() {
    for twice in [false, true] {
        let mut bench = to_ranks(1 << 20);
        let part = bench.plan_owned(BYTES);
        bench.push(part, 1, 0);
        bench.ready(LANES[0], part, 1);
        if twice {
            bench.ready(LANES[1], part, 1);
            bench.contribute(LANES[0], part, 1.0);
            assert!(bench.reports.pop().is_none());
        }
        let header = bench.said(LANES[0], Kind::Contribution, part);
        bench.contribute(LANES[0], part, 1.0);
        if twice {
            // It is behind the first, which stands until the other rank's is there as well.
            assert!(bench.reports.pop().is_none());
            bench.contribute(LANES[1], part, 2.0);
            assert_eq!(bench.tensors[0], floats(3.0, BYTES));
        }
        assert_eq!(bench.refused(LANES[0]), unasked(&header, BYTES));
    }
}

#[test]
fn a_lane_that_ends_within_a_contribution_ends_no_other_and_gives_all_back() {
    let mut bench = to_ranks(1 << 20);
    let part = bench.plan_owned(4 * BYTES);
    bench.fill(part, 1.0);
    bench.gather(part);
    let header = bench.said(LANES[0], Kind::Contribution, part);
    let header = Header { length: 256, ..header };
    bench.send_raw(LANES[0], header.encode(), floats(2.0, 2 * BYTES));
    bench.contribute(LANES[1], part, 4.0);
    assert!(bench.over().is_none() && bench.nic.group.collector.is_fed());
    bench.far.close(LANES[0]);
    bench.settle();
    bench.lost(LANES[0], Cause::Truncated);
    assert_eq!((bench.over(), bench.nic.gathered.in_flight_bytes()), (None, 4 * BYTES));
    assert!(bench.kinds(Kind::Publication).is_empty(), "half a sum is nobody's");
    // Its rest passes by, and the lane goes on with the next part.
    bench.nic.abandon(part);
    bench.settle();
    assert_eq!(bench.over(), Some((bench.nic.part(part).plan.of, Lacks::NOTHING)));
    assert_eq!(bench.nic.gathered.in_flight_bytes(), 0);
    assert!(!bench.nic.group.collector.is_fed());
    assert!(matches!(bench.nic.lane(LANES[1]).receiving, Receiving::Header));
    bench.nic.close();
    bench.settle();
    assert!(bench.nic.is_closed());
}

#[test]
fn what_is_abandoned_while_it_is_added_passes_by_and_the_next_part_is_added() {
    let mut bench = to_ranks(1 << 20);
    let parts = [bench.plan_owned(2 * BYTES), bench.plan_owned(BYTES), bench.plan_owned(BYTES)];
    for part in parts {
        bench.fill(part, 1.0);
        bench.gather(part);
    }
    // One has sent half of it, the other all, and has the next one standing behind that.
    let header = bench.said(LANES[0], Kind::Contribution, parts[0]);
    let header = Header { length: 128, ..header };
    bench.send_raw(LANES[0], header.encode(), floats(2.0, BYTES));
    for part in parts {
        bench.contribute(LANES[1], part, 4.0);
    }
    bench.nic.abandon(parts[0]);
    bench.nic.abandon(parts[1]);
    bench.settle();
    let over: Vec<_> = std::iter::from_fn(|| bench.nic.take_over()).map(|(of, _)| of).collect();
    assert_eq!(over, [0, 1].map(|at| bench.nic.part(parts[at]).plan.of));
    let before: Vec<_> = bench.tensors[..2].to_vec();
    bench.send_rest(LANES[0], &floats(2.0, BYTES));
    for part in [1, 2] {
        bench.contribute(LANES[0], parts[part], 8.0);
    }
    assert_eq!(bench.over(), Some((bench.nic.part(parts[2]).plan.of, Lacks::NOTHING)));
    assert_eq!(bench.tensors[2], floats(13.0, BYTES));
    assert_eq!(bench.tensors[..2], before, "its callers have the others back");
    assert_eq!(bench.nic.gathered.in_flight_bytes(), 0);
    assert!(bench.reports.pop().is_none());
}

#[test]
fn a_contribution_that_is_not_what_its_checksum_says_goes_to_nobody() {
    for spoilt in [false, true] {
        let mut bench = to_ranks(1 << 20);
        let part = bench.plan_owned(8 * BYTES);
        bench.gather(part);
        let payload = floats(1.0, 8 * BYTES);
        let payload_checksum = crc32c(&payload) ^ u32::from(spoilt);
        let header = bench.said(LANES[0], Kind::Contribution, part);
        let flags = FLAG_PAYLOAD_CHECKSUM;
        bench.contribute(LANES[1], part, 2.0);
        bench.send(LANES[0], Header { flags, payload_checksum, ..header }, payload);
        assert_eq!(bench.kinds(Kind::Publication).is_empty(), spoilt);
        assert_eq!(bench.over().is_none(), spoilt);
        if spoilt {
            let Some(Report::Altered { peer, sent: false, key: Key(1), round: 1, .. }) =
                bench.reports.pop()
            else {
                panic!("nobody saw it")
            };
            assert_eq!(peer, LanePeer::Rank(Rank(1)));
            bench.lost(LANES[0], Cause::Local);
        }
    }
}

#[test]
fn the_sum_of_a_group_goes_to_its_server_and_the_result_from_there_to_all() {
    let peers = [LanePeer::Rank(Rank(1)), LanePeer::Rank(Rank(2)), LanePeer::Server(0)];
    let server = LaneId(2);
    // A sum in f16 is made small on its way, so that it fits where the average does.
    for (dtype, operation, flags) in [
        (DType::F32, Operation::Sum, 0),
        (DType::F32, Operation::Average, 0),
        (DType::F16, Operation::Sum, 0),
        (DType::F16, Operation::Average, FLAG_SCALED),
    ] {
        let mut bench = Bench::new(1 << 20, 6, &peers);
        let part = bench.plan(BYTES, |plan| {
            (plan.core, plan.dtype, plan.operation) = (Some(server), dtype, operation);
        });
        let all = |value: u16| -> Vec<u8> {
            // 1.0 is 0x3c00 in f16; three of them, over four, are 0.75.
            let (one, sum) = match (dtype, flags) {
                (DType::F32, _) => return floats(f32::from(value), BYTES),
                (_, 0) => (0x3c00u16, 0x4200u16),
                _ => (0x3c00, 0x3a00),
            };
            [one, sum][usize::from(value != 1)].to_ne_bytes().repeat(BYTES / 2)
        };
        bench.tensors[0] = all(1);
        bench.gather(part);
        for lane in LANES {
            let header = Header { dtype, ..bench.said(lane, Kind::Contribution, part) };
            bench.send(lane, header, all(1));
        }
        let [(header, payload)] = bench.of_kind(server, Kind::Contribution)[..] else {
            panic!("{:?}", bench.heard)
        };
        let expected = Header { dtype, flags, contributors: 3, ..frame(header.kind, part) };
        assert_eq!(header, Header { length: header.length, ..expected });
        assert_eq!(payload, all(3));
        assert!(bench.kinds(Kind::Publication).is_empty() && bench.over().is_none());
        let result: Vec<u8> = (0u8..64).collect();
        let header = Header { dtype, contributors: 6, ..frame(Kind::Publication, part) };
        bench.send(server, Header { missing: 0b100, ..header }, result.clone());
        for lane in LANES {
            let [(header, payload)] = bench.of_kind(lane, Kind::Publication)[..] else {
                panic!("{:?}", bench.heard)
            };
            assert_eq!((header.contributors, header.missing), (5, 0b100));
            assert_eq!(payload, result);
        }
        let lacks = Lacks { ranks: 0b100, ..Lacks::NOTHING };
        assert_eq!(bench.over(), Some((bench.nic.part(part).plan.of, lacks)));
        assert_eq!(bench.tensors[0], result);
    }
}

#[test]
fn the_result_of_a_broadcast_goes_to_the_group_without_any_contribution() {
    let mut bench = to_ranks(1 << 20);
    let part = bench.plan(BYTES, |plan| plan.operation = Operation::Broadcast(OWN));
    bench.fill(part, 3.0);
    bench.gather(part);
    assert!(bench.kinds(Kind::Grant).is_empty());
    for lane in LANES {
        let [(header, payload)] = bench.of_kind(lane, Kind::Publication)[..] else {
            panic!("{:?}", bench.heard)
        };
        assert_eq!((header.contributors, payload), (1, &floats(3.0, BYTES)[..]));
    }
    assert!(bench.over().is_some());
}

#[test]
fn a_result_for_one_rank_is_told_to_the_others_without_its_bytes() {
    let mut bench = to_ranks(1 << 20);
    let part = bench.plan(BYTES, |plan| plan.receiver = Some(OWN));
    bench.gather(part);
    LANES.into_iter().for_each(|lane| bench.contribute(lane, part, 2.0));
    for lane in LANES {
        let [(_, payload)] = bench.of_kind(lane, Kind::Publication)[..] else {
            panic!("{:?}", bench.heard)
        };
        assert!(payload.is_empty());
    }
    assert!(bench.over().is_some() && bench.tensors[0] == floats(4.0, BYTES));
}

/// A round that waits: its key, the round, who is missing and who has left.
type Waiting = (u64, u64, Vec<u32>, Vec<u32>);

/// What is told of rounds that wait.
fn stalled(bench: &mut Bench) -> Option<Vec<Waiting>> {
    let ranks = |ranks: &[Rank]| ranks.iter().map(|rank| rank.0).collect();
    match bench.reports.pop()? {
        Report::Stalled { keys } => {
            let one =
                |key: &StalledKey| (key.key.0, key.round, ranks(&key.missing), ranks(&key.left));
            Some(keys.iter().map(one).collect())
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_round_that_waits_too_long_names_who_is_missing_until_it_goes_on() {
    let mut bench = to_ranks(1 << 20);
    let parts = [bench.plan_owned(BYTES), bench.plan_owned(BYTES)];
    bench.push(parts[0], 1, 0);
    bench.settle();
    bench.ahead += Duration::from_secs(3);
    bench.ready(LANES[0], parts[1], 1);
    bench.ready(LANES[1], parts[0], 1);
    assert_eq!(stalled(&mut bench), None, "nothing has waited for 5 s");
    bench.ahead += Duration::from_secs(2);
    bench.settle();
    assert_eq!(stalled(&mut bench), Some(vec![(1, 1, vec![1], vec![])]));
    // The other one has by now, too: what has waited longest comes first.
    bench.ahead += Duration::from_secs(3);
    bench.settle();
    let expected = vec![(1, 1, vec![1], vec![]), (2, 1, vec![0, 2], vec![])];
    assert_eq!(stalled(&mut bench), Some(expected));
    bench.ready(LANES[0], parts[0], 1);
    bench.ready(LANES[1], parts[1], 1);
    bench.push(parts[1], 1, 0);
    bench.ahead += Duration::from_secs(1);
    bench.settle();
    assert_eq!(stalled(&mut bench), Some(vec![]), "that it goes on is told once");
    bench.ahead += Duration::from_secs(1);
    bench.settle();
    assert_eq!(stalled(&mut bench), None);
}

#[test]
fn who_has_left_a_round_that_needs_it_is_named_at_once() {
    for owned in [true, false] {
        let mut bench = to_ranks(1 << 20);
        let part = if owned { bench.plan_owned(BYTES) } else { bench.plan_of(LANES[1]) };
        bench.push(part, 1, 0);
        bench.settle();
        assert_eq!(stalled(&mut bench), None);
        let goodbye = Header { key: Key(0), ..bench.said(LANES[1], Kind::Goodbye, part) };
        bench.send(LANES[1], goodbye, Vec::new());
        let missing = if owned { vec![1, 2] } else { vec![2] };
        assert_eq!(stalled(&mut bench), Some(vec![(1, 1, missing, vec![2])]));
    }
}

/// What one of the others has pushed and is asked for, in the order of the grants.
#[derive(Default)]
struct Other {
    /// By part.
    pushed: Vec<u64>,
    answered: usize,
}

#[test]
fn sums_are_right_in_whatever_order_ranks_push_and_bytes_come() {
    const PARTS: usize = 12;
    const ROUNDS: u64 = 4;
    for seed in 0..24 {
        let mut random = Random::new(seed);
        let peers = [LanePeer::Rank(Rank(1)), LanePeer::Rank(Rank(2))];
        let credit = BYTES * (1 + random.index(60));
        let mut bench = Bench::seeded(seed, PayloadChecksum::Auto, (credit, 3), &peers);
        let parts: Vec<PartId> =
            (0..PARTS).map(|_| bench.plan_owned(BYTES * (1 + random.index(30)))).collect();
        let (mut own, mut done) = (vec![0u64; PARTS], vec![0u64; PARTS]);
        let mut others = LANES.map(|_| Other { pushed: vec![0; PARTS], answered: 0 });
        // Small whole numbers, of which every sum is exact.
        let value = |rank: usize, part: usize, round: u64| {
            f32::from(u16::try_from(100 * rank + 7 * part).expect("small")) + round as f32
        };
        while done.iter().any(|rounds| *rounds < ROUNDS) {
            let at = random.index(PARTS);
            if own[at] == done[at] && own[at] < ROUNDS {
                own[at] += 1;
                bench.fill(parts[at], value(0, at, own[at]));
                let priority = i64::try_from(random.index(3)).expect("small");
                bench.push(parts[at], own[at], priority);
            }
            for (lane, other) in LANES.into_iter().zip(&mut others) {
                let at = random.index(PARTS);
                // A rank pushes its next round once it has the result of the last one.
                if other.pushed[at] == done[at] && done[at] < ROUNDS {
                    other.pushed[at] += 1;
                    let said = bench.said(lane, Kind::Ready, parts[at]);
                    let header = Header { round: Round(other.pushed[at]), ..said };
                    bench.send_raw(lane, header.encode(), Vec::new());
                }
                let grants: Vec<Header> =
                    bench.of_kind(lane, Kind::Grant).into_iter().map(|one| one.0).collect();
                // It answers in their order, when it likes.
                if let Some(grant) = grants.get(other.answered).filter(|_| random.once_in(2)) {
                    let at = usize::try_from(grant.key.0 - 1).expect("a part");
                    assert_eq!(
                        grant.round.0, other.pushed[at],
                        "all have pushed what is asked for"
                    );
                    other.answered += 1;
                    let payload = floats(
                        value(lane.0 as usize + 1, at, grant.round.0),
                        bench.tensors[at].len(),
                    );
                    let length = u32::try_from(payload.len()).expect("short");
                    let said = bench.said(lane, Kind::Contribution, parts[at]);
                    let header = Header { length, round: grant.round, ..said };
                    bench.send_raw(lane, header.encode(), payload);
                }
            }
            for _ in 0..1 + random.index(8) {
                bench.nic.begin_turn(bench.now());
                bench.nic.turn();
                bench.poll_far();
                bench.network.advance();
            }
            while let Some((of, lacks)) = bench.nic.take_over() {
                let at = of.tensor as usize;
                done[at] += 1;
                let sum: f32 = (0..3).map(|rank| value(rank, at, done[at])).sum();
                assert_eq!(lacks, Lacks::NOTHING);
                assert_eq!(bench.tensors[at], floats(sum, bench.tensors[at].len()), "seed {seed}");
            }
        }
        bench.settle();
        for lane in LANES {
            let published = bench.of_kind(lane, Kind::Publication);
            assert_eq!(published.len() as u64, PARTS as u64 * ROUNDS);
            for (header, payload) in published {
                let at = usize::try_from(header.key.0 - 1).expect("a part");
                let sum: f32 = (0..3).map(|rank| value(rank, at, header.round.0)).sum();
                assert_eq!(payload, floats(sum, payload.len()), "seed {seed}: all get the same");
            }
        }
        assert!(bench.reports.pop().is_none() && bench.nic.gathered.in_flight_bytes() == 0);
    }
}
