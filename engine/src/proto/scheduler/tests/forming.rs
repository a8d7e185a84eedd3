//! Coming together: order, disagreement, waiting, suspending and coming back.

use super::*;

#[test]
fn ranks_and_servers_are_ordered_whoever_comes_first() {
    let mut bench = Bench::new(2, 4);
    let worker = |worker_id, local_rank, global_rank| Register {
        node: Node::Worker {
            worker_id,
            local_rank,
            local_size: 2,
            global_rank,
            local: None,
            planning: PLANNING,
            speaks: None,
        },
        ..worker_register(worker_id, 2, 4)
    };
    let server = |at: u32, host: &str, told: Option<u32>| {
        let mut register = server_register(at, 2, 4);
        register.host = host.to_owned();
        if let Node::Server { preferred, .. } = &mut register.node {
            *preferred = told;
        }
        register
    };
    bench.join(10, server(0, "b", None));
    bench.join(1, worker(1, 1, None));
    // On a worker's host, so it comes behind the others.
    bench.join(11, Register { host_id: "worker-host-0".into(), ..server(1, "a", None) });
    bench.join(2, worker(0, 1, None));
    bench.join(12, server(2, "z", Some(0)));
    bench.join(3, worker(1, 0, None));
    bench.join(13, server(3, "a", None));
    assert!(bench.inboxes.is_empty());
    bench.join(4, worker(0, 0, Some(0)));
    let ranks = [4, 2, 3, 1];
    for (index, node) in (0..).zip(ranks) {
        let roster = bench.roster(node);
        assert_eq!((roster.index, roster.size, roster.epoch), (index, 4, Epoch(1)));
        let hosts: Vec<&str> = roster.servers.iter().map(|peer| peer.host.as_str()).collect();
        assert_eq!(hosts, ["z", "a", "b", "a"]);
        assert!(roster.workers.is_empty(), "the list of ranks would go to each of them");
    }
    for (index, node) in (0..).zip([12, 13, 10, 11]) {
        let roster = bench.roster(node);
        assert_eq!((roster.index, roster.workers.len()), (index, 4));
    }
}

#[test]
fn who_comes_by_another_connection_keeps_its_place() {
    let mut bench = Bench::new(2, 1);
    let by = |instance, register: Register| Register { instance, ..register };
    bench.join(10, by(5, server_register(0, 2, 1)));
    bench.join(0, by(7, worker_register(0, 2, 1)));
    // It has given up the first connection, and its server has as well.
    bench.join(1, by(7, worker_register(0, 2, 1)));
    bench.join(11, by(5, server_register(0, 2, 1)));
    assert_eq!(bench.closed, [NodeId(0), NodeId(10)]);
    bench.join(2, by(8, worker_register(1, 2, 1)));
    for (index, node) in [(0, 1), (1, 2), (0, 11)] {
        let roster = bench.roster(node);
        assert_eq!((roster.index, roster.size), (index, 2));
    }
}

#[test]
fn two_nodes_of_one_process_are_two_nodes() {
    let mut bench = Bench::new(2, 1);
    let of_process = |instance| Register { instance, pid: 70, ..worker_register(0, 2, 1) };
    bench.join(0, of_process(7));
    bench.join(1, of_process(8));
    let message = bench.unformed(0).to_string();
    assert!(message.contains("both are rank 0"), "{message}");
}

