//! What can go wrong with a GPU, each with what, where and what to do next.

#![forbid(unsafe_code)]

use bps_engine::base::{Key, Rank};
use bps_engine::limits::PARTS_MAX;
use std::time::Duration;

/// An error of CUDA or NCCL. Its text is one line for people.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GpuError {
    /// This machine, or this container, has no NVIDIA driver.
    #[error(
        "no NVIDIA driver here: {why}; install the driver, or, in a container, let it have the \
         GPUs (docker run --gpus all)"
    )]
    NoDriver {
        /// What the dynamic linker says.
        why: String,
    },
    /// The driver is older than what this engine calls. Versions are those of
    /// `cuDriverGetVersion`, 1000 × major + 10 × minor.
    #[error(
        "the NVIDIA driver is too old: it is of CUDA {}, and CUDA {} or later is needed; update \
         the driver (525 is the first with CUDA 12.0)",
        cuda_version(*found),
        cuda_version(*needed)
    )]
    DriverTooOld {
        /// The driver's.
        found: u32,
        /// The least.
        needed: u32,
    },
    /// A library has not a function that its version promises.
    #[error(
        "{library} has no function {symbol}: it is damaged or not the real one; install it anew"
    )]
    NoFunction {
        /// The library, by its path or name.
        library: String,
        /// The function.
        symbol: &'static str,
    },
    /// There is no such GPU.
    #[error(
        "there is no GPU {ordinal}: this process sees {count} (numbered from 0); give the process \
         a GPU that exists, and look at CUDA_VISIBLE_DEVICES and nvidia-smi"
    )]
    NoDevice {
        /// The GPU asked for.
        ordinal: u32,
        /// The number of GPUs that there are.
        count: u32,
    },
    /// A call of CUDA failed.
    #[error("CUDA: {call} failed: {text} (error {code}){}", cuda_remedy(*code))]
    Cuda {
        /// The function of the driver's interface.
        call: &'static str,
        /// Its `CUresult`.
        code: u32,
        /// What the driver calls it.
        text: String,
    },
    /// Memory of the host for a GPU could not be had.
    #[error("pinned memory for GPU {ordinal}: {why}")]
    Memory {
        /// The GPU.
        ordinal: u32,
        /// What failed, and what to do.
        why: String,
    },
    /// RDMA devices are to reach a GPU's memory, and can't.
    #[error(
        "GPUDirect RDMA with GPU {ordinal} is demanded (BPS_GPUDIRECT=demand) and can't be: {why}; \
         with auto the engine uses slots of the host's memory"
    )]
    Direct {
        /// The GPU.
        ordinal: u32,
        /// What is in the way.
        why: String,
    },
    /// NCCL was not found.
    #[error(
        "NCCL is needed where a host has several GPUs, and was not found (tried {tried}); install \
         it (PyTorch's CUDA packages bring it) or set BPS_NCCL_LIBRARY to the path of libnccl.so.2"
    )]
    NcclMissing {
        /// Each name or path that was tried, with what the dynamic linker says.
        tried: String,
    },
    /// NCCL is older than what this engine calls. Versions are those of `ncclGetVersion`,
    /// 10000 × major + 100 × minor + patch.
    #[error(
        "NCCL {} at {path} is too old: {} or later is needed; install a newer one, or set \
         BPS_NCCL_LIBRARY to the path of its libnccl.so.2",
        nccl_version(*found),
        nccl_version(*needed)
    )]
    NcclTooOld {
        /// The library's path.
        path: String,
        /// The library's version.
        found: u32,
        /// The least.
        needed: u32,
    },
    /// A call of NCCL failed, or a communicator has failed behind the calls.
    #[error(
        "NCCL: {call} failed: {text} (error {code}){}; NCCL_DEBUG=WARN makes it say more",
        nccl_detail(last_error)
    )]
    Nccl {
        /// The function.
        call: &'static str,
        /// Its `ncclResult_t`.
        code: u32,
        /// What NCCL calls it.
        text: String,
        /// What NCCL said last about this communicator; empty if nothing.
        last_error: String,
    },
    /// Ranks of a host do not agree on the order of their collectives.
    #[error("{from}, of this host, {breach}: run the same release on all ranks")]
    Order {
        /// Who.
        from: Rank,
        /// What it says that it can't.
        breach: Breach,
    },
    /// Something did not end in time.
    #[error("{awaited} did not end within {} s{}", after.as_secs_f64(), awaited.remedy())]
    Timeout {
        /// What was waited for.
        awaited: Awaited,
        /// How long it was waited for.
        after: Duration,
    },
}

/// What a rank may not say about the order of collectives.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Breach {
    /// An order, which the first rank of the host alone gives.
    #[error("sent an order but is not the leader")]
    NotLeader,
    /// A report, which the first rank alone gets.
    #[error("sent a report to a rank that is not the leader")]
    NotToLeader,
    /// A report of a rank that is on another host.
    #[error("is not of this host")]
    OfAnotherHost,
    /// About a row that is not declared.
    #[error("names a row that this rank does not know ({key})")]
    UnknownRow {
        /// Its first key.
        key: Key,
    },
    /// A push of something that is no tensor's first key.
    #[error("pushed an unknown tensor ({key})")]
    UnknownTensor {
        /// What it names.
        key: Key,
    },
    /// A push of a tensor that is for a set of ranks which it is none of.
    #[error("pushed {key}, which is a part of a tensor for a set of ranks, of which it is none")]
    Outside {
        /// The first key of the tensor.
        key: Key,
    },
    /// A push of a round that it has pushed already, or that is not the open one.
    #[error("pushed {key} in round {round}, and round {open} is open or has its push already")]
    Untimely {
        /// The first key of the tensor.
        key: Key,
        /// The round that it named.
        round: u64,
        /// The open one.
        open: u64,
    },
    /// About a round that is not open here.
    #[error("names a round that is not open ({key}, round {round})")]
    NotOpen {
        /// The first key of the row.
        key: Key,
        /// The round.
        round: u64,
    },
    /// A result that nobody waits for.
    #[error("has a result that was not due ({key}, round {round})")]
    ResultNotDue {
        /// The first key of the row.
        key: Key,
        /// The round.
        round: u64,
    },
    /// An order for which it is too early or too late.
    #[error("orders what is not due ({key}, round {round})")]
    OrderNotDue {
        /// The first key of the row.
        key: Key,
        /// The round.
        round: u64,
    },
    /// More ends of tensors than there can be tensors.
    #[error("has ended over {PARTS_MAX} tensors")]
    TooManyEnded,
    /// More keys than there can be.
    #[error("has pushed over {PARTS_MAX} keys")]
    TooManyPushed,
}

