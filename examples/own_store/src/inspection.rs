//! The calls of operators and of the purger.

use std::time::Duration;

use sqlx::Row as _;
use sqlx::mysql::MySqlRow;
use tower_dedup::adapter::contract::{CallTerms, Token};
use tower_dedup::adapter::maintenance::{Entry, ForgetReply, KeyState, ListFilter, Listing, Stats};
use tower_dedup::{DedupKey, StoreError, StoreErrorKind};

use crate::TRIES;
use crate::completion::hex;
use crate::row::{Row, Write, key_of, milliseconds};
use crate::session::{Args, Call};

/// How many rows one call of `list` reads.
const PORTION: usize = 1_000;

impl Call {
    /// Refuses a server on which the fence does not hold.
    pub(crate) async fn check_server(&self) -> Result<(), StoreError> {
        const TEXT: &str = "the store needs MariaDB 10.6 or later, without --sysdate-is-now";
        let rows = self.query(&self.sql().check, Args::default()).await?;
        match rows.first().map(|row| row.try_get::<bool, _>("has_clock")).transpose() {
            Ok(Some(true)) => Ok(()),
            _ => Err(StoreError::new(StoreErrorKind::Config, TEXT)),
        }
    }

    pub(crate) async fn purge(self, limit: u32) -> Result<u64, StoreError> {
        let purged = self.run(&self.sql().purge, Args::default().add(limit)).await?;
        // Nothing, if statements of others have met it four times: the next call finds the rows.
        Ok(purged.map_or(0, |(_, written)| written))
    }

    pub(crate) async fn forget(self, key: DedupKey) -> Result<ForgetReply, StoreError> {
        // Its row is that of a release: expired, without token and attempts.
        let gone = Write { is_new: true, ..Write::default() };
        let terms = CallTerms::on_claim(Token::random(), Duration::ZERO);
        for _ in 0..TRIES {
            let Some(row) = self.read(&key, false).await? else { return Ok(ForgetReply::Missing) };
            match row.state() {
                None => return Ok(ForgetReply::Missing),
                Some(KeyState::InFlight) => return Ok(ForgetReply::InFlight),
                _ => {}
            }
            // At the version that was read: a call that is late must not undo a completion that came after it.
            let args = Self::write(&key, &row, &gone, &terms);
            match self.run(&self.sql().write, args).await? {
                Some((_, written)) if written > 0 => return Ok(ForgetReply::Removed),
                Some(_) => {}
                None => return Ok(ForgetReply::InFlight),
            }
        }
        Ok(ForgetReply::InFlight)
    }

    pub(crate) async fn get(self, key: DedupKey) -> Result<Option<Entry>, StoreError> {
        Ok(self.read(&key, true).await?.and_then(|row| row.entry(true)))
    }

    pub(crate) async fn list(
        self,
        filter: ListFilter,
        after: Option<String>,
        limit: u32,
    ) -> Result<Listing, StoreError> {
        // No key has an empty namespace, so this is before all keys.
        let (namespace, id) = after
            .map_or(Ok(<(Vec<u8>, Vec<u8>)>::default()), |cursor| self.read_cursor(&cursor))?;
        // With 0, the list would never end.
        let limit = usize::try_from(limit).unwrap_or(usize::MAX).max(1);
        let args = Args::default().add(&namespace).add(&namespace).add(&id).add(PORTION as u64);
        let rows = self.query(&self.sql().list, args).await?;
        let mut listing = Listing::default();
        for (number, row) in rows.iter().enumerate() {
            let fault = |error| self.fault(error);
            let namespace: Vec<u8> = row.try_get("namespace").map_err(fault)?;
            let id: Vec<u8> = row.try_get("id").map_err(fault)?;
            match key_of(&namespace, &id).zip(Row::read(row).ok()) {
                None => listing.unreadable += 1,
                Some((key, row)) if selects(&filter, &key, &row) => {
                    listing.keys.extend(row.entry(false).map(|entry| (key, entry)));
                }
                Some(_) => {}
            }
            if listing.keys.len() == limit || number + 1 == PORTION {
                listing.next = Some(cursor(&namespace, &id));
                break;
            }
        }
        Ok(listing)
    }

    /// Reads a cursor, which has one spelling.
    fn read_cursor(&self, text: &str) -> Result<(Vec<u8>, Vec<u8>), StoreError> {
        let read =
            text.split_once('-').and_then(|(namespace, id)| Some((unhex(namespace)?, unhex(id)?)));
        read.filter(|(namespace, id)| cursor(namespace, id) == text && !namespace.is_empty())
            .ok_or_else(|| self.error(StoreErrorKind::Refused))
    }

    pub(crate) async fn stats(self) -> Result<Stats, StoreError> {
        let rows = self.query(&self.sql().stats, Args::default()).await?;
        let Some(row) = rows.first() else { return Ok(Stats::default()) };
        read_stats(row).map_err(|error| self.fault(error))
    }
}

fn selects(filter: &ListFilter, key: &DedupKey, row: &Row) -> bool {
    let state = row.state();
    filter.state.is_none_or(|wanted| state == Some(wanted))
        && filter.namespace.as_deref().is_none_or(|namespace| namespace == key.namespace())
        && filter.id_part.as_deref().is_none_or(|part| key.id().contains(part))
        && filter
            .since
            .is_none_or(|since| row.now.saturating_sub(milliseconds(since)) <= row.first_seen_at)
        && filter.attempts_over.is_none_or(|attempts| row.attempts > attempts.into())
}

fn read_stats(row: &MySqlRow) -> Result<Stats, sqlx::Error> {
    let number = |name: &str| {
        let number: Option<i64> = row.try_get(name)?;
        // A clock that went back makes a time negative.
        Ok::<_, sqlx::Error>(number.map(|number| u64::try_from(number).unwrap_or(0)))
    };
    let count = |name: &str| Ok::<_, sqlx::Error>(number(name)?.unwrap_or(0));
    let age = |name: &str| Ok::<_, sqlx::Error>(number(name)?.map(Duration::from_millis));
    let mut stats = Stats::default();
    stats.is_exact = row.try_get("is_exact")?;
    stats.rows = count("counted")?;
    stats.in_flight = count("in_flight")?;
    stats.lapsed = count("lapsed")?;
    stats.released = count("released")?;
    stats.complete = count("complete")?;
    stats.expired = count("expired")?;
    stats.oldest_in_flight = age("oldest_in_flight")?;
    stats.oldest_lapsed = age("oldest_lapsed")?;
    stats.oldest_expired = age("oldest_expired")?;
    stats.bytes = number("bytes")?;
    if !stats.is_exact {
        // Nearly all rows between the two ends are complete.
        let more = count("estimate")?.saturating_sub(stats.rows);
        stats.rows += more;
        stats.complete += more;
    }
    Ok(stats)
}

fn cursor(namespace: &[u8], id: &[u8]) -> String {
    format!("{}-{}", hex(namespace), hex(id))
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|pair| Some(digit(pair[0])? << 4 | digit(*pair.get(1)?)?)).collect()
}
