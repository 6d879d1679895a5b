//! The calls of a store, their replies, and how the calls of a batch become statements, for every
//! SQL database.
//!
//! 1. If several calls of a batch name one key, only the first call's row is sent. Its reply
//!    decides those of other claims, as far as it can. A call without a reply is sent in the next
//!    statement.
//! 2. A batch that fails because of one row is sent again in parts, without the rows that have
//!    their reply. A part that fails is sent one row at a time, until only the caller of the bad
//!    row gets the error. This applies to every kind of call, for at most [`SPLIT_TIME`]. Then the
//!    remaining calls get the error, and their callers repeat them. These calls are not in flight,
//!    because their keys may be free. After any other failure, all callers of the statement get the
//!    same error.
//! 3. A statement carries at most 8 MiB of responses, or one response that is larger. A batch reads
//!    no responses: see [`SqlStore::read_response`](super::store::SqlStore::read_response).

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::contract::{CallTerms, ClaimReply, CompleteReply, Fetch, Permanence, RenewReply};
use super::queue::BatchItem;
use super::row::{Row, first};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;

/// For how long a refused batch is split, from the begin of the first refused statement on.
/// Meanwhile its worker sends nothing else, and renewals wait for it.
const SPLIT_TIME: Duration = Duration::from_secs(1);
/// How often a claim or a completion is sent: another caller may change a row between two
/// statements.
pub(crate) const TRIES: usize = 5;
/// How many bytes of responses one statement carries. They are in memory three times while the
/// statement is sent, and a message has at most 1 GiB.
const MAX_BYTES: usize = 8 * 1_024 * 1_024;

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

    /// Returns the error of a row without a reply: a claim is then released, and a completion is
    /// repeated.
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
    /// An open transaction holds the row, and the statement has passed over it. Not for a claim or
    /// a renewal.
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
    kind: Kind,
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

    /// Returns the lease of its row, in milliseconds; `None` for a row that becomes complete, and
    /// for the release of one that was complete at once.
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
    fn bytes(&self) -> usize {
        self.terms.response().map_or(0, |response| response.body.len())
    }
}

impl BatchItem for Arc<Call> {
    type Reply = RowReply;

