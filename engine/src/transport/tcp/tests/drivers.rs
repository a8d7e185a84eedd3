//! Choosing a driver, sleeping and waking, and bounds.

#![forbid(unsafe_code)]

use super::*;
use std::io::Write;

#[test]
fn each_driver_says_what_it_is() {
    assert!(transport(TcpDriver::Auto, 4).description().starts_with("tcp: io_uring ("));
    let plain = transport(TcpDriver::Poll, 4).description();
    assert_eq!(plain, "tcp: plain sockets, because BPS_TCP_DRIVER=poll");
}

#[test]
fn a_transport_made_on_one_thread_serves_another() {
    for driver in DRIVERS {
        let mut tcp = transport(driver, 1);
        let (here, mut peer) = connection();
        let thread = std::thread::spawn(move || {
            tcp.attach(LaneId(0), Link::Tcp(here.into())).expect("a fresh socket");
            until_header(&mut tcp);
        });
        peer.write_all(&header(0, 0)).expect("room");
        thread.join().expect("it heard the header");
    }
}

/// Runs this in a thread whose system calls of these numbers are denied.
fn denied<T: Send>(calls: &[i64], run: impl FnOnce() -> T + Send) -> T {
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
    let rules = calls.iter().map(|&call| (call, Vec::new())).collect();
    let deny = SeccompAction::Errno(libc::EPERM as u32);
    let arch = std::env::consts::ARCH.try_into().expect("an architecture that seccomp knows");
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, deny, arch).expect("a filter");
    let program: BpfProgram = filter.try_into().expect("a program");
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            seccompiler::apply_filter(&program).expect("a thread may filter itself");
            run()
        });
        thread.join().expect("the thread does not panic")
    })
}

#[test]
fn where_io_uring_is_denied_plain_sockets_serve() {
    for (call, name) in [
        (libc::SYS_io_uring_setup, "io_uring_setup"),
        (libc::SYS_io_uring_register, "io_uring_register"),
        (libc::SYS_io_uring_enter, "io_uring_enter"),
    ] {
        denied(&[call], || {
            let mut tcp = transport(TcpDriver::Auto, 2);
            assert_eq!(
                tcp.description(),
                format!(
                    "tcp: plain sockets, because {name} was denied: \
                     Operation not permitted (os error 1)"
                )
            );
            let (here, mut peer) = connection();
            tcp.attach(LaneId(0), Link::Tcp(here.into())).expect("a fresh socket");
            peer.write_all(&header(0, 0)).expect("room");
            until_header(&mut tcp);
        });
    }
}

#[test]
fn where_io_uring_is_denied_and_asked_for_the_error_has_a_remedy() {
    denied(&[libc::SYS_io_uring_setup], || {
        let waker = Waker::new().expect("an eventfd");
        let Err(error) = Tcp::new(waker, TcpDriver::Uring, 2) else {
            panic!("io_uring is denied in this thread");
        };
        let text = error.to_string();
        assert!(matches!(error, TcpError::Uring(_)), "{text}");
        for word in ["io_uring_setup was denied", "seccomp", "BPS_TCP_DRIVER=auto or poll"] {
            assert!(text.contains(word), "{text}");
        }
    });
}

#[test]
fn another_thread_wakes_the_sleeper_every_time() {
    for driver in DRIVERS {
        let waker = Waker::new().expect("an eventfd");
        let mut tcp = Tcp::new(waker.clone(), driver, 1).expect("a driver");
        let mut events = Vec::new();
        for round in 0..20 {
            tcp.poll(&mut events);
            waker.prepare();
            let other = waker.clone();
            let thread = std::thread::spawn(move || other.wake());
            let start = Instant::now();
            tcp.block(Duration::from_secs(90));
            assert!(start.elapsed() < PATIENCE, "{driver:?} slept through wake {round}");
            waker.awake();
            thread.join().expect("it only wakes");
        }
        assert!(events.is_empty());
    }
}

#[test]
fn a_wake_seen_by_a_poll_is_not_slept_over() {
    for driver in DRIVERS {
        let waker = Waker::new().expect("an eventfd");
        let mut tcp = Tcp::new(waker.clone(), driver, 1).expect("a driver");
        let mut events = Vec::new();
        tcp.poll(&mut events);
        waker.prepare();
        waker.wake();
        tcp.poll(&mut events);
        tcp.poll(&mut events);
        let start = Instant::now();
        tcp.block(Duration::from_secs(90));
        assert!(start.elapsed() < PATIENCE, "{driver:?} slept though it had been woken");
        waker.awake();
    }
}

