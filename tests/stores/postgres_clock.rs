//! Leases follow the store's clock. A claim that waited gets its whole lease.

use std::time::{Duration, SystemTime};

use sqlx::postgres::PgConnectOptions;
use tower_dedup::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply, Token,
};
use tower_dedup::adapter::maintenance::{Entry, ForgetReply, MaintenanceAdapter};
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions};

use support::effects::{AT_A_GATE, Database, MINUTE, complete_in};
use support::{FIRST, claim_all, dedup_key, on_claim, rows};

const HOUR: Duration = Duration::from_secs(3_600);
const DAY: Duration = Duration::from_secs(86_400);
const SECOND: Duration = Duration::from_secs(1);

/// A lease of a minute, and a day's retention.
fn terms() -> CallTerms {
    CallTerms::on_completion(Token::random(), DAY, MINUTE)
}

/// Gives the sessions a clock of the test, in place of the server's: the search path finds the
/// test's function first.
async fn clock(database: &Database) -> PgConnectOptions {
    database
        .run(
            "CREATE TABLE clock (ahead interval NOT NULL); INSERT INTO clock VALUES ('0'); \
             CREATE FUNCTION clock_timestamp() RETURNS timestamptz VOLATILE LANGUAGE sql AS \
             'SELECT pg_catalog.clock_timestamp() + ahead FROM clock'",
        )
        .await;
    database.options().options([("search_path", format!("{}, pg_catalog", database.name()))])
}

async fn set_clock(database: &Database, seconds: i64) {
    database.run(format!("UPDATE clock SET ahead = '{seconds} seconds'")).await;
}

async fn entry(adapter: &PostgresAdapter, id: &str) -> Entry {
    adapter.get(&dedup_key(id)).await.unwrap().unwrap()
}

/// The store's clock is an hour behind the application's, then an hour ahead. If the adapter
/// compared a time of the application with a time of the store, leases would lapse at once, or
/// never.
#[tokio::test]
async fn leases_and_retention_follow_the_clock_of_the_store() {
    for hours in [-1, 1] {
        let database = Database::fresh().await;
        let options = clock(&database).await;
        let pool = database.pool_with(3, options);
        let adapter = PostgresAdapter::new(pool.clone());
        let start = hours * 3_600;
        set_clock(&database, start).await;
        let store_now = || {
            let now = SystemTime::now();
            if hours < 0 { now - HOUR } else { now + HOUR }
        };
        let (mine, before) = (terms(), store_now());
        let set = ["a", "b", "c"].map(dedup_key);
        let claimed = claim_all(&adapter, &set, &mine).await.unwrap();
        assert_eq!(claimed, vec![FIRST; 3]);
        let keys = [dedup_key("transactional")];
        claim_all(&adapter, &keys, &mine).await.unwrap();
        complete_in(&pool, &adapter, &keys, &mine).await;
        assert_eq!(adapter.claim(&dedup_key("recorded"), &on_claim(&mine)).await.unwrap(), FIRST);
        // Times are reported as the store knows them, within the duration of a test.
        let told = entry(&adapter, "a").await;
        let lease_until = told.lease_until.unwrap();
        for (time, after) in [(lease_until, MINUTE), (told.expires_at, DAY)] {
            let since = time.duration_since(before).unwrap();
            assert!(since >= after - SECOND && since < after + MINUTE * 10, "{since:?}");
        }

        // The lease has a second left.
        set_clock(&database, start + 30).await;
        let claimed = claim_all(&adapter, &set, &terms()).await.unwrap();
        assert_eq!(claimed, vec![ClaimReply::InFlight; 3]);
        assert_eq!(adapter.forget(&dedup_key("a")).await.unwrap(), ForgetReply::InFlight);
        assert_eq!(adapter.renew(&dedup_key("b"), &mine).await.unwrap(), RenewReply::Held);
        assert_eq!(adapter.complete(&dedup_key("c"), &mine).await.unwrap(), CompleteReply::Held);
        // The lease has lapsed, except the renewed one.
        set_clock(&database, start + 61).await;
        let others = terms();
        let claimed = claim_all(&adapter, &set, &others).await.unwrap();
        assert_eq!(claimed[..2], [ClaimReply::first(2, true), ClaimReply::InFlight]);
        assert!(matches!(claimed[2], ClaimReply::Duplicate(_)));

        // Every key is remembered for a day of the store's time, by every ledger.
        set_clock(&database, start + 86_400 - 600).await;
        assert_eq!(adapter.purge(100).await.unwrap(), 0);
        for id in ["c", "recorded", "transactional"] {
            let claimed = adapter.claim(&dedup_key(id), &terms()).await.unwrap();
            assert!(matches!(claimed, ClaimReply::Duplicate(_)), "{id}: {claimed:?}");
        }
        set_clock(&database, start + 86_400 + 61 * 2).await;
        assert_eq!(
            adapter.claim(&dedup_key("c"), &terms()).await.unwrap(),
            ClaimReply::first(1, false)
        );
        // The other keys have expired with their leases.
        set_clock(&database, start + 86_400 + 61 * 2 + 3_600).await;
        assert_eq!(adapter.purge(100).await.unwrap(), 4);
        assert_eq!(rows(&adapter).await, 1);
    }
}

/// An insertion may find a row that was committed after its statement began. The statement itself
/// cannot read that row.
#[tokio::test]
async fn claim_meets_a_row_that_was_committed_since_its_statement_began() {
    let database = Database::fresh().await;
    for case in ["claim", "claims of a batch", "record", "record_in"] {
        let adapter = PostgresAdapter::with_options(database.pool(3), PostgresOptions::new());
        adapter.migrate().await.unwrap();
        database.run("TRUNCATE webhook_deliveries").await;
        let key = dedup_key("a");
        let gate = database.gate("BEFORE INSERT ON webhook_deliveries").await;
        let call = tokio::spawn({
            let (adapter, pool) = (adapter.clone(), database.pool(1));
            async move {
                match case {
                    "record" => {
                        let recorded = adapter.claim(&key, &on_claim(&terms())).await.unwrap();
                        matches!(recorded, ClaimReply::Duplicate(_))
                    }
                    "record_in" => {
                        let mut transaction = pool.begin().await.unwrap();
                        let recorded = adapter.record_in(&mut transaction, &key, DAY).await;
                        matches!(recorded.unwrap(), ClaimReply::Duplicate(_))
                    }
                    // The first key blocks, and the second one was looked up before.
                    "claims of a batch" => {
                        let keys = [dedup_key("0"), key];
                        let claimed = claim_all(&adapter, &keys, &terms()).await.unwrap();
                        matches!(claimed[..], [FIRST, ClaimReply::Duplicate(_)])
                    }
                    _ => {
                        let claimed = adapter.claim(&key, &terms()).await.unwrap();
                        matches!(claimed, ClaimReply::Duplicate(_))
                    }
                }
            }
        });
        database.until_sessions(AT_A_GATE, 1).await;
        // Through a connection that no trigger blocks.
        database
            .run(
                "SET session_replication_role = replica; INSERT INTO webhook_deliveries \
                 (key, namespace, id, attempts, takeover, first_seen_at, completed_at, expires_at) \
                 SELECT encode(substring(sha256(convert_to(E'test\\na', 'UTF8')) from 1 for 16), \
                 'hex')::uuid, 'test', 'a', 1, false, now(), now(), now() + interval '1 day'; \
                 RESET session_replication_role",
            )
            .await;
        drop(gate);
        assert!(call.await.unwrap(), "{case}");
        database.run("DROP TABLE webhook_deliveries, webhook_deliveries_schema").await;
    }
}
