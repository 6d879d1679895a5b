//! [`OnArrival`]: the key becomes permanent before the handler runs.
//!
//! 1. At most once: a handler that fails, panics, or dies with its process is not run again. That
//!    is right for effects that are worse twice than never, and wrong for everything else.
//! 2. A record whose answer was lost is undone by its token: the sender was told 503, and its retry
//!    must find the key free, or the event is lost without having run. The record may still be on
//!    its way to the store, so a store that knows nothing of it is asked again for twenty seconds;
//!    one that does not answer, for ten minutes. Meanwhile this process takes the key for in
//!    flight where the store says complete. Another process that asks in that time is told that it
//!    is complete: where that window matters, use the lease ledger.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::Extensions;
use tokio::sync::OwnedSemaphorePermit;

use super::call::{store_call, undone};
use super::fold::{Answer, fold, plan};
use super::pending::Pending;
use super::recall::{Recaller, Recalls, doubt, look_ahead, recall};
use super::retry::{Background, RetryJob, RetryResult};
use super::{Begin, BeginContext, Claim, FailOpen, HandlerSuccess, Ledger, Remainder};
use crate::adapter::{CallTerms, DedupAdapter, Recall, Recorded};
use crate::delivery::Delivery;
use crate::error::{Error, ErrorKind};
use crate::key::{DedupKey, Event, Keys};
use crate::observe;

/// For how long a record of unknown outcome is undone.
const UNDO_BOUND: Duration = Duration::from_secs(600);

/// How many records may be made, or undone in the background, at once.
const MOST_UNDOINGS: usize = 16_384;

/// For how long a store that answers is asked for a record that it knows nothing of, at least.
const UNDO_PATIENCE: Duration = Duration::from_secs(20);

/// Records on arrival: no event runs twice, and one whose handler fails is lost.
///
/// Cloning makes another handle to the same ledger.
pub struct OnArrival<A>(Arc<Inner<A>>);

struct Inner<A> {
    adapter: Arc<A>,
    /// Recorded perhaps, by deliveries that were told 503.
    undoing: Arc<Pending>,
    /// Being recorded, of events with two identities: what is granted of one is given back if the
    /// other runs elsewhere.
    recording: Arc<Pending>,
    background: Background,
}

impl<A> OnArrival<A> {
    /// A ledger over this store.
    #[must_use]
    pub fn new(adapter: A) -> Self {
        Self(Arc::new(Inner {
            adapter: Arc::new(adapter),
            undoing: Arc::default(),
            recording: Arc::default(),
            background: Background::new(MOST_UNDOINGS),
        }))
    }

    /// The store.
    #[must_use]
    pub fn adapter(&self) -> &A {
        &self.0.adapter
    }
}

impl<A> Clone for OnArrival<A> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<A: fmt::Debug> fmt::Debug for OnArrival<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnArrival").field("adapter", &self.0.adapter).finish_non_exhaustive()
    }
}

impl<A: DedupAdapter> Ledger for OnArrival<A> {
    type Claim = ArrivalClaim;

    async fn begin(
        &self,
        keys: &Keys,
        context: &BeginContext,
    ) -> Result<Begin<Self::Claim>, Error> {
        let inner = &self.0;
        let terms = context.terms();
        let (events, flat) = plan(keys);
        let before = look_ahead(context, &events, &flat).await?;
        // Room to undo it, before there is anything to undo: an undoing that is refused is an
        // event lost.
        let Some(room) = inner.background.reserve() else {
            return Err(Error::new(ErrorKind::Unavailable, "reserving room to undo a record"));
        };
        let undone = inner.undoing.removals();
        let twofold = flat.len() > events.len();
        // To the end, where what is to be undone is pending in its turn.
        let _recording = twofold.then(|| inner.recording.add((*flat).into()));
        let unrun = Unrun { inner, keys: &flat, room: Some(room), context };
        let call = Box::pin(async { inner.adapter.record(&flat, &terms).await });
        let recorded = match store_call("record", context.store_timeout, flat.len(), call).await {
            Ok(recorded) => recorded,
            Err(error) if context.fail_open => {
                observe::unprotected(keys.first(), &error);
                if let Some(room) = unrun.disarm() {
                    inner.record_behind(room, &flat, terms, context.store_timeout);
                }
                let delivery = Delivery::unprotected(events.into());
                return Ok(Begin::first(ArrivalClaim { delivery }, Remainder::default()));
            }
            Err(error) => {
                if !error.is_unknown() {
                    unrun.disarm();
                }
                return Err(error);
            }
        };
        // Nothing waits from here on: what there is to recall was looked up before.
        let room = unrun.disarm();
        let mut answers: Vec<Answer> = flat
            .iter()
            .zip(recorded)
            .map(|(key, answer)| match answer {
                // Perhaps by a record that is being undone, or was when the store answered, which
                // nobody ran.
                Recorded::Duplicate(_) if inner.may_be_undone(key, undone) => Answer::InFlight,
                answer => answer.into(),
            })
            .collect();
        if twofold {
            inner.doubt_halves(&events, &flat, &mut answers);
        }
        if context.recaller.is_some() {
            doubt(&flat, &mut answers, &before);
        }
        let here = |key: &DedupKey| before.get(key).cloned();
        let response = recall(context, &events, &flat, &mut answers, here).await?;
        let mut folded = fold(events, &flat, &answers);
        let give_back = std::mem::take(&mut folded.give_back);
        if let (Some(room), false) = (room, give_back.is_empty()) {
            inner.undo_behind(room, &give_back, terms, context.store_timeout);
        }
        if folded.new.is_empty() {
            return Ok(folded.without_any_new(response));
        }
        let others = folded.others();
        let delivery = Delivery::of(folded.new, folded.attempt, folded.takeover);
        Ok(Begin::first(ArrivalClaim { delivery }, others))
    }

