//! The pipeline of a GPU alone, on a simulated machine, with tensors that have memory of their own
//! in the host: when that is filled and emptied, when a result is told before it has come, and when
//! it must not be.

use bps_engine::base::{Operation, Rank};
use bps_tests::sim::stages::{Pushed, Stages, read};
use bps_worker::Error;
use bps_worker::error::Closed;
use bps_worker::rounds::handover::{From, FromGpu, ToGpu};
use bps_worker::rounds::{PartOf, Slot, Staging};
use std::ops::Range;
use std::time::Duration;

const SEEDS: Range<u64> = 0..40;
const BYTES: usize = 64;
/// Room for all tensors of a test.
const ROOM: usize = 1 << 14;
/// Room for one tensor of one part and the word behind it.
const ROOM_FOR_ONE: usize = 2 * BYTES;
const SOON: Duration = Duration::from_secs(1);
/// Results that nobody wants yet are held for so long, to be marked together.
const HELD: Duration = Duration::from_micros(200);

fn floats(value: f32) -> Vec<u8> {
    value.to_ne_bytes().repeat(BYTES / 4)
}

fn part(tensor: u32, index: u32) -> PartOf {
    PartOf { tensor, index }
}

/// A part in memory of its own, or in a slot.
#[derive(Clone, Copy)]
struct Fallen {
    of: PartOf,
    round: u64,
    from: From,
}

impl Fallen {
    fn staging(&self) -> Staging {
        match self.from {
            From::Staging(staging, _) => staging,
            other => panic!("it has no memory of its own: {other:?}"),
        }
    }

    fn slot(&self) -> Slot {
        match self.from {
            From::Slot(slot) => slot,
            other => panic!("it is in no slot: {other:?}"),
        }
    }
}

/// Lets everything happen that is under way; the parts that the pipeline has given out since.
fn settle(stages: &mut Stages) -> Vec<Fallen> {
    stages.settle();
    let mut all = Vec::new();
    for message in stages.heard(0) {
        match message {
            FromGpu::Part { of, round, from, encoded: None, .. } => {
                if let From::Staging(_, mark) = from {
                    assert!(stages.has_fallen(mark), "all copies are done");
                }
                all.push(Fallen { of, round, from });
            }
            FromGpu::Land(_) => {}
            other => panic!("it says {other:?}"),
        }
    }
    all
}

fn land(stages: &mut Stages, fallen: &Fallen, value: f32) {
    stages.land_staged(fallen.of, fallen.round, fallen.staging(), &floats(value));
}

/// Whether its caller goes on, and puts a stream behind the result.
fn is_told(stages: &Stages, pushed: &Pushed) -> bool {
    stages.handle_of(pushed).wait(Some(Duration::ZERO)).expect("it has not failed")
}

/// A pipeline whose tensors, of one part each, have had a round.
fn proved(seed: u64, tensors: u32, room: usize, keeps: bool) -> Stages {
    let mut stages = Stages::staged(seed, 2, room, keeps);
    for tensor in 0..tensors {
        stages.plan(tensor, Operation::Sum, &[BYTES]);
        let pushed = stages.push(0, tensor, 0, floats(1.0));
        let fallen = settle(&mut stages);
        assert_eq!((fallen.len(), fallen[0].of), (1, part(tensor, 0)));
        if let From::Slot(slot) = fallen[0].from {
            stages.tell(0, ToGpu::Sent(slot));
            settle(&mut stages);
            stages.land(0, fallen[0].of, &floats(2.0), true);
        } else {
            land(&mut stages, &fallen[0], 2.0);
        }
        settle(&mut stages);
        assert_eq!(stages.outcome(0, &pushed).unwrap().unwrap(), floats(2.0), "seed {seed}");
    }
    stages
}

fn leave(mut stages: Stages) {
    stages.end(0, None);
    stages.pass(SOON);
    assert!(stages.has_ended(0));
}

