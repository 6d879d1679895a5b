//! PostgreSQL for benches: each bench starts its own server and removes it at the end.
//!
//! The server has default settings, so commits wait for the disk. The tests' server does not sync,
//! because no test cuts the power; here, the sync is part of the figure. With `TEST_POSTGRES_URL` set,
//! the benches use that server instead, in temporary schemas.

use std::path::Path;
use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool};
use tower_dedup::DedupKey;
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::contract::DedupAdapter;

use super::calls::{NAMESPACE, Ours, Store, old_id};
use super::disk::print_sync_time;
use super::usage::{Usage, family_cpu, own_cpu};

#[path = "../../tests/support/postgres.rs"]
mod support;

pub(crate) use support::Schema;
use support::{Server, URL};

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
                print_sync_time(parent(&server));
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

    /// Returns the folder of the server's folder, or `None` for a server that the bench did not start.
    pub(crate) fn folder(&self) -> Option<&Path> {
        self.server.as_ref().map(parent)
    }

    /// Returns the log of the server, or `None` for a server that the bench did not start.
    pub(crate) fn log(&self) -> Option<String> {
        self.server.as_ref().map(Server::log)
    }

    /// Returns what this process and the server have used.
    pub(crate) async fn usage(&self, pool: &PgPool) -> Usage {
        let wal = sqlx::query_scalar("SELECT (pg_current_wal_insert_lsn() - '0/0')::int8");
        let wal = wal.fetch_one(pool).await.expect("a position");
        let server = self.server.as_ref().and_then(|server| {
            let file = std::fs::read_to_string(server.dir().join("data/postmaster.pid")).ok()?;
            family_cpu(file.lines().next()?.parse().ok()?)
        });
        Usage { client: own_cpu(), server, wal }
    }
}

fn parent(server: &Server) -> &Path {
    server.dir().parent().expect("a folder of folders")
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

/// Asserts that the adapter finds the filled rows. Otherwise the bench would measure claims beside rows
/// that are no keys.
pub(crate) async fn assert_found<A: DedupAdapter + Clone>(adapter: &Ours<A>, rows: u64) {
    for number in [1, rows / 2, rows] {
        adapter.duplicate(&DedupKey::new(NAMESPACE, &old_id(number)).expect("a key")).await;
    }
}
