//! Lanes as the rest of the engine sees them: frames out, events in, nothing blocks.
//!
//! The set of transports is closed: [`Transport`] is an enum, and every variant keeps the contract
//! of [`Driver`], which `tests/tests/conformance` runs over each. A transport moves headers and
//! payloads; it does not know what they mean. It is used from one thread.
//!
//! # How bytes come in
//! A lane alternates between a header and its payload:
//! 1. [`Event::Header`] brings 64 bytes. The lane then stands still until [`Driver::land`] says how
//!    long the payload is and where it goes. Not answering is how a caller lets a lane wait; it
//!    costs the transport nothing.
//! 2. With [`Landing::Into`] the payload lands in the caller's memory and [`Event::Landed`] says
//!    that it is whole. With [`Landing::Pieces`] it passes in order through memory of the
//!    transport: each [`Piece`] is valid until [`Driver::consume`], which lets the next one come.
//! 3. The next header follows. A payload of length 0 brings no event of its own.
//!
//! # How bytes go out
//! [`Driver::post`] takes a frame or says [`Full`], which is backpressure and no error. The
//! payload's memory must stay unchanged until [`Event::Sent`] returns the frame's token: every
//! posted frame is answered by exactly one `Sent`, in order, unless the lane closes first. Frames
//! of a lane arrive whole and in the order of their posting.
//!
//! # Whose memory it is
//! What a caller hands over is [`Readable`] or [`Writable`], whose makers have promised that it may
//! be used. The transport is done with a payload when it says `Sent`, with a landing when it says
//! `Landed`, with the place of an answer when it says `Answered` or declines it, and with all of
//! them when it says `Closed`.
//!
//! # Answers that go straight to where they belong
//! A frame may say where its answer may land ([`Answer::Wanted`]), if [`Driver::grants`] says
//! yes to that memory: a transport whose peer can write there by itself then tells the peer, which
//! finds a [`Grant`] in the header's event, and posts its answer with it ([`Answer::To`]). Of such
//! an answer the asker sees [`Event::Answered`] and nothing else: no header, no `land`. One that
//! can't go there comes as any frame does, and its header says so ([`Carried::Declined`]). Until
//! then, or `Closed`, the memory is the transport's.
//!
//! # How a lane ends
//! [`Event::Closed`] is the last event of a lane, once, after which the transport and the kernel
//! hold none of the caller's memory, and the id may be attached again. Frames that had not been
//! sent are dropped. Once this end has called [`Driver::close`], no header, landing or piece comes
//! any more.
//!
//! `post`, `land` and `consume` only take note; the work is done in `poll`, which submits
//! everything in one batch.

use crate::limits::EVENTS_MAX;
use crate::mem::{Readable, Writable};
use crate::wire::RawHeader;
use std::ptr::NonNull;
use std::time::Duration;

mod area;
mod interest;
pub mod rdma;
pub mod shm;
pub mod sim;
pub mod tcp;
pub mod waker;

pub use waker::Waker;

/// A lane's number in its endpoint, chosen by the caller at attach. Small and dense: it indexes
/// tables.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LaneId(pub u32);

/// No room for this frame now: try again after the next [`Event::Sent`] of the lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full;

/// Memory of the peer that it lets the answer to one frame be written to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// Its place among those of the lane that are open.
    number: u8,
    /// By which the peer's device knows the memory.
    key: u32,
    address: u64,
    length: u32,
}

impl Grant {
    /// Bytes that the answer must have.
    #[must_use]
    pub fn length(&self) -> usize {
        self.length as usize
    }
}

/// What a frame has to do with memory that one end grants to the other.
#[derive(Clone, Copy, Debug)]
pub enum Answer {
    /// Nothing.
    No,
    /// The answer to this frame may be written straight to this memory, as many bytes as it has.
    /// [`Driver::grants`] has just said yes to it. [`Event::Answered`] brings the token.
    Wanted {
        /// Where, and of how many bytes.
        into: Writable,
        /// Returned by [`Event::Answered`].
        token: u64,
    },
    /// The frame is the answer to that which came with this grant, and of its length.
    To(Grant),
}

