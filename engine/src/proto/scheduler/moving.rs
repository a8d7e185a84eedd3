//! An epoch that goes on without servers that are lost (`BPS_ELASTIC=shrink`): their keys move to
//! those that are left, as [`moving`](crate::proto::moving) says.
//!
//! Where ranks of a host sum among themselves, the owners of parts say of these what ranks say of
//! all parts elsewhere: an owner contributes once all of its host have had the last result.
//!
//! Invariant: nobody contributes to a key that is nowhere, so what the ranks have said of it holds
//! until they are told where it is. It is at the round that the rank which has had most results has
//! had, or behind it if all have. Before that, a further death has the ranks that are left decide
//! anew; after it, a rank that alone can give a result which others lack can't be spared until a
//! server has that.

use super::registry::Reached;
use super::{
    BTreeMap, BTreeSet, Duration, NodeId, Output, OverReason, Phase, Rank, Running, Scheduler,
    SchedulerMessage, Standing, counted,
};
use crate::base::{CoreId, Key, milliseconds, word};
use crate::proto::messages::{Origin, Party, Place, Register};
use crate::proto::moving::{
    ADOPTED_KEYS_MAX, HeldKey, MOVED_KEYS_MAX, MovedKey, MovingOrder, MovingReport,
};

/// Keys of servers that are lost, and where that stands.
#[derive(Debug, Default)]
pub(super) struct Moving {
    /// Servers that are lost, in order.
    pub(super) lost: Vec<u32>,
    /// While keys are nowhere.
    under_way: Option<UnderWay>,
    /// Keys that are to be restored, and who can give their results.
    pub(super) restoring: BTreeMap<Key, BTreeSet<Rank>>,
    /// Keys that are nowhere for some ranks only: an earlier scheduler has moved them.
    pub(super) kept: BTreeMap<Key, Kept>,
}

/// A key that a server has adopted under an earlier scheduler, which was lost before all ranks were
/// told. It stays there, since some rank may have contributed to it; and it stands as that
/// scheduler had decided, since what ranks say of it has not changed.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) core: CoreId,
    /// As in [`Adopted`](crate::proto::moving::Adopted).
    pub(super) rounds: u64,
    pub(super) restores: bool,
    /// Ranks that were told.
    pub(super) aware: BTreeSet<Rank>,
    /// Of these, those that can give the result which others lack.
    pub(super) holders: BTreeSet<Rank>,
}

#[derive(Debug)]
struct UnderWay {
    /// Why the last of the servers is lost.
    reason: OverReason,
    since: Duration,
    /// Of the change that this is.
    change: u64,
    /// The servers were lost under an earlier scheduler.
    is_inherited: bool,
    held: BTreeMap<Rank, Vec<HeldKey>>,
    /// What servers have not answered.
    adopting: BTreeSet<(u32, u64)>,
    /// What was decided of keys that some rank knows.
    decided: BTreeMap<Key, Reached>,
    holders: BTreeMap<Key, BTreeSet<Rank>>,
}

impl UnderWay {
    fn new(reason: OverReason, since: Duration, change: u64) -> UnderWay {
        UnderWay {
            reason,
            since,
            change,
            is_inherited: false,
            held: BTreeMap::new(),
            adopting: BTreeSet::new(),
            decided: BTreeMap::new(),
            holders: BTreeMap::new(),
        }
    }

    /// It is to be decided where the keys stand, perhaps once more.
    fn reopen(&mut self) {
        self.adopting.clear();
        self.decided.clear();
        self.holders.clear();
    }

