//! Stand-alone mode: scheduler, servers and workers of a whole job on this machine.
//!
//! The scheduler's port is bound here before it is announced, and stays bound without listening, so
//! that nobody else is given it. The job key lies in memory that only a descriptor of this process
//! leads to: nothing is left on disk, and nothing stands on a command line.

#![forbid(unsafe_code)]

use super::binding::{Binding, Machine, Wanted};
use super::error::{LaunchError, counted};
use super::plan::{
    Environment, Kind, LaunchPlan, Process, Programs, helper_command, worker_command,
};
use super::port::reserve_port;
use bps_engine::base::word;
use bps_engine::config::{Config, ElasticMode, Loaded, Origin};
use bps_engine::proto::handshake::JobKey;
use rustix::fs::{MemfdFlags, Mode, fchmod, memfd_create};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};

/// Variables of another job, or of one process, that must not reach these processes.
pub(super) const STRAY: &[&str] =
    &["BYTEPS_GLOBAL_RANK", "BYTEPS_LOCAL_RANK", "DMLC_RANK", "DMLC_PORT", "DMLC_WORKER_ID"];

/// Flags that say what stand-alone mode decides by itself.
pub(super) const DECIDED: &[&str] = &[
    "DMLC_NUM_WORKER",
    "DMLC_WORKER_ID",
    "BYTEPS_LOCAL_SIZE",
    "DMLC_PS_ROOT_URI",
    "DMLC_PS_ROOT_PORT",
    "DMLC_INTERFACE",
    "DMLC_NODE_HOST",
    "DMLC_RANK",
];

const NO_KEY: &str = "cannot make a job key";

/// Plans the whole job of `--local`.
pub(super) fn plan(loaded: &Loaded, programs: &Programs) -> Result<LaunchPlan, LaunchError> {
    refuse_decided(loaded)?;
    let servers = match loaded.origin("DMLC_NUM_SERVER") {
        Origin::Flag(_) => loaded.config.num_servers,
        _ => 1,
    };
    plan_job(loaded, programs, loaded.config.launch.local, servers)
}

/// Plans a job whose variables name no other machine: workers, and a scheduler that brings them
/// together.
pub(super) fn plan_alone(
    loaded: &Loaded,
    programs: &Programs,
    workers: u32,
) -> Result<LaunchPlan, LaunchError> {
    let plan = plan_job(loaded, programs, workers, 0)?;
    // BytePS does not touch the output of the processes.
    Ok(LaunchPlan { prefix: false, ..plan })
}

