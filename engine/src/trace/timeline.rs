//! The timeline: what the data threads record of each part, and the thread that writes it down.
//!
//! A data thread owns a [`Recorder`]: off, it is one branch on a pointer; on, it reads the clock
//! and puts 40 bytes into a ring of its own, which never grows. A full ring loses the event and
//! counts it. One thread of the process empties the rings and appends to a file that is a whole
//! JSON document after every write, so that a process that is killed leaves one that opens.

mod file;
#[cfg(test)]
mod tests;

use super::chrome::Formatter;
pub use super::chrome::{Names, Who};
use super::clock::{Clock, Estimate, now_ns};
use super::counters::Counter;
pub use super::event::{Event, Mark};
use super::log;
use crate::base::{Key, Rank};
use crate::limits::TIMELINE_EVENTS_MAX;
use crate::ring::{Consumer, Producer, spsc};
use crate::waits;
use crate::wire::Header;
use file::TraceFile;
use serde_json::json;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Notes that wait to be written, at most.
const NOTES_MAX: usize = 64;
/// How often the rings are emptied.
const DRAIN: Duration = Duration::from_millis(20);
/// How long events wait for the first estimate of the clock.
const CLOCK_PATIENCE: Duration = Duration::from_secs(2);
/// How long the data threads may take to let go of their recorders when a timeline ends.
const END_PATIENCE: Duration = Duration::from_secs(2);
/// Bytes of text that are written at once.
const TEXT_BYTES: usize = 1 << 20;

/// The end of a data thread: see the [module](self).
#[derive(Default)]
pub struct Recorder(Option<Box<Active>>);

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.is_on() { "Recorder(on)" } else { "Recorder(off)" })
    }
}

struct Active {
    ring: Producer<Event>,
    lost: Arc<Counter>,
    rounds: RangeInclusive<u64>,
}

impl Recorder {
    /// Whether somebody records.
    #[inline]
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Whether somebody records this round.
    #[inline]
    #[must_use]
    pub fn covers(&self, round: u64) -> bool {
        self.0.as_ref().is_some_and(|active| active.rounds.contains(&round))
    }

    /// Records something of a part, now.
    #[inline]
    pub fn record(&mut self, mark: Mark, key: Key, round: u64, rank: Rank, bytes: usize) {
        if let Some(active) = &mut self.0 {
            active.record(0, mark, key, round, rank, bytes);
        }
    }

    /// As [`record`](Recorder::record), of the part that a frame is about.
    #[inline]
    pub fn frame(&mut self, mark: Mark, header: &Header) {
        if let Some(active) = &mut self.0 {
            let bytes = header.length as usize;
            active.record(0, mark, header.key, header.round.0, header.rank, bytes);
        }
    }

    /// The time, for [`frame_at`](Recorder::frame_at); 0, without a look at the clock, if this is
    /// off.
    #[inline]
    #[must_use]
    pub fn now(&self) -> u64 {
        if self.0.is_some() { now_ns() } else { 0 }
    }

    /// As [`frame`](Recorder::frame), of a time past.
    #[inline]
    pub fn frame_at(&mut self, at_ns: u64, mark: Mark, header: &Header) {
        if let Some(active) = &mut self.0 {
            let bytes = header.length as usize;
            active.record(at_ns, mark, header.key, header.round.0, header.rank, bytes);
        }
    }

    /// As [`frame`](Recorder::frame), of a piece of its payload.
    #[inline]
    pub fn piece(&mut self, mark: Mark, header: &Header, bytes: usize) {
        if let Some(active) = &mut self.0 {
            active.record(0, mark, header.key, header.round.0, header.rank, bytes);
        }
    }

    /// As [`record`](Recorder::record), of a time past, by [`now_ns`]; 0 means now.
    #[inline]
    pub fn record_at(
        &mut self,
        at_ns: u64,
        mark: Mark,
        key: Key,
        round: u64,
        rank: Rank,
        bytes: usize,
    ) {
        if let Some(active) = &mut self.0 {
            active.record(at_ns, mark, key, round, rank, bytes);
        }
    }
}

impl Active {
    // Out of line, so that the loops that record carry a test and a jump and nothing else.
    #[cold]
    #[inline(never)]
    fn record(&mut self, at_ns: u64, mark: Mark, key: Key, round: u64, rank: Rank, bytes: usize) {
        if !self.rounds.contains(&round) {
            return;
        }
        let at_ns = if at_ns == 0 { now_ns() } else { at_ns };
        // A figure for readers: parts are smaller, and nothing is found by it.
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        if self.ring.push(Event { at_ns, key, round, bytes, rank, mark }).is_err() {
            self.lost.add(1);
        }
    }
}

