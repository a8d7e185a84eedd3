//! A registry that is made again of what ranks were told: each tensor is added as it was the first
//! time, and has to come out as the ranks know it. Where its parts live, and who owns them, is what
//! the ranks say: that depends on all that was placed before, of which some may be forgotten.

use super::{Declaration, Members, Operation, Part, Rank, Refusal, Registered, Registry, owner};
use crate::base::{CoreId, DType, Key};
use crate::limits::{PARTS_MAX, TENSORS_MAX};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A tensor, as ranks know it.
#[derive(Debug)]
pub(in crate::proto::scheduler) struct Recalled {
    /// What they said.
    pub(in crate::proto::scheduler) said: Declaration,
    /// What each was told.
    pub(in crate::proto::scheduler) by: Vec<(Rank, Vec<Part>)>,
}

/// What has become of servers that are lost, and of their keys.
#[derive(Debug)]
pub(in crate::proto::scheduler) struct Moves {
    /// These servers.
    pub(in crate::proto::scheduler) lost: Vec<u32>,
    /// Keys for which others have room, and where.
    pub(in crate::proto::scheduler) adopted: BTreeMap<Key, CoreId>,
}

/// A key that a server has adopted, and of which some ranks were not told.
#[derive(Debug)]
pub(in crate::proto::scheduler) struct Told {
    /// Where it is.
    pub(in crate::proto::scheduler) core: CoreId,
    /// Ranks that were told so.
    pub(in crate::proto::scheduler) aware: BTreeSet<Rank>,
}

/// The tensor of keys that servers know and no rank does.
const NONE: u32 = u32::MAX;

impl Registry {
    /// Adds these tensors. Servers know keys below `keys_end`: no other tensor gets one of these.
    /// Parts of which a rank knows no place but with a server that is lost are on their way;
    /// returns those that are there already.
    ///
    /// # Errors
    /// Why the registry can't be the one that the ranks have known.
    pub(in crate::proto::scheduler) fn recall(
        &mut self,
        all: BTreeMap<u32, Recalled>,
        keys_end: u64,
        moves: &Moves,
        now: Duration,
    ) -> Result<BTreeMap<Key, Told>, String> {
        let mut there = BTreeMap::new();
        moves.lost.iter().for_each(|server| self.placer.lose(*server));
        let differs = |said: &Declaration| {
            format!("tensor `{}` would have other keys than ranks know", said.name)
        };
        for (tensor, Recalled { said, by }) in all {
            let Some((first, parts)) = by.first() else { continue };
            let tensor = tensor as usize;
            if tensor < self.tensors.len() || tensor >= TENSORS_MAX {
                return Err(differs(&said));
            }
            // Whoever knew those between has died or left: nobody pushes them any more.
            self.tensors.resize_with(tensor, Registered::forgotten);
            // Keys between were given to a tensor of which no rank has heard.
            if let Some(part) = parts.first() {
                self.skip_keys(part.key.0).ok_or_else(|| differs(&said))?;
            }
            let one = vec![(said.clone(), None)];
            self.check(*first, &one).map_err(|refusal| match refusal {
                Refusal::Unserved(cause) => cause.to_string(),
                Refusal::Disagrees(_) => format!("ranks disagree about tensor `{}`", said.name),
            })?;
            // What it asks for is there: the servers know these keys.
            drop(self.declare(*first, 0, one, now));
            self.batches.clear();
            self.waiting.clear();
            let Some(known) = self.tensors.get_mut(tensor) else { return Err(differs(&said)) };
            known.batch = None;
            self.take_places(tensor, &by, moves, &mut there).ok_or_else(|| differs(&said))?;
            let known = &self.tensors[tensor];
            for (rank, parts) in &by {
                let ours = self.parts_for(*rank, &known.said, &known.parts, &known.places);
                let is_same =
                    |(one, told): (&Part, &Part)| Part { core: told.core, ..*one } == *told;
                if ours.len() != parts.len() || !ours.iter().zip(parts).all(is_same) {
                    return Err(differs(&said));
                }
            }
        }
        self.placer.settle();
        let end = keys_end.max(self.keys.len() as u64);
        self.skip_keys(end).ok_or_else(|| "servers know keys that can't be".to_owned())?;
        if !self.moving.homeless.is_empty() {
            self.await_moves(now);
        }
        Ok(there)
    }

    /// Takes the places of a tensor's parts from what ranks were told; `None` if there are no such.
    fn take_places(
        &mut self,
        tensor: usize,
        by: &[(Rank, Vec<Part>)],
        moves: &Moves,
        there: &mut BTreeMap<Key, Told>,
    ) -> Option<()> {
        let Registered { said, parts, places, .. } = &mut self.tensors[tensor];
        for (at, (part, places)) in parts.iter_mut().zip(places).enumerate() {
            let (mut told, mut aware, mut is_away) = (None, BTreeSet::new(), false);
            for (rank, known) in by {
                let Part { core, owner: owner_told, .. } = *known.get(at)?;
                if core.is_some_and(|core| moves.lost.contains(&core.server)) {
                    is_away = true;
                } else if told.replace(core).is_some_and(|other| other != core) {
                    return None;
                } else {
                    aware.insert(*rank);
                }
                if owner(&self.groups, *rank, (part.key, places), said) != owner_told {
                    let group = self.groups.members_with(*rank);
                    let place = group.iter().position(|one| *one == owner_told)?;
                    let of_size = |(size, _): &&mut (u32, u32)| *size as usize == group.len();
                    places.iter_mut().find(of_size)?.1 = u32::try_from(place).ok()?;
                }
            }
            let known = told.or_else(|| moves.adopted.get(&part.key).copied().map(Some));
            let core = known.unwrap_or(part.core);
            if part.core != core {
                self.placer.move_part(part.bytes, part.core?, core?)?;
                part.core = core;
            }
            if is_away {
                self.moving.homeless.insert(part.key);
                if known.is_some() {
                    there.insert(part.key, Told { core: core?, aware });
                }
            }
        }
        Some(())
    }

    /// Lets the next key be this one.
    fn skip_keys(&mut self, next: u64) -> Option<()> {
        let next = usize::try_from(next).ok().filter(|next| *next <= PARTS_MAX)?;
        if next < self.keys.len() {
            return None;
        }
        self.keys.resize(next, NONE);
        Some(())
    }
}

impl Registered {
    /// Stands for a tensor of which nothing is known but that there was one.
    fn forgotten() -> Registered {
        let said = Declaration {
            name: String::new(),
            dtype: DType::U8,
            shape: 0.into(),
            operation: Operation::Sum,
            device: false,
            members: Members::ALL,
            receiver: None,
            encoding: None,
            store: None,
        };
        Registered {
            first: Rank(0),
            said,
            parts: Vec::new(),
            places: Vec::new(),
            batch: None,
            rounds: 0,
            cuts: Vec::new(),
            retired: true,
        }
    }
}
