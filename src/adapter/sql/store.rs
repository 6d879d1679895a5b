//! [`SqlStore`]: what a database writes to be a store. [`DedupAdapter`] is implemented here, once
//! for all databases.
//!
//! All databases share the meaning of a [row](super::row), the [queue](super::queue) of calls, how
//! a [batch](super::batch) becomes statements, the [purge](super::purge), and the columns of [lists
//! and statistics](super::inspection). A database is a plain module beside this one, with a folder
//! of statements. One more database would write, after the model of the module `sqlite`:
//!
//! 1. `options`: a public type over [`SqlOptions`](super::options::SqlOptions).
//! 2. `statements` and `sql/*.sql`: the table, and one statement for each thing that a call does to
//!    a row.
//! 3. `params`: keys and their terms as parameters, and a [`Row`] from the columns of a row.
//! 4. `session`: [`RowExecutor`], which gives the keys of a batch their replies by these
//!    statements.
//! 5. `store`: the connections and the table, with [`SqlStore`].
//! 6. `adapter`: the public type, with its constructors, [`SqlAdapter`] and `TransactionAdapter`.
//! 7. `inspection`: [`MaintenanceAdapter`], over [`ready`].

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sqlx::{Database, Pool};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot};
use tokio_util::sync::CancellationToken;

use super::super::contract::{
    Abilities, CallTerms, ClaimReply, CompleteReply, Completion, DedupAdapter, Fetch, RenewReply,
    StoreFuture,
};
use super::super::maintenance::MaintenanceAdapter;
use super::batch::{Call, Kind, RowExecutor, RowReply, execute_batch, missing_reply};
use super::options::SqlOptions;
use super::purge::{Purging, is_clock_paused};
use super::queue::{BatchExecutor, Batcher, Bounds};
use super::row::Row;
use crate::error::{ConfigError, StoreError, StoreErrorKind};
use crate::key::DedupKey;

/// The operation that reads a stored response, for the text of an error.
pub(crate) const READING_RESPONSE: &str = "reading a stored response";

/// The state of a store that does not depend on the database.
pub(crate) struct Common {
    calls: Batcher<Arc<Call>>,
    /// The result of checking the options.
    checked: Result<(), ConfigError>,
    /// Whether the table was found.
    has_table: AtomicBool,
    purging: Purging,
    /// Its permit is that of the task that purges. Closed with the adapter: each call asks, and
    /// asking `stop` takes a lock.
    free: Arc<Semaphore>,
    stop: CancellationToken,
}

impl Common {
    /// `checked` is the error of every call if an option is invalid.
    pub(crate) fn new(
        options: &SqlOptions,
        bounds: Bounds,
        checked: Result<(), ConfigError>,
    ) -> Self {
        Self {
            calls: Batcher::new(bounds),
            checked,
            has_table: AtomicBool::new(false),
            purging: options.purging,
            free: Arc::new(Semaphore::new(1)),
            stop: CancellationToken::new(),
        }
    }

    pub(crate) fn has_table(&self) -> bool {
        self.has_table.load(Ordering::Acquire)
    }

    /// Notes that the table is there. It is not looked for again.
    pub(crate) fn set_has_table(&self) {
        self.has_table.store(true, Ordering::Release);
    }

    /// Ends the task that purges after its current statement, for good. Later calls fail.
    pub(crate) fn stop(&self) {
        self.free.close();
        self.stop.cancel();
    }
}

impl Drop for Common {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A store of keys in a database.
///
/// A call is made once [`prepare`](Self::prepare) has found the table. A [`session`](Self::session)
/// executes a batch.
pub(crate) trait SqlStore: Send + Sync + 'static {
    /// The kind of its pool.
    type Database: Database;

    /// Sends the rows of a batch.
    type Session: RowExecutor + 'static;

    fn common(&self) -> &Common;

    /// Returns the pool with which the store ends.
    fn pool(&self) -> &Pool<Self::Database>;

    /// Closes what would keep a pool open that the user has closed.
    fn on_pool_closed(&self) {}

    /// Finds the table, or makes it where the options allow it. Calls [`Common::set_has_table`].
    fn prepare(self: &Arc<Self>) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Returns the number by which the rows of a batch are sorted, so that no two batches deadlock.
    fn hash(key: &DedupKey) -> u128;

    /// Waits until a batch may be sent. A call does not count as sent before. An `alone` session
    /// sends one call that its batch has passed over ([`RowReply::Locked`]), and waits for the row.
    fn session(
        self: &Arc<Self>,
        alone: bool,
    ) -> impl Future<Output = Result<Self::Session, StoreError>> + Send;

