//! The ranks of an elastic job over its life: which machines have room, who runs there, who is
//! started next, and who is asked to leave.
//!
//! Invariant: there are never more than `--max-workers`; nobody is asked to leave while that would
//! end the job; and a machine on which ranks fail waits longer each time before it is tried again.

#![forbid(unsafe_code)]

use super::crew::{Crew, Slot};
use super::discovery::Discovery;
use super::hosts::Host;
use super::output::say;
use bps_engine::base::word;
use bps_engine::config::Config;
use bps_engine::limits::RANKS_MAX;
use rustix::process::Signal;
use std::time::{Duration, Instant};

/// After a rank has ended well, the others may be about to: nothing is started so long.
const QUIET: Duration = Duration::from_secs(10);
/// What the launcher's own machine is called in a job of one machine.
const HERE: &str = "this machine";

/// What is in a place for a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Empty,
    Runs(usize),
    /// It was asked to, and is killed then.
    Leaves(usize, Instant),
    /// Its rank has ended well: it has done its work, or its machine is about to go.
    Done,
}

/// A machine that ranks run on, or have.
struct Machine {
    host: Host,
    worker_id: u32,
    /// Ranks there at the beginning of the job; 0 of a machine that came later.
    began_with: u32,
    /// Ranks that there is room for now.
    room: u32,
    places: Vec<Place>,
    failures: u32,
    failed_at: Option<Instant>,
    rests_until: Option<Instant>,
    /// It was said that it is gone and its ranks can't be spared.
    is_told: bool,
}

/// A rank that has started.
pub(super) struct Recruit {
    pub(super) place: usize,
    pub(super) label: String,
}

/// How a rank has ended, as far as this is concerned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// Not as it should.
    Failed,
    /// It was asked to leave.
    Asked,
    /// By itself.
    Well,
}

/// See the [module](self).
pub(super) struct Fleet {
    machines: Vec<Machine>,
    discovery: Option<Discovery>,
    slots: u32,
    most: usize,
    least: usize,
    /// How long the job waits where it has too few ranks.
    patience: Duration,
    /// From the request to leave to the kill.
    notice: Duration,
    delay: Duration,
    delay_max: Duration,
    quiet_until: Option<Instant>,
    /// Lines about failures, said once those themselves have been.
    news: Vec<String>,
}

impl Fleet {
    /// Whether ranks are started while the job runs.
    pub(super) fn is_wanted(config: &Config) -> bool {
        config.launch.max_workers.is_some() || config.launch.discovery.is_some()
    }

    /// Without machines, which `discovery` names from now on, if there is one.
    pub(super) fn new(config: &Config, discovery: Option<Discovery>) -> Fleet {
        let launch = &config.launch;
        Fleet {
            machines: Vec::new(),
            discovery,
            slots: launch.slots,
            most: launch.max_workers.map_or(RANKS_MAX, |most| most as usize),
            least: config.min_workers.unwrap_or(1).max(1) as usize,
            patience: config.elastic_wait,
            notice: config.leave_notice + launch.grace,
            delay: launch.restart_delay,
            delay_max: launch.restart_delay_max,
            quiet_until: None,
            news: Vec::new(),
        }
    }

    /// The only machine, with ranks in these places of the plan.
    pub(super) fn begin_here(&mut self, places: Vec<usize>) {
        let host = Host { user: None, name: HERE.to_owned(), count: None };
        self.begin(host, 0, places);
    }

    /// A machine that the job begins with.
    pub(super) fn begin(&mut self, host: Host, worker_id: u32, places: Vec<usize>) {
        let ranks = word(places.len());
        self.machines.push(Machine {
            began_with: ranks,
            room: ranks,
            places: places.into_iter().map(Place::Runs).collect(),
            ..Machine::new(host, worker_id)
        });
    }

    /// Whether the job waits for new ranks if it has too few.
    pub(super) fn is_patient(&self) -> bool {
        !self.patience.is_zero()
    }

    /// A rank has ended.
    pub(super) fn ended(&mut self, process: usize, code: i32, now: Instant) -> End {
        let (delay, delay_max) = (self.delay, self.delay_max);
        let found = self.machines.iter_mut().find_map(|machine| {
            let place = machine.places.iter_mut().find(|place| place.process() == Some(process))?;
            let before = *place;
            Some((machine, before))
        });
        let Some((machine, before)) = found else {
            return if code == 0 { End::Well } else { End::Failed };
        };
        let after = match (before, code) {
            (Place::Runs(_), 0) => Place::Done,
            _ => Place::Empty,
        };
        machine.places.iter_mut().filter(|place| **place == before).for_each(|it| *it = after);
        match (before, code) {
            (Place::Leaves(..), _) => End::Asked,
            (_, 0) => {
                self.quiet_until = Some(now + QUIET);
                End::Well
            }
            _ => {
                self.news.extend(machine.fail(delay, delay_max, now));
                End::Failed
            }
        }
    }

