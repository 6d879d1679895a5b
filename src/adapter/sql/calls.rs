//! The calls that go to a database together, and what each comes to.
//!
//! 1. A row of a batch is asked for by the first call that names its key; what the row then holds
//!    tells its twins. A twin that this does not tell (its lease is its own, say) is sent in the
//!    next statement.
//! 2. A batch that the database refuses because of one row is sent again in parts, until the bad
//!    row stands alone and only its caller hears of it.
//! 3. After any other failure all callers of the batch hear the same.
//! 4. A batch with large responses is sent in parts from the beginning: a statement carries up to 8 MiB
//!    of them, or one that is larger.

use std::collections::VecDeque;
use std::future::Future;

use super::super::replies::{Claimed, Completed, Released, Renewed};
use super::super::terms::CallTerms;
use super::queue::BatchItem;
use super::rows::{Grant, Recorded, Stored, released, renewed};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

/// In how many parts a refused batch is sent again: more parts, fewer rounds that wait for a lock.
pub(in crate::adapter) const PARTS: usize = 8;

/// So many bytes of responses go in one statement: they are in memory three times while it is sent,
/// and a message has at most 1 GiB.
const MOST_BYTES: usize = 8 * 1_024 * 1_024;

/// What a call does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::adapter) enum Kind {
    Claim,
    Record,
    Unrecord,
    Renew,
    Complete,
    Release,
}

/// One caller's call.
pub(in crate::adapter) struct Call {
    pub(in crate::adapter) kind: Kind,
    pub(in crate::adapter) keys: Vec<DedupKey>,
    pub(in crate::adapter) terms: CallTerms,
    numbers: Vec<u64>,
    mixes: bool,
}

impl Call {
    /// `numbers` stand for the keys, and give the order in which a batch has them.
    pub(in crate::adapter) fn new(
        kind: Kind,
        keys: &[DedupKey],
        numbers: Vec<u64>,
        terms: &CallTerms,
    ) -> Self {
        Self { kind, keys: keys.to_vec(), terms: terms.clone(), numbers, mixes: false }
    }

    /// The same, which if it is a claim or a completion goes with both.
    #[cfg(feature = "postgres")]
    pub(in crate::adapter) fn mixing(self, mixes: bool) -> Self {
        Self { mixes, ..self }
    }
}

impl Call {
    /// What its rows store of the response.
    fn bytes(&self) -> usize {
        let stored = self.keys.first().and_then(|key| self.terms.stored_data_for(key));
        let response = stored.and_then(|stored| stored.response);
        response.map_or(0, |response| response.body.len().saturating_mul(self.keys.len()))
    }
}

/// The answers to one call, in the order of its keys.
pub(in crate::adapter) enum Answers {
    Claimed(Vec<Claimed>),
    Recorded(Vec<Recorded>),
    Renewed(Vec<Renewed>),
    Completed(Vec<Completed>),
    Released(Vec<Released>),
}

/// Answers of one kind.
pub(in crate::adapter) trait Answer: Sized {
    fn wrap(answers: Vec<Self>) -> Answers;
    fn unwrap(answers: Answers) -> Result<Vec<Self>, Error>;
}

macro_rules! answer {
    ($($kind:ident),+) => {$(
        impl Answer for $kind {
            fn wrap(answers: Vec<Self>) -> Answers {
                Answers::$kind(answers)
            }

            fn unwrap(answers: Answers) -> Result<Vec<Self>, Error> {
                match answers {
                    Answers::$kind(answers) => Ok(answers),
                    _ => Err(Error::new(ErrorKind::Corrupt, "telling the answers of a batch apart")),
                }
            }
        }
    )+};
}

answer!(Claimed, Recorded, Renewed, Completed, Released);

impl BatchItem for Call {
    type Reply = Answers;

    fn can_join(&self, other: &Self) -> bool {
        let mixed = |call: &Self| call.mixes && matches!(call.kind, Kind::Claim | Kind::Complete);
        self.kind == other.kind || (mixed(self) && mixed(other))
    }

    fn key_hashes(&self) -> &[u64] {
        &self.numbers
    }

    fn allows_shared_keys(&self) -> bool {
        matches!(self.kind, Kind::Claim | Kind::Record)
    }
}

/// The terms under which each row of a statement is asked for.
#[derive(Clone)]
pub(in crate::adapter) enum RowTerms<'c> {
    /// All under the same: a single call, as a plain statement.
    One(&'c CallTerms),
    Each(Vec<&'c CallTerms>),
}

/// What one statement is asked for.
#[derive(Clone)]
pub(in crate::adapter) struct Rows<'c> {
    pub(in crate::adapter) keys: Vec<DedupKey>,
    pub(in crate::adapter) row_terms: RowTerms<'c>,
}

