//! What happens to a simulated job that forms again, and how it may end.

use super::{Program, RANKS_MAX, Reformed, Script, Stage, Trouble};
use crate::sim::cluster::Cluster;
use crate::sim::shape::Shape;
use bps_engine::proto::messages::{OverReason, Party, Sign};
use bps_engine::transport::sim::Random;
use bps_worker::Error;
use std::time::Duration;

/// What can happen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Blow {
    Rank,
    Server,
    LeaveServer,
    Scheduler,
    Cut,
    Part,
    PartServer,
    Join,
    JoinServer,
}

/// What is still to happen, and when.
pub(super) struct Fate {
    blows: Vec<Blow>,
    at: Duration,
    /// When another scheduler starts, and when one that was stopped goes on.
    starts: Option<Duration>,
    thaws: Option<Duration>,
    /// Scheduler losses so far: when.
    losses: Vec<Duration>,
    /// One was lost while a node did not know the job yet.
    unformed: bool,
    /// When one was last stopped, and since when ranks may have been at a loss because another one
    /// had started beside it; and whether one went on so soon that it can't tell.
    frozen: Duration,
    loose: Option<Duration>,
    was_brief: bool,
    /// Ranks whose end was looked at.
    told: Vec<bool>,
    arrived: Vec<Duration>,
    /// How often a scheduler is still to stop while ranks wait for their next epoch.
    stops: usize,
    /// How many steps there are.
    steps: i64,
    parted_servers: Vec<usize>,
    /// Servers that were told to leave.
    leavers: Vec<usize>,
}

/// Paths that a job bears one after the other.
const PATHS_MAX: usize = 3;
/// What a scheduler does not take for a stop: what its timeout of 4 s and two ticks allow.
const BRIEF: Duration = Duration::from_millis(1_500);

impl Fate {
    pub(super) fn new(random: &mut Random, shape: &Shape, trouble: Trouble, steps: i64) -> Fate {
        let mut blows = Vec::new();
        let mut add = |random: &mut Random, blow, most: usize, least: usize| {
            let count = least + random.index(most - least + 1);
            blows.extend(std::iter::repeat_n(blow, count));
        };
        let (ranks, servers) = (shape.workers as usize, shape.servers as usize);
        add(random, Blow::Rank, ranks - 1, 0);
        add(random, Blow::Server, servers - 1, 0);
        if trouble == Trouble::Stopped {
            add(random, Blow::Rank, 1, 1);
        } else if trouble != Trouble::Deaths {
            add(random, Blow::Scheduler, 3, 1);
        }
        if trouble == Trouble::Paths {
            add(random, Blow::Cut, PATHS_MAX, 0);
            add(random, Blow::Part, 2, 0);
            add(random, Blow::PartServer, 1, 0);
        }
        if trouble == Trouble::Newcomers {
            add(random, Blow::Join, (RANKS_MAX - ranks).min(3), 1);
            add(random, Blow::JoinServer, 1, 0);
            add(random, Blow::Rank, 1, 0);
        }
        if trouble == Trouble::Leavers {
            add(random, Blow::LeaveServer, servers - 1, 1);
        }
        super::shuffle(random, &mut blows);
        let soon = [2000, 20_000][random.index(2)];
        let at = Duration::from_micros(random.below(soon));
        Fate {
            blows,
            at,
            starts: None,
            thaws: None,
            losses: Vec::new(),
            unformed: false,
            frozen: Duration::ZERO,
            loose: None,
            was_brief: false,
            told: Vec::new(),
            stops: if trouble == Trouble::Stopped { 1 + random.index(2) } else { 0 },
            steps,
            parted_servers: Vec::new(),
            leavers: Vec::new(),
            arrived: vec![Duration::ZERO; ranks],
        }
    }

