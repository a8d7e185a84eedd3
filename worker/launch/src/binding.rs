//! Which GPU, CPUs and memory each worker process of this machine gets. The kernel is told in
//! `child.rs`, CUDA by variables.
//!
//! As in BytePS every process sees all GPUs of the job, and uses the one of its local rank. On a
//! machine with a GPU for each process, a process gets CPUs and memory of its GPU's NUMA node;
//! without, it gets cores of one node where they fit, and the last one what is left. Only CPUs that
//! the launcher itself may use are given away.

#![forbid(unsafe_code)]

use super::error::{LaunchError, gpus};
use bps_engine::base::word;
use bps_engine::config::{Gpus, LaunchConfig};
use bps_engine::topo::claim::Claims;
use bps_engine::topo::plan::{Near, Request, Side, plan};
use bps_engine::topo::share::{NodeCores, Quotas, Scarce, Share, cores, evenly, near};
use bps_engine::topo::visible::{CUDA_VISIBLE, Device, Visible, Wishes};
use bps_engine::topo::visible::{entries_of, present, visible};
use bps_engine::topo::{Cpu, Topology, format_list, parse_list, pin};
use std::path::Path;

/// A machine as its worker processes may use it.
pub(super) struct Machine {
    topology: Topology,
    /// The CPUs that the launcher may use.
    allowed: Vec<usize>,
    /// The GPUs of the job here.
    visible: Visible,
    /// CPUs that polling threads of other processes have.
    claimed: Vec<usize>,
    /// Why memory is left to the kernel, if it is.
    memory: Option<String>,
}

/// What one worker process gets.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Binding {
    /// The CPUs that it may use; `None` leaves them as they are.
    pub(super) cpus: Option<Vec<usize>>,
    /// The NUMA node that its memory comes from first.
    pub(super) memory_node: Option<u32>,
    /// Its `CUDA_VISIBLE_DEVICES`, where CUDA would show it something else without.
    pub(super) cuda: Option<String>,
    /// GPU, CPUs and node for a reader; `None` if it has none of them.
    pub(super) line: Option<String>,
}

/// How many processes are to be bound, and for whom room is to be left.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    /// Worker processes.
    pub(super) processes: u32,
    /// Polling threads of the servers that the launcher starts beside them.
    pub(super) server_threads: u32,
    /// Whether processes without GPUs are bound too.
    pub(super) without_gpus: bool,
}

impl Machine {
    /// This machine.
    pub(super) fn read(launch: &LaunchConfig) -> Result<Machine, LaunchError> {
        let allowed = pin::affinity().map_err(|source| LaunchError::System {
            what: "cannot read which CPUs may be used",
            source: source.into(),
        })?;
        let claimed = Claims::open().of_others(&allowed);
        let mut machine = Machine::below(Path::new("/"), allowed, launch)?;
        machine.claimed = claimed;
        machine.memory = why_no_memory(&machine.topology);
        Ok(machine)
    }

    /// The machine below this root, of which these CPUs may be used.
    fn below(
        root: &Path,
        allowed: Vec<usize>,
        launch: &LaunchConfig,
    ) -> Result<Machine, LaunchError> {
        let bare = || Topology {
            cpus: allowed
                .iter()
                .map(|&id| Cpu { id, siblings: vec![id], ..Cpu::default() })
                .collect(),
            ..Topology::default()
        };
        let topology = Topology::read(root).unwrap_or_else(|_| bare());
        let wishes = Wishes {
            cuda: launch.cuda_visible.as_deref(),
            nvidia: launch.visible_devices.as_deref(),
            order: launch.cuda_order.as_deref(),
        };
        let visible = match launch.gpus {
            Gpus::None => Visible::default(),
            Gpus::Auto | Gpus::Demand => visible(&present(&topology, root), &wishes)?,
        };
        Ok(Machine { topology, allowed, visible, claimed: Vec::new(), memory: None })
    }

    /// How many worker processes this machine runs if nobody says: one for each visible GPU; by
    /// BytePS's rule, which looks at the variable alone, where there is none.
    pub(super) fn processes(&self, launch: &LaunchConfig) -> u32 {
        let count = match self.visible.devices.len() {
            0 => entries_of(launch.visible_devices.as_deref()).unwrap_or(1),
            devices => devices,
        };
        word(count)
    }

