//! What must hold between values: checked after all are read, so that an error can name both sides.

use super::key::decode_key;
use super::origin::{Origin, Source};
use super::table::counts_text;
use super::{Config, ConfigError, ElasticMode, LogLevel, Program, TransportChoice};
use crate::base::Placement;
use crate::limits::{ALIGNMENT, PART_BYTES_MAX, PART_BYTES_MIN, RANKS_MAX};

/// Checks `config` for `program`, and mends what only needs rounding. Returns warnings.
pub(super) fn check(
    program: Program,
    config: &mut Config,
    sources: &[Source],
) -> Result<Vec<String>, ConfigError> {
    let mut warnings = Vec::new();
    role(program, config, sources)?;
    bytescheduler(config, sources, &mut warnings);
    partition(config, &mut warnings);
    // What is stored needs servers, also where all ranks share a host.
    config.force_distributed |= config.enable_async || config.backup_workers > 0;
    key(config)?;
    encryption(config)?;
    times(config)?;
    if config.placement == Placement::Mixed && config.mixed_bound < config.num_servers {
        return Err(ConfigError::conflict(
            format!(
                "BYTEPS_MIXED_MODE_BOUND={} is below DMLC_NUM_SERVER={}",
                config.mixed_bound, config.num_servers
            ),
            format!("set BYTEPS_MIXED_MODE_BOUND to at least {}", config.num_servers),
        ));
    }
    if config.elastic == ElasticMode::None
        && let Some(workers) = config.min_workers
    {
        return Err(ConfigError::conflict(
            format!("BPS_MIN_WORKERS={workers}, but BPS_ELASTIC=none: the job ends with any rank"),
            "set BPS_ELASTIC=redo or shrink (--elastic), or leave BPS_MIN_WORKERS out".to_owned(),
        ));
    }
    growth(config)?;
    if config.trace_end_step < config.trace_start_step {
        return Err(ConfigError::conflict(
            format!(
                "BYTEPS_TRACE_END_STEP={} is before BYTEPS_TRACE_START_STEP={}",
                config.trace_end_step, config.trace_start_step
            ),
            format!("set BYTEPS_TRACE_END_STEP to at least {}", config.trace_start_step),
        ));
    }
    ports(config)?;
    match program {
        Program::Worker => worker(config)?,
        Program::Server => scheduler_address(config)?,
        Program::Scheduler => scheduler(config)?,
        // The launcher knows the local size only after it has counted devices, and names what is
        // missing itself.
        Program::Launcher | Program::Top => {}
    }
    Ok(warnings)
}

/// A job that grows or shrinks while it runs.
fn growth(config: &Config) -> Result<(), ConfigError> {
    let launch = &config.launch;
    let what = match (&launch.discovery, launch.max_workers) {
        (Some(_), _) => "--host-discovery",
        (None, Some(_)) => "BPS_MAX_WORKERS (--max-workers)",
        (None, None) => return Ok(()),
    };
    if config.elastic == ElasticMode::None {
        return Err(ConfigError::conflict(
            format!("{what}, but BPS_ELASTIC=none: the job ends with any rank"),
            "set BPS_ELASTIC=redo or shrink (--elastic), or leave it out".to_owned(),
        ));
    }
    match (config.min_workers, launch.max_workers) {
        (Some(least), Some(most)) if most < least => Err(ConfigError::conflict(
            format!("BPS_MAX_WORKERS={most} is below BPS_MIN_WORKERS={least}"),
            format!("set BPS_MAX_WORKERS to at least {least}"),
        )),
        (_, Some(0)) => Err(ConfigError::conflict(
            "BPS_MAX_WORKERS=0: no rank could be started".to_owned(),
            "set it to at least 1, or leave it out".to_owned(),
        )),
        _ => Ok(()),
    }
}

