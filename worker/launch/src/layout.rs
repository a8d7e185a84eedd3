//! Who runs what in a job on several machines, as the flags say it.

#![forbid(unsafe_code)]

use super::error::LaunchError;
use super::hosts::{Counted, Host, is_local, parse_list, read_file};
use super::local::DECIDED;
use bps_engine::base::word;
use bps_engine::config::{Config, ElasticMode, Loaded, Origin};
use bps_engine::limits::{RANKS_MAX, SERVERS_MAX};

/// What the sites of the launcher's own machine are called where the lists do not name it.
const HERE: &str = "localhost";

/// A machine of the job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Site {
    pub(super) host: Host,
    /// Whether it is the launcher's own, and needs no ssh.
    pub(super) is_local: bool,
    /// Its number among the machines with ranks.
    pub(super) worker_id: Option<u32>,
    /// Number and cores of each server.
    pub(super) servers: Vec<(u32, u32)>,
}

/// All machines of a job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    pub(super) sites: Vec<Site>,
    /// How many of them have ranks; these come first.
    pub(super) worker_hosts: u32,
    pub(super) servers: u32,
    /// The machine that `--scheduler-host` names, among the sites.
    pub(super) scheduler: Option<usize>,
}

/// Reads the flags that say where the processes run; the ranks on these machines, if they were
/// discovered.
pub(super) fn layout(
    loaded: &Loaded,
    discovered: Option<Vec<Host>>,
) -> Result<Layout, LaunchError> {
    let config = &loaded.config;
    let launch = &config.launch;
    let is_discovered = discovered.is_some();
    let workers = match (&launch.hosts, &launch.hostfile) {
        (None, None) if is_discovered => discovered.unwrap_or_default(),
        _ if is_discovered => {
            return Err(conflict(
                "--host-discovery together with --hosts or --hostfile",
                "leave out the list: the command names the machines",
            ));
        }
        (Some(_), Some(_)) => {
            return Err(conflict("--hosts together with --hostfile", "leave out one of them"));
        }
        (Some(text), None) => parse_list(text, "--hosts", Counted::Ranks)?,
        (None, Some(path)) => read_file(path)?,
        (None, None) => {
            return Err(conflict(
                "there is a flag for several machines, but neither --hosts nor --hostfile",
                "name the machines: bpslaunch --hosts host1:4,host2:4 COMMAND",
            ));
        }
    };
    refuse_decided(loaded)?;
    let mut layout = Layout { sites: Vec::new(), worker_hosts: 0, servers: 0, scheduler: None };
    for host in workers {
        let name = host.name.clone();
        let index = layout.site_of(host)?;
        if layout.sites[index].worker_id.is_some() {
            let problem =
                format!("{} and {name} are both this machine", layout.sites[index].host.name);
            return Err(conflict(&problem, "name each machine once"));
        }
        layout.sites[index].worker_id = Some(layout.worker_hosts);
        layout.worker_hosts += 1;
    }
    layout.place_servers(loaded)?;
    if is_discovered && layout.servers == 0 {
        if matches!(loaded.origin("DMLC_NUM_SERVER"), Origin::Flag(_)) {
            return Err(conflict(
                "--servers 0 together with --host-discovery, by which further machines may come",
                "leave it out, or name machines of servers that stay: --servers cpu1:8",
            ));
        }
        // One machine now, and perhaps several later.
        layout.sites[0].servers.push((0, config.server_cores));
        layout.servers = 1;
    }
    if let Some(name) = &launch.scheduler_host {
        let mut hosts = parse_list(name, "--scheduler-host", Counted::Ranks)?;
        let host = hosts.swap_remove(0);
        if !hosts.is_empty() || host.count.is_some() {
            let problem = format!("--scheduler-host {name} is more than the name of one machine");
            return Err(conflict(&problem, "give a name as in --hosts"));
        }
        layout.scheduler = Some(layout.site_of(host)?);
    }
    refuse_too_many(&layout)?;
    Ok(layout)
}

impl Layout {
    /// The site of the launcher's own machine, which is added if no list names it.
    pub(super) fn local_site(&mut self) -> usize {
        let found = self.sites.iter().position(|site| site.is_local);
        found.unwrap_or_else(|| {
            let host = Host { user: None, name: HERE.to_owned(), count: None };
            self.sites.push(Site { host, is_local: true, worker_id: None, servers: Vec::new() });
            self.sites.len() - 1
        })
    }

