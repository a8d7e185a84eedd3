//! The transport's own memory: staging and scratch, aligned as the contract promises. Allocated at
//! attach, freed at detach, touched only as far as bytes arrive.
//!
//! Invariant: the pool has a scratch buffer for every lane attached, in the pool or held by that
//! lane's receiver, and a lane holds at most one; so `take` never finds the pool empty.

use crate::limits::{ALIGNMENT, SCRATCH_BYTES};
use std::alloc::Layout;
use std::ptr::NonNull;

/// Memory that is aligned to [`ALIGNMENT`], uninitialised until written through its pointer.
pub(super) struct Block {
    first: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a block owns its memory alone, and gives out raw pointers only, so it may move between
// threads.
unsafe impl Send for Block {}

impl Block {
    /// A block of this many bytes, which must not be 0.
    pub fn new(bytes: usize) -> Block {
        assert!(bytes > 0, "a block of memory has at least one byte");
        let layout = Layout::from_size_align(bytes, ALIGNMENT)
            .expect("the sizes in limits.rs are far below isize::MAX");
        // SAFETY: the layout's size is not zero, which the assertion above checks.
        let memory = unsafe { std::alloc::alloc(layout) };
        let Some(first) = NonNull::new(memory) else { std::alloc::handle_alloc_error(layout) };
        Block { first, layout }
    }

    /// Address of the byte at this offset, which must lie within the block or just behind it.
    pub fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.layout.size());
        self.first.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: `first` came from `alloc` with this layout in `new`, and nothing else frees it.
        unsafe { std::alloc::dealloc(self.first.as_ptr(), self.layout) };
    }
}

/// The scratch buffers that no lane holds now. The one last given back is the first taken, so that
/// the lanes of a core, which rarely fill scratch all at once, share the part of it that is in
/// cache.
pub(super) struct Pool {
    free: Vec<Block>,
    lanes: usize,
}

impl Pool {
    pub fn new() -> Pool {
        Pool { free: Vec::new(), lanes: 0 }
    }

    /// A lane comes: one more buffer.
    pub fn grow(&mut self) {
        self.lanes += 1;
        self.free.reserve(self.lanes - self.free.len());
        self.free.push(Block::new(SCRATCH_BYTES));
    }

    /// A lane went, having given back what it held: one buffer less.
    pub fn shrink(&mut self) {
        self.lanes -= 1;
        self.free.pop();
    }

    /// A buffer for a lane that holds none.
    pub fn take(&mut self) -> Block {
        self.free
            .pop()
            .expect("the pool has one buffer for each lane, and a lane holds one at most")
    }

    /// The lane's buffer comes back.
    pub fn give(&mut self, scratch: Block) {
        self.free.push(scratch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_aligned() {
        for bytes in [1, 63, 64, SCRATCH_BYTES] {
            assert_eq!(Block::new(bytes).at(0).addr() % ALIGNMENT, 0, "{bytes} bytes");
        }
    }

    #[test]
    fn the_buffer_given_back_last_is_taken_first() {
        let mut pool = Pool::new();
        pool.grow();
        pool.grow();
        let (one, two) = (pool.take(), pool.take());
        let address = one.at(0);
        pool.give(two);
        pool.give(one);
        let again = pool.take();
        assert_eq!(again.at(0), address);
        pool.give(again);
        pool.shrink();
        pool.shrink();
        assert!(pool.free.is_empty());
    }
}
