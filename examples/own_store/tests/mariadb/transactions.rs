//! What a completion does that is executed elsewhere than at the end of a handler's transaction.

use std::time::Duration;

use sqlx::mysql::MySqlConnection;
use sqlx::{AssertSqlSafe, Connection, Executor};
use tower_dedup::DedupKey;
use tower_dedup::adapter::contract::{CallTerms, Completion, DedupAdapter, Token};
use tower_dedup_conformance::Store;

use crate::server::Database;

async fn claimed(database: &Database, id: &str) -> (DedupKey, CallTerms, Completion) {
    let key = DedupKey::new("shop", id).unwrap();
    let terms = CallTerms::on_completion(
        Token::random(),
        Duration::from_secs(600),
        Duration::from_secs(60),
    );
    let adapter = database.adapter();
    adapter.claim(&key, &terms).await.unwrap();
    let completion = adapter.completion(&[(&key, &terms)]).unwrap();
    (key, terms, completion)
}

async fn complete(connection: &mut MySqlConnection, completion: &Completion) -> Result<(), String> {
    let complete = sqlx::query(AssertSqlSafe(completion.sql().to_owned()));
    let completed = complete.bind(completion.parameter()).execute(connection).await;
    completed.map(drop).map_err(|error| error.to_string())
}

/// Alone, it would complete the event without the effect. So it is refused on a connection in no transaction: another
/// connection than the handler's, and one whose transaction has ended by a COMMIT that nobody wrote.
#[tokio::test]
async fn completion_outside_of_a_transaction_is_refused() {
    let database = Database::create().await;
    database.execute("CREATE TABLE effects (id VARCHAR(255))").await;
    let (key, terms, completion) = claimed(&database, "a").await;
    let mut connection = database.connection().await;
    let refused = complete(&mut connection, &completion).await.unwrap_err();
    assert!(refused.contains("tower_dedup: this connection is in no transaction"), "{refused}");
    connection.execute("BEGIN").await.unwrap();
    connection.execute("INSERT INTO effects VALUES ('a')").await.unwrap();
    connection.execute("CREATE TABLE other (id INT)").await.unwrap();
    let refused = complete(&mut connection, &completion).await.unwrap_err();
    assert!(refused.contains("in no transaction"), "DDL commits: {refused}");
    assert!(!database.adapter().is_complete(&key, &terms).await.unwrap());
}

/// The text says what happened. It undoes the statement and not the transaction, so the handler must return the error.
#[tokio::test]
async fn refused_completion_names_its_reason_and_leaves_the_transaction_open() {
    let database = Database::create().await;
    database.execute("CREATE TABLE effects (id VARCHAR(255))").await;
    let (key, terms, completion) = claimed(&database, "a").await;
    database.adapter().complete(&key, &terms).await.unwrap();
    let mut connection = database.connection().await;
    connection.execute("BEGIN").await.unwrap();
    connection.execute("INSERT INTO effects VALUES ('a')").await.unwrap();
    let refused = complete(&mut connection, &completion).await.unwrap_err();
    assert!(refused.contains("tower_dedup: an event is complete or has no row"), "{refused}");
    let effects: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM effects")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(effects, 1, "an ignored refusal would commit a second effect");
    connection.close().await.unwrap();
}

/// The handler's session has another time zone, modes and database than those of the store.
#[tokio::test]
async fn completion_needs_no_settings_of_the_session() {
    let database = Database::create().await;
    let (key, terms, completion) = claimed(&database, "a").await;
    let mut connection = database.connection().await;
    for setting in [
        "SET @@session.sql_mode = 'ANSI,NO_UNSIGNED_SUBTRACTION,SIMULTANEOUS_ASSIGNMENT', \
         @@session.time_zone = '-11:00', @@session.autocommit = 0",
        "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE",
        "USE information_schema",
    ] {
        connection.execute(setting).await.unwrap();
    }
    // Without BEGIN: each statement is in a transaction.
    complete(&mut connection, &completion).await.unwrap();
    connection.execute("COMMIT").await.unwrap();
    assert!(database.adapter().is_complete(&key, &terms).await.unwrap());
    let expires_in: i64 = sqlx::query_scalar(
        "SELECT CAST(expires_at / 1000 - UNIX_TIMESTAMP() AS SIGNED) FROM webhook_deliveries",
    )
    .fetch_one(&mut database.connection().await)
    .await
    .unwrap();
    assert!((500..=601).contains(&expires_in), "{expires_in}");
}
