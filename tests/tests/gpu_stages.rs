//! The pipeline of a GPU alone, on a simulated machine: in which order its stages take what is
//! pushed, when slots and memory are somebody else's again, and how it ends.

use bps_engine::base::Operation;
use bps_engine::proto::messages::StalledKey;
use bps_tests::sim::stages::{Pushed, Stages, read};
use bps_worker::Error;
use bps_worker::error::Closed;
use bps_worker::rounds::handover::{From, FromGpu, ToGpu};
use bps_worker::rounds::{PartOf, Slot};
use std::ops::Range;
use std::time::Duration;

const SEEDS: Range<u64> = 0..24;
const BYTES: usize = 64;
/// What the GPU has at most for what it has to do, and what it needs for that, at most.
const DRAIN: Duration = Duration::from_secs(5);
const SOON: Duration = Duration::from_secs(1);
/// After which a round that waits is told.
const STALL: Duration = Duration::from_secs(5);

fn floats(value: f32, bytes: usize) -> Vec<u8> {
    value.to_ne_bytes().repeat(bytes / 4)
}

fn part(tensor: u32, index: u32) -> PartOf {
    PartOf { tensor, index }
}

/// A part that may be sent, and what was in its slot when that was said.
#[derive(Clone)]
struct Fallen {
    of: PartOf,
    round: u64,
    slot: Slot,
    bytes: Vec<u8>,
}

/// Parts that a rank's pipeline gives out until nothing happens any more; it says nothing else.
fn fallen(stages: &mut Stages, rank: usize) -> Vec<Fallen> {
    let mut all = Vec::new();
    while stages.turn(DRAIN) {
        for message in stages.heard(rank) {
            match message {
                FromGpu::Part { of, round, from: From::Slot(slot), encoded: None, .. } => {
                    all.push(Fallen { of, round, slot, bytes: read(slot, BYTES) });
                }
                FromGpu::Land(_) => {}
                other => panic!("it says {other:?}"),
            }
        }
    }
    all
}

/// The one part that a rank's pipeline has given out.
fn one_heard(stages: &mut Stages, rank: usize) -> Fallen {
    match stages.heard(rank)[..] {
        [FromGpu::Part { of, round, from: From::Slot(slot), .. }] => {
            Fallen { of, round, slot, bytes: read(slot, BYTES) }
        }
        ref other => panic!("it says {other:?}"),
    }
}

/// The one part that a rank's pipeline gives out.
fn one_fallen(stages: &mut Stages, rank: usize) -> Fallen {
    let all = fallen(stages, rank);
    assert_eq!(all.len(), 1, "one part falls");
    all[0].clone()
}

fn tensors(fallen: &[Fallen]) -> Vec<u32> {
    fallen.iter().map(|one| one.of.tensor).collect()
}

/// All pipelines end in good order, at once, since nothing is under way.
fn leave(mut stages: Stages, ranks: usize) {
    (0..ranks).for_each(|rank| stages.end(rank, None));
    stages.pass(SOON);
    assert!((0..ranks).all(|rank| stages.has_ended(rank)));
}

/// Why a push has failed.
fn why(stages: &Stages, rank: usize, pushed: &Pushed) -> String {
    match stages.outcome(rank, pushed) {
        Some(Err(error)) => error.to_string(),
        other => panic!("it has not failed: {other:?}"),
    }
}

#[test]
fn the_most_urgent_parts_take_the_slots_that_come_back() {
    for seed in SEEDS {
        let mut stages = Stages::new(seed, 1, 2, true);
        for tensor in 0..6 {
            stages.plan(tensor, Operation::Sum, &[BYTES]);
        }
        let push = |stages: &mut Stages, tensor: u32, priority| {
            stages.push(0, tensor, priority, floats(1.0 + tensor as f32, BYTES))
        };
        push(&mut stages, 0, 0);
        push(&mut stages, 1, 0);
        let mut slots = fallen(&mut stages, 0);
        assert_eq!(tensors(&slots), [0, 1]);
        for (tensor, priority) in [(2, 0), (3, 5), (4, 9), (5, 5)] {
            push(&mut stages, tensor, priority);
        }
        assert!(fallen(&mut stages, 0).is_empty(), "no slot is free");
        for tensor in [4, 3, 5, 2] {
            stages.tell(0, ToGpu::Sent(slots.remove(0).slot));
            let next = one_fallen(&mut stages, 0);
            assert_eq!((next.of, next.round), (part(tensor, 0), 1), "seed {seed}");
            assert_eq!(next.bytes, floats(1.0 + tensor as f32, BYTES));
            slots.push(next);
        }
        leave(stages, 1);
    }
}

