//! A program that uses `bps_worker::cuda` in one way or another, for the tests in `gpu_driver.rs`:
//! `bps-test-gpu SCENARIO [ARGUMENT]` or `bps-test-gpu SCENARIO RANK RANKS FILE`, where rank 0
//! writes the communicator's identity into the file. Says on standard error how it ended.

use bps_engine::base::{DType, Operation};
use bps_engine::encode::{Draw, narrow, widen};
use bps_tests::reference;
use bps_worker::Encoding;
use bps_worker::cuda::{
    Comm, Device, Event, EventPool, Family, GpuError, Kernels, Nccl, Pinned, ReduceOp, Stream,
    driver,
};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

#[path = "bps-test-gpu/kept.rs"]
mod kept;

const LIMIT: Duration = Duration::from_secs(20);

type Outcome = Result<String, GpuError>;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let text = |index: usize| arguments.get(index).map_or("", String::as_str);
    let number = |index: usize| text(index).parse::<u32>().unwrap_or(0);
    let outcome = match text(0) {
        "available" => driver::available().map(|()| format!("{} GPUs", driver::count())),
        "open" => open(number(1)),
        "copies" => copies(text(1) == "wait"),
        "codecs" => codecs(),
        "kept" => kept::kept(),
        "context" => context(),
        "pinned" => pinned(),
        "nccl" => Nccl::load(Some(text(1)).filter(|path| !path.is_empty()).map(Path::new))
            .map(|nccl| nccl.describe()),
        scenario => member(scenario, number(1), number(2), Path::new(text(3))),
    };
    match outcome {
        Ok(text) => eprintln!("gpu ended: {text}"),
        Err(error) => {
            eprintln!("gpu failed: {error}");
            std::process::exit(7);
        }
    }
}

fn open(ordinal: u32) -> Outcome {
    let device = Device::open(ordinal)?;
    let (free, total) = device.memory()?;
    let (name, address, version) = (device.name(), device.pci_bus_id(), device.driver_version());
    let number = device.uuid()[15];
    Ok(format!("{name} at {address}, CUDA {version}, no. {number}, {free} of {total} bytes free"))
}

/// Bytes go to the GPU on one stream, across it on a second and back on a third. Without waits
/// between the streams they come back wrong.
fn copies(waits: bool) -> Outcome {
    const BYTES: usize = 1 << 16;
    const ROUNDS: u8 = 100;
    let device = Device::open(0)?;
    device.make_current()?;
    let streams = [Stream::new(&device)?, Stream::new(&device)?, Stream::new(&device)?];
    let events = EventPool::new(&device, 2)?;
    let (up, down) = (Pinned::new(&device, BYTES, None)?, Pinned::new(&device, BYTES, Some(0))?);
    let (first, second) = (device.alloc(BYTES)?, device.alloc(BYTES)?);
    let mut wrong = 0;
    for round in 1..=ROUNDS {
        // SAFETY: all copies of the last round are done, and nobody else has the memory.
        unsafe { up.as_ptr().write_bytes(round, BYTES) };
        let link = |from: &Stream, to: &Stream| {
            let event = events.take()?;
            event.record(from)?;
            if waits {
                to.wait(&event)?;
            }
            Ok::<(), GpuError>(())
        };
        // SAFETY: the memory lives until the end of this function, which waits for each copy.
        unsafe { streams[0].copy_to_device(first, up.as_ptr(), BYTES) }?;
        link(&streams[0], &streams[1])?;
        // SAFETY: both ranges of the GPU have `BYTES` bytes and are freed after the last copy.
        unsafe { streams[1].copy_on_device(second, first, BYTES) }?;
        link(&streams[1], &streams[2])?;
        // SAFETY: `down` has `BYTES` bytes and lives until the copy's stream has been waited for.
        unsafe { streams[2].copy_to_host(down.as_ptr(), second, BYTES) }?;
        for stream in &streams {
            let done = Event::new(&device)?;
            done.record(stream)?;
            done.wait(LIMIT)?;
            wait_until("the stream is idle", || stream.is_idle())?;
        }
        // SAFETY: the copy is done, and nothing writes there before the next round.
        let landed = unsafe { std::slice::from_raw_parts(down.as_ptr(), BYTES) };
        wrong += u32::from(landed.iter().any(|&byte| byte != round));
    }
    for address in [first, second] {
        // SAFETY: all copies are done.
        unsafe { device.free(address) }?;
    }
    Ok(format!("{wrong} of {ROUNDS} rounds were wrong"))
}