    /// The site of this name, which may be new; the launcher's own machine has one, whatever its
    /// names are.
    fn site_of(&mut self, host: Host) -> Result<usize, LaunchError> {
        let is_local = host.user.is_none() && is_local(&host.name);
        let is_same = |site: &Site| site.host.name == host.name || is_local && site.is_local;
        if let Some(index) = self.sites.iter().position(is_same) {
            let known = &mut self.sites[index].host;
            if let (Some(one), Some(other)) = (&known.user, &host.user)
                && one != other
            {
                let problem = format!("{one}@{0} and {other}@{0}", host.name);
                return Err(conflict(&problem, "log in to a machine as one user"));
            }
            known.user = known.user.take().or(host.user);
            return Ok(index);
        }
        self.sites.push(Site { host, is_local, worker_id: None, servers: Vec::new() });
        Ok(self.sites.len() - 1)
    }

    /// Servers where the flag says; otherwise one on each machine with ranks, if sums pass servers.
    fn place_servers(&mut self, loaded: &Loaded) -> Result<(), LaunchError> {
        let config = &loaded.config;
        let workers = self.worker_hosts;
        if let Some(text) = &config.launch.server_hosts {
            for host in parse_list(text, "--servers", Counted::Cores)? {
                let cores = host.count.unwrap_or(config.server_cores);
                let index = self.site_of(Host { count: None, ..host })?;
                self.sites[index].servers.push((self.servers, cores));
                self.servers += 1;
            }
            return Ok(());
        }
        // As many ranks on each machine as there may be: how many is not known yet.
        let place = Config { num_workers: workers, local_size: 2, ..config.clone() };
        let servers = match loaded.origin("DMLC_NUM_SERVER") {
            Origin::Flag(_) if config.num_servers == 0 && place.needs_servers() => {
                return Err(conflict(
                    "--servers 0, but what the machines have can only be added up by servers",
                    "leave it out for one server on each machine",
                ));
            }
            Origin::Flag(_) => config.num_servers,
            _ if place.needs_servers() => workers,
            _ => 0,
        };
        for server in 0..servers {
            let site = &mut self.sites[(server % workers) as usize];
            site.servers.push((server, config.server_cores));
        }
        self.servers = servers;
        Ok(())
    }

    /// Ranks of each machine: what the lists say, or the machines themselves (`devices` by site).
    pub(super) fn ranks(&self, devices: &[u32]) -> Result<u32, LaunchError> {
        let workers = self.sites.iter().zip(devices).filter(|(site, _)| site.worker_id.is_some());
        let counts: Vec<(&str, u32)> = workers
            .map(|(site, devices)| (site.host.name.as_str(), site.host.count.unwrap_or(*devices)))
            .collect();
        let (first, count) = counts[0];
        if let Some((other, different)) = counts.iter().find(|(_, other)| *other != count) {
            let problem = format!("{count} ranks on {first}, but {different} on {other}");
            let remedy = format!(
                "every machine runs as many: {first}:{0},{other}:{0}",
                count.min(*different)
            );
            return Err(conflict(&problem, &remedy));
        }
        if count as usize * counts.len() > RANKS_MAX {
            let problem = format!("{count} ranks on each of {} machines", counts.len());
            return Err(conflict(&problem, &format!("a job has {RANKS_MAX} at most")));
        }
        Ok(count)
    }
}

fn refuse_decided(loaded: &Loaded) -> Result<(), LaunchError> {
    if loaded.config.launch.local > 0 {
        return Err(conflict("--local together with --hosts", "leave out one of them"));
    }
    for name in DECIDED.iter().filter(|name| **name != "DMLC_INTERFACE") {
        if let Origin::Flag(flag) = loaded.origin(name) {
            return Err(conflict(
                &format!("--{flag} together with --hosts, which decides that by itself"),
                &format!("leave out --{flag}"),
            ));
        }
    }
    Ok(())
}

fn refuse_too_many(layout: &Layout) -> Result<(), LaunchError> {
    if layout.servers as usize > SERVERS_MAX {
        let problem = format!("{} servers", layout.servers);
        return Err(conflict(&problem, &format!("a job has {SERVERS_MAX} at most")));
    }
    Ok(())
}

/// Refuses what the job cannot begin with, once its size is known.
pub(super) fn check_elastic(config: &Config, ranks: usize) -> Result<(), LaunchError> {
    match config.min_workers {
        Some(least) if config.elastic != ElasticMode::None && least > word(ranks) => {
            let problem = format!("--min-workers {least}, but the job begins with {ranks}");
            Err(conflict(&problem, "lower it, or start more with --hosts"))
        }
        _ => match config.launch.max_workers {
            Some(most) if most < word(ranks) => {
                let problem = format!("--max-workers {most}, but the job begins with {ranks}");
                Err(conflict(&problem, "raise it, or start fewer with --hosts"))
            }
            _ => Ok(()),
        },
    }
}

