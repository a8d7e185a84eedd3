//! Two threads that begin together, and what they cost from then on.
//!
//! Invariant: what an end sets up before it is ready is not measured; a thread whose other one
//! failed fails as well instead of waiting.

#![forbid(unsafe_code)]

use crate::sample;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

/// What a stretch of work cost.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Time.
    pub seconds: f64,
    /// Processor time of the whole process, the kernel's part included.
    pub cpu_seconds: f64,
}

/// One thread's side of the start.
pub struct Start {
    ready: Sender<()>,
    other_ready: Receiver<()>,
}

/// A stretch that is being measured.
pub struct Clock {
    start: Instant,
    cpu: f64,
}

impl Start {
    /// Waits until both threads have set up.
    ///
    /// # Errors
    /// The other one failed to.
    pub fn ready(&self) -> io::Result<Clock> {
        let gone = || io::Error::other("the other thread failed to set up");
        self.ready.send(()).map_err(|_| gone())?;
        self.other_ready.recv().map_err(|_| gone())?;
        Ok(Clock::now())
    }
}

impl Clock {
    /// Begins a stretch.
    pub fn now() -> Clock {
        Clock { start: Instant::now(), cpu: sample::cpu_seconds() }
    }

    /// What it cost until now.
    pub fn stop(&self) -> Cost {
        let seconds = self.start.elapsed().as_secs_f64();
        Cost { seconds, cpu_seconds: sample::cpu_seconds() - self.cpu }
    }
}

/// Runs both to their ends and returns what they returned.
///
/// # Errors
/// What either says.
pub fn run<A: Send, B: Send>(
    one: impl FnOnce(Start) -> io::Result<A> + Send,
    two: impl FnOnce(Start) -> io::Result<B> + Send,
) -> io::Result<(A, B)> {
    let (here_ready, here_seen) = channel();
    let (there_ready, there_seen) = channel();
    let here = Start { ready: here_ready, other_ready: there_seen };
    let there = Start { ready: there_ready, other_ready: here_seen };
    std::thread::scope(|scope| {
        let other = scope.spawn(move || two(there));
        let first = one(here);
        let other = other.join().map_err(|_| io::Error::other("the other thread panicked"))?;
        // A thread that failed takes the other one down; its own error is the one that says why.
        match (first, other) {
            (Ok(first), other) => Ok((first, other?)),
            (Err(error), Ok(_)) => Err(error),
            (Err(first), Err(other)) => Err(io::Error::other(format!("{first}; {other}"))),
        }
    })
}

/// Two ends of a connection over loopback, without delays for small messages.
///
/// # Errors
/// The kernel refuses.
pub fn sockets() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let here = TcpStream::connect(listener.local_addr()?)?;
    let (there, _) = listener.accept()?;
    here.set_nodelay(true)?;
    there.set_nodelay(true)?;
    Ok((here, there))
}
