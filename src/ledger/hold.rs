//! [`AnyLedger`]: what the deliveries of one ledger share. [`Hold`]: the keys that a delivery may
//! hold at the store.

use std::fmt;
use std::future::Future;
use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::task::TaskTracker;

use super::arrival::{Arrivals, Doubt};
use super::background::{Background, Pending, RetryJob, Write};
use super::call::{self, Calls, Claimed};
use super::contract::{Ledger, LedgerKind};
use super::renewal::Renewals;
use super::times::Times;
use crate::adapter::contract::{
    Abilities, ClaimReply, DedupAdapter, Permanence, Seen, StoredData, Token,
};
use crate::adapter::{DuplicateNote, KeyedTerms, Terms};
use crate::error::{ConfigError, StoreError, StoreErrorKind, check};
use crate::key::{DedupKey, Event, List};
use crate::observe::Meters;

/// A ledger of any kind. Layers and their clones share it.
pub(crate) struct AnyLedger {
    pub(super) kind: LedgerKind,
    adapter: Arc<dyn DedupAdapter>,
    abilities: Abilities,
    pub(super) renewals: Arc<Renewals>,
    /// Keys that succeeded in this process and are not completed in the store yet, with the data of
    /// their completion.
    pub(super) completing: Arc<Pending<StoredData>>,
    arrivals: Arc<Arrivals>,
    /// The writes that continue after the answer.
    pub(super) background: Background,
}

impl AnyLedger {
    /// Makes the ledger of this kind over a store.
    pub(crate) fn of<L: Ledger>(adapter: impl DedupAdapter) -> Arc<Self> {
        Arc::new(Self {
            kind: L::KIND,
            abilities: adapter.abilities(),
            adapter: Arc::new(adapter),
            renewals: Arc::default(),
            completing: Arc::default(),
            arrivals: Arc::default(),
            background: Background::new(L::KIND),
        })
    }

    #[cfg(feature = "testing")]
    pub(crate) fn adapter(&self) -> &dyn DedupAdapter {
        &*self.adapter
    }

    /// Makes the calls of one delivery under these times, with a token of its own. `after` is the
    /// bound on what follows the handler before the commit.
    pub(crate) fn calls(&self, times: &Times, after: Duration, meters: &Arc<Meters>) -> Calls {
        let Times { retention, lease, store_timeout: bound, handler_timeout } = *times;
        let permanence = match self.kind {
            LedgerKind::OnArrival => Permanence::OnClaim,
            LedgerKind::Lease | LedgerKind::Transactional => Permanence::OnCompletion { lease },
        };
        let most = |handler: Duration| handler.saturating_add(after).saturating_add(bound);
        Calls {
            adapter: Arc::clone(&self.adapter),
            abilities: self.abilities,
            terms: Terms::new(Token::random(), retention, permanence),
            meters: Arc::clone(meters),
            replay: None,
            fails_open: false,
            bound,
            handler_bound: handler_timeout.map_or(Duration::ZERO, most),
        }
    }

    /// # Errors
    ///
    /// An adapter that lacks an ability which the ledger needs, or keys or times that it does not
    /// take.
    pub(crate) fn check(
        &self,
        times: &Times,
        has_second_identity: bool,
    ) -> Result<(), ConfigError> {
        let needs = |is_met: bool, rule| {
            if is_met { Ok(()) } else { Err(ConfigError::new(rule)) }
        };
        if self.kind == LedgerKind::OnArrival {
            let rule = "one identity of an event on arrival, and not a second one";
            return needs(!has_second_identity, rule);
        }
        needs(self.abilities.leases, "the adapter does not support leases")?;
        // A row that expires before its lease is over tells no takeover, and counts no attempts.
        let Times { retention, lease, .. } = times;
        check(retention >= lease, "retention", "at least the lease", retention)?;
        let completes = !self.demands_commit() || self.abilities.completion;
        needs(completes, "the adapter completes no events in a handler's transaction")
    }

    /// Returns `true` if a success must have completed its events in a transaction.
    pub(crate) fn demands_commit(&self) -> bool {
        self.kind == LedgerKind::Transactional
    }

    /// Returns `true` if the adapter stores payload digests and responses.
    pub(crate) fn stores_data(&self) -> bool {
        self.abilities.stored_data
    }

    /// Returns the writes that continue in the background.
    #[must_use]
    pub(crate) fn pending_writes(&self) -> &TaskTracker {
        &self.background.tasks
    }
}

impl fmt::Debug for AnyLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AnyLedger").field(&self.kind).finish()
    }
}

