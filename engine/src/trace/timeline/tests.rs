//! A ring that overflows, and a whole timeline of a rank and a server from made-up events.

use super::*;
use serde_json::Value;

const MS: u64 = 1_000_000;

fn folder(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("bps-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    path
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).expect("a whole JSON document")
}

/// A clock that is `ahead` of the scheduler's by nothing and starts in 1970.
fn clock() -> Arc<Clock> {
    let clock = Arc::new(Clock::default());
    clock.want(true);
    let at = now_ns();
    assert!(clock.is_due(at));
    while clock.answered(at, at, at, 0, "elsewhere") {}
    clock
}

fn subject(who: Who, threads: u32, rounds: RangeInclusive<u64>) -> Subject {
    let names = Arc::new(Names::default());
    names.add("a \"quoted\"\n name", [Key(4), Key(9)].into_iter());
    Subject { who, threads, rounds, names, clock: clock() }
}

/// Slices by name, as (start, end) in microseconds.
fn slices(trace: &Value) -> Vec<(String, u64, f64, f64)> {
    let events = trace["traceEvents"].as_array().unwrap();
    let slice = |event: &Value| {
        let (from, duration) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        let tid = event["tid"].as_u64().unwrap();
        (event["name"].as_str().unwrap().to_owned(), tid, from, from + duration)
    };
    events.iter().filter(|event| event["ph"] == "X").map(slice).collect()
}

/// Whole ones, as the tests' events are.
fn milliseconds(microseconds: f64) -> f64 {
    (microseconds / 1e3).round()
}

/// The stages on a track, as (name, start, end) in milliseconds.
fn stages(slices: &[(String, u64, f64, f64)], tid: u64) -> Vec<(&str, f64, f64)> {
    let of_track = slices.iter().filter(|one| one.1 == tid);
    let stage = |name: &str| name.rfind('.').map_or(0, |at| at + 1);
    of_track
        .map(|one| (&one.0[stage(&one.0)..], milliseconds(one.2), milliseconds(one.3)))
        .collect()
}

fn assert_no_overlap(slices: &[(String, u64, f64, f64)]) {
    for (index, one) in slices.iter().enumerate() {
        for other in &slices[index + 1..] {
            let apart = one.1 != other.1 || one.3 <= other.2 || other.3 <= one.2;
            assert!(apart, "{one:?} overlaps {other:?}");
        }
    }
}

#[test]
fn off_it_records_nothing_and_is_a_pointer() {
    assert_eq!(size_of::<Recorder>(), size_of::<usize>());
    let mut off = Recorder::default();
    off.record(Mark::Sent, Key(1), 1, Rank(0), 4);
}

