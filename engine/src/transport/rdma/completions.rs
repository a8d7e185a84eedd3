//! A queue of completions. A rail has two, so that a thread that sleeps is woken only by what it
//! waits for.

use super::RdmaError;
use super::device::Rail;
use super::ffi::{self, Verbs};
use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;

/// Entries of a queue at first; it grows with the lanes.
const ENTRIES: u32 = 1024;

/// What wakes a sleeper.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wake {
    /// Every completion.
    Each,
    /// Those that the sender asked for, and failures.
    Solicited,
}

/// See the [module](self). It belongs to a rail, which destroys it before its channel, or to a
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
