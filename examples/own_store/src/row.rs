//! The meaning of a row, and the replies that follow from it.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use sqlx::Row as _;
use sqlx::mysql::MySqlRow;
use tower_dedup::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, Fetch, Permanence, Seen, StoredData, StoredResponse,
    Token,
};
use tower_dedup::adapter::maintenance::{Entry, KeyState};
use tower_dedup::{DedupKey, StoreError, StoreErrorKind};

/// A row, as `sql/read.sql` returns it. Times are milliseconds since the Unix epoch.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) version: i64,
    token: Option<Vec<u8>>,
    lease_until: Option<i64>,
    pub(crate) attempts: i64,
    takeover: bool,
    pub(crate) first_seen_at: i64,
    completed_at: Option<i64>,
    expires_at: i64,
    pub(crate) event_type: Option<Vec<u8>>,
    payload_sha256: Option<[u8; 32]>,
    has_response: bool,
    /// As far as it was read. An error meets only the callers that need the response.
    response: Result<Option<Arc<StoredResponse>>, StoreError>,
    pub(crate) now: i64,
}

/// What a call writes into a row that it has read.
#[derive(Debug, Default)]
pub(crate) struct Write {
    pub(crate) token: Option<Vec<u8>>,
    pub(crate) attempts: i64,
    pub(crate) takeover: bool,
    /// The key is new: its first sight and its type are those of this call.
    pub(crate) is_new: bool,
    pub(crate) completes: bool,
    /// The retention goes on, unless it has ended.
    pub(crate) keeps_retention: bool,
    pub(crate) lease: Option<i64>,
}

/// Returns whether these terms fetch a response. An unknown variant fetches all that there is.
pub(crate) fn fetches_response(fetch: Fetch) -> bool {
    !matches!(fetch, Fetch::Nothing | Fetch::Digest)
}

/// Returns the length of the lease; `None` for a claim that is complete at once.
pub(crate) fn lease_ms(terms: &CallTerms) -> Result<Option<i64>, StoreError> {
    match terms.permanence() {
        Permanence::OnClaim => Ok(None),
        Permanence::OnCompletion { lease } => Ok(Some(milliseconds(lease))),
        // A permanence of a later version of the crate: nothing is known about it, so nothing is written.
        _ => Err(StoreError::new(StoreErrorKind::Unsupported, "reading the permanence of a call")),
    }
}

/// Returns whole milliseconds, at most 2⁶¹: the sum with a Unix time does not overflow a BIGINT.
pub(crate) fn milliseconds(duration: Duration) -> i64 {
    const MOST: i64 = 1 << 61;
    i64::try_from(duration.as_millis()).map_or(MOST, |ms| ms.min(MOST))
}

/// Returns when the event of a call was handled, for a statement that takes the earlier of this time and now.
pub(crate) fn handled_at(terms: &CallTerms) -> i64 {
    terms.handled_at_ms().unwrap_or(i64::MAX)
}

impl Row {
    pub(crate) fn read(row: &MySqlRow) -> Result<Self, sqlx::Error> {
        let digest: Option<Vec<u8>> = row.try_get("payload_sha256")?;
        let status: Option<i64> = row.try_get("response_status")?;
        Ok(Self {
            version: row.try_get("version")?,
            token: row.try_get("token")?,
            lease_until: row.try_get("lease_until")?,
            attempts: row.try_get("attempts")?,
            takeover: row.try_get("takeover")?,
            first_seen_at: row.try_get("first_seen_at")?,
            completed_at: row.try_get("completed_at")?,
            expires_at: row.try_get("expires_at")?,
            event_type: row.try_get("event_type")?,
            payload_sha256: digest.and_then(|digest| digest.try_into().ok()),
            has_response: status.is_some(),
            response: response(row, status),
            now: row.try_get("now")?,
        })
    }

