//! The function with which a program records a key in a transaction of another driver.

use super::super::sql::batch::TRIES;
use super::super::sql::statement::render;
use super::params::MAX_MS;
use super::schema::{TableName, literal};
use super::statements::LOCK_TIMEOUT;
use crate::key::MAX_ID_LEN;

/// Returns the statement that makes the function which records a key in the caller's transaction.
pub(super) fn record_function(name: &TableName) -> String {
    // `format` of Postgres fills the table's name in.
    let values = [
        ("table", "%1$s"),
        ("table_number", "to_regclass(%1$L)"),
        ("state", &*render(include_str!("sql/state.sql"), &[])),
        ("durable", &*render(include_str!("sql/durable.sql"), &[])),
        ("max_id_len", &*MAX_ID_LEN.to_string()),
        ("max_seconds", &*(MAX_MS / 1_000).to_string()),
        ("tries", &*TRIES.to_string()),
    ];
    let body = render(include_str!("sql/record_body.sql"), &values);
    let unqualified = TableName { schema: None, table: name.table.clone() };
    let values = [
        ("table_literal", &*literal(&name.quoted(""))),
        ("table_name", &*literal(&unqualified.quoted(""))),
        ("function_name", &*literal(&unqualified.quoted("_record"))),
        ("lock_timeout", LOCK_TIMEOUT),
        ("body", &*body),
    ];
    let make = render(include_str!("sql/record_function.sql"), &values);
    // The name of a schema may hold any character.
    let mut tag = "$tower_dedup$".to_owned();
    while make.contains(&tag) {
        tag.insert(1, 'x');
    }
    format!("DO {tag}\n{make}\n{tag}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_schema_ends_neither_the_body_nor_a_name() {
        let schema = Some(r#"a"$tower_dedup$'b"#.to_owned());
        let sql = record_function(&TableName { schema, ..TableName::default() });
        assert_eq!(sql.matches("$xtower_dedup$").count(), 2, "{sql}");
        assert!(sql.contains(r#"'"a""$tower_dedup$''b"."webhook_deliveries"'::regclass"#), "{sql}");
    }
}
