//! When people are told of ranks that others wait for: three times at short intervals, then after
//! pauses that double, and when it is over.
//!
//! Invariant: a rank that is late again and again, or late with thousands of tensors, costs as few
//! lines as one that is late once with one.

use crate::base::Rank;
use std::collections::BTreeMap;
use std::time::Duration;

/// From when a rank is known to be late until it is told: reports of several nodes come meanwhile,
/// so that the first line counts all that waits, and one line names all that are late.
const SETTLE: Duration = Duration::from_millis(750);
/// From the first line to the second, and from there to the third. A rank that can't reach a server
/// fails within 12 s; until then people are told at least this often that others wait for it.
const PAUSE: Duration = Duration::from_secs(4);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(640);

#[derive(Debug)]
struct Course {
    /// Since when the rank is late; `None` if it has caught up.
    since: Option<Duration>,
    /// Whether people know of it.
    told: bool,
    /// No line before this.
    next: Duration,
    /// The pause after the next line, if it is longer than the shortest.
    pause: Duration,
}

/// Every rank that is late, or was a short while ago.
#[derive(Debug, Default)]
pub(super) struct LateRanks {
    courses: BTreeMap<Rank, Course>,
}

/// What to tell now.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct News {
    /// Ranks that are late.
    pub(super) late: Vec<Rank>,
    /// Ranks that were told of and have caught up, and how long others waited for them.
    pub(super) over: Vec<(Rank, Duration)>,
}

impl LateRanks {
    /// A rank has died: it neither is late nor catches up.
    pub(super) fn lose(&mut self, rank: Rank) {
        self.courses.remove(&rank);
    }

    /// These ranks are late now, by so long; all others are not.
    pub(super) fn observe(&mut self, late: &BTreeMap<Rank, Duration>, now: Duration) -> News {
        for (&rank, &waited) in late {
            let course = self.courses.entry(rank).or_insert(Course {
                since: None,
                told: false,
                next: now,
                pause: PAUSE / 2,
            });
            if course.since.is_none() {
                course.since = Some(now.saturating_sub(waited));
                course.told = false;
                course.next = course.next.max(now + SETTLE);
            }
        }
        let mut news = News::default();
        for (&rank, course) in &mut self.courses {
            let Some(since) = course.since else { continue };
            if !late.contains_key(&rank) {
                course.since = None;
                if course.told {
                    news.over.push((rank, now.saturating_sub(since)));
                }
            } else if now >= course.next {
                course.told = true;
                course.next = now + course.pause.max(PAUSE);
                course.pause = (course.pause * 2).min(PAUSE_MAX);
                news.late.push(rank);
            }
        }
        // Whoever has been in time for long enough starts anew.
        self.courses.retain(|_, course| course.since.is_some() || now < course.next + course.pause);
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(250);

    /// Seconds at which rank 1 is told to be late, and to have caught up, while it is late whenever
    /// `is_late` says so.
    fn told(seconds: u32, is_late: impl Fn(f64) -> bool) -> (Vec<f64>, Vec<f64>) {
        let (mut ranks, mut told, mut over) = (LateRanks::default(), Vec::new(), Vec::new());
        for step in 0..seconds * 4 {
            let now = STEP * step;
            let at = now.as_secs_f64();
            let late = is_late(at).then_some((Rank(1), Duration::from_secs(3)));
            let news = ranks.observe(&late.into_iter().collect(), now);
            told.extend(news.late.iter().map(|_| at));
            over.extend(news.over.iter().map(|_| at));
        }
        (told, over)
    }

    #[test]
    fn pauses_double_while_a_rank_is_late() {
        let (told, over) = told(200, |at| (1.0..190.0).contains(&at));
        assert_eq!(told, [1.75, 5.75, 9.75, 17.75, 33.75, 65.75, 129.75]);
        assert_eq!(over, [190.0]);
    }

    #[test]
    fn a_rank_that_is_late_in_every_step_is_told_of_rarely() {
        // Late for four seconds of every eight, for an hour.
        let (often, over) = told(3600, |at| at % 8.0 >= 4.0);
        assert!(often.len() <= 14, "{often:?}");
        assert!(over.len() <= often.len(), "{over:?}");
        for pair in often.windows(2).skip(1) {
            assert!(pair[1] - pair[0] >= 8.0, "{often:?}");
        }
        // Late for less than it takes the reports of all nodes to arrive: not a word.
        assert_eq!(told(3600, |at| at % 8.0 < 0.5), (vec![], vec![]));
        // In time for a long while: the next time counts as the first.
        let (again, _) = told(400, |at| !(5.0..300.0).contains(&at));
        assert_eq!(again, [0.75, 4.75, 300.75, 304.75, 308.75, 316.75, 332.75, 364.75]);
    }

    #[test]
    fn the_end_says_how_long_it_lasted() {
        let mut ranks = LateRanks::default();
        let late = BTreeMap::from([(Rank(2), Duration::from_secs(3))]);
        let at = Duration::from_secs;
        assert_eq!(ranks.observe(&late, at(10)), News::default());
        assert_eq!(ranks.observe(&late, at(11)).late, [Rank(2)]);
        let news = ranks.observe(&BTreeMap::new(), at(14));
        assert_eq!(news, News { late: vec![], over: vec![(Rank(2), at(7))] });
        assert_eq!(ranks.observe(&BTreeMap::new(), at(15)), News::default());
    }
}
