//! A device that is not there, for tests of what no emulated one can do: it fails on demand, tells
//! of events, and carries writes between two queue pairs of this process by copying.

use super::super::device::Rails;
use super::super::ffi::{self, Verbs};
use super::super::ports::{Address, AddressKind, Port};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::{HashMap, VecDeque};
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

/// What a test makes of its device.
pub(super) struct Fake {
    name: CString,
    /// What `ibv_reg_mr` fails with; 0: it does not.
    pub(super) registering: AtomicI32,
    /// What `ibv_reg_dmabuf_mr` fails with.
    pub(super) dma_buf: AtomicI32,
    /// What sends complete with.
    pub(super) sending: AtomicI32,
    /// General capabilities of paging on demand.
    pub(super) paging: AtomicU64,
    /// Those of reliable connections.
    pub(super) paging_rc: AtomicU32,
    /// Registrations that live.
    pub(super) regions: AtomicI32,
    /// Most bytes of one operation.
    pub(super) message_bytes: AtomicU32,
    events: Mutex<VecDeque<(c_int, u64)>>,
    news: OwnedFd,
}

#[repr(C)]
struct Queue {
    cq: ffi::Cq,
    done: Mutex<VecDeque<ffi::Wc>>,
}

#[repr(C)]
struct Pair {
    qp: ffi::Qp,
    peer: AtomicU32,
    places: Mutex<VecDeque<u64>>,
}

/// Offset and address of a dma-buf must be alike within a page.
const PAGE: u64 = 4096;

/// Address, length and access of a registration.
type Place = (u64, usize, c_int);

static FAKES: Mutex<Vec<&'static Fake>> = Mutex::new(Vec::new());
/// Addresses of the pairs that live, by their numbers.
static PAIRS: Mutex<Option<HashMap<u32, usize>>> = Mutex::new(None);
/// What is registered with any device, by its keys.
static REGIONS: Mutex<Option<HashMap<u32, Place>>> = Mutex::new(None);
static NUMBERS: AtomicU32 = AtomicU32::new(1);

impl Fake {
    /// A device of this name, which no other test has.
    pub(super) fn new(name: &str) -> &'static Fake {
        let fake: &Fake = Box::leak(Box::new(Fake {
            name: CString::new(name).unwrap(),
            registering: AtomicI32::new(0),
            dma_buf: AtomicI32::new(0),
            sending: AtomicI32::new(0),
            paging: AtomicU64::new(0),
            paging_rc: AtomicU32::new(0),
            regions: AtomicI32::new(0),
            message_bytes: AtomicU32::new(1 << 30),
            events: Mutex::default(),
            news: eventfd(0, EventfdFlags::NONBLOCK).unwrap(),
        }));
        FAKES.lock().unwrap().push(fake);
        fake
    }

    pub(super) fn rails(&self, on_demand: bool) -> Arc<Rails> {
        let address = Address { kind: AddressKind::RoceV2Ipv4, index: 0, gid: [1; 16] };
        let port = Port {
            device: self.name.to_str().unwrap().to_owned(),
            number: 1,
            interfaces: Vec::new(),
            numa_node: None,
            addresses: vec![address],
        };
        Rails::open_with(Box::leak(Box::new(verbs())), vec![port], None, on_demand).unwrap()
    }

    /// Tells of an event of this element.
    pub(super) fn tell(&self, event: c_int, element: u64) {
        self.events.lock().unwrap().push_back((event, element));
        rustix::io::write(&self.news, &1u64.to_ne_bytes()).unwrap();
    }
}

fn verbs() -> Verbs {
    Verbs {
        get_device_list,
        free_device_list,
        get_device_name,
        open_device,
        close_device,
        query_port,
        alloc_pd,
        dealloc_pd,
        reg_mr,
        dereg_mr,
        create_comp_channel,
        destroy_comp_channel,
        create_cq,
        resize_cq,
        destroy_cq,
        get_cq_event,
        ack_cq_events,
        create_qp,
        modify_qp,
        destroy_qp,
        fork_init,
        get_async_event,
        ack_async_event,
        reg_dmabuf_mr: Some(reg_dmabuf_mr),
    }
}

fn fail<T>(errno: i32) -> *mut T {
    // SAFETY: the address of this thread's own variable.
    unsafe { *libc::__errno_location() = errno };
    std::ptr::null_mut()
}

// What follows is called as the library is: with what was given out before and not yet taken back.
// Devices are never freed.

extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut ffi::Device {
    let fakes = FAKES.lock().unwrap();
    let list: Vec<*mut ffi::Device> =
        fakes.iter().map(|fake| (&raw const **fake).cast_mut().cast()).collect();
    // SAFETY: the caller's number.
    unsafe { *count = c_int::try_from(list.len()).unwrap() };
    Box::leak(list.into_boxed_slice()).as_mut_ptr()
}

