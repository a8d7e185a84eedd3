//! Lanes that break between members that are well, and bytes that do not arrive.

use super::*;
use crate::proto::paths::{AwaitedKey, End, KeyState, LaneFault, Leg, PathStall};

const ALL: [u64; 4] = [0, 1, 2, 100];
const SILENT: LaneFault = LaneFault::Unacknowledged { milliseconds: 9_000 };

fn lost(to: End) -> NodeMessage {
    NodeMessage::LaneLost { to, fault: SILENT }
}

#[test]
fn a_lost_lane_between_members_that_are_well_is_one_verdict_on_the_path() {
    let mut bench = Bench::formed(3, 1);
    bench.say(100, lost(End::Rank(Rank(2))));
    bench.pass(250, &ALL);
    assert_eq!(bench.done, None, "a death may explain it");
    bench.say(2, NodeMessage::LaneLost { to: End::Server(0), fault: LaneFault::Closed });
    bench.pass(500, &ALL);
    for node in ALL {
        let OverReason::PathLost(loss) = bench.over(node) else { panic!() };
        assert_eq!((loss.from.end, loss.to.end), (End::Server(0), End::Rank(Rank(2))));
        assert_eq!((loss.to.host.as_str(), loss.to.pid, loss.fault), ("w2", 1002, SILENT));
        assert!(loss.waited_ms >= 500, "{}", loss.waited_ms);
    }
    assert_eq!(bench.done, Some(Exit::Failed));
}

#[test]
fn a_death_behind_a_lost_lane_is_told_as_one() {
    let mut bench = Bench::formed(3, 1);
    bench.say(100, lost(End::Rank(Rank(2))));
    bench.pass(250, &ALL);
    bench.close(2);
    assert!(
        matches!(bench.over(0), OverReason::Died { who, .. } if who.party == Party::Rank(Rank(2)))
    );
    // A machine that is gone says nothing more on any path.
    let mut bench = Bench::formed(3, 1);
    bench.pass(500, &ALL);
    bench.say(100, lost(End::Rank(Rank(2))));
    bench.pass(5_000, &[0, 1, 100]);
    assert!(
        matches!(bench.over(0), OverReason::Died { who, .. } if who.party == Party::Rank(Rank(2)))
    );
    // Whoever has left needs no lane.
    let mut bench = Bench::formed(3, 1);
    bench.say(100, lost(End::Rank(Rank(2))));
    bench.say(2, NodeMessage::Leave { suspend: false });
    bench.pass(2_000, &[0, 1, 100]);
    assert_eq!(bench.done, None);
    // Nobody has a lane to a node that is not there.
    bench.say(1, lost(End::Server(7)));
    assert!(
        matches!(bench.over(0), OverReason::Died { who, .. } if who.party == Party::Rank(Rank(1)))
    );
}

/// A tensor of one part, and its key.
fn one_key(bench: &mut Bench) -> Key {
    bench.declare(0, 1, &[tensor("w", 8)]);
    let (request, keys) = bench.installs(100).remove(0);
    bench.say(100, NodeMessage::Installed { request });
    let _ = bench.heard(0);
    keys[0].key
}

fn awaits(key: Key, round: u64, waited_ms: u64) -> NodeMessage {
    NodeMessage::Awaiting { keys: vec![AwaitedKey { key, round, server: 0, waited_ms }] }
}

fn state(key: Key, published: u64, published_ms: u64, missing: &[u32]) -> NodeMessage {
    let missing = missing.iter().copied().map(Rank).collect();
    NodeMessage::KeyStates { keys: vec![KeyState { key, published, published_ms, missing }] }
}

fn path_stalls(messages: &[SchedulerMessage]) -> Vec<Vec<PathStall>> {
    let stalls = messages.iter().filter_map(|message| match message {
        SchedulerMessage::PathStall { stalls } => Some(stalls.clone()),
        _ => None,
    });
    stalls.collect()
}

