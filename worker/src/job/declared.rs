//! What this process has declared, and how often it has pushed each tensor. Callers and the control
//! thread share it.
//!
//! Invariant: pushes of a tensor are counted before they are handed to the NIC loop, so a
//! declaration that replaces it says a number that no later push of it can exceed unnoticed.

use crate::base::error::{Error, Refusal};
use crate::base::types::TensorId;
use bps_engine::base::{Operation, word};
use bps_engine::optimize::{Act, Optimizer};
use bps_engine::proto::messages::{Declaration, Replacement};
use bps_engine::proto::store::Store;
use bps_engine::proto::uneven::Pushes;
use std::collections::{HashMap, HashSet};

/// See the [module](self).
#[derive(Default)]
pub(crate) struct Declared {
    /// What each name stands for now.
    names: HashMap<String, (Declaration, u32)>,
    /// By id.
    tensors: Vec<Tally>,
    uneven: Uneven,
}

/// How this rank stands to those that have run out of data.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Uneven {
    /// Nobody has joined.
    #[default]
    Even,
    /// Others have: the scheduler is told of pushes.
    Reports,
    /// This one has.
    Joined,
}

/// What must be known of a tensor that is pushed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct What {
    pub(crate) bytes: usize,
    pub(crate) elements: u64,
    pub(crate) operation: Operation,
    pub(crate) optimizer: Option<Optimizer>,
    name: String,
    /// It is on the GPUs of all ranks.
    pub(crate) device: bool,
}

#[derive(Clone)]
struct Tally {
    /// What it is, once it was declared here.
    what: Option<What>,
    pushes: u64,
    /// How often it may be pushed: as often as other ranks did that have replaced it.
    until: u64,
}

const UNKNOWN: Tally = Tally { what: None, pushes: 0, until: u64::MAX };

/// What a caller has to tell the scheduler.
#[derive(Default)]
pub(crate) struct News {
    /// Names that this process has not declared before.
    pub(crate) new: Vec<Declaration>,
    /// Names that it has declared otherwise before.
    pub(crate) replaced: Vec<Replacement>,
}

impl Declared {
    /// What of this is not declared yet.
    pub(crate) fn news(&self, tensors: &[Declaration]) -> News {
        let mut news = News::default();
        for said in tensors {
            match self.names.get(&said.name) {
                None => news.new.push(said.clone()),
                Some((old, _)) if old == said => {}
                Some((_, id)) => {
                    let rounds = self.tensors[*id as usize].pushes;
                    news.replaced.push(Replacement { said: said.clone(), rounds });
                }
            }
        }
        news
    }

    fn tensor(&mut self, id: u32) -> &mut Tally {
        let index = id as usize;
        if self.tensors.len() <= index {
            self.tensors.resize(index + 1, UNKNOWN);
        }
        &mut self.tensors[index]
    }

    /// A declaration was answered with this id.
    pub(crate) fn insert(&mut self, said: Declaration, id: u32) {
        let bytes = said.shape.count().saturating_mul(said.dtype.size() as u64);
        // A product that overflows is of no tensor that could be pushed: all lengths differ.
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let (name, operation, device) = (said.name.clone(), said.operation, said.device);
        let elements = said.shape.count();
        let optimizer = said.store.and_then(Store::optimizer);
        let what = What { bytes, elements, operation, optimizer, name, device };
        self.tensor(id).what = Some(what);
        self.names.insert(said.name.clone(), (said, id));
    }

    /// An id that no tensor has, for a job of one process; a name keeps its own.
    pub(crate) fn id_alone(&self, name: &str) -> u32 {
        let next = || word(self.tensors.len());
        self.names.get(name).map_or_else(next, |(_, id)| *id)
    }

    /// The id of a declaration.
    pub(crate) fn id(&self, said: &Declaration) -> Result<TensorId, Error> {
        let known = self.names.get(&said.name).filter(|(known, _)| known == said);
        known
            .map(|&(_, id)| TensorId(id))
            .ok_or_else(|| Refusal::Undeclared { tensor: said.name.clone() }.into())
    }

