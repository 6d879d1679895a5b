//! Lists and statistics of a file, for operators.
//!
//! 1. They read on the connections that only read, and wait for no writer.
//! 2. A portion of a list is a range of the primary key. The range is fixed before its rows are read, so
//!    that writes beside the list skip no key that they do not touch.
//! 3. Up to [`MAX_COUNTED`] rows are counted one by one. Of more rows, a sample is counted.
//!
//! # The sample
//!
//! SQLite returns no row by its number, and ids are texts of any form, so a random key is not at hand. The
//! sample walks down the tree of the ids' prefixes instead (Knuth's estimate of the size of a tree):
//!
//! 1. At a prefix, the ids fall into groups by their next character. A group of at most [`MAX_GROUP`]
//!    rows is counted.
//! 2. One of the larger groups is chosen, and stands for all of them: its rows weigh as much more. The
//!    walk goes on in this group, until no larger group is left.
//! 3. Each namespace with more than [`MAX_NAMESPACE`] rows is walked several times, and the mean of the
//!    walks is taken. The walks choose the groups of a prefix in turn.
//!
//! The mean is the right one whatever the ids look like. The spread depends on how evenly the groups of a
//! prefix are filled.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use rand::seq::SliceRandom as _;
use sqlx::query::Query;
use sqlx::sqlite::{Sqlite, SqliteArguments, SqliteRow};
use sqlx::{AssertSqlSafe, Row as _};

use super::super::inspection::{Cursor, ListFilter, Listing, Stats};
use super::super::stored::Fetch;
use super::errors::store_error;
use super::params::{read_labels, read_row};
use super::place::Place;
use super::store::SqliteStore;
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

const READING: &str = "reading statistics";
const LISTING: &str = "listing keys";
/// How many rows one call of a list reads at most.
const PORTION: u32 = 20_000;
/// How many rows are counted one by one.
const MAX_COUNTED: u32 = 100_000;
const MAX_NAMESPACE: u32 = 1_000;
const MAX_GROUP: u32 = 50;
/// How many namespaces and how many groups of a prefix are told apart.
const MAX_NAMESPACES: usize = 10_000;
const MAX_GROUPS: usize = 256;
/// How many walks a sample has in all, if the namespaces are fewer.
const WALKS: usize = 32;
/// How many statements a sample has, about. A sample needs about 3,000 of them; ids that are made to have
/// many groups need more.
const MAX_STATEMENTS: usize = 30_000;

