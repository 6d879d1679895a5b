//! The transactional ledger on Postgres under settings and privileges of a role.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::Request;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Executor, PgConnection, PgPool};
use tower::Layer;
use tower_dedup::DedupLayer;
use tower_dedup::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply, Token,
};
use tower_dedup::adapter::inspect::{ForgetReply, MaintenanceAdapter};
use tower_dedup::adapter::{Identifier, PostgresAdapter, PostgresOptions, TransactionAdapter};

use super::postgres_races::{Deduplicated, record_in};
use crate::support::effects::{
    Database, MINUTE, answer, apart, effect, lend, transactional, until_acknowledged, write,
    writes_and_waits,
};
use crate::support::postgres::Server;
use crate::support::{
    Body, FIRST, Handler, by_header, claim_all, dedup_key, on_claim, request, result, rows, send,
    terms,
};

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

/// The server ends the session of an idle handler. The answer is no success, and the pool recovers.
#[tokio::test]
async fn session_ended_while_its_handler_is_idle_is_no_success() {
    let database = Database::fresh().await;
    PostgresAdapter::new(database.pool(1)).migrate().await.unwrap();
    let pool = database.pool_set(2, &[("idle_in_transaction_session_timeout", "500ms")]);
    let held = Handler::default();
    let service = transactional(&pool).layer(writes_and_waits(&held));
    for id in ["a", "b", "c", "d"] {
        held.hold();
        let delivery = tokio::spawn({
            let service = service.clone();
            async move { send(&service, request(id)).await.status() }
        });
        held.running(1).await;
        database.until_no_transaction_is_open().await;
        held.release();
        let answered = delivery.await.unwrap();
        assert!(answered.is_server_error(), "{answered}");
        assert_eq!(database.effects_and_key(id).await, 0);
        until_acknowledged(&service, id).await;
        assert_eq!(database.effects_and_key(id).await, 1);
    }
}

/// A statement exceeds `statement_timeout`: one of the handler, reported or not, or the completion.
#[tokio::test]
async fn statement_that_takes_too_long_is_no_success() {
    let database = Database::fresh().await;
    PostgresAdapter::new(database.pool(1)).migrate().await.unwrap();
    let pool = database.pool_set(2, &[("statement_timeout", "1s")]);
    let slow = Arc::new(AtomicBool::new(true));
    let handler = tower::service_fn({
        let slow = Arc::clone(&slow);
        move |request: Request<Body>| {
            let slow = slow.load(Ordering::SeqCst);
            async move {
                let is_for = |id| slow && request.headers()["webhook-id"] == id;
                let (told, swallowed) = (is_for("told"), is_for("swallowed"));
                let mut tx = lend(&request).await;
                let mut written = effect(&mut tx, request.extensions().get().unwrap()).await;
                if told || swallowed {
                    let ended = sqlx::query("SELECT pg_sleep(600)").execute(&mut *tx).await;
                    assert!(ended.is_err());
                    written = written.and(if told { ended.map(drop) } else { Ok(()) });
                }
                Ok::<_, Infallible>(answer(written.is_ok()))
            }
        }
    });
    let service = transactional(&pool).store_timeout(MINUTE / 2).layer(handler);
    for id in ["told", "swallowed", "completion"] {
        slow.store(true, Ordering::SeqCst);
        let gate = match id {
            "completion" => Some(database.gate("BEFORE UPDATE ON webhook_deliveries").await),
            _ => None,
        };
        let answered = send(&service, request(id)).await;
        let expected = match id {
            "told" => (500, None),
            "swallowed" => (500, Some("uncommitted")),
            _ => (503, Some("unavailable")),
        };
        assert_eq!((answered.status().as_u16(), result(&answered)), expected);
        assert_eq!(database.effects_and_key(id).await, 0);
        slow.store(false, Ordering::SeqCst);
        drop(gate);
        until_acknowledged(&service, id).await;
        assert_eq!(database.effects_and_key(id).await, 1);
        database.until_no_transaction_is_open().await;
    }
}

