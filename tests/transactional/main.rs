//! The transactional ledger: the key and the writes of the handler commit together.

mod commit;
mod multi_event;
mod multi_event_isolation;
mod postgres_locks;
mod postgres_races;
mod postgres_tenants;
#[path = "../support/mod.rs"]
mod support;
