//! [`Traced`]: an adapter that notes its calls. A case that fails shows the last of them: their keys, cursors and replies.

use std::collections::VecDeque;
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::future::BoxFuture;
use tower_dedup::adapter::contract::{
    Abilities, CallTerms, ClaimReply, CompleteReply, Completion, DedupAdapter, RenewReply,
    StoreFuture,
};
use tower_dedup::adapter::maintenance::{
    Entry, ForgetReply, ListFilter, Listing, MaintenanceAdapter, Stats,
};
use tower_dedup::{DedupKey, StoreError};

/// How many calls a failure shows, and how many characters of each.
const SHOWN: usize = 16;
const LENGTH: usize = 300;

/// The last calls of a case.
#[derive(Debug, Default)]
pub(super) struct Trace(Mutex<VecDeque<(usize, String)>>);

impl Trace {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(usize, String)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a call begins. Returns its number.
    pub(super) fn begin(&self, call: String) -> usize {
        let mut noted = self.lock();
        let number = noted.back().map_or(1, |(last, _)| last + 1);
        noted.push_back((number, call));
        if noted.len() > SHOWN {
            noted.pop_front();
        }
        number
    }

    fn end(&self, number: usize, reply: &impl Debug) {
        if let Some((_, call)) = self.lock().iter_mut().find(|(noted, _)| *noted == number) {
            *call += &format!(": {reply:?}");
        }
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("The last calls, and their replies if they ended:")?;
        for (number, call) in &*self.lock() {
            let call: String = call.chars().take(LENGTH).collect();
            write!(f, "\n{number:5} {call}")?;
        }
        Ok(())
    }
}

/// An adapter without its type.
pub(super) enum Adapter {
    Claiming(Arc<dyn DedupAdapter>),
    Maintained(Arc<dyn MaintenanceAdapter>),
}

/// An adapter that notes its calls, and forwards every method.
pub(super) struct Traced {
    adapter: Adapter,
    trace: Arc<Trace>,
}

impl Traced {
    pub(super) fn new(adapter: Adapter, trace: &Arc<Trace>) -> Arc<Self> {
        Arc::new(Self { adapter, trace: Arc::clone(trace) })
    }

    fn adapter(&self) -> &dyn DedupAdapter {
        match &self.adapter {
            Adapter::Claiming(adapter) => &**adapter,
            Adapter::Maintained(adapter) => &**adapter,
        }
    }

    fn maintained(&self) -> &dyn MaintenanceAdapter {
        match &self.adapter {
            Adapter::Maintained(adapter) => &**adapter,
            Adapter::Claiming(_) => panic!("only the cases of `maintenance` make this call"),
        }
    }

    fn noted<'a, T: Debug + Send + 'a>(
        &'a self,
        text: impl FnOnce() -> String + Send + 'a,
        call: StoreFuture<'a, T>,
    ) -> StoreFuture<'a, T> {
        Box::pin(async move {
            let number = self.trace.begin(text());
            let reply = call.await;
            self.trace.end(number, &reply);
            reply
        })
    }
}

/// Defines the method by that of the adapter.
macro_rules! calls {
    ($($method:ident -> $reply:ty),+) => {$(
        fn $method<'a>(
            &'a self,
            key: &'a DedupKey,
            terms: &'a CallTerms,
        ) -> StoreFuture<'a, $reply> {
            let text = || {
                let (namespace, id, method) = (key.namespace(), key.id(), stringify!($method));
                format!("{method} {namespace} {id:?}, {:?} {:?}", terms.token(), terms.permanence())
            };
            self.noted(text, self.adapter().$method(key, terms))
        }
    )+};
}

impl DedupAdapter for Traced {
    fn abilities(&self) -> Abilities {
        self.adapter().abilities()
    }

    calls!(
        claim -> ClaimReply, release -> (), renew -> RenewReply, complete -> CompleteReply,
        is_complete -> bool
    );

    fn completion(&self, keys: &[(&DedupKey, &CallTerms)]) -> Result<Completion, StoreError> {
        self.adapter().completion(keys)
    }
}

impl MaintenanceAdapter for Traced {
    fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
        self.noted(move || format!("purge {limit}"), self.maintained().purge(limit))
    }

    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, ForgetReply> {
        self.noted(|| format!("forget {:?}", key.id()), self.maintained().forget(key))
    }

    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        self.noted(|| format!("get {:?}", key.id()), self.maintained().get(key))
    }

    fn get_many<'a>(&'a self, keys: &'a [DedupKey]) -> StoreFuture<'a, Vec<Option<Entry>>> {
        self.noted(|| format!("get {} keys", keys.len()), self.maintained().get_many(keys))
    }

    fn list<'a>(
        &'a self,
        filter: &'a ListFilter,
        after: Option<&'a str>,
        limit: u32,
    ) -> StoreFuture<'a, Listing> {
        let text = move || format!("list after {after:?}, at most {limit}, {filter:?}");
        self.noted(text, self.maintained().list(filter, after, limit))
    }

    fn stats(&self) -> StoreFuture<'_, Stats> {
        self.noted(|| "stats".to_owned(), self.maintained().stats())
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.maintained().close()
    }
}
