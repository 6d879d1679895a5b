//! The transactional ledger on Postgres under settings of a role.

use std::time::Duration;

use http::Request;
use sqlx::{AssertSqlSafe, Executor, PgConnection};
use tower::Layer;
use tower_dedup::DedupLayer;
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, DedupAdapter, Token};
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions, TransactionAdapter};

use super::postgres_races::record_in;
use crate::support::effects::{
    Database, MINUTE, apart, lend, transactional, until_acknowledged, write,
};
use crate::support::{Body, FIRST, answered, by_header, dedup_key, request, send};

/// Acknowledged writes wait for the disk, and for the disk of a synchronous standby, although
/// commits of the role do not. COMMIT itself reads the setting. A stronger setting stays.
/// Without a synchronous standby, claims under a lease do not wait, unless `durable_claims` is set.
#[tokio::test]
async fn complete_key_is_committed_to_disk() {
    for (setting, found) in [
        ("off", "on"),
        ("local", "on"),
        ("remote_write", "on"),
        ("on", "on"),
        ("remote_apply", "remote_apply"),
    ] {
        let database = Database::fresh().await;
        let pool = database.pool_set(3, &[("synchronous_commit", setting)]);
        let options = PostgresOptions::new().durable_claims(true);
        let adapter = PostgresAdapter::with_options(pool.clone(), options);
        adapter.migrate().await.unwrap();
        database
            .run(
                "CREATE TABLE commits (complete bool, setting text); \
                 CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                 INSERT INTO commits \
                 SELECT NEW.completed_at IS NOT NULL, current_setting('synchronous_commit'); \
                 RETURN NEW; END $$; \
                 CREATE CONSTRAINT TRIGGER look AFTER INSERT OR UPDATE ON webhook_deliveries \
                 INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION look()",
            )
            .await;
        // The handler may change the setting of the role.
        let handler = tower::service_fn(move |request: Request<Body>| async move {
            let again = AssertSqlSafe(format!("SET synchronous_commit = {setting}"));
            lend(&request).await.execute(sqlx::raw_sql(again)).await.unwrap();
            write(request).await
        });
        until_acknowledged(&transactional(&pool).layer(handler), "transactional").await;
        let mut transaction = pool.begin().await.unwrap();
        let recorded = adapter.record_in(&mut transaction, &dedup_key("user's"), MINUTE).await;
        assert_eq!(recorded.unwrap(), FIRST);
        transaction.commit().await.unwrap();
        let service = DedupLayer::on_arrival(by_header(), adapter.clone());
        until_acknowledged(&service.layer(apart(&database)), "on arrival").await;
        let service = DedupLayer::new(by_header(), adapter.clone());
        until_acknowledged(&service.layer(apart(&database)), "lease").await;
        let commits = async || -> Vec<(bool, String)> {
            let all = sqlx::query_as("SELECT DISTINCT * FROM commits ORDER BY 1, 2");
            all.fetch_all(database.effects.pool()).await.unwrap()
        };
        assert_eq!(commits().await, [false, true].map(|complete| (complete, found.to_owned())));

        let service = DedupLayer::new(by_header(), PostgresAdapter::new(pool.clone()));
        database.run("TRUNCATE commits").await;
        until_acknowledged(&service.layer(apart(&database)), "asynchronous").await;
        assert_eq!(commits().await, [(false, "off".to_owned()), (true, found.to_owned())]);
    }
}

async fn shows(connection: &mut PgConnection) -> String {
    sqlx::query_scalar("SHOW lock_timeout").fetch_one(connection).await.unwrap()
}

