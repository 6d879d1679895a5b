//! [`Delivery`]: the delivery that a handler runs.

use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::key::{DedupKey, Event, Keys, List, derive};

/// The delivery that a handler runs: a request extension, and with the feature `axum` an extractor.
///
/// It has at least one event. Cloning makes another handle to the same delivery.
///
/// # Example
///
/// ```
/// use http::{Request, StatusCode};
/// use tower_dedup::Delivery;
///
/// async fn handler<B>(request: Request<B>) -> StatusCode {
///     let Some(delivery) = request.extensions().get::<Delivery>() else {
///         return StatusCode::OK; // a handshake: there is no event
///     };
///     if delivery.is_takeover() {
///         // An earlier handler may have half-run this event: check before you charge.
///     }
///     // The same on every attempt, so that a repeated call takes effect once.
///     let _idempotency_key = delivery.idempotency_key("charge");
///     StatusCode::OK
/// }
/// # let _ = handler::<()>;
/// ```
#[derive(Clone)]
pub struct Delivery(pub(crate) Arc<Inner<dyn OfLedger>>);

/// What a ledger holds with a delivery.
pub(crate) trait OfLedger: Any + Send + Sync + UnwindSafe + RefUnwindSafe {}

impl<T: Any + Send + Sync + UnwindSafe + RefUnwindSafe> OfLedger for T {}

/// The state of a delivery, with what its ledger holds for it: one allocation for both.
pub(crate) struct Inner<T: ?Sized> {
    /// Never empty.
    events: List<Event>,
    attempt: u32,
    takeover: bool,
    is_unprotected: bool,
    /// `None` if the layer enforces its verdict.
    unenforced: Option<Unenforced>,
    lost: AtomicBool,
    /// The positions of the keys, if there are too many to search.
    index: OnceLock<HashMap<DedupKey, usize>>,
    /// The names of all events of the request for idempotency keys, if there are several.
    request: OnceLock<BTreeSet<DedupKey>>,
    pub(crate) of_ledger: T,
}

impl<T> Inner<T> {
    /// Makes the delivery of these events, of which there is at least one. `attempt` is the highest
    /// attempt of any event; `takeover` is `true` if any event is a takeover.
    pub(crate) fn new(
        events: List<Event>,
        attempt: u32,
        takeover: bool,
        is_unprotected: bool,
        unenforced: Option<Unenforced>,
        of_ledger: T,
    ) -> Self {
        assert!(!events.is_empty(), "a delivery has at least one event");
        Self {
            events,
            attempt,
            takeover,
            is_unprotected,
            unenforced,
            lost: AtomicBool::new(false),
            index: OnceLock::new(),
            request: OnceLock::new(),
            of_ledger,
        }
    }
}

impl<T: ?Sized> Inner<T> {
    pub(crate) fn events(&self) -> &[Event] {
        &self.events
    }

    pub(crate) fn is_unprotected(&self) -> bool {
        self.is_unprotected
    }

    /// Marks the lease as lost. Returns `true` the first time.
    #[must_use = "losing a lease is counted once"]
    pub(crate) fn mark_lease_lost(&self) -> bool {
        !self.lost.swap(true, Ordering::Relaxed)
    }
}

/// An extension of a response whose `Retry-After` the layer replaces by its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RetryAfterOfLayer;

/// How a layer judges a delivery.
///
/// Under [`Mode::Enforce`](crate::Mode::Enforce) the verdict decides whether the handler runs.
/// Under [`Mode::Shadow`](crate::Mode::Shadow) the handler runs under every verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Verdict {
    /// At least one event is new, and the delivery holds its claim.
    First,
    /// Every event is complete.
    #[non_exhaustive]
    Duplicate {
        /// The time since the first complete event of the delivery was first seen.
        age: Duration,
    },
    /// Another delivery runs the events that are not complete.
    InFlight,
    /// Every event is complete, and one was handled with another payload.
    #[non_exhaustive]
    Mismatch {
        /// The time since the first complete event of the delivery was first seen.
        age: Duration,
    },
    /// The key or its scope is missing or malformed, or there are too many keys.
    NoKey,
    /// The store did not reply in time, or returned an error.
    Unavailable,
    /// No permit was free.
    Overloaded,
    /// The layer requires verified requests, and this request is not verified.
    Unverified,
    /// The layer is off, so it asked no store.
    Off,
}

