//! Setting a lane up over a connected, authenticated stream: what each end tells the other, and
//! what is checked.
//!
//! The dialer offers its queue pair, its area and all its addresses; the acceptor chooses a kind of
//! address that both have, connects, and answers with its own; the dialer connects and says so.
//! Then each writes a packet to the other, so that a path that carries nothing is found here and
//! not by the first frame. The stream then stays open: its end is the peer's end. Invariant: an end
//! that cannot go on says why, so that the other can fall back to TCP and print the reason.

use super::RdmaError;
use super::device::{Ports, QueuePair, Rails, Remote};
use super::ffi;
use super::layout::{Layout, RECEIVES, RdmaOptions, SENDS};
use super::memory::Region;
use super::ports::{Address, AddressKind};
use super::rail::Rail;
use crate::limits::HANDSHAKE_SECONDS;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MAGIC: [u8; 8] = *b"BPSRDMA\x03";
const MESSAGE_BYTES: usize = 640;
const REASON_AT: usize = 192;
const GIDS_AT: usize = 64;
const READY: u8 = 1;
/// What an end says of the path to it: something came, or nothing.
const HEARD: u8 = 2;
const DEAF: u8 = 3;
/// How long the first write over a path may take: the device has then tried all its retries.
const PATH_WITHIN: Duration = Duration::from_secs(2);
/// Between two looks whether it came.
const PATH_LOOK: Duration = Duration::from_micros(100);
/// Bytes of that write: a packet of the largest size, which ends with [`KNOCK`].
const KNOCK_BYTES: u32 = 4096;
/// Where in it that stands.
const KNOCK_AT: usize = KNOCK_BYTES as usize - size_of::<u64>();
const KNOCK: u64 = u64::from_le_bytes(*b"KnockBps");
/// In the id of its work request; no lane has it.
const KNOCK_ID: u64 = u64::MAX >> 1;

/// A lane that is connected and not yet attached. Dropping it hangs up.
pub struct RdmaLink {
    // The queue pair comes first: it is destroyed before the memory that it writes to is freed.
    pub(super) pair: QueuePair,
    /// What the peer writes to.
    pub(super) incoming: Region,
    /// The mirror of what we write to.
    pub(super) outgoing: Region,
    pub(super) ours: Layout,
    pub(super) theirs: Layout,
    pub(super) remote_address: u64,
    pub(super) remote_key: u32,
    pub(super) stream: Stream,
    pub(super) rails: Arc<Rails>,
}

impl RdmaLink {
    /// What the link was made with: a driver for it must be, too.
    #[must_use]
    pub fn rails(&self) -> &Arc<Rails> {
        &self.rails
    }

    /// The place of its port among the rails.
    fn port(&self) -> usize {
        let is_ours = |rail: &Arc<Rail>| Arc::ptr_eq(rail, self.pair.rail());
        self.rails.all().iter().position(is_ours).expect("a link is of one of its rails")
    }

    /// Writes to the peer's area, which nothing else does yet. Nobody waits for the completion,
    /// which the thread that polls would take: it is not asked for.
    fn knock(&self) -> Result<(), RdmaError> {
        let from = self.outgoing.at(0, KNOCK_BYTES as usize);
        let (addr, lkey) = (self.outgoing.address(), self.outgoing.lkey());
        let mut piece = ffi::Sge { addr, length: KNOCK_BYTES, lkey };
        // SAFETY: a request is numbers and raw pointers, for which zeros are valid.
        let mut request: ffi::SendWr = unsafe { std::mem::zeroed() };
        request.wr_id = KNOCK_ID;
        (request.sg_list, request.num_sge) = (&raw mut piece, 1);
        request.opcode = ffi::WRITE;
        (request.remote_addr, request.rkey) = (self.remote_address, self.remote_key);
        // SAFETY: the mirror is ours alone until the lane is attached, and large enough; the
        // request is one, and its memory lives as long as the queue pair.
        let errno = unsafe {
            from.add(KNOCK_AT).cast::<u64>().write(KNOCK);
            self.pair.post_send(&raw mut request)
        };
        match errno {
            0 => Ok(()),
            errno => {
                let source = io::Error::from_raw_os_error(errno);
                Err(self.pair.rail().error("ibv_post_send", source))
            }
        }
    }

    /// Waits for what the peer writes by `knock`.
    fn hears_knock(&self) -> bool {
        let at = self.incoming.at(KNOCK_AT, size_of::<u64>());
        let start = Instant::now();
        loop {
            // SAFETY: within the area and aligned; the device may write to it at any moment.
            if unsafe { at.cast::<u64>().read_volatile() } == KNOCK {
                return true;
            }
            if start.elapsed() > PATH_WITHIN {
                return false;
            }
            std::thread::sleep(PATH_LOOK);
        }
    }
}

