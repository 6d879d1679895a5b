//! From the replies of the store to one verdict per delivery.
//!
//! 1. The identities of an event are claimed in two steps: first its second identity, then its key.
//!    If somebody sends a body that was handled under the id of another event, the delivery is a
//!    duplicate before the store has touched that id. An event with one identity is claimed in the
//!    first step. Each key is claimed by a call of its own, and the calls of a step are made at the
//!    same time.
//! 2. The key is claimed if the second identity was. It is also claimed if the second identity is
//!    complete for the same key: then the key alone decides, and an operator forgets one key to let
//!    the event run again. So the row of a second identity names its key, by a SHA-256.
//! 3. An event is new if its key was claimed. It is a duplicate if its key is complete, or its
//!    second identity is complete for another key, or for one that the store does not name.
//!    Otherwise it is in flight, also if a claim has failed. If no event is new, the error of a
//!    claim is the error of the delivery.
//! 4. An event that shares an identity with an earlier event of the same delivery is a duplicate of
//!    that event.
//! 5. The identities that the calls have claimed of a new event are held. Those of every other
//!    event are released, never completed: an attacker who cannot sign may send a body that was
//!    handled under the id of an event that was not. An identity whose claim has an unknown outcome
//!    is released too.
//! 6. Payloads are compared under the key of an event. Only payloads of complete keys are compared:
//!    an attempt that failed had no effect that could differ. A mismatch is a duplicate, and is
//!    reported. The payload of an event with a content identity is that content, because a body
//!    that was not handled can complete an id.
//! 7. A response is fetched, and replayed, for a delivery of one event only.

use std::collections::HashSet;
use std::future::Future;
use std::mem::take;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::call::{Calls, Claimed, Reply};
use super::hold::Hold;
use crate::adapter::KeyedTerms;
use crate::adapter::contract::{ClaimReply, Seen};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::{DedupKey, Event, Keys, List};
use crate::observe::{self, Meters};

/// Returns the events without repetitions: rule 4.
pub(super) fn distinct(keys: &Keys) -> List<Event> {
    if let [only] = keys.events() {
        return List::from([only.clone()]);
    }
    let mut seen = HashSet::new();
    let mut events = Vec::with_capacity(keys.events().len());
    for event in keys.events() {
        if !event.identities().any(|key| seen.contains(key)) {
            seen.extend(event.identities());
            events.push(event.clone());
        }
    }
    events.into()
}

/// Claims the identities of these events. Then the hold has only keys of events that do not run.
///
/// # Errors
///
/// No event runs, and a claim has failed.
pub(super) fn claim_all<'h>(
    hold: &'h mut Hold<'_>,
    events: List<Event>,
) -> impl Future<Output = Result<Resolution, StoreError>> + Send + 'h {
    hold.calls.fetch_for(&events);
    async move {
        let asked = events.iter().map(|it| hold.asking(it, first_identity(it))).collect();
        let first = hold.claim(asked).await;
        let answered = match answered(events, first) {
            ControlFlow::Break(resolution) => return Ok(resolution),
            ControlFlow::Continue(answered) => answered,
        };
        if answered.iter().any(Answered::leads_to_key) {
            // Boxed, because most events have one identity.
            return Box::pin(claim_keys(hold, answered)).await;
        }
        conclude(hold, answered)
    }
}

/// Takes the first replies. Most deliveries carry one event with one identity, which is new, and
/// need no more.
fn answered(events: List<Event>, first: List<Claimed>) -> ControlFlow<Resolution, Vec<Answered>> {
    if let ([(_, Ok(ClaimReply::First { attempt, takeover }))], [event]) = (&*first, &*events)
        && event.second_identity().is_none()
    {
        let (attempt, takeover) = (*attempt, *takeover);
        let held = first.into_iter().map(|(it, _)| it).collect();
        let resolution = Resolution { new: events, held, attempt, takeover, ..Default::default() };
        return ControlFlow::Break(resolution);
    }
    let first = events.into_iter().zip(first);
    ControlFlow::Continue(first.map(|(event, it)| Answered::first(event, it)).collect())
}