    /// Returns the reply to a claim that need not be queued, because it finds its key complete or
    /// in flight.
    fn look_up(
        self: &Arc<Self>,
        key: &DedupKey,
        terms: &CallTerms,
    ) -> impl Future<Output = Result<Option<ClaimReply>, StoreError>> + Send {
        let _ = (key, terms);
        async { Ok(None) }
    }

    /// Reads a row with its response, where a write would see it.
    ///
    /// Responses are large, and a batch has many callers. So a batch reads at most digests, and
    /// each caller reads its own response afterwards. The store bounds how many read at once.
    fn read_response(
        self: &Arc<Self>,
        key: &DedupKey,
    ) -> impl Future<Output = Result<Option<Row>, StoreError>> + Send;

    /// Makes the statement that completes these keys in a handler's transaction: see
    /// [`DedupAdapter::completion`].
    fn completion(&self, keys: &[(&DedupKey, &CallTerms)]) -> Completion;
}

/// The public handle of a store.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an adapter: `DedupAdapter` is not implemented for it"
)]
pub(crate) trait SqlAdapter: MaintenanceAdapter {
    type Store: SqlStore;

    fn of(store: Arc<Self::Store>) -> Self;

    fn store(&self) -> &Arc<Self::Store>;
}

/// Returns the store once it may be called. Purges in the background from now on.
pub(crate) async fn ready<A: SqlAdapter>(adapter: &A) -> Result<&Arc<A::Store>, StoreError> {
    let store = usable(adapter)?;
    if !store.common().has_table() {
        // Boxed, because it is rare, and each call of a list is a future of its own.
        Box::pin(store.prepare()).await?;
    }
    Ok(store)
}

/// Returns the store, unless it is closed or has an invalid option. Purges in the background from
/// now on.
pub(crate) fn usable<A: SqlAdapter>(adapter: &A) -> Result<&Arc<A::Store>, StoreError> {
    let (store, common) = (adapter.store(), adapter.store().common());
    if common.free.is_closed() || store.pool().is_closed() {
        let text = "using an adapter that was closed";
        return Err(StoreError::new(StoreErrorKind::Unavailable, text));
    }
    if let Err(error) = &common.checked {
        return Err(
            StoreError::new(StoreErrorKind::Config, "using an adapter").with_source(error.clone())
        );
    }
    ensure_purging::<A>(store);
    Ok(store)
}

/// Starts the task that purges on the current runtime, unless there is one. Each call asks. The
/// task ends with its runtime, with the pool, after [`SqlStore::on_pool_closed`], or with the
/// store, which it does not own.
fn ensure_purging<A: SqlAdapter>(store: &Arc<A::Store>) {
    let common = store.common();
    if common.free.available_permits() == 0 {
        return;
    }
    let Ok(runtime) = Handle::try_current() else { return };
    // A runtime that ends drops the task with its permit, and the next call starts a task again;
    // not so once it is closed.
    let Ok(permit) = Arc::clone(&common.free).try_acquire_owned() else { return };
    let (purging, stop) = (common.purging, common.stop.clone());
    let (closed, store) = (store.pool().close_event(), Arc::downgrade(store));
    let purged = store.clone();
    let adapter = move || purged.upgrade().filter(|_| !is_clock_paused()).map(A::of);
    let purge = purging.run(adapter, stop.clone());
    let purges = !purging.is_off() && !is_clock_paused();
    runtime.spawn(async move {
        let _permit = permit;
        tokio::select! {
            // First, so that a statement which finds the pool closed is no failure.
            biased;
            () = closed => drop(store.upgrade().map(|store| store.on_pool_closed())),
            () = purge, if purges => {}
            () = stop.cancelled(), if !purges => {}
        }
    });
}

impl<S: SqlStore> BatchExecutor<Arc<Call>> for S {
    type SendGuard = S::Session;

    async fn send_guard(self: &Arc<Self>) -> Result<S::Session, StoreError> {
        self.session(false).await
    }

    async fn execute(
        self: &Arc<Self>,
        mut session: S::Session,
        batch: Vec<Arc<Call>>,
    ) -> Vec<Result<RowReply, StoreError>> {
        execute_batch(&mut session, &batch).await
    }
}

