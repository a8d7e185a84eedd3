//! Jobs that find their own settings while they train, in real jobs inside this process: parts
//! change under traffic, and every sum is held against its bits.

use bps_engine::base::{DType, Operation};
use bps_engine::transport::sim::Random;
use bps_tests::job::{self, JobShape};
use bps_worker::{Declaration, Deltas, Handle, Members, PushPull, Store, TensorId, Worker};
use std::path::Path;
use std::time::{Duration, Instant};

const LONG: Option<Duration> = Some(Duration::from_secs(60));
/// Steps that a search may take: more than it has trials, of as many steps as one is measured over.
const STEPS_MAX: u64 = 2_000;

fn said(name: &str, elements: u64) -> Declaration {
    Declaration {
        name: name.into(),
        dtype: DType::F32,
        shape: elements.into(),
        operation: Operation::Sum,
        device: false,
        members: Members::ALL,
        receiver: None,
        encoding: None,
        store: None,
    }
}

/// What a rank pushes at a place of a tensor in a step: whole numbers, so that sums are exact, that
/// tell places, steps and ranks apart.
fn value(place: usize, step: u64, rank: u32) -> f32 {
    (place % 1021) as f32 + (step % 509) as f32 * 3.0 + rank as f32 * 2048.0
}

/// A push_pull under way; its memory lives until the handle was waited for.
struct Sum {
    values: Vec<f32>,
    step: u64,
    handle: Handle,
}

impl Sum {
    fn start(worker: &Worker, tensor: TensorId, elements: u64, step: u64, priority: i64) -> Sum {
        let count = usize::try_from(elements).expect("a small tensor");
        let mut values: Vec<f32> =
            (0..count).map(|place| value(place, step, worker.rank())).collect();
        let target = values.as_mut_ptr().cast::<u8>();
        let item = PushPull { tensor, source: target.cast_const(), target, priority };
        // SAFETY: `values` is as large as was declared, and lives until the handle is done.
        let handle = unsafe { worker.push_pull(&[item]) }.expect("pushed").remove(0);
        Sum { values, step, handle }
    }

    fn end(self, ranks: u32) {
        assert!(self.handle.wait(LONG).expect("summed"), "it took over a minute");
        for (place, sum) in self.values.iter().enumerate() {
            let wanted: f32 = (0..ranks).map(|rank| value(place, self.step, rank)).sum();
            assert_eq!(sum.to_bits(), wanted.to_bits(), "place {place} of step {}", self.step);
        }
    }
}

/// A file of this test's own that is not there yet.
fn file(name: &str) -> &'static str {
    let path = std::env::temp_dir().join(format!("bps-{name}-{}.env", std::process::id()));
    let _ = std::fs::remove_file(&path);
    path.to_str().expect("a path of text").to_owned().leak()
}

/// Whether the search is over, as the first rank sees and all are told.
fn is_over(worker: &Worker, told: TensorId, file: &str) -> bool {
    let mut flag = vec![f32::from(u8::from(worker.rank() == 0 && Path::new(file).exists()))];
    let target = flag.as_mut_ptr().cast::<u8>();
    let item = PushPull { tensor: told, source: target.cast_const(), target, priority: 9 };
    // SAFETY: `flag` is as large as was declared, and lives until the handle is done.
    let handle = unsafe { worker.push_pull(&[item]) }.expect("pushed").remove(0);
    assert!(handle.wait(LONG).expect("summed"), "it took over a minute");
    flag[0] > 0.0
}

