//! Stored data: payload digests and responses, which come back with duplicates.

use std::slice;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderMap, HeaderValue, StatusCode};
use tower_dedup::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, Fetch, StoredData, StoredResponse, Token,
};
use tower_dedup::adapter::maintenance::{ForgetReply, MaintenanceAdapter};
use tower_dedup::{DedupKey, StoreErrorKind};

use crate::case::Case;
use crate::driver::{
    FIRST, LEASE, RETENTION, claim_all, complete_all, complete_at_once, is_duplicate, key, leased,
    prepare, rows,
};

fn response(body: impl Into<Bytes>) -> Arc<StoredResponse> {
    let mut headers = HeaderMap::new();
    headers.append("content-type", HeaderValue::from_static("text/xml; charset=utf-8"));
    headers.append("link", HeaderValue::from_static("<a>; rel=\"next\""));
    headers.append("link", HeaderValue::from_static("<b>"));
    Arc::new(StoredResponse::new(StatusCode::CREATED, headers, body.into()))
}

fn data(payload: u8, response: Option<&Arc<StoredResponse>>) -> StoredData {
    StoredData::new(Some([payload; 32]), response.cloned())
}

/// Adds this payload.
fn with_payload(terms: CallTerms, payload: u8) -> CallTerms {
    terms.with_payload_sha256([payload; 32])
}

/// What a duplicate carries.
type Carried = Option<StoredData>;

/// Claims the keys, and returns the stored data of those that are complete. A key that is claimed now is released again.
async fn fetched(store: &Case, keys: &[DedupKey], terms: CallTerms) -> Vec<Carried> {
    let mut all = Vec::new();
    for (key, claimed) in keys.iter().zip(claim_all(&store.adapter(), keys, &terms).await) {
        all.push(match claimed {
            ClaimReply::Duplicate(seen) => {
                assert_eq!(
                    seen.stored.is_some(),
                    terms.fetch() != Fetch::Nothing,
                    "{:?}",
                    key.id()
                );
                seen.stored.as_deref().cloned()
            }
            ClaimReply::InFlight => None,
            ClaimReply::First { .. } => {
                store.adapter().release(key, &terms).await.unwrap();
                None
            }
            other => panic!("{other:?}"),
        });
    }
    all
}

async fn all_of_each(store: &Case, keys: &[DedupKey]) -> Vec<Carried> {
    fetched(store, keys, leased().with_fetch(Fetch::DigestAndResponse)).await
}

/// Returns the stored data of a complete key.
async fn all_of(store: &Case, key: &DedupKey) -> Carried {
    all_of_each(store, slice::from_ref(key)).await.remove(0)
}

/// A completion stores its data, also a late one of a lapsed or missing row, and a duplicate returns it. Later completions
/// change nothing.
pub(super) async fn completion_stores_what_it_carries(store: Case) {
    let adapter = store.adapter();
    let stored_response = response(Bytes::from_static(b"\0\xff"));
    for row in ["leased", "lapsed", "none"] {
        let key = key(row);
        let mine = with_payload(leased(), 7);
        prepare(&store, row, &[(key.clone(), mine.clone())]).await;
        if row == "leased" {
            assert_eq!(all_of(&store, &key).await, None, "nothing is returned yet");
        }
        let whole = Some(data(7, Some(&stored_response)));
        let done = mine.clone().with_response(Arc::clone(&stored_response));
        adapter.complete(&key, &done).await.unwrap();
        assert_eq!(all_of(&store, &key).await, whole, "{row}");
        // Neither a repeated completion nor another token's changes it.
        adapter.complete(&key, &mine).await.unwrap();
        let late = with_payload(leased(), 8).with_response(response("other"));
        assert_eq!(adapter.complete(&key, &late).await.unwrap(), CompleteReply::LeaseLost);
        assert_eq!(all_of(&store, &key).await, whole, "{row}");
    }
}

/// Each key has its own stored data, also if the calls have the same terms. A duplicate without stored data returns
/// empty stored data.
pub(super) async fn each_key_has_its_own_stored_data(store: Case) {
    let adapter = store.adapter();
    let keys: Vec<DedupKey> = (b'a'..=b'f').map(|id| key(&char::from(id).to_string())).collect();
    let with = |terms: CallTerms, at: usize| match at {
        0..4 => with_payload(terms, u8::try_from(at).unwrap()),
        _ => terms,
    };
    let (at_once, mine) = (complete_at_once(), leased());
    // A claim over the row of a failed handler stores them too.
    let failed = leased();
    adapter.claim(&keys[1], &failed).await.unwrap();
    adapter.release(&keys[1], &failed).await.unwrap();
    let claims = keys.iter().enumerate().map(async |(at, key)| {
        let terms = with(if at < 2 { at_once.clone() } else { mine.clone() }, at);
        adapter.claim(key, &terms).await.unwrap();
    });
    join_all(claims).await;
    let completed = keys.iter().enumerate().skip(2).take(3);
    join_all(completed.map(async |(at, key)| {
        adapter.complete(key, &with(mine.clone(), at)).await.unwrap();
    }))
    .await;
    let stored = |payload| Some(data(payload, None));
    let empty = Some(StoredData::default());
    let expected = [stored(0), stored(1), stored(2), stored(3), empty, None];
    assert_eq!(all_of_each(&store, &keys).await, expected);
}