extern "C" fn free_device_list(_: *mut *mut ffi::Device) {}

fn fake<'a, T>(device: *const T) -> &'a Fake {
    // SAFETY: devices are never freed.
    unsafe { &*device.cast::<Fake>() }
}

extern "C" fn get_device_name(device: *mut ffi::Device) -> *const c_char {
    fake(device).name.as_ptr()
}

extern "C" fn open_device(device: *mut ffi::Device) -> *mut ffi::Context {
    // SAFETY: numbers, raw pointers and options of functions, for which zeros are valid.
    let mut tail: Box<ffi::ContextTail> = Box::new(unsafe { std::mem::zeroed() });
    tail.query_device_ex = Some(query_device_ex);
    tail.sz = size_of::<ffi::ContextTail>();
    tail.context.device = device;
    tail.context.abi_compat = std::ptr::without_provenance_mut(usize::MAX);
    tail.context.async_fd = fake(device).news.as_raw_fd();
    tail.context.ops.poll_cq = Some(poll_cq);
    tail.context.ops.req_notify_cq = Some(req_notify_cq);
    tail.context.ops.post_send = Some(post_send);
    tail.context.ops.post_recv = Some(post_recv);
    &raw mut Box::leak(tail).context
}

extern "C" fn close_device(_: *mut ffi::Context) -> c_int {
    0
}

extern "C" fn query_device_ex(
    context: *mut ffi::Context,
    _: *const c_void,
    found: *mut ffi::DeviceAttrEx,
    _: usize,
) -> c_int {
    // SAFETY: what the library was given or gave out lives during its call.
    let (context, found) = unsafe { (&*context, &mut *found) };
    found.general_caps = fake(context.device).paging.load(SeqCst);
    found.rc_odp_caps = fake(context.device).paging_rc.load(SeqCst);
    0
}

extern "C" fn query_port(context: *mut ffi::Context, _: u8, port: *mut ffi::PortAttr) -> c_int {
    // SAFETY: what the library was given or gave out lives during its call.
    let (context, port) = unsafe { (&*context, &mut *port) };
    port.active_mtu = 5;
    port.max_msg_sz = fake(context.device).message_bytes.load(SeqCst);
    0
}

extern "C" fn alloc_pd(context: *mut ffi::Context) -> *mut ffi::Pd {
    // A domain is its device.
    // SAFETY: the context lives.
    unsafe { (*context).device.cast() }
}

extern "C" fn dealloc_pd(_: *mut ffi::Pd) -> c_int {
    0
}

