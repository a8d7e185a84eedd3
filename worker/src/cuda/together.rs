//! Calls of the driver that take many copies, or many waits, at once.
//!
//! Each call takes locks that the framework's threads need for every kernel that they launch, and
//! a thread that finds one taken sleeps: so what a call costs others is more than its own time. And
//! the driver has room for about a thousand waits in streams, each followed by a copy; thousands of
//! either fit if they come together.

use super::library::{Attributes, Cuda};
use super::{GpuError, Stream};
use bps_engine::base::word;
use cudarc::driver::sys::{
    CUstreamBatchMemOpParams,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st as Wait,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st__bindgen_ty_1 as Value,
    CUstreamBatchMemOpType as Kind,
};
use std::ffi::c_uint;

/// Copies, or waits, of one call at most.
pub(crate) const OF_CALL: usize = 64;

/// `CU_STREAM_WAIT_VALUE_GEQ`.
const AT_LEAST: c_uint = 0;

/// A copy between the memory of a GPU and pinned memory of the host, which has the same address on
/// both.
#[derive(Clone, Copy)]
pub(crate) struct Copy {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) bytes: usize,
    /// The target is the host's.
    pub(crate) is_to_host: bool,
}

impl Stream {
    /// Enqueues copies, in any order among themselves. The thread has the context, see
    /// [`Device::make_current`](super::Device::make_current).
    ///
    /// # Errors
    /// [`GpuError::Cuda`]; some may be enqueued then.
    ///
    /// # Safety
    /// As [`copy_to_host`](Self::copy_to_host), for each. No two have bytes in common.
    pub(super) unsafe fn copy_all(&self, copies: &[Copy]) -> Result<(), GpuError> {
        let cuda: &'static Cuda = self.device().cuda();
        let Some(call) = cuda.copy_batch.filter(|_| copies.len() > 1) else {
            return copies.iter().try_for_each(|copy| {
                let Copy { to, from, bytes, is_to_host } = *copy;
                let host = |at: u64| {
                    let at = usize::try_from(at).expect("addresses of the host are words");
                    std::ptr::with_exposed_provenance_mut::<u8>(at)
                };
                // SAFETY: the caller's promise.
                unsafe {
                    match is_to_host {
                        true => self.copy_to_host(host(to), from, bytes),
                        false => self.copy_to_device(to, host(from), bytes),
                    }
                }
            });
        };
        for some in copies.chunks(OF_CALL) {
            let (mut to, mut from, mut bytes) = ([0; OF_CALL], [0; OF_CALL], [0; OF_CALL]);
            for (at, copy) in some.iter().enumerate() {
                (to[at], from[at], bytes[at]) = (copy.to, copy.from, copy.bytes);
            }
            let mut attributes = Attributes::IN_STREAM;
            // All have the first attributes, and the last number is the copy that failed.
            let (mut first, mut failed) = (0, 0);
            // SAFETY: the caller vouches for the ranges. The arrays have as many elements as are
            // named, and are read during the call alone. The stream's handle is held by this value.
            let code = unsafe {
                call(
                    to.as_mut_ptr(),
                    from.as_mut_ptr(),
                    bytes.as_mut_ptr(),
                    some.len(),
                    &raw mut attributes,
                    &raw mut first,
                    1,
                    &raw mut failed,
                    self.handle(),
                )
            };
            cuda.check("cuMemcpyBatchAsync", code)?;
        }
        Ok(())
    }

