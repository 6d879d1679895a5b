//! From one answer per key to one answer per delivery.
//!
//! 1. An event is a duplicate if any of its identities is complete, else in flight if any is,
//!    else new.
//! 2. All identities of all events are asked for in one call, sorted, so that every store sees
//!    them in one order.
//! 3. An event that shares an identity with an earlier one of the same delivery is a duplicate
//!    of that one.
//! 4. What was granted to an event that does not run is given back, except the key of one that is
//!    a duplicate by its second identity: that event was handled under another key, and is complete
//!    under this one from now on. The other way round nothing was handled under the second identity:
//!    somebody else's event may come under it yet.
//! 5. An event that was handled with another payload is a duplicate, and is told.

use std::collections::HashSet;
use std::sync::Arc;

use super::{Begin, DuplicateInfo, Remainder};
use crate::adapter::{Claimed, Recorded, Seen, StoredResponse};
use crate::key::{DedupKey, Event, Keys, List};
use crate::observe;

/// The answer of a store for one key, whatever the contract.
#[derive(Debug, Clone, Copy)]
pub(super) enum Answer {
    First { attempt: u32, takeover: bool },
    InFlight,
    Duplicate(Seen),
    Mismatch(Seen),
}

impl From<Claimed> for Answer {
    fn from(claimed: Claimed) -> Self {
        match claimed {
            Claimed::First { attempt, takeover } => Self::First { attempt, takeover },
            Claimed::InFlight => Self::InFlight,
            Claimed::Duplicate(seen) => Self::Duplicate(seen),
        }
    }
}

impl From<Recorded> for Answer {
    fn from(recorded: Recorded) -> Self {
        match recorded {
            Recorded::First => Self::First { attempt: 1, takeover: false },
            Recorded::InFlight => Self::InFlight,
            Recorded::Duplicate(seen) => Self::Duplicate(seen),
        }
    }
}

/// The events that stand for themselves, and all their identities, sorted.
pub(super) fn plan(keys: &Keys) -> (List<Event>, List<DedupKey>) {
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

/// All identities of these events, sorted.
pub(super) fn identities<'e>(events: impl IntoIterator<Item = &'e Event>) -> Vec<DedupKey> {
    let mut keys: Vec<DedupKey> = events.into_iter().flat_map(Event::identities).cloned().collect();
    keys.sort_unstable();
    keys
}

/// The keys that the store has granted.
pub(super) fn granted(flat: &[DedupKey], answers: &[Answer]) -> Vec<DedupKey> {
    let granted = flat.iter().zip(answers).filter(|(_, a)| matches!(a, Answer::First { .. }));
    granted.map(|(key, _)| key.clone()).collect()
}

/// What a delivery's events come to.
#[derive(Debug, Default)]
pub(super) struct Folded {
    pub(super) new: List<Event>,
    pub(super) attempt: u32,
    pub(super) takeover: bool,
    pub(super) in_flight: bool,
    pub(super) duplicate: Option<Seen>,
    pub(super) mismatch: bool,
    /// Granted to events that are in flight under another identity.
    pub(super) give_back: Vec<DedupKey>,
    /// Granted to events that are duplicates under another identity.
    pub(super) keep: Vec<DedupKey>,
}

impl Folded {
    /// The events that do not run.
    pub(super) fn others(&self) -> Remainder {
        Remainder { in_flight: self.in_flight, mismatch: self.mismatch }
    }

    /// What the delivery comes to if nothing of it is to run.
    pub(super) fn without_any_new<C>(&self, response: Option<Arc<StoredResponse>>) -> Begin<C> {
        match self.duplicate {
            Some(seen) if !self.in_flight => {
                let known = DuplicateInfo { seen, response };
                if self.mismatch { Begin::Mismatch(known) } else { Begin::Duplicate(known) }
            }
            _ => Begin::InFlight,
        }
    }

    /// All identities of the events to run, sorted.
    pub(super) fn held(&self) -> List<DedupKey> {
        match &*self.new {
            [only] if only.second_identity().is_none() => List::from([only.key().clone()]),
            new => identities(new).into(),
        }
    }
}

