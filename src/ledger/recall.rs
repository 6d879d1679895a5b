//! What is kept with complete keys: payloads to compare, responses to replay.
//!
//! 1. The store is asked for it in a second call, and only about keys that turned out to be
//!    complete: a layer that neither compares nor replays never makes that call. Responses are
//!    asked for only where one is replayed: a batch that is compared costs its digests, however
//!    large the responses are that are kept with its keys.
//! 2. A store that does not answer it leaves the delivery unanswered: an empty 200 in the place of
//!    the handler's response would be a wrong answer. A key that was complete, and is not any more
//!    when that is asked, is in flight: the next look finds out.
//! 3. Payloads are compared for the key of an event, not for its second identity, under which
//!    another event may have been handled, and only with that of a key that is complete: what was
//!    begun and not finished has had no effect that could differ.
//! 4. A response is replayed to a delivery of one event. That of a batch answered for other events
//!    too.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;

use super::call::store_call;
use super::fold::Answer;
use super::{BeginContext, Ledger};
use crate::adapter::{Fetch, Recall, StoredData, StoredResponse};
use crate::error::Error;
use crate::key::{DedupKey, Event};

type Ask = dyn Fn(Vec<DedupKey>, Fetch) -> BoxFuture<'static, Result<Vec<Option<StoredData>>, Error>>
    + Send
    + Sync;

/// A ledger whose store keeps payloads, so that they can be compared.
#[diagnostic::on_unimplemented(
    message = "the store of `{Self}` keeps nothing beside its keys",
    note = "implement `Recall` for the adapter"
)]
pub trait Recalls: Ledger {
    /// What asks the store.
    fn recaller(&self) -> Recaller;
}

/// A ledger that makes a key permanent *after* its handler has answered, so that the answer can be
/// kept with it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` keeps no responses",
    note = "a key that is permanent before its handler runs has no response to keep"
)]
pub trait Replays: Recalls {}

/// Asks a store what it has kept. Cloning makes another handle to it.
#[derive(Clone)]
pub struct Recaller(Arc<Ask>);

impl Recaller {
    /// Asks this store.
    #[must_use]
    pub fn new<A: Recall>(adapter: Arc<A>) -> Self {
        Self(Arc::new(move |keys, wanted| {
            let adapter = Arc::clone(&adapter);
            Box::pin(async move { adapter.recall(&keys, wanted).await })
        }))
    }

    /// For a delivery of these events.
    async fn ask(
        &self,
        context: &BeginContext,
        events: &[Event],
        keys: Vec<DedupKey>,
    ) -> Result<Vec<Option<StoredData>>, Error> {
        let replays = context.replays && events.len() == 1;
        let wanted = if replays { Fetch::DigestAndResponse } else { Fetch::Digest };
        let count = keys.len();
        store_call("recall", context.store_timeout, count, self.0(keys, wanted)).await
    }
}

impl fmt::Debug for Recaller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recaller").finish_non_exhaustive()
    }
}

/// What is kept with those of the keys that are complete, asked before anything is claimed: for
/// ledgers that must not wait afterwards. With a transaction in hand, to wait for a second
/// connection is how a pool locks up; and a record that is made and undone again is taken for an
/// event that was handled by whoever asks in between.
pub(super) async fn look_ahead(
    context: &BeginContext,
    events: &[Event],
    flat: &[DedupKey],
) -> Result<HashMap<DedupKey, StoredData>, Error> {
    let recaller = context.recaller.as_ref().filter(|_| !flat.is_empty());
    let Some(recaller) = recaller else { return Ok(HashMap::new()) };
    let kept = recaller.ask(context, events, flat.to_vec()).await?;
    let known = flat.iter().zip(kept).filter_map(|(key, kept)| Some((key.clone(), kept?)));
    Ok(known.collect())
}

/// Takes what is complete since we looked ahead for in flight: the retry finds what is kept with it.
pub(super) fn doubt(
    flat: &[DedupKey],
    answers: &mut [Answer],
    known: &HashMap<DedupKey, StoredData>,
) {
    for (key, answer) in flat.iter().zip(answers) {
        if matches!(answer, Answer::Duplicate(_)) && !known.contains_key(key) {
            *answer = Answer::InFlight;
        }
    }
}

/// Looks at what is kept with the keys that are complete: turns the answer of a key whose payload
/// differs, and answers the response to replay.
///
/// `flat` is sorted, with one answer for each. `here` is what this process knows of a key that the
/// store does not know yet.
pub(super) async fn recall(
    context: &BeginContext,
    events: &[Event],
    flat: &[DedupKey],
    answers: &mut [Answer],
    here: impl Fn(&DedupKey) -> Option<StoredData>,
) -> Result<Option<Arc<StoredResponse>>, Error> {
    let Some(recaller) = &context.recaller else { return Ok(None) };
    let complete: Vec<usize> =
        (0..flat.len()).filter(|place| matches!(answers[*place], Answer::Duplicate(_))).collect();
    let mut kept: Vec<Option<StoredData>> =
        complete.iter().map(|place| here(&flat[*place])).collect();
    let absent: Vec<usize> = (0..kept.len()).filter(|place| kept[*place].is_none()).collect();
    if !absent.is_empty() {
        let keys: Vec<DedupKey> =
            absent.iter().map(|place| flat[complete[*place]].clone()).collect();
        let found = recaller.ask(context, events, keys).await?;
        for (place, found) in absent.into_iter().zip(found) {
            kept[place] = found;
        }
    }
    let mut response = None;
    let terms = context.terms();
    for (place, kept) in complete.into_iter().zip(kept) {
        let Answer::Duplicate(seen) = answers[place] else { continue };
        let Some(kept) = kept else {
            answers[place] = Answer::InFlight;
            continue;
        };
        let key = &flat[place];
        let asked = terms.stored_data_for(key).and_then(|asked| asked.payload_sha256);
        if let (Some(asked), Some(was)) = (asked, kept.payload_sha256)
            && asked != was
        {
            answers[place] = Answer::Mismatch(seen);
        }
        if let [only] = events
            && (response.is_none() || only.key() == key)
        {
            response = kept.response.or(response);
        }
    }
    Ok(response.filter(|_| context.replays))
}
