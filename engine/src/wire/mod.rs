//! What goes over a lane, byte for byte. Knows no socket, clock, thread or registry.

pub mod header;

pub use header::{Header, Invalid, Kind, RawHeader};
