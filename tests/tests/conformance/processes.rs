//! A shared-memory lane between two processes, one of which is killed.

use super::makers::{Kind, Node, World};
use super::sleeping::{LONG, echo, round_trip};
use super::traffic::header;
use bps_engine::mem::Readable;
use bps_engine::transport::shm::{self, ShmOptions};
use bps_engine::transport::{Cause, Driver, Event, Frame, LaneId, Link};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Instant;

const LANE: LaneId = LaneId(0);
const LENGTH: usize = (1 << 20) + 64;

/// The other process: it sends everything back until its lane closes.
#[test]
#[ignore = "the other process of `a_killed_process_ends_its_lanes`"]
fn child() {
    let Ok(input) = std::io::stdin().as_fd().try_clone_to_owned() else { return };
    let stream = UnixStream::from(input);
    if stream.peer_addr().is_err() {
        eprintln!("skipped: nobody started this as the other process");
        return;
    }
    let world = World::new(Kind::Shm);
    let seat = world.seat();
    let link = shm::accept(&stream, &seat.waker, None).unwrap();
    let mut node = Node::new(&world, seat);
    node.driver.attach(LANE, Link::Shm(link)).unwrap();
    echo(&mut node, LENGTH);
}

#[test]
fn a_killed_process_ends_its_lanes() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes::child", "--ignored", "--nocapture"])
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let world = World::new(Kind::Shm);
    let seat = world.seat();
    let link = shm::offer(&ours, &seat.waker, ShmOptions::default()).unwrap();
    // The lane has a copy of its own; the other process has the other end.
    drop(ours);
    let mut node = Node::new(&world, seat);
    node.driver.attach(LANE, Link::Shm(link)).unwrap();

    let payload: Vec<u8> = (0..LENGTH).map(|index| index.to_le_bytes()[0] ^ 0x5c).collect();
    let mut memory = vec![0u8; LENGTH];
    let post = |node: &mut Node| {
        let header = header(0, LENGTH);
        // SAFETY: nobody writes it.
        let frame = Frame::new(header, unsafe { Readable::of(&payload) }, 0);
        node.driver.post(LANE, &frame).unwrap();
    };
    for _ in 0..20 {
        memory.fill(0);
        post(&mut node);
        round_trip(&mut node, &mut memory);
        assert!(memory == payload);
    }
    // Killed while it has nothing to send: the lane is between frames.
    other.kill().unwrap();
    let start = Instant::now();
    let cause = loop {
        node.sleep(LONG);
        let events = node.poll();
        assert!(start.elapsed() < LONG, "the death of the peer was not noticed");
        match events[..] {
            [] => {}
            [Event::Closed { cause, .. }] => break cause,
            ref other => panic!("{other:?}"),
        }
    };
    assert_eq!(cause, Cause::Peer);
    other.wait().unwrap();
}
