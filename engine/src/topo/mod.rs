//! What the machine is made of, and which thread runs where on it.

pub mod pin;
