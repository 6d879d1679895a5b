//! The stored response of a duplicate: a second statement of the same adapter call.
//!
//! Responses are large, and a batch has many callers. So a batch reads at most digests, and each caller
//! reads its own response afterwards, on a connection of the pool. The pool's size bounds how many
//! callers read at once.

use std::future::Future;
use std::slice;

use super::super::replies::Claimed;
use super::super::stored::Fetch;
use super::super::terms::CallTerms;
use super::call::Rows;
use super::row::Row;
use crate::error::Error;
use crate::key::DedupKey;

/// Adds the response to a duplicate, if its terms fetch responses. A row that is no longer complete is in
/// flight.
///
/// # Errors
///
/// Those of `read`, and [`ErrorKind::Corrupt`](crate::ErrorKind::Corrupt) for an unreadable response.
pub(in crate::adapter) async fn add_response<'c, F>(
    key: &'c DedupKey,
    terms: &'c CallTerms,
    hash: impl Fn(&DedupKey) -> u128,
    claimed: Claimed,
    read: impl FnOnce(Rows<'c>) -> F,
) -> Result<Claimed, Error>
where
    F: Future<Output = Result<Vec<Option<Row>>, Error>>,
{
    let is_duplicate = |reply: &Claimed| matches!(reply, Claimed::Duplicate(_));
    if terms.fetch() != Fetch::DigestAndResponse || !is_duplicate(&claimed) {
        return Ok(claimed);
    }
    // The next statement may fail or time out, and no handler may run for a known duplicate.
    terms.note_duplicate();
    let rows = read(Rows::of_call(slice::from_ref(key), terms, hash)).await?;
    let reply = rows.into_iter().flatten().next().map(|row| row.claimed(terms)).transpose()?;
    Ok(reply.flatten().filter(is_duplicate).unwrap_or(Claimed::InFlight))
}
