//! How lanes end: whoever ends them, in whichever state, `Closed` comes once and last.

use super::each;
use super::makers::{Kind, World};
use super::traffic::{Answer, Party, parties, run, run_all};
use bps_engine::transport::{Cause, Driver, LaneId, Link};

const LANE: LaneId = LaneId(0);

/// The frames of a lane are dropped by a close, so what arrived is a prefix of what was posted: the
/// parties check the order, and this the count.
fn check_ends(left: &Party, right: &Party) {
    for (one, other) in [(left, right), (right, left)] {
        for (port, peer) in one.ports.iter().zip(&other.ports) {
            assert!(port.received <= peer.posted(), "more arrived than was posted");
        }
    }
}

/// Lets both run until both ends of lane 0 are closed, then on, to see that nothing follows.
fn run_to_the_end(world: &World, left: &mut Party, right: &mut Party) {
    let is_closed = |party: &Party| party.ports[0].closed.is_some();
    run(world, left, right, |left, right| is_closed(left) && is_closed(right));
    for _ in 0..100 {
        world.step();
        left.turn();
        right.turn();
    }
    check_ends(left, right);
    left.check_freed();
    right.check_freed();
}

/// Brings the lane into a state, closes the right end, and looks at both.
fn close_when(world: &World, plan: &[usize], answer: Answer, state: impl Fn(&Party) -> bool) {
    let (mut left, mut right) = parties(world, 1, 21);
    right.answer = answer;
    left.plan(0, plan.iter().copied());
    right.plan(0, plan.iter().copied());
    run(world, &mut left, &mut right, |_, right| state(right));
    right.node.driver.close(LANE);
    right.node.driver.close(LANE);
    right.answer = Answer::Any;
    run_to_the_end(world, &mut left, &mut right);
    assert_eq!(right.ports[0].closed, Some(Cause::Local));
    assert_ne!(left.ports[0].closed, Some(Cause::Local));
}

#[test]
fn close_an_idle_lane() {
    each(|world| {
        let (mut left, mut right) = parties(world, 1, 19);
        left.plan(0, [5000; 4]);
        run_all(world, &mut left, &mut right);
        right.node.driver.close(LANE);
        run_to_the_end(world, &mut left, &mut right);
        assert_eq!(left.ports[0].closed, Some(Cause::Peer));
        assert_eq!(right.ports[0].closed, Some(Cause::Local));
    });
}

#[test]
fn close_with_frames_unsent() {
    each(|world| {
        close_when(world, &[1 << 20; 20], Answer::Never, |party| party.ports[0].posted() > 2)
    });
}

#[test]
fn close_while_a_header_waits() {
    each(|world| {
        close_when(world, &[1 << 20; 3], Answer::Never, |party| party.ports[0].is_asked())
    });
}

#[test]
fn close_while_a_payload_lands() {
    each(|world| {
        let state = |party: &Party| party.ports[0].is_landing();
        close_when(world, &[4 << 20; 3], Answer::Into, state);
    });
}

#[test]
fn close_while_a_piece_is_held() {
    each(|world| {
        let (mut left, mut right) = parties(world, 1, 23);
        left.plan(0, [1 << 20; 3]);
        let mut holds = false;
        run(world, &mut left, &mut right, |_, right| {
            holds |= right.ports[0].is_holding();
            holds && right.ports[0].is_holding()
        });
        right.node.driver.close(LANE);
        run_to_the_end(world, &mut left, &mut right);
        assert_eq!(right.ports[0].closed, Some(Cause::Local));
    });
}

#[test]
fn frames_sent_before_a_close_arrive() {
    each(|world| {
        let (mut left, mut right) = parties(world, 1, 25);
        right.answer = Answer::Never;
        left.plan(0, [1, 500, 0, 2000]);
        // Until the reader answers, a transport may keep what does not fit: all of this does.
        run(world, &mut left, &mut right, |left, _| left.ports[0].sent == 4);
        left.node.driver.close(LANE);
        for _ in 0..10 {
            left.turn();
        }
        right.answer = Answer::Any;
        run_to_the_end(world, &mut left, &mut right);
        assert_eq!(right.ports[0].received, 4);
        assert_eq!(right.ports[0].closed, Some(Cause::Peer));
    });
}

#[test]
fn a_lane_number_is_used_again() {
    each(|world| {
        let (mut left, mut right) = parties(world, 2, 27);
        for round in 0..5 {
            left.plan(0, [100_000 * round, 77]);
            right.plan(0, [(256 << 10) + 1]);
            run_all(world, &mut left, &mut right);
            let one = if round % 2 == 0 { &mut left } else { &mut right };
            one.node.driver.close(LANE);
            run_to_the_end(world, &mut left, &mut right);
            left.renew(LANE);
            right.renew(LANE);
            world.connect(&mut left.node, &mut right.node, LANE);
        }
        // The other lane never noticed.
        left.plan(1, [4096; 3]);
        run_all(world, &mut left, &mut right);
    });
}

#[test]
fn a_death_ends_all_lanes_of_the_peer() {
    each(|world| {
        for plan in [&[][..], &[300_000; 40][..]] {
            let (mut left, mut right) = parties(world, 8, 29);
            for lane in 0..8 {
                left.plan(lane, plan.iter().copied());
                right.plan(lane, plan.iter().copied());
            }
            let some = u64::from(!plan.is_empty()) * 4;
            run(world, &mut left, &mut right, |left, _| left.received() >= some);
            // All that belongs to the dead is gone; of a process it would be the kernel that does
            // this.
            let (_, spare) = world.pair(0);
            drop(std::mem::replace(&mut right.node, spare));
            let dead = Party::new(world.pair(0).1, 0, 0);
            let mut ghost = dead;
            run(world, &mut left, &mut ghost, |left, _| {
                left.ports.iter().all(|port| port.closed.is_some())
            });
            check_ends(&left, &right);
            let causes = left.ports.iter().map(|port| port.closed.unwrap());
            for cause in causes {
                assert_ne!(cause, Cause::Local);
                assert!(!plan.is_empty() || cause == Cause::Peer, "{cause} between frames");
            }
        }
    });
}

#[test]
fn a_cut_link_ends_both_ends() {
    for seed in 0..60 {
        let world = World::new(Kind::Sim(seed));
        let (mut left, mut right) = parties(&world, 4, seed);
        world.network.lose(Some(15));
        for lane in 0..4 {
            for party in [&mut left, &mut right] {
                let sizes: Vec<usize> = (0..100).map(|_| party.any_size()).collect();
                party.plan(lane, sizes);
            }
        }
        run(&world, &mut left, &mut right, |left, right| {
            let all = |party: &Party| party.ports.iter().all(|port| port.closed.is_some());
            all(left) && all(right)
        });
        check_ends(&left, &right);
    }
}

#[test]
fn a_link_of_another_kind_is_refused() {
    each(|world| {
        let other = match world.kind {
            Kind::Sim(_) => World::new(Kind::TcpPoll),
            _ => World::new(Kind::Sim(1)),
        };
        let (mut left, right) = world.pair(1);
        let (link, _peer): (Link, Link) = other.links(&other.seat(), &other.seat());
        assert!(left.driver.attach(LaneId(1), link).is_err());
        let (link, _peer) = world.links(&left.seat, &right.seat);
        assert!(left.driver.attach(LaneId(0), link).is_err(), "the number is in use");
    });
}
