//! [`MemoryAdapter`]: keys in this process, for tests, development and single-process services.
//!
//! 1. A shard has a lock of its own. A call takes it once, for one method of [`shard::Shard`], and
//!    never across an `.await`. So calls for one key have an order, and no schedule of threads
//!    needs a test of its own.
//! 2. A row is found by a fingerprint of its key: 128 bits of `SipHash` under random bits of the
//!    adapter. Two of a million keys collide with a probability of 1.5 in 10²⁷. An attacker who
//!    does not know the random bits cannot construct a collision.
//!
//! # Why not a cache crate?
//!
//! A cache may drop an entry at any time. Here a dropped entry is an event that runs twice.

mod adapter;
mod clock;
mod row;
mod shard;

pub use adapter::MemoryAdapter;
