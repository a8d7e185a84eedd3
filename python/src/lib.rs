//! `byteps._native`: the engine as Python sees it. Pointers, numbers and names in; numbers out.
//!
//! It holds no logic of its own: what a tensor is, Python knows, and the rest the worker. The
//! interpreter's lock is never held while anything waits, and after a fork every call refuses
//! ([`fork`]).

#![deny(unsafe_code)]

mod cli;
mod completer;
mod completions;
mod context;
mod declared;
mod dlpack;
mod error;
mod fork;
mod gradients;
mod handle;
mod mxnet;
mod plain;
mod tensor;
mod tf;
mod uneven;
mod waiting;
mod xla;

use pyo3::prelude::*;

/// The extension module.
#[pymodule]
mod _native {
    use super::{Bound, PyModule, PyModuleMethods, PyResult, fork};

    #[pymodule_export]
    use super::cli::{launch_main, scheduler_main, server_main, top_main};
    #[pymodule_export]
    use super::completions::Completions;
    #[pymodule_export]
    use super::context::{
        backup_workers, barrier, enables_async, epoch, has_left, host_id, init, is_forked,
        is_initialized, is_to_leave, local_rank, local_size, may_return, newcomers, object_key,
        rank, shrinks, shutdown, size, speed, start_timeline, stop_timeline, take_notice,
    };
    #[pymodule_export]
    use super::declared::{declare_by, forget_numbers};
    #[pymodule_export]
    use super::error::raise_again;
    #[pymodule_export]
    use super::gradients::{Batch, GradientHooks, Hook};
    #[pymodule_export]
    use super::handle::{poll, release, wait};
    #[pymodule_export]
    use super::mxnet::{mxnet_functions, mxnet_push_pull};
    #[pymodule_export]
    use super::plain::{Plain, are_plain};
    #[pymodule_export]
    use super::tensor::{
        declare, encoding, enqueue_results, enqueue_results_of_batches, keep, kept, lacking,
        open_gpu, optimizer, push_batch, push_pull, push_pull_gpu, scale_residues, settle,
        start_batch, stream_wait, stream_wait_batch, update, use_gpu,
    };
    #[pymodule_export]
    use super::tf::tf_register;
    #[pymodule_export]
    use super::uneven::{follow, join, pushes, root_joined_after};
    #[pymodule_export]
    use super::xla::in_tensorflow::xla_register_in_tensorflow;
    #[pymodule_export]
    use super::xla::on_gpu::xla_gpu;
    #[pymodule_export]
    use super::xla::{xla_devices, xla_forget, xla_handlers, xla_version};

    #[pymodule_init]
    fn initialise(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        fork::install()
    }
}
