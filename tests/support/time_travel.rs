//! Time passes for a database when the times in it move back.

use std::time::Duration;

use sqlx::{AssertSqlSafe, PgConnection, SqliteConnection};

pub(crate) async fn age_file(connection: &mut SqliteConnection, by: Duration) {
    shift_file(connection, -milliseconds(by)).await;
}

/// Moves all times by so many milliseconds.
pub(crate) async fn shift_file(connection: &mut SqliteConnection, by: i64) {
    sqlx::query(
        "UPDATE webhook_deliveries SET lease_until = lease_until + ?1, \
         first_seen_at = first_seen_at + ?1, completed_at = completed_at + ?1, \
         expires_at = expires_at + ?1",
    )
    .bind(by)
    .execute(connection)
    .await
    .unwrap();
}

pub(crate) async fn age_schema(connection: &mut PgConnection, schema: &str, by: Duration) {
    shift_schema(connection, schema, -milliseconds(by)).await;
}

/// Moves all times by so many milliseconds.
pub(crate) async fn shift_schema(connection: &mut PgConnection, schema: &str, by: i64) {
    let by_ms = "$1 * interval '1 ms'";
    let sql = format!(
        "UPDATE {schema}.webhook_deliveries SET lease_until = lease_until + {by_ms}, \
         first_seen_at = first_seen_at + {by_ms}, completed_at = completed_at + {by_ms}, \
         expires_at = expires_at + {by_ms}"
    );
    let update = sqlx::query(AssertSqlSafe(sql)).bind(by);
    update.execute(connection).await.unwrap();
}

pub(crate) fn milliseconds(by: Duration) -> i64 {
    i64::try_from(by.as_millis()).unwrap()
}
