//! Schedulers of a simulated job that die or stop, and those that follow them: how nodes lose one,
//! dial another, and go over to it, as the control threads of ranks and servers do.
//!
//! Invariant: a node heeds one connection, and while it asks another scheduler nothing that the old
//! one says, until it has an answer.

use super::{
    Cluster, Duration, Letter, NodeId, NodeMessage, Register, Scheduler, SchedulerMessage, TICK,
    worker_agent,
};
use bps_engine::control::LinkError;
use bps_engine::proto::messages::OverReason;
use bps_engine::proto::scheduler::Output;
use bps_worker::error::Source;

/// How often nodes look around that have no scheduler.
pub(super) const LOOK: Duration = Duration::from_millis(10);
/// Silence after which a scheduler that was asked counts as none.
pub(super) const PATIENCE: Duration = Duration::from_millis(4_500);
/// Numbers of connections to one scheduler.
pub(super) const CONNECTIONS: u64 = 1 << 32;

/// One scheduler's process.
pub(super) struct Process {
    pub(super) machine: Scheduler,
    pub(super) state: State,
    was_stopped: bool,
    /// What has come to it while it was stopped.
    held: Vec<Letter>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Lives,
    Stopped,
    Dead,
}

/// A rank or a server.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Member {
    Worker(usize),
    Server(usize),
}

/// A node's way to its scheduler.
pub(super) struct Way {
    pub(super) node: NodeId,
    pub(super) register: Register,
    is_cut: bool,
    /// The attempt that is under way.
    dialing: Option<u64>,
    asked: Option<Asked>,
    /// What came by the old connection meanwhile; `None` is its end.
    held: Vec<Option<SchedulerMessage>>,
}

struct Asked {
    node: NodeId,
    heard: Duration,
    beat: Duration,
}

impl Process {
    pub(super) fn new(machine: Scheduler) -> Process {
        Process { machine, state: State::Lives, was_stopped: false, held: Vec::new() }
    }
}

impl Way {
    pub(super) fn new(node: NodeId, register: Register) -> Way {
        Way { node, register, is_cut: false, dialing: None, asked: None, held: Vec::new() }
    }

    /// Whether another scheduler was asked and has not answered.
    pub(super) fn is_asking(&self) -> bool {
        self.asked.is_some()
    }

    pub(super) fn is_dialing(&self) -> bool {
        self.dialing.is_some()
    }

    pub(super) fn stop_dialing(&mut self) {
        self.dialing = None;
    }

    /// Forgets that another scheduler was asked. Returns the connection to it.
    pub(super) fn forget_asked(&mut self) -> Option<NodeId> {
        self.asked.take().map(|asked| asked.node)
    }

    fn has(&self, node: NodeId) -> bool {
        self.node == node || self.asked.as_ref().is_some_and(|asked| asked.node == node)
    }
}

/// To which scheduler a connection leads.
pub(super) fn scheduler_of(node: NodeId) -> usize {
    usize::try_from(node.0 / CONNECTIONS).expect("few schedulers")
}

impl Cluster {
    /// The scheduler's process dies: its connections close without a word. With its machine
    /// (`with_machine`) dies what was on its way from it as well.
    pub fn kill_scheduler(&mut self, with_machine: bool) {
        let last = self.schedulers.len() - 1;
        if with_machine {
            self.letters.retain(|_, letter| match letter {
                Letter::Down(node, _) => scheduler_of(*node) != last,
                _ => true,
            });
        }
        self.end_scheduler(last);
    }

    /// The scheduler's process stops; what is said to it waits.
    pub fn freeze_scheduler(&mut self) {
        let last = self.schedulers.last_mut().expect("there is one");
        (last.state, last.was_stopped) = (State::Stopped, true);
    }

    /// Another scheduler starts at the address of the last one.
    pub fn start_scheduler(&mut self) {
        let scheduler = Scheduler::new(self.config.clone(), self.now());
        self.schedulers.push(Process::new(scheduler));
    }

    /// Whether a scheduler was stopped and another one started beside it: what lives may follow
    /// either, and is missed by the other.
    #[must_use]
    pub fn may_be_parted(&self) -> bool {
        let (_, before) = self.schedulers.split_last().expect("there is one");
        before.iter().any(|scheduler| scheduler.was_stopped)
    }