/// What a frame that comes has to do with memory that one end grants to the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Carried {
    /// Nothing.
    Nothing,
    /// Its answer may be written there.
    Grant(Grant),
    /// It is itself the answer for which memory was granted with this token, and did not go there.
    /// The memory is the caller's again.
    Declined(u64),
}

impl Carried {
    /// Where the answer may be written to.
    #[must_use]
    pub fn grant(self) -> Option<Grant> {
        if let Carried::Grant(grant) = self { Some(grant) } else { None }
    }
}

/// A frame to send.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    /// Sent first, copied by `post`. It must say how long the payload is.
    pub header: RawHeader,
    /// Sent behind it. The transport reads it until [`Event::Sent`].
    pub payload: Readable,
    /// Returned by [`Event::Sent`].
    pub token: u64,
    /// Whether its answer may be written straight to memory, or it is such an answer.
    pub answer: Answer,
}

impl Frame {
    /// A frame whose answer, if there is one, comes as any other.
    #[must_use]
    pub fn new(header: RawHeader, payload: Readable, token: u64) -> Frame {
        Frame { header, payload, token, answer: Answer::No }
    }

    /// A frame without a payload.
    #[must_use]
    pub fn bare(header: RawHeader, token: u64) -> Frame {
        Frame::new(header, Readable::EMPTY, token)
    }
}

/// Where a payload goes, and how long it is.
#[derive(Clone, Copy, Debug)]
pub enum Landing {
    /// To this memory, which it fills. The transport writes it until [`Event::Landed`].
    Into(Writable),
    /// So many bytes, past the caller in pieces, in memory of the transport that is aligned to
    /// [`ALIGNMENT`](crate::limits::ALIGNMENT). Every piece but the last is a multiple of that
    /// long.
    Pieces(usize),
}

impl Landing {
    /// That of a header without a payload.
    pub const NOTHING: Landing = Landing::Pieces(0);

    /// Bytes of the payload.
    #[must_use]
    pub fn length(&self) -> usize {
        match self {
            Landing::Into(memory) => memory.len(),
            Landing::Pieces(length) => *length,
        }
    }
}

/// A run of bytes of a payload, in memory of the transport.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    data: *const u8,
    length: usize,
}

// SAFETY: what `Piece::new` asks of its caller does not depend on the thread that reads.
unsafe impl Send for Piece {}
// SAFETY: a shared reference gives what a copy gives, and a copy may go to any thread.
unsafe impl Sync for Piece {}

impl Piece {
    /// # Safety
    /// Until the lane's [`Driver::consume`], or the first poll after its [`Driver::close`] or after
    /// its [`Event::Closed`] has come, the bytes are initialised and valid for reads, and this
    /// process does not write them.
    unsafe fn new(data: *const u8, length: usize) -> Piece {
        Piece { data, length }
    }

    /// The first byte.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.data
    }

    /// How many bytes, of which there are always some.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a piece is never empty")]
    pub fn len(&self) -> usize {
        self.length
    }

    /// The bytes, to be read.
    ///
    /// # Safety
    /// Every holder of the value is done with it when the caller passes the lane to
    /// [`Driver::consume`], or polls after it has passed the lane to [`Driver::close`].
    #[must_use]
    pub unsafe fn lend(&self) -> Readable {
        // SAFETY: valid until then, as `new` was promised.
        unsafe { Readable::new(self.data, self.length) }
    }
}