/// All codecs that have kernels, and what they are tried with.
const CODECS: [&str; 22] = [
    "fp16",
    "bf16",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8",
    "fp8_e4m3(stochastic)",
    "fp8_e5m2(stochastic)",
    "int8(stochastic)",
    "onebit",
    "onebit(scaling)",
    "topk(k=1)",
    "topk(k=0.01)",
    "topk(k=0.4)",
    "randomk(k=1, seed=3)",
    "randomk(k=0.01, seed=4)",
    "randomk(k=0.9, seed=5)",
    "dithering(levels=1)",
    "dithering(levels=7, seed=6)",
    "dithering(levels=127, l2)",
    "dithering(levels=5, natural)",
    "dithering(levels=32, natural, l2)",
    "dithering(levels=15)",
];
const ELEMENTS: [usize; 12] = [1, 3, 4, 127, 128, 129, 1000, 1023, 9_001, 65_536, 65_537, 262_143];
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The kernels give what the engine gives on the processor, both ways, whatever the numbers are.
fn codecs() -> Outcome {
    let device = Device::open(0)?;
    device.make_current()?;
    let stream = Stream::new(&device)?;
    let blocks = Kernels::load(&device, Family::Blocks)?;
    let whole = Kernels::load(&device, Family::Whole)?;
    let room = 4 * ELEMENTS.iter().max().expect("there are some");
    let wire = Pinned::new(&device, room, None)?;
    let (mut tried, mut wrong) = (0, Vec::new());
    for (name, dtype) in CODECS.iter().flat_map(|name| DTYPES.map(|dtype| (name, dtype))) {
        let encoding: Encoding = name.parse().expect("an encoding");
        let kernels = match Family::of(encoding) {
            Some(Family::Blocks) => &blocks,
            _ => &whole,
        };
        let coder = kernels.coder(encoding, dtype)?.expect("it has kernels");
        let parts = ELEMENTS.iter().flat_map(|elements| [(*elements, true), (*elements, false)]);
        for (seed, (elements, has_all)) in (1..).zip(parts) {
            let bytes = elements * dtype.size();
            let Some(encoded) = coder.wire_bytes(bytes) else { continue };
            tried += 1;
            let (mut values, mut tensor) = (numbers(seed, elements, has_all), vec![0; bytes]);
            narrow(dtype, &values, &mut tensor);
            widen(dtype, &tensor, &mut values);
            let draw = Draw { shared: 55 + seed, own: 77 + seed };
            let mut expected = vec![0; encoded];
            encoding.codec.encode(&values, draw, &mut expected);
            let memory = Buffer::new(&stream, &tensor)?;
            // SAFETY: the wire has room for all, and what uses it is waited for.
            unsafe { coder.encode(&stream, memory.address, wire.as_ptr(), bytes, (draw, None)) }?;
            wait_until("it is encoded", || stream.is_idle())?;
            // SAFETY: it was written, and nobody writes there now.
            let found = unsafe { std::slice::from_raw_parts(wire.as_ptr(), encoded) };
            let numbers = match *name {
                "fp16" => Some(DType::F16),
                "bf16" => Some(DType::BF16),
                _ => None,
            };
            if !same(numbers, found, &expected) {
                wrong.push(format!("{name} of {elements} {dtype}"));
            }
            encoding.codec.decode(&expected, draw, &mut values);
            narrow(dtype, &values, &mut tensor);
            // SAFETY: the wire has room for all, and what uses it is waited for.
            unsafe { coder.decode(&stream, wire.as_ptr(), memory.address, bytes, draw) }?;
            wait_until("it is decoded", || stream.is_idle())?;
            if !same(Some(dtype), &memory.content(&stream)?, &tensor) {
                wrong.push(format!("{elements} {dtype} from {name}"));
            }
        }
    }
    Ok(format!("{tried} encodings, wrong: {wrong:?}"))
}

