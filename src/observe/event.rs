//! Records and counters about one event.

use super::error_text::chain;
use crate::error::Error;
use crate::key::DedupKey;

/// Counts under the namespace of `key`.
#[cfg_attr(not(feature = "metrics"), expect(unused_variables, reason = "metrics only"))]
pub(super) fn count(counter: &'static str, key: &DedupKey) {
    #[cfg(feature = "metrics")]
    metrics::counter!(counter, "namespace" => key.namespace().to_owned()).increment(1);
}

/// Reports that a handler starts after another lease on its event lapsed.
pub(crate) fn takeover(key: &DedupKey, attempt: u32) {
    count("tower_dedup_takeovers_total", key);
    log!(WARN, key, attempt, "takeover: an earlier handler of this event died or lost its lease");
}

/// Reports that a handler lost its lease while it ran.
pub(crate) fn lease_lost(key: &DedupKey) {
    count("tower_dedup_leases_lost_total", key);
    log!(WARN, key, "lease lost: another handler may have run this event too");
}

/// Reports that a handler starts although the store did not reply.
pub(crate) fn unprotected(key: &DedupKey, error: &Error) {
    count("tower_dedup_unprotected_total", key);
    log!(WARN, key, error = chain(error), "running unprotected: the store did not reply");
}

/// Reports that an event was handled before with another payload.
pub(crate) fn same_body(key: &DedupKey) {
    log!(WARN, key, "same body: it was handled under another id, and this id stays free");
}

pub(crate) fn mismatch(key: &DedupKey) {
    count("tower_dedup_mismatches_total", key);
    log!(WARN, key, "payload mismatch: this event was handled with another payload");
}

/// Reports that a handler's response cannot be stored.
pub(crate) fn response_not_stored(key: &DedupKey, why: &'static str) {
    count("tower_dedup_responses_not_stored_total", key);
    log!(WARN, key, why, "response not stored: duplicates of this event get an empty response");
}
