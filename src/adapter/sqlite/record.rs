//! Keys that a program records in a transaction of its own, without a layer.

use std::time::Duration;

use sqlx::sqlite::SqliteConnection;

use super::super::replies::ClaimReply;
use super::super::sql::batch::claimed;
use super::super::sql::call::{Kind, rows_of};
use super::super::terms::{CallTerms, Token};
use super::adapter::SqliteAdapter;
use super::errors::store_error;
use super::session::Session;
use super::store::SqliteStore;
use crate::error::Error;
use crate::key::DedupKey;

impl SqliteAdapter {
    /// Claims a key in a transaction of yours: the key is complete when, and only if, the transaction
    /// commits.
    ///
    #[doc = include_str!("../../docs/stores/sqlite_record_in.md")]
    pub async fn record_in(
        &self,
        connection: &mut SqliteConnection,
        key: &DedupKey,
        retention: Duration,
    ) -> Result<ClaimReply, Error> {
        let store = &self.0;
        // Looked for on this connection: another one would wait for its transaction.
        store.ready_within(connection).await?;
        let terms = CallTerms::on_claim(Token::random(), retention);
        let mut claimed = record(store, connection, key, &terms).await;
        if claimed.is_err() && store.lacks_table(connection).await {
            store.ready_within(connection).await?;
            claimed = record(store, connection, key, &terms).await;
        }
        claimed
    }
}

/// Claims the key, complete at once. The transaction holds the file, so no other process writes.
async fn record(
    store: &SqliteStore,
    connection: &mut SqliteConnection,
    key: &DedupKey,
    terms: &CallTerms,
) -> Result<ClaimReply, Error> {
    let rows = rows_of(std::slice::from_ref(key), terms, |_| 0);
    let mut session = Session { connection, statements: &store.statements };
    let written = session.write(Kind::ClaimComplete, &rows, vec![None], &mut false).await;
    let written = written.map_err(|error| store_error("claiming a key in a transaction", error))?;
    Ok(claimed(written)?.remove(0))
}
