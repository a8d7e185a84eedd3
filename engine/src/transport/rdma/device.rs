//! Opened devices: contexts, protection domains, completion queues and queue pairs, each destroyed
//! by its owner.
//!
//! Invariant: whatever is made of a [`Rail`] holds it, so that nothing outlives what it was made
//! of.

use super::RdmaError;
use super::completions::{Queue, Wake};
use super::ffi::{self, Verbs};
use super::memory::can_page;
use super::ports::{Address, AddressKind, Port, keep_near};
use crate::base::word;
use std::ffi::{CStr, c_int};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that a send may carry within its work request, so that the device need not fetch them.
const INLINE_BYTES: u32 = 256;
/// Pieces of memory that one send gathers: the prefix and the payload.
const GATHER: u32 = 2;

/// What the calls of one thread's lanes added up to.
#[derive(Default, Debug)]
pub struct Counters {
    /// Work requests posted to send queues: extents, credits and farewells.
    pub sends: AtomicU64,
    /// Of these, extents of frames.
    pub extents: AtomicU64,
    /// Of these, those that carry nothing but credit.
    pub credits: AtomicU64,
    /// Of the sends, those that ask for a completion.
    pub signals: AtomicU64,
    /// Calls of `ibv_post_send`: each rings the device once.
    pub send_calls: AtomicU64,
    /// Places to receive that were posted.
    pub receives: AtomicU64,
    /// Calls of `ibv_post_recv`.
    pub receive_calls: AtomicU64,
    /// Completions of sends.
    pub send_completions: AtomicU64,
    /// Completions of receives.
    pub receive_completions: AtomicU64,
    /// Calls of `ibv_poll_cq`.
    pub polls: AtomicU64,
    /// Of the sends, answers that were written straight to where the peer granted.
    pub answers: AtomicU64,
    /// Bytes of payload that were copied into registered memory to be sent.
    pub staged_bytes: AtomicU64,
    /// Bytes of payload that were copied out of the area that the peer writes to; those that
    /// passed in pieces are not among them.
    pub copied_bytes: AtomicU64,
}

impl std::fmt::Display for Counters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        write!(
            f,
            "rdma: {} operations of this end, of which {} wrote answers straight to where they \
             belong; {} bytes copied to be sent, {} bytes copied out of what peers wrote",
            of(&self.sends),
            of(&self.answers),
            of(&self.staged_bytes),
            of(&self.copied_bytes)
        )
    }
}

impl Counters {
    /// Only the owner of the lanes counts, so that a load and a store are enough.
    pub(super) fn add(counter: &AtomicU64, count: usize) {
        counter.store(counter.load(Ordering::Relaxed) + count as u64, Ordering::Relaxed);
    }
}

/// One port with all that lanes over it share.
pub(super) struct Rail {
    pub(super) verbs: &'static Verbs,
    port: Port,
    pub(super) context: NonNull<ffi::Context>,
    pub(super) pd: NonNull<ffi::Pd>,
    channel: NonNull<ffi::Channel>,
    /// What became of sends, and what came.
    pub(super) sent: Queue,
    pub(super) received: Queue,
    pub(super) mtu: u8,
    pub(super) lid: u16,
    /// Most bytes of one operation.
    pub(super) message_bytes: usize,
}

// SAFETY: every call of libibverbs may be made from any thread; the handles are not changed.
unsafe impl Send for Rail {}
// SAFETY: shared references only read the handles and pass them to libibverbs, whose calls may be
// made from several threads at once.
unsafe impl Sync for Rail {}

