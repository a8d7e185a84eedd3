//! The functions of libnccl, for the machine of the calling thread.

use super::communicator::{Call, Kind, Share};
use super::cuda::{handle, index};
use super::machine::Machine;
use super::with;
use bps_engine::base::{DType, Reduction};
use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;

const COMM: usize = 0x9c00_0000;
/// `ncclUnhandledCudaError`, `ncclInvalidArgument`, `ncclInvalidUsage`, `ncclInProgress`.
const UNHANDLED_CUDA_ERROR: u32 = 1;
const INVALID_ARGUMENT: u32 = 4;
const INVALID_USAGE: u32 = 5;
const IN_PROGRESS: u32 = 7;
/// `ncclSum`, `ncclProd`, `ncclMax`, `ncclMin`.
const REDUCTIONS: [Reduction; 4] =
    [Reduction::Sum, Reduction::Product, Reduction::Max, Reduction::Min];
/// `ncclSum`, `ncclAvg`.
const SUM: c_uint = 0;
const AVERAGE: c_uint = 4;

#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// Calls of an open group, and on which communicator.
#[derive(Default)]
struct Group {
    is_open: bool,
    comm: Option<usize>,
    calls: Vec<(Call, Share)>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

fn put<T>(at: *mut T, value: T) -> Result<(), u32> {
    let at = NonNull::new(at).ok_or(INVALID_ARGUMENT)?;
    // SAFETY: the engine passes the address of a variable of its own.
    unsafe { at.write(value) };
    Ok(())
}

fn dtype(number: c_uint) -> Result<DType, u32> {
    match number {
        0 => Ok(DType::I8),
        1 => Ok(DType::U8),
        2 => Ok(DType::I32),
        4 => Ok(DType::I64),
        6 => Ok(DType::F16),
        7 => Ok(DType::F32),
        8 => Ok(DType::F64),
        9 => Ok(DType::BF16),
        _ => Err(INVALID_ARGUMENT),
    }
}

impl Machine {
    fn comm_of(&self, comm: usize) -> Result<usize, u32> {
        let comm = index(comm, COMM, self.comms.len()).ok_or(INVALID_ARGUMENT)?;
        let of = &self.comms[comm];
        if self.devices[of.device].stands() {
            return Err(UNHANDLED_CUDA_ERROR);
        }
        if of.is_over { Err(INVALID_ARGUMENT) } else { Ok(comm) }
    }

