//! Tests of reading topologies: the machines of `tests/machines/`, broken ones, and this one.

#![forbid(unsafe_code)]

use super::fixture::{self, Folder, topology};
use super::*;

#[test]
fn dgx_is_read_whole() {
    let dgx = topology(fixture::DGX);
    assert_eq!((dgx.cpus.len(), dgx.nodes.len(), dgx.gpus.len()), (224, 2, 8));
    let cpu = dgx.cpu(57).unwrap();
    assert_eq!((cpu.package, cpu.core, cpu.node), (Some(1), Some(1), Some(1)));
    assert_eq!(cpu.siblings, [57, 169]);
    assert_eq!(cpu.l2, [57, 169]);
    assert_eq!(format_list(&cpu.l3), "56-111,168-223");
    assert_eq!(format_list(&dgx.nodes[0].cpus), "0-55,112-167");
    assert_eq!(
        (dgx.distance(0, 1), dgx.distance(1, 1), dgx.distance(0, 2)),
        (Some(21), Some(10), None)
    );
    assert_eq!(dgx.nics.len(), 10, "docker0 and lo have no PCI device");
    assert_eq!(dgx.nic("ibs4").unwrap().node, Some(1));
    assert_eq!(dgx.nic("ib").unwrap().name, "ibs0");
    assert_eq!(dgx.nic("eno3").unwrap().speed_mbps, Some(1000));
    let addresses: Vec<&str> = dgx.gpus.iter().map(|gpu| gpu.address.as_str()).collect();
    assert_eq!(addresses[0], "0000:1b:00.0");
    assert!(addresses.is_sorted() && !addresses.contains(&"0000:03:00.0"));
    assert_eq!(dgx.limits.cpu_quota, None);
    assert_eq!(dgx.limits.memory, None);
}

#[test]
fn each_gpu_finds_its_own_card_behind_the_switch() {
    let dgx = topology(fixture::DGX);
    for index in 0..8 {
        let nic = dgx.nic_of_gpu(index).unwrap();
        assert_eq!(nic.name, format!("ibs{index}"));
        assert_eq!(dgx.nearness(nic, &dgx.gpus[index]), Nearness::Switch(4));
    }
    assert_eq!(dgx.nearness(dgx.nic("eno3").unwrap(), &dgx.gpus[0]), Nearness::Node);
    let bridge = |index: usize| dgx.gpus[index].path.bridge();
    assert!(bridge(0).is_some() && bridge(0) != bridge(7));
    assert_eq!(dgx.nearness(dgx.nic("eno3").unwrap(), &dgx.gpus[7]), Nearness::System);
    assert_eq!(dgx.nic_of_gpu(8), None);
}

#[test]
fn gpus_share_out_cards_that_are_equally_near() {
    // Four GPUs and two equal cards on one host bridge, beside a slow one.
    let mut text = String::from("cores cpus=0-3 package=0 node=0 l3=0-3\nnode 0 distance=10\n");
    for device in 1..=4 {
        text +=
            &format!("pci pci0000:00/0000:0{device}:00.0 class=0x030200 vendor=0x10de node=0\n");
    }
    for (device, name, speed) in [(5, "slow0", 1000), (6, "fast0", 100_000), (7, "fast1", 100_000)]
    {
        text +=
            &format!("pci pci0000:00/0000:0{device}:00.0 class=0x020000 vendor=0x15b3 node=0\n");
        text += &format!("net {name} at=0000:0{device}:00.0 speed={speed}\n");
    }
    let machine = topology(&text);
    let names: Vec<&str> =
        (0..4).map(|gpu| machine.nic_of_gpu(gpu).unwrap().name.as_str()).collect();
    assert_eq!(names, ["fast0", "fast1", "fast0", "fast1"]);
}

#[test]
fn a_desktop_has_devices_without_a_node() {
    let desktop = topology(fixture::DESKTOP);
    assert_eq!(desktop.cpu(7).unwrap().siblings, [1, 7]);
    assert_eq!(desktop.gpus.len(), 1, "the graphics in the processor is none of ours");
    assert_eq!((desktop.gpus[0].node, desktop.gpus[0].cpus.len()), (None, 12));
    assert_eq!(desktop.nic_of_gpu(0).unwrap().name, "enp3s0", "the link that is up");
    assert_eq!(desktop.nic("wlp4s0").unwrap().speed_mbps, None);
}

#[test]
fn a_container_shows_its_limits() {
    let container = topology(fixture::CONTAINER);
    assert_eq!(container.limits.cpu_quota, Some(2.5));
    assert_eq!(container.limits.cpus.as_ref().map(Vec::len), Some(64));
    let memory = container.limits.memory.as_ref().unwrap();
    assert!(memory.file.ends_with("sys/fs/cgroup/memory.max"));
    // 8 GiB, less the 1 GiB that is not cached files.
    assert_eq!((memory.limit_bytes, memory.left_bytes), (8 << 30, 7 << 30));
    assert_eq!(container.cpu(5).unwrap().l3, [4, 5, 6, 7, 36, 37, 38, 39]);
    assert!(container.nics.is_empty(), "a veth has no PCI device");
}

