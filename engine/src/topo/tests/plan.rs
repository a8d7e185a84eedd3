//! Tests of `topo/plan.rs` on the machines of `tests/machines/`.

use super::super::fixture::{self, topology};
use super::*;
use proptest::prelude::*;

fn all(topology: &Topology) -> Vec<usize> {
    topology.cpus.iter().map(|cpu| cpu.id).collect()
}

fn request<'a>(side: Side, threads: &'a [Near], affinity: &'a [usize]) -> Request<'a> {
    Request { side, threads, affinity, others: 0, use_isolated: false }
}

fn cpus(plan: &Pinning) -> Vec<usize> {
    plan.places.iter().map(|place| place.cpu.expect("pinned")).collect()
}

#[test]
fn server_cores_are_physical_cores_near_the_card() {
    let dgx = topology(fixture::DGX);
    let threads = vec![Near::Nic("ibs5".into()); 8];
    let plan = plan(&dgx, &request(Side::Last, &threads, &all(&dgx)));
    assert_eq!(plan.places.len(), 8);
    assert!(plan.places.iter().all(|place| place.memory_node == Some(1)));
    let cores: Vec<usize> =
        cpus(&plan).iter().map(|cpu| dgx.cpu(*cpu).unwrap().siblings[0]).collect();
    assert_eq!(cores, [111, 110, 109, 108, 107, 106, 105, 104]);
    assert_eq!(plan.note, None);
    assert_eq!(plan.usable, 224);
    // More cores than the socket has: the other socket's, then second hardware threads, with a word
    // about it.
    let threads = vec![Near::Nic("ibs5".into()); 113];
    let plan = super::plan(&dgx, &request(Side::Last, &threads, &all(&dgx)));
    assert_eq!(plan.places.iter().filter(|place| place.memory_node == Some(1)).count(), 57);
    assert!(plan.note.unwrap().contains("share a physical core"));
}

#[test]
fn each_local_rank_is_near_its_gpu_and_off_cpu_0() {
    let dgx = topology(fixture::DGX);
    let threads: Vec<Near> = (0..8).map(Near::Gpu).collect();
    let plan = plan(&dgx, &request(Side::First, &threads, &all(&dgx)));
    assert_eq!(cpus(&plan), [1, 2, 3, 4, 56, 57, 58, 59]);
    assert_eq!(
        plan.describe(),
        "threads on CPUs 1,2,3,4,56,57,58,59 (memory on nodes 0,0,0,0,1,1,1,1)"
    );
}

#[test]
fn the_mask_holds() {
    let dgx = topology(fixture::DGX);
    let mask = [0, 112, 60, 61, 172, 173];
    let threads = vec![Near::Gpu(0); 3];
    let plan = plan(&dgx, &request(Side::First, &threads, &mask));
    // Three physical cores: two on the other socket before the one of CPU 0, of which the twin is
    // taken.
    assert_eq!(cpus(&plan), [60, 61, 112]);
    assert_eq!(plan.usable, 6);
    let plan = super::plan(&dgx, &request(Side::First, &threads, &[]));
    assert!(plan.is_crowded && plan.usable == 0);
}

#[test]
fn physical_cores_come_first_on_a_desktop() {
    let desktop = topology(fixture::DESKTOP);
    let threads = vec![Near::Nic("enp3s0".into()); 7];
    let plan = plan(&desktop, &request(Side::First, &threads, &all(&desktop)));
    assert_eq!(
        cpus(&plan),
        [1, 2, 3, 4, 5, 6, 7],
        "CPU 6 is the twin of CPU 0, CPU 7 that of CPU 1"
    );
    assert!(plan.note.is_some());
    let servers = super::plan(&desktop, &request(Side::Last, &threads[..2], &all(&desktop)));
    assert_eq!(cpus(&servers), [11, 10]);
}

#[test]
fn a_quota_bounds_the_threads_not_the_cpus() {
    let container = topology(fixture::CONTAINER);
    let threads = vec![Near::Anywhere; 3];
    let plan = plan(&container, &request(Side::Last, &threads, &all(&container)));
    assert_eq!((plan.usable, plan.is_crowded), (3, false));
    // Each has a third-level cache of its own.
    let l3: Vec<&Vec<usize>> =
        cpus(&plan).iter().map(|&cpu| &container.cpu(cpu).unwrap().l3).collect();
    assert!(l3[0] != l3[1] && l3[1] != l3[2] && l3[0] != l3[2]);
    let threads = vec![Near::Anywhere; 4];
    let plan = super::plan(&container, &request(Side::Last, &threads, &all(&container)));
    assert!(plan.is_crowded && plan.places.iter().all(|place| place.cpu.is_none()));
    let note = plan.note.unwrap();
    assert!(note.contains("4 polling threads for 3 usable CPUs") && note.contains("2.5"), "{note}");
}

