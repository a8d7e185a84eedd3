//! The network against itself: a seed is a run, and losses end what they hit.

use super::*;
use crate::mem::{Readable, Writable};
use crate::transport::Cause;
use std::fmt::Write as _;

const FRAMES: usize = 40;

/// What a run looks like from outside, addresses left out.
fn describe(log: &mut String, network: &SimNetwork, event: &Event) {
    let what = match event {
        Event::Header { lane, header, .. } => format!("{lane:?} header {}", header[0]),
        Event::Landed { lane } => format!("{lane:?} landed"),
        Event::Piece { lane, piece } => format!("{lane:?} piece {}", piece.len()),
        Event::Sent { lane, token } => format!("{lane:?} sent {token}"),
        Event::Answered { .. } => panic!("nothing was granted"),
        Event::Closed { lane, cause } => format!("{lane:?} closed {cause:?}"),
    };
    let _ = writeln!(log, "{:?} {what}", network.now());
}

/// Sends frames over two lanes until they have all landed, or the lanes have closed if `loss`
/// breaks them.
fn exchange(seed: u64, loss: Option<u64>) -> String {
    let network = SimNetwork::new(seed);
    let (mut left, mut right) = (Sim::new(network.clone()), Sim::new(network.clone()));
    for lane in 0..2 {
        let (one, other) = network.link();
        left.attach(LaneId(lane), Link::Sim(one)).unwrap();
        right.attach(LaneId(lane), Link::Sim(other)).unwrap();
    }
    network.lose(loss);
    let bytes: Vec<u8> = (0..100_000u32).map(|index| index.to_le_bytes()[0]).collect();
    // SAFETY: nothing changes it.
    let payload = unsafe { Readable::of(&bytes) };
    let mut landings = vec![vec![0u8; payload.len()]; 2];
    let mut posted = [0; 2];
    let mut landed = [0; 2];
    let (mut log, mut events, mut closed) = (String::new(), Vec::new(), 0);
    loop {
        for lane in 0..2u8 {
            let count = posted[usize::from(lane)];
            let payload = payload.part(0, count * 2_500);
            let frame = Frame::new([lane; 64], payload, count as u64);
            if count < FRAMES && left.post(LaneId(lane.into()), &frame).is_ok() {
                posted[usize::from(lane)] += 1;
            }
        }
        left.poll(&mut events);
        right.poll(&mut events);
        let idle = events.is_empty();
        for event in events.drain(..) {
            describe(&mut log, &network, &event);
            match event {
                Event::Header { lane, header, .. } => {
                    let index = usize::from(header[0]);
                    let landing = &mut landings[index][..landed[index] * 2_500];
                    // SAFETY: it is looked at once it is whole.
                    right.land(lane, Landing::Into(unsafe { Writable::of(landing) }));
                    landed[index] += usize::from(landed[index] == 0);
                }
                Event::Landed { lane } => {
                    let index = lane.0 as usize;
                    let length = landed[index] * 2_500;
                    assert_eq!(landings[index][..length], bytes[..length]);
                    landed[index] += 1;
                }
                Event::Closed { cause, .. } => {
                    assert!(loss.is_some() && cause != Cause::Local);
                    closed += 1;
                }
                Event::Sent { .. } | Event::Piece { .. } | Event::Answered { .. } => {}
            }
        }
        if !network.advance() && idle {
            break;
        }
    }
    let complete = landed.iter().filter(|count| **count == FRAMES).count();
    assert!(closed % 2 == 0 && closed / 2 + complete >= 2, "{closed} {landed:?}");
    log
}

#[test]
fn a_seed_gives_one_run_and_another_seed_another() {
    assert_eq!(exchange(7, None), exchange(7, None));
    assert_ne!(exchange(7, None), exchange(8, None));
    assert_eq!(exchange(7, Some(20)), exchange(7, Some(20)));
}

#[test]
fn lanes_overtake_each_other_and_losses_end_both_ends() {
    let mut firsts = std::collections::BTreeSet::new();
    for seed in 0..20 {
        let log = exchange(seed, None);
        let first = log.lines().find(|line| line.contains("landed")).map(str::to_owned);
        firsts.insert(first.is_some_and(|line| line.contains("LaneId(0)")));
        let lost = exchange(seed, Some(3));
        assert_eq!(lost.matches("closed").count(), 4, "seed {seed}: {lost}");
    }
    assert_eq!(firsts.len(), 2, "one lane came first under every seed");
}
