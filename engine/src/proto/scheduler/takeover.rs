//! A scheduler that follows a lost one: it learns the job from its members, and leads it from the
//! next term on.
//!
//! Invariant: it leads nobody before every member of the last roster has come, has left, or has
//! used up its time; a job has its terms one after the other, so a scheduler that hears of a later
//! one than its own ends without a word to the members.

mod absent;
mod known;
mod lost;

use self::absent::{caught_up, rank_of, server_of};
use self::known::recall;
use super::groups::Groups;
use super::rendezvous::{Job, name, origin, shape};
use super::waits::{Barriers, Reminder};
use super::{
    BTreeMap, BTreeSet, Duration, Exit, NodeId, NodeMessage, NodeState, Origin, Output, OverReason,
    Phase, Placement, Rank, Register, Scheduler, SchedulerMessage, Standing, counted,
};
use crate::base::{Epoch, milliseconds, word};
use crate::limits::{CORES_MAX, GONE_MAX, PARTS_MAX, SERVERS_MAX, TENSORS_MAX};
use crate::proto::messages::{Node, Planning, Roster, Shrunk, Sign};
use crate::proto::resume::{AdoptedKey, KnownTensor, Resume};
use crate::proto::text::shorten;
use crate::proto::unformed::Unformed;

/// How long ranks that have left, as servers say, may take to come: one that had nobody to say
/// good-bye to waits for this scheduler, and dials it twice a second.
const GOODBYE: Duration = Duration::from_secs(2);

/// A place in the last roster.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Seat {
    Rank(u32),
    Server(u32),
}

#[derive(Debug)]
struct Member {
    node: NodeId,
    resume: Resume,
    known: Vec<KnownTensor>,
    adopted: Vec<AdoptedKey>,
}

impl Member {
    fn new(node: NodeId, resume: Resume) -> Member {
        Member { node, resume, known: Vec::new(), adopted: Vec::new() }
    }

    fn is_whole(&self) -> bool {
        self.known.len() as u64 == self.resume.tensors
            && self.adopted.len() as u64 == self.resume.adopted
    }
}

/// Who has come so far.
#[derive(Debug)]
pub(super) struct Takeover {
    pub(super) since: Duration,
    members: BTreeMap<Seat, Member>,
    /// Ranks that have said good-bye to this scheduler meanwhile.
    left: BTreeSet<Rank>,
}

impl Takeover {
    /// What all members say alike.
    fn roster(&self) -> Option<&Roster> {
        self.members.values().next().map(|member| &member.resume.roster)
    }

    fn find(&mut self, node: NodeId) -> Option<&mut Member> {
        self.members.values_mut().find(|member| member.node == node)
    }

    fn remove(&mut self, node: NodeId) {
        self.members.retain(|_, member| member.node != node);
    }

    /// Ranks that died before, in order, as whoever knows most says.
    fn gone(&self) -> Vec<Rank> {
        let lists = self.members.values().map(|member| &member.resume.gone);
        lists.max_by_key(|list| list.len()).cloned().unwrap_or_default()
    }

    /// Ranks that have left, as far as that is known.
    fn left(&self) -> BTreeSet<Rank> {
        let told = self.members.values().flat_map(|member| &member.resume.left);
        let left = self.left.iter().chain(told).copied();
        left.filter(|rank| !self.members.contains_key(&Seat::Rank(rank.0))).collect()
    }

    /// Whether servers say of a rank that it has left, and it has neither come nor said so here.
    fn may_say_goodbye(&self) -> bool {
        let mut told = self.members.values().flat_map(|member| &member.resume.left);
        told.any(|rank| {
            !self.left.contains(rank) && !self.members.contains_key(&Seat::Rank(rank.0))
        })
    }

