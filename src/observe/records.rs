//! The log records that are not those of a delivery, and the counters beside them.

use std::time::Duration;

use super::meters::Meters;
use crate::error::StoreError;
use crate::key::{DedupKey, escaped};

/// Defines a function for each record, from its level, and the macro `record_rows`: the rows of
/// their documentation. The comment above a record adds to its message there.
///
/// `meters key;` before a message names the event: the record has the fields `namespace` and `id`.
/// `count` has the counter that a call increases too.
macro_rules! records {
    ($(
        $(#[doc = $remark:literal])*
        $(#[cfg($feature:meta)])?
        $(#[count($($count:tt)+)])?
        $level:ident $name:ident($($parameters:tt)*) {
            $($meters:ident $key:ident;)? $message:literal $(, $($fields:tt)+)?
        }
    )+) => {
        $(
            $(#[cfg($feature)])?
            pub(crate) fn $name($($parameters)*) {
                $(count!($($count)+);)?
                tracing::$level!(
                    target: "tower_dedup",
                    $(namespace = &*$key.shown_namespace(), id = &*$key.shown_id($meters.log_ids),)?
                    $($($fields)+,)?
                    $message
                );
            }
        )+

        macro_rules! record_rows {
            () => { concat!($("| `", $message, "` | ", stringify!($level), " |", $($remark,)* " |\n"),+) };
        }
    };
}

records! {
    #[count("tower_dedup_leases_lost_total", "namespace" => meters.label())]
    warn lease_lost(meters: &Meters, key: &DedupKey) {
        meters key; "lease lost: another handler may have run this event too"
    }

    #[count("tower_dedup_takeovers_total", "namespace" => meters.label())]
    warn takeover(meters: &Meters, key: &DedupKey, attempt: u32) {
        meters key; "takeover: an earlier handler of this event died or lost its lease", attempt
    }

    /// the handler runs all the same
    #[count("tower_dedup_unprotected_total", "namespace" => meters.label())]
    warn unprotected(meters: &Meters, key: &DedupKey, error: &StoreError) {
        meters key; "running unprotected: the store did not reply", error = chain(error)
    }

    /// once a minute at most
    error other_path(meters: &Meters, key: &DedupKey) {
        meters key; "handled on another path: this event is a duplicate here, and only a layer in shadow runs \
        this path's handler; give each route that has to see it a namespace of its own"
    }

    /// the event is a duplicate by its [content identity](crate::KeyExtractor::content_identity)
    /// only: a replay under another id, or two events with the same bytes. `by_namespace` and
    /// `by_id` are that identity
    warn same_body(meters: &Meters, key: &DedupKey, by: &DedupKey) {
        meters key; "same body: it was handled under another id, and this id stays free",
        by_namespace = &*by.shown_namespace(), by_id = &*by.shown_id(meters.log_ids)
    }

    /// the event is a duplicate by its [second identity](crate::KeyExtractor::alias) only, which
    /// `by_namespace` and `by_id` are
    info same_event(meters: &Meters, key: &DedupKey, by: &DedupKey) {
        meters key; "same event: it was handled under another id, and this id stays free",
        by_namespace = &*by.shown_namespace(), by_id = &*by.shown_id(meters.log_ids)
    }

    #[count("tower_dedup_mismatches_total", "namespace" => meters.label())]
    warn mismatch(meters: &Meters, key: &DedupKey) {
        meters key; "payload mismatch: this event was handled with another payload"
    }

    #[count("tower_dedup_responses_not_stored_total", "namespace" => meters.label())]
    warn response_not_stored(meters: &Meters, key: &DedupKey, why: &'static str) {
        meters key; "response not stored: duplicates of this event get an empty response", why
    }

    /// a handler succeeded, and the row of its claim was gone; `kind` is `missing`
    #[count("tower_dedup_store_losses_total", "kind" => "missing")]
    error claim_missing(meters: &Meters, key: &DedupKey) {
        meters key; "the store lost a claim: another handler may have run this event too", kind = "missing"
    }

    /// [`set_mode`](crate::DedupHandle::set_mode) was called; `from` and `to` are the modes
    info mode_changed(namespace: &str, from: &'static str, to: &'static str) {
        "mode changed", namespace, from, to
    }

    /// once
    warn nested(namespace: &str) {
        "nested layers: an outer layer deduplicates these requests by the same keys; this layer lets them \
        through",
        namespace
    }

    /// once a layer: the preset's sender signs its requests, and one has come without
    /// [`Verified`](crate::Verified). `fix` says what to change
    warn unverified_sender(namespace: &str) {
        "nobody verifies: this sender signs its requests, and whoever knows the URL can send others",
        namespace,
        fix = "put a `VerifyLayer` outside of the layer, and call `require_verified`; a verification of your own inserts \
               `Verified`"
    }

    /// once a layer: [`require_verified`](crate::DedupLayer::require_verified) is set, and there is
    /// no second identity, such as a [content
    /// identity](crate::guide::keys#an-id-that-is-not-signed)
    info unsigned_id(namespace: &str) {
        "unsigned id: this sender does not sign the id, so a captured delivery runs again under another id; \
        `content_identity` prevents it, and loses a real event with equal bytes",
        namespace
    }

    /// a layer is built, and the retention is below the preset's floor
    warn short_retention(namespace: &str, retention: Duration, floor: Duration) {
        "the retention is shorter than the time in which this sender may deliver an event again",
        namespace, retention_s = retention.as_secs(), floor_s = floor.as_secs()
    }

    /// a layer is built, and its body limit is below the sender's largest body
    warn small_body_limit(namespace: &str, limit: usize, largest: usize) {
        "the body limit is smaller than the largest body of this sender: such a delivery gets 413",
        namespace, limit_bytes = limit, largest_bytes = largest
    }

    /// a [`VerifyLayer`](crate::verify::VerifyLayer) has not verified the request; `preset` is the
    /// sender, `path` the path of the request, and `reason` says why. `url`, of a sender that signs
    /// the URL, is the one that it has to have signed, without the query. `claimed_id` is the id of
    /// the request, which nobody has verified. `reported` is true if the layer [only
    /// reports](crate::verify::VerifyLayer::report_only), and the request went on
    #[cfg(feature = "verify")]
    #[count("tower_dedup_not_verified_total", "preset" => preset.unwrap_or("other").to_owned(), "reason" => name)]
    warn not_verified(
        preset: Option<&str>,
        path: &str,
        url: Option<&str>,
        claimed_id: Option<&str>,
        reported: Option<bool>,
        name: &'static str,
        reason: &str
    ) {
        "not verified", preset, path, url, claimed_id, reported, reason
    }

    /// an [`EchoLayer`](crate::verify::EchoLayer) has answered a handshake; `preset` is the sender,
    /// `path` the path of the request
    #[cfg(feature = "verify")]
    info echoed(preset: &str, path: &str) { "handshake answered", preset, path }

    /// an [`EchoLayer`](crate::verify::EchoLayer) has refused a handshake; `reason` says why
    #[cfg(feature = "verify")]
    warn echo_refused(preset: &str, path: &str, reason: &str) {
        "handshake refused", preset, path, reason
    }

    /// the argument is [`Delivery`](crate::Delivery); `fix` says what to change
    #[cfg(feature = "axum")]
    warn rejected(argument: &'static str, error: &(dyn std::error::Error + 'static), fix: &'static str) {
        "rejected: an argument of the handler is not available", argument, error = chain(error), fix
    }

    /// a handler has returned a [`CommitError`](crate::CommitError)
    #[cfg(feature = "axum")]
    warn commit_failed(error: &(dyn std::error::Error + 'static)) {
        "not committed: a transaction of a handler has failed", error = chain(error)
    }

    /// no caller is left that the panic could reach
    error orphaned_panic(namespace: &str, message: &str) {
        "a handler panicked after its client had gone", namespace, panic = &*escaped(message)
    }

    /// the key is complete: the store call succeeded after its delivery had ended
    #[count("tower_dedup_background_total", "operation" => "complete", "result" => "ok")]
    info background_completed(meters: &Meters, key: &DedupKey) {
        meters key; "completed in the background", operation = "complete"
    }

    /// such a call, of an event that did not run or whose handler failed: the next delivery runs
    #[count("tower_dedup_background_total", "operation" => "release", "result" => "ok")]
    info background_released(meters: &Meters, key: &DedupKey) {
        meters key; "released in the background", operation = "release"
    }

    /// such a call, of an event that ran unprotected on arrival: the key is complete
    #[count("tower_dedup_background_total", "operation" => "claim", "result" => "ok")]
    info background_claimed(meters: &Meters, key: &DedupKey) {
        meters key; "claimed in the background", operation = "claim"
    }

    /// such a call never succeeded, or the store has no releases; `error` is the last
    /// one
    #[count("tower_dedup_background_total", "operation" => operation, "result" => "gave_up")]
    error background_failed(meters: &Meters, key: &DedupKey, operation: &'static str, error: &StoreError) {
        meters key; "gave up in the background", operation, error = chain(error)
    }

    /// such a call was not started
    #[count("tower_dedup_background_total", "operation" => operation, "result" => "refused")]
    error background_refused(meters: &Meters, key: &DedupKey, operation: &'static str) {
        meters key; "gave up at once: too many calls are pending in the background, or the runtime has ended", operation
    }

    /// expired keys were deleted
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    #[count(keys; "tower_dedup_purged_total")]
    debug purged(keys: u64) { "purged", keys }

    /// a purge failed, and the one before it did not
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    warn purge_failed(error: &StoreError) {
        "purging failed; it is tried again", error = chain(error)
    }

    /// a further purge failed
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    debug purge_failed_again(error: &StoreError) {
        "purging failed; it is tried again", error = chain(error)
    }

    /// once, for a `PostgresAdapter`
    #[cfg(feature = "postgres")]
    warn not_encrypted(host: &str) {
        "not encrypted: the connection to Postgres on another host has no TLS. Set `sslmode=verify-full`, \
        and a feature: `tls-rustls`, `tls-rustls-aws-lc-rs` or `tls-native-tls`",
        host = &*escaped(host)
    }

    /// it evicts keys, is too old, or is of another kind than the URL says
    #[cfg(feature = "redis")]
    error redis_is_unfit(server: &impl std::fmt::Display, fault: &(dyn std::error::Error + 'static)) {
        "the Redis server may not be used: every call is refused until it is mended",
        server = &*escaped(&server.to_string()), error = chain(fault)
    }

    /// once an adapter: the server may evict keys, and its access rules or its service hide the
    /// policy
    #[cfg(feature = "redis")]
    warn redis_hides_its_policy() {
        "the Redis server hides its eviction policy: set it to noeviction"
    }

    /// Redis is another process or has another history than before (`kind` `suspected`), or has
    /// evicted keys (`evicted`). `primary` is the server
    #[cfg(feature = "redis")]
    #[count("tower_dedup_store_losses_total", "kind" => kind)]
    warn store_loss_suspected(kind: &'static str, primary: &str) {
        "the store may have lost acknowledged writes: events of the last time may run again",
        kind, primary = &*escaped(primary)
    }

    /// once an hour at most, of a `MemoryAdapter`
    #[cfg(feature = "memory")]
    warn nearly_full() { "nearly full: the memory store has reached four fifths of its capacity" }

    #[cfg(feature = "sqlite")]
    warn sqlite_is_not_durable(synchronous: i64) {
        "the SQLite pool runs below synchronous = FULL: a power cut can lose a completed key, and its \
        event would run again",
        synchronous
    }

    #[cfg(feature = "sqlite")]
    warn sqlite_is_not_in_wal_mode(journal_mode: &str) {
        "the SQLite file is not in WAL mode: duplicates wait for writers", journal_mode
    }
}
pub(crate) use record_rows;

/// Counts a connection of the queue's workers that was lost. The worker opens another one.
#[cfg(feature = "postgres")]
pub(crate) fn worker_restarted(store: &'static str) {
    count!("tower_dedup_worker_restarts_total", "store" => store);
}

/// Counts a request to a layer that verifies, by its result.
#[cfg(feature = "verify")]
pub(crate) fn verified(preset: Option<&str>, result: &'static str) {
    count!("tower_dedup_verifications_total", "preset" => preset.unwrap_or("other").to_owned(), "result" => result);
}

/// Returns the error and its causes in one line. A cause may have the text of a server or of the
/// application.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        let text = without_source_line(&text);
        // The `Display` of some errors ends with their cause.
        if !line.ends_with(text) {
            line.push_str(": ");
            line.push_str(text);
        }
        next = cause.source();
    }
    escaped(&line).into_owned()
}

/// Removes the line of Postgres' source with which sqlx ends the text of an error (` at line 664`).
fn without_source_line(text: &str) -> &str {
    match text.rsplit_once(" at line ") {
        Some((text, line)) if line.bytes().all(|byte| byte.is_ascii_digit()) => text,
        _ => text,
    }
}
