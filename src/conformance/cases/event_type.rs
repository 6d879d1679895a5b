//! The type of an event, which operators see.

use super::super::driver::{
    LEASE, RETENTION, SLACK, claim_all, complete_at_once, is_duplicate, key, leased,
};
use super::super::store::Maintained;
use crate::adapter::contract::{ClaimReply, CompleteReply, DedupAdapter};
use crate::adapter::inspect::MaintenanceAdapter;
use crate::key::DedupKey;

/// The type of an event is stored with a new key. Only a key that is new again gets another type.
pub(super) async fn event_type_is_stored_with_a_new_key<S: Maintained>(store: S) {
    let adapter = store.adapter();
    let keys = ["a leased", "b at once", "c completed", "d renewed", "e none"].map(key);
    let [leases, at_once, completed, renewed, none] = &keys;
    let types = |name: &str| {
        keys[..4]
            .iter()
            .map(|key| (key.clone(), format!("{name} {}", key.id())))
            .collect::<Vec<_>>()
    };
    let stored =
        async |key: &DedupKey| adapter.get(key).await.unwrap().expect("an entry").event_type;
    let mine = leased().with_event_types(types("first"));
    claim_all(&*adapter, &[leases.clone(), none.clone()], &mine).await;
    let claim = complete_at_once().with_event_types(types("first"));
    adapter.claim(at_once, &claim).await.unwrap();
    adapter.complete(completed, &mine).await.unwrap();
    adapter.renew(renewed, &mine).await.unwrap();
    let all_are = async |name: &str| {
        for key in &keys[..4] {
            assert_eq!(stored(key).await, Some(format!("{name} {}", key.id())));
        }
        assert_eq!(stored(none).await, None);
    };
    all_are("first").await;

    // A takeover, the completion of its claim, and duplicates.
    store.advance(LEASE + SLACK).await;
    let other = leased().with_event_types(types("other"));
    for key in [leases, renewed] {
        assert_eq!(adapter.claim(key, &other).await.unwrap(), ClaimReply::first(2, true));
        assert_eq!(adapter.complete(key, &other).await.unwrap(), CompleteReply::Held);
    }
    for key in &keys[..4] {
        assert!(is_duplicate(&adapter.claim(key, &other).await.unwrap()));
    }
    all_are("first").await;

    // Each key is new again after its retention.
    store.advance(RETENTION + SLACK).await;
    let new = leased().with_event_types(types("new"));
    let claim = complete_at_once().with_event_types(types("new"));
    claim_all(&*adapter, &[leases.clone(), renewed.clone(), none.clone()], &new).await;
    adapter.claim(at_once, &claim).await.unwrap();
    adapter.complete(completed, &new).await.unwrap();
    all_are("new").await;
}
