//! Keys that a program records in a transaction of its own, without a layer.

use std::slice;
use std::sync::Arc;
use std::time::Duration;

use sqlx::Connection;
use sqlx::postgres::PgConnection;

use super::super::contract::{CallTerms, ClaimReply, Token};
use super::super::sql::{Call, Kind, RowCall, claimed, ready};
use super::adapter::PostgresAdapter;
use super::errors::{is_locked, store_error};
use super::params::key_hash;
use super::session::{Link, Session};
use super::statements::Wait;
use crate::error::StoreError;
use crate::key::DedupKey;

impl PostgresAdapter {
    /// Claims a key in a transaction of yours: the key is complete when, and only if, the transaction
    /// commits.
    ///
    #[doc = include_str!("../../docs/stores/postgres_record_in.md")]
    pub async fn record_in(
        &self,
        connection: &mut PgConnection,
        key: &DedupKey,
        retention: Duration,
    ) -> Result<ClaimReply, StoreError> {
        let fault = |error| store_error("claiming a key in a transaction", error);
        let store = ready(self).await?;
        let terms = CallTerms::on_claim(Token::random(), retention);
        let call = Call::new(Kind::ClaimComplete, key, &terms, key_hash(key));
        // This caller waits.
        let _caller = Arc::clone(&call);
        let mut row = RowCall::new(&call);
        // A wait that is too long must not abort the user's transaction.
        let mut savepoint = connection.begin().await.map_err(fault)?;
        let timeout: String =
            sqlx::query_scalar("SELECT pg_catalog.current_setting('lock_timeout')")
                .fetch_one(&mut *savepoint)
                .await
                .map_err(fault)?;
        let link = Link::Within(&mut savepoint);
        let mut session = Session::new(Arc::clone(store), link, Wait::Briefly);
        let ran = session.run(Kind::ClaimComplete, slice::from_mut(&mut row), false).await;
        match ran {
            Err(error) if is_locked(&error) => {
                savepoint.rollback().await.map_err(fault)?;
                return Ok(ClaimReply::InFlight);
            }
            ran => ran.map_err(fault)?,
        }
        // The claim has set its own.
        sqlx::query("SELECT pg_catalog.set_config('lock_timeout', $1, true)")
            .bind(timeout)
            .execute(&mut *savepoint)
            .await
            .map_err(fault)?;
        savepoint.commit().await.map_err(fault)?;
        claimed(row.reply)
    }
}
