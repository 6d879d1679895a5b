//! Purges, lists and statistics that read a part of a Postgres table at a time.

use std::collections::BTreeSet;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row as _};
use tower_dedup::adapter::{
    Claimed, Cursor, DedupAdapter, Forgotten, KeyState, ListFilter, MaintenanceAdapter,
    PostgresAdapter, PostgresOptions, Purging, Stats,
};

use crate::support::postgres::{Schema, create_partitions};
use crate::support::{claim_all, complete_all, dedup_key, sorted_keys, terms};

/// A table without an adapter that purges by itself.
struct Table {
    adapter: PostgresAdapter,
    pool: PgPool,
    schema: Schema,
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
        Self { adapter, pool, schema }
    }

    async fn execute(&self, sql: &str) -> u64 {
        let done = sqlx::query(AssertSqlSafe(sql.to_owned())).execute(&self.pool).await;
        done.unwrap().rows_affected()
    }

    /// Adds complete keys with the ids `prefix` and a number. Each takes a block. Every third key expired
    /// two hours ago.
    async fn fill(&self, prefix: &str, rows: u32) {
        self.execute("ALTER TABLE webhook_deliveries ALTER COLUMN response_body SET STORAGE PLAIN")
            .await;
        self.execute(&format!(
            "INSERT INTO webhook_deliveries (key, namespace, id, attempts, takeover, first_seen_at, \
             completed_at, expires_at, response_body) \
             SELECT gen_random_uuid(), 'big', '{prefix}' || g, 1, false, now(), now(), \
             now() + CASE WHEN g % 3 = 0 THEN interval '-2 hours' ELSE interval '1 day' END, \
             convert_to(repeat('x', 6000), 'UTF8') FROM generate_series(1, {rows}) AS g"
        ))
        .await;
    }

    /// Purges until the round is complete. Returns the deletions of each call, and the round's counts.
    async fn round(&self, limit: u32) -> (Vec<u64>, Stats) {
        let mut deleted = Vec::new();
        loop {
            let purged = self.adapter.purge(limit).await.unwrap();
            deleted.push(purged.deleted);
            if purged.is_round_complete {
                return (deleted, purged.stats.expect("Postgres counts"));
            }
            assert_eq!(purged.stats, None);
        }
    }

    /// Returns the ids of a list, and how many calls it took.
    async fn ids(&self, filter: &ListFilter, limit: u32) -> (Vec<String>, usize) {
        let (mut ids, mut after, mut calls) = (Vec::new(), None, 0);
        loop {
            let listing = self.adapter.list(filter, after.as_ref(), limit).await.unwrap();
            assert!(listing.keys.len() <= limit as usize);
            ids.extend(listing.keys.iter().map(|(key, _)| key.id().to_owned()));
            calls += 1;
            let Some(next) = listing.next else { return (ids, calls) };
            assert_ne!(Some(&next), after.as_ref(), "the list goes on");
            after = Some(next);
        }
    }
}

#[tokio::test]
async fn a_round_over_a_large_table_deletes_all_expired_keys_in_bounded_steps() {
    for partitions in [0, 4] {
        let table = Table::new(partitions).await;
        table.fill("evt_", 1_500).await;
        let (deleted, stats) = table.round(1_000).await;
        assert_eq!(deleted.iter().sum::<u64>(), 500);
        // 1,500 blocks in steps of 512 at most; the round begins in the middle of the table.
        assert!((3..=5).contains(&deleted.len()), "{deleted:?}");
        assert_eq!((stats.rows, stats.complete, stats.expired), (1_000, 1_000, 0));
        assert!(stats.is_exact && stats.bytes > Some(1_500 * 8_192), "{stats:?}");
        // The limit of a call.
        table.fill("more_", 300).await;
        let (deleted, _) = table.round(7).await;
        assert_eq!(deleted.iter().sum::<u64>(), 100);
        assert!(deleted.iter().all(|keys| *keys <= 7), "{deleted:?}");
    }
}

/// No call depends on the calls of a process that has ended.
#[tokio::test]
async fn adapters_that_end_after_one_step_purge_the_whole_table() {
    let table = Table::new(0).await;
    table.fill("evt_", 1_500).await;
    let mut deleted = 0;
    for _ in 0..200 {
        let options = PostgresOptions::new().purging(Purging::off());
        let adapter = PostgresAdapter::with_options(table.pool.clone(), options);
        deleted += adapter.purge(1_000).await.unwrap().deleted;
        if deleted == 500 {
            return;
        }
    }
    panic!("{deleted} of 500");
}

