//! A job that goes on without servers that die: their keys move, each to the round at which the
//! ranks are, and who alone has what others need can't be spared.

use super::elastic::formed;
use super::sets::{answer_installs, of_hosts};
use super::*;
use crate::proto::moving::{Adopted, HeldKey, MovedKey, MovingOrder, MovingReport};
use crate::proto::store::{Deltas, Store};

fn shrinks() -> Elastic {
    Elastic { shrinks: true, min_workers: 1, patience: ms(0), notice: ms(60_000) }
}

fn held(key: Key, rounds: u64) -> HeldKey {
    HeldKey { key, rounds, holds: true }
}

impl Bench {
    /// A job of three ranks that have all declared a tensor of eight parts; the keys of each
    /// server.
    fn sharing(servers: u32) -> (Bench, Vec<Vec<Key>>) {
        let mut bench = formed(3, servers, shrinks());
        for server in 0..u64::from(servers) {
            bench.heard(100 + server);
        }
        let said = [tensor("w", 8 * 1024)];
        bench.declare(0, 1, &said);
        let mut keys = Vec::new();
        for server in 0..u64::from(servers) {
            let installs = bench.installs(100 + server);
            keys.push(installs[0].1.iter().map(|spec| spec.key).collect::<Vec<Key>>());
            bench.say(100 + server, NodeMessage::Installed { request: installs[0].0 });
        }
        for node in [1, 2] {
            bench.declare(node, 1, &said);
        }
        for node in [0, 1, 2] {
            assert_eq!(declared(&bench.heard(node)).0, 1);
        }
        (bench, keys)
    }

    /// A rank has its lanes, and says what it has counted.
    fn has_lanes(&mut self, node: u64) {
        let (resident_bytes, link) = (0, None);
        let counted = Statistics { uptime: 0.1, resident_bytes, link, loops: Vec::new() };
        self.say(node, NodeMessage::Statistics(counted));
    }

    fn hold(&mut self, node: u64, lost: u32, keys: &[HeldKey]) {
        let report = MovingReport::Held { lost, keys: keys.to_vec() };
        self.say(node, NodeMessage::Moving(report));
    }

    /// Servers that a node was told are lost.
    fn lost(&mut self, node: u64) -> Vec<u32> {
        match self.heard(node).as_slice() {
            [SchedulerMessage::Moving(MovingOrder::Lost { servers, .. })] => servers.clone(),
            other => panic!("node {node} got {other:?}"),
        }
    }

    /// What a server is to adopt: the request, and of each key its rounds and whether the next is
    /// restored.
    fn adopts(&mut self, node: u64) -> (u64, BTreeMap<Key, (u64, bool)>) {
        match self.heard(node).as_slice() {
            [SchedulerMessage::Moving(MovingOrder::Adopt { request, keys })] => {
                let one = |Adopted { spec, restores }: &Adopted| {
                    assert_eq!((spec.bytes, spec.dtype), (4096, DType::F32));
                    (spec.key, (spec.rounds, *restores))
                };
                (*request, keys.iter().map(one).collect())
            }
            other => panic!("server {node} got {other:?}"),
        }
    }

    fn moved(&mut self, node: u64) -> Vec<MovedKey> {
        let heard = self.heard(node);
        match heard.first() {
            Some(SchedulerMessage::Moving(MovingOrder::Moved { keys })) => keys.clone(),
            other => panic!("node {node} got {other:?}"),
        }
    }
}

