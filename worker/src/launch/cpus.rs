//! Which CPUs each worker process of this machine gets. The kernel is told in `child.rs`.
//!
//! As in BytePS, a process gets cores of one NUMA node where they fit, and the last one gets what
//! is left. Only CPUs that the launcher itself may use are given away.

use super::plan::LaunchError;
use bps_engine::config::LaunchConfig;
use bps_engine::topo::pin::affinity;
use std::path::Path;

/// The CPUs of one core: the physical one and its hyper-thread siblings.
type Core = Vec<usize>;

/// CPUs for each of `count` processes, or `None` to leave them all unbound.
pub(super) fn assign(
    launch: &LaunchConfig,
    count: u32,
    numa: bool,
    notes: &mut Vec<String>,
) -> Result<Option<Vec<Vec<usize>>>, LaunchError> {
    let explicit = launch.visible_cpu_cores.as_deref();
    if explicit.is_none() && (!numa || count < 2) {
        return Ok(None);
    }
    let allowed = affinity().map_err(|source| LaunchError::System {
        what: "cannot read which CPUs may be used",
        source: source.into(),
    })?;
    if let Some(lists) = explicit {
        return visible(lists, count, &allowed).map(Some);
    }
    let blacklist = match launch.cpu_blacklist.as_deref().map(str::trim) {
        None | Some("-1") => Vec::new(),
        Some(list) => {
            parse_list(list).ok_or_else(|| malformed("BYTEPS_CPU_BLACKLIST", list, "0,4-5"))?
        }
    };
    let free: Vec<usize> = allowed.into_iter().filter(|cpu| !blacklist.contains(cpu)).collect();
    let nodes = read_nodes(Path::new("/sys/devices/system"), &free, launch.multithreaded_cpu);
    let cores: usize = nodes.iter().map(Vec::len).sum();
    if cores < count as usize {
        notes.push(format!(
            "{count} workers share {cores} cores, so none is bound to cores of its own"
        ));
        return Ok(None);
    }
    Ok(Some(divide(
        nodes,
        count as usize,
        launch.numa_default_quota as usize,
        launch.numa_root_quota as usize,
    )))
}

/// The lists of `BYTEPS_VISIBLE_CPU_CORES`, one a process.
fn visible(lists: &str, count: u32, allowed: &[usize]) -> Result<Vec<Vec<usize>>, LaunchError> {
    const NAME: &str = "BYTEPS_VISIBLE_CPU_CORES";
    let parsed: Option<Vec<_>> = lists.split(':').map(parse_list).collect();
    let parsed = parsed.ok_or_else(|| malformed(NAME, lists, "0-3:4-7"))?;
    if parsed.len() < count as usize {
        return Err(LaunchError::Conflict {
            problem: format!("{NAME}={lists} has {} lists for {count} processes", parsed.len()),
            remedy: "give one list for each process, separated by colons".to_owned(),
        });
    }
    match parsed.iter().flatten().find(|cpu| !allowed.contains(cpu)) {
        None => Ok(parsed),
        Some(cpu) => Err(LaunchError::Conflict {
            problem: format!("{NAME}={lists} names CPU {cpu}, which this process may not use"),
            remedy: format!("it may use {allowed:?}"),
        }),
    }
}

fn malformed(name: &str, value: &str, example: &str) -> LaunchError {
    LaunchError::Conflict {
        problem: format!("{name}={value} is not a list of CPUs"),
        remedy: format!("for example {name}={example}"),
    }
}

