//! The thread `bps-nic`: it makes the NIC loop and turns it.

#![forbid(unsafe_code)]

use super::nic_loop::Command;
use super::{dialing, start};
use crate::base::error::Error;
use crate::nic::{NicConfig, NicStatistics, Report};
use bps_engine::config::Config;
use bps_engine::harness::{Idler, Step};
use bps_engine::ring::Mpsc;
use bps_engine::transport::{Link, Waker};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// What the thread `bps-nic` begins with.
pub(super) struct NicThread {
    pub(super) commands: Mpsc<Command>,
    pub(super) reports: Mpsc<Report>,
    pub(super) report_waker: Waker,
    pub(super) statistics: Arc<NicStatistics>,
    pub(super) ended: Arc<AtomicBool>,
    pub(super) over: Arc<OnceLock<Error>>,
    pub(super) config: Config,
}

impl NicThread {
    /// Makes the loop, says by `started` how that went, and runs until the loop has ended.
    pub(super) fn run(
        self,
        nic_config: NicConfig,
        links: Vec<(dialing::End, Link)>,
        waker: &Waker,
        started: &Sender<Result<String, Error>>,
    ) {
        let NicThread { commands, reports, report_waker, statistics, ended, over, config } = self;
        let made = start::nic(
            &config,
            nic_config,
            links,
            waker,
            &commands,
            &reports,
            report_waker,
            &statistics,
        );
        let mut nic = match made {
            Ok((nic, line)) => {
                let _ = started.send(Ok(line));
                nic
            }
            Err(error) => {
                let _ = started.send(Err(error));
                return;
            }
        };
        let began = Instant::now();
        let counters = Arc::clone(&statistics.counters);
        let mut idler = Idler::counting(config.idle, start::spin(), counters);
        while !nic.ended() {
            let progress = nic.step(began.elapsed());
            idler.expect(nic.is_awaiting());
            let step = idler.step(progress);
            if idler.is_sample_due() {
                nic.sample();
            }
            if step == Step::Sleep {
                nic.sleep(Duration::from_millis(500));
            }
        }
        nic.end(&ended, &over);
    }
}
