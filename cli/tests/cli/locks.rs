//! A table that is locked.

use sqlx::{AssertSqlSafe, Connection, PgConnection, SqliteConnection};

use crate::command::{doctor, execute, run};
use crate::keys::Place;
use support::postgres::Schema;

/// A lock that another session holds ends no wait; `--timeout` does.
#[tokio::test]
async fn locked_table_is_waited_for_until_the_timeout() {
    let schema = Schema::fresh();
    let url = schema.url();
    run(&url, &["migrate"]).await.assert(0, "made");
    execute(&url, "CREATE TABLE webhook_inbox ()").await;
    let mut connection = PgConnection::connect(&url).await.unwrap();
    let mut lock = connection.begin().await.unwrap();
    let sql = "LOCK TABLE webhook_deliveries_schema, webhook_inbox IN ACCESS EXCLUSIVE MODE";
    sqlx::raw_sql(sql).execute(&mut *lock).await.unwrap();
    for args in [&["get", "test", "a"][..], &["stats"], &["migrate", "--check"]] {
        let ran = run(&url, &[args, &["--timeout", "300ms"]].concat()).await;
        ran.assert(3, "timed out");
    }
    let ran = run(&url, &["doctor", "--timeout", "300ms"]).await;
    ran.assert(1, "cannot be read: preparing the Postgres schema: the store timed out");
    ran.assert(1, "the table of the inbox cannot be read: counting rows: the store timed out");
    lock.rollback().await.unwrap();
    run(&url, &["stats", "--timeout", "10s"]).await.assert(0, "rows");
}

/// No delivery is claimed beside these locks, although some of them let a statement read.
#[tokio::test]
async fn doctor_finds_a_lock_that_is_in_the_way_of_every_write() {
    let locked = async |place: &Place| {
        let ran = place.run(&["doctor", "--json", "--timeout", "300ms"]).await;
        ran.assert_finding("lock", "error", "no write gets its lock");
    };
    let [sqlite, postgres] = Place::both();
    for place in [&sqlite, &postgres] {
        place.run(&["migrate"]).await.assert(0, "made");
        doctor(&place.url).await.assert_finding("lock", "ok", "a write gets its lock");
    }
    let mut connection = PgConnection::connect(&postgres.url).await.unwrap();
    for mode in ["ACCESS EXCLUSIVE", "EXCLUSIVE", "SHARE ROW EXCLUSIVE", "SHARE"] {
        let mut lock = connection.begin().await.unwrap();
        let sql = format!("LOCK TABLE webhook_deliveries IN {mode} MODE");
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *lock).await.unwrap();
        locked(&postgres).await;
        lock.rollback().await.unwrap();
    }
    // As a batch of the service has it.
    let mut lock = connection.begin().await.unwrap();
    let sql = "LOCK TABLE webhook_deliveries IN ROW EXCLUSIVE MODE";
    sqlx::raw_sql(sql).execute(&mut *lock).await.unwrap();
    doctor(&postgres.url).await.assert_finding("lock", "ok", "a write gets its lock");

    let mut connection = SqliteConnection::connect(&sqlite.url).await.unwrap();
    sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut connection).await.unwrap();
    locked(&sqlite).await;
}
