//! Jobs on several machines that are all this one: a script in place of ssh, which gives a login as
//! sshd does, with an environment and a session of its own.
//!
//! `tests/python/test_ssh.py` does the same with a real sshd in network namespaces.

use super::stage::{
    ENDS, LEADS, Launcher, PATIENCE, Stage, all_gone, has, mentions, numbers, until,
};
use std::process::{Command, Stdio};
use std::time::Instant;

/// The end of the line is the command. The pipes end here, as those of ssh do: whoever kills this
/// cuts the connection, and nothing else.
const RELAY: &str = r#"host=; line=; for word; do host=$line; line=$word; done
echo "connection $$" >&2
cat | env -i PATH="$PATH" CUDA_VISIBLE_DEVICES= SSH_CONNECTION="127.0.0.1 9 127.0.0.1 22" \
    setsid sh -c "cd /; $line" | cat"#;
/// The same without an end of its own: it returns the command's code.
const DIRECT: &str = r#"for line; do :; done
exec env -i PATH="$PATH" CUDA_VISIBLE_DEVICES= SSH_CONNECTION="127.0.0.1 9 127.0.0.1 22" \
    sh -c "$line""#;
/// Ignores requests to end, has a child that does so too, and tells both numbers.
const STUBBORN: &str = "trap '' TERM INT HUP; sleep 1000 & echo \"process $$\"; \
                        echo \"process $!\"; wait; sleep 1000";
/// Ends when it is asked to.
const POLITE: &str = "trap 'echo asked; exit 0' TERM; trap 'echo interrupted; exit 0' INT;
    echo \"process $$\"; while :; do sleep 0.02; done";

/// Starts a job whose machines are reached by this script.
fn start(stage: &Stage, ssh: &str, flags: &[&str], command: &[&str]) -> Launcher {
    start_with(stage, ssh, flags, command, &[])
}

fn start_with(
    stage: &Stage,
    ssh: &str,
    flags: &[&str],
    command: &[&str],
    variables: &[(&str, &str)],
) -> Launcher {
    let ssh = stage.script("bin/ssh", ssh);
    let arguments: Vec<&str> =
        ["--ssh-command", &ssh].into_iter().chain(flags.iter().copied()).collect();
    stage.start(&[&arguments, command].concat(), variables)
}

#[test]
fn ranks_and_servers_run_where_the_lists_say() {
    let tell = "echo \"$DMLC_ROLE $DMLC_NUM_WORKER $DMLC_NUM_SERVER $DMLC_RANK \
                cores=$BPS_SERVER_CORES at $DMLC_PS_ROOT_URI\"";
    let stage = Stage::new(tell, tell);
    let worker = "echo \"$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $DMLC_WORKER_ID \
                  $BYTEPS_LOCAL_SIZE at $DMLC_PS_ROOT_URI in $PWD\"; echo \"wrong $RANK\" >&2";
    let flags = ["-H", "a:2,me@b:2", "--servers", "c:3,a"];
    let launcher = start(&stage, RELAY, &flags, &["sh", "-c", worker]);
    let errors = launcher.errors();
    let (code, lines) = launcher.finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    let folder = stage.path().display();
    for (rank, host) in [(0, "a"), (1, "a"), (2, "b"), (3, "b")] {
        let (local, id) = (rank % 2, rank / 2);
        let line = format!("{rank}/4 {local}/2 {id} 2 at 127.0.0.1 in {folder}");
        has(&lines, &format!("[rank {rank} on {host}] {line}"));
        has(&errors.lock().unwrap(), &format!("[rank {rank} on {host}] wrong {rank}"));
    }
    has(&lines, "[server 0 on c] server 2 2 0 cores=3 at 127.0.0.1");
    has(&lines, "[server 1 on a] server 2 2 1 cores=1 at 127.0.0.1");
    has(&lines, "[scheduler on localhost] scheduler 2 2  cores= at 127.0.0.1");
    assert!(!errors.lock().unwrap().iter().any(|line| line.contains("/4 ")), "apart");
    mentions(&lines, "bpslaunch: a job on 3 machines: 2 ranks on each of 2, 2 servers, scheduler");
    mentions(&lines, "[c] connection ");
}

