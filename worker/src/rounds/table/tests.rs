//! The table of rounds against lanes that carry nothing, and against a model of it.

use super::*;
use crate::Handle;
use crate::base::error::Refusal;
use crate::rounds::PlanPart;
use bps_engine::base::{DType, Operation, Rank};
use bps_engine::proto::uneven::Pushes;
use bps_engine::transport::LaneId;
use bps_engine::transport::sim::Random;
use std::collections::BTreeMap;

/// Lanes that carry nothing: parts are over when the test says so.
#[derive(Default)]
struct Lanes {
    /// Parts with a round open, and that round.
    open: BTreeMap<PartId, u64>,
    abandoned: Vec<PartId>,
    /// The round and priority of each push, in order.
    pushed: Vec<(PartId, u64, i64)>,
}

impl Parts for Lanes {
    fn push(&mut self, part: PartId, round: u64, push: &PartPush) {
        assert!(!self.abandoned.contains(&part), "{part:?} was given up");
        assert_eq!(self.open.insert(part, round), None, "{part:?} has two rounds");
        self.pushed.push((part, round, push.priority));
    }

    fn abandon(&mut self, part: PartId) {
        assert!(!self.abandoned.contains(&part), "{part:?} was given up before");
        self.abandoned.push(part);
    }
}

/// Bytes of each tensor that has some, which any number of parts up to 8 share in whole elements.
const BYTES: usize = 840 * 4;

fn plan(name: &str, parts: usize, device: bool) -> Arc<Plan> {
    let bytes = BYTES / parts.max(1);
    let part = |index: usize| PlanPart {
        key: Key(index as u64),
        offset: bytes * index,
        bytes,
        core: Some(LaneId(0)),
        owner: None,
        owner_rank: Rank(0),
        holder: Rank(0),
    };
    Arc::new(Plan {
        name: name.into(),
        dtype: DType::F32,
        operation: Operation::Sum,
        device,
        among: None,
        receiver: None,
        encoding: None,
        store: None,
        parts: (0..parts).map(part).collect(),
    })
}

fn push(priority: i64) -> (Push, Handle) {
    let task = Arc::new(Task::default());
    let handle = Handle::of(&task);
    (Push { memory: Memory::nowhere(BYTES), priority, act: Act::NONE, task }, handle)
}

fn outcome(handle: &Handle) -> Option<Result<(), Error>> {
    handle.is_told().then(|| handle.wait(None).map(drop))
}

fn poisoned() -> Error {
    Refusal::Undeclared { tensor: "two shapes".into() }.into()
}

/// All open parts of a tensor of so many parts from this number on are over.
fn end_round(rounds: &mut Rounds, lanes: &mut Lanes, tensor: u32, first: u32, parts: u32) {
    for part in first..first + parts {
        assert!(lanes.open.remove(&PartId(part)).is_some(), "part {part} is open");
        let done = rounds.part_over(tensor, Lacks::NOTHING);
        assert_eq!(done.is_some(), part == first + parts - 1, "the last part ends the round");
        if let Some(Done { task, result, .. }) = done {
            task.finish_now(result);
            rounds.next(tensor, lanes);
        }
    }
}

#[test]
fn pushes_of_a_tensor_follow_one_another() {
    let (mut rounds, mut lanes) = (Rounds::default(), Lanes::default());
    rounds.plan(0, plan("a", 2, false), PartId(5));
    let (first, second) = (push(1), push(2));
    rounds.push(0, first.0, &mut lanes);
    rounds.push(0, second.0, &mut lanes);
    assert_eq!(lanes.pushed, [(PartId(5), 1, 1), (PartId(6), 1, 1)]);
    assert!(rounds.is_open() && outcome(&first.1).is_none());
    end_round(&mut rounds, &mut lanes, 0, 5, 2);
    assert_eq!((outcome(&first.1), outcome(&second.1)), (Some(Ok(())), None));
    assert_eq!(lanes.pushed[2..], [(PartId(5), 2, 2), (PartId(6), 2, 2)]);
    end_round(&mut rounds, &mut lanes, 0, 5, 2);
    assert_eq!(outcome(&second.1), Some(Ok(())));
    assert!(!rounds.is_open());
}

#[test]
fn what_can_not_be_pushed_is_told_to_its_task() {
    let (mut rounds, mut lanes) = (Rounds::default(), Lanes::default());
    rounds.plan(0, plan("empty", 0, false), PartId(0));
    rounds.plan(1, plan("there", 1, true), PartId(0));
    for (tensor, text) in [(1, "declared as a tensor of the GPU"), (2, "was not declared")] {
        let (push, handle) = push(0);
        rounds.push(tensor, push, &mut lanes);
        let error = outcome(&handle).expect("at once").unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
    }
    let (push, handle) = push(0);
    rounds.push(0, push, &mut lanes);
    assert_eq!(outcome(&handle), Some(Ok(())), "nothing to carry");
    assert!(lanes.pushed.is_empty() && !rounds.is_open());
}

