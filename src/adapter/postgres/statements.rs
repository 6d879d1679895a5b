//! The statements of the Postgres adapter, each with its rule.
//!
//! What a row means stands in [`sql::rows`](super::super::sql).
//!
//! 1. `key` is the first 16 bytes of the SHA-256 over namespace, a line feed and id (a namespace
//!    holds no control character). The names stand beside it, to be read; nothing indexes them.
//! 2. Every statement waits for a lock for 100 ms at most, and for less in a batch: rows are locked
//!    for the length of a statement, except by transactions, which may stay open for as long as a
//!    handler runs.
//! 3. Every statement is as durable as `synchronous_commit = on`, whatever a role or a database was
//!    set to, except the claim, by choice.
//! 4. The clock is `clock_timestamp()`: it moves on while a statement waits.
//! 5. Rows are inserted and locked in the order of `key`, so that two sets never wait for each
//!    other.
//! 6. `expires_at` is indexed, so it is left alone by completions: those are heap-only updates.
//! 7. What runs with every delivery is a plain statement that does not join the table. Those that do
//!    are planned anew each time, since Postgres finds the plan for any number of keys too dear, and
//!    that takes five times as long as inserting a row.
//! 8. The statements that run with every delivery come in two forms, for one key and for several:
//!    the first takes plain values, and is no dearer than an `INSERT` that somebody writes by hand.
//!
//! `$1` to `$6` are arrays with a place for each key: keys, namespaces, ids, tokens, retentions and
//! leases, these in milliseconds. `$7` is how long to wait for a lock. `$8` to `$11`, where something
//! may be kept with the keys, are the payloads' SHA-256 and the responses' status, headers and body;
//! null where there is nothing to keep. `$12`, where claims and completions go together, says which
//! keys are to be completed.

use std::sync::Arc;

use super::super::kept::Wanted;
use super::super::sql::grace_ms;
use super::schema::{Durability, Place};

/// How long a statement waits for a row that an open transaction holds.
pub(super) const LOCK_TIMEOUT: &str = "100ms";

/// How long one for many callers waits, before it is sent again without that row: longer than a
/// statement holds one, but for a slow disk.
pub(super) const BATCH_LOCK_TIMEOUT: &str = "25ms";

/// Every statement, with the table's name put in.
#[derive(Debug, Clone)]
pub(super) struct Statements {
    pub(super) tables: Arc<str>,
    pub(super) version: Arc<str>,
    /// Whether the transaction has written nothing.
    pub(super) unwritten: Arc<str>,
    /// Reads, on any server.
    pub(super) look: Arc<str>,
    /// Reads, and says whether the server is a standby: it may not know yet, or know too much.
    pub(super) read: Arc<str>,
    pub(super) probe: Arc<str>,
    pub(super) record: Take,
    pub(super) unrecord: Arc<str>,
    pub(super) claim: Take,
    pub(super) renew: Write,
    pub(super) complete: Write,
    /// Claims and completions.
    pub(super) mixed: Arc<str>,
    pub(super) release: Arc<str>,
    /// The server's clock, in milliseconds since the Unix epoch.
    pub(super) clock: Arc<str>,
    /// Of those that expired at `$2` milliseconds or later, the first `$1`.
    pub(super) purge: Arc<str>,
    pub(super) forget: Arc<str>,
    pub(super) count: Arc<str>,
    pub(super) open: Within,
    pub(super) record_in: Within,
    pub(super) give_back: Arc<str>,
    pub(super) commit: Arc<str>,
    /// Of complete keys: with their responses, and without.
    recall: [Arc<str>; 2],
    /// Within a transaction, before `commit`.
    pub(super) keep: Arc<str>,
}

/// A statement that inserts, for one key and for several.
#[derive(Debug, Clone)]
pub(super) struct Write {
    pub(super) one: Arc<str>,
    pub(super) many: Arc<str>,
    /// Whether it takes what is to be kept with the keys.
    pub(super) keeps: bool,
}

/// The two halves of a claim or a record.
#[derive(Debug, Clone)]
pub(super) struct Take {
    /// Inserts what is not there, and answers which that were. Writes nothing for what is there.
    pub(super) insert: Write,
    /// Takes rows that are there and free, and what is to be kept with them if `insert` does.
    pub(super) seize: Arc<str>,
}

/// The same in a transaction of the user's.
#[derive(Debug, Clone)]
pub(super) struct Within {
    /// Reads too what is there.
    pub(super) insert: Arc<str>,
    pub(super) seize: Arc<str>,
}

