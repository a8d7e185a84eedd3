//! TensorFlow's C interface, as far as [`super`] uses it.
//!
//! Its functions are found by name in the library that Python's TensorFlow has brought into the
//! process, so nothing of TensorFlow's is needed to build this. All its structures are opaque here
//! but one, [`super::done`]'s.

#![allow(unsafe_code)]

use libloading::os::unix::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

/// The name under which every release of TensorFlow 2 loads it.
const LIBRARY: &str = "libtensorflow_framework.so.2";

/// `TF_OK`.
const OK: c_int = 0;
/// `TF_INVALID_ARGUMENT`.
const INVALID_ARGUMENT: c_int = 3;
/// `TF_FAILED_PRECONDITION`. Of the codes that programs pass on as they are, the one that nobody
/// takes for a reason to try again: sessions are made anew after `ABORTED` and `UNAVAILABLE`.
const FAILED_PRECONDITION: c_int = 9;

macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[repr(C)]
        pub struct $name([u8; 0]);
    )*};
}

opaque! {
    /// `TF_Status`.
    RawStatus;
    /// `TF_Tensor`.
    RawTensor;
    /// `TF_OpDefinitionBuilder`.
    OpBuilder;
    /// `TF_KernelBuilder`.
    KernelBuilder;
    /// `TF_OpKernelConstruction`.
    RawConstruction;
    /// `TF_OpKernelContext`.
    RawContext;
    /// `TF_ShapeInferenceContext`.
    ShapeContext;
    /// `TF_ShapeHandle`.
    ShapeHandle;
    /// `TF_AsyncOpKernelDoneCallback`.
    RawDone;
}

/// Makes a kernel for a node of a program.
pub type Create = unsafe extern "C" fn(*mut RawConstruction) -> *mut c_void;
/// Runs a kernel, which ends when the callback is called.
pub type Compute = unsafe extern "C" fn(*mut c_void, *mut RawContext, *mut RawDone);
/// Frees a kernel.
pub type Delete = unsafe extern "C" fn(*mut c_void);
/// Infers the shapes of a node's results.
pub type Infer = unsafe extern "C" fn(*mut ShapeContext, *mut RawStatus);

macro_rules! functions {
    ($($name:ident($($type:ty),* $(,)?) $(-> $result:ty)?;)*) => {
        /// The functions, under their C names.
        #[allow(non_snake_case, reason = "the names are those of the C functions")]
        pub struct Api { $(pub $name: unsafe extern "C" fn($($type),*) $(-> $result)?,)* }

        impl Api {
            fn find(library: &Library) -> Result<Api, &'static str> {
                Ok(Api {
                    // SAFETY: the types are those of TensorFlow's headers kernels.h, ops.h,
                    // tf_status.h and tf_tensor.h, which are the same in 2.15 and in 2.21.
                    $($name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                        .map_err(|_| stringify!($name))?,)*
                })
            }
        }
    };
}