/// The writer's end of a recorder.
struct Source {
    ring: Consumer<Event>,
    lost: Arc<Counter>,
    /// Taken from the ring, and not written.
    head: Option<Event>,
}

/// A recorder with room for `capacity` events, and the end that empties it.
fn recorder(
    capacity: usize,
    rounds: RangeInclusive<u64>,
) -> (Recorder, Consumer<Event>, Arc<Counter>) {
    let (ring, consumer) = spsc(capacity);
    let lost = Arc::new(Counter::default());
    let active = Active { ring, lost: Arc::clone(&lost), rounds };
    (Recorder(Some(Box::new(active))), consumer, lost)
}

/// Why there is no timeline.
#[derive(Debug, thiserror::Error)]
#[error(
    "the timeline can't be written to {}: {error}; set BYTEPS_TRACE_DIR, or name a folder that \
     this process may write to",
    .path.display()
)]
pub struct TimelineError {
    /// The file or its folder.
    pub path: PathBuf,
    /// What the kernel said.
    pub error: std::io::Error,
}

/// What a timeline is of.
pub struct Subject {
    /// The process.
    pub who: Who,
    /// Data threads of it; each gets a recorder.
    pub threads: u32,
    /// Rounds that are recorded.
    pub rounds: RangeInclusive<u64>,
    /// What the parts are called; may grow while it is recorded.
    pub names: Arc<Names>,
    /// Of this process.
    pub clock: Arc<Clock>,
}

/// Lines, each with its time.
type Notes = Arc<Mutex<Vec<(u64, String)>>>;

/// A timeline that is being written. It ends when this is dropped or all recorders are.
pub struct Timeline {
    path: PathBuf,
    notes: Notes,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Timeline {
    /// Begins a timeline in `folder`, which is made if it is not there: a file `comm.json` in a
    /// folder of this process's own, in place of one that was there. Returns the recorders.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn start(
        folder: &Path,
        subject: Subject,
    ) -> Result<(Timeline, Vec<Recorder>), TimelineError> {
        let path = folder.join(subject.who.folder()).join("comm.json");
        let fail = |error| TimelineError { path: path.clone(), error };
        let file = TraceFile::create(&path).map_err(fail)?;
        let mut recorders = Vec::new();
        let mut sources = Vec::new();
        for _ in 0..subject.threads {
            let (recorder, ring, lost) = recorder(TIMELINE_EVENTS_MAX, subject.rounds.clone());
            recorders.push(recorder);
            sources.push(Source { ring, lost, head: None });
        }
        // A part is the work of all threads of a rank, and of one core of a server.
        let formatters = if matches!(subject.who, Who::Rank(_)) { 1 } else { subject.threads };
        let formatter = |core| Formatter::new(subject.who, core, Arc::clone(&subject.names));
        let formatters = (0..formatters).map(formatter).collect();
        let stop = Arc::new(AtomicBool::new(false));
        let notes = Notes::default();
        let writer = Writer {
            file,
            sources,
            formatters,
            subject,
            stop: Arc::clone(&stop),
            notes: Arc::clone(&notes),
            events: 0,
            error_ns: Some(0),
            text: String::with_capacity(TEXT_BYTES),
        };
        let thread = std::thread::Builder::new()
            .name("bps-timeline".into())
            .spawn(move || writer.run())
            .map_err(fail)?;
        Ok((Timeline { path, notes, stop, thread: Some(thread) }, recorders))
    }

    /// Notes something that concerns the whole process, now. Beyond 64 lines that are still to be
    /// written, lines are lost.
    pub fn note(&self, line: &str) {
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        if notes.len() < NOTES_MAX {
            notes.push((now_ns(), line.to_owned()));
        }
    }

    /// Where it is written.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it has ended: all recorders are gone, or it can't be written.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until what was recorded is written. The recorders are to be dropped before, or just
    /// now; two seconds later it ends in any case, unless the file's disk holds it.
    pub fn finish(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::Release);
        // A writer that panicked has said so; the job does not depend on it.
        if let Some(Err(late)) = self.thread.take().map(waits::join) {
            log::warning!("{late}");
        }
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        self.end();
    }
}

struct Writer {
    file: TraceFile,
    sources: Vec<Source>,
    /// One for each source, or one for all.
    formatters: Vec<Formatter>,
    subject: Subject,
    stop: Arc<AtomicBool>,
    notes: Notes,
    events: u64,
    /// The largest bound of any estimate that was used; none if one had none.
    error_ns: Option<u64>,
    text: String,
}

