//! The log records and the counters that are not those of a delivery.

use std::time::Duration;

use super::error_text::chain;
use crate::error::Error;
use crate::key::DedupKey;

// Of one event.

/// Reports that a handler starts after another lease on its event lapsed.
pub(crate) fn takeover(key: &DedupKey, attempt: u32) {
    count!("tower_dedup_takeovers_total", "namespace" => key.namespace().to_owned());
    log!(WARN, key, attempt, "takeover: an earlier handler of this event died or lost its lease");
}

/// Reports that a handler lost its lease while it ran.
pub(crate) fn lease_lost(key: &DedupKey) {
    count!("tower_dedup_leases_lost_total", "namespace" => key.namespace().to_owned());
    log!(WARN, key, "lease lost: another handler may have run this event too");
}

/// Reports that a handler starts although the store did not reply.
pub(crate) fn unprotected(key: &DedupKey, error: &Error) {
    count!("tower_dedup_unprotected_total", "namespace" => key.namespace().to_owned());
    log!(WARN, key, error = chain(error), "running unprotected: the store did not reply");
}

/// Reports a duplicate by the digest of its body only.
pub(crate) fn same_body(key: &DedupKey) {
    log!(WARN, key, "same body: it was handled under another id, and this id stays free");
}

/// Reports that an event was handled before with another payload.
pub(crate) fn mismatch(key: &DedupKey) {
    count!("tower_dedup_mismatches_total", "namespace" => key.namespace().to_owned());
    log!(WARN, key, "payload mismatch: this event was handled with another payload");
}

/// Reports that a handler's response cannot be stored.
pub(crate) fn response_not_stored(key: &DedupKey, why: &'static str) {
    count!("tower_dedup_responses_not_stored_total", "namespace" => key.namespace().to_owned());
    log!(WARN, key, why, "response not stored: duplicates of this event get an empty response");
}

/// Reports that the row of a claim of this process was gone when its completion came.
pub(crate) fn claim_missing(key: &DedupKey) {
    count!("tower_dedup_store_losses_total", "kind" => "missing");
    log!(
        ERROR,
        key,
        kind = "missing",
        "the store lost a claim: another handler may have run this event too"
    );
}

/// Reports that a server shows signs of a loss.
#[cfg(feature = "redis")]
pub(crate) fn store_loss_suspected(kind: &'static str, primary: &str) {
    count!("tower_dedup_store_losses_total", "kind" => kind);
    tracing::warn!(
        target: "tower_dedup",
        kind,
        primary,
        "the store may have lost acknowledged writes: events of the last time may run again"
    );
}

// Of a layer and its requests.

/// Reports a retention below the retention floor.
pub(crate) fn short_retention(namespace: &str, retention: Duration, floor: Duration) {
    tracing::warn!(
        target: "tower_dedup",
        namespace,
        retention_s = retention.as_secs(),
        floor_s = floor.as_secs(),
        "the retention is shorter than the time in which this sender may deliver an event again"
    );
}

/// Reports that replays under another id are not recognised.
pub(crate) fn unsigned_id(namespace: &str) {
    tracing::warn!(
        target: "tower_dedup",
        namespace,
        "unsigned id: this sender does not sign the id, so a captured delivery runs again under \
         another id; add a `content_identity`"
    );
}

/// Counts and reports a request that is not verified. The URI grammar keeps control characters out of the path.
#[cfg(feature = "verify")]
pub(crate) fn not_verified(
    preset: Option<&'static str>,
    path: &str,
    name: &'static str,
    reason: &dyn std::fmt::Display,
) {
    let sender = preset.unwrap_or("other");
    count!("tower_dedup_not_verified_total", "preset" => sender, "reason" => name);
    tracing::warn!(target: "tower_dedup", preset, path, %reason, "not verified");
}

