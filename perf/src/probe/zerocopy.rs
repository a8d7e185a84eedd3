//! Zero-copy sends beside plain ones, by size, over loopback: what both ends take, and how many of
//! the zero-copy sends the kernel copied after all.

use super::ring::{Ring, Setup, moved, receive};
use super::{Effort, Probe, count, in_turn, stream};
use crate::pair::{Cost, Start};
use crate::report;
use io_uring::{cqueue, opcode, types};
use serde_json::json;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicUsize, Ordering};

/// See the [module](self).
pub const PROBE: Probe = Probe {
    name: "zerocopy",
    asks: "whether the kernel sends our pages as they are, and what that costs both ends",
    columns: &["send", "size_bytes", "gbps", "cpu_s_per_gb", "sends", "copied", "gbps_spread"],
    measure,
};

const SIZES: [usize; 5] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// Messages whose memory the kernel may still hold while the next is sent.
const WINDOW: usize = 8;
/// Asks the kernel to say whether it copied (`IORING_SEND_ZC_REPORT_USAGE`).
const REPORT_USAGE: u16 = 8;
/// Its answer (`IORING_NOTIF_USAGE_ZC_COPIED`), the sign bit of the result.
const COPIED: i32 = i32::MIN;

/// Zero-copy sends of one variant, and how many of them were copied.
#[derive(Default)]
struct Copies {
    sends: AtomicUsize,
    copied: AtomicUsize,
}

fn measure(effort: Effort) -> io::Result<Vec<report::Fields>> {
    let mut rows = Vec::new();
    for size in SIZES {
        let total = count(effort, size) * size;
        let effort = Effort { bytes: total, ..effort };
        rows.extend(in_turn(
            effort,
            &[false, true],
            |&is_zero_copy, copies: &mut Copies| {
                let copies = &*copies;
                let sender =
                    move |socket, start| send(socket, start, size, total, is_zero_copy, copies);
                stream(sender, receive(Setup::Deferred, size, total))
            },
            |is_zero_copy, copies| {
                report::fields(json!({
                    "send": if *is_zero_copy { "zero-copy" } else { "plain" },
                    "size_bytes": size,
                    "sends": copies.sends.load(Ordering::Relaxed),
                    "copied": copies.copied.load(Ordering::Relaxed),
                }))
            },
        )?);
    }
    Ok(rows)
}

fn send(
    socket: TcpStream,
    start: Start,
    size: usize,
    total: usize,
    is_zero_copy: bool,
    copies: &Copies,
) -> io::Result<Cost> {
    // The memory comes first, so that the ring goes first.
    let messages = vec![1u8; size * WINDOW];
    let mut ring = Ring::new(Setup::Deferred)?;
    let fd = types::Fd(socket.as_raw_fd());
    let clock = start.ready()?;
    let (mut done, mut held) = (0, 0);
    while done < total {
        let at = done % messages.len();
        let rest = u32::try_from(size - at % size).unwrap_or(u32::MAX);
        let from = messages[at..].as_ptr();
        let entry = if is_zero_copy {
            opcode::SendZc::new(fd, from, rest).zc_flags(REPORT_USAGE).build()
        } else {
            opcode::Send::new(fd, from, rest).build()
        };
        // SAFETY: `messages` outlives the ring's work: all reports are waited for below, and the
        // length ends within it. Nobody writes to it.
        unsafe { ring.push(&entry)? };
        let mut is_sent = false;
        while !is_sent || held >= WINDOW {
            if let Some(count) = reap(&mut ring, &mut held, copies)? {
                done += count;
                is_sent = true;
            }
        }
    }
    while held > 0 {
        reap(&mut ring, &mut held, copies)?;
    }
    Ok(clock.stop())
}

/// Takes the next completion: the bytes of a send, or the news that the kernel let go of one.
fn reap(ring: &mut Ring, held: &mut usize, copies: &Copies) -> io::Result<Option<usize>> {
    let completion = ring.next()?;
    if cqueue::notif(completion.flags()) {
        *held -= 1;
        copies.sends.fetch_add(1, Ordering::Relaxed);
        let copied = completion.result() & COPIED != 0;
        copies.copied.fetch_add(usize::from(copied), Ordering::Relaxed);
        return Ok(None);
    }
    *held += usize::from(cqueue::more(completion.flags()));
    moved(&completion).map(Some)
}
