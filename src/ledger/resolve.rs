//! From one reply per key to one verdict per delivery.
//!
//! 1. An event is a duplicate if any of its identities is complete, else in flight if any is in
//!    flight, else new.
//! 2. All identities of all events are claimed in one call, sorted, so that every store sees them in
//!    one order.
//! 3. An event that shares an identity with an earlier event of the same delivery is a duplicate of
//!    that event.
//! 4. The identities that the call has claimed of a new event are held. Those of every other event are
//!    released, never completed: whoever cannot sign may send a body that was handled under the id of an
//!    event that was not.
//! 5. Payloads are compared under the key of an event, not under its second identity, under which
//!    another event may have been handled. Only payloads of complete keys are compared: an attempt
//!    that failed had no effect that could differ. A mismatch is a duplicate, and is reported.
//! 6. A response is replayed to a delivery of one event only.

use std::collections::HashSet;
use std::sync::Arc;

use super::contract::{Begin, DuplicateInfo};
use crate::adapter::{CallTerms, Claimed, Fetch, Seen, StoredData, StoredResponse};
use crate::delivery::{Inner, Protection};
use crate::key::{DedupKey, Event, Keys, List};
use crate::observe;

/// The state of one key, as the store and this process know it.
#[derive(Debug, Clone)]
pub(super) enum KeyState {
    First { attempt: u32, takeover: bool },
    InFlight,
    Duplicate(Seen),
}

impl From<Claimed> for KeyState {
    fn from(claimed: Claimed) -> Self {
        match claimed {
            Claimed::First { attempt, takeover } => Self::First { attempt, takeover },
            Claimed::InFlight => Self::InFlight,
            Claimed::Duplicate(seen) => Self::Duplicate(seen),
        }
    }
}

/// Returns the events without repetitions, and all their identities, sorted.
pub(super) fn flatten(keys: &Keys) -> (List<Event>, List<DedupKey>) {
    if let [only] = keys.events()
        && only.second_identity().is_none()
    {
        return (List::from([only.clone()]), List::from([only.key().clone()]));
    }
    let mut seen = HashSet::new();
    let mut events = Vec::with_capacity(keys.events().len());
    for event in keys.events() {
        if event.identities().any(|key| seen.contains(key)) {
            continue;
        }
        seen.extend(event.identities().cloned());
        events.push(event.clone());
    }
    let mut flat: Vec<DedupKey> = seen.into_iter().collect();
    flat.sort_unstable();
    (events.into(), flat.into())
}

/// Returns all identities of these events, sorted.
fn identities<'e>(events: impl IntoIterator<Item = &'e Event>) -> Vec<DedupKey> {
    let mut keys: Vec<DedupKey> = events.into_iter().flat_map(Event::identities).cloned().collect();
    keys.sort_unstable();
    keys
}

/// Returns the state of every key of `flat`: `known` for the keys that are `pending` in this process,
/// and the store's replies for the others. All three lists are in the order of `flat`.
pub(super) fn states(
    flat: &[DedupKey],
    replies: Vec<Claimed>,
    pending: Vec<(DedupKey, Arc<StoredData>)>,
    known: impl Fn(Arc<StoredData>) -> KeyState,
) -> List<KeyState> {
    let mut replies = replies.into_iter().map(KeyState::from);
    let mut pending = pending.into_iter().peekable();
    if let ([_], None) = (flat, pending.peek()) {
        return replies.next().into_iter().collect();
    }
    let states =
        flat.iter().map_while(|key| match pending.next_if(|(pending, _)| pending == key) {
            Some((_, stored)) => Some(known(stored)),
            None => replies.next(),
        });
    states.collect()
}

/// The verdict on a delivery.
#[derive(Debug, Default)]
pub(super) struct Resolution {
    /// The events that run.
    pub(super) new: List<Event>,
    pub(super) attempt: u32,
    pub(super) takeover: bool,
    pub(super) in_flight: bool,
    duplicate: Option<Seen>,
    pub(super) mismatch: bool,
    response: Option<Arc<StoredResponse>>,
    /// Claimed keys to release: rule 4.
    pub(super) release: Vec<DedupKey>,
}

