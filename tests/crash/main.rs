//! Processes that are killed, servers that restart, connections that break.

mod postgres_demoted;
mod postgres_failover;
mod postgres_interruption;
mod postgres_processes;
mod postgres_silence;
mod postgres_stalls;
mod sigkill;
#[path = "../support/mod.rs"]
mod support;