fn role(program: Program, config: &mut Config, sources: &[Source]) -> Result<(), ConfigError> {
    let own = match program {
        Program::Worker => super::Role::Worker,
        Program::Server => super::Role::Server,
        Program::Scheduler => super::Role::Scheduler,
        Program::Launcher | Program::Top => return Ok(()),
    };
    let source = sources.iter().find(|source| source.name == "DMLC_ROLE");
    if let Some(source) = source
        && source.origin != Origin::Default
        && config.role != own
    {
        return Err(ConfigError::conflict(
            format!("DMLC_ROLE={}, but this program is a {}", source.value, own.name()),
            format!("unset DMLC_ROLE, or set DMLC_ROLE={}", own.name()),
        ));
    }
    config.role = own;
    Ok(())
}

/// What ByteScheduler's variables mean in ours, where ours say nothing themselves.
fn bytescheduler(config: &mut Config, sources: &[Source], warnings: &mut Vec<String>) {
    /// It counts elements, whose size it does not ask for; those of its time had four bytes.
    const ELEMENT_BYTES: u64 = 4;
    const CREDIT_MAX: u64 = 65_536;
    let unset = |name: &str| {
        sources.iter().all(|source| source.name != name || source.origin == Origin::Default)
    };
    if let Some(elements) = config.bytescheduler.partition
        && unset("BYTEPS_PARTITION_BYTES")
    {
        let wanted = u64::from(elements) * ELEMENT_BYTES;
        let taken = wanted.clamp(PART_BYTES_MIN as u64, PART_BYTES_MAX as u64);
        if taken != wanted {
            warnings.push(format!(
                "BYTESCHEDULER_PARTITION={elements} is taken as BYTEPS_PARTITION_BYTES={taken}, \
                 the nearest that there is"
            ));
        }
        // Rounding down is no news to who counts elements.
        let taken = taken - taken % ALIGNMENT as u64;
        config.partition_bytes = u32::try_from(taken).expect("PART_BYTES_MAX is 64 MiB");
    }
    if let Some(elements) = config.bytescheduler.credit
        && unset("BYTEPS_SCHEDULING_CREDIT")
    {
        let bytes = u64::from(elements) * ELEMENT_BYTES;
        let parts = bytes.div_ceil(u64::from(config.partition_bytes)).clamp(1, CREDIT_MAX);
        config.scheduling_credit = u32::try_from(parts).expect("CREDIT_MAX is small");
    }
    if let Some(folder) = &config.bytescheduler.timeline {
        if unset("BYTEPS_TRACE_ON") {
            config.trace_on = true;
        }
        if unset("BYTEPS_TRACE_DIR") {
            config.trace_dir = Some(folder.clone());
        }
    }
    if config.bytescheduler.debug && unset("BPS_LOG_LEVEL") {
        config.log_level = LogLevel::Debug;
    }
}

fn partition(config: &mut Config, warnings: &mut Vec<String>) {
    let alignment = u32::try_from(ALIGNMENT).expect("ALIGNMENT is 64");
    let rest = config.partition_bytes % alignment;
    if rest != 0 {
        config.partition_bytes -= rest;
        warnings.push(format!(
            "BYTEPS_PARTITION_BYTES is rounded down to {}, a multiple of {alignment}",
            config.partition_bytes
        ));
    }
}

/// A key that is no key is a wrong value like any other: said at once, and without showing it.
fn key(config: &Config) -> Result<(), ConfigError> {
    let Some(Err(reason)) = config.job_key.as_deref().map(decode_key) else { return Ok(()) };
    Err(ConfigError::conflict(
        format!("the key in BPS_JOB_KEY {reason}"),
        "make one with: head -c 32 /dev/urandom | xxd -p -c 64".to_owned(),
    ))
}

