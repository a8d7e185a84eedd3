//! Bytes from a stranger: whatever they are, they end in a value or an error, never in a panic, and
//! they disturb nobody else.

mod decode;
mod group;
mod live;
mod order_lanes;
mod pair;
mod scheduler;
mod server;
mod spoil;
