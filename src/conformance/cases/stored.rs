//! Stored data: payload digests and responses, which come back with duplicates.

use std::slice;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderMap, HeaderValue, StatusCode};

use super::super::driver::{
    FIRST, LEASE, RETENTION, SLACK, claim_all, complete_all, complete_at_once, key, leased, rows,
};
use super::super::store::{Maintained, Store};
use crate::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, Fetch, StoredData, StoredResponse, Token,
};
use crate::adapter::inspect::MaintenanceAdapter;
use crate::key::DedupKey;

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

/// Adds this payload of the key.
fn with_payload(terms: CallTerms, key: &DedupKey, payload: u8) -> CallTerms {
    with_payloads(terms, slice::from_ref(key), payload)
}

/// Adds this payload for each of these keys.
fn with_payloads(terms: CallTerms, keys: &[DedupKey], payload: u8) -> CallTerms {
    terms.with_payloads(keys.iter().map(|key| (key.clone(), [payload; 32])))
}

/// Claims the keys, and returns the stored data of those that are complete. A key that is claimed now is
/// released again.
async fn fetched<A: DedupAdapter + ?Sized>(
    adapter: &A,
    keys: &[DedupKey],
    terms: CallTerms,
) -> Vec<Option<StoredData>> {
    let fetch = terms.fetch();
    let claimed = claim_all(adapter, keys, &terms).await;
    for (key, claimed) in keys.iter().zip(&claimed) {
        if matches!(claimed, ClaimReply::First { .. }) {
            adapter.release(key, &terms).await.unwrap();
        }
    }
    let stored = claimed.into_iter().map(|claimed| match claimed {
        ClaimReply::Duplicate(seen) => {
            assert_eq!(seen.stored.is_some(), fetch != Fetch::Nothing, "{fetch:?}");
            seen.stored.map(|stored| (*stored).clone())
        }
        _ => None,
    });
    stored.collect()
}

/// Returns the stored data of a complete key.
async fn all_of<A: DedupAdapter + ?Sized>(adapter: &A, key: &DedupKey) -> Option<StoredData> {
    all_of_each(adapter, slice::from_ref(key)).await.remove(0)
}

async fn all_of_each<A: DedupAdapter + ?Sized>(
    adapter: &A,
    keys: &[DedupKey],
) -> Vec<Option<StoredData>> {
    fetched(adapter, keys, leased().with_fetch(Fetch::DigestAndResponse)).await
}

/// A completion stores its data, and a duplicate returns it. Later completions change nothing.
pub(super) async fn completion_stores_what_it_carries<S: Store>(store: S) {
    let (adapter, keys) = (store.adapter(), key("a"));
    let mine = with_payload(leased(), &keys, 7);
    assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), FIRST);
    // In flight: nothing is returned yet.
    assert_eq!(all_of(&*adapter, &keys).await, None);
    let stored_response = response("<Response/>");
    let done = mine.clone().with_response(Arc::clone(&stored_response));
    assert_eq!(adapter.complete(&keys, &done).await.unwrap(), CompleteReply::Held);
    assert_eq!(all_of(&*adapter, &keys).await, Some(data(7, Some(&stored_response))));
    // Neither a repeated completion nor another token's changes it.
    adapter.complete(&keys, &mine).await.unwrap();
    let late = with_payload(leased(), &keys, 8).with_response(response("other"));
    assert_eq!(adapter.complete(&keys, &late).await.unwrap(), CompleteReply::LeaseLost);
    assert_eq!(all_of(&*adapter, &keys).await, Some(data(7, Some(&stored_response))));
}

/// Each key has its own stored data, also if the calls have the same terms. A duplicate without stored data returns
/// empty stored data.
pub(super) async fn each_key_has_its_own_stored_data<S: Store>(store: S) {
    let adapter = store.adapter();
    let keys: Vec<DedupKey> = (b'a'..=b'f').map(|id| key(&char::from(id).to_string())).collect();
    let some = || keys.iter().zip(0..4).map(|(key, payload)| (key.clone(), [payload; 32]));
    let mine = leased().with_payloads(some());
    let (at_once, claimed) = keys.split_at(2);
    // A claim over the row of a failed handler stores them too.
    let failed = leased();
    adapter.claim(&at_once[1], &failed).await.unwrap();
    adapter.release(&at_once[1], &failed).await.unwrap();
    claim_all(&*adapter, at_once, &complete_at_once().with_payloads(some())).await;
    claim_all(&*adapter, claimed, &mine).await;
    complete_all(&*adapter, &claimed[..3], &mine).await;
    let stored = |payload| Some(data(payload, None));
    let empty = Some(StoredData::default());
    let expected = [stored(0), stored(1), stored(2), stored(3), empty, None];
    assert_eq!(all_of_each(&*adapter, &keys).await, expected);
}

