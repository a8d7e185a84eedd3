//! Running and ending: barriers, stalls, deaths, good-byes.

use super::*;

#[test]
fn barriers_match_by_order() {
    let mut bench = Bench::formed(3, 1);
    bench.say(0, NodeMessage::Barrier { request: 5 });
    bench.say(0, NodeMessage::Barrier { request: 6 });
    bench.say(1, NodeMessage::Barrier { request: 1 });
    assert!(bench.heard(0).is_empty());
    bench.say(2, NodeMessage::Barrier { request: 9 });
    for (node, request) in [(0, 5), (1, 1), (2, 9)] {
        assert_eq!(bench.heard(node), [SchedulerMessage::BarrierDone { request }]);
    }
    // The second barrier of rank 0 is still open, and says so.
    bench.say(1, NodeMessage::Barrier { request: 2 });
    bench.pass(3_750, &[0, 1, 2, 100]);
    let [SchedulerMessage::Stall { late, over: None }] = &bench.heard(2)[..] else { panic!() };
    let line = late[0].to_string();
    assert_eq!(line, "rank 2 is late by 3.8 s: a barrier waits for it");
    bench.say(2, NodeMessage::Barrier { request: 10 });
    bench.pass(250, &[0, 1, 2, 100]);
    let over = CaughtUp { ranks: vec![Rank(2)], lasted_ms: 4_000 };
    assert_eq!(
        bench.heard(2),
        [
            SchedulerMessage::BarrierDone { request: 10 },
            SchedulerMessage::Stall { late: vec![], over: Some(over) }
        ]
    );
}

#[test]
fn a_death_is_told_to_all_the_others_at_once() {
    let mut bench = Bench::formed(3, 1);
    bench.pass(1_000, &[0, 1, 2, 100]);
    bench.close(2);
    for node in [0, 1, 100] {
        let reason = bench.over(node);
        assert_eq!(
            reason.to_string(),
            "rank 2 (host w2, pid 1002) died after at least 7 rounds: connection closed: its own \
             log says why"
        );
    }
    assert!(bench.heard(2).is_empty());
    assert_eq!(bench.done, Some(Exit::Failed));
    // The end is the end.
    bench.close(1);
    bench.say(0, NodeMessage::Barrier { request: 1 });
    bench.pass(10_000, &[]);
    assert!(bench.heard(0).is_empty());

    let mut bench = Bench::formed(2, 2);
    bench.pass(4_000, &[0, 1, 100]);
    assert_eq!(bench.done, None);
    bench.pass(250, &[0, 1, 100]);
    let OverReason::Died { who, how, .. } = bench.over(0) else { panic!() };
    assert_eq!((who.party, &how), (Party::Server(1), &Sign::Silent { milliseconds: 4_250 }));
    assert_eq!(how.to_string(), "no heartbeat for 4.2 s");

    let mut bench = Bench::formed(2, 1);
    bench.say(1, NodeMessage::failed("out of memory"));
    let reason = bench.over(0).to_string();
    assert_eq!(reason, "rank 1 (host w1, pid 1001) failed: out of memory");
    let mut bench = Bench::formed(2, 1);
    bench.say(100, NodeMessage::Leave { suspend: false });
    assert!(bench.over(0).to_string().contains(") failed: it left while the job went on"));
}

#[test]
fn whoever_counts_as_dead_is_told_so() {
    let mut bench = Bench::formed(3, 1);
    bench.pass(4_250, &[0, 1, 100]);
    assert!(
        matches!(bench.over(0), OverReason::Died { who, .. } if who.party == Party::Rank(Rank(2)))
    );
    let reason = bench.over(2);
    assert_eq!(reason, OverReason::Removed { how: Sign::Silent { milliseconds: 4_250 } });
    let line = reason.to_string();
    assert!(
        line.starts_with("the scheduler declared this process dead: no heartbeat for"),
        "{line}"
    );
    // Whoever says itself that it fails knows.
    let mut bench = Bench::formed(2, 1);
    bench.say(1, NodeMessage::failed("out of memory"));
    assert!(bench.heard(1).is_empty());
}

