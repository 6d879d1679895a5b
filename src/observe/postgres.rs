//! Records of the Postgres store.

/// Reports that a connection to another host has no TLS.
pub(crate) fn not_encrypted(host: &str) {
    tracing::warn!(
        target: "tower_dedup",
        host,
        "not encrypted: the connection to Postgres on another host has no TLS. Set \
         `sslmode=verify-full`, and a feature: `tls-rustls`, `tls-rustls-aws-lc-rs` or `tls-native-tls`"
    );
}