impl Verdict {
    /// Returns the name in log records and metrics: lower case, words joined by `_`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Duplicate { .. } => "duplicate",
            Self::InFlight => "in_flight",
            Self::Mismatch { .. } => "mismatch",
            Self::NoKey => "no_key",
            Self::Unavailable => "unavailable",
            Self::Overloaded => "overloaded",
            Self::Unverified => "unverified",
            Self::Off => "off",
        }
    }

    /// Returns the age of the event that was handled before.
    #[must_use]
    pub const fn age(self) -> Option<Duration> {
        match self {
            Self::Duplicate { age } | Self::Mismatch { age } => Some(age),
            _ => None,
        }
    }

    /// Returns `true` if log records may name the key: it is valid, and the request is verified.
    pub(crate) const fn is_of_a_key(self) -> bool {
        !matches!(self, Self::NoKey | Self::Unverified)
    }
}

/// The verdict of a layer that lets every delivery run.
pub(crate) struct Unenforced {
    verdict: Verdict,
    /// The delivery of the claim, which may have fewer events.
    claimed: Option<Delivery>,
}

impl Delivery {
    /// Makes the delivery of all events of a request that the handler runs under every verdict.
    /// `claimed` is the delivery of the claim, if there is one.
    pub(crate) fn unenforced(
        events: List<Event>,
        verdict: Verdict,
        claimed: Option<&Self>,
        of_ledger: impl OfLedger,
    ) -> Self {
        let attempt = claimed.map_or(1, Self::attempt);
        let takeover = claimed.is_some_and(Self::is_takeover);
        let is_unprotected = claimed.is_none_or(Self::is_unprotected);
        let unenforced = Unenforced { verdict, claimed: claimed.cloned() };
        let unenforced = Some(unenforced);
        Self(Arc::new(Inner::new(events, attempt, takeover, is_unprotected, unenforced, of_ledger)))
    }

    /// Returns what the ledger holds with the delivery.
    pub(crate) fn of_ledger(&self) -> &dyn OfLedger {
        &self.0.of_ledger
    }

    /// Sets the request that this delivery belongs to. Idempotency keys are derived from all events
    /// of the request, including events that do not run.
    pub(crate) fn set_request(&self, request: &Keys) {
        if let events @ [_, _, ..] = request.events() {
            self.0.request.get_or_init(|| events.iter().map(shared_name).cloned().collect());
        }
    }

    /// Returns the key of the event; in a multi-event delivery, of the first event to run.
    #[must_use]
    pub fn key(&self) -> &DedupKey {
        self.0.events[0].key()
    }

    /// Returns the id of [`key`](Self::key).
    #[must_use]
    pub fn id(&self) -> &str {
        self.key().id()
    }

    /// Returns the type of the event as the sender names it, such as `invoice.paid`; in a
    /// multi-event delivery, the type of the first event to run. `None` if the
    /// [preset](crate::provider) does not know where the type stands, or the sender's value is no
    /// name of 1 to 100 bytes.
    ///
    /// A type that is read from a header is not signed ([table](crate::guide::providers)). Decide
    /// by the verified body: a 2xx completes the key, and an event that was ignored under a forged
    /// type is lost.
    #[must_use]
    pub fn event_type(&self) -> Option<&str> {
        self.0.events[0].event_type()
    }

    /// Returns the keys of the events to run, in the order of the request. Events of a multi-event
    /// delivery that are complete or in flight are not among them.
    ///
    /// Under [`Mode::Shadow`](crate::Mode::Shadow) and [`Mode::Off`](crate::Mode::Off), they are
    /// the keys of all events of the request. A request without a valid key has the SHA-256 of its
    /// body as its key.
    pub fn keys(&self) -> impl Iterator<Item = &DedupKey> {
        self.0.events.iter().map(Event::key)
    }

    /// Returns `true` if this event is to run. A multi-event delivery may carry an event twice: the
    /// answer is the same both times, and [`keys`](Self::keys) lists the event once.
    ///
    /// Always returns `true` under [`Mode::Shadow`](crate::Mode::Shadow) and
    /// [`Mode::Off`](crate::Mode::Off). Under a wrong key, two different events have one key, and a
    /// handler that skipped the second event would lose it.
    #[must_use]
    pub fn needs_run(&self, key: &DedupKey) -> bool {
        self.0.unenforced.is_some() || self.runs(key)
    }