/// Numbers of all magnitudes; some blocks are zeros, and, if wanted, some have what is not finite.
#[allow(clippy::cast_possible_truncation, reason = "the number's bits are what is wanted")]
fn numbers(seed: u64, count: usize, has_all: bool) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    };
    let one = |index: usize| {
        let bits = next();
        match (index / 128 % 8, index % 128) {
            (1, _) => 0.0,
            (2, 17) if has_all => f32::INFINITY,
            (3, 5) if has_all => f32::NAN,
            // Any bits that are a number.
            (4, _) if has_all && bits & 0x7f80_0000 != 0x7f80_0000 => f32::from_bits(bits),
            // Next to zero.
            (5, _) => f32::from_bits(bits & 0x80ff_ffff),
            _ => f32::from_bits(bits & 0x83ff_ffff | 0x3c00_0000),
        }
    };
    (0..count).map(one).collect()
}

/// Whether numbers of this type, if these are numbers, are the same or no numbers; or else bytes.
fn same(numbers: Option<DType>, one: &[u8], other: &[u8]) -> bool {
    let Some(dtype) = numbers else { return one == other };
    let values = |bytes: &[u8]| {
        let mut values = vec![0.0; bytes.len() / dtype.size()];
        widen(dtype, bytes, &mut values);
        values
    };
    let mut pairs = values(one).into_iter().zip(values(other));
    pairs.all(|(one, other)| one.to_bits() == other.to_bits() || one.is_nan() && other.is_nan())
}

/// What needs a context says so without one, and what brings its own leaves the thread as it was.
fn context() -> Outcome {
    let device = Device::open(0)?;
    let stream = Stream::new(&device)?;
    let pinned = Pinned::new(&device, 4096, None)?;
    let address = device.alloc(4096)?;
    let event = Event::new(&device)?;
    // SAFETY: 0 is the default stream; that of the fake does nothing.
    unsafe { event.record_raw(0) }?;
    // SAFETY: 0 is the default stream, which always exists.
    unsafe { event.make_wait(0) }?;
    event.wait(LIMIT)?;
    // SAFETY: the memory outlives the call, and the call fails.
    let refused = unsafe { stream.copy_to_host(pinned.as_ptr(), address, 4096) };
    let refused = refused.expect_err("this thread has no context");
    device.make_current()?;
    // SAFETY: the memory outlives the copy, which is waited for.
    unsafe { stream.copy_to_host(pinned.as_ptr(), address, 4096) }?;
    event.record(&stream)?;
    event.wait(LIMIT)?;
    Ok(refused.to_string())
}

fn pinned() -> Outcome {
    let device = Device::open(0)?;
    let pinned = Pinned::new(&device, 3 << 20, None)?;
    Ok(format!("{} bytes", pinned.len()))
}

