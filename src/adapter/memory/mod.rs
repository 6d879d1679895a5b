//! [`MemoryAdapter`]: keys in this process, for tests, development and single-process services.
//!
//! 1. Nothing survives a restart, and no other process sees the keys. Behind a load balancer with
//!    two replicas every event can run twice.
//! 2. The adapter is bounded. At capacity it refuses a new key with a typed error (the layer answers
//!    503), unless [`AtCapacity::EvictOldest`] was chosen. It logs a warning when it becomes fuller
//!    than four fifths; evicted keys are counted, and logged with their age.
//! 3. A live lease is never evicted, purged or expired.
//! 4. The keys of one call are claimed in one atomic step.
//! 5. The clock is monotonic and follows `tokio::time::pause` and `tokio::time::advance`, so leases
//!    and retention run on the paused time of a test.
//!
//! # Structure
//!
//! 1. The table stores a fingerprint of each key: 128 bits of `SipHash` under random bits of this
//!    adapter. Two of a million keys collide with a probability of 1.5 in 10²⁷. An attacker who does
//!    not know the random bits cannot construct a collision.
//! 2. A shard holds at most 7,168 rows of 72 bytes, a `hashbrown` table that finds them, and a heap
//!    of their due times. At 1,000,000 keys a key takes about 93 bytes.
//! 3. Each shard has its own lock. A call holds it for one step, never across an `.await`, and
//!    locks its shards in ascending order.
//! 4. Every new key removes up to two expired keys of its shard. Only `stats` reads every row, one shard
//!    at a time.
//! 5. A shard reuses the rows of removed keys, and frees its memory when it is empty.
//!
//! # Why not a cache crate?
//!
//! A cache may drop an entry at any time. Here a dropped entry is an event that runs twice.

mod adapter;
mod clock;
mod expiry;
mod pressure;
#[cfg(test)]
#[cfg(shuttle)]
#[allow(clippy::duplicate_mod, reason = "the model compiles the table over another mutex")]
mod races;
mod row;
mod shard;
mod sync;
mod table;

pub use adapter::MemoryAdapter;
pub use table::AtCapacity;
