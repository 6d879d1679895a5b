//! Purges, lists and statistics of a Postgres table.

use std::collections::BTreeSet;
use std::time::Duration;

use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row as _};
use tower_dedup::StoreErrorKind;
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, DedupAdapter, Token};
use tower_dedup::adapter::maintenance::{KeyState, ListFilter, MaintenanceAdapter};
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions, Purging};
use tower_dedup::internals::postgres_statements;

use support::postgres::{Schema, create_partitions};
use support::{dedup_key, list, terms};

const HOUR: Duration = Duration::from_secs(3_600);

/// A table without an adapter that purges by itself.
struct Table {
    adapter: PostgresAdapter,
    pool: PgPool,
    _schema: Schema,
}

impl Table {
    /// Makes a table with so many partitions; 0 for a table without partitions.
    async fn new(partitions: u32) -> Self {
        let schema = Schema::fresh();
        let pool = PgPoolOptions::new().max_connections(8).connect(&schema.url()).await.unwrap();
        let options = PostgresOptions::new().purging(Purging::off());
        let adapter = PostgresAdapter::with_options(pool.clone(), options);
        if partitions > 0 {
            let mut connection = PgConnection::connect(&schema.url()).await.unwrap();
            create_partitions(&mut connection, &adapter.schema_sql(), partitions).await;
        }
        adapter.migrate().await.unwrap();
        Self { adapter, pool, _schema: schema }
    }

    async fn execute(&self, sql: &str) -> u64 {
        let done = sqlx::query(AssertSqlSafe(sql.to_owned())).execute(&self.pool).await;
        done.unwrap().rows_affected()
    }

    /// Adds complete keys with the ids `prefix` and a number. Every third key expired two hours ago.
    async fn fill(&self, prefix: &str, rows: u32) {
        self.execute(&format!(
            "INSERT INTO webhook_deliveries (key, namespace, id, attempts, takeover, first_seen_at, \
             completed_at, expires_at) \
             SELECT gen_random_uuid(), 'big', '{prefix}' || g, 1, false, now(), now(), \
             now() + CASE WHEN g % 3 = 0 THEN interval '-2 hours' ELSE interval '1 day' END \
             FROM generate_series(1, {rows}) AS g"
        ))
        .await;
    }

    /// Purges until a call deletes fewer keys than its limit. Returns the deletions of each call.
    async fn purge(&self, limit: u32) -> Vec<u64> {
        let mut deleted = Vec::new();
        while deleted.last().is_none_or(|last| *last == u64::from(limit)) {
            deleted.push(self.adapter.purge(limit).await.unwrap());
        }
        deleted
    }
}

#[tokio::test]
async fn calls_delete_all_expired_keys_the_oldest_first() {
    for partitions in [0, 4] {
        let table = Table::new(partitions).await;
        table.fill("evt_", 300).await;
        table
            .execute(
                "UPDATE webhook_deliveries SET expires_at = expires_at - interval '1 day' \
                 WHERE id IN ('evt_3', 'evt_300')",
            )
            .await;
        assert_eq!(table.adapter.purge(2).await.unwrap(), 2);
        let oldest = "SELECT count(*) FROM webhook_deliveries WHERE id IN ('evt_3', 'evt_300')";
        let oldest: i64 = sqlx::query_scalar(oldest).fetch_one(&table.pool).await.unwrap();
        assert_eq!(oldest, 0);
        assert_eq!(table.adapter.purge(0).await.unwrap(), 0);
        assert_eq!(table.purge(7).await, [vec![7; 14], vec![0]].concat());
        let stats = table.adapter.stats().await.unwrap();
        assert_eq!((stats.rows, stats.complete, stats.expired), (200, 200, 0));
    }
}

/// The table of an earlier version has none.
#[tokio::test]
async fn migration_refuses_a_table_without_the_index_and_claims_do_not_need_it() {
    let table = Table::new(0).await;
    // A purge finds no row by an index that a failed CREATE INDEX CONCURRENTLY has left, nor by one of some rows.
    let left = "UPDATE pg_index SET indisvalid = false
        WHERE indexrelid = 'webhook_deliveries_expires_at'::regclass";
    let of_some = "CREATE INDEX partial ON webhook_deliveries (expires_at) WHERE attempts > 1";
    for made in [left, "DROP INDEX webhook_deliveries_expires_at", of_some] {
        table.execute(made).await;
        let refused = table.adapter.migrate().await.unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::Refused);
        assert!(refused.to_string().contains("no index on expires_at"), "{refused}");
    }
    let options = PostgresOptions::new().purging(Purging::off());
    let other = PostgresAdapter::with_options(table.pool.clone(), options);
    let claimed = other.claim(&dedup_key("a"), &terms()).await.unwrap();
    assert_eq!(claimed, ClaimReply::first(1, false));
    // By any name, and with more columns.
    table.execute("CREATE INDEX mine ON webhook_deliveries (expires_at, key)").await;
    table.adapter.migrate().await.unwrap();
}

/// A purge that waited could deadlock with a batch that claims expired keys: each locks rows in an order
/// of its own.
#[tokio::test]
async fn purge_waits_for_no_row_and_leaves_it_to_the_next_purge() {
    for partitions in [0, 4] {
        let table = Table::new(partitions).await;
        table.fill("evt_", 30).await;
        let mut holder = table.pool.begin().await.unwrap();
        sqlx::query("SELECT key FROM webhook_deliveries WHERE id = 'evt_3' FOR UPDATE")
            .fetch_one(&mut *holder)
            .await
            .unwrap();
        let purged = tokio::time::timeout(Duration::from_secs(5), table.purge(100)).await;
        assert_eq!(purged.expect("the purge does not wait"), [9]);
        assert_eq!(table.adapter.stats().await.unwrap().expired, 1);
        holder.rollback().await.unwrap();
        assert_eq!(table.purge(100).await, [1]);
    }
}

