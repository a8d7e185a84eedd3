//! Who dies in a simulated job, and when; and what its scheduler says of it.

use super::{Dying, Script, Seen, Shrunk, shuffle};
use crate::sim::cluster::Cluster;
use crate::sim::shape::Shape;
use bps_engine::base::Rank;
use bps_engine::proto::messages::{OverReason, Party};
use bps_engine::transport::sim::Random;
use std::time::Duration;

impl Dying {
    /// Whether schedulers are lost, so that nodes wait for others.
    pub(super) fn loses_schedulers(self) -> bool {
        matches!(self, Dying::Schedulers | Dying::Leavers)
    }
}

/// What is still to die, and when.
pub(super) struct Fate {
    /// Or hosts.
    pub(super) ranks: usize,
    servers: Vec<usize>,
    at: Duration,
    dying: Dying,
    /// Schedulers that are still to be lost.
    schedulers: usize,
    /// When another one starts.
    starts: Option<Duration>,
    /// When one that was stopped goes on.
    thaws: Option<Duration>,
    /// Numbers of the ranks that were killed.
    killed: Vec<Rank>,
    /// Ranks of a host that is being lost, and whether they fall silent.
    host: (Vec<usize>, bool),
    /// Servers that were killed.
    servers_lost: usize,
    /// A scheduler was killed before all servers knew that they are of an elastic job: the others
    /// have ended with it.
    unformed: bool,
    /// No server dies before a scheduler has.
    behind: bool,
}

impl Fate {
    pub(super) fn new(random: &mut Random, shape: &Shape, dying: Dying) -> Fate {
        // With one of a host whose GPUs sum among themselves the job forms again.
        let may_lose = !shape.devices || !shape.sums_on_hosts() && dying == Dying::RanksOfGpus;
        let ranks = if may_lose { random.index(shape.workers as usize) } else { 0 };
        let at = Duration::from_micros(random.below(20_000));
        let fate = |ranks, servers| Fate {
            ranks,
            servers,
            at,
            dying,
            schedulers: 0,
            starts: None,
            thaws: None,
            killed: Vec::new(),
            host: (Vec::new(), false),
            servers_lost: 0,
            unformed: false,
            behind: false,
        };
        if dying == Dying::Ranks {
            return fate(ranks, Vec::new());
        }
        let mut servers: Vec<usize> = (0..shape.servers as usize).collect();
        shuffle(random, &mut servers);
        servers.truncate(1 + random.index(servers.len() - 1));
        if dying == Dying::RanksOfGpus || dying.takes_hosts() {
            servers.truncate(servers.len() * usize::from(random.once_in(2)));
            let hosts = random.index(shape.hosts.len());
            return fate(if dying.takes_hosts() { hosts } else { ranks }, servers);
        }
        let ranks = if random.once_in(2) { 0 } else { ranks };
        if dying.loses_schedulers() {
            let lot = random.index(9);
            servers.truncate(if lot < 6 { servers.len() } else { 0 });
            let behind = lot < 2;
            let schedulers = 1 + random.index(4);
            return Fate { schedulers, behind, ..fate(ranks, servers) };
        }
        fate(ranks, servers)
    }

    /// Loses a scheduler, or lets another one start; a stopped one may go on before that or behind.
    fn strike_scheduler(
        &mut self,
        cluster: &mut Cluster,
        may_lose: bool,
        random: &mut Random,
        outcome: &mut Shrunk,
    ) {
        let now = cluster.now();
        if self.thaws.take_if(|at| now >= *at).is_some() {
            cluster.thaw_scheduler();
            // It may lead the job still, or find that another one does.
            outcome.thawed += u64::from(self.starts.take().is_none());
        }
        if self.starts.take_if(|at| now >= *at).is_some() {
            cluster.start_scheduler();
        }
        let is_quiet = self.starts.is_none() && self.thaws.is_none();
        if self.schedulers == 0 || !may_lose || !is_quiet || now < self.at || random.once_in(3) {
            return;
        }
        self.schedulers -= 1;
        outcome.schedulers += 1;
        let soon = [200, 20_000, 3_000_000][random.index(3)];
        if random.once_in(4) {
            cluster.freeze_scheduler();
            self.starts = Some(now + Duration::from_micros(random.below(8_000_000)));
            self.thaws = Some(now + Duration::from_micros(1 + random.below(14_000_000)));
        } else {
            self.unformed |= !cluster.knows_first_servers();
            cluster.kill_scheduler(random.once_in(3));
            self.starts = Some(now + Duration::from_micros(random.below(soon)));
        }
        let next = [300, 20_000, 6_000_000][random.index(3)];
        self.at = now + Duration::from_micros(1 + random.below(next));
    }

