//! Statements in `.sql` files, and their errors.
//!
//! A statement is sent as it stands in its file, without its lines of comment. Placeholders in
//! braces, such as `{table}`, are replaced. A line of comment such as `-- {name}: text` says what
//! stands for `{name}` in its file.

use std::sync::Arc;

use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Database};

use crate::error::{StoreError, StoreErrorKind};

/// Returns a statement whose parameters are to be bound.
pub(in crate::adapter) fn query<DB: Database>(
    sql: &Arc<str>,
) -> Query<'static, DB, <DB as Database>::Arguments> {
    sqlx::query(AssertSqlSafe(Arc::clone(sql)))
}

/// Returns the text of a statement as it is sent.
pub(in crate::adapter) fn render(file: &str, values: &[(&str, &str)]) -> String {
    let names = file.lines().filter_map(|line| line.strip_prefix("-- {")?.split_once("}: "));
    let names: Vec<_> = names.collect();
    let lines = file.lines().filter(|line| !line.trim_start().starts_with("--"));
    fill(&fill(&lines.collect::<Vec<_>>().join("\n"), &names), values)
}

/// Returns the file with or without the lines from those that are `start` to the next `-- end`.
#[cfg(feature = "postgres")]
pub(in crate::adapter) fn with_section(file: &str, start: &str, with: bool) -> String {
    let mut is_inside = false;
    let kept = file.lines().filter(|line| {
        is_inside = line.trim() == start || is_inside && line.trim() != "-- end";
        with || !is_inside
    });
    kept.collect::<Vec<_>>().join("\n")
}

/// Replaces placeholders. A value is not searched for placeholders.
pub(in crate::adapter) fn fill(text: &str, values: &[(&str, &str)]) -> String {
    let (mut filled, mut parts) = (String::with_capacity(text.len()), text.split('{'));
    filled.extend(parts.next());
    for part in parts {
        let named = part.split_once('}').and_then(|(name, after)| {
            let (_, value) = values.iter().find(|(of, _)| *of == name)?;
            Some([value, after])
        });
        filled.extend(named.unwrap_or(["{", part]));
    }
    filled
}

/// Declares a struct with one statement in each field. A field is named after the statement's file
/// in the folder `sql`, beside the file that declares the struct.
macro_rules! statements {
    ($(#[$meta:meta])* $visibility:vis struct $name:ident { $($field:ident,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone)]
        $visibility struct $name { $($visibility $field: std::sync::Arc<str>,)+ }

        impl $name {
            fn from_files(statement: impl Fn(&str) -> std::sync::Arc<str>) -> Self {
                Self {
                    $($field: statement(include_str!(concat!("sql/", stringify!($field), ".sql"))),)+
                }
            }

            /// Returns the statement that reads rows with as much of their stored data.
            $visibility fn read(&self, fetch: $crate::adapter::contract::Fetch) -> &std::sync::Arc<str> {
                let with_response = fetch == $crate::adapter::contract::Fetch::DigestAndResponse;
                if with_response { &self.get } else { &self.read }
            }

            /// Returns the statements by their names, for tests of their plans.
            #[cfg(feature = "testing")]
            $visibility fn by_name(&self) -> Vec<(&'static str, std::sync::Arc<str>)> {
                vec![$((stringify!($field), std::sync::Arc::clone(&self.$field))),+]
            }
        }
    };
}

pub(in crate::adapter) use statements;

/// Returns the error of a failed statement. Its outcome is unknown, unless `is_refusal` knows the
/// database's code for a statement that changed nothing.
pub(in crate::adapter) fn store_error(
    context: &'static str,
    error: sqlx::Error,
    is_refusal: impl Fn(&dyn sqlx::error::DatabaseError) -> bool,
) -> StoreError {
    let kind = match &error {
        sqlx::Error::PoolTimedOut => StoreErrorKind::Timeout,
        sqlx::Error::ColumnDecode { .. }
        | sqlx::Error::ColumnNotFound(_)
        | sqlx::Error::Decode(_) => StoreErrorKind::Corrupt,
        sqlx::Error::Database(error) if is_refusal(&**error) => StoreErrorKind::Refused,
        _ => StoreErrorKind::Unavailable,
    };
    StoreError::new(kind, context).with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn render_removes_comments_and_replaces_placeholders() {
        let file = "-- Why.\n-- {c}: {a}.x\nSELECT 1 -- same\n  -- line\nFROM {table}, {c}";
        let values = [("table", "{a}"), ("a", "b"), ("c", "d")];
        assert_eq!(render(file, &values), "SELECT 1 -- same\nFROM {a}, b.x");
        assert_eq!(fill("'{}', {x}, {a", &values), "'{}', {x}, {a");
    }

    #[test]
    fn error_that_is_no_refusal_has_an_unknown_outcome() {
        for (error, kind) in [
            (sqlx::Error::PoolTimedOut, StoreErrorKind::Timeout),
            (sqlx::Error::ColumnNotFound("key".to_owned()), StoreErrorKind::Corrupt),
            (sqlx::Error::Decode("no number".into()), StoreErrorKind::Corrupt),
            (sqlx::Error::PoolClosed, StoreErrorKind::Unavailable),
        ] {
            let error = store_error("testing", error, |_| true);
            assert_eq!((error.kind(), error.is_unknown()), (kind, true));
        }
    }
}
