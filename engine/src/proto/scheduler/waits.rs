//! Who waits for whom: barriers, and the rounds that servers and owners report as stalled.
//!
//! Invariant: whatever waits longer than the report time has a line that names the ranks it waits
//! for.

use super::registry::Registry;
use crate::base::{Rank, milliseconds, word};
use crate::limits::BARRIERS_MAX;
use crate::proto::late::{
    CaughtUp, LATE_LINES_MAX, LATE_NAMES_MAX, LATE_RANKS_MAX, Late, LateKeys,
};
use crate::proto::messages::{STALLS_SHOWN_MAX, Stall, StalledKey};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Seconds from the beginning of a wait for nodes until it is told, and from then on; later ones
/// are as the last. Programs may take half a minute to start, and nobody need read of each second.
const REMINDERS: [u64; 5] = [2, 3, 5, 10, 30];
/// From the beginning of a wait until it is told, where programs run that waited before.
const SOON: Duration = Duration::from_secs(1);

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

    /// Of a wait that begins now, of nodes whose job has already stood still.
    pub(super) fn soon(now: Duration) -> Reminder {
        Reminder { next: now + SOON, told: 0 }
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
    /// Ranks that have joined: nobody waits for them.
    excused: BTreeSet<Rank>,
    /// Ranks that died, or that had left before this scheduler led: likewise, for good.
    gone: BTreeSet<Rank>,
    /// By rank: barriers that it will ask for again, and that the others have passed.
    behind: Vec<u64>,
    passed: u64,
}

impl Barriers {
    pub(super) fn new(ranks: u32) -> Barriers {
        let open = vec![VecDeque::new(); ranks as usize];
        Barriers { open, behind: vec![0; ranks as usize], ..Barriers::default() }
    }

    /// Those of ranks that have passed so many under another scheduler. A barrier that any of them
    /// has passed, all have come to. Ranks that had left have passed all of theirs, however many
    /// that were: the others may still wait for the answer.
    pub(super) fn again(ranks: u32, passed: &[(Rank, u64)], left: BTreeSet<Rank>) -> Barriers {
        let most = passed.iter().map(|(_, count)| *count).max().unwrap_or(0);
        let mut barriers = Barriers { passed: most, gone: left, ..Barriers::new(ranks) };
        for (rank, count) in passed {
            if let Some(behind) = barriers.behind.get_mut(rank.0 as usize) {
                *behind = most - count;
            }
        }
        barriers
    }

    /// A rank has come to its next barrier. Returns whom to tell that one is complete, or `None` if
    /// this rank has too many open.
    pub(super) fn arrive(
        &mut self,
        rank: Rank,
        request: u64,
        now: Duration,
    ) -> Option<Vec<(Rank, u64)>> {
        let at = rank.0 as usize;
        let mine = self.open.get_mut(at)?;
        if self.behind[at] > 0 {
            self.behind[at] -= 1;
            return Some(vec![(rank, request)]);
        }
        if mine.len() >= BARRIERS_MAX {
            return None;
        }
        mine.push_back((request, now));
        Some(self.pass())
    }

    /// Nobody waits for this rank from now on. Returns whom to tell that barriers are complete.
    pub(super) fn excuse(&mut self, rank: Rank) -> Vec<(Rank, u64)> {
        self.excused.insert(rank);
        self.pass_all()
    }

    /// A rank has died, and nobody waits for it. Returns as [`excuse`](Self::excuse) does.
    pub(super) fn lose(&mut self, rank: Rank) -> Vec<(Rank, u64)> {
        self.forget(rank);
        self.gone.insert(rank);
        self.pass_all()
    }

    fn pass_all(&mut self) -> Vec<(Rank, u64)> {
        let mut all = Vec::new();
        loop {
            let passed = self.pass();
            if passed.is_empty() {
                return all;
            }
            all.extend(passed);
        }
    }

    /// All ranks are waited for again.
    pub(super) fn expect_all(&mut self) {
        self.excused.clear();
    }

    /// Whom to tell that the oldest barrier is complete, if it is.
    fn pass(&mut self) -> Vec<(Rank, u64)> {
        let is_missing =
            |(rank, mine): (Rank, &VecDeque<_>)| mine.is_empty() && !self.is_excused(rank);
        if self.ranks().any(is_missing) {
            return Vec::new();
        }
        let fronts = (0..).map(Rank).zip(self.open.iter_mut().map(VecDeque::pop_front));
        let passed: Vec<(Rank, u64)> =
            fronts.filter_map(|(rank, front)| Some((rank, front?.0))).collect();
        self.passed += u64::from(!passed.is_empty());
        passed
    }

    fn is_excused(&self, rank: Rank) -> bool {
        self.excused.contains(&rank) || self.gone.contains(&rank)
    }

