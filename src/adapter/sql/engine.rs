//! How calls become statements, for every SQL database.
//!
//! A dialect supplies single statements. This module decides which statement is sent for which keys:
//!
//! 1. A claim and a completion go in [rounds](super::rounds).
//! 2. If several calls of a batch name one key, only the first call's row is sent. The resulting row
//!    decides the replies to the other calls. A call without a reply is sent in the next statement.
//! 3. A batch that fails because of one row is sent again in parts, and a part that fails one by one, without the rows
//!    that have their reply, until the bad row stands alone and only its caller gets the error. So it goes with every kind of call, for
//!    [`SPLIT_TIME`] at most: then the calls that are left get the error, and are repeated by their callers. After
//!    any other failure all callers of the statement get the same error.
//! 4. A claim that stands alone and meets a row of an open transaction is in flight. The claims that rule 3 leaves
//!    are an error and not in flight, because their keys may be free.
//! 5. A statement carries at most 8 MiB of responses, or one response that is larger. A batch reads
//!    no [responses](super::responses). A statement that reads responses reads at most 64.

use std::collections::VecDeque;
use std::future::Future;
use std::time::{Duration, Instant};

use super::super::replies::{Claimed, Renewed};
use super::call::{Call, Kind, RowCall, RowReply, Rows, missing_reply};
use super::queue::Waits;
use super::rounds::{KeyReply, Rounds, RowStatements};
use crate::error::Error;

/// For how long a refused batch is split, from the begin of the first refused statement on. Meanwhile its lane sends
/// nothing else, and renewals wait for it.
const SPLIT_TIME: Duration = Duration::from_secs(1);
/// How many bytes of responses one statement carries. They are in memory three times while the
/// statement is sent, and a message has at most 1 GiB.
const MAX_BYTES: usize = 8 * 1_024 * 1_024;

/// The statements and error classes of a database.
pub(in crate::adapter) trait Dialect: RowStatements {
    /// Renews or releases the rows of these tokens. Returns which rows it wrote.
    fn update_by_token(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
    ) -> impl Future<Output = Result<Vec<bool>, sqlx::Error>> + Send;

    /// Forgets rows at these versions that no live lease holds. Returns which rows it forgot.
    fn forget(
        &mut self,
        rows: &Rows<'_>,
        versions: &[i64],
    ) -> impl Future<Output = Result<Vec<bool>, sqlx::Error>> + Send;

