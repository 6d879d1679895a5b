//! Handlers on Postgres that end their transaction or leak a savepoint.

use std::convert::Infallible;

use http::Request;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tower::Layer;
use tower_dedup::OnInFlight;
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::contract::DedupAdapter;

use crate::support::effects::{Database, answer, effect, lend, transactional};
use crate::support::{
    Body, FIRST, Handler, dedup_key, on_claim, polled, request, result, send, terms,
};

/// A handler that ends the transaction, or begins another one, is no success. Its connection is
/// clean afterwards.
#[tokio::test]
async fn handler_that_ends_its_transaction_is_no_success() {
    let database = Database::fresh().await;
    let pool = database.pool(2);
    let handler = tower::service_fn(async |request: Request<Body>| {
        let sql = request.headers()["webhook-id"].to_str().unwrap().to_owned();
        let mut tx = lend(&request).await;
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *tx).await.unwrap();
        effect(&mut tx, request.extensions().get().unwrap()).await.unwrap();
        Ok::<_, Infallible>(answer(true))
    });
    let layer = transactional(&pool).on_in_flight(OnInFlight::Reject);
    let service = layer.layer(handler);
    for sql in [
        "ROLLBACK",
        "ROLLBACK AND CHAIN",
        "ROLLBACK; BEGIN",
        "COMMIT",
        "COMMIT AND CHAIN",
        "COMMIT; BEGIN",
    ] {
        let answered = send(&service, request(sql)).await;
        assert_eq!(result(&answered), Some("uncommitted"), "{sql}");
        database.until_no_transaction_is_open().await;
        let complete = "SELECT count(*) FROM webhook_deliveries WHERE completed_at IS NOT NULL";
        let complete = sqlx::query_scalar::<_, i64>(complete).fetch_one(database.effects.pool());
        assert_eq!(complete.await.unwrap(), 0, "{sql}");
        // The effect is there only if the handler committed it by itself, or wrote it without a
        // transaction.
        let expected = i64::from(matches!(sql, "ROLLBACK" | "COMMIT"));
        assert_eq!(database.effects.of(sql).await, expected, "{sql}");
    }
    for sql in ["SELECT 1", "SAVEPOINT mine", "SAVEPOINT mine; ROLLBACK TO mine"] {
        assert_eq!(send(&service, request(sql)).await.status(), 200, "{sql}");
        assert_eq!(database.effects_and_key(sql).await, 1, "{sql}");
        database.until_no_transaction_is_open().await;
    }
}

/// Executes the words of a script. Returns `false` if they say that the handler fails.
async fn misuse(tx: &mut PgConnection, script: String) -> bool {
    for word in script.split(' ') {
        match word {
            "leak" => std::mem::forget(tx.begin().await.unwrap()),
            // sqlx returns the error of a dropped statement to the next one, which it does not send.
            "late-error" => dropped(tx, "SELECT pg_sleep(0.02); SELECT nonsense").await,
            // sqlx rolls the transaction back, and counts none.
            "unbegun" => {
                dropped(tx, "SELECT pg_sleep(0.02)").await;
                assert!(polled(tx.begin(), 1, false).await.is_none());
            }
            "fail" => return false,
            sql => drop(sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut *tx).await),
        }
    }
    true
}

async fn dropped(tx: &mut PgConnection, sql: &'static str) {
    assert!(polled(sqlx::raw_sql(sql).execute(tx), 1, false).await.is_none());
}

/// A handler leaks the guard of a savepoint or drops a `begin`, so sqlx counts one transaction too many or
/// too few. The pool must not get that connection back, because later writes on it are never committed. The
/// pool has one connection, and a caller waits for it throughout.
#[tokio::test]
async fn leaked_savepoint_leaves_no_connection_in_its_transaction() {
    let database = Database::fresh().await;
    let pool = database.pool(1);
    let adapter = PostgresAdapter::new(pool.clone());
    adapter.migrate().await.unwrap();
    let scripts = [
        "leak",
        "leak nonsense",
        "leak late-error",
        "leak ROLLBACK BEGIN",
        "unbegun",
        "unbegun BEGIN",
        "leak fail",
        "leak nonsense fail",
        "leak late-error fail",
        "leak ROLLBACK BEGIN fail",
        "unbegun fail",
        "unbegun BEGIN fail",
    ];
    for (script, complete) in scripts.into_iter().zip((5..).step_by(5)) {
        let held = Handler::default();
        held.hold();
        let handler = tower::service_fn({
            let held = held.clone();
            move |request: Request<Body>| {
                let held = held.clone();
                async move {
                    let script = request.headers()["webhook-id"].to_str().unwrap().to_owned();
                    let mut tx = lend(&request).await;
                    effect(&mut tx, request.extensions().get().unwrap()).await.unwrap();
                    let success = misuse(&mut tx, script).await;
                    held.run(request).await.unwrap();
                    Ok::<_, Infallible>(answer(success))
                }
            }
        });
        let service = transactional(&pool).layer(handler);
        let delivery = tokio::spawn(async move { send(&service, request(script)).await.status() });
        held.running(1).await;
        let records = (0..5).map(|record| {
            let (adapter, key) = (adapter.clone(), dedup_key(&format!("{script} {record}")));
            tokio::spawn(async move { adapter.claim(&key, &on_claim(&terms())).await.unwrap() })
        });
        let records: Vec<_> = records.collect();
        tokio::task::yield_now().await;
        held.release();
        assert_eq!(delivery.await.unwrap(), 500, "{script}");
        for record in records {
            assert_eq!(record.await.unwrap(), FIRST, "{script}");
        }
        let all = "SELECT count(completed_at) FROM webhook_deliveries";
        let all = sqlx::query_scalar::<_, i64>(all).fetch_one(database.effects.pool());
        assert_eq!(all.await.unwrap(), complete, "{script}");
        assert_eq!(database.effects.of(script).await, 0, "{script}");
        database.until_no_transaction_is_open().await;
    }
}
