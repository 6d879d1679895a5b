//! Changing statements: for one caller, or for all of a batch.
//!
//! A batch waits for a lock for 25 to 250 ms, as long as recent commits suggest, and a single call for
//! 100 ms. Where an open transaction holds a row of a batch, the rows that a transaction of this crate
//! has locked are found by their advisory locks and returned as in flight. The others are sent again, in
//! parts while one of them is still held, until that one is alone.
//!
//! Why are the advisory locks not looked at first? `pg_locks` reads the lock table of the whole server,
//! and nobody takes a lock meanwhile. To take them would be worse: the lock table has room for 6,400
//! of all sessions by default, which a few processes with full batches would use up.
//!
//! A batch is sent again in parts for at most a second. After that the remaining rows are an error to
//! their callers, and not in flight, because they may be free.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::super::replies::{Claimed, Completed};
use super::super::sql::queue::BatchExecutor;
use super::super::sql::{
    self, Answers, Call, Database, Failed, Grant, Kind, PARTS, RowTerms, Rows, Taken, Told,
    completed, completed_before, open_places,
};
use super::super::terms::CallTerms;
use super::connections::Source;
use super::rows::{
    Columns, KeptColumns, Params, Places, Uuid, advisory_lock, advisory_locks, is_locked,
    is_of_a_row, row_keys, store_error,
};
use super::statements::{LOCK_TIMEOUT, Take, Write};
use super::store::Inner;
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

/// How often a key is looked at again that changed hands between two statements.
pub(super) const ROUNDS: usize = 5;
/// For how long a batch is parted to find out which of its rows somebody's open transaction holds.
const PARTING: Duration = Duration::from_secs(1);

/// Statements on the connections of one source.
pub(super) struct Through<'i> {
    inner: &'i Inner,
    source: Source,
    /// Whether a statement may have written what nobody has heard of.
    unheard: AtomicBool,
}

impl Inner {
    /// Statements on the connections of this source.
    pub(super) fn through(&self, source: Source) -> Through<'_> {
        Through { inner: self, source, unheard: AtomicBool::default() }
    }
}

impl BatchExecutor<Call> for Inner {
    type SendGuard = ();

    async fn send_guard(&self) -> Result<(), Error> {
        Ok(())
    }

    async fn execute(&self, (): (), batch: Vec<Call>) -> Vec<Result<Answers, Error>> {
        sql::carry(&self.through(Source::Lane), &batch).await
    }
}

impl Database for Through<'_> {
    /// Once something was granted, no later failure means that nothing was.
    async fn take<T: Grant + Send>(
        &self,
        kind: Kind,
        rows: &Rows<'_>,
    ) -> Result<Vec<Taken<T>>, Failed> {
        let statements = self.inner.statements();
        let take = if kind == Kind::Claim { &statements.claim } else { &statements.record };
        let mut granted = false;
        let asking = Asking::new(take, rows.len(), self.inner.storm.is_on());
        let taken = self.take_some(asking, rows, &mut granted).await;
        taken.map_err(|error| self.parted("taking keys", error, granted))
    }

    /// One statement, and more for what it has found to be there.
    async fn mixed(&self, rows: &Rows<'_>, completes: &[bool]) -> Result<Vec<Told>, Failed> {
        if self.inner.storm.is_on() {
            return sql::one_by_one(self, rows, completes).await;
        }
        let mut written = false;
        match self.mix(rows, completes, &mut written).await {
            // Each knows by itself what to do about a row that somebody's transaction holds.
            Err(error) if is_locked(&error) && !written => {
                sql::one_by_one(self, rows, completes).await
            }
            told => {
                told.map_err(|error| self.parted("claiming and completing keys", error, written))
            }
        }
    }

    async fn complete(&self, rows: &Rows<'_>) -> Result<Vec<Completed>, Failed> {
        let mut written = false;
        let completed = self.complete_all(rows, &mut written).await;
        completed.map_err(|error| self.failed("completing keys", error, written))
    }

    async fn touch(&self, kind: Kind, rows: &Rows<'_>) -> Result<Vec<bool>, Failed> {
        let statements = self.inner.statements();
        let (context, touched) = match kind {
            Kind::Renew => ("renewing leases", self.write(&statements.renew, rows).await),
            Kind::Unrecord => {
                let undone = self.fetch(&statements.unrecord, rows, false).await;
                if undone.as_ref().is_ok_and(|undone| undone.len() < rows.len()) {
                    self.check_settled().await?;
                }
                ("undoing records", undone)
            }
            _ => ("releasing keys", self.fetch(&statements.release, rows, false).await),
        };
        touched
            .map(|rows_of| among(rows, &rows_of))
            .map_err(|error| self.failed(context, error, false))
    }
}

