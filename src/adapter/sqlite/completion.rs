//! The statements that complete events in the transaction of a handler.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use sqlx::sqlite::{Sqlite, SqliteConnection, SqlitePool};

use super::super::completion::{Completion, Own};
use super::super::contract::CallTerms;
use super::super::sql::completion::completion_json;
use super::super::sql::statement::query;
use super::super::sqlx_transaction::{CompletionConnection, CompletionDatabase, Sealed};
use super::statements::Statements;
use super::write_lock::{FileLocks, WriteGuard, WriteLock, locked, locks_of};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;

/// Makes the statement that completes these keys.
pub(super) fn completion(
    statements: &Statements,
    write_lock_timeout: Duration,
    keys: &[DedupKey],
    terms: &CallTerms,
    mark: Option<&str>,
) -> Completion {
    let event = |key: &DedupKey, sha256| json!([key.namespace(), key.id(), sha256]);
    let parameter = completion_json(keys, terms, terms.retention_ms(), mark, false, event);
    Completion::new(Arc::clone(&statements.completion), parameter).with_own(Own {
        check: Arc::clone(&statements.completion_check),
        #[cfg(feature = "postgres")]
        lean: None,
        write_lock_timeout: Some(write_lock_timeout),
    })
}

/// The head of the line of handlers that write a file.
#[derive(Debug)]
pub struct Line {
    handler: WriteGuard,
    writer: Arc<WriteLock>,
    write_lock_timeout: Duration,
}

impl Sealed for Sqlite {}

impl CompletionDatabase for Sqlite {
    type Line = Line;
    type Turn = (WriteGuard, WriteGuard);

    /// The line comes before the connection: handlers that wait leave the pool to the one that runs.
    async fn line(completion: &Completion, pool: &SqlitePool) -> Result<Option<Line>, StoreError> {
        let own = completion.own.as_ref();
        let Some(write_lock_timeout) = own.and_then(|own| own.write_lock_timeout) else {
            return Ok(None);
        };
        let FileLocks { writer, handlers } = &*locks_of(&pool.connect_options());
        let handler = locked(handlers, write_lock_timeout, StoreErrorKind::Timeout).await?;
        Ok(Some(Line { handler, writer: Arc::clone(writer), write_lock_timeout }))
    }

    /// A batch waits in the line of the file, behind one handler and not behind all.
    async fn turn(line: Line) -> Result<Self::Turn, StoreError> {
        let bound = line.write_lock_timeout;
        Ok((locked(&line.writer, bound, StoreErrorKind::Timeout).await?, line.handler))
    }

    /// The savepoint shows whether the transaction goes on: an ignored `INSERT OR ROLLBACK` ends it.
    fn begin_statement(_: &str) -> String {
        "BEGIN IMMEDIATE; SAVEPOINT tower_dedup".to_owned()
    }
}

impl Sealed for SqliteConnection {}

impl CompletionConnection for SqliteConnection {
    async fn completes(&mut self, completion: &Completion, _: bool) -> Result<bool, sqlx::Error> {
        // An error if the transaction has ended.
        if sqlx::raw_sql("RELEASE tower_dedup").execute(&mut *self).await.is_err() {
            return Ok(false);
        }
        self.finds(completion.shared_sql(), completion.parameter()).await.map(|_| true)
    }

    async fn finds(&mut self, sql: &Arc<str>, parameter: &str) -> Result<bool, sqlx::Error> {
        Ok(query(sql).bind(parameter.to_owned()).fetch_optional(self).await?.is_some())
    }
}
