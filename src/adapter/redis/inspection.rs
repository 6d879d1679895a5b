//! The calls of operators: `forget`, entries, lists and statistics.
//!
//! 1. A list goes through the primaries in the order of their addresses, and through the keys of
//!    each by `SCAN`. `SCAN` returns every key that is there all the time.
//! 2. One step of `SCAN` may return more keys than the portion has place for. The cursor then names
//!    the keys that are left.
//! 3. A cursor of a primary that is gone is refused. If a primary restarts or a slot moves during a
//!    list, keys may be absent or occur twice.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures_util::future::{BoxFuture, ready};
use futures_util::{StreamExt, TryStreamExt, stream};
use redis::{FromRedisValue, Value};

use super::super::contract::StoreFuture;
use super::super::maintenance::{
    Entry, ForgetReply, ListFilter, Listing, MaintenanceAdapter, Stats,
};
use super::super::stored::Fetch;
use super::adapter::{RedisAdapter, unreadable};
use super::errors::Failure;
use super::key_names;
use super::row::RedisRow;
use super::slot::Live;
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;

/// The operation, for error texts.
const READING: &str = "reading keys";

/// How many rows are read at once.
const MAX_CONCURRENT: usize = 64;
/// How many keys one call of a list visits, about.
const PORTION: usize = 20_000;
/// How many keys of a primary are counted one by one.
const MAX_COUNTED: usize = 100_000;
/// How many keys one step visits.
const STEP: usize = 1_000;

/// Where a list continues, as JSON: the primary, the position of `SCAN` (`None` after the last
/// one), and the keys of Redis that the step before has returned in excess.
type Cursor = (String, Option<u64>, Vec<String>);

/// A key of Redis, the event's key, and its row; `None` for an unreadable one.
type FoundKey = (String, DedupKey, Option<RedisRow>);

impl MaintenanceAdapter for RedisAdapter {
    /// Deletes nothing, because Redis deletes each key by itself, `PURGE_GRACE` after it has
    /// expired.
    fn purge(&self, _limit: u32) -> StoreFuture<'_, u64> {
        let closed = || Failure::Closed.into_error("purging keys");
        let purged = if self.0.is_closed() { Err(closed()) } else { Ok(0) };
        Box::pin(ready(purged))
    }

    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, ForgetReply> {
        Box::pin(self.forget_key(key))
    }

    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        Box::pin(async move {
            let bound = self.0.bound("reading a key");
            let row = self.row(&self.name(key), Fetch::DigestAndResponse, bound).await?;
            Ok(row.and_then(|row| row.entry))
        })
    }

    /// Reads 64 keys at once.
    fn get_many<'a>(&'a self, keys: &'a [DedupKey]) -> StoreFuture<'a, Vec<Option<Entry>>> {
        Box::pin(async move {
            let read = async |name: String| {
                let row = self.row(&name, Fetch::Nothing, self.0.bound(READING)).await?;
                Ok(row.and_then(|row| row.entry).map(|entry| Entry { stored: None, ..entry }))
            };
            let names: Vec<_> = keys.iter().map(|key| self.name(key)).collect();
            stream::iter(names).map(read).buffered(MAX_CONCURRENT).try_collect().await
        })
    }

    /// Reads keys by `SCAN`, which visits every key of the database, those of other programs too. A
    /// call visits at most about 20,000 keys.
    fn list<'a>(
        &'a self,
        filter: &'a ListFilter,
        after: Option<&'a str>,
        limit: u32,
    ) -> StoreFuture<'a, Listing> {
        Box::pin(async move {
            let primaries = self.primaries().await?;
            let (mut primary, mut scan, mut names) = match after {
                // The first primary is the next one.
                None => Cursor::default(),
                Some(cursor) => {
                    let read: Option<Cursor> = serde_json::from_str(cursor).ok();
                    let is_valid = |read: &Cursor| {
                        text(read) == cursor
                            && primaries.iter().any(|(address, _)| *address == read.0)
                    };
                    read.filter(is_valid).ok_or_else(|| {
                        StoreError::new(StoreErrorKind::Refused, "listing keys after a cursor")
                    })?
                }
            };
            // With 0, the list would never end.
            let limit = usize::try_from(limit.max(1)).unwrap_or(usize::MAX);
            let (mut listing, mut visited, mut left) = (Listing::default(), 0, Vec::new());
            loop {
                for (name, key, row) in self.rows(names, filter.id_part.as_deref()).await? {
                    match row.map(|row| selected(filter, row)) {
                        None => listing.unreadable += 1,
                        Some(None) => {}
                        Some(Some(_)) if listing.keys.len() == limit => left.push(name),
                        Some(Some(entry)) => listing.keys.push((key, entry)),
                    }
                }
                if scan.is_none() && left.is_empty() {
                    let next = primaries.iter().find(|(address, _)| *address > primary);
                    let Some((address, _)) = next else { return Ok(listing) };
                    (primary, scan) = (address.clone(), Some(0));
                }
                if visited >= PORTION || listing.keys.len() == limit {
                    break;
                }
                let step = (limit - listing.keys.len()).clamp(10, STEP);
                visited += step;
                let (position, namespace) = (scan.unwrap_or(0), filter.namespace.as_deref());
                let (next, found) = self.scan(&primary, position, namespace, step).await?;
                (scan, names) = ((next != 0).then_some(next), found);
            }
            listing.next = Some(text(&(primary, scan, left)));
            Ok(listing)
        })
    }

    /// Reads up to 100,000 keys of each primary by `SCAN` and `GET`: several seconds. If a primary
    /// has more keys, those of other programs included, the numbers are estimated by its `DBSIZE`.
    /// The size in bytes is not known.
    fn stats(&self) -> StoreFuture<'_, Stats> {
        Box::pin(async move {
            let mut stats = Stats { is_exact: true, ..Stats::default() };
            for (address, size) in self.primaries().await? {
                self.add_stats_of(&mut stats, &address, size).await?;
            }
            Ok(stats)
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move { self.0.close() })
    }
}