/// The keys that a delivery may hold at the store. If it is dropped, they are released in the
/// background.
///
/// A call of unknown outcome may hold its key, and so may a call whose future was dropped.
pub(super) struct Hold<'l> {
    ledger: &'l AnyLedger,
    pub(super) calls: Calls,
    pub(super) keys: List<KeyedTerms>,
    /// Set by a store, or by a reply, that tells of another delivery: none of the events runs
    /// unprotected then. `None` if the calls do not fail open.
    note: Option<DuplicateNote>,
    /// Boxed, because most ledgers have none.
    doubt: Option<Box<Doubt>>,
}

impl<'l> Hold<'l> {
    pub(super) fn new(ledger: &'l AnyLedger, calls: Calls, keys: List<KeyedTerms>) -> Self {
        let note = calls.fails_open.then(DuplicateNote::default);
        Self { ledger, calls, keys, note, doubt: None }
    }

    /// Returns an identity of an event, to be claimed.
    pub(super) fn asking(&self, event: &Event, identity: &DedupKey) -> KeyedTerms {
        let mut asked = self.calls.keyed(event, identity);
        asked.terms.note = self.note.clone();
        asked
    }

    /// Claims these keys, each by a call of its own, and holds them until all have their replies. A
    /// key that is complete for this process is not claimed, nor is a key on arrival that could not
    /// be released.
    pub(super) fn claim(
        &mut self,
        mut asked: List<KeyedTerms>,
    ) -> impl Future<Output = List<Claimed>> + Send {
        let pending = self.ledger.completing.split(&mut asked);
        let before = self.keys.len();
        self.keys.append(&mut asked);
        async move {
            if self.ledger.kind == LedgerKind::OnArrival {
                let AnyLedger { arrivals, background, .. } = self.ledger;
                let (asked, own) = (&self.keys[before..], self.calls.terms.token);
                match Doubt::begin(arrivals, background, asked, own) {
                    Ok(doubt) => self.doubt = Some(Box::new(doubt)),
                    Err(error) => {
                        let asked = self.keys.drain(before..);
                        return asked.map(|it| (it, Err(error.clone()))).collect();
                    }
                }
            }
            let mut replies = self.calls.claim(&self.keys[before..]).await;
            if let Some(doubt) = &self.doubt {
                doubt.apply(&self.keys[before..], &mut replies);
            }
            let mut claimed: List<_> = self.keys.drain(before..).zip(replies).collect();
            // Such an event is complete, as far as this process knows.
            for (at, it, stored) in pending {
                let seen = Seen::new(Duration::ZERO).with_stored(Arc::new(stored));
                claimed.insert(at, (it, Ok(ClaimReply::Duplicate(seen))));
            }
            let is_first = |reply: &ClaimReply| matches!(reply, ClaimReply::First { .. });
            if let Some(note) = &self.note
                && claimed.iter().flat_map(|(_, reply)| reply).any(|reply| !is_first(reply))
            {
                let _ = note.set(());
            }
            claimed
        }
    }

    /// Returns `true` if the handler runs unprotected after this error of a claim.
    ///
    /// [`StoreErrorKind::Corrupt`] never fails open: the unreadable data may belong to a duplicate.
    /// Nor does an error after a reply that tells of another delivery, or after the store has found
    /// a duplicate, when only the read of its response failed.
    pub(super) fn fails_open(&self, error: &StoreError) -> bool {
        let is_unknown = self.note.as_ref().is_some_and(|note| note.get().is_none());
        is_unknown && error.kind() != StoreErrorKind::Corrupt
    }

    /// Returns the keys, which are not released.
    pub(super) fn keep(&mut self) -> List<KeyedTerms> {
        take(&mut self.keys)
    }

    /// Releases the keys. The release continues in the background if it fails, or if this future is
    /// dropped.
    pub(super) async fn release(&mut self) -> Result<(), StoreError> {
        call::all(self.calls.release(&self.keys).await)?;
        self.keep();
        Ok(())
    }

    /// Writes these keys in the background.
    pub(super) fn repeat(&mut self, write: Write, keys: List<KeyedTerms>) {
        let mut doubt = self.doubt.take();
        let slot = doubt.as_mut().and_then(|doubt| doubt.slot.take());
        let job = RetryJob { write, calls: self.calls.clone(), keys };
        self.ledger.background.repeat(slot, job, doubt);
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        let keys = self.keep();
        if keys.is_empty() {
            return;
        }
        if let Some(doubt) = &mut self.doubt {
            doubt.release(&keys);
        }
        self.repeat(Write::Release, keys);
    }
}
