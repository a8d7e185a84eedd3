//! Names that are declared anew with another shape, in real jobs inside this process.

use bps_engine::base::{DType, Operation};
use bps_engine::transport::sim::Random;
use bps_tests::job::{self, JobShape};
use bps_worker::Members;
use bps_worker::{Declaration, Error, Handle, PushPull, TensorShape, Worker};
use std::time::{Duration, Instant};

const LONG: Option<Duration> = Some(Duration::from_secs(60));

fn said(name: &str, dimensions: &[u64]) -> Declaration {
    Declaration {
        name: name.into(),
        dtype: DType::F32,
        shape: TensorShape::new(dimensions.to_vec()).expect("few dimensions"),
        operation: Operation::Sum,
        device: false,
        members: Members::ALL,
        receiver: None,
        encoding: None,
        store: None,
    }
}

/// A push_pull under way; its memory lives until the handle was waited for.
struct Sum {
    values: Vec<f32>,
    wanted: f32,
    handle: Handle,
}

impl Sum {
    fn start(worker: &Worker, said: &Declaration, value: u64) -> Result<Sum, Error> {
        let ids = worker.declare(std::slice::from_ref(said))?;
        let count = usize::try_from(said.shape.count()).expect("a small tensor");
        let own = (value + u64::from(worker.rank())) as f32;
        let mut values = vec![own; count];
        let target = values.as_mut_ptr().cast::<u8>();
        let item = PushPull { tensor: ids[0], source: target.cast_const(), target, priority: 0 };
        // SAFETY: `values` is as large as was declared, and lives until the handle is done.
        let handle = unsafe { worker.push_pull(&[item]) }?.remove(0);
        let wanted = (0..worker.size()).map(|rank| (value + u64::from(rank)) as f32).sum();
        Ok(Sum { values, wanted, handle })
    }

    fn end(self) -> Result<(), Error> {
        assert!(self.handle.wait(LONG)?, "it took over a minute");
        let wrong = self.values.iter().filter(|value| **value != self.wanted).count();
        assert_eq!(wrong, 0, "{:?}, not {}", self.values.first(), self.wanted);
        Ok(())
    }
}

/// Shapes of one name change many times, several of them under way at once, with ranks at their own
/// pace and names in an order of their own.
fn change_shapes(shape: JobShape) {
    job::run(shape, |worker| {
        let mut own = Random::new(u64::from(worker.rank()) + 1);
        let mut common = Random::new(77);
        for turn in 0..30u64 {
            let mut pushes = Vec::new();
            for name in ["a", "b", "c"] {
                for _ in 0..common.index(3) {
                    let dimensions = [[3000, 2], [2, 3000], [1, 5], [70_001, 1]][common.index(4)];
                    let times = common.index(3);
                    pushes.push((name, said(name, &dimensions), times));
                }
            }
            // Each name keeps its order, and the names come in an order of this rank's own.
            let first = own.index(3);
            pushes.sort_by_key(|(name, ..)| (name.as_bytes()[0] as usize - 97 + first) % 3);
            let mut sums = Vec::new();
            for (index, (_, said, times)) in pushes.iter().enumerate() {
                for time in 0..*times {
                    let value = turn * 100 + said.shape.count() % 7 + time as u64;
                    sums.push(Sum::start(worker, said, value).expect("declared"));
                }
                if index % 4 == 0 && own.once_in(4) {
                    std::thread::sleep(Duration::from_millis(own.below(4)));
                }
            }
            for sum in sums {
                sum.end().expect("summed");
            }
        }
    });
}

#[test]
fn shapes_change_in_a_job_with_servers() {
    change_shapes(JobShape {
        workers: 3,
        servers: 2,
        cores: 2,
        partition_bytes: 64 << 10,
        ..JobShape::default()
    });
}

#[test]
fn shapes_change_in_groups() {
    change_shapes(JobShape {
        workers: 3,
        partition_bytes: 64 << 10,
        hosts: &[2, 1],
        ..JobShape::default()
    });
}

#[test]
fn shapes_change_on_one_host_without_servers() {
    change_shapes(JobShape { workers: 2, servers: 0, hosts: &[2], ..JobShape::default() });
}

/// What the three ranks of a job say of one name after a round on which they agree, and the two
/// shapes that the error must have.
fn differ(new: [&'static [u64]; 3], shapes: [&'static str; 2]) {
    let shape = JobShape { workers: 3, ..JobShape::default() };
    job::run(shape, move |worker| {
        let rank = worker.rank();
        Sum::start(worker, &said("x", &[2, 3]), 1).expect("declared").end().expect("summed");
        // The last rank is late with a round on which all agree: it must not be lost to anybody.
        if rank == 2 {
            std::thread::sleep(Duration::from_millis(300));
        }
        let agreed = Sum::start(worker, &said("x", &[2, 3]), 2).expect("declared");
        let begun = Instant::now();
        let sum = Sum::start(worker, &said("x", new[rank as usize]), 3);
        agreed.end().expect("all ranks have this round");
        let error = sum.and_then(Sum::end).expect_err("ranks differ");
        let Error::Mismatch(_) = &error else { panic!("rank {rank}: {error}") };
        let text = error.to_string();
        assert!(shapes.iter().all(|shape| text.contains(shape)), "{text}");
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        // The name is spoiled; the job is not.
        assert!(Sum::start(worker, &said("x", &[2, 3]), 4).and_then(Sum::end).is_err());
        Sum::start(worker, &said("y", &[4]), 5).expect("declared").end().expect("summed");
    });
}

#[test]
fn a_rank_that_stays_with_the_old_shape_is_a_mismatch() {
    differ([&[3, 2], &[2, 3], &[3, 2]], ["[3, 2]", "rank 1 declared f32 of shape [2, 3]"]);
    differ([&[2, 3], &[3, 2], &[2, 3]], ["rank 1 declared f32 of shape [3, 2]", "[2, 3]"]);
}

#[test]
fn ranks_with_different_new_shapes_are_a_mismatch() {
    differ([&[7], &[8], &[7]], ["shape [7]", "rank 1 declared f32 of shape [8]"]);
}

/// Bytes of memory that this process, servers and ranks in one, has in RAM.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("/proc is there");
    let pages: u64 = text.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("pages");
    pages * 4096
}

#[test]
fn a_server_takes_back_the_memory_of_shapes_that_are_gone() {
    const ELEMENTS: u64 = 4 << 20;
    let grown = job::run(JobShape::default(), |worker| {
        let mut before = 0;
        for turn in 0..40 {
            let said = said("x", &[ELEMENTS + turn]);
            Sum::start(worker, &said, turn).expect("declared").end().expect("summed");
            worker.barrier(LONG).expect("all came");
            if turn == 4 {
                before = resident_bytes();
            }
        }
        resident_bytes().saturating_sub(before)
    });
    // 35 tensors of 16 MiB: 560 MiB if none were given back.
    println!("the process grew by {} MiB", grown[0] >> 20);
    assert!(grown[0] < 8 * ELEMENTS * 4, "it grew by {} MiB", grown[0] >> 20);
}
