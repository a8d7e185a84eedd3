//! What the ranks of a job tell each other of their GPUs, and whether they can go on together.
//!
//! Each rank writes a row of bytes; whoever has all rows comes to the same verdict.

#![forbid(unsafe_code)]

use crate::base::error::{Error, SettingError, StartError};
use bps_engine::base::Rank;
use std::collections::BTreeMap;

/// Bytes of a rank's row.
pub(crate) const ROW: usize = 512;
/// The first byte of a row.
const OK: u8 = 1;
const FAILED: u8 = 2;

/// Where the text of a row that is well begins.
const TEXT: usize = 161;

/// What a rank tells of its GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Row {
    /// Or why it has none.
    pub(crate) gpu: Result<Gpu, String>,
}

/// A rank's GPU, and how the rank would reduce with others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Gpu {
    pub(crate) uuid: [u8; 16],
    /// 0 where NCCL is not needed.
    pub(crate) nccl: u32,
    /// The first rank of its host.
    pub(crate) host: Rank,
    /// The first rank of its PCIe switch: ranks that have the same are a communicator.
    pub(crate) first: Rank,
    /// The address of the PCIe bridge nearest to the root complex, if one is known.
    pub(crate) bridge: String,
    /// Channels of the communicator; 0 where NCCL chooses.
    pub(crate) rings: u32,
    /// The communicator's identity, of its first rank.
    pub(crate) id: [u8; 128],
}

impl Row {
    pub(crate) fn encode(&self, row: &mut [u8]) {
        match &self.gpu {
            Ok(gpu) => {
                row[0] = OK;
                row[1..17].copy_from_slice(&gpu.uuid);
                row[17..145].copy_from_slice(&gpu.id);
                let words = [gpu.nccl, gpu.host.0, gpu.first.0, gpu.rings];
                for (at, word) in (145..).step_by(4).zip(words) {
                    row[at..at + 4].copy_from_slice(&word.to_le_bytes());
                }
                write_text(&mut row[TEXT..], &gpu.bridge);
            }
            Err(text) => {
                row[0] = FAILED;
                write_text(&mut row[1..], text);
            }
        }
    }

    pub(crate) fn decode(row: &[u8]) -> Row {
        let gpu = match row[0] {
            OK => {
                let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| row[at + i]));
                Ok(Gpu {
                    uuid: std::array::from_fn(|i| row[1 + i]),
                    id: std::array::from_fn(|i| row[17 + i]),
                    nccl: word(145),
                    host: Rank(word(149)),
                    first: Rank(word(153)),
                    rings: word(157),
                    bridge: read_text(&row[TEXT..]),
                })
            }
            _ => Err(read_text(&row[1..])),
        };
        Row { gpu }
    }
}

/// Writes a length and as much of the text as there is room for.
fn write_text(room: &mut [u8], text: &str) {
    let mut end = text.len().min(room.len() - 2);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let length = u16::try_from(end).expect("a row is far shorter than that");
    room[..2].copy_from_slice(&length.to_le_bytes());
    room[2..2 + end].copy_from_slice(&text.as_bytes()[..end]);
}

fn read_text(room: &[u8]) -> String {
    let end = 2 + usize::from(u16::from_le_bytes([room[0], room[1]]));
    String::from_utf8_lossy(room.get(2..end).unwrap_or_default()).into_owned()
}

/// What the ranks have told, in their order; nothing of those that have died, and without which the
/// job goes on.
pub(crate) type Rows = BTreeMap<Rank, Row>;

/// Whether all can go on together, which all find alike; the identity of this rank's communicator.
pub(crate) fn agree(all: &Rows, own: Rank) -> Result<[u8; 128], Error> {
    let mut gpus: BTreeMap<Rank, &Gpu> = BTreeMap::new();
    for (&rank, row) in all {
        let gpu = row
            .gpu
            .as_ref()
            .map_err(|text| StartError::GpuElsewhere { rank, text: text.clone() })?;
        for (&other, known) in gpus.iter().filter(|(_, known)| known.host == gpu.host) {
            let ranks = [other, rank];
            if known.uuid == gpu.uuid {
                return Err(StartError::SameGpu { ranks }.into());
            }
            if known.nccl != gpu.nccl {
                let versions = [known.nccl, gpu.nccl];
                return Err(StartError::NcclDiffers { ranks, versions }.into());
            }
            if known.rings != gpu.rings {
                let rings = [known.rings, gpu.rings];
                return Err(SettingError::RingsDiffer { ranks, rings }.into());
            }
        }
        gpus.insert(rank, gpu);
    }
    // Who dies of a host of several ends the epoch, so the first of this rank's switch has told.
    let first = gpus.get(&own).and_then(|gpu| gpus.get(&gpu.first));
    Ok(first.expect("this rank and its neighbours live").id)
}

