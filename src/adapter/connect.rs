//! [`connect`]: the store that a URL names.

use std::sync::Arc;

use super::maintenance::MaintenanceAdapter;
use crate::error::{ConfigError, StoreError};

/// Connects to the store that a URL names.
///
/// | URL | adapter | feature |
/// |---|---|---|
/// | `memory:` | `MemoryAdapter` with its default capacity | `memory` |
/// | `sqlite://path/to/file.db` | `SqliteAdapter` | `sqlite` |
/// | `postgres://user@host/database` | `PostgresAdapter` | `postgres` |
/// | `redis://host:port/0` | `RedisAdapter` over one server of Redis or Valkey | `redis` |
/// | `redis+sentinel://host:port,host:port/master` | `RedisAdapter` over the master that Sentinel names | `redis` |
/// | `redis+cluster://host:port,host:port` | `RedisAdapter` over a cluster | `redis` |
///
/// `rediss` in place of `redis` stands for TLS. It needs one of the TLS [features](crate#features).
/// `valkey` and `valkeys` are other names of both.
///
/// # Errors
///
/// [`StoreErrorKind::Config`](crate::StoreErrorKind::Config) with a [`ConfigError`] as its source
/// for a URL without an adapter in this build. Otherwise the errors of the adapter's own `connect`;
/// for example, a Postgres URL names one host.
pub async fn connect(url: &str) -> Result<Arc<dyn MaintenanceAdapter>, StoreError> {
    let Some((scheme, _)) = url.split_once(':') else { return Err(ConfigError::url().into()) };
    match feature(scheme) {
        #[cfg(feature = "memory")]
        Some("memory") => Ok(Arc::new(super::MemoryAdapter::new())),
        #[cfg(feature = "sqlite")]
        Some("sqlite") => Ok(Arc::new(super::SqliteAdapter::connect(url).await?)),
        #[cfg(feature = "postgres")]
        Some("postgres") => Ok(Arc::new(super::PostgresAdapter::connect(url).await?)),
        #[cfg(feature = "redis")]
        Some("redis") => Ok(Arc::new(super::RedisAdapter::connect(url).await?)),
        Some(off) => {
            let needs = format!("`{off}:` needs the cargo feature `{off}` of tower-dedup");
            Err(ConfigError::new(needs).into())
        }
        None => Err(ConfigError::unknown_scheme(scheme).into()),
    }
}

/// Returns the cargo feature of the adapter that a scheme names.
fn feature(scheme: &str) -> Option<&'static str> {
    match scheme {
        "memory" => Some("memory"),
        "sqlite" => Some("sqlite"),
        "postgres" | "postgresql" => Some("postgres"),
        _ => {
            // With `+sentinel` or `+cluster` behind it.
            let server = scheme.split('+').next()?;
            ["redis", "rediss", "valkey", "valkeys"].contains(&server).then_some("redis")
        }
    }
}
