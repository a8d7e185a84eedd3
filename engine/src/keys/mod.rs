//! From tensors to keys: where a tensor is cut, and which core of which server sums each part.
//!
//! Used by the registry at declare, in control-plane time. Knows no names, ranks, sockets or
//! rounds.

#![forbid(unsafe_code)]

pub mod partition;
pub mod placement;
