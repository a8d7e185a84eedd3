//! What is started, with which environment, and how output and input pass.

use super::stage::{ENDS, Stage, has, mentions};

const KEY: &str = "00112233445566778899aabbccddeeff";
const TELL: &str = r#"echo "$DMLC_ROLE $DMLC_NUM_WORKER $DMLC_NUM_SERVER rank=$DMLC_RANK \
cores=$BPS_SERVER_CORES size=$BYTEPS_LOCAL_SIZE""#;

#[test]
fn local_mode_starts_a_whole_job_and_labels_its_lines() {
    let stage = Stage::new(TELL, TELL);
    let worker = r#"read line; echo "in=$line"; echo "wrong" >&2; printf "%s/%s omp=%s %s" \
    $BYTEPS_LOCAL_RANK $BYTEPS_LOCAL_SIZE $OMP_NUM_THREADS "$DMLC_ROLE""#;
    let arguments = ["--local", "2", "--servers", "2", "--server-cores", "3", "sh", "-c", worker];
    let mut launcher = stage.start(&arguments, &[("OMP_NUM_THREADS", "7"), ("DMLC_RANK", "9")]);
    launcher.write("hello\n");
    let (code, lines) = launcher.finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    has(&lines, "[rank 0] in=hello");
    has(&lines, "[rank 1] in=");
    for rank in 0..2 {
        has(&lines, &format!("[rank {rank}] wrong"));
        has(&lines, &format!("[rank {rank}] {rank}/2 omp=7 worker"));
        has(&lines, &format!("[server {rank}] server 1 2 rank={rank} cores=3 size=2"));
    }
    has(&lines, "[scheduler] scheduler 1 2 rank= cores=3 size=2");
}

#[test]
fn local_mode_shares_the_cpus_and_says_so() {
    let stage = Stage::new(ENDS, ENDS);
    let launcher = stage.start(&["--local", "2", "sh", "-c", "echo omp=$OMP_NUM_THREADS"], &[]);
    let (_, lines) = launcher.finish();
    let cpus = std::thread::available_parallelism().unwrap().get();
    has(&lines, &format!("[rank 1] omp={}", (cpus / 2).max(1)));
    mentions(&lines, "OMP_NUM_THREADS=");
}

#[test]
fn every_process_can_read_one_secret_that_stands_on_no_command_line() {
    let tell = r#"echo "key=$(cat $BPS_JOB_KEY_FILE)"; ps=$(cat /proc/[0-9]*/cmdline 2>/dev/null \
    | tr '\0' ' '); case "$ps" in *"$(cat $BPS_JOB_KEY_FILE)"*) echo leaked;; esac"#;
    let stage = Stage::new(tell, tell);
    let (code, lines) = stage.start(&["--local", "2", "sh", "-c", tell], &[]).finish();
    assert_eq!(code, Some(0));
    let keys: Vec<&str> =
        lines.iter().filter_map(|line| line.split_once("key=").map(|(_, key)| key)).collect();
    assert_eq!(keys.len(), 4, "{lines:#?}");
    assert!(keys[0].len() == 64 && keys.iter().all(|key| *key == keys[0]), "{keys:?}");
    assert!(!lines.iter().any(|line| line.contains("leaked")));
    let files = std::fs::read_dir(stage.path()).unwrap().count();
    assert_eq!(files, 3, "nothing but the programs is in the folder");
}

#[test]
fn a_key_of_the_user_is_kept() {
    let stage = Stage::new(ENDS, ENDS);
    let tell = "echo key=$BPS_JOB_KEY file=$BPS_JOB_KEY_FILE";
    let (_, lines) =
        stage.start(&["--local", "1", "sh", "-c", tell], &[("BPS_JOB_KEY", KEY)]).finish();
    has(&lines, &format!("[rank 0] key={KEY} file="));
}

#[test]
fn local_mode_replaces_another_job_and_says_so() {
    let stage = Stage::new(ENDS, ENDS);
    let tell = "echo $DMLC_NUM_WORKER $DMLC_PS_ROOT_URI";
    let (_, lines) = stage.start(&["--local", "1", "sh", "-c", tell], WORKER).finish();
    has(&lines, "[rank 0] 1 127.0.0.1");
    mentions(&lines, "describe another job");
}

