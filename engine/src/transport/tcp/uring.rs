//! The io_uring driver: every lane has at most one receive, one send and one cancellation in
//! flight; a poll submits all that is due with one system call, and none if nothing is.
//!
//! Invariants: memory named by an operation stays valid until its completion has been reaped: a
//! lane leaves the table, and its id becomes free, only when nothing of it is in flight. User data
//! carries the lane's generation, so a completion never reaches a later lane of the same id.

use super::Denied;
use super::lingering::Lingering;
use super::memory::Pool;
use super::sealed::Keys;
use super::stream::{Cork, Out, Ready, Stream};
use crate::base::word;
use crate::limits::{EVENTS_MAX, GATHER_MAX};
use crate::transport::{Cause, Event, Frame, Full, Landing, LaneId, Waker};
use io_uring::squeue::Entry;
use io_uring::{IoUring, cqueue, opcode, types};
use libc::{iovec, msghdr};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::thread::ThreadId;
use std::time::Duration;

/// What the start line says about zero-copy sends: there are none, because on every path that could
/// be measured the kernel copied all the same and took longer. `docs/decisions.md` has the figures.
pub(super) const ZERO_COPY: &str = "send-zc off: no measured path gains by it";

/// Operations that one system call submits at most; a fuller queue is submitted early.
const SUBMISSIONS_MAX: u32 = 256;
/// The kernel's own bound on a completion queue.
const COMPLETIONS_MAX: u32 = 65_536;
/// Operations of one lane that may be in flight: a receive, a send, a cancellation.
const LANE_OPERATIONS_MAX: u32 = 3;
/// Smallest send that is worth the hand-over to another thread: copying it takes far longer.
const OFFLOAD_BYTES_MIN: usize = 32 << 10;
/// Rounds of ten milliseconds that a dropped transport waits for the kernel to let go of memory.
const DROP_ROUNDS_MAX: usize = 500;

const RECEIVE: u64 = 1;
const SEND: u64 = 2;
const CANCEL: u64 = 3;
const WAKE: u64 = 4;

/// The `msghdr` of an operation and its memory vector, at a stable address for as long as the lane
/// lives.
struct Message<const N: usize> {
    header: msghdr,
    iovecs: [iovec; N],
}

impl<const N: usize> Message<N> {
    fn new() -> Message<N> {
        // SAFETY: all-zero bytes are a valid `msghdr` and a valid `iovec`: null pointers and zero
        // lengths.
        unsafe { std::mem::zeroed() }
    }

    /// Points the header at the first `count` vectors. The message must not move from here on.
    fn aim(&mut self, count: usize) -> *mut msghdr {
        self.header.msg_iov = self.iovecs.as_mut_ptr();
        self.header.msg_iovlen = count;
        &raw mut self.header
    }
}

struct Lane {
    stream: Stream,
    socket: OwnedFd,
    generation: u32,
    receiving: bool,
    sending: bool,
    cancelling: bool,
    incoming: Message<2>,
    outgoing: Message<GATHER_MAX>,
}

// SAFETY: the raw pointers are those of `Message`, which point into the lane itself (it is boxed)
// or to memory that
// `Receiver` and `Sender` answer for; they are used by the one thread that drives the transport.
unsafe impl Send for Lane {}

impl Lane {
    fn in_flight(&self) -> bool {
        self.receiving || self.sending || self.cancelling
    }

    fn user_data(&self, kind: u64) -> u64 {
        kind << 60 | u64::from(self.generation & GENERATIONS) << 32 | u64::from(self.stream.lane.0)
    }
}

const GENERATIONS: u32 = (1 << 28) - 1;

/// See the [module](self).
pub(super) struct Uring {
    // The ring comes first: it is closed before the memory that its operations name is freed.
    ring: IoUring,
    lanes: Box<[Option<Box<Lane>>]>,
    attached: usize,
    /// Lanes whose end the last poll told: until the next one, the caller may hold pieces in their
    /// memory.
    gone: Vec<Stream>,
    lingering: Lingering,
    ready: Ready,
    cork: Cork,
    /// The last poll brought events.
    progress: bool,
    pool: Pool,
    waker: Waker,
    /// The thread that enabled the ring: the only one the kernel serves.
    owner: Option<ThreadId>,
    generation: u32,
    polls: u64,
    waker_armed: bool,
    woken: bool,
    /// Large sends go to threads of the kernel's.
    pub(super) offload: bool,
}

