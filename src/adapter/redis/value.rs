//! [`Row`]: what the scripts read of a key, and the stored data of a complete key.
//!
//! Only the scripts read and write the value of a key: `lua/prelude.lua` has its layout. To them, the stored data
//! is bytes, after flags that name the sections:
//!
//! | flag | section |
//! |---|---|
//! | 0x20 | the digest of the payload: 32 bytes |
//! | 0x40 | the response: u16 status, u32 length and headers, u32 length and body, big endian |

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::super::inspection::KeyState;
use super::super::replies::{Entry, EntryState, Seen};
use super::super::stored::{Fetch, StoredData, StoredResponse};
use crate::error::{Error, ErrorKind};

const PAYLOAD_DIGEST: u8 = 0x20;
const RESPONSE: u8 = 0x40;

/// The values of `lua/get.lua`, in their order.
pub(super) type Values = (String, u64, u64, u64, u64, u32, bool, (Vec<u8>, Vec<u8>, u8, Vec<u8>));

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
    event_type: Option<String>,
    flags: u8,
    sections: Vec<u8>,
}

impl Row {
    /// Returns the row of these values; `None` for values of no script of this version.
    pub(super) fn read(values: Values) -> Option<Self> {
        let (state, now, first_seen_at, expires_at, ends_at, attempts, takeover, rest) = values;
        let (token, event_type, flags, sections) = rest;
        let state = match &*state {
            "leased" => Some(KeyState::InFlight),
            "lapsed" => Some(KeyState::Lapsed),
            "released" => Some(KeyState::Released),
            "complete" => Some(KeyState::Complete),
            "expired" => None,
            _ => return None,
        };
        let event_type = String::from_utf8(event_type).ok()?;
        let event_type = (!event_type.is_empty()).then_some(event_type);
        Some(Self {
            state,
            now,
            first_seen_at,
            expires_at,
            ends_at,
            attempts,
            takeover,
            token,
            event_type,
            flags,
            sections,
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
    pub(super) fn duplicate(&self, fetch: Fetch) -> Option<Seen> {
        if self.state != Some(KeyState::Complete) {
            return None;
        }
        seen(self.age(), fetch, self.flags, &self.sections).ok()
    }

    /// Returns the entry of the row; `None` for an expired row.
    pub(super) fn entry(self) -> Option<Entry> {
        let state = match self.state? {
            KeyState::Complete => EntryState::Complete { completed_at: wall(self.ends_at) },
            KeyState::Released => EntryState::Released,
            KeyState::InFlight | KeyState::Lapsed => {
                EntryState::InFlight { lease_until: wall(self.ends_at) }
            }
        };
        let entry = Entry::new(state, wall(self.first_seen_at), wall(self.expires_at));
        let mut entry = entry.with_attempts(self.attempts, self.takeover);
        if self.state == Some(KeyState::Complete) {
            let stored = |with_response| stored_data(self.flags, &self.sections, with_response);
            let whole = stored(true);
            entry.response_is_unreadable = whole.is_err();
            entry.stored = whole.or_else(|_| stored(false)).ok().map(Arc::new);
        }
        entry.event_type = self.event_type;
        Some(entry)
    }
}

/// Returns what a duplicate of this age carries.
///
/// # Errors
///
/// Those of [`stored_data`].
pub(super) fn seen(age: Duration, fetch: Fetch, flags: u8, sections: &[u8]) -> Result<Seen, Error> {
    let seen = Seen::new(age);
    if fetch == Fetch::Nothing {
        return Ok(seen);
    }
    let stored = stored_data(flags, sections, fetch == Fetch::DigestAndResponse)?;
    Ok(seen.with_stored(stored.into()))
}

/// Reads the sections of a complete key, with the response or without.
///
/// # Errors
///
/// [`ErrorKind::Corrupt`] for unreadable ones.
fn stored_data(flags: u8, sections: &[u8], with_response: bool) -> Result<StoredData, Error> {
    const CONTEXT: &str = "reading stored data";
    let corrupt = || Error::new(ErrorKind::Corrupt, CONTEXT);
    let (digest, response) = split(flags, sections).ok_or_else(corrupt)?;
    let response = response.filter(|_| with_response).map(|(status, headers, body)| {
        let headers = std::str::from_utf8(headers).map_err(|error| corrupt().with_source(error))?;
        StoredResponse::from_stored(status.into(), headers, body.to_vec()).map(Arc::new)
    });
    Ok(StoredData::new(digest, response.transpose()?))
}

type Response<'v> = (u16, &'v [u8], &'v [u8]);

/// Returns the digest and the parts of the response; `None` for sections that the flags do not name.
fn split(flags: u8, mut rest: &[u8]) -> Option<(Option<[u8; 32]>, Option<Response<'_>>)> {
    let (mut digest, mut response) = (None, None);
    if flags & PAYLOAD_DIGEST != 0 {
        digest = Some(take(&mut rest)?);
    }
    if flags & RESPONSE != 0 {
        let status = u16::from_be_bytes(take(&mut rest)?);
        response = Some((status, text(&mut rest)?, text(&mut rest)?));
    }
    (rest.is_empty() && flags & !(PAYLOAD_DIGEST | RESPONSE) == 0).then_some((digest, response))
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, left) = rest.split_first_chunk()?;
    *rest = left;
    Some(*taken)
}

/// Takes bytes after their length.
fn text<'v>(rest: &mut &'v [u8]) -> Option<&'v [u8]> {
    let length = usize::try_from(u32::from_be_bytes(take(rest)?)).ok()?;
    let (text, left) = rest.split_at_checked(length)?;
    *rest = left;
    Some(text)
}

