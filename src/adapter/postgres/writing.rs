//! [`Writing`]: the statements of a call.
//!
//! Each try handles the rows that have no reply yet, with at most one statement a step:
//!
//! 1. Read the rows. A row that decides the reply gives it. The first try begins at step 3, unless the adapter
//!    reads first.
//! 2. Take the existing rows that are free, each at the version that was read, and only for a caller that still
//!    waits. A caller releases after it has stopped waiting, and the release raises the version. So a release is
//!    a fence: a late take finds another version. A completion has no such step.
//! 3. Insert the missing rows. A completion also updates rows that are not complete. A renewal and a release have this
//!    step only, and it replies to each row.
//!
//! A row that was written in step 2 or 3 has its reply. After [`TRIES`], a row without a reply is an error of unknown
//! outcome: a claim is then released, and a completion is repeated.

use std::future::Future;

use super::super::replies::ClaimReply;
use super::super::sql::batch::{self, KeyReply, Replied, TRIES, unanswered};
use super::super::sql::call::{Kind, RowReply, Rows};
use super::super::sql::row::Row;
use super::super::stored::Fetch;
use crate::error::Error;

/// The statements of a try. Each is one statement for all rows.
pub(super) trait RowStatements: Send {
    /// Inserts the rows of claims; completes, renews or releases rows. Returns the reply for each row that it wrote, or
    /// that an open transaction holds.
    fn write(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
    ) -> impl Future<Output = Result<Vec<Option<RowReply>>, sqlx::Error>> + Send;

    /// Takes existing rows at these versions. Returns the reply for each row that it wrote.
    fn take(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
        versions: &[i64],
    ) -> impl Future<Output = Result<Vec<Option<RowReply>>, sqlx::Error>> + Send;

    /// Reads rows with the stored data that `fetch` names.
    fn read(
        &mut self,
        rows: &Rows<'_>,
        fetch: Fetch,
    ) -> impl Future<Output = Result<Vec<Option<Row>>, sqlx::Error>> + Send;
}

/// The rows of one statement, and their replies.
pub(super) struct Writing<'r, 'c> {
    kind: Kind,
    rows: &'r Rows<'c>,
    pub(super) replies: Vec<Replied>,
    /// How many rows needed no write.
    pub(super) known: usize,
}

impl<'r, 'c> Writing<'r, 'c> {
    pub(super) fn new(kind: Kind, rows: &'r Rows<'c>) -> Self {
        Self { kind, rows, replies: rows.iter().map(|_| None).collect(), known: 0 }
    }

    /// Sends the statements. After an error, some rows may have their reply.
    pub(super) async fn run<S: RowStatements>(
        &mut self,
        statements: &mut S,
        mut reads: bool,
    ) -> Result<(), sqlx::Error> {
        for _ in 0..TRIES {
            let mut unwritten = self.unanswered();
            if unwritten.is_empty() {
                break;
            }
            if reads {
                unwritten = self.read(statements, unwritten).await?;
            }
            reads = true;
            if !unwritten.is_empty() {
                let written = statements.write(self.kind, &self.rows.select(&unwritten)).await?;
                self.set(&unwritten, written);
            }
        }
        Ok(())
    }

    /// Reads the rows, and replies where a row decides the reply. A claim also takes the free rows.
    /// Returns the indexes of the rows to write.
    async fn read<S: RowStatements>(
        &mut self,
        statements: &mut S,
        indexes: Vec<usize>,
    ) -> Result<Vec<usize>, sqlx::Error> {
        // A statement of its own: the statement that found a row may have begun before the row was
        // committed, and would not see it.
        let fetch = self.rows.first().map_or(Fetch::Nothing, |row| row.terms.fetch());
        let found = statements.read(&self.rows.select(&indexes), fetch).await?;
        let (mut unwritten, mut free, mut versions) = (Vec::new(), Vec::new(), Vec::new());
        for (index, row) in indexes.into_iter().zip(found) {
            let Some(row) = row else {
                unwritten.push(index);
                continue;
            };
            match KeyReply::of_row(&row, self.kind, self.rows[index].terms) {
                Some(reply) => {
                    self.known += 1;
                    self.replies[index] = Some(reply);
                }
                None if !self.kind.is_claim() => unwritten.push(index),
                None if self.rows.has_caller(index) => {
                    free.push(index);
                    versions.push(row.version);
                }
                None => self.replies[index] = Some(KeyReply::unknown(self.kind)),
            }
        }
        if !free.is_empty() {
            let taken = statements.take(self.kind, &self.rows.select(&free), &versions).await?;
            self.set(&free, taken);
        }
        Ok(unwritten)
    }

    fn set(&mut self, indexes: &[usize], replies: Vec<Option<RowReply>>) {
        for (index, reply) in indexes.iter().zip(replies) {
            self.replies[*index] = reply.map(|reply| Ok(reply).into());
        }
    }

    pub(super) fn unanswered(&self) -> Vec<usize> {
        unanswered(&self.replies)
    }

    /// Returns the reply of each row.
    pub(super) fn finish(self) -> Vec<Replied> {
        let unknown = || Some(KeyReply::unknown(self.kind));
        self.replies.into_iter().map(|reply| reply.or_else(unknown)).collect()
    }

    /// Returns the [replies to a claim in a transaction](batch::claimed).
    pub(super) fn claimed(self) -> Result<Vec<ClaimReply>, Error> {
        batch::claimed(self.replies)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::super::replies::CompleteReply;
    use super::super::super::terms::{CallTerms, Token};
    use super::*;
    use crate::key::DedupKey;

    /// A table whose rows other callers change.
    struct Table {
        /// How many completions still find a row that another caller has just changed.
        misses: usize,
        writes: usize,
    }

    impl RowStatements for Table {
        async fn write(
            &mut self,
            _: Kind,
            rows: &Rows<'_>,
        ) -> Result<Vec<Option<RowReply>>, sqlx::Error> {
            self.writes += 1;
            let held = RowReply::Completed(CompleteReply::Held);
            Ok(vec![(self.writes > self.misses).then_some(held); rows.len()])
        }

        async fn take(
            &mut self,
            _: Kind,
            rows: &Rows<'_>,
            _: &[i64],
        ) -> Result<Vec<Option<RowReply>>, sqlx::Error> {
            Ok(vec![None; rows.len()])
        }

        async fn read(
            &mut self,
            rows: &Rows<'_>,
            _: Fetch,
        ) -> Result<Vec<Option<Row>>, sqlx::Error> {
            Ok(rows.iter().map(|_| None).collect())
        }
    }

    /// The event may not be complete, so its ledger has to repeat the completion.
    #[tokio::test]
    async fn completion_without_a_reply_has_an_unknown_outcome() {
        let key = [DedupKey::new("a", "1").unwrap()];
        let terms = CallTerms::on_claim(Token::random(), Duration::from_secs(60));
        let rows = Rows::of_call(&key, &terms, |_| 1);
        for (misses, is_unknown) in [(TRIES - 1, false), (TRIES, true)] {
            let mut table = Table { misses, writes: 0 };
            let mut writing = Writing::new(Kind::Complete, &rows);
            writing.run(&mut table, false).await.unwrap();
            let reply = writing.finish().remove(0).unwrap().reply;
            assert_eq!(reply.is_err_and(|error| error.is_unknown()), is_unknown, "{misses}");
            assert_eq!(table.writes, TRIES, "{misses}");
        }
    }
}