    /// Binds each process, and says in `notes` what cannot be had.
    pub(super) fn bind(
        &self,
        launch: &LaunchConfig,
        wanted: Wanted,
        notes: &mut Vec<String>,
    ) -> Result<Vec<Binding>, LaunchError> {
        let count = wanted.processes as usize;
        let devices = self.devices(launch, count, notes)?;
        let mut bindings = vec![Binding::default(); count];
        if let Some(lists) = launch.visible_cpu_cores.as_deref() {
            for (binding, cpus) in
                bindings.iter_mut().zip(visible_cpus(lists, count, &self.allowed)?)
            {
                binding.cpus = Some(cpus);
            }
        } else if launch.numa && (devices.is_some() || wanted.without_gpus && count > 1) {
            match self.divide(launch, wanted, devices)? {
                Ok(shares) => {
                    for (binding, share) in bindings.iter_mut().zip(shares) {
                        binding.memory_node = devices.and(self.memory_node(&share));
                        binding.cpus = Some(share.cpus);
                    }
                    if devices.is_some() {
                        notes.extend(self.memory.clone());
                    }
                }
                Err(scarce) => notes.push(scarcity(count, scarce)),
            }
        }
        for (rank, binding) in bindings.iter_mut().enumerate() {
            let device = devices.map(|devices| &devices[rank]);
            binding.cuda = device.and_then(|device| self.cuda(device));
            binding.line = self.describe(rank, device, binding);
        }
        Ok(bindings)
    }

    /// The GPU of each process, if each has one.
    fn devices(
        &self,
        launch: &LaunchConfig,
        count: usize,
        notes: &mut Vec<String>,
    ) -> Result<Option<&[Device]>, LaunchError> {
        let devices = self.visible.devices.as_slice();
        if let Some(devices) = devices.get(..count).filter(|devices| !devices.is_empty()) {
            notes.extend(self.visible.note.clone());
            return Ok(Some(devices));
        }
        if launch.gpus == Gpus::Demand {
            return Err(LaunchError::TooFewGpus {
                processes: count,
                visible: devices.len(),
                hidden: launch.cuda_visible.as_ref().map(|value| format!("{CUDA_VISIBLE}={value}")),
            });
        }
        if !devices.is_empty() {
            notes.push(format!(
                "{count} workers and {}: none is bound to a GPU",
                gpus(devices.len())
            ));
        }
        Ok(None)
    }

    fn divide(
        &self,
        launch: &LaunchConfig,
        wanted: Wanted,
        devices: Option<&[Device]>,
    ) -> Result<Result<Vec<Share>, Scarce>, LaunchError> {
        let blacklist = blacklist(launch.cpu_blacklist.as_deref())?;
        let usable = without(&self.allowed, &blacklist);
        let quotas = Quotas {
            default: launch.numa_default_quota as usize,
            last: launch.numa_root_quota as usize,
        };
        let cores = |usable: &[usize]| -> Vec<NodeCores> {
            cores(&self.topology, usable, launch.multithreaded_cpu)
        };
        let Some(devices) = devices else {
            return Ok(evenly(cores(&usable), wanted.processes as usize, quotas));
        };
        let cpuset = self.topology.limits.cpus.as_ref();
        let usable: Vec<usize> =
            usable.into_iter().filter(|cpu| cpuset.is_none_or(|cpus| cpus.contains(cpu))).collect();
        let homes: Vec<Option<u32>> = devices.iter().map(|device| device.node).collect();
        let near = |usable: &[usize]| near(&self.topology, &cores(usable), &homes, quotas);
        let kept = without(&usable, &self.taken(wanted.server_threads));
        // Where that leaves too little, all share what there is.
        Ok(near(&kept).or_else(|_| near(&usable)))
    }

    /// CPUs of the cores that polling threads of others have, or that those of our own servers
    /// will choose.
    fn taken(&self, server_threads: u32) -> Vec<usize> {
        // As each server will plan for itself.
        let threads = vec![Near::Anywhere; server_threads as usize];
        let request = Request {
            side: Side::Last,
            threads: &threads,
            affinity: &without(&self.allowed, &self.claimed),
            others: 1,
            use_isolated: false,
        };
        let servers = plan(&self.topology, &request);
        let chosen = servers.places.iter().filter_map(|place| place.cpu);
        let siblings = |cpu| self.topology.cpu(cpu).map_or(vec![cpu], |cpu| cpu.siblings.clone());
        chosen.chain(self.claimed.iter().copied()).flat_map(siblings).collect()
    }

    /// The node that memory should come from. Where there is but one, the kernel needs no advice.
    fn memory_node(&self, share: &Share) -> Option<u32> {
        let is_choice = self.memory.is_none() && self.topology.nodes.len() > 1;
        share.cpus.first().filter(|_| is_choice).and_then(|&cpu| self.topology.memory_node(cpu))
    }

    fn cuda(&self, device: &Device) -> Option<String> {
        let slices = self.visible.devices.iter().filter(|device| device.slice.is_some()).count();
        match &device.slice {
            // CUDA shows a process the first slice of a list and no other.
            Some(slice) if slices > 1 && slice.starts_with("MIG-") => Some(slice.clone()),
            _ => self.visible.cuda.clone(),
        }
    }

