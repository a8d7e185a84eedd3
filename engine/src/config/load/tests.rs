//! Precedence, errors and warnings, with environments made of literals.

use super::*;
use crate::base::Placement;
use crate::config::{LogLevel, Role, TransportChoice};
use std::time::Duration;

type Variables<'a> = &'a [(&'a str, &'a str)];

const WORKER: &[(&str, &str)] = &[
    ("DMLC_ROLE", "worker"),
    ("DMLC_NUM_WORKER", "2"),
    ("DMLC_NUM_SERVER", "1"),
    ("DMLC_WORKER_ID", "1"),
    ("DMLC_PS_ROOT_URI", "10.0.0.1"),
    ("DMLC_PS_ROOT_PORT", "9000"),
];

fn read(
    program: Program,
    arguments: &[&str],
    variables: &[Variables<'_>],
) -> Result<Outcome, ConfigError> {
    load(program, arguments.iter().map(OsString::from), &|name| {
        // The later list wins, as a shell's later assignment would.
        let mut all = variables.iter().rev().flat_map(|list| list.iter());
        all.find(|(own, _)| *own == name).map(|(_, value)| (*value).to_owned())
    })
}

fn run(program: Program, arguments: &[&str], variables: &[Variables<'_>]) -> Loaded {
    match read(program, arguments, variables) {
        Ok(Outcome::Run(loaded)) => *loaded,
        other => panic!("{other:?}"),
    }
}

fn fail(program: Program, arguments: &[&str], variables: &[Variables<'_>]) -> String {
    read(program, arguments, variables).expect_err("it must be refused").to_string()
}

#[test]
fn nothing_set_is_a_worker_alone() {
    let loaded = run(Program::Worker, &[], &[]);
    assert_eq!(loaded.config, Config::default());
    assert!(!loaded.config.distributed() && loaded.warnings.is_empty());
    assert!(loaded.sources.iter().all(|source| source.origin == Origin::Default));
}

#[test]
fn a_flag_beats_a_variable_beats_the_default() {
    let base: &[(&str, &str)] = &[("DMLC_PS_ROOT_URI", "h"), ("DMLC_PS_ROOT_PORT", "1")];
    let cores: &[(&str, &str)] = &[("BPS_SERVER_CORES", "3")];
    assert_eq!(run(Program::Server, &[], &[base]).config.server_cores, 1);
    let loaded = run(Program::Server, &[], &[base, cores]);
    assert_eq!(loaded.config.server_cores, 3);
    assert_eq!(loaded.origin("BPS_SERVER_CORES"), Origin::Variable("BPS_SERVER_CORES"));
    for arguments in [["--cores", "5"], ["--server-cores", "5"]] {
        let loaded = run(Program::Server, &arguments, &[base, cores]);
        assert_eq!(loaded.config.server_cores, 5);
        assert_eq!(loaded.origin("BPS_SERVER_CORES"), Origin::Flag("cores"));
    }
}

#[test]
fn ranks_follow_from_hosts() {
    let local: &[(&str, &str)] = &[("BYTEPS_LOCAL_RANK", "3"), ("BYTEPS_LOCAL_SIZE", "4")];
    let config = run(Program::Worker, &[], &[WORKER, local]).config;
    assert_eq!((config.rank(), config.size(), config.distributed()), (7, 8, true));
    let config = run(Program::Worker, &[], &[WORKER, local, &[("BYTEPS_GLOBAL_RANK", "2")]]).config;
    assert_eq!(config.rank(), 2);
}

#[test]
fn aliases_sizes_times_and_words() {
    let set: &[(&str, &str)] = &[
        ("PS_HEARTBEAT_INTERVAL", "2.5"),
        ("PS_HEARTBEAT_TIMEOUT", "20"),
        ("BYTEPS_LOG_LEVEL", "TRACE"),
        ("BYTEPS_PARTITION_BYTES", "4096000"),
        ("DMLC_INTERFACE", ""),
    ];
    let loaded = run(Program::Worker, &[], &[set]);
    assert_eq!(loaded.config.heartbeat_interval, Duration::from_millis(2500));
    assert_eq!(loaded.config.log_level, LogLevel::Debug);
    assert_eq!(loaded.config.partition_bytes, 4_096_000);
    assert_eq!(loaded.config.interface, None);
    assert_eq!(loaded.origin("BPS_LOG_LEVEL"), Origin::Variable("BYTEPS_LOG_LEVEL"));
    // Our own name beats BytePS's.
    let loaded = run(Program::Worker, &[], &[set, &[("BPS_LOG_LEVEL", "error")]]);
    assert_eq!(loaded.config.log_level, LogLevel::Error);
    let loaded = run(Program::Worker, &[], &[&[("BPS_LOG_LEVEL", "WARN")]]);
    assert_eq!(loaded.config.log_level, LogLevel::Warning);
    let loaded = run(Program::Worker, &[], &[&[("BYTEPS_PARTITION_BYTES", "100001")]]);
    assert_eq!(loaded.config.partition_bytes, 99_968);
    assert!(loaded.warnings[0].contains("99968"), "{:?}", loaded.warnings);
}

#[test]
fn byteschedulers_names_let_a_job_tune_itself() {
    let set: &[(&str, &str)] =
        &[("BYTESCHEDULER_CREDIT_TUNING", "1"), ("BYTESCHEDULER_PARTITION_TUNING", "0")];
    let config = run(Program::Worker, &[], &[set]).config;
    assert_eq!((config.tune_credit, config.tune_partition), (true, false));
    let config = run(Program::Worker, &[], &[set, &[("BPS_TUNE_CREDIT", "0")]]).config;
    assert!(!config.tune_credit, "our own name beats ByteScheduler's");
    let unknown = unknown_variables(["BYTESCHEDULER_CREDITS".to_owned()]);
    assert!(unknown[0].contains("did you mean BYTESCHEDULER_CREDIT?"), "{unknown:?}");
}

#[test]
fn mixed_mode_is_a_placement() {
    let base: &[(&str, &str)] =
        &[("DMLC_PS_ROOT_URI", "h"), ("DMLC_NUM_SERVER", "2"), ("BYTEPS_ENABLE_MIXED_MODE", "1")];
    let loaded = run(Program::Scheduler, &[], &[base]);
    assert_eq!(loaded.config.placement, Placement::Mixed);
    assert_eq!(loaded.origin("BYTEPS_KEY_HASH_FN"), Origin::Implied);
    let error = fail(Program::Scheduler, &["--mixed-mode-bound=1"], &[base]);
    assert!(error.contains("BYTEPS_MIXED_MODE_BOUND=1 is below DMLC_NUM_SERVER=2"), "{error}");
}

#[test]
fn variables_of_bytescheduler_count_elements() {
    let set: &[(&str, &str)] = &[
        ("BYTESCHEDULER_PARTITION", "1000000"),
        ("BYTESCHEDULER_CREDIT", "4000001"),
        ("BYTESCHEDULER_TIMELINE", "/tmp/t"),
        ("BYTESCHEDULER_DEBUG", "1"),
    ];
    let loaded = run(Program::Worker, &[], &[set]);
    let config = &loaded.config;
    assert_eq!((config.partition_bytes, config.scheduling_credit), (4_000_000, 5));
    assert_eq!((config.trace_on, config.trace_folder()), (true, "/tmp/t".into()));
    assert_eq!(config.log_level, LogLevel::Debug);
    assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
    assert_eq!(loaded.origin("BYTEPS_PARTITION_BYTES"), Origin::Implied);
    // The scheduler cuts tensors as the ranks do.
    let base: &[(&str, &str)] = &[("DMLC_PS_ROOT_URI", "h"), ("DMLC_NUM_SERVER", "2")];
    assert_eq!(run(Program::Scheduler, &[], &[base, set]).config.partition_bytes, 4_000_000);
    // Names of ours beat those of ByteScheduler.
    let ours: &[(&str, &str)] = &[
        ("BYTEPS_PARTITION_BYTES", "1M"),
        ("BYTEPS_SCHEDULING_CREDIT", "7"),
        ("BYTEPS_TRACE_ON", "0"),
        ("BYTEPS_TRACE_DIR", "/tmp/o"),
        ("BPS_LOG_LEVEL", "warning"),
    ];
    let config = run(Program::Worker, &[], &[set, ours]).config;
    assert_eq!((config.partition_bytes, config.scheduling_credit), (1 << 20, 7));
    assert_eq!((config.trace_on, config.trace_folder()), (false, "/tmp/o".into()));
    assert_eq!(config.log_level, LogLevel::Warning);
    // A credit alone is as many bytes, in parts of the default.
    let credit: &[(&str, &str)] = &[("BYTESCHEDULER_CREDIT", "4000000")];
    assert_eq!(run(Program::Worker, &[], &[credit]).config.scheduling_credit, 62);
    let small: &[(&str, &str)] = &[("BYTESCHEDULER_PARTITION", "0"), ("BYTESCHEDULER_CREDIT", "0")];
    let loaded = run(Program::Worker, &[], &[small]);
    assert_eq!((loaded.config.partition_bytes, loaded.config.scheduling_credit), (4096, 1));
    assert!(loaded.warnings[0].contains("BYTEPS_PARTITION_BYTES=4096"), "{:?}", loaded.warnings);
}

#[test]
fn errors_say_what_which_and_how() {
    let cases: &[(Variables<'_>, &[&str])] = &[
        (&[("DMLC_NUM_WORKER", "two")], &["DMLC_NUM_WORKER", "'two'", "from 1", "=2"]),
        (&[("DMLC_NUM_WORKER", "0")], &["DMLC_NUM_WORKER", "'0'"]),
        (&[("DMLC_WORKER_ID", "2")], &["DMLC_WORKER_ID=2", "DMLC_NUM_WORKER=2", "0 to 1"]),
        (&[("BYTEPS_LOCAL_RANK", "1")], &["BYTEPS_LOCAL_RANK=1", "BYTEPS_LOCAL_SIZE=1"]),
        (&[("DMLC_NUM_SERVER", "0")], &["DMLC_NUM_SERVER=0", "2 ranks", "--local"]),
        (&[("DMLC_PS_ROOT_URI", "")], &["DMLC_PS_ROOT_URI is not set", "10.0.0.1"]),
        (&[("DMLC_PS_ROOT_PORT", "0")], &["DMLC_PS_ROOT_PORT is not set"]),
        (&[("DMLC_PS_ROOT_PORT", "70000")], &["'70000'", "65535"]),
        (&[("BYTEPS_PARTITION_BYTES", "1")], &["BYTEPS_PARTITION_BYTES", "4K", "64M"]),
        (&[("BYTEPS_NCCL_NUM_RINGS", "65")], &["BYTEPS_NCCL_NUM_RINGS", "'65'", "from 0 to 64"]),
        (&[("BYTEPS_NCCL_NUM_RINGS", "-1")], &["BYTEPS_NCCL_NUM_RINGS", "'-1'"]),
        (&[("BYTEPS_REDUCE_ROOTS", "0,x")], &["BYTEPS_REDUCE_ROOTS", "'0,x'", "each once", "=0,2"]),
        (&[("BYTEPS_REDUCE_ROOTS", "0,0")], &["BYTEPS_REDUCE_ROOTS", "'0,0'", "each once"]),
        (&[("BYTEPS_REDUCE_ROOTS", "1,0")], &["BYTEPS_REDUCE_ROOTS=0,1", "LOCAL_SIZE=1", "0 to 0"]),
        (
            &[("BYTEPS_REDUCE_ROOTS", "0"), ("BPS_LOCAL_REDUCE", "0")],
            &["BYTEPS_REDUCE_ROOTS=0", "BPS_LOCAL_REDUCE=0", "unset one"],
        ),
        (
            &[("BYTEPS_PCIE_SWITCH_SIZE", "3"), ("BYTEPS_LOCAL_SIZE", "4")],
            &["BYTEPS_PCIE_SWITCH_SIZE=3", "BYTEPS_LOCAL_SIZE=4", "as many GPUs"],
        ),
        (
            &[
                ("BYTEPS_PCIE_SWITCH_SIZE", "2"),
                ("BYTEPS_LOCAL_SIZE", "4"),
                ("BYTEPS_REDUCE_ROOTS", "0,2"),
            ],
            &["BYTEPS_PCIE_SWITCH_SIZE=2", "BYTEPS_REDUCE_ROOTS=0,2", "unset one"],
        ),
        (
            &[
                ("BYTEPS_PCIE_SWITCH_SIZE", "2"),
                ("BYTEPS_LOCAL_SIZE", "4"),
                ("BPS_LOCAL_REDUCE", "0"),
            ],
            &["BYTEPS_PCIE_SWITCH_SIZE=2", "BPS_LOCAL_REDUCE=0", "unset one"],
        ),
        (&[("BYTEPS_GLOBAL_RANK", "2")], &["BYTEPS_GLOBAL_RANK=2", "2 ranks"]),
        (&[("BPS_TRANSPORT", "ucx")], &["BPS_TRANSPORT", "'ucx'", "auto, tcp, shm, rdma"]),
        (&[("BPS_PIN", "2")], &["BPS_PIN", "true"]),
        (&[("DMLC_ROLE", "server")], &["DMLC_ROLE=server", "worker"]),
        (&[("BPS_HEARTBEAT_TIMEOUT", "0.9")], &["BPS_HEARTBEAT_TIMEOUT=0.9", "at least 1"]),
        (&[("BPS_STALL_TIMEOUT", "1")], &["BPS_STALL_TIMEOUT=1", "BPS_STALL_REPORT=3"]),
        (&[("BPS_JOB_KEY", "secret!")], &["BPS_JOB_KEY", "hexadecimal"]),
    ];
    for (set, words) in cases {
        let error = fail(Program::Worker, &[], &[WORKER, set]);
        for word in *words {
            assert!(error.contains(word), "{error:?} lacks {word:?}");
        }
        assert!(!error.contains("secret!"), "{error}");
    }
}

#[test]
fn a_wrong_flag_names_the_flag() {
    let error = fail(Program::Server, &["--cores=none"], &[]);
    assert!(error.contains("--cores has the value 'none'"), "{error}");
    let error = fail(Program::Server, &["--coers=2"], &[]);
    assert!(error.contains("'--coers'") && error.contains("--cores"), "{error}");
    let error = fail(Program::Server, &["stray"], &[]);
    assert!(error.contains("stray"), "{error}");
}

#[test]
fn switches_stand_alone_and_do_not_swallow_the_command() {
    let loaded = run(Program::Launcher, &["--local", "2", "--no-prefix", "python", "-c", "x"], &[]);
    assert!(loaded.config.launch.no_prefix);
    assert_eq!(loaded.config.launch.local, 2);
    assert_eq!(loaded.command, ["python", "-c", "x"]);
    let loaded = run(Program::Launcher, &["--pin=0", "--", "--local"], &[]);
    assert!(!loaded.config.pin);
    assert_eq!(loaded.command, ["--local"]);
    assert_eq!(loaded.flags_as_variables(), [("BPS_PIN", "0".to_owned())]);
}

#[test]
fn servers_are_a_number_or_a_list_of_hosts() {
    let loaded = run(Program::Launcher, &["--servers", "2", "python"], &[]);
    assert_eq!((loaded.config.num_servers, loaded.config.launch.server_hosts), (2, None));
    let words = ["-H", "a:4,b:4", "--servers=c:8", "-x", "A", "--env", "B=1", "python"];
    let loaded = run(Program::Launcher, &words, &[]);
    let launch = &loaded.config.launch;
    assert_eq!(launch.hosts.as_deref(), Some("a:4,b:4"));
    assert_eq!(launch.server_hosts.as_deref(), Some("c:8"));
    assert_eq!(launch.pass, ["A", "B=1"]);
    assert_eq!(loaded.command, ["python"]);
    // Only the launcher knows where to start them.
    let error = fail(Program::Scheduler, &["--servers", "c:8"], &[WORKER]);
    assert!(error.contains("--servers has the value 'c:8'"), "{error}");
}

#[test]
fn an_option_of_nobody_is_no_command() {
    for (words, meant) in [
        (["--locl", "2", "python"], "there is no option --locl; did you mean --local?"),
        (
            ["--server-core=2", "python", "t"],
            "no option --server-core; did you mean --server-cores?",
        ),
        (["-np", "2", "python"], "there is no option -np; did you mean --local?"),
        (["-WH", "hosts", "python"], "no option -WH; did you mean --hostfile?"),
        (["--username=me", "python", "t"], "no option --username; did you mean --ssh-user?"),
        (["--log-dir", "logs", "python"], "no option --log-dir; all output comes here"),
        (["--verbose", "python", "t"], "there is no option --verbose; see bpslaunch --help"),
        (["--grace=1", "--xyz", "python"], "there is no option --xyz;"),
    ] {
        let error = fail(Program::Launcher, &words, &[]);
        assert!(error.contains(meant), "{error}");
    }
    let command = |words: &[&str]| run(Program::Launcher, words, &[]).command;
    assert_eq!(command(&["--", "-x", "--local"]), ["-x", "--local"]);
    assert_eq!(command(&["--local", "2", "python", "--locl"]), ["python", "--locl"]);
}

#[test]
fn help_version_and_print_config_print() {
    for program in [Program::Server, Program::Scheduler, Program::Launcher, Program::Top] {
        let text = |argument: &str| match read(program, &[argument], &[]) {
            Ok(Outcome::Print(text)) => text,
            other => panic!("{other:?}"),
        };
        assert!(text("--help").contains("DMLC_PS_ROOT_URI"));
        assert_eq!(
            text("--version"),
            format!("{} {}\n", program.name(), env!("CARGO_PKG_VERSION"))
        );
        assert!(text("--print-config").contains("BPS_METRICS_ADDRESS"));
    }
    let key = "00112233445566778899aabbccddeeff";
    let set: &[(&str, &str)] = &[("BPS_JOB_KEY", key), ("BPS_SERVER_CORES", "2")];
    match read(Program::Server, &["--print-config", "--idle=busy"], &[set]) {
        Ok(Outcome::Print(text)) => {
            assert!(text.contains("variable BPS_SERVER_CORES") && text.contains("flag --idle"));
            assert!(text.contains("would not start: DMLC_PS_ROOT_URI"), "{text}");
            assert!(!text.contains(key), "{text}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn no_debug_output_shows_the_key() {
    let key = "00112233445566778899aabbccddeeff";
    let loaded = run(Program::Worker, &[], &[&[("BPS_JOB_KEY", key)]]);
    assert_eq!(loaded.config.job_key.as_deref(), Some(key));
    assert!(!format!("{loaded:?}").contains(key));
}

#[test]
fn rdma_and_encryption_exclude_each_other() {
    let encrypt: &[(&str, &str)] = &[("BPS_ENCRYPT", "1")];
    let demands: [&[(&str, &str)]; 2] =
        [&[("BPS_TRANSPORT", "rdma")], &[("DMLC_ENABLE_RDMA", "1")]];
    for demand in demands {
        for program in [Program::Worker, Program::Server] {
            let node = if program == Program::Worker { WORKER } else { &WORKER[1..] };
            let error = fail(program, &[], &[node, encrypt, demand]);
            for part in ["BPS_ENCRYPT=1, but", "RDMA", "set BPS_TRANSPORT=tcp"] {
                assert!(error.contains(part), "{error}");
            }
        }
        run(Program::Worker, &[], &[WORKER, demand]);
    }
    let loaded = run(Program::Worker, &[], &[WORKER, encrypt]);
    assert!(loaded.config.encrypt && loaded.config.transport == TransportChoice::Auto);
}

#[test]
fn what_has_no_effect_says_so_once() {
    let set: &[(&str, &str)] =
        &[("PS_VERBOSE", "1"), ("DMLC_ENABLE_RDMA", "0"), ("BYTEPS_THREADPOOL_SIZE", "4")];
    let warnings = run(Program::Worker, &[], &[set]).warnings;
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].starts_with("BYTEPS_THREADPOOL_SIZE has no effect here: "));
    let checked: &[(&str, &str)] = &[("BPS_ENVIRONMENT_CHECKED", "1")];
    assert!(run(Program::Worker, &[], &[set, checked]).warnings.is_empty());
}

#[test]
fn asynchronous_training_goes_through_servers() {
    let set: &[(&str, &str)] = &[("BYTEPS_ENABLE_ASYNC", "1"), ("BPS_STALENESS", "4")];
    let config = run(Program::Worker, &[], &[WORKER, set]).config;
    assert!(config.enable_async && config.force_distributed && config.needs_servers());
    assert_eq!(config.staleness, Some(4));
    let config = run(Program::Worker, &[], &[WORKER]).config;
    assert!(!config.enable_async && config.staleness.is_none());
}

#[test]
fn backup_workers_need_servers_and_somebody_to_wait_for() {
    let host: &[(&str, &str)] =
        &[("DMLC_NUM_WORKER", "1"), ("DMLC_WORKER_ID", "0"), ("BYTEPS_LOCAL_SIZE", "3")];
    let set: &[(&str, &str)] = &[("BPS_BACKUP_WORKERS", "2"), ("BPS_BACKUP_BEHIND", "7")];
    let config = run(Program::Worker, &[], &[WORKER, host, set]).config;
    assert_eq!((config.backup_workers, config.backup_behind), (2, 7));
    assert!(config.force_distributed && config.needs_servers());
    let config = run(Program::Worker, &[], &[WORKER, host]).config;
    assert_eq!((config.backup_workers, config.backup_behind), (0, 4));
    let all: &[(&str, &str)] = &[("BPS_BACKUP_WORKERS", "3")];
    let error = fail(Program::Worker, &[], &[WORKER, host, all]);
    assert!(error.contains("the job has 3 ranks") && error.contains("at most 2"), "{error}");
}

#[test]
fn unknown_names_are_guessed() {
    let names =
        ["BYTEPS_PARTITON_BYTES", "DMLC_NUM_WORKERS", "BYTEPS_FROBNICATE", "HOME", "BPS_PIN"];
    let lines = unknown_variables(names.map(str::to_owned));
    assert_eq!(
        lines,
        [
            "BYTEPS_FROBNICATE is not known here and has no effect",
            "BYTEPS_PARTITON_BYTES is not known here; did you mean BYTEPS_PARTITION_BYTES?",
            "DMLC_NUM_WORKERS is not known here; did you mean DMLC_NUM_WORKER?",
        ]
    );
}

#[test]
fn the_tables_do_not_overlap() {
    for row in TABLE {
        for name in row.variables() {
            assert!(find(name).is_none(), "{name} is in both tables");
        }
    }
}

#[test]
fn roles_have_programs() {
    let base: &[(&str, &str)] = &[("DMLC_PS_ROOT_URI", "h"), ("DMLC_NUM_SERVER", "1")];
    assert_eq!(run(Program::Scheduler, &[], &[base]).config.role, Role::Scheduler);
    let error = fail(Program::Server, &[], &[base]);
    assert!(error.contains("DMLC_PS_ROOT_PORT is not set"), "{error}");
}

#[test]
fn a_host_with_one_switch_has_no_switches() {
    let of = |size: &str, local: &str| {
        let set: &[(&str, &str)] =
            &[("BYTEPS_PCIE_SWITCH_SIZE", size), ("BYTEPS_LOCAL_SIZE", local)];
        run(Program::Worker, &[], &[WORKER, set]).config.ranks_of_switch()
    };
    // BytePS's default is 8.
    let cases = [of("0", "8"), of("8", "8"), of("8", "4"), of("4", "8"), of("1", "2")];
    assert_eq!(cases, [None, None, None, Some(4), Some(1)]);
}
