//! What the function replies for each state of a row, and what it refuses.

use sqlx::{Connection, PgConnection};
use tower_dedup::DedupKey;
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, DedupAdapter, Token};
use tower_dedup::adapter::inspect::{ForgetReply, MaintenanceAdapter};
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions};

use super::{Database, HOUR, record};
use crate::postgres::Server;

fn code<T>(result: Result<T, sqlx::Error>) -> String {
    let error = result.err().expect("an error");
    error.as_database_error().and_then(|error| error.code()).expect("a SQLSTATE").into_owned()
}

/// Records a key in a transaction of its own, and commits.
async fn recorded(database: &Database, id: &str) -> String {
    let mut tx = database.pool.begin().await.unwrap();
    let outcome = record(&mut tx, "shop", id).await.unwrap();
    tx.commit().await.unwrap();
    outcome
}

#[tokio::test]
async fn invalid_argument_is_refused() {
    let database = Database::fresh().await;
    let call = |arguments: &str| {
        let sql = format!("SELECT webhook_deliveries_record({arguments})");
        let pool = database.pool.clone();
        async move { code(sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&pool).await) }
    };
    for arguments in ["NULL, 'a', 1", "'n', NULL, 1", "'n', 'a', NULL"] {
        assert_eq!(call(arguments).await, "22004", "{arguments}");
    }
    for arguments in [
        "'n', '', 1",
        "'', 'a', 1",
        "repeat('n', 65), 'a', 1",
        "repeat(U&'\\00e9', 33), 'a', 1",
        "E'a\\nb', 'a', 1",
        "U&'\\0085', 'a', 1",
        "E'\\x7f', 'a', 1",
        "'n', 'a', 0",
        "'n', 'a', -1",
        "'n', 'a', 'NaN'",
    ] {
        assert_eq!(call(arguments).await, "22023", "{arguments}");
    }
    let mut tx = database.pool.begin().await.unwrap();
    let forever = "SELECT webhook_deliveries_record('n', 'a', 'Infinity')";
    let outcome: String = sqlx::query_scalar(forever).fetch_one(&mut *tx).await.unwrap();
    assert_eq!(outcome, "first");
}

#[tokio::test]
async fn free_row_is_taken_and_another_is_not() {
    let database = Database::fresh().await;
    let adapter = database.adapter();
    let key = |id| DedupKey::new("shop", id).unwrap();
    let run = |sql: &'static str| {
        let pool = database.pool.clone();
        async move { sqlx::query(sql).execute(&pool).await.unwrap().rows_affected() }
    };
    let terms = CallTerms::on_completion(Token::random(), HOUR, HOUR / 60);
    for id in ["live", "lapsed", "released", "forgotten"] {
        adapter.claim(&key(id), &terms).await.unwrap();
    }
    assert_eq!(run("UPDATE webhook_deliveries SET version = version + 1, lease_until = now() - interval '1 s' \
        WHERE id IN ('lapsed', 'forgotten')").await, 2);
    adapter.release(&key("released"), &terms).await.unwrap();
    adapter.forget(&key("forgotten")).await.unwrap();
    for (id, outcome) in [
        ("live", "in_flight"),
        ("lapsed", "first"),
        ("released", "first"),
        ("forgotten", "first"),
        ("new", "first"),
    ] {
        assert_eq!(recorded(&database, id).await, outcome, "{id}");
    }
    for id in ["lapsed", "released", "forgotten", "new"] {
        assert_eq!(recorded(&database, id).await, "duplicate", "{id}");
        let claimed = adapter.claim(&key(id), &CallTerms::on_claim(Token::random(), HOUR)).await;
        assert!(matches!(claimed.unwrap(), ClaimReply::Duplicate(_)), "{id}");
        // A late message of the earlier claim changes nothing.
        adapter.release(&key(id), &terms).await.unwrap();
        assert_eq!(recorded(&database, id).await, "duplicate", "{id}");
    }
    run("UPDATE webhook_deliveries SET expires_at = now() WHERE id = 'new'").await;
    assert_eq!(recorded(&database, "new").await, "first");
    let taken = "SELECT id || attempts || takeover FROM webhook_deliveries ORDER BY id";
    let taken: Vec<String> = sqlx::query_scalar(taken).fetch_all(&database.pool).await.unwrap();
    assert_eq!(
        taken,
        ["forgotten1false", "lapsed2true", "live1false", "new1false", "released2false"]
    );
}