impl Rail {
    fn open(verbs: &'static Verbs, port: &Port) -> Result<Rail, RdmaError> {
        let fail = |call| RdmaError::last(call, port);
        let context = open_device(verbs, port)?;
        // SAFETY: each call is given what the call before it made, and what failed halfway is
        // destroyed in the opposite order.
        unsafe {
            let pd = NonNull::new((verbs.alloc_pd)(context.as_ptr())).ok_or_else(|| {
                let error = fail("ibv_alloc_pd");
                (verbs.close_device)(context.as_ptr());
                error
            })?;
            let unmake = |error: RdmaError| {
                (verbs.dealloc_pd)(pd.as_ptr());
                (verbs.close_device)(context.as_ptr());
                error
            };
            let channel = NonNull::new((verbs.create_comp_channel)(context.as_ptr()))
                .ok_or_else(|| unmake(fail("ibv_create_comp_channel")))?;
            let no_queue = || {
                let error = fail("ibv_create_cq");
                (verbs.destroy_comp_channel)(channel.as_ptr());
                unmake(error)
            };
            let sent = Queue::new(verbs, context, channel.as_ptr()).ok_or_else(no_queue)?;
            let received = Queue::new(verbs, context, channel.as_ptr()).ok_or_else(|| {
                let error = fail("ibv_create_cq");
                (verbs.destroy_cq)(sent.as_ptr());
                (verbs.destroy_comp_channel)(channel.as_ptr());
                unmake(error)
            })?;
            let mut rail = Rail {
                verbs,
                port: port.clone(),
                context,
                pd,
                channel,
                sent,
                received,
                mtu: 0,
                lid: 0,
                message_bytes: 0,
            };
            for fd in [rail.channel(), rail.news()] {
                rustix::io::ioctl_fionbio(fd, true)
                    .map_err(|errno| rail.error("ioctl", errno.into()))?;
            }
            let mut attributes: ffi::PortAttr = std::mem::zeroed();
            let status = (verbs.query_port)(context.as_ptr(), port.number, &raw mut attributes);
            rail.check("ibv_query_port", status)?;
            rail.mtu = u8::try_from(attributes.active_mtu).unwrap_or(1).clamp(1, 5);
            rail.lid = attributes.lid;
            rail.message_bytes = attributes.max_msg_sz as usize;
            Ok(rail)
        }
    }

    pub(super) fn port(&self) -> &Port {
        &self.port
    }

    pub(super) fn error(&self, call: &'static str, source: io::Error) -> RdmaError {
        RdmaError::Call { call, port: self.port.to_string(), source }
    }

    pub(super) fn check(&self, call: &'static str, status: c_int) -> Result<(), RdmaError> {
        match status {
            0 => Ok(()),
            // Some calls return the error, some set errno.
            1.. => Err(self.error(call, io::Error::from_raw_os_error(status))),
            _ => Err(self.error(call, io::Error::last_os_error())),
        }
    }

    /// Readable when there are completions that were asked for.
    pub(super) fn channel(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel lives as long as `self`, and its descriptor with it.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }

    /// Readable when something has happened to the device, a port or a queue.
    pub(super) fn news(&self) -> BorrowedFd<'_> {
        // SAFETY: the context lives as long as `self`, and its descriptor with it.
        unsafe { BorrowedFd::borrow_raw(self.context.as_ref().async_fd) }
    }

    /// The next of what has happened that ends lanes.
    pub(super) fn fault(&self) -> Option<Fault> {
        // SAFETY: the event is a number and an address, for which zeros are valid.
        let mut event: ffi::AsyncEvent = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor does not block; each event that was taken is acknowledged once.
        while unsafe { (self.verbs.get_async_event)(self.context.as_ptr(), &raw mut event) } == 0 {
            // SAFETY: the call above has filled the event, and this acknowledges it once.
            unsafe { (self.verbs.ack_async_event)(&raw mut event) };
            let of = match event.event_type {
                ffi::EVENT_DEVICE_FATAL => None,
                // That of a trial has no lanes.
                ffi::EVENT_CQ_ERR
                    if [&self.sent, &self.received].map(Queue::as_ptr).contains(&event.cq()) =>
                {
                    None
                }
                ffi::EVENT_PORT_ERR if event.port() == self.port.number => None,
                ffi::EVENT_QP_FATAL | ffi::EVENT_QP_REQ_ERR | ffi::EVENT_QP_ACCESS_ERR => {
                    Some(event.qp().addr())
                }
                _ => continue,
            };
            return Some(Fault { event: event.event_type, pair: of });
        }
        None
    }

    /// Asks for wake-ups, after taking back earlier ones: by what comes, and by what becomes of
    /// sends if that is awaited.
    pub(super) fn arm(&self, received: Wake, awaits_sends: bool) {
        let (mut cq, mut tag) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the channel is this rail's and does not block; each event that was taken is
        // acknowledged, on the queue that it is of.
        unsafe {
            while (self.verbs.get_cq_event)(self.channel.as_ptr(), &raw mut cq, &raw mut tag) == 0 {
                (self.verbs.ack_cq_events)(cq, 1);
            }
        }
        self.received.arm(self, received);
        if awaits_sends {
            self.sent.arm(self, Wake::Each);
        }
    }
}

