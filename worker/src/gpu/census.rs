//! What the ranks of a job tell each other of their GPUs, and whether they can go on together.
//!
//! Each rank writes a row of bytes; whoever has all rows comes to the same verdict.

use super::error::nccl_version;
use crate::error::Error;
use bps_engine::base::Rank;

/// Bytes of a rank's row.
pub(super) const ROW: usize = 512;
/// The first byte of a row.
const OK: u8 = 1;
const FAILED: u8 = 2;

/// What a rank tells of its GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Row {
    /// Or why it has none.
    pub(super) gpu: Result<Gpu, String>,
}

/// A rank's GPU, and how the rank would reduce with others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Gpu {
    pub(super) uuid: [u8; 16],
    /// 0 where NCCL is not needed.
    pub(super) nccl: u32,
    /// The first rank that reduces with this one: ranks that have the same are a host.
    pub(super) first: Rank,
    /// Channels of the communicator; 0 where NCCL chooses.
    pub(super) rings: u32,
    /// The communicator's identity, of the first rank of a host.
    pub(super) id: [u8; 128],
}

impl Row {
    pub(super) fn encode(&self, row: &mut [u8]) {
        match &self.gpu {
            Ok(gpu) => {
                row[0] = OK;
                row[1..17].copy_from_slice(&gpu.uuid);
                row[17..21].copy_from_slice(&gpu.nccl.to_le_bytes());
                row[21..25].copy_from_slice(&gpu.first.0.to_le_bytes());
                row[25..29].copy_from_slice(&gpu.rings.to_le_bytes());
                row[29..157].copy_from_slice(&gpu.id);
            }
            Err(text) => {
                row[0] = FAILED;
                let mut end = text.len().min(ROW - 3);
                while !text.is_char_boundary(end) {
                    end -= 1;
                }
                let length = u16::try_from(end).unwrap_or(0);
                row[1..3].copy_from_slice(&length.to_le_bytes());
                row[3..3 + end].copy_from_slice(&text.as_bytes()[..end]);
            }
        }
    }

    pub(super) fn decode(row: &[u8]) -> Row {
        let gpu = match row[0] {
            OK => {
                let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| row[at + i]));
                let (nccl, first, rings) = (word(17), Rank(word(21)), word(25));
                let mut gpu = Gpu { uuid: [0; 16], nccl, first, rings, id: [0; 128] };
                gpu.uuid.copy_from_slice(&row[1..17]);
                gpu.id.copy_from_slice(&row[29..157]);
                Ok(gpu)
            }
            _ => {
                let end = 3 + usize::from(u16::from_le_bytes([row[1], row[2]]));
                let text = row.get(3..end).unwrap_or_default();
                Err(String::from_utf8_lossy(text).into_owned())
            }
        };
        Row { gpu }
    }
}

/// Whether all can go on together, which all find alike; the identity of this rank's communicator.
pub(super) fn agree(all: &[Row], rank: u32) -> Result<[u8; 128], Error> {
    let mut gpus: Vec<&Gpu> = Vec::new();
    for (rank, row) in all.iter().enumerate() {
        let gpu = row.gpu.as_ref();
        let gpu =
            gpu.map_err(|text| Error::Start(format!("rank {rank} can't use its GPU: {text}")))?;
        for (other, known) in gpus.iter().enumerate().filter(|(_, known)| known.first == gpu.first)
        {
            if known.uuid == gpu.uuid {
                return Err(Error::Start(format!(
                    "rank {other} and rank {rank} are on one host and use the same GPU: give each \
                     rank its own, as by torch.cuda.set_device(bps.local_rank())"
                )));
            }
            if known.nccl != gpu.nccl {
                return Err(Error::Start(format!(
                    "rank {other} and rank {rank} are on one host and have NCCL {} and {}: give \
                     all ranks of a host the same",
                    nccl_version(known.nccl),
                    nccl_version(gpu.nccl)
                )));
            }
            if known.rings != gpu.rings {
                return Err(Error::Config(format!(
                    "rank {other} and rank {rank} are on one host and have \
                     BYTEPS_NCCL_NUM_RINGS={} and {}: set the same on all ranks of a host",
                    known.rings, gpu.rings
                )));
            }
        }
        gpus.push(gpu);
    }
    Ok(gpus[gpus[rank as usize].first.0 as usize].id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(uuid: u8, nccl: u32, first: u32) -> Row {
        let (uuid, id) = ([uuid; 16], [uuid; 128]);
        Row { gpu: Ok(Gpu { uuid, nccl, first: Rank(first), rings: 0, id }) }
    }

    fn with_rings(row: Row, rings: u32) -> Row {
        Row { gpu: row.gpu.map(|gpu| Gpu { rings, ..gpu }) }
    }

    #[test]
    fn what_ranks_say_survives_the_row() {
        let long = "é".repeat(400);
        for row in [with_rings(gpu(7, 22_809, 5), 12), Row { gpu: Err("no driver".into()) }] {
            let mut bytes = [0u8; ROW];
            row.encode(&mut bytes);
            assert_eq!(Row::decode(&bytes), row);
        }
        let mut bytes = [0u8; ROW];
        Row { gpu: Err(long.clone()) }.encode(&mut bytes);
        assert_eq!(Row::decode(&bytes).gpu, Err("é".repeat((ROW - 3) / 2)));
    }

    #[test]
    fn ranks_agree_or_all_hear_why_not() {
        let all = [gpu(1, 0, 0), gpu(1, 0, 1), gpu(3, 5, 2), gpu(4, 5, 2)];
        assert_eq!(agree(&all, 3), Ok([3; 128]));
        assert_eq!(agree(&all, 1), Ok([1; 128]));
        let text = |all: &[Row]| agree(all, 0).unwrap_err().to_string();
        let same = [gpu(1, 0, 0), gpu(1, 0, 1), gpu(3, 5, 2), gpu(3, 5, 2)];
        assert!(text(&same).contains("rank 2 and rank 3 are on one host and use the same GPU"));
        let other = [gpu(1, 0, 0), gpu(1, 0, 1), gpu(3, 22_707, 2), gpu(4, 22_808, 2)];
        assert!(text(&other).contains("NCCL 2.27.7 and 2.28.8"), "{}", text(&other));
        let rings = [gpu(1, 0, 0), gpu(1, 0, 1), with_rings(gpu(3, 5, 2), 4), gpu(4, 5, 2)];
        assert!(text(&rings).contains("NUM_RINGS=4 and 0"), "{}", text(&rings));
        let broken = [gpu(1, 0, 0), Row { gpu: Err("no driver".into()) }, gpu(3, 5, 2)];
        assert!(text(&broken).contains("rank 1 can't use its GPU: no driver"));
    }
}
