//! The schema of the Postgres adapter, and what statements say of it.

use super::super::sql::Identifier;

/// The version of the schema that this code writes.
pub(super) const VERSION: i32 = 1;

/// Where the table is.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) schema: Option<Identifier>,
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
            Some(schema) => format!("\"{schema}\".\"{table}{suffix}\""),
            None => format!("\"{table}{suffix}\""),
        }
    }
}

impl Place {
    /// A key's advisory lock. Those of a database are shared by all its tables, and a name is
    /// another table under another `search_path`: the table's own number makes it its own.
    pub(super) fn lock(&self, of_key: &str) -> String {
        format!("{of_key} # to_regclass('{}')::oid::int8", self.name(""))
    }
}

/// The statements that make the schema.
pub(super) fn create_sql(place: &Place) -> Vec<String> {
    let (table, schema) = (place.name(""), place.name("_schema"));
    let mut statements = Vec::new();
    if let Some(schema) = &place.schema {
        // Looked for first: IF NOT EXISTS asks for the right to create all the same.
        statements.push(format!(
            "DO $$ BEGIN IF to_regnamespace('\"{schema}\"') IS NULL \
             THEN CREATE SCHEMA \"{schema}\"; END IF; END $$"
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
