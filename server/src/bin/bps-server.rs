//! The summation server of a job.

#![forbid(unsafe_code)]

fn main() {
    std::process::exit(bps_server::run::cli(std::env::args_os().skip(1)));
}