    /// Seats of the roster that are empty, or whose member has not said all that it knows.
    fn missing(&self) -> Vec<Seat> {
        let Some(roster) = self.roster() else { return Vec::new() };
        let (gone, left) = (self.gone(), self.left());
        let stays = |rank: &u32| !gone.contains(&Rank(*rank)) && !left.contains(&Rank(*rank));
        let ranks = (0..roster.size).filter(stays).map(Seat::Rank);
        let lost = self.lost();
        let servers = (0..word(roster.servers.len())).filter(|server| !lost.contains(server));
        let seats = ranks.chain(servers.map(Seat::Server));
        seats.filter(|seat| !self.members.get(seat).is_some_and(Member::is_whole)).collect()
    }
}

/// For whom it waits, for people.
fn named(seats: &[Seat]) -> String {
    let name = |seat: &Seat| match seat {
        Seat::Rank(rank) => Rank(*rank).to_string(),
        Seat::Server(server) => format!("server {server}"),
    };
    let names: Vec<String> = seats.iter().map(name).collect();
    names.join(", ")
}

/// What is wrong with what a member says, if anything.
fn fault(resume: &Resume, ranks_max: u32) -> Option<&'static str> {
    let roster = &resume.roster;
    let is_sized = (1..=ranks_max).contains(&roster.size) && roster.servers.len() <= SERVERS_MAX;
    let index = roster.index;
    let fits = match &resume.register.node {
        Node::Worker { .. } => index < roster.size,
        Node::Server { cores, .. } => {
            let known = roster.servers.get(index as usize);
            known.is_some_and(|known| {
                known.cores.len() == cores.len() && (1..=CORES_MAX).contains(&cores.len())
            })
        }
    };
    let is_rank = |rank: &Rank| rank.0 < roster.size;
    let are_ranks = resume.gone.iter().chain(&resume.left).all(is_rank);
    let is_bounded = resume.gone.len() <= GONE_MAX
        && resume.left.len() <= roster.size as usize
        && resume.adopted <= PARTS_MAX as u64
        && resume.tensors <= TENSORS_MAX as u64
        && resume.roster.workers.len() <= roster.size as usize
        && resume.roster.neighbours.len() <= roster.size as usize
        && resume.term < u32::MAX;
    if !is_sized || !fits {
        return Some("its roster is none that a scheduler gives");
    }
    (!are_ranks || !is_bounded || !lost::can_be(resume))
        .then_some("what it says of the job can't be")
}

impl Scheduler {
    /// A member of a job whose scheduler is lost, or was taken for lost, comes to this one.
    pub(super) fn resume(&mut self, node: NodeId, resume: Resume, now: Duration) {
        let Some(peer) = self.peers.get_mut(&node) else { return };
        let register = &resume.register;
        peer.host.clone_from(&register.host);
        (peer.pid, peer.session) = (register.pid, Some(register.session));
        peer.who = name(register);
        let is_fresh = match &self.phase {
            Phase::Forming(rendezvous) => rendezvous.regroup.is_none() && self.epoch == Epoch(1),
            Phase::Taking(_) => true,
            Phase::Running(_) | Phase::Over => false,
        };
        if !is_fresh && resume.term > self.term {
            return self.step_down(resume.term);
        }
        if let Some(refusal) = &mut self.refusal {
            refusal.told += 1;
            let reason = refusal.reason.clone();
            return self.dismiss(node, reason);
        }
        if self.is_over() {
            return;
        }
        if self.config.elastic.is_none() {
            let why = "it is of an elastic job, and this scheduler has no BPS_ELASTIC";
            return self.drop_stranger(node, why);
        }
        if !is_fresh {
            let session = register.session;
            let is_there = self.is_here(node, session);
            if is_there || resume.roster.job != self.config.job {
                let why = if is_there { "it is here already" } else { "it is of another job" };
                return self.drop_stranger(node, why);
            }
            if self.is_of_unknown_epoch(&resume) {
                return self.send_back(node, resume.roster.epoch);
            }
            return self.refuse_dead(node, &resume.register, session);
        }
        if register.release != self.config.release {
            let (has, expected) = (register.release.clone(), self.config.release.clone());
            let who = origin(register);
            return self.send_away(node, Unformed::Release { who, has, expected });
        }
        if register.encrypt != self.config.encrypt {
            let (who, has) = (origin(register), register.encrypt);
            return self.send_away(node, Unformed::Encryption { who, has });
        }
        if let Some(fault) = fault(&resume, self.config.ranks_max) {
            return self.drop_stranger(node, fault);
        }
        self.begin_takeover(&resume, now);
        self.take_in(node, resume);
    }

