//! From the replies of the store to one verdict per delivery.
//!
//! 1. The identities of an event are claimed in two steps: first its second identity, then its key. Whoever
//!    sends a body that was handled under the id of another event meets a duplicate before the store has
//!    touched that id. An event with one identity is claimed in the first step. Each key is claimed by a call
//!    of its own, and the calls of a step are made at the same time.
//! 2. The key is claimed if the second identity was. It is also claimed if the second identity is complete
//!    for this very key: then the key alone decides, and an operator forgets one key to let the event run
//!    again. So the row of a second identity names its key, by a SHA-256.
//! 3. An event is new if its key was claimed. It is a duplicate if its key is complete, or its second identity
//!    is complete for another key, or for one that the store does not name. Otherwise it is in flight, also
//!    if a claim has failed. If no event is new, the error of a claim is the error of the delivery.
//! 4. An event that shares an identity with an earlier event of the same delivery is a duplicate of
//!    that event.
//! 5. The identities that the calls have claimed of a new event are held. Those of every other event are
//!    released, never completed: whoever cannot sign may send a body that was handled under the id of an
//!    event that was not. An identity whose claim has an unknown outcome is released too.
//! 6. Payloads are compared under the key of an event. Only payloads of complete keys are compared: an
//!    attempt that failed had no effect that could differ. A mismatch is a duplicate, and is reported. The payload of
//!    an event with a content identity is that content, because a body that was not handled can use up an id.
//! 7. A response is replayed to a delivery of one event only.

use std::collections::HashSet;
use std::sync::Arc;

use super::contract::Begin;
use crate::adapter::contract::{CallTerms, ClaimReply, Fetch, Seen};
use crate::delivery::{Delivery, Inner, OfLedger};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::{DedupKey, Event, Keys, List};
use crate::observe;

/// The reply of the store for one key, or what this process knows of the key. After an error of unknown outcome, the
/// key may be held.
pub(super) type Reply = Result<ClaimReply, StoreError>;

/// Returns the events without repetitions, and the identities that are claimed first, sorted.
pub(super) fn flatten(keys: &Keys) -> (List<Event>, List<DedupKey>) {
    if let [only] = keys.events() {
        let first = only.second_identity().unwrap_or(only.key());
        return (List::from([only.clone()]), List::from([first.clone()]));
    }
    let mut seen = HashSet::new();
    let mut events = Vec::with_capacity(keys.events().len());
    for event in keys.events() {
        if event.identities().any(|key| seen.contains(key)) {
            continue;
        }
        seen.extend(event.identities());
        events.push(event.clone());
    }
    let first = |event: &Event| event.second_identity().unwrap_or(event.key()).clone();
    let mut first: Vec<DedupKey> = events.iter().map(first).collect();
    first.sort_unstable();
    (events.into(), first.into())
}

/// Returns all identities of these events, sorted.
pub(super) fn identities<'e>(events: impl IntoIterator<Item = &'e Event>) -> List<DedupKey> {
    let mut keys: List<DedupKey> =
        events.into_iter().flat_map(Event::identities).cloned().collect();
    keys.sort_unstable();
    keys
}

/// The replies for the keys of a delivery, sorted by key.
#[derive(Debug, Default)]
pub(super) struct Replies(List<(DedupKey, Reply)>);

impl Replies {
    pub(super) fn add(&mut self, replies: impl IntoIterator<Item = (DedupKey, Reply)>) {
        self.0.extend(replies);
        self.0.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
    }

    fn of(&self, key: &DedupKey) -> Option<&Reply> {
        let at = self.0.binary_search_by(|(other, _)| other.cmp(key)).ok()?;
        Some(&self.0[at].1)
    }

    pub(super) fn are_first(&self) -> bool {
        self.0.iter().all(|(_, reply)| reply.as_ref().is_ok_and(is_first))
    }

