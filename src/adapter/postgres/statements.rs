//! The statements of the Postgres adapter, each with its rule.
//!
//! What a row means stands in [`sql::rows`](super::super::sql).
//!
//! 1. `key` is the first 16 bytes of the SHA-256 over namespace, a line feed and id (a namespace
//!    holds no control character). The names stand beside it, to be read; nothing indexes them.
//! 2. Every statement waits for a row for 100 ms at most, and in a batch for as long as commits take:
//!    rows are locked for the length of a statement, except by transactions, which may stay open for
//!    as long as a handler runs. The table's own lock, which DDL takes, has no such bound.
//! 3. Every statement is as durable as `synchronous_commit = on`, whatever a role or a database was
//!    set to, except the claim, by choice.
//! 4. The clock is `clock_timestamp()`: it moves on while a statement waits. An insertion reads it
//!    before it waits for a row of its key that is then rolled back, which is no longer than rule 2
//!    says.
//! 5. Rows are inserted and locked in the order of `key`, so that two sets never wait for each
//!    other. Where claims and completions go together, new claims come first: only two that complete
//!    what the other one is about to insert could meet, and rule 2 ends that.
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
//! null where there is nothing to keep. Where claims and completions go together, the former have
//! `$1` to `$6`, and the latter `$8` to `$17`.

use std::sync::Arc;

use super::super::sql::grace_ms;
use super::super::stored::Fetch;
use super::schema::{Durability, Place};

/// What every statement begins with: `pg_stat_activity` and the server's log show whose it is.
pub(super) const TAG: &str = "/* tower-dedup */ ";

/// How long a statement waits for a row that an open transaction holds.
pub(super) const LOCK_TIMEOUT: &str = "100ms";

/// Every statement, with the table's name put in.
#[derive(Debug, Clone)]
pub(super) struct Statements {
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
    /// The table's name.
    pub(super) table: Arc<str>,
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
        "WITH row_terms AS MATERIALIZED (\
         SELECT set_config('lock_timeout', $7::text, true) AS waits, {} AS durable)",
        durability.setting()
    )
}

/// The keys that a statement is asked for, and what is to be kept with each.
fn asked(keeps: bool) -> String {
    asked_from(1, keeps)
}