impl Resolution {
    /// Returns the verdict on a delivery without a new event.
    pub(super) fn without_new<C>(self) -> Begin<C> {
        match self.duplicate {
            Some(seen) if !self.in_flight => {
                let info = DuplicateInfo { age: seen.age, response: self.response };
                if self.mismatch { Begin::Mismatch(info) } else { Begin::Duplicate(info) }
            }
            _ => Begin::InFlight,
        }
    }

    /// Reports the takeover, if the events that run are one.
    pub(super) fn report_run(&self) {
        if let (true, Some(event)) = (self.takeover, self.new.first()) {
            observe::takeover(event.key(), self.attempt);
        }
    }

    /// Makes the delivery of the events that run, of which there is at least one.
    pub(super) fn delivery<T>(self, protection: Protection, of_ledger: T) -> Arc<Inner<T>> {
        let run = (self.attempt, self.takeover);
        Arc::new(Inner::new(self.new, run, protection, None, of_ledger))
    }

    /// Returns all identities of the events that run, sorted.
    pub(super) fn held(&self) -> List<DedupKey> {
        match &*self.new {
            [only] if only.second_identity().is_none() => List::from([only.key().clone()]),
            new => identities(new).into(),
        }
    }
}

/// Resolves the states of the keys of `flat`, which is sorted, for these events.
pub(super) fn resolve(
    events: List<Event>,
    flat: &[DedupKey],
    states: &[KeyState],
    terms: &CallTerms,
) -> Resolution {
    let mut resolution = Resolution::default();
    // Most deliveries carry one event with one identity.
    if let ([KeyState::First { attempt, takeover }], [_]) = (states, &*events) {
        let (attempt, takeover) = (*attempt, *takeover);
        return Resolution { new: events, attempt, takeover, ..resolution };
    }
    let is_single = events.len() == 1;
    let mut new = Vec::new();
    for event in events {
        let (mut claimed, mut attempts, mut took_over) = (Vec::new(), 0, false);
        let (mut seen, mut in_flight, mut is_known_by_key) = (None, false, false);
        for key in event.identities() {
            let place = flat.binary_search(key).ok();
            match place.and_then(|place| states.get(place)) {
                Some(KeyState::First { attempt, takeover }) => {
                    claimed.push(key.clone());
                    attempts = attempts.max(*attempt);
                    took_over |= *takeover;
                }
                Some(KeyState::Duplicate(found)) => {
                    if is_mismatch(key, found, terms) {
                        resolution.mismatch = true;
                        observe::mismatch(key);
                    }
                    let response = found.stored.as_ref().and_then(|stored| stored.response.clone());
                    // A pending completion of another layer may carry a response that this one does not
                    // replay.
                    let is_wanted = is_single && terms.fetch() == Fetch::DigestAndResponse;
                    if is_wanted && (resolution.response.is_none() || key == event.key()) {
                        resolution.response = response.or(resolution.response);
                    }
                    is_known_by_key |= key == event.key();
                    seen = Some(found.clone());
                }
                // A missing reply claims nothing.
                Some(KeyState::InFlight) | None => in_flight = true,
            }
        }
        if let Some(seen) = seen {
            if !is_known_by_key && event.alias().is_none() {
                observe::same_body(event.key());
            }
            resolution.duplicate.get_or_insert(seen);
        } else if in_flight {
            resolution.in_flight = true;
        } else {
            resolution.attempt = resolution.attempt.max(attempts);
            resolution.takeover |= took_over;
            new.push(event);
            continue;
        }
        resolution.release.append(&mut claimed);
    }
    resolution.new = new.into();
    resolution
}

