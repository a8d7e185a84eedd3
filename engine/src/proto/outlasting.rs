//! What servers and ranks of an elastic job alike remember for the scheduler that follows a lost
//! one, and how they come to follow that. What one of them alone remembers is its own.
//!
//! Invariant: no scheduler is followed whose term is over.

use super::absence::{Absence, Wanted};
use super::messages::{NodeMessage, Register, Roster};
use super::resume::Resume;
use crate::base::Rank;
use std::time::Duration;

/// See the [module](self).
#[derive(Clone, Debug)]
pub struct Outlasting {
    absence: Absence,
    /// Of the last scheduler that it followed.
    term: u32,
    /// Ranks that the epoch goes on without.
    gone: Vec<Rank>,
    /// Servers that it goes on without.
    lost: Vec<u32>,
    /// What was said of lost lanes.
    lanes: Vec<NodeMessage>,
}

impl Outlasting {
    /// Of a node that follows the scheduler of this term, and waits so long for another; 0: not at
    /// all.
    #[must_use]
    pub const fn new(wait: Duration, term: u32) -> Outlasting {
        Outlasting {
            absence: Absence::new(wait),
            term,
            gone: Vec::new(),
            lost: Vec::new(),
            lanes: Vec::new(),
        }
    }

    /// An epoch has begun, under the scheduler of this term.
    pub fn begin(&mut self, term: u32) {
        self.term = term;
        self.forget();
    }

    /// The epoch is over.
    pub fn forget(&mut self) {
        self.gone.clear();
        self.lost.clear();
        self.lanes.clear();
    }

    /// All ranks that the epoch goes on without.
    pub fn lose(&mut self, gone: &[Rank]) {
        gone.clone_into(&mut self.gone);
    }

    /// All servers that the epoch goes on without.
    pub fn lose_servers(&mut self, lost: &[u32]) {
        lost.clone_into(&mut self.lost);
    }

    /// A lane was lost, as `said` tells the scheduler. Nothing is kept where nobody is waited for.
    pub fn lose_lane(&mut self, said: &NodeMessage) {
        if self.is_waited_out() {
            self.lanes.push(said.clone());
        }
    }

    /// Whether the loss of the scheduler is to be waited out.
    #[must_use]
    pub fn is_waited_out(&self) -> bool {
        self.absence.is_waited_out()
    }

    /// Whether there is no scheduler now.
    #[must_use]
    pub fn is_away(&self) -> bool {
        self.absence.is_away()
    }

    /// The scheduler is lost: see [`Absence::begin`].
    pub fn wait_out(&mut self, how: &str, silent: Duration, now: Duration) -> Option<String> {
        self.absence.begin(how, silent, now)
    }

    /// What is to be done now: see [`Absence::look`].
    pub fn look(&mut self, scheduler: &str, now: Duration) -> Option<Wanted> {
        self.absence.look(scheduler, now)
    }

    /// An attempt to reach another scheduler has failed.
    pub fn failed(&mut self, now: Duration) {
        self.absence.failed(now);
    }

    /// The scheduler answers. Returns a line about it where it was silent.
    pub fn is_back(&mut self, scheduler: &str, now: Duration) -> Option<String> {
        let silent = self.absence.end(now)?;
        Some(format!("{scheduler} answers again after {:.1} s", silent.as_secs_f64()))
    }

    /// Another scheduler leads the job. Returns a line about it.
    ///
    /// # Errors
    /// A line about one of a term that is over, which is not followed.
    pub fn follow(&mut self, scheduler: &str, term: u32, now: Duration) -> Result<String, String> {
        if term < self.term {
            self.absence.failed(now);
            return Err(format!(
                "{scheduler} is of term {term}, which is over: term {} is followed",
                self.term
            ));
        }
        self.term = term;
        let silent = self.absence.end(now).unwrap_or_default();
        let seconds = silent.as_secs_f64();
        Ok(format!("{scheduler} leads the job again, in term {term}, after {seconds:.1} s"))
    }

    /// What another scheduler is told at first: who this node is, and what any node knows. The rest
    /// is as of a node that knows nothing else.
    #[must_use]
    pub fn resume(&self, register: Register, roster: Roster) -> Resume {
        Resume {
            register,
            term: self.term,
            roster,
            reset: None,
            gone: self.gone.clone(),
            lost: self.lost.clone(),
            left: Vec::new(),
            barriers: 0,
            tensors: 0,
            keys_end: 0,
            adopted: 0,
            obstacle: None,
        }
    }

    /// What is said again to a scheduler that is followed.
    #[must_use]
    pub fn lost_lanes(&self) -> &[NodeMessage] {
        &self.lanes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn lines_tell_the_whole_silence() {
        let mut one = Outlasting::new(ms(10_000), 1);
        assert_eq!(one.is_back("the scheduler", ms(4_000)), None);
        assert!(one.wait_out("silent", ms(1_200), ms(5_000)).is_some() && one.is_away());
        let line = one.is_back("the scheduler", ms(5_030));
        assert_eq!(line.as_deref(), Some("the scheduler answers again after 1.2 s"));
        one.wait_out("closed", ms(0), ms(9_000));
        let line = one.follow("the scheduler", 2, ms(9_500));
        assert_eq!(
            line.as_deref(),
            Ok("the scheduler leads the job again, in term 2, after 0.5 s")
        );
        assert!(!one.is_away());
    }

    #[test]
    fn a_term_that_is_over_is_not_followed_and_the_wait_goes_on() {
        let mut one = Outlasting::new(ms(10_000), 3);
        one.wait_out("closed", ms(0), ms(0));
        assert_eq!(one.look("it", ms(0)), Some(Wanted::Dial));
        let line = one.follow("it", 2, ms(10));
        assert_eq!(line, Err("it is of term 2, which is over: term 3 is followed".to_owned()));
        assert!(one.is_away());
        assert_eq!(one.look("it", ms(20)), None);
        assert_eq!(one.look("it", ms(30)), Some(Wanted::Dial));
        assert!(one.follow("it", 3, ms(40)).is_ok() && one.follow("it", 5, ms(40)).is_ok());
        assert!(one.follow("it", 4, ms(50)).is_err());
    }

    #[test]
    fn what_was_lost_is_told_until_the_epoch_is_over() {
        let said = NodeMessage::failed("a lane");
        let mut one = Outlasting::new(ms(10_000), 1);
        one.lose(&[Rank(2)]);
        one.lose_lane(&said);
        assert_eq!(one.lost_lanes().to_vec(), vec![said.clone()]);
        one.begin(4);
        assert_eq!(one.lost_lanes(), []);
        assert!(one.gone.is_empty() && one.follow("it", 3, ms(0)).is_err());
        let mut none = Outlasting::new(ms(0), 1);
        none.lose_lane(&said);
        assert!(none.lost_lanes().is_empty() && !none.is_waited_out());
    }
}
