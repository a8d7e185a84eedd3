//! A server's timeline: it begins when the first worker starts one and ends with the last.

#![forbid(unsafe_code)]

use bps_engine::config::Config;
use bps_engine::proto::messages;
use bps_engine::trace::clock::Clock;
use bps_engine::trace::log;
use bps_engine::trace::timeline::{Names, Recorder, Subject, Timeline, Who};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The timeline of the server's cores.
pub(crate) struct Tracing {
    /// Its distance from the scheduler's clock.
    pub(crate) clock: Arc<Clock>,
    /// Where to write whatever workers say: in a job without a key, anybody may be the worker.
    own_folder: Option<PathBuf>,
    cores: u32,
    current: Mutex<Option<Timeline>>,
}

impl Tracing {
    /// Without a timeline yet. `is_open` says that the job has no key.
    pub(crate) fn new(config: &Config, is_open: bool) -> Tracing {
        Tracing {
            clock: Arc::default(),
            own_folder: is_open.then(|| config.trace_folder()),
            cores: config.server_cores,
            current: Mutex::default(),
        }
    }

    /// Begins or ends, as the scheduler says. Returns a recorder for each core, to be handed over.
    pub(crate) fn apply(
        &self,
        server: u32,
        timeline: Option<&messages::Timeline>,
    ) -> Vec<Recorder> {
        let Some(wanted) = timeline else { return self.off() };
        let folder = self.own_folder.as_deref().unwrap_or(Path::new(&wanted.folder));
        let subject = Subject {
            who: Who::Server(server),
            threads: self.cores,
            rounds: wanted.first_round..=wanted.last_round,
            names: Arc::new(Names::default()),
            clock: Arc::clone(&self.clock),
        };
        match Timeline::start(folder, subject) {
            Ok((timeline, recorders)) => {
                log::info!("a timeline is being written to {}", timeline.path().display());
                self.clock.want(true);
                *self.lock() = Some(timeline);
                recorders
            }
            Err(error) => {
                // The job does not depend on it: the workers' own files are written all the same.
                log::warning!("{error}");
                Vec::new()
            }
        }
    }

    /// Who takes part has changed.
    pub(crate) fn note(&self, line: &str) {
        self.lock().iter().for_each(|timeline| timeline.note(line));
    }

    fn off(&self) -> Vec<Recorder> {
        if self.lock().is_none() {
            return Vec::new();
        }
        (0..self.cores).map(|_| Recorder::default()).collect()
    }

    /// Returns when the file of a timeline that has been ended is written: its recorders are gone,
    /// or will be at once.
    pub(crate) fn finish(&self) {
        let timeline = self.lock().take();
        self.clock.want(false);
        if let Some(timeline) = timeline {
            timeline.finish();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Timeline>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