/// A purge that waited could deadlock with a batch that claims expired keys: each locks rows in an order
/// of its own.
#[tokio::test]
async fn purge_waits_for_no_row_and_leaves_it_to_the_next_round() {
    for partitions in [0, 4] {
        let table = Table::new(partitions).await;
        table.fill("evt_", 30).await;
        let mut holder = table.pool.begin().await.unwrap();
        sqlx::query("SELECT key FROM webhook_deliveries WHERE id = 'evt_3' FOR UPDATE")
            .fetch_one(&mut *holder)
            .await
            .unwrap();
        let round = tokio::time::timeout(Duration::from_secs(5), table.round(100)).await;
        let (deleted, stats) = round.expect("the purge does not wait");
        assert_eq!((deleted, stats.expired), (vec![9], 1));
        holder.rollback().await.unwrap();
        assert_eq!(table.round(100).await.0, [1]);
    }
}

#[tokio::test]
async fn purges_beside_batches_that_claim_expired_keys_never_fail() {
    let table = Table::new(0).await;
    let keys = sorted_keys("evt", 400);
    let expire = "UPDATE webhook_deliveries SET expires_at = now() - interval '2 hours', \
        lease_until = now() - interval '2 hours'";
    for _ in 0..6 {
        claim_all(&table.adapter, &keys, &terms()).await.unwrap();
        table.execute(expire).await;
        let claims = keys.chunks(100).map(|keys| {
            let (adapter, keys) = (table.adapter.clone(), keys.to_vec());
            tokio::spawn(async move { claim_all(&adapter, &keys, &terms()).await.unwrap() })
        });
        let purges = (0..4).map(|_| {
            let adapter = table.adapter.clone();
            tokio::spawn(async move {
                for _ in 0..10 {
                    adapter.purge(30).await.unwrap();
                }
            })
        });
        let (claims, purges): (Vec<_>, Vec<_>) = (claims.collect(), purges.collect());
        for claim in claims {
            for reply in claim.await.unwrap() {
                assert_eq!(reply, Claimed::first(1, false));
            }
        }
        for purge in purges {
            purge.await.unwrap();
        }
        // Each claimed key is there, under its new lease.
        for key in &keys {
            assert_eq!(table.adapter.forget(key).await.unwrap(), Forgotten::InFlight);
        }
        let free = "UPDATE webhook_deliveries SET lease_until = now() - interval '3 hours', \
            expires_at = now() - interval '3 hours'";
        table.execute(free).await;
    }
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    let deadlocks: i64 = sqlx::query_scalar(deadlocks).fetch_one(&table.pool).await.unwrap();
    assert_eq!(deadlocks, 0);
}

#[tokio::test]
async fn statistics_of_a_large_table_are_an_estimate_from_a_sample() {
    for partitions in [0, 4] {
        let table = Table::new(partitions).await;
        table.fill("evt_", 2_000).await;
        let exact = table.adapter.stats().await.unwrap();
        assert!(exact.is_exact, "{exact:?}");
        assert_eq!((exact.rows, exact.expired), (2_000, 666));
        assert!(exact.oldest_expired >= Some(Duration::from_secs(7_200)));
        table.fill("more_", 1_000).await;
        let estimate = table.adapter.stats().await.unwrap();
        assert!(!estimate.is_exact, "{estimate:?}");
        // A row a block: only the states of the rows that were not read are unknown.
        assert!(estimate.rows.abs_diff(3_000) < 100, "{estimate:?}");
        assert!(estimate.expired.abs_diff(1_000) < 100, "{estimate:?}");
        assert!(estimate.complete.abs_diff(2_000) < 100, "{estimate:?}");
        assert!(estimate.bytes > Some(3_000 * 8_192));
    }
}

#[tokio::test]
async fn a_list_of_a_large_table_has_every_key_once() {
    for partitions in [0, 4] {
        let table = Table::new(partitions).await;
        table.fill("evt_", 3_000).await;
        table.adapter.claim(&dedup_key("stuck"), &terms()).await.unwrap();
        let complete = ListFilter::new().with_state(KeyState::Complete);
        let live: BTreeSet<String> =
            (1..=3_000).filter(|id| id % 3 != 0).map(|id| format!("evt_{id}")).collect();
        for limit in [1_000, 77] {
            let (ids, _) = table.ids(&complete, limit).await;
            assert_eq!(ids.len(), live.len());
            assert_eq!(BTreeSet::from_iter(ids), live);
        }
        // A call reads 2,048 blocks at most, also if it finds nothing.
        let stuck = ListFilter::new().with_state(KeyState::InFlight);
        let (ids, calls) = table.ids(&stuck, 100).await;
        assert_eq!((ids, calls), (vec!["stuck".to_owned()], 2));
        let extreme = ListFilter::new().with_since(Duration::MAX).with_attempts_over(u32::MAX);
        assert_eq!(table.ids(&extreme, u32::MAX).await.0, [] as [String; 0]);
        let none = table.adapter.list(&stuck, None, 0).await.unwrap();
        assert!(none.keys.is_empty() && none.next.is_some());
        // A position after the end of the table.
        let far = Cursor::new("4294967295.65535.4294967295.4294967295");
        let far = table.adapter.list(&ListFilter::new(), Some(&far), 10).await.unwrap();
        assert!(far.keys.is_empty() && far.next.is_none());
    }
}

