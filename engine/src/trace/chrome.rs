//! Events of a data thread as trace events of Chrome and Perfetto: slices on tracks, and arrows
//! from a contribution to its sum, to its publication, to where that lands.
//!
//! A process of the trace is a rank or a server. Slices of one track never overlap, for viewers can
//! only nest them: what overlaps has tracks of its own. Called by the thread that writes a
//! timeline.

mod rank;
mod server;

use super::event::{Event, Mark};
use crate::base::{Key, KeyMap, Rank, word};
use rank::RankFormatter;
use serde_json::Value;
use server::CoreFormatter;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

/// Whose timeline it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Who {
    /// A worker process.
    Rank(Rank),
    /// A server, by its index.
    Server(u32),
}

/// First process number of servers in a trace; ranks stay below.
const SERVER_PIDS: u32 = 1_000_000;

impl Who {
    /// The folder of its file.
    pub(super) fn folder(self) -> String {
        match self {
            Who::Rank(rank) => rank.0.to_string(),
            Who::Server(index) => format!("server-{index}"),
        }
    }

    pub(super) fn name(self) -> String {
        match self {
            Who::Rank(rank) => rank.to_string(),
            Who::Server(index) => format!("server {index}"),
        }
    }

    /// Its number in the trace. Viewers take 0 for the idle process of the kernel.
    fn pid(self) -> u32 {
        match self {
            Who::Rank(rank) => rank.0 + 1,
            Who::Server(index) => SERVER_PIDS + index,
        }
    }

    /// A moment of the whole process.
    pub(super) fn note(self, line: &str, at_ns: u64, offset_ns: i64, text: &mut String) {
        let time = Pen { text, offset_ns }.time(at_ns);
        let (pid, name) = (self.pid(), Value::from(line));
        let _ = writeln!(
            text,
            "{{\"ph\":\"i\",\"s\":\"p\",\"cat\":\"Job\",\"pid\":{pid},\"tid\":0,\"name\":{name},\
             \"ts\":{time}}},"
        );
    }

    /// The events that name the process.
    pub(super) fn describe(self) -> String {
        let (pid, name) = (self.pid(), Value::from(self.name()));
        format!(
            "{{\"ph\":\"M\",\"pid\":{pid},\"tid\":0,\"name\":\"process_name\",\
             \"args\":{{\"name\":{name}}}}},\n\
             {{\"ph\":\"M\",\"pid\":{pid},\"tid\":0,\"name\":\"process_sort_index\",\
             \"args\":{{\"sort_index\":{pid}}}}},\n"
        )
    }
}

/// What a part is called.
#[derive(Clone, Debug)]
pub(super) struct PartName {
    pub(super) tensor: Arc<str>,
    pub(super) part: u32,
    pub(super) parts: u32,
}

/// The names of a worker's parts. A server has none: it knows keys only.
#[derive(Default, Debug)]
pub struct Names(Mutex<KeyMap<PartName>>);

impl Names {
    /// Adds a tensor's parts, in their order.
    pub fn add(&self, tensor: &str, keys: impl ExactSizeIterator<Item = Key>) {
        let tensor: Arc<str> = tensor.into();
        let parts = word(keys.len());
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (part, key) in (0..).zip(keys) {
            names.insert(key, PartName { tensor: Arc::clone(&tensor), part, parts });
        }
    }

    fn find(&self, key: Key) -> PartName {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let unknown = || PartName { tensor: key.to_string().into(), part: 0, parts: 1 };
        names.get(&key).cloned().unwrap_or_else(unknown)
    }
}

/// Turns the events of one data thread into text: JSON objects, each with a comma and a line's end
/// behind it.
pub(super) enum Formatter {
    Rank(RankFormatter),
    Core(CoreFormatter),
}

impl Formatter {
    pub(super) fn new(who: Who, core: u32, names: Arc<Names>) -> Formatter {
        match who {
            Who::Rank(rank) => Formatter::Rank(RankFormatter::new(who.pid(), rank, names)),
            Who::Server(_) => Formatter::Core(CoreFormatter::new(who.pid(), core)),
        }
    }

    /// One event. `offset_ns` turns its time into nanoseconds since 1970 of the job's clock.
    pub(super) fn take(&mut self, event: Event, offset_ns: i64, text: &mut String) {
        match self {
            Formatter::Rank(formatter) => formatter.take(event, &mut Pen { text, offset_ns }),
            Formatter::Core(formatter) => formatter.take(event, &mut Pen { text, offset_ns }),
        }
    }

