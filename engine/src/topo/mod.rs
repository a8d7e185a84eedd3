//! What the machine is made of, and which thread runs where on it.

pub mod cgroup;
pub mod pin;
mod sysfs;

pub use sysfs::format_list;
