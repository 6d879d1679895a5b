//! [`Delivery`]: what a handler can know about the delivery it is running.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::key::{DedupKey, Event, Keys, List, derive};

/// The delivery that a handler is running, from the request's extensions; with the feature `axum`
/// also an extractor.
///
/// Cloning makes another handle to the same delivery.
///
/// # Example
///
/// ```
/// use http::{Request, StatusCode};
/// use tower_dedup::Delivery;
///
/// async fn handler<B>(request: Request<B>) -> StatusCode {
///     let Some(delivery) = request.extensions().get::<Delivery>() else {
///         return StatusCode::OK; // a handshake: nothing to deduplicate
///     };
///     if delivery.is_takeover() {
///         // An earlier handler died on this event and may have half-run: look before you charge.
///     }
///     // The same on every attempt at this event: a call repeated with it takes effect once.
///     let _idempotency_key = delivery.idempotency_key("charge");
///     StatusCode::OK
/// }
/// # let _ = handler::<()>;
/// ```
#[derive(Clone)]
pub struct Delivery(Arc<Inner>);

struct Inner {
    events: List<Event>,
    attempt: u32,
    takeover: bool,
    protection: Protection,
    lost: AtomicBool,
    done: Mutex<HashSet<DedupKey>>,
    /// The places of a large batch's keys, to be found at once.
    index: OnceLock<HashMap<DedupKey, usize>>,
    /// What the events of the whole request are named by in idempotency keys, if there are several.
    request: OnceLock<BTreeSet<DedupKey>>,
}

#[derive(Clone, Copy, PartialEq)]
enum Protection {
    Claimed,
    /// In a transaction, which alone can keep what is done.
    Transactional,
    Unprotected,
}

impl Delivery {
    /// A delivery of these new events; for ledgers.
    ///
    /// `attempt` is the highest attempt of any of them; `takeover` says whether any of them is
    /// one.
    #[must_use]
    pub fn new(events: Vec<Event>, attempt: u32, takeover: bool) -> Self {
        Self::of(events.into(), attempt, takeover)
    }

    pub(crate) fn of(events: List<Event>, attempt: u32, takeover: bool) -> Self {
        Self::with(events, attempt, takeover, Protection::Claimed)
    }

    /// A delivery that runs in a transaction, which [`done`](Self::mark_done) knows nothing of; for
    /// ledgers.
    #[must_use]
    pub fn transactional(events: Vec<Event>, attempt: u32, takeover: bool) -> Self {
        Self::with(events.into(), attempt, takeover, Protection::Transactional)
    }

    /// A delivery that runs although the store could not be asked; for ledgers.
    #[must_use]
    pub fn unprotected(events: Vec<Event>) -> Self {
        Self::with(events.into(), 1, false, Protection::Unprotected)
    }

    fn with(events: List<Event>, attempt: u32, takeover: bool, protection: Protection) -> Self {
        Self(Arc::new(Inner {
            events,
            attempt,
            takeover,
            protection,
            lost: AtomicBool::new(false),
            done: Mutex::default(),
            index: OnceLock::new(),
            request: OnceLock::new(),
        }))
    }

    /// Sets the request that this is a delivery of: idempotency keys are derived from all its events,
    /// including those that do not run.
    pub(crate) fn belongs_to(&self, request: &Keys) {
        if let events @ [_, _, ..] = request.events() {
            self.0.request.get_or_init(|| events.iter().map(shared_name).cloned().collect());
        }
    }

    /// The key of the event: of the first one to run, in a batch.
    #[must_use]
    pub fn key(&self) -> Option<&DedupKey> {
        self.0.events.first().map(Event::key)
    }

    /// The keys of the events to run, in the order of the request. In a batch, those that were
    /// run before, or run elsewhere now, are not among them.
    pub fn keys(&self) -> impl Iterator<Item = &DedupKey> {
        self.0.events.iter().map(Event::key)
    }

    /// Whether this event of a batch is to run, and is not marked as [done](Self::mark_done): what a
    /// batch carries twice is to run once.
    #[must_use]
    pub fn needs_run(&self, key: &DedupKey) -> bool {
        self.runs(key) && !self.is_done(key)
    }

    /// Whether this event is one of [`keys`](Self::keys).
    pub(crate) fn runs(&self, key: &DedupKey) -> bool {
        self.event(key).is_some()
    }

