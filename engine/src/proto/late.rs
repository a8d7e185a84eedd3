//! Late ranks: what nodes report of the rounds that wait for them, and the lines that people read.
//!
//! A rank that is late holds up every tensor of its step, so a report counts them and names a few.

use super::text::{list, seconds, shorten};
use crate::base::{Key, Rank};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Ranks of which one report of a node says which keys wait for them.
pub const LATE_RANKS_MAX: usize = 16;
/// Keys that one report of a node lists at most, over all ranks.
pub const LATE_KEYS_MAX: usize = 4096;
/// Lines of one message to people.
pub const LATE_LINES_MAX: usize = 16;
/// Rounds that one line names.
pub const LATE_NAMES_MAX: usize = 3;

/// The keys whose open rounds wait for a rank, as one node sees them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LateKeys {
    /// The rank.
    pub rank: Rank,
    /// The keys.
    pub keys: Vec<Key>,
    /// Whether there are more that were not listed.
    pub more: bool,
}

/// Collects keys by the rank that they wait for, within the bounds of a report.
#[derive(Default)]
pub struct LateCollector {
    by_rank: BTreeMap<Rank, (Vec<Key>, bool)>,
    count: usize,
}

impl LateCollector {
    /// The open round of this key waits for this rank.
    pub fn add(&mut self, rank: Rank, key: Key) {
        if self.by_rank.len() >= LATE_RANKS_MAX && !self.by_rank.contains_key(&rank) {
            return;
        }
        let (keys, more) = self.by_rank.entry(rank).or_default();
        if self.count >= LATE_KEYS_MAX {
            *more = true;
        } else {
            self.count += 1;
            keys.push(key);
        }
    }

    /// What another collector found.
    pub fn add_all(&mut self, late: &[LateKeys]) {
        for LateKeys { rank, keys, more } in late {
            for key in keys {
                self.add(*rank, *key);
            }
            if let Some((_, known)) = self.by_rank.get_mut(rank) {
                *known |= more;
            }
        }
    }

    /// The report. `more` says that keys were left out before they came here.
    #[must_use]
    pub fn finish(self, more: bool) -> Vec<LateKeys> {
        let one = |(rank, (keys, cut))| LateKeys { rank, keys, more: more || cut };
        self.by_rank.into_iter().map(one).collect()
    }
}

/// Ranks that others wait for with the same rounds, as people are told.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Late {
    /// In rising order.
    pub ranks: Vec<Rank>,
    /// Milliseconds since the first contribution to the oldest of these rounds.
    pub waited_ms: u64,
    /// Tensors whose open round waits for them.
    pub tensors: u64,
    /// Whether there may be more tensors than were counted.
    pub or_more: bool,
    /// Whether a barrier waits for them.
    pub barrier: bool,
    /// The tensors that have waited longest and their rounds: at most [`LATE_NAMES_MAX`].
    pub first: Vec<(String, u64)>,
}

/// Ranks that were late and are not any more, as people are told.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CaughtUp {
    /// In rising order.
    pub ranks: Vec<Rank>,
    /// Milliseconds for which others waited for the one that was late longest.
    pub lasted_ms: u64,
}

impl fmt::Display for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (is, it) = if self.ranks.len() == 1 { ("is", "it") } else { ("are", "them") };
        let late = Ranks(&self.ranks);
        write!(f, "{late} {is} late by {:.1} s: ", seconds(self.waited_ms))?;
        let barrier = if self.barrier { " and a barrier" } else { "" };
        let verb = if self.barrier { "wait" } else { "waits" };
        match (self.tensors, self.or_more, self.first.as_slice()) {
            (0, ..) | (_, _, []) => write!(f, "a barrier waits for {it}"),
            (1, false, [(name, round), ..]) => {
                write!(f, "round {round} of `{}`{barrier} {verb} for {it}", shorten(name))
            }
            (count, or_more, first) => {
                let least = if or_more { "at least " } else { "" };
                write!(f, "{least}{count} tensors{barrier} wait for {it} (")?;
                for (name, round) in first {
                    write!(f, "round {round} of `{}`, ", shorten(name))?;
                }
                f.write_str("…)")
            }
        }
    }
}

impl fmt::Display for CaughtUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (late, lasted) = (Ranks(&self.ranks), seconds(self.lasted_ms));
        match self.ranks.len() {
            1 => write!(f, "{late} is no longer late: others waited {lasted:.1} s for it"),
            _ => write!(f, "{late} are no longer late: others waited {lasted:.1} s for them"),
        }
    }
}

/// `rank 3`, `ranks 0-2, 5`.
struct Ranks<'a>(&'a [Rank]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [rank] => rank.fmt(f),
            ranks => write!(f, "ranks {}", list(ranks.iter().map(|Rank(rank)| *rank))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn late(ranks: &[u32], tensors: u64, names: &[&str]) -> Late {
        Late {
            ranks: ranks.iter().copied().map(Rank).collect(),
            waited_ms: 5040,
            tensors,
            or_more: false,
            barrier: false,
            first: names.iter().map(|name| ((*name).to_owned(), 812)).collect(),
        }
    }

    #[test]
    fn one_line_counts_the_tensors_and_names_a_few() {
        assert_eq!(
            late(&[3], 1, &["layer4.weight"]).to_string(),
            "rank 3 is late by 5.0 s: round 812 of `layer4.weight` waits for it"
        );
        assert_eq!(
            late(&[3], 1920, &["a", "b", "c"]).to_string(),
            "rank 3 is late by 5.0 s: 1920 tensors wait for it (round 812 of `a`, round 812 of \
             `b`, round 812 of `c`, …)"
        );
        let several = Late { or_more: true, barrier: true, ..late(&[1, 2, 3, 7], 16, &["a"]) };
        assert_eq!(
            several.to_string(),
            "ranks 1-3, 7 are late by 5.0 s: at least 16 tensors and a barrier wait for them \
             (round 812 of `a`, …)"
        );
        let both = Late { barrier: true, ..late(&[2], 1, &["a"]) };
        assert!(both.to_string().ends_with("round 812 of `a` and a barrier wait for it"), "{both}");
        let barrier = Late { barrier: true, ..late(&[2], 0, &[]) };
        assert_eq!(barrier.to_string(), "rank 2 is late by 5.0 s: a barrier waits for it");
        let over = |ranks: &[u32]| CaughtUp {
            ranks: ranks.iter().copied().map(Rank).collect(),
            lasted_ms: 12_400,
        };
        assert_eq!(over(&[1]).to_string(), "rank 1 is no longer late: others waited 12.4 s for it");
        assert!(over(&[1, 2]).to_string().starts_with("ranks 1, 2 are no longer late"));
    }

    #[test]
    fn a_report_is_bounded_and_says_so() {
        let mut collector = LateCollector::default();
        for key in 0..LATE_KEYS_MAX as u64 {
            collector.add(Rank(0), Key(key));
        }
        let exact = collector.finish(false);
        assert_eq!((exact[0].keys.len(), exact[0].more), (LATE_KEYS_MAX, false));
        let mut merged = LateCollector::default();
        merged.add_all(&exact);
        merged.add(Rank(0), Key(u64::MAX));
        for rank in 1..40 {
            merged.add(Rank(rank), Key(1));
        }
        let late = merged.finish(false);
        assert_eq!(late.len(), LATE_RANKS_MAX);
        assert!(late.iter().all(|one| one.more), "nothing fits any more");
        assert_eq!(late.iter().map(|one| one.keys.len()).sum::<usize>(), LATE_KEYS_MAX);
    }
}
