//! Protocols as state machines: messages and the time go in, messages come out. Nothing here names
//! a transport, memory, a socket or a clock.

#![forbid(unsafe_code)]

pub mod absence;
pub mod backup;
mod declaration;
pub mod encoding;
pub mod handshake;
pub mod late;
pub mod members;
pub mod messages;
pub mod moving;
pub mod objects;
mod origin;
pub mod outlasting;
pub mod paths;
mod planning;
pub mod pulse;
pub mod receiver;
pub mod resume;
mod roster;
pub mod scheduler;
pub mod search;
pub mod shape;
mod stall;
pub mod statistics;
pub mod store;
pub mod text;
pub mod times;
pub mod tuning;
pub mod uneven;
pub mod unformed;
pub mod unserved;
pub mod verdict;
