//! An endpoint: all lanes of one polling thread, over whichever transports they use. The server's
//! cores and the worker's NIC loop each own one. It hands out lane ids and knows how to sleep over
//! several transports at once; it does not know what a frame means.

use crate::config::PayloadChecksum;
use crate::limits::EVENTS_MAX;
use crate::mem::Writable;
use crate::transport::{
    DirectMemory, Driver, Event, Frame, Full, Landing, LaneId, Link, RegisterError, Transport,
    Waker,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::time::Duration;

mod builder;

pub use builder::{BuildError, EndpointBuilder, Needs};

/// All lanes of one thread.
pub struct Endpoint {
    transports: Vec<Transport>,
    /// Which transport a lane belongs to, by lane id; `None` for ids that are free.
    owners: Vec<Option<u8>>,
    /// By lane id: whether bytes may change on its way unnoticed.
    corruptible: Vec<bool>,
    waker: Waker,
    checksums: PayloadChecksum,
}

impl Endpoint {
    /// An endpoint over these transports, at most one of each kind, all made with this waker.
    #[must_use]
    pub fn new(transports: Vec<Transport>, waker: Waker) -> Endpoint {
        let checksums = PayloadChecksum::Auto;
        Endpoint { transports, owners: Vec::new(), corruptible: Vec::new(), waker, checksums }
    }

    /// The same with this rule for [`checks`](Endpoint::checks).
    #[must_use]
    pub fn with_checksums(self, checksums: PayloadChecksum) -> Endpoint {
        Endpoint { checksums, ..self }
    }

    /// Makes a lane of a link.
    ///
    /// # Errors
    /// No transport of the link's kind is here, or it refuses.
    pub fn attach(&mut self, link: Link) -> io::Result<LaneId> {
        let position = self.transports.iter().position(|transport| transport.takes(&link));
        let owner = position.ok_or(io::ErrorKind::Unsupported)?;
        let free = self.owners.iter().position(Option::is_none);
        let index = free.unwrap_or(self.owners.len());
        let lane = LaneId(u32::try_from(index).map_err(|_| io::ErrorKind::QuotaExceeded)?);
        let may_corrupt = link.may_corrupt();
        self.transports[owner].attach(lane, link)?;
        if index == self.owners.len() {
            self.owners.push(None);
            self.corruptible.push(false);
        }
        self.corruptible[index] = may_corrupt;
        self.owners[index] = Some(u8::try_from(owner).map_err(|_| io::ErrorKind::QuotaExceeded)?);
        Ok(lane)
    }

    fn owner(&mut self, lane: LaneId) -> Option<&mut Transport> {
        let owner = (*self.owners.get(lane.0 as usize)?)?;
        self.transports.get_mut(owner as usize)
    }

    /// Whether any transport here [reaches memory](Driver::reaches_memory).
    #[must_use]
    pub fn reaches_memory(&self) -> bool {
        self.transports.iter().any(Driver::reaches_memory)
    }

    /// Names memory to the transport that reaches it, if there is one; see
    /// [`Driver::register_memory`].
    ///
    /// # Errors
    /// The transport can't use the memory directly; it copies instead.
    ///
    /// # Safety
    /// As [`Driver::register_memory`] demands.
    pub unsafe fn register_memory(&mut self, memory: DirectMemory) -> Result<(), RegisterError> {
        match self.transports.iter_mut().find(|transport| transport.reaches_memory()) {
            // SAFETY: the caller keeps the contract of the method that this passes on to.
            Some(transport) => unsafe { transport.register_memory(memory) },
            None => Ok(()),
        }
    }

    /// Makes all transports forget what [`register_memory`](Self::register_memory) named, which may
    /// be unmapped then. Returns what they say of their use of it, a line each.
    ///
    /// # Panics
    /// A lane of a transport that reaches memory is left.
    pub fn forget_memory(&mut self) -> Vec<String> {
        self.transports.iter_mut().filter_map(Driver::forget_memory).collect()
    }

    /// See [`Driver::grants`].
    #[must_use]
    pub fn grants(&self, lane: LaneId, into: Writable) -> bool {
        let owner = self.owners.get(lane.0 as usize).copied().flatten();
        let transport = owner.and_then(|owner| self.transports.get(usize::from(owner)));
        transport.is_some_and(|transport| transport.grants(lane, into))
    }

    /// Whether payloads sent on this lane are to carry a checksum. A lane keeps its answer.
    #[must_use]
    pub fn checks(&self, lane: LaneId) -> bool {
        match self.checksums {
            PayloadChecksum::Always => true,
            PayloadChecksum::Never => false,
            PayloadChecksum::Auto => self.corruptible.get(lane.0 as usize) == Some(&true),
        }
    }

    /// See [`Driver::post`].
    ///
    /// # Errors
    /// [`Full`]: try again after the next `Sent` of the lane.
    pub fn post(&mut self, lane: LaneId, frame: &Frame) -> Result<(), Full> {
        self.owner(lane).ok_or(Full)?.post(lane, frame)
    }

    /// See [`Driver::land`].
    pub fn land(&mut self, lane: LaneId, landing: Landing) {
        if let Some(transport) = self.owner(lane) {
            transport.land(lane, landing);
        }
    }

    /// See [`Driver::consume`].
    pub fn consume(&mut self, lane: LaneId) {
        if let Some(transport) = self.owner(lane) {
            transport.consume(lane);
        }
    }

    /// See [`Driver::close`].
    pub fn close(&mut self, lane: LaneId) {
        if let Some(transport) = self.owner(lane) {
            transport.close(lane);
        }
    }

    /// Appends what happened, at most [`EVENTS_MAX`] events a transport. A lane whose `Closed` is
    /// among them may be given out again by the next `attach`.
    pub fn poll(&mut self, events: &mut Vec<Event>) {
        for transport in &mut self.transports {
            let before = events.len();
            transport.poll(events);
            debug_assert!(events.len() - before <= EVENTS_MAX);
            for event in &events[before..] {
                if let Event::Closed { lane, .. } = event {
                    self.owners[lane.0 as usize] = None;
                }
            }
        }
    }

    /// See [`Driver::look`].
    pub fn look(&mut self, now: Duration) {
        for transport in &mut self.transports {
            transport.look(now);
        }
    }

    /// Sleeps until traffic, the waker, or the time is over. `ready` looks at the queues that other
    /// threads fill: it is asked after the waker is armed, so that nothing put there is slept over.
    pub fn sleep(&mut self, timeout: Duration, ready: impl FnOnce() -> bool) {
        self.waker.prepare();
        let mut stay = false;
        for transport in &mut self.transports {
            stay |= transport.arm();
        }
        if !stay && !ready() {
            match self.transports.iter_mut().find(|transport| transport.wakes_for_all()) {
                Some(transport) => transport.block(timeout),
                None => self.block_on_others(timeout),
            }
        }
        self.waker.awake();
    }

    fn block_on_others(&mut self, timeout: Duration) {
        if let [only] = &mut self.transports[..] {
            only.block(timeout);
            return;
        }
        let Ok(timeout) = Timespec::try_from(timeout) else { return };
        // An interrupted or failed wait is a short wait: the caller polls again.
        let _ = poll(&mut [PollFd::new(&self.waker.fd(), PollFlags::IN)], Some(&timeout));
    }
}
