//! Why a job can't form: what nodes were told disagrees, or some did not come. Data, from which
//! each node makes the same line for people, with what to do.

use super::origin::Origin;
use super::planning::Planning;
use super::text::{list, seconds};
use crate::base::{Epoch, Rank};
use crate::limits::{CORES_MAX, PART_BYTES_MAX, PART_BYTES_MIN, SERVERS_MAX};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;

/// Why a job was not formed, or a node was sent away from one.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Unformed {
    /// A node runs another release than the scheduler.
    Release {
        /// The node.
        who: Origin,
        /// Its release.
        has: String,
        /// The scheduler's.
        expected: String,
    },
    /// A node encrypts lanes and the scheduler has it that none are, or the reverse.
    Encryption {
        /// The node.
        who: Origin,
        /// Whether it does.
        has: bool,
    },
    /// A node was told another number of hosts or servers than those before it.
    Number {
        /// The node.
        who: Origin,
        /// The setting.
        variable: String,
        /// What it says.
        has: u32,
        /// Who was told something else first.
        first: Origin,
        /// What that says.
        expected: u32,
    },
    /// The job would have no ranks, or more than are possible.
    Ranks {
        /// The worker that says how many a host has.
        who: Origin,
        /// Worker hosts.
        num_workers: u32,
        /// Ranks of a host.
        local_size: u32,
        /// Ranks that a job may have.
        ranks_max: u32,
    },
    /// A partition size that is not possible.
    PartitionBytes {
        /// The worker that says so.
        who: Origin,
        /// The size.
        bytes: u32,
    },
    /// Roots that are not local ranks, or too many.
    ReduceRoots {
        /// The worker that names them.
        who: Origin,
        /// The roots.
        roots: Vec<u32>,
        /// Ranks of a host.
        local_size: u32,
    },
    /// A switch size that does not divide a host's ranks.
    SwitchSize {
        /// The worker that says so.
        who: Origin,
        /// The size.
        switch_size: u32,
        /// Ranks of a host.
        local_size: u32,
    },
    /// Two workers say that hosts have other numbers of ranks.
    LocalSize {
        /// The worker.
        who: Origin,
        /// What it says.
        has: u32,
        /// The first one.
        first: Origin,
        /// What that said.
        expected: u32,
    },
    /// Two workers were told to plan differently.
    Planning {
        /// The worker.
        who: Origin,
        /// Its settings.
        has: Planning,
        /// The first one.
        first: Origin,
        /// Those of that.
        expected: Planning,
    },
    /// A place that is beyond the number of places.
    Place {
        /// The worker.
        who: Origin,
        /// The setting of the place.
        variable: String,
        /// The place.
        value: u32,
        /// The setting of the number of places.
        limited_by: String,
        /// Places, of which there is at least one.
        limit: u32,
    },
    /// A rank that is beyond the ranks of the job.
    GlobalRank {
        /// The worker.
        who: Origin,
        /// The rank.
        rank: Rank,
        /// Ranks of the job, of which there is at least one.
        size: u32,
    },
    /// Two workers are one rank.
    SameRank {
        /// The later.
        who: Origin,
        /// The earlier.
        other: Origin,
        /// The rank.
        rank: Rank,
    },
    /// A server with no cores, or with too many.
    Cores {
        /// The server.
        who: Origin,
        /// How many.
        cores: u64,
    },
    /// A server announces an address at which nobody is.
    Unreachable {
        /// The server.
        who: Origin,
        /// The address.
        address: SocketAddr,
    },
    /// More servers come than the job is to have.
    ServerTooMany {
        /// The server.
        who: Origin,
        /// Those that are there, as many as the job has.
        others: Vec<Origin>,
    },
    /// Two servers announce one address.
    SameAddress {
        /// The later.
        who: Origin,
        /// The earlier.
        other: Origin,
        /// The address.
        address: SocketAddr,
    },
    /// The node came to a job that runs.
    Late {
        /// The node.
        who: Origin,
        /// Ranks of the job.
        ranks: u32,
        /// Servers of the job.
        servers: u32,
    },
    /// The node's connection was lost before the job had formed, and another may take its place.
    Gone {
        /// The node.
        who: Origin,
        /// What was seen.
        how: String,
    },
    /// Ranks of the job before have not suspended in time, so nobody can resume.
    NotSuspended {
        /// Those ranks.
        ranks: Vec<u32>,
        /// For how long the node waited.
        waited_ms: u64,
        /// The job is elastic: ranks suspend by themselves to let nodes in.
        elastic: bool,
    },
    /// An elastic job has as many ranks, or servers, as are possible.
    Full {
        /// The node.
        who: Origin,
        /// The ranks, where the node is one.
        ranks: Option<u32>,
    },
    /// A rank of an elastic job that was given up, and lives.
    GivenUp {
        /// What it was.
        who: Origin,
        /// Where the job is now.
        epoch: Epoch,
    },
    /// Not all came in time.
    Missing {
        /// Who is missing, in words.
        missing: String,
        /// For how long the scheduler waited.
        waited_ms: u64,
    },
}