/// Claims the keys after their second identities.
async fn claim_keys(
    hold: &mut Hold<'_>,
    mut answered: Vec<Answered>,
) -> Result<Resolution, StoreError> {
    hold.keys = answered.iter().flat_map(Answered::may_be_held).cloned().collect();
    let later = answered.iter().filter(|it| it.leads_to_key());
    let asked = later.map(|it| hold.asking(&it.event, it.event.key())).collect();
    let mut claimed = hold.claim(asked).await.into_iter();
    for later in answered.iter_mut().filter(|it| it.leads_to_key()) {
        later.key = claimed.next();
    }
    let resolution = conclude(hold, answered)?;
    if resolution.new.is_empty() && !hold.keys.is_empty() {
        // A delivery that runs no event holds no key. A release that fails continues in the
        // background.
        let _ = hold.release().await;
    }
    Ok(resolution)
}

/// Resolves the replies.
fn conclude(hold: &mut Hold<'_>, answered: Vec<Answered>) -> Result<Resolution, StoreError> {
    let events = || answered.iter().map(|it| it.event.clone()).collect();
    let failed = error(&answered).map(|error| (error, events()));
    let mut resolution = resolve(answered, &hold.calls.meters);
    hold.keys = take(&mut resolution.release);
    match failed.filter(|_| resolution.new.is_empty()) {
        Some((error, events)) if hold.fails_open(&error) => {
            let resolution = Resolution::unprotected(events, &error, &hold.calls);
            hold.keep();
            Ok(resolution)
        }
        Some((error, _)) => Err(error),
        None => Ok(resolution),
    }
}

/// Returns the identity that is claimed first.
fn first_identity(event: &Event) -> &DedupKey {
    event.second_identity().unwrap_or(event.key())
}

/// An event with the replies that decide about it.
#[derive(Debug)]
struct Answered {
    event: Event,
    /// `None` if the key is not claimed.
    key: Option<Claimed>,
    /// The second identity. `None` if there is none, or if it leaves the decision to the key: rule
    /// 2.
    second: Option<Claimed>,
}

impl Answered {
    /// Takes the identity that is claimed first.
    fn first(event: Event, claimed: Claimed) -> Self {
        let (key, second) = match &claimed.1 {
            _ if event.second_identity().is_none() => (Some(claimed), None),
            Ok(ClaimReply::Duplicate(seen))
                if stored_sha256(seen) == Some(event.key().sha256()) =>
            {
                (None, None)
            }
            _ => (None, Some(claimed)),
        };
        Self { event, key, second }
    }

    /// Returns `true` if the key is claimed after the second identity: rule 2.
    fn leads_to_key(&self) -> bool {
        let second = self.second.as_ref();
        self.key.is_none() && second.is_none_or(|(_, reply)| reply.as_ref().is_ok_and(is_first))
    }

    fn claimed(&self) -> impl Iterator<Item = &Claimed> {
        self.key.iter().chain(&self.second)
    }

    /// Returns the identities that were claimed, or whose claims have an unknown outcome.
    fn may_be_held(&self) -> impl Iterator<Item = &KeyedTerms> {
        self.claimed().filter(|(_, reply)| may_be_held(reply)).map(|(identity, _)| identity)
    }
}

/// Returns the error of a claim. Unreadable data may belong to a duplicate, so such an error comes
/// first: it decides whether a handler runs.
fn error(answered: &[Answered]) -> Option<StoreError> {
    let replies = answered.iter().flat_map(Answered::claimed);
    let errors = replies.filter_map(|(_, reply)| reply.as_ref().err());
    errors.min_by_key(|error| error.kind() != StoreErrorKind::Corrupt).cloned()
}

fn is_first(reply: &ClaimReply) -> bool {
    matches!(reply, ClaimReply::First { .. })
}

fn may_be_held(reply: &Reply) -> bool {
    reply.as_ref().map_or_else(StoreError::is_unknown, is_first)
}

/// Returns the SHA-256 that is stored: that of a payload, or with a second identity that of its
/// key.
fn stored_sha256(seen: &Seen) -> Option<[u8; 32]> {
    seen.stored.as_ref()?.payload_sha256
}