impl<'c> Rows<'c> {
    pub(in crate::adapter) fn one(keys: &[DedupKey], terms: &'c CallTerms) -> Self {
        Self { keys: keys.to_vec(), row_terms: RowTerms::One(terms) }
    }

    pub(in crate::adapter) fn len(&self) -> usize {
        self.keys.len()
    }

    pub(in crate::adapter) fn terms(&self, place: usize) -> &'c CallTerms {
        match &self.row_terms {
            RowTerms::One(terms) => terms,
            RowTerms::Each(call_terms) => call_terms[place],
        }
    }

    /// Whether there is anything to keep with any key.
    pub(in crate::adapter) fn keeps(&self) -> bool {
        match &self.row_terms {
            RowTerms::One(terms) => terms.stores_data(),
            RowTerms::Each(call_terms) => call_terms.iter().any(|terms| terms.stores_data()),
        }
    }

    /// Those at these places.
    pub(in crate::adapter) fn at(&self, places: &[usize]) -> Self {
        let keys = super::at(&self.keys, places);
        let row_terms = match &self.row_terms {
            RowTerms::One(terms) => RowTerms::One(terms),
            RowTerms::Each(call_terms) => {
                RowTerms::Each(places.iter().map(|place| call_terms[*place]).collect())
            }
        };
        Self { keys, row_terms }
    }
}

/// The rows of a batch, and which of them each call is about.
struct Layout<'c> {
    rows: Rows<'c>,
    kinds: Vec<Kind>,
    /// For each call.
    of: Vec<Vec<(usize, bool)>>,
}

/// For each key of a call: its row, and whether the row is asked for on the call's behalf.
type Named = [(usize, bool)];

impl<'c> Layout<'c> {
    fn new(calls: &[&'c Call]) -> Self {
        let mut named: Vec<(u64, &DedupKey, usize, usize)> = Vec::with_capacity(calls.len());
        for (place, call) in calls.iter().enumerate() {
            let keys = call.numbers.iter().zip(&call.keys).enumerate();
            named.extend(keys.map(|(at, (number, key))| (*number, key, place, at)));
        }
        named.sort_unstable();
        let mut keys = Vec::with_capacity(named.len());
        let (mut call_terms, mut kinds) = (Vec::new(), Vec::new());
        let mut of: Vec<_> = calls.iter().map(|call| vec![(0, false); call.keys.len()]).collect();
        for (_, key, call, at) in named {
            // Of twins, the first call comes first.
            let is_first = keys.last() != Some(key);
            if is_first {
                keys.push(key.clone());
                call_terms.push(&calls[call].terms);
                kinds.push(calls[call].kind);
            }
            of[call][at] = (keys.len() - 1, is_first);
        }
        Self { rows: Rows { keys, row_terms: RowTerms::Each(call_terms) }, kinds, of }
    }
}

/// The answer to a claim or a record of one row, and what the row holds by then; unknown if it
/// changed hands all the time, or if an open transaction holds it.
pub(in crate::adapter) type Taken<T> = (T, Option<Stored>);

/// What a row of claims and completions is told.
pub(in crate::adapter) enum Told {
    Claimed(Taken<Claimed>),
    Completed(Completed),
}

/// Why a statement came to nothing.
pub(in crate::adapter) struct Failed {
    pub(in crate::adapter) error: Error,
    /// Whether it may be one row's doing: the others can go without it.
    pub(in crate::adapter) of_a_row: bool,
}

impl Failed {
    /// After another statement has changed something.
    fn after(self) -> Self {
        Self { error: self.error.unknown(), of_a_row: self.of_a_row }
    }
}

/// A database, as batches see it: each method is one statement for all rows, and more for rows that
/// somebody else is at.
pub(in crate::adapter) trait Database: Send + Sync {
    /// The call as it would be made without batching.
    fn alone(&self, call: &Call) -> impl Future<Output = Result<Answers, Error>> + Send {
        async move {
            let rows = Rows::one(&call.keys, &call.terms);
            let answers = match call.kind {
                Kind::Claim => self.take(call.kind, &rows).await.map(first::<Claimed>),
                Kind::Record => self.take(call.kind, &rows).await.map(first::<Recorded>),
                Kind::Complete => self.complete(&rows).await.map(Completed::wrap),
                Kind::Renew => self.touch(call.kind, &rows).await.map(renewed).map(Renewed::wrap),
                Kind::Release | Kind::Unrecord => {
                    self.touch(call.kind, &rows).await.map(released).map(Released::wrap)
                }
            };
            answers.map_err(|failed| failed.error)
        }
    }

