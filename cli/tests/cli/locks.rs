//! A table that is locked.

use sqlx::{Connection, PgConnection};

use crate::command::run;
use support::postgres::Schema;

/// A lock that another session holds ends no wait; `--timeout` does.
#[tokio::test]
async fn locked_table_is_waited_for_until_the_timeout() {
    let schema = Schema::fresh();
    let url = schema.url();
    run(&url, &["migrate"]).await.assert(0, "made");
    let mut connection = PgConnection::connect(&url).await.unwrap();
    let mut lock = connection.begin().await.unwrap();
    let sql = "LOCK TABLE webhook_deliveries_schema IN ACCESS EXCLUSIVE MODE";
    sqlx::raw_sql(sql).execute(&mut *lock).await.unwrap();
    for args in [&["get", "test", "a"][..], &["stats"], &["migrate", "--check"]] {
        let ran = run(&url, &[args, &["--timeout", "300ms"]].concat()).await;
        ran.assert(3, "timed out");
    }
    let ran = run(&url, &["doctor", "--timeout", "300ms"]).await;
    ran.assert(1, "cannot be read: the store timed out");
    lock.rollback().await.unwrap();
    run(&url, &["stats", "--timeout", "10s"]).await.assert(0, "rows");
}
