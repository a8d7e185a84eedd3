//! Paths between members: lanes that broke, and bytes that were sent and do not arrive.
//!
//! A worker knows what it has sent and not got back, a server what it has received and published;
//! only both together tell a slow rank from a path that loses packets. Invariant: a member is
//! blamed for a lost lane only if the scheduler does not hear it either.

use super::registry::Registry;
use super::{
    Duration, NodeId, Output, OverReason, Phase, Rank, Scheduler, SchedulerMessage, Standing,
};
use crate::base::{Key, milliseconds};
use crate::proto::messages::{Origin, Party, Place, Stall};
use crate::proto::paths::{
    AwaitedKey, End, KeyState, LaneFault, Leg, Member, PATH_KEYS_MAX, PATHS_MAX, PathLoss,
    PathStall,
};
use crate::proto::text::shorten;
use std::collections::{BTreeMap, BTreeSet};

/// How long after a lane the end of one of its processes may come: that explains it.
const GRACE: Duration = Duration::from_millis(500);
/// How often servers are asked about keys that somebody waits for.
const ASK: Duration = Duration::from_millis(500);
/// How often a stall is told again while it lasts.
const REPEAT: Duration = Duration::from_secs(10);
/// Lost lanes that wait for a verdict at most: the first is what everybody is told.
const LOSSES_MAX: usize = 64;

struct Loss {
    from: NodeId,
    to: NodeId,
    fault: LaneFault,
    at: Duration,
}

/// What members say of their lanes, and what everybody was told of it.
#[derive(Default)]
pub(super) struct Paths {
    losses: Vec<Loss>,
    /// What each rank waits for, and when it said so.
    awaited: BTreeMap<Rank, (Vec<AwaitedKey>, Duration)>,
    /// What servers answered, and when.
    states: BTreeMap<Key, (KeyState, Duration)>,
    /// Since when servers are asked about each key.
    inquired: BTreeMap<Key, Duration>,
    asked: Duration,
    /// Bytes that are late, though perhaps not for long enough to tell people.
    suspects: Vec<PathStall>,
    stalls: Vec<PathStall>,
    told: BTreeSet<(Rank, u32, Leg)>,
    told_at: Duration,
}

impl Paths {
    /// A rank has left: it waits for nothing.
    pub(super) fn forget(&mut self, rank: Rank) {
        self.awaited.remove(&rank);
    }

    /// A rank has died: so did its lanes, and whatever was on them.
    pub(super) fn lose(&mut self, rank: Rank, node: NodeId) {
        self.forget(rank);
        self.losses.retain(|one| one.from != node && one.to != node);
        self.suspects.retain(|one| one.rank != rank);
        self.stalls.retain(|one| one.rank != rank);
    }

    /// A server is lost, and its lanes with it: what was waited for comes from another.
    pub(super) fn lose_server(&mut self, server: u32, node: NodeId) {
        self.losses.retain(|one| one.from != node && one.to != node);
        for (keys, _) in self.awaited.values_mut() {
            keys.retain(|key| key.server != server);
        }
        self.suspects.retain(|one| one.server != server);
        self.stalls.retain(|one| one.server != server);
    }

    /// Whether bytes are known to be late.
    pub(super) fn is_stalled(&self) -> bool {
        !self.suspects.is_empty()
    }

    /// What people were told of bytes that are late, the oldest first.
    pub(super) fn stalls(&self) -> &[PathStall] {
        &self.stalls
    }

    /// Takes a rank out of those that a round waits for, where it waits itself for bytes of an
    /// earlier round, or the round's own, that are lost on their way.
    pub(super) fn excuse(&self, stalls: &mut Vec<Stall>) {
        stalls.retain_mut(|stall| {
            let is_held_up = |rank: &Rank| {
                self.suspects.iter().any(|one| {
                    one.rank == *rank && one.name == stall.name && one.round <= stall.round
                })
            };
            let before = stall.missing.len();
            stall.missing.retain(|rank| !is_held_up(rank));
            before == 0 || !stall.missing.is_empty()
        });
    }