/// Looks again and again, for a bounded time.
fn wait_until(
    what: &str,
    mut holds: impl FnMut() -> Result<bool, GpuError>,
) -> Result<(), GpuError> {
    let start = Instant::now();
    while !holds()? {
        assert!(start.elapsed() < LIMIT, "not within {LIMIT:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// A rank's tools.
struct Member {
    comm: Comm,
    stream: Stream,
    event: Event,
    rank: u32,
    ranks: u32,
    folder: PathBuf,
}

fn member(scenario: &str, rank: u32, ranks: u32, file: &Path) -> Outcome {
    let device = Device::open(rank)?;
    device.make_current()?;
    let nccl = Nccl::load(None)?;
    let id = if rank == 0 {
        let id = nccl.unique_id()?;
        let draft = file.with_extension("draft");
        std::fs::write(&draft, id).expect("the test's folder can be written");
        std::fs::rename(&draft, file).expect("the test's folder can be written");
        id
    } else {
        wait_until("rank 0 has written the identity", || Ok(file.exists()))?;
        let bytes = std::fs::read(file).expect("it is there");
        <[u8; 128]>::try_from(bytes).expect("an identity")
    };
    let deadline = if scenario == "late" { Duration::from_secs(1) } else { LIMIT };
    if scenario == "late" && rank != 0 {
        return Ok("never came".into());
    }
    let comm = nccl.comm(&device, &id, ranks, rank, None, deadline, || true)?;
    let (stream, event) = (Stream::new(&device)?, Event::new(&device)?);
    let folder = file.parent().expect("the file is in a folder").to_owned();
    let member = Member { comm, stream, event, rank, ranks, folder };
    match scenario {
        "collectives" => member.collectives(),
        "disagree" => member.disagree(),
        "die" => member.die(),
        "abort" => member.abort(),
        _ => panic!("there is no scenario {scenario}"),
    }
}

/// Memory of the GPU, given back at the end.
struct Buffer {
    device: Device,
    address: u64,
    bytes: usize,
}

impl Buffer {
    fn new(stream: &Stream, content: &[u8]) -> Result<Buffer, GpuError> {
        let device = stream.device().clone();
        let address = device.alloc(content.len())?;
        let buffer = Buffer { device, address, bytes: content.len() };
        // SAFETY: both ranges live until the copy is done, which is waited for.
        unsafe { stream.copy_to_device(address, content.as_ptr(), content.len()) }?;
        wait_until("the copy is done", || stream.is_idle())?;
        Ok(buffer)
    }

    fn content(&self, stream: &Stream) -> Result<Vec<u8>, GpuError> {
        let mut content = vec![0; self.bytes];
        // SAFETY: both ranges live until the copy is done, which is waited for.
        unsafe { stream.copy_to_host(content.as_mut_ptr(), self.address, self.bytes) }?;
        wait_until("the copy is done", || stream.is_idle())?;
        Ok(content)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: who drops it has waited for what uses it.
        let _ = unsafe { self.device.free(self.address) };
    }
}

impl Member {
    fn wait(&self) -> Result<(), GpuError> {
        self.event.record(&self.stream)?;
        self.event.wait(LIMIT)
    }

    /// Every collective over every type, against the reference.
    fn collectives(self) -> Outcome {
        const COUNT: usize = 1000;
        let mut checked = 0;
        for (number, dtype) in DType::ALL.into_iter().enumerate() {
            for (operation, op) in [
                (Operation::Sum, ReduceOp::Sum),
                (Operation::Average, ReduceOp::Average),
                (Operation::Min, ReduceOp::Min),
                (Operation::Max, ReduceOp::Max),
                (Operation::Product, ReduceOp::Product),
            ] {
                // Integers are averaged by rounding in different directions; they are not asked.
                if op == ReduceOp::Average && !dtype.is_float() {
                    continue;
                }
                self.round(number as u64, dtype, operation, op, COUNT)?;
                checked += 1;
            }
        }
        self.comm.close(LIMIT)?;
        Ok(format!("{checked} rounds were right"))
    }

    fn round(
        &self,
        round: u64,
        dtype: DType,
        operation: Operation,
        op: ReduceOp,
        count: usize,
    ) -> Result<(), GpuError> {
        let ranks = self.ranks as usize;
        let all = count * ranks;
        let piece = count * dtype.size();
        let own = self.rank as usize * piece;
        let given = |rank: u32| reference::contribution(dtype, 7, rank, round, all);
        let contributions: Vec<Vec<u8>> = (0..self.ranks).map(given).collect();
        let expected = reference::result(dtype, operation, 7, self.ranks, round, all);
        let buffer = || Buffer::new(&self.stream, &contributions[self.rank as usize]);
        let (scattered, reduced, rooted, told) = (buffer()?, buffer()?, buffer()?, buffer()?);
        let root = self.ranks - 1;
        let at = scattered.address;
        let mine = at + own as u64;
        // SAFETY: all buffers live until `wait` has seen the end, and nobody else uses them.
        unsafe { self.comm.reduce_scatter(at, mine, count, dtype, op, &self.stream) }?;
        // SAFETY: `scattered` lives until `wait` has seen the end; the stream keeps the order.
        unsafe { self.comm.all_gather(mine, at, count, dtype, &self.stream) }?;
        let (at, to, source) = (reduced.address, rooted.address, told.address);
        let calls = || {
            // SAFETY: `reduced` has `all` elements and lives until `wait` has seen the end.
            unsafe { self.comm.all_reduce(at, at, all, dtype, op, &self.stream) }?;
            // SAFETY: `rooted` has `all` elements and lives until `wait` has seen the end.
            unsafe { self.comm.reduce(to, to, all, dtype, op, root, &self.stream) }?;
            // SAFETY: `told` has `all` elements and lives until `wait` has seen the end.
            unsafe { self.comm.broadcast(source, source, all, dtype, root, &self.stream) }
        };
        if round.is_multiple_of(2) {
            self.comm.group(calls)?;
        } else if !self.comm.submit(calls)? {
            wait_until("the group is enqueued", || self.comm.is_enqueued())?;
        }
        self.wait()?;
        self.comm.async_error()?;
        let what = format!("{operation} of {dtype} on rank {}", self.rank);
        let content = |buffer: Buffer| buffer.content(&self.stream);
        assert!(content(scattered)? == expected, "reduce-scatter and all-gather: {what}");
        assert!(content(reduced)? == expected, "all-reduce: {what}");
        if self.rank == root {
            assert!(content(rooted)? == expected, "reduce: {what}");
        }
        assert!(content(told)? == contributions[root as usize], "broadcast: {what}");
        Ok(())
    }

    /// Waits until the first `ranks` ranks are here, by files.
    fn meet(&self, place: &str, ranks: u32) -> Result<(), GpuError> {
        let file = |rank: u32| self.folder.join(format!("{place}-{rank}"));
        std::fs::write(file(self.rank), "").expect("the test's folder can be written");
        wait_until(place, || Ok((0..ranks).all(|rank| file(rank).exists())))
    }

    /// Enqueues a sum of so many floats.
    fn sum(&self, buffer: &Buffer, count: usize) -> Result<(), GpuError> {
        let at = buffer.address;
        // SAFETY: the buffer outlives the communicator, which the callers end.
        unsafe { self.comm.all_reduce(at, at, count, DType::F32, ReduceOp::Sum, &self.stream) }
    }

    /// The error that comes behind the calls.
    fn error(&self) -> Result<GpuError, GpuError> {
        let mut error = None;
        wait_until("an error has come", || {
            error = self.comm.async_error().err();
            Ok(error.is_some())
        })?;
        Ok(error.expect("it has come"))
    }

    /// Makes a last call, gets its error at once or later, sees that the stream stands, and aborts.
    /// So do the first `ranks` ranks.
    fn fail(self, buffer: &Buffer, count: usize, ranks: u32) -> Outcome {
        let called = self.sum(buffer, count);
        self.event.record(&self.stream)?;
        let error = match called {
            // The end of the last rank may be known already, and nothing is enqueued then.
            Err(error) => error,
            Ok(()) => {
                let error = self.error()?;
                assert!(!self.event.is_done()?, "the stream stands until the abort");
                error
            }
        };
        // The end of one rank would be another error for the next.
        self.meet("failed", ranks)?;
        self.comm.abort()?;
        self.event.wait(LIMIT)?;
        Ok(format!("{error}"))
    }

    /// The second call is of another size on the last rank.
    fn disagree(self) -> Outcome {
        let buffer = Buffer::new(&self.stream, &[0; 4000])?;
        self.sum(&buffer, 1000)?;
        self.wait()?;
        let count = if self.rank == self.ranks - 1 { 999 } else { 1000 };
        let ranks = self.ranks;
        self.fail(&buffer, count, ranks)
    }

    /// The last rank dies while the others wait for it.
    fn die(self) -> Outcome {
        let buffer = Buffer::new(&self.stream, &[0; 4000])?;
        self.sum(&buffer, 1000)?;
        self.wait()?;
        self.meet("begun", self.ranks)?;
        if self.rank == self.ranks - 1 {
            std::process::exit(0);
        }
        let left = self.ranks - 1;
        self.fail(&buffer, 1000, left)
    }

    /// Rank 0 gives up what the others never join.
    fn abort(self) -> Outcome {
        let buffer = Buffer::new(&self.stream, &[0; 4000])?;
        self.meet("begun", self.ranks)?;
        if self.rank == 0 {
            self.sum(&buffer, 1000)?;
            self.event.record(&self.stream)?;
            assert!(!self.event.is_done()?, "the other ranks do not take part");
            let (stream, event) = (self.stream, self.event);
            self.comm.abort()?;
            event.wait(LIMIT)?;
            wait_until("the stream is idle", || stream.is_idle())?;
            return Ok("given up".into());
        }
        self.error()?;
        self.comm.abort().map(|()| "rank 0 has gone".into())
    }
}
