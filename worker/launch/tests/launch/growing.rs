//! Jobs whose ranks come and go: a file in place of a cloud, and a script in place of ssh.

use super::stage::{LEADS, Launcher, SERVES, Stage, all_gone, has, mentions, numbers, until};

/// Gives a login as sshd does; the host is the word before the last.
const RELAY: &str = r#"host=; line=; for word; do host=$line; line=$word; done
echo "connection $$" >&2
cat | env -i PATH="$PATH" CUDA_VISIBLE_DEVICES= SSH_CONNECTION="127.0.0.1 9 127.0.0.1 22" \
    setsid sh -c "cd /; $line" | cat"#;
/// Leaves when it is asked to; `end` in the folder is the end of the work.
const WORKER: &str = "trap 'echo leaving; exit 0' TERM
    slot=\"$BYTEPS_LOCAL_RANK/$BYTEPS_LOCAL_SIZE\"
    echo \"joins=$BPS_JOINS slot=$slot host=$DMLC_WORKER_ID/$DMLC_NUM_WORKER\"
    echo \"process $$\"
    while [ ! -e end ]; do sleep 0.02; done";

struct Cloud {
    stage: Stage,
    launcher: Option<Launcher>,
}

impl Cloud {
    /// A job on the hosts of this answer.
    fn new(answer: &str, flags: &[&str], worker: &str) -> Cloud {
        let stage = Stage::new(LEADS, SERVES);
        let ssh = stage.script("bin/ssh", RELAY);
        std::fs::write(stage.path().join("answer"), answer).unwrap();
        let mut cloud = Cloud { stage, launcher: None };
        let mut words = vec!["--ssh-command", &ssh, "--host-discovery", "cat answer"];
        words.extend(["--discovery-interval", "0.05", "--elastic", "redo"]);
        words.extend(flags);
        words.extend(["sh", "-c", worker]);
        cloud.launcher = Some(cloud.stage.start(&words, &[]));
        cloud
    }

    fn launcher(&self) -> &Launcher {
        self.launcher.as_ref().unwrap()
    }

    /// What the command prints from now on.
    fn answers(&self, answer: &str) {
        let folder = self.stage.path();
        std::fs::write(folder.join("new"), answer).unwrap();
        std::fs::rename(folder.join("new"), folder.join("answer")).unwrap();
    }

    fn finish(mut self) -> (Option<i32>, Vec<String>) {
        std::fs::write(self.stage.path().join("end"), "").unwrap();
        let (code, lines) = self.launcher.take().unwrap().finish();
        assert!(!lines.iter().any(|line| line.contains("in time: killed")), "{lines:#?}");
        (code, lines)
    }
}

#[test]
fn machines_that_come_get_ranks_and_those_that_go_let_them_leave() {
    let flags = ["--min-workers", "1", "--max-workers", "3", "--slots", "2"];
    let cloud = Cloud::new("a:1\n", &flags, WORKER);
    cloud.launcher().wait_for("[rank 0 on a] process ", 1);
    cloud.answers("a:1\nb\n# c comes later\n");
    cloud.launcher().wait_for("[slot 0 on b] joins=1 slot=0/2 host=1/2", 1);
    cloud.launcher().wait_for("[slot 1 on b] joins=1 slot=1/2 host=1/2", 1);
    // There is no room for more.
    cloud.answers("a:1\nb\nc:4\n");
    cloud.launcher().wait_for("bpslaunch: c: room for 4 more", 1);
    cloud.answers("b\nc:4\n");
    cloud.launcher().wait_for("[rank 0 on a] leaving", 1);
    cloud.launcher().wait_for("[slot 0 on c] process ", 1);
    let processes = numbers(&cloud.launcher().wait_for("] process ", 4), "process ");
    let (code, lines) = cloud.finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    has(&lines, "[rank 0 on a] joins= slot=0/1 host=0/1");
    has(&lines, "bpslaunch: a has room for 0 ranks now: 1 there are to leave");
    has(&lines, "bpslaunch: rank 0 on a has left (exited with code 0)");
    assert!(!lines.iter().any(|line| line.contains("slot 1 on c")), "{lines:#?}");
    all_gone(&processes);
}