    /// Returns the state of the row; `None` for an expired one. `sql/stats.sql` says the same in SQL.
    pub(crate) fn state(&self) -> Option<KeyState> {
        match (self.completed_at, self.lease_until) {
            // A live lease holds the key also after its retention.
            (None, Some(until)) if self.token.is_some() && until > self.now => {
                Some(KeyState::InFlight)
            }
            _ if self.expires_at <= self.now => None,
            (Some(_), _) => Some(KeyState::Complete),
            (None, Some(_)) => Some(KeyState::Lapsed),
            (None, None) => Some(KeyState::Released),
        }
    }

    pub(crate) fn is_by(&self, token: Token) -> bool {
        self.token.as_deref() == Some(token.as_bytes())
    }

    /// Returns the reply to a claim that finds this row, and what it writes.
    pub(crate) fn claimed(
        &self,
        terms: &CallTerms,
    ) -> Result<(Option<Write>, ClaimReply), StoreError> {
        let (is_mine, lease, state) = (self.is_by(terms.token()), lease_ms(terms)?, self.state());
        let on_claim = lease.is_none();
        match state {
            // Repeated with its token: the first reply may be lost. An inserted completion has no attempts.
            Some(KeyState::Complete) if on_claim && is_mine => {
                return Ok((None, first(self.attempts.max(1), self.takeover)));
            }
            Some(KeyState::Complete) => return Ok((None, self.duplicate(terms.fetch())?)),
            Some(KeyState::InFlight) if on_claim || !is_mine => {
                return Ok((None, ClaimReply::InFlight));
            }
            _ => {}
        }
        // A claim that is repeated with the token of its incomplete row counts no attempt, also after the retention.
        let is_repeated =
            !on_claim && is_mine && self.completed_at.is_none() && self.lease_until.is_some();
        let (attempts, takeover) = match state {
            _ if is_repeated => (self.attempts, self.takeover),
            None => (1, false),
            Some(_) => (self.attempts + 1, self.lease_until.is_some()),
        };
        let is_new = state.is_none() && !is_repeated;
        let token = Some(terms.token().as_bytes().to_vec());
        let write = Write {
            token,
            attempts,
            takeover,
            is_new,
            completes: on_claim,
            lease,
            ..Write::default()
        };
        Ok((Some(write), first(attempts, takeover)))
    }

    /// Returns the reply to a claim of a complete key.
    fn duplicate(&self, fetch: Fetch) -> Result<ClaimReply, StoreError> {
        // A handler's transaction has completed the key, and the layer has not added the response yet. The lease bounds
        // how long this may take.
        let is_awaited =
            self.lease_until.is_some_and(|until| until > self.now) && !self.has_response;
        if is_awaited && fetches_response(fetch) {
            return Ok(ClaimReply::InFlight);
        }
        let age = u64::try_from(self.now - self.first_seen_at).unwrap_or_default();
        let mut seen = Seen::new(Duration::from_millis(age));
        if fetch != Fetch::Nothing {
            let response = if fetches_response(fetch) { self.response.clone()? } else { None };
            seen.stored = Some(Arc::new(StoredData::new(self.payload_sha256, response)));
        }
        Ok(ClaimReply::Duplicate(seen))
    }

    /// Returns the reply to a completion that finds this row, and what it writes.
    pub(crate) fn completed(&self, terms: &CallTerms) -> (Option<Write>, CompleteReply) {
        let has_response = terms.response().is_some();
        let is_mine = self.is_by(terms.token());
        let reply = match (is_mine, self.attempts) {
            (false, _) => CompleteReply::LeaseLost,
            // A completion inserted it, which is repeated.
            (true, 0) => CompleteReply::Inserted,
            (true, _) => CompleteReply::Held,
        };
        let kept = || Write {
            token: self.token.clone(),
            attempts: self.attempts,
            takeover: self.takeover,
            completes: true,
            keeps_retention: true,
            ..Write::default()
        };
        let is_expired = self.expires_at <= self.now;
        if self.completed_at.is_some() && !is_expired {
            // An event that a handler's transaction has completed awaits its response, which may not come.
            let is_awaited = !self.has_response && (has_response || self.lease_until.is_some());
            return ((is_mine && is_awaited).then(kept), reply);
        }
        // An expired complete key is like a new one, and a row without attempts was made by a release alone.
        if self.completed_at.is_some() || self.attempts == 0 {
            let token = Some(terms.token().as_bytes().to_vec());
            let write = Write { token, is_new: true, completes: true, ..Write::default() };
            return (Some(write), CompleteReply::Inserted);
        }
        // The token of the holder stays: its own completion, which may follow, was not late.
        (Some(kept()), reply)
    }

