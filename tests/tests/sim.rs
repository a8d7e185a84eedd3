//! Seeded whole-system simulation: real scheduler, shards and NIC loops over a network that delays,
//! reorders and breaks, in virtual time. `BPS_SIM_SEEDS` sets how many seeds are tried,
//! `BPS_SIM_SEED` runs one.

use bps_tests::sim::{Fault, Outcome, run};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|value| value.parse().ok())
}

fn seeds(fault: Fault, default: u64) -> Outcome {
    let first = number("BPS_SIM_SEED");
    let range = match first {
        Some(seed) => seed..seed + 1,
        None => 0..number("BPS_SIM_SEEDS").unwrap_or(default),
    };
    let mut total = Outcome::default();
    let seeds = range.end - range.start;
    for seed in range {
        let outcome = std::panic::catch_unwind(|| run(seed, fault));
        let Ok(outcome) = outcome else {
            panic!("{fault:?}: replay with BPS_SIM_SEED={seed} cargo test -p bps-tests --test sim");
        };
        total.checked += outcome.checked;
        total.failed += outcome.failed;
        total.nanoseconds += outcome.nanoseconds;
    }
    println!(
        "{fault:?}: {seeds} seeds, {} results equal to the reference, {} failed push_pulls, {:.1} \
         s of virtual time",
        total.checked,
        total.failed,
        total.nanoseconds as f64 / 1e9
    );
    total
}

#[test]
fn sums_are_right_whatever_the_network_does() {
    assert!(seeds(Fault::None, 1000).checked > 0);
}

#[test]
fn a_dead_rank_ends_the_job_everywhere() {
    let _ = seeds(Fault::Kill, 200);
}

#[test]
fn a_broken_lane_ends_the_job_everywhere() {
    let _ = seeds(Fault::Cut, 200);
}

#[test]
fn a_disagreement_is_an_error_on_every_rank() {
    let _ = seeds(Fault::Mismatch, 100);
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in [3, 14, 159] {
        assert_eq!(run(seed, Fault::None), run(seed, Fault::None), "seed {seed}");
    }
}
