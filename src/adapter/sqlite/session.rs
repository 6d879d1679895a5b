//! [`Session`]: the statements of a batch on a connection.
//!
//! The first statement is for the common case: claims of keys without a row, completions by the
//! holder. It returns only how many rows it wrote. If those are all, nothing more is sent. If not, the
//! statement for every case follows for all keys: a token that has got a key gets it again. A row that this
//! statement does not write is read, and decides the reply.

use std::sync::Arc;

use sqlx::Row as _;
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::super::replies::{ClaimReply, RenewReply};
use super::super::sql::batch::{KeyReply, Replied, TRIES, unanswered};
use super::super::sql::call::{Kind, RowReply, Rows};
use super::super::sql::responses::most_read;
use super::super::sql::row::{Row, completed};
use super::super::sql::statement::query;
use super::super::stored::Fetch;
use super::super::terms::Token;
use super::params::{claimed_row, keys_json, rows_in_order, rows_json, with_indexes};
use super::statements::Statements;
use crate::key::DedupKey;

/// A connection that may write: under the write lock, or in a transaction that holds the file.
pub(super) struct Session<'c> {
    pub(super) connection: &'c mut SqliteConnection,
    pub(super) statements: &'c Statements,
}

impl Session<'_> {
    pub(super) async fn execute(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
        has_written: &mut bool,
    ) -> Result<Vec<Replied>, sqlx::Error> {
        let all = self.statements;
        let (common_case, reply) = match kind {
            Kind::Renew => return self.update(&all.renew, rows, RENEWED).await,
            Kind::Release => return self.update(&all.release, rows, RELEASED).await,
            Kind::ReleaseComplete => {
                return self.update(&all.release_complete, rows, RELEASED).await;
            }
            Kind::Claim => (&all.claim_insert, RowReply::Claimed(ClaimReply::first(1, false))),
            Kind::ClaimComplete => {
                (&all.claim_complete_insert, RowReply::Claimed(ClaimReply::first(1, false)))
            }
            Kind::Complete => (&all.complete_held, RowReply::Completed(completed(1, true))),
        };
        if kind.is_claim() || !rows.stores_data() {
            let write = query(common_case).bind(rows_json(rows));
            let written = write.execute(&mut *self.connection).await?.rows_affected();
            if usize::try_from(written) == Ok(rows.len()) {
                return Ok(rows.iter().map(|_| Some(Ok(reply.clone()).into())).collect());
            }
            *has_written |= written > 0;
        }
        let replies = self.write(kind, rows).await?.into_iter();
        Ok(replies.map(|reply| reply.or_else(|| Some(KeyReply::unknown(kind)))).collect())
    }

    /// Renews or releases the rows of these tokens. `replies` are those for a row that was written, and for another.
    async fn update(
        &mut self,
        sql: &Arc<str>,
        rows: &Rows<'_>,
        [written, other]: [RowReply; 2],
    ) -> Result<Vec<Replied>, sqlx::Error> {
        let returned = self.fetch(sql, rows).await?;
        let mut replies: Vec<_> = rows.iter().map(|_| Some(Ok(other.clone()).into())).collect();
        for (index, _) in with_indexes(rows, &returned)? {
            replies[index] = Some(Ok(written.clone()).into());
        }
        Ok(replies)
    }

    /// Claims or completes rows in every state. A row without a reply was changed by other processes each time.
    pub(super) async fn write(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
    ) -> Result<Vec<Replied>, sqlx::Error> {
        let statement = match kind {
            Kind::Claim => &self.statements.claim_upsert,
            Kind::ClaimComplete => &self.statements.claim_complete_upsert,
            _ => &self.statements.complete,
        };
        let fetch = rows.first().map_or(Fetch::Nothing, |row| row.terms.fetch());
        let mut replies: Vec<Replied> = rows.iter().map(|_| None).collect();
        for _ in 0..TRIES {
            let left = unanswered(&replies);
            if left.is_empty() {
                break;
            }
            let left_rows = rows.select(&left);
            let written = self.fetch(statement, &left_rows).await?;
            for (index, row) in with_indexes(&left_rows, &written)? {
                let index = left[index];
                replies[index] = Some(Ok(written_reply(kind, row, rows[index].token())?).into());
            }
            let left = unanswered(&replies);
            let keys: Vec<_> = left.iter().map(|index| rows[*index].key).collect();
            let found = self.read(&keys, fetch).await?;
            for (index, row) in left.into_iter().zip(found) {
                replies[index] =
                    row.and_then(|row| KeyReply::of_row(&row, kind, rows[index].terms));
            }
        }
        Ok(replies)
    }

    /// Sends a statement that writes. Returns its rows.
    async fn fetch(
        &mut self,
        sql: &Arc<str>,
        rows: &Rows<'_>,
    ) -> Result<Vec<SqliteRow>, sqlx::Error> {
        // All rows: SQLite commits at the end of the statement, after it has returned them.
        query(sql).bind(rows_json(rows)).fetch_all(&mut *self.connection).await
    }

    pub(super) async fn read(
        &mut self,
        keys: &[&DedupKey],
        fetch: Fetch,
    ) -> Result<Vec<Option<Row>>, sqlx::Error> {
        let mut found = Vec::with_capacity(keys.len());
        for keys in keys.chunks(most_read(fetch)) {
            let rows = query(self.statements.read(fetch))
                .bind(keys_json(keys.iter().copied()))
                .fetch_all(&mut *self.connection)
                .await?;
            found.extend(rows_in_order(keys.len(), &rows, fetch)?);
        }
        Ok(found)
    }
}

const RENEWED: [RowReply; 2] =
    [RowReply::Renewed(RenewReply::Held), RowReply::Renewed(RenewReply::Lost)];
const RELEASED: [RowReply; 2] = [RowReply::Released, RowReply::Released];

/// Returns the reply of a row that a claim or a completion wrote.
fn written_reply(kind: Kind, row: &SqliteRow, mine: Token) -> Result<RowReply, sqlx::Error> {
    if kind.is_claim() {
        return Ok(RowReply::Claimed(claimed_row(row)?));
    }
    let token: Option<Vec<u8>> = row.try_get("token")?;
    let is_held = token.as_deref() == Some(mine.as_bytes());
    Ok(RowReply::Completed(completed(row.try_get("attempts")?, is_held)))
}
