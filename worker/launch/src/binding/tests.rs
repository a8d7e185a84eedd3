//! Tests of `binding.rs` on fake machines.

use super::*;
use bps_engine::config::Config;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

/// The files of a machine, which go away with the test.
struct Root(PathBuf);

impl Root {
    /// As many nodes as there are lists of cores. Each core has a second thread, so much higher.
    fn new(nodes: &[&str], twin: usize) -> Root {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("bps-binding-{}-{number}", std::process::id());
        let root = Root(std::env::temp_dir().join(name));
        let mut online = Vec::new();
        for (node, list) in nodes.iter().enumerate() {
            let cores = parse_list(list).unwrap();
            let mut cpus = cores.clone();
            if twin > 0 {
                cpus.extend(cores.iter().map(|cpu| cpu + twin));
            }
            let folder = format!("sys/devices/system/node/node{node}");
            root.write(&format!("{folder}/cpulist"), &format_list(&cpus));
            let distance = |other| if other == node { "10" } else { "21" };
            let distances: Vec<&str> = (0..nodes.len()).map(distance).collect();
            root.write(&format!("{folder}/distance"), &distances.join(" "));
            for &cpu in &cpus {
                let first = if cores.contains(&cpu) { cpu } else { cpu - twin };
                let core =
                    if twin > 0 { format!("{first},{}", first + twin) } else { cpu.to_string() };
                let file = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
                root.write(&file, &core);
            }
            online.extend(cpus);
        }
        online.sort_unstable();
        root.write("sys/devices/system/cpu/online", &format_list(&online));
        root
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, format!("{text}\n")).unwrap();
    }

    /// The GPU of this number, on this node; -1 as virtual machines have it.
    fn gpu(self, number: usize, node: i32) -> Root {
        let address = format!("0000:{number:x}b:00.0");
        let device = format!("sys/bus/pci/devices/{address}");
        self.write(&format!("{device}/class"), "0x030200");
        self.write(&format!("{device}/vendor"), "0x10de");
        self.write(&format!("{device}/numa_node"), &node.to_string());
        let text =
            format!("Model: \t NVIDIA H100\nGPU UUID: \t GPU-{number}e\nDevice Minor: \t {number}");
        self.write(&format!("proc/driver/nvidia/gpus/{address}/information"), &text);
        self.write(&format!("dev/nvidia{number}"), "");
        self
    }

    fn machine(&self, launch: &LaunchConfig) -> Machine {
        let online = std::fs::read_to_string(self.0.join("sys/devices/system/cpu/online")).unwrap();
        Machine::below(&self.0, parse_list(&online).unwrap(), launch).unwrap()
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Eight GPUs on two sockets of eight hyper-threaded cores.
fn dgx() -> Root {
    (0..8).fold(Root::new(&["0-7", "8-15"], 16), |root, gpu| root.gpu(gpu, i32::from(gpu > 3)))
}

/// Four GPUs in a virtual machine that knows no nodes of devices.
fn vm() -> Root {
    (0..4).fold(Root::new(&["0-7"], 0), |root, gpu| root.gpu(gpu, -1))
}

fn launch() -> LaunchConfig {
    Config::default().launch
}

fn wanted(processes: u32) -> Wanted {
    Wanted { processes, server_threads: 0, without_gpus: true }
}

fn bound(machine: &Machine, launch: &LaunchConfig, wanted: Wanted) -> (Vec<Binding>, Vec<String>) {
    let mut notes = Vec::new();
    (machine.bind(launch, wanted, &mut notes).unwrap(), notes)
}

fn lists(bindings: &[Binding]) -> Vec<String> {
    bindings.iter().map(|binding| format_list(binding.cpus.as_ref().unwrap())).collect()
}

fn lines(bindings: &[Binding]) -> Vec<&str> {
    bindings.iter().filter_map(|binding| binding.line.as_deref()).collect()
}

#[test]
fn eight_gpus_on_two_sockets() {
    let root = dgx();
    let launch = launch();
    let machine = root.machine(&launch);
    assert_eq!(machine.processes(&launch), 8);
    let (bindings, notes) = bound(&machine, &launch, wanted(8));
    assert!(notes.is_empty(), "{notes:?}");
    let expected = ["0-1,16-17", "2-3,18-19", "4-5,20-21", "6-7,22-23", "8-9,24-25", "10-11,26-27"];
    assert_eq!(lists(&bindings)[..6], expected);
    let nodes: Vec<Option<u32>> = bindings.iter().map(|binding| binding.memory_node).collect();
    assert_eq!(nodes, [0, 0, 0, 0, 1, 1, 1, 1].map(Some));
    assert!(bindings.iter().all(|binding| binding.cuda.is_none()), "all GPUs stay visible");
    assert_eq!(
        lines(&bindings)[5],
        "GPU 5 (NVIDIA H100 at 0000:5b:00.0), CPUs 10-11,26-27, NUMA node 1"
    );
}

#[test]
fn servers_beside_and_threads_of_other_jobs_keep_their_cores() {
    let root = dgx();
    let launch = launch();
    let mut machine = root.machine(&launch);
    machine.claimed = vec![1, 20];
    let servers = Wanted { server_threads: 2, without_gpus: false, ..wanted(8) };
    let (bindings, _) = bound(&machine, &launch, servers);
    // Cores 1 and 4 are claimed, and servers choose from the last one down.
    assert_eq!(
        lists(&bindings),
        ["0,2,16,18", "3,5,19,21", "6,22", "7,23", "8-9,24-25", "10-11,26-27", "12,28", "13,29"]
    );
    // Where that would leave a node short, nobody's cores are kept.
    machine.claimed = vec![0, 1, 2, 3, 4];
    let (bindings, _) = bound(&machine, &launch, servers);
    assert_eq!(lists(&bindings)[0], "0-1,16-17");
}

#[test]
fn a_virtual_machine_is_divided_evenly() {
    let root = vm();
    let launch = launch();
    let machine = root.machine(&launch);
    assert_eq!(machine.processes(&launch), 4);
    let (bindings, notes) = bound(&machine, &launch, wanted(4));
    assert_eq!(lists(&bindings), ["0-1", "2-3", "4-5", "6-7"]);
    assert!(bindings.iter().all(|binding| binding.memory_node.is_none()), "there is one node");
    assert_eq!(lines(&bindings)[0], "GPU 0 (NVIDIA H100 at 0000:0b:00.0), CPUs 0-1, NUMA node 0");
    assert!(notes.is_empty());
    let (bindings, notes) = bound(&machine, &launch, Wanted { without_gpus: false, ..wanted(6) });
    assert_eq!(bindings, vec![Binding::default(); 6]);
    assert_eq!(notes, ["6 workers and 4 GPUs: none is bound to a GPU"]);
    let off = LaunchConfig { numa: false, ..launch };
    let (bindings, _) = bound(&machine, &off, wanted(2));
    assert_eq!(lines(&bindings)[1], "GPU 1 (NVIDIA H100 at 0000:1b:00.0)");
    assert!(bindings.iter().all(|binding| binding.cpus.is_none()));
}

#[test]
fn without_gpus_all_is_as_before() {
    let root = Root::new(&["0-3", "4-7"], 0);
    let launch = LaunchConfig { visible_devices: Some("0,1,2".into()), ..launch() };
    let machine = root.machine(&launch);
    assert_eq!(machine.processes(&launch), 3);
    let (bindings, notes) = bound(&machine, &launch, wanted(3));
    assert_eq!(lists(&bindings), ["0-1", "2-3", "4-7"]);
    assert!(bindings.iter().all(|binding| binding.memory_node.is_none()));
    assert_eq!(lines(&bindings)[2], "CPUs 4-7, NUMA node 1");
    assert!(notes.is_empty());
    // One process, or those of a whole job on this machine, are left to the kernel.
    assert_eq!(bound(&machine, &launch, wanted(1)).0, [Binding::default()]);
    let whole = Wanted { without_gpus: false, ..wanted(2) };
    assert_eq!(bound(&machine, &launch, whole).0, vec![Binding::default(); 2]);
    let (bindings, notes) = bound(&machine, &launch, wanted(9));
    assert_eq!(bindings, vec![Binding::default(); 9]);
    assert_eq!(notes, ["9 workers share 8 cores, so none is bound to cores of its own"]);
    let none = LaunchConfig { visible_devices: Some("void".into()), ..launch };
    assert_eq!(root.machine(&none).processes(&none), 1);
    // The same machine with GPUs that nobody shall look at.
    let launch = LaunchConfig { gpus: Gpus::None, ..none };
    let machine = dgx().machine(&launch);
    assert_eq!(machine.processes(&launch), 1);
    assert_eq!(lines(&bound(&machine, &launch, wanted(2)).0)[0], "CPUs 0-7,16-23, NUMA node 0");
    // A whole job on it is left to the kernel too, however many processes have a GPU to be near to.
    assert_eq!(bound(&machine, &launch, whole), (vec![Binding::default(); 2], Vec::new()));
}

#[test]
fn a_limited_set_is_kept() {
    let root = dgx();
    let launch = LaunchConfig { cuda_visible: Some("3,4".into()), ..launch() };
    // By affinity, and by a control group that says less.
    root.write("proc/self/cgroup", "0::/");
    root.write(
        "proc/self/mountinfo",
        "35 25 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate",
    );
    root.write("sys/fs/cgroup/cpuset.cpus.effective", "0-5");
    let machine = Machine::below(&root.0, (2..12).collect(), &launch).unwrap();
    assert_eq!(machine.processes(&launch), 2);
    let (bindings, _) = bound(&machine, &launch, wanted(2));
    assert_eq!(lists(&bindings), ["2-3", "4-5"]);
    assert_eq!(
        lines(&bindings)[1],
        "GPU 1 (NVIDIA H100 at 0000:4b:00.0), CPUs 4-5, NUMA node 0, far from the GPU, which is \
         on node 1"
    );
    let small = Machine::below(&root.0, vec![3, 12], &launch).unwrap();
    let (bindings, notes) = bound(&small, &launch, wanted(2));
    assert!(bindings.iter().all(|binding| binding.cpus.is_none()));
    assert_eq!(
        notes,
        ["2 workers share 1 cores of NUMA node 0, so none is bound to cores of its own"]
    );
}

#[test]
fn variables_of_byteps_and_cuda_meet() {
    let root = dgx();
    let launch = LaunchConfig {
        visible_devices: Some("6,7".into()),
        numa_default_quota: 2,
        multithreaded_cpu: false,
        cpu_blacklist: Some("8,24".into()),
        ..launch()
    };
    let (bindings, _) = bound(&root.machine(&launch), &launch, wanted(2));
    assert_eq!(lists(&bindings), ["9-10", "11-15"]);
    assert!(bindings.iter().all(|binding| binding.cuda.as_deref() == Some("GPU-6e,GPU-7e")));
    assert!(lines(&bindings)[1].starts_with("GPU 1 (NVIDIA H100 at 0000:7b:00.0)"));
    let quota = LaunchConfig { numa_root_quota: 3, ..launch.clone() };
    let (bindings, _) = bound(&root.machine(&quota), &quota, wanted(2));
    assert_eq!(lists(&bindings), ["9-10", "11-13"]);
    let lists_given = LaunchConfig { visible_cpu_cores: Some("1,4-5:6".into()), ..launch.clone() };
    let (bindings, _) = bound(&root.machine(&lists_given), &lists_given, wanted(2));
    assert_eq!(lists(&bindings), ["1,4-5", "6"]);
    assert!(lines(&bindings)[1].contains("CPU 6, NUMA node 0, far from the GPU"));
    let wrong = LaunchConfig { cpu_blacklist: Some("x".into()), ..launch };
    let error = root.machine(&wrong).bind(&wrong, wanted(2), &mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("BYTEPS_CPU_BLACKLIST=x"), "{error}");
}

#[test]
fn each_slice_goes_to_its_process() {
    let root = Root::new(&["0-3", "4-7"], 0).gpu(0, 1);
    let launch = LaunchConfig { cuda_visible: Some("MIG-a1,MIG-b2".into()), ..launch() };
    let machine = root.machine(&launch);
    assert_eq!(machine.processes(&launch), 2);
    let (bindings, notes) = bound(&machine, &launch, wanted(2));
    let cuda: Vec<&str> = bindings.iter().filter_map(|b| b.cuda.as_deref()).collect();
    assert_eq!(cuda, ["MIG-a1", "MIG-b2"]);
    assert_eq!(
        lines(&bindings)[1],
        "GPU 0 (MIG-b2 of NVIDIA H100 at 0000:0b:00.0), CPUs 6-7, NUMA node 1"
    );
    assert!(notes[0].contains("one MIG slice only"), "{notes:?}");
}

#[test]
fn demands_that_cannot_be_met_are_errors() {
    let demand = LaunchConfig { gpus: Gpus::Demand, ..launch() };
    let root = vm();
    let error = |launch: &LaunchConfig, processes| {
        let error =
            root.machine(launch).bind(launch, wanted(processes), &mut Vec::new()).unwrap_err();
        assert_eq!(error.code(), 2);
        error.to_string()
    };
    let text = error(&demand, 5);
    assert!(text.contains("5 worker processes want a GPU each, but 4 GPUs are visible;"), "{text}");
    let hidden = LaunchConfig { cuda_visible: Some("2".into()), ..demand.clone() };
    let text = error(&hidden, 2);
    assert!(text.contains("1 GPU is visible (CUDA_VISIBLE_DEVICES=2)"), "{text}");
    assert_eq!(bound(&root.machine(&demand), &demand, wanted(4)).0.len(), 4);
    let bare = Root::new(&["0-3"], 0).machine(&demand);
    let error = bare.bind(&demand, wanted(1), &mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("0 GPUs are visible"), "{error}");
    for (cuda, nvidia, says) in [
        (Some("0,7"), None, "names GPU '7'"),
        (None, Some("0,1,2,3,4"), "asks for 5 GPUs"),
        (Some("all"), None, "neither a GPU's number"),
    ] {
        let launch = LaunchConfig {
            cuda_visible: cuda.map(str::to_owned),
            visible_devices: nvidia.map(str::to_owned),
            ..launch()
        };
        let error = Machine::below(&root.0, vec![0], &launch).err().unwrap();
        assert_eq!(error.code(), 2);
        assert!(error.to_string().contains(says), "{error}");
    }
}

#[test]
fn explicit_lists_are_checked() {
    let allowed: Vec<usize> = (0..8).collect();
    assert_eq!(visible_cpus("1,4-5:6", 2, &allowed).unwrap(), [vec![1, 4, 5], vec![6]]);
    let error = visible_cpus("1", 2, &allowed).unwrap_err().to_string();
    assert!(error.contains("1 lists for 2 processes"), "{error}");
    let error = visible_cpus("1:20", 2, &allowed).unwrap_err().to_string();
    assert!(error.contains("names CPU 20") && error.contains("may use 0-7"), "{error}");
    for wrong in ["", "a", "5-4", "1,", "-1", "0-99999999999", "1:x"] {
        assert!(visible_cpus(wrong, 1, &allowed).is_err(), "{wrong:?}");
    }
}
