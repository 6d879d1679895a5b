//! Records and counters about work that outlives its delivery.

use super::error_text::chain;
use super::meters::Counted;
use crate::error::Error;
use crate::key::DedupKey;

/// How a store call ended that outlived its delivery.
#[derive(Debug)]
pub(crate) enum Background {
    Done,
    /// The last error.
    GaveUp(Error),
    /// Too many such calls are pending.
    Refused,
}

/// Counts a store call that outlives its delivery as pending until the returned guard is dropped.
#[cfg_attr(not(feature = "metrics"), expect(unused_variables, reason = "metrics only"))]
pub(crate) fn pending_write(key: &DedupKey) -> Counted {
    #[cfg(feature = "metrics")]
    return Counted::of(metrics::gauge!(
        "tower_dedup_pending_writes",
        "namespace" => key.namespace().to_owned()
    ));
    #[cfg(not(feature = "metrics"))]
    Counted {}
}

/// Reports a completion or release that ended in the background.
pub(crate) fn background(operation: &'static str, result: Background, key: Option<&DedupKey>) {
    let ended = match &result {
        Background::Done => "ok",
        Background::GaveUp(_) => "gave_up",
        Background::Refused => "refused",
    };
    count!("tower_dedup_background_total", "operation" => operation, "result" => ended);
    let namespace = key.map(DedupKey::namespace);
    let id = key.map(DedupKey::shown_id);
    let id = id.as_deref();
    match result {
        Background::Done => tracing::info!(
            target: "tower_dedup", operation, namespace, id, "completed in the background"
        ),
        Background::GaveUp(error) => tracing::error!(
            target: "tower_dedup", operation, namespace, id, error = chain(&error),
            "gave up in the background"
        ),
        Background::Refused => tracing::error!(
            target: "tower_dedup", operation, namespace, id,
            "gave up at once: too many calls are pending in the background, or the runtime has ended"
        ),
    }
}

/// Reports a handler's panic that no caller waits for.
pub(crate) fn orphaned_panic(namespace: &str, message: &str) {
    tracing::error!(
        target: "tower_dedup",
        namespace,
        panic = message,
        "a handler panicked after its client had gone"
    );
}