#[test]
fn a_part_is_given_out_when_its_gradient_is_complete_and_in_the_slot() {
    for seed in SEEDS {
        let mut stages = Stages::new(seed, 1, 40, true);
        for tensor in 0..40 {
            stages.plan(tensor, Operation::Sum, &[BYTES]);
            stages.push(0, tensor, 0, floats(tensor as f32, BYTES));
        }
        let mut all = fallen(&mut stages, 0);
        all.sort_by_key(|one| one.of);
        for (one, tensor) in all.iter().zip(0..) {
            assert_eq!(one.of, part(tensor, 0));
            assert_eq!(one.bytes, floats(tensor as f32, BYTES), "seed {seed}");
        }
        assert_eq!(all.len(), 40);
        leave(stages, 1);
    }
}

#[test]
fn a_slot_is_its_parts_until_the_transport_is_done_with_it() {
    for seed in SEEDS {
        let mut stages = Stages::new(seed, 1, 1, true);
        for tensor in 0..2 {
            stages.plan(tensor, Operation::Sum, &[BYTES]);
            stages.push(0, tensor, 0, floats(1.0 + tensor as f32, BYTES));
        }
        let first = one_fallen(&mut stages, 0);
        assert_eq!(read(first.slot, BYTES), floats(1.0, BYTES), "nobody else has it yet");
        stages.tell(0, ToGpu::Sent(first.slot));
        let second = one_fallen(&mut stages, 0);
        assert_eq!((second.slot, second.of), (first.slot, part(1, 0)));
        assert_eq!(second.bytes, floats(2.0, BYTES));
        leave(stages, 1);
    }
}

#[test]
fn a_slot_that_was_landed_in_is_free_once_the_result_is_out_of_it() {
    for seed in SEEDS {
        let mut stages = Stages::new(seed, 1, 8, true);
        stages.plan(0, Operation::Sum, &[BYTES, BYTES]);
        let pushed = stages.push(0, 0, 0, floats(1.0, 2 * BYTES));
        assert_eq!(fallen(&mut stages, 0).len(), 2);
        let (before, mut rising) = (stages.free(0), 2);
        // In whichever order results come.
        let order = [seed % 2, 1 - seed % 2].map(|index| u32::try_from(index).expect("0 or 1"));
        for index in order {
            stages.land(0, part(0, index), &floats(2.0 + index as f32, BYTES), true);
        }
        assert_eq!(stages.free(0), before - 2);
        while stages.turn(DRAIN) {
            for message in stages.heard(0) {
                let FromGpu::Land(_) = message else { panic!("it says {message:?}") };
                rising -= 1;
            }
            // It is told late rather than early: the machine has poisoned what is not there.
            if rising == 0 {
                let whole = [floats(2.0, BYTES), floats(3.0, BYTES)].concat();
                assert_eq!(stages.target(&pushed), whole, "seed {seed}");
            }
        }
        assert_eq!((stages.free(0), rising), (before, 0));
        leave(stages, 1);
    }
}

#[test]
fn a_caller_is_told_once_all_results_are_there_and_the_lanes_are_done() {
    for seed in SEEDS {
        let mut stages = Stages::new(seed, 1, 8, true);
        stages.plan(0, Operation::Sum, &[BYTES, BYTES]);
        let pushed = stages.push(0, 0, 0, floats(1.0, 2 * BYTES));
        fallen(&mut stages, 0);
        // The lanes may have the bytes of a part when its result is there, or not.
        stages.land(0, part(0, 0), &floats(2.0, BYTES), false);
        stages.settle();
        stages.land(0, part(0, 1), &floats(3.0, BYTES), true);
        stages.settle();
        assert!(stages.outcome(0, &pushed).is_none(), "a part of it is being sent");
        stages.tell(0, ToGpu::Over(part(0, 0)));
        let whole = [floats(2.0, BYTES), floats(3.0, BYTES)].concat();
        let mut is_told = false;
        while stages.turn(DRAIN) {
            if let Some(result) = stages.outcome(0, &pushed) {
                assert_eq!(result.expect("it came through"), whole, "seed {seed}");
                is_told = true;
            }
        }
        assert!(is_told);
        leave(stages, 1);
    }
}

