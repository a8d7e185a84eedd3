//! The rows about GPUs: who reaches their memory, and how those of a host reduce among themselves.

use super::Field::{Count, Counts, Path};
use super::rows::{RANKING, count};
use super::{Group, Row, choices};
use crate::limits::RANKS_MAX;

/// No NCCL has more channels; some have fewer, and take their own limit for more.
const NCCL_RINGS_MAX: u32 = 64;

/// In the order in which the documents list them.
pub(super) const ROWS: &[Row] = &[
    Row::new(
        "BPS_NCCL_LIBRARY",
        RANKING,
        Group::Gpus,
        Path { at: |config| &mut config.nccl_library },
        "/opt/nccl/lib/libnccl.so.2",
        "NCCL for the GPUs of a host; otherwise the framework's own, or one that the system has.",
    ),
    Row::new(
        "BPS_GPUDIRECT",
        RANKING,
        Group::Gpus,
        choices::GPUDIRECT,
        "none",
        "Whether RDMA devices read and write the GPU's memory by themselves (GPUDirect RDMA): \
         where a trial shows that they do, and about as fast as the host's (auto); or an error \
         where they can't, or where BPS_ELASTIC=shrink keeps what is sent in the host's memory \
         (demand); or never. Never run on hardware so far: see docs/rdma.md.",
    ),
    Row::new(
        "BPS_GPU_STAGING_MB",
        RANKING,
        Group::Gpus,
        Count { at: |config| &mut config.gpu_staging_mb, min: 0, max: 1 << 20 },
        "16384",
        "MiB of pinned memory of the host that tensors on a GPU may have of their own: training \
         goes on while they are on their way (docs/gpu.md). For a rank alone on its host, over \
         TCP and shared memory; tensors for which nothing is left share slots.",
    ),
    Row::new(
        "BYTEPS_NCCL_GROUP_SIZE",
        RANKING,
        Group::Gpus,
        Count { at: |config| &mut config.nccl_group_size, min: 0, max: 1024 },
        "32",
        "Collectives among the GPUs of a host that are launched together, at most. 0 is 16, and \
         128 where one host is the whole job. The same on every worker of a host.",
    ),
    Row::new(
        "BYTEPS_NCCL_NUM_RINGS",
        RANKING,
        Group::Gpus,
        Count { at: |config| &mut config.nccl_rings, min: 0, max: NCCL_RINGS_MAX },
        "8",
        "Rings that NCCL lays through the GPUs of a host: its channels, each with a thread block \
         of every GPU and buffers of its own. 0 leaves the number to NCCL, and so does 1, the only \
         value with which BytePS works. The same on every worker of a host.",
    ),
    Row::new(
        "BYTEPS_REDUCE_ROOTS",
        RANKING,
        Group::Gpus,
        Counts { at: |config| &mut config.reduce_roots, max: count(RANKS_MAX) - 1 },
        "0,2",
        "Local ranks that alone copy between GPU and host and speak to servers: each part of a \
         tensor on GPUs is reduced to one of them and broadcast from it. Without it every rank of \
         a host does so for its share. The same on every worker.",
    ),
    Row::new(
        "BYTEPS_PCIE_SWITCH_SIZE",
        RANKING,
        Group::Gpus,
        Count { at: |config| &mut config.switch_size, min: 0, max: count(RANKS_MAX) },
        "4",
        "GPUs below each PCIe switch of a host: NCCL reduces among the ranks of a switch, and the \
         sums of the switches are added in the host's memory. 0, or all that a host has, is one \
         reduction by NCCL. It divides the local size. The same on every worker.",
    ),
];
