//! A rank between two epochs whose scheduler falls silent, beside another one.

use super::*;
use crate::base::lock;
use bps_engine::base::Epoch;
use bps_engine::control::{Acceptor, ControlLink, Inbox, JobKey, Listener, Socket, encode};
use bps_engine::proto::messages::{Node, Origin};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};

const SOON: Duration = Duration::from_secs(10);
const BEATS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(1000));

/// Accepts connections, and says what it is told to say.
struct Scheduler {
    _acceptor: Acceptor,
    port: u16,
    admitted: Mutex<Receiver<Socket>>,
}

impl Scheduler {
    fn start() -> Scheduler {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (admit, admitted) = channel();
        let admit = move |_, _, socket, _| drop(admit.send(socket));
        let listeners = vec![Listener::Tcp(listener)];
        let acceptor = Acceptor::start(listeners, JobKey::open(), admit, |_| {}).unwrap();
        Scheduler { _acceptor: acceptor, port, admitted: Mutex::new(admitted) }
    }

    fn accept(&self) -> Peer {
        let admitted = lock(&self.admitted).recv_timeout(SOON).unwrap();
        let Socket::Tcp(socket) = admitted else { panic!("it is a TCP listener") };
        socket.set_read_timeout(Some(SOON)).unwrap();
        Peer { socket, inbox: Inbox::new() }
    }
}

/// The scheduler's end of a connection.
struct Peer {
    socket: TcpStream,
    inbox: Inbox,
}

impl Peer {
    fn say(&mut self, message: &SchedulerMessage) {
        self.socket.write_all(&encode(message).unwrap()).unwrap();
    }

