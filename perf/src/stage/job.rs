//! A job of the real programs on a stage, started as `docs/running.md` says: variables, then
//! `bps-scheduler`, `bps-server` and one process for each rank.

#![forbid(unsafe_code)]

use super::crew::{Crew, Member};
use super::{Stage, program_path};
use std::fmt::Write;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a job may take to form, and a round to end, unless somebody knows better.
pub const PATIENCE: Duration = Duration::from_secs(300);
/// How long scheduler and servers may take to leave behind the last rank.
const LEAVING: Duration = Duration::from_secs(5);
/// The scheduler's port: nobody else is on the stage.
const PORT: u16 = 9000;

/// Who runs where. Worker `i` is on host `i`; servers on hosts of their own follow the workers.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Hosts with ranks.
    pub workers: u32,
    /// Ranks of each of them.
    pub ranks_per_host: u32,
    /// Hosts with a server and no rank.
    pub extra_servers: u32,
    /// Every worker's host has a server too.
    pub colocated: bool,
    /// Polling threads of each server.
    pub cores: u32,
    /// How long the job may take to form, and a round to end.
    pub patience: Duration,
    /// Further variables of every process, as `NAME=value`.
    pub variables: Vec<(String, String)>,
}

impl Plan {
    /// Hosts that the job takes.
    pub fn hosts(&self) -> u32 {
        self.workers + self.extra_servers
    }

    /// Servers, wherever they are.
    pub fn servers(&self) -> u32 {
        self.extra_servers + if self.colocated { self.workers } else { 0 }
    }

    /// The shortest time of a push_pull of one byte, on links of one byte a second each way: how
    /// often a worker's tensor passes the busiest link at least.
    ///
    /// With n colocated servers and k others it is `2n(n-1) / (n² + kn - 2k)` while k < n, so
    /// `2(n-1)/n` without others; from k = n on nothing but a worker's own bytes is left. Servers
    /// on hosts of their own alone carry every worker's bytes between them.
    pub fn optimum(&self) -> f64 {
        let (n, k) = (f64::from(self.workers), f64::from(self.extra_servers));
        if !self.colocated {
            (n / k).max(1.0)
        } else if k >= n {
            1.0
        } else {
            2.0 * n * (n - 1.0) / (n * n + k * n - 2.0 * k)
        }
    }

    fn variables(&self, key: &str) -> Vec<(String, String)> {
        let placement = if self.colocated { "mixed" } else { "balanced" };
        let mut all: Vec<(String, String)> = [
            ("DMLC_PS_ROOT_URI", Stage::address(0).to_string()),
            ("DMLC_PS_ROOT_PORT", PORT.to_string()),
            ("DMLC_NUM_WORKER", self.workers.to_string()),
            ("DMLC_NUM_SERVER", self.servers().to_string()),
            ("BYTEPS_KEY_HASH_FN", placement.to_string()),
            ("BYTEPS_LOCAL_SIZE", self.ranks_per_host.to_string()),
            // Ranks of one host need no server, and should use none; a rank alone is to use it.
            ("BYTEPS_FORCE_DISTRIBUTED", u8::from(self.ranks_per_host == 1).to_string()),
            ("BPS_SERVER_CORES", self.cores.to_string()),
            // Namespaces share the machine's CPUs, and each process would take the first.
            ("BPS_PIN", "0".to_string()),
            ("BPS_LOG_LEVEL", "warning".to_string()),
            ("BPS_JOB_KEY", key.to_string()),
        ]
        .map(|(name, value)| (name.to_string(), value))
        .into();
        all.extend(self.variables.iter().cloned());
        all
    }
}

/// A running job.
pub struct Job {
    /// Its ranks.
    pub ranks: Crew,
    programs: Vec<Program>,
}

/// A program that serves until the job is over; killed when dropped.
struct Program(std::process::Child);

impl Program {
    /// Lets it end by itself until then: what it writes last is whole.
    fn dismiss(&mut self, deadline: Instant) {
        while matches!(self.0.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Job {
    /// Starts a job whose ranks run this program with these arguments.
    pub fn start(stage: &Stage, plan: &Plan, arguments: &[String]) -> Result<Job, String> {
        Job::start_ranks(stage, plan, &|host, _| {
            let mut command = stage.command(host, program_path());
            command.args(arguments);
            command
        })
    }

    /// Starts a job whose ranks are what `command` makes, for a host and the rank's number on it.
    pub fn start_ranks(
        stage: &Stage,
        plan: &Plan,
        command: &dyn Fn(u32, u32) -> Command,
    ) -> Result<Job, String> {
        let variables = plan.variables(&job_key().map_err(|error| error.to_string())?);
        let program = |host: u32, name: &str, role: &str| {
            let path = program_path().with_file_name(name);
            if !path.exists() {
                return Err(format!("{} is not built: add -p bps-server", path.display()));
            }
            let mut command = stage.command(host, path);
            command.envs(variables.iter().cloned()).env("DMLC_ROLE", role);
            // The lines of the programs belong beside ours, not among the results.
            command.stdin(Stdio::null()).stdout(Stdio::null());
            spawn(command, name)
        };
        let mut programs = vec![program(0, "bps-scheduler", "scheduler")?];
        let first = if plan.colocated { 0 } else { plan.workers };
        for host in first..plan.hosts() {
            programs.push(program(host, "bps-server", "server")?);
        }
        let mut ranks = Vec::new();
        for host in 0..plan.workers {
            for local in 0..plan.ranks_per_host {
                let mut command = command(host, local);
                command.envs(variables.iter().cloned()).env("DMLC_ROLE", "worker");
                command.env("DMLC_WORKER_ID", host.to_string());
                command.env("BYTEPS_LOCAL_RANK", local.to_string());
                ranks.push(Member::start(format!("rank {}", ranks.len()), command)?);
            }
        }
        Ok(Job { ranks: Crew::new(ranks, plan.patience)?, programs })
    }

    /// Ends it in good order.
    pub fn end(mut self) -> Result<(), String> {
        self.ranks.end()?;
        let deadline = Instant::now() + LEAVING;
        self.programs.iter_mut().for_each(|program| program.dismiss(deadline));
        Ok(())
    }
}

fn spawn(mut command: Command, name: &str) -> Result<Program, String> {
    command.spawn().map(Program).map_err(|error| format!("{name}: {error}"))
}

/// A secret of this job's own.
fn job_key() -> std::io::Result<String> {
    let mut bytes = [0; 32];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    let mut text = String::new();
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn optimum(workers: u32, extra_servers: u32, colocated: bool) -> f64 {
        let (ranks_per_host, cores, patience) = (1, 1, PATIENCE);
        let variables = Vec::new();
        Plan { workers, ranks_per_host, extra_servers, colocated, cores, patience, variables }
            .optimum()
    }

    #[test]
    fn the_optimum_is_a_ring_without_servers_and_the_line_with_enough() {
        assert_eq!(optimum(4, 0, true), 1.5);
        assert_eq!(optimum(4, 4, true), 1.0);
        assert_eq!(optimum(4, 9, true), 1.0);
        // 24 / 18 and 24 / 20.
        assert!((optimum(4, 1, true) - 4.0 / 3.0).abs() < 1e-12);
        assert!((optimum(4, 2, true) - 1.2).abs() < 1e-12);
    }

    #[test]
    fn servers_alone_carry_all_workers_bytes() {
        assert_eq!(optimum(4, 4, false), 1.0);
        assert_eq!(optimum(4, 2, false), 2.0);
        assert_eq!(optimum(2, 8, false), 1.0);
    }
}
