//! The callback by which a kernel ends later: moved out of TensorFlow's call of the kernel.
//!
//! TensorFlow passes the address of an argument of its own, a `std::function<void()>` of libstdc++,
//! which is gone when the kernel has returned: who calls it then calls into freed memory. So its
//! content is moved to where it stays, as the move constructor of libstdc++ does: the words are
//! copied, and the original is left empty. They are what libstdc++'s ABI fixes, the same since GCC
//! 4; that they are what they should be is looked at before they are used.

#![allow(unsafe_code)]

use super::api::{RawDone, api};
use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::OnceLock;

/// What the manager is asked for: `std::_Manager_operation::__destroy_functor`.
const DESTROY: c_int = 3;

type Manager = unsafe extern "C" fn(*mut [usize; 2], *const [usize; 2], c_int) -> bool;

/// `std::function<void()>` of libstdc++.
#[repr(C)]
struct Function {
    functor: [usize; 2],
    /// Copies and destroys the functor; none in a function that is empty.
    manager: Option<Manager>,
    /// Calls it.
    invoker: Option<unsafe extern "C" fn(*const [usize; 2])>,
}

const _: () = assert!(size_of::<Function>() == 4 * size_of::<usize>());

/// A callback that was moved out of TensorFlow's call; to be called once, from any thread.
pub struct Done(Box<Function>);

// SAFETY: TensorFlow lets kernels call it from any thread, and this is the only one who has it.
unsafe impl Send for Done {}

impl Done {
    /// Moves the callback out. The caller must return without calling the original then.
    ///
    /// # Safety
    /// `raw` is what TensorFlow has passed to a kernel that has neither returned nor called it.
    ///
    /// # Errors
    /// It is not in the form that is known here, and was left as it is: the original is to be
    /// called.
    pub unsafe fn take(raw: *mut RawDone) -> Result<Done, &'static str> {
        const UNKNOWN: &str = "byteps.errors.ConfigError: this TensorFlow passes callbacks to its \
            kernels in a form that is not known here: install tensorflow 2.15 to 2.21 from PyPI, \
            or a later byteps";
        // SAFETY: it points to a function object of C++, which is at least as large as this in all
        // of its implementations, on the stack of TensorFlow's call, which waits for us.
        let function = unsafe { &mut *raw.cast::<Function>() };
        let (Some(manager), Some(invoker)) = (function.manager, function.invoker) else {
            return Err(UNKNOWN);
        };
        static IS_KNOWN: OnceLock<bool> = OnceLock::new();
        let is_known = || is_code(manager as *const c_void) && is_code(invoker as *const c_void);
        if !IS_KNOWN.get_or_init(is_known) {
            return Err(UNKNOWN);
        }
        let functor = function.functor;
        (function.manager, function.invoker) = (None, None);
        let moved = Function { functor, manager: Some(manager), invoker: Some(invoker) };
        Ok(Done(Box::new(moved)))
    }

    /// Tells TensorFlow that the kernel is done. It may go on with its program on this thread: no
    /// lock may be held.
    pub fn run(mut self) {
        // SAFETY: it is a function object that is not empty, which TensorFlow only calls.
        unsafe { (api().TF_RunAsyncOpKernelDoneCallback)((&raw mut *self.0).cast()) };
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        if let Some(manager) = self.0.manager.take() {
            let functor = &raw mut self.0.functor;
            // SAFETY: this is what libstdc++ does in the destructor: the functor is destroyed
            // once, since the original was left empty.
            unsafe { manager(functor, functor, DESTROY) };
        }
    }
}

/// Whether this is an address in one of TensorFlow's libraries.
fn is_code(address: *const c_void) -> bool {
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: it reads the linker's own tables, whatever the address is, and writes where it is
    // told; zeros, which stay where it finds nothing, are what the structure may have.
    let found = unsafe {
        libc::dladdr(address, found.as_mut_ptr());
        found.assume_init()
    };
    if found.dli_fname.is_null() {
        return false;
    }
    // SAFETY: the linker's names of libraries that are loaded are texts that stay.
    let name = unsafe { CStr::from_ptr(found.dli_fname) };
    name.to_string_lossy().contains("tensorflow")
}
