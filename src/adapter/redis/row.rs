//! [`RedisRow`]: what a script reads of a key. Only the scripts read and write the bytes of a
//! value: `lua/prelude.lua` has their layout.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::super::maintenance::{Entry, KeyState};
use super::super::stored::{StoredData, StoredResponse};
use crate::error::{StoreError, StoreErrorKind};

/// The stored data of a complete key: the digest of the payload, and the status, the headers and
/// the body of the response. A missing one is empty, and a missing status is 0.
pub(super) type Stored = (Vec<u8>, u16, Vec<u8>, Vec<u8>);

/// The values of `lua/get.lua`, in their order. Times are milliseconds since the Unix epoch.
pub(super) type Values = (String, u64, u64, u64, u64, u32, bool, String, Stored);

/// A row, as it is at a time of the server's clock.
#[derive(Debug)]
pub(super) struct RedisRow {
    /// `None` for an expired row.
    pub(super) entry: Option<Entry>,
    /// The time since the row was first seen, since its lease lapsed, or since it expired.
    pub(super) age: Duration,
    pub(super) since_first_seen: Duration,
}

impl RedisRow {
    /// Returns the row of these values; `None` for values of no script of this version.
    pub(super) fn read(values: Values) -> Option<Self> {
        let (state, now, first_seen_at, expires_at, ends_at, ..) = values;
        let (.., attempts, takeover, event_type, stored) = values;
        let state = match &*state {
            "leased" => Some(KeyState::InFlight),
            "expired" => None,
            state => Some(state.parse().ok()?),
        };
        let since = |ms| Duration::from_millis(now.saturating_sub(ms));
        let age = match state {
            Some(KeyState::Lapsed) => since(ends_at),
            // An incomplete key expires with its lease, if that ends later.
            None => since(expires_at.max(ends_at)),
            Some(_) => since(first_seen_at),
        };
        let entry = state.map(|state| {
            let mut entry = Entry::new(state, wall(first_seen_at), wall(expires_at));
            (entry.attempts, entry.takeover) = (attempts, takeover);
            entry.event_type = Some(event_type).filter(|it| !it.is_empty());
            match state {
                KeyState::Complete => {
                    entry.completed_at = Some(wall(ends_at));
                    let digest = stored.0.clone();
                    let stored = stored_data(stored);
                    entry.response_is_unreadable = stored.is_err();
                    let stored = stored.or_else(|_| stored_data((digest, 0, vec![], vec![])));
                    entry.stored = stored.ok().map(Arc::new);
                }
                KeyState::InFlight | KeyState::Lapsed => entry.lease_until = Some(wall(ends_at)),
                KeyState::Released => {}
            }
            entry
        });
        Some(Self { entry, age, since_first_seen: since(first_seen_at) })
    }
}

/// # Errors
///
/// [`StoreErrorKind::Corrupt`] for an unreadable digest or response.
pub(super) fn stored_data(
    (digest, status, headers, body): Stored,
) -> Result<StoredData, StoreError> {
    let corrupt = || StoreError::new(StoreErrorKind::Corrupt, "reading stored data");
    let is_there = |digest: &Vec<u8>| !digest.is_empty();
    let digest = Some(digest).filter(is_there).map(TryFrom::try_from).transpose();
    let mut stored = StoredData::new(digest.map_err(|_| corrupt())?, None);
    if status != 0 {
        let headers = String::from_utf8(headers).map_err(|error| corrupt().with_source(error))?;
        stored.response = Some(StoredResponse::from_stored(status.into(), &headers, body)?.into());
    }
    Ok(stored)
}

fn wall(ms: u64) -> SystemTime {
    UNIX_EPOCH.checked_add(Duration::from_millis(ms)).unwrap_or(UNIX_EPOCH)
}
