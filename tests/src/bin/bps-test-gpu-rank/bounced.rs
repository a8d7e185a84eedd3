//! Tensors of the host that some ranks push from their GPUs, and others from memory of the host:
//! for all ranks, or for some.

use crate::framework::{Buffer, Framework};
use crate::{LIMIT, gpu, same, shuffle};
use bps_engine::base::{DType, Operation, Rank};
use bps_engine::config::Config;
use bps_engine::transport::sim::Random;
use bps_tests::reference;
use bps_worker::{Declaration, Error, GpuPushPull, Handle, Members, PushPull, TensorId, Worker};

const TENSORS: u64 = 40;

struct Tensor {
    number: u64,
    said: Declaration,
    id: TensorId,
    on_gpu: Buffer,
    in_host: Vec<u8>,
}

/// The same on all ranks.
fn declarations(ranks: u32) -> Vec<Declaration> {
    let mut random = Random::new(u64::from(ranks));
    let one = |number: u64| {
        let some: Vec<Rank> = (0..ranks).filter(|_| random.once_in(2)).map(Rank).collect();
        let members = match number % 4 {
            0 => Members::ALL,
            _ if some.is_empty() => Members::new(vec![Rank(0)]).expect("a set"),
            _ => Members::new(some).expect("a set"),
        };
        let place = random.index(members.count(ranks) as usize);
        let root = members.iter(ranks).nth(place).expect("it has so many");
        let operations = [
            Operation::Sum,
            Operation::Average,
            Operation::Max,
            Operation::Product,
            Operation::Broadcast(root),
        ];
        let dtypes = [DType::F32, DType::F16, DType::I32, DType::I8];
        let counts = [0, 1, 300, 4097, 70_001];
        Declaration {
            name: format!("bounced {number}"),
            dtype: dtypes[random.index(dtypes.len())],
            shape: counts[random.index(counts.len())].into(),
            operation: operations[random.index(operations.len())],
            device: false,
            members,
            receiver: None,
            encoding: None,
            store: None,
        }
    };
    (0..TENSORS).map(one).collect()
}

/// Exchanges all of them, so often, in an order of each rank's own. With `jointly`, beside a tensor
/// that is on all GPUs.
pub fn bounced(config: &Config, rounds: u64, jointly: bool) -> Result<(), Error> {
    let worker = Worker::start(config)?;
    worker.use_gpu(0)?;
    let framework = Framework::new().map_err(gpu)?;
    if jointly {
        worker.open_gpu(0)?;
        crate::chained(&worker, &framework)?;
    }
    let (rank, size) = (Rank(worker.rank()), worker.size());
    let all: Vec<(u64, Declaration)> = (0..).zip(declarations(size)).collect();
    let mut tensors = Vec::new();
    for (number, said) in all.into_iter().filter(|(_, said)| said.members.contains(rank)) {
        let bytes = usize::try_from(said.shape.count()).unwrap_or(0) * said.dtype.size();
        let id = worker.declare(std::slice::from_ref(&said))?[0];
        let (on_gpu, in_host) = (framework.buffer(bytes)?, vec![0; bytes]);
        tensors.push(Tensor { number, said, id, on_gpu, in_host });
    }
    let mut random = Random::new(1 + u64::from(rank.0));
    for round in 1..=rounds {
        shuffle(&mut tensors, &mut random);
        let is_there =
            |tensor: &Tensor| !(tensor.number + round + u64::from(rank.0)).is_multiple_of(3);
        let mut handles: Vec<Handle> = Vec::new();
        for some in tensors.chunks_mut(7) {
            let (mut there, mut here) = (Vec::new(), Vec::new());
            for tensor in some {
                let count = usize::try_from(tensor.said.shape.count()).unwrap_or(0);
                let own =
                    reference::contribution(tensor.said.dtype, tensor.number, rank.0, round, count);
                if is_there(tensor) {
                    tensor.on_gpu.fill(&framework.stream, &own).map_err(gpu)?;
                    let (source, target) = (tensor.on_gpu.address, tensor.on_gpu.address);
                    there.push(GpuPushPull { tensor: tensor.id, source, target, priority: 0 });
                } else {
                    tensor.in_host = own;
                    let target = tensor.in_host.as_mut_ptr();
                    here.push(PushPull { tensor: tensor.id, source: target, target, priority: 0 });
                }
            }
            // SAFETY: the buffers live to the end of the process, and nobody touches them before
            // the results are there; the stream is of the GPU that is in use.
            handles.extend(unsafe { worker.push_pull_gpu(&there, framework.stream.raw()) }?);
            // SAFETY: the bytes are not touched before the handles were waited for.
            handles.extend(unsafe { worker.push_pull(&here) }?);
        }
        for handle in &handles {
            assert!(handle.wait(Some(LIMIT))?, "round {round} does not end");
        }
        // SAFETY: the stream is of the GPU that is in use.
        unsafe { Handle::make_wait(&handles, framework.stream.raw()) }?;
        for tensor in &tensors {
            tensor.on_gpu.fetch(&framework.stream).map_err(gpu)?;
        }
        framework.synchronize().map_err(gpu)?;
        for tensor in &tensors {
            let Tensor { number, said, .. } = tensor;
            let count = usize::try_from(said.shape.count()).unwrap_or(0);
            let (dtype, operation) = (said.dtype, said.operation);
            let members: Vec<u32> = said.members.iter(size).map(|rank| rank.0).collect();
            let wanted = reference::result_among(
                dtype,
                operation,
                *number,
                members.into_iter(),
                round,
                count,
            );
            let (what, got) = match is_there(tensor) {
                true => ("the result on the GPU", tensor.on_gpu.fetched()),
                false => ("the result in the host", &tensor.in_host[..]),
            };
            same(said, round, rank.0, what, got, &wanted);
        }
    }
    in_line(&worker, &framework)?;
    worker.shutdown(false)
}

