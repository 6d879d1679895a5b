//! The parameter of a completion in the handler's transaction, as both databases take it.

use serde_json::{Value, json};

use super::super::stored::{Fetch, StoredResponse};
use super::super::terms::CallTerms;
use crate::key::{DedupKey, hex};

/// Returns the text of a JSON object: the events as `event` names each with the hex digits of its payload's SHA-256,
/// their terms, and the response that is stored with all of them. Bytes are in hex. `idle_ms` is the bound on an idle
/// transaction, where the statement sets it.
pub(in crate::adapter) fn completion_json(
    keys: &[DedupKey],
    terms: &CallTerms,
    (retention_ms, idle_ms): (i64, Option<i32>),
    mark: Option<&str>,
    first: bool,
    event: impl Fn(&DedupKey, Option<String>) -> Value,
) -> String {
    let events = keys.iter().map(|key| {
        let data = terms.stored_data_for(key).and_then(|data| data.payload_sha256);
        event(key, data.map(|sha256| hex(&sha256)))
    });
    let response = terms.response();
    let awaits = terms.fetch() == Fetch::DigestAndResponse && response.is_none();
    json!({
        "token": hex(terms.token().as_bytes()),
        "mark": mark,
        "first": first,
        // The layer adds the response to the complete row. Until then the event is in flight for its duplicates, for a
        // lease at most: the lease of the claim may be over.
        "lease_ms": awaits.then(|| terms.lease_ms().min(retention_ms)),
        "retention_ms": retention_ms,
        "idle_ms": idle_ms,
        "events": events.collect::<Vec<_>>(),
        "status": response.map(|response| response.status.as_u16()),
        "headers": response.map(StoredResponse::headers_json),
        "body": response.map(|response| hex(&response.body)),
    })
    .to_string()
}
