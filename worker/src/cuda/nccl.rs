//! Collectives among the GPUs of a host, by NCCL.
//!
//! Communicators are non-blocking: a call that can't end at once says "in progress", and is then
//! watched here until it is enqueued, or its time is up. So a peer that died or never came is an
//! error and not a hang. The price: from 2.23 on, NCCL starts a thread for each call or group of
//! such a communicator, and enqueues there. Few large groups cost less than many calls.
//!
//! Every rank must make the same calls in the same order on a communicator; who calls sees to that.

mod closing;

pub(crate) use self::closing::Closing;

use self::closing::{ABORT, FINALIZE};
use super::error::nccl_version;
use super::nccl_library::{Config, Found, open};
use super::table::text;
use super::{Awaited, Device, GpuError, Stream};
use bps_engine::base::DType;
use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// `ncclSuccess`.
const SUCCESS: c_uint = 0;
/// `ncclInProgress`.
const IN_PROGRESS: c_uint = 7;
/// How long the state of a communicator is looked at without a rest: longer than NCCL takes to
/// enqueue what does not wait for other ranks.
const QUICK: Duration = Duration::from_millis(1);
/// How long it sleeps between two looks then.
const LOOK: Duration = Duration::from_micros(50);

/// How contributions are reduced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// Their sum divided by the number of ranks of the communicator.
    Average,
    /// The least of them.
    Min,
    /// The greatest of them.
    Max,
    /// Their product.
    Product,
}

/// NCCL, opened. Clones are the same.
#[derive(Clone)]
pub struct Nccl(Arc<Found>);

impl Nccl {
    /// Opens NCCL: the file at `path` (`BPS_NCCL_LIBRARY`), or else the one that the process has
    /// already, or one that the dynamic linker finds, or one beside this process's Python packages.
    ///
    /// # Errors
    /// [`GpuError::NcclMissing`], [`GpuError::NcclTooOld`], [`GpuError::NoFunction`].
    pub fn load(path: Option<&Path>) -> Result<Nccl, GpuError> {
        open(path).map(Nccl::of)
    }

    pub(crate) fn of(found: Found) -> Nccl {
        Nccl(Arc::new(found))
    }

    /// Its version, 10000 × major + 100 × minor + patch.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.0.version
    }

    /// Version and file, for the start line: `NCCL 2.27.7 (/usr/lib/libnccl.so.2)`.
    #[must_use]
    pub fn describe(&self) -> String {
        format!("NCCL {} ({})", nccl_version(self.0.version), self.0.path)
    }

    /// A new identity for a communicator. One rank makes it, and gives it to the others.
    ///
    /// # Errors
    /// [`GpuError::Nccl`], for instance where NCCL finds no network interface to meet on.
    pub fn unique_id(&self) -> Result<[u8; 128], GpuError> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: it writes the 128 bytes.
        let code = unsafe { (self.0.call.ncclGetUniqueId)(&raw mut id) };
        self.check("ncclGetUniqueId", code, std::ptr::null_mut())?;
        // C's `char` has a sign on x86-64 and none on AArch64.
        Ok(id.internal.map(|byte| byte.to_ne_bytes()[0]))
    }

    /// Joins a communicator of `ranks` ranks as `rank`, with this GPU. All its ranks call this with
    /// the same `id`; it returns when all have come. `channels` limits and fixes how many thread
    /// blocks of the GPU, with as many channels, a collective takes; NCCL chooses without it.
    ///
    /// `deadline` is how long it may take, and also how long any later call on the communicator
    /// may take to be enqueued. `is_wanted` is asked now and then: once it is not, the communicator
    /// is given up as if the time were over.
    ///
    /// # Errors
    /// [`GpuError::Timeout`] if a rank does not come; [`GpuError::Nccl`], [`GpuError::Cuda`].
    #[allow(clippy::too_many_arguments, reason = "they are what a communicator is")]
    pub fn comm(
        &self,
        device: &Device,
        id: &[u8; 128],
        ranks: u32,
        rank: u32,
        channels: Option<u32>,
        deadline: Duration,
        is_wanted: impl Fn() -> bool,
    ) -> Result<Comm, GpuError> {
        let id = ncclUniqueId { internal: id.map(|byte| c_char::from_ne_bytes([byte])) };
        // Ranks beyond 2^31 are refused by NCCL as what they become here.
        let number = |value: u32| c_int::try_from(value).unwrap_or(-1);
        let mut config = Config::non_blocking(channels);
        let mut handle: ncclComm_t = std::ptr::null_mut();
        // NCCL takes the GPU whose context the thread has.
        let code = device.with_context(|_| {
            let init = self.0.call.ncclCommInitRankConfig;
            let (ranks, rank, config) = (number(ranks), number(rank), (&raw mut config).cast());
            // SAFETY: it reads the settings, whose layout is checked beside `Config`, and writes
            // one handle.
            Ok(unsafe { init(&raw mut handle, ranks, id, rank, config) })
        })?;
        let comm = Comm {
            nccl: self.clone(),
            device: device.clone(),
            handle,
            ranks,
            rank,
            deadline,
            grouped: Cell::new(false),
        };
        match code {
            SUCCESS | IN_PROGRESS if !handle.is_null() => {}
            code => {
                // The error is taken before the communicator's drop aborts what there is of it.
                let code = if code == SUCCESS || code == IN_PROGRESS { 3 } else { code };
                return Err(self.error("ncclCommInitRankConfig", code, handle));
            }
        }
        // A failure drops the communicator, which aborts it.
        let awaited = Awaited::Start { rank, ranks };
        comm.settle("ncclCommInitRankConfig", is_wanted, awaited)?;
        Ok(comm)
    }

    fn check(&self, call: &'static str, code: c_uint, comm: ncclComm_t) -> Result<(), GpuError> {
        if code == SUCCESS { Ok(()) } else { Err(self.error(call, code, comm)) }
    }

    #[cold]
    fn error(&self, call: &'static str, code: c_uint, comm: ncclComm_t) -> GpuError {
        // SAFETY: it takes any number, and returns a string of the library, never changed.
        let said = unsafe { text((self.0.call.ncclGetErrorString)(code)) };
        // SAFETY: it takes a communicator or null; its string is copied at once.
        let last_error = unsafe { text((self.0.call.ncclGetLastError)(comm)) };
        GpuError::Nccl { call, code, text: said, last_error: last_error.trim().to_owned() }
    }
}

