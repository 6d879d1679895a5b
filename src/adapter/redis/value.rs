//! The packed value of one key: its layout, and what its bytes say.
//!
//! All numbers are big endian. Times are milliseconds since the Unix epoch by the server's clock, at most
//! 2^48 - 1. `lua/prelude.lua` reads and writes the same.
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 1 | the format: 2 |
//! | 1 | 1 | flags: complete, has a token, takeover, and one for each section |
//! | 2 | 3 | attempts, saturating |
//! | 5 | 6 | first seen at |
//! | 11 | 6 | expires at |
//! | 17 | 6 | completed at; the end of the lease of an incomplete row; 0 of a released row |
//! | 23 | 5 | version: starts at the microseconds of the server's clock, plus 1 with each write, modulo 2^40 |
//! | 28 | 16 | token, zeros without |
//! | 44 | | the sections: event type, payload digest, response |
//!
//! Redis stores a value of up to 44 bytes in one allocation. So a version has the five bytes that are left:
//! they repeat after 12 days, and it must not repeat within an hour.
//!
//! The first rule that applies decides the state of a row:
//!
//! 1. *leased*: incomplete, with a token, and the lease ends in the future.
//! 2. *expired*: `expires_at` has passed.
//! 3. *complete*: complete.
//! 4. *lapsed*: with a token.
//! 5. *released*: without a token.
//!
//! A *fence row* is left where a key was released or forgotten and no other row is: incomplete, without a token,
//! without attempts, and expired since it was written.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::super::inspection::KeyState;
use super::super::replies::{Entry, EntryState, Seen};
use super::super::stored::{Fetch, StoredData, StoredResponse};
use crate::error::{Error, ErrorKind};

const FORMAT: u8 = 2;
/// The bytes before the sections.
const HEADER: usize = 44;
/// The longest value without stored data: its header, and the type of the event.
pub(super) const MOST_WITHOUT_DATA: usize = HEADER + 1 + 255;

const COMPLETE: u8 = 0x01;
const HAS_TOKEN: u8 = 0x02;
const TAKEOVER: u8 = 0x04;
const EVENT_TYPE: u8 = 0x10;
const PAYLOAD_DIGEST: u8 = 0x20;
const RESPONSE: u8 = 0x40;
const FLAGS: u8 = COMPLETE | HAS_TOKEN | TAKEOVER | EVENT_TYPE | PAYLOAD_DIGEST | RESPONSE;

/// A row, as its value holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Row<'v> {
    is_complete: bool,
    has_token: bool,
    token: &'v [u8],
    takeover: bool,
    attempts: u32,
    first_seen_at: u64,
    expires_at: u64,
    ends_at: u64,
    event_type: Option<&'v str>,
    data: Data<'v>,
}

/// The stored data of a row.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Data<'v> {
    payload_sha256: Option<[u8; 32]>,
    /// The status, the headers and the body.
    response: Option<(u16, &'v [u8], &'v [u8])>,
}

/// The state of a key, and how long ago it began or ended.
pub(super) struct Standing {
    /// `None` for an expired row.
    pub(super) state: Option<KeyState>,
    /// The time since the row was first seen (in flight), since its lease lapsed, or since it expired.
    pub(super) for_ms: u64,
}

impl<'v> Row<'v> {
    /// Reads a value; `None` for one that is unreadable, or of another format.
    pub(super) fn read(value: &'v [u8]) -> Option<Self> {
        let (mut row, flags, mut rest) = Self::read_before_data(value)?;
        row.data = Data::read(flags & (PAYLOAD_DIGEST | RESPONSE), &mut rest)?;
        rest.0.is_empty().then_some(row)
    }

    /// Reads a value of which only [`MOST_WITHOUT_DATA`] bytes may be there. The row has no stored data.
    pub(super) fn read_without_data(value: &'v [u8]) -> Option<Self> {
        Self::read_before_data(value).map(|(row, ..)| row)
    }

