//! The statements that complete events in the transaction of a handler.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use sqlx::postgres::{PgConnection, PgPool, Postgres};

use super::super::contract::{CallTerms, Completion, Fetch};
use super::super::own_completion::{OwnCompletion, OwnDatabase};
use super::super::sql::statement::query;
use super::super::terms::KeyedTerms;
use super::super::transaction::{CompletionDatabase, Connected, Sealed, acquire};
use super::params::{BoundQuery, Uuid, key_hash};
use super::statements::{PostgresStatements, of_generation};
use crate::error::StoreError;
use crate::key::DedupKey;

/// Makes the statement that completes these keys. `idle` bounds an idle transaction, unless its
/// handler may run longer.
pub(super) fn completion(
    (statements, generation): (&PostgresStatements, Option<u32>),
    idle: Option<Duration>,
    keys: &[(&DedupKey, &CallTerms)],
) -> Completion {
    let lean = Arc::clone(&statements.completion_lean);
    let database = OwnDatabase::Postgres { lean, generation, idle };
    let own = OwnCompletion::new(keys, database, &statements.completion_check, parameter);
    Completion::of(&statements.completion, own)
}

fn parameter(own: &OwnCompletion) -> String {
    let hash = |key: &DedupKey| format!("{:032x}", key_hash(key));
    own.json(idle_ms(own), |key, sha256| json!({ "key": hash(key), "sha256": sha256 }))
}

/// Returns the bound on an idle transaction in milliseconds. The setting of Postgres has 31 bits,
/// and no honest handler is ended by it.
fn idle_ms(own: &OwnCompletion) -> Option<i32> {
    match own.database {
        OwnDatabase::Postgres { idle, .. } => {
            idle.map(|idle| i32::try_from(idle.as_millis()).unwrap_or(i32::MAX))
        }
        #[cfg(feature = "sqlite")]
        OwnDatabase::Sqlite { .. } => None,
    }
}

impl Sealed for Postgres {}

impl CompletionDatabase for Postgres {
    type Turn = ();

    const TEST_TIMEOUT: Option<Duration> = Some(Duration::from_secs(1));

    /// The transaction begins by one message. A SELECT would forbid the handler's
    /// `SET TRANSACTION`, and nothing here is conditional without one.
    ///
    /// `NOT DEFERRABLE` is the default, and an error in a transaction that has executed a
    /// statement. A plain BEGIN would join it, and commit what somebody else has written.
    async fn connect<E: From<StoreError> + From<sqlx::Error> + Send>(
        completion: &Completion,
        pool: &PgPool,
    ) -> Result<Option<Connected<Self>>, E> {
        let Some(own @ OwnCompletion { database: OwnDatabase::Postgres { .. }, .. }) =
            completion.own.as_deref()
        else {
            return Ok(None);
        };
        let mark = own.mark();
        let mut begin = format!("BEGIN NOT DEFERRABLE; SET LOCAL tower_dedup.tx = '{mark}'");
        if let Some(idle) = idle_ms(own) {
            begin += &format!("; SET LOCAL idle_in_transaction_session_timeout = {idle}");
        }
        Ok(Some((acquire(pool).await?, (), begin)))
    }

    async fn complete_marked(
        connection: &mut PgConnection,
        completion: &Completion,
        is_last: bool,
    ) -> Result<(), sqlx::Error> {
        if is_last
            && let Some(lean) = lean(completion)
            && lean.fetch_optional(&mut *connection).await?.is_some()
        {
            return Ok(());
        }
        // A refusal is an error with the reason.
        Self::complete_in(connection, completion).await
    }

    async fn finds(
        connection: &mut PgConnection,
        sql: &Arc<str>,
        completion: &Completion,
    ) -> Result<bool, sqlx::Error> {
        let generation = match completion.own.as_deref() {
            Some(OwnCompletion { database: OwnDatabase::Postgres { generation, .. }, .. }) => {
                *generation
            }
            _ => None,
        };
        let found = query(&of_generation(sql, generation)).bind(completion.parameter().to_owned());
        Ok(found.fetch_optional(connection).await?.is_some())
    }

    async fn complete_in(
        connection: &mut PgConnection,
        completion: &Completion,
    ) -> Result<(), sqlx::Error> {
        Self::finds(connection, &completion.sql, completion).await.map(drop)
    }

    async fn is_left_open(connection: &mut PgConnection) -> bool {
        sqlx::raw_sql("BEGIN NOT DEFERRABLE; ROLLBACK").execute(connection).await.is_err()
    }
}

/// Returns the faster statement, for one event with which nothing is stored.
fn lean(completion: &Completion) -> Option<BoundQuery> {
    let own = completion.own.as_deref()?;
    let (OwnDatabase::Postgres { lean, generation, .. }, [KeyedTerms { key, terms }]) =
        (&own.database, &own.events[..])
    else {
        return None;
    };
    let update = || {
        query(&of_generation(lean, *generation))
            .bind(Uuid(key_hash(key)))
            .bind(Uuid::from(terms.token()))
            .bind(own.mark())
            .bind(terms.retention_ms())
    };
    // Nor does the layer add a response.
    let stores_nothing = !terms.stores_data() && terms.fetch() != Fetch::DigestAndResponse;
    stores_nothing.then(update)
}