#[test]
fn what_nodes_were_told_differently_is_named() {
    type Change = fn(&mut Register);
    fn worker(register: &mut Register, change: fn(&mut u32, &mut u32, &mut u32, &mut Planning)) {
        if let Node::Worker { worker_id, local_rank, local_size, planning, .. } = &mut register.node
        {
            change(worker_id, local_rank, local_size, planning);
        }
    }
    let cases: [(Change, &[&str]); 9] = [
        (|r| r.num_workers = 3, &["DMLC_NUM_WORKER=3", "the scheduler has 2", "w1", "1001"]),
        (|r| r.num_servers = 5, &["DMLC_NUM_SERVER=5", "the scheduler has 1"]),
        (|r| r.release = "2.0".into(), &["release 2.0", "1.0", "same release"]),
        (|r| worker(r, |_, _, size, _| *size = 2), &["BYTEPS_LOCAL_SIZE=2", "w0", "has 1"]),
        (|r| worker(r, |id, _, _, _| *id = 0), &["w0", "w1", "both are rank 0"]),
        (|r| worker(r, |id, _, _, _| *id = 2), &["DMLC_WORKER_ID=2", "0 to 1"]),
        (|r| worker(r, |_, local, _, _| *local = 1), &["BYTEPS_LOCAL_RANK=1", "0 to 0"]),
        (
            |r| worker(r, |_, _, _, planning| planning.partition_bytes = 8192),
            &["BYTEPS_PARTITION_BYTES=8192", "BYTEPS_PARTITION_BYTES=4096", "w0", "w1"],
        ),
        (
            |r| {
                if let Node::Worker { global_rank, .. } = &mut r.node {
                    *global_rank = Some(2);
                }
            },
            &["BYTEPS_GLOBAL_RANK=2", "2 ranks"],
        ),
    ];
    for (change, parts) in cases {
        let mut bench = Bench::new(2, 1);
        bench.join(0, worker_register(0, 2, 1));
        let mut register = worker_register(1, 2, 1);
        change(&mut register);
        bench.join(1, register);
        for node in [0, 1] {
            let message = bench.unformed(node).to_string();
            for part in parts {
                assert!(message.contains(part), "{part} is not in: {message}");
            }
        }
        assert_eq!(bench.done, Some(Exit::NotFormed));
        // Who comes later hears it, too.
        assert!(!bench.scheduler.has_told_everybody());
        bench.join(100, server_register(0, 2, 1));
        assert!(bench.scheduler.has_told_everybody());
        let message = bench.unformed(100).to_string();
        assert!(message.contains(parts[0]), "{message}");
    }
}

#[test]
fn servers_must_be_reachable_and_no_more_than_asked_for() {
    let unreachable = |address: &str| {
        let mut register = server_register(1, 1, 2);
        if let Node::Server { cores, .. } = &mut register.node {
            *cores = vec![address.parse().unwrap()];
        }
        register
    };
    let cases = [
        (unreachable("0.0.0.0:5"), "nobody can reach"),
        (unreachable("10.0.0.1:5000"), "both announce 10.0.0.1:5000"),
        (server_register(1, 1, 1), "DMLC_NUM_SERVER=1"),
    ];
    for (register, part) in cases {
        let mut bench = Bench::new(1, 2);
        bench.join(100, server_register(0, 1, 2));
        bench.join(101, register);
        let reason = bench.over(100).to_string();
        assert!(reason.contains(part), "{reason}");
    }
    let mut bench = Bench::new(1, 1);
    bench.join(100, server_register(0, 1, 1));
    bench.join(101, server_register(1, 1, 1));
    let reason = bench.over(101).to_string();
    assert!(reason.contains("one too many") && reason.contains("10.0.0.1:5000"), "{reason}");
}

#[test]
fn waiting_is_said_and_has_an_end() {
    let mut bench = Bench::new(4, 2);
    bench.join(100, server_register(0, 4, 2));
    bench.pass(12_000, &[100]);
    let texts = |bench: &mut Bench, node| -> Vec<String> {
        let text = |message| match message {
            SchedulerMessage::Waiting { text } => text,
            other => panic!("{other:?}"),
        };
        bench.heard(node).into_iter().map(text).collect()
    };
    let said =
        |seconds: u64| format!("waiting for server 1 of 2, all workers of 4 hosts ({seconds} s)");
    assert_eq!(texts(&mut bench, 100), [2, 5, 10].map(said), "more and more rarely");
    for worker in [0, 2] {
        bench.join(worker.into(), worker_register(worker, 4, 2));
    }
    bench.pass(100_000, &[0, 2, 100]);
    let said =
        |seconds: u64| format!("waiting for server 1 of 2, worker ranks 1, 3 of 4 ({seconds} s)");
    assert_eq!(texts(&mut bench, 2), [20, 50, 80, 110].map(said));
    assert!(bench.log.contains(&said(20)));
    assert_eq!(bench.log.len(), 7, "{:?}", bench.log);
    bench.pass(8_000, &[0, 2, 100]);
    let message = bench.unformed(0).to_string();
    assert!(message.contains("server 1 of 2, worker ranks 1, 3 of 4"), "{message}");
    assert!(message.contains("BPS_START_TIMEOUT"), "{message}");
    assert_eq!(bench.done, Some(Exit::NotFormed));
    assert_eq!(Exit::NotFormed.code(), 3);
}

