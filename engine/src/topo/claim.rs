//! Which CPUs of this machine polling threads have taken, across processes, users and network
//! namespaces: a byte for each CPU in a file of shared memory, locked as long as the thread lives.
//!
//! Every process plans its threads for itself, so two jobs on one machine, or servers started by
//! hand, would choose the same CPUs; two polling threads on one CPU are slower by far than one that
//! is not pinned. Whoever lets go of the file last removes it; only processes that are all killed
//! leave it behind, empty. Where the file can't be had (another container, no shared memory)
//! nothing is known of others and every CPU counts as free.

use super::Topology;
use super::plan::{Pinning, Place, Request, plan};
use rustix::fs::{Mode, OFlags, fchmod, fstat, lstat, open};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// The CPUs that one part of a process has taken. Dropping it, or the end of the process, frees
/// them.
pub struct Claims {
    file: Option<OwnedFd>,
    path: PathBuf,
    taken: Vec<usize>,
}

/// Locked for reading by everybody who has the file open, and for writing by who removes it: beyond
/// any CPU.
const IN_USE: usize = 1 << 24;
/// How often the file is opened again that was removed meanwhile.
const OPENS: usize = 16;

impl Claims {
    /// No CPU taken yet.
    #[must_use]
    pub fn open() -> Claims {
        Claims::at(Path::new("/dev/shm/bps-cpus"))
    }

    /// No CPU taken yet, and none that others know of: for plans of machines that are not this one.
    #[must_use]
    pub fn none() -> Claims {
        Claims { file: None, path: PathBuf::new(), taken: Vec::new() }
    }

    /// Those of these CPUs that polling threads of other processes, or other claims, have now.
    #[must_use]
    pub fn of_others(&self, cpus: &[usize]) -> Vec<usize> {
        let Some(file) = &self.file else { return Vec::new() };
        cpus.iter().copied().filter(|&cpu| is_locked(file, cpu)).collect()
    }

    fn at(path: &Path) -> Claims {
        let file = (0..OPENS).find_map(|_| open_shared(path).transpose());
        Claims { file: file.and_then(Result::ok), path: path.to_owned(), taken: Vec::new() }
    }

    /// Takes a CPU, unless somebody else has it.
    fn take(&mut self, cpu: usize) -> bool {
        // A lock that this open file has already would be given again.
        let is_free = !self.taken.contains(&cpu)
            && self.file.as_ref().is_none_or(|file| {
                let held = [Some(libc::EAGAIN), Some(libc::EACCES)];
                !lock(file, cpu).is_err_and(|error| held.contains(&error.raw_os_error()))
            });
        if is_free {
            self.taken.push(cpu);
        }
        is_free
    }

    /// The place of one thread of a plan that was made for this request, or the next best one if
    /// another thread of this machine has that CPU already; not pinned if all are taken.
    #[must_use]
    pub fn settle(
        &mut self,
        topology: &Topology,
        request: &Request<'_>,
        planned: &Pinning,
        thread: usize,
    ) -> Place {
        let Some(&wanted) = planned.places.get(thread) else { return NOWHERE };
        let Some(cpu) = wanted.cpu else { return wanted };
        if self.take(cpu) {
            return wanted;
        }
        let others = |cpu: &usize| planned.places.iter().any(|place| place.cpu == Some(*cpu));
        let mut left: Vec<usize> = request.affinity.to_vec();
        left.retain(|cpu| !others(cpu));
        while !left.is_empty() {
            let near = &request.threads[thread..=thread];
            let next = Request { threads: near, affinity: &left, others: 0, ..request.clone() };
            let Some(&place) = plan(topology, &next).places.first() else { break };
            let Some(cpu) = place.cpu else { break };
            if self.take(cpu) {
                return place;
            }
            left.retain(|other| *other != cpu);
        }
        NOWHERE
    }
}

