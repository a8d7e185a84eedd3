//! Parts and rows that wait for their turn.

#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A part, or a row, of a tensor under way.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Of {
    pub(super) tensor: u32,
    pub(super) index: u32,
}

/// Something that waits for its turn: the most urgent first, and in order among equals.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    priority: i64,
    /// Falls.
    number: Reverse<u64>,
    of: Of,
}

/// Things that wait for their turn.
#[derive(Default)]
pub(super) struct Turns {
    heap: BinaryHeap<Turn>,
    numbers: u64,
}

impl Turns {
    pub(super) fn push(&mut self, priority: i64, of: Of) {
        self.numbers += 1;
        self.heap.push(Turn { priority, number: Reverse(self.numbers), of });
    }

    pub(super) fn pop(&mut self) -> Option<Of> {
        self.heap.pop().map(|turn| turn.of)
    }

    pub(super) fn len(&self) -> usize {
        self.heap.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    pub(super) fn forget(&mut self, tensor: u32) {
        self.heap.retain(|turn| turn.of.tensor != tensor);
    }
}
