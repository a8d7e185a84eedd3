//! A rank of a job with tensors on GPUs, for the tests in `gpu_pipeline.rs`:
//! `bps-test-gpu-rank HOST SCENARIO [NUMBER...]` joins the job of its environment as a process of
//! this host (the test's hosts are all one machine), with the first GPU that it sees. Says on
//! standard error how it ended.

mod ahead;
mod bounced;
mod coded;
mod framework;
mod many;

use self::framework::{Buffer, Framework};
use bps_engine::base::{DType, Operation, Rank};
use bps_engine::config::Config;
use bps_engine::transport::sim::Random;
use bps_tests::reference;
use bps_worker::Members;
use bps_worker::cuda::GpuError;
use bps_worker::error::Refusal;
use bps_worker::{Declaration, Error, GpuPushPull, Handle, PushPull, TensorId, Worker};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
/// Rounds of each tensor that are under way at once.
const QUEUED: usize = 2;
/// Longer than ranks wait in NCCL for one that is late to shut down.
const LATE: Duration = Duration::from_secs(6);
/// Sizes of the tensors, for parts of 16 KiB: none, one, odd, a part of each element size and one
/// element less and more, and many parts.
const SIZES: [u64; 11] = [0, 1, 255, 2047, 2048, 2049, 4096, 4097, 8191, 16_385, 30_011];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let numbers: Vec<u64> =
        arguments.iter().skip(2).map(|text| text.parse().expect("a number")).collect();
    bps_tests::fake_gpu::emulate_dma_buf();
    let loaded = bps_engine::config::from_environment().expect("the test's own settings");
    let config = Config { host_id: Some(format!("test host {}", arguments[0])), ..loaded.config };
    let number = |index: usize| numbers.get(index).copied();
    let outcome = match arguments[1].as_str() {
        "work" => {
            work(&config, number(0).unwrap_or(1), number(1).unwrap_or(1), number(2) == Some(1))
        }
        "large" => large(&config),
        "many" => many::many(&config, number(0).unwrap_or(1)),
        "ahead" => ahead::ahead(&config),
        "full" => ahead::full(&config),
        "bounced" => bounced::bounced(&config, number(0).unwrap_or(1), number(1) == Some(1)),
        "coded" => coded::coded(&config, number(0).unwrap_or(1), number(1) == Some(1)),
        "loop" => train(&config, number(0).unwrap_or(1), number(1), number(2) == Some(1)),
        "mismatch" => mismatch(&config, number(0) == Some(1)),
        "mismatches" => mismatches(&config, number(0) == Some(1), number(1).unwrap_or(60)),
        "record" => record(&config),
        "second" => second(&config),
        "resume" => resume(&config),
        scenario => panic!("there is no scenario {scenario}"),
    };
    match outcome {
        Ok(()) => eprintln!("rank ended: ok"),
        Err(error) => {
            let debug = format!("{error:?}"); // It begins with the variant.
            eprintln!("rank ended: {}: {error}", &debug[..debug.find('(').unwrap_or(0)]);
            std::process::exit(7);
        }
    }
}

fn gpu(error: GpuError) -> Error {
    Refusal::Gpu(error).into()
}

/// A tensor on the GPU, with memory for each of the rounds that are queued.
struct Tensor {
    said: Declaration,
    number: u64,
    id: TensorId,
    sources: Vec<Buffer>,
    /// Or the result goes to the source.
    targets: Vec<Option<Buffer>>,
}

fn declarations(ranks: u32) -> Vec<Declaration> {
    let mut all = Vec::new();
    for dtype in DType::ALL {
        for (at, &count) in SIZES.iter().enumerate() {
            let root = Rank(u32::try_from(at).unwrap_or(0) % ranks);
            let broadcast = Operation::Broadcast(root);
            for operation in
                [Operation::Sum, Operation::Average, Operation::Min, Operation::Max, broadcast]
            {
                let name = format!("{dtype}.{count}.{operation}");
                let shape = count.into();
                all.push(Declaration { name, dtype, shape, operation, ..on_gpus() });
            }
        }
    }
    all
}

fn shuffle<T>(list: &mut [T], random: &mut Random) {
    for at in (1..list.len()).rev() {
        list.swap(at, random.index(at + 1));
    }
}

