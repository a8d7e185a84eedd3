//! A rank that has run out of data before others: it joins, and follows what they push.

use super::Job;
use super::control::Answers;
use crate::base::error::{Error, Overdue, Refusal};
use crate::base::lock;
use crate::base::types::Follow;
use bps_engine::proto::messages::NodeMessage;
use bps_engine::proto::uneven::{Pushes, UnevenReport};
use std::time::Duration;

impl Job {
    /// This rank has joined, and had pushed so much by then; `None` if it had joined before.
    pub(crate) fn join(&self, pushes: Option<Vec<Pushes>>) -> Result<(), Error> {
        let pushes = pushes.ok_or(Refusal::JoinedTwice)?;
        lock(&self.agent).hinder("ranks have joined");
        self.send(&NodeMessage::Uneven(UnevenReport::Joined { pushes }))
    }

    /// What a rank that has joined is told next; `None` if that takes longer than `timeout`.
    pub(crate) fn follow(&self, timeout: Duration) -> Result<Option<Follow>, Error> {
        self.answer(timeout, |answers: &mut Answers| answers.follows.pop_front())
    }

    /// This rank pushes, while another has joined.
    pub(crate) fn report(&self, pushes: Vec<Pushes>) {
        // If the scheduler can't be told, the job is over.
        let _ = self.send(&NodeMessage::Uneven(UnevenReport::Pushed { pushes }));
    }

    /// How often the root of a broadcast had pushed it when it joined; `None` if it has not joined.
    pub(crate) fn root_joined_after(&self, tensor: u32) -> Result<Option<u64>, Error> {
        let (request, message) = lock(&self.agent).ask_root(tensor);
        self.send(&message)?;
        let answer = self.answer(self.patience, |answers| answers.roots.remove(&request))?;
        answer.ok_or_else(|| Overdue::Root { waited: self.patience }.into())
    }
}
