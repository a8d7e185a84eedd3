//! An endpoint: all lanes of one polling thread, over whichever transports they use. The server's
//! cores and the worker's NIC loop each own one. It hands out lane ids and knows how to sleep over
//! several transports at once; it does not know what a frame means.

use crate::config::PayloadChecksum;
use crate::limits::EVENTS_MAX;
use crate::transport::rdma::Rdma;
use crate::transport::{Driver, Event, Frame, Full, Landing, LaneId, Link, Transport, Waker};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::time::Duration;

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
        let wanted = |transport: &Transport| {
            matches!(
                (transport, &link),
                (Transport::Tcp(_), Link::Tcp(_))
                    | (Transport::Shm(_), Link::Shm(_))
                    | (Transport::Rdma(_), Link::Rdma(_))
                    | (Transport::Sim(_), Link::Sim(_))
            )
        };
        let position = self.transports.iter().position(wanted);
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

    /// The RDMA transport, if there is one: to name memory that it may send from in place.
    pub fn rdma(&mut self) -> Option<&mut Rdma> {
        self.transports.iter_mut().find_map(|transport| match transport {
            Transport::Rdma(driver) => Some(&mut **driver),
            _ => None,
        })
    }

    /// See [`Transport::grants`].
    #[must_use]
    pub fn grants(&self, lane: LaneId, at: *mut u8, length: usize) -> bool {
        let owner = self.owners.get(lane.0 as usize).copied().flatten();
        let transport = owner.and_then(|owner| self.transports.get(usize::from(owner)));
        transport.is_some_and(|transport| transport.grants(lane, at, length))
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
    pub fn land(&mut self, lane: LaneId, landing: Landing, length: usize) {
        if let Some(transport) = self.owner(lane) {
            transport.land(lane, landing, length);
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
            let tcp = self.transports.iter_mut().find(|one| matches!(one, Transport::Tcp(_)));
            match tcp {
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
