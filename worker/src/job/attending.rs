//! The connection to the scheduler until the control thread looks after it: heartbeats, the roster,
//! and whatever else is said meanwhile.
//!
//! A rank between two epochs keeps the connection to a scheduler that falls silent, and registers
//! with another one beside it, if there is one. It can't know which of the two the others follow.
//! Invariant: whichever gives it a roster is followed, and the other one sees its connection end.

#[cfg(test)]
mod tests;

use super::dialing::{Dialing, Links};
use crate::base::error::{Corruption, Error, SettingError, Source, StartError};
use crate::job::agent::over_error;
use bps_engine::config::Config;
use bps_engine::control::{Door, Found, LinkError, LinkReceiver, LinkSender, Progress, Redial};
use bps_engine::proto::absence::{Absence, Wanted};
use bps_engine::proto::messages::{NodeMessage, OverReason, Register, Roster, SchedulerMessage};
use bps_engine::proto::pulse::{Pulse, SchedulerSilent};
use bps_engine::trace::log;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two looks at the lanes that are being dialed, or at two schedulers.
const LOOK: Duration = Duration::from_millis(2);
/// How long the scheduler has to say why a peer can't be reached.
const VERDICT: Duration = Duration::from_secs(2);

/// How often a rank that waits for the others looks after its heartbeats.
pub(super) const TICK: Duration = Duration::from_millis(50);

/// Why an epoch was not joined.
pub(super) enum Missed {
    /// It is over, and who had this session may be in the next one.
    Epoch(u64),
    /// The scheduler is lost; whoever had this session is of an elastic job that has formed.
    Scheduler(Option<u64>, StartError),
    Job(Error),
}

impl From<Error> for Missed {
    fn from(error: Error) -> Missed {
        match error {
            Error::Start(error) => error.into(),
            error => Missed::Job(error),
        }
    }
}

impl From<StartError> for Missed {
    fn from(error: StartError) -> Missed {
        if error.is_of_scheduler() {
            return Missed::Scheduler(None, error);
        }
        Missed::Job(error.into())
    }
}

impl From<SettingError> for Missed {
    fn from(error: SettingError) -> Missed {
        Missed::Job(error.into())
    }
}

/// The connection to the scheduler failed before the job had formed.
pub(super) fn lost(error: impl std::error::Error + Send + Sync + 'static) -> StartError {
    StartError::SchedulerLost { source: Source::new(error) }
}

/// See the [module](self).
pub(super) struct Attendant {
    pub(super) start: Instant,
    pub(super) pulse: Pulse,
    pub(super) sender: LinkSender,
    pub(super) receiver: LinkReceiver,
    /// Where to knock, and what this rank has registered as.
    pub(super) door: Door,
    pub(super) register: Register,
    /// The way to another scheduler.
    pub(super) redial: Redial,
    /// Of the scheduler, and how long that is waited out while there is no roster.
    pub(super) absence: Absence,
}

impl Attendant {
    /// Sends heartbeats as they are due. Returns for how long the scheduler has been silent, if
    /// that is too long.
    fn beat(&mut self) -> Result<Option<Duration>, Error> {
        let beat = self.pulse.look(self.start.elapsed());
        if beat.send {
            let sent = self.sender.send(&NodeMessage::Heartbeat { rounds: 0 });
            if !self.redial.is_asking() {
                sent.map_err(lost)?;
            }
        }
        Ok(beat.silent)
    }

    /// What the scheduler says next, but for answers to heartbeats.
    fn receive(&mut self, wait: Duration) -> Result<Option<SchedulerMessage>, Error> {
        let message = self.receiver.receive(wait.min(TICK)).map_err(|error| match error {
            LinkError::Altered { .. } => Corruption::Control(Source::new(error)).into(),
            _ => Error::from(lost(error)),
        })?;
        let Some(SchedulerMessage::Heartbeat) = message else { return Ok(message) };
        let now = self.start.elapsed();
        self.pulse.answered(now);
        if let Some(silent) = self.absence.end(now) {
            let seconds = silent.as_secs_f64();
            log::info!("{} answers again after {seconds:.1} s", self.pulse.scheduler());
            if !self.redial.is_asking() {
                self.redial.forget();
            }
        }
        Ok(None)
    }

    /// The next message of the scheduler, if one comes within `wait`, or a tick; where it is
    /// silent, or was, perhaps of another one.
    fn attend(&mut self, wait: Duration) -> Result<Option<SchedulerMessage>, Missed> {
        if let Some(silent) = self.beat()? {
            let complaint = self.pulse.complaint(silent);
            if !self.absence.is_waited_out() {
                return Err(StartError::SchedulerSilent(complaint).into());
            }
            let now = self.start.elapsed();
            let line = complaint.to_string();
            if self.absence.begin(&line, silent, now).is_some() {
                log::warning!("{line}; this rank waits, and looks for another one on that address");
            }
            self.look_for_another(complaint)?;
        }
        if let Some(message) = self.hear_another() {
            return Ok(Some(message));
        }
        let is_alone = !self.absence.is_away() && !self.redial.is_asking();
        match self.receive(if is_alone { wait } else { LOOK }) {
            Ok(Some(SchedulerMessage::Over { reason })) if self.redial.is_asking() => {
                log::warning!("the scheduler that was silent lets this rank go: {reason}");
                self.go_over(None);
                Ok(None)
            }
            Err(Error::Start(error)) if self.redial.is_asking() => {
                log::warning!("{error}; another one was found");
                self.go_over(None);
                Ok(None)
            }
            Ok(Some(roster @ SchedulerMessage::Roster(_))) => {
                self.redial.forget();
                Ok(Some(roster))
            }
            received => Ok(received?),
        }
    }

