//! The adapter: how a statement is run, and what its rows answer.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use futures_util::future::BoxFuture;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions, PgRow, Postgres};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Decode, Row, Type};

use super::super::batch::{Batcher, Batching};
use super::super::contract::{
    Claimed, Completed, DedupAdapter, Entry, Forgotten, LeaseAdapter, Maintain, Receipt, Recorded,
    Released, Renewed,
};
use super::super::kept::{Kept, Recall, Wanted};
use super::super::sql::{Answer, Call, Database, Identifier, KeptRow, Kind, Stored};
use super::change::ROUNDS;
use super::patience::LockWait;
use super::plans::Plans;
use super::rows::{
    Params, Places, advisory_lock, is_broken, is_conflict, is_read_only, is_without_table, kept,
    number, row_keys, store_error, stored,
};
use super::schema::{Durability, Place, VERSION, create_sql, migration};
use super::statements::{Statements, tagged};
use super::storm::Storm;
use crate::error::{ConfigError, Error, ErrorKind};
use crate::key::DedupKey;

const CONNECTIONS: u32 = 10;
/// How often a statement is repeated that was in another's way, or whose connection was gone.
const REPEATS: usize = 6;

/// Keeps keys in a table of a Postgres database.
///
/// Cloning makes another handle to the same connections.
#[derive(Clone)]
pub struct PostgresAdapter(Arc<Inner>);

pub(super) struct Inner {
    pub(super) pool: PgPool,
    /// As the user has named it.
    pub(super) place: Place,
    claims: Durability,
    find: Arc<str>,
    /// With the schema, once the table was found: a `search_path` that changes later names no other
    /// table.
    statements: RwLock<Arc<Statements>>,
    pub(super) batching: Batching,
    pub(super) batcher: Option<Batcher<Call>>,
    /// The connections of the lanes, once one was opened.
    pub(super) lanes: OnceLock<PgPool>,
    pub(super) plans: Plans,
    pub(super) storm: Storm,
    pub(super) lock_wait: LockWait,
    migrated: AtomicBool,
    /// Whether the connections are the user's.
    foreign: bool,
}