/// Returns `true` if the key was handled with another payload than that of this call.
fn is_mismatch(key: &DedupKey, seen: &Seen, terms: &CallTerms) -> bool {
    let stored = seen.stored.as_ref().and_then(|stored| stored.payload_sha256);
    let asked = || terms.stored_data_for(key).and_then(|asked| asked.payload_sha256);
    stored.is_some_and(|stored| asked().is_some_and(|asked| asked != stored))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn key(id: &str) -> DedupKey {
        DedupKey::new("n", id).unwrap()
    }

    fn with_second(id: &str, second: &str) -> Event {
        Event::new(key(id)).with_second_identity(key(second))
    }

    const FIRST: KeyState = KeyState::First { attempt: 1, takeover: false };
    const DUPLICATE: KeyState = KeyState::Duplicate(Seen::new(Duration::ZERO));

    fn terms() -> CallTerms {
        CallTerms::on_claim([0; 16].into(), Duration::ZERO)
    }

    #[test]
    fn response_is_returned_only_if_it_is_fetched() {
        let response = StoredResponse::new(Default::default(), Default::default(), "a".into());
        let stored = Arc::new(StoredData::new(None, Some(Arc::new(response))));
        let state = KeyState::Duplicate(Seen::new(Duration::ZERO).with_stored(stored));
        for (fetch, expected) in
            [(Fetch::Nothing, false), (Fetch::Digest, false), (Fetch::DigestAndResponse, true)]
        {
            let (events, flat) = flatten(&Keys::one(key("a")));
            let states = [state.clone()];
            let resolution = resolve(events, &flat, &states, &terms().with_fetch(fetch));
            assert_eq!(resolution.response.is_some(), expected, "{fetch:?}");
        }
    }

    #[test]
    fn complete_identity_makes_an_event_a_duplicate_and_running_identity_makes_it_in_flight() {
        let keys =
            Keys::new(vec![with_second("a", "b"), with_second("c", "d"), with_second("e", "f")])
                .unwrap();
        let (events, flat) = flatten(&keys);
        assert_eq!(*flat, ["a", "b", "c", "d", "e", "f"].map(key));
        let states = [FIRST, DUPLICATE, KeyState::InFlight, FIRST, FIRST, FIRST];
        let resolution = resolve(events, &flat, &states, &terms());
        assert_eq!(*resolution.new, [with_second("e", "f")]);
        assert!(resolution.in_flight && resolution.duplicate.is_some());
        assert_eq!(resolution.release, ["a", "d"].map(key));
    }

    #[test]
    fn claimed_identities_of_a_duplicate_are_released() {
        let keys = Keys::new(vec![with_second("a", "b"), with_second("c", "d")]).unwrap();
        let (events, flat) = flatten(&keys);
        let resolution = resolve(events, &flat, &[FIRST, DUPLICATE, DUPLICATE, FIRST], &terms());
        assert_eq!(resolution.release, ["a", "d"].map(key));
        let (events, flat) = flatten(&keys);
        let stored = Arc::new(StoredData::new(Some([1; 32]), None));
        let other = KeyState::Duplicate(Seen::new(Duration::ZERO).with_stored(stored));
        let terms = terms().with_payloads([(key("c"), [2; 32])]);
        let resolution = resolve(events, &flat, &[FIRST, DUPLICATE, other, FIRST], &terms);
        assert!(resolution.mismatch);
        assert_eq!(resolution.release, ["a", "d"].map(key));
    }

    #[test]
    fn event_that_shares_an_identity_with_an_earlier_event_is_left_out() {
        let keys =
            Keys::new(vec![with_second("a", "x"), with_second("b", "x"), Event::new(key("a"))])
                .unwrap();
        let (events, flat) = flatten(&keys);
        assert_eq!(*events, [with_second("a", "x")]);
        assert_eq!(*flat, ["a", "x"].map(key));
    }

    #[test]
    fn missing_reply_makes_the_event_in_flight() {
        let (events, flat) = flatten(&Keys::one(key("a")));
        let resolution = resolve(events, &flat, &[], &terms());
        assert!(resolution.new.is_empty() && resolution.in_flight);
    }
}
