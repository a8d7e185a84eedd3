//! What comes to the lanes: what is taken, what is refused as what, and what becomes of memory.

use super::*;
use crate::base::error::{PartMisfit, Unasked};
use bps_engine::wire::crc32c;
use bps_engine::wire::header::{COMES_BACK, FLAG_PAYLOAD_CHECKSUM, FLAG_RESULT, Invalid};

/// [`BYTES`], as frames say it.
const LENGTH: u32 = 64;

/// The result of the first round of a part, in which all ranks of the job are.
fn publication(bench: &Bench, part: PartId) -> Header {
    let contributors = bench.nic.config.size;
    Header { contributors, ..frame(Kind::Publication, part) }
}

/// A part that a core sums, whose first round was sent there.
fn asked(bench: &mut Bench) -> PartId {
    let part = bench.plan_served();
    bench.push(part, 1, 0);
    bench.settle();
    assert_eq!(bench.nic.part(part).stage, Stage::Asked);
    part
}

/// What a frame of this kind is refused as that is not what its part waits for.
fn misfit(what: Unasked, header: &Header, bytes: u32, open: u64) -> Misfit {
    let (key, round) = (header.key, header.round.0);
    let tensor = format!("t{}", key.0 - 1);
    Misfit::Part(PartMisfit { what, tensor, key, round, bytes, part_bytes: BYTES, open })
}

#[test]
fn a_result_lands_in_the_tensor_and_ends_the_round() {
    let mut bench = to_server(1 << 20);
    let part = asked(&mut bench);
    for round in 1..4 {
        if round > 1 {
            bench.push(part, round, 0);
            bench.settle();
        }
        assert_eq!(bench.over(), None);
        let header = Header { round: Round(round), ..publication(&bench, part) };
        bench.send(SERVER, Header { missing: 0b10, ..header }, floats(round as f32, BYTES));
        let of = bench.nic.part(part).plan.of;
        assert_eq!(bench.over(), Some((of, Lacks { ranks: 0b10, ..Lacks::NOTHING })));
        assert_eq!(bench.tensors[0], floats(round as f32, BYTES));
        assert!(!bench.nic.is_open() && bench.nic.part(part).memory.is_none());
    }
    assert!(bench.reports.pop().is_none());
    let counters = &bench.nic.statistics.counters;
    assert_eq!((counters.frames_in.read(), counters.rounds.read()), (3, 3));
    assert_eq!(counters.bytes_in.read(), 3 * u64::from(LENGTH));
}

#[test]
fn a_result_that_is_not_the_awaited_one_is_refused() {
    type Change = fn(&mut Header);
    let changes: [Change; 8] = [
        |header| header.rank = Rank(1),
        |header| header.epoch = Epoch(4),
        |header| header.dtype = DType::I32,
        |header| header.offset = 4,
        |header| header.round = Round(0),
        |header| header.round = Round(2),
        |header| header.missing = 0b111,
        |header| header.flags = 4,
    ];
    for (at, change) in changes.into_iter().enumerate() {
        let mut bench = to_server(1 << 20);
        let part = asked(&mut bench);
        let mut header = publication(&bench, part);
        change(&mut header);
        bench.send(SERVER, header, floats(1.0, BYTES));
        let expected = misfit(Unasked::Publication, &header, LENGTH, 1);
        assert_eq!(bench.refused(SERVER), expected, "change {at}");
        assert_eq!((bench.over(), &bench.tensors[0]), (None, &floats(0.0, BYTES)));
    }
}

#[test]
fn a_result_of_another_length_is_refused() {
    for bytes in [0, BYTES - 4, BYTES + 4] {
        let mut bench = to_server(1 << 20);
        let part = asked(&mut bench);
        let header = publication(&bench, part);
        bench.send(SERVER, header, floats(1.0, bytes));
        let length = u32::try_from(bytes).expect("short");
        assert_eq!(bench.refused(SERVER), misfit(Unasked::Publication, &header, length, 1));
        assert_eq!((bench.over(), &bench.tensors[0]), (None, &floats(0.0, BYTES)));
    }
}

#[test]
fn a_result_comes_on_the_lane_of_the_core_that_sums_the_part() {
    let mut bench = Bench::new(1 << 20, 2, &[LanePeer::Server(0), LanePeer::Server(1)]);
    let part = asked(&mut bench);
    let header = publication(&bench, part);
    bench.send(LaneId(1), header, floats(1.0, BYTES));
    assert_eq!(bench.refused(LaneId(1)), misfit(Unasked::Publication, &header, LENGTH, 1));
    // The other lane is none the worse for it.
    bench.send(SERVER, header, floats(2.0, BYTES));
    assert!(bench.over().is_some() && bench.tensors[0] == floats(2.0, BYTES));
}