/// What keys are taken with.
#[derive(Clone, Copy)]
struct Asking<'a> {
    take: &'a Take,
    /// How many rows were asked for together.
    of: usize,
    /// Whether to look first.
    looks: bool,
    /// When to part no more.
    until: Instant,
}

impl<'a> Asking<'a> {
    fn new(take: &'a Take, of: usize, looks: bool) -> Self {
        Self { take, of, looks, until: Instant::now() + PARTING }
    }
}

impl Through<'_> {
    async fn mix(
        &self,
        rows: &Rows<'_>,
        completes: &[bool],
        written: &mut bool,
    ) -> Result<Vec<Told>, sqlx::Error> {
        let statements = self.inner.statements();
        let mut answers: Vec<Option<Told>> = rows.keys.iter().map(|_| None).collect();
        let parted = |answers: &[Option<Told>]| -> (Vec<usize>, Vec<usize>) {
            open_places(answers).into_iter().partition(|place| completes[*place])
        };
        let (completions, claims) = parted(&answers);
        let (claims, completions) = (rows.at(&claims), rows.at(&completions));
        let (claims, kept) = (Columns::new(&claims), KeptColumns::new(&completions));
        let completions = Columns::new(&completions);
        let params = Params::Mixed(&claims, self.wait(rows), &completions, &kept);
        let answered = self.send_writing(&statements.mixed, params).await?;
        let mut fresh = 0;
        for (place, row) in Places::new(&row_keys(&rows.keys)).of_rows(answered)? {
            *written = true;
            let terms = rows.terms(place);
            answers[place] = Some(if completes[place] {
                Told::Completed(completion(&row, terms)?)
            } else {
                fresh += 1;
                let granted = Claimed::granted(1, false);
                let left = granted.left_behind(terms);
                Told::Claimed((granted, Some(left)))
            });
        }
        self.inner.plans.wrote(fresh);
        let (completions, claims) = parted(&answers);
        let of = completes.iter().filter(|completes| !**completes).count();
        if claims.is_empty() {
            self.inner.storm.saw(0, of);
        } else {
            let asking = Asking::new(&statements.claim, of, true);
            let taken = self.take_some(asking, &rows.at(&claims), written).await?;
            for (place, taken) in claims.into_iter().zip(taken) {
                answers[place] = Some(Told::Claimed(taken));
            }
        }
        if !completions.is_empty() {
            let completed = self.complete_all(&rows.at(&completions), written).await?;
            for (place, completed) in completions.into_iter().zip(completed) {
                answers[place] = Some(Told::Completed(completed));
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    async fn send(&self, sql: &Arc<str>, params: Params<'_>) -> Result<Vec<PgRow>, sqlx::Error> {
        self.inner.fetch_through(self.source, sql, params, &self.unheard).await
    }

    /// The same for one that may write, whose COMMIT shows how long others hold their rows.
    async fn send_writing(
        &self,
        sql: &Arc<str>,
        params: Params<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let start = Instant::now();
        let rows = self.send(sql, params).await?;
        if !rows.is_empty() {
            self.inner.lock_wait.saw(start.elapsed());
        }
        Ok(rows)
    }

    /// A record whose statement was given up may be waiting in its COMMIT, where nobody sees it. That
    /// it is not there would be taken for an answer, and its event be lost once it appears.
    async fn check_settled(&self) -> Result<(), Failed> {
        let bound = self.inner.statement_timeout();
        let outstanding = self.inner.connections.is_outstanding(bound).await;
        if outstanding.map_err(|error| self.failed("undoing records", error, true))? {
            let text = "undoing records: a statement that was given up is still being run";
            let error = Error::new(ErrorKind::Unavailable, text);
            return Err(Failed { error, of_a_row: false });
        }
        Ok(())
    }

    /// What a call came to nothing for, if `written` says whether it has changed something.
    fn failed(&self, context: &'static str, error: sqlx::Error, written: bool) -> Failed {
        let of_a_row = is_of_a_row(&error);
        let error = store_error(context, error);
        let written = written || self.unheard.load(Ordering::Relaxed);
        Failed { error: if written { error.unknown() } else { error }, of_a_row }
    }

    /// The same for rows that were parted already, as far as it was worth the time.
    fn parted(&self, context: &'static str, error: sqlx::Error, written: bool) -> Failed {
        let parted = is_locked(&error);
        let failed = self.failed(context, error, written);
        Failed { of_a_row: failed.of_a_row && !parted, ..failed }
    }

    /// The rows that a statement answers, each with the place of its key.
    async fn fetch(
        &self,
        sql: &Arc<str>,
        rows: &Rows<'_>,
        keeps: bool,
    ) -> Result<Vec<(usize, PgRow)>, sqlx::Error> {
        let columns = Columns::new(rows);
        let wait = self.wait(rows);
        let kept = keeps.then(|| KeptColumns::new(rows));
        let params = match &kept {
            Some(kept) => Params::Keeping(&columns, wait, kept),
            None => Params::Keys(&columns, wait),
        };
        let answered = self.send_writing(sql, params).await?;
        columns.places().of_rows(answered)
    }

    /// The same, as the plainest statement that does for so many.
    async fn write(
        &self,
        write: &Write,
        rows: &Rows<'_>,
    ) -> Result<Vec<(usize, PgRow)>, sqlx::Error> {
        if rows.len() != 1 {
            return self.fetch(&write.many, rows, write.keeps).await;
        }
        let params = Params::One(rows, self.wait(rows), write.keeps);
        let answered = self.send_writing(&write.one, params).await?;
        Ok(answered.into_iter().map(|row| (0, row)).collect())
    }

    /// How long to wait for a lock.
    fn wait(&self, rows: &Rows<'_>) -> &'static str {
        match &rows.row_terms {
            RowTerms::One(_) => LOCK_TIMEOUT,
            RowTerms::Each(_) => self.inner.lock_wait.bound(),
        }
    }

    /// Boxed, for it calls itself with a part of the rows.
    fn take_some<'a, T: Grant + Send>(
        &'a self,
        asking: Asking<'a>,
        rows: &'a Rows<'_>,
        granted: &'a mut bool,
    ) -> BoxFuture<'a, Result<Vec<Taken<T>>, sqlx::Error>> {
        Box::pin(async move {
            let mut answers: Vec<Option<Taken<T>>> = rows.keys.iter().map(|_| None).collect();
            let taken = self.take_all(asking, rows, &mut answers, granted).await;
            let open = open_places(&answers);
            match taken {
                // An open transaction holds one of them, and that is a handler's.
                Err(error) if is_locked(&error) && open.len() > 1 => {
                    if Instant::now() >= asking.until {
                        return Err(error);
                    }
                    self.take_around(asking, rows, open, &mut answers, granted).await?;
                }
                Err(error) if !is_locked(&error) => return Err(error),
                _ => {}
            }
            // Still changing hands after all rounds: somebody else is at it.
            let answers = answers.into_iter();
            Ok(answers.map(|answer| answer.unwrap_or_else(|| (T::in_flight(), None))).collect())
        })
    }

    /// Takes what no open transaction holds of the rows at these places, after the whole set has met
    /// one that does.
    async fn take_around<T: Grant + Send>(
        &self,
        asking: Asking<'_>,
        rows: &Rows<'_>,
        open: Vec<usize>,
        answers: &mut [Option<Taken<T>>],
        granted: &mut bool,
    ) -> Result<(), sqlx::Error> {
        // Transactions of ours say so with an advisory lock.
        let of_rows = match &rows.row_terms {
            // A delivery of these very keys holds some of them by a lock of all.
            RowTerms::One(_) => advisory_locks(&rows.keys),
            RowTerms::Each(_) => rows.keys.iter().map(advisory_lock).collect(),
        };
        let locks: Vec<i64> = open.iter().map(|place| of_rows[*place]).collect();
        let statements = self.inner.statements();
        let probed = self.send(&statements.probe, Params::Locks(&locks)).await?;
        let free = probed.iter().map(|row| row.try_get("free"));
        let free = free.collect::<Result<Vec<bool>, _>>()?;
        let all = open.len();
        let places: Vec<usize> =
            open.into_iter().zip(free).filter(|(_, free)| *free).map(|(place, _)| place).collect();
        // All are free, and yet: one of them is held by somebody else's transaction. Which?
        let parts = if places.len() == all { PARTS } else { 1 };
        for places in places.chunks(places.len().div_ceil(parts).max(1)) {
            let taken = self.take_some(asking, &rows.at(places), granted).await?;
            for (place, answer) in places.iter().zip(taken) {
                answers[*place] = Some(answer);
            }
        }
        Ok(())
    }

    /// Inserts what is not there, looks at what is, and takes that if it is free; looks again at
    /// what somebody else took meanwhile.
    ///
    /// What an insertion has found to be there has another statement to show it, for its own may
    /// have begun before the row was committed.
    async fn take_all<T: Grant + Send>(
        &self,
        asking: Asking<'_>,
        rows: &Rows<'_>,
        answers: &mut [Option<Taken<T>>],
        granted: &mut bool,
    ) -> Result<(), sqlx::Error> {
        let mut open: Vec<usize> = (0..rows.len()).collect();
        let Asking { take, of, mut looks, .. } = asking;
        let mut known = 0;
        for _ in 0..ROUNDS {
            let mut absent = open;
            let statements = self.inner.statements();
            if looks {
                let (mut free, mut gone) = (Vec::new(), Vec::new());
                let keys = sql::at(&rows.keys, &absent);
                let read = &statements.read;
                let stored = self.inner.look(self.source, read, &keys).await?;
                for (place, stored) in absent.into_iter().zip(stored) {
                    let Some(stored) = stored else {
                        gone.push(place);
                        continue;
                    };
                    match T::known(&stored, rows.terms(place).token()) {
                        Some(answer) => {
                            known += 1;
                            answers[place] = Some((answer, Some(stored)));
                        }
                        None => free.push(place),
                    }
                }
                if !free.is_empty() {
                    let seized =
                        self.fetch(&take.seize, &rows.at(&free), take.insert.keeps).await?;
                    for (at, row) in seized {
                        *granted = true;
                        let granted: T = grant(&row)?;
                        let left = granted.left_behind(rows.terms(free[at]));
                        answers[free[at]] = Some((granted, Some(left)));
                    }
                }
                absent = gone;
            }
            looks = true;
            if !absent.is_empty() {
                let inserted = self.write(&take.insert, &rows.at(&absent)).await?;
                self.inner.plans.wrote(inserted.len());
                for (at, _) in inserted {
                    *granted = true;
                    let granted = T::granted(1, false);
                    let left = granted.left_behind(rows.terms(absent[at]));
                    answers[absent[at]] = Some((granted, Some(left)));
                }
            }
            open = open_places(answers);
            if open.is_empty() {
                break;
            }
        }
        self.inner.storm.saw(known, of);
        Ok(())
    }

    async fn complete_all(
        &self,
        rows: &Rows<'_>,
        written: &mut bool,
    ) -> Result<Vec<Completed>, sqlx::Error> {
        let mut answers: Vec<Option<Completed>> = rows.keys.iter().map(|_| None).collect();
        for _ in 0..ROUNDS {
            let open = open_places(&answers);
            if open.is_empty() {
                break;
            }
            let asked = rows.at(&open);
            for (at, row) in self.write(&self.inner.statements().complete, &asked).await? {
                *written = true;
                answers[open[at]] = Some(completion(&row, asked.terms(at))?);
            }
            // What was complete before was not written again: was it by this token?
            let open = open_places(&answers);
            if open.is_empty() {
                break;
            }
            let keys = sql::at(&rows.keys, &open);
            let read = &self.inner.statements().read;
            let stored = self.inner.look(self.source, read, &keys).await?;
            for (place, stored) in open.into_iter().zip(stored) {
                answers[place] = completed_before(stored.as_ref(), rows.terms(place).token());
            }
        }
        Ok(answers.into_iter().map(|answer| answer.unwrap_or(Completed::LeaseLost)).collect())
    }

    /// Which of the keys a changing statement returned.
    pub(super) async fn touch(
        &self,
        context: &'static str,
        sql: &Arc<str>,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<bool>, Error> {
        let rows = Rows::one(keys, terms);
        let touched = self.fetch(sql, &rows, false).await;
        touched.map(|rows_of| among(&rows, &rows_of)).map_err(|error| store_error(context, error))
    }
}

/// Which of the keys a statement has answered.
fn among(rows: &Rows<'_>, answered: &[(usize, PgRow)]) -> Vec<bool> {
    let mut touched = vec![false; rows.len()];
    for (place, _) in answered {
        touched[*place] = true;
    }
    touched
}

/// What a row says that was completed, after its key.
fn completion(row: &PgRow, terms: &CallTerms) -> Result<Completed, sqlx::Error> {
    let attempts: i32 = row.try_get(1)?;
    let token: Option<Uuid> = row.try_get(2)?;
    Ok(completed(attempts.into(), token == Some(terms.token().into())))
}

/// What a row says that was taken, after its key.
pub(super) fn grant<T: Grant>(row: &PgRow) -> Result<T, sqlx::Error> {
    let attempts: i32 = row.try_get(1)?;
    let attempts = u32::try_from(attempts).unwrap_or_default();
    Ok(T::granted(attempts, row.try_get(2)?))
}
