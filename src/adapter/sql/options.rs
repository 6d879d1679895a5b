//! The settings that the options of both SQL adapters share.

use std::time::Duration;

use super::purge::Purging;
use super::queue::Bounds;
use crate::error::{ConfigError, check};

/// The settings of every SQL adapter.
#[derive(Debug, Clone)]
pub(in crate::adapter) struct SqlOptions {
    pub(in crate::adapter) table: String,
    pub(in crate::adapter) purging: Purging,
    pub(in crate::adapter) bounds: Bounds,
}

impl SqlOptions {
    pub(in crate::adapter) fn new() -> Self {
        let (purging, bounds) = (Purging::new(), Bounds::new());
        Self { table: "webhook_deliveries".to_owned(), purging, bounds }
    }

    pub(in crate::adapter) fn check(&self) -> Result<(), ConfigError> {
        check_name("table", &self.table)?;
        self.purging.check()
    }
}

/// Implements the settings that the options of every SQL adapter have, in their field `sql`.
macro_rules! shared_settings {
    ($options:ident) => {
        impl $options {
            /// Sets the table's name. The default is `webhook_deliveries`.
            pub fn table(mut self, table: &str) -> Self {
                table.clone_into(&mut self.sql.table);
                self
            }

            /// Sets how often expired keys are deleted, in the background; [`Purging::off`] deletes nothing.
            pub fn purging(mut self, purging: Purging) -> Self {
                self.sql.purging = purging;
                self
            }

            pub(crate) fn with_bounds(mut self, batch: usize, waiting: usize) -> Self {
                let bounds = &mut self.sql.bounds;
                (bounds.max_batch_keys, bounds.max_queued_keys) = (batch, waiting);
                self
            }

            pub(crate) fn table_name(&self) -> &str {
                &self.sql.table
            }
        }

        impl Default for $options {
            fn default() -> Self {
                Self::new()
            }
        }
    };
}

pub(in crate::adapter) use shared_settings;

/// Refuses a name of a table or a schema that does not match `[A-Za-z_][A-Za-z0-9_]{0,47}`, or that begins with
/// `sqlite_`. Names that are derived from it fit every database.
pub(in crate::adapter) fn check_name(setting: &'static str, name: &str) -> Result<(), ConfigError> {
    let mut chars = name.chars();
    let starts = chars.next().is_some_and(|char| char.is_ascii_alphabetic() || char == '_');
    let continues = chars.all(|char| char.is_ascii_alphanumeric() || char == '_');
    let reserved = name.to_ascii_lowercase().starts_with("sqlite_");
    let is_name = starts && continues && !reserved && name.len() <= 48;
    if is_name {
        return Ok(());
    }
    // The name is not shown: it may come from a URL, which may hold a password.
    let rule = "a name like [A-Za-z_][A-Za-z0-9_]{0,47}, without sqlite_ in front";
    Err(ConfigError::setting(setting, rule))
}

/// Refuses a timeout below 1 ms: the unit in which databases take it.
pub(in crate::adapter) fn check_timeout(
    setting: &'static str,
    timeout: Duration,
) -> Result<(), ConfigError> {
    check(timeout >= Duration::from_millis(1), setting, "at least 1 ms", &timeout)
}

/// Takes the parameters with these names out of a URL, which the database's own parser would refuse
/// or ignore. Returns the rest of the URL and the values, each the last of its name, and each a name of a table.
pub(in crate::adapter) fn take_names<'u, const N: usize>(
    url: &'u str,
    names: [&'static str; N],
) -> Result<(String, [Option<&'u str>; N]), ConfigError> {
    let mut found = [None; N];
    let Some((base, query)) = url.split_once('?') else { return Ok((url.to_owned(), found)) };
    let mut rest = Vec::new();
    for pair in query.split('&') {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        match names.iter().position(|known| *known == name) {
            Some(index) => {
                check_name(names[index], value)?;
                found[index] = Some(value);
            }
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

        /// An accepted name is safe between quotes and as a part of a name.
        #[test]
        fn accepted_name_is_a_short_word(name in r"(sqlite_|SQLITE_)?[a-z0-9_é-]{0,4}([a-z]{44})?") {
            let is_word = |byte: u8| byte == b'_' || byte.is_ascii_alphanumeric();
            let is_valid = (1..=48).contains(&name.len())
                && name.bytes().all(is_word)
                && !name.as_bytes()[0].is_ascii_digit()
                && !name.get(..7).is_some_and(|start| start.eq_ignore_ascii_case("sqlite_"));
            prop_assert_eq!(check_name("table", &name).is_ok(), is_valid);
        }

        /// What is left of a URL is the URL without the named parameters, in its order.
        #[test]
        fn rest_of_a_url_has_all_but_the_named_parameters(
            url in r"[a-z:/]{0,4}\??((dedup_table|dedup_schema|x)?(=[a-z0-9%]{0,3})?[&?]?){0,5}",
        ) {
            let names = ["dedup_table", "dedup_schema"];
            let Ok((rest, found)) = take_names(&url, names) else { return Ok(()) };
            let (base, query) = url.split_once('?').unwrap_or((&url, ""));
            let pairs = || query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
            for (name, found) in names.iter().zip(&found) {
                let last = pairs().rfind(|pair| pair.0 == *name);
                assert_eq!(*found, last.map(|pair| pair.1));
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