    /// What comes next that is no heartbeat; `None` at the end.
    fn hear(&mut self) -> Option<NodeMessage> {
        loop {
            match self.inbox.next_message().unwrap() {
                Some(NodeMessage::Heartbeat { .. }) => continue,
                Some(message) => return Some(message),
                None => {}
            }
            let mut bytes = [0; 512];
            match self.socket.read(&mut bytes) {
                Ok(0) => return None,
                Ok(count) => self.inbox.push(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Whether nothing but heartbeats has come, and the connection is open.
    fn is_held(&mut self) -> bool {
        self.socket.set_nonblocking(true).unwrap();
        let mut bytes = [0; 1 << 16];
        let read = self.socket.read(&mut bytes);
        match read {
            Ok(0) => return false,
            Ok(count) => self.inbox.push(&bytes[..count]),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        while let Some(message) = self.inbox.next_message().unwrap() {
            if !matches!(message, NodeMessage::Heartbeat { .. }) {
                return false;
            }
        }
        true
    }
}

fn config() -> Config {
    Config { root_uri: "127.0.0.1".into(), ..Config::default() }
}

/// A rank that has registered with one scheduler, and finds another one when it dials again.
fn between(one: &Scheduler, another: &Scheduler, former: Option<u64>) -> Attendant {
    let key = JobKey::open();
    let link = ControlLink::connect("127.0.0.1", one.port, &key, SOON).unwrap();
    let door = link.door(&key).unwrap();
    let (sender, receiver) = link.split();
    let node = Node::Server {
        cores: Vec::new(),
        shm: None,
        rdma: false,
        colocated: false,
        preferred: None,
    };
    let register = Register {
        node,
        host: "here".to_owned(),
        host_id: "here".to_owned(),
        pid: 1,
        instance: 0,
        session: door.session,
        former,
        release: "0".to_owned(),
        num_workers: 1,
        num_servers: 0,
        encrypt: false,
    };
    let wait = if former.is_some() { SOON } else { Duration::ZERO };
    Attendant {
        start: Instant::now(),
        pulse: Pulse::new("here", BEATS.0, BEATS.1, Duration::ZERO),
        sender,
        receiver,
        door,
        register,
        redial: Redial::to_register(("127.0.0.1", another.port), &key, BEATS),
        absence: Absence::new(wait),
    }
}

fn roster(term: u32) -> Roster {
    Roster {
        job: "job".into(),
        term,
        epoch: Epoch(2),
        size: 1,
        through_servers: false,
        index: 0,
        workers: Vec::new(),
        neighbours: Vec::new(),
        servers: Vec::new(),
        elastic: true,
        shrinks: false,
        change: None,
    }
}

fn over() -> SchedulerMessage {
    let (who, round) = (Origin::scheduler(), None);
    let reason = OverReason::Failed { who, message: "a reason".to_owned(), round };
    SchedulerMessage::Over { reason }
}

/// Waits for a roster while `play` is the two schedulers.
fn wait(attendant: &mut Attendant, play: impl FnOnce() + Send) -> Result<Roster, Missed> {
    std::thread::scope(|scope| {
        let playing = scope.spawn(play);
        let found = attendant.wait_for_roster(&config());
        playing.join().unwrap();
        found
    })
}

#[test]
fn a_scheduler_that_was_silent_keeps_its_rank_though_that_has_asked_another() {
    for says_over in [false, true] {
        let (one, another) = (Scheduler::start(), Scheduler::start());
        let mut attendant = between(&one, &another, Some(7));
        let session = attendant.register.session;
        let mut old = one.accept();
        let found = wait(&mut attendant, || {
            let mut new = another.accept();
            let Some(NodeMessage::Register(register)) = new.hear() else { panic!("no register") };
            assert_eq!(register.former, Some(7));
            assert_ne!(register.session, session);
            assert!(old.is_held());
            // The first answer of the old one is no proof that the others follow it.
            old.say(&SchedulerMessage::Heartbeat);
            std::thread::sleep(BEATS.0);
            assert!(new.is_held());
            if says_over {
                new.say(&over());
                new.socket.set_nonblocking(false).unwrap();
                assert_eq!(new.hear(), None);
            }
            old.say(&SchedulerMessage::Roster(roster(1)));
            new.socket.set_nonblocking(false).unwrap();
            assert_eq!(new.hear(), None);
        });
        assert_eq!(found.ok().map(|roster| roster.term), Some(1));
        assert_eq!(attendant.register.session, session);
        assert!(old.is_held());
    }
}

#[test]
fn another_scheduler_that_gives_a_roster_is_followed_and_the_silent_one_learns_so() {
    for is_closed in [false, true] {
        let (one, another) = (Scheduler::start(), Scheduler::start());
        let mut attendant = between(&one, &another, Some(7));
        let mut old = Some(one.accept());
        let mut session = 0;
        let found = wait(&mut attendant, || {
            let mut new = another.accept();
            let Some(NodeMessage::Register(register)) = new.hear() else { panic!("no register") };
            session = register.session;
            if is_closed {
                drop(old.take());
                // It is the only one from then on, and its rank looks no further.
                std::thread::sleep(10 * BEATS.0);
                new.say(&SchedulerMessage::Heartbeat);
            }
            new.say(&SchedulerMessage::Roster(roster(2)));
            if let Some(mut old) = old.take() {
                assert_eq!(old.hear(), Some(NodeMessage::Deposed { term: 2 }));
                assert_eq!(old.hear(), None);
            }
        });
        assert_eq!(found.ok().map(|roster| roster.term), Some(2));
        assert_eq!(attendant.register.session, session);
        assert_eq!(attendant.door.address.port(), another.port);
    }
}

#[test]
fn a_rank_that_is_new_ends_with_a_scheduler_that_falls_silent() {
    let (one, another) = (Scheduler::start(), Scheduler::start());
    let mut attendant = between(&one, &another, None);
    let old = one.accept();
    let found = attendant.wait_for_roster(&config());
    let is_silent = matches!(found, Err(Missed::Scheduler(None, StartError::SchedulerSilent(_))));
    assert!(is_silent && lock(&another.admitted).try_recv().is_err());
    drop(old);
}
