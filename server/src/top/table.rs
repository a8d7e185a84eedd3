//! The table: what two looks at a page have in common and in difference, as text of a given width.

use super::page::{Page, Sample};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Counters of a core or a rank at one look.
#[derive(Clone, Copy, Default)]
struct Counts {
    bytes_in: f64,
    bytes_out: f64,
    rounds: f64,
    busy: f64,
}

/// A core or a rank: its counters at the last two heartbeats.
#[derive(Clone, Copy, Default)]
struct Track {
    /// By the node's own clock.
    at: f64,
    counts: Counts,
    before: Option<(f64, Counts)>,
}

impl Track {
    /// Takes a look, if there was a heartbeat since the last one.
    fn look(&mut self, at: f64, counts: Counts) {
        if at < self.at {
            // Another process has its place since.
            *self = Track { at, counts, before: None };
        } else if at > self.at {
            self.before = (self.at > 0.0).then_some((self.at, self.counts));
            (self.at, self.counts) = (at, counts);
        }
    }

    /// Growth a second.
    fn rate(&self, of: fn(&Counts) -> f64) -> Option<f64> {
        let (at, before) = self.before.as_ref()?;
        Some((of(&self.counts) - of(before)) / (self.at - at))
    }
}

/// A line of the table: what is known of it now, in the order of the columns.
struct Row {
    place: String,
    cells: Vec<String>,
}

/// See the [module](self).
pub(super) struct Table {
    name: String,
    /// By server and core.
    cores: BTreeMap<(u32, u32), Track>,
    ranks: BTreeMap<u32, Track>,
    header: String,
    stall: String,
    tuning: Option<String>,
    auto: Option<String>,
    /// Changes of who takes part, the last one first.
    changes: Vec<String>,
    core_rows: Vec<Row>,
    rank_rows: Vec<Row>,
}

const CORE_COLUMNS: &[&str] =
    &["core", "busy %", "in GB/s", "out GB/s", "rounds/s", "parked", "line %", "heard s", "host"];
const RANK_COLUMNS: &[&str] =
    &["rank", "busy %", "in GB/s", "out GB/s", "rounds/s", "queued", "line %", "heard s", "host"];
/// Changes of who takes part that are shown.
const CHANGES_SHOWN: usize = 3;
/// What stands where nothing is known.
const UNKNOWN: &str = "-";

impl Table {
    pub(super) fn new(name: String) -> Table {
        Table {
            name,
            cores: BTreeMap::new(),
            ranks: BTreeMap::new(),
            header: String::new(),
            stall: String::new(),
            tuning: None,
            auto: None,
            changes: Vec::new(),
            core_rows: Vec::new(),
            rank_rows: Vec::new(),
        }
    }

    /// Takes a new page.
    pub(super) fn look(&mut self, page: &Page) {
        let job = |name: &str| page.value(name, &[]).unwrap_or(0.0);
        let formed = if job("bps_job_formed") > 0.0 { "" } else { ", waiting for nodes" };
        let lost = match job("bps_job_deaths_total") {
            0.0 => String::new(),
            deaths => format!(
                ", {} lost ({:.1} s)",
                counted(deaths, "member"),
                job("bps_job_waited_seconds_total")
            ),
        };
        self.header = format!(
            "{}: {}, {}, epoch {}{lost}, up {}{formed}",
            self.name,
            counted(job("bps_job_ranks"), "rank"),
            counted(job("bps_job_servers"), "server"),
            job("bps_job_epoch"),
            clock(job("bps_job_uptime_seconds")),
        );
        self.stall = stall(page);
        self.tuning = tuning(page);
        self.auto = auto(page);
        self.changes = changes(page);
        self.core_rows.clear();
        for sample in page.of("bps_core_rounds_total") {
            let Some((server, core)) = number(sample, "server").zip(number(sample, "core")) else {
                continue;
            };
            let labels = [("server", sample.label("server")), ("core", sample.label("core"))];
            let track = self.cores.entry((server, core)).or_default();
            let role = ("server", sample.label("server"));
            track.look(uptime(page, role), counts(page, "bps_core", &labels));
            let parked = page.value("bps_core_parked", &labels);
            let place = format!("{server}.{core}");
            self.core_rows.push(row(page, place, track, parked, role));
        }
        self.rank_rows.clear();
        for sample in page.of("bps_node_info").filter(|node| node.label("role") == "worker") {
            let Some(rank) = number(sample, "index") else { continue };
            let labels = [("rank", sample.label("index"))];
            let track = self.ranks.entry(rank).or_default();
            let role = ("worker", sample.label("index"));
            track.look(uptime(page, role), counts(page, "bps_rank", &labels));
            let queued = page.value("bps_rank_parts_waiting", &labels);
            let mut row = row(page, rank.to_string(), track, queued, role);
            if page.value("bps_rank_waited_for", &labels) == Some(1.0) {
                row.cells.push("WAITED FOR".to_owned());
            }
            self.rank_rows.push(row);
        }
    }