/// Pushes tensors of every type, operation and size, of the GPU and of the host, several rounds of
/// each at once, in an order that differs from rank to rank, and checks each bit of the results. If
/// it tells, it says when the first are there.
fn work(config: &Config, rounds: u64, seed: u64, tells: bool) -> Result<(), Error> {
    let worker = Worker::start(config)?;
    worker.open_gpu(0)?;
    let framework = Framework::new().map_err(gpu)?;
    let mut random = Random::new(seed * 31 + u64::from(worker.rank()));
    let mut tensors = declare(&worker, &framework, &mut random)?;
    let mut beside = Beside::new(&worker)?;
    for first in (1..=rounds).step_by(QUEUED) {
        let mut handles: Vec<(usize, usize, Handle)> = Vec::new();
        for queued in 0..QUEUED {
            shuffle(&mut tensors, &mut random);
            push(&worker, &framework, &tensors, first, queued, &mut random, &mut handles)?;
            beside.push(&worker, first + queued as u64)?;
        }
        shuffle(&mut handles, &mut random);
        // All is pushed, so whoever waits in a stream is in nobody's way.
        let some: Vec<Handle> = handles.iter().map(|(_, _, handle)| handle.clone()).collect();
        worker.enqueue_results(&some[..random.index(some.len() + 1)]);
        check(&worker, &framework, &tensors, first, &handles)?;
        beside.check(&worker)?;
        if tells && first == 1 {
            eprintln!("rank has begun");
        }
    }
    chained(&worker, &framework)?;
    worker.shutdown(false)
}

fn declare(
    worker: &Worker,
    framework: &Framework,
    random: &mut Random,
) -> Result<Vec<Tensor>, Error> {
    let mut numbered: Vec<(u64, Declaration)> = (0..).zip(declarations(worker.size())).collect();
    shuffle(&mut numbered, random);
    let said: Vec<Declaration> = numbered.iter().map(|(_, said)| said.clone()).collect();
    let ids = worker.declare(&said)?;
    let mut tensors = Vec::new();
    for ((number, said), id) in numbered.into_iter().zip(ids) {
        let bytes = usize::try_from(said.shape.count()).unwrap_or(0) * said.dtype.size();
        let new = || framework.buffer(bytes);
        let mut tensor = Tensor { said, number, id, sources: Vec::new(), targets: Vec::new() };
        for _ in 0..QUEUED {
            tensor.sources.push(new()?);
            tensor.targets.push(if random.once_in(2) { Some(new()?) } else { None });
        }
        tensors.push(tensor);
    }
    Ok(tensors)
}

/// Pushes the round `first + queued` of all tensors, a few at a time; notes number, round and
/// handle of each.
fn push(
    worker: &Worker,
    framework: &Framework,
    tensors: &[Tensor],
    first: u64,
    queued: usize,
    random: &mut Random,
    handles: &mut Vec<(usize, usize, Handle)>,
) -> Result<(), Error> {
    let mut at = 0;
    while at < tensors.len() {
        let some = &tensors[at..(at + 1 + random.index(40)).min(tensors.len())];
        let mut items = Vec::new();
        for Tensor { said, number, id, sources, targets } in some {
            let (source, round) = (&sources[queued], first + queued as u64);
            let count = usize::try_from(said.shape.count()).unwrap_or(0);
            let own = reference::contribution(said.dtype, *number, worker.rank(), round, count);
            source.fill(&framework.stream, &own).map_err(gpu)?;
            let target = targets[queued].as_ref().unwrap_or(source).address;
            let priority = i64::try_from(random.below(7)).unwrap_or(0) - 3;
            let source = source.address;
            items.push(GpuPushPull { tensor: *id, source, target, priority });
        }
        // SAFETY: buffers live to the end of the process, and nobody touches them before the
        // results are there; the stream is of the GPU that was opened.
        let pushed = unsafe { worker.push_pull_gpu(&items, framework.stream.raw()) }?;
        for (tensor, handle) in some.iter().zip(pushed) {
            handles.push((usize::try_from(tensor.number).unwrap_or(0), queued, handle));
        }
        at += some.len();
    }
    Ok(())
}

