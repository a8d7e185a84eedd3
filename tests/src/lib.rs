//! What the whole-system tests share: the reference that sums are compared with.

pub mod program;
pub mod reference;
