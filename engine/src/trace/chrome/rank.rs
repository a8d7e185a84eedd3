//! What happened to the parts of a worker: a track for each tensor and one for each part.
//!
//! Names are BytePS's: `Comm.TENSOR` on the tensor's track, `Comm.TENSOR.STAGE` on a part's. All of
//! a round is written when its tensor is done, for only then is the order of its events settled.

use super::{About, Arrow, Event, Mark, Names, PartName, Pen, Track};
use crate::base::{Key, KeyMap, Rank};
use std::collections::HashMap;
use std::sync::Arc;

/// When the events of one part's round were; 0 for those that have not been.
#[derive(Clone, Copy, Default)]
struct Times {
    queued: u64,
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

/// One part's open round.
struct Part {
    name: PartName,
    track: Track,
    round: u64,
    bytes: u32,
    times: Times,
    /// End of the last slice on its track.
    end: u64,
}

#[derive(Default)]
struct Tensor {
    track: Option<Track>,
    /// Parts that have been queued since it was done last.
    open: Vec<Key>,
    end: u64,
}

pub(in crate::trace) struct RankFormatter {
    pid: u32,
    rank: Rank,
    names: Arc<Names>,
    parts: KeyMap<Part>,
    tensors: HashMap<Arc<str>, Tensor>,
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
        part.round = event.round;
        part.times = Times { queued: event.at_ns, ..Times::default() };
        part.bytes = event.bytes;
        if let Some(tensor) = self.tensors.get_mut(&part.name.tensor) {
            tensor.open.push(event.key);
        }
    }

    /// A part that was not seen before gets a track, below that of its tensor.
    fn add(&mut self, key: Key, pen: &mut Pen<'_>) {
        let name = self.names.find(key);
        if !self.tensors.contains_key(&name.tensor) {
            let track = self.new_track();
            pen.track(track, &name.tensor, "");
            let tensor = Tensor { track: Some(track), ..Tensor::default() };
            self.tensors.insert(Arc::clone(&name.tensor), tensor);
        }
        let track = self.new_track();
        let label = format!("{} part {} of {}", name.tensor, name.part + 1, name.parts);
        pen.track(track, &label, &format!(",\"key\":{}", key.0));
        let times = Times::default();
        let part = Part { name, track, round: 0, bytes: 0, times, end: 0 };
        self.parts.insert(key, part);
    }

    fn note(&mut self, event: &Event) {
        // Without its first event, which was lost, a round is not shown.
        let Some(part) = self.parts.get_mut(&event.key) else { return };
        if part.round != event.round {
            return;
        }
        let times = &mut part.times;
        match event.mark {
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
        for key in tensor.open.drain(..) {
            let Some(part) = self.parts.get_mut(&key) else { continue };
            if part.round != event.round {
                continue;
            }
            first = first.min(part.times.queued);
            bytes = bytes.saturating_add(part.bytes);
            part.write(event.at_ns, &whole, self.rank, key, pen);
        }
        let (Some(track), true) = (tensor.track, first != u64::MAX) else { return };
        let about = About { bytes, ..About::of(event) };
        // The next round may have been asked for while this one was under way.
        let from = first.max(tensor.end);
        pen.slice(track, &whole, (from, event.at_ns), about, Some(&whole));
        tensor.end = event.at_ns;
    }
}

impl Times {
    /// The stages of the round as (name, begin, end), in their order; a begin or an end of 0 is one
    /// that was not seen. What one thread sees of sending and receiving comes in any order: a stage
    /// ends at the latest where the next begins.
    fn stages(&self, free: u64, done: u64) -> [(&'static str, u64, u64); 9] {
        let Times { queued, granted, contributed, reduced, posted, .. } = *self;
        let Times { sent, landing, landed, copying, copied, .. } = *self;
        let first = |times: &[u64]| times.iter().copied().find(|at| *at > 0).unwrap_or(0);
        let until = |at: u64, next: u64| if next > 0 { at.min(next) } else { at };
        let (sent, contributed) = (until(sent, landing), until(contributed, copying));
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
}

impl Part {
    fn write(&mut self, done: u64, whole: &str, rank: Rank, key: Key, pen: &mut Pen<'_>) {
        let about = About { key, round: self.round, bytes: self.bytes, rank };
        for (stage, from, to) in self.times.stages(self.end, done) {
            if from > 0 && to >= from {
                let name = format!("{whole}.{stage}");
                pen.slice(self.track, &name, (from, to), about, Some(whole));
            }
        }
        if self.times.posted > 0 {
            pen.arrow(self.track, Arrow::Starts, self.times.posted, about);
        }
        if self.times.landed > 0 {
            pen.arrow(self.track, Arrow::Ends, self.times.landing, about);
        }
        self.end = done;
    }
}
