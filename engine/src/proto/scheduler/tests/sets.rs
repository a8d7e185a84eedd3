//! Tensors that are for some ranks.

use super::*;

fn of(ranks: &[u32]) -> Members {
    Members::new(ranks.iter().copied().map(Rank).collect()).unwrap()
}

fn tensor_of(name: &str, count: u64, ranks: &[u32]) -> Declaration {
    Declaration { members: of(ranks), ..tensor(name, count) }
}

/// A job whose hosts have so many ranks each, which reduce among themselves; ranks are nodes 0, 1,
/// …; servers 100, 101, ….
pub(super) fn of_hosts(hosts: &[u32], num_servers: u32) -> Bench {
    let ranks = hosts.iter().sum();
    let mut bench = Bench::new(ranks, num_servers);
    let mut node = 0;
    for (host, size) in (0u32..).zip(hosts) {
        for _ in 0..*size {
            let mut register = worker_register(node, ranks, num_servers);
            let Node::Worker { planning, local, .. } = &mut register.node else { unreachable!() };
            planning.local_reduce = true;
            *local = Some(format!("socket {node}"));
            register.host_id = format!("host {host}");
            bench.join(node.into(), register);
            node += 1;
        }
    }
    for server in 0..num_servers {
        bench.join(u64::from(server) + 100, server_register(server, ranks, num_servers));
    }
    for node in (0..ranks).chain((0..num_servers).map(|server| 100 + server)) {
        bench.roster(node.into());
    }
    bench
}

/// Answers all installs, and returns the keys in them.
pub(super) fn answer_installs(bench: &mut Bench, servers: u32) -> Vec<KeySpec> {
    let mut all = Vec::new();
    for server in (0..servers).map(|server| u64::from(server) + 100) {
        for (request, keys) in bench.installs(server) {
            all.extend(keys);
            bench.say(server, NodeMessage::Installed { request });
        }
    }
    all
}

#[test]
fn servers_are_told_for_whom_a_tensor_is_and_only_these_declare_it() {
    let mut bench = Bench::formed(4, 1);
    let said = tensor_of("few", 2048, &[1, 3]);
    bench.declare(1, 1, std::slice::from_ref(&said));
    let keys = answer_installs(&mut bench, 1);
    assert_eq!(keys.len(), 2);
    assert!(keys.iter().all(|key| key.members == said.members), "{keys:?}");
    let (_, first) = declared(&bench.heard(1));
    bench.declare(3, 1, std::slice::from_ref(&said));
    let (_, second) = declared(&bench.heard(3));
    let keys = |one: &[Assignment]| one[0].parts.iter().map(|part| part.key).collect::<Vec<_>>();
    assert_eq!(keys(&first), keys(&second));
    // Another set under another name is another tensor, and costs the first nothing.
    bench.declare(0, 1, &[tensor_of("others", 1, &[0, 2])]);
    assert_eq!(answer_installs(&mut bench, 1)[0].members, of(&[0, 2]));
    bench.heard(0);
    let broadcast =
        Declaration { operation: Operation::Broadcast(Rank(0)), ..tensor_of("root", 1, &[1, 2]) };
    let on_gpus = Declaration { device: true, ..tensor_of("gpu", 1, &[1, 2]) };
    for (said, why) in [
        (tensor_of("few", 2048, &[0, 3]), "tensor `few` of ranks 0, 3: rank 1 is none of them"),
        (tensor_of("far", 1, &[1, 4]), "there is no rank 4 in a job of 4 ranks: name 0 to 3"),
        (broadcast, "rank 0, which broadcasts it, is none of them"),
        (on_gpus, "only tensors in memory of the host"),
    ] {
        bench.declare(1, 2, &[said]);
        let answer = refused(&bench.heard(1));
        assert!(answer.contains(why), "{answer}");
        assert!(bench.heard(100).is_empty() && bench.heard(0).is_empty());
    }
}

#[test]
fn sets_that_differ_are_a_mismatch_and_a_name_keeps_its_set() {
    for (second, said) in [
        (2, tensor_of("w", 10, &[1, 2])),
        (1, tensor_of("w", 10, &[0, 1, 2])),
        (1, tensor("w", 10)),
        (2, tensor("w", 10)),
    ] {
        let mut bench = Bench::formed(3, 1);
        bench.declare(0, 1, &[tensor_of("w", 10, &[0, 1])]);
        answer_installs(&mut bench, 1);
        bench.heard(0);
        bench.declare(second, 4, &[said]);
        let heard = bench.heard(0);
        let [SchedulerMessage::Mismatch(mismatch)] = heard.as_slice() else {
            panic!("{heard:?}, no mismatch")
        };
        assert!(mismatch.to_string().contains("(average) for ranks 0, 1, rank "), "{mismatch}");
        assert_eq!(mismatch.agreed, [Superseded { tensor: 0, rounds: 0 }]);
        assert!(refused(&bench.heard(second)[1..]).contains("for ranks 0, 1"));
    }
    let mut bench = Bench::formed(3, 1);
    bench.declare(0, 1, &[tensor_of("w", 10, &[0, 1])]);
    answer_installs(&mut bench, 1);
    bench.heard(0);
    for said in [tensor("w", 10), tensor_of("w", 12, &[0, 2])] {
        let tensors = vec![Replacement { said, rounds: 3 }];
        bench.say(0, NodeMessage::Redeclare { request: 2, tensors });
        let answer = refused(&bench.heard(0));
        assert!(answer.contains("the name stands for one of ranks 0, 1"), "{answer}");
    }
    assert!(bench.heard(1).is_empty() && bench.heard(2).is_empty());
}

