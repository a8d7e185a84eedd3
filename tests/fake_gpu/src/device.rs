//! Devices and their primary contexts, and which context each thread has.

use crate::settings::settings;
use std::cell::RefCell;
use std::sync::atomic::{AtomicI32, Ordering};

pub const INVALID_VALUE: u32 = 1;
pub const NO_DEVICE: u32 = 100;
pub const INVALID_DEVICE: u32 = 101;
pub const INVALID_CONTEXT: u32 = 201;
pub const INVALID_HANDLE: u32 = 400;
pub const CONTEXT_IS_DESTROYED: u32 = 709;

/// GPUs of the fake machine at most.
const DEVICES_MAX: usize = 64;
/// Handles of contexts are these numbers, plus the device.
const CONTEXT: usize = 0xc0de_0000;

/// How often each primary context is held.
static HELD: [AtomicI32; DEVICES_MAX] = [const { AtomicI32::new(0) }; DEVICES_MAX];

thread_local! {
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// A device's number on the machine, from its number in this process.
pub fn physical(device: i32) -> Result<u32, u32> {
    let visible = &settings().visible;
    let index = usize::try_from(device).map_err(|_| INVALID_DEVICE)?;
    visible.get(index).copied().ok_or(INVALID_DEVICE)
}

pub fn retain(device: i32) -> Result<usize, u32> {
    physical(device)?;
    HELD[device as usize].fetch_add(1, Ordering::Relaxed);
    Ok(CONTEXT + device as usize)
}

pub fn release(device: i32) -> Result<(), u32> {
    physical(device)?;
    let before = HELD[device as usize].fetch_sub(1, Ordering::Relaxed);
    if before > 0 {
        return Ok(());
    }
    HELD[device as usize].fetch_add(1, Ordering::Relaxed);
    Err(INVALID_CONTEXT)
}

fn check(context: usize) -> Result<u32, u32> {
    let device = context.checked_sub(CONTEXT).filter(|&d| d < settings().visible.len());
    let device = device.ok_or(INVALID_CONTEXT)?;
    if HELD[device].load(Ordering::Relaxed) == 0 {
        return Err(CONTEXT_IS_DESTROYED);
    }
    Ok(device as u32)
}

/// Puts this context in the place of the thread's own; 0 leaves the thread without that one.
pub fn set(context: usize) -> Result<(), u32> {
    if context != 0 {
        check(context)?;
    }
    STACK.with_borrow_mut(|stack| {
        stack.pop();
        if context != 0 {
            stack.push(context);
        }
    });
    Ok(())
}

pub fn push(context: usize) -> Result<(), u32> {
    check(context)?;
    STACK.with_borrow_mut(|stack| stack.push(context));
    Ok(())
}

pub fn pop() -> Result<usize, u32> {
    STACK.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)
}

/// The thread's context, or 0.
pub fn get() -> usize {
    STACK.with_borrow(|stack| stack.last().copied().unwrap_or(0))
}

/// The device of the thread's context.
pub fn current() -> Result<u32, u32> {
    check(get())
}