fn check(
    worker: &Worker,
    framework: &Framework,
    tensors: &[Tensor],
    first: u64,
    handles: &[(usize, usize, Handle)],
) -> Result<(), Error> {
    let mut places = vec![0; tensors.len()];
    for (place, tensor) in tensors.iter().enumerate() {
        places[usize::try_from(tensor.number).unwrap_or(0)] = place;
    }
    for (number, queued, handle) in handles {
        let tensor = &tensors[places[*number]];
        let is_whole_average =
            tensor.said.operation == Operation::Average && !tensor.said.dtype.is_float();
        match handle.wait(Some(LIMIT)) {
            Ok(true) => {}
            Ok(false) => panic!("{} round {first}+{queued} does not end", tensor.said.name),
            // NCCL rounds such averages in its own way, so without servers they are refused.
            Err(Error::Refused(Refusal::WholeAverage { .. })) if is_whole_average => continue,
            Err(error) => return Err(error),
        }
        // SAFETY: the stream is of the GPU that was opened.
        unsafe { Handle::make_wait(std::slice::from_ref(handle), framework.stream.raw()) }?;
        let source = &tensor.sources[*queued];
        source.fetch(&framework.stream).map_err(gpu)?;
        if let Some(target) = &tensor.targets[*queued] {
            target.fetch(&framework.stream).map_err(gpu)?;
        }
    }
    framework.synchronize().map_err(gpu)?;
    for (number, queued, handle) in handles {
        let Tensor { said, number, sources, targets, .. } = &tensors[places[*number]];
        if handle.wait(None).is_err() {
            continue;
        }
        assert!(handle.poll(), "{}: the stream has passed the result", said.name);
        let (round, count) =
            (first + *queued as u64, usize::try_from(said.shape.count()).unwrap_or(0));
        let wanted =
            reference::result(said.dtype, said.operation, *number, worker.size(), round, count);
        let source = sources[*queued].fetched();
        if let Some(target) = &targets[*queued] {
            same(said, round, worker.rank(), "the result", target.fetched(), &wanted);
            let own = reference::contribution(said.dtype, *number, worker.rank(), round, count);
            same(said, round, worker.rank(), "the source", source, &own);
        } else {
            same(said, round, worker.rank(), "the result in place", source, &wanted);
        }
    }
    Ok(())
}

#[track_caller]
fn same(said: &Declaration, round: u64, rank: u32, what: &str, got: &[u8], wanted: &[u8]) {
    let wrong = got.iter().zip(wanted).filter(|(one, other)| one != other).count();
    let first = got.iter().zip(wanted).position(|(one, other)| one != other);
    assert!(
        wrong == 0,
        "{} round {round} on rank {rank}: {what} has {wrong} of {} bytes wrong, from {first:?} on",
        said.name,
        wanted.len()
    );
}

/// Two rounds in place on the same memory, without a wait: the second pushes what the first gives.
fn chained(worker: &Worker, framework: &Framework) -> Result<(), Error> {
    const COUNT: usize = 50_000;
    let (dtype, operation, shape) = (DType::I32, Operation::Sum, (COUNT as u64).into());
    let name = "chained".into();
    let said = Declaration { name, dtype, shape, operation, ..on_gpus() };
    let ids = worker.declare(std::slice::from_ref(&said))?;
    let buffer = framework.buffer(COUNT * 4)?;
    let own = reference::contribution(dtype, 9999, worker.rank(), 1, COUNT);
    buffer.fill(&framework.stream, &own).map_err(gpu)?;
    let (source, target) = (buffer.address, buffer.address);
    let item = GpuPushPull { tensor: ids[0], source, target, priority: 0 };
    let mut handles = Vec::new();
    for _ in 0..2 {
        // SAFETY: the buffer is never freed, and read only when both rounds are over.
        handles.extend(unsafe { worker.push_pull_gpu(&[item], framework.stream.raw()) }?);
    }
    for handle in &handles {
        assert_eq!(handle.wait(Some(LIMIT)), Ok(true));
        // SAFETY: the stream is of the GPU that was opened.
        unsafe { Handle::make_wait(std::slice::from_ref(handle), framework.stream.raw()) }?;
    }
    buffer.fetch(&framework.stream).map_err(gpu)?;
    framework.synchronize().map_err(gpu)?;
    let once = reference::result(dtype, operation, 9999, worker.size(), 1, COUNT);
    let size = i32::try_from(worker.size()).unwrap_or(1);
    let times = |bytes: &[u8]| i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) * size;
    let twice: Vec<u8> = once.chunks(4).flat_map(|bytes| times(bytes).to_le_bytes()).collect();
    same(&said, 2, worker.rank(), "the result of two", buffer.fetched(), &twice);
    Ok(())
}