#[test]
fn a_node_that_is_gone_before_the_job_has_formed_frees_its_place() {
    type Gone = fn(&mut Bench);
    let ways: [(Gone, &str); 4] = [
        (|bench| bench.close(0), "connection closed"),
        (|bench| bench.say(0, NodeMessage::Leave { suspend: false }), "it left"),
        (|bench| bench.say(0, NodeMessage::failed("no memory")), "no memory"),
        (|bench| bench.pass(5_000, &[100]), "no heartbeat for 4."),
    ];
    for (gone, how) in ways {
        let mut bench = Bench::new(2, 1);
        bench.join(0, worker_register(0, 2, 1));
        bench.join(100, server_register(0, 2, 1));
        bench.heard(100);
        gone(&mut bench);
        let line = bench.log.iter().find(|line| line.contains("is gone")).cloned().unwrap();
        assert!(line.starts_with("rank 0 (host w0, pid 1000) is gone before the job"), "{line}");
        assert!(
            line.contains(how) && line.ends_with("waiting for all workers of 2 hosts"),
            "{line}"
        );
        let told = bench.heard(100).into_iter();
        let told = told.filter(|one| *one == SchedulerMessage::Waiting { text: line.clone() });
        assert_eq!(told.count(), 1, "those that wait are told");
        let told = bench.heard(0).iter().any(|one| matches!(one, SchedulerMessage::Over { .. }));
        assert_eq!(told, how != "connection closed", "whoever still listens hears why");
        assert_eq!(bench.done, None);
        // Another takes its place: even the settings of the first worker are open again.
        let size_two = |worker: u32, local_rank: u32| {
            let mut register = worker_register(worker, 2, 1);
            let Node::Worker { local_size, local_rank: place, .. } = &mut register.node else {
                unreachable!("a worker")
            };
            (*local_size, *place) = (2, local_rank);
            register
        };
        for (node, worker, local) in [(10, 0, 0), (11, 0, 1), (12, 1, 0), (13, 1, 1)] {
            bench.join(node, size_two(worker, local));
        }
        for (index, node) in (0..).zip([10, 11, 12, 13]) {
            let roster = bench.roster(node);
            assert_eq!((roster.index, roster.size), (index, 4));
        }
    }
}

#[test]
fn a_server_that_is_gone_early_is_named_once_and_replaced() {
    let mut bench = Bench::new(1, 2);
    bench.join(100, server_register(0, 1, 2));
    bench.join(101, server_register(1, 1, 2));
    bench.close(100);
    let said = "the server at 10.0.0.1:5000 (host s0, pid 2000) is gone before the job has formed: \
                connection closed; waiting for server 1 of 2, all workers of 1 host";
    assert_eq!(bench.log, [said]);
    bench.join(102, server_register(0, 1, 2));
    bench.join(0, worker_register(0, 1, 2));
    assert_eq!(bench.roster(0).servers.len(), 2);
    // The wait has its end all the same.
    let mut bench = Bench::new(1, 1);
    for node in 0..130 {
        bench.join(node, worker_register(0, 1, 1));
        bench.pass(1_000, &[node]);
        bench.close(node);
    }
    assert_eq!(bench.done, Some(Exit::NotFormed));
}

#[test]
fn after_a_suspend_whoever_resumes_first_and_stays_gives_the_numbers() {
    let mut bench = Bench::formed(2, 1);
    for node in [0, 1] {
        bench.say(node, NodeMessage::Leave { suspend: true });
    }
    bench.join(10, worker_register(0, 3, 1));
    bench.close(10);
    bench.join(11, worker_register(0, 1, 1));
    let roster = bench.roster(11);
    assert_eq!((roster.size, roster.servers.len()), (1, 1));
}

