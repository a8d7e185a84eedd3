//! A live server among strangers, with a rank gone bad, while two honest ranks train on.
//!
//! Strangers have no job key. The bad rank has one and is rank 2 of the job: for each round it
//! first throws broken frames at every core, each of which may cost it its connection and nothing
//! else, and then contributes as it should, so that the round can be checked.

use crate::spoil;
use bps_engine::base::{CoreId, DType, Epoch, Key, Operation, Placement, Rank, Round};
use bps_engine::config::{Config, LogLevel};
use bps_engine::control::{ControlLink, Hello, JobKey, LinkSender, dial};
use bps_engine::proto::encoding::draw;
use bps_engine::proto::handshake::Dialing;
use bps_engine::proto::messages::{
    Assignment, Declaration, Node, NodeMessage, Planning, Register, Roster, SchedulerMessage,
};
use bps_engine::transport::sim::Random;
use bps_engine::wire::header::FLAG_PAYLOAD_CHECKSUM;
use bps_engine::wire::{Header, Kind, RawHeader};
use bps_tests::job::free_port;
use bps_tests::program::Program;
use bps_tests::reference;
use bps_worker::Members;
use bps_worker::{PushPull, Worker};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Ranks of the job; the last of them is the bad one.
const RANKS: u32 = 3;
/// Cores of the one server.
const CORES: u32 = 2;
/// Rounds of each tensor.
const ROUNDS: u64 = 16;
/// Broken frames that the bad rank throws in all.
const BROKEN_FRAMES: u64 = 100_000;
/// Broken frames on one connection.
const FRAMES_AT_ONCE: u64 = 10;
/// Silent connections that are held open against each listener.
const SILENT: usize = 150;
/// What the server may grow by while all this goes on.
const GROWTH_BYTES: u64 = 48 << 20;
/// No wait of this test is longer.
const PATIENCE: Duration = Duration::from_secs(20);

/// What every rank declares.
fn declarations() -> Vec<Declaration> {
    let tensor = |index: u32, dtype, count: u64| Declaration {
        name: format!("tensor {index}"),
        dtype,
        shape: count.into(),
        operation: if index.is_multiple_of(2) { Operation::Sum } else { Operation::Average },
        device: false,
        members: Members::ALL,
        receiver: None,
        encoding: None,
        store: None,
    };
    // All elements with their indices, so that sums are exact.
    let encoding = Some("topk(k=1.0)".parse().expect("an encoding"));
    vec![
        tensor(0, DType::F32, 50_000),
        tensor(1, DType::F16, 1000),
        tensor(2, DType::I64, 300),
        tensor(3, DType::F64, 40_001),
        Declaration { encoding, ..tensor(4, DType::F32, 30_000) },
    ]
}

fn planning() -> Planning {
    Planning {
        partition_bytes: 64 << 10,
        placement: Placement::Balanced,
        mixed_bound: 101,
        built_in_coefficient: 1,
        local_reduce: false,
        force_distributed: false,
        reduce_roots: Vec::new(),
        switch_size: 0,
        tuning: bps_engine::proto::tuning::Tuning::OFF,
    }
}

/// An honest rank, over the real worker.
fn honest(config: &Config, rounds_done: &AtomicU64) {
    let worker = Worker::start(config).expect("the job forms");
    let declarations = declarations();
    let tensors = worker.declare(&declarations).expect("all ranks agree");
    for round in 1..=ROUNDS {
        let mut buffers: Vec<Vec<u8>> = (0..)
            .zip(&declarations)
            .map(|(index, it)| {
                reference::contribution(it.dtype, index, worker.rank(), round, elements(it))
            })
            .collect();
        let items: Vec<PushPull> = tensors
            .iter()
            .zip(&mut buffers)
            .map(|(tensor, buffer)| PushPull {
                tensor: *tensor,
                source: buffer.as_ptr(),
                target: buffer.as_mut_ptr(),
                priority: 0,
            })
            .collect();
        // SAFETY: each buffer has the declared size and is not touched until its handle is done.
        let handles = unsafe { worker.push_pull(&items) }.expect("the job runs");
        for handle in &handles {
            assert!(handle.wait(Some(PATIENCE)).expect("the job runs"), "round {round} hangs");
        }
        for (index, (it, buffer)) in (0..).zip(declarations.iter().zip(&buffers)) {
            let expected =
                reference::result(it.dtype, it.operation, index, RANKS, round, elements(it));
            assert!(*buffer == expected, "round {round} of `{}` has a wrong sum", it.name);
        }
        rounds_done.fetch_add(1, Ordering::Relaxed);
    }
    worker.shutdown(false).expect("the job ends well");
}

