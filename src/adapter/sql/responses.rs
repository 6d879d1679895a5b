//! The stored response of a duplicate: a second statement of the same adapter call.
//!
//! Responses are large, and a batch has many callers. So a batch reads at most digests, and each caller
//! reads its own response afterwards, on a connection of the pool. The pool's size bounds how many
//! callers read at once.

use std::future::Future;

use super::super::replies::ClaimReply;
use super::super::stored::Fetch;
use super::super::terms::CallTerms;
use super::row::Row;
use crate::error::Error;

/// Returns how many rows one statement reads. A response is large.
pub(in crate::adapter) fn most_read(fetch: Fetch) -> usize {
    if fetch == Fetch::DigestAndResponse { MAX_RESPONSES } else { usize::MAX }
}

const MAX_RESPONSES: usize = 64;

/// The operation, for the text of an error.
pub(in crate::adapter) const READING_RESPONSE: &str = "reading a stored response";

/// Adds the response to a duplicate, if its terms fetch responses. `read` reads the row. A row that is no longer
/// complete, or whose response is on its way, is in flight.
pub(in crate::adapter) async fn add_response<F>(
    terms: &CallTerms,
    claimed: ClaimReply,
    read: impl FnOnce() -> F,
) -> Result<ClaimReply, Error>
where
    F: Future<Output = Result<Option<Row>, Error>>,
{
    let is_duplicate = |reply: &ClaimReply| matches!(reply, ClaimReply::Duplicate(_));
    if terms.fetch() != Fetch::DigestAndResponse || !is_duplicate(&claimed) {
        return Ok(claimed);
    }
    // The next statement may fail or time out, and no handler may run for a known duplicate.
    terms.note_duplicate();
    let row = read().await?.filter(|row| !row.awaits_response());
    let reply = row.map(|row| row.claimed(terms)).transpose()?;
    Ok(reply.flatten().filter(is_duplicate).unwrap_or(ClaimReply::InFlight))
}
