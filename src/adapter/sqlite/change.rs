//! Changing statements: for one caller, or for all of a batch. Each is made in its turn.
//!
//! Whether a key is known is looked up first, on the connections that only read, so that duplicates
//! wait for no writer; only what is not known is written.
//!
//! What is written is the common case first: claims and records of keys of which there is no row,
//! completions by who holds the key. That is a statement that answers how many rows it has written.
//! If those were all, there is nothing more to ask; if not, the statement for every case is asked
//! about all of them: what a token has got already, it gets again.

use std::future::Future;
use std::sync::Arc;

use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Row};
use tokio::sync::{OwnedMutexGuard, oneshot};

use super::super::replies::Completed;
use super::super::sql::queue::{BatchExecutor, BatchItem, Batcher, Batching};
use super::super::sql::{
    self, Answers, Call, Database, Failed, Grant, Kind, RowTerms, Rows, Stored, Taken, completed,
    completed_before, open_places,
};
use super::rows::{is_of_a_row, keys_json, matched, numbers, rows_json, rows_terms, store_error};
use super::schema::Statements;
use super::store::Inner;
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

/// How often a key is looked at again that changed hands between a write and the read after it.
pub(super) const ROUNDS: usize = 4;
/// Of the four connections that read.
const READING: usize = 2;

/// What is gathered.
pub(super) struct Batchers {
    pub(super) looks: Batcher<Look>,
    pub(super) calls: Batcher<Call>,
}

impl Batchers {
    pub(super) fn new(batching: Batching) -> Self {
        Self { looks: Batcher::new(READING, batching), calls: Batcher::new(1, batching) }
    }
}

/// One caller's question what is stored of its keys.
pub(super) struct Look {
    keys: Vec<DedupKey>,
    numbers: Vec<u64>,
}

impl Look {
    pub(super) fn new(keys: &[DedupKey]) -> Self {
        Self { keys: keys.to_vec(), numbers: numbers(keys) }
    }
}

impl BatchItem for Look {
    type Reply = Vec<Option<Stored>>;

    fn can_join(&self, _: &Self) -> bool {
        true
    }

    fn key_hashes(&self) -> &[u64] {
        &self.numbers
    }

    fn allows_shared_keys(&self) -> bool {
        true
    }
}

impl BatchExecutor<Look> for Inner {
    type SendGuard = ();

    async fn send_guard(&self) -> Result<(), Error> {
        Ok(())
    }

    async fn execute(&self, (): (), batch: Vec<Look>) -> Vec<Result<Vec<Option<Stored>>, Error>> {
        let keys: Vec<DedupKey> = batch.iter().flat_map(|look| look.keys.clone()).collect();
        match self.read(&keys).await {
            Ok(stored) => {
                let mut stored = stored.into_iter();
                let mut answer = |look: &Look| stored.by_ref().take(look.keys.len()).collect();
                batch.iter().map(|look| Ok(answer(look))).collect()
            }
            Err(error) => {
                let error = error.shared();
                batch.iter().map(|_| Err(error())).collect()
            }
        }
    }
}

/// The right to write to the file.
pub(super) struct Writing<'i> {
    inner: &'i Inner,
    _turn: OwnedMutexGuard<()>,
}

impl Inner {
    /// Runs this when it is the caller's turn to write, in a task of its own: a caller may leave its
    /// future unpolled, and everybody else would wait for the turn that the future holds.
    ///
    /// A caller that goes away before its turn has changed nothing.
    pub(super) async fn in_turn<T, F>(
        self: &Arc<Self>,
        write: impl FnOnce(Arc<Self>, OwnedMutexGuard<()>) -> F + Send + 'static,
    ) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Error>> + Send,
    {
        let (mut reply, answer) = oneshot::channel();
        let inner = Arc::clone(self);
        tokio::spawn(async move {
            let turn = tokio::select! {
                turn = <Self as BatchExecutor<Call>>::send_guard(&inner) => turn,
                () = reply.closed() => return,
            };
            let written = match turn {
                Ok(turn) => write(inner, turn).await,
                Err(error) => Err(error),
            };
            // The caller may be gone.
            let _ = reply.send(written);
        });
        let ended = |_| Err(Error::new(ErrorKind::Unavailable, "writing: the runtime is ending"));
        answer.await.unwrap_or_else(ended)
    }

