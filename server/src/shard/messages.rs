//! What a shard and its control thread tell each other, and why a shard refuses a frame.

#![forbid(unsafe_code)]

use super::Shard;
use crate::entry::Groups;
use bps_engine::base::{Epoch, Key, Rank, Round};
use bps_engine::encode::Malformed;
use bps_engine::limits::GRANTS_MAX;
use bps_engine::optimize::Act;
use bps_engine::proto::late::LateKeys;
use bps_engine::proto::messages::{KeySpec, RetiredKey, StalledKey};
use bps_engine::proto::moving::Adopted;
use bps_engine::proto::paths::KeyState;
use bps_engine::trace::timeline::Recorder;
use bps_engine::transport::{Cause, Link};
use bps_engine::wire::{Invalid, Kind};
use std::sync::Arc;

/// From the control thread to a shard.
pub enum Command {
    /// A worker's lane, authenticated.
    Attach {
        /// The connection.
        link: Link,
        /// Who is at its other end.
        rank: Rank,
        /// The membership that it belongs to.
        epoch: Epoch,
    },
    /// Keys that will come. Answered by [`Report::Installed`] or [`Report::Failed`].
    Install {
        /// Returned in the answer.
        request: u64,
        /// All of this shard.
        keys: Vec<KeySpec>,
    },
    /// Keys of a server that is lost. Answered as `Install` is.
    Adopt {
        /// Returned in the answer.
        request: u64,
        /// All of this shard.
        keys: Vec<Adopted>,
    },
    /// Keys that no rank pushes any more after their last rounds: forget them then.
    Retire {
        /// All of this shard.
        keys: Vec<RetiredKey>,
    },
    /// A membership begins: forget all keys, expect these ranks. Answered by [`Report::Begun`].
    Begin {
        /// The membership.
        epoch: Epoch,
        /// Its ranks.
        groups: Arc<Groups>,
    },
    /// These ranks of the membership have died, in this order, and rounds go on without them.
    Shrink {
        /// All of them so far.
        gone: Arc<[Rank]>,
    },
    /// How far are these keys? Answered by [`Report::KeyStates`] for those of this shard, if any.
    Inquire {
        /// Some of the server.
        keys: Arc<[Key]>,
    },
    /// Record a timeline with this from now on; a recorder that is off ends it.
    Trace(Recorder),
    /// End the loop.
    Stop,
}

/// From a shard to the control thread.
#[derive(Debug)]
pub enum Report {
    /// The keys of this request are in place.
    Installed {
        /// From [`Command::Install`].
        request: u64,
    },
    /// All that comes from now on is of this membership.
    Begun {
        /// From [`Command::Begin`].
        epoch: Epoch,
    },
    /// A command could not be carried out.
    Failed {
        /// What, and what to do.
        message: String,
    },
    /// A lane was not taken; it is closed.
    TurnedAway {
        /// Whose, and why.
        message: String,
    },
    /// A lane is gone.
    Closed {
        /// Whose it was.
        rank: Rank,
        /// Why.
        cause: Cause,
        /// The worker had said goodbye, or belongs to an earlier membership.
        expected: bool,
        /// The worker had said goodbye for good.
        left: bool,
    },
    /// A frame was refused and its lane closed.
    Refused {
        /// Who sent it.
        rank: Rank,
        /// Why.
        why: Refusal,
    },
    /// Results that some ranks had of a lost server are here, and go to the others.
    Restored {
        /// Of these keys.
        keys: Vec<Key>,
    },
    /// How far the keys are that were asked for.
    KeyStates {
        /// Those of this shard.
        keys: Vec<KeyState>,
    },
    /// Rounds that have waited too long; empty once when none does any more.
    Stalled {
        /// The oldest first, at most
        /// [`STALLS_SHOWN_MAX`](bps_engine::proto::messages::STALLS_SHOWN_MAX).
        keys: Vec<StalledKey>,
        /// All open rounds that wait for the ranks that these keys wait for, within bounds.
        late: Vec<LateKeys>,
    },
}

/// Why a frame is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// The header itself.
    #[error("{0}")]
    Header(#[from] Invalid),
    /// Workers send contributions and goodbyes.
    #[error("a worker does not send {0:?}")]
    Kind(Kind),
    /// The lane was authenticated for another rank or epoch.
    #[error(
        "the lane belongs to {lane_rank} of epoch {}, the frame says {rank} of epoch {}",
        .lane_epoch.0,
        .epoch.0
    )]
    Sender {
        /// Whose lane it is.
        lane_rank: Rank,
        /// The lane's membership.
        lane_epoch: Epoch,
        /// What the frame says.
        rank: Rank,
        /// What the frame says.
        epoch: Epoch,
    },
    /// No such key on this core.
    #[error("{0} is not on this core: it was not declared, or is placed elsewhere")]
    Key(Key),
    /// Type, offset, length or contributors are not what the registry says.
    #[error("{key}: the frame does not have the declared type, offset, length or contributors")]
    Shape {
        /// The part.
        key: Key,
    },
    /// The tensor is for other ranks.
    #[error("{key} is a part of a tensor for a set of ranks, and {rank} is none of them")]
    Outside {
        /// The part.
        key: Key,
        /// Who contributes.
        rank: Rank,
    },
    /// The rank has contributed to this round, or the round is not open.
    #[error("{key}: round {} is not open for this rank (the open one is {open})", .round.0)]
    Round {
        /// The part.
        key: Key,
        /// What the frame says.
        round: Round,
        /// The open round.
        open: u64,
    },
    /// The tensor has no optimizer, or one that has no such round, or nothing to step from.
    #[error(
        "{key}: {act} is not what its optimizer can do now, if it has one: its parameters are set \
         first, once in an epoch"
    )]
    Act {
        /// The part.
        key: Key,
        /// What the round was to be for.
        act: Act,
    },
    /// Another rank has said that the round is for something else.
    #[error("{key}, round {}: it is to be {act}, and {by} pushed {said}", .round.0)]
    OtherAct {
        /// The part.
        key: Key,
        /// The round.
        round: Round,
        /// What the frame says.
        act: Act,
        /// What was said before.
        said: Act,
        /// Who said that.
        by: Rank,
    },
    /// More places for answers are open than a lane may have.
    #[error("more than {GRANTS_MAX} places for answers are open on one lane")]
    Grants,
    /// The payload is not what the tensor's codec makes.
    #[error("{key}, round {}: its payload is no encoding of the part: {why}", .round.0)]
    Encoding {
        /// The part.
        key: Key,
        /// The round.
        round: Round,
        /// What is wrong.
        why: Malformed,
    },
    /// The payload's bytes are not those that were sent.
    #[error(
        "{key}, round {}: its payload checksum differs, so bytes changed on the way here: the \
         round is not published; look for errors of the network devices and memories on that path",
        .round.0
    )]
    Payload {
        /// The part.
        key: Key,
        /// The round.
        round: Round,
    },
}

impl Shard {
    pub(super) fn report(&mut self, report: Report) {
        self.backlog.push_back(report);
    }

    /// Tells of keys that were restored in this turn.
    pub(super) fn tell_restored(&mut self) {
        if !self.restored.is_empty() {
            let keys = std::mem::take(&mut self.restored);
            self.report(Report::Restored { keys });
        }
    }

    /// The ring to the control thread may be full: nothing is lost, and nothing waits for it.
    pub(super) fn send_backlog(&mut self) {
        while let Some(report) = self.backlog.pop_front() {
            if let Err((_, report)) = self.reports.push((self.core, report)) {
                self.backlog.push_front(report);
                break;
            }
            self.report_waker.wake();
        }
    }
}
