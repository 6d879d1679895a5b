//! The parameter of a completion in the transaction of a handler.

use tower_dedup::DedupKey;
use tower_dedup::adapter::contract::CallTerms;

use crate::row::{fetches_response, header_lines, milliseconds};

/// Returns the text of a JSON object for `sql/completion.sql`. All its strings are hex digits, which need no escaping.
pub(crate) fn parameter(keys: &[(&DedupKey, &CallTerms)]) -> String {
    let event = |(key, terms): &(&DedupKey, &CallTerms)| {
        let [namespace, id] = [key.namespace(), key.id()].map(|text| quoted(text.as_bytes()));
        let sha256 = terms.payload_sha256().map_or_else(null, |sha256| quoted(&sha256));
        format!("[{namespace},{id},{sha256}]")
    };
    let events: Vec<String> = keys.iter().map(event).collect();
    // Without keys, nothing is completed.
    let Some((_, terms)) = keys.first() else { return r#"{"events":[]}"#.to_owned() };
    // One response answers the delivery, and is stored with each of its events.
    let response = terms.response();
    format!(
        r#"{{"token":{},"retention_ms":{},"keeps_lease":{},"status":{},"headers":{},"body":{},"events":[{}]}}"#,
        quoted(terms.token().as_bytes()),
        milliseconds(terms.retention()),
        // The layer adds the response to the complete row. Until then the event is in flight for its duplicates.
        fetches_response(terms.fetch()) && response.is_none(),
        response.map_or_else(null, |response| response.status.as_u16().to_string()),
        response.map_or_else(null, |response| quoted(&header_lines(&response.headers))),
        response.map_or_else(null, |response| quoted(&response.body)),
        events.join(","),
    )
}

fn null() -> String {
    "null".to_owned()
}

/// Returns a JSON string of hex digits.
fn quoted(bytes: &[u8]) -> String {
    format!("\"{}\"", hex(bytes))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
