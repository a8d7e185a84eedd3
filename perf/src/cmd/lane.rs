//! `bps-perf lane`: one lane between two threads of this process, beside a bare loop of send and
//! recv that moves the same bytes over a connection of the same kind.
//!
//! Invariant: lane and bare loop are run in turn, so that whatever else the machine does meets both;
//! processor time is that of both ends together, the kernel's part included; GB are 10^9 bytes.

use crate::{Outcome, place, sample};
use bps_engine::config::TcpDriver;
use bps_engine::limits::{EVENTS_MAX, HEADER_BYTES, PART_BYTES_MAX};
use bps_engine::transport::tcp::Tcp;
use bps_engine::transport::{Cause, Driver, Event, Frame, Landing, LaneId, Link, Waker};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use serde_json::Value;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

const LANE: LaneId = LaneId(0);
const BLOCK: Duration = Duration::from_secs(1);

/// The arguments.
pub fn command() -> Command {
    Command::new("lane")
        .about("Measures one lane: GB/s and round trips, beside a bare send and recv loop.")
        .arg(
            Arg::new("transport")
                .long("transport")
                .help("What the lane runs over")
                .value_parser(["tcp"])
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
    driver: TcpDriver,
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
    let size = integer("size");
    if size > PART_BYTES_MAX {
        return Err(format!("--size {size}: a frame has at most {PART_BYTES_MAX} bytes").into());
    }
    let plan = Plan {
        driver: if driver == "poll" { TcpDriver::Poll } else { TcpDriver::Uring },
        size,
        frames: (integer("megabytes") * 1_000_000 / (size + HEADER_BYTES)).max(10),
        round_trips: integer("round-trips"),
        pieces: matches.get_flag("pieces"),
        busy: matches.get_flag("busy"),
    };
    let (mut lanes, mut bares) = (Vec::new(), Vec::new());
    for _ in 0..integer("rounds") {
        lanes.push(round(plan, lane_send, lane_receive, lane_ping, lane_pong)?);
        bares.push(round(plan, bare_send, bare_receive, bare_ping, bare_pong)?);
    }
    report(plan, &lanes, &bares, driver, matches.get_flag("json"));
    Ok(())
}

fn report(plan: Plan, lanes: &[Round], bares: &[Round], driver: &str, json: bool) {
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
        map.insert("transport".to_owned(), "tcp".into());
        map.insert("driver".to_owned(), driver.into());
        map.insert("size".to_owned(), plan.size.into());
        map.insert("place".to_owned(), place);
        println!("{}", Value::Object(map));
        return;
    }
    println!("{}", place::line(&place));
    println!("one lane over loopback TCP, driver {driver}, frames of {} bytes", plan.size);
    for (name, value) in figures {
        println!("{name:>20} {value:>14.3}");
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

type Half = fn(Plan, TcpStream) -> io::Result<()>;

/// One connection for bulk, one for ping-pong, two threads for each.
fn round(plan: Plan, send: Half, receive: Half, ping: Half, pong: Half) -> io::Result<Round> {
    let cpu = sample::cpu_seconds();
    let seconds = both(plan, send, receive)?;
    let cpu_seconds = sample::cpu_seconds() - cpu;
    #[allow(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    let round_trip_us = both(plan, ping, pong)? * 1e6 / plan.round_trips as f64;
    Ok(Round { seconds, cpu_seconds, round_trip_us })
}

fn both(plan: Plan, one: Half, two: Half) -> io::Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let here = TcpStream::connect(listener.local_addr()?)?;
    let (there, _) = listener.accept()?;
    here.set_nodelay(true)?;
    there.set_nodelay(true)?;
    let start = Instant::now();
    std::thread::scope(|scope| {
        let other = scope.spawn(move || two(plan, there));
        one(plan, here)?;
        other.join().map_err(|_| io::Error::other("the receiving thread panicked"))?
    })?;
    Ok(start.elapsed().as_secs_f64())
}

/// A transport with one lane, its buffers, and how it idles.
struct End {
    tcp: Tcp,
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
    fn new(plan: Plan, socket: TcpStream) -> io::Result<End> {
        let mut tcp = Tcp::new(Waker::new()?, plan.driver, 1).map_err(io::Error::other)?;
        tcp.attach(LANE, Link::Tcp(OwnedFd::from(socket)))?;
        let (buffer, events) = (vec![1; plan.size], Vec::with_capacity(EVENTS_MAX));
        Ok(End {
            tcp,
            plan,
            buffer,
            events,
            posted: 0,
            sent: 0,
            received: 0,
            rest: 0,
            closed: None,
        })
    }

    fn post(&mut self) -> bool {
        let (payload, length) = (self.buffer.as_ptr(), self.buffer.len());
        let frame = Frame { header: [7; HEADER_BYTES], payload, length, token: 0 };
        let taken = self.tcp.post(LANE, &frame).is_ok();
        self.posted += usize::from(taken);
        taken
    }

    fn turn(&mut self) -> io::Result<()> {
        if let Some(cause) = self.closed {
            return Err(io::Error::other(cause));
        }
        self.events.clear();
        self.tcp.poll(&mut self.events);
        if self.events.is_empty() && !self.plan.busy {
            self.tcp.block(BLOCK);
        }
        for event in &self.events {
            match *event {
                Event::Header { .. } if self.plan.pieces => {
                    self.rest = self.plan.size;
                    self.tcp.land(LANE, Landing::Pieces, self.plan.size);
                }
                Event::Header { .. } => {
                    let to = self.buffer.as_mut_ptr();
                    self.tcp.land(LANE, Landing::Into(to), self.plan.size);
                }
                Event::Landed { .. } => self.received += 1,
                Event::Piece { length, .. } => {
                    self.rest -= length;
                    self.received += usize::from(self.rest == 0);
                    self.tcp.consume(LANE);
                }
                Event::Sent { .. } => self.sent += 1,
                Event::Closed { cause, .. } => self.closed = Some(cause),
            }
        }
        Ok(())
    }
}

fn lane_send(plan: Plan, socket: TcpStream) -> io::Result<()> {
    let mut end = End::new(plan, socket)?;
    while end.sent < plan.frames {
        while end.posted < plan.frames && end.post() {}
        end.turn()?;
    }
    Ok(())
}

fn lane_receive(plan: Plan, socket: TcpStream) -> io::Result<()> {
    let mut end = End::new(plan, socket)?;
    while end.received < plan.frames {
        end.turn()?;
    }
    Ok(())
}

fn lane_ping(plan: Plan, socket: TcpStream) -> io::Result<()> {
    let mut end = End::new(plan, socket)?;
    for trip in 1..=plan.round_trips {
        end.post();
        while end.received < trip {
            end.turn()?;
        }
    }
    Ok(())
}

fn lane_pong(plan: Plan, socket: TcpStream) -> io::Result<()> {
    let mut end = End::new(plan, socket)?;
    for trip in 1..=plan.round_trips {
        while end.received < trip {
            end.turn()?;
        }
        end.post();
    }
    while end.sent < plan.round_trips {
        end.turn()?;
    }
    Ok(())
}

fn bare_send(plan: Plan, mut socket: TcpStream) -> io::Result<()> {
    let frame = vec![1; HEADER_BYTES + plan.size];
    (0..plan.frames).try_for_each(|_| socket.write_all(&frame))
}

fn bare_receive(plan: Plan, mut socket: TcpStream) -> io::Result<()> {
    let mut frame = vec![1; HEADER_BYTES + plan.size];
    (0..plan.frames).try_for_each(|_| socket.read_exact(&mut frame))
}

fn bare_ping(plan: Plan, mut socket: TcpStream) -> io::Result<()> {
    let mut frame = vec![1; HEADER_BYTES + plan.size];
    for _ in 0..plan.round_trips {
        socket.write_all(&frame)?;
        socket.read_exact(&mut frame)?;
    }
    Ok(())
}

fn bare_pong(plan: Plan, mut socket: TcpStream) -> io::Result<()> {
    let mut frame = vec![1; HEADER_BYTES + plan.size];
    for _ in 0..plan.round_trips {
        socket.read_exact(&mut frame)?;
        socket.write_all(&frame)?;
    }
    Ok(())
}
