//! How calls become statements: once, for every SQL database.
//!
//! A dialect supplies single statements. This module decides which statement is sent for which keys:
//!
//! 1. A call that writes goes in *rounds*: write what is free at once, read what was there, seize what
//!    a claim may take, write again. A reply comes from a row that was written, or from a row that was
//!    read. A row that changes hands in all [`ROUNDS`] is in flight.
//! 2. If several calls of a batch name one key, only the first call's row is sent. The other calls are
//!    answered from the resulting row. A call that the row cannot answer is sent in the next statement.
//! 3. A batch that fails because of one row is sent again in parts, until the bad row stands alone
//!    and only its caller gets the error. After any other failure all callers get the same error.
//! 4. A claim that meets a row of an open transaction is sent again without the keys that such a
//!    transaction is known to hold, in parts while one of them is still held, for [`SPLIT_TIME`] at
//!    most. After that the remaining keys are an error and not in flight, because they may be free.
//! 5. A statement carries at most 8 MiB of responses, or one response that is larger. A statement
//!    that reads responses reads at most 64.

use std::collections::VecDeque;
use std::future::Future;
use std::ops::Deref;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;

use super::queue::BatchItem;
use super::super::contract::{
    CallTerms, Claimed, Completed, Forgotten, Permanence, Released, Renewed, Token,
};
use super::super::stored::Fetch;
use super::row::Row;
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

/// How often a key is tried again that changed hands between two statements.
pub(in crate::adapter) const ROUNDS: usize = 5;
/// How often a statement is repeated that conflicted with another, or whose connection was gone.
pub(in crate::adapter) const REPEATS: usize = 6;
/// How many parts a refused batch becomes: more parts, fewer rounds that wait for a lock.
const PARTS: usize = 8;
/// For how long claims are split to find out which of their rows an open transaction holds.
const SPLIT_TIME: Duration = Duration::from_secs(1);
/// How many bytes of responses one statement carries. They are in memory three times while the
/// statement is sent, and a message has at most 1 GiB.
const MAX_BYTES: usize = 8 * 1_024 * 1_024;
/// How many responses one statement reads.
pub(in crate::adapter) const MAX_RESPONSES: usize = 64;

/// What a call does.
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
}

impl Kind {
    pub(in crate::adapter) fn claim(terms: &CallTerms) -> Self {
        if is_on_claim(terms) { Self::ClaimComplete } else { Self::Claim }
    }

    pub(in crate::adapter) fn release(terms: &CallTerms) -> Self {
        if is_on_claim(terms) { Self::ReleaseComplete } else { Self::Release }
    }

    /// What the call does, for the text of its error.
    fn context(self) -> &'static str {
        match self {
            Self::Claim | Self::ClaimComplete => "claiming keys",
            Self::Renew => "renewing leases",
            Self::Complete => "completing keys",
            Self::Release | Self::ReleaseComplete => "releasing keys",
        }
    }

    fn is_claim(self) -> bool {
        matches!(self, Self::Claim | Self::ClaimComplete)
    }
}

fn is_on_claim(terms: &CallTerms) -> bool {
    terms.permanence() == Permanence::OnClaim
}

/// The reply to a call, for one key.
#[derive(Debug, Clone)]
pub(in crate::adapter) enum RowReply {
    Claimed(Claimed),
    Renewed(Renewed),
    Completed(Completed),
    Released(Released),
}

/// Returns the replies to a call, if all are of the kind that `reply` picks.
///
/// # Errors
///
/// [`ErrorKind::Corrupt`] for a reply of another kind.
pub(in crate::adapter) fn replies<T>(
    replies: Vec<RowReply>,
    reply: impl Fn(RowReply) -> Option<T>,
) -> Result<Vec<T>, Error> {
    replies.into_iter().map(reply).collect::<Option<Vec<T>>>().ok_or_else(missing_reply)
}

fn missing_reply() -> Error {
    Error::new(ErrorKind::Corrupt, "reading the replies of a batch")
}

