//! The conformance suite of [`tower_dedup`]: tests of the rules that every store follows, for your own store.
//!
//! 1. Implement [`Store`] for your adapter. It creates a fresh store and lets time pass in it.
//! 2. In a test module, expand [`conformance_suite!`] with the abilities of the adapter. It
//!    makes one named `#[test]` of every case. A case that fails shows its last calls: keys, tokens, cursors, replies.
//! 3. A store that cannot be reached has to panic in [`Store::create`], with a message that says what is
//!    missing. The suite skips nothing.
//!
//! Minor versions of this crate add cases: an adapter that passes today may fail a case of tomorrow.
//!
//! # What the suite does not test
//!
//! Whether times are the server's, and read after every wait; whether a purge deletes a row that was taken meanwhile;
//! whether a list or statistics of a large store read a bounded part; whether an error of unknown outcome is told as
//! [`Refused`](tower_dedup::StoreErrorKind::Refused); clocks of several servers, failovers, replicas; speed.
//!
//! # Example
//!
//! ```
//! # mod example {
//! use std::sync::Arc;
//! use std::time::Duration;
//! use tower_dedup::adapter::MemoryAdapter;
//! use tower_dedup_conformance::Store;
//!
//! struct Memory(Arc<MemoryAdapter>);
//!
//! impl Store for Memory {
//!     type Adapter = MemoryAdapter;
//!
//!     async fn create() -> Self {
//!         Self(Arc::new(MemoryAdapter::new()))
//!     }
//!
//!     fn adapter(&self) -> Arc<MemoryAdapter> {
//!         Arc::clone(&self.0)
//!     }
//!
//!     async fn advance(&self, by: Duration) {
//!         self.0.advance(by);
//!     }
//!
//!     async fn set_back(&self, by: Duration) {
//!         self.0.set_back(by);
//!     }
//! }
//!
//! mod memory {
//!     tower_dedup_conformance::conformance_suite!(super::Memory: leases, stored_data, maintenance);
//! }
//! # // One case, because the macro's tests are compiled in tests only.
//! # pub(crate) fn one() {
//! #     tower_dedup_conformance::cases::on_claim::<Memory>("claim_complete_at_once_is_first_once");
//! # }
//! # }
//! # example::one();
//! ```

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "the cases are tests, and a failed test panics"
)]

#[macro_use]
mod suite;

mod case;
#[doc(hidden)]
pub mod cases;
mod driver;
mod processes;
#[expect(
    clippy::missing_panics_doc,
    clippy::must_use_candidate,
    reason = "hidden: for the suite, and for the tests of this crate"
)]
mod proxy;
mod run;
mod store;
mod trace;

pub use processes::processes_race_for_keys;
#[doc(hidden)]
pub use proxy::{Cut, Proxy};
pub use store::{HandlerTransaction, RemoteStore, SharedStore, Store, Transactional};
