//! Lists and statistics, for operators.
//!
//! 1. A list goes through the primaries in the order of their addresses, and through the keys of each by
//!    `SCAN`. `SCAN` returns every key that is there all the time.
//! 2. One step of `SCAN` may return more keys than the portion has place for. The cursor then names the
//!    keys that are left.
//! 3. A cursor of a primary that is gone is refused. If a primary restarts or a slot moves during a list, keys may be
//!    absent or occur twice.
//! 4. Stored data is not read: it may be large.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};
use redis::{Cmd, Value};

use super::super::inspection::{Cursor, KeyState, ListFilter, Listing, Stats};
use super::super::replies::Entry;
use super::adapter::Shared;
use super::calls::unreadable;
use super::connections::Bound;
use super::script;
use super::value::{MOST_WITHOUT_DATA, Row};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

const READING: &str = "reading a key";
const COUNTING: &str = "reading statistics";
const LISTING: &str = "listing keys";

/// How many values are read at once.
const MAX_CONCURRENT: usize = 64;
/// How many keys one call of a list visits, about.
const PORTION: usize = 20_000;
/// How many keys of a primary are counted one by one.
const MAX_COUNTED: usize = 100_000;
/// How many keys one step visits.
const STEP: usize = 1_000;

/// Where a list goes on. Its text is a JSON array of its fields.
struct Place {
    primary: String,
    /// The position of `SCAN`; `None` after the last one.
    scan: Option<u64>,
    /// The keys of Redis that the step before has returned too many.
    left: Vec<String>,
}

impl Place {
    fn start_of(primary: &Primary) -> Self {
        Self { primary: primary.address.clone(), scan: Some(0), left: Vec::new() }
    }

    fn text(&self) -> String {
        // Texts and numbers always serialize.
        serde_json::to_string(&(&self.primary, self.scan, &self.left)).unwrap_or_default()
    }

    fn read(cursor: &Cursor) -> Option<Self> {
        let (primary, scan, left) = serde_json::from_str(cursor.as_str()).ok()?;
        let place = Self { primary, scan, left };
        (place.text() == cursor.as_str()).then_some(place)
    }
}

/// A primary, and its clock when its calls began.
struct Primary {
    address: String,
    now: u64,
}

impl Shared {
    pub(super) async fn get(&self, key: &DedupKey) -> Result<Option<Entry>, Error> {
        let Some((now, value)) = self.value(key, self.connections.bound()).await? else {
            return Ok(None);
        };
        Ok(Row::read(&value).ok_or_else(|| unreadable(READING))?.entry(now))
    }

    /// Returns the time and the value of a key; `None` for a missing key.
    pub(super) async fn value(
        &self,
        key: &DedupKey,
        bound: Bound,
    ) -> Result<Option<(u64, Vec<u8>)>, Error> {
        let reply = self.connections.read(&self.call(&script::GET, key), READING, bound).await?;
        let values = match reply {
            Value::Array(values) => <[Value; 2]>::try_from(values).ok(),
            _ => None,
        };
        let (now, value) = match values {
            Some([Value::Int(_), Value::Nil]) => return Ok(None),
            Some([Value::Int(now), Value::BulkString(value)]) => (now, value),
            _ => return Err(unreadable(READING)),
        };
        Ok(Some((u64::try_from(now).map_err(|_| unreadable(READING))?, value)))
    }

