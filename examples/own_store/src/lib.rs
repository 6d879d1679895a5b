#![doc = include_str!("../README.md")]

mod completion;
mod errors;
mod inspection;
mod row;
mod session;
mod statements;

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use sqlx::Row as _;
use sqlx::mysql::{MySqlArguments, MySqlConnectOptions};
use tower_dedup::adapter::TransactionAdapter;
use tower_dedup::adapter::contract::{
    Abilities, CallTerms, ClaimReply, CompleteReply, Completion, DedupAdapter, RenewReply,
    StoreFuture,
};
use tower_dedup::adapter::inspect::{
    Entry, ForgetReply, ListFilter, Listing, MaintenanceAdapter, Stats,
};
use tower_dedup::{DedupKey, Error, ErrorKind};

use crate::errors::store_error;
use crate::row::{Next, Row, Write, fetches_response, lease_ms, milliseconds};
use crate::session::{Call, Ran, Session, Wants, args};

/// How often a call reads its row again that another call has written meanwhile.
const TRIES: usize = 8;

/// Keeps keys in a table of a MariaDB database, for all processes of a service.
///
/// A clone is another handle to the same connections.
#[derive(Clone)]
pub struct MariaDbStore(Arc<Session>);

/// The options of a [`MariaDbStore`].
#[derive(Debug, Clone, Copy)]
pub struct Options {
    connections: u32,
    timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { connections: 16, timeout: Duration::from_secs(5) }
    }
}

impl Options {
    /// Sets how many connections the store opens at most: 16 by default, at least one.
    #[must_use]
    pub fn connections(self, connections: u32) -> Self {
        Self { connections: connections.max(1), ..self }
    }

    /// Sets how long one statement may take, and how long a call waits for a connection: 5 s by default.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }
}

impl MariaDbStore {
    /// Connects to the database that a `mysql://` URL names, and makes the table `webhook_deliveries` if there is none.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] for a URL that cannot be read or names no database, and for a server that has no
    /// `SKIP LOCKED` or reads its clock once a statement. Otherwise the errors of the server.
    pub async fn connect(url: &str) -> Result<Self, Error> {
        Self::connect_with(url, Options::default()).await
    }

    /// Connects with these options.
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect).
    pub async fn connect_with(url: &str, options: Options) -> Result<Self, Error> {
        const CONTEXT: &str = "connecting to MariaDB";
        let connect =
            url.parse::<MySqlConnectOptions>().map_err(|error| store_error(CONTEXT, error))?;
        let session = Arc::new(Session::open(connect, options).await?);
        Call::start(&session, CONTEXT, |call| async move {
            call.check_server().await?;
            let create = &call.session.statements.create_table;
            call.run(create, MySqlArguments::default(), Wants::Nothing).await.map(drop)
        })
        .await?;
        Ok(Self(session))
    }
}

impl Call {
    async fn read(&self, key: &DedupKey, with_response: bool) -> Result<Option<Row>, Error> {
        let args =
            args![with_response, with_response, key.namespace().as_bytes(), key.id().as_bytes()];
        let read = self.run(&self.session.statements.read, args, Wants::Rows).await?;
        let rows = read.unwrap_or_default().rows;
        rows.first().map(Row::read).transpose().map_err(|error| self.fault(error))
    }

    /// Inserts the row of a claim, or of a completion without attempts. Returns `false` if the key has a row.
    async fn insert(
        &self,
        key: &DedupKey,
        terms: &CallTerms,
        lease: Option<i64>,
        attempts: i64,
    ) -> Result<bool, Error> {
        let (namespace, id) = (key.namespace().as_bytes(), key.id().as_bytes());
        let (digest, status, headers, body) = stored(key, terms, lease.is_none());
        let args = args![
            namespace,
            id,
            token_of(terms),
            lease,
            attempts,
            lease.is_none(),
            milliseconds(terms.retention()),
            terms.event_type_for(key).map(str::as_bytes),
            digest,
            status,
            headers,
            body,
            namespace,
            id,
        ];
        // A held row is in the way: it can be read.
        let inserted = self.run(&self.session.statements.insert, args, Wants::Nothing).await?;
        Ok(inserted.is_some_and(|ran| ran.written > 0))
    }

    /// Returns the arguments that write a row at the version that was read. `lease` is `None` for a row that holds no
    /// lease; with `completes` it is complete.
    fn write(
        key: &DedupKey,
        row: &Row,
        write: &Write,
        terms: &CallTerms,
        lease: Option<i64>,
        (completes, keeps_retention): (bool, bool),
    ) -> Result<MySqlArguments, Error> {
        let (digest, status, headers, body) = stored(key, terms, completes);
        Ok(args![
            write.token.as_deref(),
            lease,
            write.attempts,
            write.takeover,
            write.is_new,
            completes,
            write.is_new,
            keeps_retention,
            milliseconds(terms.retention()),
            write.is_new,
            terms.event_type_for(key).map(str::as_bytes),
            digest,
            status,
            headers,
            body,
            key.namespace().as_bytes(),
            key.id().as_bytes(),
            row.version,
        ])
    }