impl Ports {
    /// Those of these links, which are all of one thread; none if there are no links.
    pub fn of<'a>(links: impl IntoIterator<Item = &'a RdmaLink>) -> Option<Ports> {
        let mut links = links.into_iter();
        let first = links.next()?;
        let (rails, mut used) = (Arc::clone(&first.rails), vec![first.port()]);
        used.extend(links.map(RdmaLink::port));
        Some(Ports::new(rails, used))
    }
}

/// The stream of a lane. Dropping it tells the peer that this end is gone, even if somebody kept a
/// copy open.
pub(super) struct Stream(pub(super) OwnedFd);

impl Drop for Stream {
    fn drop(&mut self) {
        // It can only fail when the peer is gone already.
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

/// The dialer's end, on the rail that is `lane`'s share. The stream has carried the handshake.
///
/// # Errors
/// Memory or a queue pair cannot be allocated, the peer says that it can't, or does not answer
/// within [`HANDSHAKE_SECONDS`]. The stream is of no more use then.
pub fn connect(
    stream: TcpStream,
    rails: &Arc<Rails>,
    lane: usize,
    options: RdmaOptions,
) -> Result<RdmaLink, RdmaError> {
    let deadline = Instant::now() + Duration::from_secs(HANDSHAKE_SECONDS);
    let ours = Layout::new(options)?;
    let half = Half::new(rails.rail(lane), ours)?;
    let rail_index = u16::try_from(lane % usize::from(u16::MAX)).expect("it is below a u16");
    let offer = half.message(rail_index, &half.pair.rail().port().addresses);
    send(&stream, &offer.encode())?;
    let answer = Message::decode(&receive::<MESSAGE_BYTES>(&stream, deadline)?)?;
    let chosen = common(&half.pair.rail().port().addresses, &answer.addresses)
        .ok_or_else(|| RdmaError::Peer("the peer chose an address kind of its own".to_owned()))?;
    let done = half.finish(rails, chosen, &answer, stream)?;
    send(&done.1, &[READY])?;
    try_path(&done, deadline)?;
    keep(done)
}

/// The acceptor's end.
///
/// # Errors
/// As for [`connect`]; the peer has been told why.
pub fn accept(
    stream: TcpStream,
    rails: &Arc<Rails>,
    options: RdmaOptions,
) -> Result<RdmaLink, RdmaError> {
    let deadline = Instant::now() + Duration::from_secs(HANDSHAKE_SECONDS);
    let offer = Message::decode(&receive::<MESSAGE_BYTES>(&stream, deadline)?)?;
    let refused = stream.try_clone().map_err(RdmaError::Stream)?;
    let refuse = |error: RdmaError| {
        // The peer falls back or fails; what it does not read it does not need.
        let _ = send(&refused, &refusal(&error.to_string()));
        error
    };
    let make = || {
        let half = Half::new(rails.rail(usize::from(offer.rail)), Layout::new(options)?)?;
        let mine = &half.pair.rail().port().addresses;
        let chosen = common(mine, &offer.addresses).ok_or_else(|| no_common(&half))?;
        let answer = half.message(offer.rail, &[chosen.0]);
        Ok((half.finish(rails, chosen, &offer, stream)?, answer))
    };
    let (done, answer) = make().map_err(refuse)?;
    send(&done.1, &answer.encode())?;
    let [ready] = receive::<1>(&done.1, deadline)?;
    if ready != READY {
        return Err(RdmaError::Peer(format!("the peer said {ready}, not that it is ready")));
    }
    try_path(&done, deadline)?;
    keep(done)
}

/// Each end writes a packet of the largest size to the other, and tells what came: two ports may
/// have each other's addresses and still not reach each other.
fn try_path((link, stream): &Done, deadline: Instant) -> Result<(), RdmaError> {
    link.knock()?;
    let heard = link.hears_knock();
    send(stream, &[if heard { HEARD } else { DEAF }])?;
    let [told] = receive::<1>(stream, deadline)?;
    let what = match (heard, told) {
        (true, HEARD) => return Ok(()),
        (true, DEAF) => "nothing of ours came there",
        (false, HEARD) => "nothing came from there",
        (false, DEAF) => "nothing came, neither way",
        _ => return Err(RdmaError::Peer(format!("the peer said {told} of the path"))),
    };
    Err(RdmaError::Path { port: link.pair.rail().port().to_string(), what })
}

fn no_common(half: &Half) -> RdmaError {
    RdmaError::Peer(format!(
        "{} has no address of a kind that the peer has: see `ibv_devinfo -v` and \
         `rdma link` on both",
        half.pair.rail().port()
    ))
}

/// The best kind that both have: our address and the peer's.
fn common(ours: &[Address], theirs: &[Address]) -> Option<(Address, Address)> {
    ours.iter().find_map(|our| {
        let their = theirs.iter().find(|their| their.kind == our.kind)?;
        Some((*our, *their))
    })
}

/// One end before it knows the other.
struct Half {
    pair: QueuePair,
    incoming: Region,
    layout: Layout,
    sequence: u32,
}

type Done = (RdmaLink, TcpStream);

impl Half {
    fn new(rail: &Arc<Rail>, layout: Layout) -> Result<Half, RdmaError> {
        let pair = QueuePair::new(rail, SENDS + 1, RECEIVES)?;
        let incoming = Region::new(rail, layout.area_bytes(), true)?;
        let random = getrandom::u32()
            .map_err(|error| RdmaError::Stream(io::Error::other(error.to_string())))?;
        Ok(Half { pair, incoming, layout, sequence: random & 0xff_ffff })
    }

    fn message(&self, rail: u16, addresses: &[Address]) -> Message {
        Message {
            number: self.pair.number(),
            sequence: self.sequence,
            key: self.incoming.rkey(),
            mtu: self.pair.rail().mtu,
            rail,
            lid: self.pair.rail().lid,
            address: self.incoming.address(),
            slot_bytes: self.layout.slot_bytes as u64,
            slots: self.layout.slots as u64,
            addresses: addresses.to_vec(),
        }
    }

    fn finish(
        self,
        rails: &Arc<Rails>,
        (our, their): (Address, Address),
        peer: &Message,
        stream: TcpStream,
    ) -> Result<Done, RdmaError> {
        // A peer's number: the layout refuses what is too large.
        let size = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let options = RdmaOptions { slot_bytes: size(peer.slot_bytes), slots: size(peer.slots) };
        let theirs = Layout::new(options)?;
        let outgoing = Region::new(self.pair.rail(), theirs.area_bytes(), false)?;
        let remote = Remote {
            number: peer.number,
            sequence: peer.sequence,
            mtu: peer.mtu,
            lid: peer.lid,
            gid: their.gid,
        };
        self.pair.connect(&our, self.sequence, &remote)?;
        let kept = stream.try_clone().map_err(RdmaError::Stream)?;
        let link = RdmaLink {
            pair: self.pair,
            incoming: self.incoming,
            outgoing,
            ours: self.layout,
            theirs,
            remote_address: peer.address,
            remote_key: peer.key,
            stream: Stream(kept.into()),
            rails: Arc::clone(rails),
        };
        Ok((link, stream))
    }
}

/// The set-up is over: the stream says nothing more, and is not waited for.
fn keep((link, stream): Done) -> Result<RdmaLink, RdmaError> {
    stream.set_nonblocking(true).map_err(RdmaError::Stream)?;
    Ok(link)
}

/// What one end tells the other.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Message {
    number: u32,
    sequence: u32,
    key: u32,
    mtu: u8,
    rail: u16,
    lid: u16,
    address: u64,
    slot_bytes: u64,
    slots: u64,
    addresses: Vec<Address>,
}

impl Message {
    fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let mut bytes = [0; MESSAGE_BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &MAGIC);
        put(8, &[READY, self.mtu]);
        put(10, &self.rail.to_le_bytes());
        put(12, &self.lid.to_le_bytes());
        put(16, &self.number.to_le_bytes());
        put(20, &self.sequence.to_le_bytes());
        put(24, &self.key.to_le_bytes());
        put(32, &self.address.to_le_bytes());
        put(40, &self.slot_bytes.to_le_bytes());
        put(48, &self.slots.to_le_bytes());
        let mut kinds = 0u8;
        for address in &self.addresses {
            let place = address.kind as usize;
            kinds |= 1 << place;
            put(GIDS_AT + 16 * place, &address.gid);
        }
        put(14, &[kinds]);
        bytes
    }

