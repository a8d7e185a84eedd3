//! How nodes and jobs end: death, failure, silence, good-byes, deadlines.

use super::elastic::removed;
use super::waits::{Reminder, caught_up};
use super::{
    Duration, Epoch, Exit, NodeId, NodeState, Output, OverReason, Phase, Rank, Refusal, Rendezvous,
    Scheduler, SchedulerMessage, Standing,
};
use crate::base::milliseconds;
use crate::proto::messages::{NodeMessage, Origin, Party, Place, RoundOf, Sign, Timeline};
use crate::proto::paths::End;
use crate::proto::text::list;
use crate::proto::unformed::Unformed;

/// Whether silence counts from this message on. What comes behind a heartbeat that is lost does not
/// come either, and whoever sends it counts from the same one.
pub(super) fn is_sign_of_life(message: &NodeMessage) -> bool {
    matches!(
        message,
        NodeMessage::Register(_)
            | NodeMessage::Resume(_)
            | NodeMessage::Known { .. }
            | NodeMessage::Heartbeat { .. }
            | NodeMessage::Alive { .. }
    )
}

impl NodeState {
    /// A connection that is new.
    pub(super) fn connected(now: Duration) -> NodeState {
        NodeState {
            standing: Standing::New,
            host: String::new(),
            pid: 0,
            who: "a node".to_owned(),
            session: None,
            former: None,
            connected: now,
            heard: now,
            rounds: 0,
            has_lanes: false,
            asks: None,
            leaves: false,
            statistics: None,
        }
    }
}

impl Scheduler {
    /// A member of the job counts as dead: a running job cannot go on. It is told, too.
    pub(super) fn lost(&mut self, node: NodeId, how: &str) {
        self.dead(node, Sign::Seen(how.to_owned()));
    }

    pub(super) fn dead(&mut self, node: NodeId, how: Sign) {
        if matches!(self.phase, Phase::Taking(_)) {
            return self.leave_seat(node, &how.to_string());
        }
        if matches!(self.phase, Phase::Forming(_)) {
            return self.vacate(node, &how.to_string(), true);
        }
        let Some(reason) = self.death(node, how) else { return };
        self.end(reason, Some(node));
    }

    /// The connection of a member ended without a good-bye.
    pub(super) fn gone(&mut self, node: NodeId, how: &str) {
        if matches!(self.phase, Phase::Taking(_)) {
            return self.leave_seat(node, how);
        }
        if matches!(self.phase, Phase::Forming(_)) {
            return self.vacate(node, how, false);
        }
        let Some(reason) = self.death(node, Sign::Seen(how.to_owned())) else { return };
        self.peers.remove(&node);
        self.end(reason, None);
    }

    pub(super) fn death(&self, node: NodeId, how: Sign) -> Option<OverReason> {
        let peer = self.peers.get(&node)?;
        Some(OverReason::Died { who: self.origin(node), how, rounds: peer.rounds })
    }

    /// A member says on a further connection that it lives.
    pub(super) fn alive(&mut self, node: NodeId, session: u64, now: Duration) {
        let has_session = |peer: &&mut super::NodeState| peer.session == Some(session);
        let member = self.peers.iter_mut().find_map(|(member, peer)| {
            let found = Some(peer).filter(has_session)?;
            found.heard = now;
            Some(*member)
        });
        let (Some(member), Some(peer)) = (member, self.peers.get_mut(&node)) else {
            return self.drop_stranger(node, "no node of the job has its session");
        };
        peer.standing = Standing::Aside(member);
        self.send(node, SchedulerMessage::Heartbeat);
    }

    pub(super) fn failed(&mut self, node: NodeId, message: String, round: Option<RoundOf>) {
        let is_member = self
            .peers
            .get(&node)
            .is_some_and(|peer| matches!(peer.standing, Standing::Worker(_) | Standing::Server));
        if is_member && matches!(self.phase, Phase::Forming(_)) {
            self.vacate(node, &message, true);
        } else if is_member {
            let who = self.origin(node);
            self.end(OverReason::Failed { who, message, round }, Some(node));
        } else {
            self.drop_stranger(node, &message);
        }
    }

