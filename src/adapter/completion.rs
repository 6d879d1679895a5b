//! [`Completion`]: the statement that completes events in the transaction of a handler.

use std::fmt;
use std::sync::{Arc, OnceLock};

#[cfg(any(feature = "postgres", feature = "sqlite"))]
use super::own_completion::{OwnCompletion, Within};

/// A statement that completes the events of a delivery in the handler's own transaction, for any
/// driver.
///
/// [`Delivery::completion`](crate::Delivery::completion) makes it. Execute it in the transaction
/// that has the handler's writes, and commit. The transaction then completes all events that the
/// delivery holds, or it cannot commit: if an event is complete already, the statement is an error.
/// [The guide](crate::guide::transactions#other-drivers) has the call of each driver.
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
    /// That of a store of this crate is made when it is first asked for, because most transactions
    /// that this crate begins need none.
    parameter: OnceLock<String>,
    /// What a store of this crate knows of its completion.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) own: Option<Box<OwnCompletion>>,
}

impl Completion {
    /// Makes a completion of a store of your own: a statement with one text parameter. It must fail
    /// if it does not complete every event.
    pub fn new(sql: impl Into<Arc<str>>, parameter: impl Into<String>) -> Self {
        Self {
            sql: sql.into(),
            parameter: OnceLock::from(parameter.into()),
            #[cfg(any(feature = "postgres", feature = "sqlite"))]
            own: None,
        }
    }

    /// Makes a completion of a store of this crate.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(super) fn of(sql: &Arc<str>, own: OwnCompletion) -> Self {
        Self { sql: Arc::clone(sql), parameter: OnceLock::new(), own: Some(Box::new(own)) }
    }

    /// Returns the statement. It has one parameter, and is the same for every event of the store.
    ///
    /// On Postgres it returns one row with the column `completion`; on SQLite it returns none.
    #[must_use]
    pub fn sql(&self) -> &str {
        &self.sql
    }

    /// Returns the value of the parameter, a text: `$1` on Postgres, `?1` on SQLite; that of a
    /// store of your own is as its database writes it.
    #[must_use]
    pub fn parameter(&self) -> &str {
        #[cfg(any(feature = "postgres", feature = "sqlite"))]
        if let Some(own) = &self.own {
            return self.parameter.get_or_init(|| (own.make_parameter)(own));
        }
        self.parameter.get().map_or("", String::as_str)
    }

    /// Allows the statement to be the first write in its transaction.
    ///
    /// By default, such a statement fails on Postgres, because it could be outside the handler's
    /// transaction, as with `&db` in place of `&txn`: it would then complete the events alone.
    /// Above READ COMMITTED, complete first: see [the guide](crate::guide::transactions).
    #[must_use]
    pub fn as_first_statement(self) -> Self {
        #[cfg(any(feature = "postgres", feature = "sqlite"))]
        return self.within(Within::Any);
        #[cfg(not(any(feature = "postgres", feature = "sqlite")))]
        self
    }

    /// Returns the completion for a handler that may hold its transaction for so long.
    #[cfg(feature = "postgres")]
    pub(crate) fn for_handler(mut self, bound: std::time::Duration) -> Self {
        use super::own_completion::OwnDatabase::Postgres;
        if let Some(own) = &mut self.own
            && let Postgres { idle: Some(idle), .. } = &mut own.database
        {
            *idle = bound.max(*idle);
        }
        self
    }

    /// Returns the completion for a transaction of this kind.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn within(mut self, within: Within) -> Self {
        if let Some(own) = &mut self.own {
            (own.within, self.parameter) = (within, OnceLock::new());
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
