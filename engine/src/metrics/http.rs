//! The smallest HTTP server that a scrape needs: `GET /metrics` and `GET /healthz`, one answer a
//! connection.
//!
//! It runs on a control thread of its own. Invariant: no client can make it wait, grow, or keep
//! another one out: sockets never block, a request, a connection's life and the number of
//! connections are bounded, and the oldest connection makes room for the newest.

use crate::trace::log;
use crate::transport::Waker;
use crate::waits;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of a request; a scraper sends a few hundred.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// Connections at once.
const CONNECTIONS_MAX: usize = 32;
/// How long a connection may live.
const DEADLINE: Duration = Duration::from_secs(5);

/// A running server. It ends when this is dropped.
pub struct Exporter {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Exporter {
    /// Serves `/metrics` from `source`, which answers nothing if the page cannot be had now.
    ///
    /// # Errors
    /// The address is taken or not ours, or a thread or descriptor is missing.
    pub fn start(
        address: SocketAddr,
        source: impl Fn() -> Option<String> + Send + 'static,
    ) -> std::io::Result<Exporter> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let (stop, waker) = (Arc::new(AtomicBool::new(false)), Waker::new()?);
        let (stopped, woken) = (Arc::clone(&stop), waker.clone());
        // Not a thread of the harness: whatever went wrong here must not end a training job.
        let thread = std::thread::Builder::new()
            .name("bps-metrics".into())
            .spawn(move || run(&listener, &woken, &stopped, &source))?;
        Ok(Exporter { address, stop, waker, thread: Some(thread) })
    }

    /// Where it listens; the port is the kernel's choice if it was 0.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.waker.ring();
        // Its sockets do not block, so it sees `stop` at once, unless `source` keeps it. Its panic,
        // if it had one, has been printed.
        if let Some(Err(late)) = self.thread.take().map(waits::join) {
            log::warning!("{late}");
        }
    }
}

struct Connection {
    stream: TcpStream,
    since: Instant,
    request: Vec<u8>,
    answer: Option<Vec<u8>>,
    sent: usize,
}

fn run(
    listener: &TcpListener,
    waker: &Waker,
    stop: &AtomicBool,
    source: &dyn Fn() -> Option<String>,
) {
    let mut connections: Vec<Connection> = Vec::new();
    while !stop.load(Ordering::Acquire) {
        wait(listener, waker, &connections);
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    if stream.set_nonblocking(true).is_err() {
                        continue;
                    }
                    if connections.len() == CONNECTIONS_MAX {
                        connections.remove(0);
                    }
                    connections.push(Connection::new(stream));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => {
                    // No descriptor is left, most likely: the listener stays readable meanwhile.
                    std::thread::sleep(Duration::from_millis(50));
                    break;
                }
            }
        }
        connections.retain_mut(|connection| connection.step(source));
    }
}

fn wait(listener: &TcpListener, waker: &Waker, connections: &[Connection]) {
    let mut fds = Vec::with_capacity(2 + connections.len());
    fds.push(PollFd::from_borrowed_fd(waker.fd(), PollFlags::IN));
    fds.push(PollFd::new(listener, PollFlags::IN));
    for connection in connections {
        let writes = connection.answer.as_ref().is_some_and(|it| connection.sent < it.len());
        let flags = if writes { PollFlags::OUT } else { PollFlags::IN };
        fds.push(PollFd::new(&connection.stream, flags));
    }
    // Sockets wake it; the time is for deadlines alone.
    let timeout = Timespec { tv_sec: 1, tv_nsec: 0 };
    let _ = poll(&mut fds, (!connections.is_empty()).then_some(&timeout));
}

impl Connection {
    fn new(stream: TcpStream) -> Connection {
        Connection { stream, since: Instant::now(), request: Vec::new(), answer: None, sent: 0 }
    }

