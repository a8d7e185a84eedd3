//! The C interface between XLA and its custom calls, as far as [`super`] uses it.
//!
//! XLA's headers are C and move between releases, so the structures are declared here by hand.
//! Only what kept its place from jaxlib 0.4.38 on is named, and function slots that came later
//! are called where the release has them ([`set_release`]). A structure of XLA's is never taken
//! to be larger than what is read of it.

#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_void};
use std::mem::offset_of;
use std::ptr;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering::Relaxed};

/// The interface's versions that this module was written against: 0.1 to 0.5.
pub const MAJOR: i32 = 0;
/// See [`MAJOR`].
pub const MINOR_MAX: i32 = 5;
/// The newest minor version whose runtime these handlers have run in: what they claim to be.
const MINOR_TESTED: i32 = 3;

/// An error of XLA's: null is success. Whoever gets one owns it.
pub type RawError = *mut c_void;

#[repr(C)]
struct Extension {
    size: usize,
    kind: i32,
    next: *mut Extension,
}

#[repr(C)]
struct Version {
    size: usize,
    extension: *mut Extension,
    major: i32,
    minor: i32,
}

#[repr(C)]
struct Metadata {
    size: usize,
    version: Version,
    traits: u32,
}

#[repr(C)]
struct MetadataExtension {
    base: Extension,
    metadata: *mut Metadata,
}

/// The start of XLA's table; functions follow, each a pointer.
#[repr(C)]
pub struct Api {
    size: usize,
    extension: *mut Extension,
    version: Version,
    internal: *const c_void,
    functions: [*const c_void; 0],
}

#[repr(C)]
struct ErrorCreate {
    size: usize,
    extension: *mut Extension,
    message: *const c_char,
    code: i32,
}

#[repr(C)]
struct ErrorDestroy {
    size: usize,
    extension: *mut Extension,
    error: RawError,
}

#[repr(C)]
struct FutureCall {
    size: usize,
    extension: *mut Extension,
    future: *mut c_void,
    /// Read by the call that sets an error alone.
    error: RawError,
}

#[repr(C)]
struct ContextQuery {
    size: usize,
    extension: *mut Extension,
    context: *mut c_void,
    /// Room for a pointer (the stream), an `i64` (the run) or an `i32` (the device) in the first
    /// half.
    value: i64,
}

#[repr(C)]
struct RawBuffer {
    size: usize,
    extension: *mut Extension,
    dtype: i32,
    data: *mut u8,
    rank: i64,
    dimensions: *const i64,
}

/// Arguments or results of a call.
#[repr(C)]
struct Buffers {
    size: usize,
    extension: *mut Extension,
    count: i64,
    kinds: *const i32,
    values: *const *const RawBuffer,
}

#[repr(C)]
struct Span {
    start: *const u8,
    bytes: usize,
}

#[repr(C)]
struct Scalar {
    dtype: i32,
    value: *const c_void,
}

#[repr(C)]
struct Attributes {
    size: usize,
    extension: *mut Extension,
    count: i64,
    kinds: *const i32,
    names: *const *const Span,
    values: *const *const c_void,
}

/// What XLA passes to a handler.
#[repr(C)]
pub struct CallFrame {
    size: usize,
    extension: *mut Extension,
    api: *const Api,
    context: *mut c_void,
    stage: i32,
    arguments: Buffers,
    results: Buffers,
    attributes: Attributes,
    future: *mut c_void,
}

// What XLA's headers of the versions 0.1 to 0.5 come to on machines of 64 bits.
const _: () = {
    assert!(size_of::<Extension>() == 24 && size_of::<Version>() == 24);
    assert!(offset_of!(Metadata, traits) == 32 && offset_of!(MetadataExtension, metadata) == 24);
    assert!(offset_of!(Api, version) == 16 && offset_of!(Api, functions) == 48);
    assert!(size_of::<RawBuffer>() == 48 && offset_of!(RawBuffer, data) == 24);
    assert!(size_of::<Buffers>() == 40 && size_of::<Attributes>() == 48);
    assert!(offset_of!(CallFrame, arguments) == 40 && offset_of!(CallFrame, future) == 168);
};