/// The same, in the parameters from this one on; `$7` is not among them.
fn asked_from(first: usize, keeps: bool) -> String {
    let numbers = (first..).filter(|number| *number != 7);
    let types = ["uuid", "text", "text", "uuid", "int8", "int8", "bytea", "int2", "text", "bytea"];
    let types = if keeps { &types[..] } else { &types[..6] };
    let params = types.iter().zip(numbers).map(|(of, number)| format!("${number}::{of}[]"));
    let params = params.collect::<Vec<_>>().join(", ");
    let (columns, names) = match keeps {
        true => (format!(", {}", kept("a")), format!(", {KEPT}")),
        false => (String::new(), String::new()),
    };
    format!(
        "(SELECT a.key, a.namespace, a.id, a.token, \
         a.retention * interval '1 millisecond' AS retention, \
         a.lease * interval '1 millisecond' AS lease{columns} \
         FROM row_terms, unnest({params}) AS a (key, namespace, id, token, retention, lease{names}))"
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
/// lease of all of them, `$7` the keys' parts of the advisory locks, `$8` a lock by which the
/// session is found from another connection.
fn begin_within(place: &Place) -> String {
    let lock = place.lock("a.lock");
    format!(
        "WITH row_terms AS MATERIALIZED (\
         SELECT current_setting('lock_timeout') AS was, current_setting('role') AS role, \
         set_config('lock_timeout', '{LOCK_TIMEOUT}', true) AS waits, {} AS durable, \
         pg_try_advisory_xact_lock($8::int8) AS named, $4::uuid AS token, $5::int8 * interval '1 millisecond' AS retention, \
         $6::int8 * interval '1 millisecond' AS lease), \
         asked AS MATERIALIZED (\
         SELECT a.key, a.namespace, a.id, a.place, row_terms.token, row_terms.retention, row_terms.lease, \
         pg_try_advisory_xact_lock({lock}) AS locked \
         FROM row_terms, unnest($1::uuid[], $2::text[], $3::text[], $7::int8[]) WITH ORDINALITY \
         AS a (key, namespace, id, lock, place))",
        Durability::Synchronous.setting()
    )
}

/// Sets back what [`begin_within`] has set, once `rows` are written.
fn set_back(rows: &str) -> String {
    format!(
        "written AS MATERIALIZED (SELECT count(*) AS rows FROM {rows}), \
         back AS MATERIALIZED (SELECT set_config('lock_timeout', row_terms.was, true) AS waits, \
         pg_current_xact_id()::text AS xid, row_terms.role FROM row_terms, written WHERE written.rows >= 0)"
    )
}

pub(super) const NOW: &str = "clock_timestamp()";

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

/// A statement as it is sent.
pub(super) fn tagged(sql: impl AsRef<str>) -> Arc<str> {
    [TAG, sql.as_ref()].concat().into()
}

impl Statements {
    pub(super) fn recall(&self, wanted: Fetch) -> &Arc<str> {
        &self.recall[usize::from(wanted == Fetch::Digest)]
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
                one: tagged(format!("{} {conflict}", insert(&one, values, &more))),
                many: tagged(format!(
                    "{} {} {conflict}",
                    begin(durability),
                    insert(&many, values, &more)
                )),
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
                 SELECT a.place, a.locked, f.key IS NOT NULL AS granted, b.xid, b.role, {COLUMNS} \
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
                "token = l.token, lease_until = NULL, \
                 attempts = CASE WHEN t.expires_at <= {NOW} THEN 1 ELSE t.attempts + 1 END, \
                 takeover = t.expires_at > {NOW} AND t.token IS NOT NULL, \
                 first_seen_at = CASE WHEN t.expires_at <= {NOW} THEN {NOW} \
                   ELSE t.first_seen_at END, \
                 completed_at = {NOW}, expires_at = {NOW} + l.retention, {keeps}"
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
        let completed = &format!("NULL, 0, false, {NOW}, {NOW}");
        let complete_conflict = format!(
            "UPDATE SET {complete_set} WHERE t.completed_at IS NULL OR t.expires_at <= {NOW} \
             {COMPLETED}"
        );
        let grace = format!("{} * interval '1 millisecond'", grace_ms());
        Self {
            version: tagged(format!(
                "SELECT coalesce(max(version), 0) FROM {}",
                place.name("_schema")
            )),
            look: tagged(look("")),
            read: tagged(look(", pg_is_in_recovery() AS standby")),
            // Looked up, and not tried: a lock that is had for a moment would hide a free key, and
            // takes a place in the lock table.
            probe: tagged(format!(
                "SELECT h.lock IS NULL AS free \
                 FROM unnest($1::int8[]) WITH ORDINALITY AS l (lock, place) LEFT JOIN \
                 (SELECT DISTINCT k.classid::int8 << 32 | k.objid::int8 AS lock FROM pg_locks AS k \
                 WHERE k.locktype = 'advisory' AND k.objsubid = 1 AND k.granted AND k.database = \
                 (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())) AS h \
                 ON h.lock = {} ORDER BY l.place",
                place.lock("l.lock")
            )),
            unwritten: tagged("SELECT pg_current_xact_id_if_assigned() IS NULL"),
            record: Take {
                insert: write(Durability::Synchronous, true, &complete, NEW),
                seize: tagged(format!(
                    "{sync}, {} {}",
                    locked_with(&keeping, FREE, &format!(", {}", kept("a"))),
                    update(&record_set(&keep("l")), GRANT)
                )),
            },
            unrecord: tagged(format!(
                "{sync}, {} DELETE FROM {table} AS t USING locked AS l WHERE t.key = l.key \
                 RETURNING t.key",
                locked("t.token = a.token AND t.completed_at IS NOT NULL")
            )),
            claim: Take {
                insert: write(claims, false, &in_flight, NEW),
                seize: tagged(format!(
                    "{}, {} {}",
                    begin(claims),
                    locked(&claimable),
                    update(&claim_set, GRANT)
                )),
            },
            renew: write(
                Durability::Synchronous,
                false,
                &in_flight,
                "UPDATE SET lease_until = excluded.lease_until \
                 WHERE t.completed_at IS NULL AND t.token = excluded.token RETURNING t.key",
            ),
            complete: write(Durability::Synchronous, true, completed, &complete_conflict),
            // What each of the two would be, with one COMMIT. To leave a row that is there as it is, an
            // insertion that may update rows would lock it.
            mixed: tagged(format!(
                "{sync}, claimed AS ({} {NEW}, t.attempts, t.token), \
                 completed AS ({} {complete_conflict}) \
                 SELECT * FROM claimed UNION ALL SELECT * FROM completed",
                insert(&format!("{plain} AS asked ORDER BY key"), &in_flight, ""),
                insert(
                    &format!("{} AS asked ORDER BY key", asked_from(8, true)),
                    completed,
                    &format!(", {KEPT}")
                ),
            )),
            release: tagged(format!(
                "{sync}, {} {}",
                locked("t.token = a.token AND t.completed_at IS NULL"),
                update("token = NULL, lease_until = NULL", "")
            )),
            // The clock in a subquery is read once, so that the index is used; what somebody else
            // is purging is passed over.
            clock: tagged(format!("SELECT {}", unix_ms(NOW))),
            purge: tagged(format!(
                "WITH expired AS MATERIALIZED (SELECT key FROM {table} \
                 WHERE expires_at >= to_timestamp($2::float8 / 1000) \
                 AND expires_at <= (SELECT {NOW} - {grace}) AND (completed_at IS NOT NULL \
                 OR token IS NULL OR lease_until <= {NOW} - {grace}) \
                 ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED), \
                 purged AS (DELETE FROM {table} AS t USING expired AS e WHERE t.key = e.key \
                 RETURNING t.expires_at) SELECT count(*), {} FROM purged",
                unix_ms("max(expires_at)")
            )),
            forget: tagged(format!(
                "{sync}, {} DELETE FROM {table} AS t USING locked AS l WHERE t.key = l.key \
                 RETURNING t.key",
                locked(&format!(
                    "(t.completed_at IS NOT NULL OR t.token IS NULL OR t.lease_until <= {NOW})"
                ))
            )),
            count: tagged(format!("SELECT count(*) FROM {table}")),
            open: Within {
                insert: tagged(insert_within(&in_flight)),
                seize: tagged(seize_within(&claimable, &claim_set)),
            },
            record_in: Within {
                insert: tagged(insert_within(&complete)),
                seize: tagged(seize_within(FREE, &record_set(LOST))),
            },
            table: table.clone().into(),
            // A response that is not named is not fetched from where long values are kept.
            recall: [
                "t.response_status::int8 AS response_status, t.response_headers, t.response_body",
                "NULL::int8 AS response_status, NULL::text AS response_headers, \
                 NULL::bytea AS response_body",
            ]
            .map(|response| {
                tagged(format!(
                    "SELECT t.key, t.payload_sha256, {response}, \
                     pg_is_in_recovery() AS standby \
                     FROM {table} AS t WHERE t.key = ANY ($1::uuid[]) \
                     AND t.completed_at IS NOT NULL AND t.expires_at > {NOW}"
                ))
            }),
            keep: tagged(format!(
                "UPDATE {table} AS t SET {} \
                 FROM unnest($1::uuid[], $3::bytea[], $4::int2[], $5::text[], $6::bytea[]) \
                 AS a (key, {KEPT}) \
                 WHERE t.key = a.key AND t.token = $2",
                keep("a")
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Statements {
        fn texts(&self) -> Vec<&str> {
            let Self {
                version,
                unwritten,
                look,
                read,
                probe,
                record,
                unrecord,
                claim,
                renew,
                complete,
                mixed,
                release,
                clock,
                purge,
                forget,
                count,
                open,
                record_in,
                table: _,
                recall: [with_response, without_response],
                keep,
            } = self;
            let mut texts = vec![
                version,
                unwritten,
                look,
                read,
                probe,
                unrecord,
                mixed,
                release,
                clock,
                purge,
                forget,
                count,
                with_response,
                without_response,
                keep,
            ];
            for Take { insert, seize } in [record, claim] {
                texts.extend([&insert.one, &insert.many, seize]);
            }
            for Write { one, many, .. } in [renew, complete] {
                texts.extend([one, many]);
            }
            for Within { insert, seize } in [open, record_in] {
                texts.extend([insert, seize]);
            }
            texts.into_iter().map(|text| &**text).collect()
        }
    }

    #[test]
    fn every_statement_begins_with_the_tag() {
        let statements = Statements::new(&Place::default(), Durability::Synchronous);
        for text in statements.texts() {
            assert!(text.starts_with(TAG), "{text}");
            assert!(!text[TAG.len()..].contains(TAG), "{text}");
        }
    }

    #[test]
    fn reading_statements_take_no_advisory_lock() {
        let statements = Statements::new(&Place::default(), Durability::Synchronous);
        let Statements { version, look, read, probe, count, recall: [one, other], .. } =
            &statements;
        for text in [version, look, read, probe, count, one, other] {
            assert!(!text.contains("pg_try_advisory") && !text.contains("pg_advisory"), "{text}");
        }
    }

    /// Nothing outlives its transaction: a session may be somebody else's next.
    #[test]
    fn settings_and_locks_are_local_to_their_transaction() {
        for claims in [Durability::Synchronous, Durability::Asynchronous] {
            let statements = Statements::new(&Place::default(), claims);
            for text in statements.texts() {
                for set in text.split("set_config(").skip(1) {
                    let (set, _) = set.split_once(')').unwrap();
                    assert!(set.ends_with(", true"), "{set}");
                }
                for lock in text.split("advisory_").skip(1) {
                    assert!(lock.starts_with("xact_lock("), "{lock}");
                }
                assert!(!text.contains("SET LOCAL") && !text.contains("SESSION"), "{text}");
            }
        }
    }
}
