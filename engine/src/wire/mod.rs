//! What goes over a lane, byte for byte. Knows no socket, clock, thread or registry.

#![forbid(unsafe_code)]

mod checksum;
pub mod header;

pub use checksum::{crc32c, crc32c_append};
pub use header::{Header, Invalid, Kind, RawHeader, missing_by_rank};
