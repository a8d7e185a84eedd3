//! A NIC loop and whoever is at the other end of its only lane, which has gone bad: it passed the
//! handshake, so it has a lane, and says on it what it can't say.

use bps_engine::base::{CoreId, DType, Epoch, Key, Operation, Rank};
use bps_engine::config::{AutoCompression, PayloadChecksum};
use bps_engine::lane::Endpoint;
use bps_engine::mem::Readable;
use bps_engine::optimize::Act;
use bps_engine::proto::messages::{Neighbour, Roster, ServerPeer};
use bps_engine::proto::pulse::Pulse;
use bps_engine::ring::Mpsc;
use bps_engine::transport::sim::{Random, Sim, SimNetwork};
use bps_engine::transport::{Event, Frame, Landing, LaneId, Link, Transport, Waker};
use bps_engine::wire::{Header, RawHeader};
use bps_worker::host::switches::Switches;
use bps_worker::job::agent::{Agent, Effect, Lanes};
use bps_worker::job::nic_loop::{Command, NicLoop};
use bps_worker::nic::{LanePeer, NicConfig, NicStatistics, Report};
use bps_worker::rounds::{Among, Memory, Plan, PlanPart};
use bps_worker::task::Task;
use bps_worker::{Error, Handle};
use std::sync::Arc;
use std::time::Duration;

/// The rank that is tested, and the other one of its job.
pub const GOOD: Rank = Rank(0);
pub const BAD: Rank = Rank(1);
pub const EPOCH: Epoch = Epoch(3);
pub const LANE: LaneId = LaneId(0);
pub const BYTES: usize = 4096;
/// Longer than any run.
const HOUR: Duration = Duration::from_secs(3600);
/// Turns after which a run counts as hung.
pub const TURNS_MAX: u32 = 100_000;
/// A good rank, and the bad peer at the other end of its lane.
pub struct Pair {
    pub network: SimNetwork,
    pub nic: NicLoop,
    pub agent: Agent,
    pub commands: Mpsc<Command>,
    pub reports: Mpsc<Report>,
    pub bad: Option<Endpoint>,
    /// What has come to the bad one.
    pub heard: Vec<Header>,
    /// The last payload of that.
    pub payload: Vec<u8>,
    /// Why the good one's job is over.
    pub over: Option<Error>,
    pub handles: Vec<Handle>,
    /// What the lanes have of payloads and tensors.
    pub memory: Vec<Vec<u8>>,
    pub switches: Switches,
    /// Where parts are summed that no rank owns.
    pub core: Option<LaneId>,
}

impl Pair {
    /// With a bad neighbour on its host, or a bad server. Of a host with several PCIe switches,
    /// `column` are the others that hold what the good rank holds. `keeps` is for jobs that go on
    /// when a server dies.
    pub fn new(seed: u64, peer: LanePeer, column: Vec<Rank>, keeps: bool) -> Pair {
        let is_server = matches!(peer, LanePeer::Server(_));
        let host = if is_server { vec![GOOD] } else { vec![GOOD, BAD] };
        let switches = Switches::new(host, u32::from(!column.is_empty()));
        let network = SimNetwork::new(seed);
        let (mine, theirs) = network.link();
        let endpoint = |waker: &Waker| {
            let sim = Transport::Sim(Sim::new(network.clone()));
            Endpoint::new(vec![sim], waker.clone()).with_checksums(PayloadChecksum::Always)
        };
        let waker = Waker::new().expect("an eventfd");
        let config = NicConfig {
            rank: GOOD,
            size: 2,
            epoch: EPOCH,
            credit_bytes: 1 << 20,
            column,
            stall_report: Duration::from_secs(3600),
            paces: false,
            keeps,
            auto: AutoCompression::Measured,
            team: bps_engine::team::Team::default(),
        };
        let (commands, reports) = (Mpsc::new(64), Mpsc::new(64));
        let mut nic = NicLoop::new(
            endpoint(&waker),
            config,
            commands.clone(),
            (reports.clone(), waker.clone()),
            Arc::new(NicStatistics::default()),
            |_| {},
        );
        assert_eq!(nic.attach(peer, Link::Sim(mine)).expect("a lane"), LANE);
        let mut bad = endpoint(&waker);
        assert_eq!(bad.attach(Link::Sim(theirs)).expect("a lane"), LANE);
        let neighbour =
            Neighbour { rank: BAD, host: "here".into(), pid: 4711, local: String::new() };
        let server = ServerPeer {
            host: "there".into(),
            pid: 4712,
            host_id: String::new(),
            cores: Vec::new(),
            shm: None,
            rdma: false,
        };
        let core = CoreId { server: 0, core: 0 };
        let (neighbours, servers, lanes) = if is_server {
            (vec![], vec![server], Lanes { cores: [(core, LANE)].into(), ..Lanes::default() })
        } else {
            (vec![neighbour], vec![], Lanes { ranks: [(BAD, LANE)].into(), ..Lanes::default() })
        };
        let roster = Roster {
            job: "job".into(),
            term: 1,
            epoch: EPOCH,
            size: 2,
            through_servers: is_server,
            index: GOOD.0,
            workers: Vec::new(),
            neighbours,
            servers,
            elastic: keeps,
            shrinks: keeps,
            change: None,
        };
        Pair {
            network,
            nic,
            agent: Agent::new(
                roster,
                lanes,
                switches.clone(),
                Pulse::new("test", HOUR, HOUR, Duration::ZERO),
            ),
            commands,
            reports,
            bad: Some(bad),
            heard: Vec::new(),
            payload: Vec::new(),
            switches,
            core: is_server.then_some(LANE),
            over: None,
            handles: Vec::new(),
            memory: Vec::new(),
        }
    }