    /// Reads and writes what is possible. Says whether the connection stays.
    fn step(&mut self, source: &dyn Fn() -> Option<String>) -> bool {
        if self.since.elapsed() >= DEADLINE {
            return false;
        }
        // What comes behind a request is read and thrown away: closing a socket with unread bytes
        // would destroy the answer on its way.
        let mut bytes = [0; 2048];
        match self.stream.read(&mut bytes) {
            Ok(0) => return false,
            Ok(count) if self.answer.is_none() => {
                self.request.extend_from_slice(&bytes[..count]);
                let ended = self.request.windows(4).any(|four| four == b"\r\n\r\n");
                if ended {
                    self.answer = Some(respond(&self.request, source));
                } else if self.request.len() > REQUEST_BYTES_MAX {
                    self.answer = Some(answer("400 Bad Request", "the request is too long\n"));
                }
            }
            Ok(_) => {}
            Err(error) if is_later(&error) => {}
            Err(_) => return false,
        }
        let Some(answer) = &self.answer else { return true };
        while self.sent < answer.len() {
            match self.stream.write(&answer[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if is_later(&error) => return true,
                Err(_) => return false,
            }
            if self.sent == answer.len() {
                let _ = self.stream.shutdown(Shutdown::Write);
            }
        }
        true
    }
}

fn is_later(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// The answer to a whole request, of which only the first line matters.
fn respond(request: &[u8], source: &dyn Fn() -> Option<String>) -> Vec<u8> {
    let line = request.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let line = std::str::from_utf8(line).unwrap_or_default();
    let words: Vec<&str> = line.split(' ').collect();
    let ["GET", target, "HTTP/1.0" | "HTTP/1.1"] = words[..] else {
        return answer("400 Bad Request", "only GET is understood here\n");
    };
    match target.split('?').next() {
        Some("/metrics") => match source() {
            Some(page) => answer("200 OK", &page),
            None => answer("503 Service Unavailable", "the page cannot be had now\n"),
        },
        Some("/healthz") => answer("200 OK", "ok\n"),
        _ => answer("404 Not Found", "there are /metrics and /healthz\n"),
    }
}

fn answer(status: &str, body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start() -> Exporter {
        let page = || Some("bps_build_info 1\n".to_owned());
        Exporter::start("127.0.0.1:0".parse().unwrap(), page).expect("a port of loopback")
    }

    fn ask(server: &Exporter, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // A server that has had enough may close before all is written.
        let _ = stream.write_all(request);
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        text
    }

    #[test]
    fn two_pages_and_nothing_else() {
        let server = start();
        let text = ask(&server, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
        assert!(text.contains("Content-Length: 17\r\n"), "{text}");
        assert!(text.ends_with("\r\n\r\nbps_build_info 1\n"), "{text}");
        assert!(ask(&server, b"GET /healthz HTTP/1.0\r\n\r\n").ends_with("\r\n\r\nok\n"));
        let long = [b"GET /metrics HTTP/1.1\r\nA: ".as_slice(), &vec![b'a'; 1 << 20]].concat();
        for (request, status) in [
            (b"GET / HTTP/1.1\r\n\r\n".as_slice(), "404"),
            (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", "404"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", "400"),
            (b"GET /metrics HTTP/2\r\n\r\n", "400"),
            (b"\xff\xfe\r\n\r\n", "400"),
            (b"\r\n\r\n", "400"),
            (&long, "400"),
        ] {
            let text = ask(&server, request);
            assert!(text.starts_with(&format!("HTTP/1.1 {status} ")), "{status}: {text}");
        }
    }

    #[test]
    fn the_silent_keep_nobody_out_and_do_not_stay() {
        let server = start();
        let silent: Vec<TcpStream> = (0..3 * CONNECTIONS_MAX)
            .map(|_| {
                let mut stream = TcpStream::connect(server.address()).unwrap();
                stream.write_all(b"GET /met").unwrap();
                stream
            })
            .collect();
        assert!(ask(&server, b"GET /healthz HTTP/1.1\r\n\r\n").contains("200 OK"));
        let since = Instant::now();
        for mut stream in silent {
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let mut rest = Vec::new();
            // Closed or reset, but not left open.
            if let Err(error) = stream.read_to_end(&mut rest) {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
            }
            assert!(rest.is_empty());
        }
        assert!(since.elapsed() < DEADLINE + Duration::from_secs(5), "{:?}", since.elapsed());
    }

    #[test]
    fn it_ends_when_dropped() {
        let server = start();
        let address = server.address();
        let _open = TcpStream::connect(address).unwrap();
        drop(server);
        assert!(TcpStream::connect(address).is_err());
    }
}
