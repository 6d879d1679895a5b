// The crate page begins with the README.
#![doc = include_str!("../README.md")]
#![doc = include_str!("docs/guide.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
// The guide links to items behind features, so rustdoc checks its links with these features only.
#![cfg_attr(
    not(all(
        feature = "postgres",
        feature = "redis",
        feature = "sqlite",
        feature = "testing",
        feature = "verify"
    )),
    allow(rustdoc::broken_intra_doc_links)
)]
// Not in `[lints]` of Cargo.toml, because tests and examples may unwrap.
#![warn(clippy::unwrap_used, clippy::expect_used)]

pub mod adapter;
mod deduplicator;
mod delivery;
mod error;
#[cfg(feature = "axum")]
mod extract;
pub mod guide {
    //! The pages of the guide. Read the [crate page](crate) first.

    /// Makes a page of each file of `docs`.
    macro_rules! pages {
        ($($page:ident)+) => {$(
            #[doc = include_str!(concat!("docs/", stringify!($page), ".md"))]
            pub mod $page {}
        )+};
    }

    pages! {
        how_it_works keys providers verification transactions responses
        idempotency inbox recipes testing production incidents
    }
}
mod idempotency;
#[doc(hidden)]
pub mod internals;
pub mod key;
mod layer;
pub mod ledger;
pub mod observe;
pub mod provider;
mod replay;
mod run;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(feature = "verify")]
pub mod verify;

pub use deduplicator::{Deduplicator, RunError, RunOutcome};
pub use delivery::{Delivery, Verdict};
pub use error::{BoxError, ConfigError, KeyError, KeyErrorKind, StoreError, StoreErrorKind};
#[cfg(feature = "axum")]
pub use extract::DeliveryRejection;
pub use key::extractor::KeyExtractor;
pub use key::id::{DedupKey, LogIds};
pub use layer::{
    Dedup, DedupHandle, DedupLayer, DedupSettings, DeliveryEnd, Disposition, Mode, OnMismatch,
    OnMissingKey, OnUnavailable, ReportEnd, ResponseBody, ResponseFuture, Verified,
};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use ledger::completion::DedupTx;
pub use ledger::completion::{CommitError, CommitErrorKind};
pub use observe::endings::DedupAnswer;
pub use replay::Replay;
/// The crate sqlx, in the version whose pools, connections and databases this crate takes.
///
/// Use this name, as the examples of [`transactions`](guide::transactions) do, or depend on the
/// same version, as for its macros. Under another version of sqlx, a pool is a type that this crate
/// does not know, and the compiler reports "mismatched types".
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use sqlx;

/// The crate redis, in the version whose clients this crate takes.
///
/// Use this name, or depend on the same version. Under another version of redis, a client is a type
/// that this crate does not know, and the compiler reports "mismatched types".
///
/// ```no_run
/// # async fn example() -> Result<(), tower_dedup::BoxError> {
/// use tower_dedup::adapter::RedisAdapter;
/// use tower_dedup::redis::Client;
///
/// let client = Client::open("redis://127.0.0.1:6379/0")?;
/// let adapter = RedisAdapter::new(client);
/// # let _ = adapter;
/// # Ok(())
/// # }
/// ```
#[cfg(feature = "redis")]
pub use redis;

/// Its code is tested like that of the guide.
#[cfg(all(doctest, unix))]
#[doc = include_str!("../llms.txt")]
struct Llms;
