//! [`SqliteSession`]: the statements of a batch on a connection.
//!
//! The first statement is for the common case: claims of keys without a row, completions by the
//! holder. It returns only how many rows it wrote. If it wrote all rows, or after a release,
//! nothing more is sent. Otherwise the statement for every case follows for all keys; a token that
//! has got a key gets it again. A row that this statement does not write is read, and decides the
//! reply.

use std::ops::DerefMut;
use std::sync::Arc;

use sqlx::Row as _;
use sqlx::pool::PoolConnection;
use sqlx::sqlite::{Sqlite, SqliteConnection, SqliteRow};

use super::super::contract::{Fetch, RenewReply, Token};
use super::super::sql::statement::query;
use super::super::sql::{
    Failed, Kind, Row, RowCall, RowExecutor, RowReply, TRIES, completed, unanswered,
};
use super::errors::{is_row_error, store_error};
use super::params::{index_of, keys_json, read_row, rows_json};
use super::statements::SqliteStatements;
use super::write_lock::WriteGuard;
use crate::key::DedupKey;

/// A connection that only reads, or that may write: under the write lock, or in a transaction that
/// holds the file.
pub(crate) struct SqliteSession<C = PoolConnection<Sqlite>> {
    pub(super) connection: C,
    pub(super) statements: Arc<SqliteStatements>,
    /// Whether a statement has written rows that no reply reports.
    has_written: bool,
    /// Ends after the connection.
    pub(super) lock: Option<WriteGuard>,
}

impl RowExecutor for SqliteSession {
    /// If it is dropped, the statement runs to its end on the connection's own thread, and its
    /// outcome is unknown.
    async fn execute(&mut self, kind: Kind, rows: &mut [RowCall<'_>]) -> Option<Failed> {
        self.has_written = false;
        let error = self.run(kind, rows).await.err()?;
        let is_row_error = is_row_error(&error);
        let error = store_error(kind.context(), error);
        let error = if self.has_written { error.with_unknown_outcome() } else { error };
        Some(Failed { error, is_row_error })
    }
}

impl<C: DerefMut<Target = SqliteConnection> + Send> SqliteSession<C> {
    pub(super) fn new(
        connection: C,
        statements: &Arc<SqliteStatements>,
        lock: Option<WriteGuard>,
    ) -> Self {
        let statements = Arc::clone(statements);
        Self { connection, statements, has_written: false, lock }
    }

    /// Sets the replies of all rows, unless other processes change a row each time.
    async fn run(&mut self, kind: Kind, rows: &mut [RowCall<'_>]) -> Result<(), sqlx::Error> {
        let all = Arc::clone(&self.statements);
        // The statement of the common case, and the reply of a row that it writes.
        let (sql, reply) = match kind {
            Kind::Check => return self.read_rows(kind, rows).await,
            Kind::Renew => (&all.renew, RowReply::Renewed(RenewReply::Held)),
            Kind::Release => (&all.release, RowReply::Released),
            Kind::Claim => (&all.claim_insert, RowReply::first(1, false)),
            Kind::ClaimComplete => (&all.claim_complete_insert, RowReply::first(1, false)),
            Kind::Complete => (&all.complete_held, RowReply::Completed(completed(1, true))),
        };
        let mut left = unanswered(rows);
        if kind == Kind::Renew {
            let renewed = self.fetch(sql, &left).await?;
            let lost = RowReply::Renewed(RenewReply::Lost);
            left.iter_mut().for_each(|row| row.reply = Some(Ok(lost.clone())));
            for row in &renewed {
                if let Some(index) = index_of(&left, row)? {
                    left[index].reply = Some(Ok(reply.clone()));
                }
            }
            return Ok(());
        }
        let is_common = match kind {
            Kind::Complete => !left.iter().any(|row| row.call.stores_data()),
            Kind::ClaimComplete => left.iter().all(|row| row.call.terms.handled_at().is_none()),
            _ => true,
        };
        if is_common {
            let write = query(sql).bind(rows_json(&left));
            let written = write.execute(&mut *self.connection).await?.rows_affected();
            if kind == Kind::Release || usize::try_from(written) == Ok(left.len()) {
                left.iter_mut().for_each(|row| row.reply = Some(Ok(reply.clone())));
                return Ok(());
            }
            self.has_written |= written > 0;
        }
        self.write(kind, rows).await
    }

    /// Claims or completes the rows without a reply, in every state. A row that is left without one
    /// was changed by other processes each time.
    pub(super) async fn write(
        &mut self,
        kind: Kind,
        rows: &mut [RowCall<'_>],
    ) -> Result<(), sqlx::Error> {
        let all = Arc::clone(&self.statements);
        let statement = match kind {
            Kind::Claim => &all.claim_upsert,
            Kind::ClaimComplete => &all.claim_complete_upsert,
            _ => &all.complete,
        };
        for _ in 0..TRIES {
            let mut left = unanswered(rows);
            if left.is_empty() {
                break;
            }
            let written = self.fetch(statement, &left).await?;
            self.has_written |= !written.is_empty();
            for row in &written {
                let Some(index) = index_of(&left, row)? else { continue };
                let token = left[index].call.terms.token();
                left[index].reply = Some(Ok(written_reply(kind, row, token)?));
            }
            self.read_rows(kind, rows).await?;
        }
        Ok(())
    }

    /// Reads the rows without a reply, and sets the replies that follow.
    async fn read_rows(&mut self, kind: Kind, rows: &mut [RowCall<'_>]) -> Result<(), sqlx::Error> {
        let left = unanswered(rows);
        let Some(fetch) = left.first().map(|row| row.call.terms.fetch()) else { return Ok(()) };
        let keys: Vec<_> = left.iter().map(|row| &row.call.key).collect();
        let found = self.read(&keys, fetch).await?;
        for (row, found) in left.into_iter().zip(found) {
            row.reply = RowReply::of_row(found.as_ref(), kind, &row.call.terms);
        }
        Ok(())
    }

    /// Sends a statement that writes. Returns its rows.
    async fn fetch(
        &mut self,
        sql: &Arc<str>,
        rows: &[&mut RowCall<'_>],
    ) -> Result<Vec<SqliteRow>, sqlx::Error> {
        // All rows: SQLite commits at the end of the statement, after it has returned them.
        query(sql).bind(rows_json(rows)).fetch_all(&mut *self.connection).await
    }

    /// Returns the rows in the order of their keys.
    pub(super) async fn read(
        &mut self,
        keys: &[&DedupKey],
        fetch: Fetch,
    ) -> Result<Vec<Option<Row>>, sqlx::Error> {
        let read = query(self.statements.read(fetch)).bind(keys_json(keys.iter().copied()));
        let mut found: Vec<_> = keys.iter().map(|_| None).collect();
        for row in read.fetch_all(&mut *self.connection).await? {
            let index: i64 = row.try_get("ordinal")?;
            if let Some(slot) = usize::try_from(index).ok().and_then(|at| found.get_mut(at)) {
                *slot = Some(read_row(&row, fetch));
            }
        }
        Ok(found)
    }
}

/// Returns the reply of a row that a claim or a completion wrote.
fn written_reply(kind: Kind, row: &SqliteRow, mine: Token) -> Result<RowReply, sqlx::Error> {
    let attempts = row.try_get("attempts")?;
    if kind.is_claim() {
        return Ok(RowReply::first(attempts, row.try_get("takeover")?));
    }
    let token: Option<Vec<u8>> = row.try_get("token")?;
    let is_held = token.as_deref() == Some(mine.as_bytes());
    Ok(RowReply::Completed(completed(attempts, is_held)))
}
