//! Epochs of a simulated job: how ranks leave one that is over and come to the next, and how ranks
//! and servers come that are new, as programs do that join.
//!
//! Invariant: whoever comes registers behind its last word on the connection that it had.

use super::schedulers::{CONNECTIONS, State};
use super::{
    Cluster, Duration, Elastic, Error, Letter, Member, Mpsc, NicCommand, NodeId, NodeMessage,
    Register, Shape, StartError, Way, worker_agent,
};
use bps_engine::control::LinkError;
use bps_worker::error::Source;

/// How long a rank that leaves waits for its lanes.
const LEAVE: Duration = Duration::from_secs(5);
/// How long one waits that found no scheduler.
const PAUSE: Duration = Duration::from_millis(50);

/// A node on its way into the job.
pub(super) struct Coming {
    /// What it was known by in an earlier epoch.
    former: Option<u64>,
    attempt: u64,
    /// Since when there is no scheduler.
    lost: Option<Duration>,
    /// When it last heard of one; `None` before it is connected.
    pub(super) heard: Option<Duration>,
    /// Since when that one is silent.
    pub(super) silent: Option<Duration>,
}

impl Coming {
    pub(super) fn is_there(&self) -> bool {
        self.heard.is_some()
    }

    /// Whether it has been in an epoch.
    pub(super) fn comes_back(&self) -> bool {
        self.former.is_some()
    }
}

impl Cluster {
    /// A job that forms again.
    #[must_use]
    pub fn that_forms_again(seed: u64, shape: Shape, elastic: Elastic, wait: Duration) -> Cluster {
        let mut cluster = Cluster::outlasting(seed, shape, Some(elastic), wait);
        cluster.forms_again = true;
        cluster
    }

    /// A node of those with which the job begins has connected.
    pub(super) fn begin(&mut self, member: Member) {
        let way = self.way(member);
        let (node, register) = (way.node, way.register.clone());
        self.schedulers[0].machine.handle_connected(node, self.network.now());
        self.mail(Letter::Up(node, NodeMessage::Register(register)));
    }

    /// Whether the epoch of a rank is over, and the job is not.
    #[must_use]
    pub fn may_return(&self, index: usize) -> bool {
        self.workers[index].agent.as_ref().is_some_and(worker_agent::Agent::may_return)
    }

    /// Whether a rank has been in no epoch yet.
    #[must_use]
    pub fn is_new(&self, index: usize) -> bool {
        let worker = &self.workers[index];
        worker.roster.is_none() && worker.coming.as_ref().is_none_or(|one| one.former.is_none())
    }

    /// Whether a rank is between two epochs.
    #[must_use]
    pub fn is_coming(&self, index: usize) -> bool {
        self.workers[index].coming.is_some()
    }

    /// Whether a rank has come to a scheduler for its next epoch, and waits for that.
    #[must_use]
    pub fn waits_again(&self, index: usize) -> bool {
        let coming = self.workers[index].coming.as_ref();
        coming.is_some_and(|coming| coming.is_there() && coming.comes_back())
    }

    /// Whether a rank is of no epoch, and has no connection to a scheduler.
    #[must_use]
    pub fn is_adrift(&self, index: usize) -> bool {
        let worker = &self.workers[index];
        worker.roster.is_none() && !worker.coming.as_ref().is_some_and(Coming::is_there)
    }

    /// Whether all servers with which the job began, and that live, know it.
    #[must_use]
    pub fn knows_first_servers(&self) -> bool {
        let first = self.servers.iter().take(self.shape.servers as usize);
        first.into_iter().all(|one| one.shards.is_empty() || one.agent.index().is_some())
    }

    /// Whether a server is of an epoch, or was.
    #[must_use]
    pub fn takes_part(&self, index: usize) -> bool {
        self.servers[index].agent.index().is_some()
    }

    /// Servers that live.
    #[must_use]
    pub fn living_servers(&self) -> Vec<usize> {
        let servers = (0..).zip(&self.servers);
        servers.filter(|(_, one)| !one.shards.is_empty()).map(|(index, _)| index).collect()
    }

    /// Servers that were told to leave, and without which the job goes on.
    #[must_use]
    pub fn servers_let_go(&self) -> u64 {
        self.servers.iter().map(|server| u64::from(server.left)).sum()
    }

    /// A rank ends its part in an epoch that is not over, to come to the next one.
    pub fn suspend(&mut self, index: usize) {
        self.workers[index].push(NicCommand::Leave { suspend: true });
    }

    /// A rank whose part in an epoch is over comes to the next one, once its lanes have ended, or
    /// were given up since. Says whether it does now.
    pub fn come_again(&mut self, index: usize, since: Duration) -> bool {
        let now = self.now();
        let worker = &self.workers[index];
        let is_away = worker.agent.as_ref().is_some_and(|agent| agent.is_away());
        if is_away || !worker.ended() && now < since + LEAVE {
            return false;
        }
        let node = worker.way.node;
        self.mail(Letter::Up(node, NodeMessage::Leave { suspend: true }));
        self.mail(Letter::Gone(node));
        let said = self.last_arrival.get(&(node.0, true)).copied().unwrap_or(now);
        let worker = &mut self.workers[index];
        (worker.roster, worker.agent, worker.nic) = (None, None, None);
        (worker.commands, worker.reports) = (Mpsc::new(super::COMMANDS), Mpsc::new(256));
        worker.backlog.clear();
        worker.declared.clear();
        worker.barriers.clear();
        worker.gone.clear();
        worker.connections.clear();
        (worker.over, worker.lost_at, worker.leaving) = (None, None, None);
        (worker.server_connections, worker.newcomers) = (0, 0);
        let former = Some(worker.way.register.session);
        self.set_out(Member::Worker(index), former, said);
        true
    }

