//! The switch: frames of each port go to the port that their destination names, as the rules say.

use super::Rule;
use bps_engine::transport::sim::Random;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The largest frame of a TAP device.
const FRAME_BYTES_MAX: usize = 65_536;
/// Frames of a port that are taken before the others get their turn.
const BATCH: usize = 64;
/// Delayed frames at most; more are lost, as in a switch whose buffer is full.
const DELAYED_MAX: usize = 100_000;
const ETHERNET_BYTES: usize = 14;
/// Longest queue in front of a way that has a rate; what would wait longer is lost.
const QUEUE: Duration = Duration::from_millis(50);

/// A host's device.
pub(super) struct Port(OwnedFd);

impl Port {
    pub(super) fn new(device: OwnedFd) -> Port {
        Port(device)
    }

    fn send(&self, frame: &[u8]) {
        // A full device loses the frame, as a full queue of a switch does.
        let _ = rustix::io::write(&self.0, frame);
    }
}

/// What the switch's thread and its owner share.
pub(super) struct Shared {
    hosts: usize,
    ways: Mutex<Vec<Way>>,
    stop: OwnedFd,
}

/// From one host to another.
#[derive(Clone, Copy, Default)]
struct Way {
    rule: Rule,
    lost: u64,
    /// When all that has been let through has passed, if there is a rate.
    free: Option<Instant>,
}

impl Way {
    /// How long a frame of so many bytes takes from now on until it has passed, or nothing if the
    /// queue is full.
    fn queue(&mut self, bytes: usize, now: Instant) -> Option<Duration> {
        let Some(rate) = self.rule.rate else { return Some(Duration::ZERO) };
        let begins = self.free.map_or(now, |free| free.max(now));
        if begins - now > QUEUE {
            self.lost += 1;
            return None;
        }
        let ends = begins + Duration::from_nanos(bytes as u64 * 1_000_000_000 / rate.max(1));
        self.free = Some(ends);
        Some(ends - now)
    }
}

impl Shared {
    pub(super) fn new(hosts: usize) -> std::io::Result<Shared> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Shared { hosts, ways: Mutex::new(vec![Way::default(); hosts * hosts]), stop })
    }

    fn ways(&self) -> MutexGuard<'_, Vec<Way>> {
        self.ways.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, from: usize, to: usize, rule: Rule) {
        self.ways()[from * self.hosts + to].rule = rule;
    }

    pub(super) fn lost(&self, from: usize, to: usize) -> u64 {
        self.ways()[from * self.hosts + to].lost
    }

    pub(super) fn stop(&self) {
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
    }
}

/// A frame on its way: when it is due, in which order it came, to whom.
type Delayed = Reverse<(Instant, u64, usize, Vec<u8>)>;

/// Forwards until the owner stops it.
pub(super) fn run(ports: &[Port], shared: &Shared) {
    let mut delayed: BinaryHeap<Delayed> = BinaryHeap::new();
    let mut sequence = 0;
    let mut random = Random::new(u64::from(std::process::id()));
    let mut bytes = vec![0; FRAME_BYTES_MAX];
    loop {
        let next = delayed.peek().map(|Reverse((due, ..))| *due);
        let left = next.map(|due| due.saturating_duration_since(Instant::now()));
        let mut fds: Vec<PollFd<'_>> =
            ports.iter().map(|port| PollFd::new(&port.0, PollFlags::IN)).collect();
        fds.push(PollFd::new(&shared.stop, PollFlags::IN));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        // An interrupted wait is a short one.
        let _ = poll(&mut fds, timeout.as_ref());
        if fds.pop().is_some_and(|stop| !stop.revents().is_empty()) {
            return;
        }
        drop(fds);
        let now = Instant::now();
        while delayed.peek().is_some_and(|Reverse((due, ..))| *due <= now) {
            let Some(Reverse((_, _, to, frame))) = delayed.pop() else { break };
            ports[to].send(&frame);
        }
        for (from, port) in ports.iter().enumerate() {
            for _ in 0..BATCH {
                let Ok(length) = rustix::io::read(&port.0, &mut bytes[..]) else { break };
                let frame = &mut bytes[..length];
                let Some(to) = destination(frame, ports.len()).filter(|&to| to != from) else {
                    continue;
                };
                let Some(delay) = pass(shared, from, to, frame, &mut random) else { continue };
                if delay.is_zero() {
                    ports[to].send(frame);
                } else if delayed.len() < DELAYED_MAX {
                    sequence += 1;
                    delayed.push(Reverse((Instant::now() + delay, sequence, to, frame.to_vec())));
                }
            }
        }
    }
}

/// The host that a frame is for: the last byte of its hardware address.
fn destination(frame: &[u8], hosts: usize) -> Option<usize> {
    match frame.get(..6)? {
        [2, 0, 0, 0, 0, host] => Some(usize::from(*host)).filter(|host| *host < hosts),
        _ => None,
    }
}