    /// A node is gone before the job has formed: its place is free, and another may take it,
    /// perhaps the same program started again.
    pub(super) fn vacate(&mut self, node: NodeId, how: &str, is_connected: bool) {
        let who = self.origin(node);
        self.bury_vacated(node);
        let Phase::Forming(rendezvous) = &mut self.phase else { return };
        rendezvous.remove(node);
        let waiting = match rendezvous.missing() {
            nobody if nobody.is_empty() => String::new(),
            missing => format!("; waiting for {missing}"),
        };
        let text = format!("{who} is gone before the job has formed: {how}{waiting}");
        self.put(Output::Log(text.clone()));
        if is_connected {
            self.send_away(node, Unformed::Gone { who, how: how.to_owned() });
        } else {
            self.peers.remove(&node);
        }
        for node in self.members() {
            self.send(node, SchedulerMessage::Waiting { text: text.clone() });
        }
        self.check_regroup(self.clock);
    }

    /// A member sent what it must not send at this point.
    pub(super) fn broke_protocol(&mut self, node: NodeId, what: &str) {
        self.lost(node, &format!("it broke the protocol ({what})"));
    }

    /// Closes a connection that is not of the job yet; the job goes on without it.
    pub(super) fn drop_stranger(&mut self, node: NodeId, why: &str) {
        let who = self.described(node);
        self.peers.remove(&node);
        self.put(Output::Log(format!("closed the connection of {who}: {why}")));
        self.put(Output::Close(node));
    }

    /// Tells one node, and only that, that it cannot join.
    pub(super) fn send_away(&mut self, node: NodeId, cause: Unformed) {
        self.dismiss(node, OverReason::NotFormed { cause });
    }

    /// Tells one node why the job is over for it.
    pub(super) fn dismiss(&mut self, node: NodeId, reason: OverReason) {
        self.peers.remove(&node);
        self.send(node, SchedulerMessage::Over { reason });
        self.put(Output::Close(node));
    }

    /// `rank 3 (host a, pid 5)`.
    pub(super) fn described(&self, node: NodeId) -> String {
        self.origin(node).to_string()
    }

    /// The node as verdicts name it.
    pub(super) fn origin(&self, node: NodeId) -> Origin {
        let peer = self.peers.get(&node).filter(|peer| !peer.host.is_empty());
        let place = peer.map(|peer| Place { host: peer.host.clone(), pid: peer.pid });
        Origin { party: self.party(node), place }
    }

    /// The node's place in the job.
    fn party(&self, node: NodeId) -> Party {
        let Some(peer) = self.peers.get(&node) else { return Party::Unplaced("a node".to_owned()) };
        match (&peer.standing, &self.phase) {
            // It has come to an elastic job, and gets its rank when the next epoch forms.
            (Standing::Worker(rank), Phase::Forming(_)) if rank.0 >= self.config.ranks_max => {
                Party::Unplaced(peer.who.clone())
            }
            (Standing::Worker(rank) | Standing::Left(rank) | Standing::Former(rank), _) => {
                Party::Rank(*rank)
            }
            (Standing::Server, Phase::Running(running)) => match running.server(node) {
                Some(server) => Party::Server(server),
                None => Party::Unplaced(peer.who.clone()),
            },
            _ => Party::Unplaced(peer.who.clone()),
        }
    }

    /// Ends the job, or the epoch where the job survives that, or nothing where the epoch does.
    pub(super) fn end(&mut self, reason: OverReason, culprit: Option<NodeId>) {
        if self.shrink(&reason, culprit) || self.move_keys(&reason, culprit) {
            return;
        }
        if let Some(reason) = self.regroup(reason, culprit) {
            self.end_job(reason, culprit);
        }
    }

