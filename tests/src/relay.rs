//! A box in the middle: a relay between a dialer and a listener of a job, which may change what
//! passes. TCP's checksums are right on both of its sides, as they are behind a device that spoils
//! bytes in its own memory, or that somebody else owns.

use bps_engine::transport::tcp::sealed::{PREFIX_BYTES, TAG_BYTES};
use serde_json::Value;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Which way bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// From who dialed.
    ToListener,
    /// To who dialed.
    ToDialer,
}

/// What a relay does to the bytes of one direction of a connection: it gets what was read, and
/// leaves what is to be written, and says whether the direction goes on or ends there.
pub type Meddler = Box<dyn FnMut(&mut Vec<u8>) -> ControlFlow<()> + Send>;

/// A running relay; it takes no more connections once it is dropped.
pub struct Relay {
    address: SocketAddr,
    stopped: Arc<AtomicBool>,
}

impl Relay {
    /// Relays what is dialed at a port of `ip` to `to`. `meddler` is asked for each direction of
    /// each connection.
    ///
    /// # Panics
    /// When the address has no free port.
    #[must_use]
    pub fn start(
        ip: IpAddr,
        to: SocketAddr,
        meddler: impl Fn(Way) -> Meddler + Send + 'static,
    ) -> Relay {
        let listener = TcpListener::bind((ip, 0)).expect("a free port");
        let address = listener.local_addr().expect("an address");
        let stopped = Arc::new(AtomicBool::new(false));
        let stops = Arc::clone(&stopped);
        std::thread::spawn(move || {
            for dialer in listener.incoming() {
                if stops.load(Ordering::Acquire) {
                    return;
                }
                let (Ok(dialer), Ok(other)) = (dialer, TcpStream::connect(to)) else { continue };
                let (back, forth) = (other.try_clone(), dialer.try_clone());
                let (back, forth) = (back.expect("a descriptor"), forth.expect("a descriptor"));
                let (there, here) = (meddler(Way::ToListener), meddler(Way::ToDialer));
                std::thread::spawn(move || pass(dialer, other, there));
                std::thread::spawn(move || pass(back, forth, here));
            }
        });
        Relay { address, stopped }
    }

    /// Where to dial.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Release);
        // Its thread sleeps until somebody dials.
        let _ = TcpStream::connect(self.address);
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, mut meddle: Meddler) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => {
                let mut bytes = buffer[..count].to_vec();
                let goes_on = meddle(&mut bytes);
                if to.write_all(&bytes).is_err() || goes_on.is_break() {
                    break;
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    // The end of one direction is passed on; the other goes on by itself.
    let _ = to.shutdown(Shutdown::Write);
    // A socket that is closed over bytes that nobody has read resets the connection, and its sender
    // would see that instead of what the receiver did.
    while from.read(&mut buffer).is_ok_and(|count| count > 0) {}
}

/// Changes nothing.
#[must_use]
pub fn honest() -> Meddler {
    Box::new(|_| ControlFlow::Continue(()))
}

/// Flips a bit in the middle of the payload of the `frame`th frame that has one, counted from 0, in
/// a direction of a lane whose handshake has so many bytes.
#[must_use]
pub fn flip_payload(handshake_bytes: usize, frame: usize) -> Meddler {
    const HEADER_BYTES: usize = bps_engine::limits::HEADER_BYTES;
    let (mut handshake_left, mut header, mut payload_left, mut frames) =
        (handshake_bytes, Vec::new(), 0_usize, 0);
    let mut flip_at = None;
    Box::new(move |bytes| {
        for byte in bytes {
            if handshake_left > 0 {
                handshake_left -= 1;
            } else if payload_left > 0 {
                if flip_at == Some(payload_left) {
                    *byte ^= 0x10;
                    flip_at = None;
                }
                payload_left -= 1;
            } else {
                header.push(*byte);
                if header.len() == HEADER_BYTES {
                    let length = [header[40], header[41], header[42], header[43]];
                    payload_left = u32::from_le_bytes(length) as usize;
                    header.clear();
                    if payload_left > 0 {
                        flip_at = (frames == frame).then_some(payload_left.div_ceil(2));
                        frames += 1;
                    }
                }
            }
        }
        ControlFlow::Continue(())
    })
}

/// Rewrites the messages in a direction of a control connection that is not encrypted, behind a
/// handshake of so many bytes.
#[must_use]
pub fn rewrite(
    handshake_bytes: usize,
    mut change: impl FnMut(&mut Value) + Send + 'static,
) -> Meddler {
    let (mut handshake_left, mut unread) = (handshake_bytes, Vec::new());
    Box::new(move |bytes| {
        let passing = handshake_left.min(bytes.len());
        handshake_left -= passing;
        unread.extend(bytes.drain(passing..));
        while let Some(prefix) = unread.first_chunk::<4>() {
            let end = 4 + u32::from_le_bytes(*prefix) as usize;
            if unread.len() < end {
                break;
            }
            let Ok(mut message) = serde_json::from_slice::<Value>(&unread[4..end]) else {
                // It is not for us to read.
                bytes.append(&mut unread);
                break;
            };
            change(&mut message);
            let text = serde_json::to_vec(&message).expect("it was read");
            let length = u32::try_from(text.len()).expect("a short message");
            bytes.extend(length.to_le_bytes());
            bytes.extend(text);
            unread.drain(..end);
        }
        ControlFlow::Continue(())
    })
}

/// An address of this machine that is not loopback, if it has one.
#[must_use]
pub fn own_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    // Only asks the routing table: nothing is sent. The address is for documentation.
    socket.connect("192.0.2.1:9").ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified() && TcpListener::bind((ip, 0)).is_ok()).then_some(ip)
}