    /// Whether every core and rank that is shown has rates.
    pub(super) fn has_rates(&self) -> bool {
        let known = |track: &Track| track.before.is_some();
        !self.ranks.is_empty() && self.ranks.values().chain(self.cores.values()).all(known)
    }

    /// The table, cut to columns and lines of a terminal if there is one.
    pub(super) fn text(&self, size: Option<(usize, usize)>) -> String {
        let mut lines = vec![self.header.clone(), self.stall.clone()];
        lines.extend(self.tuning.clone());
        lines.extend(self.auto.clone());
        lines.extend(self.changes.clone());
        lines.push(String::new());
        lines.extend(layout(CORE_COLUMNS, &self.core_rows));
        lines.push(String::new());
        lines.extend(layout(RANK_COLUMNS, &self.rank_rows));
        if let Some((columns, rows)) = size {
            // The last line is left to the cursor.
            let room = rows.saturating_sub(1).max(4);
            if lines.len() > room {
                let hidden = lines.len() - room + 1;
                lines.truncate(room - 1);
                lines.push(format!("... and {hidden} lines more: make the window higher"));
            }
            for line in &mut lines {
                *line = line.chars().take(columns).collect();
            }
        }
        lines.into_iter().fold(String::new(), |text, line| text + line.trim_end() + "\n")
    }
}

fn uptime(page: &Page, (role, index): (&str, &str)) -> f64 {
    page.value("bps_node_uptime_seconds", &[("role", role), ("index", index)]).unwrap_or(0.0)
}

fn counts(page: &Page, prefix: &str, labels: &[(&str, &str)]) -> Counts {
    let of = |what: &str| page.value(&format!("{prefix}_{what}_total"), labels).unwrap_or(0.0);
    Counts {
        bytes_in: of("receive_bytes"),
        bytes_out: of("transmit_bytes"),
        rounds: of("rounds"),
        busy: of("busy_seconds"),
    }
}

fn row(
    page: &Page,
    place: String,
    track: &Track,
    depth: Option<f64>,
    (role, index): (&str, &str),
) -> Row {
    let node = [("role", role), ("index", index)];
    let cell = |value: Option<f64>, decimals: usize| {
        value.map_or_else(|| UNKNOWN.to_owned(), |value| format!("{value:.decimals$}"))
    };
    let busiest = ["bps_link_receive_ratio", "bps_link_transmit_ratio"]
        .into_iter()
        .filter_map(|name| page.value(name, &node))
        .reduce(f64::max);
    let fits = |sample: &&Sample| sample.label("role") == role && sample.label("index") == index;
    let info = page.of("bps_node_info").find(fits);
    let host = info.map_or(UNKNOWN, |info| info.label("host"));
    let heard = page.value("bps_node_heartbeat_age_seconds", &node);
    Row {
        place,
        cells: vec![
            cell(track.rate(|counts| counts.busy).map(|busy| 100.0 * busy), 1),
            cell(track.rate(|counts| counts.bytes_in).map(|bytes| bytes / 1e9), 3),
            cell(track.rate(|counts| counts.bytes_out).map(|bytes| bytes / 1e9), 3),
            cell(track.rate(|counts| counts.rounds), 0),
            cell(depth, 0),
            cell(busiest.map(|ratio| 100.0 * ratio), 1),
            cell(heard, 1),
            host.chars().filter(|one| !one.is_control()).collect(),
        ],
    }
}

fn stall(page: &Page) -> String {
    if page.value("bps_job_stalls", &[]).unwrap_or(0.0) == 0.0 {
        return "no stall".to_owned();
    }
    let waited = page.of("bps_rank_waited_for").filter(|rank| rank.value() > 0.0);
    let ranks: Vec<&str> = waited.map(|rank| rank.label("rank")).collect();
    let seconds = page.value("bps_job_stall_seconds", &[]).unwrap_or(0.0);
    let paths = page.value("bps_job_path_stalls", &[]).unwrap_or(0.0);
    let whom = match ranks.len() {
        0 if paths > 0.0 => "bytes that are on their way".to_owned(),
        0 => "a rank that has left".to_owned(),
        1 => format!("rank {}", ranks[0]),
        _ => format!("ranks {}", ranks.join(", ")),
    };
    format!("STALLED for {seconds:.1} s: waiting for {whom}")
}