#[test]
fn rounds_of_a_tensor_follow_one_another() {
    for seed in SEEDS {
        let mut stages = Stages::new(seed, 1, 8, true);
        stages.plan(0, Operation::Sum, &[BYTES]);
        let pushed: Vec<Pushed> =
            [1.0, 2.0, 3.0].map(|value| stages.push(0, 0, 0, floats(value, BYTES))).into();
        for (round, pushed) in (1u64..).zip(&pushed) {
            let next = one_fallen(&mut stages, 0);
            let value = round as f32;
            assert_eq!((next.round, next.bytes), (round, floats(value, BYTES)), "seed {seed}");
            assert!(stages.outcome(0, pushed).is_none());
            stages.tell(0, ToGpu::Sent(next.slot));
            stages.land(0, next.of, &floats(10.0 * value, BYTES), true);
            // The next one falls as this one rises.
            stages.turn(DRAIN);
        }
        stages.settle();
        for (pushed, value) in pushed.iter().zip([10.0, 20.0, 30.0]) {
            let result = stages.outcome(0, pushed).expect("it is over").expect("it came through");
            assert_eq!(result, floats(value, BYTES), "seed {seed}");
        }
        leave(stages, 1);
    }
}

/// What the pipeline of the only rank has done with the one tensor that was pushed.
#[derive(Debug, PartialEq)]
enum Done {
    /// A round of it was given out.
    Round(u64),
    /// What it keeps was multiplied.
    Scaled(f32),
}

/// Lets everything happen that is under way, and ends the rounds that it gives out.
fn rounds_and_factors(stages: &mut Stages) -> Vec<Done> {
    let mut all = Vec::new();
    let mut goes_on = true;
    while goes_on {
        goes_on = stages.turn(DRAIN);
        for message in stages.heard(0) {
            match message {
                FromGpu::Part { of, round, from: From::Slot(slot), .. } => {
                    all.push(Done::Round(round));
                    stages.tell(0, ToGpu::Sent(slot));
                    stages.land(0, of, &floats(2.0, BYTES), true);
                }
                FromGpu::ScaleResidues { tensor: 0, factor } => all.push(Done::Scaled(factor)),
                FromGpu::Land(_) => {}
                other => panic!("it says {other:?}"),
            }
        }
    }
    all
}

#[test]
fn a_factor_takes_effect_between_the_pushes_before_and_behind_it() {
    const IN_ORDER: [Done; 6] = [
        Done::Scaled(2.0),
        Done::Round(1),
        Done::Round(2),
        Done::Scaled(4.0),
        Done::Round(3),
        Done::Scaled(8.0),
    ];
    for seed in SEEDS {
        // The plan comes ahead of all of it, at some place in it, or behind it.
        for place in 0..=IN_ORDER.len() {
            let mut stages = Stages::new(seed, 1, 8, true);
            let mut pushed = Vec::new();
            let mut done = Vec::new();
            for at in 0..=IN_ORDER.len() {
                if at == place {
                    stages.plan(0, Operation::Sum, &[BYTES]);
                }
                match IN_ORDER.get(at) {
                    Some(Done::Round(_)) => pushed.push(stages.push(0, 0, 0, floats(1.0, BYTES))),
                    Some(&Done::Scaled(factor)) => {
                        stages.tell(0, ToGpu::ScaleResidues { tensors: [0].into(), factor });
                    }
                    None => {}
                }
                if seed % 2 == 0 && stages.turn(Duration::ZERO) {
                    done.extend(rounds_and_factors(&mut stages));
                }
            }
            done.extend(rounds_and_factors(&mut stages));
            assert_eq!(done, IN_ORDER, "seed {seed}, planned at {place}");
            for pushed in &pushed {
                assert_eq!(stages.outcome(0, pushed).unwrap().unwrap(), floats(2.0, BYTES));
            }
            leave(stages, 1);
        }
    }
}

#[test]
fn what_comes_for_a_tensor_that_is_never_planned_ends_with_the_job() {
    for seed in SEEDS {
        let mut stages = Stages::new(seed, 1, 2, true);
        let first = stages.push(0, 0, 0, floats(1.0, BYTES));
        stages.tell(0, ToGpu::ScaleResidues { tensors: [0].into(), factor: 2.0 });
        let second = stages.push(0, 0, 0, floats(1.0, BYTES));
        assert!(fallen(&mut stages, 0).is_empty());
        stages.end(0, None);
        stages.pass(SOON);
        assert!(stages.has_ended(0), "seed {seed}");
        for one in [&first, &second] {
            assert_eq!(why(&stages, 0, one), Error::Closed(Closed::Left).to_string());
        }
    }
}

