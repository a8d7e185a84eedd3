//! The scheduler in virtual time, without a socket: each test is a conversation.

mod cutting;
mod elastic;
mod forming;
mod leaving;
mod living;
mod moving;
mod naming;
mod paths;
mod random;
mod received;
mod released;
mod replacing;
mod sets;
mod shrinking;
mod stay;
mod stopped;
mod stored;
mod takeover;
mod tuning;
mod uneven;

use super::*;
use crate::base::{CoreId, DType, Key, Operation};
use crate::limits::{DECLARE_MEMBERS_MAX, ERAS_MAX, NAME_BYTES_MAX, RANKS_MAX};
use crate::proto::late::{CaughtUp, LATE_LINES_MAX, Late, LateCollector, LateKeys};
use crate::proto::members::Members;
use crate::proto::messages::{
    Assignment, Declaration, Frameworks, KeySpec, Mismatch, Node, Part, Party, Planning,
    Replacement, RetiredKey, STALLS_SHOWN_MAX, Sign, StalledKey, Superseded,
};
use crate::proto::shape::TensorShape;
use crate::proto::tuning::{Point, Tuning};

pub(super) const PLANNING: Planning = Planning {
    partition_bytes: 4096,
    placement: Placement::Balanced,
    mixed_bound: 101,
    built_in_coefficient: 1,
    local_reduce: false,
    force_distributed: false,
    reduce_roots: Vec::new(),
    switch_size: 0,
    tuning: Tuning::OFF,
};

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// The machine with everything it said.
struct Bench {
    scheduler: Scheduler,
    now: Duration,
    inboxes: BTreeMap<NodeId, Vec<SchedulerMessage>>,
    /// Whose heartbeats were answered.
    answered: Vec<NodeId>,
    closed: Vec<NodeId>,
    log: Vec<String>,
    tuned: Vec<Point>,
    done: Option<Exit>,
}

impl Bench {
    fn new(num_workers: u32, num_servers: u32) -> Bench {
        Bench::with(num_workers, num_servers, |_| {})
    }

    fn with(num_workers: u32, num_servers: u32, change: impl Fn(&mut SchedulerConfig)) -> Bench {
        let mut config = SchedulerConfig {
            job: "job".into(),
            num_workers,
            num_servers,
            ranks_max: word(RANKS_MAX),
            release: "1.0".to_owned(),
            encrypt: false,
            placement: Placement::Balanced,
            built_in_coefficient: 1,
            start_timeout: ms(120_000),
            heartbeat_timeout: ms(4_000),
            stall_report: ms(3_000),
            stall_timeout: ms(300_000),
            stays: false,
            elastic: None,
        };
        change(&mut config);
        Bench {
            scheduler: Scheduler::new(config, ms(0)),
            now: ms(0),
            inboxes: BTreeMap::new(),
            answered: Vec::new(),
            closed: Vec::new(),
            log: Vec::new(),
            tuned: Vec::new(),
            done: None,
        }
    }

    /// A job of one process on each worker host: ranks are nodes 0, 1, …; servers 100, 101, ….
    fn formed(num_workers: u32, num_servers: u32) -> Bench {
        let mut bench = Bench::new(num_workers, num_servers);
        for worker in 0..num_workers {
            bench.join(worker.into(), worker_register(worker, num_workers, num_servers));
        }
        for server in 0..num_servers {
            let node = u64::from(server) + 100;
            bench.join(node, server_register(server, num_workers, num_servers));
        }
        for worker in 0..num_workers {
            let roster = bench.roster(worker.into());
            assert_eq!((roster.index, roster.size), (worker, num_workers));
        }
        for server in 0..num_servers {
            assert_eq!(bench.roster(u64::from(server) + 100).index, server);
        }
        bench
    }

    fn drain(&mut self) {
        while let Some(output) = self.scheduler.poll_output() {
            // Whoever comes too late is told why the job was not formed, and sent away.
            let is_late = self.scheduler.refuses()
                && match &output {
                    Output::Send(_, message) => matches!(message, SchedulerMessage::Over { .. }),
                    other => !matches!(other, Output::Done(_)),
                };
            assert!(self.done.is_none() || is_late, "{output:?} after the end");
            match output {
                Output::Send(node, SchedulerMessage::Heartbeat) => self.answered.push(node),
                Output::Send(node, message) => {
                    assert!(!self.closed.contains(&node), "{message:?} to closed {node:?}");
                    self.inboxes.entry(node).or_default().push(message);
                }
                Output::Close(node) => {
                    assert!(!self.closed.contains(&node), "{node:?} closed twice");
                    self.closed.push(node);
                }
                Output::Log(line) => {
                    assert!(!line.contains('\n'), "{line}");
                    self.log.push(line);
                }
                Output::Tuned(point) => self.tuned.push(point),
                Output::Done(exit) => self.done = Some(exit),
            }
        }
    }

