//! What a process says about itself: counters and events that data threads write, and lines that
//! control threads print.

#![forbid(unsafe_code)]

mod chrome;
pub mod clock;
pub mod counters;
mod event;
pub mod log;
pub mod timeline;
