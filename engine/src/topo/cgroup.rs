//! What the control groups above this process allow it: CPU time, CPUs, memory. Version 2 and
//! version 1, also mixed, also from inside a container that sees only its own part of the tree.
//!
//! A limit holds for everything below it, so each answer is the tightest on the way from the
//! process's own group up to the root of what is mounted.

#![forbid(unsafe_code)]

use super::sysfs;
use std::path::{Path, PathBuf};

/// What control groups allow this process.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Limits {
    /// CPUs' worth of time, such as 2.5; `None` without a limit.
    pub cpu_quota: Option<f64>,
    /// CPUs of the cpuset; `None` where there is no such controller.
    pub cpus: Option<Vec<usize>>,
    /// The memory limit that leaves the least.
    pub memory: Option<MemoryLimit>,
}

/// A memory limit of a control group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemoryLimit {
    /// The file that sets it.
    pub file: PathBuf,
    /// Bytes that the group may use.
    pub limit_bytes: u64,
    /// Bytes that it can still take, counting files' pages that the kernel would drop.
    pub left_bytes: u64,
}

/// A group as it is visible here: the folder, and all folders above it up to the mount.
struct Chain {
    is_v2: bool,
    folders: Vec<PathBuf>,
}

impl Limits {
    /// Reads /proc/self and the mounted control groups under `root` (normally `/`).
    #[must_use]
    pub fn read(root: &Path) -> Limits {
        let mut limits = Limits::default();
        if let Some(chain) = chain(root, "cpu") {
            limits.cpu_quota = chain
                .folders
                .iter()
                .filter_map(|folder| quota(folder, chain.is_v2))
                .reduce(f64::min);
        }
        if let Some(chain) = chain(root, "cpuset") {
            let names: [&str; 2] = if chain.is_v2 {
                ["cpuset.cpus.effective", "cpuset.cpus"]
            } else {
                ["cpuset.effective_cpus", "cpuset.cpus"]
            };
            // The effective set is already cut by those above; an empty file means that nothing was
            // set here.
            limits.cpus = chain.folders.iter().find_map(|folder| {
                names.iter().find_map(|name| {
                    sysfs::list(&folder.join(name)).filter(|list| !list.is_empty())
                })
            });
        }
        if let Some(chain) = chain(root, "memory") {
            limits.memory = chain
                .folders
                .iter()
                .filter_map(|folder| memory(folder, chain.is_v2))
                .min_by_key(|limit| limit.left_bytes);
        }
        limits
    }
}

/// Where the process's group of this controller is: in the version 1 hierarchy that has the
/// controller, else in version 2.
fn chain(root: &Path, controller: &str) -> Option<Chain> {
    let groups = sysfs::text(&root.join("proc/self/cgroup"))?;
    let mounts = sysfs::text(&root.join("proc/self/mountinfo"))?;
    let find = |is_v2: bool| {
        let path = groups.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let controllers = fields.next()?;
            let path = fields.next()?;
            let is_ours = if is_v2 {
                controllers.is_empty()
            } else {
                controllers.split(',').any(|c| c == controller)
            };
            is_ours.then_some(path)
        })?;
        let (mount_root, mount) = mounts.lines().find_map(|line| mount(line, controller, is_v2))?;
        let top = root.join(mount.strip_prefix('/')?);
        let mut folder = top.join(below(path, mount_root));
        // A path that is not visible here is that of a group outside this container: its own is the
        // mount.
        if !folder.is_dir() {
            folder.clone_from(&top);
        }
        let folders = folder
            .ancestors()
            .take_while(|above| above.starts_with(&top))
            .map(PathBuf::from)
            .collect();
        Some(Chain { is_v2, folders })
    };
    find(false).or_else(|| find(true))
}

/// The root within its file system and the place of a mount, if it is the hierarchy of this
/// controller.
fn mount<'a>(line: &'a str, controller: &str, is_v2: bool) -> Option<(&'a str, &'a str)> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(3);
    let (mount_root, place) = (left.next()?, left.next()?);
    let mut right = right.split(' ');
    let (kind, options) = (right.next()?, right.nth(1)?);
    let is_ours = if is_v2 {
        kind == "cgroup2"
    } else {
        kind == "cgroup" && options.split(',').any(|option| option == controller)
    };
    is_ours.then_some((mount_root, place))
}

/// The group's path relative to the root of the mount, without leaving it.
fn below<'a>(path: &'a str, mount_root: &str) -> &'a str {
    let relative = path.strip_prefix(mount_root.trim_end_matches('/')).unwrap_or(path);
    let relative = relative.trim_start_matches('/');
    if relative.split('/').any(|part| part == "..") { "" } else { relative }
}

fn quota(folder: &Path, is_v2: bool) -> Option<f64> {
    let (quota, period) = if is_v2 {
        let text = sysfs::text(&folder.join("cpu.max"))?;
        let (quota, period) = text.split_once(' ')?;
        (quota.parse::<f64>().ok()?, period.parse::<f64>().ok()?)
    } else {
        (
            sysfs::number(&folder.join("cpu.cfs_quota_us"))?,
            sysfs::number(&folder.join("cpu.cfs_period_us"))?,
        )
    };
    // Version 1 says -1 for none; version 2 says "max", which is no number.
    (quota > 0.0 && period > 0.0).then(|| quota / period)
}

fn memory(folder: &Path, is_v2: bool) -> Option<MemoryLimit> {
    let (limit, usage) = if is_v2 {
        ("memory.max", "memory.current")
    } else {
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
    };
    let file = folder.join(limit);
    let limit_bytes: u64 = sysfs::number(&file)?;
    // Version 1 says "none" as the largest multiple of a page.
    if limit_bytes >= 1 << 62 {
        return None;
    }
    let usage_bytes: u64 = sysfs::number(&folder.join(usage)).unwrap_or(0);
    let stat = sysfs::text(&folder.join("memory.stat")).unwrap_or_default();
    let cached_bytes: u64 = stat
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(name, _)| *name == "inactive_file" || *name == "active_file")
        .filter_map(|(_, value)| value.parse::<u64>().ok())
        .sum();
    let left_bytes = limit_bytes.saturating_sub(usage_bytes.saturating_sub(cached_bytes));
    Some(MemoryLimit { file, limit_bytes, left_bytes })
}
