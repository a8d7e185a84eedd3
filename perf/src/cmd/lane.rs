//! `bps-perf lane`: one lane between two threads of this process, beside a bare loop that moves the
//! same bytes: of send and recv beside TCP (and beside RDMA, where `tests/rdma/run perf` puts
//! perftest's programs beside it as well), of one memcpy and a flag beside shared memory.
//!
//! Invariant: lane and bare loop are run in turn, so that whatever else the machine does meets
//! both; processor time is that of both ends together, the kernel's part included; GB are 10^9
//! bytes.

use crate::arguments::{self, choice, flag, integer, number, text};
use crate::pair::{self, Cost, Start};
use crate::report::{self, Table};
use crate::sample::Series;
use crate::{Outcome, bare};
use bps_engine::config::{Idle, TcpDriver};
use bps_engine::harness::{Idler, Step};
use bps_engine::limits::{EVENTS_MAX, HEADER_BYTES, PART_BYTES_MAX};
use bps_engine::mem::{Readable, Writable};
use bps_engine::transport::rdma::{self, Rails, Rdma, RdmaOptions};
use bps_engine::transport::shm::{self, Shm, ShmOptions};
use bps_engine::transport::tcp::Tcp;
use bps_engine::transport::{Cause, Driver, Event, Frame, Landing, LaneId, Link, Transport, Waker};
use clap::{ArgMatches, Command};
use serde_json::json;
use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LANE: LaneId = LaneId(0);
const BLOCK: Duration = Duration::from_secs(1);

/// The arguments.
pub fn command() -> Command {
    Command::new("lane")
        .about("Measures one lane: GB/s and round trips, beside a bare loop over the same medium.")
        .arg(arguments::transport())
        .arg(choice("driver", &["uring", "poll"], "How TCP talks to the kernel"))
        .arg(arguments::idle())
        .arg(arguments::sizes("size", "1M", "Bytes of payload of a frame"))
        .arg(number(
            "slot",
            "262144",
            "Bytes of a slot of shared memory or RDMA, of which there are 2 MiB",
        ))
        .arg(number("megabytes", "1000", "Bytes that a round moves, in millions"))
        .arg(number("rounds", "7", "Rounds of each kind, in turn, of which the median is taken"))
        .arg(number("round-trips", "3000", "Ping-pongs that a round times"))
        .arg(flag("pieces", "Land in pieces of scratch instead of whole"))
        .arg(flag(
            "registered",
            "Over RDMA, send from memory that the device knows, as ranks on GPUs and servers do",
        ))
        .arg(arguments::json())
}

/// What the lane runs over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Medium {
    Tcp(TcpDriver),
    Shm,
    Rdma,
}

#[derive(Clone, Copy)]
struct Plan {
    medium: Medium,
    slots: ShmOptions,
    size: usize,
    frames: usize,
    round_trips: usize,
    pieces: bool,
    registered: bool,
    idle: Idle,
}

/// Measures lane and bare loop in turn.
pub fn run(matches: &ArgMatches) -> Outcome {
    let (transport, driver) = (text(matches, "transport"), text(matches, "driver"));
    let slot = integer(matches, "slot") as usize;
    let driver = if transport == "tcp" { driver } else { "none" };
    if matches.get_flag("registered") && transport != "rdma" {
        return Err(format!("--registered: only RDMA knows memory, not {transport}").into());
    }
    let idle = text(matches, "idle");
    let title = format!("one lane over {transport}, TCP driver {driver}, {idle} ends");
    let columns = [
        "size_bytes",
        "gbps",
        "bare_gbps",
        "cpu_s_per_gb",
        "bare_cpu_s_per_gb",
        "cpu_ratio",
        "messages_per_s",
        "round_trip_us",
        "round_trip_us_p99",
        "bare_round_trip_us",
    ];
    let table = Table::new(matches, "lane", &title, &columns);
    table.head();
    for size in arguments::bytes(matches, "size") {
        if size > PART_BYTES_MAX {
            let message = format!("--size {size}: a frame has at most {PART_BYTES_MAX} bytes");
            return Err(message.into());
        }
        let megabytes = integer(matches, "megabytes") as usize;
        let plan = Plan {
            medium: match (transport, driver) {
                ("shm", _) => Medium::Shm,
                ("rdma", _) => Medium::Rdma,
                (_, "poll") => Medium::Tcp(TcpDriver::Poll),
                _ => Medium::Tcp(TcpDriver::Uring),
            },
            slots: ShmOptions { slot_bytes: slot, slots: ((2 << 20) / slot).max(2) },
            size,
            frames: (megabytes * 1_000_000 / (size + HEADER_BYTES)).max(10),
            round_trips: integer(matches, "round-trips") as usize,
            pieces: matches.get_flag("pieces"),
            registered: matches.get_flag("registered"),
            idle: arguments::idle_of(matches),
        };
        let mut fields = measure(plan, integer(matches, "rounds"))?;
        fields.insert("transport".to_owned(), transport.into());
        fields.insert("driver".to_owned(), driver.into());
        fields.insert("idle".to_owned(), idle.into());
        table.row(fields);
    }
    Ok(())
}

