//! Timelines of whole jobs: what is in the files of ranks and servers, from when to when, and that
//! the times of all processes fit together.

use bps_engine::base::{DType, Operation};
use bps_engine::config::TransportChoice;
use bps_tests::job::{self, JobShape};
use bps_tests::timeline::{Slice, Trace};
use bps_worker::Members;
use bps_worker::error::Refusal;
use bps_worker::{Declaration, Error, PushPull, Worker};
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const LONG: Option<Duration> = Some(Duration::from_secs(60));
const STAGES: [&str; 5] = ["QUEUE", "PUSH", "SUM", "PULL", "DONE"];

/// A folder that is not there yet. Its name lives as long as the process, as shapes of jobs are
/// copied.
fn folder() -> &'static str {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("bps-timeline-{}-{number}", std::process::id());
    let path = std::env::temp_dir().join(name);
    path.into_os_string().into_string().expect("a temporary folder has a readable name").leak()
}

/// Removes it at the end of a test, also where that fails.
struct Cleanup(&'static str);

impl Drop for Cleanup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.0);
    }
}

fn push(worker: &Worker, name: &str, count: u64, rounds: u32) {
    let operation = Operation::Average;
    let tensor = Declaration {
        name: name.into(),
        dtype: DType::F32,
        shape: count.into(),
        operation,
        device: false,
        members: Members::ALL,
        receiver: None,
        encoding: None,
        store: None,
    };
    let ids = worker.declare(&[tensor]).expect("declared");
    let mut values = vec![1.0f32; usize::try_from(count).expect("small")];
    for _ in 0..rounds {
        let target = values.as_mut_ptr().cast::<u8>();
        let item = PushPull { tensor: ids[0], source: target.cast_const(), target, priority: 0 };
        // SAFETY: `values` lives until the handle is done, and nobody looks at it meanwhile.
        let handles = unsafe { worker.push_pull(&[item]) }.expect("pushed");
        assert_eq!(handles[0].wait(LONG), Ok(true));
    }
}

/// Every part of the tensor has each stage once in each of these rounds, and no other round.
fn assert_stages(trace: &Trace, tensor: &str, parts: usize, rounds: std::ops::RangeInclusive<u64>) {
    for stage in STAGES {
        let mut found: Vec<(u64, u64)> = trace
            .named(&format!("Comm.{tensor}.{stage}"))
            .iter()
            .map(|slice| (slice.round, slice.key))
            .collect();
        found.sort_unstable();
        let count = found.len();
        found.dedup();
        assert_eq!(found.len(), count, "{tensor} {stage} twice: {found:?}");
        let expected = parts * rounds.clone().count();
        assert_eq!(count, expected, "{tensor} {stage}: {found:?}");
        assert!(found.iter().all(|(round, _)| rounds.contains(round)), "{tensor}: {found:?}");
    }
    let totals = trace.named(&format!("Comm.{tensor}"));
    assert_eq!(totals.len(), rounds.count(), "{tensor}");
    for total in totals {
        let stages = trace.slices.iter().filter(|slice| {
            slice.name.starts_with(&format!("Comm.{tensor}.")) && slice.round == total.round
        });
        for stage in stages {
            assert!(stage.from >= total.from - 1.0 && stage.to <= total.to + 1.0, "{stage:?}");
        }
    }
}

/// What the server did with each contribution lies between its push and its landing at the worker.
fn assert_between(worker: &Trace, server: &Trace, tensor: &str, rank: u64) {
    let slack = worker.error_us() + server.error_us();
    let pulls = worker.named(&format!("Comm.{tensor}.PULL"));
    for push in worker.named(&format!("Comm.{tensor}.PUSH")) {
        let same = |slice: &&&Slice| (slice.key, slice.round) == (push.key, push.round);
        let pull = pulls.iter().find(same).expect("as many pulls as pushes");
        let of_rank = |names: &[&str]| -> Vec<&Slice> {
            let all = names.iter().flat_map(|name| server.named(name));
            all.filter(|slice| same(&slice) && slice.rank == rank).collect()
        };
        let landed = of_rank(&["land", "land and add"]);
        assert_eq!(landed.len(), 1, "{push:?}: {landed:?}");
        let sums: Vec<&Slice> = server.named("sum").into_iter().filter(|s| same(&s)).collect();
        assert_eq!(sums.len(), 1, "{push:?}: {sums:?}");
        assert!(landed[0].from >= push.from - slack, "{push:?} {landed:?}");
        assert!(landed[0].to <= sums[0].to + slack, "{landed:?} {sums:?}");
        assert!(sums[0].to <= pull.from + slack, "{sums:?} {pull:?}");
    }
}

/// Arrows with the points that they must have: each starts at a push, passes the server twice and
/// ends at a pull.
fn assert_arrows(traces: &[&Trace]) {
    let mut points: HashMap<u64, String> = HashMap::new();
    for trace in traces {
        for event in trace.whole["traceEvents"].as_array().expect("events") {
            let phase = event["ph"].as_str().expect("a phase");
            if "stf".contains(phase) {
                points.entry(event["id"].as_u64().expect("an id")).or_default().push_str(phase);
            }
        }
    }
    assert!(!points.is_empty());
    for (id, mut phases) in points {
        let mut sorted: Vec<char> = phases.drain(..).collect();
        sorted.sort_unstable();
        assert_eq!(sorted, ['f', 's', 't', 't'], "arrow {id}");
    }
}

/// Jobs of a moment that are run, at most, until one has all that a timeline can have.
const JOBS: usize = 10;