#[test]
fn keys_move_once_all_ranks_have_said_how_far_they_are() {
    let (mut bench, keys) = Bench::sharing(2);
    let (stay, moves) = (&keys[0], &keys[1]);
    assert!(stay.len() == 4 && moves.len() == 4);
    bench.close(101);
    for node in [0, 1, 2, 100] {
        assert_eq!(bench.lost(node), [1]);
    }
    let line = "1 server of 2 goes on without server 1: server 1 (host s1, pid 2001) died";
    assert!(bench.log.last().unwrap().starts_with(line), "{:?}", bench.log.last());
    // Nobody learns of a place before the keys that move are in theirs.
    bench.declare(0, 2, &[tensor("v", 10)]);
    for (request, specs) in bench.installs(100) {
        assert_eq!(specs.len(), 1);
        bench.say(100, NodeMessage::Installed { request });
    }
    // One result is with two ranks, one with one; the others are with all or nobody.
    let [some, few, all, none] = moves[..] else { panic!("{moves:?}") };
    bench.hold(0, 1, &[held(some, 7), held(few, 7), held(all, 7), held(none, 0)]);
    bench.hold(1, 1, &[held(some, 7), held(few, 6), held(all, 7)]);
    assert!(bench.heard(0).is_empty() && bench.heard(100).is_empty());
    bench.hold(2, 1, &[held(some, 6), held(few, 6), held(all, 7), held(none, 0)]);
    bench.now += ms(40);
    let (request, adopted) = bench.adopts(100);
    let expected = [(some, (6, true)), (few, (6, true)), (all, (7, false)), (none, (0, false))];
    assert_eq!(adopted, BTreeMap::from(expected));
    assert!(bench.heard(0).is_empty());
    bench.say(100, NodeMessage::Installed { request });
    for node in [1, 2] {
        for MovedKey { key, core, rounds, restores } in bench.moved(node) {
            assert_eq!((core.server, (rounds, restores)), (0, adopted[&key]));
        }
    }
    match bench.heard(0).as_slice() {
        [SchedulerMessage::Moving(_), SchedulerMessage::Declared { request: 2, .. }] => {}
        other => panic!("{other:?}"),
    }
    let view = bench.scheduler.view(bench.now);
    assert_eq!((view.epoch, view.ranks, view.servers, view.deaths), (1, 3, 1, 1));
    let shown = |bench: &Bench| {
        let last = bench.scheduler.view(bench.now).changes.last;
        last.into_iter().map(|one| (one.line[..37].to_owned(), one.waited)).collect::<Vec<_>>()
    };
    assert_eq!(shown(&bench), [(line[..37].to_owned(), ms(40))]);
    // The second rank had a result that the first has as well.
    bench.close(1);
    let second = ("2 ranks of 3 go on without rank 1: ra".to_owned(), ms(0));
    assert_eq!(shown(&bench), [(line[..37].to_owned(), ms(40)), second]);
    assert_eq!(bench.done, None);
    bench.heard(2);
    // Now it alone has what the third one lacks, until its server has it.
    bench.say(100, NodeMessage::Moving(MovingReport::Restored { keys: vec![some] }));
    bench.close(0);
    assert_eq!(bench.reforming(2).1, Epoch(2));
    let why = "can't go on without rank 0: it alone has results that others lack";
    assert!(bench.log.iter().any(|line| line.contains(why)), "{:?}", bench.log);
}

#[test]
fn who_gave_a_result_can_be_spared() {
    let (mut bench, keys) = Bench::sharing(2);
    let key = keys[1][0];
    bench.close(101);
    bench.hold(0, 1, &[held(key, 1)]);
    bench.hold(1, 1, &[held(key, 0)]);
    bench.lost(100);
    bench.hold(2, 1, &[held(key, 0)]);
    let (request, _) = bench.adopts(100);
    bench.say(100, NodeMessage::Installed { request });
    bench.say(100, NodeMessage::Moving(MovingReport::Restored { keys: vec![key] }));
    bench.heard(1);
    bench.close(0);
    let heard = bench.heard(1);
    assert!(matches!(heard[..], [SchedulerMessage::Shrunk(_)]), "{heard:?}");
}

#[test]
fn a_further_death_has_the_others_decide_anew() {
    let (mut bench, keys) = Bench::sharing(3);
    let key = keys[1][0];
    bench.close(101);
    for node in [0, 1, 2, 100, 102] {
        assert_eq!(bench.lost(node), [1]);
    }
    bench.hold(0, 1, &[held(key, 1)]);
    bench.hold(1, 1, &[held(key, 0)]);
    bench.close(102);
    for node in [0, 1, 2, 100] {
        assert_eq!(bench.lost(node), [1, 2]);
    }
    // Of before.
    bench.hold(2, 1, &[held(key, 0)]);
    bench.hold(0, 2, &[held(key, 1)]);
    bench.hold(1, 2, &[held(key, 0)]);
    assert!(bench.heard(100).is_empty());
    bench.hold(2, 2, &[held(key, 0)]);
    let (before, adopted) = bench.adopts(100);
    assert_eq!(adopted.len(), keys[1].len() + keys[2].len());
    assert_eq!(adopted[&key], (0, true));
    // The only rank that has the result dies before anybody is told: it is summed again.
    bench.close(0);
    let heard = bench.heard(100);
    let after = match heard.as_slice() {
        [
            SchedulerMessage::Shrunk(_),
            SchedulerMessage::Moving(MovingOrder::Adopt { request, keys }),
        ] => {
            let adopted = keys.iter().find(|one| one.spec.key == key).unwrap();
            assert!(adopted.spec.rounds == 0 && !adopted.restores);
            *request
        }
        other => panic!("{other:?}"),
    };
    bench.heard(1);
    bench.say(100, NodeMessage::Installed { request: before });
    assert!(bench.heard(1).is_empty());
    bench.say(100, NodeMessage::Installed { request: after });
    assert!(bench.moved(1).iter().all(|one| !one.restores && one.core.server == 0));
    let view = bench.scheduler.view(bench.now);
    assert_eq!((view.servers, view.ranks, view.deaths), (1, 2, 3));
    // The last one takes the job with it.
    bench.close(100);
    assert!(matches!(bench.over(1), OverReason::TooFew { .. }));
}

