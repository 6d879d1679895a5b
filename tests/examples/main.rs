//! The examples, run as programs.

mod idempotency;
mod programs;
mod quickstart;
mod receiver_page;
mod senders;
mod server;
#[path = "../support/mod.rs"]
mod support;
