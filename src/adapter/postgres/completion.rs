//! The statements that complete events in the transaction of a handler.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use sqlx::postgres::{PgConnection, PgPool, Postgres};

use super::super::completion::{Completion, Lean, Own};
use super::super::sql::completion::completion_json;
use super::super::sql::statement::query;
use super::super::sqlx_transaction::{
    CompletionConnection, CompletionDatabase, Connected, Sealed, acquire,
};
use super::super::terms::CallTerms;
use super::params::{Uuid, key_hash};
use super::statements::{PostgresStatements, of_generation};
use crate::error::StoreError;
use crate::key::DedupKey;

/// Makes the statement that completes these keys. `idle` bounds an idle transaction, unless its handler may run longer.
pub(super) fn completion(
    (statements, generation): (&PostgresStatements, Option<u32>),
    idle: Option<Duration>,
    keys: &[DedupKey],
    terms: &CallTerms,
    mark: Option<&str>,
) -> Completion {
    let retention = terms.retention_ms();
    // The setting of Postgres has 31 bits.
    let idle_ms = idle.map(|idle| i32::try_from(idle.as_millis()).unwrap_or(i32::MAX));
    let idle_ms = idle_ms.map(|idle_ms| idle_ms.max(terms.handler_bound_ms));
    let json = |first| {
        // A transaction that this crate begins has the bound from its beginning.
        let of_others = if mark.is_none() { idle_ms } else { None };
        completion_json(
            keys,
            terms,
            (retention, of_others),
            mark,
            first,
            |key, sha256| json!({ "key": format!("{:032x}", key_hash(key)), "sha256": sha256 }),
        )
    };
    let sql = Arc::clone(&statements.completion);
    let Some(mark) = mark else {
        let completion = Completion::new(sql, json(false)).with_first(json(true));
        return completion.with_generation(generation);
    };
    let lean = match keys {
        [only] if terms.stores_nothing_with(only) => Some(Lean {
            sql: Arc::clone(&statements.completion_lean),
            key: key_hash(only),
            token: Uuid::from(terms.token()).0,
            mark: mark.to_owned(),
            retention_ms: retention,
        }),
        _ => None,
    };
    let check = Arc::clone(&statements.completion_check);
    // The mark shows the transaction, whatever was written before.
    let own = Own { check, lean, write_lock_timeout: None, idle_ms };
    Completion::new(sql, json(true)).with_own(own).with_generation(generation)
}

impl Sealed for Postgres {}

impl CompletionDatabase for Postgres {
    type Turn = ();

    const TEST_TIMEOUT: Option<Duration> = Some(Duration::from_secs(1));

    async fn connect<E: From<StoreError> + From<sqlx::Error> + Send>(
        completion: &Completion,
        pool: &PgPool,
    ) -> Result<Connected<Self>, E> {
        match &completion.own {
            Some(own) if own.write_lock_timeout.is_none() => Ok(Some((acquire(pool).await?, ()))),
            _ => Ok(None),
        }
    }

    /// One message. A SELECT would forbid the handler's `SET TRANSACTION`, and nothing here is conditional without one.
    ///
    /// `NOT DEFERRABLE` is the default, and an error in a transaction that has executed a statement. A plain BEGIN would
    /// join it, and commit what somebody else has written.
    fn begin_statement(completion: &Completion, mark: &str) -> String {
        let begin = format!("BEGIN NOT DEFERRABLE; SET LOCAL tower_dedup.tx = '{mark}'");
        match completion.own.as_ref().and_then(|own| own.idle_ms) {
            Some(idle) => {
                format!("{begin}; SET LOCAL idle_in_transaction_session_timeout = {idle}")
            }
            None => begin,
        }
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
        let update = query(&of_generation(&lean.sql, completion.generation))
            .bind(Uuid(lean.key))
            .bind(Uuid(lean.token))
            .bind(lean.mark.clone())
            .bind(lean.retention_ms);
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

    async fn is_left_open(&mut self) -> bool {
        sqlx::raw_sql("BEGIN NOT DEFERRABLE; ROLLBACK").execute(self).await.is_err()
    }
}

/// Executes a statement with the parameter of this completion. Returns `true` if it returns a row.
async fn finds(
    connection: &mut PgConnection,
    sql: &Arc<str>,
    completion: &Completion,
) -> Result<bool, sqlx::Error> {
    let found = query(&of_generation(sql, completion.generation));
    let found = found.bind(completion.parameter().to_owned());
    Ok(found.fetch_optional(connection).await?.is_some())
}
