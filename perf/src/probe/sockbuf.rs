//! Sizes of socket buffers, and congestion controls, over loopback.

#![forbid(unsafe_code)]

use super::{Effort, Probe, count, in_turn};
use crate::pair;
use crate::report;
use rustix::net::sockopt;
use serde_json::json;
use std::io::{self, Read, Write};
use std::net::TcpStream;

/// See the [module](self).
pub const PROBE: Probe = Probe {
    name: "sockbuf",
    asks: "which socket buffers and which congestion control move bytes best over loopback",
    columns: &["buffer_bytes", "congestion", "gbps", "cpu_s_per_gb", "gbps_spread"],
    measure,
};

const MESSAGE_BYTES: usize = 1 << 20;
/// `None` leaves the kernel to choose and to grow them.
const BUFFERS: [Option<usize>; 6] =
    [None, Some(64 << 10), Some(256 << 10), Some(1 << 20), Some(4 << 20), Some(16 << 20)];

struct Variant {
    buffer: Option<usize>,
    congestion: Option<String>,
}

fn measure(effort: Effort) -> io::Result<Vec<report::Fields>> {
    let path = "/proc/sys/net/ipv4/tcp_available_congestion_control";
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let buffers = BUFFERS.map(|buffer| Variant { buffer, congestion: None });
    let controls = text
        .split_whitespace()
        .map(|name| Variant { buffer: None, congestion: Some(name.to_owned()) });
    let variants: Vec<Variant> = buffers.into_iter().chain(controls).collect();
    let messages = count(effort, MESSAGE_BYTES);
    let effort = Effort { bytes: messages * MESSAGE_BYTES, ..effort };
    let once = |variant: &Variant, (): &mut ()| {
        let (mut here, mut there) = pair::sockets()?;
        variant.apply(&here)?;
        variant.apply(&there)?;
        let (sent, received) = pair::run(
            move |start| {
                let message = vec![1; MESSAGE_BYTES];
                let clock = start.ready()?;
                (0..messages).try_for_each(|_| here.write_all(&message))?;
                Ok(clock.stop())
            },
            move |start| {
                let mut message = vec![1; MESSAGE_BYTES];
                let clock = start.ready()?;
                (0..messages).try_for_each(|_| there.read_exact(&mut message))?;
                Ok(clock.stop())
            },
        )?;
        Ok(crate::bare::later(sent, received))
    };
    in_turn(effort, &variants, once, |variant, ()| {
        let buffer = variant.buffer.map_or("kernel's".to_owned(), |bytes| bytes.to_string());
        let congestion = variant.congestion.as_deref().unwrap_or("default");
        report::fields(json!({ "buffer_bytes": buffer, "congestion": congestion }))
    })
}

impl Variant {
    fn apply(&self, socket: &TcpStream) -> io::Result<()> {
        if let Some(bytes) = self.buffer {
            // The kernel takes at most what its limits allow, without an error.
            sockopt::set_socket_send_buffer_size(socket, bytes)?;
            sockopt::set_socket_recv_buffer_size(socket, bytes)?;
        }
        if let Some(name) = &self.congestion {
            sockopt::set_tcp_congestion(socket, name)?;
        }
        Ok(())
    }
}