#[test]
fn a_gpu_that_fails_is_told_once_and_its_pushes_fail_with_the_job() {
    for seed in SEEDS {
        let mut stages = Stages::new(seed, 1, 8, true);
        stages.plan(0, Operation::Sum, &[BYTES]);
        stages.plan(1, Operation::Sum, &[BYTES]);
        let pushed = [0, 1].map(|tensor| stages.push(0, tensor, 0, floats(1.0, BYTES)));
        stages.fail(0);
        stages.pass(SOON);
        let heard = stages.heard(0);
        let told = heard.iter().filter_map(|message| match message {
            FromGpu::Failed { source } => Some(source.to_string()),
            _ => None,
        });
        let told: Vec<String> = told.collect();
        assert_eq!(told.len(), 1, "seed {seed}: {heard:?}");
        // Their memory is not their callers' before the pipeline has ended.
        assert!(pushed.iter().all(|one| stages.outcome(0, one).is_none()));
        let later = stages.push_broken(0, 0);
        stages.pass(SOON);
        assert!(stages.heard(0).is_empty(), "nothing moves any more");
        stages.end(0, None);
        stages.pass(SOON);
        assert!(stages.has_ended(0), "what has failed is not waited for");
        for one in pushed.iter().chain([&later]) {
            let why = why(&stages, 0, one);
            assert!(why.contains(&told[0]), "seed {seed}: `{why}` of `{}`", told[0]);
        }
    }
}

#[test]
fn what_is_under_way_at_the_end_is_waited_for() {
    for seed in SEEDS {
        let mut stages = Stages::new(seed, 1, 2, true);
        for tensor in 0..4 {
            stages.plan(tensor, Operation::Sum, &[BYTES]);
        }
        let pushed: Vec<Pushed> =
            (0..4).map(|tensor| stages.push(0, tensor, 0, floats(1.0, BYTES))).collect();
        // Somewhere between a kernel of the framework's and a slot; and one waits for another.
        let waits = stages.push(0, 0, 0, floats(1.0, BYTES));
        for _ in 0..seed {
            stages.turn(DRAIN);
        }
        stages.end(0, None);
        stages.pass(SOON);
        assert!(stages.has_ended(0), "seed {seed}");
        for one in pushed.iter().chain([&waits]) {
            assert_eq!(why(&stages, 0, one), Error::Closed(Closed::Left).to_string());
        }
    }
}

#[test]
fn an_end_waits_for_a_gpu_that_hangs_so_long_and_no_longer() {
    for seed in SEEDS {
        let mut stages = Stages::new(seed, 1, 2, true);
        stages.plan(0, Operation::Sum, &[BYTES]);
        let pushed = stages.push(0, 0, 0, floats(1.0, BYTES));
        // The copy down, or up, hangs.
        if seed % 2 == 1 {
            fallen(&mut stages, 0);
            stages.land(0, part(0, 0), &floats(2.0, BYTES), false);
            stages.turn(Duration::ZERO);
        } else {
            while !stages.is_copying(0) {
                assert!(stages.turn(DRAIN), "it copies before it comes to rest");
            }
        }
        assert!(stages.is_copying(0), "seed {seed}");
        stages.hang(0);
        stages.end(0, None);
        stages.pass(DRAIN - SOON);
        assert!(!stages.has_ended(0), "seed {seed}: the GPU may write there");
        assert!(stages.outcome(0, &pushed).is_none());
        stages.pass(2 * SOON);
        assert!(stages.has_ended(0), "seed {seed}");
        // Its memory is not to be looked at: the GPU has it.
        assert!(stages.handle_of(&pushed).wait(Some(Duration::ZERO)).is_err());
    }
}

