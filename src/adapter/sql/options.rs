//! The settings that the options of both SQL adapters share.

use std::time::Duration;

use super::purge::Purging;
use super::queue::Bounds;
use crate::error::{ConfigError, check};

/// The settings of every SQL adapter.
#[derive(Debug, Clone)]
pub(crate) struct SqlOptions {
    pub(crate) table: String,
    pub(crate) purging: Purging,
    pub(crate) bounds: Bounds,
}

impl SqlOptions {
    pub(crate) fn new() -> Self {
        let (purging, bounds) = (Purging::new(), Bounds::new());
        Self { table: "webhook_deliveries".to_owned(), purging, bounds }
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        check_name("table", &self.table)?;
        self.purging.check()
    }
}

/// Refuses a name of a table or a schema that does not match `[A-Za-z_][A-Za-z0-9_]{0,47}`, or that
/// begins with `sqlite_`. Names that are derived from it fit every database.
pub(crate) fn check_name(setting: &'static str, name: &str) -> Result<(), ConfigError> {
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

/// Refuses a timeout below 1 ms: the unit in which databases take it. Their settings have 31 bits.
pub(crate) fn check_timeout(setting: &'static str, timeout: Duration) -> Result<(), ConfigError> {
    const DAY: Duration = Duration::from_secs(86_400);
    let fits = (Duration::from_millis(1)..=DAY).contains(&timeout);
    check(fits, setting, "1 ms to 1 day", &timeout)
}

/// Takes the parameters with these names out of a URL, which the database's own parser would refuse
/// or ignore. Returns the rest of the URL and the values, each the last of its name, and each a
/// name of a table. Another parameter that begins with `dedup_` is an error.
pub(crate) fn take_names<'u, const N: usize>(
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
            // sqlx ignores it for Postgres, and the default table would be used.
            None if name.starts_with("dedup_") => {
                let known = names.join("` and `");
                let text = format!("the store URL has a parameter `dedup_…` other than `{known}`");
                return Err(ConfigError::new(text));
            }
            None => rest.push(pair),
        }
    }
    let url = if rest.is_empty() { base.to_owned() } else { format!("{base}?{}", rest.join("&")) };
    Ok((url, found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeout_is_from_a_millisecond_to_a_day() {
        let day = Duration::from_secs(86_400);
        for timeout in [Duration::from_millis(1), day] {
            assert_eq!(check_timeout("statement_timeout", timeout), Ok(()));
        }
        for (timeout, text) in
            [(Duration::from_micros(999), "999µs"), (day + Duration::from_secs(1), "86401s")]
        {
            let refused = check_timeout("statement_timeout", timeout).unwrap_err().to_string();
            assert_eq!(refused, format!("`statement_timeout` must be 1 ms to 1 day, not {text}"));
        }
    }

    /// An accepted name is safe between quotes and as a part of a name.
    #[test]
    fn name_is_a_short_word() {
        let long = "n".repeat(48);
        for name in ["a", "_", "Ab_9", "sqlit_e", "sqlite", "xsqlite_", &long] {
            assert_eq!(check_name("table", name), Ok(()), "{name}");
        }
        let longer = "n".repeat(49);
        for name in
            ["", "9a", "a-b", "a.b", "a b", "a\"", "a'", "é", "aé", "sqlite_a", "SQLite_", &longer]
        {
            assert!(check_name("table", name).is_err(), "{name}");
        }
    }

    /// What is left of a URL is the URL without the named parameters, in its order. The last of a
    /// name counts.
    #[test]
    fn rest_of_a_url_has_all_but_the_named_parameters() {
        for (url, left, found) in [
            ("a://b/c", "a://b/c", Ok([None, None])),
            ("a://b/c?", "a://b/c?", Ok([None, None])),
            ("a:?x=1&y", "a:?x=1&y", Ok([None, None])),
            ("a:?dedup_table=t", "a:", Ok([Some("t"), None])),
            ("a:?y=2&dedup_schema=s&x&dedup_table=t", "a:?y=2&x", Ok([Some("t"), Some("s")])),
            ("a:?dedup_table=t&x=%3F&&dedup_table=u", "a:?x=%3F&", Ok([Some("u"), None])),
            ("a:?xdedup_table=t", "a:?xdedup_table=t", Ok([None, None])),
            ("a:?dedup_tabel=t", "", Err(())),
            ("a:?dedup_table", "", Err(())),
            ("a:?dedup_table=", "", Err(())),
            ("a:?dedup_table=t%20", "", Err(())),
        ] {
            let taken = take_names(url, ["dedup_table", "dedup_schema"]).map_err(drop);
            assert_eq!(taken, found.map(|found| (left.to_owned(), found)), "{url}");
        }
    }
}