extern "C" fn reg_mr(
    pd: *mut ffi::Pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ffi::Mr {
    let errno = fake(pd).registering.load(SeqCst);
    if errno != 0 {
        return fail(errno);
    }
    fake(pd).regions.fetch_add(1, SeqCst);
    let key = NUMBERS.fetch_add(1, SeqCst);
    let place = (addr.addr() as u64, length, access);
    REGIONS.lock().unwrap().get_or_insert_default().insert(key, place);
    let context = std::ptr::null_mut();
    let mr = ffi::Mr { context, pd, addr, length, handle: 0, lkey: key, rkey: key };
    Box::into_raw(Box::new(mr))
}

extern "C" fn reg_dmabuf_mr(
    pd: *mut ffi::Pd,
    offset: u64,
    length: usize,
    address: u64,
    fd: c_int,
    access: c_int,
) -> *mut ffi::Mr {
    // SAFETY: it looks whether the number is that of an open descriptor.
    let is_open = unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0;
    let errno = match fake(pd).dma_buf.load(SeqCst) {
        0 if !is_open => libc::EBADF,
        0 if offset % PAGE != address % PAGE => libc::EINVAL,
        errno => errno,
    };
    if errno != 0 {
        return fail(errno);
    }
    let at = std::ptr::without_provenance_mut(usize::try_from(address).unwrap());
    reg_mr(pd, at, length, access)
}

extern "C" fn dereg_mr(mr: *mut ffi::Mr) -> c_int {
    // SAFETY: made by `reg_mr`.
    let mr = unsafe { Box::from_raw(mr) };
    fake(mr.pd).regions.fetch_sub(1, SeqCst);
    REGIONS.lock().unwrap().get_or_insert_default().remove(&mr.rkey);
    0
}

extern "C" fn create_comp_channel(context: *mut ffi::Context) -> *mut ffi::Channel {
    let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let fd = std::os::fd::IntoRawFd::into_raw_fd(fd);
    Box::into_raw(Box::new(ffi::Channel { context, fd, refcnt: 0 }))
}

extern "C" fn destroy_comp_channel(_: *mut ffi::Channel) -> c_int {
    0
}

extern "C" fn create_cq(
    context: *mut ffi::Context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ffi::Channel,
    _: c_int,
) -> *mut ffi::Cq {
    let cq = ffi::Cq { context, channel, cq_context, handle: 0, cqe };
    Box::into_raw(Box::new(Queue { cq, done: Mutex::default() })).cast()
}

extern "C" fn resize_cq(_: *mut ffi::Cq, _: c_int) -> c_int {
    0
}

extern "C" fn destroy_cq(cq: *mut ffi::Cq) -> c_int {
    // SAFETY: made by `create_cq`.
    drop(unsafe { Box::from_raw(cq.cast::<Queue>()) });
    0
}

extern "C" fn get_cq_event(
    _: *mut ffi::Channel,
    _: *mut *mut ffi::Cq,
    _: *mut *mut c_void,
) -> c_int {
    -1
}

extern "C" fn ack_cq_events(_: *mut ffi::Cq, _: c_uint) {}

extern "C" fn req_notify_cq(_: *mut ffi::Cq, _: c_int) -> c_int {
    0
}

extern "C" fn fork_init() -> c_int {
    0
}

extern "C" fn get_async_event(context: *mut ffi::Context, event: *mut ffi::AsyncEvent) -> c_int {
    // SAFETY: what the library was given or gave out lives during its call.
    let (fake, event) = unsafe { (fake((*context).device), &mut *event) };
    let Some((event_type, element)) = fake.events.lock().unwrap().pop_front() else {
        let _ = rustix::io::read(&fake.news, &mut [0; 8][..]);
        return -1;
    };
    (event.event_type, event.element) = (event_type, element);
    0
}

extern "C" fn ack_async_event(_: *mut ffi::AsyncEvent) {}

fn complete(cq: *mut ffi::Cq, id: u64, status: c_int, bytes: u32, imm: u32) {
    // SAFETY: the queue lives as long as the pair that completes into it; completions are numbers.
    let (queue, mut wc): (&Queue, ffi::Wc) = unsafe { (&*cq.cast::<Queue>(), std::mem::zeroed()) };
    (wc.wr_id, wc.status, wc.byte_len, wc.imm_data) = (id, status, bytes, imm);
    queue.done.lock().unwrap().push_back(wc);
}

extern "C" fn poll_cq(cq: *mut ffi::Cq, room: c_int, into: *mut ffi::Wc) -> c_int {
    // SAFETY: what the library was given or gave out lives during its call.
    let queue = unsafe { &*cq.cast::<Queue>() };
    let mut done = queue.done.lock().unwrap();
    let count = done.len().min(usize::try_from(room).unwrap());
    for (at, wc) in done.drain(..count).enumerate() {
        // SAFETY: the caller has so much room.
        unsafe { into.add(at).write(wc) };
    }
    c_int::try_from(count).unwrap()
}

extern "C" fn create_qp(pd: *mut ffi::Pd, wanted: *mut ffi::QpInitAttr) -> *mut ffi::Qp {
    let number = NUMBERS.fetch_add(1, SeqCst);
    // SAFETY: what the library was given or gave out; numbers and raw pointers may be zeros.
    let (wanted, mut qp): (&ffi::QpInitAttr, ffi::Qp) = unsafe { (&*wanted, std::mem::zeroed()) };
    (qp.pd, qp.send_cq, qp.recv_cq, qp.qp_num) = (pd, wanted.send_cq, wanted.recv_cq, number);
    let pair = Box::new(Pair { qp, peer: AtomicU32::new(0), places: Mutex::default() });
    let pair = Box::into_raw(pair);
    PAIRS.lock().unwrap().get_or_insert_default().insert(number, pair.expose_provenance());
    pair.cast()
}

extern "C" fn modify_qp(qp: *mut ffi::Qp, wanted: *mut ffi::QpAttr, mask: c_int) -> c_int {
    // SAFETY: what the library was given or gave out lives during its call.
    let (pair, wanted) = unsafe { (&*qp.cast::<Pair>(), &*wanted) };
    if mask & ffi::ATTR_DEST_QPN != 0 {
        pair.peer.store(wanted.dest_qp_num, SeqCst);
    }
    if wanted.qp_state == ffi::STATE_ERROR {
        flush(pair);
    }
    0
}

/// The connection has ended: all places to receive come back.
fn flush(pair: &Pair) {
    for id in pair.places.lock().unwrap().drain(..) {
        complete(pair.qp.recv_cq, id, ffi::WC_FLUSHED, 0, 0);
    }
}

extern "C" fn destroy_qp(qp: *mut ffi::Qp) -> c_int {
    // SAFETY: made by `create_qp`.
    let pair = unsafe { Box::from_raw(qp.cast::<Pair>()) };
    PAIRS.lock().unwrap().get_or_insert_default().remove(&pair.qp.qp_num);
    0
}

extern "C" fn post_recv(
    qp: *mut ffi::Qp,
    mut next: *mut ffi::RecvWr,
    _: *mut *mut ffi::RecvWr,
) -> c_int {
    // SAFETY: the pair lives, and the chain ends.
    unsafe {
        let pair = &*qp.cast::<Pair>();
        while let Some(place) = next.as_ref() {
            pair.places.lock().unwrap().push_back(place.wr_id);
            next = place.next;
        }
    }
    0
}

extern "C" fn post_send(
    qp: *mut ffi::Qp,
    mut next: *mut ffi::SendWr,
    _: *mut *mut ffi::SendWr,
) -> c_int {
    // SAFETY: the pair lives, the chain ends, and its addresses are of this process.
    unsafe {
        let pair = &*qp.cast::<Pair>();
        while let Some(send) = next.as_ref() {
            carry_out(pair, send);
            next = send.next;
        }
    }
    0
}

/// # Safety
/// What is sent is readable, and where it goes to is writable while the peer's pair lives.
unsafe fn carry_out(pair: &Pair, send: &ffi::SendWr) {
    let status = fake(pair.qp.pd).sending.load(SeqCst);
    if status != 0 {
        return complete(pair.qp.send_cq, send.wr_id, status, 0, 0);
    }
    let pairs = PAIRS.lock().unwrap();
    let peer = pairs.as_ref().and_then(|pairs| pairs.get(&pair.peer.load(SeqCst)));
    let Some(peer) = peer else {
        return complete(pair.qp.send_cq, send.wr_id, 12, 0, 0);
    };
    // SAFETY: its address was exposed as it went into the table, out of which `destroy_qp` takes it
    // before the pair is freed; and the table is locked.
    let peer = unsafe { &*std::ptr::with_exposed_provenance::<Pair>(*peer) };
    if !is_allowed(send) {
        fake(peer.qp.pd).tell(ffi::EVENT_QP_ACCESS_ERR, (&raw const *peer).addr() as u64);
        complete(pair.qp.send_cq, send.wr_id, 10, 0, 0);
        return flush(pair);
    }
    // SAFETY: the caller's promise.
    if !unsafe { is_readable(send) } {
        return complete(pair.qp.send_cq, send.wr_id, 4, 0, 0);
    }
    let mut at = usize::try_from(send.remote_addr).unwrap();
    let mut bytes = 0;
    for index in 0..usize::try_from(send.num_sge).unwrap() {
        // SAFETY: the caller's promise; the pair is not destroyed while the table is locked.
        unsafe {
            let piece = &*send.sg_list.add(index);
            let from = std::ptr::with_exposed_provenance::<u8>(piece.addr.try_into().unwrap());
            let to = std::ptr::with_exposed_provenance_mut::<u8>(at);
            from.copy_to_nonoverlapping(to, piece.length as usize);
            (at, bytes) = (at + piece.length as usize, bytes + piece.length);
        }
    }
    if send.opcode == ffi::WRITE_WITH_IMM {
        let place = peer.places.lock().unwrap().pop_front().expect("a place to receive");
        complete(peer.qp.recv_cq, place, 0, bytes, send.imm_data);
    }
    if send.send_flags & ffi::SEND_SIGNALED != 0 {
        complete(pair.qp.send_cq, send.wr_id, 0, 0, 0);
    }
}

/// Whether the peer's memory may be written to as this send says.
fn is_allowed(send: &ffi::SendWr) -> bool {
    let pieces = (0..usize::try_from(send.num_sge).unwrap())
        // SAFETY: the caller's promise of `carry_out`.
        .map(|index| unsafe { (*send.sg_list.add(index)).length as u64 });
    let bytes: u64 = pieces.sum();
    let regions = REGIONS.lock().unwrap();
    let region = regions.as_ref().and_then(|regions| regions.get(&send.rkey));
    bytes == 0
        || region.is_some_and(|&(start, length, access)| {
            let offset = send.remote_addr.wrapping_sub(start);
            let end = offset.checked_add(bytes);
            access & ffi::ACCESS_REMOTE_WRITE != 0 && end.is_some_and(|end| end <= length as u64)
        })
}

/// Whether the sender's device may read what is sent by the keys that it names.
///
/// # Safety
/// The list of pieces is as long as it says.
unsafe fn is_readable(send: &ffi::SendWr) -> bool {
    let regions = REGIONS.lock().unwrap();
    (0..usize::try_from(send.num_sge).unwrap()).all(|index| {
        // SAFETY: the caller's promise.
        let piece = unsafe { &*send.sg_list.add(index) };
        let region = regions.as_ref().and_then(|regions| regions.get(&piece.lkey));
        let is_inline = send.send_flags & ffi::SEND_INLINE != 0;
        is_inline
            || region.is_some_and(|&(start, length, _)| {
                let offset = piece.addr.checked_sub(start);
                offset.is_some_and(|offset| offset + u64::from(piece.length) <= length as u64)
            })
    })
}