    /// The first member of a job has come to a scheduler that has just started.
    fn begin_takeover(&mut self, resume: &Resume, now: Duration) {
        if matches!(self.phase, Phase::Taking(_)) {
            return;
        }
        let takeover = Takeover { since: now, members: BTreeMap::new(), left: BTreeSet::new() };
        let before = std::mem::replace(&mut self.phase, Phase::Taking(Box::new(takeover)));
        self.reminder = Reminder::soon(now);
        self.put(Output::Log(format!(
            "the scheduler of term {} is lost: taking over its job of {} and {}",
            resume.term,
            counted(resume.roster.size as usize, "rank"),
            counted(resume.roster.servers.len(), "server")
        )));
        // Whoever came sooner is new, and waits to be let in; so do those that wait already because
        // they have joined later.
        let Phase::Forming(rendezvous) = before else { return };
        let early = rendezvous.workers.into_values().chain(rendezvous.servers);
        for (node, register) in early {
            if let Some(peer) = self.peers.get_mut(&node) {
                peer.standing = Standing::Early(Box::new(register));
            }
        }
        for peer in self.peers.values_mut() {
            if let Standing::Early(register) = &mut peer.standing {
                register.former = None;
            }
        }
    }

    fn take_in(&mut self, node: NodeId, resume: Resume) {
        let Phase::Taking(takeover) = &mut self.phase else { return };
        let resume = match takeover.roster() {
            Some(roster) => caught_up(&resume, roster).unwrap_or(resume),
            None => resume,
        };
        let (index, epoch) = (resume.roster.index, resume.roster.epoch);
        let (seat, standing) = match resume.register.node {
            Node::Worker { .. } => (Seat::Rank(index), Standing::Worker(Rank(index))),
            Node::Server { .. } => (Seat::Server(index), Standing::Server),
        };
        let mut stale = Vec::new();
        if let Some(roster) = takeover.roster() {
            let is_same = roster.job == resume.roster.job;
            let is_alike = roster.size == resume.roster.size
                && roster.servers == resume.roster.servers
                || roster.epoch != epoch;
            if !is_same || !is_alike {
                return self.drop_stranger(node, "others know another job");
            }
            if epoch < roster.epoch {
                // The job has gone on without it.
                stale.push((node, resume.register.clone()));
            } else if epoch > roster.epoch {
                for member in std::mem::take(&mut takeover.members).into_values() {
                    let Some(is_there) = caught_up(&member.resume, &resume.roster) else {
                        stale.push((member.node, member.resume.register));
                        continue;
                    };
                    let seat = Seat::Server(is_there.roster.index);
                    takeover.members.insert(seat, Member { resume: is_there, ..member });
                }
            }
        }
        let is_stale = stale.iter().any(|(one, _)| *one == node);
        if !is_stale {
            if let Some(other) = takeover.members.get(&seat) {
                if other.resume.register.session != resume.register.session {
                    return self.drop_stranger(node, "another node has its place");
                }
                let other = other.node;
                self.peers.remove(&other);
                self.put(Output::Close(other));
            }
            if let Some(peer) = self.peers.get_mut(&node) {
                peer.standing = standing;
            }
            let Phase::Taking(takeover) = &mut self.phase else { return };
            takeover.members.insert(seat, Member::new(node, resume));
        }
        for (node, register) in stale {
            self.refuse_dead(node, &register, register.session);
        }
    }

