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

use crate::adapter::contract::{CallTerms, ClaimReply, Fetch, Seen};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::{DedupKey, Event, Keys, List};
use crate::observe::{self, Meters};

/// The reply of the store for one key, or what this process knows of the key. After an error of unknown outcome, the
/// key may be held.
pub(super) type Reply = Result<ClaimReply, StoreError>;

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

/// Returns all identities of these events, sorted.
pub(super) fn identities(events: &[Event]) -> List<DedupKey> {
    let mut keys: List<DedupKey> = events.iter().flat_map(Event::identities).cloned().collect();
    keys.sort_unstable();
    keys
}

/// Returns the identity that is claimed first.
pub(super) fn first_identity(event: &Event) -> &DedupKey {
    event.second_identity().unwrap_or(event.key())
}

/// An event with the replies that decide about it.
#[derive(Debug)]
pub(super) struct Answered {
    pub(super) event: Event,
    /// `None` if the key is not claimed.
    pub(super) key: Option<Reply>,
    /// For the second identity. `None` if there is none, or if it leaves the decision to the key: rule 2.
    second: Option<Reply>,
}

impl Answered {
    /// Takes the reply for the identity that is claimed first.
    pub(super) fn first(event: Event, reply: Reply) -> Self {
        let (key, second) = match &reply {
            _ if event.second_identity().is_none() => (Some(reply), None),
            Ok(ClaimReply::Duplicate(seen)) if named_key(seen) == Some(event.key().sha256()) => {
                (None, None)
            }
            _ => (None, Some(reply)),
        };
        Self { event, key, second }
    }

    /// Returns `true` if the key is claimed after the second identity: rule 2.
    pub(super) fn leads_to_key(&self) -> bool {
        let second = self.second.as_ref();
        self.key.is_none() && second.is_none_or(|reply| reply.as_ref().is_ok_and(is_first))
    }

    fn replies(&self) -> impl Iterator<Item = (&DedupKey, &Reply)> {
        let identities = self.event.identities().zip([&self.key, &self.second]);
        identities.filter_map(|(identity, reply)| Some((identity, reply.as_ref()?)))
    }

    /// Returns the identities that were claimed, or whose claims have an unknown outcome.
    pub(super) fn may_be_held(&self) -> impl Iterator<Item = &DedupKey> {
        self.replies().filter(|(_, reply)| may_be_held(reply)).map(|(identity, _)| identity)
    }
}

/// Returns the error of a claim. Unreadable data may belong to a duplicate, so such an error comes first: it
/// decides whether a handler runs.
pub(super) fn error(answered: &[Answered]) -> Option<StoreError> {
    let replies = answered.iter().flat_map(Answered::replies);
    let errors = replies.filter_map(|(_, reply)| reply.as_ref().err());
    errors.min_by_key(|error| error.kind() != StoreErrorKind::Corrupt).cloned()
}

pub(super) fn is_first(reply: &ClaimReply) -> bool {
    matches!(reply, ClaimReply::First { .. })
}

fn may_be_held(reply: &Reply) -> bool {
    reply.as_ref().map_or_else(StoreError::is_unknown, is_first)
}

/// Returns the SHA-256 of the key for which a second identity is complete.
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
    pub(super) attempt: u32,
    pub(super) takeover: bool,
    pub(super) in_flight: bool,
    pub(super) duplicate: Option<Seen>,
    pub(super) mismatch: bool,
    /// Keys to release: rule 5.
    pub(super) release: List<DedupKey>,
    /// The events run although the store has not replied.
    pub(super) is_unprotected: bool,
}

impl Resolution {
    /// Lets the events run although the store has not replied.
    pub(super) fn unprotected(new: List<Event>, error: &StoreError, meters: &Meters) -> Self {
        if let Some(event) = new.first() {
            observe::records::unprotected(meters, event.key(), error);
        }
        let held = identities(&new);
        Self { new, held, attempt: 1, is_unprotected: true, ..Self::default() }
    }