#[test]
fn output_passes_untouched_without_prefix() {
    let stage = Stage::new(ENDS, ENDS);
    let arguments = ["--local", "2", "--no-prefix", "sh", "-c", "echo plain"];
    let (code, lines) = stage.start(&arguments, &[]).finish();
    assert_eq!(code, Some(0));
    assert_eq!(lines.iter().filter(|line| *line == "plain").count(), 2, "{lines:#?}");
}

#[test]
fn workers_of_one_machine_need_no_server() {
    let stage = Stage::new(ENDS, "exit 1");
    let arguments =
        ["--local", "1", "--servers", "0", "sh", "-c", "echo $BYTEPS_FORCE_DISTRIBUTED"];
    let (code, lines) = stage.start(&arguments, &[]).finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    has(&lines, "[rank 0] 0");
    let several = ["--local", "2", "--servers", "0", "sh", "-c", "echo $DMLC_NUM_SERVER"];
    let (code, lines) = stage.start(&several, &[]).finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    has(&lines, "[rank 1] 0");
    has(&lines, "[scheduler] up");
    let (code, lines) = stage.start(&several, &[("BPS_LOCAL_REDUCE", "0")]).finish();
    assert_eq!(code, Some(2));
    mentions(&lines, "use --servers 1");
}

const WORKER: &[(&str, &str)] = &[
    ("DMLC_ROLE", "worker"),
    ("DMLC_NUM_WORKER", "2"),
    ("DMLC_NUM_SERVER", "1"),
    ("DMLC_WORKER_ID", "1"),
    ("DMLC_PS_ROOT_URI", "10.0.0.1"),
    ("DMLC_PS_ROOT_PORT", "9000"),
];

#[test]
fn by_variables_a_worker_machine_starts_a_process_for_each_device() {
    let stage = Stage::new("exit 1", "exit 1");
    let variables = [WORKER, &[("NVIDIA_VISIBLE_DEVICES", "0,1,2"), ("BYTEPS_NUMA_ON", "0")]];
    let tell = "echo $BYTEPS_LOCAL_RANK/$BYTEPS_LOCAL_SIZE \"$1\" $PYTHONUNBUFFERED $BPS_LOG_LEVEL";
    let arguments = ["--log-level", "debug", "sh", "-c", tell, "sh", "two  words"];
    let (code, mut lines) = stage.start(&arguments, &variables.concat()).finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    lines.sort();
    assert_eq!(lines, [0, 1, 2].map(|rank| format!("{rank}/3 two  words 1 debug")));
}

#[test]
fn by_variables_one_argument_with_blanks_is_a_shell_line() {
    let stage = Stage::new("exit 1", "exit 1");
    let line = "echo rank $BYTEPS_LOCAL_RANK && exit 4";
    let (code, lines) = stage.start(&[line], WORKER).finish();
    assert_eq!(code, Some(4));
    has(&lines, "rank 0");
    mentions(&lines, "rank 1 exited with code 4");
}

#[test]
fn by_variables_other_roles_run_their_programs() {
    let stage = Stage::new("echo scheduler; exit 5", "echo $DMLC_ROLE; exit 6");
    for (role, expected) in [("scheduler", 5), ("server", 6)] {
        let variables = [WORKER, &[("DMLC_ROLE", role)]].concat();
        let (code, lines) = stage.start(&["ignored"], &variables).finish();
        assert_eq!(code, Some(expected), "{lines:#?}");
        has(&lines, role);
    }
}

#[test]
fn what_srun_and_mpirun_start_is_one_rank_of_their_job() {
    let stage = Stage::new("exit 1", "exit 1");
    let tell = "echo \"$SLURM_PROCID$PMI_RANK$RANK role=$DMLC_ROLE $BPS_LOG_LEVEL\"; exit 4";
    for variables in [
        &[("SLURM_PROCID", "3"), ("SLURM_STEP_ID", "0"), ("SLURM_NTASKS", "4")][..],
        &[("PMI_RANK", "3"), ("PMI_SIZE", "4")],
        &[("RANK", "3"), ("WORLD_SIZE", "4")],
    ] {
        let arguments = ["--log-level", "error", "sh", "-c", tell];
        let (code, lines) = stage.start(&arguments, variables).finish();
        assert_eq!(code, Some(4), "{lines:#?}");
        has(&lines, "3 role= error");
        mentions(&lines, "rank 3 exited with code 4");
    }
    // The shell of a batch script is none.
    let shell = [("SLURM_PROCID", "0"), ("SLURM_STEP_ID", "4294967291"), ("SLURM_NTASKS", "4")];
    let (code, lines) = stage.start(&["true"], &shell).finish();
    assert_eq!(code, Some(2), "{lines:#?}");
    mentions(&lines, "bpslaunch --hosts host1:4,host2:4 COMMAND");
}