fn elements(declaration: &Declaration) -> usize {
    usize::try_from(declaration.shape.count()).expect("a small tensor")
}

/// A part as it travels: `plain`, or encoded.
fn payload(declaration: &Declaration, header: &Header, plain: &[u8]) -> Vec<u8> {
    let Some(encoding) = declaration.encoding else { return plain.to_vec() };
    let values: Vec<f32> = plain.as_chunks().0.iter().map(|it| f32::from_le_bytes(*it)).collect();
    let mut wire = vec![0; encoding.room(values.len())];
    let random = draw(header.key, header.round.0, header.rank.0);
    let length = encoding.codec.encode(&values, random, &mut wire);
    wire.truncate(length);
    wire
}

/// What a part has become that came so.
fn plain_of(declaration: &Declaration, header: &Header, payload: &[u8], bytes: usize) -> Vec<u8> {
    let Some(encoding) = declaration.encoding else { return payload.to_vec() };
    let mut values = vec![0.0; bytes / declaration.dtype.size()];
    let random = draw(header.key, header.round.0, header.rank.0);
    encoding.codec.check(values.len(), payload).expect("a server encodes well");
    encoding.codec.decode(payload, random, &mut values);
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The bad rank's place in the job, by its own hands: no worker of ours would do what it does.
struct BadRank {
    key: JobKey,
    sender: LinkSender,
    roster: Roster,
    assignments: Vec<Assignment>,
    random: Random,
    leaving: Arc<AtomicBool>,
    control: JoinHandle<()>,
    thrown: u64,
    refused: u64,
}

impl BadRank {
    fn join(port: u16, key: &JobKey) -> BadRank {
        let link =
            ControlLink::connect("127.0.0.1", port, key, PATIENCE).expect("the scheduler listens");
        let (sender, mut receiver) = link.split();
        let register = Register {
            node: Node::Worker {
                worker_id: RANKS - 1,
                local_rank: 0,
                local_size: 1,
                global_rank: None,
                local: None,
                planning: planning(),
                speaks: None,
            },
            host: bps_engine::host::name(),
            host_id: bps_engine::host::id(),
            pid: std::process::id(),
            instance: 7,
            session: 0,
            former: None,
            release: env!("CARGO_PKG_VERSION").into(),
            encrypt: false,
            num_workers: RANKS,
            num_servers: 1,
        };
        sender.send(&NodeMessage::Register(register)).expect("the scheduler reads");
        let (messages, received) = channel();
        let leaving = Arc::new(AtomicBool::new(false));
        let (heartbeat, leaves) = (sender.clone(), Arc::clone(&leaving));
        let control = std::thread::spawn(move || {
            while !leaves.load(Ordering::Acquire) {
                match receiver.receive(Duration::from_millis(200)) {
                    Ok(Some(message)) => drop(messages.send(message)),
                    Ok(None) => {}
                    Err(_) => return,
                }
                let _ = heartbeat.send(&NodeMessage::Heartbeat { rounds: 0 });
            }
        });
        let roster = wait_for(&received, |message| match message {
            SchedulerMessage::Roster(roster) => Some(roster),
            _ => None,
        });
        let declare = NodeMessage::Declare { request: 1, tensors: declarations() };
        sender.send(&declare).expect("the scheduler reads");
        let assignments = wait_for(&received, |message| match message {
            SchedulerMessage::Declared { tensors, .. } => Some(tensors),
            _ => None,
        });
        let (key, random) = (key.clone(), Random::new(0x5eed_0005));
        BadRank {
            key,
            sender,
            roster,
            assignments,
            random,
            leaving,
            control,
            thrown: 0,
            refused: 0,
        }
    }

    fn rank(&self) -> Rank {
        Rank(self.roster.index)
    }

    fn address(&self, core: u32) -> SocketAddr {
        self.roster.servers[0].cores[core as usize]
    }

    /// A lane of this rank. The server may not have noticed yet that the last one is gone, and
    /// then turns this one away: a lane is good once it has taken a first frame, so it is asked by
    /// its silence.
    fn dial(&self, core: u32) -> TcpStream {
        let hello = Hello::lane(self.rank(), self.roster.epoch);
        let lane = dial(self.address(core), &self.key, hello, PATIENCE).expect("cores listen");
        lane.set_read_timeout(Some(PATIENCE)).expect("a timeout is not zero");
        lane
    }

    /// The headers of an honest round on one core: index of the tensor, range in it, header.
    fn parts(&self, core: u32, round: u64) -> Vec<(usize, std::ops::Range<usize>, Header)> {
        let declarations = declarations();
        let mut parts = Vec::new();
        for (index, assignment) in self.assignments.iter().enumerate() {
            for part in &assignment.parts {
                if part.core != Some(CoreId { server: 0, core }) {
                    continue;
                }
                let dtype = declarations[index].dtype;
                let mut header =
                    Header::new(Kind::Contribution, dtype, self.rank(), self.roster.epoch);
                header.key = part.key;
                header.round = Round(round);
                let room = declarations[index].encoding.map(|it| it.room(part.bytes as usize / 4));
                let length = room.unwrap_or(part.bytes as usize);
                header.length = u32::try_from(length).expect("a small part");
                header.contributors = 1;
                let start = usize::try_from(part.offset).expect("a small tensor");
                parts.push((index, start..start + part.bytes as usize, header));
            }
        }
        parts
    }

    /// Throws broken frames at a core until it has had its share of them.
    fn throw(&mut self, core: u32, round: u64, count: u64) {
        let (declarations, parts) = (declarations(), self.parts(core, round));
        let mut left = count;
        while left > 0 {
            let mut bytes = Vec::new();
            let frames = left.min(FRAMES_AT_ONCE);
            for _ in 0..frames {
                let (index, _, header) = &parts[self.random.index(parts.len())];
                let is_encoded = declarations[*index].encoding.is_some();
                bytes.extend_from_slice(&broken(header, is_encoded, &mut self.random));
                let payload = self.random.index(200);
                bytes.extend((0..payload).map(|_| spoil::byte(&mut self.random)));
            }
            let cut = self.random.index(4) == 0;
            if cut {
                bytes.truncate(self.random.index(bytes.len()));
            }
            let mut lane = self.dial(core);
            // The server closes at the first broken frame: how far the rest gets is its affair.
            let _ = lane.write_all(&bytes);
            let _ = lane.shutdown(Shutdown::Write);
            self.refused += u64::from(await_end(&mut lane));
            left -= frames;
            self.thrown += frames;
        }
    }

    /// Contributes to a round on one core, and checks what comes back.
    fn contribute(&self, core: u32, round: u64) {
        let until = Instant::now() + PATIENCE;
        while !self.try_contribute(core, round) {
            assert!(Instant::now() < until, "core {core} turns rank 2 away in round {round}");
        }
    }

    /// False if the server turned the lane away because it had not yet noticed the end of the last.
    fn try_contribute(&self, core: u32, round: u64) -> bool {
        let declarations = declarations();
        let parts = self.parts(core, round);
        let mut lane = self.dial(core);
        let tensor = |index: usize| u64::try_from(index).expect("a few tensors");
        for (index, range, header) in &parts {
            let it = &declarations[*index];
            let whole = reference::contribution(
                it.dtype,
                tensor(*index),
                self.rank().0,
                round,
                elements(it),
            );
            let mut frame = header.encode().to_vec();
            frame.extend_from_slice(&payload(it, header, &whole[range.clone()]));
            if lane.write_all(&frame).is_err() {
                return false;
            }
        }
        for answered in 0..parts.len() {
            let mut raw: RawHeader = [0; 64];
            if lane.read_exact(&mut raw).is_err() {
                assert_eq!(answered, 0, "core {core} closed in the middle of round {round}");
                return false;
            }
            let header = Header::decode(&raw).expect("a server sends whole headers");
            assert_eq!(header.kind, Kind::Publication, "core {core} refused an honest frame");
            let (index, range, _) = parts
                .iter()
                .find(|(_, _, sent)| sent.key == header.key)
                .expect("a publication of a key of this core");
            let mut came = vec![0; header.length as usize];
            lane.read_exact(&mut came).expect("the payload follows");
            let it = &declarations[*index];
            let expected = reference::result(
                it.dtype,
                it.operation,
                tensor(*index),
                RANKS,
                round,
                elements(it),
            );
            let sum = plain_of(it, &header, &came, range.len());
            assert!(sum == expected[range.clone()], "rank 2 got a wrong sum of `{}`", it.name);
        }
        let goodbye = Header::new(Kind::Goodbye, DType::U8, self.rank(), self.roster.epoch);
        lane.write_all(&goodbye.encode()).expect("the lane is open");
        await_end(&mut lane);
        true
    }

    fn leave(self) {
        self.sender.send(&NodeMessage::Leave { suspend: false }).expect("the scheduler reads");
        self.leaving.store(true, Ordering::Release);
        self.control.join().expect("the control thread ends");
    }
}

fn wait_for<T>(
    received: &Receiver<SchedulerMessage>,
    wanted: impl Fn(SchedulerMessage) -> Option<T>,
) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let message = received.recv_timeout(left).expect("the scheduler answers");
        if let SchedulerMessage::Over { reason } = &message {
            panic!("the job is over: {reason:?}");
        }
        if let Some(found) = wanted(message) {
            return found;
        }
    }
}

