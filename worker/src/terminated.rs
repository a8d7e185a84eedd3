//! SIGTERM to a rank: the others are told by whom they lose it, and then it ends as it would have.
//!
//! Only where nobody else handles SIGTERM, and only while a job runs. The handler sets flags; the
//! control thread does the rest. A second SIGTERM ends the process at once.
//!
//! In an elastic job a program may ask for a notice ([`take_notice`]): SIGTERM then ends it only
//! once that is over, and until then it can leave in good order.

#![forbid(unsafe_code)]

use bps_engine::harness;
use signal_hook::consts::SIGTERM;
use signal_hook::{flag, low_level};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How often the end of a notice is looked for.
const LOOK: Duration = Duration::from_millis(50);

/// Registered once for the life of the process.
static FLAGS: OnceLock<Option<Flags>> = OnceLock::new();

/// The program leaves by itself when SIGTERM has come.
static LEAVES: AtomicBool = AtomicBool::new(false);
/// Somebody asks [`came`].
static IS_WATCHED: AtomicBool = AtomicBool::new(false);

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
        IS_WATCHED.store(true, Ordering::SeqCst);
        flags.is_deadly.store(false, Ordering::SeqCst);
    }
}

/// Whether a SIGTERM has come that has not ended the process.
pub(crate) fn came() -> bool {
    flags().is_some_and(|flags| flags.came.load(Ordering::SeqCst))
}

/// Whether a SIGTERM has come and the program that takes notice of it has not left yet.
pub(crate) fn is_noticed() -> bool {
    came() && LEAVES.load(Ordering::SeqCst)
}

/// From now on the program asks for itself whether SIGTERM has come, and leaves then; or not any
/// more.
pub fn take_notice(leaves: bool) {
    LEAVES.store(leaves, Ordering::SeqCst);
    settle();
}

/// The program has left: what made it do so is done with.
pub fn left() {
    if let Some(flags) = flags() {
        flags.came.store(false, Ordering::SeqCst);
    }
}

/// The control thread ends, and the program may be about to leave: it has until then.
pub(crate) fn end_at(deadline: Instant) {
    let wait = move || {
        while is_noticed() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                die();
            }
            std::thread::sleep(left.min(LOOK));
        }
    };
    // Without it SIGTERM a second time ends the process, or SIGKILL.
    let _ = harness::spawn("bps-notice", None, wait);
}

/// Nobody asks [`came`] any more. Between two epochs a program that leaves by itself has not done
/// so yet; otherwise SIGTERM does what it does by itself.
pub(crate) fn ignore() {
    IS_WATCHED.store(false, Ordering::SeqCst);
    settle();
}

/// Where nobody heeds SIGTERM, it ends the process, also one that has come.
fn settle() {
    if !IS_WATCHED.load(Ordering::SeqCst) && !LEAVES.load(Ordering::SeqCst) {
        heed();
    }
}

fn heed() {
    // Nothing was registered: SIGTERM does by itself what others made it do.
    let Some(flags) = flags() else { return };
    flags.is_deadly.store(true, Ordering::SeqCst);
    // One may have come before that: to a job that was about to end.
    if came() {
        die();
    }
}

/// In a forked child, where no thread of ours runs, the fork's handler calls this, so it only does
/// what a child may do.
pub fn in_child() {
    let Some(flags) = flags() else { return };
    if LEAVES.load(Ordering::SeqCst) {
        // What came was for the parent, which needs its children until it leaves.
        flags.is_deadly.store(true, Ordering::SeqCst);
    } else {
        heed();
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
