//! Tests of shared-memory lanes beyond the contract: hostile peers, payloads by reference, set-up,
//! and what is left behind. The contract itself is tested in `tests/tests/conformance`.

use super::segment::{BROKEN, Extent, WAKE_PUBLISHED};
use super::*;
use crate::limits::{ALIGNMENT, HANDSHAKE_SECONDS, STAGING_BYTES};
use crate::mem::{Arena, Options, Readable, Writable};
use crate::transport::Cause;
use crate::transport::sim::Random;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

const LANE: LaneId = LaneId(0);
const OPTIONS: ShmOptions = ShmOptions { slot_bytes: 8192, slots: 3 };

fn link(waker: &Waker, arena: Option<&Arena>) -> (ShmLink, ShmLink) {
    let (one, other) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let offered = scope.spawn(|| offer(&one, waker, OPTIONS).unwrap());
        let arena = arena.map(|arena| (arena.memfd().unwrap(), arena.reserved_bytes()));
        let accepted = accept(&other, waker, arena).unwrap();
        (offered.join().unwrap(), accepted)
    })
}

fn driver(waker: &Waker, link: ShmLink) -> Shm {
    let mut driver = Shm::new(waker.clone()).unwrap();
    driver.attach(LANE, Link::Shm(link)).unwrap();
    driver
}

fn events(driver: &mut Shm) -> Vec<Event> {
    let mut events = Vec::new();
    driver.poll(&mut events);
    events
}

fn frame(payload: &[u8]) -> Frame {
    let mut header = [3; 64];
    header[..4].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
    // SAFETY: the tests keep payloads until they are sent, or their lane is gone.
    Frame::new(header, unsafe { Readable::of(payload) }, 9)
}

/// Lets a payload land in memory that the caller keeps.
fn into(landing: &mut [u8]) -> Landing {
    // SAFETY: the tests keep landings until they are whole, or their lane is gone.
    Landing::Into(unsafe { Writable::of(landing) })
}

/// A victim that does what its peer says, as far as the contract goes.
struct Victim {
    driver: Shm,
    memory: Vec<u8>,
    is_held: bool,
}

impl Victim {
    const LANDING_BYTES: usize = 40_000;
    const GUARD: u8 = 0xab;

    /// One turn; returns why the lane closed, if it did.
    fn turn(&mut self, random: &mut Random) -> Option<Cause> {
        if self.is_held && random.once_in(2) {
            self.is_held = false;
            self.driver.consume(LANE);
        }
        if random.once_in(4) {
            let _ = self.driver.post(LANE, &frame(&self.memory[..random.index(20_000)]));
        }
        if random.once_in(8) {
            self.driver.arm();
        }
        for event in events(&mut self.driver) {
            match event {
                Event::Header { header, .. } => {
                    let length = u32::from_le_bytes(*header.first_chunk().unwrap()) as usize;
                    if length > Self::LANDING_BYTES {
                        self.driver.close(LANE);
                        continue;
                    }
                    let landing = match random.once_in(2) {
                        true => Landing::Pieces(length),
                        false => into(&mut self.memory[ALIGNMENT..][..length]),
                    };
                    self.driver.land(LANE, landing);
                }
                Event::Piece { piece, .. } => {
                    assert!(piece.as_ptr().addr().is_multiple_of(ALIGNMENT) && piece.len() > 0);
                    // SAFETY: it is consumed in a later turn.
                    let bytes = unsafe { piece.lend().bytes() };
                    std::hint::black_box(bytes.iter().fold(0, |sum, byte| sum ^ byte));
                    self.is_held = true;
                }
                Event::Closed { cause, .. } => {
                    let end = &self.memory[ALIGNMENT + Self::LANDING_BYTES..];
                    let guards = self.memory[..ALIGNMENT].iter().chain(end);
                    assert!(guards.into_iter().all(|byte| *byte == Self::GUARD), "out of bounds");
                    return Some(cause);
                }
                Event::Landed { .. } | Event::Answered { .. } | Event::Sent { .. } => {}
            }
        }
        None
    }
}