#[test]
fn suspended_workers_come_back_as_others_and_servers_stay() {
    let mut bench = Bench::formed(2, 2);
    bench.declare(0, 1, &[tensor("w", 10)]);
    let (old, _) = bench.installs(100).remove(0);
    bench.say(0, NodeMessage::Leave { suspend: true });
    // Rank 0 is back before rank 1 has gone: it waits, and is told for whom.
    bench.join(10, worker_register(0, 3, 1));
    bench.pass(2_000, &[1, 10, 100, 101]);
    let [SchedulerMessage::Waiting { text }] = &bench.heard(10)[..] else { panic!() };
    assert!(text.contains("waiting for these ranks to suspend: 1"), "{text}");
    bench.say(1, NodeMessage::Leave { suspend: true });
    // The first of the new set says one server instead of two: the other may go.
    assert_eq!(bench.heard(100), [SchedulerMessage::Reset { epoch: Epoch(2) }]);
    assert_eq!(bench.over(101), OverReason::Finished);
    bench.say(100, NodeMessage::Installed { request: old });
    bench.join(11, worker_register(2, 3, 1));
    bench.join(12, worker_register(1, 3, 1));
    for (node, index) in [(10, 0), (12, 1), (11, 2), (100, 0)] {
        let roster = bench.roster(node);
        assert_eq!((roster.index, roster.size, roster.epoch), (index, 3, Epoch(2)));
        assert_eq!(roster.servers.len(), 1);
    }
    // The registry is new: the same name may mean something else, and late answers mean nothing.
    bench.declare(10, 1, &[tensor("w", 11)]);
    let (new, _) = bench.installs(100).remove(0);
    assert_ne!(new, old);
    bench.say(100, NodeMessage::Installed { request: old });
    assert!(bench.heard(10).is_empty());
    bench.say(100, NodeMessage::Installed { request: new });
    declared(&bench.heard(10));
    // And now more servers than before.
    for node in [10, 11, 12] {
        bench.say(node, NodeMessage::Leave { suspend: true });
    }
    bench.heard(100);
    bench.join(20, worker_register(0, 1, 2));
    bench.join(102, server_register(5, 1, 2));
    assert_eq!(bench.roster(20).servers.len(), 2);
    assert_eq!(bench.roster(100).epoch, Epoch(3));
    assert_eq!(bench.roster(102).index, 1);
    bench.say(20, NodeMessage::Leave { suspend: false });
    assert_eq!(bench.over(102), OverReason::Finished);
    assert_eq!(bench.done, Some(Exit::Finished));
}

#[test]
fn a_resume_that_never_comes_has_an_end() {
    let mut bench = Bench::formed(1, 1);
    bench.say(0, NodeMessage::Leave { suspend: true });
    bench.pass(120_250, &[100]);
    assert!(matches!(bench.over(100), OverReason::NotFormed { .. }));
    // One rank resumes, the other never suspends: only the first is told.
    let mut bench = Bench::formed(2, 1);
    bench.say(0, NodeMessage::Leave { suspend: true });
    bench.join(10, worker_register(0, 2, 1));
    bench.pass(121_000, &[1, 10, 100]);
    assert!(bench.over(10).to_string().contains("these ranks have not suspended: 1;"));
    assert_eq!(bench.done, None);
}

/// A worker of a job of so many hosts with so many ranks each.
fn of_many(rank: u32, hosts: u32, local_size: u32) -> Register {
    let (worker_id, local_rank) = (rank / local_size, rank % local_size);
    let node = Node::Worker {
        worker_id,
        local_rank,
        local_size,
        global_rank: None,
        local: None,
        planning: PLANNING,
        speaks: None,
    };
    Register { node, ..worker_register(worker_id, hosts, 1) }
}

#[test]
fn a_job_of_more_ranks_than_are_possible_is_refused_and_one_of_as_many_is_formed() {
    let most = word(RANKS_MAX);
    let mut bench = Bench::new(most + 1, 1);
    bench.join(0, of_many(0, most + 1, 1));
    let expected = Unformed::Ranks {
        who: origin(&of_many(0, most + 1, 1)),
        num_workers: most + 1,
        local_size: 1,
        ranks_max: most,
    };
    assert_eq!(bench.unformed(0), expected);
    assert!(expected.to_string().contains("that makes 4097 ranks, 1 to 4096 are possible"));
    // However large the two numbers are.
    let mut bench = Bench::new(u32::MAX, 1);
    bench.join(0, of_many(0, u32::MAX, u32::MAX));
    assert!(matches!(bench.unformed(0), Unformed::Ranks { num_workers: u32::MAX, .. }));
    // Nothing but the limit is in the way of more.
    for hosts in [RANKS_MAX / 8, RANKS_MAX / 2] {
        let (hosts, ranks) = (word(hosts), word(8 * hosts));
        let mut bench = Bench::with(hosts, 1, |config| config.ranks_max = ranks);
        for rank in 0..ranks {
            bench.join(rank.into(), of_many(rank, hosts, 8));
        }
        bench.join(1 << 20, server_register(0, hosts, 1));
        let roster = bench.roster((ranks - 1).into());
        assert_eq!((roster.index, roster.size), (ranks - 1, ranks));
        assert_eq!(bench.roster(1 << 20).workers.len(), ranks as usize);
    }
}
