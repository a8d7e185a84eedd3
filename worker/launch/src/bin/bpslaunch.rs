//! `bpslaunch`: starts the processes of this machine. The programs of other roles lie beside it.

#![forbid(unsafe_code)]

use bps_launch::{Programs, cli};

fn main() {
    std::process::exit(cli(std::env::args_os().skip(1), Programs::beside_this_one()));
}
