//! One io_uring for each thread, set up in three ways: as it comes; with completions run by the
//! thread that asks for them (`DEFER_TASKRUN`, `SINGLE_ISSUER`), as the engine does; and with a
//! kernel thread that polls the submissions (`SQPOLL`).

use super::{Effort, Probe, count, in_turn, stream};
use crate::pair::{Cost, Start};
use crate::report;
use io_uring::squeue::Entry;
use io_uring::{IoUring, cqueue, opcode, types};
use serde_json::json;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;

/// See the [module](self).
pub const PROBE: Probe = Probe {
    name: "ring",
    asks: "how a ring is best set up: one stream of messages, one operation at a time",
    columns: &["setup", "size_bytes", "gbps", "cpu_s_per_gb", "gbps_spread"],
    measure,
};

const SIZES: [usize; 2] = [4 << 10, 256 << 10];
/// Milliseconds that the kernel's thread polls on before it sleeps.
const SQPOLL_IDLE_MS: u32 = 10;

/// How a ring is set up.
#[derive(Clone, Copy, Debug)]
pub enum Setup {
    /// No flags.
    Plain,
    /// Completions run when the one thread asks for them.
    Deferred,
    /// A thread of the kernel takes what is submitted.
    Polled,
}

/// A ring that does one thing at a time.
pub struct Ring(pub IoUring);

impl Ring {
    /// Sets one up.
    pub fn new(setup: Setup) -> io::Result<Ring> {
        let mut builder = IoUring::builder();
        match setup {
            Setup::Plain => {}
            Setup::Deferred => {
                builder.setup_single_issuer().setup_defer_taskrun();
            }
            Setup::Polled => {
                builder.setup_sqpoll(SQPOLL_IDLE_MS);
            }
        }
        Ok(Ring(builder.build(64)?))
    }

    /// Submits an operation.
    ///
    /// # Safety
    /// What the operation names stays valid until its completion.
    pub unsafe fn push(&mut self, entry: &Entry) -> io::Result<()> {
        // SAFETY: the caller answers for the operation's memory.
        unsafe { self.0.submission().push(entry) }
            .map_err(|_| io::Error::other("the submission queue is full"))
    }

    /// Waits for the next completion.
    pub fn next(&mut self) -> io::Result<cqueue::Entry> {
        loop {
            if let Some(entry) = self.0.completion().next() {
                return Ok(entry);
            }
            match self.0.submit_and_wait(1) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => drop(other?),
            }
        }
    }

    /// Submits an operation and waits for it. Returns the bytes that it moved.
    ///
    /// # Safety
    /// What the operation names is valid until this returns.
    pub unsafe fn call(&mut self, entry: &Entry) -> io::Result<usize> {
        // SAFETY: the caller's promise covers the time until the completion, which is waited for.
        unsafe { self.push(entry)? };
        moved(&self.next()?)
    }
}

/// Bytes that an operation moved; an end of the stream is an error.
pub fn moved(entry: &cqueue::Entry) -> io::Result<usize> {
    match usize::try_from(entry.result()) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(count) => Ok(count),
        Err(_) => Err(io::Error::from_raw_os_error(-entry.result())),
    }
}

/// Receives so many bytes into messages of this size.
pub fn receive(
    setup: Setup,
    size: usize,
    total: usize,
) -> impl FnOnce(TcpStream, Start) -> io::Result<Cost> {
    move |socket, start| {
        // The memory comes first, so that the ring goes first.
        let mut message = vec![0u8; size];
        let mut ring = Ring::new(setup)?;
        let fd = types::Fd(socket.as_raw_fd());
        let clock = start.ready()?;
        let mut have = 0;
        while have < total {
            let at = have % size;
            let rest = u32::try_from(size - at).unwrap_or(u32::MAX);
            let entry = opcode::Recv::new(fd, message[at..].as_mut_ptr(), rest).build();
            // SAFETY: `message` outlives the call, and the length ends within it.
            have += unsafe { ring.call(&entry)? };
        }
        Ok(clock.stop())
    }
}

fn send(
    setup: Setup,
    size: usize,
    total: usize,
) -> impl FnOnce(TcpStream, Start) -> io::Result<Cost> {
    move |socket, start| {
        let message = vec![1u8; size];
        let mut ring = Ring::new(setup)?;
        let fd = types::Fd(socket.as_raw_fd());
        let clock = start.ready()?;
        let mut done = 0;
        while done < total {
            let at = done % size;
            let rest = u32::try_from(size - at).unwrap_or(u32::MAX);
            let entry = opcode::Send::new(fd, message[at..].as_ptr(), rest).build();
            // SAFETY: `message` outlives the call, and the length ends within it.
            done += unsafe { ring.call(&entry)? };
        }
        Ok(clock.stop())
    }
}

fn measure(effort: Effort) -> io::Result<Vec<report::Fields>> {
    let mut rows = Vec::new();
    for size in SIZES {
        let setups = [Setup::Plain, Setup::Deferred, Setup::Polled];
        let total = count(effort, size) * size;
        let effort = Effort { bytes: total, ..effort };
        rows.extend(in_turn(
            effort,
            &setups,
            |&setup, (): &mut ()| stream(send(setup, size, total), receive(setup, size, total)),
            |setup, ()| {
                let setup = format!("{setup:?}").to_lowercase();
                report::fields(json!({ "setup": setup, "size_bytes": size }))
            },
        )?);
    }
    Ok(rows)
}