#[test]
fn a_result_that_is_wanted_is_told_before_it_has_come() {
    for seed in SEEDS {
        let mut stages = Stages::staged(seed, 2, ROOM, false);
        stages.plan(0, Operation::Sum, &[BYTES, BYTES]);
        let both = |value| [floats(value), floats(value)].concat();
        let first = stages.push(0, 0, 0, both(1.0));
        stages.want(&first);
        let fallen = settle(&mut stages);
        assert_eq!(fallen.iter().map(|one| one.of.index).collect::<Vec<_>>(), [0, 1]);
        for one in &fallen {
            assert_eq!(read(one.staging().slot(), BYTES), floats(1.0), "seed {seed}");
        }
        // Until it has come, other ranks may mean something else by the name.
        assert!(!is_told(&stages, &first), "seed {seed}: the first round was told too early");
        land(&mut stages, &fallen[1], 5.0);
        settle(&mut stages);
        assert!(!is_told(&stages, &first), "seed {seed}: half of it has come");
        land(&mut stages, &fallen[0], 4.0);
        settle(&mut stages);
        assert_eq!(stages.handle_of(&first).lacking(), Some(0));
        let wanted = [floats(4.0), floats(5.0)].concat();
        assert_eq!(stages.outcome(0, &first).unwrap().unwrap(), wanted, "seed {seed}");

        let second = stages.push(0, 0, 0, both(2.0));
        let fallen = settle(&mut stages);
        let before = stages.target(&second);
        assert!(!is_told(&stages, &second), "seed {seed}: nobody wants it");
        stages.want(&second);
        settle(&mut stages);
        assert!(is_told(&stages, &second), "seed {seed}: it is wanted");
        assert_eq!(stages.handle_of(&second).lacking(), None, "nobody can know yet");
        assert_eq!(stages.target(&second), before, "seed {seed}: nothing has come");
        land(&mut stages, &fallen[0], 6.0);
        settle(&mut stages);
        assert_eq!(stages.target(&second), before, "seed {seed}: both are awaited together");
        land(&mut stages, &fallen[1], 7.0);
        settle(&mut stages);
        assert_eq!(stages.target(&second), [floats(6.0), floats(7.0)].concat(), "seed {seed}");
        assert_eq!(stages.handle_of(&second).lacking(), Some(0));
        leave(stages);
    }
}

#[test]
fn results_that_nobody_wants_are_marked_together() {
    for seed in SEEDS {
        let mut stages = proved(seed, 3, ROOM, false);
        let pushed: Vec<Pushed> =
            (0..3).map(|tensor| stages.push(0, tensor, 0, floats(1.0))).collect();
        let fallen = settle(&mut stages);
        land(&mut stages, &fallen[0], 3.0);
        stages.pass(HELD / 2);
        assert!(!is_told(&stages, &pushed[0]), "seed {seed}: others may come with it");
        stages.pass(HELD);
        stages.turn(Duration::ZERO);
        assert!(is_told(&stages, &pushed[0]), "seed {seed}: it was held for too long");
        // The last ones are marked at once: nothing is under way that they could wait for.
        land(&mut stages, &fallen[1], 4.0);
        land(&mut stages, &fallen[2], 5.0);
        stages.pass(HELD / 2);
        assert!(is_told(&stages, &pushed[1]) && is_told(&stages, &pushed[2]), "seed {seed}");
        settle(&mut stages);
        for (one, value) in pushed.iter().zip([3.0, 4.0, 5.0]) {
            assert_eq!(stages.outcome(0, one).unwrap().unwrap(), floats(value), "seed {seed}");
        }
        leave(stages);
    }
}

#[test]
fn memory_is_filled_again_once_its_result_has_left_it() {
    for seed in SEEDS {
        for is_wanted in [false, true] {
            let mut stages = proved(seed, 1, ROOM, false);
            let first = stages.push(0, 0, 0, floats(1.0));
            let fallen = settle(&mut stages);
            if is_wanted {
                stages.want(&first);
                settle(&mut stages);
            }
            land(&mut stages, &fallen[0], 3.0);
            // It begins while the result is on its way up, or before.
            let second = stages.push(0, 0, 0, floats(9.0));
            let again = settle(&mut stages);
            assert_eq!((again.len(), again[0].round), (1, 3), "seed {seed}");
            assert_eq!(stages.target(&first), floats(3.0), "seed {seed}");
            assert_eq!(read(again[0].staging().slot(), BYTES), floats(9.0), "seed {seed}");
            land(&mut stages, &again[0], 10.0);
            settle(&mut stages);
            assert_eq!(stages.outcome(0, &second).unwrap().unwrap(), floats(10.0));
            leave(stages);
        }
    }
}

#[test]
fn nothing_is_awaited_while_a_push_waits_for_an_earlier_round() {
    for seed in SEEDS {
        let mut stages = proved(seed, 2, ROOM, false);
        let open = stages.push(0, 0, 0, floats(1.0));
        let waits = stages.push(0, 0, 0, floats(2.0));
        let wanted = stages.push(0, 1, 0, floats(3.0));
        stages.want(&wanted);
        let fallen = settle(&mut stages);
        assert_eq!(fallen.iter().map(|one| one.of.tensor).collect::<Vec<_>>(), [0, 1]);
        assert!(!is_told(&stages, &wanted), "seed {seed}: another rank may push them otherwise");
        land(&mut stages, &fallen[0], 4.0);
        let next = settle(&mut stages);
        assert_eq!((next.len(), next[0].of, next[0].round), (1, part(0, 0), 3));
        assert!(is_told(&stages, &open) && is_told(&stages, &wanted), "seed {seed}");
        assert!(!is_told(&stages, &waits), "seed {seed}: nobody wants it");
        land(&mut stages, &next[0], 5.0);
        land(&mut stages, &fallen[1], 6.0);
        settle(&mut stages);
        for (one, value) in [(&open, 4.0), (&waits, 5.0), (&wanted, 6.0)] {
            assert_eq!(stages.outcome(0, one).unwrap().unwrap(), floats(value), "seed {seed}");
        }
        leave(stages);
    }
}

