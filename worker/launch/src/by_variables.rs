//! One machine's share of a job that `DMLC_*` variables describe, as BytePS's launcher starts it.

#![forbid(unsafe_code)]

use super::binding::{Binding, Machine, Wanted};
use super::error::LaunchError;
use super::local;
use super::plan::{
    Environment, Kind, LaunchPlan, Process, Programs, helper_command, worker_command,
};
use bps_engine::config::{Config, ElasticMode, Loaded, Origin, Role};
use std::os::fd::OwnedFd;

/// Slurm numbers its own steps (batch script, interactive shell, external) from here on.
const SLURM_SPECIAL_STEPS: u32 = 0xFFFF_FF00;

/// Plans the processes of `DMLC_ROLE`. Their output is not touched: BytePS's is not either.
pub(super) fn plan(loaded: &Loaded, programs: &Programs) -> Result<LaunchPlan, LaunchError> {
    if let Some(rank) = rank_of_another(loaded) {
        return one_rank(loaded, &rank);
    }
    let mut config = loaded.config.clone();
    let (mut notes, mut held) = (Vec::new(), Vec::new());
    let processes = match config.role {
        Role::Worker => {
            let machine = Machine::read(&config.launch)?;
            if loaded.origin("BYTEPS_LOCAL_SIZE") == Origin::Default {
                config.local_size = machine.processes(&config.launch);
            }
            if is_whole_job(loaded, &config) {
                return local::plan_alone(loaded, programs, config.local_size);
            }
            require(loaded, &config)?;
            workers(loaded, &config, &machine, &mut notes, &mut held)?
        }
        Role::Server | Role::Scheduler => {
            require(loaded, &config)?;
            vec![match config.role {
                Role::Server => helper("server", &programs.server, loaded),
                _ => Process {
                    is_revived: config.elastic != ElasticMode::None,
                    ..helper("scheduler", &programs.scheduler, loaded)
                },
            }]
        }
    };
    let grace = config.launch.grace;
    let notice = config.leaves_within().filter(|_| config.role != Role::Scheduler);
    // How many ranks the whole job needs is for its scheduler to say.
    Ok(LaunchPlan { processes, notes, prefix: false, grace, workers_min: 1, held, notice })
}

/// The rank that srun, mpirun or torchrun has given this process, where no variable of ours says
/// anything else: `srun bpslaunch python train.py` is one process of a job that they describe.
fn rank_of_another(loaded: &Loaded) -> Option<String> {
    let ours = ["DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_WORKER_ID", "BYTEPS_LOCAL_RANK"];
    if ours.iter().any(|name| loaded.origin(name) != Origin::Default)
        || std::env::var_os("BYTEPS_LOCAL_RANK").is_some()
    {
        return None;
    }
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let torch = variable("WORLD_SIZE").and_then(|_| variable("RANK"));
    let mpi = || ["OMPI_COMM_WORLD_RANK", "PMI_RANK"].into_iter().find_map(variable);
    let slurm = || {
        // A batch script and an interactive shell are steps, too, and have one process.
        let step: u32 = variable("SLURM_STEP_ID")?.parse().ok()?;
        variable("SLURM_PROCID").filter(|_| step < SLURM_SPECIAL_STEPS)
    };
    torch.or_else(mpi).or_else(slurm)
}

/// A process whose place other variables say: `init()` reads them there.
fn one_rank(loaded: &Loaded, rank: &str) -> Result<LaunchPlan, LaunchError> {
    let mut environment = Environment::of_flags(loaded);
    environment.set("PYTHONUNBUFFERED", "1");
    let process = Process {
        kind: Kind::Worker,
        label: format!("rank {rank}"),
        command: worker_command(loaded)?,
        environment,
        binding: Binding::default(),
        reads_input: true,
        stays: false,
        is_spared: false,
        is_revived: false,
        folder: None,
    };
    Ok(LaunchPlan {
        processes: vec![process],
        notes: Vec::new(),
        prefix: false,
        grace: loaded.config.launch.grace,
        workers_min: 1,
        notice: None,
        held: Vec::new(),
    })
}

