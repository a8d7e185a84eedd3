//! Tensors as ranks declare them, and what becomes of that: where the parts live, what their server
//! must know, which tensors take each other's place.

use super::backup::BackupFault;
use super::encoding::Encoding;
use super::members::Members;
use super::receiver::ReceiverFault;
use super::shape::TensorShape;
use super::store::{Deltas, Store, StoreFault};
use super::text::shorten;
use crate::base::{CoreId, DType, Key, Operation, Rank};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a rank says that it will push.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Declaration {
    /// Unique in the job.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Its shape; a tensor without elements is allowed and has no parts.
    pub shape: TensorShape,
    /// What a round computes.
    pub operation: Operation,
    /// It lives on GPUs: the ranks of a host reduce it there.
    #[serde(default)]
    pub device: bool,
    /// The ranks that push it.
    #[serde(default, skip_serializing_if = "Members::is_all")]
    pub members: Members,
    /// The one of them that gets its results, if the others do not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receiver: Option<Rank>,
    /// How its parts travel to servers and back, if not as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoding: Option<Encoding>,
    /// How its value stays on the servers between rounds, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<Store>,
}

/// A declaration that takes the place of another of the same name.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Replacement {
    /// What the name stands for from now on.
    pub said: Declaration,
    /// How often this rank has pushed the tensor that the name stood for.
    pub rounds: u64,
}

/// A tensor that another rank has replaced.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Superseded {
    /// From `Assignment`.
    pub tensor: u32,
    /// How often that rank had pushed it.
    pub rounds: u64,
}

/// A key that no rank will push any more, unless it is installed again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RetiredKey {
    /// Its id.
    pub key: Key,
    /// Index of the core in the server.
    pub core: u32,
    /// Its last round.
    pub rounds: u64,
}

/// Where the parts of a tensor live. The parts cover it in order, without gaps.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Assignment {
    /// Dense, from 0, by order of first declaration.
    pub tensor: u32,
    /// In order of offset.
    pub parts: Vec<Part>,
    /// How often it may be pushed, where another rank has replaced it already.
    pub until: Option<u64>,
}

/// A piece of a tensor, at most a partition in size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Part {
    /// Its id.
    pub key: Key,
    /// First byte within the tensor.
    pub offset: u64,
    /// Bytes, a multiple of the element size.
    pub bytes: u32,
    /// Where it is summed over the groups; nowhere if there is one group only.
    pub core: Option<CoreId>,
    /// The rank that sums it in the group of whoever is told, and alone speaks to the core.
    pub owner: Rank,
}

/// A key as its server must know it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KeySpec {
    /// Its id.
    pub key: Key,
    /// Index of the core in the server.
    pub core: u32,
    /// Element type.
    pub dtype: DType,
    /// Bytes of a contribution, as the workers send it.
    pub bytes: u32,
    /// What a round computes.
    pub operation: Operation,
    /// Rounds that it has had, if it was retired before.
    pub rounds: u64,
    /// The ranks that push it.
    #[serde(default, skip_serializing_if = "Members::is_all")]
    pub members: Members,
    /// The one of them that gets its results, if the others do not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receiver: Option<Rank>,
    /// How contributions come and results go, if not as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoding: Option<Encoding>,
    /// How its value is kept between rounds, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<Store>,
}

/// Two ranks declared one name differently.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Mismatch {
    /// The rank that declared it first.
    pub first: Rank,
    /// What it said.
    pub first_said: Box<Declaration>,
    /// The rank that disagrees.
    pub second: Rank,
    /// What it said.
    pub second_said: Box<Declaration>,
    /// The frameworks of both, where they have said.
    #[serde(default, skip_serializing_if = "Frameworks::are_unknown")]
    pub frameworks: Frameworks,
    /// Rounds on which the ranks had agreed, of each tensor that the name stood for to any of them;
    /// these go on. A tensor of the name that is not here was replaced by all ranks.
    pub agreed: Vec<Superseded>,
}

/// The frameworks of the two ranks of a mismatch, in its order.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Frameworks {
    /// Of the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first: Option<String>,
    /// Of the second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second: Option<String>,
}

