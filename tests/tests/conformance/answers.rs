//! Answers into memory that was granted: where a transport has none, it says so; where it has, they
//! come whole, in order with all else, and nothing else of them is told, unless they can't go
//! there: then they come as any frame, which gives the memory back.

use super::each;
use super::traffic::PATIENCE;
use bps_engine::mem::{Readable, Writable};
use bps_engine::transport::{
    Answer, Carried, Driver, Event, Frame, Grant, Landing, LaneId, Transport,
};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::time::Instant;

const LANE: LaneId = LaneId(0);
const BYTES: usize = 50_000;

/// What an end was told, in order.
#[derive(PartialEq, Eq, Debug)]
enum Told {
    Header(u8),
    Answered(u64),
    Declined(u64),
    Landed,
}

#[test]
fn answers_come_where_they_were_granted_and_in_order() {
    each(|world| {
        let mut landing = vec![0u8; BYTES];
        // SAFETY: it is looked at once the answer is whole.
        let into = unsafe { Writable::of(&mut landing) };
        let (mut left, mut right) = world.pair(1);
        let Transport::Rdma(driver) = &mut left.driver else {
            assert!(!left.driver.grants(LANE, into), "nobody else writes there by himself");
            return;
        };
        // SAFETY: the memory outlives the driver, which is dropped at the end.
        unsafe { driver.register_landing(NonNull::from(&mut landing[0]), BYTES) }.unwrap();
        // From the arena if there is one: then it needs no copy.
        let own = vec![0u8; BYTES];
        let result = world.arena().map_or(own.as_ptr().cast_mut(), |(at, _)| at);
        let is_straight = world.arena().is_some();
        for round in 1..=5u8 {
            assert!(left.driver.grants(LANE, into));
            let answer = Answer::Wanted { into, token: round.into() };
            let ask = Frame::bare([round; 64], 0);
            left.driver.post(LANE, &Frame { answer, ..ask }).unwrap();
            // SAFETY: nothing is under way that reads it.
            unsafe { result.write_bytes(round, BYTES) };
            let (mut told, mut sent, start) = (Vec::new(), 0, Instant::now());
            let token = round.into();
            let expected = match is_straight {
                true => vec![Told::Header(100), Told::Answered(token), Told::Header(200)],
                false => {
                    vec![Told::Header(100), Told::Declined(token), Told::Landed, Told::Header(200)]
                }
            };
            while told.len() < expected.len() || sent < 4 {
                assert!(start.elapsed() < PATIENCE, "{told:?}, {sent} sent");
                let events = [left.poll(), right.poll()];
                world.step();
                for event in &events[0] {
                    match *event {
                        Event::Header { carried: Carried::Declined(token), .. } => {
                            told.push(Told::Declined(token));
                            left.driver.land(LANE, Landing::Into(into));
                        }
                        Event::Header { header, .. } => {
                            told.push(Told::Header(header[0]));
                            left.driver.land(LANE, Landing::NOTHING);
                        }
                        Event::Landed { .. } => told.push(Told::Landed),
                        Event::Answered { token, .. } => told.push(Told::Answered(token)),
                        Event::Sent { .. } => sent += 1,
                        ref other => panic!("{other:?}"),
                    }
                }
                for event in &events[1] {
                    match *event {
                        Event::Header { carried, .. } => {
                            let grant = carried.grant().expect("it was granted");
                            right.driver.land(LANE, Landing::NOTHING);
                            // SAFETY: nobody writes it before it is sent.
                            let result = unsafe { Readable::new(result, BYTES) };
                            respond(&mut right.driver, result, grant);
                        }
                        Event::Sent { .. } => sent += 1,
                        ref other => panic!("{other:?}"),
                    }
                }
            }
            assert_eq!(told, expected);
            assert!(landing.iter().all(|byte| *byte == round), "round {round}");
        }
        // Straight, if what is posted lies in memory that the device knows.
        let Transport::Rdma(driver) = &right.driver else { unreachable!("as the left one") };
        let straight = driver.counters().answers.load(Ordering::Relaxed);
        assert_eq!(straight, if is_straight { 5 } else { 0 });
        drop((left, right));
    });
}

/// Posts the answer, between two other frames.
fn respond(driver: &mut Transport, result: Readable, grant: Grant) {
    assert_eq!(grant.length(), BYTES);
    let answer = Frame::new([150; 64], result, 0);
    let other = |mark| Frame::bare([mark; 64], 0);
    let answer = Frame { answer: Answer::To(grant), ..answer };
    for frame in [other(100), answer, other(200)] {
        driver.post(LANE, &frame).unwrap();
    }
}
