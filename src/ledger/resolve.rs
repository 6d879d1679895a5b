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
use std::time::Duration;

use super::contract::{Begin, BeginContext, DuplicateInfo};
use crate::adapter::contract::{CallTerms, ClaimReply, Fetch, Permanence, Seen, StoredResponse};
use crate::delivery::{Delivery, Inner, OfLedger};
use crate::error::{Error, ErrorKind};
use crate::key::{DedupKey, Event, Keys, List};
use crate::observe;

/// After this time, no second identity that a claim on arrival has completed is released: the claims of the identities
/// and a release take less than 2 min before and after the bound of the release.
const MAY_BE_RELEASED: Duration = Duration::from_secs(720);

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
    /// The error of a claim, if one has failed. Boxed, because most claims have none.
    error: Option<Box<Error>>,
}

impl States {
    /// The replies are the store's for the keys that were `asked`, in their order. The states of the other keys are
    /// `known` to this process.
    pub(super) fn new(
        asked: &[DedupKey],
        replies: List<Result<ClaimReply, Error>>,
        known: impl Iterator<Item = (DedupKey, KeyState)>,
    ) -> Self {
        let mut error: Option<Box<Error>> = None;
        let mut state = |reply| match reply {
            Ok(claimed) => KeyState::from(claimed),
            Err(failed) => {
                let unknown = Error::is_unknown(&failed);
                // Unreadable data may belong to a duplicate, so this error decides whether a handler runs.
                if error.is_none() || failed.kind() == ErrorKind::Corrupt {
                    error = Some(Box::new(failed));
                }
                KeyState::Failed { unknown }
            }
        };
        let mut states = List::new();
        for (key, reply) in asked.iter().zip(replies) {
            states.push((key.clone(), state(reply)));
        }
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
    pub(super) fn later_keys(&self, events: &[Event], terms: &CallTerms) -> List<DedupKey> {
        let is_later = |event: &&Event| match event.second_identity().map(|second| self.of(second))
        {
            Some(Some(KeyState::First { .. })) => true,
            Some(Some(KeyState::Duplicate(seen))) => is_complete_for(event.key(), seen, terms),
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
fn fails_open<'s>(
    first: &'s States,
    later: &'s States,
    context: &BeginContext,
) -> Option<&'s Error> {
    let are_claimed = first.states.iter().all(|(_, state)| matches!(state, KeyState::First { .. }));
    let last = if later.states.is_empty() { first } else { later };
    let have_failed = last.states.iter().all(|(_, state)| matches!(state, KeyState::Failed { .. }));
    let is_last_alone = later.states.is_empty() || are_claimed;
    last.error.as_deref().filter(|error| is_last_alone && have_failed && context.fails_open(error))
}

/// Returns `true` if a second identity is complete for this very key. On arrival, the claim that has completed it can
/// still be released for some time.
fn is_complete_for(key: &DedupKey, second: &Seen, terms: &CallTerms) -> bool {
    let is_final = terms.permanence() != Permanence::OnClaim || second.age >= MAY_BE_RELEASED;
    is_final && named_key(second) == Some(key.sha256())
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
    response: Option<Arc<StoredResponse>>,
    /// Keys to release: rule 5.
    pub(super) release: List<DedupKey>,
    /// The error of a claim, if one has failed.
    error: Option<Box<Error>>,
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
    pub(super) fn unprotected(new: List<Event>, error: &Error) -> Self {
        if let Some(event) = new.first() {
            observe::unprotected(event.key(), error);
        }
        let held = identities(&new);
        Self { new, held, attempt: 1, is_unprotected: true, ..Self::default() }
    }

    /// Returns the verdict on a delivery without a new event.
    ///
    /// # Errors
    ///
    /// The error of a claim.
    pub(super) fn without_new<C>(self) -> Result<Begin<C>, Error> {
        if let Some(error) = self.error {
            return Err(*error);
        }
        Ok(match self.duplicate {
            Some(seen) if !self.in_flight => {
                let info = DuplicateInfo { age: seen.age, response: self.response };
                if self.mismatch { Begin::Mismatch(info) } else { Begin::Duplicate(info) }
            }
            _ => Begin::InFlight,
        })
    }

    /// Returns the verdict on a delivery with new events, with what its ledger holds for it, and with its claim.
    pub(super) fn run<T: OfLedger, C>(
        &mut self,
        of_ledger: T,
        claim: impl FnOnce(Arc<Inner<T>>) -> C,
    ) -> Begin<C> {
        let Self { attempt, takeover, in_flight, mismatch, is_unprotected, .. } = *self;
        let new = std::mem::take(&mut self.new);
        let inner = Arc::new(Inner::new(new, (attempt, takeover), is_unprotected, None, of_ledger));
        let delivery = Delivery::from(Arc::clone(&inner));
        let claim = claim(inner);
        // A subscriber may panic: the claim exists before.
        if let (true, Some(event)) = (takeover, delivery.events().first()) {
            observe::takeover(event.key(), attempt);
        }
        Begin::First { claim, delivery, in_flight, mismatch }
    }

    /// Notes that a key of `event` is complete.
    fn add_duplicate(&mut self, event: &Event, key: &DedupKey, seen: &Seen, terms: &CallTerms) {
        let is_key = key == event.key();
        if is_key && is_mismatch(key, seen, terms) {
            self.mismatch = true;
            observe::mismatch(key);
        }
        let is_others = |named: [u8; 32]| named != event.key().sha256();
        if !is_key && event.alias().is_none() && named_key(seen).is_some_and(is_others) {
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
    context: &BeginContext,
) -> Resolution {
    if let Some(error) = fails_open(&first, &later, context) {
        return Resolution::unprotected(events, error);
    }
    let mut resolution = resolve(&events, &first, &later, terms);
    resolution.error = first.error.or(later.error);
    resolution
}

/// Resolves the states after the first and the later step for these events.
pub(super) fn resolve(
    events: &[Event],
    first: &States,
    later: &States,
    terms: &CallTerms,
) -> Resolution {
    let mut resolution = Resolution::default();
    let is_single = events.len() == 1;
    let mut new = Vec::new();
    for event in events {
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
                !is_complete_for(event.key(), seen, terms)
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

    const FIRST: KeyState = KeyState::First { attempt: 1, takeover: false };
    const DUPLICATE: KeyState = KeyState::Duplicate(Seen::new(Duration::ZERO));

    fn complete(digest: Option<[u8; 32]>, response: Option<Arc<StoredResponse>>) -> KeyState {
        let stored = Arc::new(StoredData::new(digest, response));
        KeyState::Duplicate(Seen::new(Duration::ZERO).with_stored(stored))
    }

    /// A second identity that is complete for this key.
    fn complete_for(id: &str) -> KeyState {
        complete(Some(key(id).sha256()), None)
    }

    fn terms() -> CallTerms {
        CallTerms::on_completion([0; 16].into(), Duration::ZERO, Duration::ZERO)
    }

    fn states(states: &[(&str, KeyState)]) -> States {
        let states = states.iter().map(|(id, state)| (key(id), state.clone())).collect();
        States { states, error: None }
    }

    #[test]
    fn second_identity_is_claimed_first_and_its_key_after_it() {
        let (events, first) = flat(&["a+s", "b+t", "c+u", "d+v", "e+w", "f"]);
        assert_eq!(*first, ["f", "s", "t", "u", "v", "w"].map(key));
        let first = states(&[
            ("f", FIRST),
            ("s", FIRST),
            ("t", DUPLICATE),
            ("u", KeyState::InFlight),
            ("v", complete_for("d")),
            ("w", complete_for("a")),
        ]);
        assert_eq!(*first.later_keys(&events, &terms()), ["a", "d"].map(key));
        let later = states(&[("a", FIRST), ("d", FIRST)]);
        let resolution = resolve(&events, &first, &later, &terms());
        assert_eq!(*resolution.new, ["a+s", "d+v", "f"].map(event));
        assert_eq!(*resolution.held, ["a", "d", "f", "s"].map(key));
        assert!(resolution.in_flight && resolution.duplicate.is_some());
        assert!(resolution.release.is_empty());
    }

    /// An event that does not run: whether it is in flight or a duplicate, and what is released.
    #[test]
    fn event_without_both_identities_does_not_run_and_holds_nothing() {
        let all_at_once = |second| states(&[("a", FIRST), ("s", second)]);
        for (first, later, in_flight, release) in [
            (states(&[("s", FIRST)]), states(&[("a", DUPLICATE)]), false, "s"),
            (states(&[("s", FIRST)]), states(&[("a", KeyState::InFlight)]), true, "s"),
            // The reply is missing.
            (states(&[("s", FIRST)]), States::default(), true, "s"),
            (States::default(), States::default(), true, ""),
            // The row of the second identity belongs to another claim.
            (states(&[("s", complete_for("a"))]), states(&[("a", DUPLICATE)]), false, ""),
            (states(&[("s", complete_for("a"))]), states(&[("a", KeyState::InFlight)]), true, ""),
            // The transactional ledger claims both at once.
            (all_at_once(DUPLICATE), all_at_once(DUPLICATE), false, "a"),
            (all_at_once(KeyState::InFlight), all_at_once(KeyState::InFlight), true, "a"),
        ] {
            let resolution = resolve(&flat(&["a+s"]).0, &first, &later, &terms());
            assert!(resolution.new.is_empty() && resolution.held.is_empty());
            let found = (resolution.in_flight, resolution.duplicate.is_none());
            assert_eq!(found, (in_flight, in_flight), "{first:?} {later:?}");
            let released: Vec<_> = resolution.release.iter().map(DedupKey::id).collect();
            assert_eq!(released.join(" "), release);
        }
    }

    #[test]
    fn key_runs_beside_its_complete_second_identity_and_leaves_that_alone() {
        let (first, later) = (states(&[("s", complete_for("a"))]), states(&[("a", FIRST)]));
        let resolution = resolve(&flat(&["a+s"]).0, &first, &later, &terms());
        assert_eq!((resolution.new.len(), &*resolution.held), (1, &[key("a")][..]));
        assert!(resolution.release.is_empty());
    }

    #[test]
    fn payload_and_response_are_those_of_the_key() {
        let response = StoredResponse::new(Default::default(), Default::default(), "a".into());
        let first = states(&[("a", complete(Some([1; 32]), Some(Arc::new(response))))]);
        let terms = terms().with_payloads([(key("a"), [2; 32])]);
        for fetch in [Fetch::Nothing, Fetch::Digest, Fetch::DigestAndResponse] {
            let terms = terms.clone().with_fetch(fetch);
            let resolution = resolve(&flat(&["a"]).0, &first, &States::default(), &terms);
            assert!(resolution.mismatch);
            assert_eq!(resolution.response.is_some(), fetch == Fetch::DigestAndResponse);
        }
    }

    #[test]
    fn event_that_shares_an_identity_with_an_earlier_event_is_left_out() {
        let (events, first) = flat(&["a+x", "b+x", "a"]);
        assert_eq!(*events, ["a+x"].map(event));
        assert_eq!(*first, ["x"].map(key));
        assert_eq!(*identities(&events), ["a", "x"].map(key));
    }
}
