//! The SQLite statement for each step of the engine. Each runs under the write lock.
//!
//! The caller reads first, on the connections that only read, so that duplicates wait for no writer.
//! Only keys that are not known are written.
//!
//! The first statement is for the common case: claims of keys without a row, completions by the
//! holder. It returns only how many rows it wrote. If those are all, nothing more is sent. If not, the
//! statement for every case follows for all keys: a token that has got a key gets it again.

use std::sync::Arc;

use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Row as _};

use super::super::replies::Claimed;
use super::super::sql::call::{Call, Kind, RowCall, RowReply, Rows};
use super::super::sql::engine::{Dialect, execute_batch};
use super::super::sql::queue::{BatchExecutor, Waits};
use super::super::sql::rounds::{RowStatements, Written};
use super::super::sql::row::{Row, completed};
use super::super::stored::Fetch;
use super::errors::{is_row_error, store_error};
use super::params::{claimed_row, rows_json, with_indexes};
use super::store::{Lookup, SqliteStore, WriteGuard};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

impl BatchExecutor<Lookup> for SqliteStore {
    type SendGuard = ();

    async fn send_guard(&self) -> Result<(), Error> {
        Ok(())
    }

    async fn execute(
        &self,
        (): (),
        batch: Vec<Lookup>,
        _: &Waits<'_>,
    ) -> Vec<Result<Option<Row>, Error>> {
        let fetch = batch.first().map_or(Fetch::Nothing, |lookup| lookup.fetch);
        let keys: Vec<&DedupKey> = batch.iter().map(|lookup| &lookup.key).collect();
        match self.read(&keys, fetch).await {
            Ok(rows) => rows.into_iter().map(Ok).collect(),
            Err(error) => {
                let error = store_error("looking up keys", error).shared();
                batch.iter().map(|_| Err(error())).collect()
            }
        }
    }
}

impl BatchExecutor<Call> for SqliteStore {
    type SendGuard = WriteGuard;

    async fn send_guard(&self) -> Result<WriteGuard, Error> {
        // A lane has the lock before it takes a batch: a write is executed only for a caller that still
        // waits, and a release that follows needs the lock too. So it is a fence. The same with a second lane,
        // of another runtime or beside a late batch.
        // After an error nothing was sent to the file.
        self.write_lock(ErrorKind::Refused).await
    }

    async fn execute(
        &self,
        guard: WriteGuard,
        batch: Vec<Call>,
        waits: &Waits<'_>,
    ) -> Vec<Result<RowReply, Error>> {
        execute_batch(&mut self.writer(guard), &batch, waits).await
    }
}

/// The statements of one call or batch, under the write lock.
pub(super) struct Writer<'s> {
    store: &'s SqliteStore,
    /// Whether a statement has written rows that no reply reports.
    has_written: bool,
    _guard: WriteGuard,
}

impl SqliteStore {
    pub(super) fn writer(&self, guard: WriteGuard) -> Writer<'_> {
        Writer { store: self, has_written: false, _guard: guard }
    }
}

impl Writer<'_> {
    /// Sends a statement that writes. Returns its rows.
    ///
    /// If it is dropped, the statement runs to its end on the connection's own thread, and its outcome
    /// is unknown.
    async fn write(&self, sql: &Arc<str>, rows: &Rows<'_>) -> Result<Vec<SqliteRow>, sqlx::Error> {
        let query = sqlx::query(AssertSqlSafe(Arc::clone(sql))).bind(rows_json(rows));
        // All rows: SQLite commits at the end of the statement, after it has returned them.
        query.fetch_all(&self.store.writer).await
    }

    /// Sends a statement that writes and returns no rows. Returns `true` if it wrote all.
    async fn writes_all(&mut self, sql: &Arc<str>, rows: &Rows<'_>) -> Result<bool, sqlx::Error> {
        let query = sqlx::query(AssertSqlSafe(Arc::clone(sql))).bind(rows_json(rows));
        let done = query.execute(&self.store.writer).await?;
        self.has_written |= done.rows_affected() > 0;
        Ok(usize::try_from(done.rows_affected()) == Ok(rows.len()))
    }

    async fn returned(&self, sql: &Arc<str>, rows: &Rows<'_>) -> Result<Vec<bool>, sqlx::Error> {
        was_returned(rows, &self.write(sql, rows).await?)
    }
}

