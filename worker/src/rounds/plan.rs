//! What a tensor is made of, and where its parts are summed.

#![forbid(unsafe_code)]

use bps_engine::base::{DType, Key, Operation, Rank};
use bps_engine::proto::encoding::Encoding;
use bps_engine::proto::store::Store;
use bps_engine::transport::LaneId;
use std::sync::Arc;

/// A part of a tensor, with the lanes that it takes.
#[derive(Clone, Copy, Debug)]
pub struct PlanPart {
    /// Its id.
    pub key: Key,
    /// First byte within the tensor.
    pub offset: usize,
    /// Its size.
    pub bytes: usize,
    /// The lane to the core that sums it over the groups; `None` if this rank's group is the only
    /// one.
    pub core: Option<LaneId>,
    /// The lane to the rank that sums it in the group; `None` if that is this one.
    pub owner: Option<LaneId>,
    /// That rank.
    pub owner_rank: Rank,
    /// Of a tensor on GPUs: the rank to which NCCL reduces it, below this rank's PCIe switch. That
    /// is the owner, where it is below this switch.
    pub holder: Rank,
}

/// The ranks of a tensor that some ranks push, of which this is one.
#[derive(PartialEq, Eq, Debug)]
pub struct Among {
    /// How many they are.
    pub count: u32,
    /// The lanes to the others in this rank's group.
    pub lanes: Box<[LaneId]>,
}

/// All that must be known of a tensor before it is pushed.
#[derive(Debug)]
pub struct Plan {
    /// Its name, for messages.
    pub name: Arc<str>,
    /// Its element type.
    pub dtype: DType,
    /// What a round computes.
    pub operation: Operation,
    /// It lives on GPUs: its parts pass through the slots of a pipeline.
    pub device: bool,
    /// For whom it is, unless all ranks push it.
    pub among: Option<Arc<Among>>,
    /// The rank that gets its results, if not all do.
    pub receiver: Option<Rank>,
    /// How its parts travel to servers and back, if not as they are.
    pub encoding: Option<Encoding>,
    /// How its value stays on the servers between rounds, if it does.
    pub store: Option<Store>,
    /// In order of offset, without gaps.
    pub parts: Box<[PlanPart]>,
}

impl Plan {
    /// What the loop, which lands and adds by these numbers, relies on: the parts cover the tensor
    /// without gaps, each of them has whole elements, and somebody sums it.
    ///
    /// # Panics
    /// It is not so. What the scheduler says is checked before a plan is made of it.
    pub fn check(&self) {
        let (mut end, size) = (0, self.dtype.size());
        for part in &self.parts {
            assert!(part.offset == end, "`{}` has a gap, or a part twice", self.name);
            assert!(part.bytes > 0 && part.bytes.is_multiple_of(size), "`{}` is cut", self.name);
            assert!(part.core.is_none() || part.core != part.owner, "a lane leads to one peer");
            end += part.bytes;
        }
        assert!(!(self.device && self.receiver.is_some()), "GPUs of a host gather together");
    }

    /// Bytes of the tensor.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.bytes).sum()
    }

    /// Its parts, as the lanes know them.
    pub fn part_plans(&self, tensor: u32) -> impl ExactSizeIterator<Item = PartPlan> + '_ {
        (0..self.parts.len()).map(move |index| {
            let part = &self.parts[index];
            PartPlan {
                of: PartOf {
                    tensor,
                    index: u32::try_from(index).expect("parts are counted in u32"),
                },
                name: Arc::clone(&self.name),
                key: part.key,
                dtype: self.dtype,
                operation: self.operation,
                bytes: part.bytes,
                device: self.device,
                among: self.among.clone(),
                receiver: self.receiver,
                encoding: self.encoding.filter(|_| part.core.is_some() && part.owner.is_none()),
                store: self.store,
                core: part.core,
                owner: part.owner,
            }
        })
    }
}

/// Whose part it is: the tensor's id, and the part's place in its plan.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct PartOf {
    /// The tensor.
    pub tensor: u32,
    /// The part's place.
    pub index: u32,
}

/// A part's number among all parts of a NIC loop, dense from 0. Those of a tensor are in a row.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct PartId(pub u32);

/// What the lanes must know of a part.
#[derive(Clone, Debug)]
pub struct PartPlan {
    /// Whose it is.
    pub of: PartOf,
    /// The tensor's name, for messages.
    pub name: Arc<str>,
    /// Its id on the wire.
    pub key: Key,
    /// Its element type.
    pub dtype: DType,
    /// What a round computes.
    pub operation: Operation,
    /// Its size.
    pub bytes: usize,
    /// It is in a slot when it is pushed, and its result lands in another.
    pub device: bool,
    /// As [`Plan::among`].
    pub among: Option<Arc<Among>>,
    /// As [`Plan::receiver`].
    pub receiver: Option<Rank>,
    /// As [`Plan::encoding`], where this process speaks to the server.
    pub encoding: Option<Encoding>,
    /// As [`Plan::store`].
    pub store: Option<Store>,
    /// As [`PlanPart::core`].
    pub core: Option<LaneId>,
    /// As [`PlanPart::owner`].
    pub owner: Option<LaneId>,
}
