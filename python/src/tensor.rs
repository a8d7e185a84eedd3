//! Where pointers cross: a tensor's address, as Python knows it, becomes what the engine reads and
//! writes.
//!
//! Python keeps each tensor alive, and at its address, until its handle is done; that is the whole
//! contract.

#![allow(unsafe_code)]

use crate::context::engine;
use crate::gradients::{Batch, GradientHooks};
use crate::waiting::interruptible;
use crate::{error, handle, plain};
use bps_engine::base::{DType, Operation, Rank};
use bps_engine::optimize::{OptimizerError, STEPS_MAX};
use bps_engine::proto::encoding::{Encoding, EncodingError};
use bps_worker::{
    Act, Backup, Declaration, Deltas, GpuPushPull, Handle, Kept, Members, Number, Optimizer,
    PushPull, Store, TensorId, TensorShape,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

/// Opens the GPU of this number for the process, which has one; all ranks call it before the first
/// of them declares a tensor on its GPU. Raises if the GPU can't be used, here or on another rank.
#[pyfunction]
pub fn open_gpu(py: Python<'_>, ordinal: u32) -> PyResult<()> {
    let worker = engine()?;
    interruptible(py, move || worker.open_gpu(ordinal), |_| ())?
        .map_err(|cause| error::from_engine(&cause))
}

/// Lets tensors of the host be pushed from this GPU, of which no other rank needs to know. Raises
/// if it can't be used.
#[pyfunction]
pub fn use_gpu(py: Python<'_>, ordinal: u32) -> PyResult<()> {
    let worker = engine()?;
    interruptible(py, move || worker.use_gpu(ordinal), |_| ())?
        .map_err(|cause| error::from_engine(&cause))
}

/// What a tensor is: name, data type, shape, operation, root, on the GPU, the ranks that push it,
/// or `None` for all, how it is encoded, if it is, how its value stays on the servers, if it does,
/// and the one rank that gets its results, if not all do.
type Said = (
    String,
    String,
    Vec<u64>,
    String,
    u32,
    bool,
    Option<Vec<u32>>,
    Option<String>,
    Option<Stored>,
    Option<u32>,
);

/// How a value stays on the servers.
#[derive(FromPyObject)]
pub enum Stored {
    /// The rank that gives the first one, and by how many pushes a rank may be ahead of the
    /// slowest.
    Deltas(u32, Option<u32>),
    /// An optimizer, as people write it.
    Optimizer(String),
    /// For how many slow ranks its rounds do not wait.
    Backup(u32),
}

/// Numbers for tensors given as [`Said`]; the operation is `sum`, `average`, `min`, `max`,
/// `product` or `broadcast`, and the root counts for the last alone. One round trip for all of
/// them.
#[pyfunction]
pub fn declare(py: Python<'_>, tensors: Vec<Said>) -> PyResult<Vec<u32>> {
    let worker = engine()?;
    let declarations = tensors
        .into_iter()
        .map(|said| {
            let (
                name,
                dtype,
                dimensions,
                operation,
                root,
                device,
                ranks,
                encoding,
                store,
                receiver,
            ) = said;
            let members = ranks.map(|ranks| ranks.into_iter().map(Rank).collect());
            let members = members.map_or(Ok(Members::ALL), Members::new);
            Ok(Declaration {
                dtype: DType::from_name(&dtype).ok_or_else(|| {
                    error::raise("TensorError", format!("tensor `{name}`: no data type `{dtype}`"))
                })?,
                shape: TensorShape::new(dimensions).map_err(|cause| {
                    error::raise("TensorError", format!("tensor `{name}`: {cause}"))
                })?,
                operation: operation_from_name(&operation, root)?,
                members: members.map_err(|cause| {
                    error::raise("ConfigError", format!("tensor `{name}`: {cause}"))
                })?,
                receiver: receiver.map(Rank),
                encoding: encoding.map(|text| encoding_of(&text)).transpose()?,
                store: store.map(store_of).transpose()?,
                name,
                device,
            })
        })
        .collect::<PyResult<Vec<_>>>()?;
    interruptible(py, move || worker.declare(&declarations), |_| ())?
        .map(|tensors| tensors.into_iter().map(|tensor| tensor.0).collect())
        .map_err(|cause| error::from_engine(&cause))
}

fn store_of(stored: Stored) -> PyResult<Store> {
    Ok(match stored {
        Stored::Deltas(root, staleness) => Store::Deltas(Deltas { root: Rank(root), staleness }),
        Stored::Optimizer(text) => Store::Optimizer(optimizer_of(&text)?),
        // How far behind a rank may be, the settings say.
        Stored::Backup(workers) => Store::Backup(Backup { workers, behind: 0 }),
    })
}

fn optimizer_of(text: &str) -> PyResult<Optimizer> {
    text.parse().map_err(|cause: OptimizerError| error::raise("ConfigError", cause.to_string()))
}

/// The canonical text of an optimizer of servers, and how many values it keeps for each parameter,
/// itself included; raises for what is none.
#[pyfunction]
pub fn optimizer(text: &str) -> PyResult<(String, usize)> {
    optimizer_of(text).map(|optimizer| (optimizer.to_string(), optimizer.slots()))
}

/// What a round of tensors with optimizers is for: `step`, `set` or `get`; a learning rate, a slot,
/// and how many steps were taken, of which each uses its own.
type ActSaid = (String, f64, u8, u64);

fn act_of((what, rate, slot, steps): &ActSaid) -> PyResult<Act> {
    let act = match what.as_str() {
        "step" => Number::new(*rate).map(Act::step),
        "set" if *steps <= STEPS_MAX => Some(Act::set(*slot, *steps)),
        "get" => Some(Act::get(*slot)),
        _ => None,
    };
    act.ok_or_else(|| {
        let why = format!(
            "a step at learning rate {rate}, `{what}` of slot {slot} behind {steps} steps: a rate \
             is finite and not negative, and a slot is set or got"
        );
        error::raise("ConfigError", why)
    })
}

/// [`push_pull`] of tensors with optimizers, for this.
#[pyfunction]
pub fn update(
    py: Python<'_>,
    tensors: Vec<(u32, usize, usize, i64)>,
    act: ActSaid,
) -> PyResult<Vec<u64>> {
    let (worker, act) = (engine()?, act_of(&act)?);
    let started = py.detach(|| {
        let items: Vec<PushPull> = tensors.into_iter().map(in_host).collect();
        // SAFETY: `byteps` passes addresses of contiguous tensors of the declared size, and holds
        // references to them until their handles are done or the engine is shut down; that users
        // leave them alone meanwhile is what its functions ask for.
        unsafe { worker.update(&items, act) }
    });
    let handles = started.map_err(|cause| error::from_engine(&cause))?;
    Ok(handles.into_iter().map(handle::keep).collect())
}

/// How a tensor is encoded, as people write it.
fn encoding_of(text: &str) -> PyResult<Encoding> {
    text.parse().map_err(|cause: EncodingError| error::raise("ConfigError", cause.to_string()))
}

/// The canonical text of an encoding; raises for what is none.
#[pyfunction]
pub fn encoding(text: &str) -> PyResult<String> {
    encoding_of(text).map(|encoding| encoding.to_string())
}

/// Multiplies what error feedback adds to the next rounds of these tensors.
#[pyfunction]
pub fn scale_residues(py: Python<'_>, tensors: Vec<u32>, factor: f32) -> PyResult<()> {
    let worker = engine()?;
    let tensors: Vec<TensorId> = tensors.into_iter().map(TensorId).collect();
    py.detach(|| worker.scale_residues(&tensors, factor))
        .map_err(|cause| error::from_engine(&cause))
}

/// The residue and the velocity that an encoded tensor keeps on this rank: float32 in the machine's
/// order of bytes, one for each element, or nothing.
#[pyfunction]
pub fn kept<'py>(
    py: Python<'py>,
    tensor: u32,
) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
    let worker = engine()?;
    let kept =
        py.detach(|| worker.kept(TensorId(tensor))).map_err(|cause| error::from_engine(&cause))?;
    let bytes = |values: Vec<f32>| {
        let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_ne_bytes).collect();
        PyBytes::new(py, &bytes)
    };
    Ok((bytes(kept.residue), bytes(kept.velocity)))
}

