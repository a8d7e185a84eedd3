//! Which core of which server sums a part.
//!
//! Invariant: a placement depends only on what was placed before it, so one scheduler gives one
//! answer; and whichever function chooses the server, its cores share the server's bytes evenly.

use crate::base::{CoreId, Placement};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A server as placement sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Polling threads, at least one.
    pub cores: u32,
    /// It shares its host, and so its network card, with a worker.
    pub colocated: bool,
}

/// Places parts one after the other.
#[derive(Clone, Debug)]
pub struct Placer {
    servers: Vec<Cores>,
    /// Those that can be chosen, in rising order.
    there: Vec<u32>,
    choice: Choice,
}

/// How the server is chosen.
#[derive(Clone, Debug)]
enum Choice {
    /// The core with the least bytes of all: (bytes, core, server).
    LeastCore(BinaryHeap<Reverse<(u64, u32, u32)>>),
    /// The server with the least bytes for its weight: (bytes by weight, server), and each server's
    /// weight.
    LeastServer(BinaryHeap<Reverse<(u128, u32)>>, Vec<u64>),
    /// By a hash of the part's number.
    Hash(Hash),
}

#[derive(Clone, Copy, Debug)]
enum Hash {
    Naive,
    BuiltIn { coefficient: u64 },
    Djb2,
    Sdbm,
}

/// Bytes on each core of one server.
#[derive(Clone, Debug)]
struct Cores {
    bytes: Vec<u64>,
    /// (bytes, core); used where the server is chosen first.
    least: BinaryHeap<Reverse<(u64, u32)>>,
}

impl Placer {
    /// An empty placement over these servers. `coefficient` is the factor of
    /// [`Placement::BuiltIn`].
    #[must_use]
    pub fn new(function: Placement, coefficient: u64, servers: &[Shape]) -> Placer {
        let indexed = || (0u32..).zip(servers);
        let choice = match function {
            Placement::Balanced => Choice::LeastCore(
                indexed()
                    .flat_map(|(server, shape)| {
                        (0..shape.cores).map(move |core| Reverse((0, core, server)))
                    })
                    .collect(),
            ),
            Placement::Mixed => {
                let weights = weights(servers);
                let heap = indexed()
                    .filter(|(server, _)| weights[*server as usize] > 0)
                    .map(|(server, _)| Reverse((0, server)))
                    .collect();
                Choice::LeastServer(heap, weights)
            }
            Placement::Naive => Choice::Hash(Hash::Naive),
            Placement::BuiltIn => Choice::Hash(Hash::BuiltIn { coefficient }),
            Placement::Djb2 => Choice::Hash(Hash::Djb2),
            Placement::Sdbm => Choice::Hash(Hash::Sdbm),
        };
        let there = indexed().map(|(server, _)| server).collect();
        let servers = servers.iter().map(|shape| Cores::new(shape.cores)).collect();
        Placer { servers, there, choice }
    }

    /// How many servers can be chosen, and how many cores they have.
    #[must_use]
    pub fn chosen(&self) -> (u64, u64) {
        let cores = |server: &u32| self.servers[*server as usize].bytes.len() as u64;
        let counted = |servers: &[u32]| (servers.len() as u64, servers.iter().map(cores).sum());
        match &self.choice {
            Choice::LeastCore(_) | Choice::Hash(_) => counted(&self.there),
            Choice::LeastServer(heap, _) => {
                let servers: Vec<u32> = heap.iter().map(|Reverse((_, server))| *server).collect();
                counted(&servers)
            }
        }
    }

    /// Nothing more is placed on this server.
    pub fn lose(&mut self, server: u32) {
        self.there.retain(|one| *one != server);
        match &mut self.choice {
            Choice::LeastCore(heap) => heap.retain(|Reverse((_, _, at))| *at != server),
            Choice::LeastServer(heap, weights) => {
                heap.retain(|Reverse((_, at))| *at != server);
                if heap.is_empty() {
                    // Those that are left had no share of their own: now they are alike.
                    let rest = self.there.iter();
                    heap.extend(rest.map(|at| {
                        weights[*at as usize] = 1;
                        Reverse((0, *at))
                    }));
                }
            }
            Choice::Hash(_) => {}
        }
    }

