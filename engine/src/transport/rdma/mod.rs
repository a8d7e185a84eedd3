//! Lanes over RDMA verbs: InfiniBand, RoCE v1 and v2.
//!
//! | file | owns |
//! |---|---|
//! | `error.rs` | why there is no RDMA, and why a lane ended |
//! | `ffi.rs` | libibverbs, opened at run time, and its memory layouts |
//! | `ports.rs` | which ports and addresses the machine has |
//! | `device.rs` | opened devices, queue pairs |
//! | `completions.rs` | queues of completions |
//! | `memory.rs` | registered memory |
//! | `trial.rs` | whether devices reach memory of GPUs |
//! | `setup.rs` | what two ends tell each other over a stream, and whether they reach each other |
//! | `grants.rs` | memory that a peer may write answers to, without a device |
//! | `flow.rs` | space, credit and completions of a lane, without a device |
//! | `chain.rs` | sends that are posted together |
//! | `lane.rs` | a lane |
//!
//! A lane is one reliable connection with an area at each end that the other writes to; see
//! [`connect`] and [`accept`]. All lanes of a thread share two completion queues for each port, one
//! of sends and one of what comes, which are polled in batches. Each end is told of the other's
//! death by the stream that the lane was set up over.
//!
//! Invariant: whatever a peer writes to an area, the worst that happens is wrong bytes in its own
//! payloads or the end of its own lane. Areas of one thread share a protection domain, so a peer
//! that proved to be of the job and guesses the key of another lane's area could reach that too;
//! and who was granted memory for an answer knows the key of all that answers may land in.

mod chain;
mod device;
mod error;
mod ffi;
mod flow;
mod grants;
mod lane;
mod layout;
mod memory;
mod ports;
mod rail;
mod setup;
#[cfg(test)]
mod tests;
mod trial;

pub use device::{Counters, Ports, Rails};
pub use error::RdmaError;
pub(super) use error::{event_text, status_text};
pub use ffi::{constants, layouts};
pub use layout::RdmaOptions;
pub use memory::GpuMemory;
#[doc(hidden)]
pub use memory::emulate_gpu_memory;
pub use ports::Port;
pub use setup::{RdmaLink, accept, connect};
pub use trial::{Speeds, try_gpu};

use super::{
    Answer, Cause, DirectMemory, Driver, Event, Frame, Full, Landing, LaneId, Link, RegisterError,
    Room, Waker,
};
use crate::base::word;
use crate::config::{Config, TransportChoice};
use crate::mem::Writable;
use lane::{RECEIVE, RdmaLane};
use layout::{RECEIVES, SENDS};
use memory::InPlace;
use rail::Wake;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

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
/// What the epoll says of a channel; lanes are told apart by their number.
const CHANNEL: u64 = u64::MAX;
/// What it says of a device.
const NEWS: u64 = u64::MAX - 1;
/// Between two looks of a driver that is dropped at what the device has still to deliver.
const WIND_DOWN_PAUSE: Duration = Duration::from_micros(200);
const GENERATIONS: u32 = (1 << 31) - 1;

/// The active ports of this machine with a usable address, of this interface (by prefix) if one is
/// named.
///
/// # Errors
/// libibverbs can't be opened, or there is no such port.
pub fn find(interface: Option<&str>) -> Result<Vec<Port>, RdmaError> {
    ffi::Verbs::load().map_err(RdmaError::Library)?;
    let ports = ports::find(Path::new("/"), interface);
    if ports.is_empty() {
        return Err(RdmaError::NoPort { interface: interface.map(str::to_owned) });
    }
    Ok(ports)
}

/// The ports that a thread on this NUMA node uses, as the configuration wants it: none if it names
/// another transport or wants lanes encrypted, or leaves the choice and there are none.
///
/// # Errors
/// RDMA is demanded and not to be had, or there are ports and none can be opened.
pub fn rails_for(config: &Config, numa_node: Option<u32>) -> Result<Option<Arc<Rails>>, RdmaError> {
    let is_demanded = match config.transport {
        TransportChoice::Tcp | TransportChoice::Shm => return Ok(None),
        TransportChoice::Auto if config.encrypt => return Ok(None),
        TransportChoice::Auto => false,
        TransportChoice::Rdma => true,
    };
    match find(config.interface.as_deref()) {
        Ok(ports) => {
            let verbs = ffi::Verbs::load().map_err(RdmaError::Library)?;
            Rails::open_with(verbs, ports, numa_node, config.rdma_on_demand).map(Some)
        }
        Err(error) if is_demanded => Err(error),
        Err(_) => Ok(None),
    }
}