impl Frameworks {
    /// Whether neither rank has said.
    #[must_use]
    pub fn are_unknown(&self) -> bool {
        self.first.is_none() && self.second.is_none()
    }

    /// Behind the name of a rank: what it speaks, where the two differ.
    fn shown(&self, one: Option<&str>) -> String {
        let one = one.filter(|_| self.first != self.second);
        one.map_or_else(String::new, |name| format!(", which speaks {},", shorten(name)))
    }
}

impl Declaration {
    /// Whether this tensor, of a job of so many ranks, can be stored as it says, if it is to be.
    ///
    /// # Errors
    /// [`StoreFault`].
    pub fn check_store(&self, ranks: u32) -> Result<(), StoreFault> {
        let Some(store) = self.store else { return Ok(()) };
        if let Store::Deltas(Deltas { root, .. }) = store
            && (root.0 >= ranks || !self.members.contains(root))
        {
            return Err(StoreFault::Root { root });
        }
        store.check_key(self.dtype, self.operation, self.encoding)?;
        if let Store::Backup(backup) = store {
            backup.check_ranks(&self.members, ranks)?;
        }
        match store {
            _ if !self.device => Ok(()),
            Store::Backup(_) => Err(BackupFault::OnGpus.into()),
            _ => Err(StoreFault::OnGpus),
        }
    }
}

impl KeySpec {
    /// Whether its results can go to its receiver alone, if it has one, which has to be one of the
    /// ranks that it `has`; `shrinks` in a job that goes on without ranks that die.
    ///
    /// # Errors
    /// [`ReceiverFault`].
    pub fn check_receiver(
        &self,
        has: impl FnOnce(Rank) -> bool,
        shrinks: bool,
    ) -> Result<(), ReceiverFault> {
        let Some(receiver) = self.receiver else { return Ok(()) };
        let how = (self.operation, self.encoding, self.store);
        ReceiverFault::check(has(receiver), how, shrinks)
    }
}