    /// Looks around: asks ranks to leave whose machines are gone, and starts others where there is
    /// room, while `running` ranks run. Returns those that have started.
    pub(super) fn look(
        &mut self,
        crew: &mut dyn Crew,
        running: usize,
        now: Instant,
    ) -> Vec<Recruit> {
        self.news.drain(..).for_each(|line| say(&line));
        if let Some(hosts) = self.discovery.as_mut().and_then(Discovery::take) {
            self.learn(hosts, now);
        }
        self.ask_to_leave(crew, running, now);
        self.kill_late(crew, now);
        if self.quiet_until.is_some_and(|until| now < until) {
            return Vec::new();
        }
        self.start(crew, running, now)
    }

    /// Which machines there are now.
    fn learn(&mut self, hosts: Vec<Host>, now: Instant) {
        for machine in &mut self.machines {
            machine.room = 0;
        }
        let mut order = Vec::new();
        for host in hosts {
            let room = host.count.unwrap_or(self.slots);
            let known = self.machines.iter().position(|it| it.host.name == host.name);
            let index = known.unwrap_or_else(|| {
                let ids = 0..=word(self.machines.len());
                let is_free = |id: &u32| self.machines.iter().all(|it| it.worker_id != *id);
                let id = ids.into_iter().find(is_free).expect("one more than there are machines");
                say(&format!("{}: room for {room} more", host.name));
                self.machines.push(Machine::new(host, id));
                self.machines.len() - 1
            });
            let machine = &mut self.machines[index];
            machine.room = room;
            machine.is_told = false;
            let places = machine.places.len().max(room as usize);
            machine.places.resize(places, Place::Empty);
            order.push(machine.worker_id);
        }
        let delay_max = self.delay_max;
        self.machines.retain(|machine| !machine.is_done_with(delay_max, now));
        // Those that the answer names first get ranks first.
        self.machines.sort_by_key(|machine| {
            order.iter().position(|id| *id == machine.worker_id).unwrap_or(usize::MAX)
        });
    }

    fn ask_to_leave(&mut self, crew: &mut dyn Crew, running: usize, now: Instant) {
        let leaving = self.machines.iter().flat_map(|machine| &machine.places);
        let leaving = leaving.filter(|place| matches!(place, Place::Leaves(..))).count();
        let mut spare = running.saturating_sub(leaving + self.least);
        if self.is_patient() {
            spare = usize::MAX;
        }
        for machine in &mut self.machines {
            let room = machine.room as usize;
            let (mut asked, mut kept) = (0_u32, 0_u32);
            for place in machine.places.iter_mut().skip(room) {
                match *place {
                    Place::Runs(process) if spare > 0 => {
                        spare -= 1;
                        asked += 1;
                        crew.signal(process, Signal::TERM);
                        *place = Place::Leaves(process, now + self.notice);
                    }
                    Place::Runs(_) => kept += 1,
                    // A machine that comes again begins anew.
                    Place::Done => *place = Place::Empty,
                    Place::Empty | Place::Leaves(..) => {}
                }
            }
            let name = &machine.host.name;
            if asked > 0 {
                say(&format!("{name} has room for {room} ranks now: {asked} there are to leave"));
            }
            if kept > 0 && !machine.is_told {
                machine.is_told = true;
                say(&format!(
                    "{name} has room for {room} ranks now, but the job needs {kept} more of them \
                     (--min-workers {})",
                    self.least
                ));
            }
            if room == 0 && machine.places.iter().all(|place| *place == Place::Empty) {
                crew.release(&machine.host);
            }
        }
    }

    fn kill_late(&mut self, crew: &mut dyn Crew, now: Instant) {
        let notice = self.notice;
        for machine in &mut self.machines {
            for place in &mut machine.places {
                if let Place::Leaves(process, deadline) = *place
                    && now >= deadline
                {
                    say(&format!(
                        "a rank on {} has not left within {} s: killed",
                        machine.host.name,
                        notice.as_secs_f64()
                    ));
                    crew.signal(process, Signal::KILL);
                    // Its end is awaited, however long that takes to be told.
                    *place = Place::Leaves(process, now + notice);
                }
            }
        }
    }