    /// The core for the next part: part `part` of tensor `tensor`, of so many bytes. `None` if
    /// there is no server, or none with a core.
    pub fn place(&mut self, tensor: u32, part: u32, bytes: u32) -> Option<CoreId> {
        let bytes = u64::from(bytes);
        let id = match &mut self.choice {
            Choice::LeastCore(heap) => {
                let Reverse((load, core, server)) = heap.pop()?;
                heap.push(Reverse((load + bytes, core, server)));
                CoreId { server, core }
            }
            Choice::LeastServer(heap, weights) => {
                let Reverse((load, server)) = heap.pop()?;
                let weight = u128::from(weights[server as usize]);
                // Scaled so that the division loses nothing that matters.
                heap.push(Reverse((load + (u128::from(bytes) << 32) / weight, server)));
                CoreId { server, core: self.servers[server as usize].take_least(bytes)? }
            }
            Choice::Hash(hash) => {
                let count = u64::try_from(self.there.len()).ok().filter(|count| *count > 0)?;
                // BytePS's key of this part: its tensor in the upper bits, its index in the lower
                // sixteen.
                let key = (u64::from(tensor) << 16).wrapping_add(u64::from(part));
                let server = self.there[usize::try_from(hash.of(key) % count).ok()?];
                CoreId { server, core: self.servers[server as usize].take_least(bytes)? }
            }
        };
        self.servers[id.server as usize].bytes[id.core as usize] += bytes;
        Some(id)
    }

    /// A part of so many bytes is on another core than the one that was [chosen](Self::place).
    /// `None` if there is no such core. To be [settled](Self::settle) before another is chosen.
    pub fn move_part(&mut self, bytes: u32, chosen: CoreId, core: CoreId) -> Option<()> {
        let bytes = u64::from(bytes);
        *self.servers.get_mut(core.server as usize)?.bytes.get_mut(core.core as usize)? += bytes;
        let before = &mut self.servers[chosen.server as usize].bytes[chosen.core as usize];
        *before = before.saturating_sub(bytes);
        Some(())
    }

    /// From now on cores are chosen by where parts have been moved.
    pub fn settle(&mut self) {
        let servers = &mut self.servers;
        match &mut self.choice {
            Choice::LeastCore(heap) => {
                let load = |core: u32, server: u32| servers[server as usize].bytes[core as usize];
                *heap = heap
                    .drain()
                    .map(|Reverse((_, core, server))| Reverse((load(core, server), core, server)))
                    .collect();
            }
            Choice::LeastServer(heap, weights) => {
                let load = |server: u32| {
                    let bytes: u64 = servers[server as usize].bytes.iter().sum();
                    (u128::from(bytes) << 32) / u128::from(weights[server as usize])
                };
                *heap = heap.drain().map(|Reverse((_, one))| Reverse((load(one), one))).collect();
            }
            Choice::Hash(_) => {}
        }
        for cores in servers {
            cores.least =
                (0..).zip(&cores.bytes).map(|(core, all)| Reverse((*all, core))).collect();
        }
    }

    /// Bytes placed so far on each core of each server.
    pub fn loads(&self) -> impl Iterator<Item = &[u64]> {
        self.servers.iter().map(|cores| cores.bytes.as_slice())
    }
}

impl Cores {
    fn new(cores: u32) -> Cores {
        Cores {
            bytes: vec![0; cores as usize],
            least: (0..cores).map(|core| Reverse((0, core))).collect(),
        }
    }

    fn take_least(&mut self, bytes: u64) -> Option<u32> {
        let Reverse((load, core)) = self.least.pop()?;
        self.least.push(Reverse((load + bytes, core)));
        Some(core)
    }
}

/// The optimal shares of mixed mode, as whole-number weights: with n colocated servers and k
/// others, a colocated one gets n - k and another 2(n - 1), of n² + kn - 2k in all. Beyond k = n
/// the others suffice.
fn weights(servers: &[Shape]) -> Vec<u64> {
    let n = servers.iter().filter(|shape| shape.colocated).count() as u64;
    let k = servers.len() as u64 - n;
    let (colocated, other) = (n.saturating_sub(k), 2 * n.saturating_sub(1));
    // Where the formula gives nobody anything (one worker host, or no colocated server), all are
    // alike.
    let (colocated, other) =
        if n * colocated + k * other == 0 { (1, 1) } else { (colocated, other) };
    servers.iter().map(|shape| if shape.colocated { colocated } else { other }).collect()
}

impl Hash {
    fn of(self, key: u64) -> u64 {
        match self {
            Hash::Naive => ((key >> 16) + (key & 0xffff)).wrapping_mul(9973),
            Hash::BuiltIn { coefficient } => {
                murmur(key.to_string().as_bytes()).wrapping_mul(coefficient)
            }
            Hash::Djb2 => key
                .to_string()
                .bytes()
                .fold(5381, |hash: u64, digit| hash.wrapping_mul(33).wrapping_add(digit.into())),
            Hash::Sdbm => key
                .to_string()
                .bytes()
                .fold(0, |hash: u64, digit| hash.wrapping_mul(65599).wrapping_add(digit.into())),
        }
    }
}

