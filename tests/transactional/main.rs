//! The transactional ledger: the key and the writes of the handler commit together.

mod bounds;
mod commit;
mod fixture;
mod keyless;
mod lend;
mod misuse;
mod multi_event;
mod postgres_locks;
mod postgres_misuse;
mod postgres_races;
mod postgres_settings;
mod postgres_tenants;
mod record_in;
mod sqlite;
#[path = "../support/mod.rs"]
mod support;
