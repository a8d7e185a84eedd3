//! How the GPUs of a host hang below PCIe switches: which ranks NCCL joins, and which ranks of the
//! other switches come to hold the same share of a tensor.
//!
//! ```text
//!             column 0   column 1
//! switch 0     rank 0     rank 1       NCCL reduces along a line,
//! switch 1     rank 2     rank 3       the processors of the host down a column
//! ```
//!
//! A host with one switch is one line, and its columns are a rank each.

use bps_engine::base::Rank;
use bps_engine::proto::messages::switch_width;

/// The ranks of a host, in rising order, and how many of them are below each switch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Switches {
    ranks: Box<[Rank]>,
    width: usize,
}

impl Switches {
    /// Of a host with these ranks, where `switch_size` are below each switch; 0 is all.
    #[must_use]
    pub fn new(mut ranks: Vec<Rank>, switch_size: u32) -> Switches {
        ranks.sort_unstable();
        let width = switch_width(switch_size, ranks.len()).max(1);
        Switches { ranks: ranks.into(), width }
    }

    /// All ranks of the host.
    #[must_use]
    pub fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.ranks.len().div_ceil(self.width)
    }

    /// The ranks below the switch of this rank, in the order in which NCCL numbers them. As many
    /// as below every other: sizes that do not divide the host's ranks stand for one switch.
    ///
    /// # Panics
    /// As all that take a rank: if it is not of this host.
    #[must_use]
    pub fn line(&self, rank: Rank) -> &[Rank] {
        let first = self.switch(rank) * self.width;
        &self.ranks[first..first + self.width]
    }

    /// The number of this rank's switch.
    #[must_use]
    pub fn switch(&self, rank: Rank) -> usize {
        self.place(rank) / self.width
    }

    /// Whether two ranks hold the same share, each of its switch's sum.
    #[must_use]
    pub fn are_of_one_column(&self, one: Rank, other: Rank) -> bool {
        self.column(one) == self.column(other)
    }

    /// The other ranks that hold the same share as this one.
    pub fn others_of_column(&self, rank: Rank) -> impl Iterator<Item = Rank> + '_ {
        let like = move |other: &Rank| *other != rank && self.are_of_one_column(*other, rank);
        self.ranks.iter().copied().filter(like)
    }

    /// The rank below the switch of `rank` that holds what `owner` owns in the host.
    #[must_use]
    pub fn holder(&self, owner: Rank, rank: Rank) -> Rank {
        self.line(rank)[self.column(owner)]
    }

    /// The number of a rank below its switch, as NCCL counts.
    #[must_use]
    pub fn column(&self, rank: Rank) -> usize {
        self.place(rank) % self.width
    }

    fn place(&self, rank: Rank) -> usize {
        self.ranks.binary_search(&rank).expect("only ranks of this host hang below its switches")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(switch_size: u32) -> Switches {
        Switches::new([9, 4, 5, 8, 6, 7].map(Rank).to_vec(), switch_size)
    }

    #[test]
    fn columns_lead_across_switches() {
        let host = host(2);
        assert_eq!(host.count(), 3);
        assert_eq!(host.line(Rank(7)), [Rank(6), Rank(7)]);
        let column: Vec<Rank> = host.others_of_column(Rank(7)).collect();
        assert_eq!(column, [Rank(5), Rank(9)]);
        assert_eq!(host.holder(Rank(9), Rank(6)), Rank(7));
        assert_eq!(host.holder(Rank(9), Rank(9)), Rank(9));
        assert_eq!((host.switch(Rank(4)), host.switch(Rank(9))), (0, 2));
    }

    #[test]
    fn one_switch_has_columns_of_one_and_switches_of_one_are_a_column() {
        // Four do not divide six.
        for size in [0, 6, 8, 4] {
            let host = host(size);
            assert_eq!((host.count(), host.line(Rank(8)).len()), (1, 6));
            assert_eq!(host.others_of_column(Rank(8)).count(), 0);
            assert_eq!(host.holder(Rank(5), Rank(8)), Rank(5));
        }
        let host = host(1);
        assert_eq!((host.count(), host.line(Rank(8))), (6, &[Rank(8)][..]));
        assert_eq!(host.others_of_column(Rank(8)).count(), 5);
    }
}