    /// Returns the entry of the row; `None` for an expired row.
    pub(crate) fn entry(self, with_stored: bool) -> Option<Entry> {
        let state = self.state()?;
        let mut entry = Entry::new(state, wall(self.first_seen_at), wall(self.expires_at));
        (entry.attempts, entry.takeover) = (attempt(self.attempts), self.takeover);
        entry.event_type = self.event_type.and_then(|text| String::from_utf8(text).ok());
        if state == KeyState::Complete {
            entry.completed_at = self.completed_at.map(wall);
            entry.response_is_unreadable = self.response.is_err();
            let response = self.response.unwrap_or_default();
            let stored = || Arc::new(StoredData::new(self.payload_sha256, response));
            entry.stored = with_stored.then(stored);
        } else {
            entry.lease_until = self.lease_until.map(wall);
        }
        Some(entry)
    }
}

fn response(
    row: &MySqlRow,
    status: Option<i64>,
) -> Result<Option<Arc<StoredResponse>>, StoreError> {
    let unreadable = |error| {
        StoreError::new(StoreErrorKind::Corrupt, "decoding a stored response").with_source(error)
    };
    let headers: Option<Vec<u8>> = row.try_get("response_headers").map_err(unreadable)?;
    let body: Option<Vec<u8>> = row.try_get("response_body").map_err(unreadable)?;
    let (Some(status), Some(headers), Some(body)) = (status, headers, body) else {
        return Ok(None);
    };
    let status = u16::try_from(status).ok().and_then(|code| StatusCode::from_u16(code).ok());
    let (Some(status), Some(headers)) = (status, headers_of(&headers)) else {
        return Err(StoreError::new(StoreErrorKind::Corrupt, "reading a stored response"));
    };
    Ok(Some(Arc::new(StoredResponse::new(status, headers, body.into()))))
}

/// Returns the headers as lines `name: value`, in their order. No value has a line break.
pub(crate) fn header_lines(headers: &HeaderMap) -> Vec<u8> {
    let line = |(name, value): (&HeaderName, &HeaderValue)| {
        [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\n"].concat()
    };
    headers.iter().flat_map(line).collect()
}

fn headers_of(lines: &[u8]) -> Option<HeaderMap> {
    let mut headers = HeaderMap::new();
    for line in lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let colon = line.windows(2).position(|two| two == b": ")?;
        let name = HeaderName::from_bytes(&line[..colon]).ok()?;
        headers.append(name, HeaderValue::from_bytes(&line[colon + 2..]).ok()?);
    }
    Some(headers)
}

/// Returns the key of a row of a list.
pub(crate) fn key_of(namespace: &[u8], id: &[u8]) -> Option<DedupKey> {
    DedupKey::new(str::from_utf8(namespace).ok()?, str::from_utf8(id).ok()?).ok()
}

fn first(attempts: i64, takeover: bool) -> ClaimReply {
    ClaimReply::first(attempt(attempts), takeover)
}

fn attempt(attempts: i64) -> u32 {
    u32::try_from(attempts).unwrap_or(u32::MAX)
}

/// Returns this time, or the epoch for a time that the platform cannot name.
fn wall(ms: i64) -> SystemTime {
    let since = Duration::from_millis(u64::try_from(ms).unwrap_or_default());
    UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
}
