//! The examples, run as programs.

mod key;
mod programs;
#[path = "../support/mod.rs"]
mod support;