    /// Whether two ranks look for their job at different schedulers, or one waits for the answer of
    /// a scheduler beside which another one has started.
    #[must_use]
    pub fn are_parted(&self, index: usize, other: usize) -> bool {
        let way = |index: usize| &self.workers[index].way;
        let asked = |index: usize| way(index).asked.as_ref().map(|one| scheduler_of(one.node));
        let heeds = |index: usize| asked(index).unwrap_or_else(|| scheduler_of(way(index).node));
        asked(index).is_some_and(|one| one + 1 < self.schedulers.len())
            || heeds(index) != heeds(other)
    }

    /// A scheduler that was stopped goes on, whether or not another has taken over.
    pub fn thaw_scheduler(&mut self) {
        for index in 0..self.schedulers.len() {
            if self.schedulers[index].state == State::Stopped {
                self.schedulers[index].state = State::Lives;
                let held = std::mem::take(&mut self.schedulers[index].held);
                held.into_iter().for_each(|letter| self.deliver(letter));
            }
        }
    }

    /// Ranks that have no scheduler now.
    fn away(&self) -> usize {
        let away = |agent: Option<&worker_agent::Agent>| agent.is_some_and(|one| one.is_away());
        self.workers.iter().filter(|worker| worker.alive && away(worker.agent.as_ref())).count()
    }

    /// The process of a scheduler is no more.
    pub(super) fn end_scheduler(&mut self, index: usize) {
        self.schedulers[index].state = State::Dead;
        let ways = self.workers.iter().map(|one| &one.way);
        let ways = ways.chain(self.servers.iter().map(|one| &one.way));
        let nodes = ways.flat_map(|way| {
            [Some(way.node), way.asked.as_ref().map(|asked| asked.node)].into_iter().flatten()
        });
        let nodes: Vec<NodeId> = nodes.filter(|node| scheduler_of(*node) == index).collect();
        nodes.into_iter().for_each(|node| self.mail(Letter::Closed(node)));
    }

    /// Carries out what the schedulers want.
    pub(super) fn scheduler_output(&mut self) {
        for index in 0..self.schedulers.len() {
            while let Some(output) = self.schedulers[index].machine.poll_output() {
                match output {
                    _ if self.schedulers[index].state == State::Dead => {}
                    Output::Send(node, message) => {
                        self.note(&message);
                        self.mail(Letter::Down(node, message));
                    }
                    Output::Log(line) => self.log.push(line),
                    Output::Close(node) if !self.wait.is_zero() => self.mail(Letter::Closed(node)),
                    Output::Close(_) | Output::Tuned(_) => {}
                    Output::Done(_) => {
                        self.done = true;
                        if !self.wait.is_zero() {
                            self.end_scheduler(index);
                        }
                    }
                }
            }
        }
    }

    /// Notes what a scheduler has decided.
    fn note(&mut self, message: &SchedulerMessage) {
        match message {
            SchedulerMessage::Over { reason } => self.verdicts.push(reason.clone()),
            SchedulerMessage::Roster(roster) => {
                self.has_led_without_servers |= roster.servers.is_empty();
            }
            _ => {}
        }
    }

    /// Whether a letter reaches a scheduler; one that is stopped gets it later.
    pub(super) fn reach(&mut self, node: NodeId, letter: Letter) -> Option<(usize, Letter)> {
        let index = scheduler_of(node);
        match self.schedulers[index].state {
            State::Lives => return Some((index, letter)),
            State::Stopped => self.schedulers[index].held.push(letter),
            State::Dead => {}
        }
        None
    }

    /// What comes at this moment has come.
    pub(super) fn schedulers_have_heard(&mut self) {
        let now = self.now();
        for one in self.schedulers.iter_mut().filter(|one| one.state == State::Lives) {
            one.machine.handle_heard(now);
        }
    }

    /// How long it is until nodes look around again.
    pub(super) fn pause(&self) -> Duration {
        let servers = || self.servers.iter().any(|one| one.agent.is_away());
        if self.away() > 0 || servers() { LOOK } else { TICK }
    }