    /// Also returns the flags, and the bytes of the stored data.
    fn read_before_data(value: &'v [u8]) -> Option<(Self, u8, Reader<'v>)> {
        let mut rest = Reader(value);
        if rest.number(1)? != u64::from(FORMAT) {
            return None;
        }
        let flags = rest.take(1)?[0];
        let attempts = u32::try_from(rest.number(3)?).ok()?;
        let (first_seen_at, expires_at, ends_at) =
            (rest.number(6)?, rest.number(6)?, rest.number(6)?);
        // The version is for the scripts only.
        rest.take(5)?;
        let token = rest.take(16)?;
        let event_type = if flags & EVENT_TYPE == 0 { None } else { Some(rest.text(1)?) };
        let row = Self {
            is_complete: flags & COMPLETE != 0,
            has_token: flags & HAS_TOKEN != 0,
            token,
            takeover: flags & TAKEOVER != 0,
            attempts,
            first_seen_at,
            expires_at,
            ends_at,
            event_type,
            data: Data::default(),
        };
        (flags & !FLAGS == 0).then_some((row, flags, rest))
    }

    /// Returns the token of the row's last claim; zeros without one.
    pub(super) fn token(&self) -> &[u8] {
        self.token
    }

    /// Returns what a duplicate carries, if the row is complete.
    pub(super) fn duplicate(&self, now: u64, fetch: Fetch) -> Option<Seen> {
        let standing = self.standing(now);
        let seen = Seen::new(Duration::from_millis(standing.for_ms));
        match fetch {
            _ if standing.state != Some(KeyState::Complete) => None,
            Fetch::Nothing => Some(seen),
            fetch => {
                let stored = self.data.stored(fetch == Fetch::DigestAndResponse).ok()?;
                Some(seen.with_stored(stored.into()))
            }
        }
    }

    pub(super) fn attempts(&self) -> u32 {
        self.attempts
    }

    pub(super) fn first_seen_at(&self) -> u64 {
        self.first_seen_at
    }

    /// Returns the state at this time.
    pub(super) fn standing(&self, now: u64) -> Standing {
        let since = |at: u64| now.saturating_sub(at);
        let lease_until = if self.is_complete { 0 } else { self.ends_at };
        let (state, for_ms) = if !self.is_complete && self.has_token && self.ends_at > now {
            (Some(KeyState::InFlight), since(self.first_seen_at))
        } else if self.expires_at <= now {
            // An incomplete key expires with its lease, if that ends later.
            (None, since(self.expires_at.max(lease_until)))
        } else if self.is_complete {
            (Some(KeyState::Complete), since(self.first_seen_at))
        } else if self.has_token {
            (Some(KeyState::Lapsed), since(self.ends_at))
        } else {
            (Some(KeyState::Released), since(self.first_seen_at))
        };
        Standing { state, for_ms }
    }

    /// Returns the entry of the row at this time; `None` for an expired row.
    pub(super) fn entry(&self, now: u64) -> Option<Entry> {
        let state = match self.standing(now).state? {
            KeyState::Complete => EntryState::Complete { completed_at: wall(self.ends_at) },
            KeyState::Released => EntryState::Released,
            KeyState::InFlight | KeyState::Lapsed => {
                EntryState::InFlight { lease_until: wall(self.ends_at) }
            }
        };
        let entry = Entry::new(state, wall(self.first_seen_at), wall(self.expires_at));
        let mut entry = entry.with_attempts(self.attempts, self.takeover);
        if self.is_complete {
            let stored = self.data.stored(true);
            entry.response_is_unreadable = stored.is_err();
            let stored = stored.unwrap_or_else(|_| StoredData::new(self.data.payload_sha256, None));
            entry.stored = Some(Arc::new(stored));
        }
        entry.event_type = self.event_type.map(str::to_owned);
        Some(entry)
    }
}

impl<'v> Data<'v> {
    /// Reads the sections that a claim returned with a duplicate; `None` for unreadable ones.
    pub(super) fn from_reply(flags: u8, sections: &'v [u8]) -> Option<Self> {
        let mut rest = Reader(sections);
        let data = Self::read(flags, &mut rest)?;
        (rest.0.is_empty() && flags & !(PAYLOAD_DIGEST | RESPONSE) == 0).then_some(data)
    }

    fn read(flags: u8, rest: &mut Reader<'v>) -> Option<Self> {
        let mut data = Self::default();
        if flags & PAYLOAD_DIGEST != 0 {
            data.payload_sha256 = Some(rest.take(32)?.try_into().ok()?);
        }
        if flags & RESPONSE != 0 {
            let status = u16::try_from(rest.number(2)?).ok()?;
            data.response = Some((status, rest.bytes(4)?, rest.bytes(4)?));
        }
        Some(data)
    }

