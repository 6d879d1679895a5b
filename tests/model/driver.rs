//! Calls as a store's, and its answers as the model's.

use std::fmt::Debug;
use std::time::{Duration, SystemTime};

use tower_dedup::DedupKey;
use tower_dedup::adapter::{
    CallTerms, Claimed, Entry, EntryState, Fetch, MaintenanceAdapter, PURGE_GRACE, StoredData,
    Token,
};

use super::call::{Call, FOR_EVER, Terms};
use super::contract::{Answer, State};

/// Far longer than a schedule runs: whatever lies between two steps is the same to the model. As long
/// as an expired key stays before it is purged.
pub(crate) const STEP: Duration = PURGE_GRACE;

/// What a call is told.
#[derive(Debug)]
pub(crate) enum Told {
    /// Of each of its keys.
    Keys(Vec<(usize, Answer)>),
    /// Purged or counted.
    Number(u64),
}

pub(crate) async fn ask<A: MaintenanceAdapter>(adapter: &A, call: &Call) -> Result<Told, String> {
    fn text(error: impl Debug) -> String {
        format!("{error:?}")
    }
    let (places, answers) = match call {
        Call::ClaimAtOnce(places, terms) => {
            let keys = keys(places);
            let terms = at_once(&keys, *terms);
            let claimed = adapter.claim(&keys, &terms).await.map_err(text)?;
            (places.clone(), all(claimed, read_claimed))
        }
        Call::ReleaseAtOnce(places, terms) => {
            let keys = keys(places);
            let terms = at_once(&keys, *terms);
            let released = adapter.release(&keys, &terms).await.map_err(text)?;
            (places.clone(), all(released, Answer::Released))
        }
        Call::Claim(places, terms) => {
            let keys = keys(places);
            let claimed = adapter.claim(&keys, &call_terms(&keys, *terms)).await.map_err(text)?;
            (places.clone(), all(claimed, read_claimed))
        }
        Call::Renew(places, terms) => {
            let keys = keys(places);
            let renewed = adapter.renew(&keys, &call_terms(&keys, *terms)).await.map_err(text)?;
            (places.clone(), all(renewed, Answer::Renewed))
        }
        Call::Complete(places, terms) => {
            let keys = keys(places);
            let completed =
                adapter.complete(&keys, &call_terms(&keys, *terms)).await.map_err(text)?;
            (places.clone(), all(completed, Answer::Completed))
        }
        Call::Release(places, terms) => {
            let keys = keys(places);
            let released =
                adapter.release(&keys, &call_terms(&keys, *terms)).await.map_err(text)?;
            (places.clone(), all(released, Answer::Released))
        }
        Call::Get(place) => {
            let entry = adapter.get(&key(*place)).await.map_err(text)?;
            (vec![*place], vec![Answer::Entry(entry.as_ref().map(read_entry))])
        }
        Call::Forget(place) => {
            let forgotten = adapter.forget(&key(*place)).await.map_err(text)?;
            (vec![*place], vec![Answer::Forgotten(forgotten)])
        }
        Call::Purge(limit) => return adapter.purge(*limit).await.map(Told::Number).map_err(text),
        Call::Count => return adapter.count().await.map(Told::Number).map_err(text),
        Call::Advance(_) => unreachable!("no store is asked for that"),
    };
    if answers.len() != places.len() {
        return Err(format!("{} answers", answers.len()));
    }
    Ok(Told::Keys(places.into_iter().zip(answers).collect()))
}

fn key(place: usize) -> DedupKey {
    DedupKey::new("model", &place.to_string()).unwrap()
}

fn keys(places: &[usize]) -> Vec<DedupKey> {
    places.iter().copied().map(key).collect()
}

fn time(steps: u32) -> Duration {
    if steps == FOR_EVER { Duration::MAX } else { STEP * steps }
}

fn at_once(keys: &[DedupKey], terms: Terms) -> CallTerms {
    let call = CallTerms::on_claim(Token::from([terms.token; 16]), time(terms.retention));
    with_data(call, keys, terms)
}

fn call_terms(keys: &[DedupKey], terms: Terms) -> CallTerms {
    let (token, retention) = (Token::from([terms.token; 16]), time(terms.retention));
    let call = CallTerms::on_completion(token, retention, time(terms.lease));
    with_data(call, keys, terms)
}

fn with_data(call: CallTerms, keys: &[DedupKey], terms: Terms) -> CallTerms {
    let call = call.with_fetch(if terms.fetches { Fetch::Digest } else { Fetch::Nothing });
    match terms.payload {
        Some(payload) => call.with_payloads(keys.iter().map(|key| (key.clone(), [payload; 32]))),
        None => call,
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

fn read_claimed(claimed: Claimed) -> Answer {
    match claimed {
        Claimed::First { attempt, takeover, .. } => Answer::Granted(attempt, takeover),
        Claimed::Duplicate(seen) => {
            let payload = |data: &StoredData| data.payload_sha256.map(|payload| payload[0]);
            Answer::Duplicate(steps(seen.age), seen.stored.as_deref().map(payload))
        }
        Claimed::InFlight => Answer::InFlight,
        other => panic!("{other:?}"),
    }
}

fn all<T>(answers: Vec<T>, read: impl Fn(T) -> Answer) -> Vec<Answer> {
    answers.into_iter().map(read).collect()
}
