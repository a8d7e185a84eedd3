//! A job that outlives its members: when one dies, its epoch ends, and the next one forms from
//! whoever is left and whoever has knocked meanwhile.
//!
//! Invariant: a rank of the epoch that ended is awaited until it has come back, has said that it
//! will not, is gone, or has used up its time; one that was given up is never taken back under its
//! old name; and no epoch forms before every server has forgotten the one before.

use super::regroup::{Awaited, Regroup, lacks};
use super::rendezvous::{Job, Rendezvous, origin};
use super::waits::Reminder;
use super::{
    Changes, Duration, Epoch, NodeId, NodeState, Output, OverReason, Phase, Rank, Refusal,
    Register, Scheduler, SchedulerMessage, Standing, counted,
};
use crate::base::word;
use crate::proto::messages::{Node, NodeMessage, Origin, Party, Place};
use crate::proto::unformed::Unformed;
use std::collections::{BTreeMap, VecDeque};

/// How long a rank that has said that it comes back may take from one connection to the next.
const RETURN: Duration = Duration::from_secs(10);
/// How long a server may take to forget an epoch: longer than it waits for its own lanes to close.
const RESET: Duration = Duration::from_secs(15);
/// Epochs in a row that may end because of a broken path between members that all live.
const PATHS_MAX: u32 = 3;
/// Members that were given up and are remembered by name.
const DEAD_MAX: usize = 1024;

/// How a job goes on when members die.
#[derive(Clone, Debug)]
pub struct Elastic {
    /// Rounds go on without ranks that die, where they can.
    pub shrinks: bool,
    /// Fewest ranks.
    pub min_workers: u32,
    /// How long a job with too few members waits for new ones.
    pub patience: Duration,
    /// How long a rank may take to notice that its epoch is over, and to say so.
    pub notice: Duration,
}

/// What a job has survived.
#[derive(Debug, Default)]
pub(super) struct History {
    /// Members that were given up: their sessions, and who they were.
    dead: VecDeque<(u64, Origin)>,
    pub(super) deaths: u64,
    pub(super) changes: Changes,
    /// How long the last re-formation took.
    pub(super) reformed: Option<Duration>,
    /// Epochs that ended because of a path, since one ended for another reason.
    paths: u32,
    /// The epoch that was taken over from a lost scheduler.
    pub(super) taken: Option<Epoch>,
    /// When this process last went on that had not run for a while.
    pub(super) went_on: Option<Duration>,
    /// Behind that a rank that had said so did not come back: another scheduler may have it, and
    /// whoever of the others looks for this one finds that one as well.
    pub(super) has_strayed: bool,
    /// It has gone on, and not read yet all that had come in meanwhile.
    pub(super) reads_on: bool,
    /// The processes of the ranks that have all done their work: they may begin again.
    pub(super) veterans: Vec<(u32, String)>,
}

impl History {
    pub(super) fn bury(&mut self, session: Option<u64>, who: Origin) {
        self.deaths += 1;
        if self.dead.len() >= DEAD_MAX {
            self.dead.pop_front();
        }
        self.dead.push_back((session.unwrap_or(0), who));
    }
}

/// What the node that ended an epoch or a job is told.
pub(super) fn removed(reason: &OverReason) -> Option<OverReason> {
    match reason {
        OverReason::Died { how, .. } => Some(OverReason::Removed { how: how.clone() }),
        OverReason::Left { .. } => Some(reason.clone()),
        // It has said so itself.
        _ => None,
    }
}

