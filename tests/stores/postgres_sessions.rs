//! A call leaves no setting and no lock on its connection after its transaction. Behind PgBouncer,
//! another client uses the session next.

use futures_util::future::try_join_all;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Executor, PgPool};
use tower_dedup::StoreErrorKind;
use tower_dedup::adapter::contract::{DedupAdapter, Fetch};
use tower_dedup::adapter::maintenance::{ForgetReply, MaintenanceAdapter};
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions};

use support::effects::{Database, MINUTE};
use support::{
    FIRST, claim_all, complete_all, dedup_key, on_claim, release_all, sorted_keys, terms,
};

/// Returns every setting of the pool's one session.
async fn settings(pool: &PgPool) -> Vec<(String, Option<String>)> {
    // The settings of the function language exist after its first use.
    let settings = "SELECT name, setting FROM pg_settings WHERE name NOT LIKE 'plpgsql.%' \
                    ORDER BY name";
    sqlx::query_as(settings).fetch_all(pool).await.unwrap()
}

struct Watch<'d> {
    database: &'d Database,
    pool: PgPool,
    before: Vec<(String, Option<String>)>,
}

impl<'d> Watch<'d> {
    async fn new(database: &'d Database) -> Self {
        let pool = database.pool(1);
        let before = settings(&pool).await;
        Self { database, pool, before }
    }

    /// Asserts that no session has a lock or a setting. For batches there is no other way to see
    /// it.
    async fn nothing_is_left(&self, call: &str) {
        self.database.until_no_transaction_is_open().await;
        let locks = "SELECT count(*) FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid) \
                     WHERE a.application_name = $1 AND l.locktype = 'advisory'";
        let locks = sqlx::query_scalar::<_, i64>(locks).bind(self.database.name());
        assert_eq!(locks.fetch_one(self.database.effects.pool()).await.unwrap(), 0, "{call}");
        let after = settings(&self.pool).await;
        let changed: Vec<_> = after.iter().filter(|now| !self.before.contains(now)).collect();
        assert!(changed.is_empty(), "{call}: {changed:?}");
        let tables = "SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema()";
        let tables = sqlx::query_scalar::<_, i64>(tables).fetch_one(&self.pool).await.unwrap();
        assert_eq!(tables, 0, "{call}");
    }
}

#[tokio::test]
async fn calls_leave_no_lock_and_no_setting_behind() {
    let database = Database::fresh().await;
    let watch = Watch::new(&database).await;
    let options = PostgresOptions::new();
    let adapter = PostgresAdapter::with_options(watch.pool.clone(), options.clone());
    let durable = PostgresAdapter::with_options(watch.pool.clone(), options.durable_claims(true));
    adapter.migrate().await.unwrap();
    watch.nothing_is_left("migrate").await;
    for count in [1, 3, 100] {
        let (mine, leased) = (terms(), sorted_keys(&format!("leased{count}"), count));
        claim_all(&adapter, &leased, &mine).await.unwrap();
        watch.nothing_is_left("claim").await;
        claim_all(&adapter, &leased, &terms()).await.unwrap();
        try_join_all(leased.iter().map(|key| adapter.renew(key, &mine))).await.unwrap();
        watch.nothing_is_left("renew").await;
        release_all(&adapter, &leased, &mine).await.unwrap();
        watch.nothing_is_left("release").await;
        claim_all(&durable, &leased, &mine).await.unwrap();
        watch.nothing_is_left("durable claim").await;
        complete_all(&adapter, &leased, &mine).await.unwrap();
        watch.nothing_is_left("complete").await;
        claim_all(&adapter, &leased, &mine).await.unwrap();
        watch.nothing_is_left("duplicate").await;
        let fetching = terms().with_fetch(Fetch::DigestAndResponse);
        claim_all(&adapter, &leased, &fetching).await.unwrap();
        watch.nothing_is_left("duplicate with stored data").await;
        let recorded = sorted_keys(&format!("recorded{count}"), count);
        claim_all(&adapter, &recorded, &on_claim(&mine)).await.unwrap();
        watch.nothing_is_left("record").await;
        release_all(&adapter, &recorded, &on_claim(&mine)).await.unwrap();
        watch.nothing_is_left("unrecord").await;

        let mut theirs = watch.pool.begin().await.unwrap();
        adapter.record_in(&mut theirs, &dedup_key(&format!("in-{count}")), MINUTE).await.unwrap();
        theirs.commit().await.unwrap();
        watch.nothing_is_left("record_in").await;
    }
    adapter.get(&dedup_key("leased1-0")).await.unwrap();
    adapter.forget(&dedup_key("leased3-1")).await.unwrap();
    adapter.stats().await.unwrap();
    adapter.purge(10).await.unwrap();
    watch.nothing_is_left("maintenance").await;
    adapter.close().await;
}

/// sqlx leaves a connection in a transaction if its `begin` is dropped, as that of a handler whose client hangs up.
async fn leak_a_transaction(pool: &PgPool) {
    pool.acquire().await.unwrap().execute(sqlx::raw_sql("BEGIN")).await.unwrap();
}

/// Of the pool's only connection. Each call is on its own, because the next one would commit the leaked transaction.
#[tokio::test]
async fn call_beside_a_transaction_that_the_user_has_leaked_is_committed() {
    for call in ["claim", "forget", "purge"] {
        let database = Database::fresh().await;
        let pool = database.pool(1);
        let adapter = PostgresAdapter::new(pool.clone());
        let (key, mine) = (dedup_key("a"), on_claim(&terms()));
        if call != "claim" {
            adapter.claim(&key, &mine).await.unwrap();
        }
        if call == "purge" {
            database.run("UPDATE webhook_deliveries SET expires_at = now() - interval '2 h'").await;
        }
        leak_a_transaction(&pool).await;
        match call {
            "forget" => assert_eq!(adapter.forget(&key).await.unwrap(), ForgetReply::Removed),
            "purge" => assert_eq!(adapter.purge(10).await.unwrap(), 1),
            // The first call makes the table, too.
            _ => {}
        }
        assert_eq!(adapter.claim(&key, &on_claim(&terms())).await.unwrap(), FIRST, "{call}");
        let stored = "SELECT count(*) FROM webhook_deliveries WHERE completed_at IS NOT NULL";
        let stored = sqlx::query_scalar::<_, i64>(stored).fetch_one(database.effects.pool()).await;
        assert_eq!(stored.unwrap(), 1, "{call}");
    }
}

/// PgBouncer before 1.21 gives a session, with its prepared statements, to one client after another.
#[tokio::test]
async fn pooler_that_keeps_no_prepared_statements_is_named() {
    let database = Database::fresh().await;
    let options = PgPoolOptions::new().after_connect(|session, _| {
        Box::pin(async move {
            session.execute("PREPARE sqlx_s_1 AS SELECT 1").await?;
            Ok(())
        })
    });
    let adapter = PostgresAdapter::new(options.connect_lazy_with(database.options()));
    let error = adapter.claim(&dedup_key("a"), &terms()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Config);
    assert!(error.to_string().contains("PgBouncer needs version 1.21"), "{error}");
}
