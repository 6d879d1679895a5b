//! The adapter: how a statement is run, and what its rows answer.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use futures_util::future::BoxFuture;
use sqlx::postgres::{PgConnection, PgPool, PgPoolOptions, PgRow, Postgres};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Decode, Row, Type};

use super::super::contract::{Abilities, DedupAdapter, StoreFuture};
use super::super::replies::{Claimed, Completed, Released, Renewed};
use super::super::sql::queue::{Batcher, Batching};
use super::super::sql::{
    Answer, Call, Database, Identifier, Kind, Purging, Recorded, Stored, after_claim, attach,
    duplicates,
};
use super::super::stored::Fetch;
use super::super::terms::{CallTerms, Permanence};
use super::connections::{Connections, Source, is_timed_out};
use super::patience::LockWait;
use super::plans::Plans;
use super::rows::{
    Params, Places, is_broken, is_conflict, is_read_only, is_without_table, number, row_keys,
    store_error, stored,
};
use super::schema::{Durability, Place, VERSION, create_sql, migration};
use super::statements::{Statements, tagged};
use super::storm::Storm;
use super::url;
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

const CONNECTIONS: u32 = 10;
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);
/// For how long a statement may run that reads or changes the whole table.
pub(super) const MAINTENANCE_TIMEOUT: Duration = Duration::from_secs(600);
/// How often a statement is repeated that was in another's way, or whose connection was gone.
const REPEATS: usize = 6;

/// Keeps keys in a table of a Postgres database.
///
/// Cloning makes another handle to the same connections.
#[derive(Clone)]
pub struct PostgresAdapter(Arc<Inner>);

pub(super) struct Inner {
    pub(super) options: Options,
    pub(super) connections: Arc<Connections>,
    find: Arc<str>,
    /// With the schema, once the table was found: a `search_path` that changes later names no other
    /// table.
    statements: RwLock<Arc<Statements>>,
    pub(super) batcher: Option<Batcher<Call>>,
    pub(super) plans: Plans,
    pub(super) storm: Storm,
    pub(super) lock_wait: LockWait,
    pub(super) purging: Purging,
    migrated: AtomicBool,
}

#[derive(Clone)]
pub(super) struct Options {
    place: Place,
    claims: Durability,
    batching: Batching,
    statement_timeout: Duration,
    /// Whether the pool is the user's.
    pub(super) foreign: bool,
}

impl Options {
    const fn new(place: Place, foreign: bool) -> Self {
        Self {
            place,
            claims: Durability::Synchronous,
            batching: Batching::new(),
            statement_timeout: STATEMENT_TIMEOUT,
            foreign,
        }
    }
}

impl PostgresAdapter {
    /// Connects to the database that a `postgres://` URL names, with up to ten connections.
    ///
    /// The table is made by the first call that needs it, or by [`migrate`](Self::migrate). TLS is
    /// what the URL's `sslmode` says, if your build of `sqlx` has a TLS feature.
    ///
    /// The URL names one host. Where a standby may take over, that is an address which leads to the
    /// primary: see the [operations guide](crate::guide::operations#failover).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`], with a [`ConfigError`] as its source, for a URL that cannot be read,
    /// and for one that names several hosts or has `target_session_attrs` or `load_balance_hosts`,
    /// because `sqlx` would not choose between servers. [`ErrorKind::Unavailable`] if the database
    /// cannot be reached.
    ///
    /// [`ConfigError`]: crate::ConfigError
    pub async fn connect(url: &str) -> Result<Self, Error> {
        let options = url::options(url)?;
        // The pool would try until its time is up, and not say what was wrong.
        let first = options.connect().await;
        let first = first.map_err(|error| store_error("connecting to Postgres", error))?;
        let pool = PgPoolOptions::new()
            .max_connections(CONNECTIONS)
            .acquire_timeout(Duration::from_secs(5))
            .connect_lazy_with(options);
        drop(first.close().await);
        Ok(Self::over(pool, Options::new(Place::default(), false)))
    }

