//! What is not on the way of a delivery, and what is stored with a key.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use futures_util::future::BoxFuture;
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::super::contract::{MaintenanceAdapter, StoreFuture};
use super::super::replies::{Entry, Forgotten};
use super::super::sql::{KeptRow, Portion, StoredByKey, stored_by_key};
use super::super::stored::{Fetch, StoredData};
use super::super::terms::CallTerms;
use super::change::ROUNDS;
use super::connections::Source;
use super::rows::{Params, Places, advisory_lock, kept, row_keys, store_error};
use super::statements::Statements;
use super::store::{Inner, MAINTENANCE_TIMEOUT, PostgresAdapter};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

impl PostgresAdapter {
    /// What is stored with those of the keys that are complete.
    pub(super) async fn stored(
        &self,
        keys: Vec<DedupKey>,
        fetch: Fetch,
    ) -> Result<StoredByKey, Error> {
        let inner = self.inner();
        let read = async |keys: Vec<DedupKey>| {
            inner.with_table(|statements| Box::pin(inner.recall(statements, &keys, fetch))).await
        };
        stored_by_key(keys, fetch, read).await
    }
}

impl Inner {
    async fn recall(
        &self,
        statements: Arc<Statements>,
        keys: &[DedupKey],
        wanted: Fetch,
    ) -> Result<Vec<Option<StoredData>>, Error> {
        let fault = |error| store_error("recalling keys", error);
        let row_keys = row_keys(keys);
        let statement = statements.recall(wanted);
        let rows = self.fetch(statement, Params::Read(&row_keys)).await.map_err(fault)?;
        let mut found: Vec<Option<KeptRow>> = keys.iter().map(|_| None).collect();
        for (place, row) in Places::new(&row_keys).of_rows(rows).map_err(fault)? {
            found[place] = Some(kept(&row).map_err(fault)?);
        }
        let kept = found.into_iter();
        kept.map(|kept| kept.map(KeptRow::kept).transpose()).collect()
    }

    /// One portion of a purge, after the times of `from`.
    async fn purge(
        &self,
        statements: Arc<Statements>,
        limit: u32,
        from: Option<i64>,
    ) -> Result<Portion, Error> {
        let fault = |error| store_error("purging", error);
        let said = self.fetch(&statements.clock, Params::None).await.map_err(fault)?;
        if let Some(row) = said.first() {
            self.purging.check_clock(row.try_get(0).map_err(fault)?)?;
        }
        // Times are small beside what a float holds exactly.
        let from = from.map_or(f64::NEG_INFINITY, |from| from as f64);
        let purge = Params::Purge(i64::from(limit), from);
        let bound = self.statement_timeout().saturating_mul(6);
        let rows = self.fetch_for(bound, &statements.purge, purge).await.map_err(fault)?;
        let Some(row) = rows.first() else { return Ok(Portion { keys: 0, until: None }) };
        let keys: i64 = row.try_get(0).map_err(fault)?;
        let until = row.try_get(1).map_err(fault)?;
        Ok(Portion { keys: u64::try_from(keys).unwrap_or(0), until })
    }

    async fn count(&self, statements: Arc<Statements>) -> Result<u64, Error> {
        let fault = |error| store_error("counting keys", error);
        let rows = self.fetch_for(MAINTENANCE_TIMEOUT, &statements.count, Params::None).await;
        let rows = rows.map_err(fault)?;
        let number: i64 = rows.first().map_or(Ok(0), |row| row.try_get(0)).map_err(fault)?;
        u64::try_from(number)
            .map_err(|error| Error::new(ErrorKind::Corrupt, "counting keys").with_source(error))
    }

    /// Runs a statement on the pool that may take longer than others.
    async fn fetch_for(
        &self,
        bound: Duration,
        sql: &Arc<str>,
        params: Params<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        self.fetch_within(bound, Source::Pool, sql, params, &AtomicBool::default()).await
    }

    async fn forget(
        &self,
        statements: Arc<Statements>,
        key: &DedupKey,
    ) -> Result<Forgotten, Error> {
        let fault = |error| store_error("forgetting", error);
        let keys = std::slice::from_ref(key);
        let none = CallTerms::on_claim([0; 16].into(), Duration::ZERO);
        for _ in 0..ROUNDS {
            let direct = self.through(Source::Pool);
            let gone = direct.touch("forgetting", &statements.forget, keys, &none).await?;
            if gone == [true] {
                return Ok(Forgotten::Removed);
            }
            match self.read(keys).await?.into_iter().flatten().next() {
                None => {
                    // A transaction that runs it has a lock to show, and no row yet.
                    let locks = [advisory_lock(key)];
                    let probed = self.fetch(&statements.probe, Params::Locks(&locks));
                    let probed = probed.await.map_err(fault)?;
                    let free = probed.first().map_or(Ok(true), |row| row.try_get("free"));
                    let free = free.map_err(fault)?;
                    return Ok(if free { Forgotten::Missing } else { Forgotten::InFlight });
                }
                Some(kept) if kept.is_leased() => return Ok(Forgotten::InFlight),
                // It was written since.
                Some(_) => {}
            }
        }
        // Still changing hands after all rounds: somebody else is at it.
        Ok(Forgotten::InFlight)
    }
}

impl MaintenanceAdapter for PostgresAdapter {
    fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
        let inner = self.inner();
        let purge = move |limit, from| {
            inner.with_table(move |statements| Box::pin(inner.purge(statements, limit, from)))
        };
        Box::pin(inner.purging.purge(limit, purge))
    }

    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Forgotten> {
        let inner = self.inner();
        Box::pin(inner.with_table(move |statements| Box::pin(inner.forget(statements, key))))
    }

    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        let inner = self.inner();
        let look = move |statements: Arc<Statements>| -> BoxFuture<'_, _> {
            Box::pin(async move {
                let keys = std::slice::from_ref(key);
                let stored = inner.look(Source::Pool, &statements.look, keys).await;
                stored.map_err(|error| store_error("looking up keys", error))
            })
        };
        Box::pin(async move {
            let stored = inner.with_table(look).await?.into_iter().flatten().next();
            Ok(stored.and_then(|stored| stored.entry()))
        })
    }

    fn count(&self) -> StoreFuture<'_, u64> {
        let inner = self.inner();
        Box::pin(inner.with_table(move |statements| Box::pin(inner.count(statements))))
    }

    /// A pool of the user's stays open: it is theirs to close. The lanes' connections are closed.
    fn close(&self) -> BoxFuture<'_, ()> {
        let inner = self.inner();
        Box::pin(async move {
            inner.connections.close().await;
            if !inner.options.foreign {
                inner.connections.pool.close().await;
            }
        })
    }
}
