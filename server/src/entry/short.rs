//! A key whose rounds do not wait for the slowest ranks. Once all but so many have contributed, its
//! round waits a little longer and is closed. Who comes later is answered with the result of its
//! round, which is kept until all have asked for it, and so has the same bytes as everybody.
//!
//! How long the little is: `m + 3 · 1.4826 · d`, but from `t / 64` to `t / 16`, where `m` is the
//! median of how late the last few late contributions were, `d` their median absolute deviation
//! from it (Leys et al. 2013, "Detecting outliers"), and `t` the median of the last few times from
//! one round to the next. A rank that stays behind makes up for the wait in each round, since it
//! never waits itself. That rounds are closed without the slowest is Chen et al. 2016, "Revisiting
//! distributed synchronous SGD".
//!
//! Knows no clock: who calls says what time it is. Where results are kept is for
//! [`shrinking`](super::shrinking) to know.

#![forbid(unsafe_code)]

use super::encoded::Encoded;
use super::told::Told;
use super::{Entry, Groups, own_bytes};
use bps_engine::base::Rank;
use bps_engine::limits::{ALIGNMENT, BACKUP_RANKS_MAX};
use bps_engine::proto::backup::Backup;
use bps_engine::proto::messages::KeySpec;
use bps_engine::proto::store::Store;
use std::time::Duration;

/// Times that medians are taken of, at most.
const SAMPLES: usize = 9;
/// Of times between rounds: before there are as many, rounds wait for all.
const SAMPLES_MIN: usize = 3;
/// Parts of the time between rounds that a round waits longer, at most and at least.
const SHARE_MOST: u32 = 16;
const SHARE_LEAST: u32 = 64;
/// Three standard deviations of what is normally distributed, in median absolute deviations.
const DEVIATIONS: f64 = 3.0 * 1.4826;

/// The last few of some times.
#[derive(Default)]
struct Times {
    last: [Duration; SAMPLES],
    count: usize,
}

impl Times {
    fn add(&mut self, time: Duration) {
        self.last[self.count % SAMPLES] = time;
        self.count += 1;
    }

    /// Their median, and the median of how far they are from it.
    fn median(&self, least: usize) -> Option<(Duration, Duration)> {
        let count = self.count.min(SAMPLES);
        let mut times = self.last;
        let times = times.get_mut(..count).filter(|_| count >= least.max(1))?;
        times.sort_unstable();
        let median = times[count / 2];
        times.iter_mut().for_each(|time| *time = time.abs_diff(median));
        times.sort_unstable();
        Some((median, times[count / 2]))
    }
}

/// The number of a place for a result that is kept.
pub type KeptPlace = usize;

/// A result that is kept for ranks that are late.
#[derive(Clone, Copy, Default)]
pub struct Kept {
    /// Its round.
    pub round: u64,
    /// Its bytes.
    pub length: usize,
    /// Their CRC-32C, if that was taken.
    pub checksum: Option<u32>,
    /// Contributions that it holds.
    pub contributors: u32,
    /// The ranks that it lacks, as headers have them.
    pub missing: u64,
    /// Ranks that have not asked for it.
    pub(super) absent: u64,
    /// Publications of it that are on their way.
    pub(super) reading: u32,
    /// When there were enough contributions, and when its round was closed.
    pub(super) at: (Duration, Duration),
}

impl Kept {
    fn is_free(&self) -> bool {
        self.absent == 0 && self.reading == 0
    }
}

/// What the open round waits for.
#[derive(Clone, Copy, Default)]
enum Waiting {
    /// More contributions.
    #[default]
    More,
    /// There are enough, so many since then; it is closed at that time if there is one.
    Late { since: Duration, count: u32, until: Option<Duration> },
    /// That time has come.
    Nobody { since: Duration, count: u32 },
}

/// See the [module](self).
pub(super) struct Short {
    backup: Backup,
    /// Where the first result is kept, and bytes from one to the next.
    at: usize,
    room: usize,
    /// By rank: the last round to which it has contributed, or begun to.
    taken: Box<[u64]>,
    kept: Box<[Kept]>,
    waiting: Waiting,
    late: Times,
    between: Times,
    closed_at: Option<Duration>,
}

/// A bit for each of these ranks.
pub(super) fn bits(ranks: impl Iterator<Item = Rank>) -> u64 {
    ranks.fold(0, |bits, rank| bits | 1 << rank.0)
}

