//! Acceptor, dialers and links against each other over loopback.

use super::*;
use crate::base::{Epoch, Rank};
use crate::limits::HANDSHAKES_MAX;
use crate::proto::handshake::{Dialing, PROOF_BYTES, VERSION};
use crate::proto::messages::{NodeMessage, SchedulerMessage};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(10);

fn key() -> JobKey {
    JobKey::from_bytes([7; PROOF_BYTES])
}

struct Setup {
    acceptor: Acceptor,
    address: SocketAddr,
    unix: String,
    admitted: Receiver<(usize, Hello, Socket)>,
    logged: Receiver<String>,
}

fn setup(name: &str) -> Setup {
    setup_with(name, key())
}

fn setup_with(name: &str, key: JobKey) -> Setup {
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap();
    let unix = format!("bps-test-{}-{name}", std::process::id());
    let unix_address = std::os::unix::net::SocketAddr::from_abstract_name(&unix).unwrap();
    let listeners =
        vec![Listener::Tcp(tcp), Listener::Unix(UnixListener::bind_addr(&unix_address).unwrap())];
    let (admit, admitted) = channel();
    let (log, logged) = channel();
    let acceptor = Acceptor::start(
        listeners,
        key,
        move |listener, hello, socket, _| admit.send((listener, hello, socket)).unwrap(),
        move |line| log.send(line.to_owned()).unwrap(),
    )
    .unwrap();
    Setup { acceptor, address, unix, admitted, logged }
}

#[test]
fn both_kinds_of_socket_are_admitted_and_carry_what_follows() {
    let setup = setup("kinds");
    let lane = Hello::lane(Rank(3), Epoch(1));
    let mut dialed = dial(setup.address, &key(), lane, SOON).unwrap();
    // Sent right behind the proof: it must not be taken for a part of the handshake.
    dialed.write_all(b"first bytes").unwrap();
    let (listener, hello, socket) = setup.admitted.recv_timeout(SOON).unwrap();
    assert_eq!((listener, hello), (0, lane));
    let Socket::Tcp(mut socket) = socket else { panic!("not TCP") };
    let mut bytes = [0; 11];
    socket.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"first bytes");

    let shm = Hello::shm_lane(Rank(2), Epoch(5));
    let mut dialed = dial_unix(&setup.unix, &key(), shm, SOON).unwrap();
    let (listener, hello, socket) = setup.admitted.recv_timeout(SOON).unwrap();
    assert_eq!((listener, hello), (1, shm));
    let Socket::Unix(mut socket) = socket else { panic!("not Unix") };
    socket.write_all(b"back").unwrap();
    let mut bytes = [0; 4];
    dialed.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"back");
}

#[test]
fn a_wrong_key_is_named_at_both_ends() {
    let setup = setup("wrong");
    for wrong in [JobKey::open(), JobKey::mint().unwrap()] {
        let error = dial(setup.address, &wrong, Hello::control(), SOON).unwrap_err();
        assert!(error.to_string().contains("the job key differs: set the same"), "{error}");
    }
    let line = setup.logged.recv_timeout(SOON).unwrap();
    assert!(line.contains("127.0.0.1") && line.contains("the job key differs"), "{line}");
    assert!(setup.admitted.try_recv().is_err());
}

#[test]
fn bad_peers_cost_their_own_connections_and_few_lines() {
    crate::host::raise_descriptor_limit(8192);
    let setup = setup("bad");
    // Half-open ones, more than may be pending at once.
    let mut idle = Vec::new();
    for at in 0..HANDSHAKES_MAX + 8 {
        let mut stream = TcpStream::connect(setup.address).unwrap();
        if at % 2 == 0 {
            stream.write_all(b"BPSH\x02").unwrap();
        }
        idle.push(stream);
    }
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 300], &[0xff; 32], b"BPSH\x0a", b"BPSH"] {
        let mut stream = TcpStream::connect(setup.address).unwrap();
        let _ = stream.write_all(garbage);
    }
    // An honest dialer still gets in, within the time of an eviction.
    let start = Instant::now();
    dial(setup.address, &key(), Hello::control(), SOON).unwrap();
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    setup.admitted.recv_timeout(SOON).unwrap();
    let seconds = usize::try_from(start.elapsed().as_secs()).unwrap() + 4;
    setup.acceptor.stop();
    assert!(setup.logged.iter().count() <= seconds);
    assert!(TcpStream::connect(setup.address).is_err(), "the listener must be closed after a stop");
}

