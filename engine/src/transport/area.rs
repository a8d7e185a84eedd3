//! The slots of one direction as a ring of bytes. It knows no memory, only where in it a run of
//! bytes may go.
//!
//! Invariant: runs that are reserved and not yet freed never overlap.

#![forbid(unsafe_code)]

use crate::limits::ALIGNMENT;

/// The slots as a ring of bytes: reserved and freed in order.
pub(in crate::transport) struct Area {
    bytes: usize,
    tail: usize,
    used: usize,
}

impl Area {
    pub(in crate::transport) fn new(bytes: usize) -> Area {
        Area { bytes, tail: 0, used: 0 }
    }

    /// Room for `length` bytes in one run: where, and how much that takes from the ring.
    pub(in crate::transport) fn find(&self, length: usize) -> Option<(usize, usize)> {
        let length = length.next_multiple_of(ALIGNMENT);
        // An empty ring starts over, so that a lane with little in flight stays in the same cache
        // lines.
        let tail = if self.used == 0 { 0 } else { self.tail };
        let rest = self.bytes - tail;
        let (at, taken) = if length <= rest { (tail, length) } else { (0, rest + length) };
        (self.used + taken <= self.bytes).then_some((at, taken))
    }

    pub(in crate::transport) fn reserve(&mut self, at: usize, length: usize, taken: usize) {
        self.tail = at + length.next_multiple_of(ALIGNMENT);
        self.used += taken;
    }

    /// Gives back what the oldest reservation took.
    pub(in crate::transport) fn free(&mut self, taken: usize) {
        self.used -= taken;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    proptest! {
        #[test]
        fn live_runs_never_overlap_and_an_empty_ring_takes_all(
            steps in proptest::collection::vec((any::<bool>(), 1usize..=4096), 1..300)
        ) {
            let mut area = Area::new(8192);
            let mut live = VecDeque::new();
            for (is_reserve, length) in steps {
                if is_reserve {
                    let Some((at, taken)) = area.find(length) else { continue };
                    prop_assert!(at.is_multiple_of(ALIGNMENT) && at + length <= 8192);
                    for (other, other_length, _) in &live {
                        prop_assert!(at + length <= *other || other + other_length <= at);
                    }
                    area.reserve(at, length, taken);
                    live.push_back((at, length, taken));
                } else if let Some((_, _, taken)) = live.pop_front() {
                    area.free(taken);
                }
                prop_assert!(!live.is_empty() || area.find(8192).is_some());
            }
        }
    }
}