/// Nothing of ours sees the bytes of a device that writes to memory by itself.
fn encryption(config: &Config) -> Result<(), ConfigError> {
    if !config.encrypt || config.transport != TransportChoice::Rdma {
        return Ok(());
    }
    Err(ConfigError::conflict(
        "BPS_ENCRYPT=1, but BPS_TRANSPORT=rdma (or DMLC_ENABLE_RDMA=1) demands RDMA, whose lanes \
         cannot be encrypted"
            .to_owned(),
        "set BPS_TRANSPORT=tcp, or leave BPS_ENCRYPT out".to_owned(),
    ))
}

fn times(config: &Config) -> Result<(), ConfigError> {
    if config.heartbeat_timeout < config.heartbeat_interval * 2 {
        return Err(ConfigError::conflict(
            format!(
                "BPS_HEARTBEAT_TIMEOUT={} is below twice BPS_HEARTBEAT_INTERVAL={}: one late \
                 message would count as a death",
                config.heartbeat_timeout.as_secs_f64(),
                config.heartbeat_interval.as_secs_f64()
            ),
            format!(
                "set BPS_HEARTBEAT_TIMEOUT to at least {}",
                (config.heartbeat_interval * 2).as_secs_f64()
            ),
        ));
    }
    if config.stall_timeout < config.stall_report {
        return Err(ConfigError::conflict(
            format!(
                "BPS_STALL_TIMEOUT={} is below BPS_STALL_REPORT={}",
                config.stall_timeout.as_secs_f64(),
                config.stall_report.as_secs_f64()
            ),
            "report a stall before it becomes an error".to_owned(),
        ));
    }
    Ok(())
}

fn ports(config: &Config) -> Result<(), ConfigError> {
    let last = u32::from(config.port) + config.server_cores - 1;
    if config.port != 0 && last > u32::from(u16::MAX) {
        return Err(ConfigError::conflict(
            format!(
                "DMLC_PORT={} and BPS_SERVER_CORES={} need ports up to {last}, and the last port \
                 is 65535",
                config.port, config.server_cores
            ),
            format!("set DMLC_PORT to at most {}", 65_536 - config.server_cores),
        ));
    }
    Ok(())
}

fn worker(config: &Config) -> Result<(), ConfigError> {
    below("DMLC_WORKER_ID", config.worker_id, "DMLC_NUM_WORKER", config.num_workers)?;
    below("BYTEPS_LOCAL_RANK", config.local_rank, "BYTEPS_LOCAL_SIZE", config.local_size)?;
    ranks(config)?;
    gpus(config)?;
    if let Some(rank) = config.global_rank
        && rank >= config.size()
    {
        return Err(ConfigError::conflict(
            format!(
                "BYTEPS_GLOBAL_RANK={rank}, but the job has {} ranks (DMLC_NUM_WORKER={} x \
                 BYTEPS_LOCAL_SIZE={})",
                config.size(),
                config.num_workers,
                config.local_size
            ),
            format!("set it to at most {}, or unset it", config.size() - 1),
        ));
    }
    if config.backup_workers >= config.size().max(1) {
        return Err(ConfigError::conflict(
            format!(
                "BPS_BACKUP_WORKERS={}, but the job has {} ranks (DMLC_NUM_WORKER={} x \
                 BYTEPS_LOCAL_SIZE={}): rounds would wait for nobody",
                config.backup_workers,
                config.size(),
                config.num_workers,
                config.local_size
            ),
            format!("set it to at most {}, or unset it", config.size().saturating_sub(1)),
        ));
    }
    if !config.distributed() {
        return Ok(());
    }
    if config.num_servers == 0 && config.needs_servers() {
        return Err(ConfigError::conflict(
            format!(
                "DMLC_NUM_SERVER=0, but this job has {} (DMLC_NUM_WORKER={} x \
                 BYTEPS_LOCAL_SIZE={}), which need a server",
                counted(config.size(), "rank"),
                config.num_workers,
                config.local_size
            ),
            "set DMLC_NUM_SERVER=1 and start bps-server and bps-scheduler, or let 'bpslaunch \
             --local' start all"
                .to_owned(),
        ));
    }
    scheduler_address(config)
}