/// A late completion of a missing or lapsed key stores its data too.
pub(super) async fn late_completion_stores_what_it_carries<S: Store>(store: S) {
    let (adapter, missing, lapsed) = (store.adapter(), key("missing"), key("lapsed"));
    let stored_response = response(Bytes::from_static(b"\0\xff"));
    let late =
        |key: &DedupKey| with_payload(leased(), key, 5).with_response(Arc::clone(&stored_response));
    assert_eq!(adapter.complete(&missing, &late(&missing)).await.unwrap(), CompleteReply::Inserted);
    adapter.claim(&lapsed, &leased()).await.unwrap();
    store.advance(LEASE + SLACK).await;
    adapter.complete(&lapsed, &late(&lapsed)).await.unwrap();
    for keys in [&missing, &lapsed] {
        assert_eq!(all_of(&*adapter, keys).await, Some(data(5, Some(&stored_response))));
    }
}

/// `Fetch` selects the data of a duplicate: nothing, the digest, or the digest and the response.
pub(super) async fn duplicate_carries_what_the_call_fetches<S: Store>(store: S) {
    let (adapter, keys) = (store.adapter(), ["?", "both", "plain", "running"].map(key));
    let stored_response = response("<Response/>");
    let mine = with_payload(leased(), &keys[1], 7);
    claim_all(&*adapter, &keys[1..], &mine).await;
    let done = mine.with_response(Arc::clone(&stored_response));
    complete_all(&*adapter, &keys[1..3], &done).await;
    let plain = StoredData::new(None, Some(Arc::clone(&stored_response)));
    let digests = [None, Some(data(7, None)), Some(StoredData::default()), None];
    let all = [None, Some(data(7, Some(&stored_response))), Some(plain), None];
    for terms in [leased, complete_at_once] {
        let replies = fetched(&*adapter, &keys, terms()).await;
        assert_eq!(replies, [None, None, None, None]);
        let replies = fetched(&*adapter, &keys, terms().with_fetch(Fetch::Digest)).await;
        assert_eq!(replies, digests);
        let everything = terms().with_fetch(Fetch::DigestAndResponse);
        assert_eq!(fetched(&*adapter, &keys, everything).await, all);
    }
}

/// The stored data of a key ends with its retention, and with a release. A later claim of the key does not return it.
pub(super) async fn stored_data_ends_with_the_retention<S: Maintained>(store: S) {
    let (adapter, keys) = (store.adapter(), ["claimed", "completed", "once"].map(key));
    let mine = with_payloads(leased(), &keys, 7).with_response(response("old"));
    complete_all(&*adapter, &keys, &mine).await;
    store.advance(RETENTION).await;
    let second = leased();
    assert_eq!(adapter.claim(&keys[0], &second).await.unwrap(), FIRST);
    assert_eq!(all_of(&*adapter, &keys[0]).await, None);
    complete_all(&*adapter, &keys[..2], &second).await;
    assert_eq!(adapter.claim(&keys[2], &complete_at_once()).await.unwrap(), FIRST);
    assert_eq!(all_of_each(&*adapter, &keys).await, vec![Some(StoredData::default()); 3]);
    adapter.forget(&keys[0]).await.unwrap();
    assert_eq!(all_of(&*adapter, &keys[0]).await, None);
    let (released, mine) = (key("released"), with_payload(complete_at_once(), &key("released"), 7));
    adapter.claim(&released, &mine).await.unwrap();
    adapter.release(&released, &mine).await.unwrap();
    assert_eq!(adapter.complete(&released, &leased()).await.unwrap(), CompleteReply::Inserted);
    assert_eq!(all_of(&*adapter, &released).await, Some(StoredData::default()));
}

