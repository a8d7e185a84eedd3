//! What tensors there are, what each rank said of them, and where their parts live.
//!
//! Invariant: a name means one thing on all ranks at each of its rounds. The first declaration
//! fixes it; an equal one gets the same keys; a different one spoils the name, and everybody is
//! told. A rank may declare a name anew, as another tensor with keys of its own: the others must do
//! so after as many rounds (see [`eras`](super::eras)). No rank is told of a key that its server
//! does not know yet, and a server may forget the keys of a tensor that no rank pushes any more.

mod losing;
mod moving;
mod recall;
mod recut;
mod steps;

use self::moving::Moving;
pub(super) use self::moving::Reached;
pub(super) use self::recall::{Moves, Recalled, Told};
use self::recut::{Cut, Recutting};
use self::steps::Step;
use super::eras::Eras;
use super::groups::{Groups, Owners, Places, owner};
use crate::base::{Key, Operation, Rank};
use crate::keys::partition::{part_count, tensor_bytes};
use crate::keys::placement::{Placer, Shape};
use crate::limits::{
    DECLARE_MEMBERS_MAX, DECLARE_PARTS_MAX, ERAS_MAX, NAME_BYTES_MAX, PARTS_MAX, TENSORS_MAX,
};
use crate::proto::members::{Members, MembersFault};
use crate::proto::messages::{
    Assignment, Declaration, KeySpec, Mismatch, Part, Planning, RetiredKey, Superseded,
};
use crate::proto::store::StoreFault;
use crate::proto::unserved::Unserved;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

/// The registry of one epoch.
#[derive(Debug)]
pub(super) struct Registry {
    ranks: u32,
    partition_bytes: u32,
    /// Of tensors that can be cut anew ([`recut`]): what the job has come to so far.
    tuned_bytes: u32,
    recutting: Option<Recutting>,
    placer: Placer,
    /// The parts that a tensor is to have for the servers' sake, and the cores that take them, as
    /// they were when the epoch began.
    shares: (u64, u64),
    servers: usize,
    through_servers: bool,
    /// The epoch goes on without ranks that die.
    shrinks: bool,
    groups: Groups,
    owners: Owners,
    names: HashMap<String, Name>,
    tensors: Vec<Registered>,
    /// The tensor of each key.
    keys: Vec<u32>,
    /// Installs under way, by their request number.
    batches: BTreeMap<u64, Batch>,
    /// Declares that wait for installs, by a number of their own.
    waiting: BTreeMap<u64, Unanswered>,
    /// Ranks that died.
    gone: Vec<Rank>,
    moving: Moving,
    next: u64,
}

#[derive(Debug)]
struct Name {
    eras: Eras,
    /// All tensors that it has stood for.
    tensors: Vec<u32>,
    spoiled: Option<Mismatch>,
}

#[derive(Debug)]
struct Registered {
    first: Rank,
    said: Declaration,
    /// Their owner is filled in for whoever is told.
    parts: Vec<Part>,
    /// By part.
    places: Vec<Places>,
    /// The install that its servers have not all answered yet.
    batch: Option<u64>,
    /// Rounds that it had in the eras of its name that have ended.
    rounds: u64,
    /// Of each further time that it was cut: the first key, and the rounds that it had had by then.
    cuts: Vec<(Key, u64)>,
    /// Its servers were told to forget its keys.
    retired: bool,
}

#[derive(Debug)]
struct Batch {
    since: Duration,
    servers: BTreeSet<u32>,
    tensors: Vec<u32>,
    waiting: Vec<u64>,
}

#[derive(Debug)]
struct Unanswered {
    rank: Rank,
    request: u64,
    tensors: Vec<u32>,
    batches: usize,
}

/// What the registry wants sent.
#[derive(Debug)]
pub(super) enum Reply {
    /// To one rank.
    Declared { rank: Rank, request: u64, tensors: Vec<Assignment> },
    /// To one rank.
    Refused { rank: Rank, request: u64, cause: Unserved },
    /// To all ranks, or to one that comes late.
    Mismatch { to: Option<Rank>, mismatch: Mismatch },
    /// To one server.
    Install { server: u32, request: u64, keys: Vec<KeySpec> },
    /// To one server.
    Retire { server: u32, keys: Vec<RetiredKey> },
    /// To one rank.
    Superseded { rank: Rank, tensors: Vec<Superseded> },
}

/// What a rank says of a name; with the rounds of what it had said before, if it had.
type Said = (Declaration, Option<u64>);

