//! What a node can say of itself: its threads' counters, its memory, its network interface.

use crate::config::Config;
use crate::host;
use crate::proto::messages::{LinkStatistics, LoopStatistics, Statistics};
use crate::trace::counters::Counters;
use std::sync::Arc;
use std::time::Instant;

/// Bytes a second of one Mbit/s.
const MEGABIT: u64 = 125_000;

/// Takes statistics once a heartbeat. It keeps the last ones, for rates.
pub struct Collector {
    loops: Vec<Arc<Counters>>,
    interface: Option<String>,
    speed: Option<u64>,
    began: Instant,
    taken: Instant,
    busy_ns: Vec<u64>,
    traffic: Option<(u64, u64)>,
}

impl Collector {
    /// A collector of these threads, on the interface that this node listens on or reaches the
    /// scheduler by.
    #[must_use]
    pub fn new(config: &Config, loops: Vec<Arc<Counters>>) -> Collector {
        let address = host::listen_address(config).ok();
        let all = host::interfaces();
        let interface = address
            .and_then(|address| all.into_iter().find(|(_, one)| *one == address))
            .map(|(name, _)| name);
        let set = config.link_speed.map(u64::from);
        let speed =
            set.or_else(|| kernel_speed(interface.as_deref()?)).map(|speed| speed * MEGABIT);
        let traffic = interface.as_deref().and_then(traffic_now);
        let busy_ns = loops.iter().map(|one| one.busy_ns.read()).collect();
        let now = Instant::now();
        Collector { loops, interface, speed, began: now, taken: now, busy_ns, traffic }
    }

    /// The statistics now.
    pub fn take(&mut self) -> Statistics {
        let now = Instant::now();
        let seconds = (now - self.taken).as_secs_f64().max(1e-6);
        self.taken = now;
        let mut loops = Vec::with_capacity(self.loops.len());
        for (counters, before) in self.loops.iter().zip(&mut self.busy_ns) {
            let values = counters.read();
            let busy = (values.busy_ns - *before) as f64 / 1e9 / seconds;
            *before = values.busy_ns;
            // A turn that began before the last look is counted whole in this one.
            loops.push(LoopStatistics { counts: values.to_list(), busy: busy.min(1.0) });
        }
        let uptime = (now - self.began).as_secs_f64();
        Statistics { uptime, resident_bytes: resident_bytes(), link: self.link(seconds), loops }
    }

    fn link(&mut self, seconds: f64) -> Option<LinkStatistics> {
        let interface = self.interface.clone()?;
        let (received, sent) = traffic_now(&interface)?;
        let (received_before, sent_before) = self.traffic.replace((received, sent))?;
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        Some(LinkStatistics {
            interface,
            speed: self.speed,
            received,
            sent,
            receive_rate: rate(received, received_before),
            send_rate: rate(sent, sent_before),
        })
    }
}

/// Mbit/s as the kernel has it; nothing where it does not know, as for loopback and most virtual
/// interfaces.
fn kernel_speed(interface: &str) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/sys/class/net/{interface}/speed")).ok()?;
    text.trim().parse::<u64>().ok().filter(|speed| *speed > 0 && *speed < u64::from(u32::MAX))
}

/// Bytes received and sent, by the kernel's table of this network namespace.
fn traffic_now(interface: &str) -> Option<(u64, u64)> {
    traffic(&std::fs::read_to_string("/proc/self/net/dev").ok()?, interface)
}

fn traffic(table: &str, interface: &str) -> Option<(u64, u64)> {
    let line = table.lines().find_map(|line| {
        let (name, rest) = line.split_once(':')?;
        (name.trim() == interface).then_some(rest)
    })?;
    let mut fields = line.split_whitespace();
    // Eight fields of what was received come before those of what was sent.
    Some((fields.next()?.parse().ok()?, fields.nth(7)?.parse().ok()?))
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_table_is_read_by_name() {
        let table = "Inter-|   Receive                    |  Transmit\n \
                     face |bytes    packets errs drop fifo frame compressed multicast|bytes\n    \
                     lo: 100 1 2 3 4 5 6 7 200 9 0 0 0 0 0 0\n  \
                     eth0:7 1 2 3 4 5 6 7 8 9 0 0 0 0 0 0\n";
        assert_eq!(traffic(table, "lo"), Some((100, 200)));
        assert_eq!(traffic(table, "eth0"), Some((7, 8)));
        assert_eq!(traffic(table, "eth"), None);
    }

    #[test]
    fn a_collector_tells_what_its_threads_have_counted() {
        let counters = Arc::new(Counters::default());
        let config = Config {
            node_host: Some("127.0.0.1".into()),
            link_speed: Some(8),
            ..Config::default()
        };
        let mut collector = Collector::new(&config, vec![Arc::clone(&counters)]);
        counters.bytes_in.add(5);
        counters.busy_ns.add(u64::MAX / 2);
        let taken = collector.take();
        assert_eq!((taken.loops.len(), taken.loops[0].counts[0]), (1, 5));
        assert!((taken.loops[0].busy - 1.0).abs() < 1e-9, "{:?}", taken.loops);
        assert!(taken.resident_bytes > 0);
        if let Some(link) = taken.link {
            assert_eq!((link.interface.as_str(), link.speed), ("lo", Some(1_000_000)));
        }
        assert!(collector.take().loops[0].busy < 1e-9);
    }
}
