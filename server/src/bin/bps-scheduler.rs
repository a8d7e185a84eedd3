//! The scheduler of a job.

#![forbid(unsafe_code)]

fn main() {
    std::process::exit(bps_server::scheduler::cli(std::env::args_os().skip(1)));
}
