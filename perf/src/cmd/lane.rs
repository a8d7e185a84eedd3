//! `bps-perf lane`: one lane between two threads of this process, beside a bare loop that moves the
//! same bytes: of send and recv beside TCP, of one memcpy and a flag beside shared memory.
//!
//! Invariant: lane and bare loop are run in turn, so that whatever else the machine does meets
//! both; processor time is that of both ends together, the kernel's part included; GB are 10^9
//! bytes.

use crate::{Outcome, place, sample};
use bps_engine::config::TcpDriver;
use bps_engine::limits::{EVENTS_MAX, HEADER_BYTES, PART_BYTES_MAX};
use bps_engine::transport::shm::{self, Shm, ShmOptions};
use bps_engine::transport::tcp::Tcp;
use bps_engine::transport::{Cause, Driver, Event, Frame, Landing, LaneId, Link, Transport, Waker};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use serde_json::Value;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const LANE: LaneId = LaneId(0);
const BLOCK: Duration = Duration::from_secs(1);

/// The arguments.
pub fn command() -> Command {
    Command::new("lane")
        .about("Measures one lane: GB/s and round trips, beside a bare loop over the same medium.")
        .arg(
            Arg::new("transport")
                .long("transport")
                .help("What the lane runs over")
                .value_parser(["tcp", "shm"])
                .default_value("tcp"),
        )
        .arg(
            Arg::new("driver")
                .long("driver")
                .help("How TCP talks to the kernel")
                .value_parser(["uring", "poll"])
                .default_value("uring"),
        )
        .arg(number("size", "1048576", "Bytes of payload of a frame"))
        .arg(number("slot", "262144", "Bytes of a slot of shared memory, of which there are 2 MiB"))
        .arg(number("megabytes", "1000", "Bytes that a round moves, in millions"))
        .arg(number("rounds", "7", "Rounds of each kind, in turn, of which the median is taken"))
        .arg(number("round-trips", "3000", "Ping-pongs that a round times"))
        .arg(flag("pieces", "Land in pieces of scratch instead of whole"))
        .arg(flag("busy", "Never sleep in the kernel: poll on"))
        .arg(flag("json", "Print one JSON object"))
}

fn number(name: &'static str, default: &'static str, help: &'static str) -> Arg {
    let parser = value_parser!(u32).range(1..);
    Arg::new(name).long(name).help(help).value_parser(parser).default_value(default)
}

fn flag(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).help(help).action(ArgAction::SetTrue)
}

#[derive(Clone, Copy)]
struct Plan {
    /// `None` for shared memory.
    driver: Option<TcpDriver>,
    slots: ShmOptions,
    size: usize,
    frames: usize,
    round_trips: usize,
    pieces: bool,
    busy: bool,
}

/// What one round found.
struct Round {
    seconds: f64,
    cpu_seconds: f64,
    round_trip_us: f64,
}

/// Measures lane and bare loop in turn.
pub fn run(matches: &ArgMatches) -> Outcome {
    let integer = |name: &str| *matches.get_one::<u32>(name).expect("has a default") as usize;
    let driver = matches.get_one::<String>("driver").expect("has a default");
    let transport = matches.get_one::<String>("transport").expect("has a default");
    let (size, slot) = (integer("size"), integer("slot"));
    if size > PART_BYTES_MAX {
        return Err(format!("--size {size}: a frame has at most {PART_BYTES_MAX} bytes").into());
    }
    let plan = Plan {
        driver: match (transport.as_str(), driver.as_str()) {
            ("shm", _) => None,
            (_, "poll") => Some(TcpDriver::Poll),
            _ => Some(TcpDriver::Uring),
        },
        slots: ShmOptions { slot_bytes: slot, slots: ((2 << 20) / slot).max(2) },
        size,
        frames: (integer("megabytes") * 1_000_000 / (size + HEADER_BYTES)).max(10),
        round_trips: integer("round-trips"),
        pieces: matches.get_flag("pieces"),
        busy: matches.get_flag("busy"),
    };
    let (mut lanes, mut bares) = (Vec::new(), Vec::new());
    for _ in 0..integer("rounds") {
        lanes.push(round(plan, true, [lane_send, lane_receive, lane_ping, lane_pong])?);
        let bare: [Half; 4] = match plan.driver {
            Some(_) => [bare_send, bare_receive, bare_ping, bare_pong],
            None => [copy, nothing, flag_ping, flag_pong],
        };
        bares.push(round(plan, false, bare)?);
    }
    let driver = if plan.driver.is_some() { driver.as_str() } else { "none" };
    report(plan, &lanes, &bares, (transport, driver), matches.get_flag("json"));
    Ok(())
}

