//! The two calls in programs that TensorFlow compiles (`jit_compile=True`), on CPUs, for
//! `byteps.tensorflow`.
//!
//! TensorFlow offers custom calls of XLA's older interface alone: functions with pointers, a text,
//! and a status, which are found in a registry by name. Neither the registry nor the status has a C
//! interface, so both are reached as C++ has them in libstdc++'s ABI: the registry by its mangled
//! names, the status by its layout. What is assumed is tried out before anything is registered
//! ([`xla_register_in_tensorflow`]); where it does not hold, programs are told to do without XLA.
//!
//! XLA runs the calls of a program one after the other. So a pull takes the tickets of all arrays
//! that are exchanged together, and nothing waits before all of them are pushed. A push that cannot
//! begin says so by its pull, for an error of its own would end the program before the others are
//! pushed, for which other ranks wait.

#![allow(unsafe_code)]

use super::exchanges;
use crate::declared::Declared;
use libloading::os::unix::Library;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::mem::{offset_of, transmute};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// The names of the calls, which Python knows too.
const PUSH: &CStr = c"byteps_tensorflow_push";
const PULL: &CStr = c"byteps_tensorflow_pull";
/// XLA's name for CPUs.
const PLATFORM: &CStr = c"Host";

const LIBRARY: &str = "libtensorflow_cc.so.2";
const GLOBAL: &str = "_ZN3xla24CustomCallTargetRegistry6GlobalEv";
const REGISTER: &str = "_ZN3xla24CustomCallTargetRegistry8RegisterERKNSt7__cxx1112basic_string\
    IcSt11char_traitsIcESaIcEEEPvS8_";
const LOOKUP: &str = "_ZNK3xla24CustomCallTargetRegistry6LookupERKNSt7__cxx1112basic_string\
    IcSt11char_traitsIcESaIcEEES8_";
const MESSAGE: &str = "_ZN3xla26CustomCallStatusGetMessageEPK20XlaCustomCallStatus_";
const NEW: &str = "_Znwm";

/// Texts of so many bytes lie in a `std::string` itself.
const LOCAL_BYTES: usize = 15;

/// `std::string` of libstdc++.
#[repr(C)]
struct StdString {
    start: *const c_char,
    bytes: usize,
    /// The text and its zero, or how many bytes there is room for.
    local: [u8; LOCAL_BYTES + 1],
}

impl StdString {
    /// One to be read alone, of a text that lasts.
    fn of(text: &'static CStr) -> StdString {
        StdString { start: text.as_ptr(), bytes: text.count_bytes(), local: [0; LOCAL_BYTES + 1] }
    }
}

/// `XlaCustomCallStatus`, which is a `std::optional<std::string>`.
#[repr(C)]
struct Status {
    text: StdString,
    is_set: bool,
}

/// A `std::optional<std::string_view>`: the view is a pointer and a length, in either order.
#[repr(C)]
struct Told {
    view: [usize; 2],
    is_set: bool,
}

const _: () = {
    assert!(size_of::<StdString>() == 32 && offset_of!(StdString, local) == 16);
    assert!(size_of::<Status>() == 40 && offset_of!(Status, is_set) == 32);
    assert!(size_of::<Told>() == 24 && offset_of!(Told, is_set) == 16);
};

type Registry = c_void;
type Function = *mut c_void;
type New = unsafe extern "C" fn(usize) -> *mut u8;

/// The functions of C++ that are needed.
struct Cpp {
    global: unsafe extern "C" fn() -> *mut Registry,
    register: unsafe extern "C" fn(*mut Registry, *const StdString, Function, *const StdString),
    lookup: unsafe extern "C" fn(*const Registry, *const StdString, *const StdString) -> Function,
    message: unsafe extern "C" fn(*const Status) -> Told,
    new: New,
}

/// What a status takes its memory from: it is freed by the `delete` that belongs to it.
static NEW_IN_USE: OnceLock<New> = OnceLock::new();

/// Makes the calls known to the XLA of this process's TensorFlow; why it can't be done, if so.
#[pyfunction]
pub fn xla_register_in_tensorflow() -> Option<String> {
    static REGISTERED: OnceLock<Result<(), String>> = OnceLock::new();
    REGISTERED.get_or_init(register).clone().err()
}