/// Reads until the peer has closed, and says whether it refused a frame before.
fn await_end(lane: &mut TcpStream) -> bool {
    let mut raw: RawHeader = [0; 64];
    // A reset is an end too: the server closed with bytes of ours unread.
    let answered = lane.read_exact(&mut raw).is_ok();
    while lane.read(&mut [0; 4096]).is_ok_and(|count| count > 0) {}
    answered && Header::decode(&raw).is_ok_and(|header| header.kind == Kind::Refused)
}

/// A header that no server may accept in place of `honest`. Of what `is_encoded`, the payload alone
/// says whether it is too short.
fn broken(honest: &Header, is_encoded: bool, random: &mut Random) -> Vec<u8> {
    let lengths = if is_encoded { 3 } else { 4 };
    let mut header = *honest;
    let big = |random: &mut Random| u32::try_from(random.bits() >> 32).expect("32 bits");
    match random.index(14) {
        0 => return (0..64).map(|_| spoil::byte(random)).collect(),
        1 => {
            let mut bytes = honest.encode().to_vec();
            bytes[random.index(64)] ^= 1 << random.index(8);
            return bytes;
        }
        2 => header.kind = [Kind::Publication, Kind::Refused][random.index(2)],
        3 => header.rank = Rank([0, 1, 3, u32::MAX][random.index(4)]),
        4 => header.epoch = Epoch([0, 2, u32::MAX][random.index(3)]),
        5 => header.key = Key(random.bits() | 1 << 60),
        6 => {
            header.round =
                Round([0, honest.round.0 - 1, honest.round.0 + 1, u64::MAX][random.index(4)])
        }
        7 => header.offset = 1 + random.bits() / 2,
        8 => header.length = honest.length.wrapping_add([1, 4, 8, u32::MAX][random.index(lengths)]),
        9 => header.length = 0,
        10 => header.contributors = [0, 2, u32::MAX][random.index(3)],
        11 => {
            // The sender's own type does not fit the registry's.
            let others: Vec<DType> =
                DType::ALL.into_iter().filter(|dtype| *dtype != honest.dtype).collect();
            header.dtype = others[random.index(others.len())];
        }
        // What encoding would not say: patched in, and sealed again.
        12 => return patched(honest, 5, &[[0, 5, 0xff][random.index(3)]]),
        _ => {
            let at = [4, 6, 7, 52, 59][random.index(5)];
            let value = if at == 6 { 0xfe ^ FLAG_PAYLOAD_CHECKSUM } else { 0x80 };
            if random.index(8) == 0 {
                return patched(honest, 40, &big(random).saturating_add(1 << 27).to_le_bytes());
            }
            return patched(honest, at, &[value]);
        }
    }
    header.encode().to_vec()
}

