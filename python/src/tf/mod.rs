//! push_pull as an operation of TensorFlow's, for `byteps.tensorflow`: on CPUs, in programs
//! (`tf.function`, sessions) and outside.
//!
//! One operation exchanges one tensor or several. It is asynchronous: the kernel hands its tensors
//! to the engine and returns, and TensorFlow's threads go on with the rest of the program. Tensors
//! are sent from TensorFlow's own memory and received into it. The operation has no state as
//! TensorFlow sees it: those with state run one after the other.
//!
//! It is registered through TensorFlow's C interface ([`tf_register`]), in the registries that
//! Python's TensorFlow uses.

#![allow(unsafe_code)]

mod api;
mod done;

use crate::completer::{self, PendingCall};
use crate::context::engine;
use crate::declared::{self, Declared};
use crate::error;
use crate::uneven::FromRoot;
use api::{Construction, Context, RawConstruction, RawContext, RawDone, Status, TensorShare, api};
use api::{RawStatus, ShapeContext};
use bps_worker::{Handle, PushPull, TensorId};
use done::Done;
use pyo3::prelude::*;
use std::collections::HashSet;
use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

/// The operation's name, which Python knows too.
const NAME: &CStr = c"BytepsPushPull";

/// Its attributes. All tensors have one operation, root, priority, encoding, number of backup
/// workers (-1 where the environment says it) and list of ranks; it is empty for all ranks. With
/// `sized`, a tensor's name is followed by its first dimension: a name stands for one shape, and in
/// a program only the kernel knows it.
const ATTRIBUTES: &[&CStr] = &[
    c"T: list({half, bfloat16, float, double, int8, uint8, int32, int64}) >= 1",
    c"A: int >= 0 = 0",
    c"names: list(string) >= 1",
    c"operation: string",
    c"root: int = 0",
    c"priority: int = 0",
    c"encoding: string = 'none'",
    c"ranks: list(int) = []",
    c"sized: int = 0",
    c"backups: int = 0",
];

/// Its arguments. The anchor is not looked at: a program whose tensors are constants passes what is
/// none, or TensorFlow computes the result once for all runs.
const INPUTS: &[&CStr] = &[c"tensors: T", c"anchor: A * double"];

/// Makes the operation known to the TensorFlow of this process, once.
#[pyfunction]
pub fn tf_register() -> PyResult<()> {
    static REGISTERED: OnceLock<Result<(), String>> = OnceLock::new();
    let registered = REGISTERED.get_or_init(|| {
        api::load()?;
        define()?;
        add_kernel()
    });
    registered.clone().map_err(|text| error::raise("ConfigError", text))
}

fn define() -> Result<(), String> {
    let (api, status) = (api(), Status::new());
    // SAFETY: the builder is used by this function alone, up to its registration, which takes it;
    // all texts are constants.
    unsafe {
        let builder = (api.TF_NewOpDefinitionBuilder)(NAME.as_ptr());
        for attribute in ATTRIBUTES {
            (api.TF_OpDefinitionBuilderAddAttr)(builder, attribute.as_ptr());
        }
        for input in INPUTS {
            (api.TF_OpDefinitionBuilderAddInput)(builder, input.as_ptr());
        }
        (api.TF_OpDefinitionBuilderAddOutput)(builder, c"results: T".as_ptr());
        (api.TF_OpDefinitionBuilderSetShapeInferenceFunction)(builder, infer);
        (api.TF_RegisterOpDefinition)(builder, status.raw());
    }
    status.result()
}

fn add_kernel() -> Result<(), String> {
    let (api, status) = (api(), Status::new());
    // SAFETY: the builder goes to the registry; the functions are what it calls them as.
    unsafe {
        let builder =
            (api.TF_NewAsyncKernelBuilder)(NAME.as_ptr(), c"CPU".as_ptr(), create, compute, delete);
        (api.TF_RegisterKernelBuilder)(NAME.as_ptr(), builder, status.raw());
    }
    status.result()
}

/// A result has its argument's shape. Programs have one tensor in each operation: the C interface
/// knows no other argument's shape in several releases.
///
/// # Safety
/// Only TensorFlow calls it, with what lives until it returns.
unsafe extern "C" fn infer(context: *mut ShapeContext, status: *mut RawStatus) {
    let api = api();
    // SAFETY: context and status are those of this call; the handle is this function's.
    unsafe {
        (api.TF_ShapeInferenceContextSetUnknownShape)(context, status);
        let shape = (api.TF_NewShapeHandle)();
        (api.TF_ShapeInferenceContextGetInput)(context, 0, shape, status);
        (api.TF_ShapeInferenceContextSetOutput)(context, 0, shape, status);
        (api.TF_DeleteShapeHandle)(shape);
    }
}

/// What a node of a program exchanges.
struct Kernel {
    names: Vec<String>,
    operation: String,
    root: u32,
    priority: i64,
    encoding: String,
    ranks: Vec<u32>,
    is_sized: bool,
    backups: i32,
}

