//! The statements that complete events in the transaction of a handler.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use sqlx::sqlite::{Sqlite, SqliteConnection, SqlitePool};

use super::super::contract::{CallTerms, Completion};
use super::super::own_completion::{OwnCompletion, OwnDatabase};
use super::super::sql::statement::query;
use super::super::transaction::{CompletionDatabase, Connected, Sealed, acquire, is_left_open};
use super::statements::SqliteStatements;
use super::write_lock::{FileLocks, WriteGuard, locked, locks_of};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;

/// Makes the statement that completes these keys.
pub(super) fn completion(
    statements: &SqliteStatements,
    write_lock_timeout: Duration,
    keys: &[(&DedupKey, &CallTerms)],
) -> Completion {
    let database = OwnDatabase::Sqlite { write_lock_timeout };
    let own = OwnCompletion::new(keys, database, &statements.completion_check, parameter);
    Completion::of(&statements.completion, own)
}

fn parameter(own: &OwnCompletion) -> String {
    let event = |key: &DedupKey, sha256| json!([key.namespace(), key.id(), sha256]);
    own.json(None, event)
}

impl Sealed for Sqlite {}

impl CompletionDatabase for Sqlite {
    type Turn = (WriteGuard, WriteGuard);

    const TEST_TIMEOUT: Option<Duration> = None;

    /// The line of handlers comes before the connection: those that wait leave the pool to the one
    /// that runs. The line of the file comes after it, as for a batch: while a handler waits for
    /// its pool, others write. A batch waits there behind one handler and not behind all.
    async fn connect<E: From<StoreError> + From<sqlx::Error> + Send>(
        completion: &Completion,
        pool: &SqlitePool,
    ) -> Result<Option<Connected<Self>>, E> {
        let Some(OwnCompletion {
            database: OwnDatabase::Sqlite { write_lock_timeout: bound }, ..
        }) = completion.own.as_deref()
        else {
            return Ok(None);
        };
        let FileLocks { writer, handlers } = &*locks_of(&pool.connect_options());
        let handler = locked(handlers, *bound, StoreErrorKind::Timeout).await?;
        let connection = acquire(pool).await?;
        let writer = locked(writer, *bound, StoreErrorKind::Timeout).await?;
        // The first BEGIN fails in a transaction that was left open. BEGIN IMMEDIATE would give it
        // the write lock before it fails. The savepoint shows whether the transaction goes on: an
        // ignored `INSERT OR ROLLBACK` ends it.
        let begin = [PROBE, "; BEGIN IMMEDIATE; SAVEPOINT tower_dedup"].concat();
        Ok(Some((connection, (writer, handler), begin)))
    }

    async fn complete_marked(
        connection: &mut SqliteConnection,
        completion: &Completion,
        _: bool,
    ) -> Result<(), sqlx::Error> {
        // An error if the transaction has ended, or another one was begun after it.
        if sqlx::raw_sql("RELEASE tower_dedup").execute(&mut *connection).await.is_err() {
            return sqlx::raw_sql(ENDED).execute(connection).await.map(drop);
        }
        Self::finds(connection, &completion.sql, completion).await.map(drop)
    }

    async fn finds(
        connection: &mut SqliteConnection,
        sql: &Arc<str>,
        completion: &Completion,
    ) -> Result<bool, sqlx::Error> {
        let found = query(sql).bind(completion.parameter().to_owned());
        Ok(found.fetch_optional(connection).await?.is_some())
    }

    async fn complete_in(
        connection: &mut SqliteConnection,
        completion: &Completion,
    ) -> Result<(), sqlx::Error> {
        // It must fail. Outside of a transaction, or after an error that has ended it, as that of a
        // full disk may, the completion would commit alone.
        match sqlx::raw_sql(PROBE).execute(&mut *connection).await {
            Ok(_) => sqlx::raw_sql(NOT_WITHIN).execute(connection).await.map(drop),
            Err(error) if is_left_open(&error) => {
                Self::finds(connection, &completion.sql, completion).await.map(drop)
            }
            Err(error) => Err(error),
        }
    }

    async fn is_left_open(connection: &mut SqliteConnection) -> bool {
        sqlx::raw_sql(PROBE).execute(connection).await.is_err()
    }
}

/// Succeeds outside of a transaction, and leaves one as it is.
const PROBE: &str = "BEGIN; ROLLBACK";

/// Errors: SQLite raises errors of its own in triggers only.
const NOT_WITHIN: &str = "SELECT json_extract('[]', 'tower_dedup: no transaction is open on the connection of this completion')";
const ENDED: &str = "SELECT json_extract('[]', 'tower_dedup: the transaction has ended')";