    /// Lets what is enqueued from now on wait until each of these words is its value, or beyond it:
    /// the difference of both is compared, so words may wrap around.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    ///
    /// # Safety
    /// Each address is that of four aligned bytes of pinned memory, valid until the wait is over.
    pub(super) unsafe fn wait_for_words(&self, words: &[(u64, u32)]) -> Result<(), GpuError> {
        let cuda: &'static Cuda = self.device().cuda();
        for some in words.chunks(OF_CALL) {
            let mut waits = [CUstreamBatchMemOpParams { pad: [0; 6] }; OF_CALL];
            for (wait, &(address, value)) in waits.iter_mut().zip(some) {
                wait.waitValue = Wait {
                    operation: Kind::CU_STREAM_MEM_OP_WAIT_VALUE_32,
                    address,
                    __bindgen_anon_1: Value { value },
                    flags: AT_LEAST,
                    alias: 0,
                };
            }
            let count = word(some.len());
            // SAFETY: the caller vouches for the addresses. The array has as many elements, and is
            // read during the call alone. The stream's handle is held by this value.
            let code = unsafe {
                (cuda.call.cuStreamBatchMemOp_v2)(self.handle(), count, waits.as_mut_ptr(), 0)
            };
            cuda.check("cuStreamBatchMemOp", code)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::table::Symbols;
    use super::OF_CALL;
    use crate::cuda::{Device, Pinned, Track};
    use std::cell::RefCell;
    use std::ffi::{c_int, c_uint, c_void};
    use std::ptr::NonNull;

    thread_local! {
        /// What the driver was called for, by this thread.
        static CALLS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    fn called(what: String) -> c_uint {
        CALLS.with_borrow_mut(|calls| calls.push(what));
        0
    }

    extern "C" fn version(at: *mut c_int) -> c_uint {
        // SAFETY: the engine passes the address of a number of its own.
        unsafe { at.write(12_080) };
        0
    }

    extern "C" fn count(at: *mut c_int) -> c_uint {
        // SAFETY: the engine passes the address of a number of its own.
        unsafe { at.write(1) };
        0
    }

    extern "C" fn copies(
        _to: *mut u64,
        _from: *mut u64,
        bytes: *mut usize,
        count: usize,
    ) -> c_uint {
        // SAFETY: an array of so many.
        let bytes: usize = unsafe { std::slice::from_raw_parts(bytes, count) }.iter().sum();
        called(format!("{count} copies of {bytes}"))
    }

    extern "C" fn down(_host: usize, _device: u64, bytes: usize) -> c_uint {
        called(format!("down {bytes}"))
    }

    extern "C" fn up(_device: u64, _host: usize, bytes: usize) -> c_uint {
        called(format!("up {bytes}"))
    }

    extern "C" fn waits(_stream: usize, count: c_uint) -> c_uint {
        called(format!("{count} waits"))
    }

    extern "C" fn mark(_stream: usize, _at: u64, value: u32) -> c_uint {
        called(format!("mark {value}"))
    }

    extern "C" fn fine() -> c_uint {
        0
    }

    struct Given<'a>(&'a dyn Fn(&'static str) -> Option<NonNull<c_void>>);

    impl Symbols for Given<'_> {
        fn find(&self, name: &'static str) -> Option<NonNull<c_void>> {
            (self.0)(name)
        }
    }

    /// A track of a GPU whose driver notes its calls, and the memory of the track's word.
    fn track(copies_together: bool) -> (Pinned, Track) {
        let find = |name: &'static str| {
            NonNull::new(match name {
                "cuDriverGetVersion" => version as *mut c_void,
                "cuDeviceGetCount" => count as *mut c_void,
                "cuMemcpyBatchAsync" if !copies_together => std::ptr::null_mut(),
                "cuMemcpyBatchAsync" => copies as *mut c_void,
                "cuMemcpyDtoHAsync_v2" => down as *mut c_void,
                "cuMemcpyHtoDAsync_v2" => up as *mut c_void,
                "cuStreamBatchMemOp_v2" => waits as *mut c_void,
                "cuStreamWriteValue32_v2" => mark as *mut c_void,
                _ => fine as *mut c_void,
            })
        };
        let cuda = super::Cuda::of(&Given(&find)).expect("all functions are there");
        let device = Device::open_in(Box::leak(Box::new(cuda)), 0).expect("it has one GPU");
        let memory = Pinned::new(&device, 4096, None).expect("a page");
        // SAFETY: both go to the test, which drops what it has named last, the track, first.
        let track = unsafe { Track::new(&device, &memory, 0) }.expect("a stream");
        CALLS.take();
        (memory, track)
    }

    /// What the driver was called for since this was last asked.
    fn calls() -> Vec<String> {
        CALLS.take()
    }

    #[test]
    fn copies_go_together_before_the_next_mark_wait_or_event() {
        let (memory, mut track) = track(true);
        let host = memory.as_ptr();
        for bytes in 1..=3 {
            // SAFETY: this driver copies nothing.
            unsafe { track.copy_to_host(host, 64, bytes) }.expect("gathered");
        }
        assert!(calls().is_empty(), "nothing is enqueued yet");
        assert_eq!(track.mark().expect("a mark"), 1);
        assert_eq!(calls(), ["3 copies of 6", "mark 1"]);
        // SAFETY: this driver copies nothing.
        unsafe { track.copy_to_device(64, host, 5) }.expect("gathered");
        // SAFETY: this driver waits for nothing.
        unsafe { track.wait_for_words(&[(64, 1), (128, 1)]) }.expect("two waits");
        assert_eq!(calls(), ["up 5", "2 waits"], "one copy needs no list");
        track.mark().expect("a mark");
        assert_eq!(calls(), ["mark 2"], "nothing is enqueued twice");
    }

    #[test]
    fn no_call_takes_more_than_it_may() {
        let (memory, mut track) = track(true);
        for _ in 0..OF_CALL + 2 {
            // SAFETY: this driver copies nothing.
            unsafe { track.copy_to_device(64, memory.as_ptr(), 1) }.expect("gathered");
        }
        assert_eq!(calls(), [format!("{OF_CALL} copies of {OF_CALL}")], "there is no more room");
        // SAFETY: this driver waits for nothing.
        unsafe { track.wait_for_words(&vec![(64, 1); OF_CALL + 1]) }.expect("waits");
        assert_eq!(calls(), ["2 copies of 2".into(), format!("{OF_CALL} waits"), "1 waits".into()]);
    }

    #[test]
    fn an_older_driver_copies_one_by_one() {
        let (memory, mut track) = track(false);
        let host = memory.as_ptr();
        // SAFETY: this driver copies nothing.
        unsafe { track.copy_to_host(host, 64, 7) }.expect("gathered");
        // SAFETY: this driver copies nothing.
        unsafe { track.copy_to_device(64, host, 8) }.expect("gathered");
        track.enqueue().expect("both");
        assert_eq!(calls(), ["down 7", "up 8"]);
    }
}
