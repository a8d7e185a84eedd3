//! A worker's timeline: begun and ended by callers, told to the NIC loop and to the scheduler,
//! which tells the servers.

use super::NicSide;
use super::nic_loop::Command;
use crate::base::error::{Error, Refusal, Source};
use crate::base::lock;
use crate::rounds::Plan;
use crate::rounds::handover::GpuInbox;
use bps_engine::base::Rank;
use bps_engine::control::LinkSender;
use bps_engine::proto::messages::{self, NodeMessage, Roster};
use bps_engine::trace::clock::{Clock, now_ns};
use bps_engine::trace::timeline::{Names, Recorder, Subject, Timeline, Who};
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// What the callers' threads and the control thread share of it.
pub(crate) struct Tracing {
    rank: Rank,
    pub(crate) clock: Arc<Clock>,
    names: Arc<Names>,
    sender: LinkSender,
    nic: NicSide,
    /// The thread of this rank's GPU, once it is there.
    gpu: Arc<OnceLock<GpuInbox>>,
    /// Read at each push_pull: whether to look at the clock.
    is_on: AtomicBool,
    /// How this epoch has come about, unless it is the first.
    change: Option<String>,
    current: Mutex<Option<Timeline>>,
}

impl Tracing {
    /// Without a timeline yet.
    pub(crate) fn new(
        roster: &Roster,
        sender: &LinkSender,
        nic: &NicSide,
        gpu: &Arc<OnceLock<GpuInbox>>,
    ) -> Tracing {
        Tracing {
            rank: Rank(roster.index),
            clock: Arc::default(),
            names: Arc::default(),
            sender: sender.clone(),
            nic: nic.clone(),
            gpu: Arc::clone(gpu),
            is_on: AtomicBool::new(false),
            change: roster.change.clone(),
            current: Mutex::default(),
        }
    }

    /// Names a tensor's parts, whether or not a timeline is on: one may begin at any time.
    pub(crate) fn name(&self, plan: &Plan) {
        self.names.add(&plan.name, plan.parts.iter().map(|part| part.key));
    }

    /// The time of a push_pull that is asked for now; 0 when nobody records it.
    pub(crate) fn asked_ns(&self) -> u64 {
        if self.is_on.load(Ordering::Relaxed) { now_ns() } else { 0 }
    }

    pub(crate) fn start(&self, folder: &Path, rounds: RangeInclusive<u64>) -> Result<(), Error> {
        let mut current = lock(&self.current);
        if let Some(timeline) = current.as_ref().filter(|timeline| !timeline.has_ended()) {
            return Err(Refusal::TimelineOpen { path: timeline.path().to_owned() }.into());
        }
        // The servers may run elsewhere in the file system.
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        let subject = Subject {
            who: Who::Rank(self.rank),
            threads: 2,
            rounds: rounds.clone(),
            names: Arc::clone(&self.names),
            clock: Arc::clone(&self.clock),
        };
        let (timeline, mut recorders) = Timeline::start(&folder, subject)
            .map_err(|error| Refusal::Timeline(Source::new(error)))?;
        self.clock.want(true);
        bps_engine::control::ask_time(&self.clock, &self.sender);
        self.tell(Some(messages::Timeline {
            folder: folder.to_string_lossy().into_owned(),
            first_round: *rounds.start(),
            last_round: *rounds.end(),
        }));
        let mut recorder = || recorders.pop().unwrap_or_default();
        self.record_with(recorder(), recorder());
        self.is_on.store(true, Ordering::Relaxed);
        self.change.iter().for_each(|line| timeline.note(line));
        *current = Some(timeline);
        Ok(())
    }

    /// Who takes part has changed.
    pub(crate) fn note(&self, line: &str) {
        lock(&self.current).iter().for_each(|timeline| timeline.note(line));
    }

    /// Ends the timeline, if there is one, and returns when its file is written.
    pub(crate) fn stop(&self) {
        // Stopping what is not on is allowed to callers.
        let Some(timeline) = lock(&self.current).take() else { return };
        self.is_on.store(false, Ordering::Relaxed);
        self.record_with(Recorder::default(), Recorder::default());
        self.tell(None);
        self.clock.want(false);
        timeline.finish();
    }

    fn tell(&self, timeline: Option<messages::Timeline>) {
        // A scheduler that can't be written to is noticed by the control thread.
        let _ = self.sender.send(&NodeMessage::Timeline { timeline });
    }

    /// With the recorders of the NIC loop and of the thread of a GPU, which comes behind what was
    /// pushed before.
    fn record_with(&self, nic: Recorder, gpu: Recorder) {
        let gpu = match self.gpu.get() {
            Some(inbox) => {
                inbox.record_with(gpu);
                None
            }
            None => Some(gpu),
        };
        // A loop that has ended has dropped its recorder; one that hangs records nothing.
        let _ = self.nic.command(Command::Trace { nic, gpu });
        self.nic.wake();
    }
}
