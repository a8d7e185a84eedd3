//! What the loop makes of connections that break at the wrong moment.

use super::super::Bound;
use super::{Exit, Hub};
use bps_engine::base::Placement;
use bps_engine::config::Config;
use bps_engine::control::ControlLink;
use bps_engine::proto::messages::{Node, NodeMessage, Planning, Register, SchedulerMessage};
use bps_engine::proto::scheduler::Scheduler;
use bps_engine::transport::Waker;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(10);

fn register(node: Node) -> NodeMessage {
    NodeMessage::Register(Register {
        node,
        host: "here".to_owned(),
        host_id: "this host".to_owned(),
        pid: 1,
        instance: 0,
        session: 0,
        former: None,
        release: env!("CARGO_PKG_VERSION").to_owned(),
        encrypt: false,
        num_workers: 1,
        num_servers: 1,
    })
}

fn worker() -> Node {
    Node::Worker {
        worker_id: 0,
        local_rank: 0,
        local_size: 1,
        global_rank: None,
        local: None,
        planning: Planning {
            partition_bytes: 1 << 20,
            placement: Placement::Balanced,
            mixed_bound: 101,
            built_in_coefficient: 1,
            local_reduce: false,
            force_distributed: false,
            reduce_roots: Vec::new(),
            switch_size: 0,
            tuning: bps_engine::proto::tuning::Tuning::OFF,
        },
        speaks: None,
    }
}

fn server() -> Node {
    let cores = vec!["127.0.0.1:5001".parse().unwrap()];
    Node::Server { cores, shm: None, rdma: false, colocated: true, preferred: None }
}

fn turn(hub: &mut Hub) {
    let ready = hub.wait();
    hub.welcome();
    hub.serve(&ready);
    hub.carry_out();
    hub.flush();
}

#[test]
fn a_good_bye_counts_though_the_connection_breaks_behind_it() {
    let root_uri = "127.0.0.1".to_owned();
    let config = Config { num_workers: 1, num_servers: 1, root_uri, ..Config::default() };
    let bound = Bound::bind(&config).unwrap();
    let (port, key) = (bound.address().port(), bound.key.clone());
    let waker = Waker::new().unwrap();
    let (acceptor, arrivals) = bound.accept(&waker).unwrap();
    let (_viewer, viewers) = sync_channel(1);
    let machine_config = bound.machine_config().unwrap();
    let machine = |now| Scheduler::new(machine_config, now);
    let mut hub = Hub::new(machine, key.clone(), waker, arrivals, viewers);
    let nodes = [worker(), server()].map(|node| {
        let key = key.clone();
        std::thread::spawn(move || {
            let link = ControlLink::connect("127.0.0.1", port, &key, SOON).unwrap();
            let (sender, receiver) = link.split();
            sender.send(&register(node)).unwrap();
            (sender, receiver)
        })
    });
    let since = Instant::now();
    while !hub.machine.view(hub.now()).formed {
        assert!(since.elapsed() < SOON, "the job does not form");
        turn(&mut hub);
    }
    let [(sender, receiver), _server] = nodes.map(|node| node.join().unwrap());

    // The worker has not read its roster, so the kernel answers what comes now with a reset; and
    // the loop writes before it has read.
    sender.send(&NodeMessage::Leave { suspend: false }).unwrap();
    drop((sender, receiver));
    std::thread::sleep(Duration::from_millis(100));
    for node in hub.connections.keys().copied().collect::<Vec<_>>() {
        hub.send(node, &SchedulerMessage::Heartbeat);
    }
    for _ in 0..3 {
        hub.flush();
        std::thread::sleep(Duration::from_millis(50));
        for node in hub.connections.keys().copied().collect::<Vec<_>>() {
            hub.send(node, &SchedulerMessage::Heartbeat);
        }
    }
    assert_eq!(hub.exit, Some(Exit::Finished));
    acceptor.stop();
}
