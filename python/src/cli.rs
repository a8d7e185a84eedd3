//! The programs, for those who installed them with `pip`: the same functions as the executables
//! call, with the arguments after the program's name in, and the exit status out.

#![forbid(unsafe_code)]

use bps_launch::Programs;
use pyo3::prelude::*;
use std::ffi::OsString;

/// `bpslaunch`. The other roles are started by the first two commands, and `bpslaunch` itself on
/// other machines by the third.
#[pyfunction]
pub fn launch_main(
    py: Python<'_>,
    arguments: Vec<OsString>,
    scheduler: Vec<String>,
    server: Vec<String>,
    launcher: Vec<String>,
) -> i32 {
    py.detach(|| bps_launch::cli(arguments, Programs { scheduler, server, launcher }))
}

/// `bps-server`.
#[pyfunction]
pub fn server_main(py: Python<'_>, arguments: Vec<OsString>) -> i32 {
    py.detach(|| bps_server::run::cli(arguments))
}

/// `bps-top`.
#[pyfunction]
pub fn top_main(py: Python<'_>, arguments: Vec<OsString>) -> i32 {
    py.detach(|| bps_server::top::cli(arguments))
}

/// `bps-scheduler`.
#[pyfunction]
pub fn scheduler_main(py: Python<'_>, arguments: Vec<OsString>) -> i32 {
    py.detach(|| bps_server::scheduler::cli(arguments))
}