impl SqliteStore {
    /// Returns one portion of a list.
    pub(super) async fn list(
        &self,
        filter: &ListFilter,
        after: Option<&Cursor>,
        limit: u32,
    ) -> Result<Listing, Error> {
        let fault = |error| store_error(LISTING, error);
        let (mut from, mut end) = (Place::default(), Place::end());
        if let Some(namespace) = &filter.namespace {
            (from, end) = (Place::before_namespace(namespace), Place::after_namespace(namespace));
        }
        if let Some(cursor) = after {
            from = from.max(Place::read(cursor)?);
        }
        let next = self.key_at(&from, &end, PORTION).await.map_err(fault)?;
        let since = filter.since.map(|since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX));
        let rows = self
            .in_range(&self.statements.list, &from, next.as_ref().unwrap_or(&end))
            .bind(filter.state.map(|state| state.to_string()))
            .bind(since)
            .bind(filter.attempts_over.map(i64::from))
            // With the first row of the next portion.
            .bind(i64::from(limit) + 1)
            .fetch_all(&self.readers)
            .await
            .map_err(fault)?;
        let mut listing = Listing::new(Vec::new(), next.map(|next| next.cursor()));
        for (row, number) in rows.iter().zip(0..) {
            let place = read_place(row).map_err(fault)?;
            if number == limit {
                listing.next = Some(place.cursor());
                break;
            }
            let corrupt = |error| Error::new(ErrorKind::Corrupt, LISTING).with_source(error);
            let key = DedupKey::new(&place.namespace, &place.id).map_err(corrupt)?;
            let labels = read_labels(row).map_err(fault)?;
            if let Some(mut entry) = read_row(row, Fetch::Nothing).entry(labels)? {
                entry.stored = None;
                listing.keys.push((key, entry));
            }
        }
        Ok(listing)
    }

    pub(super) async fn stats(&self) -> Result<Stats, Error> {
        let (from, end) = (Place::default(), Place::end());
        let fault = |error| store_error(READING, error);
        let mut stats = match self.key_at(&from, &end, MAX_COUNTED).await.map_err(fault)? {
            Some(_) => Sample::new(self).stats().await.map_err(fault)?,
            None => {
                let counted = self.count(&from, &end, u32::MAX).await.map_err(fault)?;
                Stats { is_exact: true, ..counted }
            }
        };
        let bytes: i64 = sqlx::query_scalar(AssertSqlSafe(Arc::clone(&self.statements.bytes)))
            .fetch_one(&self.readers)
            .await
            .map_err(fault)?;
        stats.bytes = u64::try_from(bytes).ok();
        Ok(stats)
    }

    /// Returns the key before which a range has so many keys, if it has more.
    pub(super) async fn key_at(
        &self,
        from: &Place,
        end: &Place,
        keys: u32,
    ) -> Result<Option<Place>, sqlx::Error> {
        let key = self.in_range(&self.statements.key_at, from, end).bind(i64::from(keys));
        key.fetch_optional(&self.readers).await?.as_ref().map(read_place).transpose()
    }

    /// Counts the first `limit` rows of a range.
    pub(super) async fn count(
        &self,
        from: &Place,
        end: &Place,
        limit: u32,
    ) -> Result<Stats, sqlx::Error> {
        let count = self.in_range(&self.statements.stats, from, end).bind(i64::from(limit));
        read_stats(&count.fetch_one(&self.readers).await?)
    }

    /// Returns a statement over the keys from one place to another.
    pub(super) fn in_range<'q>(
        &self,
        sql: &Arc<str>,
        from: &'q Place,
        end: &'q Place,
    ) -> Query<'q, Sqlite, SqliteArguments> {
        sqlx::query(AssertSqlSafe(Arc::clone(sql)))
            .bind(&from.namespace)
            .bind(&from.id)
            .bind(&end.namespace)
            .bind(&end.id)
    }
}

/// A sample of a large table.
struct Sample<'s> {
    store: &'s SqliteStore,
    /// The prefixes that were read, by namespace and prefix.
    prefixes: HashMap<(String, String), Groups>,
    statements: usize,
}

/// The groups of the ids with one prefix.
#[derive(Clone)]
struct Groups {
    /// The rows of the small groups.
    small: Stats,
    /// The prefixes of the large groups, in a random order.
    large: Vec<String>,
    chosen: usize,
}

impl<'s> Sample<'s> {
    fn new(store: &'s SqliteStore) -> Self {
        Self { store, prefixes: HashMap::new(), statements: 0 }
    }

    async fn stats(mut self) -> Result<Stats, sqlx::Error> {
        let (mut total, mut large) = (Stats::default(), Vec::new());
        let (mut from, end) = (Place::default(), Place::end());
        for _ in 0..MAX_NAMESPACES {
            let Some(first) = self.store.key_at(&from, &end, 0).await? else { break };
            from = Place::after_namespace(&first.namespace);
            let counted = self.store.count(&first, &from, MAX_NAMESPACE + 1).await?;
            if counted.rows > u64::from(MAX_NAMESPACE) {
                large.push(first.namespace);
            } else {
                add(&mut total, &counted, 1);
            }
        }
        large.shuffle(&mut rand::rng());
        let walked = &large[..large.len().min(WALKS)];
        let mut sum = Stats::default();
        for namespace in walked {
            let (mut walks, mut rows) = (0, Stats::default());
            while walks < (WALKS / walked.len()) as u64
                && let Some(walk) = self.walk(namespace).await?
            {
                add(&mut rows, &walk, 1);
                walks += 1;
            }
            add(&mut sum, &divided(rows, walks.max(1)), large.len() as u64);
        }
        add(&mut total, &divided(sum, walked.len().max(1) as u64), 1);
        Ok(total)
    }