    /// Lets happen what is to happen by now.
    pub(super) fn strike(
        &mut self,
        cluster: &mut Cluster,
        ranks: &mut [Script],
        random: &mut Random,
        outcome: &mut Reformed,
    ) {
        let now = cluster.now();
        if self.thaws.take_if(|at| now >= *at).is_some() {
            cluster.thaw_scheduler();
            // Another one has started meanwhile.
            let is_brief = self.starts.take().is_none() && now < self.frozen + BRIEF;
            self.was_brief |= is_brief;
        }
        if self.starts.take_if(|at| now >= *at).is_some() {
            if self.thaws.is_some() {
                self.loose.get_or_insert(self.frozen);
            }
            cluster.start_scheduler();
        }
        // Between two epochs there are few moments.
        let is_between = (0..ranks.len()).any(|index| {
            cluster.workers[index].alive() && cluster.is_coming(index)
                || matches!(ranks[index].stage, Stage::Returns(_))
        });
        if is_between && !self.blows.is_empty() && random.once_in(40) {
            self.at = self.at.min(now);
        }
        let waits = |index: usize| cluster.workers[index].alive() && cluster.waits_again(index);
        let may_stop = self.stops > 0 && self.thaws.is_none() && (0..ranks.len()).any(waits);
        if may_stop && random.once_in(5) {
            // Nodes lose patience meanwhile, and find no other.
            self.stops -= 1;
            outcome.schedulers += 1;
            outcome.forming += 1;
            self.losses.push(now);
            cluster.freeze_scheduler();
            self.frozen = now;
            self.thaws = Some(now + Duration::from_micros(4_000_000 + random.below(10_000_000)));
        }
        while now >= self.at
            && let Some(blow) = self.blows.pop()
        {
            self.hit(blow, cluster, ranks, (random, outcome));
            let soon = [1, 300, 3000, 30_000, 3_000_000][random.index(5)];
            self.at = now + Duration::from_micros(1 + random.below(soon));
        }
    }

    fn hit(
        &mut self,
        blow: Blow,
        cluster: &mut Cluster,
        ranks: &mut [Script],
        (random, outcome): (&mut Random, &mut Reformed),
    ) {
        let now = cluster.now();
        let lives = |index: &usize| {
            let rank = &ranks[*index];
            cluster.workers[*index].alive() && rank.stage != Stage::Over
        };
        let living: Vec<usize> = (0..ranks.len()).filter(lives).collect();
        // One of the first ranks is left that nothing happens to.
        let is_safe = |index: &usize| {
            let others = living.iter().filter(|other| *other != index);
            others.into_iter().any(|other| !ranks[*other].parted && !cluster.is_new(*other))
        };
        let chosen: Vec<usize> = living.iter().copied().filter(is_safe).collect();
        match blow {
            Blow::Rank if !chosen.is_empty() => {
                let victim = chosen[random.index(chosen.len())];
                outcome.ranks += 1;
                let is_between = cluster.workers[victim].roster.is_none();
                outcome.between += u64::from(is_between);
                cluster.kill_worker(victim);
            }
            Blow::Server | Blow::PartServer | Blow::LeaveServer => {
                let is_well = |index: &usize| {
                    cluster.takes_part(*index)
                        && !self.parted_servers.contains(index)
                        && !self.leavers.contains(index)
                };
                let mut servers = cluster.living_servers();
                servers.retain(is_well);
                if servers.len() < 2 {
                    return;
                }
                let victim = servers[random.index(servers.len())];
                if blow == Blow::Server {
                    outcome.servers += 1;
                    cluster.kill_server(victim);
                } else if blow == Blow::LeaveServer {
                    outcome.leavers += 1;
                    self.leavers.push(victim);
                    cluster.leave_server(victim);
                } else {
                    outcome.parted += 1;
                    self.parted_servers.push(victim);
                    cluster.part_server(victim);
                }
            }
            Blow::Scheduler if self.starts.is_none() && self.thaws.is_none() => {
                self.lose_scheduler(cluster, ranks, random, outcome);
            }
            Blow::Cut if !living.is_empty() => {
                outcome.cuts += 1;
                cluster.cut_lane(living[random.index(living.len())]);
            }
            Blow::Part if !chosen.is_empty() => {
                let victim = chosen[random.index(chosen.len())];
                if cluster.workers[victim].roster.is_some() {
                    outcome.parted += 1;
                    ranks[victim].parted = true;
                    cluster.part_worker(victim);
                }
            }
            Blow::Join => {
                outcome.joined += 1;
                self.arrived.push(now);
                cluster.join_worker();
            }
            // Before the job has formed it would be one too many.
            Blow::JoinServer if cluster.takes_part(0) => {
                outcome.joined_servers += 1;
                cluster.join_server();
            }
            _ => {}
        }
    }

