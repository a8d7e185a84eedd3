//! Names that are declared anew: with other shapes, by ranks that do so at different times.

use super::*;

impl Bench {
    /// A rank declares `w` anew, with so many elements, after so many rounds.
    fn replace(&mut self, node: u64, elements: u64, rounds: u64) -> Vec<SchedulerMessage> {
        let tensors = vec![Replacement { said: tensor("w", elements), rounds }];
        self.say(node, NodeMessage::Redeclare { request: 9, tensors });
        self.heard(node)
    }

    /// The server answers its only install, of this many bytes, which begins after so many rounds.
    fn answer_install(&mut self, bytes: u32, rounds: u64) {
        let heard = self.heard(100);
        let [SchedulerMessage::Install { request, keys }] = heard.as_slice() else {
            panic!("{heard:?}, not one install")
        };
        let told: Vec<(u32, u64)> = keys.iter().map(|key| (key.bytes, key.rounds)).collect();
        assert_eq!(told, [(bytes, rounds)]);
        self.say(100, NodeMessage::Installed { request: *request });
    }

    /// A job of ranks that have all declared `w` with 10 elements.
    fn with_w(ranks: u32) -> Bench {
        let mut bench = Bench::formed(ranks, 1);
        for node in 0..u64::from(ranks) {
            bench.declare(node, 1, &[tensor("w", 10)]);
        }
        bench.answer_install(40, 0);
        for node in 0..u64::from(ranks) {
            assert_eq!(place(&bench.heard(node)), (0, None));
        }
        bench
    }
}

/// The tensor of a declare of one, and how often it may be pushed.
fn place(messages: &[SchedulerMessage]) -> (u32, Option<u64>) {
    match messages {
        [SchedulerMessage::Declared { tensors, .. }] => (tensors[0].tensor, tensors[0].until),
        other => panic!("{other:?}, not Declared"),
    }
}

fn superseded(tensor: u32, rounds: u64) -> [SchedulerMessage; 1] {
    [SchedulerMessage::Superseded { tensors: vec![Superseded { tensor, rounds }] }]
}

fn retired(key: u64, rounds: u64) -> [SchedulerMessage; 1] {
    [SchedulerMessage::Retire { keys: vec![RetiredKey { key: Key(key), core: 0, rounds }] }]
}

/// Both sides of a mismatch of elements, as every one of these nodes hears of it.
fn sides(bench: &mut Bench, nodes: &[u64]) -> Vec<(u32, u64)> {
    let mut sides = Vec::new();
    for node in nodes {
        let heard = bench.heard(*node);
        let Some(SchedulerMessage::Mismatch(mismatch)) = heard.first() else {
            panic!("node {node} got {heard:?}, no mismatch")
        };
        let one = |rank: Rank, said: &Declaration| (rank.0, said.shape.count());
        sides = vec![
            one(mismatch.first, &mismatch.first_said),
            one(mismatch.second, &mismatch.second_said),
        ];
    }
    sides
}

#[test]
fn a_name_becomes_another_tensor_once_every_rank_says_so() {
    let mut bench = Bench::with_w(3);
    assert_eq!(bench.replace(1, 20, 5), []);
    bench.answer_install(80, 0);
    assert_eq!(place(&bench.heard(1)), (1, None));
    for node in [0, 2] {
        assert_eq!(bench.heard(node), superseded(0, 5));
    }
    // The others follow; the last to do so lets the server forget the old tensor.
    assert_eq!(place(&bench.replace(0, 20, 5)), (1, None));
    assert_eq!(bench.heard(100), []);
    assert_eq!(place(&bench.replace(2, 20, 5)), (1, None));
    assert_eq!(bench.heard(100), retired(0, 5));
    // A rank may be ahead by several. The first tensor comes back with its rounds.
    assert_eq!(bench.replace(0, 10, 2), []);
    bench.answer_install(40, 5);
    assert_eq!(place(&bench.heard(0)), (0, None));
    assert_eq!(bench.heard(1), superseded(1, 2));
    assert_eq!(place(&bench.replace(0, 20, 6)), (1, None));
    assert_eq!(bench.heard(1), [], "it has not come to the first tensor yet");
    assert_eq!(place(&bench.replace(1, 10, 2)), (0, Some(6)));
    assert_eq!(place(&bench.replace(1, 20, 6)), (1, None));
    bench.heard(2);
    assert_eq!(place(&bench.replace(2, 10, 2)), (0, Some(6)));
    assert_eq!(bench.heard(100), [], "the second tensor is in use again");
    assert_eq!(place(&bench.replace(2, 20, 6)), (1, None));
    assert_eq!(bench.heard(100), retired(0, 6));
}

