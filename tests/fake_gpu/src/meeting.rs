//! How the ranks of a communicator find each other, and what they say: Unix sockets with names in
//! the abstract space, one from each rank to rank 0, which computes.

use crate::collective::Collective;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

pub const INTERNAL: u32 = 3;
pub const INVALID_ARGUMENT: u32 = 4;
pub const INVALID_USAGE: u32 = 5;
pub const REMOTE: u32 = 6;

const LOOK: Duration = Duration::from_millis(1);

/// A code of NCCL and what to tell about it.
pub type Failure = (u32, String);

/// One rank's end.
pub struct Meeting {
    pub rank: u32,
    pub ranks: u32,
    /// To every other rank, in order, at rank 0; to rank 0 elsewhere.
    sockets: Vec<UnixStream>,
    /// The other processes, by rank; this process is not among them.
    pub processes: Vec<(u32, OwnedFd)>,
}

fn broken(rank: u32) -> impl Fn(std::io::Error) -> Failure {
    move |error| (REMOTE, format!("the connection with rank {rank} broke: {error}"))
}

fn write_words(mut socket: &UnixStream, words: &[u64]) -> std::io::Result<()> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    socket.write_all(&bytes)
}

fn read_words<const N: usize>(mut socket: &UnixStream) -> std::io::Result<[u64; N]> {
    let mut words = [0; N];
    for word in &mut words {
        let mut bytes = [0; 8];
        socket.read_exact(&mut bytes)?;
        *word = u64::from_le_bytes(bytes);
    }
    Ok(words)
}