/// What the rounds of one contender found.
#[derive(Default)]
struct Found {
    seconds: Series,
    cpu_seconds: Series,
    trips: Series,
}

impl Found {
    fn add(&mut self, cost: Cost, trips: &[f64]) {
        self.seconds.0.push(cost.seconds);
        self.cpu_seconds.0.push(cost.cpu_seconds);
        self.trips.0.extend(trips.iter().map(|seconds| seconds * 1e6));
    }
}

fn measure(plan: Plan, rounds: u32) -> io::Result<report::Fields> {
    let (mut lane, mut bare) = (Found::default(), Found::default());
    let bytes = plan.size + HEADER_BYTES;
    for _ in 0..rounds {
        let ((sent, received), trips) = (both(plan, send, receive)?, both(plan, ping, pong)?.0);
        lane.add(bare::later(sent, received), &trips);
        match plan.medium {
            Medium::Tcp(_) | Medium::Rdma => bare.add(
                bare::stream(bytes, plan.frames, plan.idle)?,
                &bare::socket_trips(bytes, plan.round_trips, plan.idle)?,
            ),
            Medium::Shm => bare.add(
                bare::copies(bytes, plan.frames),
                &bare::memory_trips(bytes, plan.round_trips, plan.idle)?,
            ),
        }
    }
    #[allow(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    let (frames, gigabytes) = (plan.frames as f64, (plan.frames * bytes) as f64 / 1e9);
    let per_gb = |found: &Found| {
        Series(found.cpu_seconds.0.iter().map(|seconds| seconds / gigabytes).collect())
    };
    let mut fields = report::fields(json!({
        "size_bytes": plan.size,
        "frames": plan.frames,
        "rounds": rounds,
        "messages_per_s": frames / lane.seconds.median(),
        "cpu_ratio": lane.cpu_seconds.median() / bare.cpu_seconds.median(),
        "round_trip_ratio": lane.trips.median() / bare.trips.median(),
    }));
    for (prefix, found) in [("", &lane), ("bare_", &bare)] {
        report::rate(&mut fields, &format!("{prefix}gbps"), gigabytes, &found.seconds);
        report::cost(&mut fields, &format!("{prefix}cpu_s_per_gb"), &per_gb(found));
        report::cost(&mut fields, &format!("{prefix}round_trip_us"), &found.trips);
    }
    Ok(fields)
}

/// What an end of a lane is made from.
enum Connection {
    Tcp(TcpStream),
    /// The stream that shared memory is set up over, and whether to offer.
    Unix(UnixStream, bool),
    /// The stream that RDMA is set up over, its ports, and whether to dial.
    Rdma(TcpStream, Arc<Rails>, bool),
}

/// Runs two ends of one lane on two threads.
fn both<A: Send, B: Send>(
    plan: Plan,
    one: impl FnOnce(End, Start) -> io::Result<A> + Send,
    two: impl FnOnce(End, Start) -> io::Result<B> + Send,
) -> io::Result<(A, B)> {
    let (here, there) = match plan.medium {
        Medium::Tcp(_) => {
            let (here, there) = pair::sockets()?;
            (Connection::Tcp(here), Connection::Tcp(there))
        }
        Medium::Shm => {
            let (here, there) = UnixStream::pair()?;
            (Connection::Unix(here, true), Connection::Unix(there, false))
        }
        Medium::Rdma => {
            // Over two ports where there are two, so that the bytes travel between devices.
            let ports = rdma::find(None).map_err(io::Error::other)?;
            let (first, last) = (vec![ports[0].clone()], vec![ports[ports.len() - 1].clone()]);
            let open = |port| Rails::open(port, None).map_err(io::Error::other);
            let (here, there) = pair::sockets()?;
            (
                Connection::Rdma(here, open(first)?, true),
                Connection::Rdma(there, open(last)?, false),
            )
        }
    };
    pair::run(
        move |start| one(End::new(plan, here)?, start),
        move |start| two(End::new(plan, there)?, start),
    )
}