#[test]
fn a_plain_machine_is_read_without_nodes_and_caches() {
    let vm = topology(fixture::PLAIN_VM);
    assert_eq!((vm.cpus.len(), vm.nodes.len(), vm.gpus.len()), (2, 0, 0));
    let cpu = vm.cpu(1).unwrap();
    assert_eq!((cpu.node, cpu.siblings.as_slice(), cpu.l3.len()), (None, &[1][..], 0));
    let nic = vm.nic("eth").unwrap();
    assert_eq!((nic.path.address(), nic.node, nic.speed_mbps), (Some("0000:00:03.0"), None, None));
    assert_eq!(vm.limits, cgroup::Limits { cpus: Some(vec![0, 1]), ..Default::default() });
    assert_eq!(vm.memory_node(1), None);
}

#[test]
fn a_gpu_passed_through_is_near_everything() {
    let vm = topology(fixture::GPU_VM);
    assert_eq!(vm.gpus[0].address, "0000:00:06.0");
    assert_eq!(vm.nearness(&vm.nics[0], &vm.gpus[0]), Nearness::HostBridge);
    assert_eq!(vm.gpus[0].path.bridge(), None);
    assert_eq!(vm.nic_of_gpu(0).unwrap().name, "eth0");
    assert_eq!(vm.limits.cpus.as_ref().map(Vec::len), Some(16));
}

#[test]
fn an_uneven_machine_is_read_as_it_is() {
    let uneven = topology(fixture::ASYMMETRIC);
    assert!(uneven.cpu(9).is_none() && uneven.cpu(10).is_some());
    assert_eq!(uneven.isolated, [4, 5, 6, 7]);
    let ids: Vec<u32> = uneven.nodes.iter().map(|node| node.id).collect();
    assert_eq!(ids, [0, 1, 2, 4]);
    assert_eq!(uneven.distance(4, 2), Some(31), "columns are the nodes that exist");
    assert!(uneven.nodes[2].cpus.is_empty() && !uneven.nodes[1].has_memory);
    assert_eq!(uneven.memory_node(0), Some(0));
    assert_eq!(uneven.memory_node(13), Some(2), "the nearest node that has memory");
    // Limits of groups above hold too: batch has 18 CPUs of time, and less memory left than job7 in
    // it.
    assert_eq!(uneven.limits.cpu_quota, Some(18.0));
    let memory = uneven.limits.memory.unwrap();
    assert_eq!((memory.limit_bytes, memory.left_bytes), (4 << 30, (4 << 30) - 4_000_000_000));
}

#[test]
fn groups_are_found_from_inside_a_container_without_its_own_namespace() {
    // Docker on version 1: the paths are the host's, the mount shows the container's part alone.
    let folder = Folder::new();
    folder.write("proc/self/cgroup", "4:memory:/docker/ab12\n1:cpu,cpuacct:/docker/ab12");
    folder.write(
        "proc/self/mountinfo",
        "34 31 0:31 /docker/ab12 /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct\n\
         35 31 0:32 /docker/ab12 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory",
    );
    folder.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000");
    folder.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
    folder.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000");
    let limits = cgroup::Limits::read(folder.path());
    assert_eq!(limits.cpu_quota, Some(1.5));
    assert_eq!(limits.memory.unwrap().left_bytes, 1000);
    // A path that leads out of the namespace, as after a move of the process, means the mount
    // itself.
    folder.write("proc/self/cgroup", "1:cpu,cpuacct:/../../outside");
    assert_eq!(cgroup::Limits::read(folder.path()).cpu_quota, Some(1.5));
}

#[test]
fn broken_files_are_unknown_not_fatal() {
    let folder = Folder::new();
    let error = Topology::read(folder.path()).unwrap_err();
    assert!(error.to_string().contains("cpu/online"), "{error}");
    let system = "sys/devices/system";
    folder.write(&format!("{system}/cpu/online"), "0-1");
    for file in [
        "cpu/cpu0/topology/core_id",
        "cpu/cpu0/topology/thread_siblings_list",
        "cpu/cpu0/cache/index2/level",
        "cpu/isolated",
        "node/node0/cpulist",
        "node/node0/distance",
    ] {
        folder.write(&format!("{system}/{file}"), "4-2,x");
    }
    folder.write("proc/self/cgroup", "::::\n0\n9:cpu");
    folder.write("proc/self/mountinfo", "- - -\n1 2 3");
    folder.write("sys/class/net/eth0", "not a folder");
    let machine = Topology::read(folder.path()).unwrap();
    assert_eq!(machine.cpus.len(), 2);
    assert_eq!(machine.cpus[0], Cpu { id: 0, siblings: vec![0], ..Cpu::default() });
    assert_eq!(machine.limits, cgroup::Limits::default());
    assert!(machine.nics.is_empty() && machine.isolated.is_empty());
}

#[test]
fn this_machine_can_be_read() {
    let machine = Topology::read(Path::new("/")).unwrap();
    let affinity = pin::affinity().unwrap();
    assert!(!affinity.is_empty());
    for cpu in affinity {
        assert!(machine.cpu(cpu).is_some(), "CPU {cpu} is in the mask but not online");
    }
}
