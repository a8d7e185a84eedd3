//! What a tensor of torch is, asked through the table of functions that DLPack defines: one call
//! where the attributes of its Python object take six, of 60 ns each.
//!
//! Releases of torch before that table have none; whoever asks goes on by attributes there.

#![allow(unsafe_code)]

use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::NonNull;

/// The major version whose structures these are; tables of others may follow in the same capsule.
const MAJOR: u32 = 1;
const CAPSULE: &CStr = c"dlpack_exchange_api";
const ATTRIBUTE: &str = "__dlpack_c_exchange_api__";
/// Kinds of devices, `DLDeviceType`.
const CPU: i32 = 1;
const CUDA: i32 = 2;

/// `DLPackExchangeAPIHeader`.
#[repr(C)]
struct Header {
    major: u32,
    minor: u32,
    previous: *const Header,
}

/// `DLPackExchangeAPI`. What is not called here has no type.
#[repr(C)]
struct Table {
    header: Header,
    allocate: *const c_void,
    export: *const c_void,
    import: *const c_void,
    describe: Option<unsafe extern "C" fn(*mut ffi::PyObject, *mut Described) -> c_int>,
    current_stream: *const c_void,
}

/// `DLDataType`: two are equal only if the types are.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Kind {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct Described {
    data: *const c_void,
    device_type: i32,
    device: i32,
    dimensions: i32,
    kind: Kind,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// What is known of a dense tensor.
pub struct Dense {
    pub address: usize,
    pub kind: Kind,
    pub bytes: usize,
    pub is_contiguous: bool,
    /// In the memory of the host, or else in that of a GPU of CUDA.
    pub is_on_gpu: bool,
}

struct Exchange {
    /// `torch.Tensor`. Subclasses may be anything.
    of: Py<PyType>,
    table: NonNull<Table>,
}

// SAFETY: DLPack has the table live, and stay as it is, as long as the process; nothing writes it.
// The function in it is called only with the interpreter attached.
unsafe impl Send for Exchange {}
// SAFETY: threads that share it only read a table that nobody writes, and call what is in it with
// the interpreter attached.
unsafe impl Sync for Exchange {}

static EXCHANGE: PyOnceLock<Option<Exchange>> = PyOnceLock::new();

/// What torch says of this tensor; None where it is none that DLPack knows, or torch has no table.
/// A negative view is taken for what it is a view of.
pub fn look(tensor: &Bound<'_, PyAny>) -> Option<Dense> {
    let py = tensor.py();
    let exchange = EXCHANGE.get_or_init(py, || Exchange::of_torch(py).ok().flatten()).as_ref()?;
    if !tensor.get_type().is(&exchange.of) {
        return None;
    }
    exchange.describe(tensor)
}

impl Exchange {
    fn of_torch(py: Python<'_>) -> PyResult<Option<Exchange>> {
        let class = py.import(intern!(py, "torch"))?.getattr(intern!(py, "Tensor"))?;
        let capsule = class.getattr(intern!(py, ATTRIBUTE))?;
        // SAFETY: this checks that it is a capsule of that name, and is null with an error if not.
        let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), CAPSULE.as_ptr()) };
        let mut header: *const Header = pointer.cast();
        if header.is_null() {
            return Err(PyErr::fetch(py));
        }
        // SAFETY: DLPack has each table begin with a header, in all versions, and live as long as
        // the process; the headers form a list that ends with null.
        while unsafe { (*header).major } != MAJOR {
            // SAFETY: the header was just read, and this is the field that all versions have there.
            header = unsafe { (*header).previous };
            if header.is_null() {
                return Ok(None);
            }
        }
        let table = NonNull::new(header.cast::<Table>().cast_mut());
        let of = class.cast_into::<PyType>()?.unbind();
        Ok(table.map(|table| Exchange { of, table }))
    }

    fn describe(&self, tensor: &Bound<'_, PyAny>) -> Option<Dense> {
        // SAFETY: a table of this major version is at least as long as `Table` and never changes.
        let describe = unsafe { self.table.as_ref() }.describe?;
        let mut described = MaybeUninit::<Described>::uninit();
        // SAFETY: the interpreter is attached, the object lives, and is of the very type that the
        // table is of; there is room for the result.
        if unsafe { describe(tensor.as_ptr(), described.as_mut_ptr()) } != 0 {
            // A sparse tensor, for one: whoever asks looks at its attributes.
            drop(PyErr::take(tensor.py()));
            return None;
        }
        // SAFETY: it was filled in, since there was no error. What it points to belongs to the
        // tensor and is read before anything else runs.
        unsafe { described.assume_init_ref().dense() }
    }
}

impl Described {
    /// # Safety
    /// Shape and strides are those of a tensor that lives.
    unsafe fn dense(&self) -> Option<Dense> {
        let is_on_gpu = match self.device_type {
            CPU => false,
            CUDA => true,
            _ => return None,
        };
        let dimensions = usize::try_from(self.dimensions).ok()?;
        let (mut count, mut is_contiguous) = (1_usize, true);
        for dimension in (0..dimensions).rev() {
            // SAFETY: there are `dimensions` of them, says the contract.
            let size = usize::try_from(unsafe { *self.shape.add(dimension) }).ok()?;
            // SAFETY: of strides there are as many, or none at all, when it is contiguous.
            let stride = (!self.strides.is_null()).then(|| unsafe { *self.strides.add(dimension) });
            is_contiguous &=
                size == 1 || stride.is_none_or(|stride| usize::try_from(stride) == Ok(count));
            count = count.checked_mul(size)?;
        }
        let bits = usize::from(self.kind.bits) * usize::from(self.kind.lanes);
        Some(Dense {
            address: self
                .data
                .expose_provenance()
                .checked_add(usize::try_from(self.byte_offset).ok()?)?,
            kind: self.kind,
            bytes: count.checked_mul(bits)? / 8,
            is_contiguous: is_contiguous || count == 0,
            is_on_gpu,
        })
    }
}