/// Returns the flags and the sections of the data that is stored with a complete key.
///
/// # Errors
///
/// [`ErrorKind::Refused`] for a response of 4 GiB or more.
pub(super) fn data_sections(stored: Option<&StoredData>) -> Result<(u8, Vec<u8>), Error> {
    let (mut flags, mut sections) = (0, Vec::new());
    let Some(stored) = stored else { return Ok((flags, sections)) };
    if let Some(digest) = &stored.payload_sha256 {
        flags |= PAYLOAD_DIGEST;
        sections.extend_from_slice(digest);
    }
    if let Some(response) = &stored.response {
        flags |= RESPONSE;
        sections.extend(response.status.as_u16().to_be_bytes());
        for part in [response.headers_json().as_bytes(), &response.body] {
            let length = u32::try_from(part.len()).map_err(|error| {
                Error::new(ErrorKind::Refused, "storing a response").with_source(error)
            })?;
            sections.extend(length.to_be_bytes());
            sections.extend_from_slice(part);
        }
    }
    Ok((flags, sections))
}

/// Returns the section of an event's type: empty without one.
pub(super) fn event_type_section(event_type: Option<&str>) -> Vec<u8> {
    let Some(text) = event_type else { return Vec::new() };
    // A type has at most 100 bytes.
    let length = u8::try_from(text.len()).unwrap_or(u8::MAX);
    [&[length], &text.as_bytes()[..length.into()]].concat()
}

fn wall(ms: u64) -> SystemTime {
    UNIX_EPOCH.checked_add(Duration::from_millis(ms)).unwrap_or(UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::fuzz;

    /// Sections are unreadable, or they are exactly the data that is read from them.
    #[test]
    fn fuzz_packed_value() {
        let response = b"\0\xC8\0\0\0\x0B[[\"a\",\"b\"]]\0\0\0\x01x";
        let seeds = [
            vec![0],
            [&[PAYLOAD_DIGEST][..], &[3; 32]].concat(),
            [&[RESPONSE][..], response].concat(),
            [&[PAYLOAD_DIGEST | RESPONSE][..], &[3; 32], response].concat(),
        ];
        fuzz("packed_value", 20_000, &seeds, |input| {
            let Some((flags, sections)) = input.split_first() else { return };
            let without = stored_data(*flags, sections, false);
            assert_eq!(without.is_ok(), split(*flags, sections).is_some());
            let Ok(stored) = stored_data(*flags, sections, true) else { return };
            assert_eq!(without.unwrap(), StoredData::new(stored.payload_sha256, None));
            // What is written again is read as the same.
            let (written_flags, written) = data_sections(Some(&stored)).unwrap();
            assert_eq!(written_flags, *flags);
            assert_eq!(stored_data(written_flags, &written, true).unwrap(), stored);
        });
    }
}