/// A communicator: one rank's end of the collectives among `ranks` GPUs. The thread that calls has
/// the GPU's context, see [`Device::make_current`]. Counts are elements. A call returns when its
/// work is enqueued in the stream.
///
/// Dropped without [`close`](Self::close), it is aborted.
pub struct Comm {
    nccl: Nccl,
    device: Device,
    handle: ncclComm_t,
    ranks: u32,
    rank: u32,
    deadline: Duration,
    /// Whether a group is open: calls are then only noted, and enqueued at its end.
    grouped: Cell<bool>,
}

// SAFETY: a communicator may be used by any one thread at a time, which `!Sync` keeps.
unsafe impl Send for Comm {}

impl Comm {
    /// How many ranks it has.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Which of them this is.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Reduces `ranks × recv_count` elements from each rank; rank `r` gets the `r`-th piece of
    /// `recv_count` elements. In place where `recv` is the own piece of `send`.
    ///
    /// # Errors
    /// [`GpuError::Nccl`], [`GpuError::Timeout`].
    ///
    /// # Safety
    /// `send` and `recv` are memory of this GPU, of `ranks × recv_count` and `recv_count` elements,
    /// valid and untouched by others until the stream has passed the call.
    pub unsafe fn reduce_scatter(
        &self,
        send: u64,
        recv: u64,
        recv_count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let function = self.nccl.0.call.ncclReduceScatter;
        let (send, recv, dtype, op) = (from(send), to(recv), dtype_of(dtype), op_of(op));
        // SAFETY: the caller vouches for the memory; the handles are held by their values.
        let code = unsafe { function(send, recv, recv_count, dtype, op, self.handle, raw(stream)) };
        self.enqueued("ncclReduceScatter", code)
    }

    /// Gathers `send_count` elements of each rank, rank `r`'s as the `r`-th piece of `recv`. In
    /// place where `send` is the own piece of `recv`.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter).
    ///
    /// # Safety
    /// As [`reduce_scatter`](Self::reduce_scatter), with `send_count` and `ranks × send_count`
    /// elements.
    pub unsafe fn all_gather(
        &self,
        send: u64,
        recv: u64,
        send_count: usize,
        dtype: DType,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let function = self.nccl.0.call.ncclAllGather;
        let (send, recv, dtype) = (from(send), to(recv), dtype_of(dtype));
        // SAFETY: the caller vouches for the memory; the handles are held by their values.
        let code = unsafe { function(send, recv, send_count, dtype, self.handle, raw(stream)) };
        self.enqueued("ncclAllGather", code)
    }

    /// Reduces `count` elements of each rank; every rank gets the result. In place where `send` is
    /// `recv`.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter).
    ///
    /// # Safety
    /// As [`reduce_scatter`](Self::reduce_scatter), with `count` elements each.
    pub unsafe fn all_reduce(
        &self,
        send: u64,
        recv: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let function = self.nccl.0.call.ncclAllReduce;
        let (send, recv, dtype, op) = (from(send), to(recv), dtype_of(dtype), op_of(op));
        // SAFETY: the caller vouches for the memory; the handles are held by their values.
        let code = unsafe { function(send, recv, count, dtype, op, self.handle, raw(stream)) };
        self.enqueued("ncclAllReduce", code)
    }