impl Uring {
    /// A ring for lanes 0 to `lanes_max - 1`. It is made disabled, to find out now whether the
    /// kernel allows it, and enabled by the thread that first uses it.
    pub fn new(waker: Waker, lanes_max: u32) -> Result<Uring, Denied> {
        let denied = |call| move |source| Denied { call, source };
        let completions = (lanes_max.saturating_mul(LANE_OPERATIONS_MAX))
            .saturating_add(16)
            .clamp(2 * SUBMISSIONS_MAX, COMPLETIONS_MAX);
        let ring: IoUring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .setup_r_disabled()
            .setup_cqsize(completions)
            .build(SUBMISSIONS_MAX)
            .map_err(denied("io_uring_setup"))?;
        ring.submitter()
            .register_files_sparse(lanes_max.max(1))
            .map_err(denied("io_uring_register"))?;
        // SAFETY: this submits nothing and passes no memory; a disabled ring answers EBADFD, a
        // filter its own error.
        let entered = unsafe { ring.submitter().enter::<libc::sigset_t>(0, 0, 0, None) };
        match entered {
            Err(error) if error.raw_os_error() != Some(libc::EBADFD) => {
                return Err(denied("io_uring_enter")(error));
            }
            _ => {}
        }
        let lanes = (0..lanes_max).map(|_| None).collect();
        Ok(Uring {
            ring,
            lanes,
            attached: 0,
            gone: Vec::new(),
            lingering: Lingering::default(),
            ready: Ready::new(lanes_max),
            cork: Cork::default(),
            progress: false,
            pool: Pool::new(),
            waker,
            owner: None,
            generation: 0,
            polls: 0,
            waker_armed: false,
            woken: false,
            offload: false,
        })
    }

    fn enable(&mut self) {
        if self.owner.is_none() {
            self.owner = Some(std::thread::current().id());
            let enabled = self.ring.submitter().register_enable_rings();
            enabled.expect(
                "a ring made disabled can be enabled once, and the owner says that it was not",
            );
        }
        if !self.waker_armed {
            let watch = opcode::PollAdd::new(types::Fd(self.waker.fd().as_raw_fd()), READABLE)
                .multi(true)
                .build()
                .user_data(WAKE << 60);
            self.waker_armed = push(&mut self.ring, &watch);
        }
    }

    pub fn attach(&mut self, lane: LaneId, socket: OwnedFd, keys: Option<&Keys>) -> io::Result<()> {
        self.enable();
        let Some(place) = self.lanes.get_mut(lane.0 as usize) else {
            return Err(io::Error::from(io::ErrorKind::QuotaExceeded));
        };
        if place.is_some() {
            return Err(io::Error::from(io::ErrorKind::AlreadyExists));
        }
        self.ring.submitter().register_files_update(lane.0, &[socket.as_raw_fd()])?;
        self.generation = self.generation.wrapping_add(1);
        *place = Some(Box::new(Lane {
            stream: Stream::new(lane, keys),
            socket,
            generation: self.generation,
            receiving: false,
            sending: false,
            cancelling: false,
            incoming: Message::new(),
            outgoing: Message::new(),
        }));
        self.pool.grow();
        self.attached += 1;
        self.ready.push(lane.0);
        Ok(())
    }

    fn lane(&mut self, lane: LaneId) -> Option<&mut Lane> {
        self.lanes.get_mut(lane.0 as usize)?.as_deref_mut()
    }

    pub fn post(&mut self, lane: LaneId, frame: &Frame) -> Result<(), Full> {
        self.lane(lane).ok_or(Full)?.stream.post(frame)?;
        self.ready.push(lane.0);
        Ok(())
    }

    pub fn land(&mut self, lane: LaneId, landing: Landing) {
        if let Some(at) = self.lane(lane) {
            at.stream.land(landing);
            self.ready.push(lane.0);
        }
    }

    pub fn consume(&mut self, lane: LaneId) {
        if let Some(Some(at)) = self.lanes.get_mut(lane.0 as usize) {
            at.stream.consume(&mut self.pool);
            self.ready.push(lane.0);
        }
    }

    pub fn close(&mut self, lane: LaneId) {
        if let Some(at) = self.lane(lane) {
            at.stream.close(Cause::Local);
            self.ready.push(lane.0);
        }
    }

    pub fn poll(&mut self, events: &mut Vec<Event>) {
        self.enable();
        self.polls += 1;
        self.pool.bury(&mut self.gone);
        let before = events.len();
        let mut out = Out::new(events, EVENTS_MAX);
        self.cork.begin(self.progress);
        self.reap();
        self.run(&mut out);
        if self.submit() {
            // Much of what was submitted is done at once: bytes that had arrived, sends with room.
            // What this second round prepares goes with the next poll, which comes as soon as the
            // caller has answered these events.
            self.reap();
            self.run(&mut out);
        }
        self.progress = events.len() > before;
    }

    /// Closes the lanes whose peers have acknowledged nothing for so long.
    pub fn look(&mut self, now: Duration, silence: Option<Duration>) {
        self.lingering.look(now);
        let Some(silence) = silence else { return };
        for lane in self.lanes.iter_mut().flatten() {
            if lane.stream.look(&lane.socket, now, silence) {
                self.ready.push(lane.stream.lane.0);
            }
        }
    }