impl RedisAdapter {
    /// Adds the statistics of a primary with this number of keys.
    async fn add_stats_of(
        &self,
        stats: &mut Stats,
        address: &str,
        size: u64,
    ) -> Result<(), StoreError> {
        // In a small database a key could be visited twice while it is resized.
        let (mut position, mut visited, mut names) = (0, 0, BTreeSet::new());
        let is_exact = loop {
            let (next, found) = self.scan(address, position, None, STEP).await?;
            visited += STEP.max(found.len());
            names.extend(found);
            position = next;
            if position == 0 || visited >= MAX_COUNTED {
                break position == 0;
            }
        };
        let mut part = Stats::default();
        for (_, _, row) in self.rows(names, None).await? {
            // An unreadable row is counted without a state.
            part.rows += 1;
            if let Some(row) = row {
                part.count(row.entry.map(|entry| entry.state), row.age);
            }
        }
        stats.is_exact &= is_exact;
        stats.add(part, |keys| {
            let scaled = u128::from(keys) * u128::from(size) / visited as u128;
            if is_exact { keys } else { u64::try_from(scaled).unwrap_or(u64::MAX) }
        });
        Ok(())
    }

    /// Returns the addresses of the primaries, in their order, and the number of keys of each.
    async fn primaries(&self) -> Result<Vec<(String, u64)>, StoreError> {
        let mut primaries = Vec::new();
        for (address, reply) in self.ask_primaries(&redis::cmd("DBSIZE"), READING).await? {
            primaries.push((address, read(reply?)?));
        }
        primaries.sort();
        Ok(primaries)
    }

    /// Takes a step of `SCAN` on a primary. Returns the next position, 0 at the end, and keys of
    /// Redis. A key that is not UTF-8 is not of this crate.
    async fn scan(
        &self,
        address: &str,
        position: u64,
        namespace: Option<&str>,
        step: usize,
    ) -> Result<(u64, Vec<String>), StoreError> {
        let mut scan = redis::cmd("SCAN");
        scan.arg(position).arg("MATCH").arg(key_names::pattern(&self.0.options.prefix, namespace));
        // Keys of another type are not of this crate.
        scan.arg("COUNT").arg(step).arg("TYPE").arg("string");
        let scan = &scan;
        let send = |live: Arc<Live>| async move { Ok(live.main.ask(address, scan).await?) };
        let reply = self.0.repeat(self.0.bound(READING), send).await?;
        let (next, names): (_, Vec<Vec<u8>>) = read(reply)?;
        let names: BTreeSet<_> =
            names.into_iter().filter_map(|name| String::from_utf8(name).ok()).collect();
        Ok((next, names.into_iter().collect()))
    }

    /// Reads the rows of the keys of Redis that are of this crate, some at once, without their
    /// stored data, which may be large. A key that is gone is left out.
    async fn rows(
        &self,
        names: impl IntoIterator<Item = String>,
        id_part: Option<&str>,
    ) -> Result<Vec<FoundKey>, StoreError> {
        let keys = names.into_iter().filter_map(|name| {
            let key = key_names::key(&self.0.options.prefix, &name)?;
            id_part.is_none_or(|part| key.id().contains(part)).then_some((name, key))
        });
        let read = async |(name, key): (String, DedupKey)| match self
            .row(&name, Fetch::Nothing, self.0.bound(READING))
            .await
        {
            Err(error) if error.kind() == StoreErrorKind::Corrupt => Ok(Some((name, key, None))),
            row => Ok(row?.map(|row| (name, key, Some(row)))),
        };
        let found = stream::iter(keys.collect::<Vec<_>>()).map(read).buffered(MAX_CONCURRENT);
        found.try_filter_map(async |found| Ok(found)).try_collect().await
    }
}

/// Returns the text of a cursor.
fn text(cursor: &Cursor) -> String {
    // Texts and numbers always serialize.
    serde_json::to_string(cursor).unwrap_or_default()
}

fn read<T: FromRedisValue>(reply: Value) -> Result<T, StoreError> {
    redis::from_redis_value(reply).map_err(|_| unreadable(READING))
}

/// Returns the entry of a row without its stored data, if the filter selects it.
fn selected(filter: &ListFilter, row: RedisRow) -> Option<Entry> {
    let entry = row.entry?;
    let is_selected = filter.state.is_none_or(|state| state == entry.state)
        && filter.since.is_none_or(|since| row.since_first_seen <= since)
        && filter.attempts_over.is_none_or(|attempts| entry.attempts > attempts);
    is_selected.then_some(Entry { stored: None, ..entry })
}
