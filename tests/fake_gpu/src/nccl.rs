//! The functions of libnccl.so.2.

use crate::collective::{ALL_GATHER, ALL_REDUCE, BROADCAST, Collective, REDUCE, REDUCE_SCATTER};
use crate::comm::{Comm, IN_PROGRESS, Job};
use crate::meeting::{INVALID_ARGUMENT, INVALID_USAGE};
use crate::reduce::{AVERAGE, SIZES, SUM};
use crate::settings::{injected, settings};
use crate::{answer, device, stream};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

const SUCCESS: u32 = 0;
const UNHANDLED_CUDA_ERROR: u32 = 1;
/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;

#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// The beginning of every version's `ncclConfig_t`.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    ctas_min: c_int,
    ctas_max: c_int,
}

static COMMS: LazyLock<Mutex<HashMap<usize, Arc<Comm>>>> = LazyLock::new(Mutex::default);
static NEXT: AtomicUsize = AtomicUsize::new(0x9c00_0000);

/// Calls of an open group, each with its communicator.
struct Group {
    depth: u32,
    jobs: Vec<(Arc<Comm>, Job)>,
}

thread_local! {
    static GROUP: RefCell<Group> = const { RefCell::new(Group { depth: 0, jobs: Vec::new() }) };
}

fn comm(handle: usize) -> Result<Arc<Comm>, u32> {
    let comms = COMMS.lock().unwrap_or_else(PoisonError::into_inner);
    comms.get(&handle).cloned().ok_or(INVALID_ARGUMENT)
}

fn take(handle: usize) -> Result<Arc<Comm>, u32> {
    let mut comms = COMMS.lock().unwrap_or_else(PoisonError::into_inner);
    comms.remove(&handle).ok_or(INVALID_ARGUMENT)
}

fn put<T>(at: *mut T, value: T) -> Result<(), u32> {
    answer::put(at, value).map_err(|_| INVALID_ARGUMENT)
}

/// A collective as C passes it.
struct Call {
    kind: u32,
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_uint,
    operation: c_uint,
    root: c_int,
    comm: usize,
    stream: usize,
}

impl Call {
    fn make(self) -> Result<(), u32> {
        let comm = comm(self.comm)?;
        comm.check()?;
        let root = u32::try_from(self.root).ok().filter(|&root| root < comm.ranks);
        let known = (self.dtype as usize) < SIZES.len() && self.operation <= AVERAGE;
        let stream = stream::stream(self.stream).map_err(|_| INVALID_ARGUMENT)?;
        if !known || stream.device != comm.device {
            return Err(INVALID_ARGUMENT);
        }
        let call = Collective {
            kind: self.kind,
            count: self.count as u64,
            dtype: self.dtype,
            operation: self.operation,
            root: root.ok_or(INVALID_ARGUMENT)?,
        };
        let (send, receive) = (self.send.expose_provenance(), self.receive.expose_provenance());
        let job = Job { call, send, receive, stream };
        let job = GROUP.with_borrow_mut(|group| {
            if group.depth == 0 {
                return Some(job);
            }
            group.jobs.push((Arc::clone(&comm), job));
            None
        });
        job.map_or(Ok(()), |job| comm.issue(vec![job]))
    }
}

/// Functions that may be told to fail, and that return a code.
macro_rules! nccl {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $type),*) -> c_uint {
            if let Some(code) = injected(stringify!($name)) {
                return code;
            }
            let body = || -> Result<(), u32> { $body };
            body().err().unwrap_or(SUCCESS)
        }
    )*};
}