    fn member_of(&self, node: NodeId) -> Option<Member> {
        let worker = self.workers.iter().position(|worker| worker.way.has(node));
        let server = || self.servers.iter().position(|server| server.way.has(node));
        worker.map(Member::Worker).or_else(|| server().map(Member::Server))
    }

    pub(super) fn way(&mut self, member: Member) -> &mut Way {
        match member {
            Member::Worker(index) => &mut self.workers[index].way,
            Member::Server(index) => &mut self.servers[index].way,
        }
    }

    pub(super) fn is_there(&self, member: Member) -> bool {
        match member {
            Member::Worker(index) => self.workers[index].alive && !self.workers[index].left,
            Member::Server(index) => !self.servers[index].shards.is_empty(),
        }
    }

    /// What a node hears by one of its connections; `None` is that connection's end.
    pub(super) fn hear(&mut self, node: NodeId, message: Option<SchedulerMessage>) {
        let now = self.now();
        let Some(member) = self.member_of(node) else { return };
        let has_two = self.has_two(member);
        let way = self.way(member);
        let Some(asked) = &mut way.asked else { return self.heed(member, message) };
        let is_old = asked.node != node;
        if !is_old {
            asked.heard = now;
        }
        if let Some(index) = has_two {
            return self.hear_one_of_two(index, is_old, message);
        }
        if is_old {
            return way.held.push(message);
        }
        match message {
            None => self.give_up_asking(member),
            Some(SchedulerMessage::Heartbeat) => {}
            Some(SchedulerMessage::Resumed { term }) => self.go_over(member, term),
            Some(message) => self.heed(member, Some(message)),
        }
    }

    pub(super) fn heed(&mut self, member: Member, message: Option<SchedulerMessage>) {
        if !self.hear_while_coming(member) {
            // Of a connection that it has left.
            return;
        }
        let Some(message) = message else { return self.lose_scheduler(member) };
        match member {
            Member::Worker(index) => self.worker_message(index, message),
            Member::Server(index) => {
                let (now, mut effects) = (self.now(), Vec::new());
                let server = &mut self.servers[index];
                let reason = match &message {
                    SchedulerMessage::Over { reason } => Some(reason),
                    _ => None,
                };
                server.left |= matches!(reason, Some(OverReason::Left { .. }));
                server.agent.handle(message, now, &mut effects);
                self.server_effects(index, effects);
            }
        }
    }

    /// A node's connection has ended.
    fn lose_scheduler(&mut self, member: Member) {
        self.way(member).is_cut = true;
        if !self.is_there(member) {
            return;
        }
        let now = self.now();
        match member {
            Member::Worker(index) if self.workers[index].agent.is_none() => {
                self.lose_while_coming(index);
            }
            Member::Worker(index) => {
                let mut effects = Vec::new();
                if let Some(agent) = &mut self.workers[index].agent {
                    agent.scheduler_lost(Source::new(LinkError::Closed), now, &mut effects);
                }
                self.worker_effects(index, effects);
            }
            Member::Server(index) => {
                let mut effects = Vec::new();
                let line = LinkError::Closed.to_string();
                self.servers[index].agent.scheduler_lost(line, now, &mut effects);
                self.server_effects(index, effects);
            }
        }
    }

    /// A node dials, or needs to no more.
    pub(super) fn redial(&mut self, member: Member, wants: bool) {
        self.sequence += 1;
        let attempt = self.sequence;
        let way = self.way(member);
        way.dialing = wants.then_some(attempt);
        if let Some(asked) = way.asked.take() {
            self.mail(Letter::Gone(asked.node));
        }
        if wants {
            self.mail(Letter::Dialed(member, attempt));
        }
    }