    /// Returns the stored data, with its response or without.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Corrupt`] for an unreadable response.
    pub(super) fn stored(&self, with_response: bool) -> Result<StoredData, Error> {
        let response = self.response.filter(|_| with_response);
        let response = response.map(|(status, headers, body)| {
            let headers = std::str::from_utf8(headers).map_err(|error| {
                Error::new(ErrorKind::Corrupt, "reading a stored response").with_source(error)
            })?;
            StoredResponse::from_stored(status.into(), headers, body.to_vec()).map(Arc::new)
        });
        Ok(StoredData::new(self.payload_sha256, response.transpose()?))
    }
}

/// Returns the section of an event's type: empty without one.
pub(super) fn event_type_section(event_type: Option<&str>) -> Vec<u8> {
    let Some(text) = event_type else { return Vec::new() };
    // A type has at most 100 bytes.
    let length = u8::try_from(text.len()).unwrap_or(u8::MAX);
    [&[length], &text.as_bytes()[..length.into()]].concat()
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

/// The bytes of a value that are not read yet. Every read fails at the end.
struct Reader<'v>(&'v [u8]);

impl<'v> Reader<'v> {
    fn take(&mut self, bytes: usize) -> Option<&'v [u8]> {
        let (taken, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(taken)
    }

    /// Reads a number of at most 8 bytes.
    fn number(&mut self, bytes: usize) -> Option<u64> {
        Some(self.take(bytes)?.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    }

    /// Reads bytes after their length, which has `size` bytes.
    fn bytes(&mut self, size: usize) -> Option<&'v [u8]> {
        let length = usize::try_from(self.number(size)?).ok()?;
        self.take(length)
    }

    fn text(&mut self, size: usize) -> Option<&'v str> {
        std::str::from_utf8(self.bytes(size)?).ok()
    }
}

