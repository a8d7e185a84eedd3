//! The contract of `engine/src/transport/mod.rs`, sentence by sentence, over every transport.
//!
//! Each test is one part of the contract and runs over all kinds in turn; a kind that cannot run
//! here says why.

mod answers;
mod closing;
mod makers;
mod processes;
mod sleeping;
mod traffic;

use makers::{Kind, World, obstacle};
use traffic::{Answer, SIZES, parties, run, run_all};

/// Whether only RDMA is asked for, as in the virtual machine of `tests/rdma`, where it must run.
fn rdma_only() -> bool {
    std::env::var_os("BPS_TEST_RDMA_ONLY").is_some()
}

/// Runs a case over each transport that can run here.
fn each(case: impl Fn(&World)) {
    let rdma = [Kind::Rdma, Kind::RdmaTight, Kind::RdmaShared];
    let others = [
        Kind::TcpUring,
        Kind::TcpPoll,
        Kind::SealedUring,
        Kind::SealedPoll,
        Kind::Shm,
        Kind::ShmTight,
        Kind::ShmArena,
    ];
    let mut kinds: Vec<Kind> = rdma.into();
    if !rdma_only() {
        kinds = others.into_iter().chain(kinds).chain((1..=4).map(Kind::Sim)).collect();
    }
    for kind in kinds {
        match obstacle(kind) {
            Some(why) if rdma_only() => panic!("{kind:?} cannot run: {why}"),
            Some(why) => eprintln!("skipped over {kind:?}: {why}"),
            None => {
                eprintln!("over {kind:?}");
                case(&World::new(kind));
            }
        }
    }
}

#[test]
fn every_size_arrives_either_way() {
    each(|world| {
        for answer in [Answer::Into, Answer::Pieces] {
            let (mut left, mut right) = parties(world, 1, 1);
            (left.answer, right.answer) = (answer, answer);
            for size in SIZES {
                left.plan(0, [size]);
                run_all(world, &mut left, &mut right);
                right.plan(0, [size]);
                run_all(world, &mut left, &mut right);
            }
            assert_eq!(left.received(), SIZES.len() as u64);
        }
    });
}

#[test]
fn random_frames_arrive_in_order_both_ways() {
    each(|world| {
        let (mut left, mut right) = parties(world, 1, 3);
        for party in [&mut left, &mut right] {
            for _ in 0..150 {
                let size = party.any_size();
                party.plan(0, [size]);
            }
        }
        run_all(world, &mut left, &mut right);
    });
}

#[test]
fn many_lanes_do_not_disturb_each_other() {
    each(|world| {
        let (mut left, mut right) = parties(world, 32, 5);
        for party in [&mut left, &mut right] {
            for lane in 0..32 {
                for _ in 0..12 {
                    let size = party.any_size();
                    party.plan(lane, [size]);
                }
            }
        }
        run_all(world, &mut left, &mut right);
    });
}

#[test]
fn small_frames_in_bulk() {
    each(|world| {
        let (mut left, mut right) = parties(world, 2, 7);
        for party in [&mut left, &mut right] {
            party.plan(0, (0..2000).map(|number| number % 300));
            party.plan(1, [0; 500]);
        }
        run_all(world, &mut left, &mut right);
    });
}

#[test]
fn a_lane_without_answers_fills_up_and_recovers() {
    use bps_engine::limits::LANE_FRAMES_MAX;
    each(|world| {
        let (mut left, mut right) = parties(world, 1, 9);
        right.answer = Answer::Never;
        left.plan(0, [100_000; 3 * LANE_FRAMES_MAX]);
        // Nothing is sent before the first poll, so this many is all that a lane may take.
        assert!(left.post(0), "takes more than LANE_FRAMES_MAX frames");
        assert!(left.ports[0].posted() <= LANE_FRAMES_MAX as u64);
        // Then it fills up for good: time passes and no frame is taken any more.
        let mut still = 0;
        while still < 2000 {
            let before = left.ports[0].posted();
            let moved = world.step() && matches!(world.kind, Kind::Sim(_));
            left.turn();
            right.turn();
            still = if moved || left.ports[0].posted() > before { 0 } else { still + 1 };
        }
        assert!(left.ports[0].posted() < 3 * LANE_FRAMES_MAX as u64, "no backpressure");
        assert!(right.ports[0].is_asked());
        right.answer = Answer::Any;
        run_all(world, &mut left, &mut right);
    });
}

#[test]
fn a_late_answer_holds_one_lane_and_no_other() {
    each(|world| {
        let (mut left, mut right) = parties(world, 2, 11);
        right.answer = Answer::Never;
        left.plan(0, [5000; 3]);
        run(world, &mut left, &mut right, |_, right| right.ports[0].is_asked());
        // The other direction of the lane goes on as well.
        right.plan(0, [70_000; 3]);
        run(world, &mut left, &mut right, |left, _| left.ports[0].received == 3);
        right.plan(1, [70_000; 3]);
        run(world, &mut left, &mut right, |left, _| left.ports[1].received == 3);
        assert_eq!(right.ports[0].received, 0);
        right.answer = Answer::Pieces;
        run_all(world, &mut left, &mut right);
    });
}