    /// Reduces `count` elements of each rank; the rank `root` alone gets the result. In place where
    /// `send` is `recv`.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter).
    ///
    /// # Safety
    /// As [`reduce_scatter`](Self::reduce_scatter), with `count` elements each; `recv` is used on
    /// the root alone.
    #[allow(clippy::too_many_arguments, reason = "they are those of ncclReduce")]
    pub unsafe fn reduce(
        &self,
        send: u64,
        recv: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        root: u32,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let function = self.nccl.0.call.ncclReduce;
        let (send, recv, dtype, op) = (from(send), to(recv), dtype_of(dtype), op_of(op));
        let root = c_int::try_from(root).unwrap_or(-1);
        // SAFETY: the caller vouches for the memory; the handles are held by their values.
        let code =
            unsafe { function(send, recv, count, dtype, op, root, self.handle, raw(stream)) };
        self.enqueued("ncclReduce", code)
    }

    /// Copies `count` elements from the `send` of the rank `root` to the `recv` of every rank. In
    /// place where `send` is `recv`.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter).
    ///
    /// # Safety
    /// As [`reduce_scatter`](Self::reduce_scatter), with `count` elements each; `send` is used on
    /// the root alone.
    pub unsafe fn broadcast(
        &self,
        send: u64,
        recv: u64,
        count: usize,
        dtype: DType,
        root: u32,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let function = self.nccl.0.call.ncclBroadcast;
        let (send, recv, dtype) = (from(send), to(recv), dtype_of(dtype));
        let root = c_int::try_from(root).unwrap_or(-1);
        // SAFETY: the caller vouches for the memory; the handles are held by their values.
        let code = unsafe { function(send, recv, count, dtype, root, self.handle, raw(stream)) };
        self.enqueued("ncclBroadcast", code)
    }

    /// Makes the calls in `calls` one group: NCCL enqueues them together, in one kernel where it
    /// can. All are calls of this communicator. Groups do not nest.
    ///
    /// # Errors
    /// That of `calls`, else as [`reduce_scatter`](Self::reduce_scatter). After an error the
    /// communicator is of no further use.
    pub fn group<T>(&self, calls: impl FnOnce() -> Result<T, GpuError>) -> Result<T, GpuError> {
        let (result, code) = self.grouped(calls)?;
        let ended = self.enqueued("ncclGroupEnd", code);
        let value = result?;
        ended.map(|()| value)
    }

    /// As [`group`](Self::group), but does not wait: whether all is enqueued already. If not, no
    /// other call may be made on this communicator before [`is_enqueued`](Self::is_enqueued) has
    /// said so, and what is put into its streams meanwhile may stand before the group, within it or
    /// behind it: a mark behind earlier work is all that may. NCCL enqueues on a thread of its own,
    /// so meanwhile the caller's can do something else.
    ///
    /// # Errors
    /// As [`group`](Self::group).
    pub fn submit(&self, calls: impl FnOnce() -> Result<(), GpuError>) -> Result<bool, GpuError> {
        let (result, code) = self.grouped(calls)?;
        result?;
        match code {
            IN_PROGRESS => Ok(false),
            code => self.nccl.check("ncclGroupEnd", code, self.handle).map(|()| true),
        }
    }

    /// Whether what was submitted is enqueued. Who asks sees to it that this ends: a rank that does
    /// not take part can delay it for ever.
    ///
    /// # Errors
    /// [`GpuError::Nccl`].
    pub fn is_enqueued(&self) -> Result<bool, GpuError> {
        match self.state()? {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            code => Err(self.nccl.error("ncclGroupEnd", code, self.handle)),
        }
    }

    /// Makes calls in a group: what they returned, and the code of the group's end.
    fn grouped<T>(
        &self,
        calls: impl FnOnce() -> Result<T, GpuError>,
    ) -> Result<(Result<T, GpuError>, c_uint), GpuError> {
        assert!(!self.grouped.get(), "groups do not nest");
        // SAFETY: it takes nothing.
        let code = unsafe { (self.nccl.0.call.ncclGroupStart)() };
        self.nccl.check("ncclGroupStart", code, self.handle)?;
        self.grouped.set(true);
        let result = calls();
        self.grouped.set(false);
        // SAFETY: it takes nothing; the group was started above, by this thread.
        let code = unsafe { (self.nccl.0.call.ncclGroupEnd)() };
        Ok((result, code))
    }

    /// What has gone wrong behind the calls, if anything: a peer that died, say. To be asked now
    /// and then while work is in flight.
    ///
    /// # Errors
    /// [`GpuError::Nccl`]; then [`abort`](Self::abort) is all that is left to do.
    pub fn async_error(&self) -> Result<(), GpuError> {
        match self.state()? {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(self.nccl.error("a collective", code, self.handle)),
        }
    }