fn register() -> Result<(), String> {
    let cpp = find()?;
    if !keeps_status(&cpp) {
        return Err("its XLA keeps the status of a custom call in a form that is not known".into());
    }
    let _ = NEW_IN_USE.set(cpp.new);
    let platform = StdString::of(PLATFORM);
    let calls: [(&'static CStr, Call); 2] = [(PUSH, push), (PULL, pull)];
    for (name, call) in calls {
        let (name, call) = (StdString::of(name), call as Function);
        // SAFETY: the registry lasts as long as the process; it copies the texts, which were given
        // as libstdc++ has them (`keeps_status` has shown that it does), and the address.
        let found = unsafe {
            let registry = (cpp.global)();
            (cpp.register)(registry, &raw const name, call, &raw const platform);
            (cpp.lookup)(registry, &raw const name, &raw const platform)
        };
        if found != call {
            return Err("its XLA does not find custom calls that were registered".into());
        }
    }
    Ok(())
}

fn find() -> Result<Cpp, String> {
    if cfg!(not(target_pointer_width = "64")) {
        return Err("it is not known on this machine".into());
    }
    // SAFETY: the library is only found, not loaded anew, so none of its initialisers run.
    let library = unsafe { Library::open(Some(LIBRARY), libc::RTLD_NOW | libc::RTLD_NOLOAD) }
        .map_err(|_| format!("{LIBRARY} is not loaded"))?;
    let find = |name: &'static str| {
        // SAFETY: the address is not used here; its type is given below.
        unsafe { library.get::<*mut c_void>(name.as_bytes()) }
            .map(|found| found.as_raw_ptr())
            .map_err(|_| format!("{LIBRARY} has no {name}"))
    };
    // SAFETY: the mangled names say of which types the arguments are; those of the results are the
    // same in TensorFlow 2.15 and 2.21. `new` is that of all C++ in the process.
    let cpp = unsafe {
        Cpp {
            global: transmute::<Function, unsafe extern "C" fn() -> *mut Registry>(find(GLOBAL)?),
            register: transmute::<
                Function,
                unsafe extern "C" fn(*mut Registry, *const StdString, Function, *const StdString),
            >(find(REGISTER)?),
            lookup: transmute::<
                Function,
                unsafe extern "C" fn(
                    *const Registry,
                    *const StdString,
                    *const StdString,
                ) -> Function,
            >(find(LOOKUP)?),
            message: transmute::<Function, unsafe extern "C" fn(*const Status) -> Told>(find(
                MESSAGE,
            )?),
            new: transmute::<Function, New>(everywhere(NEW).map_or_else(|| find(NEW), Ok)?),
        }
    };
    // Python never unloads TensorFlow, and neither may we: the functions are called for ever.
    std::mem::forget(library);
    Ok(cpp)
}

/// A function that stands before all libraries' own, as a replaced allocator does.
fn everywhere(name: &str) -> Option<Function> {
    let process = Library::this();
    // SAFETY: the address is not used here.
    unsafe { process.get::<*mut c_void>(name.as_bytes()) }.ok().map(|found| found.as_raw_ptr())
}

/// Whether XLA reads a status as it is written here.
fn keeps_status(cpp: &Cpp) -> bool {
    let text = c"byteps looks whether a status is what it should be";
    let mut status = Status { text: StdString::of(text), is_set: true };
    // SAFETY: the function reads a structure; should it be a larger one than this, it reads what
    // is behind it on the stack, and does nothing with it.
    let set = unsafe { (cpp.message)(&raw const status) };
    status.is_set = false;
    // SAFETY: it reads the same structure again, in which only the flag has changed.
    let unset = unsafe { (cpp.message)(&raw const status) };
    let view = [text.as_ptr().expose_provenance(), text.count_bytes()];
    let is_view = set.view == view || set.view == [view[1], view[0]];
    set.is_set && !unset.is_set && is_view
}

/// A custom call: where its results go, its arguments, its text and the length of that, and its
/// status. One result is where the first says, several where it says that their addresses are.
type Call = unsafe extern "C" fn(*mut u8, *const *const u8, *const u8, usize, *mut Status);

/// Tells XLA that a call has failed.
///
/// # Safety
/// `status` is what XLA has passed to the call, which has not failed before.
unsafe fn fail(status: *mut Status, text: &str) {
    let Some(new) = NEW_IN_USE.get().filter(|_| !status.is_null()) else { return };
    // SAFETY: it takes a size, and returns memory of that size or does not return.
    let start = unsafe { new(text.len() + 1) };
    // SAFETY: the memory is new and as large; the status has no text, so that nothing of it has to
    // be freed, and it frees what it is given here as strings of libstdc++ do.
    unsafe {
        text.as_ptr().copy_to_nonoverlapping(start, text.len());
        start.add(text.len()).write(0);
        let mut local = [0; LOCAL_BYTES + 1];
        local[..8].copy_from_slice(&text.len().max(LOCAL_BYTES + 1).to_ne_bytes());
        (&raw mut (*status).text).write(StdString {
            start: start.cast(),
            bytes: text.len(),
            local,
        });
        (&raw mut (*status).is_set).write(true);
    }
}

const NOT_OURS: &str = "byteps.errors.UsageError: a custom call of byteps has another text than \
    byteps.tensorflow gives it: call byteps.tensorflow.push_pull";

/// # Safety
/// XLA has passed both to a call that has not returned.
unsafe fn text_of<'a>(text: *const u8, bytes: usize) -> Option<&'a str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller vouches for it.
    std::str::from_utf8(unsafe { std::slice::from_raw_parts(text, bytes) }).ok()
}

