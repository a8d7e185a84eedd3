//! Results that wait for the network, as an engine enqueues them on a GPU: a wait for a word and
//! the copy behind it, one by one or many to a call of the driver, alone and beside a thread that
//! enqueues small copies within the GPU, as a framework does its kernels.

use super::{Effort, Probe};
use crate::report::{self, Fields};
use crate::sample::Series;
use bps_worker::cuda::{Awaited, Device, Event, GpuError, Pinned, Stream, Track, WORD_BYTES};
use serde_json::json;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// See the [module](self).
pub const PROBE: Probe = Probe {
    name: "driver",
    asks: "what a wait and its copy take on a GPU one by one and together, and who launches beside",
    columns: &["bytes", "together", "beside", "copy_us", "launch_us"],
    measure,
};

/// Waits and copies of a sample: as many as `DenseNet121` has parameters.
const COPIES: usize = 364;
/// What the other thread enqueues before it waits for the GPU, so that the driver has room.
const LAUNCHES: usize = 256;
/// Bytes of a copy within the GPU.
const LAUNCH_BYTES: usize = 4 << 10;
/// How long the GPU may take for a sample.
const PATIENCE: Duration = Duration::from_secs(10);

/// A way to enqueue.
struct Variant {
    bytes: usize,
    /// Waits and copies of a call; none for launches alone.
    together: usize,
    beside: bool,
}

/// Microseconds of a wait and its copy, and of a launch.
#[derive(Default)]
struct Seen {
    copy: Series,
    launch: Series,
}

fn other(error: GpuError) -> io::Error {
    io::Error::other(error)
}

fn measure(effort: Effort) -> io::Result<Vec<Fields>> {
    let skipped = |error| io::Error::new(io::ErrorKind::Unsupported, format!("skipped: {error}"));
    let device = Device::open(0).map_err(skipped)?;
    let mut variants = vec![Variant { bytes: 0, together: 0, beside: true }];
    for bytes in [4 << 10, 64 << 10] {
        for together in [1, 16] {
            let variant = |beside| Variant { bytes, together, beside };
            variants.extend([variant(false), variant(true)]);
        }
    }
    let mut seen: Vec<Seen> = variants.iter().map(|_| Seen::default()).collect();
    let mut gpu = Gpu::new(&device).map_err(other)?;
    for round in 0..effort.rounds {
        for turn in 0..variants.len() {
            let index = (round + turn) % variants.len();
            let (copy, launch) = once(&mut gpu, &device, &variants[index])?;
            copy.into_iter().for_each(|copy| seen[index].copy.0.push(copy));
            launch.into_iter().for_each(|launch| seen[index].launch.0.push(launch));
        }
    }
    let row = |(variant, seen): (&Variant, &Seen)| {
        let mut fields = report::fields(json!({
            "bytes": variant.bytes,
            "together": variant.together,
            "beside": variant.beside,
            "gpu": device.name(),
            "driver": device.driver_version(),
        }));
        for (name, series) in [("copy_us", &seen.copy), ("launch_us", &seen.launch)] {
            if !series.0.is_empty() {
                report::cost(&mut fields, name, series);
            }
        }
        fields
    };
    Ok(variants.iter().zip(&seen).map(row).collect())
}

/// What copies lead from and to, and their stream, which goes first.
struct Gpu {
    ordinal: u32,
    track: Track,
    /// The track's word, one that all waits find passed, and what is copied.
    memory: Pinned,
    target: u64,
}

impl Gpu {
    fn new(device: &Device) -> Result<Gpu, GpuError> {
        device.make_current()?;
        let memory = Pinned::new(device, 2 * WORD_BYTES + (COPIES * (64 << 10)), None)?;
        // SAFETY: the track is dropped before the memory, which is new, and the waits use another
        // word.
        let track = unsafe { Track::new(device, &memory, 0) }?;
        // The process ends with the memory of the GPU.
        let target = device.alloc(COPIES * (64 << 10))?;
        Ok(Gpu { ordinal: device.ordinal(), track, target, memory })
    }

    /// Enqueues all waits and copies; returns what one takes, in microseconds.
    fn enqueue(&mut self, variant: &Variant) -> Result<f64, GpuError> {
        let word = self.memory.as_ptr().wrapping_add(WORD_BYTES).expose_provenance() as u64;
        let source = self.memory.as_ptr().wrapping_add(2 * WORD_BYTES);
        let began = Instant::now();
        for first in (0..COPIES).step_by(variant.together) {
            let some = first..(first + variant.together).min(COPIES);
            // SAFETY: a word of the memory, which outlives the waits: they end below.
            unsafe { self.track.wait_for_words(&vec![(word, 0); some.len()]) }?;
            for at in some.map(|copy| copy * variant.bytes) {
                let (to, from) = (self.target + at as u64, source.wrapping_add(at));
                // SAFETY: both have room for all copies, of which no two share bytes.
                unsafe { self.track.copy_to_device(to, from, variant.bytes) }?;
            }
            self.track.enqueue()?;
        }
        let taken = began.elapsed();
        let mark = self.track.mark()?;
        while !self.track.passed().has(mark) {
            if began.elapsed() > PATIENCE {
                let awaited = Awaited::Work { ordinal: self.ordinal };
                return Err(GpuError::Timeout { awaited, after: PATIENCE });
            }
            std::hint::spin_loop();
        }
        Ok(micros(taken, COPIES))
    }
}

/// One sample: what a copy takes, and what a launch does, where there are such.
fn once(
    gpu: &mut Gpu,
    device: &Device,
    variant: &Variant,
) -> io::Result<(Option<f64>, Option<f64>)> {
    let is_over = AtomicBool::new(false);
    let copies = |gpu: &mut Gpu| (variant.together > 0).then(|| gpu.enqueue(variant)).transpose();
    if !variant.beside {
        return Ok((copies(gpu).map_err(other)?, None));
    }
    std::thread::scope(|scope| {
        let launches = scope.spawn(|| launch(device, &is_over));
        // It has begun, and goes on throughout.
        std::thread::sleep(Duration::from_millis(5));
        let copied = copies(gpu);
        is_over.store(true, Ordering::Release);
        let launched = launches.join().map_err(|_| io::Error::other("the other thread panicked"));
        Ok((copied.map_err(other)?, Some(launched?.map_err(other)?)))
    })
}

/// Enqueues small copies within the GPU until that is over; returns what one takes.
fn launch(device: &Device, is_over: &AtomicBool) -> Result<f64, GpuError> {
    device.make_current()?;
    let (stream, done) = (Stream::new(device)?, Event::new(device)?);
    let memory = device.alloc(2 * LAUNCH_BYTES)?;
    let (mut taken, mut count) = (Duration::ZERO, 0);
    while !is_over.load(Ordering::Acquire) {
        let began = Instant::now();
        for _ in 0..LAUNCHES {
            // SAFETY: both halves of the memory, which is freed behind the last of them.
            unsafe { stream.copy_on_device(memory, memory + LAUNCH_BYTES as u64, LAUNCH_BYTES) }?;
        }
        taken += began.elapsed();
        count += LAUNCHES;
        done.record(&stream)?;
        done.wait(PATIENCE)?;
    }
    // SAFETY: all that used it is over.
    unsafe { device.free(memory) }?;
    Ok(micros(taken, count))
}

#[allow(clippy::cast_precision_loss, reason = "a sample has few of them")]
fn micros(taken: Duration, count: usize) -> f64 {
    taken.as_secs_f64() * 1e6 / count as f64
}
