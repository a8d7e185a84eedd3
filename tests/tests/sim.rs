//! Seeded whole-system simulation: real scheduler, shards, NIC loops and pipelines of GPUs, over a
//! network that delays, reorders and breaks and devices that do, in virtual time. `BPS_SIM_SEEDS`
//! sets how many seeds are tried, `BPS_SIM_SEED` runs one.

use bps_tests::sim::{
    Dying, Fault, Groups, Outcome, Reformed, Shrunk, Trouble, run, run_hosts, run_optimized,
    run_reformed, run_short, run_shrunk, run_stored, run_stored_shrunk,
};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|value| value.parse().ok())
}

fn seeds(groups: Groups, fault: Fault, default: u64) -> Outcome {
    seeds_of(run, groups, fault, default)
}

fn seeds_of(
    play: fn(u64, Groups, Fault) -> Outcome,
    groups: Groups,
    fault: Fault,
    default: u64,
) -> Outcome {
    let first = number("BPS_SIM_SEED");
    let range = match first {
        Some(seed) => seed..seed + 1,
        None => 0..number("BPS_SIM_SEEDS").unwrap_or(default),
    };
    let mut total = Outcome::default();
    let seeds = range.end - range.start;
    for seed in range {
        let outcome = std::panic::catch_unwind(|| play(seed, groups, fault));
        let Ok(outcome) = outcome else {
            panic!(
                "{groups:?}, {fault:?}: replay with BPS_SIM_SEED={seed} cargo test -p bps-tests \
                 --test sim"
            );
        };
        total.checked += outcome.checked;
        total.failed += outcome.failed;
        total.paths += outcome.paths;
        total.orders_cut += outcome.orders_cut;
        total.together += outcome.together;
        total.nanoseconds += outcome.nanoseconds;
    }
    println!(
        "{groups:?}, {fault:?}: {seeds} seeds, {} results equal to the reference, {} failed \
         push_pulls, {} ranks told of a path, {:.1} s of virtual time",
        total.checked,
        total.failed,
        total.paths,
        total.nanoseconds as f64 / 1e9
    );
    total
}

const BOTH: [Groups; 2] = [Groups::Apart, Groups::Hosts];

#[test]
fn sums_are_right_whatever_the_network_does() {
    for groups in BOTH {
        assert!(seeds(groups, Fault::None, 1000).checked > 0);
    }
}

#[test]
fn a_stored_value_holds_every_delta_once_whatever_the_network_does() {
    for groups in BOTH {
        assert!(seeds_of(run_stored, groups, Fault::None, 100).checked > 0);
    }
}

#[test]
fn a_fault_beside_a_stored_value_ends_the_job_everywhere() {
    for groups in BOTH {
        for fault in [Fault::Kill, Fault::Cut, Fault::Mute] {
            let _ = seeds_of(run_stored, groups, fault, 30);
        }
    }
}

#[test]
fn servers_take_each_step_once_whatever_the_network_does() {
    for groups in BOTH {
        assert!(seeds_of(run_optimized, groups, Fault::None, 100).checked > 0);
    }
}

#[test]
fn a_fault_beside_an_optimizer_ends_the_job_everywhere() {
    for groups in BOTH {
        for fault in [Fault::Kill, Fault::Cut, Fault::Mute] {
            let _ = seeds_of(run_optimized, groups, fault, 30);
        }
    }
}

#[test]
fn a_dead_rank_ends_the_job_everywhere() {
    for groups in BOTH {
        let _ = seeds(groups, Fault::Kill, 200);
    }
}

#[test]
fn a_broken_lane_ends_the_job_everywhere() {
    for groups in BOTH {
        let _ = seeds(groups, Fault::Cut, 200);
    }
}

#[test]
fn a_lane_that_loses_all_in_one_direction_ends_the_job_and_no_process_is_blamed() {
    for groups in BOTH {
        for fault in [Fault::Mute, Fault::MuteForEver] {
            assert!(seeds(groups, fault, 100).paths > 0, "{groups:?}, {fault:?}");
        }
    }
}

#[test]
fn a_frozen_scheduler_ends_the_job_everywhere() {
    for groups in BOTH {
        for fault in [Fault::Freeze, Fault::FreezeAndKill] {
            let _ = seeds(groups, fault, 100);
        }
    }
}

#[test]
fn a_disagreement_is_an_error_on_every_rank() {
    for groups in BOTH {
        let _ = seeds(groups, Fault::Mismatch, 100);
    }
}

