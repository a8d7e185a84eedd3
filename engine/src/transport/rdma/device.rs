//! What a thread opens of the devices: its rails, and queue pairs on them, each of which holds its
//! rail and is destroyed by its owner.

use super::RdmaError;
use super::ffi::{self, Verbs};
use super::ports::{Address, AddressKind, Port, keep_near};
use super::rail::{Queue, Rail};
use crate::base::word;
use std::ffi::c_int;
use std::io;
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
        Rails::open_with(Verbs::load().map_err(RdmaError::Library)?, ports, numa_node, false)
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
        let name = |rail: &Arc<Rail>| match self.on_demand.then(|| rail.can_page()) {
            None => rail.port().to_string(),
            Some(Ok(())) => format!("{}, tensors sent from in place", rail.port()),
            Some(Err(why)) => format!("{}, tensors copied: {why}", rail.port()),
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

/// The ports that the lanes of a thread use, among all that it has opened.
#[derive(Clone)]
pub struct Ports {
    rails: Arc<Rails>,
    used: Vec<usize>,
}

impl Ports {
    /// All that the thread has opened.
    #[must_use]
    pub fn all(rails: &Arc<Rails>) -> Ports {
        Ports::new(Arc::clone(rails), (0..rails.all().len()).collect())
    }

    pub(super) fn new(rails: Arc<Rails>, mut used: Vec<usize>) -> Ports {
        used.sort_unstable();
        used.dedup();
        Ports { rails, used }
    }

    /// By their places among the rails.
    #[must_use]
    pub fn used(&self) -> &[usize] {
        &self.used
    }

    pub(super) fn rails(&self) -> &Arc<Rails> {
        &self.rails
    }
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
        wanted.port_num = rail.port().number;
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
        path.port_num = self.rail.port().number;
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
