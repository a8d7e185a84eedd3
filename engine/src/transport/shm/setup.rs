//! Setting a lane up over a connected, authenticated unix stream: who sends which descriptors, and
//! what is checked.
//!
//! The worker offers a sealed memfd and its eventfd; the server answers with its eventfd and, if it
//! shares one, its arena. Nothing has a name, so nothing stays behind when both processes are
//! killed. Invariant: memory is mapped only if its file cannot shrink and has exactly the size that
//! was announced.

#![forbid(unsafe_code)]

use super::segment::{Layout, Mapping, Segment, ShmOptions};
use crate::limits::HANDSHAKE_SECONDS;
use crate::transport::Waker;
use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FallocateFlags, MemfdFlags, OFlags, SealFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const MAGIC: [u8; 8] = *b"BPSSHM\x00\x01";
const MESSAGE_BYTES: usize = 24;
/// Seals that make a file safe to map: whoever holds it, it stays as long as it is.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A lane's shared memory, set up and not yet attached. Dropping it hangs up.
pub struct ShmLink {
    pub(super) segment: Segment,
    /// The stream that it was set up over: its end is the peer's end.
    pub(super) stream: Stream,
    /// What wakes the peer.
    pub(super) peer_event: OwnedFd,
    /// The peer's arena, read-only.
    pub(super) peer_arena: Option<Mapping>,
    /// Bytes of our arena, if the peer has mapped it.
    pub(super) arena_bytes: usize,
}

/// The worker's end: makes the shared memory and hands it to the server.
///
/// # Errors
/// No memory or descriptor is left, the options make no sense, or the peer does not do its part
/// within [`HANDSHAKE_SECONDS`].
pub fn offer(stream: &UnixStream, waker: &Waker, options: ShmOptions) -> io::Result<ShmLink> {
    let layout = Layout::new(options)?;
    let deadline = Instant::now() + Duration::from_secs(HANDSHAKE_SECONDS);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("bps-lane", flags)?;
    // Allocated now, so that a lack of memory is an error here and not a signal on the data path.
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, layout.bytes() as u64)?;
    rustix::fs::fcntl_add_seals(&file, SEALS | SealFlags::SEAL)?;
    let memory = Mapping::new(file.as_fd(), layout.bytes(), true)?;
    let numbers = [options.slot_bytes as u64, options.slots as u64];
    send(stream, numbers, &[file.as_fd(), waker.event()], deadline)?;

    let ([arena_bytes, zero], mut files) = receive(stream, deadline)?;
    let arena = if files.len() == 2 { files.pop() } else { None };
    if zero != 0 || arena.is_none() && arena_bytes != 0 {
        return Err(invalid("the server's answer has bytes that must be zero".to_owned()));
    }
    let (Some(peer_event), true) = (files.pop(), files.is_empty()) else {
        return Err(invalid("the server sent no eventfd, or too many descriptors".to_owned()));
    };
    check_event(&peer_event)?;
    let peer_arena = match arena {
        Some(arena) => Some(map_sealed(&arena, arena_bytes, false)?),
        None => None,
    };
    let segment = Segment::new(memory, layout, 0);
    Ok(ShmLink { segment, stream: Stream::keep(stream)?, peer_event, peer_arena, arena_bytes: 0 })
}