    fn describe(&self, rank: usize, device: Option<&Device>, binding: &Binding) -> Option<String> {
        let mut parts = Vec::new();
        if let Some(device) = device {
            let number =
                if binding.cuda == device.slice && device.slice.is_some() { 0 } else { rank };
            parts.push(format!("GPU {number} ({device})"));
        }
        if let Some(cpus) = &binding.cpus {
            let mut sorted = cpus.clone();
            sorted.sort_unstable();
            let mut nodes: Vec<u32> =
                cpus.iter().filter_map(|&cpu| self.topology.cpu(cpu)?.node).collect();
            nodes.sort_unstable();
            nodes.dedup();
            let word = if sorted.len() == 1 { "CPU" } else { "CPUs" };
            parts.push(format!("{word} {}", format_list(&sorted)));
            let list: Vec<String> = nodes.iter().map(u32::to_string).collect();
            match nodes.as_slice() {
                [] => {}
                [node] => parts.push(format!("NUMA node {node}")),
                _ => parts.push(format!("NUMA nodes {}", list.join(","))),
            }
            let far = device.and_then(|device| device.node).filter(|node| !nodes.contains(node));
            if let Some(node) = far.filter(|_| !nodes.is_empty()) {
                parts.push(format!("far from the GPU, which is on node {node}"));
            }
        }
        (!parts.is_empty()).then(|| parts.join(", "))
    }
}

fn scarcity(count: usize, scarce: Scarce) -> String {
    let Scarce { cores, processes, node } = scarce;
    match node {
        None => {
            format!("{count} workers share {cores} cores, so none is bound to cores of its own")
        }
        Some(node) => format!(
            "{processes} workers share {cores} cores of NUMA node {node}, so none is bound to \
             cores of its own"
        ),
    }
}

/// Why memory is left to the kernel; `None` if processes can be given memory of a node.
fn why_no_memory(topology: &Topology) -> Option<String> {
    let node = topology.nodes.iter().find(|node| node.has_memory)?.id;
    if topology.nodes.len() < 2 {
        return None;
    }
    // A policy is a thread's own, so one that ends at once can try. Its end needs no limit: the two
    // system calls read and write a field of the thread, and wait for nothing.
    let attempt = std::thread::spawn(move || {
        if pin::has_memory_policy()? {
            return Ok(false);
        }
        pin::prefer_memory_node(node).map(|()| true)
    });
    match attempt.join().ok()? {
        Ok(true) => None,
        Ok(false) => Some("memory stays as numactl or the like has it".to_owned()),
        Err(error) => Some(format!("memory is not bound to NUMA nodes: {error}")),
    }
}

fn without(cpus: &[usize], others: &[usize]) -> Vec<usize> {
    cpus.iter().copied().filter(|cpu| !others.contains(cpu)).collect()
}

fn blacklist(text: Option<&str>) -> Result<Vec<usize>, LaunchError> {
    match text.map(str::trim) {
        None | Some("-1") => Ok(Vec::new()),
        Some(list) => list_of(list).ok_or_else(|| malformed("BYTEPS_CPU_BLACKLIST", list, "0,4-5")),
    }
}

/// The lists of `BYTEPS_VISIBLE_CPU_CORES`, one a process.
fn visible_cpus(
    lists: &str,
    count: usize,
    allowed: &[usize],
) -> Result<Vec<Vec<usize>>, LaunchError> {
    const NAME: &str = "BYTEPS_VISIBLE_CPU_CORES";
    let parsed: Option<Vec<_>> = lists.split(':').map(list_of).collect();
    let parsed = parsed.ok_or_else(|| malformed(NAME, lists, "0-3:4-7"))?;
    if parsed.len() < count {
        return Err(LaunchError::Conflict {
            problem: format!("{NAME}={lists} has {} lists for {count} processes", parsed.len()),
            remedy: "give one list for each process, separated by colons".to_owned(),
        });
    }
    match parsed.iter().flatten().find(|cpu| !allowed.contains(cpu)) {
        None => Ok(parsed),
        Some(cpu) => Err(LaunchError::Conflict {
            problem: format!("{NAME}={lists} names CPU {cpu}, which this process may not use"),
            remedy: format!("it may use {}", format_list(allowed)),
        }),
    }
}

/// `0,4-5` as numbers. A list of the user's that is empty, or has an empty item, is a slip.
fn list_of(text: &str) -> Option<Vec<usize>> {
    let has_gap = text.split(',').any(|item| item.trim().is_empty());
    if has_gap { None } else { parse_list(text) }
}

fn malformed(name: &str, value: &str, example: &str) -> LaunchError {
    LaunchError::Conflict {
        problem: format!("{name}={value} is not a list of CPUs"),
        remedy: format!("for example {name}={example}"),
    }
}

#[cfg(test)]
mod tests;