    pub fn block(&mut self, timeout: Duration) {
        self.enable();
        self.reap();
        if self.ready.is_empty() && !self.woken {
            let timeout = types::Timespec::from(timeout);
            let arguments = types::SubmitArgs::new().timespec(&timeout);
            pass(self.ring.submitter().submit_with_args(1, &arguments));
            self.reap();
        }
        self.woken = false;
    }

    /// Submits what is prepared and runs what the kernel put off. Returns whether the kernel was
    /// entered: if there is nothing to do, looking for it costs no system call.
    fn submit(&mut self) -> bool {
        let queue = self.ring.submission();
        let due = !queue.is_empty() || queue.taskrun() || queue.cq_overflow();
        drop(queue);
        if due {
            enter(&mut self.ring);
        }
        due
    }

    /// Takes completions into the state of their lanes.
    fn reap(&mut self) {
        for completion in self.ring.completion() {
            let (data, result) = (completion.user_data(), completion.result());
            let kind = data >> 60;
            if kind == WAKE {
                self.woken = true;
                self.waker_armed = cqueue::more(completion.flags());
                continue;
            }
            #[allow(clippy::cast_possible_truncation, reason = "the fields of user data")]
            let (index, generation) = (data as u32, (data >> 32) as u32 & GENERATIONS);
            let Some(Some(lane)) = self.lanes.get_mut(index as usize) else { continue };
            if lane.generation & GENERATIONS != generation {
                continue;
            }
            match kind {
                RECEIVE => lane.receiving = false,
                SEND => lane.sending = false,
                _ => lane.cancelling = false,
            }
            match (kind, usize::try_from(result)) {
                (RECEIVE, Ok(0)) => lane.stream.ended(),
                (RECEIVE, Ok(count)) => lane.stream.received(count),
                (SEND, Ok(count)) => lane.stream.sent(count),
                _ if PASSING.contains(&-result) => {}
                (RECEIVE, Err(_)) => lane.stream.failed(-result),
                (SEND, Err(_)) => lane.stream.refuse(-result, self.polls),
                _ => {}
            }
            self.ready.push(index);
        }
    }

    /// Gives every ready lane one turn.
    fn run(&mut self, out: &mut Out<'_>) {
        for _ in 0..self.ready.len() {
            let Some(index) = self.ready.pop() else { return };
            if self.turn(index, out) {
                self.ready.push(index);
            }
        }
    }

    /// Events out, operations in. Returns whether the lane needs another turn though nothing
    /// happens.
    fn turn(&mut self, index: u32, out: &mut Out<'_>) -> bool {
        let Some(lane) = self.lanes[index as usize].as_deref_mut() else { return false };
        lane.stream.begin(self.polls);
        let is_full = lane.stream.drain(&mut self.pool, out);
        self.cork.note(&mut lane.stream);
        if is_full {
            return true;
        }
        if !lane.receiving && !receive(lane, &mut self.ring, &mut self.pool) {
            return true;
        }
        if !lane.sending
            && (self.cork.holds(&lane.stream) || !send(lane, &mut self.ring, self.offload))
        {
            return true;
        }
        let Some(cause) = lane.stream.closing() else { return lane.stream.impatient() };
        if !lane.cancelling && lane.in_flight() {
            return !cancel(lane, &mut self.ring);
        }
        if lane.in_flight() {
            return false;
        }
        self.detach(index);
        out.push(Event::Closed { lane: LaneId(index), cause });
        false
    }

    fn detach(&mut self, index: u32) {
        let gone = self.lanes[index as usize].take();
        let mut lane = gone.expect("the caller has just looked at this lane");
        assert!(!lane.in_flight(), "a lane goes when the kernel holds none of its memory");
        self.cork.note(&mut lane.stream);
        self.attached -= 1;
        // If this fails the socket stays open until the place is used again; the shutdown has told
        // the peer.
        let _ = self.ring.submitter().register_files_update(index, &[-1 as RawFd]);
        self.lingering.add(lane.socket);
        self.gone.push(lane.stream);
    }
}

impl Drop for Uring {
    /// Waits until the kernel has let go of every lane's memory. Only the owner can: the kernel
    /// serves no other thread. Where it fails, rather leak than free what the kernel may still
    /// write to.
    fn drop(&mut self) {
        if self.owner == Some(std::thread::current().id()) {
            self.wind_down();
        }
        if self.attached > 0 {
            std::mem::forget(std::mem::take(&mut self.lanes));
        }
    }
}