#[test]
fn ranks_that_differ_are_told_at_once_and_what_they_agreed_on_goes_on() {
    // Two new shapes after equally many rounds.
    let mut bench = Bench::with_w(3);
    bench.replace(0, 20, 5);
    bench.heard(1);
    bench.heard(2);
    let heard = bench.replace(1, 30, 5);
    let SchedulerMessage::Mismatch(mismatch) = &heard[0] else { panic!("{heard:?}") };
    let agreed = [(0, 5), (1, 0)].map(|(tensor, rounds)| Superseded { tensor, rounds });
    assert_eq!(mismatch.agreed, agreed);
    assert!(refused(&heard[1..]).contains("rank 0 declared f32 of shape [20]"));
    assert_eq!(sides(&mut bench, &[0, 2]), [(0, 20), (1, 30)]);
    // A rank that is late may still push what all had agreed on, and nothing else.
    bench.declare(2, 2, &[tensor("w", 10)]);
    assert_eq!(place(&bench.heard(2)), (0, Some(5)));
    let heard = bench.replace(2, 20, 5);
    assert!(matches!(heard.as_slice(), [SchedulerMessage::Mismatch(_), _]), "{heard:?}");
    // One rank goes on with the old shape.
    let mut bench = Bench::with_w(2);
    bench.replace(0, 20, 5);
    assert_eq!(bench.heard(1), superseded(0, 5));
    bench.say(1, NodeMessage::Overrun { tensor: 0 });
    assert_eq!(sides(&mut bench, &[1]), [(0, 20), (1, 10)]);
    // One rank has a new shape where another goes on with the old one.
    let mut bench = Bench::with_w(2);
    bench.replace(0, 20, 5);
    bench.heard(1);
    assert!(refused(&bench.replace(1, 20, 4)[1..]).contains("rank 0 declared f32 of shape [10]"));
    assert_eq!(sides(&mut bench, &[0]), [(0, 10), (1, 20)]);
    // One rank never had the old one.
    let mut bench = Bench::formed(2, 1);
    bench.declare(0, 1, &[tensor("w", 10)]);
    bench.replace(0, 20, 1);
    bench.heard(1);
    bench.declare(1, 1, &[tensor("w", 20)]);
    assert_eq!(sides(&mut bench, &[1, 0]), [(0, 10), (1, 20)]);
}

#[test]
fn an_overrun_of_what_the_rank_has_left_since_is_none() {
    let mut bench = Bench::with_w(2);
    for (rounds, elements) in [(5, 20), (1, 10)] {
        for node in [0, 1] {
            bench.replace(node, elements, rounds);
        }
    }
    bench.say(1, NodeMessage::Overrun { tensor: 0 });
    bench.say(1, NodeMessage::Overrun { tensor: 77 });
    assert!(bench.done.is_none());
    assert!(!bench.heard(0).iter().any(|one| matches!(one, SchedulerMessage::Mismatch(_))));
}

#[test]
fn a_rank_can_only_be_so_far_ahead() {
    let mut bench = Bench::with_w(2);
    for era in 0..=ERAS_MAX as u64 {
        let elements = if era % 2 == 0 { 20 } else { 10 };
        let heard = bench.replace(0, elements, era);
        if era + 1 == ERAS_MAX as u64 {
            assert!(refused(&heard).contains("another rank has not followed"));
            return;
        }
        if era == 0 {
            bench.answer_install(80, 0);
        }
    }
    panic!("nothing was refused");
}
