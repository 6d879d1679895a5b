//! [`MemoryAdapter`]: keys in this process, for tests, development and single-process services.
//!
//! 1. Nothing survives a restart, and no other process sees it: behind a load balancer with two
//!    replicas every event can run twice.
//! 2. It is bounded. At capacity a new key is refused with a typed error (the layer answers 503),
//!    unless evicting the oldest finished key was chosen.
//! 3. A live lease is never evicted, purged or expired.
//! 4. The keys of one call are claimed in one step.
//!
//! # Why not a cache crate?
//!
//! A cache may drop an entry whenever it likes. Here a dropped entry is an event that runs twice.

mod clock;
mod fingerprint;
mod index;
mod lock;
mod order;
#[cfg(test)]
mod races;
mod row;
mod shard;
mod slots;
mod store;
mod table;

pub use store::{AtCapacity, MemoryAdapter};
