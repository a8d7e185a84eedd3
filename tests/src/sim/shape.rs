//! How large a simulated job is, and how its ranks are numbered.

use bps_engine::base::{Placement, Rank};
use bps_engine::config::{AutoCompression, PayloadChecksum};
use bps_engine::proto::messages::Planning;
use bps_engine::transport::sim::Random;

/// How ranks share hosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Groups {
    /// Each is alone, and every contribution goes to a server.
    Apart,
    /// Several on a host reduce among themselves first.
    Hosts,
    /// As either, and each rank has a GPU, on which most tensors are.
    Gpus,
}

/// How large a job is, and how its tensors are cut.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Ranks.
    pub workers: u32,
    /// Servers.
    pub servers: u32,
    /// Cores of each server.
    pub cores: u32,
    /// Ranks of each host.
    pub hosts: Vec<u32>,
    /// Largest part, and whether the ranks of a host reduce among themselves.
    pub planning: Planning,
    /// Bytes in flight on a lane.
    pub credit_bytes: usize,
    /// Which payloads carry a CRC-32C.
    pub payload_checksum: PayloadChecksum,
    /// Every rank has a GPU.
    pub devices: bool,
}

/// How far a rank encodes what it may or may not encode: neighbours differ.
pub(super) fn auto_of(rank: Rank) -> AutoCompression {
    match rank.0 % 3 {
        0 => AutoCompression::None,
        1 => AutoCompression::Codec,
        _ => AutoCompression::Bf16,
    }
}

impl Shape {
    /// Some shape.
    pub(super) fn random(random: &mut Random, groups: Groups) -> Shape {
        match groups {
            Groups::Gpus => shape_of_gpus(random),
            _ => shape_of_hosts(random, groups),
        }
    }

    /// Whether ranks of a host sum among themselves.
    pub(super) fn sums_on_hosts(&self) -> bool {
        self.planning.local_reduce && self.hosts.iter().any(|size| *size > 1)
    }

    /// The host of a rank.
    pub(super) fn host_of(&self, rank: u32) -> usize {
        let mut end = 0;
        let host = self.hosts.iter().position(|size| {
            end += size;
            rank < end
        });
        host.expect("every rank has a host")
    }

    /// How a rank is numbered: the number of its host and its own there where hosts are alike, as
    /// they must be for what counts local ranks; else its own alone.
    pub(super) fn place_of(&self, rank: u32) -> (u32, u32, u32) {
        let size = self.hosts[0];
        let counts_local = self.planning.switch_size > 0 || !self.planning.reduce_roots.is_empty();
        if counts_local { (rank / size, rank % size, size) } else { (rank, 0, 1) }
    }

    /// Workers as `DMLC_NUM_WORKER` counts them.
    pub(super) fn num_workers(&self) -> u32 {
        self.workers / self.place_of(0).2
    }
}

fn shape_of_hosts(random: &mut Random, groups: Groups) -> Shape {
    let placements = [
        Placement::Balanced,
        Placement::Balanced,
        Placement::Naive,
        Placement::BuiltIn,
        Placement::Djb2,
        Placement::Sdbm,
    ];
    let number = |random: &mut Random, most| 1 + u32::try_from(random.below(most)).unwrap_or(0);
    let planning = Planning {
        partition_bytes: 4096 << random.below(4),
        placement: placements[random.index(placements.len())],
        mixed_bound: 101,
        built_in_coefficient: 1,
        local_reduce: groups != Groups::Apart,
        force_distributed: groups == Groups::Hosts && random.once_in(4),
        reduce_roots: Vec::new(),
        switch_size: 0,
        tuning: bps_engine::proto::tuning::Tuning::OFF,
    };
    let hosts: Vec<u32> = match groups {
        Groups::Apart => vec![1; number(random, 4) as usize],
        _ => (0..number(random, 3)).map(|_| number(random, 3)).collect(),
    };
    Shape {
        workers: hosts.iter().sum(),
        hosts,
        servers: number(random, 3),
        cores: number(random, 2),
        credit_bytes: planning.partition_bytes as usize * (1 + random.index(4)),
        payload_checksum: checksums(random),
        devices: false,
        planning,
    }
}

/// Hosts of one or several GPUs, below one or several PCIe switches, with and without roots; a host
/// alone may be without servers.
fn shape_of_gpus(random: &mut Random) -> Shape {
    let number = |random: &mut Random, most| 1 + u32::try_from(random.below(most)).unwrap_or(0);
    let size = [1, 2, 2, 3, 4][random.index(5)];
    let mut hosts = vec![size; if size > 2 { 1 + random.index(2) } else { 1 + random.index(3) }];
    let (mut switch_size, mut reduce_roots, mut local_reduce) = (0, Vec::new(), true);
    match random.below(4) {
        0 => switch_size = if size == 4 { number(random, 2) } else { 1 },
        1 => {
            let is_root = |_: &u32| random.once_in(2);
            reduce_roots = (0..size).filter(is_root).collect();
        }
        _ if random.once_in(6) => local_reduce = false,
        _ if random.once_in(3) => hosts.iter_mut().for_each(|size| *size = number(random, 3)),
        _ => {}
    }
    let planning = Planning {
        partition_bytes: 4096 << random.below(4),
        placement: [Placement::Balanced, Placement::Naive][random.index(2)],
        mixed_bound: 101,
        built_in_coefficient: 1,
        local_reduce,
        force_distributed: local_reduce && random.once_in(3),
        reduce_roots,
        switch_size,
        tuning: bps_engine::proto::tuning::Tuning::OFF,
    };
    let is_alone = hosts.len() == 1 && hosts[0] > 1 && local_reduce && !planning.force_distributed;
    Shape {
        workers: hosts.iter().sum(),
        hosts,
        servers: if is_alone && random.once_in(2) { 0 } else { number(random, 3) },
        cores: number(random, 2),
        credit_bytes: planning.partition_bytes as usize * (1 + random.index(4)),
        payload_checksum: checksums(random),
        devices: true,
        planning,
    }
}

fn checksums(random: &mut Random) -> PayloadChecksum {
    if random.once_in(3) { PayloadChecksum::Always } else { PayloadChecksum::Auto }
}
