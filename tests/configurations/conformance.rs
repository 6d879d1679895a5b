//! The published conformance suite, on stores that differ from the default.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};
use sqlx::{Connection, PgConnection, SqlitePool};
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::adapter::{MemoryAdapter, PostgresAdapter, PostgresOptions, SqliteAdapter};
use tower_dedup::internals::with_postgres_bounds;
use tower_dedup_conformance::{HandlerTransaction, SharedStore, Store, TransactionalStore};

use support::places::{
    Memory, Postgres, RedisCluster, RedisReplicated, RedisSentinel, Sqlite, connect_in,
};
use support::postgres::{Schema, create_partitions};

macro_rules! the_clock_of_the_inner_store {
    () => {
        async fn advance(&self, by: Duration) {
            self.0.advance(by).await;
        }

        async fn set_back(&self, by: Duration) {
            self.0.set_back(by).await;
        }
    };
}

macro_rules! like_the_inner_store {
    () => {
        fn adapter(&self) -> Arc<Self::Adapter> {
            self.0.adapter()
        }

        the_clock_of_the_inner_store!();
    };
}

/// Another number of shards, so that sets spread in another way.
struct FewShards(Memory);

impl Store for FewShards {
    type Adapter = MemoryAdapter;

    async fn create() -> Self {
        Self(Memory(Arc::new(MemoryAdapter::with_capacity(3 * 2_000))))
    }

    like_the_inner_store!();
}

/// A pool of the user, with several connections.
struct UsersPool(Sqlite);

impl Store for UsersPool {
    type Adapter = SqliteAdapter;

    async fn create() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let options = SqliteConnectOptions::new()
            .filename(dir.path().join("dedup.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Normal)
            .busy_timeout(Duration::from_secs(1));
        let pool = SqlitePool::connect_with(options).await.unwrap();
        Self(Sqlite::with(SqliteAdapter::new(pool.clone()), pool, dir).await)
    }

    like_the_inner_store!();
}

/// An adapter without its type.
struct Boxed(Sqlite, Arc<dyn MaintenanceAdapter>);

impl Store for Boxed {
    type Adapter = dyn MaintenanceAdapter;

    async fn create() -> Self {
        let store = Sqlite::create().await;
        let adapter = tower_dedup::adapter::connect(&store.address()).await.unwrap();
        Self(store, adapter)
    }

    fn adapter(&self) -> Arc<Self::Adapter> {
        Arc::clone(&self.1)
    }

    the_clock_of_the_inner_store!();
}

/// A pool whose transactions are serializable by default, as a role or a database may define. Its
/// commits do not wait for the disk.
struct Serializable(Postgres);

impl Store for Serializable {
    type Adapter = PostgresAdapter;

    async fn create() -> Self {
        let connect = async |schema: &Schema, options| {
            let to = PgConnectOptions::from_str(schema.database_url()).unwrap().options([
                ("default_transaction_isolation", "serializable"),
                ("synchronous_commit", "off"),
            ]);
            let pool = PgPoolOptions::new().max_connections(8).connect_with(to).await.unwrap();
            PostgresAdapter::with_options(pool, options)
        };
        let options = PostgresOptions::new().durable_claims(true);
        Self(Postgres::with(options, connect).await)
    }

    like_the_inner_store!();
}

/// Every call is a statement of its own.
struct Single(Postgres);

impl Store for Single {
    type Adapter = PostgresAdapter;

    async fn create() -> Self {
        let options = with_postgres_bounds(PostgresOptions::new().connections(8), 1, 16_384);
        Self(Postgres::with(options, connect_in).await)
    }

    like_the_inner_store!();
}

/// A table that is partitioned by hash of the key. It exists before the adapter.
struct Partitioned(Postgres);

impl Store for Partitioned {
    type Adapter = PostgresAdapter;

    async fn create() -> Self {
        let connect = async |schema: &Schema, options: PostgresOptions| {
            let adapter = connect_in(schema, options).await;
            let mut connection = PgConnection::connect(schema.database_url()).await.unwrap();
            create_partitions(&mut connection, &adapter.schema_sql(), 4).await;
            adapter
        };
        Self(Postgres::with(PostgresOptions::new(), connect).await)
    }

    like_the_inner_store!();
}

impl TransactionalStore for Partitioned {
    async fn transaction(&self) -> Box<dyn HandlerTransaction> {
        self.0.transaction().await
    }
}

impl SharedStore for Partitioned {
    const PROCESSES: usize = 8;

    fn address(&self) -> String {
        self.0.address()
    }

    async fn attach(address: &str) -> Arc<PostgresAdapter> {
        Postgres::attach(address).await
    }
}

mod memory_few_shards {
    tower_dedup_conformance::conformance_suite!(super::FewShards: leases, stored_data, maintenance);
}

mod sqlite_users_pool {
    tower_dedup_conformance::conformance_suite!(super::UsersPool: leases, stored_data, maintenance, inspection);
}

mod postgres_serializable {
    tower_dedup_conformance::conformance_suite!(super::Serializable: leases, stored_data, maintenance, inspection);
}

mod postgres_single {
    tower_dedup_conformance::conformance_suite!(super::Single: leases, stored_data, maintenance, inspection);
}

mod postgres_partitioned {
    tower_dedup_conformance::conformance_suite!(super::Partitioned: leases, stored_data, maintenance, inspection, completion, processes);
}

mod boxed {
    tower_dedup_conformance::conformance_suite!(super::Boxed: leases, stored_data, maintenance, inspection);
}

mod redis_sentinel {
    tower_dedup_conformance::conformance_suite!(super::RedisSentinel: leases, stored_data, maintenance, inspection, processes);
}

mod redis_cluster {
    tower_dedup_conformance::conformance_suite!(super::RedisCluster: leases, stored_data, maintenance, inspection, processes);
}

mod redis_replicated {
    tower_dedup_conformance::conformance_suite!(super::RedisReplicated: leases, stored_data, maintenance, inspection);
}