    /// The keys to ask each server about now.
    fn questions(&mut self, now: Duration) -> BTreeMap<u32, Vec<Key>> {
        let mut questions: BTreeMap<u32, Vec<Key>> = BTreeMap::new();
        if self.awaited.is_empty() || now.saturating_sub(self.asked) < ASK {
            return questions;
        }
        self.asked = now;
        for key in self.awaited.values().flat_map(|(keys, _)| keys) {
            let keys = questions.entry(key.server).or_default();
            if keys.len() < PATH_KEYS_MAX && !keys.contains(&key.key) {
                keys.push(key.key);
            }
        }
        let awaited: BTreeSet<Key> = questions.values().flatten().copied().collect();
        self.states.retain(|key, _| awaited.contains(key));
        self.inquired.retain(|key, _| awaited.contains(key));
        for key in awaited {
            self.inquired.entry(key).or_insert(now);
        }
        questions
    }

    /// One stall for each path and direction, the oldest first.
    fn find_stalls(&mut self, registry: &Registry, report_ms: u64, now: Duration) {
        let now_ms = milliseconds(now);
        let mut found: BTreeMap<(Rank, u32, Leg), PathStall> = BTreeMap::new();
        for (&rank, (keys, said)) in &self.awaited {
            for key in keys {
                // A key that no registry gave is the rank's mistake, and nothing to tell people.
                let Some(name) = registry.name_of(key.key) else { continue };
                let heard = Heard {
                    awaited: key,
                    said_ms: milliseconds(*said),
                    state: self.states.get(&key.key).map(|(state, at)| (state, milliseconds(*at))),
                    asked_ms: self.inquired.get(&key.key).map_or(now_ms, |at| milliseconds(*at)),
                };
                let judged = heard.judge(rank, report_ms, now_ms);
                let is_late = |(_, late_ms): &(Leg, u64)| *late_ms >= report_ms / 2;
                let Some((leg, waited_ms)) = judged.filter(is_late) else { continue };
                let round = registry.round_of(key.key, key.round);
                let name = name.to_owned();
                let stall = PathStall { rank, server: key.server, leg, name, round, waited_ms };
                let known = found.entry((rank, key.server, leg)).or_insert_with(|| stall.clone());
                if known.waited_ms < stall.waited_ms {
                    *known = stall;
                }
            }
        }
        // Clocks are read at different times: what was told stays, until it has arrived.
        let is_told = |stall: &PathStall| {
            stall.waited_ms >= report_ms
                || self.told.contains(&(stall.rank, stall.server, stall.leg))
        };
        self.suspects = found.into_values().collect();
        self.stalls = self.suspects.iter().filter(|stall| is_told(stall)).cloned().collect();
        self.stalls.sort_by_key(|stall| std::cmp::Reverse(stall.waited_ms));
        self.stalls.truncate(PATHS_MAX);
    }

    /// Whether to tell people: the paths have changed, or it has lasted a while.
    fn is_news(&mut self, now: Duration) -> bool {
        let set: BTreeSet<_> =
            self.stalls.iter().map(|stall| (stall.rank, stall.server, stall.leg)).collect();
        let lasts = !set.is_empty() && now.saturating_sub(self.told_at) >= REPEAT;
        if set == self.told && !lasts {
            return false;
        }
        (self.told, self.told_at) = (set, now);
        true
    }
}

/// What both ends of a path last said about a key, and when it was heard. Milliseconds by the
/// scheduler's clock.
struct Heard<'a> {
    awaited: &'a AwaitedKey,
    /// When the rank said that it waits.
    said_ms: u64,
    /// What the server answered, and when.
    state: Option<(&'a KeyState, u64)>,
    /// Since when the server is asked.
    asked_ms: u64,
}