    pub(super) fn writing(&self, turn: OwnedMutexGuard<()>) -> Writing<'_> {
        Writing { inner: self, _turn: turn }
    }
}

impl BatchExecutor<Call> for Inner {
    type SendGuard = OwnedMutexGuard<()>;

    /// Dropped while it waits, it has changed nothing.
    async fn send_guard(&self) -> Result<Self::SendGuard, Error> {
        let turn = tokio::time::timeout(self.gate_timeout, Arc::clone(&self.turn).lock_owned());
        // Nothing was asked of the file.
        turn.await.map_err(|_| Error::new(ErrorKind::Refused, "waiting to write"))
    }

    async fn execute(
        &self,
        turn: Self::SendGuard,
        batch: Vec<Call>,
    ) -> Vec<Result<Answers, Error>> {
        sql::carry(&self.writing(turn), &batch).await
    }
}

impl Database for Writing<'_> {
    /// Writes, and reads what was there already or somebody else took meanwhile.
    async fn take<T: Grant + Send>(
        &self,
        kind: Kind,
        rows: &Rows<'_>,
    ) -> Result<Vec<Taken<T>>, Failed> {
        let statements = self.statements(rows);
        let sql = if kind == Kind::Claim { &statements.claim } else { &statements.record };
        let mut answers: Vec<Option<Taken<T>>> = rows.keys.iter().map(|_| None).collect();
        let fault = |written: bool| move |error| failed("taking keys", error, written);
        // Once a round has written, no later failure means that nothing was recorded.
        let mut written = false;
        let (new, keeps) = match kind {
            // What a claim carries is kept by its completion.
            Kind::Claim => (&statements.claim_new, false),
            _ => (&statements.record_new, rows.keeps()),
        };
        if !keeps && !self.inner.some_are_there() {
            let inserted = self.changed(new, rows).await.map_err(fault(false))?;
            if inserted == rows.len() {
                let all = (0..rows.len()).map(|place| {
                    let granted = T::granted(1, false);
                    let left = granted.left_behind(rows.terms(place));
                    (granted, Some(left))
                });
                return Ok(all.collect());
            }
            written = inserted > 0;
        }
        for _ in 0..ROUNDS {
            let free = open_places(&answers);
            let asked = rows.at(&free);
            let granted = self.write(sql, &asked).await.map_err(fault(written))?;
            written |= !granted.is_empty();
            for (at, row) in matched(&asked.keys, &granted).map_err(fault(written))? {
                let granted: T = grant(row).map_err(fault(written))?;
                let left = granted.left_behind(rows.terms(free[at]));
                answers[free[at]] = Some((granted, Some(left)));
            }
            let open = open_places(&answers);
            if open.is_empty() {
                break;
            }
            let stored = self.inner.read(&rows.at(&open).keys).await;
            let stored = stored.map_err(|error| after(error, written))?;
            for (place, stored) in open.into_iter().zip(stored) {
                let known =
                    stored.as_ref().and_then(|stored| T::known(stored, rows.terms(place).token()));
                answers[place] = known.map(|known| (known, stored));
            }
            if answers.iter().all(Option::is_some) {
                break;
            }
        }
        // Still changing hands after all rounds: somebody else is at it.
        let answers = answers.into_iter();
        Ok(answers.map(|answer| answer.unwrap_or_else(|| (T::in_flight(), None))).collect())
    }

    async fn complete(&self, rows: &Rows<'_>) -> Result<Vec<Completed>, Failed> {
        let fault = |written: bool| move |error| failed("completing keys", error, written);
        let statements = self.statements(rows);
        let mut written = false;
        if !rows.keeps() {
            let held = self.changed(&statements.complete_held, rows).await;
            let held = held.map_err(fault(false))?;
            if held == rows.len() {
                return Ok(vec![Completed::Held; held]);
            }
            written = held > 0;
        }
        let mut answers: Vec<Option<Completed>> = rows.keys.iter().map(|_| None).collect();
        for _ in 0..ROUNDS {
            let open = open_places(&answers);
            if open.is_empty() {
                break;
            }
            let asked = rows.at(&open);
            let done = self.write(&statements.complete, &asked).await.map_err(fault(written))?;
            written |= !done.is_empty();
            for (at, row) in matched(&asked.keys, &done).map_err(fault(written))? {
                let attempts: i64 = row.try_get("attempts").map_err(fault(written))?;
                let token: Option<Vec<u8>> = row.try_get("token").map_err(fault(written))?;
                let held = token.as_deref() == Some(asked.terms(at).token().as_bytes());
                answers[open[at]] = Some(completed(attempts, held));
            }
            // What was complete before was not written again: was it by this token?
            let open = open_places(&answers);
            if open.is_empty() {
                break;
            }
            let stored = self.inner.read(&rows.at(&open).keys).await;
            let stored = stored.map_err(|error| after(error, written))?;
            for (place, stored) in open.into_iter().zip(stored) {
                answers[place] = completed_before(stored.as_ref(), rows.terms(place).token());
            }
        }
        Ok(answers.into_iter().map(|answer| answer.unwrap_or(Completed::LeaseLost)).collect())
    }

    async fn touch(&self, kind: Kind, rows: &Rows<'_>) -> Result<Vec<bool>, Failed> {
        let statements = self.statements(rows);
        match kind {
            Kind::Renew => self.returned("renewing leases", &statements.renew, rows).await,
            Kind::Unrecord => self.returned("undoing records", &statements.unrecord, rows).await,
            _ => self.returned("releasing keys", &statements.release, rows).await,
        }
    }
}