#[test]
fn whoever_keeps_keys_from_moving_is_lost_as_well() {
    let (mut bench, keys) = Bench::sharing(3);
    bench.close(101);
    bench.hold(0, 1, &[held(keys[1][0], 0)]);
    bench.hold(2, 1, &[held(keys[1][0], 0)]);
    bench.pass(300_000, &[0, 1, 2, 100, 102]);
    assert!(bench.closed.contains(&NodeId(1)), "{:?}", bench.log);
    for server in [100, 102] {
        let heard = bench.heard(server);
        let adopts = |one: &SchedulerMessage| {
            matches!(one, SchedulerMessage::Moving(MovingOrder::Adopt { .. }))
        };
        assert!(heard.iter().any(adopts), "{heard:?}");
    }
}

#[test]
fn what_nobody_else_has_ends_the_epoch() {
    let store = Some(Store::Deltas(Deltas { root: Rank(1), staleness: None }));
    let stored = Declaration { operation: Operation::Sum, store, ..tensor("stored", 10) };
    let encoded = |text: &str| {
        let encoding = Some(text.parse().unwrap());
        Declaration { encoding, ..tensor("encoded", 1 << 20) }
    };
    for (said, why) in [
        (stored, "can't move: it kept values of tensors, or what slow ranks are to get"),
        (encoded("auto"), "can't move: there are tensors encoded as `auto`, or with"),
        (encoded("topk(k=10)+feedback"), "can't move: there are tensors encoded as `auto`"),
    ] {
        let mut bench = formed(3, 2, shrinks());
        bench.declare(0, 1, &[said]);
        bench.heard(100);
        bench.close(101);
        assert_eq!(bench.reforming(0).1, Epoch(2));
        assert!(bench.log.iter().any(|line| line.contains(why)), "{:?}", bench.log);
    }
    // A rank that is done may have had what the others wait for.
    let mut bench = formed(3, 2, shrinks());
    bench.say(1, NodeMessage::Leave { suspend: false });
    bench.heard(0);
    bench.close(101);
    assert_eq!(bench.reforming(0).1, Epoch(2));
    assert!(bench.log.iter().any(|line| line.contains("can't move: a rank has shut down")));
    // Likewise if it leaves while the others are asked.
    let (mut bench, keys) = Bench::sharing(2);
    bench.close(101);
    bench.hold(0, 1, &[held(keys[1][0], 1)]);
    bench.heard(0);
    bench.say(1, NodeMessage::Leave { suspend: false });
    assert_eq!(bench.reforming(0).1, Epoch(2));
}

#[test]
fn a_rank_may_leave_while_a_server_goes_that_has_no_keys() {
    let mut bench = formed(3, 2, shrinks());
    (0..3).for_each(|node| bench.has_lanes(node));
    bench.close(101);
    bench.hold(0, 1, &[]);
    bench.say(1, NodeMessage::Leave { suspend: false });
    assert_eq!((bench.lost(0), bench.lost(100)), (vec![1], vec![1]));
    bench.hold(2, 1, &[]);
    for node in [0, 2] {
        bench.declare(node, 1, &[tensor("w", 8)]);
    }
    assert!(!bench.installs(100).is_empty(), "{:?}", bench.log);
    let view = bench.scheduler.view(bench.now);
    assert_eq!((view.servers, view.deaths, bench.done), (1, 1, None));
}

#[test]
fn ranks_that_open_their_lanes_are_not_asked_to_do_without_a_server() {
    for opens in [true, false] {
        let mut bench = formed(3, 2, shrinks());
        (0..if opens { 2 } else { 3 }).for_each(|node| bench.has_lanes(node));
        bench.say(2, NodeMessage::Heartbeat { rounds: 0 });
        bench.close(101);
        let why = "the keys of server 1 can't move: a rank opens its lanes";
        assert_eq!(bench.log.iter().any(|line| line == why), opens, "{:?}", bench.log);
        if opens {
            assert_eq!(bench.reforming(2).1, Epoch(2));
        } else {
            assert_eq!(bench.lost(2), [1]);
        }
    }
}