/// The columns of a row, as they are read.
const COLUMNS: &str = "t.key, t.token, t.attempts, t.takeover, t.first_seen_at, t.completed_at, \
    t.expires_at, t.lease_until, clock_timestamp() AS now";

/// What a statement begins with: its settings, which hold until it ends.
fn begin(durability: Durability) -> String {
    format!(
        "WITH terms AS MATERIALIZED (\
         SELECT set_config('lock_timeout', $7::text, true) AS waits, {} AS durable)",
        durability.setting()
    )
}

/// The keys that a statement is asked for, and what is to be kept with each.
fn asked(keeps: bool) -> String {
    if keeps {
        asked_with(&format!(", {}", kept("a")), KEPT_PARAMS, &format!(", {KEPT}"))
    } else {
        asked_with("", "", "")
    }
}

/// The same, with more columns, their parameters and their names.
fn asked_with(columns: &str, params: &str, names: &str) -> String {
    format!(
        "(SELECT a.key, a.namespace, a.id, a.token, \
         a.retention * interval '1 millisecond' AS retention, \
         a.lease * interval '1 millisecond' AS lease{columns} \
         FROM terms, unnest($1::uuid[], $2::text[], $3::text[], $4::uuid[], $5::int8[], \
         $6::int8[]{params}) AS a (key, namespace, id, token, retention, lease{names}))"
    )
}

/// The same for one key, with its settings.
fn asked_one(durability: Durability, keeps: bool) -> String {
    let kept = if keeps {
        ", $8::bytea AS payload_sha256, $9::int2 AS response_status, \
         $10::text AS response_headers, $11::bytea AS response_body"
    } else {
        ""
    };
    format!(
        "(SELECT $1::uuid AS key, $2::text AS namespace, $3::text AS id, $4::uuid AS token, \
         $5::int8 * interval '1 millisecond' AS retention, \
         $6::int8 * interval '1 millisecond' AS lease{kept} \
         WHERE set_config('lock_timeout', $7::text, true) IS NOT NULL \
         AND ({}) IS DISTINCT FROM '')",
        durability.setting()
    )
}

/// What is kept with a key.
const KEPT: &str = "payload_sha256, response_status, response_headers, response_body";
const KEPT_PARAMS: &str = ", $8::bytea[], $9::int2[], $10::text[], $11::bytea[]";
/// What was kept in a former life of a key is lost when a new one begins.
const LOST: &str = "payload_sha256 = NULL, response_status = NULL, response_headers = NULL, \
    response_body = NULL";

fn kept(row: &str) -> String {
    KEPT.split(", ").map(|column| format!("{row}.{column}")).collect::<Vec<_>>().join(", ")
}

fn keep(row: &str) -> String {
    let set = KEPT.split(", ").map(|column| format!("{column} = {row}.{column}"));
    set.collect::<Vec<_>>().join(", ")
}

/// What is asked inside a transaction, which goes on: a lock is only tried for, since its holder may
/// be a handler, and the time to wait for rows is set back to the user's own.
///
/// `$1` to `$3` are keys, namespaces and ids, `$4` the token, `$5` and `$6` the retention and the
/// lease of all of them, `$7` the keys' parts of the advisory locks.
fn begin_within(place: &Place) -> String {
    let lock = place.lock("a.lock");
    format!(
        "WITH terms AS MATERIALIZED (\
         SELECT current_setting('lock_timeout') AS was, \
         set_config('lock_timeout', '{LOCK_TIMEOUT}', true) AS waits, {} AS durable, \
         $4::uuid AS token, $5::int8 * interval '1 millisecond' AS retention, \
         $6::int8 * interval '1 millisecond' AS lease), \
         asked AS MATERIALIZED (\
         SELECT a.key, a.namespace, a.id, a.place, terms.token, terms.retention, terms.lease, \
         pg_try_advisory_xact_lock({lock}) AS locked \
         FROM terms, unnest($1::uuid[], $2::text[], $3::text[], $7::int8[]) WITH ORDINALITY \
         AS a (key, namespace, id, lock, place))",
        Durability::Synchronous.setting()
    )
}

/// Sets back what [`begin_within`] has set, once `rows` are written.
fn set_back(rows: &str) -> String {
    format!(
        "written AS MATERIALIZED (SELECT count(*) AS rows FROM {rows}), \
         back AS MATERIALIZED (SELECT set_config('lock_timeout', terms.was, true) AS waits, \
         pg_current_xact_id()::text AS mark FROM terms, written WHERE written.rows >= 0)"
    )
}