    /// What a member says before this scheduler leads.
    pub(super) fn hear_member(&mut self, node: NodeId, message: NodeMessage) {
        let Phase::Taking(takeover) = &mut self.phase else { return };
        let Some(member) = takeover.find(node) else { return };
        match message {
            NodeMessage::Heartbeat { .. } => self.send(node, SchedulerMessage::Heartbeat),
            NodeMessage::Known { tensors, adopted } => {
                let known = (member.known.len() + tensors.len()) as u64;
                let keys = (member.adopted.len() + adopted.len()) as u64;
                if known > member.resume.tensors || keys > member.resume.adopted {
                    return self.broke_protocol(node, "more tensors or keys than it has announced");
                }
                member.known.extend(tensors);
                member.adopted.extend(adopted);
            }
            NodeMessage::Leave { suspend: false } => {
                let index = member.resume.roster.index;
                let is_worker = matches!(member.resume.register.node, Node::Worker { .. });
                takeover.remove(node);
                if is_worker {
                    takeover.left.insert(Rank(index));
                }
                self.peers.remove(&node);
                self.put(Output::Close(node));
            }
            NodeMessage::Failed { .. } => self.lost(node, "it failed"),
            NodeMessage::Uneven(_) | NodeMessage::Tune(_) | NodeMessage::Redeclare { .. } => {
                let obstacle = "a rank asked for what only the lost one knew how to answer";
                member.resume.obstacle.get_or_insert_with(|| obstacle.to_owned());
            }
            // It says all that still holds again once it is led.
            _ => {}
        }
    }

    /// All that had come in by now was handled: to be called behind each batch of messages and
    /// ends of connections.
    ///
    /// Only then may the members of a lost scheduler be led. A scheduler that was stopped while it
    /// took them over reads first what they said, and then that they have lost patience and closed
    /// their connections. Led in between, they would be taken for dead; but they come again. Nor
    /// does an epoch form before: servers may have asked another scheduler meanwhile.
    pub fn handle_heard(&mut self, now: Duration) {
        if matches!(self.phase, Phase::Taking(_)) {
            self.clock = now;
            self.forgive(now);
            self.check_takeover(now);
        }
        if std::mem::take(&mut self.history.reads_on) {
            self.check_regroup(now);
        }
    }

    /// Whether all have come, or those that have not are given up.
    pub(super) fn check_takeover(&mut self, now: Duration) {
        let Phase::Taking(takeover) = &self.phase else { return };
        let mut missing = takeover.missing();
        let returning = self.returning(takeover);
        missing.retain(|seat| !returning.contains(seat));
        let waited = now.saturating_sub(takeover.since);
        let awaits_none = missing.is_empty() && !takeover.members.is_empty();
        let is_complete = awaits_none && (waited >= GOODBYE || !takeover.may_say_goodbye());
        if is_complete || waited >= self.takeover_wait() {
            return self.lead(now);
        }
        // Where all have gone again, nobody knows how many there were.
        let whom = match takeover.members.is_empty() {
            true => "members of the job".to_owned(),
            false => named(&missing),
        };
        if !awaits_none && self.reminder.is_due(now) {
            let text = format!("waiting for {whom} ({} s)", waited.as_secs());
            self.put(Output::Log(text.clone()));
            // Ranks between two epochs have come back as new ones, and wait for the same.
            for node in [self.members(), self.early()].concat() {
                self.send(node, SchedulerMessage::Waiting { text: text.clone() });
            }
        }
    }