fn conflict(problem: &str, remedy: &str) -> LaunchError {
    LaunchError::Conflict { problem: problem.to_owned(), remedy: remedy.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bps_engine::config::{Outcome, Program, load};

    fn loaded(arguments: &[&str]) -> Loaded {
        let words = arguments.iter().map(Into::into);
        match load(Program::Launcher, words, &|_| None) {
            Ok(Outcome::Run(loaded)) => *loaded,
            other => panic!("{other:?}"),
        }
    }

    fn of(arguments: &[&str]) -> Result<Layout, String> {
        layout(&loaded(arguments), None).map_err(|error| error.to_string())
    }

    /// Name, number among the workers, and servers of a machine.
    type Row = (String, Option<u32>, Vec<(u32, u32)>);

    fn table(layout: &Layout) -> Vec<Row> {
        let sites = layout.sites.iter();
        sites.map(|site| (site.host.name.clone(), site.worker_id, site.servers.clone())).collect()
    }

    #[test]
    fn servers_are_where_the_flag_says_or_on_each_machine() {
        let named = of(&["-H", "a:2,b:2", "--servers", "b:3,me@c", "--cores", "5"]).unwrap();
        let wanted = [
            ("a".into(), Some(0), vec![]),
            ("b".into(), Some(1), vec![(0, 3)]),
            ("c".into(), None, vec![(1, 5)]),
        ];
        assert_eq!(table(&named), wanted);
        assert_eq!((named.worker_hosts, named.servers), (2, 2));
        let each = of(&["-H", "a:2,b:2"]).unwrap();
        assert_eq!(table(&each)[1], ("b".into(), Some(1), vec![(1, 1)]));
        let counted = of(&["-H", "a:2,b:2", "--servers", "3"]).unwrap();
        assert_eq!(table(&counted)[0], ("a".into(), Some(0), vec![(0, 1), (2, 1)]));
        assert_eq!(of(&["-H", "a:2"]).unwrap().servers, 0);
        assert_eq!(of(&["-H", "a:2", "--servers", "1"]).unwrap().servers, 1);
    }

    #[test]
    fn the_scheduler_may_have_a_machine_of_its_own() {
        let own = of(&["-H", "a:2,b:2", "--scheduler-host", "me@c"]).unwrap();
        assert_eq!((own.scheduler, own.sites.len()), (Some(2), 3));
        let shared = of(&["-H", "a:2,b:2", "--scheduler-host", "b"]).unwrap();
        assert_eq!((shared.scheduler, shared.sites.len()), (Some(1), 2));
        let mut local = of(&["-H", "a:2,localhost:2"]).unwrap();
        assert_eq!((local.local_site(), local.sites.len()), (1, 2));
        let mut none = of(&["-H", "a:2"]).unwrap();
        assert_eq!((none.local_site(), none.sites.len()), (1, 2));
    }

    #[test]
    fn this_machine_has_one_site_under_all_its_names() {
        let own = bps_engine::host::name();
        let layout = of(&["-H", "localhost:2", "--servers", "127.0.0.1:3"]).unwrap();
        assert_eq!(table(&layout), [("localhost".into(), Some(0), vec![(0, 3)])]);
        let error = of(&["-H", &format!("{own}:2,localhost:2")]).unwrap_err();
        assert!(error.contains(&format!("{own} and localhost are both this machine")), "{error}");
    }

    #[test]
    fn what_does_not_fit_is_refused_with_both_sides() {
        for (arguments, words) in [
            (&["-H", "a", "--hostfile", "f"][..], "--hosts together with --hostfile"),
            (&["-H", "a", "--local", "2"], "--local together with --hosts"),
            (&["-H", "a", "--workers", "2"], "--workers together with --hosts"),
            (&["-H", "a", "--root-port", "9"], "--root-port together with --hosts"),
            (&["-H", "a,b", "--servers", "0"], "--servers 0"),
            (&["-H", "a", "--servers", "c:0"], "'0' is no number of cores from 1 to 256"),
            (&["-H", "me@a", "--servers", "you@a"], "me@a and you@a"),
            (&["-H", "a", "--scheduler-host", "b,c"], "more than the name of one machine"),
            (&["--servers", "c:1"], "neither --hosts nor --hostfile"),
        ] {
            let error = of(arguments).expect_err(words);
            assert!(error.contains(words), "{arguments:?}: {error}");
        }
    }

    #[test]
    fn every_machine_has_as_many_ranks() {
        let ranks = |list: &str, devices: &[u32]| {
            let layout = of(&["-H", list]).unwrap();
            layout.ranks(devices).map_err(|error| error.to_string())
        };
        assert_eq!(ranks("a:2,b:2", &[8, 8]), Ok(2));
        assert_eq!(ranks("a,b", &[8, 8]), Ok(8));
        assert_eq!(ranks("a:8,b", &[1, 8]), Ok(8));
        let error = ranks("a:2,b:4", &[1, 1]).unwrap_err();
        assert_eq!(error, "2 ranks on a, but 4 on b; every machine runs as many: a:2,b:2");
        assert!(ranks("a,b", &[8, 4]).is_err());
        assert!(ranks("a:4096,b:4096", &[1, 1]).unwrap_err().contains("4096 at most"));
    }
}
