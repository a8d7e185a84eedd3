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
    bench.pass(3_250, &[0, 1, 2, 100]);
    let [SchedulerMessage::Stall { stalls }] = &bench.heard(2)[..] else { panic!() };
    let line = stalls[0].to_string();
    assert!(
        line.starts_with("round 2 of `barrier` waits for rank 2; ranks 0, 1 arrived 3."),
        "{line}"
    );
    bench.say(2, NodeMessage::Barrier { request: 10 });
    bench.pass(250, &[0, 1, 2, 100]);
    assert_eq!(
        bench.heard(2),
        [SchedulerMessage::BarrierDone { request: 10 }, SchedulerMessage::Stall { stalls: vec![] }]
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
            "rank 2 (host w2, pid 1002) died after 7 rounds: connection closed: its own log says \
             why"
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
    assert_eq!((who.as_str(), how.as_str()), ("server 1", "no heartbeat for 4.2 s"));

    let mut bench = Bench::formed(2, 1);
    bench.say(1, NodeMessage::Failed { message: "out of memory".into() });
    let reason = bench.over(0).to_string();
    assert_eq!(reason, "rank 1 (host w1, pid 1001) failed: out of memory");
    let mut bench = Bench::formed(2, 1);
    bench.say(100, NodeMessage::Leave { suspend: false });
    assert!(bench.over(0).to_string().contains("server 0 failed: it left"));
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
    assert!(who == "rank 1" && how.contains("broke the protocol"), "{how}");
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
                "rank 0 left the job while others wait: round 1 of `barrier` waits for rank 0 \
                 (left); rank 1 arrived 0."
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
                _ => bench.say(100, NodeMessage::Stalled { keys: vec![key] }),
            }
        }
        let OverReason::Abandoned { stalls } = bench.over(1) else { panic!() };
        assert_eq!((stalls[0].name.as_str(), stalls[0].left.as_slice()), ("w", &[Rank(0)][..]));
        assert_eq!(bench.done, Some(Exit::Failed));
    }
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
    let stalled = |key, waited_ms, missing: &[u32]| NodeMessage::Stalled {
        keys: vec![StalledKey {
            key,
            round: 812,
            waited_ms,
            missing: missing.iter().copied().map(Rank).collect(),
            left: vec![],
        }],
    };
    let everybody = [0, 1, 2, 100, 101];
    bench.say(100, stalled(keys[0], 3_000, &[2]));
    bench.say(101, stalled(keys[1], 3_500, &[2]));
    let expected = Stall {
        name: "w".into(),
        round: 812,
        waited_ms: 3_000,
        arrived: vec![Rank(0), Rank(1)],
        missing: vec![Rank(2)],
        left: vec![],
    };
    for node in everybody {
        let told = SchedulerMessage::Stall { stalls: vec![expected.clone()] };
        assert_eq!(bench.heard(node), [told], "the second report brought no news");
    }
    // It changes, it is said again every 10 s, and then it is over.
    bench.say(100, stalled(keys[0], 4_000, &[1, 2, 9]));
    let [SchedulerMessage::Stall { stalls }] = &bench.heard(1)[..] else { panic!() };
    assert_eq!(stalls[0].missing, [Rank(1), Rank(2)]);
    bench.pass(20_250, &everybody);
    assert_eq!(bench.heard(1).len(), 2);
    bench.say(100, NodeMessage::Stalled { keys: vec![] });
    bench.say(101, NodeMessage::Stalled { keys: vec![] });
    assert_eq!(bench.heard(0).last(), Some(&SchedulerMessage::Stall { stalls: vec![] }));
    // An unknown key is nobody's business.
    bench.say(100, stalled(Key(77), 4_000, &[2]));
    assert!(bench.heard(1).iter().all(|message| matches!(
        message, SchedulerMessage::Stall { stalls } if stalls.len() <= 1
    )));
    bench.say(100, stalled(keys[0], 299_000, &[2]));
    bench.pass(1_000, &everybody);
    let OverReason::Stalled { stalls } = bench.over(2) else { panic!() };
    assert_eq!((stalls[0].name.as_str(), stalls[0].waited_ms), ("w", 300_000));
    assert_eq!(bench.done, Some(Exit::Failed));
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
