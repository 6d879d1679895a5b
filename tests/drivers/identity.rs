//! A key is the same for the function and for the crate, in both directions.

use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tower_dedup::DedupKey;
use tower_dedup::adapter::contract::ClaimReply;
use tower_dedup::adapter::inspect::MaintenanceAdapter;
use tower_dedup::adapter::{Identifier, PostgresAdapter, PostgresOptions};

use super::{Database, HOUR, record};
use crate::postgres::with_path;

fn keys() -> Vec<(String, String)> {
    let mut ids: Vec<String> = [1, 254, 255, 256, 257, 10_000].map(|len| "k".repeat(len)).into();
    // 255 and 256 bytes in fewer characters.
    ids.extend(["\u{e9}".repeat(127) + "k", "\u{e9}".repeat(128), "\u{1d11e}".repeat(64)]);
    ids.extend(
        ["\u{1d11e}", "e\u{301}", "a\nb", "a\\n'b\"$1{table}", " ", "%", "\u{feff}\r\t"]
            .map(str::to_owned),
    );
    let names = ["shop", "a.b", "a/b:c|d", "a b", "a\\b'\"", "\u{e9}\u{a0}", &"n".repeat(64)];
    let pairs = ids.iter().flat_map(|id| names.iter().map(|name| ((*name).to_owned(), id.clone())));
    // With another separator, these would be one key.
    let pairs = pairs.chain([("a:", "b"), ("a", ":b")].map(|(n, i)| (n.to_owned(), i.to_owned())));
    pairs.collect()
}

#[tokio::test]
async fn function_and_record_in_name_the_same_row() {
    let database = Database::fresh().await;
    let adapter = database.adapter();
    for (namespace, id) in keys() {
        let key = DedupKey::new(&namespace, &id).unwrap();
        let mut tx = database.pool.begin().await.unwrap();
        assert_eq!(record(&mut tx, &namespace, &id).await.unwrap(), "first", "{key:?}");
        let claimed = adapter.record_in(&mut tx, &key, HOUR).await.unwrap();
        assert!(matches!(claimed, ClaimReply::Duplicate(_)), "{key:?}");
        let stored: (String, String) =
            sqlx::query_as("SELECT namespace, id FROM webhook_deliveries")
                .fetch_one(&mut *tx)
                .await
                .unwrap();
        assert_eq!(stored, (key.namespace().to_owned(), key.id().to_owned()));
        tx.rollback().await.unwrap();

        let mut tx = database.pool.begin().await.unwrap();
        let claimed = adapter.record_in(&mut tx, &key, HOUR).await.unwrap();
        assert!(matches!(claimed, ClaimReply::First { .. }), "{key:?}");
        assert_eq!(record(&mut tx, &namespace, &id).await.unwrap(), "duplicate", "{key:?}");
        tx.rollback().await.unwrap();

        let mut tx = database.pool.begin().await.unwrap();
        assert_eq!(record(&mut tx, &namespace, &id).await.unwrap(), "first", "{key:?}");
        let mut other = database.pool.begin().await.unwrap();
        // With another lock than the function's, it would wait for the row, and fail.
        let claimed = adapter.record_in(&mut other, &key, HOUR).await.unwrap();
        assert_eq!(claimed, ClaimReply::InFlight, "{key:?}");
        tx.rollback().await.unwrap();
    }
    let before = keys().len();
    let mut tx = database.pool.begin().await.unwrap();
    for (namespace, id) in keys() {
        assert_eq!(record(&mut tx, &namespace, &id).await.unwrap(), "first");
    }
    tx.commit().await.unwrap();
    let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM webhook_deliveries")
        .fetch_one(&database.pool)
        .await
        .unwrap();
    assert_eq!(usize::try_from(rows).unwrap(), before);
}

/// Another name, in a schema, and for a caller whose `search_path` names neither.
#[tokio::test]
async fn function_of_a_named_table_writes_that_table() {
    let database = Database::fresh().await;
    let name = |name| Identifier::new(name).unwrap();
    let options = PostgresOptions::new().table(name("select")).schema(name("webhooks"));
    let options = options.record_function(true);
    let adapter = PostgresAdapter::with_options(database.pool.clone(), options);
    for _ in 0..2 {
        adapter.migrate().await.unwrap();
    }
    let mut tx = database.pool.begin().await.unwrap();
    for sql in ["SET LOCAL search_path = pg_temp", "CREATE TEMP TABLE \"select\" (key uuid)"] {
        sqlx::query(sql).execute(&mut *tx).await.unwrap();
    }
    let record = "SELECT webhooks.select_record('shop', 'a', 60)";
    let outcome: String = sqlx::query_scalar(record).fetch_one(&mut *tx).await.unwrap();
    assert_eq!(outcome, "first");
    tx.commit().await.unwrap();
    let key = DedupKey::new("shop", "a").unwrap();
    assert!(adapter.get(&key).await.unwrap().is_some());
    assert!(database.adapter().get(&key).await.unwrap().is_none());
}