fn read_bytes(mut socket: &UnixStream, length: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    socket.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// An answer of rank 0 that is no result.
fn refuse(socket: &UnixStream, (code, text): &Failure) {
    // Whoever is just sending must stop, to read this.
    let _ = socket.shutdown(std::net::Shutdown::Read);
    let _ = write_words(socket, &[u64::from(*code), text.len() as u64]);
    let _ = { socket }.write_all(text.as_bytes());
}

/// Reads how long an answer is, or why there is none.
fn read_answer(socket: &UnixStream) -> Result<usize, Failure> {
    let [code, length] = read_words(socket).map_err(broken(0))?;
    if code == 0 {
        return Ok(length as usize);
    }
    let text = read_bytes(socket, length as usize).map_err(broken(0))?;
    Err((code as u32, String::from_utf8_lossy(&text).into_owned()))
}

impl Meeting {
    /// Meets the other ranks. `given_up` is asked now and then.
    pub fn join(
        name: &[u8],
        rank: u32,
        ranks: u32,
        given_up: &dyn Fn() -> bool,
    ) -> Result<Meeting, Failure> {
        let system = |error: std::io::Error| (INTERNAL, format!("the meeting failed: {error}"));
        let address = SocketAddr::from_abstract_name(name).map_err(system)?;
        let own = u64::from(std::process::id());
        let (sockets, processes) = if rank == 0 {
            host(&UnixListener::bind_addr(&address).map_err(system)?, ranks, own, given_up)?
        } else {
            let socket = loop {
                match UnixStream::connect_addr(&address) {
                    Ok(socket) => break socket,
                    Err(_) if given_up() => return Err((INTERNAL, "it was aborted".into())),
                    Err(_) => std::thread::sleep(LOOK),
                }
            };
            write_words(&socket, &[u64::from(rank), u64::from(ranks), own]).map_err(broken(0))?;
            // Rank 0 answers when all have come, which may be never.
            socket.set_read_timeout(Some(LOOK)).map_err(system)?;
            let mut first = [0; 1];
            loop {
                match { &socket }.read(&mut first) {
                    Ok(0) => return Err((REMOTE, "rank 0 has gone".into())),
                    Ok(_) => break,
                    Err(error) if error.kind() != ErrorKind::WouldBlock => {
                        return Err(broken(0)(error));
                    }
                    Err(_) if given_up() => return Err((INTERNAL, "it was aborted".into())),
                    Err(_) => {}
                }
            }
            socket.set_read_timeout(None).map_err(system)?;
            let count = read_answer(&socket)?;
            let mut processes = Vec::new();
            for _ in 0..count {
                let [process] = read_words(&socket).map_err(broken(0))?;
                processes.push(process);
            }
            (vec![socket], processes)
        };
        let mut watched = Vec::new();
        for (other, process) in processes.into_iter().enumerate() {
            let pid = i32::try_from(process).ok().and_then(Pid::from_raw);
            if let Some(pid) = pid.filter(|_| process != own) {
                let gone = |_| (REMOTE, format!("rank {other} has gone"));
                watched.push((other as u32, pidfd_open(pid, PidfdFlags::empty()).map_err(gone)?));
            }
        }
        Ok(Meeting { rank, ranks, sockets, processes: watched })
    }

    /// Handles of all sockets, with which another thread can end what waits in them.
    pub fn breakers(&self) -> Vec<UnixStream> {
        self.sockets.iter().filter_map(|socket| socket.try_clone().ok()).collect()
    }

    /// Does the `number`-th collective with what this rank gives, and returns what it gets.
    pub fn exchange(
        &self,
        number: u64,
        call: Collective,
        given: Vec<u8>,
    ) -> Result<Vec<u8>, Failure> {
        if self.rank == 0 {
            let done = self.compute(number, call, given);
            if let Err(failure) = &done {
                self.sockets.iter().for_each(|socket| refuse(socket, failure));
            }
            return done;
        }
        let socket = &self.sockets[0];
        let [kind, count, dtype, operation, root] = call.to_words();
        let header = [number, kind, count, dtype, operation, root, given.len() as u64];
        // Where sending fails, the answer says why.
        let _ = write_words(socket, &header).and_then(|()| { socket }.write_all(&given));
        let length = read_answer(socket)?;
        read_bytes(socket, length).map_err(broken(0))
    }

    /// Rank 0's part: to take what the others give, and to answer.
    fn compute(&self, number: u64, call: Collective, given: Vec<u8>) -> Result<Vec<u8>, Failure> {
        let mut contributions = vec![given];
        for (socket, other) in self.sockets.iter().zip(1..) {
            let words: [u64; 7] = read_words(socket).map_err(broken(other))?;
            let [their_number, kind, count, dtype, operation, root, length] = words;
            let theirs = Collective::from_words([kind, count, dtype, operation, root]);
            if (their_number, theirs) != (number, call) {
                let text = format!(
                    "ranks disagree: call {number} of rank 0 is {call}, and call {their_number} \
                     of rank {other} is {theirs}"
                );
                eprintln!("fake NCCL: {text}");
                return Err((INVALID_USAGE, text));
            }
            contributions.push(read_bytes(socket, length as usize).map_err(broken(other))?);
        }
        let mut results = call.results(&contributions).into_iter();
        let own = results.next().unwrap_or_default();
        for ((socket, result), other) in self.sockets.iter().zip(results).zip(1..) {
            let sent = write_words(socket, &[0, result.len() as u64])
                .and_then(|()| { socket }.write_all(&result));
            sent.map_err(broken(other))?;
        }
        Ok(own)
    }
}

/// Rank 0's part of the meeting: sockets by rank, and the processes of all ranks.
fn host(
    listener: &UnixListener,
    ranks: u32,
    own: u64,
    given_up: &dyn Fn() -> bool,
) -> Result<(Vec<UnixStream>, Vec<u64>), Failure> {
    let system = |error: std::io::Error| (INTERNAL, format!("the meeting failed: {error}"));
    listener.set_nonblocking(true).map_err(system)?;
    let mut come: Vec<Option<(UnixStream, u64)>> = (1..ranks).map(|_| None).collect();
    while come.iter().any(Option::is_none) {
        let socket = match listener.accept() {
            Ok((socket, _)) => socket,
            Err(_) if given_up() => return Err((INTERNAL, "it was aborted".into())),
            Err(_) => {
                std::thread::sleep(LOOK);
                continue;
            }
        };
        socket.set_nonblocking(false).map_err(system)?;
        let Ok([rank, theirs, process]) = read_words(&socket) else { continue };
        let place = (rank as usize).checked_sub(1).and_then(|place| come.get_mut(place));
        let failure = match place {
            _ if theirs != u64::from(ranks) => {
                Some((INVALID_ARGUMENT, format!("rank {rank} says {theirs} ranks, rank 0 {ranks}")))
            }
            Some(place @ None) => {
                *place = Some((socket, process));
                continue;
            }
            _ => {
                Some((INVALID_USAGE, format!("rank {rank} has come twice, or is none of {ranks}")))
            }
        };
        if let Some(failure) = failure {
            for socket in come.iter().flatten().map(|(socket, _)| socket).chain([&socket]) {
                let _ = { socket }.write_all(&[1]);
                refuse(socket, &failure);
            }
            return Err(failure);
        }
    }
    let (sockets, others): (Vec<_>, Vec<_>) = come.into_iter().flatten().unzip();
    let processes: Vec<u64> = std::iter::once(own).chain(others).collect();
    for (socket, rank) in sockets.iter().zip(1..) {
        let sent = { socket }.write_all(&[1]);
        let words: Vec<u64> =
            [0, processes.len() as u64].into_iter().chain(processes.clone()).collect();
        sent.and_then(|()| write_words(socket, &words)).map_err(broken(rank))?;
    }
    Ok((sockets, processes))
}
