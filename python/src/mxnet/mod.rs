//! push_pull as an asynchronous operation of MXNet's engine, for `byteps.mxnet`.
//!
//! MXNet orders operations by the arrays that they read and write, and runs each once those before
//! it are over. Ours writes one array. It also writes a token of the name that is exchanged, so
//! that two exchanges of one name keep the order of their calls, whichever arrays they are of: the
//! engine runs operations on several threads. It starts the push_pull and returns; a thread of ours
//! tells the engine when the result is there.

#![allow(unsafe_code)]

mod abi;

use crate::context::engine;
use crate::error;
use abi::{Array, ArrayHandle, FUNCTIONS, OnComplete};
use bps_worker::task::Bell;
use bps_worker::{Handle, PushPull, TensorId, Worker};
use pyo3::prelude::*;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// How long the thread sleeps at most before it looks again.
const SLICE: Duration = Duration::from_millis(500);

/// Takes the addresses of MXNet's functions, in the order of `abi::load`.
#[pyfunction]
pub fn mxnet_functions(addresses: [usize; FUNCTIONS]) -> PyResult<()> {
    if abi::load(addresses) && runs() {
        return Ok(());
    }
    Err(error::raise(
        "StartError",
        "byteps.mxnet cannot start: this MXNet lacks a function of its C interface, or the process \
         cannot start a thread; install mxnet 1.9.1, and raise the limit of threads",
    ))
}

/// An exchange that MXNet's engine has not begun.
struct Exchange {
    worker: Worker,
    tensor: TensorId,
    bytes: usize,
    priority: i64,
    array: Array,
}

/// Exchanges an array in place, once MXNet's engine gets there; returns at once. `array` and
/// `token` are handles of arrays, of which the first is declared as `tensor` with so many `bytes`.
#[pyfunction]
pub fn mxnet_push_pull(
    array: usize,
    token: usize,
    tensor: u32,
    bytes: usize,
    priority: i64,
) -> PyResult<()> {
    let worker = engine()?;
    let handle = |address: usize| -> ArrayHandle { ptr::with_exposed_provenance_mut(address) };
    let failed = |text: String| error::raise("TensorError", format!("MXNet refuses: {text}"));
    // SAFETY: the module `byteps` calls this with handles of arrays that it holds.
    let shared = unsafe { Array::share(handle(array)) }.map_err(failed)?;
    let tensor = TensorId(tensor);
    let exchange = Box::new(Exchange { worker, tensor, bytes, priority, array: shared });
    // MXNet's priorities have 32 bits; what is beyond is as urgent as can be.
    let urgency = priority.clamp(c_int::MIN.into(), c_int::MAX.into());
    let urgency = c_int::try_from(urgency).expect("it was clamped");
    let parameter = Box::into_raw(exchange);
    // SAFETY: the module `byteps` holds both arrays; `run` and `delete` keep what is asked of them.
    let pushed = unsafe {
        abi::push(run, parameter.cast(), delete, [handle(array), handle(token)], urgency)
    };
    pushed.map_err(|text| {
        // SAFETY: nobody else has it, since MXNet has refused.
        drop(unsafe { Box::from_raw(parameter) });
        failed(text)
    })
}

/// # Safety
/// MXNet calls it, once, with what `mxnet_push_pull` has passed with it.
unsafe extern "C" fn delete(parameter: *mut c_void) {
    // SAFETY: it comes from `mxnet_push_pull`, and MXNet deletes it once.
    drop(unsafe { Box::from_raw(parameter.cast::<Exchange>()) });
}

/// Runs on a thread of MXNet's engine.
///
/// # Safety
/// MXNet calls it, with a callback that it lends for this call and what `mxnet_push_pull` has
/// passed with it, which lives until the operation ends.
unsafe extern "C" fn run(
    _context: *mut c_void,
    on_complete: *const OnComplete,
    parameter: *mut c_void,
) {
    // SAFETY: MXNet's callback, which it lends for this call, and may be copied.
    let on_complete = unsafe { *on_complete };
    // SAFETY: what `mxnet_push_pull` made; MXNet deletes it after the operation's end.
    let exchange = unsafe { &*parameter.cast::<Exchange>() };
    match exchange.start() {
        Ok(handle) => {
            // Before it is watched: once the bell rings, it has to be here.
            let keeper = parameter.expose_provenance();
            lock().push(UnderWay { handle: handle.clone(), on_complete, keeper });
            if handle.watch(&BELL) {
                BELL.ring();
            }
        }
        // SAFETY: nothing was started, so nobody uses the array.
        Err(text) => unsafe { on_complete.call(Err(text)) },
    }
}

impl Exchange {
    fn start(&self) -> Result<Handle, String> {
        let (start, bytes) = self.array.memory().map_err(|cause| {
            format!(
                "byteps.errors.TensorError: MXNet does not lend the memory of this array, as where \
                 it lies in a layout of oneDNN's; exchange a copy in its place, made by `copyto` \
                 into a new array: {cause}"
            )
        })?;
        if bytes != self.bytes {
            return Err(format!(
                "byteps.errors.TensorError: an array of {} bytes has {bytes} now: leave its shape \
                 alone while it is exchanged",
                self.bytes
            ));
        }
        let (source, priority) = (start.cast_const(), self.priority);
        let item = PushPull { tensor: self.tensor, source, target: start, priority };
        // SAFETY: the memory is the array's, as large as was declared, and kept by this exchange,
        // which MXNet keeps until the operation's end. Until then the engine lets no other
        // operation use it.
        let handles = unsafe { self.worker.push_pull(&[item]) };
        let handles = handles.map_err(|cause| error::of_engine(&cause))?;
        Ok(handles.into_iter().next().expect("one item has one handle"))
    }
}

/// An exchange that has begun.
struct UnderWay {
    handle: Handle,
    on_complete: OnComplete,
    /// The address of its [`Exchange`].
    keeper: usize,
}

static UNDER_WAY: Mutex<Vec<UnderWay>> = Mutex::new(Vec::new());
static BELL: LazyLock<Arc<Bell>> = LazyLock::new(Arc::default);

fn lock() -> MutexGuard<'static, Vec<UnderWay>> {
    UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the thread runs; the first call starts it.
fn runs() -> bool {
    static RUNS: OnceLock<bool> = OnceLock::new();
    *RUNS.get_or_init(|| std::thread::Builder::new().name("bps-mxnet".into()).spawn(work).is_ok())
}

fn work() {
    loop {
        // Read before the handles are: what ends from now on rings once more.
        let rings = BELL.rings();
        let ended: Vec<_> = lock().extract_if(.., |one| one.handle.is_told()).collect();
        if ended.is_empty() {
            BELL.wait(rings, SLICE);
        }
        for one in ended {
            one.tell();
        }
    }
}

impl UnderWay {
    fn tell(self) {
        let result =
            self.handle.wait(Some(Duration::ZERO)).map_err(|cause| error::of_engine(&cause));
        if !self.handle.poll() {
            // It has failed, and the engine may still write to the array: better lost than given to
            // somebody else.
            let exchange = ptr::with_exposed_provenance_mut::<Exchange>(self.keeper);
            // SAFETY: MXNet deletes the exchange after the call below.
            let array = unsafe { (*exchange).array.again() };
            std::mem::forget(array);
        }
        // SAFETY: the exchange is over; its memory is as `Exchange::start` says, or lost.
        unsafe { self.on_complete.call(result.map(|_| ())) };
    }
}