/// What a job tries that tunes itself.
fn tuning(page: &Page) -> Option<String> {
    let job = |name: &str| page.value(&format!("bps_job_tuning_{name}"), &[]).unwrap_or(0.0);
    let (partition, credit) = (job("partition_bytes"), job("credit_parts"));
    if partition == 0.0 {
        return None;
    }
    let is_active = job("active") > 0.0;
    let (what, best) =
        (if is_active { "tries" } else { "tuned to" }, job("best_bytes_per_second") / 1e9);
    let kibibytes = partition / 1024.0;
    let trials = counted(job("trials"), "trial");
    Some(format!(
        "{what} parts of {kibibytes} KiB, credit {credit}; best {best:.3} GB/s of {trials}"
    ))
}

/// How far tensors are encoded that need not be.
fn auto(page: &Page) -> Option<String> {
    let all = |name: &str| page.of(name).map(Sample::value).sum::<f64>();
    let parts = |form: &str| all(&format!("bps_rank_auto_{form}_parts"));
    let [plain, half, coded] = ["plain", "bf16", "codec"].map(parts);
    let count = plain + half + coded;
    if count == 0.0 {
        return None;
    }
    let spared = all("bps_rank_spared_bytes_total") / 1e9;
    let all = counted(count, "part");
    Some(format!("auto: {coded} of {all} encoded, {half} as bf16; {spared:.3} GB spared"))
}

/// The last changes of who takes part, each with when it came about and for how long the job
/// waited.
fn changes(page: &Page) -> Vec<String> {
    let mut found: Vec<(u64, String)> = Vec::new();
    for sample in page.of("bps_job_change_seconds") {
        let number = sample.label("number");
        let Ok(at) = number.parse() else { continue };
        let is_its = |one: &&Sample| one.label("number") == number;
        let since = page.of("bps_job_change_uptime_seconds").find(is_its);
        let since = clock(since.map_or(0.0, Sample::value));
        let what: String = sample.label("what").chars().filter(|one| !one.is_control()).collect();
        found.push((at, format!("{since} ({:.3} s) {what}", sample.value())));
    }
    found.sort_unstable_by(|one, other| other.cmp(one));
    found.into_iter().take(CHANGES_SHOWN).map(|(_, line)| line).collect()
}

fn number(sample: &Sample, label: &str) -> Option<u32> {
    sample.label(label).parse().ok()
}