#[test]
fn an_answer_that_is_none_changes_nothing_and_is_told_once() {
    let flags = ["--discovery-timeout", "0.3", "--servers", "localhost"];
    let cloud = Cloud::new("localhost:1\n", &flags, WORKER);
    cloud.launcher().wait_for("process ", 1);
    // The command is `cat answer`: a folder is an error, a pipe that nobody writes to hangs.
    cloud.answers("no list:x\n");
    cloud.launcher().wait_for("has printed no list of machines: its output, line 1", 1);
    cloud.answers("");
    cloud.launcher().wait_for("there is no host in it", 1);
    std::fs::remove_file(cloud.stage.path().join("answer")).unwrap();
    cloud.launcher().wait_for("has failed (exit status: 1): cat: answer: No such file", 1);
    let made = std::process::Command::new("mkfifo").arg(cloud.stage.path().join("answer")).status();
    assert!(made.unwrap().success());
    cloud
        .launcher()
        .wait_for("has not ended within 0.3 s and was killed; its last answer stays", 1);
    cloud.answers("localhost:1\n");
    cloud.launcher().wait_for("answers again", 1);
    let (code, lines) = cloud.finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    for words in ["no list of machines: its output, line 1", "has failed"] {
        let count = lines.iter().filter(|line| line.contains(words)).count();
        assert_eq!(count, 1, "{words}: {lines:#?}");
    }
    assert!(!lines.iter().any(|line| line.contains("leaving")), "{lines:#?}");
}

#[test]
fn a_job_begins_when_there_is_room_enough() {
    let flags = ["--min-workers", "2", "--servers", "localhost"];
    let cloud = Cloud::new("a:1\n", &flags, WORKER);
    cloud.launcher().wait_for("names room for 1 rank, of at least 2: waiting for more", 1);
    cloud.answers("a:1\nb:1\n");
    cloud.launcher().wait_for("process ", 2);
    let (code, lines) = cloud.finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    has(&lines, "[rank 1 on b] joins= slot=0/1 host=1/2");
}

#[test]
fn a_job_that_never_gets_room_enough_says_so_in_time() {
    let stage = Stage::new(LEADS, SERVES);
    let flags = ["--host-discovery", "echo a:1", "--min-workers", "2", "--elastic", "redo"];
    let variables = [("BPS_START_TIMEOUT", "0.3")];
    let launcher = stage.start(&[&flags[..], &["true"]].concat(), &variables);
    let (code, lines) = launcher.finish();
    assert_eq!(code, Some(2), "{lines:#?}");
    mentions(&lines, "error: --host-discovery names room for 1 rank, of at least 2 for 0.3 s");
}

#[test]
fn a_machine_whose_ranks_fail_is_left_out_for_longer_and_longer() {
    let worker = format!("[ -z \"$BPS_JOINS\" ] || exit 3; {WORKER}");
    let flags = ["--restart-delay", "0.05", "--servers", "localhost"];
    let cloud = Cloud::new("a:1\nb:1\n", &flags, &worker);
    cloud.launcher().wait_for("process ", 2);
    cloud.answers("a:1\nb:1\nc:1\n");
    for line in ["0.05 s", "0.1 s (2 failures in a row)", "0.2 s (3 failures in a row)"] {
        cloud.launcher().wait_for(&format!("no rank is started on c for {line}"), 1);
    }
    cloud.launcher().wait_for("slot 0 on c exited with code 3; the job goes on with 2 workers", 3);
    let (code, lines) = cloud.finish();
    assert_eq!(code, Some(0), "{lines:#?}");
}

