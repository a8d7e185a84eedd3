//! A whole job on several machines: connects to an agent on each, tells it its share, and
//! supervises all processes by the rules that hold for those of one machine.

#![forbid(unsafe_code)]

use super::discovery::Discovery;
use super::error::{LaunchError, counted};
use super::fleet::{self, Fleet};
use super::frames::{Hello, Instruction, Order, other_release};
use super::hosts::Host;
use super::layout::{Layout, check_elastic, layout};
use super::local::{DECIDED, STRAY, mint_key};
use super::meeting::Meeting;
use super::output::say;
use super::plan::{CHECKED, Environment, Kind, Programs, worker_command};
use super::remote::{Recruiting, RemoteCrew};
use super::signals::{self, Signals};
use super::ssh;
use super::supervise::{Member, Supervisor};
use bps_engine::base::word;
use bps_engine::config::{Config, ElasticMode, Gpus, Loaded, Origin};
use bps_engine::control::JobKey;
use bps_engine::limits::RANKS_MAX;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::net::TcpListener;
use std::time::{Duration, Instant};

/// How often the answer of a discovery is looked for before the job begins.
const LOOK: Duration = Duration::from_millis(20);
/// For all agents to start their processes.
const START: Duration = Duration::from_secs(60);
/// Beyond the time that ssh takes to give up by itself, so that its own words are heard.
const BEHIND_SSH: Duration = Duration::from_secs(1);
/// Descriptors of the launcher, and of each of its connections, with some to spare.
const DESCRIPTORS: u64 = 64;
const DESCRIPTORS_OF_SITE: u64 = 8;
/// Beginnings of the names of variables that all processes get.
const PASSED: &[&str] = &["BPS_", "BYTEPS_", "DMLC_", "BYTESCHEDULER_", "NCCL_"];
/// Other variables that they get.
const PASSED_TOO: &[&str] = &["OMP_NUM_THREADS", "KMP_AFFINITY"];
/// Those of ours that hold for one machine or process, or go another way.
const KEPT: &[&str] = &["DMLC_ROLE", "DMLC_NUM_SERVER", "BPS_JOB_KEY", "BPS_JOB_KEY_FILE", CHECKED];

/// Where the nodes meet.
struct Place {
    /// The site of the scheduler.
    site: usize,
    address: String,
    port: u32,
}

/// Runs the job of `--hosts` to its end, and returns the code to leave with, as for one machine.
pub(super) fn run(loaded: &Loaded, programs: &Programs) -> Result<i32, LaunchError> {
    let launch = &loaded.config.launch;
    worker_command(loaded)?;
    let (mut layout, discovery) = match &launch.discovery {
        None => (layout(loaded, None)?, None),
        Some(command) => {
            let (hosts, discovery) = discover(loaded, command)?;
            (layout(loaded, Some(hosts))?, Some(discovery))
        }
    };
    if layout.scheduler.is_none() {
        layout.local_site();
    }
    let replaced = DECIDED.iter().filter(|name| **name != "DMLC_INTERFACE");
    if replaced.into_iter().any(|name| matches!(loaded.origin(name), Origin::Variable(_))) {
        say("the DMLC_* variables here describe another job and are replaced");
    }
    let passed = passed(loaded)?;
    let commands = layout.sites.iter().map(|site| ssh::command(site, launch, &programs.launcher));
    let commands = commands.collect::<Result<Vec<_>, _>>()?;
    if launch.dry_run {
        print!("{}", describe(&layout, &commands));
        return Ok(0);
    }
    let mut signals = Signals::catch()?;
    let more = launch.max_workers.unwrap_or(0) as usize;
    let wanted = DESCRIPTORS + DESCRIPTORS_OF_SITE * (layout.sites.len() + more) as u64;
    bps_engine::host::raise_descriptor_limit(wanted);
    let mut crew = RemoteCrew::connect(&layout.sites, &commands, &checked())?;
    let job = Job { loaded, layout: &layout, programs };
    let code = job.conduct(passed, discovery, &mut crew, &mut signals);
    crew.finish();
    code
}

