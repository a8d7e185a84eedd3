//! Where the polling threads of this process run: `bps-nic`, which drives the lanes, and `bps-gpu`
//! in a rank that uses a GPU.
//!
//! Each rank plans for all ranks of its host, so that they agree without a word, unless a launcher
//! has given each its own CPUs; then it plans within those. What other jobs have taken is passed
//! over.

use bps_engine::config::Config;
use bps_engine::topo::claim::Claims;
use bps_engine::topo::plan::{Near, Request, Side, plan};
use bps_engine::topo::{Topology, pin};
use std::path::Path;

/// A thread that polls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Poller<'a> {
    /// The one of the lanes.
    Nic,
    /// The one of the GPU at this PCI address, such as `0000:1b:00.0`.
    Gpu(&'a str),
}

/// Where a thread and its memory go.
#[derive(Default)]
pub(crate) struct Spot {
    /// Its CPU; `None` leaves it to the kernel.
    pub(crate) cpu: Option<usize>,
    /// The NUMA node for its memory: that of the GPU, if it serves one.
    pub(crate) memory_node: Option<u32>,
    /// Keeps other threads from the CPU; the thread must own it.
    pub(crate) claims: Option<Claims>,
}

/// The spot of one of this process's threads, on this machine. Of `bps-nic`'s and `bps-gpu`'s
/// neither depends on whether the other was asked for.
pub(crate) fn spot(config: &Config, poller: Poller<'_>) -> Spot {
    let Ok(topology) = Topology::read(Path::new("/")) else { return Spot::default() };
    let Ok(affinity) = pin::affinity() else { return Spot::default() };
    spot_on(&topology, &affinity, config, poller, Claims::open())
}

/// The NUMA node of this process, if all its CPUs are of one.
pub(crate) fn node() -> Option<u32> {
    let topology = Topology::read(Path::new("/")).ok()?;
    let mut nodes = pin::affinity().ok()?.into_iter().map(|cpu| topology.cpu(cpu)?.node);
    let first = nodes.next()??;
    nodes.all(|node| node == Some(first)).then_some(first)
}

fn spot_on(
    topology: &Topology,
    affinity: &[usize],
    config: &Config,
    poller: Poller<'_>,
    mut claims: Claims,
) -> Spot {
    // A launcher that binds ranks gives each its own CPUs; else the ranks of a host share all.
    let is_bound = affinity.len() < topology.cpus.len();
    let (ranks, rank) =
        if is_bound { (1, 0) } else { (config.local_size as usize, config.local_rank as usize) };
    let near = config.interface.clone().map_or(Near::Anywhere, Near::Nic);
    let mut threads = vec![near; ranks];
    let mut thread = rank;
    let mut gpu_node = None;
    if let Poller::Gpu(address) = poller {
        let own = topology.gpus.iter().position(|gpu| gpu.address == address);
        // Ranks take GPUs in order; where one does not, the claims keep threads apart.
        let gpu_of = |other: usize| {
            let index = (own? + other).checked_sub(rank)?;
            (index < topology.gpus.len()).then_some(Near::Gpu(index))
        };
        threads.extend((0..ranks).map(|other| gpu_of(other).unwrap_or(Near::Anywhere)));
        thread = ranks + rank;
        gpu_node = own.and_then(|index| topology.gpus[index].node);
    }
    let request = Request {
        side: Side::First,
        threads: &threads,
        affinity,
        // The framework computes on several threads in each rank: a pinned loop must not be in
        // their way.
        others: 3 * ranks,
        use_isolated: false,
    };
    let planned = plan(topology, &request);
    let cpu = config.pin.then(|| claims.settle(topology, &request, &planned, thread).cpu).flatten();
    let memory_node =
        gpu_node.and_then(|node| topology.memory_near(node)).or_else(|| topology.memory_node(cpu?));
    Spot { cpu, memory_node, claims: Some(claims) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bps_engine::topo::{Cpu, Gpu, Node, PciPath};

    /// Two nodes of eight CPUs, with two GPUs each.
    fn machine() -> Topology {
        let node = |id: u32| Node {
            id,
            cpus: (8 * id as usize..8 * id as usize + 8).collect(),
            distances: if id == 0 { vec![10, 21] } else { vec![21, 10] },
            has_memory: true,
        };
        let cpu =
            |id| Cpu { id, siblings: vec![id], node: Some(u32::from(id >= 8)), ..Cpu::default() };
        let gpu = |index: u32| Gpu {
            address: format!("0000:{index}b:00.0"),
            node: Some(index / 2),
            cpus: Vec::new(),
            path: PciPath::default(),
            driver: None,
        };
        Topology {
            cpus: (0..16).map(cpu).collect(),
            nodes: vec![node(0), node(1)],
            gpus: (0..4).map(gpu).collect(),
            ..Topology::default()
        }
    }

    fn config(local_rank: u32, local_size: u32) -> Config {
        Config { local_rank, local_size, ..Config::default() }
    }

    fn at(affinity: &[usize], config: &Config, poller: Poller<'_>) -> (Option<usize>, Option<u32>) {
        let spot = spot_on(&machine(), affinity, config, poller, Claims::none());
        (spot.cpu, spot.memory_node)
    }

    #[test]
    fn threads_of_one_rank_and_of_several_never_meet() {
        let all: Vec<usize> = (0..16).collect();
        let mut seen = Vec::new();
        for rank in 0..3 {
            let config = config(rank, 3);
            // The first GPU is left out.
            let number = rank + 1;
            let address = format!("0000:{number}b:00.0");
            let nic = at(&all, &config, Poller::Nic).0.unwrap();
            let (gpu, node) = at(&all, &config, Poller::Gpu(&address));
            assert_eq!(node, Some(number / 2), "slots are on the GPU's node");
            assert_eq!(gpu.unwrap() / 8, number as usize / 2, "the thread is near its GPU");
            seen.extend([nic, gpu.unwrap()]);
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 6, "{seen:?}");
    }

    #[test]
    fn a_share_of_the_cpus_is_kept_to() {
        let share = [8, 9, 10, 11, 12];
        let config = config(2, 4);
        let poller = Poller::Gpu("0000:2b:00.0");
        assert_eq!(at(&share, &config, Poller::Nic), (Some(8), Some(1)));
        assert_eq!(at(&share, &config, poller), (Some(9), Some(1)));
        // Too few for the framework's own threads besides.
        assert_eq!(at(&share[..4], &config, poller), (None, Some(1)));
        assert_eq!(at(&share[..4], &config, Poller::Nic), (Some(8), Some(1)));
        // A share far from the GPU: memory goes where the GPU is all the same.
        assert_eq!(at(&share, &config, Poller::Gpu("0000:0b:00.0")), (Some(9), Some(0)));
        assert_eq!(at(&share, &config, Poller::Gpu("0000:ff:00.0")), (Some(9), Some(1)));
        let unpinned = Config { pin: false, ..config };
        assert_eq!(at(&share, &unpinned, Poller::Nic), (None, None));
        assert_eq!(at(&share, &unpinned, poller), (None, Some(1)));
    }
}