/// What `std::hash<std::string>` is in GNU's C++ library on 64-bit machines: MurmurHash64A with a
/// fixed seed, and a tail that is read as one little-endian number.
fn murmur(text: &[u8]) -> u64 {
    const FACTOR: u64 = 0xc6a4_a793_5bd1_e995;
    const SEED: u64 = 0xc70f_6907;
    let number =
        |bytes: &[u8]| bytes.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
    let mixed = |value: u64| value ^ (value >> 47);
    let mut hash = SEED ^ (text.len() as u64).wrapping_mul(FACTOR);
    let mut words = text.chunks_exact(8);
    for word in &mut words {
        hash ^= mixed(number(word).wrapping_mul(FACTOR)).wrapping_mul(FACTOR);
        hash = hash.wrapping_mul(FACTOR);
    }
    if !words.remainder().is_empty() {
        hash = (hash ^ number(words.remainder())).wrapping_mul(FACTOR);
    }
    mixed(mixed(hash).wrapping_mul(FACTOR))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::DType;
    use crate::keys::partition::parts;

    const PLAIN: Shape = Shape { cores: 2, colocated: false };
    const SHARED: Shape = Shape { cores: 1, colocated: true };

    fn place(function: Placement, servers: &[Shape], sizes: &[u32]) -> Vec<(u32, u32)> {
        let mut placer = Placer::new(function, 1, servers);
        (0..)
            .zip(sizes)
            .map(|(part, bytes)| placer.place(0, part, *bytes).unwrap())
            .map(|id| (id.server, id.core))
            .collect()
    }

    /// A small deterministic generator, so that a failure can be repeated.
    fn random(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed ^ (mixed >> 31)
    }

    #[test]
    fn balanced_takes_the_least_and_spreads_over_servers_first() {
        let placed = place(Placement::Balanced, &[PLAIN, PLAIN], &[10, 20, 30, 40, 5, 6, 1]);
        assert_eq!(placed, [(0, 0), (1, 0), (0, 1), (1, 1), (0, 0), (0, 0), (1, 0)]);
        let mut none = Placer::new(Placement::Balanced, 1, &[]);
        assert_eq!(none.place(0, 0, 1), None);
    }

    #[test]
    fn nothing_is_placed_on_a_server_that_is_lost() {
        let functions = [
            Placement::Balanced,
            Placement::Mixed,
            Placement::Naive,
            Placement::BuiltIn,
            Placement::Djb2,
            Placement::Sdbm,
        ];
        // In mixed mode the two that share hosts have no share beside two that do not.
        let shapes = [SHARED, SHARED, PLAIN, PLAIN];
        for function in functions {
            let mut placer = Placer::new(function, 1, &shapes);
            for lost in [2, 3, 1] {
                placer.place(0, 0, 10).unwrap();
                placer.lose(lost);
                let placed = (0..50).map(|part| placer.place(1, part, 10).unwrap().server);
                assert!(placed.into_iter().all(|server| server != lost), "{function:?}");
            }
            assert_eq!(placer.place(2, 0, 10).unwrap().server, 0, "{function:?}");
            placer.lose(0);
            assert_eq!(placer.place(3, 0, 10), None, "{function:?}");
        }
    }

    #[test]
    fn parts_that_are_elsewhere_count_where_they_are() {
        let functions = [Placement::Balanced, Placement::Mixed, Placement::Naive];
        for function in functions {
            let mut placer = Placer::new(function, 1, &[PLAIN, PLAIN]);
            let full = CoreId { server: 1, core: 0 };
            for part in 0..4 {
                let chosen = placer.place(0, part, 10).unwrap();
                placer.move_part(10, chosen, full).unwrap();
            }
            assert_eq!(placer.move_part(10, full, CoreId { server: 1, core: 2 }), None);
            assert_eq!(placer.move_part(10, full, CoreId { server: 2, core: 0 }), None);
            placer.settle();
            let loads: Vec<u64> = placer.loads().flatten().copied().collect();
            assert_eq!(loads, [0, 0, 40, 0], "{function:?}");
            let next: Vec<CoreId> = (0..6).map(|at| placer.place(1, at, 10).unwrap()).collect();
            assert!(!next.contains(&full), "{function:?}: {next:?}");
        }
    }

    #[test]
    fn balanced_is_even_over_a_thousand_random_tensors() {
        for (seed, servers, cores) in [(1, 1, 4), (2, 3, 2), (3, 4, 8), (4, 8, 4)] {
            let shapes = vec![Shape { cores, colocated: false }; servers];
            let mut placer = Placer::new(Placement::Balanced, 1, &shapes);
            let mut state = seed;
            for tensor in 0..1000 {
                // Sizes as in models: most small, a few of many megabytes.
                let count = random(&mut state) % (1 << (random(&mut state) % 24));
                for (part, (_, bytes)) in (0..).zip(parts(count, DType::F32, 1 << 20)) {
                    placer.place(tensor, part, bytes).unwrap();
                }
            }
            let loads: Vec<u64> = placer.loads().flatten().copied().collect();
            let most = *loads.iter().max().unwrap() as f64;
            let mean = loads.iter().sum::<u64>() as f64 / loads.len() as f64;
            assert!(most / mean < 1.05, "seed {seed}: {most} over {mean}");
        }
    }

    #[test]
    fn hashes_are_those_of_byteps() {
        // Computed from the formulas by another implementation; `built_in` by GNU's C++ library.
        let keys = [0u64, 1, 65536, 65537, 1_048_576, 123_456_789_012];
        let of = |hash: Hash| keys.map(|key| hash.of(key));
        assert_eq!(of(Hash::Naive), NAIVE);
        assert_eq!(of(Hash::Djb2), DJB2);
        assert_eq!(of(Hash::Sdbm), SDBM);
        assert_eq!(of(Hash::BuiltIn { coefficient: 1 }), BUILT_IN);
        assert_eq!(of(Hash::BuiltIn { coefficient: 3 }), BUILT_IN.map(|hash| hash.wrapping_mul(3)));
    }

    #[test]
    fn hashed_servers_share_their_bytes_over_their_cores() {
        let servers = [PLAIN, PLAIN, PLAIN];
        for function in [Placement::Naive, Placement::BuiltIn, Placement::Djb2, Placement::Sdbm] {
            let mut placer = Placer::new(function, 1, &servers);
            for part in 0..400 {
                placer.place(part / 40, part % 40, 1000).unwrap();
            }
            for cores in placer.loads() {
                assert!(cores[0].abs_diff(cores[1]) <= 1000, "{function:?}: {cores:?}");
            }
        }
        let placed = place(Placement::Naive, &servers, &[8; 4]);
        assert_eq!(placed, [(0, 0), (1, 0), (2, 0), (0, 1)]);
    }

    #[test]
    fn mixed_follows_the_optimal_shares() {
        for (n, k) in [(4usize, 2usize), (4, 0), (4, 4), (8, 3), (2, 5), (1, 1), (0, 3)] {
            let mut servers = vec![PLAIN; k];
            servers.extend(vec![SHARED; n]);
            let mut placer = Placer::new(Placement::Mixed, 1, &servers);
            let total = 100_000u64 * 4096;
            for part in 0..100_000 {
                placer.place(0, part, 4096).unwrap();
            }
            let all = (n * n + k * n) as f64 - 2.0 * k as f64;
            for (shape, cores) in servers.iter().zip(placer.loads()) {
                let share = cores.iter().sum::<u64>() as f64 / total as f64;
                let wanted = if k > n || n <= 1 {
                    // Outside of the formula: the others alone, or all alike.
                    if n == 1 {
                        0.5
                    } else if shape.colocated {
                        0.0
                    } else {
                        1.0 / k as f64
                    }
                } else if shape.colocated {
                    (n - k) as f64 / all
                } else {
                    2.0 * (n as f64 - 1.0) / all
                };
                assert!((share - wanted).abs() < 1e-3, "n {n} k {k}: {share} not {wanted}");
            }
        }
    }

    const NAIVE: [u64; 6] = [0, 9973, 9973, 19946, 159568, 18853727121];
    const DJB2: [u64; 6] =
        [177621, 177622, 210653553582, 210653553583, 229395065828532, 12351444757296183029];
    const SDBM: [u64; 6] = [
        48,
        49,
        3850799628401345593,
        3850799628401345594,
        1879143777476221937,
        8025993011235175420,
    ];
    const BUILT_IN: [u64; 6] = [
        2297668033614959926,
        10159970873491820195,
        243660463169716517,
        12950948673254219068,
        17248300703454877227,
        11932268767441279467,
    ];
}
