//! The Redis adapter, for Redis and Valkey: one server, Sentinel, Cluster.
//!
//! 1. Each key of this crate is one string of Redis. Each operation is one Lua script over one key,
//!    so it is atomic on every topology. There is no bare `SET NX`: a client may repeat a command
//!    whose reply was lost, and a repeated `SET NX` takes its own first attempt for a duplicate.
//! 2. Every script is idempotent by the caller's token. Each write raises the version of the row. A
//!    release always writes, and leaves a row where there is none. A claim inserts, or takes the
//!    version that it has read. So a claim that arrives after its release changes nothing.
//! 3. The value decides: it holds the state, the token and the times. Redis's own TTL only purges:
//!    it ends [`PURGE_GRACE`](super::maintenance::PURGE_GRACE) after the retention and after the
//!    lease.
//! 4. All times are those of the server's clock, by `TIME` in the script.
//! 5. A duplicate writes nothing.
//! 6. An idle adapter sends nothing. The crate `redis` opens the connections. `slot` says what it
//!    does not do.

mod adapter;
mod client;
mod errors;
mod inspection;
mod key_names;
mod options;
mod row;
mod script;
mod server;
mod slot;
mod url;

pub use adapter::RedisAdapter;
pub use client::RedisClient;
pub use options::RedisOptions;