    fn event(&self, key: &DedupKey) -> Option<&Event> {
        const FEW: usize = 16;
        let events = &self.0.events;
        if events.len() <= FEW {
            return events.iter().find(|event| event.key() == key);
        }
        let places = || self.keys().enumerate().map(|(place, key)| (key.clone(), place)).collect();
        self.0.index.get_or_init(places).get(key).map(|place| &events[*place])
    }

    /// The events to run with all their identities; for ledgers.
    #[must_use]
    pub fn events(&self) -> &[Event] {
        &self.0.events
    }

    /// How often this event has been claimed, this time included; 1 for the first.
    ///
    /// An event with a second identity is claimed, and given back, each time it is found to run
    /// elsewhere under the other one.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.0.attempt
    }

    /// Whether an earlier attempt ended without a word: its process died, or lost its lease. That
    /// handler may have half-run, or be running still.
    #[must_use]
    pub fn is_takeover(&self) -> bool {
        self.0.takeover
    }

    /// Whether the delivery runs although the store could not be asked whether it is a duplicate.
    #[must_use]
    pub fn is_unprotected(&self) -> bool {
        self.0.protection == Protection::Unprotected
    }

    /// Whether somebody else has taken this event over since the handler started: whatever it
    /// does from now on may happen twice. Costs one atomic read.
    #[must_use]
    pub fn lease_lost(&self) -> bool {
        self.0.lost.load(Ordering::Relaxed)
    }

    /// A key for one outbound call of this event's handler: the same on every attempt, different
    /// for every event and every `step`. Hand it to the service that is called as its idempotency
    /// key.
    ///
    /// 32 lower-case hex digits: the first 16 bytes of the SHA-256 over namespace, id and step,
    /// each preceded by its length. An event with a second identity takes namespace and id from
    /// that, because two deliveries of one event may share nothing else.
    ///
    /// In a batch, the SHA-256 is over the namespaces and ids of *all* events of the request, sorted
    /// and each once, those that do not run this time included: a retry that runs the rest makes
    /// the same call. Where a sender groups events differently on a retry, or where each event makes
    /// a call of its own, use [`idempotency_key_of`](Self::idempotency_key_of).
    #[must_use]
    pub fn idempotency_key(&self, step: &str) -> String {
        let several = match (self.0.request.get(), &*self.0.events) {
            (Some(request), _) => request,
            (None, [only]) => return derived([shared_name(only)], step),
            (None, events) => &events.iter().map(shared_name).cloned().collect(),
        };
        derived(several, step)
    }

    /// [`idempotency_key`](Self::idempotency_key) for one event of a batch: from the event's second
    /// identity where it has one, else from `key`.
    #[must_use]
    pub fn idempotency_key_of(&self, key: &DedupKey, step: &str) -> String {
        derived([self.event(key).map_or(key, shared_name)], step)
    }

    /// Marks one event of a batch as finished: it is completed even if the handler fails over a
    /// later one, and the retry skips it. Answers whether that is so.
    ///
    /// It is not, and the answer is `false`, for an event that is not of this delivery; and for all
    /// under the transactional ledger, where a failure rolls back what the event has written:
    /// `DedupTx::mark_done` keeps both there. Under the on-arrival ledger every
    /// event is complete before the handler runs.
    pub fn mark_done(&self, key: &DedupKey) -> bool {
        let keeps = self.0.protection != Protection::Transactional && self.runs(key);
        if keeps {
            let mut done = self.0.done.lock().unwrap_or_else(PoisonError::into_inner);
            done.insert(key.clone());
        }
        keeps
    }

    /// Whether the handler has marked this event as finished; for ledgers.
    #[must_use]
    pub fn is_done(&self, key: &DedupKey) -> bool {
        self.marked().contains(key)
    }

    pub(crate) fn marked(&self) -> MutexGuard<'_, HashSet<DedupKey>> {
        self.0.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the handler that its lease is gone; for ledgers. Answers whether it is news.
    #[must_use = "losing a lease is counted once"]
    pub fn mark_lease_lost(&self) -> bool {
        !self.0.lost.swap(true, Ordering::Relaxed)
    }
}

/// What all deliveries of an event share: its second identity, or its key where it has no other.
fn shared_name(event: &Event) -> &DedupKey {
    event.second_identity().unwrap_or_else(|| event.key())
}