#[test]
fn tensors_on_gpus_are_summed_whatever_streams_and_network_do() {
    let outcome = seeds(Groups::Gpus, Fault::None, 1000);
    assert!(outcome.checked > 0);
    println!("{} copies of results shared a call of the driver with others", outcome.together);
    assert!(number("BPS_SIM_SEED").is_some() || outcome.together > 0);
}

#[test]
fn a_fault_beside_gpus_ends_the_job_everywhere() {
    for fault in [Fault::Kill, Fault::Cut, Fault::MuteForEver, Fault::Gpu] {
        let _ = seeds(Groups::Gpus, fault, 200);
    }
}

#[test]
fn a_cut_between_the_threads_of_two_gpus_ends_the_job_everywhere() {
    let outcome = seeds(Groups::Gpus, Fault::CutOrder, 200);
    assert!(outcome.orders_cut > 50, "only {} seeds had such a lane", outcome.orders_cut);
    assert!(outcome.failed > 0, "no cut was noticed");
}

#[test]
fn a_disagreement_about_gpus_is_an_error_on_every_rank() {
    let _ = seeds(Groups::Gpus, Fault::Mismatch, 200);
}

#[test]
fn a_job_that_shrinks_goes_on_with_the_same_results_everywhere() {
    let (all, is_one) = shrunk("shrinks", Dying::Ranks, 400, &[]);
    println!(
        "{} ranks died; {} results, {} of them without one of the dead, {} in some of their parts \
         alone; {} rounds of parts begun anew; {} broadcasts lost with their root",
        all.gone, all.checked, all.short, all.mixed, all.anew, all.lost
    );
    let shows = all.short > 0 && all.mixed > 0 && all.anew > 0 && all.lost > 0;
    assert!(is_one || shows, "the seeds show too little");
}

#[test]
fn servers_die_and_the_others_take_their_keys() {
    let (all, is_one) = shrunk("servers_die", Dying::Servers, 150, &[]);
    println!(
        "{} servers and {} ranks died; {} results; {} parts moved, {} of them of hosts with \
         several ranks, and {} with a result that some ranks lacked; {} jobs could not go on",
        all.servers, all.gone, all.checked, all.moved, all.grouped, all.restored, all.ended
    );
    let shows = all.servers > all.ended && all.moved > all.grouped && all.grouped > 0;
    let shows = shows && all.restored > 0 && all.short > 0;
    assert!(is_one || shows, "the seeds show too little");
}

#[test]
fn servers_die_and_the_others_take_the_keys_of_gpus() {
    // Results were landing in slots when their servers died.
    let (all, is_one) = shrunk("of_gpus", Dying::ServersOfGpus, 150, &[1571, 1592]);
    println!(
        "{} servers died; {} results, {} of them on GPUs of jobs with parts that moved; {} parts \
         moved, {} of them of hosts with several ranks, and {} with a result that some ranks \
         lacked; {} jobs could not go on",
        all.servers, all.checked, all.on_gpus, all.moved, all.grouped, all.restored, all.ended
    );
    let shows = all.servers > all.ended && all.moved > all.grouped && all.grouped > 0;
    let shows = shows && all.restored > 0 && all.on_gpus > 0;
    assert!(is_one || shows, "the seeds show too little");
}

#[test]
fn ranks_die_and_the_others_go_on_with_their_gpus() {
    let (all, is_one) = shrunk("with_their_gpus", Dying::RanksOfGpus, 200, &[]);
    println!(
        "{} ranks and {} servers died; {} results, {} of those on GPUs without one of the dead; \
         {} broadcasts lost with their root; {} parts moved, {} of them with a result that some \
         ranks lacked; {} jobs could not go on",
        all.gone,
        all.servers,
        all.checked,
        all.short_on_gpus,
        all.lost,
        all.moved,
        all.restored,
        all.ended
    );
    let shows = all.short_on_gpus > 0 && all.lost > 0 && all.restored > 0;
    assert!(is_one || shows, "the seeds show too little");
}

#[test]
fn hosts_are_lost_with_all_of_their_ranks() {
    for (test, dying) in [("hosts", Dying::Hosts), ("hosts", Dying::HostsOfGpus)] {
        // Columns did not hear of broadcasts that are lost.
        let (all, is_one) = shrunk(test, dying, 100, &[113, 1177]);
        println!(
            "{dying:?}: {} ranks of hosts and {} servers died; {} results, {} of them without some \
             of the dead, {} of those on GPUs; {} broadcasts lost with their root; {} parts moved, \
             {} of them of hosts with several ranks; {} jobs could not go on",
            all.gone,
            all.servers,
            all.checked,
            all.short,
            all.short_on_gpus,
            all.lost,
            all.moved,
            all.grouped,
            all.ended
        );
        let shows = all.gone > 0 && all.short > 0 && all.lost > 0 && all.grouped > 0;
        let on_gpus = dying == Dying::Hosts || all.short_on_gpus > 0;
        assert!(is_one || shows && on_gpus, "the seeds show too little");
    }
}

