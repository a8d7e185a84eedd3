//! Who waits for whom: barriers, and the rounds that servers and owners report as stalled.
//!
//! Invariant: whatever waits longer than the report time has a line that names the ranks it waits
//! for.

use super::registry::Registry;
use crate::base::Rank;
use crate::limits::BARRIERS_MAX;
use crate::proto::messages::{STALLS_MAX, Stall, StalledKey};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// How often a stall is said again while it lasts.
const REPEAT: Duration = Duration::from_secs(10);

/// Seconds from the beginning of a wait for nodes until it is told, and from then on; later ones
/// are as the last. Programs may take half a minute to start, and nobody need read of each second.
const REMINDERS: [u64; 5] = [2, 3, 5, 10, 30];

/// When a wait for nodes is told.
#[derive(Debug)]
pub(super) struct Reminder {
    next: Duration,
    told: usize,
}

impl Reminder {
    /// Of a wait that begins now.
    pub(super) fn new(now: Duration) -> Reminder {
        Reminder { next: now + Duration::from_secs(REMINDERS[0]), told: 0 }
    }

    /// Whether it is to be told now.
    pub(super) fn is_due(&mut self, now: Duration) -> bool {
        if now < self.next {
            return false;
        }
        self.told = (self.told + 1).min(REMINDERS.len() - 1);
        self.next = now + Duration::from_secs(REMINDERS[self.told]);
        true
    }
}

/// Barriers of one epoch: the n-th of a rank meets the n-th of every other.
#[derive(Debug, Default)]
pub(super) struct Barriers {
    /// By rank: request number and time of each open barrier, the oldest first.
    open: Vec<VecDeque<(u64, Duration)>>,
    passed: u64,
}

impl Barriers {
    pub(super) fn new(ranks: u32) -> Barriers {
        Barriers { open: vec![VecDeque::new(); ranks as usize], passed: 0 }
    }

    /// A rank has come to its next barrier. Returns whom to tell that one is complete, or `None` if
    /// this rank has too many open.
    pub(super) fn arrive(
        &mut self,
        rank: Rank,
        request: u64,
        now: Duration,
    ) -> Option<Vec<(Rank, u64)>> {
        let mine = self.open.get_mut(rank.0 as usize)?;
        if mine.len() >= BARRIERS_MAX {
            return None;
        }
        mine.push_back((request, now));
        if self.open.iter().any(VecDeque::is_empty) {
            return Some(Vec::new());
        }
        self.passed += 1;
        let fronts = self.open.iter_mut().map(VecDeque::pop_front);
        Some((0..).map(Rank).zip(fronts.flatten()).map(|(rank, (id, _))| (rank, id)).collect())
    }

    /// Forgets the open barriers of a rank that left.
    pub(super) fn forget(&mut self, rank: Rank) {
        if let Some(mine) = self.open.get_mut(rank.0 as usize) {
            mine.clear();
        }
    }

    /// The open barrier as a stall, if somebody has waited for so long.
    fn stall(&self, left: &BTreeSet<Rank>, longer_than: Duration, now: Duration) -> Option<Stall> {
        let since = self.open.iter().filter_map(|mine| mine.front()).map(|(_, at)| *at).min()?;
        let waited = now.saturating_sub(since);
        let (missing, arrived) =
            (0..).map(Rank).zip(&self.open).partition::<Vec<_>, _>(|(_, mine)| mine.is_empty());
        let ranks = |ranks: Vec<(Rank, _)>| ranks.into_iter().map(|(rank, _)| rank).collect();
        let missing: Vec<Rank> = ranks(missing);
        // A rank's messages come in order: one that has left has no barrier on its way.
        let left: Vec<Rank> = missing.iter().filter(|rank| left.contains(rank)).copied().collect();
        if waited < longer_than && left.is_empty() {
            return None;
        }
        Some(Stall {
            name: "barrier".to_owned(),
            round: self.passed + 1,
            waited_ms: milliseconds(waited),
            arrived: ranks(arrived),
            missing,
            left,
        })
    }
}

/// Who reports stalls.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Reporter {
    /// A rank, of the parts that it owns in its group: it knows which of the group have not pushed.
    Owner(Rank),
    /// A server: it knows which groups have not contributed, and names all of their ranks.
    Server(u32),
}

/// What the nodes were last told about stalls, and what servers and owners say.
#[derive(Debug, Default)]
pub(super) struct Stalls {
    reports: BTreeMap<Reporter, (Vec<StalledKey>, Duration)>,
    told: Vec<(String, u64, Vec<Rank>)>,
    told_at: Duration,
}