    /// Returns how the layer judged the delivery.
    ///
    /// If the layer enforces its verdict, this is [`Verdict::First`], or [`Verdict::Unavailable`]
    /// for a delivery that runs [although the store did not reply](crate::OnUnavailable::FailOpen),
    /// because no other delivery reaches the handler.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        match &self.0.unenforced {
            Some(unenforced) => unenforced.verdict,
            None if self.is_unprotected() => Verdict::Unavailable,
            None => Verdict::First,
        }
    }

    /// Returns `true` if a layer that enforces its verdict runs this event, or a layer in shadow
    /// holds its claim.
    pub(crate) fn holds(&self, key: &DedupKey) -> bool {
        match &self.0.unenforced {
            Some(unenforced) => {
                unenforced.claimed.as_ref().is_some_and(|claimed| claimed.runs(key))
            }
            None => self.runs(key),
        }
    }

    /// Returns `true` if a layer that is not off has judged this event.
    pub(crate) fn is_judged(&self, key: &DedupKey) -> bool {
        self.verdict() != Verdict::Off && self.runs(key)
    }

    /// Returns `true` if the layer does not enforce its verdict.
    pub(crate) fn is_unenforced(&self) -> bool {
        self.0.unenforced.is_some()
    }

    /// Returns `true` if this event is one of [`keys`](Self::keys).
    pub(crate) fn runs(&self, key: &DedupKey) -> bool {
        self.event(key).is_some()
    }

    fn event(&self, key: &DedupKey) -> Option<&Event> {
        const FEW: usize = 16;
        let events = &self.0.events;
        if events.len() <= FEW {
            return events.iter().find(|event| event.key() == key);
        }
        let index = || self.keys().enumerate().map(|(at, key)| (key.clone(), at)).collect();
        self.0.index.get_or_init(index).get(key).map(|at| &events[*at])
    }

    /// Returns the events to run, with all their identities.
    pub(crate) fn events(&self) -> &[Event] {
        &self.0.events
    }

    /// Returns how often the event has been claimed, this time included: 1 for the first time.
    ///
    /// If one identity of an event is free and the other is in flight, the free one is claimed and
    /// released. Each of these claims counts.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.0.attempt
    }

    /// Returns `true` if the attempt before this one lost its lease: its process died, hung, or did
    /// not reach the store. The earlier handler may have half-run, or may still be running.
    ///
    /// An attempt that fails releases the key, so the attempt after it is no takeover, even if the
    /// failed attempt was one. A handler that must know whether any earlier attempt may have had an
    /// effect asks whether [`attempt`](Self::attempt) is higher than 1, or the run is
    /// [unprotected](Self::is_unprotected): the store has not counted an unprotected run.
    #[must_use]
    pub fn is_takeover(&self) -> bool {
        self.0.takeover
    }

    /// Returns `true` if no claim protects the delivery, so that it may be a duplicate: the store
    /// did not reply, the layer is [off](crate::Mode::Off), or the layer is in
    /// [shadow](crate::Mode::Shadow) and the verdict is not [`Verdict::First`].
    #[must_use]
    pub fn is_unprotected(&self) -> bool {
        self.0.is_unprotected()
    }

    /// Returns `true` if another handler has taken this event over since this handler started.
    /// Each later effect of this handler may happen twice. A call costs one atomic read.
    #[must_use]
    pub fn lease_lost(&self) -> bool {
        let claimed = self.0.unenforced.as_ref().and_then(|unenforced| unenforced.claimed.as_ref());
        claimed.unwrap_or(self).0.lost.load(Ordering::Relaxed)
    }

    /// Returns an idempotency key for one outbound call of this event's handler. The key is the
    /// same on every attempt, and different for every event and every `step`. Give it to the
    /// service that the handler calls.
    ///
    /// The key has 32 lower-case hex digits: the first 16 bytes of the SHA-256 over namespace, id
    /// and step, each preceded by its length. Namespace and id are those of the
    /// [alias](crate::KeyExtractor::alias) if the event has one, because two
    /// deliveries of one event may share nothing else.
    ///
    /// In a multi-event delivery, the SHA-256 is over the namespaces and ids of *all* events of the
    /// request, sorted and without repetition. Events that do not run this time are included, so
    /// that a retry makes the same call. Use [`idempotency_key_of`](Self::idempotency_key_of) if
    /// the sender groups events differently on a retry, or if each event makes its own call.
    #[must_use]
    pub fn idempotency_key(&self, step: &str) -> String {
        let several = match (self.0.request.get(), &*self.0.events) {
            (Some(request), _) => request,
            (None, [only]) => return derived([shared_name(only)], step),
            (None, events) => &events.iter().map(shared_name).cloned().collect(),
        };
        derived(several, step)
    }

    /// Returns the [`idempotency_key`](Self::idempotency_key) of one event of a multi-event
    /// delivery: from the event's alias if it has one, else from `key`.
    #[must_use]
    pub fn idempotency_key_of(&self, key: &DedupKey, step: &str) -> String {
        derived([self.event(key).map_or(key, shared_name)], step)
    }
}

