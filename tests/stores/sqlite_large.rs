//! A file with more rows than one statement reads: statistics by a sample, lists and purges in portions.

use std::collections::BTreeSet;

use sqlx::AssertSqlSafe;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
use tempfile::TempDir;
use tower_dedup::adapter::{
    KeyState, ListFilter, MaintenanceAdapter, Purging, SqliteAdapter, SqliteOptions, Stats,
};

/// Rows by namespace: how many, and the SQL of an id.
const NAMESPACES: &[(&str, u64, &str)] = &[
    ("few", 50, "'x' || i"),
    ("hex", 30_000, "lower(hex(randomblob(16)))"),
    ("hex2", 900, "lower(hex(randomblob(16)))"),
    ("numbers", 50_000, "i"),
    // Some ids are unlike the others.
    ("prefixed", 60_000, "iif(i % 1000, 'evt_1' || hex(randomblob(8)), char(60 + i / 1000) || i)"),
];
const ROWS: u64 = 140_950;

async fn large_file() -> (TempDir, SqlitePool, SqliteAdapter) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dedup.db");
    let options = SqliteConnectOptions::new().filename(path).create_if_missing(true);
    let pool = SqlitePool::connect_with(options).await.unwrap();
    let options = SqliteOptions::new().purging(Purging::off());
    let adapter = SqliteAdapter::with_options(pool.clone(), options);
    adapter.migrate().await.unwrap();
    for (namespace, rows, id) in NAMESPACES {
        // One key of ten has failed, and two of ten expired two hours ago.
        let sql = format!(
            "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
            INSERT INTO webhook_deliveries (namespace, id, attempts, takeover, first_seen_at,
              completed_at, expires_at)
            SELECT '{namespace}', {id}, 1, 0, unixepoch() * 1000 - 9000000,
              iif(i % 10, unixepoch() * 1000, NULL),
              unixepoch() * 1000 + iif(i % 10 IN (3, 7), -7200000, 7200000)
            FROM n"
        );
        sqlx::query(AssertSqlSafe(sql)).execute(&pool).await.unwrap();
    }
    (dir, pool, adapter)
}

#[tokio::test]
async fn statistics_of_a_large_file_are_near_its_rows() {
    let (_dir, pool, adapter) = large_file().await;
    let mut sum = Stats::default();
    for _ in 0..5 {
        let stats = adapter.stats().await.unwrap();
        assert!(!stats.is_exact);
        assert!((ROWS * 6 / 10..ROWS * 16 / 10).contains(&stats.rows), "{stats:?}");
        let states =
            stats.in_flight + stats.lapsed + stats.released + stats.complete + stats.expired;
        assert!(states.abs_diff(stats.rows) < 10, "{stats:?}");
        assert!(stats.bytes.unwrap() > 50 * ROWS, "{stats:?}");
        assert!(stats.oldest_expired.unwrap().as_secs().abs_diff(7_200) < 60, "{stats:?}");
        sum.rows += stats.rows / 5;
        sum.released += stats.released / 5;
        sum.expired += stats.expired / 5;
    }
    // The mean of several samples is nearer.
    for (found, rows) in [(sum.rows, ROWS), (sum.released, ROWS / 10), (sum.expired, ROWS / 5)] {
        assert!((rows * 8 / 10..rows * 12 / 10).contains(&found), "{found} of {rows}");
    }
    // Few enough rows are counted.
    sqlx::query("DELETE FROM webhook_deliveries WHERE namespace = 'prefixed'")
        .execute(&pool)
        .await
        .unwrap();
    let stats = adapter.stats().await.unwrap();
    assert_eq!((stats.is_exact, stats.rows, stats.released), (true, 80_950, 8_095));
}

#[tokio::test]
async fn list_and_purge_of_a_large_file_reach_every_key() {
    let (_dir, pool, adapter) = large_file().await;
    let (mut listed, mut after, mut calls) = (BTreeSet::new(), None, 0);
    let failed = ListFilter::new().with_state(KeyState::Released);
    loop {
        let page = adapter.list(&failed, after.as_ref(), 1_000).await.unwrap();
        for (key, _) in page.keys {
            assert!(listed.insert(key));
        }
        calls += 1;
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(listed.len() as u64, ROWS / 10);
    // A call reads a bounded part, also if it finds nothing.
    let none = ListFilter::new().with_state(KeyState::InFlight);
    let page = adapter.list(&none, None, 1_000).await.unwrap();
    assert!(page.keys.is_empty() && page.next.is_some() && calls > 7);

    let expired = async |namespace: &str| {
        let sql = "SELECT count(*) FROM webhook_deliveries \
            WHERE namespace LIKE ? AND expires_at < unixepoch() * 1000";
        let rows = sqlx::query_scalar::<_, i64>(sql).bind(namespace).fetch_one(&pool).await;
        u64::try_from(rows.unwrap()).unwrap()
    };
    // Each process begins at a place of its own.
    for _ in 0..8 {
        let options = SqliteOptions::new().purging(Purging::off());
        let other = SqliteAdapter::with_options(pool.clone(), options);
        assert_eq!(other.purge(1).await.unwrap().deleted, 1);
    }
    let mut begun = 0;
    for (namespace, rows, _) in NAMESPACES {
        begun += u64::from(expired(namespace).await < rows / 5);
    }
    assert!(begun > 1, "all in one namespace");

    for expected in [ROWS / 5 - 8, 0] {
        assert_eq!(expired("%").await, expected);
        let (mut deleted, mut calls) = (0, 0);
        let purged = loop {
            let purged = adapter.purge(5_000).await.unwrap();
            deleted += purged.deleted;
            calls += 1;
            if purged.is_round_complete {
                break purged;
            }
        };
        assert_eq!(deleted, expected);
        let stats = purged.stats.expect("statistics of the round");
        assert_eq!((stats.rows, stats.expired), (ROWS - ROWS / 5, 0));
        assert!(calls >= 6, "{calls}");
    }
}