    /// Returns the keys that were claimed, or whose claim has an unknown outcome.
    pub(super) fn may_be_held(&self) -> List<DedupKey> {
        let held = self.0.iter().filter(|(_, reply)| may_be_held(reply));
        held.map(|(key, _)| key.clone()).collect()
    }

    /// Returns the keys to claim after the first step, sorted: rule 2.
    pub(super) fn later_keys(&self, events: &[Event]) -> List<DedupKey> {
        let second = |event: &Event| self.of(event.second_identity()?);
        let is_later = |event: &&Event| match second(event) {
            Some(Ok(ClaimReply::First { .. })) => true,
            Some(Ok(ClaimReply::Duplicate(seen))) => is_complete_for(event.key(), seen),
            _ => false,
        };
        let mut later: List<DedupKey> =
            events.iter().filter(is_later).map(|event| event.key().clone()).collect();
        later.sort_unstable();
        later
    }

    /// Returns the error of a claim. Unreadable data may belong to a duplicate, so such an error comes first: it
    /// decides whether a handler runs.
    pub(super) fn into_error(self) -> Option<StoreError> {
        let errors = self.0.into_iter().filter_map(|(_, reply)| reply.err());
        errors.min_by_key(|error| error.kind() != StoreErrorKind::Corrupt)
    }
}

fn is_first(reply: &ClaimReply) -> bool {
    matches!(reply, ClaimReply::First { .. })
}

fn may_be_held(reply: &Reply) -> bool {
    reply.as_ref().map_or_else(StoreError::is_unknown, is_first)
}

/// Returns `true` if a second identity is complete for this very key.
fn is_complete_for(key: &DedupKey, second: &Seen) -> bool {
    named_key(second) == Some(key.sha256())
}

fn named_key(second: &Seen) -> Option<[u8; 32]> {
    second.stored.as_ref()?.payload_sha256
}

/// The verdict on a delivery.
#[derive(Debug, Default)]
pub(super) struct Resolution {
    /// The events that run.
    pub(super) new: List<Event>,
    /// The claimed identities of the events that run, sorted.
    pub(super) held: List<DedupKey>,
    attempt: u32,
    takeover: bool,
    in_flight: bool,
    duplicate: Option<Seen>,
    mismatch: bool,
    /// Keys to release: rule 5.
    pub(super) release: List<DedupKey>,
    /// The events run although the store has not replied.
    pub(super) is_unprotected: bool,
}

impl Resolution {
    /// Runs this event.
    pub(super) fn first(
        new: List<Event>,
        held: List<DedupKey>,
        (attempt, takeover): (u32, bool),
    ) -> Self {
        Self { new, held, attempt, takeover, ..Self::default() }
    }

    /// Lets the events run although the store has not replied.
    pub(super) fn unprotected(new: List<Event>, error: &StoreError) -> Self {
        if let Some(event) = new.first() {
            observe::records::unprotected(event.key(), error);
        }
        let held = identities(&new);
        Self { new, held, attempt: 1, is_unprotected: true, ..Self::default() }
    }

    /// Returns the verdict on the delivery. Its ledger holds something for the events that run, and makes their claim.
    pub(super) fn begin<T: OfLedger, C>(
        &mut self,
        of_ledger: impl FnOnce(List<DedupKey>) -> T,
        claim: impl FnOnce(Arc<Inner<T>>) -> Option<C>,
    ) -> Begin<C> {
        if self.new.is_empty() {
            return self.without_new();
        }
        let Self { attempt, takeover, in_flight, mismatch, is_unprotected, .. } = *self;
        let (new, held) = (std::mem::take(&mut self.new), std::mem::take(&mut self.held));
        let of_ledger = of_ledger(held);
        let inner = Arc::new(Inner::new(new, (attempt, takeover), is_unprotected, None, of_ledger));
        let delivery = Delivery::from(Arc::clone(&inner));
        let claim = claim(inner);
        // A subscriber may panic: the claim exists before.
        if let (true, Some(event)) = (takeover, delivery.events().first()) {
            observe::records::takeover(event.key(), attempt);
        }
        Begin::First { claim, delivery, in_flight, mismatch }
    }