#[test]
fn a_file_names_the_machines_and_each_has_a_server() {
    let stage = Stage::new(ENDS, ENDS);
    let file = stage.path().join("hosts");
    std::fs::write(&file, "a slots=1 # first\nb:1\n").unwrap();
    let flags = ["--hostfile", file.to_str().unwrap(), "--scheduler-host", "b"];
    let (code, lines) = start(&stage, RELAY, &flags, &["sh", "-c", "echo here"]).finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    let all = ["rank 0 on a] here", "rank 1 on b] here", "server 0 on a] up", "server 1 on b] up"];
    all.iter().for_each(|line| has(&lines, &format!("[{line}")));
    has(&lines, "[scheduler on b] up");
}

#[test]
fn servers_of_one_machine_have_ports_of_their_own() {
    let stage = Stage::new(ENDS, "echo port=$DMLC_PORT metrics=$BPS_SERVER_METRICS_PORT");
    let variables = [("BPS_SERVER_METRICS_PORT", "9100")];
    let flags = ["-H", "a:1", "--servers", "2", "--cores", "3", "--port", "9000"];
    let (code, lines) = start_with(&stage, RELAY, &flags, &["true"], &variables).finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    has(&lines, "[server 0 on a] port=9000 metrics=9100");
    has(&lines, "[server 1 on a] port=9003 metrics=9101");
}

#[test]
fn this_machine_needs_no_ssh() {
    let stage = Stage::new(ENDS, ENDS);
    let flags = ["-H", "localhost:2", "--servers", "1"];
    let worker = "echo $RANK at $DMLC_PS_ROOT_URI over $DMLC_INTERFACE";
    let (code, lines) = start(&stage, "exit 255", &flags, &["sh", "-c", worker]).finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    has(&lines, "[rank 1 on localhost] 1 at 127.0.0.1 over lo");
    has(&lines, "[server 0 on localhost] up");
}

#[test]
fn the_key_stands_in_no_command_line_and_in_no_environment() {
    let tell = r#"key=$(cat $BPS_JOB_KEY_FILE); echo "key=$key"
        all=$(cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\0' ' ')
        case "$all" in *"$key"*) echo leaked;; esac
        case "$all" in *bpslaunch*--agent*) echo looked;; esac"#;
    let stage = Stage::new(tell, tell);
    let flags = ["-H", "a:1,b:1", "--servers", "c"];
    let (code, lines) = start(&stage, RELAY, &flags, &["sh", "-c", tell]).finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    let keys: Vec<&str> =
        lines.iter().filter_map(|line| line.split_once("key=").map(|(_, key)| key)).collect();
    assert_eq!(keys.len(), 4, "{lines:#?}");
    assert!(keys[0].len() == 64 && keys.iter().all(|key| *key == keys[0]), "{keys:?}");
    assert!(!lines.iter().any(|line| line.contains("leaked")), "{lines:#?}");
    mentions(&lines, "looked");
}

#[test]
fn variables_pass_that_are_ours_or_named() {
    let stage = Stage::new(ENDS, ENDS);
    let worker = "echo \"$BPS_LOG_LEVEL $OMP_NUM_THREADS <$TOKEN> <$GIVEN> <$OTHER> $PATH \
                  key=$BPS_JOB_KEY\"; echo \"file=$(cat $BPS_JOB_KEY_FILE)\"";
    let key = "00112233445566778899aabbccddeeff";
    let variables = [
        ("BPS_LOG_LEVEL", "error"),
        ("OMP_NUM_THREADS", "3"),
        ("TOKEN", "a secret"),
        ("OTHER", "stays"),
        ("VIRTUAL_ENV", "/my/venv"),
        ("BPS_JOB_KEY", key),
        ("DMLC_WORKER_ID", "7"),
    ];
    let flags = ["-H", "a:1", "--servers", "b", "-x", "TOKEN", "--env", "GIVEN=1=2"];
    let command = ["sh", "-c", worker];
    let (code, lines) = start_with(&stage, RELAY, &flags, &command, &variables).finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    mentions(&lines, "[rank 0 on a] error 3 <a secret> <1=2> <> /my/venv/bin:/");
    assert!(lines.iter().any(|line| line.ends_with(" key=")), "{lines:#?}");
    has(&lines, &format!("[rank 0 on a] file={key}"));
}

#[test]
fn all_output_comes_in_whole_lines_and_in_order() {
    let stage = Stage::new(ENDS, ENDS);
    let worker = "i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done; printf end";
    let flags = ["-H", "a:2,b:2"];
    let (code, lines) = start(&stage, RELAY, &flags, &["sh", "-c", worker]).finish();
    assert_eq!(code, Some(0));
    for (rank, host) in [(0, "a"), (1, "a"), (2, "b"), (3, "b")] {
        let label = format!("[rank {rank} on {host}] ");
        let own: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix(&label)).collect();
        let wanted: Vec<String> =
            (0..3000).map(|i| format!("line {i}")).chain(["end".to_owned()]).collect();
        assert_eq!(own, wanted);
    }
}

