//! Arguments that several commands have, so that they read and behave alike.

#![forbid(unsafe_code)]

use crate::sample;
use bps_engine::config::{Idle, TcpDriver, TransportChoice};
use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, value_parser};

/// A whole number from 1.
pub fn number(name: &'static str, default: &'static str, help: &'static str) -> Arg {
    let parser = value_parser!(u32).range(1..);
    Arg::new(name).long(name).help(help).value_parser(parser).default_value(default)
}

/// Whole numbers from 1, with commas between.
pub fn numbers(name: &'static str, default: &'static str, help: &'static str) -> Arg {
    number(name, default, help).value_name("N[,N…]").value_delimiter(',')
}

/// Sizes, with commas between.
pub fn sizes(name: &'static str, default: &'static str, help: &'static str) -> Arg {
    Arg::new(name)
        .long(name)
        .value_name("BYTES[,BYTES…]")
        .help(format!("{help}; K, M and G (or KiB, MiB, GiB) are powers of 1024"))
        .value_delimiter(',')
        .value_parser(sample::parse_size)
        .default_value(default)
}

/// One word of several; the first is the default.
pub fn choice(name: &'static str, words: &'static [&'static str], help: &'static str) -> Arg {
    let parser = PossibleValuesParser::new(words);
    Arg::new(name).long(name).help(help).value_parser(parser).default_value(words[0])
}

/// Yes if it is there.
pub fn flag(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).help(help).action(ArgAction::SetTrue)
}

/// `--json`.
pub fn json() -> Arg {
    flag("json", "Print one JSON object a line")
}

/// `--transport`.
pub fn transport() -> Arg {
    choice("transport", &["tcp", "shm", "rdma"], "What lanes run over")
}

/// `--local-reduce`.
pub fn local_reduce() -> Arg {
    let help =
        "The ranks, as those of one host, reduce among themselves; servers have nothing to do";
    flag("local-reduce", help)
}

/// `--driver`.
pub fn driver() -> Arg {
    choice("driver", &["auto", "uring", "poll"], "How TCP talks to the kernel")
}

/// `--idle`.
pub fn idle() -> Arg {
    let help =
        "What threads do that wait: adaptive spins shortly and then sleeps, busy never sleeps";
    choice("idle", &["adaptive", "busy"], help)
}

/// What `--NAME` says.
pub fn text<'a>(matches: &'a ArgMatches, name: &str) -> &'a str {
    matches.get_one::<String>(name).expect("has a default")
}

/// The number of `--NAME`.
pub fn integer(matches: &ArgMatches, name: &str) -> u32 {
    *matches.get_one::<u32>(name).expect("has a default")
}

/// The numbers of `--NAME`.
pub fn integers(matches: &ArgMatches, name: &str) -> Vec<u32> {
    matches.get_many::<u32>(name).expect("has a default").copied().collect()
}

/// The sizes of `--NAME`.
pub fn bytes(matches: &ArgMatches, name: &str) -> Vec<usize> {
    matches.get_many::<usize>(name).expect("has a default").copied().collect()
}

/// The value of [`idle`].
pub fn idle_of(matches: &ArgMatches) -> Idle {
    if text(matches, "idle") == "busy" { Idle::Busy } else { Idle::Adaptive }
}

/// The value of [`transport`].
pub fn transport_of(matches: &ArgMatches) -> TransportChoice {
    match text(matches, "transport") {
        "shm" => TransportChoice::Shm,
        "rdma" => TransportChoice::Rdma,
        _ => TransportChoice::Tcp,
    }
}

/// The value of [`local_reduce`], for `--workers` ranks: how many each host has.
pub fn hosts_of(matches: &ArgMatches) -> &'static [u32] {
    if !matches.get_flag("local-reduce") {
        return &[];
    }
    // Read once in the life of the program.
    Box::leak(vec![integer(matches, "workers")].into_boxed_slice())
}

/// The value of [`driver`].
pub fn driver_of(matches: &ArgMatches) -> TcpDriver {
    match text(matches, "driver") {
        "uring" => TcpDriver::Uring,
        "poll" => TcpDriver::Poll,
        _ => TcpDriver::Auto,
    }
}
