//! What callers hand to a worker and get from it.

#![forbid(unsafe_code)]

use bps_engine::base::Rank;
use bps_engine::proto::uneven::Followed;

/// A declared tensor, dense from 0 in the order of first declaration in the job.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct TensorId(pub u32);

/// One tensor to push and pull.
#[derive(Clone, Copy, Debug)]
pub struct PushPull {
    /// Which.
    pub tensor: TensorId,
    /// Its bytes, as many as were declared.
    pub source: *const u8,
    /// Where the result goes; may be the source.
    pub target: *mut u8,
    /// Larger goes sooner.
    pub priority: i64,
}

/// One tensor on the GPU to push and pull.
#[derive(Clone, Copy, Debug)]
pub struct GpuPushPull {
    /// Which.
    pub tensor: TensorId,
    /// Its address on the GPU, of as many bytes as were declared.
    pub source: u64,
    /// Where the result goes; may be the source.
    pub target: u64,
    /// Larger goes sooner.
    pub priority: i64,
}

/// What a rank that has joined is told.
#[derive(Clone, PartialEq, Debug)]
pub enum Follow {
    /// Others push these: it has to declare them, and to push them as often in all.
    Pushes(Vec<Followed>),
    /// All ranks have joined, this one last.
    AllJoined(Rank),
}

/// Throughput over one interval.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Speed {
    /// End of the interval, milliseconds since 1970.
    pub unix_ms: u64,
    /// 10^6 bytes of finished tensors a second.
    pub megabytes_per_second: f64,
}

/// What an encoded tensor has left out of its rounds so far, on this rank: in f32, one for each
/// element, zeros where another rank of the host speaks to the server. Empty if nothing is kept.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Kept {
    /// What error feedback adds to the next round.
    pub residue: Vec<f32>,
    /// Nesterov's momentum.
    pub velocity: Vec<f32>,
}