/// The timelines of a job: the server's, and those of its two ranks.
fn traced(transport: TransportChoice) -> (Trace, [Trace; 2]) {
    let trace_folder = folder();
    let _cleanup = Cleanup(trace_folder);
    let shape = JobShape {
        cores: 2,
        transport,
        partition_bytes: 16 << 10,
        trace: Some((2, 4)),
        trace_folder,
        ..JobShape::default()
    };
    job::run(shape, |worker| {
        push(worker, "large", 12_288, 6);
        push(worker, "small", 5, 3);
    });
    let ranks = ["0", "1"].map(|rank| Trace::read(Path::new(trace_folder), rank));
    (Trace::read(Path::new(trace_folder), "server-0"), ranks)
}

#[test]
fn a_job_with_trace_on_has_every_part_of_the_rounds_asked_for() {
    for transport in [TransportChoice::Tcp, TransportChoice::Shm] {
        // A job of a moment may be over before the scheduler has told all of it the time.
        let (server, ranks) = (0..JOBS)
            .map(|_| traced(transport))
            .find(|(server, ranks)| ranks.iter().chain([server]).all(Trace::knows_the_time))
            .expect("one of these jobs lasts long enough");
        server.assert_whole_and_apart();
        assert_eq!(server.named("sum").len(), 3 * 3 + 2);
        for (rank, trace) in (0..).zip(&ranks) {
            trace.assert_whole_and_apart();
            assert_stages(trace, "large", 3, 2..=4);
            assert_stages(trace, "small", 1, 2..=3);
            assert_between(trace, &server, "large", rank);
            assert_between(trace, &server, "small", rank);
            assert_eq!(trace.whole["metadata"]["clock"]["is_shared"], true, "one kernel");
        }
        assert_arrows(&[&ranks[0], &ranks[1], &server]);
    }
}

#[test]
fn ranks_of_a_host_reduce_each_part_at_its_owner() {
    let alone: &[&str] = &["QUEUE", "REDUCE", "BROADCAST", "DONE"];
    let among_groups: &[&str] =
        &["QUEUE", "REDUCE", "QUEUE", "PUSH", "SUM", "PULL", "BROADCAST", "DONE"];
    let asked: &[&str] = &["QUEUE", "REDUCE", "SUM", "BROADCAST", "DONE"];
    let jobs: [(&'static [u32], u32, &[&str]); 2] = [(&[2], 0, alone), (&[2, 2], 1, among_groups)];
    for (hosts, servers, owned) in jobs {
        let trace_folder = folder();
        let _cleanup = Cleanup(trace_folder);
        let shape = JobShape {
            workers: hosts.iter().sum(),
            servers,
            transport: TransportChoice::Auto,
            partition_bytes: 64 << 10,
            trace: Some((2, 3)),
            trace_folder,
            hosts,
            ..JobShape::default()
        };
        job::run(shape, |worker| push(worker, "x", 128 << 10, 4));
        for pair in (0..shape.workers).collect::<Vec<u32>>().chunks(2) {
            let ranks = [pair[0], pair[1]]
                .map(|one| Trace::read(Path::new(trace_folder), &one.to_string()));
            ranks.iter().for_each(Trace::assert_whole_and_apart);
            for round in 2..=3 {
                let [one, other] = ranks.each_ref().map(|rank| rank.stages("x", round));
                assert_eq!((one.len(), other.len()), (8, 8), "parts of 64 KiB");
                for (one, other) in one.iter().zip(&other) {
                    let is_pair = one == owned && other == asked || one == asked && other == owned;
                    assert!(is_pair, "{hosts:?}: {one:?} and {other:?}");
                }
                assert!(one.iter().any(|part| part == owned), "each owns its share: {one:?}");
                assert!(other.iter().any(|part| part == owned), "each owns its share: {other:?}");
            }
        }
    }
}

#[test]
fn a_timeline_starts_and_stops_at_run_time() {
    let trace_folder = folder();
    let _cleanup = Cleanup(trace_folder);
    let shape = JobShape { trace_folder, ..JobShape::default() };
    job::run(shape, move |worker| {
        push(worker, "before", 64, 2);
        worker.start_timeline(Path::new(trace_folder), 1..=u64::MAX).expect("started");
        let twice = worker.start_timeline(Path::new(trace_folder), 1..=u64::MAX);
        assert!(matches!(&twice, Err(Error::Refused(Refusal::TimelineOpen { .. }))), "{twice:?}");
        worker.barrier(LONG).expect("barrier");
        // Servers hear of a timeline before they hear of what is declared after it.
        push(worker, "during", 64, 3);
        push(worker, "before", 64, 1);
        worker.stop_timeline();
        // The file is whole before anything else happens.
        let rank = worker.rank().to_string();
        assert_stages(&Trace::read(Path::new(trace_folder), &rank), "during", 1, 1..=3);
        push(worker, "after", 64, 2);
        worker.stop_timeline();
    });
    for rank in ["0", "1"] {
        let trace = Trace::read(Path::new(trace_folder), rank);
        trace.assert_whole_and_apart();
        assert_stages(&trace, "before", 1, 3..=3);
        assert!(trace.named("Comm.after").is_empty());
    }
    let server = Trace::read(Path::new(trace_folder), "server-0");
    server.assert_whole_and_apart();
    let keys: std::collections::HashSet<u64> = server.named("sum").iter().map(|s| s.key).collect();
    assert!(keys.len() >= 2, "{keys:?}");
}

#[test]
fn without_it_no_file_is_made() {
    let trace_folder = folder();
    let shape = JobShape { trace_folder, ..JobShape::default() };
    job::run(shape, |worker| push(worker, "x", 64, 3));
    assert!(!Path::new(trace_folder).exists());
}
