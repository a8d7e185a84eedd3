//! Sleep: what wakes it, and that no wake-up is lost.

use super::each;
use super::makers::{Kind, Node, World};
use super::traffic::header;
use bps_engine::mem::{Readable, Writable};
use bps_engine::transport::{Driver, Event, Frame, Landing, LaneId, Link};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const LANE: LaneId = LaneId(0);
/// A sleep that lasts this long was not ended by what it should be.
pub const LONG: Duration = Duration::from_secs(10);

/// The kinds that have real time and threads.
fn each_real(case: impl Fn(&World)) {
    each(|world| match world.kind {
        Kind::Sim(seed) => eprintln!("skipped over Sim({seed}): its time is virtual"),
        _ => case(world),
    });
}

#[test]
fn another_thread_wakes_it() {
    each_real(|world| {
        let (mut left, _right) = world.pair(1);
        let waker = left.seat.waker.clone();
        let (told, tell) = mpsc::channel::<()>();
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for () in tell {
                    is_done.store(true, Ordering::Release);
                    waker.wake();
                }
            });
            for _ in 0..200 {
                told.send(()).unwrap();
                let start = Instant::now();
                while !is_done.swap(false, Ordering::Acquire) {
                    left.seat.waker.prepare();
                    if !left.driver.arm() && !is_done.load(Ordering::Acquire) {
                        left.driver.block(LONG);
                    }
                    left.seat.waker.awake();
                    assert!(left.poll().is_empty());
                }
                assert!(start.elapsed() < LONG, "a wake-up was lost");
            }
            drop(told);
        });
    });
}

#[test]
fn a_sleep_ends_with_its_time() {
    each_real(|world| {
        let (mut left, _right) = world.pair(1);
        // What attaching has started is done in the first polls, and may end a sleep early; a
        // driver that never rests would take thousands of sleeps.
        let start = Instant::now();
        let mut sleeps = 0;
        while start.elapsed() < Duration::from_millis(30) {
            assert!(left.poll().is_empty());
            left.sleep(Duration::from_millis(30));
            sleeps += 1;
        }
        assert!(start.elapsed() < LONG && sleeps < 20, "{sleeps} sleeps");
    });
}

/// Sends every payload back, asleep whenever there is nothing to do, until the lane closes.
pub fn echo(node: &mut Node, length: usize) {
    let mut memory = vec![0u8; length];
    loop {
        let events = node.poll();
        if events.is_empty() {
            let start = Instant::now();
            node.sleep(LONG);
            assert!(start.elapsed() < LONG, "a wake-up was lost");
        }
        for event in events {
            match event {
                Event::Header { lane, .. } => {
                    // SAFETY: it is left alone until the payload has landed.
                    let into = unsafe { Writable::of(&mut memory) };
                    node.driver.land(lane, Landing::Into(into));
                }
                Event::Landed { lane } => {
                    let header = header(0, length);
                    // SAFETY: the next payload comes once this one has been sent.
                    let frame = Frame::new(header, unsafe { Readable::of(&memory) }, 0);
                    node.driver.post(lane, &frame).unwrap();
                }
                Event::Closed { .. } => return,
                _ => {}
            }
        }
    }
}

#[test]
fn traffic_wakes_both_ends() {
    each_real(|world| {
        for (length, rounds) in [(64usize, 300u32), (1 << 20, 30)] {
            let (left_seat, right_seat) = (world.seat(), world.seat());
            let (left_link, right_link) = world.links(&left_seat, &right_seat);
            let mut left = Node::new(world, left_seat);
            left.driver.attach(LANE, left_link).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut right = Node::new(world, right_seat);
                    right.driver.attach(LANE, right_link).unwrap();
                    echo(&mut right, length);
                });
                let payload = vec![7u8; length];
                let mut memory = vec![0u8; length];
                for round in 0..rounds {
                    memory.fill(0);
                    let header = header(u64::from(round), length);
                    // SAFETY: nobody writes it.
                    let frame = Frame::new(header, unsafe { Readable::of(&payload) }, 0);
                    left.driver.post(LANE, &frame).unwrap();
                    round_trip(&mut left, &mut memory);
                    assert!(memory == payload, "round {round}");
                }
                left.driver.close(LANE);
                while !left.poll().iter().any(|event| matches!(event, Event::Closed { .. })) {}
            });
        }
    });
}

/// Sleeps until the payload is back and the memory of what was posted is free.
pub fn round_trip(node: &mut Node, memory: &mut [u8]) {
    let (mut is_landed, mut is_sent) = (false, false);
    while !(is_landed && is_sent) {
        let events = node.poll();
        if events.is_empty() {
            let start = Instant::now();
            node.sleep(LONG);
            assert!(start.elapsed() < LONG, "a wake-up was lost");
        }
        for event in events {
            match event {
                Event::Header { lane, .. } => {
                    // SAFETY: it is left alone until the payload has landed.
                    let into = unsafe { Writable::of(memory) };
                    node.driver.land(lane, Landing::Into(into));
                }
                Event::Landed { .. } => is_landed = true,
                Event::Sent { .. } => is_sent = true,
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn the_end_of_the_peer_wakes_it() {
    each_real(|world| {
        for is_death in [false, true] {
            let (left_seat, right_seat) = (world.seat(), world.seat());
            let links: Vec<_> = (0..4).map(|_| world.links(&left_seat, &right_seat)).collect();
            let (ours, theirs): (Vec<_>, Vec<_>) = links.into_iter().unzip();
            let node = |seat, links: Vec<Link>| {
                let mut node = Node::new(world, seat);
                for (lane, link) in (0..).zip(links) {
                    node.driver.attach(LaneId(lane), link).unwrap();
                }
                node
            };
            let start = Instant::now();
            let ending = std::thread::scope(|scope| {
                let waiting = scope.spawn(|| {
                    let mut left = node(left_seat, ours);
                    let mut closed = 0;
                    while closed < 4 {
                        left.sleep(LONG);
                        let events = left.poll();
                        closed += events.len();
                        assert!(events.iter().all(|event| matches!(event, Event::Closed { .. })));
                        assert!(start.elapsed() < LONG, "slept through the end of its peer");
                    }
                });
                let mut right = node(right_seat, theirs);
                if !is_death {
                    (0..4).for_each(|lane| right.driver.close(LaneId(lane)));
                    let mut closed = 0;
                    while closed < 4 {
                        closed += right.poll().len();
                    }
                }
                drop(right);
                waiting.join()
            });
            ending.unwrap();
        }
    });
}
