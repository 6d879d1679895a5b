//! The meaning of a row, and the replies that follow from it.
//!
//! The first rule that applies decides the state of a row:
//!
//! 1. *leased*: `completed_at` is null, `token` is set, and `lease_until` is in the future.
//! 2. *expired*: `expires_at` has passed.
//! 3. *complete*: `completed_at` is set.
//! 4. *lapsed*: `lease_until` is set.
//! 5. *released*: `lease_until` is null.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sqlx::{ColumnIndex, Decode, Type};

use super::super::contract::{
    CallTerms, ClaimReply, CompleteReply, Fetch, Permanence, Seen, StoredData, StoredResponse,
    Token,
};
use super::super::maintenance::{Entry, ForgetReply, KeyState};
use crate::error::{StoreError, StoreErrorKind};

/// Declares [`Columns`], with one method for each type of a column.
macro_rules! columns {
    ($($method:ident: $type:ty),+) => {
        /// The columns of a row, by their names.
        pub(crate) trait Columns {
            $(fn $method(&self, name: &str) -> Result<$type, sqlx::Error>;)+

            /// Returns a number that is not null. A clock that went back makes a time negative:
            /// zero then.
            fn count(&self, name: &str) -> Result<u64, sqlx::Error> {
                Ok(self.number(name)?.and_then(|number| number.try_into().ok()).unwrap_or(0))
            }
        }

        impl<R: sqlx::Row> Columns for R
        where
            for<'n> &'n str: ColumnIndex<R>,
            $(for<'r> $type: Decode<'r, R::Database> + Type<R::Database>,)+
        {
            $(fn $method(&self, name: &str) -> Result<$type, sqlx::Error> {
                self.try_get(name)
            })+
        }
    };
}

columns!(flag: bool, number: Option<i64>, text: Option<String>, bytes: Option<Vec<u8>>);

/// A row, as a statement returns it. Times are milliseconds since the Unix epoch.
#[derive(Debug, Clone, Default)]
pub(crate) struct Row {
    pub(crate) token: Option<[u8; 16]>,
    /// Every write raises it. Zero in SQLite, where no claim is late.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "SQLite has none"))]
    pub(crate) version: i64,
    pub(crate) attempts: i64,
    pub(crate) takeover: bool,
    pub(crate) first_seen_at: i64,
    pub(crate) completed_at: Option<i64>,
    pub(crate) expires_at: i64,
    pub(crate) lease_until: Option<i64>,
    pub(crate) now: i64,
    /// The stored data, as far as it was read; `None` if nothing was read.
    pub(crate) stored: Option<StoredData>,
    /// Set if the response is unreadable: only callers that fetch responses fail.
    pub(crate) unreadable_response: Option<Arc<StoreError>>,
    /// Set if a column is unreadable: the row has no state then.
    pub(crate) unreadable: Option<Arc<sqlx::Error>>,
}

fn read_response(row: &impl Columns) -> Result<Option<Arc<StoredResponse>>, StoreError> {
    let unreadable = |error| {
        StoreError::new(StoreErrorKind::Corrupt, "decoding a stored response").with_source(error)
    };
    let status = row.number("response_status").map_err(unreadable)?;
    let headers = row.text("response_headers").map_err(unreadable)?;
    let body = row.bytes("response_body").map_err(unreadable)?;
    let columns = status.zip(headers).zip(body);
    let response = columns
        .map(|((status, headers), body)| StoredResponse::from_stored(status, &headers, body));
    Ok(response.transpose()?.map(Arc::new))
}

impl Row {
    /// Returns the state of a row by the rules above; `None` for an expired row. The statements say
    /// the same in SQL.
    fn state(&self) -> Option<KeyState> {
        match (self.completed_at, self.lease_until) {
            (None, Some(until)) if self.token.is_some() && until > self.now => {
                Some(KeyState::InFlight)
            }
            _ if self.expires_at <= self.now => None,
            (Some(_), _) => Some(KeyState::Complete),
            (None, Some(_)) => Some(KeyState::Lapsed),
            (None, None) => Some(KeyState::Released),
        }
    }

    /// Returns `true` if a handler's transaction has completed the row, and the layer has not added
    /// the response yet. The lease bounds how long it may take.
    pub(crate) fn awaits_response(&self) -> bool {
        let has_response = self.stored.as_ref().is_some_and(|stored| stored.response.is_some());
        let is_awaited = self.lease_until.is_some_and(|until| until > self.now);
        self.completed_at.is_some() && is_awaited && !has_response
    }

    fn is_by(&self, token: Token) -> bool {
        self.token.as_ref() == Some(token.as_bytes())
    }

    /// Adds as much of the stored data of the row.
    pub(crate) fn with_stored(
        mut self,
        row: &impl Columns,
        fetch: Fetch,
    ) -> Result<Self, sqlx::Error> {
        if fetch == Fetch::Nothing {
            return Ok(self);
        }
        // A value of another length is no SHA-256, and equals none.
        let payload_sha256 = row.bytes("payload_sha256")?.and_then(|digest| digest.try_into().ok());
        let response = if fetch == Fetch::Digest { Ok(None) } else { read_response(row) };
        let response = response.unwrap_or_else(|error| {
            self.unreadable_response = Some(Arc::new(error));
            None
        });
        self.stored = Some(StoredData::new(payload_sha256, response));
        Ok(self)
    }

