//! The stored data of duplicates, read by a statement of its own.
//!
//! A key that is complete when it is claimed, and is not complete when its data is read, is in flight.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;

use super::super::replies::Claimed;
use super::super::stored::{Fetch, StoredData};
use crate::error::Error;
use crate::key::DedupKey;

/// So many responses are read by one statement at most, because responses are large.
const MOST_RESPONSES: usize = 64;

/// What is stored with each key that is complete.
pub(in crate::adapter) type StoredByKey = HashMap<DedupKey, Arc<StoredData>>;

/// Reads what is stored with those of the keys that are complete, by calls of `read`.
pub(in crate::adapter) async fn stored_by_key<F>(
    keys: Vec<DedupKey>,
    fetch: Fetch,
    read: impl Fn(Vec<DedupKey>) -> F,
) -> Result<StoredByKey, Error>
where
    F: Future<Output = Result<Vec<Option<StoredData>>, Error>>,
{
    let mut stored = HashMap::new();
    if fetch == Fetch::Nothing || keys.is_empty() {
        return Ok(stored);
    }
    let most = if fetch == Fetch::DigestAndResponse { MOST_RESPONSES } else { keys.len() };
    for part in keys.chunks(most) {
        let found = part.iter().zip(read(part.to_vec()).await?);
        stored.extend(found.filter_map(|(key, found)| Some((key.clone(), Arc::new(found?)))));
    }
    Ok(stored)
}

/// The keys that are complete.
pub(in crate::adapter) fn duplicates(keys: &[DedupKey], replies: &[Claimed]) -> Vec<DedupKey> {
    let replies = keys.iter().zip(replies);
    let duplicates = replies.filter(|(_, reply)| matches!(reply, Claimed::Duplicate(_)));
    duplicates.map(|(key, _)| key.clone()).collect()
}

/// Adds what is stored to the replies of duplicates.
pub(in crate::adapter) fn attach(keys: &[DedupKey], replies: &mut [Claimed], by_key: &StoredByKey) {
    for (key, reply) in keys.iter().zip(replies) {
        if let Claimed::Duplicate(seen) = reply {
            match by_key.get(key) {
                Some(stored) => seen.stored = Some(Arc::clone(stored)),
                None => *reply = Claimed::InFlight,
            }
        }
    }
}

/// The failure of a read after a claim: what was granted may be held.
pub(in crate::adapter) fn after_claim(error: Error, replies: &[Claimed]) -> Error {
    let is_granted = replies.iter().any(|reply| matches!(reply, Claimed::First { .. }));
    if is_granted { error.unknown() } else { error }
}