#[test]
fn schedulers_are_lost_and_others_lead_the_job() {
    // Ranks had asked one that was stopped then, and that another one was started beside; who of
    // a job of one host is missed by one of two; deaths that schedulers knew in another order.
    let known = [1024, 2_400_072, 6_000_591, 510_565, 514_121];
    let (all, is_one) = shrunk("schedulers_are_lost", Dying::Schedulers, 400, &known);
    println!(
        "{} schedulers were lost, {} of them to go on beside another; {} ranks and {} servers \
         died; {} results, {} of them without one of the dead; {} times keys moved under another \
         scheduler; {} jobs had to form again",
        all.schedulers,
        all.thawed,
        all.gone,
        all.servers,
        all.checked,
        all.short,
        all.followed,
        all.ended
    );
    let shows = all.schedulers > 2 * all.ended && all.thawed > 0 && all.gone > 0 && all.short > 0;
    assert!(is_one || shows && all.followed > 0, "the seeds show too little");
}

#[test]
fn ranks_and_servers_die_and_the_job_forms_again() {
    let Some(all) = reformed("form", Trouble::Deaths, &[]) else { return };
    assert!(all.ranks > 50 && all.servers > 50 && all.between > 10 && all.caught_up > 0);
}

#[test]
fn schedulers_are_lost_while_the_job_forms_again() {
    // A rank has passed the barrier and left, and the others ask another scheduler about it; one
    // that is stopped while it takes the job over until all have lost patience with it.
    let known = [3081, 12_969, 2_414_011, 7_000_701, 20_471_186, 20_513_664, 20_694_922];
    let Some(all) = reformed("while", Trouble::Schedulers, &known) else { return };
    assert!(all.forming > 5 && all.between > 5 && all.unformed > 20 && all.schedulers > 100);
}

#[test]
fn a_scheduler_that_only_stops_gives_up_nobody_who_waits_for_the_next_epoch() {
    // A rank asked the same one again whose epoch had just ended there.
    let Some(all) = reformed("only", Trouble::Stopped, &[402_633]) else { return };
    assert!(all.forming > 50 && all.ranks > 100, "{all:?}");
}

#[test]
fn paths_break_while_the_job_forms_again() {
    // A scheduler that was stopped twice while a lane's loss waited for its verdict; ranks that
    // were out of reach, or had done their work, when the others finished; one that came by two
    // connections.
    let known = [205_280, 205_498, 300_789, 2_305_370];
    let Some(all) = reformed("paths", Trouble::Paths, &known) else { return };
    assert!(all.cuts > 50 && all.parted > 50 && all.forming > 5);
}

#[test]
fn servers_are_told_to_leave_and_nobody_is_missed() {
    let (all, is_one) = shrunk("servers_are_told_to_leave", Dying::Leavers, 200, &[]);
    println!(
        "{} servers were killed or told to leave, {} were let go; {} parts moved; {} schedulers \
         were lost",
        all.servers, all.let_go, all.moved, all.schedulers
    );
    assert!(is_one || all.let_go > 20 && all.schedulers > 100, "the seeds show too little");
    // One of two schedulers on an address led some ranks, until they came back and found the other.
    let known = [121_948, 204_038, 240_099];
    let Some(all) = reformed("servers_are_told_to_leave", Trouble::Leavers, &known) else { return };
    assert!(all.leavers > 500 && all.let_go > 250 && all.servers > 50, "{all:?}");
}

#[test]
fn ranks_and_servers_come_while_others_die() {
    // That barrier; epochs that end while ranks say good-bye; two jobs with an epoch of one number;
    // a rank that comes as a new one when the others are about to finish.
    let known = [14_975, 8881, 10_693, 11_527, 12_653, 13_717, 13_936, 64_451];
    let Some(all) = reformed("come", Trouble::Newcomers, &known) else { return };
    assert!(all.let_in > 50 && all.joined_servers > 20 && all.between > 20 && all.caught_up > 20);
}

