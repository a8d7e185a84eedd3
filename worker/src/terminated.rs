//! SIGTERM to a rank: the others are told by whom they lose it, and then it ends as it would have.
//!
//! Only where nobody else handles SIGTERM, and only while a job runs. The handler sets flags; the
//! control thread does the rest. A second SIGTERM ends the process at once.

#![forbid(unsafe_code)]

use signal_hook::consts::SIGTERM;
use signal_hook::{flag, low_level};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Registered once for the life of the process.
static FLAGS: OnceLock<Option<Flags>> = OnceLock::new();

struct Flags {
    /// The next SIGTERM ends the process, as without a handler.
    is_deadly: Arc<AtomicBool>,
    came: Arc<AtomicBool>,
}

impl Flags {
    fn register() -> Option<Flags> {
        let flags = Flags { is_deadly: Arc::new(AtomicBool::new(true)), came: Arc::default() };
        if !is_default() {
            return None;
        }
        // In this order: the first looks at what the last has set for the time before.
        flag::register_conditional_default(SIGTERM, Arc::clone(&flags.is_deadly)).ok()?;
        flag::register(SIGTERM, Arc::clone(&flags.came)).ok()?;
        flag::register(SIGTERM, Arc::clone(&flags.is_deadly)).ok()?;
        Some(flags)
    }
}

fn flags() -> Option<&'static Flags> {
    FLAGS.get()?.as_ref()
}

/// From now on somebody asks [`came`].
pub(crate) fn watch() {
    if let Some(flags) = FLAGS.get_or_init(Flags::register) {
        flags.is_deadly.store(false, Ordering::SeqCst);
    }
}

/// Whether a SIGTERM has come that has not ended the process.
pub(crate) fn came() -> bool {
    flags().is_some_and(|flags| flags.came.load(Ordering::SeqCst))
}

/// Nobody asks [`came`] any more: SIGTERM does what it does by itself. In a forked child, where no
/// thread of ours runs, the fork's handler calls this, so it only does what a child may do.
pub fn ignore() {
    // Nothing was registered: SIGTERM does by itself what others made it do.
    let Some(flags) = flags() else { return };
    flags.is_deadly.store(true, Ordering::SeqCst);
    // One may have come before that: to the child just now, or to a job that was about to end.
    if came() {
        die();
    }
}

/// Ends the process as SIGTERM does.
pub(crate) fn die() {
    // It fails for signals alone that cannot be handled.
    let _ = low_level::emulate_default_handler(SIGTERM);
}

/// Whether nobody in this process catches or ignores SIGTERM.
fn is_default() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let is_in = |name: &str| {
        let mask = status.lines().find_map(|line| line.strip_prefix(name));
        let mask = mask.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
        mask.is_none_or(|mask| mask >> (SIGTERM - 1) & 1 == 1)
    };
    !is_in("SigCgt:") && !is_in("SigIgn:")
}
