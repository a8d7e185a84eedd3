//! Lanes over RDMA verbs: InfiniBand, RoCE v1 and v2.
//!
//! | file | owns |
//! |---|---|
//! | `ffi.rs` | libibverbs, opened at run time, and its memory layouts |
//! | `ports.rs` | which ports and addresses the machine has |
//! | `device.rs` | opened devices, registered memory, queue pairs |
//! | `setup.rs` | what two ends tell each other over a stream |
//! | `flow.rs` | space, credit and completions of a lane, without a device |
//! | `chain.rs` | sends that are posted together |
//! | `lane.rs` | a lane |
//!
//! A lane is one reliable connection with an area at each end that the other writes to; see
//! [`connect`] and [`accept`]. All lanes of a thread share one completion queue for each port,
//! which is polled in batches. Each end is told of the other's death by the stream that the lane
//! was set up over.
//!
//! Invariant: whatever a peer writes to an area, the worst that happens is wrong bytes in its own
//! payloads or the end of its own lane. Areas of one thread share a protection domain, so a peer
//! that proved to be of the job and guesses the key of another lane's area could reach that too.

mod chain;
mod device;
mod ffi;
mod flow;
mod lane;
mod ports;
mod setup;

pub use device::{Counters, Rails};
pub use ffi::{constants, layouts};
pub use ports::Port;
pub use setup::{RdmaLink, RdmaOptions, accept, connect};

use super::{Cause, Driver, Event, Frame, Full, Landing, LaneId, Link, Room, Waker};

use crate::config::{Config, TransportChoice};
use device::Region;
use flow::{RECEIVES, SENDS};
use lane::{RECEIVE, RdmaLane};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::process::{Resource, getrlimit};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// Why there is no RDMA.
#[derive(Debug, thiserror::Error)]
pub enum RdmaError {
    /// libibverbs can't be used.
    #[error(
        "{0}: install libibverbs1 and the driver of the device (package ibverbs-providers or \
         rdma-core)"
    )]
    Library(String),
    /// No active port with an address.
    #[error(
        "no active RDMA port{}: see `rdma link` and `ibv_devinfo`; a container needs \
         /dev/infiniband and /sys/class/infiniband",
        interface.as_ref().map_or(String::new(), |name| format!(
            " of an interface that begins with {name} (DMLC_INTERFACE)"
        ))
    )]
    NoPort {
        /// What was asked for.
        interface: Option<String>,
    },
    /// The kernel has the device and the library does not.
    #[error(
        "{port} is in /sys/class/infiniband but libibverbs does not list it: install its driver \
         (package ibverbs-providers), and give a container /dev/infiniband"
    )]
    Driver {
        /// Which.
        port: String,
    },
    /// A call failed.
    #[error("{call} failed on {port}: {source}: see `rdma link`, and dmesg for the device's word")]
    Call {
        /// Which call.
        call: &'static str,
        /// On which port.
        port: String,
        /// What the library or the kernel said.
        source: io::Error,
    },
    /// Memory can't be locked for the device.
    #[error(
        "registering {need} bytes with {port} failed: {source}: RLIMIT_MEMLOCK is {limit}, for all \
         that this process registers; raise it (ulimit -l unlimited, LimitMEMLOCK=infinity of a \
         systemd unit, docker run --ulimit memlock=-1, MaxLockedMemory or propagated limits of the \
         cluster's scheduler)"
    )]
    Locked {
        /// Bytes that this registration needs.
        need: usize,
        /// The limit in words.
        limit: String,
        /// With which port.
        port: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// The peer does not do its part.
    #[error("the peer's part of RDMA is wrong: {0}")]
    Peer(String),
    /// The peer says that it can't.
    #[error("the peer has no RDMA for this lane: {0}")]
    Refused(String),
    /// The stream that the lane is set up over failed.
    #[error("the connection over which RDMA is set up failed: {0}")]
    Stream(#[source] io::Error),
}

impl RdmaError {
    /// A call that set errno.
    fn last(call: &'static str, port: &Port) -> RdmaError {
        RdmaError::Call { call, port: port.to_string(), source: io::Error::last_os_error() }
    }

    fn locked(need: usize, port: String, source: io::Error) -> RdmaError {
        let limit = getrlimit(Resource::Memlock).current;
        let limit = limit.map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
        RdmaError::Locked { need, limit, port, source }
    }
}

/// What a status of a completion means, and what to do.
pub(super) fn status_text(status: i32) -> &'static str {
    match status {
        LOST => "its completion queue was lost: see dmesg for the device's word",
        1 | 2 | 4 | 6 | 8 => {
            "the device could not carry out an operation of this end: its port or interface went \
             down (see `rdma link` and dmesg), or a defect"
        }
        5 => "the connection was stopped: the device was reset or removed; see dmesg",
        9 | 11 => "the peer's device refused an operation: a defect, or the device",
        10 => "the peer does not allow access to its memory: a defect, or not our peer",
        12 => {
            "no answer after all retries: the peer is gone, or a link, port or switch between is \
             down; see `rdma link` on both, and for RoCE whether the fabric is lossless"
        }
        13 => "the peer had no place to receive",
        20 | 21 => "the device reported a fatal error: see dmesg",
        _ => "the device reported an error that ibv_wc_status lists",
    }
}