    /// Where the keys stand, as the ranks say; or a key of which a result is lost.
    fn decide(&mut self, kept: &BTreeMap<Key, Kept>) -> Result<(), Key> {
        self.reopen();
        let mut said: BTreeMap<Key, Vec<(Rank, HeldKey)>> = BTreeMap::new();
        for (&rank, keys) in &self.held {
            for &held in keys {
                said.entry(held.key).or_default().push((rank, held));
            }
        }
        for (&key, one) in kept {
            let said = said.remove(&key).unwrap_or_default();
            let (said, next) = (
                || said.iter().filter(|(rank, _)| !one.aware.contains(rank)),
                one.rounds.saturating_add(1),
            );
            let fits =
                |held: &HeldKey| held.rounds == one.rounds || one.restores && held.rounds == next;
            let has = |held: &HeldKey| held.rounds == next && held.holds;
            let others = said().filter(|(_, held)| has(held)).map(|(rank, _)| *rank);
            let holders: BTreeSet<Rank> = others.chain(one.holders.iter().copied()).collect();
            if !said().all(|(_, held)| fits(held)) || one.restores && holders.is_empty() {
                return Err(key);
            }
            if one.restores {
                self.holders.insert(key, holders);
            }
            self.decided.insert(key, Reached { rounds: one.rounds, restores: one.restores });
        }
        for (key, said) in said {
            let most = said.iter().map(|(_, held)| held.rounds).max().unwrap_or(0);
            let least = said.iter().map(|(_, held)| held.rounds).min().unwrap_or(0);
            let restores = least < most;
            if restores {
                let has = |(_, held): &&(Rank, HeldKey)| held.rounds == most && held.holds;
                let holders: BTreeSet<Rank> =
                    said.iter().filter(has).map(|(rank, _)| *rank).collect();
                if holders.is_empty() || least + 1 < most {
                    return Err(key);
                }
                self.holders.insert(key, holders);
            }
            self.decided.insert(key, Reached { rounds: least, restores });
        }
        Ok(())
    }
}

impl Moving {
    /// Whether a server is lost, and the epoch goes on without it.
    pub(super) fn is_lost(&self, server: u32) -> bool {
        self.lost.contains(&server)
    }

    /// How many are.
    pub(super) fn lost(&self) -> usize {
        self.lost.len()
    }

    /// Whether these ranks alone can give a result that others lack.
    pub(super) fn needs(&self, ranks: &[Rank]) -> bool {
        let are_alone = |holders: &BTreeSet<Rank>| {
            !holders.is_empty() && holders.iter().all(|rank| ranks.contains(rank))
        };
        self.restoring.values().any(are_alone)
    }
}

/// The node as verdicts name a server.
fn served(server: u32, register: &Register) -> Origin {
    let place = Place { host: register.host.clone(), pid: register.pid };
    Origin { party: Party::Server(server), place: Some(place) }
}

/// Why keys can't move once a rank has left.
pub(super) const HAS_LEFT: &str = "a rank has shut down, and perhaps had results that others lack";

/// The server that is lost for this reason, if it is one.
fn lost(reason: &OverReason) -> Option<u32> {
    let (OverReason::Died { who, .. } | OverReason::Failed { who, .. } | OverReason::Left { who }) =
        reason
    else {
        return None;
    };
    match who.party {
        Party::Server(server) => Some(server),
        _ => None,
    }
}

impl Scheduler {
    /// Goes on without the server that is lost, if the epoch can; says whether it does.
    pub(super) fn move_keys(&mut self, reason: &OverReason, culprit: Option<NodeId>) -> bool {
        if !self.config.elastic.as_ref().is_some_and(|elastic| elastic.shrinks) {
            return false;
        }
        let (Phase::Running(running), Some(server)) = (&self.phase, lost(reason)) else {
            return false;
        };
        let why = running.pinned(server).or_else(|| self.pinned().map(str::to_owned));
        if let Some(why) = why {
            let line = format!("the keys of server {server} can't move: {why}");
            self.put(Output::Log(line));
            return false;
        }
        if let Some(node) = culprit {
            self.expel(node, reason);
        }
        self.lose_server(server, reason);
        true
    }

    /// Whether keys of this server can move now, and none are on their way.
    pub(super) fn can_move(&self, node: NodeId) -> bool {
        let shrinks = self.config.elastic.as_ref().is_some_and(|elastic| elastic.shrinks);
        let Phase::Running(running) = &self.phase else { return false };
        let is_pinned = |server| running.pinned(server).is_some() || self.pinned().is_some();
        let moving = &running.moving;
        let is_calm = moving.under_way.is_none() && moving.restoring.is_empty();
        shrinks && is_calm && running.server(node).is_some_and(|server| !is_pinned(server))
    }

