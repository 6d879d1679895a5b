//! The rounds of a claim or a completion.
//!
//! Each round handles the rows that have no reply yet, with at most one statement a step:
//!
//! 1. Read the rows. A row that decides the reply gives it. The first round begins at step 3, unless
//!    the call reads first.
//! 2. Take the existing rows that are free, each at the version that was read, and only for a caller that still
//!    waits. A caller releases after it has stopped waiting, and the release raises the version. So a release is
//!    a fence: a late take finds another version. A completion has no such step.
//! 3. Insert the missing rows. A completion also updates rows that are not complete.
//!
//! A row that was written in step 2 or 3 has its reply. After [`ROUNDS`] rounds, a row without a reply is an
//! error of unknown outcome: a claim is then released, and a completion is repeated.

use std::future::Future;

use super::super::replies::Claimed;
use super::super::stored::Fetch;
use super::call::{Kind, RowCall, RowReply, Rows, reply};
use super::row::Row;
use crate::error::{Error, ErrorKind};

/// The number of rounds: another caller may change a row between two statements.
pub(in crate::adapter) const ROUNDS: usize = 5;
/// How many responses one statement reads. A response is large.
pub(in crate::adapter) const MAX_RESPONSES: usize = 64;

/// The result of a writing statement for one row.
#[derive(Debug, Clone)]
pub(in crate::adapter) enum Written {
    /// The row existed, and was not written.
    No,
    /// An open transaction holds the key, and the row was not written.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "SQLite locks the file"))]
    Locked,
    Yes(RowReply),
}

/// The statements of a round. Each is one statement for all rows.
pub(in crate::adapter) trait RowStatements: Send {
    /// Inserts the rows of claims, or completes rows.
    fn write(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
    ) -> impl Future<Output = Result<Vec<Written>, sqlx::Error>> + Send;

    /// Takes existing rows at these versions; may also insert rows that are missing. Returns the reply for
    /// each row that it wrote.
    fn claim_existing(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
        versions: &[i64],
    ) -> impl Future<Output = Result<Vec<Option<Claimed>>, sqlx::Error>> + Send;

    /// Reads rows with the stored data that `fetch` names.
    fn read(
        &mut self,
        rows: &Rows<'_>,
        fetch: Fetch,
    ) -> impl Future<Output = Result<Vec<Option<Row>>, sqlx::Error>> + Send;
}

/// The reply to a call, for one row.
pub(super) struct KeyReply {
    /// The reply to the call that sent the row.
    pub(super) reply: Result<RowReply, Error>,
    /// The row after the call, which decides the replies to other calls. `None` if other callers changed
    /// the row in every round, or if an open transaction holds the row.
    pub(super) row: Option<Row>,
}

/// The rounds of one statement's rows.
pub(in crate::adapter) struct Rounds<'r, 'c> {
    pub(super) kind: Kind,
    pub(super) rows: &'r Rows<'c>,
    pub(super) replies: Vec<Option<KeyReply>>,
    /// How many rows needed no write.
    pub(super) known: usize,
}

impl<'r, 'c> Rounds<'r, 'c> {
    pub(in crate::adapter) fn new(kind: Kind, rows: &'r Rows<'c>) -> Self {
        let replies = rows.iter().map(|_| None).collect();
        Self { kind, rows, replies, known: 0 }
    }

