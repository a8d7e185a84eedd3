//! Which ranks reduce among themselves, and which of them owns each part.
//!
//! Invariant: every rank is in one group; the owners of a group's parts differ in bytes by at most
//! one part, except for what broadcasts, whose root is always the owner in its group, and tensors
//! of sets of ranks, whose parts go round these, move about.

use crate::base::{Key, Operation, Rank, word};
use crate::proto::members::Members;
use crate::proto::messages::{Declaration, Planning, switch_width};
use crate::proto::store::Store;
use std::collections::{BTreeMap, HashMap};

/// The groups of a job.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// By rank.
    of_rank: Vec<u32>,
    /// By group, in rising order.
    members: Vec<Vec<Rank>>,
}

impl Groups {
    /// The groups of workers on these hosts, in the order of ranks.
    pub(super) fn planned<'a>(planning: &Planning, hosts: impl Iterator<Item = &'a str>) -> Groups {
        if planning.local_reduce { Groups::of(hosts) } else { Groups::apart(hosts) }
    }

    /// One group for each host, by the hosts' ids in the order of ranks.
    pub(super) fn of<'a>(hosts: impl Iterator<Item = &'a str>) -> Groups {
        let mut known: HashMap<&str, u32> = HashMap::new();
        let mut groups = Groups { of_rank: Vec::new(), members: Vec::new() };
        for (rank, host) in (0..).map(Rank).zip(hosts) {
            let group = *known.entry(host).or_insert_with(|| {
                groups.members.push(Vec::new());
                word(groups.members.len() - 1)
            });
            groups.of_rank.push(group);
            groups.members[group as usize].push(rank);
        }
        groups
    }

    /// Each rank by itself.
    pub(super) fn apart<'a>(hosts: impl Iterator<Item = &'a str>) -> Groups {
        let of_rank: Vec<u32> = (0..).zip(hosts).map(|(rank, _)| rank).collect();
        let members = of_rank.iter().map(|&rank| vec![Rank(rank)]).collect();
        Groups { of_rank, members }
    }

    pub(super) fn ranks(&self) -> u32 {
        word(self.of_rank.len())
    }

    pub(super) fn count(&self) -> usize {
        self.members.len()
    }

    /// Whether sums pass through servers: not where one group has all ranks, and there are several.
    pub(super) fn need_servers(&self, planning: &Planning) -> bool {
        self.count() > 1 || self.largest() == 1 || planning.force_distributed
    }

    /// Ranks in the largest.
    pub(super) fn largest(&self) -> usize {
        self.members.iter().map(Vec::len).max().unwrap_or(1)
    }

    pub(super) fn of_rank(&self, rank: Rank) -> u32 {
        // A rank that is none is in no group: no group has this number.
        self.of_rank.get(rank.0 as usize).copied().unwrap_or(u32::MAX)
    }

    /// Whether these ranks are in one.
    pub(super) fn is_one(&self, ranks: &Members) -> bool {
        let mut groups = ranks.iter(self.ranks()).map(|rank| self.of_rank(rank));
        let first = groups.next();
        groups.all(|group| Some(group) == first)
    }

    pub(super) fn members_with(&self, rank: Rank) -> &[Rank] {
        self.members.get(self.of_rank(rank) as usize).map_or(&[], Vec::as_slice)
    }
}

/// Chooses owners. Groups of one size have theirs at the same place, so that a job of many hosts
/// keeps one choice for all of them.
#[derive(Debug)]
pub(super) struct Owners {
    /// By size of group: bytes that each place owns.
    loads: BTreeMap<usize, Vec<u64>>,
    /// Places that own the parts of tensors on GPUs; all if empty.
    roots: Box<[u32]>,
    /// Ranks below each PCIe switch; 0 where there is one.
    switch_size: u32,
}

/// The place of a part's owner in its group, by the group's size. One for each size in the job.
pub(super) type Places = Box<[(u32, u32)]>;

impl Owners {
    /// For these groups. `planning` may name roots, places of a group to which tensors on GPUs go;
    /// a group that has none of them goes without.
    pub(super) fn new(groups: &Groups, planning: &Planning) -> Owners {
        let sizes = groups.members.iter().map(Vec::len);
        Owners {
            loads: sizes.map(|size| (size, vec![0; size])).collect(),
            roots: planning.reduce_roots.clone().into(),
            switch_size: planning.switch_size,
        }
    }

