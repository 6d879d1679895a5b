//! What is kept with complete keys, for stores that [`Recall`].

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};

use super::{LEASE, RETENTION, SLACK, key, new_receipt};
use crate::adapter::{
    CallTerms, Completed, DedupAdapter, Fetch, LeaseAdapter, MaintenanceAdapter, Recall,
    StoredData, StoredResponse, Token,
};
use crate::conformance::Store;
use crate::key::DedupKey;

fn response(body: impl Into<Bytes>) -> Arc<StoredResponse> {
    let mut headers = HeaderMap::new();
    headers.append("content-type", HeaderValue::from_static("text/xml; charset=utf-8"));
    headers.append("link", HeaderValue::from_static("<a>; rel=\"next\""));
    headers.append("link", HeaderValue::from_static("<b>"));
    Arc::new(StoredResponse::new(StatusCode::CREATED, headers, body.into()))
}

fn kept(payload: u8, response: Option<&Arc<StoredResponse>>) -> Option<StoredData> {
    Some(StoredData::new(Some([payload; 32]), response.cloned()))
}

/// A terms that keeps this payload with these keys.
fn keeping(keys: &[DedupKey], payload: u8) -> CallTerms {
    new_receipt().with_payloads(keys.iter().map(|key| (key.clone(), [payload; 32])))
}

/// Recall: what a completion carries is answered from then on, and not before.
pub async fn a_completion_keeps_what_it_carries<S: Store>(store: S)
where
    S::Adapter: Recall,
{
    let (adapter, keys) = (store.adapter(), [key("a")]);
    assert_eq!(adapter.recall(&keys, Fetch::DigestAndResponse).await.unwrap(), [None]);
    let mine = keeping(&keys, 7);
    adapter.claim(&keys, &mine).await.unwrap();
    assert_eq!(adapter.recall(&keys, Fetch::DigestAndResponse).await.unwrap(), [None]);
    let answer = response("<Response/>");
    let done = mine.clone().with_response(Arc::clone(&answer));
    assert_eq!(adapter.complete(&keys, &done).await.unwrap(), [Completed::Held]);
    assert_eq!(
        adapter.recall(&keys, Fetch::DigestAndResponse).await.unwrap(),
        [kept(7, Some(&answer))]
    );
    // Neither a repetition nor somebody else's completion changes it.
    adapter.complete(&keys, &mine).await.unwrap();
    let late = keeping(&keys, 8).with_response(response("other"));
    assert_eq!(adapter.complete(&keys, &late).await.unwrap(), [Completed::LeaseLost]);
    assert_eq!(
        adapter.recall(&keys, Fetch::DigestAndResponse).await.unwrap(),
        [kept(7, Some(&answer))]
    );
    // Nothing to keep is nothing kept, which is not the same as an unknown key.
    let plain = [key("plain")];
    adapter.complete(&plain, &new_receipt()).await.unwrap();
    assert_eq!(
        adapter.recall(&plain, Fetch::DigestAndResponse).await.unwrap(),
        [Some(StoredData::default())]
    );
}

/// Recall: a record keeps payloads, and loses them with the key.
pub async fn a_record_keeps_what_it_carries<S: Store>(store: S)
where
    S::Adapter: Recall,
{
    let (adapter, keys) = (store.adapter(), [key("a")]);
    let mine = keeping(&keys, 7);
    adapter.record(&keys, &mine).await.unwrap();
    adapter.record(&keys, &keeping(&keys, 8)).await.unwrap();
    assert_eq!(adapter.recall(&keys, Fetch::DigestAndResponse).await.unwrap(), [kept(7, None)]);
    adapter.unrecord(&keys, &mine).await.unwrap();
    assert_eq!(adapter.recall(&keys, Fetch::DigestAndResponse).await.unwrap(), [None]);
    // Over a row that a failed handler has left.
    let failed = [key("failed")];
    adapter.claim(&failed, &mine).await.unwrap();
    adapter.release(&failed, &mine).await.unwrap();
    adapter.record(&failed, &keeping(&failed, 9)).await.unwrap();
    assert_eq!(adapter.recall(&failed, Fetch::DigestAndResponse).await.unwrap(), [kept(9, None)]);
}

/// Recall: each key of a set has its own, and the answers are in the order of the keys.
pub async fn each_key_keeps_its_own<S: Store>(store: S)
where
    S::Adapter: Recall,
{
    let adapter = store.adapter();
    let keys: Vec<DedupKey> = (b'a'..=b'f').map(|id| key(&char::from(id).to_string())).collect();
    let some = keys.iter().zip(0..4).map(|(key, payload)| (key.clone(), [payload; 32]));
    let mine = new_receipt().with_payloads(some);
    let (recorded, claimed) = keys.split_at(2);
    adapter.record(recorded, &mine).await.unwrap();
    adapter.claim(claimed, &mine).await.unwrap();
    adapter.complete(&claimed[..3], &mine).await.unwrap();
    let mut reversed: Vec<DedupKey> = keys.clone();
    reversed.reverse();
    let none = Some(StoredData::default());
    let expected = [None, none, kept(3, None), kept(2, None), kept(1, None), kept(0, None)];
    assert_eq!(adapter.recall(&reversed, Fetch::DigestAndResponse).await.unwrap(), expected);
}