    /// An adapter over a pool of yours, on the database that your service uses anyway.
    ///
    /// [`close`](super::super::MaintenanceAdapter::close) leaves it open. How large it has to be: see the
    /// [operations guide](crate::guide::operations).
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        Self::over(pool, Options::new(Place::default(), true))
    }

    /// The adapter with another table than `webhook_deliveries`.
    ///
    /// A handle that was cloned before keeps its table.
    #[must_use]
    pub fn table(self, table: Identifier) -> Self {
        self.with(|options| options.place.table = table)
    }

    /// The adapter with its table in this schema, instead of the first of the `search_path`.
    ///
    /// Without a name, the schema is the one in which the table was found by the first call, or in
    /// which it was made.
    #[must_use]
    pub fn schema(self, schema: Identifier) -> Self {
        self.with(|options| options.place.schema = Some(schema.into_string()))
    }

    /// Lets claims commit without waiting for the disk (`synchronous_commit = off` for the claim's
    /// own statement); completions and records wait, always.
    ///
    /// A crash of the *database* can then lose a claim that it has granted: the event's retry runs
    /// beside the handler that is still running. By default claims are durable too.
    #[must_use]
    pub fn asynchronous_claims(self, asynchronous: bool) -> Self {
        let claims = if asynchronous { Durability::Asynchronous } else { Durability::Synchronous };
        self.with(|options| options.claims = claims)
    }

    /// Makes the schema if it is not there. Safe to call from many processes at once.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`] if the role may not create it, [`ErrorKind::Unavailable`] if the
    /// database cannot be reached; the next call tries again.
    pub async fn migrate(&self) -> Result<(), Error> {
        self.0.migrate().await
    }

    /// The statements that [`migrate`](Self::migrate) runs, for those who run their own.
    #[must_use]
    pub fn schema_sql(&self) -> Vec<String> {
        create_sql(&self.0.options.place)
    }

    /// How concurrent calls go out together; [`Batching::off`] for each on its own.
    ///
    /// Batches have connections of their own, one for each lane and two for each runtime unless told
    /// otherwise, beside those of the pool and with its options. They are opened when they are needed,
    /// up to twice as many while batches take longer than 500 ms.
    #[must_use]
    pub fn batching(self, batching: Batching) -> Self {
        self.with(|options| options.batching = batching)
    }

    /// How long one statement may take, 5 s unless told otherwise; at least 1 ms. Past it, its
    /// connection is closed and its outcome is unknown, so that a connection which has fallen
    /// silent, without a reset, costs this time once and no more.
    ///
    /// Choose more than the layer's `store_timeout`, which ends the wait of a caller. Purging has
    /// six times as long for one portion; counting and migrating have ten minutes.
    #[must_use]
    pub fn statement_timeout(self, timeout: Duration) -> Self {
        self.with(|options| options.statement_timeout = timeout.max(Duration::from_millis(1)))
    }

    pub(super) fn inner(&self) -> &Inner {
        &self.0
    }

    fn with(&self, change: impl FnOnce(&mut Options)) -> Self {
        let mut options = self.0.options.clone();
        change(&mut options);
        Self::over(self.0.connections.pool.clone(), options)
    }

    fn over(pool: PgPool, options: Options) -> Self {
        let statements = Statements::new(&options.place, options.claims);
        let statements = RwLock::new(Arc::new(statements));
        let find = tagged(options.place.find());
        let lanes = options.batching.lane_count();
        let batcher = lanes.map(|lanes| Batcher::new(lanes, options.batching));
        Self(Arc::new(Inner {
            connections: Arc::new(Connections::new(pool, lanes.unwrap_or(1))),
            options,
            find,
            statements,
            batcher,
            plans: Plans::default(),
            storm: Storm::default(),
            lock_wait: LockWait::default(),
            purging: Purging::default(),
            migrated: AtomicBool::new(false),
        }))
    }

    async fn call<T: Answer>(
        &self,
        kind: Kind,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<T>, Error> {
        let mut repeated = false;
        loop {
            let statements = self.0.ready().await?;
            let call = Call::new(kind, keys, keys.iter().map(number).collect(), terms);
            // A statement is as durable as the most durable of its calls.
            let call = call.mixing(self.0.options.claims == Durability::Synchronous);
            let answers = match &self.0.batcher {
                Some(batcher) => batcher.submit(&self.0, call).await,
                None => self.0.through(Source::Pool).alone(&call).await,
            };
            match answers {
                Err(error) if !repeated && self.0.has_gone(&error, &statements) => repeated = true,
                answers => return T::unwrap(answers?),
            }
        }
    }
}