#[test]
fn everything_that_is_missing_is_named_at_once() {
    let stage = Stage::new(ENDS, ENDS);
    let (code, lines) =
        stage.start(&["true"], &[("DMLC_ROLE", "worker"), ("DMLC_NUM_WORKER", "2")]).finish();
    assert_eq!(code, Some(2));
    for name in ["DMLC_WORKER_ID", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"] {
        mentions(&lines, &format!("{name} is not set"));
    }
    assert_eq!(lines.len(), 4, "{lines:#?}");
    let (code, lines) = stage.start(&["true"], &[]).finish();
    assert_eq!(code, Some(2));
    mentions(&lines, "bpslaunch --local 2");
    let alone = [("DMLC_ROLE", "worker"), ("DMLC_NUM_WORKER", "1"), ("DMLC_WORKER_ID", "0")];
    let (code, lines) = stage.start(&["echo", "alone"], &alone).finish();
    assert_eq!((code, lines.as_slice()), (Some(0), ["alone".to_owned()].as_slice()));
}

#[test]
fn torchs_variables_say_the_same_as_ours() {
    let stage = Stage::new(ENDS, ENDS);
    let tell = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR \
        ${MASTER_PORT:+port}$TORCHELASTIC_RUN_ID";
    let outer = [("RANK", "7"), ("TORCHELASTIC_RUN_ID", "outer")];
    let (code, lines) = stage.start(&["--local", "2", "sh", "-c", tell], &outer).finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    has(&lines, "[rank 0] 0/2 0/2 127.0.0.1 port");
    has(&lines, "[rank 1] 1/2 1/2 127.0.0.1 port");
    // What the user says stays. On several machines nobody here knows where rank 0 runs.
    let own = [("MASTER_ADDR", "10.0.0.7"), ("MASTER_PORT", "1234")];
    let tell = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT";
    let (_, lines) = stage.start(&["--local", "1", "sh", "-c", tell], &own).finish();
    has(&lines, "[rank 0] 0/1 0/1 at 10.0.0.7:1234");
    let variables = [WORKER, &[("BYTEPS_LOCAL_SIZE", "2"), ("BYTEPS_NUMA_ON", "0")]].concat();
    let (code, lines) = stage.start(&["sh", "-c", tell], &variables).finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    has(&lines, "2/4 0/2 at :");
    has(&lines, "3/4 1/2 at :");
}

#[test]
fn what_cannot_be_started_is_said_with_the_shells_codes() {
    let stage = Stage::new("sleep 1000", "sleep 1000");
    let (code, lines) = stage.start(&["--local", "2", "no-such-program"], &[]).finish();
    assert_eq!(code, Some(127));
    mentions(&lines, "cannot start rank 0: 'no-such-program'");
    let (code, _) = stage.start(&["--local", "2", "/etc/passwd"], &[]).finish();
    assert_eq!(code, Some(126));
    let (code, lines) = stage.start(&["--local", "2"], &[]).finish();
    assert_eq!(code, Some(2));
    mentions(&lines, "no command was given");
    let (code, lines) = stage.start(&["--local", "2", "--workers", "2", "true"], &[]).finish();
    assert_eq!(code, Some(2));
    mentions(&lines, "--workers together with --local");
}

#[test]
fn questions_are_answered() {
    let stage = Stage::new(ENDS, ENDS);
    for (question, answer) in [
        ("--help", "--local"),
        ("--version", env!("CARGO_PKG_VERSION")),
        ("--print-config", "DMLC_NUM_WORKER"),
    ] {
        let (code, lines) = stage.start(&[question], &[]).finish();
        assert_eq!(code, Some(0));
        mentions(&lines, answer);
    }
}