/// Rights on a partition are not needed, and a role of the application seldom has them.
#[tokio::test]
async fn rights_on_the_partitioned_table_are_enough() {
    let table = Table::new(4).await;
    table.fill("evt_", 30).await;
    let (schema, role) = (table.schema.name(), format!("{}_role", table.schema.name()));
    table.execute(&format!("CREATE ROLE {role} LOGIN")).await;
    table.execute(&format!("GRANT USAGE ON SCHEMA {schema} TO {role}")).await;
    table
        .execute(&format!(
            "GRANT SELECT, INSERT, UPDATE, DELETE ON {schema}.webhook_deliveries TO {role}"
        ))
        .await;
    table.execute(&format!("GRANT SELECT ON {schema}.webhook_deliveries_schema TO {role}")).await;
    let options: PgConnectOptions = table.schema.url().parse().unwrap();
    let pool = PgPool::connect_with(options.username(&role)).await.unwrap();
    let options = PostgresOptions::new().purging(Purging::off());
    let adapter = PostgresAdapter::with_options(pool.clone(), options);
    assert_eq!(adapter.stats().await.unwrap().rows, 30);
    assert_eq!(adapter.purge(100).await.unwrap().deleted, 10);
    assert_eq!(adapter.list(&ListFilter::new(), None, 100).await.unwrap().keys.len(), 20);
    let (keys, mine) = (sorted_keys("new", 20), terms());
    let claimed = claim_all(&adapter, &keys, &mine).await.unwrap();
    assert!(claimed.iter().all(|reply| *reply == Claimed::first(1, false)), "{claimed:?}");
    complete_all(&adapter, &keys, &mine).await.unwrap();
    assert_eq!(adapter.forget(&keys[0]).await.unwrap(), Forgotten::Removed);
    pool.close().await;
    table.execute(&format!("DROP OWNED BY {role}")).await;
    table.execute(&format!("DROP ROLE {role}")).await;
}

/// A purge reads the blocks of its step, and no index.
#[tokio::test]
async fn the_plan_of_a_purge_reads_and_deletes_by_place() {
    const STATEMENTS: &str = include_str!("../../src/adapter/postgres/sql/golden.txt");
    for partitions in [0, 4] {
        let table = Table::new(partitions).await;
        table.fill("evt_", 600).await;
        table.execute("ANALYZE webhook_deliveries").await;
        let version = "SELECT current_setting('server_version_num')::int4";
        let version: i32 = sqlx::query_scalar(version).fetch_one(&table.pool).await.unwrap();
        if version < 140_000 {
            return;
        }
        let mut connection = table.pool.acquire().await.unwrap();
        sqlx::query("SET plan_cache_mode = force_generic_plan")
            .execute(&mut *connection)
            .await
            .unwrap();
        for (name, parameters, arguments) in [
            ("purge", "text, text, int8", "'(0,0)', '(512,0)', 1000"),
            ("stats", "text, text", "'(0,0)', '(512,0)'"),
        ] {
            let (_, sql) = STATEMENTS.split_once(&format!("-- {name}\n")).unwrap();
            let (sql, _) = sql.split_once(";\n").unwrap();
            let prepare = format!("PREPARE the_{name} ({parameters}) AS {sql}");
            sqlx::raw_sql(AssertSqlSafe(prepare)).execute(&mut *connection).await.unwrap();
            let explain = format!("EXPLAIN EXECUTE the_{name} ({arguments})");
            let plan = sqlx::raw_sql(AssertSqlSafe(explain)).fetch_all(&mut *connection).await;
            let plan: Vec<String> = plan.unwrap().iter().map(|row| row.get(0)).collect();
            let has = |node: &str| plan.iter().any(|line| line.contains(node));
            assert!(has("Tid Range Scan"), "{plan:#?}");
            assert!(!has("Seq Scan") && !has("Index"), "{plan:#?}");
            assert_eq!(has("Tid Scan"), name == "purge", "{plan:#?}");
        }
    }
}