const KIND_METADATA: i32 = 1;
const ATTRIBUTE_SCALAR: i32 = 3;
const ATTRIBUTE_STRING: i32 = 4;
const DTYPE_S64: i32 = 5;

/// Numbers of functions in [`Api`].
const ERROR_CREATE: usize = 0;
const ERROR_DESTROY: usize = 2;
const STREAM_GET: usize = 4;
const FUTURE_CREATE: usize = 13;
const FUTURE_SET_AVAILABLE: usize = 14;
const FUTURE_SET_ERROR: usize = 15;
const RUN_ID: usize = 16;
const DEVICE_ORDINAL: usize = 17;

/// How many functions the table of this jaxlib has: its own word for that is wrong before 0.7, and
/// its version number did not change when functions were added.
static FUNCTIONS: AtomicUsize = AtomicUsize::new(FUTURE_SET_ERROR + 1);

/// The version that XLA has said it is, as `major << 32 | minor`; -1 before.
static SEEN: AtomicI64 = AtomicI64::new(-1);

/// Which functions a release of jaxlib has.
pub fn set_release(release: (u32, u32, u32)) {
    let count = match release {
        (0, minor, _) if minor >= 6 => DEVICE_ORDINAL + 1,
        (0, 5, patch) if patch >= 1 => RUN_ID + 1,
        (0, ..) => FUTURE_SET_ERROR + 1,
        _ => DEVICE_ORDINAL + 1,
    };
    FUNCTIONS.store(count, Relaxed);
}

/// The version of the interface that XLA has shown, once it has.
pub fn seen_version() -> Option<(i32, i32)> {
    let seen = SEEN.load(Relaxed);
    let halves = |seen: i64| Some((i32::try_from(seen >> 32).ok()?, seen & 0xffff_ffff));
    let (major, minor) = (seen >= 0).then(|| halves(seen)).flatten()?;
    Some((major, i32::try_from(minor).ok()?))
}

/// A function of XLA's table, by its number.
///
/// # Safety
/// `api` is what XLA passed in a call frame, whose release [`set_release`] was told, and `F` is the
/// type of that function.
unsafe fn function<F: Copy>(api: *const Api, number: usize) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
    if number >= FUNCTIONS.load(Relaxed) {
        return None;
    }
    // SAFETY: the table of this release has more than `number` functions behind its start, as the
    // count that was just compared says, and each is a pointer.
    let pointer = unsafe { *(&raw const (*api).functions).cast::<*const c_void>().add(number) };
    if pointer.is_null() {
        return None;
    }
    // SAFETY: a function pointer is as large as a data pointer here (asserted above), this one is
    // not null, and the caller vouches for its type.
    Some(unsafe { std::mem::transmute_copy::<*const c_void, F>(&pointer) })
}

/// An error for XLA, with this text; null, which is success, only if XLA can't make one.
///
/// # Safety
/// As [`function`] wants `api`.
unsafe fn error(api: *const Api, code: i32, text: &str) -> RawError {
    let text: Vec<u8> = text.bytes().filter(|&byte| byte != 0).collect();
    let text = CString::new(text).unwrap_or_default();
    let size = size_of::<ErrorCreate>();
    let mut call = ErrorCreate { size, extension: ptr::null_mut(), message: text.as_ptr(), code };
    // SAFETY: the interface gives this number to `XLA_FFI_Error_Create`, which has this type, in
    // all versions up to `MINOR_MAX`.
    let create: Option<unsafe extern "C" fn(*mut ErrorCreate) -> RawError> =
        unsafe { function(api, ERROR_CREATE) };
    // SAFETY: the structure and its text live until the call returns; XLA copies the text.
    create.map_or(ptr::null_mut(), |create| unsafe { create(&raw mut call) })
}