#[test]
fn warnings_come_once_for_the_whole_job() {
    let stage = Stage::new(ENDS, ENDS);
    let variables = [("BYTEPS_THREADPOOL_SIZE", "4"), ("BYTEPS_PARTITION_BYTE", "4M")];
    let tell = "echo checked=$BPS_ENVIRONMENT_CHECKED";
    let (_, lines) = stage.start(&["--local", "1", "sh", "-c", tell], &variables).finish();
    mentions(&lines, "BYTEPS_THREADPOOL_SIZE has no effect here");
    mentions(&lines, "did you mean BYTEPS_PARTITION_BYTES?");
    has(&lines, "[rank 0] checked=1");
}

#[test]
fn processes_are_bound_to_the_cpus_that_they_are_given() {
    let stage = Stage::new(ENDS, ENDS);
    let allowed = bps_engine::topo::pin::affinity().unwrap();
    let (first, last) = (allowed[0], allowed[allowed.len() - 1]);
    let lists = format!("{first}:{last}");
    let tell = "grep Cpus_allowed_list /proc/self/status | tr '\\t' ' '";
    let arguments = ["--local", "2", "sh", "-c", tell];
    let (code, lines) = stage.start(&arguments, &[("BYTEPS_VISIBLE_CPU_CORES", &lists)]).finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    has(&lines, &format!("[rank 0] Cpus_allowed_list: {first}"));
    has(&lines, &format!("[rank 1] Cpus_allowed_list: {last}"));
}

#[test]
fn a_dry_run_tells_all_and_starts_nothing() {
    let stage = Stage::new("touch started", "touch started");
    let allowed = bps_engine::topo::pin::affinity().unwrap();
    let lists = format!("{0}:{0}", allowed[0]);
    let arguments = ["--local", "2", "--dry-run", "touch", "started"];
    let (code, lines) = stage.start(&arguments, &[("BYTEPS_VISIBLE_CPU_CORES", &lists)]).finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    mentions(&lines, &format!("rank 1: CPU {}", allowed[0]));
    has(&lines, "rank 1: touch started");
    mentions(&lines, "server 0: ");
    assert!(!stage.path().join("started").exists());
}

#[test]
fn gpus_that_are_demanded_and_hidden_are_an_error() {
    let stage = Stage::new(ENDS, ENDS);
    let (code, lines) = stage.start(&["--local", "2", "--gpus", "demand", "true"], &[]).finish();
    assert_eq!(code, Some(2));
    mentions(&lines, "2 worker processes want a GPU each, but 0 GPUs are visible");
    mentions(&lines, "(CUDA_VISIBLE_DEVICES=)");
    let variables = [WORKER, &[("CUDA_VISIBLE_DEVICES", "0,1")]].concat();
    let (code, lines) = stage.start(&["--gpus", "none", "true"], &variables).finish();
    assert_eq!((code, lines.len()), (Some(0), 0), "{lines:#?}");
}

#[test]
fn by_variables_the_only_machine_of_a_job_needs_no_address() {
    let stage = Stage::new(ENDS, "exit 1");
    let only = [
        ("DMLC_ROLE", "worker"),
        ("DMLC_NUM_WORKER", "1"),
        ("DMLC_WORKER_ID", "0"),
        ("BYTEPS_LOCAL_SIZE", "2"),
    ];
    let tell = "echo $BYTEPS_LOCAL_RANK of $BYTEPS_LOCAL_SIZE at $DMLC_PS_ROOT_URI";
    let (code, lines) = stage.start(&["sh", "-c", tell], &only).finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    has(&lines, "up");
    has(&lines, "0 of 2 at 127.0.0.1");
    has(&lines, "1 of 2 at 127.0.0.1");
    // Where servers are asked for, somebody must say where the job meets.
    let through = [only.as_slice(), &[("BYTEPS_FORCE_DISTRIBUTED", "1")]].concat();
    let (code, lines) = stage.start(&["true"], &through).finish();
    assert_eq!(code, Some(2));
    mentions(&lines, "DMLC_PS_ROOT_URI is not set");
}