/// Waits until the machines are there that the job can begin with; returns also what goes on
/// asking for them.
fn discover(loaded: &Loaded, command: &str) -> Result<(Vec<Host>, Discovery), LaunchError> {
    let (config, launch) = (&loaded.config, &loaded.config.launch);
    let mut discovery = Discovery::start(command, launch)?;
    let (begun, mut said) = (Instant::now(), String::new());
    loop {
        if let Some(hosts) = discovery.take() {
            let most = launch.max_workers.map_or(RANKS_MAX, |most| most as usize);
            let first = fleet::first(&hosts, launch.slots, word(most));
            let ranks = first.iter().filter_map(|host| host.count).sum::<u32>();
            let least = config.min_workers.unwrap_or(1);
            if ranks >= least {
                return Ok((first, discovery));
            }
            let text = format!(
                "--host-discovery names room for {}, of at least {least}",
                counted(ranks, "rank")
            );
            if text != said {
                say(&format!("{text}: waiting for more"));
                said = text;
            }
        }
        if begun.elapsed() >= config.start_timeout {
            let problem = discovery.problem().map(str::to_owned).unwrap_or(said);
            return Err(LaunchError::Conflict {
                problem: format!("{problem} for {} s", config.start_timeout.as_secs_f64()),
                remedy: "look at what the command prints, or wait longer (--start-timeout)"
                    .to_owned(),
            });
        }
        std::thread::sleep(LOOK);
    }
}

/// What the job was asked to be.
struct Job<'a> {
    loaded: &'a Loaded,
    layout: &'a Layout,
    programs: &'a Programs,
}

impl Job<'_> {
    fn conduct(
        &self,
        passed: Vec<(String, OsString)>,
        discovery: Option<Discovery>,
        crew: &mut RemoteCrew,
        signals: &mut Signals,
    ) -> Result<i32, LaunchError> {
        let (config, layout) = (&self.loaded.config, self.layout);
        let timeout = config.launch.ssh_timeout + BEHIND_SSH;
        let interrupted = |signal: i32| {
            say(&format!("{}: ending all processes", signals::name(signal)));
            Ok(128 + signal)
        };
        if let Some(signal) = crew.wait_for(signals, timeout, |it| it.hello.is_some())? {
            return interrupted(signal);
        }
        let hellos: Vec<Hello> =
            crew.connections().iter().filter_map(|connection| connection.hello.clone()).collect();
        check_versions(layout, &hellos)?;
        let devices: Vec<u32> = hellos.iter().map(|hello| hello.devices).collect();
        let ranks = layout.ranks(&devices)?;
        check_elastic(config, (ranks * layout.worker_hosts) as usize)?;
        let interface = config.interface.as_deref();
        let meeting = Meeting::new(&layout.sites, hellos.iter().collect(), interface);
        let site = match choose_scheduler(layout, &meeting, crew, signals)? {
            Ok(site) => site,
            Err(signal) => return interrupted(signal),
        };
        let place = Place { site, address: meeting.address_of(site)?, port: hellos[site].ports[0] };
        let mut settings = passed;
        settings.extend(job_settings(config, layout, ranks, &place, &hellos[site]));
        settings.extend(torch_store(layout, &meeting, &hellos)?);
        if meets(layout, ranks) {
            announce(config, layout, ranks, &place, &hellos[site]);
        }
        let template = self.template(settings, ranks)?;
        let processes = instruct(self.loaded, layout, ranks, &place, &template, crew)?;
        if let Some(signal) = crew.wait_for(signals, START, |it| it.has_started || it.is_idle())? {
            return interrupted(signal);
        }
        let fleet = self.fleet(ranks, discovery, &processes);
        if fleet.is_some() {
            crew.recruit_by(Recruiting {
                launch: config.launch.clone(),
                program: self.programs.launcher.clone(),
                environment: checked(),
                template,
                num_workers: layout.worker_hosts,
                is_here: config.interface.is_none() && layout.sites.iter().all(|it| it.is_local),
                timeout,
            });
        }
        let workers_min = config.min_workers.unwrap_or(1) as usize;
        let supervisor = Supervisor::new(crew, processes, config.launch.grace, workers_min, "");
        Ok(supervisor.with(fleet).watch(signals))
    }

    /// What every agent is told, whatever runs on its machine.
    fn template(
        &self,
        settings: Vec<(String, OsString)>,
        ranks: u32,
    ) -> Result<Instruction, LaunchError> {
        let config = &self.loaded.config;
        let meets = meets(self.layout, ranks);
        Ok(Instruction {
            settings,
            key: if meets { Some(job_key(config)?) } else { None },
            arguments: arguments(self.loaded),
            folder: match &config.launch.chdir {
                Some(folder) => folder.clone().into_os_string(),
                None => current_folder()?,
            },
            virtual_environment: std::env::var_os("VIRTUAL_ENV").filter(|it| !it.is_empty()),
            ..Instruction::default()
        })
    }

    /// The ranks as those who start more of them see them; none where nobody does.
    fn fleet(
        &self,
        ranks: u32,
        discovery: Option<Discovery>,
        processes: &[Member],
    ) -> Option<Fleet> {
        if !Fleet::is_wanted(&self.loaded.config) {
            return None;
        }
        let mut fleet = Fleet::new(&self.loaded.config, discovery);
        let mut places = (0..processes.len()).filter(|place| processes[*place].is_worker());
        for site in self.layout.sites.iter().filter(|site| site.worker_id.is_some()) {
            let places = places.by_ref().take(ranks as usize).collect();
            fleet.begin(site.host.clone(), site.worker_id.unwrap_or(0), places);
        }
        Some(fleet)
    }
}

