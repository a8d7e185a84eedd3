//! A communicator: its state, and the order in which its collectives are done.
//!
//! As in NCCL, a call on a non-blocking communicator may return before its work is in the stream;
//! the state is "in progress" until then, and other calls must wait for its end. As in NCCL, work
//! that has failed stands in its stream until the communicator is aborted.

use crate::collective::{Collective, FINALIZE};
use crate::meeting::{Failure, INVALID_USAGE, Meeting, REMOTE};
use crate::memory;
use crate::settings::{Random, settings};
use crate::stream::Stream;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::CString;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub const IN_PROGRESS: u32 = 7;

/// How long the name of a dead rank is waited for.
const PATIENCE: Duration = Duration::from_millis(200);

pub struct Comm {
    pub device: u32,
    pub ranks: u32,
    rank: u32,
    blocking: bool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    meeting: Option<Arc<Meeting>>,
    failure: Option<Failure>,
    /// The failure's text, for as long as the process lives.
    last_error: Option<&'static std::ffi::CStr>,
    /// A call that has returned is not done yet.
    in_progress: bool,
    aborted: bool,
    /// The ranks are parting: their ends are no failures.
    parting: bool,
    /// Collectives that are in some stream, and those that are over.
    issued: u64,
    done: u64,
    /// Collectives that are being done now.
    running: u32,
}

/// A collective with its memory on this rank.
pub struct Job {
    pub call: Collective,
    pub send: usize,
    pub receive: usize,
    pub stream: Arc<Stream>,
}

impl Comm {
    /// A communicator that meets its other ranks, at once or in the background.
    pub fn start(
        name: Vec<u8>,
        rank: u32,
        ranks: u32,
        device: u32,
        blocking: bool,
    ) -> Result<Arc<Comm>, u32> {
        let state = Mutex::new(State { in_progress: true, ..State::default() });
        let changed = Condvar::new();
        let comm = Arc::new(Comm { device, ranks, rank, blocking, state, changed });
        let meet = Arc::clone(&comm);
        let thread = std::thread::spawn(move || meet.meet(&name));
        if blocking {
            let _ = thread.join();
            if let Some((code, _)) = &comm.locked().failure {
                return Err(*code);
            }
        }
        Ok(comm)
    }

