//! What the registry answers, as messages to nodes; and messages out of turn, as people know them.

use super::registry::Reply;
use super::rendezvous::Job;
use super::tuner;
use super::uneven::OUT_OF_TURN;
use super::{NodeId, NodeMessage, Output, Phase, Rank, Scheduler, SchedulerMessage};
use crate::proto::messages::{Frameworks, Mismatch, Node};
use crate::proto::unserved::Unserved;

/// Of the name of a framework as a rank says it, that others are told: it is for people.
const FRAMEWORK_CHARS_MAX: usize = 40;

impl Scheduler {
    pub(super) fn reply(&mut self, replies: Vec<Reply>) {
        for reply in replies {
            let Phase::Running(running) = &self.phase else { return };
            match reply {
                Reply::Declared { rank, request, tensors } => {
                    let node = running.job.workers[rank.0 as usize].0;
                    self.send(node, SchedulerMessage::Declared { request, tensors });
                }
                Reply::Refused { rank, request, mut cause } => {
                    if let Unserved::Mismatch { mismatches } = &mut cause {
                        mismatches.iter_mut().for_each(|one| tell_frameworks(one, &running.job));
                    }
                    let node = running.job.workers[rank.0 as usize].0;
                    self.send(node, SchedulerMessage::Refused { request, cause });
                }
                Reply::Install { server, request, keys } => {
                    let node = running.job.servers[server as usize].0;
                    self.send(node, SchedulerMessage::Install { request, keys });
                }
                Reply::Retire { server, keys } => {
                    let node = running.job.servers[server as usize].0;
                    self.send(node, SchedulerMessage::Retire { keys });
                }
                Reply::Superseded { rank, tensors } if !running.left.contains(&rank) => {
                    let node = running.job.workers[rank.0 as usize].0;
                    self.send(node, SchedulerMessage::Superseded { tensors });
                }
                Reply::Superseded { .. } => {}
                Reply::Mismatch { to, mut mismatch } => {
                    tell_frameworks(&mut mismatch, &running.job);
                    let ranks = (0..).map(Rank).zip(&running.job.workers);
                    let nodes: Vec<NodeId> = ranks
                        .filter(|(rank, _)| !running.left.contains(rank))
                        .filter(|(rank, _)| to.is_none_or(|to| to == *rank))
                        .map(|(_, (node, _))| *node)
                        .collect();
                    if to.is_none() {
                        self.put(Output::Log(mismatch.to_string()));
                    }
                    for node in nodes {
                        self.send(node, SchedulerMessage::Mismatch(mismatch.clone()));
                    }
                }
            }
        }
    }
}

/// Says which frameworks the ranks of a mismatch speak.
fn tell_frameworks(mismatch: &mut Mismatch, job: &Job) {
    let of = |rank: Rank| match &job.workers.get(rank.0 as usize)?.1.node {
        Node::Worker { speaks, .. } => {
            speaks.as_ref().map(|name| name.chars().take(FRAMEWORK_CHARS_MAX).collect())
        }
        Node::Server { .. } => None,
    };
    mismatch.frameworks = Frameworks { first: of(mismatch.first), second: of(mismatch.second) };
}

pub(super) fn kind(message: &NodeMessage) -> &'static str {
    match message {
        NodeMessage::Register(_) => "a second registration",
        NodeMessage::Resume(_) | NodeMessage::Known { .. } => "a second account of the job",
        NodeMessage::Deposed { .. } | NodeMessage::Asks { .. } => "word of another scheduler",
        NodeMessage::Alive { .. } => "a session on the wrong connection",
        NodeMessage::Heartbeat { .. } => "a heartbeat",
        NodeMessage::Statistics(_) => "statistics",
        NodeMessage::Declare { .. } | NodeMessage::Redeclare { .. } => {
            "a declaration that is not its to make"
        }
        NodeMessage::Overrun { .. } => "an overrun that is not its to report",
        NodeMessage::Installed { .. } => "an answer to what it was not asked",
        NodeMessage::ResetDone { .. } => "an answer to a reset that it was not sent",
        NodeMessage::Barrier { .. } => "a barrier out of turn",
        NodeMessage::Stalled { .. } => "a stall report that is not its to make",
        NodeMessage::LaneLost { .. } => "a lost lane",
        NodeMessage::Awaiting { .. } => "a wait for results that is not its to make",
        NodeMessage::KeyStates { .. } => "an answer that is not its to give",
        NodeMessage::Clock { .. } => "a question for the clock, which its program answers",
        NodeMessage::Uneven(_) => OUT_OF_TURN,
        NodeMessage::Tune(_) => tuner::OUT_OF_TURN,
        NodeMessage::Moving(_) => "a report on keys out of turn",
        NodeMessage::Timeline { .. } => "a timeline that is not its to start",
        NodeMessage::Failed { .. } => "a failure",
        NodeMessage::Leave { .. } => "a good-bye",
    }
}