    fn ranks(&self) -> impl Iterator<Item = (Rank, &VecDeque<(u64, Duration)>)> {
        (0..).map(Rank).zip(&self.open)
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
        let (missing, arrived) = self
            .ranks()
            .filter(|(rank, mine)| !(mine.is_empty() && self.is_excused(*rank)))
            .partition::<Vec<_>, _>(|(_, mine)| mine.is_empty());
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

/// What a reporter last said.
#[derive(Debug)]
struct Report {
    /// The oldest of its rounds.
    keys: Vec<StalledKey>,
    /// All that wait, by the ranks that they wait for.
    late: Vec<LateKeys>,
    at: Duration,
}

/// What servers and owners say about stalls.
#[derive(Debug, Default)]
pub(super) struct Stalls {
    reports: BTreeMap<Reporter, Report>,
    /// Ranks that died: nobody waits for them, whatever was said before that was known.
    gone: BTreeSet<Rank>,
}

/// All that waits.
#[derive(Debug, Default)]
pub(super) struct Waits {
    /// A tensor each, the oldest first.
    pub(super) rounds: Vec<Stall>,
    barrier: Option<Stall>,
}

impl Waits {
    /// All of it, the oldest first.
    fn iter(&self) -> impl Iterator<Item = &Stall> {
        self.rounds.iter().chain(&self.barrier)
    }

    /// What waits for ranks that have left.
    pub(super) fn abandoned(&self) -> Vec<Stall> {
        let mut stalls: Vec<Stall> =
            self.iter().filter(|stall| !stall.left.is_empty()).cloned().collect();
        stalls.truncate(STALLS_SHOWN_MAX);
        stalls
    }

    /// What has waited longest, for people.
    pub(super) fn oldest(&self) -> Vec<Stall> {
        let mut stalls: Vec<Stall> = self.iter().cloned().collect();
        stalls.sort_by_key(|stall| std::cmp::Reverse(stall.waited_ms));
        stalls.truncate(STALLS_SHOWN_MAX);
        stalls
    }

    /// Those that something waits for, and how long.
    pub(super) fn late(&self) -> BTreeMap<Rank, Duration> {
        let mut late: BTreeMap<Rank, Duration> = BTreeMap::new();
        for stall in self.iter() {
            let waited = Duration::from_millis(stall.waited_ms);
            for rank in &stall.missing {
                let known = late.entry(*rank).or_default();
                *known = waited.max(*known);
            }
        }
        late
    }
}

impl StalledKey {
    /// Nobody waits for this rank. Says whether anybody is waited for.
    fn lose(&mut self, gone: &BTreeSet<Rank>) -> bool {
        self.missing.retain(|rank| !gone.contains(rank));
        self.left.retain(|rank| !gone.contains(rank));
        gone.is_empty() || !self.missing.is_empty()
    }
}

impl Stalls {
    /// A rank has died, and nobody waits for it.
    pub(super) fn lose(&mut self, rank: Rank) {
        self.gone.insert(rank);
        self.reports.remove(&Reporter::Owner(rank));
        for report in self.reports.values_mut() {
            report.keys.retain_mut(|key| key.lose(&self.gone));
            report.late.retain(|late| !self.gone.contains(&late.rank));
        }
        self.reports.retain(|_, report| !report.keys.is_empty());
    }

    /// A server is lost: what it has said of its keys is over.
    pub(super) fn lose_server(&mut self, server: u32) {
        self.reports.remove(&Reporter::Server(server));
    }

    /// The latest report of somebody. It replaces the one before.
    pub(super) fn report(
        &mut self,
        by: Reporter,
        mut keys: Vec<StalledKey>,
        mut late: Vec<LateKeys>,
        now: Duration,
    ) {
        keys.truncate(STALLS_SHOWN_MAX);
        keys.retain_mut(|key| key.lose(&self.gone));
        late.truncate(LATE_RANKS_MAX);
        if keys.is_empty() {
            self.reports.remove(&by);
        } else {
            self.reports.insert(by, Report { keys, late, at: now });
        }
    }

    /// Groups of which an owner says who is missing from a round: by the round's tensor and number,
    /// and the group.
    fn explained<'a>(&self, registry: &'a Registry) -> BTreeSet<(&'a str, u64, u32)> {
        let mut explained = BTreeSet::new();
        for (reporter, report) in &self.reports {
            let Reporter::Owner(owner) = reporter else { continue };
            let group = registry.groups().of_rank(*owner);
            let named = |key: &StalledKey| {
                Some((registry.name_of(key.key)?, registry.round_of(key.key, key.round), group))
            };
            explained.extend(report.keys.iter().filter_map(named));
        }
        explained
    }

    /// Of groups with more stalled rounds than an owner can describe, the ranks that it names.
    fn blamed(&self, registry: &Registry) -> BTreeMap<u32, BTreeSet<Rank>> {
        let mut blamed: BTreeMap<u32, BTreeSet<Rank>> = BTreeMap::new();
        for (reporter, report) in &self.reports {
            let Reporter::Owner(owner) = reporter else { continue };
            if report.keys.len() >= STALLS_SHOWN_MAX {
                let ranks = report.keys.iter().flat_map(|key| &key.missing);
                blamed.entry(registry.groups().of_rank(*owner)).or_default().extend(ranks);
            }
        }
        blamed
    }

    /// All stalls.
    pub(super) fn waits(
        &self,
        registry: &Registry,
        barriers: &Barriers,
        left: &BTreeSet<Rank>,
        report_after: Duration,
        now: Duration,
    ) -> Waits {
        let ranks = word(barriers.open.len());
        let (explained, blamed) = (self.explained(registry), self.blamed(registry));
        let mut by_name: BTreeMap<&str, Stall> = BTreeMap::new();
        for (reporter, report) in &self.reports {
            for key in &report.keys {
                // A key that no registry gave is a server's mistake, and nothing to tell people.
                let Some(name) = registry.name_of(key.key) else { continue };
                let age = milliseconds(now.saturating_sub(report.at));
                let round = registry.round_of(key.key, key.round);
                let waited_ms = key.waited_ms.saturating_add(age);
                let mut stall = as_stall((name, round), key, waited_ms, ranks);
                if matches!(reporter, Reporter::Server(_)) {
                    // Of a group whose owner has spoken, only those that it names are missing.
                    stall.missing.retain(|rank| {
                        let group = registry.groups().of_rank(*rank);
                        !explained.contains(&(name, round, group))
                            && blamed.get(&group).is_none_or(|blamed| blamed.contains(rank))
                    });
                }
                by_name.entry(name).and_modify(|known| merge(known, &stall)).or_insert(stall);
            }
        }
        let mut waits = Waits {
            rounds: by_name.into_values().collect(),
            barrier: barriers.stall(left, report_after, now),
        };
        for stall in waits.rounds.iter_mut().chain(&mut waits.barrier) {
            // A server may have seen the goodbye of one who is no true member of the job: the rank
            // itself must have said the same here.
            stall.left.retain(|rank| left.contains(rank));
        }
        for stall in &mut waits.rounds {
            let awaited = registry.members_of(&stall.name).iter(ranks);
            stall.arrived = awaited.filter(|rank| !stall.missing.contains(rank)).collect();
        }
        // The sort is stable: what has waited equally long stays in the order of names.
        waits.rounds.sort_by_key(|stall| std::cmp::Reverse(stall.waited_ms));
        waits
    }

    /// Lines for these late ranks: one for all that the same rounds wait for.
    pub(super) fn lines(&self, ranks: &[Rank], waits: &Waits, registry: &Registry) -> Vec<Late> {
        let mut lines: Vec<Late> = Vec::new();
        for &rank in ranks {
            let one = self.line(rank, waits, registry);
            let alike = |line: &&mut Late| {
                (line.tensors, line.or_more, line.barrier)
                    == (one.tensors, one.or_more, one.barrier)
                    && line.first == one.first
            };
            let full = lines.len() >= LATE_LINES_MAX;
            match lines.iter_mut().find(alike) {
                Some(line) => join(line, &one),
                None if full => {
                    let last = lines.last_mut().expect("it is full");
                    join(last, &one);
                    (last.tensors, last.or_more) = (last.tensors.min(one.tensors), true);
                }
                None => lines.push(one),
            }
        }
        lines
    }

    fn line(&self, rank: Rank, waits: &Waits, registry: &Registry) -> Late {
        let waits_for = |stall: &&Stall| stall.missing.binary_search(&rank).is_ok();
        let waiting = || waits.rounds.iter().filter(waits_for);
        let mut names: BTreeSet<&str> = waiting().map(|stall| stall.name.as_str()).collect();
        let (mut or_more, mut counted) = (false, false);
        for late in self.reports.values().flat_map(|report| &report.late) {
            if late.rank == rank {
                names.extend(late.keys.iter().filter_map(|key| registry.name_of(*key)));
                or_more |= late.more;
                counted = true;
            }
        }
        // A report lists the keys of so many ranks, and describes so many keys.
        or_more |= !counted && names.len() >= STALLS_SHOWN_MAX;
        let barrier = waits.barrier.as_ref().filter(waits_for);
        let oldest = waiting().chain(barrier).map(|stall| stall.waited_ms).max();
        let named = waiting().take(LATE_NAMES_MAX);
        Late {
            ranks: vec![rank],
            waited_ms: oldest.unwrap_or(0),
            tensors: names.len() as u64,
            or_more,
            barrier: barrier.is_some(),
            first: named.map(|stall| (stall.name.clone(), stall.round)).collect(),
        }
    }
}

fn join(line: &mut Late, other: &Late) {
    line.ranks.extend(&other.ranks);
    line.waited_ms = line.waited_ms.max(other.waited_ms);
}

/// One line for all ranks that have caught up.
pub(super) fn caught_up(over: &[(Rank, Duration)]) -> Option<CaughtUp> {
    let lasted = over.iter().map(|(_, lasted)| *lasted).max()?;
    let ranks = over.iter().map(|(rank, _)| *rank).collect();
    Some(CaughtUp { ranks, lasted_ms: milliseconds(lasted) })
}

fn as_stall((name, round): (&str, u64), key: &StalledKey, waited_ms: u64, ranks: u32) -> Stall {
    let known = |list: &[Rank]| -> Vec<Rank> {
        let set: BTreeSet<Rank> = list.iter().copied().filter(|rank| rank.0 < ranks).collect();
        set.into_iter().collect()
    };
    Stall {
        name: name.to_owned(),
        round,
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