impl fmt::Debug for PostgresAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresAdapter")
            .field("place", &self.0.options.place)
            .finish_non_exhaustive()
    }
}

impl Inner {
    pub(super) fn statement_timeout(&self) -> Duration {
        self.options.statement_timeout
    }

    /// The statements, which name the table with its schema.
    pub(super) async fn ready(&self) -> Result<Arc<Statements>, Error> {
        self.check_open()?;
        if !self.migrated.load(Ordering::Acquire) {
            self.migrate().await?;
        }
        Ok(self.statements())
    }

    fn check_open(&self) -> Result<(), Error> {
        if self.connections.is_closed() {
            return Err(Error::new(ErrorKind::Unavailable, "using an adapter that was closed"));
        }
        Ok(())
    }

    /// Those that were last made.
    pub(super) fn statements(&self) -> Arc<Statements> {
        Arc::clone(&self.statements.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether a statement found the table gone, as after a restore: the call is worth a repetition,
    /// which looks for the table anew.
    pub(super) fn has_gone(&self, error: &Error, statements: &Arc<Statements>) -> bool {
        let gone = is_without_table(error);
        // Unless another call has found it since.
        if gone && Arc::ptr_eq(statements, &self.statements()) {
            self.migrated.store(false, Ordering::Release);
        }
        gone
    }

    /// Runs a call, and once more if the table has gone since it was found.
    pub(super) async fn with_table<'c, T>(
        &self,
        call: impl Fn(Arc<Statements>) -> BoxFuture<'c, Result<T, Error>>,
    ) -> Result<T, Error> {
        let statements = self.ready().await?;
        match call(Arc::clone(&statements)).await {
            Err(error) if self.has_gone(&error, &statements) => call(self.ready().await?).await,
            answer => answer,
        }
    }

    /// For a transaction of the user's: the table is looked for on its own connection, since all
    /// others may be in such transactions too.
    pub(super) async fn ready_within(
        &self,
        connection: &mut PgConnection,
    ) -> Result<Arc<Statements>, Error> {
        self.check_open()?;
        if self.migrated.load(Ordering::Acquire) {
            return Ok(self.statements());
        }
        let fault = |error| store_error("looking for the Postgres schema", error);
        let found = sqlx::query(AssertSqlSafe(Arc::clone(&self.find))).fetch_one(&mut *connection);
        let found = self.found(&found.await.map_err(fault)?)?;
        let statements = Arc::new(Statements::new(&found.place, self.options.claims));
        if !found.there
            || scalar::<i32>(&statements.version, connection).await.map_err(fault)? < VERSION
        {
            self.migrate().await?;
            return Ok(self.statements());
        }
        // A transaction that has written may have made the schema, and may take it away again. And
        // a `search_path` of its own is not everybody's.
        if found.own_path && scalar(&statements.unwritten, connection).await.map_err(fault)? {
            self.know(&statements);
        }
        Ok(statements)
    }

    async fn migrate(&self) -> Result<(), Error> {
        let fault = |error| store_error("preparing the Postgres schema", error);
        let found = self.fetch(&self.find, Params::None).await.map_err(fault)?;
        let found = found.first().ok_or(sqlx::Error::RowNotFound).map_err(fault)?;
        let found = self.found(found)?;
        let statements = Arc::new(Statements::new(&found.place, self.options.claims));
        if !found.there || self.version(&statements).await.map_err(fault)? < VERSION {
            let mut session = self.connections.get(Source::Pool).await.map_err(fault)?;
            // One message: dropped half-way, the server still commits all of it or nothing.
            let sql = AssertSqlSafe(migration(&found.place));
            let migrate = |connection| sqlx::raw_sql(sql).execute(connection);
            session.run(MAINTENANCE_TIMEOUT, is_broken, migrate).await.map_err(fault)?;
        }
        self.know(&statements);
        Ok(())
    }

    fn know(&self, statements: &Arc<Statements>) {
        *self.statements.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(statements);
        self.migrated.store(true, Ordering::Release);
    }

    /// What [`Place::find`] answers.
    fn found(&self, row: &PgRow) -> Result<Found, Error> {
        let fault = |error| store_error("looking for the Postgres schema", error);
        let encoding: String = row.try_get("encoding").map_err(fault)?;
        // SQL_ASCII takes every byte. All others lack characters that an id may have, and would
        // refuse its deliveries for ever.
        if !["UTF8", "SQL_ASCII"].contains(&&*encoding) {
            return Err(Error::new(
                ErrorKind::Config,
                "preparing the Postgres schema: the database's encoding is not UTF8",
            ));
        }
        let schema = row.try_get("schema").map_err(fault)?;
        Ok(Found {
            place: Place { schema, ..self.options.place.clone() },
            there: row.try_get("there").map_err(fault)?,
            own_path: row.try_get("own_path").map_err(fault)?,
        })
    }

    async fn version(&self, statements: &Statements) -> Result<i32, sqlx::Error> {
        let version = self.fetch(&statements.version, Params::None).await?;
        version.first().map_or(Ok(0), |row| row.try_get(0))
    }

    /// Runs one statement, which is its own transaction, on the pool, and returns its rows.
    pub(super) async fn fetch(
        &self,
        sql: &Arc<str>,
        params: Params<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let bound = self.options.statement_timeout;
        self.fetch_within(bound, Source::Pool, sql, params, &AtomicBool::default()).await
    }

    /// The same on a connection of this source. `unheard` is set if the reply came only after the reply
    /// to an earlier try was lost: this try may have found what the earlier one wrote.
    pub(super) async fn fetch_through(
        &self,
        source: Source,
        sql: &Arc<str>,
        params: Params<'_>,
        unheard: &AtomicBool,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        self.fetch_within(self.options.statement_timeout, source, sql, params, unheard).await
    }

    /// The same within `bound` for one statement.
    ///
    /// It is repeated if it was in the way of another, or if its connection turns out to be gone:
    /// every call comes to the same when its statements are repeated with its token. A repetition
    /// may be refused because the server is at work on the one before, whose reply is lost: the
    /// outcome is unknown then. A statement that has used up its bound is not repeated, because its
    /// caller has given up.
    pub(super) async fn fetch_within(
        &self,
        bound: Duration,
        source: Source,
        sql: &Arc<str>,
        params: Params<'_>,
        unheard: &AtomicBool,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let sql = &self.plans.text(sql);
        let mut pauses = ExponentialBuilder::new()
            .with_min_delay(Duration::from_millis(1))
            .with_max_delay(Duration::from_millis(50))
            .with_max_times(REPEATS)
            .with_jitter()
            .build();
        let mut lost = None;
        loop {
            let mut session = match self.connections.get(source).await {
                Ok(session) => session,
                Err(error) => return Err(lost.unwrap_or(error)),
            };
            let fetch = |connection| async {
                let rows = params.bind(sql).fetch_all(connection).await?;
                if rows.first().is_some_and(is_from_a_standby) {
                    return Err(sqlx::Error::Protocol("a standby cannot be asked".to_owned()));
                }
                Ok(rows)
            };
            let gone = |error: &sqlx::Error| is_broken(error) || is_read_only(error);
            let error = match session.run(bound, gone, fetch).await {
                Ok(rows) => {
                    unheard.fetch_or(lost.is_some(), Ordering::Relaxed);
                    return Ok(rows);
                }
                Err(error) => error,
            };
            if gone(&error) {
                // What has happened to one connection may have happened to all.
                self.connections.suspect();
            }
            if is_timed_out(&error) {
                self.connections.settled(bound).await;
                return Err(lost.unwrap_or(error));
            }
            drop(session);
            match pauses.next() {
                Some(pause) if gone(&error) || is_conflict(&error) => {
                    tokio::time::sleep(pause).await;
                }
                _ => return Err(lost.unwrap_or(error)),
            }
            if is_broken(&error) {
                lost = Some(error);
            }
        }
    }

    /// What a primary has stored of each key.
    pub(super) async fn read(&self, keys: &[DedupKey]) -> Result<Vec<Option<Stored>>, Error> {
        self.look(Source::Pool, &self.statements().read, keys)
            .await
            .map_err(|error| store_error("looking up keys", error))
    }

    pub(super) async fn look(
        &self,
        source: Source,
        sql: &Arc<str>,
        keys: &[DedupKey],
    ) -> Result<Vec<Option<Stored>>, sqlx::Error> {
        let keys = row_keys(keys);
        let params = Params::Read(&keys);
        let rows = self.fetch_through(source, sql, params, &AtomicBool::default()).await?;
        let mut found: Vec<Option<Stored>> = keys.iter().map(|_| None).collect();
        for (place, row) in Places::new(&keys).of_rows(rows)? {
            found[place] = Some(stored(&row, 0)?);
        }
        Ok(found)
    }
}

/// Where the table is, or is to be.
struct Found {
    place: Place,
    /// Whether it is there, with its version.
    there: bool,
    /// Whether the session has the `search_path` that it began with.
    own_path: bool,
}

/// Whether a row that was read to be answered from comes from a server that only follows another.
fn is_from_a_standby(row: &PgRow) -> bool {
    row.try_get("standby").unwrap_or(false)
}

async fn scalar<T>(sql: &Arc<str>, connection: &mut PgConnection) -> Result<T, sqlx::Error>
where
    T: for<'r> Decode<'r, Postgres> + Type<Postgres> + Send + Unpin,
{
    sqlx::query_scalar(AssertSqlSafe(Arc::clone(sql))).fetch_one(connection).await
}

impl DedupAdapter for PostgresAdapter {
    fn abilities(&self) -> Abilities {
        Abilities::new().with_leases().with_stored_data()
    }

