//! Jobs whose servers keep parameters and step them: every result compared, bit for bit, with the
//! same optimizer on the whole tensor in one place.

use bps_engine::base::{DType, Operation};
use bps_engine::config::PayloadChecksum;
use bps_engine::encode::{Codec, narrow, widen};
use bps_engine::optimize::Slots;
use bps_engine::reduce::kernels;
use bps_tests::job::{self, JobShape};
use bps_worker::{Act, Declaration, Error, Members, Number, Optimizer, PushPull, Store};
use bps_worker::{TensorId, Worker};
use std::time::Duration;

const LONG: Option<Duration> = Some(Duration::from_secs(60));
const STEPS: u64 = 4;
/// Elements: several parts of 64 KiB, and a tail.
const COUNT: usize = 50_003;

fn tensor(name: &str, optimizer: &str, encoding: Option<&str>) -> Declaration {
    Declaration {
        name: name.into(),
        dtype: DType::F32,
        shape: (COUNT as u64).into(),
        operation: Operation::Average,
        device: false,
        members: Members::ALL,
        receiver: None,
        encoding: encoding.map(|text| text.parse().expect("an encoding")),
        store: Some(Store::Optimizer(optimizer.parse().expect("an optimizer"))),
    }
}

fn rate(step: u64) -> Number {
    Number::new(0.1 / step as f64).expect("a rate")
}

/// What a job begins with.
fn start() -> Vec<f32> {
    (0..COUNT).map(|at| (at % 211) as f32 / 100.0 - 1.0).collect()
}

/// Whole numbers, so that sums are exact in any order.
fn gradient(rank: u32, step: u64) -> Vec<f32> {
    let of = |at: u64| ((at * 7 + step * 31 + u64::from(rank) * 13) % 41) as f32 - 20.0;
    (0..COUNT as u64).map(of).collect()
}

fn update(
    worker: &Worker,
    tensor: TensorId,
    mut values: Vec<f32>,
    act: Act,
) -> Result<Vec<f32>, Error> {
    let target = values.as_mut_ptr().cast::<u8>();
    let item = PushPull { tensor, source: target.cast_const(), target, priority: 0 };
    // SAFETY: the values stay until the handle is done: a wait that fails has ended as well.
    let handles = unsafe { worker.update(&[item], act) }?;
    assert!(handles[0].wait(LONG)?, "a round hangs");
    Ok(values)
}

/// What this rank adds so that a slot becomes what the last rank has: nothing, whose sign is that
/// of a zero which changes no other.
fn set(worker: &Worker, tensor: TensorId, values: &[f32], act: Act) -> Vec<f32> {
    let is_root = worker.rank() + 1 == worker.size();
    let values = if is_root { values.to_vec() } else { vec![-0.0; COUNT] };
    update(worker, tensor, values, act).expect("set")
}

/// The same optimizer, in one place.
struct Reference {
    optimizer: Optimizer,
    state: [Vec<f32>; 3],
}

impl Reference {
    fn step(&mut self, ranks: u32, step: u64) {
        let mut mean = vec![0.0; COUNT];
        for rank in 0..ranks {
            mean.iter_mut().zip(gradient(rank, step)).for_each(|(all, one)| *all += one);
        }
        mean.iter_mut().for_each(|sum| *sum /= ranks as f32);
        let [master, first, second] = &mut self.state;
        let slots = Slots { master, first, second };
        self.optimizer.step(kernels(), (rate(step), step), (&mean, 1.0), slots);
    }

    /// As it travels.
    fn seen(&self, codec: Option<Codec>) -> Vec<f32> {
        let mut seen = self.state[0].clone();
        let dtype = match codec {
            Some(Codec::Bf16) => DType::BF16,
            Some(Codec::Fp16) => DType::F16,
            _ => return seen,
        };
        let mut bytes = vec![0; COUNT * 2];
        narrow(dtype, &seen, &mut bytes);
        widen(dtype, &bytes, &mut seen);
        seen
    }
}

/// Bits, so that zeros of both signs differ.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Steps, moves all that servers keep to another tensor, and steps on there.
fn steps_and_moves(shape: JobShape, optimizer: &'static str, encoding: Option<&'static str>) {
    job::run(shape, move |worker| {
        let names = ["one", "other"].map(|name| tensor(name, optimizer, encoding));
        let codec = names[0].encoding.map(|encoding| encoding.codec);
        let ids = worker.declare(&names).expect("declared");
        let optimizer = optimizer.parse().expect("an optimizer");
        let zeros = || vec![0.0; COUNT];
        let mut reference = Reference { optimizer, state: [start(), zeros(), zeros()] };
        let begun = set(worker, ids[0], &start(), Act::set(0, 0));
        assert_eq!(bits(&begun), bits(&start()));
        let step = |id: TensorId, reference: &mut Reference, step: u64| {
            let own = gradient(worker.rank(), step);
            let got = update(worker, id, own, Act::step(rate(step))).expect("a step");
            reference.step(worker.size(), step);
            assert_eq!(bits(&got), bits(&reference.seen(codec)), "step {step} of {optimizer}");
        };
        (1..=STEPS).for_each(|number| step(ids[0], &mut reference, number));
        for slot in 0..optimizer.slots() {
            let number = u8::try_from(slot).expect("three at most");
            let kept = update(worker, ids[0], zeros(), Act::get(number)).expect("got");
            assert_eq!(bits(&kept), bits(&reference.state[slot]), "slot {slot} of {optimizer}");
            let moved = set(worker, ids[1], &kept, Act::set(number, STEPS));
            assert_eq!(bits(&moved), bits(&kept));
        }
        step(ids[1], &mut reference, STEPS + 1);
        // Parameters that are set anew forget all else.
        set(worker, ids[1], &start(), Act::set(0, 0));
        let mut anew = Reference { optimizer, state: [start(), zeros(), zeros()] };
        step(ids[1], &mut anew, 1);
    });
}

