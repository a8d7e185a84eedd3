//! What happens to tensors on a GPU: the [`Pipeline`] that takes them from the GPU to the NIC loop
//! and back, and all that it is made of; and [`bounce`], by which tensors of the host come from
//! there.

mod assemble;
pub mod bounce;
mod buffers;
pub(crate) mod census;
mod coding;
pub(crate) mod direct;
pub mod order_lanes;
mod pipeline;
mod rows;
pub(crate) mod slots;
mod staging;

pub use assemble::{Assembled, Assembly};
pub use pipeline::Pipeline;