/// Why a declare cannot be served.
enum Refusal {
    Unserved(Unserved),
    Disagrees(Vec<Mismatch>),
}

/// What a declare has changed.
#[derive(Default)]
struct Changes {
    /// Tensors whose keys the servers have to know.
    installed: Vec<u32>,
    /// What to tell other ranks.
    superseded: BTreeMap<Rank, Vec<Superseded>>,
    /// Tensors that are pushed no more, and their rounds.
    over: Vec<(u32, u64)>,
}

impl Registry {
    /// An empty one; `shrinks` if the epoch goes on without ranks that die. Install requests are
    /// numbered from `next`.
    pub(super) fn new(
        groups: Groups,
        (through_servers, shrinks): (bool, bool),
        planning: &Planning,
        shapes: &[Shape],
        next: u64,
    ) -> Registry {
        let coefficient = planning.built_in_coefficient;
        let placer = Placer::new(planning.placement, coefficient, shapes);
        Registry {
            ranks: groups.ranks(),
            through_servers,
            shrinks,
            owners: Owners::new(&groups, planning),
            groups,
            partition_bytes: planning.partition_bytes,
            tuned_bytes: planning.partition_bytes,
            recutting: None,
            shares: recut::server_shares(&placer),
            placer,
            servers: shapes.len(),
            names: HashMap::new(),
            tensors: Vec::new(),
            keys: Vec::new(),
            batches: BTreeMap::new(),
            waiting: BTreeMap::new(),
            gone: Vec::new(),
            moving: Moving::default(),
            next,
        }
    }

    /// The number from which the next epoch's registry counts, so that late answers are told apart.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// The groups of this epoch's ranks.
    pub(super) fn groups(&self) -> &Groups {
        &self.groups
    }

    /// The name of the tensor that a key is a part of, unless ranks disagree about it: nobody waits
    /// for such a one.
    pub(super) fn name_of(&self, key: Key) -> Option<&str> {
        let tensor = *self.keys.get(usize::try_from(key.0).ok()?)?;
        self.agreed(tensor).map(|said| said.name.as_str())
    }

    /// What a tensor is, unless ranks disagree about its name.
    pub(super) fn agreed(&self, tensor: u32) -> Option<&Declaration> {
        let said = self.said(tensor)?;
        self.names.get(&said.name)?.spoiled.is_none().then_some(said)
    }

    /// The ranks that push what this name stands for.
    pub(super) fn members_of(&self, name: &str) -> &Members {
        let known = self.names.get(name).and_then(|name| name.tensors.first());
        known.map_or(&Members::ALL, |&tensor| &self.tensors[tensor as usize].said.members)
    }

    /// How many tensors are known.
    pub(super) fn count(&self) -> usize {
        self.tensors.iter().filter(|tensor| !tensor.said.name.is_empty()).count()
    }

    /// What a tensor is.
    pub(super) fn said(&self, tensor: u32) -> Option<&Declaration> {
        Some(&self.tensors.get(tensor as usize)?.said)
    }

    /// Whether the groups of its ranks have to be summed by servers, or its value is theirs.
    fn needs_servers(&self, said: &Declaration) -> bool {
        let members = &said.members;
        let leaves_group = members.is_all() || !self.groups.is_one(members);
        self.through_servers && (leaves_group || said.store.is_some())
    }

    /// The server that has not answered an install for the longest time, and since when.
    pub(super) fn oldest_install(&self) -> Option<(u32, Duration)> {
        let is_installs = |request: &u64| self.moving.batch != Some(*request);
        let installs = self.batches.iter().filter(|(request, _)| is_installs(request));
        let (_, batch) = installs.min_by_key(|(_, batch)| batch.since)?;
        Some((*batch.servers.first()?, batch.since))
    }

    /// Forgets the open requests of a rank that left.
    pub(super) fn forget(&mut self, rank: Rank) {
        self.waiting.retain(|_, waiting| waiting.rank != rank);
    }