/// What happened on a lane.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// A header arrived; the lane stands still until `land`.
    Header {
        /// The lane.
        lane: LaneId,
        /// Its bytes, not yet looked at.
        header: RawHeader,
        /// What it says of granted memory.
        carried: Carried,
    },
    /// The answer to a posted frame is whole, where the frame said.
    Answered {
        /// The lane.
        lane: LaneId,
        /// That of [`Answer::Wanted`].
        token: u64,
    },
    /// The payload of a [`Landing::Into`] is whole.
    Landed {
        /// The lane.
        lane: LaneId,
    },
    /// The next part of a payload; the lane stands still until `consume`.
    Piece {
        /// The lane.
        lane: LaneId,
        /// Its bytes.
        piece: Piece,
    },
    /// The memory of this posted frame is the caller's again.
    Sent {
        /// The lane.
        lane: LaneId,
        /// The frame's token.
        token: u64,
    },
    /// The lane is gone; its last event.
    Closed {
        /// The lane.
        lane: LaneId,
        /// Why.
        cause: Cause,
    },
}

/// Why a lane closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Cause {
    /// This end called `close`.
    #[error("closed by this end")]
    Local,
    /// The peer closed between two frames.
    #[error("closed by the peer")]
    Peer,
    /// The peer closed within a frame.
    #[error("the peer closed in the middle of a frame")]
    Truncated,
    /// The kernel reported an error.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Os(i32),
    /// The peer's machine has room for what was sent, and acknowledged none of it for so long.
    #[error("nothing that was sent was acknowledged for {:.1} s", seconds(*milliseconds))]
    Unacknowledged {
        /// For how long.
        milliseconds: u32,
    },
    /// What came on an encrypted lane is not what its other end sent.
    #[error(transparent)]
    Seal(#[from] tcp::sealed::SealError),
    /// Something happened to an RDMA device, a port of it or the lane's queues.
    #[error("RDMA event {event}: {}", rdma::event_text(*event))]
    RdmaEvent {
        /// As `ibv_event_type` lists it.
        event: i32,
    },
    /// An RDMA device reported an error: a status of `ibv_wc_status`.
    #[error("RDMA status {status}: {}", rdma::status_text(*status))]
    Rdma {
        /// The status.
        status: i32,
    },
}

fn seconds(milliseconds: u32) -> f64 {
    f64::from(milliseconds) / 1000.0
}

/// A connected, authenticated link that a transport turns into a lane.
pub enum Link {
    /// A connected stream socket.
    Tcp(std::os::fd::OwnedFd),
    /// A connected stream socket whose bytes are encrypted from here on.
    SealedTcp(std::os::fd::OwnedFd, Box<tcp::sealed::Keys>),
    /// Memory shared with a process of this host.
    Shm(shm::ShmLink),
    /// A connection between two RDMA devices.
    Rdma(Box<rdma::RdmaLink>),
    /// One end of a simulated link.
    Sim(sim::SimLink),
}

impl Link {
    /// Whether what it carries stays on this host, as far as addresses tell.
    #[must_use]
    pub fn stays_on_host(&self) -> bool {
        let socket = match self {
            Link::Tcp(socket) | Link::SealedTcp(socket, _) => socket2::SockRef::from(socket),
            Link::Shm(_) => return true,
            Link::Rdma(_) | Link::Sim(_) => return false,
        };
        let ip = |address: std::io::Result<socket2::SockAddr>| {
            Some(address.ok()?.as_socket()?.ip().to_canonical())
        };
        let (own, peer) = (ip(socket.local_addr()), ip(socket.peer_addr()));
        peer.is_some_and(|peer| peer.is_loopback() || own == Some(peer))
    }

    /// Whether bytes may change between the two ends and nobody notices. TCP's own checksum has 16
    /// bits, and devices on the way compute it anew; those of RDMA's links have 32 and go from end
    /// to end. What stays on this host passes no device, and what is encrypted is authenticated.
    #[must_use]
    pub fn may_corrupt(&self) -> bool {
        let Link::Tcp(socket) = self else { return false };
        let peer = socket2::SockRef::from(socket).peer_addr().ok();
        let ip = peer.and_then(|peer| peer.as_socket()).map(|peer| peer.ip().to_canonical());
        !ip.is_some_and(|ip| ip.is_loopback())
    }
}

