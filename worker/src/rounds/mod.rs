//! Tensors and their rounds: what a tensor is made of ([`plan`]), which of its rounds is open and
//! what waits behind it ([`table`]), whose memory that is ([`memory`]), and what passes between the
//! two threads that carry rounds out ([`handover`]).
//!
//! A round lives in one place. That of a tensor in memory of the host is in the [`table`] of the
//! NIC loop; that of a tensor on the GPU is in the GPU's pipeline, and the NIC loop sees its parts,
//! one by one, each in a slot.

pub mod handover;
pub mod memory;
pub mod plan;
pub mod table;

pub use memory::{Memory, Pool, Slot, SlotMemory, Staging};
pub use plan::{Among, PartId, PartOf, PartPlan, Plan, PlanPart};
pub use table::{Done, Lacks, PartPush, Parts, PassedError, Push, Rounds, root_lost};