/// The environment of a connection: this one's has been checked.
fn checked() -> Environment {
    let mut checked = Environment::default();
    checked.set(CHECKED, "1");
    checked
}

fn check_versions(layout: &Layout, hellos: &[Hello]) -> Result<(), LaunchError> {
    for (site, hello) in layout.sites.iter().zip(hellos) {
        if let Some(why) = other_release(hello) {
            let why = format!("{}: {why}", site.host.name);
            return Err(LaunchError::Hosts { whys: vec![why], code: 1 });
        }
    }
    Ok(())
}

/// The scheduler's site: the one that the user names; the launcher's own machine if it takes part
/// or all others reach it; else the first with ranks. A signal ends the choice.
fn choose_scheduler(
    layout: &Layout,
    meeting: &Meeting<'_>,
    crew: &mut RemoteCrew,
    signals: &mut Signals,
) -> Result<Result<usize, i32>, LaunchError> {
    if let Some(site) = layout.scheduler {
        return Ok(Ok(site));
    }
    let own = layout.sites.iter().position(|site| site.is_local).expect("it was added");
    let takes_part = layout.sites[own].worker_id.is_some() || !layout.sites[own].servers.is_empty();
    if takes_part || meeting.is_here() {
        return Ok(Ok(own));
    }
    // The kernel answers those who try; nobody has to.
    let listener = meeting.local_candidate().and_then(|it| TcpListener::bind((it, 0)).ok());
    let Some(address) = listener.as_ref().and_then(|it| it.local_addr().ok()) else {
        return Ok(Ok(0));
    };
    for (index, _) in layout.sites.iter().enumerate().filter(|(_, site)| !site.is_local) {
        crew.order(index, &Order::Probe(address.to_string()));
    }
    let others: Vec<bool> = layout.sites.iter().map(|site| !site.is_local).collect();
    let answered = |connection: &super::remote::Connection| {
        connection.is_local() || connection.probed.is_some()
    };
    if let Some(signal) = crew.wait_for(signals, START, answered)? {
        return Ok(Err(signal));
    }
    let mut answers = crew.connections().iter().zip(others).filter(|(_, other)| *other);
    Ok(Ok(if answers.all(|(it, _)| it.probed == Some(true)) { own } else { 0 }))
}