impl Drop for Rail {
    fn drop(&mut self) {
        // SAFETY: whatever was made of these holds the rail, so it is gone; each is destroyed once.
        // A failure could not be helped: the kernel takes all back when the process ends.
        unsafe {
            (self.verbs.destroy_cq)(self.received.as_ptr());
            (self.verbs.destroy_cq)(self.sent.as_ptr());
            (self.verbs.destroy_comp_channel)(self.channel.as_ptr());
            (self.verbs.dealloc_pd)(self.pd.as_ptr());
            (self.verbs.close_device)(self.context.as_ptr());
        }
    }
}

fn open_device(verbs: &'static Verbs, port: &Port) -> Result<NonNull<ffi::Context>, RdmaError> {
    let mut count = 0;
    // SAFETY: the list is valid until it is freed below, and has `count` devices; an opened device
    // does not need it.
    unsafe {
        let list = (verbs.get_device_list)(&raw mut count);
        if list.is_null() {
            return Err(RdmaError::last("ibv_get_device_list", port));
        }
        let devices = std::slice::from_raw_parts(list, usize::try_from(count).unwrap_or(0));
        let named = devices.iter().find(|device| {
            CStr::from_ptr((verbs.get_device_name)(**device)).to_bytes() == port.device.as_bytes()
        });
        let opened = named.map(|device| (verbs.open_device)(*device));
        let error = RdmaError::last("ibv_open_device", port);
        (verbs.free_device_list)(list);
        match opened {
            Some(context) => NonNull::new(context).ok_or(error),
            None => Err(RdmaError::Driver { port: port.to_string() }),
        }
    }
}

/// The rails of one thread.
pub struct Rails {
    rails: Vec<Arc<Rail>>,
    /// Whether all memory is to be sent from in place, where a device can.
    pub(super) on_demand: bool,
    pub(super) counters: Counters,
}

impl Rails {
    /// Opens these ports for a thread on this NUMA node. A port that can't be opened is left out
    /// if another can.
    ///
    /// # Errors
    /// No port can be opened; says why of the first.
    pub fn open(ports: Vec<Port>, numa_node: Option<u32>) -> Result<Arc<Rails>, RdmaError> {
        Rails::open_with(Verbs::load()?, ports, numa_node, false)
    }

    pub(super) fn open_with(
        verbs: &'static Verbs,
        mut ports: Vec<Port>,
        numa_node: Option<u32>,
        on_demand: bool,
    ) -> Result<Arc<Rails>, RdmaError> {
        keep_near(&mut ports, numa_node);
        let (mut rails, mut first) = (Vec::new(), None);
        for port in &ports {
            match Rail::open(verbs, port) {
                Ok(rail) => rails.push(Arc::new(rail)),
                Err(error) => drop(first.get_or_insert(error)),
            }
        }
        if rails.is_empty() {
            return Err(first.unwrap_or(RdmaError::NoPort { interface: None }));
        }
        Ok(Arc::new(Rails { rails, on_demand, counters: Counters::default() }))
    }

    /// Which ports are used, in one line to be printed at start.
    #[must_use]
    pub fn description(&self) -> String {
        let name = |rail: &Arc<Rail>| match self.on_demand.then(|| can_page(rail)) {
            None => rail.port.to_string(),
            Some(Ok(())) => format!("{}, tensors sent from in place", rail.port),
            Some(Err(why)) => format!("{}, tensors copied: {why}", rail.port),
        };
        let ports: Vec<String> = self.rails.iter().map(name).collect();
        format!("rdma: {}", ports.join("; "))
    }

