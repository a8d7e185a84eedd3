//! The launcher with real processes: shells in place of training, scheduler and servers.
//!
//! Every wait polls with a deadline. `bpslaunch` finds its programs beside itself, so each test has
//! a folder with the real launcher and scripts of its own.

mod ends;
mod growing;
mod modes;
mod several;
mod stage;