    async fn claim(self, key: DedupKey, terms: CallTerms) -> Result<ClaimReply, Error> {
        let lease = lease_ms(&terms)?;
        for _ in 0..TRIES {
            // Most keys are new. The row of another key takes a second statement, and a free one a third.
            if self.insert(&key, &terms, lease, 1).await? {
                return Ok(ClaimReply::first(1, false));
            }
            let Some(row) = self.read(&key, fetches_response(terms.fetch())).await? else {
                continue;
            };
            let (write, reply) = match row.claimed(&terms)? {
                Next::Reply(reply) => return Ok(reply),
                Next::Write(write, reply) => (write, reply),
            };
            let args = Self::write(&key, &row, &write, &terms, lease, (lease.is_none(), false))?;
            match self.run(&self.session.statements.write, args, Wants::Nothing).await? {
                Some(ran) if ran.written > 0 => return Ok(reply),
                // Another call was faster.
                Some(_) => {}
                // A transaction holds a row of the caller's own token, as after a claim whose reply was lost. "In flight"
                // would leave a lease that nobody holds; after an error the layer releases it.
                None if row.is_by(terms.token()) => return Err(self.error(ErrorKind::Timeout)),
                None => return Ok(ClaimReply::InFlight),
            }
        }
        Err(self.error(ErrorKind::Refused))
    }

    async fn complete(self, key: DedupKey, terms: CallTerms) -> Result<CompleteReply, Error> {
        let statements = &self.session.statements;
        let (digest, status, headers, body) = stored(&key, &terms, true);
        let has_response = status.is_some();
        let args = args![
            milliseconds(terms.retention()),
            digest,
            status,
            headers,
            body,
            key.namespace().as_bytes(),
            key.id().as_bytes(),
            token_of(&terms),
        ];
        if self.run_patiently(&statements.complete, args).await? > 0 {
            return Ok(CompleteReply::Held);
        }
        for _ in 0..TRIES {
            let Some(row) = self.read(&key, false).await? else {
                // Without attempts: that shows that it was inserted, also if the completion is repeated.
                if self.insert(&key, &terms, None, 0).await? {
                    return Ok(CompleteReply::Inserted);
                }
                continue;
            };
            let (write, reply) = match row.completed(&terms, has_response) {
                Next::Reply(reply) => return Ok(reply),
                Next::Write(write, reply) => (write, reply),
            };
            let args = Self::write(&key, &row, &write, &terms, None, (true, !write.is_new))?;
            if self.run_patiently(&statements.write, args).await? > 0 {
                return Ok(reply);
            }
        }
        Err(self.error(ErrorKind::Refused))
    }

    async fn renew(self, key: DedupKey, terms: CallTerms) -> Result<RenewReply, Error> {
        let (token, lease) = (token_of(&terms), lease_ms(&terms)?.unwrap_or_default());
        let args = args![
            key.namespace().as_bytes(),
            key.id().as_bytes(),
            &token,
            lease,
            milliseconds(terms.retention()),
            terms.event_type_for(&key).map(str::as_bytes),
            &token,
            lease,
            &token,
        ];
        let renewed = self.run(&self.session.statements.renew, args, Wants::Rows).await?;
        // "Lost" of a row that a transaction holds would end the lease of its handler.
        let Some(Ran { rows, .. }) = renewed else { return Ok(RenewReply::Locked) };
        let held = rows.first().map(|row| row.try_get::<Option<i64>, _>("is_held")).transpose();
        let held = held.map_err(|error| self.fault(error))?.flatten();
        Ok(if held == Some(1) { RenewReply::Held } else { RenewReply::Lost })
    }

    async fn release(self, key: DedupKey, terms: CallTerms) -> Result<(), Error> {
        let statements = &self.session.statements;
        let statement = match lease_ms(&terms)? {
            Some(_) => &statements.release,
            None => &statements.release_complete,
        };
        let mut args = args![key.namespace().as_bytes(), key.id().as_bytes()];
        // Every further parameter is the token.
        for _ in 2..statement.sql.matches('?').count() {
            sqlx::Arguments::add(&mut args, token_of(&terms)).map_err(session::unencodable)?;
        }
        self.run_patiently(statement, args).await.map(drop)
    }

    async fn is_complete(self, key: DedupKey, terms: CallTerms) -> Result<bool, Error> {
        let args = args![key.namespace().as_bytes(), key.id().as_bytes(), token_of(&terms)];
        let found = self.run(&self.session.statements.is_complete, args, Wants::Rows).await?;
        Ok(found.is_some_and(|ran| !ran.rows.is_empty()))
    }
}

fn token_of(terms: &CallTerms) -> Vec<u8> {
    terms.token().as_bytes().to_vec()
}

/// The digest of the payload, and the response: status, headers, body.
type Stored = (Option<Vec<u8>>, Option<i64>, Option<Vec<u8>>, Option<Vec<u8>>);

/// Returns the columns of the data that is stored with a complete key. Another row has none.
fn stored(key: &DedupKey, terms: &CallTerms, is_complete: bool) -> Stored {
    let Some(data) = terms.stored_data_for(key).filter(|_| is_complete) else {
        return Stored::default();
    };
    let digest = data.payload_sha256.map(Vec::from);
    match data.response.as_deref() {
        None => (digest, None, None, None),
        Some(response) => (
            digest,
            Some(response.status.as_u16().into()),
            Some(response.headers_json().into_bytes()),
            Some(response.body.to_vec()),
        ),
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

    fn completion(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
        mark: Option<&str>,
    ) -> Result<Completion, Error> {
        // Only `Delivery::begin` sets a mark, and it knows no MariaDB.
        if mark.is_some() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "completing events in a marked transaction",
            ));
        }
        let sql = Arc::clone(&self.0.statements.completion.sql);
        Ok(Completion::new(sql, completion::parameter(keys, terms)))
    }

    fn is_complete<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, bool> {
        Call::start(&self.0, "reading a completion", |call| {
            call.is_complete(key.clone(), terms.clone())
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
        Box::pin(self.0.close())
    }
}

impl fmt::Debug for MariaDbStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The connect options may hold a password.
        f.debug_struct("MariaDbStore").finish_non_exhaustive()
    }
}
