//! Which polling thread runs on which CPU: a pure function of the topology and of what is asked.
//!
//! Every process of a host plans for itself, without a word to the others, so the answer depends
//! only on its arguments: ranks of one host pass the same list of threads and each takes its own
//! entry. Servers choose from the last CPU down and workers from the first up, so that both can
//! share a host.

#![forbid(unsafe_code)]

use super::{Cpu, Topology, format_list};
use std::cmp::Reverse;

/// What a thread should be near to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Near {
    /// It does not matter.
    Anywhere,
    /// The network card of this name, or whose name begins so.
    Nic(String),
    /// The GPU of this index, by PCI address.
    Gpu(usize),
    /// This NUMA node.
    Node(u32),
}

/// Which CPUs are taken first among equals, so that servers and workers of one host do not meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// From the first CPU up: for workers.
    First,
    /// From the last CPU down: for servers.
    Last,
}

/// What is to be planned.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request<'a> {
    /// Which CPUs are taken first.
    pub side: Side,
    /// What each thread should be near to, in the order of their numbers.
    pub threads: &'a [Near],
    /// The CPUs that the process may use, as [`affinity`](super::pin::affinity) gives them.
    pub affinity: &'a [usize],
    /// Polling threads of other processes on this host, as far as known. They take part in the
    /// count only.
    pub others: usize,
    /// Whether CPUs that are isolated from the scheduler may be used.
    pub use_isolated: bool,
}

/// Where one thread goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Its CPU; `None` leaves it to the kernel.
    pub cpu: Option<usize>,
    /// The NUMA node that its memory should be on.
    pub memory_node: Option<u32>,
}

/// The answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pinning {
    /// A place for each thread.
    pub places: Vec<Place>,
    /// CPUs that these threads can use at once: what the mask, the isolation and the quota leave.
    pub usable: usize,
    /// Whether polling threads outnumber CPUs, so that nobody is pinned.
    pub is_crowded: bool,
    /// What the user should know of it.
    pub note: Option<String>,
}

/// Chooses a CPU for each thread; see the head of this file.
///
/// Each thread gets a physical core of its own as long as there are some, away from CPU 0, which
/// serves interrupts, then near what it asked for, then where the third-level cache is least
/// shared.
#[must_use]
pub fn plan(topology: &Topology, request: &Request<'_>) -> Pinning {
    let candidates = eligible(topology, request);
    let usable = usable(&candidates, topology.limits.cpu_quota);
    let asking = request.threads.len() + request.others;
    if asking > usable {
        let unpinned = Place { cpu: None, memory_node: None };
        return Pinning {
            places: vec![unpinned; request.threads.len()],
            usable,
            is_crowded: true,
            note: Some(crowded_note(topology, request, usable)),
        };
    }
    let mut taken: Vec<&Cpu> = Vec::new();
    let mut places = Vec::new();
    for near in request.threads {
        let best = candidates
            .iter()
            .filter(|cpu| !taken.iter().any(|other| other.id == cpu.id))
            .min_by_key(|cpu| cost(topology, request.side, near, cpu, &taken))
            .expect("there are at least as many candidates as threads, each of which takes one");
        taken.push(best);
        places.push(Place { cpu: Some(best.id), memory_node: topology.memory_node(best.id) });
    }
    let is_sharing = taken
        .iter()
        .enumerate()
        .any(|(index, cpu)| taken[..index].iter().any(|other| cpu.siblings.contains(&other.id)));
    let note = is_sharing.then(|| {
        "some polling threads share a physical core: fewer threads might be faster".to_owned()
    });
    Pinning { places, usable, is_crowded: false, note }
}

