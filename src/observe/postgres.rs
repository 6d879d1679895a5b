//! Records of the Postgres store.

use super::error_text::chain;

/// Reports that a connection to another host has no TLS.
pub(crate) fn not_encrypted(host: &str) {
    tracing::warn!(
        target: "tower_dedup",
        host,
        "not encrypted: the connection to Postgres on another host has no TLS. Set \
         `sslmode=verify-full`, and a feature `tls-rustls` or `tls-native-tls`"
    );
}

/// Reports that the session of a lost transaction may still hold its key.
pub(crate) fn session_not_terminated(error: &(dyn std::error::Error + 'static)) {
    tracing::warn!(
        target: "tower_dedup",
        error = chain(error),
        "could not terminate the session of a lost transaction"
    );
}