/// A status of ours: a completion queue that can't be polled.
const LOST: i32 = -1;
/// Polls between two looks at the streams of the peers, which cost a system call. A peer that
/// leaves in good order says farewell; this is for those that die while we never sleep.
const STREAMS_EVERY: u32 = 4096;
/// Streams that one look tells of at most.
const STREAMS_MAX: usize = 16;
/// Completions that one call takes.
const COMPLETIONS: usize = 32;
/// Calls in one poll, for each port.
const CALLS_MAX: usize = 8;
/// A payload of this many bytes or fewer is copied though its memory is shared: one operation
/// without a second piece is less work for the device, and the memory is free at once.
const COPIED_BYTES_MAX: usize = 1024;
/// What the epoll says of a channel; lanes are told apart by their number.
const CHANNEL: u64 = u64::MAX;
const GENERATIONS: u32 = (1 << 31) - 1;

/// The active ports of this machine with a usable address, of this interface (by prefix) if one is
/// named.
///
/// # Errors
/// libibverbs can't be opened, or there is no such port.
pub fn find(interface: Option<&str>) -> Result<Vec<Port>, RdmaError> {
    ffi::Verbs::load()?;
    let ports = ports::find(Path::new("/"), interface);
    if ports.is_empty() {
        return Err(RdmaError::NoPort { interface: interface.map(str::to_owned) });
    }
    Ok(ports)
}

/// The ports that a thread on this NUMA node uses, as the configuration wants it: none if it names
/// another transport, or leaves the choice and there are none.
///
/// # Errors
/// RDMA is demanded and not to be had, or there are ports and none can be opened.
pub fn rails_for(config: &Config, numa_node: Option<u32>) -> Result<Option<Arc<Rails>>, RdmaError> {
    let is_demanded = match config.transport {
        TransportChoice::Tcp | TransportChoice::Shm => return Ok(None),
        TransportChoice::Auto => false,
        TransportChoice::Rdma => true,
    };
    match find(config.interface.as_deref()) {
        Ok(ports) => Rails::open(ports, numa_node).map(Some),
        Err(error) if is_demanded => Err(error),
        Err(_) => Ok(None),
    }
}

/// All RDMA lanes of one thread. Dropping it is a death: its peers see their lanes close.
pub struct Rdma {
    // Lanes come first: their queue pairs are destroyed before the memory that they read is let go.
    lanes: Vec<Option<Box<RdmaLane>>>,
    /// For each rail, the memory whose payloads are sent from where they are.
    shared: Vec<Vec<Region>>,
    shared_bytes: usize,
    rails: Arc<Rails>,
    completions: Box<[ffi::Wc; COMPLETIONS]>,
    epoll: OwnedFd,
    waker: Waker,
    polls: u32,
    first: usize,
    generation: u32,
}

