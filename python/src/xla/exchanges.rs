//! What compiled programs have pushed and not yet pulled.
//!
//! A push copies its argument into memory of our own, because XLA promises nothing about the
//! argument's memory once the call has returned; a pull copies the result out. A push is known by
//! its *ticket*, which travels through the program as an array, so a pull finds its own push
//! however XLA orders, hoists or repeats the calls, and whatever other program uses the name.
//!
//! The lock is held for look-ups only, never while anything is copied, declared or waited for.

#![allow(unsafe_code)]

use crate::context::engine;
use crate::declared::{self, Declared};
use crate::error;
use crate::uneven::FromRoot;
use bps_worker::{Handle, PushPull};
use std::alloc::{Layout, alloc, dealloc};
use std::collections::{HashMap, VecDeque};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Pushes of one name that may wait for their pull. JAX itself has at most 32 programs under way on
/// a device; what is beyond that was pushed by programs that failed.
const PUSHES_OF_NAME_MAX: usize = 64;

/// A cache line, so that adding goes at full speed.
const ALIGNMENT: usize = 64;

/// Memory that one exchange is sent from and received into.
struct Staging {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is plain memory that this value owns; who touches it when is for `Exchange` to say.
unsafe impl Send for Staging {}
// SAFETY: a shared `Staging` gives its address away, and nothing else; who touches the memory
// behind it when is for `Exchange` to say.
unsafe impl Sync for Staging {}

impl Staging {
    fn new(bytes: usize) -> Result<Staging, String> {
        let Some(layout) = Staging::layout(bytes) else {
            return Ok(Staging { start: NonNull::<u128>::dangling().cast(), bytes });
        };
        // SAFETY: the layout has a size, since there is none for zero bytes.
        let start = NonNull::new(unsafe { alloc(layout) });
        let start = start.ok_or_else(|| {
            format!(
                "byteps.errors.TensorError: cannot allocate {bytes} bytes to send an array from: \
                 free memory, or exchange smaller arrays"
            )
        })?;
        Ok(Staging { start, bytes })
    }

    fn layout(bytes: usize) -> Option<Layout> {
        (bytes > 0).then(|| Layout::from_size_align(bytes, ALIGNMENT).ok()).flatten()
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Some(layout) = Staging::layout(self.bytes) {
            // SAFETY: it was allocated with this layout, and only its `Exchange` had it.
            unsafe { dealloc(self.start.as_ptr(), layout) };
        }
    }
}

/// One push_pull of a compiled program.
pub struct Exchange {
    name: String,
    run: Option<i64>,
    staging: Staging,
    handle: Handle,
    from_root: Option<FromRoot>,
    is_pulled: AtomicBool,
}

impl Exchange {
    /// Its progress.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Copies the result of an exchange that is over to `target`, which has `bytes` bytes.
    ///
    /// # Safety
    /// `target` may be written for that many bytes, by nobody else.
    ///
    /// # Errors
    /// What became of the exchange, with the class that Python raises for it.
    pub unsafe fn deliver(&self, target: *mut u8, bytes: usize) -> Result<(), String> {
        match self.handle.wait(Some(Duration::ZERO)) {
            Ok(true) => {}
            Ok(false) => {
                return Err(format!(
                    "byteps.errors.UsageError: '{}' was asked for before it was there",
                    self.name
                ));
            }
            Err(cause) => return Err(error::of_engine(&cause)),
        }
        self.from_root.as_ref().map_or(Ok(()), FromRoot::check)?;
        if bytes != self.staging.bytes {
            return Err(format!(
                "byteps.errors.UsageError: '{}' was pushed with {} bytes and pulled with {bytes}",
                self.name, self.staging.bytes
            ));
        }
        if bytes > 0 {
            // SAFETY: the exchange is over, so that nobody writes its memory any more; the target
            // is the caller's, of as many bytes, and no memory of ours.
            unsafe { self.staging.start.as_ptr().copy_to_nonoverlapping(target, bytes) };
        }
        self.is_pulled.store(true, Relaxed);
        Ok(())
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if !self.handle.poll() {
            // The engine may still write there: better lost than given to somebody else.
            std::mem::forget(std::mem::replace(
                &mut self.staging,
                Staging { start: NonNull::<u128>::dangling().cast(), bytes: 0 },
            ));
        }
    }
}

#[derive(Default)]
struct Table {
    exchanges: HashMap<u64, Arc<Exchange>>,
    /// The tickets of each name, oldest first.
    of_name: HashMap<String, VecDeque<u64>>,
    last_ticket: u64,
}

static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);

