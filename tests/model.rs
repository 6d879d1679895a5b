//! Random schedules of every call on a few keys, against a model of the contract.
//!
//! 1. The model is written from the words of the contract, one key at a time: what a call answers
//!    and leaves behind, given what is stored.
//! 2. A store may clear an expired key away whenever it likes, and some calls can tell. So the
//!    model keeps, for every key, all that may be stored: an answer has to be that of one of them,
//!    and those that would have answered otherwise are dropped.
//! 3. Time passes in steps of [`STEP`], far longer than a test runs. Whatever lies between is the
//!    same to the model.
//!
//! [`follows`] takes any store whose time can be moved.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::time::{Duration, SystemTime};

use futures_util::FutureExt;
use proptest::prelude::*;
use tower_dedup::DedupKey;
use tower_dedup::adapter::{
    Claimed, Completed, Entry, EntryState, Forgotten, Kept, LeaseAdapter, Maintain, MemoryAdapter,
    Recall, Receipt, Recorded, Released, Renewed, Token, Wanted,
};

const STEP: Duration = Duration::from_secs(1_000);
const KEYS: usize = 4;
/// Steps that never end.
const FOR_EVER: u32 = u32::MAX;

/// What a call asks for. Shown in the order of its fields, a schedule can be read.
#[derive(Debug, Clone)]
enum Call {
    Record(Keys, Terms),
    Unrecord(Keys, Terms),
    Claim(Keys, Terms),
    Renew(Keys, Terms),
    Complete(Keys, Terms),
    Release(Keys, Terms),
    Recall(Keys),
    Get(usize),
    Forget(usize),
    Purge(u32),
    Count,
    /// So many steps of time.
    Advance(u32),
}

/// Places of keys, ascending.
type Keys = Vec<usize>;

#[derive(Debug, Clone, Copy)]
struct Terms {
    token: u8,
    retention: u32,
    lease: u32,
    payload: Option<u8>,
}

/// Times are steps.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    token: Option<u8>,
    lease_until: u32,
    attempts: u32,
    takeover: bool,
    first_seen_at: u32,
    complete: bool,
    expires_at: u32,
    payload: Option<u8>,
}

impl Row {
    /// Claimed by nobody before.
    fn claimed(terms: Terms, now: u32) -> Self {
        Self {
            token: Some(terms.token),
            lease_until: now.saturating_add(terms.lease),
            attempts: 1,
            takeover: false,
            first_seen_at: now,
            complete: false,
            expires_at: now.saturating_add(terms.retention),
            payload: None,
        }
    }

    fn completed(terms: Terms, now: u32) -> Self {
        Self { complete: true, payload: terms.payload, ..Self::claimed(terms, now) }
    }

    fn is_leased(&self, now: u32) -> bool {
        !self.complete && self.token.is_some() && self.lease_until > now
    }

    /// A live lease never is.
    fn is_expired(&self, now: u32) -> bool {
        self.expires_at <= now && !self.is_leased(now)
    }

    fn is_claim_of(&self, terms: Terms) -> bool {
        !self.complete && self.token == Some(terms.token)
    }
}

/// An answer for one key: times in whole steps, as the model has them.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Answer {
    /// Of a claim: attempt and takeover.
    Granted(u32, bool),
    First,
    /// First seen so many steps ago.
    Duplicate(u32),
    InFlight,
    Renewed(Renewed),
    Completed(Completed),
    Released(Released),
    Forgotten(Forgotten),
    /// The payload, if any, of a complete key.
    Recalled(Option<Option<u8>>),
    /// State, attempts, takeover, first seen so many steps ago, expires in so many.
    Entry(Option<(State, u32, bool, i64, i64)>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// For so many more steps.
    InFlight(i64),
    Released,
    Complete,
}

