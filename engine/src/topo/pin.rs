//! Binds the calling thread to one CPU, having made sure that this can work.
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

#[cfg(test)]
mod tests {
    use super::*;

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
