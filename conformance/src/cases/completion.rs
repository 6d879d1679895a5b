//! Transactions: completions in those of a handler, and rows that an open one holds. Only completions and releases wait for
//! such a row.

use std::slice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::{join, join_all};
use http::{HeaderMap, StatusCode};
use tower_dedup::DedupKey;
use tower_dedup::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, Fetch, RenewReply, StoredData,
    StoredResponse,
};

use crate::case::Case;
use crate::driver::{FIRST, LEASE, SLACK, complete_at_once, is_duplicate, key, leased, prepare};

/// Completes these keys in a transaction, and commits it if that succeeds.
async fn complete(store: &Case, keys: &[DedupKey], terms: &CallTerms) -> bool {
    let keys: Vec<_> = keys.iter().map(|key| (key, terms)).collect();
    let completion = store.adapter().completion(&keys).unwrap();
    let mut transaction = store.transaction().await;
    if transaction.complete(&completion).await.is_err() {
        return false;
    }
    transaction.commit().await;
    true
}

/// A row that is not complete is completed in every state, whoever holds its lease: the first COMMIT wins. The next claim
/// is a duplicate, also where the row had expired.
pub(super) async fn first_commit_wins_in_every_state(store: Case) {
    let adapter = store.adapter();
    for row in ["leased", "taken", "lapsed", "released", "expired lapsed", "released unclaimed"] {
        for who in ["its", "another"] {
            let (key, mine) = (key(&format!("{row}, {who} token")), leased());
            prepare(&store, row, &[(key.clone(), mine.clone())]).await;
            let (mine, other) = if who == "its" { (mine, leased()) } else { (leased(), mine) };
            let is_complete = complete(&store, slice::from_ref(&key), &mine).await;
            if row == "released unclaimed" && !is_complete {
                // A release may leave a row where there was none.
                continue;
            }
            assert!(is_complete, "{:?}", key.id());
            assert!(adapter.is_complete(&key, &mine).await.unwrap(), "{:?}", key.id());
            assert!(!adapter.is_complete(&key, &other).await.unwrap(), "{:?}", key.id());
            assert!(is_duplicate(&adapter.claim(&key, &leased()).await.unwrap()), "{:?}", key.id());
        }
    }
}

/// A row that is complete or missing refuses the completion, of a list as a whole. A completion works once.
pub(super) async fn complete_or_missing_row_refuses_all(store: Case) {
    let adapter = store.adapter();
    let ([own, done, missing], mine) = (["own", "done", "missing"].map(key), leased());
    for key in [&own, &done] {
        adapter.claim(key, &mine).await.unwrap();
    }
    adapter.complete(&done, &leased()).await.unwrap();
    for other in [&done, &missing] {
        let mut keys = [own.clone(), other.clone()];
        keys.sort();
        assert!(!complete(&store, slice::from_ref(other), &mine).await, "{:?}", other.id());
        assert!(!complete(&store, &keys, &mine).await, "{:?}", other.id());
        assert!(!adapter.is_complete(&own, &mine).await.unwrap(), "{:?}", other.id());
    }
    assert!(!adapter.is_complete(&missing, &mine).await.unwrap());
    let own = slice::from_ref(&own);
    assert!(complete(&store, own, &mine).await);
    assert!(!complete(&store, own, &mine).await, "the same completion again");
    // Nothing is completed, and nothing is refused.
    assert!(complete(&store, &[], &mine).await);
}

/// A list completes together. A transaction that is rolled back leaves the rows as they were.
pub(super) async fn rollback_leaves_every_row_as_it_was(store: Case) {
    let adapter = store.adapter();
    let (mut keys, mine) = (["a", "b", "c"].map(key), leased());
    keys.sort();
    for key in &keys {
        adapter.claim(key, &mine).await.unwrap();
    }
    let completion = adapter.completion(&keys.each_ref().map(|key| (key, &mine))).unwrap();
    let mut transaction = store.transaction().await;
    transaction.complete(&completion).await.unwrap();
    drop(transaction);
    for key in &keys {
        adapter.release(key, &mine).await.unwrap();
        assert!(!adapter.is_complete(key, &mine).await.unwrap());
    }
    let again = leased();
    for key in &keys {
        assert_eq!(adapter.claim(key, &again).await.unwrap(), ClaimReply::first(2, false));
    }
    assert!(complete(&store, &keys, &again).await);
    for key in &keys {
        assert!(adapter.is_complete(key, &again).await.unwrap());
    }
}

