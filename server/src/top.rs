//! `bps-top`: a running job as a live table, from the metrics page of its scheduler.
//!
//! It only reads: whoever may see the page may run it, from anywhere, as often as they like.

#![forbid(unsafe_code)]

mod page;
mod table;

use bps_engine::config::{Config, Loaded, Origin, Program};
use page::Page;
use rustix::termios::tcgetwinsize;
use std::ffi::OsString;
use std::io::{ErrorKind, IsTerminal, Read, Write};
use std::net::{IpAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};
use table::Table;

/// How long the scheduler may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of a page: that of the largest job is smaller.
const PAGE_BYTES_MAX: u64 = 256 << 20;
/// How often `--once` looks until every node has sent a heartbeat more.
const LOOK: Duration = Duration::from_millis(100);
/// How long it does so.
const ONCE: Duration = Duration::from_secs(5);
/// Cursor to the corner, and clear what is below.
const CLEAR: &str = "\x1b[H\x1b[J";

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
enum TopError {
    #[error(
        "which port has the scheduler's metrics? Start the scheduler with BPS_METRICS_PORT=9100 \
         and give bps-top the same variable, or --metrics-port; bpslaunch --local says which one \
         it chose"
    )]
    NoPort,
    #[error(
        "nothing answers at {address}: {error}; is the job running, was its scheduler started \
         with this BPS_METRICS_PORT, and with a BPS_METRICS_ADDRESS that can be reached from here?"
    )]
    Silent { address: String, error: std::io::Error },
    #[error(
        "what answers at {address} is no scheduler ({said}); is BPS_METRICS_PORT another program's?"
    )]
    Stranger { address: String, said: String },
}

/// `bps-top`: reads flags and variables, shows the job, and returns the exit code: 0 it was shown
/// until it ended, 1 nothing answers, 2 a flag or variable is wrong or missing.
pub fn cli(arguments: impl IntoIterator<Item = OsString>) -> i32 {
    let loaded = match bps_engine::config::open(Program::Top, arguments) {
        Ok(loaded) => loaded,
        Err(code) => return code,
    };
    let shown = address(&loaded).and_then(|address| match loaded.config.top.once {
        true => once(&address),
        false => watch(&address, &loaded.config),
    });
    match shown {
        Ok(()) => 0,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "bps-top: error: {error}");
            if matches!(error, TopError::NoPort) { 2 } else { 1 }
        }
    }
}

/// Where the scheduler shows its metrics, as far as the settings of the job say.
fn address(loaded: &Loaded) -> Result<(String, u16), TopError> {
    let config = &loaded.config;
    let port = config.metrics_port.and_then(|port| u16::try_from(port).ok());
    let port = port.filter(|port| *port != 0).ok_or(TopError::NoPort)?;
    let set = &config.metrics_address;
    let everywhere = set.parse().is_ok_and(|ip: IpAddr| ip.is_unspecified());
    let default = matches!(loaded.origin("BPS_METRICS_ADDRESS"), Origin::Default);
    let host = match (default, everywhere) {
        (false, true) if !config.root_uri.is_empty() => config.root_uri.clone(),
        (_, true) => "127.0.0.1".to_owned(),
        _ => set.clone(),
    };
    Ok((host, port))
}

/// One table, with rates since a moment ago.
fn once(address: &(String, u16)) -> Result<(), TopError> {
    let mut table = Table::new(name(address));
    let until = Instant::now() + ONCE;
    table.look(&fetch(address)?);
    while !table.has_rates() && Instant::now() < until {
        std::thread::sleep(LOOK);
        table.look(&fetch(address)?);
    }
    say(&table.text(None));
    Ok(())
}

/// Tables until the scheduler ends.
fn watch(address: &(String, u16), config: &Config) -> Result<(), TopError> {
    let mut table = Table::new(name(address));
    table.look(&fetch(address)?);
    let live = std::io::stdout().is_terminal();
    loop {
        let size = tcgetwinsize(std::io::stdout()).ok().filter(|size| size.ws_col > 0);
        let size = size.map(|size| (usize::from(size.ws_col), usize::from(size.ws_row)));
        let clear = if live { CLEAR } else { "" };
        if !say(&format!("{clear}{}", table.text(size))) {
            return Ok(());
        }
        std::thread::sleep(config.top.interval);
        match fetch(address) {
            Ok(page) => table.look(&page),
            Err(TopError::Silent { .. }) => {
                say(&format!(
                    "the scheduler at {} no longer answers: the job is over\n",
                    name(address)
                ));
                return Ok(());
            }
            Err(error) => return Err(error),
        }
    }
}

fn name((host, port): &(String, u16)) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Whether somebody still reads it.
fn say(text: &str) -> bool {
    let mut out = std::io::stdout();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_ok()
}

fn fetch(address: &(String, u16)) -> Result<Page, TopError> {
    let silent = |error| TopError::Silent { address: name(address), error };
    let text = ask(address).map_err(silent)?;
    let stranger = |said: &str| TopError::Stranger {
        address: name(address),
        said: said.chars().filter(|one| !one.is_control()).take(60).collect(),
    };
    let (head, body) = text.split_once("\r\n\r\n").ok_or_else(|| stranger("it says nothing"))?;
    let status = head.lines().next().unwrap_or_default();
    let good = status.starts_with("HTTP/1.") && status.split(' ').nth(1) == Some("200");
    let page = Page::parse(body);
    match good && page.is_of_a_scheduler() {
        true => Ok(page),
        false => Err(stranger(status)),
    }
}

fn ask((host, port): &(String, u16)) -> std::io::Result<String> {
    let mut failed = ErrorKind::NotFound.into();
    for address in (host.as_str(), *port).to_socket_addrs()? {
        let mut stream = match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(stream) => stream,
            Err(error) => {
                failed = error;
                continue;
            }
        };
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
        let mut text = Vec::new();
        stream.take(PAGE_BYTES_MAX).read_to_end(&mut text)?;
        return Ok(String::from_utf8_lossy(&text).into_owned());
    }
    Err(failed)
}