/// All RDMA lanes of one thread. Dropping it closes them: what was posted and returned by
/// [`Event::Sent`] arrives, for which it waits within bounds.
pub struct Rdma {
    // Lanes come first: their queue pairs are destroyed before the memory that they read is let go.
    lanes: Vec<Option<Box<RdmaLane>>>,
    in_place: InPlace,
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
            let data = epoll::EventData::new_u64(NEWS);
            epoll::add(&epoll, rail.news(), data, epoll::EventFlags::IN)?;
        }
        // SAFETY: completions are numbers, for which zeros are valid.
        let completions = Box::new(unsafe { std::mem::zeroed() });
        Ok(Rdma {
            lanes: Vec::new(),
            in_place: InPlace::new(&rails),
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

    /// Registers memory whose payloads are then sent from where they lie: the first `bytes` bytes
    /// from `base` on, of which those that an earlier call with this `base` named are registered
    /// already. Payloads elsewhere are copied, and so are short ones. Does nothing while there is
    /// no lane.
    ///
    /// # Errors
    /// The memory can't be registered; payloads in it are copied then.
    ///
    /// # Safety
    /// The range is mapped, and stays so as long as this driver.
    pub unsafe fn register(&mut self, base: NonNull<u8>, bytes: usize) -> Result<(), RdmaError> {
        // Without a lane nobody would read it, and registered memory is locked.
        if self.lanes.iter().all(Option::is_none) {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.in_place.add(&self.rails, base, bytes) }
    }

    /// Takes memory of a GPU that was registered with the rails of this driver: payloads in it are
    /// sent from where they lie, however short, or answers land in it.
    ///
    /// # Panics
    /// It was registered with other rails.
    ///
    /// # Safety
    /// No payload is posted that lies in a GPU's memory and not in a range that was given to this.
    /// What a posted frame grants is left alone until [`Event::Answered`], a header that says
    /// [`Carried::Declined`](super::Carried::Declined), or `Closed`.
    pub unsafe fn take_gpu(&mut self, memory: GpuMemory) {
        self.in_place.add_gpu(&self.rails, memory);
    }

    /// Registers memory that answers may land in: peers may write there, where it is granted. Does
    /// nothing while there is no lane.
    ///
    /// # Errors
    /// The memory can't be registered; answers come as other frames then.
    ///
    /// # Safety
    /// The range is mapped, and stays so until [`unregister`](Self::unregister) or the end of this
    /// driver. What a posted frame grants is left alone until [`Event::Answered`], a header that
    /// says [`Carried::Declined`](super::Carried::Declined), or `Closed`.
    pub unsafe fn register_landing(
        &mut self,
        base: NonNull<u8>,
        bytes: usize,
    ) -> Result<(), RdmaError> {
        if self.lanes.iter().all(Option::is_none) {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.in_place.add_landing(&self.rails, base, bytes) }
    }

    /// What the lanes of this thread have done.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        self.rails.counters()
    }

    /// Forgets all memory that was registered, which may be unmapped then. No lane may be left.
    pub fn unregister(&mut self) {
        assert!(self.lanes.iter().all(Option::is_none), "a lane may still use the memory");
        self.in_place.clear();
    }

    fn landing_key(&self, lane: LaneId, into: Writable) -> Option<u32> {
        self.in_place.landing_key(self.rail_of(lane)?, into.as_ptr().addr(), into.len())
    }

    fn lane(&mut self, lane: LaneId) -> Option<&mut Box<RdmaLane>> {
        self.lanes.get_mut(lane.0 as usize)?.as_mut()
    }

    /// The key of the memory that a frame's payload lies in, if it is to be sent from there.
    fn key(&self, lane: LaneId, frame: &Frame) -> Option<u32> {
        let Frame { payload, .. } = frame;
        self.in_place.key(self.rail_of(lane)?, payload.as_ptr().addr(), payload.len())
    }

    /// The place of a lane's rail among all.
    fn rail_of(&self, lane: LaneId) -> Option<usize> {
        let lane = self.lanes.get(lane.0 as usize)?.as_ref()?;
        self.rails.all().iter().position(|rail| Arc::ptr_eq(rail, lane.pair().rail()))
    }

    /// Takes completions into the state of their lanes.
    fn reap(&mut self) {
        let rails = self.rails.all().iter();
        for (rail, queue) in rails.flat_map(|rail| [(rail, &rail.received), (rail, &rail.sent)]) {
            for _ in 0..CALLS_MAX {
                Counters::add(&self.rails.counters.polls, 1);
                let Ok(count) = queue.take(rail, &mut self.completions[..]) else {
                    let lanes = self.lanes.iter_mut().flatten();
                    lanes
                        .filter(|lane| Arc::ptr_eq(lane.pair().rail(), rail))
                        .for_each(|lane| lane.fail(Cause::Rdma { status: LOST }));
                    break;
                };
                let taken = &self.completions[..count];
                if taken.iter().any(|completion| completion.status != ffi::WC_SUCCESS) {
                    // What the device says of itself tells more than an operation that failed.
                    Rdma::hear(&self.rails, &mut self.lanes);
                }
                for completion in taken {
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

    /// Takes what devices say has happened to them. Returns whether that ended a lane.
    fn hear(rails: &Rails, lanes: &mut [Option<Box<RdmaLane>>]) -> bool {
        let mut ended = false;
        for rail in rails.all() {
            while let Some(fault) = rail.fault() {
                for lane in lanes.iter_mut().flatten() {
                    let pair = lane.pair();
                    let is_meant = fault.pair.is_none_or(|meant| meant == pair.address());
                    if is_meant && Arc::ptr_eq(pair.rail(), rail) {
                        lane.fail(Cause::RdmaEvent { event: fault.event });
                        ended = true;
                    }
                }
            }
        }
        ended
    }

    /// Looks whether streams ended, or something happened to a device. Returns whether one has.
    fn look(&mut self) -> bool {
        let mut space = [MaybeUninit::uninit(); STREAMS_MAX];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((seen, _)) = epoll::wait(&self.epoll, &mut space, Some(&now)) else {
            return false;
        };
        let (mut ended, mut news) = (false, false);
        for event in seen {
            news |= event.data.u64() == NEWS;
            // The waker's mark, and others than lanes, are beyond the table.
            let index = usize::try_from(event.data.u64()).unwrap_or(usize::MAX);
            if let Some(Some(lane)) = self.lanes.get_mut(index) {
                // Nothing is sent over the stream after the set-up, so whatever it has to say is
                // that it is over. It would say so again and again.
                let _ = epoll::delete(&self.epoll, lane.stream());
                lane.handle_stream_end();
                ended = true;
            }
        }
        // What ended a stream is seen first: it says more than the fault that it causes here.
        (news && Rdma::hear(&self.rails, &mut self.lanes)) || ended
    }
}

impl Drop for Rdma {
    fn drop(&mut self) {
        // The device reads what was sent from memory that goes with this driver.
        self.lanes.iter_mut().flatten().for_each(|lane| lane.close());
        let is_left = |lane: &mut Box<RdmaLane>| !lane.is_wound_down();
        while self.lanes.iter_mut().flatten().any(is_left) {
            self.look();
            self.reap();
            std::thread::sleep(WIND_DOWN_PAUSE);
        }
    }
}

impl Driver for Rdma {
    fn takes(&self, link: &Link) -> bool {
        matches!(link, Link::Rdma(_))
    }

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
        rail.sent.hold(&rail, (mates + 1) * (SENDS + 1)).map_err(io::Error::other)?;
        rail.received.hold(&rail, (mates + 1) * RECEIVES).map_err(io::Error::other)?;
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
        let landing_key = match frame.answer {
            Answer::Wanted { into, .. } => self.landing_key(lane, into),
            Answer::No | Answer::To(_) => None,
        };
        self.lane(lane).ok_or(Full)?.post(frame, key, landing_key)
    }

    fn land(&mut self, lane: LaneId, landing: Landing) {
        if let Some(lane) = self.lane(lane) {
            lane.land(landing);
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
            let id = LaneId(word(index));
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
            let (mut wake, mut awaits_sends) = (Wake::Solicited, false);
            for lane in self.lanes.iter().flatten() {
                if Arc::ptr_eq(lane.pair().rail(), rail) {
                    awaits_sends |= lane.awaits_sends();
                    if lane.is_draining() {
                        wake = Wake::Each;
                    }
                }
            }
            rail.arm(wake, awaits_sends);
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

    fn reaches_memory(&self) -> bool {
        true
    }

    // SAFETY: as the trait demands: mapped until it is forgotten, and left alone while granted.
    unsafe fn register_memory(&mut self, memory: DirectMemory) -> Result<(), RegisterError> {
        match memory {
            // SAFETY: the caller keeps the range mapped until it is forgotten.
            DirectMemory::ToSend { base, bytes } => unsafe { self.register(base, bytes) }?,
            // SAFETY: the caller keeps this range mapped as well, and leaves alone what it has
            // granted of it until that is answered.
            DirectMemory::ToLand { base, bytes } => unsafe { self.register_landing(base, bytes) }?,
            // SAFETY: the caller posts from no other memory of GPUs, and leaves alone what it
            // granted.
            DirectMemory::Gpu(memory) => unsafe { self.take_gpu(memory) },
        }
        Ok(())
    }

    fn forget_memory(&mut self) -> Option<String> {
        self.unregister();
        Some(self.counters().to_string())
    }

    fn grants(&self, lane: LaneId, into: Writable) -> bool {
        let key = self.landing_key(lane, into);
        let lane = self.lanes.get(lane.0 as usize).and_then(Option::as_ref);
        key.is_some() && lane.is_some_and(|lane| lane.has_grants())
    }
}