    /// Returns `true` if a transaction of this crate holds the key, as far as the database shows it.
    fn is_held_by_transaction(
        &mut self,
        row: &RowCall<'_>,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

    /// Notes how many of the rows of a claim were known before the claim.
    fn note_known_rows(&self, known: usize, rows: usize) {
        let _ = (known, rows);
    }

    fn error(&self, context: &'static str, error: sqlx::Error) -> Error;

    /// Returns `true` if one row may have caused the error: the other rows can go without it.
    fn is_row_error(error: &sqlx::Error) -> bool;

    /// Returns `true` if an open transaction holds a row for longer than the statement waits.
    fn is_locked(error: &sqlx::Error) -> bool;
}

/// Why a statement failed.
struct Failed {
    error: Error,
    /// Whether the other rows can go without one of them.
    is_row_error: bool,
}

/// Sends one call without the queue: its caller polls this future.
pub(in crate::adapter) async fn execute_one<D: Dialect>(
    dialect: &mut D,
    call: &Call,
) -> Result<RowReply, Error> {
    let replies = execute_batch(dialect, std::slice::from_ref(call), &|_| true).await;
    replies.into_iter().next().unwrap_or_else(|| Err(missing_reply()))
}

/// Sends a batch: rules 2, 3 and 5.
pub(in crate::adapter) async fn execute_batch<D: Dialect>(
    dialect: &mut D,
    calls: &[Call],
    waits: &Waits<'_>,
) -> Vec<Result<RowReply, Error>> {
    let mut replies: Vec<Option<Result<RowReply, Error>>> = calls.iter().map(|_| None).collect();
    let mut parts = split_by_size(calls);
    // The end of the time to split, and the last refusal.
    let mut refused: Option<(Instant, Box<dyn Fn() -> Error + Send + Sync>)> = None;
    // After one, a statement may have granted a key to a call that is sent again.
    let mut has_unknown = false;
    while let Some(part) = parts.pop_front() {
        let start = Instant::now();
        if let Some((_, error)) = refused.as_ref().filter(|(deadline, _)| start >= *deadline) {
            part.into_iter().for_each(|call| replies[call] = Some(Err(error())));
            continue;
        }
        let layout = Layout::new(calls, &part, waits);
        let reads_first = part.iter().any(|call| calls[*call].reads_first);
        let (rows, failed) = execute_rows(dialect, &layout, reads_first).await;
        let mut unanswered = Vec::new();
        for (call, reply) in part.into_iter().zip(layout.replies(rows)) {
            match reply {
                Some(reply) => replies[call] = Some(reply),
                None => unanswered.push(call),
            }
        }
        if unanswered.is_empty() {
            continue;
        }
        let Some(Failed { error, is_row_error }) = failed else {
            parts.push_front(unanswered);
            continue;
        };
        // The other parts would be lost too, and each would leave a statement behind on the server.
        let ends = error.is_unknown() && !is_row_error;
        has_unknown |= error.is_unknown();
        let error = if has_unknown { error.with_unknown_outcome() } else { error }.shared();
        if is_row_error && unanswered.len() > 1 {
            // So a row that is locked is waited for in three statements.
            let size = if refused.is_none() { unanswered.len().isqrt() } else { 1 };
            let deadline = refused.map_or(start + SPLIT_TIME, |(deadline, _)| deadline);
            refused = Some((deadline, Box::new(error)));
            parts.extend(unanswered.chunks(size).map(<[usize]>::to_vec));
        } else {
            unanswered.into_iter().for_each(|call| replies[call] = Some(Err(error())));
            let lost = if ends { std::mem::take(&mut parts) } else { VecDeque::new() };
            lost.into_iter().flatten().for_each(|call| replies[call] = Some(Err(error())));
        }
    }
    replies.into_iter().map(|reply| reply.unwrap_or_else(|| Err(missing_reply()))).collect()
}

/// Returns the indexes of all calls, in parts that are not too large.
fn split_by_size(calls: &[Call]) -> VecDeque<Vec<usize>> {
    let (mut parts, mut part, mut bytes) = (VecDeque::new(), Vec::new(), 0_usize);
    for (index, call) in calls.iter().enumerate() {
        let more = call.bytes();
        if !part.is_empty() && bytes.saturating_add(more) > MAX_BYTES {
            parts.push_back(std::mem::take(&mut part));
            bytes = 0;
        }
        bytes = bytes.saturating_add(more);
        part.push(index);
    }
    if !part.is_empty() {
        parts.push_back(part);
    }
    parts
}

/// The rows of a batch, each key once.
struct Layout<'c> {
    kind: Kind,
    rows: Rows<'c>,
    /// Each call, its row, and whether the row is sent for this call.
    calls: Vec<(&'c Call, usize, bool)>,
}

impl<'c> Layout<'c> {
    /// `part` are the indexes of calls that may join.
    fn new(calls: &'c [Call], part: &[usize], waits: &'c Waits<'c>) -> Self {
        let calls: Vec<&Call> = part.iter().map(|index| &calls[*index]).collect();
        let mut sorted: Vec<usize> = (0..calls.len()).collect();
        // Every batch locks its rows in this order. The first call of those that name a key comes first.
        sorted.sort_unstable_by_key(|at| (calls[*at].hash, &calls[*at].key, *at));
        let mut rows: Vec<RowCall<'c>> = Vec::with_capacity(sorted.len());
        let mut named: Vec<_> = calls.iter().map(|call| (*call, 0, false)).collect();
        for at in sorted {
            let call = calls[at];
            let is_first = rows.last().is_none_or(|row| *row.key != call.key);
            if is_first {
                rows.push(call.row(part[at]));
            }
            named[at] = (call, rows.len() - 1, is_first);
        }
        let kind = calls.first().map_or(Kind::Claim, |call| call.kind);
        Self { kind, rows: Rows { rows, waits }, calls: named }
    }

    /// Returns the reply to each call; `None` for a call that the rows do not answer.
    fn replies(&self, rows: Vec<Option<KeyReply>>) -> Vec<Option<Result<RowReply, Error>>> {
        let (mut own, rows): (Vec<_>, Vec<_>) =
            rows.into_iter().map(|row| row.map(|row| (row.reply, row.row)).unzip()).unzip();
        let reply_to =
            |(call, row, is_own): &(&Call, usize, bool)| match rows.get(*row)?.as_ref()? {
                _ if *is_own => own[*row].take(),
                Some(row) => {
                    let claimed = row.claimed(&call.terms).transpose();
                    claimed.map(|claimed| claimed.map(RowReply::Claimed))
                }
                None => Some(Ok(RowReply::Claimed(Claimed::InFlight))),
            };
        self.calls.iter().map(reply_to).collect()
    }
}

/// Sends the rows of calls that may join. Returns the reply of each row that has one, and why the others have none.
async fn execute_rows<D: Dialect>(
    dialect: &mut D,
    Layout { kind, rows, .. }: &Layout<'_>,
    reads_first: bool,
) -> (Vec<Option<KeyReply>>, Option<Failed>) {
    let failed = |dialect: &D, error| Failed {
        is_row_error: D::is_row_error(&error),
        error: dialect.error(kind.context(), error),
    };
    if matches!(kind, Kind::Renew | Kind::Release | Kind::ReleaseComplete) {
        let reply =
            |updated| Some(KeyReply { reply: Ok(updated_reply(*kind, updated)), row: None });
        return match dialect.update_by_token(*kind, rows).await {
            Ok(updated) => (updated.into_iter().map(reply).collect(), None),
            Err(error) => (rows.iter().map(|_| None).collect(), Some(failed(dialect, error))),
        };
    }
    let mut rounds = Rounds::new(*kind, rows);
    let ran = rounds.run(dialect, reads_first && kind.is_claim()).await;
    if kind.is_claim() {
        dialect.note_known_rows(rounds.known, rows.len() - rounds.unanswered().len());
    }
    match (ran, &rounds.unanswered()[..]) {
        (Ok(()), _) => {}
        // Rule 4.
        (Err(error), unanswered) => {
            let is_locked = D::is_locked(&error);
            let failed = failed(dialect, error);
            // After a lost reply, the claim may hold the row itself.
            match unanswered {
                [index] if kind.is_claim() && is_locked && !failed.error.is_unknown() => {
                    rounds.set_held(*index);
                }
                _ => return (rounds.replies, Some(failed)),
            }
        }
    }
    (rounds.finish().into_iter().map(Some).collect(), None)
}

fn updated_reply(kind: Kind, updated: bool) -> RowReply {
    match (kind, updated) {
        (Kind::Renew, true) => RowReply::Renewed(Renewed::Held),
        (Kind::Renew, false) => RowReply::Renewed(Renewed::Lost),
        _ => RowReply::Released,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use http::{HeaderMap, StatusCode};

    use super::super::super::replies::Completed;
    use super::super::super::stored::StoredResponse;
    use super::super::super::terms::{CallTerms, Token};
    use super::super::rounds::ROUNDS;
    use super::super::table::Table;
    use super::*;
    use crate::key::DedupKey;

    fn call_of(kind: Kind, id: u128) -> Call {
        let key = DedupKey::new("a", &id.to_string()).unwrap();
        let (token, minute) = (Token::random(), Duration::from_secs(60));
        let terms = match kind {
            Kind::ClaimComplete => CallTerms::on_claim(token, minute),
            _ => CallTerms::on_completion(token, minute, minute),
        };
        Call::new(kind, &key, &terms, |_| id)
    }

    fn calls(kind: Kind, count: u128) -> Vec<Call> {
        (0..count).map(|id| call_of(kind, id)).collect()
    }

    /// Returns a letter for the reply to each call.
    async fn execute(table: &mut Table, calls: &[Call]) -> String {
        let replies = execute_batch(table, calls, &|_| true).await;
        let letter = |reply| match reply {
            RowReply::Claimed(Claimed::First { .. }) => 'F',
            RowReply::Claimed(Claimed::Duplicate(_)) => 'D',
            RowReply::Claimed(Claimed::InFlight) => 'I',
            RowReply::Completed(Completed::LeaseLost) => 'L',
            _ => 'H',
        };
        let text = |reply: Result<RowReply, Error>| match reply {
            Ok(reply) => letter(reply),
            Err(error) if error.is_unknown() => '?',
            Err(_) => 'E',
        };
        replies.into_iter().map(text).collect()
    }

    /// The replies to 64 calls, of which one differs.
    fn except(at: usize, one: char, others: char) -> String {
        (0..64).map(|index| if index == at { one } else { others }).collect()
    }

    #[tokio::test]
    async fn claims_beside_a_row_that_is_held_are_sent_in_parts() {
        let mut table = Table { held: HashSet::from([17]), ..Table::default() };
        let replies = execute(&mut table, &calls(Kind::Claim, 64)).await;
        // The eight parts, and then the calls of the part with the row.
        let writes = [&[64][..], &[8; 8], &[1; 8]].concat();
        assert_eq!((replies, &table.writes), (except(17, 'I', 'F'), &writes));
        assert_eq!(table.reads, [], "no call reads first");
        assert_eq!(table.noted.into_inner().unwrap(), Some((0, 63)));
    }

    #[tokio::test]
    async fn claim_of_a_row_that_is_held_is_in_flight() {
        let mut table = Table { held: HashSet::from([0]), ..Table::default() };
        assert_eq!(execute(&mut table, &calls(Kind::Claim, 1)).await, "I");
        assert_eq!(table.writes, [1]);
    }

    #[tokio::test]
    async fn row_of_a_transaction_that_commits_meanwhile_is_a_duplicate() {
        let held = HashSet::from([17]);
        let mut table = Table { held, commits: true, ..Table::default() };
        let mut calls = calls(Kind::ClaimComplete, 64);
        calls[3].reads_first = true;
        let known = call_of(Kind::ClaimComplete, 40);
        assert_eq!(execute(&mut table, &[known]).await, "F");
        assert_eq!(table.noted.lock().unwrap().take(), Some((0, 1)));
        let replies = execute(&mut table, &calls).await;
        let duplicates = [17, 40];
        for (index, letter) in replies.chars().enumerate() {
            assert_eq!(letter, if duplicates.contains(&index) { 'D' } else { 'F' }, "{index}");
        }
        assert_eq!(table.noted.into_inner().unwrap(), Some((2, 64)), "40, and 17 in its part");
    }

    /// The rows may be free: a sender has to repeat these deliveries, and a ledger these completions.
    #[tokio::test]
    async fn calls_are_errors_when_the_time_to_split_them_is_over() {
        for kind in [Kind::Claim, Kind::Complete] {
            let held = HashSet::from([17]);
            let mut table = Table { held, waits: SPLIT_TIME, ..Table::default() };
            assert_eq!(execute(&mut table, &calls(kind, 64)).await, "E".repeat(64), "{kind:?}");
            assert_eq!(table.writes, [64], "{kind:?}");
        }
    }

    /// The rows of the first part were written, and the next part is the one that waits too long.
    #[tokio::test]
    async fn parts_that_were_written_in_time_keep_their_replies() {
        let mut table =
            Table { held: HashSet::from([9]), waits: SPLIT_TIME * 2 / 3, ..Table::default() };
        let replies = execute(&mut table, &calls(Kind::Complete, 64)).await;
        assert_eq!(replies, "H".repeat(8) + &"E".repeat(56));
        assert_eq!(table.writes, [64, 8, 8]);
    }

    #[tokio::test]
    async fn failure_of_a_part_leaves_the_replies_to_the_others() {
        let mut table = Table { held: HashSet::from([17]), refused: Some(3), ..Table::default() };
        let mut expected = except(17, 'I', 'F');
        expected.replace_range(8..16, &"E".repeat(8));
        assert_eq!(execute(&mut table, &calls(Kind::Claim, 64)).await, expected);
        assert_eq!(table.writes, [&[64][..], &[8; 8], &[1; 8]].concat());
        let mut table = Table { refused: Some(1), ..Table::default() };
        assert_eq!(execute(&mut table, &calls(Kind::Claim, 64)).await, "E".repeat(64));
    }

    #[tokio::test]
    async fn row_that_cannot_be_written_fails_its_own_call_only() {
        for kind in [Kind::Claim, Kind::Complete] {
            let mut table = Table { bad: Some(17), ..Table::default() };
            let replies = execute(&mut table, &calls(kind, 64)).await;
            let others = if kind == Kind::Claim { 'F' } else { 'H' };
            assert_eq!(replies, except(17, 'E', others), "{kind:?}");
            // The eight parts, and then the calls of the part with the bad row.
            assert_eq!(table.writes, [&[64][..], &[8; 8], &[1; 8]].concat(), "{kind:?}");
            assert_eq!(table.noted.into_inner().unwrap().is_some(), kind == Kind::Claim);
        }
    }

    #[tokio::test]
    async fn completion_of_a_row_that_is_held_fails_its_own_call_only() {
        let mut table = Table { held: HashSet::from([17]), ..Table::default() };
        let replies = execute(&mut table, &calls(Kind::Complete, 64)).await;
        assert_eq!(replies, except(17, 'E', 'H'));
    }

    /// The row is free again when the completion reads it, or another run has completed it.
    #[tokio::test]
    async fn completion_that_finds_a_changed_row_is_repeated_unless_the_row_is_complete() {
        for (other, reply, writes) in [(Kind::Claim, "H", 2), (Kind::ClaimComplete, "L", 1)] {
            let mut table = Table::default();
            assert_eq!(execute(&mut table, &[call_of(other, 1)]).await, "F");
            (table.misses, table.writes) = (1, Vec::new());
            assert_eq!(execute(&mut table, &[call_of(Kind::Complete, 1)]).await, reply);
            assert_eq!(table.writes, vec![1; writes], "{other:?}");
        }
    }

    /// The event may not be complete, so its ledger has to repeat the completion.
    #[tokio::test]
    async fn completion_without_a_reply_has_an_unknown_outcome() {
        let mut table = Table { misses: ROUNDS, ..Table::default() };
        assert_eq!(execute(&mut table, &[call_of(Kind::Complete, 1)]).await, "?");
        assert_eq!(table.writes, [1; ROUNDS]);
        let mut table = Table { misses: ROUNDS - 1, ..Table::default() };
        assert_eq!(execute(&mut table, &[call_of(Kind::Complete, 1)]).await, "H");
    }

    #[tokio::test]
    async fn row_that_cannot_be_written_fails_alone_beside_a_row_that_is_held() {
        let mut table = Table { held: HashSet::from([17]), bad: Some(60), ..Table::default() };
        let replies = execute(&mut table, &calls(Kind::Claim, 64)).await;
        let mut expected = except(17, 'I', 'F');
        expected.replace_range(60..61, "E");
        assert_eq!(replies, expected);
    }

    #[tokio::test]
    async fn calls_that_name_one_key_share_its_row() {
        let same = |kind| [1, 1, 2].map(|id| call_of(kind, id));
        for (kind, replies) in [(Kind::ClaimComplete, "FDF"), (Kind::Claim, "FIF")] {
            let mut table = Table::default();
            assert_eq!(execute(&mut table, &same(kind)).await, replies, "{kind:?}");
            assert_eq!(table.writes, [2], "{kind:?}");
        }
    }

    /// The first call's row does not say when its key was first seen.
    #[tokio::test]
    async fn call_that_the_row_of_another_call_does_not_answer_is_sent_again() {
        let calls = [1, 1].map(|id| call_of(Kind::ClaimComplete, id));
        let mut table = Table { attempt: 2, refused: Some(2), ..Table::default() };
        assert_eq!(execute(&mut table, &calls).await, "FE");
        // Without the refusal, no read says when.
        let mut table = Table { attempt: 2, ..Table::default() };
        assert_eq!(execute(&mut table, &calls).await, "F?");
    }

    fn call(bytes: usize) -> Call {
        let key = DedupKey::new("a", "1").unwrap();
        let terms = CallTerms::on_claim(Token::random(), Duration::ZERO);
        let body = vec![0; bytes].into();
        let response = StoredResponse::new(StatusCode::OK, HeaderMap::new(), body);
        let terms = terms.with_response(response.into());
        Call::new(Kind::Complete, &key, &terms, |_| 0)
    }

    #[test]
    fn batch_with_large_responses_is_sent_in_parts() {
        let small: Vec<_> = (0..1_024).map(|_| call(100)).collect();
        assert_eq!(split_by_size(&small), [(0..1_024).collect::<Vec<_>>()]);
        let half = MAX_BYTES / 2;
        let sizes = [half, half, 1, MAX_BYTES * 2, MAX_BYTES, 1];
        let large: Vec<_> = sizes.map(call).into();
        let parts = [vec![0, 1], vec![2], vec![3], vec![4], vec![5]];
        assert_eq!(split_by_size(&large), parts);
        assert!(split_by_size(&[]).is_empty());
    }
}
