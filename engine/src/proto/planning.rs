//! What all workers of a job must be told alike about how tensors are cut and placed.

use super::tuning::Tuning;
use crate::base::Placement;
use serde::{Deserialize, Serialize};

/// How tensors are cut into parts and parts are placed on cores.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Planning {
    /// `BYTEPS_PARTITION_BYTES`.
    pub partition_bytes: u32,
    /// Placement function.
    pub placement: Placement,
    /// `BYTEPS_MIXED_MODE_BOUND`.
    pub mixed_bound: u32,
    /// `BYTEPS_BUILT_IN_HASH_COEF`.
    pub built_in_coefficient: u64,
    /// `BPS_LOCAL_REDUCE`: the ranks of a host reduce among themselves first.
    pub local_reduce: bool,
    /// `BYTEPS_FORCE_DISTRIBUTED`: through servers even where all ranks share a host.
    pub force_distributed: bool,
    /// `BYTEPS_REDUCE_ROOTS`: places in each group, in the order of ranks, that own the parts of
    /// tensors on GPUs; all where it is empty.
    pub reduce_roots: Vec<u32>,
    /// `BYTEPS_PCIE_SWITCH_SIZE`: ranks below each PCIe switch of a host; 0 where there is one.
    pub switch_size: u32,
    /// What the job finds by itself.
    #[serde(default, skip_serializing_if = "Tuning::is_off")]
    pub tuning: Tuning,
}

/// How many ranks of a group of so many are below each PCIe switch, if the hosts' switches have
/// `switch_size` each. A group that they do not divide is below one.
#[must_use]
pub fn switch_width(switch_size: u32, group: usize) -> usize {
    let size = switch_size as usize;
    if size > 0 && group.is_multiple_of(size) { size } else { group }
}