const NOW: &str = "clock_timestamp()";

/// A time in milliseconds since the Unix epoch, rounded down.
fn unix_ms(time: &str) -> String {
    format!("floor(extract(epoch FROM {time}) * 1000)::int8")
}

/// What an insertion does about a row that is there.
const NEW: &str = "NOTHING RETURNING t.key";

/// What a completion answers.
const COMPLETED: &str = "RETURNING t.key, t.attempts, t.token";

/// What a row answers that was taken.
const GRANT: &str = ", t.attempts, t.takeover";

/// A row that a claim or a record may take: nobody holds it, or the retention has ended.
const FREE: &str = "((t.completed_at IS NULL \
    AND (t.token IS NULL OR t.lease_until <= clock_timestamp())) \
    OR (t.completed_at IS NOT NULL AND t.expires_at <= clock_timestamp()))";

impl Statements {
    pub(super) fn recall(&self, wanted: Wanted) -> &Arc<str> {
        &self.recall[usize::from(wanted == Wanted::Payload)]
    }

    pub(super) fn new(place: &Place, claims: Durability) -> Self {
        let table = place.name("");
        let sync = begin(Durability::Synchronous);
        let (plain, keeping) = (asked(false), asked(true));
        let insert = |asked: &str, values: &str, more: &str| {
            format!(
                "INSERT INTO {table} AS t (key, namespace, id, token, lease_until, attempts, \
                 takeover, first_seen_at, completed_at, expires_at{more}) \
                 SELECT key, namespace, id, token, {values}, {NOW} + retention{more} \
                 FROM {asked} ON CONFLICT (key) DO"
            )
        };
        let write = |durability, keeps, values: &str, conflict: &str| {
            let more = if keeps { format!(", {KEPT}") } else { String::new() };
            let one = format!("{} AS asked", asked_one(durability, keeps));
            let many = format!("{} AS asked ORDER BY key", asked(keeps));
            Write {
                one: format!("{} {conflict}", insert(&one, values, &more)).into(),
                many: format!("{} {} {conflict}", begin(durability), insert(&many, values, &more))
                    .into(),
                keeps,
            }
        };
        let in_flight = format!("{NOW} + lease, 1, false, {NOW}, NULL");
        let complete = format!("NULL, 1, false, {NOW}, {NOW}");
        let look = |more: &str| {
            format!("SELECT {COLUMNS}{more} FROM {table} AS t WHERE t.key = ANY ($1::uuid[])")
        };
        let insert_within = |values: &str| {
            format!(
                "{}, fresh AS ({} NOTHING RETURNING t.key), {} \
                 SELECT a.place, a.locked, f.key IS NOT NULL AS granted, b.mark, {COLUMNS} \
                 FROM asked AS a CROSS JOIN back AS b LEFT JOIN fresh AS f ON f.key = a.key \
                 LEFT JOIN {table} AS t ON t.key = a.key",
                begin_within(place),
                insert("asked WHERE locked ORDER BY key", values, ""),
                set_back("fresh"),
            )
        };
        // Locked in order first, for an update locks in any.
        let locked_with = |asked: &str, rows: &str, more: &str| {
            format!(
                "locked AS MATERIALIZED (SELECT t.key, a.token, a.retention, a.lease{more} \
                 FROM {asked} AS a JOIN {table} AS t ON t.key = a.key WHERE {rows} \
                 ORDER BY t.key FOR UPDATE OF t)"
            )
        };
        let locked = |rows: &str| locked_with(&plain, rows, "");
        let update = |set: &str, returning: &str| {
            format!(
                "UPDATE {table} AS t SET {set} FROM locked AS l WHERE t.key = l.key \
                 RETURNING t.key{returning}"
            )
        };
        let seize_within = |rows: &str, set: &str| {
            format!(
                "{}, {}, seized AS ({}), {} \
                 SELECT s.key, s.attempts, s.takeover FROM seized AS s, back",
                begin_within(place),
                locked_with("asked", rows, ""),
                update(set, GRANT),
                set_back("seized")
            )
        };
        let repeated = "(t.completed_at IS NULL AND t.token IS NOT DISTINCT FROM l.token)";
        let claimable = format!("({FREE} OR (t.completed_at IS NULL AND t.token = a.token))");
        let claim_set = format!(
            "token = l.token, lease_until = {NOW} + l.lease, \
             attempts = CASE WHEN {repeated} THEN t.attempts \
               WHEN t.expires_at <= {NOW} THEN 1 ELSE t.attempts + 1 END, \
             takeover = CASE WHEN {repeated} THEN t.takeover \
               WHEN t.expires_at <= {NOW} THEN false ELSE t.token IS NOT NULL END, \
             first_seen_at = CASE WHEN NOT {repeated} AND t.expires_at <= {NOW} \
               THEN {NOW} ELSE t.first_seen_at END, \
             completed_at = NULL, expires_at = {NOW} + l.retention, {LOST}"
        );
        let record_set = |keeps: &str| {
            format!(
                "token = l.token, lease_until = NULL, attempts = 1, takeover = false, \
                 first_seen_at = {NOW}, completed_at = {NOW}, expires_at = {NOW} + l.retention, \
                 {keeps}"
            )
        };
        // The holder's token stays, which is how the answer tells whether it was ours. An insertion
        // counts no attempt, which is how the answer tells that. What was complete before is not
        // written again: it returns no row.
        let complete_set = format!(
            "completed_at = excluded.completed_at, lease_until = NULL, \
             token = CASE WHEN t.completed_at IS NULL THEN t.token ELSE excluded.token END, \
             attempts = CASE WHEN t.completed_at IS NULL THEN t.attempts ELSE 0 END, \
             takeover = t.completed_at IS NULL AND t.takeover, \
             first_seen_at = CASE WHEN t.completed_at IS NULL THEN t.first_seen_at \
               ELSE excluded.first_seen_at END, \
             expires_at = CASE WHEN t.expires_at <= {NOW} THEN excluded.expires_at \
               ELSE t.expires_at END, {}",
            keep("excluded")
        );
        let grace = format!("{} * interval '1 millisecond'", grace_ms());
        let completable = format!("t.completed_at IS NULL OR t.expires_at <= {NOW}");
        Self {
            // The catalogue first: CREATE TABLE IF NOT EXISTS needs the right to create even where
            // there is nothing to create.
            tables: format!(
                "SELECT to_regclass('{}') IS NOT NULL AND to_regclass('{}') IS NOT NULL",
                place.name(""),
                place.name("_schema")
            )
            .into(),
            version: format!("SELECT coalesce(max(version), 0) FROM {}", place.name("_schema"))
                .into(),
            look: look("").into(),
            read: look(", pg_is_in_recovery() AS standby").into(),
            // Shared, so that those who look do not see each other.
            probe: format!(
                "SELECT pg_try_advisory_xact_lock_shared({}) AS free \
                 FROM unnest($1::int8[]) WITH ORDINALITY AS l (lock, place) ORDER BY l.place",
                place.lock("l.lock")
            )
            .into(),
            unwritten: "SELECT pg_current_xact_id_if_assigned() IS NULL".into(),
            record: Take {
                insert: write(Durability::Synchronous, true, &complete, NEW),
                seize: format!(
                    "{sync}, {} {}",
                    locked_with(&keeping, FREE, &format!(", {}", kept("a"))),
                    update(&record_set(&keep("l")), GRANT)
                )
                .into(),
            },
            unrecord: format!(
                "{sync}, {} DELETE FROM {table} AS t USING locked AS l WHERE t.key = l.key \
                 RETURNING t.key",
                locked("t.token = a.token AND t.completed_at IS NOT NULL")
            )
            .into(),
            claim: Take {
                insert: write(claims, false, &in_flight, NEW),
                seize: format!(
                    "{}, {} {}",
                    begin(claims),
                    locked(&claimable),
                    update(&claim_set, GRANT)
                )
                .into(),
            },
            renew: write(
                Durability::Synchronous,
                false,
                &in_flight,
                "UPDATE SET lease_until = excluded.lease_until \
                 WHERE t.completed_at IS NULL AND t.token = excluded.token RETURNING t.key",
            ),
            complete: write(
                Durability::Synchronous,
                true,
                &format!("NULL, 0, false, {NOW}, {NOW}"),
                &format!("UPDATE SET {complete_set} WHERE {completable} {COMPLETED}"),
            ),
            // One insertion in the order of keys, as each of the two would be: no two of them wait
            // for each other. A claim leaves a row that is there as it is, though it locks it.
            mixed: format!(
                "{sync} {} UPDATE SET {complete_set} \
                 WHERE excluded.completed_at IS NOT NULL AND ({completable}) {COMPLETED}",
                insert(
                    &format!(
                        "{} AS asked ORDER BY key",
                        asked_with(
                            &format!(", {}, a.completes", kept("a")),
                            &format!("{KEPT_PARAMS}, $12::bool[]"),
                            &format!(", {KEPT}, completes"),
                        )
                    ),
                    &format!(
                        "CASE WHEN NOT completes THEN {NOW} + lease END, \
                         CASE WHEN completes THEN 0 ELSE 1 END, false, {NOW}, \
                         CASE WHEN completes THEN {NOW} END"
                    ),
                    &format!(", {KEPT}"),
                )
            )
            .into(),
            release: format!(
                "{sync}, {} {}",
                locked("t.token = a.token AND t.completed_at IS NULL"),
                update("token = NULL, lease_until = NULL", "")
            )
            .into(),
            // The clock in a subquery is read once, so that the index is used; what somebody else
            // is purging is passed over.
            clock: format!("SELECT {}", unix_ms(NOW)).into(),
            purge: format!(
                "WITH expired AS MATERIALIZED (SELECT key FROM {table} \
                 WHERE expires_at >= to_timestamp($2::float8 / 1000) \
                 AND expires_at <= (SELECT {NOW} - {grace}) AND (completed_at IS NOT NULL \
                 OR token IS NULL OR lease_until <= {NOW} - {grace}) \
                 ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED), \
                 purged AS (DELETE FROM {table} AS t USING expired AS e WHERE t.key = e.key \
                 RETURNING t.expires_at) SELECT count(*), {} FROM purged",
                unix_ms("max(expires_at)")
            )
            .into(),
            forget: format!(
                "{sync}, {} DELETE FROM {table} AS t USING locked AS l WHERE t.key = l.key \
                 RETURNING t.key",
                locked(&format!(
                    "(t.completed_at IS NOT NULL OR t.token IS NULL OR t.lease_until <= {NOW})"
                ))
            )
            .into(),
            count: format!("SELECT count(*) FROM {table}").into(),
            open: Within {
                insert: insert_within(&in_flight).into(),
                seize: seize_within(&claimable, &claim_set).into(),
            },
            record_in: Within {
                insert: insert_within(&complete).into(),
                seize: seize_within(FREE, &record_set(LOST)).into(),
            },
            // As a rollback would leave them: what this claim has made goes, and what it has taken
            // is one attempt younger; who takes over from a lapsed lease next is told so again.
            give_back: format!(
                "WITH made AS (DELETE FROM {table} WHERE key = ANY ($1) AND token = $2 \
                 AND completed_at IS NULL AND attempts = 1) \
                 UPDATE {table} SET attempts = attempts - 1, \
                 token = CASE WHEN takeover THEN token END, \
                 lease_until = CASE WHEN takeover THEN {NOW} END \
                 WHERE key = ANY ($1) AND token = $2 AND completed_at IS NULL AND attempts > 1"
            )
            .into(),
            // Of the transaction that claimed. A row that is written under a savepoint bears that
            // one's number: there may be one that the handler has leaked.
            commit: format!(
                "WITH terms AS MATERIALIZED (SELECT {} AS durable, $2::uuid AS token) \
                 UPDATE {table} AS t SET completed_at = {NOW}, lease_until = NULL, \
                 expires_at = CASE WHEN t.expires_at <= {NOW} \
                 THEN {NOW} + $4::int8 * interval '1 millisecond' ELSE t.expires_at END FROM terms \
                 WHERE t.key = ANY ($1) AND t.token = terms.token AND t.completed_at IS NULL \
                 AND pg_current_xact_id_if_assigned()::text = $3 \
                 RETURNING t.xmin = pg_current_xact_id()::xid AS top",
                Durability::Synchronous.setting()
            )
            .into(),
            // A response that is not named is not fetched from where long values are kept.
            recall: [
                "t.response_status::int8 AS response_status, t.response_headers, t.response_body",
                "NULL::int8 AS response_status, NULL::text AS response_headers, \
                 NULL::bytea AS response_body",
            ]
            .map(|response| {
                format!(
                    "SELECT t.key, t.payload_sha256, {response}, \
                     pg_is_in_recovery() AS standby \
                     FROM {table} AS t WHERE t.key = ANY ($1::uuid[]) \
                     AND t.completed_at IS NOT NULL AND t.expires_at > {NOW}"
                )
                .into()
            }),
            keep: format!(
                "UPDATE {table} AS t SET {} \
                 FROM unnest($1::uuid[], $3::bytea[], $4::int2[], $5::text[], $6::bytea[]) \
                 AS a (key, {KEPT}) \
                 WHERE t.key = a.key AND t.token = $2",
                keep("a")
            )
            .into(),
        }
    }
}