/// Recall: a late completion of a missing or lapsed key keeps what it carries too.
pub async fn a_late_completion_keeps_what_it_carries<S: Store>(store: S)
where
    S::Adapter: Recall,
{
    let (adapter, missing, lapsed) = (store.adapter(), [key("missing")], [key("lapsed")]);
    let answer = response(Bytes::from_static(b"\0\xff"));
    let late = |keys: &[DedupKey]| keeping(keys, 5).with_response(Arc::clone(&answer));
    assert_eq!(adapter.complete(&missing, &late(&missing)).await.unwrap(), [Completed::Inserted]);
    adapter.claim(&lapsed, &new_receipt()).await.unwrap();
    store.advance(LEASE + SLACK).await;
    adapter.complete(&lapsed, &late(&lapsed)).await.unwrap();
    for keys in [&missing, &lapsed] {
        assert_eq!(
            adapter.recall(keys, Fetch::DigestAndResponse).await.unwrap(),
            [kept(5, Some(&answer))]
        );
    }
}

/// Recall: who compares payloads is told them, and no responses, which are large.
pub async fn responses_are_recalled_only_if_wanted<S: Store>(store: S)
where
    S::Adapter: Recall,
{
    let (adapter, keys) = (store.adapter(), [key("both"), key("plain"), key("running"), key("?")]);
    let answer = response("<Response/>");
    let mine = keeping(&keys[..1], 7);
    adapter.claim(&keys[..3], &mine).await.unwrap();
    let done = mine.with_response(Arc::clone(&answer));
    adapter.complete(&keys[..2], &done).await.unwrap();
    let payloads = [kept(7, None), Some(StoredData::default()), None, None];
    assert_eq!(adapter.recall(&keys, Fetch::Digest).await.unwrap(), payloads);
    let plain = Some(StoredData::new(None, Some(Arc::clone(&answer))));
    let all = [kept(7, Some(&answer)), plain, None, None];
    assert_eq!(adapter.recall(&keys, Fetch::DigestAndResponse).await.unwrap(), all);
}

/// Recall: with a key's retention ends all that was kept with it, in its next life as well.
pub async fn what_is_kept_ends_with_its_retention<S: Store>(store: S)
where
    S::Adapter: Recall,
{
    let (adapter, keys) = (store.adapter(), [key("claimed"), key("completed"), key("recorded")]);
    let mine = keeping(&keys, 7).with_response(response("old"));
    adapter.complete(&keys, &mine).await.unwrap();
    store.advance(RETENTION).await;
    assert_eq!(adapter.recall(&keys, Fetch::DigestAndResponse).await.unwrap(), [None, None, None]);
    let anew = new_receipt();
    adapter.claim(&keys[..1], &anew).await.unwrap();
    assert_eq!(adapter.recall(&keys[..1], Fetch::DigestAndResponse).await.unwrap(), [None]);
    adapter.complete(&keys[..2], &anew).await.unwrap();
    adapter.record(&keys[2..], &anew).await.unwrap();
    assert_eq!(
        adapter.recall(&keys, Fetch::DigestAndResponse).await.unwrap(),
        vec![Some(StoredData::default()); 3]
    );
    adapter.forget(&keys[0]).await.unwrap();
    assert_eq!(adapter.recall(&keys[..1], Fetch::DigestAndResponse).await.unwrap(), [None]);
}

/// Recall beside completions: a recall meanwhile returns nothing, or all of it.
pub async fn recall_beside_completions_is_whole<S: Store>(store: S)
where
    S::Adapter: Recall,
{
    let adapter = store.adapter();
    for round in 0..20_u8 {
        let keys = [key(&format!("{round}-a")), key(&format!("{round}-b"))];
        let (mine, answer) = (keeping(&keys, round), response(vec![round; 10_000]));
        adapter.claim(&keys, &mine).await.unwrap();
        let whole = kept(round, Some(&answer));
        let readers = (0..4).map(|_| {
            let (adapter, keys, whole) = (store.adapter(), keys.clone(), whole.clone());
            tokio::spawn(async move {
                loop {
                    let recalled = adapter.recall(&keys, Fetch::DigestAndResponse).await.unwrap();
                    assert!(recalled.iter().all(|kept| kept.is_none() || *kept == whole));
                    if recalled == [whole.clone(), whole.clone()] {
                        break;
                    }
                }
            })
        });
        let readers: Vec<_> = readers.collect();
        tokio::task::yield_now().await;
        let done = mine.with_response(answer);
        assert_eq!(adapter.complete(&keys, &done).await.unwrap(), [Completed::Held; 2]);
        for reader in readers {
            let read = tokio::time::timeout(Duration::from_secs(10), reader).await;
            read.expect("the completion shows").expect("a reader");
        }
    }
}

/// Recall: bodies and headers of any size and shape come back byte by byte.
pub async fn hostile_responses_come_back_as_they_were<S: Store>(store: S)
where
    S::Adapter: Recall,
{
    let adapter = store.adapter();
    let every_byte: Vec<u8> = (0..=255).collect();
    let long = CallTerms::new(Token::random(), Duration::from_secs(60)).with_lease(LEASE);
    let bodies: [Vec<u8>; 4] =
        [Vec::new(), every_byte, b"'; DROP TABLE x; --\"}]".to_vec(), vec![b'x'; 300_000]];
    for (number, body) in bodies.into_iter().enumerate() {
        let keys = [key(&number.to_string())];
        let mut headers = HeaderMap::new();
        let odd = HeaderValue::from_bytes("\u{e9}\u{1f600}\t\\\"';".as_bytes()).unwrap();
        headers.append("x-odd", odd);
        headers.append("x-empty", HeaderValue::from_static(""));
        let answer = Arc::new(StoredResponse::new(StatusCode::OK, headers, body.into()));
        let mine = long.clone().with_response(Arc::clone(&answer));
        adapter.complete(&keys, &mine).await.unwrap();
        let recalled = adapter.recall(&keys, Fetch::DigestAndResponse).await.unwrap();
        assert_eq!(recalled, [Some(StoredData::new(None, Some(answer)))], "{number}");
    }
}
