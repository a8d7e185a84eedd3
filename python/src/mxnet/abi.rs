//! MXNet's C interface, as far as an asynchronous operation needs it: functions whose addresses
//! Python has looked up, and the C++ objects that cross it.
//!
//! Layouts are those of MXNet 1.9.1, the last release. `byteps.mxnet` refuses any other.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::transmute;
use std::ptr;
use std::sync::OnceLock;

/// An array as MXNet's interface names it.
pub type ArrayHandle = *mut c_void;
/// What the engine runs once all that an operation depends on is over.
pub type Operation = unsafe extern "C" fn(
    context: *mut c_void,
    on_complete: *const OnComplete,
    parameter: *mut c_void,
);
/// What the engine calls when it forgets an operation.
pub type Deleter = unsafe extern "C" fn(parameter: *mut c_void);

/// A device, as `mxnet::Context` has it.
#[repr(C)]
struct Device {
    kind: c_int,
    number: c_int,
}

static CPU: Device = Device { kind: 1, number: 0 };
/// `FnProperty::kCPUPrioritized`: more urgent operations first, on threads apart from arithmetic.
static PRIORITIZED: c_int = 3;

/// Exceptions of C++ have no room of their own here: `std::runtime_error` takes two words.
type Exception = [usize; 4];

type Push = unsafe extern "C" fn(
    Operation,
    *mut c_void,
    Deleter,
    *const Device,
    *const ArrayHandle,
    c_int,
    *const ArrayHandle,
    c_int,
    *const c_int,
    c_int,
    *const c_char,
    bool,
) -> c_int;

/// The functions, in the order in which Python gives their addresses.
#[derive(Clone, Copy)]
#[repr(C)]
struct Functions {
    push: Push,
    share: unsafe extern "C" fn(ArrayHandle, *mut ArrayHandle) -> c_int,
    free: unsafe extern "C" fn(ArrayHandle) -> c_int,
    export: unsafe extern "C" fn(ArrayHandle, *mut *mut Exported) -> c_int,
    unexport: unsafe extern "C" fn(*mut Exported) -> c_int,
    last_error: unsafe extern "C" fn() -> *const c_char,
    new_error: unsafe extern "C" fn(*mut Exception, *const c_char),
    end_error: unsafe extern "C" fn(*mut Exception),
}

/// How many addresses these are.
pub const FUNCTIONS: usize = size_of::<Functions>() / size_of::<usize>();

static LOADED: OnceLock<Functions> = OnceLock::new();

/// Takes the addresses of `MXEnginePushAsyncND`, `MXShallowCopyNDArray`, `MXNDArrayFree`,
/// `MXNDArrayToDLPack`, `MXNDArrayCallDLPackDeleter`, `MXGetLastError`, and of the constructor and
/// the destructor of `std::runtime_error`. False if one is missing.
pub fn load(addresses: [usize; FUNCTIONS]) -> bool {
    if addresses.contains(&0) {
        return false;
    }
    // SAFETY: the structure is as many pointers to functions, none of them null; that they have
    // these signatures is MXNet 1.9.1's interface, and C++'s, for what Python has looked up.
    LOADED.get_or_init(|| unsafe { transmute::<[usize; FUNCTIONS], Functions>(addresses) });
    true
}

fn functions() -> &'static Functions {
    LOADED.get().expect("byteps.mxnet gives the functions when it is imported")
}