#[test]
fn a_published_result_that_does_not_arrive_names_the_path_and_excuses_the_rank() {
    let mut bench = Bench::formed(3, 1);
    let key = one_key(&mut bench);
    bench.say(1, awaits(key, 2, 1_500));
    assert_eq!(bench.heard(100), [], "asked with the next tick, or the one after it");
    bench.pass(500, &ALL);
    assert_eq!(bench.heard(100), [SchedulerMessage::Inquire { keys: vec![key] }]);
    // It has round 2, so rank 1 can't push round 3, for which the server waits.
    bench.say(100, state(key, 2, 2_900, &[1]));
    let missing =
        StalledKey { key, round: 3, waited_ms: 3_000, missing: vec![Rank(1)], left: vec![] };
    bench.say(1, awaits(key, 2, 2_950));
    bench.say(100, state(key, 2, 3_000, &[1]));
    bench.pass(250, &ALL);
    assert_eq!(path_stalls(&bench.heard(0)), [] as [Vec<PathStall>; 0], "it may have come since");
    bench.say(1, awaits(key, 2, 3_200));
    bench.say(100, NodeMessage::Stalled { keys: vec![missing], late: vec![] });
    let told = bench.heard(0);
    let [stalls] = &path_stalls(&told)[..] else { panic!("{told:?}") };
    let expected = (Rank(1), 0, Leg::Result, "w", 2);
    let one = &stalls[0];
    assert_eq!((one.rank, one.server, one.leg, one.name.as_str(), one.round), expected);
    assert_eq!(told.len(), 1, "nobody is told that rank 1 is missing: {told:?}");
    let view = bench.scheduler.view(bench.now);
    assert_eq!((view.stalls.as_slice(), view.paths), (&[][..], stalls.clone()));
    assert!(bench.log.last().unwrap().contains("published 3."), "{:?}", bench.log);
    // It arrives after all.
    bench.say(1, NodeMessage::Awaiting { keys: vec![] });
    bench.say(100, NodeMessage::Stalled { keys: vec![], late: vec![] });
    assert_eq!(path_stalls(&bench.heard(0)), [vec![]]);
    assert_eq!(bench.done, None);
}

#[test]
fn no_path_is_blamed_by_news_from_before_its_bytes_were_sent() {
    let mut bench = Bench::formed(3, 1);
    let key = one_key(&mut bench);
    // Rank 1 waits for a rank that is late, and then does not speak: it is busy with what came.
    bench.say(1, awaits(key, 2, 12_000));
    for half_second in 1..=8 {
        bench.pass(500, &ALL);
        bench.say(100, state(key, 2, 500 * half_second, &[0, 1, 2]));
        assert_eq!(bench.scheduler.view(bench.now).paths, [], "after {half_second} half seconds");
    }
    assert_eq!(path_stalls(&bench.heard(2)), [] as [Vec<PathStall>; 0]);
    // By its next word it has waited since the publication.
    bench.say(1, awaits(key, 2, 16_000));
    let told = bench.heard(2);
    let [stalls] = &path_stalls(&told)[..] else { panic!("{told:?}") };
    assert_eq!((stalls[0].leg, stalls[0].waited_ms), (Leg::Result, 4_000));
    bench.say(1, NodeMessage::Awaiting { keys: vec![] });

    // One that says nothing for twice as long as a report takes is told of all the same.
    bench.say(1, awaits(key, 3, 1_500));
    for half_second in 1..=12 {
        bench.pass(500, &ALL);
        bench.say(100, state(key, 3, 500 * half_second, &[0, 1, 2]));
        let paths = bench.scheduler.view(bench.now).paths;
        assert_eq!(paths.is_empty(), half_second < 12, "after {half_second}: {paths:?}");
    }

    // A server that said that it waits, and then not whether what was sent since has arrived.
    let mut bench = Bench::formed(3, 1);
    let key = one_key(&mut bench);
    bench.say(1, awaits(key, 2, 1_500));
    bench.pass(500, &ALL);
    bench.say(100, state(key, 1, 60_000, &[1, 2]));
    bench.pass(1_000, &ALL);
    bench.say(1, awaits(key, 2, 3_000));
    assert_eq!(path_stalls(&bench.heard(2)), [] as [Vec<PathStall>; 0]);
    bench.say(100, state(key, 1, 61_000, &[1, 2]));
    let told = bench.heard(2);
    let [stalls] = &path_stalls(&told)[..] else { panic!("{told:?}") };
    assert_eq!((stalls[0].leg, stalls[0].waited_ms), (Leg::Contribution, 3_000));
}

