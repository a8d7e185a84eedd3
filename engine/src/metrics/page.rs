//! The page: every family of the table with its values, in the text format of Prometheus.

use super::families::{FAMILIES, Family, LoopView, Source};
use crate::proto::messages::LoopStatistics;
use crate::proto::scheduler::{JobView, NodeRole, NodeView};
use crate::trace::counters::Values;
use std::fmt::Write;

/// The page of a job, or of these nodes alone if there is no job to be seen from here.
#[must_use]
pub fn page(job: Option<&JobView>, nodes: &[NodeView]) -> String {
    let mut text = String::with_capacity(16 << 10);
    for family in FAMILIES {
        let head = text.len();
        let _ = writeln!(text, "# HELP {} {}", family.name, escape(family.help, false));
        let _ = writeln!(text, "# TYPE {} {}", family.name, family.kind.name());
        let body = text.len();
        samples(&mut text, family, job, nodes);
        if text.len() == body {
            // Nothing is known of it here: a family without values would only be noise.
            text.truncate(head);
        }
    }
    text
}

fn samples(text: &mut String, family: &Family, job: Option<&JobView>, nodes: &[NodeView]) {
    let name = family.name;
    let of = |role| nodes.iter().filter(move |node: &&NodeView| node.role == role);
    match &family.source {
        Source::Build => sample(text, name, &[("version", env!("CARGO_PKG_VERSION"))], 1.0),
        Source::Job(value) => {
            if let Some(job) = job {
                sample(text, name, &[], value(job));
            }
        }
        Source::Change(value) => {
            for change in job.iter().flat_map(|job| &job.changes.last) {
                let (number, epoch) = (change.number.to_string(), change.epoch.0.to_string());
                let labels = [("number", &number[..]), ("epoch", &epoch), ("what", &change.line)];
                sample(text, name, &labels, value(change));
            }
        }
        Source::Info => {
            for node in nodes {
                let (index, pid) = (node.index.to_string(), node.pid.to_string());
                let labels =
                    [("role", role(node)), ("index", &index), ("host", &node.host), ("pid", &pid)];
                sample(text, name, &labels, 1.0);
            }
        }
        Source::Node(value) => {
            for node in nodes {
                let labels = [("role", role(node)), ("index", &node.index.to_string()[..])];
                if let Some(value) = value(node) {
                    sample(text, name, &labels, value);
                }
            }
        }
        Source::Link(value) => {
            for node in nodes {
                let link = node.statistics.as_ref().and_then(|known| known.link.as_ref());
                if let Some((link, value)) = link.and_then(|link| Some((link, value(link)?))) {
                    let index = node.index.to_string();
                    let labels =
                        [("role", role(node)), ("index", &index), ("interface", &link.interface)];
                    sample(text, name, &labels, value);
                }
            }
        }
        Source::Core(value) => {
            for node in of(NodeRole::Server) {
                let loops = node.statistics.as_ref().map_or(&[][..], |known| &known.loops[..]);
                for (core, one) in loops.iter().enumerate() {
                    let (server, core) = (node.index.to_string(), core.to_string());
                    let labels = [("server", &server[..]), ("core", &core[..])];
                    sample(text, name, &labels, value(&view(one)));
                }
            }
        }
        Source::Rank(value) => {
            for node in of(NodeRole::Worker) {
                let one = node.statistics.as_ref().and_then(|known| known.loops.first());
                if let Some(one) = one {
                    let labels = [("rank", &node.index.to_string()[..])];
                    sample(text, name, &labels, value(&view(one)));
                }
            }
        }
        Source::Waited => {
            let Some(job) = job else { return };
            for node in of(NodeRole::Worker) {
                let mut missing = job.stalls.iter().flat_map(|stall| &stall.missing);
                let waited = missing.any(|rank| rank.0 == node.index);
                let labels = [("rank", &node.index.to_string()[..])];
                sample(text, name, &labels, f64::from(u8::from(waited)));
            }
        }
    }
}

fn role(node: &NodeView) -> &'static str {
    match node.role {
        NodeRole::Worker => "worker",
        NodeRole::Server => "server",
    }
}

fn view(one: &LoopStatistics) -> LoopView {
    LoopView { values: Values::from_list(&one.counts), busy: one.busy }
}

fn sample(text: &mut String, name: &str, labels: &[(&str, &str)], value: f64) {
    text.push_str(name);
    for (at, (label, content)) in labels.iter().enumerate() {
        let open = if at == 0 { '{' } else { ',' };
        let _ = write!(text, "{open}{label}=\"{}\"", escape(content, true));
    }
    let close = if labels.is_empty() { "" } else { "}" };
    let _ = writeln!(text, "{close} {value}");
}

