//! [`Identifier`]: the name of a table or a schema. [`Batching`]: how an adapter batches.

use std::fmt;
use std::time::Duration;

use crate::error::{ConfigError, ConfigErrorKind, Error, ErrorKind, check};

/// The name of a table or a schema: `[A-Za-z_][A-Za-z0-9_]{0,47}`, without the prefix `sqlite_`.
///
/// It is quoted as it is in every statement. Names that are derived from it fit every database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identifier(pub(in crate::adapter) String);

impl Identifier {
    /// Returns a valid identifier.
    ///
    /// # Errors
    ///
    /// A name that does not match, or that starts with `sqlite_`.
    ///
    /// ```
    /// use tower_dedup::adapter::Identifier;
    ///
    /// assert_eq!(Identifier::new("seen_events")?.as_str(), "seen_events");
    /// assert!(Identifier::new("seen; DROP TABLE users").is_err());
    /// # Ok::<(), tower_dedup::ConfigError>(())
    /// ```
    pub fn new(name: &str) -> Result<Self, ConfigError> {
        let mut chars = name.chars();
        let starts = chars.next().is_some_and(|char| char.is_ascii_alphabetic() || char == '_');
        let continues = chars.all(|char| char.is_ascii_alphanumeric() || char == '_');
        let reserved = name.to_ascii_lowercase().starts_with("sqlite_");
        if starts && continues && !reserved && name.len() <= 48 {
            Ok(Self(name.to_owned()))
        } else {
            let rule = "a table or schema name matches [A-Za-z_][A-Za-z0-9_]{0,47}";
            Err(ConfigError::new(ConfigErrorKind::Setting, rule))
        }
    }

    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The table of an adapter whose options name no other.
    pub(in crate::adapter) fn default_table() -> Self {
        Self("webhook_deliveries".to_owned())
    }
}

impl fmt::Display for Identifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Configures how a SQL adapter sends concurrent calls together.
///
/// A call that is alone is sent at once, as a statement of its own. A batch holds calls with the same retention, the
/// same lease and the same stored data, so many layers that differ in these make small batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Batching {
    pub(in crate::adapter) lanes: usize,
    pub(in crate::adapter) max_batch_keys: usize,
    pub(in crate::adapter) max_queued_keys: usize,
}

impl Batching {
    /// Two lanes, 1,024 keys a batch, 16,384 waiting keys.
    pub const fn new() -> Self {
        Self { lanes: 2, max_batch_keys: 1_024, max_queued_keys: 16_384 }
    }

    /// Sets how many batches are sent at the same time. Each needs a connection, and a core of the
    /// database.
    ///
    /// While batches take longer than 500 ms, up to as many more are sent, because their connections
    /// may have fallen silent. SQLite has one writer, and therefore one lane.
    ///
    /// 0 is invalid.
    pub fn lanes(self, lanes: usize) -> Self {
        Self { lanes, ..self }
    }

    /// Sets how many calls one statement takes; each names one key.
    ///
    /// 0 is invalid.
    pub fn max_batch_keys(self, keys: usize) -> Self {
        Self { max_batch_keys: keys, ..self }
    }

    /// Sets how many calls may wait; past that, claims are refused. Renewals, completions and releases are
    /// not refused, because a running event depends on them.
    ///
    /// 0 is invalid.
    pub fn max_queued_keys(self, keys: usize) -> Self {
        Self { max_queued_keys: keys, ..self }
    }

    pub(in crate::adapter) fn check(self) -> Result<(), ConfigError> {
        const RULE: &str = "at least 1";
        check(self.lanes > 0, "lanes", RULE, &self.lanes)?;
        check(self.max_batch_keys > 0, "max_batch_keys", RULE, &self.max_batch_keys)?;
        check(self.max_queued_keys > 0, "max_queued_keys", RULE, &self.max_queued_keys)
    }
}

impl Default for Batching {
    fn default() -> Self {
        Self::new()
    }
}

/// Refuses a call of an adapter that was closed, or that has an invalid option.
pub(in crate::adapter) fn check_open(
    is_closed: bool,
    options: Result<(), ConfigError>,
) -> Result<(), Error> {
    if is_closed {
        return Err(Error::new(ErrorKind::Unavailable, "using an adapter that was closed"));
    }
    options.map_err(|error| Error::new(ErrorKind::Config, "using an adapter").with_source(error))
}

/// Refuses a timeout below 1 ms: the unit in which databases take it.
pub(in crate::adapter) fn check_timeout(
    setting: &'static str,
    timeout: Duration,
) -> Result<(), ConfigError> {
    check(timeout >= Duration::from_millis(1), setting, "at least 1 ms", &timeout)
}

/// Takes the parameters with these names out of a URL, which the database's own parser would refuse
/// or ignore. Returns the rest of the URL and the values, each the last of its name.
pub(in crate::adapter) fn take_identifiers<const N: usize>(
    url: &str,
    names: [&str; N],
) -> Result<(String, [Option<Identifier>; N]), ConfigError> {
    let mut found = [const { None }; N];
    let Some((base, query)) = url.split_once('?') else { return Ok((url.to_owned(), found)) };
    let mut rest = Vec::new();
    for pair in query.split('&') {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        match names.iter().position(|known| *known == name) {
            Some(index) => found[index] = Some(Identifier::new(value)?),
            None => rest.push(pair),
        }
    }
    let url = if rest.is_empty() { base.to_owned() } else { format!("{base}?{}", rest.join("&")) };
    Ok((url, found))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;

    use super::*;

    #[test]
    fn zero_is_refused() {
        let batching = Batching::new();
        assert_eq!(batching.check(), Ok(()));
        let refused = [batching.lanes(0), batching.max_batch_keys(0), batching.max_queued_keys(0)];
        assert!(refused.into_iter().all(|batching| batching.check().is_err()));
    }

    #[test]
    fn timeout_is_at_least_a_millisecond() {
        let shortest = Duration::from_millis(1);
        assert_eq!(check_timeout("statement_timeout", shortest), Ok(()));
        let refused = check_timeout("statement_timeout", Duration::from_micros(999));
        assert_eq!(
            refused.unwrap_err().to_string(),
            "`statement_timeout` must be at least 1 ms, not 999µs"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 5_000,
            rng_seed: RngSeed::Fixed(0x5EED),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// What is left of a URL is the URL without the named parameters, in its order.
        #[test]
        fn rest_of_a_url_has_all_but_the_named_parameters(
            url in r"[a-z:/]{0,4}\??((dedup_table|dedup_schema|x)?(=[a-z0-9%]{0,3})?[&?]?){0,5}",
        ) {
            let names = ["dedup_table", "dedup_schema"];
            let Ok((rest, found)) = take_identifiers(&url, names) else { return Ok(()) };
            let (base, query) = url.split_once('?').unwrap_or((&url, ""));
            let pairs = || query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
            for (name, found) in names.iter().zip(&found) {
                let last = pairs().rfind(|pair| pair.0 == *name);
                assert_eq!(found.as_ref().map(Identifier::as_str), last.map(|pair| pair.1));
            }
            if found.iter().all(Option::is_none) {
                assert_eq!(rest, url);
            } else {
                assert!(rest.starts_with(base) && url.len() > rest.len());
                let (_, left) = rest.split_once('?').unwrap_or_default();
                let is_left =
                    |pair: &&str| !names.contains(&pair.split_once('=').unwrap_or((pair, "")).0);
                assert!(left.split('&').all(|pair| is_left(&pair)), "{rest}");
                let kept = query.split('&').filter(is_left).collect::<Vec<_>>().join("&");
                assert_eq!(left, kept);
            }
        }
    }
}
