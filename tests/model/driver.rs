//! Calls as a store's, and its answers as the model's.

use std::fmt::Debug;
use std::time::{Duration, SystemTime};

use tower_dedup::DedupKey;
use tower_dedup::adapter::{
    CallTerms, Claimed, Entry, EntryState, Fetch, LeaseAdapter, MaintenanceAdapter, PURGE_GRACE,
    Recall, Recorded, StoredData, Token,
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

pub(crate) async fn ask<A: LeaseAdapter + MaintenanceAdapter + Recall>(
    adapter: &A,
    call: &Call,
) -> Result<Told, String> {
    fn text(error: impl Debug) -> String {
        format!("{error:?}")
    }
    let (places, answers) = match call {
        Call::Record(places, terms) => {
            let keys = keys(places);
            let recorded = adapter.record(&keys, &call_terms(&keys, *terms)).await.map_err(text)?;
            (places.clone(), all(recorded, read_recorded))
        }
        Call::Unrecord(places, terms) => {
            let keys = keys(places);
            let undone = adapter.unrecord(&keys, &call_terms(&keys, *terms)).await.map_err(text)?;
            (places.clone(), all(undone, Answer::Released))
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
        Call::Recall(places) => {
            let recalled =
                adapter.recall(&keys(places), Fetch::DigestAndResponse).await.map_err(text)?;
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

fn call_terms(keys: &[DedupKey], terms: Terms) -> CallTerms {
    let time = |steps| if steps == FOR_EVER { Duration::MAX } else { STEP * steps };
    let call = CallTerms::new(Token::from([terms.token; 16]), time(terms.retention))
        .with_lease(time(terms.lease));
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

fn read_recalled(kept: Option<StoredData>) -> Answer {
    Answer::Recalled(kept.map(|kept| kept.payload_sha256.map(|payload| payload[0])))
}

fn all<T>(answers: Vec<T>, read: impl Fn(T) -> Answer) -> Vec<Answer> {
    answers.into_iter().map(read).collect()
}
