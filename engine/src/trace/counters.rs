//! What a data core counts: written by that core alone, read by anybody at any time.
//!
//! One writer means that an addition is a load and a store, without a locked instruction. A reader
//! sees each counter whole and never going back, but two counters of one look may be some passes
//! apart.

use std::sync::atomic::{AtomicU64, Ordering};

/// One counter of one writer.
#[derive(Default, Debug)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds to it. Only the thread that owns the block may call this: of two writers one would be
    /// lost.
    #[inline]
    pub fn add(&self, amount: u64) {
        // Relaxed: a counter orders nothing else.
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
    }

    /// The value now, or a moment ago.
    #[inline]
    #[must_use]
    pub fn read(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// The counters of one core, alone on their cache lines so that reading one core's never
        /// slows another.
        #[derive(Default, Debug)]
        #[repr(align(128))]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $name: Counter,)+
        }

        impl Counters {
            /// Every counter with its name and meaning, in the order of their declaration.
            pub fn read(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
                [$((stringify!($name), concat!($($doc),+), self.$name.read())),+].into_iter()
            }
        }
    };
}

counters! {
    /// Payload bytes received.
    bytes_in,
    /// Payload bytes sent.
    bytes_out,
    /// Frames received.
    frames_in,
    /// Frames sent.
    frames_out,
    /// Rounds closed.
    rounds,
    /// Times a lane was made to wait because its frame could not be taken yet.
    parked,
    /// Times a lane had no room for a frame.
    full,
    /// Rounds that were reported as stalled.
    stalls,
    /// Times the core slept because there was nothing to do.
    sleeps,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_reader_sees_each_counter_grow_to_its_sum() {
        const PASSES: u64 = 100_000;
        let counters = Arc::new(Counters::default());
        let writer = {
            let counters = Arc::clone(&counters);
            std::thread::spawn(move || {
                for _ in 0..PASSES {
                    counters.bytes_in.add(64);
                    counters.frames_in.add(1);
                }
            })
        };
        let mut before = 0;
        while !writer.is_finished() {
            let now = counters.bytes_in.read();
            assert!(now >= before && now.is_multiple_of(64));
            before = now;
            std::thread::yield_now();
        }
        writer.join().unwrap();
        assert_eq!((counters.bytes_in.read(), counters.frames_in.read()), (64 * PASSES, PASSES));
        assert_eq!(counters.rounds.read(), 0);
    }

    #[test]
    fn names_follow_fields_and_blocks_do_not_share_lines() {
        let counters = Counters::default();
        counters.sleeps.add(7);
        let all: Vec<_> = counters.read().collect();
        assert_eq!(all.len(), 9);
        assert_eq!((all[0].0, all[0].2), ("bytes_in", 0));
        assert_eq!((all[8].0, all[8].2), ("sleeps", 7));
        assert!(all.iter().all(|(_, meaning, _)| meaning.ends_with('.')));
        assert_eq!(align_of::<Counters>(), 128);
        assert!(size_of::<Counters>().is_multiple_of(128));
    }
}
