//! How lanes end, in each state, and that the caller's memory is its own from then on.

#![forbid(unsafe_code)]

use super::*;
use std::io::{Read, Write};

/// A transport with one lane, and the other end of it.
fn one_lane(driver: TcpDriver) -> (Tcp, TcpStream) {
    let (here, peer) = connection();
    let mut tcp = transport(driver, 1);
    tcp.attach(LaneId(0), Link::Tcp(here.into())).expect("a fresh socket");
    (tcp, peer)
}

fn settle(tcp: &mut Tcp) {
    // Two polls submit and reap what can be done at once.
    let mut events = Vec::new();
    tcp.poll(&mut events);
    tcp.poll(&mut events);
    assert!(events.is_empty(), "{events:?}");
}

#[test]
fn this_end_closes_an_idle_lane_once_and_the_id_is_free() {
    for driver in DRIVERS {
        let (mut tcp, mut peer) = one_lane(driver);
        settle(&mut tcp);
        tcp.close(LaneId(0));
        tcp.close(LaneId(0));
        until_closed(&mut tcp, Cause::Local);
        settle(&mut tcp);
        assert_eq!(peer.read(&mut [0; 8]).expect("an orderly end"), 0);
        for _ in 0..50 {
            let (here, mut peer) = connection();
            tcp.attach(LaneId(0), Link::Tcp(here.into())).expect("the id is free again");
            peer.write_all(&header(0, 0)).expect("room");
            until_header(&mut tcp);
            tcp.close(LaneId(0));
            until_closed(&mut tcp, Cause::Local);
        }
    }
}

/// Writes until the kernel takes no more.
fn fill(peer: &mut TcpStream) {
    peer.set_nonblocking(true).expect("a socket");
    while peer.write(&[0x77; 4096]).is_ok() {}
    peer.set_nonblocking(false).expect("a socket");
}

#[test]
fn what_was_sent_before_a_close_arrives_though_the_peer_goes_on_sending() {
    for driver in DRIVERS {
        let (here, mut peer) = connection();
        // So that much of what is sent is still this end's when the lane closes.
        let small = socket2::SockRef::from(&peer).set_recv_buffer_size(4096);
        small.expect("a smaller buffer");
        let mut tcp = transport(driver, 1);
        tcp.attach(LaneId(0), Link::Tcp(here.into())).expect("a fresh socket");
        let payload = vec![7; 16 << 10];
        let (mut events, mut sent) = (Vec::new(), 0);
        for token in 0..8 {
            post(&mut tcp, 0, &payload, token).expect("room for eight frames");
        }
        let start = Instant::now();
        while sent < 2 || start.elapsed() < Duration::from_millis(50) {
            tcp.poll(&mut events);
            sent += events.drain(..).filter(|event| matches!(event, Event::Sent { .. })).count();
        }
        fill(&mut peer);
        tcp.close(LaneId(0));
        until_closed(&mut tcp, Cause::Local);
        fill(&mut peer);
        tcp.look(Duration::from_secs(1));
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let end = peer.read_to_end(&mut bytes);
            (bytes.len(), end.map(drop))
        });
        while !reader.is_finished() {
            assert!(start.elapsed() < PATIENCE, "it reads for ever");
            tcp.look(Duration::from_secs(1) + start.elapsed().min(Duration::from_secs(1)));
            std::thread::sleep(Duration::from_millis(5));
        }
        let (count, end) = reader.join().expect("no panic");
        end.expect("an orderly end");
        let frame = HEADER_BYTES + payload.len();
        assert!(count >= sent * frame, "{driver:?}: {count} bytes of {sent} frames have come");
    }
}

#[test]
fn a_peer_that_never_closes_is_let_go() {
    for driver in DRIVERS {
        let (mut tcp, mut peer) = one_lane(driver);
        settle(&mut tcp);
        tcp.close(LaneId(0));
        until_closed(&mut tcp, Cause::Local);
        for second in 0..2 {
            tcp.look(Duration::from_secs(second));
            peer.write_all(&[1; 100]).expect("somebody throws it away");
        }
        tcp.look(Duration::from_secs(10));
        // The first write is answered by a reset, and the second one says so.
        let is_gone = |_| {
            std::thread::sleep(Duration::from_millis(5));
            peer.write_all(&[1; 100]).is_err()
        };
        assert!((0..1_000).any(is_gone), "{driver:?}: its socket is held for ever");
    }
}

#[test]
fn a_peer_that_does_not_read_for_long_keeps_its_lane() {
    for driver in DRIVERS {
        let (here, peer) = connection();
        let silence = Duration::from_millis(200);
        let mut tcp = transport(driver, 1).with_silence(silence);
        tcp.attach(LaneId(0), Link::Tcp(here.into())).expect("a fresh socket");
        let payload = vec![7; 8 << 20];
        for token in 0..4 {
            post(&mut tcp, 0, &payload, token).expect("room for four frames");
        }
        let start = Instant::now();
        let mut events = Vec::new();
        while start.elapsed() < 5 * silence {
            tcp.poll(&mut events);
            tcp.look(start.elapsed());
            tcp.block(Duration::from_millis(10));
        }
        let is_closed = |event: &Event| matches!(event, Event::Closed { .. });
        assert!(!events.iter().any(is_closed), "{driver:?}: {events:?}");
        assert!(events.len() < 4, "{driver:?}: the socket took all: this test shows nothing");
        drop(peer);
    }
}

