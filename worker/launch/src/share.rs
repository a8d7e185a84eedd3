//! One machine's share of a job on several, planned on that machine from what the launcher says.

#![forbid(unsafe_code)]

use super::binding::{Machine, Wanted};
use super::error::LaunchError;
use super::frames::Instruction;
use super::local::{STRAY, helper, hold_key, share_threads};
use super::plan::{Environment, LaunchPlan, Process, Programs, worker_command};
use bps_engine::config::{Config, ElasticMode, Loaded, Outcome, Program, load};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Plans the scheduler, the servers and the ranks of this machine, in this order. Returns also how
/// long a rank has to leave, if the job goes on without it then.
pub(super) fn plan(
    order: &Instruction,
    programs: &Programs,
) -> Result<(LaunchPlan, Option<Duration>), LaunchError> {
    let loaded = load_settings(order)?;
    let config = &loaded.config;
    let folder = PathBuf::from(&order.folder);
    if !folder.is_dir() {
        return Err(LaunchError::Conflict {
            problem: format!("there is no folder {} to start in", folder.display()),
            remedy: "make it, or name one that every machine has with --chdir".to_owned(),
        });
    }
    let (mut notes, mut held) = (Vec::new(), Vec::new());
    let mut shared = shared_environment(order, &loaded);
    if let Some(key) = &order.key {
        let (path, memory) = hold_key(key)?;
        held.push(memory);
        shared.set("BPS_JOB_KEY_FILE", path);
    }
    let mut processes = Vec::new();
    if order.scheduler {
        let mut scheduler = helper("scheduler", None, &programs.scheduler, &shared);
        scheduler.environment.set("BPS_STAY", "1");
        scheduler.stays = true;
        scheduler.is_revived = config.elastic != ElasticMode::None;
        processes.push(scheduler);
    }
    let mut cores_before = 0;
    for (place, &(index, cores)) in (0..).zip(&order.servers) {
        processes.push(server(index, cores, place, cores_before, config, programs, &shared));
        cores_before += cores;
    }
    if order.workers > 0 {
        let wanted = Wanted {
            processes: order.workers,
            server_threads: cores_before,
            // With servers here, too, the kernel finds room for all.
            without_gpus: order.servers.is_empty() && !order.scheduler,
        };
        let command = worker_command(&loaded)?;
        let bindings = Machine::read(&config.launch)?.bind(&config.launch, wanted, &mut notes)?;
        let is_set = |name: &str| look_up(order, name).is_some_and(|value| !value.is_empty());
        if !is_set("OMP_NUM_THREADS") {
            share_threads(&mut shared, &bindings, &mut notes);
        }
        let chosen = (0..).zip(bindings).filter(|(slot, _)| order.slots.contains(slot));
        for (local_rank, binding) in chosen {
            let place = Config {
                local_rank,
                local_size: order.workers,
                worker_id: order.worker_id,
                num_workers: config.num_workers,
                ..Config::default()
            };
            let mut environment = shared.clone();
            environment.set("DMLC_WORKER_ID", order.worker_id.to_string());
            environment.set_torch(&place);
            let rank = place.rank();
            processes.push(Process::worker(
                rank,
                local_rank,
                &command,
                environment,
                binding,
                &mut notes,
            ));
        }
    }
    for process in &mut processes {
        process.folder = Some(folder.clone());
        process.reads_input = false;
    }
    let grace = config.launch.grace;
    let notice = config.leaves_within().map(|notice| notice + grace);
    let plan =
        LaunchPlan { processes, notes, prefix: true, grace, workers_min: 1, held, notice: None };
    Ok((plan, notice))
}

/// The launcher's flags and settings, with this machine's own variables behind them.
fn load_settings(order: &Instruction) -> Result<Loaded, LaunchError> {
    let own = |name: &str| look_up(order, name).map(|value| value.to_string_lossy().into_owned());
    match load(Program::Launcher, order.arguments.iter().cloned(), &own)? {
        Outcome::Run(loaded) => Ok(*loaded),
        Outcome::Print(_) => Err(LaunchError::Conflict {
            problem: "an instruction that asks for help".to_owned(),
            remedy: "use the same release of byteps on all machines".to_owned(),
        }),
    }
}

fn look_up(order: &Instruction, name: &str) -> Option<OsString> {
    let set = order.settings.iter().rev().find(|(own, _)| own == name);
    set.map(|(_, value)| value.clone()).or_else(|| std::env::var_os(name))
}

fn shared_environment(order: &Instruction, loaded: &Loaded) -> Environment {
    let mut shared = Environment::of_flags(loaded);
    for name in STRAY.iter().chain(&["BPS_JOB_KEY", "DMLC_NODE_HOST"]) {
        shared.remove(name);
    }
    if let Some(folder) = &order.virtual_environment {
        shared.set("VIRTUAL_ENV", folder);
        shared.set("PATH", path_with(&Path::new(folder).join("bin")));
    }
    for (name, value) in &order.settings {
        shared.set(name, value);
    }
    if order.workers > 0 {
        shared.set("BYTEPS_LOCAL_SIZE", order.workers.to_string());
    }
    shared
}

/// The search path of this machine with a folder before it.
fn path_with(folder: &Path) -> OsString {
    let mut path = folder.as_os_str().to_owned();
    path.push(OsStr::new(":"));
    path.push(std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into()));
    path
}

/// The server of this number, the `place`th of this machine, behind so many cores of others.
fn server(
    index: u32,
    cores: u32,
    place: u32,
    cores_before: u32,
    config: &Config,
    programs: &Programs,
    shared: &Environment,
) -> Process {
    let mut process = helper("server", Some(index), &programs.server, shared);
    process.environment.set("DMLC_RANK", index.to_string());
    process.environment.set("BPS_SERVER_CORES", cores.to_string());
    if config.port != 0 {
        let port = u32::from(config.port) + cores_before;
        process.environment.set("DMLC_PORT", port.to_string());
    }
    if let Some(first @ 1..) = config.server_metrics_port {
        process.environment.set("BPS_SERVER_METRICS_PORT", (first + place).to_string());
    }
    process
}