fn lock() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The engine has ended: what was not pulled never will be.
pub fn forget_all() {
    let forgotten = {
        let mut table = lock();
        let last_ticket = table.last_ticket;
        std::mem::replace(&mut *table, Table { last_ticket, ..Table::default() })
    };
    drop(forgotten);
}

/// Starts to exchange these bytes; returns the ticket.
///
/// # Safety
/// `source` may be read for `bytes` bytes, which is what such a tensor has, until this returns.
///
/// # Errors
/// Why it can't be, with the class that Python raises for it.
pub unsafe fn push(
    tensor: &Declared,
    (source, bytes): (*const u8, usize),
    priority: i64,
    run: Option<i64>,
) -> Result<u64, String> {
    let worker = engine().map_err(|cause| error::exception_alone(&cause))?;
    let (numbers, refused) = declared::numbers(std::slice::from_ref(tensor))?;
    let id = numbers[0].ok_or_else(|| refused.unwrap_or_default())?;
    let name = tensor.label();
    let staging = make_room(&name, bytes, run)?;
    let start = staging.start.as_ptr();
    if bytes > 0 {
        // SAFETY: the source is the caller's; the memory has as many bytes and is ours alone.
        unsafe { source.copy_to_nonoverlapping(start, bytes) };
    }
    let item = PushPull { tensor: id, source: start, target: start, priority };
    // SAFETY: the memory is as large as the tensor, as the caller promises of `bytes`; it is kept
    // by the exchange, which frees it only once the handle is over, and read after that alone.
    let handles = unsafe { worker.push_pull(&[item]) }.map_err(|cause| error::of_engine(&cause))?;
    let handle = handles.into_iter().next().expect("one item has one handle");
    let from_root = FromRoot::of(&worker, tensor, id);
    let is_pulled = AtomicBool::new(false);
    let exchange = Exchange { name: name.clone(), run, staging, handle, from_root, is_pulled };
    let exchange = Arc::new(exchange);
    let mut table = lock();
    table.last_ticket += 1;
    let ticket = table.last_ticket;
    table.exchanges.insert(ticket, exchange);
    table.of_name.entry(name).or_default().push_back(ticket);
    Ok(ticket)
}

/// Memory for another push of this name: that of one which was pulled, if there is one.
fn make_room(name: &str, bytes: usize, run: Option<i64>) -> Result<Staging, String> {
    let mut dropped = Vec::new();
    let mut table = lock();
    let table = &mut *table;
    if let Some(tickets) = table.of_name.get_mut(name) {
        let exchanges = &mut table.exchanges;
        let is_twice = |ticket: &u64| {
            exchanges
                .get(ticket)
                .is_some_and(|one| run.is_some() && one.run == run && !one.is_pulled.load(Relaxed))
        };
        if tickets.iter().any(is_twice) {
            return Err(format!(
                "byteps.errors.UsageError: a program pushes '{name}' again before it has pulled \
                 it: give each push_pull in a program a name of its own"
            ));
        }
        let mut is_full = tickets.len() >= PUSHES_OF_NAME_MAX;
        tickets.retain(|ticket| {
            let Some(one) = exchanges.get(ticket) else { return false };
            let is_left = is_full && one.handle.poll();
            if is_left {
                is_full = false;
            }
            let goes = one.handle.poll() && (one.is_pulled.load(Relaxed) || is_left);
            if goes {
                dropped.extend(exchanges.remove(ticket));
            }
            !goes
        });
        if tickets.len() >= PUSHES_OF_NAME_MAX {
            return Err(format!(
                "byteps.errors.UsageError: '{name}' was pushed {PUSHES_OF_NAME_MAX} times without \
                 being pulled: wait for results (jax.block_until_ready) before starting more"
            ));
        }
    }
    for one in dropped {
        if one.staging.bytes == bytes
            && let Some(mut one) = Arc::into_inner(one)
        {
            let none = Staging { start: NonNull::<u128>::dangling().cast(), bytes: 0 };
            return Ok(std::mem::replace(&mut one.staging, none));
        }
    }
    Staging::new(bytes)
}

/// The exchange of a ticket.
///
/// # Errors
/// There is none any more, with the class that Python raises for it.
pub fn find(ticket: u64) -> Result<Arc<Exchange>, String> {
    let found = lock().exchanges.get(&ticket).cloned();
    found.ok_or_else(|| {
        "byteps.errors.NotInitializedError: the engine was shut down between a push and its pull, \
         or the program was given a ticket that is not its own: run the whole step again"
            .to_owned()
    })
}
