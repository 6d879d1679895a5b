//! The function that records a key in a transaction of another driver: the guide's callers, the identity of a key,
//! and races, on a real server.

mod callers;
mod diesel_async;
mod identity;
#[path = "../support/postgres.rs"]
#[allow(dead_code, reason = "this test takes a part of it")]
mod postgres;
mod races;
mod rules;
mod sea_orm;
mod tokio_postgres;

use std::time::Duration;

use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::{Error, PgConnection};
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions};

use crate::postgres::Schema;

const HOUR: Duration = Duration::from_secs(3_600);

/// A database with the table, the function and a table of effects.
struct Database {
    schema: Schema,
    pool: PgPool,
}

impl Database {
    async fn fresh() -> Self {
        let schema = Schema::fresh();
        let pool = PgPoolOptions::new().max_connections(16);
        let pool = pool.connect(schema.database_url()).await.unwrap();
        sqlx::query("CREATE TABLE payments (id text)").execute(&pool).await.unwrap();
        let database = Self { schema, pool };
        database.adapter().migrate().await.unwrap();
        database
    }

    fn adapter(&self) -> PostgresAdapter {
        let options = PostgresOptions::new().record_function(true);
        PostgresAdapter::with_options(self.pool.clone(), options)
    }

    async fn payments(&self) -> Vec<String> {
        let payments = sqlx::query_scalar("SELECT id FROM payments ORDER BY id");
        payments.fetch_all(&self.pool).await.unwrap()
    }
}

async fn record(connection: &mut PgConnection, namespace: &str, id: &str) -> Result<String, Error> {
    let record = sqlx::query_scalar("SELECT webhook_deliveries_record($1, $2, 3600)");
    record.bind(namespace).bind(id).fetch_one(connection).await
}
