//! What becomes of a lane when its device tells of faults, and of memory that it takes or refuses.

use super::*;
use crate::mem::Readable;
use crate::transport::{Carried, Grant, Link};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::Ordering::SeqCst;

mod answers;
mod fake;
mod gpu;

use fake::Fake;

const LANE: LaneId = LaneId(0);

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (one, listener.accept().unwrap().0)
}

type Linked = Result<RdmaLink, RdmaError>;

fn links(left: &Arc<Rails>, right: &Arc<Rails>) -> (Linked, Linked) {
    let (one, other) = sockets();
    let options = RdmaOptions { slot_bytes: 4096, slots: 8 };
    std::thread::scope(|scope| {
        let dialed = scope.spawn(|| connect(one, left, 0, options));
        let accepted = accept(other, right, options);
        (dialed.join().unwrap(), accepted)
    })
}

/// Two drivers with one lane between them, over two devices.
fn pair(left: &Arc<Rails>, right: &Arc<Rails>) -> [Rdma; 2] {
    let (dialed, accepted) = links(left, right);
    [(left, dialed), (right, accepted)].map(|(rails, link)| {
        let mut driver = Rdma::new(Waker::new().unwrap(), Arc::clone(rails)).unwrap();
        driver.attach(LANE, Link::Rdma(Box::new(link.unwrap()))).unwrap();
        driver
    })
}

/// Sends a frame and returns what landed.
fn transfer(from: &mut Rdma, to: &mut Rdma, payload: &[u8]) -> Vec<u8> {
    let mut memory = vec![0; payload.len()];
    // SAFETY: borrowed until it has landed, which it does only once.
    let payload = unsafe { Readable::of(payload) };
    // SAFETY: left alone until the payload has landed.
    let into = unsafe { Writable::of(&mut memory) };
    from.post(LANE, &Frame::new([7; 64], payload, 0)).unwrap();
    let mut events = Vec::new();
    for _ in 0..1000 {
        events.clear();
        from.poll(&mut events);
        to.poll(&mut events);
        for event in &events {
            match event {
                Event::Header { .. } => to.land(LANE, Landing::Into(into)),
                Event::Landed { .. } => return memory,
                Event::Closed { cause, .. } => panic!("{cause}"),
                _ => {}
            }
        }
    }
    panic!("the frame did not land");
}

/// How a lane ended after at most two looks at its device.
fn end(driver: &mut Rdma) -> Option<Cause> {
    let mut events = Vec::new();
    for _ in 0..2 {
        driver.arm();
        driver.poll(&mut events);
    }
    events.iter().find_map(|event| match event {
        Event::Closed { cause, .. } => Some(*cause),
        _ => None,
    })
}

#[test]
fn faults_of_the_device_end_the_lanes_that_they_are_of() {
    for (event, word) in [
        (ffi::EVENT_CQ_ERR, "overran"),
        (ffi::EVENT_DEVICE_FATAL, "reset or removed"),
        (ffi::EVENT_PORT_ERR, "port went down"),
        (ffi::EVENT_QP_FATAL, "fatal"),
        (ffi::EVENT_QP_REQ_ERR, "protocol"),
        (ffi::EVENT_QP_ACCESS_ERR, "may not"),
    ] {
        let here = Fake::new(&format!("events{event}"));
        let there = Fake::new(&format!("peer{event}"));
        let [mut left, mut right] = pair(&here.rails(false), &there.rails(false));
        let sent = vec![3; 9000];
        assert_eq!(transfer(&mut left, &mut right, &sent), sent);
        // Another port of the device, another queue or pair, and good news end nothing.
        here.tell(ffi::EVENT_PORT_ERR, 2);
        here.tell(ffi::EVENT_QP_FATAL, 12345);
        here.tell(ffi::EVENT_CQ_ERR, 12345);
        here.tell(9, 1);
        assert_eq!(end(&mut left), None, "event {event}");
        let element = match event {
            ffi::EVENT_PORT_ERR => 1,
            ffi::EVENT_CQ_ERR => left.rails.all()[0].received.as_ptr().addr() as u64,
            _ => left.lane(LANE).unwrap().pair().address() as u64,
        };
        here.tell(event, element);
        let cause = end(&mut left).expect("the lane ends");
        assert_eq!(cause, Cause::RdmaEvent { event });
        assert!(cause.to_string().contains(word), "{cause}");
        assert_eq!(end(&mut right), Some(Cause::Peer), "event {event}");
    }
}

#[test]
fn memory_that_cannot_be_locked_is_told_to_both_ends_with_limit_need_and_remedy() {
    let (here, there) = (Fake::new("locked"), Fake::new("unlocked"));
    there.registering.store(libc::ENOMEM, SeqCst);
    let (dialed, accepted) = links(&here.rails(false), &there.rails(false));
    let (dialed, accepted) = (dialed.err().unwrap(), accepted.err().unwrap());
    assert!(matches!(accepted, RdmaError::Locked { need: 33_792, .. }), "{accepted}");
    for word in ["33792 bytes", "RLIMIT_MEMLOCK is", "ulimit -l unlimited", "docker run --ulimit"] {
        assert!(accepted.to_string().contains(word), "{accepted}");
        assert!(dialed.to_string().contains(word), "{dialed}");
    }
    assert_eq!(here.regions.load(SeqCst), 0, "what was registered is given back");
}