/// The user's variables for all processes: those whose names begin as ours, and those of `--env`.
fn passed(loaded: &Loaded) -> Result<Vec<(String, OsString)>, LaunchError> {
    let is_kept = |name: &str| {
        let decided = DECIDED.iter().chain(STRAY).chain(KEPT);
        name != "DMLC_INTERFACE" && decided.into_iter().any(|own| *own == name)
    };
    let mut passed: Vec<(String, OsString)> = Vec::new();
    for (name, value) in std::env::vars_os() {
        let Ok(name) = name.into_string() else { continue };
        let is_passed = PASSED.iter().any(|prefix| name.starts_with(prefix))
            || PASSED_TOO.contains(&name.as_str());
        if is_passed && !is_kept(&name) {
            passed.push((name, value));
        }
    }
    passed.sort();
    for text in &loaded.config.launch.pass {
        passed.push(named(text)?);
    }
    let flags = loaded.flags_as_variables().into_iter().filter(|(name, _)| !is_kept(name));
    passed.extend(flags.map(|(name, value)| (name.to_owned(), value.into())));
    Ok(passed)
}

/// What `--env` says: `NAME` from here, or `NAME=VALUE`.
fn named(text: &str) -> Result<(String, OsString), LaunchError> {
    let refused = |problem: String, remedy: &str| {
        Err(LaunchError::Conflict { problem, remedy: remedy.to_owned() })
    };
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (text, None),
    };
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if name.is_empty() || !name.chars().all(is_name) || name.starts_with(|c: char| c.is_numeric()) {
        // The text may be a secret that was put in the wrong place.
        return refused(
            "--env has a value that begins with no name of a variable".to_owned(),
            "write --env NAME, or --env NAME=VALUE (BytePS's NAME:VALUE has another sign)",
        );
    }
    if name.starts_with("BPS_JOB_KEY") {
        return refused(
            format!("--env {name}, but a command line can be read by everyone here"),
            "set BPS_JOB_KEY_FILE here: all processes get the key by themselves",
        );
    }
    match value.map(OsString::from).or_else(|| std::env::var_os(name)) {
        Some(value) => Ok((name.to_owned(), value)),
        None => refused(
            format!("--env {name}, but that variable is not set here"),
            "set it, or write --env NAME=VALUE",
        ),
    }
}

/// What makes the processes of all machines one job.
fn job_settings(
    config: &Config,
    layout: &Layout,
    ranks: u32,
    place: &Place,
    scheduler: &Hello,
) -> Vec<(String, OsString)> {
    let mut settings: Vec<(String, OsString)> = Vec::new();
    let mut set = |name: &str, value: String| settings.push((name.to_owned(), value.into()));
    set(CHECKED, "1".to_owned());
    set("DMLC_NUM_WORKER", layout.worker_hosts.to_string());
    set("DMLC_NUM_SERVER", layout.servers.to_string());
    set("DMLC_PS_ROOT_URI", place.address.clone());
    set("DMLC_PS_ROOT_PORT", place.port.to_string());
    if config.metrics_port.is_none() {
        set("BPS_METRICS_PORT", scheduler.ports[2].to_string());
    }
    if layout.sites.iter().all(|site| site.is_local) && config.interface.is_none() {
        set("DMLC_INTERFACE", "lo".to_owned());
    }
    // A rank that is alone would go without the server that waits for it.
    if layout.worker_hosts * ranks == 1 && layout.servers > 0 {
        set("BYTEPS_FORCE_DISTRIBUTED", "1".to_owned());
    }
    settings
}

/// Where the ranks open torch's store: on the machine of rank 0, unless the user says where.
fn torch_store(
    layout: &Layout,
    meeting: &Meeting<'_>,
    hellos: &[Hello],
) -> Result<Vec<(String, OsString)>, LaunchError> {
    let names = ["MASTER_ADDR", "MASTER_PORT"];
    let own = names.map(|name| std::env::var_os(name).filter(|value| !value.is_empty()));
    if let [Some(address), Some(port)] = own {
        return Ok(vec![(names[0].to_owned(), address), (names[1].to_owned(), port)]);
    }
    let first = layout.sites.iter().position(|site| site.worker_id == Some(0));
    let first = first.expect("a list of machines has a first");
    let address = meeting.address_of(first)?;
    let port = hellos[first].ports[1].to_string();
    Ok(vec![(names[0].to_owned(), address.into()), (names[1].to_owned(), port.into())])
}

