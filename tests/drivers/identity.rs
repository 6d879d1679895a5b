//! A key is the same for the function and for the crate, in both directions.

use tower_dedup::DedupKey;
use tower_dedup::adapter::Identifier;
use tower_dedup::adapter::{Claimed, MaintenanceAdapter, PostgresAdapter, PostgresOptions};

use super::{Database, HOUR, record};

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

/// Records a key that another transaction holds. With another lock than that transaction's, it would wait for the row.
async fn beside(database: &Database, namespace: &str, id: &str) -> String {
    let mut tx = database.pool.begin().await.unwrap();
    sqlx::query("SET LOCAL statement_timeout = '60ms'").execute(&mut *tx).await.unwrap();
    record(&mut tx, namespace, id).await.unwrap()
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
        assert!(matches!(claimed, Claimed::Duplicate(_)), "{key:?}");
        let stored: (String, String) =
            sqlx::query_as("SELECT namespace, id FROM webhook_deliveries")
                .fetch_one(&mut *tx)
                .await
                .unwrap();
        assert_eq!(stored, (key.namespace().to_owned(), key.id().to_owned()));
        tx.rollback().await.unwrap();

        let mut tx = database.pool.begin().await.unwrap();
        let claimed = adapter.record_in(&mut tx, &key, HOUR).await.unwrap();
        assert!(matches!(claimed, Claimed::First { .. }), "{key:?}");
        assert_eq!(record(&mut tx, &namespace, &id).await.unwrap(), "duplicate", "{key:?}");
        assert_eq!(beside(&database, &namespace, &id).await, "in_flight", "{key:?}");
        tx.rollback().await.unwrap();

        let mut tx = database.pool.begin().await.unwrap();
        assert_eq!(record(&mut tx, &namespace, &id).await.unwrap(), "first", "{key:?}");
        let mut other = database.pool.begin().await.unwrap();
        let claimed = adapter.record_in(&mut other, &key, HOUR).await.unwrap();
        assert_eq!(claimed, Claimed::InFlight, "{key:?}");
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
