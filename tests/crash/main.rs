//! Processes that are killed, connections that break, fall silent and stall, a standby that is missing.

mod postgres_demoted;
mod postgres_failover;
mod postgres_interruption;
mod postgres_silence;
mod postgres_stalls;
mod sigkill;
#[path = "../support/mod.rs"]
mod support;
