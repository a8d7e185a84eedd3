//! The line itself: a bare stream in both directions of every link at once. Each host sends to the
//! next and receives from the one before, from plain blocking sockets, a thread for each direction.

#![forbid(unsafe_code)]

use super::crew::{Crew, Member, serve};
use super::{Stage, program_path};
use crate::Outcome;
use clap::{Arg, ArgMatches, Command, value_parser};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// A port of the stage: nobody else is there.
const PORT: u16 = 7000;
/// Bytes of one call.
const BLOCK_BYTES: usize = 256 << 10;
/// How long the neighbour may take to listen.
const PATIENCE: Duration = Duration::from_secs(20);

/// A crew of one stream to every host from the one before. Each line that it is told is the time of
/// a burst in milliseconds; each answers with the bytes a second that it received.
pub fn crew(stage: &Stage) -> Result<Crew, String> {
    let hosts = stage.hosts();
    let start = |host: u32| {
        let mut command = stage.command(host, program_path());
        let (own, next) = (Stage::address(host), Stage::address((host + 1) % hosts));
        command.args(["stage-stream", &own.to_string(), &next.to_string()]);
        Member::start(format!("the bare stream on host {host}"), command)
    };
    Crew::new((0..hosts).map(start).collect::<Result<_, _>>()?, PATIENCE)
}

/// The arguments of [`run`].
pub fn command() -> Command {
    Command::new("stage-stream")
        .about("One end of two bare streams (used by `cluster`)")
        .hide(true)
        .arg(Arg::new("own").required(true).value_parser(value_parser!(Ipv4Addr)))
        .arg(Arg::new("next").required(true).value_parser(value_parser!(Ipv4Addr)))
}

/// A member of [`crew`].
pub fn run(matches: &ArgMatches) -> Outcome {
    let address = |name: &str| SocketAddrV4::new(*matches.get_one(name).expect("required"), PORT);
    let listener = TcpListener::bind(address("own"))?;
    let deadline = Instant::now() + PATIENCE;
    let mut out = loop {
        match TcpStream::connect(address("next")) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() > deadline => return Err(error.into()),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let (mut inward, _) = listener.accept()?;
    for stream in [&out, &inward] {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
    }
    serve(|line| {
        let milliseconds = line.parse().map_err(|error| format!("{line:?}: {error}"))?;
        let rate = std::thread::scope(|scope| {
            let sender = scope.spawn(|| send(&mut out, Duration::from_millis(milliseconds)));
            let rate = receive(&mut inward);
            sender.join().expect("no panic in send").and(rate)
        });
        rate.map(|rate| vec![rate]).map_err(|error| format!("a bare stream failed: {error}"))
    })?;
    Ok(())
}

/// Sends blocks until the time is over. The first byte of the last one is 1.
fn send(stream: &mut TcpStream, time: Duration) -> std::io::Result<()> {
    let mut block = vec![0; BLOCK_BYTES];
    let end = Instant::now() + time;
    while block[0] == 0 {
        block[0] = u8::from(Instant::now() >= end);
        stream.write_all(&block)?;
    }
    Ok(())
}

/// Receives up to the last block, and says how many bytes a second came after the first one.
fn receive(stream: &mut TcpStream) -> std::io::Result<f64> {
    let mut block = vec![0; BLOCK_BYTES];
    stream.read_exact(&mut block)?;
    let (start, mut bytes) = (Instant::now(), 0.0);
    while block[0] == 0 {
        stream.read_exact(&mut block)?;
        #[allow(clippy::cast_precision_loss, reason = "a small constant")]
        let more = BLOCK_BYTES as f64;
        bytes += more;
    }
    Ok(bytes / start.elapsed().as_secs_f64())
}