/// How the GPUs of a host are to reduce among themselves.
fn gpus(config: &Config) -> Result<(), ConfigError> {
    let roots = || format!("BYTEPS_REDUCE_ROOTS={}", counts_text(&config.reduce_roots));
    if config.reduce_roots.last().is_some_and(|root| *root >= config.local_size) {
        return Err(ConfigError::conflict(
            format!("{}, but BYTEPS_LOCAL_SIZE={}", roots(), config.local_size),
            format!("name local ranks from 0 to {}", config.local_size - 1),
        ));
    }
    if !config.reduce_roots.is_empty() && !config.local_reduce {
        return Err(ConfigError::conflict(
            format!("{}, but BPS_LOCAL_REDUCE=0 keeps the ranks of a host apart", roots()),
            "unset one of them".to_owned(),
        ));
    }
    let Some(size) = config.ranks_of_switch() else { return Ok(()) };
    let conflict = |with: &str, remedy: &str| {
        let problem = format!("BYTEPS_PCIE_SWITCH_SIZE={size}, but {with}");
        Err(ConfigError::conflict(problem, remedy.to_owned()))
    };
    if !config.local_size.is_multiple_of(size) {
        return conflict(
            &format!("BYTEPS_LOCAL_SIZE={} is no multiple of it", config.local_size),
            "all switches of a host must have as many GPUs that are used",
        );
    }
    if !config.reduce_roots.is_empty() {
        return conflict(&format!("{} reduces across the switches", roots()), "unset one of them");
    }
    if !config.local_reduce {
        return conflict("BPS_LOCAL_REDUCE=0 keeps the ranks of a host apart", "unset one of them");
    }
    Ok(())
}

fn ranks(config: &Config) -> Result<(), ConfigError> {
    let most = u32::try_from(RANKS_MAX).expect("RANKS_MAX is small");
    if config.size() > most {
        return Err(ConfigError::conflict(
            format!(
                "DMLC_NUM_WORKER={} x BYTEPS_LOCAL_SIZE={} are {} ranks; {most} are the most",
                config.num_workers,
                config.local_size,
                config.size()
            ),
            "set DMLC_NUM_WORKER to the number of machines, not of processes".to_owned(),
        ));
    }
    Ok(())
}

fn scheduler(config: &Config) -> Result<(), ConfigError> {
    ranks(config)?;
    // The ranks of one machine may do without; what they say for themselves is not known here.
    if config.num_servers == 0 && config.num_workers > 1 {
        return Err(ConfigError::missing(
            "DMLC_NUM_SERVER",
            "how many servers the scheduler waits for",
            "DMLC_NUM_SERVER=1",
        ));
    }
    root_uri(config)
}

/// A worker or a server must know where the scheduler is.
fn scheduler_address(config: &Config) -> Result<(), ConfigError> {
    root_uri(config)?;
    if config.root_port == 0 {
        return Err(ConfigError::missing(
            "DMLC_PS_ROOT_PORT",
            "the port of the scheduler",
            "DMLC_PS_ROOT_PORT=9000",
        ));
    }
    Ok(())
}

fn root_uri(config: &Config) -> Result<(), ConfigError> {
    if config.root_uri.is_empty() {
        return Err(ConfigError::missing(
            "DMLC_PS_ROOT_URI",
            "the address of the scheduler",
            "DMLC_PS_ROOT_URI=10.0.0.1",
        ));
    }
    Ok(())
}

fn below(index: &str, value: u32, count: &str, limit: u32) -> Result<(), ConfigError> {
    if value < limit {
        return Ok(());
    }
    Err(ConfigError::conflict(
        format!("{index}={value}, but {count}={limit}"),
        format!("{index} counts from 0 to {}", limit - 1),
    ))
}

fn counted(count: u32, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}
