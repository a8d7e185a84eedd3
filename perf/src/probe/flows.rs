//! One, two and four connections between the same two threads, over which messages take turns.

#![forbid(unsafe_code)]

use super::{Effort, Probe, count, in_turn};
use crate::pair::{self, Cost, Start};
use crate::report;
use rustix::event::{PollFd, PollFlags, poll};
use serde_json::json;
use std::io::{self, Read, Write};
use std::net::TcpStream;

/// See the [module](self).
pub const PROBE: Probe = Probe {
    name: "flows",
    asks: "whether several connections for each lane move more than one",
    columns: &["flows", "gbps", "cpu_s_per_gb", "gbps_spread"],
    measure,
};

const FLOWS: [usize; 3] = [1, 2, 4];
const MESSAGE_BYTES: usize = 1 << 20;

fn measure(effort: Effort) -> io::Result<Vec<report::Fields>> {
    let messages = count(effort, MESSAGE_BYTES).next_multiple_of(FLOWS[2]);
    let effort = Effort { bytes: messages * MESSAGE_BYTES, ..effort };
    let once = |&flows: &usize, (): &mut ()| {
        let pairs = (0..flows).map(|_| pair::sockets()).collect::<io::Result<Vec<_>>>()?;
        let (here, there): (Vec<TcpStream>, Vec<TcpStream>) = pairs.into_iter().unzip();
        let each = messages / flows * MESSAGE_BYTES;
        let (sent, received) = pair::run(
            move |start| {
                let message = vec![1u8; MESSAGE_BYTES];
                turns(start, &here, each, PollFlags::OUT, |mut socket, rest| {
                    socket.write(&message[..rest.min(MESSAGE_BYTES)])
                })
            },
            move |start| {
                let mut message = vec![1u8; MESSAGE_BYTES];
                turns(start, &there, each, PollFlags::IN, |mut socket, rest| {
                    socket.read(&mut message[..rest.min(MESSAGE_BYTES)])
                })
            },
        )?;
        Ok(crate::bare::later(sent, received))
    };
    in_turn(effort, &FLOWS, once, |flows, ()| report::fields(json!({ "flows": flows })))
}

/// Moves so many bytes over each socket, as far as each goes, and sleeps when none does.
fn turns(
    start: Start,
    sockets: &[TcpStream],
    each: usize,
    flags: PollFlags,
    mut once: impl FnMut(&TcpStream, usize) -> io::Result<usize>,
) -> io::Result<Cost> {
    sockets.iter().try_for_each(|socket| socket.set_nonblocking(true))?;
    let mut rest = vec![each; sockets.len()];
    let clock = start.ready()?;
    while rest.iter().any(|&rest| rest > 0) {
        let mut moved = 0;
        for (socket, rest) in sockets.iter().zip(&mut rest).filter(|(_, rest)| **rest > 0) {
            match once(socket, *rest) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    moved += count;
                    *rest -= count;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        if moved == 0 {
            let open = sockets.iter().zip(&rest).filter(|(_, rest)| **rest > 0);
            let mut fds: Vec<PollFd> = open.map(|(socket, _)| PollFd::new(socket, flags)).collect();
            poll(&mut fds, None)?;
        }
    }
    Ok(clock.stop())
}