impl PostgresAdapter {
    /// Connects to the database that a `postgres://` URL names, with up to ten connections.
    ///
    /// The table is made by the first call that needs it, or by [`migrate`](Self::migrate). TLS is
    /// what the URL's `sslmode` says, if your build of `sqlx` has a TLS feature.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] for a URL that is none, [`ErrorKind::Unavailable`] if the database
    /// cannot be reached.
    pub async fn connect(url: &str) -> Result<Self, Error> {
        let invalid = || Error::from(ConfigError::InvalidUrl);
        if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
            return Err(invalid());
        }
        let options = PgConnectOptions::from_str(url).map_err(|_| invalid())?;
        // The pool would try until its time is up, and not say what was wrong.
        let first = options.connect().await;
        let first = first.map_err(|error| store_error("connecting to Postgres", error))?;
        let pool = PgPoolOptions::new()
            .max_connections(CONNECTIONS)
            .acquire_timeout(Duration::from_secs(5))
            .connect_lazy_with(options);
        drop(first.close().await);
        Ok(Self::over(pool, Place::default(), Durability::Synchronous, false, Batching::new()))
    }

    /// An adapter over a pool of yours, on the database that your service uses anyway.
    ///
    /// [`close`](Maintain::close) leaves it open. How large it has to be: see the
    /// [operations guide](crate::guide::operations).
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        Self::over(pool, Place::default(), Durability::Synchronous, true, Batching::new())
    }

    /// The adapter with another table than `webhook_deliveries`.
    ///
    /// A handle that was cloned before keeps its table.
    #[must_use]
    pub fn table(self, table: Identifier) -> Self {
        let place = Place { table, ..self.0.place.clone() };
        self.with(place, self.0.claims)
    }

    /// The adapter with its table in this schema, instead of the first of the `search_path`.
    ///
    /// Without a name, the schema is the one in which the table was found by the first call, or in
    /// which it was made.
    #[must_use]
    pub fn schema(self, schema: Identifier) -> Self {
        let place = Place { schema: Some(schema.into_string()), ..self.0.place.clone() };
        self.with(place, self.0.claims)
    }

    /// Lets claims commit without waiting for the disk (`synchronous_commit = off` for the claim's
    /// own statement); completions and records wait, always.
    ///
    /// A crash of the *database* can then lose a claim that it has granted: the event's retry runs
    /// beside the handler that is still running. By default claims are durable too.
    #[must_use]
    pub fn asynchronous_claims(self, asynchronous: bool) -> Self {
        let claims = if asynchronous { Durability::Asynchronous } else { Durability::Synchronous };
        self.with(self.0.place.clone(), claims)
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
        create_sql(&self.0.place)
    }

    /// How concurrent calls go out together; [`Batching::off`] for each on its own.
    ///
    /// Batches have connections of their own, one for each lane and two unless told otherwise,
    /// beside those of the pool and with its options. They are opened when they are needed.
    #[must_use]
    pub fn batching(self, batching: Batching) -> Self {
        let Inner { pool, place, claims, foreign, .. } = &*self.0;
        Self::over(pool.clone(), place.clone(), *claims, *foreign, batching)
    }

    pub(super) fn inner(&self) -> &Inner {
        &self.0
    }

    fn with(&self, place: Place, claims: Durability) -> Self {
        Self::over(self.0.pool.clone(), place, claims, self.0.foreign, self.0.batching)
    }

    fn over(
        pool: PgPool,
        place: Place,
        claims: Durability,
        foreign: bool,
        batching: Batching,
    ) -> Self {
        let statements = RwLock::new(Arc::new(Statements::new(&place, claims)));
        let find = tagged(place.find());
        let batcher = batching.lane_count().map(|lanes| Batcher::new(lanes, batching));
        Self(Arc::new(Inner {
            pool,
            place,
            claims,
            find,
            statements,
            batching,
            batcher,
            lanes: OnceLock::new(),
            plans: Plans::default(),
            storm: Storm::default(),
            lock_wait: LockWait::default(),
            migrated: AtomicBool::new(false),
            foreign,
        }))
    }

    async fn call<T: Answer>(
        &self,
        kind: Kind,
        keys: &[DedupKey],
        receipt: &Receipt,
    ) -> Result<Vec<T>, Error> {
        let mut repeated = false;
        loop {
            let statements = self.0.ready().await?;
            let call = Call::new(kind, keys, keys.iter().map(number).collect(), receipt);
            // A statement is as durable as the most durable of its calls.
            let call = call.mixing(self.0.claims == Durability::Synchronous);
            let answers = match &self.0.batcher {
                Some(batcher) => batcher.submit(&self.0, call).await,
                None => self.0.direct().alone(&call).await,
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
        f.debug_struct("PostgresAdapter").field("place", &self.0.place).finish_non_exhaustive()
    }
}

impl Inner {
    /// The statements, which name the table with its schema.
    pub(super) async fn ready(&self) -> Result<Arc<Statements>, Error> {
        if !self.migrated.load(Ordering::Acquire) {
            self.migrate().await?;
        }
        Ok(self.statements())
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
        if self.migrated.load(Ordering::Acquire) {
            return Ok(self.statements());
        }
        let fault = |error| store_error("looking for the Postgres schema", error);
        let found = sqlx::query(AssertSqlSafe(Arc::clone(&self.find))).fetch_one(&mut *connection);
        let found = self.found(&found.await.map_err(fault)?)?;
        let statements = Arc::new(Statements::new(&found.place, self.claims));
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
        let statements = Arc::new(Statements::new(&found.place, self.claims));
        if !found.there || self.version(&statements).await.map_err(fault)? < VERSION {
            let mut connection = self.pool.acquire().await.map_err(fault)?;
            // One message: dropped half-way, the server still commits all of it or nothing.
            let sql = AssertSqlSafe(migration(&found.place));
            sqlx::raw_sql(sql).execute(&mut *connection).await.map_err(fault)?;
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
            place: Place { schema, ..self.place.clone() },
            there: row.try_get("there").map_err(fault)?,
            own_path: row.try_get("own_path").map_err(fault)?,
        })
    }

    async fn version(&self, statements: &Statements) -> Result<i32, sqlx::Error> {
        let version = self.fetch(&statements.version, Params::None).await?;
        version.first().map_or(Ok(0), |row| row.try_get(0))
    }

    /// Runs one statement, which is its own transaction, and answers its rows.
    ///
    /// It is repeated if it was in the way of another, or if its connection turns out to be gone:
    /// every call comes to the same when its statements are repeated with its token. A repetition may be
    /// refused because the server is at work on the one before, which nobody hears of any more: the
    /// outcome is unknown then.
    pub(super) async fn fetch(
        &self,
        sql: &Arc<str>,
        params: Params<'_>,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        self.fetch_through(&self.pool, sql, params, &AtomicBool::default()).await
    }

    /// The same on a connection of this pool. `unheard` is set if it answers only after one before
    /// it was not heard of: what that has written, this one has found.
    pub(super) async fn fetch_through(
        &self,
        pool: &PgPool,
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
            let mut connection = match pool.acquire().await {
                Ok(connection) => connection,
                Err(error) => return Err(lost.unwrap_or(error)),
            };
            let error = match params.bind(sql).fetch_all(&mut *connection).await {
                Ok(rows) if rows.first().is_some_and(is_from_a_standby) => {
                    sqlx::Error::Protocol("a standby cannot be asked".to_owned())
                }
                Ok(rows) => {
                    unheard.fetch_or(lost.is_some(), Ordering::Relaxed);
                    return Ok(rows);
                }
                Err(error) => error,
            };
            let gone = is_broken(&error) || is_read_only(&error);
            if gone {
                // Not to be had from the pool again.
                drop(connection.detach());
            }
            match pauses.next() {
                Some(pause) if gone || is_conflict(&error) => tokio::time::sleep(pause).await,
                _ => return Err(lost.unwrap_or(error)),
            }
            if is_broken(&error) {
                lost = Some(error);
            }
        }
    }

    /// What a primary has stored of each key.
    pub(super) async fn read(&self, keys: &[DedupKey]) -> Result<Vec<Option<Stored>>, Error> {
        self.look(&self.pool, &self.statements().read, keys)
            .await
            .map_err(|error| store_error("looking up keys", error))
    }

    pub(super) async fn look(
        &self,
        pool: &PgPool,
        sql: &Arc<str>,
        keys: &[DedupKey],
    ) -> Result<Vec<Option<Stored>>, sqlx::Error> {
        let keys = row_keys(keys);
        let params = Params::Read(&keys);
        let rows = self.fetch_through(pool, sql, params, &AtomicBool::default()).await?;
        let mut found: Vec<Option<Stored>> = keys.iter().map(|_| None).collect();
        for (place, row) in Places::new(&keys).of_rows(rows)? {
            found[place] = Some(stored(&row, 0)?);
        }
        Ok(found)
    }

    async fn number(
        &self,
        context: &'static str,
        sql: &Arc<str>,
        params: Params<'_>,
    ) -> Result<u64, Error> {
        let fault = |error| store_error(context, error);
        let rows = self.fetch(sql, params).await.map_err(fault)?;
        let number: i64 = rows.first().map_or(Ok(0), |row| row.try_get(0)).map_err(fault)?;
        u64::try_from(number)
            .map_err(|error| Error::new(ErrorKind::Corrupt, context).with_source(error))
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
    async fn record(&self, keys: &[DedupKey], receipt: &Receipt) -> Result<Vec<Recorded>, Error> {
        self.call(Kind::Record, keys, receipt).await
    }

    async fn unrecord(&self, keys: &[DedupKey], receipt: &Receipt) -> Result<Vec<Released>, Error> {
        self.call(Kind::Unrecord, keys, receipt).await
    }
}

