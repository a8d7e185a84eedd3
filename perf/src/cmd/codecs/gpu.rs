//! The same of a GPU: what its kernels encode out of its memory into the host's, and decode out of
//! the host's, beside copies of the same parts.
//!
//! Invariant: all is enqueued in one stream, a part at a time, as a job does it. What is timed
//! begins before the first call and ends when the GPU is idle.

use super::{Outcome, SAMPLE_BYTES};
use crate::arguments::{self, integer};
use crate::report::{self, Table};
use crate::sample::{self, Series};
use bps_engine::base::DType;
use bps_engine::encode::{Codec, Draw};
use bps_engine::proto::encoding::Encoding;
use bps_worker::cuda::{Coder, Device, Family, GpuError, KeptAt, Kernels, Pinned, Stream};
use clap::ArgMatches;
use serde_json::json;

/// Of a round, which one does not matter.
const DRAW: Draw = Draw { shared: 1, own: 1 };

/// Memory of both sides, and the stream between them.
struct Bench {
    stream: Stream,
    tensor: u64,
    /// For what error feedback keeps.
    residue: u64,
    wire: Pinned,
}

impl Bench {
    fn new(device: &Device) -> Result<Bench, GpuError> {
        device.make_current()?;
        let stream = Stream::new(device)?;
        let wire = Pinned::new(device, SAMPLE_BYTES, device.numa_node())?;
        let (tensor, residue) = (device.alloc(SAMPLE_BYTES)?, device.alloc(SAMPLE_BYTES)?);
        for memory in [tensor, residue] {
            // SAFETY: both have as many bytes and live until the copy is done, which is waited for.
            unsafe { stream.copy_to_device(memory, wire.as_ptr(), SAMPLE_BYTES) }?;
        }
        let bench = Bench { stream, tensor, residue, wire };
        bench.settle()?;
        Ok(bench)
    }

    fn settle(&self) -> Result<(), GpuError> {
        while !self.stream.is_idle()? {
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Enqueues something for each part, and waits for all.
    fn pass(&self, part: usize, work: impl Fn(u64, *mut u8) -> Result<(), GpuError>) {
        let done = (0..SAMPLE_BYTES / part).try_for_each(|number| {
            let at = number * part;
            work(self.tensor + at as u64, self.wire.as_ptr().wrapping_add(at))
        });
        done.and_then(|()| self.settle()).expect("the GPU has done so before");
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // SAFETY: each pass has waited for what it has enqueued.
        let _ = unsafe { self.stream.device().free(self.tensor) };
        // SAFETY: each pass has waited for what it has enqueued.
        let _ = unsafe { self.stream.device().free(self.residue) };
    }
}

/// Measures every pair of size and codec that has kernels.
pub fn run(matches: &ArgMatches, ordinal: u32) -> Outcome {
    let device = Device::open(ordinal)?;
    let bench = Bench::new(&device)?;
    let blocks = Kernels::load(&device, Family::Blocks)?;
    let whole = Kernels::load(&device, Family::Whole)?;
    let rounds = integer(matches, "rounds") as usize;
    let title = format!(
        "GB/s of f32 between GPU {ordinal} ({}) and pinned memory, {rounds} rounds",
        device.name()
    );
    let columns = [
        "codec",
        "size_bytes",
        "bytes_each",
        "copy_down_gbps",
        "encode_gbps",
        "encode_rest_gbps",
        "copy_up_gbps",
        "decode_gbps",
        "encode_to_copy",
        "encode_rest_to_copy",
        "decode_to_copy",
    ];
    let table = Table::new(matches, "codecs", &title, &columns);
    table.head();
    for codec in matches.get_many::<Codec>("codec").expect("has a default") {
        let encoding = Encoding::plain(*codec);
        let kernels = match Family::of(encoding) {
            Some(Family::Blocks) => &blocks,
            _ => &whole,
        };
        let coders = (
            kernels.coder(encoding, DType::F32)?,
            kernels.coder(Encoding { feedback: true, ..encoding }, DType::F32)?,
        );
        let (Some(coder), Some(keeper)) = coders else { continue };
        for part in arguments::bytes(matches, "size") {
            let Some(encoded) = coder.wire_bytes(part).filter(|_| part <= SAMPLE_BYTES) else {
                return Err(format!("--size {part}: a part has from 8 to {SAMPLE_BYTES}").into());
            };
            let [down, up, encode, rest, decode] = measure(&bench, [coder, keeper], part, rounds);
            #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
            let (gigabytes, bytes_each) = (
                (SAMPLE_BYTES / part * part) as f64 / 1e9,
                encoded as f64 / (part / size_of::<f32>()) as f64,
            );
            let mut fields = report::fields(json!({
                "codec": codec.to_string(),
                "gpu": device.name(),
                "size_bytes": part,
                "bytes_each": bytes_each,
                "rounds": rounds,
                "encode_to_copy": down.median() / encode.median(),
                "encode_rest_to_copy": down.median() / rest.median(),
                "decode_to_copy": up.median() / decode.median(),
            }));
            for (name, seconds) in [
                ("copy_down_gbps", &down),
                ("copy_up_gbps", &up),
                ("encode_gbps", &encode),
                ("encode_rest_gbps", &rest),
                ("decode_gbps", &decode),
            ] {
                report::rate(&mut fields, name, gigabytes, seconds);
            }
            table.row(fields);
        }
    }
    Ok(())
}

fn measure(bench: &Bench, [coder, keeper]: [Coder; 2], part: usize, rounds: usize) -> [Series; 5] {
    let stream = &bench.stream;
    sample::interleaved(
        rounds,
        1,
        [
            &mut || {
                // SAFETY: a part of both memories, which live until the pass is over.
                bench.pass(part, |tensor, wire| unsafe { stream.copy_to_host(wire, tensor, part) });
            },
            &mut || {
                // SAFETY: a part of both memories, which live until the pass is over.
                bench.pass(part, |tensor, wire| unsafe {
                    stream.copy_to_device(tensor, wire, part)
                });
            },
            &mut || {
                // SAFETY: a part of both memories, and kernels of the caller's: all live until the
                // pass is over.
                bench.pass(part, |tensor, wire| unsafe {
                    coder.encode(stream, tensor, wire, part, (DRAW, None))
                });
            },
            &mut || {
                bench.pass(part, |tensor, wire| {
                    let values = bench.residue + (tensor - bench.tensor);
                    let kept = KeptAt { values, velocity: 0 };
                    // SAFETY: a part of all three memories, which are as large, and kernels of the
                    // caller's: all live until the pass is over.
                    unsafe { keeper.encode(stream, tensor, wire, part, (DRAW, Some(kept))) }
                });
            },
            &mut || {
                // SAFETY: a part of both memories, which live until the pass is over.
                bench.pass(part, |tensor, wire| unsafe {
                    coder.decode(stream, wire, tensor, part, DRAW)
                });
            },
        ],
    )
}
