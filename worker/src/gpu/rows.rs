//! How the parts of a tensor go through NCCL: in rows, each of which is one step of the ranks of a
//! host together.

#![forbid(unsafe_code)]

use crate::rounds::Plan;
use bps_engine::base::{Key, Rank, word};
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

/// How NCCL is to take the parts of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cut {
    /// The whole tensor is one row: no server takes part, and nobody beyond the communicator.
    Whole,
    /// What the scheduler dealt out in turn makes whole rows, and each part that is left over one
    /// of its own.
    Rows,
    /// Each part is a row: a rank is alone on its host, or some own what others do not.
    Parts,
}

/// The rows of a tensor among the ranks of a communicator.
pub(super) fn rows(plan: &Plan, ranks: &[Rank], cut: Cut) -> Vec<Row> {
    let parts = &plan.parts;
    if cut == Cut::Whole && !parts.is_empty() {
        let count = word(parts.len());
        return vec![Row { first: 0, count, key: parts[0].key, whole: false }];
    }
    let mut rows = Vec::new();
    let mut at = 0;
    while at < parts.len() {
        let row = parts.get(at..at + ranks.len()).filter(|_| ranks.len() > 1 && cut == Cut::Rows);
        let whole = row.is_some_and(|row| {
            let in_turn = row.iter().zip(ranks).all(|(part, rank)| part.holder == *rank);
            in_turn && row.iter().all(|part| part.bytes == row[0].bytes)
        });
        let count = if whole { ranks.len() } else { 1 };
        let (first, key) = (word(at), parts[at].key);
        rows.push(Row { first, count: word(count), key, whole });
        at += count;
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rounds::PlanPart;
    use bps_engine::base::{DType, Operation};
    use bps_engine::transport::LaneId;

    fn plan(parts: &[(usize, u32)], core: Option<LaneId>) -> Plan {
        let mut offset = 0;
        let part = |(index, &(bytes, owner)): (u64, &(usize, u32))| {
            let owner_rank = Rank(owner);
            let (key, holder) = (Key(10 + index), owner_rank);
            let part = PlanPart { key, offset, bytes, core, owner: None, owner_rank, holder };
            offset += bytes;
            part
        };
        Plan {
            name: "t".into(),
            dtype: DType::F32,
            operation: Operation::Sum,
            device: true,
            among: None,
            receiver: None,
            encoding: None,
            store: None,
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
        let found = rows(&plan(&parts, core), &ranks, Cut::Rows);
        assert_eq!(shape(&found), [(0, 2, true), (2, 2, true), (4, 1, false), (5, 1, false)]);
        assert_eq!(found[2].key, Key(14));
        assert_eq!(shape(&rows(&plan(&[(8, 4), (4, 5)], core), &ranks, Cut::Rows)).len(), 2);
        let rooted = rows(&plan(&parts, core), &ranks, Cut::Parts);
        assert!(rooted.len() == 6 && rooted.iter().all(|row| !row.whole));
        // The root of a broadcast owns all.
        assert!(
            rows(&plan(&[(8, 5), (8, 5)], core), &ranks, Cut::Rows).iter().all(|row| !row.whole)
        );
    }

    #[test]
    fn alone_each_part_is_a_row_and_without_servers_the_tensor_is_one() {
        let parts = [(8, 4), (8, 4), (4, 4)];
        let alone = rows(&plan(&parts, Some(LaneId(0))), &[Rank(4)], Cut::Rows);
        assert_eq!(shape(&alone), [(0, 1, false), (1, 1, false), (2, 1, false)]);
        assert_eq!(
            shape(&rows(&plan(&parts, None), &[Rank(4), Rank(5)], Cut::Whole)),
            [(0, 3, false)]
        );
        assert!(rows(&plan(&[], None), &[Rank(4)], Cut::Whole).is_empty());
    }
}
