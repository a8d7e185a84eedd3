//! Results that a stream waits for, and the host does not.

use crate::framework::{Buffer, Framework};
use crate::{LIMIT, gpu, same};
use bps_engine::base::{DType, Operation};
use bps_engine::config::Config;
use bps_tests::reference;
use bps_worker::{Declaration, Error, GpuPushPull, Handle, Members, TensorId, Worker};
use std::time::{Duration, Instant};

/// Elements of each tensor: some parts.
const COUNT: usize = 50_000;
const TENSORS: u64 = 5;
const ROUNDS: u64 = 4;
/// How late the last rank comes with its part of a round.
const LATE: Duration = Duration::from_secs(1);

/// Rounds of [`full`], and how long the NIC loop may fall asleep before each.
const FULL_ROUNDS: u64 = 9;
const REST: Duration = Duration::from_millis(30);
/// A loop that nobody wakes sleeps for half a second.
const FULL_LIMIT: Duration = Duration::from_millis(150);

/// Every rank puts its stream behind results, and goes on: also where that frees memory of the GPU,
/// for which CUDA waits for the stream and lets nobody else into the driver meanwhile. All but the
/// last rank wait for that one, and none of them on the host. In the last round all leave at once.
pub fn ahead(config: &Config) -> Result<(), Error> {
    let worker = Worker::start(config)?;
    worker.open_gpu(0)?;
    let rank = Ahead::new(&worker)?;
    for round in 1..=ROUNDS {
        let handles = rank.push(round)?;
        let begun = Instant::now();
        worker.enqueue_results(&handles);
        for handle in &handles {
            assert_eq!(handle.wait(Some(LIMIT)), Ok(true), "round {round} does not end");
        }
        // Of a tensor's first round a caller is told when it has come.
        let waited = begun.elapsed();
        assert!(
            rank.is_last() || round == 1 || waited < LATE / 2,
            "the host has waited {waited:?} for round {round}"
        );
        let stream = &rank.framework.stream;
        // SAFETY: the stream is of the GPU that was opened.
        unsafe { Handle::make_wait(&handles, stream.raw()) }?;
        if round == ROUNDS {
            // What was promised to a stream comes.
            worker.shutdown(false)?;
        } else {
            let device = &rank.framework.device;
            let freed = device.alloc(1 << 20).map_err(gpu)?;
            // SAFETY: it was just allocated, and nobody has used it.
            unsafe { device.free(freed) }.map_err(gpu)?;
        }
        rank.check(round)?;
    }
    Ok(())
}

/// Results are waited for in a stream that has no room for so many waits. What ends them is asleep
/// when a round begins, and nobody is late.
pub fn full(config: &Config) -> Result<(), Error> {
    let worker = Worker::start(config)?;
    worker.open_gpu(0)?;
    let rank = Ahead::new(&worker)?;
    let mut took = Vec::new();
    for round in 1..=FULL_ROUNDS {
        worker.barrier(Some(LIMIT))?;
        std::thread::sleep(REST);
        let begun = Instant::now();
        let handles = rank.push_now(round)?;
        worker.enqueue_results(&handles);
        for handle in &handles {
            assert_eq!(handle.wait(Some(LIMIT)), Ok(true), "round {round} does not end");
        }
        let stream = &rank.framework.stream;
        // SAFETY: the stream is of the GPU that was opened.
        unsafe { Handle::make_wait(&handles, stream.raw()) }?;
        rank.check(round)?;
        took.push(begun.elapsed());
    }
    took.sort_unstable();
    let median = took[took.len() / 2];
    assert!(median < FULL_LIMIT, "rounds took {took:?}");
    worker.shutdown(false)
}

/// A rank, with its tensors.
struct Ahead<'a> {
    worker: &'a Worker,
    framework: Framework,
    tensors: Vec<(Declaration, TensorId, Buffer)>,
}

impl Ahead<'_> {
    fn new(worker: &Worker) -> Result<Ahead<'_>, Error> {
        let framework = Framework::new().map_err(gpu)?;
        let said = |number| Declaration {
            name: format!("ahead {number}"),
            dtype: DType::F32,
            shape: (COUNT as u64).into(),
            operation: Operation::Sum,
            device: true,
            members: Members::ALL,
            receiver: None,
            encoding: None,
            store: None,
        };
        let said: Vec<Declaration> = (0..TENSORS).map(said).collect();
        let ids = worker.declare(&said)?;
        let tensor = |(said, id)| Ok((said, id, framework.buffer(COUNT * 4)?));
        let tensors = said.into_iter().zip(ids).map(tensor).collect::<Result<_, Error>>()?;
        Ok(Ahead { worker, framework, tensors })
    }

    fn is_last(&self) -> bool {
        self.worker.rank() + 1 == self.worker.size()
    }

    /// Pushes a round of all tensors, late where this is the last rank.
    fn push(&self, round: u64) -> Result<Vec<Handle>, Error> {
        if self.is_last() {
            std::thread::sleep(LATE);
        }
        self.push_now(round)
    }

    fn push_now(&self, round: u64) -> Result<Vec<Handle>, Error> {
        let (rank, stream) = (self.worker.rank(), &self.framework.stream);
        let mut items = Vec::new();
        for (number, (_, tensor, buffer)) in (0..).zip(&self.tensors) {
            let own = reference::contribution(DType::F32, number, rank, round, COUNT);
            buffer.fill(stream, &own).map_err(gpu)?;
            let (tensor, source, target) = (*tensor, buffer.address, buffer.address);
            items.push(GpuPushPull { tensor, source, target, priority: 0 });
        }
        // SAFETY: the buffers are never freed, and used in the stream alone, behind the results.
        unsafe { self.worker.push_pull_gpu(&items, stream.raw()) }
    }

    /// What the stream sees of a round.
    fn check(&self, round: u64) -> Result<(), Error> {
        for (_, _, buffer) in &self.tensors {
            buffer.fetch(&self.framework.stream).map_err(gpu)?;
        }
        self.framework.synchronize().map_err(gpu)?;
        let (rank, size) = (self.worker.rank(), self.worker.size());
        for (number, (said, _, buffer)) in (0..).zip(&self.tensors) {
            let wanted = reference::result(DType::F32, Operation::Sum, number, size, round, COUNT);
            same(said, round, rank, "the result", buffer.fetched(), &wanted);
        }
        Ok(())
    }
}