#[test]
fn a_rank_of_this_machine_is_started_again() {
    let stage = Stage::new(LEADS, SERVES);
    let worker = format!("echo again=$BPS_JOINS; {WORKER}");
    let flags = ["--local", "2", "--elastic", "redo", "--max-workers", "2"];
    let flags = [&flags[..], &["--restart-delay", "0.05", "sh", "-c", &worker]].concat();
    let launcher = stage.start(&flags, &[]);
    let first = numbers(&launcher.wait_for("[rank 1] process ", 1), "process ")[0];
    launcher.wait_for("[rank 0] process ", 1);
    kill(first);
    let both = numbers(&launcher.wait_for("[rank 1] process ", 2), "process ");
    std::fs::write(stage.path().join("end"), "").unwrap();
    let (code, lines) = launcher.finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    mentions(&lines, "rank 1 was killed by SIGKILL (9); the job goes on with 1 worker here");
    has(&lines, "bpslaunch: no rank is started on this machine for 0.05 s");
    has(&lines, "bpslaunch: rank 1 has started");
    all_gone(&both);
}

#[test]
fn a_machine_that_was_lost_is_reached_again() {
    let stage = Stage::new(LEADS, SERVES);
    let ssh = stage.script("bin/ssh", RELAY);
    let flags = ["--ssh-command", &ssh, "-H", "a:1,b:1", "--servers", "localhost"];
    let more = ["--elastic", "redo", "--max-workers", "2", "--restart-delay", "0.05"];
    let launcher = stage.start(&[&flags[..], &more, &["sh", "-c", WORKER]].concat(), &[]);
    launcher.wait_for("process ", 2);
    let cut = numbers(&launcher.wait_for("[b] connection ", 1), "connection ")[0];
    let group = format!("-{cut}");
    let killed = std::process::Command::new("kill").args(["-KILL", "--", &group]).status();
    assert!(killed.unwrap().success());
    launcher.wait_for("[rank 1 on b] process ", 2);
    std::fs::write(stage.path().join("end"), "").unwrap();
    let (code, lines) = launcher.finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    mentions(&lines, "rank 1 on b was lost with b");
}

#[test]
fn the_end_of_a_machine_is_passed_on_to_its_ranks() {
    let flags = ["--servers", "localhost"];
    let cloud = Cloud::new("a:1\nb:1\n", &flags, WORKER);
    cloud.launcher().wait_for("process ", 2);
    // The agent of b is the parent of its rank.
    let rank = numbers(&cloud.launcher().wait_for("[rank 1 on b] process ", 1), "process ")[0];
    let stat = std::fs::read_to_string(format!("/proc/{rank}/stat")).unwrap();
    let parent = stat.rsplit_once(") ").unwrap().1.split_whitespace().nth(1).unwrap().to_owned();
    let told = std::process::Command::new("kill").args(["-TERM", &parent]).status();
    assert!(told.unwrap().success());
    cloud.launcher().wait_for("[rank 1 on b] leaving", 1);
    all_gone(&[rank, parent.parse().unwrap()]);
    let (code, lines) = cloud.finish();
    assert_eq!(code, Some(0), "{lines:#?}");
    mentions(&lines, "SIGTERM: the ranks and servers here are told to leave");
}

#[test]
fn a_request_to_end_an_elastic_job_comes_twice() {
    let stage = Stage::new(LEADS, SERVES);
    // As a rank does whose notice has not run out.
    let worker = "trap 'echo asked; trap \"echo urged; exit 143\" TERM' TERM
        echo \"process $$\"; while :; do sleep 0.02; done";
    let flags = ["--local", "2", "--elastic", "redo", "--grace", "0.6", "sh", "-c", worker];
    let launcher = stage.start(&flags, &[]);
    let processes = numbers(&launcher.wait_for("process ", 2), "process ");
    launcher.signal("-TERM");
    let (code, lines) = launcher.finish();
    assert_eq!(code, Some(143), "{lines:#?}");
    for rank in 0..2 {
        has(&lines, &format!("[rank {rank}] asked"));
        has(&lines, &format!("[rank {rank}] urged"));
    }
    all_gone(&processes);
}