impl fmt::Display for Declaration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.device { " on GPUs" } else { "" };
        write!(f, "{} of shape {}{place} ({})", self.dtype, self.shape, self.operation)?;
        if !self.members.is_all() {
            write!(f, " for {}", self.members)?;
        }
        if let Some(receiver) = self.receiver {
            write!(f, ", received by {receiver}")?;
        }
        if let Some(encoding) = self.encoding {
            write!(f, ", encoded as {encoding}")?;
        }
        self.store.map_or(Ok(()), |store| write!(f, ", {store}"))
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let speaks = |name: &Option<String>| self.frameworks.shown(name.as_deref());
        write!(
            f,
            "tensor `{}`: {}{} declared {}, {}{} declared {}: declare it alike on all ranks",
            shorten(&self.first_said.name),
            self.first,
            speaks(&self.frameworks.first),
            self.first_said,
            self.second,
            speaks(&self.frameworks.second),
            self.second_said
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(store: Store) -> Declaration {
        Declaration {
            name: "w".into(),
            dtype: DType::F32,
            shape: 8.into(),
            operation: Operation::Sum,
            device: false,
            members: Members::ALL,
            receiver: None,
            encoding: None,
            store: Some(store),
        }
    }

    #[test]
    fn what_cannot_be_stored_is_told_with_what_to_do() {
        let store = Store::Deltas(Deltas { root: Rank(1), staleness: None });
        let good = said(store);
        assert_eq!(good.check_store(2), Ok(()));
        let few = Members::new(vec![Rank(0), Rank(2)]).unwrap();
        let encoding = "bf16".parse().unwrap();
        let cases = [
            (Declaration { members: few, ..good.clone() }, "rank 1, which is not one of its ranks"),
            (Declaration { operation: Operation::Average, ..good.clone() }, "declare a sum"),
            (Declaration { dtype: DType::BF16, ..good.clone() }, "declare it as f32"),
            (Declaration { device: true, ..good.clone() }, "in memory of the host"),
            (Declaration { encoding: Some(encoding), ..good.clone() }, "without bf16"),
        ];
        for (bad, why) in cases {
            let fault = bad.check_store(3).unwrap_err().to_string();
            assert!(fault.contains(why), "{fault}");
        }
        assert_eq!(good.check_store(1), Err(StoreFault::Root { root: Rank(1) }));
    }

    #[test]
    fn a_store_is_shown_with_its_bound() {
        let store = Store::Deltas(Deltas { root: Rank(0), staleness: Some(3) });
        let text = said(store).to_string();
        let end = "stored, beginning with the value of rank 0, nobody over 3 pushes ahead";
        assert!(text.ends_with(end), "{text}");
    }

    #[test]
    fn what_no_optimizer_steps_with_is_told_with_what_to_do() {
        let store = Store::Optimizer("sgd(momentum=0.9)".parse().unwrap());
        let good = Declaration { operation: Operation::Average, ..said(store) };
        let encoded = |text: &str| Some(text.parse().unwrap());
        for encoding in [None, encoded("bf16"), encoded("fp16")] {
            assert_eq!(Declaration { encoding, ..good.clone() }.check_store(2), Ok(()));
        }
        let cases = [
            (Declaration { operation: Operation::Min, ..good.clone() }, "declare a sum"),
            (Declaration { dtype: DType::BF16, ..good.clone() }, "it is of bf16, and servers step"),
            (Declaration { dtype: DType::F64, ..good.clone() }, "declare it as f32"),
            (Declaration { device: true, ..good.clone() }, "in memory of the host"),
            (Declaration { encoding: encoded("int8"), ..good.clone() }, "encoded as int8"),
            (Declaration { encoding: encoded("bf16+feedback"), ..good.clone() }, "bf16+feedback"),
        ];
        for (bad, why) in cases {
            let fault = bad.check_store(3).unwrap_err().to_string();
            assert!(fault.contains(why), "{fault}");
        }
        let text = good.to_string();
        let end = ", stepped by sgd(momentum=0.9,dampening=0,weight_decay=0) on the servers";
        assert!(text.ends_with(end), "{text}");
    }

    #[test]
    fn two_ranks_that_disagree_are_told_what_each_said() {
        let said = |dimensions: &[u64], operation| Declaration {
            name: "w".into(),
            dtype: DType::F32,
            shape: TensorShape::new(dimensions.to_vec()).unwrap(),
            operation,
            device: false,
            members: Members::ALL,
            receiver: None,
            encoding: None,
            store: None,
        };
        let mismatch = Mismatch {
            first: Rank(0),
            first_said: Box::new(Declaration { device: true, ..said(&[2, 3], Operation::Sum) }),
            second: Rank(1),
            second_said: Box::new(said(&[3, 2], Operation::Broadcast(Rank(2)))),
            frameworks: Frameworks::default(),
            agreed: Vec::new(),
        };
        assert_eq!(
            mismatch.to_string(),
            "tensor `w`: rank 0 declared f32 of shape [2, 3] on GPUs (sum), rank 1 declared f32 of \
             shape [3, 2] (broadcast from rank 2): declare it alike on all ranks"
        );
        let speaking = |first: Option<&str>, second: Option<&str>| {
            let (first, second) = (first.map(str::to_owned), second.map(str::to_owned));
            let frameworks = Frameworks { first, second };
            Mismatch { frameworks, ..mismatch.clone() }.to_string()
        };
        let both = speaking(Some("PyTorch"), Some("JAX"));
        assert!(both.contains("rank 0, which speaks PyTorch, declared f32"), "{both}");
        assert!(both.contains("rank 1, which speaks JAX, declared f32"), "{both}");
        let one = speaking(None, Some("JAX"));
        assert!(one.contains("rank 0 declared") && one.contains("which speaks JAX"), "{one}");
        assert_eq!(speaking(Some("JAX"), Some("JAX")), mismatch.to_string());
        let few = Members::new(vec![Rank(4), Rank(1)]).unwrap();
        let few = Declaration { members: few, ..said(&[2], Operation::Sum) };
        assert_eq!(few.to_string(), "f32 of shape [2] (sum) for ranks 1, 4");
    }
}