    /// Notes the replies for an event.
    fn add(&mut self, answered: &Answered, terms: &CallTerms, meters: &Meters) {
        use ClaimReply::{Duplicate, First};
        let event = &answered.event;
        match (&answered.key, &answered.second) {
            (Some(Ok(First { .. })), None | Some(Ok(First { .. }))) => {
                self.new.push(event.clone());
                for (identity, reply) in answered.replies() {
                    let Ok(First { attempt, takeover }) = reply else { continue };
                    self.held.push(identity.clone());
                    self.attempt = self.attempt.max(*attempt);
                    self.takeover |= takeover;
                }
                return;
            }
            (Some(Ok(Duplicate(seen))), _) => {
                self.add_duplicate(event, event.key(), seen, (terms, meters));
            }
            (_, Some(Ok(Duplicate(seen)))) => {
                self.add_duplicate(event, first_identity(event), seen, (terms, meters));
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
    fn add_duplicate(
        &mut self,
        event: &Event,
        by: &DedupKey,
        seen: &Seen,
        (terms, meters): (&CallTerms, &Meters),
    ) {
        if by == event.key() {
            if is_mismatch(by, seen, terms) {
                self.mismatch = true;
                observe::records::mismatch(meters, by);
            }
        } else if named_key(seen).is_some_and(|named| named != event.key().sha256()) {
            let report = if event.alias().is_some() {
                observe::records::same_event
            } else {
                observe::records::same_body
            };
            report(meters, event.key(), by);
        }
        // A response answers a delivery of one event.
        let replays = terms.fetch() == Fetch::DigestAndResponse;
        let seen = || if replays { seen.clone() } else { Seen::new(seen.age) };
        self.duplicate.get_or_insert_with(seen);
    }
}

/// Resolves the replies.
pub(super) fn resolve(answered: &[Answered], terms: &CallTerms, meters: &Meters) -> Resolution {
    let mut resolution = Resolution::default();
    for event in answered {
        resolution.add(event, terms, meters);
    }
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
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::adapter::contract::{StoredData, StoredResponse};
    use crate::key::LogIds;

    fn key(id: &str) -> DedupKey {
        DedupKey::new("n", id).unwrap()
    }

    /// An event with the identities `id` and `second`, or with the identity `id`.
    fn event(identities: &str) -> Event {
        match identities.split_once('+') {
            Some((id, second)) => Event::new(key(id)).with_alias(key(second)),
            None => Event::new(key(identities)),
        }
    }

    fn events(events: &[&str]) -> List<Event> {
        distinct(&Keys::new(events.iter().map(|it| event(it)).collect()).unwrap())
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

    fn meters() -> Meters {
        Meters::new(&"n".into(), false, LogIds::Plain)
    }

    fn terms() -> CallTerms {
        CallTerms::on_completion([0; 16].into(), Duration::ZERO, Duration::ZERO)
    }

    #[test]
    fn unreadable_data_of_any_event_is_the_error_of_all() {
        let kinds = [StoreErrorKind::Unavailable, StoreErrorKind::Corrupt, StoreErrorKind::Timeout];
        let answered: Vec<_> = (events(&["a", "b", "c"]).into_iter().zip(kinds))
            .map(|(it, kind)| Answered::first(it, Err(StoreError::new(kind, "claiming keys"))))
            .collect();
        assert_eq!(error(&answered).unwrap().kind(), StoreErrorKind::Corrupt);
    }

    #[test]
    fn second_identity_is_claimed_first_and_its_key_after_it() {
        let events = events(&["a+s", "b+t", "c+u", "d+v", "e+w", "f"]);
        let first = [
            ("s", FIRST),
            ("t", DUPLICATE),
            ("u", ClaimReply::InFlight),
            ("v", complete_for("d")),
            ("w", complete_for("a")),
            ("f", FIRST),
        ];
        let are_asked: Vec<_> = events.iter().map(|event| first_identity(event).id()).collect();
        assert_eq!(are_asked, first.each_ref().map(|(id, _)| *id));
        let first = events.into_iter().zip(first);
        let first = first.map(|(event, (_, reply))| Answered::first(event, Ok(reply)));
        let mut answered: Vec<_> = first.collect();
        let are_later = answered.iter().map(Answered::leads_to_key).collect::<Vec<_>>();
        assert_eq!(are_later, [true, false, false, true, false, false]);
        for at in [0, 3] {
            answered[at].key = Some(Ok(FIRST));
        }
        let resolution = resolve(&answered, &terms(), &meters());
        assert_eq!(*resolution.new, ["a+s", "d+v", "f"].map(event));
        assert_eq!(*resolution.held, ["a", "d", "f", "s"].map(key));
        assert!(resolution.in_flight && resolution.duplicate.is_some());
        assert!(resolution.release.is_empty());
    }

    #[test]
    fn event_that_shares_an_identity_with_an_earlier_one_is_claimed_once() {
        let distinct = events(&["a+s", "b", "a+t", "c+s", "b"]);
        assert_eq!(*distinct, ["a+s", "b"].map(event));
        assert_eq!(*identities(&distinct), ["a", "b", "s"].map(key));
    }

    /// An event that does not run: whether it is in flight or a duplicate, and what is released.
    #[test]
    fn event_without_both_identities_does_not_run_and_holds_nothing() {
        use ClaimReply::InFlight;
        for (second, key, is_in_flight, release) in [
            (FIRST, Some(DUPLICATE), false, "s"),
            (FIRST, Some(InFlight), true, "s"),
            // The key was not claimed.
            (FIRST, None, true, "s"),
            (InFlight, None, true, ""),
            // The row of the second identity belongs to another claim.
            (complete_for("a"), Some(DUPLICATE), false, ""),
            (complete_for("a"), Some(InFlight), true, ""),
            // Both were claimed at once.
            (DUPLICATE, Some(FIRST), false, "a"),
            (InFlight, Some(FIRST), true, "a"),
        ] {
            let mut answered = Answered::first(event("a+s"), Ok(second));
            answered.key = key.map(Ok);
            let answered = [answered];
            let resolution = resolve(&answered, &terms(), &meters());
            assert!(resolution.new.is_empty() && resolution.held.is_empty());
            let found = (resolution.in_flight, resolution.duplicate.is_none());
            assert_eq!(found, (is_in_flight, is_in_flight), "{answered:?}");
            let released: Vec<_> = resolution.release.iter().map(DedupKey::id).collect();
            assert_eq!(released.join(" "), release);
        }
    }

    #[test]
    fn payload_and_response_are_those_of_the_key() {
        let response = StoredResponse::new(Default::default(), Default::default(), "a".into());
        let reply = complete(Some([1; 32]), Some(Arc::new(response)));
        let answered = [Answered::first(event("a"), Ok(reply))];
        let terms = terms().with_payloads([(key("a"), [2; 32])]);
        for fetch in [Fetch::Nothing, Fetch::Digest, Fetch::DigestAndResponse] {
            let terms = terms.clone().with_fetch(fetch);
            let resolution = resolve(&answered, &terms, &meters());
            assert!(resolution.mismatch);
            let stored = resolution.duplicate.unwrap().stored;
            assert_eq!(stored.is_some(), fetch == Fetch::DigestAndResponse);
        }
    }
}