/// A transport with one lane, its buffers, and how it idles.
struct End {
    transport: Transport,
    waker: Waker,
    idler: Idler,
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
    fn new(plan: Plan, connection: Connection) -> io::Result<End> {
        let waker = Waker::new()?;
        let (link, mut transport) = match (connection, plan.medium) {
            (Connection::Tcp(socket), Medium::Tcp(choice)) => {
                let tcp = Tcp::new(waker.clone(), choice, 1).map_err(io::Error::other)?;
                (Link::Tcp(OwnedFd::from(socket)), Transport::Tcp(tcp))
            }
            (Connection::Tcp(_), _) => return Err(io::ErrorKind::Unsupported.into()),
            (Connection::Unix(stream, offers), _) => {
                let link = if offers {
                    shm::offer(&stream, &waker, plan.slots)?
                } else {
                    shm::accept(&stream, &waker, None)?
                };
                (Link::Shm(link), Transport::Shm(Shm::new(waker.clone())?))
            }
            (Connection::Rdma(stream, rails, dials), _) => {
                let ShmOptions { slot_bytes, slots } = plan.slots;
                let options = RdmaOptions { slot_bytes, slots: slots.max(4) };
                let link = if dials {
                    rdma::connect(stream, &rails, 0, options)
                } else {
                    rdma::accept(stream, &rails, options)
                };
                let link = Link::Rdma(Box::new(link.map_err(io::Error::other)?));
                (link, Transport::Rdma(Box::new(Rdma::new(waker.clone(), rails)?)))
            }
        };
        transport.attach(LANE, link)?;
        let mut buffer = vec![1; plan.size];
        if let (true, Transport::Rdma(driver)) = (plan.registered, &mut transport)
            && let Some(first) = NonNull::new(buffer.as_mut_ptr())
        {
            // SAFETY: the buffer is never resized, and is dropped after the driver.
            unsafe { driver.register(first, plan.size) }.map_err(io::Error::other)?;
        }
        Ok(End {
            transport,
            waker,
            idler: bare::idler(plan.idle),
            plan,
            buffer,
            events: Vec::with_capacity(EVENTS_MAX),
            posted: 0,
            sent: 0,
            received: 0,
            rest: 0,
            closed: None,
        })
    }

    fn post(&mut self) -> bool {
        // SAFETY: the buffer lives longer than the transport. It may be landed in meanwhile, where
        // nobody looks at what is in it.
        let frame = Frame::new([7; HEADER_BYTES], unsafe { Readable::of(&self.buffer) }, 0);
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
        if self.idler.step(!self.events.is_empty()) == Step::Sleep {
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
                    self.transport.land(LANE, Landing::Pieces(self.plan.size));
                }
                Event::Header { .. } => {
                    // SAFETY: the buffer lives longer than the transport, and is not read here.
                    let to = unsafe { Writable::of(&mut self.buffer) };
                    self.transport.land(LANE, Landing::Into(to));
                }
                Event::Landed { .. } => self.received += 1,
                Event::Piece { piece, .. } => {
                    self.rest -= piece.len();
                    self.received += usize::from(self.rest == 0);
                    self.transport.consume(LANE);
                }
                Event::Sent { .. } => self.sent += 1,
                Event::Answered { .. } => unreachable!("nothing was granted"),
                Event::Closed { cause, .. } => self.closed = Some(cause),
            }
        }
        Ok(())
    }
}

impl End {
    /// Leaves in good order: what was sent arrives, though this end goes.
    fn finish(mut self) -> io::Result<()> {
        self.transport.close(LANE);
        while self.closed.is_none() {
            self.turn()?;
        }
        Ok(())
    }
}

fn send(mut end: End, start: Start) -> io::Result<Cost> {
    let clock = start.ready()?;
    let frames = end.plan.frames;
    while end.sent < frames {
        while end.posted < frames && end.post() {}
        end.turn()?;
    }
    let cost = clock.stop();
    end.finish()?;
    Ok(cost)
}

fn receive(mut end: End, start: Start) -> io::Result<Cost> {
    let clock = start.ready()?;
    while end.received < end.plan.frames {
        end.turn()?;
    }
    Ok(clock.stop())
}

fn ping(mut end: End, start: Start) -> io::Result<Vec<f64>> {
    start.ready()?;
    let mut seconds = Vec::with_capacity(end.plan.round_trips);
    for trip in 1..=end.plan.round_trips {
        let begin = Instant::now();
        end.post();
        while end.received < trip {
            end.turn()?;
        }
        seconds.push(begin.elapsed().as_secs_f64());
    }
    Ok(seconds)
}

fn pong(mut end: End, start: Start) -> io::Result<()> {
    start.ready()?;
    for trip in 1..=end.plan.round_trips {
        while end.received < trip {
            end.turn()?;
        }
        end.post();
    }
    while end.sent < end.plan.round_trips {
        end.turn()?;
    }
    end.finish()
}