    /// The good rank declares a tensor of one part.
    pub fn plan(&mut self, tensor: u32, key: Key, owner: Option<LaneId>, device: bool) {
        self.plan_among(tensor, key, owner, device, None);
    }

    pub fn plan_among(
        &mut self,
        tensor: u32,
        key: Key,
        owner: Option<LaneId>,
        device: bool,
        among: Option<Arc<Among>>,
    ) {
        let owner_rank = if owner.is_none() { GOOD } else { BAD };
        let holder = self.switches.holder(owner_rank, GOOD);
        let part =
            PlanPart { key, offset: 0, bytes: BYTES, core: self.core, owner, owner_rank, holder };
        let plan = Plan {
            name: format!("tensor {tensor}").into(),
            dtype: DType::F32,
            operation: Operation::Sum,
            device,
            among,
            receiver: None,
            encoding: None,
            store: None,
            parts: [part].into(),
        };
        let command = Command::Plan { tensor, plan: Arc::new(plan) };
        assert!(self.commands.push(command).is_ok(), "a short queue");
    }

    /// The good rank declares and pushes a tensor of one part.
    pub fn push(&mut self, tensor: u32, key: Key, owner: Option<LaneId>) {
        self.plan(tensor, key, owner, false);
        let mut values = vec![0u8; BYTES];
        let target = values.as_mut_ptr();
        self.memory.push(values);
        let task = Arc::new(Task::default());
        self.handles.push(Handle::of(&task));
        // SAFETY: the pair keeps the values, and nobody uses them before the task is finished.
        let memory = unsafe { Memory::new(target.cast_const(), target, BYTES) };
        let push = Command::Push { tensor, memory, priority: 0, act: Act::NONE, task };
        assert!(self.commands.push(push).is_ok(), "a short queue");
    }

    /// The bad rank posts a frame; whether there was room for it.
    pub fn send_raw(&mut self, header: RawHeader, length: usize) -> bool {
        let payload = vec![1u8; length];
        // SAFETY: the pair keeps it, and nobody writes it.
        let frame = Frame::new(header, unsafe { Readable::of(&payload) }, 0);
        self.memory.push(payload);
        self.bad.as_mut().is_some_and(|bad| bad.post(LANE, &frame).is_ok())
    }

    pub fn send(&mut self, header: Header) {
        assert!(self.send_raw(header.encode(), header.length as usize), "a short queue");
    }

    /// The bad peer sends this, perhaps with a flipped bit, and the good one has some turns,
    /// so that the next one may come while this one is looked at. Whether there was room for it.
    pub fn send_at_random(&mut self, header: Header, random: &mut Random) -> bool {
        let mut raw = header.encode();
        if random.once_in(20) {
            raw[random.index(raw.len())] ^= 1 << random.below(8);
        }
        let is_sent = self.send_raw(raw, header.length as usize);
        for _ in 0..random.below(200) {
            self.turn();
        }
        is_sent
    }

    pub fn turn(&mut self) -> bool {
        let mut progress = self.nic.step(self.network.now());
        let mut events = Vec::new();
        if let Some(bad) = &mut self.bad {
            bad.poll(&mut events);
        }
        for event in events {
            progress = true;
            let Some(bad) = &mut self.bad else { break };
            match event {
                Event::Header { header, .. } => {
                    let header = Header::decode(&header).expect("the good rank is good");
                    bad.land(LANE, Landing::Pieces(header.length as usize));
                    self.heard.push(header);
                    self.payload.clear();
                }
                Event::Piece { piece, .. } => {
                    // SAFETY: it is consumed below, once its bytes have been copied.
                    self.payload.extend_from_slice(unsafe { piece.lend().bytes() });
                    bad.consume(LANE);
                }
                Event::Closed { .. } => self.bad = None,
                Event::Landed { .. } | Event::Answered { .. } | Event::Sent { .. } => {}
            }
        }
        let mut effects = Vec::new();
        while let Some(report) = self.reports.pop() {
            progress = true;
            self.agent.handle_report(report, &mut effects);
        }
        for effect in effects {
            if let Effect::Over(error) = effect {
                assert!(self.commands.push(Command::Fail { error: error.clone() }).is_ok());
                self.over = Some(error);
            }
        }
        progress | self.network.advance()
    }

    /// Until nothing happens any more.
    pub fn settle(&mut self) {
        for _ in 0..TURNS_MAX {
            if !self.turn() {
                return;
            }
        }
        panic!("it does not come to rest: {:?}", self.heard);
    }

    /// The bad rank dies, if it still has its lane; then every task must have ended.
    pub fn end(&mut self) -> Error {
        self.bad = None;
        self.settle();
        let mut effects = Vec::new();
        // As the worker does when the scheduler does not say in time what became of a peer.
        self.agent.give_up(&mut effects);
        if let Some(Effect::Over(error)) = effects.pop() {
            assert!(self.commands.push(Command::Fail { error: error.clone() }).is_ok());
            self.over = Some(error);
        }
        self.settle();
        assert!(self.nic.ended(), "lanes are open");
        for handle in &self.handles {
            assert!(handle.poll(), "a task was left alone");
        }
        self.over.clone().expect("a rank without its neighbour can't go on")
    }
}

/// CRC-32C of a payload of ones, bit by bit.
pub fn crc(length: usize) -> u32 {
    let mut sum = !0u32;
    for _ in 0..length {
        sum ^= 1;
        for _ in 0..8 {
            sum = if sum & 1 == 1 { sum >> 1 ^ 0x82f6_3b78 } else { sum >> 1 };
        }
    }
    !sum
}
