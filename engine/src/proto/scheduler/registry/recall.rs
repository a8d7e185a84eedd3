//! A registry that is made again of what ranks were told: each tensor is added as it was the first
//! time, and has to come out as the ranks know it.

use super::{Declaration, Part, Rank, Refusal, Registry};
use crate::limits::PARTS_MAX;
use std::collections::BTreeMap;
use std::time::Duration;

/// A tensor, as ranks know it.
#[derive(Debug)]
pub(in crate::proto::scheduler) struct Recalled {
    /// What they said.
    pub(in crate::proto::scheduler) said: Declaration,
    /// What each was told.
    pub(in crate::proto::scheduler) by: Vec<(Rank, Vec<Part>)>,
}

/// The tensor of keys that servers know and no rank does.
const NONE: u32 = u32::MAX;

impl Registry {
    /// Adds these tensors. Servers know keys below `keys_end`: no other tensor gets one of these.
    ///
    /// # Errors
    /// Why the registry can't be the one that the ranks have known.
    pub(in crate::proto::scheduler) fn recall(
        &mut self,
        all: BTreeMap<u32, Recalled>,
        keys_end: u64,
        now: Duration,
    ) -> Result<(), String> {
        let differs = |said: &Declaration| {
            format!("tensor `{}` would have other keys than ranks know", said.name)
        };
        for (next, (tensor, Recalled { said, by })) in (0u32..).zip(all) {
            if tensor != next {
                return Err(format!("no rank knows tensor {next}"));
            }
            let Some((first, parts)) = by.first() else { continue };
            // Keys between were given to a tensor of which no rank has heard.
            if let Some(part) = parts.first() {
                self.skip_keys(part.key.0).ok_or_else(|| differs(&said))?;
            }
            let one = vec![(said.clone(), None)];
            self.check(*first, &one).map_err(|refusal| match refusal {
                Refusal::Unserved(cause) => cause.to_string(),
                Refusal::Disagrees(_) => format!("ranks disagree about tensor `{}`", said.name),
            })?;
            let before = self.tensors.len();
            // What it asks for is there: the servers know these keys.
            drop(self.declare(*first, 0, one, now));
            self.batches.clear();
            self.waiting.clear();
            let Some(known) = self.tensors.get_mut(before) else { return Err(differs(&said)) };
            known.batch = None;
            let known = &self.tensors[before];
            for (rank, parts) in &by {
                if self.parts_for(*rank, &known.said, &known.parts, &known.places) != *parts {
                    return Err(differs(&said));
                }
            }
        }
        let end = keys_end.max(self.keys.len() as u64);
        self.skip_keys(end).ok_or_else(|| "servers know keys that can't be".to_owned())
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