#[test]
fn a_rank_that_fails_ends_all_and_is_named() {
    let stage = Stage::new(POLITE, STUBBORN);
    let made = Command::new("mkfifo").arg(stage.path().join("go")).status();
    assert!(made.unwrap().success());
    let worker = format!("if [ $RANK = 3 ]; then read go <go; exit 5; fi; {STUBBORN}");
    let flags = ["-H", "a:2,b:2", "--servers", "c", "--grace", "0.3"];
    let launcher = start(&stage, RELAY, &flags, &["sh", "-c", &worker]);
    let processes = numbers(&launcher.wait_for("process ", 9), "process ");
    std::fs::write(stage.path().join("go"), "\n").unwrap();
    let (code, lines) = launcher.finish();
    assert_eq!(code, Some(5), "{lines:#?}");
    has(&lines, "bpslaunch: rank 3 on b exited with code 5; ending the other processes");
    has(&lines, "bpslaunch: rank 0 on a did not end in time: killed");
    has(&lines, "[scheduler on localhost] asked");
    all_gone(&processes);
}

#[test]
fn requests_to_end_reach_every_machine() {
    for (signal, name, expected) in [("-INT", "SIGINT", 130), ("-TERM", "SIGTERM", 143)] {
        let stage = Stage::new(POLITE, POLITE);
        let flags = ["-H", "a:1,b:1", "--servers", "c"];
        let launcher = start(&stage, RELAY, &flags, &["sh", "-c", POLITE]);
        let processes = numbers(&launcher.wait_for("process ", 4), "process ");
        launcher.signal(signal);
        let (code, lines) = launcher.finish();
        assert_eq!(code, Some(expected), "{lines:#?}");
        has(&lines, &format!("bpslaunch: {name}: ending all processes"));
        let heard = if signal == "-INT" { "interrupted" } else { "asked" };
        has(&lines, &format!("[rank 0 on a] {heard}"));
        has(&lines, &format!("[rank 1 on b] {heard}"));
        has(&lines, "[server 0 on c] asked");
        all_gone(&processes);
    }
}

#[test]
fn a_second_request_kills() {
    let stage = Stage::new(STUBBORN, STUBBORN);
    let flags = ["-H", "a:1,b:1", "--servers", "c", "--grace", "600"];
    let launcher = start(&stage, RELAY, &flags, &["sh", "-c", STUBBORN]);
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
    let flags = ["-H", "a:1,localhost:1", "--servers", "c"];
    let launcher = start(&stage, RELAY, &flags, &["sh", "-c", STUBBORN]);
    let processes = numbers(&launcher.wait_for("process ", 8), "process ");
    let connections = numbers(&launcher.wait_for("connection ", 2), "connection ");
    launcher.signal("-KILL");
    let (code, _) = launcher.finish();
    assert_eq!(code, None);
    all_gone(&[processes, connections].concat());
}

#[test]
fn a_connection_that_is_cut_ends_all_on_both_sides() {
    let stage = Stage::new(POLITE, POLITE);
    let flags = ["-H", "a:2,b:2", "--servers", "c", "--grace", "0.3"];
    let launcher = start(&stage, RELAY, &flags, &["sh", "-c", STUBBORN]);
    let processes = numbers(&launcher.wait_for("process ", 10), "process ");
    let cut = launcher.wait_for("[b] connection ", 1);
    kill_group(numbers(&cut, "connection ")[0]);
    let (code, lines) = launcher.finish();
    assert_eq!(code, Some(255), "{lines:#?}");
    has(
        &lines,
        "bpslaunch: rank 2 on b was lost with b: the connection was killed; ending the other \
         processes",
    );
    has(&lines, "[server 0 on c] asked");
    all_gone(&processes);
}

