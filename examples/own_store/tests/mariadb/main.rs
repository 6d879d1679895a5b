//! The store against a MariaDB server of its own.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[cfg(feature = "command")]
mod command;
mod conformance;
mod server;
mod storm;
mod transactions;