/// Folds `answers`, one per key of `flat`, which is sorted.
pub(super) fn fold(events: List<Event>, flat: &[DedupKey], answers: &[Answer]) -> Folded {
    let mut folded = Folded::default();
    // Most deliveries carry one event of one identity.
    if let ([Answer::First { attempt, takeover }], [_]) = (answers, &*events) {
        return Folded { new: events, attempt: *attempt, takeover: *takeover, ..folded };
    }
    let mut new = Vec::new();
    for event in events {
        let (mut granted, mut attempts, mut took_over) = (Vec::new(), 0, false);
        let (mut seen, mut in_flight) = (None, false);
        for key in event.identities() {
            let place = flat.binary_search(key).ok();
            match place.and_then(|place| answers.get(place)).copied() {
                Some(Answer::First { attempt, takeover }) => {
                    granted.push(key.clone());
                    attempts = attempts.max(attempt);
                    took_over |= takeover;
                }
                Some(Answer::Duplicate(found)) => seen = Some(found),
                Some(Answer::Mismatch(found)) => {
                    seen = Some(found);
                    folded.mismatch = true;
                    observe::mismatch(key);
                }
                // No answer is not a grant.
                Some(Answer::InFlight) | None => in_flight = true,
            }
        }
        if let Some(seen) = seen {
            folded.duplicate.get_or_insert(seen);
            let (key, second): (Vec<_>, Vec<_>) =
                granted.into_iter().partition(|granted| granted == event.key());
            folded.keep.extend(key);
            folded.give_back.extend(second);
        } else if in_flight {
            folded.in_flight = true;
            folded.give_back.append(&mut granted);
        } else {
            folded.attempt = folded.attempt.max(attempts);
            folded.takeover |= took_over;
            new.push(event);
        }
    }
    folded.new = new.into();
    folded
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn key(id: &str) -> DedupKey {
        DedupKey::new("n", id).unwrap()
    }

    fn twin(id: &str, second: &str) -> Event {
        Event::new(key(id)).with_second_identity(key(second))
    }

    const FIRST: Answer = Answer::First { attempt: 1, takeover: false };
    const DUPLICATE: Answer = Answer::Duplicate(Seen { age: Duration::ZERO });

    #[test]
    fn any_complete_identity_makes_a_duplicate_and_any_running_one_makes_it_wait() {
        let keys = Keys::new(vec![twin("a", "b"), twin("c", "d"), twin("e", "f")]).unwrap();
        let (events, flat) = plan(&keys);
        assert_eq!(*flat, ["a", "b", "c", "d", "e", "f"].map(key));
        let answers = [FIRST, DUPLICATE, Answer::InFlight, FIRST, FIRST, FIRST];
        let folded = fold(events, &flat, &answers);
        assert_eq!(*folded.new, [twin("e", "f")]);
        assert!(folded.in_flight && folded.duplicate.is_some());
        assert_eq!(folded.keep, [key("a")]);
        assert_eq!(folded.give_back, [key("d")]);
    }

    #[test]
    fn only_a_key_is_kept_and_never_a_second_identity_under_which_nothing_was_handled() {
        let keys = Keys::new(vec![twin("a", "b"), twin("c", "d")]).unwrap();
        let (events, flat) = plan(&keys);
        let folded = fold(events, &flat, &[FIRST, DUPLICATE, DUPLICATE, FIRST]);
        assert_eq!((folded.keep, folded.give_back), (vec![key("a")], vec![key("d")]));
        let (events, flat) = plan(&keys);
        let other = Answer::Mismatch(Seen::new(Duration::ZERO));
        let folded = fold(events, &flat, &[FIRST, DUPLICATE, other, FIRST]);
        assert_eq!((folded.keep, folded.give_back), (vec![key("a")], vec![key("d")]));
    }

    #[test]
    fn an_element_that_shares_an_identity_with_an_earlier_one_is_its_duplicate() {
        let keys = Keys::new(vec![twin("a", "x"), twin("b", "x"), Event::new(key("a"))]).unwrap();
        let (events, flat) = plan(&keys);
        assert_eq!(*events, [twin("a", "x")]);
        assert_eq!(*flat, ["a", "x"].map(key));
    }

    #[test]
    fn a_missing_answer_is_never_a_grant() {
        let (events, flat) = plan(&Keys::one(key("a")));
        let folded = fold(events, &flat, &[]);
        assert!(folded.new.is_empty() && folded.in_flight);
    }
}