/// Tensors of the host that are pushed between those of the GPU.
struct Beside {
    said: Vec<Declaration>,
    ids: Vec<TensorId>,
    under_way: Vec<(usize, u64, Vec<u8>, Handle)>,
}

impl Beside {
    fn new(worker: &Worker) -> Result<Beside, Error> {
        let one = |dtype: DType, operation| Declaration {
            name: format!("host.{dtype}.{operation}"),
            dtype,
            shape: 30_011.into(),
            operation,
            device: false,
            members: Members::ALL,
            receiver: None,
            encoding: None,
            store: None,
        };
        let said = vec![
            one(DType::F32, Operation::Sum),
            one(DType::BF16, Operation::Average),
            one(DType::I8, Operation::Average),
            one(DType::F64, Operation::Broadcast(Rank(0))),
        ];
        let ids = worker.declare(&said)?;
        Ok(Beside { said, ids, under_way: Vec::new() })
    }

    fn push(&mut self, worker: &Worker, round: u64) -> Result<(), Error> {
        for (at, said) in self.said.iter().enumerate() {
            let count = usize::try_from(said.shape.count()).unwrap_or(0);
            let number = 5000 + at as u64;
            let mut values =
                reference::contribution(said.dtype, number, worker.rank(), round, count);
            let target = values.as_mut_ptr();
            let (tensor, source) = (self.ids[at], target.cast_const());
            let item = PushPull { tensor, source, target, priority: 1 };
            // SAFETY: the values are kept, untouched, until `check` has waited.
            let mut handles = unsafe { worker.push_pull(&[item]) }?;
            self.under_way.extend(handles.pop().map(|handle| (at, round, values, handle)));
        }
        Ok(())
    }

    fn check(&mut self, worker: &Worker) -> Result<(), Error> {
        for (at, round, values, handle) in self.under_way.drain(..) {
            assert!(handle.wait(Some(LIMIT))?, "a tensor of the host does not end");
            let said = &self.said[at];
            let count = usize::try_from(said.shape.count()).unwrap_or(0);
            let (number, size) = (5000 + at as u64, worker.size());
            let wanted = reference::result(said.dtype, said.operation, number, size, round, count);
            same(said, round, worker.rank(), "the result", &values, &wanted);
        }
        Ok(())
    }
}

/// Tensors of more parts than there are slots.
fn large(config: &Config) -> Result<(), Error> {
    let worker = Worker::start(config)?;
    worker.open_gpu(0)?;
    let framework = Framework::new().map_err(gpu)?;
    let mut tensors = Vec::new();
    for (number, dtype) in [(0, DType::F32), (1, DType::I32)] {
        let count = (12 << 20) / dtype.size() as u64 + 77;
        let (name, operation) = (format!("large {number}"), Operation::Sum);
        let shape = count.into();
        let said = Declaration { name, dtype, shape, operation, ..on_gpus() };
        let id = worker.declare(std::slice::from_ref(&said))?[0];
        let bytes = usize::try_from(count).unwrap_or(0) * dtype.size();
        let source = framework.buffer(bytes)?;
        let (sources, targets) = (vec![source], vec![None]);
        tensors.push(Tensor { said, number, id, sources, targets });
    }
    let mut random = Random::new(u64::from(worker.rank()));
    for round in 1..=2 {
        shuffle(&mut tensors, &mut random);
        let mut handles = Vec::new();
        push(&worker, &framework, &tensors, round, 0, &mut random, &mut handles)?;
        check(&worker, &framework, &tensors, round, &handles)?;
    }
    worker.shutdown(false)
}

/// A tensor of all GPUs, to be summed.
fn on_gpus() -> Declaration {
    Declaration {
        name: String::new(),
        dtype: DType::F32,
        shape: 0.into(),
        operation: Operation::Sum,
        device: true,
        members: Members::ALL,
        receiver: None,
        encoding: None,
        store: None,
    }
}