#[test]
fn a_result_that_comes_twice_or_before_its_round_was_sent_is_refused() {
    // Before the next round is pushed, and after.
    for pushed in [1, 2] {
        let mut bench = to_server(1 << 20);
        let part = asked(&mut bench);
        let header = publication(&bench, part);
        bench.send(SERVER, header, floats(1.0, BYTES));
        assert!(bench.over().is_some());
        if pushed == 2 {
            bench.push(part, 2, 0);
            bench.settle();
        }
        bench.send(SERVER, header, floats(2.0, BYTES));
        assert_eq!(bench.refused(SERVER), misfit(Unasked::Publication, &header, LENGTH, pushed));
        assert_eq!((bench.over(), &bench.tensors[0]), (None, &floats(1.0, BYTES)));
    }
    // It waits for its credit.
    let mut bench = to_server(BYTES);
    let parts = [bench.plan_served(), bench.plan_served()];
    parts.into_iter().for_each(|part| bench.push(part, 1, 0));
    bench.turn_alone();
    let header = Header { length: LENGTH, ..publication(&bench, parts[1]) };
    bench.nic.on_header(SERVER, &header.encode(), Carried::Nothing);
    let expected = misfit(Unasked::Publication, &header, LENGTH, 1);
    let Some(Report::Corrupt { misfit, .. }) = bench.reports.pop() else { panic!("taken") };
    assert_eq!(misfit, expected);
}

#[test]
fn a_server_says_only_what_servers_say() {
    let refusals = [
        (Kind::Contribution, Misfit::NotOfServer(Kind::Contribution)),
        (Kind::Ready, Misfit::NotOfServer(Kind::Ready)),
        (Kind::Goodbye, Misfit::NotOfServer(Kind::Goodbye)),
        (Kind::GpuReduce, Misfit::NotOfServer(Kind::GpuReduce)),
        (Kind::Refused, Misfit::Refused),
        (Kind::Grant, misfit(Unasked::Again, &frame(Kind::Grant, PartId(0)), 0, 1)),
    ];
    for (kind, expected) in refusals {
        let mut bench = to_server(1 << 20);
        let part = asked(&mut bench);
        bench.send(SERVER, frame(kind, part), Vec::new());
        assert_eq!(bench.refused(SERVER), expected);
    }
    let mut bench = to_server(1 << 20);
    asked(&mut bench);
    let header = frame(Kind::Publication, PartId(7));
    bench.send(SERVER, header, Vec::new());
    let (kind, key) = (header.kind, header.key);
    assert_eq!(bench.refused(SERVER), Misfit::UnknownKey { kind, key });
}

#[test]
fn bytes_that_are_no_header_close_the_lane() {
    let mut bench = to_server(1 << 20);
    let part = asked(&mut bench);
    let mut raw = publication(&bench, part).encode();
    raw[30] ^= 1;
    bench.send_raw(SERVER, raw, Vec::new());
    // What follows is not read: nobody knows where a frame begins.
    bench.send(SERVER, publication(&bench, part), floats(1.0, BYTES));
    let refused = bench.refused(SERVER);
    assert!(matches!(refused, Misfit::Header(Invalid::Checksum { .. })), "{refused:?}");
    assert_eq!(bench.over(), None);
}

#[test]
fn a_lane_that_ends_within_a_result_leaves_its_round_open_until_it_is_abandoned() {
    let mut bench = to_server(1 << 20);
    let part = asked(&mut bench);
    let header = Header { length: LENGTH, ..publication(&bench, part) };
    bench.send_raw(SERVER, header.encode(), floats(1.0, BYTES / 2));
    bench.settle();
    assert_eq!(bench.nic.part(part).stage, Stage::Landing);
    bench.far.close(SERVER);
    bench.settle();
    bench.lost(SERVER, Cause::Truncated);
    assert_eq!(bench.over(), None, "half a result is none");
    bench.nic.close();
    bench.nic.abandon(part);
    assert!(bench.over().is_some() && !bench.nic.is_open());
}