    /// Leads the job from now on. Members that have not come count as dead.
    fn lead(&mut self, now: Duration) {
        let Phase::Taking(takeover) = std::mem::replace(&mut self.phase, Phase::Over) else {
            return;
        };
        let mut takeover = *takeover;
        self.refuse_lost(&mut takeover);
        let mut missing = takeover.missing();
        let waited = now.saturating_sub(takeover.since);
        for seat in &missing {
            // One that has not said all that it knows.
            if let Some(member) = takeover.members.remove(seat) {
                self.peers.remove(&member.node);
                self.put(Output::Close(member.node));
            }
        }
        let returning = self.returning(&takeover);
        missing.retain(|seat| !returning.contains(seat));
        let terms = takeover.members.values().map(|member| member.resume.term);
        self.term = terms.max().unwrap_or(self.term) + 1;
        let has_rank = takeover.members.keys().any(|seat| matches!(seat, Seat::Rank(_)));
        let Some(planning) = self.planning(&takeover) else {
            return self.end_without_ranks(&takeover);
        };
        let mut obstacle = self.adopt(&takeover, has_rank, planning, now);
        if !returning.is_empty() {
            obstacle.get_or_insert_with(|| format!("{} was about to come back", named(&returning)));
        }
        let Phase::Running(running) = &self.phase else { return };
        let line = format!(
            "term {}: {} and {} of epoch {} are led by this scheduler after {:.3} s, {} known",
            self.term,
            counted(running.job.workers.len() - running.left.len(), "rank"),
            counted(running.servers_left() as usize, "server"),
            self.epoch.0,
            waited.as_secs_f64(),
            counted(running.registry.count(), "tensor")
        );
        let change = self.changed(&line, Duration::ZERO); // Training went on meanwhile.
        let term = self.term;
        for node in takeover.members.values().map(|member| member.node) {
            self.send(node, SchedulerMessage::Resumed { term });
        }
        self.tell_gone(&takeover);
        if let Some(obstacle) = obstacle {
            let (who, round) = (Origin::scheduler(), None);
            let message =
                format!("it was lost, and the next one can't go on as it was: {obstacle}");
            self.end(OverReason::Failed { who, message, round }, None);
        }
        self.resume_moves(change);
        self.bury_missing(&missing, waited, now);
        if matches!(self.phase, Phase::Running(_)) {
            self.tell_newcomers();
            self.finish_if_all_left(now);
        }
    }

    /// The lost scheduler may have told some members of a death, and not the others.
    fn tell_gone(&mut self, takeover: &Takeover) {
        let gone = takeover.gone();
        let lacks = |member: &&Member| member.resume.gone.len() < gone.len();
        for node in takeover.members.values().filter(lacks).map(|member| member.node) {
            let ranks: Vec<String> = gone.iter().map(Rank::to_string).collect();
            let text = format!("the job goes on without {}", ranks.join(", "));
            self.send(node, SchedulerMessage::Shrunk(Shrunk { gone: gone.clone(), text }));
        }
    }

    /// All that is left of the job has gone in good order.
    fn finish_if_all_left(&mut self, now: Duration) {
        let Phase::Running(running) = &self.phase else { return };
        if running.left.len() >= running.job.workers.len() {
            self.end(OverReason::Finished, None);
        } else {
            self.check_stalls(now);
        }
    }

    /// There is nobody to lead but servers.
    fn end_without_ranks(&mut self, takeover: &Takeover) {
        let size = takeover.roster().map_or(0, |roster| roster.size as usize);
        let left = takeover.left();
        if !left.is_empty() && left.len() + takeover.gone().len() >= size {
            return self.end_after_takeover(OverReason::Finished);
        }
        let (who, round) = (Origin::scheduler(), None);
        let message = "it was lost, and no rank has come to the next one".to_owned();
        let reason = Box::new(OverReason::Failed { who, message, round });
        self.end_after_takeover(OverReason::TooFew { reason, left: "no worker left".to_owned() });
    }

    /// `end_job` takes a job that is over for one whose end was told.
    fn end_after_takeover(&mut self, reason: OverReason) {
        let takeover =
            Takeover { since: self.clock, members: BTreeMap::new(), left: BTreeSet::new() };
        self.phase = Phase::Taking(Box::new(takeover));
        self.end_job(reason, None);
    }

