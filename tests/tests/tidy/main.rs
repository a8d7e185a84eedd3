//! The house rules that a compiler does not keep. Each test is one rule; each message says where,
//! and what to do.
//!
//! The tables here are the rules: who wants another one changes the table, with a reason.

mod circles;
mod dependencies;
mod documents;
mod layers;
mod names;
mod source;
mod text;
mod unsafe_code;
