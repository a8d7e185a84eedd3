//! Tests of `topo/share.rs`: counts, and the machines of `tests/machines/`.

use super::super::fixture::{self, topology};
use super::super::format_list;
use super::*;
use proptest::prelude::*;

/// Nodes of so many cores, each of two CPUs that are 100 apart.
fn nodes(sizes: &[usize]) -> Vec<NodeCores> {
    let mut next = 0;
    let mut core = || {
        next += 1;
        vec![next - 1, next + 99]
    };
    (0..)
        .zip(sizes)
        .map(|(node, &size)| NodeCores {
            node: Some(node),
            cores: (0..size).map(|_| core()).collect(),
        })
        .collect()
}

fn quotas(default: usize, last: usize) -> Quotas {
    Quotas { default, last }
}

/// Each share is not empty and within its node; no CPU is in two.
fn check(all: &[NodeCores], shares: &[Share]) {
    let mut seen = Vec::new();
    for share in shares {
        assert!(!share.cpus.is_empty() && share.cpus.is_sorted());
        let node = all.iter().find(|node| node.node == share.node).unwrap().cores.concat();
        assert!(share.cpus.iter().all(|cpu| node.contains(cpu)), "{share:?} spans nodes");
        seen.extend(share.cpus.clone());
    }
    let total = seen.len();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), total, "{shares:?} overlap");
}

fn everything(topology: &Topology) -> Vec<usize> {
    topology.cpus.iter().map(|cpu| cpu.id).collect()
}

fn lists(shares: &[Share]) -> Vec<String> {
    shares.iter().map(|share| format_list(&share.cpus)).collect()
}

#[test]
fn even_shares_stay_within_a_node_and_never_overlap() {
    for (sizes, count, default, last) in [
        (vec![8, 8], 4, 0, 0),
        (vec![8, 8], 3, 0, 0),
        (vec![4], 4, 9, 9),
        (vec![10, 10], 8, 1, 6),
        (vec![1, 1, 1], 2, 0, 0),
        (vec![5, 0, 3], 8, 0, 0),
    ] {
        let all = nodes(&sizes);
        let shares = evenly(all.clone(), count, quotas(default, last)).unwrap();
        assert_eq!(shares.len(), count);
        check(&all, &shares);
    }
    let shares = evenly(nodes(&[4, 4]), 3, Quotas::default()).unwrap();
    assert_eq!(lists(&shares), ["0-1,100-101", "2-3,102-103", "4-7,104-107"]);
    let scarce = evenly(nodes(&[1, 1]), 3, Quotas::default()).unwrap_err();
    assert_eq!(scarce, Scarce { cores: 2, processes: 3, node: None });
}

#[test]
fn eight_gpus_on_two_sockets_divide_each_socket() {
    let dgx = topology(fixture::DGX);
    let homes: Vec<Option<u32>> = dgx.gpus.iter().map(|gpu| gpu.node).collect();
    let nodes = cores(&dgx, &everything(&dgx), true);
    let shares = near(&dgx, &nodes, &homes, Quotas::default()).unwrap();
    check(&nodes, &shares);
    assert_eq!(
        lists(&shares),
        [
            "0-13,112-125",
            "14-27,126-139",
            "28-41,140-153",
            "42-55,154-167",
            "56-69,168-181",
            "70-83,182-195",
            "84-97,196-209",
            "98-111,210-223"
        ]
    );
    assert_eq!(shares.iter().filter(|share| share.node == Some(1)).count(), 4);
    // Five ranks: the last GPU has its node for itself.
    let shares = near(&dgx, &nodes, &homes[..5], Quotas::default()).unwrap();
    assert_eq!(lists(&shares[4..]), ["56-111,168-223"]);
    // Without the second threads, and with quotas: the last gets its own, whatever the others have.
    let single = cores(&dgx, &everything(&dgx), false);
    let shares = near(&dgx, &single, &homes, quotas(4, 0)).unwrap();
    assert_eq!(
        lists(&shares),
        ["0-3", "4-7", "8-11", "12-15", "56-59", "60-63", "64-67", "68-111"]
    );
    let shares = near(&dgx, &single, &homes, quotas(0, 20)).unwrap();
    assert_eq!(lists(&shares[6..]), ["84-97", "98-111"], "others come first");
    let shares = near(&dgx, &single, &homes, quotas(2, 20)).unwrap();
    assert_eq!(lists(&shares[6..]), ["60-61", "62-81"]);
}