    /// Walks once through a namespace. Returns the rows of the namespace, as this walk estimates them;
    /// `None` if the sample has no statements left.
    async fn walk(&mut self, namespace: &str) -> Result<Option<Stats>, sqlx::Error> {
        let (mut rows, mut weight, mut prefix) = (Stats::default(), 1_u64, String::new());
        loop {
            let place = (namespace.to_owned(), prefix.clone());
            if !self.prefixes.contains_key(&place) {
                if self.statements > MAX_STATEMENTS {
                    return Ok(None);
                }
                let groups = self.read(namespace, &prefix).await?;
                self.prefixes.insert(place.clone(), groups);
            }
            let Some(groups) = self.prefixes.get_mut(&place) else { return Ok(None) };
            add(&mut rows, &groups.small, weight);
            if groups.large.is_empty() {
                return Ok(Some(rows));
            }
            weight = weight.saturating_mul(groups.large.len() as u64);
            groups.chosen += 1;
            prefix.clone_from(&groups.large[groups.chosen % groups.large.len()]);
        }
    }

    /// Reads the groups of a prefix.
    async fn read(&mut self, namespace: &str, prefix: &str) -> Result<Groups, sqlx::Error> {
        let mut groups = Groups { small: Stats::default(), large: Vec::new(), chosen: 0 };
        let mut from = Place { namespace: namespace.to_owned(), id: prefix.to_owned() };
        let end = Place::after_ids(namespace, prefix);
        for _ in 0..MAX_GROUPS {
            self.statements += 2;
            let Some(first) = self.store.key_at(&from, &end, 0).await? else { break };
            let next = first.id.get(prefix.len()..).and_then(|rest| rest.chars().next());
            let mut group = prefix.to_owned();
            group.extend(next);
            from = match next {
                Some(_) => Place::after_ids(namespace, &group),
                // The id is the prefix itself. No id holds a NUL.
                None => Place { namespace: namespace.to_owned(), id: format!("{prefix}\0") },
            };
            let counted = self.store.count(&first, &from, MAX_GROUP + 1).await?;
            if counted.rows > u64::from(MAX_GROUP) {
                groups.large.push(group);
            } else {
                add(&mut groups.small, &counted, 1);
            }
        }
        groups.large.shuffle(&mut rand::rng());
        Ok(groups)
    }
}

fn add(total: &mut Stats, part: &Stats, times: u64) {
    let add =
        |total: &mut u64, rows: u64| *total = total.saturating_add(rows.saturating_mul(times));
    add(&mut total.rows, part.rows);
    add(&mut total.in_flight, part.in_flight);
    add(&mut total.lapsed, part.lapsed);
    add(&mut total.released, part.released);
    add(&mut total.complete, part.complete);
    add(&mut total.expired, part.expired);
    total.oldest_in_flight = total.oldest_in_flight.max(part.oldest_in_flight);
    total.oldest_lapsed = total.oldest_lapsed.max(part.oldest_lapsed);
    total.oldest_expired = total.oldest_expired.max(part.oldest_expired);
}

fn divided(mut stats: Stats, by: u64) -> Stats {
    for rows in [
        &mut stats.rows,
        &mut stats.in_flight,
        &mut stats.lapsed,
        &mut stats.released,
        &mut stats.complete,
        &mut stats.expired,
    ] {
        *rows /= by;
    }
    stats
}

fn read_place(row: &SqliteRow) -> Result<Place, sqlx::Error> {
    Ok(Place { namespace: row.try_get("namespace")?, id: row.try_get("id")? })
}

fn read_stats(row: &SqliteRow) -> Result<Stats, sqlx::Error> {
    let number = |name| row.try_get::<i64, _>(name).map(|rows| u64::try_from(rows).unwrap_or(0));
    let age = |name| {
        let ms = row.try_get::<Option<i64>, _>(name)?;
        // A clock that went back makes a time negative.
        let ms = ms.map(|ms| Duration::from_millis(u64::try_from(ms).unwrap_or(0)));
        Ok::<_, sqlx::Error>(ms)
    };
    Ok(Stats {
        rows: number("rows")?,
        in_flight: number("in_flight")?,
        lapsed: number("lapsed")?,
        released: number("released")?,
        complete: number("complete")?,
        expired: number("expired")?,
        oldest_in_flight: age("oldest_in_flight")?,
        oldest_lapsed: age("oldest_lapsed")?,
        oldest_expired: age("oldest_expired")?,
        ..Stats::default()
    })
}