fn plan_job(
    loaded: &Loaded,
    programs: &Programs,
    workers: u32,
    servers: u32,
) -> Result<LaunchPlan, LaunchError> {
    let launch = &loaded.config.launch;
    let command = worker_command(loaded)?;
    if servers == 0 && workers > 1 && !loaded.config.local_reduce {
        return Err(LaunchError::Conflict {
            problem: format!(
                "--servers 0, but {workers} workers that do not reduce among themselves need a \
                 server"
            ),
            remedy: "use --servers 1, or leave BPS_LOCAL_REDUCE on".to_owned(),
        });
    }
    refuse_too_few(loaded, workers)?;
    let mut held = Vec::new();
    let mut notes = Vec::new();
    // A worker that is alone needs nobody to meet.
    let meets = servers > 0 || workers > 1;
    if launch.local > 0
        && DECIDED.iter().any(|name| matches!(loaded.origin(name), Origin::Variable(_)))
    {
        notes.push("the DMLC_* variables here describe another job and are replaced".to_owned());
    }
    let mut shared = shared_environment(loaded, workers, servers);
    if meets {
        let (port, socket) = reserve_port()?;
        held.push(socket);
        shared.set("DMLC_PS_ROOT_URI", "127.0.0.1");
        shared.set("DMLC_PS_ROOT_PORT", port.to_string());
        if loaded.config.job_key.is_none() && loaded.config.job_key_file.is_none() {
            let (path, memory) = hold_key(&mint_key()?)?;
            held.push(memory);
            shared.set("BPS_JOB_KEY_FILE", path);
        }
        let metrics = match loaded.config.metrics_port {
            Some(port) => port,
            None => {
                let (port, socket) = reserve_port()?;
                held.push(socket);
                shared.set("BPS_METRICS_PORT", port.to_string());
                port.into()
            }
        };
        notes.push(format!(
            "a job on this machine: {}, {}, scheduler on port {port}",
            counted(workers, "worker"),
            match servers {
                0 => "no server".to_owned(),
                _ => format!(
                    "{} with {}",
                    counted(servers, "server"),
                    counted(loaded.config.server_cores, "core")
                ),
            },
        ));
        if metrics != 0 {
            notes.push(format!("watch it with: bps-top --metrics-port {metrics}"));
        }
    }
    let mut processes = Vec::new();
    if meets {
        let mut scheduler = helper("scheduler", None, &programs.scheduler, &shared);
        scheduler.environment.set("BPS_STAY", "1");
        scheduler.stays = true;
        processes.push(scheduler);
        processes.extend((0..servers).map(|index| server(index, loaded, programs, &shared)));
    }
    let wanted = Wanted {
        processes: workers,
        server_threads: servers * loaded.config.server_cores,
        // Scheduler and servers are here too: without GPUs the kernel finds room for all.
        without_gpus: false,
    };
    let bindings = Machine::read(launch)?.bind(launch, wanted, &mut notes)?;
    if std::env::var_os("OMP_NUM_THREADS").is_none_or(|value| value.is_empty()) {
        share_threads(&mut shared, &bindings, &mut notes);
    }
    held.extend(shared.set_torch_store()?);
    for (rank, binding) in (0..).zip(bindings) {
        let mut environment = shared.clone();
        environment.set("DMLC_WORKER_ID", "0");
        environment.set_torch(&Config {
            local_rank: rank,
            local_size: workers,
            ..Config::default()
        });
        processes.push(Process::worker(rank, rank, &command, environment, binding, &mut notes));
    }
    let workers_min = spare(&mut processes, &loaded.config);
    let (prefix, grace) = (!launch.no_prefix, launch.grace);
    Ok(LaunchPlan { processes, notes, prefix, grace, workers_min, notice: None, held })
}

fn refuse_too_few(loaded: &Loaded, workers: u32) -> Result<(), LaunchError> {
    if let Some(least) = loaded.config.min_workers.filter(|least| *least > workers) {
        return Err(LaunchError::Conflict {
            problem: format!("--min-workers {least}, but the job begins with {workers}"),
            remedy: "lower it, or start more with --local".to_owned(),
        });
    }
    if let Some(most) = loaded.config.launch.max_workers.filter(|most| *most < workers) {
        return Err(LaunchError::Conflict {
            problem: format!("--max-workers {most}, but the job begins with {workers}"),
            remedy: "raise it, or start fewer with --local".to_owned(),
        });
    }
    Ok(())
}

/// Marks what an elastic job may go on without; returns how many workers it needs.
fn spare(processes: &mut [Process], config: &Config) -> usize {
    for process in processes {
        // The scheduler, which has to stay, is the one that waits for ranks.
        let is_elastic = config.elastic != ElasticMode::None;
        process.is_spared = is_elastic && !process.stays;
        process.is_revived = is_elastic && process.stays;
    }
    config.min_workers.unwrap_or(1) as usize
}

fn refuse_decided(loaded: &Loaded) -> Result<(), LaunchError> {
    for name in DECIDED {
        if let Origin::Flag(flag) = loaded.origin(name) {
            return Err(LaunchError::Conflict {
                problem: format!("--{flag} together with --local, which decides that by itself"),
                remedy: format!("leave out --{flag}, or --local for a job on several machines"),
            });
        }
    }
    Ok(())
}