    fn decode(bytes: &[u8; MESSAGE_BYTES]) -> Result<Message, RdmaError> {
        fn take<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
            let mut taken = [0; N];
            taken.copy_from_slice(&bytes[at..at + N]);
            taken
        }
        if bytes[..8] != MAGIC {
            return Err(RdmaError::Peer(format!("{:02x?} opens no RDMA lane", &bytes[..8])));
        }
        if bytes[8] != READY {
            let reason = String::from_utf8_lossy(&bytes[REASON_AT..]);
            let printable = |c: &char| !c.is_control();
            return Err(RdmaError::Refused(reason.chars().filter(printable).collect()));
        }
        let has = |kind: &&AddressKind| bytes[14] & (1 << **kind as u8) != 0;
        let addresses = AddressKind::ALL.iter().filter(has).map(|kind| Address {
            kind: *kind,
            index: 0,
            gid: take(bytes, GIDS_AT + 16 * *kind as usize),
        });
        let message = Message {
            mtu: bytes[9].clamp(1, 5),
            rail: u16::from_le_bytes(take(bytes, 10)),
            lid: u16::from_le_bytes(take(bytes, 12)),
            number: u32::from_le_bytes(take(bytes, 16)) & 0xff_ffff,
            sequence: u32::from_le_bytes(take(bytes, 20)) & 0xff_ffff,
            key: u32::from_le_bytes(take(bytes, 24)),
            address: u64::from_le_bytes(take(bytes, 32)),
            slot_bytes: u64::from_le_bytes(take(bytes, 40)),
            slots: u64::from_le_bytes(take(bytes, 48)),
            addresses: addresses.collect(),
        };
        // A number that does not fit its field, or a byte that is used for nothing.
        if message.encode() != *bytes {
            return Err(RdmaError::Peer("the peer's offer has bytes that must be zero".to_owned()));
        }
        Ok(message)
    }
}

