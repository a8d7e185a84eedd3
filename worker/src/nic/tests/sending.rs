//! What leaves the lanes, and when.

use super::*;
use bps_engine::limits::LANE_FRAMES_MAX;
use bps_engine::transport::sim::Random;
use bps_engine::wire::crc32c;
use bps_engine::wire::header::FLAG_PAYLOAD_CHECKSUM;

fn posted(bench: &Bench) -> usize {
    bench.nic.lane(SERVER).posted.len()
}

#[test]
fn the_most_urgent_part_goes_first_and_no_more_than_credit_is_posted() {
    let mut bench = to_server(2 * BYTES);
    let parts = [0, 5, 9, 5].map(|priority| (bench.plan_served(), priority));
    for (part, priority) in parts {
        bench.push(part, 1, priority);
    }
    bench.turn_alone();
    assert_eq!((posted(&bench), bench.nic.queue.in_flight_bytes()), (2, 2 * BYTES));
    let stages = parts.map(|(part, _)| bench.nic.part(part).stage);
    assert_eq!(stages, [Stage::Pushed, Stage::Asked, Stage::Asked, Stage::Pushed]);
    bench.settle();
    // Of two that are as urgent, the one that was pushed first.
    let keys: Vec<u64> = bench.kinds(Kind::Contribution).iter().map(|(_, key, _)| key.0).collect();
    assert_eq!(keys, [3, 2, 4, 1]);
    assert_eq!((posted(&bench), bench.nic.queue.in_flight_bytes()), (0, 0));
    assert!(parts.iter().all(|(part, _)| bench.nic.part(*part).stage == Stage::Asked));
}

#[test]
fn a_part_that_is_larger_than_the_credit_goes_alone() {
    let mut bench = to_server(BYTES - 1);
    for part in [bench.plan_served(), bench.plan_served()] {
        bench.push(part, 1, 0);
    }
    bench.turn_alone();
    assert_eq!(posted(&bench), 1, "nothing is before it");
    bench.settle();
    assert_eq!(bench.kinds(Kind::Contribution).len(), 2);
}

#[test]
fn more_credit_lets_more_be_posted() {
    let mut bench = to_server(BYTES);
    for _ in 0..4 {
        let part = bench.plan_served();
        bench.push(part, 1, 0);
    }
    bench.turn_alone();
    assert_eq!(posted(&bench), 1);
    bench.nic.tune(1, 3 * BYTES);
    bench.turn_alone();
    assert_eq!(posted(&bench), 3);
}

#[test]
fn an_urgent_part_overtakes_those_that_wait_and_not_those_that_are_posted() {
    let mut bench = to_server(2 * BYTES);
    // A large tensor in its partitions, and one that is needed sooner while it goes.
    for _ in 0..6 {
        let part = bench.plan_served();
        bench.push(part, 1, 0);
    }
    bench.turn_alone();
    assert_eq!(posted(&bench), 2);
    let urgent = bench.plan_served();
    bench.push(urgent, 1, 1);
    bench.settle();
    let keys: Vec<u64> = bench.kinds(Kind::Contribution).iter().map(|(_, key, _)| key.0).collect();
    assert_eq!(keys, [1, 2, 7, 3, 4, 5, 6]);
}

#[test]
fn lanes_share_one_credit() {
    let peers = [LanePeer::Server(0), LanePeer::Server(1)];
    let mut bench = Bench::new(2 * BYTES, 2, &peers);
    for lane in [0, 0, 1, 1] {
        let part = bench.plan(BYTES, |plan| plan.core = Some(LaneId(lane)));
        bench.push(part, 1, i64::from(lane));
    }
    bench.turn_alone();
    let posted = [0, 1].map(|lane| bench.nic.lane(LaneId(lane)).posted.len());
    assert_eq!(posted, [0, 2], "what is less urgent waits, on whichever lane");
    bench.settle();
    assert_eq!(bench.kinds(Kind::Contribution).len(), 4);
}

/// What waits for the lane and what is on it, as they should be.
#[derive(Default)]
struct Model {
    /// Priority, and when it was pushed, the latest the smallest.
    waiting: Vec<(i64, i64, PartId)>,
    credit_bytes: usize,
}

impl Model {
    /// Compares what a turn has posted: the most urgent ones, as far as the credit goes.
    fn check(&mut self, bench: &Bench, before: usize) {
        self.waiting.sort_unstable();
        let bytes = |part: &PartId| bench.tensors[part.0 as usize].len();
        let is_asked = |part: &PartId| bench.nic.part(*part).stage == Stage::Asked;
        let asked = self.waiting.iter().filter(|(.., part)| is_asked(part)).count();
        let left = self.waiting.len() - asked;
        let gone: Vec<PartId> = self.waiting.drain(left..).rev().map(|(.., part)| part).collect();
        assert!(gone.iter().all(is_asked), "{gone:?} were the most urgent ones");
        let mut in_flight = before;
        for part in &gone {
            let fits = in_flight + bytes(part) <= self.credit_bytes;
            assert!(in_flight == 0 || fits, "{part:?} was posted without credit");
            in_flight += bytes(part);
        }
        let is_free = before == 0 && gone.is_empty();
        assert!(!is_free || self.waiting.is_empty(), "nothing is in the way of the next");
    }
}

