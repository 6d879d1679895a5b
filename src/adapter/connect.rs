//! [`connect`]: the store that a URL names.

use std::sync::Arc;

use super::inspect::MaintenanceAdapter;
use crate::error::{ConfigError, Error};

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
/// [`ErrorKind::Config`](crate::ErrorKind::Config) with a [`ConfigError`] as its source for a URL
/// without an adapter in this build. Otherwise the errors of the adapter's own `connect`; for example,
/// a Postgres URL names one host.
pub async fn connect(url: &str) -> Result<Arc<dyn MaintenanceAdapter>, Error> {
    let Some((scheme, _)) = url.split_once(':') else { return Err(ConfigError::url().into()) };
    match scheme {
        #[cfg(feature = "memory")]
        "memory" => Ok(Arc::new(super::MemoryAdapter::new())),
        #[cfg(not(feature = "memory"))]
        "memory" => Err(disabled("memory")),
        #[cfg(feature = "sqlite")]
        "sqlite" => Ok(Arc::new(super::SqliteAdapter::connect(url).await?)),
        #[cfg(not(feature = "sqlite"))]
        "sqlite" => Err(disabled("sqlite")),
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => Ok(Arc::new(super::PostgresAdapter::connect(url).await?)),
        #[cfg(not(feature = "postgres"))]
        "postgres" | "postgresql" => Err(disabled("postgres")),
        #[cfg(feature = "redis")]
        redis if is_redis(redis) => Ok(Arc::new(super::RedisAdapter::connect(url).await?)),
        #[cfg(not(feature = "redis"))]
        redis if is_redis(redis) => Err(disabled("redis")),
        other => Err(ConfigError::unknown_scheme(other).into()),
    }
}

/// Returns `true` for the schemes of one server, of Sentinel and of a cluster.
fn is_redis(scheme: &str) -> bool {
    let server = scheme.split('+').next().unwrap_or(scheme);
    ["redis", "rediss", "valkey", "valkeys"].contains(&server)
}

#[cfg(not(all(feature = "memory", feature = "sqlite", feature = "postgres", feature = "redis")))]
fn disabled(scheme: &'static str) -> Error {
    let needs = format!("`{scheme}:` needs the cargo feature `{scheme}` of tower-dedup");
    ConfigError::new(crate::error::ConfigErrorKind::Feature, needs).into()
}
