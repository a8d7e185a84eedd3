//! Receiving into memory that is registered with the ring beside receiving into any memory.

use super::ring::{Ring, Setup, receive};
use super::{Effort, Probe, count, in_turn, send_plainly, stream};
use crate::pair::{Cost, Start};
use crate::report;
use io_uring::{opcode, types};
use serde_json::json;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;

/// See the [module](self).
pub const PROBE: Probe = Probe {
    name: "registered",
    asks: "whether receiving into registered memory is cheaper",
    columns: &["receive", "size_bytes", "gbps", "cpu_s_per_gb", "gbps_spread"],
    measure,
};

const SIZES: [usize; 4] = [4 << 10, 64 << 10, 256 << 10, 1 << 20];

fn measure(effort: Effort) -> io::Result<Vec<report::Fields>> {
    let mut rows = Vec::new();
    for size in SIZES {
        let total = count(effort, size) * size;
        let effort = Effort { bytes: total, ..effort };
        rows.extend(in_turn(
            effort,
            &[false, true],
            |&is_fixed, (): &mut ()| {
                let sender = send_plainly(size, total / size);
                if is_fixed {
                    stream(sender, |socket, start| receive_fixed(socket, start, size, total))
                } else {
                    stream(sender, receive(Setup::Deferred, size, total))
                }
            },
            |is_fixed, ()| {
                let receive = if *is_fixed { "registered" } else { "plain" };
                report::fields(json!({ "receive": receive, "size_bytes": size }))
            },
        )?);
    }
    Ok(rows)
}

fn receive_fixed(socket: TcpStream, start: Start, size: usize, total: usize) -> io::Result<Cost> {
    let mut memory = vec![0u8; size];
    let mut ring = Ring::new(Setup::Deferred)?;
    let whole = libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: size };
    // SAFETY: the ring is dropped before `memory`, which does not move.
    unsafe { ring.0.submitter().register_buffers(&[whole])? };
    let fd = types::Fd(socket.as_raw_fd());
    let clock = start.ready()?;
    let mut have = 0;
    while have < total {
        let at = have % size;
        let rest = u32::try_from(size - at).unwrap_or(u32::MAX);
        let entry = opcode::ReadFixed::new(fd, memory[at..].as_mut_ptr(), rest, 0).build();
        // SAFETY: the registered memory outlives the call, and the length ends within it.
        have += unsafe { ring.call(&entry)? };
    }
    Ok(clock.stop())
}