    /// Owners for a part of so many bytes: the places with the fewest. `in_turn`, for a tensor on
    /// GPUs, is the part's number and how many parts of its size the tensor has: those that fill
    /// whole rows, of a part for each place, go to the places in their order, so that a row is what
    /// one reduce-scatter leaves behind. Where a host has several switches, a row is what it leaves
    /// behind in each of them, and the owner is one of the places that hold the part there. Where
    /// there are roots, the one with the fewest bytes owns it.
    pub(super) fn choose(&mut self, bytes: u32, in_turn: Option<(usize, usize)>) -> Places {
        let (roots, switch_size) = (&self.roots, self.switch_size);
        let one = |(&size, loads): (&usize, &mut Vec<u64>)| {
            let width = switch_width(switch_size, size);
            let roots = roots.iter().map(|root| *root as usize).filter(|root| *root < size);
            let root = in_turn.and_then(|_| roots.min_by_key(|&place| loads[place]));
            let (first, step) = match in_turn {
                Some((part, equal)) if part < equal - equal % width => (part % width, width),
                _ => (0, 1),
            };
            let least = (first..size).step_by(step).min_by_key(|&place| loads[place]);
            let place = root.or(least).expect("a group has a rank");
            loads[place] += u64::from(bytes);
            (word(size), word(place))
        };
        self.loads.iter_mut().map(one).collect()
    }
}

