//! Words that every module shares: keys, ranks, data types, operations.

#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Duration;

/// A count or an index in 32 bits.
///
/// # Panics
/// It needs more. Everything that is counted here is bounded by [`limits`](crate::limits), so a
/// bound does not hold; another number in its place would name another thing.
#[must_use]
pub fn word(number: usize) -> u32 {
    u32::try_from(number).expect("counts and indices are bounded far below 2^32")
}

/// A duration in whole milliseconds. What is longer than 584 million years counts as that: only
/// `Duration::MAX`, for "never", is.
#[must_use]
pub fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A duration in whole nanoseconds. What is longer than 584 years counts as that: only
/// `Duration::MAX`, for "never", is.
#[must_use]
pub fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// A part's id: unique in a job, assigned by the registry at declare.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Key(pub u64);

/// One training process, numbered from 0 over the whole job.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Rank(pub u32);

/// A membership generation. It grows whenever the set of ranks changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Epoch(pub u32);

/// One synchronous step of one key, counted from 1.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Round(pub u64);

/// One core of one server of the job: where a key lives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct CoreId {
    /// Index of the server in the roster.
    pub server: u32,
    /// Index of the core within its server.
    pub core: u32,
}

/// A table by key. Keys are numbers that the registry gives, so they need no defence against chosen
/// collisions, and a look-up is on the path of every frame.
pub type KeyMap<V> = HashMap<Key, V, BuildHasherDefault<KeyHasher>>;

/// Spreads the bits of a key by one multiplication (Fibonacci hashing).
#[derive(Default)]
pub struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        // The table takes its bucket from the low bits and its tag from the high ones.
        self.0 ^ self.0 >> 32
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "key {}", self.0)
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

impl fmt::Display for CoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "server {} core {}", self.server, self.core)
    }
}

/// Element types. The numbers are BytePS's (mshadow's) where it has one, and go over the wire.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[repr(u8)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE 754 binary32.
    F32 = 0,
    /// IEEE 754 binary64.
    F64 = 1,
    /// IEEE 754 binary16; summed in f32, rounded once to nearest even.
    F16 = 2,
    /// Unsigned byte; sums wrap.
    U8 = 3,
    /// 32-bit signed integer; sums wrap.
    I32 = 4,
    /// Signed byte; sums wrap.
    I8 = 5,
    /// 64-bit signed integer; sums wrap.
    I64 = 6,
    /// bfloat16; summed in f32, rounded once to nearest even.
    BF16 = 10,
}

impl DType {
    /// Every data type, for tables and tests.
    pub const ALL: [DType; 8] = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::U8,
        DType::I32,
        DType::I8,
        DType::I64,
        DType::BF16,
    ];

    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::U8 | DType::I8 => 1,
        }
    }

    /// The type that sums of this one are kept in: f32 for the half types, else the type itself.
    #[must_use]
    pub const fn accumulator(self) -> DType {
        match self {
            DType::F16 | DType::BF16 => DType::F32,
            other => other,
        }
    }

    /// Whether an average is a true division (floats) or a floor division (integers).
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::BF16)
    }

    /// The type with this wire number.
    #[must_use]
    pub const fn from_wire(byte: u8) -> Option<DType> {
        Some(match byte {
            0 => DType::F32,
            1 => DType::F64,
            2 => DType::F16,
            3 => DType::U8,
            4 => DType::I32,
            5 => DType::I8,
            6 => DType::I64,
            10 => DType::BF16,
            _ => return None,
        })
    }

    /// Lower-case name: `f32`, `bf16`, `i64`, …
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::U8 => "u8",
            DType::I32 => "i32",
            DType::I8 => "i8",
            DType::I64 => "i64",
            DType::BF16 => "bf16",
        }
    }

    /// The type of this name, as [`DType::name`] gives it.
    #[must_use]
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a round of a key computes from its contributions. Fixed at declare, checked across ranks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// The sum of all contributions.
    Sum,
    /// The sum divided by the number of contributors: true division for floats, floor for integers.
    Average,
    /// The least of all contributions, element by element; NaN where one of them is.
    Min,
    /// The greatest of all contributions, element by element; NaN where one of them is.
    Max,
    /// The product of all contributions. That of integers wraps.
    Product,
    /// The bytes of this rank's contribution; the other ranks contribute nothing.
    Broadcast(Rank),
}

impl Operation {
    /// How contributions are put together. A broadcast has but one.
    #[must_use]
    pub const fn reduction(self) -> Reduction {
        match self {
            Operation::Sum | Operation::Average | Operation::Broadcast(_) => Reduction::Sum,
            Operation::Min => Reduction::Min,
            Operation::Max => Reduction::Max,
            Operation::Product => Reduction::Product,
        }
    }
}

/// How two contributions become one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Reduction {
    /// By addition.
    Sum,
    /// The least.
    Min,
    /// The greatest.
    Max,
    /// By multiplication.
    Product,
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reduction::Sum => "sum",
            Reduction::Min => "min",
            Reduction::Max => "max",
            Reduction::Product => "product",
        })
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operation::Sum => f.write_str("sum"),
            Operation::Average => f.write_str("average"),
            Operation::Min | Operation::Max | Operation::Product => self.reduction().fmt(f),
            Operation::Broadcast(root) => write!(f, "broadcast from {root}"),
        }
    }
}

/// Which function places keys on (server, core) pairs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// The pair with the fewest bytes so far (the default).
    Balanced,
    /// BytePS's `naive`.
    Naive,
    /// BytePS's `built_in`.
    BuiltIn,
    /// BytePS's `djb2`.
    Djb2,
    /// BytePS's `sdbm`.
    Sdbm,
    /// Optimal shares between colocated and CPU-only servers, by bytes.
    Mixed,
}