#[test]
fn a_server_that_was_just_asked_about_a_key_is_not_said_to_be_silent() {
    let mut bench = Bench::formed(3, 1);
    bench.declare(0, 1, &[tensor("v", 8), tensor("w", 8)]);
    let (request, keys) = bench.installs(100).remove(0);
    bench.say(100, NodeMessage::Installed { request });
    let _ = bench.heard(0);
    // Of many that wait alike, it names others each time.
    for half_second in 0..20 {
        let key = keys[half_second / 4 % 2].key;
        bench.say(1, awaits(key, 2, 4_000 + 500 * half_second as u64));
        bench.pass(500, &ALL);
    }
    assert_eq!(path_stalls(&bench.heard(2)), [] as [Vec<PathStall>; 0]);
}

#[test]
fn what_a_rank_sent_and_its_server_misses_is_lost_on_the_way_there() {
    let mut bench = Bench::formed(3, 1);
    let key = one_key(&mut bench);
    bench.pass(500, &ALL);
    bench.say(1, awaits(key, 2, 4_000));
    bench.say(100, state(key, 1, 60_000, &[1, 2]));
    let told = bench.heard(2);
    let [stalls] = &path_stalls(&told)[..] else { panic!("{told:?}") };
    assert_eq!((stalls[0].rank, stalls[0].leg), (Rank(1), Leg::Contribution));
    // What its server has, waits for somebody else: no path is at fault.
    bench.say(100, state(key, 1, 60_000, &[2]));
    assert_eq!(path_stalls(&bench.heard(2)), [vec![]]);
    // A server that does not answer is named once it has had time to.
    bench.say(1, awaits(key, 2, 5_900));
    bench.pass(4_000, &ALL);
    let told = bench.heard(2);
    let [stalls] = &path_stalls(&told)[..] else { panic!("{told:?}") };
    assert_eq!(stalls[0].leg, Leg::Unknown);
    // For too long, that is an error on every node.
    bench.say(1, awaits(key, 2, 299_900));
    bench.pass(250, &ALL);
    let OverReason::PathStalled { stalls, members } = bench.over(2) else { panic!() };
    assert_eq!((stalls[0].rank, stalls[0].server), (Rank(1), 0));
    let ends: Vec<End> = members.iter().map(|member| member.end).collect();
    assert_eq!(ends, [End::Rank(Rank(1)), End::Server(0)]);
    assert_eq!(bench.done, Some(Exit::Failed));
}

#[test]
fn a_server_has_time_to_answer_before_it_is_named() {
    let mut bench = Bench::formed(3, 1);
    let key = one_key(&mut bench);
    // Of thousands of keys that wait for a late rank, this is the first time to hear of this one.
    bench.say(1, awaits(key, 2, 7_000));
    bench.pass(2_750, &ALL);
    assert_eq!(path_stalls(&bench.heard(2)), [] as [Vec<PathStall>; 0]);
    bench.pass(2_000, &ALL);
    let told = bench.heard(2);
    let [stalls] = &path_stalls(&told)[..] else { panic!("{told:?}") };
    assert_eq!(stalls[0].leg, Leg::Unknown);
}