/// MXNet's own words for the last call of this thread that failed.
fn last_error() -> String {
    // SAFETY: it gives a string of the calling thread's, which stays until its next call.
    let text = unsafe { (functions().last_error)() };
    if text.is_null() {
        return "MXNet gave no reason".to_owned();
    }
    // SAFETY: MXNet keeps the string until its next call on this thread; it is copied at once.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// A further reference to an array, which keeps its memory.
pub struct Array(ArrayHandle);

// SAFETY: MXNet's arrays count their references atomically, and their functions may be called from
// any thread.
unsafe impl Send for Array {}

impl Array {
    /// Shares an array.
    ///
    /// # Safety
    /// The handle is that of an array that lives during this call.
    ///
    /// # Errors
    /// MXNet's.
    pub unsafe fn share(handle: ArrayHandle) -> Result<Array, String> {
        let mut shared = ptr::null_mut();
        // SAFETY: the caller has the array; it writes one handle.
        let code = unsafe { (functions().share)(handle, &raw mut shared) };
        if code == 0 { Ok(Array(shared)) } else { Err(last_error()) }
    }

    /// One more reference.
    ///
    /// # Errors
    /// MXNet's.
    pub fn again(&self) -> Result<Array, String> {
        // SAFETY: this value keeps the array.
        unsafe { Array::share(self.0) }
    }

    /// Where its elements are, one behind the other, and how many bytes they take.
    ///
    /// By way of DLPack, which MXNet refuses for an array in a layout of its own: asked for the
    /// memory of such an array, it would lay it out anew, by an operation that comes behind the one
    /// that asks.
    ///
    /// # Errors
    /// MXNet's.
    pub fn memory(&self) -> Result<(*mut u8, usize), String> {
        let mut exported = ptr::null_mut();
        // SAFETY: the array lives; it writes one pointer.
        let code = unsafe { (functions().export)(self.0, &raw mut exported) };
        if code != 0 || exported.is_null() {
            return Err(last_error());
        }
        // SAFETY: MXNet has filled the structure, which lives until it is given back.
        let memory = unsafe { (*exported).memory() };
        // SAFETY: it is what has just been exported, and is not used any more.
        unsafe { (functions().unexport)(exported) };
        memory
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        // SAFETY: the handle is this value's own.
        unsafe { (functions().free)(self.0) };
    }
}

/// `DLManagedTensor`, up to what is read of it.
#[repr(C)]
struct Exported {
    data: *mut u8,
    device: Device,
    dimensions: c_int,
    kind: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

impl Exported {
    /// # Safety
    /// The structure is as its maker has filled it.
    unsafe fn memory(&self) -> Result<(*mut u8, usize), String> {
        let dimensions = usize::try_from(self.dimensions).unwrap_or(0);
        let mut bytes = usize::from(self.bits / 8);
        for dimension in 0..dimensions {
            // SAFETY: the shape has as many numbers.
            let length = unsafe { *self.shape.add(dimension) };
            let length = usize::try_from(length).ok();
            bytes = length
                .and_then(|length| bytes.checked_mul(length))
                .ok_or("MXNet gave a shape that no array has")?;
        }
        let offset = usize::try_from(self.byte_offset).map_err(|error| error.to_string())?;
        Ok((self.data.wrapping_add(offset), bytes))
    }
}

/// `mxnet::engine::CallbackOnComplete`: it may be copied, and called once from any thread.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct OnComplete {
    function: unsafe extern "C" fn(*mut c_void, *mut c_void, *const Exception),
    engine: *mut c_void,
    operation: *mut c_void,
}

// SAFETY: MXNet's engine is told of ends by threads that it does not know.
unsafe impl Send for OnComplete {}

impl OnComplete {
    /// Tells the engine that the operation is over, or why it failed: whoever waits for what it
    /// writes gets that as an `MXNetError`.
    ///
    /// # Safety
    /// It is called once for an operation, whose arrays nobody uses for it any more.
    pub unsafe fn call(self, result: Result<(), String>) {
        let OnComplete { function, engine, operation } = self;
        let Err(text) = result else {
            // SAFETY: the engine gave the function and its arguments for this.
            return unsafe { function(engine, operation, ptr::null()) };
        };
        let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
        let mut error: Exception = [0; 4];
        // SAFETY: there is room for a `std::runtime_error`, which copies the text. The engine takes
        // a `dmlc::Error`, which is one with nothing added, and copies it too.
        unsafe {
            (functions().new_error)(&raw mut error, text.as_ptr());
            function(engine, operation, &raw const error);
            (functions().end_error)(&raw mut error);
        }
    }
}

/// Has MXNet's engine run `operation` once all that uses these arrays before is over; what uses
/// them after it comes behind its end.
///
/// # Safety
/// The arrays live during this call. `operation` may run on any thread, once, and has `on_complete`
/// called once; `deleter` is called once after that.
///
/// # Errors
/// MXNet's; then neither is called.
pub unsafe fn push(
    operation: Operation,
    parameter: *mut c_void,
    deleter: Deleter,
    arrays: [ArrayHandle; 2],
    priority: c_int,
) -> Result<(), String> {
    // SAFETY: pointers and counts belong together, and MXNet copies what they name before it
    // returns; the rest is the caller's to keep.
    let code = unsafe {
        (functions().push)(
            operation,
            parameter,
            deleter,
            &raw const CPU,
            ptr::null(),
            0,
            arrays.as_ptr(),
            2,
            &raw const PRIORITIZED,
            priority,
            c"byteps.push_pull".as_ptr(),
            false,
        )
    };
    if code == 0 { Ok(()) } else { Err(last_error()) }
}