    /// Ends the job: tells everybody but those that have left. The node that caused it is told
    /// what the others think of it, unless it said so itself.
    pub(super) fn end_job(&mut self, reason: OverReason, culprit: Option<NodeId>) {
        if self.is_over() {
            return;
        }
        let exit = match &reason {
            OverReason::Finished => Exit::Finished,
            OverReason::NotFormed { .. } => Exit::NotFormed,
            _ => Exit::Failed,
        };
        self.put(Output::Log(reason.to_string()));
        if matches!(reason, OverReason::NotFormed { .. }) {
            let nodes = match &self.phase {
                Phase::Forming(rendezvous) => rendezvous.nodes(),
                _ => None,
            };
            // Whoever has said who it is hears of the end below.
            let told = self.peers.values().filter(|peer| !peer.host.is_empty()).count();
            self.refusal = Some(Refusal { reason: reason.clone(), told, nodes });
        }
        self.refuse_former(&reason);
        for (node, peer) in std::mem::take(&mut self.peers) {
            let member = match peer.standing {
                Standing::Aside(member) => member,
                _ => node,
            };
            let reason = match &reason {
                // A former one was told when its epoch ended.
                _ if matches!(peer.standing, Standing::Left(_) | Standing::Former(_)) => None,
                _ if Some(member) == culprit => removed(reason.cause()),
                reason => Some(reason.clone()),
            };
            if let Some(reason) = reason {
                self.send(node, SchedulerMessage::Over { reason });
            }
            self.put(Output::Close(node));
        }
        self.phase = Phase::Over;
        self.put(Output::Done(exit));
    }

    pub(super) fn worker_left(&mut self, node: NodeId, rank: Rank, suspend: bool, now: Duration) {
        let Phase::Running(running) = &mut self.phase else { return };
        if let Some(peer) = self.peers.get_mut(&node) {
            peer.standing = Standing::Left(rank);
        }
        running.registry.forget(rank);
        running.barriers.forget(rank);
        running.paths.forget(rank);
        running.left.insert(rank);
        running.suspended |= suspend;
        if suspend && self.config.elastic.is_some() {
            running.away.insert(rank, now);
        }
        self.timeline(rank, None);
        self.left_uneven(rank);
        self.apply_if_held(now);
        self.leave_moves(rank);
        let Phase::Running(running) = &mut self.phase else { return };
        if running.left.len() < running.job.workers.len() {
            return self.check_stalls(now);
        }
        if !running.away.is_empty() {
            self.regroup_suspended(now);
        } else if running.suspended || self.config.stays {
            self.dismiss_late();
            self.suspend(now);
        } else {
            self.end(OverReason::Finished, None);
        }
    }

    /// A rank starts a timeline or ends its own: the servers record from the first to the last.
    pub(super) fn timeline(&mut self, rank: Rank, timeline: Option<Timeline>) {
        let Phase::Running(running) = &mut self.phase else { return };
        let before = running.tracing.is_empty();
        match &timeline {
            Some(_) => running.tracing.insert(rank),
            None => running.tracing.remove(&rank),
        };
        if running.tracing.is_empty() == before {
            return;
        }
        let servers = running.job.servers.iter().map(|(node, _)| *node);
        let there: Vec<NodeId> = servers.filter(|node| self.peers.contains_key(node)).collect();
        for node in there {
            self.send(node, SchedulerMessage::Timeline { timeline: timeline.clone() });
        }
    }