    /// Makes the running job of what its members know. Returns why it can't go on so, if it can't.
    fn adopt(
        &mut self,
        takeover: &Takeover,
        has_rank: bool,
        mut planning: Planning,
        now: Duration,
    ) -> Option<String> {
        let roster = takeover.roster().cloned();
        let is_tuned = !planning.tuning.is_off();
        if self.config.placement != Placement::Balanced {
            planning.placement = self.config.placement;
            planning.built_in_coefficient = self.config.built_in_coefficient;
        }
        let (mut workers, mut servers) = (Vec::new(), Vec::new());
        if let Some(roster) = &roster {
            let ranks = if has_rank { roster.size } else { 0 };
            workers.extend((0..ranks).map(|rank| rank_of(takeover, rank)));
            servers.extend((0..word(roster.servers.len())).map(|at| server_of(takeover, at)));
            self.config.job.clone_from(&roster.job);
            self.keep_rules(roster);
        }
        let hosts: BTreeSet<&str> = workers
            .iter()
            .map(|(_, worker): &(NodeId, Register)| worker.host_id.as_str())
            .collect();
        let shapes: Vec<_> = servers.iter().map(|(_, server)| shape(server, &hosts)).collect();
        let hosts = workers.iter().map(|(_, worker)| worker.host_id.as_str());
        let groups = Groups::planned(&planning, hosts);
        let job = Job { workers, servers, planning, shapes, groups };
        let resets = takeover.members.values().filter_map(|member| member.resume.reset);
        let reset = resets.max();
        let epoch = roster.map_or(self.epoch, |roster| roster.epoch);
        self.epoch = epoch.max(reset.unwrap_or(epoch));
        self.history.taken = Some(epoch);
        self.next_install = u64::from(self.term) << 32;
        let mut running = self.run(job);
        let mut obstacle = takeover.members.values().find_map(|one| one.resume.obstacle.clone());
        obstacle = obstacle.or(is_tuned.then(|| "the job tunes itself".to_owned()));
        obstacle = obstacle.or(reset.map(|_| "an epoch was about to form".to_owned()));
        obstacle = obstacle.or((!has_rank).then(|| "its ranks were about to come back".to_owned()));
        let shrinks = self.config.elastic.as_ref().is_some_and(|elastic| elastic.shrinks);
        let recalled = recall(&mut running, takeover, shrinks, now);
        obstacle = obstacle.or(recalled.err());
        let passed = takeover.members.iter().filter_map(|(seat, member)| match seat {
            Seat::Rank(rank) => Some((Rank(*rank), member.resume.barriers)),
            Seat::Server(_) => None,
        });
        let passed: Vec<_> = passed.collect();
        running.barriers = Barriers::again(running.job.size(), &passed, takeover.left());
        if has_rank {
            for rank in takeover.gone() {
                running.lose(rank);
            }
            running.left.extend(takeover.left());
        }
        self.phase = Phase::Running(Box::new(running));
        self.note_lanes(takeover);
        obstacle.map(|why| shorten(&why))
    }

    /// Those that have not come are dead, each as if its connection had fallen silent.
    fn bury_missing(&mut self, missing: &[Seat], waited: Duration, now: Duration) {
        for seat in missing {
            let Phase::Running(running) = &self.phase else { return };
            let (standing, found) = match *seat {
                Seat::Rank(rank) => {
                    let found = running.job.workers.get(rank as usize);
                    (Standing::Worker(Rank(rank)), found)
                }
                Seat::Server(server) => {
                    (Standing::Server, running.job.servers.get(server as usize))
                }
            };
            let Some((node, register)) = found else { continue };
            let peer = NodeState {
                standing,
                host: register.host.clone(),
                pid: register.pid,
                who: name(register),
                ..NodeState::connected(now)
            };
            let node = *node;
            self.peers.insert(node, peer);
            let reason = self.death(node, Sign::Silent { milliseconds: milliseconds(waited) });
            // Nobody is at its other end who could be told.
            self.peers.remove(&node);
            if let Some(reason) = reason {
                self.end(reason, None);
            }
        }
    }

    /// A later scheduler leads the job: nobody is told anything, since nobody is led by this one.
    pub(super) fn step_down(&mut self, term: u32) {
        self.end_unheard(format!(
            "a scheduler of term {term} leads this job: this one, of term {}, was taken for lost \
             and ends",
            self.term
        ));
    }

    /// Members look for another scheduler once their connections end without a word.
    pub(super) fn end_unheard(&mut self, line: String) {
        self.put(Output::Log(line));
        for node in std::mem::take(&mut self.peers).into_keys() {
            self.put(Output::Close(node));
        }
        self.phase = Phase::Over;
        self.put(Output::Done(Exit::Failed));
    }
}
