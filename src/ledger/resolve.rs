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
//!    attempt that failed had no effect that could differ. A mismatch is a duplicate, and is reported.
//! 7. A response is replayed to a delivery of one event only.
//!
//! The transactional ledger claims all identities in one call, inside one transaction: nobody sees a claim
//! that does not commit.

use std::collections::HashSet;
use std::sync::Arc;

use super::contract::{Begin, BeginContext, DuplicateInfo};
use crate::adapter::contract::{CallTerms, ClaimReply, Fetch, Seen, StoredResponse};
use crate::delivery::{Inner, Protection};
use crate::error::{Error, ErrorKind};
use crate::key::{DedupKey, Event, Keys, List};
use crate::observe;

/// The state of one key, as the store and this process know it.
#[derive(Debug, Clone)]
pub(super) enum KeyState {
    First {
        attempt: u32,
        takeover: bool,
    },
    InFlight,
    Duplicate(Seen),
    /// The claim has failed. After an unknown outcome, the key may be held.
    Failed {
        unknown: bool,
    },
}

impl KeyState {
    fn may_be_held(&self) -> bool {
        matches!(self, Self::First { .. } | Self::Failed { unknown: true })
    }
}

impl From<ClaimReply> for KeyState {
    fn from(claimed: ClaimReply) -> Self {
        match claimed {
            ClaimReply::First { attempt, takeover } => Self::First { attempt, takeover },
            ClaimReply::InFlight => Self::InFlight,
            ClaimReply::Duplicate(seen) => Self::Duplicate(seen),
        }
    }
}

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

/// Returns `true` if the claims of these events have a later step.
pub(super) fn has_second_identity(events: &[Event]) -> bool {
    events.iter().any(|event| event.second_identity().is_some())
}

/// Returns all identities of these events, sorted.
pub(super) fn identities<'e>(events: impl IntoIterator<Item = &'e Event>) -> List<DedupKey> {
    let mut keys: List<DedupKey> =
        events.into_iter().flat_map(Event::identities).cloned().collect();
    keys.sort_unstable();
    keys
}

/// The states of the keys of one step.
#[derive(Debug, Default)]
pub(super) struct States {
    /// Sorted by key.
    states: List<(DedupKey, KeyState)>,
    /// The error of a claim, if one has failed.
    error: Option<Error>,
}

impl States {
    /// The replies are the store's for the keys that were `asked`, in their order. The states of the other keys are
    /// `known` to this process.
    pub(super) fn new(
        asked: List<DedupKey>,
        replies: List<Result<ClaimReply, Error>>,
        known: impl Iterator<Item = (DedupKey, KeyState)>,
    ) -> Self {
        let mut error: Option<Error> = None;
        let mut state = |reply| match reply {
            Ok(claimed) => KeyState::from(claimed),
            Err(failed) => {
                let unknown = Error::is_unknown(&failed);
                // Unreadable data may belong to a duplicate, so this error decides whether a handler runs.
                if error.is_none() || failed.kind() == ErrorKind::Corrupt {
                    error = Some(failed);
                }
                KeyState::Failed { unknown }
            }
        };
        let replied = asked.into_iter().zip(replies).map(|(key, reply)| (key, state(reply)));
        let mut states: List<_> = replied.collect();
        states.extend(known);
        states.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        Self { states, error }
    }