impl Pinning {
    /// The plan in one line, such as "CPUs 8,9 (memory on nodes 0,0)".
    #[must_use]
    pub fn describe(&self) -> String {
        let cpus: Vec<usize> = self.places.iter().filter_map(|place| place.cpu).collect();
        if cpus.is_empty() {
            return "no thread is pinned".to_owned();
        }
        let cpus: Vec<String> = cpus.iter().map(usize::to_string).collect();
        let nodes: Vec<String> = self
            .places
            .iter()
            .map(|place| place.memory_node.map_or("?".to_owned(), |node| node.to_string()))
            .collect();
        format!("threads on CPUs {} (memory on nodes {})", cpus.join(","), nodes.join(","))
    }
}

/// The CPUs that may be chosen.
fn eligible<'a>(topology: &'a Topology, request: &Request<'_>) -> Vec<&'a Cpu> {
    let is_allowed = |cpu: &&Cpu| {
        let cpuset = topology.limits.cpus.as_ref();
        request.affinity.contains(&cpu.id) && cpuset.is_none_or(|cpus| cpus.contains(&cpu.id))
    };
    let allowed: Vec<&Cpu> = topology.cpus.iter().filter(is_allowed).collect();
    let shared: Vec<&Cpu> =
        allowed.iter().copied().filter(|cpu| !topology.isolated.contains(&cpu.id)).collect();
    // A process that was put on isolated CPUs alone is meant to use them.
    if request.use_isolated || shared.is_empty() { allowed } else { shared }
}

/// How many threads can run at once on these CPUs within the quota.
fn usable(candidates: &[&Cpu], quota: Option<f64>) -> usize {
    let Some(quota) = quota else { return candidates.len() };
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a float cast saturates, and the smaller of it and the count is taken"
    )]
    let within = quota.ceil().max(1.0) as usize;
    within.min(candidates.len())
}

fn crowded_note(topology: &Topology, request: &Request<'_>, usable: usize) -> String {
    let why = match topology.limits.cpu_quota {
        Some(quota) => format!(" (the control group allows {quota} CPUs of time)"),
        None => format!(" (the process may use CPUs {})", format_list(request.affinity)),
    };
    format!(
        "{} polling threads for {usable} usable CPUs{why}: none is pinned, and idle ones sleep \
         early",
        request.threads.len() + request.others
    )
}

/// What speaks against a CPU, most important first; the least is chosen.
fn cost(
    topology: &Topology,
    side: Side,
    near: &Near,
    cpu: &Cpu,
    taken: &[&Cpu],
) -> (bool, u8, u32, usize, (usize, Reverse<usize>)) {
    let shares_core = taken.iter().any(|other| cpu.siblings.contains(&other.id));
    let interrupts = if cpu.id == 0 { 2 } else { u8::from(cpu.siblings.contains(&0)) };
    let l3_users = taken.iter().filter(|other| cpu.l3.contains(&other.id)).count();
    let order = match side {
        Side::Last => (0, Reverse(cpu.id)),
        Side::First => (cpu.id, Reverse(0)),
    };
    (shares_core, interrupts, remoteness(topology, near, cpu), l3_users, order)
}

/// How far a CPU is from what a thread wants to be near to; 0 where nothing is known.
fn remoteness(topology: &Topology, near: &Near, cpu: &Cpu) -> u32 {
    let (cpus, node): (&[usize], Option<u32>) = match near {
        Near::Anywhere => (&[], None),
        Near::Nic(prefix) => topology.nic(prefix).map_or((&[], None), |nic| (&nic.cpus, nic.node)),
        Near::Gpu(index) => {
            topology.gpus.get(*index).map_or((&[], None), |gpu| (&gpu.cpus, gpu.node))
        }
        Near::Node(node) => (&[], Some(*node)),
    };
    if cpus.contains(&cpu.id) || (cpus.is_empty() && node.is_none()) {
        return 0;
    }
    match (cpu.node, node) {
        (Some(own), Some(wanted)) if own == wanted => 0,
        // An unknown distance is the longest.
        (Some(own), Some(wanted)) => topology.distance(own, wanted).unwrap_or(u32::MAX),
        _ => u32::MAX,
    }
}

#[cfg(test)]
#[path = "tests/plan.rs"]
mod tests;