/// Whether there is a scheduler: a worker that is alone needs nobody to meet.
fn meets(layout: &Layout, ranks: u32) -> bool {
    layout.servers > 0 || layout.worker_hosts * ranks > 1
}

fn announce(config: &Config, layout: &Layout, ranks: u32, place: &Place, scheduler: &Hello) {
    let site = &layout.sites[place.site];
    let machines =
        layout.sites.iter().filter(|it| it.worker_id.is_some() || !it.servers.is_empty());
    say(&format!(
        "a job on {}: {} on each of {}, {}, scheduler at {} port {}",
        counted(word(machines.count()), "machine"),
        counted(ranks, "rank"),
        layout.worker_hosts,
        if layout.servers == 0 {
            "no server".to_owned()
        } else {
            counted(layout.servers, "server")
        },
        place.address,
        place.port
    ));
    let port = config.metrics_port.unwrap_or(scheduler.ports[2]);
    if port != 0 {
        let there = if site.is_local { String::new() } else { format!(", on {}", site.host.name) };
        say(&format!("watch it with{there}: bps-top --metrics-port {port}"));
    }
}

/// Tells each agent its share; returns all processes, in the order of their places.
fn instruct(
    loaded: &Loaded,
    layout: &Layout,
    ranks: u32,
    place: &Place,
    template: &Instruction,
    crew: &mut RemoteCrew,
) -> Result<Vec<Member>, LaunchError> {
    let config = &loaded.config;
    let meets = meets(layout, ranks);
    let is_elastic = config.elastic != ElasticMode::None;
    let (mut processes, mut members, mut orders) = (Vec::new(), Vec::new(), Vec::new());
    for (index, site) in layout.sites.iter().enumerate() {
        let host = &site.host.name;
        let mut add = |kind, what: String, stays: bool| {
            let label = format!("{what} on {host}");
            processes.push((index, label.clone()));
            members.push(Member::of(kind, label, stays, is_elastic && !stays));
        };
        let has_scheduler = meets && index == place.site;
        if has_scheduler {
            add(Kind::Helper, "scheduler".to_owned(), true);
        }
        for (server, _) in &site.servers {
            add(Kind::Helper, format!("server {server}"), false);
        }
        let workers = site.worker_id.map_or(0, |_| ranks);
        let worker_id = site.worker_id.unwrap_or(0);
        for rank in 0..workers {
            add(Kind::Worker, format!("rank {}", worker_id * ranks + rank), false);
        }
        if !has_scheduler && site.servers.is_empty() && workers == 0 {
            continue;
        }
        let instruction = Instruction {
            scheduler: has_scheduler,
            servers: site.servers.clone(),
            worker_id,
            workers,
            slots: (0..workers).collect(),
            ..template.clone()
        };
        orders.push((index, Order::Start(Box::new(instruction))));
    }
    crew.expect(&processes, !config.launch.no_prefix);
    for (index, order) in orders {
        crew.order(index, &order);
    }
    Ok(members)
}

/// The flags of the launcher that are not the same for all processes, and the user's command.
fn arguments(loaded: &Loaded) -> Vec<OsString> {
    let mut words: Vec<OsString> = Vec::new();
    match loaded.config.launch.gpus {
        Gpus::Auto => {}
        Gpus::Demand => words.push("--gpus=demand".into()),
        Gpus::None => words.push("--gpus=none".into()),
    }
    // Of servers: each machine counts its own from there.
    if loaded.config.port != 0 {
        words.push(format!("--port={}", loaded.config.port).into());
    }
    words.push("--".into());
    words.extend(loaded.command.iter().cloned());
    words
}

