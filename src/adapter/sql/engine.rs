//! How calls become statements, for every SQL database.
//!
//! A dialect supplies single statements. This module decides which statement is sent for which keys:
//!
//! 1. A claim and a completion go in [rounds](super::rounds).
//! 2. If several calls of a batch name one key, only the first call's row is sent. The resulting row
//!    decides the replies to the other calls. A call without a reply is sent in the next statement.
//! 3. A batch that fails because of one row is sent again in parts, until the bad row stands alone
//!    and only its caller gets the error. After any other failure all callers get the same error.
//! 4. A claim that meets a row of an open transaction is sent again without the keys that such a
//!    transaction is known to hold, in parts while one of them is still held, for [`SPLIT_TIME`] at
//!    most. After that the remaining keys are an error and not in flight, because they may be free.
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

/// How many parts a refused batch becomes. With more parts, fewer statements wait for a lock.
const PARTS: usize = 8;
/// For how long claims are split to find the rows that an open transaction holds.
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

    /// Returns which of these keys a transaction of this crate holds, as far as the database shows it.
    fn held_by_transactions(
        &mut self,
        rows: &Rows<'_>,
    ) -> impl Future<Output = Result<Vec<bool>, sqlx::Error>> + Send;

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
    execute_alone(dialect, call, 0, &|_| true).await
}

/// Sends one call as it would be sent without the queue. `index` is its place in its batch.
async fn execute_alone<D: Dialect>(
    dialect: &mut D,
    call: &Call,
    index: usize,
    waits: &Waits<'_>,
) -> Result<RowReply, Error> {
    let rows = Rows { rows: vec![call.row(index)], is_batch: false, waits };
    match execute_rows(dialect, call.kind, &rows, call.reads_first).await {
        Ok(replies) => replies.into_iter().next().ok_or_else(missing_reply)?.reply,
        Err(failed) => Err(failed.error),
    }
}