    fn of(&self, key: &DedupKey) -> Option<&KeyState> {
        let at = self.states.binary_search_by(|(other, _)| other.cmp(key)).ok()?;
        Some(&self.states[at].1)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut (DedupKey, KeyState)> {
        self.states.iter_mut()
    }

    /// Returns the keys that were claimed, or whose claim has an unknown outcome.
    pub(super) fn may_be_held(&self) -> impl Iterator<Item = &DedupKey> {
        self.states.iter().filter_map(|(key, state)| state.may_be_held().then_some(key))
    }

    /// Returns the keys to claim after this first step, sorted: rule 2.
    pub(super) fn later_keys(&self, events: &[Event]) -> List<DedupKey> {
        let is_later = |event: &&Event| match event.second_identity().map(|second| self.of(second))
        {
            Some(Some(KeyState::First { .. })) => true,
            Some(Some(KeyState::Duplicate(seen))) => is_complete_for(event.key(), seen),
            _ => false,
        };
        let mut later: List<DedupKey> =
            events.iter().filter(is_later).map(|event| event.key().clone()).collect();
        later.sort_unstable();
        later
    }
}

/// Returns the error after which the handler runs unprotected: no claim of the last step has a reply, and the
/// step before has claimed all.
pub(super) fn fails_open(
    first: &mut States,
    later: &mut States,
    context: &BeginContext,
) -> Option<Error> {
    let are_claimed = first.states.iter().all(|(_, state)| matches!(state, KeyState::First { .. }));
    let last = if later.states.is_empty() {
        first
    } else if are_claimed {
        later
    } else {
        return None;
    };
    let have_failed = last.states.iter().all(|(_, state)| matches!(state, KeyState::Failed { .. }));
    last.error.take_if(|error| have_failed && context.fails_open(error))
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
    pub(super) attempt: u32,
    pub(super) takeover: bool,
    pub(super) in_flight: bool,
    duplicate: Option<Seen>,
    pub(super) mismatch: bool,
    response: Option<Arc<StoredResponse>>,
    /// Keys to release: rule 5.
    pub(super) release: List<DedupKey>,
    /// The error of a claim, if one has failed.
    error: Option<Error>,
}

impl Resolution {
    /// Returns the verdict on a delivery without a new event.
    ///
    /// # Errors
    ///
    /// The error of a claim.
    pub(super) fn without_new<C>(self) -> Result<Begin<C>, Error> {
        if let Some(error) = self.error {
            return Err(error);
        }
        Ok(match self.duplicate {
            Some(seen) if !self.in_flight => {
                let info = DuplicateInfo { age: seen.age, response: self.response };
                if self.mismatch { Begin::Mismatch(info) } else { Begin::Duplicate(info) }
            }
            _ => Begin::InFlight,
        })
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

    /// Notes that a key of `event` is complete.
    fn add_duplicate(&mut self, event: &Event, key: &DedupKey, seen: &Seen, terms: &CallTerms) {
        let is_key = key == event.key();
        if is_key && is_mismatch(key, seen, terms) {
            self.mismatch = true;
            observe::mismatch(key);
        }
        if !is_key && event.alias().is_none() && named_key(seen).is_some() {
            observe::same_body(event.key());
        }
        self.duplicate.get_or_insert_with(|| seen.clone());
    }
}

/// Resolves the claims of the first and the later step for these events.
pub(super) fn resolve_claims(
    events: List<Event>,
    first: States,
    later: States,
    terms: &CallTerms,
) -> Resolution {
    let resolution = resolve(events, &first, &later, terms);
    Resolution { error: first.error.or(later.error), ..resolution }
}

/// Resolves the states after the first and the later step for these events.
pub(super) fn resolve(
    events: List<Event>,
    first: &States,
    later: &States,
    terms: &CallTerms,
) -> Resolution {
    let mut resolution = Resolution::default();
    // Most deliveries carry one event with one identity.
    if let ([(key, KeyState::First { attempt, takeover })], [only]) = (&*first.states, &*events)
        && only.second_identity().is_none()
    {
        let (held, attempt, takeover) = (List::from([key.clone()]), *attempt, *takeover);
        return Resolution { new: events, held, attempt, takeover, ..resolution };
    }
    let is_single = events.len() == 1;
    let mut new = Vec::new();
    for event in &events {
        let of_key = if event.second_identity().is_some() { later } else { first };
        let of_key = (event.key(), of_key.of(event.key()));
        let of_second = event.second_identity().map(|second| (second, first.of(second)));
        let identities = [Some(of_key), of_second].into_iter().flatten();
        let claimed = identities.clone().filter_map(|(key, state)| match state? {
            KeyState::First { attempt, takeover } => Some((key.clone(), *attempt, *takeover)),
            _ => None,
        });
        let mut deciding = identities.clone().filter(|(key, state)| match state {
            // Rule 2.
            Some(KeyState::Duplicate(seen)) if *key != event.key() => {
                !is_complete_for(event.key(), seen)
            }
            _ => true,
        });
        let duplicate = deciding.clone().find_map(|(key, state)| match state? {
            KeyState::Duplicate(seen) => Some((key, seen)),
            _ => None,
        });
        if let Some((key, seen)) = duplicate {
            resolution.add_duplicate(event, key, seen, terms);
            if is_single && terms.fetch() == Fetch::DigestAndResponse {
                let stored = seen.stored.as_ref();
                resolution.response = stored.and_then(|stored| stored.response.clone());
            }
        } else if deciding.all(|(_, state)| matches!(state, Some(KeyState::First { .. }))) {
            for (key, attempt, takeover) in claimed {
                resolution.held.push(key);
                resolution.attempt = resolution.attempt.max(attempt);
                resolution.takeover |= takeover;
            }
            new.push(event.clone());
            continue;
        } else {
            // A missing reply claims nothing.
            resolution.in_flight = true;
        }
        let may_be_held = identities.filter(|(_, state)| state.is_some_and(KeyState::may_be_held));
        resolution.release.extend(may_be_held.map(|(key, _)| key.clone()));
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
    use crate::adapter::contract::StoredData;

    fn key(id: &str) -> DedupKey {
        DedupKey::new("n", id).unwrap()
    }

    fn with_second(id: &str, second: &str) -> Event {
        Event::new(key(id)).with_second_identity(key(second))
    }

    const FIRST: KeyState = KeyState::First { attempt: 1, takeover: false };
    const DUPLICATE: KeyState = KeyState::Duplicate(Seen::new(Duration::ZERO));

    /// A key that is complete with this digest.
    fn complete_with(digest: [u8; 32]) -> KeyState {
        let stored = Arc::new(StoredData::new(Some(digest), None));
        KeyState::Duplicate(Seen::new(Duration::ZERO).with_stored(stored))
    }

    fn terms() -> CallTerms {
        CallTerms::on_claim([0; 16].into(), Duration::ZERO)
    }

    /// The states of these keys.
    fn states<const N: usize>(states: [(&str, KeyState); N]) -> States {
        let states = states.into_iter().map(|(id, state)| (key(id), state)).collect();
        States { states, error: None }
    }

    #[test]
    fn response_is_returned_only_if_it_is_fetched() {
        let response = StoredResponse::new(Default::default(), Default::default(), "a".into());
        let stored = Arc::new(StoredData::new(None, Some(Arc::new(response))));
        let state = KeyState::Duplicate(Seen::new(Duration::ZERO).with_stored(stored));
        for (fetch, expected) in
            [(Fetch::Nothing, false), (Fetch::Digest, false), (Fetch::DigestAndResponse, true)]
        {
            let (events, _) = flatten(&Keys::one(key("a")));
            let first = states([("a", state.clone())]);
            let terms = terms().with_fetch(fetch);
            let resolution = resolve(events, &first, &States::default(), &terms);
            assert_eq!(resolution.response.is_some(), expected, "{fetch:?}");
        }
    }

    #[test]
    fn second_identity_is_claimed_first_and_the_key_only_after_it() {
        let events = [("a", "s"), ("b", "t"), ("c", "u"), ("d", "v"), ("e", "w")];
        let mut events: Vec<_> = events.map(|(id, second)| with_second(id, second)).into();
        events.push(Event::new(key("f")));
        let (events, first) = flatten(&Keys::new(events).unwrap());
        assert_eq!(*first, ["f", "s", "t", "u", "v", "w"].map(key));
        let first = states([
            ("f", FIRST),
            ("s", FIRST),
            ("t", DUPLICATE),
            ("u", KeyState::InFlight),
            ("v", complete_with(key("d").sha256())),
            ("w", complete_with(key("a").sha256())),
        ]);
        assert_eq!(*first.later_keys(&events), ["a", "d"].map(key));
        let resolution = resolve(events, &first, &states([("a", FIRST), ("d", FIRST)]), &terms());
        let expected = [with_second("a", "s"), with_second("d", "v"), Event::new(key("f"))];
        assert_eq!(*resolution.new, expected);
        assert_eq!(*resolution.held, ["a", "d", "f", "s"].map(key));
        assert!(resolution.in_flight && resolution.duplicate.is_some());
        assert!(resolution.release.is_empty());
    }

    #[test]
    fn second_identity_is_released_if_the_key_is_not_claimed() {
        let keys = ["a", "b", "c"].map(|id| with_second(id, &id.repeat(2)));
        let (events, _) = flatten(&Keys::new(keys.into()).unwrap());
        let first = || states([("aa", FIRST), ("bb", FIRST), ("cc", FIRST)]);
        // The reply to `c` is missing.
        let later = states([("a", complete_with([1; 32])), ("b", KeyState::InFlight)]);
        let terms = terms().with_payloads([(key("a"), [2; 32])]);
        let resolution = resolve(events, &first(), &later, &terms);
        assert!(resolution.new.is_empty() && resolution.held.is_empty());
        assert!(resolution.in_flight && resolution.mismatch);
        assert_eq!(*resolution.release, ["aa", "bb", "cc"].map(key));
    }

    #[test]
    fn key_decides_about_an_event_whose_second_identity_is_complete_for_it() {
        let (event, second) = (with_second("a", "s"), complete_with(key("a").sha256()));
        let first = || states([("s", second.clone())]);
        for (state, new, in_flight, duplicate) in [
            (FIRST, 1, false, false),
            (DUPLICATE, 0, false, true),
            (KeyState::InFlight, 0, true, false),
        ] {
            let (events, _) = flatten(&Keys::from(event.clone()));
            let resolution = resolve(events, &first(), &states([("a", state)]), &terms());
            let found = (resolution.new.len(), resolution.in_flight);
            assert_eq!((found, resolution.duplicate.is_some()), ((new, in_flight), duplicate));
            // The row of the second identity belongs to another claim.
            assert!(!resolution.held.contains(&key("s")) && resolution.release.is_empty());
        }
    }

    /// The transactional ledger claims both at once.
    #[test]
    fn key_that_is_claimed_beside_its_complete_second_identity_is_released() {
        for second in [DUPLICATE, KeyState::InFlight] {
            let (events, _) = flatten(&Keys::from(with_second("a", "s")));
            let all = || states([("a", FIRST), ("s", second.clone())]);
            let resolution = resolve(events, &all(), &all(), &terms());
            assert!(resolution.new.is_empty());
            assert_eq!(*resolution.release, [key("a")]);
        }
    }

    #[test]
    fn event_that_shares_an_identity_with_an_earlier_event_is_left_out() {
        let keys =
            Keys::new(vec![with_second("a", "x"), with_second("b", "x"), Event::new(key("a"))])
                .unwrap();
        let (events, first) = flatten(&keys);
        assert_eq!(*events, [with_second("a", "x")]);
        assert_eq!(*first, [key("x")]);
        assert_eq!(*identities(&events), ["a", "x"].map(key));
    }

    #[test]
    fn missing_reply_makes_the_event_in_flight() {
        let (events, first) = flatten(&Keys::one(key("a")));
        let first = States::new(first, List::new(), std::iter::empty());
        let resolution = resolve(events, &first, &States::default(), &terms());
        assert!(resolution.new.is_empty() && resolution.in_flight);
    }
}