/// Whether this machine's processes are all that the job has, and nobody says where a scheduler is:
/// then one is started for them, because BytePS needs none for that.
fn is_whole_job(loaded: &Loaded, config: &Config) -> bool {
    let unset = |name| loaded.origin(name) == Origin::Default;
    let is_alone = config.num_workers == 1 && config.local_size > 1 && !config.needs_servers();
    is_alone && !unset("DMLC_NUM_WORKER") && unset("DMLC_PS_ROOT_URI") && unset("DMLC_PS_ROOT_PORT")
}

fn helper(role: &str, command: &[String], loaded: &Loaded) -> Process {
    let mut environment = Environment::of_flags(loaded);
    environment.set("DMLC_ROLE", role);
    Process {
        kind: Kind::Helper,
        label: role.to_owned(),
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

fn workers(
    loaded: &Loaded,
    config: &Config,
    machine: &Machine,
    notes: &mut Vec<String>,
    held: &mut Vec<OwnedFd>,
) -> Result<Vec<Process>, LaunchError> {
    let command = worker_command(loaded)?;
    let wanted = Wanted { processes: config.local_size, server_threads: 0, without_gpus: true };
    let bindings = machine.bind(&config.launch, wanted, notes)?;
    let mut shared = Environment::of_flags(loaded);
    shared.set("BYTEPS_LOCAL_SIZE", config.local_size.to_string());
    // Of a job on several machines, nobody here knows where rank 0 runs.
    if config.num_workers == 1 {
        held.extend(shared.set_torch_store()?);
    }
    let process = |(local_rank, binding)| {
        let mut environment = shared.clone();
        let place = Config { local_rank, global_rank: None, ..config.clone() };
        environment.set_torch(&place);
        let mut process =
            Process::worker(place.rank(), local_rank, &command, environment, binding, notes);
        process.is_spared = config.elastic != ElasticMode::None;
        process
    };
    Ok((0..).zip(bindings).map(process).collect())
}

/// Names everything that is missing at once.
fn require(loaded: &Loaded, config: &Config) -> Result<(), LaunchError> {
    if loaded.origin("DMLC_ROLE") == Origin::Default
        && loaded.origin("DMLC_NUM_WORKER") == Origin::Default
    {
        return Err(LaunchError::Conflict {
            problem: "there is neither --local nor DMLC_ROLE: which job is this?".to_owned(),
            remedy:
                "for a job on this machine alone: bpslaunch --local 2 COMMAND; for one on several \
                     bpslaunch --hosts host1:4,host2:4 COMMAND; for one machine of many set \
                     DMLC_ROLE and the other DMLC_* variables (docs/env.md)"
                    .to_owned(),
        });
    }
    let worker = config.role == Role::Worker;
    let meets = !worker || config.distributed();
    let with_servers = !worker || config.needs_servers();
    let wanted: &[(&str, bool, &str, &str)] = &[
        ("DMLC_ROLE", true, "what this machine does in the job", "worker"),
        ("DMLC_NUM_WORKER", true, "how many worker machines the job has", "2"),
        ("DMLC_WORKER_ID", worker, "which of the worker machines this is, from 0", "0"),
        ("DMLC_NUM_SERVER", with_servers, "how many servers the job has", "1"),
        ("DMLC_PS_ROOT_URI", meets, "the address of the scheduler", "10.0.0.1"),
        ("DMLC_PS_ROOT_PORT", meets, "the port of the scheduler", "9000"),
    ];
    let missing: Vec<String> = wanted
        .iter()
        .filter(|(name, needed, ..)| *needed && loaded.origin(name) == Origin::Default)
        .map(|(name, _, purpose, example)| {
            format!("{name} is not set: {purpose}; for example {name}={example}")
        })
        .collect();
    if missing.is_empty() {
        return limits(config);
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
    if config.needs_servers() && config.num_servers == 0 {
        return Err(LaunchError::Conflict {
            problem: "DMLC_NUM_SERVER=0, but the ranks of this job need a server".to_owned(),
            remedy: "set DMLC_NUM_SERVER=1 and start a server and the scheduler".to_owned(),
        });
    }
    Ok(())
}