/// The header with some bytes replaced and its checksum right.
fn patched(honest: &Header, at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut raw = honest.encode();
    raw[at..at + bytes.len()].copy_from_slice(bytes);
    let checksum = crate::decode::crc32c(&raw[..60]);
    raw[60..].copy_from_slice(&checksum.to_le_bytes());
    raw.to_vec()
}

/// Knocks at every door without a key, in every wrong way, until told to stop. Returns how often.
fn knock(doors: &[SocketAddr], stop: &AtomicBool, seed: u64) -> u64 {
    let mut random = Random::new(seed);
    let stranger = JobKey::from_bytes([9; 32]);
    let mut silent: Vec<TcpStream> = Vec::new();
    let mut knocks = 0;
    while !stop.load(Ordering::Acquire) {
        let door = &doors[random.index(doors.len())];
        let Ok(mut stream) = TcpStream::connect_timeout(door, PATIENCE) else { continue };
        knocks += 1;
        let hello = Dialing::new(
            &stranger,
            Hello::lane(Rank(0), Epoch(1)),
            &[spoil::byte(&mut random); 16],
        );
        let mut bytes = hello.hello().to_vec();
        match random.index(6) {
            0 => spoil::mutate(&mut random, &mut bytes),
            1 => bytes = (0..random.index(300)).map(|_| spoil::byte(&mut random)).collect(),
            2 => bytes = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
            3 => bytes.truncate(random.index(32)),
            4 => bytes.extend((0..32).map(|_| spoil::byte(&mut random))),
            _ => {
                let _ = stream.write_all(&bytes[..random.index(32)]);
                silent.push(stream);
                if silent.len() > SILENT * doors.len() {
                    silent.clear();
                }
                continue;
            }
        }
        let _ = stream.write_all(&bytes);
        if random.index(4) == 0 {
            let _ = stream.set_read_timeout(Some(Duration::from_millis(5)));
            let _ = stream.read(&mut [0; 64]);
        }
    }
    knocks
}