/// Two ranks and two servers.
fn small() -> JobShape {
    JobShape { servers: 2, cores: 2, partition_bytes: 65536, ..JobShape::default() }
}

#[test]
fn servers_step_as_one_place_does() {
    steps_and_moves(small(), "sgd(momentum=0.9,weight_decay=0.01,nesterov)", None);
    steps_and_moves(small(), "adamw(weight_decay=0.01)", None);
    let checked = JobShape { payload_checksum: PayloadChecksum::Always, ..small() };
    steps_and_moves(checked, "sgd", Some("bf16"));
}

#[test]
fn hosts_add_up_their_gradients_first() {
    // Three ranks, so an average that is no product by a power of two.
    let shape = JobShape { workers: 3, hosts: &[2, 1], ..small() };
    steps_and_moves(shape, "adam(weight_decay=0.1)", None);
    let checked = JobShape { payload_checksum: PayloadChecksum::Always, ..shape };
    steps_and_moves(checked, "sgd(momentum=0.5)", None);
}

#[test]
fn one_rank_alone_has_a_server_step() {
    let shape = JobShape { workers: 1, ..small() };
    steps_and_moves(shape, "adamw", Some("fp16"));
}

/// What each rank is told where the last one steps at another rate.
fn rates_differ(shape: JobShape) -> Vec<Error> {
    job::run_nodes(shape, |worker| {
        let ids = worker.declare(&[tensor("weights", "sgd", None)]).expect("declared");
        set(&worker, ids[0], &start(), Act::set(0, 0));
        let differs = u64::from(worker.rank() + 1 == worker.size());
        let act = Act::step(rate(1 + differs));
        update(&worker, ids[0], gradient(0, 1), act).expect_err("the ranks disagree")
    })
}

#[test]
fn ranks_that_step_at_other_rates_are_told_of_both() {
    for hosts in [&[][..], &[2, 1]] {
        let workers = if hosts.is_empty() { 2 } else { 3 };
        let errors = rates_differ(JobShape { workers, hosts, ..small() });
        let texts: Vec<String> = errors.iter().map(Error::to_string).collect();
        for text in &texts {
            assert!(text.contains("learning rate 0.1") && text.contains("rate 0.05"), "{texts:?}");
            assert!(text.contains("`weights`, round 2"), "{texts:?}");
        }
        let disagree = |error: &&Error| matches!(error, Error::Disagree(_));
        let told = errors.iter().find(disagree).expect("one rank knows it first hand");
        let details = told.details();
        assert!(details.ranks.last().is_some_and(|last| last.0 + 1 == workers), "{details:?}");
        assert_eq!((details.tensor.as_deref(), details.round), (Some("weights"), Some(2)));
    }
}

#[test]
fn ranks_of_a_host_that_step_at_other_rates_are_told_of_both() {
    let shape = JobShape { workers: 3, hosts: &[1, 2], ..small() };
    let errors = rates_differ(shape);
    assert!(errors.iter().any(|error| matches!(error, Error::Disagree(_))), "{errors:?}");
    for text in errors.iter().map(Error::to_string) {
        assert!(text.contains("learning rate 0.1") && text.contains("rate 0.05"), "{text}");
    }
}

#[test]
fn ranks_with_other_optimizers_are_told() {
    let texts = job::run(small(), |worker| {
        let text = ["adamw", "sgd(momentum=0.9)"][worker.rank() as usize];
        match worker.declare(&[tensor("weights", text, None)]) {
            Ok(_) => "declared".to_owned(),
            Err(error) => error.to_string(),
        }
    });
    // Whoever was first heard of no other.
    let told = texts.iter().find(|text| *text != "declared").expect("one was second");
    assert!(told.contains("stepped by adamw(") && told.contains("stepped by sgd("), "{told}");
}

#[test]
fn what_an_optimizer_does_not_do_is_refused_before_it_is_sent() {
    job::run(small(), |worker| {
        let plain = Declaration { store: None, ..tensor("plain", "sgd", None) };
        let ids = worker.declare(&[tensor("weights", "sgd", None), plain]).expect("declared");
        let refused = |id, act| update(worker, id, start(), act).unwrap_err().to_string();
        let text = refused(ids[0], Act::NONE);
        assert!(text.contains("`weights` is pushed for a push without an optimizer"), "{text}");
        let text = refused(ids[0], Act::get(1));
        assert!(text.contains("getting slot 1, and is stepped by sgd("), "{text}");
        let text = refused(ids[1], Act::step(rate(1)));
        assert!(text.contains("`plain` is pushed for a step"), "{text}");
        assert!(text.contains("was declared without an optimizer"), "{text}");
    });
}

#[test]
fn a_step_from_nothing_ends_the_job() {
    let errors = job::run_nodes(small(), |worker| {
        let ids = worker.declare(&[tensor("weights", "sgd", None)]).expect("declared");
        update(&worker, ids[0], start(), Act::step(rate(1))).expect_err("nothing was set")
    });
    assert!(errors.iter().any(|error| error.to_string().contains("refused a frame")), "{errors:?}");
}