    /// Returns the verdict on a delivery without a new event.
    pub(super) fn without_new<C>(&mut self) -> Begin<C> {
        match self.duplicate.take() {
            Some(seen) if !self.in_flight && self.mismatch => Begin::Mismatch(seen),
            Some(seen) if !self.in_flight => Begin::Duplicate(seen),
            _ => Begin::InFlight,
        }
    }

    /// Notes that a key of `event` is complete.
    fn add_duplicate(&mut self, event: &Event, key: &DedupKey, seen: &Seen, terms: &CallTerms) {
        let is_key = key == event.key();
        if is_key && is_mismatch(key, seen, terms) {
            self.mismatch = true;
            observe::records::mismatch(key);
        }
        let is_others = |named: [u8; 32]| named != event.key().sha256();
        if !is_key && named_key(seen).is_some_and(is_others) {
            let report = if event.alias().is_some() {
                observe::records::same_event
            } else {
                observe::records::same_body
            };
            report(event.key(), key);
        }
        // A response answers a delivery of one event.
        let replays = terms.fetch() == Fetch::DigestAndResponse;
        let seen = || if replays { seen.clone() } else { Seen::new(seen.age) };
        self.duplicate.get_or_insert_with(seen);
    }
}

/// Resolves the replies for these events.
pub(super) fn resolve(events: &[Event], replies: &Replies, terms: &CallTerms) -> Resolution {
    let mut resolution = Resolution::default();
    let mut new = Vec::new();
    for event in events {
        let identities = event.identities().map(|key| (key, replies.of(key)));
        let mut deciding = identities.clone().filter(|(key, reply)| match reply {
            // Rule 2.
            Some(Ok(ClaimReply::Duplicate(seen))) if *key != event.key() => {
                !is_complete_for(event.key(), seen)
            }
            _ => true,
        });
        let duplicate = deciding.clone().find_map(|(key, reply)| match reply? {
            Ok(ClaimReply::Duplicate(seen)) => Some((key, seen)),
            _ => None,
        });
        if let Some((key, seen)) = duplicate {
            resolution.add_duplicate(event, key, seen, terms);
        } else if deciding.all(|(_, reply)| matches!(reply, Some(Ok(ClaimReply::First { .. })))) {
            for (key, reply) in identities {
                let Some(Ok(ClaimReply::First { attempt, takeover })) = reply else { continue };
                resolution.held.push(key.clone());
                resolution.attempt = resolution.attempt.max(*attempt);
                resolution.takeover |= takeover;
            }
            new.push(event.clone());
            continue;
        } else {
            // A missing reply claims nothing.
            resolution.in_flight = true;
        }
        let held = identities.filter(|(_, reply)| reply.is_some_and(may_be_held));
        resolution.release.extend(held.map(|(key, _)| key.clone()));
    }
    resolution.new = new.into();
    resolution.held.sort_unstable();
    resolution.release.sort_unstable();
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
    use crate::adapter::contract::{StoredData, StoredResponse};

    fn key(id: &str) -> DedupKey {
        DedupKey::new("n", id).unwrap()
    }

    /// An event with the identities `id` and `second`, or with the identity `id`.
    fn event(identities: &str) -> Event {
        match identities.split_once('+') {
            Some((id, second)) => Event::new(key(id)).with_second_identity(key(second)),
            None => Event::new(key(identities)),
        }
    }

    fn flat(events: &[&str]) -> (List<Event>, List<DedupKey>) {
        flatten(&Keys::new(events.iter().map(|it| event(it)).collect()).unwrap())
    }

    const FIRST: ClaimReply = ClaimReply::first(1, false);
    const DUPLICATE: ClaimReply = ClaimReply::Duplicate(Seen::new(Duration::ZERO));

    fn complete(digest: Option<[u8; 32]>, response: Option<Arc<StoredResponse>>) -> ClaimReply {
        let stored = Arc::new(StoredData::new(digest, response));
        ClaimReply::Duplicate(Seen::new(Duration::ZERO).with_stored(stored))
    }

    /// A second identity that is complete for this key.
    fn complete_for(id: &str) -> ClaimReply {
        complete(Some(key(id).sha256()), None)
    }

    fn terms() -> CallTerms {
        CallTerms::on_completion([0; 16].into(), Duration::ZERO, Duration::ZERO)
    }

    fn of(replies: &[(&str, ClaimReply)]) -> Replies {
        let mut sorted = Replies::default();
        sorted.add(replies.iter().map(|(id, reply)| (key(id), Ok(reply.clone()))));
        sorted
    }

    #[test]
    fn second_identity_is_claimed_first_and_its_key_after_it() {
        let (events, first) = flat(&["a+s", "b+t", "c+u", "d+v", "e+w", "f"]);
        assert_eq!(*first, ["f", "s", "t", "u", "v", "w"].map(key));
        assert_eq!(*identities(&events[4..]), ["e", "f", "w"].map(key));
        let mut replies = of(&[
            ("f", FIRST),
            ("s", FIRST),
            ("t", DUPLICATE),
            ("u", ClaimReply::InFlight),
            ("v", complete_for("d")),
            ("w", complete_for("a")),
        ]);
        assert_eq!(*replies.later_keys(&events), ["a", "d"].map(key));
        replies.add(of(&[("a", FIRST), ("d", FIRST)]).0);
        let resolution = resolve(&events, &replies, &terms());
        assert_eq!(*resolution.new, ["a+s", "d+v", "f"].map(event));
        assert_eq!(*resolution.held, ["a", "d", "f", "s"].map(key));
        assert!(resolution.in_flight && resolution.duplicate.is_some());
        assert!(resolution.release.is_empty());
    }

    /// An event that does not run: whether it is in flight or a duplicate, and what is released.
    #[test]
    fn event_without_both_identities_does_not_run_and_holds_nothing() {
        for (replies, in_flight, release) in [
            (of(&[("s", FIRST), ("a", DUPLICATE)]), false, "s"),
            (of(&[("s", FIRST), ("a", ClaimReply::InFlight)]), true, "s"),
            // The reply is missing.
            (of(&[("s", FIRST)]), true, "s"),
            (of(&[]), true, ""),
            // The row of the second identity belongs to another claim.
            (of(&[("s", complete_for("a")), ("a", DUPLICATE)]), false, ""),
            (of(&[("s", complete_for("a")), ("a", ClaimReply::InFlight)]), true, ""),
            // Both were claimed at once.
            (of(&[("s", DUPLICATE), ("a", FIRST)]), false, "a"),
            (of(&[("s", ClaimReply::InFlight), ("a", FIRST)]), true, "a"),
        ] {
            let resolution = resolve(&flat(&["a+s"]).0, &replies, &terms());
            assert!(resolution.new.is_empty() && resolution.held.is_empty());
            let found = (resolution.in_flight, resolution.duplicate.is_none());
            assert_eq!(found, (in_flight, in_flight), "{replies:?}");
            let released: Vec<_> = resolution.release.iter().map(DedupKey::id).collect();
            assert_eq!(released.join(" "), release);
        }
    }

    #[test]
    fn payload_and_response_are_those_of_the_key() {
        let response = StoredResponse::new(Default::default(), Default::default(), "a".into());
        let replies = of(&[("a", complete(Some([1; 32]), Some(Arc::new(response))))]);
        let terms = terms().with_payloads([(key("a"), [2; 32])]);
        for fetch in [Fetch::Nothing, Fetch::Digest, Fetch::DigestAndResponse] {
            let terms = terms.clone().with_fetch(fetch);
            let resolution = resolve(&flat(&["a"]).0, &replies, &terms);
            assert!(resolution.mismatch);
            let stored = resolution.duplicate.unwrap().stored;
            assert_eq!(stored.is_some(), fetch == Fetch::DigestAndResponse);
        }
    }
}