#[test]
fn registered_payloads_are_sent_from_where_they_lie_and_others_copied() {
    let (here, there) = (Fake::new("ranges"), Fake::new("ranges' peer"));
    let [mut left, mut right] = pair(&here.rails(false), &there.rails(false));
    let memory: Vec<u8> = (0..40_000u32).map(|at| (at % 251).to_le_bytes()[0]).collect();
    let base = NonNull::from(&memory[0]);
    let lanes = here.regions.load(SeqCst);
    // SAFETY: the memory outlives the driver.
    unsafe {
        left.register(base, 10_000).unwrap();
        left.register(base, 5_000).unwrap();
        left.register(base, 30_000).unwrap();
    }
    assert_eq!(here.regions.load(SeqCst) - lanes, 2, "each byte is registered once");
    let rails = Arc::clone(&left.rails);
    let mut copied = 0;
    // Within one registration; across two; behind both; too short.
    for (at, length, is_copied) in [
        (0, 10_000, false),
        (12_000, 18_000, false),
        (9_000, 5_000, true),
        (30_000, 2_000, true),
        (100, 1_000, true),
    ] {
        let sent = &memory[at..at + length];
        assert_eq!(transfer(&mut left, &mut right, sent), sent);
        copied += if is_copied { length as u64 } else { 0 };
        assert_eq!(rails.counters().staged_bytes.load(SeqCst), copied, "{length} bytes at {at}");
    }
    here.registering.store(libc::ENOMEM, SeqCst);
    // SAFETY: the memory has 40,000 bytes and outlives the driver.
    let refused = unsafe { left.register(base, 40_000) };
    assert!(matches!(refused, Err(RdmaError::Locked { need: 10_000, .. })));
    drop((left, right, rails));
    assert_eq!(here.regions.load(SeqCst), 0, "all registrations end with the driver");
}

#[test]
fn paging_on_demand_is_used_where_it_is_wanted_and_all_of_it_there() {
    let all = ffi::ODP_SUPPORT | ffi::ODP_SUPPORT_IMPLICIT;
    for (index, (general, rc, word)) in [
        (all, ffi::ODP_SUPPORT_WRITE, "sent from in place"),
        (ffi::ODP_SUPPORT, ffi::ODP_SUPPORT_WRITE, "can't do it for all memory"),
        (all, 1, "can't do it"),
        (0, 0, "can't do it for all memory"),
    ]
    .into_iter()
    .enumerate()
    {
        let (here, there) = (Fake::new(&format!("odp{index}")), Fake::new(&format!("no{index}")));
        here.paging.store(general, SeqCst);
        here.paging_rc.store(rc, SeqCst);
        let rails = here.rails(true);
        assert!(rails.description().contains(word), "{}", rails.description());
        let [mut left, mut right] = pair(&rails, &there.rails(false));
        let sent = vec![9; 20_000];
        assert_eq!(transfer(&mut left, &mut right, &sent), sent);
        let copied = if index == 0 { 0 } else { 20_000 };
        assert_eq!(rails.counters().staged_bytes.load(SeqCst), copied, "{}", rails.description());
    }
}

#[test]
fn a_driver_that_is_dropped_delivers_what_it_took() {
    let (here, there) = (Fake::new("dropped"), Fake::new("dropped one's peer"));
    let [mut left, mut right] = pair(&here.rails(false), &there.rails(false));
    let payload = [1u8; 1000];
    // SAFETY: nothing changes it.
    let frame = Frame::new([7; 64], unsafe { Readable::of(&payload) }, 0);
    let (mut events, mut sent, mut landed, mut closed) = (Vec::new(), 0, 0, None);
    for _ in 0..10 {
        left.post(LANE, &frame).unwrap();
    }
    while sent < 10 {
        events.clear();
        left.poll(&mut events);
        sent += events.iter().filter(|event| matches!(event, Event::Sent { .. })).count();
    }
    drop(left);
    let mut memory = [0u8; 1000];
    // SAFETY: nobody looks at it.
    let into = unsafe { Writable::of(&mut memory) };
    while closed.is_none() {
        events.clear();
        right.poll(&mut events);
        for event in &events {
            match event {
                Event::Header { .. } => right.land(LANE, Landing::Into(into)),
                Event::Landed { .. } => landed += 1,
                Event::Closed { cause, .. } => closed = Some(*cause),
                _ => {}
            }
        }
    }
    assert_eq!((landed, closed), (10, Some(Cause::Peer)));
}