/// As the format wants it: host names come from other machines.
fn escape(content: &str, quotes: bool) -> String {
    let mut text = String::with_capacity(content.len());
    for character in content.chars() {
        match character {
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '"' if quotes => text.push_str("\\\""),
            other => text.push(other),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{Epoch, Rank};
    use crate::proto::messages::{LinkStatistics, Stall, Statistics};
    use crate::proto::paths::{Leg, PathStall};
    use crate::proto::scheduler::{Change, Changes};
    use std::collections::HashSet;
    use std::time::Duration;

    fn node(role: NodeRole, index: u32, statistics: Option<Statistics>) -> NodeView {
        let silent = Some(Duration::from_millis(250));
        NodeView { role, index, host: "a\"b\\c\nd".into(), pid: 7, silent, statistics }
    }

    fn statistics(loops: u64) -> Statistics {
        let values = |at| Values { bytes_in: 100 + at, cpu_ns: 1_500_000_000, ..Values::default() };
        Statistics {
            uptime: 3.5,
            resident_bytes: 4096,
            link: Some(LinkStatistics {
                interface: "eth0".into(),
                speed: Some(1000),
                received: 5,
                sent: 6,
                receive_rate: 500.0,
                send_rate: 0.0,
            }),
            loops: (0..loops)
                .map(|at| LoopStatistics { counts: values(at).to_list(), busy: 0.5 })
                .collect(),
        }
    }

    #[test]
    fn a_page_has_every_family_once_with_its_labels_escaped() {
        let stall = Stall {
            name: "w".into(),
            round: 1,
            waited_ms: 1500,
            arrived: vec![],
            missing: vec![Rank(1)],
            left: vec![],
        };
        let path = PathStall {
            rank: Rank(0),
            server: 0,
            leg: Leg::Result,
            name: "v".into(),
            round: 1,
            waited_ms: 2500,
        };
        let nodes = vec![
            node(NodeRole::Worker, 0, Some(statistics(1))),
            node(NodeRole::Worker, 1, None),
            node(NodeRole::Server, 0, Some(statistics(2))),
        ];
        let change = Change {
            number: 9,
            at: Duration::from_secs(8),
            epoch: Epoch(2),
            waited: Duration::from_millis(250),
            line: "rank 1 (host \"b\") died".into(),
        };
        let waited = Duration::from_millis(750);
        let changes = Changes { last: [change].into(), waited, ..Changes::default() };
        let job = JobView {
            epoch: 2,
            formed: true,
            ranks: 2,
            servers: 1,
            deaths: 3,
            reformed: Some(Duration::from_millis(250)),
            changes,
            uptime: Duration::from_secs(9),
            stalls: vec![stall],
            tuning: None,
            paths: vec![path],
            nodes,
        };
        let text = page(Some(&job), &job.nodes);
        for wanted in [
            "bps_job_stalls 2\n",
            "bps_job_waited_seconds_total 0.75\n",
            "bps_job_change_seconds{number=\"9\",epoch=\"2\",what=\"rank 1 (host \\\"b\\\") \
             died\"} 0.25\n",
            "bps_job_path_stalls 1\n",
            "bps_job_stall_seconds 2.5\n",
            "bps_core_receive_bytes_total{server=\"0\",core=\"1\"} 101\n",
            "bps_core_cpu_seconds_total{server=\"0\",core=\"0\"} 1.5\n",
            "bps_rank_waited_for{rank=\"0\"} 0\n",
            "bps_rank_waited_for{rank=\"1\"} 1\n",
            "bps_link_receive_ratio{role=\"server\",index=\"0\",interface=\"eth0\"} 0.5\n",
            "host=\"a\\\"b\\\\c\\nd\",pid=\"7\"} 1\n",
            "# TYPE bps_core_rounds_total counter\n",
        ] {
            assert!(text.contains(wanted), "{wanted} is not in:\n{text}");
        }
        let mut seen = HashSet::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            assert!(seen.insert(line.rsplit_once(' ').unwrap().0), "twice: {line}");
        }
        for family in FAMILIES {
            assert!(text.contains(&format!("# HELP {} ", family.name)), "{}", family.name);
            let total = family.name.ends_with("_total");
            assert_eq!(total, family.kind == super::super::Kind::Counter, "{}", family.name);
        }
        assert!(!page(None, &job.nodes).contains("bps_job_"), "no scheduler, no job");
        assert!(page(None, &[]).contains("bps_build_info"));
    }
}
