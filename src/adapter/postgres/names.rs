//! [`TableName`]: the table's name in SQL.

use super::super::sql::statement::render;
use super::options::PostgresOptions;

/// The table's name.
#[derive(Debug, Clone)]
pub(super) struct TableName {
    /// `None` until the table was found, unless the options name a schema.
    pub(super) schema: Option<String>,
    pub(super) table: String,
}

impl TableName {
    /// Returns the name that the options give.
    pub(super) fn of(options: &PostgresOptions) -> Self {
        Self { schema: options.schema.clone(), table: options.sql.table.clone() }
    }

    /// Returns the quoted name: a name may be a word of SQL.
    pub(super) fn quoted(&self, suffix: &str) -> String {
        let table = quoted(&format!("{}{suffix}", self.table));
        match &self.schema {
            Some(schema) => format!("{}.{table}", quoted(schema)),
            None => table,
        }
    }

    /// Returns an expression for the table's number, which is null where there is no such table.
    pub(super) fn number(&self) -> String {
        format!("to_regclass({})", literal(&self.quoted("")))
    }

    /// Returns the statement that finds the table.
    pub(super) fn find(&self) -> String {
        let schema = self.schema.as_deref().map_or("current_schema()::text".to_owned(), literal);
        let version_name = literal(&format!(".\"{}_schema\"", self.table));
        let values = [
            ("schema", &*schema),
            ("version_name", &*version_name),
            ("table_number", &*self.number()),
        ];
        render(include_str!("sql/find.sql"), &values)
    }
}

/// Returns a name in quotes.
pub(super) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Returns a string literal.
pub(super) fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}
