//! Who is started and who is asked to leave, on machines that are a list.

use super::super::signals::Signals;
use super::*;
use bps_engine::config::{Outcome, Program, load};

/// Starts what it is told to, but for machines that take their time or refuse.
#[derive(Default)]
struct Book {
    next: usize,
    started: Vec<(String, u32, bool)>,
    signals: Vec<(usize, Signal)>,
    slow: Vec<&'static str>,
    broken: Vec<&'static str>,
    released: Vec<String>,
}

impl Crew for Book {
    fn sleep(&mut self, _: &Signals, _: Duration) {}

    fn attend(&mut self) -> Vec<super::super::crew::Ended> {
        Vec::new()
    }

    fn signal(&mut self, process: usize, signal: Signal) {
        self.signals.push((process, signal));
    }

    fn tell_the_end(&mut self, _: usize) {}

    fn enlist(&mut self, slot: &Slot) -> Result<Option<usize>, String> {
        let name = slot.host.name.as_str();
        if self.broken.contains(&name) {
            return Err("no such program".to_owned());
        }
        if self.slow.contains(&name) {
            return Ok(None);
        }
        self.started.push((name.to_owned(), slot.local_rank, slot.is_new));
        self.next += 1;
        Ok(Some(self.next - 1))
    }

    fn release(&mut self, host: &Host) {
        self.released.push(host.name.clone());
    }

    fn nobody_listens(&self) -> bool {
        false
    }
}

fn fleet(flags: &[&str]) -> Fleet {
    let words = [&["--local", "1", "--elastic", "redo"], flags, &["true"]].concat();
    match load(Program::Launcher, words.into_iter().map(Into::into), &|_| None) {
        Ok(Outcome::Run(loaded)) => Fleet::new(&loaded.config, None),
        other => panic!("{other:?}"),
    }
}

fn host(name: &str, count: u32) -> Host {
    Host { user: None, name: name.to_owned(), count: Some(count) }
}

/// A fleet of two ranks on `a`, places 3 and 4 of the plan.
fn begun(flags: &[&str]) -> (Fleet, Book, Instant) {
    let mut fleet = fleet(flags);
    fleet.begin(host("a", 2), 0, vec![3, 4]);
    (fleet, Book { next: 5, ..Book::default() }, Instant::now())
}

fn names(book: &mut Book) -> Vec<(String, u32)> {
    book.started.drain(..).map(|(name, slot, _)| (name, slot)).collect()
}

const S: Duration = Duration::from_secs(1);

#[test]
fn what_died_is_started_again_later_each_time() {
    let (mut fleet, mut book, begun) = begun(&["--max-workers", "2", "--restart-delay", "1"]);
    assert!(fleet.look(&mut book, 2, begun).is_empty());
    let (mut now, mut place) = (begun, 4);
    for rest in [1, 2, 4, 8] {
        assert_eq!(fleet.ended(place, 137, now), End::Failed);
        assert!(fleet.look(&mut book, 1, now + S * rest - S / 2).is_empty(), "{rest}");
        now += S * rest;
        let started = fleet.look(&mut book, 1, now);
        assert_eq!(started.len(), 1);
        assert_eq!(started[0].label, "rank 1 on a");
        assert_eq!(names(&mut book), [("a".to_owned(), 1)]);
        place = started[0].place;
    }
    // After a long time without one, it is the first failure again.
    now += S * 601;
    assert_eq!(fleet.ended(place, 1, now), End::Failed);
    assert_eq!(fleet.look(&mut book, 1, now + S).len(), 1);
}

#[test]
fn a_machine_that_is_lost_with_all_its_ranks_has_failed_once() {
    let (mut fleet, mut book, now) = begun(&["--max-workers", "2"]);
    assert_eq!([fleet.ended(3, 255, now), fleet.ended(4, 255, now)], [End::Failed; 2]);
    assert_eq!(fleet.look(&mut book, 0, now + S).len(), 2);
}

#[test]
fn what_has_ended_well_stays_so_and_nothing_is_started_beside_it() {
    let (mut fleet, mut book, now) = begun(&["--max-workers", "4"]);
    fleet.learn(vec![host("a", 2), host("b", 1)], now);
    assert_eq!(fleet.ended(3, 0, now), End::Well);
    assert!(fleet.look(&mut book, 1, now + S).is_empty());
    // The others go on: it has left its machine.
    fleet.look(&mut book, 1, now + QUIET);
    assert_eq!(names(&mut book), [("b".to_owned(), 0)]);
    // Its machine comes back.
    fleet.learn(vec![host("b", 1)], now);
    fleet.look(&mut book, 2, now + QUIET);
    fleet.learn(vec![host("a", 1), host("b", 1)], now);
    fleet.look(&mut book, 2, now + QUIET);
    assert_eq!(names(&mut book), [("a".to_owned(), 0)]);
}