/// The room for events that one poll has.
struct Room<'events> {
    events: &'events mut Vec<Event>,
    end: usize,
}

impl Room<'_> {
    fn new(events: &mut Vec<Event>) -> Room<'_> {
        Room { end: events.len() + EVENTS_MAX, events }
    }

    fn is_full(&self) -> bool {
        self.events.len() >= self.end
    }

    /// The caller has seen that there is room.
    fn push(&mut self, event: Event) {
        self.events.push(event);
    }
}

/// Memory that a transport's device may read or write by itself.
pub enum DirectMemory {
    /// Payloads that lie here may be sent without a copy: the first `bytes` bytes from `base` on.
    /// The same `base` may be named again with more bytes.
    ToSend {
        /// First byte.
        base: NonNull<u8>,
        /// Bytes.
        bytes: usize,
    },
    /// Answers may land here, where a frame grants it.
    ToLand {
        /// First byte.
        base: NonNull<u8>,
        /// Bytes.
        bytes: usize,
    },
    /// Memory of a GPU, to send from or to land in.
    Gpu(rdma::GpuMemory),
}

/// A transport can't use memory directly.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct RegisterError(#[from] rdma::RdmaError);

/// The contract that every transport keeps; see the [module](self).
pub trait Driver {
    /// Whether [`attach`](Self::attach) makes lanes of links of this kind.
    fn takes(&self, link: &Link) -> bool;

    /// Makes a lane of a link.
    ///
    /// # Errors
    /// What the kernel said when it was asked to set the link up.
    fn attach(&mut self, lane: LaneId, link: Link) -> std::io::Result<()>;

    /// Takes a frame to send.
    ///
    /// # Errors
    /// [`Full`] when the lane has [`LANE_FRAMES_MAX`](crate::limits::LANE_FRAMES_MAX) unsent
    /// frames, or the transport has no room for its payload.
    fn post(&mut self, lane: LaneId, frame: &Frame) -> Result<(), Full>;

    /// Answers [`Event::Header`]: a payload follows, and goes there.
    fn land(&mut self, lane: LaneId, landing: Landing);

    /// Answers [`Event::Piece`]: its memory is the transport's again.
    fn consume(&mut self, lane: LaneId);

    /// Starts closing a lane; [`Event::Closed`] follows when the memory is free. Does nothing
    /// twice.
    fn close(&mut self, lane: LaneId);

    /// Submits what is due and appends at most [`EVENTS_MAX`] events.
    fn poll(&mut self, events: &mut Vec<Event>);

    /// Looks for lanes whose bytes no longer reach their peer, and closes them. To be called about
    /// twice a second with the time since any fixed moment. Does nothing where a peer shares this
    /// machine, or where the device itself gives up.
    fn look(&mut self, _now: Duration) {}

    /// Asks peers for a wake-up (where they share memory instead of a kernel object). Returns
    /// whether something is ready already, in which case the caller must not sleep.
    fn arm(&mut self) -> bool {
        false
    }

    /// Sleeps until this transport has something to do, its waker is woken, or the time is over.
    fn block(&mut self, timeout: Duration);

    /// Whether [`block`](Self::block) must be the one that sleeps for all transports of a thread,
    /// because this one's events wake nothing else.
    fn wakes_for_all(&self) -> bool {
        false
    }

    /// Whether a device reads and writes memory of the caller by itself, once it is
    /// [registered](Self::register_memory).
    fn reaches_memory(&self) -> bool {
        false
    }