/// The message of an acceptor that cannot go on.
fn refusal(reason: &str) -> [u8; MESSAGE_BYTES] {
    let mut bytes = [0; MESSAGE_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    let mut length = reason.len().min(MESSAGE_BYTES - REASON_AT);
    while !reason.is_char_boundary(length) {
        length -= 1;
    }
    bytes[REASON_AT..REASON_AT + length].copy_from_slice(&reason.as_bytes()[..length]);
    bytes
}

fn send(mut stream: &TcpStream, bytes: &[u8]) -> Result<(), RdmaError> {
    // A few hundred bytes always fit the empty buffer of a socket: this does not block.
    stream.write_all(bytes).map_err(RdmaError::Stream)
}

fn receive<const N: usize>(
    mut stream: &TcpStream,
    deadline: Instant,
) -> Result<[u8; N], RdmaError> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(RdmaError::Peer(format!(
                "it did not set its end of RDMA up in {HANDSHAKE_SECONDS} s"
            )));
        }
        stream.set_read_timeout(Some(left)).map_err(RdmaError::Stream)?;
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => {
                return Err(RdmaError::Peer("it hung up: its own log says why".to_owned()));
            }
            Ok(count) => filled += count,
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock
                | io::ErrorKind::TimedOut
                | io::ErrorKind::Interrupted => {}
                _ => return Err(RdmaError::Stream(error)),
            },
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(kind: AddressKind, byte: u8) -> Address {
        Address { kind, index: 0, gid: [byte; 16] }
    }

    fn message() -> Message {
        Message {
            number: 0x12_3456,
            sequence: 0xab_cdef,
            key: 0xffff_fff1,
            mtu: 4,
            rail: 7,
            lid: 0x1234,
            address: u64::MAX - 5,
            slot_bytes: 1 << 18,
            slots: 8,
            addresses: vec![address(AddressKind::RoceV2Ipv4, 3), address(AddressKind::RoceV1, 9)],
        }
    }

    #[test]
    fn a_message_survives_the_wire_and_a_refusal_is_read() {
        assert_eq!(Message::decode(&message().encode()).unwrap(), message());
        let long = "ü".repeat(300);
        for reason in ["no memory", long.as_str()] {
            let error = Message::decode(&refusal(reason)).unwrap_err().to_string();
            assert!(error.contains(&reason[..8]), "{error}");
        }
        let mut strange = message().encode();
        strange[0] ^= 1;
        assert!(matches!(Message::decode(&strange), Err(RdmaError::Peer(_))));
    }

    #[test]
    fn ends_choose_the_best_kind_that_both_have() {
        use AddressKind::{RoceV1, RoceV2Ipv4, RoceV2LinkLocal};
        let ours = [address(RoceV2Ipv4, 1), address(RoceV2LinkLocal, 2), address(RoceV1, 3)];
        let both = common(&ours, &[address(RoceV2LinkLocal, 4), address(RoceV1, 5)]).unwrap();
        assert_eq!((both.0.gid[0], both.1.gid[0]), (2, 4));
        assert_eq!(common(&ours, &[address(AddressKind::InfiniBand, 6)]), None);
    }

    #[test]
    fn sizes_of_a_peer_are_bounded() {
        for (slot_bytes, slots) in
            [(0, 8), (4096, 3), (4097, 8), (1 << 60, 1 << 60), (1 << 20, 65), (4096, usize::MAX)]
        {
            assert!(Layout::new(RdmaOptions { slot_bytes, slots }).is_err(), "{slot_bytes}");
        }
        assert!(Layout::new(RdmaOptions::default()).is_ok());
    }
}
