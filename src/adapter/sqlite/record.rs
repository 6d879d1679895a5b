//! Keys that a program records in a transaction of its own, without a layer.

use std::slice;
use std::time::Duration;

use sqlx::sqlite::SqliteConnection;

use super::super::contract::{CallTerms, ClaimReply, Token};
use super::super::sql::{Call, Kind, RowCall, SqlStore as _, claimed, usable};
use super::adapter::SqliteAdapter;
use super::errors::store_error;
use super::session::Session;
use crate::error::StoreError;
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
    ) -> Result<ClaimReply, StoreError> {
        let store = usable(self)?;
        if !store.common().has_table() {
            // On this connection: another one would wait for its transaction, which holds the file. Whether the schema
            // stays is for that transaction to decide.
            store.create_in(connection).await?;
        }
        let terms = CallTerms::on_claim(Token::random(), retention);
        let call = Call::new(Kind::ClaimComplete, key, &terms, 0);
        let mut row = RowCall::new(&call);
        let mut session = Session::new(connection, &store.statements);
        let written = session.write(Kind::ClaimComplete, slice::from_mut(&mut row)).await;
        let fault = |error| store_error("claiming a key in a transaction", error);
        written.map_err(fault)?;
        claimed(row.reply)
    }
}