#[test]
fn ranks_that_disagree_end_one_tensor_and_no_other() {
    for seed in SEEDS {
        let mut stages = Stages::new(seed, 1, 8, true);
        for tensor in 0..2 {
            stages.plan(tensor, Operation::Sum, &[BYTES]);
        }
        let push = |stages: &mut Stages, tensor| stages.push(0, tensor, 0, floats(1.0, BYTES));
        let pushed = [push(&mut stages, 0), push(&mut stages, 0), push(&mut stages, 1)];
        for _ in 0..seed {
            stages.turn(DRAIN);
        }
        let error = Error::Closed(Closed::Left);
        stages.tell(0, ToGpu::Poisoned { tensor: 0, error: error.clone() });
        while stages.turn(DRAIN) {
            // Its caller gives the memory back as soon as it is told, which the machine watches.
            pushed[..2].iter().for_each(|one| drop(stages.outcome(0, one)));
        }
        let later = push(&mut stages, 0);
        stages.settle();
        for one in [&pushed[0], &pushed[1], &later] {
            assert_eq!(why(&stages, 0, one), error.to_string(), "seed {seed}");
        }
        stages.land(0, part(1, 0), &floats(4.0, BYTES), true);
        stages.settle();
        let result = stages.outcome(0, &pushed[2]).expect("it is over").expect("it came through");
        assert_eq!(result, floats(4.0, BYTES));
        leave(stages, 1);
    }
}

#[test]
fn one_host_without_servers_sums_with_one_collective_and_nothing_goes_to_lanes() {
    for (seed, ranks) in SEEDS.zip([2usize, 3].into_iter().cycle()) {
        for (operation, divisor) in [(Operation::Sum, 1.0), (Operation::Average, ranks as f32)] {
            let mut stages = Stages::new(seed, u32::try_from(ranks).expect("few"), 2, false);
            stages.plan(0, operation, &[BYTES, BYTES]);
            let pushed: Vec<Pushed> = (0..ranks)
                .map(|rank| stages.push(rank, 0, 0, floats(12.0 * (1 + rank) as f32, 2 * BYTES)))
                .collect();
            stages.settle();
            let sum = 12.0 * (1..=ranks).sum::<usize>() as f32 / divisor;
            for (rank, one) in pushed.iter().enumerate() {
                let result = stages.outcome(rank, one).expect("it is over").expect("a result");
                assert_eq!(result, floats(sum, 2 * BYTES), "seed {seed}");
                assert!(stages.heard(rank).is_empty());
            }
            leave(stages, ranks);
        }
    }
}

#[test]
fn ranks_of_a_host_reduce_before_servers_and_gather_behind_them() {
    for seed in SEEDS {
        let mut stages = Stages::new(seed, 2, 4, true);
        // A row of two parts, and one of its own that the first rank holds.
        stages.plan(0, Operation::Sum, &[BYTES, BYTES, BYTES]);
        let pushed = [3.0, 4.0].map(|value| (value, 3 * BYTES));
        let first = stages.push(0, 0, 0, floats(pushed[0].0, pushed[0].1));
        assert!(fallen(&mut stages, 0).is_empty(), "seed {seed}: the other has not pushed it");
        let second = stages.push(1, 0, 0, floats(pushed[1].0, pushed[1].1));
        let mut held = [Vec::new(), Vec::new()];
        while stages.turn(DRAIN) {
            for (rank, held) in held.iter_mut().enumerate() {
                for message in stages.heard(rank) {
                    let FromGpu::Part { of, from: From::Slot(slot), .. } = message else {
                        panic!("it says {message:?}")
                    };
                    assert_eq!(read(slot, BYTES), floats(7.0, BYTES), "seed {seed}");
                    held.push(of.index);
                }
            }
        }
        held.iter_mut().for_each(|held| held.sort_unstable());
        assert_eq!(held, [vec![0, 2], vec![1]], "each rank sends what it holds");
        for (rank, index) in [(0, 0), (1, 1)] {
            stages.land(rank, part(0, index), &floats(20.0 + index as f32, BYTES), true);
        }
        stages.settle();
        let outcomes = [stages.outcome(0, &first), stages.outcome(1, &second)];
        assert!(outcomes.iter().all(Option::is_none), "a result is not there");
        stages.land(0, part(0, 2), &floats(22.0, BYTES), true);
        stages.settle();
        let whole = [20.0, 21.0, 22.0].map(|value| floats(value, BYTES)).concat();
        for (rank, one) in [first, second].iter().enumerate() {
            let result = stages.outcome(rank, one).expect("it is over").expect("a result");
            assert_eq!(result, whole, "seed {seed}");
        }
        leave(stages, 2);
    }
}

