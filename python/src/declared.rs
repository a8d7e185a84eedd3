//! The numbers of tensors that compiled programs name: Python is asked for each once in a job.
//!
//! Programs run on threads of their framework, which have no interpreter. The lock is held for
//! look-ups only, never while Python runs.

#![forbid(unsafe_code)]

use crate::error;
use bps_worker::TensorId;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// What the ranks must agree on, and who of this process asks.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Declared {
    /// Its name, with the number of the device behind it if that is not 0.
    pub name: String,
    /// `sum`, `average`, `min`, `max`, `product` or `broadcast`.
    pub operation: String,
    /// Who broadcasts.
    pub root: u32,
    /// What the engine calls the type.
    pub dtype: &'static str,
    /// Its dimensions.
    pub shape: Vec<u64>,
    /// How it is encoded, or `none`.
    pub encoding: String,
    /// The ranks that it is for; none where it is for all.
    pub ranks: Vec<u32>,
    /// It is in the memory of the GPU.
    pub device: bool,
    /// For how many slow ranks its rounds do not wait; -1 where the environment says it.
    pub backups: i32,
}

impl Declared {
    /// Its name, and its ranks if it is not for all: names are a set's own.
    pub fn label(&self) -> String {
        if self.ranks.is_empty() {
            self.name.clone()
        } else {
            format!("{} of ranks {:?}", self.name, self.ranks)
        }
    }
}

/// Numbers of tensors, none where the ranks disagree about one, and what they disagree about.
pub type Numbers = (Vec<Option<TensorId>>, Option<String>);

/// Numbers in this job.
static NUMBERS: LazyLock<Mutex<HashMap<Declared, u32>>> = LazyLock::new(Mutex::default);
/// `byteps._registry.declare_for_program`.
static DECLARE: Mutex<Option<Py<PyAny>>> = Mutex::new(None);

fn lock() -> MutexGuard<'static, HashMap<Declared, u32>> {
    NUMBERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on `declare` is asked for the numbers of tensors. It gets a list of (name, type, shape,
/// operation, root, encoding, ranks, on the GPU, backup workers), and returns their numbers, None
/// where the ranks disagree about one, and the error that says so.
#[pyfunction]
pub fn declare_by(declare: Py<PyAny>) {
    let former = DECLARE.lock().unwrap_or_else(PoisonError::into_inner).replace(declare);
    drop(former);
}

/// Numbers of tensors are to be asked for again: they are of another job, or a name stands for
/// something else.
#[pyfunction]
pub fn forget_numbers() {
    lock().clear();
}

/// The numbers of these tensors, in one round trip for all that are new.
///
/// # Errors
/// Why they have none, with the class that Python raises for it.
pub fn numbers(tensors: &[Declared]) -> Result<Numbers, String> {
    {
        let known = lock();
        let numbers = tensors.iter().map(|tensor| known.get(tensor).copied().map(TensorId));
        let numbers: Vec<_> = numbers.collect();
        if numbers.iter().all(Option::is_some) {
            return Ok((numbers, None));
        }
    }
    let asked = Python::try_attach(|py| ask(py, tensors).map_err(|it| error::exception(py, &it)));
    let (numbers, refused) = asked.ok_or("byteps.errors.UsageError: this process is ending")??;
    if numbers.len() != tensors.len() {
        return Err("byteps.errors.UsageError: another number of tensors was declared".into());
    }
    let mut known = lock();
    for (tensor, number) in tensors.iter().zip(&numbers) {
        if let Some(number) = number {
            known.insert(tensor.clone(), *number);
        }
    }
    Ok((numbers.into_iter().map(|number| number.map(TensorId)).collect(), refused))
}

fn ask(py: Python<'_>, tensors: &[Declared]) -> PyResult<(Vec<Option<u32>>, Option<String>)> {
    // The lock is not kept while Python runs: it lets other threads run in between.
    let declare = {
        let known = DECLARE.lock().unwrap_or_else(PoisonError::into_inner);
        known.as_ref().map(|declare| declare.clone_ref(py))
    };
    let declare = declare.ok_or_else(|| error::raise("UsageError", "no module of a framework"))?;
    let said: Vec<_> = tensors
        .iter()
        .map(|tensor| {
            let Declared { name, operation, root, dtype, shape, encoding, ranks, device, backups } =
                tensor;
            (name, dtype, shape, operation, root, encoding, ranks, device, backups)
        })
        .collect();
    let (numbers, refused) =
        declare.call1(py, (said,))?.extract::<(Vec<Option<u32>>, Option<Py<PyAny>>)>(py)?;
    let refused = refused.map(|one| error::exception(py, &PyErr::from_value(one.into_bound(py))));
    Ok((numbers, refused))
}