impl Unformed {
    /// The node that the line is about; none if it is about those that did not come.
    #[must_use]
    pub fn who(&self) -> Option<&Origin> {
        match self {
            Unformed::Release { who, .. }
            | Unformed::Encryption { who, .. }
            | Unformed::Number { who, .. }
            | Unformed::Ranks { who, .. }
            | Unformed::PartitionBytes { who, .. }
            | Unformed::ReduceRoots { who, .. }
            | Unformed::SwitchSize { who, .. }
            | Unformed::LocalSize { who, .. }
            | Unformed::Planning { who, .. }
            | Unformed::Place { who, .. }
            | Unformed::GlobalRank { who, .. }
            | Unformed::SameRank { who, .. }
            | Unformed::Cores { who, .. }
            | Unformed::Unreachable { who, .. }
            | Unformed::ServerTooMany { who, .. }
            | Unformed::SameAddress { who, .. }
            | Unformed::Late { who, .. }
            | Unformed::Full { who, .. }
            | Unformed::GivenUp { who, .. }
            | Unformed::Gone { who, .. } => Some(who),
            Unformed::NotSuspended { .. } | Unformed::Missing { .. } => None,
        }
    }
}

impl fmt::Display for Unformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unformed::Release { who, has, expected } => write!(
                f,
                "{who} runs release {has}, the scheduler {expected}: install the same release on \
                 every node"
            ),
            Unformed::Encryption { who, has } => write!(
                f,
                "{who} has BPS_ENCRYPT={}, the scheduler BPS_ENCRYPT={}: set BPS_ENCRYPT=1 on \
                 every node, the scheduler's too, or on none",
                u8::from(*has),
                u8::from(!*has)
            ),
            Unformed::Number { who, variable, has, first, expected } => write!(
                f,
                "{who} has {variable}={has}, {first} has {expected}: set the same on every node"
            ),
            Unformed::Ranks { who, num_workers, local_size, ranks_max } => write!(
                f,
                "{who} has DMLC_NUM_WORKER={num_workers} and BYTEPS_LOCAL_SIZE={local_size}: that \
                 makes {} ranks, 1 to {ranks_max} are possible",
                u64::from(*num_workers) * u64::from(*local_size)
            ),
            Unformed::PartitionBytes { who, bytes } => write!(
                f,
                "{who} has BYTEPS_PARTITION_BYTES={bytes}: {PART_BYTES_MIN} to {PART_BYTES_MAX} \
                 are possible"
            ),
            Unformed::ReduceRoots { who, roots, local_size } => write!(
                f,
                "{who} has BYTEPS_REDUCE_ROOTS={} and BYTEPS_LOCAL_SIZE={local_size}: name each \
                 local rank once, from 0 to {}",
                commas(roots),
                last(*local_size)
            ),
            Unformed::SwitchSize { who, switch_size, local_size } => write!(
                f,
                "{who} has BYTEPS_PCIE_SWITCH_SIZE={switch_size} and \
                 BYTEPS_LOCAL_SIZE={local_size}: the first must divide the second"
            ),
            Unformed::LocalSize { who, has, first, expected } => write!(
                f,
                "{who} has BYTEPS_LOCAL_SIZE={has}, {first} has {expected}: start as many \
                 processes on every host"
            ),
            Unformed::Planning { who, has, first, expected } => write!(
                f,
                "{who} has {}, {first} has {}: set the same on every worker",
                Settings(has),
                Settings(expected)
            ),
            _ => self.write_of_places(f),
        }
    }
}

