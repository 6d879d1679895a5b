//! Terms that an adapter does not support.

use super::super::driver::{FIRST, complete_at_once, key, leased};
use super::super::store::Store;
use crate::adapter::contract::{DedupAdapter, Fetch};
use crate::error::ErrorKind;

/// An adapter without leases or without stored data refuses the terms that need them, and writes
/// nothing.
pub(super) async fn unsupported_terms_are_refused_before_anything_is_written<S: Store>(store: S) {
    let (adapter, keys) = (store.adapter(), key("a"));
    let abilities = adapter.abilities();
    assert!(!abilities.leases || !abilities.stored_data, "the adapter supports everything");
    let mut refused = Vec::new();
    if !abilities.leases {
        refused.push(leased());
        for kind in [
            adapter.renew(&keys, &leased()).await.map(drop),
            adapter.complete(&keys, &leased()).await.map(drop),
        ] {
            assert_eq!(kind.unwrap_err().kind(), ErrorKind::Unsupported);
        }
    }
    if !abilities.stored_data {
        refused.push(complete_at_once().with_fetch(Fetch::Digest));
        refused.push(complete_at_once().with_payloads([(keys.clone(), [7; 32])]));
    }
    for terms in refused {
        let error = adapter.claim(&keys, &terms).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{terms:?}");
    }
    assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), FIRST);
}
