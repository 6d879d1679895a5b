//! The adapter: who may write when, and what the rows mean.

use std::fmt;
use std::future::Future;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable};
use sqlx::AssertSqlSafe;
use sqlx::query::Query;
use sqlx::sqlite::{
    Sqlite, SqliteArguments, SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePool,
    SqlitePoolOptions, SqliteSynchronous,
};

use super::super::contract::{Abilities, DedupAdapter, StoreFuture};
use super::super::replies::{Claimed, Completed, Released, Renewed};
use super::super::sql::queue::Batching;
use super::super::sql::{
    Answer, Call, Database, Grant, Identifier, KeptRow, Kind, Purging, Recorded, Stored,
    StoredByKey, after_claim, at, attach, duplicates, open_places, stored_by_key,
};
use super::super::stored::{Fetch, StoredData};
use super::super::terms::{CallTerms, Permanence};
use super::change::{Batchers, Look};
use super::file::Watched;
use super::rows::{
    BUSY, LOCKED, is_of_the_sql, kept, keys_json, numbers, placed, primary_code, store_error,
    stored,
};
use super::schema::{Asks, Statements, VERSION, create_sql};
use super::turn::{Turn, turn_of};
use crate::error::{ConfigError, Error, ErrorKind};
use crate::key::DedupKey;

/// How long a statement waits for another process's lock. Below the layer's default
/// `store_timeout`, so that a held file answers with an error and frees the connection.
const BUSY_TIMEOUT: Duration = Duration::from_secs(1);
const READERS: u32 = 4;
/// After how many pages, 16 MiB of them, the log is carried over into the file. The writer stands
/// still meanwhile: at SQLite's own 1,000 it did for a quarter of its time under load.
const CHECKPOINT: &str = "4000";
/// The first pause before opening the file is tried again; each is twice as long. Processes that
/// open a new file at once all want to switch it to WAL mode, for which SQLite waits for nobody.
const OPEN_DELAY: Duration = Duration::from_millis(50);
const OPEN_RETRIES: usize = 6;
const PREPARING: &str = "preparing the SQLite schema";
/// How long a transactional delivery waits for those before it.
const GATE_TIMEOUT: Duration = Duration::from_secs(5);

/// Keeps keys in a SQLite file.
///
/// Cloning makes another handle to the same connections.
#[derive(Clone)]
pub struct SqliteAdapter(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub(super) readers: SqlitePool,
    pub(super) writer: SqlitePool,
    /// Serves writers in the order of arrival, which SQLite's own lock does not.
    pub(super) turn: Arc<Turn>,
    table: Identifier,
    pub(super) statements: Statements,
    /// The same, with terms of its own for each key.
    pub(super) batched: Statements,
    batching: Batching,
    batchers: Option<Batchers>,
    pub(super) gate_timeout: Duration,
    /// Held once more by each claim or record under way of a key that has a row which may be taken.
    again: Arc<()>,
    pub(super) purging: Purging,
    file: Arc<Watched>,
    migrated: AtomicBool,
    pub(super) closed: AtomicBool,
    /// Whether the connections are the user's, whose settings are only looked at.
    pub(super) foreign: bool,
}

struct Settings {
    table: Identifier,
    gate_timeout: Duration,
    batching: Batching,
}

impl Default for Settings {
    fn default() -> Self {
        let (table, batching) = (Identifier::default_table(), Batching::new());
        Self { table, gate_timeout: GATE_TIMEOUT, batching }
    }
}

impl SqliteAdapter {
    /// Opens or creates the file that a `sqlite://` URL names, in WAL mode at
    /// `synchronous = FULL`, with one connection for writing and four for reading.
    ///
    /// The table is made by the first call that needs it, or by [`migrate`](Self::migrate).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] for a URL that is none or names no file (an in-memory database
    /// belongs to one connection; there is [`MemoryAdapter`](super::super::MemoryAdapter) for
    /// that), [`ErrorKind::Unavailable`] if the file cannot be opened.
    pub async fn connect(url: &str) -> Result<Self, Error> {
        let config = |error: ConfigError| Error::from(error);
        let in_memory = url.contains(":memory:") || url.contains("mode=memory");
        if !url.starts_with("sqlite:") || in_memory {
            return Err(config(ConfigError::InvalidUrl));
        }
        let options = SqliteConnectOptions::from_str(url)
            .map_err(|_| config(ConfigError::InvalidUrl))?
            .busy_timeout(BUSY_TIMEOUT);
        if options.get_filename().as_os_str().is_empty() {
            return Err(config(ConfigError::InvalidUrl));
        }
        let writing = options
            .clone()
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .pragma("wal_autocheckpoint", CHECKPOINT);
        let pool = || SqlitePoolOptions::new().test_before_acquire(false);
        let writer = (|| pool().max_connections(1).connect_with(writing.clone()))
            .retry(
                ExponentialBuilder::new()
                    .with_min_delay(OPEN_DELAY)
                    .with_max_times(OPEN_RETRIES)
                    .with_jitter(),
            )
            .when(|error| {
                let code = error.as_database_error().and_then(primary_code);
                matches!(code, Some(BUSY | LOCKED))
            })
            .sleep(tokio::time::sleep)
            .await
            .map_err(|error| {
                Error::new(ErrorKind::Unavailable, "opening the SQLite file").with_source(error)
            })?;
        let file = Arc::new(Watched::new(&options));
        let readers = pool().max_connections(READERS).connect_lazy_with(options);
        Ok(Self::over(readers, writer, file, Settings::default(), false))
    }