/// The verdict on a delivery.
#[derive(Debug, Default)]
pub(super) struct Resolution {
    /// The events that run.
    pub(super) new: List<Event>,
    /// The claimed identities of the events that run, sorted.
    pub(super) held: List<KeyedTerms>,
    pub(super) attempt: u32,
    pub(super) takeover: bool,
    pub(super) in_flight: bool,
    duplicate: Option<Seen>,
    pub(super) mismatch: bool,
    /// Keys to release: rule 5.
    release: List<KeyedTerms>,
    /// The events run although the store has not replied.
    pub(super) is_unprotected: bool,
}

impl Resolution {
    /// Lets the events run although the store has not replied.
    fn unprotected(new: List<Event>, error: &StoreError, calls: &Calls) -> Self {
        if let Some(event) = new.first() {
            observe::records::unprotected(&calls.meters, event.key(), error);
        }
        let identities = |event| Event::identities(event).map(|it| calls.keyed(event, it));
        let held = sorted(new.iter().flat_map(identities).collect());
        Self { new, held, attempt: 1, is_unprotected: true, ..Self::default() }
    }

    /// Notes the replies for an event.
    fn add(&mut self, answered: Answered, meters: &Meters) {
        use ClaimReply::{Duplicate, First};
        match (&answered.key, &answered.second) {
            (Some((_, Ok(First { .. }))), None | Some((_, Ok(First { .. })))) => {
                for (identity, reply) in answered.key.into_iter().chain(answered.second) {
                    let Ok(First { attempt, takeover }) = reply else { continue };
                    self.held.push(identity);
                    self.attempt = self.attempt.max(attempt);
                    self.takeover |= takeover;
                }
                self.new.push(answered.event);
                return;
            }
            (Some((by, Ok(Duplicate(seen)))), _) | (_, Some((by, Ok(Duplicate(seen))))) => {
                self.add_duplicate(&answered.event, by, seen, meters);
            }
            _ => self.in_flight = true,
        }
        self.release.extend(answered.may_be_held().cloned());
    }

    /// Returns when the first event was seen, if every event is complete.
    pub(super) fn all_complete(&mut self) -> Option<Seen> {
        self.duplicate.take_if(|_| self.new.is_empty() && !self.in_flight)
    }

    /// Notes that an identity of `event` is complete.
    fn add_duplicate(&mut self, event: &Event, by: &KeyedTerms, seen: &Seen, meters: &Meters) {
        let (key, is_key) = (event.key(), by.key == *event.key());
        let expected = if is_key { by.terms.payload_sha256() } else { Some(key.sha256()) };
        if let (Some(stored), Some(expected)) = (stored_sha256(seen), expected)
            && stored != expected
        {
            self.mismatch |= is_key;
            // A panic of a subscriber would lose the keys that other events have claimed.
            let _ = catch_unwind(AssertUnwindSafe(|| match event.alias() {
                _ if is_key => observe::records::mismatch(meters, key),
                Some(_) => observe::records::same_event(meters, key, &by.key),
                None => observe::records::same_body(meters, key, &by.key),
            }));
        }
        self.duplicate.get_or_insert_with(|| seen.clone());
    }
}

/// Resolves the replies.
fn resolve(answered: Vec<Answered>, meters: &Meters) -> Resolution {
    let mut resolution = Resolution::default();
    for event in answered {
        resolution.add(event, meters);
    }
    resolution.held = sorted(resolution.held);
    resolution
}

fn sorted(mut keys: List<KeyedTerms>) -> List<KeyedTerms> {
    keys.sort_unstable_by(|one, other| one.key.cmp(&other.key));
    keys
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::contract::CallTerms;

    #[test]
    fn unreadable_data_of_any_event_is_the_error_of_all() {
        let kinds = [StoreErrorKind::Unavailable, StoreErrorKind::Corrupt, StoreErrorKind::Timeout];
        let answered = kinds.map(|kind| {
            let key = DedupKey::new("n", &format!("{kind:?}")).unwrap();
            let terms = Box::new(CallTerms::on_claim([0; 16].into(), Default::default()));
            let it = KeyedTerms { key: key.clone(), terms };
            Answered::first(key.into(), (it, Err(StoreError::new(kind, "claiming keys"))))
        });
        assert_eq!(error(&answered).unwrap().kind(), StoreErrorKind::Corrupt);
    }
}