#[test]
fn threads_of_other_processes_count() {
    let vm = topology(fixture::PLAIN_VM);
    let threads = vec![Near::Nic("eth0".into()); 2];
    let alone = plan(&vm, &request(Side::Last, &threads, &[0, 1]));
    assert_eq!(cpus(&alone), [1, 0]);
    assert_eq!(alone.places[0].memory_node, None);
    let crowded = plan(&vm, &Request { others: 2, ..request(Side::Last, &threads, &[0, 1]) });
    assert!(crowded.is_crowded && crowded.places.iter().all(|place| place.cpu.is_none()));
    assert_eq!(crowded.describe(), "no thread is pinned");
    assert!(crowded.note.unwrap().contains("may use CPUs 0-1"));
}

#[test]
fn isolated_cpus_are_for_those_who_ask() {
    let uneven = topology(fixture::ASYMMETRIC);
    let threads = vec![Near::Node(0); 7];
    let shared = plan(&uneven, &request(Side::First, &threads, &all(&uneven)));
    // Node 0 has six others online, of which CPU 0 is left out as long as the other node has some.
    assert_eq!(cpus(&shared), [1, 2, 3, 8, 10, 11, 12]);
    let asked = plan(
        &uneven,
        &Request { use_isolated: true, ..request(Side::First, &threads, &all(&uneven)) },
    );
    assert_eq!(cpus(&asked), [1, 2, 3, 4, 5, 6, 7]);
    let confined = plan(&uneven, &request(Side::First, &threads[..2], &[5, 6, 9]));
    assert_eq!(cpus(&confined), [5, 6], "a mask of isolated CPUs is asking; CPU 9 is offline");
}

#[test]
fn memory_comes_from_where_there_is_some() {
    let uneven = topology(fixture::ASYMMETRIC);
    let threads = vec![Near::Nic("enp129s0f0np0".into())];
    let plan = plan(&uneven, &request(Side::Last, &threads, &all(&uneven)));
    assert_eq!(plan.places, [Place { cpu: Some(19), memory_node: Some(2) }]);
}

#[test]
fn unknown_devices_are_anywhere() {
    let vm = topology(fixture::GPU_VM);
    let threads = vec![Near::Nic("none".into()), Near::Gpu(9), Near::Gpu(0), Near::Node(77)];
    let plan = plan(&vm, &request(Side::First, &threads, &all(&vm)));
    assert_eq!(cpus(&plan), [1, 2, 3, 4]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn whatever_is_asked_no_cpu_is_given_twice_or_outside_the_mask(
        machine in 0usize..6,
        mask in proptest::collection::btree_set(0usize..230, 0..60),
        wishes in proptest::collection::vec((0u8..4, 0usize..10), 0..24),
        others in 0usize..4,
        use_isolated in any::<bool>(),
        is_server in any::<bool>(),
    ) {
        static MACHINES: std::sync::LazyLock<Vec<Topology>> = std::sync::LazyLock::new(|| {
            fixture::ALL.map(topology).to_vec()
        });
        let topology = &MACHINES[machine];
        let mask: Vec<usize> = mask.into_iter().collect();
        let threads: Vec<Near> = wishes.into_iter().map(|(kind, index)| match kind {
            0 => Near::Anywhere,
            1 => Near::Gpu(index),
            2 => Near::Nic(topology.nics.get(index).map_or("none", |nic| nic.name.as_str()).into()),
            _ => Near::Node(u32::try_from(index).unwrap()),
        }).collect();
        let side = if is_server { Side::Last } else { Side::First };
        let request = Request { side, threads: &threads, affinity: &mask, others, use_isolated };
        let plan = plan(topology, &request);
        prop_assert_eq!(plan.places.len(), threads.len());
        prop_assert_eq!(plan.is_crowded, threads.len() + others > plan.usable);
        let mut given: Vec<usize> = plan.places.iter().filter_map(|place| place.cpu).collect();
        prop_assert_eq!(given.len(), if plan.is_crowded { 0 } else { threads.len() });
        prop_assert!(given.iter().all(|cpu| mask.contains(cpu) && topology.cpu(*cpu).is_some()));
        given.sort_unstable();
        given.dedup();
        prop_assert!(plan.is_crowded || given.len() == threads.len());
        // Every process that asks gets the same answer.
        prop_assert_eq!(&super::plan(topology, &request), &plan);
    }
}
