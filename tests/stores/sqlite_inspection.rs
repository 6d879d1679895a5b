//! Purges, lists and statistics of a file with more rows than one call reads.

use std::collections::BTreeSet;

use sqlx::AssertSqlSafe;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
use tempfile::TempDir;
use tower_dedup::adapter::maintenance::{KeyState, ListFilter, MaintenanceAdapter};
use tower_dedup::adapter::{Purging, SqliteAdapter, SqliteOptions};

use support::list;

/// The namespaces, with their rows. Of ten rows, one has failed, and two expired two hours ago.
const NAMESPACES: &[(&str, u64)] = &[("a", 20_000), ("b", 150_000)];
const ROWS: u64 = 170_000;

async fn large_file() -> (TempDir, SqlitePool, SqliteAdapter) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dedup.db");
    let options = SqliteConnectOptions::new().filename(path).create_if_missing(true);
    let pool = SqlitePool::connect_with(options).await.unwrap();
    let options = SqliteOptions::new().purging(Purging::off());
    let adapter = SqliteAdapter::with_options(pool.clone(), options);
    adapter.migrate().await.unwrap();
    for (namespace, rows) in NAMESPACES {
        let sql = format!(
            "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
            INSERT INTO webhook_deliveries (namespace, id, attempts, takeover, first_seen_at,
              completed_at, expires_at)
            SELECT '{namespace}', lower(hex(randomblob(16))), 1, 0, unixepoch() * 1000 - 9000000,
              iif(i % 10, unixepoch() * 1000, NULL),
              unixepoch() * 1000 + iif(i % 10 IN (3, 7), -7200000, 7200000)
            FROM n"
        );
        sqlx::query(AssertSqlSafe(sql)).execute(&pool).await.unwrap();
    }
    (dir, pool, adapter)
}

#[tokio::test]
async fn statistics_of_a_large_file_are_the_least_that_there_is() {
    let (_dir, pool, adapter) = large_file().await;
    let stats = adapter.stats().await.unwrap();
    assert!(!stats.is_exact);
    // All expired keys, and 100,000 of the others.
    assert_eq!((stats.rows, stats.expired), (100_000 + ROWS / 5, ROWS / 5));
    assert_eq!(stats.complete + stats.released, 100_000);
    assert!(stats.bytes.unwrap() > 50 * ROWS, "{stats:?}");
    assert!(stats.oldest_expired.unwrap().as_secs().abs_diff(7_200) < 60, "{stats:?}");
    sqlx::query("DELETE FROM webhook_deliveries WHERE namespace = 'b' AND id > '8'")
        .execute(&pool)
        .await
        .unwrap();
    let stats = adapter.stats().await.unwrap();
    let rows = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM webhook_deliveries");
    let rows = u64::try_from(rows.fetch_one(&pool).await.unwrap()).unwrap();
    assert_eq!((stats.is_exact, stats.rows), (true, rows));
}

#[tokio::test]
async fn list_and_purge_of_a_large_file_reach_every_key() {
    let (_dir, pool, adapter) = large_file().await;
    let filter = |state, namespace: Option<&str>| {
        let mut filter = ListFilter::default();
        (filter.state, filter.namespace) = (state, namespace.map(str::to_owned));
        filter
    };
    let failed = Some(KeyState::Released);
    for (filter, expected, least_calls) in [
        (filter(failed, None), ROWS / 10, 18),
        (filter(failed, Some("a")), 2_000, 2),
        (filter(None, Some("b")), 120_000, 120),
    ] {
        let (listed, calls) = list(&adapter, &filter, 1_000).await;
        assert_eq!(listed.len() as u64, expected);
        assert_eq!(listed.into_iter().collect::<BTreeSet<_>>().len() as u64, expected);
        assert!((least_calls..least_calls + 20).contains(&calls), "{calls}");
    }
    // A call reads a bounded part, also if it selects nothing.
    let none = filter(Some(KeyState::InFlight), None);
    let page = adapter.list(&none, None, 1_000).await.unwrap();
    assert!(page.keys.is_empty() && page.next.is_some());

    let mut deleted = Vec::new();
    while deleted.last().is_none_or(|last| *last == 5_000) {
        deleted.push(adapter.purge(5_000).await.unwrap());
    }
    assert_eq!(deleted, [vec![5_000; 6], vec![4_000]].concat());
    let left = "SELECT count(*), min(expires_at) > unixepoch() * 1000 FROM webhook_deliveries";
    let left: (i64, bool) = sqlx::query_as(left).fetch_one(&pool).await.unwrap();
    assert_eq!(left, (136_000, true));
}