#[test]
fn an_abandoned_part_keeps_its_memory_while_its_result_lands_there() {
    let mut bench = to_server(1 << 20);
    let part = bench.plan(2 * BYTES, |plan| plan.core = Some(SERVER));
    bench.push(part, 1, 0);
    bench.settle();
    let header = Header { length: 2 * LENGTH, ..publication(&bench, part) };
    bench.send_raw(SERVER, header.encode(), floats(1.0, BYTES));
    bench.settle();
    bench.nic.abandon(part);
    bench.settle();
    assert_eq!((bench.over(), bench.nic.is_open()), (None, true));
    bench.send_rest(SERVER, &floats(1.0, BYTES));
    assert_eq!(bench.over(), Some((bench.nic.part(part).plan.of, Lacks::NOTHING)));
    assert!(!bench.nic.is_open() && bench.reports.pop().is_none());
}

#[test]
fn the_result_of_an_abandoned_part_passes_by_in_the_way_of_nothing() {
    let mut bench = to_server(1 << 20);
    let (gone, part) = (asked(&mut bench), asked(&mut bench));
    bench.nic.abandon(gone);
    assert_eq!(bench.over(), Some((bench.nic.part(gone).plan.of, Lacks::NOTHING)));
    // Its caller has the memory back: nothing may land there.
    bench.fill(gone, 9.0);
    bench.send(SERVER, publication(&bench, gone), floats(1.0, BYTES));
    bench.send(SERVER, publication(&bench, part), floats(2.0, BYTES));
    assert_eq!(bench.over(), Some((bench.nic.part(part).plan.of, Lacks::NOTHING)));
    assert_eq!(bench.tensors, [floats(9.0, BYTES), floats(2.0, BYTES)]);
    assert!(bench.reports.pop().is_none());
}

#[test]
fn the_root_of_a_broadcast_is_only_told_and_others_get_its_bytes_or_that_it_has_died() {
    for (root, bytes, contributors, is_lost) in
        [(OWN, 0, 2, false), (Rank(1), BYTES, 1, false), (Rank(1), 0, 0, true)]
    {
        let mut bench = to_server(1 << 20);
        let operation = Operation::Broadcast(root);
        let part = bench.plan(BYTES, |plan| {
            (plan.core, plan.operation) = (Some(SERVER), operation);
        });
        bench.fill(part, 5.0);
        bench.push(part, 1, 0);
        bench.settle();
        let header = Header { contributors, ..publication(&bench, part) };
        bench.send(SERVER, header, floats(1.0, bytes));
        let of = bench.nic.part(part).plan.of;
        assert_eq!(bench.over(), Some((of, Lacks { is_lost, ..Lacks::NOTHING })));
        assert_eq!(bench.tensors[0], floats(if bytes > 0 { 1.0 } else { 5.0 }, BYTES));
    }
    // Its root gets no bytes, and of a sum nobody is told that there are none.
    for operation in [Operation::Broadcast(OWN), Operation::Sum] {
        let mut bench = to_server(1 << 20);
        let part = bench.plan(BYTES, |plan| {
            (plan.core, plan.operation) = (Some(SERVER), operation);
        });
        bench.push(part, 1, 0);
        bench.settle();
        let length = if operation == Operation::Sum { 0 } else { BYTES };
        let header = Header { contributors: 0, ..publication(&bench, part) };
        bench.send(SERVER, header, floats(1.0, length));
        let bytes = u32::try_from(length).expect("short");
        assert_eq!(bench.refused(SERVER), misfit(Unasked::Publication, &header, bytes, 1));
        assert_eq!((bench.over(), &bench.tensors[0]), (None, &floats(0.0, BYTES)));
    }
}

#[test]
fn a_payload_that_is_not_what_its_checksum_says_is_no_result() {
    for spoilt in [false, true] {
        let mut bench = to_server(1 << 20);
        let part = asked(&mut bench);
        let payload = floats(1.0, BYTES);
        let payload_checksum = crc32c(&payload) ^ u32::from(spoilt);
        let flags = FLAG_PAYLOAD_CHECKSUM;
        let header = Header { flags, payload_checksum, ..publication(&bench, part) };
        bench.send(SERVER, header, payload);
        assert_eq!(bench.over().is_none(), spoilt);
        if spoilt {
            altered(&mut bench, SERVER, false);
        }
    }
    // A server found that of what this rank has sent.
    let mut bench = to_server(1 << 20);
    let part = asked(&mut bench);
    let header = Header { flags: FLAG_PAYLOAD_CHECKSUM, ..frame(Kind::Refused, part) };
    bench.send(SERVER, header, Vec::new());
    altered(&mut bench, SERVER, true);
}