/// What the contract says of one key: the answer, and what is stored from then on.
fn contract(call: &Call, stored: Option<Row>, now: u32) -> (Answer, Option<Row>) {
    // What has expired is as good as absent, for all but those who hold it.
    let live = stored.clone().filter(|row| !row.is_expired(now));
    match (call, stored) {
        (Call::Record(_, terms), stored) => match live {
            Some(row) if row.complete && row.token == Some(terms.token) => (Answer::First, stored),
            Some(row) if row.complete => (Answer::Duplicate(now - row.first_seen_at), stored),
            Some(row) if row.is_leased(now) => (Answer::InFlight, stored),
            _ => (Answer::First, Some(Row::completed(*terms, now))),
        },
        (Call::Unrecord(_, terms), stored) => match stored {
            Some(row) if row.complete && row.token == Some(terms.token) => {
                (Answer::Released(Released::Released), None)
            }
            stored => (Answer::Released(Released::NotHeld), stored),
        },
        (Call::Claim(_, terms), stored) => {
            let anew = Row::claimed(*terms, now);
            let claim = match (stored.clone().filter(|row| row.is_claim_of(*terms)), live) {
                // A repetition is told what it was told the first time.
                (Some(Row { attempts, takeover, first_seen_at, .. }), _) => {
                    Row { attempts, takeover, first_seen_at, ..anew }
                }
                (None, Some(row)) if row.complete => {
                    return (Answer::Duplicate(now - row.first_seen_at), stored);
                }
                (None, Some(row)) if row.is_leased(now) => return (Answer::InFlight, stored),
                (None, Some(row)) => Row {
                    attempts: row.attempts + 1,
                    // Not if it was released.
                    takeover: row.token.is_some(),
                    first_seen_at: row.first_seen_at,
                    ..anew
                },
                (None, None) => anew,
            };
            (Answer::Granted(claim.attempts, claim.takeover), Some(claim))
        }
        (Call::Renew(_, terms), stored) => {
            let anew = Row::claimed(*terms, now);
            match stored {
                None => (Answer::Renewed(Renewed::Held), Some(anew)),
                Some(row) if row.is_claim_of(*terms) => {
                    let renewed = Row { lease_until: anew.lease_until, ..row };
                    (Answer::Renewed(Renewed::Held), Some(renewed))
                }
                stored => (Answer::Renewed(Renewed::Lost), stored),
            }
        }
        (Call::Complete(_, terms), stored) => {
            let anew = Row::completed(*terms, now);
            let Some(row) = stored.filter(|row| !row.complete || row.expires_at > now) else {
                let inserted = Row { attempts: 0, ..anew };
                return (Answer::Completed(Completed::Inserted), Some(inserted));
            };
            let held = row.token == Some(terms.token);
            let answer = if held { Completed::Held } else { Completed::LeaseLost };
            let row = if row.complete {
                row
            } else {
                // Never expired at birth.
                let expired = row.expires_at <= now;
                let expires_at = if expired { anew.expires_at } else { row.expires_at };
                Row { complete: true, payload: terms.payload, expires_at, ..row }
            };
            (Answer::Completed(answer), Some(row))
        }
        (Call::Release(_, terms), stored) => match stored {
            Some(row) if row.is_claim_of(*terms) => {
                (Answer::Released(Released::Released), Some(Row { token: None, ..row }))
            }
            stored => (Answer::Released(Released::NotHeld), stored),
        },
        (Call::Recall(_), stored) => {
            let complete = live.filter(|row| row.complete);
            (Answer::Recalled(complete.map(|row| row.payload)), stored)
        }
        (Call::Get(_), stored) => {
            let entry = live.map(|row| {
                let state = match (row.complete, row.token) {
                    (true, _) => State::Complete,
                    (false, None) => State::Released,
                    (false, Some(_)) => State::InFlight(steps_from(now, row.lease_until)),
                };
                let ago = i64::from(now - row.first_seen_at);
                (state, row.attempts, row.takeover, ago, steps_from(now, row.expires_at))
            });
            (Answer::Entry(entry), stored)
        }
        (Call::Forget(_), stored) => match stored {
            None => (Answer::Forgotten(Forgotten::Missing), None),
            Some(row) if row.is_leased(now) => (Answer::Forgotten(Forgotten::InFlight), Some(row)),
            Some(_) => (Answer::Forgotten(Forgotten::Removed), None),
        },
        (Call::Purge(_) | Call::Count | Call::Advance(_), _) => {
            unreachable!("these ask for no key")
        }
    }
}

