//! What the RDMA transport does beyond the contract: layouts against the installed header, calls
//! counted, and how faults of devices, links and peers end. All but the layouts needs a device;
//! `tests/rdma/run` runs this in a virtual machine that has some.

mod answers;

use bps_engine::config::{Config, TransportChoice};
use bps_engine::mem::{Readable, Writable};
use bps_engine::transport::rdma::{self, Counters, GpuMemory, Rails, Rdma, RdmaError, RdmaOptions};
use bps_engine::transport::{
    Answer, Cause, Driver, Event, Frame, Grant, Landing, LaneId, Link, Waker,
};
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const LANE: LaneId = LaneId(0);
/// Nothing here takes this long unless it hangs, on devices that are emulated twice.
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether this runs where a device must be.
fn must_run() -> bool {
    std::env::var_os("BPS_TEST_RDMA_ONLY").is_some()
}

/// Whether there is a device; says why not.
fn has_device() -> bool {
    match rdma::find(None) {
        Ok(_) => true,
        Err(error) if must_run() => panic!("{error}"),
        Err(error) => {
            eprintln!("skipped: {error}");
            false
        }
    }
}

#[test]
fn layouts_are_those_of_the_installed_header() {
    if !std::path::Path::new("/usr/include/infiniband/verbs.h").exists() {
        assert!(!must_run(), "libibverbs-dev is not installed");
        eprintln!("skipped: infiniband/verbs.h is not installed (libibverbs-dev)");
        return;
    }
    let mut program = String::from(
        "#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\nint main() {\n",
    );
    let mut expected = Vec::new();
    for line in rdma::layouts() {
        let (name, number) = line.rsplit_once(' ').unwrap();
        let words: Vec<&str> = name.split(' ').collect();
        let what = match words[..] {
            // Of these only the first fields are known here.
            ["prefix", _] => continue,
            ["struct", c] => format!("sizeof(struct {c})"),
            // The last fields of a struct that grows at its front.
            ["tail", c] => format!("sizeof(struct {c})-offsetof(struct {c}, query_device_ex)"),
            ["tail", c, field] => {
                format!("offsetof(struct {c}, {field})-offsetof(struct {c}, query_device_ex)")
            }
            [_, c, field] => format!("offsetof(struct {c}, {field})"),
            _ => panic!("{line}"),
        };
        program.push_str(&format!("printf(\"{what} %ld\\n\", (long){what});\n"));
        expected.push(format!("{what} {number}"));
    }
    for line in rdma::constants() {
        let (name, _) = line.split_once(' ').unwrap();
        program.push_str(&format!("printf(\"{name} %ld\\n\", (long){name});\n"));
        expected.push(line);
    }
    program.push_str("}\n");
    let folder = std::env::temp_dir().join(format!("bps-layouts-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (source, binary) = (folder.join("layouts.c"), folder.join("layouts"));
    std::fs::File::create(&source).unwrap().write_all(program.as_bytes()).unwrap();
    let compiled = Command::new("cc").arg(&source).arg("-o").arg(&binary).output();
    let output = match compiled {
        Ok(done) if done.status.success() => Command::new(&binary).output().unwrap(),
        Ok(done) => panic!("{}", String::from_utf8_lossy(&done.stderr)),
        Err(error) => panic!("no C compiler: {error}"),
    };
    let _ = std::fs::remove_dir_all(&folder);
    let found = String::from_utf8(output.stdout).unwrap();
    assert!(expected.len() > 100, "{} numbers", expected.len());
    assert_eq!(found.lines().collect::<Vec<_>>(), expected);
}

/// One end of a lane.
struct End {
    driver: Rdma,
    waker: Waker,
    rails: Arc<Rails>,
    memory: Vec<u8>,
    landed: usize,
    /// What came with the last header.
    grant: Option<Grant>,
    answered: usize,
    posted: usize,
    sent: usize,
    closed: Option<Cause>,
}

/// A frame whose payload the test keeps unchanged until it is sent.
fn frame(header: [u8; 64], payload: &[u8]) -> Frame {
    // SAFETY: as the tests promise.
    Frame::new(header, unsafe { Readable::of(payload) }, 0)
}

impl End {
    fn new(rails: Arc<Rails>, link: Link, bytes: usize) -> End {
        let waker = Waker::new().unwrap();
        let mut driver = Rdma::new(waker.clone(), Arc::clone(&rails)).unwrap();
        driver.attach(LANE, link).unwrap();
        End {
            driver,
            waker,
            rails,
            memory: vec![0; bytes],
            landed: 0,
            grant: None,
            answered: 0,
            posted: 0,
            sent: 0,
            closed: None,
        }
    }

    /// Posts a frame whose answer of this length is to land in this end's memory.
    fn ask(&mut self, payload: &[u8], length: usize) {
        // SAFETY: the tests look at it once the answer has come.
        let into = unsafe { Writable::of(&mut self.memory[..length]) };
        let answer = Answer::Wanted { into, token: 0 };
        let frame = frame([7; 64], payload);
        self.driver.post(LANE, &Frame { answer, ..frame }).expect("room");
    }

    fn answer(&mut self, payload: &[u8], grant: Grant) {
        let frame = frame([8; 64], payload);
        self.driver.post(LANE, &Frame { answer: Answer::To(grant), ..frame }).expect("room");
    }

    fn post(&mut self, payload: &[u8]) -> bool {
        let frame = frame([7; 64], payload);
        let is_taken = self.driver.post(LANE, &frame).is_ok();
        self.posted += usize::from(is_taken);
        is_taken
    }

    /// Polls once, and sleeps for a moment if nothing came.
    fn turn(&mut self) {
        let mut events = Vec::new();
        self.driver.poll(&mut events);
        if events.is_empty() {
            self.waker.prepare();
            if !self.driver.arm() {
                self.driver.block(Duration::from_millis(2));
            }
            self.waker.awake();
        }
        for event in events {
            match event {
                Event::Header { carried, .. } => {
                    self.grant = carried.grant();
                    // SAFETY: the tests look at it once the payload has landed.
                    let into = unsafe { Writable::of(&mut self.memory) };
                    self.driver.land(LANE, Landing::Into(into));
                }
                Event::Landed { .. } => self.landed += 1,
                Event::Answered { .. } => self.answered += 1,
                Event::Sent { .. } => self.sent += 1,
                Event::Closed { cause, .. } => self.closed = Some(cause),
                Event::Piece { .. } => panic!("nobody asked for pieces"),
            }
        }
    }
}

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (one, listener.accept().unwrap().0)
}

fn rails(interface: Option<&str>) -> Arc<Rails> {
    Rails::open(rdma::find(interface).unwrap(), None).unwrap()
}

/// Two ends of a lane whose frames have so many bytes, on these interfaces.
fn pair(bytes: usize, interfaces: [Option<&str>; 2]) -> (End, End) {
    let options = RdmaOptions { slot_bytes: 64 << 10, slots: 8 };
    let (left, right) = (rails(interfaces[0]), rails(interfaces[1]));
    let (one, other) = sockets();
    let (dialed, accepted) = std::thread::scope(|scope| {
        let dialed = scope.spawn(|| rdma::connect(one, &left, 0, options).unwrap());
        let accepted = rdma::accept(other, &right, options).unwrap();
        (dialed.join().unwrap(), accepted)
    });
    let left = End::new(left, Link::Rdma(Box::new(dialed)), bytes);
    let right = End::new(right, Link::Rdma(Box::new(accepted)), bytes);
    (left, right)
}

/// What both ends say where these interfaces can't be connected.
fn refusals(interfaces: [Option<&str>; 2]) -> (RdmaError, RdmaError) {
    let (left, right) = (rails(interfaces[0]), rails(interfaces[1]));
    let (one, other) = sockets();
    let options = RdmaOptions::default();
    std::thread::scope(|scope| {
        let dialed = scope.spawn(|| rdma::connect(one, &left, 0, options));
        let accepted = rdma::accept(other, &right, options);
        let dialed = dialed.join().unwrap();
        (dialed.err().expect("no lane"), accepted.err().expect("no lane"))
    })
}

fn until(ends: &mut [&mut End], what: &str, mut done: impl FnMut(&[&mut End]) -> bool) {
    let start = Instant::now();
    while !done(ends) {
        ends.iter_mut().for_each(|end| end.turn());
        assert!(start.elapsed() < PATIENCE, "{what} did not happen within {PATIENCE:?}");
    }
}

fn count(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// Runs a command of the virtual machine.
fn command(line: &str) {
    let words: Vec<&str> = line.split(' ').collect();
    let done = Command::new(words[0]).args(&words[1..]).output().unwrap();
    assert!(done.status.success(), "{line}: {}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn calls_are_as_many_as_the_design_says() {
    if !has_device() {
        return;
    }
    for (bytes, extents) in [(1000usize, 1u64), (64 << 10, 1), ((64 << 10) + 1, 2), (1 << 20, 16)] {
        let (mut left, mut right) = pair(bytes, [None, None]);
        let payload: Vec<u8> = (0..bytes).map(|at| (at % 251).to_le_bytes()[0]).collect();
        let rounds = 40;
        for round in 1..=rounds {
            right.memory.fill(0);
            assert!(left.post(&payload));
            until(&mut [&mut left, &mut right], "a frame", |ends| ends[1].landed == round);
            assert!(right.memory == payload, "round {round}");
        }
        let frames = rounds as u64;
        let (sender, receiver): (&Counters, &Counters) =
            (left.rails.counters(), right.rails.counters());
        // A frame is as many writes as it has slots, and nothing else goes that way.
        assert_eq!(count(&sender.extents), frames * extents);
        assert_eq!(count(&sender.sends), frames * extents);
        assert_eq!(count(&sender.staged_bytes), frames * bytes as u64);
        assert_eq!(count(&receiver.receive_completions), frames * extents);
        // At most one doorbell for each write, and completions for one in four at most: small
        // writes every sixteenth, large ones every eighth of the area.
        assert!(count(&sender.send_calls) <= frames * extents);
        let signals = count(&sender.signals);
        let share = if bytes < 64 << 10 { 16 } else { 1 };
        assert!(signals <= frames * extents / share + 1, "{signals} for {frames} of {bytes}");
        assert_eq!(count(&receiver.copied_bytes), frames * bytes as u64);
        // Credit: a write without bytes for a quarter of the extents or of the area.
        let area = 8 * ((64 << 10) + 128) as u64;
        let moved = frames * (bytes as u64 + 128 * extents);
        let credits = count(&receiver.credits);
        let most = frames * extents / 16 + 4 * moved / area;
        assert!(credits <= most + 1, "{credits} credits where {most} are due");
        assert_eq!(count(&receiver.sends), credits);
        // Places to receive are given in sixteens.
        let calls = count(&receiver.receive_calls);
        assert!(calls <= 14 + frames * extents / 16, "{calls} calls");
        eprintln!(
            "{bytes} bytes, {frames} frames: {} writes, {} doorbells, {signals} signalled, \
             {credits} credits back, {calls} calls for {} places",
            count(&sender.sends),
            count(&sender.send_calls),
            count(&receiver.receives),
        );
    }
}

#[test]
fn a_hostile_set_up_is_sent_away() {
    if !has_device() {
        return;
    }
    let rails = rails(None);
    let options = RdmaOptions::default();
    let mut spoiled = 0;
    for seed in 0..40u8 {
        let (mut one, other) = sockets();
        let mut bytes = [seed.wrapping_mul(37); 640];
        if seed % 2 == 0 {
            bytes[..8].copy_from_slice(b"BPSRDMA\x03");
            bytes[8] = 1;
        }
        one.write_all(&bytes[..if seed % 5 == 0 { 200 } else { 640 }]).unwrap();
        one.shutdown(std::net::Shutdown::Write).unwrap();
        spoiled += usize::from(rdma::accept(other, &rails, options).is_err());
    }
    assert_eq!(spoiled, 40);
    // An honest peer is served after all that.
    let (mut left, mut right) = pair(100, [None, None]);
    assert!(left.post(&[1; 100]));
    until(&mut [&mut left, &mut right], "a frame", |ends| ends[1].landed == 1);
}

/// Sends frames from left to right until `rounds` more have landed.
fn exchange(left: &mut End, right: &mut End, payload: &[u8], rounds: usize) {
    let (goal, mut posted) = (right.landed + rounds, 0);
    let start = Instant::now();
    while right.landed < goal {
        if posted < rounds && left.post(payload) {
            posted += 1;
        }
        left.turn();
        right.turn();
        assert!(start.elapsed() < PATIENCE, "{} of {goal} frames", right.landed);
        assert_eq!((left.closed, right.closed), (None, None));
    }
    assert!(right.memory == payload);
}

#[test]
fn loss_and_delay_are_survived_and_a_dead_link_ends_the_lane() {
    if !has_device() {
        return;
    }
    if !must_run() {
        eprintln!("skipped: links are only disturbed in the virtual machine of tests/rdma");
        return;
    }
    let payload = vec![9u8; 200_000];
    let (mut left, mut right) = pair(payload.len(), [Some("va"), Some("vb")]);
    exchange(&mut left, &mut right, &payload, 5);
    for disturbance in ["loss 1%", "delay 5ms"] {
        command(&format!("tc qdisc add dev va root netem {disturbance}"));
        command(&format!("tc qdisc add dev vb root netem {disturbance}"));
        exchange(&mut left, &mut right, &payload, 5);
        command("tc qdisc del dev va root");
        command("tc qdisc del dev vb root");
    }
    command("tc qdisc add dev va root netem loss 100%");
    assert!(left.post(&payload));
    let start = Instant::now();
    until(&mut [&mut left, &mut right], "the end of the lane", |ends| ends[0].closed.is_some());
    command("tc qdisc del dev va root");
    let cause = left.closed.unwrap();
    eprintln!("all packets lost: closed after {:?}: {cause}", start.elapsed());
    assert_eq!(cause, Cause::Rdma { status: 12 });
    assert!(cause.to_string().contains("no answer after all retries"), "{cause}");
    // The other end, which sent nothing, learns of it by the stream.
    drop(left);
    until(&mut [&mut right], "the end of the other end", |ends| ends[0].closed.is_some());
    assert!(matches!(right.closed, Some(Cause::Peer | Cause::Truncated)), "{:?}", right.closed);
}

#[test]
fn a_path_that_carries_nothing_is_found_at_set_up() {
    if !has_device() {
        return;
    }
    if !must_run() {
        eprintln!("skipped: links are only disturbed in the virtual machine of tests/rdma");
        return;
    }
    let payload = vec![5u8; 10_000];
    // The ends then know each other's hardware addresses, which set-up asks for.
    let (mut left, mut right) = pair(payload.len(), [Some("va"), Some("vb")]);
    exchange(&mut left, &mut right, &payload, 1);
    drop((left, right));
    command("tc qdisc add dev va root netem loss 100%");
    let start = Instant::now();
    let (dialed, accepted) = refusals([Some("va"), Some("vb")]);
    command("tc qdisc del dev va root");
    eprintln!("found after {:?}: {dialed}; {accepted}", start.elapsed());
    assert!(matches!(dialed, RdmaError::Path { .. }), "{dialed}");
    assert!(dialed.to_string().contains("nothing of ours came there"), "{dialed}");
    assert!(accepted.to_string().contains("nothing came from there"), "{accepted}");
    let (mut left, mut right) = pair(payload.len(), [Some("va"), Some("vb")]);
    exchange(&mut left, &mut right, &payload, 1);
}

#[test]
fn what_soft_roce_lacks_is_refused_with_a_reason() {
    if !has_device() {
        return;
    }
    if !must_run() {
        eprintln!("skipped: a device that is no emulation may have it");
        return;
    }
    let config =
        Config { transport: TransportChoice::Rdma, rdma_on_demand: true, ..Config::default() };
    let rails = rdma::rails_for(&config, None).unwrap().unwrap();
    eprintln!("{}", rails.description());
    assert!(rails.description().contains("copied: no paging on demand"), "{}", rails.description());
    let buffer = std::fs::File::open("/dev/zero").unwrap();
    let base = std::ptr::without_provenance_mut(1 << 40);
    let ports = rdma::Ports::all(&rails);
    // SAFETY: the file is no dma-buf, so nothing is registered.
    let refused =
        unsafe { GpuMemory::register(&ports, buffer.as_fd(), (base, 1 << 16), false, ()) };
    let refused = refused.err().unwrap();
    eprintln!("{refused}");
    assert!(matches!(refused, RdmaError::DmaBuf { .. }), "{refused}");
}

#[test]
fn payloads_in_registered_memory_are_not_copied() {
    if !has_device() {
        return;
    }
    let payload: Vec<u8> = (0..200_000u32).map(|at| (at % 249).to_le_bytes()[0]).collect();
    let (mut left, mut right) = pair(payload.len(), [None, None]);
    let base = NonNull::from(&payload[0]);
    // SAFETY: the payload outlives the driver.
    unsafe { left.driver.register(base, payload.len()) }.unwrap();
    exchange(&mut left, &mut right, &payload, 10);
    let counters = left.rails.counters();
    assert_eq!(count(&counters.staged_bytes), 0);
    eprintln!(
        "10 frames of 4 slots in place: {} writes, {} doorbells, {} signalled",
        count(&counters.sends),
        count(&counters.send_calls),
        count(&counters.signals)
    );
    drop(left);
}

#[test]
fn what_was_sent_arrives_though_the_driver_is_dropped() {
    if !has_device() {
        return;
    }
    let payload = vec![8u8; 100_000];
    let (mut left, mut right) = pair(payload.len(), [None, None]);
    let frames = 4;
    while left.sent < frames {
        if left.posted < frames {
            left.post(&payload);
        }
        left.turn();
    }
    drop(left);
    until(&mut [&mut right], "the end", |ends| ends[0].closed.is_some());
    assert_eq!((right.landed, right.closed), (frames, Some(Cause::Peer)));
}

#[test]
fn a_device_that_goes_down_ends_the_lane() {
    if !has_device() {
        return;
    }
    if !must_run() {
        eprintln!("skipped: devices are only taken down in the virtual machine of tests/rdma");
        return;
    }
    let payload = vec![3u8; 10_000];
    for is_idle in [true, false] {
        let (mut left, mut right) = pair(payload.len(), [Some("va"), Some("vb")]);
        exchange(&mut left, &mut right, &payload, 3);
        command("ip link set va down");
        if !is_idle {
            assert!(left.post(&payload));
        }
        until(&mut [&mut left], "the end of the lane", |ends| ends[0].closed.is_some());
        command("ip link set va up");
        eprintln!("the interface went down: {}", left.closed.unwrap());
        // The device's word may come behind the failed operation.
        let is_told = matches!(left.closed, Some(Cause::RdmaEvent { event: 10 }));
        let is_failed = matches!(left.closed, Some(Cause::Rdma { .. } | Cause::Os(_)));
        assert!(is_told || (is_failed && !is_idle), "{:?}", left.closed);
        drop(left);
        until(&mut [&mut right], "the end of the other end", |ends| ends[0].closed.is_some());
        // A pair of virtual interfaces goes down together.
        let ends = Some(Cause::Peer) == right.closed
            || Some(Cause::RdmaEvent { event: 10 }) == right.closed;
        assert!(ends, "{:?}", right.closed);
    }
}

#[test]
fn a_killed_process_ends_the_lane() {
    if !has_device() {
        return;
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_other_process", "--ignored", "--nocapture"])
        .env("BPS_TEST_RDMA_PEER", address)
        .spawn()
        .unwrap();
    let rails = rails(None);
    let (stream, _) = listener.accept().unwrap();
    let options = RdmaOptions::default();
    let link = rdma::accept(stream, &rails, options).unwrap();
    let mut left = End::new(rails, Link::Rdma(Box::new(link)), 5000);
    for round in 1..=5usize {
        assert!(left.post(&[round.to_le_bytes()[0]; 5000]));
        until(&mut [&mut left], "an echo", |ends| ends[0].landed == round);
        assert!(left.memory.iter().all(|byte| *byte == round.to_le_bytes()[0]));
    }
    other.kill().unwrap();
    until(&mut [&mut left], "the end of the lane", |ends| ends[0].closed.is_some());
    assert_eq!(left.closed, Some(Cause::Peer));
    other.wait().unwrap();
}

/// Sends every frame back until it is killed.
#[test]
#[ignore = "the other process of `a_killed_process_ends_the_lane`"]
fn the_other_process() {
    let Ok(address) = std::env::var("BPS_TEST_RDMA_PEER") else {
        eprintln!("skipped: nobody started this as the other process");
        return;
    };
    let rails = rails(None);
    let stream = TcpStream::connect(address).unwrap();
    let link = rdma::connect(stream, &rails, 0, RdmaOptions::default()).unwrap();
    let mut end = End::new(rails, Link::Rdma(Box::new(link)), 5000);
    let (start, mut echoed) = (Instant::now(), 0);
    while start.elapsed() < PATIENCE && end.closed.is_none() {
        end.turn();
        if end.landed > echoed {
            let payload = end.memory.clone();
            assert!(end.post(&payload));
            while end.sent == echoed {
                end.turn();
            }
            echoed += 1;
        }
    }
}
