//! How a job ends: well, by a failure, by a signal, or because the launcher is gone.

use super::stage::{ENDS, LEADS, PATIENCE, Stage, all_gone, has, mentions, numbers, runs, until};
use std::time::Instant;

/// Ignores requests to end, has a child that does so too, and tells both numbers.
const STUBBORN: &str =
    "trap '' TERM INT HUP; sleep 1000 & echo \"process $$\"; echo \"process $!\"; wait; sleep 1000";
/// Ends when it is asked to, and says so.
const POLITE: &str = "trap 'echo asked; exit 0' TERM; trap 'echo interrupted; exit 0' INT;
    echo \"process $$\"; while :; do sleep 0.02; done";

#[test]
fn when_a_worker_fails_all_end_and_its_code_is_returned() {
    let stage = Stage::new(POLITE, STUBBORN);
    let worker = format!("if [ $BYTEPS_LOCAL_RANK = 1 ]; then read go <go; exit 3; fi; {STUBBORN}");
    fifo(&stage, "go");
    let begun = Instant::now();
    let arguments = ["--local", "3", "--grace", "0.3", "sh", "-c", &worker];
    let launcher = stage.start(&arguments, &[]);
    let processes = numbers(&launcher.wait_for("process ", 7), "process ");
    std::fs::write(stage.path().join("go"), "\n").unwrap();
    let (code, lines) = launcher.finish();
    assert_eq!(code, Some(3), "{lines:#?}");
    has(&lines, "bpslaunch: rank 1 exited with code 3; ending the other processes");
    has(&lines, "[scheduler] asked");
    mentions(&lines, "rank 0 did not end in time: killed");
    mentions(&lines, "server 0 did not end in time: killed");
    assert!(begun.elapsed() < PATIENCE / 2);
    // They have been told to die; on a busy machine they may not have got to it yet.
    all_gone(&processes);
}

#[test]
fn a_worker_that_a_signal_ends_counts_as_128_and_its_number() {
    let stage = Stage::new(ENDS, ENDS);
    let worker = "[ $BYTEPS_LOCAL_RANK = 0 ] && kill -SEGV $$; exec sleep 1000";
    let (code, lines) = stage.start(&["--local", "2", "sh", "-c", worker], &[]).finish();
    assert_eq!(code, Some(139), "{lines:#?}");
    mentions(&lines, "rank 0 was killed by SIGSEGV (11)");
}

#[test]
fn when_a_server_dies_the_workers_may_say_so_before_they_are_ended() {
    let stage = Stage::new(POLITE, "read go <go; exit 9");
    fifo(&stage, "go");
    let worker = "trap 'echo ended; exit 1' TERM; echo ready; while :; do sleep 0.02; done";
    let launcher = stage.start(&["--local", "2", "--grace", "0.3", "sh", "-c", worker], &[]);
    launcher.wait_for("ready", 2);
    std::fs::write(stage.path().join("go"), "\n").unwrap();
    let (code, lines) = launcher.finish();
    assert_eq!(code, Some(9), "{lines:#?}");
    has(&lines, "bpslaunch: server 0 exited with code 9; the job cannot go on");
    has(&lines, "[rank 1] ended");
    has(&lines, "[scheduler] asked");
}

#[test]
fn servers_that_outlive_the_workers_are_ended_with_a_line() {
    let stage = Stage::new(ENDS, STUBBORN);
    let launcher = stage.start(&["--local", "2", "--grace", "0.2", "true"], &[]);
    let processes = numbers(&launcher.wait_for("process ", 2), "process ");
    let (code, lines) = launcher.finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    has(&lines, "bpslaunch: server 0 did not end in time: killed");
    all_gone(&processes);
}

#[test]
fn what_workers_leave_behind_is_ended() {
    let stage = Stage::new(ENDS, ENDS);
    let worker = "sleep 1000 >/dev/null 2>&1 & echo process $!";
    let (code, lines) = stage.start(&["--local", "2", "sh", "-c", worker], &[]).finish();
    assert_eq!(code, Some(0));
    let processes = numbers(&lines, "process ");
    assert_eq!(processes.len(), 2);
    all_gone(&processes);
}