/// As many as [`FOR_EVER`] for all that is far away.
fn steps_from(now: u32, at: u32) -> i64 {
    if at == FOR_EVER { FOR_EVER.into() } else { i64::from(at) - i64::from(now) }
}

/// All that may be stored.
struct Model {
    now: u32,
    keys: Vec<BTreeSet<Option<Row>>>,
}

impl Model {
    fn new() -> Self {
        Self { now: 0, keys: vec![BTreeSet::from([None]); KEYS] }
    }

    /// What expired may have been cleared away.
    fn clear(&mut self) {
        for rows in &mut self.keys {
            if rows.iter().flatten().any(|row| row.is_expired(self.now)) {
                rows.insert(None);
            }
        }
    }

    fn answered(&mut self, call: &Call, key: usize, answer: &Answer) -> Result<(), String> {
        let outcomes = self.keys[key].iter().map(|row| contract(call, row.clone(), self.now));
        let (right, wrong): (Vec<_>, Vec<_>) = outcomes.partition(|(right, _)| right == answer);
        if right.is_empty() {
            let allowed: Vec<_> = wrong.into_iter().map(|(answer, _)| answer).collect();
            return Err(format!("key {key}: {answer:?}, but the contract says {allowed:?}"));
        }
        self.keys[key] = right.into_iter().map(|(_, row)| row).collect();
        Ok(())
    }

    fn purged(&mut self, limit: u32, purged: u64) -> Result<(), String> {
        let now = self.now;
        let expired = |row: &Option<Row>| row.as_ref().is_some_and(|row| row.is_expired(now));
        let most = self.keys.iter().filter(|rows| rows.iter().any(expired)).count() as u64;
        if purged > most.min(limit.into()) {
            return Err(format!("{purged} were purged, but at most {most} have expired"));
        }
        // Fewer than it might have: there are no more.
        if purged < limit.into() {
            for rows in &mut self.keys {
                rows.retain(|row| !expired(row));
            }
        }
        Ok(())
    }

    fn counted(&self, count: u64) -> Result<(), String> {
        let stored = |all: bool| {
            let is_stored = |rows: &&BTreeSet<Option<Row>>| {
                if all { !rows.contains(&None) } else { rows.iter().any(Option::is_some) }
            };
            self.keys.iter().filter(is_stored).count() as u64
        };
        let (least, most) = (stored(true), stored(false));
        if (least..=most).contains(&count) {
            return Ok(());
        }
        Err(format!("{count} were counted, but there are {least} to {most}"))
    }
}

fn key(place: usize) -> DedupKey {
    DedupKey::new("model", &place.to_string()).unwrap()
}

fn keys(places: &[usize]) -> Vec<DedupKey> {
    places.iter().copied().map(key).collect()
}

fn receipt(keys: &[DedupKey], terms: Terms) -> Receipt {
    let time = |steps| if steps == FOR_EVER { Duration::MAX } else { STEP * steps };
    let receipt = Receipt::new(Token::from([terms.token; 16]), time(terms.retention))
        .with_lease(time(terms.lease));
    match terms.payload {
        Some(payload) => receipt.with_payloads(keys.iter().map(|key| (key.clone(), [payload; 32]))),
        None => receipt,
    }
}

/// Whole steps, rounded down: the store's clock is a little ahead of the model's.
fn steps(age: Duration) -> u32 {
    u32::try_from(age.as_millis() / STEP.as_millis()).unwrap_or(FOR_EVER)
}