functions! {
    TF_NewStatus() -> *mut RawStatus;
    TF_DeleteStatus(*mut RawStatus);
    TF_SetStatus(*mut RawStatus, c_int, *const c_char);
    TF_GetCode(*const RawStatus) -> c_int;
    TF_Message(*const RawStatus) -> *const c_char;
    TF_NewOpDefinitionBuilder(*const c_char) -> *mut OpBuilder;
    TF_OpDefinitionBuilderAddAttr(*mut OpBuilder, *const c_char);
    TF_OpDefinitionBuilderAddInput(*mut OpBuilder, *const c_char);
    TF_OpDefinitionBuilderAddOutput(*mut OpBuilder, *const c_char);
    TF_OpDefinitionBuilderSetShapeInferenceFunction(*mut OpBuilder, Infer);
    TF_RegisterOpDefinition(*mut OpBuilder, *mut RawStatus);
    TF_NewShapeHandle() -> *mut ShapeHandle;
    TF_DeleteShapeHandle(*mut ShapeHandle);
    TF_ShapeInferenceContextGetInput(*mut ShapeContext, c_int, *mut ShapeHandle, *mut RawStatus);
    TF_ShapeInferenceContextSetOutput(*mut ShapeContext, c_int, *mut ShapeHandle, *mut RawStatus);
    TF_ShapeInferenceContextSetUnknownShape(*mut ShapeContext, *mut RawStatus);
    TF_NewAsyncKernelBuilder(*const c_char, *const c_char, Create, Compute, Delete)
        -> *mut KernelBuilder;
    TF_RegisterKernelBuilder(*const c_char, *mut KernelBuilder, *mut RawStatus);
    TF_OpKernelConstruction_GetAttrSize(
        *mut RawConstruction, *const c_char, *mut i32, *mut i32, *mut RawStatus,
    );
    TF_OpKernelConstruction_GetAttrString(
        *mut RawConstruction, *const c_char, *mut u8, usize, *mut RawStatus,
    );
    TF_OpKernelConstruction_GetAttrStringList(
        *mut RawConstruction, *const c_char, *mut *const u8, *mut usize, c_int, *mut u8, usize,
        *mut RawStatus,
    );
    TF_OpKernelConstruction_GetAttrInt64(
        *mut RawConstruction, *const c_char, *mut i64, *mut RawStatus,
    );
    TF_OpKernelConstruction_GetAttrInt64List(
        *mut RawConstruction, *const c_char, *mut i64, c_int, *mut RawStatus,
    );
    TF_OpKernelConstruction_Failure(*mut RawConstruction, *mut RawStatus);
    TF_NumOutputs(*mut RawContext) -> c_int;
    TF_GetInput(*mut RawContext, c_int, *mut *mut RawTensor, *mut RawStatus);
    TF_ForwardInputOrAllocateOutput(
        *mut RawContext, *const c_int, c_int, c_int, *const i64, c_int, *mut c_int, *mut RawStatus,
    ) -> *mut RawTensor;
    TF_OpKernelContext_Failure(*mut RawContext, *mut RawStatus);
    TF_RunAsyncOpKernelDoneCallback(*mut RawDone);
    TF_TensorType(*const RawTensor) -> c_int;
    TF_NumDims(*const RawTensor) -> c_int;
    TF_Dim(*const RawTensor, c_int) -> i64;
    TF_TensorData(*const RawTensor) -> *mut u8;
    TF_TensorByteSize(*const RawTensor) -> usize;
    TF_DeleteTensor(*mut RawTensor);
}

static API: OnceLock<Api> = OnceLock::new();

/// Finds the functions in the TensorFlow of this process.
///
/// # Errors
/// What is missing, for people.
pub fn load() -> Result<&'static Api, String> {
    if let Some(api) = API.get() {
        return Ok(api);
    }
    // SAFETY: the library is only found, not loaded anew, so none of its initialisers run.
    let library = unsafe { Library::open(Some(LIBRARY), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    let library = library
        .map_err(|_| format!("TensorFlow has not loaded {LIBRARY}: import tensorflow before"))?;
    let api = Api::find(&library).map_err(|name| {
        format!(
            "{LIBRARY} has no function {name}, so this TensorFlow is of a release that is not \
             known here: install tensorflow 2.15 to 2.21, or a later byteps"
        )
    })?;
    // Python never unloads TensorFlow, and neither may we: the functions are called for ever.
    std::mem::forget(library);
    Ok(API.get_or_init(|| api))
}

/// The functions. Kernels run only where they were found.
pub fn api() -> &'static Api {
    API.get().expect("kernels are registered with the functions that were found")
}

/// How a call of TensorFlow's went.
pub struct Status(*mut RawStatus);

impl Status {
    /// One that has not failed.
    pub fn new() -> Status {
        // SAFETY: it takes nothing.
        Status(unsafe { (api().TF_NewStatus)() })
    }

    fn of(code: c_int, text: &str) -> Status {
        let text = c_text(text);
        let status = Status::new();
        // SAFETY: the status is ours, and the text is copied.
        unsafe { (api().TF_SetStatus)(status.0, code, text.as_ptr()) };
        status
    }

    /// For a call that wants one.
    pub fn raw(&self) -> *mut RawStatus {
        self.0
    }

    /// What went wrong, if anything did.
    ///
    /// # Errors
    /// TensorFlow's words.
    pub fn result(&self) -> Result<(), String> {
        // SAFETY: the status is ours; its text stays as long as it is not written.
        unsafe {
            if (api().TF_GetCode)(self.0) == OK {
                return Ok(());
            }
            Err(CStr::from_ptr((api().TF_Message)(self.0)).to_string_lossy().into_owned())
        }
    }
}

impl Drop for Status {
    fn drop(&mut self) {
        // SAFETY: it is ours, and nobody keeps it: TensorFlow copies what it is given.
        unsafe { (api().TF_DeleteStatus)(self.0) };
    }
}

