//! Makes the calls of a schedule on a store, and translates its replies for the model.

use std::fmt::Debug;
use std::time::{Duration, SystemTime};

use futures_util::future::try_join_all;
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, Fetch, StoredData, Token};
use tower_dedup::adapter::maintenance::{Entry, KeyState, MaintenanceAdapter, PURGE_GRACE};
use tower_dedup::{DedupKey, StoreError, StoreErrorKind};

use super::call::{Call, FOR_EVER, Terms};
use super::contract::{Reply, State};
use support::{complete_all, release_all};

/// A schedule runs for less than one step, so the model needs no times between two steps. A purge
/// spares an expired key for one step.
pub(crate) const STEP: Duration = PURGE_GRACE;

const MOST_TRIES: usize = 20;

/// Makes a call. Returns the reply for each key; a purge has none.
pub(crate) async fn execute<A: MaintenanceAdapter>(
    adapter: &A,
    call: &Call,
) -> Result<Vec<(usize, Reply)>, String> {
    fn text(error: impl Debug) -> String {
        format!("{error:?}")
    }
    let (places, replies) = match call {
        Call::Claim(places, terms) => {
            let keys = keys(places);
            let terms = call_terms(*terms);
            let claimed = claims(adapter, &keys, &terms).await.map_err(text)?;
            (places.clone(), all(claimed, read_claimed))
        }
        Call::Renew(places, terms) => {
            let keys = keys(places);
            let terms = call_terms(*terms);
            let renewed = keys.iter().map(|key| adapter.renew(key, &terms));
            let renewed = try_join_all(renewed).await.map_err(text)?;
            (places.clone(), all(renewed, Reply::Renewed))
        }
        Call::Complete(places, terms) => {
            let keys = keys(places);
            let terms = call_terms(*terms);
            let completed = complete_all(adapter, &keys, &terms).await.map_err(text)?;
            (places.clone(), all(completed, Reply::Completed))
        }
        Call::Release(places, terms) => {
            let keys = keys(places);
            release_all(adapter, &keys, &call_terms(*terms)).await.map_err(text)?;
            (places.clone(), vec![Reply::Released; keys.len()])
        }
        Call::Get(place) => {
            let entry = adapter.get(&key(*place)).await.map_err(text)?;
            (vec![*place], vec![Reply::Entry(entry.as_ref().map(read_entry))])
        }
        Call::Forget(place) => {
            let forgotten = adapter.forget(&key(*place)).await.map_err(text)?;
            (vec![*place], vec![Reply::Forgotten(forgotten)])
        }
        Call::Purge(limit) => {
            adapter.purge(*limit).await.map_err(text)?;
            return Ok(Vec::new());
        }
    };
    if replies.len() != places.len() {
        return Err(format!("{} replies", replies.len()));
    }
    Ok(places.into_iter().zip(replies).collect())
}

/// Claims the keys at the same time. A claim that may hold a row which another call holds open is of unknown outcome: it
/// has written nothing, and is made again.
async fn claims<A: MaintenanceAdapter>(
    adapter: &A,
    keys: &[DedupKey],
    terms: &CallTerms,
) -> Result<Vec<ClaimReply>, StoreError> {
    let claim = async |key| {
        for _ in 0..MOST_TRIES {
            match adapter.claim(key, terms).await {
                Err(error) if error.kind() == StoreErrorKind::Unavailable => {}
                claimed => return claimed,
            }
        }
        adapter.claim(key, terms).await
    };
    try_join_all(keys.iter().map(claim)).await
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

fn call_terms(terms: Terms) -> CallTerms {
    let (token, retention) = (Token::from([terms.token; 16]), time(terms.retention));
    let call = if terms.at_once {
        CallTerms::on_claim(token, retention)
    } else {
        CallTerms::on_completion(token, retention, time(terms.lease))
    };
    let call = call.with_fetch(if terms.fetches { Fetch::Digest } else { Fetch::Nothing });
    match terms.payload {
        Some(payload) => call.with_payload_sha256([payload; 32]),
        None => call,
    }
}

/// Whole steps, rounded down: the store's clock is a little ahead of the model's.
fn steps(age: Duration) -> u32 {
    u32::try_from(age.as_millis() / STEP.as_millis()).unwrap_or(FOR_EVER)
}

/// To the nearest step, and [`FOR_EVER`] for all times that are far away.
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
        KeyState::InFlight | KeyState::Lapsed => {
            State::InFlight(steps_to(entry.lease_until.unwrap()))
        }
        KeyState::Released => State::Released,
        KeyState::Complete => State::Complete,
        other => panic!("{other:?}"),
    };
    let (ago, left) = (-steps_to(entry.first_seen_at), steps_to(entry.expires_at));
    (state, entry.attempts, entry.takeover, ago, left)
}

fn read_claimed(claimed: ClaimReply) -> Reply {
    match claimed {
        ClaimReply::First { attempt, takeover, .. } => Reply::Granted(attempt, takeover),
        ClaimReply::Duplicate(seen) => {
            let payload = |data: &StoredData| data.payload_sha256.map(|payload| payload[0]);
            Reply::Duplicate(steps(seen.age), seen.stored.as_deref().map(payload))
        }
        ClaimReply::InFlight => Reply::InFlight,
        other => panic!("{other:?}"),
    }
}

fn all<T>(replies: Vec<T>, read: impl Fn(T) -> Reply) -> Vec<Reply> {
    replies.into_iter().map(read).collect()
}