/// To the nearest step, and as many as [`FOR_EVER`] for all that is far away.
fn steps_to(at: SystemTime) -> i64 {
    let (apart, sign) = match at.duration_since(SystemTime::now()) {
        Ok(ahead) => (ahead, 1),
        Err(behind) => (behind.duration(), -1),
    };
    let steps = steps(apart + STEP / 2);
    if steps > 1_000_000 { FOR_EVER.into() } else { sign * i64::from(steps) }
}

fn read_entry(entry: &Entry) -> (State, u32, bool, i64, i64) {
    let state = match entry.state {
        EntryState::InFlight { lease_until } => State::InFlight(steps_to(lease_until)),
        EntryState::Released => State::Released,
        EntryState::Complete { .. } => State::Complete,
        other => panic!("{other:?}"),
    };
    let (ago, left) = (-steps_to(entry.first_seen_at), steps_to(entry.expires_at));
    (state, entry.attempts, entry.takeover, ago, left)
}

fn read_recorded(recorded: Recorded) -> Answer {
    match recorded {
        Recorded::First => Answer::First,
        Recorded::Duplicate(seen) => Answer::Duplicate(steps(seen.age)),
        Recorded::InFlight => Answer::InFlight,
        other => panic!("{other:?}"),
    }
}

fn read_claimed(claimed: Claimed) -> Answer {
    match claimed {
        Claimed::First { attempt, takeover, .. } => Answer::Granted(attempt, takeover),
        Claimed::Duplicate(seen) => Answer::Duplicate(steps(seen.age)),
        Claimed::InFlight => Answer::InFlight,
        other => panic!("{other:?}"),
    }
}

fn read_recalled(kept: Option<Kept>) -> Answer {
    Answer::Recalled(kept.map(|kept| kept.payload_sha256.map(|payload| payload[0])))
}

fn all<T>(answers: Vec<T>, read: impl Fn(T) -> Answer) -> Vec<Answer> {
    answers.into_iter().map(read).collect()
}

/// Whether a fresh store answers this schedule as the contract says, and if not, where it fails.
async fn follows<A: LeaseAdapter + Maintain + Recall>(
    adapter: &A,
    advance: impl AsyncFn(Duration),
    schedule: &[Call],
) -> Result<(), String> {
    let mut model = Model::new();
    for (number, call) in schedule.iter().enumerate() {
        model.clear();
        step(adapter, &advance, &mut model, call)
            .await
            .map_err(|fault| format!("call {number}, {call:?}: {fault}"))?;
    }
    Ok(())
}

async fn step<A: LeaseAdapter + Maintain + Recall>(
    adapter: &A,
    advance: &impl AsyncFn(Duration),
    model: &mut Model,
    call: &Call,
) -> Result<(), String> {
    fn text(error: impl Debug) -> String {
        format!("{error:?}")
    }
    let (places, answers) = match call {
        Call::Record(places, terms) => {
            let keys = keys(places);
            let recorded = adapter.record(&keys, &receipt(&keys, *terms)).await.map_err(text)?;
            (places.clone(), all(recorded, read_recorded))
        }
        Call::Unrecord(places, terms) => {
            let keys = keys(places);
            let undone = adapter.unrecord(&keys, &receipt(&keys, *terms)).await.map_err(text)?;
            (places.clone(), all(undone, Answer::Released))
        }
        Call::Claim(places, terms) => {
            let keys = keys(places);
            let claimed = adapter.claim(&keys, &receipt(&keys, *terms)).await.map_err(text)?;
            (places.clone(), all(claimed, read_claimed))
        }
        Call::Renew(places, terms) => {
            let keys = keys(places);
            let renewed = adapter.renew(&keys, &receipt(&keys, *terms)).await.map_err(text)?;
            (places.clone(), all(renewed, Answer::Renewed))
        }
        Call::Complete(places, terms) => {
            let keys = keys(places);
            let completed = adapter.complete(&keys, &receipt(&keys, *terms)).await.map_err(text)?;
            (places.clone(), all(completed, Answer::Completed))
        }
        Call::Release(places, terms) => {
            let keys = keys(places);
            let released = adapter.release(&keys, &receipt(&keys, *terms)).await.map_err(text)?;
            (places.clone(), all(released, Answer::Released))
        }
        Call::Recall(places) => {
            let recalled = adapter.recall(&keys(places), Wanted::All).await.map_err(text)?;
            (places.clone(), all(recalled, read_recalled))
        }
        Call::Get(place) => {
            let entry = adapter.get(&key(*place)).await.map_err(text)?;
            (vec![*place], vec![Answer::Entry(entry.as_ref().map(read_entry))])
        }
        Call::Forget(place) => {
            let forgotten = adapter.forget(&key(*place)).await.map_err(text)?;
            (vec![*place], vec![Answer::Forgotten(forgotten)])
        }
        Call::Purge(limit) => {
            let purged = adapter.purge(*limit).await.map_err(text)?;
            return model.purged(*limit, purged);
        }
        Call::Count => return model.counted(adapter.count().await.map_err(text)?),
        Call::Advance(steps) => {
            advance(STEP * *steps).await;
            model.now += steps;
            return Ok(());
        }
    };
    if answers.len() != places.len() {
        return Err(format!("{} answers", answers.len()));
    }
    places.iter().zip(&answers).try_for_each(|(place, answer)| model.answered(call, *place, answer))
}

