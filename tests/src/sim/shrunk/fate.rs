//! Who dies in a simulated job, and when; and what its scheduler says of it.

use super::{Dying, Script, Seen, Shrunk, shuffle};
use crate::sim::cluster::Cluster;
use crate::sim::shape::Shape;
use bps_engine::transport::sim::Random;
use std::time::Duration;

/// What is still to die, and when.
pub(super) struct Fate {
    pub(super) ranks: usize,
    servers: Vec<usize>,
    at: Duration,
    dying: Dying,
}

impl Fate {
    pub(super) fn new(random: &mut Random, shape: &Shape, dying: Dying) -> Fate {
        let ranks = random.index(shape.workers as usize);
        let at = Duration::from_micros(random.below(20_000));
        if dying == Dying::Ranks {
            return Fate { ranks, servers: Vec::new(), at, dying };
        }
        let mut servers: Vec<usize> = (0..shape.servers as usize).collect();
        shuffle(random, &mut servers);
        servers.truncate(1 + random.index(servers.len() - 1));
        Fate { ranks: if random.once_in(2) { 0 } else { ranks }, servers, at, dying }
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
        while cluster.now() >= self.at && (self.ranks > 0 || !self.servers.is_empty()) {
            let is_server = !self.servers.is_empty() && (self.ranks == 0 || random.once_in(2));
            let victim = random.index(ranks.len());
            let worker = &cluster.workers[victim];
            if is_server {
                if has_formed
                    && !is_leaving
                    && let Some(victim) = self.servers.pop()
                {
                    outcome.servers += 1;
                    match random.once_in(3) {
                        true => cluster.hide_server(victim),
                        false => cluster.kill_server(victim),
                    }
                }
            } else if worker.alive() && worker.roster.is_some() && !ranks[victim].left {
                self.ranks -= 1;
                outcome.gone += 1;
                if self.dying == Dying::Servers {
                    // A result that nobody else has had needs not be what others get.
                    seen.values_mut().for_each(|seen| drop(seen.remove(&victim)));
                }
                if random.once_in(3) {
                    ranks[victim].hidden = true;
                    cluster.hide_worker(victim);
                } else {
                    cluster.kill_worker(victim);
                }
            }
            let soon = [1, 300, 3000, 8000][random.index(4)];
            self.at += Duration::from_micros(1 + random.below(soon));
        }
    }
}

/// Whether the job could not go on, for a reason that it may have.
pub(super) fn has_ended(cluster: &Cluster) -> bool {
    let reasons = ["it alone has results that others lack", "can't move: a rank has shut down"];
    cluster.log.iter().any(|line| reasons.iter().any(|reason| line.contains(reason)))
}

/// What the scheduler says of parts that have moved.
pub(super) fn read_log(cluster: &Cluster, outcome: &mut Shrunk) {
    for line in &cluster.log {
        let Some((moved, rest)) = line.split_once(" moved to other servers within ") else {
            continue;
        };
        let number = |text: &str| text.split(' ').next().and_then(|text| text.parse().ok());
        outcome.moved += number(moved).unwrap_or(0);
        let restored = rest.split_once(", ").and_then(|(_, rest)| number(rest));
        outcome.restored += restored.unwrap_or(0);
    }
}