#[test]
fn a_name_of_a_set_is_declared_anew_by_its_ranks_alone() {
    let mut bench = Bench::formed(3, 1);
    let replace = |bench: &mut Bench, node| {
        let tensors = vec![Replacement { said: tensor_of("w", 20, &[0, 2]), rounds: 3 }];
        bench.say(node, NodeMessage::Redeclare { request: 9, tensors });
    };
    for node in [0, 2] {
        bench.declare(node, 1, &[tensor_of("w", 10, &[0, 2])]);
    }
    answer_installs(&mut bench, 1);
    bench.heard(2);
    replace(&mut bench, 0);
    assert_eq!(answer_installs(&mut bench, 1).len(), 1);
    assert!(matches!(bench.heard(2).as_slice(), [SchedulerMessage::Superseded { .. }]));
    assert!(bench.heard(1).is_empty(), "it is nothing to this rank");
    // What a rank that it is not for says of it changes nothing.
    bench.say(1, NodeMessage::Overrun { tensor: 0 });
    assert!(bench.heard(1).is_empty() && bench.heard(2).is_empty());
    replace(&mut bench, 2);
    let heard = bench.heard(100);
    assert!(matches!(heard.as_slice(), [SchedulerMessage::Retire { .. }]), "{heard:?}");
}

#[test]
fn a_set_of_one_host_needs_no_server_and_its_parts_go_round() {
    let mut bench = of_hosts(&[3, 1], 1);
    let (host, both) = (tensor_of("host", 4096, &[0, 2]), tensor_of("both", 4096, &[1, 2, 3]));
    let mut owners = Vec::new();
    for node in [0, 2] {
        bench.declare(node, 1, std::slice::from_ref(&host));
        let (_, all) = declared(&bench.heard(node));
        assert!(all[0].parts.iter().all(|part| part.core.is_none()));
        owners.push(all[0].parts.iter().map(|part| part.owner.0).collect::<Vec<_>>());
    }
    assert_eq!(owners, [[0, 2, 0, 2]; 2]);
    for node in [1, 2, 3] {
        bench.declare(node, 2, std::slice::from_ref(&both));
        answer_installs(&mut bench, 1);
        let (_, all) = declared(&bench.heard(node));
        assert!(all[0].parts.iter().all(|part| part.core.is_some()));
        let owners = all[0].parts.iter().map(|part| part.owner.0);
        let wanted: &[u32] = if node == 3 { &[3; 4] } else { &[1, 2, 1, 2] };
        assert_eq!(owners.collect::<Vec<_>>(), wanted);
    }
    // Without servers, only what one host can sum is served.
    let mut bench = Bench::formed(2, 0);
    bench.declare(0, 1, &[tensor_of("own", 10, &[0])]);
    declared(&bench.heard(0));
    bench.declare(1, 1, &[tensor("all", 10)]);
    assert!(refused(&bench.heard(1)).contains("DMLC_NUM_SERVER"));
}

#[test]
fn a_stall_names_the_ranks_of_the_set_alone() {
    let mut bench = Bench::formed(4, 1);
    bench.declare(0, 1, &[tensor_of("w", 10, &[0, 1, 3])]);
    let keys = answer_installs(&mut bench, 1);
    let stalled = StalledKey {
        key: keys[0].key,
        round: 1,
        waited_ms: 300_000,
        missing: vec![Rank(3)],
        left: Vec::new(),
    };
    bench.say(100, NodeMessage::Stalled { keys: vec![stalled], late: Vec::new() });
    bench.pass(500, &[0, 1, 2, 3, 100]);
    let reason = bench.over(2).to_string();
    assert!(
        reason.contains("waits for rank 3 (host w3, pid 1003); ranks 0, 1 arrived"),
        "{reason}"
    );
}

#[test]
fn the_ranks_that_one_request_names_are_bounded() {
    let mut bench = Bench::formed(65, 1);
    let ranks: Vec<u32> = (0..64).collect();
    // 64 ranks for each of 65,536 parts, and for one more.
    let most = DECLARE_MEMBERS_MAX as u64 / 64 * 1024;
    bench.declare(0, 1, &[tensor_of("w", most + 1, &ranks)]);
    assert!(refused(&bench.heard(0)).contains("over 4194304 ranks of their sets"));
    bench.declare(0, 2, &[tensor_of("w", most, &ranks)]);
    assert_eq!(answer_installs(&mut bench, 1).len(), DECLARE_MEMBERS_MAX / 64);
    declared(&bench.heard(0));
}
