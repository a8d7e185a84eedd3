//! What a collective is, what each rank gives to it, and what each gets.

use crate::reduce::{SIZES, reduce};
use std::fmt;

pub const ALL_REDUCE: u32 = 1;
pub const REDUCE_SCATTER: u32 = 2;
pub const ALL_GATHER: u32 = 3;
pub const REDUCE: u32 = 4;
pub const BROADCAST: u32 = 5;
pub const FINALIZE: u32 = 6;

/// A collective as a rank calls it. All ranks must say the same in their n-th call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Collective {
    pub kind: u32,
    /// As the function counts: of the piece for reduce-scatter and all-gather.
    pub count: u64,
    pub dtype: u32,
    pub operation: u32,
    pub root: u32,
}

impl Collective {
    pub fn to_words(self) -> [u64; 5] {
        let Collective { kind, count, dtype, operation, root } = self;
        [u64::from(kind), count, u64::from(dtype), u64::from(operation), u64::from(root)]
    }

    pub fn from_words(words: [u64; 5]) -> Collective {
        let [kind, count, dtype, operation, root] = words;
        Collective {
            kind: kind as u32,
            count,
            dtype: dtype as u32,
            operation: operation as u32,
            root: root as u32,
        }
    }

    /// Bytes of `count` elements.
    pub fn piece(&self) -> usize {
        self.count as usize * SIZES[self.dtype as usize]
    }

    /// Bytes that a rank gives.
    pub fn given(&self, rank: u32, ranks: u32) -> usize {
        match self.kind {
            ALL_REDUCE | ALL_GATHER | REDUCE => self.piece(),
            REDUCE_SCATTER => self.piece() * ranks as usize,
            BROADCAST if rank == self.root => self.piece(),
            _ => 0,
        }
    }

    /// Bytes that a rank gets.
    pub fn gotten(&self, rank: u32, ranks: u32) -> usize {
        match self.kind {
            ALL_REDUCE | REDUCE_SCATTER | BROADCAST => self.piece(),
            ALL_GATHER => self.piece() * ranks as usize,
            REDUCE if rank == self.root => self.piece(),
            _ => 0,
        }
    }

    /// What each rank gets when these are the contributions, by rank.
    pub fn results(&self, contributions: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let ranks = contributions.len();
        let reduced = || {
            let slices: Vec<&[u8]> = contributions.iter().map(Vec::as_slice).collect();
            reduce(self.dtype, self.operation, &slices)
        };
        match self.kind {
            ALL_REDUCE => vec![reduced(); ranks],
            REDUCE_SCATTER if self.piece() == 0 => vec![Vec::new(); ranks],
            REDUCE_SCATTER => reduced().chunks(self.piece()).map(<[u8]>::to_vec).collect(),
            ALL_GATHER => vec![contributions.concat(); ranks],
            REDUCE => {
                let mut results = vec![Vec::new(); ranks];
                results[self.root as usize] = reduced();
                results
            }
            BROADCAST => vec![contributions[self.root as usize].clone(); ranks],
            _ => vec![Vec::new(); ranks],
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names =
            ["", "AllReduce", "ReduceScatter", "AllGather", "Reduce", "Broadcast", "Finalize"];
        let name = names.get(self.kind as usize).unwrap_or(&"an unknown call");
        let Collective { count, dtype, operation, root, .. } = self;
        write!(f, "{name}(count {count}, type {dtype}, operation {operation}, root {root})")
    }
}