/// The next extent of a peer that mostly keeps to the rules: `left` is what its payload lacks.
fn plausible(random: &mut Random, left: &mut usize) -> Extent {
    let first = (*left == 0).then(|| {
        *left = if random.once_in(40) { 60_000 } else { random.index(20_000) };
        let mut header = [0; 64];
        header[..8].copy_from_slice(&left.to_le_bytes());
        (header, *left)
    });
    let part = (1 + random.index(100)) * ALIGNMENT;
    let length = if random.once_in(2) { part.min(*left) } else { (*left).min(8192) };
    *left -= length;
    let offset = random.index((24_576 - length) / ALIGNMENT) * ALIGNMENT;
    let mut extent = Extent { first, in_arena: false, offset, length };
    let wrong = [0, 1, 63, 64, 100_000, (u32::MAX as usize) - 63, usize::MAX - 63];
    match random.below(120) {
        0 => extent.first = Some(([1; 64], random.index(70_000))),
        1 => extent.first = None,
        2 => extent.in_arena = true,
        3 => extent.offset = wrong[random.index(wrong.len())],
        4 => extent.length = wrong[random.index(wrong.len())],
        5 => extent.offset += 24_576 - length,
        _ => {}
    }
    extent
}

#[test]
fn a_hostile_peer_ends_its_own_lane_at_worst() {
    let waker = Waker::new().unwrap();
    let arena_options = Options { name: "test".to_owned(), numa_node: None, shared: true };
    let arena = Arena::reserve(64 << 10, &arena_options).unwrap();
    let mut causes = std::collections::BTreeMap::new();
    for seed in 0..1500 {
        let mut random = Random::new(seed);
        // The hostile end is the server on odd seeds, with an arena to refer to.
        let (worker, server) = link(&waker, (seed % 4 == 1).then_some(&arena));
        let (hostile, honest) = if seed % 2 == 1 { (server, worker) } else { (worker, server) };
        let (mut producer, mut consumer) = hostile.segment.cursors();
        let mut victim = Victim {
            driver: driver(&waker, honest),
            memory: vec![Victim::GUARD; Victim::LANDING_BYTES + 2 * ALIGNMENT],
            is_held: false,
        };
        let (spoils, mut left) = (seed % 3 == 0, 0);
        let mut hostile = Some(hostile);
        let death = u32::try_from(random.index(150)).unwrap();
        for turn in 0..200 {
            if let Some(hostile) = &hostile {
                let words = hostile.segment.words();
                if spoils && random.once_in(100) {
                    let value = [0, 1, 2, 300, u32::MAX, turn][random.index(6)];
                    // Mostly the end blocks and cursors, which fill the first words.
                    let count = if random.once_in(2) { 192 } else { words.len() };
                    words[random.index(count)].store(value, crate::sync::Ordering::Relaxed);
                } else if let Ok(count @ 1..) = consumer.refresh() {
                    consumer.release(count.min(2));
                } else if producer.free().is_ok_and(|free| free > 0) {
                    hostile.segment.write(producer.index(), &plausible(&mut random, &mut left));
                    producer.publish(1);
                }
            }
            if let Some(cause) = victim.turn(&mut random) {
                *causes.entry(format!("{cause:?}")).or_insert(0) += 1;
                break;
            }
            if turn == death {
                hostile = None;
            }
        }
    }
    assert!(causes.get("Os(71)").is_some_and(|count| *count > 500), "{causes:?}");
    for (cause, least) in [("Local", 50), ("Truncated", 20), ("Peer", 20)] {
        assert!(causes.get(cause).is_some_and(|count| *count > least), "{cause}: {causes:?}");
    }
}

#[test]
fn another_length_than_the_header_says_closes_the_lane() {
    let waker = Waker::new().unwrap();
    let (one, other) = link(&waker, None);
    let (mut one, mut other) = (driver(&waker, one), driver(&waker, other));
    let payload = [5; 100];
    one.post(LANE, &frame(&payload)).unwrap();
    assert!(matches!(events(&mut one)[..], [Event::Sent { .. }]));
    assert!(matches!(events(&mut other)[..], [Event::Header { .. }]));
    other.land(LANE, Landing::Pieces(101));
    assert!(matches!(events(&mut other)[..], [Event::Closed { cause: BROKEN, .. }]));
    assert!(matches!(events(&mut one)[..], [Event::Closed { cause: Cause::Peer, .. }]));
}

/// A worker and a server that posts from its arena.
fn by_reference(bytes: usize) -> (Shm, Shm, crate::mem::Claim, Arena) {
    let waker = Waker::new().unwrap();
    let options = Options { name: "test".to_owned(), numa_node: None, shared: true };
    let mut arena = Arena::reserve(4 << 20, &options).unwrap();
    let claim = arena.claim(bytes).unwrap();
    let (worker, server) = link(&waker, Some(&arena));
    let (worker, mut server) = (driver(&waker, worker), driver(&waker, server));
    server.share(&arena);
    (worker, server, claim, arena)
}

