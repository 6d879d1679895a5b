//! Handlers that wait for the one writer of an SQLite file.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tower_dedup::adapter::contract::{CallTerms, DedupAdapter, Token};
use tower_dedup::{CommitError, Deduplicator};

use super::fixture::{Db, Lite};
use crate::support::{dedup_key, until};

const HANDLERS: usize = 20;
const WRITES_FOR: Duration = Duration::from_millis(100);

/// Twenty transactions wait for one another for two seconds. A claim of another event waits for one of them, and the pool
/// has free connections, because a handler takes its connection when its turn has come.
#[tokio::test]
async fn handlers_that_wait_hold_up_neither_claims_nor_the_pool() {
    let db = Lite::create().await;
    let (adapter, began) = (db.adapter(), AtomicUsize::new(0));
    let worker = Deduplicator::transactional(db.adapter());
    let keys: Vec<_> = (0..HANDLERS).map(|number| dedup_key(&format!("a{number}"))).collect();
    let handlers = join_all(keys.iter().map(|key| {
        worker.run(key, async |event| {
            began.fetch_add(1, Ordering::SeqCst);
            let mut tx = event.begin(db.pool()).await?;
            let insert = sqlx::query("INSERT INTO effects (id) VALUES (?1)").bind(event.id());
            insert.execute(&mut *tx).await?;
            tokio::time::sleep(WRITES_FOR).await;
            tx.commit().await?;
            Ok::<_, CommitError>(())
        })
    }));
    let others = async {
        until(|| began.load(Ordering::SeqCst) == HANDLERS).await;
        let at = Instant::now();
        let terms = CallTerms::on_completion(Token::random(), 600 * WRITES_FOR, 600 * WRITES_FOR);
        let read = sqlx::query("SELECT id FROM effects").fetch_all(db.pool());
        let other = dedup_key("other");
        let (claimed, read) = tokio::join!(adapter.claim(&other, &terms), read);
        claimed.unwrap();
        read.unwrap();
        at.elapsed()
    };
    let (ran, waited) = tokio::join!(handlers, others);
    ran.into_iter().for_each(|ran| drop(ran.unwrap()));
    assert_eq!(db.effects().await.len(), HANDLERS);
    assert!(waited < WRITES_FOR * 10, "{waited:?}");
}
