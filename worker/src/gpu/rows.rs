//! How the parts of a tensor go through NCCL: in rows, each of which is one step of the ranks of a
//! host together.

use crate::nic::Plan;
use bps_engine::base::{Key, Rank};
use std::ops::Range;

/// Parts that are reduced, and gathered, together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Row {
    /// Its first part.
    pub(super) first: u32,
    /// How many parts.
    pub(super) count: u32,
    /// The key of its first part.
    pub(super) key: Key,
    /// Each rank of the host owns one part, in the order of the ranks, and all are of one size: one
    /// reduce-scatter reduces it, one all-gather gathers it.
    pub(super) whole: bool,
}

impl Row {
    /// The places of its parts in the plan.
    pub(super) fn parts(&self) -> Range<usize> {
        self.first as usize..self.first as usize + self.count as usize
    }
}

/// The rows of a tensor in a host with these ranks.
///
/// Alone on its host, a rank has a row for each part. If no server takes part, the whole tensor is
/// one row. Else what the scheduler dealt out in turn makes whole rows, and each part that is left
/// over one of its own; so does every part where the job has `roots`, which own what others do not.
pub(super) fn rows(plan: &Plan, ranks: &[Rank], roots: bool) -> Vec<Row> {
    let parts = &plan.parts;
    let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    if parts.first().is_some_and(|part| part.core.is_none()) {
        let count = number(parts.len());
        return vec![Row { first: 0, count, key: parts[0].key, whole: false }];
    }
    let mut rows = Vec::new();
    let mut at = 0;
    while at < parts.len() {
        let row = parts.get(at..at + ranks.len()).filter(|_| ranks.len() > 1 && !roots);
        let whole = row.is_some_and(|row| {
            let in_turn = row.iter().zip(ranks).all(|(part, rank)| part.owner_rank == *rank);
            in_turn && row.iter().all(|part| part.bytes == row[0].bytes)
        });
        let count = if whole { ranks.len() } else { 1 };
        let (first, key) = (number(at), parts[at].key);
        rows.push(Row { first, count: number(count), key, whole });
        at += count;
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nic::PlanPart;
    use bps_engine::base::{DType, Operation};
    use bps_engine::transport::LaneId;

    fn plan(parts: &[(usize, u32)], core: Option<LaneId>) -> Plan {
        let mut offset = 0;
        let part = |(index, &(bytes, owner)): (u64, &(usize, u32))| {
            let owner_rank = Rank(owner);
            let part =
                PlanPart { key: Key(10 + index), offset, bytes, core, owner: None, owner_rank };
            offset += bytes;
            part
        };
        Plan {
            name: "t".into(),
            dtype: DType::F32,
            operation: Operation::Sum,
            device: true,
            parts: (0..).zip(parts).map(part).collect(),
        }
    }

    fn shape(rows: &[Row]) -> Vec<(u32, u32, bool)> {
        rows.iter().map(|row| (row.first, row.count, row.whole)).collect()
    }

    #[test]
    fn parts_dealt_out_in_turn_make_rows_and_the_rest_stand_alone() {
        let core = Some(LaneId(0));
        let ranks = [Rank(4), Rank(5)];
        let parts = [(8, 4), (8, 5), (8, 4), (8, 5), (8, 5), (4, 4)];
        let found = rows(&plan(&parts, core), &ranks, false);
        assert_eq!(shape(&found), [(0, 2, true), (2, 2, true), (4, 1, false), (5, 1, false)]);
        assert_eq!(found[2].key, Key(14));
        assert_eq!(shape(&rows(&plan(&[(8, 4), (4, 5)], core), &ranks, false)).len(), 2);
        let rooted = rows(&plan(&parts, core), &ranks, true);
        assert!(rooted.len() == 6 && rooted.iter().all(|row| !row.whole));
        // The root of a broadcast owns all.
        assert!(rows(&plan(&[(8, 5), (8, 5)], core), &ranks, false).iter().all(|row| !row.whole));
    }

    #[test]
    fn alone_each_part_is_a_row_and_without_servers_the_tensor_is_one() {
        let parts = [(8, 4), (8, 4), (4, 4)];
        let alone = rows(&plan(&parts, Some(LaneId(0))), &[Rank(4)], false);
        assert_eq!(shape(&alone), [(0, 1, false), (1, 1, false), (2, 1, false)]);
        assert_eq!(shape(&rows(&plan(&parts, None), &[Rank(4), Rank(5)], false)), [(0, 3, false)]);
        assert!(rows(&plan(&[], None), &[Rank(4)], false).is_empty());
    }
}