fn derived<'k>(names: impl IntoIterator<Item = &'k DedupKey>, step: &str) -> String {
    let names = names.into_iter().flat_map(|name| [name.namespace(), name.id()]);
    derive(names.chain([step]))
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery")
            .field("events", &self.0.events)
            .field("attempt", &self.0.attempt)
            .field("takeover", &self.0.takeover)
            .field("unprotected", &self.is_unprotected())
            .field("lease_lost", &self.lease_lost())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delivery(id: &str) -> Delivery {
        let key = DedupKey::new("acme", id).unwrap();
        Delivery::new(vec![Event::new(key)], 1, false)
    }

    #[test]
    fn a_derived_key_is_stable_and_its_own_for_every_step_and_event() {
        // Pinned: a release that changes it repeats outbound calls.
        assert_eq!(delivery("evt_1").idempotency_key("charge"), "6609efee658ef03bdb07ddbb767bf9c0");
        assert_ne!(
            delivery("evt_1").idempotency_key("mail"),
            delivery("evt_1").idempotency_key("charge")
        );
        assert_ne!(
            delivery("evt_2").idempotency_key("charge"),
            delivery("evt_1").idempotency_key("charge")
        );
    }

    fn event(id: &str) -> Event {
        Event::new(DedupKey::new("acme", id).unwrap())
    }

    fn twin(id: &str) -> Event {
        event(id).with_second_identity(DedupKey::new("acme.change", "order_1").unwrap())
    }

    #[test]
    fn idempotency_key_of_twins_is_that_of_their_second_identity() {
        let derived = |id| Delivery::new(vec![twin(id)], 1, false).idempotency_key("charge");
        // Pinned.
        assert_eq!(derived("evt_1"), "8ab43d00187197292714a534ea6e053a");
        assert_eq!(derived("evt_1"), derived("evt_2"));
        let batch = Delivery::new(vec![twin("evt_3"), event("evt_4")], 1, false);
        let of = |id| batch.idempotency_key_of(event(id).key(), "charge");
        assert_eq!(of("evt_3"), derived("evt_1"));
        assert_eq!(of("evt_4"), delivery("evt_4").idempotency_key("charge"));
    }

    #[test]
    fn idempotency_key_of_a_request_is_the_same_whatever_runs_of_it() {
        let request = Keys::new(vec![event("b"), event("a"), event("b")]).unwrap();
        let derived = |run: &[&str]| {
            let run = run.iter().map(|id| event(id)).collect();
            let delivery = Delivery::new(run, 1, false);
            delivery.belongs_to(&request);
            delivery.idempotency_key("charge")
        };
        // Pinned.
        assert_eq!(derived(&["b", "a"]), "16b296843a26b192c1024feffbf3d66a");
        assert_eq!(derived(&["b", "a"]), derived(&["a"]));
        assert_eq!(derived(&["a"]), derived(&["b"]));
        assert_ne!(derived(&["a"]), delivery("a").idempotency_key("charge"));
        let told_nothing = Delivery::new(vec![event("a"), event("b")], 1, false);
        assert_eq!(told_nothing.idempotency_key("charge"), derived(&["a"]));
        // A list of one, and one event that occurs twice.
        let twice = Keys::new(vec![event("a"), event("a")]).unwrap();
        let delivery = delivery("a");
        let alone = delivery.idempotency_key("charge");
        delivery.belongs_to(&twice);
        assert_eq!(delivery.idempotency_key("charge"), alone);
    }

    #[test]
    fn done_takes_only_events_of_this_delivery() {
        let delivery = delivery("evt_1");
        assert!(!delivery.mark_done(&DedupKey::new("acme", "evt_2").unwrap()));
        let mine = DedupKey::new("acme", "evt_1").unwrap();
        assert!(delivery.needs_run(&mine) && delivery.mark_done(&mine) && delivery.is_done(&mine));
        assert!(!delivery.needs_run(&mine) && delivery.mark_done(&mine), "done, and still its own");
    }

    #[test]
    fn done_does_not_pretend_where_only_a_transaction_can_keep() {
        let mine = DedupKey::new("acme", "evt_1").unwrap();
        let delivery = Delivery::transactional(vec![Event::new(mine.clone())], 1, false);
        assert!(
            delivery.needs_run(&mine) && !delivery.mark_done(&mine) && !delivery.is_done(&mine)
        );
    }
}
