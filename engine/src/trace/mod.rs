//! What a process says about itself: counters that data threads write, and lines that control
//! threads print.

pub mod counters;
pub mod log;
