//! The scheduler of a job.

fn main() {
    std::process::exit(bps_server::scheduler::cli(std::env::args_os().skip(1)));
}