/// The server's end: takes what [`offer`] made. `arena` is a memfd and its size: what
/// [`Shm::share`](super::Shm::share) then posts by reference. It must be sealed against every
/// change of size and every further writable mapping, as a shared [`Arena`](crate::mem::Arena) is.
///
/// # Errors
/// The peer does not do its part within [`HANDSHAKE_SECONDS`], or what it sent is not fit to be
/// mapped.
pub fn accept(
    stream: &UnixStream,
    waker: &Waker,
    arena: Option<(BorrowedFd<'_>, usize)>,
) -> io::Result<ShmLink> {
    let deadline = Instant::now() + Duration::from_secs(HANDSHAKE_SECONDS);
    let ([slot_bytes, slots], files) = receive(stream, deadline)?;
    // A peer's number: the layout refuses what is too large.
    let count = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    let layout = Layout::new(ShmOptions { slot_bytes: count(slot_bytes), slots: count(slots) })?;
    let Ok([file, peer_event]) = <[OwnedFd; 2]>::try_from(files) else {
        return Err(invalid("the worker did not send its memory and its eventfd".to_owned()));
    };
    check_event(&peer_event)?;
    let memory = map_sealed(&file, layout.bytes() as u64, true)?;
    let segment = Segment::new(memory, layout, 1);
    let event = waker.event();
    let arena_bytes = match arena {
        Some((arena, bytes)) => {
            let wanted = SEALS | SealFlags::FUTURE_WRITE;
            let seals = rustix::fs::fcntl_get_seals(arena)?;
            if !seals.contains(wanted) {
                return Err(invalid(format!(
                    "the arena has seals {seals:?} and needs {wanted:?} before a peer may see it"
                )));
            }
            send(stream, [bytes as u64, 0], &[event, arena], deadline)?;
            bytes
        }
        None => {
            send(stream, [0, 0], &[event], deadline)?;
            0
        }
    };
    Ok(ShmLink {
        segment,
        stream: Stream::keep(stream)?,
        peer_event,
        peer_arena: None,
        arena_bytes,
    })
}

/// The stream of a lane. Dropping it tells the peer that this end is gone, even if somebody kept a
/// copy open.
pub(super) struct Stream(OwnedFd);

impl Stream {
    fn keep(stream: &UnixStream) -> io::Result<Stream> {
        Ok(Stream(rustix::io::fcntl_dupfd_cloexec(stream, 0)?))
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // It can only fail when the peer is gone already.
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Maps a file of the peer after its size and seals were found safe.
fn map_sealed(file: &OwnedFd, bytes: u64, write: bool) -> io::Result<Mapping> {
    let found = rustix::fs::fstat(file)?.st_size;
    let found = u64::try_from(found).expect("the kernel knows no file of a negative size");
    let seals = rustix::fs::fcntl_get_seals(file)?;
    if found != bytes || bytes == 0 || !seals.contains(SEALS) {
        return Err(invalid(format!(
            "the peer's memory has {found} bytes and seals {seals:?}, not {bytes} bytes and \
             {SEALS:?}"
        )));
    }
    Mapping::new(file.as_fd(), usize::try_from(bytes).map_err(io::Error::other)?, write)
}

/// Whether this is an eventfd that a write cannot block on: the data path writes to it.
fn check_event(event: &OwnedFd) -> io::Result<()> {
    let path = format!("/proc/self/fd/{}", event.as_raw_fd());
    let what = std::fs::read_link(path)?;
    let flags = rustix::fs::fcntl_getfl(event)?;
    if what.as_os_str() != "anon_inode:[eventfd]" || !flags.contains(OFlags::NONBLOCK) {
        return Err(invalid(format!("the peer sent {what:?}, not a non-blocking eventfd")));
    }
    Ok(())
}

/// Waits until the stream is ready for this, at most until the deadline.
fn wait(stream: &UnixStream, flags: PollFlags, deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(stream, flags)], Some(&timeout)) {
        Ok(0) => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("the peer did not set its end of shared memory up in {HANDSHAKE_SECONDS} s"),
        )),
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

pub(super) fn send(
    stream: &UnixStream,
    numbers: [u64; 2],
    files: &[BorrowedFd<'_>],
    deadline: Instant,
) -> io::Result<()> {
    let mut message = [0; MESSAGE_BYTES];
    message[..8].copy_from_slice(&MAGIC);
    message[8..16].copy_from_slice(&numbers[0].to_le_bytes());
    message[16..].copy_from_slice(&numbers[1].to_le_bytes());
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(files)), "room for two descriptors");
    let mut sent = 0;
    while sent < MESSAGE_BYTES {
        wait(stream, PollFlags::OUT, deadline)?;
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(stream, &[IoSlice::new(&message[sent..])], &mut control, flags) {
            Ok(count) => sent += count,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        control.clear();
    }
    Ok(())
}

pub(super) fn receive(
    stream: &UnixStream,
    deadline: Instant,
) -> io::Result<([u64; 2], Vec<OwnedFd>)> {
    let mut message = [0; MESSAGE_BYTES];
    let mut files = Vec::new();
    let mut received = 0;
    while received < MESSAGE_BYTES {
        wait(stream, PollFlags::IN, deadline)?;
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let into = &mut [IoSliceMut::new(&mut message[received..])];
        match recvmsg(stream, into, &mut control, flags) {
            Ok(got) if got.bytes == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => received += got.bytes,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                files.extend(rights);
            }
        }
    }
    if message[..8] != MAGIC {
        return Err(invalid(format!("{:?} opens no shared-memory lane", &message[..8])));
    }
    let number = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&message[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    Ok(([number(8), number(16)], files))
}