    fn lose_scheduler(
        &mut self,
        cluster: &mut Cluster,
        ranks: &[Script],
        random: &mut Random,
        outcome: &mut Reformed,
    ) {
        let now = cluster.now();
        outcome.schedulers += 1;
        let first = |index: &usize| self.arrived[*index] == Duration::ZERO;
        let all = 0..ranks.len();
        let lacks = |index: usize| cluster.workers[index].alive() && cluster.is_new(index);
        let is_unformed = all.clone().filter(first).any(lacks) || !cluster.knows_first_servers();
        self.unformed |= is_unformed;
        outcome.unformed += u64::from(is_unformed);
        let between = all.into_iter().any(|index| cluster.is_coming(index));
        outcome.forming += u64::from(between);
        self.losses.push(now);
        let soon = [200, 20_000, 3_000_000][random.index(3)];
        if random.once_in(4) {
            cluster.freeze_scheduler();
            self.frozen = now;
            self.starts = Some(now + Duration::from_micros(random.below(8_000_000)));
            self.thaws = Some(now + Duration::from_micros(1 + random.below(14_000_000)));
        } else {
            cluster.kill_scheduler(random.once_in(3));
            self.starts = Some(now + Duration::from_micros(random.below(soon)));
        }
    }

    /// Whether a rank may end as it does.
    pub(super) fn check_end(
        &mut self,
        cluster: &Cluster,
        rank: &Script,
        index: usize,
        outcome: &mut Reformed,
    ) -> Result<(), String> {
        self.told.resize(cluster.workers.len(), false);
        if std::mem::replace(&mut self.told[index], true) {
            return Ok(());
        }
        let Some(error) = &cluster.workers[index].over else { return Ok(()) };
        let text = error.to_string();
        let (is_of_start, arrived) = (matches!(error, Error::Start(_)), self.arrived[index]);
        let is_lost = self.losses.iter().any(|lost| *lost >= arrived);
        let is_given_up = text.contains("declared this process dead") || text.contains("given up");
        // An epoch that had only begun when its scheduler was lost, and that nobody else knew, is
        // as none: whoever was in it comes as a new one, and the others may have finished by then.
        let sent_back = format!("(host worker-host-{index}, pid 1) may come as a new worker");
        let is_sent_back = cluster.log.iter().any(|line| line.contains(&sent_back));
        let is_later = !rank.was_in && arrived > Duration::ZERO;
        let is_new = (is_later || is_sent_back) && is_of_start;
        // Whoever had left the one that was stopped may have found the other, to which nobody else
        // came: it has no way back.
        let was_adrift =
            |since: Duration| rank.adrift.is_some_and(|last| last >= since) || rank.parted;
        // Whoever alone followed another scheduler, beside one that others follow still or again,
        // hears from it that they are dead.
        let is_silent = self.loose.is_some() && text.contains("no heartbeat for");
        if self.unformed || is_silent || self.loose.is_some_and(was_adrift) {
        } else if rank.step == self.steps && text.contains("all workers have finished") {
            // It was to say so as well, and its epoch ended meanwhile.
        } else if is_new && (cluster.done || is_lost) {
            outcome.sent_away += 1;
        } else if rank.parted && is_given_up {
            outcome.given_up += 1;
        } else if rank.parted && cluster.done && is_without(&text) {
            // The job has finished without it: its scheduler says so still, or is no more; or
            // another one has come, to which it is all that there is of the job.
        } else {
            return Err(format!("ended: {text}"));
        }
        Ok(())
    }

    /// The job came to its end.
    pub(super) fn check_result(
        &self,
        cluster: &Cluster,
        ranks: &[Script],
        program: &Program,
        seed: u64,
    ) {
        // Another one beside that which goes on may have been followed by too few, and have ended
        // the job for these: it has missed others, or all ranks, or all servers.
        let has_missed = |reason: &OverReason| {
            let has_none =
                matches!(reason, OverReason::TooFew { reason, .. } if is_of_scheduler(reason));
            has_none || matches!(reason.cause(), OverReason::Died { how: Sign::Silent { .. }, .. })
        };
        let was_of_few = cluster.has_led_without_servers || cluster.verdicts.iter().any(has_missed);
        let is_split = self.loose.is_some() && was_of_few;
        if self.unformed || self.was_brief || is_split {
            return;
        }
        let has_done = |(index, rank): (usize, &Script)| {
            cluster.workers[index].alive()
                && (rank.has_left || cluster.workers[index].over.is_none())
                && rank.step == program.steps
        };
        let done = ranks.iter().enumerate().any(has_done);
        assert!(done, "seed {seed}: nobody has done all steps; schedulers said {:#?}", cluster.log);
    }
}

/// Whether a scheduler that follows a lost one could not lead the job.
fn is_of_scheduler(reason: &OverReason) -> bool {
    matches!(reason, OverReason::Failed { who, .. } if who.party == Party::Scheduler)
}

/// Whether somebody has found no scheduler, or one that leads nobody else any more.
fn is_without(text: &str) -> bool {
    let how = [
        "none has taken over",
        "was lost while the job formed",
        "no server left",
        "all workers have finished",
    ];
    how.iter().any(|how| text.contains(how))
}