impl Kernel {
    fn of(node: &Construction) -> Result<Kernel, String> {
        let rank = |number: i64| u32::try_from(number).map_err(|_| format!("no rank {number}"));
        Ok(Kernel {
            names: node.texts(c"names")?,
            operation: node.text(c"operation")?,
            root: rank(node.number(c"root")?)?,
            priority: node.number(c"priority")?,
            encoding: node.text(c"encoding")?,
            ranks: node.numbers(c"ranks")?.into_iter().map(rank).collect::<Result<_, _>>()?,
            is_sized: node.number(c"sized")? != 0,
            backups: i32::try_from(node.number(c"backups")?)
                .map_err(|_| "too many backup workers".to_owned())?,
        })
    }

    /// What the ranks must agree on about this one of its tensors.
    fn declared(&self, name: &str, tensor: &TensorShare) -> Result<Declared, String> {
        let wrong =
            |what: &str| format!("byteps.errors.TensorError: '{name}' cannot be exchanged: {what}");
        let (dtype, element) = dtype_of(tensor.dtype()).ok_or_else(|| wrong("its type"))?;
        let shape = tensor.dimensions().into_iter().map(u64::try_from);
        let shape: Vec<u64> = shape.collect::<Result<_, _>>().map_err(|_| wrong("its shape"))?;
        let bytes = shape.iter().try_fold(element, |bytes: u64, &one| bytes.checked_mul(one));
        if bytes != u64::try_from(tensor.bytes()).ok() {
            return Err(wrong("it has not the size that its shape says"));
        }
        let is_float = matches!(dtype, "f16" | "bf16" | "f32" | "f64");
        Ok(Declared {
            name: if self.is_sized { sized(name, &shape) } else { name.to_owned() },
            operation: self.operation.clone(),
            root: self.root,
            dtype,
            shape,
            encoding: if is_float { self.encoding.clone() } else { "none".to_owned() },
            ranks: self.ranks.clone(),
            device: false,
            backups: self.backups,
        })
    }
}

fn sized(name: &str, shape: &[u64]) -> String {
    shape.first().map_or_else(|| name.to_owned(), |rows| format!("{name}.{rows}"))
}

/// What the engine calls a type of TensorFlow's, and the bytes of an element.
fn dtype_of(number: c_int) -> Option<(&'static str, u64)> {
    Some(match number {
        1 => ("f32", 4),
        2 => ("f64", 8),
        3 => ("i32", 4),
        4 => ("u8", 1),
        6 => ("i8", 1),
        9 => ("i64", 8),
        14 => ("bf16", 2),
        19 => ("f16", 2),
        _ => return None,
    })
}

/// # Safety
/// Only TensorFlow calls it, with a node that it is making a kernel for.
unsafe extern "C" fn create(node: *mut RawConstruction) -> *mut c_void {
    // SAFETY: the node is that of this call.
    let node = unsafe { Construction::new(node) };
    match Kernel::of(&node) {
        Ok(kernel) => Box::into_raw(Box::new(kernel)).cast(),
        Err(text) => {
            node.fail(&text);
            ptr::null_mut()
        }
    }
}

/// # Safety
/// Only TensorFlow calls it, with what [`create`] has returned, which it uses no more.
unsafe extern "C" fn delete(kernel: *mut c_void) {
    if !kernel.is_null() {
        // SAFETY: it was made by `create`, and is deleted once.
        drop(unsafe { Box::from_raw(kernel.cast::<Kernel>()) });
    }
}

/// # Safety
/// Only TensorFlow calls it, with what [`create`] has returned.
unsafe extern "C" fn compute(kernel: *mut c_void, context: *mut RawContext, done: *mut RawDone) {
    // SAFETY: TensorFlow keeps the kernel while it runs, and runs none that could not be made.
    let kernel = unsafe { &*kernel.cast::<Kernel>() };
    // SAFETY: the run is that of this call; it is dropped before its callback is called.
    let context = unsafe { Context::new(context) };
    let mut run = match Exchange::start(kernel, &context) {
        Ok(exchange) => Run { context, exchange, done: None },
        Err(text) => {
            context.fail(&text);
            // SAFETY: this call has not returned, and its callback was not called.
            return unsafe { (api().TF_RunAsyncOpKernelDoneCallback)(done) };
        }
    };
    if !run.is_over() && completer::runs() {
        // SAFETY: this call has not returned, and its callback was not called.
        match unsafe { Done::take(done) } {
            Ok(moved) => {
                run.done = Some(moved);
                let handles = run.exchange.handles.clone();
                return completer::complete(Box::new(run), &handles);
            }
            Err(text) => run.exchange.refused = Some(text.to_owned()),
        }
    }
    run.exchange.wait();
    run.tell();
    drop(run);
    // SAFETY: this call has not returned, and its callback was neither called nor moved.
    unsafe { (api().TF_RunAsyncOpKernelDoneCallback)(done) };
}

/// A run of a kernel that waits for its exchange.
struct Run {
    context: Context,
    exchange: Exchange,
    /// `None` where the callback was not moved: who called the kernel calls it.
    done: Option<Done>,
}