/// The lane is closed since bytes of the first part have changed on their way.
fn altered(bench: &mut Bench, lane: LaneId, by_this_rank: bool) {
    let Some(Report::Altered { peer, sent, tensor, key, round }) = bench.reports.pop() else {
        panic!("nobody saw it")
    };
    assert_eq!((peer, sent), (bench.nic.lane(lane).peer, by_this_rank));
    assert_eq!((tensor.as_deref(), key, round), (Some("t0"), Key(1), 1));
    bench.lost(lane, Cause::Local);
}

#[test]
fn a_rank_speaks_for_itself_and_says_only_what_ranks_say() {
    type Change = fn(&mut Header);
    let owner = LaneId(0);
    let speaker = |rank: u32, said: u32| {
        let (lane, epoch, rank, said) = (Rank(1), EPOCH, Rank(rank), Epoch(said));
        Misfit::Speaker { lane, epoch, rank, said }
    };
    let payload = |kind| Misfit::Payload { kind, bytes: 4 };
    let cases: [(Kind, Change, usize, Misfit); 11] = [
        (Kind::Ready, |header| header.rank = OWN, 0, speaker(0, 3)),
        (Kind::Ready, |header| header.rank = Rank(2), 0, speaker(2, 3)),
        (Kind::Ready, |header| header.epoch = Epoch(2), 0, speaker(1, 2)),
        (Kind::Grant, |header| header.rank = Rank(1), 0, speaker(1, 3)),
        (Kind::Grant, |header| header.epoch = Epoch(4), 0, speaker(0, 4)),
        (Kind::Ready, |_| {}, 4, payload(Kind::Ready)),
        (Kind::Grant, |_| {}, 4, payload(Kind::Grant)),
        (Kind::Goodbye, |_| {}, 4, payload(Kind::Goodbye)),
        (Kind::Refused, |_| {}, 0, Misfit::NotOfRank(Kind::Refused)),
        (Kind::GpuReduce, |_| {}, 0, Misfit::NotOfRank(Kind::GpuReduce)),
        (
            Kind::Contribution,
            |header| header.flags = FLAG_RESULT,
            4,
            Misfit::Result { key: Key(1) },
        ),
    ];
    for (kind, change, bytes, expected) in cases {
        let mut bench = to_ranks(1 << 20);
        let part = bench.plan_of(owner);
        bench.push(part, 1, 0);
        bench.settle();
        let mut header = bench.said(owner, kind, part);
        change(&mut header);
        bench.send(owner, header, floats(0.0, bytes));
        assert_eq!(bench.refused(owner), expected);
        assert!(bench.nic.lane(LaneId(1)).open && bench.over().is_none());
    }
}

#[test]
fn a_push_is_of_the_open_round_by_who_has_not_pushed_it_to_who_sums_the_part() {
    let untimely = |round| Misfit::Untimely { key: Key(1), round, open: 1 };
    for rounds in [&[2][..], &[0], &[1, 1], &[1, 2]] {
        let mut bench = to_ranks(1 << 20);
        let part = bench.plan_owned(BYTES);
        for round in rounds {
            let header = bench.said(LaneId(1), Kind::Ready, part);
            bench.send(LaneId(1), Header { round: Round(*round), ..header }, Vec::new());
        }
        assert_eq!(bench.refused(LaneId(1)), untimely(rounds[rounds.len() - 1]));
    }
    let mut bench = to_ranks(1 << 20);
    let part = bench.plan_of(LaneId(0));
    let header = bench.said(LaneId(1), Kind::Ready, part);
    bench.send(LaneId(1), header, Vec::new());
    assert_eq!(bench.refused(LaneId(1)), Misfit::NotOwned { key: Key(1) });
    // For ranks 0 and 1 only.
    let mut bench = to_ranks(1 << 20);
    let among = Among { count: 2, lanes: [LaneId(0)].into() };
    let part = bench.plan(BYTES, |plan| plan.among = Some(Arc::new(among)));
    for (lane, expected) in [(0, None), (1, Some(Misfit::Outside { key: Key(1) }))] {
        let header = bench.said(LaneId(lane), Kind::Ready, part);
        bench.send(LaneId(lane), header, Vec::new());
        assert_eq!(expected.as_ref().map(|_| bench.refused(LaneId(lane))), expected);
    }
}