impl LeaseAdapter for PostgresAdapter {
    async fn claim(&self, keys: &[DedupKey], receipt: &Receipt) -> Result<Vec<Claimed>, Error> {
        self.call(Kind::Claim, keys, receipt).await
    }

    async fn renew(&self, keys: &[DedupKey], receipt: &Receipt) -> Result<Vec<Renewed>, Error> {
        self.call(Kind::Renew, keys, receipt).await
    }

    async fn complete(
        &self,
        keys: &[DedupKey],
        receipt: &Receipt,
    ) -> Result<Vec<Completed>, Error> {
        self.call(Kind::Complete, keys, receipt).await
    }

    async fn release(&self, keys: &[DedupKey], receipt: &Receipt) -> Result<Vec<Released>, Error> {
        self.call(Kind::Release, keys, receipt).await
    }
}

impl Recall for PostgresAdapter {
    async fn recall(&self, keys: &[DedupKey], wanted: Wanted) -> Result<Vec<Option<Kept>>, Error> {
        self.0.with_table(|statements| Box::pin(self.0.recall(statements, keys, wanted))).await
    }
}

impl Inner {
    async fn recall(
        &self,
        statements: Arc<Statements>,
        keys: &[DedupKey],
        wanted: Wanted,
    ) -> Result<Vec<Option<Kept>>, Error> {
        let fault = |error| store_error("recalling keys", error);
        let row_keys = row_keys(keys);
        let statement = statements.recall(wanted);
        let rows = self.fetch(statement, Params::Read(&row_keys)).await.map_err(fault)?;
        let mut found: Vec<Option<KeptRow>> = keys.iter().map(|_| None).collect();
        for (place, row) in Places::new(&row_keys).of_rows(rows).map_err(fault)? {
            found[place] = Some(kept(&row).map_err(fault)?);
        }
        let kept = found.into_iter();
        kept.map(|kept| kept.map(KeptRow::kept).transpose()).collect()
    }