impl Scheduler {
    /// Ends the epoch instead of the job, if members may die in this one. Returns why the job is
    /// over otherwise.
    pub(super) fn regroup(
        &mut self,
        reason: OverReason,
        culprit: Option<NodeId>,
    ) -> Option<OverReason> {
        let Some(elastic) = self.config.elastic.clone() else { return Some(reason) };
        let Phase::Running(running) = &self.phase else { return Some(reason) };
        match &reason {
            OverReason::Died { .. } | OverReason::Failed { .. } | OverReason::Left { .. } => {
                self.history.paths = 0;
            }
            OverReason::PathLost(_) if self.history.paths < PATHS_MAX => self.history.paths += 1,
            _ => return Some(reason),
        }
        let awaited = self.survivors(culprit);
        let has_left = running.has_finished();
        if has_left && awaited.is_empty() {
            self.put(Output::Log(reason.to_string()));
            if let Some(node) = culprit {
                self.expel(node, &reason);
            }
            return Some(OverReason::Finished);
        }
        let is_left = |node: &NodeId| Some(*node) != culprit && self.peers.contains_key(node);
        let mut has_server = running.job.servers.iter().any(|(node, _)| is_left(node));
        let mut hosts: Vec<&str> = awaited.values().map(|one| one.host_id.as_str()).collect();
        for peer in self.peers.values() {
            match &peer.standing {
                Standing::Early(early) if matches!(early.node, Node::Server { .. }) => {
                    has_server = true;
                }
                Standing::Early(early) if early.former.is_none() => hosts.push(&early.host_id),
                _ => {}
            }
        }
        let lacks =
            lacks(hosts.into_iter(), has_server, &running.job.planning, elastic.min_workers);
        if let Some(left) = lacks.filter(|_| elastic.patience.is_zero() && !has_left) {
            return Some(OverReason::TooFew { reason: Box::new(reason), left });
        }
        self.begin_regroup(awaited, Some(reason), culprit);
        None
    }

    /// All ranks have left, and some of them to come back.
    pub(super) fn regroup_suspended(&mut self, now: Duration) {
        self.clock = now;
        let awaited = self.survivors(None);
        self.begin_regroup(awaited, None, None);
    }

    /// The ranks of the running epoch that can be in the next one.
    fn survivors(&self, culprit: Option<NodeId>) -> BTreeMap<u32, Awaited> {
        let Phase::Running(running) = &self.phase else { return BTreeMap::new() };
        let mut awaited = BTreeMap::new();
        for (rank, (node, register)) in (0..).zip(&running.job.workers) {
            let away = running.away.get(&Rank(rank)).copied();
            let stays = self
                .peers
                .get(node)
                .is_some_and(|peer| matches!(peer.standing, Standing::Worker(_)));
            if Some(*node) == culprit || !stays && away.is_none() {
                continue;
            }
            let who = ranked(Rank(rank), register);
            let (session, host_id) = (register.session, register.host_id.clone());
            awaited.insert(rank, Awaited { node: *node, session, who, host_id, away });
        }
        awaited
    }

