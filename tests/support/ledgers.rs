//! Every ledger over every store.

use std::future::Future;
use std::sync::Arc;

use tower_dedup::adapter::{MemoryAdapter, PostgresAdapter, SqliteAdapter};
use tower_dedup::ledger::{Lease, Ledger, OnArrival, Recalls, Transactional};

use super::postgres::Schema;

/// A ledger over a fresh store.
pub(crate) trait Setup: Sized {
    type Ledger: Ledger + Recalls;

    fn create() -> impl Future<Output = Self>;
    /// A ledger over the same store, as another process has it.
    fn ledger(&self) -> impl Future<Output = Self::Ledger>;
}

pub(crate) struct OnMemory(Arc<MemoryAdapter>);

impl Setup for OnMemory {
    type Ledger = Lease<Arc<MemoryAdapter>>;

    async fn create() -> Self {
        Self(Arc::new(MemoryAdapter::new()))
    }

    async fn ledger(&self) -> Self::Ledger {
        Lease::new(Arc::clone(&self.0))
    }
}

pub(crate) struct OnSqlite(tempfile::TempDir);

impl OnSqlite {
    async fn adapter(&self) -> SqliteAdapter {
        let file = self.0.path().join("dedup.db");
        SqliteAdapter::connect(&format!("sqlite://{}", file.display())).await.unwrap()
    }
}

impl Setup for OnSqlite {
    type Ledger = Lease<SqliteAdapter>;

    async fn create() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    async fn ledger(&self) -> Self::Ledger {
        Lease::new(self.adapter().await)
    }
}

pub(crate) struct InSqlite(OnSqlite);

impl Setup for InSqlite {
    type Ledger = Transactional<SqliteAdapter>;

    async fn create() -> Self {
        Self(OnSqlite::create().await)
    }

    async fn ledger(&self) -> Self::Ledger {
        Transactional::new(self.0.adapter().await)
    }
}

pub(crate) struct OnPostgres(Schema);

impl OnPostgres {
    async fn adapter(&self) -> PostgresAdapter {
        PostgresAdapter::connect(&self.0.url()).await.unwrap()
    }
}

impl Setup for OnPostgres {
    type Ledger = Lease<PostgresAdapter>;

    async fn create() -> Self {
        Self(Schema::fresh())
    }

    async fn ledger(&self) -> Self::Ledger {
        Lease::new(self.adapter().await)
    }
}

pub(crate) struct InPostgres(OnPostgres);

impl Setup for InPostgres {
    type Ledger = Transactional<PostgresAdapter>;

    async fn create() -> Self {
        Self(OnPostgres::create().await)
    }

    async fn ledger(&self) -> Self::Ledger {
        Transactional::new(self.0.adapter().await)
    }
}

/// Under `on_arrival`.
pub(crate) struct ArrivedIn<S>(S);

impl Setup for ArrivedIn<OnMemory> {
    type Ledger = OnArrival<Arc<MemoryAdapter>>;

    async fn create() -> Self {
        Self(OnMemory::create().await)
    }

    async fn ledger(&self) -> Self::Ledger {
        OnArrival::new(Arc::clone(&self.0.0))
    }
}

impl Setup for ArrivedIn<OnSqlite> {
    type Ledger = OnArrival<SqliteAdapter>;

    async fn create() -> Self {
        Self(OnSqlite::create().await)
    }

    async fn ledger(&self) -> Self::Ledger {
        OnArrival::new(self.0.adapter().await)
    }
}

impl Setup for ArrivedIn<OnPostgres> {
    type Ledger = OnArrival<PostgresAdapter>;

    async fn create() -> Self {
        Self(OnPostgres::create().await)
    }

    async fn ledger(&self) -> Self::Ledger {
        OnArrival::new(self.0.adapter().await)
    }
}

pub(crate) type ArrivedInMemory = ArrivedIn<OnMemory>;
pub(crate) type ArrivedInSqlite = ArrivedIn<OnSqlite>;
pub(crate) type ArrivedInPostgres = ArrivedIn<OnPostgres>;

/// One `#[tokio::test]` for every ledger and case, named after both.
#[macro_export]
macro_rules! on_ledgers {
    ([$($name:ident = $setup:ident),+ $(,)?], $($case:ident),+ $(,)?) => {
        $crate::on_ledgers!(@ [$($name $setup)+] [$($case)+]);
    };
    (@ [$($name:ident $setup:ident)+] $cases:tt) => {
        $($crate::on_ledgers!(@one $name $setup $cases);)+
    };
    (@one $name:ident $setup:ident [$($case:ident)+]) => {
        mod $name {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $case() {
                use $crate::support::ledgers::{Setup, $setup};
                super::$case($setup::create().await).await;
            })+
        }
    };
}