    /// A rank makes a call, as C passes it.
    fn call(
        &mut self,
        kind: Kind,
        [send, receive]: [u64; 2],
        count: usize,
        [element, operation]: [c_uint; 2],
        root: c_int,
        [comm, stream]: [usize; 2],
    ) -> Result<(), u32> {
        let comm = self.comm_of(comm)?;
        self.comms[comm].failure.map_or(Ok(()), Err)?;
        let ranks = self.comms[comm].ranks;
        let root = usize::try_from(root).ok().filter(|root| *root < ranks);
        let root = root.ok_or(INVALID_ARGUMENT)?;
        let is_average = operation == AVERAGE;
        let reduction =
            if is_average { Some(&Reduction::Sum) } else { REDUCTIONS.get(operation as usize) };
        let reduction = *reduction.ok_or(INVALID_ARGUMENT)?;
        if self.comms[comm].pending.is_some() {
            self.blame(Err("NCCL is called while it enqueues".into()));
        }
        let stream = self.stream_of(stream).map_err(|_| UNHANDLED_CUDA_ERROR)?;
        let of_both = (self.comms[comm].device, Ok(self.comms[comm].device));
        if of_both != (self.streams[stream].device, self.current()) {
            return Err(INVALID_USAGE);
        }
        let dtype = dtype(element)?;
        let call = Call { kind, count, dtype, reduction, is_average, root };
        let call = (call, Share { send, receive, stream });
        let is_grouped = GROUP.with_borrow_mut(|group| {
            if group.is_open {
                group.calls.push(call);
                group.comm = Some(comm);
            }
            group.is_open
        });
        if is_grouped || self.submit(comm, vec![call]) { Ok(()) } else { Err(IN_PROGRESS) }
    }
}

macro_rules! nccl {
    ($(fn $name:ident($machine:ident $(, $argument:ident: $type:ty)* $(,)?) $body:block)*) => {
        $(
            #[allow(non_snake_case, reason = "the names are those of the C functions")]
            extern "C" fn $name($($argument: $type),*) -> c_uint {
                let body = |$machine: &mut Machine| -> Result<(), u32> { $body };
                with(body).unwrap_or(Err(UNHANDLED_CUDA_ERROR)).err().unwrap_or(0)
            }
        )*

        /// The function of this name.
        pub(super) fn find(name: &str) -> Option<NonNull<c_void>> {
            let at = match name {
                $(stringify!($name) => $name as *mut c_void,)*
                "ncclGetVersion" => version as *mut c_void,
                "ncclGetErrorString" => text as *mut c_void,
                "ncclGetLastError" => last as *mut c_void,
                _ => return None,
            };
            NonNull::new(at)
        }
    };
}

extern "C" fn version(at: *mut c_int) -> c_uint {
    put(at, 22_707).err().unwrap_or(0)
}

extern "C" fn text(_code: c_uint) -> *const c_char {
    c"as the simulation has it".as_ptr()
}

extern "C" fn last(_comm: usize) -> *const c_char {
    std::ptr::null()
}

nccl! {
    fn ncclGetUniqueId(machine, id: *mut UniqueId) {
        let mut bytes = [0; 128];
        bytes[..8].copy_from_slice(&machine.random.bits().to_le_bytes());
        put(id, UniqueId(bytes))
    }
    fn ncclCommInitRankConfig(
        machine, at: *mut usize, ranks: c_int, id: UniqueId, rank: c_int, _config: *const c_void,
    ) {
        let device = machine.current().map_err(|_| UNHANDLED_CUDA_ERROR)?;
        let number = |value: c_int| usize::try_from(value).map_err(|_| INVALID_ARGUMENT);
        let comm = machine.join(id.0, number(ranks)?, number(rank)?, device);
        put(at, handle(comm, COMM))
    }
    fn ncclCommFinalize(machine, comm: usize) {
        let comm = machine.comm_of(comm)?;
        machine.comms[comm].is_finalizing = true;
        Err(IN_PROGRESS)
    }
    fn ncclCommDestroy(machine, comm: usize) {
        let comm = machine.comm_of(comm)?;
        if machine.is_in_progress(comm) {
            machine.blame(Err("a communicator is freed before it has parted".into()));
        }
        machine.comms[comm].is_over = true;
        Ok(())
    }
    fn ncclCommAbort(machine, comm: usize) {
        let comm = index(comm, COMM, machine.comms.len()).ok_or(INVALID_ARGUMENT)?;
        machine.abort(comm);
        Ok(())
    }
    fn ncclCommGetAsyncError(machine, comm: usize, state: *mut c_uint) {
        let comm = machine.comm_of(comm)?;
        let is_in_progress = machine.is_in_progress(comm);
        let now = if is_in_progress { IN_PROGRESS } else { 0 };
        put(state, machine.comms[comm].failure.unwrap_or(now))
    }
    fn ncclGroupStart(_machine) {
        GROUP.with_borrow_mut(|group| *group = Group { is_open: true, ..Group::default() });
        Ok(())
    }
    fn ncclGroupEnd(machine) {
        let group = GROUP.take();
        match group.comm {
            Some(comm) if !machine.submit(comm, group.calls) => Err(IN_PROGRESS),
            _ => Ok(()),
        }
    }
    fn ncclAllReduce(
        machine, send: u64, receive: u64, count: usize, dtype: c_uint, operation: c_uint,
        comm: usize, stream: usize,
    ) {
        let (at, of) = ([send, receive], [dtype, operation]);
        machine.call(Kind::AllReduce, at, count, of, 0, [comm, stream])
    }
    fn ncclReduceScatter(
        machine, send: u64, receive: u64, count: usize, dtype: c_uint, operation: c_uint,
        comm: usize, stream: usize,
    ) {
        let (at, of) = ([send, receive], [dtype, operation]);
        machine.call(Kind::ReduceScatter, at, count, of, 0, [comm, stream])
    }
    fn ncclAllGather(
        machine, send: u64, receive: u64, count: usize, dtype: c_uint, comm: usize, stream: usize,
    ) {
        machine.call(Kind::AllGather, [send, receive], count, [dtype, SUM], 0, [comm, stream])
    }
    fn ncclReduce(
        machine, send: u64, receive: u64, count: usize, dtype: c_uint, operation: c_uint,
        root: c_int, comm: usize, stream: usize,
    ) {
        let (at, of) = ([send, receive], [dtype, operation]);
        machine.call(Kind::Reduce, at, count, of, root, [comm, stream])
    }
    fn ncclBroadcast(
        machine, send: u64, receive: u64, count: usize, dtype: c_uint, root: c_int, comm: usize,
        stream: usize,
    ) {
        machine.call(Kind::Broadcast, [send, receive], count, [dtype, SUM], root, [comm, stream])
    }
}