/// Rounds in place on the same memory, of which no stream waits: each pushes what the one before
/// gives.
fn in_line(worker: &Worker, framework: &Framework) -> Result<(), Error> {
    const COUNT: usize = 100_000;
    let ranks: Vec<Rank> = (0..worker.size()).filter(|rank| rank % 2 == 0).map(Rank).collect();
    let among = ranks.len();
    let said = Declaration {
        name: "in line".into(),
        dtype: DType::I64,
        shape: (COUNT as u64).into(),
        operation: Operation::Sum,
        device: false,
        members: Members::new(ranks).expect("a set"),
        receiver: None,
        encoding: None,
        store: None,
    };
    if !said.members.contains(Rank(worker.rank())) {
        return Ok(());
    }
    let tensor = worker.declare(std::slice::from_ref(&said))?[0];
    let buffer = framework.buffer(COUNT * 8)?;
    let number = |index: usize| i64::try_from(index).unwrap_or(0) - 50;
    let bytes = |factor: i64| -> Vec<u8> {
        (0..COUNT).flat_map(|index| (number(index) * factor).to_le_bytes()).collect()
    };
    buffer.fill(&framework.stream, &bytes(1)).map_err(gpu)?;
    let (source, target) = (buffer.address, buffer.address);
    let mut handles = Vec::new();
    for _ in 0..4 {
        let item = GpuPushPull { tensor, source, target, priority: 0 };
        // SAFETY: the buffer is never freed, and read only when the rounds are over.
        handles = unsafe { worker.push_pull_gpu(&[item], framework.stream.raw()) }?;
        assert_eq!(handles[0].wait(Some(LIMIT)), Ok(true));
    }
    // SAFETY: the stream is of the GPU that is in use.
    unsafe { Handle::make_wait(&handles, framework.stream.raw()) }?;
    buffer.fetch(&framework.stream).map_err(gpu)?;
    framework.synchronize().map_err(gpu)?;
    let factor = i64::try_from(among).unwrap_or(0).pow(4);
    same(&said, 4, worker.rank(), "the result of four", buffer.fetched(), &bytes(factor));
    Ok(())
}