/// A text for C, without the zeros that would end it early.
pub fn c_text(text: &str) -> CString {
    let bytes: Vec<u8> = text.bytes().filter(|&byte| byte != 0).collect();
    CString::new(bytes).unwrap_or_default()
}

/// A node of a program, while its kernel is made.
pub struct Construction(*mut RawConstruction);

impl Construction {
    /// The node that TensorFlow makes a kernel for.
    ///
    /// # Safety
    /// `raw` is what TensorFlow has passed to a [`Create`] that has not returned.
    pub unsafe fn new(raw: *mut RawConstruction) -> Construction {
        Construction(raw)
    }

    /// How many elements a list has, and the bytes of a text, or of all texts of a list.
    fn size(&self, name: &CStr) -> Result<(usize, usize), String> {
        let (mut count, mut bytes, status) = (0, 0, Status::new());
        let ask = api().TF_OpKernelConstruction_GetAttrSize;
        // SAFETY: the node is being constructed; TensorFlow writes two numbers.
        unsafe { ask(self.0, name.as_ptr(), &raw mut count, &raw mut bytes, status.raw()) };
        status.result()?;
        // Both are -1 where they have no meaning.
        Ok((usize::try_from(count).unwrap_or(0), usize::try_from(bytes).unwrap_or(0)))
    }

    /// An attribute that is a text.
    ///
    /// # Errors
    /// There is none, in TensorFlow's words.
    pub fn text(&self, name: &CStr) -> Result<String, String> {
        let mut text = vec![0; self.size(name)?.1];
        let (status, ask) = (Status::new(), api().TF_OpKernelConstruction_GetAttrString);
        // SAFETY: the node is being constructed; TensorFlow writes at most as many bytes as it is
        // told that there are.
        unsafe { ask(self.0, name.as_ptr(), text.as_mut_ptr(), text.len(), status.raw()) };
        status.result()?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// An attribute that is a list of texts.
    ///
    /// # Errors
    /// There is none, in TensorFlow's words.
    pub fn texts(&self, name: &CStr) -> Result<Vec<String>, String> {
        let (count, bytes) = self.size(name)?;
        let (mut starts, mut lengths) = (vec![ptr::null(); count], vec![0; count]);
        let mut storage = vec![0; bytes];
        let (status, ask) = (Status::new(), api().TF_OpKernelConstruction_GetAttrStringList);
        // SAFETY: the node is being constructed; TensorFlow writes as many starts and lengths, and
        // bytes, as it is told that there is room for.
        unsafe {
            ask(
                self.0,
                name.as_ptr(),
                starts.as_mut_ptr(),
                lengths.as_mut_ptr(),
                c_int::try_from(count).unwrap_or(0),
                storage.as_mut_ptr(),
                bytes,
                status.raw(),
            );
        }
        status.result()?;
        // The texts lie behind each other in the storage.
        let mut rest = storage.as_slice();
        let texts = lengths.iter().map(|&length| {
            let (text, after) = rest.split_at(length.min(rest.len()));
            rest = after;
            String::from_utf8_lossy(text).into_owned()
        });
        Ok(texts.collect())
    }

    /// An attribute that is a number.
    ///
    /// # Errors
    /// There is none, in TensorFlow's words.
    pub fn number(&self, name: &CStr) -> Result<i64, String> {
        let mut number = 0;
        let (status, ask) = (Status::new(), api().TF_OpKernelConstruction_GetAttrInt64);
        // SAFETY: the node is being constructed; TensorFlow writes a number.
        unsafe { ask(self.0, name.as_ptr(), &raw mut number, status.raw()) };
        status.result()?;
        Ok(number)
    }

    /// An attribute that is a list of numbers.
    ///
    /// # Errors
    /// There is none, in TensorFlow's words.
    pub fn numbers(&self, name: &CStr) -> Result<Vec<i64>, String> {
        let mut numbers = vec![0; self.size(name)?.0];
        let room = c_int::try_from(numbers.len()).unwrap_or(0);
        let (status, ask) = (Status::new(), api().TF_OpKernelConstruction_GetAttrInt64List);
        // SAFETY: the node is being constructed; TensorFlow writes at most as many numbers as it
        // is told that there is room for.
        unsafe { ask(self.0, name.as_ptr(), numbers.as_mut_ptr(), room, status.raw()) };
        status.result()?;
        Ok(numbers)
    }

    /// No kernel can be made.
    pub fn fail(&self, text: &str) {
        let status = Status::of(INVALID_ARGUMENT, text);
        // SAFETY: the node is being constructed; TensorFlow copies the status.
        unsafe { (api().TF_OpKernelConstruction_Failure)(self.0, status.raw()) };
    }
}

/// A run of a kernel, until its callback is called.
pub struct Context(*mut RawContext);

// SAFETY: TensorFlow keeps the context until the callback is called, from whatever thread, and no
// two threads have this one.
unsafe impl Send for Context {}

impl Context {
    /// The run that TensorFlow has begun.
    ///
    /// # Safety
    /// `raw` is what TensorFlow has passed to a [`Compute`], whose callback is called only when
    /// this is used no more.
    pub unsafe fn new(raw: *mut RawContext) -> Context {
        Context(raw)
    }

