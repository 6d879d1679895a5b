//! The statements that complete events in the transaction of a handler.

use std::sync::Arc;

use serde_json::json;
use sqlx::sqlite::{Sqlite, SqliteConnection, SqlitePool};
use tokio::sync::OwnedMutexGuard;
use tokio::time::timeout;

use super::super::completion::{
    CompletedIn, Completion, CompletionConnection, CompletionDatabase, Own, Sealed,
};
use super::super::sql::completion::completion_json;
use super::super::sql::statement::query;
use super::super::terms::CallTerms;
use super::store::{SqliteStore, WriteGuard};
use super::write_lock::locks_of;
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

impl SqliteStore {
    pub(super) fn completion(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
        mark: Option<&str>,
    ) -> Completion {
        let event = |key: &DedupKey, sha256| json!([key.namespace(), key.id(), sha256]);
        let parameter = completion_json(keys, terms, terms.retention_ms(), mark, false, event);
        let write_lock_timeout = self.options.write_lock_timeout;
        let database = Some(CompletedIn::Sqlite { write_lock_timeout });
        let check = Some(Arc::clone(&self.statements.completion_check));
        Completion::new(Arc::clone(&self.statements.completion), parameter).with_own(Own {
            database,
            lean: None,
            check,
        })
    }
}

impl Sealed for Sqlite {}

impl CompletionDatabase for Sqlite {
    type Turn = (WriteGuard, OwnedMutexGuard<()>);

    fn is_of(database: &CompletedIn) -> bool {
        matches!(database, CompletedIn::Sqlite { .. })
    }

    /// Both locks come before the connection, so that handlers that wait leave the pool to the one that runs. A batch
    /// waits in the line of the file, behind one handler and not behind all.
    async fn turn(database: CompletedIn, pool: &SqlitePool) -> Result<Self::Turn, Error> {
        let write_lock_timeout = match database {
            CompletedIn::Sqlite { write_lock_timeout } => write_lock_timeout,
            // `is_of` is asked before.
            #[cfg(feature = "postgres")]
            CompletedIn::Postgres => {
                return Err(Error::new(ErrorKind::Config, "beginning a transaction on SQLite"));
            }
        };
        let locks = locks_of(&pool.connect_options());
        let both = async {
            let handler = Arc::clone(&locks.handlers).lock_owned().await;
            (Arc::clone(&locks.writer).lock_owned().await, handler)
        };
        let busy =
            |_| Error::new(ErrorKind::Timeout, "waiting for the write lock of the SQLite file");
        timeout(write_lock_timeout, both).await.map_err(busy)
    }

    /// The savepoint shows whether the transaction goes on: an ignored `INSERT OR ROLLBACK` ends it.
    fn begin_statement(_: &str) -> String {
        "BEGIN IMMEDIATE; SAVEPOINT tower_dedup".to_owned()
    }
}

impl Sealed for SqliteConnection {}

impl CompletionConnection for SqliteConnection {
    async fn still_within(&mut self) -> Result<(), sqlx::Error> {
        sqlx::raw_sql("RELEASE tower_dedup").execute(self).await.map(drop)
    }

    async fn run(&mut self, sql: &Arc<str>, parameter: &str) -> Result<u64, sqlx::Error> {
        Ok(query(sql).bind(parameter.to_owned()).execute(self).await?.rows_affected())
    }

    async fn finds(&mut self, sql: &Arc<str>, parameter: &str) -> Result<bool, sqlx::Error> {
        Ok(query(sql).bind(parameter.to_owned()).fetch_optional(self).await?.is_some())
    }
}
