//! Claims that are complete at once, one caller at a time.

use super::super::driver::{FIRST, RETENTION, SLACK, complete_at_once, is_duplicate, key};
use super::super::store::Store;
use crate::adapter::contract::{ClaimReply, DedupAdapter};

/// The first claim of a key is first. Every later claim is a duplicate with the age of the key.
pub(super) async fn claim_complete_at_once_is_first_once<S: Store>(store: S) {
    let (adapter, keys) = (store.adapter(), key("a"));
    assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), FIRST);
    store.advance(SLACK).await;
    for _ in 0..3 {
        match &adapter.claim(&keys, &complete_at_once()).await.unwrap() {
            ClaimReply::Duplicate(seen) => {
                assert!(seen.age >= SLACK && seen.age < 2 * SLACK, "{:?}", seen.age);
            }
            ref other => panic!("{other:?}"),
        }
    }
}

/// A claim that is repeated with its token returns the same reply, because the first reply may be
/// lost. A claim with another token is a duplicate.
pub(super) async fn claim_complete_at_once_repeated_with_its_token_is_first<S: Store>(store: S) {
    let (adapter, keys, mine) = (store.adapter(), key("a"), complete_at_once());
    for _ in 0..3 {
        assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), FIRST);
    }
    assert!(is_duplicate(&adapter.claim(&keys, &complete_at_once()).await.unwrap()));
}

/// Only the token of the claim releases a key that is complete at once. Then the key is new.
pub(super) async fn key_complete_at_once_is_first_again_after_its_release<S: Store>(store: S) {
    let (adapter, keys, mine) = (store.adapter(), key("a"), complete_at_once());
    adapter.release(&keys, &mine).await.unwrap();
    adapter.claim(&keys, &mine).await.unwrap();
    adapter.release(&keys, &complete_at_once()).await.unwrap();
    adapter.release(&keys, &mine).await.unwrap();
    adapter.release(&keys, &mine).await.unwrap();
    assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), FIRST);
}

/// A key that is complete at once is a duplicate until its retention ends. Then the key is new.
pub(super) async fn key_complete_at_once_is_first_again_after_its_retention<S: Store>(store: S) {
    let (adapter, keys) = (store.adapter(), key("r"));
    assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), FIRST);
    store.advance(RETENTION - SLACK).await;
    assert!(is_duplicate(&adapter.claim(&keys, &complete_at_once()).await.unwrap()));
    store.advance(SLACK).await;
    assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), FIRST);
}
