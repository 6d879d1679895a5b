//! The examples, run as programs.

mod key;
mod programs;
mod quickstart;
#[path = "../support/mod.rs"]
mod support;
