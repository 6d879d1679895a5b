//! The statements that complete events in the transaction of a handler.

use std::sync::Arc;

use serde_json::json;
use sqlx::postgres::{PgConnection, PgPool, Postgres};

use super::super::completion::{Completion, Lean, Own};
use super::super::sql::completion::{completion_json, idle_ms};
use super::super::sql::statement::query;
use super::super::sqlx_transaction::{
    CompletionConnection, CompletionDatabase, Connected, Sealed, acquire,
};
use super::super::terms::CallTerms;
use super::params::{Uuid, key_hash, retention_ms};
use super::statements::Statements;
use crate::error::StoreError;
use crate::key::DedupKey;

/// Makes the statement that completes these keys.
pub(super) fn completion(
    statements: &Statements,
    keys: &[DedupKey],
    terms: &CallTerms,
    mark: Option<&str>,
) -> Completion {
    let retention = retention_ms(terms);
    let json = |first| {
        completion_json(
            keys,
            terms,
            retention,
            mark,
            first,
            |key, sha256| json!({ "key": format!("{:032x}", key_hash(key)), "sha256": sha256 }),
        )
    };
    let sql = Arc::clone(&statements.completion);
    let Some(mark) = mark else {
        return Completion::new(sql, json(false)).with_first(json(true));
    };
    let lean = match keys {
        [only] if terms.stores_nothing_with(only) => Some(Lean {
            sql: Arc::clone(&statements.completion_lean),
            key: key_hash(only),
            token: Uuid::from(terms.token()).0,
            mark: mark.to_owned(),
            retention_ms: retention,
            idle_ms: idle_ms(terms),
        }),
        _ => None,
    };
    let check = Arc::clone(&statements.completion_check);
    // The mark shows the transaction, whatever was written before.
    Completion::new(sql, json(true)).with_own(Own { check, lean, write_lock_timeout: None })
}

impl Sealed for Postgres {}

impl CompletionDatabase for Postgres {
    type Turn = ();

    async fn connect<E: From<StoreError> + From<sqlx::Error> + Send>(
        completion: &Completion,
        pool: &PgPool,
    ) -> Result<Connected<Self>, E> {
        match &completion.own {
            Some(own) if own.write_lock_timeout.is_none() => Ok(Some((acquire(pool).await?, ()))),
            _ => Ok(None),
        }
    }

    /// One message. A SELECT would forbid the handler's `SET TRANSACTION`.
    fn begin_statement(mark: &str) -> String {
        format!("BEGIN; SET LOCAL tower_dedup.tx = '{mark}'")
    }
}

impl Sealed for PgConnection {}

impl CompletionConnection for PgConnection {
    async fn completes(
        &mut self,
        completion: &Completion,
        is_last: bool,
    ) -> Result<bool, sqlx::Error> {
        let lean = completion.own.as_ref().and_then(|own| own.lean.as_ref());
        let Some(lean) = lean.filter(|_| is_last) else {
            return self.complete_in(completion).await.map(|()| true);
        };
        let update = query(&lean.sql)
            .bind(Uuid(lean.key))
            .bind(Uuid(lean.token))
            .bind(lean.mark.clone())
            .bind(lean.retention_ms)
            .bind(lean.idle_ms.to_string());
        if update.fetch_optional(&mut *self).await?.is_some() {
            return Ok(true);
        }
        // It is an error with the reason.
        self.complete_in(completion).await.map(|()| true)
    }

    async fn is_completed(&mut self, completion: &Completion) -> Result<bool, sqlx::Error> {
        let Some(own) = &completion.own else { return Ok(false) };
        finds(self, &own.check, completion).await
    }

    async fn complete_in(&mut self, completion: &Completion) -> Result<(), sqlx::Error> {
        finds(self, &completion.sql, completion).await.map(drop)
    }
}

/// Executes a statement with the parameter of this completion. Returns `true` if it returns a row.
async fn finds(
    connection: &mut PgConnection,
    sql: &Arc<str>,
    completion: &Completion,
) -> Result<bool, sqlx::Error> {
    let found = query(sql).bind(completion.parameter().to_owned());
    Ok(found.fetch_optional(connection).await?.is_some())
}