/// Lets an encoded tensor begin with what [`kept`] has told.
#[pyfunction]
pub fn keep(py: Python<'_>, tensor: u32, residue: &[u8], velocity: &[u8]) -> PyResult<()> {
    let worker = engine()?;
    let values = |bytes: &[u8]| {
        let values = bytes.chunks_exact(size_of::<f32>());
        values.map(|value| f32::from_ne_bytes(value.try_into().expect("four bytes"))).collect()
    };
    let kept = Kept { residue: values(residue), velocity: values(velocity) };
    py.detach(|| worker.keep(TensorId(tensor), kept)).map_err(|cause| error::from_engine(&cause))
}

fn operation_from_name(name: &str, root: u32) -> PyResult<Operation> {
    Ok(match name {
        "sum" => Operation::Sum,
        "average" => Operation::Average,
        "min" => Operation::Min,
        "max" => Operation::Max,
        "product" => Operation::Product,
        "broadcast" => Operation::Broadcast(Rank(root)),
        _ => return Err(error::raise("ConfigError", format!("no operation `{name}`"))),
    })
}

/// Starts push_pulls of tensors on the GPU, given as [`push_pull`] wants them, once the framework's
/// stream (a `cudaStream_t`; 0 is the default stream) has passed what is enqueued in it now. Waits
/// for nothing.
#[pyfunction]
pub fn push_pull_gpu(
    py: Python<'_>,
    tensors: Vec<(u32, u64, u64, i64)>,
    stream: usize,
) -> PyResult<Vec<u64>> {
    let worker = engine()?;
    let item = |(tensor, source, target, priority)| GpuPushPull {
        tensor: TensorId(tensor),
        source,
        target,
        priority,
    };
    let started = py.detach(|| {
        let items: Vec<GpuPushPull> = tensors.into_iter().map(item).collect();
        // SAFETY: `byteps` passes addresses of contiguous tensors of the declared size, and holds
        // references to them until their handles are done or the engine is shut down; that users
        // leave them alone meanwhile is what its functions ask for. The stream is the framework's
        // own, of the GPU that it has opened here.
        unsafe { worker.push_pull_gpu(&items, stream) }
    });
    let handles = started.map_err(|cause| error::from_engine(&cause))?;
    Ok(handles.into_iter().map(handle::keep).collect())
}

