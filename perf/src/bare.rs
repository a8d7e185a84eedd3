//! What the machine does without the engine: loops of send and receive over a loopback socket, and
//! copies between two threads, each as good as can be written in a few lines.
//!
//! Invariant: a bare loop moves the same bytes as what it is measured beside, and its threads wait
//! in the same way: `busy` polls on, `adaptive` spins as long as the engine does and then sleeps.

#![forbid(unsafe_code)]

use crate::pair::{self, Clock, Cost, Start};
use crate::sample;
use bps_engine::config::Idle;
use bps_engine::harness::{Idler, Step, spin_default};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// A wait that takes longer is looked at again: the other thread may have failed.
const BLOCK: Duration = Duration::from_secs(1);

/// An idler of the calling thread, as one of two polling threads has it.
pub fn idler(idle: Idle) -> Idler {
    Idler::new(idle, spin_default(2, sample::cpus()))
}

/// A socket that waits as the policy says.
pub struct Socket {
    stream: TcpStream,
    idler: Idler,
}

impl Socket {
    /// Wraps one end. The calling thread is the one that uses it.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn new(stream: TcpStream, idle: Idle) -> io::Result<Socket> {
        Socket::with(stream, idler(idle))
    }

    /// As [`new`](Socket::new), with an idler of the caller's.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn with(stream: TcpStream, idler: Idler) -> io::Result<Socket> {
        stream.set_nonblocking(true)?;
        Ok(Socket { stream, idler })
    }

    /// Sends all of it.
    ///
    /// # Errors
    /// The other end is gone.
    pub fn send(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(count) => {
                    self.idler.step(true);
                    bytes = &bytes[count..];
                }
                Err(error) => self.wait(error, PollFlags::OUT)?,
            }
        }
        Ok(())
    }

    /// Receives until it is full.
    ///
    /// # Errors
    /// The other end is gone.
    pub fn receive(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        let mut have = 0;
        while have < bytes.len() {
            match self.stream.read(&mut bytes[have..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    self.idler.step(true);
                    have += count;
                }
                Err(error) => self.wait(error, PollFlags::IN)?,
            }
        }
        Ok(())
    }

    fn wait(&mut self, error: io::Error, flags: PollFlags) -> io::Result<()> {
        if error.kind() != io::ErrorKind::WouldBlock {
            return Err(error);
        }
        if self.idler.step(false) == Step::Sleep {
            let block = Timespec::try_from(BLOCK).ok();
            poll(&mut [PollFd::new(&self.stream, flags)], block.as_ref())?;
        }
        Ok(())
    }
}

/// Sends `frames` messages of `size` bytes over a loopback socket, in one direction.
///
/// # Errors
/// The kernel refuses.
pub fn stream(size: usize, frames: usize, idle: Idle) -> io::Result<Cost> {
    let (here, there) = pair::sockets()?;
    let (sent, received) = pair::run(
        move |start| {
            let frame = vec![1; size];
            moves(start, here, idle, frames, |socket| socket.write_all(&frame), |s| s.send(&frame))
        },
        move |start| {
            let mut bytes = vec![1; size];
            let mut again = bytes.clone();
            moves(
                start,
                there,
                idle,
                frames,
                |socket| socket.read_exact(&mut bytes),
                |socket| socket.receive(&mut again),
            )
        },
    )?;
    Ok(later(sent, received))
}

/// Under `adaptive` a blocking call is the cheapest way to move bytes in bulk, so that is the bar.
fn moves(
    start: Start,
    mut stream: TcpStream,
    idle: Idle,
    frames: usize,
    mut blocking: impl FnMut(&mut TcpStream) -> io::Result<()>,
    mut polling: impl FnMut(&mut Socket) -> io::Result<()>,
) -> io::Result<Cost> {
    if idle == Idle::Adaptive {
        let clock = start.ready()?;
        (0..frames).try_for_each(|_| blocking(&mut stream))?;
        return Ok(clock.stop());
    }
    let mut socket = Socket::new(stream, idle)?;
    let clock = start.ready()?;
    (0..frames).try_for_each(|_| polling(&mut socket))?;
    Ok(clock.stop())
}