    fn start(&mut self, crew: &mut dyn Crew, running: usize, now: Instant) -> Vec<Recruit> {
        let mut free = self.most.saturating_sub(running);
        let (delay, delay_max) = (self.delay, self.delay_max);
        let mut started = Vec::new();
        for machine in &mut self.machines {
            if machine.rests_until.is_some_and(|until| now < until) {
                continue;
            }
            let empty = (0..machine.room).filter(|at| machine.places[*at as usize].is_empty());
            let empty: Vec<u32> = empty.collect();
            for (index, local_rank) in (0..).zip(&empty) {
                if free == 0 {
                    return started;
                }
                let slot = machine.slot(*local_rank);
                match crew.enlist(&slot) {
                    Ok(Some(place)) => {
                        free -= 1;
                        machine.places[*local_rank as usize] = Place::Runs(place);
                        started.push(Recruit { place, label: slot.label });
                    }
                    Ok(None) => {
                        // Its ranks are counted before others are reached in their place.
                        free = free.saturating_sub(empty.len() - index);
                        break;
                    }
                    Err(why) => {
                        say(&format!("no rank can be started on {}: {why}", machine.host.name));
                        self.news.extend(machine.fail(delay, delay_max, now));
                        break;
                    }
                }
            }
        }
        started
    }
}

impl Place {
    fn process(self) -> Option<usize> {
        match self {
            Place::Runs(process) | Place::Leaves(process, _) => Some(process),
            Place::Empty | Place::Done => None,
        }
    }

    fn is_empty(self) -> bool {
        self == Place::Empty
    }
}

impl Machine {
    fn new(host: Host, worker_id: u32) -> Machine {
        Machine {
            host,
            worker_id,
            began_with: 0,
            room: 0,
            places: Vec::new(),
            failures: 0,
            failed_at: None,
            rests_until: None,
            is_told: false,
        }
    }

    /// One of its ranks has failed, or cannot be started. What fails while it rests was running
    /// before. Returns the line about it.
    fn fail(&mut self, delay: Duration, delay_max: Duration, now: Instant) -> Option<String> {
        if self.rests_until.is_some_and(|until| now < until) {
            return None;
        }
        if self.failed_at.is_some_and(|at| now.saturating_duration_since(at) > delay_max) {
            self.failures = 0;
        }
        self.failures += 1;
        self.failed_at = Some(now);
        let factor = 2_u32.saturating_pow(self.failures - 1);
        let rest = delay.saturating_mul(factor).min(delay_max);
        self.rests_until = Some(now + rest);
        let in_a_row = match self.failures {
            1 => String::new(),
            failures => format!(" ({failures} failures in a row)"),
        };
        Some(format!(
            "no rank is started on {} for {} s{in_a_row}",
            self.host.name,
            rest.as_secs_f64()
        ))
    }

    /// Whether nothing of it has to be remembered.
    fn is_done_with(&self, delay_max: Duration, now: Instant) -> bool {
        let remembers = |at: Instant| now.saturating_duration_since(at) <= delay_max;
        self.room == 0
            && self.places.iter().all(|place| place.process().is_none())
            && !self.failed_at.is_some_and(remembers)
    }

    fn slot(&self, local_rank: u32) -> Slot {
        // A rank that died while the job formed is replaced by one with the same place.
        let is_new = local_rank >= self.began_with;
        let name = &self.host.name;
        Slot {
            host: self.host.clone(),
            local_rank,
            count: if is_new { word(self.places.len()) } else { self.began_with },
            worker_id: self.worker_id,
            is_new,
            label: match name.as_str() {
                HERE => format!("rank {local_rank}"),
                _ if is_new => format!("slot {local_rank} on {name}"),
                _ => format!("rank {} on {name}", self.worker_id * self.began_with + local_rank),
            },
        }
    }
}

/// The machines that a job begins with, and how many ranks on each, which are as many everywhere:
/// whatever gives the most ranks, and `most` at most. All others join.
pub(super) fn first(hosts: &[Host], slots: u32, most: u32) -> Vec<Host> {
    let room = |host: &Host| host.count.unwrap_or(slots).min(most);
    let counts = |ranks: u32| {
        let machines = word(hosts.iter().filter(|host| room(host) >= ranks).count());
        machines.min(most / ranks.max(1)) * ranks
    };
    let best = hosts.iter().map(room).filter(|ranks| *ranks > 0).max_by_key(|ranks| counts(*ranks));
    let Some(ranks) = best else { return Vec::new() };
    let chosen = hosts.iter().filter(|host| room(host) >= ranks).take((most / ranks) as usize);
    chosen.map(|host| Host { count: Some(ranks), ..host.clone() }).collect()
}

#[cfg(test)]
mod tests;
