//! Time passes for a database when the times in it move back.

use std::time::Duration;

use sqlx::{AssertSqlSafe, PgConnection, SqliteConnection};

pub(crate) async fn age_file(connection: &mut SqliteConnection, by: Duration) {
    sqlx::query(
        "UPDATE webhook_deliveries SET lease_until = lease_until - ?1, \
         first_seen_at = first_seen_at - ?1, completed_at = completed_at - ?1, \
         expires_at = expires_at - ?1",
    )
    .bind(i64::try_from(by.as_millis()).unwrap())
    .execute(connection)
    .await
    .unwrap();
}

pub(crate) async fn age_schema(connection: &mut PgConnection, schema: &str, by: Duration) {
    let sql = format!(
        "UPDATE {schema}.webhook_deliveries SET lease_until = lease_until - $1 * interval '1 s', \
         first_seen_at = first_seen_at - $1 * interval '1 s', \
         completed_at = completed_at - $1 * interval '1 s', \
         expires_at = expires_at - $1 * interval '1 s'"
    );
    let update = sqlx::query(AssertSqlSafe(sql)).bind(by.as_secs_f64());
    update.execute(connection).await.unwrap();
}