    /// All workers have left and some will be back: servers forget their keys, and the rendezvous
    /// starts again.
    fn suspend(&mut self, now: Duration) {
        let Phase::Running(running) = std::mem::replace(&mut self.phase, Phase::Over) else {
            return;
        };
        self.next_install = running.registry.next();
        self.epoch = Epoch(self.epoch.0 + 1);
        for (server, _) in &running.job.servers {
            self.send(*server, SchedulerMessage::Reset { epoch: self.epoch });
        }
        // Ranks that have shut down rarely start again: then the reminder says who is awaited.
        if running.suspended {
            self.put(Output::Log(format!(
                "all workers have suspended: waiting for those of epoch {}",
                self.epoch.0
            )));
        }
        self.reminder = Reminder::new(now);
        let rendezvous = Rendezvous::again(running.job, &self.config, now);
        self.phase = Phase::Forming(Box::new(rendezvous));
        let early: Vec<NodeId> = self.early();
        for node in early {
            let Some(peer) = self.peers.get_mut(&node) else { continue };
            let standing = std::mem::replace(&mut peer.standing, Standing::New);
            if let Standing::Early(register) = standing {
                self.register(node, *register, now);
            }
        }
    }

    pub(super) fn early(&self) -> Vec<NodeId> {
        let early = |standing: &Standing| matches!(standing, Standing::Early(_));
        self.peers.iter().filter(|(_, peer)| early(&peer.standing)).map(|(node, _)| *node).collect()
    }

    /// If this process itself did not run for a while, the silence of the others means nothing.
    /// What they have said meanwhile comes before the next tick.
    pub(super) fn forgive(&mut self, now: Duration) {
        let gap = now.saturating_sub(self.ticked);
        self.ticked = now;
        // Less than a tick is no stop.
        if gap > self.config.heartbeat_timeout / 8 {
            self.history.went_on = Some(now);
            self.history.reads_on = true;
        }
        if gap <= self.config.heartbeat_timeout / 2 {
            return;
        }
        for peer in self.peers.values_mut() {
            peer.heard += gap;
            peer.connected += gap;
            peer.asks.iter_mut().for_each(|since| *since += gap);
        }
        match &mut self.phase {
            Phase::Taking(takeover) => takeover.since += gap,
            Phase::Forming(rendezvous) => {
                rendezvous.regroup.iter_mut().for_each(|regroup| regroup.forgive(gap));
            }
            Phase::Running(running) => {
                running.falling.iter_mut().for_each(|falling| falling.forgive(gap));
            }
            Phase::Over => {}
        }
    }

    pub(super) fn check_silence(&mut self, now: Duration) {
        let limit = self.config.heartbeat_timeout;
        let silent: Vec<NodeId> = self
            .peers
            .iter()
            .filter(|(_, peer)| now.saturating_sub(peer.heard) > limit)
            .map(|(node, _)| *node)
            .collect();
        for node in silent {
            let Some(peer) = self.peers.get(&node) else { continue };
            let silent = now.saturating_sub(peer.heard);
            let milliseconds = milliseconds(silent);
            let how = Sign::Silent { milliseconds };
            match peer.standing {
                Standing::Worker(_) | Standing::Server => {
                    self.dead(node, how);
                    if self.is_over() {
                        return;
                    }
                }
                Standing::Left(_) | Standing::Aside(_) => {
                    self.peers.remove(&node);
                    self.put(Output::Close(node));
                }
                // They are given a time of their own.
                Standing::Former(_) => {}
                Standing::New | Standing::Early(_) => {
                    let seconds = silent.as_secs_f64();
                    self.drop_stranger(node, &format!("it said nothing for {seconds:.1} s"));
                }
            }
        }
    }

    pub(super) fn check_forming(&mut self, now: Duration) {
        let Phase::Forming(rendezvous) = &self.phase else { return };
        if self.is_between_generations() || rendezvous.regroup.is_some() {
            return;
        }
        let waited = now.saturating_sub(rendezvous.since);
        let missing = rendezvous.missing();
        if waited >= self.config.start_timeout {
            let cause = Unformed::Missing { missing, waited_ms: milliseconds(waited) };
            self.end(OverReason::NotFormed { cause }, None);
        } else if self.reminder.is_due(now) {
            let text = format!("waiting for {missing} ({} s)", waited.as_secs());
            self.put(Output::Log(text.clone()));
            for node in self.members() {
                self.send(node, SchedulerMessage::Waiting { text: text.clone() });
            }
        }
    }