/// A response commits with the key. Without one, the layer adds it to the complete row by the same token; until then the
/// event is in flight for claims that fetch responses, while the lease lives, and a duplicate for others. A completion
/// without a response by the same token ends that lease. A store that announces no stored data passes.
pub(super) async fn response_commits_with_the_key_or_follows(store: Case) {
    let adapter = store.adapter();
    if !adapter.abilities().stored_data {
        return;
    }
    let response = StoredResponse::new(StatusCode::CREATED, HeaderMap::new(), "\0 \u{e9}".into());
    let response = Arc::new(response);
    let replays = || leased().with_fetch(Fetch::DigestAndResponse);
    let stored = |reply: ClaimReply| match reply {
        ClaimReply::Duplicate(seen) => seen.stored.map(|stored| (*stored).clone()),
        reply => panic!("a duplicate, but {reply:?}"),
    };
    for kind in ["at once", "follows", "is not stored", "never"] {
        let key = key(kind);
        let mine = replays().with_payload_sha256([7; 32]);
        let done = mine.clone().with_response(Arc::clone(&response));
        adapter.claim(&key, &mine).await.unwrap();
        let terms = if kind == "at once" { &done } else { &mine };
        assert!(complete(&store, slice::from_ref(&key), terms).await, "{kind}");
        if kind != "at once" {
            for _ in 0..2 {
                let waits = adapter.claim(&key, &replays()).await.unwrap();
                assert_eq!(waits, ClaimReply::InFlight, "{kind}");
                store.advance(LEASE * 2 / 3).await;
                assert_eq!(adapter.renew(&key, &mine).await.unwrap(), RenewReply::Held, "{kind}");
            }
            assert!(is_duplicate(&adapter.claim(&key, &leased()).await.unwrap()), "{kind}");
            assert_eq!(adapter.renew(&key, &leased()).await.unwrap(), RenewReply::Lost, "{kind}");
        }
        match kind {
            "follows" => {
                assert_eq!(adapter.complete(&key, &done).await.unwrap(), CompleteReply::Held);
                assert_eq!(adapter.renew(&key, &mine).await.unwrap(), RenewReply::Lost);
            }
            // The layer cannot store it: the wait ends.
            "is not stored" => {
                assert_eq!(adapter.complete(&key, &mine).await.unwrap(), CompleteReply::Held);
                assert_eq!(adapter.renew(&key, &mine).await.unwrap(), RenewReply::Lost);
            }
            "never" => store.advance(LEASE + SLACK).await,
            _ => {}
        }
        let response = (kind == "at once" || kind == "follows").then(|| Arc::clone(&response));
        let expected = StoredData::new(Some([7; 32]), response);
        assert_eq!(
            stored(adapter.claim(&key, &replays()).await.unwrap()),
            Some(expected),
            "{kind}"
        );
    }
}

/// Of several transactions that complete one key at the same moment, one commits.
pub(super) async fn transactions_that_race_complete_once(store: Case) {
    const ROUNDS: usize = 20;
    let store = Arc::new(store);
    let adapter = store.adapter();
    for round in 0..ROUNDS {
        let (key, mine) = (key(&format!("race-{round}")), leased());
        assert_eq!(adapter.claim(&key, &mine).await.unwrap(), FIRST);
        let racers = (0..4).map(|_| {
            let (store, key) = (Arc::clone(&store), key.clone());
            tokio::spawn(async move { complete(&store, &[key], &leased()).await })
        });
        let won = join_all(racers).await;
        let won = won.into_iter().filter(|won| *won.as_ref().unwrap()).count();
        assert_eq!(won, 1, "round {round}");
        assert!(is_duplicate(&adapter.claim(&key, &leased()).await.unwrap()));
    }
}

/// The bound of the fastest of some rounds beside held rows. A store that waits for a held row waits in each round; on a busy
/// machine, other rounds are slow.
const AT_ONCE: Duration = Duration::from_millis(50);

/// Asserts that the fastest of these rounds ends at once.
async fn rounds_end_at_once(rounds: u32, round: impl AsyncFn(u32)) {
    let mut fastest = Duration::MAX;
    for number in 0..rounds {
        let start = Instant::now();
        round(number).await;
        fastest = fastest.min(start.elapsed());
    }
    assert!(fastest < AT_ONCE, "{fastest:?}");
}

/// Claims of held rows, in every state, and of new keys in the same moment return at once.
pub(super) async fn claims_beside_held_rows_return_at_once(store: Case) {
    let adapter = store.adapter();
    let ([live, lapsed, released, complete], mine) =
        (["leased", "lapsed", "released", "complete"].map(key), leased());
    // The lapsed one first, because time passes.
    for key in [&lapsed, &live, &released, &complete] {
        prepare(&store, key.id(), &[(key.clone(), mine.clone())]).await;
    }
    let _held = join_all([&live, &lapsed, &released, &complete].map(|key| store.hold(key))).await;
    for terms in [leased, complete_at_once] {
        rounds_end_at_once(50, async |round| {
            let other = terms();
            let new = key(&format!("new-{round}, {:?}", other.permanence()));
            let claims = [&live, &lapsed, &released, &complete, &new];
            let claims = join_all(claims.map(|key| adapter.claim(key, &other))).await;
            let claims: Vec<_> = claims.into_iter().map(Result::unwrap).collect();
            assert_eq!(claims[..3], [const { ClaimReply::InFlight }; 3]);
            assert!(is_duplicate(&claims[3]), "{claims:?}");
            assert_eq!(claims[4], FIRST);
        })
        .await;
    }
    // Its own row: an answer "in flight" would leave a lease that nobody holds.
    for key in [&live, &lapsed] {
        let unknown = adapter.claim(key, &mine).await.unwrap_err();
        assert!(unknown.is_unknown(), "{unknown}");
    }
}

/// A renewal says "locked", and not "lost", of a row that its token holds. It renews other leases at once.
pub(super) async fn renewal_of_a_held_row_returns_at_once_and_is_not_lost(store: Case) {
    let adapter = store.adapter();
    let ([held, other], mine) = (["held", "other"].map(key), leased());
    adapter.claim(&held, &mine).await.unwrap();
    adapter.claim(&other, &mine).await.unwrap();
    let holder = store.hold(&held).await;
    rounds_end_at_once(50, async |_| {
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
pub(super) async fn completions_and_releases_of_held_rows_delay_no_other_call(store: Case) {
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
    rounds_end_at_once(10, async |round| {
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
