//! What functions of C give back through pointers.

use crate::device::INVALID_VALUE;
use std::ffi::{c_char, c_int};

/// Writes what a function returns through a pointer.
pub fn put<T>(at: *mut T, value: T) -> Result<(), u32> {
    if at.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, so the caller of the C function has room for the value there.
    unsafe { at.write(value) };
    Ok(())
}

/// Writes a C string into a buffer of `length` bytes.
pub fn put_text(at: *mut c_char, length: c_int, text: &str) -> Result<(), u32> {
    let length = usize::try_from(length).map_err(|_| INVALID_VALUE)?;
    if at.is_null() || text.len() >= length {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller of the C function has `length` bytes there, which is more than the text.
    let buffer = unsafe { std::slice::from_raw_parts_mut(at.cast::<u8>(), length) };
    buffer[..text.len()].copy_from_slice(text.as_bytes());
    buffer[text.len()] = 0;
    Ok(())
}
