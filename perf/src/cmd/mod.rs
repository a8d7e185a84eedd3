//! One file per command. Each gives its arguments by `command` and measures by `run`.

pub mod lane;
pub mod pushpull;
pub mod rings;
pub mod sum;
