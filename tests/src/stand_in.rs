//! A stand-in for a scheduler that knows the job key: it passes all messages on, and the test may
//! change what the scheduler says. So a lane of a job with a key can be led through a relay, as a
//! device on its path would be.

use bps_engine::control::{
    Acceptor, Connection, ControlLink, Hello, JobKey, LinkReceiver, LinkSender, Listener, Socket,
};
use bps_engine::proto::messages::{NodeMessage, SchedulerMessage};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long the scheduler may take to listen.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often a thread looks whether its other end is gone.
const TICK: Duration = Duration::from_millis(100);

/// A running stand-in; it takes no more connections once it is dropped.
pub struct StandIn {
    port: u16,
    _acceptor: Acceptor,
}

impl StandIn {
    /// Stands in for the scheduler at this address, on a port of loopback. `change` gets each of
    /// its messages.
    ///
    /// # Panics
    /// When loopback has no free port.
    #[must_use]
    pub fn start(
        scheduler: SocketAddr,
        key: &JobKey,
        change: impl Fn(&mut SchedulerMessage) + Clone + Send + 'static,
    ) -> StandIn {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let own = key.clone();
        let admit = move |_: usize, _: Hello, socket: Socket, _| {
            let (Socket::Tcp(stream), key, change) = (socket, own.clone(), change.clone()) else {
                return;
            };
            std::thread::spawn(move || pass(stream, scheduler, &key, change));
        };
        let listeners = vec![Listener::Tcp(listener)];
        let acceptor = Acceptor::start(listeners, key.clone(), admit, |line| eprintln!("{line}"));
        StandIn { port, _acceptor: acceptor.expect("a thread") }
    }

    /// Where it listens.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }
}

/// Passes messages between a node and the scheduler until one of them is gone.
fn pass(
    node: TcpStream,
    scheduler: SocketAddr,
    key: &JobKey,
    change: impl Fn(&mut SchedulerMessage) + Send + 'static,
) {
    let start = std::time::Instant::now();
    let link = loop {
        match ControlLink::dial(scheduler, key, PATIENCE) {
            Ok(link) => break link,
            Err(error) if start.elapsed() > PATIENCE => return eprintln!("{error}"),
            Err(_) => std::thread::sleep(TICK / 10),
        }
    };
    let (sender, receiver) = link.split();
    let connection = Arc::new(Mutex::new(Connection::accept(key)));
    let back = (node.try_clone().expect("a descriptor"), Arc::clone(&connection));
    std::thread::spawn(move || to_node(back.0, &back.1, receiver, change));
    to_scheduler(node, &connection, &sender);
    sender.shutdown();
}

fn to_scheduler(mut node: TcpStream, connection: &Mutex<Connection>, sender: &LinkSender) {
    let mut bytes = [0; 64 << 10];
    while let Ok(count @ 1..) = node.read(&mut bytes) {
        let mut connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(answer) = connection.push(&bytes[..count]) else { return };
        if node.write_all(&answer).is_err() {
            return;
        }
        while let Ok(Some(message)) = connection.next_message::<NodeMessage>() {
            if sender.send(&message).is_err() {
                return;
            }
        }
    }
}

fn to_node(
    mut node: TcpStream,
    connection: &Mutex<Connection>,
    mut receiver: LinkReceiver,
    change: impl Fn(&mut SchedulerMessage),
) {
    loop {
        match receiver.receive(TICK) {
            Ok(None) => {}
            Ok(Some(mut message)) => {
                change(&mut message);
                let mut connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
                let bytes = connection.encode(&message).expect("it came in one message");
                if node.write_all(&bytes).is_err() {
                    return;
                }
            }
            Err(_) => {
                let _ = node.shutdown(Shutdown::Both);
                return;
            }
        }
    }
}
