//! Where pointers cross: a tensor's address, as Python knows it, becomes what the engine reads and
//! writes.
//!
//! Python keeps each tensor alive, and at its address, until its handle is done; that is the whole
//! contract.

#![allow(unsafe_code)]

use crate::context::{engine, interruptible};
use crate::{error, handle};
use bps_engine::base::{DType, Operation, Rank};
use bps_worker::{Declaration, PushPull, TensorId};
use pyo3::prelude::*;

/// Numbers for tensors given as (name, data type, elements, operation, root, device). `operation`
/// is `sum`, `average` or `broadcast`, `root` counts for the last alone, and `device` says that the
/// tensor is on a GPU. One round trip for all of them.
#[pyfunction]
pub fn declare(
    py: Python<'_>,
    tensors: Vec<(String, String, u64, String, u32, bool)>,
) -> PyResult<Vec<u32>> {
    let worker = engine()?;
    let declarations = tensors
        .into_iter()
        .map(|(name, dtype, count, operation, root, device)| {
            Ok(Declaration {
                dtype: DType::from_name(&dtype).ok_or_else(|| {
                    error::raise("TensorError", format!("tensor `{name}`: no data type `{dtype}`"))
                })?,
                operation: operation_from_name(&operation, root)?,
                name,
                count,
                device,
            })
        })
        .collect::<PyResult<Vec<_>>>()?;
    interruptible(py, move || worker.declare(&declarations), |_| ())?
        .map(|tensors| tensors.into_iter().map(|tensor| tensor.0).collect())
        .map_err(|cause| error::from_engine(&cause))
}

/// Makes a GPU ready for the tensors that are declared to be on it.
#[pyfunction]
pub fn open_gpu(ordinal: u32) -> PyResult<()> {
    Err(error::raise(
        "ConfigError",
        format!("cuda:{ordinal}: GPU support is not built in yet: send tensor.cpu()"),
    ))
}

fn operation_from_name(name: &str, root: u32) -> PyResult<Operation> {
    Ok(match name {
        "sum" => Operation::Sum,
        "average" => Operation::Average,
        "broadcast" => Operation::Broadcast(Rank(root)),
        _ => return Err(error::raise("ConfigError", format!("no operation `{name}`"))),
    })
}

/// Starts push_pulls given as (tensor, source address, target address, priority); returns a handle
/// for each.
///
/// Each address must stay valid for the bytes that its tensor was declared with until its handle is
/// done.
#[pyfunction]
pub fn push_pull(py: Python<'_>, tensors: Vec<(u32, usize, usize, i64)>) -> PyResult<Vec<u64>> {
    let worker = engine()?;
    let item = |(tensor, source, target, priority)| PushPull {
        tensor: TensorId(tensor),
        source: std::ptr::with_exposed_provenance(source),
        target: std::ptr::with_exposed_provenance_mut(target),
        priority,
    };
    let started = py.detach(|| {
        let items: Vec<PushPull> = tensors.into_iter().map(item).collect();
        // SAFETY: the module `byteps` passes addresses of contiguous tensors of the declared size,
        // and holds references to them until their handles are done or the engine is shut down;
        // that users leave them alone meanwhile is what its functions ask for.
        unsafe { worker.push_pull(&items) }
    });
    let handles = started.map_err(|cause| error::from_engine(&cause))?;
    Ok(handles.into_iter().map(handle::keep).collect())
}
