//! Machines for tests: a text of a few lines is expanded into the files that the kernel would show.
//!
//! A line is a word and its arguments; `#` begins a comment:
//! - `cores cpus=0-5 twin=6 package=0 node=0 l3=0-5,12-17`: one physical core for each CPU, whose
//!   second hardware thread is `twin` higher. Without `node` it is on none; without `l3` there is
//!   no cache information at all; `l3=each:4` gives each run of four cores its own.
//! - `online 0-3`, `isolated 2`: replace the list, which is else that of all cores, or empty.
//! - `node 0 distance=10,21 memory=no`
//! - `pci pci0000:00/0000:00:03.0 class=0x020000 vendor=0x1af4 node=0`
//! - `net eth0 at=0000:00:03.0 below=virtio2 speed=-1`, or without `at` for a virtual card
//! - `file PATH TEXT`: any file, with `\n` for a line's end.

#![forbid(unsafe_code)]

use super::{Topology, sysfs};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// The machines that come with the tests.
pub(super) const DGX: &str = include_str!("machines/dgx_h100.txt");
pub(super) const DESKTOP: &str = include_str!("machines/desktop.txt");
pub(super) const CONTAINER: &str = include_str!("machines/container_quota.txt");
pub(super) const PLAIN_VM: &str = include_str!("machines/plain_vm.txt");
pub(super) const GPU_VM: &str = include_str!("machines/gpu_vm.txt");
pub(super) const ASYMMETRIC: &str = include_str!("machines/asymmetric.txt");

/// All of them.
pub(super) const ALL: [&str; 6] = [DGX, DESKTOP, CONTAINER, PLAIN_VM, GPU_VM, ASYMMETRIC];

/// A folder that is removed when it goes.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new() -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("bps-topo-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn write(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        // The kernel ends its files with a line's end.
        std::fs::write(path, format!("{text}\n")).unwrap();
    }

    fn link(&self, path: &str, target: &str) {
        let path = self.0.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, path).unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Reads the machine that the text describes. Making thousands of files takes a while, so each is
/// made once.
pub(super) fn topology(text: &str) -> Topology {
    static READ: Mutex<BTreeMap<String, Topology>> = Mutex::new(BTreeMap::new());
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    let topology = || Topology::read(expand(text).path()).unwrap();
    read.entry(text.to_owned()).or_insert_with(topology).clone()
}

struct Line<'a> {
    word: &'a str,
    subject: &'a str,
    arguments: BTreeMap<&'a str, &'a str>,
}

impl<'a> Line<'a> {
    fn parse(line: &'a str) -> Line<'a> {
        let mut parts = line.split_whitespace();
        let word = parts.next().unwrap();
        let (arguments, subjects): (Vec<&str>, Vec<&str>) =
            parts.partition(|part| part.contains('='));
        let arguments = arguments.iter().map(|part| part.split_once('=').unwrap()).collect();
        Line { word, subject: subjects.first().unwrap_or(&""), arguments }
    }

    fn get(&self, name: &str) -> Option<&'a str> {
        self.arguments.get(name).copied()
    }

    fn list(&self, name: &str) -> Vec<usize> {
        sysfs::parse_list(self.get(name).unwrap()).unwrap()
    }
}

/// Makes the files.
pub(super) fn expand(text: &str) -> Folder {
    let folder = Folder::new();
    let content =
        || text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let lines: Vec<Line<'_>> =
        content().filter(|line| !line.starts_with("file ")).map(Line::parse).collect();
    let mut nodes: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
    let mut all = BTreeSet::new();
    for line in lines.iter().filter(|line| line.word == "cores") {
        write_cores(&folder, line, &mut nodes, &mut all);
    }
    let given = |word: &str| lines.iter().find(|line| line.word == word).map(|line| line.subject);
    let all = format_set(&all);
    let online = given("online").unwrap_or(&all);
    folder.write("sys/devices/system/cpu/online", online);
    folder.write("sys/devices/system/cpu/isolated", given("isolated").unwrap_or(""));
    let mut with_memory = BTreeSet::new();
    for line in lines.iter().filter(|line| line.word == "node") {
        let base = format!("sys/devices/system/node/node{}", line.subject);
        let cpus = nodes.entry(line.subject.to_owned()).or_default();
        let online = sysfs::parse_list(online).unwrap();
        cpus.retain(|cpu| online.contains(cpu));
        folder.write(&format!("{base}/cpulist"), &format_set(cpus));
        folder.write(&format!("{base}/distance"), &line.get("distance").unwrap().replace(',', " "));
        if line.get("memory") != Some("no") {
            with_memory.insert(line.subject.parse::<usize>().unwrap());
        }
        folder.write("sys/devices/system/node/has_memory", &format_set(&with_memory));
    }
    for line in &lines {
        match line.word {
            "pci" => write_pci(&folder, line, &nodes, online),
            "net" => write_net(&folder, line, &lines),
            "cores" | "online" | "isolated" | "node" => {}
            other => panic!("no such word in a fixture: {other}"),
        }
    }
    for line in content().filter_map(|line| line.strip_prefix("file ")) {
        let (path, text) = line.split_once(' ').unwrap_or((line, ""));
        folder.write(path, &text.replace("\\n", "\n"));
    }
    folder
}