impl Writing<'_> {
    fn statements(&self, rows: &Rows<'_>) -> &Statements {
        match rows.row_terms {
            RowTerms::One(_) => &self.inner.statements,
            RowTerms::Each(_) => &self.inner.batched,
        }
    }

    /// One changing statement. Answers the rows that it returned.
    ///
    /// Dropped, it runs to its end on the connection's own thread, and the outcome is unknown.
    async fn write(&self, sql: &Arc<str>, rows: &Rows<'_>) -> Result<Vec<SqliteRow>, sqlx::Error> {
        let query = sqlx::query(AssertSqlSafe(Arc::clone(sql))).bind(rows_json(rows));
        let query = match rows.row_terms {
            RowTerms::One(terms) => query
                .bind(terms.token().as_bytes().to_vec())
                .bind(terms.retention_ms())
                .bind(terms.lease_ms()),
            RowTerms::Each(_) => query,
        };
        // All rows: SQLite commits at the end of the statement, after it has returned them.
        query.fetch_all(&self.inner.writer).await
    }

    /// One changing statement that returns no rows. Answers how many it has written.
    async fn changed(&self, sql: &Arc<str>, rows: &Rows<'_>) -> Result<usize, sqlx::Error> {
        let query = sqlx::query(AssertSqlSafe(Arc::clone(sql)));
        let query = query.bind(keys_json(&rows.keys)).bind(rows_terms(rows));
        let done = query.execute(&self.inner.writer).await?;
        // Never more than there are keys.
        Ok(usize::try_from(done.rows_affected()).unwrap_or(usize::MAX))
    }

    /// Which of the keys a changing statement returned.
    pub(super) async fn returned(
        &self,
        context: &'static str,
        sql: &Arc<str>,
        rows: &Rows<'_>,
    ) -> Result<Vec<bool>, Failed> {
        let fault = |error| failed(context, error, false);
        let returned = self.write(sql, rows).await.map_err(fault)?;
        let mut touched = vec![false; rows.len()];
        for (place, _) in matched(&rows.keys, &returned).map_err(fault)? {
            touched[place] = true;
        }
        Ok(touched)
    }
}

fn failed(context: &'static str, error: sqlx::Error, written: bool) -> Failed {
    let of_a_row = is_of_a_row(&error);
    Failed { of_a_row, ..after(store_error(context, error), written) }
}

/// Something that went wrong after a row was written, or before.
fn after(error: Error, written: bool) -> Failed {
    Failed { error: if written { error.unknown() } else { error }, of_a_row: false }
}

/// What a row says that was taken.
pub(super) fn grant<T: Grant>(row: &SqliteRow) -> Result<T, sqlx::Error> {
    let attempts: i64 = row.try_get("attempts")?;
    let attempts = u32::try_from(attempts).unwrap_or(u32::MAX);
    Ok(T::granted(attempts, row.try_get("takeover")?))
}