#[test]
fn memory_is_untouched_after_a_close_within_a_payload() {
    for driver in DRIVERS {
        for length in [1_000usize, 3 << 20] {
            let (mut tcp, mut peer) = one_lane(driver);
            peer.write_all(&header(length, 0)).expect("room");
            until_header(&mut tcp);
            let mut landing = vec![0u8; length];
            tcp.land(LaneId(0), into(&mut landing));
            peer.write_all(&[1; 500]).expect("room");
            settle(&mut tcp);
            tcp.close(LaneId(0));
            until_closed(&mut tcp, Cause::Local);
            landing.fill(7);
            // Whatever the peer still sends, nobody writes it here.
            let _ = peer.write_all(&[1; 400]);
            settle(&mut tcp);
            assert!(landing.iter().all(|&byte| byte == 7), "{driver:?}: written after Closed");
        }
    }
}

#[test]
fn closing_while_a_header_or_a_piece_waits_for_its_answer() {
    for driver in DRIVERS {
        for piece in [false, true] {
            let (mut tcp, mut peer) = one_lane(driver);
            peer.write_all(&header(4, 0)).expect("room");
            until_header(&mut tcp);
            if piece {
                tcp.land(LaneId(0), Landing::Pieces(4));
                peer.write_all(b"four").expect("room");
                until(&mut tcp, "piece", |_, event| matches!(event, Event::Piece { .. }));
            }
            tcp.close(LaneId(0));
            // Answers that come too late are no defect.
            if piece {
                tcp.consume(LaneId(0));
            } else {
                tcp.land(LaneId(0), Landing::Pieces(4));
            }
            until_closed(&mut tcp, Cause::Local);
            tcp.land(LaneId(0), Landing::Pieces(4));
            tcp.consume(LaneId(0));
            assert_eq!(post(&mut tcp, 0, &[], 0), Err(Full));
        }
    }
}

#[test]
fn closing_with_frames_that_the_peer_does_not_take() {
    for driver in DRIVERS {
        let (mut tcp, peer) = one_lane(driver);
        let part = payload(32 << 20, 3);
        post(&mut tcp, 0, &part, 1).expect("room");
        post(&mut tcp, 0, &part, 2).expect("room");
        settle(&mut tcp);
        tcp.close(LaneId(0));
        until(&mut tcp, "Closed", |_, event| match event {
            Event::Closed { cause, .. } => {
                assert_eq!(cause, Cause::Local);
                true
            }
            other => panic!("{other:?}: neither frame can have been sent"),
        });
        drop(part);
        drop(peer);
    }
}

#[test]
fn the_peer_closes_between_frames_and_its_last_frames_come_first() {
    for driver in DRIVERS {
        let (mut tcp, mut peer) = one_lane(driver);
        for number in 0..3 {
            peer.write_all(&header(5, number)).expect("room");
            peer.write_all(b"bytes").expect("room");
        }
        drop(peer);
        for _ in 0..3 {
            until_header(&mut tcp);
            // The end of the stream is behind this frame already; the frame comes nevertheless.
            settle(&mut tcp);
            let mut landing = [0u8; 5];
            tcp.land(LaneId(0), into(&mut landing));
            let mut events = Vec::new();
            tcp.poll(&mut events);
            assert!(matches!(events[0], Event::Landed { .. }), "{events:?}");
            assert_eq!(&landing, b"bytes");
            if events.len() > 1 {
                let mut rest = events.split_off(1);
                assert_eq!(rest.len(), 1, "{rest:?}");
                match rest.remove(0) {
                    Event::Header { .. } => tcp.land(LaneId(0), Landing::Pieces(5)),
                    Event::Closed { cause, .. } => return assert_eq!(cause, Cause::Peer),
                    other => panic!("{other:?}"),
                }
                break;
            }
        }
        until(&mut tcp, "the end", |tcp, event| match event {
            Event::Header { .. } => {
                tcp.land(LaneId(0), Landing::Pieces(5));
                false
            }
            Event::Piece { .. } => {
                tcp.consume(LaneId(0));
                false
            }
            Event::Closed { cause, .. } => {
                assert_eq!(cause, Cause::Peer);
                true
            }
            other => panic!("{other:?}"),
        });
    }
}