    /// Names memory that may be read and written without a copy. Does nothing where no device
    /// [reaches it](Self::reaches_memory).
    ///
    /// # Errors
    /// The memory can't be registered: payloads in it are copied, and answers come as frames do.
    ///
    /// # Panics
    /// A GPU's memory was registered with other devices than those of this transport.
    ///
    /// # Safety
    /// The range is mapped, and stays so until [`forget_memory`](Self::forget_memory) or the end of
    /// this transport. What a posted frame grants is left alone until [`Event::Answered`], a header
    /// that says [`Carried::Declined`], or [`Event::Closed`]. No payload is posted that lies in a
    /// GPU's memory and not in a range that was named here.
    unsafe fn register_memory(&mut self, _memory: DirectMemory) -> Result<(), RegisterError> {
        Ok(())
    }

    /// Forgets all registered memory, which may be unmapped then. Returns a line of figures about
    /// its use, where there was any device.
    ///
    /// # Panics
    /// A lane is left that might use the memory.
    fn forget_memory(&mut self) -> Option<String> {
        None
    }

    /// Whether a frame that is posted on this lane next may ask for its answer straight into this
    /// memory. Where a peer can't write by itself, no.
    fn grants(&self, _lane: LaneId, _into: Writable) -> bool {
        false
    }
}

/// The closed set of transports.
pub enum Transport {
    /// Stream sockets: io_uring, or plain non-blocking calls where that is denied.
    Tcp(tcp::Tcp),
    /// Memory shared between two processes of a host.
    Shm(shm::Shm),
    /// RDMA verbs.
    Rdma(Box<rdma::Rdma>),
    /// The seeded in-memory network of the tests.
    Sim(sim::Sim),
}

macro_rules! dispatch {
    ($self:ident, $driver:ident => $call:expr) => {
        match $self {
            Transport::Tcp($driver) => $call,
            Transport::Shm($driver) => $call,
            Transport::Rdma($driver) => $call,
            Transport::Sim($driver) => $call,
        }
    };
}

impl Driver for Transport {
    fn takes(&self, link: &Link) -> bool {
        dispatch!(self, driver => driver.takes(link))
    }
    fn attach(&mut self, lane: LaneId, link: Link) -> std::io::Result<()> {
        dispatch!(self, driver => driver.attach(lane, link))
    }
    fn post(&mut self, lane: LaneId, frame: &Frame) -> Result<(), Full> {
        dispatch!(self, driver => driver.post(lane, frame))
    }
    fn land(&mut self, lane: LaneId, landing: Landing) {
        dispatch!(self, driver => driver.land(lane, landing))
    }
    fn consume(&mut self, lane: LaneId) {
        dispatch!(self, driver => driver.consume(lane))
    }
    fn close(&mut self, lane: LaneId) {
        dispatch!(self, driver => driver.close(lane))
    }
    fn poll(&mut self, events: &mut Vec<Event>) {
        dispatch!(self, driver => driver.poll(events))
    }
    fn look(&mut self, now: Duration) {
        dispatch!(self, driver => driver.look(now))
    }
    fn arm(&mut self) -> bool {
        dispatch!(self, driver => driver.arm())
    }
    fn block(&mut self, timeout: Duration) {
        dispatch!(self, driver => driver.block(timeout))
    }
    fn wakes_for_all(&self) -> bool {
        dispatch!(self, driver => driver.wakes_for_all())
    }
    fn reaches_memory(&self) -> bool {
        dispatch!(self, driver => driver.reaches_memory())
    }
    // SAFETY: as the trait demands: mapped until it is forgotten, and left alone while granted.
    unsafe fn register_memory(&mut self, memory: DirectMemory) -> Result<(), RegisterError> {
        // SAFETY: the caller keeps the contract, which is the same for each driver.
        dispatch!(self, driver => unsafe { driver.register_memory(memory) })
    }
    fn forget_memory(&mut self) -> Option<String> {
        dispatch!(self, driver => driver.forget_memory())
    }
    fn grants(&self, lane: LaneId, into: Writable) -> bool {
        dispatch!(self, driver => driver.grants(lane, into))
    }
}