impl Heard<'_> {
    /// On which leg the bytes are late, and for how long, by what was heard: the end that they go
    /// to may have them since it last spoke.
    fn judge(&self, rank: Rank, report_ms: u64, now_ms: u64) -> Option<(Leg, u64)> {
        let waited_ms = self.awaited.waited_ms;
        match self.state {
            Some((state, at_ms)) if now_ms.saturating_sub(at_ms) < report_ms => {
                if state.published >= self.awaited.round {
                    // From the publication to the rank's word, or till now where it speaks no more.
                    let is_silent =
                        now_ms.saturating_sub(self.said_ms) >= report_ms.saturating_mul(2);
                    let known_ms = if is_silent { now_ms } else { self.said_ms };
                    let waited_ms = waited_ms.saturating_add(known_ms - self.said_ms);
                    let since_ms = state.published_ms.saturating_add(known_ms);
                    Some((Leg::Result, waited_ms.min(since_ms.saturating_sub(at_ms))))
                } else {
                    // If it has arrived, the round waits for others: its server tells for whom.
                    // Else: from the contribution to the server's word.
                    let since_ms = waited_ms.saturating_add(at_ms).saturating_sub(self.said_ms);
                    state.missing.contains(&rank).then_some((Leg::Contribution, since_ms))
                }
            }
            // A server has a report's time to answer.
            _ => {
                let waited_ms = waited_ms.saturating_add(now_ms.saturating_sub(self.said_ms));
                let asked_ms = now_ms.saturating_sub(self.asked_ms);
                (waited_ms >= report_ms.saturating_mul(2) && asked_ms >= report_ms)
                    .then_some((Leg::Unknown, waited_ms))
            }
        }
    }
}

impl Scheduler {
    /// A member says that a lane of its closed.
    pub(super) fn lane_lost(&mut self, from: NodeId, to: End, fault: LaneFault, now: Duration) {
        let Phase::Running(running) = &mut self.phase else { return };
        let peer = match to {
            End::Rank(rank) => running.job.workers.get(rank.0 as usize),
            End::Server(index) => running.job.servers.get(index as usize),
        };
        let to_end = to;
        let Some(&(to, _)) = peer.filter(|(to, _)| *to != from) else {
            return self.broke_protocol(from, "a lane to a node that is not there");
        };
        let is_told = match to_end {
            End::Rank(rank) => running.gone.contains(&rank),
            End::Server(index) => running.moving.is_lost(index),
        };
        if is_told {
            // Its death was told, and explains it.
            return;
        }
        let fault = match fault {
            LaneFault::Error(text) => LaneFault::Error(shorten(&text)),
            fault => fault,
        };
        if running.paths.losses.len() < LOSSES_MAX {
            running.paths.losses.push(Loss { from, to, fault, at: now });
        }
    }

    /// What a rank waits for, though it has sent its parts.
    pub(super) fn awaits(&mut self, rank: Rank, mut keys: Vec<AwaitedKey>, now: Duration) {
        let Phase::Running(running) = &mut self.phase else { return };
        keys.truncate(PATH_KEYS_MAX);
        if keys.is_empty() {
            running.paths.awaited.remove(&rank);
        } else {
            running.paths.awaited.insert(rank, (keys, now));
        }
        self.check_paths(now);
    }

    /// How far a server is.
    pub(super) fn key_states(&mut self, mut keys: Vec<KeyState>, now: Duration) {
        let Phase::Running(running) = &mut self.phase else { return };
        keys.truncate(PATH_KEYS_MAX);
        running.paths.states.extend(keys.into_iter().map(|state| (state.key, (state, now))));
        self.check_paths(now);
    }

