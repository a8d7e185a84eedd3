//! A simulated machine with GPUs: streams, events, copies and collectives in virtual time, behind
//! the C functions of CUDA and NCCL that the engine calls.
//!
//! Each piece of work takes a seeded while, so what is not ordered by an event happens in any
//! order. Beyond that the machine looks for mistakes that a run may survive:
//!
//! - Work is enqueued on memory that earlier work of another stream uses, and nothing orders the
//!   two ([`memory`]): found whatever the delays are.
//! - The host changes what a copy reads, or writes where a copy writes, before the copy is done;
//!   what it reads there before is poison.
//! - Memory is given back while work on it is not done, or used after that.
//! - Ranks make different calls on a communicator, or use its stream while NCCL enqueues.
//!
//! There is one machine in a thread, since the functions are told of none. A mistake is kept until
//! [`check`] panics with it, because no panic may pass a function of C.

mod collective;
mod communicator;
mod cuda;
mod machine;
mod memory;
mod nccl;
mod rank;
pub mod stages;
mod stream;

pub(super) use machine::Machine;
pub(super) use rank::{GpuFlight, GpuTensor, Landed, SimGpu, Spot};

use bps_engine::config::LogLevel;
use bps_engine::trace::log;
use bps_worker::cuda::Libraries;
use std::cell::RefCell;
use std::sync::OnceLock;

thread_local! {
    static MACHINE: RefCell<Option<Machine>> = const { RefCell::new(None) };
}

/// Puts a machine into this thread, or takes it away.
pub(super) fn install(machine: Option<Machine>) {
    MACHINE.with_borrow_mut(|place| *place = machine);
}

/// Does something with this thread's machine, if it has one.
pub(super) fn with<T>(action: impl FnOnce(&mut Machine) -> T) -> Option<T> {
    MACHINE.with_borrow_mut(|machine| machine.as_mut().map(action))
}

/// Does something with this thread's machine.
pub(super) fn machine<T>(action: impl FnOnce(&mut Machine) -> T) -> T {
    with(action).expect("this simulation has GPUs")
}

/// # Panics
/// If the machine has seen a mistake.
pub(super) fn check(seed: u64) {
    if let Some(mistake) = with(|machine| machine.mistake.take()).flatten() {
        panic!("seed {seed}: {mistake}");
    }
}

/// Copies to GPUs that shared a call with others.
pub(super) fn up_together() -> u64 {
    with(|machine| machine.up_together).unwrap_or(0)
}

/// The libraries of every simulated machine.
fn libraries() -> &'static Libraries {
    static LIBRARIES: OnceLock<Libraries> = OnceLock::new();
    LIBRARIES.get_or_init(|| {
        // Not what each of thousands of jobs would say once.
        log::init(LogLevel::Warning, "");
        let find = |name| cuda::find(name).or_else(|| nccl::find(name));
        // SAFETY: the functions have the arguments that those of the headers have, by size and
        // kind, and keep what the engine needs of their promises.
        unsafe { Libraries::open(&find) }.expect("all functions are there")
    })
}
