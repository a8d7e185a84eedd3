//! Many small tensors that are pushed together.

use crate::framework::{Buffer, Framework};
use crate::{gpu, same};
use bps_engine::base::{DType, Operation};
use bps_engine::config::Config;
use bps_tests::reference;
use bps_worker::Members;
use bps_worker::{Declaration, Error, GpuPushPull, Handle, Worker};

/// Tensors, and elements of each.
const TENSORS: usize = 200;
const COUNT: usize = 1000;

/// Sums them so often, and compares every bit.
pub fn many(config: &Config, rounds: u64) -> Result<(), Error> {
    let worker = Worker::start(config)?;
    worker.open_gpu(0)?;
    let framework = Framework::new().map_err(gpu)?;
    let declaration = |index: usize| Declaration {
        name: format!("layer{index}.bias"),
        dtype: DType::F32,
        shape: (COUNT as u64).into(),
        operation: Operation::Sum,
        device: true,
        members: Members::ALL,
        receiver: None,
        encoding: None,
        store: None,
    };
    let said: Vec<Declaration> = (0..TENSORS).map(declaration).collect();
    let ids = worker.declare(&said)?;
    let buffers =
        said.iter().map(|_| framework.buffer(COUNT * 4)).collect::<Result<Vec<_>, _>>()?;
    for round in 1..=rounds {
        for (index, buffer) in (0..).zip(&buffers) {
            let own = reference::contribution(DType::F32, index, worker.rank(), round, COUNT);
            buffer.fill(&framework.stream, &own).map_err(gpu)?;
        }
        let item = |(&tensor, buffer): (_, &Buffer)| {
            let (source, target) = (buffer.address, buffer.address);
            GpuPushPull { tensor, source, target, priority: 0 }
        };
        let items: Vec<GpuPushPull> = ids.iter().zip(&buffers).map(item).collect();
        // SAFETY: the buffers are never freed, and not touched before the results are there.
        let handles = unsafe { worker.push_pull_gpu(&items, framework.stream.raw()) }?;
        for handle in &handles {
            handle.wait(None)?;
        }
        // SAFETY: the stream is of the GPU that was opened.
        unsafe { Handle::make_wait(&handles, framework.stream.raw()) }?;
        for buffer in &buffers {
            buffer.fetch(&framework.stream).map_err(gpu)?;
        }
        framework.synchronize().map_err(gpu)?;
        for ((index, buffer), said) in (0..).zip(&buffers).zip(&said) {
            let (operation, size) = (Operation::Sum, worker.size());
            let wanted = reference::result(DType::F32, operation, index, size, round, COUNT);
            same(said, round, worker.rank(), "the result", buffer.fetched(), &wanted);
        }
    }
    worker.shutdown(false)
}