    /// The next scheduler could not go on only for what had happened here: a server was lost, and
    /// all who had a last result of a key of it, or a rank that may have had one has left.
    pub(super) fn check_obstacles(&self, seed: u64, cluster: &Cluster, ranks: &[Script]) {
        let has_lost = self.servers_lost > 0;
        let has_left = ranks.iter().any(|rank| rank.left);
        for line in &cluster.log {
            let Some((_, why)) = line.split_once("the next one can't go on as it was: ") else {
                continue;
            };
            let is_dead = why.starts_with("no rank has the last result of ");
            let is_over = why.starts_with("keys can't move: a rank has shut down");
            let holds = is_dead && !self.killed.is_empty() || is_over && has_left;
            // It was lost while the epoch after one that had ended was about to form.
            let is_forming = why.starts_with("an epoch was about to form")
                && cluster.verdicts.iter().any(|verdict| match verdict {
                    OverReason::Reforming { epoch, .. } => {
                        why.ends_with(&format!("; epoch {} forms from who is left", epoch.0 + 1))
                    }
                    _ => false,
                });
            assert!(has_lost && holds || is_forming, "seed {seed}: {line}");
        }
    }

    /// Whether a scheduler has said that it could not go on, for a reason that it may have.
    pub(super) fn may_have_ended(&self, cluster: &Cluster) -> bool {
        let reasons = [
            "it alone has results that others lack",
            "can't move: no rank has the last result",
            "can't move: a rank has shut down",
            "can't move: a rank opens its lanes",
            "the next one can't go on as it was",
        ];
        // Some servers stay when all that are to die have died; but those that follow another
        // scheduler are missed by this one, and so are those that have ended with the first one.
        let is_parted = cluster.may_be_parted();
        let none_left =
            (self.unformed || is_parted).then_some("can't move: no other server is left");
        // Likewise ranks.
        let none_came =
            is_parted.then_some("no rank has come to the next one; the job cannot go on");
        let mut reasons = reasons.into_iter().chain(none_left).chain(none_came);
        reasons.any(|reason| cluster.log.iter().any(|line| line.contains(reason)))
            || is_parted && has_missed(cluster)
    }

    /// Nobody is taken for dead who was not killed; but where a scheduler was stopped and another
    /// one started beside it, whoever has asked the one is missed by the other.
    pub(super) fn check_blamed(&mut self, seed: u64, cluster: &Cluster, ranks: &mut [Script]) {
        if self.dying.loses_schedulers() {
            for (index, rank) in ranks.iter_mut().enumerate() {
                let roster = &cluster.workers[index].roster;
                let number = roster.as_ref().map(|roster| Rank(roster.index));
                let is_parted = number.is_some_and(|number| {
                    let mut others = (0..).zip(&cluster.workers);
                    !self.killed.contains(&number)
                        && others.any(|(other, worker)| {
                            worker.gone.contains(&number) && cluster.are_parted(index, other)
                        })
                });
                if is_parted {
                    rank.hidden = true;
                    self.killed.extend(number);
                }
            }
            for (worker, rank) in cluster.workers.iter().zip(&*ranks) {
                if !worker.alive() || rank.hidden {
                    continue;
                }
                let blamed = worker.gone.iter().all(|rank| self.killed.contains(rank));
                let log = &cluster.log;
                let (gone, killed) = (&worker.gone, &self.killed);
                assert!(blamed, "seed {seed}: {gone:?} are gone, {killed:?} died: {log:?}");
            }
        }
    }

    /// The ranks of the host of this one, which may be lost: all live, none is about to leave, and
    /// others would be left. Else none.
    fn host_with(&self, cluster: &Cluster, ranks: &[Script], victim: usize) -> Vec<usize> {
        let Some(own) = &cluster.workers[victim].roster else { return Vec::new() };
        let numbers: Vec<u32> = std::iter::once(own.index)
            .chain(own.neighbours.iter().map(|neighbour| neighbour.rank.0))
            .collect();
        let number = |index: &usize| Some(cluster.workers[*index].roster.as_ref()?.index);
        let is_of_it = |index: &usize| number(index).is_some_and(|one| numbers.contains(&one));
        let (host, others): (Vec<usize>, Vec<usize>) = (0..ranks.len()).partition(is_of_it);
        let lives = |index: &usize| cluster.workers[*index].alive() && !ranks[*index].hidden;
        let may_go = |index: &usize| lives(index) && ranks[*index].barrier.is_none();
        let is_whole = host.len() == numbers.len() && host.iter().all(may_go);
        if is_whole && others.iter().any(lives) { host } else { Vec::new() }
    }

    fn kill_one(
        &mut self,
        (cluster, ranks, seen): (&mut Cluster, &mut [Script], &mut Seen),
        victim: usize,
        is_silent: bool,
    ) {
        if self.dying != Dying::Ranks {
            // A result that nobody else has had needs not be what others get.
            seen.values_mut().for_each(|seen| drop(seen.remove(&victim)));
        }
        let roster = cluster.workers[victim].roster.as_ref();
        self.killed.extend(roster.map(|roster| Rank(roster.index)));
        if is_silent {
            ranks[victim].hidden = true;
            cluster.hide_worker(victim);
        } else {
            cluster.kill_worker(victim);
        }
    }

