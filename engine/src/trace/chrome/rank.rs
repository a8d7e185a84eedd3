//! What happened to the parts of a worker: a track for each tensor and one for each part.
//!
//! Names are BytePS's: `Comm.TENSOR` on the tensor's track, `Comm.TENSOR.STAGE` on a part's. All of
//! a round is written when its tensor is done, for only then is the order of its events settled.
//! On a GPU the next round may have begun by then.

use super::{About, Arrow, Event, Mark, Names, PartName, Pen, Track};
use crate::base::{Key, KeyMap, Rank};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Open rounds of a part that are kept: of more, the end of the first was lost.
const ROUNDS_MAX: usize = 64;

/// When the events of one part's round were; 0 for those that have not been.
#[derive(Clone, Copy, Default)]
struct Times {
    queued: u64,
    /// Of tensors on GPUs alone, and always of these.
    ready: u64,
    falling: u64,
    fallen: u64,
    crossed: u64,
    rising: u64,
    risen: u64,
    granted: u64,
    contributed: u64,
    reduced: u64,
    posted: u64,
    sent: u64,
    landing: u64,
    landed: u64,
    copying: u64,
    copied: u64,
}

/// A round of a part that is not written.
struct Round {
    number: u64,
    bytes: u32,
    times: Times,
}

/// One part.
struct Part {
    name: PartName,
    track: Track,
    /// The oldest first.
    open: VecDeque<Round>,
    /// End of the last slice on its track.
    end: u64,
}

#[derive(Default)]
struct TensorTrack {
    track: Option<Track>,
    /// Its parts that have been queued.
    parts: Vec<Key>,
    end: u64,
}

pub(in crate::trace) struct RankFormatter {
    pid: u32,
    rank: Rank,
    names: Arc<Names>,
    parts: KeyMap<Part>,
    tensors: HashMap<Arc<str>, TensorTrack>,
    tracks: u32,
}

impl RankFormatter {
    pub(super) fn new(pid: u32, rank: Rank, names: Arc<Names>) -> RankFormatter {
        let (parts, tensors) = (KeyMap::default(), HashMap::new());
        RankFormatter { pid, rank, names, parts, tensors, tracks: 0 }
    }

    pub(super) fn take(&mut self, event: Event, pen: &mut Pen<'_>) {
        match event.mark {
            Mark::Queued => self.queued(&event, pen),
            Mark::Done => self.done(&event, pen),
            _ => self.note(&event),
        }
    }

    fn new_track(&mut self) -> Track {
        self.tracks += 1;
        Track { pid: self.pid, tid: self.tracks }
    }

    fn queued(&mut self, event: &Event, pen: &mut Pen<'_>) {
        if !self.parts.contains_key(&event.key) {
            self.add(event.key, pen);
        }
        let Some(part) = self.parts.get_mut(&event.key) else { return };
        if part.open.len() >= ROUNDS_MAX {
            part.open.pop_front();
        }
        let times = Times { queued: event.at_ns, ..Times::default() };
        part.open.push_back(Round { number: event.round, bytes: event.bytes, times });
    }

    /// A part that was not seen before gets a track, below that of its tensor.
    fn add(&mut self, key: Key, pen: &mut Pen<'_>) {
        let name = self.names.find(key);
        if !self.tensors.contains_key(&name.tensor) {
            let track = self.new_track();
            pen.track(track, &name.tensor, "");
            let tensor = TensorTrack { track: Some(track), ..TensorTrack::default() };
            self.tensors.insert(Arc::clone(&name.tensor), tensor);
        }
        let track = self.new_track();
        let label = format!("{} part {} of {}", name.tensor, name.part + 1, name.parts);
        pen.track(track, &label, &format!(",\"key\":{}", key.0));
        if let Some(tensor) = self.tensors.get_mut(&name.tensor) {
            tensor.parts.push(key);
        }
        self.parts.insert(key, Part { name, track, open: VecDeque::new(), end: 0 });
    }

    fn note(&mut self, event: &Event) {
        // Without its first event, which was lost, a round is not shown.
        let Some(part) = self.parts.get_mut(&event.key) else { return };
        let round = part.open.iter_mut().find(|round| round.number == event.round);
        let Some(Round { times, .. }) = round else { return };
        match event.mark {
            Mark::Ready => times.ready = event.at_ns,
            Mark::Falling => times.falling = event.at_ns,
            Mark::Fallen => times.fallen = event.at_ns,
            Mark::Crossed => times.crossed = event.at_ns,
            Mark::Rising => times.rising = event.at_ns,
            Mark::Risen => times.risen = event.at_ns,
            Mark::Granted => times.granted = event.at_ns,
            Mark::Contributed => times.contributed = event.at_ns,
            Mark::Reduced => times.reduced = event.at_ns,
            Mark::Posted => times.posted = event.at_ns,
            Mark::Sent => times.sent = event.at_ns,
            Mark::Landing => times.landing = event.at_ns,
            Mark::Landed => times.landed = event.at_ns,
            Mark::Copying => times.copying = event.at_ns,
            // At the owner there is one for each other rank: the last one counts.
            Mark::Copied => times.copied = event.at_ns,
            _ => {}
        }
    }