impl Stalls {
    /// The latest report of somebody. It replaces the one before.
    pub(super) fn report(&mut self, by: Reporter, mut keys: Vec<StalledKey>, now: Duration) {
        keys.truncate(STALLS_MAX);
        if keys.is_empty() {
            self.reports.remove(&by);
        } else {
            self.reports.insert(by, (keys, now));
        }
    }

    /// Groups of which an owner says who is missing from a round: by the round's tensor and number,
    /// and the group.
    fn explained<'a>(&self, registry: &'a Registry) -> BTreeSet<(&'a str, u64, u32)> {
        let mut explained = BTreeSet::new();
        for (reporter, (keys, _)) in &self.reports {
            let Reporter::Owner(owner) = reporter else { continue };
            let group = registry.groups().of_rank(*owner);
            let named = |key: &StalledKey| Some((registry.name_of(key.key)?, key.round, group));
            explained.extend(keys.iter().filter_map(named));
        }
        explained
    }

    /// All stalls, the oldest first.
    pub(super) fn merged(
        &self,
        registry: &Registry,
        barriers: &Barriers,
        left: &BTreeSet<Rank>,
        report_after: Duration,
        now: Duration,
    ) -> Vec<Stall> {
        let ranks = u32::try_from(barriers.open.len()).unwrap_or(u32::MAX);
        let explained = self.explained(registry);
        let mut by_name: BTreeMap<&str, Stall> = BTreeMap::new();
        for (reporter, (keys, at)) in &self.reports {
            for key in keys {
                // A key that no registry gave is a server's mistake, and nothing to tell people.
                let Some(name) = registry.name_of(key.key) else { continue };
                let age = milliseconds(now.saturating_sub(*at));
                let mut stall = as_stall(name, key, key.waited_ms.saturating_add(age), ranks);
                if matches!(reporter, Reporter::Server(_)) {
                    // Of a group whose owner has spoken, only those that it names are missing.
                    let group = |rank: &Rank| registry.groups().of_rank(*rank);
                    stall
                        .missing
                        .retain(|rank| !explained.contains(&(name, key.round, group(rank))));
                }
                by_name.entry(name).and_modify(|known| merge(known, &stall)).or_insert(stall);
            }
        }
        let mut stalls: Vec<Stall> = by_name.into_values().collect();
        stalls.extend(barriers.stall(left, report_after, now));
        for stall in &mut stalls {
            // A server may have seen the goodbye of one who is no true member of the job: the rank
            // itself must have said the same here.
            stall.left.retain(|rank| left.contains(rank));
            stall.arrived =
                (0..ranks).map(Rank).filter(|rank| !stall.missing.contains(rank)).collect();
        }
        stalls.sort_by(|a, b| b.waited_ms.cmp(&a.waited_ms).then_with(|| a.name.cmp(&b.name)));
        stalls.truncate(STALLS_MAX);
        stalls
    }

    /// Whether to tell the nodes: the set has changed, or has lasted a while. It then counts as
    /// told.
    pub(super) fn is_news(&mut self, stalls: &[Stall], now: Duration) -> bool {
        let mut set: Vec<_> = stalls
            .iter()
            .map(|stall| (stall.name.clone(), stall.round, stall.missing.clone()))
            .collect();
        set.sort();
        let lasts = !set.is_empty() && now.saturating_sub(self.told_at) >= REPEAT;
        if set == self.told && !lasts {
            return false;
        }
        self.told = set;
        self.told_at = now;
        true
    }
}

fn as_stall(name: &str, key: &StalledKey, waited_ms: u64, ranks: u32) -> Stall {
    let known = |list: &[Rank]| -> Vec<Rank> {
        let set: BTreeSet<Rank> = list.iter().copied().filter(|rank| rank.0 < ranks).collect();
        set.into_iter().collect()
    };
    Stall {
        name: name.to_owned(),
        round: key.round,
        waited_ms,
        arrived: Vec::new(),
        missing: known(&key.missing),
        left: known(&key.left),
    }
}

/// Parts of one tensor make one line: its earliest round, and whoever is missing from any part of
/// that.
fn merge(known: &mut Stall, other: &Stall) {
    if other.round < known.round {
        other.clone_into(known);
    } else if other.round == known.round {
        known.waited_ms = known.waited_ms.max(other.waited_ms);
        let union = |a: &[Rank], b: &[Rank]| -> Vec<Rank> {
            let all: BTreeSet<Rank> = a.iter().chain(b).copied().collect();
            all.into_iter().collect()
        };
        known.missing = union(&known.missing, &other.missing);
        known.left = union(&known.left, &other.left);
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
