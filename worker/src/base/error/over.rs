//! Why a job is over for this worker.

use super::{Misfit, Source};
use bps_engine::base::{Key, Rank};
use bps_engine::control::LinkError;
use bps_engine::optimize::Act;
use bps_engine::proto::absence::SchedulerAway;
use bps_engine::proto::messages::{Origin, OverReason, RoundOf};
use bps_engine::proto::pulse::SchedulerSilent;
use bps_engine::proto::text::shorten;
use bps_engine::transport::Cause;
use std::fmt;
use std::sync::Arc;

/// A node of the job, or the path to it, is gone.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeerDied {
    /// Who, and how that was noticed.
    pub death: Death,
    /// What this rank was at then.
    pub at: Option<RoundSeen>,
}

/// Who is gone, and how that was noticed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Death {
    /// The scheduler says so.
    #[error("{0}")]
    Verdict(Arc<OverReason>),
    /// The scheduler answers no heartbeat.
    #[error(transparent)]
    SchedulerSilent(SchedulerSilent),
    /// The connection to the scheduler failed.
    #[error("{}", lost(scheduler, source))]
    SchedulerLost {
        /// The scheduler as people know it, with its address.
        scheduler: String,
        /// What was seen.
        source: Source,
    },
    /// The scheduler is lost, and no other has taken over in time.
    #[error(transparent)]
    SchedulerAway(SchedulerAway),
    /// A request could not be sent to the scheduler.
    #[error("the scheduler can't be reached: {source}")]
    SchedulerUnreachable {
        /// Why.
        source: Source,
    },
    /// A lane was lost, and the scheduler has not said in time what became of its other end.
    #[error("the lane to {peer} was lost{}: {cause}", in_brackets(at.as_ref()))]
    LaneLost {
        /// Who is at its other end.
        peer: Origin,
        /// What was seen.
        cause: Cause,
        /// What this rank was at then.
        at: Option<RoundSeen>,
    },
    /// The root of a broadcast has died, in a job that goes on without it.
    #[error(
        "{root} died, from which {of} was to come: nobody else has its bytes, so broadcast from \
         another rank; the job goes on"
    )]
    RootLost {
        /// The rank.
        root: Rank,
        /// What it was to give.
        of: RoundOf,
    },
    /// What a node sent does not follow the protocol.
    #[error("{peer} sent what can't be right: {misfit}")]
    Nonsense {
        /// The node.
        peer: Origin,
        /// What does not fit.
        misfit: Misfit,
    },
}

/// The round that tells how far a rank had come.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RoundSeen {
    /// The tensor and the round.
    pub of: RoundOf,
    /// Whether it was open; else it was the last one that was over.
    pub is_open: bool,
}

/// Bytes are not those that were sent.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Corruption {
    /// Those of a message of the scheduler.
    #[error(transparent)]
    Control(Source),
    /// Those of a tensor.
    #[error(
        "the payload of `{}` ({key}, round {round}) changed on its way from {from} to {to}: its \
         CRC-32C differs: nothing was made of it; look for errors of the network devices and \
         memories on that path",
        tensor.as_deref().map_or_else(|| "a tensor".to_owned(), shorten)
    )]
    Payload {
        /// Who sent them.
        from: Origin,
        /// Who received them.
        to: Origin,
        /// The tensor's name, where the key is known.
        tensor: Option<String>,
        /// The part.
        key: Key,
        /// Its round.
        round: u64,
    },
}

/// Ranks have pushed one round of a tensor with an optimizer for different things.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "tensor `{}`, round {}: {} pushed it for {}, {} for {}: let all ranks step at the same \
     learning rates, and read or load the servers' state together",
    shorten(&at.tensor), at.round, first.0, first.1, second.0, second.1
)]
pub struct Disagreement {
    /// The tensor and the round.
    pub at: RoundOf,
    /// A rank, and for what it pushed the round.
    pub first: (Rank, Act),
    /// Another one.
    pub second: (Rank, Act),
}

/// What of a link says more than that it ended is its own to say.
fn lost(scheduler: &str, source: &Source) -> String {
    match source.get().downcast_ref::<LinkError>() {
        Some(error) => error.line(scheduler),
        None => format!("the connection to {scheduler} was lost: {source}"),
    }
}

fn in_brackets(at: Option<&RoundSeen>) -> String {
    at.map_or_else(String::new, |at| format!(" ({at})"))
}

impl From<Death> for PeerDied {
    fn from(death: Death) -> PeerDied {
        PeerDied { death, at: None }
    }
}

impl fmt::Display for PeerDied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.death.fmt(f)?;
        self.at.as_ref().map_or(Ok(()), |at| write!(f, "; {at}"))
    }
}

impl std::error::Error for PeerDied {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.death.source()
    }
}

impl fmt::Display for RoundSeen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.is_open { "was open" } else { "was the last one" };
        write!(f, "{} {how}", self.of)
    }
}