#[test]
fn an_elastic_job_goes_on_without_a_machine() {
    let stage = Stage::new(LEADS, "sleep 2");
    let made = Command::new("mkfifo").arg(stage.path().join("go")).status();
    assert!(made.unwrap().success());
    let worker = format!("[ $RANK = 0 ] || {{ {STUBBORN}; }}; echo \"process $$\"; read go <go");
    let flags = ["-H", "a:1,b:1", "--servers", "a", "--elastic", "redo"];
    let launcher = start(&stage, RELAY, &flags, &["sh", "-c", &worker]);
    let processes = numbers(&launcher.wait_for("process ", 3), "process ");
    kill_group(numbers(&launcher.wait_for("[b] connection ", 1), "connection ")[0]);
    launcher.wait_for("rank 1 on b was lost with b", 1);
    std::fs::write(stage.path().join("go"), "\n").unwrap();
    let (code, lines) = launcher.finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    mentions(&lines, "; the job goes on with 1 worker");
    all_gone(&processes);
}

fn kill_group(leader: u32) {
    let group = format!("-{leader}");
    assert!(Command::new("kill").args(["-KILL", "--", &group]).status().unwrap().success());
}

#[test]
fn machines_that_do_not_answer_are_named_in_time() {
    let stage = Stage::new(ENDS, ENDS);
    let begun = Instant::now();
    // Nothing is heard of it, and it does not even notice that nobody listens any more.
    let silent = "for word; do :; done; case \"$*\" in *' good '*) exec sh -c \"$word\";; esac; \
                  echo \"process $$\" >&2; sleep 1000";
    let flags = ["-H", "good:1,bad:1,worse:1", "--ssh-timeout", "1.5"];
    let (code, lines) = start(&stage, silent, &flags, &["true"]).finish();
    assert_eq!(code, Some(1), "{lines:#?}");
    for host in ["bad", "worse"] {
        mentions(&lines, &format!("bpslaunch: error: {host}: no answer within 2.5 s (it said: "));
    }
    assert!(!lines.iter().any(|line| line.contains("good: ")), "{lines:#?}");
    assert!(begun.elapsed() < PATIENCE / 2, "{:?}", begun.elapsed());
}

/// The script for ssh, flags, the command, and the code and words that follow.
type Refusal<'a> = (&'a str, &'a [&'a str], &'a [&'a str], i32, &'a str);

#[test]
fn what_keeps_a_machine_from_starting_is_told_with_its_remedy() {
    let stage = Stage::new(ENDS, ENDS);
    let refused = "echo 'me@a: Permission denied (publickey,password).' >&2; exit 255";
    let folder = stage.path().to_str().unwrap().to_owned();
    let missing = format!("{folder}/none");
    let cases: [Refusal; 8] = [
        (refused, &[], &["true"], 1, "a: cannot log in: me@a: Permission denied"),
        (refused, &[], &["true"], 1, "ssh-copy-id a"),
        (DIRECT, &["--remote-program", &missing], &["true"], 1, "install byteps at the same path"),
        (DIRECT, &["--remote-program", &missing], &["true"], 1, "--remote-program"),
        (DIRECT, &["--chdir", &missing], &["true"], 2, "none to start in; make it, or name one"),
        (DIRECT, &[], &["./no-such-program"], 127, "a: cannot start rank 0: './no-such-program'"),
        (DIRECT, &["--gpus", "demand"], &["true"], 2, "a: --gpus demand"),
        (DIRECT, &["--interface", "nope"], &["true"], 2, "no network interface nope"),
    ];
    for (ssh, flags, command, expected, words) in cases {
        let flags = [&["-H", "a:1", "--servers", "a"], flags].concat();
        let (code, lines) = start(&stage, ssh, &flags, command).finish();
        assert_eq!(code, Some(expected), "{words}: {lines:#?}");
        mentions(&lines, words);
    }
}

#[test]
fn what_is_no_agent_is_told_and_left() {
    let stage = Stage::new(ENDS, ENDS);
    let greeting = r"printf '\000bpslaunch agent\000";
    for (bytes, words) in [
        (r"\377\377\377\377'", "a: it sent what is no report: a frame of 4294967295 bytes"),
        (r"\001\000\000\000\143'", "a: it sent what is no report: a frame of the unknown kind 99"),
        (r"\001\000'; exit 0", "a: "),
    ] {
        let ssh = format!("{greeting}{bytes}; sleep 1000");
        let flags = ["-H", "a:1", "--servers", "a"];
        let (code, lines) = start(&stage, &ssh, &flags, &["true"]).finish();
        assert!(matches!(code, Some(1 | 255)), "{lines:#?}");
        mentions(&lines, words);
    }
}