    fn what(&self, tensor: TensorId) -> Result<&What, Error> {
        let known = self.tensors.get(tensor.0 as usize).and_then(|tensor| tensor.what.as_ref());
        Ok(known.ok_or(Refusal::UnknownId { id: tensor.0 })?)
    }

    /// What a tensor is that is to be pushed from memory of the GPU.
    pub(crate) fn what_on_gpu(&self, tensor: TensorId) -> Result<&What, Error> {
        let what = self.what(tensor)?;
        if what.device { Ok(what) } else { self.what_for(tensor, Act::NONE) }
    }

    /// What a tensor of the host is that is to be pushed for this.
    pub(crate) fn what_for(&self, tensor: TensorId, act: Act) -> Result<&What, Error> {
        let what = self.what(tensor)?;
        if what.device {
            return Err(Refusal::OfGpu { tensor: what.name.clone() }.into());
        }
        let is_fit = what.optimizer.map_or(act == Act::NONE, |optimizer| act.suits(&optimizer));
        if is_fit {
            return Ok(what);
        }
        let (tensor, optimizer) = (what.name.clone(), what.optimizer);
        Err(Refusal::Act { tensor, act, optimizer }.into())
    }

    /// Elements and name of a tensor.
    pub(crate) fn size(&self, tensor: TensorId) -> Result<(u64, &str), Error> {
        let known = self.tensors.get(tensor.0 as usize).and_then(|tensor| tensor.what.as_ref());
        let what = known.ok_or(Refusal::UnknownId { id: tensor.0 })?;
        Ok((what.elements, &what.name))
    }

    /// Whether a tensor is on GPUs.
    pub(crate) fn is_on_gpu(&self, tensor: TensorId) -> Result<bool, Error> {
        let known = self.tensors.get(tensor.0 as usize).and_then(|tensor| tensor.what.as_ref());
        Ok(known.ok_or(Refusal::UnknownId { id: tensor.0 })?.device)
    }

    /// Counts a push; says whether it goes beyond what other ranks did.
    pub(crate) fn count(&mut self, tensor: TensorId) -> bool {
        let tensor = self.tensor(tensor.0);
        tensor.pushes += 1;
        tensor.pushes > tensor.until
    }

    /// How often a tensor was pushed.
    pub(crate) fn pushes(&self, tensor: TensorId) -> u64 {
        self.tensors.get(tensor.0 as usize).map_or(0, |tensor| tensor.pushes)
    }

    /// Whether pushes are to be reported: some other rank has joined.
    pub(crate) fn reports(&self) -> bool {
        self.uneven == Uneven::Reports
    }

    /// How often these were pushed, each of them once.
    pub(crate) fn totals(&self, tensors: &[TensorId]) -> Vec<Pushes> {
        let (mut seen, mut totals) = (HashSet::new(), Vec::new());
        for &tensor in tensors.iter().filter(|tensor| seen.insert(**tensor)) {
            Pushes::append(&mut totals, tensor.0, self.pushes(tensor));
        }
        totals
    }

    fn all_pushes(&self) -> Vec<Pushes> {
        let mut all = Vec::new();
        for (id, tensor) in (0..).zip(&self.tensors).filter(|(_, tensor)| tensor.pushes > 0) {
            Pushes::append(&mut all, id, tensor.pushes);
        }
        all
    }

    /// Pushes are to be reported from now on: all that there were. `None` if this rank has joined,
    /// and so has said it.
    pub(crate) fn report(&mut self) -> Option<Vec<Pushes>> {
        if self.uneven == Uneven::Joined {
            return None;
        }
        self.uneven = Uneven::Reports;
        Some(self.all_pushes())
    }

    /// This rank joins: all that it has pushed. `None` if it has joined before.
    pub(crate) fn join(&mut self) -> Option<Vec<Pushes>> {
        let before = std::mem::replace(&mut self.uneven, Uneven::Joined);
        (before != Uneven::Joined).then(|| self.all_pushes())
    }

    /// All ranks have joined.
    pub(crate) fn all_joined(&mut self) {
        self.uneven = Uneven::Even;
    }