/// Frees an error that XLA has given us.
///
/// # Safety
/// As [`function`] wants `api`; `error` is XLA's and is used by nobody afterwards.
unsafe fn destroy(api: *const Api, error: RawError) {
    let size = size_of::<ErrorDestroy>();
    let mut call = ErrorDestroy { size, extension: ptr::null_mut(), error };
    // SAFETY: the interface gives this number to `XLA_FFI_Error_Destroy`, which has this type.
    let free: Option<unsafe extern "C" fn(*mut ErrorDestroy)> =
        unsafe { function(api, ERROR_DESTROY) };
    if let Some(free) = free {
        // SAFETY: the structure lives until the call returns, and the error is the caller's.
        unsafe { free(&raw mut call) };
    }
}

/// Codes of `absl::Status`, which XLA's errors carry.
#[derive(Clone, Copy)]
pub enum Code {
    /// The call is wrong.
    InvalidArgument = 3,
    /// The exchange has failed, or cannot begin.
    Aborted = 10,
}

/// Memory of an argument or a result of a call.
#[derive(Clone, Copy)]
pub struct Buffer<'a> {
    /// XLA's number of the data type.
    pub dtype: i32,
    /// Where its elements are, in row-major order.
    pub data: *mut u8,
    /// Its dimensions.
    pub dimensions: &'a [i64],
}

/// A call of a handler, until it returns.
pub struct Call<'a>(&'a mut CallFrame);

/// What a handler tells XLA later, from any thread: once, by [`complete`](Self::complete).
pub struct Future {
    api: *const Api,
    future: *mut c_void,
}

// SAFETY: XLA's table lives as long as the process, and its documentation lets futures be completed
// from any thread.
unsafe impl Send for Future {}

impl Future {
    /// Tells XLA that the results of the call are there, or what has gone wrong. XLA may go on with
    /// its program on this thread: no lock may be held.
    pub fn complete(self, result: Result<(), String>) {
        let number = if result.is_ok() { FUTURE_SET_AVAILABLE } else { FUTURE_SET_ERROR };
        // SAFETY: `api` comes from the frame in which this future was made.
        let error = result.err().map_or(ptr::null_mut(), |text| unsafe {
            error(self.api, Code::Aborted as i32, &text)
        });
        // The call without an error is of a structure that ends before `error`.
        let size = size_of::<FutureCall>() - if number == FUTURE_SET_ERROR { 0 } else { 8 };
        let mut call = FutureCall { size, extension: ptr::null_mut(), future: self.future, error };
        // SAFETY: the interface gives these numbers to `XLA_FFI_Future_SetAvailable` and
        // `XLA_FFI_Future_SetError`, whose structures begin alike.
        let set: Option<unsafe extern "C" fn(*mut FutureCall) -> RawError> =
            unsafe { function(self.api, number) };
        if let Some(set) = set {
            // SAFETY: the future was made by XLA and is completed here alone, since `self` is
            // consumed; the structure lives until the call returns, and the error goes to XLA.
            let failed = unsafe { set(&raw mut call) };
            if !failed.is_null() {
                // SAFETY: XLA has handed the error over to us.
                unsafe { destroy(self.api, failed) };
            }
        }
    }
}

