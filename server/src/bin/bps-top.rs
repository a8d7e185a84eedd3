//! A live table of a running job.

#![forbid(unsafe_code)]

fn main() {
    std::process::exit(bps_server::top::cli(std::env::args_os().skip(1)));
}