#[test]
fn a_rank_may_push_what_this_one_does_not_know_yet() {
    let mut bench = to_ranks(1 << 20);
    for lane in [LaneId(0), LaneId(1)] {
        let header = bench.said(lane, Kind::Ready, PartId(0));
        bench.send(lane, header, Vec::new());
    }
    let part = bench.plan_owned(BYTES);
    assert!(bench.heard.is_empty());
    bench.push(part, 1, 0);
    bench.settle();
    let mut grants = bench.kinds(Kind::Grant);
    grants.sort_unstable_by_key(|(lane, ..)| lane.0);
    assert_eq!(grants, [0, 1].map(|lane| (LaneId(lane), Key(1), 1)));
}

#[test]
fn a_grant_is_answered_with_the_contribution_once() {
    let (owner, other) = (LaneId(0), LaneId(1));
    let mut bench = to_ranks(1 << 20);
    let part = bench.plan_of(owner);
    bench.fill(part, 4.0);
    bench.push(part, 1, 0);
    bench.settle();
    bench.send(owner, frame(Kind::Grant, part), Vec::new());
    let (lane, header, payload) = bench.heard.last().expect("an answer");
    assert_eq!((*lane, payload), (owner, &floats(4.0, BYTES)));
    assert_eq!(*header, Header { length: LENGTH, ..frame(Kind::Contribution, part) });
    let again = frame(Kind::Grant, part);
    bench.send(owner, again, Vec::new());
    assert_eq!(bench.refused(owner), misfit(Unasked::Grant, &again, 0, 1));
    assert_eq!(bench.kinds(Kind::Contribution).len(), 1);
    // Of another round, by who does not sum it, and before it was pushed.
    for (lane, round, pushed) in [(owner, 2, 1), (owner, 0, 1), (other, 1, 1), (owner, 1, 0)] {
        let mut bench = to_ranks(1 << 20);
        let part = bench.plan_of(owner);
        if pushed == 1 {
            bench.push(part, 1, 0);
        }
        bench.settle();
        let header = Header { round: Round(round), ..frame(Kind::Grant, part) };
        bench.send(lane, header, Vec::new());
        assert_eq!(bench.refused(lane), misfit(Unasked::Grant, &header, 0, pushed));
        assert!(bench.kinds(Kind::Contribution).is_empty());
    }
}

#[test]
fn a_grant_of_an_abandoned_part_is_not_answered_and_harms_nothing() {
    let mut bench = to_ranks(1 << 20);
    let part = bench.plan_of(LaneId(0));
    bench.push(part, 1, 0);
    bench.settle();
    bench.nic.abandon(part);
    assert!(bench.over().is_some());
    bench.send(LaneId(0), frame(Kind::Grant, part), Vec::new());
    assert!(bench.kinds(Kind::Contribution).is_empty() && bench.reports.pop().is_none());
}

#[test]
fn who_has_said_goodbye_still_gets_what_was_posted_and_nothing_of_it_is_read_any_more() {
    for act in [0, COMES_BACK] {
        let mut bench = to_ranks(1 << 20);
        let owner = LaneId(0);
        let part = bench.plan_of(owner);
        bench.push(part, 1, 0);
        bench.settle();
        // The contribution is posted and has not left when the goodbye is read.
        let grant = frame(Kind::Grant, part).encode();
        bench.nic.on_header(owner, &grant, Carried::Nothing);
        bench.turn_alone();
        let goodbye = Header { act, ..bench.said(owner, Kind::Goodbye, part) };
        bench.nic.on_header(owner, &goodbye.encode(), Carried::Nothing);
        assert_eq!(bench.nic.lane(owner).posted, [part]);
        let garbage: RawHeader = [7; 64];
        bench.nic.on_header(owner, &garbage, Carried::Nothing);
        assert!(bench.nic.lane(owner).open, "its memory is not the part's yet");
        bench.settle();
        assert_eq!(bench.kinds(Kind::Contribution), [(owner, Key(1), 1)]);
        assert!(!bench.nic.lane(owner).open && bench.closed == [owner]);
        // That it has left in good order is no loss; that its part is open is told.
        let Some(Report::Stalled { keys }) = bench.reports.pop() else { panic!("not told") };
        let told: Vec<_> = keys.iter().map(|key| (key.key, key.round, &key.left[..])).collect();
        assert_eq!(told, [(Key(1), 1, &[Rank(1)][..])]);
        assert!(bench.reports.pop().is_none());
    }
}