/// `Fetch` selects the data of a duplicate: nothing, the digest, or the digest and the response.
pub(super) async fn duplicate_carries_what_the_call_fetches(store: Case) {
    let (adapter, keys) = (store.adapter(), ["?", "both", "plain", "running"].map(key));
    let stored_response = response("<Response/>");
    let mine = leased();
    claim_all(&adapter, &keys[1..], &mine).await;
    let done = mine.with_response(Arc::clone(&stored_response));
    adapter.complete(&keys[1], &with_payload(done.clone(), 7)).await.unwrap();
    adapter.complete(&keys[2], &done).await.unwrap();
    let plain = StoredData::new(None, Some(Arc::clone(&stored_response)));
    let digests = [None, Some(data(7, None)), Some(StoredData::default()), None];
    let all = [None, Some(data(7, Some(&stored_response))), Some(plain), None];
    for terms in [leased, complete_at_once] {
        let replies = fetched(&store, &keys, terms()).await;
        assert_eq!(replies, [None, None, None, None]);
        let replies = fetched(&store, &keys, terms().with_fetch(Fetch::Digest)).await;
        assert_eq!(replies, digests);
        let everything = terms().with_fetch(Fetch::DigestAndResponse);
        assert_eq!(fetched(&store, &keys, everything).await, all);
    }
}

/// The stored data of a key ends with its retention, and with a release. A later claim of the key does not return it.
pub(super) async fn stored_data_ends_with_the_retention(store: Case) {
    let (adapter, keys) = (store.adapter(), ["claimed", "completed", "once"].map(key));
    let mine = with_payload(leased(), 7).with_response(response("old"));
    complete_all(&adapter, &keys, &mine).await;
    store.advance(RETENTION).await;
    let second = leased();
    assert_eq!(adapter.claim(&keys[0], &second).await.unwrap(), FIRST);
    assert_eq!(all_of(&store, &keys[0]).await, None);
    complete_all(&adapter, &keys[..2], &second).await;
    assert_eq!(adapter.claim(&keys[2], &complete_at_once()).await.unwrap(), FIRST);
    assert_eq!(all_of_each(&store, &keys).await, vec![Some(StoredData::default()); 3]);
    adapter.forget(&keys[0]).await.unwrap();
    assert_eq!(all_of(&store, &keys[0]).await, None);
    let (released, mine) = (key("released"), with_payload(complete_at_once(), 7));
    adapter.claim(&released, &mine).await.unwrap();
    adapter.release(&released, &mine).await.unwrap();
    assert_eq!(adapter.complete(&released, &leased()).await.unwrap(), CompleteReply::Inserted);
    assert_eq!(all_of(&store, &released).await, Some(StoredData::default()));
}

/// `get` returns the stored data of a complete key, and of no other key. It changes nothing.
pub(super) async fn get_returns_the_stored_data_of_a_complete_key(store: Case) {
    let (adapter, keys) = (store.adapter(), ["full", "plain", "released", "running"].map(key));
    let stored_response = response("<Response/>");
    let mine = with_payload(leased(), 7).with_response(Arc::clone(&stored_response));
    claim_all(&adapter, &keys, &mine).await;
    adapter.complete(&keys[0], &mine).await.unwrap();
    adapter.complete(&keys[1], &leased()).await.unwrap();
    adapter.release(&keys[2], &mine).await.unwrap();
    let full = data(7, Some(&stored_response));
    for _ in 0..2 {
        let mut stored = Vec::new();
        for key in &keys {
            let entry = adapter.get(key).await.unwrap().expect("an entry");
            assert!(!entry.response_is_unreadable, "{entry:?}");
            stored.push(entry.stored.map(|stored| (*stored).clone()));
        }
        assert_eq!(stored, [Some(full.clone()), Some(StoredData::default()), None, None]);
    }
    // An expired key is unknown, and `get` leaves its row to the purge.
    store.advance(RETENTION).await;
    assert_eq!(adapter.get(&keys[0]).await.unwrap(), None);
    assert_eq!(rows(&adapter).await, 4);
}