/// Returns which rows a statement returned.
fn was_returned(rows: &Rows<'_>, returned: &[SqliteRow]) -> Result<Vec<bool>, sqlx::Error> {
    let mut found = vec![false; rows.len()];
    for (index, _) in with_indexes(rows, returned)? {
        found[index] = true;
    }
    Ok(found)
}

impl RowStatements for Writer<'_> {
    async fn write(&mut self, kind: Kind, rows: &Rows<'_>) -> Result<Vec<Written>, sqlx::Error> {
        let all = &self.store.statements;
        let (common_case, reply) = match kind {
            Kind::Claim => (&all.claim_insert, RowReply::Claimed(Claimed::first(1, false))),
            Kind::ClaimComplete => {
                (&all.claim_complete_insert, RowReply::Claimed(Claimed::first(1, false)))
            }
            _ => (&all.complete_held, RowReply::Completed(completed(1, true))),
        };
        let is_claim = kind != Kind::Complete;
        if (is_claim || !rows.stores_data()) && self.writes_all(common_case, rows).await? {
            return Ok(vec![Written::Yes(reply); rows.len()]);
        }
        let mut written = vec![Written::No; rows.len()];
        if is_claim {
            // Some rows may be new. The next statement claims them again with their token.
            return Ok(written);
        }
        let returned = Self::write(self, &all.complete, rows).await?;
        for (index, row) in with_indexes(rows, &returned)? {
            let token: Option<Vec<u8>> = row.try_get("token")?;
            let is_held = token.as_deref() == Some(rows[index].token().as_bytes());
            let completed = completed(row.try_get("attempts")?, is_held);
            written[index] = Written::Yes(RowReply::Completed(completed));
        }
        Ok(written)
    }

    async fn claim_existing(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
        _: &[i64],
    ) -> Result<Vec<Option<Claimed>>, sqlx::Error> {
        let all = &self.store.statements;
        let statement =
            if kind == Kind::Claim { &all.claim_upsert } else { &all.claim_complete_upsert };
        let existing = Self::write(self, statement, rows).await?;
        let mut claimed: Vec<Option<Claimed>> = rows.iter().map(|_| None).collect();
        for (index, row) in with_indexes(rows, &existing)? {
            claimed[index] = Some(claimed_row(row)?);
        }
        Ok(claimed)
    }

    async fn read(
        &mut self,
        rows: &Rows<'_>,
        fetch: Fetch,
    ) -> Result<Vec<Option<Row>>, sqlx::Error> {
        let keys: Vec<&DedupKey> = rows.iter().map(|row| row.key).collect();
        self.store.read(&keys, fetch).await
    }
}

impl Dialect for Writer<'_> {
    async fn update_by_token(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
    ) -> Result<Vec<bool>, sqlx::Error> {
        let all = &self.store.statements;
        match kind {
            Kind::Renew => self.returned(&all.renew, rows).await,
            Kind::ReleaseComplete => self.returned(&all.release_complete, rows).await,
            _ => self.returned(&all.release, rows).await,
        }
    }

    async fn forget(&mut self, rows: &Rows<'_>, _: &[i64]) -> Result<Vec<bool>, sqlx::Error> {
        self.returned(&self.store.statements.forget, rows).await
    }

    /// An open transaction holds the file and not a key, and whoever writes has waited for it.
    async fn is_held_by_transaction(&mut self, _: &RowCall<'_>) -> Result<bool, sqlx::Error> {
        Ok(false)
    }

    fn error(&self, context: &'static str, error: sqlx::Error) -> Error {
        let error = store_error(context, error);
        if self.has_written { error.with_unknown_outcome() } else { error }
    }

    fn is_row_error(error: &sqlx::Error) -> bool {
        is_row_error(error)
    }

    fn is_locked(_: &sqlx::Error) -> bool {
        false
    }
}