/// Two ranks whose GPUs are to be below one PCIe switch and are not, if this rank is the first of a
/// host that has such, and of several switches: it says so for all. Where the kernel shows no
/// bridges, as in most virtual machines, nothing is known.
pub(crate) fn misplaced(all: &Rows, own: Rank, switch_size: u32) -> Option<String> {
    let gpus: Vec<(Rank, &Gpu)> =
        all.iter().filter_map(|(rank, row)| Some((*rank, row.gpu.as_ref().ok()?))).collect();
    let own = all.get(&own)?.gpu.as_ref().ok().filter(|gpu| gpu.host == own)?;
    let here = || gpus.iter().filter(|(_, gpu)| gpu.host == own.host && !gpu.bridge.is_empty());
    for (one, gpu) in here() {
        let differs =
            |(_, other): &&&(Rank, &Gpu)| other.first == gpu.first && other.bridge != gpu.bridge;
        if let Some((other, elsewhere)) = here().find(|found| differs(&found)) {
            return Some(format!(
                "{one} and {other} are to be below one PCIe switch \
                 (BYTEPS_PCIE_SWITCH_SIZE={switch_size}), but their GPUs are below {} and {}: give \
                 the GPUs of a switch to neighbouring local ranks, as by CUDA_VISIBLE_DEVICES",
                gpu.bridge, elsewhere.bridge
            ));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(uuid: u8, nccl: u32, first: u32) -> Row {
        let (uuid, id, first) = ([uuid; 16], [uuid; 128], Rank(first));
        let bridge = String::new();
        Row { gpu: Ok(Gpu { uuid, nccl, host: first, first, bridge, rings: 0, id }) }
    }

    /// One of a host that begins with rank 0, of switches of two.
    fn below(rank: u32, bridge: &str) -> Row {
        let (host, first) = (Rank(0), Rank(rank - rank % 2));
        let row = gpu(u8::try_from(rank).unwrap(), 5, 0);
        Row { gpu: row.gpu.map(|gpu| Gpu { host, first, bridge: bridge.into(), ..gpu }) }
    }

    fn rows(told: &[Row]) -> Rows {
        (0..).map(Rank).zip(told.iter().cloned()).collect()
    }

    fn with_rings(row: Row, rings: u32) -> Row {
        Row { gpu: row.gpu.map(|gpu| Gpu { rings, ..gpu }) }
    }

    #[test]
    fn what_ranks_say_survives_the_row() {
        let long = "é".repeat(400);
        for row in [
            with_rings(gpu(7, 22_809, 5), 12),
            below(3, "0000:15:01.0"),
            Row { gpu: Err("no driver".into()) },
        ] {
            let mut bytes = [0u8; ROW];
            row.encode(&mut bytes);
            assert_eq!(Row::decode(&bytes), row);
        }
        let mut bytes = [0u8; ROW];
        Row { gpu: Err(long.clone()) }.encode(&mut bytes);
        assert_eq!(Row::decode(&bytes).gpu, Err("é".repeat((ROW - 3) / 2)));
    }

    #[test]
    fn switches_have_communicators_of_their_own_and_no_gpu_in_common() {
        let mut all = [below(0, "a"), below(1, "a"), below(2, "b"), below(3, "b")];
        assert_eq!(agree(&rows(&all), Rank(1)), Ok([0; 128]));
        assert_eq!(agree(&rows(&all), Rank(3)), Ok([2; 128]));
        assert_eq!(misplaced(&rows(&all), Rank(0), 2), None);
        all[3] = below(3, "");
        assert_eq!(misplaced(&rows(&all), Rank(0), 2), None, "nothing is known");
        all[3] = below(3, "a");
        let text = misplaced(&rows(&all), Rank(0), 2).unwrap();
        let words = ["rank 2 and rank 3", "SWITCH_SIZE=2", "below b and a"];
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
        assert_eq!(misplaced(&rows(&all), Rank(1), 2), None, "one rank of a host says it");
        all[3] = Row { gpu: all[1].gpu.clone().map(|gpu| Gpu { first: Rank(2), ..gpu }) };
        let text = agree(&rows(&all), Rank(0)).unwrap_err().to_string();
        assert!(text.contains("rank 1 and rank 3 are on one host and use the same GPU"), "{text}");
    }

    #[test]
    fn ranks_agree_or_all_hear_why_not() {
        let all = [gpu(1, 0, 0), gpu(1, 0, 1), gpu(3, 5, 2), gpu(4, 5, 2)];
        assert_eq!(agree(&rows(&all), Rank(3)), Ok([3; 128]));
        assert_eq!(agree(&rows(&all), Rank(1)), Ok([1; 128]));
        // One that has died has told nothing.
        let mut without = rows(&all);
        without.remove(&Rank(0));
        assert_eq!(agree(&without, Rank(3)), Ok([3; 128]));
        let text = |all: &[Row]| agree(&rows(all), Rank(0)).unwrap_err().to_string();
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