/// The name of a schema that the adapter finds may hold any character.
#[tokio::test]
async fn function_stands_in_a_schema_of_any_name() {
    const SCHEMA: &str = r#""a""b'c$tower_dedup$ $body$ %s {table} \d""#;
    let database = Database::fresh().await;
    let path = format!("ALTER DATABASE {} SET search_path = {SCHEMA}", database.schema.name());
    for sql in [format!("CREATE SCHEMA {SCHEMA}"), path] {
        sqlx::query(AssertSqlSafe(sql)).execute(&database.pool).await.unwrap();
    }
    let url = database.schema.database_url();
    let options = PostgresOptions::new().record_function(true);
    let adapter = PostgresAdapter::connect_with(url, options).await.unwrap();
    adapter.migrate().await.unwrap();
    let mut connection = PgConnection::connect(url).await.unwrap();
    for sql in adapter.schema_sql() {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
    }
    assert_eq!(record(&mut connection, "shop", "a").await.unwrap(), "first");
    let key = DedupKey::new("shop", "a").unwrap();
    assert!(adapter.get(&key).await.unwrap().is_some());
    let others = "SELECT count(*) FROM public.webhook_deliveries";
    let others: i64 = sqlx::query_scalar(others).fetch_one(&mut connection).await.unwrap();
    assert_eq!(others, 0);
}

/// A printed function names the table that stood where it was made. A table of a role's own schema and a temporary
/// table have the same name. A function of that schema hides one of Postgres.
#[tokio::test]
async fn printed_function_writes_one_table_whoever_calls_it() {
    let database = Database::fresh().await;
    let mut tx = database.pool.begin().await.unwrap();
    let sql = "CREATE SCHEMA postgres; \
        CREATE TABLE postgres.webhook_deliveries (LIKE webhook_deliveries INCLUDING ALL); \
        CREATE TEMP TABLE webhook_deliveries (LIKE webhook_deliveries INCLUDING ALL); \
        CREATE FUNCTION postgres.sha256(bytea) RETURNS bytea LANGUAGE sql AS 'SELECT $1'";
    let function = database.adapter().schema_sql().pop().unwrap();
    for sql in [&function, sql, "SET LOCAL search_path = \"$user\", pg_catalog, public"] {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *tx).await.unwrap();
    }
    assert_eq!(record(&mut tx, "shop", "a").await.unwrap(), "first");
    let written = "SELECT id FROM public.webhook_deliveries WHERE key = \
        left(encode(pg_catalog.sha256(convert_to(E'shop\\na', 'UTF8')), 'hex'), 32)::uuid";
    let written: Vec<String> = sqlx::query_scalar(written).fetch_all(&mut *tx).await.unwrap();
    assert_eq!(written, ["a"]);
}

/// There, a character of several bytes is several characters.
#[tokio::test]
async fn namespace_in_a_database_without_an_encoding_is_that_of_the_crate() {
    let database = Database::fresh().await;
    let name = format!("{}_ascii", database.schema.name());
    let create = "ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0";
    let create = AssertSqlSafe(format!("CREATE DATABASE {name} {create}"));
    sqlx::query(create).execute(&database.pool).await.unwrap();
    let url = with_path(database.schema.database_url(), &name);
    let adapter = PostgresOptions::new().record_function(true);
    let adapter = PostgresAdapter::connect_with(&url, adapter).await.unwrap();
    adapter.migrate().await.unwrap();
    let mut connection = PgConnection::connect(&url).await.unwrap();
    for namespace in ["\u{c0}", "\u{20ac}", "\u{a0}"] {
        assert_eq!(record(&mut connection, namespace, "a").await.unwrap(), "first");
        let key = DedupKey::new(namespace, "a").unwrap();
        assert!(adapter.get(&key).await.unwrap().is_some(), "{namespace:?}");
    }
    record(&mut connection, "\u{85}", "a").await.unwrap_err();
    connection.close().await.unwrap();
    adapter.close().await;
    let drop = AssertSqlSafe(format!("DROP DATABASE {name} WITH (FORCE)"));
    sqlx::query(drop).execute(&database.pool).await.unwrap();
}