    pub(super) async fn list(
        &self,
        filter: &ListFilter,
        after: Option<&Cursor>,
        limit: u32,
    ) -> Result<Listing, Error> {
        let refused = || Error::new(ErrorKind::Refused, "listing keys after a cursor");
        let primaries = self.primaries(LISTING).await?;
        let (mut at, mut place) = match after {
            None => match primaries.first() {
                Some(first) => (0, Place::start_of(first)),
                None => return Ok(Listing::default()),
            },
            Some(cursor) => {
                let place = Place::read(cursor).ok_or_else(refused)?;
                let at = primaries.iter().position(|primary| primary.address == place.primary);
                (at.ok_or_else(refused)?, place)
            }
        };
        // With 0, the list would never end.
        let limit = usize::try_from(limit.max(1)).unwrap_or(usize::MAX);
        let pattern = self.names.pattern(filter.namespace.as_deref());
        let (mut listing, mut visited) = (Listing::default(), 0);
        loop {
            let mut names: BTreeSet<String> = std::mem::take(&mut place.left).into_iter().collect();
            if names.is_empty() {
                let Some(position) = place.scan else {
                    at += 1;
                    let Some(primary) = primaries.get(at) else { return Ok(listing) };
                    place = Place::start_of(primary);
                    continue;
                };
                if visited >= PORTION || listing.keys.len() == limit {
                    break;
                }
                let step = (limit - listing.keys.len()).clamp(10, STEP);
                visited += step;
                let (next, found) =
                    self.scan(&primaries[at], position, Some(&pattern), step, LISTING).await?;
                place.scan = (next != 0).then_some(next);
                names = found.into_iter().collect();
            }
            let mut names = names.into_iter();
            while listing.keys.len() < limit {
                let rest = limit - listing.keys.len();
                let some: Vec<String> = names.by_ref().take(rest.min(STEP)).collect();
                if some.is_empty() {
                    break;
                }
                listing.unreadable +=
                    self.select(filter, some, primaries[at].now, &mut listing.keys).await?;
            }
            place.left = names.collect();
            if !place.left.is_empty() {
                break;
            }
        }
        listing.next = Some(Cursor::new(place.text()));
        Ok(listing)
    }

    /// Reads keys, and adds those that the filter selects. Returns how many are unreadable.
    async fn select(
        &self,
        filter: &ListFilter,
        names: Vec<String>,
        now: u64,
        selected: &mut Vec<(DedupKey, Entry)>,
    ) -> Result<u64, Error> {
        // A key of another program may be none of ours.
        let keys =
            names.into_iter().filter_map(|name| Some((self.names.key(name.as_bytes())?, name)));
        let has_part =
            |key: &DedupKey| filter.id_part.as_deref().is_none_or(|part| key.id().contains(part));
        let keys: Vec<_> = keys.filter(|(key, _)| has_part(key)).collect();
        let values = keys.iter().map(|(_, name)| self.row_bytes(name, LISTING)).collect();
        let values = all(values).await?;
        let mut unreadable = 0;
        for ((key, _), value) in keys.into_iter().zip(values) {
            if value.is_empty() {
                continue;
            }
            let Some(row) = Row::read_without_data(&value) else {
                unreadable += 1;
                continue;
            };
            if selects(filter, &row, now)
                && let Some(mut entry) = row.entry(now)
            {
                entry.stored = None;
                entry.response_is_unreadable = false;
                selected.push((key, entry));
            }
        }
        Ok(unreadable)
    }

    pub(super) async fn stats(&self) -> Result<Stats, Error> {
        let mut stats = Stats { is_exact: true, ..Stats::default() };
        for primary in self.primaries(COUNTING).await? {
            let (is_exact, part) = self.stats_of(&primary).await?;
            stats.is_exact &= is_exact;
            stats.add(&part);
        }
        Ok(stats)
    }

    /// Returns the statistics of one primary, and whether they are exact.
    async fn stats_of(&self, primary: &Primary) -> Result<(bool, Stats), Error> {
        let mut size = Cmd::new();
        size.arg("DBSIZE");
        let size = self.connections.ask(&primary.address, &size, COUNTING).await?;
        let Value::Int(size) = size else { return Err(unreadable(COUNTING)) };
        let size = u64::try_from(size).unwrap_or_default();
        // In a small database a key could be visited twice while it is resized.
        let (mut position, mut visited, mut names) = (0, 0_u64, BTreeSet::new());
        let is_exact = loop {
            let (next, found) = self.scan(primary, position, None, STEP, COUNTING).await?;
            // Keys of other types are visited too, and not returned.
            visited += STEP.max(found.len()) as u64;
            names
                .extend(found.into_iter().filter(|name| self.names.key(name.as_bytes()).is_some()));
            position = next;
            if position == 0 {
                break true;
            }
            if visited >= MAX_COUNTED as u64 {
                break false;
            }
        };
        let mut stats = Stats::default();
        let names: Vec<String> = names.into_iter().collect();
        for names in names.chunks(STEP) {
            let values =
                all(names.iter().map(|name| self.row_bytes(name, COUNTING)).collect()).await?;
            for value in values.into_iter().filter(|value| !value.is_empty()) {
                count(&mut stats, &value, primary.now);
            }
        }
        if !is_exact {
            let scale = |keys: u64| {
                let scaled = u128::from(keys) * u128::from(size) / u128::from(visited.max(1));
                u64::try_from(scaled).unwrap_or(u64::MAX)
            };
            stats = stats.map_counts(scale);
        }
        Ok((is_exact, stats))
    }

