//! The calls of operators.

use std::sync::Arc;
use std::time::Duration;

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::super::inspect::{Entry, ForgetReply, KeyState, ListFilter, Listing, Stats};
use super::super::sql::batch::TRIES;
use super::super::sql::inspection::{listing, stats};
use super::super::sql::row::{Columns as _, Row};
use super::super::sql::store::SqlMaintenance;
use super::super::stored::Fetch;
use super::abandoned::Work;
use super::connections::Fetched;
use super::errors::{is_locked, store_error};
use super::params::{Bound, Uuid, key_hash, read_row};
use super::store::PostgresStore;
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;

const READ: (Work, u32) = (Work::Read, 1);
/// A statement over many rows has six times as long as another.
const LONG_READ: (Work, u32) = (Work::Read, 6);

impl SqlMaintenance for PostgresStore {
    async fn purge(self: &Arc<Self>, limit: u32) -> Result<u64, StoreError> {
        let fault = |error| store_error("purging", error);
        let bind = |query: Bound| query.bind(i64::from(limit));
        let purged = self.fetch((Work::DurableWrite, 6), &self.statements().purge, &bind).await;
        let rows = purged.map_err(fault)?.rows;
        rows.first().map_or(Ok(0), |row| row.count("count")).map_err(fault)
    }

    async fn stats(&self) -> Result<Stats, StoreError> {
        let (statements, fault) =
            (self.statements(), |error| store_error("reading statistics", error));
        let size = self.fetch(READ, &statements.size, &|query| query).await.map_err(fault)?.rows;
        let rows =
            self.fetch(LONG_READ, &statements.stats, &|query| query).await.map_err(fault)?.rows;
        let (Some(size), Some(row)) = (size.first(), rows.first()) else {
            return Ok(Stats::default());
        };
        let bytes = size.count("bytes").map_err(fault)?;
        let mut stats = Stats { bytes: Some(bytes), ..stats(row).map_err(fault)? };
        if !stats.is_exact {
            // Nearly all of the rows that were not counted are complete.
            let more = size.count("rows").map_err(fault)?.saturating_sub(stats.rows);
            stats.rows += more;
            stats.complete += more;
        }
        Ok(stats)
    }

    async fn list(
        &self,
        filter: &ListFilter,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Listing, StoreError> {
        // With 0, the list would never end.
        let limit = limit.max(1);
        // No key is 0: it is a part of a SHA-256.
        let after = after.map_or(Ok(Uuid([0; 16])), read_cursor)?;
        let bind = |query: Bound| {
            query
                .bind(after)
                .bind(filter.state.map(state_number))
                .bind(filter.namespace.as_deref())
                .bind(filter.since.map(since_ms))
                .bind(filter.attempts_over.map(i64::from))
                .bind(filter.id_part.as_deref())
                .bind(i64::from(limit))
        };
        let cursor = |row: &PgRow| Ok(row.try_get::<Uuid, _>("key")?.to_string());
        let listed = self.fetch(LONG_READ, &self.statements().list, &bind).await;
        listed
            .and_then(|it| listing(&it.rows, limit, cursor, |row| read_row(row, Fetch::Nothing)))
            .map_err(|error| store_error("listing keys", error))
    }

    /// Reads a key on any server.
    async fn get(&self, key: &DedupKey) -> Result<Option<Entry>, StoreError> {
        let (fault, hash) = (|error| store_error("looking up a key", error), key_hash(key));
        let bind = |query: Bound| query.bind(Uuid::from(hash));
        let rows = self.fetch(READ, &self.statements().get, &bind).await.map_err(fault)?.rows;
        if let Some(row) = rows.first() {
            let event_type = row.text("event_type").map_err(fault)?;
            if let Some(entry) = read_row(row, Fetch::DigestAndResponse).entry(event_type)? {
                return Ok(Some(entry));
            }
        }
        Ok(None)
    }

    /// Forgets a key, unless a live lease or an open transaction holds it.
    async fn forget(self: &Arc<Self>, key: &DedupKey) -> Result<ForgetReply, StoreError> {
        const CONTEXT: &str = "forgetting a key";
        let fault = |error| store_error(CONTEXT, error);
        let (statements, hash) = (self.statements(), key_hash(key));
        for _ in 0..TRIES {
            let row = self.read_key(hash, Fetch::Nothing).await.map_err(fault)?;
            if let Some(reply) = row.as_ref().map_or(Some(ForgetReply::Missing), Row::forgotten) {
                return Ok(reply);
            }
            let version = row.map_or(0, |row| row.version);
            let bind = |query: Bound| query.bind(Uuid::from(hash)).bind(version);
            let forgotten = self.fetch((Work::DurableWrite, 1), &statements.forget, &bind).await;
            if forgotten.as_ref().is_err_and(is_locked) {
                return Ok(ForgetReply::InFlight);
            }
            let Fetched { rows, lost_reply } = forgotten.map_err(fault)?;
            if !rows.is_empty() {
                self.connections.senders.succeeded(Work::DurableWrite);
                return Ok(ForgetReply::Removed);
            }
            // The lost try may have written the row, or another call has.
            if lost_reply {
                return Err(StoreError::new(StoreErrorKind::Unavailable, CONTEXT));
            }
        }
        Ok(ForgetReply::InFlight)
    }
}

impl PostgresStore {
    /// Reads a row, on a primary only.
    pub(super) async fn read_key(
        &self,
        hash: u128,
        fetch: Fetch,
    ) -> Result<Option<Row>, sqlx::Error> {
        let (statements, keys) = (self.statements(), [Uuid::from(hash)]);
        let bind = |query: Bound| query.bind(&keys[..]);
        let rows = self.fetch(READ, statements.read(fetch), &bind).await?.rows;
        Ok(rows.first().map(|row| read_row(row, fetch)))
    }
}

/// Reads a cursor: the last key, as 32 hexadecimal digits.
fn read_cursor(cursor: &str) -> Result<Uuid, StoreError> {
    let key = u128::from_str_radix(cursor, 16).map(Uuid::from).ok();
    key.filter(|key| key.to_string() == cursor).ok_or_else(|| {
        StoreError::new(StoreErrorKind::Refused, "listing keys: the cursor is not of this store")
    })
}

/// Returns the number of a state in `sql/state.sql`.
fn state_number(state: KeyState) -> i32 {
    match state {
        KeyState::InFlight => 1,
        KeyState::Lapsed => 2,
        KeyState::Released => 3,
        KeyState::Complete => 4,
    }
}

/// Returns a time before now that a `timestamptz` can hold: a thousand years at most.
fn since_ms(since: Duration) -> i64 {
    const MAX_MS: i64 = 1_000 * 365 * 86_400_000;
    i64::try_from(since.as_millis()).map_or(MAX_MS, |ms| ms.min(MAX_MS))
}
