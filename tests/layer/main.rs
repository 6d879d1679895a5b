//! The middleware: answers, waiting, composition, faults of the store.

mod allocations;
mod bodies;
mod compare_payload;
mod composition;
mod deduplicator;
mod delivery;
mod faults;
mod hooked;
mod idempotency;
mod identities;
mod lists;
mod metrics;
mod modes;
mod multi_event;
mod observe;
mod on_arrival;
mod purger;
mod readiness;
mod replay;
mod replayed_body;
mod routes;
mod run_again;
#[path = "../support/secrets.rs"]
mod secrets;
mod settings;
mod spans;
mod success;
#[path = "../support/mod.rs"]
mod support;
mod testing;
mod waiting;
mod without_key;