#[test]
fn rounds_on_which_the_ranks_agreed_end_well_and_the_rest_fails() {
    let (mut rounds, mut lanes) = (Rounds::default(), Lanes::default());
    rounds.plan(0, plan("a", 1, false), PartId(0));
    let pushes: Vec<_> = (0..3).map(push).collect();
    let handles: Vec<Handle> = pushes
        .into_iter()
        .map(|(push, handle)| {
            rounds.push(0, push, &mut lanes);
            handle
        })
        .collect();
    let nobody = |_: u32| panic!("it is on the host");
    rounds.poison("b", &[(0, 0)], &poisoned(), &mut lanes, nobody);
    rounds.poison("a", &[(0, 2), (7, 0)], &poisoned(), &mut lanes, nobody);
    end_round(&mut rounds, &mut lanes, 0, 0, 1);
    end_round(&mut rounds, &mut lanes, 0, 0, 1);
    let outcomes: Vec<_> = handles.iter().map(outcome).collect();
    assert_eq!(outcomes, [Some(Ok(())), Some(Ok(())), Some(Err(poisoned()))]);
    assert_eq!(lanes.abandoned, [PartId(0)]);
    assert_eq!(rounds.part(PartOf { tensor: 0, index: 0 }), None);
    let (late, handle) = push(0);
    rounds.push(0, late, &mut lanes);
    assert_eq!(outcome(&handle), Some(Err(poisoned())));
}

/// A tensor as the model has it.
#[derive(Default)]
struct Model {
    parts: u32,
    first: u32,
    /// Rounds begun.
    round: u64,
    /// Handles of pushes that are not over: the first is under way.
    pending: VecDeque<Handle>,
    /// Parts of the round under way that are not over.
    open: Vec<u32>,
    agreed: Option<u64>,
    is_poisoned: bool,
}

impl Model {
    /// What must be after each step: the first pending push is under way, if the rounds allow.
    fn settle(&mut self) {
        if self.open.is_empty()
            && !self.is_poisoned
            && self.agreed.is_some_and(|agreed| self.round >= agreed)
        {
            self.is_poisoned = true;
        }
        if self.is_poisoned && self.open.is_empty() {
            self.pending.clear();
        }
        if self.open.is_empty() && !self.pending.is_empty() {
            self.round += 1;
            self.open = (self.first..self.first + self.parts).collect();
        }
    }
}

#[test]
fn any_order_of_pushes_ends_and_disagreements_is_as_in_the_model() {
    for seed in 0..2000 {
        let mut random = Random::new(seed);
        let (mut rounds, mut lanes) = (Rounds::default(), Lanes::default());
        let (mut models, mut first) = (Vec::new(), 0u32);
        let mut finished: Vec<(Handle, Result<(), Error>)> = Vec::new();
        for tensor in 0..1 + u32::try_from(random.index(3)).unwrap() {
            let parts = 1 + random.index(3);
            rounds.plan(tensor, plan(&format!("t{tensor}"), parts, false), PartId(first));
            let parts = u32::try_from(parts).unwrap();
            models.push(Model { parts, first, ..Model::default() });
            first += parts;
        }
        for _ in 0..40 {
            let tensor = random.index(models.len());
            let (id, model) = (u32::try_from(tensor).unwrap(), &mut models[tensor]);
            match random.index(10) {
                0..4 => {
                    let (push, handle) = push(0);
                    rounds.push(id, push, &mut lanes);
                    if model.is_poisoned {
                        finished.push((handle, Err(poisoned())));
                    } else {
                        model.pending.push_back(handle);
                    }
                }
                4..9 if !model.open.is_empty() => {
                    let part = model.open.swap_remove(random.index(model.open.len()));
                    assert_eq!(lanes.open.remove(&PartId(part)), Some(model.round), "seed {seed}");
                    let done = rounds.part_over(id, Lacks::NOTHING);
                    assert_eq!(done.is_some(), model.open.is_empty(), "seed {seed}");
                    if let Some(Done { task, result, round, .. }) = done {
                        assert_eq!(round, model.round, "seed {seed}");
                        let handle = model.pending.pop_front().expect("one is under way");
                        task.finish_now(result);
                        let expected = if model.is_poisoned { Err(poisoned()) } else { Ok(()) };
                        finished.push((handle, expected));
                        rounds.next(id, &mut lanes);
                    }
                }
                9 if model.agreed.is_none() && random.once_in(4) => {
                    let agreed = random.below(4);
                    model.agreed = Some(agreed);
                    let name = format!("t{tensor}");
                    rounds.poison(&name, &[(id, agreed)], &poisoned(), &mut lanes, |_| ());
                    // A round beyond those agreed on is given up where it stands.
                    model.is_poisoned = model.round > agreed;
                }
                _ => {}
            }
            if model.is_poisoned {
                let keep = usize::from(!model.open.is_empty());
                let failed = model.pending.split_off(keep.min(model.pending.len()));
                finished.extend(failed.into_iter().map(|handle| (handle, Err(poisoned()))));
            } else if model.open.is_empty() && model.agreed.is_some_and(|most| model.round >= most)
            {
                let failed = std::mem::take(&mut model.pending);
                finished.extend(failed.into_iter().map(|handle| (handle, Err(poisoned()))));
            }
            model.settle();
            for (handle, expected) in finished.drain(..) {
                assert_eq!(outcome(&handle), Some(expected), "seed {seed}");
            }
            let is_untold = |handle: &Handle| outcome(handle).is_none();
            assert!(models.iter().all(|model| model.pending.iter().all(is_untold)), "seed {seed}");
            let open: Vec<PartId> = lanes.open.keys().copied().collect();
            let mut expected: Vec<PartId> =
                models.iter().flat_map(|model| model.open.iter().copied().map(PartId)).collect();
            expected.sort_unstable();
            assert_eq!(open, expected, "seed {seed}");
            assert_eq!(rounds.is_open(), !open.is_empty(), "seed {seed}");
        }
    }
}