    /// What the lanes of this thread have done.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    pub(super) fn all(&self) -> &[Arc<Rail>] {
        &self.rails
    }

    /// The rail for this lane: lanes are spread over all.
    pub(super) fn rail(&self, lane: usize) -> &Arc<Rail> {
        &self.rails[lane % self.rails.len()]
    }
}

/// What a device says has happened to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Fault {
    /// As `ibv_event_type` lists it.
    pub(super) event: c_int,
    /// The one queue pair that it is of, by its address; all if there is none.
    pub(super) pair: Option<usize>,
}

/// The peer's end of a queue pair, as it told us.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Remote {
    pub(super) number: u32,
    pub(super) sequence: u32,
    pub(super) mtu: u8,
    pub(super) lid: u16,
    pub(super) gid: [u8; 16],
}

/// A reliable connection.
pub(super) struct QueuePair {
    rail: Arc<Rail>,
    qp: NonNull<ffi::Qp>,
    inline_bytes: usize,
}

// SAFETY: every call of libibverbs may be made from any thread.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// A queue pair whose peer may write to regions that allow it, not yet connected.
    pub(super) fn new(
        rail: &Arc<Rail>,
        sends: usize,
        receives: usize,
    ) -> Result<QueuePair, RdmaError> {
        QueuePair::with_queues(rail, [&rail.sent, &rail.received], sends, receives)
    }

    /// The same with queues of the caller's, for what it sends and receives, which outlive it.
    pub(super) fn with_queues(
        rail: &Arc<Rail>,
        [sent, received]: [&Queue; 2],
        sends: usize,
        receives: usize,
    ) -> Result<QueuePair, RdmaError> {
        let mut result = Err(rail.error("ibv_create_qp", io::ErrorKind::Unsupported.into()));
        // Some devices refuse what others grant: then without inline data.
        for inline_bytes in [INLINE_BYTES, 0] {
            let mut wanted = ffi::QpInitAttr {
                qp_context: std::ptr::null_mut(),
                send_cq: sent.as_ptr(),
                recv_cq: received.as_ptr(),
                srq: std::ptr::null_mut(),
                cap: ffi::QpCap {
                    max_send_wr: word(sends),
                    max_recv_wr: word(receives),
                    max_send_sge: GATHER,
                    max_recv_sge: 1,
                    max_inline_data: inline_bytes,
                },
                qp_type: ffi::QP_TYPE_RC,
                sq_sig_all: 0,
            };
            // SAFETY: the domain is the rail's, which the pair holds, and the queues outlive it.
            let qp = unsafe { (rail.verbs.create_qp)(rail.pd.as_ptr(), &raw mut wanted) };
            match NonNull::new(qp) {
                Some(qp) => {
                    let inline_bytes = wanted.cap.max_inline_data as usize;
                    result = Ok(QueuePair { rail: Arc::clone(rail), qp, inline_bytes });
                    break;
                }
                None => result = Err(rail.error("ibv_create_qp", io::Error::last_os_error())),
            }
        }
        let pair = result?;
        let mut wanted = attributes(ffi::STATE_INIT);
        wanted.port_num = rail.port.number;
        wanted.qp_access_flags = ffi::ACCESS_REMOTE_WRITE.cast_unsigned();
        let mask = ffi::ATTR_PKEY_INDEX | ffi::ATTR_PORT | ffi::ATTR_ACCESS_FLAGS;
        pair.modify("ibv_modify_qp to INIT", &mut wanted, mask)?;
        Ok(pair)
    }

    pub(super) fn rail(&self) -> &Arc<Rail> {
        &self.rail
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: the pair lives as long as `self`.
        unsafe { self.qp.as_ref() }.qp_num
    }

    /// By which the device's library knows it.
    pub(super) fn address(&self) -> usize {
        self.qp.addr().get()
    }

    /// Bytes that a send may carry inline.
    pub(super) fn inline_bytes(&self) -> usize {
        self.inline_bytes
    }

    /// Connects to the peer by an address of ours of the kind that the peer's is.
    pub(super) fn connect(
        &self,
        ours: &Address,
        sequence: u32,
        peer: &Remote,
    ) -> Result<(), RdmaError> {
        let mut wanted = attributes(ffi::STATE_RTR);
        wanted.path_mtu = c_int::from(peer.mtu.min(self.rail.mtu));
        wanted.dest_qp_num = peer.number;
        wanted.rq_psn = peer.sequence;
        wanted.max_dest_rd_atomic = 1;
        // 0.64 ms: how long the peer waits where we have no place to receive posted yet.
        wanted.min_rnr_timer = 12;
        let half = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&peer.gid[at..at + 8]);
            u64::from_ne_bytes(bytes)
        };
        let path = &mut wanted.ah_attr;
        path.is_global = u8::from(ours.kind != AddressKind::InfiniBand);
        path.dgid = [half(0), half(8)];
        path.sgid_index = ours.index;
        path.hop_limit = 64;
        path.dlid = peer.lid;
        path.port_num = self.rail.port.number;
        let mask = ffi::ATTR_AV
            | ffi::ATTR_PATH_MTU
            | ffi::ATTR_DEST_QPN
            | ffi::ATTR_RQ_PSN
            | ffi::ATTR_MAX_DEST_RD_ATOMIC
            | ffi::ATTR_MIN_RNR_TIMER;
        self.modify("ibv_modify_qp to RTR", &mut wanted, mask)?;
        let mut wanted = attributes(ffi::STATE_RTS);
        wanted.sq_psn = sequence;
        // 67 ms, six times, on some devices each time longer: a path that is silent for that long
        // is down. Soft-RoCE takes seven for ever.
        wanted.timeout = 14;
        wanted.retry_cnt = 6;
        // For ever: the peer has promised places, and its stream tells when it is gone.
        wanted.rnr_retry = 7;
        wanted.max_rd_atomic = 1;
        let mask = ffi::ATTR_SQ_PSN
            | ffi::ATTR_TIMEOUT
            | ffi::ATTR_RETRY_CNT
            | ffi::ATTR_RNR_RETRY
            | ffi::ATTR_MAX_QP_RD_ATOMIC;
        self.modify("ibv_modify_qp to RTS", &mut wanted, mask)
    }

    /// Ends the connection: whatever is posted comes back as a completion.
    pub(super) fn fail(&self) -> Result<(), RdmaError> {
        self.modify("ibv_modify_qp to ERR", &mut attributes(ffi::STATE_ERROR), 0)
    }

    fn modify(
        &self,
        call: &'static str,
        wanted: &mut ffi::QpAttr,
        mask: c_int,
    ) -> Result<(), RdmaError> {
        // SAFETY: the pair lives, and the attributes are of the header's layout.
        let status = unsafe {
            (self.rail.verbs.modify_qp)(self.qp.as_ptr(), wanted, mask | ffi::ATTR_STATE)
        };
        self.rail.check(call, status)
    }

    /// Posts a chain of sends.
    ///
    /// # Safety
    /// The chain is linked and ends; its memory may be read until each send has completed.
    pub(super) unsafe fn post_send(&self, first: *mut ffi::SendWr) -> c_int {
        let mut refused = std::ptr::null_mut();
        // SAFETY: the caller's promise; the table is the provider's own.
        unsafe {
            match self.rail.context.as_ref().ops.post_send {
                Some(post) => post(self.qp.as_ptr(), first, &raw mut refused),
                None => libc::ENOSYS,
            }
        }
    }

    /// Posts a chain of places to receive, which name no memory.
    ///
    /// # Safety
    /// The chain is linked and ends.
    pub(super) unsafe fn post_receive(&self, first: *mut ffi::RecvWr) -> c_int {
        let mut refused = std::ptr::null_mut();
        // SAFETY: the caller's promise; the table is the provider's own.
        unsafe {
            match self.rail.context.as_ref().ops.post_recv {
                Some(post) => post(self.qp.as_ptr(), first, &raw mut refused),
                None => libc::ENOSYS,
            }
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once. From here on the device touches none of its memory.
        unsafe { (self.rail.verbs.destroy_qp)(self.qp.as_ptr()) };
    }
}

/// Attributes of which only the state is set.
fn attributes(state: c_int) -> ffi::QpAttr {
    // SAFETY: all fields are numbers, for which zeros are valid.
    let mut attributes: ffi::QpAttr = unsafe { std::mem::zeroed() };
    attributes.qp_state = state;
    attributes
}
