//! [`Completion`]: a statement that completes events in a transaction of the handler's.

use std::fmt;
use std::sync::Arc;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use std::time::Duration;

/// A statement that completes the events of a delivery in the handler's own transaction, for any driver.
///
/// [`Delivery::completion`](crate::Delivery::completion) makes it. Execute it in the transaction that has the
/// handler's writes, and commit. The transaction then completes all events that the delivery holds, or it cannot
/// commit: if an event is complete already, the statement is an error. [The
/// guide](crate::guide::transactions#other-drivers) has the call of each driver.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use tower_dedup::adapter::SqliteAdapter;
/// use tower_dedup::sqlx::{self, AssertSqlSafe, SqlitePool};
/// use tower_dedup::{BoxError, DedupKey, Deduplicator, RunOutcome};
///
/// # let dir = tempfile::tempdir()?;
/// # let url = format!("sqlite://{}?mode=rwc", dir.path().join("shop.db").display());
/// # let pool = SqlitePool::connect(&url).await?;
/// # sqlx::query("CREATE TABLE orders (id TEXT)").execute(&pool).await?;
/// let dedup = Deduplicator::transactional(SqliteAdapter::new(pool.clone()));
/// let key = DedupKey::new("shop", "order_17")?;
/// for is_first in [true, false] {
///     let ran = dedup.run(&key, async |event| {
///         let completion = event.completion()?;
///         let mut tx = pool.begin().await?; // of any driver
///         sqlx::query("INSERT INTO orders VALUES ($1)").bind(event.id()).execute(&mut *tx).await?;
///         let complete = sqlx::query(AssertSqlSafe(completion.sql().to_owned()));
///         complete.bind(completion.parameter()).execute(&mut *tx).await?;
///         tx.commit().await?;
///         Ok::<_, BoxError>(())
///     });
///     assert_eq!(matches!(ran.await, Ok(RunOutcome::First(()))), is_first);
/// }
/// let orders = sqlx::query_scalar("SELECT count(*) FROM orders").fetch_one(&pool);
/// assert_eq!(orders.await.ok(), Some(1_i64));
/// # Ok::<(), BoxError>(())
/// # }).unwrap();
/// ```
#[derive(Clone)]
pub struct Completion {
    pub(crate) sql: Arc<str>,
    parameter: String,
    /// The parameter of a statement that may be the first of its transaction.
    first: Option<String>,
    /// The generation of the statement's plan, on connections of sqlx.
    #[cfg(feature = "postgres")]
    pub(crate) generation: Option<u32>,
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) own: Option<Own>,
}

/// What only the stores of this crate know, for a transaction that this crate has begun.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
#[derive(Clone)]
pub(crate) struct Own {
    /// Returns a row if this transaction has completed the events. It takes the parameter of [`Completion`].
    pub(crate) check: Arc<str>,
    #[cfg(feature = "postgres")]
    pub(crate) lean: Option<Lean>,
    /// How long a transaction waits for those before it, in SQLite. `None` in Postgres.
    pub(crate) write_lock_timeout: Option<Duration>,
    /// How long a transaction may be idle in Postgres, in milliseconds, if the crate bounds it.
    #[cfg(feature = "postgres")]
    pub(crate) idle_ms: Option<i32>,
}

/// A faster statement for one event, with its parameters. It refuses by writing no row.
#[cfg(feature = "postgres")]
#[derive(Clone)]
pub(crate) struct Lean {
    pub(crate) sql: Arc<str>,
    pub(crate) key: u128,
    pub(crate) token: u128,
    pub(crate) mark: String,
    pub(crate) retention_ms: i64,
}

impl Completion {
    /// Makes a completion of a store of your own: a statement with one text parameter. It must fail if it does not
    /// complete every event.
    pub fn new(sql: impl Into<Arc<str>>, parameter: impl Into<String>) -> Self {
        Self {
            sql: sql.into(),
            parameter: parameter.into(),
            first: None,
            #[cfg(feature = "postgres")]
            generation: None,
            #[cfg(any(feature = "postgres", feature = "sqlite"))]
            own: None,
        }
    }

    /// Adds the parameter that [`as_first_statement`](Self::as_first_statement) chooses.
    #[cfg(feature = "postgres")]
    pub(crate) fn with_first(self, parameter: String) -> Self {
        Self { first: Some(parameter), ..self }
    }

    #[cfg(feature = "postgres")]
    pub(crate) fn with_generation(self, generation: Option<u32>) -> Self {
        Self { generation, ..self }
    }

    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn with_own(self, own: Own) -> Self {
        Self { own: Some(own), ..self }
    }

    /// Returns the statement. It has one parameter, and is the same for every event of the store.
    ///
    /// On Postgres it returns one row with the column `completion`; on SQLite it returns none.
    #[must_use]
    pub fn sql(&self) -> &str {
        &self.sql
    }

    /// Returns the value of the parameter, a text: `$1` on Postgres, `?1` on SQLite; that of a store of your own is as
    /// its database writes it.
    #[must_use]
    pub fn parameter(&self) -> &str {
        &self.parameter
    }

    /// Lets the statement be the first that writes in its transaction.
    ///
    /// By default it fails there on Postgres, because it could be outside of the handler's transaction, as after
    /// `&db` in place of `&txn`: it would then complete the events alone. Above READ COMMITTED, complete first: see
    /// [the guide](crate::guide::transactions).
    #[must_use]
    pub fn as_first_statement(mut self) -> Self {
        if let Some(parameter) = self.first.take() {
            self.parameter = parameter;
        }
        self
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The parameter may hold a response, which may be personal data.
        f.debug_struct("Completion").field("sql", &self.sql).finish_non_exhaustive()
    }
}
