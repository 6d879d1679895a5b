//! The examples, run as programs.

mod idempotency;
mod inbox;
mod operators;
mod programs;
mod quickstart;
mod redis;
mod senders;
mod server;
mod tenants;