/// As a server does that waits to be let go.
const WAITS: &str = "trap 'echo asked; trap \"echo urged; exit 143\" TERM' TERM
    echo \"process $$\"; while :; do sleep 0.02; done";

#[test]
fn servers_of_an_elastic_job_that_ends_are_asked_twice_as_well() {
    let stage = Stage::new(LEADS, WAITS);
    let worker = "echo there; while :; do sleep 0.02; done";
    let flags = ["--local", "1", "--servers", "1", "--elastic", "redo", "--grace", "0.6"];
    let launcher = stage.start(&[&flags[..], &["sh", "-c", worker]].concat(), &[]);
    launcher.wait_for("there", 1);
    let processes = numbers(&launcher.wait_for("process ", 1), "process ");
    launcher.signal("-TERM");
    let (code, lines) = launcher.finish();
    assert_eq!(code, Some(143), "{lines:#?}");
    has(&lines, "[server 0] asked");
    has(&lines, "[server 0] urged");
    all_gone(&processes);
}

#[test]
fn a_server_that_variables_describe_has_its_notice() {
    // It is let go after longer than the grace, and nobody asks it for the second time.
    let server = "trap 'echo asked; sleep 0.8; echo left; exit 0' TERM
        echo there; while :; do sleep 0.02; done";
    let stage = Stage::new(LEADS, server);
    let flags = ["--elastic", "shrink", "--grace", "0.2", "--leave-notice", "20"];
    let variables = [
        ("DMLC_ROLE", "server"),
        ("DMLC_NUM_WORKER", "2"),
        ("DMLC_NUM_SERVER", "2"),
        ("DMLC_PS_ROOT_URI", "127.0.0.1"),
        ("DMLC_PS_ROOT_PORT", "9"),
    ];
    let launcher = stage.start(&flags, &variables);
    launcher.wait_for("there", 1);
    launcher.signal("-TERM");
    let (code, lines) = launcher.finish();
    assert_eq!(code, Some(143), "{lines:#?}");
    has(&lines, "asked");
    has(&lines, "left");
    assert_eq!(lines.iter().filter(|line| line.contains("asked")).count(), 1, "{lines:#?}");
}

#[test]
fn what_does_not_go_together_is_refused() {
    let stage = Stage::new(LEADS, SERVES);
    let cases: &[(&[&str], &str)] = &[
        (
            &["--local", "2", "--max-workers", "2"],
            "BPS_MAX_WORKERS (--max-workers), but BPS_ELASTIC",
        ),
        (&["--host-discovery", "x"], "--host-discovery, but BPS_ELASTIC=none"),
        (
            &["--local", "3", "--elastic", "redo", "--max-workers", "2"],
            "--max-workers 2, but the job",
        ),
        (
            &["--elastic", "redo", "--min-workers", "3", "--max-workers", "2", "--local", "3"],
            "BPS_MAX_WORKERS=2 is below BPS_MIN_WORKERS=3",
        ),
        (
            &["--elastic", "redo", "--host-discovery", "echo a", "-H", "b"],
            "--host-discovery together with --hosts",
        ),
        (
            &["--elastic", "redo", "--host-discovery", "echo a", "--servers", "0"],
            "--servers 0 together with --host-discovery",
        ),
        (&["--host-discovery-script", "x"], "did you mean --host-discovery?"),
        (&["--max-np", "4"], "did you mean --max-workers?"),
    ];
    for (flags, words) in cases {
        let (code, lines) = stage.start(&[flags, &["true"][..]].concat(), &[]).finish();
        assert_eq!(code, Some(2), "{words}: {lines:#?}");
        mentions(&lines, words);
    }
}

fn kill(process: u32) {
    let number = process.to_string();
    assert!(
        std::process::Command::new("kill").args(["-KILL", &number]).status().unwrap().success()
    );
    until("it is gone", || {
        if super::stage::runs(process) { Err("it runs".to_owned()) } else { Ok(()) }
    });
}
