//! What happened on a server's core: a track for the additions, two for each rank (what comes from
//! it and what goes to it), and one for each key.

use super::{About, Arrow, Event, Mark, Pen, Track};
use crate::base::{KeyMap, Rank, word};
use std::collections::{HashMap, VecDeque};

/// Tracks of one core are numbered from a multiple of this.
const CORE_TRACKS: u32 = 10_000_000;
/// Within a core: the tracks of ranks, then those of keys.
const RANK_TRACKS: u32 = 1;
const KEY_TRACKS: u32 = 1_000_000;

/// The contribution that a rank's lane is taking.
#[derive(Default)]
struct Incoming {
    parked: u64,
    begun: u64,
    is_added: bool,
}

/// Publications on their way to a rank.
#[derive(Default)]
struct Outgoing {
    posted: VecDeque<Event>,
    end: u64,
}

struct Lane {
    from: Track,
    to: Track,
    incoming: Incoming,
    outgoing: Outgoing,
}

/// A key's open round, and the last one's publication.
struct KeyState {
    track: Track,
    opened: u64,
    round: u64,
    published: Option<Published>,
}

struct Published {
    about: About,
    from: u64,
    sent: u64,
}

pub(in crate::trace) struct CoreFormatter {
    pid: u32,
    core: u32,
    is_named: bool,
    piece: u64,
    lanes: HashMap<Rank, Lane>,
    keys: KeyMap<KeyState>,
}

impl CoreFormatter {
    pub(super) fn new(pid: u32, core: u32) -> CoreFormatter {
        let (lanes, keys) = (HashMap::new(), KeyMap::default());
        CoreFormatter { pid, core, is_named: false, piece: 0, lanes, keys }
    }

    fn track(&self, within: u32) -> Track {
        Track { pid: self.pid, tid: self.core * CORE_TRACKS + within }
    }

    pub(super) fn take(&mut self, event: Event, pen: &mut Pen<'_>) {
        if !self.is_named {
            self.is_named = true;
            let name = format!("core {}", self.core);
            pen.track(self.track(0), &name, "");
        }
        match event.mark {
            Mark::PieceBegins => self.piece = event.at_ns,
            Mark::PieceEnds if self.piece > 0 => {
                let span = (std::mem::take(&mut self.piece), event.at_ns);
                pen.slice(self.track(0), "add", span, About::of(&event), None);
            }
            Mark::Arrived | Mark::Summed => self.of_key(&event, pen),
            Mark::Sent => {
                if let Some(published) =
                    self.keys.get_mut(&event.key).and_then(|key| key.published.as_mut())
                    && published.about.round == event.round
                {
                    published.sent = event.at_ns;
                }
                self.of_lane(&event, pen);
            }
            _ => self.of_lane(&event, pen),
        }
    }

    fn of_key(&mut self, event: &Event, pen: &mut Pen<'_>) {
        if !self.keys.contains_key(&event.key) {
            let at = word(self.keys.len());
            let track = self.track(KEY_TRACKS + at % (CORE_TRACKS - KEY_TRACKS));
            let name = format!("core {} {}", self.core, event.key);
            pen.track(track, &name, &format!(",\"key\":{}", event.key.0));
            let state = KeyState { track, opened: 0, round: 0, published: None };
            self.keys.insert(event.key, state);
        }
        let Some(key) = self.keys.get_mut(&event.key) else { return };
        if event.mark == Mark::Arrived {
            if key.round != event.round {
                key.publish(event.at_ns, pen);
                (key.opened, key.round) = (event.at_ns, event.round);
            }
        } else if key.round == event.round && key.opened > 0 {
            let about = About::of(event);
            pen.slice(key.track, "sum", (key.opened, event.at_ns), about, None);
            key.published = Some(Published { about, from: event.at_ns, sent: 0 });
        }
    }

    fn of_lane(&mut self, event: &Event, pen: &mut Pen<'_>) {
        if !self.lanes.contains_key(&event.rank) {
            let at = RANK_TRACKS + event.rank.0 * 2;
            let (from, to) = (self.track(at), self.track(at + 1));
            pen.track(from, &format!("core {} from {}", self.core, event.rank), "");
            pen.track(to, &format!("core {} to {}", self.core, event.rank), "");
            let (incoming, outgoing) = (Incoming::default(), Outgoing::default());
            self.lanes.insert(event.rank, Lane { from, to, incoming, outgoing });
        }
        let Some(lane) = self.lanes.get_mut(&event.rank) else { return };
        let about = About::of(event);
        match event.mark {
            Mark::Parked => lane.incoming.parked = event.at_ns,
            Mark::Taken | Mark::Adding => {
                let parked = std::mem::take(&mut lane.incoming.parked);
                if parked > 0 {
                    pen.slice(lane.from, "parked", (parked, event.at_ns), about, None);
                }
                lane.incoming.begun = event.at_ns;
                lane.incoming.is_added = event.mark == Mark::Adding;
            }
            Mark::Ended => {
                let begun = std::mem::take(&mut lane.incoming.begun);
                if begun > 0 {
                    let name = if lane.incoming.is_added { "land and add" } else { "land" };
                    pen.slice(lane.from, name, (begun, event.at_ns), about, None);
                    pen.arrow(lane.from, Arrow::Passes, begun, about);
                }
            }
            Mark::Posted => lane.outgoing.posted.push_back(*event),
            Mark::Sent => {
                // In the order of posting; those before it whose end was lost are passed over.
                let queue = &mut lane.outgoing.posted;
                let same = |one: &Event| (one.key, one.round) == (event.key, event.round);
                let Some(at) = queue.iter().position(same) else { return };
                let Some(posted) = queue.drain(..=at).next_back() else { return };
                let about = About::of(&posted);
                // A lane sends one after the other: the next one's turn comes when this one is out.
                let from = posted.at_ns.max(lane.outgoing.end);
                pen.slice(lane.to, "publish", (from, event.at_ns), about, None);
                pen.arrow(lane.to, Arrow::Passes, from, about);
                lane.outgoing.end = event.at_ns;
            }
            _ => {}
        }
    }

    /// Writes what only the next round of a key would have closed.
    pub(super) fn end(&mut self, pen: &mut Pen<'_>) {
        for key in self.keys.values_mut() {
            key.publish(u64::MAX, pen);
        }
    }
}

impl KeyState {
    /// The publication of the last round is over when the next one begins, at the latest.
    fn publish(&mut self, before_ns: u64, pen: &mut Pen<'_>) {
        if let Some(published) = self.published.take()
            && published.sent > 0
        {
            let span = (published.from, published.sent.min(before_ns));
            pen.slice(self.track, "publish", span, published.about, None);
        }
    }
}