/// Duplicates beside completions: a duplicate always carries everything that the completion stored.
pub(super) async fn duplicate_beside_completions_carries_whole_stored_data(store: Case) {
    for round in 0..20_u8 {
        let (adapter, key) = (store.adapter(), key(&round.to_string()));
        let mine = with_payload(leased(), round);
        let done = mine.clone().with_response(response(vec![round; 10_000]));
        adapter.claim(&key, &mine).await.unwrap();
        let readers = [leased, leased, complete_at_once, complete_at_once].map(|terms| {
            let (adapter, key) = (store.adapter(), key.clone());
            tokio::spawn(async move {
                let terms = terms().with_fetch(Fetch::DigestAndResponse);
                loop {
                    match adapter.claim(&key, &terms).await.unwrap() {
                        ClaimReply::Duplicate(seen) => break seen.stored.as_deref().cloned(),
                        ClaimReply::InFlight => {}
                        other => panic!("{other:?}"),
                    }
                }
            })
        });
        tokio::task::yield_now().await;
        assert_eq!(adapter.complete(&key, &done).await.unwrap(), CompleteReply::Held);
        let whole = done.stored_data();
        for reader in readers {
            let read = tokio::time::timeout(Duration::from_secs(10), reader).await;
            assert_eq!(read.expect("the completion shows").expect("a reader"), whole, "{round}");
        }
    }
}

/// Duplicates beside releases: a duplicate carries the data of a row that was complete when it was read. A store that
/// reads them in a second step finds a row that was released since, or that of the next claim.
pub(super) async fn duplicate_beside_releases_carries_whole_stored_data(store: Case) {
    const ROUNDS: usize = 150;
    let keys = key("a");
    let tasks = (0..4_u8).map(|payload| {
        let (adapter, keys) = (store.adapter(), keys.clone());
        tokio::spawn(async move {
            let mut failed = 0;
            for round in 0..ROUNDS {
                let mine = with_payload(complete_at_once(), payload);
                let mine = mine.with_fetch(Fetch::Digest);
                let reply = adapter.claim(&keys, &mine).await;
                // A claim that meets another version again and again may give up. Its outcome is unknown.
                failed += usize::from(reply.is_err());
                match reply {
                    Err(_) | Ok(ClaimReply::First { .. }) => {
                        adapter.release(&keys, &mine).await.unwrap();
                    }
                    Ok(ClaimReply::Duplicate(seen)) => {
                        let digest = seen.stored.as_ref().and_then(|stored| stored.payload_sha256);
                        let is_whole = digest.is_some_and(|digest| digest[0] != payload);
                        assert!(is_whole, "round {round}, payload {payload}: {seen:?}");
                    }
                    Ok(ClaimReply::InFlight) => {}
                    Ok(other) => panic!("{other:?}"),
                }
            }
            assert!(failed < ROUNDS / 10, "{failed} of {ROUNDS} claims have failed");
        })
    });
    for ended in join_all(tasks.collect::<Vec<_>>()).await {
        ended.expect("a duplicate has the data of another task's claim");
    }
}

/// Bodies and headers of any size and shape come back byte by byte.
pub(super) async fn hostile_responses_come_back_unchanged(store: Case) {
    let adapter = store.adapter();
    let every_byte: Vec<u8> = (0..=255).collect();
    let bodies: [Vec<u8>; 4] =
        [Vec::new(), every_byte, b"'; DROP TABLE x; --\"}]".to_vec(), vec![b'x'; 300_000]];
    for (number, body) in bodies.into_iter().enumerate() {
        let keys = key(&number.to_string());
        let mut headers = HeaderMap::new();
        let odd = HeaderValue::from_bytes("\u{e9}\u{1f600}\t\\\"';".as_bytes()).unwrap();
        headers.append("x-odd", odd);
        headers.append("x-empty", HeaderValue::from_static(""));
        let stored_response = Arc::new(StoredResponse::new(StatusCode::OK, headers, body.into()));
        let long = CallTerms::on_completion(Token::random(), Duration::from_secs(60), LEASE);
        adapter.complete(&keys, &long.with_response(Arc::clone(&stored_response))).await.unwrap();
        let stored = all_of(&store, &keys).await;
        assert_eq!(stored, Some(StoredData::new(None, Some(stored_response))), "{number}");
    }
}

/// A claim that fetches an unreadable response fails: an empty response would be replayed. Other claims and operators
/// see a complete key.
pub(super) async fn unreadable_response_is_told_and_never_replayed(store: Case) {
    let (adapter, key) = (store.adapter(), key("a"));
    adapter.complete(&key, &leased().with_response(response("a body"))).await.unwrap();
    store.corrupt(&key).await;
    let fetching = leased().with_fetch(Fetch::DigestAndResponse);
    match adapter.claim(&key, &fetching).await {
        Err(error) => assert_eq!(error.kind(), StoreErrorKind::Corrupt),
        Ok(claimed) => panic!("the response is unreadable: {claimed:?}"),
    }
    for fetch in [Fetch::Nothing, Fetch::Digest] {
        let claimed = adapter.claim(&key, &leased().with_fetch(fetch)).await.unwrap();
        assert!(is_duplicate(&claimed), "{fetch:?}: {claimed:?}");
    }
    let entry = adapter.get(&key).await.unwrap().expect("an entry");
    assert!(entry.response_is_unreadable, "{entry:?}");
    assert_eq!(adapter.forget(&key).await.unwrap(), ForgetReply::Removed);
}