    fn begin_regroup(
        &mut self,
        awaited: BTreeMap<u32, Awaited>,
        reason: Option<OverReason>,
        culprit: Option<NodeId>,
    ) {
        if let (Some(node), Some(reason)) = (culprit, &reason) {
            self.expel(node, reason);
        }
        let released = self.release_leavers();
        let Phase::Running(running) = std::mem::replace(&mut self.phase, Phase::Over) else {
            return;
        };
        let now = self.clock;
        let min_workers = self.config.elastic.as_ref().map_or(1, |elastic| elastic.min_workers);
        self.next_install = running.registry.next();
        self.epoch = Epoch(self.epoch.0 + 1);
        let epoch = self.epoch;
        if let Some(reason) = &reason {
            self.put(Output::Log(format!("{reason}; epoch {} forms from who is left", epoch.0)));
        }
        for (rank, (_, register)) in (0..).zip(&running.job.workers) {
            if !awaited.contains_key(&rank) && !running.left.contains(&Rank(rank)) {
                let who = ranked(Rank(rank), register);
                self.history.bury(Some(register.session), who);
            }
        }
        let workers = (0..).map(Rank).zip(&running.job.workers);
        let departed = workers.filter(|(rank, _)| reason.is_none() && running.has_gone(*rank));
        let departed = departed.map(|(rank, (_, register))| ranked(rank, register));
        let departed = departed.chain(released.iter().cloned()).collect();
        // Where all others suspended, their work goes on.
        let has_left = reason.is_some() && running.has_finished();
        let job = *running;
        let mut servers = job.job.servers;
        let before = servers.len();
        servers.retain(|(node, _)| self.peers.contains_key(node));
        let gone = before - servers.len() - job.moving.lost() - released.len();
        self.history.deaths += gone as u64;
        for (server, _) in &servers {
            if !job.tracing.is_empty() {
                self.send(*server, SchedulerMessage::Timeline { timeline: None });
            }
            self.send(*server, SchedulerMessage::Reset { epoch });
        }
        for (rank, one) in &awaited {
            let Some(peer) = self.peers.get_mut(&one.node) else { continue };
            if let (Standing::Worker(_), Some(reason)) = (&peer.standing, &reason) {
                peer.standing = Standing::Former(Rank(*rank));
                let reason = OverReason::Reforming { reason: Box::new(reason.clone()), epoch };
                self.send(one.node, SchedulerMessage::Over { reason });
            }
        }
        self.reminder = Reminder::new(now);
        let resetting = servers.iter().map(|(node, _)| *node).collect();
        let regroup = Regroup {
            awaited,
            resetting,
            newcomers: 0,
            is_filling: true,
            departed,
            has_left,
            has_returned: false,
            planning: job.job.planning,
            min_workers,
            has_strayed: false,
            stopped: Duration::ZERO,
            reason,
        };
        let rendezvous = Rendezvous::regroup(servers, regroup, &self.config, now);
        self.phase = Phase::Forming(Box::new(rendezvous));
        // Who is new comes first: with the last of those who come back the epoch may form.
        let mut early = self.early();
        early.sort_by_key(|node| self.is_former(*node));
        for node in early {
            let Some(peer) = self.peers.get_mut(&node) else { continue };
            let standing = std::mem::replace(&mut peer.standing, Standing::New);
            if let Standing::Early(register) = standing {
                self.register(node, *register, now);
            }
        }
        let Phase::Forming(rendezvous) = &mut self.phase else { return };
        rendezvous.regroup.iter_mut().for_each(|regroup| regroup.is_filling = false);
        self.check_regroup(now);
    }

    /// Closes the connection of the node that ended an epoch, and tells it so.
    pub(super) fn expel(&mut self, node: NodeId, reason: &OverReason) {
        self.peers.remove(&node);
        if let Some(reason) = removed(reason) {
            self.send(node, SchedulerMessage::Over { reason });
        }
        self.put(Output::Close(node));
    }

    /// A node has come while the job runs: it waits for the next epoch.
    pub(super) fn knocked(&mut self, node: NodeId, register: Register, now: Duration) {
        let register = self.known_before(register);
        let Phase::Running(running) = &self.phase else { return };
        if let Some(session) = register.former {
            let mut away = running.away.keys().filter_map(|rank| {
                running.job.workers.get(rank.0 as usize).map(|(_, worker)| worker.session)
            });
            if !away.any(|known| known == session) {
                return self.refuse_dead(node, &register, session);
            }
        }
        if let Some(peer) = self.peers.get_mut(&node) {
            peer.standing = Standing::Early(Box::new(register));
        }
        if self.early().len() == 1 {
            self.reminder = Reminder::new(now);
        }
        self.tell_newcomers();
    }

    /// Whether a rank that comes back by this connection has come back by another one, whatever has
    /// become of it there: it has looked for another scheduler while this one was silent, and found
    /// this one.
    pub(super) fn comes_twice(&mut self, node: NodeId, register: &Register) -> bool {
        let mut others = self.peers.iter().filter(|(other, _)| **other != node);
        let comes_twice =
            register.former.is_some() && others.any(|(_, one)| one.former == register.former);
        if comes_twice {
            self.drop_stranger(node, "it is here already");
        }
        comes_twice
    }

