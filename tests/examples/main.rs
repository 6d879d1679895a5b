//! The examples, run as programs.

mod idempotency;
mod inbox;
mod operators;
mod programs;
mod quickstart;
mod receiver_page;
mod redis;
mod senders;
mod server;
mod tenants;