#[tokio::test]
async fn statistics_of_a_large_table_are_an_estimate() {
    for partitions in [0, 4] {
        let table = Table::new(partitions).await;
        table.fill("evt_", 120_000).await;
        let exact = table.adapter.stats().await.unwrap();
        assert!(exact.is_exact, "{exact:?}");
        assert_eq!((exact.rows, exact.expired, exact.complete), (120_000, 40_000, 80_000));
        assert!(exact.oldest_expired >= Some(Duration::from_secs(7_200)));
        assert!(exact.bytes > Some(120_000 * 100), "{exact:?}");
        table.fill("more_", 60_000).await;
        let long = CallTerms::on_completion(Token::random(), 50 * HOUR, HOUR);
        table.adapter.claim(&dedup_key("last"), &long).await.unwrap();
        table.execute("ANALYZE webhook_deliveries").await;
        let estimate = table.adapter.stats().await.unwrap();
        assert!(!estimate.is_exact, "{estimate:?}");
        // The catalogue's estimate.
        assert!(estimate.rows.abs_diff(180_001) < 1_000, "{estimate:?}");
        assert!(estimate.complete.abs_diff(120_000) < 1_000, "{estimate:?}");
        // At each end of the index every key is counted.
        assert_eq!((estimate.expired, estimate.in_flight), (60_000, 1));
    }
}

#[tokio::test]
async fn a_list_of_a_large_table_has_every_key_once() {
    for partitions in [0, 4] {
        let table = Table::new(partitions).await;
        table.fill("evt_", 12_000).await;
        table.adapter.claim(&dedup_key("stuck"), &terms()).await.unwrap();
        let mut complete = ListFilter::default();
        complete.state = Some(KeyState::Complete);
        let live: BTreeSet<String> =
            (1..=12_000).filter(|id| id % 3 != 0).map(|id| format!("evt_{id}")).collect();
        for limit in [1_000, 177] {
            let (keys, _) = list(&table.adapter, &complete, limit).await;
            assert_eq!(keys.len(), live.len());
            assert_eq!(keys.iter().map(|key| key.id().to_owned()).collect::<BTreeSet<_>>(), live);
        }
        // A call reads 10,000 keys at most, also if it selects none.
        let mut stuck = ListFilter::default();
        stuck.state = Some(KeyState::InFlight);
        let listed = list(&table.adapter, &stuck, 100).await;
        assert_eq!(listed, (vec![dedup_key("stuck")], 2));
        let mut extreme = ListFilter::default();
        (extreme.since, extreme.attempts_over) = (Some(Duration::MAX), Some(u32::MAX));
        assert_eq!(list(&table.adapter, &extreme, u32::MAX).await.0, []);
        let one = table.adapter.list(&ListFilter::default(), None, 0).await.unwrap();
        assert!(one.keys.len() == 1 && one.next.is_some());
        // After every key.
        let far = "f".repeat(32);
        let far = table.adapter.list(&ListFilter::default(), Some(&far), 10).await.unwrap();
        assert!(far.keys.is_empty() && far.next.is_none());
    }
}

/// A claim, a purge and a list read a part of the table, whatever the planner knows of their parameters.
#[tokio::test]
async fn plans_are_index_scans() {
    for (partitions, plans) in [(0, "auto"), (0, "force_generic_plan"), (4, "auto")] {
        let table = Table::new(partitions).await;
        table.fill("evt_", 60_000).await;
        table.execute("ANALYZE webhook_deliveries").await;
        let mut connection = table.pool.acquire().await.unwrap();
        let set = format!("SET plan_cache_mode = {plans}");
        sqlx::raw_sql(AssertSqlSafe(set)).execute(&mut *connection).await.unwrap();
        for (name, parameters, arguments, indexes) in [
            ("purge", "int8", "100", &["_expires_at", "_pkey"][..]),
            (
                "list",
                "uuid, int4, text, int8, int8, text, int8",
                "'00000000-0000-0000-0000-000000000000', 1, NULL, NULL, NULL, NULL, 10",
                &["_pkey"],
            ),
            ("read", "uuid[]", "ARRAY[gen_random_uuid()]", &["_pkey"]),
            ("get_many", "uuid[]", "array_fill(gen_random_uuid(), ARRAY[64])", &["_pkey"]),
            (
                "claim_existing",
                "uuid[], text[], text[], uuid[], int8, text[], int8, bytea[], int2[], text[], bytea[], \
                 int8[], int8[]",
                "ARRAY[gen_random_uuid()], '{a}', '{a}', ARRAY[gen_random_uuid()], 1, '{NULL}', 1, \
                 '{NULL}', '{NULL}', '{NULL}', '{NULL}', NULL, '{0}'",
                &["_pkey"],
            ),
        ] {
            let statements = postgres_statements(&table.adapter);
            let (_, sql) = statements.iter().find(|(named, _)| *named == name).unwrap();
            let prepare = format!("PREPARE the_{name} ({parameters}) AS {sql}");
            sqlx::raw_sql(AssertSqlSafe(prepare)).execute(&mut *connection).await.unwrap();
            let explain = format!("EXPLAIN EXECUTE the_{name} ({arguments})");
            let plan = sqlx::raw_sql(AssertSqlSafe(explain)).fetch_all(&mut *connection).await;
            let plan: Vec<String> = plan.unwrap().iter().map(|row| row.get(0)).collect();
            let has = |node: &str| plan.iter().any(|line| line.contains(node));
            assert!(!has("Seq Scan"), "{plan:#?}");
            for index in indexes {
                assert!(has(index), "{plan:#?}");
            }
        }
    }
}