    /// How many results there are.
    pub fn outputs(&self) -> c_int {
        // SAFETY: the run has not ended.
        unsafe { (api().TF_NumOutputs)(self.0) }
    }

    /// An argument.
    ///
    /// # Errors
    /// TensorFlow's words.
    pub fn input(&self, index: c_int) -> Result<TensorShare, String> {
        let (mut tensor, status) = (ptr::null_mut(), Status::new());
        // SAFETY: the run has not ended; TensorFlow writes a pointer, and what it points to is
        // ours.
        unsafe { (api().TF_GetInput)(self.0, index, &raw mut tensor, status.raw()) };
        status.result()?;
        Ok(TensorShare(tensor))
    }

    /// The result of this number, of the shape of the argument of this number: in the memory of
    /// that if nobody else needs it, which is also told.
    ///
    /// # Errors
    /// TensorFlow's words: there is no memory, say.
    pub fn output(&self, index: c_int, dimensions: &[i64]) -> Result<(TensorShare, bool), String> {
        let (candidates, mut forwarded, status) = ([index], -1, Status::new());
        let rank = c_int::try_from(dimensions.len()).unwrap_or(0);
        // SAFETY: the run has not ended; TensorFlow reads one candidate and as many dimensions as
        // it is told, and writes a number; what it returns is ours.
        let tensor = unsafe {
            (api().TF_ForwardInputOrAllocateOutput)(
                self.0,
                candidates.as_ptr(),
                1,
                index,
                dimensions.as_ptr(),
                rank,
                &raw mut forwarded,
                status.raw(),
            )
        };
        status.result()?;
        Ok((TensorShare(tensor), forwarded >= 0))
    }

    /// The run has failed. Its callback is still to be called.
    pub fn fail(&self, text: &str) {
        let status = Status::of(FAILED_PRECONDITION, text);
        // SAFETY: the run has not ended; TensorFlow copies the status.
        unsafe { (api().TF_OpKernelContext_Failure)(self.0, status.raw()) };
    }
}

/// A share in a tensor's memory, which stays as long as this does.
pub struct TensorShare(*mut RawTensor);

// SAFETY: TensorFlow counts shares atomically, and no two threads have this one.
unsafe impl Send for TensorShare {}

impl TensorShare {
    /// TensorFlow's number of its type.
    pub fn dtype(&self) -> c_int {
        // SAFETY: the share is ours.
        unsafe { (api().TF_TensorType)(self.0) }
    }

    /// Its dimensions.
    pub fn dimensions(&self) -> Vec<i64> {
        // SAFETY: the share is ours, and there are as many dimensions as it has.
        let dimension = |index| unsafe { (api().TF_Dim)(self.0, index) };
        // SAFETY: the share is ours.
        (0..unsafe { (api().TF_NumDims)(self.0) }).map(dimension).collect()
    }

    /// Where its elements are, in row-major order.
    pub fn data(&self) -> *mut u8 {
        // SAFETY: the share is ours.
        unsafe { (api().TF_TensorData)(self.0) }
    }

    /// How large that is.
    pub fn bytes(&self) -> usize {
        // SAFETY: the share is ours.
        unsafe { (api().TF_TensorByteSize)(self.0) }
    }
}

impl Drop for TensorShare {
    fn drop(&mut self) {
        // SAFETY: the share is ours, and is given back once.
        unsafe { (api().TF_DeleteTensor)(self.0) };
    }
}