    /// Why no server can be done without now, if so.
    fn pinned(&self) -> Option<&'static str> {
        let Phase::Running(running) = &self.phase else { return None };
        let mut workers = (0..).map(Rank).zip(&running.job.workers);
        let opens_lanes = |(rank, (node, _)): (Rank, &(NodeId, Register))| {
            let has_lanes = self.peers.get(node).is_some_and(|peer| peer.has_lanes);
            !has_lanes && !running.left.contains(&rank)
        };
        // It could not open those to the server, and would fail.
        workers.any(opens_lanes).then_some("a rank opens its lanes")
    }

    /// Takes a server out, and asks the ranks how far they are with its keys.
    fn lose_server(&mut self, server: u32, reason: &OverReason) {
        let now = self.clock;
        let Phase::Running(running) = &mut self.phase else { return };
        let Some((node, register)) = running.job.servers.get(server as usize) else { return };
        let (node, who) = (*node, served(server, register));
        if !matches!(reason, OverReason::Left { .. }) {
            self.history.bury(Some(register.session), who);
        }
        running.stalls.lose_server(server);
        running.paths.lose_server(server, node);
        running.registry.lose_server(server, now);
        let moving = &mut running.moving;
        moving.lost.push(server);
        // Of those that are nowhere again, the ranks say anew who has their results.
        let registry = &running.registry;
        moving.restoring.retain(|key, _| !registry.is_homeless(*key));
        moving.kept.retain(|_, kept| kept.core.server != server);
        moving.under_way = Some(UnderWay::new(reason.clone(), now, 0));
        let (all, lost) = (running.job.servers.len(), moving.lost.clone());
        let left = counted(all - lost.len(), "server");
        let go = if all - lost.len() == 1 { "goes" } else { "go" };
        let text = format!("{left} of {all} {go} on without server {server}: {reason}");
        let change = self.changed(&text, Duration::ZERO);
        if let Phase::Running(running) = &mut self.phase
            && let Some(under_way) = &mut running.moving.under_way
        {
            under_way.change = change;
        }
        for node in self.members() {
            let order = MovingOrder::Lost { servers: lost.clone(), text: text.clone() };
            self.send(node, SchedulerMessage::Moving(order));
        }
    }

    /// Servers were lost under an earlier scheduler: each rank says how far it is with keys that it
    /// knows to be nowhere, if there are any. `change` is that of this scheduler's beginning.
    pub(super) fn resume_moves(&mut self, change: u64) {
        let now = self.clock;
        let Phase::Running(running) = &mut self.phase else { return };
        let servers = running.moving.lost.clone();
        let Some(&last) = servers.last() else { return };
        let who = served(last, &running.job.servers[last as usize].1);
        let message = "it was lost under an earlier scheduler".to_owned();
        let reason = OverReason::Failed { who, message, round: None };
        let under_way = UnderWay { is_inherited: true, ..UnderWay::new(reason, now, change) };
        running.moving.under_way = Some(under_way);
        let names: Vec<String> = servers.iter().map(|server| format!("server {server}")).collect();
        let text = format!("the job goes on without {}", names.join(", "));
        for node in self.members() {
            let order = MovingOrder::Lost { servers: servers.clone(), text: text.clone() };
            self.send(node, SchedulerMessage::Moving(order));
        }
    }

    /// What a rank or a server says of keys that move.
    pub(super) fn moving_says(&mut self, node: NodeId, said: MovingReport) {
        let Phase::Running(running) = &mut self.phase else { return };
        match (self.peers.get(&node).map(|peer| &peer.standing), said) {
            (Some(&Standing::Worker(rank)), MovingReport::Held { lost, mut keys }) => {
                // What was said before another server was lost is said again.
                let is_due = lost as usize == running.moving.lost.len();
                let Some(under_way) = running.moving.under_way.as_mut().filter(|_| is_due) else {
                    return;
                };
                keys.truncate(MOVED_KEYS_MAX);
                under_way.held.insert(rank, keys);
                self.decide_moves();
            }
            (Some(Standing::Server), MovingReport::Restored { keys }) => {
                let moving = &mut running.moving;
                for key in keys {
                    moving.restoring.remove(&key);
                    if let Some(kept) = moving.kept.get_mut(&key).filter(|kept| kept.restores) {
                        // Whoever had not been told is dead.
                        (kept.rounds, kept.restores) = (kept.rounds.saturating_add(1), false);
                    }
                    if let Some(under_way) = &mut moving.under_way {
                        under_way.holders.remove(&key);
                    }
                }
            }
            _ => self.broke_protocol(node, "a report on keys that is not its to make"),
        }
    }

    /// A rank that has died is asked nothing more.
    pub(super) fn lose_holder(&mut self, rank: Rank) {
        let Phase::Running(running) = &mut self.phase else { return };
        for holders in running.moving.restoring.values_mut() {
            holders.remove(&rank);
        }
        for kept in running.moving.kept.values_mut() {
            kept.aware.remove(&rank);
            kept.holders.remove(&rank);
        }
        if let Some(under_way) = &mut running.moving.under_way {
            under_way.held.remove(&rank);
            under_way.reopen();
            self.decide_moves();
        }
    }

    /// A rank has left, perhaps before it has said how far it is.
    pub(super) fn leave_moves(&mut self, rank: Rank) {
        let Phase::Running(running) = &self.phase else { return };
        let Running { registry, moving, .. } = &**running;
        let has_said = |under_way: &UnderWay| under_way.held.contains_key(&rank);
        if moving.under_way.as_ref().is_none_or(has_said) {
            return;
        }
        let is_settled = registry.homeless_keys().all(|key| moving.kept.contains_key(&key));
        if is_settled {
            // Nothing depends on what it would have said.
            return self.decide_moves();
        }
        self.give_up_moves(HAS_LEFT);
    }

    /// Once all ranks have said how far they are, servers adopt the keys.
    fn decide_moves(&mut self) {
        let Phase::Running(running) = &mut self.phase else { return };
        let Running { job, registry, moving, left, .. } = &mut **running;
        let Some(under_way) = &mut moving.under_way else { return };
        let mut ranks = (0..job.size()).map(Rank).filter(|rank| !left.contains(rank));
        if !ranks.all(|rank| under_way.held.contains_key(&rank)) {
            return;
        }
        if let Err(key) = under_way.decide(&moving.kept) {
            let name = registry.name_of(key).unwrap_or("a tensor").to_owned();
            return self.give_up_moves(&format!("no rank has the last result of `{name}`"));
        }
        let adoptions = registry.adoptions(&under_way.decided, |key| moving.kept.contains_key(key));
        let mut orders = Vec::new();
        for (server, keys) in adoptions {
            for keys in keys.chunks(ADOPTED_KEYS_MAX) {
                let request = registry.request();
                under_way.adopting.insert((server, request));
                let order = MovingOrder::Adopt { request, keys: keys.to_vec() };
                orders.push((job.servers[server as usize].0, order));
            }
        }
        if orders.is_empty() {
            return self.tell_moves();
        }
        for (node, order) in orders {
            self.send(node, SchedulerMessage::Moving(order));
        }
    }

    /// A server has room for what a request named: keys that move, perhaps.
    pub(super) fn adopted(&mut self, server: u32, request: u64) {
        let Phase::Running(running) = &mut self.phase else { return };
        let Some(under_way) = &mut running.moving.under_way else { return };
        if under_way.adopting.remove(&(server, request)) && under_way.adopting.is_empty() {
            self.tell_moves();
        }
    }

    /// All keys are somewhere: the ranks go on with them.
    fn tell_moves(&mut self) {
        let now = self.clock;
        let Phase::Running(running) = &mut self.phase else { return };
        let Some(under_way) = running.moving.under_way.take() else { return };
        let (keys, replies) = running.registry.settle(&under_way.decided);
        let restored = under_way.holders.len();
        running.moving.restoring.extend(under_way.holders);
        let kept = std::mem::take(&mut running.moving.kept);
        let took = now.saturating_sub(under_way.since);
        if !under_way.is_inherited || !keys.is_empty() {
            self.waited_for(under_way.change, took);
            self.put(Output::Log(format!(
                "{} moved to other servers within {:.3} s, {restored} of them with a result that \
                 some ranks lack",
                counted(keys.len(), "part"),
                took.as_secs_f64()
            )));
        }
        self.tell_ranks(&keys, &kept);
        self.reply(replies);
        self.check_stalls(now);
    }

    /// Each rank is told of all keys but those of which it knows already.
    fn tell_ranks(&mut self, keys: &[MovedKey], kept: &BTreeMap<Key, Kept>) {
        let Phase::Running(running) = &self.phase else { return };
        let workers = (0..).map(Rank).zip(&running.job.workers);
        let there = workers.filter(|(rank, _)| !running.left.contains(rank));
        let nodes: Vec<(Rank, NodeId)> = there.map(|(rank, (node, _))| (rank, *node)).collect();
        for (rank, node) in nodes {
            let is_aware = |key: &Key| kept.get(key).is_some_and(|one| one.aware.contains(&rank));
            let keys = keys.iter().filter(|one| !is_aware(&one.key)).copied().collect();
            let order = MovingOrder::Moved { keys };
            self.send(node, SchedulerMessage::Moving(order));
        }
    }

    /// The keys can't move after all: the epoch ends.
    fn give_up_moves(&mut self, why: &str) {
        let Phase::Running(running) = &mut self.phase else { return };
        let Some(under_way) = running.moving.under_way.take() else { return };
        self.put(Output::Log(format!("the keys of lost servers can't move: {why}")));
        if let Some(reason) = self.regroup(under_way.reason, None) {
            self.end_job(reason, None);
        }
    }

    /// Whoever keeps keys from moving for too long counts as lost.
    pub(super) fn check_moves(&mut self, now: Duration) {
        let Phase::Running(running) = &self.phase else { return };
        let Some(under_way) = &running.moving.under_way else { return };
        let waited = now.saturating_sub(under_way.since);
        if waited < self.config.stall_timeout {
            return;
        }
        let mut ranks = (0..).map(Rank).zip(&running.job.workers);
        let silent = ranks
            .find(|(rank, _)| !running.left.contains(rank) && !under_way.held.contains_key(rank));
        let adopting = under_way.adopting.first();
        let server = adopting.map(|(server, _)| running.job.servers[*server as usize].0);
        let node = silent.map(|(_, (node, _))| *node).or(server);
        let Some(node) = node else { return };
        let who: Origin = self.origin(node);
        let message = format!(
            "it has kept tensors from moving to other servers for {} s (BPS_STALL_TIMEOUT): read \
             its log",
            milliseconds(waited) / 1000
        );
        self.end(OverReason::Failed { who, message, round: None }, Some(node));
    }
}

impl Running {
    /// Why the epoch can't go on without a server, if so.
    fn pinned(&self, server: u32) -> Option<String> {
        let left = self.job.servers.len().saturating_sub(self.moving.lost.len() + 1);
        if left == 0 {
            return Some("no other server is left".to_owned());
        }
        if self.tuner.is_some() {
            return Some("the job tunes itself (BPS_TUNE_CREDIT, BPS_TUNE_PARTITION)".to_owned());
        }
        // Whoever suspends comes back to another epoch, which is about to form.
        if self.suspended || !self.away.is_empty() {
            return Some("ranks suspend".to_owned());
        }
        if self.has_finished() {
            return Some(HAS_LEFT.to_owned());
        }
        self.registry.pins(server).map(|pinned| pinned.to_string())
    }

    /// Servers that are there.
    pub(super) fn servers_left(&self) -> u32 {
        word(self.job.servers.len().saturating_sub(self.moving.lost()))
    }
}