#[test]
fn strangers_and_a_bad_rank_disturb_nobody() {
    let key = JobKey::from_bytes([7; 32]);
    let port = free_port();
    let variables = [
        ("DMLC_PS_ROOT_URI", "127.0.0.1".to_owned()),
        ("DMLC_PS_ROOT_PORT", port.to_string()),
        ("DMLC_NUM_WORKER", RANKS.to_string()),
        ("DMLC_NUM_SERVER", "1".to_owned()),
        ("DMLC_NODE_HOST", "127.0.0.1".to_owned()),
        ("BPS_JOB_KEY", key.expose_hex()),
        ("BPS_STALL_REPORT", "15".to_owned()),
    ];
    let mut scheduler = Program::start("bps-scheduler", &[], &variables);
    let mut server = Program::start("bps-server", &["--cores", &CORES.to_string()], &variables);
    let rounds_done = Arc::new(AtomicU64::new(0));
    let honest: Vec<JoinHandle<()>> = (0..RANKS - 1)
        .map(|worker_id| {
            let config = Config {
                num_workers: RANKS,
                num_servers: 1,
                worker_id,
                root_uri: "127.0.0.1".to_owned(),
                root_port: port,
                job_key: Some(key.expose_hex()),
                partition_bytes: planning().partition_bytes,
                local_reduce: false,
                start_timeout: PATIENCE,
                log_level: LogLevel::Error,
                ..Config::default()
            };
            let rounds_done = Arc::clone(&rounds_done);
            std::thread::spawn(move || honest(&config, &rounds_done))
        })
        .collect();
    let mut bad = BadRank::join(port, &key);
    let before = server.resident_bytes();
    let stop = Arc::new(AtomicBool::new(false));
    let mut doors: Vec<SocketAddr> = (0..CORES).map(|core| bad.address(core)).collect();
    doors.push(SocketAddr::from(([127, 0, 0, 1], port)));
    let stranger = {
        let stop = Arc::clone(&stop);
        std::thread::spawn(move || knock(&doors, &stop, 0x5eed_0006))
    };
    let most = Mutex::new(before);
    for round in 1..=ROUNDS {
        for core in 0..CORES {
            bad.throw(core, round, BROKEN_FRAMES.div_ceil(ROUNDS * u64::from(CORES)));
        }
        for core in 0..CORES {
            bad.contribute(core, round);
        }
        let mut most = most.lock().expect("nobody panics with it");
        *most = server.resident_bytes().max(*most);
    }
    stop.store(true, Ordering::Release);
    let knocks = stranger.join().expect("a stranger does not panic");
    let (thrown, refused) = (bad.thrown, bad.refused);
    bad.leave();
    for rank in honest {
        rank.join().expect("an honest rank got right sums and left well");
    }
    let most = *most.lock().expect("nobody panics with it");
    assert!(thrown >= BROKEN_FRAMES && knocks > 100, "{thrown} frames, {knocks} knocks");
    // The rest was cut within its first frame, or its answer was lost to the reset behind it.
    let connections = BROKEN_FRAMES / FRAMES_AT_ONCE;
    assert!(refused > connections / 10, "only {refused} of {connections} were told of a refusal");
    assert_eq!(rounds_done.load(Ordering::Relaxed), ROUNDS * u64::from(RANKS - 1));
    assert!(
        most < before + GROWTH_BYTES,
        "the server grew from {before} to {most} bytes under {thrown} frames and {knocks} knocks"
    );
    assert!(server.wait(PATIENCE).success(), "the server's job ended badly");
    assert!(scheduler.wait(PATIENCE).success(), "the scheduler's job ended badly");
    let lines = server.lines_said();
    eprintln!(
        "{thrown} broken frames on {connections} connections, {refused} told of it, {knocks} \
         knocks; {lines} lines logged; {before} bytes of memory before, at most {most}"
    );
}
