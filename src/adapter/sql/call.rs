//! The calls of a store, the rows of a statement, and their replies.

use super::super::replies::{ClaimReply, CompleteReply, RenewReply};
use super::super::stored::Fetch;
use super::super::terms::{CallTerms, Permanence, Token};
use super::queue::{BatchItem, Waits};
use super::row::{Row, first};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;

/// The kind of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::adapter) enum Kind {
    /// Claims under `OnCompletion`.
    Claim,
    /// Claims under `OnClaim`: complete at once.
    ClaimComplete,
    Renew,
    Complete,
    /// Releases incomplete rows.
    Release,
    /// Releases rows that were claimed complete.
    ReleaseComplete,
    /// Reads whether the token has completed the row.
    Check,
}

impl Kind {
    pub(in crate::adapter) fn claim(terms: &CallTerms) -> Self {
        if terms.permanence() == Permanence::OnClaim { Self::ClaimComplete } else { Self::Claim }
    }

    pub(in crate::adapter) fn release(terms: &CallTerms) -> Self {
        if terms.permanence() == Permanence::OnClaim {
            Self::ReleaseComplete
        } else {
            Self::Release
        }
    }

    /// Returns the operation, for the text of an error.
    pub(in crate::adapter) fn context(self) -> &'static str {
        match self {
            Self::Claim | Self::ClaimComplete => "claiming keys",
            Self::Renew => "renewing leases",
            Self::Complete => "completing keys",
            Self::Release | Self::ReleaseComplete => "releasing keys",
            Self::Check => "reading completions",
        }
    }

    pub(in crate::adapter) fn is_claim(self) -> bool {
        matches!(self, Self::Claim | Self::ClaimComplete)
    }

    /// Returns the error of a row without a reply: a claim is then released, and a completion is repeated.
    pub(in crate::adapter) fn unknown(self) -> StoreError {
        StoreError::new(StoreErrorKind::Unavailable, self.context())
    }
}

/// The reply to a call, for one key.
#[derive(Debug, Clone)]
pub(in crate::adapter) enum RowReply {
    /// With the token of the row, if the row was read.
    Claimed(ClaimReply, Option<[u8; 16]>),
    Renewed(RenewReply),
    Completed(CompleteReply),
    Released,
    Checked(bool),
    /// An open transaction holds the row, and the statement has passed over it. Not for a claim or a renewal.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "SQLite locks no row"))]
    Locked,
}

/// The reply of a row; `None` for a row that has to be sent again.
pub(in crate::adapter) type Replied = Option<Result<RowReply, StoreError>>;

impl RowReply {
    pub(in crate::adapter) const IN_FLIGHT: Self = Self::Claimed(ClaimReply::InFlight, None);

    /// Returns the reply to a claim that wrote a row with these attempts.
    pub(in crate::adapter) fn first(attempts: i64, takeover: bool) -> Self {
        Self::Claimed(first(attempts, takeover), None)
    }

    /// Returns the reply to a claim or a completion that finds this row, if it need not write.
    pub(in crate::adapter) fn of_row(row: &Row, kind: Kind, terms: &CallTerms) -> Replied {
        let reply = if kind.is_claim() {
            row.claimed(terms).map(|reply| Some(Self::Claimed(reply?, row.token)))
        } else {
            row.completed(terms.token()).map(|reply| reply.map(Self::Completed))
        };
        reply.transpose()
    }

    pub(in crate::adapter) fn claimed(self) -> Option<ClaimReply> {
        if let Self::Claimed(claimed, _) = self { Some(claimed) } else { None }
    }

    pub(in crate::adapter) fn renewed(self) -> Option<RenewReply> {
        if let Self::Renewed(renewed) = self { Some(renewed) } else { None }
    }

    pub(in crate::adapter) fn completed(self) -> Option<CompleteReply> {
        if let Self::Completed(completed) = self { Some(completed) } else { None }
    }

    pub(in crate::adapter) fn checked(self) -> Option<bool> {
        if let Self::Checked(is_complete) = self { Some(is_complete) } else { None }
    }

    pub(in crate::adapter) fn released(self) -> Option<()> {
        matches!(self, Self::Released).then_some(())
    }
}

/// Returns the error of a call whose reply is of another kind.
pub(in crate::adapter) fn missing_reply() -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, "reading the replies of a batch")
}

/// One caller's call.
pub(in crate::adapter) struct Call {
    pub(super) kind: Kind,
    pub(super) key: DedupKey,
    /// A batch is sorted by it, and then by key.
    pub(super) hash: u128,
    pub(super) terms: CallTerms,
}

impl Call {
    pub(super) fn new(kind: Kind, key: &DedupKey, terms: &CallTerms, hash: u128) -> Self {
        // Responses are large, and would delay the other calls of a batch.
        let terms = terms.clone().with_fetch(without_response(terms.fetch()));
        Self { kind, key: key.clone(), hash, terms }
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the row of the call. `index` is the place of the call in its batch.
    pub(super) fn row<'c>(&'c self, index: usize, waits: &'c Waits<'c>) -> RowCall<'c> {
        RowCall { key: &self.key, hash: self.hash, terms: &self.terms, call: index, waits }
    }

    /// Returns the size of the response that its row stores.
    pub(super) fn bytes(&self) -> usize {
        let stored = self.terms.stored_data_for(&self.key);
        stored.and_then(|stored| stored.response).map_or(0, |response| response.body.len())
    }
}

