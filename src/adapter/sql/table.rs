//! A store for the tests of this module: its statements fail as those of a database do.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::time::Duration;

use super::super::replies::{Claimed, Completed};
use super::super::stored::Fetch;
use super::super::terms::{CallTerms, Token};
use super::call::{Kind, RowCall, RowReply, Rows};
use super::engine::Dialect;
use super::rounds::{RowStatements, Written};
use super::row::Row;
use crate::error::{Error, ErrorKind};

/// A table in memory, with other programs around it. Its keys are numbers.
#[derive(Default)]
pub(super) struct Table {
    pub(super) rows: HashMap<u128, Row>,
    /// Rows that open transactions hold.
    pub(super) held: HashSet<u128>,
    /// Whether those transactions commit after the first statement that meets them.
    pub(super) commits: bool,
    /// How long a statement waits for a row that is held.
    pub(super) waits: Duration,
    /// A row that no statement can write.
    pub(super) bad: Option<u128>,
    /// The number of the writing statement that is refused for no row's sake.
    pub(super) refused: Option<usize>,
    /// How many completions still find a row that another call has just changed.
    pub(super) misses: usize,
    /// The number of the statement that forgets its row.
    pub(super) forgets: Option<usize>,
    /// How many statements that forget were sent.
    pub(super) sent_forgets: usize,
    /// The attempt that a claim gets.
    pub(super) attempt: u32,
    /// How many rows each writing statement had.
    pub(super) writes: Vec<usize>,
    /// What each reading statement fetched, and of how many rows.
    pub(super) reads: Vec<(Fetch, usize)>,
    /// How many of how many claimed rows were known before.
    pub(super) noted: Mutex<Option<(usize, usize)>>,
}

const HELD: &str = "a row is held";
const BAD: &str = "a row is bad";

fn failure<T>(reason: &str) -> Result<T, sqlx::Error> {
    Err(sqlx::Error::Protocol(reason.to_owned()))
}

fn is(error: &sqlx::Error, reason: &str) -> bool {
    matches!(error, sqlx::Error::Protocol(text) if text == reason)
}

impl RowStatements for Table {
    async fn write(&mut self, kind: Kind, rows: &Rows<'_>) -> Result<Vec<Written>, sqlx::Error> {
        self.writes.push(rows.len());
        if self.refused == Some(self.writes.len()) {
            return failure("a trigger refuses the statement");
        }
        if let Some(row) = rows.iter().find(|row| self.held.contains(&row.hash)) {
            std::thread::sleep(self.waits);
            if self.commits {
                self.held.remove(&row.hash);
                let other = CallTerms::on_claim(Token::random(), Duration::from_secs(60));
                let committed = Row::row_after(row.key, &other, &Claimed::first(1, false));
                self.rows.insert(row.hash, committed);
            }
            return failure(HELD);
        }
        if rows.iter().any(|row| self.bad == Some(row.hash)) {
            return failure(BAD);
        }
        let write = rows.iter().map(|row| {
            if !kind.is_claim() {
                let misses = self.misses > 0;
                self.misses -= usize::from(misses);
                let held = RowReply::Completed(Completed::Held);
                return if misses { Written::No } else { Written::Yes(held) };
            }
            if self.rows.contains_key(&row.hash) {
                return Written::No;
            }
            let first = Claimed::first(self.attempt.max(1), false);
            self.rows.insert(row.hash, Row::row_after(row.key, row.terms, &first));
            Written::Yes(RowReply::Claimed(first))
        });
        Ok(write.collect())
    }

    async fn claim_existing(
        &mut self,
        _: Kind,
        rows: &Rows<'_>,
        _: &[i64],
    ) -> Result<Vec<Option<Claimed>>, sqlx::Error> {
        let mine = |row: &RowCall<'_>| {
            let found = self.rows.get(&row.hash)?;
            (found.token.as_ref() == Some(row.token().as_bytes())).then(|| Claimed::first(1, false))
        };
        Ok(rows.iter().map(mine).collect())
    }

    async fn read(
        &mut self,
        rows: &Rows<'_>,
        fetch: Fetch,
    ) -> Result<Vec<Option<Row>>, sqlx::Error> {
        self.reads.push((fetch, rows.len()));
        Ok(rows.iter().map(|row| self.rows.get(&row.hash).cloned()).collect())
    }
}

impl Dialect for Table {
    async fn update_by_token(
        &mut self,
        _: Kind,
        rows: &Rows<'_>,
    ) -> Result<Vec<bool>, sqlx::Error> {
        Ok(vec![true; rows.len()])
    }

    async fn forget(&mut self, rows: &Rows<'_>, _: &[i64]) -> Result<Vec<bool>, sqlx::Error> {
        self.sent_forgets += 1;
        Ok(vec![self.forgets == Some(self.sent_forgets); rows.len()])
    }

    async fn is_held_by_transaction(&mut self, row: &RowCall<'_>) -> Result<bool, sqlx::Error> {
        Ok(self.held.contains(&row.hash))
    }

    fn note_known_rows(&self, known: usize, rows: usize) {
        let mut noted = self.noted.lock().unwrap();
        let (before, of) = noted.unwrap_or_default();
        *noted = Some((before + known, of + rows));
    }

    fn error(&self, context: &'static str, error: sqlx::Error) -> Error {
        Error::new(ErrorKind::Refused, context).with_source(error)
    }

    fn is_row_error(error: &sqlx::Error) -> bool {
        is(error, HELD) || is(error, BAD)
    }

    fn is_locked(error: &sqlx::Error) -> bool {
        is(error, HELD)
    }
}
