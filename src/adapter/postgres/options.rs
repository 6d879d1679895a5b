//! [`PostgresOptions`], and connection URLs.
//!
//! libpq takes several hosts and chooses between them. sqlx takes a list of hosts for one name, and
//! ignores the parameters that choose, with a warning. So a URL with either is refused.

use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgSslMode};

use super::super::sql::{Purging, SqlOptions, check_name, check_timeout, take_names};
use crate::error::{ConfigError, check};

/// The parameters by which libpq chooses between servers.
const CHOOSES: [&str; 2] = ["target_session_attrs", "load_balance_hosts"];

/// How a [`PostgresAdapter`](super::PostgresAdapter) works. Set before the adapter exists.
///
/// # Example
///
/// ```
/// use std::time::Duration;
/// use tower_dedup::adapter::PostgresOptions;
///
/// let options =
///     PostgresOptions::new().table("webhooks").statement_timeout(Duration::from_secs(3));
/// assert!(format!("{options:?}").contains("webhooks"));
/// ```
///
/// A name is quoted in every statement. It matches `[A-Za-z_][A-Za-z0-9_]{0,47}`, and does not
/// begin with `sqlite_`. [`connect_with`](super::PostgresAdapter::connect_with) reports an invalid
/// option; without it, the first call does.
#[derive(Debug, Clone)]
#[must_use]
pub struct PostgresOptions {
    pub(crate) sql: SqlOptions,
    pub(crate) schema: Option<String>,
    pub(super) durable_claims: bool,
    pub(super) statement_timeout: Duration,
    pub(super) transaction_idle_timeout: Option<Duration>,
    pub(super) makes_table: bool,
}

impl PostgresOptions {
    /// Returns the defaults: the table `webhook_deliveries` in the first schema of the
    /// `search_path`, two connections for batches, [`Purging::new`], 5 s for a statement, and 60 s
    /// for an idle transaction of a handler. Claims under a lease do not wait for the disk.
    pub fn new() -> Self {
        Self {
            sql: SqlOptions::new(),
            schema: None,
            durable_claims: false,
            statement_timeout: Duration::from_secs(5),
            transaction_idle_timeout: Some(Duration::from_secs(60)),
            makes_table: true,
        }
    }

    /// Sets the table's name. The default is `webhook_deliveries`.
    pub fn table(mut self, table: &str) -> Self {
        table.clone_into(&mut self.sql.table);
        self
    }

    /// Sets how often expired keys are deleted, in the background; [`Purging::off`] deletes
    /// nothing.
    pub fn purging(mut self, purging: Purging) -> Self {
        self.sql.purging = purging;
        self
    }

    /// Sets the table's schema. By default it is the first schema of the `search_path`: that in
    /// which the first call finds the table, or makes it.
    pub fn schema(mut self, schema: &str) -> Self {
        self.schema = Some(schema.to_owned());
        self
    }

    /// Sets whether a call makes the table if it is missing. The default is `true`.
    ///
    /// With `false`, such a call returns
    /// [`StoreErrorKind::Refused`](crate::StoreErrorKind::Refused), and only
    /// [`migrate`](super::PostgresAdapter::migrate) makes the table.
    pub fn make_table(mut self, make: bool) -> Self {
        self.makes_table = make;
        self
    }

    /// Sets whether a claim under a lease waits for the disk. The default is `false`: it commits
    /// with `synchronous_commit = off`, unless the server has a synchronous standby
    /// (`synchronous_standby_names`). Completions, and claims that are complete at once, always
    /// wait.
    ///
    /// A crash of the *database* can lose a recent claim that did not wait. The event's retry then
    /// runs while the first handler still runs.
    pub fn durable_claims(mut self, durable: bool) -> Self {
        self.durable_claims = durable;
        self
    }

    /// Sets how many connections send batches at the same time. The default is 2. Each needs a core
    /// of the database.
    ///
    /// Calls that arrive while a batch is under way are sent together in the next one: up to 1,024
    /// keys with the same retention, lease and stored data in a statement. A call that is alone is
    /// sent at once. Up to 16,384 calls wait; past that, claims are refused.
    ///
    /// The connections are not part of the pool, but have its options. While batches take longer
    /// than 500 ms, up to as many more are opened, because the others may have become silent. Calls
    /// that wait for a locked row have as many, and purges, calls of operators and reads of stored
    /// responses have four. A connection is opened when it is needed.
    ///
    /// 0 is invalid.
    pub fn connections(mut self, connections: usize) -> Self {
        self.sql.bounds.workers = connections;
        self
    }

    /// Sets how long one statement may take. The default is 5 s.
    ///
    /// After that, its connection is closed, and its outcome is unknown. So a connection that has
    /// become silent, without a reset, costs this time only once. Choose more than the layer's
    /// `store_timeout`, which ends the wait of a caller. Choose less than a third of the lease, so
    /// that a renewal that was lost can be made again. Statements of a purge, of statistics and of
    /// a list have six times as long; migrating has ten minutes. A call of an operator ends within
    /// the time of one statement, with [`StoreErrorKind::Timeout`](crate::StoreErrorKind::Timeout);
    /// `forget`, which reads and writes, within two.
    ///
    /// A time below 1 ms or above a day is invalid.
    pub fn statement_timeout(self, timeout: Duration) -> Self {
        Self { statement_timeout: timeout, ..self }
    }

