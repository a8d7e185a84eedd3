//! Results that a stream waits for, and the host does not.

use crate::framework::Framework;
use crate::{LIMIT, gpu, same};
use bps_engine::base::{DType, Operation};
use bps_engine::config::Config;
use bps_tests::reference;
use bps_worker::{Declaration, Error, GpuPushPull, Handle, Members, Worker};
use std::time::{Duration, Instant};

/// Elements of each tensor: some parts.
const COUNT: usize = 50_000;
const TENSORS: u64 = 5;
const ROUNDS: u64 = 6;
/// How late the last rank comes with its part of a round.
const LATE: Duration = Duration::from_millis(300);

/// Every rank puts its stream behind results, and goes on: also where that frees memory of the GPU,
/// for which CUDA waits for the stream and lets nobody else into the driver meanwhile. All but the
/// last rank wait for that one, and none of them on the host.
pub fn ahead(config: &Config) -> Result<(), Error> {
    let worker = Worker::start(config)?;
    worker.open_gpu(0)?;
    let framework = Framework::new().map_err(gpu)?;
    let said = |number| Declaration {
        name: format!("ahead {number}"),
        dtype: DType::F32,
        shape: (COUNT as u64).into(),
        operation: Operation::Sum,
        device: true,
        members: Members::ALL,
    };
    let said: Vec<Declaration> = (0..TENSORS).map(said).collect();
    let ids = worker.declare(&said)?;
    let buffers: Vec<_> =
        (0..TENSORS).map(|_| framework.buffer(COUNT * 4)).collect::<Result<_, Error>>()?;
    let is_last = worker.rank() + 1 == worker.size();
    for round in 1..=ROUNDS {
        if is_last {
            std::thread::sleep(LATE);
        }
        for (number, buffer) in (0..).zip(&buffers) {
            let own = reference::contribution(DType::F32, number, worker.rank(), round, COUNT);
            buffer.fill(&framework.stream, &own).map_err(gpu)?;
        }
        let item = |(tensor, at): (&_, u64)| GpuPushPull {
            tensor: *tensor,
            source: at,
            target: at,
            priority: 0,
        };
        let addresses = buffers.iter().map(|buffer| buffer.address);
        let items: Vec<GpuPushPull> = ids.iter().zip(addresses).map(item).collect();
        // SAFETY: the buffers are never freed, and used in the stream alone, behind the results.
        let handles = unsafe { worker.push_pull_gpu(&items, framework.stream.raw()) }?;
        let begun = Instant::now();
        worker.enqueue_results(&handles);
        for handle in &handles {
            assert_eq!(handle.wait(Some(LIMIT)), Ok(true), "round {round} does not end");
        }
        // Of a tensor's first round a caller is told when it has come.
        let waited = begun.elapsed();
        assert!(
            is_last || round == 1 || waited < LATE / 2,
            "the host has waited {waited:?} for round {round}"
        );
        // SAFETY: the stream is of the GPU that was opened.
        unsafe { Handle::make_wait(&handles, framework.stream.raw()) }?;
        let freed = framework.device.alloc(1 << 20).map_err(gpu)?;
        // SAFETY: it was just allocated, and nobody has used it.
        unsafe { framework.device.free(freed) }.map_err(gpu)?;
        for buffer in &buffers {
            buffer.fetch(&framework.stream).map_err(gpu)?;
        }
        framework.synchronize().map_err(gpu)?;
        for (number, buffer) in (0..).zip(&buffers) {
            let (size, said) = (worker.size(), &said[usize::try_from(number).unwrap_or(0)]);
            let wanted = reference::result(DType::F32, Operation::Sum, number, size, round, COUNT);
            same(said, round, worker.rank(), "the result", buffer.fetched(), &wanted);
        }
    }
    worker.shutdown(false)
}
