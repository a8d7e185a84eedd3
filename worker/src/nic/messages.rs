//! What the lanes of a worker are told at start, and what they tell: reports, and what others read
//! of them.

#![forbid(unsafe_code)]

use crate::base::error::{Disagreement, Misfit, RoundSeen, Source};
use bps_engine::base::{Epoch, Key, Rank};
use bps_engine::config::AutoCompression;
use bps_engine::proto::messages::StalledKey;
use bps_engine::proto::moving::HeldKey;
use bps_engine::proto::paths::AwaitedKey;
use bps_engine::proto::tuning::TuneReport;
use bps_engine::team::Team;
use bps_engine::trace::counters::{Counter, Counters};
use bps_engine::transport::Cause;
use std::sync::Arc;
use std::time::Duration;

/// From the loop to the control thread.
#[derive(Debug)]
pub enum Report {
    /// A lane closed that should not have.
    Lost {
        /// Who is at its other end.
        peer: LanePeer,
        /// What was seen.
        cause: Cause,
        /// What this rank was at then.
        round: Option<RoundSeen>,
    },
    /// A frame that does not fit what was pushed.
    Corrupt {
        /// Who sent it.
        peer: LanePeer,
        /// What does not fit.
        misfit: Misfit,
    },
    /// Bytes that a checksum covers changed on their way between this rank and another node.
    Altered {
        /// Who is at the other end.
        peer: LanePeer,
        /// Whether it was this rank that sent them.
        sent: bool,
        /// The tensor's name, where the key is known.
        tensor: Option<String>,
        /// The part.
        key: Key,
        /// Its round.
        round: u64,
    },
    /// Ranks have pushed one round of a tensor with an optimizer for different things.
    Disagree(Box<Disagreement>),
    /// This rank itself can't go on.
    Failed {
        /// Why.
        source: Source,
    },
    /// Parts that were sent to a server and whose results do not come; empty once when none is
    /// awaited for long any more.
    Awaiting {
        /// The oldest first, at most [`PATH_KEYS_MAX`](bps_engine::proto::paths::PATH_KEYS_MAX).
        keys: Vec<AwaitedKey>,
    },
    /// How far this rank is with the keys of servers that are lost, whose lanes are closed.
    Held {
        /// How many servers are.
        lost: u32,
        /// Those of their keys that are nowhere.
        keys: Vec<HeldKey>,
    },
    /// How fast steps are, or which rounds are held, in a job that tunes itself.
    Tune(TuneReport),
    /// Rounds of parts that this rank owns in its group, that have waited too long for others of
    /// it; empty once when none does any more.
    Stalled {
        /// The oldest first, at most [`STALLS_MAX`](bps_engine::proto::messages::STALLS_MAX).
        keys: Vec<StalledKey>,
    },
}

/// Who is at the other end of a lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LanePeer {
    /// A core of the server with this index.
    Server(u32),
    /// Another rank of this rank's group.
    Rank(Rank),
}

/// Whom the lanes serve, and to whom they lead.
pub struct NicConfig {
    /// Which rank it serves.
    pub rank: Rank,
    /// Ranks in the job.
    pub size: u32,
    /// The membership.
    pub epoch: Epoch,
    /// Bytes that may be posted to all lanes together and not yet be taken by the kernel.
    pub credit_bytes: usize,
    /// The other ranks of the group that hold the same share of tensors on GPUs, each of the sum of
    /// its PCIe switch; none where the host has one switch.
    pub column: Vec<Rank>,
    /// A round that others of the group have pushed, or not, for longer than this is reported.
    pub stall_report: Duration,
    /// Whether this rank tells how fast steps are, for a job that tunes itself.
    pub paces: bool,
    /// Whether others may go on for a server that is lost, for which parts keep their results.
    pub keeps: bool,
    /// How far parts are encoded that need not be.
    pub auto: AutoCompression,
    /// Adds the contributions of ranks of the host.
    pub team: Team,
}

/// What the other threads read of a loop.
#[derive(Default)]
pub struct NicStatistics {
    /// Bytes of finished tensors.
    pub bytes: Counter,
    /// What passes the lanes, and where the loop's time goes.
    pub counters: Arc<Counters>,
}
