//! One machine's share of a job that `DMLC_*` variables describe, as BytePS's launcher starts it.

use super::Programs;
use super::cpus;
use super::plan::{Environment, Kind, LaunchError, Plan, Process, helper_command, worker_command};
use bps_engine::config::{Config, Loaded, Origin, Role};

/// Plans the processes of `DMLC_ROLE`. Their output is not touched: BytePS's is not either.
pub(super) fn plan(loaded: &Loaded, programs: &Programs) -> Result<Plan, LaunchError> {
    let mut config = loaded.config.clone();
    if loaded.origin("BYTEPS_LOCAL_SIZE") == Origin::Default {
        config.local_size = count_devices(config.launch.visible_devices.as_deref());
    }
    require(loaded, &config)?;
    let mut notes = Vec::new();
    let processes = match config.role {
        Role::Worker => workers(loaded, &config, &mut notes)?,
        Role::Server => vec![helper("server", &programs.server, loaded)],
        Role::Scheduler => vec![helper("scheduler", &programs.scheduler, loaded)],
    };
    let grace = config.launch.grace;
    Ok(Plan { processes, notes, prefix: false, grace, held: Vec::new() })
}

fn helper(role: &str, command: &[String], loaded: &Loaded) -> Process {
    let mut environment = Environment::of_flags(loaded);
    environment.set("DMLC_ROLE", role);
    Process {
        kind: Kind::Helper,
        label: role.to_owned(),
        command: helper_command(command),
        environment,
        cpus: None,
        reads_input: false,
    }
}

fn workers(
    loaded: &Loaded,
    config: &Config,
    notes: &mut Vec<String>,
) -> Result<Vec<Process>, LaunchError> {
    let command = worker_command(loaded)?;
    let mut cpus = cpus::assign(&config.launch, config.local_size, config.launch.numa, notes)?;
    let process = |local_rank: u32| {
        let mut environment = Environment::of_flags(loaded);
        environment.set("DMLC_ROLE", "worker");
        environment.set("BYTEPS_LOCAL_RANK", local_rank.to_string());
        environment.set("BYTEPS_LOCAL_SIZE", config.local_size.to_string());
        environment.set("PYTHONUNBUFFERED", "1");
        let rank = Config { local_rank, global_rank: None, ..config.clone() }.rank();
        Process {
            kind: Kind::Worker,
            label: format!("rank {rank}"),
            command: command.clone(),
            environment,
            cpus: cpus.as_mut().map(|lists| std::mem::take(&mut lists[local_rank as usize])),
            reads_input: local_rank == 0,
        }
    };
    Ok((0..config.local_size).map(process).collect())
}

/// BytePS's rule: one process for each visible device, one if nothing says how many.
fn count_devices(visible: Option<&str>) -> u32 {
    let count = match visible.map(str::trim) {
        None | Some("none" | "void") => 1,
        Some("all") => std::fs::read_dir("/dev").map_or(1, |entries| {
            let names = entries.flatten().map(|entry| entry.file_name());
            names.filter(|name| is_device(&name.to_string_lossy())).count()
        }),
        Some(list) => list.split(',').filter(|entry| !entry.trim().is_empty()).count(),
    };
    u32::try_from(count).unwrap_or(u32::MAX).max(1)
}

fn is_device(name: &str) -> bool {
    name.strip_prefix("nvidia")
        .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Names everything that is missing at once.
fn require(loaded: &Loaded, config: &Config) -> Result<(), LaunchError> {
    if loaded.origin("DMLC_ROLE") == Origin::Default
        && loaded.origin("DMLC_NUM_WORKER") == Origin::Default
    {
        return Err(LaunchError::Conflict {
            problem: "there is neither --local nor DMLC_ROLE: which job is this?".to_owned(),
            remedy:
                "for a job on this machine alone: bpslaunch --local 2 COMMAND; for one machine \
                     of many set DMLC_ROLE and the other DMLC_* variables (docs/env.md)"
                    .to_owned(),
        });
    }
    let worker = config.role == Role::Worker;
    let meets = !worker || config.distributed();
    let wanted: &[(&str, bool, &str, &str)] = &[
        ("DMLC_ROLE", true, "what this machine does in the job", "worker"),
        ("DMLC_NUM_WORKER", true, "how many worker machines the job has", "2"),
        ("DMLC_WORKER_ID", worker, "which of the worker machines this is, from 0", "0"),
        ("DMLC_NUM_SERVER", meets, "how many servers the job has", "1"),
        ("DMLC_PS_ROOT_URI", meets, "the address of the scheduler", "10.0.0.1"),
        ("DMLC_PS_ROOT_PORT", meets, "the port of the scheduler", "9000"),
    ];
    let mut missing: Vec<String> = wanted
        .iter()
        .filter(|(name, needed, ..)| *needed && loaded.origin(name) == Origin::Default)
        .map(|(name, _, purpose, example)| {
            format!("{name} is not set: {purpose}; for example {name}={example}")
        })
        .collect();
    if missing.is_empty() {
        return limits(config);
    }
    if worker && config.num_workers == 1 && config.local_size > 1 {
        missing.push(format!(
            "{} processes on one machine exchange tensors through a server; bpslaunch --local {} \
             COMMAND starts one by itself",
            config.local_size, config.local_size
        ));
    }
    Err(LaunchError::Missing(missing))
}

fn limits(config: &Config) -> Result<(), LaunchError> {
    if config.role != Role::Worker {
        return Ok(());
    }
    if config.worker_id >= config.num_workers {
        return Err(LaunchError::Conflict {
            problem: format!(
                "DMLC_WORKER_ID={}, but DMLC_NUM_WORKER={}",
                config.worker_id, config.num_workers
            ),
            remedy: format!("DMLC_WORKER_ID counts from 0 to {}", config.num_workers - 1),
        });
    }
    if config.distributed() && config.num_servers == 0 {
        return Err(LaunchError::Conflict {
            problem: "DMLC_NUM_SERVER=0, but the ranks of this job need a server".to_owned(),
            remedy: "set DMLC_NUM_SERVER=1 and start a server and the scheduler".to_owned(),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_counted() {
        for (visible, count) in [
            (None, 1),
            (Some("0"), 1),
            (Some("0,1,2,3"), 4),
            (Some("GPU-8a56,GPU-77b1,"), 2),
            (Some("void"), 1),
            (Some(""), 1),
        ] {
            assert_eq!(count_devices(visible), count, "{visible:?}");
        }
        assert!(is_device("nvidia0") && is_device("nvidia15"));
        assert!(!is_device("nvidia") && !is_device("nvidiactl") && !is_device("nvidia-uvm"));
    }
}