    /// Runs the rounds. After an error, some rows may have their reply.
    pub(in crate::adapter) async fn run<S: RowStatements>(
        &mut self,
        statements: &mut S,
        mut reads: bool,
    ) -> Result<(), sqlx::Error> {
        for _ in 0..ROUNDS {
            let mut unwritten = self.unanswered();
            if unwritten.is_empty() {
                break;
            }
            if reads {
                unwritten = self.read(statements, unwritten).await?;
            }
            reads = true;
            if !unwritten.is_empty() {
                let rows = self.rows.select(&unwritten);
                let written = statements.write(self.kind, &rows).await?;
                for (index, written) in unwritten.into_iter().zip(written) {
                    match written {
                        Written::No => {}
                        Written::Locked => self.set_held(index),
                        Written::Yes(reply) => self.wrote(index, reply),
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads the rows, and replies where a row decides the reply. A claim also claims the free rows.
    /// Returns the indexes of the rows to write.
    async fn read<S: RowStatements>(
        &mut self,
        statements: &mut S,
        indexes: Vec<usize>,
    ) -> Result<Vec<usize>, sqlx::Error> {
        // A statement of its own: the statement that found a row may have begun before the row was
        // committed, and would not see it.
        let found = read_rows(statements, &self.rows.select(&indexes)).await?;
        let (mut unwritten, mut free, mut versions) = (Vec::new(), Vec::new(), Vec::new());
        for (index, row) in indexes.into_iter().zip(found) {
            let Some(row) = row else {
                unwritten.push(index);
                continue;
            };
            let terms = self.rows[index].terms;
            let reply = if self.kind.is_claim() {
                row.claimed(terms).map(|reply| reply.map(RowReply::Claimed))
            } else {
                row.completed(terms.token()).map(|reply| reply.map(RowReply::Completed))
            };
            match reply.transpose() {
                Some(reply) => {
                    self.known += 1;
                    self.replies[index] = Some(KeyReply { reply, row: Some(row) });
                }
                None if !self.kind.is_claim() => unwritten.push(index),
                None if self.rows.has_caller(index) => {
                    free.push(index);
                    versions.push(row.version);
                }
                // Another call of the batch that names the key is sent again.
                None => {
                    let reply = Err(self.unknown());
                    self.replies[index] = Some(KeyReply { reply, row: Some(row) });
                }
            }
        }
        if !free.is_empty() {
            let rows = self.rows.select(&free);
            let existing = statements.claim_existing(self.kind, &rows, &versions).await?;
            for (index, claimed) in free.into_iter().zip(existing) {
                if let Some(claimed) = claimed {
                    self.wrote(index, RowReply::Claimed(claimed));
                }
            }
        }
        Ok(unwritten)
    }

    fn wrote(&mut self, index: usize, reply: RowReply) {
        let RowCall { key, terms, .. } = self.rows[index];
        let row = match &reply {
            RowReply::Claimed(claimed) => Some(Row::row_after(key, terms, claimed)),
            _ => None,
        };
        self.replies[index] = Some(KeyReply { reply: Ok(reply), row });
    }

    pub(super) fn unanswered(&self) -> Vec<usize> {
        (0..self.replies.len()).filter(|index| self.replies[*index].is_none()).collect()
    }

    /// Sets the reply for the row of a claim that an open transaction holds.
    pub(super) fn set_held(&mut self, index: usize) {
        let reply = Ok(RowReply::Claimed(Claimed::InFlight));
        self.replies[index] = Some(KeyReply { reply, row: None });
    }

    fn unknown(&self) -> Error {
        Error::new(ErrorKind::Unavailable, self.kind.context()).with_unknown_outcome()
    }

    pub(super) fn finish(mut self) -> Vec<KeyReply> {
        let replies = std::mem::take(&mut self.replies).into_iter();
        let unknown = || KeyReply { reply: Err(self.unknown()), row: None };
        replies.map(|reply| reply.unwrap_or_else(unknown)).collect()
    }

    /// Returns the replies to a claim in a transaction. A row that others changed in every round is in flight: no
    /// statement of the claim is late, because it ends with the transaction.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Corrupt`] for a duplicate whose stored data is unreadable.
    pub(in crate::adapter) fn claimed(mut self) -> Result<Vec<Claimed>, Error> {
        self.unanswered().into_iter().for_each(|index| self.set_held(index));
        let claimed = |row: KeyReply| reply(row.reply?, RowReply::claimed);
        self.finish().into_iter().map(claimed).collect()
    }
}

/// Reads rows with the stored data that their calls fetch: rule 5 of [`engine`](super::engine).
pub(in crate::adapter) async fn read_rows<S: RowStatements>(
    statements: &mut S,
    rows: &Rows<'_>,
) -> Result<Vec<Option<Row>>, sqlx::Error> {
    let Some(first) = rows.first() else { return Ok(Vec::new()) };
    let fetch = first.terms.fetch();
    let most = if fetch == Fetch::DigestAndResponse { MAX_RESPONSES } else { usize::MAX };
    let mut found = Vec::with_capacity(rows.len());
    for part in (0..rows.len()).collect::<Vec<_>>().chunks(most) {
        found.extend(statements.read(&rows.select(part), fetch).await?);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::super::terms::{CallTerms, Token};
    use super::super::call::RowCall;
    use super::super::table::Table;
    use super::*;
    use crate::key::DedupKey;

    #[tokio::test]
    async fn each_row_is_read_once_with_what_its_call_fetches() {
        const ALL: Fetch = Fetch::DigestAndResponse;
        const MANY: usize = MAX_RESPONSES + 1;
        let key = DedupKey::new("a", "1").unwrap();
        for (fetch, reads) in [
            (Fetch::Nothing, &[(Fetch::Nothing, MANY)][..]),
            (Fetch::Digest, &[(Fetch::Digest, MANY)]),
            (ALL, &[(ALL, MAX_RESPONSES), (ALL, 1)]),
        ] {
            let terms = CallTerms::on_claim(Token::random(), Duration::from_secs(60));
            let terms = terms.with_fetch(fetch);
            let calls = std::iter::repeat_n(&terms, MANY).zip(1..);
            let rows = calls.map(|(terms, hash)| RowCall::new(&key, hash, terms, 0)).collect();
            let mut table = Table::default();
            table.rows.insert(65, Row::row_after(&key, &terms, &Claimed::first(1, false)));
            let rows = Rows { rows, waits: &|_| true };
            let found = read_rows(&mut table, &rows).await.unwrap();
            let places: Vec<_> =
                (1..).zip(found).filter_map(|(place, row)| row.map(|_| place)).collect();
            assert_eq!((places, &*table.reads), (vec![65], reads));
        }
    }
}
