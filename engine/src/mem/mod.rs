//! Memory that the data path uses: reserved, claimed and touched before the first round, so that
//! nothing on it allocates or faults; the sum of it, known and checked at start; and the types by
//! which it is lent.

mod arena;
mod budget;
pub mod cache;
mod headroom;
mod lent;

pub use arena::{Arena, Claim, Options};
pub use budget::Budget;
pub use headroom::{Headroom, check_locked};
pub use lent::{Readable, Writable};

use std::path::PathBuf;

/// Why memory could not be had. Sizes are in bytes.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A claim exceeds what its arena was reserved for: the sum at start was wrong.
    #[error(
        "arena {arena}: {need} bytes were asked for where {left} of {reserved} are left; \
         its budget at start is too small for what was declared since"
    )]
    ArenaFull {
        /// The arena.
        arena: String,
        /// Bytes asked for.
        need: usize,
        /// Bytes left.
        left: usize,
        /// Bytes of the whole arena.
        reserved: usize,
    },
    /// The machine has not so much memory left.
    #[error(
        "{what}: {need} bytes are needed but this machine has {left} left of {total}: \
         end other programs, use fewer servers or cores here, or more machines"
    )]
    Ram {
        /// For what.
        what: String,
        /// Bytes needed.
        need: u64,
        /// Bytes available.
        left: u64,
        /// Bytes of the machine.
        total: u64,
    },
    /// The container has not so much memory left.
    #[error(
        "{what}: {need} bytes are needed but the control group has {left} left of {limit}: \
         raise {} (for a container, its memory limit)", file.display()
    )]
    ControlGroup {
        /// For what.
        what: String,
        /// Bytes needed.
        need: u64,
        /// Bytes left.
        left: u64,
        /// Bytes of the limit.
        limit: u64,
        /// The file that sets it.
        file: PathBuf,
    },
    /// The process may not lock so much memory, as registering it with a device does.
    #[error(
        "{what}: {need} bytes are to be registered but RLIMIT_MEMLOCK is {limit}: \
         raise it (ulimit -l, LimitMEMLOCK= of a systemd unit, docker run --ulimit memlock=-1)"
    )]
    Locked {
        /// For what.
        what: String,
        /// Bytes to register.
        need: u64,
        /// The limit.
        limit: u64,
    },
    /// The kernel refused a step.
    #[error(
        "arena {arena}: {step} of {bytes} bytes failed: {source}; \
         see ulimit -v and vm.overcommit_memory"
    )]
    Kernel {
        /// The arena.
        arena: String,
        /// What was tried.
        step: &'static str,
        /// Bytes that it was tried for.
        bytes: usize,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// Memory was to be handed out anew while somebody holds it.
    #[error(
        "arena {arena}: {claims} claims are still held, so their memory cannot be handed out anew"
    )]
    InUse {
        /// The arena.
        arena: String,
        /// Claims that are alive.
        claims: usize,
    },
}
