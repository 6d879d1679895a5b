//! Stored data that cannot be read.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};

use super::super::driver::{is_duplicate, key, leased};
use super::super::store::Maintained;
use crate::adapter::contract::{DedupAdapter, Fetch, StoredResponse};
use crate::adapter::inspect::{ForgetReply, MaintenanceAdapter};
use crate::error::StoreErrorKind;

/// A claim that fetches an unreadable response fails: an empty response would be replayed. Other claims and operators
/// see a complete key.
pub(super) async fn unreadable_response_is_told_and_never_replayed<S: Maintained>(store: S) {
    let (adapter, key) = (store.adapter(), key("a"));
    let response = StoredResponse::new(StatusCode::OK, HeaderMap::new(), Bytes::from("a body"));
    adapter.complete(&key, &leased().with_response(Arc::new(response))).await.unwrap();
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
