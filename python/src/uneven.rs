//! A rank that has run out of data: it joins, and is told what to push for the others' sake.

#![forbid(unsafe_code)]

use crate::context::engine;
use crate::declared::Declared;
use crate::error;
use crate::waiting::seconds;
use bps_engine::base::Operation;
use bps_engine::proto::uneven::Followed;
use bps_worker::{Follow, TensorId, Worker};
use pyo3::prelude::*;
use std::time::Duration;

/// What `declare` takes but for a store, and how often it is to be pushed in all.
type Told = (
    String,
    String,
    Vec<u64>,
    String,
    u32,
    bool,
    Option<Vec<u32>>,
    Option<String>,
    Option<u32>,
    u64,
);

/// What a rank that has joined is told.
#[derive(IntoPyObject)]
pub enum Next {
    /// Push these.
    Pushes(Vec<Told>),
    /// All have joined, this rank last.
    Last(u32),
}

/// Says that this rank has no more data.
#[pyfunction]
pub fn join(py: Python<'_>) -> PyResult<()> {
    let worker = engine()?;
    py.detach(|| worker.join()).map_err(|cause| error::from_engine(&cause))
}

/// What this rank, which has joined, is told next: a list of tensors, the rank that joined last, or
/// `None` after `timeout` seconds. Other Python threads run meanwhile; signals wait for its end.
#[pyfunction]
pub fn follow(py: Python<'_>, timeout: f64) -> PyResult<Option<Next>> {
    let timeout = seconds(Some(timeout))?.unwrap_or(Duration::ZERO);
    let worker = engine()?;
    let next = py.detach(|| worker.follow(timeout)).map_err(|cause| error::from_engine(&cause))?;
    Ok(next.map(|next| match next {
        Follow::Pushes(tensors) => Next::Pushes(tensors.into_iter().map(told).collect()),
        Follow::AllJoined(last) => Next::Last(last.0),
    }))
}

fn told(followed: Followed) -> Told {
    let Followed { said, pushes, .. } = followed;
    let (operation, root) = match said.operation {
        Operation::Sum => ("sum", 0),
        Operation::Average => ("average", 0),
        Operation::Min => ("min", 0),
        Operation::Max => ("max", 0),
        Operation::Product => ("product", 0),
        Operation::Broadcast(root) => ("broadcast", root.0),
    };
    let listed = || said.members.listed().iter().map(|rank| rank.0).collect();
    (
        said.name.clone(),
        said.dtype.name().to_owned(),
        said.shape.into(),
        operation.to_owned(),
        root,
        said.device,
        (!said.members.is_all()).then(listed),
        said.encoding.map(|encoding| encoding.to_string()),
        said.receiver.map(|receiver| receiver.0),
        pushes,
    )
}

/// How often this rank has pushed a tensor.
#[pyfunction]
pub fn pushes(tensor: u32) -> PyResult<u64> {
    Ok(engine()?.pushes(TensorId(tensor)))
}

/// How often the root of a broadcast that is over had pushed it when it joined; `None` if it has
/// not joined.
#[pyfunction]
pub fn root_joined_after(py: Python<'_>, tensor: u32) -> PyResult<Option<u64>> {
    let worker = engine()?;
    py.detach(|| worker.root_joined_after(TensorId(tensor)))
        .map_err(|cause| error::from_engine(&cause))
}

/// A broadcast of a program from another rank, which may have joined before it had sent anything.
pub struct FromRoot {
    worker: Worker,
    tensor: TensorId,
    name: String,
    root: u32,
    round: u64,
}

impl FromRoot {
    /// Of a tensor that was just pushed; `None` where nothing is missing without the root.
    pub fn of(worker: &Worker, tensor: &Declared, number: TensorId) -> Option<FromRoot> {
        let is_empty = tensor.shape.contains(&0);
        if tensor.operation != "broadcast" || tensor.root == worker.rank() || is_empty {
            return None;
        }
        let (name, root, round) = (tensor.label(), tensor.root, worker.pushes(number));
        Some(FromRoot { worker: worker.clone(), tensor: number, name, root, round })
    }

    /// To be asked when it is over.
    ///
    /// # Errors
    /// The root sent nothing, with the class that Python raises for it.
    pub fn check(&self) -> Result<(), String> {
        let FromRoot { worker, tensor, name, root, round } = self;
        let joined = worker.root_joined_after(*tensor).map_err(|cause| error::of_engine(&cause))?;
        if joined.is_none_or(|pushes| *round <= pushes) {
            return Ok(());
        }
        Err(format!(
            "byteps.errors.UsageError: '{name}' is broadcast from rank {root}, which has called \
             join() and sends nothing more: broadcast from a rank that has data, or after all \
             ranks have joined"
        ))
    }
}