/// One caller's call.
pub(in crate::adapter) struct Call {
    kind: Kind,
    keys: Vec<DedupKey>,
    /// The hash of each key: its row, and its place in a batch.
    hashes: Vec<u128>,
    /// The first half of each hash, for the queue.
    short_hashes: Vec<u64>,
    terms: CallTerms,
    reads_first: bool,
}

impl Call {
    pub(in crate::adapter) fn new(
        kind: Kind,
        keys: &[DedupKey],
        terms: &CallTerms,
        hash: impl Fn(&DedupKey) -> u128,
    ) -> Self {
        let hashes: Vec<u128> = keys.iter().map(hash).collect();
        let short_hashes = hashes.iter().copied().map(short_hash).collect();
        let (keys, terms) = (keys.to_vec(), terms.clone());
        Self { kind, keys, hashes, short_hashes, terms, reads_first: false }
    }

    /// Reads before it writes, because some of its keys are known to have a row that may be free.
    pub(in crate::adapter) fn reading_first(self, reads_first: bool) -> Self {
        Self { reads_first, ..self }
    }

    fn rows(&self, is_batch: bool) -> Rows<'_> {
        let keys = self.keys.iter().zip(&self.hashes);
        let row = |(key, hash): (_, &u128)| RowCall::new(key, *hash, &self.terms);
        Rows { rows: keys.map(row).collect(), is_batch }
    }

    /// How many bytes of responses its rows store.
    fn bytes(&self) -> usize {
        let stored = self.keys.first().and_then(|key| self.terms.stored_data_for(key));
        let response = stored.and_then(|stored| stored.response);
        response.map_or(0, |response| response.body.len().saturating_mul(self.keys.len()))
    }
}

/// Returns what stands for a key in the queue.
pub(in crate::adapter) fn short_hash(hash: u128) -> u64 {
    u64::try_from(hash >> 64).unwrap_or_default()
}

impl BatchItem for Call {
    type Reply = Vec<RowReply>;

    fn can_join(&self, other: &Self) -> bool {
        self.kind == other.kind
    }

    fn key_hashes(&self) -> &[u64] {
        &self.short_hashes
    }

    fn allows_shared_keys(&self) -> bool {
        self.kind.is_claim()
    }
}

/// One key of a statement, with the terms of its call.
#[derive(Clone, Copy)]
pub(in crate::adapter) struct RowCall<'c> {
    pub(in crate::adapter) key: &'c DedupKey,
    pub(in crate::adapter) hash: u128,
    pub(in crate::adapter) terms: &'c CallTerms,
    /// The most that any call of the batch wants of the key.
    fetch: Fetch,
}

impl<'c> RowCall<'c> {
    pub(in crate::adapter) fn new(key: &'c DedupKey, hash: u128, terms: &'c CallTerms) -> Self {
        Self { key, hash, terms, fetch: terms.fetch() }
    }

    pub(in crate::adapter) fn token(&self) -> Token {
        self.terms.token()
    }
}

/// The keys of a statement.
#[derive(Clone)]
pub(in crate::adapter) struct Rows<'c> {
    rows: Vec<RowCall<'c>>,
    /// Whether they are those of a batch. Otherwise all have the terms of one call.
    pub(in crate::adapter) is_batch: bool,
}

impl<'c> Rows<'c> {
    /// The rows of one call that is made outside of the queue.
    pub(in crate::adapter) fn of_call(
        keys: &'c [DedupKey],
        terms: &'c CallTerms,
        hash: impl Fn(&DedupKey) -> u128,
    ) -> Self {
        let row = |key| RowCall::new(key, hash(key), terms);
        Self { rows: keys.iter().map(row).collect(), is_batch: false }
    }

    /// Returns `true` if any row has data to store.
    pub(in crate::adapter) fn stores_data(&self) -> bool {
        self.rows.iter().any(|row| row.terms.stores_data())
    }

    /// Returns the rows at these places.
    pub(in crate::adapter) fn select(&self, places: &[usize]) -> Self {
        let rows = places.iter().map(|place| self.rows[*place]).collect();
        Self { rows, is_batch: self.is_batch }
    }
}