    fn meet(self: &Arc<Comm>, name: &[u8]) {
        let given_up = || self.locked().aborted;
        let met = Meeting::join(name, self.rank, self.ranks, &given_up).map(Arc::new);
        let mut state = self.locked();
        match met {
            Ok(meeting) => {
                state.meeting = Some(Arc::clone(&meeting));
                let watch = Arc::clone(self);
                std::thread::spawn(move || watch.watch(&meeting));
            }
            Err(failure) => state.fail(failure),
        }
        state.in_progress = false;
        self.changed.notify_all();
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Notices the death of another rank's process.
    fn watch(&self, meeting: &Meeting) {
        let short = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
        loop {
            let process = |(_, process)| PollFd::from_borrowed_fd(process, PollFlags::IN);
            let others =
                meeting.processes.iter().map(|(rank, fd)| (rank, std::os::fd::AsFd::as_fd(fd)));
            let mut polled: Vec<PollFd<'_>> = others.map(process).collect();
            let _ = poll(&mut polled, Some(&short));
            let dead = polled.iter().position(|polled| !polled.revents().is_empty());
            let mut state = self.locked();
            if state.aborted || state.parting {
                return;
            }
            if let Some(dead) = dead {
                let (rank, _) = meeting.processes[dead];
                state.fail((REMOTE, format!("the process of rank {rank} has died")));
                drop(state);
                self.break_off(meeting);
                return;
            }
        }
    }

    /// Ends whatever waits for other ranks.
    fn break_off(&self, meeting: &Meeting) {
        for socket in meeting.breakers() {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
        self.changed.notify_all();
    }

    /// Whether a call may be made now.
    pub fn check(&self) -> Result<(), u32> {
        let state = self.locked();
        if let Some((code, _)) = &state.failure {
            return Err(*code);
        }
        if state.in_progress || state.parting {
            eprintln!("fake NCCL: rank {} made a call while another was in progress", self.rank);
            return Err(INVALID_USAGE);
        }
        Ok(())
    }

    /// Puts jobs into their streams, in order; perhaps only after the return.
    pub fn issue(self: &Arc<Comm>, jobs: Vec<Job>) -> Result<(), u32> {
        let mut state = self.locked();
        let first = state.issued;
        state.issued += jobs.len() as u64;
        let mut random = Random::new(first << 8 | u64::from(self.rank));
        let comm = Arc::clone(self);
        let enqueue = move || {
            for (job, number) in jobs.into_iter().zip(first..) {
                let (comm, stream) = (Arc::clone(&comm), Arc::clone(&job.stream));
                stream.push(Box::new(move || comm.run(number, &job)));
            }
        };
        if self.blocking || settings().delay_us == 0 || random.next().is_multiple_of(2) {
            // The lock keeps other threads' calls from coming in between.
            enqueue();
            return Ok(());
        }
        state.in_progress = true;
        drop(state);
        let comm = Arc::clone(self);
        std::thread::spawn(move || {
            random.dawdle();
            enqueue();
            comm.locked().in_progress = false;
            comm.changed.notify_all();
        });
        Err(IN_PROGRESS)
    }

    /// Does a collective, on its stream's thread, when those before it are over.
    fn run(&self, number: u64, job: &Job) {
        let mut state = self.locked();
        while state.done < number && !state.aborted && state.failure.is_none() {
            state = self.wait(state);
        }
        let meeting = state.meeting.clone().filter(|_| state.failure.is_none() && !state.aborted);
        if let Some(meeting) = meeting {
            state.running += 1;
            drop(state);
            let mut given = vec![0; job.call.given(meeting.rank, meeting.ranks)];
            memory::copy(given.as_mut_ptr().expose_provenance(), job.send, given.len());
            let gotten = meeting.exchange(number, job.call, given);
            state = self.locked();
            state.running -= 1;
            match gotten {
                _ if state.aborted => {}
                Ok(gotten) => {
                    let bytes = job.call.gotten(meeting.rank, meeting.ranks);
                    assert_eq!(gotten.len(), bytes, "{}: rank {}", job.call, self.rank);
                    memory::copy(job.receive, gotten.as_ptr().expose_provenance(), bytes);
                }
                Err(failure) => {
                    // A connection may break a little before the watch sees who has died.
                    if failure.0 == REMOTE && state.failure.is_none() {
                        let waited = self.changed.wait_timeout(state, PATIENCE);
                        state = waited.unwrap_or_else(PoisonError::into_inner).0;
                    }
                    state.fail(failure);
                }
            }
            state.done += 1;
            self.changed.notify_all();
        }
        // A kernel whose peers do not answer spins until the communicator is aborted.
        while state.failure.is_some() && !state.aborted {
            state = self.wait(state);
        }
    }

    /// Parts from the other ranks when all is done.
    pub fn finalize(self: &Arc<Comm>) -> Result<(), u32> {
        self.locked().in_progress = true;
        let comm = Arc::clone(self);
        let thread = std::thread::spawn(move || {
            let mut state = comm.locked();
            while state.done < state.issued && state.failure.is_none() && !state.aborted {
                state = comm.wait(state);
            }
            let meeting = state.meeting.clone().filter(|_| state.failure.is_none());
            if let Some(meeting) = meeting {
                state.parting = true;
                let number = state.issued;
                drop(state);
                let call = Collective { kind: FINALIZE, count: 0, dtype: 0, operation: 0, root: 0 };
                let parted = meeting.exchange(number, call, Vec::new());
                state = comm.locked();
                if let Err(failure) = parted {
                    state.fail(failure);
                }
            }
            state.in_progress = false;
            comm.changed.notify_all();
        });
        if self.blocking {
            let _ = thread.join();
            return self.locked().failure.as_ref().map_or(Ok(()), |(code, _)| Err(*code));
        }
        Err(IN_PROGRESS)
    }

    /// Ends everything at once; nothing is written after this.
    pub fn abort(&self) {
        let mut state = self.locked();
        state.aborted = true;
        if let Some(meeting) = state.meeting.clone() {
            self.break_off(&meeting);
        }
        self.changed.notify_all();
        while state.running > 0 {
            state = self.wait(state);
        }
        // The sockets close with the last job that holds them.
        state.meeting = None;
    }

    /// The code that `ncclCommGetAsyncError` tells.
    pub fn state(&self) -> u32 {
        let state = self.locked();
        match &state.failure {
            Some((code, _)) => *code,
            None if state.in_progress => IN_PROGRESS,
            None => 0,
        }
    }

    pub fn last_error(&self) -> Option<&'static std::ffi::CStr> {
        self.locked().last_error
    }
}

impl State {
    /// The first failure stays.
    fn fail(&mut self, failure: Failure) {
        if self.failure.is_none() && !self.aborted {
            let text = CString::new(failure.1.clone()).unwrap_or_default();
            self.last_error = Some(Box::leak(text.into_boxed_c_str()));
            self.failure = Some(failure);
        }
    }
}