    /// No more events come.
    pub(super) fn end(&mut self, offset_ns: i64, text: &mut String) {
        if let Formatter::Core(formatter) = self {
            formatter.end(&mut Pen { text, offset_ns });
        }
    }
}

/// Where an arrow goes on.
#[derive(Clone, Copy)]
enum Arrow {
    Starts,
    Passes,
    Ends,
}

/// A track of the trace.
#[derive(Clone, Copy)]
struct Track {
    pid: u32,
    tid: u32,
}

/// What a slice is about.
#[derive(Clone, Copy)]
struct About {
    key: Key,
    round: u64,
    bytes: u32,
    rank: Rank,
}

impl About {
    fn of(event: &Event) -> About {
        About { key: event.key, round: event.round, bytes: event.bytes, rank: event.rank }
    }

    /// The number of the arrow of this contribution and its result: the same in every process.
    fn arrow(&self) -> u64 {
        let mut mixed = self.key.0;
        for word in [self.round, u64::from(self.rank.0)] {
            mixed = (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9).wrapping_add(word);
        }
        // JSON's numbers are exact up to 2^53.
        (mixed ^ mixed >> 32) & ((1 << 53) - 1)
    }
}

/// Writes trace events. Writing to a string can't fail.
struct Pen<'a> {
    text: &'a mut String,
    offset_ns: i64,
}

/// Nanoseconds as microseconds with three digits behind the point: exact, unlike a float.
struct Micros(u64);

impl std::fmt::Display for Micros {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

impl Pen<'_> {
    fn time(&self, at_ns: u64) -> Micros {
        Micros(at_ns.saturating_add_signed(self.offset_ns))
    }

    /// Names a track, at its place among the tracks of its process.
    fn track(&mut self, track: Track, name: &str, about: &str) {
        let Track { pid, tid } = track;
        let name = Value::from(name);
        let _ = writeln!(
            self.text,
            "{{\"ph\":\"M\",\"pid\":{pid},\"tid\":{tid},\"name\":\"thread_name\",\
             \"args\":{{\"name\":{name}{about}}}}},\n\
             {{\"ph\":\"M\",\"pid\":{pid},\"tid\":{tid},\"name\":\"thread_sort_index\",\
             \"args\":{{\"sort_index\":{tid}}}}},"
        );
    }

    /// A slice from one time to another. `tensor` is what BytePS's files have in `args.name`.
    fn slice(
        &mut self,
        track: Track,
        name: &str,
        (from_ns, to_ns): (u64, u64),
        about: About,
        tensor: Option<&str>,
    ) {
        let Track { pid, tid } = track;
        let (name, from) = (Value::from(name), self.time(from_ns));
        let duration = Micros(to_ns.saturating_sub(from_ns));
        let About { key, round, bytes, rank } = about;
        let _ = write!(
            self.text,
            "{{\"ph\":\"X\",\"cat\":\"Comm\",\"pid\":{pid},\"tid\":{tid},\"name\":{name},\
             \"ts\":{from},\"dur\":{duration},\"args\":{{"
        );
        if let Some(tensor) = tensor {
            let _ = write!(self.text, "\"name\":{},", Value::from(tensor));
        }
        let _ = writeln!(
            self.text,
            "\"key\":{},\"round\":{round},\"bytes\":{bytes},\"rank\":{}}}}},",
            key.0, rank.0
        );
    }

    /// A point of an arrow, in the slice of this track that holds this time.
    fn arrow(&mut self, track: Track, arrow: Arrow, at_ns: u64, about: About) {
        let Track { pid, tid } = track;
        let (phase, binding) = match arrow {
            Arrow::Starts => ("s", ""),
            Arrow::Passes => ("t", ""),
            Arrow::Ends => ("f", ",\"bp\":\"e\""),
        };
        let (time, id) = (self.time(at_ns), about.arrow());
        let _ = writeln!(
            self.text,
            "{{\"ph\":\"{phase}\",\"cat\":\"Comm\",\"name\":\"part\",\"id\":{id},\
             \"pid\":{pid},\"tid\":{tid},\"ts\":{time}{binding}}},"
        );
    }
}