    /// A rank declares tensors. It is answered now, or when the servers have installed the keys.
    pub(super) fn declare(
        &mut self,
        rank: Rank,
        request: u64,
        all: Vec<Said>,
        now: Duration,
    ) -> Vec<Reply> {
        let mut replies = Vec::new();
        match self.check(rank, &all) {
            Ok(()) => {}
            Err(Refusal::Unserved(cause)) => {
                replies.push(Reply::Refused { rank, request, cause });
                return replies;
            }
            Err(Refusal::Disagrees(mismatches)) => {
                let cause = Unserved::Mismatch { mismatches: mismatches.clone() };
                replies.extend(mismatches.into_iter().map(|mismatch| self.spoil(rank, mismatch)));
                replies.push(Reply::Refused { rank, request, cause });
                return replies;
            }
        }
        let mut changes = Changes::default();
        let tensors: Vec<u32> =
            all.into_iter().map(|said| self.take_step(rank, said, &mut changes)).collect();
        self.install(changes.installed, now, &mut replies);
        self.answer(rank, request, tensors, &mut replies);
        for (rank, tensors) in changes.superseded {
            replies.push(Reply::Superseded { rank, tensors });
        }
        self.retire(&changes.over, &mut replies);
        replies
    }

    /// A server has room for the keys of an install.
    pub(super) fn installed(&mut self, server: u32, request: u64) -> Vec<Reply> {
        let Some(batch) = self.batches.get_mut(&request) else { return Vec::new() };
        batch.servers.remove(&server);
        if !batch.servers.is_empty() {
            return Vec::new();
        }
        let Some(batch) = self.batches.remove(&request) else { return Vec::new() };
        for tensor in batch.tensors {
            // It may have been retired, and installed again, meanwhile.
            let tensor = &mut self.tensors[tensor as usize];
            tensor.batch = tensor.batch.filter(|&last| last != request);
        }
        let mut replies = Vec::new();
        for number in batch.waiting {
            let Some(waiting) = self.waiting.get_mut(&number) else { continue };
            waiting.batches -= 1;
            if waiting.batches == 0
                && let Some(Unanswered { rank, request, tensors, .. }) =
                    self.waiting.remove(&number)
            {
                replies.push(self.declared(rank, request, &tensors));
            }
        }
        replies
    }

    /// Whether all of a declare can be served. Nothing is changed before that is known.
    fn check(&self, rank: Rank, all: &[Said]) -> Result<(), Refusal> {
        let unserved = |cause: Unserved| Err(Refusal::Unserved(cause));
        let partition_bytes = self.partition_bytes.min(self.tuned_bytes);
        let mut fresh: HashMap<&str, &Declaration> = HashMap::new();
        let mut disagree = Vec::new();
        let (mut new_tensors, mut new_parts, mut all_parts) = (0, 0u64, 0u64);
        let (mut members, mut served) = (0u64, false);
        for one in all {
            let (said, rounds) = one;
            let bytes = self.check_one(rank, one).map_err(Refusal::Unserved)?;
            let count = part_count(bytes, self.part_bytes(said, bytes));
            all_parts = all_parts.saturating_add(count);
            let listed = said.members.listed().len() as u64;
            members = members.saturating_add(listed.saturating_mul(count.max(1)));
            let step = self.step(rank, one);
            if (matches!(step, Step::New) || rounds.is_some())
                && let Some(other) = fresh.insert(&said.name, said)
            {
                if other == said && rounds.is_none() {
                    continue;
                }
                let (first, second) = (Box::new(other.clone()), Box::new(said.clone()));
                return unserved(Unserved::Twice { first, second });
            }
            let begins = matches!(step, Step::Begin(_));
            match step {
                Step::New | Step::Begin(None) => {
                    new_tensors += 1;
                    new_parts = new_parts.saturating_add(count);
                    served |= count > 0 && self.needs_servers(said);
                }
                Step::Disagrees(mismatch) => disagree.push(mismatch),
                Step::Same(_) | Step::Next(_) | Step::Begin(Some(_)) => {}
            }
            let eras = self.names.get(&said.name).map_or(0, |name| name.eras.count());
            if begins && eras >= ERAS_MAX {
                return unserved(Unserved::Ahead { rank, tensor: said.name.clone() });
            }
        }
        if !disagree.is_empty() {
            return Err(Refusal::Disagrees(disagree));
        }
        if self.tensors.len() + new_tensors > TENSORS_MAX {
            return unserved(Unserved::Tensors);
        }
        if all_parts > DECLARE_PARTS_MAX as u64 {
            return unserved(Unserved::PartsAtOnce { parts: all_parts, partition_bytes });
        }
        if self.keys.len() as u64 + new_parts > PARTS_MAX as u64 {
            return unserved(Unserved::Parts { partition_bytes });
        }
        if members > DECLARE_MEMBERS_MAX as u64 {
            return unserved(Unserved::MembersAtOnce);
        }
        if served && self.servers == 0 {
            return unserved(Unserved::NoServer);
        }
        Ok(())
    }