impl Unformed {
    /// What is wrong with the places of nodes, and who has them.
    fn write_of_places(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unformed::Place { who, variable, value, limited_by, limit } => write!(
                f,
                "{who} has {variable}={value} with {limited_by}={limit}: it must be 0 to {}",
                last(*limit)
            ),
            Unformed::GlobalRank { who, rank, size } => write!(
                f,
                "{who} has BYTEPS_GLOBAL_RANK={} in a job of {size} ranks: it must be 0 to {}",
                rank.0,
                last(*size)
            ),
            Unformed::SameRank { who, other, rank } => write!(
                f,
                "{who} and {other} both are {rank}: give each worker its own DMLC_WORKER_ID and \
                 each process of a host its own BYTEPS_LOCAL_RANK"
            ),
            Unformed::Cores { who, cores } => {
                write!(f, "{who} has {cores} cores: 1 to {CORES_MAX} are possible (--cores)")
            }
            Unformed::Unreachable { who, address } => write!(
                f,
                "{who} announces {address}, which nobody can reach: set DMLC_INTERFACE or \
                 DMLC_NODE_HOST there"
            ),
            Unformed::ServerTooMany { who, others } => {
                let there: Vec<String> = others.iter().map(Origin::to_string).collect();
                write!(
                    f,
                    "{who} is one too many: DMLC_NUM_SERVER={} and these are there: {}: start \
                     fewer servers, or raise it on every node",
                    others.len(),
                    there.join(", ")
                )
            }
            Unformed::SameAddress { who, other, address } => write!(
                f,
                "{who} and {other} both announce {address}: set DMLC_INTERFACE or DMLC_NODE_HOST \
                 to an address of their own"
            ),
            Unformed::Late { who, ranks, servers } => write!(
                f,
                "{who} came to a job that runs already, with all of its {} and {}: give each job \
                 a DMLC_PS_ROOT_PORT of its own, and start each node once",
                counted(*ranks, "rank"),
                counted(*servers, "server")
            ),
            Unformed::Gone { who, how } => {
                write!(f, "the job forms without {who}: {how}: start it again")
            }
            Unformed::NotSuspended { ranks, waited_ms, elastic } => write!(
                f,
                "after {:.0} s these ranks have not suspended: {}; {}; BPS_START_TIMEOUT gives \
                 them longer",
                seconds(*waited_ms),
                list(ranks.iter().copied()),
                if *elastic {
                    "let every rank suspend and come back to let nodes in"
                } else {
                    "call suspend on every rank before any resumes"
                }
            ),
            Unformed::Full { who, ranks: Some(ranks) } => {
                write!(f, "{who} is one too many: the job has {ranks} ranks")
            }
            Unformed::Full { who, ranks: None } => {
                write!(f, "{who} is one too many: the job has {SERVERS_MAX} servers")
            }
            Unformed::GivenUp { who, epoch } => write!(
                f,
                "{who} was given up, and the job has gone on to epoch {} without it: start its \
                 program again, to come as a new worker",
                epoch.0
            ),
            Unformed::Missing { missing, waited_ms } => write!(
                f,
                "after {:.0} s it still waits for {missing}: check that they were started, read \
                 their logs, and see that all nodes have the same DMLC_PS_ROOT_URI, \
                 DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER, DMLC_NUM_SERVER and job key; \
                 BPS_START_TIMEOUT gives them longer",
                seconds(*waited_ms)
            ),
            _ => unreachable!("`fmt` writes the others"),
        }
    }
}

/// What is planned, as it is set.
struct Settings<'planning>(&'planning Planning);

impl fmt::Display for Settings<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let planning = self.0;
        write!(
            f,
            "BYTEPS_PARTITION_BYTES={} BYTEPS_KEY_HASH_FN={:?} BYTEPS_MIXED_MODE_BOUND={} \
             BYTEPS_BUILT_IN_HASH_COEF={} BPS_LOCAL_REDUCE={} BYTEPS_FORCE_DISTRIBUTED={} \
             BYTEPS_REDUCE_ROOTS={} BYTEPS_PCIE_SWITCH_SIZE={}",
            planning.partition_bytes,
            planning.placement,
            planning.mixed_bound,
            planning.built_in_coefficient,
            u8::from(planning.local_reduce),
            u8::from(planning.force_distributed),
            commas(&planning.reduce_roots),
            planning.switch_size
        )
    }
}

/// The last of so many numbers from 0. They come over the wire: of none, 0 is said.
fn last(count: u32) -> u32 {
    count.saturating_sub(1)
}

fn counted(count: u32, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// A list as it is set.
fn commas(numbers: &[u32]) -> String {
    let texts: Vec<String> = numbers.iter().map(u32::to_string).collect();
    texts.join(",")
}
