//! Batches of claims and completions: what a duplicate costs in them.

mod support;

use futures_util::future::join_all;
use support::dedup_key;
use support::effects::{AT_A_GATE, Database, MINUTE};
use tower_dedup::DedupKey;
use tower_dedup::adapter::{
    Batching, Claimed, Completed, DedupAdapter, LeaseAdapter, PostgresAdapter, Receipt, Recorded,
    Token,
};

fn receipt() -> Receipt {
    Receipt::new(Token::random(), MINUTE).with_lease(MINUTE)
}

fn key(of: &str, id: usize) -> [DedupKey; 1] {
    [dedup_key(&format!("{of}-{id}"))]
}

/// Duplicates and new claims in one statement with completions, below the share of duplicates from
/// which rows are read first.
#[tokio::test]
async fn duplicate_beside_completions_neither_writes_nor_locks() {
    const DUPLICATES: usize = 10;
    const OTHERS: usize = 30;
    let database = Database::fresh().await;
    let adapter = PostgresAdapter::new(database.pool(2)).batching(Batching::new().lanes(1));
    let mine = receipt();
    for id in 0..DUPLICATES {
        let recorded = adapter.record(&key("known", id), &receipt()).await.unwrap();
        assert_eq!(recorded, [Recorded::First]);
    }
    let held: Vec<_> = (0..OTHERS).flat_map(|id| key("held", id)).collect();
    adapter.claim(&held, &mine).await.unwrap();

    // One claim holds the lane up, and the rest goes together.
    let gate = database.gate("BEFORE INSERT ON webhook_deliveries").await;
    let first = tokio::spawn({
        let adapter = adapter.clone();
        async move { adapter.claim(&key("first", 0), &receipt()).await }
    });
    database.until_sessions(AT_A_GATE, 1).await;
    let claims = |of: &'static str, count: usize| {
        let adapter = adapter.clone();
        let claims = (0..count).map(move |id| {
            let adapter = adapter.clone();
            tokio::spawn(async move { adapter.claim(&key(of, id), &receipt()).await.unwrap() })
        });
        join_all(claims.collect::<Vec<_>>())
    };
    let completions = (0..OTHERS).map(|id| {
        let (adapter, mine) = (adapter.clone(), mine.clone());
        tokio::spawn(async move { adapter.complete(&key("held", id), &mine).await.unwrap() })
    });
    let completions = join_all(completions.collect::<Vec<_>>());
    let (duplicates, new) = (claims("known", DUPLICATES), claims("new", OTHERS));
    // All are in the queue by the time that the lane is free.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    drop(gate);
    assert_eq!(first.await.unwrap().unwrap(), [Claimed::first(1, false)]);
    for completed in completions.await {
        assert_eq!(completed.unwrap(), [Completed::Held]);
    }
    for claimed in new.await {
        assert_eq!(claimed.unwrap(), [Claimed::first(1, false)]);
    }
    for claimed in duplicates.await {
        let claimed = claimed.unwrap();
        assert!(matches!(claimed[..], [Claimed::Duplicate(_)]), "{claimed:?}");
    }
    let count = async |such: &str| -> i64 {
        let sql = format!("SELECT count(*) FROM webhook_deliveries WHERE {such}");
        let count = sqlx::query_scalar(sqlx::AssertSqlSafe(sql));
        count.fetch_one(database.effects.pool()).await.unwrap()
    };
    // A lock leaves its mark as a write does.
    assert_eq!(count("id LIKE 'known-%' AND xmax <> '0'").await, 0);
    // They have gone together: rows of one transaction.
    let together = count(
        "id LIKE 'new-%' AND xmin = (SELECT xmin FROM webhook_deliveries WHERE id = 'held-0')",
    );
    assert_eq!(together.await, i64::try_from(OTHERS).unwrap());
}