// Schedules

fn some_keys() -> impl Strategy<Value = Keys> {
    let of_mask = |mask: u8| (0..KEYS).filter(|place| mask >> place & 1 == 1).collect();
    // Mostly one.
    prop_oneof![
        3 => (0..KEYS).prop_map(|place| vec![place]),
        1 => (1_u8..1 << KEYS).prop_map(of_mask),
    ]
}

fn terms() -> impl Strategy<Value = Terms> {
    let retention = prop_oneof![
        8 => 1_u32..6,
        1 => Just(0),
        1 => Just(FOR_EVER),
    ];
    let lease = prop_oneof![
        8 => 1_u32..4,
        1 => Just(0),
        1 => 6_u32..10,
    ];
    (1_u8..4, retention, lease, prop::option::of(0_u8..2))
        .prop_map(|(token, retention, lease, payload)| Terms { token, retention, lease, payload })
}

fn call() -> impl Strategy<Value = Call> {
    let asked = || (some_keys(), terms());
    prop_oneof![
        3 => asked().prop_map(|(keys, terms)| Call::Record(keys, terms)),
        2 => asked().prop_map(|(keys, terms)| Call::Unrecord(keys, terms)),
        6 => asked().prop_map(|(keys, terms)| Call::Claim(keys, terms)),
        3 => asked().prop_map(|(keys, terms)| Call::Renew(keys, terms)),
        4 => asked().prop_map(|(keys, terms)| Call::Complete(keys, terms)),
        3 => asked().prop_map(|(keys, terms)| Call::Release(keys, terms)),
        1 => some_keys().prop_map(Call::Recall),
        2 => (0..KEYS).prop_map(Call::Get),
        1 => (0..KEYS).prop_map(Call::Forget),
        2 => prop_oneof![1_u32..4, Just(100)].prop_map(Call::Purge),
        2 => Just(Call::Count),
        5 => (1_u32..4).prop_map(Call::Advance),
    ]
}

fn schedule() -> impl Strategy<Value = Vec<Call>> {
    prop::collection::vec(call(), 1..60)
}

fn memory_follows(capacity: usize, schedule: &[Call]) -> Result<(), TestCaseError> {
    let adapter = MemoryAdapter::with_capacity(capacity);
    let advance = async |by| adapter.advance(by);
    let follows = follows(&adapter, advance, schedule).now_or_never();
    follows.expect("memory never waits").map_err(TestCaseError::fail)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn memory_answers_as_the_contract_says(schedule in schedule()) {
        memory_follows(100, &schedule)?;
    }

    #[test]
    fn memory_in_shards_answers_as_the_contract_says(schedule in schedule()) {
        memory_follows(4_096, &schedule)?;
    }
}