    async fn forget(
        &self,
        statements: Arc<Statements>,
        key: &DedupKey,
    ) -> Result<Forgotten, Error> {
        let fault = |error| store_error("forgetting", error);
        let keys = std::slice::from_ref(key);
        let none = Receipt::new([0; 16].into(), Duration::ZERO);
        for _ in 0..ROUNDS {
            let gone = self.direct().touch("forgetting", &statements.forget, keys, &none).await?;
            if gone == [true] {
                return Ok(Forgotten::Removed);
            }
            match self.read(keys).await?.into_iter().flatten().next() {
                None => {
                    // A transaction that runs it has a lock to show, and no row yet.
                    let locks = [advisory_lock(key)];
                    let probed = self.fetch(&statements.probe, Params::Locks(&locks));
                    let probed = probed.await.map_err(fault)?;
                    let free = probed.first().map_or(Ok(true), |row| row.try_get("free"));
                    let free = free.map_err(fault)?;
                    return Ok(if free { Forgotten::Missing } else { Forgotten::InFlight });
                }
                Some(kept) if kept.is_leased() => return Ok(Forgotten::InFlight),
                // It was written since.
                Some(_) => {}
            }
        }
        // Still changing hands after all rounds: somebody else is at it.
        Ok(Forgotten::InFlight)
    }
}

impl Maintain for PostgresAdapter {
    async fn purge(&self, limit: u32) -> Result<u64, Error> {
        let limit = Params::Limit(i64::from(limit));
        let purge = |statements: Arc<Statements>| -> BoxFuture<'_, _> {
            Box::pin(async move { self.0.number("purging", &statements.purge, limit).await })
        };
        self.0.with_table(purge).await
    }

    async fn forget(&self, key: &DedupKey) -> Result<Forgotten, Error> {
        self.0.with_table(|statements| Box::pin(self.0.forget(statements, key))).await
    }

    async fn get(&self, key: &DedupKey) -> Result<Option<Entry>, Error> {
        let look = |statements: Arc<Statements>| -> BoxFuture<'_, _> {
            Box::pin(async move {
                let keys = std::slice::from_ref(key);
                let stored = self.0.look(&self.0.pool, &statements.look, keys).await;
                stored.map_err(|error| store_error("looking up keys", error))
            })
        };
        let stored = self.0.with_table(look).await?.into_iter().flatten().next();
        Ok(stored.and_then(|stored| stored.entry()))
    }

    async fn count(&self) -> Result<u64, Error> {
        let count = |statements: Arc<Statements>| -> BoxFuture<'_, _> {
            Box::pin(async move {
                self.0.number("counting keys", &statements.count, Params::None).await
            })
        };
        self.0.with_table(count).await
    }

    /// A pool of the user's stays open: it is theirs to close. The lanes' connections are closed.
    async fn close(&self) {
        if let Some(lanes) = self.0.lanes.get() {
            lanes.close().await;
        }
        if !self.0.foreign {
            self.0.pool.close().await;
        }
    }
}