#[test]
fn a_sleep_ends_with_its_time_or_with_traffic() {
    for driver in DRIVERS {
        let (here, mut peer) = connection();
        let mut tcp = transport(driver, 1);
        tcp.attach(LaneId(0), Link::Tcp(here.into())).expect("a fresh socket");
        let mut events = Vec::new();
        tcp.poll(&mut events);
        tcp.poll(&mut events);
        tcp.block(Duration::from_millis(1));
        // A signal, here of the ring that was dropped before, may cut one sleep short, but not
        // five.
        let slept = (0..5).any(|_| {
            let start = Instant::now();
            tcp.block(Duration::from_millis(30));
            start.elapsed() >= Duration::from_millis(29)
        });
        assert!(slept, "{driver:?} did not sleep");
        let thread = std::thread::spawn(move || {
            peer.write_all(&header(0, 0)).expect("room");
            peer
        });
        let start = Instant::now();
        while events.is_empty() {
            tcp.block(Duration::from_secs(90));
            tcp.poll(&mut events);
        }
        assert!(start.elapsed() < PATIENCE, "{driver:?} slept through traffic");
        thread.join().expect("it only writes");
    }
}

#[test]
fn an_idle_ring_never_enters_the_kernel() {
    // With this filter an enter fails in a way that panics: idle polls must not enter.
    let filter = {
        use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
        let rules = [(libc::SYS_io_uring_enter, Vec::new())].into_iter().collect();
        let arch = std::env::consts::ARCH.try_into().expect("an architecture");
        let trap = SeccompAction::Errno(libc::ENOTRECOVERABLE as u32);
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, trap, arch);
        let program: BpfProgram = filter.expect("a filter").try_into().expect("a program");
        program
    };
    // A ring serves one thread, and the filter stays with it: a thread of its own makes both.
    std::thread::spawn(move || {
        let (here, _peer) = connection();
        let mut tcp = transport(TcpDriver::Uring, 1);
        tcp.attach(LaneId(0), Link::Tcp(here.into())).expect("a fresh socket");
        let mut events = Vec::new();
        tcp.poll(&mut events);
        tcp.poll(&mut events);
        seccompiler::apply_filter(&filter).expect("a thread may filter itself");
        for _ in 0..1_000 {
            tcp.poll(&mut events);
        }
        assert!(events.is_empty());
        // Dropping it needs the kernel, which this thread may not enter any more.
        std::mem::forget(tcp);
    })
    .join()
    .expect("no poll entered the kernel");
}

#[test]
fn lanes_that_cannot_be_attached() {
    for driver in DRIVERS {
        let mut tcp = transport(driver, 1);
        let ((one, _one), (two, _two), (three, _three)) =
            (sockets(false), sockets(false), sockets(false));
        tcp.attach(LaneId(0), Link::Tcp(one)).expect("a fresh socket");
        let error = tcp.attach(LaneId(0), Link::Tcp(two)).expect_err("it is taken");
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        let error = tcp.attach(LaneId(1), Link::Tcp(three)).expect_err("there is one lane");
        assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded);
    }
}

#[test]
fn a_poll_returns_a_bounded_number_of_events() {
    for driver in DRIVERS {
        let lanes = 3;
        let (links, peers): (Vec<_>, Vec<_>) = (0..lanes).map(|_| sockets(true)).unzip();
        let mut tcp = transport(driver, lanes);
        for (lane, link) in links.into_iter().enumerate() {
            tcp.attach(LaneId(lane as u32), Link::Tcp(link)).expect("a fresh socket");
            for token in 0..LANE_FRAMES_MAX as u64 {
                post(&mut tcp, lane as u32, &[], token).expect("room");
            }
            assert_eq!(post(&mut tcp, lane as u32, &[], 0), Err(Full));
        }
        let (mut events, mut sent) = (Vec::new(), 0);
        let start = Instant::now();
        while sent < lanes as usize * LANE_FRAMES_MAX {
            events.clear();
            tcp.poll(&mut events);
            assert!(events.len() <= EVENTS_MAX);
            sent += events.len();
            assert!(start.elapsed() < PATIENCE, "{sent} sent");
        }
        drop(peers);
    }
}
