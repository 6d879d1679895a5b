//! Rows that an open transaction holds: only completions and releases wait for them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::{join, join_all};

use super::super::driver::{FIRST, LEASE, SLACK, is_duplicate, key, leased};
use super::super::store::Store;
use crate::adapter::contract::{ClaimReply, CompleteReply, DedupAdapter, RenewReply};

const ROUNDS: u32 = 50;
/// The bound of the fastest round beside held rows. A store that waits for a held row waits in each round; on a busy
/// machine, other rounds are slow.
const AT_ONCE: Duration = Duration::from_millis(50);

/// Asserts that the fastest of these rounds ends at once.
async fn at_once(rounds: u32, round: impl AsyncFn(u32)) {
    let mut fastest = Duration::MAX;
    for number in 0..rounds {
        let start = Instant::now();
        round(number).await;
        fastest = fastest.min(start.elapsed());
    }
    assert!(fastest < AT_ONCE, "{fastest:?}");
}

/// Claims of held rows, in every state, and of new keys in the same moment return at once.
pub(super) async fn claims_beside_held_rows_return_at_once<S: Store>(store: S) {
    let adapter = store.adapter();
    let [live, lapsed, released, complete] = ["live", "lapsed", "released", "complete"].map(key);
    let mine = leased();
    adapter.claim(&lapsed, &mine).await.unwrap();
    adapter.claim(&released, &mine).await.unwrap();
    adapter.release(&released, &mine).await.unwrap();
    adapter.claim(&complete, &mine).await.unwrap();
    adapter.complete(&complete, &mine).await.unwrap();
    store.advance(LEASE + SLACK).await;
    adapter.claim(&live, &mine).await.unwrap();
    let _held = join_all([&live, &lapsed, &released, &complete].map(|key| store.hold(key))).await;
    at_once(ROUNDS, async |round| {
        let (new, other) = (key(&format!("new-{round}")), leased());
        let claims = [&live, &lapsed, &released, &complete, &new];
        let claims = join_all(claims.map(|key| adapter.claim(key, &other))).await;
        let claims: Vec<_> = claims.into_iter().map(Result::unwrap).collect();
        assert_eq!(claims[..3], [const { ClaimReply::InFlight }; 3]);
        assert!(is_duplicate(&claims[3]), "{claims:?}");
        assert_eq!(claims[4], FIRST);
    })
    .await;
    // Its own row: an answer "in flight" would leave a lease that nobody holds.
    for key in [&live, &lapsed] {
        let unknown = adapter.claim(key, &mine).await.unwrap_err();
        assert!(unknown.is_unknown(), "{unknown}");
    }
}

/// A renewal says "locked", and not "lost", of a row that its token holds. It renews other leases at once.
pub(super) async fn renewal_of_a_held_row_returns_at_once_and_is_not_lost<S: Store>(store: S) {
    let adapter = store.adapter();
    let ([held, other], mine) = (["held", "other"].map(key), leased());
    adapter.claim(&held, &mine).await.unwrap();
    adapter.claim(&other, &mine).await.unwrap();
    let holder = store.hold(&held).await;
    at_once(ROUNDS, async |_| {
        let (held, other) = join(adapter.renew(&held, &mine), adapter.renew(&other, &mine)).await;
        assert_eq!((held.unwrap(), other.unwrap()), (RenewReply::Locked, RenewReply::Held));
    })
    .await;
    drop(holder);
    while adapter.renew(&held, &mine).await.unwrap() == RenewReply::Locked {}
    assert_eq!(adapter.renew(&held, &mine).await.unwrap(), RenewReply::Held);
}

/// A completion and a release wait for their held row, and take effect when it is free. Meanwhile other calls of all kinds
/// return at once.
pub(super) async fn completions_and_releases_of_held_rows_delay_no_other_call<S: Store>(store: S) {
    let adapter = store.adapter();
    let ([completed, released], mine) = (["completed", "released"].map(key), leased());
    let mut holders = Vec::new();
    for key in [&completed, &released] {
        adapter.claim(key, &mine).await.unwrap();
        holders.push(store.hold(key).await);
    }
    let waiting = {
        let (adapter, mine) = (Arc::clone(&adapter), mine.clone());
        let (completed, released) = (completed.clone(), released.clone());
        tokio::spawn(async move {
            join(adapter.complete(&completed, &mine), adapter.release(&released, &mine)).await
        })
    };
    at_once(ROUNDS / 5, async |round| {
        let keys = ["a", "b"].map(|name| key(&format!("{name}-{round}")));
        let claims = join_all(keys.iter().map(|key| adapter.claim(key, &mine))).await;
        assert!(claims.into_iter().all(|claimed| claimed.unwrap() == FIRST));
        let ended = join(adapter.complete(&keys[0], &mine), adapter.release(&keys[1], &mine)).await;
        assert_eq!((ended.0.unwrap(), ended.1.unwrap()), (CompleteReply::Held, ()));
    })
    .await;
    assert!(!waiting.is_finished(), "an open transaction holds the rows");
    drop(holders);
    let (complete, release) = waiting.await.unwrap();
    assert_eq!((complete.unwrap(), release.unwrap()), (CompleteReply::Held, ()));
    assert!(is_duplicate(&adapter.claim(&completed, &leased()).await.unwrap()));
    assert_eq!(adapter.claim(&released, &leased()).await.unwrap(), ClaimReply::first(2, false));
}
