//! The adapters: the conformance suite, the queue, and each store.

mod broken;
mod conformance;
mod memory;
#[path = "../layer/observed.rs"]
mod observed;
mod postgres_adapter;
mod postgres_clock;
mod postgres_encryption;
mod postgres_inspection;
mod postgres_servers;
mod postgres_sessions;
mod postgres_test_database;
mod postgres_url;
mod postgres_workers;
mod purging;
mod purging_rounds;
mod queue;
mod queue_overlap;
mod redis_calls;
mod redis_links;
mod redis_scripts;
mod sqlite;
mod sqlite_faults;
mod sqlite_inspection;
mod sqlite_queue;
mod stored_data;