    /// Other ranks have pushed it so often, and replaced it; or are pushing it (`None`). Says
    /// whether this process has pushed it more often.
    pub(crate) fn limit(&mut self, id: u32, until: Option<u64>) -> bool {
        let tensor = self.tensor(id);
        // Not replaced: pushed without end.
        tensor.until = until.unwrap_or(u64::MAX);
        tensor.pushes > tensor.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bps_engine::base::DType;
    use bps_engine::proto::members::Members;

    fn said(count: u64) -> Declaration {
        Declaration {
            name: "x".into(),
            dtype: DType::F32,
            shape: count.into(),
            operation: Operation::Sum,
            device: false,
            members: Members::ALL,
            receiver: None,
            encoding: None,
            store: None,
        }
    }

    #[test]
    fn a_name_declared_anew_tells_how_often_it_was_pushed() {
        let mut declared = Declared::default();
        assert_eq!(declared.news(&[said(4)]).new, [said(4)]);
        declared.insert(said(4), 7);
        let news = declared.news(&[said(4)]);
        assert!(news.new.is_empty() && news.replaced.is_empty());
        assert!(!declared.count(TensorId(7)) && !declared.count(TensorId(7)));
        let replaced = Replacement { said: said(5), rounds: 2 };
        assert_eq!(declared.news(&[said(5)]).replaced, [replaced]);
        declared.insert(said(5), 9);
        assert_eq!(declared.id(&said(5)).unwrap(), TensorId(9));
        assert!(declared.id(&said(4)).is_err());
        let what = declared.what_for(TensorId(9), Act::NONE).unwrap();
        assert_eq!((what.bytes, what.operation), (20, Operation::Sum));
        assert!(declared.what_for(TensorId(8), Act::NONE).is_err());
    }

    #[test]
    fn a_tensor_of_the_host_may_be_on_the_gpu_and_not_the_other_way_round() {
        let mut declared = Declared::default();
        declared.insert(said(4), 0);
        declared.insert(Declaration { name: "y".into(), device: true, ..said(4) }, 1);
        assert!(!declared.what_on_gpu(TensorId(0)).unwrap().device);
        assert!(declared.what_on_gpu(TensorId(1)).unwrap().device);
        let error = declared.what_for(TensorId(1), Act::NONE).unwrap_err().to_string();
        assert!(error.contains("`y` was declared as a tensor of the GPU"), "{error}");
    }

    #[test]
    fn pushes_are_reported_while_others_have_joined() {
        let mut declared = Declared::default();
        declared.insert(said(4), 1);
        declared.count(TensorId(1));
        declared.count(TensorId(2));
        assert!(!declared.reports());
        let run = |first, tensors, pushes| Pushes { first, tensors, pushes };
        assert_eq!(declared.report(), Some(vec![run(1, 2, 1)]));
        assert!(declared.reports());
        declared.count(TensorId(2));
        let both = [TensorId(2), TensorId(1), TensorId(2), TensorId(9)];
        assert_eq!(declared.totals(&both), [run(2, 1, 2), run(1, 1, 1), run(9, 1, 0)]);
        // Its own word counts as an answer to whoever asks later.
        assert_eq!(declared.join(), Some(vec![run(1, 1, 1), run(2, 1, 2)]));
        assert_eq!((declared.join(), declared.report()), (None, None));
        assert!(!declared.reports());
        declared.all_joined();
        assert!(declared.report().is_some());
    }

    #[test]
    fn a_push_beyond_the_others_is_noticed_before_and_after_it() {
        let mut declared = Declared::default();
        declared.insert(said(4), 0);
        assert!(!declared.limit(0, Some(1)));
        assert!(!declared.count(TensorId(0)) && declared.count(TensorId(0)));
        // Used again by all, and pushed twice before another rank is known to have stopped.
        assert!(!declared.limit(0, None));
        assert!(!declared.count(TensorId(0)) && !declared.count(TensorId(0)));
        assert!(declared.limit(0, Some(3)));
    }
}
