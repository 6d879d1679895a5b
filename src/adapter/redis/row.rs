//! [`Row`]: what a script reads of a key. Only the scripts read and write the bytes of a value: `lua/prelude.lua` has
//! their layout.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::super::inspect::{Entry, KeyState};
use super::super::replies::Seen;
use super::super::stored::{Fetch, StoredData, StoredResponse};
use crate::error::{Error, ErrorKind};

/// The stored data of a complete key: the digest of the payload, and the status, the headers and the body of the
/// response. A missing one is empty, and a missing status is 0.
pub(super) type Stored = (Vec<u8>, u16, Vec<u8>, Vec<u8>);

/// The values of `lua/get.lua`, in their order.
pub(super) type Values = (String, u64, u64, u64, u64, u32, bool, Vec<u8>, String, Stored);

/// A row, and its state at a time of the server's clock. All times are milliseconds since the Unix epoch.
#[derive(Debug)]
pub(super) struct Row {
    /// `None` for an expired row.
    pub(super) state: Option<KeyState>,
    pub(super) now: u64,
    pub(super) first_seen_at: u64,
    expires_at: u64,
    /// When the lease ends, or when the key was completed.
    ends_at: u64,
    pub(super) attempts: u32,
    takeover: bool,
    /// The token of the last claim; empty without one.
    pub(super) token: Vec<u8>,
    event_type: String,
    stored: Stored,
}

impl Row {
    /// Returns the row of these values; `None` for values of no script of this version.
    pub(super) fn read(values: Values) -> Option<Self> {
        let state = match &*values.0 {
            "leased" => Some(KeyState::InFlight),
            "expired" => None,
            state => Some(state.parse().ok()?),
        };
        Some(Self {
            state,
            now: values.1,
            first_seen_at: values.2,
            expires_at: values.3,
            ends_at: values.4,
            attempts: values.5,
            takeover: values.6,
            token: values.7,
            event_type: values.8,
            stored: values.9,
        })
    }

    /// Returns the time since the row was first seen, since its lease lapsed, or since it expired.
    pub(super) fn age(&self) -> Duration {
        let since = match self.state {
            Some(KeyState::Lapsed) => self.ends_at,
            // An incomplete key expires with its lease, if that ends later.
            None => self.expires_at.max(self.ends_at),
            Some(_) => self.first_seen_at,
        };
        Duration::from_millis(self.now.saturating_sub(since))
    }

    /// Returns what a duplicate carries, if the row is complete.
    pub(super) fn duplicate(self, fetch: Fetch) -> Option<Seen> {
        let is_complete = self.state == Some(KeyState::Complete);
        seen(self.age(), fetch, self.stored).ok().filter(|_| is_complete)
    }

    /// Returns the entry of the row; `None` for an expired row.
    pub(super) fn entry(self) -> Option<Entry> {
        let state = self.state?;
        let mut entry = Entry::new(state, wall(self.first_seen_at), wall(self.expires_at));
        (entry.attempts, entry.takeover) = (self.attempts, self.takeover);
        match state {
            KeyState::Complete => entry.completed_at = Some(wall(self.ends_at)),
            KeyState::InFlight | KeyState::Lapsed => entry.lease_until = Some(wall(self.ends_at)),
            KeyState::Released => {}
        }
        if state == KeyState::Complete {
            let digest = self.stored.0.clone();
            let stored = stored_data(self.stored);
            entry.response_is_unreadable = stored.is_err();
            let stored = stored.or_else(|_| stored_data((digest, 0, Vec::new(), Vec::new())));
            entry.stored = stored.ok().map(Arc::new);
        }
        entry.event_type = (!self.event_type.is_empty()).then_some(self.event_type);
        Some(entry)
    }
}

/// Returns what a duplicate of this age carries.
///
/// # Errors
///
/// Those of [`stored_data`].
pub(super) fn seen(age: Duration, fetch: Fetch, stored: Stored) -> Result<Seen, Error> {
    if fetch == Fetch::Nothing {
        return Ok(Seen::new(age));
    }
    Ok(Seen::new(age).with_stored(stored_data(stored)?.into()))
}

/// # Errors
///
/// [`ErrorKind::Corrupt`] for an unreadable digest or response.
fn stored_data((digest, status, headers, body): Stored) -> Result<StoredData, Error> {
    let corrupt = || Error::new(ErrorKind::Corrupt, "reading stored data");
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
