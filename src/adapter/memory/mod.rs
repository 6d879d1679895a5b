//! [`MemoryAdapter`]: keys in this process, for tests, development and single-process services.
//!
//! 1. Nothing survives a restart, and no other process sees it: behind a load balancer with two
//!    replicas every event can run twice.
//! 2. It is bounded. At capacity a new key is refused with a typed error (the layer answers 503),
//!    unless evicting the oldest finished key was chosen. A warning is logged when it becomes fuller
//!    than four fifths; evicted keys are counted, and logged with their age.
//! 3. A live lease is never evicted, purged or expired.
//! 4. The keys of one call are claimed in one step.
//!
//! # How it is made
//!
//! 1. A key is stored as a fingerprint: 128 bits of `SipHash` under random bits of this adapter.
//!    Two of a million keys share one with a probability of 1.5 in 10²⁷, two of a thousand million
//!    with 1.5 in 10²¹; without the random bits nobody can construct two that do.
//! 2. A complete key takes 48 bytes and its place in the index 5 to 11 more. What is in flight or
//!    released, or keeps a payload's digest or a response, has a wider row beside the slot.
//! 3. Keys are spread over shards of at most 6,144, each under its own lock, which is held for one
//!    step and never across an `.await`. A call locks its shards in ascending order.
//! 4. The keys of a shard are linked in the order of their expiry. Every new key clears away up to
//!    two expired ones; nothing ever goes through the whole table.
//! 5. A new key waits for one cache line of the index; the rest of an insertion is in lines that
//!    the one before has just used.
//! 6. Slots come in chunks that do not move, and the index of a shard grows by itself: no insertion
//!    waits for more than a shard's index to be copied, 32 KiB.
//! 7. A shard uses the slots of removed keys again, and gives its memory back when it is empty.
//!
//! # Why not a cache crate?
//!
//! A cache may drop an entry whenever it likes. Here a dropped entry is an event that runs twice.
//!
//! # Why not a timing wheel, or a heap?
//!
//! A wheel moves whole buckets of keys at once when time enters them, and does not know which key
//! of a bucket is the oldest. A heap moves keys about at every removal. Retentions are few and time
//! only goes forward, so lists that are appended to are sorted already.

mod clock;
mod fingerprint;
mod index;
mod lock;
mod order;
mod pressure;
#[cfg(test)]
mod races;
mod row;
mod shard;
mod slots;
mod store;
mod table;

pub use store::{AtCapacity, MemoryAdapter};