#[test]
fn new_machines_get_ranks_up_to_the_most() {
    let (mut fleet, mut book, now) = begun(&["--max-workers", "5", "--slots", "2"]);
    let unsaid = Host { count: None, ..host("c", 1) };
    fleet.learn(vec![host("b", 1), unsaid, host("a", 3)], now);
    book.slow.push("b");
    // The slow one is counted while it is reached.
    assert_eq!(fleet.look(&mut book, 2, now).len(), 2);
    assert_eq!(book.started, [("c".to_owned(), 0, true), ("c".to_owned(), 1, true)]);
    book.slow.clear();
    assert_eq!(fleet.look(&mut book, 4, now).len(), 1);
    assert_eq!(book.started[2], ("b".to_owned(), 0, true));
    assert!(fleet.look(&mut book, 5, now).is_empty());
    // In the place of one of the first, the same; behind them, a new one.
    fleet.ended(3, 1, now);
    fleet.ended(5, 1, now);
    fleet.learn(vec![host("a", 3), host("b", 1)], now);
    assert_eq!(fleet.look(&mut book, 3, now + S).len(), 2);
    assert_eq!(book.started[3..], [("a".to_owned(), 0, false), ("a".to_owned(), 2, true)]);
}

#[test]
fn ranks_of_machines_that_are_gone_are_asked_and_then_killed() {
    let flags = ["--max-workers", "4", "--leave-notice", "3", "--grace", "1"];
    let (mut fleet, mut book, now) = begun(&flags);
    fleet.learn(vec![host("a", 2), host("b", 2)], now);
    assert_eq!(fleet.look(&mut book, 2, now).len(), 2);
    fleet.learn(vec![host("a", 1)], now);
    fleet.look(&mut book, 4, now);
    assert_eq!(book.signals, [(4, Signal::TERM), (5, Signal::TERM), (6, Signal::TERM)]);
    assert!(book.released.is_empty());
    fleet.look(&mut book, 4, now + S * 3);
    assert_eq!(book.signals.len(), 3, "each is asked once");
    assert_eq!(fleet.ended(5, 0, now), End::Asked);
    assert_eq!(fleet.ended(4, 143, now), End::Asked);
    fleet.look(&mut book, 2, now + S * 4);
    assert_eq!(book.signals[3..], [(6, Signal::KILL)]);
    assert_eq!(fleet.ended(6, 137, now), End::Asked);
    fleet.look(&mut book, 1, now + S * 4);
    assert_eq!(book.released, ["b"]);
    // It is back, with nothing held against it.
    fleet.learn(vec![host("b", 2), host("a", 1)], now);
    assert_eq!(fleet.look(&mut book, 1, now + S * 4).len(), 2);
}

#[test]
fn as_many_stay_as_the_job_needs_unless_it_waits() {
    let flags = ["--max-workers", "4", "--min-workers", "2"];
    let (mut fleet, mut book, now) = begun(&flags);
    fleet.learn(vec![host("b", 1)], now);
    book.slow.push("b");
    fleet.look(&mut book, 2, now);
    assert!(book.signals.is_empty());
    book.slow.clear();
    assert_eq!(fleet.look(&mut book, 2, now).len(), 1);
    fleet.look(&mut book, 3, now);
    assert_eq!(book.signals, [(3, Signal::TERM)]);
    let (mut fleet, mut book, now) = begun(&[&flags[..], &["--elastic-wait", "60"]].concat());
    fleet.learn(vec![host("b", 1)], now);
    fleet.look(&mut book, 2, now);
    assert_eq!(book.signals, [(3, Signal::TERM), (4, Signal::TERM)]);
}

#[test]
fn a_machine_that_starts_nothing_waits_longer_each_time() {
    let (mut fleet, mut book, now) = begun(&["--max-workers", "4"]);
    fleet.learn(vec![host("a", 2), host("b", 2)], now);
    book.broken.push("b");
    fleet.look(&mut book, 2, now);
    fleet.look(&mut book, 2, now + S);
    book.broken.clear();
    // It has rested 1 s, and now rests 2.
    assert!(fleet.look(&mut book, 2, now + S * 2).is_empty());
    assert_eq!(fleet.look(&mut book, 2, now + S * 3).len(), 2);
}

#[test]
fn a_job_begins_with_as_many_ranks_as_fit_evenly() {
    let of = |hosts: &[(&str, u32)], most| {
        let hosts: Vec<Host> = hosts.iter().map(|(name, count)| host(name, *count)).collect();
        let first = first(&hosts, 1, most);
        first.iter().map(|it| format!("{}:{}", it.name, it.count.unwrap())).collect::<Vec<_>>()
    };
    assert_eq!(of(&[("a", 2), ("b", 2)], 8), ["a:2", "b:2"]);
    assert_eq!(of(&[("a", 1), ("b", 8)], 8), ["b:8"]);
    assert_eq!(of(&[("a", 4), ("b", 4), ("c", 4)], 8), ["a:4", "b:4"]);
    assert_eq!(of(&[("a", 4), ("b", 3)], 8), ["a:3", "b:3"]);
    assert_eq!(of(&[("a", 4)], 3), ["a:3"]);
    assert!(of(&[], 3).is_empty());
    let unsaid = Host { count: None, ..host("a", 1) };
    assert_eq!(first(&[unsaid], 2, 8)[0].count, Some(2));
}