    /// A rank that comes back to a scheduler that does not know of it, because the one that knew is
    /// lost, comes as a new one.
    fn known_before(&self, mut register: Register) -> Register {
        let of = |job: &Job, session| job.workers.iter().any(|(_, one)| one.session == session);
        let is_known = |session: u64| {
            let is_dead = self.history.dead.iter().any(|(dead, _)| *dead == session);
            is_dead
                || match &self.phase {
                    Phase::Running(running) => of(&running.job, session),
                    Phase::Forming(rendezvous) => {
                        let awaited =
                            rendezvous.regroup.iter().flat_map(|one| one.awaited.values());
                        awaited.into_iter().any(|one| one.session == session)
                    }
                    Phase::Taking(_) | Phase::Over => false,
                }
        };
        register.former = register.former.filter(|session| self.term == 1 || is_known(*session));
        register
    }

    /// Tells the ranks how many nodes wait to be let in.
    pub(super) fn tell_newcomers(&mut self) {
        let Phase::Running(running) = &self.phase else { return };
        if self.config.elastic.is_none() {
            return;
        }
        let count = self.early().iter().filter(|node| !self.is_former(**node)).count();
        let count = word(count + self.leavers(running).len());
        let stay = (0..).map(Rank).zip(&running.job.workers);
        let stay = stay.filter(|(rank, _)| !running.left.contains(rank));
        let nodes: Vec<NodeId> = stay.map(|(_, (node, _))| *node).collect();
        for node in nodes {
            self.send(node, SchedulerMessage::Newcomers { count });
        }
    }

    /// A node registers while an epoch forms from what another left.
    pub(super) fn rejoin(&mut self, node: NodeId, register: Register, now: Duration) {
        let register = self.known_before(register);
        let Phase::Forming(rendezvous) = &mut self.phase else { return };
        let Some(regroup) = &mut rendezvous.regroup else { return };
        let is_worker = matches!(register.node, Node::Worker { .. });
        let place = match register.former {
            Some(session) => {
                let found = regroup.awaited.iter().find(|(_, one)| one.session == session);
                let Some(rank) = found.map(|(rank, _)| *rank) else {
                    return self.refuse_dead(node, &register, session);
                };
                rank
            }
            // Behind every rank that there can be.
            None => self.config.ranks_max + regroup.newcomers,
        };
        let before = regroup.awaited.remove(&place);
        regroup.newcomers += u32::from(before.is_none());
        regroup.has_returned |= before.is_some();
        if let Some(before) = &before
            && self.peers.remove(&before.node).is_some()
        {
            self.put(Output::Close(before.node));
        }
        let Phase::Forming(rendezvous) = &mut self.phase else { return };
        if let Err(cause) = rendezvous.admit_again(node, &register, place) {
            if let Some(before) = before {
                self.history.bury(Some(before.session), before.who);
            }
            self.put(Output::Log(cause.to_string()));
            self.send_away(node, *cause);
            return self.check_regroup(now);
        }
        if let Some(peer) = self.peers.get_mut(&node) {
            peer.standing =
                if is_worker { Standing::Worker(Rank(place)) } else { Standing::Server };
        }
        self.check_regroup(now);
    }

    /// A rank that was given up, and lives.
    pub(super) fn refuse_dead(&mut self, node: NodeId, register: &Register, session: u64) {
        let dead = self.history.dead.iter().rev().find(|(known, _)| *known == session);
        let who = dead.map_or_else(|| origin(register), |(_, who)| who.clone());
        let cause = Unformed::GivenUp { who, epoch: self.epoch };
        self.put(Output::Log(cause.to_string()));
        self.send_away(node, cause);
    }

    /// What a rank says on its connection of the epoch that is over.
    pub(super) fn former_says(&mut self, node: NodeId, rank: Rank, message: &NodeMessage) {
        match message {
            NodeMessage::Leave { suspend: true } => {
                let now = self.clock;
                let Phase::Forming(rendezvous) = &mut self.phase else { return };
                let awaited = rendezvous.regroup.as_mut().map(|regroup| &mut regroup.awaited);
                if let Some(one) = awaited.and_then(|awaited| awaited.get_mut(&rank.0)) {
                    one.away.get_or_insert(now);
                }
            }
            NodeMessage::Leave { suspend: false } => {
                self.drop_former(node);
                self.former_left(rank);
            }
            NodeMessage::Failed { message, .. } => {
                self.drop_former(node);
                self.give_up(rank, message);
            }
            // What was under way when its epoch ended.
            _ => {}
        }
    }

