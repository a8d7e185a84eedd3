//! A stand-in for libcuda.so.1 and libnccl.so.2 that works in host memory, for tests on machines
//! without GPUs. One library has the functions of both; tests link it under both names into a
//! folder that they put into `LD_LIBRARY_PATH` of a child process (`bps_tests::fake_gpu`).
//!
//! It keeps what the real ones promise and no more. Memory of the GPU is memory of the process, and
//! any address will do. Each stream is a queue with a thread of its own that dawdles at random, so
//! that a missing wait shows up as wrong bytes. Calls that need a context fail without one. NCCL's
//! collectives run between processes of one machine, in the order of their stream; ranks that do
//! not make the same calls are told so; after an error a stream stands still until the communicator
//! is aborted, as a kernel would.
//!
//! | Variable | Meaning |
//! |---|---|
//! | `FAKE_GPU_COUNT` | GPUs of the machine; 4 |
//! | `CUDA_VISIBLE_DEVICES` | those that the process sees, by number |
//! | `FAKE_GPU_SEED` | of the delays; 1 |
//! | `FAKE_GPU_DELAY_US` | the longest delay of a piece of work; 200; 0 is none |
//! | `FAKE_GPU_DEPTH` | pieces of work that a stream has room for; without end |
//! | `FAKE_GPU_PINNED` | 1: copies from and to memory that is not registered fail |
//! | `FAKE_GPU_DMA_BUF` | 1: memory is exported as dma-buf; 2: and must be flushed; 3: and can't |
//! | `FAKE_GPU_FAIL` | calls that fail, with code and from which call on: `cuMemAlloc=2@3,…` |
//! | `FAKE_NCCL_CHANNELS` | channels that each communicator must ask for; 0 is none |
//! | `FAKE_CUDA_VERSION`, `FAKE_NCCL_VERSION` | what they say their versions are; 12080, 22707 |
#![allow(
    non_snake_case,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::ptr_as_ptr,
    reason = "this is a C interface, with its names and its numbers"
)]

mod answer;
mod collective;
mod comm;
mod cuda;
mod device;
pub mod kernels;
mod meeting;
mod memory;
mod nccl;
mod reduce;
mod settings;
mod stream;
