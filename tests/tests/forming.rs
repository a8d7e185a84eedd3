//! How jobs form where something is late, missing, slow or hostile: the job forms all the same, or
//! each node says in time why it does not.

use bps_engine::config::{Config, LogLevel, Role};
use bps_engine::control::{Acceptor, JobKey, Listener};
use bps_server::run::ServerError;
use bps_tests::job::free_port;
use bps_tests::program::Program;
use std::net::TcpListener;
use std::process::Command;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

const JOIN: Duration = Duration::from_secs(60);

fn variables(port: u16, extra: &[(&'static str, &str)]) -> Vec<(&'static str, String)> {
    let fixed = [
        ("DMLC_NUM_WORKER", "1"),
        ("DMLC_NUM_SERVER", "1"),
        ("DMLC_PS_ROOT_URI", "127.0.0.1"),
        ("DMLC_NODE_HOST", "127.0.0.1"),
        ("BPS_PIN", "0"),
        ("BPS_LOCAL_REDUCE", "0"),
        ("BYTEPS_FORCE_DISTRIBUTED", "1"),
    ];
    let mut all: Vec<(&'static str, String)> =
        fixed.iter().chain(extra).map(|&(name, value)| (name, value.to_owned())).collect();
    all.push(("DMLC_PS_ROOT_PORT", port.to_string()));
    all
}

#[test]
fn a_low_soft_limit_of_descriptors_is_raised() {
    const RANKS: usize = 4;
    let port = free_port();
    // Lanes over TCP, as between machines: 4 ranks × 16 cores at the server.
    let extra = [("DMLC_NUM_WORKER", "4"), ("BPS_SERVER_CORES", "16"), ("BPS_TRANSPORT", "tcp")];
    let limited = "ulimit -Sn 48; exec \"$@\"";
    let scheduler = Program::start_in(limited, "bps-scheduler", &[], &variables(port, &extra));
    let server = Program::start_in(limited, "bps-server", &[], &variables(port, &extra));
    let rank = |index: usize| {
        let mut variables = variables(port, &extra);
        variables.push(("DMLC_WORKER_ID", index.to_string()));
        Program::start_in(limited, "bps-test-rank", &["3"], &variables)
    };
    let mut all: Vec<Program> = (0..RANKS).map(rank).chain([server, scheduler]).collect();
    for program in &mut all {
        let status = program.wait(JOIN);
        assert!(status.success(), "{status}: {}", program.lines().join("\n"));
    }
}

#[test]
fn a_server_waits_for_a_name_that_does_not_resolve_yet() {
    // In a mount namespace of its own, the server sees a file of this test as /etc/hosts, and no
    // name server.
    let folder = std::env::temp_dir().join(format!("bps-test-hosts-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    let hosts = folder.join("hosts");
    std::fs::write(&hosts, "127.0.0.1 localhost\n").expect("written");
    std::fs::write(folder.join("resolv.conf"), "nameserver 127.0.0.1\n").expect("written");
    let mounts = format!(
        "mount --bind {0}/hosts /etc/hosts && mount --bind {0}/resolv.conf /etc/resolv.conf",
        folder.display()
    );
    let allowed = Command::new("unshare").args(["-rm", "sh", "-c", &mounts]).output();
    if !allowed.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no mount namespaces here (unshare -rm)");
        return;
    }
    let script = format!("exec unshare -rm sh -c '{mounts} && exec \"$@\"' sh \"$@\"");
    let port = free_port();
    let early = [("DMLC_PS_ROOT_URI", "scheduler.test"), ("BPS_START_TIMEOUT", "60")];
    let mut server_variables = variables(port, &early);
    // The address to listen on is found by the route to the scheduler.
    server_variables.retain(|(name, _)| *name != "DMLC_NODE_HOST");
    let mut server = Program::start_in(&script, "bps-server", &[], &server_variables);
    let line = server.wait_for_line("can't be resolved", JOIN);
    assert!(line.contains("scheduler.test") && line.contains("trying again"), "{line}");
    let scheduler = Program::start("bps-scheduler", &[], &variables(port, &[]));
    let rank = Program::start("bps-test-rank", &["3"], &variables(port, &[]));
    std::fs::write(&hosts, "127.0.0.1 localhost scheduler.test\n").expect("written");
    let status = server.wait(JOIN);
    assert!(status.success(), "{status}: {}", server.lines().join("\n"));
    for mut program in [scheduler, rank] {
        assert!(program.wait(JOIN).success(), "{}", program.lines().join("\n"));
    }
    std::fs::remove_dir_all(&folder).expect("removed");
}

#[test]
fn a_server_does_not_wait_for_ever_for_a_silent_scheduler() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    // It lets the server in, and then says nothing.
    let (keep, _kept) = channel();
    let admit = move |_, _, socket| drop(keep.send(socket));
    let listeners = vec![Listener::Tcp(listener)];
    let _scheduler = Acceptor::start(listeners, JobKey::open(), admit, |line| eprintln!("{line}"))
        .expect("runs");
    let config = Config {
        role: Role::Server,
        num_servers: 1,
        root_uri: "127.0.0.1".into(),
        root_port: port,
        pin: false,
        start_timeout: Duration::from_secs(1),
        log_level: LogLevel::Warning,
        ..Config::default()
    };
    let start = Instant::now();
    let (ended, end) = channel();
    std::thread::spawn(move || ended.send(bps_server::run::run(&config)));
    let result = end.recv_timeout(Duration::from_secs(20)).expect("it gives up by itself");
    let Err(ServerError::Scheduler(text)) = result else { panic!("{result:?}") };
    assert!(text.contains("BPS_START_TIMEOUT") && text.contains("127.0.0.1"), "{text}");
    assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
}

#[test]
fn a_rank_that_dies_early_is_replaced() {
    let port = free_port();
    let extra = [("DMLC_NUM_WORKER", "2")];
    let mut scheduler = Program::start("bps-scheduler", &[], &variables(port, &extra));
    let rank = |index: &str| {
        let mut variables = variables(port, &extra);
        variables.push(("DMLC_WORKER_ID", index.to_owned()));
        Program::start("bps-test-rank", &["3"], &variables)
    };
    let first = rank("0");
    let _ = first.wait_for_line("waiting for server 0 of 1, worker rank 1 of 2", JOIN);
    drop(first);
    let line = scheduler.wait_for_line("is gone before the job has formed", JOIN);
    assert!(line.contains("rank 0 (host"), "{line}");
    let mut server = Program::start("bps-server", &[], &variables(port, &extra));
    for program in [&mut rank("0"), &mut rank("1"), &mut server, &mut scheduler] {
        let status = program.wait(JOIN);
        assert!(status.success(), "{status}: {}", program.lines().join("\n"));
    }
}
