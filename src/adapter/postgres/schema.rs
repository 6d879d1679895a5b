//! The schema of the Postgres adapter, and what statements say of it.

use super::super::sql::Identifier;

/// The version of the schema that this code writes.
pub(super) const VERSION: i32 = 1;

/// Where the table is.
#[derive(Debug, Clone)]
pub(super) struct Place {
    /// None until the table was found, unless the user has named one.
    pub(super) schema: Option<String>,
    pub(super) table: Identifier,
}

impl Default for Place {
    fn default() -> Self {
        Self { schema: None, table: Identifier::default_table() }
    }
}

impl Place {
    /// Quoted, for a name may be a word of SQL.
    pub(super) fn name(&self, suffix: &str) -> String {
        let table = &self.table;
        match &self.schema {
            Some(schema) => format!("{}.\"{table}{suffix}\"", quoted(schema)),
            None => format!("\"{table}{suffix}\""),
        }
    }

    /// The number of a table, null where it is not there.
    fn number(&self, suffix: &str) -> String {
        format!("to_regclass({})", literal(&self.name(suffix)))
    }

    /// A key's advisory lock. Those of a database are shared by all its tables: the table's own
    /// number makes it its own.
    pub(super) fn lock(&self, of_key: &str) -> String {
        format!("{of_key} # {}::oid::int8", self.number(""))
    }

    /// Looks for the table: its schema, or the one to make it in; whether it is there with its
    /// version; the database's encoding; and whether the session's `search_path` is the one that it
    /// began with.
    pub(super) fn find(&self) -> String {
        let named = self.schema.as_deref().map_or("current_schema()::text".to_owned(), literal);
        let version = literal(&format!(".\"{}_schema\"", self.table));
        format!(
            "SELECT f.schema, f.there AND to_regclass(quote_ident(f.schema) || {version}) \
             IS NOT NULL AS there, current_setting('server_encoding') AS encoding, \
             current_setting('search_path') IS NOT DISTINCT FROM (SELECT s.reset_val \
             FROM pg_settings AS s WHERE s.name = 'search_path') AS own_path \
             FROM (SELECT coalesce(n.nspname::text, {named}) AS schema, c.oid IS NOT NULL AS there \
             FROM (SELECT) AS one LEFT JOIN pg_class AS c ON c.oid = {} \
             LEFT JOIN pg_namespace AS n ON n.oid = c.relnamespace) AS f",
            self.number("")
        )
    }
}

/// A name, quoted.
pub(super) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

pub(super) fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// The statements that make the schema.
pub(super) fn create_sql(place: &Place) -> Vec<String> {
    let (table, schema) = (place.name(""), place.name("_schema"));
    let mut statements = Vec::new();
    if let Some(schema) = &place.schema {
        // Looked for first: IF NOT EXISTS asks for the right to create all the same.
        let schema = quoted(schema);
        statements.push(format!(
            "DO $$ BEGIN IF to_regnamespace({}) IS NULL \
             THEN CREATE SCHEMA {schema}; END IF; END $$",
            literal(&schema)
        ));
    }
    statements.extend([
        format!(
            "CREATE TABLE IF NOT EXISTS {table} (\n    \
             key uuid PRIMARY KEY,\n    \
             namespace text NOT NULL,\n    \
             id text NOT NULL,\n    \
             token uuid,\n    \
             lease_until timestamptz,\n    \
             attempts integer NOT NULL,\n    \
             takeover boolean NOT NULL,\n    \
             first_seen_at timestamptz NOT NULL,\n    \
             completed_at timestamptz,\n    \
             expires_at timestamptz NOT NULL,\n    \
             event_type text,\n    \
             payload_sha256 bytea,\n    \
             response_status smallint,\n    \
             response_headers text,\n    \
             response_body bytea\n\
             ) WITH (fillfactor = 90)"
        ),
        format!(
            "CREATE INDEX IF NOT EXISTS \"{}_expires_at\" ON {table} (expires_at)",
            place.table
        ),
        format!("CREATE TABLE IF NOT EXISTS {schema} (version integer NOT NULL)"),
        format!(
            "INSERT INTO {schema} (version) \
             SELECT {VERSION} WHERE NOT EXISTS (SELECT 1 FROM {schema})"
        ),
    ]);
    statements
}

/// The schema in one go: one implicit transaction, with no `BEGIN` that could be left open. Two
/// processes that both find nothing take turns.
pub(super) fn migration(place: &Place) -> String {
    // Any number, as long as it is always the same.
    let turn = "SELECT pg_advisory_xact_lock(8389209352947822448)".to_owned();
    // Nobody looks for a schema again that was there once: no crash may take it away.
    let durable = format!("SELECT {}", Durability::Synchronous.setting());
    let statements = [turn, durable].into_iter().chain(create_sql(place));
    statements.map(|statement| statement + ";\n").collect()
}

/// How durable a statement is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Durability {
    Synchronous,
    Asynchronous,
}

impl Durability {
    pub(super) fn setting(self) -> &'static str {
        match self {
            // `remote_apply` is stronger and stays. `local` and `remote_write` do not wait until a
            // synchronous standby has the commit on its disk.
            Self::Synchronous => {
                "CASE WHEN current_setting('synchronous_commit') IN \
                 ('off', 'local', 'remote_write') \
                 THEN set_config('synchronous_commit', 'on', true) END"
            }
            Self::Asynchronous => "set_config('synchronous_commit', 'off', true)",
        }
    }
}