impl<'c> Deref for Rows<'c> {
    type Target = [RowCall<'c>];

    fn deref(&self) -> &[RowCall<'c>] {
        &self.rows
    }
}

fn more(one: Fetch, other: Fetch) -> Fetch {
    let both = [one, other];
    let order = [Fetch::DigestAndResponse, Fetch::Digest];
    order.into_iter().find(|fetch| both.contains(fetch)).unwrap_or(Fetch::Nothing)
}

/// What a writing statement did with one row.
#[derive(Debug, Clone)]
pub(in crate::adapter) enum Written {
    /// Nothing: a row was there.
    No,
    /// Nothing: an open transaction holds the key.
    Locked,
    Yes(RowReply),
}

/// The statements of a round. Each is one statement for all rows.
pub(in crate::adapter) trait RowStatements: Send {
    /// Inserts the rows of claims, or completes rows.
    fn write(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
    ) -> impl Future<Output = Result<Vec<Written>, sqlx::Error>> + Send;

    /// Claims rows that are there and free. Returns the reply for each row that it wrote.
    fn seize(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
    ) -> impl Future<Output = Result<Vec<Option<Claimed>>, sqlx::Error>> + Send;

    /// Reads rows, with as much of their stored data.
    fn read(
        &mut self,
        rows: &Rows<'_>,
        fetch: Fetch,
    ) -> impl Future<Output = Result<Vec<Option<Row>>, sqlx::Error>> + Send;
}

/// What a dialect supplies.
pub(in crate::adapter) trait Dialect: RowStatements {
    /// Renews or releases the rows of these tokens. Returns which rows it wrote.
    fn update_by_token(
        &mut self,
        kind: Kind,
        rows: &Rows<'_>,
    ) -> impl Future<Output = Result<Vec<bool>, sqlx::Error>> + Send;

    /// Deletes rows that no live lease holds. Returns which rows it deleted.
    fn delete(
        &mut self,
        rows: &Rows<'_>,
    ) -> impl Future<Output = Result<Vec<bool>, sqlx::Error>> + Send;

    /// Returns which of these keys a transaction of this crate holds, as far as the database shows it.
    fn held_by_transactions(
        &mut self,
        rows: &Rows<'_>,
    ) -> impl Future<Output = Result<Vec<bool>, sqlx::Error>> + Send;

    /// Returns `true` if claims read before they insert.
    fn reads_first(&self) -> bool {
        false
    }