/// Sends a call in a batch. If its batch has passed over the row, sends it alone, where no other
/// call waits for the row.
async fn call<S: SqlStore>(
    store: &Arc<S>,
    kind: Kind,
    key: &DedupKey,
    terms: &CallTerms,
) -> Result<RowReply, StoreError> {
    let call = Call::new(kind, key, terms, S::hash(key));
    let reply = store.common().calls.submit(store, Arc::clone(&call)).await?;
    if !matches!(reply, RowReply::Locked) {
        return Ok(reply);
    }
    let (store, call) = (Arc::clone(store), Arc::clone(&call));
    let session = async move { store.session(true).await };
    let send = move |mut session: S::Session| async move {
        execute_batch(&mut session, &[call]).await.pop().unwrap_or_else(|| Err(missing_reply()))
    };
    in_task(session, send).await.unwrap_or_else(|| Err(kind.unknown()))
}

/// Does `work` once `right` is there, in a task of its own: a caller may leave its future unpolled,
/// or drop it, which would break off a statement. Returns `None` if the runtime ends.
///
/// A caller that is dropped while it waits for the right has changed nothing, and changes nothing.
pub(crate) async fn in_task<G, T, F>(
    right: impl Future<Output = Result<G, StoreError>> + Send + 'static,
    work: impl FnOnce(G) -> F + Send + 'static,
) -> Option<Result<T, StoreError>>
where
    G: Send,
    T: Send + 'static,
    F: Future<Output = Result<T, StoreError>> + Send,
{
    let (mut reply, replied) = oneshot::channel();
    tokio::spawn(async move {
        let right = tokio::select! {
            biased;
            () = reply.closed() => return,
            right = right => right,
        };
        let done = match right {
            Ok(right) => work(right).await,
            Err(error) => Err(error),
        };
        // The caller may be gone.
        let _ = reply.send(done);
    });
    replied.await.ok()
}

/// Claims a key. Reads the response of a duplicate, if its terms fetch responses: a row that is no
/// longer complete, or whose response is on its way, is in flight.
async fn claim<S: SqlStore>(
    store: &Arc<S>,
    key: &DedupKey,
    terms: &CallTerms,
) -> Result<ClaimReply, StoreError> {
    let claimed = match store.look_up(key, terms).await? {
        Some(known) => known,
        None => match call(store, Kind::claim(terms), key, terms).await? {
            RowReply::Claimed(claimed, _) => claimed,
            _ => return Err(missing_reply()),
        },
    };
    let is_duplicate = |reply: &ClaimReply| matches!(reply, ClaimReply::Duplicate(_));
    if terms.fetch() != Fetch::DigestAndResponse || !is_duplicate(&claimed) {
        return Ok(claimed);
    }
    // The next statement may fail or time out, and no handler may run for a known duplicate.
    terms.note_duplicate();
    // Boxed, because most calls read nothing.
    let row = Box::pin(store.read_response(key)).await?.filter(|row| !row.awaits_response());
    let reply = row.map(|row| row.claimed(terms)).transpose()?;
    Ok(reply.flatten().filter(is_duplicate).unwrap_or(ClaimReply::InFlight))
}

/// Makes a call, and returns its reply, as `of` finds it in the reply of a row.
async fn reply<A: SqlAdapter, T>(
    adapter: &A,
    kind: Kind,
    key: &DedupKey,
    terms: &CallTerms,
    of: fn(RowReply) -> Option<T>,
) -> Result<T, StoreError> {
    of(call(ready(adapter).await?, kind, key, terms).await?).ok_or_else(missing_reply)
}

impl<A: SqlAdapter> DedupAdapter for A {
    fn abilities(&self) -> Abilities {
        Abilities {
            leases: true,
            stored_data: true,
            inspection: true,
            completion: true,
            ..Abilities::default()
        }
    }

    fn claim<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ClaimReply> {
        Box::pin(async move { claim(ready(self).await?, key, terms).await })
    }

    fn release<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ()> {
        let of = |reply| matches!(reply, RowReply::Released).then_some(());
        Box::pin(reply(self, Kind::Release, key, terms, of))
    }

    fn renew<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, RenewReply> {
        let of = |reply| if let RowReply::Renewed(renewed) = reply { Some(renewed) } else { None };
        Box::pin(reply(self, Kind::Renew, key, terms, of))
    }

    fn complete<'a>(
        &'a self,
        key: &'a DedupKey,
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, CompleteReply> {
        let of = |reply| if let RowReply::Completed(reply) = reply { Some(reply) } else { None };
        Box::pin(reply(self, Kind::Complete, key, terms, of))
    }

    fn completion(&self, keys: &[(&DedupKey, &CallTerms)]) -> Result<Completion, StoreError> {
        Ok(self.store().completion(keys))
    }

    fn is_complete<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, bool> {
        let of = |reply| if let RowReply::Checked(is) = reply { Some(is) } else { None };
        Box::pin(reply(self, Kind::Check, key, terms, of))
    }
}