/// After migration, four privileges on the table suffice for every call.
#[tokio::test]
async fn role_needs_select_insert_update_and_delete_only() {
    let server = Server::start();
    let admin = PgPool::connect(&server.url()).await.unwrap();
    let place = || Identifier::new("keys").unwrap();
    PostgresAdapter::with_options(admin.clone(), PostgresOptions::new().schema(place()))
        .migrate()
        .await
        .unwrap();
    sqlx::raw_sql(
        "REVOKE ALL ON SCHEMA public FROM PUBLIC; REVOKE ALL ON DATABASE postgres FROM PUBLIC; \
         CREATE ROLE app LOGIN; GRANT CONNECT ON DATABASE postgres TO app; \
         GRANT USAGE ON SCHEMA keys TO app; GRANT SELECT, INSERT, UPDATE, DELETE \
         ON keys.webhook_deliveries, keys.webhook_deliveries_schema TO app",
    )
    .execute(&admin)
    .await
    .unwrap();
    let options: PgConnectOptions = server.url().parse().unwrap();
    let pool = PgPoolOptions::new().max_connections(3).connect_lazy_with(options.username("app"));
    let adapter =
        PostgresAdapter::with_options(pool.clone(), PostgresOptions::new().schema(place()));
    let refused = sqlx::query("CREATE TABLE keys.other ()").execute(&pool).await;
    assert!(refused.is_err(), "the role has too many privileges for this test");

    adapter.migrate().await.unwrap();
    let none = CallTerms::on_completion(Token::random(), MINUTE, Duration::ZERO);
    let ([a, b, c], mine) = (["a", "b", "c"].map(dedup_key), terms());
    assert_eq!(adapter.claim(&a, &on_claim(&mine)).await.unwrap(), FIRST);
    adapter.release(&a, &on_claim(&mine)).await.unwrap();
    assert_eq!(adapter.claim(&a, &mine).await.unwrap(), FIRST);
    assert_eq!(adapter.renew(&a, &mine).await.unwrap(), RenewReply::Held);
    assert_eq!(adapter.forget(&a).await.unwrap(), ForgetReply::InFlight);
    assert_eq!(adapter.complete(&a, &mine).await.unwrap(), CompleteReply::Held);
    assert_eq!(adapter.claim(&b, &none).await.unwrap(), FIRST);
    assert_eq!(adapter.claim(&b, &mine).await.unwrap(), ClaimReply::first(2, true));
    adapter.release(&b, &mine).await.unwrap();
    assert_eq!(adapter.forget(&b).await.unwrap(), ForgetReply::Removed);
    let brief = CallTerms::on_claim(Token::random(), Duration::ZERO);
    assert_eq!(adapter.claim(&c, &on_claim(&brief)).await.unwrap(), FIRST);
    let aged = "UPDATE keys.webhook_deliveries SET expires_at = now() - interval '1 hour' \
        WHERE id = 'c'";
    sqlx::query(aged).execute(&admin).await.unwrap();
    assert_eq!(adapter.purge(10).await.unwrap(), 1);
    assert!(adapter.get(&a).await.unwrap().is_some());
    // The row of the forgotten key stays for an hour.
    assert_eq!(rows(&adapter).await, 2);
    let mut transaction = pool.begin().await.unwrap();
    let key = dedup_key("d");
    assert_eq!(adapter.record_in(&mut transaction, &key, MINUTE).await.unwrap(), FIRST);
    // A batch looks up which of its keys is held.
    let claimed = claim_all(&adapter, &[b, key], &mine).await.unwrap();
    assert_eq!(claimed, [FIRST, ClaimReply::InFlight]);
    transaction.commit().await.unwrap();

    let handler = Handler::default().then(200).then(200).then(200).then(500);
    let services = [
        Deduplicated::new(DedupLayer::new(by_header(), adapter.clone()).layer(handler.service())),
        Deduplicated::new(
            DedupLayer::on_arrival(by_header(), adapter.clone()).layer(handler.service()),
        ),
        Deduplicated::new(
            DedupLayer::transactional(by_header(), adapter.clone()).layer(handler.service()),
        ),
    ];
    for (place, service) in services.iter().enumerate() {
        let id = place.to_string();
        assert_eq!(result(&send(service, request(&id)).await), None);
        assert_eq!(result(&send(service, request(&id)).await), Some("duplicate"));
    }
    assert_eq!(send(&services[2], request("fails")).await.status(), 500);
    // A session that a handler has broken is terminated.
    let spoils = tower::service_fn(async |request: Request<Body>| {
        lend(&request).await.execute("ROLLBACK").await.unwrap();
        Ok::<_, Infallible>(answer(true))
    });
    let service = DedupLayer::transactional(by_header(), adapter).layer(spoils);
    assert_eq!(result(&send(&service, request("spoilt")).await), Some("uncommitted"));
    assert_eq!(send(&services[2], request("spoilt")).await.status(), 200);
}
