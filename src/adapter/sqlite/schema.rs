//! The SQL of the SQLite adapter: the schema, and each statement with its rule.
//!
//! Times are integers, milliseconds since the Unix epoch. What a row means stands in
//! [`sql::rows`](super::super::sql).
//!
//! `?1` is the keys as a JSON array of pairs, `?2` the token, `?3` the retention, `?4` the lease.
//! Where each key is asked for under terms of its own, the pairs go on with those, the token in hex.
//! Where something is kept with the keys, their pairs go on with the payload's SHA-256 in hex, and
//! the status, the headers and the body (in hex) of the response; what is not there is null.
//!
//! The statements of the common case answer no rows but how many there were, and find the terms of
//! the key at place `n` in `?2` from byte `n` × [`TERMS`] on: the token, and the retention and the
//! lease in [`DIGITS`] digits each. To take them from JSON, and to hand rows from SQLite's thread to
//! ours, costs as much as to write them.

use std::sync::Arc;

use super::super::sql::{Identifier, grace_ms};
use super::super::stored::Fetch;

/// The version of the schema that this code writes.
pub(super) const VERSION: i64 = 1;

/// The store's clock, in milliseconds. It does not move within one statement.
const NOW: &str = "CAST(round(unixepoch('subsec') * 1000) AS INTEGER)";

/// What is kept with a key.
const KEPT: &str = "payload_sha256, response_status, response_headers, response_body";
/// The same without the response, which is then not read from the file.
const KEPT_OF_PAYLOAD: &str = "payload_sha256, NULL AS response_status, \
    NULL AS response_headers, NULL AS response_body";

/// How many bytes there are of the terms of one key.
pub(super) const TERMS: usize = 16 + 2 * DIGITS;
/// As many as the longest number has.
pub(super) const DIGITS: usize = 20;

/// Every statement, with the table's name put in.
#[derive(Debug, Clone)]
pub(super) struct Statements {
    pub(super) tables: Arc<str>,
    pub(super) version: Arc<str>,
    pub(super) create: Vec<Arc<str>>,
    pub(super) read: Arc<str>,
    pub(super) record: Arc<str>,
    /// Records keys of which there is no row, with nothing to keep.
    pub(super) record_new: Arc<str>,
    pub(super) unrecord: Arc<str>,
    pub(super) claim: Arc<str>,
    /// Claims keys of which there is no row.
    pub(super) claim_new: Arc<str>,
    pub(super) renew: Arc<str>,
    pub(super) complete: Arc<str>,
    /// Completes keys that their tokens hold, with nothing to keep.
    pub(super) complete_held: Arc<str>,
    pub(super) release: Arc<str>,
    pub(super) clock: Arc<str>,
    /// Of those that expired at `?2` or later, the first `?1`.
    pub(super) purge: Arc<str>,
    pub(super) forget: Arc<str>,
    pub(super) count: Arc<str>,
    pub(super) finish: Arc<str>,
    /// Of complete keys: with their responses, and without.
    recall: [Arc<str>; 2],
    /// Within a transaction, before `finish`.
    pub(super) keep: Arc<str>,
    pub(super) give_back: [Arc<str>; 2],
}

/// The statements that make the schema, for those who run their own migrations.
pub(super) fn create_sql(name: &Identifier) -> Vec<String> {
    // Quoted, for a name may be a word of SQL.
    let (table, schema) = (format!("\"{name}\""), format!("\"{name}_schema\""));
    vec![
        format!(
            "CREATE TABLE IF NOT EXISTS {table} (\n    \
             namespace TEXT NOT NULL,\n    \
             id TEXT NOT NULL,\n    \
             token BLOB,\n    \
             lease_until INTEGER,\n    \
             attempts INTEGER NOT NULL,\n    \
             takeover INTEGER NOT NULL,\n    \
             first_seen_at INTEGER NOT NULL,\n    \
             completed_at INTEGER,\n    \
             expires_at INTEGER NOT NULL,\n    \
             event_type TEXT,\n    \
             payload_sha256 BLOB,\n    \
             response_status INTEGER,\n    \
             response_headers TEXT,\n    \
             response_body BLOB,\n    \
             PRIMARY KEY (namespace, id)\n\
             ) WITHOUT ROWID"
        ),
        format!("CREATE INDEX IF NOT EXISTS \"{name}_expires_at\" ON {table} (expires_at)"),
        format!("CREATE TABLE IF NOT EXISTS {schema} (version INTEGER NOT NULL)"),
        format!(
            "INSERT INTO {schema} (version) \
             SELECT {VERSION} WHERE NOT EXISTS (SELECT 1 FROM {schema})"
        ),
    ]
}