/// One tensor again and again. From the round `stall` on it pushes nothing, and waits for a
/// barrier that the others do not come to; or, if it `leaves`, shuts down with the round under way.
/// From the round 0 on means that it is late to shut down.
fn train(config: &Config, rounds: u64, stall: Option<u64>, leaves: bool) -> Result<(), Error> {
    const COUNT: usize = 100_000;
    let worker = Worker::start(config)?;
    worker.open_gpu(0)?;
    let framework = Framework::new().map_err(gpu)?;
    let (name, dtype, operation) = ("layer4.weight".into(), DType::F32, Operation::Sum);
    let shape = (COUNT as u64).into();
    let said = Declaration { name, dtype, shape, operation, ..on_gpus() };
    let id = worker.declare(std::slice::from_ref(&said))?[0];
    let buffer = framework.buffer(COUNT * 4)?;
    for round in 1..=rounds {
        if stall == Some(round) && !leaves {
            eprintln!("rank stalls in round {round}");
            return worker.barrier(None);
        }
        let own = reference::contribution(said.dtype, 0, worker.rank(), round, COUNT);
        buffer.fill(&framework.stream, &own).map_err(gpu)?;
        let (source, target) = (buffer.address, buffer.address);
        let item = GpuPushPull { tensor: id, source, target, priority: 0 };
        // SAFETY: the buffer is never freed, and not touched before the result is there.
        let handles = unsafe { worker.push_pull_gpu(&[item], framework.stream.raw()) }?;
        if stall == Some(round) {
            eprintln!("rank leaves in round {round}");
            return worker.shutdown(false);
        }
        worker.enqueue_results(&handles);
        handles[0].wait(None)?;
        // SAFETY: the stream is of the GPU that was opened.
        unsafe { Handle::make_wait(&handles[..1], framework.stream.raw()) }?;
        buffer.fetch(&framework.stream).map_err(gpu)?;
        framework.synchronize().map_err(gpu)?;
        let wanted = reference::result(said.dtype, said.operation, 0, worker.size(), round, COUNT);
        if buffer.fetched() != wanted {
            // What was to come when the job ended is of no use, and the next call says why.
            worker.barrier(Some(LIMIT))?;
        }
        same(&said, round, worker.rank(), "the result", buffer.fetched(), &wanted);
        if round == 1 {
            eprintln!("rank has begun");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    if stall == Some(0) {
        std::thread::sleep(LATE);
    }
    worker.shutdown(false)
}

/// One rank declares the tensor as one of the host, after the others have pushed it; another tensor
/// must go on.
fn mismatch(config: &Config, is_odd: bool) -> Result<(), Error> {
    let worker = Worker::start(config)?;
    worker.open_gpu(0)?;
    let framework = Framework::new().map_err(gpu)?;
    let said = |name: &str, device| Declaration {
        name: name.into(),
        dtype: DType::F32,
        shape: 1000.into(),
        operation: Operation::Sum,
        device,
        members: Members::ALL,
        receiver: None,
        encoding: None,
        store: None,
    };
    let source = framework.buffer(4000)?.address;
    let push = |tensor| {
        let item = GpuPushPull { tensor, source, target: source, priority: 0 };
        // SAFETY: the buffer is never freed, and the stream is of the GPU that was opened.
        unsafe { worker.push_pull_gpu(&[item], framework.stream.raw()) }?[0].wait(None)
    };
    let good = worker.declare(&[said("good", true)])?[0];
    push(good)?;
    if is_odd {
        std::thread::sleep(Duration::from_millis(200));
    }
    let spoilt = worker.declare(&[said("spoilt", !is_odd)]).and_then(|ids| push(ids[0]));
    match spoilt {
        Err(Error::Mismatch(told)) => eprintln!("rank was told: {told}"),
        other => panic!("a mismatch must be told: {other:?}"),
    }
    push(good)?;
    worker.shutdown(false)
}

/// Again and again one rank declares a tensor as one of the host, while the others reduce it,
/// together with another that must come out right; so many `times`.
fn mismatches(config: &Config, is_odd: bool, times: u64) -> Result<(), Error> {
    const COUNT: usize = 5000;
    let worker = Worker::start(config)?;
    worker.open_gpu(0)?;
    let framework = Framework::new().map_err(gpu)?;
    let said = |name: String, device| {
        let (dtype, operation, count) = (DType::F32, Operation::Sum, COUNT as u64);
        Declaration {
            name,
            dtype,
            shape: count.into(),
            operation,
            device,
            members: Members::ALL,
            receiver: None,
            encoding: None,
            store: None,
        }
    };
    let buffers = [framework.buffer(4 * COUNT)?, framework.buffer(4 * COUNT)?];
    let good = worker.declare(&[said("good".into(), true)])?[0];
    let told = |number: u64, result: Result<bool, Error>| match result {
        Err(Error::Mismatch(told)) if told.first_said.name == format!("spoilt.{number}") => {}
        other => panic!("mismatch {number} must be told: {other:?}"),
    };
    for number in 0..times {
        worker.barrier(Some(LIMIT))?;
        let name = format!("spoilt.{number}");
        if is_odd {
            std::thread::sleep(Duration::from_micros(number * 733 % 4000));
        }
        let declared = worker.declare(&[said(name, !is_odd)]);
        let item = |tensor, buffer: &Buffer| {
            let (source, target) = (buffer.address, buffer.address);
            GpuPushPull { tensor, source, target, priority: 0 }
        };
        let own = reference::contribution(DType::F32, 0, worker.rank(), number, COUNT);
        buffers[1].fill(&framework.stream, &own).map_err(gpu)?;
        let ours = declared.as_ref().ok().filter(|_| !is_odd);
        let spoilt = ours.map(|ids| item(ids[0], &buffers[0]));
        let items: Vec<_> = spoilt.into_iter().chain([item(good, &buffers[1])]).collect();
        // SAFETY: the buffers are never freed, and the stream is of the GPU that was opened.
        let handles = unsafe { worker.push_pull_gpu(&items, framework.stream.raw()) }?;
        handles[items.len() - 1].wait(None)?;
        // SAFETY: the stream is of the GPU that was opened, and is never destroyed.
        unsafe { Handle::make_wait(&handles, framework.stream.raw()) }?;
        match declared {
            // It was the first to declare it.
            Ok(_) if is_odd => {}
            Ok(_) => told(number, handles[0].wait(None)),
            Err(error) => told(number, Err(error)),
        }
        buffers[1].fetch(&framework.stream).map_err(gpu)?;
        framework.synchronize().map_err(gpu)?;
        let wanted = reference::result(DType::F32, Operation::Sum, 0, worker.size(), number, COUNT);
        assert!(buffers[1].fetched() == wanted, "a wrong sum beside mismatch {number}");
    }
    worker.shutdown(false)
}

/// Records a timeline of rounds 2 to 4, and ends it while the GPU is at work.
fn record(config: &Config) -> Result<(), Error> {
    let worker = Worker::start(config)?;
    worker.open_gpu(0)?;
    let framework = Framework::new().map_err(gpu)?;
    let (name, dtype, shape) = ("layer4.weight".into(), DType::F32, 100_000.into());
    let said = Declaration {
        name,
        dtype,
        shape,
        operation: Operation::Sum,
        device: true,
        members: Members::ALL,
        receiver: None,
        encoding: None,
        store: None,
    };
    let (tensor, source) = (worker.declare(&[said])?[0], framework.buffer(400_000)?.address);
    let item = GpuPushPull { tensor, source, target: source, priority: 0 };
    for round in 1..=6 {
        if round == 2 {
            worker.start_timeline(&config.trace_folder(), 1..=u64::MAX)?;
        }
        // SAFETY: the buffer is never freed, and the stream is of the GPU that was opened.
        let handles = unsafe { worker.push_pull_gpu(&[item], framework.stream.raw()) }?;
        handles[0].wait(None)?;
        if round == 4 {
            worker.stop_timeline();
        }
        // SAFETY: the stream is of the GPU that was opened, and is never destroyed.
        unsafe { Handle::make_wait(&handles[..1], framework.stream.raw()) }?;
    }
    worker.shutdown(false)
}

/// Opens the second GPU as well.
fn second(config: &Config) -> Result<(), Error> {
    let worker = Worker::start(config)?;
    worker.open_gpu(0)?;
    worker.open_gpu(0)?;
    let opened = worker.open_gpu(1);
    worker.shutdown(false)?;
    opened
}

/// Leaves, and joins again in the same process.
fn resume(config: &Config) -> Result<(), Error> {
    for life in 0..2 {
        let worker = Worker::start(config)?;
        worker.open_gpu(0)?;
        let framework = Framework::new().map_err(gpu)?;
        chained(&worker, &framework)?;
        worker.shutdown(life == 0)?;
    }
    Ok(())
}
