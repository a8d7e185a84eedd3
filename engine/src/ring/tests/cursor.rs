//! Tests of `ring/cursor.rs`: an oracle, two threads, hostile peers, and the loom model.

use super::*;

/// Both ends of a ring over a block on the heap, which the returned box keeps alive.
#[cfg(not(loom))]
fn ring(capacity: u32) -> (Box<CursorBlock>, ProducerCursor, ConsumerCursor) {
    let mut block = Box::new(CursorBlock::new());
    let at: *mut CursorBlock = &raw mut *block;
    // SAFETY: the block is fresh and outlives the cursors, which every test drops with or before
    // the box.
    let producer = unsafe { producer(at, capacity) };
    // SAFETY: the only consumer of this block, which outlives it as it does the producer.
    let consumer = unsafe { consumer(at, capacity) };
    (block, producer, consumer)
}

#[cfg(not(loom))]
mod plain {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn agrees_with_a_deque(
            log in 0u32..5,
            start in prop_oneof![Just(0u32), Just(u32::MAX - 20), any::<u32>()],
            operations in proptest::collection::vec((any::<bool>(), 0u32..6), 0..300),
        ) {
            let capacity = 1 << log;
            let (block, mut producer, mut consumer) = ring(capacity);
            // Indices wrap after 2^32 items, so some cases start just before that.
            (producer.tail, producer.head_seen) = (start, start);
            (consumer.head, consumer.tail_seen) = (start, start);
            block.tail.index.store(start, Ordering::Relaxed);
            block.head.index.store(start, Ordering::Relaxed);
            let mut slots = vec![0u32; capacity as usize];
            let mut oracle = VecDeque::new();
            let mut next = 0u32;
            for (is_push, count) in operations {
                if is_push {
                    let known = producer.free().unwrap() as usize;
                    prop_assert!(known <= capacity as usize - oracle.len());
                    let free = producer.refresh().unwrap();
                    prop_assert_eq!(free as usize, capacity as usize - oracle.len());
                    let count = count.min(free);
                    for i in 0..count {
                        slots[((producer.index() + i) % capacity) as usize] = next;
                        oracle.push_back(next);
                        next += 1;
                    }
                    producer.publish(count);
                } else {
                    let known = consumer.ready().unwrap() as usize;
                    prop_assert!(known <= oracle.len() && (known > 0 || oracle.is_empty()));
                    let ready = consumer.refresh().unwrap();
                    prop_assert_eq!(ready as usize, oracle.len());
                    let count = count.min(ready);
                    for i in 0..count {
                        let slot = ((consumer.index() + i) % capacity) as usize;
                        prop_assert_eq!(Some(slots[slot]), oracle.pop_front());
                    }
                    consumer.release(count);
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn whatever_the_peer_writes_no_answer_exceeds_the_capacity(
            log in 0u32..5,
            writes in proptest::collection::vec(prop_oneof![any::<u32>(), 0u32..40], 1..60),
        ) {
            let capacity = 1 << log;
            let (block, mut producer, mut consumer) = ring(capacity);
            let mut producer_alive = true;
            let mut consumer_alive = true;
            for index in writes {
                block.head.index.store(index, Ordering::Relaxed);
                match producer.refresh() {
                    Ok(free) if producer_alive => {
                        prop_assert!(free <= capacity);
                        producer.publish(free);
                    }
                    Ok(_) => {}
                    Err(corrupt) => {
                        prop_assert_eq!(corrupt.index, index);
                        producer_alive = false;
                    }
                }
                block.tail.index.store(index, Ordering::Relaxed);
                match consumer.refresh() {
                    Ok(ready) if consumer_alive => {
                        prop_assert!(ready <= capacity);
                        consumer.release(ready / 2);
                    }
                    Ok(_) => {}
                    Err(corrupt) => {
                        prop_assert_eq!(corrupt.index, index);
                        consumer_alive = false;
                    }
                }
            }
        }
    }

    #[test]
    fn an_index_beyond_the_capacity_or_going_back_is_an_error() {
        let (block, mut producer, mut consumer) = ring(4);
        assert_eq!(producer.free(), Ok(4));
        producer.publish(3);
        assert_eq!(consumer.ready(), Ok(3));
        block.tail.index.store(5, Ordering::Relaxed);
        let corrupt = Corrupt { peer: "producer", capacity: 4, index: 5, own: 0 };
        assert_eq!(consumer.refresh(), Err(corrupt));
        block.tail.index.store(2, Ordering::Relaxed);
        assert_eq!(consumer.refresh(), Err(Corrupt { index: 2, ..corrupt }), "it had published 3");
        // A consumer that releases what was never published, or takes a release back.
        block.head.index.store(4, Ordering::Relaxed);
        let corrupt = Corrupt { peer: "consumer", capacity: 4, index: 4, own: 3 };
        assert_eq!(producer.refresh(), Err(corrupt));
        block.head.index.store(2, Ordering::Relaxed);
        assert_eq!(producer.refresh(), Ok(3));
        block.head.index.store(1, Ordering::Relaxed);
        assert_eq!(producer.refresh(), Err(Corrupt { index: 1, ..corrupt }));
        assert!(corrupt.to_string().contains("close the lane"));
    }

    #[test]
    #[should_panic(expected = "slots are published where")]
    fn publishing_more_than_is_free_is_our_own_error() {
        let (_block, mut producer, _consumer) = ring(2);
        producer.publish(3);
    }

    #[test]
    fn keeps_the_order_between_threads() {
        const ITEMS: u64 = 300_000;
        const CAPACITY: u32 = 64;
        let (block, mut producer, mut consumer) = ring(CAPACITY);
        // Relaxed slots: only the cursor's ordering makes the reader see the writer's values.
        let slots: Arc<Vec<AtomicU64>> =
            Arc::new((0..CAPACITY).map(|_| AtomicU64::new(0)).collect());
        let writer_slots = Arc::clone(&slots);
        let writer = std::thread::spawn(move || {
            let mut next = 0;
            while next < ITEMS {
                let free = u64::from(producer.free().unwrap()).min(ITEMS - next).min(1 + next % 7);
                if free == 0 {
                    std::thread::yield_now();
                    continue;
                }
                let count = u32::try_from(free).unwrap();
                for i in 0..count {
                    let slot = ((producer.index() + i) % CAPACITY) as usize;
                    writer_slots[slot].store(next, Ordering::Relaxed);
                    next += 1;
                }
                producer.publish(count);
            }
        });
        let mut expected = 0;
        while expected < ITEMS {
            let ready = consumer.ready().unwrap();
            if ready == 0 {
                std::thread::yield_now();
            }
            for i in 0..ready {
                let slot = ((consumer.index() + i) % CAPACITY) as usize;
                assert_eq!(slots[slot].load(Ordering::Relaxed), expected);
                expected += 1;
            }
            consumer.release(ready);
        }
        writer.join().unwrap();
        drop(block);
    }
}

#[cfg(loom)]
mod orders {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    struct Shared {
        block: std::cell::UnsafeCell<CursorBlock>,
        slots: [UnsafeCell<u32>; 2],
    }

    // SAFETY: the block is atomics, and loom's cells report every unordered access, which is what
    // is tested.
    unsafe impl Sync for Shared {}
    // SAFETY: nothing in it belongs to a thread: atomics, and cells that loom watches.
    unsafe impl Send for Shared {}

    #[test]
    fn a_slot_is_never_read_and_written_at_once() {
        loom::model(|| {
            let shared = Arc::new(Shared {
                block: std::cell::UnsafeCell::new(CursorBlock::new()),
                slots: [UnsafeCell::new(0), UnsafeCell::new(0)],
            });
            // SAFETY: the block is fresh, and both threads hold the Arc while they use it.
            let mut producer = unsafe { producer(shared.block.get(), 2) };
            // SAFETY: the only consumer of this block, which the Arc keeps alive.
            let mut consumer = unsafe { consumer(shared.block.get(), 2) };
            let theirs = Arc::clone(&shared);
            let writer = loom::thread::spawn(move || {
                for value in 1..=3 {
                    while producer.free().unwrap() == 0 {
                        loom::thread::yield_now();
                    }
                    // SAFETY: `free` said that this slot is ours; loom panics if it is not.
                    theirs.slots[producer.index() as usize]
                        .with_mut(|slot| unsafe { *slot = value });
                    producer.publish(1);
                }
            });
            for value in 1..=3 {
                while consumer.ready().unwrap() == 0 {
                    loom::thread::yield_now();
                }
                // SAFETY: `ready` said that this slot is ours; loom panics if it is not.
                let seen = shared.slots[consumer.index() as usize].with(|slot| unsafe { *slot });
                assert_eq!(seen, value);
                consumer.release(1);
            }
            writer.join().unwrap();
        });
    }
}
