//! [`MemoryAdapter`]: keys in this process, for tests, development and single-process services.
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