#[test]
fn every_turn_posts_the_most_urgent_parts_that_the_credit_lets_go() {
    for seed in 0..40 {
        let mut random = Random::new(seed);
        let mut model = Model { credit_bytes: BYTES * (1 + random.index(40)), ..Model::default() };
        let sizes = (model.credit_bytes, 2);
        let peers = [LanePeer::Server(0)];
        let mut bench = Bench::seeded(seed, PayloadChecksum::Auto, sizes, &peers);
        let mut pushed = 0;
        while pushed < 200 || !model.waiting.is_empty() {
            for _ in 0..random.index(if pushed < 200 { 6 } else { 1 }) {
                let part = bench.plan(BYTES * (1 + random.index(20)), |plan| {
                    plan.core = Some(SERVER);
                });
                let priority = i64::try_from(random.index(5)).expect("small") - 2;
                bench.push(part, 1, priority);
                pushed += 1;
                model.waiting.push((priority, -pushed, part));
            }
            if random.once_in(20) {
                model.credit_bytes = BYTES * (1 + random.index(40));
                bench.nic.tune(1, model.credit_bytes);
            }
            if random.once_in(10) && !model.waiting.is_empty() {
                let (.., part) = model.waiting.swap_remove(random.index(model.waiting.len()));
                bench.nic.abandon(part);
            }
            let before = bench.nic.queue.in_flight_bytes();
            bench.nic.begin_turn(bench.now());
            bench.nic.turn();
            model.check(&bench, before);
            bench.poll_far();
            bench.network.advance();
        }
        bench.settle();
        assert_eq!((posted(&bench), bench.nic.queue.in_flight_bytes()), (0, 0));
        assert!(bench.reports.pop().is_none());
    }
}

#[test]
fn a_part_that_is_abandoned_while_it_waits_never_leaves() {
    let mut bench = to_server(BYTES);
    let parts = [bench.plan_served(), bench.plan_served(), bench.plan_served()];
    parts.into_iter().for_each(|part| bench.push(part, 1, 0));
    bench.turn_alone();
    bench.nic.abandon(parts[1]);
    assert_eq!(bench.over(), Some((bench.nic.part(parts[1]).plan.of, Lacks::NOTHING)));
    bench.settle();
    let sent = [parts[0], parts[2]].map(|part| (SERVER, Key(u64::from(part.0) + 1), 1));
    assert_eq!(bench.kinds(Kind::Contribution), sent);
}

#[test]
fn a_part_that_is_abandoned_on_its_way_is_over_once_it_has_left() {
    let mut bench = to_server(BYTES);
    let part = bench.plan_served();
    bench.fill(part, 6.0);
    bench.push(part, 1, 0);
    bench.turn_alone();
    bench.nic.abandon(part);
    assert_eq!((bench.over(), bench.nic.queue.in_flight_bytes()), (None, BYTES));
    bench.settle();
    assert_eq!(bench.over(), Some((bench.nic.part(part).plan.of, Lacks::NOTHING)));
    assert_eq!(bench.heard[0].2, floats(6.0, BYTES), "whole, as the lane needs it");
    assert_eq!(bench.nic.queue.in_flight_bytes(), 0);
}

#[test]
fn payloads_carry_their_checksum_where_lanes_check_and_else_none() {
    let payload = floats(2.5, BYTES);
    for (checksums, flags, expected) in [
        (PayloadChecksum::Always, FLAG_PAYLOAD_CHECKSUM, crc32c(&payload)),
        (PayloadChecksum::Never, 0, 0),
    ] {
        let peers = [LanePeer::Server(0), LanePeer::Rank(Rank(1))];
        let mut bench = Bench::seeded(7, checksums, (1 << 20, 4), &peers);
        let owner = LaneId(1);
        let among = Arc::new(Among { count: 2, lanes: [].into() });
        let served = bench.plan(BYTES, |plan| {
            (plan.core, plan.among) = (Some(SERVER), Some(among));
        });
        let owned = bench.plan_of(owner);
        for part in [served, owned] {
            bench.fill(part, 2.5);
            bench.push(part, 1, 0);
        }
        bench.settle();
        bench.send(owner, frame(Kind::Grant, owned), Vec::new());
        let heard = bench.heard.iter().filter(|(_, header, _)| header.length > 0);
        let said: Vec<_> =
            heard.map(|(lane, one, _)| (*lane, one.flags, one.payload_checksum)).collect();
        assert_eq!(said, [(SERVER, flags, expected), (owner, flags, expected)]);
    }
}

#[test]
fn a_contribution_says_what_it_is_and_carries_the_tensor() {
    let mut bench = to_server(1 << 20);
    let part = bench.plan_served();
    bench.fill(part, 2.5);
    bench.push(part, 1, 0);
    bench.settle();
    let [(SERVER, header, payload)] = &bench.heard[..] else { panic!("{:?}", bench.heard) };
    let length = u32::try_from(BYTES).expect("short");
    assert_eq!(*header, Header { length, ..frame(Kind::Contribution, part) });
    assert_eq!(*payload, floats(2.5, BYTES));
}