/// Under which terms a changing statement asks for its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asks {
    /// All under the same.
    One,
    /// Each under its own.
    Each,
}

impl Statements {
    pub(super) fn recall(&self, wanted: Fetch) -> &Arc<str> {
        &self.recall[usize::from(wanted == Fetch::Digest)]
    }

    pub(super) fn new(name: &Identifier, asks: Asks) -> Self {
        let table = format!("\"{name}\"");
        let (token, retention, lease, kept) = match asks {
            Asks::One => ("?2", "?3", "?4", 2),
            Asks::Each => ("unhex(value ->> 2)", "(value ->> 3)", "(value ->> 4)", 5),
        };
        let keys = "SELECT value ->> 0 AS namespace, value ->> 1 AS id FROM json_each(?1)";
        let matching = format!("(namespace, id) IN ({keys})");
        let insert = |values: &str| {
            format!(
                "INSERT INTO {table} AS t (namespace, id, token, lease_until, attempts, takeover, \
                 first_seen_at, completed_at, expires_at, {KEPT}) \
                 SELECT value ->> 0, value ->> 1, {token}, {values}, {NOW} + {retention}, \
                 unhex(value ->> {kept}), value ->> {}, value ->> {}, unhex(value ->> {}) \
                 FROM json_each(?1) WHERE true ON CONFLICT (namespace, id) DO UPDATE SET",
                kept + 1,
                kept + 2,
                kept + 3
            )
        };
        let number = |place: usize| {
            let from = 17 + place * DIGITS;
            format!("CAST(substr(?2, key * {TERMS} + {from}, {DIGITS}) AS INTEGER)")
        };
        let its_token = format!("substr(?2, key * {TERMS} + 1, 16)");
        let (its_retention, its_lease) = (number(0), number(1));
        let insert_new = |values: &str| {
            format!(
                "INSERT INTO {table} (namespace, id, token, lease_until, attempts, takeover, \
                 first_seen_at, completed_at, expires_at) \
                 SELECT value ->> 0, value ->> 1, {its_token}, {values}, {NOW} + {its_retention} \
                 FROM json_each(?1) WHERE true ON CONFLICT (namespace, id) DO NOTHING"
            )
        };
        // Rows that are there and held. Not an UPDATE: of a table that was tiny when it was looked at
        // by ANALYZE, that reads every row, and goes on so when it is large. Here the join has its
        // order.
        let change_held = |token: &str, [columns, values]: [&str; 2], change: &str| {
            format!(
                "INSERT INTO {table} AS t \
                 (namespace, id, attempts, takeover, first_seen_at, expires_at{columns}) \
                 SELECT e.namespace, e.id, 0, 0, 0, 0{values} \
                 FROM json_each(?1) CROSS JOIN {table} AS e \
                 ON e.namespace = value ->> 0 AND e.id = value ->> 1 \
                 WHERE e.completed_at IS NULL AND e.token = {token} \
                 ON CONFLICT (namespace, id) DO UPDATE SET {change}"
            )
        };
        // A row that a claim or a record may take: nobody holds it, or the retention has ended.
        let free = format!(
            "(t.completed_at IS NULL AND (t.token IS NULL OR t.lease_until <= {NOW})) \
             OR (t.completed_at IS NOT NULL AND t.expires_at <= {NOW})"
        );
        // A row that nothing has needed for as long as that.
        let grace = grace_ms();
        let expired = format!(
            "expires_at <= {NOW} - {grace} AND \
             (completed_at IS NOT NULL OR token IS NULL OR lease_until <= {NOW} - {grace})"
        );
        // What was kept in a former life of the key is lost when a new one begins.
        let keeps = "payload_sha256 = excluded.payload_sha256, \
            response_status = excluded.response_status, \
            response_headers = excluded.response_headers, response_body = excluded.response_body";
        let loses = "payload_sha256 = NULL, response_status = NULL, response_headers = NULL, \
            response_body = NULL";
        let repeated = "(t.completed_at IS NULL AND t.token IS excluded.token)";
        Self {
            // The catalogue first: CREATE TABLE IF NOT EXISTS needs the right to write even where
            // there is nothing to create.
            tables: format!(
                "SELECT count(*) FROM sqlite_schema WHERE type = 'table' \
                 AND name IN ('{name}', '{name}_schema')"
            )
            .into(),
            version: format!("SELECT coalesce(max(version), 0) FROM \"{name}_schema\"").into(),
            create: create_sql(name).into_iter().map(Into::into).collect(),
            read: format!(
                "SELECT j.key AS place, t.token, t.attempts, t.takeover, t.first_seen_at, \
                 t.completed_at, t.expires_at, t.lease_until, {NOW} AS now \
                 FROM json_each(?1) AS j CROSS JOIN {table} AS t \
                 ON t.namespace = j.value ->> 0 AND t.id = j.value ->> 1"
            )
            .into(),
            record: format!(
                "{} token = excluded.token, lease_until = NULL, \
                 attempts = CASE WHEN t.expires_at <= {NOW} THEN 1 ELSE t.attempts + 1 END, \
                 takeover = t.expires_at > {NOW} AND t.token IS NOT NULL, \
                 first_seen_at = CASE WHEN t.expires_at <= {NOW} THEN excluded.first_seen_at \
                   ELSE t.first_seen_at END, \
                 completed_at = excluded.completed_at, expires_at = excluded.expires_at, {keeps} \
                 WHERE {free} RETURNING namespace, id, attempts, takeover",
                insert(&format!("NULL, 1, 0, {NOW}, {NOW}"))
            )
            .into(),
            record_new: insert_new(&format!("NULL, 1, 0, {NOW}, {NOW}")).into(),
            unrecord: format!(
                "DELETE FROM {table} WHERE (namespace, id) IN (SELECT e.namespace, e.id \
                 FROM json_each(?1) CROSS JOIN {table} AS e \
                 ON e.namespace = value ->> 0 AND e.id = value ->> 1 \
                 WHERE e.token = {token} AND e.completed_at IS NOT NULL) RETURNING namespace, id"
            )
            .into(),
            claim: format!(
                "{} token = excluded.token, lease_until = excluded.lease_until, \
                 attempts = CASE WHEN {repeated} THEN t.attempts \
                   WHEN t.expires_at <= {NOW} THEN 1 ELSE t.attempts + 1 END, \
                 takeover = CASE WHEN {repeated} THEN t.takeover \
                   WHEN t.expires_at <= {NOW} THEN 0 ELSE t.token IS NOT NULL END, \
                 first_seen_at = CASE WHEN NOT {repeated} AND t.expires_at <= {NOW} \
                   THEN excluded.first_seen_at ELSE t.first_seen_at END, \
                 completed_at = NULL, expires_at = excluded.expires_at, {loses} \
                 WHERE {free} OR {repeated} RETURNING namespace, id, attempts, takeover",
                insert(&format!("{NOW} + {lease}, 1, 0, {NOW}, NULL"))
            )
            .into(),
            claim_new: insert_new(&format!("{NOW} + {its_lease}, 1, 0, {NOW}, NULL")).into(),
            renew: format!(
                "{} lease_until = excluded.lease_until WHERE {repeated} RETURNING namespace, id",
                insert(&format!("{NOW} + {lease}, 1, 0, {NOW}, NULL"))
            )
            .into(),
            // The holder's token stays, which is how the answer tells whether it was ours. An
            // insertion counts no attempt, which is how the answer tells that.
            complete: format!(
                "{} completed_at = excluded.completed_at, lease_until = NULL, \
                 token = CASE WHEN t.completed_at IS NULL THEN t.token ELSE excluded.token END, \
                 attempts = CASE WHEN t.completed_at IS NULL THEN t.attempts ELSE 0 END, \
                 takeover = CASE WHEN t.completed_at IS NULL THEN t.takeover ELSE 0 END, \
                 first_seen_at = CASE WHEN t.completed_at IS NULL THEN t.first_seen_at \
                   ELSE excluded.first_seen_at END, \
                 expires_at = CASE WHEN t.expires_at <= {NOW} THEN excluded.expires_at \
                   ELSE t.expires_at END, {keeps} \
                 WHERE t.completed_at IS NULL OR t.expires_at <= {NOW} \
                 RETURNING namespace, id, attempts, token",
                insert(&format!("NULL, 0, 0, {NOW}, {NOW}"))
            )
            .into(),
            complete_held: change_held(
                &format!("{its_token} AND e.expires_at > {NOW}"),
                ["", ""],
                &format!("completed_at = {NOW}, lease_until = NULL, {loses}"),
            )
            .into(),
            release: format!(
                "{} RETURNING namespace, id",
                change_held(token, ["", ""], "token = NULL, lease_until = NULL")
            )
            .into(),
            clock: format!("SELECT {NOW}").into(),
            purge: format!(
                "DELETE FROM {table} WHERE (namespace, id) IN \
                 (SELECT namespace, id FROM {table} WHERE expires_at >= ?2 AND {expired} \
                 ORDER BY expires_at LIMIT ?1) RETURNING expires_at"
            )
            .into(),
            forget: format!(
                "DELETE FROM {table} WHERE {matching} \
                 AND (completed_at IS NOT NULL OR token IS NULL OR lease_until <= {NOW}) \
                 RETURNING namespace, id"
            )
            .into(),
            count: format!("SELECT count(*) FROM {table}").into(),
            finish: format!(
                "UPDATE {table} SET completed_at = {NOW}, lease_until = NULL, \
                 expires_at = CASE WHEN expires_at <= {NOW} THEN {NOW} + ?3 ELSE expires_at END \
                 WHERE {matching} AND token = ?2 AND completed_at IS NULL RETURNING namespace, id"
            )
            .into(),
            recall: [KEPT, KEPT_OF_PAYLOAD].map(|kept| {
                format!(
                    "SELECT j.key AS place, {kept} FROM json_each(?1) AS j \
                     CROSS JOIN {table} AS t \
                     ON t.namespace = j.value ->> 0 AND t.id = j.value ->> 1 \
                     WHERE t.completed_at IS NOT NULL AND t.expires_at > {NOW}"
                )
                .into()
            }),
            keep: change_held(
                "?2",
                [
                    &format!(", {KEPT}"),
                    ", unhex(value ->> 2), value ->> 3, value ->> 4, unhex(value ->> 5)",
                ],
                keeps,
            )
            .into(),
            // As a rollback would leave them: what this claim has made goes, and what it has taken
            // is one attempt younger; who takes over from a lapsed lease next is told so again.
            give_back: [
                format!(
                    "DELETE FROM {table} WHERE {matching} AND token = ?2 \
                     AND completed_at IS NULL AND attempts = 1 RETURNING namespace, id"
                ),
                format!(
                    "UPDATE {table} SET attempts = attempts - 1, \
                     token = CASE WHEN takeover THEN token END, \
                     lease_until = CASE WHEN takeover THEN {NOW} END \
                     WHERE {matching} AND token = ?2 AND completed_at IS NULL AND attempts > 1 \
                     RETURNING namespace, id"
                ),
            ]
            .map(Into::into),
        }
    }
}