    /// Kills whoever is to die by now; several may die at once, or one shortly after another.
    pub(super) fn strike(
        &mut self,
        cluster: &mut Cluster,
        ranks: &mut [Script],
        (random, seen): (&mut Random, &mut Seen),
        outcome: &mut Shrunk,
    ) {
        let has_formed = cluster.workers.iter().all(|worker| worker.roster.is_some());
        let is_leaving = ranks.iter().any(|rank| rank.left);
        self.strike_scheduler(cluster, has_formed, random, outcome);
        let is_left = |fate: &Fate| fate.ranks > 0 || !fate.servers.is_empty();
        while cluster.now() >= self.at && (is_left(self) || !self.host.0.is_empty()) {
            if let Some(victim) = self.host.0.pop() {
                self.kill_one((cluster, ranks, seen), victim, self.host.1);
                let soon = [1, 300, 8000][random.index(3)];
                self.at += Duration::from_micros(1 + random.below(soon));
                continue;
            }
            let is_server = !self.servers.is_empty() && (self.ranks == 0 || random.once_in(2));
            let victim = random.index(ranks.len());
            let worker = &cluster.workers[victim];
            // What ranks of a host sum is lost with one of them, and the job forms again.
            let is_alone = worker.roster.as_ref().is_some_and(|own| own.neighbours.is_empty());
            let host = self.host_with(cluster, ranks, victim);
            if is_server {
                // Or it is told to leave.
                let is_due = !self.behind || outcome.schedulers > 0;
                if has_formed
                    && !is_leaving
                    && is_due
                    && let Some(victim) = self.servers.pop()
                {
                    outcome.servers += 1;
                    self.servers_lost += 1;
                    match random.once_in(3) && !self.dying.loses_schedulers() {
                        true => cluster.hide_server(victim),
                        false if self.dying == Dying::Leavers && random.once_in(2) => {
                            cluster.leave_server(victim);
                        }
                        false => cluster.kill_server(victim),
                    }
                }
            } else if self.dying.takes_hosts() {
                self.ranks -= usize::from(!host.is_empty());
                outcome.gone += host.len() as u64;
                // A machine that stops is silent at once.
                self.host = (host, random.once_in(3));
                if self.host.1 {
                    for victim in std::mem::take(&mut self.host.0) {
                        self.kill_one((cluster, ranks, seen), victim, true);
                    }
                }
                shuffle(random, &mut self.host.0);
            } else if is_alone && worker.alive() && !ranks[victim].left {
                self.ranks -= 1;
                outcome.gone += 1;
                let is_silent = random.once_in(3) && !self.dying.loses_schedulers();
                self.kill_one((cluster, ranks, seen), victim, is_silent);
            }
            let soon = [1, 300, 3000, 8000][random.index(4)];
            self.at += Duration::from_micros(1 + random.below(soon));
        }
        if !self.host.0.is_empty() {
            // The others of a host do not outlive the first for long.
            cluster.wake_at(self.at);
        }
    }
}

/// Whether an epoch has ended: the job could not go on in it.
pub(super) fn has_ended(cluster: &Cluster) -> bool {
    let ends = |reason: &OverReason| {
        matches!(reason, OverReason::Reforming { .. } | OverReason::TooFew { .. })
    };
    cluster.verdicts.iter().any(ends)
}

/// Whether an epoch has ended without a rank that lives, which follows another scheduler.
fn has_missed(cluster: &Cluster) -> bool {
    let lives = |rank: Rank| {
        cluster.workers.iter().any(|worker| {
            let index = worker.roster.as_ref().map(|roster| roster.index);
            worker.alive() && index == Some(rank.0)
        })
    };
    cluster.verdicts.iter().any(|verdict| match verdict {
        OverReason::Reforming { reason, .. } | OverReason::TooFew { reason, .. } => {
            matches!(&**reason, OverReason::Died { who, .. }
                if matches!(who.party, Party::Rank(rank) if lives(rank)))
        }
        _ => false,
    })
}

/// What the schedulers say of parts that have moved.
pub(super) fn read_log(cluster: &Cluster, outcome: &mut Shrunk) {
    let mut is_followed = false;
    for line in &cluster.log {
        outcome.hindered += u64::from(line.contains("the next one can't go on as it was"));
        is_followed |= line.contains(" are led by this scheduler after ");
        let Some((moved, rest)) = line.split_once(" moved to other servers within ") else {
            continue;
        };
        let number = |text: &str| text.split(' ').next().and_then(|text| text.parse().ok());
        outcome.moved += number(moved).unwrap_or(0);
        outcome.followed += u64::from(is_followed);
        let restored = rest.split_once(", ").and_then(|(_, rest)| number(rest));
        outcome.restored += restored.unwrap_or(0);
    }
}

/// How it stands, for whoever looks for what hangs.
pub(super) fn describe(cluster: &Cluster, ranks: &[Script]) -> String {
    let mut text = format!("at {:?}", cluster.now());
    for (index, rank) in ranks.iter().enumerate() {
        let worker = &cluster.workers[index];
        let flights: Vec<_> = rank.flights.iter().map(|one| (one.tensor, one.round)).collect();
        text.push_str(&format!(
            "; {index}: alive {}, hidden {}, left {}, to do {}, in flight {flights:?}, gone {:?}, \
             over {:?}",
            worker.alive(),
            rank.hidden,
            rank.left,
            rank.todo.len(),
            worker.gone,
            worker.over
        ));
    }
    text
}