    /// An adapter over a pool of yours, on the file that your service uses anyway.
    ///
    /// The pool's settings stay as they are; `synchronous` below `FULL` and a journal mode other
    /// than WAL are warned about on first use. Give it a busy timeout below the layer's
    /// `store_timeout`, and more connections than handlers hold at once: renewals need one too.
    /// [`close`](super::super::MaintenanceAdapter::close) leaves it open.
    #[must_use]
    pub fn new(pool: SqlitePool) -> Self {
        let file = Arc::new(Watched::new(&pool.connect_options()));
        Self::over(pool.clone(), pool, file, Settings::default(), true)
    }

    /// The adapter with another table than `webhook_deliveries`.
    ///
    /// A handle that was cloned before keeps its table.
    #[must_use]
    pub fn table(self, table: Identifier) -> Self {
        self.with(|settings| settings.table = table)
    }

    /// How concurrent calls go out together; [`Batching::off`] for each on its own.
    ///
    /// There is one lane, on the connection that writes; what is looked up goes out together as
    /// well.
    #[must_use]
    pub fn batching(self, batching: Batching) -> Self {
        self.with(|settings| settings.batching = batching)
    }

    /// How long a transactional delivery waits for those before it, which run one at a time: 5 s,
    /// unless told otherwise. Past it, it is answered 503.
    ///
    /// Whatever else writes to the file in this process waits for as long, and is then refused: so
    /// is a handler that holds the transaction and calls the adapter beside it.
    #[must_use]
    pub fn gate_timeout(self, bound: Duration) -> Self {
        self.with(|settings| settings.gate_timeout = bound)
    }

    /// Makes the schema if it is not there. Safe to call from many processes at once.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`] or [`ErrorKind::Unavailable`] if the file cannot be read or written;
    /// the next call tries again.
    pub async fn migrate(&self) -> Result<(), Error> {
        self.0.check_open()?;
        self.0.file.check()?;
        self.0.migrate().await
    }

    /// The statements that [`migrate`](Self::migrate) runs, for those who run their own.
    #[must_use]
    pub fn schema_sql(&self) -> Vec<String> {
        create_sql(&self.0.table)
    }

    fn over(
        readers: SqlitePool,
        writer: SqlitePool,
        file: Arc<Watched>,
        settings: Settings,
        foreign: bool,
    ) -> Self {
        let Settings { table, gate_timeout, batching } = settings;
        let turn = turn_of(&writer.connect_options());
        Self(Arc::new(Inner {
            readers,
            writer,
            turn,
            statements: Statements::new(&table, Asks::One),
            batched: Statements::new(&table, Asks::Each),
            table,
            batching,
            batchers: batching.lane_count().map(|_| Batchers::new(batching)),
            gate_timeout,
            again: Arc::default(),
            purging: Purging::default(),
            file,
            migrated: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            foreign,
        }))
    }

    fn with(&self, change: impl FnOnce(&mut Settings)) -> Self {
        let Inner { readers, writer, file, foreign, table, gate_timeout, batching, .. } = &*self.0;
        let (table, gate_timeout, batching) = (table.clone(), *gate_timeout, *batching);
        let mut settings = Settings { table, gate_timeout, batching };
        change(&mut settings);
        Self::over(readers.clone(), writer.clone(), Arc::clone(file), settings, *foreign)
    }

    /// Makes a call; and once more if the table was gone, which is made anew.
    pub(super) async fn with_table<T, F>(&self, call: impl Fn() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        self.0.ready().await?;
        let error = match call().await {
            Ok(done) => return Ok(done),
            Err(error) => error,
        };
        if !self.0.had_no_table(&error).await {
            return Err(error);
        }
        self.0.ready().await?;
        call().await
    }

