//! Runs a case within a bound, and shows the last calls of a case that fails: their keys, cursors and replies.

use std::any::{Any, TypeId};
use std::collections::VecDeque;
use std::fmt::{self, Debug};
use std::future::Future;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use futures_util::FutureExt;

use super::store::{HandlerTransaction, RemoteStore, Store, Transactional, runtime};
use crate::adapter::around::{Around, Call, adapter_around};
use crate::adapter::contract::{
    Abilities, CallTerms, ClaimReply, CompleteReply, Completion, DedupAdapter, RenewReply,
    StoreFuture,
};
use crate::adapter::inspect::{Entry, ForgetReply, ListFilter, Listing, MaintenanceAdapter, Stats};
use crate::error::StoreError;
use crate::key::DedupKey;

/// How long a case may take, with its store.
const DEADLINE: Duration = Duration::from_secs(180);
const CREATED_WITHIN: Duration = Duration::from_secs(60);
/// How many calls a failure shows, and how many characters of each.
const SHOWN: usize = 16;
const LENGTH: usize = 300;

/// The types of the stores that could not be created: their other cases fail at once.
static NOT_CREATED: Mutex<Vec<TypeId>> = Mutex::new(Vec::new());

/// Runs a case with a fresh store, in a thread of its own: a store that hangs, even in its drop, fails the case.
///
/// Panics if the case does, or if it does not end in time.
#[expect(clippy::print_stderr, reason = "the test harness shows it for a test that failed")]
pub(super) fn run<S: Store, F: Future<Output = ()> + 'static>(
    name: &str,
    case: impl FnOnce(Case<S>) -> F + Send + 'static,
) {
    let (trace, (running, ended)) = (Arc::<Trace>::default(), mpsc::channel::<()>());
    let kept = Arc::clone(&trace);
    let body = move || {
        let _running = running;
        runtime().block_on(async { case(Case { store: created().await, trace: kept }).await });
    };
    let thread = thread::Builder::new().name(name.to_owned()).spawn(body).expect("a thread");
    let ended = ended.recv_timeout(DEADLINE);
    let is_over = ended == Err(RecvTimeoutError::Disconnected);
    assert!(is_over, "{name}: the case has no end within {DEADLINE:?}.\n{trace}");
    if let Err(panic) = thread.join() {
        eprintln!("{trace}");
        resume_unwind(panic);
    }
}

async fn created<S: Store>() -> S {
    let not_created = || NOT_CREATED.lock().unwrap_or_else(PoisonError::into_inner);
    let has_failed = not_created().contains(&TypeId::of::<S>());
    assert!(!has_failed, "see `store_can_be_created`: a store was not created");
    let created = AssertUnwindSafe(S::create()).catch_unwind();
    let failed: Box<dyn Any + Send> = match tokio::time::timeout(CREATED_WITHIN, created).await {
        Ok(Ok(store)) => return store,
        Ok(Err(panic)) => panic,
        Err(_) => Box::new(format!("no store within {CREATED_WITHIN:?}")),
    };
    not_created().push(TypeId::of::<S>());
    resume_unwind(failed)
}

/// The last calls of a case.
#[derive(Debug, Default)]
struct Trace(Mutex<VecDeque<(usize, String)>>);

impl Trace {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(usize, String)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a call begins. Returns its number.
    fn begin(&self, call: String) -> usize {
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

/// A store of one case, which notes the calls.
#[derive(Debug)]
pub(super) struct Case<S> {
    store: S,
    trace: Arc<Trace>,
}

impl<S: Store> Case<S> {
    fn traced(&self, adapter: Arc<S::Adapter>) -> Arc<Traced<S::Adapter>> {
        Arc::new(Traced { adapter, trace: Arc::clone(&self.trace) })
    }
}

impl<S: Store> Store for Case<S> {
    type Adapter = Traced<S::Adapter>;

    async fn create() -> Self {
        Self { store: created().await, trace: Arc::default() }
    }

    fn adapter(&self) -> Arc<Self::Adapter> {
        self.traced(self.store.adapter())
    }

    async fn advance(&self, by: Duration) {
        self.trace.begin(format!("(time passes: {by:?})"));
        self.store.advance(by).await;
    }

    async fn set_back(&self, by: Duration) {
        self.trace.begin(format!("(the clock is set back: {by:?})"));
        self.store.set_back(by).await;
    }

    async fn hold(&self, key: &DedupKey) -> Box<dyn Any + Send> {
        self.trace.begin(format!("(a transaction holds {})", key.id()));
        self.store.hold(key).await
    }

    async fn corrupt(&self, key: &DedupKey) {
        self.trace.begin(format!("(the response of {} is corrupted)", key.id()));
        self.store.corrupt(key).await;
    }
}

impl<S: Transactional> Transactional for Case<S> {
    async fn transaction(&self) -> Box<dyn HandlerTransaction> {
        self.store.transaction().await
    }
}

impl<S: RemoteStore> RemoteStore for Case<S> {
    fn server(&self) -> (String, u16) {
        self.store.server()
    }

    async fn connect(&self, port: u16) -> Arc<Self::Adapter> {
        self.traced(self.store.connect(port).await)
    }
}

/// An adapter that notes its calls.
#[derive(Debug)]
pub(super) struct Traced<A: ?Sized> {
    trace: Arc<Trace>,
    adapter: Arc<A>,
}

impl<A: ?Sized + Send + Sync> Around for Traced<A> {
    type Inner = A;

    fn inner(&self) -> &A {
        &self.adapter
    }

    fn around<'a, T: Debug + Send + 'a>(
        &'a self,
        call: Call<'a>,
        make: impl FnOnce(&'a A) -> StoreFuture<'a, T> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        let future = make(&self.adapter);
        Box::pin(async move {
            let number = self.trace.begin(text(call));
            let reply = future.await;
            self.trace.end(number, &reply);
            reply
        })
    }
}

fn text(call: Call<'_>) -> String {
    match call {
        Call::Delivery(method, key, terms) => {
            let (namespace, id) = (key.namespace(), key.id());
            format!("{method} {namespace} {id:?}, {:?} {:?}", terms.token(), terms.permanence())
        }
        Call::Operator(method, key) => format!("{method} {:?}", key.id()),
        Call::Purge(limit) => format!("purge {limit}"),
        Call::List(filter, after, limit) => {
            format!("list after {after:?}, at most {limit}, {filter:?}")
        }
        Call::Stats => "stats".to_owned(),
    }
}

adapter_around!(Traced: ?Sized);