    fn drop_former(&mut self, node: NodeId) {
        self.peers.remove(&node);
        self.put(Output::Close(node));
    }

    /// The connection of a rank of the epoch that is over has ended.
    pub(super) fn former_closed(&mut self, rank: Rank) {
        let Phase::Forming(rendezvous) = &self.phase else { return };
        let awaited = rendezvous.regroup.as_ref().and_then(|one| one.awaited.get(&rank.0));
        if awaited.is_some_and(|one| one.away.is_none()) {
            self.give_up(rank, "its connection was closed");
        }
    }

    /// A rank had done all its work when its epoch ended.
    fn former_left(&mut self, rank: Rank) {
        let Phase::Forming(rendezvous) = &mut self.phase else { return };
        let Some(regroup) = &mut rendezvous.regroup else { return };
        let Some(one) = regroup.awaited.remove(&rank.0) else { return };
        regroup.has_left = true;
        self.put(Output::Log(format!("{} does not come back: it left", one.who)));
        self.check_regroup(self.clock);
    }

    /// A rank does not come back.
    fn give_up(&mut self, rank: Rank, how: &str) {
        self.forget(rank, how);
        self.check_regroup(self.clock);
    }

    fn forget(&mut self, rank: Rank, how: &str) {
        let Phase::Forming(rendezvous) = &mut self.phase else { return };
        let Some(regroup) = &mut rendezvous.regroup else { return };
        let Some(one) = regroup.awaited.remove(&rank.0) else { return };
        self.put(Output::Log(format!("{} does not come back: {how}", one.who)));
        self.history.bury(Some(one.session), one.who);
        let standing = self.peers.get(&one.node).map(|peer| &peer.standing);
        if matches!(standing, Some(Standing::Former(_))) {
            self.drop_former(one.node);
        }
    }

    /// A server has forgotten an epoch.
    pub(super) fn reset_done(&mut self, node: NodeId, epoch: Epoch, now: Duration) {
        let current = self.epoch;
        let Phase::Forming(rendezvous) = &mut self.phase else { return };
        let Some(regroup) = rendezvous.regroup.as_mut().filter(|_| epoch == current) else {
            return;
        };
        regroup.resetting.remove(&node);
        self.check_regroup(now);
    }