    /// Notes how many of the rows of a claim were known before.
    fn claimed(&self, known: usize, rows: usize) {
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

/// The reply to a call, for one row.
struct KeyReply {
    /// Of the call that the row was sent for.
    reply: Result<RowReply, Error>,
    /// What the row holds by then, for other calls. `None` if it changes hands all the time, or if an
    /// open transaction holds it.
    row: Option<Row>,
}

/// The rounds of a call that writes: rule 1.
pub(in crate::adapter) struct Rounds<'r, 'c> {
    kind: Kind,
    rows: &'r Rows<'c>,
    replies: Vec<Option<KeyReply>>,
    /// Whether a statement has changed a row. After that no failure means that nothing changed.
    pub(in crate::adapter) has_written: bool,
    /// How many rows needed no write.
    known: usize,
}

impl<'r, 'c> Rounds<'r, 'c> {
    pub(in crate::adapter) fn new(kind: Kind, rows: &'r Rows<'c>) -> Self {
        let replies = rows.iter().map(|_| None).collect();
        Self { kind, rows, replies, has_written: false, known: 0 }
    }

    /// Runs the rounds. After an error, some rows may have their reply.
    pub(in crate::adapter) async fn run<S: RowStatements>(
        &mut self,
        statements: &mut S,
        mut reads: bool,
    ) -> Result<(), sqlx::Error> {
        for _ in 0..ROUNDS {
            let mut unwritten = self.open_places();
            if unwritten.is_empty() {
                break;
            }
            if reads {
                unwritten = self.read(statements, unwritten).await?;
            }
            reads = true;
            if !unwritten.is_empty() {
                let rows = self.rows.select(&unwritten);
                let written = statements.write(self.kind, &rows).await?;
                for (place, written) in unwritten.into_iter().zip(written) {
                    match written {
                        Written::No => {}
                        Written::Locked => self.replies[place] = Some(self.in_flight()),
                        Written::Yes(reply) => self.wrote(place, reply),
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads rows, answers what they answer, and seizes what a claim may take. Returns the places
    /// that are to be written.
    async fn read<S: RowStatements>(
        &mut self,
        statements: &mut S,
        places: Vec<usize>,
    ) -> Result<Vec<usize>, sqlx::Error> {
        // A statement of its own: the statement that found a row may have begun before the row was
        // committed, and would not see it.
        let found = read_rows(statements, &self.rows.select(&places)).await?;
        let (mut unwritten, mut free) = (Vec::new(), Vec::new());
        for (place, row) in places.into_iter().zip(found) {
            let Some(row) = row else {
                unwritten.push(place);
                continue;
            };
            let terms = self.rows[place].terms;
            let reply = if self.kind.is_claim() {
                row.claimed(terms).map(|reply| reply.map(RowReply::Claimed)).transpose()
            } else {
                row.completed(terms.token()).map(RowReply::Completed).map(Ok)
            };
            match reply {
                Some(reply) => {
                    self.known += 1;
                    self.replies[place] = Some(KeyReply { reply, row: Some(row) });
                }
                None if self.kind.is_claim() => free.push(place),
                None => unwritten.push(place),
            }
        }
        if !free.is_empty() {
            let seized = statements.seize(self.kind, &self.rows.select(&free)).await?;
            for (place, claimed) in free.into_iter().zip(seized) {
                if let Some(claimed) = claimed {
                    self.wrote(place, RowReply::Claimed(claimed));
                }
            }
        }
        Ok(unwritten)
    }

    fn wrote(&mut self, place: usize, reply: RowReply) {
        self.has_written = true;
        let RowCall { key, terms, .. } = self.rows[place];
        let row = match &reply {
            RowReply::Claimed(claimed) => Some(Row::row_after(key, terms, claimed)),
            _ => None,
        };
        self.replies[place] = Some(KeyReply { reply: Ok(reply), row });
    }

    fn open_places(&self) -> Vec<usize> {
        (0..self.replies.len()).filter(|place| self.replies[*place].is_none()).collect()
    }

    /// The reply of a row that somebody else is working on.
    fn in_flight(&self) -> KeyReply {
        let reply = if self.kind.is_claim() {
            RowReply::Claimed(Claimed::InFlight)
        } else {
            RowReply::Completed(Completed::LeaseLost)
        };
        KeyReply { reply: Ok(reply), row: None }
    }

    fn finish(mut self) -> Vec<KeyReply> {
        let replies = std::mem::take(&mut self.replies).into_iter();
        replies.map(|reply| reply.unwrap_or_else(|| self.in_flight())).collect()
    }

    /// Returns the replies to a claim.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Corrupt`] for a duplicate whose stored data is unreadable.
    pub(in crate::adapter) fn claimed(self) -> Result<Vec<Claimed>, Error> {
        let rows = self.finish().into_iter().map(|reply| reply.reply);
        replies(rows.collect::<Result<_, _>>()?, RowReply::claimed)
    }
}

impl RowReply {
    pub(in crate::adapter) fn claimed(self) -> Option<Claimed> {
        if let Self::Claimed(claimed) = self { Some(claimed) } else { None }
    }

    pub(in crate::adapter) fn renewed(self) -> Option<Renewed> {
        if let Self::Renewed(renewed) = self { Some(renewed) } else { None }
    }

    pub(in crate::adapter) fn completed(self) -> Option<Completed> {
        if let Self::Completed(completed) = self { Some(completed) } else { None }
    }

    pub(in crate::adapter) fn released(self) -> Option<Released> {
        if let Self::Released(released) = self { Some(released) } else { None }
    }
}

/// Reads rows, each with the stored data that is wanted of it: rule 5.
pub(in crate::adapter) async fn read_rows<S: RowStatements>(
    statements: &mut S,
    rows: &Rows<'_>,
) -> Result<Vec<Option<Row>>, sqlx::Error> {
    let mut found: Vec<Option<Row>> = rows.iter().map(|_| None).collect();
    for fetch in [Fetch::Nothing, Fetch::Digest, Fetch::DigestAndResponse] {
        let places = (0..rows.len()).filter(|place| rows[*place].fetch == fetch);
        let places: Vec<usize> = places.collect();
        let most = if fetch == Fetch::DigestAndResponse { MAX_RESPONSES } else { usize::MAX };
        for places in places.chunks(most) {
            let read = statements.read(&rows.select(places), fetch).await?;
            for (place, row) in places.iter().zip(read) {
                found[*place] = row;
            }
        }
    }
    Ok(found)
}

/// Sends one call as it would be sent without the queue.
pub(in crate::adapter) async fn execute_one<D: Dialect>(
    dialect: &mut D,
    call: &Call,
) -> Result<Vec<RowReply>, Error> {
    let rows = call.rows(false);
    match execute_rows(dialect, call.kind, &rows, call.reads_first).await {
        Ok(replies) => replies.into_iter().map(|reply| reply.reply).collect(),
        Err(failed) => Err(failed.error),
    }
}

/// Sends a batch: rules 2, 3 and 5.
pub(in crate::adapter) async fn execute_batch<D: Dialect>(
    dialect: &mut D,
    calls: &[Call],
) -> Vec<Result<Vec<RowReply>, Error>> {
    let mut replies: Vec<Option<Result<Vec<RowReply>, Error>>> =
        calls.iter().map(|_| None).collect();
    // Once a statement may have granted something to a call, no failure means that none did.
    let mut may_be_granted = vec![false; calls.len()];
    let mut parts = split_by_size(calls);
    while let Some(part) = parts.pop_front() {
        if let [one] = part[..] {
            let reply = execute_one(dialect, &calls[one]).await;
            let unknown = |error: Error| if may_be_granted[one] { error.unknown() } else { error };
            replies[one] = Some(reply.map_err(unknown));
            continue;
        }
        let layout = Layout::new(calls, &part);
        let reads_first = part.iter().any(|call| calls[*call].reads_first);
        match execute_rows(dialect, layout.kind, &layout.rows, reads_first).await {
            Ok(rows) => {
                let mut unanswered = Vec::new();
                for (call, reply) in part.into_iter().zip(layout.replies(rows)) {
                    match reply {
                        Some(reply) => replies[call] = Some(reply),
                        None => {
                            may_be_granted[call] = true;
                            unanswered.push(call);
                        }
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
                    let error = if may_be_granted[call] { error.unknown() } else { error };
                    replies[call] = Some(Err(error));
                }
            }
        }
    }
    replies.into_iter().map(|reply| reply.unwrap_or_else(|| Err(missing_reply()))).collect()
}

/// Returns the places of all calls, in parts that are not too large.
fn split_by_size(calls: &[Call]) -> VecDeque<Vec<usize>> {
    let (mut parts, mut part, mut bytes) = (VecDeque::new(), Vec::new(), 0_usize);
    for (place, call) in calls.iter().enumerate() {
        let more = call.bytes();
        if !part.is_empty() && bytes.saturating_add(more) > MAX_BYTES {
            parts.push_back(std::mem::take(&mut part));
            bytes = 0;
        }
        bytes = bytes.saturating_add(more);
        part.push(place);
    }
    if !part.is_empty() {
        parts.push_back(part);
    }
    parts
}

/// The rows of a batch, each key once, and which of them each call names.
struct Layout<'c> {
    kind: Kind,
    rows: Rows<'c>,
    calls: Vec<&'c Call>,
    /// For each call and each of its keys: the row, and whether the row is sent for this call.
    named: Vec<Vec<(usize, bool)>>,
}

impl<'c> Layout<'c> {
    /// `part` are the places of calls of one kind.
    fn new(calls: &'c [Call], part: &[usize]) -> Self {
        let calls: Vec<&Call> = part.iter().map(|place| &calls[*place]).collect();
        let mut named: Vec<(u128, &DedupKey, usize, usize)> = Vec::with_capacity(calls.len());
        for (place, call) in calls.iter().enumerate() {
            let keys = call.hashes.iter().zip(&call.keys).enumerate();
            named.extend(keys.map(|(at, (hash, key))| (*hash, key, place, at)));
        }
        // The first call of those that name a key comes first.
        named.sort_unstable();
        let mut rows: Vec<RowCall<'c>> = Vec::with_capacity(named.len());
        let mut of: Vec<_> = calls.iter().map(|call| vec![(0, false); call.keys.len()]).collect();
        for (hash, key, call, at) in named {
            let terms = &calls[call].terms;
            let is_first = match rows.last_mut() {
                Some(last) if last.key == key => {
                    last.fetch = more(last.fetch, terms.fetch());
                    false
                }
                _ => true,
            };
            if is_first {
                rows.push(RowCall::new(key, hash, terms));
            }
            of[call][at] = (rows.len() - 1, is_first);
        }
        let kind = calls.first().map_or(Kind::Claim, |call| call.kind);
        Self { kind, rows: Rows { rows, is_batch: true }, calls, named: of }
    }

    /// Returns the reply to each call; `None` for a call that the rows do not answer.
    fn replies(&self, rows: Vec<KeyReply>) -> Vec<Option<Result<Vec<RowReply>, Error>>> {
        let (mut own, rows): (Vec<_>, Vec<_>) =
            rows.into_iter().map(|reply| (Some(reply.reply), reply.row)).unzip();
        let mut reply_to = |call: &Call, named: &[(usize, bool)]| {
            let replies = named.iter().map(|(row, is_own)| match rows.get(*row)? {
                _ if *is_own => own[*row].take(),
                Some(row) => {
                    let claimed = row.claimed(&call.terms).transpose();
                    claimed.map(|claimed| claimed.map(RowReply::Claimed))
                }
                None => Some(Ok(RowReply::Claimed(Claimed::InFlight))),
            });
            // All replies first: a call without one is sent again.
            replies.collect::<Option<Vec<_>>>().map(|replies| replies.into_iter().collect())
        };
        self.calls.iter().zip(&self.named).map(|(call, named)| reply_to(call, named)).collect()
    }
}

/// Sends the rows of calls of one kind.
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
    let reads_first = kind.is_claim() && (reads_first || dialect.reads_first());
    let deadline = Instant::now() + SPLIT_TIME;
    match claim_with_fallback(dialect, &mut rounds, reads_first, deadline).await {
        Ok(()) => {
            if kind.is_claim() {
                dialect.claimed(rounds.known, rows.len());
            }
            Ok(rounds.finish())
        }
        Err(error) => {
            // Claims were split already, as far as it was worth the time.
            let is_row_error =
                D::is_row_error(&error) && !(kind.is_claim() && D::is_locked(&error));
            let error = dialect.error(kind.context(), error);
            let error = if rounds.has_written { error.unknown() } else { error };
            Err(Failed { error, is_row_error })
        }
    }
}

fn updated_reply(kind: Kind, updated: bool) -> RowReply {
    match (kind, updated) {
        (Kind::Renew, true) => RowReply::Renewed(Renewed::Held),
        (Kind::Renew, false) => RowReply::Renewed(Renewed::Lost),
        (_, true) => RowReply::Released(Released::Released),
        (_, false) => RowReply::Released(Released::NotHeld),
    }
}

/// Runs the rounds; those of a claim around rows that an open transaction holds: rule 4.
///
/// Boxed, because it calls itself with a part of the rows.
fn claim_with_fallback<'a, D: Dialect>(
    dialect: &'a mut D,
    rounds: &'a mut Rounds<'_, '_>,
    reads_first: bool,
    deadline: Instant,
) -> BoxFuture<'a, Result<(), sqlx::Error>> {
    Box::pin(async move {
        let Err(error) = rounds.run(dialect, reads_first).await else { return Ok(()) };
        if !rounds.kind.is_claim() || !D::is_locked(&error) {
            return Err(error);
        }
        match rounds.open_places().len() {
            // The open transaction holds this one.
            0 | 1 => Ok(()),
            _ if Instant::now() >= deadline => Err(error),
            _ => claim_unlocked(dialect, rounds, reads_first, deadline).await,
        }
    })
}

/// Claims those of the open rows that no transaction of this crate holds.
async fn claim_unlocked<D: Dialect>(
    dialect: &mut D,
    rounds: &mut Rounds<'_, '_>,
    reads_first: bool,
    deadline: Instant,
) -> Result<(), sqlx::Error> {
    let open = rounds.open_places();
    let held = dialect.held_by_transactions(rounds.rows).await?;
    let places: Vec<usize> = open.iter().copied().filter(|place| !held[*place]).collect();
    // If none is known to be held, somebody else's transaction holds one of them: find out which.
    let parts = if places.len() == open.len() { PARTS } else { 1 };
    for places in places.chunks(places.len().div_ceil(parts).max(1)) {
        let rows = rounds.rows.select(places);
        let mut part = Rounds::new(rounds.kind, &rows);
        let ran = claim_with_fallback(dialect, &mut part, reads_first, deadline).await;
        rounds.has_written |= part.has_written;
        rounds.known += part.known;
        ran?;
        for (place, reply) in places.iter().zip(part.finish()) {
            rounds.replies[*place] = Some(reply);
        }
    }
    Ok(())
}

/// Forgets a key, unless a live lease or an open transaction holds it.
pub(in crate::adapter) async fn forget<D: Dialect>(
    dialect: &mut D,
    key: &DedupKey,
    hash: impl Fn(&DedupKey) -> u128,
) -> Result<Forgotten, Error> {
    const CONTEXT: &str = "forgetting a key";
    // A statement takes terms, and this one does not use them.
    let terms = CallTerms::on_claim(Token::from([0; 16]), Duration::ZERO);
    let rows = Rows::of_call(std::slice::from_ref(key), &terms, hash);
    for _ in 0..ROUNDS {
        let deleted = dialect.delete(&rows).await;
        if deleted.map_err(|error| dialect.error(CONTEXT, error))? == [true] {
            return Ok(Forgotten::Removed);
        }
        let read = dialect.read(&rows, Fetch::Nothing).await;
        let read = read.map_err(|error| dialect.error(CONTEXT, error))?;
        match read.into_iter().flatten().next() {
            None => {
                // A transaction that runs the key holds its lock, and has no visible row yet.
                let held = dialect.held_by_transactions(&rows).await;
                let held = held.map_err(|error| dialect.error(CONTEXT, error))?;
                let is_held = held == [true];
                return Ok(if is_held { Forgotten::InFlight } else { Forgotten::Missing });
            }
            Some(row) if row.is_leased() => return Ok(Forgotten::InFlight),
            // Somebody wrote the row since: try again.
            Some(_) => {}
        }
    }
    Ok(Forgotten::InFlight)
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, StatusCode};

    use super::super::super::stored::StoredResponse;
    use super::*;

    fn call(bytes: usize, keys: usize) -> Call {
        let keys: Vec<_> = (0..keys as u64).map(|id| DedupKey::new("a", &id.to_string())).collect();
        let keys = keys.into_iter().collect::<Result<Vec<_>, _>>().unwrap();
        let terms = CallTerms::on_claim(Token::random(), Duration::ZERO);
        let body = vec![0; bytes].into();
        let response = StoredResponse::new(StatusCode::OK, HeaderMap::new(), body);
        let terms = terms.with_response(response.into());
        Call::new(Kind::Complete, &keys, &terms, |_| 0)
    }

    #[test]
    fn batch_with_large_responses_is_sent_in_parts() {
        let small: Vec<_> = (0..1_024).map(|_| call(100, 1)).collect();
        assert_eq!(split_by_size(&small), [(0..1_024).collect::<Vec<_>>()]);
        let half = MAX_BYTES / 2;
        let sizes = [(half, 1), (half, 1), (1, 1), (MAX_BYTES * 2, 1), (half / 2, 4), (1, 1)];
        let large: Vec<_> = sizes.into_iter().map(|(bytes, keys)| call(bytes, keys)).collect();
        let parts = [vec![0, 1], vec![2], vec![3], vec![4], vec![5]];
        assert_eq!(split_by_size(&large), parts);
        assert!(split_by_size(&[]).is_empty());
    }
}