impl BatchItem for Call {
    type Reply = RowReply;

    /// A batch has equal terms, except for tokens and data to store: each statement has one retention, one lease
    /// and one class of stored data.
    fn can_join(&self, other: &Self) -> bool {
        let terms = |call: &Self| {
            (call.kind, call.terms.retention(), call.terms.lease(), call.terms.fetch())
        };
        terms(self) == terms(other)
    }

    fn is_bounded(&self) -> bool {
        Kind::is_claim(self.kind)
    }
}

/// One key of a statement, with the terms of its call. The rows of a statement have equal terms, except for tokens and
/// data to store.
#[derive(Clone, Copy)]
pub(in crate::adapter) struct RowCall<'c> {
    pub(in crate::adapter) key: &'c DedupKey,
    #[allow(dead_code, reason = "SQLite finds a row by its key")]
    pub(in crate::adapter) hash: u128,
    pub(in crate::adapter) terms: &'c CallTerms,
    /// The index of the call in its batch.
    call: usize,
    waits: &'c Waits<'c>,
}

impl RowCall<'_> {
    pub(in crate::adapter) fn token(&self) -> Token {
        self.terms.token()
    }

    /// Returns `true` if the caller of this row still waits.
    pub(in crate::adapter) fn has_caller(&self) -> bool {
        (self.waits)(self.call)
    }
}

/// Returns the rows of one call that is made outside of the queue.
pub(in crate::adapter) fn rows_of<'c>(
    keys: &'c [DedupKey],
    terms: &'c CallTerms,
    hash: impl Fn(&DedupKey) -> u128,
) -> Vec<RowCall<'c>> {
    let row = |key| RowCall { key, hash: hash(key), terms, call: 0, waits: &|_| true };
    keys.iter().map(row).collect()
}

/// Returns for each row that was read whether its token has completed it.
pub(in crate::adapter) fn checked(rows: &[RowCall<'_>], found: &[Option<Row>]) -> Vec<Replied> {
    let checked = |(row, found): (&RowCall<'_>, &Option<Row>)| {
        let is_complete = |found: &Row| {
            let completed = found.completed(row.token())?;
            Ok(completed.is_some_and(|reply| reply != CompleteReply::LeaseLost))
        };
        Some(found.as_ref().map_or(Ok(false), is_complete).map(RowReply::Checked))
    };
    rows.iter().zip(found).map(checked).collect()
}

/// Returns the rows at these indexes.
pub(in crate::adapter) fn select<'c>(rows: &[RowCall<'c>], indexes: &[usize]) -> Vec<RowCall<'c>> {
    indexes.iter().map(|index| rows[*index]).collect()
}

/// Returns `true` if any row has data to store.
pub(in crate::adapter) fn stores_data(rows: &[RowCall<'_>]) -> bool {
    rows.iter().any(|row| row.terms.stores_data())
}

/// Returns the stored data that a batch reads: no responses.
pub(in crate::adapter) fn without_response(fetch: Fetch) -> Fetch {
    if fetch == Fetch::Nothing { Fetch::Nothing } else { Fetch::Digest }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn queue_that_is_full_refuses_no_call_on_which_an_event_depends() {
        let key = DedupKey::new("n", "a").unwrap();
        let terms = CallTerms::on_claim(Token::random(), Duration::from_secs(60));
        for (kind, begins) in [
            (Kind::Claim, true),
            (Kind::ClaimComplete, true),
            (Kind::Renew, false),
            (Kind::Complete, false),
            (Kind::Release, false),
            (Kind::ReleaseComplete, false),
        ] {
            assert_eq!(Call::new(kind, &key, &terms, 1).is_bounded(), begins, "{kind:?}");
        }
    }

    #[test]
    fn calls_of_one_kind_with_equal_terms_join() {
        let key = DedupKey::new("n", "a").unwrap();
        let call = |kind, retention, lease, fetch| {
            let (retention, lease) = (Duration::from_secs(retention), Duration::from_secs(lease));
            let terms = CallTerms::on_completion(Token::random(), retention, lease);
            let terms = terms.with_payloads([(key.clone(), rand::random())]);
            Call::new(kind, &key, &terms.with_fetch(fetch), 1)
        };
        let one = call(Kind::Claim, 60, 60, Fetch::Digest);
        for (kind, retention, lease, fetch) in [
            (Kind::Claim, 60, 60, Fetch::Nothing),
            (Kind::Claim, 61, 60, Fetch::Digest),
            (Kind::Claim, 60, 61, Fetch::Digest),
            (Kind::Renew, 60, 60, Fetch::Digest),
        ] {
            assert!(!one.can_join(&call(kind, retention, lease, fetch)), "{kind:?} {retention}");
        }
        assert!(one.can_join(&call(Kind::Claim, 60, 60, Fetch::DigestAndResponse)));
    }
}