#[cfg(test)]
mod tests {
    use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
    use sqlx::{AssertSqlSafe, ConnectOptions};

    use super::*;

    /// Whatever is asked by key is found by key, in a table that is known to be tiny as well: it
    /// grows.
    #[tokio::test]
    async fn keys_are_searched_by_the_primary_key() {
        let mut connection =
            SqliteConnectOptions::new().filename(":memory:").connect().await.unwrap();
        let name = Identifier::default_table();
        for sql in create_sql(&name) {
            sqlx::query(AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
        }
        search(&mut connection).await;
        let row = "INSERT INTO webhook_deliveries \
            (namespace, id, attempts, takeover, first_seen_at, expires_at) \
            VALUES ('a', 'b', 1, 0, 1, 1), ('a', 'c', 1, 0, 1, 1)";
        for sql in [row, "ANALYZE"] {
            sqlx::query(sql).execute(&mut connection).await.unwrap();
        }
        search(&mut connection).await;
    }

    async fn search(connection: &mut SqliteConnection) {
        for asks in [Asks::One, Asks::Each] {
            let all = Statements::new(&Identifier::default_table(), asks);
            let [recall, _] = all.recall;
            let searching = [
                all.read,
                all.complete_held,
                all.release,
                recall,
                all.finish,
                all.keep,
                all.forget,
            ];
            let inserting =
                [all.record, all.record_new, all.claim, all.claim_new, all.renew, all.complete];
            let searching = searching.iter().map(|sql| (sql, 1));
            let inserting = inserting.iter().map(|sql| (sql, 0));
            // What it finds, it looks up to delete it.
            for (sql, searches) in searching.chain(inserting).chain([(&all.unrecord, 2)]) {
                let explain = AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}"));
                let plan: Vec<(i64, i64, i64, String)> =
                    sqlx::query_as(explain).fetch_all(&mut *connection).await.unwrap();
                let steps: Vec<&str> = plan.iter().map(|step| step.3.as_str()).collect();
                let by_key = |step: &&&str| step.contains("PRIMARY KEY (namespace=? AND id=?)");
                assert_eq!(steps.iter().filter(by_key).count(), searches, "{sql}\n{steps:?}");
                let scans_rows =
                    |step: &str| step.starts_with("SCAN t") || step.starts_with("SCAN e");
                assert!(!steps.iter().any(|step| scans_rows(step)), "{sql}\n{steps:?}");
            }
        }
    }
}