/// Changes the first record of which, by its number from 0, `is_it` says so, in a direction of a
/// control connection that is encrypted, behind so many bytes of handshake and greeting. `change`
/// gets it with its length.
#[must_use]
pub fn meddle_with_record(
    first_bytes: usize,
    is_it: impl Fn(usize) -> bool + Send + 'static,
    change: impl Fn(&mut Vec<u8>) + Send + 'static,
) -> Meddler {
    let length = |bytes: &[u8]| Some(2 + usize::from(u16::from_le_bytes(*bytes.first_chunk()?)));
    let mut is_done = false;
    records(first_bytes, length, move |number, mut whole, bytes| {
        if !is_done && is_it(number) {
            is_done = true;
            change(&mut whole);
        }
        bytes.append(&mut whole);
        ControlFlow::Continue(())
    })
}

/// Gives `pass` each record of a direction of an encrypted lane behind its handshake, with its
/// number, and what is to be written: `pass` puts it there, or not.
#[must_use]
pub fn meddle_with_lane(
    handshake_bytes: usize,
    pass: impl FnMut(usize, Vec<u8>, &mut Vec<u8>) -> ControlFlow<()> + Send + 'static,
) -> Meddler {
    let length = |bytes: &[u8]| {
        let plain = u32::from_le_bytes(*bytes.first_chunk()?);
        Some(PREFIX_BYTES + plain as usize + TAG_BYTES)
    };
    records(handshake_bytes, length, pass)
}

/// The same for a control connection behind its handshake and greeting: `pass` gets its records, or
/// its messages where the job has no key.
#[must_use]
pub fn meddle_with_control(
    first_bytes: usize,
    is_sealed: bool,
    pass: impl FnMut(usize, Vec<u8>, &mut Vec<u8>) -> ControlFlow<()> + Send + 'static,
) -> Meddler {
    let length = move |bytes: &[u8]| match is_sealed {
        true => Some(2 + usize::from(u16::from_le_bytes(*bytes.first_chunk()?))),
        false => Some(4 + u32::from_le_bytes(*bytes.first_chunk()?) as usize),
    };
    records(first_bytes, length, pass)
}

/// Cuts what comes behind the first bytes of a direction into records, whose length is known from
/// how they begin.
fn records(
    first_bytes: usize,
    length: impl Fn(&[u8]) -> Option<usize> + Send + 'static,
    mut pass: impl FnMut(usize, Vec<u8>, &mut Vec<u8>) -> ControlFlow<()> + Send + 'static,
) -> Meddler {
    let (mut first_left, mut unread, mut number) = (first_bytes, Vec::new(), 0);
    Box::new(move |bytes| {
        let passing = first_left.min(bytes.len());
        first_left -= passing;
        unread.extend(bytes.drain(passing..));
        while let Some(end) = length(&unread).filter(|end| *end <= unread.len()) {
            let whole: Vec<u8> = unread.drain(..end).collect();
            pass(number, whole, bytes)?;
            number += 1;
        }
        ControlFlow::Continue(())
    })
}

/// Changes nothing, and tells whether these words have passed.
#[must_use]
pub fn listen(words: &'static [u8], heard: Arc<AtomicBool>) -> Meddler {
    Box::new(move |bytes| {
        if bytes.windows(words.len()).any(|window| window == words) {
            heard.store(true, Ordering::Relaxed);
        }
        ControlFlow::Continue(())
    })
}
