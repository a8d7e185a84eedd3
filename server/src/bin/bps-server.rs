//! The summation server of a job.

fn main() {
    std::process::exit(bps_server::run::cli(std::env::args_os().skip(1)));
}
