//! Tensors that are encoded on their way: on the GPU where it has kernels for that, and on the
//! processor where it has none. Both give what tensors of the host get, bit for bit.

use crate::framework::{Buffer, Framework};
use crate::{LIMIT, gpu, same};
use bps_engine::base::{DType, Operation};
use bps_engine::config::Config;
use bps_worker::Members;
use bps_worker::{Declaration, Error, GpuPushPull, Handle, PushPull, TensorId, Worker};

/// Also with what is kept from round to round.
const ENCODINGS: [&str; 13] = [
    "fp16",
    "bf16",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8",
    "onebit(scaling)",
    "topk(k=0.1)",
    "int8+feedback",
    "onebit(scaling)+feedback",
    "topk(k=0.1)+momentum(0.9)",
    "fp16+feedback+momentum(0.9)",
    "topk(k=0.1)+feedback",
    "fp8_e4m3+feedback",
];
/// What is drawn differs from tensor to tensor: of these the results are looked at by themselves.
const DRAWN: [&str; 2] = ["randomk(k=0.1, seed=2)", "dithering(levels=7)"];
/// What is left out is worth so much of it a round later.
const FACTOR: f32 = 0.75;
/// Parts and a last one of a single element, whose encoding may be longer than it is.
const COUNT: usize = 3 * 4096 + 1;

/// Sums and averages the same numbers from the GPU and from the host, so often. `is_alone`: no
/// other rank of the host has a share of what is kept, which is then looked at and changed.
pub fn coded(config: &Config, rounds: u64, is_alone: bool) -> Result<(), Error> {
    let worker = Worker::start(config)?;
    worker.open_gpu(0)?;
    let framework = Framework::new().map_err(gpu)?;
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    let kinds = dtypes.into_iter().zip([Operation::Sum, Operation::Average, Operation::Sum]);
    let said = |device: bool| {
        let all = ENCODINGS.iter().flat_map(|one| kinds.clone().map(move |kind| (*one, kind)));
        all.map(|(one, (dtype, operation))| declaration(one, dtype, operation, device))
            .collect::<Vec<Declaration>>()
    };
    let drawn = |encoding| declaration(encoding, DType::F32, Operation::Sum, true);
    let here = said(false);
    let there: Vec<Declaration> = said(true).into_iter().chain(DRAWN.map(drawn)).collect();
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
        for ((said, buffer), values) in there.iter().zip(&buffers).zip(&values).take(here.len()) {
            same(said, round, worker.rank(), "the result", buffer.fetched(), values);
        }
        for (number, buffer) in (0..).zip(&buffers).skip(here.len()) {
            let of_rank = |rank| numbers(DType::F32, number, u64::from(rank), round);
            let own: Vec<Vec<u8>> = (0..worker.size()).map(of_rank).collect();
            let name = there[usize::try_from(number).expect("a few")].name.as_str();
            is_drawn(name, buffer.fetched(), &own);
        }
        worker.scale_residues(&ids_there, FACTOR)?;
        worker.scale_residues(&ids_here, FACTOR)?;
        if is_alone {
            for ((said, there), here) in there.iter().zip(&ids_there).zip(&ids_here) {
                keeps_the_same(&worker, said, round, [*there, *here])?;
            }
        }
    }
    worker.shutdown(false)
}

/// What is kept of a tensor on the GPU is what is kept of the host's. Then both get something else.
fn keeps_the_same(
    worker: &Worker,
    said: &Declaration,
    round: u64,
    [there, here]: [TensorId; 2],
) -> Result<(), Error> {
    let (mut found, expected) = (worker.kept(there)?, worker.kept(here)?);
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
    let parts = [(&found.residue, &expected.residue), (&found.velocity, &expected.velocity)];
    for (what, (found, expected)) in ["residue", "momentum"].into_iter().zip(parts) {
        let name = &said.name;
        assert!(bits(found) == bits(expected), "round {round}: the {what} kept of {name}");
    }
    let encoding = said.encoding.expect("it is encoded");
    let lengths =
        [(encoding.feedback, &found.residue), (encoding.momentum.is_some(), &found.velocity)];
    for (is_kept, values) in lengths {
        let is_something = values.iter().any(|value| *value != 0.0);
        assert_eq!((values.len(), is_something), (if is_kept { COUNT } else { 0 }, is_kept));
    }
    found.residue.iter_mut().for_each(|value| *value *= 0.25);
    // What is empty changes nothing.
    if round.is_multiple_of(2) {
        found.velocity.clear();
    }
    worker.keep(here, found.clone())?;
    worker.keep(there, found)
}

fn declaration(encoding: &str, dtype: DType, operation: Operation, device: bool) -> Declaration {
    Declaration {
        name: format!("{encoding} {dtype} {}", if device { "on a GPU" } else { "on a host" }),
        dtype,
        shape: (COUNT as u64).into(),
        operation,
        device,
        members: Members::ALL,
        receiver: None,
        encoding: Some(encoding.parse().expect("an encoding")),
        store: None,
    }
}

/// The result is what all ranks had in sum where an element was drawn, 0 elsewhere; or it is
/// next to the sum everywhere, but not the sum.
fn is_drawn(name: &str, result: &[u8], own: &[Vec<u8>]) {
    let floats = |bytes: &[u8]| -> Vec<f32> {
        let (words, _) = bytes.as_chunks();
        words.iter().map(|word| f32::from_le_bytes(*word)).collect()
    };
    let mut sums = vec![0.0; COUNT];
    for own in own {
        sums.iter_mut().zip(floats(own)).for_each(|(sum, value)| *sum += value);
    }
    // The encoding of what is one element long is longer, and so is it sent as it is.
    let pairs: Vec<(f32, f32)> = floats(result).into_iter().zip(sums).take(COUNT - 1).collect();
    let of_all = |holds: &dyn Fn(f32, f32) -> bool| {
        pairs.iter().filter(|(result, sum)| holds(*result, *sum)).count()
    };
    let exact = of_all(&|result, sum| (result - sum).abs() < 1e-6);
    let (least, most) = (COUNT / 11, COUNT / 9);
    if name.starts_with("randomk") {
        let zeros = of_all(&|result, _| result == 0.0);
        assert!((least..most).contains(&exact), "{name}: {exact} of {COUNT} are sums");
        assert!(exact + zeros >= pairs.len(), "{name}: {exact} are sums and {zeros} are 0");
    } else {
        // A level of each rank's, and one of the result, whose norm is at most that of all ranks.
        let level = 0.5 / 7.0 * own.len() as f32;
        let near = of_all(&|result, sum| (result - sum).abs() <= 2.0 * level);
        assert_eq!(near, pairs.len(), "{name}: so many are next to sums");
        assert!(exact < most, "{name}: {exact} of {COUNT} are sums");
    }
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
