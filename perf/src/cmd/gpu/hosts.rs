//! The hosts of a run with everything that runs on them: the job, the bare streams that say what
//! the links carry, and a further crew of NCCL if somebody tunes it.

use super::{Framework, Run};
use crate::script::Script;
use crate::stage::job::Job;
use crate::stage::{Crew, Member, Stage, stream};
use serde_json::json;
use std::process::Command;

/// Where the framework's processes meet: the job's own and those of the tuned crew.
const PORTS: [u16; 2] = [9100, 9101];
/// Time of one burst of the bare stream, milliseconds.
const BURST_MS: u64 = 1000;

/// See the [module](self).
pub struct Hosts {
    stage: Stage,
    job: Job,
    tuned: Option<Crew>,
    line: Option<Crew>,
    /// Ranks show its lines where they fail.
    _script: Script,
}

impl Hosts {
    /// Stages the hosts and waits until everything on them is ready.
    pub fn start(run: &Run) -> Result<Hosts, String> {
        let stage = Stage::new(run.plan.hosts(), &run.shape)?;
        let script = match run.framework {
            Framework::Torch => Script::new("gpu_rank.py", include_str!("../../../gpu_rank.py"))?,
            Framework::Jax => Script::new("jax_rank.py", include_str!("../../../jax_rank.py"))?,
        };
        let line = (stage.hosts() > 1).then(|| stream::crew(&stage)).transpose()?;
        let path = script.path();
        let job = Job::start_ranks(&stage, &run.plan, &|host, local| {
            rank(run, &stage, &path, (host, local), true)
        })?;
        let tuned = if run.tuned.is_empty() { None } else { Some(tuned(run, &stage, &path)?) };
        Ok(Hosts { stage, job, tuned, line, _script: script })
    }

    /// Gives the links another rate.
    pub fn shape(&self, run: &Run, rate: u64) -> Result<(), String> {
        self.stage.shape(rate, run.shape.queue_ms)
    }

    /// What all ranks answer to a line: their numbers, rank by rank.
    pub fn work(&mut self, line: &str) -> Result<Vec<Vec<f64>>, String> {
        self.job.ranks.work(line)
    }

    /// The slowest rank's seconds.
    pub fn slowest(&mut self, line: &str) -> Result<f64, String> {
        self.job.ranks.slowest(line)
    }

    /// As [`slowest`](Hosts::slowest), of the tuned crew if there is one.
    pub fn slowest_tuned(&mut self, line: &str) -> Result<Option<f64>, String> {
        self.tuned.as_mut().map(|crew| crew.slowest(line)).transpose()
    }

    /// Bytes a second of each link, both directions at once; nothing where there is no link.
    pub fn line(&mut self) -> Result<Vec<f64>, String> {
        let rates = self.line.as_mut().map(|crew| crew.work(&BURST_MS.to_string())).transpose()?;
        Ok(rates.unwrap_or_default().concat())
    }

    /// Ends everything in good order.
    pub fn end(self) -> Result<(), String> {
        self.tuned.map_or(Ok(()), Crew::end)?;
        self.line.map_or(Ok(()), Crew::end)?;
        self.job.end()
    }
}

/// The command of a rank.
fn rank(run: &Run, stage: &Stage, script: &str, place: (u32, u32), has_engine: bool) -> Command {
    let (host, local) = place;
    let each = run.plan.ranks_per_host;
    let mut command = stage.command(host, &run.python);
    let plan = json!({
        "device": if run.is_cuda { "cuda" } else { "cpu" },
        "rank": host * each + local, "hosts": run.plan.workers,
        "local_rank": local, "local_size": each,
        "master": Stage::address(0).to_string(), "port": PORTS[usize::from(!has_engine)],
        "has_engine": has_engine, "batch": run.batch, "sequences": run.sequences,
        "patience_s": run.patience_s, "timelines": run.timelines,
    });
    command.arg(script).arg(plan.to_string());
    // Else gloo asks the resolver for the machine's name, which no staged host knows.
    command.env("GLOO_SOCKET_IFNAME", "eth0").env("NCCL_SOCKET_IFNAME", "eth0");
    // And torch warns of that, JAX of peers that end.
    command.env("TORCH_CPP_LOG_LEVEL", "ERROR").env("TF_CPP_MIN_LOG_LEVEL", "2");
    // What makes NCCL take namespaces of one machine for hosts.
    command.env("NCCL_HOSTID", format!("host{host}")).env("NCCL_NET", "Socket");
    command.env("NCCL_MNNVL_ENABLE", "0");
    if each == 1 {
        command.env("NCCL_P2P_DISABLE", "1").env("NCCL_SHM_DISABLE", "1");
    }
    // Multicast between GPUs stays off: where a program ends badly, it can take down a machine's
    // GPUs for everybody.
    command.env("NCCL_NVLS_ENABLE", "0").env("NVSHMEM_DISABLE_NVLS", "1");
    command.env("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1");
    if run.framework == Framework::Jax && run.is_cuda {
        // A process of JAX takes every GPU that it sees, and most of its memory at once.
        let (gpus, ranks) = (run.gpus, run.ranks());
        command.env("CUDA_VISIBLE_DEVICES", ((host * each + local) % gpus).to_string());
        let share = 0.8 / f64::from(ranks.div_ceil(gpus));
        command.env("XLA_PYTHON_CLIENT_MEM_FRACTION", format!("{share:.2}"));
        command.env("JAX_PLATFORMS", "cuda,cpu");
    }
    command.envs(run.plan.variables.iter().cloned());
    command
}

/// Processes with nothing but NCCL, as somebody would tune it.
fn tuned(run: &Run, stage: &Stage, script: &str) -> Result<Crew, String> {
    let mut members = Vec::new();
    for host in 0..run.plan.workers {
        for local in 0..run.plan.ranks_per_host {
            let mut command = rank(run, stage, script, (host, local), false);
            command.envs(run.tuned.iter().cloned());
            members.push(Member::start(format!("rank {} of tuned NCCL", members.len()), command)?);
        }
    }
    Crew::new(members, run.plan.patience)
}