#[test]
fn a_large_frame_right_before_the_end_lands_whole() {
    for driver in DRIVERS {
        for round in 0..20 {
            let (mut tcp, mut peer) = one_lane(driver);
            let part = payload(1 << 20, round);
            let sent = part.clone();
            let thread = std::thread::spawn(move || {
                peer.write_all(&header(sent.len(), 0)).expect("room");
                peer.write_all(&sent).expect("somebody reads");
            });
            until_header(&mut tcp);
            let mut landing = vec![0u8; part.len()];
            tcp.land(LaneId(0), into(&mut landing));
            let mut landed = false;
            until(&mut tcp, "Closed", |_, event| match event {
                Event::Landed { .. } => {
                    landed = true;
                    false
                }
                Event::Closed { cause, .. } => {
                    assert!(landed && cause == Cause::Peer, "{driver:?}: {landed} {cause}");
                    true
                }
                other => panic!("{other:?}"),
            });
            assert!(landing == part);
            thread.join().expect("it only writes");
        }
    }
}

#[test]
fn the_peer_closes_within_a_frame() {
    for driver in DRIVERS {
        let (mut tcp, mut peer) = one_lane(driver);
        peer.write_all(&header(9, 0)[..40]).expect("room");
        settle(&mut tcp);
        drop(peer);
        until_closed(&mut tcp, Cause::Truncated);
        for (pieces, length) in [(false, 900usize), (true, 900), (false, 2 << 20), (true, 2 << 20)]
        {
            let (here, mut peer) = connection();
            tcp.attach(LaneId(0), Link::Tcp(here.into())).expect("the id is free again");
            peer.write_all(&header(length, 0)).expect("room");
            until_header(&mut tcp);
            let mut landing = vec![0u8; length];
            let in_pieces = Landing::Pieces(length);
            tcp.land(LaneId(0), if pieces { in_pieces } else { into(&mut landing) });
            peer.write_all(&[1; 100]).expect("room");
            settle(&mut tcp);
            drop(peer);
            until_closed(&mut tcp, Cause::Truncated);
        }
    }
}

/// Ends a connection the hard way.
fn reset(peer: TcpStream) {
    let socket = socket2::Socket::from(peer);
    socket.set_linger(Some(Duration::ZERO)).expect("a socket");
}

#[test]
fn a_reset_is_an_error_of_the_kernel() {
    for driver in DRIVERS {
        let (mut tcp, peer) = one_lane(driver);
        settle(&mut tcp);
        reset(peer);
        until_closed(&mut tcp, Cause::Os(libc::ECONNRESET));
    }
}

#[test]
fn a_standing_lane_notices_a_dead_peer_when_it_posts() {
    for driver in DRIVERS {
        let (mut tcp, mut peer) = one_lane(driver);
        peer.write_all(&header(100, 0)).expect("room");
        until_header(&mut tcp);
        reset(peer);
        let part = payload(1 << 20, 4);
        for token in 0..4 {
            post(&mut tcp, 0, &part, token).expect("room");
        }
        until(&mut tcp, "Closed", |_, event| match event {
            Event::Closed { cause: Cause::Os(errno), .. } => {
                assert!([libc::ECONNRESET, libc::EPIPE].contains(&errno), "{errno}");
                true
            }
            Event::Sent { .. } => false,
            other => panic!("{other:?}"),
        });
    }
}

#[test]
fn the_last_words_of_a_peer_that_takes_nothing_are_heard() {
    for driver in DRIVERS {
        let (here, peer) = UnixStream::pair().expect("a socket pair");
        let mut peer = peer;
        let mut tcp = transport(driver, 1);
        tcp.attach(LaneId(0), Link::Tcp(here.into())).expect("a fresh socket");
        for number in 0..3 {
            peer.write_all(&header(0, number)).expect("room");
        }
        peer.shutdown(std::net::Shutdown::Read).expect("open");
        peer.shutdown(std::net::Shutdown::Write).expect("open");
        post(&mut tcp, 0, b"nobody reads this", 1).expect("room");
        let mut heard = 0;
        until(&mut tcp, "Closed", |tcp, event| match event {
            Event::Header { header, .. } => {
                heard += 1;
                tcp.land(LaneId(0), Landing::Pieces(length_in(&header)));
                false
            }
            Event::Closed { cause, .. } => {
                assert_eq!(cause, Cause::Peer);
                true
            }
            other => panic!("{other:?}"),
        });
        assert_eq!(heard, 3);
    }
}

#[test]
fn dropping_the_transport_frees_what_is_in_flight() {
    for driver in DRIVERS {
        let (mut tcp, mut peer) = one_lane(driver);
        let (part, mut landing) = (payload(32 << 20, 5), vec![0u8; 1 << 20]);
        peer.write_all(&header(landing.len(), 0)).expect("room");
        until_header(&mut tcp);
        tcp.land(LaneId(0), into(&mut landing));
        post(&mut tcp, 0, &part, 1).expect("room");
        settle(&mut tcp);
        drop(tcp);
        drop(part);
        landing.fill(7);
        let _ = peer.write_all(&[1; 4096]);
        assert!(landing.iter().all(|&byte| byte == 7));
    }
}