    /// A batch has equal terms, except for tokens and data to store: each statement has one
    /// retention, one lease and one class of stored data.
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

/// A row of a statement: the call that names its key, and its reply once it has one. The rows of a
/// statement are sorted by hash and key, and have equal terms, except for tokens and data to store.
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

/// Returns the reply to a claim in a transaction of the user's. A row that others changed in every
/// try is in flight: no statement of the claim is late, because it ends with the transaction.
pub(crate) fn claimed(reply: Replied) -> Result<ClaimReply, StoreError> {
    match reply.transpose()? {
        Some(RowReply::Claimed(reply, _)) => Ok(reply),
        Some(_) => Err(missing_reply()),
        None => Ok(ClaimReply::InFlight),
    }
}

/// Sends rows of one kind to a database.
pub(crate) trait RowExecutor: Send {
    /// Sends rows that name each key once. Sets their replies, and returns why some have none:
    /// without a failure, other callers changed them in every try.
    fn execute(
        &mut self,
        kind: Kind,
        rows: &mut [RowCall<'_>],
    ) -> impl Future<Output = Option<Failed>> + Send;
}

/// Why a statement failed.
pub(crate) struct Failed {
    pub(crate) error: StoreError,
    /// Whether the other rows can go without one of them.
    pub(crate) is_row_error: bool,
}

/// Sends a batch.
pub(crate) async fn execute_batch<E: RowExecutor>(
    executor: &mut E,
    calls: &[Arc<Call>],
) -> Vec<Result<RowReply, StoreError>> {
    let kind = calls.first().map_or(Kind::Claim, |call| call.kind);
    let mut replies: Vec<Replied> = vec![None; calls.len()];
    let mut parts = VecDeque::from(in_parts(calls));
    // The end of the time to split, and the last refusal.
    let mut refused: Option<(Instant, StoreError)> = None;
    // After one, a statement may have granted a key to a call that is sent again.
    let mut has_unknown = false;
    while let Some(part) = parts.pop_front() {
        let start = Instant::now();
        if let Some((_, error)) = refused.as_ref().filter(|(deadline, _)| start >= *deadline) {
            part.into_iter().for_each(|call| replies[call] = Some(Err(error.clone())));
            continue;
        }
        let is_same = |one: &usize, other: &usize| calls[*one].key == calls[*other].key;
        let row = |named: &[usize]| RowCall::new(&calls[named[0]]);
        let mut rows: Vec<_> = part.chunk_by(is_same).map(row).collect();
        let failed = executor.execute(kind, &mut rows).await;
        let mut unanswered = Vec::new();
        for (named, RowCall { call: sent, reply }) in part.chunk_by(is_same).zip(rows) {
            let reply = if failed.is_none() { reply.or(Some(Err(kind.unknown()))) } else { reply };
            for call in named {
                match reply.clone().and_then(|reply| reply_to(&calls[*call], sent, reply)) {
                    Some(reply) => replies[*call] = Some(reply),
                    None => unanswered.push(*call),
                }
            }
        }
        if unanswered.is_empty() {
            continue;
        }
        let Some(Failed { error, is_row_error }) = failed else {
            if unanswered.len() < part.len() {
                parts.push_front(unanswered);
            }
            continue;
        };
        // The other parts would be lost too, and each would leave a statement behind on the server.
        let ends = error.is_unknown() && !is_row_error;
        has_unknown |= error.is_unknown();
        let error = if has_unknown { error.with_unknown_outcome() } else { error };
        if is_row_error && unanswered.len() > 1 {
            // So a row that is locked is waited for in three statements.
            let size = if refused.is_some() { 1 } else { unanswered.len().isqrt() };
            let deadline = refused.map_or(start + SPLIT_TIME, |(deadline, _)| deadline);
            refused = Some((deadline, error));
            parts.extend(unanswered.chunks(size).map(<[_]>::to_vec));
        } else {
            let lost = if ends { std::mem::take(&mut parts) } else { VecDeque::new() };
            for call in lost.into_iter().flatten().chain(unanswered) {
                replies[call] = Some(Err(error.clone()));
            }
        }
    }
    replies.into_iter().map(|reply| reply.unwrap_or_else(|| Err(missing_reply()))).collect()
}

/// Returns the indexes of all calls, sorted by their rows, in parts that are not too large.
fn in_parts(calls: &[Arc<Call>]) -> Vec<Vec<usize>> {
    let mut sorted: Vec<usize> = (0..calls.len()).collect();
    // Every batch locks its rows in this order. The first call of those that name a key comes
    // first.
    sorted.sort_unstable_by_key(|at| (calls[*at].hash, &calls[*at].key, *at));
    let (mut parts, mut bytes) = (Vec::<Vec<usize>>::new(), 0_usize);
    for index in sorted {
        let size = calls[index].bytes();
        bytes = bytes.saturating_add(size);
        match parts.last_mut() {
            Some(part) if bytes <= MAX_BYTES => part.push(index),
            _ => {
                parts.push(vec![index]);
                bytes = size;
            }
        }
    }
    parts
}

/// Returns the reply to a call by the reply to the one that was sent for its key; `None` if it does
/// not answer the call.
fn reply_to(call: &Arc<Call>, sent: &Arc<Call>, reply: Result<RowReply, StoreError>) -> Replied {
    if Arc::ptr_eq(call, sent) {
        return Some(reply);
    }
    let mine = call.terms.token();
    // The row was not written for a caller that has gone.
    if !call.kind.is_claim() || !sent.has_caller() || sent.terms.token() == mine {
        return None;
    }
    match reply {
        // A claim that is repeated with the token of the row gets its key again.
        Ok(RowReply::Claimed(_, Some(token))) if token == *mine.as_bytes() => None,
        Ok(RowReply::Claimed(ClaimReply::First { .. }, _)) => {
            // Without a lease, the row has lapsed at once.
            let is_leased = call.kind == Kind::Claim && !sent.terms.lease().is_zero();
            is_leased.then_some(Ok(RowReply::IN_FLIGHT))
        }
        reply => Some(reply),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use http::{HeaderMap, StatusCode};

    use super::super::super::replies::Seen;
    use super::super::super::stored::StoredResponse;
    use super::super::super::terms::Token;
    use super::*;

    /// A table in memory, with other programs around it. Its keys are numbers.
    #[derive(Default)]
    struct Table {
        rows: HashMap<u128, Token>,
        /// Rows that no statement can write, and how long a statement takes that meets one.
        bad: Vec<u128>,
        waits: Duration,
        /// A row that another program changes in every try of a completion.
        silent: Option<u128>,
        /// The number of the statement that is refused for no row's sake.
        refused: Option<usize>,
        /// How many rows each statement had.
        sent: Vec<usize>,
    }

    impl RowExecutor for Table {
        async fn execute(&mut self, kind: Kind, rows: &mut [RowCall<'_>]) -> Option<Failed> {
            self.sent.push(rows.len());
            let is_row_error = rows.iter().any(|row| self.bad.contains(&row.call.hash));
            if is_row_error {
                std::thread::sleep(self.waits);
            }
            if is_row_error || self.refused == Some(self.sent.len()) {
                let error = StoreError::new(StoreErrorKind::Refused, "testing");
                return Some(Failed { error, is_row_error });
            }
            for RowCall { call, reply } in rows {
                let mine = call.terms.token();
                let replied = match kind {
                    _ if !call.has_caller() || self.silent == Some(call.hash) => continue,
                    _ if kind.is_claim() => {
                        let token = *self.rows.entry(call.hash).or_insert(mine);
                        let seen = ClaimReply::Duplicate(Seen::new(Duration::ZERO));
                        let reply = if token == mine { ClaimReply::first(1, false) } else { seen };
                        RowReply::Claimed(reply, Some(*token.as_bytes()))
                    }
                    _ => RowReply::Completed(CompleteReply::Held),
                };
                *reply = Some(Ok(replied));
            }
            None
        }
    }

    fn call_of(kind: Kind, id: u128) -> Arc<Call> {
        let (token, minute) = (Token::random(), Duration::from_secs(60));
        let terms = match kind {
            Kind::ClaimComplete => CallTerms::on_claim(token, minute),
            _ => CallTerms::on_completion(token, minute, minute),
        };
        Call::new(kind, &DedupKey::new("a", &id.to_string()).unwrap(), &terms, id)
    }

    /// Returns a letter for the reply to each call. Their callers wait.
    async fn execute(table: &mut Table, calls: &[Arc<Call>]) -> String {
        let _callers = calls.to_vec();
        let letter = |reply| match reply {
            Ok(RowReply::Claimed(ClaimReply::First { .. }, _)) => 'F',
            Ok(RowReply::Claimed(ClaimReply::Duplicate(_), _)) => 'D',
            Ok(RowReply::Claimed(ClaimReply::InFlight, _)) => 'I',
            Ok(_) => 'H',
            Err(error) if StoreError::is_unknown(&error) => 'U',
            Err(_) => 'E',
        };
        execute_batch(table, calls).await.into_iter().map(letter).collect()
    }

    /// Returns how often each value stands in a row: `2×F 1×I`.
    fn runs<T: PartialEq + std::fmt::Display>(values: &[T]) -> String {
        let runs = values.chunk_by(PartialEq::eq).map(|run| format!("{}×{}", run.len(), run[0]));
        runs.collect::<Vec<_>>().join(" ")
    }

    /// Rows may be free whose calls are errors: a sender repeats these deliveries, and a ledger
    /// these completions.
    #[tokio::test]
    async fn batch_with_a_bad_row_goes_in_parts_while_there_is_time() {
        // The parts of eight, and then the calls of the part with the row.
        const PARTS: &str = "1×64 8×8 8×1";
        let (at_once, late) = (Duration::ZERO, SPLIT_TIME * 2 / 3);
        for (bad, waits, refused, replies, sent) in [
            (&[17][..], at_once, None, "17×F 1×E 46×F", PARTS),
            (&[17, 60], at_once, None, "17×F 1×E 42×F 1×E 3×F", "1×64 8×8 16×1"),
            // The time is over.
            (&[17], SPLIT_TIME, None, "64×E", "1×64"),
            (&[9], late, None, "8×F 56×E", "1×64 2×8"),
            // A statement fails, and not because of a row.
            (&[17], at_once, Some(3), "8×F 8×E 1×F 1×E 46×F", PARTS),
            (&[], at_once, Some(1), "64×E", "1×64"),
        ] {
            let calls: Vec<_> = (0..64).map(|id| call_of(Kind::Claim, id)).collect();
            let mut table = Table { bad: bad.to_vec(), waits, refused, ..Table::default() };
            let replied: Vec<_> = execute(&mut table, &calls).await.chars().collect();
            assert_eq!((&*runs(&replied), &*runs(&table.sent)), (replies, sent));
        }
    }

    /// The event may not be complete, so its ledger has to repeat the completion.
    #[tokio::test]
    async fn completion_without_a_reply_has_an_unknown_outcome() {
        let mut table = Table { silent: Some(1), ..Table::default() };
        assert_eq!(execute(&mut table, &[1, 2].map(|id| call_of(Kind::Complete, id))).await, "UH");
    }

    #[tokio::test]
    async fn calls_that_name_one_key_share_its_row() {
        for (kind, replies, sent) in [
            (Kind::ClaimComplete, "FDDF", &[2, 1][..]),
            (Kind::Claim, "FIIF", &[2]),
            (Kind::Complete, "HHHH", &[2, 1, 1]),
        ] {
            let mut table = Table::default();
            let calls = [1, 1, 1, 2].map(|id| call_of(kind, id));
            assert_eq!((&*execute(&mut table, &calls).await, &*table.sent), (replies, sent));
        }
        // A claim without a lease keeps no other claim of its key in flight.
        let lapsed = CallTerms::on_completion(Token::random(), Duration::MAX, Duration::ZERO);
        let lapsed = Call::new(Kind::Claim, &DedupKey::new("a", "1").unwrap(), &lapsed, 1);
        let calls = [lapsed, call_of(Kind::Claim, 1)];
        assert_eq!(execute(&mut Table::default(), &calls).await, "FD");
    }

    /// The row is that of the second call, whose first reply was lost.
    #[tokio::test]
    async fn claim_that_is_repeated_behind_another_claim_of_its_key_gets_the_key_again() {
        let calls = [1, 1, 1].map(|id| call_of(Kind::ClaimComplete, id));
        let rows = HashMap::from([(1, calls[1].terms.token())]);
        assert_eq!(execute(&mut Table { rows, ..Table::default() }, &calls).await, "DFD");
    }

    /// Its row is not written.
    #[tokio::test]
    async fn call_is_sent_again_if_the_caller_of_its_row_has_gone() {
        let calls = [1, 1].map(|id| call_of(Kind::Claim, id));
        let _caller = Arc::clone(&calls[1]);
        let replies = execute_batch(&mut Table::default(), &calls).await;
        let is_first =
            |reply: &RowReply| matches!(reply, RowReply::Claimed(ClaimReply::First { .. }, _));
        assert!(matches!(&replies[..], [Err(_), Ok(reply)] if is_first(reply)), "{replies:?}");
    }

    #[test]
    fn batch_with_large_responses_is_sent_in_parts() {
        let key = DedupKey::new("a", "1").unwrap();
        let call = |bytes| {
            let terms = CallTerms::on_claim(Token::random(), Duration::ZERO);
            let response =
                StoredResponse::new(StatusCode::OK, HeaderMap::new(), vec![0; bytes].into());
            Call::new(Kind::Complete, &key, &terms.with_response(response.into()), 0)
        };
        let small: Vec<_> = (0..1_024).map(|_| call(100)).collect();
        assert_eq!(in_parts(&small), [(0..1_024).collect::<Vec<_>>()]);
        let half = MAX_BYTES / 2;
        let large = [half, half, 1, MAX_BYTES * 2, MAX_BYTES, 1].map(call);
        assert_eq!(in_parts(&large), [vec![0, 1], vec![2], vec![3], vec![4], vec![5]]);
        assert!(in_parts(&[]).is_empty());
    }

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
            let terms = terms.with_payload_sha256(rand::random());
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