#[test]
fn a_payload_in_the_arena_is_read_in_place_and_sent_when_read() {
    const BYTES: usize = 3 * STAGING_BYTES + 100;
    let (mut worker, mut server, _claim, arena) = by_reference(BYTES);
    // SAFETY: the arena has claimed this many bytes, which nobody else writes.
    let memory = unsafe { std::slice::from_raw_parts_mut(arena.base(), BYTES) };
    let mut random = Random::new(1);
    memory.fill_with(|| random.bits().to_le_bytes()[0]);
    for pieces in [false, true] {
        server.post(LANE, &frame(memory)).unwrap();
        assert!(events(&mut server).is_empty(), "the payload is still in use");
        assert!(matches!(events(&mut worker)[..], [Event::Header { .. }]));
        let mut landed = vec![0u8; BYTES];
        let in_pieces = Landing::Pieces(BYTES);
        worker.land(LANE, if pieces { in_pieces } else { into(&mut landed) });
        let mut done = 0;
        while done < BYTES {
            match events(&mut worker)[..] {
                [Event::Landed { .. }] => done = BYTES,
                [Event::Piece { piece, .. }] => {
                    // SAFETY: it is consumed below, once its bytes have been copied.
                    let bytes = unsafe { piece.lend().bytes() };
                    landed[done..done + bytes.len()].copy_from_slice(bytes);
                    done += bytes.len();
                    assert!(events(&mut server).is_empty(), "the payload is still in use");
                    worker.consume(LANE);
                }
                ref other => panic!("{other:?}"),
            }
        }
        assert!(landed == memory);
        assert!(events(&mut worker).is_empty());
        assert!(matches!(events(&mut server)[..], [Event::Sent { token: 9, .. }]));
    }
}

#[test]
fn what_a_closed_lane_referred_to_is_never_taken_for_the_payload() {
    for pieces in [false, true] {
        let (mut worker, mut server, _claim, arena) = by_reference(1 << 20);
        // SAFETY: claimed, and nobody writes it.
        let memory = unsafe { std::slice::from_raw_parts(arena.base(), 1 << 20) };
        server.post(LANE, &frame(memory)).unwrap();
        events(&mut server);
        assert!(matches!(events(&mut worker)[..], [Event::Header { .. }]));
        server.close(LANE);
        assert!(matches!(events(&mut server)[..], [Event::Closed { cause: Cause::Local, .. }]));
        // From here on the memory is the server's own again.
        let mut landed = vec![0u8; 1 << 20];
        let in_pieces = Landing::Pieces(1 << 20);
        worker.land(LANE, if pieces { in_pieces } else { into(&mut landed) });
        let truncated = Cause::Truncated;
        assert!(
            matches!(events(&mut worker)[..], [Event::Closed { cause, .. }] if cause == truncated)
        );
    }
}

#[test]
fn a_poster_rings_only_for_what_the_sleeper_waits_for() {
    let waker = Waker::new().unwrap();
    let (one, other) = link(&waker, None);
    let (mut one, mut other) = (driver(&waker, one), driver(&waker, other));
    let payload = [5; 100];
    let is_rung = || rustix::io::read(waker.fd(), &mut [0u8; 8]).is_ok();
    one.post(LANE, &frame(&payload)).unwrap();
    events(&mut one);
    assert!(!is_rung(), "nobody sleeps");
    assert!(other.arm(), "there is a header to read");
    assert!(matches!(events(&mut other)[..], [Event::Header { .. }]));
    assert!(!other.arm(), "only its owner can move the lane on");
    one.post(LANE, &frame(&payload)).unwrap();
    events(&mut one);
    assert!(!is_rung(), "the sleeper could do nothing about it");
    other.land(LANE, Landing::Pieces(100));
    assert!(matches!(events(&mut other)[..], [Event::Piece { .. }]));
    other.consume(LANE);
    assert!(matches!(events(&mut other)[..], [Event::Header { .. }]));
    other.land(LANE, Landing::Pieces(100));
    assert!(matches!(events(&mut other)[..], [Event::Piece { .. }]));
    other.consume(LANE);
    assert!(events(&mut other).is_empty() && !other.arm());
    let lane = one.lane(LANE).unwrap();
    assert_eq!(lane.peer_interest(), WAKE_PUBLISHED);
    one.post(LANE, &frame(&payload)).unwrap();
    events(&mut one);
    assert!(is_rung());
    one.post(LANE, &frame(&payload)).unwrap();
    events(&mut one);
    assert!(!is_rung(), "one ring wakes it");
}