/// Sends a batch: rules 2, 3 and 5.
pub(in crate::adapter) async fn execute_batch<D: Dialect>(
    dialect: &mut D,
    calls: &[Call],
    waits: &Waits<'_>,
) -> Vec<Result<RowReply, Error>> {
    let mut replies: Vec<Option<Result<RowReply, Error>>> = calls.iter().map(|_| None).collect();
    // After a statement may have granted a key to a call, the outcome of a failure is unknown.
    let mut may_be_granted = vec![false; calls.len()];
    let mut parts = split_by_size(calls);
    while let Some(part) = parts.pop_front() {
        if let [one] = part[..] {
            let reply = execute_alone(dialect, &calls[one], one, waits).await;
            let unknown = |error: Error| {
                if may_be_granted[one] { error.with_unknown_outcome() } else { error }
            };
            replies[one] = Some(reply.map_err(unknown));
            continue;
        }
        let layout = Layout::new(calls, &part, waits);
        let reads_first = part.iter().any(|call| calls[*call].reads_first);
        match execute_rows(dialect, layout.kind, &layout.rows, reads_first).await {
            Ok(rows) => {
                let mut unanswered = Vec::new();
                for (call, reply) in part.into_iter().zip(layout.replies(rows)) {
                    match reply {
                        Some(reply) => replies[call] = Some(reply),
                        None => unanswered.push(call),
                    }
                }
                if !unanswered.is_empty() {
                    parts.push_front(unanswered);
                }
            }
            Err(Failed { error, is_row_error: true }) => {
                for call in &part {
                    may_be_granted[*call] |= error.is_unknown();
                }
                parts.extend(part.chunks(part.len().div_ceil(PARTS)).map(<[usize]>::to_vec));
            }
            Err(Failed { error, .. }) => {
                let error = error.shared();
                for call in part {
                    let error = error();
                    let error =
                        if may_be_granted[call] { error.with_unknown_outcome() } else { error };
                    replies[call] = Some(Err(error));
                }
            }
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
        Self { kind, rows: Rows { rows, is_batch: true, waits }, calls: named }
    }

    /// Returns the reply to each call; `None` for a call that the rows do not answer.
    fn replies(&self, rows: Vec<KeyReply>) -> Vec<Option<Result<RowReply, Error>>> {
        let (mut own, rows): (Vec<_>, Vec<_>) =
            rows.into_iter().map(|reply| (Some(reply.reply), reply.row)).unzip();
        let reply_to = |(call, row, is_own): &(&Call, usize, bool)| match rows.get(*row)? {
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

/// Sends the rows of calls that may join.
async fn execute_rows<D: Dialect>(
    dialect: &mut D,
    kind: Kind,
    rows: &Rows<'_>,
    reads_first: bool,
) -> Result<Vec<KeyReply>, Failed> {
    if matches!(kind, Kind::Renew | Kind::Release | Kind::ReleaseComplete) {
        let updated = dialect.update_by_token(kind, rows).await;
        let updated = updated.map_err(|error| Failed {
            is_row_error: D::is_row_error(&error),
            error: dialect.error(kind.context(), error),
        })?;
        let reply = |updated| KeyReply { reply: Ok(updated_reply(kind, updated)), row: None };
        return Ok(updated.into_iter().map(reply).collect());
    }
    let mut rounds = Rounds::new(kind, rows);
    let deadline = Instant::now() + SPLIT_TIME;
    match run_rounds(dialect, &mut rounds, reads_first && kind.is_claim(), deadline).await {
        Ok(()) => {
            if kind.is_claim() {
                dialect.note_known_rows(rounds.known, rows.len());
            }
            Ok(rounds.finish())
        }
        Err(error) => {
            // `run_rounds` has split locked claims already.
            let is_row_error =
                D::is_row_error(&error) && !(kind.is_claim() && D::is_locked(&error));
            let error = dialect.error(kind.context(), error);
            let error = if rounds.has_written { error.with_unknown_outcome() } else { error };
            Err(Failed { error, is_row_error })
        }
    }
}

fn updated_reply(kind: Kind, updated: bool) -> RowReply {
    match (kind, updated) {
        (Kind::Renew, true) => RowReply::Renewed(Renewed::Held),
        (Kind::Renew, false) => RowReply::Renewed(Renewed::Lost),
        _ => RowReply::Released,
    }
}

/// Runs the rounds; those of a claim around rows that an open transaction holds: rule 4.
async fn run_rounds<D: Dialect>(
    dialect: &mut D,
    rounds: &mut Rounds<'_, '_>,
    reads_first: bool,
    deadline: Instant,
) -> Result<(), sqlx::Error> {
    let Err(error) = rounds.run(dialect, reads_first).await else { return Ok(()) };
    // The last part is the next one to send.
    let unanswered = rounds.unanswered();
    let mut parts = split_locked(dialect, rounds, unanswered, error, deadline).await?;
    while let Some(indexes) = parts.pop() {
        let rows = rounds.rows.select(&indexes);
        let mut part = Rounds::new(rounds.kind, &rows);
        let ran = part.run(dialect, reads_first).await;
        rounds.has_written |= part.has_written;
        rounds.known += part.known;
        let unanswered = part.unanswered().into_iter().map(|at| indexes[at]).collect();
        for (index, reply) in indexes.iter().zip(part.replies) {
            rounds.replies[*index] = reply;
        }
        if let Err(error) = ran {
            parts.extend(split_locked(dialect, rounds, unanswered, error, deadline).await?);
        }
    }
    Ok(())
}

/// Returns the parts in which to send the unanswered rows of a claim again that failed with `error`,
/// without the rows that a transaction of this crate holds: those are in flight.
///
/// # Errors
///
/// `error`, if no open transaction caused it, or after the deadline.
async fn split_locked<D: Dialect>(
    dialect: &mut D,
    rounds: &mut Rounds<'_, '_>,
    unanswered: Vec<usize>,
    error: sqlx::Error,
    deadline: Instant,
) -> Result<Vec<Vec<usize>>, sqlx::Error> {
    if !rounds.kind.is_claim() || !D::is_locked(&error) {
        return Err(error);
    }
    // A statement of one row: the open transaction holds this row.
    if unanswered.len() <= 1 {
        unanswered.into_iter().for_each(|index| rounds.set_held(index));
        return Ok(Vec::new());
    }
    if Instant::now() >= deadline {
        return Err(error);
    }
    let held = dialect.held_by_transactions(&rounds.rows.select(&unanswered)).await?;
    let (all, mut free) = (unanswered.len(), Vec::new());
    for (index, held) in unanswered.into_iter().zip(held) {
        if held {
            rounds.set_held(index);
        } else {
            free.push(index);
        }
    }
    // If no row is known to be held, a transaction of another program holds one: smaller parts find it.
    let parts = if free.len() == all { PARTS } else { 1 };
    let size = free.len().div_ceil(parts).max(1);
    Ok(free.chunks(size).rev().map(<[usize]>::to_vec).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

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
    async fn claims_beside_a_row_that_is_known_to_be_held_are_sent_once_more() {
        let mut table = Table { held: HashMap::from([(17, true)]), ..Table::default() };
        let replies = execute(&mut table, &calls(Kind::Claim, 64)).await;
        assert_eq!((replies, &*table.writes), (except(17, 'I', 'F'), &[64, 63][..]));
        assert_eq!(table.reads, [], "no call reads first");
        assert_eq!(table.noted.into_inner().unwrap(), Some((0, 64)));
    }

    #[tokio::test]
    async fn claims_beside_a_row_that_another_program_holds_are_sent_in_parts() {
        let mut table = Table { held: HashMap::from([(17, false)]), ..Table::default() };
        let replies = execute(&mut table, &calls(Kind::Claim, 64)).await;
        let writes = [64, 8, 8, 8, 1, 1, 1, 1, 1, 1, 1, 1, 8, 8, 8, 8, 8];
        assert_eq!((replies, &*table.writes), (except(17, 'I', 'F'), &writes[..]));
    }

    #[tokio::test]
    async fn claim_of_a_row_that_is_held_is_in_flight() {
        let mut table = Table { held: HashMap::from([(0, false)]), ..Table::default() };
        assert_eq!(execute(&mut table, &calls(Kind::Claim, 1)).await, "I");
        assert_eq!(table.writes, [1]);
    }

    #[tokio::test]
    async fn row_of_a_transaction_that_commits_meanwhile_is_a_duplicate() {
        let held = HashMap::from([(17, false)]);
        let mut table = Table { held, commits: true, ..Table::default() };
        let mut calls = calls(Kind::ClaimComplete, 64);
        calls[3].reads_first = true;
        let known = call_of(Kind::ClaimComplete, 40);
        assert_eq!(execute(&mut table, &[known]).await, "F");
        let replies = execute(&mut table, &calls).await;
        let duplicates = [17, 40];
        for (index, letter) in replies.chars().enumerate() {
            assert_eq!(letter, if duplicates.contains(&index) { 'D' } else { 'F' }, "{index}");
        }
        assert_eq!(table.noted.into_inner().unwrap(), Some((2, 64)), "40, and 17 in its part");
    }

    /// The rows may be free: a sender has to repeat these deliveries.
    #[tokio::test]
    async fn claims_are_errors_when_the_time_to_split_them_is_over() {
        let held = HashMap::from([(17, false)]);
        let mut table = Table { held, waits: SPLIT_TIME, ..Table::default() };
        assert_eq!(execute(&mut table, &calls(Kind::Claim, 64)).await, "E".repeat(64));
        assert_eq!(table.writes, [64]);
    }

    #[tokio::test]
    async fn failure_after_a_part_was_written_leaves_the_outcome_unknown() {
        let held = HashMap::from([(17, false)]);
        let mut table = Table { held, refused: Some(3), ..Table::default() };
        assert_eq!(execute(&mut table, &calls(Kind::Claim, 64)).await, "?".repeat(64));
        assert_eq!(table.writes, [64, 8, 8]);
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
        let mut table = Table { held: HashMap::from([(17, true)]), ..Table::default() };
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

    /// The batch has written other rows before it failed because of row 60.
    #[tokio::test]
    async fn row_that_cannot_be_written_has_an_unknown_outcome_after_a_part_was_written() {
        let held = HashMap::from([(17, false)]);
        let mut table = Table { held, bad: Some(60), ..Table::default() };
        let replies = execute(&mut table, &calls(Kind::Claim, 64)).await;
        let mut expected = except(17, 'I', 'F');
        expected.replace_range(60..61, "?");
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