#[test]
fn every_heartbeat_is_answered_and_another_connection_says_as_well_who_lives() {
    let mut bench = Bench::new(2, 1);
    for worker in 0..2 {
        let session = 70 + u64::from(worker);
        bench.join(worker.into(), Register { session, ..worker_register(worker, 2, 1) });
    }
    bench.join(100, server_register(0, 2, 1));
    bench.say(0, NodeMessage::Heartbeat { rounds: 1 });
    assert_eq!(bench.answered, [NodeId(0)]);
    // Rank 1 is only heard on fresh connections, one after the other.
    for knock in 0..10 {
        bench.connect(50 + knock);
        bench.say(50 + knock, NodeMessage::Alive { session: 71 });
        assert_eq!(bench.answered.last(), Some(&NodeId(50 + knock)));
        bench.pass(1_000, &[0, 100]);
        bench.close(50 + knock);
    }
    assert_eq!(bench.done, None);
    // Nobody's session says nothing of anybody, and whoever knocks is no member.
    bench.connect(80);
    bench.say(80, NodeMessage::Alive { session: 7 });
    bench.connect(81);
    bench.say(81, NodeMessage::Alive { session: 71 });
    bench.say(81, NodeMessage::Barrier { request: 1 });
    assert_eq!(bench.closed, [NodeId(80), NodeId(81)]);
    // What becomes of the member is told on all of its connections.
    bench.connect(82);
    bench.say(82, NodeMessage::Alive { session: 71 });
    bench.pass(4_250, &[0, 100]);
    for node in [1, 82] {
        assert!(matches!(bench.over(node), OverReason::Removed { .. }));
    }
    assert!(
        matches!(bench.over(0), OverReason::Died { who, .. } if who.party == Party::Rank(Rank(1)))
    );
}

#[test]
fn the_schedulers_own_sleep_kills_nobody() {
    let mut bench = Bench::formed(2, 1);
    bench.pass(1_000, &[0, 1, 100]);
    // Stopped for a minute; the others' heartbeats are handled after the tick, at the worst.
    bench.now += ms(60_000);
    bench.scheduler.handle_tick(bench.now);
    bench.drain();
    bench.pass(3_000, &[0, 1, 100]);
    assert_eq!(bench.done, None);
    bench.pass(5_000, &[0, 1]);
    assert_eq!(bench.done, Some(Exit::Failed));
}

#[test]
fn members_that_break_the_protocol_and_strangers_are_told_apart() {
    let mut bench = Bench::formed(2, 1);
    // A stranger costs itself.
    bench.connect(50);
    bench.say(50, NodeMessage::Barrier { request: 1 });
    bench.join(51, worker_register(0, 2, 1));
    let reason = bench.over(51).to_string();
    assert!(reason.contains("runs already") && reason.contains("DMLC_PS_ROOT_PORT"), "{reason}");
    bench.connect(52);
    bench.pass(5_000, &[0, 1, 100]);
    assert_eq!(bench.closed, [NodeId(50), NodeId(51), NodeId(52)]);
    assert_eq!(bench.done, None);
    // A member ends the job.
    bench.say(1, NodeMessage::Installed { request: 1 });
    let OverReason::Died { who, how, .. } = bench.over(0) else { panic!() };
    let how = how.to_string();
    assert!(who.party == Party::Rank(Rank(1)) && how.contains("broke the protocol"), "{how}");
}

#[test]
fn leaving_ends_the_job_when_all_have_left() {
    let mut bench = Bench::formed(3, 1);
    bench.say(0, NodeMessage::Leave { suspend: false });
    bench.close(0);
    bench.say(1, NodeMessage::Leave { suspend: false });
    bench.pass(5_000, &[2, 100]);
    assert_eq!(bench.done, None);
    bench.say(2, NodeMessage::Leave { suspend: false });
    assert_eq!(bench.over(100), OverReason::Finished);
    assert_eq!(bench.done, Some(Exit::Finished));
    assert!(bench.heard(2).is_empty());
}