#[test]
fn owners_say_how_far_the_keys_of_their_hosts_are() {
    let mut bench = of_hosts(&[2, 1], 3);
    bench.scheduler.config.elastic = Some(shrinks());
    let said = [tensor("w", 8 * 1024)];
    bench.declare(0, 1, &said);
    let keys: Vec<Key> = answer_installs(&mut bench, 3).iter().map(|spec| spec.key).collect();
    for node in [1, 2] {
        bench.declare(node, 1, &said);
    }
    let mut owned: [Vec<Key>; 3] = Default::default();
    for node in [0, 1, 2] {
        let (_, tensors) = declared(&bench.heard(node));
        let parts = tensors.iter().flat_map(|tensor| &tensor.parts);
        let lost = parts.filter(|part| part.core.is_some_and(|core| core.server == 1));
        let own = lost.filter(|part| part.owner == Rank(u32::try_from(node).unwrap()));
        owned[usize::try_from(node).unwrap()] = own.map(|part| part.key).collect();
    }
    let [first, second, alone] = &owned;
    assert!(keys.len() == 8 && !first.is_empty() && !second.is_empty(), "{owned:?}");
    assert_eq!(alone.len(), first.len() + second.len());
    bench.close(101);
    for node in [0, 1, 2, 100, 102] {
        assert_eq!(bench.lost(node), [1]);
    }
    // The first host has the result of what its first rank owns, and the other one of the rest.
    let at = |keys: &[Key], rounds| keys.iter().map(|key| held(*key, rounds)).collect::<Vec<_>>();
    bench.hold(0, 1, &at(first, 3));
    bench.hold(1, 1, &at(second, 2));
    let heard = [100, 102].map(|server| bench.heard(server));
    assert!(heard.iter().all(Vec::is_empty), "each rank is waited for");
    bench.hold(2, 1, &[at(first, 2), at(second, 2)].concat());
    let mut all = BTreeMap::new();
    for server in [100, 102] {
        let (request, adopted) = bench.adopts(server);
        all.extend(adopted);
        bench.say(server, NodeMessage::Installed { request });
    }
    let expected = first.iter().map(|key| (*key, (2, true)));
    let expected = expected.chain(second.iter().map(|key| (*key, (2, false))));
    assert_eq!(all, expected.collect());
    for node in [0, 1, 2] {
        assert_eq!(bench.moved(node).len(), alone.len());
    }
    // What ranks of a host sum is lost with one of them.
    bench.close(1);
    assert_eq!(bench.reforming(0).1, Epoch(2));
}

#[test]
fn names_may_be_declared_anew_while_their_keys_move() {
    let (mut bench, _) = Bench::sharing(2);
    // All have replaced the tensor once, so its first keys are pushed no more.
    let again = |rounds| vec![Replacement { said: tensor("w", 4 * 1024), rounds }];
    for node in [0, 1, 2] {
        bench.say(node, NodeMessage::Redeclare { request: 2, tensors: again(3) });
    }
    answer_installs_of(&mut bench, &[100, 101]);
    bench.close(101);
    for node in [0, 1, 2, 100] {
        bench.heard(node);
    }
    // Another one goes back to the first meaning of the name.
    let back = vec![Replacement { said: tensor("w", 8 * 1024), rounds: 0 }];
    bench.say(0, NodeMessage::Redeclare { request: 3, tensors: back });
    for (_, specs) in bench.installs(100) {
        assert_eq!(specs.len(), 4, "those that move are adopted, and not installed as well");
    }
    for node in [0, 1, 2] {
        bench.hold(node, 1, &[]);
    }
    let (request, adopted) = bench.adopts(100);
    let first: Vec<u64> = adopted.values().map(|(rounds, _)| *rounds).collect();
    assert_eq!(first.iter().filter(|rounds| **rounds == 3).count(), 4, "as they had: {first:?}");
    bench.say(100, NodeMessage::Installed { request });
}

/// Answers installs, and forgets what else these servers were told.
fn answer_installs_of(bench: &mut Bench, servers: &[u64]) {
    for &server in servers {
        for message in bench.heard(server) {
            if let SchedulerMessage::Install { request, .. } = message {
                bench.say(server, NodeMessage::Installed { request });
            }
        }
    }
}