/// 1,000 sockets that connect, perhaps send a hello, and connect again when they are sent away or
/// are not let in at once.
fn strangers(address: SocketAddr, stop: &AtomicBool) {
    const PATIENCE: Duration = Duration::from_millis(5);
    let hello = *Dialing::new(&JobKey::open(), Hello::control(), &[3; 16]).hello();
    let connect = || {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None);
        let socket = TcpStream::from(socket.unwrap());
        // In progress, as a rule.
        let _ = rustix::net::connect(&socket, &address);
        (socket, Instant::now())
    };
    let mut sockets: Vec<(TcpStream, Instant)> = (0..1000).map(|_| connect()).collect();
    while !stop.load(Ordering::Relaxed) {
        for (at, one) in sockets.iter_mut().enumerate() {
            let is_in = match one.0.read(&mut [0; 64]) {
                Ok(0) => false,
                Ok(_) => true,
                Err(error) => error.kind() == ErrorKind::WouldBlock,
            };
            if !is_in || one.1.elapsed() > PATIENCE && one.0.peer_addr().is_err() {
                *one = connect();
                if at % 2 == 0 {
                    let _ = one.0.write_all(&hello);
                }
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_crowd_that_reconnects_does_not_keep_honest_peers_out() {
    crate::host::raise_descriptor_limit(8192);
    let setup = setup("crowd");
    let (address, stop) = (setup.address, AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| strangers(address, &stop));
        }
        // Until the crowd has settled in.
        std::thread::sleep(Duration::from_millis(1500));
        let start = Instant::now();
        let honest: Vec<_> = (0..20)
            .map(|rank| {
                let hello = Hello::lane(Rank(rank), Epoch(1));
                scope.spawn(move || dial(address, &key(), hello, SOON))
            })
            .collect();
        let results: Vec<_> = honest.into_iter().map(|one| one.join().unwrap()).collect();
        stop.store(true, Ordering::Relaxed);
        for result in &results {
            assert!(result.is_ok(), "after {:?}: {result:?}", start.elapsed());
        }
    });
    let mut ranks: Vec<u32> =
        (0..20).map(|_| setup.admitted.recv_timeout(SOON).unwrap().1.rank.0).collect();
    ranks.sort_unstable();
    assert!(ranks.into_iter().eq(0..20));
}

#[test]
fn another_version_learns_ours() {
    let setup = setup("version");
    let mut stream = TcpStream::connect(setup.address).unwrap();
    let mut hello = [0; 32];
    let another = VERSION + 1;
    hello[..5].copy_from_slice(&[b'B', b'P', b'S', b'H', another]);
    stream.write_all(&hello).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert_eq!(&answer[..6], [b'B', b'P', b'S', b'H', VERSION, 1]);
    let said = format!("version {another} and this end {VERSION}");
    assert!(setup.logged.recv_timeout(SOON).unwrap().contains(&said));
}

#[test]
fn links_carry_messages_both_ways_and_never_wait_forever() {
    let (setup, key) = (setup_with("link", JobKey::open()), JobKey::open());
    let link = ControlLink::connect("localhost", setup.address.port(), &key, SOON)
        .expect("localhost resolves");
    link.notice_loss_after(Duration::from_secs(4)).unwrap();
    let (sender, mut receiver) = link.split();
    let (_, _, socket) = setup.admitted.recv_timeout(SOON).unwrap();
    let Socket::Tcp(mut socket) = socket else { panic!("not TCP") };
    // Many threads send; every message arrives whole.
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let sender = sender.clone();
            scope.spawn(move || {
                for request in 0..50 {
                    sender
                        .send(&NodeMessage::Barrier { request: thread * 1000 + request })
                        .unwrap();
                }
            });
        }
    });
    let mut inbox = Inbox::new();
    let mut requests = Vec::new();
    while requests.len() < 200 {
        let mut bytes = [0; 512];
        let count = socket.read(&mut bytes).unwrap();
        assert_ne!(count, 0);
        inbox.push(&bytes[..count]);
        while let Some(message) = inbox.next_message().unwrap() {
            let NodeMessage::Barrier { request } = message else { panic!("{message:?}") };
            requests.push(request);
        }
    }
    requests.sort_unstable();
    requests.dedup();
    assert_eq!(requests.len(), 200);

    assert_eq!(receiver.receive(Duration::from_millis(20)).unwrap(), None);
    let over = SchedulerMessage::BarrierDone { request: 7 };
    socket.write_all(&encode(&over).unwrap()).unwrap();
    assert_eq!(receiver.receive(SOON).unwrap(), Some(over.clone()));
    // What came before the end is still returned.
    socket.write_all(&encode(&over).unwrap()).unwrap();
    drop(socket);
    assert_eq!(receiver.receive(SOON).unwrap(), Some(over));
    assert!(matches!(receiver.receive(SOON), Err(LinkError::Closed)));
}

