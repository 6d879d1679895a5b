//! The published conformance suite, on each adapter in its default configuration. `tests/configurations` runs it
//! on the further configurations.

use std::sync::Arc;
use std::time::Duration;

use tower_dedup::DedupKey;
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, DedupAdapter, StoreFuture};
use tower_dedup_conformance::Store;

use support::places::{Memory, Postgres, Redis, Sqlite};

/// A store with the required methods only.
struct Plain(MemoryAdapter);

impl DedupAdapter for Plain {
    fn claim<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ClaimReply> {
        Box::pin(async move {
            self.abilities().check(terms)?;
            self.0.claim(key, terms).await
        })
    }

    fn release<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ()> {
        self.0.release(key, terms)
    }
}

struct PlainStore(Arc<Plain>);

impl Store for PlainStore {
    type Adapter = Plain;

    async fn create() -> Self {
        Self(Arc::new(Plain(MemoryAdapter::new())))
    }

    fn adapter(&self) -> Arc<Plain> {
        Arc::clone(&self.0)
    }

    async fn advance(&self, by: Duration) {
        self.0.0.advance(by);
    }

    async fn set_back(&self, by: Duration) {
        self.0.0.set_back(by);
    }
}

mod memory {
    tower_dedup_conformance::conformance_suite!(super::Memory: leases, stored_data, maintenance);
}

mod sqlite {
    tower_dedup_conformance::conformance_suite!(
        super::Sqlite: leases, stored_data, maintenance, inspection, completion, corrupt_data, processes
    );
}

mod postgres {
    tower_dedup_conformance::conformance_suite!(
        super::Postgres: leases, stored_data, maintenance, inspection, completion, corrupt_data, processes, fence,
        held_rows
    );
}

mod redis {
    tower_dedup_conformance::conformance_suite!(
        super::Redis: leases, stored_data, maintenance, inspection, corrupt_data, processes, fence
    );
}

mod plain {
    tower_dedup_conformance::conformance_suite!(super::PlainStore);
}
