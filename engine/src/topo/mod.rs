//! What the machine is made of, and which thread runs where on it.
//!
//! [`Topology::read`] takes everything from /sys and /proc under a root that tests replace. What a
//! kernel, container or virtual machine does not say is absent here, never guessed: a CPU without a
//! known node is near everything. [`visible`] says which GPUs a job sees, [`share`] divides CPUs
//! among the processes of a host, [`plan`] assigns a process's threads to CPUs, [`claim`] keeps
//! that clear of other processes' threads, and [`pin`] carries it out.

pub mod cgroup;
pub mod claim;
pub mod pci;
pub mod pin;
pub mod plan;
pub mod share;
mod sysfs;
pub mod visible;

#[cfg(test)]
#[path = "tests/fixture.rs"]
mod fixture;

pub use pci::{Driver, Gpu, Nearness, Nic, PciPath};
pub use sysfs::{format_list, parse_list};

use std::cmp::Reverse;
use std::path::{Path, PathBuf};

/// One online CPU as the kernel counts them: a hardware thread.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Cpu {
    /// Its number.
    pub id: usize,
    /// Its socket.
    pub package: Option<u32>,
    /// Its core; numbers are unique within a package only.
    pub core: Option<u32>,
    /// The CPUs of the same physical core, itself among them.
    pub siblings: Vec<usize>,
    /// The CPUs that share its second-level cache; empty if unknown.
    pub l2: Vec<usize>,
    /// The CPUs that share its third-level cache; empty if unknown or if there is none.
    pub l3: Vec<usize>,
    /// Its NUMA node.
    pub node: Option<u32>,
}

/// One NUMA node.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Node {
    /// Its number.
    pub id: u32,
    /// Its CPUs; a node may have none.
    pub cpus: Vec<usize>,
    /// Its distance to every node, in the order of [`Topology::nodes`]; 10 is itself.
    pub distances: Vec<u32>,
    /// Whether it has memory; a node may have none.
    pub has_memory: bool,
}

/// A machine, as far as it tells.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Topology {
    /// Online CPUs, by number.
    pub cpus: Vec<Cpu>,
    /// NUMA nodes, by number; empty where the kernel has none.
    pub nodes: Vec<Node>,
    /// CPUs that the scheduler leaves alone (`isolcpus`).
    pub isolated: Vec<usize>,
    /// Network cards with a PCI device behind them, by name.
    pub nics: Vec<Nic>,
    /// NVIDIA GPUs, by PCI address, which is the order of CUDA_DEVICE_ORDER=PCI_BUS_ID.
    pub gpus: Vec<Gpu>,
    /// What control groups allow this process.
    pub limits: cgroup::Limits,
}

/// The kernel does not say which CPUs there are.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{} holds no list of CPUs: threads run unpinned; mount /sys, or set BPS_PIN=0",
    file.display()
)]
pub struct TopologyError {
    /// The file that is missing or unreadable.
    pub file: PathBuf,
}

impl Topology {
    /// Reads the machine under `root`, normally `/`.
    ///
    /// # Errors
    /// [`TopologyError`] without a list of online CPUs. All else may be missing.
    pub fn read(root: &Path) -> Result<Topology, TopologyError> {
        let system = root.join("sys/devices/system");
        let file = system.join("cpu/online");
        let online =
            sysfs::list(&file).filter(|list| !list.is_empty()).ok_or(TopologyError { file })?;
        let nodes = read_nodes(&system.join("node"));
        let cpus = online.iter().map(|&id| read_cpu(&system, id, &nodes)).collect();
        Ok(Topology {
            cpus,
            isolated: sysfs::list(&system.join("cpu/isolated")).unwrap_or_default(),
            nics: pci::read_nics(root),
            gpus: pci::read_gpus(root),
            limits: cgroup::Limits::read(root),
            nodes,
        })
    }

    /// The online CPU of this number.
    #[must_use]
    pub fn cpu(&self, id: usize) -> Option<&Cpu> {
        self.cpus.binary_search_by_key(&id, |cpu| cpu.id).ok().map(|index| &self.cpus[index])
    }

    /// The first network card whose name begins so, as `DMLC_INTERFACE` names one.
    #[must_use]
    pub fn nic(&self, prefix: &str) -> Option<&Nic> {
        let exact = self.nics.iter().find(|nic| nic.name == prefix);
        exact.or_else(|| self.nics.iter().find(|nic| nic.name.starts_with(prefix)))
    }