/// What a push's text says: type, shape, operation, root, priority, encoding, ranks, backup
/// workers, name.
fn described(text: &str) -> Option<(Declared, usize, i64)> {
    fn list<T: std::str::FromStr>(text: &str) -> Option<Vec<T>> {
        text.split(',').filter(|one| !one.is_empty()).map(|one| one.parse().ok()).collect()
    }
    let mut parts = text.splitn(9, '|');
    let mut next = || parts.next();
    let (dtype, element) = match next()? {
        "f32" => ("f32", 4),
        "f64" => ("f64", 8),
        "f16" => ("f16", 2),
        "bf16" => ("bf16", 2),
        "u8" => ("u8", 1),
        "i8" => ("i8", 1),
        "i32" => ("i32", 4),
        "i64" => ("i64", 8),
        _ => return None,
    };
    let shape: Vec<u64> = list(next()?)?;
    let bytes = shape
        .iter()
        .try_fold(element, |bytes: usize, &one| bytes.checked_mul(usize::try_from(one).ok()?))?;
    let operation = next()?.to_owned();
    let root = next()?.parse().ok()?;
    let priority = next()?.parse().ok()?;
    let encoding = next()?.to_owned();
    let ranks = list(next()?)?;
    let backups = next()?.parse().ok()?;
    let (name, device) = (next()?.to_owned(), false);
    let tensor = Declared { name, operation, root, dtype, shape, encoding, ranks, device, backups };
    Some((tensor, bytes, priority))
}

/// One argument: the array. One result: the ticket, a number of 64 bits.
///
/// # Safety
/// Only XLA calls it, for an operation of `byteps.tensorflow`.
unsafe extern "C" fn push(
    result: *mut u8,
    arguments: *const *const u8,
    text: *const u8,
    text_bytes: usize,
    _: *mut Status,
) {
    // SAFETY: the text is that of this call.
    let described = unsafe { text_of(text, text_bytes) }.and_then(described);
    let pushed = match described {
        None => Err(NOT_OURS.to_owned()),
        Some((tensor, bytes, priority)) => {
            // SAFETY: there is one argument, of the size that Python has said with its shape.
            unsafe { exchanges::push(&tensor, (*arguments, bytes), priority, None) }
        }
    };
    let ticket = pushed.unwrap_or_else(refuse);
    // SAFETY: the result is a number of 64 bits.
    unsafe { result.cast::<u64>().write_unaligned(ticket) };
}

/// Marks the tickets of pushes that could not begin.
const IS_REFUSED: u64 = 1 << 63;
/// Of how many such pushes the reasons are kept: their programs may end before they are pulled.
const REFUSED_MAX: usize = 4096;

/// Why pushes could not begin, by their tickets.
static REFUSED: Mutex<BTreeMap<u64, String>> = Mutex::new(BTreeMap::new());

fn refused() -> MutexGuard<'static, BTreeMap<u64, String>> {
    REFUSED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A ticket for a push that could not begin.
fn refuse(text: String) -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(IS_REFUSED);
    let ticket = LAST.fetch_add(1, Relaxed);
    let mut refused = refused();
    if refused.len() >= REFUSED_MAX {
        refused.pop_first();
    }
    refused.insert(ticket, text);
    ticket
}