impl Rdma {
    /// A driver without lanes, for links that are made with the same rails.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn new(waker: Waker, rails: Arc<Rails>) -> io::Result<Rdma> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for rail in rails.all() {
            let data = epoll::EventData::new_u64(CHANNEL);
            epoll::add(&epoll, rail.channel(), data, epoll::EventFlags::IN)?;
        }
        // SAFETY: completions are numbers, for which zeros are valid.
        let completions = Box::new(unsafe { std::mem::zeroed() });
        Ok(Rdma {
            lanes: Vec::new(),
            shared: rails.all().iter().map(|_| Vec::new()).collect(),
            shared_bytes: 0,
            rails,
            completions,
            epoll,
            waker,
            polls: 0,
            first: 0,
            generation: 0,
        })
    }

    /// Readable when this transport has something to do, after [`Driver::arm`]: for sleeps over
    /// several transports.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Registers memory whose payloads are then sent from where they are: the first `bytes` bytes
    /// from `base` on, of which those that an earlier call named are registered already. Does
    /// nothing while there is no lane.
    ///
    /// # Errors
    /// The memory can't be registered; payloads in it are copied then.
    ///
    /// # Safety
    /// The range is mapped, and stays so as long as this driver.
    pub unsafe fn share(&mut self, base: NonNull<u8>, bytes: usize) -> Result<(), RdmaError> {
        // Without a lane nobody would read it, and registered memory is locked.
        if bytes <= self.shared_bytes || self.lanes.iter().all(Option::is_none) {
            return Ok(());
        }
        // SAFETY: within the caller's range.
        let from = unsafe { base.add(self.shared_bytes) };
        let more = bytes - self.shared_bytes;
        self.shared_bytes = bytes;
        for (rail, regions) in self.rails.all().iter().zip(&mut self.shared) {
            // SAFETY: the caller's promise.
            regions.push(unsafe { Region::over(rail, from, more) }?);
        }
        Ok(())
    }

    fn lane(&mut self, lane: LaneId) -> Option<&mut Box<RdmaLane>> {
        self.lanes.get_mut(lane.0 as usize)?.as_mut()
    }

    /// The key of the shared memory that a frame's payload lies in, if it is to be sent from there.
    fn key(&self, lane: LaneId, frame: &Frame) -> Option<u32> {
        let lane = self.lanes.get(lane.0 as usize)?.as_ref()?;
        let mut rails = self.rails.all().iter();
        let rail = rails.position(|rail| Arc::ptr_eq(rail, lane.pair().rail()))?;
        let covers = |region: &&Region| region.covers(frame.payload.addr(), frame.length);
        let is_large = frame.length > COPIED_BYTES_MAX;
        is_large.then(|| self.shared[rail].iter().find(covers))?.map(Region::lkey)
    }

    /// Takes completions into the state of their lanes.
    fn reap(&mut self) {
        for rail in self.rails.all() {
            for _ in 0..CALLS_MAX {
                Counters::add(&self.rails.counters.polls, 1);
                let Ok(count) = rail.completions(&mut self.completions[..]) else {
                    let lanes = self.lanes.iter_mut().flatten();
                    lanes
                        .filter(|lane| Arc::ptr_eq(lane.pair().rail(), rail))
                        .for_each(|lane| lane.fail(Cause::Rdma { status: LOST }));
                    break;
                };
                for completion in &self.completions[..count] {
                    let id = completion.wr_id & !RECEIVE;
                    let index = (id & u64::from(u32::MAX)) as usize;
                    // What belonged to a lane that is gone may still come.
                    if let Some(Some(lane)) = self.lanes.get_mut(index)
                        && lane.id() == id
                    {
                        lane.handle(completion);
                    }
                }
                if count < COMPLETIONS {
                    break;
                }
            }
        }
    }

    /// Looks whether streams ended. Returns whether one has.
    fn look(&mut self) -> bool {
        let mut space = [MaybeUninit::uninit(); STREAMS_MAX];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((seen, _)) = epoll::wait(&self.epoll, &mut space, Some(&now)) else {
            return false;
        };
        let mut ended = false;
        for event in seen {
            let index = usize::try_from(event.data.u64()).unwrap_or(usize::MAX);
            if let Some(Some(lane)) = self.lanes.get_mut(index) {
                // Nothing is sent over the stream after the set-up, so whatever it has to say is
                // that it is over. It would say so again and again.
                let _ = epoll::delete(&self.epoll, lane.stream());
                lane.handle_stream_end();
                ended = true;
            }
        }
        ended
    }
}

