//! What a polling thread counts: written by that thread alone, read by anybody at any time.
//!
//! One writer means that an addition is a load and a store, without a locked instruction. A reader
//! sees each counter whole and never going back, but two counters of one look may be some passes
//! apart.

use std::sync::atomic::{AtomicU64, Ordering};

/// One counter or gauge of one writer.
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

    /// Replaces the value, of a gauge or of a sum that is kept elsewhere. For the owner alone, too.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
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
        /// The counters of one polling thread, alone on their cache lines so that reading one
        /// thread's never slows another.
        #[derive(Default, Debug)]
        #[repr(align(128))]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $name: Counter,)+
        }

        /// What the counters were at one look.
        #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
        pub struct Values {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl Counters {
            /// All of them now.
            #[must_use]
            pub fn read(&self) -> Values {
                Values { $($name: self.$name.read(),)+ }
            }
        }

        impl Values {
            /// The names, in the order of their declaration.
            pub const NAMES: &[&str] = &[$(stringify!($name)),+];

            /// The values in the order of their declaration.
            #[must_use]
            pub fn to_list(&self) -> Vec<u64> {
                vec![$(self.$name),+]
            }

            /// Back from such a list. What it lacks is 0, and what it has too many is ignored.
            #[must_use]
            pub fn from_list(list: &[u64]) -> Values {
                let mut list = list.iter().copied();
                Values { $($name: list.next().unwrap_or_default(),)+ }
            }
        }
    };
}

counters! {
    /// Payload bytes received.
    bytes_in,
    /// Payload bytes sent.
    bytes_out,
    /// Payload bytes that were not sent or received, because parts were encoded (worker).
    spared,
    /// Frames received.
    frames_in,
    /// Frames sent.
    frames_out,
    /// Rounds closed (server) or parts landed (worker).
    rounds,
    /// Rounds closed without ranks that had died, or were slow (server).
    rounds_short,
    /// Rounds begun anew, since a rank had died while its contribution was being added (server).
    rounds_anew,
    /// Contributions to rounds that were closed (server).
    late,
    /// Nanoseconds that rounds with enough contributions waited for more, over all keys (server).
    awaited_ns,
    /// Nanoseconds from the close of rounds to the last contribution that came later, likewise.
    saved_ns,
    /// Times a lane was made to wait because its frame could not be taken yet.
    parked,
    /// Times a lane had no room for a frame.
    full,
    /// Frames that were refused.
    refused,
    /// Rounds that were reported as stalled.
    stalls,
    /// Times the thread slept because there was nothing to do.
    sleeps,
    /// Nanoseconds of processor time in which the loop had something to do.
    busy_ns,
    /// Nanoseconds of processor time.
    cpu_ns,
    /// Gauge: lanes that wait because their frame cannot be taken yet.
    parked_now,
    /// Gauge: publications (server) or contributions (worker) that are not posted yet.
    queued,
    /// Gauge: lanes that are open.
    lanes,
    /// Gauge: keys (server) or tensors (worker) that are declared.
    keys,
    /// Gauge: parts that may be encoded or not, and are sent as they are (worker).
    auto_plain,
    /// Gauge: those that are sent as bf16.
    auto_half,
    /// Gauge: those that are sent by their codec.
    auto_coded,
    /// Gauge: bytes a second at which results land, where that decides over encodings (worker).
    line_speed,
    /// Gauge: bytes of the arena that keys have claimed.
    arena_claimed,
    /// Gauge: bytes of the arena that have pages.
    arena_resident,
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
        counters.keys.set(3);
        let values = counters.read();
        assert_eq!((values.bytes_in, values.sleeps, values.keys), (0, 7, 3));
        let list = values.to_list();
        assert_eq!(list.len(), Values::NAMES.len());
        let at = Values::NAMES.iter().position(|name| *name == "sleeps").unwrap();
        assert_eq!(list[at], 7);
        assert_eq!(Values::from_list(&list), values);
        let short = Values::from_list(&list[..=at]);
        assert_eq!((short.sleeps, short.keys), (7, 0));
        assert_eq!(align_of::<Counters>(), 128);
        assert!(size_of::<Counters>().is_multiple_of(128));
    }
}
