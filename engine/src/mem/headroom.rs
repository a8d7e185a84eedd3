//! How much memory can still be had, asked before it is touched: where a control group is full the
//! kernel does not say no, it kills.

#![forbid(unsafe_code)]

use super::MemoryError;
use crate::topo::cgroup;
use rustix::process::{Resource, getrlimit};
use std::path::Path;

/// Memory that is left to this process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Headroom {
    /// Bytes that the machine can give without swapping, and all that it has; `None` if it does not
    /// say.
    pub ram: Option<(u64, u64)>,
    /// The control group's limit that leaves the least.
    pub control_group: Option<cgroup::MemoryLimit>,
}

impl Headroom {
    /// Reads it from /proc and the control groups under `root` (normally `/`).
    #[must_use]
    pub fn read(root: &Path) -> Headroom {
        let text = std::fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
        let ram = field_kib(&text, "MemAvailable:").zip(field_kib(&text, "MemTotal:"));
        Headroom { ram, control_group: cgroup::Limits::read(root).memory }
    }

    /// Whether `need` bytes more can be had for `what`.
    ///
    /// # Errors
    /// [`MemoryError::Ram`] or [`MemoryError::ControlGroup`].
    pub fn check(&self, what: &str, need: u64) -> Result<(), MemoryError> {
        if let Some(group) = &self.control_group
            && need > group.left_bytes
        {
            return Err(MemoryError::ControlGroup {
                what: what.to_owned(),
                need,
                left: group.left_bytes,
                limit: group.limit_bytes,
                file: group.file.clone(),
            });
        }
        match self.ram {
            Some((left, total)) if need > left => {
                Err(MemoryError::Ram { what: what.to_owned(), need, left, total })
            }
            _ => Ok(()),
        }
    }
}

/// Bytes of a field of /proc/meminfo, which counts in KiB.
fn field_kib(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Whether `need` bytes may be registered with a device or the kernel, which locks them in memory.
///
/// # Errors
/// [`MemoryError::Locked`] if RLIMIT_MEMLOCK is less and the process has no CAP_IPC_LOCK.
pub fn check_locked(what: &str, need: u64) -> Result<(), MemoryError> {
    let limit = getrlimit(Resource::Memlock).current;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    locked_within(what, need, limit, may_lock(&status))
}

fn locked_within(
    what: &str,
    need: u64,
    limit: Option<u64>,
    is_privileged: bool,
) -> Result<(), MemoryError> {
    match limit {
        Some(limit) if need > limit && !is_privileged => {
            Err(MemoryError::Locked { what: what.to_owned(), need, limit })
        }
        _ => Ok(()),
    }
}

/// Whether the effective capabilities include CAP_IPC_LOCK.
fn may_lock(status: &str) -> bool {
    const CAP_IPC_LOCK: u32 = 14;
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & (1 << CAP_IPC_LOCK) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_which_limit_is_too_low() {
        let group = cgroup::MemoryLimit {
            file: "/sys/fs/cgroup/memory.max".into(),
            limit_bytes: 1000,
            left_bytes: 100,
        };
        let headroom = Headroom { ram: Some((500, 2000)), control_group: Some(group) };
        assert!(headroom.check("slots", 100).is_ok());
        let text = headroom.check("slots", 101).unwrap_err().to_string();
        assert!(text.contains("101") && text.contains("100 left of 1000"), "{text}");
        assert!(text.contains("memory.max"), "{text}");
        let headroom = Headroom { control_group: None, ..headroom };
        assert!(headroom.check("slots", 500).is_ok());
        let text = headroom.check("slots", 501).unwrap_err().to_string();
        assert!(text.contains("500 left of 2000"), "{text}");
        assert!(Headroom { ram: None, control_group: None }.check("slots", u64::MAX).is_ok());
    }

    #[test]
    fn reads_this_machine() {
        let (left, total) = Headroom::read(Path::new("/")).ram.unwrap();
        assert!(0 < left && left <= total);
    }

    #[test]
    fn locking_follows_limit_and_capability() {
        let unprivileged = "Name:\tx\nCapEff:\t0000000000000000\n";
        let privileged = "CapEff:\t0000000000004000\n";
        assert!(!may_lock(unprivileged) && may_lock(privileged) && !may_lock(""));
        assert!(locked_within("slots", 9, Some(8), true).is_ok());
        assert!(locked_within("slots", 8, Some(8), false).is_ok());
        assert!(locked_within("slots", u64::MAX, None, false).is_ok());
        let text = locked_within("slots", 9, Some(8), false).unwrap_err().to_string();
        assert!(text.contains("RLIMIT_MEMLOCK is 8") && text.contains("ulimit -l"), "{text}");
        assert!(check_locked("nothing", 0).is_ok());
    }
}
