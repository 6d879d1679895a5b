//! [`MemoryAdapter`]: keys in this process, for tests, development and single-process services.
//!
//! 1. A shard has a lock of its own. A call holds it for one step, never across an `.await`.
//! 2. A row is found by a fingerprint of its key: 128 bits of `SipHash` under random bits of the
//!    adapter. Two of a million keys collide with a probability of 1.5 in 10²⁷. An attacker who does
//!    not know the random bits cannot construct a collision.
//! 3. Each operation is a method of [`row::Call`] on the row of one key. `MemoryAdapter::each` maps it
//!    over the keys of a call.
//!
//! # Why not a cache crate?
//!
//! A cache may drop an entry at any time. Here a dropped entry is an event that runs twice.

mod adapter;
mod clock;
mod gauge;
#[cfg(all(test, shuttle))]
#[allow(clippy::duplicate_mod, reason = "the model compiles the adapter over another mutex")]
mod races;
mod row;
mod shard;
mod sync;

pub use adapter::MemoryAdapter;
pub use shard::AtCapacity;

#[cfg(test)]
mod tests {
    #[test]
    fn fingerprints_of_two_adapters_differ() {
        let key = crate::key::DedupKey::new("n", "a").unwrap();
        let of = || super::MemoryAdapter::new().place(&key).1;
        assert_ne!(of(), of());
    }
}
