//! Tensors that are encoded on their way: on the GPU where it has kernels for that, and on the
//! processor where it has none. Both give what tensors of the host get, bit for bit.

use crate::framework::{Buffer, Framework};
use crate::{LIMIT, gpu, same};
use bps_engine::base::{DType, Operation};
use bps_engine::config::Config;
use bps_worker::Members;
use bps_worker::{Declaration, Error, GpuPushPull, Handle, PushPull, Worker};

/// With kernels, without, and with what is kept from round to round.
const ENCODINGS: [&str; 8] = [
    "fp16",
    "bf16",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8",
    "int8+feedback",
    "onebit(scaling)+feedback",
    "topk(k=0.1)+momentum(0.9)",
];
/// Parts and a last one of a single element, whose encoding may be longer than it is.
const COUNT: usize = 3 * 4096 + 1;

/// Sums and averages the same numbers from the GPU and from the host, so often.
pub fn coded(config: &Config, rounds: u64) -> Result<(), Error> {
    let worker = Worker::start(config)?;
    worker.open_gpu(0)?;
    let framework = Framework::new().map_err(gpu)?;
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    let kinds = dtypes.into_iter().zip([Operation::Sum, Operation::Average, Operation::Sum]);
    let said = |device: bool| {
        let one = move |(encoding, (dtype, operation)): (&str, _)| Declaration {
            name: format!("{encoding} {dtype} {}", if device { "on a GPU" } else { "on a host" }),
            dtype,
            shape: (COUNT as u64).into(),
            operation,
            device,
            members: Members::ALL,
            encoding: Some(encoding.parse().expect("an encoding")),
            store: None,
        };
        let all = ENCODINGS.iter().flat_map(|one| kinds.clone().map(move |kind| (*one, kind)));
        all.map(one).collect::<Vec<Declaration>>()
    };
    let (there, here) = (said(true), said(false));
    let (ids_there, ids_here) = (worker.declare(&there)?, worker.declare(&here)?);
    let buffer = |said: &Declaration| framework.buffer(COUNT * said.dtype.size());
    let buffers = there.iter().map(buffer).collect::<Result<Vec<Buffer>, Error>>()?;
    for round in 1..=rounds {
        let mut values: Vec<Vec<u8>> = Vec::new();
        for (number, (said, buffer)) in (0..).zip(there.iter().zip(&buffers)) {
            let own = numbers(said.dtype, number, u64::from(worker.rank()), round);
            buffer.fill(&framework.stream, &own).map_err(gpu)?;
            values.push(own);
        }
        let on_gpu = |(&tensor, buffer): (_, &Buffer)| {
            let (source, target) = (buffer.address, buffer.address);
            GpuPushPull { tensor, source, target, priority: 0 }
        };
        let items: Vec<GpuPushPull> = ids_there.iter().zip(&buffers).map(on_gpu).collect();
        // SAFETY: the buffers are never freed, and not touched before the results are there.
        let handles = unsafe { worker.push_pull_gpu(&items, framework.stream.raw()) }?;
        let on_host = |(&tensor, values): (_, &mut Vec<u8>)| {
            let target = values.as_mut_ptr();
            PushPull { tensor, source: target, target, priority: 0 }
        };
        let items: Vec<PushPull> = ids_here.iter().zip(&mut values).map(on_host).collect();
        // SAFETY: the values are not touched before the handles have been waited for.
        let others = unsafe { worker.push_pull(&items) }?;
        for handle in handles.iter().chain(&others) {
            assert!(handle.wait(Some(LIMIT))?, "an encoded tensor does not end");
        }
        // SAFETY: the stream is of the GPU that was opened.
        unsafe { Handle::make_wait(&handles, framework.stream.raw()) }?;
        for buffer in &buffers {
            buffer.fetch(&framework.stream).map_err(gpu)?;
        }
        framework.synchronize().map_err(gpu)?;
        for ((said, buffer), values) in there.iter().zip(&buffers).zip(&values) {
            same(said, round, worker.rank(), "the result", buffer.fetched(), values);
        }
    }
    worker.shutdown(false)
}

/// Numbers of both signs about 0, and none that is none.
#[allow(clippy::cast_precision_loss, reason = "numbers of 16 bits")]
fn numbers(dtype: DType, number: u64, rank: u64, round: u64) -> Vec<u8> {
    let mut state = 1 + number + 1000 * rank + 100_000 * round;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 48) as f32 / 65_536.0 - 0.5
    };
    let values: Vec<f32> = (0..COUNT).map(|_| next()).collect();
    let mut bytes = vec![0; COUNT * dtype.size()];
    bps_engine::encode::narrow(dtype, &values, &mut bytes);
    bytes
}