/// A layer takes the row between the function's read and its write.
#[tokio::test]
async fn row_that_another_claim_takes_meanwhile_is_not_taken() {
    let database = Database::fresh().await;
    let adapter = database.adapter();
    let key = DedupKey::new("shop", "a").unwrap();
    let terms = CallTerms::on_completion(Token::random(), HOUR, HOUR);
    adapter.claim(&key, &terms).await.unwrap();
    adapter.release(&key, &terms).await.unwrap();
    let mut claim = database.pool.begin().await.unwrap();
    let lease = "UPDATE webhook_deliveries SET version = version + 1, token = gen_random_uuid(), \
        lease_until = now() + interval '1 h'";
    sqlx::query(lease).execute(&mut *claim).await.unwrap();
    let pool = database.pool.clone();
    let recording = tokio::spawn(async move {
        let mut tx = pool.begin().await.unwrap();
        record(&mut tx, "shop", "a").await.unwrap()
    });
    let waits = "SELECT EXISTS (SELECT FROM pg_stat_activity \
        WHERE datname = current_database() AND wait_event = 'transactionid')";
    while !recording.is_finished() {
        if sqlx::query_scalar(waits).fetch_one(&database.pool).await.unwrap() {
            break;
        }
    }
    claim.commit().await.unwrap();
    assert_eq!(recording.await.unwrap(), "in_flight");
}

/// The lock alone decides, so nobody waits for the row of an open transaction. The adapter knows the lock.
#[tokio::test]
async fn key_whose_lock_is_held_is_in_flight() {
    let database = Database::fresh().await;
    let mut open = database.pool.begin().await.unwrap();
    let lock = "SELECT pg_advisory_xact_lock( \
        ('x' || substr(encode(sha256(convert_to(E'shop\\na', 'UTF8')), 'hex'), 17, 16))::bit(64)::int8 \
        # 'webhook_deliveries'::regclass::oid::int8)";
    sqlx::query(lock).execute(&mut *open).await.unwrap();
    let mut other = database.pool.begin().await.unwrap();
    assert_eq!(record(&mut other, "shop", "a").await.unwrap(), "in_flight");
    // It holds nothing, so its own transaction goes on.
    assert_eq!(record(&mut other, "shop", "b").await.unwrap(), "first");
    let key = |id| DedupKey::new("shop", id).unwrap();
    let (adapter, forget) = (database.adapter(), ForgetReply::InFlight);
    assert_eq!(adapter.forget(&key("b")).await.unwrap(), forget);
    open.rollback().await.unwrap();
    assert_eq!(record(&mut other, "shop", "a").await.unwrap(), "first");
    other.commit().await.unwrap();
}

/// The row of a transaction that has no lock of the key's: it waits for that row, and keeps no lock after that.
#[tokio::test]
async fn key_of_a_row_without_a_lock_is_in_flight_after_a_bound() {
    let database = Database::fresh().await;
    recorded(&database, "a").await;
    let mut open = database.pool.begin().await.unwrap();
    let insert = "INSERT INTO webhook_deliveries SELECT \
        left(encode(sha256(convert_to(E'shop\\nb', 'UTF8')), 'hex'), 32)::uuid, 1, 'shop', 'b', token, \
        lease_until, attempts, takeover, first_seen_at, completed_at, expires_at FROM webhook_deliveries";
    sqlx::query(insert).execute(&mut *open).await.unwrap();
    let mut other = database.pool.begin().await.unwrap();
    sqlx::query("SET LOCAL statement_timeout = '20s'").execute(&mut *other).await.unwrap();
    assert_eq!(record(&mut other, "shop", "b").await.unwrap(), "in_flight");
    let locks =
        "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'";
    let locks: i64 = sqlx::query_scalar(locks).fetch_one(&mut *other).await.unwrap();
    assert_eq!(locks, 0);
    open.rollback().await.unwrap();
    // The transaction goes on.
    assert_eq!(record(&mut other, "shop", "b").await.unwrap(), "first");
    other.commit().await.unwrap();

    let mut ddl = database.pool.begin().await.unwrap();
    sqlx::query("LOCK TABLE webhook_deliveries").execute(&mut *ddl).await.unwrap();
    let mut other = database.pool.begin().await.unwrap();
    sqlx::query("SET LOCAL statement_timeout = '20s'").execute(&mut *other).await.unwrap();
    assert_eq!(record(&mut other, "shop", "c").await.unwrap(), "in_flight");
}

