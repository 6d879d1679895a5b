//! Connections that break, fall silent and stall, a standby that is missing. The soak kills processes.

mod postgres_demoted;
mod postgres_failover;
mod postgres_interruption;
mod postgres_silence;
mod postgres_stalls;
