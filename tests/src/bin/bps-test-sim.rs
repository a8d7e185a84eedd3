//! Many seeds of the whole-system simulation, on all CPUs:
//! `bps-test-sim KIND SEEDS [FIRST [JOBS]]`. It prints each seed that fails and why, and at the end
//! what was seen. Nothing else is needed on a machine that runs it; docs/testing.md says how to
//! build it.
//!
//! Each job is a process of its own with every so many-th seed: processes share no page tables, and
//! one that dies takes no others along.

use bps_tests::sim::{Dying, Reformed, Shrunk, Trouble, run_reformed, run_short, run_shrunk};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const USAGE: &str = "usage: bps-test-sim KIND SEEDS [FIRST [JOBS]]";

/// A seed that takes longer, in real time, hangs.
const HANGS: Duration = Duration::from_secs(300);

type Play = fn(u64) -> Vec<(&'static str, u64)>;

/// What may be simulated.
const KINDS: [(&str, Play); 15] = [
    ("ranks", |seed| counts(run_shrunk(seed, Dying::Ranks))),
    ("servers", |seed| counts(run_shrunk(seed, Dying::Servers))),
    ("servers-gpus", |seed| counts(run_shrunk(seed, Dying::ServersOfGpus))),
    ("ranks-gpus", |seed| counts(run_shrunk(seed, Dying::RanksOfGpus))),
    ("hosts", |seed| counts(run_shrunk(seed, Dying::Hosts))),
    ("hosts-gpus", |seed| counts(run_shrunk(seed, Dying::HostsOfGpus))),
    ("schedulers", |seed| counts(run_shrunk(seed, Dying::Schedulers))),
    ("leavers", |seed| counts(run_shrunk(seed, Dying::Leavers))),
    ("slow", |seed| counts(run_short(seed))),
    ("reformed", |seed| reformed(run_reformed(seed, Trouble::Deaths))),
    ("reformed-schedulers", |seed| reformed(run_reformed(seed, Trouble::Schedulers))),
    ("reformed-paths", |seed| reformed(run_reformed(seed, Trouble::Paths))),
    ("reformed-stopped", |seed| reformed(run_reformed(seed, Trouble::Stopped))),
    ("reformed-newcomers", |seed| reformed(run_reformed(seed, Trouble::Newcomers))),
    ("reformed-leavers", |seed| reformed(run_reformed(seed, Trouble::Leavers))),
];

fn counts(mut seen: Shrunk) -> Vec<(&'static str, u64)> {
    seen.counts().into_iter().map(|(name, count)| (name, *count)).collect()
}

fn reformed(mut seen: Reformed) -> Vec<(&'static str, u64)> {
    seen.counts().into_iter().map(|(name, count)| (name, *count)).collect()
}

/// Seeds of one process.
#[derive(Clone, Copy)]
struct Share {
    first: u64,
    end: u64,
    step: usize,
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let known = KINDS.map(|(name, _)| name).join(", ");
    let found = words.first().and_then(|name| KINDS.iter().find(|(known, _)| known == name));
    let are_numbers = words.iter().skip(1).take(3).all(|word| word.parse::<u64>().is_ok());
    let Some((name, play)) = found.copied().filter(|_| words.len() > 1 && are_numbers) else {
        eprintln!("{USAGE}, in numbers; KIND is one of {known}");
        return ExitCode::from(2);
    };
    let number = |at: usize| words.get(at).map(|text| text.parse::<u64>().expect(USAGE));
    let (seeds, first) = (number(1).expect(USAGE), number(2).unwrap_or(0));
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let jobs = number(3).map_or(cpus, |jobs| usize::try_from(jobs).expect(USAGE)).max(1);
    let end = first + seeds;
    if words.get(4).is_some_and(|word| word == "share") {
        run_share(play, Share { first, end, step: jobs });
        return ExitCode::SUCCESS;
    }
    let begun = Instant::now();
    let children: Vec<Child> = (first..end.min(first + jobs as u64))
        .map(|from| start(name, Share { first: from, end, step: jobs }))
        .collect();
    let (mut total, mut failed, mut played) = (BTreeMap::<String, u64>::new(), 0, 0);
    for (text, count) in children.into_iter().flat_map(wait) {
        match text.as_str() {
            "failed" => failed += count,
            "seeds" => played += count,
            _ => *total.entry(text).or_default() += count,
        }
    }
    let took = begun.elapsed().as_secs_f64();
    let seen: Vec<String> = total.iter().map(|(name, count)| format!("{count} {name}")).collect();
    println!(
        "{name}, seeds {first} to {}: {played} of {seeds} were played, {failed} of them failed, in \
         {took:.1} s by {jobs} processes, {:.1} a second; {}",
        end.saturating_sub(1),
        played as f64 / took,
        seen.join(", ")
    );
    if failed == 0 && played == seeds { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn start(name: &str, share: Share) -> Child {
    let own = std::env::current_exe().expect("this program has a path");
    let seeds = share.end - share.first;
    Command::new(own)
        .args([name, &seeds.to_string(), &share.first.to_string(), &share.step.to_string()])
        .arg("share")
        .stdout(Stdio::piped())
        .spawn()
        .expect("a process")
}

/// What a process has counted.
fn wait(mut child: Child) -> Vec<(String, u64)> {
    let output = child.stdout.take().expect("it is piped");
    let read = |line: String| {
        let (count, name) = line.split_once(' ')?;
        Some((name.to_owned(), count.parse().ok()?))
    };
    let all = BufReader::new(output).lines().map_while(Result::ok).filter_map(read).collect();
    let _ = child.wait();
    all
}

/// Plays the seeds of a process, and prints what was counted.
fn run_share(play: Play, share: Share) {
    let failure = Arc::new(Mutex::new(String::new()));
    let hook = Arc::clone(&failure);
    std::panic::set_hook(Box::new(move |panic| {
        *hook.lock().expect("nobody panics with it") = panic.to_string().replace('\n', " ");
    }));
    let (begun, current) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    watch(begun, share, &current);
    let mut total = BTreeMap::<&str, u64>::new();
    for (turn, seed) in (0..).zip((share.first..share.end).step_by(share.step)) {
        let now = begun.elapsed().as_secs();
        current.store(now << 32 | turn, Ordering::Relaxed);
        *total.entry("seeds").or_default() += 1;
        match std::panic::catch_unwind(|| play(seed)) {
            Ok(seen) => {
                seen.into_iter().for_each(|(name, count)| *total.entry(name).or_default() += count);
            }
            Err(_) => {
                *total.entry("failed").or_default() += 1;
                eprintln!("seed {seed} failed: {}", failure.lock().expect("nobody panics with it"));
            }
        }
    }
    let mut output = std::io::stdout().lock();
    for (name, count) in total {
        writeln!(output, "{count} {name}").expect("whoever has started this reads it");
    }
}

/// Ends the process if a seed hangs, and says which.
fn watch(begun: Instant, share: Share, current: &Arc<AtomicU64>) {
    let current = Arc::clone(current);
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let (since, turn) = {
                let current = current.load(Ordering::Relaxed);
                (Duration::from_secs(current >> 32), current & 0xffff_ffff)
            };
            if begun.elapsed().saturating_sub(since) > HANGS {
                let seed = share.first + turn * share.step as u64;
                eprintln!("seed {seed} hangs: seeds behind it of this process are not played");
                std::process::exit(1);
            }
        }
    });
}