    /// Ends the communicator at once, with all that is in flight: kernels that wait for a peer
    /// return, and what they should have written is garbage.
    ///
    /// # Errors
    /// [`GpuError::Timeout`] if NCCL does not let go; it is left to itself then.
    pub fn abort(self) -> Result<(), GpuError> {
        self.begin_abort().wait()
    }

    /// As [`abort`](Self::abort), without waiting.
    pub(crate) fn begin_abort(self) -> Closing {
        Closing::free(self, ABORT, Duration::ZERO, None)
    }

    /// Ends the communicator after all that was enqueued is done, which waits for every rank to
    /// close its end. If that fails, or takes longer than `limit`, it is aborted.
    ///
    /// # Errors
    /// [`GpuError::Timeout`], [`GpuError::Nccl`].
    pub fn close(self, limit: Duration) -> Result<(), GpuError> {
        self.begin_close(limit, Duration::ZERO).wait()
    }

    /// As [`close`](Self::close), without waiting; it is `now` by the clock of
    /// [`Closing::step`].
    pub(crate) fn begin_close(self, limit: Duration, now: Duration) -> Closing {
        // SAFETY: the handle is held by this value.
        match unsafe { (self.nccl.0.call.ncclCommFinalize)(self.handle) } {
            SUCCESS | IN_PROGRESS => Closing::finalizing(self, limit, now),
            code => {
                let error = self.nccl.error(FINALIZE, code, self.handle);
                Closing::free(self, ABORT, now, Some(error))
            }
        }
    }

    /// What a call's code means: done, noted in a group, or to be watched until it is enqueued.
    #[inline]
    fn enqueued(&self, call: &'static str, code: c_uint) -> Result<(), GpuError> {
        match code {
            SUCCESS => Ok(()),
            IN_PROGRESS if self.grouped.get() => Ok(()),
            IN_PROGRESS => self.settle(call, || true, self.waits_for_others(call)),
            code => Err(self.nccl.error(call, code, self.handle)),
        }
    }

    fn waits_for_others(&self, call: &'static str) -> Awaited {
        Awaited::Others { call, rank: self.rank, ranks: self.ranks }
    }

    /// Waits until the last call is no longer in progress. The first looks yield and do not sleep:
    /// the thread of NCCL's that enqueues may have this one's CPU alone to run on.
    fn settle(
        &self,
        call: &'static str,
        is_wanted: impl Fn() -> bool,
        awaited: Awaited,
    ) -> Result<(), GpuError> {
        let start = Instant::now();
        loop {
            match self.state()? {
                SUCCESS => return Ok(()),
                IN_PROGRESS => {}
                code => return Err(self.nccl.error(call, code, self.handle)),
            }
            let waited = start.elapsed();
            if waited > self.deadline || !is_wanted() {
                return Err(GpuError::Timeout { awaited, after: waited.min(self.deadline) });
            } else if waited < QUICK {
                std::thread::yield_now();
            } else {
                std::thread::sleep(LOOK);
            }
        }
    }

    /// The communicator's own code.
    fn state(&self) -> Result<c_uint, GpuError> {
        let mut state = SUCCESS;
        let ask = self.nccl.0.call.ncclCommGetAsyncError;
        // SAFETY: the handle is held by this value; it writes one number.
        let code = unsafe { ask(self.handle, &raw mut state) };
        self.nccl.check("ncclCommGetAsyncError", code, self.handle)?;
        Ok(state)
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        let _ = Closing::take(self, ABORT, Duration::ZERO, None).wait();
    }
}

fn from(address: u64) -> *const c_void {
    to(address).cast_const()
}

#[allow(clippy::cast_possible_truncation, reason = "CUDA exists on 64-bit machines alone")]
fn to(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

fn raw(stream: &Stream) -> cudaStream_t {
    std::ptr::with_exposed_provenance_mut(stream.raw())
}

fn op_of(op: ReduceOp) -> ncclRedOp_t {
    match op {
        ReduceOp::Sum => ncclRedOp_t::ncclSum,
        ReduceOp::Average => ncclRedOp_t::ncclAvg,
        ReduceOp::Min => ncclRedOp_t::ncclMin,
        ReduceOp::Max => ncclRedOp_t::ncclMax,
        ReduceOp::Product => ncclRedOp_t::ncclProd,
    }
}

fn dtype_of(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::F64 => ncclDataType_t::ncclFloat64,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::BF16 => ncclDataType_t::ncclBfloat16,
        DType::U8 => ncclDataType_t::ncclUint8,
        DType::I8 => ncclDataType_t::ncclInt8,
        DType::I32 => ncclDataType_t::ncclInt32,
        DType::I64 => ncclDataType_t::ncclInt64,
    }
}