/// A session keeps the plan that it made for a small table, while the table grows.
#[tokio::test]
async fn function_reads_a_small_table_by_its_index() {
    let database = Database::fresh().await;
    recorded(&database, "a").await;
    sqlx::query("ANALYZE webhook_deliveries").execute(&database.pool).await.unwrap();
    let mut tx = database.pool.begin().await.unwrap();
    // With those of the session's earlier transactions.
    let scans = "SELECT coalesce(max(seq_scan), 0) FROM pg_stat_xact_user_tables \
        WHERE relid = 'webhook_deliveries'::regclass";
    let before: i64 = sqlx::query_scalar(scans).fetch_one(&mut *tx).await.unwrap();
    for _ in 0..10 {
        assert_eq!(record(&mut tx, "shop", "a").await.unwrap(), "duplicate");
    }
    let after: i64 = sqlx::query_scalar(scans).fetch_one(&mut *tx).await.unwrap();
    assert_eq!(after, before);
}

/// It would answer for keys that its primary may lose.
#[tokio::test]
async fn standby_answers_nothing() {
    let primary = Server::start();
    let options = PostgresOptions::new().record_function(true);
    let adapter = PostgresAdapter::connect_with(&primary.url(), options).await.unwrap();
    adapter.migrate().await.unwrap();
    let mut session = PgConnection::connect(&primary.url()).await.unwrap();
    assert_eq!(record(&mut session, "shop", "a").await.unwrap(), "first");
    let standby = primary.standby();
    let mut session = PgConnection::connect(&standby.url()).await.unwrap();
    assert_eq!(code(record(&mut session, "shop", "a").await), "25006");
}

/// Whatever the session is set to, the COMMIT waits for the disk, and the caller's settings come back.
#[tokio::test]
async fn settings_are_durable_and_local_to_the_transaction() {
    let database = Database::fresh().await;
    for (before, within) in [
        ("off", "on"),
        ("local", "on"),
        ("remote_write", "on"),
        ("on", "on"),
        ("remote_apply", "remote_apply"),
    ] {
        let mut session = database.pool.acquire().await.unwrap();
        for (name, value) in [("synchronous_commit", before), ("lock_timeout", "7s")] {
            let set = sqlx::query("SELECT set_config($1, $2, false)").bind(name).bind(value);
            set.execute(&mut *session).await.unwrap();
        }
        let show =
            "SELECT current_setting('synchronous_commit') || current_setting('lock_timeout')";
        sqlx::query("BEGIN").execute(&mut *session).await.unwrap();
        assert_eq!(record(&mut session, "shop", before).await.unwrap(), "first");
        let shown: String = sqlx::query_scalar(show).fetch_one(&mut *session).await.unwrap();
        assert_eq!(shown, format!("{within}7s"));
        sqlx::query("COMMIT").execute(&mut *session).await.unwrap();
        let shown: String = sqlx::query_scalar(show).fetch_one(&mut *session).await.unwrap();
        assert_eq!(shown, format!("{before}7s"));
        session.close().await.unwrap();
    }
}

#[tokio::test]
async fn rollback_to_a_savepoint_frees_the_key() {
    let database = Database::fresh().await;
    let mut tx = database.pool.begin().await.unwrap();
    sqlx::query("SAVEPOINT s").execute(&mut *tx).await.unwrap();
    assert_eq!(record(&mut tx, "shop", "a").await.unwrap(), "first");
    assert_eq!(record(&mut tx, "shop", "a").await.unwrap(), "duplicate");
    sqlx::query("ROLLBACK TO s").execute(&mut *tx).await.unwrap();
    assert_eq!(recorded(&database, "a").await, "first");
}

/// Where the snapshot is older than the winner's COMMIT, the function fails, and never replies `first`.
#[tokio::test]
async fn old_snapshot_is_a_serialization_failure() {
    let database = Database::fresh().await;
    let adapter = database.adapter();
    let terms = CallTerms::on_completion(Token::random(), HOUR, HOUR);
    for (number, level) in ["REPEATABLE READ", "SERIALIZABLE"].into_iter().enumerate() {
        for known in [false, true] {
            let id = format!("{number}{known}");
            if known {
                let key = DedupKey::new("shop", &id).unwrap();
                adapter.claim(&key, &terms).await.unwrap();
                adapter.release(&key, &terms).await.unwrap();
            }
            let begin = sqlx::AssertSqlSafe(format!("BEGIN ISOLATION LEVEL {level}"));
            let mut old = database.pool.begin_with(begin).await.unwrap();
            sqlx::query("SELECT count(*) FROM webhook_deliveries")
                .execute(&mut *old)
                .await
                .unwrap();
            assert_eq!(recorded(&database, &id).await, "first");
            assert_eq!(code(record(&mut old, "shop", &id).await), "40001", "{level} {known}");
        }
    }
}