/// Of a handle that is done: the ranks that have died and are not in all of its result.
#[pyfunction]
pub fn lacking(py: Python<'_>, handle: u64) -> PyResult<Vec<u32>> {
    let (worker, handle) = (engine()?, handle::find(handle)?);
    let lacking = interruptible(py, move || worker.lacking(&handle), |_| ())?;
    let lacking = lacking.map_err(|cause| error::from_engine(&cause))?;
    Ok(lacking.into_iter().map(|rank| rank.0).collect())
}

/// Waits until all results have come for which streams of the GPU wait.
#[pyfunction]
pub fn settle(py: Python<'_>) -> PyResult<()> {
    let worker = engine()?;
    let settled = interruptible(py, move || worker.settle(), |_| ())?;
    settled.map_err(|cause| error::from_engine(&cause))
}

/// Lets what a framework enqueues in its stream from now on come behind the results of these
/// handles, each of which was waited for. Waits for nothing itself.
#[pyfunction]
pub fn stream_wait(py: Python<'_>, handles: Vec<u64>, stream: usize) -> PyResult<()> {
    let handles: Vec<_> = handles.into_iter().map(handle::find).collect::<PyResult<_>>()?;
    py.detach(|| {
        // SAFETY: the stream is the framework's own, of the GPU that it has opened here.
        unsafe { Handle::make_wait(&handles, stream) }
    })
    .map_err(|cause| error::from_engine(&cause))
}

/// Starts push_pulls given as (tensor, source address, target address, priority); returns a handle
/// for each.
///
/// Each address must stay valid for the bytes that its tensor was declared with until its handle is
/// done.
#[pyfunction]
pub fn push_pull(py: Python<'_>, tensors: Vec<(u32, usize, usize, i64)>) -> PyResult<Vec<u64>> {
    let worker = engine()?;
    let started = py.detach(|| {
        let items: Vec<PushPull> = tensors.into_iter().map(in_host).collect();
        // SAFETY: the module `byteps` passes addresses of contiguous tensors of the declared size,
        // and holds references to them until their handles are done or the engine is shut down;
        // that users leave them alone meanwhile is what its functions ask for.
        unsafe { worker.push_pull(&items) }
    });
    let handles = started.map_err(|cause| error::from_engine(&cause))?;
    Ok(handles.into_iter().map(handle::keep).collect())
}

/// Starts push_pulls of these gradients in place, which `tensors` are; on the GPU after what is
/// enqueued in `stream` now, in host memory if that is `None`. The contract is [`push_pull`]'s.
#[pyfunction]
pub fn push_batch(
    py: Python<'_>,
    gradients: &Bound<'_, GradientHooks>,
    indices: Vec<u32>,
    tensors: &Bound<'_, PyList>,
    stream: Option<usize>,
) -> PyResult<Batch> {
    let worker = engine()?;
    let addresses = plain::addresses(tensors)?;
    let tensors = gradients.get().tensors(&indices)?;
    let bytes = tensors.iter().map(|&(_, _, bytes)| bytes).sum();
    let both = || tensors.iter().zip(&addresses);
    let started = py.detach(|| match stream {
        Some(stream) => {
            let item = |(&(tensor, priority, _), &address): (&(u32, i64, usize), &usize)| {
                let (tensor, address) = (TensorId(tensor), address as u64);
                GpuPushPull { tensor, source: address, target: address, priority }
            };
            let items: Vec<GpuPushPull> = both().map(item).collect();
            // SAFETY: `byteps` passes addresses of contiguous tensors of the declared size, and
            // holds references to them until their handles are done or the engine is shut down;
            // that users leave them alone meanwhile is what its functions ask for. The stream is
            // the framework's own, of the GPU that it has opened here.
            unsafe { worker.push_pull_gpu(&items, stream) }
        }
        None => {
            let item = |(&(tensor, priority, _), &address): (&(u32, i64, usize), &usize)| {
                let target = std::ptr::with_exposed_provenance_mut(address);
                PushPull { tensor: TensorId(tensor), source: target, target, priority }
            };
            let items: Vec<PushPull> = both().map(item).collect();
            // SAFETY: `byteps` passes addresses of contiguous tensors of the declared size, and
            // holds references to them until their handles are done or the engine is shut down;
            // that users leave them alone meanwhile is what its functions ask for.
            unsafe { worker.push_pull(&items) }
        }
    });
    let handles = started.map_err(|cause| error::from_engine(&cause))?;
    if let Some(last) = handles.last() {
        gradients.get().handed_over(last, bytes);
    }
    Ok(Batch::new(handles))
}