#[test]
fn a_guardian_that_somebody_has_stopped_holds_nobody_up() {
    let stage = Stage::new(ENDS, ENDS);
    fifo(&stage, "go");
    let launcher = stage.start(&["--local", "1", "sh", "-c", "echo ready; read go <go"], &[]);
    launcher.wait_for("ready", 1);
    let parent = format!(" {} ", launcher.child.id());
    let guardian = std::fs::read_dir("/proc").unwrap().find_map(|entry| {
        let path = entry.unwrap().path();
        let stat = std::fs::read_to_string(path.join("stat")).ok()?;
        let (name, rest) = stat.split_once(") ")?;
        let is_ours = name.ends_with("(bps-guardian") && rest[1..].starts_with(&parent);
        is_ours.then(|| path.file_name().unwrap().to_str().unwrap().to_owned())
    });
    let guardian = guardian.expect("it runs");
    let stop = std::process::Command::new("kill").args(["-STOP", &guardian]).status();
    assert!(stop.unwrap().success());
    std::fs::write(stage.path().join("go"), "\n").unwrap();
    let (code, lines) = launcher.finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    all_gone(&[guardian.parse().unwrap()]);
}

#[test]
fn a_request_to_end_reaches_every_process() {
    for (signal, name, expected) in
        [("-INT", "SIGINT", 130), ("-TERM", "SIGTERM", 143), ("-HUP", "SIGHUP", 129)]
    {
        let stage = Stage::new(POLITE, POLITE);
        let launcher = stage.start(&["--local", "2", "sh", "-c", POLITE], &[]);
        let processes = numbers(&launcher.wait_for("process ", 4), "process ");
        launcher.signal(signal);
        let (code, lines) = launcher.finish();
        assert_eq!(code, Some(expected), "{lines:#?}");
        has(&lines, &format!("bpslaunch: {name}: ending all processes"));
        // Ranks are interrupted as by the terminal; servers and the scheduler outlive them.
        let heard = if signal == "-INT" { "interrupted" } else { "asked" };
        for label in ["rank 0", "rank 1"] {
            has(&lines, &format!("[{label}] {heard}"));
        }
        for label in ["server 0", "scheduler"] {
            has(&lines, &format!("[{label}] asked"));
        }
        all_gone(&processes);
    }
}

#[test]
fn an_interrupted_rank_has_time_for_its_last_words() {
    let stage = Stage::new(POLITE, POLITE);
    let worker = "trap 'sleep 1; echo saved; exit 0' INT; echo ready; while :; do sleep 0.02; done";
    let launcher = stage.start(&["--local", "2", "--grace", "0.5", "sh", "-c", worker], &[]);
    launcher.wait_for("ready", 2);
    launcher.signal("-INT");
    let (code, lines) = launcher.finish();
    assert_eq!(code, Some(130), "{lines:#?}");
    has(&lines, "[rank 0] saved");
    has(&lines, "[rank 1] saved");
}

#[test]
fn the_first_line_names_the_cause_and_not_what_follows_from_it() {
    // The server notices the end of rank 1 and ends before that has, and rank 0 after both.
    let stage = Stage::new(POLITE, "while [ ! -e left ]; do sleep 0.02; done; exit 1");
    let worker = "if [ $BYTEPS_LOCAL_RANK = 1 ]; then touch left; sleep 0.3; exit 3; fi
        while [ ! -e left ]; do sleep 0.02; done; sleep 0.1; exit 1";
    let (code, lines) = stage.start(&["--local", "2", "sh", "-c", worker], &[]).finish();
    assert_eq!(code, Some(3), "{lines:#?}");
    let ends: Vec<&String> = lines.iter().filter(|line| line.contains("exited with")).collect();
    assert_eq!(ends[0], "bpslaunch: rank 1 exited with code 3; ending the other processes");
    assert_eq!(ends.len(), 3, "{lines:#?}");
}

#[test]
fn a_second_request_kills() {
    let stage = Stage::new(STUBBORN, STUBBORN);
    let launcher = stage.start(&["--local", "2", "--grace", "600", "sh", "-c", STUBBORN], &[]);
    let processes = numbers(&launcher.wait_for("process ", 8), "process ");
    launcher.signal("-INT");
    launcher.wait_for("ending all processes", 1);
    launcher.signal("-INT");
    let (code, lines) = launcher.finish();
    assert_eq!(code, Some(130), "{lines:#?}");
    all_gone(&processes);
}

#[test]
fn nothing_outlives_a_launcher_that_is_killed() {
    let stage = Stage::new(STUBBORN, STUBBORN);
    for prefix in ["--no-prefix=0", "--no-prefix"] {
        let launcher = stage.start(&["--local", "2", prefix, "sh", "-c", STUBBORN], &[]);
        let processes = numbers(&launcher.wait_for("process ", 8), "process ");
        assert!(processes.iter().all(|process| runs(*process)));
        launcher.signal("-KILL");
        // The output closes only when the last process that could write to it has ended.
        let (code, _) = launcher.finish();
        assert_eq!(code, None);
        all_gone(&processes);
    }
}