/// The owner of a part in the group of this rank. Those of a set go round the members of the group,
/// by the numbers of their keys; a receiver owns all, since nobody else in its group gets them.
/// Deltas of a stored tensor are summed in no group, nor is what does not wait for slow ranks: each
/// rank pushes its own.
pub(super) fn owner(
    groups: &Groups,
    rank: Rank,
    (key, places): (Key, &Places),
    said: &Declaration,
) -> Rank {
    if let Operation::Broadcast(root) = said.operation
        && groups.of_rank(root) == groups.of_rank(rank)
    {
        return root;
    }
    if let Some(receiver) = said.receiver
        && groups.of_rank(receiver) == groups.of_rank(rank)
    {
        return receiver;
    }
    if said.store.is_some_and(Store::is_apart) {
        return rank;
    }
    let members = groups.members_with(rank);
    if !said.members.is_all() {
        let of_set = || members.iter().filter(|rank| said.members.contains(**rank));
        // A group of `rank` has a member at least: itself.
        let turn = key.0 % (of_set().count() as u64).max(1);
        return usize::try_from(turn)
            .ok()
            .and_then(|turn| of_set().nth(turn))
            .copied()
            .unwrap_or(rank);
    }
    let place = places.iter().find(|(size, _)| *size as usize == members.len());
    place.and_then(|(_, place)| members.get(*place as usize)).copied().unwrap_or(rank)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::scheduler::tests::{PLANNING, tensor};

    fn planning(roots: &[u32], switch_size: u32) -> Planning {
        Planning { reduce_roots: roots.to_vec(), switch_size, ..PLANNING }
    }

    fn said(operation: Operation) -> Declaration {
        Declaration { operation, ..tensor("t", 1) }
    }

    #[test]
    fn parts_of_a_set_go_round_its_members_in_each_group() {
        let groups = Groups::of(["a", "a", "a", "b", "b", "c"].into_iter());
        let members = Members::new([0, 2, 4].map(Rank).to_vec()).unwrap();
        assert!(!groups.is_one(&members) && !groups.is_one(&Members::ALL));
        assert!(groups.is_one(&Members::new(vec![Rank(0), Rank(2)]).unwrap()));
        let said = Declaration { members, ..said(Operation::Sum) };
        let places = Places::default();
        let of = |rank: u32| -> Vec<u32> {
            let owner = |key| owner(&groups, Rank(rank), (Key(key), &places), &said).0;
            (4..8).map(owner).collect()
        };
        assert_eq!((of(0), of(2), of(4)), (vec![0, 2, 0, 2], vec![0, 2, 0, 2], vec![4; 4]));
        let root = Declaration { operation: Operation::Broadcast(Rank(2)), ..said };
        assert_eq!(owner(&groups, Rank(0), (Key(4), &places), &root), Rank(2));
        assert_eq!(owner(&groups, Rank(4), (Key(4), &places), &root), Rank(4));
    }

    #[test]
    fn ranks_of_one_host_are_a_group_whatever_their_order() {
        let groups = Groups::of(["a", "b", "a", "c", "b"].into_iter());
        let all: Vec<u32> = (0..5).map(|rank| groups.of_rank(Rank(rank))).collect();
        assert_eq!(all, [0, 1, 0, 2, 1]);
        assert_eq!((groups.count(), groups.largest()), (3, 2));
        let apart = Groups::apart(["a", "a"].into_iter());
        assert_eq!((apart.count(), apart.of_rank(Rank(1))), (2, 1));
    }

    #[test]
    fn owners_balance_bytes_within_each_group_and_a_root_owns_its_broadcasts() {
        let groups = Groups::of(["a", "a", "a", "b", "b", "c"].into_iter());
        let mut owners = Owners::new(&groups, &planning(&[], 0));
        let mut bytes = [0u64; 6];
        for part in 0..3000u32 {
            let size = 1 + part * 7919 % 1000;
            let places = owners.choose(size, None);
            for first in [0, 3, 5] {
                let owner = owner(&groups, Rank(first), (Key(0), &places), &said(Operation::Sum));
                assert_eq!(groups.of_rank(owner), groups.of_rank(Rank(first)));
                bytes[owner.0 as usize] += u64::from(size);
            }
            let root = said(Operation::Broadcast(Rank(4)));
            assert_eq!(owner(&groups, Rank(3), (Key(0), &places), &root), Rank(4));
            assert_ne!(owner(&groups, Rank(0), (Key(0), &places), &root), Rank(4));
        }
        assert!(bytes[..3].iter().all(|one| one.abs_diff(bytes[0]) <= 1000), "{bytes:?}");
        assert!(bytes[3].abs_diff(bytes[4]) <= 1000, "{bytes:?}");
    }

    #[test]
    fn whole_rows_of_a_tensor_on_gpus_go_round_and_the_rest_to_who_has_least() {
        let groups = Groups::of(["a", "a", "a", "b", "b"].into_iter());
        let mut owners = Owners::new(&groups, &planning(&[], 0));
        let places: Vec<Places> = (0..8).map(|part| owners.choose(10, Some((part, 7)))).collect();
        let of = |rank: u32| -> Vec<u32> {
            let owner =
                |places| owner(&groups, Rank(rank), (Key(0), places), &said(Operation::Sum)).0;
            places.iter().map(owner).collect()
        };
        assert_eq!(of(0), [0, 1, 2, 0, 1, 2, 0, 1]);
        assert_eq!(of(4), [3, 4, 3, 4, 3, 4, 3, 4]);
    }

    #[test]
    fn roots_alone_own_tensors_on_gpus_and_share_them_evenly() {
        let groups = Groups::of(["a", "a", "a", "a", "b"].into_iter());
        let mut owners = Owners::new(&groups, &planning(&[1, 3], 0));
        let mut bytes = [0u64; 5];
        for part in 0..3000u32 {
            let size = 1 + part * 7919 % 1000;
            // Every third tensor is one of the host, which all places own.
            let in_turn = (!part.is_multiple_of(3)).then_some((part as usize % 8, 8));
            let places = owners.choose(size, in_turn);
            for first in [0, 4] {
                let owner = owner(&groups, Rank(first), (Key(0), &places), &said(Operation::Sum));
                bytes[owner.0 as usize] += u64::from(size);
                assert!(in_turn.is_none() || [1, 3, 4].contains(&owner.0), "{owner}");
            }
        }
        assert!(bytes[1].abs_diff(bytes[3]) <= 1000, "{bytes:?}");
        assert!(bytes[0].abs_diff(bytes[2]) <= 1000 && bytes[0] < bytes[1], "{bytes:?}");
        assert_eq!(bytes[4], bytes[..4].iter().sum::<u64>());
    }

    #[test]
    fn rows_go_round_within_a_switch_and_its_likes_in_others_share_them() {
        let groups = Groups::of(["a"; 4].into_iter().chain(["b"; 3]));
        let mut owners = Owners::new(&groups, &planning(&[], 2));
        let places: Vec<Places> = (0..8).map(|part| owners.choose(10, Some((part, 7)))).collect();
        let of = |rank: u32| -> Vec<u32> {
            let owner =
                |places| owner(&groups, Rank(rank), (Key(0), places), &said(Operation::Sum)).0;
            places.iter().map(owner).collect()
        };
        // Places 0 and 2 hold the same share, and so do 1 and 3.
        assert_eq!(of(0), [0, 1, 2, 3, 0, 1, 2, 3]);
        // Three ranks have no two switches of two.
        assert_eq!(of(4), [4, 5, 6, 4, 5, 6, 4, 5]);
    }
}
