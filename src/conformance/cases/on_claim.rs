//! Claims that are complete at once, one caller at a time, and terms that an adapter does not support.

use super::super::driver::{FIRST, SLACK, complete_at_once, key, leased, story};
use super::super::store::Store;
use crate::adapter::contract::{ClaimReply, DedupAdapter, Fetch};
use crate::error::StoreErrorKind;

/// The first claim of a key is first, also if it is repeated with its token, because the first reply may be lost. Every
/// claim with another token is a duplicate with the age of the key.
pub(super) async fn claim_complete_at_once_is_first_once<S: Store>(store: S) {
    let (adapter, keys, mine) = (store.adapter(), key("a"), complete_at_once());
    for _ in 0..3 {
        assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), FIRST);
    }
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

/// Only the token of the claim releases a key that is complete at once. Then the key is new.
pub(super) async fn key_complete_at_once_is_first_again_after_its_release<S: Store>(store: S) {
    story(&store, "a", "a undo; a once 1; b undo; b once D; a undo; a undo; b once 1").await;
}

/// A key that is complete at once is a duplicate until its retention ends. Then the key is new.
pub(super) async fn key_complete_at_once_is_first_again_after_its_retention<S: Store>(store: S) {
    story(&store, "a", "a once 1; 3580 s; b once D; 20 s; b once 1").await;
}

/// An adapter without leases or without stored data refuses the terms that need them, and writes
/// nothing.
pub(super) async fn unsupported_terms_are_refused_before_anything_is_written<S: Store>(store: S) {
    let (adapter, keys) = (store.adapter(), key("a"));
    let abilities = adapter.abilities();
    let mut refused = Vec::new();
    if !abilities.leases {
        refused.push(leased());
        for kind in [
            adapter.renew(&keys, &leased()).await.map(drop),
            adapter.complete(&keys, &leased()).await.map(drop),
        ] {
            assert_eq!(kind.unwrap_err().kind(), StoreErrorKind::Unsupported);
        }
    }
    if !abilities.stored_data {
        refused.push(complete_at_once().with_fetch(Fetch::Digest));
        refused.push(complete_at_once().with_payloads([(keys.clone(), [7; 32])]));
    }
    for terms in refused {
        let error = adapter.claim(&keys, &terms).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unsupported, "{terms:?}");
    }
    assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), FIRST);
}