/// Runs the seeds that are asked for, and those that are known to have failed once; says what was
/// seen, if they were to show enough.
fn reformed(test: &str, trouble: Trouble, known: &[u64]) -> Option<Reformed> {
    let first = number("BPS_SIM_SEED");
    let (seeds, known) = match first {
        Some(seed) => (seed..seed + 1, &[][..]),
        None => (0..number("BPS_SIM_SEEDS").unwrap_or(1000), known),
    };
    let mut all = Reformed::default();
    for seed in seeds.chain(known.iter().copied()) {
        let outcome = std::panic::catch_unwind(|| run_reformed(seed, trouble));
        let outcome = outcome.unwrap_or_else(|_| {
            panic!("replay with BPS_SIM_SEED={seed} cargo test -p bps-tests --test sim {test}")
        });
        all.add(&outcome);
    }
    println!("{all:?}");
    first.is_none().then_some(all)
}

/// Runs the seeds that are asked for, of which one may be named, and those that are known to have
/// failed once; says whether one was named.
fn shrunk(test: &str, dying: Dying, default: u64, known: &[u64]) -> (Shrunk, bool) {
    let first = number("BPS_SIM_SEED");
    let (seeds, known) = match first {
        Some(seed) => (seed..seed + 1, &[][..]),
        None => (0..number("BPS_SIM_SEEDS").unwrap_or(default), known),
    };
    let mut all = Shrunk::default();
    for seed in seeds.chain(known.iter().copied()) {
        let outcome = std::panic::catch_unwind(|| run_shrunk(seed, dying));
        let outcome = outcome.unwrap_or_else(|_| {
            panic!("replay with BPS_SIM_SEED={seed} cargo test -p bps-tests --test sim {test}")
        });
        all.add(&outcome);
    }
    (all, first.is_some())
}

#[test]
fn rounds_that_do_not_wait_for_slow_ranks_have_the_same_results_everywhere() {
    let first = number("BPS_SIM_SEED");
    let seeds = match first {
        Some(seed) => seed..seed + 1,
        None => 0..number("BPS_SIM_SEEDS").unwrap_or(200),
    };
    let (mut short, mut mixed, mut checked, mut gone, mut late, mut given) = (0, 0, 0, 0, 0, 0);
    for seed in seeds {
        let outcome = std::panic::catch_unwind(|| run_short(seed));
        let outcome = outcome.unwrap_or_else(|_| {
            panic!("replay with BPS_SIM_SEED={seed} cargo test -p bps-tests --test sim slow")
        });
        (short, mixed) = (short + outcome.short, mixed + outcome.mixed);
        (checked, gone) = (checked + outcome.checked, gone + outcome.gone);
        (late, given) = (late + outcome.late, given + outcome.given);
    }
    println!(
        "{checked} results, {short} of them without somebody, {mixed} in some of their parts \
         alone; {late} contributions came late, {given} results went to ranks that are not in \
         them; {gone} ranks died"
    );
    if first.is_none() {
        assert!(short > 0 && mixed > 0 && late > 0 && given > 0, "the seeds show too little");
    }
}

#[test]
fn a_stored_value_outlives_ranks_that_die_in_a_job_that_shrinks() {
    let first = number("BPS_SIM_SEED");
    let seeds = match first {
        Some(seed) => seed..seed + 1,
        None => 0..number("BPS_SIM_SEEDS").unwrap_or(200),
    };
    let (mut checked, mut gone) = (0, 0);
    for seed in seeds {
        let outcome = std::panic::catch_unwind(|| run_stored_shrunk(seed));
        let (outcome, dead) = outcome.unwrap_or_else(|_| {
            panic!("replay with BPS_SIM_SEED={seed} cargo test -p bps-tests --test sim outlives")
        });
        (checked, gone) = (checked + outcome.checked, gone + dead);
    }
    println!("{gone} ranks died; {checked} answers");
    if first.is_none() {
        assert!(gone > 50 && checked > 1000, "the seeds show too little");
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for groups in [Groups::Apart, Groups::Hosts, Groups::Gpus] {
        for seed in [3, 14, 159] {
            let once = run(seed, groups, Fault::None);
            assert_eq!(once, run(seed, groups, Fault::None), "seed {seed}");
        }
    }
}

#[test]
fn the_bytes_of_a_host_cross_the_network_once() {
    let one = run_hosts(&[1]);
    let (four, uneven) = (run_hosts(&[4]), run_hosts(&[1, 3]));
    println!(
        "bytes at the server: {} for 1 rank, {} for 4 on one host, {} for 1 and 3 on two",
        one.wire_bytes, four.wire_bytes, uneven.wire_bytes
    );
    assert_eq!(one.wire_bytes, 2 * 2 * 2 * 4 * 100_003, "each way, two rounds of two tensors");
    assert_eq!(four.wire_bytes, one.wire_bytes);
    assert_eq!(uneven.wire_bytes, 2 * one.wire_bytes);
}
