//! What the engine's threads did while something was measured, and so what held the rest up.
//!
//! Invariant: a thread's busy time is its processor time without what its loop spun away; both come
//! from counters that the kernel and the engine keep anyway, read outside the timed stretch.

#![forbid(unsafe_code)]

use crate::report::Fields;
use crate::sample;
use bps_engine::harness;
use std::collections::BTreeMap;

/// A stage that is busy for this share of the time leaves the others waiting.
const BUSY: f64 = 0.85;
/// CPUs that are used for this share of the time have nothing left to give.
const FULL: f64 = 0.9;

/// What was counted until now, by thread: seconds.
#[derive(Clone, Default, Debug)]
pub struct Look(BTreeMap<i32, Thread>);

#[derive(Clone, Default, Debug)]
struct Thread {
    name: String,
    busy: f64,
    /// Ready to run, on no CPU.
    queued: f64,
}

/// Looks at every polling thread of this process.
pub fn look() -> Look {
    #[allow(clippy::cast_precision_loss, reason = "nanoseconds of a measurement")]
    let seconds = |nanoseconds: u64| nanoseconds as f64 / 1e9;
    let all = harness::loops().into_iter().map(|one| {
        let spun = seconds(one.spun_ns.read());
        let (cpu, queued) = scheduled(one.thread);
        let thread =
            Thread { name: one.name.clone(), busy: seconds(cpu) - spun, queued: seconds(queued) };
        (one.thread, thread)
    });
    Look(all.collect())
}

/// Nanoseconds on a CPU, and waiting for one, of a thread of this process.
fn scheduled(thread: i32) -> (u64, u64) {
    let path = format!("/proc/self/task/{thread}/schedstat");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut numbers = text.split_whitespace().map(|word| word.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// What the stages did over the timed stretches.
#[derive(Clone, Default, Debug)]
pub struct Usage {
    threads: BTreeMap<i32, Thread>,
    wall: f64,
    cpu: f64,
}

impl Usage {
    /// Adds a stretch of so many seconds, in which the process used so much processor time.
    pub fn add(&mut self, before: &Look, after: &Look, wall: f64, cpu: f64) {
        self.wall += wall;
        self.cpu += cpu;
        for (id, now) in &after.0 {
            let then = before.0.get(id).cloned().unwrap_or_default();
            let sum = self.threads.entry(*id).or_default();
            sum.name.clone_from(&now.name);
            sum.busy += now.busy - then.busy;
            sum.queued += now.queued - then.queued;
        }
    }

    /// The largest and the mean share of the time that threads of this name were busy.
    fn busy(&self, name: &str) -> (f64, f64) {
        let of = |thread: &&Thread| thread.name.starts_with(name);
        let share = |thread: &Thread| (thread.busy / self.wall).clamp(0.0, 1.0);
        let shares: Vec<f64> = self.threads.values().filter(of).map(share).collect();
        #[allow(clippy::cast_precision_loss, reason = "a few threads")]
        let mean = shares.iter().sum::<f64>() / shares.len().max(1) as f64;
        (shares.iter().copied().fold(0.0, f64::max), mean)
    }
}

/// What the stages of one or more jobs of one shape did: shares of the time.
#[derive(Clone, Copy, Debug)]
pub struct Stages {
    /// The busiest NIC loop.
    pub nic: f64,
    /// The busiest server core.
    pub core: f64,
    /// The mean of all server cores.
    pub core_mean: f64,
    /// CPUs that the process kept busy.
    pub cpus_used: f64,
    /// Time in which polling threads were ready and had no CPU; of several threads together.
    pub queued: f64,
}

impl Stages {
    /// The mean over jobs, each as long as it was timed.
    pub fn of(jobs: &[Usage]) -> Stages {
        let wall: f64 = jobs.iter().map(|job| job.wall).sum();
        let mean = |value: &dyn Fn(&Usage) -> f64| {
            jobs.iter().map(|job| value(job) * job.wall).sum::<f64>() / wall
        };
        let queued = |job: &Usage| job.threads.values().map(|thread| thread.queued).sum::<f64>();
        Stages {
            nic: mean(&|job| job.busy("bps-nic").0),
            core: mean(&|job| job.busy("bps-core").0),
            core_mean: mean(&|job| job.busy("bps-core").1),
            cpus_used: mean(&|job| job.cpu / job.wall),
            queued: mean(&|job| queued(job) / job.wall),
        }
    }

    /// Whether this machine's CPUs have nothing left to give.
    pub fn cpus_are_full(&self) -> bool {
        #[allow(clippy::cast_precision_loss, reason = "a few CPUs")]
        let cpus = sample::cpus() as f64;
        self.cpus_used >= FULL * cpus
    }

    /// Puts down how busy each stage was, and which one waited least.
    pub fn report(&self, fields: &mut Fields) {
        let is_nic = self.nic > self.core;
        let (busiest, share) =
            if is_nic { ("NIC loop", self.nic) } else { ("server core", self.core) };
        let bottleneck = if self.cpus_are_full() {
            format!("all {} CPUs, most of all for the {busiest}", sample::cpus())
        } else if share >= BUSY {
            busiest.to_owned()
        } else if self.queued > 1.0 - share {
            format!("threads that share CPUs, most of all the {busiest}")
        } else {
            format!("hand-offs and the kernel's line; the {busiest} waited least")
        };
        for (name, value) in [
            ("nic_busy", self.nic),
            ("core_busy", self.core),
            ("cpus_used", self.cpus_used),
            ("waited_for_cpu", self.queued),
        ] {
            fields.insert(name.to_owned(), value.into());
        }
        fields.insert("busiest_stage".to_owned(), busiest.into());
        fields.insert("bottleneck".to_owned(), bottleneck.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bps_engine::config::Idle;
    use bps_engine::harness::{Idler, Step};
    use std::time::{Duration, Instant};

    /// A loop that works for one part of the time, and spins for as long.
    fn half_busy(stretch: Duration) -> Usage {
        let body = move || {
            let mut idler = Idler::new(Idle::Adaptive, stretch);
            let (before, start) = (look(), Instant::now());
            while start.elapsed() < stretch {
                std::hint::spin_loop();
            }
            idler.step(true);
            while idler.step(false) == Step::Again {}
            let mut usage = Usage::default();
            usage.add(&before, &look(), start.elapsed().as_secs_f64(), 0.0);
            usage
        };
        harness::spawn("bps-core-9", None, body).unwrap().join().unwrap()
    }

    #[test]
    fn spinning_is_not_work() {
        let stages = Stages::of(&[half_busy(Duration::from_millis(200))]);
        let busy = stages.core;
        assert!((0.02..0.8).contains(&busy), "half of the time was work, not {busy}");
        let mut fields = Fields::new();
        stages.report(&mut fields);
        assert_eq!(fields["busiest_stage"], "server core");
    }
}
