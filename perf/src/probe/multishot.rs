//! Receiving by one operation at a time, straight to where the bytes belong, beside operations that
//! stay and pick buffers of a provided ring (multishot, and multishot in bundles). Those buffers
//! are not where the bytes belong, so they are copied there, as a data plane would have to.

use super::ring::{Ring, Setup, moved, receive};
use super::{Effort, Probe, count, in_turn, memory, send_plainly, stream};
use crate::pair::{Cost, Start};
use crate::report;
use io_uring::{cqueue, opcode, types};
use serde_json::json;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU16, Ordering};

/// See the [module](self).
pub const PROBE: Probe = Probe {
    name: "multishot",
    asks: "whether receives that stay, with buffers that the kernel picks, are worth the copy",
    columns: &["receive", "size_bytes", "gbps", "cpu_s_per_gb", "completions", "gbps_spread"],
    measure,
};

const SIZES: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];
const BUFFERS: u16 = 64;
const BUFFER_BYTES: usize = 32 << 10;
const GROUP: u16 = 0;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Single,
    Multishot,
    Bundle,
}

fn measure(effort: Effort) -> io::Result<Vec<report::Fields>> {
    let mut rows = Vec::new();
    for size in SIZES {
        let total = count(effort, size) * size;
        let effort = Effort { bytes: total, ..effort };
        rows.extend(in_turn(
            effort,
            &[Way::Single, Way::Multishot, Way::Bundle],
            |&way, completions: &mut usize| {
                let sender = send_plainly(size, total / size);
                if way == Way::Single {
                    stream(sender, receive(Setup::Deferred, size, total))
                } else {
                    stream(sender, |socket, start| {
                        receive_staying(socket, start, total, way, completions)
                    })
                }
            },
            // Over all rounds.
            |way, completions| {
                let receive = match way {
                    Way::Single => "single",
                    Way::Multishot => "multishot",
                    Way::Bundle => "bundle",
                };
                let completions = (*way != Way::Single).then_some(*completions);
                report::fields(json!({
                    "receive": receive, "size_bytes": size, "completions": completions,
                }))
            },
        )?);
    }
    Ok(rows)
}

/// A ring of buffers that the kernel picks from, in the order in which they were given.
struct Provided {
    /// The kernel reads the entries and the tail from here.
    entries: memory::Pages,
    bytes: Vec<u8>,
    tail: u16,
}

impl Provided {
    fn new() -> io::Result<Provided> {
        let size = usize::from(BUFFERS) * size_of::<types::BufRingEntry>();
        let entries = memory::Pages::new(size, false)?;
        let bytes = vec![0; usize::from(BUFFERS) * BUFFER_BYTES];
        let mut provided = Provided { entries, bytes, tail: 0 };
        (0..BUFFERS).for_each(|buffer| provided.give(buffer));
        Ok(provided)
    }

    /// # Safety
    /// The ring is dropped before this value.
    unsafe fn register(&self, ring: &Ring) -> io::Result<()> {
        let address = self.entries.pointer() as u64;
        // SAFETY: the pages hold so many entries and outlive the ring, as the caller promises.
        unsafe { ring.0.submitter().register_buf_ring_with_flags(address, BUFFERS, GROUP, 0) }
    }

    fn give(&mut self, buffer: u16) {
        let base = self.entries.pointer().cast::<types::BufRingEntry>();
        let from = &self.bytes[usize::from(buffer) * BUFFER_BYTES..][..BUFFER_BYTES];
        // SAFETY: the index lies within the entries, and only this thread writes to them.
        let entry = unsafe { &mut *base.add(usize::from(self.tail % BUFFERS)) };
        entry.set_addr(from.as_ptr() as u64);
        entry.set_len(u32::try_from(BUFFER_BYTES).unwrap_or(u32::MAX));
        entry.set_bid(buffer);
        self.tail = self.tail.wrapping_add(1);
        // SAFETY: the tail lies in the first entry, aligned for a u16; the kernel reads it, and
        // this thread alone writes it. Release: the kernel sees the entry before the tail that
        // covers it.
        unsafe {
            let tail = types::BufRingEntry::tail(base).cast::<AtomicU16>();
            (*tail).store(self.tail, Ordering::Release);
        }
    }
}

fn receive_staying(
    socket: TcpStream,
    start: Start,
    total: usize,
    way: Way,
    completions: &mut usize,
) -> io::Result<Cost> {
    let mut provided = Provided::new()?;
    let mut ring = Ring::new(Setup::Deferred)?;
    // SAFETY: locals are dropped in the reverse order: the ring before the buffers.
    unsafe { provided.register(&ring)? };
    let mut target = vec![0u8; usize::from(BUFFERS) * BUFFER_BYTES];
    let fd = types::Fd(socket.as_raw_fd());
    let clock = start.ready()?;
    let (mut have, mut is_armed, mut next) = (0, false, 0);
    while have < total {
        if !is_armed {
            let entry = match way {
                Way::Bundle => opcode::RecvMultiBundle::new(fd, GROUP).build(),
                _ => opcode::RecvMulti::new(fd, GROUP).build(),
            };
            // SAFETY: the operation names no memory but that of the group, which outlives it.
            unsafe { ring.push(&entry)? };
        }
        let completion = ring.next()?;
        is_armed = cqueue::more(completion.flags());
        if completion.result() == -libc::ENOBUFS {
            continue;
        }
        let mut rest = moved(&completion)?;
        have += rest;
        *completions += 1;
        // A bundle fills the buffers in the order in which they were given, from this one on.
        let mut buffer = cqueue::buffer_select(completion.flags()).unwrap_or(next);
        while rest > 0 {
            let length = rest.min(BUFFER_BYTES);
            let at = usize::from(buffer) * BUFFER_BYTES;
            target[at..][..length].copy_from_slice(&provided.bytes[at..][..length]);
            provided.give(buffer);
            rest -= length;
            buffer = (buffer + 1) % BUFFERS;
        }
        next = buffer;
    }
    std::hint::black_box(&target);
    Ok(clock.stop())
}