#[test]
fn an_urgent_tensor_overtakes_those_that_the_host_has_not_reduced() {
    for seed in SEEDS {
        let mut stages = Stages::new(seed, 2, 1, true);
        for tensor in 0..5 {
            stages.plan(tensor, Operation::Sum, &[BYTES, BYTES]);
        }
        let push = |stages: &mut Stages, tensor: u32, priority| {
            for rank in 0..2 {
                stages.push(rank, tensor, priority, floats(1.0 + tensor as f32, 2 * BYTES));
            }
            stages.settle();
        };
        // The first has the only slot, and the second is reduced and waits for it.
        for (tensor, priority) in [(0, 0), (1, 0), (2, 0), (3, 9), (4, 5)] {
            push(&mut stages, tensor, priority);
        }
        for tensor in [0, 1, 3, 4, 2] {
            let held = [0, 1].map(|rank| one_heard(&mut stages, rank));
            for (rank, one) in held.iter().enumerate() {
                let index = u32::try_from(rank).expect("few");
                assert_eq!(one.of, part(tensor, index), "seed {seed}");
                assert_eq!(one.bytes, floats(2.0 * (1.0 + tensor as f32), BYTES));
                stages.tell(rank, ToGpu::Sent(one.slot));
            }
            stages.settle();
        }
        leave(stages, 2);
    }
}

#[test]
fn a_round_that_waits_for_a_rank_of_the_host_names_it() {
    for (seed, first) in SEEDS.zip([0, 1].into_iter().cycle()) {
        let mut stages = Stages::new(seed, 2, 4, false);
        stages.plan(0, Operation::Sum, &[BYTES]);
        let missing = 1 - first;
        let mut pushed = vec![(first, stages.push(first, 0, 0, floats(1.0, BYTES)))];
        stages.pass(STALL - SOON);
        assert!(stages.heard(0).is_empty(), "seed {seed}: nobody has waited for so long");
        stages.pass(2 * SOON);
        let told = stalls(&mut stages);
        let (key, round, rank) = told.first().expect("it is told")[0];
        assert_eq!((key, round, rank as usize), (0, 1, missing), "seed {seed}");
        assert!(stages.heard(1).is_empty(), "who gives the order tells");
        pushed.push((missing, stages.push(missing, 0, 0, floats(2.0, BYTES))));
        stages.pass(SOON);
        assert_eq!(stalls(&mut stages), [[]], "seed {seed}: that it goes on is told once");
        for (rank, one) in &pushed {
            let result = stages.outcome(*rank, one).expect("it is over").expect("a result");
            assert_eq!(result, floats(3.0, BYTES));
        }
        leave(stages, 2);
    }
}

/// What the first rank has told of rounds that wait: each key, its round and the rank that is
/// missing.
fn stalls(stages: &mut Stages) -> Vec<Vec<(u64, u64, u32)>> {
    let told = stages.heard(0).into_iter().map(|message| {
        let FromGpu::Stalled { keys } = message else { panic!("it says {message:?}") };
        let one = |key: &StalledKey| (key.key.0, key.round, key.missing[0].0);
        keys.iter().map(one).collect()
    });
    told.collect()
}

#[test]
fn a_collective_of_a_rank_that_fails_ends_on_all_ranks_of_the_host() {
    for seed in SEEDS {
        let mut stages = Stages::new(seed, 2, 4, seed % 2 == 0);
        stages.plan(0, Operation::Sum, &[BYTES, BYTES]);
        let pushed = [0, 1].map(|rank| stages.push(rank, 0, 0, floats(1.0, 2 * BYTES)));
        stages.fail(1);
        stages.pass(SOON);
        let is_told = |message: &FromGpu| matches!(message, FromGpu::Failed { .. });
        assert_eq!(stages.heard(1).iter().filter(|one| is_told(one)).count(), 1, "seed {seed}");
        // The job learns of it from that rank, and both NIC loops end of it.
        let why_over = Error::Closed(Closed::Left);
        for rank in 0..2 {
            stages.end(rank, Some(why_over.clone()));
        }
        stages.pass(DRAIN + SOON);
        assert!(stages.has_ended(0) && stages.has_ended(1), "seed {seed}");
        for (rank, one) in pushed.iter().enumerate() {
            // All of it may have been enqueued: then it has its result, unless the abort took that.
            if let Some(Ok(result)) = stages.outcome(rank, one) {
                let is_whole = result == floats(2.0, 2 * BYTES);
                assert!(is_whole || stages.is_lost(rank, one), "seed {seed}: {result:?}");
                continue;
            }
            assert_eq!(why(&stages, rank, one), why_over.to_string(), "seed {seed}");
        }
    }
}