#[test]
fn nothing_outlives_a_launcher_that_is_killed_with_its_guardian() {
    let stage = Stage::new("exec sleep 1000", "exec sleep 1000");
    let worker = "echo \"process $$\"; exec sleep 1000";
    let launcher = stage.start(&["--local", "2", "sh", "-c", worker], &[]);
    let mut processes = numbers(&launcher.wait_for("process ", 2), "process ");
    let listed = format!("/proc/{0}/task/{0}/children", launcher.child.id());
    let mut children: Vec<u32> = Vec::new();
    let mut guardian = String::new();
    // It is there before the others, but may not have run far enough to have its name.
    until("there is a guardian", || {
        let text = std::fs::read_to_string(&listed).unwrap();
        children = text.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
        let named = children.iter().find(|pid| {
            std::fs::read_to_string(format!("/proc/{pid}/comm"))
                .is_ok_and(|name| name == "bps-guardian\n")
        });
        guardian = named.map(u32::to_string).ok_or_else(|| format!("{children:?}"))?;
        Ok(())
    });
    processes.extend(&children);
    let killed = std::process::Command::new("kill").args(["-KILL", &guardian]).status();
    assert!(killed.unwrap().success());
    launcher.signal("-KILL");
    launcher.finish();
    all_gone(&processes);
}

#[test]
fn the_job_ends_when_nobody_reads_its_output() {
    let stage = Stage::new(ENDS, ENDS);
    let worker = "echo \"process $$\" >&2; while :; do echo x; sleep 0.02; done";
    let script = "./bpslaunch --local 2 --grace 0.3 sh -c \"$1\" | head -n 1; echo over >&2
        { ./bpslaunch --local 2 sh -c \"$1\" 2>&1 >&3 | :; } 3>/dev/null";
    let output = std::process::Command::new("sh")
        .args(["-c", script, "sh", worker])
        .current_dir(stage.path())
        .output()
        .unwrap();
    let lines: Vec<String> =
        String::from_utf8(output.stderr).unwrap().lines().map(str::to_owned).collect();
    has(&lines, "over");
    all_gone(&numbers(&lines, "process "));
}

fn fifo(stage: &Stage, name: &str) {
    let made = std::process::Command::new("mkfifo").arg(stage.path().join(name)).status();
    assert!(made.unwrap().success());
}

#[test]
fn an_elastic_job_goes_on_until_too_few_workers_are_left() {
    let stage = Stage::new(POLITE, POLITE);
    fifo(&stage, "first");
    fifo(&stage, "second");
    let worker = "case $BYTEPS_LOCAL_RANK in 0) read go <first; kill -KILL $$;; \
                  1) read go <second; exit 3;; esac; echo ready; while :; do sleep 0.02; done";
    let flags = ["--local", "3", "--elastic", "redo", "--min-workers", "2", "--grace", "0.3"];
    let arguments: Vec<&str> = flags.into_iter().chain(["sh", "-c", worker]).collect();
    let launcher = stage.start(&arguments, &[]);
    launcher.wait_for("ready", 1);
    std::fs::write(stage.path().join("first"), "\n").unwrap();
    launcher.wait_for("the job goes on", 1);
    std::fs::write(stage.path().join("second"), "\n").unwrap();
    let (code, lines) = launcher.finish();
    assert_eq!(code, Some(3), "{lines:#?}");
    let first = "bpslaunch: rank 0 was killed by SIGKILL (9); the job goes on with 2 workers here";
    has(&lines, first);
    has(&lines, "bpslaunch: rank 1 exited with code 3; ending the other processes");
}

#[test]
fn an_elastic_job_whose_last_workers_end_well_has_ended_well() {
    let stage = Stage::new(LEADS, "exit 9");
    let worker = "[ $BYTEPS_LOCAL_RANK = 0 ] && exit 1; sleep 0.5";
    let arguments = ["--local", "3", "--elastic", "redo", "sh", "-c", worker];
    let (code, lines) = stage.start(&arguments, &[]).finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    mentions(&lines, "rank 0 exited with code 1; the job goes on");
    mentions(&lines, "server 0 exited with code 9; the job goes on");
}