impl Writer {
    fn run(mut self) {
        let estimate = self.wait_for_clock();
        let header = self.subject.who.describe();
        self.text.push_str(&header);
        let mut stopping = None;
        loop {
            // Before the look at the rings: what was recorded until then is taken.
            let abandoned = self.sources.iter().all(|source| source.ring.is_abandoned());
            if self.stop.load(Ordering::Acquire) {
                stopping.get_or_insert_with(Instant::now);
            }
            let estimate = self.subject.clock.estimate().unwrap_or(estimate);
            self.error_ns = self.error_ns.zip(estimate.error_ns).map(|(a, b)| a.max(b));
            let written = self.drain(estimate);
            let late = stopping.is_some_and(|since| since.elapsed() >= END_PATIENCE);
            let over = abandoned || late;
            let result = written.and_then(|()| if over { self.close(estimate) } else { Ok(()) });
            if let Err(error) = result {
                let path = self.file.path().display();
                return log::warning!("the timeline ends, {path} can't be written: {error}");
            }
            if over {
                return;
            }
            std::thread::sleep(DRAIN);
        }
    }

    /// Events wait in their rings until their times can be told.
    fn wait_for_clock(&self) -> Estimate {
        let start = Instant::now();
        loop {
            if let Some(estimate) = self.subject.clock.estimate() {
                return estimate;
            }
            let waited = start.elapsed() >= CLOCK_PATIENCE;
            if waited || self.sources.iter().all(|source| source.ring.is_abandoned()) {
                return Clock::own();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn drain(&mut self, estimate: Estimate) -> std::io::Result<()> {
        // Not more than was there: a thread that records as fast as we write would hold us. What is
        // older than this is in its ring, and so is everything that it followed from.
        let horizon = now_ns();
        while let Some((source, event)) = self.next(horizon) {
            self.events += 1;
            let formatter = source.min(self.formatters.len() - 1);
            self.formatters[formatter].take(event, estimate.offset_ns, &mut self.text);
            if self.text.len() >= TEXT_BYTES {
                self.write(estimate)?;
            }
        }
        let notes = std::mem::take(&mut *self.notes.lock().unwrap_or_else(PoisonError::into_inner));
        for (at_ns, line) in notes {
            self.subject.who.note(&line, at_ns, estimate.offset_ns, &mut self.text);
        }
        if self.text.is_empty() { Ok(()) } else { self.write(estimate) }
    }

    /// The earliest event of all sources up to then, and its source. Each source's stay in their
    /// order, and what one thread did because of another's comes behind that.
    fn next(&mut self, horizon_ns: u64) -> Option<(usize, Event)> {
        for source in &mut self.sources {
            if source.head.is_none() {
                source.head = source.ring.pop();
            }
        }
        let heads = self.sources.iter().map(|source| source.head).enumerate();
        let due = heads.filter_map(|(at, head)| head.map(|event| (event.at_ns, at)));
        let (_, at) = due.filter(|(at_ns, _)| *at_ns <= horizon_ns).min()?;
        Some((at, self.sources[at].head.take()?))
    }

    fn close(&mut self, estimate: Estimate) -> std::io::Result<()> {
        for formatter in &mut self.formatters {
            formatter.end(estimate.offset_ns, &mut self.text);
        }
        let lost = self.lost();
        if lost > 0 {
            log::warning!(
                "the timeline lacks {lost} events, which came faster than they could be written"
            );
        }
        self.write(estimate)
    }

    fn lost(&self) -> u64 {
        self.sources.iter().map(|source| source.lost.read()).sum()
    }

    fn write(&mut self, estimate: Estimate) -> std::io::Result<()> {
        let microseconds = |ns: u64| ns as f64 / 1e3;
        let metadata = json!({
            "who": self.subject.who.name(),
            "host": rustix::system::uname().nodename().to_string_lossy(),
            "os_pid": std::process::id(),
            "clock": {
                "unit": "microseconds since 1970 by the scheduler's clock",
                "is_shared": estimate.is_shared,
                "error_us": self.error_ns.map(microseconds),
                "round_trip_us": microseconds(estimate.round_trip_ns),
            },
            "first_round": self.subject.rounds.start(),
            "last_round": self.subject.rounds.end(),
            "events": self.events,
            "dropped": self.lost(),
        });
        let result = self.file.append(&self.text, &metadata);
        self.text.clear();
        result
    }
}