#[test]
fn a_receiver_is_woken_by_shutdown() {
    let (setup, key) = (setup_with("wake", JobKey::open()), JobKey::open());
    let (sender, mut receiver) =
        ControlLink::connect("127.0.0.1", setup.address.port(), &key, SOON).unwrap().split();
    let waiting = std::thread::spawn(move || receiver.receive(Duration::from_secs(60)));
    sender.shutdown();
    assert!(matches!(waiting.join().unwrap(), Err(LinkError::Closed)));
    assert!(matches!(sender.send(&NodeMessage::Barrier { request: 1 }), Err(LinkError::Closed)));
}

#[test]
fn the_last_word_arrives_although_nobody_has_read_what_came_before() {
    let (setup, key) = (setup_with("last", JobKey::open()), JobKey::open());
    let (sender, receiver) =
        ControlLink::connect("127.0.0.1", setup.address.port(), &key, SOON).unwrap().split();
    let (_, _, socket) = setup.admitted.recv_timeout(SOON).unwrap();
    let Socket::Tcp(mut socket) = socket else { panic!("not TCP") };
    let mut connection = Connection::accept(&key);
    // Answers that came while a path lost what went the other way.
    socket.write_all(&[0; 100]).unwrap();
    let leaving = std::thread::spawn(move || {
        sender.send(&NodeMessage::Leave { suspend: false }).unwrap();
        drop(receiver);
        sender.close(SOON)
    });
    std::thread::sleep(Duration::from_millis(100));
    let mut bytes = Vec::new();
    socket.read_to_end(&mut bytes).unwrap();
    drop(socket);
    assert!(leaving.join().unwrap(), "it has waited for more than the end");
    connection.push(&bytes).unwrap();
    assert_eq!(connection.next_message().unwrap(), Some(NodeMessage::Leave { suspend: false }));
}

#[test]
fn a_link_is_not_closed_for_ever() {
    let (setup, key) = (setup_with("patience", JobKey::open()), JobKey::open());
    let link = ControlLink::connect("127.0.0.1", setup.address.port(), &key, SOON).unwrap();
    let kept = setup.admitted.recv_timeout(SOON).unwrap();
    let (patience, begun) = (Duration::from_millis(50), Instant::now());
    assert!(!link.split().0.close(patience));
    assert!((patience..SOON).contains(&begun.elapsed()));
    drop(kept);
}