#[test]
fn whoever_waits_for_a_rank_that_left_is_told_at_once() {
    // A barrier before and after the rank that will not come.
    for first in [0, 1] {
        let mut bench = Bench::formed(2, 1);
        let say = |bench: &mut Bench, node| match node {
            0 => bench.say(0, NodeMessage::Leave { suspend: false }),
            _ => bench.say(1, NodeMessage::Barrier { request: 1 }),
        };
        say(&mut bench, first);
        assert_eq!(bench.done, None);
        say(&mut bench, 1 - first);
        bench.pass(250, &[1, 100]);
        let reason = bench.over(1).to_string();
        assert!(
            reason.starts_with(
                "rank 0 (host w0, pid 1000) left the job while others wait: round 1 of `barrier` \
                 waits for rank 0 (left); rank 1 arrived 0."
            ),
            "{reason}"
        );
        assert_eq!(bench.done, Some(Exit::Failed));
    }
    // A round: the server must have seen the rank's goodbye, and the scheduler as well.
    for order in [["missing", "leave", "left"], ["missing", "left", "leave"]] {
        let mut bench = Bench::formed(2, 1);
        bench.declare(0, 1, &[tensor("w", 8)]);
        let (request, keys) = bench.installs(100).remove(0);
        bench.say(100, NodeMessage::Installed { request });
        for what in order {
            bench.pass(1_000, &[1, 100]);
            assert_eq!(bench.done, None, "before {what}: a report may be older than what it lacks");
            let left = if what == "left" { vec![Rank(0)] } else { vec![] };
            let key = StalledKey {
                key: keys[0].key,
                round: 3,
                waited_ms: 400,
                missing: vec![Rank(0)],
                left,
            };
            match what {
                "leave" => bench.say(0, NodeMessage::Leave { suspend: true }),
                _ => bench.say(100, stalled(vec![key])),
            }
        }
        let OverReason::Abandoned { stalls, .. } = bench.over(1) else { panic!() };
        assert_eq!((stalls[0].name.as_str(), stalls[0].left.as_slice()), ("w", &[Rank(0)][..]));
        assert_eq!(bench.done, Some(Exit::Failed));
    }
}

/// A report of a node that has nothing more to say than these keys.
fn stalled(keys: Vec<StalledKey>) -> NodeMessage {
    let mut late = LateCollector::default();
    for key in &keys {
        key.missing.iter().for_each(|rank| late.add(*rank, key.key));
    }
    NodeMessage::Stalled { keys, late: late.finish(false) }
}

fn waiting(key: Key, round: u64, waited_ms: u64, missing: &[u32]) -> StalledKey {
    let missing = missing.iter().copied().map(Rank).collect();
    StalledKey { key, round, waited_ms, missing, left: vec![] }
}

/// The lines that a node was told since it was last asked.
fn lines(bench: &mut Bench, node: u64) -> Vec<String> {
    let heard = bench.heard(node);
    let of_message = |message: &SchedulerMessage| match message {
        SchedulerMessage::Stall { late, over } => {
            let lines = late.iter().map(ToString::to_string);
            lines.chain(over.iter().map(ToString::to_string)).collect()
        }
        _ => Vec::new(),
    };
    heard.iter().flat_map(of_message).collect()
}

