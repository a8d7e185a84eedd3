//! Which CPUs each process of a host gets: a pure function of the topology and of what is asked.
//!
//! A core is never divided, shares never overlap, and only CPUs that the caller names are given
//! away. [`near`] keeps every process on the NUMA node of its device; [`evenly`] is for processes
//! without one.

#![forbid(unsafe_code)]

use super::Topology;

/// The CPUs of one physical core.
pub type Core = Vec<usize>;

/// The cores of one NUMA node that may be given away.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeCores {
    /// The node; unknown on a machine that shows none.
    pub node: Option<u32>,
    /// Its cores, in the order of its CPUs.
    pub cores: Vec<Core>,
}

/// How many cores a process may have at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Quotas {
    /// Each process but the last; 0 for even shares.
    pub default: usize,
    /// The last process; 0 for what the others leave.
    pub last: usize,
}

/// What one process gets.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Share {
    /// Its CPUs, in order, at least one.
    pub cpus: Vec<usize>,
    /// The node of all of them, where it is known.
    pub node: Option<u32>,
}

/// There are fewer cores than processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Scarce {
    /// The cores that there are.
    pub cores: usize,
    /// The processes that want some.
    pub processes: usize,
    /// The node that is short of them; `None` is the machine.
    pub node: Option<u32>,
}

/// The cores of each node, by number, as far as they are `usable`. A machine that shows no nodes is
/// one. Without `siblings` a core is only the first of its CPUs.
#[must_use]
pub fn cores(topology: &Topology, usable: &[usize], siblings: bool) -> Vec<NodeCores> {
    let cores = |cpus: &[usize]| {
        let mut taken: Vec<usize> = Vec::new();
        let mut cores = Vec::new();
        for &cpu in cpus.iter().filter(|cpu| usable.contains(cpu)) {
            if taken.contains(&cpu) {
                continue;
            }
            let known = topology.cpu(cpu).map(|cpu| cpu.siblings.clone());
            let mut core = known.unwrap_or_else(|| vec![cpu]);
            taken.extend(&core);
            core.retain(|cpu| usable.contains(cpu));
            if !siblings {
                core.truncate(1);
            }
            cores.push(core);
        }
        cores
    };
    if topology.nodes.is_empty() {
        return vec![NodeCores { node: None, cores: cores(usable) }];
    }
    let of_node = |node: &super::Node| NodeCores { node: Some(node.id), cores: cores(&node.cpus) };
    topology.nodes.iter().map(of_node).collect()
}

/// Gives each process cores of one node: the first that has as many as its quota, otherwise the
/// fullest. The last process gets what is left there.
///
/// # Errors
/// [`Scarce`]
pub fn evenly(
    mut nodes: Vec<NodeCores>,
    count: usize,
    quotas: Quotas,
) -> Result<Vec<Share>, Scarce> {
    let mut left: usize = nodes.iter().map(|node| node.cores.len()).sum();
    if left < count || count == 0 {
        return Err(Scarce { cores: left, processes: count, node: None });
    }
    let even = left / count;
    let quota = if quotas.default == 0 { even } else { quotas.default.min(even) };
    let mut shares = Vec::with_capacity(count);
    for index in 0..count {
        let wanted = match index + 1 == count {
            true if quotas.last == 0 => left,
            true => quotas.last.min(left),
            false => quota,
        };
        let roomy = nodes.iter().position(|node| node.cores.len() >= wanted);
        // The first of the fullest: `max_by_key` would return the last.
        let fullest = || (0..nodes.len()).rev().max_by_key(|&index| nodes[index].cores.len());
        let index = roomy.or_else(fullest).expect("cores are left, so there is a node");
        let node = &mut nodes[index];
        let cores: Vec<Core> = node.cores.drain(..wanted.min(node.cores.len())).collect();
        left -= cores.len();
        shares.push(share(node.node, &cores));
    }
    Ok(shares)
}

/// Divides the cores of each node among the processes whose device is there; `homes` has the node
/// of each process's device. Where the process may use no CPU of that node, the nearest other node
/// stands in for it. If a home is unknown on a machine of several nodes, all are divided
/// [`evenly`].
///
/// # Errors
/// [`Scarce`]
pub fn near(
    topology: &Topology,
    nodes: &[NodeCores],
    homes: &[Option<u32>],
    quotas: Quotas,
) -> Result<Vec<Share>, Scarce> {
    let stand_ins: Option<Vec<usize>> =
        homes.iter().map(|&home| nearest(topology, nodes, home)).collect();
    let Some(stand_ins) = stand_ins else { return evenly(nodes.to_vec(), homes.len(), quotas) };
    let mut shares = vec![None; homes.len()];
    for (index, node) in nodes.iter().enumerate() {
        let members: Vec<usize> =
            (0..homes.len()).filter(|&process| stand_ins[process] == index).collect();
        let has_last = members.last().is_some_and(|&process| process + 1 == homes.len());
        if node.cores.len() < members.len() {
            return Err(Scarce {
                cores: node.cores.len(),
                processes: members.len(),
                node: node.node,
            });
        }
        let mut from = 0;
        for (process, size) in
            members.iter().zip(sizes(node.cores.len(), members.len(), quotas, has_last))
        {
            shares[*process] = Some(share(node.node, &node.cores[from..from + size]));
            from += size;
        }
    }
    Ok(shares.into_iter().flatten().collect())
}

/// The index of the node that a process with this home shall use; `None` if nobody can tell.
fn nearest(topology: &Topology, nodes: &[NodeCores], home: Option<u32>) -> Option<usize> {
    if nodes.len() == 1 {
        return Some(0);
    }
    let home = home.filter(|home| nodes.iter().any(|node| node.node == Some(*home)))?;
    let cost = |index: &usize| {
        let node = &nodes[*index];
        let distance = node.node.and_then(|node| topology.distance(home, node));
        // A node of unknown distance is the farthest.
        (node.cores.is_empty(), node.node != Some(home), distance.unwrap_or(u32::MAX), node.node)
    };
    (0..nodes.len()).min_by_key(cost)
}

/// How many of a node's cores each of its processes gets, each at least one.
fn sizes(cores: usize, processes: usize, quotas: Quotas, has_last: bool) -> Vec<usize> {
    if processes == 0 {
        return Vec::new();
    }
    let even = cores / processes;
    let others = if quotas.default == 0 { even } else { quotas.default.min(even) };
    let mut sizes: Vec<usize> = if quotas == Quotas::default() {
        // What does not divide evenly goes to the first ones, a core each.
        (0..processes).map(|index| even + usize::from(index < cores % processes)).collect()
    } else {
        vec![others; processes]
    };
    if has_last && quotas != Quotas::default() {
        let left = cores - others * (processes - 1);
        sizes[processes - 1] = if quotas.last == 0 { left } else { quotas.last.min(left) };
    }
    sizes
}

fn share(node: Option<u32>, cores: &[Core]) -> Share {
    let mut cpus: Vec<usize> = cores.concat();
    cpus.sort_unstable();
    Share { cpus, node }
}

#[cfg(test)]
#[path = "tests/share.rs"]
mod tests;