/// `0,4-5` as numbers. An empty or reversed range is no list.
fn parse_list(text: &str) -> Option<Vec<usize>> {
    const CPUS_MAX: usize = 1024;
    let mut cpus = Vec::new();
    for item in text.trim().split(',') {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let first: usize = first.trim().parse().ok()?;
        let last: usize = last.trim().parse().ok()?;
        if first > last || last >= CPUS_MAX {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// The usable cores of each NUMA node, in the order of the nodes' numbers. A machine that shows no
/// nodes is one node.
fn read_nodes(root: &Path, usable: &[usize], siblings: bool) -> Vec<Vec<Core>> {
    let mut numbers: Vec<usize> = std::fs::read_dir(root.join("node"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok())
        .collect();
    numbers.sort_unstable();
    let mut nodes: Vec<Vec<usize>> = numbers
        .into_iter()
        .filter_map(|node| read_list(&root.join(format!("node/node{node}/cpulist"))))
        .collect();
    if nodes.is_empty() {
        nodes.push(usable.to_vec());
    }
    nodes.iter().map(|cpus| cores_of(root, cpus, usable, siblings)).collect()
}

fn cores_of(root: &Path, cpus: &[usize], usable: &[usize], siblings: bool) -> Vec<Core> {
    let mut taken: Vec<usize> = Vec::new();
    let mut cores = Vec::new();
    for &cpu in cpus.iter().filter(|cpu| usable.contains(cpu)) {
        if taken.contains(&cpu) {
            continue;
        }
        let list = root.join(format!("cpu/cpu{cpu}/topology/thread_siblings_list"));
        let mut core = read_list(&list).unwrap_or_else(|| vec![cpu]);
        taken.extend(&core);
        core.retain(|cpu| usable.contains(cpu));
        if !siblings {
            core.truncate(1);
        }
        cores.push(core);
    }
    cores
}

fn read_list(path: &Path) -> Option<Vec<usize>> {
    parse_list(&std::fs::read_to_string(path).ok()?)
}

/// Gives each process `quota` cores and the last one `root` (0: even shares, and all that is left).
/// There must be at least as many cores as processes; then each gets one or more.
fn divide(mut nodes: Vec<Vec<Core>>, count: usize, quota: usize, root: usize) -> Vec<Vec<usize>> {
    let mut left: usize = nodes.iter().map(Vec::len).sum();
    debug_assert!(left >= count && count > 0);
    let even = left / count;
    let quota = if quota == 0 { even } else { quota.min(even) };
    let mut shares = Vec::with_capacity(count);
    for index in 0..count {
        let wanted = match index + 1 == count {
            true if root == 0 => left,
            true => root.min(left),
            false => quota,
        };
        let cores = take(&mut nodes, wanted);
        left -= cores.len();
        shares.push(cores.into_iter().flatten().collect());
    }
    shares
}

/// Up to `wanted` cores of the first node that has so many, otherwise of the one that has most.
fn take(nodes: &mut [Vec<Core>], wanted: usize) -> Vec<Core> {
    let roomy = nodes.iter().position(|node| node.len() >= wanted);
    let fullest = || {
        // The first of the fullest: `max_by_key` would return the last.
        (0..nodes.len()).rev().max_by_key(|&index| nodes[index].len())
    };
    let Some(index) = roomy.or_else(fullest) else { return Vec::new() };
    let node = &mut nodes[index];
    node.drain(..wanted.min(node.len())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(sizes: &[usize]) -> Vec<Vec<Core>> {
        let mut next = 0;
        let mut core = || {
            next += 1;
            vec![next - 1, next + 99]
        };
        sizes.iter().map(|&size| (0..size).map(|_| core()).collect()).collect()
    }

    #[test]
    fn lists() {
        assert_eq!(parse_list("0,4-5\n").unwrap(), [0, 4, 5]);
        for wrong in ["", "a", "5-4", "1,", "-1", "0-99999999999"] {
            assert!(parse_list(wrong).is_none(), "{wrong:?}");
        }
    }

    #[test]
    fn shares_stay_within_a_node_and_never_overlap() {
        for (sizes, count, quota, root) in [
            (vec![8, 8], 4, 0, 0),
            (vec![8, 8], 3, 0, 0),
            (vec![4], 4, 9, 9),
            (vec![10, 10], 8, 1, 6),
            (vec![1, 1, 1], 2, 0, 0),
            (vec![5, 0, 3], 8, 0, 0),
        ] {
            let all = nodes(&sizes);
            let shares = divide(all.clone(), count, quota, root);
            assert_eq!(shares.len(), count);
            let mut seen = Vec::new();
            for share in &shares {
                assert!(!share.is_empty());
                let inside = |node: &Vec<Core>| share.iter().all(|c| node.concat().contains(c));
                assert!(all.iter().any(inside), "{share:?} spans nodes");
                seen.extend(share.clone());
            }
            let total = seen.len();
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len(), total, "{shares:?} overlap");
        }
        let shares = divide(nodes(&[4, 4]), 3, 0, 0);
        assert_eq!(
            shares,
            [
                vec![0, 100, 1, 101],
                vec![2, 102, 3, 103],
                (4..8).flat_map(|c| [c, c + 100]).collect()
            ]
        );
    }

    #[test]
    fn explicit_lists_are_checked() {
        let allowed: Vec<usize> = (0..8).collect();
        assert_eq!(visible("1,4-5:6", 2, &allowed).unwrap(), [vec![1, 4, 5], vec![6]]);
        let error = visible("1", 2, &allowed).unwrap_err().to_string();
        assert!(error.contains("1 lists for 2 processes"), "{error}");
        let error = visible("1:20", 2, &allowed).unwrap_err().to_string();
        assert!(error.contains("CPU 20"), "{error}");
        assert!(visible("1:x", 2, &allowed).is_err());
    }

    #[test]
    fn nodes_are_read_without_what_may_not_be_used() {
        let root = std::env::temp_dir().join(format!("bps-nodes-{}", std::process::id()));
        for (node, cpus) in [(0, "0-1,4-5"), (1, "2-3,6-7")] {
            std::fs::create_dir_all(root.join(format!("node/node{node}"))).unwrap();
            std::fs::write(root.join(format!("node/node{node}/cpulist")), cpus).unwrap();
        }
        for cpu in 0..8 {
            let folder = root.join(format!("cpu/cpu{cpu}/topology"));
            std::fs::create_dir_all(&folder).unwrap();
            let text = format!("{},{}\n", cpu % 4, cpu % 4 + 4);
            std::fs::write(folder.join("thread_siblings_list"), text).unwrap();
        }
        let usable = [0, 1, 2, 4, 5, 6];
        let found = read_nodes(&root, &usable, true);
        assert_eq!(found, [vec![vec![0, 4], vec![1, 5]], vec![vec![2, 6]]]);
        assert_eq!(read_nodes(&root, &usable, false), [vec![vec![0], vec![1]], vec![vec![2]]]);
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(read_nodes(&root, &[3], true), [vec![vec![3]]]);
    }
}
