//! Where the table is, and how it is made.

use std::time::Duration;

use super::super::sql::statement::render;
use super::options::PostgresOptions;

/// The version of the schema that this code writes.
pub(super) const VERSION: i32 = 1;

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
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Returns a string literal.
pub(super) fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// Returns the statements that make the schema.
pub(super) fn create_sql(name: &TableName) -> Vec<String> {
    let schema = name.schema.as_deref().map(quoted);
    let values = [
        ("table", &*name.quoted("")),
        ("version_table", &*name.quoted("_schema")),
        ("index", &*format!("\"{}_expires_at\"", name.table)),
        ("version", &*VERSION.to_string()),
        ("schema_literal", &*schema.as_deref().map(literal).unwrap_or_default()),
        ("schema", schema.as_deref().unwrap_or_default()),
    ];
    let create_schema = schema.is_some().then_some(include_str!("sql/create_schema.sql"));
    let tables = [
        include_str!("sql/create_table.sql"),
        include_str!("sql/create_index.sql"),
        include_str!("sql/create_version_table.sql"),
        include_str!("sql/create_version.sql"),
    ];
    create_schema.into_iter().chain(tables).map(|file| render(file, &values)).collect()
}

/// Returns the migration as one message: one implicit transaction, without a `BEGIN` that could stay
/// open. Without a `lock_timeout`, it waits for other migrations and for open transactions.
pub(super) fn migration(statements: Vec<String>, lock_timeout: Option<Duration>) -> String {
    let wait = lock_timeout
        .map(|wait| format!("SELECT set_config('lock_timeout', '{}ms', true)", wait.as_millis()));
    // A crash of the server must not remove a table that a process has found: the role of that process
    // may lack the right to make it again.
    let durable = format!("SELECT {}", render(include_str!("sql/durable.sql"), &[]));
    let lock = render(include_str!("sql/migration_lock.sql"), &[]);
    let statements = wait.into_iter().chain([lock, durable]).chain(statements);
    statements.map(|statement| statement + ";\n").collect()
}