fn write_cores(
    folder: &Folder,
    line: &Line<'_>,
    nodes: &mut BTreeMap<String, BTreeSet<usize>>,
    all: &mut BTreeSet<usize>,
) {
    let cpus = line.list("cpus");
    let twin = line.get("twin").map(|twin| twin.parse::<usize>().unwrap());
    for (core, &first) in cpus.iter().enumerate() {
        let threads: BTreeSet<usize> =
            std::iter::once(first).chain(twin.map(|twin| first + twin)).collect();
        for &cpu in &threads {
            all.insert(cpu);
            if let Some(node) = line.get("node") {
                nodes.entry(node.to_owned()).or_default().insert(cpu);
            }
            let base = format!("sys/devices/system/cpu/cpu{cpu}");
            let topology = format!("{base}/topology");
            folder.write(&format!("{topology}/thread_siblings_list"), &format_set(&threads));
            folder.write(&format!("{topology}/physical_package_id"), line.get("package").unwrap());
            folder.write(&format!("{topology}/core_id"), &core.to_string());
            let Some(l3) = line.get("l3") else { continue };
            let l3 = match l3.strip_prefix("each:").map(|count| count.parse::<usize>().unwrap()) {
                Some(count) => {
                    let run = cpus.chunks(count).nth(core / count).unwrap();
                    let twins = run.iter().flat_map(|cpu| twin.map(|twin| cpu + twin));
                    format_set(&run.iter().copied().chain(twins).collect())
                }
                None => l3.to_owned(),
            };
            let own = format_set(&threads);
            let caches = [
                ("1", "Data", &own),
                ("1", "Instruction", &own),
                ("2", "Unified", &own),
                ("3", "Unified", &l3),
            ];
            for (index, (level, kind, shared)) in caches.into_iter().enumerate() {
                let cache = format!("{base}/cache/index{index}");
                folder.write(&format!("{cache}/level"), level);
                folder.write(&format!("{cache}/type"), kind);
                folder.write(&format!("{cache}/shared_cpu_list"), shared);
            }
        }
    }
}

fn write_pci(
    folder: &Folder,
    line: &Line<'_>,
    nodes: &BTreeMap<String, BTreeSet<usize>>,
    online: &str,
) {
    let base = format!("sys/devices/{}", line.subject);
    let node = line.get("node").unwrap_or("-1");
    folder.write(&format!("{base}/class"), line.get("class").unwrap());
    folder.write(&format!("{base}/vendor"), line.get("vendor").unwrap());
    folder.write(&format!("{base}/numa_node"), node);
    let near = nodes.get(node).map(format_set).filter(|list| !list.is_empty());
    folder.write(&format!("{base}/local_cpulist"), near.as_deref().unwrap_or(online));
    let address = line.subject.rsplit('/').next().unwrap();
    folder.link(
        &format!("sys/bus/pci/devices/{address}"),
        &format!("../../../devices/{}", line.subject),
    );
}

fn write_net(folder: &Folder, line: &Line<'_>, lines: &[Line<'_>]) {
    let name = line.subject;
    let parent = match line.get("at") {
        Some(at) => {
            let device = lines.iter().find(|l| l.word == "pci" && l.subject.ends_with(at)).unwrap();
            let below = line.get("below").map(|below| format!("/{below}")).unwrap_or_default();
            format!("{}{below}", device.subject)
        }
        None => "virtual".to_owned(),
    };
    if let Some(speed) = line.get("speed") {
        folder.write(&format!("sys/devices/{parent}/net/{name}/speed"), speed);
    } else {
        std::fs::create_dir_all(folder.path().join(format!("sys/devices/{parent}/net/{name}")))
            .unwrap();
    }
    folder.link(&format!("sys/class/net/{name}"), &format!("../../devices/{parent}/net/{name}"));
}

fn format_set(numbers: &BTreeSet<usize>) -> String {
    sysfs::format_list(&numbers.iter().copied().collect::<Vec<_>>())
}