/// The cost of two threads that began together.
pub fn later(one: Cost, two: Cost) -> Cost {
    let cpu_seconds = one.cpu_seconds.max(two.cpu_seconds);
    Cost { seconds: one.seconds.max(two.seconds), cpu_seconds }
}

/// One copy of each frame: the least that it takes to get bytes from one place to another.
pub fn copies(size: usize, frames: usize) -> Cost {
    let source = vec![1u8; size];
    let mut target = source.clone();
    let clock = Clock::now();
    for _ in 0..frames {
        std::hint::black_box(&mut target).copy_from_slice(std::hint::black_box(&source));
    }
    clock.stop()
}

/// Seconds of each of `trips` there-and-backs of `size` bytes over a loopback socket.
///
/// # Errors
/// The kernel refuses.
pub fn socket_trips(size: usize, trips: usize, idle: Idle) -> io::Result<Vec<f64>> {
    let (here, there) = pair::sockets()?;
    let (seconds, ()) = pair::run(
        move |start| {
            let mut socket = Socket::new(here, idle)?;
            let mut bytes = vec![1; size];
            start.ready()?;
            let mut trip = |_| {
                let begin = Instant::now();
                socket.send(&bytes)?;
                socket.receive(&mut bytes)?;
                Ok(begin.elapsed().as_secs_f64())
            };
            (0..trips).map(&mut trip).collect::<io::Result<Vec<f64>>>()
        },
        move |start| {
            let mut socket = Socket::new(there, idle)?;
            let mut bytes = vec![1; size];
            start.ready()?;
            (0..trips).try_for_each(|_| {
                socket.receive(&mut bytes)?;
                socket.send(&bytes)
            })
        },
    )?;
    Ok(seconds)
}

/// Memory of two threads that take turns.
struct Table {
    bytes: Mutex<Vec<u8>>,
    /// Turns that are over; even ones are the first thread's.
    turns: AtomicUsize,
    threads: [OnceLock<Thread>; 2],
    idle: Idle,
}

impl Table {
    /// Waits for this turn, copies the bytes out and back in, and hands over.
    fn turn(&self, turn: usize, own: &mut [u8], idler: &mut Idler) -> io::Result<()> {
        while self.turns.load(Ordering::Acquire) < turn {
            if idler.step(false) == Step::Sleep {
                std::thread::park_timeout(BLOCK);
            }
        }
        idler.step(true);
        // Never waited for: it is this side's turn.
        let mut bytes = self.bytes.lock().map_err(|_| io::Error::other("a thread panicked"))?;
        own.copy_from_slice(&bytes);
        bytes.copy_from_slice(std::hint::black_box(own));
        drop(bytes);
        self.turns.store(turn + 1, Ordering::Release);
        if self.idle == Idle::Adaptive
            && let Some(other) = self.threads[(turn + 1) % 2].get()
        {
            other.unpark();
        }
        Ok(())
    }
}

/// As [`socket_trips`], through memory of both threads: each copies the message out, and one in.
///
/// # Errors
/// A thread failed.
pub fn memory_trips(size: usize, trips: usize, idle: Idle) -> io::Result<Vec<f64>> {
    let bytes = Mutex::new(vec![1; size]);
    let table = Table { bytes, turns: AtomicUsize::new(0), threads: Default::default(), idle };
    let table = &table;
    let side = move |start: Start, side: usize| {
        let (mut own, mut idler) = (vec![1; size], idler(idle));
        let _ = table.threads[side].set(std::thread::current());
        start.ready()?;
        let mut seconds = Vec::with_capacity(trips);
        let mut begin = Instant::now();
        for trip in 0..trips {
            table.turn(2 * trip + side, &mut own, &mut idler)?;
            seconds.push(begin.elapsed().as_secs_f64());
            begin = Instant::now();
        }
        Ok(seconds)
    };
    let (seconds, _) = pair::run(move |start| side(start, 0), move |start| side(start, 1))?;
    Ok(seconds)
}
