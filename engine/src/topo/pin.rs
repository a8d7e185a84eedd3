//! Binds the calling thread to one CPU, having made sure that this can work, and its memory to a
//! NUMA node.
//!
//! `core_affinity` does the binding; it aborts the process for CPU numbers that do not fit its mask
//! of 1024, and says only "no" otherwise, so everything is checked and named here first.

use rustix::thread::{CpuSet, sched_getaffinity};

/// Why a thread could not be pinned. It runs on wherever the kernel puts it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PinError {
    /// The number does not fit the kernel's mask.
    #[error("CPU {cpu} cannot be pinned to: masks hold CPUs 0 to {}", CpuSet::MAX_CPU - 1)]
    TooLarge {
        /// The CPU asked for.
        cpu: usize,
    },
    /// The process may not run there.
    #[error(
        "CPU {cpu} is not among the CPUs {allowed:?} that this thread may use: \
         widen its cpuset or taskset, or set BPS_PIN=0"
    )]
    NotAllowed {
        /// The CPU asked for.
        cpu: usize,
        /// The CPUs of the affinity mask.
        allowed: Vec<usize>,
    },
    /// The mask could not be read, or the kernel said no all the same.
    #[error("the kernel refused to pin to CPU {cpu}: {source}; set BPS_PIN=0 to run unpinned")]
    Refused {
        /// The CPU asked for.
        cpu: usize,
        /// What the kernel said.
        source: rustix::io::Errno,
    },
}

/// The CPUs that the calling thread may run on, in order.
///
/// # Errors
/// The kernel knows more CPUs than fit a mask of 1024.
pub fn affinity() -> Result<Vec<usize>, rustix::io::Errno> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

/// Binds the calling thread to this CPU.
///
/// # Errors
/// [`PinError`]; the thread's mask is then as before.
pub fn pin_current_thread(cpu: usize) -> Result<(), PinError> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(PinError::TooLarge { cpu });
    }
    let allowed = affinity().map_err(|source| PinError::Refused { cpu, source })?;
    if !allowed.contains(&cpu) {
        return Err(PinError::NotAllowed { cpu, allowed });
    }
    if core_affinity::set_for_current(core_affinity::CoreId { id: cpu }) {
        Ok(())
    } else {
        Err(PinError::Refused { cpu, source: rustix::io::Errno::INVAL })
    }
}

/// From now on takes the calling thread's new pages from this NUMA node as long as it has some.
/// What the thread starts, and what it becomes (`exec`), inherits that. One system call, which a
/// child may make between `fork` and `exec`.
///
/// # Errors
/// There is no such node, the control group has none of its memory, or the container forbids the
/// call; the policy is then as before.
pub fn prefer_memory_node(node: u32) -> std::io::Result<()> {
    const MPOL_PREFERRED: libc::c_int = 1;
    const NODES_MAX: usize = 1024;
    let mut mask = [0u64; NODES_MAX / 64];
    let Some(word) = mask.get_mut(node as usize / 64) else {
        return Err(rustix::io::Errno::INVAL.into());
    };
    *word |= 1 << (node % 64);
    // SAFETY: the mask is as long as we say (in bits, plus the one that the kernel takes off), and
    // a policy changes only where pages to come are placed.
    let result = unsafe {
        libc::syscall(libc::SYS_set_mempolicy, MPOL_PREFERRED, mask.as_ptr(), NODES_MAX + 1)
    };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Whether somebody has chosen where the calling thread's memory comes from (`numactl` and the
/// like).
///
/// # Errors
/// The container forbids the question, or the kernel has no NUMA.
pub fn has_memory_policy() -> std::io::Result<bool> {
    const MPOL_DEFAULT: libc::c_int = 0;
    let mut mode: libc::c_int = MPOL_DEFAULT;
    let nothing = std::ptr::null::<u64>();
    // SAFETY: the kernel writes the policy's mode to the local that is passed; without a mask and
    // an address it looks at nothing else.
    let result = unsafe {
        libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, nothing, 0usize, nothing, 0usize)
    };
    if result == 0 { Ok(mode != MPOL_DEFAULT) } else { Err(std::io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_prefers_a_node_and_those_that_it_starts_too() {
        let outcome = std::thread::spawn(|| {
            if has_memory_policy()? {
                return Ok(None);
            }
            let node = crate::topo::Topology::read(std::path::Path::new("/"))
                .ok()
                .and_then(|machine| machine.memory_node(affinity().ok()?[0]))
                .unwrap_or(0);
            prefer_memory_node(node)?;
            let inherited = std::thread::spawn(has_memory_policy).join().unwrap()?;
            let unknown = prefer_memory_node(1 << 20).is_err() && prefer_memory_node(900).is_err();
            std::io::Result::Ok(Some((has_memory_policy()?, inherited, unknown)))
        });
        match outcome.join().unwrap() {
            Ok(Some(seen)) => assert_eq!(seen, (true, true, true)),
            Ok(None) => println!("skipped: this process runs under a memory policy"),
            Err(error) => println!("skipped: memory policies cannot be set here: {error}"),
        }
        assert!(!has_memory_policy().unwrap_or(false), "the calling thread's is as before");
    }

    #[test]
    fn pins_where_the_mask_allows_and_nowhere_else() {
        // A thread of its own, because tests share theirs with others.
        std::thread::spawn(|| {
            let before = affinity().unwrap();
            let cpu = *before.last().unwrap();
            pin_current_thread(cpu).unwrap();
            assert_eq!(affinity().unwrap(), [cpu]);
            if let Some(&other) = before.iter().find(|&&other| other != cpu) {
                let error = pin_current_thread(other).unwrap_err();
                assert_eq!(error, PinError::NotAllowed { cpu: other, allowed: vec![cpu] });
            }
            assert_eq!(pin_current_thread(1024), Err(PinError::TooLarge { cpu: 1024 }));
            assert_eq!(pin_current_thread(usize::MAX), Err(PinError::TooLarge { cpu: usize::MAX }));
            assert_eq!(affinity().unwrap(), [cpu], "a refusal changes nothing");
        })
        .join()
        .unwrap();
    }
}