    fn done(&mut self, event: &Event, pen: &mut Pen<'_>) {
        let name = match self.parts.get(&event.key) {
            Some(part) => Arc::clone(&part.name.tensor),
            None => return,
        };
        let Some(tensor) = self.tensors.get_mut(&name) else { return };
        let whole = format!("Comm.{name}");
        let (mut first, mut bytes) = (u64::MAX, 0u32);
        for &key in &tensor.parts {
            let Some(part) = self.parts.get_mut(&key) else { continue };
            // Of an older one the end was lost.
            while part.open.front().is_some_and(|round| round.number <= event.round) {
                let Some(round) = part.open.pop_front() else { break };
                if round.number == event.round {
                    first = first.min(round.times.queued);
                    bytes = bytes.saturating_add(round.bytes);
                    part.write(&round, event.at_ns, &whole, self.rank, key, pen);
                }
            }
        }
        let (Some(track), true) = (tensor.track, first != u64::MAX) else { return };
        let about = About { bytes, ..About::of(event) };
        // The next round may have been asked for while this one was under way.
        let from = first.max(tensor.end);
        pen.slice(track, &whole, (from, event.at_ns), about, Some(&whole));
        tensor.end = event.at_ns;
    }
}

/// Name, begin and end; a begin or an end of 0 is one that was not seen.
type Stage = (&'static str, u64, u64);

/// The first of these that was seen.
fn first(times: &[u64]) -> u64 {
    times.iter().copied().find(|at| *at > 0).unwrap_or(0)
}

impl Times {
    /// What one thread sees of sending and receiving, or of several streams, comes in any order: a
    /// stage ends at the latest where the next begins, or where that ends if it began by itself.
    fn settle(&mut self) {
        let until = |at: u64, next: u64| if next > 0 { at.min(next) } else { at };
        self.sent = until(self.sent, self.landing);
        self.contributed = until(self.contributed, self.copying);
        self.reduced = until(self.reduced, self.fallen);
        self.ready = until(self.ready, self.reduced);
        self.crossed = until(self.crossed, first(&[self.posted, self.landing, self.rising]));
        if self.crossed > 0 && self.landing == 0 && self.rising > 0 {
            // Where no server takes part, the sum of the switches is the result.
            self.landed = self.crossed;
        }
        self.risen = until(self.risen, self.copied);
    }

    /// The stages of the round, in their order.
    fn stages(&self, free: u64, done: u64) -> [Stage; 9] {
        let Times { queued, granted, contributed, reduced, posted, .. } = *self;
        let Times { sent, landing, landed, copying, copied, .. } = *self;
        [
            ("QUEUE", queued.max(free), first(&[granted, posted, copying])),
            ("REDUCE", granted, first(&[reduced, contributed])),
            // The sum of a group waits for the lane to the server that sums the groups.
            ("QUEUE", reduced, posted),
            ("PUSH", posted, sent),
            ("SUM", sent, landing),
            ("PULL", landing, landed),
            // What this rank's group makes of its contribution it can't see.
            ("SUM", contributed, copying),
            ("BROADCAST", copying, copied),
            ("DONE", landed.max(copied), done),
        ]
    }

    /// As [`stages`](Times::stages), of a tensor on a GPU, whose streams are told early what to do
    /// and wait for each other: each stage begins when those before it are over.
    fn stages_on_gpu(&self, free: u64, done: u64) -> [Stage; 17] {
        let Times { queued, ready, granted, reduced, falling, fallen, crossed, .. } = *self;
        let Times { posted, sent, landing, landed, rising, risen, copying, copied, .. } = *self;
        let summed = ready.max(reduced);
        // Who sends a part sees more of its way than the other ranks of the host.
        let elsewhere = if landed == 0 { summed } else { 0 };
        [
            ("READY", queued.max(free), ready),
            ("COORDINATE_REDUCE", ready, granted),
            ("REDUCE", ready.max(granted), reduced),
            ("QUEUE", summed, falling),
            ("COPYD2H", falling.max(reduced), fallen),
            ("PCIE_REDUCE", ready.max(fallen), crossed),
            ("QUEUE", ready.max(fallen).max(crossed), posted),
            // Who contributes to another switch's part speaks to no server.
            ("SUM", if posted == 0 { crossed } else { 0 }, landing),
            ("PUSH", posted, sent),
            ("SUM", sent, landing),
            ("PULL", landing, landed),
            ("SUM", elsewhere, copying),
            ("QUEUE", landed, rising),
            ("COPYH2D", rising, risen),
            ("COORDINATE_BROADCAST", landed.max(risen), if landed > 0 { copying } else { 0 }),
            ("BROADCAST", copying.max(risen), copied),
            ("DONE", summed.max(landed).max(risen).max(copied), done),
        ]
    }
}

impl Part {
    fn write(
        &mut self,
        round: &Round,
        done: u64,
        whole: &str,
        rank: Rank,
        key: Key,
        pen: &mut Pen<'_>,
    ) {
        let about = About { key, round: round.number, bytes: round.bytes, rank };
        let mut times = round.times;
        times.settle();
        let mut end = self.end;
        let mut slice = |(stage, from, to): Stage| {
            let begin = from.max(end);
            if from > 0 && to >= begin {
                let name = format!("{whole}.{stage}");
                pen.slice(self.track, &name, (begin, to), about, Some(whole));
                end = to;
            }
        };
        if times.ready > 0 {
            times.stages_on_gpu(self.end, done).into_iter().for_each(&mut slice);
        } else {
            times.stages(self.end, done).into_iter().for_each(&mut slice);
        }
        if times.posted > 0 {
            pen.arrow(self.track, Arrow::Starts, times.posted, about);
        }
        if times.landed > 0 {
            pen.arrow(self.track, Arrow::Ends, times.landing, about);
        }
        self.end = done;
    }
}