#[test]
fn rounds_in_slots_and_results_that_are_awaited_keep_apart() {
    for seed in SEEDS {
        // The second has no memory of its own.
        let mut stages = proved(seed, 2, ROOM_FOR_ONE, false);
        let awaited = stages.push(0, 0, 0, floats(1.0));
        let fallen = settle(&mut stages);
        stages.want(&awaited);
        settle(&mut stages);
        assert!(is_told(&stages, &awaited), "seed {seed}");
        let in_slot = stages.push(0, 1, 0, floats(2.0));
        assert!(settle(&mut stages).is_empty(), "seed {seed}: it may need what is held back");
        land(&mut stages, &fallen[0], 3.0);
        let begun = settle(&mut stages);
        assert_eq!((begun.len(), begun[0].of), (1, part(1, 0)), "seed {seed}");
        assert_eq!(read(begun[0].slot(), BYTES), floats(2.0), "seed {seed}");

        let behind = stages.push(0, 0, 0, floats(4.0));
        stages.want(&behind);
        let fallen = settle(&mut stages);
        assert!(!is_told(&stages, &behind), "seed {seed}: a round in slots is open");
        stages.tell(0, ToGpu::Sent(begun[0].slot()));
        settle(&mut stages);
        stages.land(0, begun[0].of, &floats(5.0), true);
        settle(&mut stages);
        assert!(is_told(&stages, &behind), "seed {seed}: it is over");
        land(&mut stages, &fallen[0], 6.0);
        settle(&mut stages);
        for (one, value) in [(&awaited, 3.0), (&in_slot, 5.0), (&behind, 6.0)] {
            assert_eq!(stages.outcome(0, one).unwrap().unwrap(), floats(value), "seed {seed}");
        }
        leave(stages);
    }
}

#[test]
fn what_is_sent_is_kept_beside_what_has_come() {
    for seed in SEEDS {
        for keeps in [false, true] {
            let mut stages = proved(seed, 1, ROOM, keeps);
            let pushed = stages.push(0, 0, 0, floats(1.0));
            let fallen = settle(&mut stages);
            let staging = fallen[0].staging();
            assert_eq!(staging.slot() != staging.result(), keeps);
            land(&mut stages, &fallen[0], 2.0);
            settle(&mut stages);
            assert_eq!(stages.outcome(0, &pushed).unwrap().unwrap(), floats(2.0));
            let sent = if keeps { 1.0 } else { 2.0 };
            assert_eq!(read(staging.slot(), BYTES), floats(sent), "seed {seed}");
            leave(stages);
        }
    }
}

#[test]
fn broadcasts_and_what_there_is_no_room_for_use_slots() {
    for seed in SEEDS {
        let mut stages = Stages::staged(seed, 4, ROOM_FOR_ONE, false);
        stages.plan(0, Operation::Broadcast(Rank(0)), &[BYTES]);
        stages.plan(1, Operation::Sum, &[BYTES]);
        stages.plan(2, Operation::Sum, &[BYTES]);
        for tensor in 0..3 {
            stages.push(0, tensor, 0, floats(1.0));
        }
        let is_staged: Vec<(u32, bool)> = settle(&mut stages)
            .iter()
            .map(|one| (one.of.tensor, matches!(one.from, From::Staging(..))))
            .collect();
        let mut sorted = is_staged;
        sorted.sort_unstable();
        assert_eq!(sorted, [(0, false), (1, true), (2, false)], "seed {seed}");
    }
}

#[test]
fn nothing_is_told_ahead_of_a_loop_that_has_ended() {
    for seed in SEEDS {
        let mut stages = proved(seed, 1, ROOM, false);
        let pushed = stages.push(0, 0, 0, floats(1.0));
        settle(&mut stages);
        stages.end(0, Some(Error::Closed(Closed::Left)));
        stages.want(&pushed);
        stages.pass(10 * SOON);
        let outcome = stages.outcome(0, &pushed).expect("it is over");
        assert!(outcome.is_err(), "seed {seed}: nobody brings its result");
        assert!(stages.has_ended(0));
    }
}