    /// Sets how long a handler's transaction may be idle. The default is 60 s, or
    /// [`handler_timeout`](crate::DedupLayer::handler_timeout) if that is longer; `None` leaves it
    /// to the server.
    ///
    /// After that the server ends the session and rolls back: without a bound, a process that hangs
    /// in its transaction, or whose machine has vanished, would hold its rows for ever, and the
    /// retry of its event would wait for them. [`Delivery::begin`](crate::Delivery::begin) sets
    /// `idle_in_transaction_session_timeout` for its transaction, and ignores the value of the
    /// session; the handler may change it by `SET LOCAL`. A completion by another driver sets it
    /// only if the session has none. Time in a statement does not count.
    ///
    /// A time below 1 ms or above a day is invalid.
    pub fn transaction_idle_timeout(self, timeout: impl Into<Option<Duration>>) -> Self {
        Self { transaction_idle_timeout: timeout.into(), ..self }
    }

    /// Returns these options, if each is valid.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] for the first option with an invalid value. Without this call, it is the
    /// error of every call to the store.
    pub fn checked(self) -> Result<Self, ConfigError> {
        self.check()?;
        Ok(self)
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        self.sql.check()?;
        self.schema.as_deref().map_or(Ok(()), |schema| check_name("schema", schema))?;
        let connections = self.sql.bounds.workers;
        check(connections > 0, "connections", "at least 1", &connections)?;
        check_timeout("statement_timeout", self.statement_timeout)?;
        let idle = self.transaction_idle_timeout;
        idle.map_or(Ok(()), |idle| check_timeout("transaction_idle_timeout", idle))
    }

    /// Reads a URL: the names of the table and the schema into these options, everything else into
    /// sqlx's. Public for the command, which has connections of its own.
    ///
    /// # Errors
    ///
    /// [`ConfigError`], for a URL that [`connect_with`](super::PostgresAdapter::connect_with)
    /// refuses. The error does not contain the URL.
    #[doc(hidden)]
    pub fn read_url(mut self, url: &str) -> Result<(Self, PgConnectOptions), ConfigError> {
        let (url, [table, schema]) = take_names(url, ["dedup_table", "dedup_schema"])?;
        if let Some(table) = table {
            self = self.table(table);
        }
        if let Some(schema) = schema {
            self = self.schema(schema);
        }
        Ok((self, connect_options(&url)?))
    }
}

impl Default for PostgresOptions {
    fn default() -> Self {
        Self::new()
    }
}

fn connect_options(url: &str) -> Result<PgConnectOptions, ConfigError> {
    let rest = url.strip_prefix("postgres://").or_else(|| url.strip_prefix("postgresql://"));
    let rest = rest.ok_or_else(ConfigError::url)?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let authority = rest.split('/').next().unwrap_or(rest);
    // sqlx would refuse several ports or addresses too, but its error would not say why.
    let hosts = authority.rsplit('@').next().unwrap_or(authority);
    let mut several = hosts.contains(',') || hosts.contains("%2C") || hosts.contains("%2c");
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        if let Some(name) = CHOOSES.into_iter().find(|chooses| *chooses == name) {
            let message = format!(
                "the URL parameter `{name}` is not supported: give one address that leads to the \
                 primary"
            );
            return Err(ConfigError::new(message));
        }
        several |= matches!(&*name, "host" | "hostaddr" | "port") && value.contains(',');
    }
    let message = "the store URL names several hosts: give one address that leads to the primary";
    let several_hosts = || ConfigError::new(message);
    if several {
        return Err(several_hosts());
    }
    let options = PgConnectOptions::from_str(url).map_err(|_| ConfigError::url())?;
    // A URL without a host leaves it to `PGHOST`.
    if options.get_socket().is_none() && options.get_host().contains(',') {
        return Err(several_hosts());
    }
    Ok(options)
}

/// Returns `true` for a connection to another host that may do without TLS. A connection to this
/// host passes over no network.
pub(super) fn may_be_plain_text(options: &PgConnectOptions) -> bool {
    let may_be_plain =
        matches!(options.get_ssl_mode(), PgSslMode::Disable | PgSslMode::Allow | PgSslMode::Prefer);
    let host = options.get_host();
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let is_here = options.get_socket().is_some()
        || host.starts_with('/')
        || host.eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback());
    may_be_plain && !is_here
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn may_be_plain_text_is_true_for_other_hosts_only() {
        for (url, expected) in [
            ("postgres://app@db.example.com/app", true),
            ("postgres://app@db.example.com/app?sslmode=disable", true),
            ("postgres://app@192.0.2.7/app?sslmode=allow", true),
            ("postgres://app@[2001:db8::1]/app", true),
            ("postgres://app@db.example.com/app?sslmode=require", false),
            ("postgres://app@db.example.com/app?sslmode=verify-full", false),
            ("postgres://app@localhost/app", false),
            ("postgres://app@127.0.0.2/app?sslmode=disable", false),
            ("postgres://app@[::1]/app", false),
            ("postgres://%2Frun%2Fpostgresql/app", false),
            ("postgres:///app?host=/run/postgresql", false),
        ] {
            assert_eq!(may_be_plain_text(&url.parse().unwrap()), expected, "{url}");
        }
    }
}
