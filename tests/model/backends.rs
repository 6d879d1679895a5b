//! Stores that are empty when a schedule begins, and whose time can be moved.

use std::sync::Arc;
use std::time::Duration;

use sqlx::Executor;
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::adapter::{MemoryAdapter, PostgresOptions, Purging, SqliteAdapter, SqliteOptions};
use tower_dedup::internals::{with_postgres_bounds, with_sqlite_bounds};
use tower_dedup_conformance::{SharedStore, Store};

use support::places::{Place, Postgres, Redis, Shared, Sqlite, connect_in};
use support::redis::{command, keys_of};

pub(crate) trait Backend {
    type Adapter: MaintenanceAdapter;

    /// `true` if other callers may see a call as more than one step.
    const IN_SEVERAL_STATEMENTS: bool = true;

    /// Deletes everything.
    async fn empty(&mut self);

    /// Returns adapters on the same store, one for each process that the backend stands for.
    fn adapters(&self) -> Vec<Arc<Self::Adapter>>;

    async fn advance(&mut self, by: Duration);
}

pub(crate) struct Memory {
    capacity: usize,
    adapter: Arc<MemoryAdapter>,
}

impl Memory {
    /// The capacity decides the number of shards.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, adapter: Arc::new(MemoryAdapter::with_capacity(capacity)) }
    }
}

impl Backend for Memory {
    type Adapter = MemoryAdapter;

    const IN_SEVERAL_STATEMENTS: bool = false;

    async fn empty(&mut self) {
        *self = Self::new(self.capacity);
    }

    fn adapters(&self) -> Vec<Arc<MemoryAdapter>> {
        vec![Arc::clone(&self.adapter)]
    }

    async fn advance(&mut self, by: Duration) {
        self.adapter.advance(by);
    }
}

/// Adapters of several processes.
pub(crate) struct Processes<P: Place> {
    place: P,
    adapters: Vec<Arc<P::Adapter>>,
}

/// A store outside of the process.
pub(crate) trait Outside: Place {
    const IN_SEVERAL_STATEMENTS: bool = true;

    async fn delete_everything(&self);
}

impl<P: Outside> Backend for Processes<P> {
    type Adapter = P::Adapter;

    const IN_SEVERAL_STATEMENTS: bool = P::IN_SEVERAL_STATEMENTS;

    async fn empty(&mut self) {
        self.place.delete_everything().await;
    }

    fn adapters(&self) -> Vec<Arc<P::Adapter>> {
        self.adapters.clone()
    }

    async fn advance(&mut self, by: Duration) {
        self.place.advance(by).await;
    }
}

/// How many calls a batch of each adapter of a backend takes: two adapters with large and with small batches.
pub(crate) const BATCHES: [usize; 2] = [1_024, 3];
/// How many calls may wait.
const WAITING: usize = 16_384;

impl Processes<Sqlite> {
    pub(crate) async fn on_sqlite() -> Self {
        let (place, mut adapters) = (Sqlite::create().await, Vec::new());
        for batch in BATCHES {
            let options = SqliteOptions::new().purging(Purging::off());
            let options = with_sqlite_bounds(options, batch, WAITING);
            let adapter = SqliteAdapter::connect_with(&place.address(), options).await.unwrap();
            adapters.push(Arc::new(adapter));
        }
        Self { place, adapters }
    }
}

impl Outside for Sqlite {
    async fn delete_everything(&self) {
        self.pool().execute("DELETE FROM webhook_deliveries").await.unwrap();
    }
}

impl Processes<Postgres> {
    pub(crate) async fn on_postgres() -> Self {
        let (place, mut adapters) = (Postgres::create().await, Vec::new());
        for batch in BATCHES {
            let options = PostgresOptions::new().connections(3).purging(Purging::off());
            let options = with_postgres_bounds(options, batch, WAITING);
            let options = options.schema(place.schema.name());
            adapters.push(Arc::new(connect_in(&place.schema, options).await));
        }
        Self { place, adapters }
    }
}

impl Outside for Postgres {
    async fn delete_everything(&self) {
        self.pool().execute("DELETE FROM webhook_deliveries").await.unwrap();
    }
}

impl Processes<Redis> {
    pub(crate) async fn on_redis() -> Self {
        let place = Redis::create().await;
        let adapters = vec![place.adapter(), place.another().await];
        Self { place, adapters }
    }
}

impl Outside for Redis {
    /// One script decides each reply.
    const IN_SEVERAL_STATEMENTS: bool = false;

    async fn delete_everything(&self) {
        for mut server in self.connections() {
            for key in keys_of(&mut server, &self.prefix).unwrap() {
                command(&["DEL"]).arg(key).exec(&mut server).unwrap();
            }
        }
    }
}