#[test]
fn a_knock_is_repeated_on_fresh_connections_until_it_is_answered_no_more() {
    let setup = setup("knock");
    let (address, round_trip) = (setup.address, Duration::ZERO);
    let door = Door { address, key: key(), session: 77, round_trip };
    let knocker = Knocker::start(door).unwrap();
    let knock = || {
        let (_, hello, socket) = setup.admitted.recv_timeout(SOON).unwrap();
        assert_eq!(hello, Hello::control());
        let Socket::Tcp(mut socket) = socket else { panic!("not TCP") };
        let mut connection = Connection::accept(&key());
        let mut greeting = [0; channel::GREETING_BYTES];
        socket.read_exact(&mut greeting).unwrap();
        socket.write_all(&connection.push(&greeting).unwrap()).unwrap();
        let mut bytes = [0; 512];
        let count = socket.read(&mut bytes).unwrap();
        assert!(connection.push(&bytes[..count]).unwrap().is_empty());
        let message = connection.next_message().unwrap();
        assert_eq!(message, Some(NodeMessage::Alive { session: 77 }));
        (socket, connection)
    };
    // The first one is not answered: another one comes.
    let silent = knock();
    let (mut socket, mut connection) = knock();
    drop(silent);
    let beat = connection.encode(&SchedulerMessage::Heartbeat).unwrap();
    socket.write_all(&beat).unwrap();
    let until = Instant::now() + SOON;
    let answer = loop {
        if let Some(answer) = knocker.answer() {
            break answer;
        }
        assert!(Instant::now() < until, "the answer was not handed on");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(answer, SchedulerMessage::Heartbeat);
    // On the way that works, it says again that the node lives, until nobody wants it to.
    let mut bytes = [0; 512];
    assert_ne!(socket.read(&mut bytes).unwrap(), 0);
    drop(knocker);
    let beat = connection.encode(&SchedulerMessage::Heartbeat).unwrap();
    socket.write_all(&beat).unwrap();
    while socket.read(&mut bytes).unwrap() > 0 {}
}

/// A link of a job with a key, and the scheduler's end of it.
fn sealed(setup: &Setup) -> (ControlLink, TcpStream, Connection) {
    let port = setup.address.port();
    let dialer = std::thread::spawn(move || ControlLink::connect("127.0.0.1", port, &key(), SOON));
    let (_, _, socket) = setup.admitted.recv_timeout(SOON).unwrap();
    let Socket::Tcp(mut socket) = socket else { panic!("not TCP") };
    let mut connection = Connection::accept(&key());
    // What is said before the dialer has greeted waits for it.
    let early = SchedulerMessage::BarrierDone { request: 1 };
    assert!(connection.encode(&early).unwrap().is_empty() && !connection.is_settled());
    let mut greeting = [0; channel::GREETING_BYTES];
    socket.read_exact(&mut greeting).unwrap();
    let answer = connection.push(&greeting).unwrap();
    assert!(connection.is_settled());
    socket.write_all(&answer).unwrap();
    let mut link = dialer.join().unwrap().unwrap();
    assert_eq!(link.receive(SOON).unwrap(), Some(early));
    (link, socket, connection)
}

#[test]
fn with_a_key_messages_are_encrypted_and_arrive() {
    let setup = setup("sealed");
    let (link, mut socket, mut connection) = sealed(&setup);
    link.send(&NodeMessage::Barrier { request: 4711 }).unwrap();
    let mut bytes = [0; 512];
    let count = socket.read(&mut bytes).unwrap();
    let text = String::from_utf8_lossy(&bytes[..count]);
    assert!(!text.contains("barrier") && !text.contains("4711"), "{text}");
    assert!(connection.push(&bytes[..count]).unwrap().is_empty());
    let message = connection.next_message().unwrap();
    assert_eq!(message, Some(NodeMessage::Barrier { request: 4711 }));
}

#[test]
fn a_link_says_by_name_that_its_messages_were_changed_or_cut() {
    let setup = setup("spoilt");
    let over = SchedulerMessage::BarrierDone { request: 7 };
    for what in ["changed", "repeated", "cut"] {
        let (mut link, mut socket, mut connection) = sealed(&setup);
        let good = connection.encode(&over).unwrap();
        let mut bad = connection.encode(&over).unwrap();
        match what {
            "changed" => bad[9] ^= 1,
            "repeated" => bad = good.clone(),
            _ => bad.truncate(9),
        }
        socket.write_all(&[good, bad].concat()).unwrap();
        let (here, there) = (link.local_address().unwrap(), setup.address);
        drop(socket);
        // What came whole before is whole.
        assert_eq!(link.receive(SOON).unwrap(), Some(over.clone()), "{what}");
        let error = link.receive(SOON).unwrap_err();
        match what {
            "cut" => assert!(matches!(error, LinkError::Truncated { .. }), "{error:?}"),
            _ => assert!(matches!(error, LinkError::Altered { .. }), "{error:?}"),
        }
        let text = error.to_string();
        assert!(text.contains(&format!("from the scheduler at {there} to {here}")), "{text}");
    }
}

#[test]
fn who_only_relayed_the_handshake_gets_no_further() {
    let setup = setup("relayed");
    let port = setup.address.port();
    let dialer = std::thread::spawn(move || ControlLink::connect("127.0.0.1", port, &key(), SOON));
    let (_, _, socket) = setup.admitted.recv_timeout(SOON).unwrap();
    let Socket::Tcp(mut socket) = socket else { panic!("not TCP") };
    // Without the key there is no answer but a guess.
    socket.write_all(&[9; channel::GREETING_BYTES]).unwrap();
    let error = dialer.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("not from who proved the job key"), "{error}");
    let mut connection = Connection::accept(&key());
    assert!(connection.push(&[9; channel::GREETING_BYTES]).is_err());
}