impl Short {
    /// If rounds of such a key may be short.
    pub(super) fn of(spec: &KeySpec) -> Option<Short> {
        let backup = spec.store.and_then(Store::backup)?;
        let plain = spec.bytes as usize;
        let longest = Encoded::of(spec).map_or(plain, |encoded| encoded.room());
        Some(Short {
            backup,
            at: own_bytes(spec, true).next_multiple_of(ALIGNMENT),
            room: longest.next_multiple_of(ALIGNMENT),
            taken: Box::default(),
            kept: Box::default(),
            waiting: Waiting::More,
            late: Times::default(),
            between: Times::default(),
            closed_at: None,
        })
    }

    /// The same for these ranks, which have had so many rounds.
    pub(super) fn among(self, groups: &Groups, rounds: u64) -> Short {
        let last = groups.iter().last().map_or(0, |rank| rank.0);
        assert!(last < BACKUP_RANKS_MAX, "all ranks have a bit");
        let kept = vec![Kept::default(); self.backup.behind as usize].into();
        Short { taken: vec![rounds; last as usize + 1].into(), kept, ..self }
    }

    pub(super) fn backup(&self) -> Backup {
        self.backup
    }

    /// Bytes of memory that such a key needs.
    pub(super) fn bytes(&self) -> usize {
        self.at + self.room * self.backup.behind as usize
    }

    /// Where in its memory a result is kept.
    pub(super) fn place_at(&self, place: KeptPlace) -> usize {
        self.at + self.room * place
    }

    fn place_of(&self, round: u64) -> KeptPlace {
        usize::try_from(round % u64::from(self.backup.behind)).expect("a few places")
    }

    pub(super) fn open_round(&self, rank: Rank) -> u64 {
        self.taken[rank.0 as usize] + 1
    }

    /// A contribution of this rank to its open round begins.
    pub(super) fn take(&mut self, rank: Rank) {
        self.taken[rank.0 as usize] += 1;
    }

    /// Whether somebody has not had all results.
    pub(super) fn keeps(&self) -> bool {
        !self.kept.iter().all(Kept::is_free)
    }

    /// Nobody waits any more for ranks that have died.
    pub(super) fn lose(&mut self, groups: &Groups) {
        let gone = bits(groups.gone().iter().map(|(_, rank)| *rank));
        self.kept.iter_mut().for_each(|kept| kept.absent &= !gone);
    }

    /// The open round is closed.
    pub(super) fn close(&mut self) {
        self.waiting = Waiting::More;
    }

    /// How long a round that has enough contributions waits for more; for ever if that can't be
    /// said yet.
    fn patience(&self) -> Option<Duration> {
        let (between, _) = self.between.median(SAMPLES_MIN)?;
        let (least, most) = (between / SHARE_LEAST, between / SHARE_MOST);
        let Some((late, deviation)) = self.late.median(1) else { return Some(most) };
        Some((late + deviation.mul_f64(DEVIATIONS)).clamp(least, most))
    }
}

impl Entry {
    /// Whether a contribution to this round comes when it is closed.
    #[must_use]
    pub fn is_late(&self, round: u64) -> bool {
        self.short.is_some() && round <= self.round
    }

    /// Contributions of ranks that live to the open round, and how many live.
    fn living(&self) -> (u32, u32) {
        let Some(open) = &self.open else { return (0, 0) };
        let living = self.groups.iter().filter(|&rank| !self.groups.is_gone(rank));
        living.fold((0, 0), |(complete, all), rank| {
            (complete + u32::from(open.is_complete(self.groups.of(rank))), all + 1)
        })
    }

    /// Whether the open round has all contributions, or enough of them and nobody is waited for:
    /// what has begun to arrive is, and so is a rank that is too far behind.
    pub(super) fn is_enough(&self) -> bool {
        let Some(short) = self.short.as_ref().filter(|_| self.open.is_some() && self.free()) else {
            return false;
        };
        let (complete, living) = self.living();
        let is_due = matches!(short.waiting, Waiting::Nobody { .. }) && self.waiting.is_none();
        let may_miss = is_due && short.kept[short.place_of(self.round + 1)].is_free();
        let least = if may_miss { self.least(living) } else { living };
        living > 0 && complete >= least
    }

    /// How many of so many ranks have to contribute.
    fn least(&self, living: u32) -> u32 {
        let workers = self.short.as_ref().map_or(0, |short| short.backup.workers);
        living.saturating_sub(workers).max(1)
    }