fn report(plan: Plan, lanes: &[Round], bares: &[Round], over: (&str, &str), json: bool) {
    let (transport, driver) = over;
    #[allow(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    let (frames, gigabytes) =
        (plan.frames as f64, (plan.frames * (plan.size + HEADER_BYTES)) as f64 / 1e9);
    let seconds = |rounds: &[Round]| median(rounds.iter().map(|round| round.seconds));
    let cpu = |rounds: &[Round]| median(rounds.iter().map(|round| round.cpu_seconds)) / gigabytes;
    let trip = |rounds: &[Round]| median(rounds.iter().map(|round| round.round_trip_us));
    let figures = [
        ("gbps", gigabytes / seconds(lanes)),
        ("bare_gbps", gigabytes / seconds(bares)),
        ("cpu_s_per_gb", cpu(lanes)),
        ("bare_cpu_s_per_gb", cpu(bares)),
        ("messages_per_s", frames / seconds(lanes)),
        ("round_trip_us", trip(lanes)),
        ("bare_round_trip_us", trip(bares)),
    ];
    let place = place::describe();
    if json {
        let mut map: serde_json::Map<String, Value> =
            figures.iter().map(|&(name, value)| (name.to_owned(), value.into())).collect();
        map.insert("transport".to_owned(), transport.into());
        map.insert("driver".to_owned(), driver.into());
        map.insert("size".to_owned(), plan.size.into());
        map.insert("place".to_owned(), place);
        println!("{}", Value::Object(map));
        return;
    }
    println!("{}", place::line(&place));
    println!("one lane over {transport}, TCP driver {driver}, frames of {} bytes", plan.size);
    for (name, value) in figures {
        println!("{name:>20} {value:>14.3}");
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// What two threads are joined by.
struct Joint {
    connection: Connection,
    ready: Sender<()>,
    other_ready: Receiver<()>,
}

enum Connection {
    Tcp(TcpStream),
    /// For a lane over shared memory: the stream that it is set up over, and whether to offer.
    Unix(UnixStream, bool),
    /// For the bare loop beside shared memory.
    Memory(Arc<Memory>),
}

/// Memory of two threads.
struct Memory {
    bytes: Mutex<Vec<u8>>,
    /// Who may write to it next.
    turn: AtomicUsize,
}

/// One thread's part. Returns the seconds that it took, without setting up.
type Half = fn(Plan, Joint) -> io::Result<f64>;

/// One connection for bulk, one for ping-pong, two threads for each.
fn round(plan: Plan, is_lane: bool, halves: [Half; 4]) -> io::Result<Round> {
    let [send, receive, ping, pong] = halves;
    let cpu = sample::cpu_seconds();
    let seconds = both(plan, is_lane, send, receive)?;
    let cpu_seconds = sample::cpu_seconds() - cpu;
    #[allow(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    let round_trip_us = both(plan, is_lane, ping, pong)? * 1e6 / plan.round_trips as f64;
    Ok(Round { seconds, cpu_seconds, round_trip_us })
}

fn connect(plan: Plan, is_lane: bool) -> io::Result<(Connection, Connection)> {
    if plan.driver.is_some() {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let here = TcpStream::connect(listener.local_addr()?)?;
        let (there, _) = listener.accept()?;
        here.set_nodelay(true)?;
        there.set_nodelay(true)?;
        Ok((Connection::Tcp(here), Connection::Tcp(there)))
    } else if is_lane {
        let (here, there) = UnixStream::pair()?;
        Ok((Connection::Unix(here, true), Connection::Unix(there, false)))
    } else {
        let bytes = Mutex::new(vec![1; HEADER_BYTES + plan.size]);
        let memory = Arc::new(Memory { bytes, turn: AtomicUsize::new(0) });
        let there = Connection::Memory(Arc::clone(&memory));
        Ok((Connection::Memory(memory), there))
    }
}

fn both(plan: Plan, is_lane: bool, one: Half, two: Half) -> io::Result<f64> {
    let (here, there) = connect(plan, is_lane)?;
    let (here_ready, here_seen) = channel();
    let (there_ready, there_seen) = channel();
    let here = Joint { connection: here, ready: here_ready, other_ready: there_seen };
    let there = Joint { connection: there, ready: there_ready, other_ready: here_seen };
    std::thread::scope(|scope| {
        let other = scope.spawn(move || two(plan, there));
        let seconds = one(plan, here)?;
        let other = other.join().map_err(|_| io::Error::other("the other thread panicked"))??;
        Ok(seconds.max(other))
    })
}

impl Joint {
    /// Waits until both threads have set up. An error if the other one failed to.
    fn start(&self) -> io::Result<Instant> {
        let gone = || io::Error::other("the other thread failed to set up");
        self.ready.send(()).map_err(|_| gone())?;
        self.other_ready.recv().map_err(|_| gone())?;
        Ok(Instant::now())
    }

    fn socket(self) -> io::Result<(TcpStream, Instant)> {
        let start = self.start()?;
        match self.connection {
            Connection::Tcp(socket) => Ok((socket, start)),
            _ => Err(io::Error::other("the bare loop of TCP needs a socket")),
        }
    }

    fn memory(self) -> io::Result<(Arc<Memory>, Instant)> {
        let start = self.start()?;
        match self.connection {
            Connection::Memory(memory) => Ok((memory, start)),
            _ => Err(io::Error::other("the bare loop of shared memory needs memory")),
        }
    }
}

/// A transport with one lane, its buffers, and how it idles.
struct End {
    transport: Transport,
    waker: Waker,
    plan: Plan,
    buffer: Vec<u8>,
    events: Vec<Event>,
    posted: usize,
    sent: usize,
    /// Payloads that came whole.
    received: usize,
    rest: usize,
    closed: Option<Cause>,
}

impl End {
    /// The end and when it began: once both are there.
    fn new(plan: Plan, joint: Joint) -> io::Result<(End, Instant)> {
        let waker = Waker::new()?;
        let link = match &joint.connection {
            Connection::Tcp(socket) => Link::Tcp(OwnedFd::from(socket.try_clone()?)),
            Connection::Unix(stream, true) => Link::Shm(shm::offer(stream, &waker, plan.slots)?),
            Connection::Unix(stream, false) => Link::Shm(shm::accept(stream, &waker, None)?),
            Connection::Memory(..) => return Err(io::Error::other("memory is no lane")),
        };
        let mut transport = match plan.driver {
            Some(choice) => {
                Transport::Tcp(Tcp::new(waker.clone(), choice, 1).map_err(io::Error::other)?)
            }
            None => Transport::Shm(Shm::new(waker.clone())?),
        };
        transport.attach(LANE, link)?;
        let (buffer, events) = (vec![1; plan.size], Vec::with_capacity(EVENTS_MAX));
        let end = End {
            transport,
            waker,
            plan,
            buffer,
            events,
            posted: 0,
            sent: 0,
            received: 0,
            rest: 0,
            closed: None,
        };
        Ok((end, joint.start()?))
    }

    fn post(&mut self) -> bool {
        let (payload, length) = (self.buffer.as_ptr(), self.buffer.len());
        let frame = Frame { header: [7; HEADER_BYTES], payload, length, token: 0 };
        let taken = self.transport.post(LANE, &frame).is_ok();
        self.posted += usize::from(taken);
        taken
    }

    fn turn(&mut self) -> io::Result<()> {
        if let Some(cause) = self.closed {
            return Err(io::Error::other(cause));
        }
        self.events.clear();
        self.transport.poll(&mut self.events);
        if self.events.is_empty() && !self.plan.busy {
            self.waker.prepare();
            if !self.transport.arm() {
                self.transport.block(BLOCK);
            }
            self.waker.awake();
        }
        for event in &self.events {
            match *event {
                Event::Header { .. } if self.plan.pieces => {
                    self.rest = self.plan.size;
                    self.transport.land(LANE, Landing::Pieces, self.plan.size);
                }
                Event::Header { .. } => {
                    let to = self.buffer.as_mut_ptr();
                    self.transport.land(LANE, Landing::Into(to), self.plan.size);
                }
                Event::Landed { .. } => self.received += 1,
                Event::Piece { length, .. } => {
                    self.rest -= length;
                    self.received += usize::from(self.rest == 0);
                    self.transport.consume(LANE);
                }
                Event::Sent { .. } => self.sent += 1,
                Event::Closed { cause, .. } => self.closed = Some(cause),
            }
        }
        Ok(())
    }
}

fn lane_send(plan: Plan, joint: Joint) -> io::Result<f64> {
    let (mut end, start) = End::new(plan, joint)?;
    while end.sent < plan.frames {
        while end.posted < plan.frames && end.post() {}
        end.turn()?;
    }
    Ok(start.elapsed().as_secs_f64())
}

fn lane_receive(plan: Plan, joint: Joint) -> io::Result<f64> {
    let (mut end, start) = End::new(plan, joint)?;
    while end.received < plan.frames {
        end.turn()?;
    }
    Ok(start.elapsed().as_secs_f64())
}

fn lane_ping(plan: Plan, joint: Joint) -> io::Result<f64> {
    let (mut end, start) = End::new(plan, joint)?;
    for trip in 1..=plan.round_trips {
        end.post();
        while end.received < trip {
            end.turn()?;
        }
    }
    Ok(start.elapsed().as_secs_f64())
}

fn lane_pong(plan: Plan, joint: Joint) -> io::Result<f64> {
    let (mut end, start) = End::new(plan, joint)?;
    for trip in 1..=plan.round_trips {
        while end.received < trip {
            end.turn()?;
        }
        end.post();
    }
    while end.sent < plan.round_trips {
        end.turn()?;
    }
    Ok(start.elapsed().as_secs_f64())
}

fn bare_send(plan: Plan, joint: Joint) -> io::Result<f64> {
    let (mut socket, start) = joint.socket()?;
    let frame = vec![1; HEADER_BYTES + plan.size];
    (0..plan.frames).try_for_each(|_| socket.write_all(&frame))?;
    Ok(start.elapsed().as_secs_f64())
}

fn bare_receive(plan: Plan, joint: Joint) -> io::Result<f64> {
    let (mut socket, start) = joint.socket()?;
    let mut frame = vec![1; HEADER_BYTES + plan.size];
    (0..plan.frames).try_for_each(|_| socket.read_exact(&mut frame))?;
    Ok(start.elapsed().as_secs_f64())
}

fn bare_ping(plan: Plan, joint: Joint) -> io::Result<f64> {
    let (mut socket, start) = joint.socket()?;
    let mut frame = vec![1; HEADER_BYTES + plan.size];
    for _ in 0..plan.round_trips {
        socket.write_all(&frame)?;
        socket.read_exact(&mut frame)?;
    }
    Ok(start.elapsed().as_secs_f64())
}

fn bare_pong(plan: Plan, joint: Joint) -> io::Result<f64> {
    let (mut socket, start) = joint.socket()?;
    let mut frame = vec![1; HEADER_BYTES + plan.size];
    for _ in 0..plan.round_trips {
        socket.read_exact(&mut frame)?;
        socket.write_all(&frame)?;
    }
    Ok(start.elapsed().as_secs_f64())
}

/// One memcpy of each frame: the least that it takes to get bytes from one place to another.
fn copy(plan: Plan, joint: Joint) -> io::Result<f64> {
    let source = vec![1u8; HEADER_BYTES + plan.size];
    let mut target = source.clone();
    let (_, start) = joint.memory()?;
    for _ in 0..plan.frames {
        std::hint::black_box(&mut target).copy_from_slice(std::hint::black_box(&source));
    }
    Ok(start.elapsed().as_secs_f64())
}

fn nothing(_: Plan, joint: Joint) -> io::Result<f64> {
    joint.memory().map(|_| 0.0)
}

fn flag_ping(plan: Plan, joint: Joint) -> io::Result<f64> {
    flag_turns(plan, joint, 0)
}

fn flag_pong(plan: Plan, joint: Joint) -> io::Result<f64> {
    flag_turns(plan, joint, 1)
}

/// Two threads that spin until it is their turn, then copy the frame out and another one in.
fn flag_turns(plan: Plan, joint: Joint, side: usize) -> io::Result<f64> {
    let mut own = vec![1u8; HEADER_BYTES + plan.size];
    let (memory, start) = joint.memory()?;
    let is_ours = |trip: usize| memory.turn.load(Ordering::Acquire) >= 2 * trip + side;
    for trip in 0..plan.round_trips {
        let mut spins = 0u32;
        while !is_ours(trip) {
            spins += 1;
            // Where others want this CPU, the other thread may be among them.
            if spins.is_multiple_of(1 << 14) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        // Never waited for: it is this side's turn.
        let mut bytes = memory.bytes.lock().map_err(|_| io::Error::other("a thread panicked"))?;
        own.copy_from_slice(&bytes);
        bytes.copy_from_slice(std::hint::black_box(&own));
        drop(bytes);
        memory.turn.store(2 * trip + side + 1, Ordering::Release);
    }
    Ok(start.elapsed().as_secs_f64())
}