#[test]
fn what_does_not_divide_goes_to_the_first_ones() {
    let dgx = topology(fixture::DGX);
    let usable: Vec<usize> = everything(&dgx).into_iter().filter(|cpu| cpu % 112 < 54).collect();
    let nodes = cores(&dgx, &usable, true);
    let shares = near(&dgx, &nodes, &[Some(0); 4], Quotas::default()).unwrap();
    let sizes: Vec<usize> = shares.iter().map(|share| share.cpus.len()).collect();
    assert_eq!(sizes, [28, 28, 26, 26]);
}

#[test]
fn a_limited_set_is_kept_and_a_node_without_cpus_is_replaced() {
    let dgx = topology(fixture::DGX);
    // A container of 16 cores of the first socket, with GPUs of both.
    let usable: Vec<usize> = (0..16).chain(112..128).collect();
    let nodes = cores(&dgx, &usable, true);
    let shares = near(&dgx, &nodes, &[Some(0), Some(1)], Quotas::default()).unwrap();
    assert_eq!(lists(&shares), ["0-7,112-119", "8-15,120-127"]);
    assert!(shares.iter().all(|share| share.node == Some(0)));
    let scarce = near(&dgx, &nodes, &[Some(1); 17], Quotas::default()).unwrap_err();
    assert_eq!(scarce, Scarce { cores: 16, processes: 17, node: Some(0) });
    // Node 1 of the uneven machine has no memory, node 2 no CPUs; node 4 is nearest to node 2.
    let uneven = topology(fixture::ASYMMETRIC);
    let nodes = cores(&uneven, &everything(&uneven), true);
    let shares = near(&uneven, &nodes, &[Some(2)], Quotas::default()).unwrap();
    let with_cpus = uneven.nodes.iter().filter(|node| !node.cpus.is_empty());
    let best = with_cpus.min_by_key(|node| uneven.distance(2, node.id)).unwrap();
    assert_eq!(shares[0].node, Some(best.id));
}

#[test]
fn unknown_homes_divide_one_node_or_all_of_them() {
    let vm = topology(fixture::GPU_VM);
    let nodes = cores(&vm, &everything(&vm), true);
    let shares = near(&vm, &nodes, &[None; 4], Quotas::default()).unwrap();
    assert_eq!(lists(&shares), ["0-3", "4-7", "8-11", "12-15"]);
    let dgx = topology(fixture::DGX);
    let nodes = cores(&dgx, &everything(&dgx), true);
    let shares = near(&dgx, &nodes, &[None, Some(1)], Quotas::default()).unwrap();
    assert_eq!(shares, evenly(nodes, 2, Quotas::default()).unwrap());
    let bare = Topology::default();
    let nodes = cores(&bare, &[3, 5], true);
    assert_eq!(nodes, [NodeCores { node: None, cores: vec![vec![3], vec![5]] }]);
    assert_eq!(lists(&near(&bare, &nodes, &[None; 2], Quotas::default()).unwrap()), ["3", "5"]);
}

proptest! {
    #[test]
    fn shares_near_devices_never_overlap(
        usable in proptest::collection::btree_set(0usize..224, 0..224),
        homes in proptest::collection::vec(prop_oneof![Just(0u32), Just(1)], 1..9),
        default in 0usize..20,
        last in 0usize..20,
        siblings: bool,
    ) {
        let dgx = topology(fixture::DGX);
        let usable: Vec<usize> = usable.into_iter().collect();
        let nodes = cores(&dgx, &usable, siblings);
        let homes: Vec<Option<u32>> = homes.into_iter().map(Some).collect();
        match near(&dgx, &nodes, &homes, quotas(default, last)) {
            Ok(shares) => {
                prop_assert_eq!(shares.len(), homes.len());
                check(&nodes, &shares);
                prop_assert!(shares.iter().flat_map(|s| &s.cpus).all(|cpu| usable.contains(cpu)));
            }
            Err(scarce) => prop_assert!(scarce.cores < scarce.processes),
        }
    }
}
