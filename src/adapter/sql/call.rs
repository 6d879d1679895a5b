//! The calls of a store, the rows of a statement, and their replies.

use std::sync::Arc;

use super::super::contract::{CallTerms, ClaimReply, CompleteReply, Fetch, Permanence, RenewReply};
use super::queue::BatchItem;
use super::row::{Row, first};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;

/// The kind of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Claims under `OnCompletion`.
    Claim,
    /// Claims under `OnClaim`: complete at once.
    ClaimComplete,
    Renew,
    Complete,
    /// Releases incomplete rows; under `OnClaim`, rows that were claimed complete.
    Release,
    /// Reads whether the token has completed the row.
    Check,
}

impl Kind {
    pub(crate) fn claim(terms: &CallTerms) -> Self {
        if terms.permanence() == Permanence::OnClaim { Self::ClaimComplete } else { Self::Claim }
    }

    /// Returns the operation, for the text of an error.
    pub(crate) fn context(self) -> &'static str {
        match self {
            Self::Claim | Self::ClaimComplete => "claiming keys",
            Self::Renew => "renewing leases",
            Self::Complete => "completing keys",
            Self::Release => "releasing keys",
            Self::Check => "reading completions",
        }
    }

    pub(crate) fn is_claim(self) -> bool {
        matches!(self, Self::Claim | Self::ClaimComplete)
    }

    /// Returns the error of a row without a reply: a claim is then released, and a completion is repeated.
    pub(crate) fn unknown(self) -> StoreError {
        StoreError::new(StoreErrorKind::Unavailable, self.context())
    }
}

/// The reply to a call, for one key.
#[derive(Debug, Clone)]
pub(crate) enum RowReply {
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
pub(crate) type Replied = Option<Result<RowReply, StoreError>>;

impl RowReply {
    pub(crate) const IN_FLIGHT: Self = Self::Claimed(ClaimReply::InFlight, None);

    /// Returns the reply to a claim that wrote a row with these attempts.
    pub(crate) fn first(attempts: i64, takeover: bool) -> Self {
        Self::Claimed(first(attempts, takeover), None)
    }

    /// Returns the reply to a call that finds this row, if it need not write.
    pub(crate) fn of_row(row: Option<&Row>, kind: Kind, terms: &CallTerms) -> Replied {
        let Some(row) = row else {
            return (kind == Kind::Check).then_some(Ok(Self::Checked(false)));
        };
        let reply = if kind.is_claim() {
            row.claimed(terms).map(|reply| Some(Self::Claimed(reply?, row.token)))
        } else {
            row.completed(terms.token()).map(|reply| match kind {
                Kind::Check => Some(Self::Checked(
                    reply.is_some_and(|reply| reply != CompleteReply::LeaseLost),
                )),
                _ => reply.map(Self::Completed),
            })
        };
        reply.transpose()
    }
}

/// Returns the error of a call whose reply is of another kind.
pub(crate) fn missing_reply() -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, "reading the replies of a batch")
}

/// One caller's call. The caller holds it for as long as it waits.
pub(crate) struct Call {
    pub(super) kind: Kind,
    pub(crate) key: DedupKey,
    /// A batch is sorted by it, and then by key.
    pub(crate) hash: u128,
    pub(crate) terms: CallTerms,
}

impl Call {
    pub(crate) fn new(kind: Kind, key: &DedupKey, terms: &CallTerms, hash: u128) -> Arc<Self> {
        // Responses are large, and would delay the other calls of a batch.
        let terms = terms.clone().with_fetch(without_response(terms.fetch()));
        Arc::new(Self { kind, key: key.clone(), hash, terms })
    }

    /// Returns `true` if the caller still waits. The batch has the other reference.
    pub(crate) fn has_caller(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) > 1
    }

    /// Returns the lease of its row, in milliseconds; `None` for a row that becomes complete, and for the release of one
    /// that was complete at once.
    pub(crate) fn lease_ms(&self) -> Option<i64> {
        let is_leased = match self.kind {
            Kind::Claim | Kind::Renew => true,
            Kind::ClaimComplete | Kind::Complete => false,
            Kind::Release | Kind::Check => self.terms.permanence() != Permanence::OnClaim,
        };
        is_leased.then(|| self.terms.lease_ms())
    }

    /// Returns `true` if its row stores data.
    pub(crate) fn stores_data(&self) -> bool {
        matches!(self.kind, Kind::ClaimComplete | Kind::Complete) && self.terms.stores_data()
    }

    /// Returns the size of the response that its row stores.
    pub(super) fn bytes(&self) -> usize {
        let stored = self.terms.stored_data_for(&self.key);
        stored.and_then(|stored| stored.response).map_or(0, |response| response.body.len())
    }
}

impl BatchItem for Arc<Call> {
    type Reply = RowReply;

    /// A batch has equal terms, except for tokens and data to store: each statement has one retention, one lease
    /// and one class of stored data.
    fn can_join(&self, other: &Self) -> bool {
        let terms = |call: &Self| {
            (call.kind, call.terms.retention(), call.terms.permanence(), call.terms.fetch())
        };
        terms(self) == terms(other)
    }

    fn is_bounded(&self) -> bool {
        self.kind.is_claim()
    }
}

/// A row of a statement: the call that names its key, and its reply once it has one. The rows of a statement have equal
/// terms, except for tokens and data to store.
pub(crate) struct RowCall<'c> {
    pub(crate) call: &'c Arc<Call>,
    pub(crate) reply: Replied,
}

impl<'c> RowCall<'c> {
    pub(crate) fn new(call: &'c Arc<Call>) -> Self {
        Self { call, reply: None }
    }
}

/// Returns the rows without a reply.
pub(crate) fn unanswered<'r, 'c>(rows: &'r mut [RowCall<'c>]) -> Vec<&'r mut RowCall<'c>> {
    rows.iter_mut().filter(|row| row.reply.is_none()).collect()
}

/// Returns the stored data that a batch reads: no responses.
pub(crate) fn without_response(fetch: Fetch) -> Fetch {
    if fetch == Fetch::Nothing { Fetch::Nothing } else { Fetch::Digest }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::super::terms::Token;
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
