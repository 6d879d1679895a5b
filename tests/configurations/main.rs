//! The conformance suite on the further configurations of each adapter. `tests/stores` has the default ones.
//! `scripts/faults` runs it.

#[path = "../stores/adapters.rs"]
mod adapters;
mod conformance;
#[allow(dead_code, reason = "`tests/stores` uses the server")]
#[path = "../stores/redis_stores.rs"]
mod redis_stores;
#[path = "../support/mod.rs"]
mod support;