#[test]
fn one_rank_alone_needs_nobody_to_meet() {
    let stage = Stage::new("exit 9", "exit 9");
    let worker = "echo $WORLD_SIZE $DMLC_NUM_SERVER";
    let (code, lines) = start(&stage, RELAY, &["-H", "a:1"], &["sh", "-c", worker]).finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    has(&lines, "[rank 0 on a] 1 0");
    assert!(!lines.iter().any(|line| line.contains("scheduler")), "{lines:#?}");
}

#[test]
fn what_a_login_prints_does_no_harm() {
    let stage = Stage::new(ENDS, ENDS);
    let chatty = format!("echo 'Welcome to a machine'; echo notice >&2; {DIRECT}");
    let flags = ["-H", "a:1", "--servers", "a"];
    let (code, lines) = start(&stage, &chatty, &flags, &["echo", "here"]).finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    has(&lines, "[rank 0 on a] here");
    has(&lines, "[a] notice");
}

#[test]
fn other_ways_to_a_machine_are_given_words() {
    let stage = Stage::new(ENDS, ENDS);
    let srun = stage.script("bin/srun", "shift; host=$1; shift; exec \"$@\"");
    let ssh = format!("{srun} --nodelist");
    let flags = ["-H", "a:1", "--servers", "a", "--scheduler-host", "a", "--ssh-command", &ssh];
    let arguments = [&flags[..], &["sh", "-c", "echo \"$DMLC_PS_ROOT_URI\""]].concat();
    let (code, lines) = stage.start(&arguments, &[]).finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    has(&lines, "[rank 0 on a] a");
}

/// An agent by itself, with these bytes for orders.
fn agent(stage: &Stage, orders: &[u8]) -> (Option<i32>, String) {
    use std::io::Write;
    let mut child = Command::new(stage.path().join("bpslaunch"))
        .arg("--agent")
        .env("CUDA_VISIBLE_DEVICES", "")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It may have left before it has read all.
    let _ = child.stdin.take().unwrap().write_all(orders);
    let mut status = None;
    until("the agent leaves", || {
        status = child.try_wait().unwrap();
        status.map(|_| ()).ok_or_else(|| "it runs".to_owned())
    });
    let output = child.wait_with_output().unwrap();
    (status.unwrap().code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn an_agent_leaves_when_nobody_speaks_its_language() {
    let stage = Stage::new(ENDS, ENDS);
    assert_eq!(agent(&stage, b""), (Some(0), String::new()));
    let (code, said) = agent(&stage, b"GET / HTTP/1.1\r\n\r\n");
    assert_eq!(code, Some(0));
    assert!(said.contains("what came from the launcher is no order: a frame of"), "{said}");
    // A frame that is cut is no order, either.
    assert_eq!(agent(&stage, &[9, 0, 0, 0, 3, 0, 0]), (Some(0), String::new()));
}

#[test]
fn lists_that_make_no_sense_are_refused_before_anything_starts() {
    let stage = Stage::new(ENDS, ENDS);
    let cases: &[(&[&str], &str)] = &[
        (&["-H", "a:0"], "'0' is no number of ranks from 1 to 4096"),
        (&["-H", "a:2,b:4"], "2 ranks on a, but 4 on b; every machine runs as many"),
        (&["-H", "a:2,a:2"], "a stands there twice"),
        (&["--hosts", "a:1", "--local", "2"], "--local together with --hosts"),
        (&["-H", "a:1", "-x", "A:b"], "write --env NAME, or --env NAME=VALUE"),
        (&["-WH", "hosts"], "no option -WH; did you mean --hostfile?"),
        (&["--worker-hostfile", "hosts"], "did you mean --hostfile?"),
        (&["--username", "me"], "did you mean --ssh-user?"),
        (&["--hostfil", "me"], "did you mean --hostfile?"),
        (&["--servers", "a:1"], "neither --hosts nor --hostfile"),
    ];
    for (flags, words) in cases {
        let (code, lines) = start(&stage, DIRECT, flags, &["true"]).finish();
        assert_eq!(code, Some(2), "{words}: {lines:#?}");
        mentions(&lines, words);
    }
}

#[test]
fn a_dry_run_names_every_machine_and_starts_nothing() {
    let stage = Stage::new("exit 1", "exit 1");
    let flags = ["-H", "a:2,b:2", "--servers", "c:3", "--dry-run"];
    let (code, lines) = start(&stage, "exit 255", &flags, &["true"]).finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    mentions(&lines, "a: 2 ranks: ");
    mentions(&lines, "c: server 0 with 3 cores: ");
}
