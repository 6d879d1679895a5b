#![doc = include_str!("../README.md")]

mod completion;
mod errors;
mod inspection;
mod row;
mod session;
mod statements;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use sqlx::Row as _;
use sqlx::mysql::{MySqlConnectOptions, MySqlRow};
use tower_dedup::adapter::contract::{
    Abilities, CallTerms, ClaimReply, CompleteReply, Completion, DedupAdapter, RenewReply,
    StoreFuture, TransactionAdapter,
};
use tower_dedup::adapter::maintenance::{
    Entry, ForgetReply, ListFilter, Listing, MaintenanceAdapter, Stats,
};
use tower_dedup::{DedupKey, StoreError, StoreErrorKind};

use crate::errors::store_error;
use crate::row::{Row, Write, fetches_response, handled_at, lease_ms, milliseconds};
use crate::session::{Args, Call, Session};

/// How often a call reads its row again that another call has written meanwhile.
const TRIES: usize = 8;

/// Keeps keys in a table of a database of MariaDB, for all processes of a service.
///
/// A clone is another handle to the same connections.
#[derive(Debug, Clone)]
pub struct MariaDbStore(Arc<Session>);

/// The options of a [`MariaDbStore`].
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// How many connections the store opens at most: 16 by default, at least one.
    pub connections: u32,
    /// How long one statement may take, and how long a call waits for a connection: 5 s by default.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { connections: 16, timeout: Duration::from_secs(5) }
    }
}

impl MariaDbStore {
    /// Connects to the database that a `mysql://` URL names, and makes the table `webhook_deliveries` if there is none.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Config`] for a URL that cannot be read or names no database, and for a server that reads its clock
    /// once a statement. [`StoreErrorKind::Refused`], for a syntax error, from MySQL and before MariaDB 10.6.
    pub async fn connect(url: &str, options: Options) -> Result<Self, StoreError> {
        const CONTEXT: &str = "connecting to MariaDB";
        let connect =
            url.parse::<MySqlConnectOptions>().map_err(|error| store_error(CONTEXT, error))?;
        let session = Arc::new(Session::open(connect, options).await?);
        Call::start(&session, CONTEXT, |call| async move {
            call.check_server().await?;
            call.run(&call.sql().create_table, Args::default()).await.map(drop)
        })
        .await?;
        Ok(Self(session))
    }
}

impl Call {
    async fn read(&self, key: &DedupKey, with_response: bool) -> Result<Option<Row>, StoreError> {
        let args = Args::default().add(with_response).add(with_response).key(key);
        let rows = self.query(&self.sql().read, args).await?;
        rows.first().map(Row::read).transpose().map_err(|error| self.fault(error))
    }

    /// Inserts the row of a claim, or of a completion without attempts. Returns `false` if the key has a row.
    async fn insert(
        &self,
        key: &DedupKey,
        terms: &CallTerms,
        lease: Option<i64>,
        attempts: i64,
    ) -> Result<bool, StoreError> {
        let args = Args::of(key)
            .token(terms)
            .add(attempts)
            .add(terms.event_type().map(str::as_bytes))
            .stored(terms, lease.is_none())
            .add(handled_at(terms))
            .add(lease.is_none())
            .add(handled_at(terms))
            .numbers([lease, Some(handled_at(terms)), Some(milliseconds(terms.retention()))])
            .key(key);
        // A held row is in the way: it can be read.
        let inserted = self.run(&self.sql().insert, args).await?;
        Ok(inserted.is_some_and(|(_, written)| written > 0))
    }

    /// Returns the arguments that write a row at the version that was read.
    fn write(key: &DedupKey, row: &Row, write: &Write, terms: &CallTerms) -> Args {
        let event_type = if write.is_new {
            terms.event_type().map(str::as_bytes)
        } else {
            row.event_type.as_deref()
        };
        Args::default()
            .add(write.token.as_deref())
            .add(write.attempts)
            .add(write.takeover)
            .add(event_type)
            .stored(terms, write.completes)
            .add(write.is_new)
            .add(handled_at(terms))
            .add(write.completes)
            .add(handled_at(terms))
            .add(write.lease)
            .add(write.keeps_retention)
            .add(handled_at(terms))
            .add(milliseconds(terms.retention()))
            .key(key)
            .add(row.version)
    }

    async fn claim(self, key: DedupKey, terms: CallTerms) -> Result<ClaimReply, StoreError> {
        let lease = lease_ms(&terms)?;
        for _ in 0..TRIES {
            // Most keys are new. The row of another key takes a second statement, and a free one a third.
            if self.insert(&key, &terms, lease, 1).await? {
                return Ok(ClaimReply::first(1, false));
            }
            let read = self.read(&key, fetches_response(terms.fetch())).await?;
            let Some(row) = read else { continue };
            let (write, reply) = row.claimed(&terms)?;
            let Some(write) = write else { return Ok(reply) };
            let args = Self::write(&key, &row, &write, &terms);
            match self.run(&self.sql().write, args).await? {
                Some((_, written)) if written > 0 => return Ok(reply),
                // Another call was faster.
                Some(_) => {}
                // A transaction holds a row of the caller's own token, as after a claim whose reply was lost. "In flight"
                // would leave a lease that nobody holds; after an error the layer releases it.
                None if row.is_by(terms.token()) => return Err(self.error(StoreErrorKind::Timeout)),
                None => return Ok(ClaimReply::InFlight),
            }
        }
        Err(self.error(StoreErrorKind::Refused))
    }