fn shared_environment(loaded: &Loaded, workers: u32, servers: u32) -> Environment {
    let mut environment = Environment::of_flags(loaded);
    for name in STRAY {
        environment.remove(name);
    }
    environment.set("DMLC_NUM_WORKER", "1");
    environment.set("DMLC_NUM_SERVER", servers.to_string());
    environment.set("DMLC_NODE_HOST", "127.0.0.1");
    environment.set("DMLC_INTERFACE", "lo");
    environment.set("BYTEPS_LOCAL_SIZE", workers.to_string());
    // A worker that is alone would go without the server that waits for it. Several reduce among
    // themselves, unless it is said that they shall not.
    if matches!(loaded.origin("BYTEPS_FORCE_DISTRIBUTED"), Origin::Default) {
        let is_alone = workers == 1 && servers > 0;
        environment.set("BYTEPS_FORCE_DISTRIBUTED", if is_alone { "1" } else { "0" });
    }
    environment
}

/// A process that is not the user's.
pub(super) fn helper(
    role: &str,
    index: Option<u32>,
    command: &[String],
    shared: &Environment,
) -> Process {
    let mut environment = shared.clone();
    environment.set("DMLC_ROLE", role);
    Process {
        kind: Kind::Helper,
        label: index.map_or_else(|| role.to_owned(), |index| format!("{role} {index}")),
        command: helper_command(command),
        environment,
        binding: Binding::default(),
        reads_input: false,
        stays: false,
        is_spared: false,
        is_revived: false,
        folder: None,
    }
}

fn server(index: u32, loaded: &Loaded, programs: &Programs, shared: &Environment) -> Process {
    let mut process = helper("server", Some(index), &programs.server, shared);
    process.environment.set("DMLC_RANK", index.to_string());
    if loaded.config.port != 0 {
        let port = u32::from(loaded.config.port) + index * loaded.config.server_cores;
        process.environment.set("DMLC_PORT", port.to_string());
    }
    if let Some(first @ 1..) = loaded.config.server_metrics_port {
        process.environment.set("BPS_SERVER_METRICS_PORT", (first + index).to_string());
    }
    process
}

/// Without this every worker would start a thread for each CPU, and they would stand in each
/// other's way.
pub(super) fn share_threads(
    environment: &mut Environment,
    bindings: &[Binding],
    notes: &mut Vec<String>,
) {
    let workers = counted(word(bindings.len()), "worker");
    let own = bindings.iter().filter_map(|binding| binding.cpus.as_ref().map(Vec::len)).min();
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = own.unwrap_or_else(|| (cpus / bindings.len().max(1)).max(1));
    environment.set("OMP_NUM_THREADS", threads.to_string());
    notes.push(format!(
        "OMP_NUM_THREADS={threads} for each worker ({cpus} CPUs, {workers}); set it to choose \
         otherwise"
    ));
}

/// A new job key in hexadecimal.
pub(super) fn mint_key() -> Result<String, LaunchError> {
    let failed = |error| LaunchError::System { what: NO_KEY, source: std::io::Error::other(error) };
    Ok(JobKey::mint().map_err(failed)?.expose_hex())
}

/// A job key as a path to memory of this process that only this user can open.
pub(super) fn hold_key(hex: &str) -> Result<(String, OwnedFd), LaunchError> {
    let failed = |source| LaunchError::System { what: NO_KEY, source };
    let memory =
        memfd_create("bps-job-key", MemfdFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
    fchmod(&memory, Mode::RUSR | Mode::WUSR).map_err(|error| failed(error.into()))?;
    let mut file = File::from(memory);
    file.write_all(hex.as_bytes()).map_err(failed)?;
    let memory = OwnedFd::from(file);
    let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
    Ok((path, memory))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minted_key_is_one_that_the_engine_takes() {
        let (path, memory) = hold_key(&mint_key().unwrap()).unwrap();
        let config = bps_engine::config::Config {
            job_key_file: Some(path.clone().into()),
            ..Default::default()
        };
        assert!(!JobKey::load(&config).unwrap().is_open());
        drop(memory);
        assert!(JobKey::load(&config).is_err(), "nothing is left");
    }
}