/// Reports a body limit below the largest body of the sender.
pub(crate) fn small_body_limit(namespace: &str, limit: usize, largest: usize) {
    tracing::warn!(
        target: "tower_dedup",
        namespace,
        limit_bytes = limit,
        largest_bytes = largest,
        "the body limit is smaller than the largest body of this sender: such a delivery gets 413"
    );
}

/// Reports that an argument of a handler is not available, and what the user should change.
#[cfg(feature = "axum")]
pub(crate) fn rejected(
    argument: &'static str,
    error: &(dyn std::error::Error + 'static),
    fix: &'static str,
) {
    tracing::warn!(
        target: "tower_dedup",
        argument,
        error = chain(error),
        fix,
        "rejected: an argument of the handler is not available"
    );
}

/// Counts a delivery in shadow.
pub(crate) fn shadow(namespace: &str, verdict: &'static str) {
    let namespace = namespace.to_owned();
    count!("tower_dedup_shadow_total", "namespace" => namespace, "verdict" => verdict);
}

/// Reports that the mode of a layer has changed.
pub(crate) fn mode_changed(namespace: &str, from: &'static str, to: &'static str) {
    tracing::info!(target: "tower_dedup", namespace, from, to, "mode changed");
}

// Of a store.

/// Counts a connection of the queue's lanes that was lost. The lane opens another one.
#[cfg(feature = "postgres")]
pub(crate) fn lane_restarted(store: &'static str) {
    count!("tower_dedup_lane_restarts_total", "store" => store);
}

/// Counts live keys that a store has forgotten.
#[cfg(feature = "memory")]
pub(crate) fn evicted(keys: u64) {
    count!(keys; "tower_dedup_evicted_total");
}

/// Reports that a store has forgotten live keys; `age` is the age of the youngest.
#[cfg(feature = "memory")]
pub(crate) fn evicting(keys: u64, age: Duration) {
    tracing::warn!(
        target: "tower_dedup",
        keys,
        age_s = age.as_secs(),
        "evicted: the memory store is full and forgets events that may be delivered again"
    );
}

/// Reports that a store is nearly full.
#[cfg(feature = "memory")]
pub(crate) fn nearly_full() {
    tracing::warn!(
        target: "tower_dedup",
        "nearly full: the memory store has reached four fifths of its capacity"
    );
}

/// Counts expired keys that were deleted.
pub(crate) fn purged(keys: u64) {
    count!(keys; "tower_dedup_purged_total");
    tracing::debug!(target: "tower_dedup", keys, "purged");
}

/// Reports a failed round of a purge, at WARN if it is the first one after a success.
pub(crate) fn purge_failed(error: &Error, is_first: bool) {
    let error = chain(error);
    if is_first {
        tracing::warn!(target: "tower_dedup", error, "purging failed; it is tried again");
    } else {
        tracing::debug!(target: "tower_dedup", error, "purging failed; it is tried again");
    }
}

/// Reports that a connection to another host has no TLS.
#[cfg(feature = "postgres")]
pub(crate) fn not_encrypted(host: &str) {
    tracing::warn!(
        target: "tower_dedup",
        host,
        "not encrypted: the connection to Postgres on another host has no TLS. Set \
         `sslmode=verify-full`, and a feature: `tls-rustls`, `tls-rustls-aws-lc-rs` or `tls-native-tls`"
    );
}

/// Reports that calls are refused until the server is mended.
#[cfg(feature = "redis")]
pub(crate) fn redis_is_unfit(
    server: &impl std::fmt::Display,
    fault: &(dyn std::error::Error + 'static),
) {
    tracing::error!(
        target: "tower_dedup",
        server = %server,
        error = chain(fault),
        "the Redis server may not be used: every call is refused until it is mended"
    );
}

/// Reports that a server does not say whether it evicts keys.
#[cfg(feature = "redis")]
pub(crate) fn redis_hides_its_policy() {
    tracing::warn!(
        target: "tower_dedup",
        "the Redis server hides its eviction policy: set it to noeviction"
    );
}