fn memory(bytes: u64, seals: SealFlags) -> std::os::fd::OwnedFd {
    let file = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&file, seals).unwrap();
    file
}

#[test]
fn memory_that_could_shrink_or_events_that_could_block_are_refused() {
    let waker = Waker::new().unwrap();
    let sealed = SealFlags::SHRINK | SealFlags::GROW;
    let bytes = segment::Layout::new(OPTIONS).unwrap().bytes() as u64;
    let numbers = [OPTIONS.slot_bytes as u64, OPTIONS.slots as u64];
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let right = memory(bytes, sealed);
    let cases: [(&str, [u64; 2], &std::os::fd::OwnedFd, BorrowedFd<'_>, bool); 6] = [
        ("right", numbers, &right, waker.fd(), true),
        ("too short", numbers, &memory(bytes - 4096, sealed), waker.fd(), false),
        ("may shrink", numbers, &memory(bytes, SealFlags::GROW), waker.fd(), false),
        ("a pipe for an event", numbers, &right, pipe.as_fd(), false),
        ("slots that overflow", [1 << 40, 1 << 40], &right, waker.fd(), false),
        ("odd slots", [100, 4], &right, waker.fd(), false),
    ];
    for (name, numbers, file, event, is_right) in cases {
        let (one, other) = UnixStream::pair().unwrap();
        let deadline = Instant::now() + Duration::from_secs(HANDSHAKE_SECONDS);
        setup::send(&one, numbers, &[file.as_fd(), event], deadline).unwrap();
        let answer = accept(&other, &waker, None);
        assert_eq!(answer.is_ok(), is_right, "{name}: {:?}", answer.err());
    }
    let (one, other) = UnixStream::pair().unwrap();
    drop(one);
    assert!(accept(&other, &waker, None).is_err(), "a peer that hangs up");
    let (one, other) = UnixStream::pair().unwrap();
    std::io::Write::write_all(&mut &one, &[7; 24]).unwrap();
    assert!(accept(&other, &waker, None).is_err(), "a peer that talks something else");
    let unsealed = memory(4096, SealFlags::empty());
    let (one, other) = UnixStream::pair().unwrap();
    let deadline = Instant::now() + Duration::from_secs(HANDSHAKE_SECONDS);
    setup::send(&one, numbers, &[right.as_fd(), waker.fd()], deadline).unwrap();
    let answer = accept(&other, &waker, Some((unsealed.as_fd(), 4096)));
    assert!(answer.is_err(), "an arena of ours that a peer could write to");
}

/// The inodes of memfds that this process holds, by descriptor or by mapping.
fn memfds() -> std::collections::BTreeSet<u64> {
    use std::os::unix::fs::MetadataExt;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps.lines().filter(|line| line.contains("memfd:bps-lane"));
    let mut inodes: std::collections::BTreeSet<u64> =
        mapped.map(|line| line.split_whitespace().nth(4).unwrap().parse().unwrap()).collect();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let is_lane = std::fs::read_link(entry.path())
            .is_ok_and(|path| path.to_string_lossy().contains("memfd:bps-lane"));
        if let (true, Ok(data)) = (is_lane, std::fs::metadata(entry.path())) {
            inodes.insert(data.ino());
        }
    }
    inodes
}

#[test]
fn a_closed_lane_leaves_nothing_behind() {
    let waker = Waker::new().unwrap();
    let (one, other) = link(&waker, None);
    let inode = {
        let address = one.segment.words().as_ptr().addr();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let prefix = format!("{address:x}-");
        let line = maps.lines().find(|line| line.starts_with(&prefix)).unwrap();
        line.split_whitespace().nth(4).unwrap().parse::<u64>().unwrap()
    };
    let (mut one, mut other) = (driver(&waker, one), driver(&waker, other));
    assert!(memfds().contains(&inode));
    one.close(LANE);
    assert!(matches!(events(&mut one)[..], [Event::Closed { .. }]));
    assert!(matches!(events(&mut other)[..], [Event::Closed { .. }]));
    assert!(!memfds().contains(&inode), "its memory is still held");
}
