//! The function with which a program records a key in a transaction of another driver.

use super::super::sql::statement::render;
use super::params::MAX_MS;
use super::schema::TableName;
use super::statements::LOCK_TIMEOUT;
use super::writing::TRIES;
use crate::key::MAX_ID_LEN;

/// Returns the statement that makes the function which records a key in the caller's transaction.
pub(super) fn record_function(name: &TableName) -> String {
    let values = [
        ("table", &*name.quoted("")),
        ("table_number", &*name.number()),
        ("state", &*render(include_str!("sql/state.sql"), &[])),
        ("durable", &*render(include_str!("sql/durable.sql"), &[])),
        ("lock_timeout", LOCK_TIMEOUT),
        ("max_id_len", &*MAX_ID_LEN.to_string()),
        ("max_seconds", &*(MAX_MS / 1_000).to_string()),
        ("tries", &*TRIES.to_string()),
    ];
    let body = render(include_str!("sql/record_body.sql"), &values);
    // The name of a schema may hold any character.
    let mut tag = "$tower_dedup$".to_owned();
    while body.contains(&tag) {
        tag.insert(1, 'x');
    }
    // An unqualified table is looked up where the migration finds it, and not where the caller would.
    let search_path = if name.schema.is_some() { "= pg_catalog, pg_temp" } else { "FROM CURRENT" };
    let values = [
        ("function", &*name.quoted("_record")),
        ("search_path", search_path),
        ("body", &*format!("{tag}\n{body}\n{tag}")),
    ];
    render(include_str!("sql/record_function.sql"), &values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_schema_ends_neither_the_body_nor_a_name() {
        let schema = Some(r#"a"$tower_dedup$'b"#.to_owned());
        let sql = record_function(&TableName { schema, ..TableName::default() });
        assert_eq!(sql.matches("$xtower_dedup$").count(), 2, "{sql}");
        assert!(sql.contains(r#"FUNCTION "a""$tower_dedup$'b"."webhook_deliveries_record"("#));
    }
}