    /// Nodes that resumed wait for the others to suspend.
    pub(super) fn check_early(&mut self, now: Duration) {
        let Phase::Running(running) = &self.phase else { return };
        let size = running.job.size();
        let staying: Vec<u32> =
            (0..size).filter(|rank| !running.left.contains(&Rank(*rank))).collect();
        let early = self.early();
        if early.is_empty() {
            return;
        }
        let (ranks, elastic) = (list(staying.iter().copied()), self.config.elastic.is_some());
        let say = self.reminder.is_due(now);
        for node in early {
            let Some(peer) = self.peers.get(&node) else { continue };
            let waited = now.saturating_sub(peer.connected);
            let seconds = waited.as_secs();
            if waited >= self.config.start_timeout {
                let (ranks, waited_ms) = (staying.clone(), milliseconds(waited));
                self.send_away(node, Unformed::NotSuspended { ranks, waited_ms, elastic });
            } else if say {
                let text = format!("waiting for these ranks to suspend: {ranks} ({seconds} s)");
                self.send(node, SchedulerMessage::Waiting { text });
            }
        }
    }

    pub(super) fn check_installs(&mut self, now: Duration) {
        let Phase::Running(running) = &self.phase else { return };
        let Some((server, since)) = running.registry.oldest_install() else { return };
        let waited = now.saturating_sub(since);
        if waited >= self.config.stall_timeout {
            let node = running.job.servers[server as usize].0;
            let who = self.origin(node);
            let message = format!(
                "it has not made room for declared tensors in {} s (BPS_STALL_TIMEOUT): read its \
                 log",
                waited.as_secs()
            );
            // An elastic job goes on without it.
            let culprit = self.config.elastic.is_some().then_some(node);
            self.end(OverReason::Failed { who, message, round: None }, culprit);
        }
    }

    pub(super) fn check_stalls(&mut self, now: Duration) {
        let Phase::Running(running) = &mut self.phase else { return };
        let mut waits = running.stalls.waits(
            &running.registry,
            &running.barriers,
            &running.left,
            self.config.stall_report,
            now,
        );
        running.paths.excuse(&mut waits.rounds);
        let abandoned = waits.abandoned();
        if !abandoned.is_empty() {
            // Those that left come first in the line.
            let left = abandoned.iter().flat_map(|stall| &stall.left);
            let missing = abandoned.iter().flat_map(|stall| &stall.missing);
            let members = running.job.members(left.chain(missing).copied().map(End::Rank));
            self.end(OverReason::Abandoned { stalls: abandoned, members }, None);
            return;
        }
        let stalls = waits.oldest();
        let limit = milliseconds(self.config.stall_timeout);
        if stalls.iter().any(|stall| stall.waited_ms >= limit) {
            let missing = stalls.iter().flat_map(|stall| &stall.missing);
            let members = running.job.members(missing.copied().map(End::Rank));
            self.end(OverReason::Stalled { stalls, members }, None);
            return;
        }
        if stalls.is_empty() && running.paths.is_stalled() {
            // It is not over: it has another cause.
            return;
        }
        let news = running.late.observe(&waits.late(), now);
        let late = running.stalls.lines(&news.late, &waits, &running.registry);
        let over = caught_up(&news.over);
        if late.is_empty() && over.is_none() {
            return;
        }
        let lines = late.iter().map(ToString::to_string);
        for line in lines.chain(over.iter().map(ToString::to_string)) {
            self.put(Output::Log(line));
        }
        for node in self.members() {
            self.send(node, SchedulerMessage::Stall { late: late.clone(), over: over.clone() });
        }
    }
}
