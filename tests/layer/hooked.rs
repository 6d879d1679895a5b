//! [`Hooked`]: a store in memory whose calls a test delays, counts or fails.

use std::future::Future;

use futures_util::future::BoxFuture;
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::contract::{
    Abilities, CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply, StoreFuture,
};
use tower_dedup::testing::StoreCall;
use tower_dedup::{DedupKey, StoreError};

type Done = Result<(), StoreError>;
type Hook = Box<dyn Fn(&DedupKey, &CallTerms) -> BoxFuture<'static, Done> + Send + Sync>;

pub(crate) const BEFORE: bool = false;
pub(crate) const AFTER: bool = true;

/// For a store of keys only.
pub(crate) const NO_STORED_DATA: fn(&mut Abilities) = |it| it.stored_data = false;

#[derive(Default)]
pub(crate) struct Hooked {
    pub(crate) store: MemoryAdapter,
    /// Each with its call, and whether it comes after the store has executed the call.
    hooks: Vec<(StoreCall, bool, Hook)>,
    /// An open transaction holds each row.
    pub(crate) is_held: bool,
    /// Takes abilities away.
    pub(crate) lacks: Option<fn(&mut Abilities)>,
}

impl Hooked {
    /// Adds a hook [`BEFORE`] or [`AFTER`] the calls of this kind. Its error is the reply. Before a call, nothing is executed
    /// then.
    pub(crate) fn on<F: Future<Output = Done> + Send + 'static>(
        mut self,
        is_after: bool,
        call: StoreCall,
        hook: impl Fn(&DedupKey, &CallTerms) -> F + Send + Sync + 'static,
    ) -> Self {
        let hook: Hook = Box::new(move |key, terms| Box::pin(hook(key, terms)));
        self.hooks.push((call, is_after, hook));
        self
    }

    fn run<'a, T: Send + 'a>(
        &'a self,
        call: StoreCall,
        key: &'a DedupKey,
        terms: &'a CallTerms,
        execute: StoreFuture<'a, T>,
    ) -> StoreFuture<'a, T> {
        let hooked = move |at| {
            let hook = self.hooks.iter().find(|(of, is_after, _)| (*of, *is_after) == (call, at));
            hook.map(|(.., hook)| hook(key, terms))
        };
        Box::pin(async move {
            if let Some(hook) = hooked(BEFORE) {
                hook.await?;
            }
            let reply = execute.await;
            if let Some(hook) = hooked(AFTER) {
                hook.await?;
            }
            reply
        })
    }
}

impl DedupAdapter for Hooked {
    fn abilities(&self) -> Abilities {
        let mut abilities = self.store.abilities();
        if let Some(lacks) = self.lacks {
            lacks(&mut abilities);
        }
        abilities
    }

    fn claim<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ClaimReply> {
        self.run(StoreCall::Claim, key, terms, self.store.claim(key, terms))
    }

    fn release<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ()> {
        self.run(StoreCall::Release, key, terms, self.store.release(key, terms))
    }

    fn renew<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, RenewReply> {
        if self.is_held {
            return self.run(
                StoreCall::Renew,
                key,
                terms,
                Box::pin(async { Ok(RenewReply::Locked) }),
            );
        }
        self.run(StoreCall::Renew, key, terms, self.store.renew(key, terms))
    }

    fn complete<'a>(
        &'a self,
        key: &'a DedupKey,
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, CompleteReply> {
        self.run(StoreCall::Complete, key, terms, self.store.complete(key, terms))
    }
}