    /// Whether the next epoch can form, or never can.
    pub(super) fn check_regroup(&mut self, now: Duration) {
        let Some(elastic) = self.config.elastic.clone() else { return };
        let Phase::Forming(rendezvous) = &mut self.phase else { return };
        let since = rendezvous.since;
        let Some(regroup) = rendezvous.regroup.as_ref().filter(|one| !one.is_filling) else {
            return;
        };
        let waited = now.saturating_sub(since + regroup.stopped);
        let is_late = |one: &Awaited| match one.away {
            Some(since) => now.saturating_sub(since) >= RETURN,
            None => waited >= elastic.notice,
        };
        let late = regroup.awaited.iter().filter(|(_, one)| is_late(one));
        let late: Vec<(Rank, bool)> =
            late.map(|(rank, one)| (Rank(*rank), one.away.is_some())).collect();
        for &(rank, _) in &late {
            self.forget(rank, "it took too long");
        }
        let was_stopped = self.history.went_on.is_some_and(|at| since <= at + RETURN);
        let has_strayed = late.iter().any(|(_, said_so)| *said_so);
        self.history.has_strayed |= was_stopped && has_strayed;
        let Phase::Forming(rendezvous) = &mut self.phase else { return };
        if let Some(regroup) = &mut rendezvous.regroup {
            regroup.has_strayed |= has_strayed;
        }
        let Some(regroup) = &rendezvous.regroup else { return };
        if let Some(&server) = regroup.resetting.iter().next().filter(|_| waited >= RESET) {
            let how = format!("it has not reset within {} s", RESET.as_secs());
            return self.lost(server, &how);
        }
        if regroup.is_finished() {
            return self.end_job(OverReason::Finished, None);
        }
        let lacks = rendezvous.lacks();
        if let Some(left) = lacks.filter(|_| waited >= elastic.patience) {
            // Ranks that looked for a scheduler while this one was stopped may have found another,
            // which waits for the servers that this one has.
            let has_lost_them = regroup.has_strayed && rendezvous.workers.is_empty();
            if has_lost_them && (was_stopped || self.history.has_strayed) {
                return self.end_unheard(format!(
                    "{left}: as this scheduler was stopped when some were to come back, another \
                     may lead them: this one ends, and its servers look for that one"
                ));
            }
            let reason = regroup.reason.clone().unwrap_or(OverReason::Finished);
            return self.end_job(OverReason::TooFew { reason: Box::new(reason), left }, None);
        }
        if rendezvous.is_complete() && !self.may_be_left(now) {
            return self.form_if_complete(now);
        }
        let Phase::Forming(rendezvous) = &self.phase else { return };
        if self.reminder.is_due(now) {
            let missing = rendezvous.missing();
            let text = format!("waiting for {missing} ({} s)", waited.as_secs());
            self.put(Output::Log(text.clone()));
            for node in self.members() {
                self.send(node, SchedulerMessage::Waiting { text: text.clone() });
            }
        }
    }

    /// A server waits for the answer of another scheduler, or has it.
    pub(super) fn asks(&mut self, node: NodeId, another: bool, now: Duration) {
        if let Some(peer) = self.peers.get_mut(&node) {
            peer.asks = another.then_some(now);
        }
        self.check_regroup(now);
    }

    /// Whether a server may turn out to follow another scheduler, so that ranks of an epoch that
    /// formed now would wait for it here, and be missed there.
    fn may_be_left(&self, now: Duration) -> bool {
        let asks = |peer: &NodeState| peer.asks.is_some_and(|since| now < since + RETURN);
        self.history.reads_on
            || self
                .peers
                .values()
                .any(|peer| matches!(peer.standing, Standing::Server) && asks(peer))
    }

    /// Gives the workers of a new epoch their ranks, and says what has changed.
    pub(super) fn renumber(
        &mut self,
        job: &Job,
        regroup: Option<Box<Regroup>>,
        waited: Duration,
    ) -> Option<String> {
        let regroup = *regroup?;
        for (rank, (node, _)) in (0..).map(Rank).zip(&job.workers) {
            if let Some(peer) = self.peers.get_mut(node) {
                peer.standing = Standing::Worker(rank);
            }
        }
        self.history.reformed = Some(waited);
        let change = format!(
            "epoch {}: {} and {} go on after {:.3} s: {}",
            self.epoch.0,
            counted(job.workers.len(), "rank"),
            counted(job.servers.len(), "server"),
            waited.as_secs_f64(),
            regroup.why()
        );
        self.changed(&change, waited);
        Some(change)
    }

    /// The job ends while ranks of its last epoch are between two connections: they are told when
    /// they come.
    pub(super) fn refuse_former(&mut self, reason: &OverReason) {
        let Phase::Forming(rendezvous) = &self.phase else { return };
        let Some(regroup) = &rendezvous.regroup else { return };
        if regroup.awaited.is_empty() {
            return;
        }
        let nodes = Some(regroup.awaited.len());
        self.refusal = Some(Refusal { reason: reason.clone(), told: 0, nodes });
    }
}

/// The node as verdicts name a rank.
pub(super) fn ranked(rank: Rank, register: &Register) -> Origin {
    let place = Place { host: register.host.clone(), pid: register.pid };
    Origin { party: Party::Rank(rank), place: Some(place) }
}