    /// Returns the primaries in the order of their addresses.
    async fn primaries(&self, context: &'static str) -> Result<Vec<Primary>, Error> {
        let mut time = Cmd::new();
        time.arg("TIME");
        let mut primaries = Vec::new();
        for (address, reply) in self.connections.ask_all(&time, context).await? {
            let read: Result<(u64, u64), _> = redis::from_redis_value(reply?);
            let (seconds, microseconds) = read.map_err(|_| unreadable(context))?;
            let now = seconds.saturating_mul(1_000).saturating_add(microseconds / 1_000);
            primaries.push(Primary { address, now });
        }
        primaries.sort_by(|one, other| one.address.cmp(&other.address));
        Ok(primaries)
    }

    /// Takes a step of `SCAN` on a primary. Returns the next position, 0 at the end, and keys of Redis. A
    /// key that is not UTF-8 is not of this crate.
    async fn scan(
        &self,
        primary: &Primary,
        position: u64,
        pattern: Option<&str>,
        step: usize,
        context: &'static str,
    ) -> Result<(u64, Vec<String>), Error> {
        let mut scan = Cmd::new();
        scan.arg("SCAN").arg(position);
        if let Some(pattern) = pattern {
            scan.arg("MATCH").arg(pattern);
        }
        // Keys of another type are not of this crate.
        scan.arg("COUNT").arg(step).arg("TYPE").arg("string");
        let reply = self.connections.ask(&primary.address, &scan, context).await?;
        let read: Result<(u64, Vec<Vec<u8>>), _> = redis::from_redis_value(reply);
        let (next, names) = read.map_err(|_| unreadable(context))?;
        Ok((next, names.into_iter().filter_map(|name| String::from_utf8(name).ok()).collect()))
    }

    /// Returns a value without its stored data, which may be large; nothing for a missing key.
    async fn row_bytes(&self, name: &str, context: &'static str) -> Result<Vec<u8>, Error> {
        let mut get = Cmd::new();
        get.arg("GETRANGE").arg(name).arg(0).arg(MOST_WITHOUT_DATA - 1);
        match self.connections.send(name.as_bytes(), &get, context).await? {
            Value::Nil => Ok(Vec::new()),
            Value::BulkString(value) => Ok(value),
            _ => Err(unreadable(context)),
        }
    }
}

/// Counts a row. An unreadable one is counted without a state.
fn count(stats: &mut Stats, value: &[u8], now: u64) {
    stats.rows += 1;
    let Some(row) = Row::read_without_data(value) else { return };
    let standing = row.standing(now);
    let age = Some(Duration::from_millis(standing.for_ms));
    match standing.state {
        Some(KeyState::InFlight) => {
            stats.in_flight += 1;
            stats.oldest_in_flight = stats.oldest_in_flight.max(age);
        }
        Some(KeyState::Lapsed) => {
            stats.lapsed += 1;
            stats.oldest_lapsed = stats.oldest_lapsed.max(age);
        }
        Some(KeyState::Released) => stats.released += 1,
        Some(KeyState::Complete) => stats.complete += 1,
        None => {
            stats.expired += 1;
            stats.oldest_expired = stats.oldest_expired.max(age);
        }
    }
}

fn selects(filter: &ListFilter, row: &Row<'_>, now: u64) -> bool {
    let state = row.standing(now).state;
    let since = |since: Duration| {
        let ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        row.first_seen_at() >= now.saturating_sub(ms)
    };
    state.is_some()
        && (filter.state.is_none() || filter.state == state)
        && filter.since.is_none_or(since)
        && filter.attempts_over.is_none_or(|attempts| row.attempts() > attempts)
}

/// Waits for the reads of several keys, some at once. Returns their replies in the same order.
async fn all<T, F: Future<Output = Result<T, Error>>>(reads: Vec<F>) -> Result<Vec<T>, Error> {
    stream::iter(reads).buffered(MAX_CONCURRENT).try_collect().await
}