    /// Claims or records: what is known is read and not written.
    async fn take<T: Grant + Answer>(
        &self,
        kind: Kind,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<T>, Error> {
        self.with_table(|| self.take_once(kind, keys, terms)).await
    }

    async fn take_once<T: Grant + Answer>(
        &self,
        kind: Kind,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<T>, Error> {
        let stored = match &self.0.batchers {
            Some(batchers) => batchers.looks.submit(&self.0, Look::new(keys)).await?,
            None => self.0.read(keys).await?,
        };
        let found = stored.iter().flatten().count();
        let stored = stored.into_iter();
        let mut answers: Vec<Option<T>> =
            stored.map(|stored| T::known(&stored?, terms.token())).collect();
        let open = open_places(&answers);
        if !open.is_empty() {
            let known = keys.len() - open.len();
            let _again = (found > known).then(|| Arc::clone(&self.0.again));
            let taken = self.call_once(kind, &at(keys, &open), terms).await?;
            for (place, taken) in open.into_iter().zip(taken) {
                answers[place] = Some(taken);
            }
        }
        Ok(answers.into_iter().map(|answer| answer.unwrap_or_else(T::in_flight)).collect())
    }

    async fn call<T: Answer>(
        &self,
        kind: Kind,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<T>, Error> {
        self.with_table(|| self.call_once(kind, keys, terms)).await
    }

    async fn call_once<T: Answer>(
        &self,
        kind: Kind,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<T>, Error> {
        let call = Call::new(kind, keys, numbers(keys), terms);
        T::unwrap(match &self.0.batchers {
            Some(batchers) => batchers.calls.submit(&self.0, call).await?,
            None => {
                let alone =
                    |inner: Arc<Inner>, turn| async move { inner.writing(turn).alone(&call).await };
                self.0.in_turn(alone).await?
            }
        })
    }

    pub(super) fn inner(&self) -> &Arc<Inner> {
        &self.0
    }

    /// A statement with what it is asked.
    pub(super) fn bound(
        &self,
        sql: &Arc<str>,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Query<'static, Sqlite, SqliteArguments> {
        sqlx::query(AssertSqlSafe(Arc::clone(sql)))
            .bind(keys_json(keys))
            .bind(terms.token().as_bytes().to_vec())
            .bind(terms.retention_ms())
            .bind(terms.lease_ms())
    }
}

impl fmt::Debug for SqliteAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteAdapter").field("table", &self.0.table).finish_non_exhaustive()
    }
}

impl Inner {
    pub(super) async fn ready(self: &Arc<Self>) -> Result<(), Error> {
        self.check_open()?;
        self.file.check()?;
        if self.migrated.load(Ordering::Acquire) { Ok(()) } else { self.migrate().await }
    }

    fn check_open(&self) -> Result<(), Error> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Unavailable, "using an adapter that was closed"));
        }
        Ok(())
    }

    async fn migrate(self: &Arc<Self>) -> Result<(), Error> {
        let fault = |error| store_error(PREPARING, error);
        if !self.has_schema().await.map_err(fault)? {
            let create = |inner: Arc<Self>, _turn| async move { inner.create().await };
            self.in_turn(create).await?;
        }
        if self.foreign {
            self.look_at_settings().await.map_err(fault)?;
        }
        // A pool of the user's may have made the file just now.
        self.file.note();
        self.migrated.store(true, Ordering::Release);
        Ok(())
    }

    /// Dropped half-way, or failing, the transaction rolls back and the next call begins anew.
    async fn create(&self) -> Result<(), Error> {
        let fault = |error| store_error(PREPARING, error);
        // IMMEDIATE: two processes that both find nothing take turns.
        let mut tx = self.writer.begin_with("BEGIN IMMEDIATE").await.map_err(fault)?;
        for statement in &self.statements.create {
            let create = sqlx::query(AssertSqlSafe(Arc::clone(statement)));
            create.execute(&mut *tx).await.map_err(fault)?;
        }
        tx.commit().await.map_err(fault)
    }

    /// Whether a call has failed because the table was gone: dropped, or in a file that was restored
    /// without it. SQLite's code for that is the one for any error in SQL, so the table is looked for.
    async fn had_no_table(&self, error: &Error) -> bool {
        if !is_of_the_sql(error) {
            return false;
        }
        match self.has_schema().await {
            // If it is there, another call that missed it has made it since.
            Ok(there) => {
                if !there {
                    self.forget_the_table();
                }
                true
            }
            Err(_) => false,
        }
    }

    /// Makes the schema in a transaction of the user's, if it is not there; whether it stays is for
    /// that transaction.
    pub(super) async fn ready_within(
        &self,
        connection: &mut SqliteConnection,
    ) -> Result<(), Error> {
        self.check_open()?;
        if self.migrated.load(Ordering::Acquire) {
            return Ok(());
        }
        for statement in &self.statements.create {
            sqlx::query(AssertSqlSafe(Arc::clone(statement)))
                .execute(&mut *connection)
                .await
                .map_err(|error| store_error(PREPARING, error))?;
        }
        Ok(())
    }

    /// Whether the table is gone, as a transaction of the user's sees it.
    pub(super) async fn lacks_its_table(&self, connection: &mut SqliteConnection) -> bool {
        let tables = AssertSqlSafe(Arc::clone(&self.statements.tables));
        let tables: Result<i64, _> = sqlx::query_scalar(tables).fetch_one(connection).await;
        let is_gone = tables.is_ok_and(|tables| tables != 2);
        if is_gone {
            self.forget_the_table();
        }
        is_gone
    }

    fn forget_the_table(&self) {
        if self.migrated.swap(false, Ordering::AcqRel) {
            tracing::warn!(
                target: "tower_dedup",
                table = self.table.as_str(),
                "the table of the SQLite store is gone, and its keys with it: it is made anew"
            );
        }
    }

    async fn has_schema(&self) -> Result<bool, sqlx::Error> {
        let scalar = async |sql: &Arc<str>| {
            sqlx::query_scalar::<_, i64>(AssertSqlSafe(Arc::clone(sql)))
                .fetch_one(&self.readers)
                .await
        };
        Ok(scalar(&self.statements.tables).await? == 2
            && scalar(&self.statements.version).await? >= VERSION)
    }

    async fn look_at_settings(&self) -> Result<(), sqlx::Error> {
        let synchronous: i64 =
            sqlx::query_scalar("PRAGMA synchronous").fetch_one(&self.writer).await?;
        let journal: String =
            sqlx::query_scalar("PRAGMA journal_mode").fetch_one(&self.writer).await?;
        if synchronous < 2 {
            tracing::warn!(
                target: "tower_dedup",
                synchronous,
                "the SQLite pool runs below synchronous = FULL: a power cut can lose a completed \
                 key, and its event would run again"
            );
        }
        if !journal.eq_ignore_ascii_case("wal") {
            tracing::warn!(
                target: "tower_dedup",
                journal_mode = journal,
                "the SQLite file is not in WAL mode: duplicates wait for writers"
            );
        }
        Ok(())
    }

    /// Whether keys are being claimed or recorded of which there are rows. A guess: it says which
    /// statement is tried first.
    pub(super) fn some_are_there(&self) -> bool {
        Arc::strong_count(&self.again) > 1
    }

    /// What is stored of each key.
    pub(super) async fn read(&self, keys: &[DedupKey]) -> Result<Vec<Option<Stored>>, Error> {
        let fault = |error| store_error("looking up keys", error);
        let rows = sqlx::query(AssertSqlSafe(Arc::clone(&self.statements.read)))
            .bind(keys_json(keys))
            .fetch_all(&self.readers)
            .await
            .map_err(fault)?;
        placed(keys, &rows, stored).map_err(fault)
    }
}