#[test]
fn other_parts_begin_after_the_round_that_was_agreed() {
    let (mut rounds, mut lanes) = (Rounds::default(), Lanes::default());
    rounds.plan(0, plan("a", 2, false), PartId(0));
    rounds.plan(1, plan("b", 1, false), PartId(2));
    let handles: Vec<Handle> = (0..4)
        .map(|_| {
            let (push, handle) = push(0);
            rounds.push(0, push, &mut lanes);
            handle
        })
        .collect();
    end_round(&mut rounds, &mut lanes, 0, 0, 2);
    // The second round is under way; the third and the fourth wait.
    assert_eq!(rounds.prepare(0, plan("a", 3, false), PartId(3), &mut lanes), Some(2));
    assert_eq!(rounds.prepare(1, plan("b", 2, false), PartId(6), &mut lanes), Some(0));
    assert_eq!(rounds.prepare(7, plan("c", 2, false), PartId(8), &mut lanes), None);
    lanes.pushed.clear();
    end_round(&mut rounds, &mut lanes, 0, 0, 2);
    rounds.push(1, push(0).0, &mut lanes);
    assert!(lanes.pushed.is_empty() && rounds.is_open(), "rounds are held");
    // Another rank has begun the third round with the old parts. `b` keeps its own.
    let agreed = [Pushes { first: 0, tensors: 1, pushes: 3 }];
    assert_eq!(rounds.change(&agreed, &mut lanes), Ok(()));
    assert_eq!(lanes.pushed, [(PartId(0), 3, 0), (PartId(1), 3, 0), (PartId(2), 1, 0)]);
    assert_eq!(lanes.abandoned, [PartId(6), PartId(7)]);
    lanes.pushed.clear();
    end_round(&mut rounds, &mut lanes, 0, 0, 2);
    let third: Vec<(PartId, u64, i64)> = (3..6).map(|part| (PartId(part), 1, 0)).collect();
    assert_eq!(lanes.pushed, third, "parts count their rounds from their cut");
    end_round(&mut rounds, &mut lanes, 0, 3, 3);
    end_round(&mut rounds, &mut lanes, 1, 2, 1);
    assert!(handles.iter().all(|handle| outcome(handle) == Some(Ok(()))));
    assert!(!rounds.is_open());
}

#[test]
fn parts_that_come_too_late_are_an_error_and_change_nothing() {
    let (mut rounds, mut lanes) = (Rounds::default(), Lanes::default());
    rounds.plan(0, plan("a", 1, false), PartId(0));
    for _ in 0..2 {
        rounds.push(0, push(0).0, &mut lanes);
        end_round(&mut rounds, &mut lanes, 0, 0, 1);
    }
    assert_eq!(rounds.prepare(0, plan("a", 2, false), PartId(1), &mut lanes), Some(2));
    let agreed = [Pushes { first: 0, tensors: 1, pushes: 1 }];
    let error = rounds.change(&agreed, &mut lanes).unwrap_err().to_string();
    assert!(error.contains("tensor `a` after round 1, and round 2 has begun"), "{error}");
    assert_eq!(lanes.abandoned, [PartId(1), PartId(2)]);
    lanes.pushed.clear();
    rounds.push(0, push(0).0, &mut lanes);
    assert_eq!(lanes.pushed, [(PartId(0), 3, 0)]);
}

#[test]
fn a_tensor_that_ends_while_it_is_held_gives_up_both_cuts() {
    let (mut rounds, mut lanes) = (Rounds::default(), Lanes::default());
    rounds.plan(0, plan("a", 1, false), PartId(0));
    rounds.prepare(0, plan("a", 2, false), PartId(1), &mut lanes);
    let (push, handle) = push(0);
    rounds.push(0, push, &mut lanes);
    rounds.poison("a", &[(0, 0)], &poisoned(), &mut lanes, |_| {});
    assert_eq!(outcome(&handle), Some(Err(poisoned())));
    assert_eq!(lanes.abandoned, [PartId(1), PartId(2), PartId(0)]);
    let agreed = [Pushes { first: 0, tensors: 1, pushes: 0 }];
    assert_eq!(rounds.change(&agreed, &mut lanes), Ok(()));
    assert_eq!(rounds.prepare(0, plan("a", 1, false), PartId(3), &mut lanes), None);
    assert_eq!(lanes.abandoned[3..], [PartId(3)]);
}