    /// Claims or records.
    fn take<T: Grant + Send>(
        &self,
        kind: Kind,
        rows: &Rows<'_>,
    ) -> impl Future<Output = Result<Vec<Taken<T>>, Failed>> + Send;

    fn complete(
        &self,
        rows: &Rows<'_>,
    ) -> impl Future<Output = Result<Vec<Completed>, Failed>> + Send;

    /// Completes where `completes` says so, and claims elsewhere: what each row is told. Two
    /// statements, where one would not do.
    fn mixed(
        &self,
        rows: &Rows<'_>,
        completes: &[bool],
    ) -> impl Future<Output = Result<Vec<Told>, Failed>> + Send {
        async move { one_by_one(self, rows, completes).await }
    }

    /// Renews, releases or undoes records: whether each token held its key.
    fn touch(
        &self,
        kind: Kind,
        rows: &Rows<'_>,
    ) -> impl Future<Output = Result<Vec<bool>, Failed>> + Send;
}

/// Claims, then completes.
pub(in crate::adapter) async fn one_by_one<D: Database + ?Sized>(
    database: &D,
    rows: &Rows<'_>,
    completes: &[bool],
) -> Result<Vec<Told>, Failed> {
    let places = |of: bool| {
        let places = (0..rows.len()).filter(move |place| completes[*place] == of);
        places.collect::<Vec<_>>()
    };
    let (claims, completions) = (places(false), places(true));
    let claimed = database.take::<Claimed>(Kind::Claim, &rows.at(&claims)).await?;
    // Once claims were granted, no later failure means that they were not.
    let completed = database.complete(&rows.at(&completions)).await.map_err(Failed::after)?;
    let (mut claimed, mut completed) = (claimed.into_iter(), completed.into_iter());
    let told = completes.iter().map(|completes| {
        if *completes {
            completed.next().map(Told::Completed)
        } else {
            claimed.next().map(Told::Claimed)
        }
    });
    Ok(told.flatten().collect())
}

/// What the caller of a call of its own is told.
fn first<T: Answer>(taken: Vec<Taken<T>>) -> Answers {
    T::wrap(taken.into_iter().map(|(answer, _)| answer).collect())
}

/// Carries a batch: rules 1 to 3.
pub(in crate::adapter) async fn carry<D: Database>(
    database: &D,
    calls: &[Call],
) -> Vec<Result<Answers, Error>> {
    let mut answers: Vec<Option<Result<Answers, Error>>> = calls.iter().map(|_| None).collect();
    // Once a statement may have granted something to a call, no later failure means that none did.
    let mut may_be_granted = vec![false; calls.len()];
    let mut parts = by_size(calls);
    while let Some(part) = parts.pop_front() {
        if let [one] = part[..] {
            let answer = database.alone(&calls[one]).await;
            let unknown = |error: Error| if may_be_granted[one] { error.unknown() } else { error };
            answers[one] = Some(answer.map_err(unknown));
            continue;
        }
        let asked: Vec<&Call> = part.iter().map(|call| &calls[*call]).collect();
        match together(database, &asked).await {
            Ok(told) => {
                let mut untold = Vec::new();
                for (call, told) in part.into_iter().zip(told) {
                    match told {
                        Some(told) => answers[call] = Some(Ok(told)),
                        None => {
                            may_be_granted[call] = true;
                            untold.push(call);
                        }
                    }
                }
                if !untold.is_empty() {
                    parts.push_front(untold);
                }
            }
            Err(Failed { error, of_a_row: true }) => {
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
                    answers[call] = Some(Err(error));
                }
            }
        }
    }
    let answers = answers.into_iter();
    answers.map(|answer| answer.unwrap_or_else(|| Err(untold()))).collect()
}

/// All calls, in parts that are not too large.
fn by_size(calls: &[Call]) -> VecDeque<Vec<usize>> {
    let (mut parts, mut part, mut bytes) = (VecDeque::new(), Vec::new(), 0_usize);
    for (place, call) in calls.iter().enumerate() {
        let more = call.bytes();
        if !part.is_empty() && bytes.saturating_add(more) > MOST_BYTES {
            parts.push_back(std::mem::take(&mut part));
            bytes = 0;
        }
        bytes = bytes.saturating_add(more);
        part.push(place);
    }
    parts.push_back(part);
    parts
}

fn untold() -> Error {
    Error::new(ErrorKind::Corrupt, "counting the answers of a batch")
}

