//! The purge of a file: a walk through the primary key, which is the table's physical order.
//!
//! 1. A step reads [`PORTION`] rows on the connections that only read. Only its deletion takes the write
//!    lock, for the keys that it found: a step that finds none holds up no writer.
//! 2. The walk's range is fixed before its rows are read. A key that is inserted beside the walk is not
//!    expired.
//! 3. A round over more than one portion begins at a random prefix of the ids, and ends there.

use std::sync::Arc;

use sqlx::AssertSqlSafe;

use super::super::inspection::{Purged, Stats};
use super::super::sql::purge::Step;
use super::errors::store_error;
use super::inspection::read_place;
use super::place::{Place, Walk};
use super::sample::Sample;
use super::store::SqliteStore;
use crate::error::Error;

const PURGING: &str = "purging";
/// How many rows a step reads.
const PORTION: u32 = 20_000;

impl SqliteStore {
    /// Does one step: see [`purge`](super::super::contract::MaintenanceAdapter::purge). With
    /// `lets_go_first`, every other writer of this process goes first.
    pub(super) async fn purge(
        self: &Arc<Self>,
        limit: u32,
        lets_go_first: bool,
    ) -> Result<Purged, Error> {
        let step = move |walk| self.step(limit, walk, lets_go_first);
        self.purge_state.purge(limit, step).await
    }

    async fn step(
        self: &Arc<Self>,
        limit: u32,
        walk: Option<Walk>,
        lets_go_first: bool,
    ) -> Result<Step<Walk>, Error> {
        let fault = |error| store_error(PURGING, error);
        let clock = AssertSqlSafe(Arc::clone(&self.statements.clock));
        let clock = sqlx::query_scalar(clock).fetch_one(&self.readers).await.map_err(fault)?;
        self.purge_state.check_clock(clock)?;
        let walk = match walk {
            Some(walk) => walk,
            None => self.begin_round().await.map_err(fault)?,
        };
        let last = if walk.has_wrapped { walk.begun_at.clone() } else { Place::end() };
        let next = self.key_at(&walk.at, &last, PORTION).await.map_err(fault)?;
        let end = next.as_ref().unwrap_or(&last);
        let found = self.in_range(&self.statements.purge_find, &walk.at, end).bind(limit);
        let found = found.fetch_all(&self.readers).await.map_err(fault)?;
        let found: Result<Vec<Place>, _> = found.iter().map(read_place).collect();
        let found = found.map_err(fault)?;
        // Then there may be more in this range.
        let is_full =
            !found.is_empty() && found.len() >= usize::try_from(limit).unwrap_or(usize::MAX);
        let deleted = if found.is_empty() {
            0
        } else if lets_go_first {
            let _guard = self.free_write_lock().await?;
            self.delete(found).await?
        } else {
            self.write_in_task(|store, _guard| async move { store.delete(found).await }).await?
        };
        if is_full {
            let left = Stats::default();
            return Ok(Step { at: walk.clone(), deleted, left, next: Some(walk) });
        }
        let mut left = self.count(&walk.at, end, u32::MAX).await.map_err(fault)?;
        left.bytes = self.bytes().await.map_err(fault)?;
        let at = walk.clone();
        let next = match next {
            Some(at) => Some(Walk { at, ..walk }),
            None if walk.has_wrapped || walk.begun_at == Place::default() => None,
            None => Some(Walk { at: Place::default(), has_wrapped: true, ..walk }),
        };
        Ok(Step { at, deleted, left, next })
    }

    async fn begin_round(&self) -> Result<Walk, sqlx::Error> {
        let (start, end) = (Place::default(), Place::end());
        let at = match self.key_at(&start, &end, PORTION).await? {
            Some(_) => Sample::new(self).place().await?,
            None => start,
        };
        Ok(Walk { begun_at: at.clone(), at, has_wrapped: false })
    }

    /// Deletes keys, under the write lock.
    async fn delete(&self, keys: Vec<Place>) -> Result<u64, Error> {
        let keys: Vec<_> = keys.into_iter().map(|key| (key.namespace, key.id)).collect();
        // Strings always serialize.
        let keys = serde_json::to_string(&keys).unwrap_or_default();
        let delete = sqlx::query(AssertSqlSafe(Arc::clone(&self.statements.purge))).bind(keys);
        let done = delete.execute(&self.writer).await;
        Ok(done.map_err(|error| store_error(PURGING, error))?.rows_affected())
    }
}