    fn connect(&mut self, node: u64) {
        self.scheduler.handle_connected(NodeId(node), self.now);
        self.drain();
    }

    fn say(&mut self, node: u64, message: NodeMessage) {
        self.scheduler.handle_message(NodeId(node), message, self.now);
        self.scheduler.handle_heard(self.now);
        self.drain();
    }

    fn join(&mut self, node: u64, register: Register) {
        self.connect(node);
        self.say(node, NodeMessage::Register(register));
    }

    fn close(&mut self, node: u64) {
        self.scheduler.handle_closed(NodeId(node), "connection closed", self.now);
        self.drain();
    }

    /// Lets time pass in steps of 250 ms, with heartbeats of these nodes.
    fn pass(&mut self, milliseconds: u64, alive: &[u64]) {
        for _ in 0..milliseconds / 250 {
            self.now += ms(250);
            for node in alive {
                self.say(*node, NodeMessage::Heartbeat { rounds: 7 });
            }
            self.scheduler.handle_tick(self.now);
            self.drain();
        }
    }

    /// What a node was sent since it was last asked.
    fn heard(&mut self, node: u64) -> Vec<SchedulerMessage> {
        self.inboxes.remove(&NodeId(node)).unwrap_or_default()
    }

    fn roster(&mut self, node: u64) -> Roster {
        match self.heard(node).as_slice() {
            [SchedulerMessage::Roster(roster)] => roster.clone(),
            other => panic!("node {node} got {other:?}, not a roster"),
        }
    }

    fn over(&mut self, node: u64) -> OverReason {
        match self.heard(node).last() {
            Some(SchedulerMessage::Over { reason }) => reason.clone(),
            other => panic!("node {node} got {other:?}, not the end"),
        }
    }

    /// Why the job was not formed, as this node was told.
    fn unformed(&mut self, node: u64) -> Unformed {
        match self.over(node) {
            OverReason::NotFormed { cause } => cause,
            other => panic!("node {node} was told that {other}"),
        }
    }

    fn early_count(&self) -> usize {
        self.scheduler.early().len()
    }

    fn installs(&mut self, server: u64) -> Vec<(u64, Vec<KeySpec>)> {
        let installs = self.heard(server).into_iter().map(|message| match message {
            SchedulerMessage::Install { request, keys } => (request, keys),
            other => panic!("server got {other:?}"),
        });
        installs.collect()
    }

    fn declare(&mut self, node: u64, request: u64, tensors: &[Declaration]) {
        self.say(node, NodeMessage::Declare { request, tensors: tensors.to_vec() });
    }
}

fn worker_register(worker: u32, num_workers: u32, num_servers: u32) -> Register {
    Register {
        node: Node::Worker {
            worker_id: worker,
            local_rank: 0,
            local_size: 1,
            global_rank: None,
            local: None,
            planning: PLANNING,
            speaks: None,
        },
        host: format!("w{worker}"),
        host_id: format!("worker-host-{worker}"),
        pid: 1000 + worker,
        instance: 0,
        session: 0,
        former: None,
        release: "1.0".to_owned(),
        encrypt: false,
        num_workers,
        num_servers,
    }
}

fn server_register(server: u32, num_workers: u32, num_servers: u32) -> Register {
    let address = |core: u32| format!("10.0.0.{}:{}", server + 1, 5000 + core).parse().unwrap();
    Register {
        node: Node::Server {
            cores: vec![address(0), address(1)],
            shm: None,
            rdma: false,
            colocated: false,
            preferred: None,
        },
        host: format!("s{server}"),
        host_id: format!("server-host-{server}"),
        pid: 2000 + server,
        instance: 0,
        session: 0,
        former: None,
        release: "1.0".to_owned(),
        encrypt: false,
        num_workers,
        num_servers,
    }
}

pub(super) fn tensor(name: &str, count: u64) -> Declaration {
    Declaration {
        name: name.to_owned(),
        dtype: DType::F32,
        shape: count.into(),
        operation: Operation::Average,
        device: false,
        members: Members::ALL,
        receiver: None,
        encoding: None,
        store: None,
    }
}

fn declared(messages: &[SchedulerMessage]) -> (u64, Vec<Assignment>) {
    match messages {
        [SchedulerMessage::Declared { request, tensors }] => (*request, tensors.clone()),
        other => panic!("{other:?}, not Declared"),
    }
}

fn refused(messages: &[SchedulerMessage]) -> String {
    match messages {
        [SchedulerMessage::Refused { cause, .. }] => cause.to_string(),
        other => panic!("{other:?}, not Refused"),
    }
}