fn counted(count: f64, what: &str) -> String {
    format!("{count} {what}{}", if (count - 1.0).abs() < 0.5 { "" } else { "s" })
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole seconds")]
fn clock(seconds: f64) -> String {
    let seconds = seconds as u64;
    format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// Columns as wide as their widest cell; numbers at the right, names at the left.
fn layout(columns: &[&str], rows: &[Row]) -> Vec<String> {
    let head = Row {
        place: columns[0].to_owned(),
        cells: columns[1..].iter().map(|title| (*title).to_owned()).collect(),
    };
    let all = || std::iter::once(&head).chain(rows);
    let widths: Vec<usize> = (0..columns.len() - 1)
        .map(|at| all().filter_map(|row| row.cells.get(at)).map(String::len).max().unwrap_or(0))
        .collect();
    let first = all().map(|row| row.place.len()).max().unwrap_or(0);
    let numbers = columns.len() - 2;
    all()
        .map(|row| {
            let mut line = format!("{:<first$}", row.place);
            for (at, cell) in row.cells.iter().enumerate() {
                let width = widths.get(at).copied().unwrap_or(0);
                let _ = match at < numbers {
                    true => write!(line, "  {cell:>width$}"),
                    false => write!(line, "  {cell:<width$}"),
                };
            }
            line
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(uptime: f64, bytes: f64, waited: u32) -> Page {
        Page::parse(&format!(
            "bps_job_formed 1\nbps_job_ranks 1\nbps_job_servers 1\nbps_job_epoch 1\n\
             bps_job_uptime_seconds 3725.5\nbps_job_stalls {waited}\nbps_job_stall_seconds 4.25\n\
             bps_node_info{{role=\"worker\",index=\"0\",host=\"w\",pid=\"1\"}} 1\n\
             bps_node_info{{role=\"server\",index=\"0\",host=\"s\",pid=\"2\"}} 1\n\
             bps_node_uptime_seconds{{role=\"worker\",index=\"0\"}} {uptime}\n\
             bps_node_uptime_seconds{{role=\"server\",index=\"0\"}} {uptime}\n\
             bps_node_heartbeat_age_seconds{{role=\"worker\",index=\"0\"}} 0.25\n\
             bps_core_receive_bytes_total{{server=\"0\",core=\"0\"}} {bytes}\n\
             bps_core_rounds_total{{server=\"0\",core=\"0\"}} 10\n\
             bps_core_parked{{server=\"0\",core=\"0\"}} 3\n\
             bps_rank_receive_bytes_total{{rank=\"0\"}} {bytes}\n\
             bps_rank_waited_for{{rank=\"0\"}} {waited}\n"
        ))
    }

    #[test]
    fn a_job_that_tunes_itself_says_what_it_tries() {
        let tuning = |active: u32| {
            Page::parse(&format!(
                "bps_job_tuning_trials 3\nbps_job_tuning_active {active}\n\
                 bps_job_tuning_partition_bytes 1048576\nbps_job_tuning_credit_parts 4\n\
                 bps_job_tuning_best_bytes_per_second 502000000\n"
            ))
        };
        let mut table = Table::new("h:1".to_owned());
        let line = |table: &Table| table.text(None).lines().nth(2).map(str::to_owned);
        table.look(&page(1.0, 1e9, 0));
        assert_eq!(line(&table).as_deref(), Some(""));
        let what = "parts of 1024 KiB, credit 4; best 0.502 GB/s of 3 trials";
        for (active, word) in [(1, "tries"), (0, "tuned to")] {
            table.look(&tuning(active));
            assert_eq!(line(&table), Some(format!("{word} {what}")));
        }
    }

    #[test]
    fn who_was_lost_and_why_is_shown_with_what_it_cost() {
        let mut table = Table::new("h:1".to_owned());
        let mut text = "bps_job_deaths_total 2\nbps_job_waited_seconds_total 0.75\n".to_owned();
        for number in 7..=10 {
            let what = format!("rank 1 (host \\\"b\\\", pid {number}) died");
            text += &format!(
                "bps_job_change_seconds{{number=\"{number}\",epoch=\"2\",what=\"{what}\"}} 0.25\n\
                 bps_job_change_uptime_seconds{{number=\"{number}\"}} {}\n",
                60 * number
            );
        }
        table.look(&Page::parse(&text));
        let text = table.text(None);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].contains(", 2 members lost (0.8 s), up"), "{text}");
        let line = |number: u32| {
            format!("0:{number:02}:00 (0.250 s) rank 1 (host \"b\", pid {number}) died")
        };
        assert_eq!(lines[2..6], [line(10), line(9), line(8), String::new()]);
    }

    #[test]
    fn a_job_that_chooses_encodings_says_which() {
        let mut table = Table::new("h:1".to_owned());
        table.look(&Page::parse(
            "bps_rank_auto_plain_parts{rank=\"0\"} 1\nbps_rank_auto_codec_parts{rank=\"0\"} 3\n\
             bps_rank_auto_codec_parts{rank=\"1\"} 4\nbps_rank_auto_bf16_parts{rank=\"1\"} 0\n\
             bps_rank_spared_bytes_total{rank=\"0\"} 1500000000\n",
        ));
        let text = table.text(None);
        let line = "auto: 7 of 8 parts encoded, 0 as bf16; 1.500 GB spared";
        assert_eq!(text.lines().nth(2), Some(line), "{text}");
    }

    #[test]
    fn rates_are_taken_over_the_nodes_own_time() {
        let mut table = Table::new("h:1".to_owned());
        table.look(&page(1.0, 1e9, 0));
        assert!(!table.has_rates());
        // The same heartbeat again: no rate of 0 is made of it.
        table.look(&page(1.0, 1e9, 0));
        assert!(!table.has_rates());
        table.look(&page(3.0, 4e9, 0));
        table.look(&page(3.0, 4e9, 0));
        assert!(table.has_rates());
        let text = table.text(None);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "h:1: 1 rank, 1 server, epoch 1, up 1:02:05");
        assert_eq!(lines[1], "no stall");
        let cells: Vec<&str> = lines[4].split_whitespace().collect();
        assert_eq!(cells, ["0.0", "0.0", "1.500", "0.000", "0", "3", "-", "-", "s"]);
        let cells: Vec<&str> = lines[7].split_whitespace().collect();
        assert_eq!(cells, ["0", "0.0", "1.500", "0.000", "0", "-", "-", "0.2", "w"]);
        // Another process in the same place begins anew.
        table.look(&page(0.5, 1e6, 0));
        assert!(!table.has_rates());
    }

    #[test]
    fn a_stall_is_said_twice_and_a_small_window_is_obeyed() {
        let mut table = Table::new("h:1".to_owned());
        table.look(&page(1.0, 1e9, 1));
        let text = table.text(None);
        assert!(text.contains("STALLED for 4.2 s: waiting for rank 0\n"), "{text}");
        assert!(text.lines().last().unwrap().ends_with("WAITED FOR"), "{text}");
        let small = table.text(Some((20, 6)));
        assert!(small.lines().all(|line| line.chars().count() <= 20), "{small}");
        assert_eq!(small.lines().count(), 5);
        assert!(small.lines().last().unwrap().starts_with("... and 4 lines"), "{small}");
    }
}
