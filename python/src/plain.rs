//! Many of torch's tensors asked in one call, since a backward pass waits for the answers.

#![forbid(unsafe_code)]

use crate::dlpack::{self, Kind};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;

/// What a gradient is if it can be sent from its own memory, as it was declared.
#[pyclass(frozen)]
pub struct Plain {
    /// `torch.float32`, for one: an object of which there is one of each kind.
    dtype: Py<PyAny>,
    /// `torch.strided`.
    layout: Py<PyAny>,
    bytes: usize,
    #[pyo3(get)]
    is_on_gpu: bool,
    /// What DLPack calls the type, where it can be asked.
    kind: Option<Kind>,
}

#[pymethods]
impl Plain {
    /// Of gradients with the type of the tensor `like`, this `layout` and so many `bytes`, in
    /// contiguous memory. Raises what torch does for something that has no type.
    #[new]
    fn new(
        like: &Bound<'_, PyAny>,
        layout: Py<PyAny>,
        bytes: usize,
        is_on_gpu: bool,
    ) -> PyResult<Plain> {
        let dtype = like.getattr(intern!(like.py(), "dtype"))?.unbind();
        let kind = dlpack::look(like).map(|dense| dense.kind);
        Ok(Plain { dtype, layout, bytes, is_on_gpu, kind })
    }
}

impl Plain {
    fn is_like(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let is_negative = || -> PyResult<bool> {
            tensor.call_method0(intern!(tensor.py(), "is_neg"))?.is_truthy()
        };
        let is_dense = match dlpack::look(tensor) {
            Some(dense) if self.kind.is_some() => {
                self.kind == Some(dense.kind)
                    && dense.bytes == self.bytes
                    && dense.is_contiguous
                    && dense.is_on_gpu == self.is_on_gpu
            }
            _ => self.has_attributes_of(tensor)?,
        };
        Ok(is_dense && !is_negative()?)
    }

    fn has_attributes_of(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = tensor.py();
        Ok(tensor.getattr(intern!(py, "dtype"))?.is(&self.dtype)
            && tensor.getattr(intern!(py, "layout"))?.is(&self.layout)
            && tensor.getattr(intern!(py, "nbytes"))?.extract::<usize>()? == self.bytes
            && tensor.call_method0(intern!(py, "is_contiguous"))?.is_truthy()?
            && tensor.getattr(intern!(py, "is_cuda"))?.is_truthy()? == self.is_on_gpu)
    }
}

/// Whether each of the tensors is what stands of it in `plain`, at its place in `indices`.
#[pyfunction]
pub fn are_plain(
    indices: Vec<usize>,
    tensors: &Bound<'_, PyList>,
    plain: &Bound<'_, PyList>,
) -> PyResult<bool> {
    for (index, tensor) in indices.into_iter().zip(tensors) {
        if !plain.get_item(index)?.cast::<Plain>()?.get().is_like(&tensor)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Where the data of each of the tensors begins.
pub fn addresses(tensors: &Bound<'_, PyList>) -> PyResult<Vec<usize>> {
    let name = intern!(tensors.py(), "data_ptr");
    let address = |tensor: Bound<'_, PyAny>| match dlpack::look(&tensor) {
        Some(dense) => Ok(dense.address),
        None => tensor.call_method0(name)?.extract(),
    };
    tensors.iter().map(address).collect()
}

/// How often each of the tensors has been changed, as autograd counts it.
pub fn versions(tensors: &Bound<'_, PyList>) -> PyResult<Vec<u64>> {
    let name = intern!(tensors.py(), "_version");
    tensors.iter().map(|tensor| tensor.getattr(name)?.extract()).collect()
}

/// The indices of tensors that were changed since they had these versions, or are no longer the
/// gradients of their parameters, which are at `indices` among `params`.
pub fn changed(
    tensors: &Bound<'_, PyList>,
    versions: &[u64],
    indices: &[usize],
    params: &Bound<'_, PyList>,
) -> PyResult<Vec<usize>> {
    let py = tensors.py();
    let mut changed = Vec::new();
    for (tensor, (&version, &index)) in tensors.iter().zip(versions.iter().zip(indices)) {
        let now: u64 = tensor.getattr(intern!(py, "_version"))?.extract()?;
        let gradient = params.get_item(index)?.getattr(intern!(py, "grad"))?;
        if now != version || !gradient.is(&tensor) {
            changed.push(index);
        }
    }
    Ok(changed)
}