    fn claim<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Vec<Claimed>> {
        Box::pin(self.claim_fetching(keys, terms))
    }

    fn release<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Vec<Released>> {
        let kind = match terms.permanence() {
            Permanence::OnClaim => Kind::Unrecord,
            Permanence::OnCompletion { .. } => Kind::Release,
        };
        Box::pin(self.call(kind, keys, terms))
    }

    fn renew<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Vec<Renewed>> {
        Box::pin(self.call(Kind::Renew, keys, terms))
    }

    fn complete<'a>(
        &'a self,
        keys: &'a [DedupKey],
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, Vec<Completed>> {
        Box::pin(self.call(Kind::Complete, keys, terms))
    }
}

impl PostgresAdapter {
    async fn claim_fetching(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<Claimed>, Error> {
        let fetch = terms.fetch();
        match terms.permanence() {
            Permanence::OnClaim => {
                // Before the claim: one that fails afterwards would have to be released.
                let stored = self.stored(keys.to_vec(), fetch).await?;
                let recorded = self.call::<Recorded>(Kind::Record, keys, terms).await?;
                let mut claimed: Vec<Claimed> = recorded.into_iter().map(Into::into).collect();
                if fetch != Fetch::Nothing {
                    attach(keys, &mut claimed, &stored);
                }
                Ok(claimed)
            }
            Permanence::OnCompletion { .. } => {
                let mut claimed = self.call::<Claimed>(Kind::Claim, keys, terms).await?;
                if fetch != Fetch::Nothing {
                    let stored = self.stored(duplicates(keys, &claimed), fetch).await;
                    let stored = stored.map_err(|error| after_claim(error, &claimed))?;
                    attach(keys, &mut claimed, &stored);
                }
                Ok(claimed)
            }
        }
    }
}
