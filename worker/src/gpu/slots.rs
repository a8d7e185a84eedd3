//! The slots of a rank: how many, in which memory, and what of them RDMA devices are to reach.

use super::direct::{Direct, GpuSlots};
use crate::cuda::{Device, GpuError, Pinned};
use crate::rounds::{Pool, Slot, SlotMemory};
use std::ptr::NonNull;

/// Slots of each pool: so many bytes, but not fewer than so many slots.
const POOL_BYTES: usize = 16 << 20;
const POOL_SLOTS_MIN: usize = 8;
/// And never fewer than lanes and so many, since each lane may have one that waits.
pub(crate) const SLOTS_BEYOND_LANES: usize = 2;

/// See the [module](self).
pub(crate) struct Slots {
    /// To be copied into, and sent from.
    pub(crate) to_send: Vec<Slot>,
    /// For what comes.
    pub(crate) to_land: Vec<Slot>,
    /// For the NIC loop.
    pub(crate) reach: SlotMemory,
    /// What holds those in the host's memory, behind bytes of the caller's.
    pub(crate) memory: Pinned,
    /// How many those are.
    pub(crate) pinned: usize,
    /// What holds those in the GPU's.
    pub(crate) direct: Direct,
}

/// Slots in each pool, of so many bytes, for a rank with so many lanes.
pub(crate) fn count(slot_bytes: usize, lanes: usize) -> usize {
    (POOL_BYTES / slot_bytes).max(POOL_SLOTS_MIN).max(lanes + SLOTS_BEYOND_LANES)
}

impl Slots {
    /// Takes the memory of so many slots in each pool, the host's on this NUMA node and with
    /// `before` bytes in front for the caller.
    ///
    /// # Errors
    /// There is no memory.
    pub(crate) fn lay(
        device: &Device,
        (slots, slot_bytes): (usize, usize),
        (has_servers, has_column): (bool, bool),
        mut direct: Direct,
        numa_node: Option<u32>,
        before: usize,
    ) -> Result<Slots, GpuError> {
        let pool_bytes = slots * slot_bytes;
        let mut pools = vec![Pool::Sends];
        // What no server sends, and no rank publishes, needs no slots.
        if has_servers {
            pools.push(Pool::Results);
        }
        if has_column {
            pools.push(Pool::Publications);
        }
        if direct.answers.is_some() {
            pools.push(Pool::Answers);
        }
        let pinned = slots * pools.iter().filter(|pool| on_gpu(&direct, **pool).is_none()).count();
        let memory = Pinned::new(device, before + pinned * slot_bytes, numa_node)?;
        let (mut to_send, mut to_land) = (Vec::new(), Vec::new());
        let (mut host_to_send, mut host_to_land) = (None, None);
        let (mut numbers, mut free) = (0u32.., memory.as_ptr().wrapping_add(before));
        for pool in pools {
            let gpu = on_gpu(&direct, pool);
            let base = gpu.map_or(free, GpuSlots::base);
            if gpu.is_none() {
                free = free.wrapping_add(pool_bytes);
                let range = NonNull::new(base).map(|base| (base, pool_bytes));
                match pool {
                    Pool::Sends => host_to_send = range,
                    // Where some are in the GPU's memory, no others are granted.
                    Pool::Results if direct.answers.is_none() => host_to_land = range,
                    _ => {}
                }
            }
            let to = if pool == Pool::Sends { &mut to_send } else { &mut to_land };
            to.extend((0..slots).zip(&mut numbers).map(|(index, number)| {
                let at = base.wrapping_add(index * slot_bytes);
                // SAFETY: the bytes are this slot's alone, of memory that the pipeline holds until
                // the loop has ended, and numbers count up.
                unsafe { Slot::new(number, pool, (at, slot_bytes), gpu.is_some()) }
            }));
        }
        // SAFETY: pools of `memory`, which the pipeline holds until the loop has ended.
        let mut reach = unsafe { SlotMemory::in_host(host_to_send, host_to_land) };
        let registered = |slots: &mut Option<GpuSlots>| slots.as_mut()?.registered.take();
        reach.gpu_to_send = registered(&mut direct.sends);
        reach.gpu_to_land = registered(&mut direct.answers);
        Ok(Slots { to_send, to_land, reach, memory, pinned, direct })
    }
}

/// The memory of this pool, if it is in the GPU's.
fn on_gpu(direct: &Direct, pool: Pool) -> Option<&GpuSlots> {
    match pool {
        Pool::Sends => direct.sends.as_ref(),
        Pool::Answers => direct.answers.as_ref(),
        Pool::Results | Pool::Publications | Pool::Own => None,
    }
}
