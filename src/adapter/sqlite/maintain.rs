//! What operators and the purger do with the file.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::BoxFuture;
use sqlx::AssertSqlSafe;

use super::super::contract::{MaintenanceAdapter, StoreFuture};
use super::super::replies::{Entry, Forgotten};
use super::super::sql::{Portion, Rows};
use super::super::terms::CallTerms;
use super::change::ROUNDS;
use super::rows::store_error;
use super::store::{Inner, SqliteAdapter};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

impl MaintenanceAdapter for SqliteAdapter {
    fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
        let delete = |limit, from| {
            self.inner().in_turn(move |inner, _turn| async move { inner.purge(limit, from).await })
        };
        Box::pin(async move { self.with_table(|| self.inner().purging.purge(limit, delete)).await })
    }

    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Forgotten> {
        Box::pin(async move { self.with_table(|| self.forget_once(key)).await })
    }

    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        Box::pin(async move {
            let stored = self.with_table(|| self.inner().read(std::slice::from_ref(key))).await?;
            Ok(stored.into_iter().flatten().next().and_then(|stored| stored.entry()))
        })
    }

    fn count(&self) -> StoreFuture<'_, u64> {
        Box::pin(async move {
            let count = || async {
                sqlx::query_scalar(AssertSqlSafe(Arc::clone(&self.inner().statements.count)))
                    .fetch_one(&self.inner().readers)
                    .await
                    .map_err(|error| store_error("counting keys", error))
            };
            let keys: i64 = self.with_table(count).await?;
            let corrupt =
                |error| Error::new(ErrorKind::Corrupt, "counting keys").with_source(error);
            u64::try_from(keys).map_err(corrupt)
        })
    }

    /// A pool of the user's stays open: it is theirs to close.
    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.inner().closed.store(true, Ordering::Release);
            if !self.inner().foreign {
                self.inner().readers.close().await;
                self.inner().writer.close().await;
            }
        })
    }
}

impl SqliteAdapter {
    async fn forget_once(&self, key: &DedupKey) -> Result<Forgotten, Error> {
        let inner = self.inner();
        for _ in 0..ROUNDS {
            let keys = [key.clone()];
            let gone = inner.in_turn(move |inner, turn| async move {
                let none = CallTerms::on_claim([0; 16].into(), Duration::ZERO);
                let (rows, statement) = (Rows::one(&keys, &none), &inner.statements.forget);
                let gone = inner.writing(turn).returned("forgetting", statement, &rows).await;
                gone.map_err(|failed| failed.error)
            });
            if gone.await? == [true] {
                return Ok(Forgotten::Removed);
            }
            match inner.read(std::slice::from_ref(key)).await?.into_iter().flatten().next() {
                None => return Ok(Forgotten::Missing),
                Some(kept) if kept.is_leased() => return Ok(Forgotten::InFlight),
                // It was written since.
                Some(_) => {}
            }
        }
        // Still changing hands after all rounds: somebody else is at it.
        Ok(Forgotten::InFlight)
    }
}

impl Inner {
    /// One portion of a purge, in its turn.
    async fn purge(&self, limit: u32, from: Option<i64>) -> Result<Portion, Error> {
        let fault = |error| store_error("purging", error);
        let clock: i64 = sqlx::query_scalar(AssertSqlSafe(Arc::clone(&self.statements.clock)))
            .fetch_one(&self.writer)
            .await
            .map_err(fault)?;
        self.purging.check_clock(clock)?;
        let gone: Vec<i64> = sqlx::query_scalar(AssertSqlSafe(Arc::clone(&self.statements.purge)))
            .bind(i64::from(limit))
            .bind(from.unwrap_or(i64::MIN))
            .fetch_all(&self.writer)
            .await
            .map_err(fault)?;
        Ok(Portion { keys: gone.len() as u64, until: gone.into_iter().max() })
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::contract::{DedupAdapter, PURGE_GRACE};
    use super::super::super::sql::Identifier;
    use super::super::super::terms::Token;
    use super::super::schema::{Asks, Statements};
    use super::*;

    /// Sets the clock of the statements that purge ahead.
    fn set_ahead(adapter: &mut SqliteAdapter, seconds: u32) {
        let inner = Arc::get_mut(&mut adapter.0).expect("nothing is under way");
        let clock = Statements::new(&Identifier::default_table(), Asks::One);
        let ahead = |sql: &str| {
            let now = "unixepoch('subsec')";
            assert!(sql.contains(now));
            sql.replace(now, &format!("({now} + {seconds})")).into()
        };
        inner.statements.clock = ahead(&clock.clock);
        inner.statements.purge = ahead(&clock.purge);
    }

    #[tokio::test]
    async fn purge_is_refused_while_the_clock_has_jumped() {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", dir.path().join("dedup.db").display());
        let mut adapter = SqliteAdapter::connect(&url).await.unwrap();
        let day = CallTerms::on_claim(Token::random(), 24 * PURGE_GRACE);
        adapter.claim(&[DedupKey::new("n", "a").unwrap()], &day).await.unwrap();
        assert_eq!(adapter.purge(10).await.unwrap(), 0);
        set_ahead(&mut adapter, 30 * 86_400);
        for _ in 0..2 {
            let refused = adapter.purge(10).await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Refused);
        }
        assert_eq!(adapter.count().await.unwrap(), 1);
        set_ahead(&mut adapter, 0);
        assert_eq!(adapter.purge(10).await.unwrap(), 0);
        assert_eq!(adapter.count().await.unwrap(), 1);
    }
}