/// As many tickets as its text has sizes in bytes, and as many results.
///
/// # Safety
/// Only XLA calls it, for an operation of `byteps.tensorflow`.
unsafe extern "C" fn pull(
    result: *mut u8,
    arguments: *const *const u8,
    text: *const u8,
    text_bytes: usize,
    status: *mut Status,
) {
    // SAFETY: the text is that of this call.
    let sizes = unsafe { text_of(text, text_bytes) };
    let sizes = sizes
        .and_then(|text| text.split(',').map(|one| one.parse().ok()).collect::<Option<Vec<_>>>());
    let Some(sizes) = sizes else {
        // SAFETY: the status is that of this call, which fails once.
        return unsafe { fail(status, NOT_OURS) };
    };
    let mut failed = None;
    for (index, &bytes) in sizes.iter().enumerate() {
        // SAFETY: there is a ticket for each size, a number of 64 bits.
        let ticket = unsafe { (*arguments.add(index)).cast::<u64>().read_unaligned() };
        let target = if sizes.len() == 1 {
            result
        } else {
            // SAFETY: the addresses of several results lie where that of one would be.
            unsafe { *result.cast::<*mut u8>().add(index) }
        };
        // SAFETY: the result is that of this call, and as large as Python has said.
        let delivered = unsafe { deliver(ticket, target, bytes) };
        failed = failed.or(delivered.err());
    }
    if let Some(text) = failed {
        // SAFETY: the status is that of this call, which fails once.
        unsafe { fail(status, &text) };
    }
}

/// Waits for an exchange, and copies its result.
///
/// # Safety
/// `target` may be written for that many bytes, by nobody else.
unsafe fn deliver(ticket: u64, target: *mut u8, bytes: usize) -> Result<(), String> {
    if ticket & IS_REFUSED != 0 {
        return Err(refused().remove(&ticket).unwrap_or_else(|| NOT_OURS.to_owned()));
    }
    let exchange = exchanges::find(ticket)?;
    // The engine ends each handle, with an error if need be, which `deliver` tells.
    let _ = exchange.handle().wait(None);
    // SAFETY: the caller vouches for the memory.
    unsafe { exchange.deliver(target, bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr;

    #[test]
    fn a_text_describes_a_tensor() {
        let told = described("f16|2,3|sum|1|-4|none|0,2|-1|a|name").expect("it is whole");
        let (tensor, bytes, priority) = told;
        assert_eq!((bytes, priority), (12, -4));
        assert_eq!((tensor.name.as_str(), tensor.operation.as_str()), ("a|name", "sum"));
        assert_eq!((tensor.root, tensor.ranks, tensor.backups), (1, vec![0, 2], -1));
        let scalar = described("i64||average|0|0|int8()||0|x").expect("it is whole");
        assert_eq!((scalar.1, scalar.0.shape.len(), scalar.0.ranks.len()), (8, 0, 0));
        for wrong in [
            "",
            "f8||sum|0|0|none||0|x",
            "f32|x|sum|0|0|none||0|x",
            "f32||sum|0|0|none||x|x",
            "f32||sum|0|0|none||0",
        ] {
            assert!(described(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn a_failed_call_has_its_text() {
        /// # Safety
        /// It keeps nothing, and the caller frees what it returns.
        unsafe extern "C" fn new(bytes: usize) -> *mut u8 {
            // SAFETY: it takes a size.
            unsafe { libc::malloc(bytes) }.cast()
        }
        let _ = NEW_IN_USE.set(new);
        let mut status = Status { text: StdString::of(c""), is_set: false };
        // SAFETY: the status is this test's, and has not failed.
        unsafe { fail(&raw mut status, "too long to lie in the string itself") };
        assert!(status.is_set);
        // SAFETY: the text was just written, with its length and its zero.
        let text = unsafe { CStr::from_ptr(status.text.start) };
        assert_eq!((text.count_bytes(), status.text.bytes), (36, 36));
        assert_eq!(status.text.local[..8], 36_usize.to_ne_bytes());
        // SAFETY: it was allocated above, and is freed once.
        unsafe { libc::free(status.text.start.cast_mut().cast()) };
        // SAFETY: the call fails without anything to write into.
        unsafe { fail(ptr::null_mut(), "nobody hears it") };
    }
}