/// What the rule of its way does to a frame: how late it is, or nothing if it is lost.
fn pass(
    shared: &Shared,
    from: usize,
    to: usize,
    frame: &mut [u8],
    random: &mut Random,
) -> Option<Duration> {
    let mut chance = |fraction: f64| {
        const STEPS: u64 = 1 << 32;
        fraction > 0.0 && (random.below(STEPS) as f64) < fraction * STEPS as f64
    };
    let mut ways = shared.ways();
    let way = &mut ways[from * shared.hosts + to];
    let rule = way.rule;
    let is_large = rule.mtu.is_some_and(|mtu| frame.len() - ETHERNET_BYTES > mtu);
    if rule.block || is_large || chance(rule.drop) {
        way.lost += 1;
        return None;
    }
    if chance(rule.corrupt) {
        corrupt(frame, random);
    }
    Some(rule.delay + way.queue(frame.len(), Instant::now())?)
}

/// Flips a bit of a TCP payload and repairs the checksum, as the memory of a switch or a network
/// card can: TCP does not see it.
fn corrupt(frame: &mut [u8], random: &mut Random) {
    const TCP: u8 = 6;
    let ip = ETHERNET_BYTES;
    if frame.len() < ip + 40 || frame[12..14] != [8, 0] || frame[ip + 9] != TCP {
        return;
    }
    let tcp = ip + usize::from(frame[ip] & 15) * 4;
    let end =
        (ip + usize::from(u16::from_be_bytes([frame[ip + 2], frame[ip + 3]]))).min(frame.len());
    let Some(data) = frame.get(tcp + 12).map(|byte| tcp + usize::from(byte >> 4) * 4) else {
        return;
    };
    if data >= end {
        return;
    }
    let at = data + random.index(end - data);
    // The 16-bit word of the checksum that holds this byte, before and after.
    let word = tcp + (at - tcp) / 2 * 2;
    let read = |frame: &[u8]| {
        u16::from_be_bytes([frame[word], if word + 1 < end { frame[word + 1] } else { 0 }])
    };
    let before = read(frame);
    frame[at] ^= 1 << random.index(8);
    let after = read(frame);
    let old = u16::from_be_bytes([frame[tcp + 16], frame[tcp + 17]]);
    // RFC 1624: HC' = ~(~HC + ~m + m').
    let mut sum = u32::from(!old) + u32::from(!before) + u32::from(after);
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let new = !u16::try_from(sum).expect("folded to 16 bits");
    frame[tcp + 16..tcp + 18].copy_from_slice(&new.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum over a TCP segment without its pseudo-header.
    fn sum(segment: &[u8]) -> u16 {
        let words = segment.chunks(2).map(|pair| {
            u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]))
        });
        let mut sum: u32 = words.sum();
        while sum >> 16 != 0 {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        u16::try_from(sum).unwrap()
    }

    #[test]
    fn frames_of_a_way_with_a_rate_pass_one_after_the_other_and_fill_its_queue() {
        let rule = Rule { rate: Some(1_000_000), ..Rule::default() };
        let mut way = Way { rule, ..Way::default() };
        let now = Instant::now();
        let waits: Vec<_> = (1..=3).map(|_| way.queue(1000, now)).collect();
        assert_eq!(waits, [1, 2, 3].map(|number| Some(Duration::from_millis(number))));
        let taken = (0..100).filter(|_| way.queue(1000, now).is_some()).count();
        assert_eq!((taken, way.lost), (48, 52), "50 ms of 1 ms each are as much as waits");
        assert_eq!(way.queue(1000, now + QUEUE), Some(Duration::from_millis(2)));
    }

    #[test]
    fn a_corrupt_segment_has_one_bit_flipped_and_the_same_sum() {
        let mut random = Random::new(1);
        for length in 1..60 {
            let mut frame = vec![0x5a; ETHERNET_BYTES + 40 + length];
            frame[12..14].copy_from_slice(&[8, 0]);
            frame[ETHERNET_BYTES] = 0x45;
            let total = u16::try_from(40 + length).unwrap();
            frame[ETHERNET_BYTES + 2..ETHERNET_BYTES + 4].copy_from_slice(&total.to_be_bytes());
            frame[ETHERNET_BYTES + 9] = 6;
            frame[ETHERNET_BYTES + 32] = 0x50;
            let before = frame.clone();
            corrupt(&mut frame, &mut random);
            let flipped = |range: std::ops::Range<usize>| -> u32 {
                range.map(|at| (frame[at] ^ before[at]).count_ones()).sum()
            };
            assert_eq!(flipped(ETHERNET_BYTES + 40..frame.len()), 1, "{length}");
            let segment = ETHERNET_BYTES + 20;
            assert_eq!(sum(&frame[segment..]) % 0xffff, sum(&before[segment..]) % 0xffff);
        }
    }
}