    /// An attempt has come to something, or not.
    pub(super) fn dialed(&mut self, member: Member, attempt: u64) {
        let now = self.now();
        let index = self.schedulers.len() - 1;
        self.sequence += 1;
        let node = NodeId(index as u64 * CONNECTIONS + CONNECTIONS / 2 + self.sequence);
        let is_there = self.is_there(member);
        let way = self.way(member);
        if way.dialing != Some(attempt) || !is_there {
            return;
        }
        way.dialing = None;
        if self.schedulers[index].state != State::Lives {
            return self.not_found(member);
        }
        let way = self.way(member);
        way.asked = Some(Asked { node, heard: now, beat: now });
        let register = way.register.clone();
        let messages = match member {
            Member::Worker(index) => match &self.workers[index].agent {
                Some(agent) => agent.resume(register),
                // It is between two epochs.
                None => {
                    vec![NodeMessage::Register(Register { session: node.0 + 1, ..register })]
                }
            },
            Member::Server(index) => self.servers[index].agent.resume(register),
        };
        self.tell_asking(member, true);
        self.schedulers[index].machine.handle_connected(node, now);
        messages.into_iter().for_each(|message| self.mail(Letter::Up(node, message)));
    }

    /// A server tells the scheduler that it has whether it has asked another one.
    fn tell_asking(&mut self, member: Member, another: bool) {
        let way = self.way(member);
        if matches!(member, Member::Server(_)) && !way.is_cut {
            let old = way.node;
            self.mail(Letter::Up(old, NodeMessage::Asks { another }));
        }
    }

    fn not_found(&mut self, member: Member) {
        let now = self.now();
        match member {
            Member::Worker(index) => {
                self.workers[index].agent.iter_mut().for_each(|agent| agent.not_found(now));
            }
            Member::Server(index) => self.servers[index].agent.not_found(now),
        }
    }

    /// Whoever was asked does not lead the job: what the old one has said meanwhile counts.
    fn give_up_asking(&mut self, member: Member) {
        self.way(member).asked = None;
        self.not_found(member);
        self.tell_asking(member, false);
        let held = std::mem::take(&mut self.way(member).held);
        held.into_iter().for_each(|message| self.heed(member, message));
    }

    /// Another scheduler leads the job.
    fn go_over(&mut self, member: Member, term: u32) {
        let (now, mut said) = (self.now(), None);
        let way = self.way(member);
        let Some(asked) = way.asked.take() else { return };
        let held = std::mem::take(&mut way.held);
        match member {
            Member::Worker(index) => {
                let mut effects = Vec::new();
                if let Some(agent) = &mut self.workers[index].agent {
                    said = agent.follow(term, now, &mut effects);
                }
                self.worker_effects(index, effects);
            }
            Member::Server(index) => {
                let mut effects = Vec::new();
                said = self.servers[index].agent.follow(term, now, &mut effects);
                self.server_effects(index, effects);
            }
        }
        let Some(said) = said else {
            self.mail(Letter::Gone(asked.node));
            self.tell_asking(member, false);
            return held.into_iter().for_each(|message| self.heed(member, message));
        };
        let way = self.way(member);
        let (old, was_cut) = (way.node, way.is_cut);
        (way.node, way.is_cut) = (asked.node, false);
        if !was_cut {
            self.mail(Letter::Up(old, NodeMessage::Deposed { term }));
            self.mail(Letter::Gone(old));
        }
        said.into_iter().for_each(|message| self.mail(Letter::Up(asked.node, message)));
    }

    /// Time passes for those who ask a scheduler.
    pub(super) fn look_for_answers(&mut self) {
        let now = self.now();
        let workers = (0..self.workers.len()).map(Member::Worker);
        for member in workers.chain((0..self.servers.len()).map(Member::Server)).collect::<Vec<_>>()
        {
            let is_there = self.is_there(member);
            let Some(asked) = &mut self.way(member).asked else { continue };
            if is_there && now >= asked.beat + TICK {
                asked.beat = now;
                let node = asked.node;
                self.mail(Letter::Up(node, NodeMessage::Heartbeat { rounds: 0 }));
            }
            let Some(asked) = &self.way(member).asked else { continue };
            if is_there && now >= asked.heard + PATIENCE {
                let node = asked.node;
                self.mail(Letter::Gone(node));
                self.give_up_asking(member);
            }
        }
    }

    /// Connections of a process that dies.
    pub(super) fn hang_up(&mut self, member: Member) {
        let way = self.way(member);
        let nodes = [Some(way.node), way.asked.as_ref().map(|asked| asked.node)];
        nodes.into_iter().flatten().for_each(|node| self.mail(Letter::Gone(node)));
    }
}