impl Run {
    /// Tells TensorFlow what went wrong, if anything did.
    fn tell(&self) {
        if let Err(text) = self.exchange.result() {
            self.context.fail(&text);
        }
    }
}

impl PendingCall for Run {
    fn is_over(&mut self) -> bool {
        self.exchange.handles.iter().all(Handle::is_told)
    }

    fn finish(self: Box<Self>) {
        self.tell();
        let Run { exchange, done, .. } = *self;
        // The memory first: what comes next may use it anew, and the names too.
        drop(exchange);
        if let Some(done) = done {
            done.run();
        }
    }
}

/// Tensors under way: their memory, and their handles.
struct Exchange {
    handles: Vec<Handle>,
    memory: Vec<TensorShare>,
    _under_way: UnderWay,
    /// Those whose root may have joined.
    from_roots: Vec<FromRoot>,
    /// What the ranks disagree about, or why this run can't go on; the rest is exchanged all the
    /// same, since the other ranks wait for it.
    refused: Option<String>,
}

impl Exchange {
    fn start(kernel: &Kernel, context: &Context) -> Result<Exchange, String> {
        let worker = engine().map_err(|cause| error::exception_alone(&cause))?;
        let mut tensors = Vec::with_capacity(kernel.names.len());
        let mut places = Vec::with_capacity(kernel.names.len());
        let mut memory = Vec::with_capacity(2 * kernel.names.len());
        let count = context.outputs();
        if usize::try_from(count) != Ok(kernel.names.len()) {
            return Err("byteps.errors.UsageError: each tensor needs one name".to_owned());
        }
        for (index, name) in (0..count).zip(&kernel.names) {
            let argument = context.input(index)?;
            tensors.push(kernel.declared(name, &argument)?);
            let (source, dimensions) = (argument.data(), argument.dimensions());
            // Without our share nobody may need the argument any more.
            drop(argument);
            let (result, is_forwarded) = context.output(index, &dimensions)?;
            places.push((source, result.data()));
            if !is_forwarded {
                memory.push(context.input(index)?);
            }
            memory.push(result);
        }
        let (numbers, refused) = declared::numbers(&tensors)?;
        let under_way = UnderWay::new(&tensors, &numbers)?;
        let items = numbers.iter().zip(places).filter_map(|(number, (source, target))| {
            let priority = kernel.priority;
            number.map(|tensor| PushPull { tensor, source: source.cast_const(), target, priority })
        });
        let items: Vec<PushPull> = items.collect();
        // SAFETY: arguments and results have the sizes that their shapes say, as was checked of
        // the arguments, by which the results were made. `memory` keeps them until the handles are
        // over, and TensorFlow's programs neither write an argument that somebody has a share in,
        // nor read a result before the kernel is done.
        let handles = unsafe { worker.push_pull(&items) };
        let handles = handles.map_err(|cause| error::of_engine(&cause))?;
        let pushed =
            tensors.iter().zip(&numbers).filter_map(|(one, number)| Some((one, (*number)?)));
        let from_roots =
            pushed.filter_map(|(one, number)| FromRoot::of(&worker, one, number)).collect();
        Ok(Exchange { handles, memory, _under_way: under_way, from_roots, refused })
    }

    fn wait(&self) {
        for handle in &self.handles {
            // The engine ends each handle, with an error if need be, which `result` tells.
            let _ = handle.wait(None);
        }
    }

    /// What has become of it, with the class that Python raises for it. To be asked at the end.
    fn result(&self) -> Result<(), String> {
        for handle in &self.handles {
            handle.wait(None).map_err(|cause| error::of_engine(&cause))?;
        }
        self.from_roots.iter().try_for_each(FromRoot::check)?;
        self.refused.clone().map_or(Ok(()), Err)
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if !self.handles.iter().all(Handle::poll) {
            // The engine may still write there: better lost than given to somebody else.
            std::mem::forget(std::mem::take(&mut self.memory));
        }
    }
}

/// Tensors under way in programs. A name that is there twice would be summed in different pairs on
/// different ranks, since TensorFlow runs what is independent in any order.
static UNDER_WAY: LazyLock<Mutex<HashSet<TensorId>>> = LazyLock::new(Mutex::default);

/// Those of one exchange.
struct UnderWay(Vec<TensorId>);

impl UnderWay {
    fn lock() -> MutexGuard<'static, HashSet<TensorId>> {
        UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new(tensors: &[Declared], numbers: &[Option<TensorId>]) -> Result<UnderWay, String> {
        let mut all = UnderWay::lock();
        let mut own = UnderWay(Vec::with_capacity(numbers.len()));
        for (tensor, number) in tensors.iter().zip(numbers) {
            let Some(number) = *number else { continue };
            if !all.insert(number) {
                drop(all); // `own` takes it when it ends.
                return Err(format!(
                    "byteps.errors.UsageError: '{}' is under way already: give each exchange of a \
                     program a name of its own, and run programs that share names one after the \
                     other",
                    tensor.name
                ));
            }
            own.0.push(number);
        }
        Ok(own)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut all = UnderWay::lock();
        for number in self.0.drain(..) {
            all.remove(&number);
        }
    }
}