/// Returns the name that all deliveries of an event share: its alias if it has one, else its key. A
/// digest of the body is no such name: a sender may put a counter of attempts into the body.
fn shared_name(event: &Event) -> &DedupKey {
    event.alias().unwrap_or_else(|| event.key())
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
            .field("verdict", &self.verdict())
            .field("lease_lost", &self.lease_lost())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delivery(id: &str) -> Delivery {
        let key = DedupKey::new("acme", id).unwrap();
        of([Event::new(key)])
    }

    fn of<const N: usize>(events: [Event; N]) -> Delivery {
        run(Vec::from(events).into())
    }

    fn run(events: List<Event>) -> Delivery {
        Delivery(Arc::new(Inner::new(events, 1, false, false, None, ())))
    }

    #[test]
    fn idempotency_key_is_stable_and_differs_by_step_and_event() {
        // Pinned: another key would repeat outbound calls.
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

    fn with_alias(id: &str) -> Event {
        event(id).with_alias(DedupKey::new("acme.change", "order_1").unwrap())
    }

    #[test]
    fn idempotency_key_comes_from_the_alias_if_there_is_one() {
        let derived = |id| of([with_alias(id)]).idempotency_key("charge");
        // Pinned.
        assert_eq!(derived("evt_1"), "8ab43d00187197292714a534ea6e053a");
        assert_eq!(derived("evt_1"), derived("evt_2"));
        let both = of([with_alias("evt_3"), event("evt_4")]);
        let key_of = |id| both.idempotency_key_of(event(id).key(), "charge");
        assert_eq!(key_of("evt_3"), derived("evt_1"));
        assert_eq!(key_of("evt_4"), delivery("evt_4").idempotency_key("charge"));
    }

    #[test]
    fn idempotency_key_of_a_request_is_the_same_whatever_runs_of_it() {
        let request = Keys::new(vec![event("b"), event("a"), event("b")]).unwrap();
        let derived = |ids: &[&str]| {
            let delivery = run(ids.iter().map(|id| event(id)).collect());
            delivery.set_request(&request);
            delivery.idempotency_key("charge")
        };
        // Pinned.
        assert_eq!(derived(&["b", "a"]), "16b296843a26b192c1024feffbf3d66a");
        assert_eq!(derived(&["b", "a"]), derived(&["a"]));
        assert_eq!(derived(&["a"]), derived(&["b"]));
        assert_ne!(derived(&["a"]), delivery("a").idempotency_key("charge"));
        let without_request = of([event("a"), event("b")]);
        assert_eq!(without_request.idempotency_key("charge"), derived(&["a"]));
        // A list of one, and one event that occurs twice.
        let twice = Keys::new(vec![event("a"), event("a")]).unwrap();
        let delivery = delivery("a");
        let alone = delivery.idempotency_key("charge");
        delivery.set_request(&twice);
        assert_eq!(delivery.idempotency_key("charge"), alone);
    }

    #[test]
    fn delivery_in_shadow_holds_the_events_and_the_lease_of_its_claim() {
        let claim = delivery("b");
        let events = List::from_vec(vec![event("a"), event("b")]);
        let all = Delivery::unenforced(events, Verdict::First, Some(&claim), ());
        let keys = ["a", "b"].map(|id| event(id).key().clone());
        assert!(!all.holds(&keys[0]) && all.holds(&keys[1]), "the claim holds `b` only");
        assert!(!all.lease_lost() && claim.0.mark_lease_lost() && all.lease_lost());
    }
}