nccl! {
    fn ncclGetVersion(version: *mut c_int) {
        put(version, settings().nccl_version)
    }
    fn ncclGetUniqueId(id: *mut UniqueId) {
        let mut random = [0; 16];
        let read = std::fs::File::open("/dev/urandom")
            .and_then(|mut file| std::io::Read::read_exact(&mut file, &mut random));
        read.map_err(|_| 2u32)?;
        let name = format!("fake-nccl-{:032x}", u128::from_le_bytes(random));
        let mut bytes = [0; 128];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        put(id, UniqueId(bytes))
    }
    fn ncclCommInitRankConfig(
        handle: *mut usize, ranks: c_int, id: UniqueId, rank: c_int, config: *const Config,
    ) {
        let device = device::current().map_err(|_| UNHANDLED_CUDA_ERROR)?;
        let ranks = u32::try_from(ranks).map_err(|_| INVALID_ARGUMENT)?;
        let rank = u32::try_from(rank).map_err(|_| INVALID_ARGUMENT)?;
        let blocking = if config.is_null() { UNDEFINED } else {
            // SAFETY: not null, so the settings of some version, which all begin so.
            let config = unsafe { &*config };
            if config.magic != 0xcafe_beef || config.size < 48 || config.version < 21_400 {
                return Err(INVALID_ARGUMENT);
            }
            let wanted = settings().nccl_channels.unwrap_or(UNDEFINED);
            if (config.ctas_min, config.ctas_max) != (wanted, wanted) {
                eprintln!("fake NCCL: {} to {} channels", config.ctas_min, config.ctas_max);
                return Err(INVALID_ARGUMENT);
            }
            config.blocking
        };
        let name: Vec<u8> = id.0.iter().copied().take_while(|&byte| byte != 0).collect();
        if rank >= ranks || !name.starts_with(b"fake-nccl-") {
            return Err(INVALID_ARGUMENT);
        }
        let comm = Comm::start(name, rank, ranks, device, blocking != 0)?;
        let number = NEXT.fetch_add(16, Ordering::Relaxed);
        COMMS.lock().unwrap_or_else(PoisonError::into_inner).insert(number, comm);
        put(handle, number)?;
        if blocking == 0 { Err(IN_PROGRESS) } else { Ok(()) }
    }
    fn ncclCommFinalize(handle: usize) {
        let comm = comm(handle)?;
        comm.check()?;
        comm.finalize()
    }
    fn ncclCommDestroy(handle: usize) {
        take(handle)?.abort();
        Ok(())
    }
    fn ncclCommAbort(handle: usize) {
        take(handle)?.abort();
        Ok(())
    }
    fn ncclCommGetAsyncError(handle: usize, state: *mut c_uint) {
        put(state, comm(handle)?.state())
    }
    fn ncclGroupStart() {
        GROUP.with_borrow_mut(|group| group.depth += 1);
        Ok(())
    }
    fn ncclGroupEnd() {
        let jobs = GROUP.with_borrow_mut(|group| {
            group.depth = group.depth.checked_sub(1).ok_or(INVALID_USAGE)?;
            let ended = group.depth == 0;
            Ok::<_, u32>(if ended { std::mem::take(&mut group.jobs) } else { Vec::new() })
        })?;
        let mut by_comm: Vec<(Arc<Comm>, Vec<Job>)> = Vec::new();
        for (comm, job) in jobs {
            match by_comm.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &comm)) {
                Some((_, jobs)) => jobs.push(job),
                None => by_comm.push((comm, vec![job])),
            }
        }
        let mut result = Ok(());
        for (comm, jobs) in by_comm {
            result = comm.issue(jobs).and(result);
        }
        result
    }
    fn ncclAllReduce(
        send: *const c_void, receive: *mut c_void, count: usize, dtype: c_uint, operation: c_uint,
        comm: usize, stream: usize,
    ) {
        let (kind, root) = (ALL_REDUCE, 0);
        Call { kind, send, receive, count, dtype, operation, root, comm, stream }.make()
    }
    fn ncclReduceScatter(
        send: *const c_void, receive: *mut c_void, count: usize, dtype: c_uint, operation: c_uint,
        comm: usize, stream: usize,
    ) {
        let (kind, root) = (REDUCE_SCATTER, 0);
        Call { kind, send, receive, count, dtype, operation, root, comm, stream }.make()
    }
    fn ncclAllGather(
        send: *const c_void, receive: *mut c_void, count: usize, dtype: c_uint, comm: usize,
        stream: usize,
    ) {
        let (kind, operation, root) = (ALL_GATHER, SUM, 0);
        Call { kind, send, receive, count, dtype, operation, root, comm, stream }.make()
    }
    fn ncclReduce(
        send: *const c_void, receive: *mut c_void, count: usize, dtype: c_uint, operation: c_uint,
        root: c_int, comm: usize, stream: usize,
    ) {
        let kind = REDUCE;
        Call { kind, send, receive, count, dtype, operation, root, comm, stream }.make()
    }
    fn ncclBroadcast(
        send: *const c_void, receive: *mut c_void, count: usize, dtype: c_uint, root: c_int,
        comm: usize, stream: usize,
    ) {
        let (kind, operation) = (BROADCAST, SUM);
        Call { kind, send, receive, count, dtype, operation, root, comm, stream }.make()
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(code: c_uint) -> *const c_char {
    let texts: [&CStr; 8] = [
        c"no error",
        c"unhandled cuda error",
        c"unhandled system error",
        c"internal error",
        c"invalid argument",
        c"invalid usage",
        c"remote process exited or there was a network error",
        c"NCCL operation in progress",
    ];
    texts.get(code as usize).unwrap_or(&c"unknown result code").as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(handle: usize) -> *const c_char {
    let text = comm(handle).ok().and_then(|comm| comm.last_error());
    text.unwrap_or(c"").as_ptr()
}
