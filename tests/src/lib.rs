//! What the whole-system tests share: jobs, stand-ins, and the reference that sums are compared
//! with.

pub mod fake_gpu;
pub mod gpu_job;
pub mod job;
pub mod network;
pub mod program;
pub mod reference;
pub mod relay;
pub mod sim;
pub mod stand_in;
pub mod sums;
pub mod timeline;