impl<'a> Call<'a> {
    /// A call to act on. Otherwise what the handler returns at once: XLA has only asked what it is,
    /// which is answered, or calls it in a way that is not known here.
    ///
    /// # Safety
    /// `frame` is what XLA has passed to a handler that has not returned.
    pub unsafe fn new(frame: *mut CallFrame) -> Result<Call<'a>, RawError> {
        // SAFETY: XLA passes a frame that is its handler's alone until that returns.
        let frame = unsafe { &mut *frame };
        let mut version = (MAJOR, 1);
        if !frame.api.is_null() {
            // SAFETY: the start of the table has been the same in all versions.
            let told = unsafe { &(*frame.api).version };
            version = (told.major, told.minor);
            let [major, minor] = [told.major, told.minor].map(|half| i64::from(half.max(0)));
            SEEN.store(major << 32 | minor, Relaxed);
        }
        if version.0 != MAJOR {
            // Nothing of such a frame is known, the error's function least of all. XLA notices by
            // itself that the question what the handler is was not answered.
            return Err(ptr::null_mut());
        }
        let mut extension = frame.extension;
        // A chain of a few: the bound is against one that would not end.
        for _ in 0..16 {
            if extension.is_null() {
                break;
            }
            // SAFETY: the chain of extensions of a frame lives as long as the frame, and each
            // begins with this structure.
            let base = unsafe { &*extension };
            if base.kind == KIND_METADATA {
                // SAFETY: an extension of this kind is this structure, and what it points to is
                // there to be written.
                let metadata = unsafe { &mut *(*extension.cast::<MetadataExtension>()).metadata };
                metadata.version.major = version.0;
                // XLA accepts handlers that are older than itself. One of an unknown version is
                // told its own, so that it goes on: Python then says that it is unknown.
                metadata.version.minor =
                    if is_known(version) { version.1.min(MINOR_TESTED) } else { version.1 };
                metadata.traits = 0;
                return Err(ptr::null_mut());
            }
            extension = base.next;
        }
        let call = Call(frame);
        // The size that XLA tells leaves the future out, which came later.
        if !is_known(version) || call.0.size < offset_of!(CallFrame, future) {
            let text = format!(
                "byteps.errors.ConfigError: this jaxlib has version {}.{} of XLA's interface for \
                 custom calls, with frames of {} bytes, which this release of byteps does not \
                 know: install an earlier jaxlib, or a later byteps",
                version.0, version.1, call.0.size
            );
            return Err(call.error(Code::InvalidArgument, &text));
        }
        Ok(call)
    }

    /// An error to return to XLA.
    pub fn error(&self, code: Code, text: &str) -> RawError {
        // SAFETY: the table is that of this call.
        unsafe { error(self.0.api, code as i32, text) }
    }

    /// Argument number `index`.
    pub fn argument(&self, index: usize) -> Option<Buffer<'a>> {
        // SAFETY: the arguments are those of this call, which has not returned.
        unsafe { buffer(&self.0.arguments, index) }
    }

    /// Result number `index`, to be written.
    pub fn result(&self, index: usize) -> Option<Buffer<'a>> {
        // SAFETY: the results are those of this call, which has not returned.
        unsafe { buffer(&self.0.results, index) }
    }

    /// How many results there are.
    pub fn results(&self) -> usize {
        usize::try_from(self.0.results.count).unwrap_or(0)
    }

    fn attribute(&self, name: &str, kind: i32) -> Option<*const c_void> {
        let attributes = &self.0.attributes;
        (0..usize::try_from(attributes.count).ok()?).find_map(|index| {
            // SAFETY: XLA's lists have `count` entries, which live as long as the call.
            let (own_kind, own_name) =
                unsafe { (*attributes.kinds.add(index), &**attributes.names.add(index)) };
            // SAFETY: a name is as long as it says.
            let text = unsafe { bytes(own_name) };
            // SAFETY: as the names, so the values.
            (own_kind == kind && text == name.as_bytes())
                .then(|| unsafe { *attributes.values.add(index) })
        })
    }

    /// The attribute of this name, if it is a text.
    pub fn text(&self, name: &str) -> Option<&'a str> {
        let span = self.attribute(name, ATTRIBUTE_STRING)?;
        // SAFETY: an attribute of this kind is a span, which lives as long as the call.
        std::str::from_utf8(unsafe { bytes(&*span.cast::<Span>()) }).ok()
    }

    /// The attribute of this name, if it is a whole number of 64 bits.
    pub fn number(&self, name: &str) -> Option<i64> {
        let scalar = self.attribute(name, ATTRIBUTE_SCALAR)?.cast::<Scalar>();
        // SAFETY: an attribute of this kind is this structure, and its value is of the type that
        // it names.
        unsafe { ((*scalar).dtype == DTYPE_S64).then(|| (*scalar).value.cast::<i64>().read()) }
    }

    /// Which run of a program this is; `None` where the release does not say.
    pub fn run(&self) -> Option<i64> {
        self.query(RUN_ID, 8)
    }

    /// The number of the device that the call is for, from 0; `None` where the release does not
    /// say.
    pub fn device(&self) -> Option<i64> {
        Some(self.query(DEVICE_ORDINAL, 4)? & 0xffff_ffff)
    }

    /// The CUDA stream in which the call is to enqueue its work; 0, which is CUDA's default stream,
    /// where XLA has none: on CPUs, on which the tests run these calls.
    pub fn stream(&self) -> usize {
        self.query(STREAM_GET, 8).and_then(|address| usize::try_from(address).ok()).unwrap_or(0)
    }

    fn query(&self, number: usize, bytes: usize) -> Option<i64> {
        let size = size_of::<ContextQuery>() - 8 + bytes;
        let (extension, context) = (ptr::null_mut(), self.0.context);
        let mut query = ContextQuery { size, extension, context, value: 0 };
        // SAFETY: all functions that are called by number here take this structure.
        let ask: unsafe extern "C" fn(*mut ContextQuery) -> RawError =
            unsafe { function(self.0.api, number) }?;
        // SAFETY: the context is that of this call; the structure lives until it returns.
        let failed = unsafe { ask(&raw mut query) };
        if failed.is_null() {
            return Some(query.value);
        }
        // SAFETY: XLA has handed the error over to us.
        unsafe { destroy(self.0.api, failed) };
        None
    }

    /// Makes the call asynchronous: its arguments and results stay until the future is completed,
    /// which must be. `None` if XLA makes none.
    pub fn future(&mut self) -> Option<Future> {
        let size = size_of::<FutureCall>() - 8;
        let (extension, future, error) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let mut call = FutureCall { size, extension, future, error };
        // SAFETY: the interface gives this number to `XLA_FFI_Future_Create`, whose structure
        // this one begins like.
        let create: unsafe extern "C" fn(*mut FutureCall) -> RawError =
            unsafe { function(self.0.api, FUTURE_CREATE) }?;
        // SAFETY: the structure lives until the call returns.
        let failed = unsafe { create(&raw mut call) };
        if !failed.is_null() {
            // SAFETY: XLA has handed the error over to us.
            unsafe { destroy(self.0.api, failed) };
            return None;
        }
        self.0.future = call.future;
        (!call.future.is_null()).then_some(Future { api: self.0.api, future: call.future })
    }
}