/// One batch; none for a call that it does not tell.
async fn together<D: Database>(
    database: &D,
    calls: &[&Call],
) -> Result<Vec<Option<Answers>>, Failed> {
    let layout = Layout::new(calls);
    let Some(kind) = calls.first().map(|call| call.kind) else { return Ok(Vec::new()) };
    // Even if it is of no key, a call wants an answer of its kind.
    if calls.iter().any(|call| call.kind != kind) {
        let completes: Vec<bool> =
            layout.kinds.iter().map(|kind| *kind == Kind::Complete).collect();
        let told = database.mixed(&layout.rows, &completes).await?;
        let answer = |rows: &Named, call: &Call| match call.kind {
            Kind::Complete => each(rows, |row| match told.get(row)? {
                Told::Completed(completed) => Some(*completed),
                Told::Claimed(_) => None,
            }),
            _ => twins_too(rows, call, |row| match told.get(row)? {
                Told::Claimed(taken) => Some(taken),
                Told::Completed(_) => None,
            }),
        };
        return Ok(layout.of.iter().zip(calls).map(|(rows, call)| answer(rows, call)).collect());
    }
    match kind {
        Kind::Claim => {
            let taken = database.take::<Claimed>(kind, &layout.rows).await?;
            Ok(layout.twins_too(calls, &taken))
        }
        Kind::Record => {
            let taken = database.take::<Recorded>(kind, &layout.rows).await?;
            Ok(layout.twins_too(calls, &taken))
        }
        Kind::Complete => Ok(layout.each(&database.complete(&layout.rows).await?)),
        Kind::Renew => Ok(layout.each(&renewed(database.touch(kind, &layout.rows).await?))),
        Kind::Release | Kind::Unrecord => {
            Ok(layout.each(&released(database.touch(kind, &layout.rows).await?)))
        }
    }
}

impl Layout<'_> {
    fn each<T: Answer + Copy>(&self, answers: &[T]) -> Vec<Option<Answers>> {
        self.of.iter().map(|rows| each(rows, |row| answers.get(row).copied())).collect()
    }

    fn twins_too<T: Grant + Answer + Clone>(
        &self,
        calls: &[&Call],
        taken: &[Taken<T>],
    ) -> Vec<Option<Answers>> {
        let of = self.of.iter().zip(calls);
        of.map(|(rows, call)| twins_too(rows, call, |row| taken.get(row))).collect()
    }
}

/// Where no row is asked for twice.
fn each<T: Answer>(rows: &Named, answer: impl Fn(usize) -> Option<T>) -> Option<Answers> {
    rows.iter().map(|(row, _)| answer(*row)).collect::<Option<Vec<T>>>().map(T::wrap)
}

fn twins_too<'t, T: Grant + Answer + Clone + 't>(
    rows: &Named,
    call: &Call,
    taken: impl Fn(usize) -> Option<&'t Taken<T>>,
) -> Option<Answers> {
    let answers = rows.iter().map(|(row, own)| match taken(*row)? {
        (answer, _) if *own => Some(answer.clone()),
        (_, Some(stored)) => T::known(stored, call.terms.token()),
        (_, None) => Some(T::in_flight()),
    });
    answers.collect::<Option<Vec<T>>>().map(T::wrap)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::{HeaderMap, StatusCode};

    use super::super::super::stored::StoredResponse;
    use super::super::super::terms::Token;
    use super::*;

    fn call(bytes: usize, keys: usize) -> Call {
        let keys: Vec<_> = (0..keys as u64).map(|id| DedupKey::new("a", &id.to_string())).collect();
        let keys = keys.into_iter().collect::<Result<Vec<_>, _>>().unwrap();
        let terms = CallTerms::on_claim(Token::random(), Duration::ZERO);
        let body = vec![0; bytes].into();
        let response = StoredResponse::new(StatusCode::OK, HeaderMap::new(), body);
        let terms = terms.with_response(response.into());
        Call::new(Kind::Complete, &keys, vec![0; keys.len()], &terms)
    }

    #[test]
    fn batch_with_large_responses_is_sent_in_parts() {
        let small: Vec<_> = (0..1_024).map(|_| call(100, 1)).collect();
        assert_eq!(by_size(&small), [(0..1_024).collect::<Vec<_>>()]);
        let half = MOST_BYTES / 2;
        let sizes = [(half, 1), (half, 1), (1, 1), (MOST_BYTES * 2, 1), (half / 2, 4), (1, 1)];
        let large: Vec<_> = sizes.into_iter().map(|(bytes, keys)| call(bytes, keys)).collect();
        let parts = [vec![0, 1], vec![2], vec![3], vec![4], vec![5]];
        assert_eq!(by_size(&large), parts);
        assert_eq!(by_size(&[]), [Vec::<usize>::new()]);
    }
}
