//! [`FaultyAdapter`]: a store with faults.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::adapter::around::{Around, adapter_around};
use crate::adapter::contract::{
    Abilities, CallTerms, ClaimReply, CompleteReply, Completion, DedupAdapter, Fetch, RenewReply,
    StoreFuture, TransactionAdapter,
};
use crate::adapter::maintenance::{
    Entry, ForgetReply, ListFilter, Listing, MaintenanceAdapter, Stats,
};
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;

/// What a [`FaultyAdapter`] does with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Fault {
    /// Executes the call and returns its reply.
    #[default]
    None,
    /// Returns [`StoreErrorKind::Unavailable`] and executes nothing.
    Fail,
    /// Never replies and executes nothing.
    Hang,
    /// Executes the call and never replies.
    LoseReply,
    /// Executes the call and returns [`StoreErrorKind::Corrupt`], as if its reply were unreadable.
    ExecuteAndFail,
    /// Panics and executes nothing.
    Panic,
}

/// The calls of a store that can have a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreCall {
    /// [`DedupAdapter::claim`].
    Claim,
    /// A claim that fetches stored data: see [`CallTerms::fetch`]. It is a [`Claim`](Self::Claim)
    /// too. A fault of `Fetch` hides the fault of `Claim`.
    Fetch,
    /// [`DedupAdapter::renew`].
    Renew,
    /// [`DedupAdapter::complete`].
    Complete,
    /// [`DedupAdapter::release`].
    Release,
}

const CALLS: usize = 5;

/// Wraps an adapter, and gives its calls the faults that a test sets.
///
/// Not `Clone`: share the adapter in an [`Arc`](std::sync::Arc), which is an adapter too.
///
/// # Example
///
/// ```
/// # #[cfg(feature = "memory")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use std::sync::Arc;
/// use axum::{Router, routing::post};
/// use tower_dedup::adapter::MemoryAdapter;
/// use tower_dedup::testing::{self, Fault, FaultyAdapter, StoreCall};
/// use tower_dedup::{DedupLayer, provider};
///
/// let store = Arc::new(FaultyAdapter::new(MemoryAdapter::new()));
/// let dedup = DedupLayer::new(provider::GITHUB, Arc::clone(&store));
/// let app: Router = Router::new().route("/", post(async || "done").layer(dedup));
///
/// store.set_nth(StoreCall::Claim, 1, Fault::Fail);
/// let event = testing::request(provider::GITHUB, "/", "5b1f");
/// let responses = testing::redeliver(app, event, 3).await;
/// assert_eq!(responses.statuses(), [503, 200, 200]);
/// assert_eq!(store.calls(StoreCall::Claim), 3);
/// # });
/// ```
#[derive(Debug)]
pub struct FaultyAdapter<A> {
    inner: A,
    calls: Mutex<[FaultPlan; CALLS]>,
}

/// The calls of one kind.
#[derive(Debug, Clone, Default)]
struct FaultPlan {
    made: u64,
    /// The fault of each call that `planned` does not name.
    fault: Fault,
    /// The faults of later calls, by their numbers, counted from 1.
    planned: BTreeMap<u64, Fault>,
}

impl FaultPlan {
    fn next(&mut self) -> Fault {
        self.made += 1;
        self.planned.remove(&self.made).unwrap_or(self.fault)
    }
}

impl<A> FaultyAdapter<A> {
    /// Wraps an adapter. There are no faults until one is set.
    #[must_use]
    pub fn new(inner: A) -> Self {
        Self { inner, calls: Mutex::default() }
    }

    /// Sets the fault of every later call of one kind. [`Fault::None`] ends it.
    pub fn set(&self, call: StoreCall, fault: Fault) {
        self.lock()[call as usize].fault = fault;
    }

    /// Sets the fault of every later call of every kind, except those of
    /// [`set_nth`](Self::set_nth). [`Fault::None`] ends it.
    pub fn set_all(&self, fault: Fault) {
        for calls in self.lock().iter_mut() {
            calls.fault = fault;
        }
    }

    /// Sets the fault of one later call: 1 is the next call of this kind.
    ///
    /// Panics if `n` is 0.
    #[track_caller]
    pub fn set_nth(&self, call: StoreCall, n: u64, fault: Fault) {
        assert!(n > 0, "the next call has the number 1");
        let calls = &mut self.lock()[call as usize];
        calls.planned.insert(calls.made.saturating_add(n), fault);
    }

    /// Returns how many calls of one kind were made, with those that had a fault.
    #[must_use]
    pub fn calls(&self, call: StoreCall) -> u64 {
        self.lock()[call as usize].made
    }

    /// Returns the wrapped adapter, whose calls have no faults.
    #[must_use]
    pub fn get_ref(&self) -> &A {
        &self.inner
    }

    fn lock(&self) -> MutexGuard<'_, [FaultPlan; CALLS]> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self, call: StoreCall) -> Fault {
        self.lock()[call as usize].next()
    }
}

impl<A: Send + Sync> Around for FaultyAdapter<A> {
    type Inner = A;

    fn inner(&self) -> &A {
        &self.inner
    }

    fn around<'a, T: Send + 'a>(
        &'a self,
        method: &'static str,
        terms: &'a CallTerms,
        make: impl FnOnce(&'a A) -> StoreFuture<'a, T> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        let kind = match method {
            "claim" => StoreCall::Claim,
            "renew" => StoreCall::Renew,
            "complete" => StoreCall::Complete,
            "release" => StoreCall::Release,
            _ => return make(&self.inner),
        };
        let is_fetch = kind == StoreCall::Claim && terms.fetch() != Fetch::Nothing;
        let failed = |kind| Err(StoreError::new(kind, "calling a faulty adapter"));
        Box::pin(async move {
            let mut fault = self.next(kind);
            if is_fetch {
                let of_fetch = self.next(StoreCall::Fetch);
                fault = if of_fetch == Fault::None { fault } else { of_fetch };
            }
            match fault {
                Fault::None => make(&self.inner).await,
                Fault::Fail => failed(StoreErrorKind::Unavailable),
                Fault::Hang => pending().await,
                Fault::LoseReply => {
                    let _ = make(&self.inner).await;
                    pending().await
                }
                Fault::ExecuteAndFail => {
                    let _ = make(&self.inner).await;
                    failed(StoreErrorKind::Corrupt)
                }
                Fault::Panic => panic!("the adapter was told to panic"),
            }
        })
    }
}

adapter_around!(FaultyAdapter);

impl<A: TransactionAdapter> TransactionAdapter for FaultyAdapter<A> {}
