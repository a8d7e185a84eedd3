//! Queues between threads that poll: bounded, lock-free, never blocking.
//!
//! [`spsc`] joins two pinned threads (the fastest queue we measured; see `docs/decisions.md`),
//! [`Mpsc`] lets many threads reach one and is also a free list, and [`cursor`] holds the indices
//! of a ring in memory that two processes share. A full queue is an answer, not an error: every
//! `push` gives the item back.

use std::sync::Arc;

pub mod cursor;

/// A ring for exactly one producing and one consuming thread, with room for `capacity` items. The
/// only allocation of the pair is made here.
#[must_use]
pub fn spsc<T>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    let (producer, consumer) = rtrb::RingBuffer::new(capacity);
    (Producer(producer), Consumer(consumer))
}

/// The writing end of [`spsc`].
pub struct Producer<T>(rtrb::Producer<T>);

impl<T> Producer<T> {
    /// Appends an item.
    ///
    /// # Errors
    /// The item, when the ring is full.
    #[inline]
    pub fn push(&mut self, item: T) -> Result<(), T> {
        self.0.push(item).map_err(|rtrb::PushError::Full(item)| item)
    }

    /// Items that can be pushed now; the consumer can only make it more.
    #[inline]
    #[must_use]
    pub fn free(&self) -> usize {
        self.0.slots()
    }

    /// Whether the consuming end is gone, so that pushing is in vain.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        self.0.is_abandoned()
    }
}

/// The reading end of [`spsc`].
pub struct Consumer<T>(rtrb::Consumer<T>);

impl<T> Consumer<T> {
    /// Takes the oldest item.
    #[inline]
    pub fn pop(&mut self) -> Option<T> {
        self.0.pop().ok()
    }

    /// The oldest item, left where it is.
    #[inline]
    #[must_use]
    pub fn peek(&self) -> Option<&T> {
        self.0.peek().ok()
    }

    /// Items that can be popped now; the producer can only make it more.
    #[inline]
    #[must_use]
    pub fn ready(&self) -> usize {
        self.0.slots()
    }

    /// Whether the producing end is gone. Items that it left are still there.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        self.0.is_abandoned()
    }
}

/// A queue that any number of threads push to and pop from. Clones are the same queue.
///
/// It costs five times as much as [`spsc`] per item: for cold paths and free lists.
pub struct Mpsc<T>(Arc<crossbeam_queue::ArrayQueue<T>>);

impl<T> Clone for Mpsc<T> {
    fn clone(&self) -> Mpsc<T> {
        Mpsc(Arc::clone(&self.0))
    }
}

impl<T> Mpsc<T> {
    /// A queue with room for `capacity` items, at least one.
    #[must_use]
    pub fn new(capacity: usize) -> Mpsc<T> {
        Mpsc(Arc::new(crossbeam_queue::ArrayQueue::new(capacity.max(1))))
    }

    /// Appends an item.
    ///
    /// # Errors
    /// The item, when the queue is full.
    #[inline]
    pub fn push(&self, item: T) -> Result<(), T> {
        self.0.push(item)
    }

    /// Takes the oldest item.
    #[inline]
    #[must_use]
    pub fn pop(&self) -> Option<T> {
        // A pop that finds nothing ends with a full fence, which loops that poll would pay for on
        // every turn; a look does not.
        if self.0.is_empty() { None } else { self.0.pop() }
    }

    /// Whether there was nothing to pop at the time of the look.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::option::weighted;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// Every queue here, seen as one: what the oracle is compared with.
    trait Queue {
        fn push(&mut self, item: u32) -> Result<(), u32>;
        fn pop(&mut self) -> Option<u32>;
    }

    impl Queue for (Producer<u32>, Consumer<u32>) {
        fn push(&mut self, item: u32) -> Result<(), u32> {
            self.0.push(item)
        }
        fn pop(&mut self) -> Option<u32> {
            self.1.pop()
        }
    }

    impl Queue for Mpsc<u32> {
        fn push(&mut self, item: u32) -> Result<(), u32> {
            Mpsc::push(self, item)
        }
        fn pop(&mut self) -> Option<u32> {
            Mpsc::pop(self)
        }
    }

    fn agrees_with_oracle(queue: &mut dyn Queue, capacity: usize, operations: &[Option<u32>]) {
        let mut oracle = VecDeque::new();
        for operation in operations {
            match *operation {
                Some(item) if oracle.len() < capacity => {
                    assert_eq!(queue.push(item), Ok(()));
                    oracle.push_back(item);
                }
                Some(item) => assert_eq!(queue.push(item), Err(item)),
                None => assert_eq!(queue.pop(), oracle.pop_front()),
            }
        }
        while let Some(item) = oracle.pop_front() {
            assert_eq!(queue.pop(), Some(item));
        }
        assert_eq!(queue.pop(), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn queues_agree_with_a_deque(
            capacity in 1usize..9,
            operations in vec(weighted(0.55, any::<u32>()), 0..200),
        ) {
            agrees_with_oracle(&mut spsc(capacity), capacity, &operations);
            agrees_with_oracle(&mut Mpsc::new(capacity), capacity, &operations);
        }
    }

    #[test]
    fn spsc_keeps_the_order_between_threads() {
        const ITEMS: u64 = 200_000;
        let (mut producer, mut consumer) = spsc::<u64>(64);
        let writer = std::thread::spawn(move || {
            for item in 0..ITEMS {
                while producer.push(item).is_err() {
                    std::thread::yield_now();
                }
            }
        });
        for expected in 0..ITEMS {
            let item = loop {
                match consumer.pop() {
                    Some(item) => break item,
                    None => std::thread::yield_now(),
                }
            };
            assert_eq!(item, expected);
        }
        writer.join().unwrap();
        assert!(consumer.is_abandoned());
        assert_eq!(consumer.pop(), None);
    }

    #[test]
    fn mpsc_loses_and_doubles_nothing() {
        const WRITERS: usize = 3;
        const ITEMS: u64 = 20_000;
        let queue = Mpsc::<u64>::new(32);
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let queue = queue.clone();
                std::thread::spawn(move || {
                    for item in 0..ITEMS {
                        while queue.push((writer as u64) << 32 | item).is_err() {
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        let mut next = [0u64; WRITERS];
        for _ in 0..WRITERS as u64 * ITEMS {
            let value = loop {
                match queue.pop() {
                    Some(value) => break value,
                    None => std::thread::yield_now(),
                }
            };
            let writer = usize::try_from(value >> 32).unwrap();
            assert_eq!(value & 0xffff_ffff, next[writer], "the order of each writer is kept");
            next[writer] += 1;
        }
        for writer in writers {
            writer.join().unwrap();
        }
        assert_eq!(queue.pop(), None);
        assert_eq!(next, [ITEMS; WRITERS]);
    }
}