    /// Does what [`check`](Self::check) has found possible: the number of the tensor.
    fn take_step(&mut self, rank: Rank, said: Said, changes: &mut Changes) -> u32 {
        let step = self.step(rank, &said);
        let (said, rounds) = said;
        let name = said.name.clone();
        let tensor = match step {
            Step::New => {
                let tensor = self.add(rank, said);
                let eras = Eras::new(tensor);
                self.names.insert(name, Name { eras, tensors: vec![tensor], spoiled: None });
                changes.installed.push(tensor);
                return tensor;
            }
            Step::Same(era) => return era.tensor,
            Step::Next(era) => era.tensor,
            Step::Begin(Some(tensor)) => tensor,
            Step::Begin(None) => {
                let tensor = self.add(rank, said);
                changes.installed.push(tensor);
                tensor
            }
            Step::Disagrees(_) => unreachable!("it was checked"),
        };
        let state = self.names.get_mut(&name).expect("only a known name has eras");
        if let (Step::Begin(known), Some(rounds)) = (step, rounds) {
            let old = state.eras.current(rank).tensor;
            self.tensors[old as usize].rounds = rounds;
            if known.is_none() {
                state.tensors.push(tensor);
            }
            let start = self.tensors[tensor as usize].rounds;
            let members = (&self.tensors[tensor as usize].said.members, self.ranks);
            for other in state.eras.begin(rank, members, rounds, (tensor, start)) {
                let superseded = Superseded { tensor: old, rounds };
                changes.superseded.entry(other).or_default().push(superseded);
            }
            for &gone in &self.gone {
                changes.over.extend(state.eras.lose(gone));
            }
        }
        changes.over.extend(state.eras.advance(rank));
        if std::mem::take(&mut self.tensors[tensor as usize].retired) {
            changes.installed.push(tensor);
        }
        tensor
    }

    /// Bytes of a tensor that is sound by itself.
    fn check_one(&self, rank: Rank, (said, rounds): &Said) -> Result<u64, Unserved> {
        let name = || said.name.clone();
        if !(1..=NAME_BYTES_MAX).contains(&said.name.len()) {
            return Err(Unserved::Name { tensor: name() });
        }
        if let Operation::Broadcast(root) = said.operation
            && root.0 >= self.ranks
        {
            return Err(Unserved::Root { tensor: name(), root, size: self.ranks });
        }
        said.check_members(rank, self.ranks)?;
        said.check_receiver(self.ranks, self.shrinks)?;
        let before = self.members_of(&said.name);
        if rounds.is_some() && *before != said.members && self.names.contains_key(&said.name) {
            let (members, before) = (said.members.clone(), before.clone());
            let fault = MembersFault::Changed { before };
            return Err(Unserved::Members { tensor: name(), members, fault });
        }
        let (elements, dtype) = (said.shape.count(), said.dtype);
        let bytes = tensor_bytes(elements, dtype);
        let bytes = bytes.ok_or_else(|| Unserved::Size { tensor: name(), elements, dtype })?;
        if let Some(encoding) = said.encoding {
            let most = u64::from(self.part_bytes(said, bytes)).div_ceil(dtype.size() as u64);
            let fits = encoding.check(dtype, said.operation, most);
            fits.map_err(|fault| Unserved::Encoding { tensor: name(), encoding, fault })?;
        }
        self.check_store(said, rounds.is_some())
            .map_err(|fault| Unserved::Store { tensor: name(), fault })?;
        Ok(bytes)
    }

    /// Whether a tensor can be stored, if it is to be, and replace what its name stood for.
    fn check_store(&self, said: &Declaration, replaces: bool) -> Result<(), StoreFault> {
        let tensors = self.names.get(&said.name).into_iter().flat_map(|name| &name.tensors);
        let mut stored = tensors.map(|&tensor| self.tensors[tensor as usize].said.store);
        if replaces && (said.store.is_some() || stored.any(|store| store.is_some())) {
            return Err(StoreFault::Replaced);
        }
        let Some(store) = said.store else { return Ok(()) };
        said.check_store(self.ranks)?;
        let mut needed = self.gone.iter().filter(|rank| said.members.contains(**rank));
        if let Some(&rank) = needed.find(|rank| store.needs(**rank)) {
            return Err(StoreFault::Gone { rank });
        }
        if self.through_servers { Ok(()) } else { Err(StoreFault::NoServer) }
    }