#[test]
fn a_full_ring_loses_events_and_counts_them_in_the_file() {
    let (mut recorder, mut ring, lost) = recorder(8, 3..=4);
    for round in 1..=6 {
        for _ in 0..10 {
            recorder.record(Mark::Sent, Key(1), round, Rank(2), 4);
        }
    }
    assert_eq!(lost.read(), 12, "of 20 in the window of rounds");
    let first = ring.pop().unwrap();
    assert_eq!((first.round, first.rank, first.bytes), (3, Rank(2), 4));
    assert!(first.at_ns > 0);

    let folder = folder("lost");
    let (timeline, mut recorders) =
        Timeline::start(&folder, subject(Who::Server(1), 1, 1..=u64::MAX)).unwrap();
    let mut recorder = recorders.pop().unwrap();
    let events = 3 * TIMELINE_EVENTS_MAX;
    for _ in 0..events {
        recorder.record(Mark::PieceEnds, Key(1), 1, Rank(2), 4);
    }
    drop(recorder);
    let path = timeline.path().to_owned();
    assert!(path.ends_with("server-1/comm.json"));
    timeline.finish();
    let metadata = &read(&path)["metadata"];
    let (taken, lost) =
        (metadata["events"].as_u64().unwrap(), metadata["dropped"].as_u64().unwrap());
    assert_eq!(taken + lost, events as u64);
    assert!(taken >= TIMELINE_EVENTS_MAX as u64);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn the_stages_of_a_tensor_follow_one_another_on_the_track_of_each_part() {
    let folder = folder("rank");
    let (timeline, mut recorders) =
        Timeline::start(&folder, subject(Who::Rank(Rank(3)), 1, 1..=u64::MAX)).unwrap();
    let mut recorder = recorders.pop().unwrap();
    let mut at = |ms: u64, mark, key: u64, round| {
        recorder.record_at(ms * MS, mark, Key(key), round, Rank(3), 64);
    };
    for round in [1, 2] {
        // The second round is asked for before the first is done; a publication may come before
        // the sending is seen to be over.
        let begin = 100 * round;
        for key in [4, 9] {
            at(begin - 50 * (round - 1), Mark::Queued, key, round);
            at(begin + 10 + key, Mark::Posted, key, round);
        }
        at(begin + 30, Mark::Sent, 4, round);
        at(begin + 40, Mark::Landing, 4, round);
        at(begin + 50, Mark::Landing, 9, round);
        at(begin + 60, Mark::Sent, 9, round);
        at(begin + 70, Mark::Landed, 9, round);
        at(begin + 80, Mark::Landed, 4, round);
        at(begin + 81, Mark::Done, 4, round);
    }
    drop(recorder);
    let path = timeline.path().to_owned();
    timeline.finish();
    let trace = read(&path);
    let found = slices(&trace);
    assert_no_overlap(&found);
    let name = "Comm.a \"quoted\"\n name";
    let span = |stage: &str| -> Vec<(f64, f64)> {
        let wanted = if stage.is_empty() { name.to_owned() } else { format!("{name}.{stage}") };
        let found = found.iter().filter(|one| one.0 == wanted);
        found.map(|one| (milliseconds(one.2), milliseconds(one.3))).collect()
    };
    assert_eq!(span(""), [(100.0, 181.0), (181.0, 281.0)]);
    assert_eq!(span("QUEUE"), [(100.0, 114.0), (100.0, 119.0), (181.0, 214.0), (181.0, 219.0)]);
    assert_eq!(span("PUSH")[..2], [(114.0, 130.0), (119.0, 150.0)]);
    assert_eq!(span("SUM")[..2], [(130.0, 140.0), (150.0, 150.0)]);
    assert_eq!(span("PULL")[..2], [(140.0, 180.0), (150.0, 170.0)]);
    assert_eq!(span("DONE")[..2], [(180.0, 181.0), (170.0, 181.0)]);
    assert_eq!(trace["metadata"]["dropped"], 0);
    assert_eq!(trace["metadata"]["who"], "rank 3");
    assert!(trace["metadata"]["clock"]["error_us"].as_f64().unwrap() >= 100.0);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_group_reduces_before_and_broadcasts_after_the_server() {
    let folder = folder("group");
    let (timeline, mut recorders) =
        Timeline::start(&folder, subject(Who::Rank(Rank(3)), 1, 1..=u64::MAX)).unwrap();
    let mut recorder = recorders.pop().unwrap();
    // The first part is this rank's own, the second one another's.
    let events = [
        (100, Mark::Queued, 4),
        (100, Mark::Queued, 9),
        (110, Mark::Granted, 4),
        (115, Mark::Granted, 9),
        (120, Mark::Reduced, 4),
        (125, Mark::Posted, 4),
        (130, Mark::Sent, 4),
        (140, Mark::Landing, 4),
        (150, Mark::Landed, 4),
        (150, Mark::Copying, 4),
        (155, Mark::Copying, 9),
        // The end of the sending is seen after the answer to it.
        (160, Mark::Contributed, 9),
        (165, Mark::Copied, 4),
        (170, Mark::Copied, 9),
        (175, Mark::Copied, 4),
        (180, Mark::Done, 4),
    ];
    for (ms, mark, key) in events {
        recorder.record_at(ms * MS, mark, Key(key), 1, Rank(3), 64);
    }
    drop(recorder);
    let path = timeline.path().to_owned();
    timeline.finish();
    let found = slices(&read(&path));
    assert_no_overlap(&found);
    let of_track = |tid| stages(&found, tid);
    let own = [
        ("QUEUE", 100.0, 110.0),
        ("REDUCE", 110.0, 120.0),
        ("QUEUE", 120.0, 125.0),
        ("PUSH", 125.0, 130.0),
        ("SUM", 130.0, 140.0),
        ("PULL", 140.0, 150.0),
        ("BROADCAST", 150.0, 175.0),
        ("DONE", 175.0, 180.0),
    ];
    assert_eq!(of_track(2), own);
    let other = [
        ("QUEUE", 100.0, 115.0),
        ("REDUCE", 115.0, 155.0),
        ("SUM", 155.0, 155.0),
        ("BROADCAST", 155.0, 170.0),
        ("DONE", 170.0, 180.0),
    ];
    assert_eq!(of_track(3), other);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn two_threads_of_a_rank_make_one_way_of_a_part_and_rounds_overlap() {
    let folder = folder("gpu");
    let (timeline, mut recorders) =
        Timeline::start(&folder, subject(Who::Rank(Rank(3)), 2, 1..=u64::MAX)).unwrap();
    let (mut gpu, mut nic) = (recorders.pop().unwrap(), recorders.pop().unwrap());
    // The NIC loop's first, so that the order in which the rings are filled is not that of times.
    for (begin, round) in [(100, 1), (200, 2)] {
        let events =
            [(25, Mark::Posted), (30, Mark::Sent), (40, Mark::Landing), (45, Mark::Landed)];
        for (ms, mark) in events {
            nic.record_at((begin + ms) * MS, mark, Key(4), round, Rank(3), 64);
        }
    }
    let mut at = |ms: u64, mark, key, round| {
        gpu.record_at(ms * MS, mark, Key(key), round, Rank(3), 64);
    };
    for (begin, round) in [(100, 1), (200, 2)] {
        // The other part is another rank's.
        at(begin, Mark::Queued, 4, round);
        at(begin, Mark::Queued, 9, round);
        if round == 2 {
            // What the GPU did last of the round before is seen when this one has begun.
            at(205, Mark::Copied, 4, 1);
            at(205, Mark::Copied, 9, 1);
            at(206, Mark::Done, 4, 1);
        }
        for key in [4, 9] {
            at(begin + 8, Mark::Ready, key, round);
            at(begin + 10, Mark::Granted, key, round);
        }
        // The copy is enqueued before the sum is seen to be there.
        at(begin + 11, Mark::Falling, 4, round);
        at(begin + 15, Mark::Reduced, 4, round);
        at(begin + 15, Mark::Reduced, 9, round);
        at(begin + 20, Mark::Fallen, 4, round);
        at(begin + 46, Mark::Rising, 4, round);
        at(begin + 48, Mark::Copying, 4, round);
        at(begin + 48, Mark::Copying, 9, round);
        at(begin + 50, Mark::Risen, 4, round);
    }
    at(270, Mark::Copied, 4, 2);
    at(270, Mark::Copied, 9, 2);
    at(271, Mark::Done, 4, 2);
    drop((gpu, nic));
    let path = timeline.path().to_owned();
    timeline.finish();
    let found = slices(&read(&path));
    assert_no_overlap(&found);
    let of_track = |tid| stages(&found, tid);
    let own = [
        ("READY", 100.0, 108.0),
        ("COORDINATE_REDUCE", 108.0, 110.0),
        ("REDUCE", 110.0, 115.0),
        ("COPYD2H", 115.0, 120.0),
        ("QUEUE", 120.0, 125.0),
        ("PUSH", 125.0, 130.0),
        ("SUM", 130.0, 140.0),
        ("PULL", 140.0, 145.0),
        ("QUEUE", 145.0, 146.0),
        ("COPYH2D", 146.0, 150.0),
        ("BROADCAST", 150.0, 205.0),
        ("DONE", 205.0, 206.0),
        ("READY", 206.0, 208.0),
        ("COORDINATE_REDUCE", 208.0, 210.0),
        ("REDUCE", 210.0, 215.0),
    ];
    assert_eq!(of_track(2)[..own.len()], own);
    let other = [
        ("READY", 100.0, 108.0),
        ("COORDINATE_REDUCE", 108.0, 110.0),
        ("REDUCE", 110.0, 115.0),
        ("SUM", 115.0, 148.0),
        ("BROADCAST", 148.0, 205.0),
        ("DONE", 205.0, 206.0),
    ];
    assert_eq!(of_track(3)[..other.len()], other);
    assert_eq!(of_track(3).len(), 2 * other.len());
    assert_eq!(of_track(1).iter().map(|one| one.2).collect::<Vec<_>>(), [206.0, 271.0]);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_server_shows_lanes_keys_and_additions() {
    let folder = folder("server");
    let (timeline, mut recorders) =
        Timeline::start(&folder, subject(Who::Server(0), 2, 1..=u64::MAX)).unwrap();
    assert_eq!(recorders.len(), 2);
    let mut at = |ms: u64, mark, rank| {
        recorders[1].record_at(ms * MS, mark, Key(4), 1, Rank(rank), 64);
    };
    at(1, Mark::Arrived, 0);
    at(2, Mark::Taken, 0);
    at(3, Mark::Arrived, 1);
    at(3, Mark::Parked, 1);
    at(5, Mark::Ended, 0);
    at(6, Mark::Adding, 1);
    at(7, Mark::PieceBegins, 1);
    at(8, Mark::PieceEnds, 1);
    at(9, Mark::Ended, 1);
    at(10, Mark::Summed, 0);
    at(11, Mark::Posted, 0);
    at(12, Mark::Posted, 1);
    at(13, Mark::Sent, 0);
    at(15, Mark::Sent, 1);
    drop(recorders);
    let path = timeline.path().to_owned();
    timeline.finish();
    let trace = read(&path);
    let found = slices(&trace);
    assert_no_overlap(&found);
    let mut spans: Vec<(String, f64, f64)> =
        found.iter().map(|one| (one.0.clone(), milliseconds(one.2), milliseconds(one.3))).collect();
    spans.sort_by(|one, other| one.partial_cmp(other).unwrap());
    let wanted = [
        ("add", 7.0, 8.0),
        ("land", 2.0, 5.0),
        ("land and add", 6.0, 9.0),
        ("parked", 3.0, 6.0),
        ("publish", 10.0, 15.0),
        ("publish", 11.0, 13.0),
        ("publish", 12.0, 15.0),
        ("sum", 1.0, 10.0),
    ];
    let wanted = wanted.map(|(name, from, to)| (name.to_owned(), from, to));
    assert_eq!(spans, wanted);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_note_is_a_moment_of_the_whole_process() {
    let folder = folder("note");
    let subject = subject(Who::Server(2), 1, 1..=u64::MAX);
    let (timeline, recorders) = Timeline::start(&folder, subject).unwrap();
    let line = "2 ranks of 3 go on without rank 1: it \"died\"";
    timeline.note(line);
    drop(recorders);
    let path = timeline.path().to_owned();
    timeline.finish();
    let trace = read(&path);
    let events = trace["traceEvents"].as_array().unwrap();
    let notes: Vec<&Value> = events.iter().filter(|event| event["ph"] == "i").collect();
    assert_eq!(notes.len(), 1, "{trace}");
    let note = notes[0];
    assert_eq!((&note["name"], &note["s"]), (&Value::from(line), &Value::from("p")));
    assert!(note["pid"] == 1_000_002 && note["ts"].as_f64().unwrap() > 0.0, "{note}");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_folder_that_cannot_be_made_is_an_error_that_says_so() {
    let subject = subject(Who::Rank(Rank(0)), 1, 1..=1);
    let error = Timeline::start(Path::new("/proc/none"), subject).err().unwrap();
    let text = error.to_string();
    assert!(text.contains("/proc/none/0/comm.json") && text.contains("BYTEPS_TRACE_DIR"), "{text}");
}