impl Uring {
    /// Closes every lane and waits, within bounds, until all are gone.
    fn wind_down(&mut self) {
        let mut events = Vec::new();
        for index in 0..self.lanes.len() {
            if let Some(lane) = &mut self.lanes[index] {
                lane.stream.close(Cause::Local);
                self.ready.push(lane.stream.lane.0);
            }
        }
        for _ in 0..DROP_ROUNDS_MAX {
            if self.attached == 0 {
                return;
            }
            events.clear();
            self.poll(&mut events);
            if self.attached > 0 {
                self.block(Duration::from_millis(10));
            }
        }
    }
}

const READABLE: u32 = libc::POLLIN as u32;

/// Answers after which an operation is simply prepared anew, or not missed: the lane is closing.
const PASSING: [i32; 3] = [libc::EINTR, libc::EAGAIN, libc::ECANCELED];

/// Prepares the receive that the lane wants, if any. Returns false if the queue has no room.
///
/// It takes what has come, and no `MSG_WAITALL`: the header behind a payload may come much later
/// than the payload; and an operation that the kernel has retried 128 times goes to a kernel thread
/// of its own, which a peer that sends byte by byte could have of every lane.
fn receive(lane: &mut Lane, ring: &mut IoUring, pool: &mut Pool) -> bool {
    let Some(wanted) = lane.stream.wanted(pool) else { return true };
    let [first, behind] = wanted;
    let entry = if behind.iov_len == 0 {
        opcode::Recv::new(fixed(lane), first.iov_base.cast(), length_of(first)).build()
    } else {
        lane.incoming.iovecs = wanted;
        let message = lane.incoming.aim(2);
        opcode::RecvMsg::new(fixed(lane), message).build()
    };
    lane.receiving = push(ring, &entry.user_data(lane.user_data(RECEIVE)));
    lane.receiving
}

/// Prepares the send that is due, if any. Returns false if the queue has no room.
fn send(lane: &mut Lane, ring: &mut IoUring, offload: bool) -> bool {
    let count = lane.stream.gather(&mut lane.outgoing.iovecs);
    if count == 0 {
        return true;
    }
    let message = lane.outgoing.aim(count);
    let flags = (libc::MSG_WAITALL | libc::MSG_NOSIGNAL).cast_unsigned();
    let entry = opcode::SendMsg::new(fixed(lane), message).flags(flags).build();
    let bytes: usize = lane.outgoing.iovecs[..count].iter().map(|one| one.iov_len).sum();
    // On a thread of the kernel's, the copy into the socket runs beside this one.
    let entry = if offload && bytes >= OFFLOAD_BYTES_MIN {
        entry.flags(io_uring::squeue::Flags::ASYNC)
    } else {
        entry
    };
    lane.sending = push(ring, &entry.user_data(lane.user_data(SEND)));
    lane.sending
}

/// Prepares the cancellation of all that the lane has in flight. Returns false if the queue has no
/// room.
fn cancel(lane: &mut Lane, ring: &mut IoUring) -> bool {
    let all = types::CancelBuilder::fd(fixed(lane)).all();
    let entry = opcode::AsyncCancel2::new(all).build().user_data(lane.user_data(CANCEL));
    lane.cancelling = push(ring, &entry);
    lane.cancelling
}

fn fixed(lane: &Lane) -> types::Fixed {
    types::Fixed(lane.stream.lane.0)
}

fn length_of(part: iovec) -> u32 {
    u32::try_from(part.iov_len).expect("a receive is bounded by OPERATION_BYTES_MAX")
}

/// Prepares this operation; a full queue is submitted first.
fn push(ring: &mut IoUring, entry: &Entry) -> bool {
    // SAFETY: what the entry names stays valid until it completes: payloads and landings by the
    // transport's contract, staging, scratch, records and messages because the lane is kept while
    // `in_flight` is true.
    if unsafe { ring.submission().push(entry) }.is_ok() {
        return true;
    }
    enter(ring);
    // SAFETY: the full queue did not take the entry, so it is pushed once; what it names stays
    // valid until it completes, for the reasons that hold for the first try.
    unsafe { ring.submission().push(entry) }.is_ok()
}

/// Submits, and runs the work that the kernel put off for this thread.
fn enter(ring: &mut IoUring) {
    // The count must be exact: for a larger one the kernel leaves the work that it put off where it
    // is.
    let count = word(ring.submission().len());
    let flags = io_uring::EnterFlags::GETEVENTS.bits();
    // SAFETY: the kernel takes what is in the queue, whose entries `push` answers for; no memory is
    // passed.
    pass(unsafe { ring.submitter().enter::<libc::sigset_t>(count, 0, flags, None) });
}

/// An interrupted, timed-out or overloaded call is tried again by the next poll; anything else is a
/// defect here.
fn pass(entered: io::Result<usize>) {
    let Err(error) = entered else { return };
    match error.raw_os_error() {
        Some(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN | libc::ENOMEM) => {}
        _ => {
            panic!("io_uring_enter: {error}: a ring serves the thread that first used it, no other")
        }
    }
}