/// `get` returns the stored data of a complete key, and of no other key. It changes nothing.
pub(super) async fn get_returns_the_stored_data_of_a_complete_key<S: Maintained>(store: S) {
    let (adapter, keys) = (store.adapter(), ["full", "plain", "released", "running"].map(key));
    let stored_response = response("<Response/>");
    let mine = with_payloads(leased(), &keys, 7).with_response(Arc::clone(&stored_response));
    claim_all(&*adapter, &keys, &mine).await;
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
pub(super) async fn duplicate_beside_completions_carries_whole_stored_data<S: Store>(store: S) {
    let adapter = store.adapter();
    for round in 0..20_u8 {
        let keys = [key(&format!("{round}-a")), key(&format!("{round}-b"))];
        let (mine, stored_response) =
            (with_payloads(leased(), &keys, round), response(vec![round; 10_000]));
        claim_all(&*adapter, &keys, &mine).await;
        let whole = data(round, Some(&stored_response));
        let readers = (0..4).map(|reader| {
            let (adapter, keys, whole) = (store.adapter(), keys.clone(), whole.clone());
            tokio::spawn(async move {
                loop {
                    let terms = if reader % 2 == 0 { leased() } else { complete_at_once() };
                    let terms = terms.with_fetch(Fetch::DigestAndResponse);
                    let claimed = claim_all(&*adapter, &keys, &terms).await;
                    let duplicates = claimed.iter().filter(|claimed| match claimed {
                        ClaimReply::Duplicate(seen) => {
                            assert_eq!(seen.stored.as_deref(), Some(&whole));
                            true
                        }
                        ClaimReply::InFlight => false,
                        ClaimReply::First { .. } => panic!("{reader}: {claimed:?}"),
                    });
                    if duplicates.count() == keys.len() {
                        break;
                    }
                }
            })
        });
        let readers: Vec<_> = readers.collect();
        tokio::task::yield_now().await;
        let done = mine.with_response(stored_response);
        assert_eq!(complete_all(&*adapter, &keys, &done).await, [CompleteReply::Held; 2]);
        for reader in readers {
            let read = tokio::time::timeout(Duration::from_secs(10), reader).await;
            read.expect("the completion shows").expect("a reader");
        }
    }
}

/// Duplicates beside releases: a duplicate carries the data of a row that was complete when it was read. A store that
/// reads them in a second step finds a row that was released since, or that of the next claim.
pub(super) async fn duplicate_beside_releases_carries_whole_stored_data<S: Store>(store: S) {
    const ROUNDS: usize = 150;
    let keys = key("a");
    let tasks = (0..4_u8).map(|payload| {
        let (adapter, keys) = (store.adapter(), keys.clone());
        tokio::spawn(async move {
            let mut failed = 0;
            for round in 0..ROUNDS {
                let mine = with_payload(complete_at_once(), &keys, payload);
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
                }
            }
            assert!(failed < ROUNDS / 10, "{failed} of {ROUNDS} claims have failed");
        })
    });
    for ended in join_all(tasks.collect::<Vec<_>>()).await {
        ended.expect("a duplicate has the data of another task's claim");
    }
}

/// Races of claims that are complete at once: the losers get the stored data of the one winner.
pub(super) async fn losers_of_a_race_get_the_stored_data_of_the_winner<S: Store>(store: S) {
    for round in 0..30 {
        let keys = key(&round.to_string());
        let racers = (0..8_u8).map(|payload| {
            let (adapter, keys) = (store.adapter(), keys.clone());
            tokio::spawn(async move {
                let terms = with_payload(complete_at_once(), &keys, payload);
                let terms = terms.with_fetch(Fetch::Digest);
                loop {
                    match adapter.claim(&keys, &terms).await.unwrap() {
                        ClaimReply::First { .. } => break (true, payload),
                        ClaimReply::Duplicate(seen) => {
                            let stored = seen.stored.expect("a duplicate carries stored data");
                            let digest = stored.payload_sha256.expect("the winner's digest");
                            break (false, digest[0]);
                        }
                        // Another racer is about to win.
                        ClaimReply::InFlight => tokio::task::yield_now().await,
                    }
                }
            })
        });
        let ended = join_all(racers.collect::<Vec<_>>()).await;
        let ended: Vec<(bool, u8)> = ended.into_iter().map(|one| one.expect("a racer")).collect();
        let winners: Vec<u8> = ended.iter().filter(|(won, _)| *won).map(|(_, own)| *own).collect();
        assert_eq!(winners.len(), 1, "{ended:?}");
        assert!(ended.iter().all(|(_, payload)| *payload == winners[0]), "{ended:?}");
    }
}

/// Bodies and headers of any size and shape come back byte by byte.
pub(super) async fn hostile_responses_come_back_unchanged<S: Store>(store: S) {
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
        let stored = all_of(&*adapter, &keys).await;
        assert_eq!(stored, Some(StoredData::new(None, Some(stored_response))), "{number}");
    }
}