/// What a GPU or NCCL did not end in time.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Awaited {
    /// What was enqueued.
    #[error("work on GPU {ordinal}")]
    Work {
        /// The GPU.
        ordinal: u32,
    },
    /// What was enqueued for a round that has failed.
    #[error("what the GPU had to do for a round that has failed ({why})")]
    FailedRound {
        /// The line of its error, which whoever pushed it has got.
        why: String,
    },
    /// A communicator begins, for which all of its ranks must come.
    #[error("NCCL's start on rank {rank} of {ranks}")]
    Start {
        /// The rank in the communicator.
        rank: u32,
        /// The ranks in it.
        ranks: u32,
    },
    /// NCCL enqueues a collective, in which all ranks of the host must take part.
    #[error("NCCL's enqueueing")]
    Enqueueing,
    /// A call in which all ranks of the communicator must take part.
    #[error("{call} on rank {rank} of {ranks}")]
    Others {
        /// The function.
        call: &'static str,
        /// The rank in the communicator.
        rank: u32,
        /// The ranks in it.
        ranks: u32,
    },
    /// A call that frees a communicator.
    #[error("{call} on rank {rank} of {ranks}")]
    Freeing {
        /// The function.
        call: &'static str,
        /// The rank in the communicator.
        rank: u32,
        /// The ranks in it.
        ranks: u32,
    },
}

impl Awaited {
    /// What may be the cause, and where to look.
    fn remedy(&self) -> &'static str {
        match self {
            Awaited::Start { .. } => {
                ": the other ranks of this host did not all come; look at what they print"
            }
            Awaited::Enqueueing | Awaited::Others { .. } => {
                ": another rank of this host does not take part; look at what they print"
            }
            Awaited::Work { .. } | Awaited::FailedRound { .. } | Awaited::Freeing { .. } => "",
        }
    }
}

impl GpuError {
    /// Whether it says that another rank is gone: `ncclRemoteError`.
    pub(crate) fn is_of_another_rank(&self) -> bool {
        matches!(self, GpuError::Nccl { code: 6, .. })
    }
}

/// `12.4` for 12040.
pub(crate) fn cuda_version(number: u32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// `2.18.3` for 21803. Up to 2.8 the numbers were 1000 × major + 100 × minor + patch.
pub(crate) fn nccl_version(number: u32) -> String {
    let unit = if number < 10_000 { 1000 } else { 10_000 };
    format!("{}.{}.{}", number / unit, number % unit / 100, number % 100)
}

/// What to do about the errors of CUDA that users meet.
fn cuda_remedy(code: u32) -> &'static str {
    match code {
        2 => "; the GPU, or the memory that can be pinned, is full: end other programs on it",
        3 => "; a process that was forked after CUDA was in use can't use it: start it by spawn",
        46 | 802 => "; the GPU is busy or not ready: look at nvidia-smi, and try again",
        304 | 999 => "; look at nvidia-smi and at the kernel's log for the driver's own messages",
        803 => "; the driver's libraries and its kernel module differ: restart the machine",
        _ => "",
    }
}

fn nccl_detail(last_error: &str) -> String {
    if last_error.is_empty() { String::new() } else { format!(": {last_error}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_people_write_them() {
        assert_eq!(cuda_version(12_040), "12.4");
        assert_eq!(cuda_version(13_000), "13.0");
        assert_eq!(nccl_version(21_803), "2.18.3");
        assert_eq!(nccl_version(2_708), "2.7.8");
        assert_eq!(nccl_version(23_002), "2.30.2");
    }

    #[test]
    fn texts_say_what_to_do() {
        let text = GpuError::DriverTooOld { found: 11_040, needed: 12_000 }.to_string();
        assert!(
            text.contains("11.4") && text.contains("12.0") && text.contains("update"),
            "{text}"
        );
        let text = GpuError::Cuda { call: "cuInit", code: 803, text: "x".into() }.to_string();
        assert!(text.contains("cuInit") && text.contains("restart the machine"), "{text}");
        let last_error = String::new();
        let text = GpuError::Nccl { call: "ncclGroupEnd", code: 6, text: "r".into(), last_error };
        assert!(text.to_string().contains("(error 6); NCCL_DEBUG"), "{text}");
        let after = Duration::from_secs(60);
        let late = GpuError::Timeout { awaited: Awaited::Start { rank: 1, ranks: 4 }, after };
        assert_eq!(
            late.to_string(),
            "NCCL's start on rank 1 of 4 did not end within 60 s: the other ranks of this host did \
             not all come; look at what they print"
        );
        let breach = Breach::NotOpen { key: Key(7), round: 3 };
        assert_eq!(
            GpuError::Order { from: Rank(1), breach }.to_string(),
            "rank 1, of this host, names a round that is not open (key 7, round 3): run the same \
             release on all ranks"
        );
    }
}