#[test]
fn whoever_only_receives_a_broadcast_asks_for_it_without_bytes() {
    let mut bench = to_server(1 << 20);
    let root = Operation::Broadcast(Rank(1));
    let part = bench.plan(BYTES, |plan| (plan.core, plan.operation) = (Some(SERVER), root));
    bench.push(part, 1, 0);
    bench.settle();
    assert_eq!(bench.heard, [(SERVER, frame(Kind::Contribution, part), Vec::new())]);
    assert_eq!(bench.nic.queue.in_flight_bytes(), 0, "what was taken of the credit is back");
}

#[test]
fn nothing_is_posted_on_a_lane_that_is_closed() {
    let mut bench = to_server(1 << 20);
    let (before, behind) = (bench.plan_served(), bench.plan_served());
    bench.push(before, 1, 0);
    bench.settle();
    bench.far.close(SERVER);
    bench.settle();
    let Some(Report::Lost { peer: LanePeer::Server(0), round: Some(round), .. }) =
        bench.reports.pop()
    else {
        panic!("the lane was lost")
    };
    assert_eq!((round.of.tensor.as_str(), round.of.round, round.is_open), ("t0", 1, true));
    bench.push(behind, 1, 9);
    bench.turn_alone();
    assert_eq!(bench.nic.queue.waiting().copied().collect::<Vec<_>>(), [behind]);
    assert_eq!((bench.nic.part(behind).stage, posted(&bench)), (Stage::Pushed, 0));
    assert!(bench.reports.pop().is_none(), "it is told once");
}

#[test]
fn what_is_said_to_a_rank_keeps_its_order_whatever_its_priority() {
    let mut bench = to_ranks(1 << 20);
    let owner = LaneId(1);
    // More than a lane takes at once.
    let count = 2 * LANE_FRAMES_MAX;
    let parts: Vec<PartId> = (0..count).map(|_| bench.plan_of(owner)).collect();
    for (part, priority) in parts.iter().zip([3, -1, 7].into_iter().cycle()) {
        bench.push(*part, 1, priority);
    }
    bench.settle();
    let expected: Vec<_> =
        parts.iter().map(|part| (owner, Key(u64::from(part.0) + 1), 1)).collect();
    assert_eq!(bench.kinds(Kind::Ready), expected);
    assert_eq!(bench.heard.len(), parts.len(), "it sends bytes only to who asks for them");
}

#[test]
fn who_leaves_says_so_last_on_every_lane() {
    let mut bench = to_ranks(1 << 20);
    let part = bench.plan(BYTES, |plan| plan.owner = Some(LaneId(0)));
    bench.push(part, 1, 0);
    bench.settle();
    let is_due = Header { contributors: 3, ..frame(Kind::Publication, part) };
    bench.send(LaneId(0), frame(Kind::Grant, part), Vec::new());
    bench.send(LaneId(0), is_due, floats(1.0, BYTES));
    assert!(bench.over().is_some());
    bench.heard.clear();
    bench.nic.leave(false);
    bench.settle();
    let goodbye = |lane| (lane, Key(0), 0);
    assert_eq!(bench.kinds(Kind::Goodbye), [0, 1].map(|lane| goodbye(LaneId(lane))));
    assert_eq!(bench.heard.len(), 2);
}

#[test]
fn a_result_that_does_not_come_is_told_by_half_of_the_time_and_once_when_it_has_come() {
    let mut bench = to_server(1 << 20);
    let parts = [bench.plan_served(), bench.plan_served()];
    let awaited = |bench: &mut Bench| -> Option<Vec<(u64, u64, u32)>> {
        match bench.reports.pop()? {
            Report::Awaiting { keys } => {
                Some(keys.iter().map(|key| (key.key.0, key.round, key.server)).collect())
            }
            other => panic!("{other:?}"),
        }
    };
    for (part, after) in [(parts[1], 1), (parts[0], 1400)] {
        bench.push(part, 1, 0);
        bench.settle();
        bench.ahead += Duration::from_millis(after);
    }
    bench.settle();
    assert_eq!(awaited(&mut bench), None, "nothing was asked for 2.5 s ago");
    bench.ahead += Duration::from_millis(1200);
    bench.settle();
    let oldest = [(2, 1, 0), (1, 1, 0)];
    let told = awaited(&mut bench).expect("it is told");
    assert_eq!(told, oldest);
    for part in parts {
        let header = Header { contributors: 2, ..frame(Kind::Publication, part) };
        bench.send(SERVER, header, floats(1.0, BYTES));
    }
    bench.ahead += Duration::from_secs(1);
    bench.settle();
    assert_eq!(awaited(&mut bench), Some(Vec::new()));
    bench.ahead += Duration::from_secs(1);
    bench.settle();
    assert_eq!(awaited(&mut bench), None);
}