impl Driver for Rdma {
    fn attach(&mut self, lane: LaneId, link: Link) -> io::Result<()> {
        let Link::Rdma(link) = link else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not an RDMA link"));
        };
        if !Arc::ptr_eq(&link.rails, &self.rails) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a link of other rails"));
        }
        if self.lane(lane).is_some() {
            let message = format!("{lane:?} is in use");
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
        }
        // What lanes that are gone left in the queue makes room first.
        self.reap();
        let rail = Arc::clone(link.pair.rail());
        let lanes = self.lanes.iter().flatten();
        let mates = lanes.filter(|other| Arc::ptr_eq(other.pair().rail(), &rail)).count();
        rail.hold_completions((mates + 1) * (SENDS + 1 + RECEIVES)).map_err(io::Error::other)?;
        self.generation = (self.generation + 1) & GENERATIONS;
        let id = u64::from(self.generation) << 32 | u64::from(lane.0);
        let new = Box::new(RdmaLane::new(*link, id)?);
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        let data = epoll::EventData::new_u64(u64::from(lane.0));
        epoll::add(&self.epoll, new.stream(), data, flags)?;
        let index = lane.0 as usize;
        if self.lanes.len() <= index {
            self.lanes.resize_with(index + 1, || None);
        }
        self.lanes[index] = Some(new);
        Ok(())
    }

    fn post(&mut self, lane: LaneId, frame: &Frame) -> Result<(), Full> {
        let key = self.key(lane, frame);
        self.lane(lane).ok_or(Full)?.post(frame, key)
    }

    fn land(&mut self, lane: LaneId, landing: Landing, length: usize) {
        if let Some(lane) = self.lane(lane) {
            lane.land(landing, length);
        }
    }

    fn consume(&mut self, lane: LaneId) {
        if let Some(lane) = self.lane(lane) {
            lane.consume();
        }
    }

    fn close(&mut self, lane: LaneId) {
        if let Some(lane) = self.lane(lane) {
            lane.close();
        }
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(STREAMS_EVERY) {
            self.look();
        }
        self.reap();
        let mut room = Room::new(events);
        let count = self.lanes.len();
        // Another lane begins each time, so that none is starved when there is more than room for.
        self.first = if self.first + 1 < count { self.first + 1 } else { 0 };
        for index in (self.first..count).chain(0..self.first) {
            let Some(lane) = &mut self.lanes[index] else { continue };
            let id = LaneId(u32::try_from(index).unwrap_or(u32::MAX));
            if !lane.poll(id, &mut room) {
                // It is there unless its end was noticed.
                let _ = epoll::delete(&self.epoll, lane.stream());
                self.lanes[index] = None;
            }
        }
    }

    fn arm(&mut self) -> bool {
        let ended = self.look();
        for rail in self.rails.all() {
            rail.arm();
        }
        // What came before the device was asked would wake nobody: it is taken now.
        self.reap();
        ended || self.lanes.iter().flatten().any(|lane| lane.is_ready())
    }

    fn block(&mut self, timeout: Duration) {
        let Ok(timeout) = Timespec::try_from(timeout) else { return };
        let mut fds = [
            PollFd::from_borrowed_fd(self.waker.fd(), PollFlags::IN),
            PollFd::new(&self.epoll, PollFlags::IN),
        ];
        // An interrupted or failed wait is a short wait: the caller polls again.
        let _ = poll(&mut fds, Some(&timeout));
    }
}