    async fn complete(self, key: DedupKey, terms: CallTerms) -> Result<CompleteReply, StoreError> {
        for _ in 0..TRIES {
            let Some(row) = self.read(&key, false).await? else {
                // Without attempts: that shows that it was inserted, also if the completion is repeated.
                if self.insert(&key, &terms, None, 0).await? {
                    return Ok(CompleteReply::Inserted);
                }
                continue;
            };
            let (write, reply) = row.completed(&terms);
            let Some(write) = write else { return Ok(reply) };
            let args = Self::write(&key, &row, &write, &terms);
            if self.run_patiently(&self.sql().write, args).await? > 0 {
                return Ok(reply);
            }
        }
        Err(self.error(StoreErrorKind::Refused))
    }

    async fn renew(self, key: DedupKey, terms: CallTerms) -> Result<RenewReply, StoreError> {
        let lease = Some(lease_ms(&terms)?.unwrap_or_default());
        let args = Args::of(&key)
            .token(&terms)
            .add(terms.event_type().map(str::as_bytes))
            .numbers([lease, Some(milliseconds(terms.retention())), lease]);
        let renewed = self.run(&self.sql().renew, args).await?;
        // "Lost" of a row that a transaction holds would end the lease of its handler.
        let Some((rows, _)) = renewed else { return Ok(RenewReply::Locked) };
        let is_held = |row: &MySqlRow| {
            let token: Option<Vec<u8>> = row.try_get("token")?;
            Ok(token.as_deref() == Some(terms.token().as_bytes()) && row.try_get("is_leased")?)
        };
        let is_held = rows.first().map_or(Ok(false), is_held).map_err(|error| self.fault(error))?;
        Ok(if is_held { RenewReply::Held } else { RenewReply::Lost })
    }

    async fn release(self, key: DedupKey, terms: CallTerms) -> Result<(), StoreError> {
        let statement = match lease_ms(&terms)? {
            Some(_) => &self.sql().release,
            None => &self.sql().release_complete,
        };
        self.run_patiently(statement, Args::of(&key).token(&terms)).await.map(drop)
    }

    async fn completed(self, key: DedupKey, terms: CallTerms) -> Result<bool, StoreError> {
        let args = Args::of(&key).token(&terms);
        Ok(!self.query(&self.sql().is_complete, args).await?.is_empty())
    }
}

impl DedupAdapter for MariaDbStore {
    fn abilities(&self) -> Abilities {
        let mut abilities = Abilities::default();
        abilities.leases = true;
        abilities.stored_data = true;
        abilities.inspection = true;
        abilities.completion = true;
        abilities
    }

    fn claim<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ClaimReply> {
        Call::start(&self.0, "claiming a key", |call| call.claim(key.clone(), terms.clone()))
    }

    fn release<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ()> {
        Call::start(&self.0, "releasing a key", |call| call.release(key.clone(), terms.clone()))
    }

    fn renew<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, RenewReply> {
        Call::start(&self.0, "renewing a lease", |call| call.renew(key.clone(), terms.clone()))
    }

    fn complete<'a>(
        &'a self,
        key: &'a DedupKey,
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, CompleteReply> {
        Call::start(&self.0, "completing a key", |call| call.complete(key.clone(), terms.clone()))
    }

    fn completion(&self, keys: &[(&DedupKey, &CallTerms)]) -> Result<Completion, StoreError> {
        let sql = Arc::clone(&self.0.statements.completion.sql);
        Ok(Completion::new(sql, completion::parameter(keys)))
    }

    fn is_complete<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, bool> {
        Call::start(&self.0, "reading a completion", |call| {
            call.completed(key.clone(), terms.clone())
        })
    }
}

impl TransactionAdapter for MariaDbStore {}

impl MaintenanceAdapter for MariaDbStore {
    fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
        Call::start(&self.0, "purging", move |call| call.purge(limit))
    }

    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, ForgetReply> {
        Call::start(&self.0, "forgetting a key", |call| call.forget(key.clone()))
    }

    fn get<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        Call::start(&self.0, "looking up a key", |call| call.get(key.clone()))
    }

    fn list<'a>(
        &'a self,
        filter: &'a ListFilter,
        after: Option<&'a str>,
        limit: u32,
    ) -> StoreFuture<'a, Listing> {
        Call::start(&self.0, "listing keys", move |call| {
            call.list(filter.clone(), after.map(str::to_owned), limit)
        })
    }

    fn stats(&self) -> StoreFuture<'_, Stats> {
        Call::start(&self.0, "reading statistics", Call::stats)
    }

    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(self.0.pool.close())
    }
}
