//! PostgreSQL for benches: each bench starts its own server and removes it at the end.
//!
//! The server has default settings, so commits wait for the disk. The tests' server does not sync,
//! because no test cuts the power; here, the sync is part of the figure. With `TEST_POSTGRES_URL` set,
//! the benches use that server instead, in temporary schemas.

use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool};
use tower_dedup::adapter::PostgresAdapter;

use super::calls::NAMESPACE;
use super::usage::family_cpu;

pub(crate) use support::postgres::Schema;
use support::postgres::{Server, URL};

/// The number of rows in a small table: enough for the planner to use the index. A service reaches
/// that size within seconds, and the server analyses the table within a minute.
pub(crate) const FEW: u64 = 10_000;

/// A server with durable commits.
pub(crate) struct Database {
    url: String,
    /// Stops when this value is dropped.
    server: Option<Server>,
}

impl Database {
    /// Starts the server and prints its settings. Blocks, so call it outside a runtime.
    pub(crate) fn start() -> Self {
        let (url, server) = match std::env::var(URL) {
            Ok(url) if !url.is_empty() => (url, None),
            _ => {
                let server = Server::start();
                (server.url(), Some(server))
            }
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let mut connection = PgConnection::connect(&url).await.expect("PostgreSQL");
            if server.is_some() {
                connection.execute("ALTER SYSTEM SET fsync = on").await.expect("a setting");
                connection.execute("SELECT pg_reload_conf()").await.expect("a reload");
                // The postmaster reloads before its new sessions have the setting.
                loop {
                    connection = PgConnection::connect(&url).await.expect("PostgreSQL");
                    let fsync = sqlx::query_scalar("SHOW fsync").fetch_one(&mut connection);
                    if fsync.await.is_ok_and(|fsync: String| fsync == "on") {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            }
            let mut settings = Vec::new();
            for name in ["server_version", "fsync", "synchronous_commit", "shared_buffers"] {
                let query = AssertSqlSafe(format!("SHOW {name}"));
                let value = sqlx::query_scalar(query).fetch_one(&mut connection).await;
                let value: String = value.expect("a setting");
                let durable = !matches!(name, "fsync" | "synchronous_commit") || value == "on";
                assert!(durable, "`{name}` is `{value}`: commits do not wait for the disk");
                settings.push(format!("{name} {value}"));
            }
            println!("\nPostgreSQL: {}", settings.join(", "));
        });
        Self { url, server }
    }

    /// Returns a new schema, and an adapter that has created its table there.
    pub(crate) async fn adapter(&self) -> (Schema, PostgresAdapter) {
        let schema = Schema::fresh_in(&self.url);
        let adapter = PostgresAdapter::connect(&schema.url()).await.expect("PostgreSQL");
        adapter.migrate().await.expect("a table");
        (schema, adapter)
    }

    /// Returns the CPU time of all processes of the server; `None` for a server that the bench did not start.
    pub(crate) fn cpu(&self) -> Option<Duration> {
        let file = self.server.as_ref()?.dir().join("data/postmaster.pid");
        family_cpu(std::fs::read_to_string(file).ok()?.lines().next()?.parse().ok()?)
    }
}

/// Replaces the table's content with this many complete rows, then runs VACUUM and ANALYZE.
///
/// The keys are hashed as in the adapter (guide, postgres). The rows are 0.2 s apart.
pub(crate) async fn fill(pool: &PgPool, rows: u64) {
    let fill = format!(
        "INSERT INTO webhook_deliveries (key, namespace, id, token, attempts, takeover, \
         first_seen_at, completed_at, expires_at) \
         SELECT encode(substring(sha256(convert_to('{NAMESPACE}' || E'\\n' || id, 'UTF8')) \
         FROM 1 FOR 16), 'hex')::uuid, '{NAMESPACE}', id, gen_random_uuid(), 1, false, \
         seen, seen, seen + interval '60 days' \
         FROM (SELECT 'old_' || lpad(number::text, 24, '0') AS id, \
         now() - ({rows} - number) * interval '0.2 seconds' AS seen \
         FROM generate_series(1, {rows}) AS number) AS old"
    );
    for statement in ["TRUNCATE webhook_deliveries", &fill, "VACUUM ANALYZE webhook_deliveries"] {
        pool.execute(AssertSqlSafe(statement)).await.expect("rows");
    }
}