/// The user's settings bound the handler's waits; the limits of a claim do not apply there.
#[tokio::test]
async fn lock_timeout_of_the_user_applies_in_the_handler() {
    for setting in ["7s", "0"] {
        let database = Database::fresh().await;
        let pool = database.pool_set(3, &[("lock_timeout", setting)]);
        let adapter = PostgresAdapter::new(pool.clone());
        let (found, mut finds) = tokio::sync::mpsc::unbounded_channel();
        let service =
            transactional(&pool).layer(tower::service_fn(move |request: Request<Body>| {
                let found = found.clone();
                async move {
                    found.send(shows(&mut *lend(&request).await).await).unwrap();
                    write(request).await
                }
            }));
        // A new row, a row that was released, a row that is taken over.
        for (id, lease) in [("released", MINUTE), ("lapsed", Duration::ZERO)] {
            let claimed = CallTerms::on_completion(Token::random(), MINUTE, lease);
            adapter.claim(&dedup_key(id), &claimed).await.unwrap();
            if lease == MINUTE {
                adapter.release(&dedup_key(id), &claimed).await.unwrap();
            }
        }
        for id in ["new", "released", "lapsed"] {
            until_acknowledged(&service, id).await;
            assert_eq!(finds.recv().await.unwrap(), setting, "{id}");
        }
        let mut one = pool.begin().await.unwrap();
        let mut other = pool.begin().await.unwrap();
        assert_eq!(record_in(&adapter, &mut one).await, FIRST);
        assert_eq!(record_in(&adapter, &mut other).await, ClaimReply::InFlight);
        assert_eq!([shows(&mut one).await, shows(&mut other).await], [setting; 2]);
        one.commit().await.unwrap();
        assert!(matches!(record_in(&adapter, &mut other).await, ClaimReply::Duplicate(_)));
        assert_eq!(shows(&mut other).await, setting);
        other.rollback().await.unwrap();
    }
}
/// A trigger skips the UPDATE, as if another claim had taken the row after it was read.
#[tokio::test]
async fn lock_timeout_of_the_user_is_restored_after_a_claim_that_finds_the_row_taken() {
    let database = Database::fresh().await;
    let pool = database.pool_set(3, &[("lock_timeout", "7s")]);
    let adapter = PostgresAdapter::new(pool.clone());
    for id in ["event", "a"] {
        let claimed = CallTerms::on_completion(Token::random(), MINUTE, MINUTE);
        adapter.claim(&dedup_key(id), &claimed).await.unwrap();
        adapter.release(&dedup_key(id), &claimed).await.unwrap();
    }
    let skip = "CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                RETURN NULL; END $$; CREATE TRIGGER skip BEFORE UPDATE ON webhook_deliveries \
                FOR EACH ROW EXECUTE FUNCTION skip()";
    database.run(skip).await;
    let mut users = pool.begin().await.unwrap();
    assert_eq!(record_in(&adapter, &mut users).await, ClaimReply::InFlight);
    assert_eq!(shows(&mut users).await, "7s");
    users.rollback().await.unwrap();

    // Another key of the delivery is granted, so its handler runs.
    let terms = CallTerms::on_completion(Token::random(), MINUTE, MINUTE);
    let opened = adapter.open(&[dedup_key("a"), dedup_key("b")], &terms).await.unwrap();
    assert_eq!(opened.replies, [ClaimReply::InFlight, FIRST]);
    let mut transaction = opened.transaction.unwrap();
    assert_eq!(shows(transaction.connection()).await, "7s");
    adapter.rollback(transaction).await.unwrap();
}

/// The completion exceeds `statement_timeout`.
#[tokio::test]
async fn completion_that_takes_too_long_is_no_success() {
    let database = Database::fresh().await;
    PostgresAdapter::new(database.pool(1)).migrate().await.unwrap();
    let pool = database.pool_set(2, &[("statement_timeout", "1s")]);
    let service = transactional(&pool).store_timeout(MINUTE / 2).layer(tower::service_fn(write));
    let gate = database.gate("BEFORE UPDATE ON webhook_deliveries").await;
    let answer = send(&service, request("a")).await;
    assert_eq!(answered(&answer), (503, Some("unavailable")));
    assert_eq!(database.effects_and_key("a").await, 0);
    drop(gate);
    until_acknowledged(&service, "a").await;
    assert_eq!(database.effects_and_key("a").await, 1);
    database.until_no_transaction_is_open().await;
}
