//! Completions in the transaction of a handler.

use std::slice;
use std::sync::Arc;

use futures_util::future::join_all;
use http::{HeaderMap, StatusCode};

use super::super::driver::{FIRST, LEASE, RETENTION, SLACK, is_duplicate, key, leased};
use super::super::store::Transactional;
use crate::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, Fetch, RenewReply, StoredData,
    StoredResponse, Token,
};
use crate::key::DedupKey;

/// Completes these keys in a transaction, and commits it if that succeeds.
async fn complete<S: Transactional>(store: &S, keys: &[DedupKey], terms: &CallTerms) -> bool {
    let completion = store.adapter().completion(keys, terms, None).unwrap();
    let mut transaction = store.transaction().await;
    if transaction.complete(&completion).await.is_err() {
        return false;
    }
    transaction.commit().await;
    true
}

/// A row that is not complete is completed in every state, whoever holds its lease: the first COMMIT wins. The next claim
/// is a duplicate, also where the row had expired.
pub(super) async fn first_commit_wins_in_every_state<S: Transactional>(store: S) {
    let adapter = store.adapter();
    let [lapsed, taken, expired] = ["lapsed", "taken", "expired"].map(key);
    let (mine, other) = (leased(), leased());
    for key in [&lapsed, &taken, &expired] {
        adapter.claim(key, &mine).await.unwrap();
    }
    store.advance(LEASE + SLACK).await;
    adapter.claim(&taken, &other).await.unwrap();
    let [own, released, bare] = ["own", "released", "bare"].map(key);
    for key in [&own, &released] {
        adapter.claim(key, &mine).await.unwrap();
    }
    for key in [&released, &bare] {
        adapter.release(key, &mine).await.unwrap();
    }
    // A release may leave a row where there was none, and that row has expired.
    if complete(&store, slice::from_ref(&bare), &mine).await {
        assert!(is_duplicate(&adapter.claim(&bare, &leased()).await.unwrap()));
    }
    for key in [&own, &lapsed, &taken, &released] {
        assert!(complete(&store, slice::from_ref(key), &mine).await, "{key:?}");
        assert!(adapter.is_complete(key, &mine).await.unwrap(), "{key:?}");
        assert!(!adapter.is_complete(key, &other).await.unwrap(), "{key:?}");
        assert!(is_duplicate(&adapter.claim(key, &leased()).await.unwrap()), "{key:?}");
    }
    store.advance(RETENTION + SLACK).await;
    assert!(complete(&store, slice::from_ref(&expired), &mine).await);
    assert!(is_duplicate(&adapter.claim(&expired, &leased()).await.unwrap()));
}

/// A row that is complete or missing refuses the completion, of a list as a whole. A completion works once.
pub(super) async fn complete_or_missing_row_refuses_all<S: Transactional>(store: S) {
    let adapter = store.adapter();
    let ([own, done, missing], mine) = (["own", "done", "missing"].map(key), leased());
    for key in [&own, &done] {
        adapter.claim(key, &mine).await.unwrap();
    }
    adapter.complete(&done, &leased()).await.unwrap();
    for other in [&done, &missing] {
        let mut keys = [own.clone(), other.clone()];
        keys.sort();
        assert!(!complete(&store, slice::from_ref(other), &mine).await, "{other:?}");
        assert!(!complete(&store, &keys, &mine).await, "{other:?}");
        assert!(!adapter.is_complete(&own, &mine).await.unwrap(), "{other:?}");
    }
    assert!(!adapter.is_complete(&missing, &mine).await.unwrap());
    let own = slice::from_ref(&own);
    assert!(complete(&store, own, &mine).await);
    assert!(!complete(&store, own, &mine).await, "the same completion again");
    // Nothing is completed, and nothing is refused.
    assert!(complete(&store, &[], &mine).await);
}

/// A list completes together. A transaction that is rolled back leaves the rows as they were.
pub(super) async fn rollback_leaves_every_row_as_it_was<S: Transactional>(store: S) {
    let adapter = store.adapter();
    let (mut keys, mine) = (["a", "b", "c"].map(key), leased());
    keys.sort();
    for key in &keys {
        adapter.claim(key, &mine).await.unwrap();
    }
    let completion = adapter.completion(&keys, &mine, None).unwrap();
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
/// event is in flight for claims that fetch responses, while the lease lives, and a duplicate for others. A store that
/// announces no stored data passes.
pub(super) async fn response_commits_with_the_key_or_follows<S: Transactional>(store: S) {
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
    for kind in ["at once", "follows", "never"] {
        let key = key(kind);
        let mine = replays().with_payloads([(key.clone(), [7; 32])]);
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
            "never" => store.advance(LEASE + SLACK).await,
            _ => {}
        }
        let response = (kind != "never").then(|| Arc::clone(&response));
        let expected = StoredData::new(Some([7; 32]), response);
        assert_eq!(
            stored(adapter.claim(&key, &replays()).await.unwrap()),
            Some(expected),
            "{kind}"
        );
    }
}

/// Of several transactions that complete one key at the same moment, one commits.
pub(super) async fn transactions_that_race_complete_once<S: Transactional>(store: S) {
    const ROUNDS: usize = 20;
    let store = Arc::new(store);
    let adapter = store.adapter();
    for round in 0..ROUNDS {
        let (key, mine) = (key(&format!("race-{round}")), leased());
        assert_eq!(adapter.claim(&key, &mine).await.unwrap(), FIRST);
        let racers = (0..4).map(|_| {
            let (store, key) = (Arc::clone(&store), key.clone());
            let terms = CallTerms::on_completion(Token::random(), RETENTION, LEASE);
            tokio::spawn(async move { complete(&*store, &[key], &terms).await })
        });
        let won = join_all(racers).await;
        let won = won.into_iter().filter(|won| *won.as_ref().unwrap()).count();
        assert_eq!(won, 1, "round {round}");
        assert!(is_duplicate(&adapter.claim(&key, &leased()).await.unwrap()));
    }
}
