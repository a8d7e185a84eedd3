//! How a lane's memory and queues are laid out: what both ends must know before one of them writes.

#![forbid(unsafe_code)]

use super::RdmaError;
use super::grants::GRANTS;
use crate::limits::{ALIGNMENT, PART_BYTES_MAX};

/// Extents of one direction that may be under way.
pub(super) const EXTENTS: usize = 64;
/// Operations that are posted together at most, and places to receive that are awaited before
/// they are posted again.
pub(super) const BATCH: usize = 16;
/// Sends that may be posted and not known to be complete: extents, credits, a farewell.
pub(super) const SENDS: usize = 2 * EXTENTS + 1;
/// Places to receive.
pub(super) const RECEIVES: usize = 2 * EXTENTS + GRANTS + 1 + BATCH;
/// Bytes in front of every extent's payload.
pub(super) const PREFIX_BYTES: usize = 128;
/// Most bytes of one direction's area.
const AREA_BYTES_MAX: usize = 64 << 20;

const _: () = assert!(PREFIX_BYTES.is_multiple_of(ALIGNMENT));

/// How much memory a lane registers for what it receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RdmaOptions {
    /// Most bytes of payload that one write carries; a longer payload travels as several, so that
    /// the reader works on one while the next is on its way.
    pub slot_bytes: usize,
    /// Slots.
    pub slots: usize,
}

impl Default for RdmaOptions {
    fn default() -> RdmaOptions {
        RdmaOptions { slot_bytes: 256 << 10, slots: 8 }
    }
}

/// A checked [`RdmaOptions`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    pub(super) slot_bytes: usize,
    pub(super) slots: usize,
}

impl Layout {
    pub(super) fn new(options: RdmaOptions) -> Result<Layout, RdmaError> {
        let RdmaOptions { slot_bytes, slots } = options;
        let sound = slot_bytes.is_multiple_of(ALIGNMENT)
            && (4096..=PART_BYTES_MAX).contains(&slot_bytes)
            && slots >= 4
            && slots.checked_mul(slot_bytes + PREFIX_BYTES).is_some_and(|b| b <= AREA_BYTES_MAX);
        if sound {
            return Ok(Layout { slot_bytes, slots });
        }
        Err(RdmaError::Peer(format!(
            "{slots} slots of {slot_bytes} bytes make no lane: at least 4, of a multiple of \
             {ALIGNMENT} from 4096 on, together at most {AREA_BYTES_MAX} bytes"
        )))
    }

    pub(super) fn area_bytes(self) -> usize {
        self.slots * (self.slot_bytes + PREFIX_BYTES)
    }
}
