//! The examples, run as programs.

mod idempotency;
mod programs;
mod quickstart;
#[path = "../support/mod.rs"]
mod support;