/// Whether this module knows the interface of this version.
pub fn is_known((major, minor): (i32, i32)) -> bool {
    major == MAJOR && (1..=MINOR_MAX).contains(&minor)
}

/// # Safety
/// The span is one of XLA's, of a call that outlives what is returned.
unsafe fn bytes<'a>(span: &Span) -> &'a [u8] {
    if span.bytes == 0 {
        return &[];
    }
    // SAFETY: a span of XLA's has as many bytes as it says.
    unsafe { std::slice::from_raw_parts(span.start, span.bytes) }
}

/// # Safety
/// These are the arguments or results of a call that outlives what is returned.
unsafe fn buffer<'a>(buffers: &Buffers, index: usize) -> Option<Buffer<'a>> {
    if index >= usize::try_from(buffers.count).ok()? {
        return None;
    }
    // SAFETY: there are `count` of them, all buffers, which are the only kind that the interface
    // has in the versions that this module knows.
    let raw = unsafe { &**buffers.values.add(index) };
    let rank = usize::try_from(raw.rank).ok()?;
    let dimensions = match rank {
        0 => &[][..],
        // SAFETY: a buffer has as many dimensions as its rank says.
        _ => unsafe { std::slice::from_raw_parts(raw.dimensions, rank) },
    };
    Some(Buffer { dtype: raw.dtype, data: raw.data, dimensions })
}
