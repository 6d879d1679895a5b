//! The stored responses of duplicates: a second statement of the same adapter call.
//!
//! Responses are large, and a batch has many callers. So a batch reads at most digests, and each caller
//! reads its own responses afterwards, on a connection of the pool. The pool's size bounds how many
//! callers read at once, and one statement reads at most 64 responses.

use std::future::Future;

use super::super::replies::Claimed;
use super::super::stored::Fetch;
use super::super::terms::CallTerms;
use super::call::Rows;
use super::row::Row;
use crate::error::Error;
use crate::key::DedupKey;

/// Adds the responses to the duplicates among the replies to one call, if its terms fetch responses.
/// A row that is no longer complete is in flight.
///
/// # Errors
///
/// Those of `read`, and [`ErrorKind::Corrupt`](crate::ErrorKind::Corrupt) for an unreadable response.
/// The outcome of the call is unknown: it may have claimed other keys.
pub(in crate::adapter) async fn add_responses<'c, F>(
    keys: &'c [DedupKey],
    terms: &'c CallTerms,
    hash: impl Fn(&DedupKey) -> u128,
    mut claimed: Vec<Claimed>,
    read: impl FnOnce(Rows<'c>) -> F,
) -> Result<Vec<Claimed>, Error>
where
    F: Future<Output = Result<Vec<Option<Row>>, Error>>,
{
    if terms.fetch() != Fetch::DigestAndResponse {
        return Ok(claimed);
    }
    let is_duplicate = |reply: &Claimed| matches!(reply, Claimed::Duplicate(_));
    let duplicates: Vec<usize> =
        (0..claimed.len()).filter(|index| is_duplicate(&claimed[*index])).collect();
    if duplicates.is_empty() {
        return Ok(claimed);
    }
    // The next statement may fail or time out, and no handler may run for a known duplicate.
    terms.note_duplicate();
    let rows = read(Rows::of_call(keys, terms, hash).select(&duplicates)).await;
    for (index, row) in duplicates.into_iter().zip(rows.map_err(Error::with_unknown_outcome)?) {
        let reply = row.map(|row| row.claimed(terms)).transpose()?.flatten();
        claimed[index] = reply.filter(is_duplicate).unwrap_or(Claimed::InFlight);
    }
    Ok(claimed)
}
