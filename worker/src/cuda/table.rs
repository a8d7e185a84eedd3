//! Tables of C functions from libraries that are opened at run time.
//!
//! cudarc has such functions too, but they panic where a library or a symbol is missing, and
//! return their codes as Rust enums, for which a code of a newer library would be undefined
//! behaviour. So it is asked for what it knows better, the types: it was generated from NVIDIA's
//! headers, and the compiler compares each signature written here with it.

use super::GpuError;
use libloading::Library;
use std::error::Error;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::NonNull;

/// A table of functions, each of which returns a code. Functions under `checked` have exactly the
/// arguments that cudarc's function of that name has; those under `unchecked` differ in codes that
/// are passed as numbers, or return text. `sys` must be cudarc's module of the library.
macro_rules! table {
    (
        $(#[$doc:meta])*
        struct $table:ident returns $result:ident;
        checked { $($name:ident($($type:ty),* $(,)?);)* }
        unchecked { $($other:ident: fn($($arg:ty),* $(,)?) -> $out:ty;)* }
    ) => {
        $(#[$doc])*
        #[allow(non_snake_case, reason = "the names are those of the C functions")]
        pub(crate) struct $table {
            $(pub(crate) $name: unsafe extern "C" fn($($type),*) -> std::ffi::c_uint,)*
            $(pub(crate) $other: unsafe extern "C" fn($($arg),*) -> $out,)*
        }

        $(const _: unsafe fn($($type),*) -> sys::$result = sys::$name;)*

        impl $table {
            /// Finds every function of the table in the library, which is called `path` in errors.
            pub(crate) fn fill(
                library: &dyn crate::cuda::table::Symbols,
                path: &str,
            ) -> Result<$table, crate::cuda::GpuError> {
                Ok($table {
                    // SAFETY: the types are those of the header, which the compiler has compared
                    // with cudarc's.
                    $($name: unsafe {
                        crate::cuda::table::symbol(library, path, stringify!($name))?
                    },)*
                    // SAFETY: the types are those of the header, but for enums, which C passes as
                    // the numbers that they are here.
                    $($other: unsafe {
                        crate::cuda::table::symbol(library, path, stringify!($other))?
                    },)*
                })
            }
        }
    };
}
pub(crate) use table;

/// Where functions are found by name: a library, or a test's stand-in for one.
pub(crate) trait Symbols {
    /// The function's address, if there is one of this name.
    fn find(&self, name: &'static str) -> Option<NonNull<c_void>>;
}

impl Symbols for Library {
    fn find(&self, name: &'static str) -> Option<NonNull<c_void>> {
        // SAFETY: an address is taken, of whatever type; who calls it vouches for the type.
        let found = unsafe { self.get::<*mut c_void>(name) };
        found.ok().and_then(|symbol| NonNull::new(*symbol))
    }
}

/// A function of a library.
///
/// # Safety
/// `F` is the function's type. The library is never closed while the result is in use.
pub(crate) unsafe fn symbol<F: Copy>(
    library: &dyn Symbols,
    path: &str,
    name: &'static str,
) -> Result<F, GpuError> {
    const { assert!(size_of::<F>() == size_of::<NonNull<c_void>>(), "functions are addresses") };
    match library.find(name) {
        // SAFETY: the caller vouches for the type, a function pointer, which is an address that is
        // not null, as this is.
        Some(found) => Ok(unsafe { std::mem::transmute_copy(&found) }),
        None => Err(GpuError::NoFunction { library: path.to_owned(), symbol: name }),
    }
}

/// What the dynamic linker says; libloading keeps it behind its own words.
pub(crate) fn why(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// A C string of a library as text; empty where it gives none.
///
/// # Safety
/// `text` is null or points to a C string that stays as it is during the call.
pub(crate) unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: it is not null, and the caller vouches for the rest.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