/// The user's key as it was written, or a new one.
fn job_key(config: &Config) -> Result<String, LaunchError> {
    let failed = |error| LaunchError::System { what: "the job key", source: error };
    // Both say the same, and it is a key.
    JobKey::load(config).map_err(|error| failed(std::io::Error::other(error)))?;
    match (&config.job_key, &config.job_key_file) {
        (Some(text), _) => Ok(text.trim().to_owned()),
        (None, Some(path)) => {
            let text = std::fs::read_to_string(path).map_err(failed)?;
            Ok(text.trim().to_owned())
        }
        (None, None) => mint_key(),
    }
}

/// The current folder by the name that the user knows it by, which may lead through links that the
/// other machines have and whose ends they have not.
fn current_folder() -> Result<OsString, LaunchError> {
    let failed = |source| LaunchError::System { what: "the current folder has no name", source };
    let real = std::env::current_dir().map_err(failed)?;
    let named = std::env::var_os("PWD").filter(|named| {
        std::fs::canonicalize(named).is_ok_and(|target| target == real)
            && std::path::Path::new(named).is_absolute()
    });
    Ok(named.unwrap_or_else(|| real.into_os_string()))
}

/// What `--dry-run` prints: each machine with its processes, and how it would be reached.
fn describe(layout: &Layout, commands: &[Vec<OsString>]) -> String {
    let mut text = String::new();
    for (site, words) in layout.sites.iter().zip(commands) {
        let mut what = Vec::new();
        if site.worker_id.is_some() {
            what.push(match site.host.count {
                Some(count) => counted(count, "rank"),
                None => "a rank for each GPU, or one".to_owned(),
            });
        }
        for (index, cores) in &site.servers {
            what.push(format!("server {index} with {}", counted(*cores, "core")));
        }
        if what.is_empty() {
            what.push("the scheduler, or nothing".to_owned());
        }
        let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
        let _ = writeln!(text, "{}: {}: {}", site.host.name, what.join(", "), words.join(" "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::frames::PROTOCOL;
    use super::*;
    use bps_engine::config::{Outcome, Program, load};

    #[test]
    fn another_release_is_named_with_its_machine() {
        let words = ["-H", "a:1,b:1", "true"].map(OsString::from);
        let Ok(Outcome::Run(loaded)) = load(Program::Launcher, words, &|_| None) else {
            panic!("it is a job")
        };
        let layout = layout(&loaded, None).unwrap();
        let hello = |version: &str, protocol| Hello {
            version: version.to_owned(),
            protocol,
            ..Hello::default()
        };
        let own = hello(env!("CARGO_PKG_VERSION"), PROTOCOL);
        assert!(check_versions(&layout, &[own.clone(), own.clone()]).is_ok());
        for other in [hello("0.0.0", PROTOCOL), hello(&own.version, PROTOCOL + 1)] {
            let error = check_versions(&layout, &[own.clone(), other]).unwrap_err().to_string();
            assert!(error.starts_with("b: bpslaunch there is of release "), "{error}");
        }
    }

    #[test]
    fn variables_are_named_or_given() {
        let path = std::env::var_os("PATH").unwrap();
        assert_eq!(named("PATH").unwrap(), ("PATH".to_owned(), path));
        assert_eq!(named("A=b=c").unwrap(), ("A".to_owned(), "b=c".into()));
        assert_eq!(named("A=").unwrap(), ("A".to_owned(), "".into()));
        for (text, words) in [
            ("A:b", "write --env NAME, or --env NAME=VALUE"),
            ("=x", "no name"),
            ("", "no name"),
            ("1A=x", "no name"),
            ("BPS_NO_SUCH_VARIABLE", "is not set here"),
            ("BPS_JOB_KEY=00", "BPS_JOB_KEY_FILE"),
        ] {
            let error = named(text).unwrap_err().to_string();
            assert!(error.contains(words) && !error.contains("A:b"), "{text}: {error}");
        }
    }
}