/// Trains until the search is over and some steps more. Ranks go at their own pace, have up to
/// three steps of a tensor under way, and declare a tensor anew from time to time.
fn train(worker: &Worker, file: &str) -> u64 {
    let (mut own, mut common) = (Random::new(u64::from(worker.rank()) + 1), Random::new(77));
    let sizes = [("large", 300_007), ("middle", 40_000), ("small", 100), ("of one", 1)];
    let all: Vec<Declaration> = sizes.iter().map(|(name, count)| said(name, *count)).collect();
    let ids = worker.declare(&all).expect("declared");
    let told = worker.declare(&[said("told", 1)]).expect("declared")[0];
    let (mut begun, mut left, mut step) = (Instant::now(), 20, 0);
    while left > 0 {
        assert!(step < STEPS_MAX, "the search does not end: {:?}", begun.elapsed());
        let mut sums = Vec::new();
        let anew = [20_000, 70_000][common.index(2)];
        let name = said("anew", anew);
        let id = worker.declare(std::slice::from_ref(&name)).expect("declared")[0];
        for ahead in 0..1 + common.below(3) {
            for (index, (tensor, (_, count))) in ids.iter().zip(sizes).enumerate() {
                let priority = i64::try_from(index).expect("few tensors");
                sums.push(Sum::start(worker, *tensor, count, step + ahead, -priority));
            }
            sums.push(Sum::start(worker, id, anew, step + ahead, 3));
            if own.once_in(5) {
                std::thread::sleep(Duration::from_millis(own.below(3)));
            }
        }
        sums.into_iter().for_each(|sum| sum.end(worker.size()));
        step += 1;
        if left < 20 || is_over(worker, told, file) {
            left -= 1;
            begun = Instant::now();
        }
    }
    step
}

fn tunes(name: &str, shape: JobShape) {
    let file = file(name);
    let shape =
        JobShape { partition_bytes: 4096, scheduling_credit: 1, tune_file: Some(file), ..shape };
    let steps = job::run(shape, move |worker| train(worker, file));
    let found = std::fs::read_to_string(file).expect("the scheduler has written what it found");
    println!("{name}: {} steps: {}", steps[0], found.replace('\n', " "));
    let lines: Vec<(&str, u32)> = found
        .lines()
        .filter_map(|line| line.split_once('='))
        .map(|(name, value)| (name, value.parse().expect("a number")))
        .collect();
    let names: Vec<&str> = lines.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["BYTEPS_PARTITION_BYTES", "BYTEPS_SCHEDULING_CREDIT"]);
    std::fs::remove_file(file).expect("it is ours");
}

#[test]
fn parts_change_in_a_job_with_servers() {
    let shape = JobShape { workers: 3, servers: 2, cores: 2, ..JobShape::default() };
    tunes("servers", shape);
}

#[test]
fn parts_change_in_groups() {
    tunes("groups", JobShape { workers: 3, hosts: &[2, 1], ..JobShape::default() });
}

#[test]
fn parts_change_on_one_host_without_servers() {
    tunes("alone", JobShape { workers: 2, servers: 0, hosts: &[2], ..JobShape::default() });
}

#[test]
fn what_is_kept_for_parts_stays_where_it_is() {
    let file = file("kept");
    let shape = JobShape {
        workers: 2,
        partition_bytes: 4096,
        scheduling_credit: 1,
        tune_file: Some(file),
        ..JobShape::default()
    };
    let totals = job::run(shape, move |worker| {
        // The whole of what ranks push is kept on the server; one that was cut anew would be lost.
        let store =
            Some(Store::Deltas(Deltas { root: bps_engine::base::Rank(0), staleness: None }));
        let stored = Declaration { store, ..said("stored", 5_000) };
        let (ids, told) = (
            worker.declare(&[said("plain", 200_000), stored]).expect("declared"),
            worker.declare(&[said("told", 1)]).expect("declared")[0],
        );
        let mut step = 0;
        let mut kept = vec![0f32; 5_000];
        let mut push = |worker: &Worker, delta: f32| {
            let mut values = vec![delta; 5_000];
            let target = values.as_mut_ptr().cast::<u8>();
            let (tensor, source) = (ids[1], target.cast_const());
            let item = PushPull { tensor, source, target, priority: 0 };
            // SAFETY: `values` is as large as was declared, and lives until the handle is done.
            let handle = unsafe { worker.push_pull(&[item]) }.expect("pushed").remove(0);
            assert!(handle.wait(LONG).expect("answered"), "it took over a minute");
            kept.clone_from(&values);
        };
        // The first push is the value, of the root alone.
        push(worker, 0.0);
        while !is_over(worker, told, file) {
            assert!(step < STEPS_MAX, "the search does not end");
            Sum::start(worker, ids[0], 200_000, step, 0).end(worker.size());
            push(worker, 1.0);
            step += 1;
        }
        worker.barrier(LONG).expect("all came");
        push(worker, 0.0);
        (step, kept[0], kept.iter().all(|value| *value == kept[0]))
    });
    for (steps, value, is_even) in totals {
        assert_eq!((value, is_even), (2.0 * steps as f32, true));
    }
    std::fs::remove_file(file).expect("the search has ended");
}