#[test]
fn stalls_are_merged_named_repeated_and_end_the_job() {
    let mut bench = Bench::formed(3, 2);
    bench.declare(0, 1, &[tensor("w", 2048)]);
    for server in [100, 101] {
        let (request, _) = bench.installs(server).remove(0);
        bench.say(server, NodeMessage::Installed { request });
    }
    let keys: Vec<Key> = declared(&bench.heard(0)).1[0].parts.iter().map(|p| p.key).collect();
    assert_eq!(keys.len(), 2);
    let everybody = [0, 1, 2, 100, 101];
    bench.say(100, stalled(vec![waiting(keys[0], 812, 3_000, &[2])]));
    bench.say(101, stalled(vec![waiting(keys[1], 812, 3_500, &[2])]));
    assert_eq!(lines(&mut bench, 0), [""; 0], "others may have more to say");
    bench.pass(750, &everybody);
    let expected = Late {
        ranks: vec![Rank(2)],
        waited_ms: 4_250,
        tensors: 1,
        or_more: false,
        barrier: false,
        first: vec![("w".into(), 812)],
    };
    for node in everybody {
        let told = SchedulerMessage::Stall { late: vec![expected.clone()], over: None };
        assert_eq!(bench.heard(node), [told]);
    }
    // Another rank is late too. The first is told of again after 4, 4 and 8 s more.
    bench.say(100, stalled(vec![waiting(keys[0], 812, 4_000, &[1, 2, 9])]));
    bench.pass(3_000, &everybody);
    let one = lines(&mut bench, 1);
    assert!(one.len() == 1 && one[0].starts_with("rank 1 is late by 5.0 s: "), "{one:?}");
    for pause in [4_000, 4_000, 8_000] {
        bench.pass(pause, &everybody);
        let again = lines(&mut bench, 1);
        assert_eq!(again.len(), 2, "{again:?}");
    }
    bench.say(101, stalled(vec![]));
    bench.say(100, stalled(vec![]));
    let over = lines(&mut bench, 0);
    assert!(over.last().unwrap().starts_with("ranks 1, 2 are no longer late"), "{over:?}");
    // An unknown key is nobody's business.
    bench.say(100, stalled(vec![waiting(Key(77), 812, 4_000, &[2])]));
    bench.pass(60_000, &everybody);
    let told = lines(&mut bench, 1);
    assert!(told.iter().all(|line| line.contains("no longer")), "{told:?}");
    bench.say(100, stalled(vec![waiting(keys[0], 812, 299_000, &[2])]));
    bench.pass(1_000, &everybody);
    let OverReason::Stalled { stalls, members } = bench.over(2) else { panic!() };
    assert_eq!((stalls[0].name.as_str(), stalls[0].waited_ms), ("w", 300_000));
    assert_eq!((members[0].host.as_str(), members[0].pid), ("w2", 1002));
    assert_eq!(bench.done, Some(Exit::Failed));
}

/// A job of three ranks and two servers with so many tensors of one part. Returns each server's
/// keys.
fn with_small_tensors(count: usize) -> (Bench, [Vec<Key>; 2]) {
    let mut bench = Bench::formed(3, 2);
    let tensors: Vec<Declaration> =
        (0..count).map(|index| tensor(&format!("small.{index}"), 4)).collect();
    bench.declare(0, 1, &tensors);
    let keys = [100, 101].map(|server| {
        let installs = bench.installs(server);
        for (request, _) in &installs {
            bench.say(server, NodeMessage::Installed { request: *request });
        }
        installs.iter().flat_map(|(_, keys)| keys).map(|spec| spec.key).collect::<Vec<Key>>()
    });
    assert_eq!(keys.iter().map(Vec::len).sum::<usize>(), count);
    for node in [0, 1, 2, 100, 101] {
        let _ = bench.heard(node);
    }
    (bench, keys)
}

/// What a server reports that has these keys open: the oldest in full, all in short.
fn full_report(keys: &[Key], round: u64, waited_ms: u64, missing: &[u32]) -> NodeMessage {
    let one = |key: &Key| waiting(*key, round, waited_ms, missing);
    let NodeMessage::Stalled { late, .. } = stalled(keys.iter().map(one).collect()) else {
        unreachable!("it is one")
    };
    NodeMessage::Stalled { keys: keys.iter().take(STALLS_SHOWN_MAX).map(one).collect(), late }
}

