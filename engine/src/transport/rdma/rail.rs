//! An opened port: its context and protection domain, and two queues of completions, so that a
//! thread that sleeps is woken only by what it waits for.
//!
//! Invariant: whatever is made of a [`Rail`] holds it, so that nothing outlives what it was made
//! of.

use super::RdmaError;
use super::ffi::{self, DeviceAttrEx, Verbs};
use super::ports::Port;
use std::ffi::{CStr, c_int};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

/// Entries of a queue at first; it grows with the lanes.
const ENTRIES: u32 = 1024;

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
    pub(super) fn open(verbs: &'static Verbs, port: &Port) -> Result<Rail, RdmaError> {
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

    /// Whether writes of this device may read memory that is paged in on demand; why not.
    pub(super) fn can_page(&self) -> Result<(), String> {
        let no = |why: &str| Err(format!("no paging on demand: {why}"));
        // SAFETY: the context lives as long as `self`.
        if unsafe { self.context.as_ref() }.abi_compat.addr() != usize::MAX {
            return no("its driver is of an old kind");
        }
        let before = std::mem::offset_of!(ffi::ContextTail, context);
        let tail = self.context.as_ptr().cast::<u8>().wrapping_sub(before);
        let tail = tail.cast::<ffi::ContextTail>();
        // SAFETY: a provider of this kind has its context at the end of a larger struct, whose
        // size, together with the context, stands right in front of it.
        let size = unsafe { (&raw const (*tail).sz).read() };
        if size < size_of::<ffi::ContextTail>() {
            return no("its driver does not tell what it can do");
        }
        // SAFETY: the struct is large enough to have this field, as was just seen.
        let Some(query) = (unsafe { (&raw const (*tail).query_device_ex).read() }) else {
            return no("its driver does not tell what it can do");
        };
        // SAFETY: all fields are numbers, for which zeros are valid.
        let mut found: DeviceAttrEx = unsafe { std::mem::zeroed() };
        let known = std::mem::offset_of!(DeviceAttrEx, rest);
        // SAFETY: the device is open, and `found` has room for more than is asked for.
        let status =
            unsafe { query(self.context.as_ptr(), std::ptr::null(), &raw mut found, known) };
        let wanted = ffi::ODP_SUPPORT | ffi::ODP_SUPPORT_IMPLICIT;
        match status {
            0 if found.general_caps & wanted != wanted => {
                no("the device can't do it for all memory")
            }
            0 if found.rc_odp_caps & ffi::ODP_SUPPORT_WRITE == 0 => no("the device can't do it"),
            0 => Ok(()),
            errno => no(&io::Error::from_raw_os_error(errno.abs()).to_string()),
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

/// What a device says has happened to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Fault {
    /// As `ibv_event_type` lists it.
    pub(super) event: c_int,
    /// The one queue pair that it is of, by its address; all if there is none.
    pub(super) pair: Option<usize>,
}

/// What wakes a sleeper.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wake {
    /// Every completion.
    Each,
    /// Those that the sender asked for, and failures.
    Solicited,
}

/// A queue of completions. It belongs to a rail, which destroys it before its channel, or to a
/// trial.
pub(super) struct Queue(NonNull<ffi::Cq>);

impl Queue {
    /// A queue that tells on this channel or, if that is null, nobody.
    ///
    /// # Safety
    /// Context and channel live, and the second is of the first.
    pub(super) unsafe fn new(
        verbs: &Verbs,
        context: NonNull<ffi::Context>,
        channel: *mut ffi::Channel,
    ) -> Option<Queue> {
        let (entries, null) = (ENTRIES.cast_signed(), std::ptr::null_mut());
        // SAFETY: the caller's promise.
        let cq = unsafe { (verbs.create_cq)(context.as_ptr(), entries, null, channel, 0) };
        NonNull::new(cq).map(Queue)
    }

    pub(super) fn as_ptr(&self) -> *mut ffi::Cq {
        self.0.as_ptr()
    }

    /// Takes completions, as many as there are and have room. An error is one of the queue itself.
    pub(super) fn take(&self, rail: &Rail, into: &mut [ffi::Wc]) -> Result<usize, RdmaError> {
        // More than an int counts are taken by the next call.
        let room = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue is the rail's, and `into` has so much room.
        let count = unsafe {
            match rail.context.as_ref().ops.poll_cq {
                Some(poll) => poll(self.as_ptr(), room, into.as_mut_ptr()),
                None => -1,
            }
        };
        usize::try_from(count).map_err(|_| rail.error("ibv_poll_cq", io::Error::other("overrun")))
    }

    /// Asks for a word on the channel by the next completion of this kind.
    pub(super) fn arm(&self, rail: &Rail, wake: Wake) {
        // SAFETY: the queue is the rail's.
        unsafe {
            if let Some(notify) = rail.context.as_ref().ops.req_notify_cq {
                notify(self.as_ptr(), c_int::from(wake == Wake::Solicited));
            }
        }
    }

    /// Makes the queue hold at least this many completions, so that it never overruns.
    pub(super) fn hold(&self, rail: &Rail, count: usize) -> Result<(), RdmaError> {
        // SAFETY: the queue is the rail's; the library keeps its size there.
        if usize::try_from(unsafe { self.0.as_ref() }.cqe).is_ok_and(|size| size >= count) {
            return Ok(());
        }
        let wanted = count.next_multiple_of(ENTRIES as usize);
        // A device refuses a queue of 2^31 entries, and that is reported.
        let wanted = c_int::try_from(wanted).unwrap_or(c_int::MAX);
        // SAFETY: the queue is the rail's, and only the thread that polls it calls this.
        let status = unsafe { (rail.verbs.resize_cq)(self.as_ptr(), wanted) };
        rail.check("ibv_resize_cq", status)
    }
}