    /// Returns the row of a key of which a column does not decode.
    pub(crate) fn unreadable(error: sqlx::Error) -> Self {
        Self { unreadable: Some(Arc::new(error)), ..Self::default() }
    }

    fn check_readable(&self) -> Result<(), StoreError> {
        match &self.unreadable {
            Some(error) => {
                Err(StoreError::new(StoreErrorKind::Corrupt, "reading the row of a key")
                    .with_source(Arc::clone(error)))
            }
            None => Ok(()),
        }
    }

    /// Returns the reply to `forget` that finds this row, if there is nothing to forget. An
    /// unreadable row is forgotten too: it blocks its event.
    pub(crate) fn forgotten(&self) -> Option<ForgetReply> {
        match self.state() {
            _ if self.unreadable.is_some() => None,
            Some(KeyState::InFlight) => Some(ForgetReply::InFlight),
            None => Some(ForgetReply::Missing),
            _ => None,
        }
    }

    /// Returns the reply to a claim that finds this row, if the claim need not write.
    pub(crate) fn claimed(&self, terms: &CallTerms) -> Result<Option<ClaimReply>, StoreError> {
        self.check_readable()?;
        let is_mine = self.is_by(terms.token());
        let on_claim = terms.permanence() == Permanence::OnClaim;
        Ok(match self.state() {
            // Repeated with its token: the first reply may be lost.
            Some(KeyState::Complete) if on_claim && is_mine => {
                // A row that a completion inserted has no attempts.
                Some(first(self.attempts.max(1), self.takeover))
            }
            Some(KeyState::Complete) => {
                if let Some(error) = &self.unreadable_response {
                    let corrupt =
                        StoreError::new(StoreErrorKind::Corrupt, "reading a stored response");
                    return Err(corrupt.with_source(Arc::clone(error)));
                }
                let age = self.now.saturating_sub(self.first_seen_at);
                let mut seen = Seen::new(Duration::from_millis(age.try_into().unwrap_or_default()));
                seen.stored = self.stored.clone().map(Arc::new);
                Some(ClaimReply::Duplicate(seen))
            }
            Some(KeyState::InFlight) if on_claim || !is_mine => Some(ClaimReply::InFlight),
            _ => None,
        })
    }

    /// Returns the reply to a completion that finds this row complete. `None` for another row: it
    /// has changed since the completion.
    pub(crate) fn completed(&self, token: Token) -> Result<Option<CompleteReply>, StoreError> {
        self.check_readable()?;
        Ok(match self.state() {
            // Repeated with its token: the same reply, also of a row that it inserted.
            Some(KeyState::Complete) if self.is_by(token) => Some(completed(self.attempts, true)),
            Some(KeyState::Complete) => Some(CompleteReply::LeaseLost),
            _ => None,
        })
    }

    /// Returns the entry of a row, with the stored data that was read; `None` for an expired row.
    pub(crate) fn entry(&self, event_type: Option<String>) -> Result<Option<Entry>, StoreError> {
        self.check_readable()?;
        let Some(state) = self.state() else { return Ok(None) };
        let mut entry = Entry::new(state, wall(self.first_seen_at), wall(self.expires_at));
        (entry.attempts, entry.takeover) = (attempt(self.attempts), self.takeover);
        if state == KeyState::Complete {
            entry.completed_at = self.completed_at.map(wall);
            entry.response_is_unreadable = self.unreadable_response.is_some();
            entry.stored = self.stored.clone().map(Arc::new);
        } else {
            entry.lease_until = self.lease_until.map(wall);
        }
        entry.event_type = event_type;
        Ok(Some(entry))
    }
}

/// Returns the reply to a completion that wrote a row with these attempts. An inserted row has
/// none.
pub(crate) fn completed(attempts: i64, is_held: bool) -> CompleteReply {
    match (attempts, is_held) {
        (0, _) => CompleteReply::Inserted,
        (_, true) => CompleteReply::Held,
        (_, false) => CompleteReply::LeaseLost,
    }
}

/// Returns the reply to a claim that got its key.
pub(crate) fn first(attempts: i64, takeover: bool) -> ClaimReply {
    ClaimReply::First { attempt: attempt(attempts), takeover }
}

/// Returns a column of attempts as a reply shows it.
fn attempt(attempts: i64) -> u32 {
    u32::try_from(attempts).unwrap_or(u32::MAX)
}

/// Returns this time, or the epoch for a time that the platform cannot name.
fn wall(ms: i64) -> SystemTime {
    let since = Duration::from_millis(u64::try_from(ms).unwrap_or_default());
    UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreadable_row_has_no_state() {
        let row = Row::unreadable(sqlx::Error::RowNotFound);
        let terms = CallTerms::on_claim(Token::random(), Duration::from_secs(60));
        assert_eq!(row.forgotten(), None);
        let errors =
            [row.claimed(&terms).err(), row.completed(terms.token()).err(), row.entry(None).err()];
        for error in errors {
            assert_eq!(error.map(|error| error.kind()), Some(StoreErrorKind::Corrupt));
        }
    }
}