/// [`stream_wait`] for a batch, or for those at these positions in it.
#[pyfunction]
#[pyo3(signature = (batch, stream, positions = None))]
pub fn stream_wait_batch(
    py: Python<'_>,
    batch: &Bound<'_, Batch>,
    stream: usize,
    positions: Option<Vec<usize>>,
) -> PyResult<()> {
    let all = &batch.get().handles;
    let some: Vec<Handle>;
    let handles = match positions {
        None => all.as_slice(),
        Some(positions) => {
            some = positions.iter().filter_map(|&position| all.get(position).cloned()).collect();
            some.as_slice()
        }
    };
    py.detach(|| {
        // SAFETY: the stream is the framework's own, of the GPU that it has opened here.
        unsafe { Handle::make_wait(handles, stream) }
    })
    .map_err(|cause| error::from_engine(&cause))
}

/// A stream is going to be put behind the results of these, which the host does not read: so waits
/// for the handles may end once what brings the results is enqueued, before they have come.
#[pyfunction]
pub fn enqueue_results(handles: Vec<u64>) -> PyResult<()> {
    let handles: Vec<_> = handles.into_iter().map(handle::find).collect::<PyResult<_>>()?;
    engine()?.enqueue_results(&handles);
    Ok(())
}

/// [`enqueue_results`] for batches, or for those at these positions in them.
#[pyfunction]
pub fn enqueue_results_of_batches(batches: Vec<(Bound<'_, Batch>, Option<usize>)>) -> PyResult<()> {
    let mut handles = Vec::new();
    for (batch, position) in &batches {
        handles.extend_from_slice(batch.get().some(*position)?);
    }
    engine()?.enqueue_results(&handles);
    Ok(())
}

/// Starts push_pulls given as [`push_pull`] wants them, as one batch; on the GPU after what is
/// enqueued in `stream` now, in host memory if that is `None`. The contract is [`push_pull`]'s.
#[pyfunction]
#[pyo3(signature = (tensors, stream = None))]
pub fn start_batch(
    py: Python<'_>,
    tensors: Vec<(u32, usize, usize, i64)>,
    stream: Option<usize>,
) -> PyResult<Batch> {
    let worker = engine()?;
    let started = py.detach(|| match stream {
        Some(stream) => {
            let item = |(tensor, source, target, priority)| GpuPushPull {
                tensor: TensorId(tensor),
                source: source as u64,
                target: target as u64,
                priority,
            };
            let items: Vec<GpuPushPull> = tensors.into_iter().map(item).collect();
            // SAFETY: `byteps` passes addresses of contiguous tensors of the declared size, and
            // holds references to them until their handles are done or the engine is shut down;
            // that users leave them alone meanwhile is what its functions ask for. The stream is
            // the framework's own, of the GPU that it has opened here.
            unsafe { worker.push_pull_gpu(&items, stream) }
        }
        None => {
            let items: Vec<PushPull> = tensors.into_iter().map(in_host).collect();
            // SAFETY: `byteps` passes addresses of contiguous tensors of the declared size, and
            // holds references to them until their handles are done or the engine is shut down;
            // that users leave them alone meanwhile is what its functions ask for.
            unsafe { worker.push_pull(&items) }
        }
    });
    started.map(Batch::new).map_err(|cause| error::from_engine(&cause))
}

fn in_host((tensor, source, target, priority): (u32, usize, usize, i64)) -> PushPull {
    PushPull {
        tensor: TensorId(tensor),
        source: std::ptr::with_exposed_provenance(source),
        target: std::ptr::with_exposed_provenance_mut(target),
        priority,
    }
}