    /// A rank that its job is over for ends.
    pub fn end_worker(&mut self, index: usize) {
        let worker = &mut self.workers[index];
        (worker.nic, worker.left) = (None, true);
        self.hang_up(Member::Worker(index));
    }

    /// A rank that is new comes.
    pub fn join_worker(&mut self) {
        let index = self.workers.len();
        self.add_worker(u32::try_from(index).expect("few"));
        self.set_out(Member::Worker(index), None, self.now());
    }

    /// A server that is new comes.
    pub fn join_server(&mut self) {
        let index = self.servers.len();
        self.add_server(u32::try_from(index).expect("few"));
        self.set_out(Member::Server(index), None, self.now());
    }

    /// A node dials, not before then.
    fn set_out(&mut self, member: Member, former: Option<u64>, then: Duration) {
        self.sequence += 1;
        let attempt = self.sequence;
        let coming = Coming { former, attempt, lost: None, heard: None, silent: None };
        *self.coming(member) = Some(coming);
        self.dial_at(member, attempt, then);
    }

    fn dial_at(&mut self, member: Member, attempt: u64, then: Duration) {
        let delay = Duration::from_micros(10 + self.random.below(2000));
        self.sequence += 1;
        let at = then.max(self.now()) + delay;
        self.letters.insert((at, self.sequence), Letter::Came(member, attempt));
    }

    fn coming(&mut self, member: Member) -> &mut Option<Coming> {
        match member {
            Member::Worker(index) => &mut self.workers[index].coming,
            Member::Server(index) => &mut self.servers[index].coming,
        }
    }

    /// A node has dialed that is of no epoch now.
    pub(super) fn came(&mut self, member: Member, attempt: u64) {
        let (now, wait) = (self.now(), self.wait);
        let last = self.schedulers.len() - 1;
        if !self.is_there(member) {
            return;
        }
        let lives = self.schedulers[last].state == State::Lives;
        let Some(coming) = self.coming(member).as_mut().filter(|one| one.attempt == attempt) else {
            return;
        };
        if !lives {
            let since = *coming.lost.get_or_insert(now);
            if now - since > wait {
                return self.give_up_coming(member);
            }
            return self.dial_at(member, attempt, now + PAUSE);
        }
        coming.heard = Some(now);
        coming.silent = None;
        let former = coming.former;
        self.sequence += 1;
        let node = NodeId(last as u64 * CONNECTIONS + CONNECTIONS / 2 + self.sequence);
        let way = self.way(member);
        let register = Register { session: node.0 + 1, former, ..way.register.clone() };
        *way = Way::new(node, register.clone());
        self.schedulers[last].machine.handle_connected(node, now);
        self.mail(Letter::Up(node, NodeMessage::Register(register)));
    }

    pub(super) fn give_up_coming(&mut self, member: Member) {
        *self.coming(member) = None;
        match member {
            Member::Worker(index) => {
                let source = Source::new(LinkError::Closed);
                let error: Error = StartError::SchedulerLost { source }.into();
                self.workers[index].over = Some(error);
            }
            Member::Server(index) => self.kill_server(index),
        }
    }

    /// Something came from the scheduler to a node that may be on its way. Says whether it came by
    /// a connection that is of use.
    pub(super) fn hear_while_coming(&mut self, member: Member) -> bool {
        let now = self.now();
        let Some(coming) = self.coming(member) else { return true };
        let is_there = coming.is_there();
        (coming.heard, coming.silent) = (coming.heard.map(|_| now), None);
        self.way(member).stop_dialing();
        is_there
    }

    /// The connection of a rank that is of no epoch has ended.
    pub(super) fn lose_while_coming(&mut self, index: usize) {
        let member = Member::Worker(index);
        let (now, worker) = (self.now(), &mut self.workers[index]);
        if worker.over.is_some() {
            return;
        }
        let Some(coming) = worker.coming.as_mut().filter(|one| one.former.is_some()) else {
            return self.give_up_coming(member);
        };
        coming.heard = None;
        coming.lost.get_or_insert(now);
        let attempt = coming.attempt;
        self.dial_at(member, attempt, now + PAUSE);
    }

    /// The network between the scheduler and a rank breaks: each takes the other's end for closed.
    pub fn part_worker(&mut self, index: usize) {
        let node = self.workers[index].way.node;
        self.mail(Letter::Gone(node));
        self.mail(Letter::Closed(node));
    }

    /// The same of a server.
    pub fn part_server(&mut self, index: usize) {
        let node = self.servers[index].way.node;
        self.mail(Letter::Gone(node));
        self.mail(Letter::Closed(node));
    }
}
