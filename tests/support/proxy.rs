//! The proxy of the conformance suite, in front of a Postgres server.

use sqlx::postgres::{PgConnectOptions, PgSslMode};
pub use tower_dedup_conformance::{Cut, Proxy};

/// Starts a proxy to the server of these options.
pub async fn to_postgres(options: &PgConnectOptions) -> Proxy {
    Proxy::to(options.get_host(), options.get_port()).await
}

/// Returns the options, changed to connect through the proxy on this port. Without TLS: with a TLS feature a
/// connection would begin with one more message, and the proxy reads the messages.
pub fn through(port: u16, options: PgConnectOptions) -> PgConnectOptions {
    options.host("127.0.0.1").port(port).ssl_mode(PgSslMode::Disable)
}