fn wall(ms: u64) -> SystemTime {
    UNIX_EPOCH.checked_add(Duration::from_millis(ms)).unwrap_or(UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::{HeaderMap, StatusCode};

    use super::*;
    use crate::fuzz::fuzz;

    fn header(flags: u8) -> Vec<u8> {
        let mut value = vec![FORMAT, flags, 0, 0, 2];
        for time in [1_u64, 5, 3] {
            value.extend_from_slice(&time.to_be_bytes()[2..]);
        }
        value.extend([9; 5 + 16]);
        value
    }

    #[test]
    fn state_follows_the_first_rule_that_applies() {
        use KeyState::{Complete, InFlight, Lapsed, Released};
        // First seen at 1, expires at 5; the lease ends at 3, or the key was completed at 3.
        let cases = [
            (HAS_TOKEN, [Some(InFlight), Some(Lapsed), None]),
            (COMPLETE | HAS_TOKEN, [Some(Complete), Some(Complete), None]),
            (COMPLETE, [Some(Complete), Some(Complete), None]),
            (0, [Some(Released), Some(Released), None]),
        ];
        for (flags, states) in cases {
            let value = header(flags);
            let row = Row::read(&value).unwrap();
            assert_eq!([2, 3, 5].map(|now| row.standing(now).state), states, "{flags}");
            assert_eq!(row.attempts(), 2);
        }
        let value = header(HAS_TOKEN);
        let row = Row::read(&value).unwrap();
        assert_eq!([2, 4, 7].map(|now| row.standing(now).for_ms), [1, 1, 2]);
    }

    #[test]
    fn sections_come_back_as_they_were_written() {
        let mut headers = HeaderMap::new();
        headers.append("x-a", "b".parse().unwrap());
        let response = StoredResponse::new(StatusCode::CREATED, headers, Bytes::from_static(b"\0"));
        for digest in [None, Some([7; 32])] {
            for response in [None, Some(Arc::new(response.clone()))] {
                let stored = StoredData::new(digest, response);
                let (flags, sections) = data_sections(Some(&stored)).unwrap();
                let data = Data::from_reply(flags, &sections).unwrap();
                assert_eq!(data.stored(true).unwrap(), stored);
                let without = data.stored(false).unwrap();
                assert_eq!(without, StoredData::new(digest, None));
                let value = [header(COMPLETE | flags), sections].concat();
                let entry = Row::read(&value).unwrap().entry(4).unwrap();
                assert_eq!(entry.stored.as_deref(), Some(&stored));
            }
        }
        assert_eq!(data_sections(None).unwrap(), (0, Vec::new()));
    }

    #[test]
    fn unreadable_response_is_a_part_of_the_entry() {
        let response = [&[0, 200, 0, 0, 0, 2][..], b"{}\0\0\0\0"].concat();
        let value = [header(COMPLETE | RESPONSE), response].concat();
        let entry = Row::read(&value).unwrap().entry(4).unwrap();
        assert!(entry.response_is_unreadable);
        let data = Data::from_reply(RESPONSE, &value[HEADER..]).unwrap();
        assert_eq!(data.stored(true).unwrap_err().kind(), ErrorKind::Corrupt);
    }

    /// Returns the bytes of a row: the reference for [`Row::read`].
    fn written(row: &Row<'_>, version_and_token: &[u8]) -> Vec<u8> {
        let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
        let mut flags = flag(row.is_complete, COMPLETE) | flag(row.has_token, HAS_TOKEN);
        flags |= flag(row.takeover, TAKEOVER);
        flags |= flag(row.event_type.is_some(), EVENT_TYPE);
        let (of_data, data) = written_data(&row.data);
        let mut value = vec![FORMAT, flags | of_data];
        value.extend_from_slice(&row.attempts.to_be_bytes()[1..]);
        for time in [row.first_seen_at, row.expires_at, row.ends_at] {
            value.extend_from_slice(&time.to_be_bytes()[2..]);
        }
        value.extend_from_slice(version_and_token);
        value.extend(event_type_section(row.event_type));
        [value, data].concat()
    }

    fn written_data(data: &Data<'_>) -> (u8, Vec<u8>) {
        let mut sections = data.payload_sha256.map_or_else(Vec::new, |digest| digest.to_vec());
        let mut flags = if sections.is_empty() { 0 } else { PAYLOAD_DIGEST };
        if let Some((status, headers, body)) = data.response {
            flags |= RESPONSE;
            sections.extend(status.to_be_bytes());
            for part in [headers, body] {
                sections.extend(u32::try_from(part.len()).unwrap().to_be_bytes());
                sections.extend_from_slice(part);
            }
        }
        (flags, sections)
    }

    /// A value is unreadable, or it is exactly the row that is read from it.
    #[test]
    fn fuzz_packed_value() {
        let seeds = (0..128).map(|flags| {
            let kind = if flags & EVENT_TYPE == 0 { &[][..] } else { b"\x01t" };
            let digest = if flags & PAYLOAD_DIGEST == 0 { &[][..] } else { &[3; 32] };
            let response = b"\0\xC8\0\0\0\x0B[[\"a\",\"b\"]]\0\0\0\x01x";
            let response = if flags & RESPONSE == 0 { &[][..] } else { &response[..] };
            [&[0; 8][..], &header(flags), kind, digest, response].concat()
        });
        fuzz("packed_value", 20_000, &seeds.collect::<Vec<_>>(), |input| {
            let Some((now, value)) = input.split_first_chunk() else { return };
            let now = u64::from_be_bytes(*now);
            if let Some(row) = Row::read(value) {
                assert_eq!(written(&row, &value[23..HEADER]), value);
                let entry = row.entry(now);
                assert_eq!(entry.is_some(), row.standing(now).state.is_some());
                let is_unreadable = row.data.stored(true).is_err();
                let shown = entry.filter(|_| row.is_complete);
                assert!(shown.is_none_or(|entry| entry.response_is_unreadable == is_unreadable));
                // A value that is cut after the type of the event says the same but for its data.
                let cut = &value[..value.len().min(MOST_WITHOUT_DATA)];
                let without = Row { data: Data::default(), ..row };
                assert_eq!(Row::read_without_data(cut), Some(without));
            }
            if let Some(data) =
                value.split_first().and_then(|(flags, rest)| Data::from_reply(*flags, rest))
            {
                assert_eq!(written_data(&data), (value[0], value[1..].to_vec()));
                if let Ok(stored) = data.stored(true) {
                    // What is written again is read as the same.
                    let (flags, sections) = data_sections(Some(&stored)).unwrap();
                    let again = Data::from_reply(flags, &sections).unwrap();
                    assert_eq!(again.stored(true).unwrap(), stored);
                }
            }
        });
    }
}