    fn background(&self) -> usize {
        self.0.background.count()
    }

    async fn drain(&self) {
        self.0.background.drain().await;
    }
}

impl<A: DedupAdapter> FailOpen for OnArrival<A> {}

impl<A: DedupAdapter + Recall> Recalls for OnArrival<A> {
    fn recaller(&self) -> Recaller {
        Recaller::new(Arc::clone(&self.0.adapter))
    }
}

impl<A: DedupAdapter> Inner<A> {
    /// Records what runs unprotected, as soon as the store answers.
    fn record_behind(
        self: &Arc<Self>,
        room: OwnedSemaphorePermit,
        keys: &[DedupKey],
        terms: CallTerms,
        bound: Duration,
    ) {
        let (inner, first) = (Arc::clone(self), keys.first().cloned());
        let keys: Arc<[DedupKey]> = keys.into();
        let attempt = move || {
            let (inner, keys) = (Arc::clone(&inner), Arc::clone(&keys));
            let terms = terms.clone();
            async move {
                let call = Box::pin(async { inner.adapter.record(&keys, &terms).await });
                match store_call("record", bound, keys.len(), call).await {
                    Ok(_) => RetryResult::Done,
                    Err(_) => RetryResult::Again,
                }
            }
        };
        let work =
            RetryJob { operation: "record", key: first, bound: UNDO_BOUND, patience: UNDO_BOUND };
        self.background.repeat_with(room, work, attempt, ());
    }

    /// Whether a record of this key is being undone, or something was since `undone` was read.
    fn may_be_undone(&self, key: &DedupKey, undone: usize) -> bool {
        self.undoing.contains(key) || self.undoing.removals() != undone
    }

    /// Of an event that is a duplicate under one identity only: another delivery that is being
    /// recorded may have been granted that one, and give it back. It is in flight.
    fn doubt_halves(&self, events: &[Event], flat: &[DedupKey], answers: &mut [Answer]) {
        for event in events.iter().filter(|event| event.second_identity().is_some()) {
            let places: Vec<usize> =
                event.identities().filter_map(|key| flat.binary_search(key).ok()).collect();
            let is_duplicate = |place: &usize| matches!(answers[*place], Answer::Duplicate(_));
            if places.iter().all(is_duplicate) {
                continue;
            }
            let doubtful: Vec<usize> = places.into_iter().filter(is_duplicate).collect();
            for place in doubtful {
                if self.recording.is_shared(&flat[place]) {
                    answers[place] = Answer::InFlight;
                }
            }
        }
    }

    /// Undoes a record; until it has, this process takes the keys for in flight.
    fn undo_behind(
        self: &Arc<Self>,
        room: OwnedSemaphorePermit,
        keys: &[DedupKey],
        terms: CallTerms,
        bound: Duration,
    ) {
        let (inner, first) = (Arc::clone(self), keys.first().cloned());
        let keys: Arc<[DedupKey]> = keys.into();
        let until_then = self.undoing.add(Arc::clone(&keys));
        let attempt = move || {
            let (inner, keys) = (Arc::clone(&inner), Arc::clone(&keys));
            let terms = terms.clone();
            async move {
                let call = Box::pin(async { inner.adapter.unrecord(&keys, &terms).await });
                undone(store_call("unrecord", bound, keys.len(), call).await)
            }
        };
        let patience = UNDO_PATIENCE.max(bound.saturating_mul(10));
        let work = RetryJob { operation: "unrecord", key: first, bound: UNDO_BOUND, patience };
        self.background.repeat_with(room, work, attempt, until_then);
    }
}

/// What the store may have recorded for a delivery that was dropped before the store answered, or
/// whose answer was lost: undone, or its event is lost without having run.
struct Unrun<'b, A: DedupAdapter> {
    inner: &'b Arc<Inner<A>>,
    keys: &'b [DedupKey],
    /// Taken when it is disarmed.
    room: Option<OwnedSemaphorePermit>,
    context: &'b BeginContext,
}

impl<A: DedupAdapter> Unrun<'_, A> {
    /// Returns the room.
    fn disarm(mut self) -> Option<OwnedSemaphorePermit> {
        self.room.take()
    }
}

impl<A: DedupAdapter> Drop for Unrun<'_, A> {
    fn drop(&mut self) {
        if let Some(room) = self.room.take() {
            let (terms, bound) = (self.context.terms(), self.context.store_timeout);
            self.inner.undo_behind(room, self.keys, terms, bound);
        }
    }
}

/// A delivery whose key is permanent already: there is nothing left to commit or roll back.
#[derive(Debug)]
pub struct ArrivalClaim {
    delivery: Delivery,
}

impl Claim for ArrivalClaim {
    fn delivery(&self) -> &Delivery {
        &self.delivery
    }

    fn attach(&self, _: &mut Extensions) {}

    async fn commit(self, _: &HandlerSuccess) -> Result<(), Error> {
        Ok(())
    }

    async fn rollback(self) -> Result<(), Error> {
        Ok(())
    }
}