    /// How far two nodes are apart, as the firmware says; 10 is the same, about 20 the other
    /// socket.
    #[must_use]
    pub fn distance(&self, from: u32, to: u32) -> Option<u32> {
        let from = self.nodes.iter().find(|node| node.id == from)?;
        let to = self.nodes.iter().position(|node| node.id == to)?;
        from.distances.get(to).copied()
    }

    /// The node whose memory a thread on this CPU should use: its own, or the nearest that has
    /// memory.
    #[must_use]
    pub fn memory_node(&self, cpu: usize) -> Option<u32> {
        self.memory_near(self.cpu(cpu)?.node?)
    }

    /// This node, or the nearest that has memory.
    #[must_use]
    pub fn memory_near(&self, own: u32) -> Option<u32> {
        self.nodes
            .iter()
            .filter(|node| node.has_memory)
            // A node of unknown distance is the farthest.
            .min_by_key(|node| (self.distance(own, node.id).unwrap_or(u32::MAX), node.id))
            .map(|node| node.id)
    }

    /// How a network card and a GPU are joined.
    #[must_use]
    pub fn nearness(&self, nic: &Nic, gpu: &Gpu) -> Nearness {
        let same_node = match (nic.node, gpu.node) {
            (Some(nic), Some(gpu)) => nic == gpu,
            // On a machine of one node, or none that is known, everything is on it.
            _ => self.nodes.len() <= 1,
        };
        nic.path.nearness(&gpu.path, same_node)
    }

    /// The network card that a GPU should use: the nearest, then the fastest; of equal ones each
    /// GPU takes another where there are enough, so that all ranks of a host together use all
    /// cards.
    #[must_use]
    pub fn nic_of_gpu(&self, index: usize) -> Option<&Nic> {
        let gpu = self.gpus.get(index)?;
        let candidates = |gpu: &Gpu| -> Vec<&Nic> {
            let cost = |nic: &&Nic| (self.nearness(nic, gpu), Reverse(nic.speed_mbps));
            let Some(best) = self.nics.iter().map(|nic| cost(&nic)).min() else { return vec![] };
            self.nics.iter().filter(|nic| cost(nic) == best).collect()
        };
        let ours = candidates(gpu);
        let rivals = self.gpus[..index].iter().filter(|other| candidates(other) == ours).count();
        ours.get(rivals % ours.len().max(1)).copied()
    }
}

fn read_nodes(folder: &Path) -> Vec<Node> {
    let with_memory = sysfs::list(&folder.join("has_memory"));
    sysfs::numbered(folder, "node")
        .into_iter()
        .filter_map(|id| {
            let node = folder.join(format!("node{id}"));
            let distances = sysfs::text(&node.join("distance")).unwrap_or_default();
            Some(Node {
                id: u32::try_from(id).ok()?,
                cpus: sysfs::list(&node.join("cpulist")).unwrap_or_default(),
                distances: distances.split_whitespace().filter_map(|d| d.parse().ok()).collect(),
                has_memory: with_memory.as_ref().is_none_or(|nodes| nodes.contains(&id)),
            })
        })
        .collect()
}

fn read_cpu(system: &Path, id: usize, nodes: &[Node]) -> Cpu {
    let folder = system.join(format!("cpu/cpu{id}"));
    let topology = folder.join("topology");
    let siblings = sysfs::list(&topology.join("thread_siblings_list"));
    let mut cpu = Cpu {
        id,
        package: sysfs::number(&topology.join("physical_package_id")),
        core: sysfs::number(&topology.join("core_id")),
        siblings: siblings.filter(|list| list.contains(&id)).unwrap_or_else(|| vec![id]),
        node: nodes.iter().find(|node| node.cpus.contains(&id)).map(|node| node.id),
        ..Cpu::default()
    };
    let caches = folder.join("cache");
    for index in sysfs::numbered(&caches, "index") {
        let cache = caches.join(format!("index{index}"));
        let shared = || sysfs::list(&cache.join("shared_cpu_list")).unwrap_or_default();
        match sysfs::number::<u32>(&cache.join("level")) {
            Some(2) => cpu.l2 = shared(),
            Some(3) => cpu.l3 = shared(),
            _ => {}
        }
    }
    cpu
}

#[cfg(test)]
mod tests;