    /// Sees who has contributed to the open round by now. Once these are enough: when it is to be
    /// [closed](Self::expire) without the others.
    pub fn see(&mut self, now: Duration) -> Option<Duration> {
        let (complete, living) = self.short.is_some().then(|| self.living())?;
        let least = self.least(living);
        let short = self.short.as_mut()?;
        match &mut short.waiting {
            Waiting::More if living > 0 && complete >= least => {
                let until = short.patience().map(|patience| now + patience);
                short.waiting = Waiting::Late { since: now, count: complete, until };
                until.filter(|_| complete < living)
            }
            Waiting::More => None,
            Waiting::Late { since, count, .. } | Waiting::Nobody { since, count } => {
                if complete > *count {
                    *count = complete;
                    short.late.add(now.saturating_sub(*since));
                }
                None
            }
        }
    }

    /// The open round waits for no more contributions, if it is time.
    pub fn expire(&mut self, now: Duration) {
        let Some(short) = &mut self.short else { return };
        if let Waiting::Late { since, count, until: Some(until) } = short.waiting
            && until <= now
        {
            short.waiting = Waiting::Nobody { since, count };
        }
    }

    /// The open round, which is closed, has been made a result of so many bytes. Returns where that
    /// is to be kept, if somebody lacks it, and how long the round has waited for late ranks.
    pub(super) fn keep(&mut self, now: Duration, length: usize) -> (Option<KeptPlace>, Duration) {
        let (Some(short), Some(open)) = (&mut self.short, &self.open) else {
            return (None, Duration::ZERO);
        };
        if let Some(before) = short.closed_at.replace(now) {
            short.between.add(now.saturating_sub(before));
        }
        let since = match short.waiting {
            Waiting::More => now,
            Waiting::Late { since, .. } | Waiting::Nobody { since, .. } => since,
        };
        let is_absent =
            |rank: &Rank| !self.groups.is_gone(*rank) && !open.is_complete(self.groups.of(*rank));
        let absent = bits(self.groups.iter().filter(is_absent));
        let round = self.round + 1;
        let place = short.place_of(round);
        if absent != 0 {
            let kept = &mut short.kept[place];
            assert!(kept.is_free(), "{}: a result is kept until all have it", self.key);
            let missing = match self.result {
                Told::Some { missing, .. } => missing,
                _ => 0,
            };
            *kept = Kept {
                round,
                length,
                checksum: self.checksum,
                contributors: self.result.contributors(),
                missing,
                absent,
                reading: 0,
                at: (since, now),
            };
        }
        ((absent != 0).then_some(place), now.saturating_sub(since))
    }

    /// A contribution of this rank to a round that is closed begins: it counts nowhere.
    pub fn come_late(&mut self, rank: Rank) {
        self.short.as_mut().expect("rounds are closed without it").take(rank);
    }

    /// It has come whole. Returns where the result is kept that it is to get, and if it was the
    /// last of its round, how long the others would have waited for it.
    ///
    /// # Panics
    /// It has not, or not to this round.
    pub fn answer_late(
        &mut self,
        rank: Rank,
        round: u64,
        now: Duration,
    ) -> (KeptPlace, Option<Duration>) {
        let short = self.short.as_mut().expect("rounds are closed without it");
        let place = short.place_of(round);
        let kept = &mut short.kept[place];
        let is_absent = kept.round == round && kept.absent >> rank.0 & 1 == 1;
        assert!(is_absent, "{}: what a rank lacks is kept for it", self.key);
        kept.absent &= !(1 << rank.0);
        kept.reading += 1;
        let (since, closed) = kept.at;
        short.late.add(now.saturating_sub(since));
        (place, (kept.absent == 0).then(|| now.saturating_sub(closed)))
    }

    /// What is kept in a place.
    ///
    /// # Panics
    /// The key keeps nothing.
    #[must_use]
    pub fn kept(&self, place: KeptPlace) -> &Kept {
        &self.short.as_ref().expect("results are kept").kept[place]
    }

    /// One publication of what is kept there is no longer read.
    ///
    /// # Panics
    /// There was none.
    pub fn kept_sent(&mut self, place: KeptPlace) {
        let kept = &mut self.short.as_mut().expect("results are kept").kept[place];
        kept.reading = kept.reading.checked_sub(1).expect("it was being read");
    }
}