    /// Judges lost lanes, and tells of bytes that do not arrive.
    pub(super) fn check_paths(&mut self, now: Duration) {
        if let Some(reason) = self.deserted(now) {
            return self.end(reason, None);
        }
        if let Some(loss) = self.path_loss(now) {
            return self.end(OverReason::PathLost(loss), None);
        }
        let report_ms = milliseconds(self.config.stall_report);
        let limit_ms = milliseconds(self.config.stall_timeout);
        let Phase::Running(running) = &mut self.phase else { return };
        let questions = running.paths.questions(now);
        running.paths.find_stalls(&running.registry, report_ms, now);
        let stalls = running.paths.stalls.clone();
        let is_news = running.paths.is_news(now);
        let is_there = |index: u32| !running.moving.is_lost(index);
        let server = |index: u32| {
            let found = running.job.servers.get(index as usize).filter(|_| is_there(index));
            found.map(|(node, _)| *node)
        };
        let questions: Vec<(NodeId, Vec<Key>)> = questions
            .into_iter()
            .filter_map(|(index, keys)| Some((server(index)?, keys)))
            .collect();
        let ends = stalls.iter().flat_map(|it| [End::Rank(it.rank), End::Server(it.server)]);
        let members = running.job.members(ends);
        for (node, keys) in questions {
            self.send(node, SchedulerMessage::Inquire { keys });
        }
        if stalls.iter().any(|stall| stall.waited_ms >= limit_ms) {
            return self.end(OverReason::PathStalled { stalls, members }, None);
        }
        if !is_news {
            return;
        }
        for stall in &stalls {
            self.put(Output::Log(stall.to_string()));
        }
        for node in self.members() {
            self.send(node, SchedulerMessage::PathStall { stalls: stalls.clone() });
        }
    }

    /// A rank that told the scheduler good-bye, but not its neighbours: it closed its lanes with a
    /// round under way, which nobody can finish now.
    fn deserted(&self, now: Duration) -> Option<OverReason> {
        let Phase::Running(running) = &self.phase else { return None };
        let rank_of = |node| running.job.workers.iter().position(|(worker, _)| *worker == node);
        let is_ripe =
            |one: &&Loss| now.saturating_sub(one.at) >= GRACE && rank_of(one.from).is_some();
        let left = running.paths.losses.iter().filter(is_ripe).find_map(|one| {
            let rank = Rank(u32::try_from(rank_of(one.to)?).ok()?);
            running.left.contains(&rank).then_some(rank)
        })?;
        let message = "it shut down while a push_pull of others was under way: let every rank \
                       make the same steps, and synchronize them, before it shuts down";
        let (_, peer) = running.job.workers.get(left.0 as usize)?;
        let place = Some(Place { host: peer.host.clone(), pid: peer.pid });
        let who = Origin { party: Party::Rank(left), place };
        Some(OverReason::Failed { who, message: message.into(), round: None })
    }

    /// The first lost lane whose ends are both well: neither has ended in the time that the news of
    /// it may take, and both were heard since.
    fn path_loss(&mut self, now: Duration) -> Option<PathLoss> {
        let Phase::Running(running) = &mut self.phase else { return None };
        let member = |node: &NodeId| {
            let stays = |peer: &&super::NodeState| {
                matches!(peer.standing, Standing::Worker(_) | Standing::Server)
            };
            self.peers.get(node).filter(stays)
        };
        // Whoever has left in good order needs no lane; who lost one to it may (`deserted`).
        running.paths.losses.retain(|one| member(&one.from).is_some());
        let is_ripe = |one: &&Loss| {
            now.saturating_sub(one.at) >= GRACE
                && member(&one.to).is_some_and(|peer| peer.heard > one.at)
        };
        let loss = running.paths.losses.iter().find(is_ripe)?;
        let waited_ms = milliseconds(now.saturating_sub(loss.at));
        let (from, to, fault) = (loss.from, loss.to, loss.fault.clone());
        let (from, to) = (self.named(from)?, self.named(to)?);
        Some(PathLoss { from, to, fault, waited_ms })
    }

    /// A member of a running job.
    fn named(&self, node: NodeId) -> Option<Member> {
        let Phase::Running(running) = &self.phase else { return None };
        let peer = self.peers.get(&node)?;
        let end = match peer.standing {
            Standing::Worker(rank) => End::Rank(rank),
            Standing::Server => End::Server(running.server(node)?),
            _ => return None,
        };
        Some(Member { end, host: peer.host.clone(), pid: peer.pid })
    }

    /// Those of the job that have not left.
    pub(super) fn members(&self) -> Vec<NodeId> {
        let is_member =
            |standing: &Standing| matches!(standing, Standing::Worker(_) | Standing::Server);
        let members = self.peers.iter().filter(|(_, peer)| is_member(&peer.standing));
        members.map(|(node, _)| *node).collect()
    }
}
