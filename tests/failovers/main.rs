//! Redis under Sentinel and in a cluster: primaries that are killed, cut off and replaced. `scripts/faults` runs it.

#[path = "../stores/redis_calls.rs"]
mod redis_calls;
mod topologies;
