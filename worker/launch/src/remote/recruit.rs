//! Ranks that start while a job runs, on machines that are in it or that come to it.

#![forbid(unsafe_code)]

use super::super::crew::Slot;
use super::super::frames::{Instruction, Order, other_release};
use super::super::hosts::{Host, is_local};
use super::super::layout::Site;
use super::super::plan::Environment;
use super::super::ssh;
use super::{Connection, RemoteCrew};
use bps_engine::base::word;
use bps_engine::config::LaunchConfig;
use std::ffi::OsString;
use std::time::Duration;

/// What starts ranks that come later.
pub(in super::super) struct Recruiting {
    pub(in super::super) launch: LaunchConfig,
    /// The launcher, on this machine or another.
    pub(in super::super) program: Vec<String>,
    /// Of new connections.
    pub(in super::super) environment: Environment,
    /// What every rank is told, whatever its machine is.
    pub(in super::super) template: Instruction,
    /// Machines with ranks that the job began with.
    pub(in super::super) num_workers: u32,
    /// Whether the scheduler can be reached from this machine only.
    pub(in super::super) is_here: bool,
    /// How long a machine may take to answer.
    pub(in super::super) timeout: Duration,
}

impl RemoteCrew {
    /// Ranks may be started from now on.
    pub(in super::super) fn recruit_by(&mut self, recruiting: Recruiting) {
        self.recruiting = Some(recruiting);
    }

    /// See [`Crew::enlist`](super::super::crew::Crew::enlist).
    pub(super) fn recruit(&mut self, slot: &Slot) -> Result<Option<usize>, String> {
        let Some(recruiting) = &self.recruiting else {
            return Err("no rank can be started here any more".to_owned());
        };
        let Some(index) = self.reaches(&slot.host) else {
            return self.reach(&slot.host).map(|()| None);
        };
        let connection = &mut self.connections[index];
        if let Some((_, why)) = &connection.failure {
            let why = why.clone();
            connection.is_told = true;
            return Err(why);
        }
        let Some(hello) = &connection.hello else {
            if connection.heard_at.elapsed() >= recruiting.timeout {
                let why = ssh::too_late(recruiting.timeout, &connection.text_said());
                connection.fail(1, why);
                connection.input = None;
                connection.kill();
            }
            return Ok(None);
        };
        if let Some(why) = other_release(hello) {
            connection.fail(1, why);
            connection.input = None;
            return Ok(None);
        }
        let order = Order::Start(Box::new(recruiting.instruction(slot)));
        let place = self.places.len();
        self.places.push((index, word(connection.processes.len())));
        connection.processes.push((place, false));
        let shown = self.screen.as_mut().map_or(0, |screen| screen.add(&slot.label));
        self.shown.push(shown);
        self.order(index, &order);
        Ok(Some(place))
    }

    /// The last connection to a machine, unless all is said about its end.
    fn reaches(&self, host: &Host) -> Option<usize> {
        let is_here = host.user.is_none() && is_local(&host.name);
        let is_to = |connection: &Connection| {
            connection.site.host.name == host.name || is_here && connection.site.is_local
        };
        let last = self.connections.iter().rposition(is_to)?;
        let connection = &self.connections[last];
        // A machine that was lost with its ranks has been told of by their ends.
        let is_over = connection.input.is_none()
            && (connection.failure.is_none() || !connection.processes.is_empty());
        (!connection.is_told && !is_over).then_some(last)
    }

    fn reach(&mut self, host: &Host) -> Result<(), String> {
        let Some(recruiting) = &self.recruiting else { return Ok(()) };
        let is_local = host.user.is_none() && is_local(&host.name);
        if recruiting.is_here && !is_local {
            return Err(
                "the job began on this machine alone, and meets on loopback; start it with \
                        --interface, so that other machines reach it"
                    .to_owned(),
            );
        }
        let site = Site { host: host.clone(), is_local, worker_id: None, servers: Vec::new() };
        let words: Vec<OsString> = ssh::command(&site, &recruiting.launch, &recruiting.program)
            .map_err(|error| error.to_string())?;
        let opened = Connection::open(&site, &words, &recruiting.environment, &self.guardian);
        let mut connection = opened.map_err(|error| error.to_string())?;
        if let Some(screen) = &mut self.screen {
            connection.shown = screen.add(&host.name);
        }
        self.connections.push(connection);
        Ok(())
    }

    /// Lets the agent of a machine leave, if nothing runs there.
    pub(super) fn let_go(&mut self, host: &Host) {
        if let Some(index) = self.reaches(host) {
            let connection = &mut self.connections[index];
            if connection.processes.iter().all(|(_, ended)| *ended) && connection.outbox.is_empty()
            {
                connection.input = None;
                connection.is_told = true;
            }
        }
    }
}

impl Recruiting {
    fn instruction(&self, slot: &Slot) -> Instruction {
        let mut settings = self.template.settings.clone();
        if slot.is_new {
            let num_workers = self.num_workers.max(slot.worker_id + 1);
            let set = [("BPS_JOINS", "1".to_owned()), ("DMLC_NUM_WORKER", num_workers.to_string())];
            settings.extend(set.map(|(name, value)| (name.to_owned(), value.into())));
        }
        Instruction {
            settings,
            worker_id: slot.worker_id,
            workers: slot.count,
            slots: vec![slot.local_rank],
            ..self.template.clone()
        }
    }
}