    fn look_for_another(&mut self, complaint: SchedulerSilent) -> Result<(), Missed> {
        let now = self.start.elapsed();
        match self.absence.look(self.pulse.scheduler(), now) {
            // One that was found says whom it waits for.
            _ if self.redial.is_asking() => {}
            Some(Wanted::End(_)) => {
                return Err(Missed::Job(StartError::SchedulerSilent(complaint).into()));
            }
            Some(Wanted::Dial) => {
                if let Err(error) = self.redial.dial() {
                    log::warning!("no thread: {error}");
                    self.absence.failed(now);
                }
            }
            None => {}
        }
        Ok(())
    }

    /// What another scheduler says that concerns this rank.
    fn hear_another(&mut self) -> Option<SchedulerMessage> {
        match self.redial.poll(Duration::ZERO) {
            Progress::Connected => self.redial.register(&self.register),
            Progress::Failed => self.absence.failed(self.start.elapsed()),
            Progress::Says(SchedulerMessage::Roster(roster)) => {
                self.go_over(Some(roster.term));
                return Some(SchedulerMessage::Roster(roster));
            }
            Progress::Says(over @ SchedulerMessage::Over { .. }) => {
                if self.absence.is_away() {
                    self.go_over(None);
                    return Some(over);
                }
                self.redial.forget();
            }
            Progress::Says(SchedulerMessage::Waiting { text }) => log::info!("{text}"),
            Progress::None | Progress::Says(_) | Progress::Leads { .. } => {}
        }
        None
    }

    /// The other scheduler is the only one from now on; the one before learns so if the other leads
    /// the job, in that term.
    fn go_over(&mut self, term: Option<u32>) {
        let Some(Found { sender, receiver, door }) = self.redial.take() else { return };
        if let Some(term) = term {
            let _ = self.sender.send(&NodeMessage::Deposed { term });
        }
        self.sender.replace(sender);
        self.register.session = door.session;
        (self.receiver, self.door) = (receiver, door);
        let now = self.start.elapsed();
        self.pulse.restart(now);
        self.absence.end(now);
    }

    /// The roster. A rank that comes back may have to wait for others to notice that their epoch is
    /// over.
    pub(super) fn wait_for_roster(&mut self, config: &Config) -> Result<Roster, Missed> {
        let comes_back = self.register.former.is_some();
        let others = if comes_back { config.stall_timeout } else { Duration::ZERO };
        let limit = config.start_timeout.max(others) + Duration::from_secs(2);
        loop {
            let left = limit.saturating_sub(self.start.elapsed());
            if left.is_zero() {
                let (waited, scheduler) =
                    (config.start_timeout, format!("{}:{}", config.root_uri, config.root_port));
                return Err(StartError::NoRoster { waited, scheduler }.into());
            }
            match self.attend(left)? {
                Some(SchedulerMessage::Waiting { text }) => log::info!("{text}"),
                Some(SchedulerMessage::Roster(roster)) => return Ok(roster),
                Some(SchedulerMessage::Over { reason }) => {
                    return Err(StartError::NotFormed(Arc::new(reason)).into());
                }
                Some(_) | None => {}
            }
        }
    }

    /// Waits for the lanes. What the scheduler says meanwhile is kept for the control thread, but
    /// for the end of the job. That thread also waits for one that is silent, where the job
    /// `outlasts` it.
    pub(super) fn wait_for_lanes(
        &mut self,
        mut dialing: Dialing,
        outlasts: bool,
    ) -> Result<Links, Missed> {
        let session = self.register.session;
        let mut early = Vec::new();
        let mut failed: Option<(Instant, Error)> = None;
        loop {
            if failed.is_none() {
                match dialing.poll() {
                    Ok(None) => {
                        if let Some(line) = dialing.complaint() {
                            log::warning!("{line}");
                        }
                    }
                    Ok(Some(links)) => {
                        self.receiver.put_back(early);
                        return Ok(links);
                    }
                    Err(error) => failed = Some((Instant::now(), error)),
                }
            }
            if let Some(silent) = self.beat()?
                && (failed.is_some() || !outlasts)
            {
                let error = StartError::SchedulerSilent(self.pulse.complaint(silent));
                return Err(Missed::Scheduler(outlasts.then_some(session), error));
            }
            match self.receive(LOOK)? {
                Some(SchedulerMessage::Over { reason: OverReason::Reforming { .. } }) => {
                    return Err(Missed::Epoch(session));
                }
                Some(SchedulerMessage::Over { reason }) => return Err(over_error(reason).into()),
                Some(message) => early.push(message),
                None => {}
            }
            // A peer that can't be reached may have died: the scheduler knows better.
            if let Some((_, error)) = failed.take_if(|(since, _)| since.elapsed() >= VERDICT) {
                let message = error.to_string();
                let _ = self.sender.send(&NodeMessage::failed(message));
                return Err(error.into());
            }
        }
    }
}