#[test]
fn a_late_rank_with_thousands_of_tensors_costs_one_line_and_then_few() {
    let (mut bench, keys) = with_small_tensors(1920);
    let everybody = [0, 1, 2, 100, 101];
    // It is late by five seconds at first, and then pushes ten tensors a second: each report names
    // others.
    for second in 0..40 {
        for (server, keys) in [100, 101].into_iter().zip(&keys) {
            let waited_ms = 3_000 + 100 * second as u64;
            bench.say(server, full_report(&keys[5 * second..], 7, waited_ms, &[1]));
        }
        bench.pass(1_000, &everybody);
    }
    let told = lines(&mut bench, 0);
    assert_eq!(told.len(), 5, "at once, after 4, 4, 8 and 16 s more: {told:?}");
    assert!(told[0].starts_with("rank 1 is late by 3.8 s: 1920 tensors wait for it ("), "{told:?}");
    assert_eq!(told[0].matches("round 7 of `small.").count(), 3, "{told:?}");
    assert!(told[1].contains(": 1880 tensors wait"), "{told:?}");
    assert_eq!(bench.log.iter().filter(|line| line.contains(" late")).count(), 5);
    for server in [100, 101] {
        bench.say(server, stalled(vec![]));
    }
    let over = lines(&mut bench, 2);
    assert!(over.last().unwrap().starts_with("rank 1 is no longer late: others waited 4"));
    let _ = bench.heard(0);

    // Two ranks that miss the same share a line; a count that was cut off says so.
    let (mut bench, keys) = with_small_tensors(6000);
    for (server, keys) in [100, 101].into_iter().zip(&keys) {
        bench.say(server, full_report(keys, 7, 3_000, &[0, 2]));
    }
    bench.pass(2_000, &everybody);
    let told = lines(&mut bench, 1);
    assert_eq!(told.len(), 1, "{told:?}");
    let cut = "ranks 0, 2 are late by 3.8 s: at least 4096 tensors wait for them (";
    assert!(told[0].starts_with(cut), "{told:?}");
}

#[test]
fn many_late_ranks_cost_few_lines() {
    let mut bench = Bench::formed(40, 1);
    bench.declare(0, 1, &(0..40).map(|at| tensor(&format!("w{at}"), 4)).collect::<Vec<_>>());
    let (request, specs) = bench.installs(100).remove(0);
    bench.say(100, NodeMessage::Installed { request });
    let everybody: Vec<u64> = (0..40).chain([100]).collect();
    let _ = bench.heard(0);
    // One rank came first, with a tensor that all others lack.
    let missing: Vec<u32> = (1..40).collect();
    bench.say(100, stalled(vec![waiting(specs[0].key, 1, 3_000, &missing)]));
    bench.pass(1_000, &everybody);
    let told = lines(&mut bench, 0);
    assert_eq!(told, ["ranks 1-39 are late by 3.8 s: round 1 of `w0` waits for them"]);
    // Each lacks another one.
    let mut bench_keys: Vec<StalledKey> =
        (0..16).map(|at| waiting(specs[at as usize].key, 1, 4_000, &[at + 1, at + 20])).collect();
    bench_keys[0].missing = vec![Rank(1)];
    bench.say(100, stalled(bench_keys));
    bench.pass(20_000, &everybody);
    let told = lines(&mut bench, 0);
    let is_over = |line: &&String| line.contains("no longer late");
    assert_eq!(told.iter().filter(is_over).count(), 1, "{told:?}");
    assert_eq!(told.len(), 1 + 3 * LATE_LINES_MAX, "after 4, 4 and 8 s more: {told:?}");
}

#[test]
fn a_stop_is_told_to_all() {
    let mut bench = Bench::formed(1, 1);
    bench.connect(7);
    bench.scheduler.handle_stop("it was stopped by SIGTERM");
    bench.drain();
    for node in [0, 7, 100] {
        assert_eq!(bench.over(node).to_string(), "the scheduler failed: it was stopped by SIGTERM");
    }
    assert_eq!(bench.done, Some(Exit::Failed));
}
