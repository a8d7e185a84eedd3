//! Declaring: installs, mismatches, refusals, deadlines.

use super::*;

#[test]
fn keys_are_installed_before_anybody_hears_of_them() {
    let mut bench = Bench::formed(2, 2);
    bench.declare(0, 7, &[tensor("a", 4096), tensor("empty", 0)]);
    assert!(bench.heard(0).is_empty());
    let installs: Vec<_> = [100, 101].map(|server| bench.installs(server)).into();
    let keys: Vec<&KeySpec> = installs.iter().flatten().flat_map(|(_, keys)| keys).collect();
    assert_eq!(keys.iter().map(|key| key.bytes).sum::<u32>(), 4 * 4096);
    // The other rank declares the same, in another order, while the servers are still at it.
    bench.declare(1, 3, &[tensor("empty", 0), tensor("a", 4096)]);
    bench.say(100, NodeMessage::Installed { request: installs[0][0].0 });
    bench.say(100, NodeMessage::Installed { request: installs[0][0].0 });
    assert!(bench.heard(0).is_empty() && bench.heard(1).is_empty());
    bench.say(101, NodeMessage::Installed { request: installs[1][0].0 });
    let (request, first) = declared(&bench.heard(0));
    assert_eq!(request, 7);
    assert_eq!(first[1].parts, []);
    let placed: Vec<(u64, u32, CoreId)> =
        first[0].parts.iter().map(|part| (part.offset, part.bytes, part.core.unwrap())).collect();
    let core = |server, core| CoreId { server, core };
    assert_eq!(
        placed,
        [
            (0, 4096, core(0, 0)),
            (4096, 4096, core(1, 0)),
            (8192, 4096, core(0, 1)),
            (12288, 4096, core(1, 1))
        ]
    );
    for (server, installs) in (0..).zip(&installs) {
        let told: Vec<(Key, u32)> =
            installs.iter().flat_map(|(_, keys)| keys).map(|key| (key.key, key.core)).collect();
        let placed = first[0].parts.iter().map(|part| (part.key, part.core.unwrap()));
        let parts = placed.filter(|(_, core)| core.server == server);
        assert_eq!(told, parts.map(|(key, core)| (key, core.core)).collect::<Vec<_>>());
    }
    let (request, second) = declared(&bench.heard(1));
    // Each rank is a group of its own here, and owns all of its parts.
    let owned = |assignment: &Assignment, rank| Assignment {
        parts: assignment.parts.iter().map(|part| Part { owner: Rank(rank), ..*part }).collect(),
        ..*assignment
    };
    assert_eq!((&owned(&first[0], 0), &first[0]), (&first[0], &owned(&second[1], 0)));
    assert_eq!((request, &second[1], &second[0]), (3, &owned(&first[0], 1), &first[1]));
    // Known tensors, or such without parts, are answered at once.
    bench.declare(0, 8, &[tensor("a", 4096), tensor("nothing", 0)]);
    assert_eq!(declared(&bench.heard(0)).1[0], first[0]);
    bench.declare(1, 9, &[]);
    assert_eq!(declared(&bench.heard(1)), (9, vec![]));
}

#[test]
fn a_disagreement_is_told_to_every_rank_and_spoils_the_name() {
    let mut bench = Bench::new(3, 1);
    for (rank, framework) in (0..3).zip([Some("PyTorch"), None, Some("JAX")]) {
        let mut register = worker_register(rank, 3, 1);
        let Node::Worker { speaks, .. } = &mut register.node else { unreachable!() };
        *speaks = framework.map(str::to_owned);
        bench.join(rank.into(), register);
    }
    bench.join(100, server_register(0, 3, 1));
    (0..3).chain([100]).for_each(|node| drop(bench.heard(node)));
    bench.declare(0, 1, &[tensor("w", 10)]);
    let (request, _) = bench.installs(100).remove(0);
    bench.say(100, NodeMessage::Installed { request });
    bench.heard(0);
    bench.declare(2, 4, &[tensor("new", 10), tensor("w", 11)]);
    let expected = Mismatch {
        first: Rank(0),
        first_said: Box::new(tensor("w", 10)),
        second: Rank(2),
        second_said: Box::new(tensor("w", 11)),
        frameworks: Frameworks { first: Some("PyTorch".into()), second: Some("JAX".into()) },
        agreed: vec![Superseded { tensor: 0, rounds: 0 }],
    };
    for node in [0, 1] {
        assert_eq!(bench.heard(node), [SchedulerMessage::Mismatch(expected.clone())]);
    }
    let answer = bench.heard(2);
    assert_eq!(answer[0], SchedulerMessage::Mismatch(expected.clone()));
    assert!(refused(&answer[1..]).contains("rank 2, which speaks JAX, declared f32 of shape [11]"));
    assert!(bench.heard(100).is_empty(), "a refused request must leave nothing behind");
    // Even the first rank cannot use it any more; only who asks is told again.
    bench.declare(0, 5, &[tensor("w", 10)]);
    let answer = bench.heard(0);
    assert_eq!(answer[0], SchedulerMessage::Mismatch(expected));
    refused(&answer[1..]);
    assert!(bench.heard(1).is_empty());
    for changed in [
        Declaration { shape: TensorShape::new(vec![1, 1]).unwrap(), ..tensor("v", 1) },
        Declaration { dtype: DType::I32, ..tensor("v", 1) },
        Declaration { operation: Operation::Sum, ..tensor("v", 1) },
    ] {
        let mut bench = Bench::formed(2, 1);
        bench.declare(0, 1, &[tensor("v", 1)]);
        bench.declare(1, 1, &[changed]);
        assert!(matches!(bench.heard(0).as_slice(), [SchedulerMessage::Mismatch(_)]));
    }
}

#[test]
fn what_cannot_be_served_is_refused_with_a_remedy() {
    let mut bench = Bench::formed(2, 1);
    let long = "x".repeat(NAME_BYTES_MAX + 1);
    let broadcast = Declaration { operation: Operation::Broadcast(Rank(2)), ..tensor("b", 1) };
    let cases: [(Vec<Declaration>, &str); 6] = [
        (vec![tensor(&long, 1)], "1025 bytes"),
        (vec![tensor("", 1)], "0 bytes"),
        (vec![tensor("big", u64::MAX / 2)], "more bytes than can be counted"),
        (vec![tensor("ok", 1), tensor("big", 1 << 40)], "raise BYTEPS_PARTITION_BYTES"),
        (vec![broadcast], "the root must be 0 to 1"),
        (vec![tensor("twice", 1), tensor("twice", 2)], "declared twice at once"),
    ];
    for (tensors, part) in cases {
        bench.declare(1, 1, &tensors);
        let message = refused(&bench.heard(1));
        assert!(message.contains(part), "{message}");
    }
    assert!(bench.heard(100).is_empty());
    let mut bench = Bench::formed(1, 0);
    bench.declare(0, 1, &[tensor("a", 1)]);
    assert!(refused(&bench.heard(0)).contains("DMLC_NUM_SERVER"));
}

#[test]
fn a_server_that_does_not_install_has_a_deadline() {
    let mut bench = Bench::formed(1, 1);
    bench.declare(0, 1, &[tensor("w", 10)]);
    bench.pass(300_000, &[0, 100]);
    let reason = bench.over(0).to_string();
    assert!(
        reason.contains("server 0 (host s0, pid 2000) failed: it has not made room"),
        "{reason}"
    );
}