    fn add(&mut self, rank: Rank, said: Declaration) -> u32 {
        let tensor = u32::try_from(self.tensors.len()).expect("at most TENSORS_MAX");
        let Cut { parts, places } = self.cut(tensor, &said);
        let (first, batch, rounds, retired, cuts) = (rank, None, 0, false, Vec::new());
        self.tensors.push(Registered { first, said, parts, places, batch, rounds, cuts, retired });
        tensor
    }

    /// Lets servers forget the keys of tensors that are not pushed any more, after so many rounds.
    fn retire(&mut self, over: &[(u32, u64)], replies: &mut Vec<Reply>) {
        let mut by_server: BTreeMap<u32, Vec<RetiredKey>> = BTreeMap::new();
        for (tensor, rounds) in over {
            let tensor = &mut self.tensors[*tensor as usize];
            tensor.retired = true;
            retire_parts(&tensor.parts, rounds.saturating_sub(tensor.base()), &mut by_server);
        }
        let retired = by_server.into_iter().map(|(server, keys)| Reply::Retire { server, keys });
        replies.extend(retired);
    }

    /// Sends the keys of new tensors, and of retired ones that are used again, to their servers.
    fn install(&mut self, new: Vec<u32>, now: Duration, replies: &mut Vec<Reply>) {
        let mut by_server: BTreeMap<u32, Vec<KeySpec>> = BTreeMap::new();
        for tensor in &new {
            let tensor = &self.tensors[*tensor as usize];
            let rounds = tensor.rounds.saturating_sub(tensor.base());
            // What moves between servers is there when the others are told.
            let parts = tensor.parts.iter().filter(|part| !self.is_homeless(part.key));
            specify(&tensor.said, parts, rounds, &mut by_server);
        }
        if by_server.is_empty() {
            return;
        }
        let request = self.number();
        for tensor in &new {
            self.tensors[*tensor as usize].batch = Some(request);
        }
        let servers = by_server.keys().copied().collect();
        let batch = Batch { since: now, servers, tensors: new, waiting: Vec::new() };
        self.batches.insert(request, batch);
        let installs =
            by_server.into_iter().map(|(server, keys)| Reply::Install { server, request, keys });
        replies.extend(installs);
    }

    /// Answers a declare, or lets it wait for the installs of its tensors.
    fn answer(&mut self, rank: Rank, request: u64, tensors: Vec<u32>, replies: &mut Vec<Reply>) {
        let open = tensors.iter().filter_map(|tensor| self.tensors[*tensor as usize].batch);
        let batches: BTreeSet<u64> = open.chain(self.moving.batch).collect();
        if batches.is_empty() {
            replies.push(self.declared(rank, request, &tensors));
            return;
        }
        let number = self.number();
        for batch in &batches {
            if let Some(batch) = self.batches.get_mut(batch) {
                batch.waiting.push(number);
            }
        }
        let batches = batches.len();
        self.waiting.insert(number, Unanswered { rank, request, tensors, batches });
    }

    fn declared(&self, rank: Rank, request: u64, tensors: &[u32]) -> Reply {
        let assignment = |&tensor: &u32| {
            let Registered { said, parts, places, .. } = &self.tensors[tensor as usize];
            let era = self.names.get(&said.name).map(|name| name.eras.current(rank));
            let end = era.filter(|era| era.tensor == tensor).and_then(|era| era.end);
            Assignment {
                tensor,
                parts: self.parts_for(rank, said, parts, places),
                until: end.map(|end| end.rounds),
            }
        };
        let tensors = tensors.iter().map(assignment).collect();
        Reply::Declared { rank, request, tensors }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// The keys of parts, as servers must know them that have had so many rounds.
fn specify<'parts>(
    said: &Declaration,
    parts: impl IntoIterator<Item = &'parts Part>,
    rounds: u64,
    by_server: &mut BTreeMap<u32, Vec<KeySpec>>,
) {
    for part in parts {
        let Some(core) = part.core else { continue };
        by_server.entry(core.server).or_default().push(KeySpec {
            key: part.key,
            core: core.core,
            dtype: said.dtype,
            bytes: part.bytes,
            operation: said.operation,
            rounds,
            members: said.members.clone(),
            receiver: said.receiver,
            encoding: said.encoding,
            store: said.store,
        });
    }
}

/// The keys of parts that are pushed so often and no more.
fn retire_parts(parts: &[Part], rounds: u64, by_server: &mut BTreeMap<u32, Vec<RetiredKey>>) {
    for part in parts {
        let Some(core) = part.core else { continue };
        let retired = RetiredKey { key: part.key, core: core.core, rounds };
        by_server.entry(core.server).or_default().push(retired);
    }
}