impl Drop for Claims {
    fn drop(&mut self) {
        let Some(file) = &self.file else { return };
        // The last one out: with this lock nobody else has the file, and nobody gets it.
        let is_last = control(file, IN_USE, libc::F_OFD_SETLK, libc::F_WRLCK).is_ok();
        if is_last && is_at(file, &self.path) {
            // It fails where another user made the file; then it stays, and is of use again.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Opens the file, or makes it, and marks it as in use; `None` if it was removed meanwhile.
fn open_shared(path: &Path) -> io::Result<Option<OwnedFd>> {
    let all = Mode::from_raw_mode(0o666);
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    // Kernels may forbid to open another user's file for creation in a folder that all share, so
    // that is tried only if there is none.
    let file = open(path, flags, all).or_else(|_| {
        let file = open(path, flags | OFlags::CREATE, all)?;
        // Past this process's mask: other users shall be able to lock as well.
        let _ = fchmod(&file, all);
        Ok::<OwnedFd, rustix::io::Errno>(file)
    })?;
    let is_shared = control(&file, IN_USE, libc::F_OFD_SETLK, libc::F_RDLCK).is_ok();
    Ok((is_shared && is_at(&file, path)).then_some(file))
}

/// Whether this path still leads to this file.
fn is_at(file: &OwnedFd, path: &Path) -> bool {
    match (fstat(file), lstat(path)) {
        (Ok(ours), Ok(there)) => (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino),
        _ => false,
    }
}

const NOWHERE: Place = Place { cpu: None, memory_node: None };

/// Locks one byte, for this open file and not for the process, so that jobs within one process see
/// each other too.
fn lock(file: &OwnedFd, byte: usize) -> io::Result<()> {
    control(file, byte, libc::F_OFD_SETLK, libc::F_WRLCK).map(|_| ())
}

/// Whether another open file has this byte. Where that can't be known nobody has.
fn is_locked(file: &OwnedFd, byte: usize) -> bool {
    const FREE: libc::c_int = libc::F_UNLCK;
    control(file, byte, libc::F_OFD_GETLK, libc::F_WRLCK)
        .is_ok_and(|range| libc::c_int::from(range.l_type) != FREE)
}

fn control(
    file: &OwnedFd,
    byte: usize,
    command: libc::c_int,
    kind: libc::c_int,
) -> io::Result<libc::flock> {
    let start = libc::off_t::try_from(byte).map_err(io::Error::other)?;
    #[allow(clippy::cast_possible_truncation, reason = "the kernel's constants, all below ten")]
    let mut range = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and the call reads and writes the one structure that is
    // passed, which lives until it returns.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut range) };
    if result == 0 { Ok(range) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topo::Cpu;
    use crate::topo::plan::{Near, Side};

    #[test]
    fn a_cpu_is_taken_once_until_it_is_freed_and_the_next_best_is_given() {
        let path = std::env::temp_dir().join(format!("bps-claims-{}", std::process::id()));
        let cpus = (0..4).map(|id| Cpu { id, siblings: vec![id], ..Cpu::default() }).collect();
        let topology = Topology { cpus, ..Topology::default() };
        let affinity = [0, 1, 2, 3];
        let threads = [Near::Anywhere, Near::Anywhere];
        let request = Request {
            side: Side::First,
            threads: &threads,
            affinity: &affinity,
            others: 1,
            use_isolated: false,
        };
        let planned = plan(&topology, &request);
        let cpu_of =
            |claims: &mut Claims, thread| claims.settle(&topology, &request, &planned, thread);
        let (mut first, mut second) = (Claims::at(&path), Claims::at(&path));
        assert_eq!(cpu_of(&mut first, 0).cpu, Some(1));
        assert_eq!(cpu_of(&mut first, 1).cpu, Some(2));
        // The plan's own CPUs are for its other threads: 3 and then 0 are what is left.
        assert_eq!(cpu_of(&mut second, 0).cpu, Some(3));
        assert_eq!(cpu_of(&mut second, 1).cpu, Some(0));
        let mut third = Claims::at(&path);
        assert_eq!(cpu_of(&mut third, 0), NOWHERE);
        assert_eq!(second.of_others(&affinity), [1, 2]);
        assert_eq!(third.of_others(&affinity), affinity);
        drop(first);
        assert_eq!(third.of_others(&affinity), [0, 3]);
        assert_eq!(cpu_of(&mut third, 0).cpu, Some(1));
        drop(second);
        assert!(path.exists(), "one is left");
        // A file that was removed under somebody's feet is not the one that others lock.
        std::fs::remove_file(&path).unwrap();
        let fourth = Claims::at(&path);
        drop(third);
        assert!(path.exists(), "it is the fourth's");
        drop(fourth);
        assert!(!path.exists(), "the last one removes it");
        let mut nowhere = Claims::at(Path::new("/nonexistent/claims"));
        assert_eq!(cpu_of(&mut nowhere, 1).cpu, Some(2), "nothing is known of others");
        assert_eq!(cpu_of(&mut nowhere, 2), NOWHERE, "there is no such thread");
        assert!(nowhere.of_others(&affinity).is_empty());
    }
}