impl DedupAdapter for SqliteAdapter {
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

impl SqliteAdapter {
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
                let recorded = self.take::<Recorded>(Kind::Record, keys, terms).await?;
                let mut claimed: Vec<Claimed> = recorded.into_iter().map(Into::into).collect();
                if fetch != Fetch::Nothing {
                    attach(keys, &mut claimed, &stored);
                }
                Ok(claimed)
            }
            Permanence::OnCompletion { .. } => {
                let mut claimed = self.take::<Claimed>(Kind::Claim, keys, terms).await?;
                if fetch != Fetch::Nothing {
                    let stored = self.stored(duplicates(keys, &claimed), fetch).await;
                    let stored = stored.map_err(|error| after_claim(error, &claimed))?;
                    attach(keys, &mut claimed, &stored);
                }
                Ok(claimed)
            }
        }
    }

    /// What is stored with those of the keys that are complete.
    pub(super) async fn stored(
        &self,
        keys: Vec<DedupKey>,
        fetch: Fetch,
    ) -> Result<StoredByKey, Error> {
        let read =
            async |keys: Vec<DedupKey>| self.with_table(|| self.0.recall(&keys, fetch)).await;
        stored_by_key(keys, fetch, read).await
    }
}

impl Inner {
    async fn recall(
        &self,
        keys: &[DedupKey],
        wanted: Fetch,
    ) -> Result<Vec<Option<StoredData>>, Error> {
        let fault = |error| store_error("recalling keys", error);
        let rows = sqlx::query(AssertSqlSafe(Arc::clone(self.statements.recall(wanted))))
            .bind(keys_json(keys))
            .fetch_all(&self.readers)
            .await
            .map_err(fault)?;
        let kept = placed(keys, &rows, kept).map_err(fault)?.into_iter();
        kept.map(|kept| kept.map(KeptRow::kept).transpose()).collect()
    }
}
