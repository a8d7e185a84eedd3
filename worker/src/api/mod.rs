//! What callers see: a rank of a job, and the GPU that it opens.

mod bounce;
mod on_gpu;
mod open_gpu;
mod own_gpu;
mod worker;

pub use worker::Worker;
